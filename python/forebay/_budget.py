"""Activations under a budget: the first passes measure, the engine plans, later passes follow the plan.

A *pass* is a forward pass and its backward pass. The first two passes of a shape are frugal: every layer is recomputed
and its inputs offloaded, but for the first layer of each kind, which is watched operation by operation and offloaded
whole. From what they show, ``forebay._core.plan_activations`` makes the plan. The passes after that show how good it
was; if its peak or its time was off, the next plan is corrected by as much; if calls saved more than they did when
they were measured, they are measured again.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core
from forebay._costs import cost_of, times_of
from forebay._passes import Book, Kind, Pass, Place, Point, Way, alike, build_of, shape_of, state_of, tensors_of
from forebay._select import Clock, Key, Probe
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay._planned import PlannedLayer
    from forebay._saved import Engine, Saver

MEASURING = 2
"""Passes of a shape that measure before the first plan: one to see what may be done, one to take its time."""
PATIENCE = 20
"""Passes of a shape that are begun and not ended without a plan before something is said about it."""
ROUNDS = 5
"""Plans of a shape that are checked and corrected before one is left alone."""
FIRST_SHARE, SHARE = 0.98, 0.995
"""How much of the budget the first plan of a shape may use, before any was checked; and how much later ones may."""
WIRE_CHANGE = 0.15
"""If the wire turns out to be faster or slower than a plan took it to be by more than this, there is another plan."""
GROWTH = 16
"""A call that saves more than it did by one part in so many is measured again."""


class Meter:
    """What torch has allocated on a device, and the most since the last reset. Nothing is known of the CPU's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self) -> tuple[int, int]:
        """Return bytes now, and at the peak."""
        if self.device.type != "cuda":
            return 0, 0
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        return int(stats["current"]), int(stats["peak"])

    def reset(self) -> None:
        """Forget the peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to read."""
        return self.device.type == "cuda"


