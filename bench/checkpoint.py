"""Save and load a model with its optimizer: forebay against plain writes and DCP's own file writer.

All rows move the same bytes to the same disk in turn, round by round, and ratios are taken inside a round: a disk's
rate changes from minute to minute. Before a load the files are dropped from the page cache; before a save nothing of
them is in it. Peak memory is what the process grew by while the row ran. With ``--async`` a save goes on beside
training instead, and the rows are those of ``checkpoint_beside.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Neighbours, not packages: Python finds them in this file's folder.
import step
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_beside import forget_peak, make, print_row, status
from checkpoint_beside import measure as measure_beside
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import forebay
from forebay import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WRITE_BYTES = 16 << 20


def nested(model: torch.nn.Module, optimizer: forebay.AdamW) -> dict[str, Any]:
    """Return the state as DCP takes it."""
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def plain_write(folder: Path, model: torch.nn.Module, optimizer: forebay.AdamW) -> None:
    """Write all tensors one after the other into one file, in large pieces, and sync it: the limit."""
    with open(folder / "plain", "wb", buffering=0) as file:
        for tensor in [
            *model.parameters(),
            *(s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")),
        ]:
            view = memoryview(tensor.detach().numpy().reshape(-1)).cast("B")
            for start in range(0, len(view), WRITE_BYTES):
                file.write(view[start : start + WRITE_BYTES])
        os.fsync(file.fileno())


def plain_read(folder: Path, buffer: torch.Tensor) -> None:
    """Read that file into one buffer, piece by piece: the limit."""
    view = memoryview(buffer.numpy())
    with open(folder / "plain", "rb", buffering=0) as file:
        while file.readinto(view):
            pass


def drop_cache(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Run work; return its seconds and by how much the process grew at most."""
    before = forget_peak()
    start = time.perf_counter()
    work()
    return {"s": time.perf_counter() - start, "extra_bytes": max(status("VmHWM") - before, 0)}


