"""Test files whose cases run on several ranks: the file is also the program of each rank.

One group of processes runs all cases of a file, because importing a framework takes seconds. Every case has a process
group of its own. Ranks meet through a file, and talk over the loopback interface.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from support.dist.launch import Outcome
from support.processes import environment

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 240.0
"""A group that hangs is ended after this."""
COLLECTIVE_LIMIT = datetime.timedelta(seconds=60)


def run_on_ranks(program: str, folder: Path, world: int = 2) -> Outcome:
    """Run all cases of a file on so many ranks."""
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        variables = environment(
            CUDA_VISIBLE_DEVICES="",
            GLOO_SOCKET_IFNAME="lo",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            # Frameworks look for it. Nothing is connected to it: the process group exists already.
            MASTER_ADDR="127.0.0.1",
        )
        with log.open("wb") as output:
            command = [sys.executable, program, str(folder)]
            ranks.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables))
    deadline = time.monotonic() + LIMIT_S + 10
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = [folder / f"rank{rank}.json" for rank in range(world)]
    return Outcome(
        [json.loads(path.read_text()) if path.exists() else {} for path in found],
        [log.read_text(errors="replace")[-8000:] for log in logs],
    )


def be_a_rank(cases: list[Callable[[Path], None]], *, after: Callable[[], None]) -> None:
    """Run all cases as one of the ranks, and write down how each went.

    Parameters
    ----------
    cases
        Functions that every rank calls together, with a folder that all ranks see. They fail by raising on any rank.
    after
        Called after each case, before its process group ends.
    """
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    files = dist.FileStore(str(folder / "store"), world)
    results: dict[str, dict[str, object]] = {}
    for case in cases:
        error = None
        store = dist.PrefixStore(case.__name__, files)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=COLLECTIVE_LIMIT)
        start = time.perf_counter()
        try:
            own = folder / case.__name__
            own.mkdir(exist_ok=True)
            case(own)
            dist.barrier()
        except Exception:
            error = traceback.format_exc()
        finally:
            after()
            if dist.is_initialized():
                dist.destroy_process_group()
        results[case.__name__] = {"error": error, "seconds": time.perf_counter() - start}
        (folder / f"rank{rank}.json").write_text(json.dumps(results))
