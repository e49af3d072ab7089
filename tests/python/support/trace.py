"""Runs that are traced, and a strict reader of the files that they leave."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import forebay
from forebay import checkpoint
from support.optim import snapshot
from support.tensors import random

if TYPE_CHECKING:
    from pathlib import Path

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
CATEGORIES = {
    "pass": (1, 2),
    "fetch": (3,),
    "update": (4,),
    "store": (5,),
    "activation_store": (6,),
    "activation_fetch": (7,),
    "sleep": (8,),
    "wake": (8,),
    "save": (9,),
    "wait": (10,),
}
REASONS = ("slot", "weights", "gradients", "save", "activation", "sleep", "other")
COUNTERS = {
    "pinned bytes": {"optimizer", "activations", "sleep", "saves"},
    "ring bytes": {"ring"},
    "device bytes": {"allocated", "reserved"},
}
WHOLE = ("bytes", "untimed_bytes", "chunk", "chunks", "slot", "step")
WORDS = ("optimizer", "activations", "layer", "reason")
HEADER: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "version": str,
    "rank": int,
    "ranks": int,
    "zero_unix_ns": int,
    "seconds": float,
    "capacity": int,
    "dropped": int,
    "partial": bool,
    "machine": dict,
    "wire": (dict, type(None)),
    "optimizers": list,
    "overlaps": list,
    "activations": list,
    "sleepers": list,
    "saves": list,
}
MACHINE: dict[str, type] = {
    "device": str,
    "name": str,
    "cpus": int,
    "host_bytes": int,
    "device_bytes": int,
    "torch": str,
    "python": str,
}
OBJECTS = {
    "optimizers": {"name", "class", "settings", "stats"},
    "overlaps": {"optimizer", "stats"},
    "activations": {"name", "settings", "stats", "plan", "explain", "layers"},
    "sleepers": {"name", "stats"},
    "saves": {"name", "seconds", "bytes"},
}


@dataclass
class Trace:
    """A file that was read and found to be as the schema says."""

    events: list[dict[str, Any]]
    header: dict[str, Any]

    def spans(self, category: str) -> list[dict[str, Any]]:
        """Return the spans of a category, in order."""
        return [event for event in self.events if event["ph"] == "X" and event["cat"] == category]

    def sum(self, category: str) -> int:
        """Return the bytes of a category."""
        return sum(span["args"].get("bytes", 0) + span["args"].get("untimed_bytes", 0) for span in self.spans(category))

    def names(self, category: str) -> list[str]:
        """Return the names of a category's spans, in order."""
        return [span["name"] for span in self.spans(category)]

    def last(self, counter: str) -> dict[str, int]:
        """Return the last values of a counter."""
        values: dict[str, int] = [event for event in self.events if event["name"] == counter][-1]["args"]
        return values


def read(path: Path) -> Trace:
    """Read the file of one rank, and check everything that the schema says."""
    raw = json.loads(path.read_text(), parse_constant=_no_constant)
    assert set(raw) == {"displayTimeUnit", "traceEvents", "forebay"}
    assert raw["displayTimeUnit"] == "ms"
    header, events = raw["forebay"], raw["traceEvents"]
    check_header(header)
    check_events(events, {header["rank"]}, header["seconds"] * 1e6)
    spans = [event for event in events if event["ph"] in "XC"]
    assert len(spans) <= header["capacity"]
    known = {row["name"] for row in header["optimizers"]}
    assert {
        event["args"]["optimizer"] for event in events if "optimizer" in event["args"] and event["ph"] == "X"
    } <= known
    assert {row["optimizer"] for row in header["overlaps"]} <= known
    return Trace(events, header)


def _no_constant(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def check_header(header: dict[str, Any]) -> None:
    """Check what the file says about the process."""
    assert set(header) == set(HEADER), set(header) ^ set(HEADER)
    for key, kind in HEADER.items():
        assert isinstance(header[key], kind), (key, header[key])
    assert header["schema"] == 1
    assert 0 <= header["rank"] < header["ranks"]
    assert header["zero_unix_ns"] > 1_500_000_000_000_000_000
    assert set(header["machine"]) == set(MACHINE)
    for key, kind in MACHINE.items():
        assert isinstance(header["machine"][key], kind), key
    for key, keys in OBJECTS.items():
        for row in header[key]:
            assert set(row) == keys, (key, set(row) ^ keys)
    names = [row["name"] for key in ("optimizers", "activations") for row in header[key]]
    assert len(names) == len(set(names))


def check_events(events: list[dict[str, Any]], ranks: set[int], end_us: float) -> None:
    """Check every event, and that spans of one line follow each other or nest."""
    rows: dict[tuple[int, int], str] = {}
    lines: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["pid"] in ranks
        kind = event["ph"]
        if kind == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index"), event
            if event["name"] == "thread_name":
                rows[event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert math.isfinite(event["ts"])
        assert 0 <= event["ts"] <= end_us + 1, event
        if kind == "C":
            assert set(event["args"]) == COUNTERS[event["name"]], event
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values()), event
            continue
        assert kind == "X", event
        assert set(event) == {"ph", "pid", "tid", "cat", "name", "ts", "dur", "args"}
        assert event["tid"] % 100 in CATEGORIES[event["cat"]], event
        assert event["dur"] >= 0
        assert event["name"]
        for key, value in event["args"].items():
            assert key in WHOLE or key in WORDS, event
            assert isinstance(value, int if key in WHOLE else str), event
        assert (event["args"].get("reason") in REASONS) == (event["cat"] == "wait"), event
        lines.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert set(rows) == set(lines)
    for (pid, tid), name in rows.items():
        line = tid // 100
        assert name == ROWS[tid % 100] + (f" ({line + 1})" if line else ""), name
        open_until: list[float] = []
        for begin, end in sorted(lines[pid, tid], key=lambda span: (span[0], -span[1])):
            # Times are whole nanoseconds, written in microseconds.
            while open_until and open_until[-1] <= begin + 2e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 2e-3, (name, begin, end)
            open_until.append(end)


def blocks(device: torch.device, *, width: int = 64, count: int = 4) -> torch.nn.Sequential:
    """Return a model of equal layers."""
    torch.manual_seed(3)
    layer = lambda: torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())  # noqa: E731
    return torch.nn.Sequential(*(layer() for _ in range(count))).to(device)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    """Train."""
    device = next(model.parameters()).device
    for step in range(count):
        value = random((32, 64), step).to(device)
        model(value).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(device: torch.device, folder: Path, placement: str) -> Any:
    """Use every part of forebay that a trace shows, and return all that it led to."""
    model = blocks(device)
    optimizer = forebay.AdamW(
        model.parameters(), lr=1e-2, placement=placement, chunk_bytes=1 << 14, slots=3, max_grad_norm=1.0
    )
    options: dict[str, Any] = {"min_bytes": 1024, "fraction": 1.0, "keep_last": 0}
    handle = forebay.offload_activations(model, layers=list(model), **options)
    steps(model, optimizer, 2)
    checkpoint.save(folder / "saved", model, optimizer)
    save = checkpoint.async_save(folder / "saved", model, optimizer)
    steps(model, optimizer, 1)
    save.result()
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.sleep()
    sleeper.wake()
    overlapped = forebay.overlap_step(model, optimizer, accumulation_steps=1)
    steps(model, optimizer, 3)
    overlapped.remove()
    handle.remove()
    optimizer.synchronize()
    return snapshot(optimizer, model.parameters())
