"""State dicts, pickles and copies of optimizers that run in units: the format is that of their own class."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import forebay
from support.optim import clone, give_gradients, make, train
from support.units import (
    SHAPES,
    SIZES,
    Counting,
    Listed,
    Momentum,
    Nested,
    Plain,
    Rebinding,
    Twins,
    assert_equal,
    contents,
    described,
)

THIRD = 16 * 24
"""Elements of the third parameter."""
CLASSES = [torch.optim.NAdam, torch.optim.Adagrad, torch.optim.Adafactor, Momentum, Listed, Rebinding]


@pytest.mark.parametrize("unit_bytes", SIZES)
@pytest.mark.parametrize("cls", CLASSES)
def test_state_dicts_go_both_ways(device: torch.device, cls: Any, unit_bytes: int | None) -> None:
    twins = Twins(cls, make(SHAPES, device=device), unit_bytes)
    twins.step(3)
    mine, theirs = twins.optimizer.state_dict(), twins.plain.state_dict()
    assert mine.keys() == theirs.keys()
    assert described(mine["state"]) == described(theirs["state"])
    assert mine["param_groups"] == theirs["param_groups"]
    # Into a plain one, and into one that runs in units.
    for offloads in (False, True):
        of = clone(twins.parameters)
        other = cls(of)
        if offloads:
            forebay.offload(other, unit_bytes=2500)
        other.load_state_dict(copy.deepcopy(mine))
        assert_equal(contents(other, of), contents(twins.plain, twins.plain_parameters))
        train(other, of, range(3, 5))
        twins_of = clone(twins.plain_parameters)
        expected = cls(twins_of)
        expected.load_state_dict(copy.deepcopy(theirs))
        train(expected, twins_of, range(3, 5))
        assert_equal(contents(other, of), contents(expected, twins_of))


def test_a_dict_that_torch_cannot_load_changes_nothing(device: torch.device) -> None:
    twins = Twins(Nested, make(SHAPES, device=device), 3000)
    twins.step(2)
    for optimizer in (twins.plain, twins.optimizer):
        with pytest.raises(TypeError, match="Pair"):
            optimizer.load_state_dict(optimizer.state_dict())
    twins.check()
    twins.step(range(2, 4))
    twins.check()


def test_a_load_into_state_that_fits_changes_it_in_place(device: torch.device) -> None:
    twins = Twins(Momentum, make(SHAPES, device=device), 3000)
    twins.step(3)
    saved = copy.deepcopy(twins.plain.state_dict())
    twins.step(range(3, 6))
    kept = [twins.optimizer.state[parameter]["mean"] for parameter in twins.parameters]
    twins.optimizer.load_state_dict(saved)
    twins.plain.load_state_dict(saved)
    assert all(twins.optimizer.state[p]["mean"] is mean for p, mean in zip(twins.parameters, kept, strict=True))
    twins.check()


def test_a_load_of_ones_own_state_changes_nothing(device: torch.device) -> None:
    twins = Twins(Listed, make(SHAPES, device=device), 3000)
    twins.step(3)
    twins.optimizer.load_state_dict(twins.optimizer.state_dict())
    twins.check()
    # Also if the parameters' states change places.
    parameters = make([(6, 4), (6, 4), (6, 4)], device=device)
    twins = Twins(Momentum, parameters)
    twins.step(3)
    for optimizer in (twins.plain, twins.optimizer):
        found = optimizer.state_dict()
        copies = copy.deepcopy(found["state"]) if optimizer is twins.plain else found["state"]
        optimizer.load_state_dict({**found, "state": {0: copies[1], 1: copies[2], 2: copies[0]}})
    twins.check()
    twins.step(range(3, 5))
    twins.check()


def test_state_that_the_dict_lacks_is_gone(device: torch.device) -> None:
    twins = Twins(Counting, make(SHAPES, device=device))
    twins.step(3)
    for optimizer in (twins.plain, twins.optimizer):
        found = copy.deepcopy(optimizer.state_dict())
        del found["state"][1]
        found["state"]["word"] = {"other": 3}
        optimizer.load_state_dict(found)
    twins.check()
    twins.step(range(3, 5))
    twins.check()
    for optimizer in (twins.plain, twins.optimizer):
        optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    twins.step(range(5, 7))
    twins.check()


def test_hooks_of_state_dicts_run_once(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.offload(torch.optim.NAdam(parameters), unit_bytes=1)
    train(optimizer, parameters, 1)
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, found: {**found, "note": calls.append("saved")})
    optimizer.register_load_state_dict_pre_hook(lambda _, found: calls.append("loading") or {**found})
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    found = optimizer.state_dict()
    assert "note" in found
    optimizer.load_state_dict(found)
    assert calls == ["saving", "saved", "loading", "loaded"]


@pytest.mark.parametrize("damage", ["groups", "parameters", "value"])
def test_a_dict_that_does_not_fit_is_refused_and_changes_nothing(device: torch.device, damage: str) -> None:
    twins = Twins(Momentum, make(SHAPES, device=device), 3000)
    twins.step(2)
    found = copy.deepcopy(twins.optimizer.state_dict())
    if damage == "groups":
        found["param_groups"].append(found["param_groups"][0])
    elif damage == "parameters":
        found["param_groups"][0]["params"].pop()
    else:
        found["state"][3]["mean"] = found["state"][3]["mean"].to_sparse()
    error = forebay.OptionError if damage == "value" else ValueError
    with pytest.raises(error, match=r"loaded state dict|sparse_coo"):
        twins.optimizer.load_state_dict(found)
    twins.check()
    twins.step(range(2, 4))
    twins.check()


def test_a_load_that_breaks_off_is_not_trusted(device: torch.device) -> None:
    class Picky(Momentum):
        refuses = False

        def __setstate__(self, state: dict[str, Any]) -> None:
            if self.refuses and any(p.numel() == THIRD for p in state.get("state", {}) if not isinstance(p, str)):
                raise ArithmeticError("no")
            super().__setstate__(state)

    parameters = make(SHAPES, device=device)
    optimizer = forebay.offload(Picky(parameters), unit_bytes=1)
    train(optimizer, parameters, 2)
    found = copy.deepcopy(optimizer.state_dict())
    Picky.refuses = True
    with pytest.raises(ArithmeticError):
        optimizer.load_state_dict(found)
    Picky.refuses = False
    with pytest.raises(forebay.CheckpointError, match="its last load broke off with ArithmeticError: no"):
        optimizer.step()
    optimizer.load_state_dict(found)
    optimizer.step()


def test_a_class_that_loads_in_its_own_way(device: torch.device) -> None:
    class Own(Momentum):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for values in self.state.values():
                values["mean"].mul_(2)
                values["loaded"] = True

    twins = Twins(Own, make(SHAPES, device=device), 3000)
    twins.step(2)
    saved = twins.plain.state_dict()
    for optimizer in (twins.plain, twins.optimizer):
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert twins.optimizer.state[twins.parameters[0]]["loaded"]
    twins.check()
    twins.step(range(2, 4))
    twins.check()


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch"])
@pytest.mark.parametrize("cls", [torch.optim.NAdam, Nested])
def test_copies_run_in_units_too(device: torch.device, how: str, cls: Any) -> None:
    twins = Twins(cls, make(SHAPES, device=device), 3000)
    twins.step(3)
    optimizer = twins.optimizer
    if how == "pickle":
        other = pickle.loads(pickle.dumps(optimizer))
    elif how == "deepcopy":
        other = copy.deepcopy(optimizer)
    else:
        stream = io.BytesIO()
        torch.save(optimizer, stream)
        stream.seek(0)
        other = torch.load(stream, weights_only=False)
    copies = [parameter for group in other.param_groups for parameter in group["params"]]
    assert type(other) is type(optimizer)
    train(other, copies, range(3, 5))
    twins.step(range(3, 5))
    twins.check()
    assert_equal(contents(other, copies), contents(twins.plain, twins.plain_parameters))
    assert other.stats()["units"] == optimizer.stats()["units"] > 1
    assert type(forebay.restore(other)) is cls


def test_a_saved_state_dict_has_the_size_of_its_values(device: torch.device) -> None:
    parameters = make([(64, 64), (2,)], device=device)
    optimizer = forebay.offload(Momentum(parameters))
    train(optimizer, parameters, 1)
    stream = io.BytesIO()
    torch.save(optimizer.state[parameters[1]]["mean"], stream)
    assert stream.tell() < 4096


@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.Adafactor, Momentum])
def test_torchs_distributed_state_dicts(device: torch.device, cls: Any) -> None:
    models, optimizers = [], []
    for _ in range(3):
        torch.manual_seed(3)
        models.append(torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)).to(device))
        optimizers.append(cls(models[-1].parameters()))
    forebay.offload(optimizers[1], unit_bytes=1)
    forebay.offload(optimizers[2], unit_bytes=100)
    for number in range(3):
        for model, optimizer in zip(models[:2], optimizers, strict=False):
            give_gradients(list(model.parameters()), number)
            optimizer.step()
            optimizer.zero_grad()
    plain, mine = (get_optimizer_state_dict(model, one) for model, one in zip(models[:2], optimizers, strict=False))
    assert described(mine["state"]) == described(plain["state"])
    models[2].load_state_dict(models[1].state_dict())
    set_optimizer_state_dict(models[2], optimizers[2], copy.deepcopy(mine))
    for number in range(3, 5):
        for model, optimizer in zip(models, optimizers, strict=True):
            give_gradients(list(model.parameters()), number)
            optimizer.step()
            optimizer.zero_grad()
    expected = contents(optimizers[0], list(models[0].parameters()))
    for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
        assert_equal(contents(optimizer, list(model.parameters())), expected)


class Casting(Plain):
    """State of a type of its own, which torch's rules change when it is loaded."""

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        if not state:
            state["step"], state["sum"] = torch.zeros((), dtype=torch.float64), torch.zeros_like(parameter).double()
            state["many"] = [torch.zeros_like(parameter).double()]
        state["step"] += 1
        state["sum"] += parameter.grad
        state["many"][0] += parameter.grad / 3
        parameter.sub_((state["sum"] * state["step"] + state["many"][0]).to(parameter.dtype), alpha=group["lr"])


def test_loaded_state_gets_the_types_that_torch_gives_it(device: torch.device) -> None:
    twins = Twins(Casting, make(SHAPES, device=device, dtype=torch.bfloat16))
    twins.step(3)
    saved = twins.plain.state_dict()
    for optimizer in (twins.plain, twins.optimizer):
        # Each from its own: torch keeps a loaded tensor that has the right type and device already.
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert twins.optimizer.state[twins.parameters[0]]["sum"].dtype == torch.bfloat16
    assert twins.optimizer.state[twins.parameters[0]]["step"].dtype == torch.float64
    twins.step(range(3, 5))
    twins.check()
