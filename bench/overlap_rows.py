"""The rows of ``bench/overlap.py``: ways to run whole training steps, and how one of them is measured or checked."""

from __future__ import annotations

import contextlib
import gc
import inspect
import resource
import statistics
import time
import traceback
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

# Neighbours, not packages: Python finds them in this file's folder.
import timeline
import torch
from overlap_model import Trained, fingerprint
from rows import CannotRunError, Memory, finish

import forebay

if TYPE_CHECKING:
    from collections.abc import Iterator

GIB, MIB = 1 << 30, 1 << 20
HYPER: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
EXPLAINED_LINES = 40
# What a small model has is this much smaller.
SMALLER = {"chunk_bytes": 256, "overlap_bytes": 256, "resident_bytes": 1024}
# Only this rate of both directions together is reached by a step, so it is what the wire is measured with.
PIECE, PIECES = 16 << 20, 128


@dataclass(frozen=True)
class Row:
    """One way to run a step."""

    label: str
    # Options of the optimizer; None for no optimizer at all.
    options: dict[str, Any] | None = field(default_factory=dict)
    # Options of overlap_step; None for plain steps.
    overlap: dict[str, Any] | None = None
    # Under what updates can hide: "nothing", the next "forward", or "backward" and the next forward.
    hides: str = "nothing"
    sequences: int = 4
    warmup: int = 2
    models: tuple[str, ...] = ("3b",)
    # The row that has the same computation with all state on the GPU.
    resident: str = "resident"
    # The most times the resident row that is aimed at.
    goal: float | None = None
    # Whether a plain row is profiled too; overlapped ones are.
    profiled: bool = False

    @property
    def marks(self) -> bool:
        """Whether the last backward is marked."""
        return self.overlap is not None or (self.options or {}).get("placement") == "hybrid"


def overlapped(label: str, hides: str, *, overlap: dict[str, Any] | None = None, **settings: Any) -> Row:
    """Return an overlapped row; settings that are not the row's own are the optimizer's."""
    own = {key: settings.pop(key) for key in tuple(settings) if key in Row.__dataclass_fields__}
    return Row(label, settings, {"overlap_bytes": 256 * MIB, **(overlap or {})}, hides, **own)


# "auto" tries splits in its first six steps.
SETTLING = 7
CLIP: dict[str, Any] = {"max_grad_norm": 1.0}
# A norm that no step reaches.
NEVER: dict[str, Any] = {"max_grad_norm": 1e6}
SPECULATE: dict[str, Any] = {"overlap": {"speculate": True}}
HYBRID: dict[str, Any] = {"placement": "hybrid", **CLIP}
BOTH = ("3b", "7b")
# 4.2 bytes for each parameter on the host instead of 12.
EIGHT: dict[str, Any] = {"state_dtype": "8bit", "master_weights": "compact"}
ROWS = {
    "passes": Row("forward and backward alone", None),
    "resident": Row("resident", {"placement": "resident"}, models=BOTH),
    "stream": Row("stream, plain", profiled=True),
    "overlap-64": overlapped("overlapped, 64 MiB", "backward", overlap={"overlap_bytes": 64 * MIB}, goal=1.12),
    "overlap": overlapped("overlapped, 256 MiB", "backward", models=BOTH, goal=1.12),
    "overlap-4gib": overlapped(
        "overlapped, 256 MiB, 4 GiB resident", "backward", resident_bytes=4 * GIB, models=("3b",), goal=1.04
    ),
    "overlap-1gib-ring": overlapped(
        "overlapped, 1 GiB", "backward", overlap={"overlap_bytes": GIB}, models=("7b",), goal=1.15
    ),
    "overlap-8gib": overlapped(
        "overlapped, 1 GiB, 8 GiB resident",
        "backward",
        overlap={"overlap_bytes": GIB},
        resident_bytes=8 * GIB,
        models=("7b",),
        goal=1.05,
    ),
    "clip": Row("clipping, plain", CLIP),
    "clip-overlap": overlapped("clipping, overlapped", "forward", **CLIP, goal=1.55),
    "clip-8bit": overlapped(
        "clipping, 8-bit moments, compact masters, overlapped", "forward", **CLIP, **EIGHT, goal=1.06
    ),
    "speculate": overlapped("clipping, speculative", "backward", **NEVER, **SPECULATE, goal=1.12),
    "speculate-4gib": overlapped(
        "clipping, speculative, 4 GiB resident", "backward", **NEVER, **SPECULATE, resident_bytes=4 * GIB, goal=1.04
    ),
    "hybrid": Row("hybrid, clipping, plain", HYBRID, warmup=SETTLING),
    "hybrid-overlap": overlapped("hybrid, clipping, overlapped", "forward", **HYBRID, warmup=SETTLING, goal=1.3),
    "resident-32k": Row("resident, twice the tokens", {"placement": "resident"}, sequences=8, resident="resident-32k"),
    "clip-overlap-32k": overlapped(
        "clipping, overlapped, twice the tokens",
        "forward",
        **CLIP,
        sequences=8,
        resident="resident-32k",
        goal=1.18,
    ),
    # Models whose state in f32 is more than the host has.
    "plain-8bit": Row(
        "8-bit moments, compact masters, plain", EIGHT, sequences=2, warmup=1, models=("14b",), resident="none"
    ),
    "overlap-8bit": overlapped(
        "8-bit moments, compact masters, overlapped, 1 GiB",
        "backward",
        overlap={"overlap_bytes": GIB},
        **EIGHT,
        sequences=2,
        warmup=1,
        models=("14b",),
        resident="none",
    ),
    # The host of the benchmarks has 125 GiB, and this state 127: a part of it stays on the GPU.
    "overlap-8bit-32b": overlapped(
        "8-bit moments, compact masters, overlapped, 1 GiB, 36 GiB resident",
        "backward",
        overlap={"overlap_bytes": GIB},
        **EIGHT,
        resident_bytes=36 * GIB,
        sequences=2,
        warmup=1,
        models=("32b",),
        resident="none",
    ),
}
# 7.6e9 parameters take nearly twice as long.
GOALS_7B = {"overlap": 1.15}


