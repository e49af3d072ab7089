"""What the tests of budgets share: memory counted on the CPU too, and plans made by chance."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import forebay
from forebay.activations.budget import controller as _budget
from forebay.activations.budget.passes import Way
from support.offload import MIN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class Counted(TorchDispatchMode):
    """Counts the bytes of all tensors that operations made while it is in place and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = 0
        # The same as the peak, whoever has that one forgotten.
        self.most = 0

    def look(self) -> None:
        """Notice what has gone."""
        for storage in [storage for storage, (ref, _) in self.alive.items() if ref.expired()]:
            self.now -= self.alive.pop(storage)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        out = func(*args, **(kwargs or {}))
        self.look()
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if storage._cdata not in self.alive and storage.nbytes():
                    self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                    self.now += storage.nbytes()
        self.peak, self.most = max(self.peak, self.now), max(self.most, self.now)
        return out


class CountedMeter(_budget.Meter):
    """Reads a counter as if it were the CPU's allocator."""

    is_known = True  # type: ignore[assignment]

    def __init__(self, device: torch.device, counted: Counted) -> None:
        super().__init__(device)
        self.counted = counted

    def read(self) -> tuple[int, int]:
        """Return bytes now, and at the peak."""
        self.counted.look()
        return self.counted.now, max(self.counted.now, self.counted.peak)

    def reset(self) -> None:
        """Forget the peak."""
        self.counted.look()
        self.counted.peak = self.counted.now


def budgeted(model: nn.Module, budget: int | str, **options: Any) -> Any:
    """Set a model up under a budget, with the small sizes of these tests."""
    return forebay.offload_activations(model, budget_bytes=budget, **{"min_bytes": MIN_BYTES, **options})


def peak_of(meter: _budget.Meter, run: Callable[[], Any]) -> int:
    """Return what a run takes above what there was."""
    meter.reset()
    before, _ = meter.read()
    run()
    return meter.read()[1] - before


def peak_outside(meter: _budget.Meter, run: Callable[[], Any]) -> int:
    """Return the same where whoever watches the run resets the meter, or 0 where that cannot be known."""
    if not isinstance(meter, CountedMeter):
        run()
        return 0
    counted = meter.counted
    counted.look()
    before = counted.most = counted.now
    run()
    return counted.most - before


def by_chance(handle: Any, seed: int) -> None:
    """Have every pass of a handle go by ways that are drawn anew, whatever the plan says, once layers were measured."""
    chance = random.Random(seed)
    budget = handle._budget

    def draw(ways: list[Way]) -> list[Way]:
        n = len(ways)
        drawn = []
        for i, kind in enumerate(budget.kinds):
            may = bool(kind.vetted) and kind.reason is None
            keys = [key for key in kind.keys if chance.random() < 0.5]
            drawn.append(
                Way(
                    recompute=may and chance.random() < 0.6,
                    free_at=chance.randint(i + 1, n),
                    fetch_at=chance.randint(i, n - 1),
                    input_leaves=chance.random() < 0.5,
                    wanted={key: chance.random() < 0.5 for key in keys},
                    offload_bytes=chance.choice([0.0, math.inf, kind.saved_bytes / 2]),
                )
            )
        return drawn if all(kind.vetted for kind in budget.kinds) and ways_are_planned(budget) else ways

    budget.forced = draw


def ways_are_planned(budget: Any) -> bool:
    """Whether the measuring passes of some shape are over."""
    return any(workload.cost is not None for workload in budget.workloads.values())


def recomputed(model: nn.Module, how: str) -> Any:
    """Have every layer recomputed, as an option or under a budget, where the first passes measure."""
    if how == "option":
        return forebay.offload_activations(model, recompute=True, keep_last=0, min_bytes=MIN_BYTES)
    handle = budgeted(model, 1 << 29)

    def draw(ways: list[Way]) -> list[Way]:
        if ways_are_planned(handle._budget):
            for way, kind in zip(ways, handle._budget.kinds, strict=True):
                way.recompute, way.wanted = kind.reason is None, dict.fromkeys(kind.keys, True)
        return ways

    handle._budget.forced = draw
    return handle


HOWS = ["option", "budget"]
PASSES = _budget.MEASURING + 2
