"""The optimizer step against its peers: one table, one JSON file.

Every row runs in a process of its own (see ``rows.py``) on the shapes of a 3.09e9 parameter model, with random
parameters and gradients on the GPU. A step is timed from the call until everything is done: the device is idle and
every byte of state is back on the host. The wire is what ``forebay probe`` measures before and after the rows; the
better one counts.

usage: python bench/step.py [--json PATH] [--quick] [--device cuda:0] [--rows forebay,torch-fused] [--steps 7]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

# A neighbour, not a package: Python finds it in this file's folder.
import rows
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).resolve().parent
GIB, MIB = 1 << 30, 1 << 20
# A row that takes longer than this hangs.
LIMIT_S = 180
# Peers whose optimizer needs its own trainer around it: measured elsewhere, not here.
OTHER_PEERS = {
    "Megatron-LM, chunked state offload and HybridDeviceOptimizer": "megatron",
    "AReaL, per-layer step": "areal",
    "verl, per-layer step": "verl",
    "xtuner SwapAdamW": "xtuner",
    "DeepSpeed ZeRO-Offload": "deepspeed",
}


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description="The optimizer step against its peers: one table, one JSON file.")
    parser.add_argument("--device", help="cuda:0 or cpu; by default the first GPU, or the CPU where there is none")
    parser.add_argument("--quick", action="store_true", help="a small workload that also runs on the CPU, in seconds")
    parser.add_argument("--rows", default=",".join(rows.ROWS), help="which rows, separated by commas: %(default)s")
    parser.add_argument("--steps", type=int, help="timed steps of each row (7; quick: 5)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (%(default)s)")
    parser.add_argument("--wire-gbps", type=float, help="take this for the wire instead of measuring it")
    parser.add_argument("--rows-only", action="store_true", help="leave out pinning tensor by tensor and exactness")
    parser.add_argument("--commit", help="the commit to note; by default what git says")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to this file")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    if unknown := [row for row in options.rows if row not in rows.ROWS]:
        parser.error(f"unknown rows: {', '.join(unknown)}; there are {', '.join(rows.ROWS)}")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1: {options.steps}")
    if options.warmup < 1:
        parser.error(f"--warmup must be at least 1, the first step makes state: {options.warmup}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"no such folder: {options.json.resolve().parent}")
    return options


class Progress:
    """One line on a terminal, nothing in a pipe."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.shown = total, 0, sys.stderr.isatty()

    def begin(self, what: str) -> None:
        """Say what runs now."""
        if self.shown:
            filled = 30 * self.done // self.total
            bar = "=" * filled + " " * (30 - filled)
            sys.stderr.write(f"\r\x1b[K[{bar}] {self.done}/{self.total} {what}")
            sys.stderr.flush()
        self.done += 1

    def end(self) -> None:
        """Clear the line."""
        if self.shown:
            sys.stderr.write("\r\x1b[K")


