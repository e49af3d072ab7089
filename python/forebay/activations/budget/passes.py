"""One pass: its calls, what happens to each call, and the samples of the pass.

A layer may be called more than once in a pass. Saves, plans and statistics are per call, not per layer. Each call has a
number, its place in the order of the forward pass. If every layer is called once, these are the numbers of the layers.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from forebay._core import CallKind, MeasuredCall, MeasuredPass, PassSample, TensorCost
from forebay.activations.switch import FLAG

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay._device import Clock
    from forebay.activations.budget.gradients import GradientCount
    from forebay.activations.budget.probe import Probe
    from forebay.activations.budget.workload import PlanRun, Workload
    from forebay.activations.recompute.replay import Key

STEP = 1.25
"""Shapes are alike if no dimension differs by more than about this factor."""
RECOMPUTE_SHARE = 0.8
"""The share of a forward pass that is assumed to be recomputed if it was not measured."""


class Place(NamedTuple):
    """A call of a layer in a pass."""

    layer: int
    nth: int
    """How many calls of the same layer come before it."""


@dataclasses.dataclass
class Way:
    """What happens to one call in one pass."""

    recompute: bool
    free_at: int
    """Offloaded tensors are freed before the call with this number."""
    fetch_at: int
    """Offloaded tensors are fetched from this call's backward pass on."""
    input_leaves: bool = True
    """Whether the inputs of a recomputed call are offloaded."""
    wanted: dict[Key, bool] = dataclasses.field(default_factory=dict)
    """Results that a recomputed call saves, and whether they are offloaded."""
    offload_bytes: float = 0.0
    """The most bytes that a call which is not recomputed offloads."""


@dataclasses.dataclass
class Kind:
    """Calls of layers with the same structure and similar arguments: the measurements of the first of them."""

    first: int
    name: str
    family: Any = None
    """Equal for kinds that differ only in which inputs need gradients: such kinds take the same time."""
    reason: str | None = None
    """Why calls of this kind cannot be recomputed; None if they can."""
    vetted: bool = False
    """Whether the first call was watched to its end."""
    unchanged: set[Key] | None = None
    """Operations whose results only torch changes; None before that was measured."""
    keys: list[Key] = dataclasses.field(default_factory=list)
    """Operations whose results can be saved; ``tensors`` has their costs."""
    tensors: list[TensorCost] = dataclasses.field(default_factory=list)
    recompute_share: float = RECOMPUTE_SHARE
    """The share of the forward pass that is recomputed: everything up to the last saved tensor."""
    saved_bytes: int = 0
    input_bytes: int = 0
    shared_bytes: int = 0
    """Bytes of inputs that other calls have too; the first recomputed call packs them."""
    operations: int = 0

    def learn(self, probe: Probe, min_bytes: int) -> None:
        """Store the results of a probe of the first call."""
        if self.unchanged is None:
            self.unchanged = probe.unchanged()
        figures = probe.figures(min_bytes)
        found = [result for result in figures.results if result.key in self.unchanged]
        self.keys = [result.key for result in found]
        self.tensors = [result.cost for result in found]
        share = figures.recompute_share
        self.recompute_share = RECOMPUTE_SHARE if share is None else share
        self.operations = figures.operations


class Point(NamedTuple):
    """A moment of a pass, with the allocated memory."""

    event: str
    """One of the events of ``PassSample``."""
    call: int
    mark: Any
    now: int
    peak: int
    held: int
    host_ns: int = 0
    gradients: int = 0
    """Bytes of gradients that the pass has made, now and at the peak."""
    peak_gradients: int = 0


