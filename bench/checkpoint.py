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
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from step import commit_of
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import forebay
from forebay import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

WRITE_BYTES = 16 << 20


def make(total_bytes: int, layers: int = 16, device: str = "cpu") -> tuple[torch.nn.Module, forebay.AdamW]:
    """Make a model and an optimizer whose weights and moments have so many bytes, with random contents."""
    side = int((total_bytes / 12 / layers) ** 0.5)
    layer = {"bias": False, "device": device}
    model = torch.nn.Sequential(*(torch.nn.Linear(side, side, **layer) for _ in range(layers)))
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


def measure_async(
    total_bytes: int, device: str, budget_bytes: int | None, period_s: float, steps: int, base: Path
) -> dict[str, Any]:
    """Step at a fixed period, save in between, and see what the save costs the steps."""
    model, optimizer = make(total_bytes, device=device)
    state_bytes = sum(p.numel() for p in model.parameters()) * 8
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).normal_()

    def step() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        optimizer.synchronize()
        if device != "cpu":
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        time.sleep(max(period_s - took, 0.0))
        return took

    for _ in range(2):
        step()
    folder = base / "checkpoint"
    # Once without being timed, with a step at once: the memory for copies is taken at the first save and kept.
    handle = checkpoint.async_save(folder, model, optimizer, keep_last=1, snapshot_budget_bytes=budget_bytes)
    step()
    handle.result()
    usual = [step() for _ in range(steps)]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    start = time.perf_counter()
    handle = checkpoint.async_save(folder, model, optimizer, keep_last=1, snapshot_budget_bytes=budget_bytes)
    call_s = time.perf_counter() - start
    time.sleep(max(period_s - call_s, 0.0))
    during = []
    while not handle.done():
        during.append(step())
    handle.result()
    write_s = handle.seconds()
    progress = handle.progress()
    after_s = [step() for _ in range(2)]
    payload = progress["total_bytes"]
    rate = payload / write_s
    remaining = max(payload - (payload if budget_bytes is None else budget_bytes), 0)
    return {
        "device": device,
        "state_bytes": state_bytes,
        "payload_bytes": payload,
        "budget_bytes": budget_bytes,
        "period_s": period_s,
        "usual_s": usual,
        "call_s": call_s,
        "during_s": during,
        "after_s": after_s,
        "first_over_median": during[0] / statistics.median(usual) if during else None,
        "write_s": write_s,
        "write_gbps": rate / 1e9,
        "stall_s": progress["stall_s"],
        "stall_limit_s": remaining / rate,
        "copied_bytes": progress["copied_bytes"],
        "extra_bytes": max(status("VmHWM") - before, 0),
    }


def async_table(result: dict[str, Any]) -> str:
    """Return a run of ``measure_async`` as text."""
    usual = statistics.median(result["usual_s"])
    budget = "none" if result["budget_bytes"] is None else f"{result['budget_bytes'] / 1e9:.1f} GB"
    first = "no step came during the save"
    if result["first_over_median"] is not None:
        first = f"{result['during_s'][0]:.3f} s, {100 * (result['first_over_median'] - 1):+.1f} %"
    state, payload = result["state_bytes"] / 1e9, result["payload_bytes"] / 1e9
    limit = f"bytes beyond the budget over the write rate: {result['stall_limit_s']:.2f} s"
    return "\n".join(
        [
            f"state {state:.1f} GB, written {payload:.1f} GB, budget {budget}",
            f"  the call                 {result['call_s']:.3f} s",
            f"  a step, as usual         {usual:.3f} s (median of {len(result['usual_s'])})",
            f"  the step after the call  {first}",
            f"  the save                 {result['write_s']:.1f} s, {result['write_gbps']:.2f} GB/s",
            f"  steps waited             {result['stall_s']:.2f} s in all; {limit}",
            f"  copied aside             {result['copied_bytes'] / 1e9:.2f} GB; the process grew by "
            f"{result['extra_bytes'] / 2**20:.0f} MiB",
        ]
    )


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
    parser.add_argument("--async", dest="beside", action="store_true", help="save beside training instead")
    parser.add_argument("--device", default="cpu", help="with --async: where the model is")
    parser.add_argument("--budget-gb", type=float, default=None, help="with --async: for copies; by default no limit")
    parser.add_argument("--period", type=float, default=2.0, help="with --async: seconds from step to step")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    options = parser.parse_args()
    if options.beside:
        budget = None if options.budget_gb is None else int(options.budget_gb * 1e9)
        with tempfile.TemporaryDirectory(dir=options.folder) as base:
            total = int(options.gb * 1e9)
            result = measure_async(total, options.device, budget, options.period, 5, Path(base))
        print(async_table(result))
        write(result, options.json)
        return
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
    result["ratios"] = {f"{a} / {b}": value for (a, b), value in result["ratios"].items()}
    write(result, options.json)


def write(result: dict[str, Any], path: Path | None) -> None:
    """Write the figures to a file, with the machine and the commit."""
    if path is not None:
        result["machine"] = {
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            "torch": torch.__version__,
            "forebay": forebay.__version__,
        }
        result["commit"] = commit_of(None)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
