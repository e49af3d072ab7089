"""What each format of optimizer state does to training: one table, one JSON file, one picture.

A small language model with bf16 weights learns the text of Python's own library (see ``quality_rows.py``), once for
each format and seed, in processes of their own. All rows of a seed begin with the same weights and see the same text in
the X
usage: python bench/quality.py [--json PATH] [--plot PATH] [--quick] [--device cuda:0] [--rows f32,8bit] [--jobs 24]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import plot
import quality_rows
from step import Progress, commit_of, conclude, job, number, table, why_not

BASE, COMPACT = "f32", "compact"
"""The row that others are set against, and the one that must have its bits."""


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--device", help="cuda:0 or cpu; by default the first GPU, or the CPU where there is none")
    parser.add_argument("--quick", action="store_true", help="a tiny model and 40 steps, in seconds on the CPU")
    parser.add_argument("--rows", default=",".join(quality_rows.ROWS), help="which rows: %(default)s")
    parser.add_argument("--seeds", type=int, help="how many seeds: 0, 1, 2 and so on (3; quick: 2)")
    parser.add_argument("--steps", type=int, help="steps of each run (2000; quick: 40)")
    parser.add_argument(
        "--size", choices=quality_rows.SIZES, help="the model and its batches (medium on a GPU, small on the CPU)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, which share the CPUs (%(default)s)")
    parser.add_argument(
        "--placement", default="stream", help="forebay's placement; all have the same bits (%(default)s)"
    )
    parser.add_argument("--limit-s", type=float, default=1800, help="a run that takes longer hangs (%(default)s)")
    parser.add_argument("--commit", help="the commit to note; by default what git says")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers to this file")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the losses as SVG; plot.py does it later, too")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    if unknown := [row for row in options.rows if row not in quality_rows.ROWS]:
        parser.error(f"unknown rows: {', '.join(unknown)}; there are {', '.join(quality_rows.ROWS)}")
    if options.plot is not None and BASE not in options.rows:
        parser.error(f"--plot needs the row {BASE}, against which it draws the others")
    for name in ("seeds", "steps", "jobs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1: {value}")
    for path in (options.json, options.plot):
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"no such folder: {path.resolve().parent}")
    return options


class Board:
    """How far all runs are: one line that changes on a terminal, a line for each finished run in a pipe."""

    def __init__(self, runs: int, steps: int) -> None:
        self.runs, self.steps = runs, steps
        self.ended, self.lock = 0, threading.Lock()
        self.reached: dict[str, int] = {}
        self.changes = sys.stderr.isatty()

    def tell(self, run: str, step: int) -> None:
        """Note how far a run is."""
        with self.lock:
            self.reached[run] = step
            if self.changes:
                done = sum(self.reached.values()) / (self.runs * self.steps)
                bar = ("=" * int(30 * done)).ljust(30)
                sys.stderr.write(f"\r\x1b[K[{bar}] {self.ended}/{self.runs} {run}: step {step} of {self.steps}")
                sys.stderr.flush()

    def end(self, run: str, result: dict[str, Any]) -> None:
        """Note the end of a run."""
        self.tell(run, self.steps)
        with self.lock:
            self.ended += 1
            if not self.changes:
                loss = f"held-out loss {result.get('held_out_loss', 0):.4f}, {result.get('seconds', 0):.1f} s"
                sys.stderr.write(f"{self.ended}/{self.runs} {run}: {why_not(result) or loss}\n")
                sys.stderr.flush()

    def clear(self) -> None:
        """Clear the line."""
        if self.changes:
            sys.stderr.write("\r\x1b[K")


class Runs:
    """Runs in processes of their own, several at a time."""

    def __init__(self, spec: dict[str, Any], board: Board) -> None:
        self.spec, self.board = spec, board
        # All processes are forks of one that has imported torch, and what torch imports with the first optimizer. Its
        # threads would be missing in them, so it has none. cuBLAS repeats its bits only with workspaces of its own,
        # and torch.compile would start a process for each CPU.
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch._dynamo", "forebay"])

    def all(self, wanted: list[tuple[str, int]]) -> list[dict[str, Any]]:
        """Return the results in the order of what is wanted."""
        with ThreadPoolExecutor(self.spec["jobs"]) as pool:
            try:
                return list(pool.map(self.one, wanted))
            except BaseException:
                # One that the user has stopped, say: no other begins.
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.kill()
                raise

    def one(self, wanted: tuple[str, int]) -> dict[str, Any]:
        """Train one row with one seed; an error is part of the result."""
        name, seed = wanted
        here, there = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=quality_rows.work, args=(name, self.spec | {"seed": seed}, there), daemon=True
        )
        process.start()
        end = time.monotonic() + self.spec["limit_s"]
        there.close()
        result: dict[str, Any] = {"step": 0}
        while "step" in result:
            if not here.poll(max(0.0, end - time.monotonic())):
                result = {"error": f"no end after {self.spec['limit_s']:g} s"}
                process.kill()
                break
            try:
                result = here.recv()
            except EOFError:
                process.join()
                result = {"error": f"exit code {process.exitcode}"}
            if "step" in result:
                self.board.tell(f"{name}, seed {seed}", result["step"])
        process.join()
        self.board.end(f"{name}, seed {seed}", result)
        return {"seed": seed} | result


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the content of the file."""
    progress = Progress(1)
    progress.begin("machine")
    machine = job("machine", {"device": options.device})
    progress.end()
    if reason := machine.get("cannot_run") or machine.get("error"):
        sys.exit(f"error: {reason}\nhint: use --device cpu, or run on a machine with a GPU")
    device = machine.pop("device")
    spec = {
        "device": device,
        "size": options.size or ("tiny" if options.quick else "small" if device == "cpu" else "medium"),
        "steps": options.steps or (40 if options.quick else 2000),
        "seeds": options.seeds or (2 if options.quick else 3),
        "jobs": options.jobs,
        "threads": max(1, machine["cpus"] // options.jobs),
        "placement": options.placement,
        "limit_s": options.limit_s,
    }
    size = quality_rows.SIZES[spec["size"]]
    # Seed by seed: what has run until a stop can be compared.
    wanted = [(name, seed) for seed in range(spec["seeds"]) for name in options.rows]
    board, start = Board(len(wanted), spec["steps"]), time.perf_counter()
    results = Runs(spec, board).all(wanted)
    board.clear()
    found = []
    for name in options.rows:
        row = quality_rows.ROWS[name]
        about = {"name": name, "label": row.label, "system": row.system}
        about |= {"options": {key: str(value) for key, value in row.options.items()}}
        runs = [one for (of, _), one in zip(wanted, results, strict=True) if of == name]
        # A row has numbers of all seeds, or the reason why not.
        reasons = [{key: one[key]} for key in ("error", "cannot_run") for one in runs if key in one]
        found.append(about | (reasons[0] if reasons else {"runs": runs}))
    return {
        "machine": machine,
        "device": device,
        "command": shlex.join(["python", "bench/quality.py", *sys.argv[1:]]),
        "commit": commit_of(options.commit),
        "options": spec,
        "wall_s": time.perf_counter() - start,
        "text": quality_rows.Text(size.text_bytes).about(),
        "model": size._asdict(),
        "training": {
            "weights": "bf16",
            "betas": quality_rows.BETAS,
            "weight_decay": f"{quality_rows.WEIGHT_DECAY}, none for norms",
            "max_grad_norm": quality_rows.CLIP,
            "lr": f"{size.lr} after {quality_rows.WARMUP} of the steps, then a cosine to {quality_rows.LAST_LR} of it",
        },
        "noted_steps": quality_rows.moments(spec["steps"], size),
        **judged(found),
    }


def judged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows with what they are against f32, and the seeds in which bits differ that must be equal."""
    for row in found:
        if "runs" in row:
            losses = [one["held_out_loss"] for one in row["runs"]]
            row["mean"], row["spread"] = statistics.fmean(losses), max(losses) - min(losses)
    by_name = {row["name"]: row for row in found if "runs" in row}
    base = by_name.get(BASE)
    for row in by_name.values():
        row["from_f32"] = row["mean"] - base["mean"] if base else None
        # One seed has no spread.
        several = base is not None and len(base["runs"]) > 1
        row["within_f32_spread"] = abs(row["from_f32"]) <= base["spread"] if several else None
    pairs = [by_name[name]["runs"] for name in (BASE, COMPACT) if name in by_name]
    both = list(zip(*pairs, strict=True)) if len(pairs) == 2 else []
    differing = [left["seed"] for left, right in both if left["digest"] != right["digest"]]
    return {"rows": found, "seeds_compared": len(both), "differing": differing}


def print_report(found: dict[str, Any]) -> None:
    """Print everything as a table."""
    machine, spec, text, size = found["machine"], found["options"], found["text"], found["model"]
    where = f"{machine['gpu']}, driver {machine['driver']}" if machine["gpu"] else "CPU backend"
    print(f"{where}; {machine['cpus']} CPUs; torch {machine['torch']}; forebay {machine['forebay']}, {found['commit']}")
    ran = [row for row in found["rows"] if why_not(row) is None]
    count = ran[0]["runs"][0]["parameters"] / 1e6 if ran else None
    print(
        f"{number(count, 2)}e6 bf16 parameters in {size['layers']} layers, {spec['steps']} steps of {size['batch']} x "
        f"{size['length']} bytes; {spec['jobs']} runs at a time, {found['wall_s']:.0f} s in all"
    )
    print(f"text: {text['trained_bytes'] / 1e6:.2f} MB of Python's own library, sha256 {text['sha256'][:12]}\n")
    lines = [
        [
            row["label"],
            number(row["runs"][0]["state_bytes_per_parameter"], 2),
            *(number(one["held_out_loss"], 4) for one in row["runs"]),
            number(row["mean"], 4),
            number(row["spread"], 4),
            "-" if row["from_f32"] is None else f"{row['from_f32']:+.4f}",
            {None: "-", True: "yes", False: "no"}[row["within_f32_spread"]],
            number(statistics.median(one["seconds"] for one in row["runs"]), 1),
        ]
        for row in ran
    ]
    seeds = [f"seed {seed}" for seed in range(spec["seeds"])]
    heads = ["held-out loss", "bytes", *seeds, "mean", "spread", "from f32", "within its spread", "s"]
    print(table(heads, lines))
    print("loss: nats for each byte of text that is not trained on, lower is better. bytes: state and masters that a")
    print("step reads, for each parameter. spread: the largest less the smallest of the seeds; s: seconds of a run")
    for row in found["rows"]:
        if reason := why_not(row):
            print(f"not run: {row['label']}: {reason}")
    verdict = f"different with seeds {found['differing']}" if found["differing"] else "equal, bit for bit"
    print(
        f"weights with compact masters and with f32 masters: {verdict if found['seeds_compared'] else 'not compared'}"
    )


def main() -> int:
    """Run, print, write, draw; 1 if a row failed or bits differ that must be equal."""
    options = parse()
    found = run(options)
    conclude(found, options.json, print_report)
    if options.plot is not None:
        options.plot.write_text(plot.draw_quality(found))
        print(f"wrote {options.plot}")
    return int(any("error" in row for row in found["rows"]) or bool(found["differing"]))


if __name__ == "__main__":
    sys.exit(main())
