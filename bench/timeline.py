"""What the GPU did in the last of several back-to-back steps: lanes of bars, and why torch's stream was idle.

On a GPU the bars are what torch's profiler saw, which is every kernel and copy of the process. On the CPU they are the
parts of the step by the host's clock, and the chunks of the handle's plan.
"""

from __future__ import annotations

import json
import tempfile
import time
import traceback
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

LANES = ("compute", "fetch", "update", "store")
REASONS = ("tail", "wire", "host")
# Kernels of the engine's rules. All others on torch's stream are the model's.
RULES = ("adamw", "adam", "sgd", "lion")
# The one shown is the last: the first finds nothing under way.
STEPS = 2
# Before torch's stream has worked this long in a forward, it waits for what is needed first.
FIRST_S = 1e-3
# The launch of a kernel after another leaves a gap that is no wait.
LAUNCH_S = 20e-6
# Calls of the driver that are noted, because they may hold up whoever submits work.
SLOW_S, SLOW_CALLS = 3e-3, 24
# Bars that are nearer to each other than this share of a step are drawn as one.
NEAR = 1 / 400

Span = tuple[float, float]


class Markers:
    """Kernels that do nothing but mark the begin of each part on torch's stream."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def mark(self, what: str) -> Any:
        """Note that ``what`` begins here."""
        self.names.append(what)
        torch.cuda._sleep(100)
        point = torch.cuda.Event()
        point.record()
        return point


class HostClock:
    """Moments of the host's clock."""

    def __init__(self) -> None:
        self.points: list[tuple[str, int]] = []

    def mark(self, what: str) -> None:
        """Note that ``what`` begins here."""
        self.points.append((what, time.perf_counter_ns()))


def record(run: Any, tokens: torch.Tensor) -> dict[str, Any] | None:
    """Run a few more steps and return what happened in the last one; nothing if the profiler failed."""
    try:
        return on_gpu(run, tokens) if run.device.type == "cuda" else on_cpu(run, tokens)
    except Exception:
        # The row's times are taken already.
        traceback.print_exc()
        return None


def load() -> None:
    """Let torch load its profiler, which makes launches slower from then on: all rows are to be alike."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda")


def on_gpu(run: Any, tokens: torch.Tensor) -> dict[str, Any]:
    """Ask torch's profiler."""
    markers = Markers()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            run.step(tokens, markers)
        markers.mark("end")
        run.settle()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return from_trace(events, markers.names)


