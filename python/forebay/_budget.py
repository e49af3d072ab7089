"""Activations under a budget: the first passes measure, the engine plans, later passes follow the plan.

A *pass* is a forward pass and its backward pass. The first two passes of a shape are frugal: every layer is recomputed
and its inputs offloaded, but for the first layer of each kind, which is watched operation by operation and offloaded
whole. From what they show, ``forebay._core.plan_activations`` makes the plan. The passes after that show how good it
was; if its peak or its time was off, the next plan is corrected by as much.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core
from forebay._select import Clock, Key, Probe
from forebay._torch import local
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay._planned import PlannedLayer
    from forebay._saved import Engine, Saver

MEASURING = 2
"""Passes of a shape that measure before the first plan."""
PATIENCE = 20
"""Passes of a shape that are begun without a plan before something is said about it."""
ROUNDS = 5
"""Plans of a shape that are checked and corrected before one is left alone."""
FIRST_SHARE, SHARE = 0.98, 0.995
"""How much of the budget the first plan of a shape may use, before any was checked; and how much later ones may."""
WIRE_CHANGE = 0.15
"""If the wire turns out to be faster or slower than a plan took it to be by more than this, there is another plan."""
SELECT_NS = 8_000
"""What watching an operation takes on the host."""
STEP = 1.25
"""Shapes are alike if no dimension differs by more than about this factor."""


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


@dataclasses.dataclass
class Way:
    """What becomes of one layer in one pass."""

    recompute: bool
    let_go_at: int
    fetch_at: int
    input_leaves: bool = True
    wanted: dict[Key, bool] = dataclasses.field(default_factory=dict)
    offload_bytes: float = 0.0


@dataclasses.dataclass
class Kind:
    """Layers of one build: what was seen of the first of them."""

    first: int
    names: tuple[Any, ...]
    reason: str | None = None
    keys: list[Key] = dataclasses.field(default_factory=list)
    tensors: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    again: float = 0.8
    """What of the forward pass is recomputed: nothing after the last saved tensor."""
    saved_bytes: int = 0
    input_bytes: int = 0
    ops: int = 0
    vetted: set[bool] = dataclasses.field(default_factory=set)
    """Whether it was seen in training, and in evaluation: what it does may differ."""


@dataclasses.dataclass
class Point:
    """A moment of a watched pass."""

    what: str
    layer: int
    mark: Any
    now: int
    peak: int
    held: int
    host_ns: int = 0


class Pass:
    """One forward pass with its backward pass."""

    def __init__(self, book: Book, ways: list[Way], *, stage: int, watched: bool, plan: dict[str, Any] | None) -> None:
        self.book, self.ways, self.stage, self.watched, self.plan = book, ways, stage, watched, plan
        self.points: list[Point] = []
        self.opened: set[int] = set()
        self.probes: dict[int, Probe] = {}
        self.packed: dict[int, int] = {}
        self.tokens = 0
        self.callback = False
        self.ended = False


class Book:
    """What is known about passes of one shape."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.begun = 0
        self.passes = 0
        self.rounds = 0
        self.done = False
        self.cost: dict[str, Any] | None = None
        self.plans: dict[tuple[int, int], dict[str, Any]] = {}
        # The operations of each layer that the cost, and so every plan, counts through.
        self.keys: list[list[Key]] = []
        # Measured less predicted, of the last plan that was checked.
        self.excess_bytes: float | None = None
        self.pace = 1.0
        self.measured: dict[str, Any] = {}


def _flags(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return rates and switches of a module: what layers alike in all else may still do otherwise."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, float)) and name != "training"
    )


