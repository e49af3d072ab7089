"""Activation offload against its peers: forward and backward of 12 layers of Qwen2-7B shape, one table, one JSON file.

The model is ``transformers.Qwen2Model`` with random weights, 4 x 4096 tokens, bf16, sdpa. Every row runs the same steps
in one process: forward, backward, wait. The peak is torch's, above weights and gradients. The wire is what plain copies
of pinned memory reach in this process, one way at a time, since a forward pass only stores and a backward pass only
fetches. A row's floor is the larger of the forward time and its stores on the wire, plus the larger of the backward
time and its fetches on the wire, both times taken from the row without offload. Rows with a budget are compared with
transformers' own checkpointing, and with what they predicted; one that took more than its budget is a failure.

usage: python bench/activations.py [--json PATH] [--quick] [--device cuda:0] [--rows nothing,forebay-auto] [--steps 5]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

# cuBLAS gives the same bits only with a workspace of its own; it reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Neighbours, not a package: Python finds them in this file's folder.
import rows as machine_rows
import torch
from step import commit_of, number, size, table

import forebay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GIB = 1 << 30


class System:
    """One way to run the model: its set-up, a context around the forward pass, and its own figures."""

    def __init__(self, label: str, *, steps: int | None = None, warmup: int = 2, is_peer: bool = False) -> None:
        self.label, self.steps, self.warmup, self.is_peer = label, steps, warmup, is_peer

    @contextlib.contextmanager
    def set_up(self, model: Any) -> Iterator[Callable[[], dict[str, float]]]:
        """Prepare the model; gives a function that returns the system's sums so far."""
        yield dict

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the forward pass."""
        return contextlib.nullcontext()


class Checkpointing(System):
    """transformers' own gradient checkpointing."""

    @contextlib.contextmanager
    def set_up(self, model: Any) -> Iterator[Callable[[], dict[str, float]]]:
        """Switch it on and off."""
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            yield dict
        finally:
            model.gradient_checkpointing_disable()


class SaveOnCpu(System):
    """torch's own hooks."""

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the forward pass."""
        return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


class Forebay(System):
    """forebay.offload_activations with some options."""

    def __init__(self, label: str, *, warmup: int = 3, checkpointing: bool = False, **options: Any) -> None:
        super().__init__(label, warmup=warmup)
        self.options, self.checkpointing = options, checkpointing

    @classmethod
    def within(cls, gib: int) -> Forebay:
        """Return the row of a budget; its first passes measure, and the plan is settled after a few more."""
        return cls(f"forebay budget {gib} GiB", warmup=8, budget_bytes=gib * GIB)

    @contextlib.contextmanager
    def set_up(self, model: Any) -> Iterator[Callable[[], dict[str, float]]]:
        """Offload, and take the hooks off again."""
        if self.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        handle = forebay.offload_activations(model, min_bytes=MIN_BYTES, **self.options)
        try:
            yield handle.stats
            self.table, self.words = handle.table(), handle.explain()
        finally:
            handle.remove()
            if self.checkpointing:
                model.gradient_checkpointing_disable()


class SaveOnHost(System):
    """forebay.save_on_host around the whole forward pass."""

    @contextlib.contextmanager
    def set_up(self, model: Any) -> Iterator[Callable[[], dict[str, float]]]:
        """Make the context once; it is entered again and again."""
        device = next(model.parameters()).device.type
        self.context = forebay.save_on_host(min_bytes=MIN_BYTES, device=device)
        try:
            yield self.context.stats
        finally:
            self.context.close()
            del self.context

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the forward pass."""
        return self.context