def size_of(folder: Path) -> int:
    """Return the bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(total_bytes: int, rounds: int, base: Path) -> dict[str, Any]:
    """Run all rows, round by round."""
    warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
    model, optimizer = make(total_bytes)
    payload = sum(p.nbytes for p in model.parameters()) * 3
    buffer = torch.empty(WRITE_BYTES, dtype=torch.uint8)
    saves: dict[str, Callable[[Path], object]] = {
        "plain writes and fsync": lambda folder: plain_write(folder, model, optimizer),
        "dcp.save": lambda folder: dcp.save(
            nested(model, optimizer), storage_writer=dcp.FileSystemWriter(folder, sync_files=True)
        ),
        "forebay.checkpoint.save": lambda folder: checkpoint.save(folder, model, optimizer),
    }
    loads: dict[str, Callable[[Path], object]] = {
        "plain reads": lambda folder: plain_read(folder, buffer),
        "dcp.load": lambda folder: dcp.load(nested(model, optimizer), storage_reader=dcp.FileSystemReader(folder)),
        "forebay.checkpoint.load": lambda folder: checkpoint.load(folder, model, optimizer),
    }
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in [*saves, *loads]}
    for number in range(rounds):
        order = list(zip(saves, loads, strict=True))
        # Not always the same one behind the same other.
        order = order[number % len(order) :] + order[: number % len(order)]
        for saving, loading in order:
            folder = base / "checkpoint"
            folder.mkdir()
            try:
                drop_cache(folder)
                rows[saving].append(timed(lambda: saves[saving](folder)))  # noqa: B023
                drop_cache(folder)
                rows[loading].append(timed(lambda: loads[loading](folder)))  # noqa: B023
            finally:
                shutil.rmtree(folder)
                os.sync()
    return {"payload_bytes": payload, "rounds": rounds, "rows": rows}


def ratio(rows: dict[str, list[dict[str, float]]], name: str, other: str) -> float:
    """Return how many times as fast one row is as another, the median over rounds."""
    return statistics.median(b["s"] / a["s"] for a, b in zip(rows[name], rows[other], strict=True))


def print_saves(result: dict[str, Any]) -> None:
    """Print the rows of ``measure``."""
    rows, payload = result["rows"], result["payload_bytes"]
    lines = []
    for name, runs in rows.items():
        seconds = statistics.median(run["s"] for run in runs)
        extra = max(run["extra_bytes"] for run in runs)
        lines.append([name, f"{seconds:.2f}", f"{payload / seconds / 1e9:.2f}", f"{extra / 2**20:.0f}"])
    print(step.table(["", "s", "GB/s", "extra host MiB"], lines))
    for pair, times in result["ratios"].items():
        name, other = pair.split(" / ")
        print(f"{name} is {times:.2f} times as fast as {other}")


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="10^9 bytes of weights and state (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of every row (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write; by default the temporary folder")
    parser.add_argument("--async", dest="beside", action="store_true", help="save beside training instead")
    parser.add_argument("--device", default="cpu", help="with --async: where the model is (%(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="with --async: its type")
    parser.add_argument(
        "--budget-gb",
        type=lambda text: None if text == "none" else float(text),
        nargs="+",
        default=[None],
        help="with --async: memory for copies, a row for each; by default none, which is without a limit",
    )
    parser.add_argument(
        "--period", type=float, default=2.0, help="with --async: seconds from step to step (%(default)s)"
    )
    parser.add_argument("--commit", help="the commit to note; by default what git says")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the figures to this file, beside other runs' in it"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1: {options.rounds}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"no such folder: {options.json.resolve().parent}")
    return options


def saves(options: argparse.Namespace) -> dict[str, Any]:
    """Run the rows of plain saves and loads."""
    with tempfile.TemporaryDirectory(dir=options.folder) as base:
        found = measure(int(options.gb * 1e9), options.rounds, Path(base))
    pairs = [
        ("forebay.checkpoint.save", "plain writes and fsync"),
        ("forebay.checkpoint.save", "dcp.save"),
        ("forebay.checkpoint.load", "dcp.load"),
        ("forebay.checkpoint.load", "plain reads"),
    ]
    found["ratios"] = {f"{a} / {b}": ratio(found["rows"], a, b) for a, b in pairs}
    return found


def saves_beside(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the rows of saves beside training; after each, return all there are so far."""
    spec = {"total_bytes": int(options.gb * 1e9), "rounds": options.rounds, "period_s": options.period}
    spec |= {"device": options.device, "dtype": options.dtype}
    budgets = [None if gb is None else int(gb * 1e9) for gb in options.budget_gb]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as base:
        for row in measure_beside(spec, budgets, Path(base) / "checkpoint"):
            rows.append(row)
            yield {"options": spec, "beside": rows}


def command() -> str:
    """Return how this was called, without where the figures go: they do not depend on that."""
    without = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    without.add_argument("--json")
    without.add_argument("--commit")
    return shlex.join(["python", "bench/checkpoint.py", *without.parse_known_args()[1]])


def main() -> int:
    """Measure, print, write; 1 if the machine cannot do it."""
    options = parse()
    machine = step.job("machine", {"device": options.device})
    if reason := machine.get("cannot_run") or machine.get("error"):
        sys.exit(f"error: {reason}\nhint: use --device cpu")
    machine.pop("device")
    about = {"command": command(), "commit": step.commit_of(options.commit)}
    earlier: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        # One of the same command is replaced, and so are all of another machine.
        found = json.loads(options.json.read_text())
        if found.get("machine") == machine:
            earlier = [one for one in found["runs"] if one["command"] != about["command"]]

    def conclude(mine: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
        runs = [*earlier, about | mine]
        step.conclude({"machine": machine, "runs": runs}, options.json, lambda found: show(found["runs"][-1]))

    if options.beside:
        # Written after each row: they are long.
        for found in saves_beside(options):
            conclude(found, lambda run: print_row(run["beside"][-1]))
    else:
        conclude(saves(options), print_saves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
