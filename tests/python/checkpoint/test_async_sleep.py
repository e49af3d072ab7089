"""Models that sleep and wake while a save is under way; and steps, saves, sleeps, loads and failures in any order."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import forebay
from forebay import _core, checkpoint
from forebay.checkpoint import snapshot as _snapshot
from support.saves import ELEMENTS, PAGE, RUNS, assert_holds, build, eventually, held, train, values
from support.sizes import times
from support.tensors import assert_same

BUDGETS = {"all": None, "weights": 4 * ELEMENTS, "nothing": 0}
RUNS_IN_ANY_ORDER = times(4, 40)


pytestmark = pytest.mark.usefixtures("no_save_is_left")


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", RUNS)
def test_sleep_during_a_save(kind: str, budget: str, device: torch.device, tmp_path: Path) -> None:
    model, optimizers = build(kind, device=device)
    train(model, optimizers, 0, 1)
    kept = values(model, optimizers)
    model.zero_grad()
    sleeper = forebay.Sleeper(model, optimizers)
    # Nothing is written before it sleeps, unless sleeping waits for that; and no copier makes everything safe before.
    with held() as gate, mock.patch.object(_snapshot.Snapshot, "copy_ahead"):
        handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=BUDGETS[budget])
        asleep = threading.Thread(target=sleeper.sleep)
        asleep.start()
        if not handle._snapshot.live.tensors:
            # What could be copied is copied: nobody waits for the writer.
            asleep.join(50)
            assert not asleep.is_alive()
        gate.open()
        asleep.join(50)
        assert model[0].untyped_storage().nbytes() == 0
        handle.result()
    sleeper.wake()
    assert_same(values(model, optimizers), kept)
    assert_holds(tmp_path, kind, kept, device=device)
    train(model, optimizers, 2)
    twin, its = build(kind, device=device)
    train(twin, its, 0, 1, 2)
    assert_same(values(model, optimizers), values(twin, its))


def test_sleep_waits_for_weights_that_were_not_copied(device: torch.device, tmp_path: Path) -> None:
    model, optimizers = build(device=device)
    train(model, optimizers, 0)
    model.zero_grad()
    sleeper = forebay.Sleeper(model, optimizers)
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=0)
        assert handle._snapshot.live.tensors
        waits = threading.Event()
        wait = handle._snapshot.live.written.wait

        def noticed() -> None:
            waits.set()
            wait()

        with mock.patch.object(handle._snapshot.live.written, "wait", noticed):
            asleep = threading.Thread(target=sleeper.sleep)
            asleep.start()
            assert waits.wait(20)
            assert model[0].untyped_storage().nbytes() > 0
            gate.open()
            asleep.join(50)
        handle.result()
    assert model[0].untyped_storage().nbytes() == 0


def test_an_interrupted_sleep_spoils_no_save(device: torch.device, tmp_path: Path) -> None:
    model, optimizers = build("masters", device=device)
    train(model, optimizers, 0)
    kept = values(model, optimizers)
    model.zero_grad()
    sleeper = forebay.Sleeper(model, optimizers)

    def fail() -> None:
        raise RuntimeError("not now")

    sleeper.protect(fail)
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizers)
        with pytest.raises(RuntimeError, match="not now"):
            sleeper.sleep()
        train(model, optimizers, 1)
        gate.open()
        handle.result()
    assert_holds(tmp_path, "masters", kept, device=device)


class AnyOrder:
    """A run of which a random number says what happens next."""

    def __init__(self, path: Path, device: torch.device, seed: int) -> None:
        self.choose = random.Random(seed)
        self.path, self.device = path, device
        self.kind = self.choose.choice(["f32", "masters", "compact", "amsgrad", "two", "resident"])
        self.model, self.optimizers = build(self.kind, device=device)
        self.twin, self.its = build(self.kind, device=device)
        self.sleeper = forebay.Sleeper(self.model, self.optimizers, gradients="drop")
        self.asleep = False
        self.steps = 0
        self.saves = 0
        self.complete: dict[str, torch.Tensor] = {}
        self.under_way: tuple[Any, dict[str, torch.Tensor], bool] | None = None
        self.step()

    def step(self) -> None:
        """Take a step, and the same without any save or sleep."""
        if not self.asleep:
            train(self.model, self.optimizers, self.steps)
            train(self.twin, self.its, self.steps)
            self.steps += 1

    def save(self, *, fails: bool = False) -> None:
        """Begin a save, in the middle of which the disk may break."""
        self.end()
        if self.asleep:
            with pytest.raises(forebay.AsleepError):
                checkpoint.async_save(self.path, self.model, self.optimizers)
            return
        self.saves += 1
        kept = values(self.twin, self.its)
        budget = self.choose.choice([None, 0, 4 * ELEMENTS, 4 * ELEMENTS + 2 * PAGE, PAGE])
        rate = self.choose.choice([None, 0.2])
        if fails:
            self.path.joinpath("blocked").touch()
        handle = checkpoint.async_save(
            self.path / "blocked" if fails else self.path / "run",
            self.model,
            self.optimizers,
            extra={"save": self.saves},
            keep_last=2,
            snapshot_budget_bytes=budget,
            write_gbps=rate,
        )
        self.under_way = (handle, kept, fails)

    def fail(self) -> None:
        """Begin a save that comes to nothing."""
        self.save(fails=True)

    def end(self) -> None:
        """Wait for the save, and compare what it wrote with the state at its call."""
        if self.under_way is None:
            return
        (handle, kept, fails), self.under_way = self.under_way, None
        if fails:
            with pytest.raises(forebay.StorageError, match="blocked"):
                handle.result()
            return
        handle.result()
        self.complete = kept
        assert_holds(self.path / "run", self.kind, kept, {"save": self.saves}, self.device)

    def sleep(self) -> None:
        """Sleep, once more if it sleeps already."""
        self.sleeper.sleep()
        self.asleep = True

    def wake(self) -> None:
        """Wake, also what is awake."""
        self.sleeper.wake(lazy=self.choose.random() < 0.5)
        self.asleep = False

    def load(self) -> None:
        """Load the last complete checkpoint while the next may be under way."""
        if self.complete and not self.asleep:
            # The twin takes the same values, from what was kept of them.
            checkpoint.load(self.path / "run", self.model, self.optimizers)
            loaded = values(self.model, self.optimizers)
            for name, tensor in named(self.twin, self.its).items():
                tensor.detach().copy_(loaded[name])
            if self.kind == "compact":
                # What is shown of a compact master is a copy; it is assigned instead, after the weight.
                names = {parameter: name for name, parameter in self.twin.named_parameters()}
                for parameter, state in self.its[0].state.items():
                    state["master_param"] = loaded[f"{names[parameter]}.master_param"]


def named(model: torch.nn.Module, optimizers: Any) -> dict[str, torch.Tensor]:
    """Return weights and state by name, themselves."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            found |= {f"{names[parameter]}.{kind}": value for kind, value in state.items()}
    return found


@pytest.mark.parametrize("number", range(RUNS_IN_ANY_ORDER))
def test_steps_saves_sleeps_loads_and_failures_in_any_order(number: int, device: torch.device, tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    run = AnyOrder(tmp_path, device, seed)
    acts = ("step", "step", "save", "save", "fail", "end", "sleep", "wake", "wake", "load")
    done = []
    for _ in range(14):
        done.append(run.choose.choice(acts))
        try:
            getattr(run, done[-1])()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {run.kind}: {' '.join(done)}") from error
    run.wake()
    run.end()
    run.step()
    assert_same(values(run.model, run.optimizers), values(run.twin, run.its))
    assert eventually(lambda: not _core.release_copies())
