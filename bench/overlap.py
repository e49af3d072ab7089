"""Whole training steps, back to back, with the step hidden under the passes: one table, one JSON file.

A model of Qwen2.5-3B shape with random weights is trained on 16,384 tokens per step, in bf16 and with gradient
checkpointing. A step lasts from the begin of its forward to the begin of the next one on torch's stream, and the host
waits for nothing in between. All rows run in one process on one model. ``--check`` compares the bits of overlapped rows
with those of plain steps instead of timing them.

usage: python bench/overlap.py [--json PATH] [--model 3b] [--small] [--device cuda:0] [--rows resident,stream] [--check]
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# Neighbours, not packages: Python finds them in this file's folder.
import overlap_rows
import rows as machine_rows
import timeline
import torch
from overlap_model import SHAPES, Trained
from step import commit_of, number, size, table

ROWS = overlap_rows.ROWS
# A row that takes longer than this hangs: the stacks of all threads are printed, and the process ends.
ROW_LIMIT_S = 150
GIB = 1 << 30


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description="Whole training steps with the step hidden: one table, one JSON file.")
    parser.add_argument("--device", help="cuda:0 or cpu; by default the first GPU, or the CPU where there is none")
    parser.add_argument("--model", choices=("3b", "7b", "14b", "32b"), default="3b", help="the shape (%(default)s)")
    parser.add_argument("--small", action="store_true", help="a tiny model that also runs on the CPU, in seconds")
    parser.add_argument("--rows", help="which rows, separated by commas; by default all of the model")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each row (%(default)s)")
    parser.add_argument("--no-profile", action="store_true", help="leave out the profiled steps of each row")
    parser.add_argument("--check", action="store_true", help="compare bits with plain steps instead of timing")
    parser.add_argument("--check-steps", type=int, default=4, help="steps of each check (%(default)s)")
    limit = "begin no row that would end after this many seconds (%(default)s)"
    parser.add_argument("--limit-s", type=float, default=540, help=limit)
    parser.add_argument("--commit", help="the commit to note; by default what git says")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to this file, after each row")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="run nothing: print the table of this file")
    options = parser.parse_args()
    known = overlap_rows.rows_of("small" if options.small else options.model)
    options.rows = options.rows.split(",") if options.rows else known
    if unknown := [row for row in options.rows if row not in known]:
        parser.error(f"unknown rows: {', '.join(unknown)}; there are {', '.join(known)}")
    if min(options.steps, options.check_steps) < 1:
        parser.error("--steps and --check-steps must be at least 1")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"no such folder: {options.json.resolve().parent}")
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rows on one model and return the content of the file."""
    start = time.perf_counter()
    machine = machine_rows.do("machine", {"device": options.device})
    if "cannot_run" in machine:
        sys.exit(f"error: {machine['cannot_run']}\nhint: use --device cpu --small, or run on a machine with a GPU")
    device = torch.device(machine["device"])
    name = "small" if options.small or device.type == "cpu" else options.model
    if device.type == "cpu":
        # What is measured there means nothing, and other processes need the cores.
        torch.set_num_threads(min(2, torch.get_num_threads()))
    import transformers

    model = Trained(SHAPES[name], device)
    spec = {
        "small": name == "small",
        "steps": options.steps,
        "profile": not options.no_profile,
        "check_steps": options.check_steps,
        "check_context": SHAPES[name].context,
    }
    found: dict[str, Any] = {
        "machine": machine,
        "device": machine["device"],
        "command": shlex.join(["python", "bench/overlap.py", *sys.argv[1:]]),
        "commit": commit_of(options.commit),
        "transformers": transformers.__version__,
        "model": name,
        "shape": SHAPES[name].label,
        "params": model.count,
        "first_needed": model.first_needed,
        "options": spec,
        "wire_gbps": overlap_rows.wire(device),
        "rows": [],
        "checks": [],
        "left_out": [],
        "is_complete": False,
        "model_s": time.perf_counter() - start,
    }
    say_where = f"{SHAPES[name].label}: {model.count / 1e9:.3g}e9 parameters, ready after {found['model_s']:.1f} s"
    print(say_where, file=sys.stderr, flush=True)
    if spec["profile"] and device.type == "cuda":
        timeline.load()
    work = check_rows if options.check else time_rows
    work(model, options, found, start)
    faulthandler.cancel_dump_traceback_later()
    found["is_complete"] = not found["left_out"]
    found["total_s"] = time.perf_counter() - start
    write(found, options.json)
    return found


