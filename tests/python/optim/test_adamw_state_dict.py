"""Saving and loading in torch's own format, both ways, in place."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import forebay
from support.optim import KINDS, SHAPES, TINY, clone, give_gradients, groups_of, make, run, snapshot, train
from support.tensors import assert_same, needs_cuda, same_bits


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


VARIANTS: list[dict[str, Any]] = [{}, {"amsgrad": True, "maximize": True}]


@pytest.mark.parametrize("options", VARIANTS, ids=["plain", "amsgrad"])
@pytest.mark.parametrize("other", ["default", "fused", "foreach"])
def test_from_torch_and_back(device: torch.device, placement: str, options: dict[str, Any], other: str) -> None:
    switches = {} if other == "default" else {other: True}
    theirs_parameters = make(device=device)
    theirs = torch.optim.AdamW(theirs_parameters, lr=1e-2, **options, **switches)
    train(theirs, theirs_parameters, 4)
    saved = through_a_file(theirs.state_dict())

    parameters = clone(theirs_parameters)
    ours = forebay.AdamW(parameters, lr=9.0, betas=(0.1, 0.2), placement=placement, **options)
    ours.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] == 1e-2
    assert tuple(ours.param_groups[0]["betas"]) == (0.9, 0.999)
    for parameter, reference in zip(parameters, theirs_parameters, strict=True):
        state, expected = ours.state[parameter], theirs.state[reference]
        assert state.keys() == expected.keys()
        assert all(same_bits(state[kind].cpu(), expected[kind].cpu()) for kind in state)
    train(ours, parameters, range(4, 7))

    back = torch.optim.AdamW(clone(parameters), lr=7.0, **options, **switches)
    back.load_state_dict(through_a_file(ours.state_dict()))
    twin_parameters = back.param_groups[0]["params"]
    train(back, twin_parameters, range(7, 10))
    train(theirs, theirs_parameters, range(4, 10))
    for parameter, reference in zip(twin_parameters, theirs_parameters, strict=True):
        assert back.state[parameter]["step"].item() == 10
        torch.testing.assert_close(parameter.detach(), reference.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(back.state[parameter]["exp_avg"], theirs.state[reference]["exp_avg"])


@pytest.mark.parametrize("when", ["before the first step", "after steps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_resumes_with_the_same_bits(
    device: torch.device, placement: str, when: str, dtype: torch.dtype
) -> None:
    expected = run(device=device, dtype=dtype, steps=8, amsgrad=True)
    first = make(device=device, dtype=dtype)
    optimizer = forebay.AdamW(first, lr=1e-2, amsgrad=True, placement=placement)
    train(optimizer, first, 5)
    saved = through_a_file(optimizer.state_dict())

    second = make(device=device, dtype=dtype, seed=4)
    resumed = forebay.AdamW(second, lr=3.0, amsgrad=True, placement=placement, chunk_bytes=TINY)
    if when == "after steps":
        train(resumed, second, 3)
    with torch.no_grad():
        for parameter, weight in zip(second, first, strict=True):
            parameter.copy_(weight)
    resumed.load_state_dict(saved)
    assert_same(snapshot(resumed, second), snapshot(optimizer, first))
    train(resumed, second, range(5, 8))
    assert_same(snapshot(resumed, second), expected)


def test_between_placements(device: torch.device) -> None:
    expected = run(device=device, dtype=torch.bfloat16, steps=6)
    first = make(device=device, dtype=torch.bfloat16)
    streamed = forebay.AdamW(first, lr=1e-2)
    train(streamed, first, 2)
    second = clone(first)
    resident = forebay.AdamW(second, placement="resident")
    resident.load_state_dict(streamed.state_dict())
    train(resident, second, range(2, 4))
    third = clone(second)
    again = forebay.AdamW(third)
    again.load_state_dict(resident.state_dict())
    train(again, third, range(4, 6))
    assert_same(snapshot(again, third), expected)


def test_loading_fills_the_arenas_in_place(device: torch.device, placement: str) -> None:
    parameters = make(device=device, dtype=[torch.float32, torch.bfloat16])
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 2)
    views = [dict(optimizer.state[parameter]) for parameter in parameters]
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, parameters, range(2, 4))
    pinned = optimizer.stats()["pinned_bytes"]
    optimizer.load_state_dict(saved)
    for i, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
        for kind, value in optimizer.state[parameter].items():
            assert value.data_ptr() == view[kind].data_ptr()
            assert same_bits(value, saved["state"][i][kind])
            assert same_bits(view[kind], saved["state"][i][kind])
    assert optimizer.stats()["pinned_bytes"] == pinned


@needs_cuda
def test_loading_leaves_the_gpu_alone_and_state_pinned() -> None:
    parameters = make([(4_000_000,)], device="cuda")
    optimizer = forebay.AdamW(parameters, chunk_bytes=1 << 20)
    train(optimizer, parameters, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.load_state_dict(saved)
    assert torch.cuda.max_memory_allocated() == before
    assert optimizer.state[parameters[0]]["exp_avg"].is_pinned()
    assert optimizer.state[parameters[0]]["exp_avg"].device.type == "cpu"


def test_the_loaded_rate_and_numbers_are_the_ones_used(device: torch.device, placement: str) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(groups_of(parameters), placement=placement)
    train(optimizer, parameters, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    twins = clone(parameters)
    plain = [{"params": group["params"]} for group in groups_of(twins)]
    other = forebay.AdamW(plain, lr=5.0, weight_decay=0.9, placement=placement)
    other.load_state_dict(saved)
    train(optimizer, parameters, range(3, 6))
    train(other, twins, range(3, 6))
    assert_same(snapshot(optimizer, parameters), snapshot(other, twins))


def test_a_rate_changed_after_a_load_is_used(device: torch.device) -> None:
    parameters = make([(20,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1, weight_decay=0.0)
    train(optimizer, parameters, 1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["lr"] = 0.0
    before = parameters[0].detach().clone()
    train(optimizer, parameters, range(1, 2))
    assert torch.equal(parameters[0], before)


# Sources that are destinations.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_its_own_live_state_changes_nothing(device: torch.device, placement: str, dtype: torch.dtype) -> None:
    parameters = make(device=device, dtype=dtype)
    optimizer = forebay.AdamW(parameters, placement=placement, amsgrad=True)
    train(optimizer, parameters, 3)
    before = snapshot(optimizer, parameters)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same(before, snapshot(optimizer, parameters))


def test_loading_its_own_state_in_another_order_swaps_it(device: torch.device, placement: str) -> None:
    parameters = make([(300,)] * 3, device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    for count in (3, 2, 1):
        train(optimizer, parameters[:count], range(count, count + 1))
        optimizer.zero_grad()
    before = snapshot(optimizer, parameters)
    saved = optimizer.state_dict()
    # Every source is the live state of another parameter.
    saved["state"] = {0: saved["state"][1], 1: saved["state"][2], 2: saved["state"][0]}
    optimizer.load_state_dict(saved)
    after = snapshot(optimizer, parameters)
    for i, source in enumerate((1, 2, 0)):
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            assert same_bits(after[i][kind], before[source][kind]), (i, kind)


def test_loading_a_slice_of_another_parameters_live_state(device: torch.device, placement: str) -> None:
    parameters = make([(300,), (300,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    before = snapshot(optimizer, parameters)
    saved = optimizer.state_dict()
    first, second = saved["state"][0], saved["state"][1]
    saved["state"] = {
        0: {**first, "exp_avg": second["exp_avg"].flip(0)},
        1: {**second, "exp_avg": first["exp_avg"][:].view(300)},
    }
    optimizer.load_state_dict(saved)
    after = snapshot(optimizer, parameters)
    assert same_bits(after[0]["exp_avg"], before[1]["exp_avg"].flip(0))
    assert same_bits(after[1]["exp_avg"], before[0]["exp_avg"])


def test_loading_does_not_tie_the_dict_to_the_optimizer(device: torch.device, placement: str) -> None:
    parameters = make([(30,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    twin_parameters = clone(parameters)
    twin = forebay.AdamW(twin_parameters, placement=placement)
    twin.load_state_dict(saved)
    train(twin, twin_parameters, 3)
    twin.param_groups[0]["lr"] = 77.0
    assert saved["param_groups"] == kept["param_groups"]
    for kind, value in kept["state"][0].items():
        assert same_bits(saved["state"][0][kind], value)


# What the dict need not have.


def test_state_of_a_bf16_run_of_torch_loads_as_f32(device: torch.device, placement: str) -> None:
    theirs_parameters = make([(300,), (7, 5)], device=device, dtype=torch.bfloat16)
    theirs = torch.optim.AdamW(theirs_parameters)
    train(theirs, theirs_parameters, 3)
    parameters = clone(theirs_parameters)
    ours = forebay.AdamW(parameters, placement=placement)
    ours.load_state_dict(theirs.state_dict())
    for parameter, reference in zip(parameters, theirs_parameters, strict=True):
        state = ours.state[parameter]
        for kind in KINDS[:2]:
            assert state[kind].dtype == torch.float32
            assert torch.equal(state[kind].cpu(), theirs.state[reference][kind].float().cpu())
        assert torch.equal(state["master_param"].cpu(), parameter.detach().float().cpu())
        assert state["step"].item() == 3


def test_parameters_that_the_dict_does_not_have_start_anew(device: torch.device, placement: str) -> None:
    parameters = make([(30,), (40,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters[:1], 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"].pop(1, None)
    train(optimizer, parameters, range(2, 4))
    optimizer.load_state_dict(saved)
    after = snapshot(optimizer, parameters)
    assert [int(values["step"]) for values in after] == [2, 0]
    assert not after[1]["exp_avg"].any()
    assert not after[1]["exp_avg_sq"].any()


def test_an_empty_state_resets(device: torch.device, placement: str) -> None:
    expected = run(device=device, dtype=torch.bfloat16, steps=2)
    parameters = make(device=device, dtype=torch.bfloat16)
    empty = forebay.AdamW(parameters, lr=1e-2).state_dict()
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement)
    train(optimizer, parameters, 3)
    with torch.no_grad():
        for parameter, start in zip(parameters, make(device=device, dtype=torch.bfloat16), strict=True):
            parameter.copy_(start)
    optimizer.load_state_dict(empty)
    train(optimizer, parameters, 2)
    assert_same(snapshot(optimizer, parameters), expected)


def test_a_step_that_is_a_plain_number_loads(device: torch.device, placement: str) -> None:
    parameters = make([(30,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = 41
    optimizer.load_state_dict(saved)
    train(optimizer, parameters, 1)
    assert optimizer.state[parameters[0]]["step"].item() == 42


def test_state_of_odd_strides_loads_by_element(device: torch.device, placement: str) -> None:
    parameters = [torch.nn.Parameter(make([(20, 30)], device=device)[0].detach().t())]
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    before = snapshot(optimizer, parameters)
    for kind in KINDS[:2]:
        saved["state"][0][kind] = saved["state"][0][kind].contiguous()
    optimizer.state[parameters[0]]["exp_avg"].zero_()
    optimizer.load_state_dict(saved)
    assert_same(before, snapshot(optimizer, parameters))


def test_switches_of_torch_do_not_come_along(device: torch.device) -> None:
    # They say how torch computes, not what; capturable=True would make every step fail.
    parameters = make([(30,)], device=device)
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(capturable=True, differentiable=True, fused=True, foreach=True)
    optimizer.load_state_dict(saved)
    train(optimizer, parameters, 1)
    assert not any(optimizer.param_groups[0][key] for key in ("capturable", "differentiable", "fused", "foreach"))


def test_state_dicts_of_older_torch_load(device: torch.device) -> None:
    parameters = make([(30,)], device=device)
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    for key in ("decoupled_weight_decay", "fused", "maximize"):
        saved["param_groups"][0].pop(key, None)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0].keys() == torch.optim.AdamW(clone(parameters)).param_groups[0].keys()


# State dicts of another model.


def wrong(saved: dict[str, Any], what: str) -> dict[str, Any]:
    """Return a state dict that does not fit."""
    saved = copy.deepcopy(saved)
    if what == "groups":
        saved["param_groups"].append({**saved["param_groups"][0], "params": [2]})
    elif what == "parameters":
        saved["param_groups"][0]["params"].append(2)
    elif what == "shape":
        saved["state"][1]["exp_avg_sq"] = torch.zeros(4, 5)
    elif what == "master shape":
        saved["state"][1]["master_param"] = torch.zeros(7)
    elif what == "same number of elements":
        saved["state"][1]["exp_avg"] = torch.zeros(6, 5)
    elif what == "kind":
        saved["state"][1]["momentum_buffer"] = torch.zeros(5, 6)
    elif what == "amsgrad":
        saved["param_groups"][0]["amsgrad"] = True
        for state in saved["state"].values():
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
    return saved


WRONG = {
    "groups": "2 groups, the optimizer 1",
    "parameters": "3 parameters in the state dict and 2 in the optimizer",
    "shape": r"second.* \(5, 6\).*exp_avg_sq.* \(4, 5\)",
    "master shape": r"second.* \(5, 6\).*master_param.* \(7,\)",
    "same number of elements": r"second.* \(5, 6\).*exp_avg.* \(6, 5\)",
    "kind": "second.*momentum_buffer",
    "amsgrad": "amsgrad",
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
def test_a_dict_of_another_model_is_refused_and_changes_nothing(
    device: torch.device, placement: str, what: str, fresh: bool
) -> None:
    if what == "amsgrad" and fresh:
        pytest.skip("state that does not exist yet takes the kinds of the dict")
    parameters = make([(10,), (5, 6)], device=device)
    optimizer = forebay.AdamW([("first", parameters[0]), ("second", parameters[1])], lr=0.3, placement=placement)
    source = forebay.AdamW([("a", parameters[0]), ("b", parameters[1])], lr=0.1)
    train(source, parameters, 1)
    if not fresh:
        train(optimizer, parameters, 1)
    before = snapshot(optimizer, parameters)
    saved = wrong(source.state_dict(), what)
    with pytest.raises(forebay.OptionError, match=WRONG[what]):
        optimizer.load_state_dict(saved)
    assert_same(before, snapshot(optimizer, parameters))
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["amsgrad"] is False
    give_gradients(parameters, 3)
    optimizer.step()
    assert optimizer.state[parameters[0]]["step"].item() == (1 if fresh else 2)


def test_amsgrad_comes_with_the_dict_before_state_exists(device: torch.device, placement: str) -> None:
    expected = run(device=device, amsgrad=True, steps=5)
    parameters = make(device=device)
    source = forebay.AdamW(parameters, lr=1e-2, amsgrad=True)
    train(source, parameters, 2)
    fresh = forebay.AdamW(parameters, placement=placement)
    fresh.load_state_dict(source.state_dict())
    train(fresh, parameters, range(2, 5))
    assert_same(snapshot(fresh, parameters), expected)


def test_a_budget_that_a_load_exceeds_changes_nothing(device: torch.device) -> None:
    parameters = make([(100_000,)], device=device)
    source = forebay.AdamW(parameters, lr=0.1)
    train(source, parameters, 1)
    optimizer = forebay.AdamW(parameters, lr=0.3, pinned_budget_bytes=1000)
    with pytest.raises(forebay.OutOfMemoryError):
        optimizer.load_state_dict(source.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer.stats()["pinned_bytes"] == 0
    assert not optimizer.state_dict()["state"]


def test_shapes_of_the_helpers_cover_the_odd_ones() -> None:
    assert {0, 1} <= {torch.Size(shape).numel() for shape in SHAPES}
