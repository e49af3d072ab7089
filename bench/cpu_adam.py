"""AdamW on the host: the kernel against torch's and against the memory, then the placements end to end.

Rates that are compared run in one process, a repetition of each in turn. The update on parameters on the host
is the kernel alone. With a GPU the placements "stream", "host" and "hybrid" follow, on the shapes of a 3.09e9 parameter
model, against torchao where it is installed; without one, the CPU backend with a simulated link.

usage: python bench/cpu_adam.py [--json PATH] [--quick] [--device cuda:0] [--params 300000000] [--repetitions 7]
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Neighbours, not packages: Python finds them in this file's folder.
import rows
import step as report
import torch

import forebay
from forebay import _core

if TYPE_CHECKING:
    from collections.abc import Callable

GB = 1e9
# Bytes of host memory for each parameter: gradient in, weight and moments in and out. With masters of bf16 weights the
# weights are read too, to see whether they were replaced.
BYTES = {"f32": 28, "bf16": 30}
# "auto" needs six steps to settle.
STEPS, WARMUP, SETTLING = 5, 2, 7


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description="AdamW on the host, alone and end to end.")
    parser.add_argument("--device", help="cuda:0 or cpu; by default the first GPU, or the CPU where there is none")
    parser.add_argument("--quick", action="store_true", help="small workloads, in seconds")
    parser.add_argument("--params", type=int, help="parameters for the kernel (300e6 beside a GPU, else 33e6)")
    parser.add_argument("--repetitions", type=int, default=9, help="of each rate (%(default)s)")
    parser.add_argument("--link-gbps", type=float, default=1.1, help="the simulated link (%(default)s)")
    parser.add_argument("--wire-gbps", type=float, help="take this for the wire instead of measuring it")
    parser.add_argument("--commit", help="the commit to note; by default what git says")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to this file")
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error(f"--repetitions must be at least 1: {options.repetitions}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"no such folder: {options.json.resolve().parent}")
    return options


def in_turns(
    contestants: dict[str, Callable[[], Any]], before: Callable[[], Any], repetitions: int
) -> dict[str, list[float]]:
    """Return the times of each, after one that does not count.

    Before each of them something else is run, untimed: torch's threads go on spinning for some milliseconds after their
    work, on cores that the next in turn needs. So each finds awake cores, torch's threads asleep, and the same caches.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repetitions + 1):
        for name, run in contestants.items():
            before()
            start = time.perf_counter()
            run()
            if repetition:
                times[name].append(time.perf_counter() - start)
    return times


