"""Save and load a model with its optimizer: forebay against plain writes and DCP's own file writer.

All rows move the same bytes to the same disk in turn, round by round, and ratios are taken inside a round: a disk's
rate changes from minute to minute. Before a load the files are dropped from the page cache; before a save nothing of
them is in it. Peak memory is what the process grew by while the row ran.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import forebay
from forebay import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

WRITE_BYTES = 16 << 20


def make(total_bytes: int, layers: int = 16) -> tuple[torch.nn.Module, forebay.AdamW]:
    """Make a model and an optimizer whose weights and moments have so many bytes, with random contents."""
    side = int((total_bytes / 12 / layers) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(layers)))
    optimizer = forebay.AdamW(model.parameters())
    optimizer.prepare()
    scramble(optimizer)
    return model, optimizer


def scramble(optimizer: forebay.AdamW) -> None:
    """Fill the state with numbers that no disk can compress."""
    for state in optimizer.state.values():
        for kind in ("exp_avg", "exp_avg_sq"):
            state[kind].view(torch.int32).random_()


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


def status(field: str) -> int:
    """Return a figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Run work; return its seconds and by how much the process grew at most."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
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


def table(result: dict[str, Any]) -> str:
    """Return the rows as text."""
    rows, payload = result["rows"], result["payload_bytes"]
    lines = [f"{'':26}  {'s':>7}  {'GB/s':>6}  {'extra host memory':>17}"]
    for name, runs in rows.items():
        seconds = statistics.median(run["s"] for run in runs)
        extra = max(run["extra_bytes"] for run in runs)
        lines.append(f"{name:26}  {seconds:7.2f}  {payload / seconds / 1e9:6.2f}  {extra / 2**20:13.0f} MiB")
    for name, other in result["ratios"]:
        lines.append(f"{name} is {result['ratios'][name, other]:.2f} times as fast as {other}")
    return "\n".join(lines)


def main() -> None:
    """Parse options, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="10^9 bytes of weights and moments")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of every row")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; by default the temporary folder")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as base:
        result = measure(int(options.gb * 1e9), options.rounds, Path(base))
    rows = result["rows"]
    result["ratios"] = {
        pair: ratio(rows, *pair)
        for pair in [
            ("forebay.checkpoint.save", "plain writes and fsync"),
            ("forebay.checkpoint.save", "dcp.save"),
            ("forebay.checkpoint.load", "dcp.load"),
            ("forebay.checkpoint.load", "plain reads"),
        ]
    }
    print(table(result))
    if options.json is not None:
        result["ratios"] = {f"{a} / {b}": value for (a, b), value in result["ratios"].items()}
        result["machine"] = {
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            "torch": torch.__version__,
            "forebay": forebay.__version__,
        }
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        result["commit"] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {options.json}")


if __name__ == "__main__":
    main()
