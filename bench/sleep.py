"""Sleep and wake against other ways to move tensors off the GPU and back: one table, one JSON file.

8 GB in 400 tensors and in 20,000, each of the two in one process (see ``sleep_rows.py``). Times are whole
calls, until the device is idle and every byte has arrived. The first time, with all pinning, is a column of its own;
the others are medians of the times after it. The limit is one flat pinned copy of the same bytes.

usage: python bench/sleep.py [--json PATH] [--quick] [--device cuda:0] [--rows forebay,flat] [--repeats 6]
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from pathlib import Path
from typing import Any

import sleep_rows
from step import Progress, commit_of, conclude, job, number, table, why_not

GB = 10**9


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", help="cuda:0 or cpu; by default the first GPU, or the CPU where there is none")
    parser.add_argument("--quick", action="store_true", help="a few MB, in seconds, also on the CPU")
    parser.add_argument("--rows", default=",".join(sleep_rows.ROWS), help="separated by commas: %(default)s")
    workloads = ",".join(sleep_rows.WORKLOADS)
    parser.add_argument("--workloads", default=workloads, help="numbers of tensors, separated by commas: %(default)s")
    parser.add_argument("--repeats", type=int, default=6, help="times there and back (%(default)s)")
    parser.add_argument("--commit", help="the commit to note; by default what git says")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to this file")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    if unknown := [row for row in options.rows if row not in sleep_rows.ROWS]:
        parser.error(f"unknown rows: {', '.join(unknown)}; there are {', '.join(sleep_rows.ROWS)}")
    options.workloads = options.workloads.split(",")
    if unknown := [name for name in options.workloads if name not in sleep_rows.WORKLOADS]:
        parser.error(f"unknown workloads: {', '.join(unknown)}; there are {workloads}")
    if options.repeats < 2:
        parser.error(f"--repeats must be at least 2, the first time is reported separately: {options.repeats}")
    return options


def loaded_before() -> contextlib.AbstractContextManager[Any]:
    """Let processes that start meanwhile load torch_memory_saver's library before Python, where it is installed."""
    try:
        import torch_memory_saver
    except ImportError:
        return contextlib.nullcontext()
    ready: contextlib.AbstractContextManager[Any] = torch_memory_saver.configure_subprocess()
    return ready


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the content of the file."""
    progress = Progress(len(options.workloads) + 2)
    progress.begin("machine")
    machine = job("machine", {"device": options.device}, sleep_rows)
    if reason := machine.get("cannot_run") or machine.get("error"):
        progress.end()
        sys.exit(f"error: {reason}\nhint: use --device cpu --quick, or run on a machine with a GPU")
    device = machine.pop("device")
    quick = options.quick or device == "cpu"
    spec = {"device": device, "quick": quick, "repeats": options.repeats, "bytes": 64 << 20 if quick else 8 * GB}
    probe: dict[str, Any] = {}
    if not quick:
        progress.begin("probe")
        probe = job("wire", spec, sleep_rows)
    found = []
    for workload in options.workloads:
        progress.begin(f"{workload} tensors")
        done: dict[str, Any] = {}
        # What replaces torch's allocator runs by itself, and once.
        alone = [name for name in options.rows if name == "memory-saver"]
        for group in ([name for name in options.rows if name not in alone], alone):
            if group == alone and workload != "400":
                done |= {name: {"cannot_run": "measured with 400 tensors only"} for name in group}
            elif group:
                with loaded_before() if group == alone else contextlib.nullcontext():
                    result = job("sleep", spec | {"workload": workload, "rows": group}, sleep_rows)
                done |= {name: result.get(name, {"error": result.get("error", "no result")}) for name in group}
        for name in options.rows:
            about = {"name": name, "label": sleep_rows.ROWS[name][0], "workload": workload}
            found.append(about | done[name])
    progress.end()
    limits = {row["workload"]: row for row in found if row["name"] == "flat" and "sleep_gbps" in row}
    for row in found:
        limit = limits.get(row["workload"])
        if "sleep_gbps" in row and limit is not None:
            for way in ("sleep", "wake"):
                row[f"{way}_percent"] = 100 * row[f"{way}_gbps"] / limit[f"{way}_gbps"]
    return {
        "machine": machine,
        "device": device,
        "command": shlex.join(["python", "bench/sleep.py", *sys.argv[1:]]),
        "commit": commit_of(options.commit),
        "options": spec,
        "probe": probe,
        "rows": found,
    }


def print_report(found: dict[str, Any]) -> None:
    """Print everything as tables."""
    machine, spec = found["machine"], found["options"]
    where = f"{machine['gpu']}, driver {machine['driver']}" if machine["gpu"] else "CPU backend"
    print(f"{where}; {machine['cpus']} CPUs; torch {machine['torch']}; forebay {machine['forebay']}, {found['commit']}")
    pin = found["probe"].get("pin_gib_per_s")
    if pin:
        print(f"pinning as `forebay probe` measures it: {pin * 1.073741824:.1f} GB/s")
    print(f"{spec['bytes'] / GB:.3g} GB; GB/s; medians after the first time\n")
    for workload in dict.fromkeys(row["workload"] for row in found["rows"]):
        lines = []
        for row in found["rows"]:
            if row["workload"] != workload or why_not(row):
                continue
            stats = row["stats"]
            given = stats.get("given_back_bytes")
            lines.append(
                [
                    row["label"],
                    number(row["sleep_gbps"], 1),
                    number(row["wake_gbps"], 1),
                    number(row.get("sleep_percent"), 1),
                    number(row.get("wake_percent"), 1),
                    number(row["first_sleep_gbps"], 1),
                    number(row["first_wake_gbps"], 1),
                    number(None if given is None else 100 * given / row["bytes"], 1),
                ]
            )
        heads = [
            f"{workload} tensors",
            "sleep",
            "wake",
            "% of limit",
            "% wake",
            "first sleep",
            "first wake",
            "% given back",
        ]
        print(table(heads, lines) + "\n")
    for row in found["rows"]:
        if reason := why_not(row):
            print(f"not run: {row['label']}, {row['workload']} tensors: {reason}")
        elif row["differing"]:
            print(f"WRONG: {row['label']}, {row['workload']} tensors: {row['differing']} values differ")


def main() -> int:
    """Run, print, write; 1 if a row failed or changed a bit."""
    options = parse()
    found = run(options)
    conclude(found, options.json, print_report)
    return int(any("error" in row or row.get("differing") for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
