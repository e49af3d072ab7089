"""Master weights of bf16 and f16 parameters: kept in f32 on the host, and led by the weights."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch

import forebay
from support.optim import TINY, clone, give_gradients, make, run, snapshot, train
from support.tensors import assert_same, needs_cuda, random, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

HALF = [torch.bfloat16, torch.float16]
SHAPES = ((300,), (20, 30), (3,))


@pytest.fixture(params=HALF, ids=["bf16", "f16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Return a type of 16 bits."""
    return request.param


def test_masters_are_kept_by_default_in_f32_on_the_host(device: torch.device, dtype: torch.dtype) -> None:
    parameters = make(SHAPES, device=device, dtype=dtype)
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 2)
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert list(state) == ["step", "exp_avg", "exp_avg_sq", "master_param"]
        for kind in ("exp_avg", "exp_avg_sq", "master_param"):
            assert state[kind].dtype == torch.float32
            assert state[kind].device.type == "cpu"
            assert state[kind].shape == parameter.shape
        assert parameter.dtype == dtype
        assert same_bits(parameter.cpu(), state["master_param"].to(dtype))


@pytest.mark.parametrize("master_weights", [None, True, False])
def test_f32_parameters_are_not_stored_twice(device: torch.device, placement: str, master_weights: bool | None) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.AdamW(parameters, placement=placement, master_weights=master_weights)
    train(optimizer, parameters, 1)
    assert all("master_param" not in optimizer.state[parameter] for parameter in parameters)


def test_masters_can_be_switched_off(device: torch.device, placement: str, dtype: torch.dtype) -> None:
    parameters = make(SHAPES, device=device, dtype=dtype)
    optimizer = forebay.AdamW(parameters, placement=placement, master_weights=False)
    train(optimizer, parameters, 3)
    assert all(list(optimizer.state[p]) == ["step", "exp_avg", "exp_avg_sq"] for p in parameters)


def test_masters_are_what_f32_parameters_would_be(device: torch.device, placement: str, dtype: torch.dtype) -> None:
    parameters = make(SHAPES, device=device, dtype=dtype)
    singles = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement)
    reference = forebay.AdamW(singles, lr=1e-2, placement=placement)
    for step in range(10):
        give_gradients(parameters, step)
        for parameter, single in zip(parameters, singles, strict=True):
            single.grad = parameter.grad.float()
        optimizer.step()
        reference.step()
        for parameter, single in zip(parameters, singles, strict=True):
            assert same_bits(optimizer.state[parameter]["master_param"].cpu(), single.detach().cpu())
            assert same_bits(parameter, single.to(dtype))


def test_steps_below_the_rounding_of_the_weight_add_up(device: torch.device, placement: str) -> None:
    ends = []
    for master_weights in (True, False):
        parameter = torch.nn.Parameter(torch.ones(8, device=device, dtype=torch.bfloat16))
        optimizer = forebay.AdamW(
            [parameter], lr=1e-4, weight_decay=0.0, placement=placement, master_weights=master_weights
        )
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        ends.append(parameter.detach().float().cpu())
    torch.testing.assert_close(ends[0], torch.full((8,), 0.99), rtol=0, atol=4e-3)
    assert torch.equal(ends[1], torch.ones(8))