def from_trace(events: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Return the lanes of one step from the events of a profile."""
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    events = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    events.sort(key=lambda event: float(event["ts"]))
    spins = [event for event in events if "spin_kernel" in event["name"]]
    if len(spins) != len(names):
        raise AssertionError(f"{len(spins)} of {len(names)} markers are in the profile")
    torchs = spins[0]["args"]["stream"]
    starts = [float(event["ts"]) / 1e6 for event in spins]
    # The parts of the last step, and where the next one would begin.
    shown = 3 * (STEPS - 1)
    origin, end = starts[shown], starts[shown + 3]
    parts = [(names[i], starts[i] - origin, starts[i + 1] - origin) for i in range(shown, shown + 3)]
    lanes: dict[str, list[Span]] = {lane: [] for lane in LANES}
    busy: list[Span] = []
    for event in events:
        begin = float(event["ts"]) / 1e6 - origin
        span = (max(0.0, begin), min(end - origin, begin + float(event["dur"]) / 1e6))
        if span[0] >= span[1]:
            continue
        on_torchs, name = event["args"]["stream"] == torchs, event["name"]
        lane = lane_of(event["cat"], name, on_torchs)
        if on_torchs and lane != "fetch" and lane != "store":
            busy.append(span)
        if lane is not None and "spin_kernel" not in name:
            lanes[lane].append(span)
    return lay_out(lanes, parts) | why_idle(merged(busy), lanes, parts) | {"calls": slow(calls, origin, end)}


def slow(calls: list[dict[str, Any]], origin: float, end: float) -> list[list[Any]]:
    """Return the calls of the driver that took longest: name, begin in ms, ms, and the thread's number."""
    threads = sorted({call["tid"] for call in calls}, key=str)
    found = []
    for call in calls:
        begin, took = float(call["ts"]) / 1e6 - origin, float(call["dur"]) / 1e6
        if took > SLOW_S and begin < end - origin and begin + took > 0:
            found.append([call["name"], round(begin * 1e3, 2), round(took * 1e3, 2), threads.index(call["tid"])])
    found.sort(key=lambda call: -call[2])
    return sorted(found[:SLOW_CALLS], key=lambda call: call[1])


def lane_of(category: str, name: str, on_torchs: bool) -> str | None:
    """Return where a kernel or a copy belongs; None for what is not shown."""
    if category == "kernel":
        return "update" if name.startswith(RULES) or not on_torchs else "compute"
    if on_torchs or category == "gpu_memset":
        return "compute" if on_torchs else None
    return "fetch" if "HtoD" in name else "store" if "DtoH" in name else None


def merged(spans: list[Span], near: float = 0.0) -> list[Span]:
    """Return the union of spans; what is nearer than ``near`` becomes one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1] + near:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def lay_out(lanes: dict[str, list[Span]], parts: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Return parts and bars in milliseconds, few enough to be drawn and stored.

    A bar is its begin, its end, and how many percent of it the lane was busy. No bar is in two parts.
    """
    step_s = parts[-1][2]

    def bars(spans: list[Span]) -> list[list[float]]:
        found = []
        for _, first, last in parts:
            here = [(max(first, begin), min(last, end)) for begin, end in spans if begin < last and end > first]
            busy = merged(here)
            for begin, end in merged(busy, step_s * NEAR):
                share = inside(busy, begin, end) / max(end - begin, 1e-9)
                found.append([round(begin * 1e3, 2), round(end * 1e3, 2), round(100 * share)])
        return found

    return {
        "step_ms": round(step_s * 1e3, 3),
        "parts_ms": [[name, round(begin * 1e3, 3), round(end * 1e3, 3)] for name, begin, end in parts],
        "lanes_ms": {lane: bars(spans) for lane, spans in lanes.items()},
        "busy_ms": {lane: round(length(merged(spans)) * 1e3, 3) for lane, spans in lanes.items()},
    }


def length(spans: list[Span]) -> float:
    """Return the sum of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def inside(spans: list[Span], begin: float, end: float) -> float:
    """Return how much of a range is covered by spans that are in order and do not overlap."""
    first = max(0, bisect_right(spans, (begin, float("inf"))) - 1)
    total = 0.0
    for one in spans[first:]:
        if one[0] >= end:
            break
        total += max(0.0, min(end, one[1]) - max(begin, one[0]))
    return total


def why_idle(
    busy: list[Span], lanes: dict[str, list[Span]], parts: list[tuple[str, float, float]]
) -> dict[str, dict[str, float]]:
    """Return why torch's stream was idle, in milliseconds.

    ``tail``: before the first layer of the forward, for what is final last and needed first. ``wire``: later, while
    copies or updates ran. ``host``: while nothing ran at all, because nothing was submitted.
    """
    works = merged(lanes["fetch"] + lanes["store"] + lanes["update"])
    forward = next(part for part in parts if part[0] == "forward")
    found = dict.fromkeys(REASONS, 0.0)
    worked, before = 0.0, 0.0
    for begin, end in [*busy, (parts[-1][2], parts[-1][2])]:
        if begin > before + LAUNCH_S:
            covered = inside(works, before, begin)
            is_first = before < forward[2] and worked < FIRST_S
            found["tail" if is_first else "wire"] += covered
            found["host"] += begin - before - covered
        worked, before = worked + end - begin, max(before, end)
    return {"idle_ms": {why: round(seconds * 1e3, 3) for why, seconds in found.items()}}


def on_cpu(run: Any, tokens: torch.Tensor) -> dict[str, Any]:
    """Take the host's clock, and what the handle's plan says about its chunks."""
    clock = HostClock()
    for _ in range(STEPS):
        run.step(tokens, clock)
    clock.mark("end")
    run.settle()
    shown = 3 * (STEPS - 1)
    origin = clock.points[shown][1]
    moments = [(name, (at - origin) / 1e9) for name, at in clock.points[shown : shown + 4]]
    parts = [(name, at, until) for (name, at), (_, until) in pairwise(moments)]
    lanes: dict[str, list[Span]] = {lane: [] for lane in LANES}
    lanes["compute"] = [(at, until) for name, at, until in parts if name != "step"]
    if run.handle is None:
        lanes["update"] = [(at, until) for name, at, until in parts if name == "step"]
    else:
        # The engine's step begins with the backward, or with step() if gradients are clipped. What runs after the next
        # forward has begun is shown where the same of the step before ran.
        begin, step_s = parts[1 if run.row.hides == "backward" else 2][1], parts[-1][2]
        submitted = sorted(unit["submitted_ns"] / 1e9 for unit in run.handle.plan() if unit["submitted_ns"] is not None)
        lanes["update"] = [(at, at + step_s * NEAR) for at in ((begin + after) % step_s for after in submitted)]
    return lay_out(lanes, parts)
