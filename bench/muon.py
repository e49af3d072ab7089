"""Muon with its momentum on the host against Muon with all state on the GPU: one table, one JSON file.

Muon trains the matrices of the layers and AdamW the rest, as people use it, in the shapes of a 3.09e9 parameter model
(see ``muon_rows.py``). A step is timed over random gradients, from the call until the device is idle and all state is
back on the host; a training step from the begin of one forward to the begin of the next. The floor is the state of a
step over the wire that ``forebay probe`` measures.

usage: python bench/muon.py [--json PATH] [--quick] [--device cuda:0] [--rows torch,forebay] [--tokens 16384]
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import muon_rows
from step import Progress, commit_of, conclude, job, number, size, table, why_not

BASES = {False: "torch", True: "train-torch"}
"""The row that others are set against: of steps, and of training steps."""


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", help="cuda:0 or cpu; by default the first GPU, or the CPU where there is none")
    parser.add_argument("--quick", action="store_true", help="a small model that also runs on the CPU, in seconds")
    parser.add_argument("--rows", default=",".join(muon_rows.ROWS), help="which rows, separated by commas: %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each row (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (%(default)s)")
    parser.add_argument("--tokens", type=int, help="tokens of a training step (16384; quick: 64)")
    parser.add_argument("--wire-gbps", type=float, help="take this for the wire instead of measuring it")
    parser.add_argument("--commit", help="the commit to note; by default what git says")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to this file")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    if unknown := [row for row in options.rows if row not in muon_rows.ROWS]:
        parser.error(f"unknown rows: {', '.join(unknown)}; there are {', '.join(muon_rows.ROWS)}")
    for name in ("steps", "warmup", "tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1: {value}")
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the content of the file."""
    progress = Progress(len(options.rows) + 2)
    progress.begin("machine")
    machine = job("machine", {"device": options.device})
    if reason := machine.get("cannot_run") or machine.get("error"):
        progress.end()
        sys.exit(f"error: {reason}\nhint: use --device cpu --quick, or run on a machine with a GPU")
    device = machine.pop("device")
    quick = options.quick or device == "cpu"
    spec = {
        "device": device,
        "quick": quick,
        "steps": options.steps,
        "warmup": options.warmup,
        "tokens": options.tokens or (64 if quick else 16_384),
    }
    progress.begin("wire")
    # Measuring the CPU backend's wire takes longer than everything else, and is of no use there.
    wire = {"gbps": options.wire_gbps} if options.wire_gbps or quick else job("wire", spec)
    found = []
    for name in options.rows:
        row = muon_rows.ROWS[name]
        progress.begin(row.label)
        found.append({"name": name, "label": row.label, **row._asdict()} | job(name, spec, muon_rows))
    progress.end()
    for result in found:
        compare(result, {one["name"]: one for one in found}, wire.get("gbps"))
    return {
        "machine": machine,
        "device": device,
        "command": shlex.join(["python", "bench/muon.py", *sys.argv[1:]]),
        "commit": commit_of(options.commit),
        "options": spec,
        "wire": wire,
        "rows": found,
        "differing": differing(found, on_gpu=device != "cpu"),
    }


def compare(row: dict[str, Any], by_name: dict[str, dict[str, Any]], wire_gbps: float | None) -> None:
    """Add what a row is against torch's in the same run, and what the wire would allow."""
    base = by_name.get(BASES[row["trains"]], {})
    row["times_resident"] = row["median_s"] / base["median_s"] if "median_s" in row and "median_s" in base else None
    payload = row.get("payload_bytes")
    row["floor_s"] = payload / wire_gbps / 1e9 if payload and wire_gbps else None


def differing(found: list[dict[str, Any]], *, on_gpu: bool) -> list[str]:
    """Return the rows whose matrices differ in a bit from those of the first row that must have the same.

    Forebay's AdamW has the bits of torch's fused kernel on a GPU. On the CPU its last bits may differ, and in training
    steps all weights with them.
    """
    firsts: dict[Any, int] = {}
    differ = []
    for row in found:
        if "muon_digest" not in row:
            continue
        kind = (row["trains"], row["trains"] and row["adamw"] and not on_gpu)
        if firsts.setdefault(kind, row["muon_digest"]) != row["muon_digest"]:
            differ.append(row["name"])
    return differ


def print_report(found: dict[str, Any]) -> None:
    """Print everything as a table."""
    machine, spec, wire = found["machine"], found["options"], found["wire"].get("gbps")
    where = f"{machine['gpu']}, driver {machine['driver']}" if machine["gpu"] else "CPU backend"
    print(f"{where}; {machine['cpus']} CPUs; torch {machine['torch']}; forebay {machine['forebay']}, {found['commit']}")
    print(f"wire: {number(wire, 2)} GB/s each way; medians of {spec['steps']} after {spec['warmup']}\n")
    ran = [row for row in found["rows"] if why_not(row) is None]
    lines = [
        [
            row["label"],
            number(row["median_s"], 1, 1e-3),
            number(row["times_resident"], 3),
            number(row["floor_s"], 1, 1e-3),
            number(row["payload_bytes"], 2, 1e9),
            size(row["torch_peak_bytes"]),
            size(row["pinned_bytes"]),
        ]
        for row in ran
    ]
    heads = ["row", "ms", "times resident", "wire's floor ms", "GB each way", "GPU memory, peak", "pinned"]
    print(table(heads, lines))
    print(f"GPU memory: torch's, above parameters; training steps have {spec['tokens']} tokens")
    for row in found["rows"]:
        if reason := why_not(row):
            print(f"not run: {row['label']}: {reason}")
    verdict = "different in " + ", ".join(found["differing"]) if found["differing"] else "equal, bit for bit"
    print(f"Muon's matrices after all steps: {verdict}")


def main() -> int:
    """Run, print, write; 1 if a row failed or weights differ that must be equal."""
    options = parse()
    found = run(options)
    conclude(found, options.json, print_report)
    return int(any("error" in row for row in [*found["rows"], found["wire"]]) or bool(found["differing"]))


if __name__ == "__main__":
    sys.exit(main())