def rows_of(model: str) -> list[str]:
    """Return the rows of a model; a small one has all."""
    return [name for name, row in ROWS.items() if model == "small" or model in row.models]


def scaled(options: dict[str, Any], small: bool) -> dict[str, Any]:
    """Return options for a model's size."""
    if not small:
        return options
    return {key: value // SMALLER[key] if key in SMALLER else value for key, value in options.items()}


def check_available(row: Row) -> None:
    """Raise if this build of forebay does not have what a row needs."""
    known = inspect.signature(forebay.AdamW).parameters
    if unknown := [name for name in row.options or {} if name not in known]:
        raise CannotRunError(f"this forebay has no option {unknown[0]}")
    if row.overlap is not None and not hasattr(forebay, "overlap_step"):
        raise CannotRunError("this forebay has no overlap_step")


class Marks:
    """Moments of torch's stream, or of the host's clock where there is no stream."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu, self.points = device.type == "cuda", []  # type: ignore[var-annotated]

    def mark(self, what: str) -> Any:
        """Note this moment; ``what`` begins here."""
        if self.on_gpu:
            point: Any = torch.cuda.Event(enable_timing=True)
            point.record()
        else:
            point = time.perf_counter()
        self.points.append((what, point))
        return point

    def seconds(self, what: str, since: int = 0) -> list[float]:
        """Return how long each part of this name lasted, up to the next moment, once all were reached."""
        spans = [(name, self.between(a, b)) for (name, a), (_, b) in pairwise(self.points)]
        return [span for name, span in spans if name == what][since:]

    def steps(self, since: int = 0) -> list[float]:
        """Return the time from the begin of each forward to the begin of the next one."""
        begins = [point for what, point in self.points if what in ("forward", "end")]
        return [self.between(a, b) for a, b in pairwise(begins)][since:]

    def between(self, first: Any, second: Any) -> float:
        """Return the seconds between two moments."""
        return first.elapsed_time(second) / 1e3 if self.on_gpu else second - first


class Run:
    """One row under way: its optimizer, its handle, and its steps."""

    def __init__(self, model: Trained, row: Row, spec: dict[str, Any], **limit: float) -> None:
        self.model, self.row, self.device = model, row, model.device
        self.optimizer: Any = None
        self.handle: Any = None
        self.call_s: list[float] = []
        # Whether the GPU had nothing left to do when a step's call returned.
        self.idle: list[bool] = []
        model.reset()
        if row.options is None:
            return
        options = scaled({"chunk_bytes": 16 * MIB, **row.options, **limit}, spec["small"])
        check_available(row)
        try:
            self.optimizer = forebay.AdamW(model.named_parameters(), **HYPER, **options)
            if row.overlap is not None:
                settings = scaled(row.overlap, spec["small"])
                self.handle = forebay.overlap_step(model, self.optimizer, **settings)
            self.optimizer.prepare()
        except BaseException as error:
            self.close()
            if isinstance(error, forebay.OptionError) and (row.overlap or {}).get("speculate"):
                raise CannotRunError(str(error)) from error
            raise

    def step(self, tokens: torch.Tensor, marks: Any) -> torch.Tensor:
        """Take one whole step; nothing here waits for the device. ``marks`` is told where its parts begin."""
        marks.mark("forward")
        loss = self.model(tokens)
        marks.mark("backward")
        with self.optimizer.last_backward() if self.row.marks else contextlib.nullcontext():
            loss.backward()
        reached = marks.mark("step")
        start = time.perf_counter()
        if self.optimizer is None:
            self.model.zero_grad()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.call_s.append(time.perf_counter() - start)
        self.idle.append(bool(self.device.type == "cuda" and reached.query()))
        return loss.detach()

    def settle(self) -> None:
        """Wait until everything has ended, on the device and on the host."""
        if self.handle is not None:
            # A read waits for the updates that are under way.
            next(self.model.parameters()).detach()
        if self.optimizer is not None:
            self.optimizer.synchronize()
        finish(self.device)

    def stats(self) -> dict[str, Any]:
        """Return what the handle says, with the optimizer's statistics of its last step beside it."""
        found = {} if self.optimizer is None else {"optimizer": plain(self.optimizer.stats())}
        return found if self.handle is None else {**found, "handle": plain(self.handle.stats())}

    def close(self) -> None:
        """Give everything back."""
        with contextlib.ExitStack() as last:
            if self.optimizer is not None:
                last.callback(self.optimizer.close)
            if self.handle is not None:
                last.callback(self.handle.remove)
            finish(self.device)
        self.optimizer = self.handle = None
        for parameter in self.model.parameters():
            parameter.grad = None


def plain(stats: dict[str, Any]) -> dict[str, Any]:
    """Return what fits into JSON."""
    return {key: value for key, value in stats.items() if isinstance(value, bool | int | float | str)}


@contextlib.contextmanager
def running(model: Trained, row: Row, spec: dict[str, Any], **limit: float) -> Iterator[Run]:
    """Run a row and close it, also if it fails."""
    run = Run(model, row, spec, **limit)
    try:
        yield run
    finally:
        run.close()


# Measuring.


def measure(model: Trained, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Run one row."""
    row, device = ROWS[name], model.device
    tokens = model.tokens(row.sequences, model.shape.context)
    start = time.perf_counter()
    model.zero_grad()
    memory = Memory(device)
    with running(model, row, spec) as run:
        finish(device)
        setup_s = time.perf_counter() - start
        losses, marks, warmup = [run.step(tokens, Marks(device))], Marks(device), row.warmup - 1
        # The first step makes what later ones use again. From here on the host never waits for the device.
        run.settle()
        begin = time.perf_counter()
        for number in range(warmup + spec["steps"]):
            if number == warmup:
                allocated = allocations(device)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
            losses.append(run.step(tokens, marks))
        marks.mark("end")
        run.settle()
        wall_s = time.perf_counter() - begin
        memory.look()
        allocated = {name: count - allocated[name] for name, count in allocations(device).items()}
        step_s, stats, explained = marks.steps(warmup), run.stats(), explanation(run)
        call_s, idle = run.call_s[-spec["steps"] :], run.idle[-spec["steps"] :]
        peak = memory.peak()
        shown = timeline.record(run, tokens) if spec["profile"] and (row.overlap or row.profiled) else None
        start = time.perf_counter()
    if (row.overlap or {}).get("speculate") and not stats["handle"].get("accepted"):
        raise CannotRunError("no step was taken in backward and accepted")
    peak_bytes = None if peak["torch_peak_bytes"] is None else memory.allocated + peak["torch_peak_bytes"]
    return {
        "tokens": tokens.numel(),
        "steps": len(step_s),
        "step_s": step_s,
        "median_step_s": statistics.median(step_s),
        # All steps after the first, from the first call until everything is done.
        "wall_step_s": wall_s / (warmup + spec["steps"]),
        "parts_s": {part: statistics.median(marks.seconds(part, warmup)) for part in ("forward", "backward", "step")},
        "call_s": statistics.median(call_s),
        "steps_idle_at_return": sum(idle),
        "losses": [float(loss) for loss in losses],
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "peak_bytes": peak_bytes,
        # Of the whole process so far, pinned memory included.
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "driver_peak_bytes": peak["driver_peak_bytes"],
        "allocations": allocated,
        "pinned_bytes": int(stats.get("optimizer", {}).get("pinned_bytes", 0)),
        "setup_s": setup_s,
        "close_s": time.perf_counter() - start,
        "stats": stats,
        "explained": explained,
        "timeline": shown,
    }


def allocations(device: torch.device) -> dict[str, int]:
    """Return how often torch's allocator has asked the driver so far. In steps that are alike it should not."""
    if device.type != "cuda":
        return {}
    found = torch.cuda.memory_stats(device)
    return {name: int(found.get(name, 0)) for name in ("num_device_alloc", "num_device_free", "num_alloc_retries")}


def explanation(run: Run) -> str | None:
    """Return what the handle says about its plan, without most of its chunks."""
    if run.handle is None:
        return None
    return "\n".join(str(run.handle.explain()).splitlines()[:EXPLAINED_LINES])


def wire(device: torch.device) -> float | None:
    """Measure copies of pinned memory in both directions at once; GB/s each way."""
    if device.type != "cuda":
        return None
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    host = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(8)]
    there = [torch.empty(PIECE, dtype=torch.uint8, device=device) for _ in range(8)]
    best = 0.0
    for _ in range(3):
        finish(device)
        start = time.perf_counter()
        for number in range(PIECES):
            place = number % 4
            with torch.cuda.stream(streams[0]):
                there[place].copy_(host[place], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                host[4 + place].copy_(there[4 + place], non_blocking=True)
        finish(device)
        best = max(best, PIECES * PIECE / (time.perf_counter() - start) / 1e9)
    del host
    torch._C._host_emptyCache()
    return best


def against(row: dict[str, Any], found: dict[str, Any]) -> None:
    """Add what the resident row of the same run and the wire say about a row."""
    spec = ROWS[row["name"]]
    row["goal"] = (GOALS_7B if found["model"] == "7b" else {}).get(row["name"], spec.goal)
    if "median_step_s" in row:
        # Six operations for each parameter and token; recomputation does not count.
        row["model_tflops"] = 6 * found["params"] * row["tokens"] / row["median_step_s"] / 1e12
    resident = next((other for other in found["rows"] if other["name"] == spec.resident), {})
    if "median_step_s" not in resident or "median_step_s" not in row:
        return
    forward_s, backward_s = (resident["parts_s"][part] for part in ("forward", "backward"))
    row["times_resident"] = row["median_step_s"] / resident["median_step_s"]
    row["beyond_passes_s"] = row["median_step_s"] - forward_s - backward_s
    if row["peak_bytes"] is not None:
        # Weights, gradients and activations of the same passes.
        state = resident["peak_bytes"] - 12 * found["params"]
        row["extra_bytes"] = row["peak_bytes"] - state
    stats, rate = row["stats"].get("optimizer", {}), found["wire_gbps"]
    if not stats or rate is None or spec.options is None or spec.options.get("placement") == "resident":
        return
    moved = max(stats.get("fetch_bytes", 0), stats.get("store_bytes", 0))
    row["each_way_bytes"] = moved
    wire_s = max(moved / rate / 1e9, stats.get("host_s", 0.0))
    hidden_s = {"nothing": 0.0, "forward": forward_s, "backward": forward_s + backward_s}[spec.hides]
    # The embedding's state: nothing hides it but room on the GPU. Under clipping it is part of what the forward hides.
    tail = max(0, 12 * found["first_needed"] - spec.options.get("resident_bytes", 0)) if spec.hides == "backward" else 0
    row["floor_parts_s"] = {"tail": tail / rate / 1e9, "wire": max(0.0, wire_s - hidden_s)}
    row["floor_step_s"] = forward_s + backward_s + max(row["floor_parts_s"].values())


# Checking.


def check(model: Trained, names: list[str], spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compare every overlapped row with plain steps: sums over the bits of parameters, state and step counters."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield from compare(model, names, spec)
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = True


def compare(model: Trained, names: list[str], spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one result after the other; plain steps that others are compared with run once."""
    known: dict[float | None, tuple[list[float], dict[str, str]]] = {}

    def reference(limit: float | None) -> tuple[list[float], dict[str, str]]:
        if limit not in known:
            known[limit] = train(model, ROWS["stream"], spec, limit)
        return known[limit]

    # If these two differed, a row that differs would say nothing about the overlap.
    again = train(model, ROWS["resident"], spec, None)[1]
    yield {"name": "resident", "limit": None, **same(again, reference(None)[1])}
    never = NEVER["max_grad_norm"]
    for name in names:
        row = ROWS[name]
        if row.overlap is None:
            continue
        try:
            check_available(row)
            norms = sorted(reference(never)[0]) if "max_grad_norm" in row.options else []
        except CannotRunError as reason:
            yield {"name": name, "limit": None, "cannot_run": str(reason)}
            continue
        limits: list[float | None] = [norms[0] / 2] if norms else [None]
        if row.overlap.get("speculate"):
            # No step is clipped, every one, some.
            limits = [never, norms[0] / 2, norms[len(norms) // 2]]
        for limit in limits:
            begin = time.perf_counter()
            about: dict[str, Any] = {"name": name, "limit": limit}
            try:
                plain_norms, bits = reference(limit)
                about["clipped"] = sum(limit / (norm + 1e-6) < 1 for norm in plain_norms) if limit else 0
                about |= same(train(model, row, spec, limit, about)[1], bits)
                if limit == never and not (about["handle"] or {}).get("accepted"):
                    raise CannotRunError("no step was taken in backward and accepted")
            except CannotRunError as reason:
                about["cannot_run"] = str(reason)
            except Exception as error:
                traceback.print_exc()
                about["error"] = f"{type(error).__name__}: {error}"
            free(model)
            yield {**about, "row_s": time.perf_counter() - begin}


def train(
    model: Trained, row: Row, spec: dict[str, Any], limit: float | None, about: dict[str, Any] | None = None
) -> tuple[list[float], dict[str, str]]:
    """Train some steps, each on tokens of its own; return the norms and sums over the bits of everything.

    ``about`` gets what the handle says.
    """
    clip = {} if limit is None else {"max_grad_norm": limit}
    batches = [model.tokens(1, spec["check_context"], seed) for seed in range(spec["check_steps"])]
    with running(model, row, spec, **clip) as run:
        norms = []
        for tokens in batches:
            run.step(tokens, Marks(model.device))
            if limit is not None:
                norms.append(run.optimizer.grad_norm)
        # Read at once, as training code would: whoever reads gets the new value.
        parameters = list(model.parameters())
        bits = {"parameters": fingerprint(parameters, model.device)}
        for kind in ("exp_avg", "exp_avg_sq", "master_param"):
            bits[kind] = fingerprint([run.optimizer.state[p][kind] for p in parameters], model.device)
        if about is not None:
            about["handle"] = run.stats().get("handle")
        steps = [float(run.optimizer.state[p]["step"]) for p in parameters]
        found = {kind: f"{value:016x}" for kind, value in bits.items()} | {"steps": f"{min(steps)} {max(steps)}"}
        return [float(norm) for norm in norms], found


def same(bits: dict[str, str], reference: dict[str, str]) -> dict[str, Any]:
    """Return what differs."""
    return {"differing": [kind for kind in reference if bits[kind] != reference[kind]], "bits": bits}


def free(model: Trained) -> None:
    """Give back what a row has left, also one that failed."""
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