class Budget:
    """Watches passes, has them planned, and says for each layer what becomes of it."""

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
        self.kinds: list[Kind] = []
        self.books: dict[tuple[Any, ...], Book] = {}
        self.now: Pass | None = None
        self.last: Pass | None = None
        self.shown: Pass | None = None
        self.number = -1
        self.fresh: Point | None = None
        self.local = threading.local()
        self.warned: set[str] = set()
        self.meter: Meter = meter_of(torch.device("cpu"))
        self.clock = Clock(torch.device("cpu"))
        # For tests: ways to take whatever the plan says.
        self.forced: Callable[[list[Way]], list[Way]] | None = None

    def adopt(self, layers: list[PlannedLayer]) -> None:
        """Take the layers, and tell kinds apart by what they are made of."""
        self.layers = layers
        by_build: dict[Any, Kind] = {}
        for layer in layers:
            module = layer.module
            build = (
                tuple((name, type(inner), inner.training, _flags(inner)) for name, inner in module.named_modules()),
                tuple((name, tuple(local(p).shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()),
                tuple((name, tuple(b.shape), b.dtype) for name, b in module.named_buffers()),
            )
            kind = by_build.setdefault(build, Kind(layer.number, (type(module).__name__,)))
            self.kinds.append(kind)

    # What happens in a pass.

    def model_begins(self) -> None:
        """Note that the model was called: a pass begins with the next layer."""
        if torch.is_grad_enabled() and self.layers:
            self._find_device(self.layers[0].device)
            self.fresh = self._beginning()

    def _beginning(self) -> Point:
        now, peak = self.meter.read()
        return Point("begin", -1, self.clock.mark(), now, peak, 0)

    def _find_device(self, device: torch.device) -> None:
        if self.clock.device != device:
            # What was noted on another device's clock says nothing here.
            self.meter, self.clock, self.fresh, self.last = meter_of(device), Clock(device), None, None

    def enter(self, layer: PlannedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass:
        """Return the pass that a call of a layer belongs to, which begins with it if it is the first."""
        if self.now is None or self.now.ended or self.fresh is not None or layer.number < self.number:
            self._find_device(layer.device)
            begin, self.fresh = self.fresh, None
            if begin is None:
                begin = self._beginning()
            self._finish(self.last)
            self.now = self._begin(begin, args, kwargs)
            self.last = self.now
        elif layer.device != self.clock.device:
            raise OptionError(
                f"budget_bytes plans for one device, and layer {layer.number} runs on {layer.device} after others on "
                f"{self.clock.device}; pass layers=[...] of one device, or use fraction instead"
            )
        self.number = layer.number
        return self.now

    def _begin(self, begin: Point, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass:
        shape = next((a.shape for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), torch.Size((1, 1)))
        leading = tuple(shape[:-1]) or (1,)
        tokens = max(1, math.prod(leading))
        every = (p for layer in self.layers for p in layer.module.parameters())
        trained = next((p for p in every if p.requires_grad and p.is_leaf), None)
        # A pass that has to make the gradients takes more memory than one that adds to them.
        makes = trained is not None and trained.grad is None
        training = self.layers[0].module.training
        key = (makes, training, len(shape), *(round(math.log(max(1, n), STEP)) for n in leading))
        book = self.books.setdefault(key, Book(tokens))
        n = len(self.layers)
        plan: dict[str, Any] | None = None
        if book.cost is None:
            ways = [self._measuring(i, n) for i in range(n)]
            stage, watched = book.passes, True
            book.begun += 1
            if book.begun == PATIENCE:
                self.say_once(
                    f"{PATIENCE} forward passes over {tuple(shape)} were begun and {book.passes} were followed by a "
                    "backward pass, so forebay has no plan for them yet: all layers are recomputed or offloaded; "
                    "call backward, or evaluate under torch.no_grad()"
                )
        else:
            limit = self._limit(begin.now)
            stage, watched = MEASURING, not book.done
            plan = self._plan(book, tokens, limit)
            ways = self._ways(plan, book.keys)
        if self.forced is not None:
            ways = self.forced(ways)
        found = Pass(book, ways, stage=stage, watched=watched, plan=plan)
        found.tokens = tokens
        found.points.append(begin)
        if watched:
            self.meter.reset()
        return found

    def _limit(self, now: int) -> int:
        if self.limit is not None:
            return self.limit
        whole = capacity(self.clock.device)
        # In steps: what is there as passes begin is never quite the same.
        grain = max(1, whole // 256)
        return max(0, int((self.share or 0.0) * whole) - now) // grain * grain

    def _measuring(self, i: int, n: int) -> Way:
        kind = self.kinds[i]
        probed = kind.first == i or kind.reason is not None or not self.may_recompute
        seen = self.layers[i].module.training in kind.vetted
        if probed or not seen:
            return Way(recompute=False, let_go_at=i + 1, fetch_at=i, offload_bytes=math.inf)
        return Way(recompute=True, let_go_at=i + 1, fetch_at=min(i + 1, n - 1))

    def way(self, state: Pass, layer: PlannedLayer) -> Way:
        """Return what becomes of a layer; in the first pass that depends on the layers before it."""
        way = state.ways[layer.number]
        if state.stage < MEASURING:
            way = state.ways[layer.number] = self._measuring(layer.number, len(self.layers))
        return way

    def probe(self, state: Pass, layer: PlannedLayer) -> Probe | None:
        """Return what watches a layer's operations in this pass."""
        kind = self.kinds[layer.number]
        if state.stage >= MEASURING or kind.first != layer.number or layer.is_compiled:
            return None
        probe = state.probes[layer.number] = Probe(self.clock, layer.module, managed=layer.is_managed)
        return probe

    def vetted(self, layer: PlannedLayer, probe: Probe | None) -> None:
        """Take note of whether layers like this one may run twice."""
        kind = self.kinds[layer.number]
        if kind.first != layer.number:
            return
        kind.vetted.add(layer.module.training)
        if probe is not None and probe.reason is not None and kind.reason is None:
            kind.reason = probe.reason
            self.say_once(
                f"forebay does not recompute layer {layer.number} and those like it, a {kind.names[0]}: "
                f"{probe.reason}; they are kept or offloaded"
            )

    def say_once(self, text: str) -> None:
        """Warn, once."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, stacklevel=2)

    def point(self, state: Pass, what: str, layer: int, engine: Engine | None) -> None:
        """Note a moment of a watched pass."""
        now, peak = self.meter.read()
        self.meter.reset()
        held = sum(storage.nbytes() for storage in list(engine.held.values())) if engine is not None else 0
        state.points.append(Point(what, layer, self.clock.mark(), now, peak, held, time.perf_counter_ns()))

    def opens(self, state: Pass, layer: int, engine: Engine) -> None:
        """Note that a saved tensor of a layer is used."""
        if not state.callback and torch._C._current_graph_task_id() != -1:
            state.callback = True
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._ends(state, engine))
        if layer not in state.opened:
            state.opened.add(layer)
            if state.watched:
                self.point(state, "open", layer, engine)

    def _ends(self, state: Pass, engine: Engine) -> None:
        state.ended = True
        if state.watched:
            self.point(state, "end", -1, engine)
        else:
            now, peak = self.meter.read()
            state.points.append(Point("end", -1, self.clock.mark(), now, peak, 0))

    # What is learnt from it.

    def _finish(self, state: Pass | None) -> None:
        """Learn from a pass, if it has come to its end."""
        if state is None or not state.ended:
            return
        self.last = None
        if not state.watched:
            self._glance(state)
            return
        self.clock.wait(state.points[-1].mark)
        book = state.book
        if state.stage < MEASURING:
            book.passes += 1
            if state.stage == MEASURING - 1:
                book.tokens = state.tokens
                book.cost = self._cost(state)
                book.keys = [list(kind.keys) for kind in self.kinds]
            return
        self._check(state)

    def _glance(self, state: Pass) -> None:
        """Learn from a pass that nobody watched: its time, and its peak where that is a new one."""
        begin, end = state.points[0], state.points[-1]
        if self.clock.is_over(end.mark) and state.book.measured and state.plan is not None:
            state.book.measured["pass_s"] = self.clock.ns(begin.mark, end.mark) / 1e9
            self.shown = state
        limit = self._limit(begin.now)
        # A peak from before, an optimizer's for one, is not this pass's.
        is_new = self.meter.is_known and end.peak > begin.peak
        if is_new and end.peak - begin.now > limit > 0 and state.plan is not None:
            known = state.book.excess_bytes or 0.0
            if state.book.rounds < ROUNDS or end.peak - begin.now - state.plan["model_peak_bytes"] > known:
                # In which layer it was is not known: the next passes are watched.
                state.book.done = False
                state.plan["seen"] = 0
            else:
                self.say_once(
                    f"a pass takes {end.peak - begin.now} bytes, more than the budget of {limit}, and no plan takes "
                    "less; give it a larger budget"
                )

    def _check(self, state: Pass) -> None:
        """Compare a pass with its plan, and correct the next plan."""
        book, plan = state.book, state.plan
        begin = state.points[0]
        peak = max(point.peak for point in state.points[1:]) - begin.now
        ns = self.clock.ns(begin.mark, state.points[-1].mark)
        if plan is None:
            return
        self.shown = state
        book.measured = {"pass_s": ns / 1e9, "peak_bytes": peak if self.meter.is_known else None}
        book.measured["layers"] = self._times(state)
        plan["seen"] += 1
        over = self.meter.is_known and peak > plan["limit_bytes"]
        # The first pass in a new way is slow in many ways, but it shows the peak.
        if plan["seen"] < 2 and not over:
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

    def _times(self, state: Pass) -> dict[int, dict[str, float]]:
        """Return what each layer took, in seconds."""
        found: dict[int, dict[str, float]] = {}
        opens = [point for point in state.points if point.what in ("open", "end")]
        enters = {point.layer: point for point in state.points if point.what == "enter"}
        for point in state.points:
            if point.what == "leave" and point.layer in enters:
                row = found.setdefault(point.layer, {})
                row["forward_s"] = self.clock.ns(enters[point.layer].mark, point.mark) / 1e9
        for point, after in itertools.pairwise(opens):
            found.setdefault(point.layer, {})["backward_s"] = self.clock.ns(point.mark, after.mark) / 1e9
        return found

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
        try:
            text = _core.plan_activations(cost, max(0, min(allowed, limit * 2)), planned, book.tokens)
        except OptionError:
            if allowed >= limit:
                raise
            # What was held back may be just what is missing.
            text = _core.plan_activations(cost, limit, planned, book.tokens)
        plan: dict[str, Any] = json.loads(text)
        plan["model_peak_bytes"], plan["model_pass_ns"] = plan["peak_bytes"], plan["pass_ns"]
        plan["peak_bytes"] = int(plan["peak_bytes"] + (book.excess_bytes or 0.0))
        plan["pass_ns"] = int(plan["pass_ns"] * book.pace)
        plan["limit_bytes"], plan["budget_bytes"], plan["settled"], plan["seen"] = limit, limit, settled, 0
        plan |= wire
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

    def _cost(self, state: Pass) -> dict[str, Any]:
        """Turn the moments of the last measuring pass into what the planner wants to know."""
        clock, begin = self.clock, state.points[0]
        enters = {point.layer: point for point in state.points if point.what == "enter"}
        leaves = {point.layer: point for point in state.points if point.what == "leave"}
        backward = [point for point in state.points if point.what in ("open", "end")]
        after = {point.layer: later for point, later in itertools.pairwise(backward)}
        opens = {point.layer: point for point in backward if point.what == "open"}
        for number, probe in state.probes.items():
            kind = self.kinds[number]
            found, again, total = probe.costs(self.saver.min_bytes)
            kind.keys = [key for key, *_ in found]
            kind.tensors = [
                {"name": str(key), "bytes": size, "recompute_ns": ns, "saved": saved} for key, size, ns, saved in found
            ]
            kind.again = again / total if total else 0.8
            kind.ops = len(probe.ops)
        for number, size in state.packed.items():
            kind = self.kinds[number]
            if state.ways[number].recompute:
                kind.input_bytes = max(kind.input_bytes, size)
            else:
                kind.saved_bytes = max(kind.saved_bytes, size)
        n = len(self.layers)
        rows: list[dict[str, Any]] = []
        for i in range(n):
            kind, way = self.kinds[i], state.ways[i]
            enter, leave, opened = enters.get(i), leaves.get(i), opens.get(i)
            forward_ns = clock.ns(enter.mark, leave.mark) if enter and leave else 0
            took = max(0, leave.peak - enter.now) if enter and leave else 0
            backward_ns, base, own = 0, 0, kind.saved_bytes
            if opened is not None and i in after:
                later = after[i]
                backward_ns = clock.ns(opened.mark, later.mark)
                base = max(0, opened.now - opened.held - begin.now)
                own = max(later.peak - begin.now - base - later.held, kind.saved_bytes)
            rows.append(
                {
                    "name": f"layer {i}, {kind.names[0]}",
                    "can_recompute": self.may_recompute and kind.reason is None,
                    "forward_ns": forward_ns,
                    "backward_ns": backward_ns,
                    "recompute_ns": int(forward_ns * kind.again),
                    "select_ns": 0,
                    "_host_ns": leave.host_ns - enter.host_ns if enter and leave else 0,
                    "input_bytes": kind.input_bytes,
                    "saved_bytes": kind.saved_bytes,
                    "forward_base_bytes": max(0, enter.now - enter.held - begin.now) if enter else 0,
                    "forward_saving_bytes": took,
                    "forward_bare_bytes": took,
                    "backward_base_bytes": base,
                    "backward_bytes": own,
                    "tensors": [dict(tensor) for tensor in kind.tensors],
                    "_saving": not way.recompute,
                }
            )
        self._complete(rows)
        gaps = [clock.ns(leaves[i].mark, enters[i + 1].mark) for i in range(n - 1) if i in leaves and i + 1 in enters]
        outside = clock.ns(begin.mark, enters[0].mark) if 0 in enters else 0
        outside += int(statistics.median(gaps)) * len(gaps) if gaps else 0
        first = backward[0] if backward else None
        if first is not None and n - 1 in leaves:
            outside += max(0, clock.ns(leaves[n - 1].mark, first.mark))
        return {
            "layers": rows,
            "tail_bytes": max(0, first.peak - first.held - begin.now) if first is not None else 0,
            "outside_ns": outside,
            "host_bytes": self._host_bytes(int(self.saver.stats()["pinned_bytes"])),
            **self._wire(),
        }

    def _wire(self) -> dict[str, float]:
        """Return the rates of the last copies, each way; before there were any both are alike."""
        stats = self.saver.stats()
        store, fetch = stats["store_gbps"], stats["fetch_gbps"]
        return {"store_gbps": store or fetch or 1.0, "fetch_gbps": fetch or store or 1.0}

    def _host_bytes(self, pinned: int) -> int:
        """Return how much may be pinned in all."""
        available = pinned + int(0.9 * _core.host_memory()[1])
        return available if self.pinned_budget_bytes is None else min(available, self.pinned_budget_bytes)

    def _complete(self, rows: list[dict[str, Any]]) -> None:
        """Give every layer both kinds of figures: those of a layer that saves and those of one that is recomputed."""
        for kind in {id(kind): kind for kind in self.kinds}.values():
            mine = [row for row, other in zip(rows, self.kinds, strict=True) if other is kind]
            saving = [row for row in mine if row["_saving"]]
            again = [row for row in mine if not row["_saving"]]
            most = max((row["forward_saving_bytes"] for row in saving), default=kind.saved_bytes)
            for row in again:
                row["forward_saving_bytes"] = max(most, kind.saved_bytes)
                row["backward_ns"] = max(row["forward_ns"], row["backward_ns"] - row["recompute_ns"])
            for row in saving:
                if again:
                    row["forward_bare_bytes"] = max(other["forward_bare_bytes"] for other in again)
                    row["forward_ns"] = int(statistics.median(other["forward_ns"] for other in again))
                    row["recompute_ns"] = int(statistics.median(other["recompute_ns"] for other in again))
                    row["backward_ns"] = int(statistics.median(other["backward_ns"] for other in again))
                elif row["backward_ns"]:
                    # It waited for its tensors one by one.
                    row["backward_ns"] = min(row["backward_ns"], int(2.2 * row["forward_ns"]))
                if not kind.input_bytes:
                    row["input_bytes"] = min(row["saved_bytes"], row["forward_bare_bytes"])
                    row["can_recompute"] = row["can_recompute"] and bool(again)
            for name in ("forward_ns", "backward_ns", "recompute_ns"):
                # Layers of one build take the same time but for noise, which is not to be planned for.
                usual = int(statistics.median(row[name] for row in mine))
                for row in mine:
                    if abs(row[name] - usual) * 3 <= usual:
                        row[name] = usual
            host = statistics.median(row["_host_ns"] for row in again or mine)
            for row in mine:
                # Watching operations takes time on the host, forward and again; it shows where the host is the slower.
                row["select_ns"] = int(max(0, 2 * (host + SELECT_NS * kind.ops - row["forward_ns"])))
                del row["_host_ns"]
                # Times of operations were taken one by one, in one layer; they are shares of what recomputing takes.
                total = sum(tensor["recompute_ns"] for tensor in row["tensors"])
                if total > row["recompute_ns"] > 0:
                    for tensor in row["tensors"]:
                        tensor["recompute_ns"] = tensor["recompute_ns"] * row["recompute_ns"] // total
                del row["_saving"]

    # What is shown of it.

    def figures(self) -> dict[str, Any] | None:
        """Return the plan in force with what was measured under it, or nothing before there is one."""
        self._finish(self.last)
        state = self.shown
        if state is None or state.plan is None:
            return None
        return {"plan": state.plan, "measured": state.book.measured, "rounds": state.book.rounds}


def meter_of(device: torch.device) -> Meter:
    """Return what reads a device's memory."""
    return Meter(device)
