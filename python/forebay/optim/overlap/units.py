"""The overlapped steps of an optimizer that runs in units: its own step runs on a stream beside torch's.

``step`` submits everything and returns. Units are updated under the next forward, in the order of the groups, and
whoever reads a parameter waits for its unit. Nothing is taken in backward: the class's own step may read all gradients
of a unit, and numbers that are set after the backward.

A gradient is held until the step has used it. ``parameter.grad`` becomes a ``ConsumedGradient`` meanwhile: zeroing it
on torch's stream would change what the step reads. The step before must have ended on torch's stream before the next
one is submitted, so each moment has one step under way.
"""

from __future__ import annotations

import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from forebay._device import capturing, is_gpu, stream_handle
from forebay._tensors import local
from forebay.errors import DeviceError, OptionError
from forebay.optim.overlap.consumed import ConsumedGradient, is_consumed
from forebay.optim.overlap.exposure import Exposure
from forebay.optim.overlap.pending import mark, restore
from forebay.optim.overlap.reads import Reader, Readers
from forebay.optim.units.parameters import members_of, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.optim.overlap.step import Overlap
    from forebay.optim.units.manager import Units
    from forebay.optim.units.run import Run
    from forebay.optim.units.unit import Unit
    from forebay.optim.units.wire import Wire

    Steps: TypeAlias = "Overlap | OverlappedUnits"


class Point(NamedTuple):
    """Where the update of a unit ends."""

    position: int
    end: Any
    submitted_ns: int
    parameters: list[torch.Tensor]
    nbytes: int


