"""One workload: the measurements of passes of one shape, and their plans.

Plans are frozen and come from the engine. A :class:`PlanRun` has a plan and what changes: how many passes followed the
plan, and what they measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from forebay._log import logger
from forebay._progress import watch
from forebay.activations.budget.passes import Kind, Way
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay._core import ActivationPlan, CallTimes, PassCost
    from forebay.activations.budget.passes import Pass
    from forebay.activations.recompute.replay import Key

FIRST_SHARE, SHARE = 0.98, 0.995
"""The share of the budget that plans may use: before the first plan of a workload was checked, and after."""
LINK_CHANGE = 0.15
"""If a rate of the link differs from the plan's rate by more than this share, a new plan is made."""
GROWTH = 16
"""A call that saves more than before by more than one part in this many is measured again."""


class Link(NamedTuple):
    """The rates of copies to the host and from it."""

    store_gbps: float
    fetch_gbps: float

    def is_like(self, other: Link) -> bool:
        """Whether both rates are about those of another link."""
        return all(abs(mine - theirs) <= LINK_CHANGE * theirs for mine, theirs in zip(self, other, strict=True))


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan, and what it was made from."""

    model: ActivationPlan
    """As the engine predicts it."""
    plan: ActivationPlan
    """The same, its predictions corrected by what earlier passes showed."""
    limit_bytes: int
    link: Link
    settled: bool
    """Whether it was made after an earlier plan was checked."""
    frugal: bool
    """Whether no plan has a lower peak."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a pass under a plan took."""

    pass_s: float
    peak_bytes: int | None
    """None where memory is not counted."""
    calls: tuple[CallTimes, ...]


class PlanRun:
    """A plan in force, and what passes that followed it showed."""

    def __init__(self, planned: Planned) -> None:
        self.planned = planned
        # How many passes were compared with it, and what the last one showed.
        self.seen = 0
        self.measured: Measurement | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        planned, measured = self.planned, self.measured
        found: dict[str, Any] = json.loads(planned.plan.to_json())
        for layer in found["layers"]:
            # An earlier name of the same number, which callers may read.
            layer["let_go_at"] = layer["free_at"]
        found |= {
            "model_peak_bytes": planned.model.peak_bytes,
            "model_pass_ns": planned.model.pass_ns,
            "limit_bytes": planned.limit_bytes,
            "settled": planned.settled,
            "seen": self.seen,
            "frugal": planned.frugal,
            "measured": {},
            **planned.link._asdict(),
        }
        if measured is not None:
            found["measured"] = {
                "pass_s": measured.pass_s,
                "peak_bytes": measured.peak_bytes,
                "layers": [_seconds(times) for times in measured.calls],
            }
        return found


def _seconds(times: CallTimes) -> dict[str, float]:
    found = {"forward_s": times.forward_ns, "backward_s": times.backward_ns}
    return {name: ns / 1e9 for name, ns in found.items() if ns is not None}


