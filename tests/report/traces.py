"""Traces as forebay writes them, made by hand: of a GPU that nobody needs, with figures that tests can predict."""

from __future__ import annotations

from typing import Any

ROWS = {
    1: "passes",
    2: "torch's stream",
    3: "fetch",
    4: "update",
    5: "store",
    6: "activations out",
    7: "activations in",
    8: "sleep and wake",
    9: "saves",
    10: "waits",
}
CHUNK = 16 << 20
MIB, GIB = 1 << 20, 1 << 30


class Recorder:
    """Collects the events of one rank; times are in milliseconds."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": name}}
            for row, name in ROWS.items()
        ]

    def span(self, row: int, name: str, category: str, start: float, length: float, **args: Any) -> None:
        """Add a span."""
        self.events.append(
            {"ph": "X", "pid": self.rank, "tid": row, "name": name, "cat": category, "ts": start * 1e3}
            | {"dur": length * 1e3, "args": args}
        )

    def counter(self, name: str, at: float, **values: float) -> None:
        """Add a sample of a counter."""
        self.events.append({"ph": "C", "pid": self.rank, "tid": 0, "name": name, "ts": at * 1e3, "args": values})


def plain(
    rank: int = 0, *, steps: int = 6, chunks: int = 280, layers: int = 8, limit: bool = True, slow: float = 1.0
) -> dict[str, Any]:
    """Return a trace of plain streamed steps: 80 ms forward, 160 ms backward, 0.36 ms for each chunk."""
    recorder = Recorder(rank)
    now = 0.0
    for step in range(1, steps + 1):
        begin = now
        for row in (1, 2):
            recorder.span(row, "forward", "pass", now, 80, step=step)
            recorder.span(row, "backward", "pass", now + 80, 160, step=step)
        each = 80 / layers
        for layer in range(layers):
            start = now + layer * each
            moved = {"bytes": 192 * MIB, "layer": layer}
            recorder.span(6, f"layers.{layer}", "activation_store", start + each, 0.4 * each, **moved)
            back = now + 80 + (layers - layer) * 2 * each - 3 * each
            recorder.span(7, f"layers.{layer}", "activation_fetch", back, 0.4 * each, **moved)
        recorder.counter("device bytes", now, allocated=20 * GIB, reserved=30 * GIB)
        recorder.counter("device bytes", now + 80, allocated=29 * GIB, reserved=31 * GIB)
        now += 240
        period, length = 0.36 * slow, 0.34 * slow
        for chunk in range(chunks):
            start, slot = now + chunk * period, chunk % 4
            recorder.span(3, f"chunk {chunk}", "fetch", start, length, bytes=CHUNK, chunk=chunk, slot=slot)
            recorder.span(4, f"chunk {chunk}", "update", start + period, 0.05, chunk=chunk, slot=slot)
            store = start + period + 0.06
            recorder.span(5, f"chunk {chunk}", "store", store, length, bytes=CHUNK, chunk=chunk, slot=slot)
            if chunk >= 4:
                recorder.span(10, "wait for a slot", "wait", start - 0.2, 0.19 * slow, reason="slot", step=step)
        took = chunks * period + 1.2
        for row in (1, 2):
            recorder.span(row, "step", "pass", now, took, step=step)
        recorder.counter("ring bytes", now, ring=64 * MIB)
        recorder.counter("pinned bytes", now, optimizer=1280 * MIB, activations=layers * 192 * MIB, sleep=0, saves=0)
        now += took
        if step % 3 == 0:
            recorder.span(9, "save", "save", now - 30, 200, bytes=2 * GIB)
            recorder.span(10, "wait for a save", "wait", now - 6, 4, reason="save", step=step)
        recorder.span(10, "wait for activations", "wait", begin + 120, 3, reason="activation", step=step)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": recorder.events,
        "forebay": about(rank, now / 1e3, layers, limit),
    }


def about(rank: int, seconds: float, layers: int, limit: bool) -> dict[str, Any]:
    """Return what a rank says about itself."""
    plan_layers = [
        {"word": "offload" if layer < layers - 2 else "keep", "recompute": False, "kept_bytes": 8 * MIB}
        | {
            "offloaded_bytes": 192 * MIB if layer < layers - 2 else 0,
            "forward_ns": 10_000_000,
            "backward_ns": 20_000_000,
        }
        | {"recompute_ns": 0, "stall_ns": 300_000 if layer == 1 else 0}
        for layer in range(layers)
    ]
    measured = [{"forward_s": 0.0102, "backward_s": 0.0199} for _ in range(layers)]
    return {
        "schema": 1,
        "version": "0.1.0",
        "rank": rank,
        "ranks": 1,
        "zero_unix_ns": 1_700_000_000_000_000_000,
        "seconds": seconds,
        "capacity": 262_144,
        "dropped": 0,
        "machine": {
            "device": f"cuda:{rank}",
            "name": "NVIDIA H200",
            "cpus": 16,
            "host_bytes": 128 * GIB,
            "device_bytes": 139 * GIB,
            "torch": "2.11.0",
            "python": "3.11.7",
        },
        "wire": {"fetch_gbps": 55.1, "store_gbps": 55.0, "both_gbps": 50.4} if limit else None,
        "optimizers": [
            {
                "name": "AdamW 0",
                "class": "AdamW",
                "settings": {"placement": "stream", "chunk_bytes": CHUNK, "slots": 4, "max_grad_norm": None},
                "stats": {"step_s": 0.102, "fetch_gbps": 33.5, "pinned_bytes": 1280 * MIB, "stalls": 36},
            }
        ],
        "overlaps": [],
        "activations": [
            {
                "name": "Model",
                "settings": {"budget_bytes": 9 * GIB},
                "stats": {"stored_bytes": 600 * MIB, "stall_s": 0.018},
                "plan": {
                    "budget_bytes": 9 * GIB,
                    "least_bytes": 3 * GIB,
                    "peak_bytes": 8 * GIB,
                    "pass_ns": 240_000_000,
                    "layers": plan_layers,
                    "measured": {"pass_s": 0.2436, "peak_bytes": 8 * GIB + 64 * MIB, "layers": measured},
                },
                "explain": "budget 9.00 GiB (minimum 3.00 GiB): 240.0 ms a pass",
            }
        ],
        "sleepers": [],
        "saves": [{"seconds": 0.2, "bytes": 2 * GIB}],
    }


def merged(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one trace of several ranks."""
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [event for trace in traces for event in trace["traceEvents"]],
        "forebay": {"schema": 1, "merged": True, "ranks": [trace["forebay"] for trace in traces]},
    }