def copy_in_place(parameter: torch.nn.Parameter, new: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(new)


def swap_data(parameter: torch.nn.Parameter, new: torch.Tensor) -> None:
    parameter.data = new.clone()


def copy_behind_autograd(parameter: torch.nn.Parameter, new: torch.Tensor) -> None:
    parameter.data.copy_(new)  # Bumps no version that the optimizer could see.


def load_module(parameter: torch.nn.Parameter, new: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.weight = parameter
    module.load_state_dict({"weight": new})


REPLACEMENTS = {
    "copy_": copy_in_place,
    "data =": swap_data,
    "data.copy_": copy_behind_autograd,
    "load_state_dict": load_module,
}


@pytest.mark.parametrize("replace", REPLACEMENTS.values(), ids=REPLACEMENTS)
@pytest.mark.parametrize("when", ["before prepare", "before step 0", "before step 3"])
def test_weights_that_were_replaced_are_where_the_next_step_starts(
    device: torch.device,
    placement: str,
    dtype: torch.dtype,
    replace: Callable[[torch.nn.Parameter, torch.Tensor], None],
    when: str,
) -> None:
    parameter = make([(300,)], device=device, dtype=dtype)[0]
    optimizer = forebay.AdamW([parameter], lr=1e-2, placement=placement, chunk_bytes=TINY)
    # Out of the range of the old ones: where a weight is set to what it was, its master stays.
    new = (random((300,), 77) + 50).to(device, dtype)
    if when == "before prepare":
        replace(parameter, new)
    optimizer.prepare()
    if when == "before step 0":
        replace(parameter, new)
    if when == "before step 3":
        train(optimizer, [parameter], 3)
        replace(parameter, new)
    moments = snapshot(optimizer, [parameter])[0]
    give_gradients([parameter], 9)
    optimizer.step()

    single = torch.nn.Parameter(new.float())
    single.grad = parameter.grad.float()
    reference = forebay.AdamW([single], lr=1e-2, placement=placement)
    reference.prepare()
    for kind in ("step", "exp_avg", "exp_avg_sq"):
        reference.state[single][kind].copy_(moments[kind])
    reference.step()
    assert same_bits(optimizer.state[parameter]["master_param"].cpu(), single.detach().cpu())
    assert same_bits(parameter, single.to(dtype))


def test_only_the_elements_that_were_replaced_give_way(device: torch.device, placement: str) -> None:
    parameter = make([(300,)], device=device, dtype=torch.bfloat16)[0]
    optimizer = forebay.AdamW([parameter], lr=1e-2, placement=placement)
    train(optimizer, [parameter], 3)
    master = optimizer.state[parameter]["master_param"].cpu().clone()
    with torch.no_grad():
        parameter[100:200] = 5.0
    optimizer.refresh_master_weights()
    expected = master.clone()
    expected[100:200] = 5.0
    assert same_bits(optimizer.state[parameter]["master_param"].cpu(), expected)
    # Master and weight differ elsewhere, so there was something to keep.
    assert not torch.equal(expected[:100], parameter.detach()[:100].float().cpu())


def test_refreshing_without_a_change_changes_no_bit(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device, dtype=[torch.bfloat16, torch.float32, torch.float16])
    optimizer = forebay.AdamW(parameters, placement=placement)
    optimizer.refresh_master_weights()
    train(optimizer, parameters, 3)
    before = snapshot(optimizer, parameters)
    optimizer.refresh_master_weights()
    assert_same(before, snapshot(optimizer, parameters))


def test_prepare_fills_masters_with_the_weights(device: torch.device, placement: str, dtype: torch.dtype) -> None:
    parameters = [
        *make(SHAPES, device=device, dtype=dtype),
        torch.nn.Parameter(random((30, 40), 3).to(device, dtype).t()),
        torch.nn.Parameter(random((30, 40), 3).to(device, dtype)[::2, ::3]),
    ]
    optimizer = forebay.AdamW(parameters, placement=placement)
    optimizer.prepare()
    for parameter in parameters:
        assert same_bits(optimizer.state[parameter]["master_param"].cpu(), parameter.detach().float().cpu())


def test_a_true_resume_keeps_the_saved_master(device: torch.device, placement: str, dtype: torch.dtype) -> None:
    expected = run(SHAPES, device=device, dtype=dtype, steps=8, placement=placement)
    parameters = make(SHAPES, device=device, dtype=dtype)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement)
    train(optimizer, parameters, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [parameter.detach().clone() for parameter in parameters]
    for order in ("weights first", "state first", "weights after prepare"):
        resumed = make(SHAPES, device=device, dtype=dtype, seed=5)
        fresh = forebay.AdamW(resumed, lr=7.0, placement=placement)
        if order == "weights after prepare":
            fresh.prepare()
        if order == "state first":
            fresh.load_state_dict(saved)
        for parameter, weight in zip(resumed, weights, strict=True):
            copy_in_place(parameter, weight)
        if order != "state first":
            fresh.load_state_dict(saved)
        fresh.prepare()
        train(fresh, resumed, range(4, 8))
        assert_same(snapshot(fresh, resumed), expected)


def test_a_state_dict_with_other_weights_gives_way_to_the_weights(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device, dtype=torch.bfloat16)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 3)
    others = make(SHAPES, device=device, dtype=torch.bfloat16, seed=8)
    fresh = forebay.AdamW(others, placement=placement)
    fresh.load_state_dict(optimizer.state_dict())
    fresh.refresh_master_weights()
    for parameter in others:
        master = fresh.state[parameter]["master_param"].to(device)
        assert same_bits(master.bfloat16(), parameter.detach())


def test_a_state_dict_without_masters_starts_them_from_the_weights(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device, dtype=torch.bfloat16)
    optimizer = forebay.AdamW(parameters, placement=placement, master_weights=False)
    train(optimizer, parameters, 2)
    others = clone(parameters)
    fresh = forebay.AdamW(others, placement=placement)
    train(fresh, others, 1)
    fresh.load_state_dict(optimizer.state_dict())
    for parameter in others:
        assert same_bits(fresh.state[parameter]["master_param"].cpu(), parameter.detach().float().cpu())


def test_overflow_of_the_weight_is_kept_apart_from_its_master(device: torch.device, placement: str) -> None:
    parameter = torch.nn.Parameter(torch.full((4,), 65504.0, device=device, dtype=torch.float16))
    optimizer = forebay.AdamW([parameter], lr=100.0, weight_decay=0.0, placement=placement)
    for _ in range(2):
        parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
    assert torch.isinf(parameter).all()
    assert (optimizer.state[parameter]["master_param"] > 65504).all()
    assert torch.isfinite(optimizer.state[parameter]["master_param"]).all()


@needs_cuda
def test_a_master_read_before_its_first_step_survives_its_neighbours_stores() -> None:
    # Both lie in one chunk, whose store is under way when the second master is looked at.
    parameters = make([(2_000_000,), (2_000_000,)], device="cuda", dtype=torch.bfloat16)
    optimizer = forebay.AdamW(parameters, chunk_bytes=64 << 20)
    for step in range(5):
        train(optimizer, parameters[:1], range(step, step + 1))
        master = optimizer.state[parameters[1]]["master_param"]
        optimizer.synchronize()
        assert same_bits(master, parameters[1].detach().float().cpu())
        optimizer.state.fill(optimizer.state.rooms[id(parameters[1])], {})


def test_a_master_never_stepped_is_there_after_close(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device, dtype=torch.bfloat16)
    optimizer = forebay.AdamW(parameters, placement=placement)
    optimizer.prepare()
    optimizer.close()
    for parameter in parameters:
        assert same_bits(optimizer.state[parameter]["master_param"].cpu(), parameter.detach().float().cpu())


def test_a_loaded_master_is_what_is_read_before_the_weights_are_loaded(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device, dtype=torch.bfloat16)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    others = make(SHAPES, device=device, dtype=torch.bfloat16, seed=6)
    fresh = forebay.AdamW(others, placement=placement)
    fresh.load_state_dict(saved)
    for i, parameter in enumerate(others):
        assert same_bits(fresh.state[parameter]["master_param"], saved["state"][i]["master_param"])