class Pass:
    """One forward pass with its backward pass."""

    def __init__(
        self,
        workload: Workload,
        numbers: dict[Place, int],
        ways: list[Way],
        begin: Point,
        *,
        stage: int,
        watched: bool,
        run: PlanRun | None,
        tokens: int,
    ) -> None:
        self.workload, self.numbers, self.ways = workload, numbers, ways
        self.stage, self.watched, self.run, self.tokens = stage, watched, run, tokens
        self.renewals = workload.renewals
        self.points: list[Point] = [begin]
        self.peak = begin.now
        # How often each layer has been called, and the last call.
        self.calls: dict[int, int] = {}
        self.at: Place | None = None
        # How many calls are inside their forward pass.
        self.running = 0
        self.opened: set[int] = set()
        self.probes: dict[int, Probe] = {}
        self.gradients: GradientCount | None = None
        # Bytes that each call has packed, and bytes of inputs that calls before it had packed already.
        self.packed: dict[int, int] = {}
        self.shared: dict[int, int] = {}
        # Whether the end of this backward pass calls back; whether one has ended; whether the pass was learnt from.
        self.callback = False
        self.ended = False
        self.finished = False

    def count(self, gradients: GradientCount) -> None:
        """Count the gradients that the pass makes, as long as it is not finished and its graph exists."""
        self.gradients = gradients
        weakref.finalize(self, gradients.close)

    def finish(self) -> None:
        """Record that nothing more is learnt from the pass."""
        self.finished = True
        if self.gradients is not None:
            self.gradients.close()

    def measured(self, clock: Clock, *, may_recompute: bool = True) -> MeasuredPass:
        """Return the samples of the pass, with the kinds of its calls."""
        begin = self.points[0].mark
        samples = [
            PassSample(
                point.event,
                call=max(0, point.call),
                at_ns=clock.ns(begin, point.mark),
                host_ns=point.host_ns,
                allocated_bytes=point.now,
                peak_bytes=point.peak,
                held_bytes=point.held,
                gradient_bytes=point.gradients,
                peak_gradient_bytes=point.peak_gradients,
            )
            for point in self.points
        ]
        known = self.workload.kinds
        kinds = {id(kind): kind for kind in known.values()}
        places = {key: place for place, key in enumerate(kinds)}
        families: dict[Any, int] = {}
        calls = [
            MeasuredCall(kind=places[id(known[number])] if number in known else None, saves=not way.recompute)
            for number, way in enumerate(self.ways)
        ]
        return MeasuredPass(
            samples=samples,
            calls=calls,
            kinds=[
                CallKind(
                    kind.name,
                    family=families.setdefault(kind.family, len(families)),
                    can_recompute=may_recompute and kind.reason is None,
                    recompute_share=kind.recompute_share,
                    saved_bytes=kind.saved_bytes,
                    input_bytes=kind.input_bytes,
                    operations=kind.operations,
                    tensors=kind.tensors,
                )
                for kind in kinds.values()
            ],
        )


def _flags(module: torch.nn.Module, but: str = "") -> tuple[Any, ...]:
    """Return rates and switches of a module, in which layers of one class and shape may still differ."""
    found = ((name, value) for name, value in sorted(vars(module).items()) if isinstance(value, (bool, float)))
    return tuple((name, value) for name, value in found if name != but)


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return all tensors among the arguments of a call, at any depth."""
    return [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]


def build_of(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for calls of one family: the layer's structure and the types of the arguments."""
    # The plan replaces the layer's own checkpointing, so it does not matter whether that is switched on.
    flags = ((name, type(one), _flags(one, FLAG if one is module else "")) for name, one in module.named_modules())
    return (
        tuple(flags),
        tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()),
        tuple((name, tuple(b.shape), b.dtype) for name, b in module.named_buffers()),
        tuple((one.dtype, one.dim()) for one in tensors_of(args, kwargs)),
    )


def state_of(modules: Iterable[torch.nn.Module]) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return the modes of modules and which parameters are trained. If they change, layers save other tensors."""
    modes, trained = [], []
    for module in modules:
        modes.append(module.training)
        for parameter in module._parameters.values():
            if parameter is not None:
                trained.append(parameter.requires_grad)
    return tuple(modes), tuple(trained)


def shape_of(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Return the first tensor's shape: its tokens, and the width of each."""
    return tuple(tensors[0].shape) if tensors else (1, 1)


def alike(tensors: list[torch.Tensor], device: torch.device) -> tuple[Any, ...]:
    """Return a key that is equal for passes of one workload, from the tensors of the first call."""
    shape = shape_of(tensors)
    kind = device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    sizes = (round(math.log(max(1, n), STEP)) for n in shape[:-1] or (1,))
    # The number of tensors does not count: some models pass a list whose length changes.
    return cast, frozenset((one.dtype, one.dim(), one.requires_grad) for one in tensors), len(shape), *sizes