def numbers(count: int, dtype: torch.dtype) -> torch.nn.Parameter:
    """Return a parameter on the host with a gradient: the same random numbers again and again, fast to make."""
    tile = torch.randn(1 << 16).to(dtype)
    repeats = -(-count // tile.numel())
    parameter = torch.nn.Parameter(tile.repeat(repeats)[:count].clone())
    parameter.grad = tile.flip(0).repeat(repeats)[:count].clone()
    return parameter


class TorchWithCasts:
    """torch's fused kernel on f32 masters, with the gradient cast before and the weight after."""

    def __init__(self, count: int) -> None:
        self.weight = numbers(count, torch.bfloat16)
        self.master = torch.nn.Parameter(self.weight.detach().float())
        self.master.grad = torch.empty_like(self.master)
        self.optimizer: Any = torch.optim.AdamW([self.master], fused=True, **rows.HYPER)

    def step(self) -> None:
        """Cast, step, cast."""
        assert self.master.grad is not None
        self.master.grad.copy_(self.weight.grad)
        self.optimizer.step()
        with torch.no_grad():
            self.weight.copy_(self.master)


def kernel(count: int, repetitions: int) -> list[dict[str, Any]]:
    """Return the rates of the update on host memory, for both types."""
    found = []
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        parameter = numbers(count, dtype)
        ours = forebay.AdamW([parameter], placement="host", **rows.HYPER)
        ours.prepare()
        engine = ours._engine
        assert engine is not None
        # All that an update reads or writes: what is touched, and what torch updates where it can.
        assert parameter.grad is not None
        operands = [(tensor.data_ptr(), tensor.nbytes // 4 * 4) for tensor in (parameter.data, parameter.grad)]
        touch = functools.partial(engine.touch_state, operands)
        contestants: dict[str, Callable[[], Any]] = {"forebay": ours.step, "touch": touch}
        if dtype == torch.float32:
            theirs: Any = torch.optim.AdamW([parameter], fused=True, **rows.HYPER)
            # The same memory, so that the placement of pages is the same for both.
            moments = {key: ours.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}
            theirs.state[parameter] = {"step": torch.tensor(0.0), **moments}
            contestants["torch fused"] = theirs.step
        else:
            contestants["torch fused and casts"] = TorchWithCasts(count).step
        times = in_turns(contestants, touch, repetitions)
        touched_bytes = 2 * touch()[0]
        rates = {key: statistics.median(values) for key, values in times.items()}
        peer = next(key for key in rates if key.startswith("torch"))
        # In pairs that ran one after the other: what disturbs the machine disturbs both.
        ratios = [b / a for a, b in zip(times["forebay"], times[peer], strict=True)]
        moved = BYTES[name] * count
        found.append(
            {
                "dtype": name,
                "params": count,
                "kernel": engine.host_kernel(),
                "threads": ours.stats()["host_threads"],
                "times_s": times,
                "gparam_per_s": {key: count / rates[key] / GB for key in rates if key != "touch"},
                "best_gparam_per_s": {key: count / min(times[key]) / GB for key in times if key != "touch"},
                "gbps": moved / rates["forebay"] / GB,
                "touch_gbps": touched_bytes / rates["touch"] / GB,
                "percent_of_touch": 100 * (moved / min(times["forebay"])) / (touched_bytes / min(times["touch"])),
                "peer": peer,
                "ratio": statistics.median(ratios),
            }
        )
        ours.close()
        del ours, contestants, parameter
        gc.collect()
    return found


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    """Return the placements on the CPU backend with a slow link, from the engine itself."""
    params, rounds = (1_000_000, 2) if options.quick else (24_000_000, options.repetitions)
    # The CPU backend's device computes and copies on the same cores, so the host gets one thread of slow code, and the
    # link is as slow as that thread: each placement alone is held back by something that the other hardly uses.
    text = _core.bench_placements("cpu", options.link_gbps, params, 1, "portable", 4, 4 << 20, rounds)
    found: dict[str, Any] = json.loads(text)
    return found | {"link_gbps": options.link_gbps, "host_kernel": "portable"}


ROWS: dict[str, tuple[torch.dtype, dict[str, Any] | None]] = {
    "stream, bf16": (torch.bfloat16, {"placement": "stream"}),
    "host, bf16": (torch.bfloat16, {"placement": "host"}),
    "hybrid, bf16": (torch.bfloat16, {"placement": "hybrid"}),
    "stream, f32": (torch.float32, {"placement": "stream"}),
    "host, f32": (torch.float32, {"placement": "host"}),
    "hybrid, f32": (torch.float32, {"placement": "hybrid"}),
    "torchao CPUOffloadOptimizer, f32": (torch.float32, None),
}


def end_to_end(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """Return the placements on a GPU, one after the other over the same parameters."""
    found = []
    params: list[torch.nn.Parameter] = []
    for label, (dtype, options) in ROWS.items():
        if not params or params[0].dtype != dtype:
            params.clear()
            gc.collect()
            torch.cuda.empty_cache()
            params.extend(rows.parameters(rows.shapes("qwen2.5-3b", quick), dtype, device))
        try:
            system = rows.Torchao(params) if options is None else rows.Forebay(params, **options)
        except rows.CannotRunError as reason:
            found.append({"label": label, "cannot_run": str(reason)})
            continue
        start = time.perf_counter()
        system.set_up()
        setup_s = time.perf_counter() - start
        step_s = []
        warmup = SETTLING if options is not None and options["placement"] == "hybrid" else WARMUP
        for number in range(warmup + STEPS):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            system.step()
            torch.cuda.synchronize(device)
            system.settle()
            if number >= warmup:
                step_s.append(time.perf_counter() - start)
        count, median = sum(p.numel() for p in params), statistics.median(step_s)
        # Printed at once, so that a run that is stopped early has shown something.
        print(f"{label}: {median * 1e3:.1f} ms, set-up {setup_s:.1f} s", file=sys.stderr, flush=True)
        found.append(
            {
                "label": label,
                "params": count,
                "setup_s": setup_s,
                "step_s": step_s,
                "median_step_s": median,
                "gparam_per_s": count / median / GB,
                "last_step": system.numbers(),
            }
        )
        system.close()
        del system
        gc.collect()
    return found


def limit(row: dict[str, Any], wire_gbps: float, touch_gbps: float) -> str:
    """Say how much of the wire and of the host's memory a row uses; what is near 100 % holds it back."""
    stats = row.get("last_step") or {}
    if not stats:
        return "-"
    seconds = row["median_step_s"]
    up = stats["fetch_bytes"] + stats.get("host_up_bytes", 0)
    down = stats["store_bytes"] + stats.get("host_down_bytes", 0)
    # State is read and written once at either end. What passes through the host's ring mostly stays in its cache.
    memory = stats["fetch_bytes"] + stats["store_bytes"] + 2 * stats.get("host_state_bytes", 0)
    wire, dram = max(up, down) / GB / seconds / wire_gbps, memory / GB / seconds / touch_gbps
    return f"wire {100 * wire:.0f} %, memory {100 * dram:.0f} %"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the content of the file."""
    machine = rows.do("machine", {"device": options.device})
    if reason := machine.get("cannot_run"):
        sys.exit(f"error: {reason}\nhint: use --device cpu, or run on a machine with a GPU")
    device = torch.device(machine.pop("device"))
    on_gpu = device.type == "cuda"
    count = options.params or (1_000_003 if options.quick else 300_000_003 if on_gpu else 33_333_333)
    found: dict[str, Any] = {
        "machine": machine,
        "device": str(device),
        "command": shlex.join(["python", "bench/cpu_adam.py", *sys.argv[1:]]),
        "commit": report.commit_of(options.commit),
        "kernel": kernel(count, options.repetitions),
    }
    if on_gpu:
        given = options.wire_gbps
        found["wire"] = {"gbps": given or forebay.probe(str(device))["wire_gbps"], "given": given is not None}
        found["rows"] = end_to_end(device, options.quick)
    else:
        found["simulated"] = simulated(options)
    return found


def print_report(found: dict[str, Any]) -> None:
    """Print everything as tables."""
    machine = found["machine"]
    where = f"{machine['gpu']}, driver {machine['driver']}" if machine["gpu"] else "no GPU"
    print(
        f"{where}; {machine['cpus']} CPUs; torch {machine['torch']}; forebay {machine['forebay']}, {found['commit']}\n"
    )
    lines = []
    for case in found["kernel"]:
        for who, rate in case["gparam_per_s"].items():
            mine = who == "forebay"
            lines.append(
                [
                    f"{who}, {case['dtype']}",
                    str(case["threads"]),
                    f"{rate:.3f}",
                    f"{case['best_gparam_per_s'][who]:.3f}",
                    f"{case['gbps']:.1f}" if mine else "-",
                    f"{case['touch_gbps']:.1f}" if mine else "-",
                    f"{case['percent_of_touch']:.1f}" if mine else "-",
                    f"{case['ratio']:.2f}" if mine else "-",
                ]
            )
    heads = ["update on the host", "threads", "Gparam/s", "best", "GB/s", "touch GB/s", "% of touch", "times torch"]
    print(report.table(heads, lines))
    print("medians; touch: all operands read and written back by the same threads; percent and ratio in one run\n")
    if "rows" in found:
        wire = found["wire"]["gbps"]
        touch = max(case["touch_gbps"] for case in found["kernel"])
        print(
            f"end to end, wire {wire:.1f} GB/s each way, medians of {STEPS} steps after {WARMUP} ({SETTLING}: hybrid)"
        )
        lines = []
        for row in found["rows"]:
            if "cannot_run" in row:
                lines.append([row["label"], row["cannot_run"], "-", "-", "-"])
                continue
            fraction = row["last_step"].get("host_fraction")
            share = "-" if fraction is None else f"{fraction:.3f}"
            line = [row["label"], f"{row['median_step_s'] * 1e3:.1f}", f"{row['gparam_per_s']:.3f}", share]
            lines.append([*line, limit(row, wire, touch)])
        print(report.table(["step", "ms", "Gparam/s", "on the host", "limit"], lines))
        print("memory: bytes of state read and written, of what touching reaches")
    else:
        placements = found["simulated"]
        print(
            f"CPU backend, link of {placements['link_gbps']} GB/s each way, "
            f"{placements['host_threads']} host thread of portable code, "
            f"{placements['params'] / 1e6:.0f}e6 bf16 parameters"
        )
        lines = [
            [
                row["placement"],
                f"{row['median_step_s'] * 1e3:.1f}",
                f"{row['gparam_per_s']:.4f}",
                f"{row['host_fraction']:.3f}",
            ]
            for row in placements["rows"]
        ]
        print(report.table(["step", "ms", "Gparam/s", "on the host"], lines))
        print(f"hybrid: {placements['hybrid_gain']:.2f} times the better of the two; ", end="")
        print(f"{placements['differing']} words differ between them")


def main() -> int:
    """Run, print, write; 1 if the placements disagree."""
    options = parse()
    found = run(options)
    report.conclude(found, options.json, print_report)
    return int(found.get("simulated", {}).get("differing", 0) != 0)


if __name__ == "__main__":
    sys.exit(main())