def capacity(device: torch.device) -> int:
    """Return all memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(_core.host_memory()[0])


class Here(threading.local):
    """Where a thread is."""

    def __init__(self) -> None:
        self.now: Pass | None = None
        # The beginning of the pass whose first call comes next.
        self.fresh: Point | None = None
        self.in_model = False
        # Numbers of the layers that it is inside of.
        self.inside: list[int] = []


class Budget:
    """Watches passes, has them planned, and says for each call of a layer what becomes of it."""

    def __init__(
        self,
        saver: Saver,
        limit: int | None,
        share: float | None,
        *,
        may_recompute: bool,
        pinned_budget_bytes: int | None,
    ) -> None:
        self.saver, self.limit, self.share, self.may_recompute = saver, limit, share, may_recompute
        self.pinned_budget_bytes = pinned_budget_bytes
        self.layers: list[PlannedLayer] = []
        self.modules: list[torch.nn.Module] = []
        # The calls of a pass in their order, and their numbers. Replaced, not changed: passes keep those of theirs.
        self.places: list[Place] = []
        self.numbers: dict[Place, int] = {}
        self.books: dict[tuple[Any, ...], Book] = {}
        self.book = Book(1)
        self.last: Pass | None = None
        self.shown: Pass | None = None
        self.ended: list[Pass] = []
        # Watched passes whose graphs exist.
        self.flying: list[weakref.ref[Pass]] = []
        self.local = Here()
        self.warned: set[str] = set()
        self.meter: Meter = meter_of(torch.device("cpu"))
        self.clock = Clock(torch.device("cpu"))
        # For tests: ways to take whatever the plan says.
        self.forced: Callable[[list[Way]], list[Way]] | None = None

    def adopt(self, layers: list[PlannedLayer]) -> None:
        """Take the layers; until a pass shows otherwise each is called once."""
        self.layers = layers
        self._order([Place(layer.number, 0) for layer in layers])

    def _order(self, places: list[Place]) -> None:
        self.places, self.numbers = places, {place: number for number, place in enumerate(places)}
        self.books = {}

    def forget(self) -> None:
        """Let go of the layers; what is known and shown stays."""
        self.layers, self.modules, self.books, self.ended, self.flying = [], [], {}, [], []
        self.last, self.local = None, Here()

    # What happens in a pass.

    def model_begins(self) -> None:
        """Note that the model was called: a pass begins with the next layer, and no other before the model returns."""
        # A call without gradients inside of one with them changes nothing for that one.
        if torch.is_grad_enabled() and self.layers:
            self._find_device(self.layers[0].device)
            self.local.in_model, self.local.fresh = True, self._beginning()

    def model_ends(self) -> None:
        """Note that the model has returned."""
        if torch.is_grad_enabled():
            self.local.in_model, self.local.fresh = False, None

    def _beginning(self) -> Point:
        now, peak = self.meter.read()
        return Point("begin", -1, self.clock.mark(), now, peak, 0)

    def _find_device(self, device: torch.device) -> None:
        if self.clock.device != device:
            # What was noted on another device's clock says nothing here.
            self.meter, self.clock, self.local.fresh, self.ended = meter_of(device), Clock(device), None, []

    def enter(self, layer: PlannedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Pass, int]:
        """Return the pass that a call of a layer belongs to, which may begin with it, and the call's number in it."""
        here = self.local
        state = here.now
        if state is None or here.fresh is not None or not (here.in_model or self._goes_on(state, layer)):
            self._find_device(layer.device)
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
            state.book.kinds[number] = state.book.builds.setdefault((family, needs), kind)
        return state, number

    def _goes_on(self, state: Pass, layer: PlannedLayer) -> bool:
        """Whether a layer that is called outside of the model is the next of a pass, not the first of another."""
        return not state.ended and (state.at is None or layer.number > state.at.layer)

    def _number(self, state: Pass, layer: PlannedLayer) -> int:
        nth = state.calls.get(layer.number, 0)
        state.calls[layer.number] = nth + 1
        place, before, state.at = Place(layer.number, nth), state.at, Place(layer.number, nth)
        number = state.numbers.get(place)
        if number is None:
            # A call that no pass has had yet. It comes last among this one's numbers; the next passes have it in order.
            number = len(state.ways)
            state.numbers = state.numbers | {place: number}
            state.ways.append(_whole(number))
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
        if not self.modules or self.book.cost is None:
            self.modules = [module for layer in self.layers for module in layer.module.modules()]
        key = (makes, state_of(self.modules), *alike(tensors, self.clock.device))
        book = self.book = self.books.setdefault(key, Book(tokens))
        plan: dict[str, Any] | None = None
        if book.cost is None:
            ways = [_whole(number) for number in range(len(self.places))]
            stage, watched = min(book.passes, MEASURING - 1), True
            self._wait_for_backward(book, shape)
        else:
            plan = self._plan(book, tokens, self._limit(begin.now))
            stage, watched = MEASURING, not book.done or plan["seen"] == 0
            ways = self._ways(plan, book.keys)
        if self.forced is not None:
            ways = self.forced(ways)
        found = Pass(book, self.numbers, ways, begin, stage=stage, watched=watched, plan=plan, tokens=tokens)
        if watched:
            self._read_peak()
            self.flying = [*(ref for ref in self.flying if not _is_over(ref())), weakref.ref(found)]
        return found

    def _wait_for_backward(self, book: Book, shape: tuple[int, ...]) -> None:
        """Say so if passes come and go and none of them shows anything."""
        alive = sum(
            1 for ref in self.flying if not _is_over(state := ref()) and state is not None and state.book is book
        )
        lost = book.begun - book.passes - alive
        book.begun += 1
        if lost >= PATIENCE and not book.said:
            book.said = True
            self.say_once(
                f"{lost + book.passes} forward passes over {shape} have come and gone and {book.passes} were followed "
                "by a backward pass, so forebay has no plan for them yet: all layers are recomputed or offloaded; "
                "call backward, or evaluate under torch.no_grad()"
            )

    def _limit(self, now: int) -> int:
        if self.limit is not None:
            return self.limit
        whole = capacity(self.clock.device)
        # In steps: what is there as passes begin is never quite the same.
        grain = max(1, whole // 256)
        return max(0, int((self.share or 0.0) * whole) - now) // grain * grain

    def way(self, state: Pass, number: int) -> Way:
        """Return what becomes of a call; in the first pass that depends on the calls before it."""
        if state.stage < MEASURING:
            kind = state.book.kinds[number]
            may = self.may_recompute and kind.vetted and kind.reason is None
            way = _whole(number)
            if may and kind.first != number:
                way = Way(recompute=True, let_go_at=number + 1, fetch_at=min(number + 1, len(state.ways) - 1))
            state.ways[number] = way
        return state.ways[number]

    def probe(self, state: Pass, number: int, layer: PlannedLayer) -> Probe | None:
        """Return what watches a call's operations in this pass."""
        if state.stage >= MEASURING or layer.is_compiled:
            return None
        kind = state.book.kinds[number]
        if kind.first != number:
            return None
        probe = Probe(self.clock, layer.module, managed=layer.is_managed, sums=kind.sound is None)
        state.probes[number] = probe
        return probe

    def vetted(self, state: Pass, number: int, probe: Probe | None) -> None:
        """Take note of whether calls like this one may run twice."""
        kind = state.book.kinds[number]
        if kind.first != number:
            return
        kind.vetted = True
        if probe is not None and probe.reason is not None and kind.reason is None:
            kind.reason = probe.reason
            self.say_once(
                f"forebay does not recompute layer {number} and those like it, a {kind.name}: "
                f"{probe.reason}; they are kept or offloaded"
            )

    def say_once(self, text: str) -> None:
        """Warn, once."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, stacklevel=2)

    def _read_peak(self) -> tuple[int, int]:
        """Return bytes now, and the most since this was asked for last; all passes under way had it."""
        now, peak = self.meter.read()
        self.meter.reset()
        for ref in self.flying:
            if (state := ref()) is not None:
                state.peak = max(state.peak, peak)
        return now, peak

    def point(self, state: Pass, what: str, call: int, engine: Engine | None) -> None:
        """Note a moment of a watched pass."""
        now, peak = self._read_peak()
        held = sum(storage.nbytes() for storage in list(engine.held.values())) if engine is not None else 0
        state.points.append(Point(what, call, self.clock.mark(), now, peak, held, time.perf_counter_ns()))

    def opens(self, state: Pass, call: int, engine: Engine) -> None:
        """Note that a saved tensor of a call is used."""
        if state.running and call in state.probes:
            # What a checkpoint recomputes for it stays there until the backward pass.
            state.probes[call].refuse("it takes gradients in its forward pass")
        if state.running or state.finished:
            return
        if not state.callback and torch._C._current_graph_task_id() != -1:
            state.callback = True
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._ends(state, engine))
        if call not in state.opened:
            state.opened.add(call)
            if state.watched:
                self.point(state, "open", call, engine)

    def _ends(self, state: Pass, engine: Engine) -> None:
        # Another backward pass over the same graph may follow; the last before the next forward pass counts.
        state.callback = False
        if state.finished:
            return
        if state.watched:
            self.point(state, "end", -1, engine)
        else:
            now, peak = self.meter.read()
            state.points.append(Point("end", -1, self.clock.mark(), now, peak, 0))
        if not state.ended:
            state.ended = True
            self.ended.append(state)
        if self.last is not None and self.last is not state:
            state.book.overlaps = self.last.book.overlaps = True

    # What is learnt from it.

    def _finish_ended(self) -> None:
        """Learn from passes that have come to their end."""
        ended, self.ended = self.ended, []
        for state in ended:
            state.finished = True
            # Where calls were found meanwhile numbers are not what they were, and what is measured again is forgotten.
            if state.numbers is not self.numbers or state.renewals != state.book.renewals or not self.layers:
                continue
            if not state.watched:
                self._glance(state)
                continue
            self.clock.wait(state.points[-1].mark)
            if state.stage < MEASURING:
                self._learn(state)
            else:
                self._check(state)

    def _learn(self, state: Pass) -> None:
        """Learn from a pass that measures."""
        book = state.book
        book.passes += 1
        for number, probe in state.probes.items():
            book.kinds[number].learn(probe, self.saver.min_bytes)
        for number, size in state.packed.items():
            kind = book.kinds[number]
            if state.ways[number].recompute:
                kind.input_bytes = max(kind.input_bytes, size)
            else:
                kind.saved_bytes = max(kind.saved_bytes, size)
        for number, size in state.shared.items():
            book.kinds[number].shared_bytes = max(book.kinds[number].shared_bytes, size)
        if state.stage == MEASURING - 1 and book.cost is None:
            book.tokens = state.tokens
            host = {"host_bytes": self._host_bytes(int(self.saver.stats()["pinned_bytes"]))}
            book.cost = cost_of(state, self.clock, may_recompute=self.may_recompute) | host | self._wire()
            book.keys = [kind.keys for kind in self._kinds(book)]

    def _glance(self, state: Pass) -> None:
        """Learn from a pass that nobody watched: its time, and its peak where that is a new one."""
        book, plan, begin, end = state.book, state.plan, state.points[0], state.points[-1]
        if plan is None or not plan["measured"]:
            return
        self.shown = state
        if self.clock.is_over(end.mark):
            plan["measured"]["pass_s"] = self.clock.ns(begin.mark, end.mark) / 1e9
        # A peak from before, an optimizer's for one, is not this pass's.
        if not self.meter.is_known or end.peak <= begin.peak:
            return
        peak, limit = end.peak - begin.now, self._limit(begin.now)
        if peak <= limit or limit <= 0:
            return
        if self._is_least(book, plan, peak):
            self._say_over(book, peak, limit)
        else:
            # In which layer it was is not known: the next passes are watched.
            book.done, plan["seen"] = False, 0

    def _is_least(self, book: Book, plan: dict[str, Any], peak: int) -> bool:
        """Whether another plan would not take less than one that takes so much: what was off is allowed for already."""
        excess = float(peak - plan["model_peak_bytes"])
        return bool(
            plan["frugal"] or (plan["settled"] and book.excess_bytes is not None and excess <= book.excess_bytes)
        )

    def _say_over(self, book: Book, peak: int, limit: int) -> None:
        several = ", with passes that begin before others have ended" if book.overlaps else ""
        self.say_once(
            f"a pass takes {peak} bytes{several}, more than the budget of {limit}, and no plan takes less; "
            "give it a larger budget"
        )

    def _check(self, state: Pass) -> None:
        """Compare a pass with its plan, and correct the next plan."""
        book, plan = state.book, state.plan
        if plan is None or book.cost is None:
            return
        if book.renewals < ROUNDS and self._saves_more(state, book.cost):
            book.measure_again()
            return
        begin = state.points[0]
        peak, ns = state.peak - begin.now, self.clock.ns(begin.mark, state.points[-1].mark)
        self.shown = state
        plan["measured"] = {
            "pass_s": ns / 1e9,
            "peak_bytes": peak if self.meter.is_known else None,
            "layers": times_of(state, self.clock),
        }
        plan["seen"] += 1
        over = self.meter.is_known and peak > plan["limit_bytes"]
        # The first pass in a new way is slow in many ways, but it shows the peak.
        if plan["seen"] < 2 and not over:
            return
        if over and self._is_least(book, plan, peak):
            book.done = True
            self._say_over(book, peak, plan["limit_bytes"])
            return
        now = self._wire()
        same_wire = all(abs(now[name] - plan[name]) <= WIRE_CHANGE * plan[name] for name in now)
        settled = plan["settled"] and same_wire and not over
        if self.meter.is_known:
            excess = float(peak - plan["model_peak_bytes"])
            before = book.excess_bytes
            book.excess_bytes = excess if before is None or not plan["settled"] else max(excess, before)
        if plan["seen"] >= 2:
            book.pace = ns / max(1, plan["model_pass_ns"])
        book.rounds += 1
        book.done = settled or book.rounds >= ROUNDS
        if not settled:
            book.plans.clear()

    def _saves_more(self, state: Pass, cost: dict[str, Any]) -> bool:
        """Whether a call saved more than when it was measured: what was trained, or is done, is no longer the same."""
        # A shorter pass saves no more than the one that was measured; not all that it saves is shorter.
        longer = max(1.0, state.tokens / state.book.tokens) * (1 + 1 / GROWTH)
        shared = max((kind.shared_bytes for kind in state.book.kinds.values()), default=0)
        for number, size in state.packed.items():
            row = cost["layers"][number]
            known = row["input_bytes"] + shared if state.ways[number].recompute else row["saved_bytes"]
            if size > known * longer + self.saver.min_bytes:
                return True
        return False

    def _plan(self, book: Book, tokens: int, limit: int) -> dict[str, Any]:
        """Return the plan for so many tokens; sizes between those that were seen are rounded up."""
        grain = max(1, book.tokens // 32)
        steps = -(-(tokens - book.tokens) // grain)
        planned = book.tokens + steps * grain
        known = book.plans.get((planned, limit))
        if known is not None:
            return known
        assert book.cost is not None
        # The first copies to memory that was just pinned are slow, so the wire is looked at again for every plan.
        wire = self._wire()
        cost = json.dumps(book.cost | wire)
        settled = book.rounds > 0
        allowed = int(limit * SHARE - (book.excess_bytes or 0.0)) if settled else int(limit * FIRST_SHARE)

        def make(budget: int | None) -> dict[str, Any]:
            plan: dict[str, Any] = json.loads(_core.plan_activations(cost, budget, planned, book.tokens))
            return plan

        try:
            plan, frugal = make(max(0, min(allowed, limit * 2))), False
        except OptionError:
            plan, frugal = _last_resort(make, limit, book.excess_bytes or 0.0, settled=settled)
        plan["model_peak_bytes"], plan["model_pass_ns"] = plan["peak_bytes"], plan["pass_ns"]
        plan["peak_bytes"] = int(plan["peak_bytes"] + (book.excess_bytes or 0.0))
        plan["pass_ns"] = int(plan["pass_ns"] * book.pace)
        plan["limit_bytes"], plan["budget_bytes"], plan["settled"], plan["seen"] = limit, limit, settled, 0
        plan |= {"frugal": frugal, "measured": {}} | wire
        book.plans[planned, limit] = plan
        return plan

    def _ways(self, plan: dict[str, Any], keys: list[list[Key]]) -> list[Way]:
        ways = []
        for mine, chosen in zip(keys, plan["layers"], strict=True):
            wanted: dict[Key, bool] = {}
            # Of a layer that is not recomputed no result is had by itself.
            for key, choice in zip(mine if chosen["recompute"] else (), chosen["tensors"], strict=chosen["recompute"]):
                if choice != "recompute":
                    wanted[key] = choice == "offload"
            ways.append(
                Way(
                    recompute=chosen["recompute"],
                    let_go_at=chosen["let_go_at"],
                    fetch_at=chosen["fetch_at"],
                    input_leaves=chosen["input"] == "offload",
                    wanted=wanted,
                    offload_bytes=float(chosen["offload_bytes"]),
                )
            )
        return ways

    def _wire(self) -> dict[str, float]:
        """Return the rates of the last copies, each way; before there were any both are alike."""
        stats = self.saver.stats()
        store, fetch = stats["store_gbps"], stats["fetch_gbps"]
        return {"store_gbps": store or fetch or 1.0, "fetch_gbps": fetch or store or 1.0}

    def _host_bytes(self, pinned: int) -> int:
        """Return how much may be pinned in all."""
        available = pinned + int(0.9 * _core.host_memory()[1])
        return available if self.pinned_budget_bytes is None else min(available, self.pinned_budget_bytes)

    # What is shown of it.

    def _kinds(self, book: Book) -> list[Kind]:
        return [book.kinds.get(i) or Kind(i, "not called") for i in range(len(self.places))]

    @property
    def kinds(self) -> list[Kind]:
        """The kind of each call, as passes like the last have it."""
        return self._kinds(self.book)

    def called(self) -> list[PlannedLayer]:
        """Return the layer of each call."""
        return [self.layers[place.layer] for place in self.places] if self.layers else []

    def figures(self) -> dict[str, Any] | None:
        """Return the plan in force with what was measured under it, or nothing before there is one."""
        self._finish_ended()
        state = self.shown
        if state is None or state.plan is None:
            return None
        return {"plan": state.plan, "measured": state.plan["measured"], "notes": self._notes(state.book)}

    def _notes(self, book: Book) -> list[str]:
        """Return what the plan does not say."""
        kinds = {id(kind): kind for kind in book.kinds.values() if kind.reason is not None}.values()
        notes = [f"layer {kind.first} and those like it are never recomputed: {kind.reason}" for kind in kinds]
        if book.overlaps:
            notes.append("passes begin before others have ended: the budget is for what each finds as it begins")
        return notes


def _whole(number: int) -> Way:
    """Offload all that a call saves, as soon as can be, and fetch it as late as can be."""
    return Way(recompute=False, let_go_at=number + 1, fetch_at=number, offload_bytes=math.inf)


def _last_resort(
    make: Callable[[int | None], dict[str, Any]], limit: int, excess: float, *, settled: bool
) -> tuple[dict[str, Any], bool]:
    """Return a plan where none leaves a little of the budget, and whether it is the one that takes least."""
    # What was held back may be just what is missing; and before a prediction was checked it may be off by as much.
    for budget in (limit - excess,) if settled else (limit, limit * (2 - FIRST_SHARE)):
        with contextlib.suppress(OptionError):
            return make(max(0, int(budget))), False
    # Refused here if nothing fits; else passes took more than they were to, and the least is due.
    plan, least = make(limit), make(None)
    return (least if least["peak_bytes"] <= limit else plan), True


def _is_over(state: Pass | None) -> bool:
    return state is None or state.finished


def meter_of(device: torch.device) -> Meter:
    """Return what reads a device's memory."""
    return Meter(device)
