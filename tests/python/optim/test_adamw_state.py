"""The state as its reader sees it: zero-copy tensors that are right when they are read, and outlive everything."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

import forebay
from support.optim import TINY, give_gradients, make, run, snapshot, train
from support.tensors import assert_same, needs_cuda, random

if TYPE_CHECKING:
    from collections.abc import Callable


def test_state_is_zero_copy_and_stays_in_its_place(device: torch.device, placement: str) -> None:
    parameters = make(device=device, dtype=[torch.float32, torch.bfloat16])
    optimizer = forebay.AdamW(parameters, amsgrad=True, placement=placement, chunk_bytes=TINY)
    optimizer.prepare()
    where = [{kind: value.data_ptr() for kind, value in optimizer.state[p].items()} for p in parameters]
    kept = [dict(optimizer.state[parameter]) for parameter in parameters]
    train(optimizer, parameters, 4)
    for parameter, places, views in zip(parameters, where, kept, strict=True):
        assert {kind: value.data_ptr() for kind, value in optimizer.state[parameter].items()} == places
        assert all(torch.equal(optimizer.state[parameter][kind], view) for kind, view in views.items())
        assert views["step"].item() == 4


def test_what_is_written_into_the_state_is_used(device: torch.device, placement: str) -> None:
    ends = []
    for write in (True, False):
        parameters = make([(300,), (200,)], device=device)
        optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement, chunk_bytes=TINY)
        train(optimizer, parameters, 1)
        if write:
            for parameter in parameters:
                for kind in ("exp_avg", "exp_avg_sq", "step"):
                    optimizer.state[parameter][kind].zero_()
        else:
            optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement)
        train(optimizer, parameters, range(1, 3))
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


def odd_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    return {
        "contiguous": random((20, 48), 1).to(device),
        "transposed": random((48, 20), 1).to(device).t(),
        "permuted": random((4, 5, 6), 1).to(device).permute(2, 0, 1),
        "channels_last": random((4, 6, 5, 3), 1).to(device).to(memory_format=torch.channels_last),
        "scalar": random((), 1).to(device),
        "empty": torch.empty((0, 3), device=device),
        "offset": random((100,), 1).to(device)[7:],
    }


def test_state_has_the_shape_and_strides_of_its_parameter(device: torch.device, placement: str) -> None:
    parameters = {name: torch.nn.Parameter(data) for name, data in odd_tensors(device).items()}
    optimizer = forebay.AdamW(parameters.values(), placement=placement, amsgrad=True)
    optimizer.prepare()
    for name, parameter in parameters.items():
        for kind in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            value = optimizer.state[parameter][kind]
            assert value.shape == parameter.shape, name
            assert value.stride() == parameter.stride(), name
            assert value.dtype == torch.float32
            assert not value.requires_grad
            assert value.device == (device if placement == "resident" else torch.device("cpu"))


def test_state_of_a_slice_is_contiguous(device: torch.device, placement: str) -> None:
    parameter = torch.nn.Parameter(random((40, 40), 1).to(device)[::2, 3:20])
    optimizer = forebay.AdamW([parameter], placement=placement)
    optimizer.prepare()
    assert optimizer.state[parameter]["exp_avg"].is_contiguous()
    assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


def test_storages_have_exactly_the_size_of_their_tensor(device: torch.device) -> None:
    parameters = make([(1000,), (7, 9), ()], device=device, dtype=[torch.float32, torch.bfloat16])
    optimizer = forebay.AdamW(parameters, amsgrad=True)
    optimizer.prepare()
    for parameter in parameters:
        for kind, value in optimizer.state[parameter].items():
            assert value.untyped_storage().nbytes() == 4 * value.numel(), kind
            assert value.storage_offset() == 0


def saved_bytes(value: object) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return len(buffer.getvalue())


def test_saving_and_copying_one_tensor_costs_that_tensor(device: torch.device) -> None:
    parameters = make([(50_000,), (100,)], device=device)
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    small, large = (optimizer.state[parameter]["exp_avg"] for parameter in reversed(parameters))
    assert saved_bytes(small) < 400 + 3000
    assert saved_bytes(large) < 200_000 + 3000
    assert saved_bytes(optimizer.state_dict()) < 8 * 50_100 + 10_000
    assert copy.deepcopy(small).untyped_storage().nbytes() == 400


@needs_cuda
def test_state_is_pinned() -> None:
    parameters = make(device="cuda", dtype=torch.bfloat16)
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    for parameter in parameters:
        for kind in ("exp_avg", "exp_avg_sq", "master_param"):
            if parameter.numel():
                assert optimizer.state[parameter][kind].is_pinned()


READERS: dict[str, Callable[[forebay.AdamW, torch.Tensor], torch.Tensor]] = {
    "item": lambda optimizer, p: optimizer.state[p]["exp_avg"].clone(),
    "get": lambda optimizer, p: optimizer.state.get(p)["exp_avg"].clone(),
    "items": lambda optimizer, p: dict(optimizer.state.items())[p]["exp_avg"].clone(),
    "values": lambda optimizer, p: [v["exp_avg"].clone() for v in optimizer.state.values()][-1],
    "state_dict": lambda optimizer, p: list(optimizer.state_dict()["state"].values())[-1]["exp_avg"].clone(),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_state_read_right_after_a_step_is_that_steps(
    device: torch.device, reader: Callable[[forebay.AdamW, torch.Tensor], torch.Tensor]
) -> None:
    # On CUDA the stores of a few hundred MB of state are still under way when the step returns.
    elements = 20_000_000 if device.type == "cuda" else 200_000
    parameters = [torch.nn.Parameter(torch.zeros(elements, device=device)) for _ in range(2)]
    optimizer = forebay.AdamW(parameters, betas=(0.5, 0.999), slots=8, chunk_bytes=16 << 20)
    optimizer.prepare()
    expected = 0.0
    for step in range(1, 6):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, float(step))
        optimizer.step()
        read = reader(optimizer, parameters[1])
        expected = 0.5 * expected + 0.5 * step
        assert (read == expected).all()


def test_reading_the_state_of_an_unknown_parameter_is_as_in_torch(device: torch.device) -> None:
    parameters = make([(5,), (6,)], device=device)
    optimizer = forebay.AdamW(parameters[:1])
    train(optimizer, parameters[:1], 1)
    assert optimizer.state[parameters[1]] == {}
    assert optimizer.state.get(make([(2,)])[0], "nothing") == "nothing"


# Lifetimes.


def test_views_outlive_close(device: torch.device, placement: str) -> None:
    parameters = make([(3000,), (5,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, chunk_bytes=TINY)
    train(optimizer, parameters, 6)
    views = [dict(optimizer.state[parameter]) for parameter in parameters]
    optimizer.close()
    optimizer.close()
    expected = run([(3000,), (5,)], device=device)
    for view, values in zip(views, expected, strict=True):
        assert all(torch.equal(view[kind].cpu(), values[kind]) for kind in view)
    # Through the closed optimizer too: a last checkpoint must be possible.
    assert_same(snapshot(optimizer, parameters), expected)
    assert len(optimizer.state_dict()["state"]) == 2
    views[0]["exp_avg"].fill_(3.0)


def test_views_outlive_the_optimizer(device: torch.device) -> None:
    parameters = make([(3000,), (5,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, chunk_bytes=TINY)
    train(optimizer, parameters, 6)
    view = optimizer.state[parameters[0]]["exp_avg"]
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    # Memory given back would be taken by these.
    others = [run([(3000,), (5,)], device=device, lr=0.5) for _ in range(3)]
    assert torch.equal(view, run([(3000,), (5,)], device=device)[0]["exp_avg"])
    assert len(others) == 3


def test_a_closed_optimizer_says_so(device: torch.device, placement: str) -> None:
    parameters = make([(50,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    before = snapshot(optimizer, parameters)
    give_gradients(parameters, 1)
    for act in (optimizer.step, optimizer.prepare, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(forebay.OptionError, match="closed"):
            act()
    optimizer.synchronize()
    optimizer.refresh_master_weights()
    assert_same(before, snapshot(optimizer, parameters))
    stats = optimizer.stats()
    assert (stats["device_bytes"], stats["pinned_bytes"]) == (0, 0)


def test_closing_before_any_use_is_fine(device: torch.device) -> None:
    optimizer = forebay.AdamW(make(device=device))
    optimizer.close()
    optimizer.close()
    with pytest.raises(forebay.OptionError, match="closed"):
        optimizer.prepare()


def test_growth_keeps_views_alive_and_right(device: torch.device) -> None:
    parameters = make([(500,)] * 6, device=device)
    optimizer = forebay.AdamW(parameters[:1], chunk_bytes=TINY)
    train(optimizer, parameters[:1], 1)
    views = [optimizer.state[parameters[0]]["exp_avg"]]
    for i in range(1, 6):
        optimizer.add_param_group({"params": [parameters[i]]})
        train(optimizer, parameters[: i + 1], range(i, i + 1))
        views.append(optimizer.state[parameters[i]]["exp_avg"])
    for view, parameter in zip(views, parameters, strict=True):
        assert view.data_ptr() == optimizer.state[parameter]["exp_avg"].data_ptr()
        assert view.abs().sum() > 0
