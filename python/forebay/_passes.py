"""What is noted of passes: the calls that they consist of, what becomes of each, and what was seen of it.

A layer may be called more than once in a pass, and what is saved, planned and shown is that of calls: each has a number
of its own, its place in the order of the forward pass. In a model that calls every layer once these are the layers'.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay._select import Key, Probe

STEP = 1.25
"""Shapes are alike if no dimension differs by more than about this factor."""


class Place(NamedTuple):
    """A call of a layer in a pass."""

    layer: int
    nth: int
    """How many calls of the same layer come before it."""


@dataclasses.dataclass
class Way:
    """What becomes of one call in one pass."""

    recompute: bool
    let_go_at: int
    fetch_at: int
    input_leaves: bool = True
    wanted: dict[Key, bool] = dataclasses.field(default_factory=dict)
    offload_bytes: float = 0.0


@dataclasses.dataclass
class Kind:
    """Calls of layers of one build, given the like: what was seen of the first of them."""

    first: int
    name: str
    family: Any = None
    """The same where kinds differ only in which gradients are wanted of what they are given: they take as long."""
    reason: str | None = None
    """Why it must not run twice."""
    vetted: bool = False
    """Whether the first call has been seen to its end."""
    sound: set[Key] | None = None
    """Results that nobody wrote to behind torch's back; none before that was looked at."""
    keys: list[Key] = dataclasses.field(default_factory=list)
    tensors: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    again: float = 0.8
    """What of the forward pass is recomputed: nothing after the last saved tensor."""
    saved_bytes: int = 0
    input_bytes: int = 0
    shared_bytes: int = 0
    """Inputs that other calls are given too: the first of those that are recomputed packs them."""
    ops: int = 0

    def learn(self, probe: Probe, min_bytes: int) -> None:
        """Take what a probe has seen of the first call."""
        if self.sound is None:
            self.sound = probe.sound()
        found, again, total = probe.costs(min_bytes)
        found = [one for one in found if one[0] in self.sound]
        self.keys = [key for key, *_ in found]
        self.tensors = [
            {"name": str(key), "bytes": size, "recompute_ns": ns, "saved": saved} for key, size, ns, saved in found
        ]
        self.again = again / total if total else 0.8
        self.ops = len(probe.ops)


@dataclasses.dataclass
class Point:
    """A moment of a watched pass."""

    what: str
    call: int
    mark: Any
    now: int
    peak: int
    held: int
    host_ns: int = 0


class Pass:
    """One forward pass with its backward pass."""

    def __init__(
        self,
        book: Book,
        numbers: dict[Place, int],
        ways: list[Way],
        begin: Point,
        *,
        stage: int,
        watched: bool,
        plan: dict[str, Any] | None,
        tokens: int,
    ) -> None:
        self.book, self.numbers, self.ways = book, numbers, ways
        self.stage, self.watched, self.plan, self.tokens = stage, watched, plan, tokens
        self.renewals = book.renewals
        self.points: list[Point] = [begin]
        self.peak = begin.now
        # How often each layer has been called, and the last call.
        self.calls: dict[int, int] = {}
        self.at: Place | None = None
        # Calls whose forward pass is under way.
        self.running = 0
        self.opened: set[int] = set()
        self.probes: dict[int, Probe] = {}
        self.packed: dict[int, int] = {}
        # Inputs that calls before have packed already.
        self.shared: dict[int, int] = {}
        self.callback = False
        self.ended = False
        self.finished = False


class Book:
    """What is known about passes of one shape."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.begun = 0
        self.passes = 0
        self.rounds = 0
        self.done = False
        # How often it was measured again.
        self.renewals = 0
        # Whether passes begin before those before them have ended; and whether it was said that too few end.
        self.overlaps = self.said = False
        self.builds: dict[Any, Kind] = {}
        # The kind of each call, by its number.
        self.kinds: dict[int, Kind] = {}
        self.cost: dict[str, Any] | None = None
        self.plans: dict[tuple[int, int], dict[str, Any]] = {}
        # The operations of each call that the cost, and so every plan, counts through.
        self.keys: list[list[Key]] = []
        # Measured less predicted, of the last plan that was checked.
        self.excess_bytes: float | None = None
        self.pace = 1.0

    def measure_again(self) -> None:
        """Forget all that plans are made of."""
        self.renewals += 1
        self.begun = self.passes = self.rounds = 0
        self.builds, self.kinds, self.plans = {}, {}, {}
        self.cost, self.excess_bytes, self.pace, self.done = None, None, 1.0, False


def _flags(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return rates and switches of a module: what layers alike in all else may still do otherwise."""
    return tuple((name, value) for name, value in sorted(vars(module).items()) if isinstance(value, (bool, float)))


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return all tensors that a call is given, however deep."""
    return [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]


def build_of(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a call from others: the layer's make-up as it is now, and types of what it is given."""
    return (
        tuple((name, type(inner), _flags(inner)) for name, inner in module.named_modules()),
        tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()),
        tuple((name, tuple(b.shape), b.dtype) for name, b in module.named_buffers()),
        tuple((one.dtype, one.dim()) for one in tensors_of(args, kwargs)),
    )


def state_of(modules: Iterable[torch.nn.Module]) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return what of modules may change from pass to pass and changes what they save: modes, and what is trained."""
    modes, trained = [], []
    for module in modules:
        modes.append(module.training)
        for parameter in module._parameters.values():
            if parameter is not None:
                trained.append(parameter.requires_grad)
    return tuple(modes), tuple(trained)


def shape_of(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Return the first tensor's shape: its tokens, and how wide each is."""
    return tuple(tensors[0].shape) if tensors else (1, 1)


def alike(tensors: list[torch.Tensor], device: torch.device) -> tuple[Any, ...]:
    """Return what passes have in common whose first calls are given such tensors."""
    shape = shape_of(tensors)
    kind = device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    sizes = (round(math.log(max(1, n), STEP)) for n in shape[:-1] or (1,))
    # How many there are does not matter: some are given a list, of another length each time.
    return cast, frozenset((one.dtype, one.dim(), one.requires_grad) for one in tensors), len(shape), *sizes