class Workload:
    """What is known about passes of one shape."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        # Passes that were begun, passes that measured, plans that were checked; and whether the plan in force is final.
        self.begun = 0
        self.passes = 0
        self.rounds = 0
        self.done = False
        # How often it was measured again.
        self.renewals = 0
        # Whether passes begin before earlier ones have ended; whether there was a warning that too few end.
        self.overlaps = self.warned = False
        self.builds: dict[Any, Kind] = {}
        # The kind of each call, by its number.
        self.kinds: dict[int, Kind] = {}
        self.cost: PassCost | None = None
        # By tokens and limit.
        self.plans: dict[tuple[int, int], PlanRun] = {}
        # For each call the operations that the cost, and so every plan, refers to by their places.
        self.keys: list[list[Key]] = []
        # The measured peak less the model's, and the measured time over the model's, of the last plan that was checked.
        self.excess_bytes: int | None = None
        self.pace = 1.0

    def measure_again(self) -> None:
        """Drop everything that plans are made from."""
        self.renewals += 1
        self.begun = self.passes = self.rounds = 0
        self.builds, self.kinds, self.plans = {}, {}, {}
        self.cost, self.excess_bytes, self.pace, self.done = None, None, 1.0, False

    def kinds_of(self, calls: int) -> list[Kind]:
        """Return the kind of each call."""
        return [self.kinds.get(number) or Kind(number, "not called") for number in range(calls)]

    def learn(self, state: Pass, min_bytes: int) -> None:
        """Learn from a measuring pass what its calls save."""
        self.passes += 1
        for number, probe in state.probes.items():
            self.kinds[number].learn(probe, min_bytes)
        for number, size in state.packed.items():
            kind = self.kinds[number]
            if state.ways[number].recompute:
                kind.input_bytes = max(kind.input_bytes, size)
            else:
                kind.saved_bytes = max(kind.saved_bytes, size)
        for number, size in state.shared.items():
            kind = self.kinds[number]
            kind.shared_bytes = max(kind.shared_bytes, size)

    def saves_more(self, state: Pass, min_bytes: int) -> bool:
        """Whether a call of a pass saved more than when it was measured: the model or its training has changed."""
        if self.cost is None:
            return False
        # A shorter pass saves no more than the measured one; not all that it saves is shorter.
        longer = max(1.0, state.tokens / self.tokens) * (1 + 1 / GROWTH)
        shared = max((kind.shared_bytes for kind in self.kinds.values()), default=0)
        layers = self.cost.layers
        for number, size in state.packed.items():
            layer = layers[number]
            known = layer.input_bytes + shared if state.ways[number].recompute else layer.saved_bytes
            if size > known * longer + min_bytes:
                return True
        return False

    def is_least(self, run: PlanRun, peak_bytes: int) -> bool:
        """Whether no plan has a lower peak than the measured one. The plan already includes the excess seen before."""
        planned = run.planned
        excess = peak_bytes - planned.model.peak_bytes
        corrected = planned.settled and self.excess_bytes is not None and excess <= self.excess_bytes
        return planned.frugal or corrected

    def check(self, run: PlanRun, peak_bytes: int | None, pass_ns: int, link: Link, *, over: bool) -> bool:
        """Correct later plans by what a pass under this one took; return whether this plan stays."""
        planned = run.planned
        settled = planned.settled and link.is_like(planned.link) and not over
        if peak_bytes is not None:
            excess, before = peak_bytes - planned.model.peak_bytes, self.excess_bytes
            self.excess_bytes = excess if before is None or not planned.settled else max(excess, before)
        if run.seen >= 2:
            self.pace = pass_ns / max(1, planned.model.pass_ns)
        self.rounds += 1
        if not settled:
            self.plans.clear()
        return settled

    def plan(self, tokens: int, limit_bytes: int, link: Link) -> PlanRun:
        """Return the plan for this many tokens. Numbers of tokens are rounded up, so that few plans are made."""
        grain = max(1, self.tokens // 32)
        steps = -(-(tokens - self.tokens) // grain)
        rounded = self.tokens + steps * grain
        known = self.plans.get((rounded, limit_bytes))
        if known is None:
            known = self.plans[rounded, limit_bytes] = PlanRun(self._make(rounded, limit_bytes, link))
        return known

    def _make(self, tokens: int, limit_bytes: int, link: Link) -> Planned:
        assert self.cost is not None
        cost, measured_tokens = self.cost, self.tokens
        excess, settled = self.excess_bytes or 0, self.rounds > 0

        def make(budget_bytes: int | None) -> ActivationPlan:
            with watch("planning activations", None, lambda: 0):
                return cost.plan(budget_bytes, tokens=tokens, measured_tokens=measured_tokens, **link._asdict())

        allowed = int(limit_bytes * SHARE - excess) if settled else int(limit_bytes * FIRST_SHARE)
        try:
            model, frugal = make(max(0, min(allowed, limit_bytes * 2))), False
        except OptionError:
            model, frugal = _last_resort(make, limit_bytes, excess, settled=settled)
        plan = model.corrected(budget_bytes=limit_bytes, excess_bytes=excess, pace=self.pace)
        logger.info(
            "activation plan: budget %d bytes, predicted peak %d bytes and %.1f ms",
            limit_bytes,
            plan.peak_bytes,
            plan.pass_ns / 1e6,
        )
        return Planned(model, plan, limit_bytes, link, settled, frugal)


def _last_resort(
    make: Callable[[int | None], ActivationPlan], limit_bytes: int, excess: int, *, settled: bool
) -> tuple[ActivationPlan, bool]:
    """Return a plan if none fits with the reserve, and whether it is the plan with the lowest peak."""
    # A plan may fit without the reserve, and an unchecked prediction may be wrong by as much as the reserve.
    for budget in (limit_bytes - excess,) if settled else (limit_bytes, limit_bytes * (2 - FIRST_SHARE)):
        with contextlib.suppress(OptionError):
            return make(max(0, int(budget))), False
    # Raises if nothing fits. If something does, passes took more than predicted: use the plan with the lowest peak.
    plan, least = make(limit_bytes), make(None)
    return (least if least.peak_bytes <= limit_bytes else plan), True


def ways_of(plan: ActivationPlan, keys: list[list[Key]]) -> list[Way]:
    """Return what happens to each call under a plan; ``keys`` names the operations of each."""
    ways = []
    for mine, chosen in zip(keys, plan.layers, strict=True):
        wanted: dict[Key, bool] = {}
        # A call that is not recomputed saves everything, and no result by itself.
        if chosen.recompute:
            for key, choice in zip(mine, chosen.tensors, strict=True):
                if choice != "recompute":
                    wanted[key] = choice == "offload"
        ways.append(
            Way(
                recompute=chosen.recompute,
                free_at=chosen.free_at,
                fetch_at=chosen.fetch_at,
                input_leaves=chosen.input == "offload",
                wanted=wanted,
                offload_bytes=float(chosen.offload_bytes),
            )
        )
    return ways
