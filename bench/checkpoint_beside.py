"""The rows of ``bench/checkpoint.py --async``: what a save beside training costs the steps.

Steps begin at a fixed period, and between them the host has nothing to do, as during forward and backward on a GPU.
Each round takes a few steps, saves, and goes on stepping until the save is complete. The first save is a figure of its
own: it takes the memory for copies, which is kept for the others.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rows
import torch

import forebay
from forebay import checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CALL_S = 0.05
"""What a call may take above the snapshot of the parameters."""
EXTRA_BYTES = 256 << 20
"""What a save may take above its budget."""
RANDOM_BYTES = 64 << 20


def make(
    total_bytes: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32, layers: int = 16
) -> tuple[torch.nn.Module, forebay.AdamW]:
    """Make a model and an optimizer whose weights and state have this many bytes, with random contents."""
    each = 12 if dtype == torch.float32 else 14
    side = int((total_bytes / each / layers) ** 0.5)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(side, side, bias=False, device=device, dtype=dtype) for _ in range(layers))
    )
    optimizer = forebay.AdamW(model.parameters())
    optimizer.prepare()
    # Numbers that no disk can compress. A master follows its weight by itself.
    noise = torch.empty(RANDOM_BYTES // 4, dtype=torch.int32).random_()
    for state in optimizer.state.values():
        for kind in ("exp_avg", "exp_avg_sq"):
            flat = state[kind].view(torch.int32).reshape(-1)
            for start in range(0, flat.numel(), noise.numel()):
                part = flat[start : start + noise.numel()]
                part.copy_(noise[: part.numel()])
    return model, optimizer


def status(field: str) -> int:
    """Return a figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak() -> int:
    """Begin to look for the peak of this process's memory anew; return how much it has now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def wire_gbps(device: torch.device, size: int) -> float:
    """Return how fast torch brings bytes to pinned memory; on the CPU, from memory to memory."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    seconds = []
    for _ in range(4):
        rows.finish(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        rows.finish(device)
        seconds.append(time.perf_counter() - start)
    return source.nbytes / min(seconds) / 1e9


class Training:
    """A model that is stepped at a fixed period."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.device = torch.device(spec["device"])
        self.period_s: float = spec["period_s"]
        dtype = getattr(torch, spec["dtype"])
        self.model, self.optimizer = make(spec["total_bytes"], device=spec["device"], dtype=dtype)
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter).normal_()
        for _ in range(2):
            self.step()

    def step(self) -> float:
        """Step, wait for the rest of the period, and return how long the step took, until all state is stored."""
        rows.finish(self.device)
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer.synchronize()
        rows.finish(self.device)
        took = time.perf_counter() - start
        time.sleep(max(self.period_s - took, 0.0))
        return took

    def save(self, folder: Path, budget_bytes: int | None) -> dict[str, Any]:
        """Save, and step until that is complete."""
        shutil.rmtree(folder, ignore_errors=True)
        rows.finish(self.device)
        start = time.perf_counter()
        handle = checkpoint.async_save(folder, self.model, self.optimizer, snapshot_budget_bytes=budget_bytes)
        call_s = time.perf_counter() - start
        time.sleep(max(self.period_s - call_s, 0.0))
        was_under_way = not handle.done()
        # One at least, and then as long as it takes.
        during = [self.step()]
        while not handle.done():
            during.append(self.step())
        handle.result()
        found = {"call_s": call_s, "during_s": during, "was_under_way": was_under_way, "write_s": handle.seconds()}
        return found | handle.progress()


def measure(spec: dict[str, Any], budgets: Iterable[int | None], folder: Path) -> Iterator[dict[str, Any]]:
    """Go through the budgets, with a row for each."""
    start = time.perf_counter()
    training = Training(spec)
    made_s = time.perf_counter() - start
    parameters = list(training.model.parameters())
    payload = sum(p.nbytes for p in parameters)
    wire = wire_gbps(training.device, min(payload, 1 << 30))
    for budget in budgets:
        checkpoint.release()
        before = forget_peak()
        first = training.save(folder, budget)
        usual, saves = [], []
        for _ in range(spec["rounds"]):
            usual += [training.step() for _ in range(3)]
            saves.append(training.save(folder, budget))
        shutil.rmtree(folder)
        state = sum(value.nbytes for of in training.optimizer.state.values() for value in of.values())
        row = {
            "budget_bytes": budget,
            "state_bytes": state,
            "parameter_bytes": payload,
            "wire_gbps": wire,
            "made_s": made_s,
            "usual_s": usual,
            "first": first,
            "saves": saves,
            "extra_bytes": max(status("VmHWM") - before, 0),
        }
        yield row | figures(row)


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a row comes to: medians over its rounds, each beside its limit."""
    total, budget = row["state_bytes"] + row["parameter_bytes"], row["budget_bytes"]
    # What a budget of nothing in particular leaves to be waited for is nothing.
    remaining = 0 if budget is None else max(total - budget, 0)
    saves = row["saves"]
    usual = statistics.median(row["usual_s"])
    return {
        "usual_median_s": usual,
        "after_call_s": statistics.median(save["during_s"][0] for save in saves),
        "after_call_over_usual": statistics.median(save["during_s"][0] for save in saves) / usual,
        "under_way": sum(save["was_under_way"] for save in saves),
        "call_s": statistics.median(save["call_s"] for save in saves),
        "call_limit_s": CALL_S + row["parameter_bytes"] / row["wire_gbps"] / 1e9,
        "write_s": statistics.median(save["write_s"] for save in saves),
        "write_gbps": statistics.median(save["total_bytes"] / save["write_s"] for save in saves) / 1e9,
        "stall_s": statistics.median(save["stall_s"] for save in saves),
        "stall_limit_s": 1.1 * statistics.median(remaining * save["write_s"] / save["total_bytes"] for save in saves),
        "extra_limit_bytes": None if budget is None else budget + EXTRA_BYTES,
    }


def print_row(row: dict[str, Any]) -> None:
    """Print one row as text."""
    budget = "none" if row["budget_bytes"] is None else f"{row['budget_bytes'] / 1e9:.2f} GB"
    state, weights = row["state_bytes"] / 1e9, row["parameter_bytes"] / 1e9
    each = ", ".join(f"{save['during_s'][0]:.3f}" for save in row["saves"])
    percent = 100 * (row["after_call_over_usual"] - 1)
    limit = "" if row["extra_limit_bytes"] is None else f"; limit {row['extra_limit_bytes'] / 2**20:.0f} MiB"
    first = row["first"]
    print(f"state {state:.2f} GB, weights {weights:.2f} GB, made in {row['made_s']:.0f} s; budget {budget}")
    print(f"  a step, as usual         {row['usual_median_s']:.3f} s (median of {len(row['usual_s'])})")
    print(f"  the step after the call  {row['after_call_s']:.3f} s, {percent:+.1f} % (median of {each})")
    print(f"                           with the save still under way in {row['under_way']} of {len(row['saves'])}")
    print(f"  the call                 {row['call_s']:.3f} s; limit {row['call_limit_s']:.3f} s")
    print(f"  the save                 {row['write_s']:.1f} s, {row['write_gbps']:.2f} GB/s")
    print(f"  steps waited             {row['stall_s']:.2f} s in all; limit {row['stall_limit_s']:.2f} s")
    print(f"  the process grew by      {row['extra_bytes'] / 2**20:.0f} MiB{limit}")
    print(
        f"  the first save           call {first['call_s']:.3f} s, next step {first['during_s'][0]:.3f} s, "
        f"{first['write_s']:.1f} s"
    )
