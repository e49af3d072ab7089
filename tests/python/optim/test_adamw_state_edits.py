"""State edited by hand: what is assigned or taken out counts, as with ``torch.optim.AdamW``."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from support.optim import TINY, clone, give_gradients, make, snapshot, train
from support.tensors import assert_same, random, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = ((300,), (7, 7), ())


def moved_away_and_back(optimizer: Any, _: torch.Tensor) -> None:
    for state in optimizer.state.values():
        for kind, value in state.items():
            state[kind] = value.to(torch.float64).to(torch.float32)


def swapped(optimizer: Any, parameter: torch.Tensor) -> None:
    state = optimizer.state[parameter]
    first, second = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    state["exp_avg"], state["exp_avg_sq"] = second, first.abs()


def scaled(optimizer: Any, _: torch.Tensor) -> None:
    optimizer.state = {
        of: {kind: value * 0.5 if kind != "step" else value for kind, value in state.items()}
        for of, state in optimizer.state.items()
    }


EDITS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "assign": lambda o, p: o.state[p].__setitem__("exp_avg", torch.full_like(p, 0.25)),
    "assign another type": lambda o, p: o.state[p].__setitem__("exp_avg_sq", torch.ones_like(p, dtype=torch.float64)),
    "assign transposed": lambda o, p: o.state[p].__setitem__("exp_avg", o.state[p]["exp_avg"].t()),
    "assign what needs a gradient": lambda o, p: o.state[p].__setitem__("exp_avg", torch.ones_like(p).requires_grad_()),
    "assign step": lambda o, p: o.state[p].__setitem__("step", torch.tensor(0.0)),
    "update": lambda o, p: o.state[p].update(exp_avg=torch.zeros_like(p), step=torch.tensor(7.0)),
    "merge": lambda o, p: o.state[p].__ior__({"exp_avg": torch.zeros_like(p)}),
    "move away and back": moved_away_and_back,
    "swap": swapped,
    "clear": lambda o, p: o.state.clear(),
    "clear one": lambda o, p: o.state[p].clear(),
    "new": lambda o, p: setattr(o, "state", defaultdict(dict)),
    "pop": lambda o, p: o.state.pop(p),
    "delete": lambda o, p: o.state.__delitem__(p),
    "delete and read": lambda o, p: (o.state.__delitem__(p), o.state[p]),
    "empty": lambda o, p: o.state.__setitem__(p, {}),
    "pop an item": lambda o, p: o.state.popitem(),
    "put back": lambda o, p: o.state.__setitem__(p, o.state.pop(p)),
    "whole": lambda o, p: o.state.__setitem__(p, {k: torch.ones_like(v) for k, v in o.state[p].items()}),
    "itself": lambda o, p: setattr(o, "state", o.state),
    "scale": scaled,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_counts_as_with_torch(
    device: torch.device, placement: str, edit: Callable[[Any, torch.Tensor], Any]
) -> None:
    parameters = make(SHAPES, device=device)
    others = clone(parameters)
    ours = forebay.AdamW(parameters, lr=0.1, placement=placement, chunk_bytes=TINY)
    theirs = torch.optim.AdamW(others, lr=0.1)
    for optimizer, of in ((ours, parameters), (theirs, others)):
        train(optimizer, of, 3)
        edit(optimizer, of[1])
        train(optimizer, of, range(3, 6))
    saved = ours.state_dict()["state"]
    for place, (found, wanted) in enumerate(zip(parameters, others, strict=True)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert saved[place].keys() == theirs.state[wanted].keys()
        for kind, value in theirs.state[wanted].items():
            torch.testing.assert_close(saved[place][kind].to(value), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cleared_state_is_that_of_a_new_optimizer(device: torch.device, placement: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"lr": 0.1, "placement": placement, "chunk_bytes": TINY, "amsgrad": True}
    parameters = make(SHAPES, device=device, dtype=dtype)
    optimizer = forebay.AdamW(parameters, **options)
    train(optimizer, parameters, 3)
    pinned = optimizer.stats()["pinned_bytes"]
    others = clone(parameters)
    optimizer.state.clear()
    assert len(optimizer.state) == 0
    assert optimizer.state_dict()["state"] == {}
    train(optimizer, parameters, range(3, 5))
    assert optimizer.stats()["pinned_bytes"] == pinned
    new = forebay.AdamW(others, **options)
    train(new, others, range(3, 5))
    assert_same(snapshot(optimizer, parameters), snapshot(new, others))


def test_assigned_state_stays_in_its_place(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    before = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    moved_away_and_back(optimizer, parameters[0])
    after = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_what_was_popped_is_its_holders(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement, chunk_bytes=TINY)
    train(optimizer, parameters, 2)
    expected = snapshot(optimizer, parameters)
    popped = [optimizer.state.pop(parameter) for parameter in parameters[:2]]
    train(optimizer, parameters, range(2, 4))
    for state, values in zip(popped, expected, strict=False):
        assert all(same_bits(state[kind].cpu(), values[kind]) for kind in state)
    assert optimizer.state[parameters[0]]["step"] == 2
    for parameter, state in zip(parameters, popped, strict=False):
        optimizer.state[parameter] = state
    found = snapshot(optimizer, parameters[:2])
    assert_same(found, expected[:2], kinds=["step", "exp_avg", "exp_avg_sq"])


def test_state_may_change_places(device: torch.device, placement: str) -> None:
    parameters = make([(40,), (40,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement)
    train(optimizer, parameters, 2)
    first, second = snapshot(optimizer, parameters)
    states = [optimizer.state.pop(parameter) for parameter in parameters]
    for parameter, state in zip(parameters, reversed(states), strict=True):
        optimizer.state[parameter] = state
    assert_same(snapshot(optimizer, parameters), [second, first], kinds=["step", "exp_avg", "exp_avg_sq"])


def test_a_parameter_may_be_replaced_with_its_state(device: torch.device, placement: str) -> None:
    ends = []
    for kind in ("forebay", "torch"):
        parameters = make([(40,), (6,)], device=device)
        optimizer: Any = (
            torch.optim.AdamW(parameters, lr=0.1)
            if kind == "torch"
            else forebay.AdamW(parameters, lr=0.1, placement=placement)
        )
        train(optimizer, parameters, 2)
        # Half of the parameter goes on as another one.
        state = optimizer.state.pop(parameters[0])
        half = torch.nn.Parameter(parameters[0].detach()[::2].clone())
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = state[moment][::2].clone()
        optimizer.param_groups[0]["params"][0] = half
        optimizer.state[half] = state
        train(optimizer, [half, parameters[1]], range(2, 4))
        ends.append((half, parameters[1], optimizer.state[half]["step"], len(optimizer.state_dict()["state"])))
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_what_is_not_the_engines_is_kept_as_it_is(device: torch.device, placement: str) -> None:
    parameters = make([(40,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    average = torch.ones(3)
    optimizer.state[parameters[0]]["average"] = average
    train(optimizer, parameters, range(1, 2))
    assert optimizer.state[parameters[0]]["average"] is average
    assert optimizer.state_dict()["state"][0]["average"] is average


REFUSED: dict[str, tuple[Callable[[Any, list[torch.nn.Parameter]], Any], str]] = {
    "shape": (lambda o, p: o.state[p[1]].__setitem__("exp_avg", torch.ones(5)), r"\(7, 7\), its exp_avg as assigned"),
    "number": (lambda o, p: o.state[p[1]].__setitem__("exp_avg", 0.0), "a float as its exp_avg"),
    "whole": (
        lambda o, p: o.state.__setitem__(p[1], {"exp_avg": torch.zeros_like(p[1]), "exp_avg_sq": torch.ones(2, 2)}),
        "its exp_avg_sq as assigned",
    ),
    "step": (lambda o, p: o.state[p[1]].__setitem__("step", torch.tensor(-1.0)), "invalid step of parameter 1"),
    "steps": (lambda o, p: o.state[p[1]].__setitem__("step", torch.ones(2)), "invalid step of parameter 1"),
    "other kind": (lambda o, p: o.state[p[1]].__setitem__("exp_avg", o.state[p[1]]["exp_avg_sq"]), "assign a clone"),
    "other parameter": (lambda o, p: o.state.__setitem__(p[1], o.state[p[3]]), "assign a clone"),
}


@pytest.mark.parametrize(("edit", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_state_is_refused(
    device: torch.device, placement: str, edit: Callable[[Any, list[torch.nn.Parameter]], Any], message: str
) -> None:
    parameters = make([*SHAPES, (7, 7)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    before = snapshot(optimizer, parameters)
    with pytest.raises(forebay.OptionError, match=message):
        edit(optimizer, parameters)
    assert_same(snapshot(optimizer, parameters), before)


def test_wrong_state_of_a_new_parameter_is_refused_before_the_step(device: torch.device, placement: str) -> None:
    parameters = make([(40,), (6,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    optimizer.state[parameters[1]] = {"exp_avg": torch.ones(7), "step": torch.tensor(1.0)}
    before = [parameter.detach().clone() for parameter in parameters]
    give_gradients(parameters, 0)
    with pytest.raises(forebay.OptionError, match=r"\(6,\), its exp_avg as assigned \(7,\)"):
        optimizer.step()
    assert all(map(torch.equal, parameters, before))


def test_dicts_that_leave_are_plain_and_their_holders(device: torch.device, placement: str) -> None:
    parameters = make([(40,), (6,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement)
    train(optimizer, parameters, 2)
    before = snapshot(optimizer, parameters)
    saved = optimizer.state_dict()
    assert {type(state) for state in saved["state"].values()} == {dict}
    saved["state"][0]["exp_avg"] = torch.zeros(40)
    saved["state"][0]["step"] = torch.tensor(9.0)
    assert_same(snapshot(optimizer, parameters), before)
    optimizer.load_state_dict(saved)
    assert optimizer.state[parameters[0]]["exp_avg"].count_nonzero() == 0
    assert optimizer.state[parameters[0]]["step"] == 9
    for copied in (copy.deepcopy(optimizer.state), pickle.loads(pickle.dumps(optimizer.state))):
        assert type(copied) is defaultdict
        assert {type(state) for state in copied.values()} == {dict}
    assert type(copy.copy(optimizer.state[parameters[0]])) is dict
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert same_bits(loaded["state"][1]["exp_avg"], optimizer.state[parameters[1]]["exp_avg"])


def test_a_transposed_load_of_live_state_is_right(device: torch.device, placement: str) -> None:
    parameters = make([(7, 7)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    saved = optimizer.state_dict()
    expected = saved["state"][0]["exp_avg"].t().clone()
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].t()
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[parameters[0]]["exp_avg"], expected)


def test_state_given_before_the_first_step_is_taken_over(device: torch.device, placement: str) -> None:
    ends = []
    for kind in ("forebay", "torch"):
        parameters = make([(40,)], device=device)
        optimizer: Any = (
            torch.optim.AdamW(parameters, lr=0.1)
            if kind == "torch"
            else forebay.AdamW(parameters, lr=0.1, placement=placement)
        )
        values = {"exp_avg": random((40,), 3).to(device), "exp_avg_sq": random((40,), 4).square().to(device)}
        optimizer.state[parameters[0]] = {"step": torch.tensor(5.0), **values}
        train(optimizer, parameters, 2)
        ends.append((parameters[0], optimizer.state[parameters[0]]["exp_avg_sq"].to(device)))
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_state_that_is_moved_by_its_data_is_told_as_it_is(device: torch.device, placement: str) -> None:
    """A widely copied way to bring an optimizer to a device and back."""
    parameters, others = make(SHAPES, device=device), make(SHAPES, device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    untouched = forebay.AdamW(others, placement=placement)
    for one, mine in ((optimizer, parameters), (untouched, others)):
        train(one, mine, 2)
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()
    for one, mine in ((optimizer, parameters), (untouched, others)):
        train(one, mine, range(2, 4))
    assert_same(snapshot(optimizer, parameters), snapshot(untouched, others))
