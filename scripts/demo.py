"""Train a small language model with torch's AdamW and with forebay's, and compare everything.

The model reads the bytes of this repository's own text. All runs start from the same weights, see the same batches,
use the same schedule and clip to the same norm. forebay keeps its state on the host and streams it through a ring that
is far too small for it, so that the ring wraps many times in every step. A third run has forebay's state resident.

On a GPU the final parameters must equal those of ``torch.optim.AdamW(fused=True)`` bit for bit. On the CPU they must
equal those of forebay with resident state bit for bit; torch's CPU kernels round differently, so there the largest
difference is shown. Exit code 1 if what must be equal is not. The streamed run is traced; a report shows it.

usage: python scripts/demo.py [--steps 60] [--device cuda:0] [--out out]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# OpenMP reads this when torch is loaded. Threads that spin while they wait take many times as long on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import forebay

ROOT = Path(__file__).resolve().parent.parent
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 192, 5, 6, 64, 6
CHUNK_BYTES, SLOTS = 128 << 10, 3
MAX_NORM = 0.5
KIB, MIB = 1 << 10, 1 << 20


def read_text() -> torch.Tensor:
    """Return the repository's documents and sources, in a fixed order, as bytes."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("crates/**/*.rs"), *ROOT.glob("python/**/*.py")]
    text = b"\n".join(path.read_bytes() for path in sorted(files))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_ffn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend to what came before, then transform each position."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        # Written out, and not scaled_dot_product_attention: its fast backward adds in no fixed order.
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(mask, -torch.inf).softmax(-1)
        x = x + self.merge((weights @ v).transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.ffn(self.before_ffn(x))


class ByteModel(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1))

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return the loss over windows of one byte more than the context."""
        x = self.bytes(window[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), window[:, 1:].flatten())

    def groups(self) -> list[dict[str, Any]]:
        """Return parameter groups: matrices decay, vectors do not."""
        every = list(self.parameters())
        return [
            {"params": [p for p in every if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
        ]


class Bar:
    """A progress bar on a terminal, nothing in a pipe."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.shown = total, 0, sys.stderr.isatty()

    def advance(self, what: str) -> None:
        """Count one step."""
        self.done += 1
        if self.shown:
            filled = 32 * self.done // self.total
            line = f"\r\x1b[K[{'=' * filled}{' ' * (32 - filled)}] {self.done}/{self.total} {what}"
            sys.stderr.write(line if self.done < self.total else "\r\x1b[K")
            sys.stderr.flush()


def train(name: str, kind: dict[str, Any], text: torch.Tensor, device: torch.device, steps: int, bar: Bar) -> Any:
    """Train once and return numbers and final parameters."""
    torch.manual_seed(1)
    model = ByteModel().to(device)
    streams, trace = kind.pop("forebay"), kind.pop("trace", None)
    if streams:
        optimizer: Any = forebay.AdamW(model.groups(), lr=2e-3, max_grad_norm=MAX_NORM, **kind)
    else:
        optimizer = torch.optim.AdamW(model.groups(), lr=2e-3, **kind)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    batches = torch.Generator().manual_seed(2)
    training, held_out = text[: -len(text) // 20], text[-len(text) // 20 :]

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if streams:
            optimizer.synchronize()

    # A scheduler and its optimizer hold each other: what the last run left would count in this one's peak.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    losses, times = [], []
    with forebay.trace(trace) if trace is not None else contextlib.nullcontext():
        for _ in range(steps):
            starts = torch.randint(len(training) - CONTEXT - 1, (BATCH,), generator=batches)
            loss = model(torch.stack([training[s : s + CONTEXT + 1] for s in starts]).to(device))
            loss.backward()
            finish()
            start = time.perf_counter()
            if not streams:
                # In the optimizer's order: a sum of squares in another order may round otherwise.
                nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], MAX_NORM)
            optimizer.step()
            finish()
            times.append(time.perf_counter() - start)
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            bar.advance(f"{name}: loss {losses[-1]:.3f}")
    with torch.no_grad():
        windows = held_out[: len(held_out) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)[:64]
        final = model(windows.to(device)).item()
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim())
    result = {
        "optimizer": name,
        "final_loss": final,
        "losses": losses,
        "median_step_s": statistics.median(times[1:] or times),
        "peak_device_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "state_bytes": state,
        # What the state takes where the step is computed.
        "state_device_bytes": state,
        "pinned_bytes": 0,
    }
    if streams:
        stats = optimizer.stats()
        if stats["chunks"]:
            result |= {"state_device_bytes": stats["device_bytes"], "pinned_bytes": stats["pinned_bytes"]}
            result["ring_rounds"] = stats["chunks"] // SLOTS
        result["stats"] = stats
        optimizer.close()
    return result, [p.detach().cpu() for p in model.parameters()]