class Waiter:
    """Makes streams wait for units, as the engine does for its parts."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.end: Any = None

    def overlap_wait(self, _homes: Any, stream: int) -> bool:
        """Make a stream wait for ``end``; return whether that was still to come."""
        is_late = not self.wire.is_reached(self.end)
        if is_late:
            self.wire.wait(self.end, stream)
        return is_late


class OverlappedUnits:
    """The overlapped steps of one optimizer, from ``overlap_step`` to ``remove``.

    Parameters
    ----------
    units
        The optimizer's units.
    models
        The models that read its parameters.
    """

    is_begun = False
    """Whether a step has taken gradients in backward: never."""

    def __init__(self, units: Units, models: list[torch.nn.Module]) -> None:
        self._units = weakref.ref(units)
        self.readers = Readers(self, models)
        self.compute = units.device
        self.exposure = Exposure(self.compute)
        self._waiter = Waiter(units.wire)
        # Whether a step was submitted, and torch's stream does not run behind all of it yet.
        self.is_open = False
        # Steps, and passes since the beginning.
        self.steps, self.passes = 0, 0
        # Whether a backward has run since the last forward.
        self.in_backward = False
        self.waited_in_step = 0
        self._places = 0
        self._mine: set[int] = set()
        self._begin_ns = 0
        # Of the last step, and where each parameter is in it, by its id.
        self._points: list[Point] = []
        self._point_of: dict[int, Point] = {}
        self._pending: dict[int, torch.Tensor] = {}
        # Gradients that the step may still read, with the point at which it has read them.
        self._held: list[tuple[Any, list[torch.Tensor]]] = []
        self._stand_ins: dict[int, ConsumedGradient] = {}
        self._follow(units)
        units.overlap = self
        # Whatever is under way must not outlive the gradients that it reads.
        self._finalizer = weakref.finalize(units, self._outlive)
        self._finalizer.atexit = False

    @property
    def units(self) -> Units:
        """The optimizer's units."""
        found = self._units()
        if found is None:
            raise OptionError("the optimizer of this overlapped step is gone; call overlap_step for the new one")
        return found

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return what messages call a parameter."""
        units = self._units()
        return "a parameter" if units is None else name_of(units.optimizer, parameter)

    def _outlive(self) -> None:
        """Wait for what is under way, and take all hooks off: the optimizer is gone."""
        with suppress(DeviceError):
            self.finish()
        self._let_go(None)
        self.readers.remove()

    def _follow(self, units: Units) -> None:
        """Follow changes of the groups."""
        mine = {id(parameter) for _, parameter in members_of(units.optimizer)}
        if mine != self._mine:
            self.finish()
            self._mine, self._places = mine, 0
            self._stand_ins.clear()
            self.readers.install(mine)

    # The forward.

    def prepare_pass(self) -> None:
        """Before a model is called: follow changes."""
        units = self._units()
        if units is None:
            return
        if self.is_open:
            self.readers.follow_compiled()
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._follow(units)

    def begin_pass(self) -> None:
        """Count a new pass: a module is called after a backward."""
        self.in_backward, self.passes = False, self.passes + 1

    def next_place(self) -> int:
        """Return the next number in the order of a forward."""
        self._places += 1
        return self._places

    def check_readable(self, parameters: Iterable[torch.Tensor]) -> None:
        """Do nothing: until ``step`` is called, parameters have their values."""

    def wait_for(self, reader: Reader) -> None:
        """Make the current stream wait for the updates of a reader's parameters."""
        reader.step, reader.stream = self.steps, stream_handle(self.compute)
        self._wait(reader.parameters)
        self._held = [(end, held) for end, held in self._held if not self._waiter.wire.is_reached(end)]

    def order(self, parameters: Iterable[torch.Tensor], stream: int) -> None:
        """Make another stream wait for the updates of parameters."""
        if (end := self._end_of(parameters)) is not None:
            self._waiter.wire.wait(end, stream)

    def settle(self, parameters: Iterable[torch.Tensor] | None) -> None:
        """Wait for the updates of some parameters or of all, which are ordinary parameters from then on."""
        if self.is_open:
            self._wait(parameters)

    def _end_of(self, parameters: Iterable[torch.Tensor] | None) -> Any:
        """Return the end of the last unit that has one of these parameters; None if none has."""
        points = self._points
        if parameters is not None:
            points = [self._point_of[id(one)] for one in parameters if id(one) in self._point_of]
        return max(points, key=lambda point: point.position).end if points else None

    def _wait(self, parameters: Iterable[torch.Tensor] | None) -> None:
        if is_gpu(self.compute) and capturing():
            raise DeviceError(
                "a parameter whose update is still to come is read while a CUDA graph is captured; call "
                "optimizer.synchronize() before the capture"
            )
        self._waiter.end = self._end_of(parameters)
        if self._waiter.end is not None:
            waiter: Any = self._waiter
            self.exposure.wait(waiter, None, stream_handle(self.compute))
        self._let_go(parameters)

    def _let_go(self, parameters: Iterable[torch.Tensor] | None) -> None:
        for parameter in list(self._pending.values()) if parameters is None else parameters:
            if self._pending.pop(id(parameter), None) is not None:
                restore(parameter)

    # The step.

    def begin(self) -> None:
        """Before a step: torch's stream waits for the one before, whose gradients cannot be used again."""
        self.finish()
        for _, parameter in members_of(self.units.optimizer):
            if is_consumed(parameter.grad):
                raise OptionError(
                    f"the gradient of {self.name_of(parameter)} was used by the overlapped step before; call "
                    "zero_grad() after step()"
                )

    def go(self, run: Run) -> Any:
        """Submit a step, and return what the optimizer's own step returned."""
        owner = self.units
        parameters = [parameter for unit in run.units for parameter in unit.parameters]
        gradients = [parameter.grad for parameter in parameters]
        self._waiter.wire, self.compute = owner.wire, owner.device
        self._points, self._point_of, self._begin_ns = [], {}, time.perf_counter_ns()
        self.exposure.begin()
        with owner.wire.beside():
            result = run.go(self._updated)
        following = iter(gradients)
        self._held = [
            (point.end, [one for one in (next(following) for _ in point.parameters) if one is not None])
            for point in self._points
        ]
        is_hidden = not run.reads_elsewhere()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None and parameter.grad is gradient:
                parameter.grad = self._stand_in(parameter)
            elif parameter.grad is not None:
                # The step has made it, on its own stream.
                is_hidden = False
        self._pending = {id(parameter): parameter for parameter in parameters}
        mark(parameters, weakref.ref(self))
        self.is_open, self.steps = True, self.steps + 1
        # See [Note: parameters that step() waits for] in reads.py.
        unseen = parameters if not is_hidden else [one for one in parameters if not self.readers.waits_for(one)]
        if unseen:
            self._wait(unseen)
        self.waited_in_step = len(unseen)
        self.readers.begin_step()
        return result

    def _updated(self, unit: Unit) -> None:
        """Note where the update of a unit ends. Called on the stream of the step, after it was submitted."""
        submitted_ns = time.perf_counter_ns() - self._begin_ns
        end = self._waiter.wire.mark()
        point = Point(len(self._points), end, submitted_ns, unit.parameters, unit.nbytes)
        self._points.append(point)
        self._point_of.update((number, point) for number in unit.numbers)

    def _stand_in(self, parameter: torch.Tensor) -> ConsumedGradient:
        found = self._stand_ins.get(id(parameter))
        looks = (parameter.shape, parameter.dtype, parameter.device)
        if found is None or found._parameter() is not parameter or (found.shape, found.dtype, found.device) != looks:
            found = self._stand_ins[id(parameter)] = ConsumedGradient(parameter, weakref.ref(self))
        return found

    def finish(self) -> None:
        """Make torch's stream wait for the step under way, and drop its gradients."""
        if self.is_open:
            self._wait(None)
            self.is_open = False
        self._held.clear()

    # What users ask for.

    def remove(self) -> None:
        """Wait for the step under way, and take all hooks off."""
        units = self._units()
        self.finish()
        self._finalizer.detach()
        self.readers.remove()
        if units is not None and units.overlap is self:
            units.overlap = None

    def give_back(self) -> bool:
        """Return False: a gradient that the step has is used by it, and never given back."""
        return False

    def stats(self) -> dict[str, float | int]:
        """Return the numbers of the last step; see ``OverlappedStep.stats``."""
        units = self._units()
        return {
            "steps": self.steps,
            **self.exposure.stats(),
            "freed_bytes": 0,
            "held_bytes": sum(local(one).nbytes for _, held in self._held for one in held),
            "taken_in_backward": 0,
            "waited_in_step": self.waited_in_step,
            "speculated": 0,
            "accepted": 0,
            **({} if units is None else units.memory()),
        }

    def plan(self) -> list[dict[str, Any]]:
        """Return the units of the last step, with the names of their parameters."""
        return [
            {
                "position": point.position,
                "submitted_ns": point.submitted_ns,
                "late": True,
                "bytes": point.nbytes,
                "tensors": [self.name_of(parameter) for parameter in point.parameters],
            }
            for point in self._points
        ]