MIN_BYTES = 1 << 20
ROWS: dict[str, System] = {
    "nothing": System("nothing", is_peer=True),
    "checkpoint": Checkpointing("HF gradient checkpointing", is_peer=True),
    # The first passes offload everything and measure; the choice is settled after a few more.
    "forebay-auto": Forebay('forebay fraction="auto"', warmup=9, fraction="auto"),
    "forebay-half": Forebay("forebay fraction=0.5", fraction=0.5),
    "forebay-full": Forebay("forebay fraction=1.0", fraction=1.0),
    "forebay-save-on-host": SaveOnHost("forebay save_on_host"),
    "forebay-recompute": Forebay("forebay recompute=True", recompute=True),
    "forebay-6": Forebay.within(6),
    "forebay-9": Forebay.within(9),
    "forebay-16": Forebay.within(16),
    "forebay-30": Forebay.within(30),
    "forebay-checkpoint": Forebay("forebay with HF checkpointing", checkpointing=True, fraction=1.0),
    # Last: its pinned memory, rounded up to powers of two, stays with torch.
    "save-on-cpu": SaveOnCpu("torch save_on_cpu(pin_memory=True)", steps=2, warmup=1, is_peer=True),
}


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description="Activation offload against its peers: one table, one JSON file.")
    parser.add_argument("--device", help="cuda:0 or cpu; by default the first GPU, or the CPU where there is none")
    parser.add_argument("--quick", action="store_true", help="a small model that also runs on the CPU, in seconds")
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, separated by commas: %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each row (%(default)s)")
    parser.add_argument("--no-exact", action="store_true", help="leave out the comparison of gradients")
    parser.add_argument("--commit", help="the commit to note; by default what git says")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to this file")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    if unknown := [row for row in options.rows if row not in ROWS]:
        parser.error(f"unknown rows: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if options.rows[0] != "nothing":
        parser.error("the first row must be nothing: all others are compared with it")
    return options


def build(device: torch.device, quick: bool) -> tuple[Any, torch.Tensor]:
    """Return the model and its input."""
    from transformers import Qwen2Config, Qwen2Model

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=128 if quick else 3584,
        intermediate_size=512 if quick else 18944,
        num_hidden_layers=4 if quick else 12,
        num_attention_heads=4 if quick else 28,
        num_key_value_heads=2 if quick else 4,
        vocab_size=1000,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        model = Qwen2Model(config).to(torch.bfloat16)
    model.train()
    tokens = torch.randint(0, 1000, (2, 256) if quick else (4, 4096), device=device)
    return model, tokens


class Clock:
    """Times on the device's own clock, or on the host's where there is none."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.points = device, []  # type: ignore[var-annotated]

    def mark(self) -> None:
        """Note this moment."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.points.append(event)
        else:
            self.points.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the times between the moments, once all were reached."""
        machine_rows.finish(self.device)
        pairs = zip(self.points, self.points[1:], strict=False)
        return [a.elapsed_time(b) / 1e3 if self.device.type == "cuda" else b - a for a, b in pairs]


def step(model: Any, tokens: torch.Tensor, system: System) -> list[float]:
    """Run forward and backward; the seconds of each, and from the call to the end of all work."""
    clock = Clock(tokens.device)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    machine_rows.finish(tokens.device)
    start = time.perf_counter()
    clock.mark()
    with system.around():
        hidden = model(input_ids=tokens, use_cache=False).last_hidden_state
    loss = hidden.sum()
    del hidden
    clock.mark()
    loss.backward()
    clock.mark()
    machine_rows.finish(tokens.device)
    return [*clock.seconds(), time.perf_counter() - start]


def run_row(name: str, model: Any, tokens: torch.Tensor, steps: int) -> dict[str, Any]:
    """Run one row."""
    system = ROWS[name]
    steps = system.steps or steps
    with system.set_up(model) as stats:
        start = time.perf_counter()
        warmup_s = [step(model, tokens, system)[2] for _ in range(system.warmup)]
        setup_s = time.perf_counter() - start
        before = stats()
        memory = machine_rows.Memory(tokens.device)
        times = [step(model, tokens, system) for _ in range(steps)]
        peak = memory.peak()
        after = stats()
    moved = {key: (after[key] - before[key]) / steps for key in ("stored_bytes", "fetched_bytes", "stall_s") if after}
    forward_s, backward_s, total_s = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "name": name,
        "label": system.label,
        "options": getattr(system, "options", {}),
        "steps": steps,
        "step_s": [total for _, _, total in times],
        "median_s": total_s,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "warmup_s": warmup_s,
        "setup_s": setup_s,
        **peak,
        "moved_per_step": moved,
        "stats": after,
        "table": getattr(system, "table", None),
        "explained": getattr(system, "words", None),
    }


def wire(device: torch.device) -> dict[str, float | None]:
    """Measure plain copies of pinned memory, one way at a time, in GB/s."""
    if device.type != "cuda":
        return {"store_gbps": None, "fetch_gbps": None}
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    found: dict[str, float | None] = {}
    for way, to, source in (("store_gbps", host, there), ("fetch_gbps", there, host)):
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        clock = Clock(device)
        clock.mark()
        for _ in range(4):
            to.copy_(source, non_blocking=True)
        clock.mark()
        found[way] = 4 * host.nbytes / clock.seconds()[0] / 1e9
    return found


def against(row: dict[str, Any], rows: list[dict[str, Any]], rates: dict[str, float | None]) -> None:
    """Add what the wire, the row without offload and that of checkpointing say about a row."""
    plain = rows[0] if rows else row
    row["times_nothing"] = row["median_s"] / plain["median_s"]
    checkpointed = next((other for other in rows if other["name"] == "checkpoint" and "error" not in other), None)
    if checkpointed is not None:
        row["times_checkpoint"] = row["median_s"] / checkpointed["median_s"]
    budget, peak = row["options"].get("budget_bytes"), row["torch_peak_bytes"]
    if budget and peak:
        row["predicted"] = row["table"][-1]
        row["within_budget"] = peak <= budget
        row["peak_error"] = row["predicted"]["predicted_peak_bytes"] / peak - 1
        row["time_error"] = row["predicted"]["predicted_pass_s"] / row["median_s"] - 1
    moved = row["moved_per_step"]
    if not moved or rates["store_gbps"] is None or rates["fetch_gbps"] is None:
        return
    store_s = moved["stored_bytes"] / rates["store_gbps"] / 1e9
    fetch_s = moved["fetched_bytes"] / rates["fetch_gbps"] / 1e9
    row["floor_s"] = max(plain["forward_s"], store_s) + max(plain["backward_s"], fetch_s)
    row["times_floor"] = row["median_s"] / row["floor_s"]
    row["percent_of_wire"] = 100 * (store_s + fetch_s) / row["median_s"]


def exactness(names: list[str], model: Any, tokens: torch.Tensor) -> dict[str, Any]:
    """Compare the gradients of every row with those without offload, with deterministic kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.use_deterministic_algorithms(True)

    def gradients(name: str, passes: int) -> list[torch.Tensor]:
        system = ROWS[name]
        with system.set_up(model), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            for _ in range(passes):
                step(model, tokens, system)
        return [parameter.grad.clone() for parameter in model.parameters()]

    reference = gradients("nothing", 1)
    found = {}
    for name in names:
        # A row that learns is looked at before and after.
        learns = {"forebay-auto": 4}.get(name, 6 if "budget_bytes" in getattr(ROWS[name], "options", {}) else 1)
        compared = gradients(name, learns)
        pairs = list(zip(reference, compared, strict=True))
        found[name] = sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in pairs)
        del compared, pairs
        gc.collect()
    torch.use_deterministic_algorithms(False)
    return {"differing": found, "exact": all(count == 0 for count in found.values())}


