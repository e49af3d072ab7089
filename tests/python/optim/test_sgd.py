"""SGD: the life of its momentum buffer, and state dicts in both directions, as with ``torch.optim.SGD``."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay import checkpoint
from support.optim import TINY, clone, give_gradients, make, snapshot, train
from support.tensors import assert_same

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHAPES = ((300,), (7, 7), ())
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


def state_names(optimizer: torch.optim.Optimizer) -> dict[int, set[str]]:
    """Return which state each parameter has in the state dict."""
    return {number: set(values) for number, values in optimizer.state_dict()["state"].items()}


def close(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> None:
    """Assert that two snapshots have the same names and nearly the same numbers."""
    for found, wanted in zip(a, b, strict=True):
        assert found.keys() == wanted.keys()
        for kind, value in wanted.items():
            torch.testing.assert_close(found[kind], value, rtol=1e-5, atol=1e-6)


def test_a_buffer_appears_with_the_first_gradient(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.SGD(parameters, placement=placement, chunk_bytes=TINY, **OPTIONS)
    assert state_names(optimizer) == {}
    optimizer.prepare()
    assert state_names(optimizer) == {}
    assert len(optimizer.state) == 0
    give_gradients(parameters, 0)
    parameters[1].grad = None
    optimizer.step()
    assert state_names(optimizer) == {0: {"momentum_buffer"}, 2: {"momentum_buffer"}}
    assert parameters[1] not in optimizer.state
    assert torch.equal(optimizer.state[parameters[0]]["momentum_buffer"].cpu(), parameters[0].grad.cpu())
    optimizer.step()
    assert state_names(optimizer) == {0: {"momentum_buffer"}, 2: {"momentum_buffer"}}


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_late_first_gradient_is_a_first_one(device: torch.device, placement: str, dampening: float) -> None:
    ends = []
    for ours in (True, False):
        parameters = make(SHAPES, device=device)
        options = {**OPTIONS, "dampening": dampening}
        optimizer: Any = (
            forebay.SGD(parameters, placement=placement, chunk_bytes=TINY, **options)
            if ours
            else torch.optim.SGD(parameters, foreach=False, **options)
        )
        for step in range(4):
            give_gradients(parameters, step)
            if step < 2:
                parameters[1].grad = None
            optimizer.step()
        ends.append(snapshot(optimizer, parameters))
    close(*ends)


def test_no_buffer_after_a_step_that_was_left_out(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.SGD(parameters, placement=placement, max_grad_norm=1.0, skip_nonfinite=True, **OPTIONS)
    optimizer.step()
    assert state_names(optimizer) == {}
    give_gradients(parameters, 0)
    parameters[0].grad[0] = float("nan")
    optimizer.step()
    assert state_names(optimizer) == {}
    optimizer.prepare()
    optimizer.step()
    assert state_names(optimizer) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_momentum_there_is_no_state(device: torch.device, placement: str, dtype: torch.dtype) -> None:
    parameters = make(SHAPES, device=device, dtype=dtype)
    optimizer = forebay.SGD(parameters, lr=0.1, placement=placement)
    assert state_names(optimizer) == {}
    train(optimizer, parameters, 2)
    names = {} if dtype == torch.float32 else {number: {"master_param"} for number in range(3)}
    assert state_names(optimizer) == names
    assert len(optimizer.state) == len(names)
    again = forebay.SGD(parameters, lr=0.1, placement=placement)
    again.load_state_dict(optimizer.state_dict())
    assert state_names(again) == names


def test_a_master_is_there_before_the_buffer(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device, dtype=torch.bfloat16)
    optimizer = forebay.SGD(parameters, placement=placement, **OPTIONS)
    optimizer.prepare()
    assert state_names(optimizer) == {number: {"master_param"} for number in range(3)}
    for parameter in parameters:
        assert torch.equal(optimizer.state[parameter]["master_param"].to(parameter), parameter)
    train(optimizer, parameters, 1)
    assert state_names(optimizer) == {number: {"momentum_buffer", "master_param"} for number in range(3)}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_torchs_state_goes_on_here_and_ours_there(device: torch.device, placement: str, steps: int) -> None:
    options = {**OPTIONS, "weight_decay": 0.1, "dampening": 0.5}
    parameters = make(SHAPES, device=device)
    theirs = torch.optim.SGD(parameters, foreach=False, **options)
    for step in range(steps):
        give_gradients(parameters, step)
        parameters[1].grad = None
        theirs.step()
    copied = clone(parameters)
    ours = forebay.SGD(copied, placement=placement, chunk_bytes=TINY)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert state_names(ours) == state_names(theirs)
    for optimizer, of in ((theirs, parameters), (ours, copied)):
        train(optimizer, of, range(steps, steps + 2))
    close(snapshot(ours, copied), snapshot(theirs, parameters))
    back = clone(copied)
    other = torch.optim.SGD(back, foreach=False)
    other.load_state_dict(copy.deepcopy(ours.state_dict()))
    for optimizer, of in ((other, back), (ours, copied)):
        train(optimizer, of, range(steps + 2, steps + 4))
    close(snapshot(other, back), snapshot(ours, copied))


def test_none_in_a_state_dict_is_no_buffer(device: torch.device, placement: str) -> None:
    parameters, others = make(SHAPES, device=device), make(SHAPES, device=device)
    optimizer = forebay.SGD(parameters, placement=placement, dampening=0.5, **OPTIONS)
    train(optimizer, parameters, 2)
    saved = optimizer.state_dict()
    saved["state"] = {number: {"momentum_buffer": None} for number in saved["state"]}
    optimizer.load_state_dict(saved)
    assert state_names(optimizer) == {}
    with torch.no_grad():
        for mine, new in zip(parameters, others, strict=True):
            mine.copy_(new)
    new = forebay.SGD(others, placement=placement, dampening=0.5, **OPTIONS)
    for one, of in ((optimizer, parameters), (new, others)):
        train(one, of, 3)
    assert_same(snapshot(optimizer, parameters), snapshot(new, others))


def test_a_loaded_buffer_is_used_at_the_next_step(device: torch.device, placement: str) -> None:
    parameters = make([(40,)], device=device)
    optimizer = forebay.SGD(parameters, lr=1.0, momentum=0.5, placement=placement)
    saved = optimizer.state_dict()
    saved["state"] = {0: {"momentum_buffer": torch.full((40,), 2.0)}}
    optimizer.load_state_dict(saved)
    parameters[0].grad = torch.zeros(40, device=device)
    optimizer.step()
    assert torch.equal(optimizer.state[parameters[0]]["momentum_buffer"].cpu(), torch.ones(40))


def test_momentum_that_is_switched_on_is_refused(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.SGD(parameters, lr=0.1, placement=placement)
    train(optimizer, parameters, 1)
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.param_groups[0]["momentum"] = 0.9
    message = "momentum was switched on for group 0 after its state was created; make a new optimizer"
    with pytest.raises(forebay.OptionError, match=message):
        train(optimizer, parameters, 1)
    assert all(map(torch.equal, parameters, before))
    optimizer.param_groups[0]["momentum"] = 0
    train(optimizer, parameters, 1)


def ours_and_torchs(device: torch.device, placement: str) -> Iterator[tuple[Any, list[torch.nn.Parameter]]]:
    """Make forebay's SGD, its state created, and torch's, with equal parameters and dampening."""
    options = {**OPTIONS, "dampening": 0.5}
    parameters = make(SHAPES, device=device)
    optimizer = forebay.SGD(parameters, placement=placement, chunk_bytes=TINY, **options)
    optimizer.prepare()
    yield optimizer, parameters
    parameters = make(SHAPES, device=device)
    yield torch.optim.SGD(parameters, foreach=False, **options), parameters


@pytest.mark.parametrize("first", [0, 2])
def test_momentum_may_become_zero_and_come_back(device: torch.device, placement: str, first: int) -> None:
    ends = []
    for optimizer, parameters in ours_and_torchs(device, placement):
        train(optimizer, parameters, first)
        optimizer.param_groups[0]["momentum"] = 0
        train(optimizer, parameters, range(first, 4))
        assert state_names(optimizer) == ({number: {"momentum_buffer"} for number in range(3)} if first else {})
        optimizer.param_groups[0]["momentum"] = 0.9
        train(optimizer, parameters, range(4, 6))
        ends.append(snapshot(optimizer, parameters))
    close(*ends)


EDITS: dict[str, Any] = {
    "assign": lambda o, p: o.state[p].__setitem__("momentum_buffer", torch.full_like(p, 0.25)),
    "none": lambda o, p: o.state[p].__setitem__("momentum_buffer", None),
    "delete": lambda o, p: o.state[p].pop("momentum_buffer", None),
    "pop": lambda o, p: o.state.pop(p, None),
    "clear": lambda o, p: o.state.clear(),
    "put back": lambda o, p: o.state.__setitem__(p, o.state.pop(p, {})),
    "whole": lambda o, p: o.state.__setitem__(p, {"momentum_buffer": torch.ones_like(p)}),
    "read": lambda o, p: o.state[p],
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_counts_as_with_torch(device: torch.device, placement: str, edit: Any, steps: int) -> None:
    ends = []
    for optimizer, parameters in ours_and_torchs(device, placement):
        train(optimizer, parameters, steps)
        edit(optimizer, parameters[1])
        train(optimizer, parameters, range(steps, steps + 2))
        ends.append(snapshot(optimizer, parameters))
    close(*ends)


class Halves(torch.nn.Module):
    """Two layers, of which only one gets gradients where that is asked for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(5, 5), torch.nn.Linear(5, 3)
        self.to(device)

    def forward(self, x: torch.Tensor, *, all_of_it: bool = True) -> torch.Tensor:
        """Return a number for each row."""
        hidden = self.first(x)
        return self.second(hidden if all_of_it else hidden.detach()).square().mean()


