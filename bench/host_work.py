"""How the host spends its time in one ``step()`` of many small tensors: gathering, submitting, version counters.

python bench/host_work.py                 1e9 f32 parameters in 10,000 tensors, on the first GPU
python bench/host_work.py --device cpu    64 elements in each, on the CPU backend, which computes in the same time
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rows
import step
import torch

import forebay
from forebay.optim import base, gather

if TYPE_CHECKING:
    from collections.abc import Callable

# Private names of the optimizer. A clock is put around each of them, where it is looked up.
PARTS = {
    "gather parameters and gradients": (gather.Found, "__init__"),
    "the engine, with its waits": (base.Optimizer, "_update"),
    "raise version counters": (base, "bump_versions"),
}


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cuda:0 or cpu; by default the first GPU, or the CPU where there is none")
    parser.add_argument("--tensors", type=int, default=10_000, help="how many (%(default)s)")
    parser.add_argument("--elements", type=int, help="of each (cuda: 100,000; cpu: 64)")
    parser.add_argument("--without", type=int, default=0, metavar="N", help="one in N has no gradient (0: all have)")
    parser.add_argument("--steps", type=int, default=9, help="timed steps (%(default)s)")
    parser.add_argument("--commit", help="the commit to note; by default what git says")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to this file")
    options = parser.parse_args()
    if options.tensors < 1 or options.steps < 1 or options.without < 0:
        parser.error("--tensors and --steps are at least 1, --without at least 0")
    options.device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    options.elements = options.elements or (64 if options.device == "cpu" else 100_000)
    return options


def timed(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    """Return the function with a clock around it."""

    def run(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            into.append(time.perf_counter() - start)

    return run


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps: the whole calls first, then with a clock around each part."""
    shape = {"size": (options.elements,), "device": options.device}
    parameters = [torch.nn.Parameter(torch.randn(**shape)) for _ in range(options.tensors)]
    for i, parameter in enumerate(parameters):
        parameter.grad = None if options.without and i % options.without == 0 else torch.randn(**shape)
    optimizer = forebay.AdamW(parameters)
    optimizer.step()

    def steps() -> tuple[list[float], list[float]]:
        calls, waits = [], []
        for _ in range(options.steps):
            optimizer.synchronize()
            if options.device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.step()
            calls.append(time.perf_counter() - start)
            waits.append(optimizer.stats()["stall_s"])
        return calls, waits

    calls, waits = steps()
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for part, (owner, name) in PARTS.items():
        setattr(owner, name, timed(getattr(owner, name), parts[part]))
    _, waits_in_parts = steps()
    engine = parts.pop("the engine, with its waits")
    parts["the engine"] = [call - wait for call, wait in zip(engine, waits_in_parts, strict=True)]
    return {
        "call_s": statistics.median(calls),
        "wait_s": statistics.median(waits),
        "host_s": statistics.median(call - wait for call, wait in zip(calls, waits, strict=True)),
        "chunks": optimizer.stats()["chunks"],
        "parts_s": {part: statistics.median(times) for part, times in parts.items()},
    }


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    options = found["options"]
    print(f"{options['tensors']:,} tensors of {options['elements']:,} on {options['device']}, {found['chunks']} chunks")
    lines = [["whole call", found["call_s"]], ["waits for slots", found["wait_s"]], ["host work", found["host_s"]]]
    lines += [[f"  {part}", seconds] for part, seconds in found["parts_s"].items()]
    print(step.table(["one step, medians", "ms"], [[name, f"{1e3 * seconds:.2f}"] for name, seconds in lines]))


def main() -> int:
    """Measure, print, write."""
    options = parse()
    asked = {name: getattr(options, name) for name in ("device", "tensors", "elements", "without", "steps")}
    found = {
        "machine": rows.machine({"device": options.device}),
        "command": shlex.join(["python", "bench/host_work.py", *sys.argv[1:]]),
        "commit": step.commit_of(options.commit),
        "options": asked,
        **measure(options),
    }
    step.conclude(found, options.json, show)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