def report(found: dict[str, Any]) -> None:
    """Print everything as a table."""
    machine, rates = found["machine"], found["wire"]
    where = f"{machine['gpu']}, driver {machine['driver']}" if machine["gpu"] else "CPU backend"
    print(f"{where}; torch {machine['torch']}; transformers {found['transformers']}; forebay {found['commit']}")
    print(f"wire: stores {number(rates['store_gbps'], 1)}, fetches {number(rates['fetch_gbps'], 1)} GB/s\n")
    lines = []
    for row in found["rows"]:
        if "error" in row:
            lines.append([row["label"], f"FAILED: {row['error']}", *[""] * 12])
            continue
        moved = row["moved_per_step"]
        lines.append(
            [
                row["label"],
                number(row["median_s"], 1, 1e-3),
                number(row["forward_s"], 1, 1e-3),
                number(row["backward_s"], 1, 1e-3),
                number(row.get("times_nothing"), 3),
                number(row.get("times_checkpoint"), 3),
                number(row.get("floor_s"), 1, 1e-3),
                number(row.get("times_floor"), 3),
                size(row["torch_peak_bytes"]),
                number(row.get("peak_error"), 1, 1e-2),
                number(row.get("time_error"), 1, 1e-2),
                number(moved.get("stored_bytes"), 2, 1e9),
                number(row.get("percent_of_wire"), 1),
                number(moved.get("stall_s"), 1, 1e-3),
            ]
        )
    heads = [
        "row",
        "ms",
        "forward",
        "backward",
        "x nothing",
        "x checkpt",
        "floor ms",
        "x floor",
        "peak",
        "peak pred %",
        "ms pred %",
        "GB out",
        "% wire",
        "stall",
    ]
    print(table(heads, lines))
    for name, count in found.get("exactness", {}).get("differing", {}).items():
        print(f"gradients of {name}: {'equal, bit for bit' if count == 0 else f'{count} elements differ'}")


def main() -> int:
    """Run, print, write; 1 if a row failed or gradients differ."""
    global MIN_BYTES
    options = parse()
    machine = machine_rows.do("machine", {"device": options.device})
    if "cannot_run" in machine:
        sys.exit(f"error: {machine['cannot_run']}\nhint: use --device cpu --quick, or run on a machine with a GPU")
    device = torch.device(machine["device"])
    quick = options.quick or device.type == "cpu"
    if quick:
        MIN_BYTES = 1 << 10
    import transformers

    model, tokens = build(device, quick)
    found: dict[str, Any] = {
        "machine": machine,
        "command": shlex.join(["python", "bench/activations.py", *sys.argv[1:]]),
        "commit": commit_of(options.commit),
        "transformers": transformers.__version__,
        "quick": quick,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": list(tokens.shape),
        "wire": wire(device),
        "rows": [],
    }
    for name in options.rows:
        try:
            row = run_row(name, model, tokens, options.steps)
            against(row, found["rows"], found["wire"])
        except Exception as error:
            row = {"name": name, "label": ROWS[name].label, "error": f"{type(error).__name__}: {error}"}
        found["rows"].append(row)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        sys.stderr.write(f"{row['label']}: {row.get('median_s', row.get('error'))}\n")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            # What save_on_cpu pinned would leave too little for others.
            torch._C._host_emptyCache()
    if not options.no_exact:
        exact = [name for name in options.rows if not ROWS[name].is_peer]
        found["exactness"] = exactness(["nothing", *exact], model, tokens)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    report(found)
    failed = any("error" in row or not row.get("within_budget", True) for row in found["rows"])
    return int(failed or not found.get("exactness", {}).get("exact", True))


if __name__ == "__main__":
    sys.exit(main())