def steps(model: Halves, optimizer: torch.optim.Optimizer, count: int, *, all_of_it: bool = True) -> None:
    """Take steps; the first layer has no gradient unless all of it is trained."""
    device = next(model.parameters()).device
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 5, device=device), all_of_it=all_of_it).backward()
        optimizer.step()
    optimizer.zero_grad()


SAVES = ["save", "async_save"]


@pytest.mark.usefixtures("no_save_is_left")
@pytest.mark.parametrize("how", SAVES)
@pytest.mark.parametrize("trained", [0, 1, 2])
def test_a_checkpoint_has_the_state_there_is(
    device: torch.device, placement: str, tmp_path: Path, trained: int, how: str
) -> None:
    """Of no parameter, of some, of all."""
    options = {**OPTIONS, "dampening": 0.5, "placement": placement}
    model = Halves(device)
    optimizer = forebay.SGD(model.parameters(), **options)
    if trained:
        steps(model, optimizer, 2, all_of_it=trained == 2)
    names = state_names(optimizer)
    assert len(names) == 2 * trained
    if how == "save":
        checkpoint.save(tmp_path, model, optimizer)
    else:
        checkpoint.async_save(tmp_path, model, optimizer).result()
    assert state_names(optimizer) == names
    for used in (False, True):
        other = Halves(device)
        loaded = forebay.SGD(other.parameters(), **options)
        if used:
            steps(other, loaded, 1)
        checkpoint.load(tmp_path, other, loaded)
        assert state_names(loaded) == names
        reference = Halves(device)
        reference.load_state_dict(model.state_dict())
        expected = forebay.SGD(reference.parameters(), **options)
        expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for one, of in ((other, loaded), (reference, expected)):
            steps(one, of, 2)
        assert_same(snapshot(loaded, other.parameters()), snapshot(expected, reference.parameters()))


def test_a_refused_load_leaves_no_buffer(device: torch.device, placement: str, tmp_path: Path) -> None:
    model = Halves(device)
    checkpoint.save(tmp_path, model, forebay.AdamW(model.parameters()))
    optimizer = forebay.SGD(model.parameters(), placement=placement, **OPTIONS)
    with pytest.raises(forebay.CheckpointError):
        checkpoint.load(tmp_path, model, optimizer)
    assert state_names(optimizer) == {}


def test_without_state_a_checkpoint_takes_no_step(device: torch.device, placement: str, tmp_path: Path) -> None:
    model = Halves(device)
    optimizer = forebay.SGD(model.parameters(), lr=0.1, placement=placement)
    steps(model, optimizer, 1)
    taken: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: taken.append(1))
    checkpoint.save(tmp_path, model, optimizer)
    checkpoint.load(tmp_path, model, optimizer)
    assert not taken
    assert state_names(optimizer) == {}