def check_rows(model: Trained, options: argparse.Namespace, found: dict[str, Any], start: float) -> None:
    """Check one row after the other."""
    faulthandler.dump_traceback_later(ROW_LIMIT_S, exit=True)
    for result in overlap_rows.check(model, options.rows, found["options"]):
        print(f"{check_label(result)}: {verdict(result)}", file=sys.stderr, flush=True)
        found["checks"].append(result)
        write(found, options.json)
        faulthandler.dump_traceback_later(ROW_LIMIT_S, exit=True)
        if time.perf_counter() - start > options.limit_s:
            found["left_out"].append(f"checks after {result['name']}")
            break


def time_rows(model: Trained, options: argparse.Namespace, found: dict[str, Any], start: float) -> None:
    """Measure one row after the other."""
    longest = 0.0
    for name in options.rows:
        begun = time.perf_counter()
        if begun - start + longest > options.limit_s:
            found["left_out"].append(name)
            continue
        faulthandler.dump_traceback_later(ROW_LIMIT_S, exit=True)
        row: dict[str, Any] = {"name": name, "label": ROWS[name].label, "options": ROWS[name].options}
        row["overlap"] = ROWS[name].overlap
        try:
            row |= overlap_rows.measure(model, name, found["options"])
        except machine_rows.CannotRunError as reason:
            row["cannot_run"] = str(reason)
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"
        overlap_rows.free(model)
        row["row_s"] = time.perf_counter() - begun
        longest = max(longest, row["row_s"])
        found["rows"].append(row)
        # Again for all: what they are compared with may be the one that has just run.
        for done in found["rows"]:
            overlap_rows.against(done, found)
        write(found, options.json)
        shown = f"{row['median_step_s'] * 1e3:.1f} ms" if "median_step_s" in row else why_not(row)
        print(f"{row['label']}: {shown}; {row['row_s']:.1f} s", file=sys.stderr, flush=True)


def write(found: dict[str, Any], path: Path | None) -> None:
    """Write all numbers so far."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


# Tables.


def why_not(row: dict[str, Any]) -> str | None:
    """Return why a row has no numbers."""
    if "cannot_run" in row:
        return f"not available: {row['cannot_run']}"
    return f"FAILED: {row['error']}" if "error" in row else None


def verdict(result: dict[str, Any]) -> str:
    """Return what a check found."""
    if reason := why_not(result):
        return reason
    return f"different: {', '.join(result['differing'])}" if result["differing"] else "equal, bit for bit"


def check_label(check: dict[str, Any]) -> str:
    """Return what was checked."""
    limit = "no clipping" if check["limit"] is None else f"norm limit {check['limit']:.3g}"
    return f"{ROWS[check['name']].label}, {limit}, {check.get('clipped', 0)} steps clipped"


def ms(value: float | None) -> str:
    """Return seconds as milliseconds."""
    return number(value, 1, 1e-3)


def reasons(row: dict[str, Any]) -> list[str]:
    """Return what was exposed in the profiled step: tail, wire, host, in ms."""
    idle = (row.get("timeline") or {}).get("idle_ms")
    return [number(idle[why], 1) for why in timeline.REASONS] if idle else ["-"] * len(timeline.REASONS)


PARTS = ("forward", "backward", "step")
TIME_HEADS = ["row", "ms", "TFLOPS", "x resident", "goal", "floor ms", *PARTS, "call", "waits", *timeline.REASONS]
SPACE_HEADS = ["row", "peak", "extra", "freed", "ring", "pinned", "host", "set-up s", "close s", "mallocs", "accepted"]


def waits(row: dict[str, Any]) -> float | None:
    """Return the seconds that readers of parameters waited in a step, as the handle says."""
    handle = row["stats"].get("handle", {})
    if handle.get("exposed_steps"):
        return float(handle["exposed_total_s"] / handle["exposed_steps"])
    return handle.get("exposed_s")


def times(row: dict[str, Any]) -> list[str]:
    """Return a row's cells of the table of times."""
    return [
        row["label"],
        ms(row["median_step_s"]),
        number(row.get("model_tflops"), 0),
        number(row.get("times_resident"), 3),
        number(row.get("goal"), 2),
        ms(row.get("floor_step_s")),
        *(ms(row["parts_s"][part]) for part in PARTS),
        ms(row["call_s"]),
        ms(waits(row)),
        *reasons(row),
    ]