def job(name: str, spec: dict[str, Any], of: Any = rows) -> dict[str, Any]:
    """Do one job; an error is part of the result.

    Each job has a process of its own, so that memory figures are clean. On the CPU there are none to keep clean. ``of``
    is the module that knows the job.
    """
    if spec["device"] == "cpu" or not torch.cuda.is_available():
        try:
            done_here: dict[str, Any] = of.do(name, spec)
            return done_here
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}
    command = [sys.executable, str(Path(of.__file__).resolve()), name, json.dumps(spec)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {LIMIT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        sys.stderr.write(done.stderr)
        complaint = done.stderr.strip().splitlines()
        return {"error": complaint[-1] if complaint else f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def commit_of(given: str | None) -> str | None:
    """Return the commit that was given, or what git says."""
    if given is not None:
        return given
    try:
        describe = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def against_the_wire(row: dict[str, Any], wire_gbps: float | None) -> None:
    """Add what the wire would allow, where a row uses it."""
    payload = row.get("payload_bytes")
    known = payload is not None and wire_gbps is not None
    row["floor_step_s"] = payload / wire_gbps / 1e9 if known else None
    row["percent_of_wire"] = 100 * row["gbps_each_way"] / wire_gbps if known else None


def peers_that_did_not_run() -> list[dict[str, str]]:
    """Return peers without a row, each with the reason."""
    missing = []
    for label, module in OTHER_PEERS.items():
        here = importlib.util.find_spec(module) is not None
        reason = "its step runs inside its own trainer only" if here else f"not installed: no module named {module!r}"
        missing.append({"label": label, "reason": reason})
    return missing


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the content of the file."""
    progress = Progress(len(options.rows) + 5)
    progress.begin("machine")
    machine = job("machine", {"device": options.device})
    if reason := machine.get("cannot_run") or machine.get("error"):
        progress.end()
        sys.exit(f"error: {reason}\nhint: use --device cpu --quick, or run on a machine with a GPU")
    device = machine.pop("device")
    quick = options.quick or device == "cpu"
    # Measuring the CPU backend's wire takes longer than everything else, and is of no use there.
    measures_wire = options.wire_gbps is None and not quick
    progress.total = len(options.rows) + (3 if measures_wire else 1) + (0 if options.rows_only else 2)
    spec = {
        "device": device,
        "quick": quick,
        "steps": options.steps or (5 if quick else 7),
        "warmup": options.warmup,
        "exact_steps": 20 if quick else 100,
    }
    wires = []
    if measures_wire:
        progress.begin("wire")
        wires.append(job("wire", spec))

    found = []
    for name in options.rows:
        row = rows.ROWS[name]
        progress.begin(row.label)
        about = {"name": name, "label": row.label, "workload": row.workload}
        about |= {"dtype": str(row.dtype).removeprefix("torch."), "options": row.options}
        found.append(about | job(name, spec))
    pin = exactness = {"cannot_run": "not asked for"}
    if not options.rows_only:
        progress.begin("pinning one tensor at a time")
        pin = job("pin", spec)
        progress.begin("exactness")
        exactness = job("exactness", spec)
    if measures_wire:
        progress.begin("wire, again")
        wires.append(job("wire", spec))
    progress.end()

    measured = [wire["gbps"] for wire in wires if "gbps" in wire]
    wire_gbps = options.wire_gbps or max(measured, default=None)
    for result in found:
        against_the_wire(result, wire_gbps)
    return {
        "machine": machine,
        "device": device,
        "command": shlex.join(["python", "bench/step.py", *sys.argv[1:]]),
        "commit": commit_of(options.commit),
        "options": spec,
        "wire": {"gbps": wire_gbps, "measured": wires, "given": options.wire_gbps is not None},
        "rows": found,
        "pin_one_by_one": pin,
        "exactness": exactness,
        "did_not_run": peers_that_did_not_run(),
    }


# Tables.


def table(heads: list[str], lines: list[list[str]]) -> str:
    """Return lines in columns: the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    rule = "  ".join("-" * width for width in widths)

    def text(line: list[str]) -> str:
        cells = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([text(heads), rule, *map(text, lines)])


def number(value: float | None, digits: int, scale: float = 1.0) -> str:
    """Return a number, or a dash for none."""
    return "-" if value is None else f"{value / scale:.{digits}f}"


def size(value: int | None) -> str:
    """Return bytes as people read them."""
    if value is None:
        return "-"
    return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / MIB:.1f} MiB"


def why_not(row: dict[str, Any]) -> str | None:
    """Return why a row has no numbers."""
    return row.get("cannot_run") or (f"FAILED: {row['error']}" if "error" in row else None)


def print_report(found: dict[str, Any]) -> None:
    """Print everything as tables."""
    machine, wire, spec = found["machine"], found["wire"]["gbps"], found["options"]
    where = f"{machine['gpu']}, driver {machine['driver']}" if machine["gpu"] else "CPU backend"
    print(f"{where}; {machine['cpus']} CPUs; torch {machine['torch']}; forebay {machine['forebay']}, {found['commit']}")
    ran = [row for row in found["rows"] if why_not(row) is None]
    for workload in dict.fromkeys(row["workload"] for row in ran):
        row = next(row for row in ran if row["workload"] == workload)
        scaled = " (scaled down)" if spec["quick"] else ""
        print(f"workload {workload}{scaled}: {row['params'] / 1e9:.4g}e9 parameters in {row['tensors']} tensors")
    how = "given" if found["wire"]["given"] else "as `forebay probe` measures it"
    print(f"wire: {number(wire, 2)} GB/s each way, {how}" if wire else "wire: not measured in a quick run")
    print(f"medians of {spec['steps']} steps after {spec['warmup']}\n")

    lines = [
        [
            row["label"],
            number(row["median_step_s"], 1, 1e-3),
            number(row["floor_step_s"], 1, 1e-3),
            number(row["gparam_per_s"], 3),
            number(row["gbps_each_way"], 2),
            number(row["percent_of_wire"], 1),
            number(row["median_call_s"], 1, 1e-3),
            number(row["median_host_s"], 2, 1e-3),
        ]
        for row in ran
    ]
    heads = ["step", "ms", "wire's floor", "Gparam/s", "GB/s each way", "% of wire", "call ms", "host work ms"]
    print(table(heads, lines))
    print("host work: the call less its waits for slots\n")

    lines = [
        [
            row["label"],
            size(row["torch_peak_bytes"]),
            size(row["driver_peak_bytes"]),
            size(row["ring_bytes"]) if row["ring_bytes"] else "-",
            size(row["mapping_bytes"]) if row["mapping_bytes"] else "-",
            size(row["driver_code_bytes"]),
            size(row["pinned_bytes"]) if row["pinned_bytes"] else "-",
            number(row["setup_s"], 2) if row["pinned_bytes"] else "-",
            number(row["setup_gib_per_s"], 2),
        ]
        for row in ran
    ]
    heads = ["extra GPU memory, peak", "torch", "driver", "ring", "mapping", "code", "pinned", "set-up s", "GiB/s"]
    print(table(heads, lines))
    print("driver: all that the driver took in set-up and steps; mapping: 8 bytes of it for each pinned page of 4 KiB,")
    print("by calculation; code: what was loaded at first use, before. Set-up: making and pinning all state\n")

    pin = found["pin_one_by_one"]
    if reason := why_not(pin):
        print(f"pinning one tensor at a time: {reason}")
    else:
        own = next((row["setup_gib_per_s"] for row in ran if row["name"] == "forebay"), None)
        for way, rate in pin["gib_per_s"].items():
            faster = f"; forebay's set-up is {own / rate:.1f} times as fast per GiB" if own else ""
            print(f"pinning {size(pin['bytes'])} one tensor at a time, {way}: {rate:.2f} GiB/s{faster}")
    exact = found["exactness"]
    if reason := why_not(exact):
        print(f"exactness: {reason}")
    else:
        for check in exact["checks"]:
            verdict = "equal, bit for bit" if check["differing"] == 0 else "different"
            detail = f"{check['differing']} of {check['compared']} values differ after {exact['steps']} steps"
            print(f"{check['what']}: {verdict}: {detail}, by {check['largest_difference']:.2g} at most")
    for row in found["rows"]:
        if reason := why_not(row):
            print(f"not run: {row['label']}: {reason}")
    for peer in found["did_not_run"]:
        print(f"not run: {peer['label']}: {peer['reason']}")


def conclude(found: dict[str, Any], path: Path | None, show: Callable[[dict[str, Any]], None]) -> None:
    """Write the results if there is a path, and show them. Written first: showing them may fail."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")
    show(found)
    if path is not None:
        print(f"wrote {path}")


def main() -> int:
    """Run, print, write; 1 if a row failed or equality that must hold does not."""
    options = parse()
    found = run(options)
    conclude(found, options.json, print_report)
    parts = [*found["rows"], found["pin_one_by_one"], found["exactness"], *found["wire"]["measured"]]
    return int(any("error" in part for part in parts) or not found["exactness"].get("exact", options.rows_only))


if __name__ == "__main__":
    sys.exit(main())
