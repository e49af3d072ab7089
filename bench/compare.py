"""Two builds of forebay against each other on one machine: one table, one JSON file.

OLD and NEW are folders with a ``forebay`` package in each, for instance two unpacked wheels. Every measurement runs in
a process of its own that imports forebay from one of the folders. Old and new take turns, so that a change of the
machine reaches both. Only the public API that both have is used: ``AdamW``, ``offload_activations`` and ``Sleeper``.

All figures are times or bytes, and less is better. ``new/old`` compares the medians of all timed repetitions. ``by
round`` has the ratio of each pair of processes: where these ratios disagree, the difference is noise. ``bits`` compares
a sum over the bits of the results.

usage: python bench/compare.py OLD NEW [--json PATH] [--small] [--device cuda:0] [--rows stream-f32,sleep] [--rounds 2]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

GIB = 1 << 30
SIDES = ("old", "new")
# A process that takes longer than this hangs.
PROCESS_LIMIT_S = 120
# What the rows run. They import torch, so this process does not import them: it would have to wait for torch.
ROWS_FILE = Path(__file__).resolve().with_name("compare_rows.py")
ROWS = (
    "stream-f32",
    "stream-bf16",
    "host-work",
    "hybrid-f32",
    "hybrid-bf16",
    "activations-5gib",
    "activations-10gib",
    "sleep",
)
# Models by their parameters, the largest first.
MODELS = {"qwen2.5-3b": 3.09e9, "qwen2.5-1.5b": 1.54e9, "qwen2.5-0.5b": 0.49e9, "tiny": 0.001e9}


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description="Two builds of forebay against each other: one table, one JSON file.")
    parser.add_argument("old", type=Path, help="a folder with a forebay package")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--device", help="cuda:0 or cpu; by default the first GPU, or the CPU where there is none")
    parser.add_argument("--small", action="store_true", help="tiny sizes, in seconds, also on the CPU")
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, separated by commas: %(default)s")
    parser.add_argument("--model", choices=MODELS, help="shapes of the step (the largest that fits; small: tiny)")
    parser.add_argument("--params", type=int, help="this many parameters instead of a model's")
    parser.add_argument("--steps", type=int, help="timed repetitions in each process (5; small: 3)")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each row and side (%(default)s)")
    limit = "begin no pair of processes that would end after this many seconds, the first round aside (%(default)s)"
    parser.add_argument("--limit-s", type=float, default=420, help=limit)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to this file, after each pair")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    if unknown := [row for row in options.rows if row not in ROWS]:
        parser.error(f"unknown rows: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if options.model and options.params:
        parser.error("give --model or --params, not both")
    if min(options.rounds, options.steps or 1, options.params or 1) < 1:
        parser.error("--rounds, --steps and --params must be at least 1")
    for folder in (options.old, options.new):
        if not (folder / "forebay/__init__.py").is_file() or not list((folder / "forebay").glob("_core*.so")):
            parser.error(f"no forebay package with its extension module in {folder}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"no such folder: {options.json.resolve().parent}")
    return options


def job(folder: Path, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Run one job in a process that imports forebay from a folder; an error is part of the result."""
    command = [sys.executable, str(ROWS_FILE), str(folder.resolve()), name, json.dumps(spec)]
    environment = os.environ | {"PYTHONPATH": str(folder.resolve()), "PYTHONDONTWRITEBYTECODE": "1"}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=PROCESS_LIMIT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {PROCESS_LIMIT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        sys.stderr.write(done.stderr)
        complaint = done.stderr.strip().splitlines()
        return {"error": complaint[-1] if complaint else f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found | {"process_s": time.perf_counter() - start}


def available_bytes() -> int:
    """Return the host memory that this process may still use."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        available = min(available, limit - used)
    return available


def largest_model(gpu_free_bytes: int) -> str:
    """Return the largest model whose state fits the host, and whose weights and gradients fit the GPU."""
    for name, params in MODELS.items():
        # bf16 has 12 bytes of state, f32 has 8 of weights and gradients.
        if 1.25 * 12 * params < available_bytes() and 1.25 * 8 * params < gpu_free_bytes:
            return name
    return "tiny"


def about(folder: Path) -> dict[str, str]:
    """Return what identifies a build."""
    core = next((folder / "forebay").glob("_core*.so"))
    return {"folder": str(folder), "core_sha256": hashlib.sha256(core.read_bytes()).hexdigest()}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all pairs, one round after the other."""
    start = time.perf_counter()
    here = job(options.new, "machine", {"device": options.device})
    if "error" in here:
        sys.exit(f"error: {here['error']}\nhint: use --device cpu --small, or run on a machine with a GPU")
    device = here.pop("device")
    small = options.small or device == "cpu"
    model = options.model or ("tiny" if small else largest_model(here["gpu_free_bytes"]))
    steps = options.steps or (3 if small else 5)
    spec = {"device": device, "small": small, "steps": steps, "model": model, "params": options.params}
    found: dict[str, Any] = {
        "machine": here,
        "command": shlex.join(["python", "bench/compare.py", *sys.argv[1:]]),
        "options": spec,
        "builds": {"old": about(options.old), "new": about(options.new)},
        "rows": {row: {"old": [], "new": []} for row in options.rows},
        "left_out": [],
        "is_complete": False,
    }
    lasted: dict[str, float] = {}
    for number in range(options.rounds):
        for row, sides in found["rows"].items():
            begun = time.perf_counter()
            if number and begun - start + lasted[row] > options.limit_s:
                found["left_out"].append(f"{row}, round {number + 1}")
                continue
            for side in SIDES:
                result = job(getattr(options, side), row, spec)
                sides[side].append(result)
                took = f"{result['process_s']:.1f} s" if "process_s" in result else result["error"]
                print(f"{row}, round {number + 1}, {side}: {took}", file=sys.stderr, flush=True)
            lasted[row] = time.perf_counter() - begun
            write(found, options.json)
    found["is_complete"] = True
    found["total_s"] = time.perf_counter() - start
    return found


def write(found: dict[str, Any], path: Path | None) -> None:
    """Write all numbers so far, with the comparison."""
    found["comparison"] = [line for row, sides in found["rows"].items() for line in compare(row, sides)]
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def compare(row: str, sides: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a line for each metric of a row: medians, their ratio, and the ratio of each round."""
    errors = {side: next((run["error"] for run in sides[side] if "error" in run), None) for side in SIDES}
    if any(errors.values()):
        return [{"row": row, "errors": errors}]
    lines = []
    for kind in ("seconds", "peak_bytes"):
        for metric in sides["old"][0][kind] if sides["old"] else ():
            runs = {side: [run[kind][metric] for run in sides[side]] for side in SIDES}
            old, new = (statistics.median(chain.from_iterable(runs[side])) for side in SIDES)
            rounds = zip(runs["old"], runs["new"], strict=True)
            by_round = [statistics.median(b) / statistics.median(a) for a, b in rounds]
            line = {"row": row, "metric": metric, "unit": kind, "old": old, "new": new, "new/old": new / old}
            lines.append(line | {"by_round": by_round})
    bits = {run["bits"] for side in SIDES for run in sides[side]}
    for line in lines:
        line["same_bits"] = None if None in bits else len(bits) == 1
    return lines


def text(value: float, unit: str) -> str:
    """Return a value with its unit."""
    return f"{value * 1e3:.2f} ms" if unit == "seconds" else f"{value / GIB:.3f} GiB"


def print_report(found: dict[str, Any]) -> None:
    """Print everything as one table."""
    here, spec = found["machine"], found["options"]
    work = f"{spec['params']} parameters" if spec["params"] else spec["model"]
    print(f"{here['gpu'] or 'CPU backend'}; {here['cpus']} CPUs; torch {here['torch']}; steps over {work}")
    for side, build in found["builds"].items():
        print(f"{side}: {build['folder']}, extension module {build['core_sha256'][:12]}")
    print()
    lines = [["row", "metric", "old", "new", "new/old", "by round", "bits"]]
    for line in found["comparison"]:
        if "errors" in line:
            failed = "; ".join(f"{side}: {error}" for side, error in line["errors"].items() if error)
            lines.append([line["row"], f"FAILED, {failed}", "", "", "", "", ""])
            continue
        values = [text(line[side], line["unit"]) for side in SIDES]
        rounds = " ".join(f"{ratio:.3f}" for ratio in line["by_round"])
        bits = {None: "-", True: "same", False: "DIFFERENT"}[line["same_bits"]]
        lines.append([line["row"], line["metric"], *values, f"{line['new/old']:.3f}", rounds, bits])
    plain = [line for line in lines if line[2]]
    widths = [max(len(line[i]) for line in plain) for i in range(7)]
    for line in [lines[0], ["-" * width for width in widths], *lines[1:]]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for what in found["left_out"]:
        print(f"left out, no time: {what}")
    print(f"{found['total_s']:.0f} s in all")


def main() -> int:
    """Run, print, write; 1 if a row failed or bits differ."""
    options = parse()
    found = run(options)
    write(found, options.json)
    print_report(found)
    if options.json is not None:
        print(f"wrote {options.json}")
    return int(any("errors" in line or line["same_bits"] is False for line in found["comparison"]))


if __name__ == "__main__":
    sys.exit(main())
