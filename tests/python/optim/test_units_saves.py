"""Checkpoints, asynchronous saves and sleep with optimizers that run in units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay import checkpoint
from support.optim import give_gradients
from support.saves import held
from support.sleep import Net, snapshot, train
from support.tensors import assert_same
from support.units import Listed, Momentum, ScheduleFree, assert_equal, contents

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_save_is_left")

CLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "listed": lambda p: Listed(p, lr=1e-3),
}


def model_on(device: torch.device, seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20), torch.nn.Linear(20, 7)).to(device)


def run(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    for step in steps:
        give_gradients(list(model.parameters()), step)
        optimizer.step()
        optimizer.zero_grad()


def all_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return contents(optimizer, list(model.parameters()))


@pytest.mark.parametrize("unit_bytes", [1, 4000])
@pytest.mark.parametrize("name", CLASSES)
def test_a_checkpoint_holds_all_state(device: torch.device, tmp_path: Path, name: str, unit_bytes: int) -> None:
    model = model_on(device)
    optimizer = forebay.offload(CLASSES[name](model.parameters()), unit_bytes=unit_bytes)
    run(model, optimizer, 0, 1, 2)
    kept = all_of(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    run(model, optimizer, 3)
    # Into the same run, into one of another seed in other units, and into a plain one.
    checkpoint.load(tmp_path, model, optimizer)
    assert_equal(all_of(model, optimizer), kept)
    for offloads in (True, False):
        other = model_on(device, seed=8)
        its = CLASSES[name](other.parameters())
        if offloads:
            forebay.offload(its, unit_bytes=2000)
        run(other, its, 9, 8, 7)
        checkpoint.load(tmp_path, other, its)
        assert_equal(all_of(other, its), kept)
        run(other, its, 3, 4)
        checkpoint.load(tmp_path, model, optimizer)
        run(model, optimizer, 3, 4)
        assert_equal(all_of(model, optimizer), all_of(other, its))


def test_a_checkpoint_of_a_new_optimizer(device: torch.device, tmp_path: Path) -> None:
    twins = []
    for offloads in (False, True):
        model = model_on(device)
        optimizer = CLASSES["nadam"](model.parameters())
        if offloads:
            forebay.offload(optimizer, unit_bytes=1)
        checkpoint.save(tmp_path / str(offloads), model, optimizer)
        run(model, optimizer, 0, 1)
        twins.append(all_of(model, optimizer))
    assert_equal(twins[1], twins[0])


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("name", CLASSES)
def test_an_asynchronous_save_is_of_its_moment(
    device: torch.device, tmp_path: Path, name: str, budget: int | None
) -> None:
    model = model_on(device)
    optimizer = forebay.offload(CLASSES[name](model.parameters()), unit_bytes=4000)
    run(model, optimizer, 0, 1, 2)
    kept = all_of(model, optimizer)
    with held() as gate:
        if budget is not None:
            # The save reads the state itself, so the step waits for it; of nested state, the call does.
            gate.open(after_s=0.5)
        handle = checkpoint.async_save(tmp_path, model, optimizer, snapshot_budget_bytes=budget)
        run(model, optimizer, 3, 4)
        gate.open()
        handle.result()
    after = all_of(model, optimizer)
    checkpoint.load(tmp_path, model, optimizer)
    assert_equal(all_of(model, optimizer), kept)
    run(model, optimizer, 3, 4)
    assert_equal(all_of(model, optimizer), after)


def test_state_that_is_half_written_is_not_saved(device: torch.device, tmp_path: Path) -> None:
    class Breaks(Momentum):
        breaks = False

        def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
            super().update(group, parameter, state)
            if type(self).breaks and parameter.numel() == 7:
                raise ArithmeticError("broken")

    model = model_on(device)
    optimizer = forebay.offload(Breaks(model.parameters()), unit_bytes=1)
    run(model, optimizer, 0, 1)
    kept = all_of(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    Breaks.breaks = True
    with pytest.raises(ArithmeticError):
        run(model, optimizer, 2)
    Breaks.breaks = False
    for save in (checkpoint.save, lambda *arguments: checkpoint.async_save(*arguments).result()):
        with pytest.raises(forebay.CheckpointError, match="cannot be saved: a step broke off with ArithmeticError"):
            save(tmp_path, model, optimizer)
    checkpoint.load(tmp_path, model, optimizer)
    assert_equal(all_of(model, optimizer), kept)
    run(model, optimizer, 2)


@pytest.mark.parametrize("name", ["nadam", "schedule-free", "listed"])
def test_training_with_sleep_equals_training_without(device: torch.device, name: str, lazy: bool) -> None:
    results = []
    for how in ("plain", "units", "slept"):
        model = Net(device)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer: Any = ScheduleFree(parameters) if name == "schedule-free" else CLASSES[name](parameters)
        if name == "schedule-free":
            optimizer.train()
        if how != "plain":
            forebay.offload(optimizer, unit_bytes=2000)
        sleeper = forebay.Sleeper(model, optimizer) if how == "slept" else None

        def between(sleeper: forebay.Sleeper | None = sleeper, optimizer: Any = optimizer) -> None:
            if sleeper is not None:
                sleeper.sleep()
                with pytest.raises(forebay.AsleepError):
                    optimizer.step()
                sleeper.wake(lazy=lazy)

        train(model, optimizer, device, 5, between)
        results.append(snapshot(model, optimizer))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_state_on_the_host_is_not_reported_as_left_on_the_device(device: torch.device) -> None:
    model = Net(device)
    optimizer = forebay.offload(Momentum([p for p in model.parameters() if p.requires_grad]))
    train(model, optimizer, device, 2)
    sleeper = forebay.Sleeper(model, optimizer)
    before = contents(optimizer, [])
    with sleeper.asleep():
        assert sleeper.stats()["asleep_bytes"] > 0
        assert not [left for left in sleeper.stats()["residual"] if left["kind"] == "optimizer"]
    assert_equal(contents(optimizer, []), before)
