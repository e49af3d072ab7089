"""Activations under a budget: the first passes measure, the engine plans, later passes follow the plan.

A *pass* is a forward pass and its backward pass. The first two passes of a workload take little memory: every layer is
recomputed and its inputs are offloaded. Only the first layer of each kind is watched operation by operation, and
everything that it saves is offloaded. From these measurements the engine computes costs and a plan
(``forebay._core.PassCost.plan``). The next passes are compared with the plan. If its peak or its time was wrong, the
next plan is corrected by the difference. If calls saved more than when they were measured, they are measured again.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forebay import _core
from forebay._device import CPU, Clock, Meter, total_memory
from forebay.activations.budget.gradients import GradientCount
from forebay.activations.budget.passes import (
    Kind,
    Pass,
    Place,
    Point,
    Way,
    alike,
    build_of,
    shape_of,
    state_of,
    tensors_of,
)
from forebay.activations.budget.probe import Probe
from forebay.activations.budget.workload import Link, Measurement, Workload, ways_of
from forebay.activations.switch import has_switch, is_on
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.activations.budget.layer import PlannedLayer
    from forebay.activations.budget.workload import PlanRun
    from forebay.activations.saved import Engine, Saver

MEASURING = 2
"""Passes of a workload that measure before the first plan: one finds what may be recomputed, one takes times."""
PATIENCE = 20
"""After this many passes without a plan and without a backward pass, there is a warning."""
ROUNDS = 5
"""Plans of a workload that are checked and corrected before one is final."""


class ThreadState(threading.local):
    """The pass and the layers in which a thread is."""

    def __init__(self) -> None:
        self.now: Pass | None = None
        # The beginning of the pass whose first call comes next.
        self.fresh: Point | None = None
        self.in_model = False
        # Numbers of the layers whose calls are running.
        self.inside: list[int] = []


class Shown(NamedTuple):
    """What ``ActivationOffload`` shows of a budget."""

    run: PlanRun
    notes: list[str]


class Budget:
    """Watches passes, makes plans, and decides what happens to each call of a layer."""

    def __init__(
        self,
        saver: Saver,
        limit: int | None,
        share: float | None,
        *,
        may_recompute: bool,
        pinned_budget_bytes: int | None,
        model: torch.nn.Module,
    ) -> None:
        self.saver, self.limit, self.share, self.may_recompute = saver, limit, share, may_recompute
        self.pinned_budget_bytes = pinned_budget_bytes
        self.model: torch.nn.Module | None = model
        self.layers: list[PlannedLayer] = []
        self.modules: list[torch.nn.Module] = []
        # Modules inside of layers that have a checkpointing of their own.
        self.switches: list[torch.nn.Module] = []
        # The calls of a pass in their order, and their numbers. Replaced, not changed: each pass keeps its own.
        self.places: list[Place] = []
        self.numbers: dict[Place, int] = {}
        self.workloads: dict[tuple[Any, ...], Workload] = {}
        self.workload = Workload(1)
        self.last: Pass | None = None
        self.shown: Pass | None = None
        self.ended: list[Pass] = []
        # Watched passes whose graphs exist.
        self.flying: list[weakref.ref[Pass]] = []
        self.local = ThreadState()
        self.warned: set[str] = set()
        self.meter: Meter = meter_of(CPU)
        self.clock = Clock(CPU)
        # For tests: replaces what the plan decided for the calls of a pass.
        self.forced: Callable[[list[Way]], list[Way]] | None = None

    def adopt(self, layers: list[PlannedLayer]) -> None:
        """Set the layers. Until a pass shows otherwise, each is assumed to be called once."""
        self.layers = layers
        self._order([Place(layer.number, 0) for layer in layers])

    def _order(self, places: list[Place]) -> None:
        self.places, self.numbers = places, {place: number for number, place in enumerate(places)}
        self.workloads = {}

    def forget(self) -> None:
        """Drop the layers. The last plan and its figures can still be shown."""
        for ref in self.flying:
            if (state := ref()) is not None:
                state.finish()
        self.layers, self.modules, self.switches, self.model = [], [], [], None
        self.workloads, self.ended, self.flying = {}, [], []
        self.last, self.local = None, ThreadState()

    # What happens in a pass.

    def model_begins(self) -> None:
        """Record that the model was called: the next layer begins a pass, the only one before the model returns."""
        # A call without gradients inside of one with them changes nothing for that one.
        if torch.is_grad_enabled() and self.layers:
            self._take_device(self.layers[0].device)
            self.local.in_model, self.local.fresh = True, self._beginning()

    def model_ends(self) -> None:
        """Record that the model has returned."""
        if torch.is_grad_enabled():
            self.local.in_model, self.local.fresh = False, None

    def _beginning(self) -> Point:
        now, peak = self.meter.read()
        return Point("begin", -1, self.clock.mark(), now, peak, 0)

    def _take_device(self, device: torch.device) -> None:
        if self.clock.device != device:
            # Marks of another device's clock have no meaning here.
            self.meter, self.clock, self.local.fresh, self.ended = meter_of(device), Clock(device), None, []

    def enter(self, layer: PlannedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Pass, int]:
        """Return the pass that a call of a layer belongs to, which may begin with it, and the call's number in it."""
        here = self.local
        state = here.now
        if state is None or here.fresh is not None or not (here.in_model or self._continues(state, layer)):
            self._take_device(layer.device)
            begin, here.fresh = here.fresh, None
            if begin is None:
                begin = self._beginning()
            self._finish_ended()
            state = here.now = self.last = self._begin(begin, tensors_of(args, kwargs))
        elif layer.device != self.clock.device:
            raise OptionError(
                f"budget_bytes plans for one device, and layer {layer.number} runs on {layer.device} after others on "
                f"{self.clock.device}; pass layers=[...] of one device, or use fraction instead"
            )
        number = self._number(state, layer)
        if state.stage < MEASURING:
            family = build_of(layer.module, args, kwargs)
            needs = tuple(one.requires_grad for one in tensors_of(args, kwargs))
            kind = Kind(number, type(layer.module).__name__, family)
            state.workload.kinds[number] = state.workload.builds.setdefault((family, needs), kind)
        return state, number

    def _continues(self, state: Pass, layer: PlannedLayer) -> bool:
        """Whether a layer that is called outside of the model is the next of a pass, not the first of another."""
        return not state.ended and (state.at is None or layer.number > state.at.layer)

    def _number(self, state: Pass, layer: PlannedLayer) -> int:
        nth = state.calls.get(layer.number, 0)
        state.calls[layer.number] = nth + 1
        place, before, state.at = Place(layer.number, nth), state.at, Place(layer.number, nth)
        number = state.numbers.get(place)
        if number is None:
            # A call that no earlier pass made. In this pass its number is the last; in the next ones it is in order.
            number = len(state.ways)
            state.numbers = state.numbers | {place: number}
            state.ways.append(_offload_all(number))
            if place not in self.numbers:
                at = self.numbers[before] + 1 if before is not None else 0
                self._order([*self.places[:at], place, *self.places[at:]])
        return number

    def _begin(self, begin: Point, tensors: list[torch.Tensor]) -> Pass:
        shape = shape_of(tensors)
        tokens = max(1, math.prod(shape[:-1]))
        every = (p for layer in self.layers for p in layer.module.parameters())
        trained = next((p for p in every if p.requires_grad and p.is_leaf), None)
        # A pass that has to make the gradients takes more memory than one that adds to them.
        makes = trained is not None and trained.grad is None
        if not self.modules or self.workload.cost is None:
            self.modules = [module for layer in self.layers for module in layer.module.modules()]
            layers = {layer.module for layer in self.layers}
            self.switches = [module for module in self.modules if has_switch(module) and module not in layers]
        switched = tuple(map(is_on, self.switches))
        key = (makes, switched, state_of(self.modules), *alike(tensors, self.clock.device))
        workload = self.workload = self.workloads.setdefault(key, Workload(tokens))
        run: PlanRun | None = None
        if workload.cost is None:
            ways = [_offload_all(number) for number in range(len(self.places))]
            stage, watched = min(workload.passes, MEASURING - 1), True
            self._expect_backward(workload, shape)
        else:
            # The first copies to memory that was just pinned are slow, so each new plan reads the rates again.
            run = workload.plan(tokens, self._limit(begin.now), self._link())
            stage, watched = MEASURING, not workload.done or run.seen == 0
            ways = ways_of(run.planned.plan, workload.keys)
        if self.forced is not None:
            ways = self.forced(ways)
        found = Pass(workload, self.numbers, ways, begin, stage=stage, watched=watched, run=run, tokens=tokens)
        if watched:
            self._read_peak()
            self.flying = [*(ref for ref in self.flying if not _is_over(ref())), weakref.ref(found)]
        if stage == MEASURING - 1 and self.meter.is_known and self.model is not None:
            found.count(GradientCount(self.model, self.meter))
        return found

    def _expect_backward(self, workload: Workload, shape: tuple[int, ...]) -> None:
        """Warn if many passes begin and none of them has a backward pass to measure."""
        states = (ref() for ref in self.flying)
        alive = sum(1 for state in states if state is not None and not state.finished and state.workload is workload)
        lost = workload.begun - workload.passes - alive
        workload.begun += 1
        if lost >= PATIENCE and not workload.warned:
            workload.warned = True
            self.warn_once(
                f"{lost + workload.passes} forward passes of shape {shape} have ended, and only {workload.passes} had "
                "a backward pass, so there is no plan yet: all layers are recomputed or offloaded; call backward, or "
                "evaluate under torch.no_grad()"
            )

    def _limit(self, now: int) -> int:
        if self.limit is not None:
            return self.limit
        whole = total_memory(self.clock.device)
        # Rounded down: the memory in use when passes begin is never exactly the same.
        grain = max(1, whole // 256)
        return max(0, int((self.share or 0.0) * whole) - now) // grain * grain

    def way(self, state: Pass, number: int) -> Way:
        """Return what happens to a call; in the first pass that depends on the calls before it."""
        if state.stage < MEASURING:
            kind = state.workload.kinds[number]
            may = self.may_recompute and kind.vetted and kind.reason is None
            way = _offload_all(number)
            if may and kind.first != number:
                way = Way(recompute=True, free_at=number + 1, fetch_at=min(number + 1, len(state.ways) - 1))
            state.ways[number] = way
        return state.ways[number]

    def probe(self, state: Pass, number: int, layer: PlannedLayer) -> Probe | None:
        """Return the probe of a call in this pass, if it has one."""
        if state.stage >= MEASURING or layer.is_compiled:
            return None
        kind = state.workload.kinds[number]
        if kind.first != number:
            return None
        probe = Probe(self.clock, layer.module, managed=layer.is_managed, fingerprints=kind.unchanged is None)
        state.probes[number] = probe
        return probe

    def vet(self, state: Pass, number: int, probe: Probe | None) -> None:
        """Record whether calls of this kind may run twice."""
        kind = state.workload.kinds[number]
        if kind.first != number:
            return
        kind.vetted = True
        if probe is not None and probe.reason is not None and kind.reason is None:
            kind.reason = probe.reason
            self.warn_once(
                f"layer {number} ({kind.name}) and layers of the same kind are not recomputed: {probe.reason}; they "
                "are kept or offloaded"
            )

    def warn_once(self, text: str) -> None:
        """Warn, once."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, stacklevel=2)

    def _read_peak(self) -> tuple[int, int]:
        """Return the bytes in use now and the peak since the last call. The peak counts for all passes in flight."""
        now, peak = self.meter.read()
        self.meter.reset()
        for ref in self.flying:
            if (state := ref()) is not None:
                state.peak = max(state.peak, peak)
        return now, peak

    def sample(self, state: Pass, event: str, call: int, engine: Engine | None) -> None:
        """Take a sample of a watched pass."""
        now, peak = self._read_peak()
        held = sum(storage.nbytes() for storage in list(engine.held.values())) if engine is not None else 0
        made = state.gradients.read(peak) if state.gradients is not None else (0, 0)
        state.points.append(Point(event, call, self.clock.mark(), now, peak, held, time.perf_counter_ns(), *made))

    def note_use(self, state: Pass, call: int, engine: Engine) -> None:
        """Record that a saved tensor of a call is used."""
        if state.running and call in state.probes:
            # A checkpoint would recompute it now and hold it until the backward pass.
            state.probes[call].refuse("it takes gradients in its forward pass")
        if state.running or state.finished:
            return
        if not state.callback and torch._C._current_graph_task_id() != -1:
            state.callback = True
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._backward_ends(state, engine))
        if call not in state.opened:
            state.opened.add(call)
            if state.watched:
                self.sample(state, "open", call, engine)

    def _backward_ends(self, state: Pass, engine: Engine) -> None:
        # Another backward pass over the same graph may follow; the last before the next forward pass counts.
        state.callback = False
        if state.finished:
            return
        if state.watched:
            self.sample(state, "end", -1, engine)
        else:
            now, peak = self.meter.read()
            state.points.append(Point("end", -1, self.clock.mark(), now, peak, 0))
        if not state.ended:
            state.ended = True
            self.ended.append(state)
        if self.last is not None and self.last is not state:
            state.workload.overlaps = self.last.workload.overlaps = True

    # What passes show.

    def _finish_ended(self) -> None:
        """Learn from passes that have ended."""
        ended, self.ended = self.ended, []
        for state in ended:
            state.finish()
            # Calls may have been found meanwhile, so that numbers differ, or the workload may be measured again.
            if state.numbers is not self.numbers or state.renewals != state.workload.renewals or not self.layers:
                continue
            if not state.watched:
                self._check_unwatched(state)
                continue
            self.clock.wait(state.points[-1].mark)
            if state.stage < MEASURING:
                self._learn(state)
            else:
                self._check(state)

    def _learn(self, state: Pass) -> None:
        """Learn from a measuring pass; the last one gives the costs."""
        workload = state.workload
        workload.learn(state, self.saver.min_bytes)
        if state.stage == MEASURING - 1 and workload.cost is None:
            workload.tokens = state.tokens
            host_bytes = self._host_bytes(int(self.saver.stats()["pinned_bytes"]))
            workload.cost = state.measured(self.clock, may_recompute=self.may_recompute).cost(host_bytes=host_bytes)
            workload.keys = [kind.keys for kind in workload.kinds_of(len(self.places))]

    def _check_unwatched(self, state: Pass) -> None:
        """Read the time of a pass that was not watched, and its peak if it is a new one."""
        workload, run, begin, end = state.workload, state.run, state.points[0], state.points[-1]
        if run is None or run.measured is None:
            return
        self.shown = state
        if self.clock.is_reached(end.mark):
            run.measured = dataclasses.replace(run.measured, pass_s=self.clock.ns(begin.mark, end.mark) / 1e9)
        # An earlier peak, such as an optimizer's, is not this pass's.
        if not self.meter.is_known or end.peak <= begin.peak:
            return
        peak, limit = end.peak - begin.now, self._limit(begin.now)
        if peak <= limit or limit <= 0:
            return
        if workload.is_least(run, peak):
            self._warn_over(workload, peak, limit)
        else:
            # The layer with the peak is not known, so the next passes are watched.
            workload.done, run.seen = False, 0

    def _warn_over(self, workload: Workload, peak: int, limit: int) -> None:
        several = " together with passes that overlap it" if workload.overlaps else ""
        self.warn_once(
            f"a pass takes {peak} bytes{several}, more than the budget of {limit}, and no plan takes less; "
            "use a larger budget"
        )

    def _check(self, state: Pass) -> None:
        """Compare a pass with its plan, and correct the next plan."""
        workload, run = state.workload, state.run
        if run is None or workload.cost is None:
            return
        if workload.renewals < ROUNDS and workload.saves_more(state, self.saver.min_bytes):
            workload.measure_again()
            return
        begin = state.points[0]
        peak, ns = state.peak - begin.now, self.clock.ns(begin.mark, state.points[-1].mark)
        known_peak = peak if self.meter.is_known else None
        self.shown = state
        run.measured = Measurement(ns / 1e9, known_peak, tuple(state.measured(self.clock).times()))
        run.seen += 1
        limit = run.planned.limit_bytes
        over = known_peak is not None and known_peak > limit
        # The first pass under a new plan is slow in many ways, but it shows the peak.
        if run.seen < 2 and not over:
            return
        if over and workload.is_least(run, peak):
            workload.done = True
            self._warn_over(workload, peak, limit)
            return
        stays = workload.check(run, known_peak, ns, self._link(), over=over)
        workload.done = stays or workload.rounds >= ROUNDS

    def _link(self) -> Link:
        """Return the rates of the last copies. A direction without copies yet gets the rate of the other."""
        stats = self.saver.stats()
        store, fetch = stats["store_gbps"], stats["fetch_gbps"]
        return Link(store_gbps=store or fetch or 1.0, fetch_gbps=fetch or store or 1.0)

    def _host_bytes(self, pinned: int) -> int:
        """Return how much may be pinned in all."""
        available = pinned + int(0.9 * _core.host_memory()[1])
        return available if self.pinned_budget_bytes is None else min(available, self.pinned_budget_bytes)

    # What is shown.

    @property
    def kinds(self) -> list[Kind]:
        """The kind of each call, in passes like the last."""
        return self.workload.kinds_of(len(self.places))

    def called(self) -> list[PlannedLayer]:
        """Return the layer of each call."""
        return [self.layers[place.layer] for place in self.places] if self.layers else []

    def figures(self) -> Shown | None:
        """Return the plan in force with its measurements; None before the first plan."""
        self._finish_ended()
        state = self.shown
        if state is None or state.run is None:
            return None
        return Shown(state.run, self._notes(state.workload))

    def _notes(self, workload: Workload) -> list[str]:
        """Return notes that are not part of the plan itself."""
        kinds = {id(kind): kind for kind in workload.kinds.values() if kind.reason is not None}.values()
        notes = [f"layer {kind.first} and layers of the same kind are not recomputed: {kind.reason}" for kind in kinds]
        if workload.overlaps:
            notes.append("passes overlap: the budget counts from the memory in use when each pass begins")
        return notes


def _offload_all(number: int) -> Way:
    """Offload all that a call saves, free it as early and fetch it as late as possible."""
    return Way(recompute=False, free_at=number + 1, fetch_at=number, offload_bytes=math.inf)


def _is_over(state: Pass | None) -> bool:
    return state is None or state.finished


def meter_of(device: torch.device) -> Meter:
    """Return what reads a device's memory."""
    return Meter(device)