def space(row: dict[str, Any]) -> list[str]:
    """Return a row's cells of the table of memory."""
    handle, optimizer = (row["stats"].get(of, {}) for of in ("handle", "optimizer"))
    return [
        row["label"],
        size(row["peak_bytes"]),
        number(row.get("extra_bytes"), 2, GIB),
        number(handle.get("freed_bytes"), 2, GIB),
        size(optimizer.get("device_bytes")),
        number(row["pinned_bytes"], 1, 1e9),
        number(row.get("host_peak_bytes"), 1, 1e9),
        number(row["setup_s"], 1),
        number(row["close_s"], 1),
        str(sum(row["allocations"].values())) if row.get("allocations") else "-",
        f"{handle['accepted']} of {handle['speculated']}" if handle.get("speculated") else "-",
    ]


def print_report(found: dict[str, Any]) -> None:
    """Print everything as tables."""
    machine = found["machine"]
    where = f"{machine['gpu']}, driver {machine['driver']}" if machine["gpu"] else "CPU backend"
    print(f"{where}; torch {machine['torch']}; transformers {found['transformers']}; forebay {found['commit']}")
    tokens = next((row["tokens"] for row in found["rows"] if "tokens" in row), None)
    print(f"{found['shape']}: {found['params'] / 1e9:.4g}e9 parameters, {tokens} tokens per step", end="; ")
    print(f"wire: {number(found['wire_gbps'], 1)} GB/s each way, both at once\n")
    ran = [row for row in found["rows"] if why_not(row) is None]
    if ran:
        print(table(TIME_HEADS, [times(row) for row in ran]))
        print("TFLOPS: 6 operations for each parameter and token. call: the host's time in step()")
        print("waits: for updates, as the handle says")
        print("tail, wire, host: why torch's stream was idle in a profiled step\n")
        print(table(SPACE_HEADS, [space(row) for row in ran]))
        print("GiB; in GB what the optimizer has pinned, and the most memory of the host that the process had so far")
        print("extra: beyond weights, gradients and activations; freed: gradients, during backward")
        print("mallocs: calls of torch's allocator to the driver in the timed steps")
    for check in found["checks"]:
        print(f"{check_label(check)}: {verdict(check)}")
    for row in found["rows"]:
        if reason := why_not(row):
            print(f"{row['label']}: {reason}")
    for name in found["left_out"]:
        print(f"left out, no time: {name}")


def markdown(found: dict[str, Any]) -> str:
    """Return the table of the documents, with where it comes from."""
    gpu, tokens = (
        found["machine"]["gpu"] or "CPU backend",
        next(row["tokens"] for row in found["rows"] if "tokens" in row),
    )
    about = (
        f"{found['params'] / 1e9:.3g}e9 bf16 parameters in the shape of {found['shape']}, {tokens:,} tokens per step, "
        f"{gpu}, `{found['command']}` at commit `{found['commit']}`; "
        f"the wire: {number(found['wire_gbps'], 1)} GB/s each way:\n"
    )
    heads = ["row", "ms per step", "times resident", "floor", "exposed: tail, wire, host", "peak", "gradients freed"]
    lines = [heads, ["---"] * len(heads)]
    for row in found["rows"]:
        if why_not(row) is None:
            handle = row["stats"].get("handle", {})
            exposed = "" if reasons(row)[0] == "-" else ", ".join(reasons(row)) + " ms"
            floor = row.get("floor_step_s")
            cells = [row["label"], ms(row["median_step_s"]), number(row.get("times_resident"), 2)]
            cells += ["" if floor is None else ms(floor), exposed if row["overlap"] else "", size(row["peak_bytes"])]
            cells += [size(handle["freed_bytes"]) if handle.get("freed_bytes") else ""]
            lines.append(cells)
    return "\n".join([about, *(f"| {' | '.join(line)} |" for line in lines)])


def main() -> int:
    """Run, print, write; 1 if a row failed or bits differ."""
    options = parse()
    if options.markdown is not None:
        print(markdown(json.loads(options.markdown.read_text())))
        return 0
    found = run(options)
    print_report(found)
    if options.json is not None:
        print(f"wrote {options.json}")
    gc.collect()
    return int(any("error" in part or part.get("differing") for part in [*found["rows"], *found["checks"]]))


if __name__ == "__main__":
    sys.exit(main())
