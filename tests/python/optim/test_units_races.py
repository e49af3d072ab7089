"""The order of copies and updates, on a wire whose copies run late: each wait is needed, and none is missing."""

from __future__ import annotations

import gc
import queue
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay.optim.units import manager, wire
from support.optim import give_gradients, make
from support.units import Listed, Momentum, Nested, Rebinding, Twins

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SHAPES = ((30, 7), (5,), (16, 24), (24, 16), (3, 4), (40,), (64, 8))


class Stream:
    """A thread that does one thing after the other, each after a while."""

    def __init__(self, seed: int) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            time.sleep(self._random.uniform(0.0, 0.004))
            job()

    def submit(self, job: Callable[[], None]) -> None:
        """Do something later."""
        self._jobs.put(job)

    def end(self) -> None:
        """Wait until everything is done, and end the thread."""
        self._jobs.put(None)
        self._thread.join()


class LateCopy(wire.Copied):
    """A copy whose end is an event."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, 0, 0)
        self.ended = threading.Event()

    def wait(self) -> None:
        """Wait until the copy has ended."""
        assert self.ended.wait(20)


class LateWire(wire.Wire):
    """Copies run on two threads, with delays. The step itself runs on the caller's.

    ``missing`` names a wait that is left out.
    """

    missing = ""

    def __init__(self, seed: int = 0) -> None:
        self._in, self._out = Stream(seed), Stream(seed + 1)

    def fetch(self, host: torch.Tensor, device: torch.Tensor, after: Iterable[wire.Copied]) -> wire.Copied:
        """Copy from the host to the device, when these copies have ended."""
        waits = [] if self.missing == "fetch" else list(after)
        return self._submit(self._in, host, device, waits)

    def arrive(self, fetched: wire.Copied) -> None:
        """Wait for a copy."""
        if self.missing != "arrive":
            fetched.wait()

    def store(self, device: torch.Tensor, host: torch.Tensor) -> wire.Copied:
        """Copy from the device to the host."""
        return self._submit(self._out, device, host, [])

    def _submit(self, stream: Stream, source: torch.Tensor, target: torch.Tensor, waits: Any) -> wire.Copied:
        copied = LateCopy(source.numel())

        def job() -> None:
            for one in waits:
                one.wait()
            target.copy_(source)
            copied.ended.set()

        stream.submit(job)
        return copied

    def end(self) -> None:
        """Wait for everything."""
        self._in.end()
        self._out.end()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[LateWire]]:
    """Put late wires into all optimizers that are made, except small copies."""
    made: list[LateWire] = []

    def make_wire(_: torch.device) -> wire.Wire:
        made.append(LateWire(len(made)))
        return made[-1]

    monkeypatch.setattr(manager, "wire_for", make_wire)
    yield LateWire
    LateWire.missing = ""
    for one in made:
        one.end()


@pytest.mark.parametrize("unit_bytes", [1, 2500])
@pytest.mark.parametrize("cls", [Momentum, Rebinding, Listed, Nested, torch.optim.NAdam])
def test_late_copies_change_nothing(late: Any, cls: Any, unit_bytes: int) -> None:
    twins = Twins(cls, make(SHAPES), unit_bytes)
    twins.step(4)
    twins.check()
    twins.step(range(4, 8), without=[2, 5])
    twins.check()


def test_state_is_read_when_it_has_arrived(late: Any) -> None:
    for seed in range(4):
        twins = Twins(Momentum, make(SHAPES, seed=seed))
        for number in range(3):
            twins.step(range(number, number + 1))
            for parameter, twin in zip(twins.parameters, twins.plain_parameters, strict=True):
                assert torch.equal(twins.optimizer.state[parameter]["mean"], twins.plain.state[twin]["mean"])


READERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "get": lambda optimizer, p: optimizer.state.get(p)["mean"],
    "items": lambda optimizer, p: dict(optimizer.state.items())[p]["mean"],
    "values": lambda optimizer, p: list(optimizer.state.values())[-1]["mean"],
    "pop": lambda optimizer, p: optimizer.state.pop(p)["mean"],
    "popitem": lambda optimizer, p: optimizer.state.popitem()[1]["mean"],
    "state_dict": lambda optimizer, p: optimizer.state_dict()["state"][len(SHAPES) - 1]["mean"],
    "synchronize": lambda optimizer, p: optimizer.synchronize() or dict.get(optimizer.state, p)["mean"],
    "sleep": lambda optimizer, p: optimizer._release_ring() or dict.get(optimizer.state, p)["mean"],
    "restore": lambda optimizer, p: forebay.restore(optimizer).state[p]["mean"],
}


@pytest.mark.parametrize("how", READERS)
def test_every_way_to_read_waits(late: Any, how: str) -> None:
    for seed in range(3):
        twins = Twins(Momentum, make(SHAPES, seed=seed))
        twins.step(2)
        found = READERS[how](twins.optimizer, twins.parameters[-1])
        assert torch.equal(found, twins.plain.state[twins.plain_parameters[-1]]["mean"])


def test_the_memory_stays_until_the_last_copy_has_ended(late: Any) -> None:
    for seed in range(3):
        twins = Twins(Momentum, make(SHAPES, seed=seed))
        twins.step(2)
        waits = [copied for unit in twins.optimizer._units.units for copied in unit.home.busy]
        assert waits
        del twins
        gc.collect()
        assert all(copied.ended.is_set() for copied in waits)


@pytest.mark.parametrize("missing", ["fetch", "arrive"])
def test_each_wait_is_needed(late: Any, missing: str) -> None:
    """Without one of the waits the bits are wrong, so the tests above would show that it is missing."""
    wrong = 0
    for seed in range(20):
        late.missing = ""
        twins = Twins(Momentum, make(SHAPES, seed=seed))
        late.missing = missing
        twins.step(4)
        try:
            twins.check()
        except AssertionError:
            wrong += 1
            break
    assert wrong


def test_a_user_may_write_at_once_after_a_step(late: Any) -> None:
    for seed in range(4):
        twins = Twins(Momentum, make(SHAPES, seed=seed))
        for number in range(3):
            twins.step(range(number, number + 1))
            for optimizer, parameters in ((twins.plain, twins.plain_parameters), (twins.optimizer, twins.parameters)):
                for parameter in parameters:
                    optimizer.state[parameter]["mean"].mul_(0.5)
        twins.check()


def test_a_step_that_breaks_off_leaves_whole_state(late: Any) -> None:
    class Breaks(Momentum):
        breaks = False

        def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
            super().update(group, parameter, state)
            if type(self).breaks and parameter.numel() == 12:
                raise ArithmeticError

    for seed in range(3):
        Breaks.breaks = False
        twins = Twins(Breaks, make(SHAPES, seed=seed))
        twins.step(2)
        before = [twins.optimizer.state[parameter]["mean"].clone() for parameter in twins.parameters]
        Breaks.breaks = True
        for optimizer, parameters in ((twins.plain, twins.plain_parameters), (twins.optimizer, twins.parameters)):
            give_gradients(parameters, 2)
            with pytest.raises(ArithmeticError):
                optimizer.step()
        for place, parameter in enumerate(twins.parameters):
            found = twins.optimizer.state[parameter]["mean"]
            expected = twins.plain.state[twins.plain_parameters[place]]["mean"] if place < 4 else before[place]
            assert torch.equal(found, expected)