def compare(left: list[torch.Tensor], right: list[torch.Tensor]) -> dict[str, Any]:
    """Count parameters that differ in any bit."""
    pairs = list(zip(left, right, strict=True))
    return {
        "compared": sum(a.numel() for a in left),
        "differing": sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in pairs),
        "largest_difference": max(float((a - b).abs().max()) for a, b in pairs),
    }


def describe(found: dict[str, Any]) -> str:
    """Say how equal two sets of parameters are."""
    if found["differing"] == 0:
        return "yes, bit for bit"
    return f"no, by {found['largest_difference']:.1e} at most"


def print_table(heads: list[str], lines: list[list[str]]) -> None:
    """Print lines in columns."""
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    for line in [heads, ["-" * width for width in widths], *lines]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def main() -> int:
    """Train, compare, report."""
    parser = argparse.ArgumentParser(description="Train a small language model with torch's AdamW and with forebay's.")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run (%(default)s)")
    parser.add_argument("--device", help="cuda:0 or cpu; by default the first GPU, or the CPU where there is none")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for the files it writes (%(default)s)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1: {options.steps}")
    device = torch.device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    # Both runs must compute the same gradients: what differs then is the optimizers' work.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False

    text = read_text()
    params = sum(p.numel() for p in ByteModel().parameters())
    where = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{params / 1e6:.2f}e6 parameters, {len(text) / 1e3:.0f} kB of text, {options.steps} steps, on {where}")
    options.out.mkdir(parents=True, exist_ok=True)
    trace, page = options.out / "demo_trace.json", options.out / "demo_report.html"
    runs = {
        "torch.optim.AdamW" + (" (fused)" if on_gpu else ""): {"forebay": False, "fused": on_gpu or None},
        "forebay.AdamW, streamed": {"forebay": True, "chunk_bytes": CHUNK_BYTES, "slots": SLOTS, "trace": trace},
        "forebay.AdamW, resident": {"forebay": True, "placement": "resident"},
    }
    start = time.perf_counter()
    bar = Bar(len(runs) * options.steps)
    trained = [train(name, kind, text, device, options.steps, bar) for name, kind in runs.items()]
    (reference, reference_params), (streamed, streamed_params), (resident, resident_params) = trained
    train_s = time.perf_counter() - start
    streamed["against_torch"] = compare(streamed_params, reference_params)
    streamed["against_resident"] = compare(streamed_params, resident_params)
    resident["against_torch"] = compare(resident_params, reference_params)
    must_hold = [streamed["against_resident"]] + ([streamed["against_torch"]] if on_gpu else [])
    holds = all(found["differing"] == 0 for found in must_hold)

    memory = "peak device bytes" if on_gpu else "state on the device"
    lines = [
        [
            run["optimizer"],
            f"{run['final_loss']:.6f}",
            f"{run['median_step_s'] * 1e3:.2f} ms",
            f"{(run['peak_device_bytes'] if on_gpu else run['state_device_bytes']) / MIB:.2f} MiB",
            f"{run['pinned_bytes'] / MIB:.2f} MiB",
            describe(run["against_torch"]) if "against_torch" in run else "-",
            describe(run["against_resident"]) if "against_resident" in run else "-",
        ]
        for run in (reference, streamed, resident)
    ]
    print()
    print_table(
        ["optimizer", "final loss", "step", memory, "pinned", "parameters as torch's", "as forebay resident"], lines
    )
    print(
        f"\nstreamed: a ring of {SLOTS} slots of {CHUNK_BYTES // KIB} KiB, wrapped {streamed['ring_rounds']} times "
        f"in each step; loss {streamed['losses'][0]:.3f} at the start, {streamed['losses'][-1]:.3f} at the end"
    )
    if not on_gpu:
        print(
            "no GPU: the CPU backend stands in for one. torch's CPU kernels round differently, the placements must not."
        )
    numbers, table = options.out / "demo.json", options.out / "demo_losses.csv"
    about = {"device": str(device), "where": where, "torch": torch.__version__, "forebay": forebay.__version__}
    about |= {"parameters": params, "steps": options.steps, "train_s": train_s, "holds": holds}
    numbers.write_text(json.dumps(about | {"runs": [reference, streamed, resident]}, indent=1) + "\n")
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(run["optimizer"] for run in (reference, streamed, resident))])
        writer.writerows(zip(range(1, options.steps + 1), *(run["losses"] for run, _ in trained), strict=True))
    print(f"wrote {numbers} and {table}")
    report = [sys.executable, "-m", "forebay", "report", trace, "-o", page]
    subprocess.run(report, check=True, stdout=subprocess.DEVNULL)
    print(
        f"wrote {trace} and {page}: what the streamed run did when, and what it waited for; open the page in a browser"
    )
    if not holds:
        print("error: parameters differ that must be equal, bit for bit", file=sys.stderr)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
