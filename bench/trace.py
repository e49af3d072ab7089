"""What a trace costs: whole training steps with and without ``forebay.trace``, in turns, one table, one JSON file.

The model is a stack of blocks with streamed state and offloaded activations. Steps with and without take turns, so that
what else the machine does meets both alike. Entering a trace and writing its file are timed apart. The processor's time
of a step is beside its wall time: on a machine that others use too it says more.

usage: python bench/trace.py [--json PATH] [--device cpu] [--rounds 15] [--steps 3] [--width 512] [--layers 8]
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Neighbours, not a package: Python finds them in this file's folder.
import rows as machine_rows
import torch
from step import commit_of

import forebay

if TYPE_CHECKING:
    from collections.abc import Callable


def training(options: argparse.Namespace) -> Callable[[], None]:
    """Return a function that takes one whole training step."""
    torch.manual_seed(0)
    width, device = options.width, torch.device(options.device)

    def block() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
        )

    model = torch.nn.Sequential(*(block() for _ in range(options.layers))).to(device)
    optimizer = forebay.AdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0, chunk_bytes=options.chunk_bytes)
    forebay.offload_activations(model, layers=list(model), fraction=1.0)
    batch = torch.randn(options.batch, width, device=device)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def timed(step: Callable[[], None], count: int) -> tuple[float, float]:
    """Return the wall time and the processor's time of one step."""
    wall, busy = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    return (time.perf_counter() - wall) / count, (time.process_time() - busy) / count


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Take turns."""
    step = training(options)
    timed(step, options.steps)
    off: list[tuple[float, float]] = []
    on: list[tuple[float, float]] = []
    entering: list[float] = []
    writing: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        for turn in range(2 * options.rounds):
            # Off, on, on, off: neither is always the first.
            if turn % 4 in (0, 3):
                off.append(timed(step, options.steps))
                continue
            begin = time.perf_counter()
            with forebay.trace(path):
                entering.append(time.perf_counter() - begin)
                on.append(timed(step, options.steps))
                end = time.perf_counter()
            writing.append(time.perf_counter() - end)
        events = json.loads(path.read_text())["traceEvents"]
        size = path.stat().st_size

    def median(of: list[tuple[float, float]], which: int) -> float:
        return statistics.median(one[which] for one in of)

    return {
        "step_s": {"off": median(off, 0), "on": median(on, 0), "more": median(on, 0) / median(off, 0) - 1},
        "processor_s": {"off": median(off, 1), "on": median(on, 1), "more": median(on, 1) / median(off, 1) - 1},
        "enter_s": statistics.median(entering),
        "write_s": statistics.median(writing),
        "spans_each_step": sum(event["ph"] == "X" for event in events) / options.steps,
        "file_bytes": size,
    }


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--chunk-bytes", type=int, default=4 << 20)
    parser.add_argument("--commit")
    options = parser.parse_args()
    found = measure(options)
    for name, what in (("step_s", "a step"), ("processor_s", "its processor time")):
        of = found[name]
        print(f"{what:<20}{of['off'] * 1e3:9.2f} ms without, {of['on'] * 1e3:9.2f} ms with a trace: {of['more']:+.2%}")
    print(f"{'entering, writing':<20}{found['enter_s'] * 1e3:9.2f} ms, {found['write_s'] * 1e3:.2f} ms")
    print(f"{'spans each step':<20}{found['spans_each_step']:9.0f}, {found['file_bytes']} bytes of file")
    if options.json is not None:
        about = {
            "command": shlex.join(["python", "bench/trace.py", *sys.argv[1:]]),
            "commit": commit_of(options.commit),
            "machine": machine_rows.machine({"device": options.device}),
        }
        options.json.write_text(json.dumps({**about, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
