"""One rank of a group of processes: runs all cases in order and writes down how each went.

Importing torch takes seconds, so one start serves many cases. Each case gets a process group of its own: when it fails
on one rank only, collectives that the others wait in run out of time, and the next case starts afresh when all of them
are there. Ranks meet through a file and talk over the loopback interface; no port is chosen.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from support.dist.registry import SurvivedError, cases, set_shared_folder

if TYPE_CHECKING:
    from collections.abc import Callable


COLLECTIVE_LIMIT = datetime.timedelta(seconds=10)


def meet(store: dist.Store, world: int) -> None:
    """Wait until all ranks are here: one may have been waiting for another that failed."""
    store.add("here", 1)
    while store.add("here", 0) < world:
        time.sleep(0.01)


def run(function: Callable[[], None], store: dist.Store, rank: int, world: int, backend: str) -> None:
    """Run one case in a process group of its own."""
    meet(store, world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.manual_seed(0)
            function()
            dist.barrier()
    except SurvivedError:
        pass
    finally:
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def main(kind: str, world: int, rank: int, folder: Path, limit_s: float) -> None:
    """Run every case of a kind as one of its ranks."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    backend = "gloo"
    if kind == "cuda":
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    files = dist.FileStore(str(folder / "store"), world)
    results: dict[str, dict[str, object]] = {}
    set_shared_folder(folder)
    named = cases(kind, world)
    # What was imported stays, so collections need not look at it: each case asks for some, and torch has many objects.
    gc.collect()
    gc.freeze()
    for name, (function, ranks, _) in named.items():
        start = time.perf_counter()
        error = None
        try:
            if rank < ranks:
                run(function, dist.PrefixStore(name, files), rank, ranks, backend)
        except Exception:
            error = traceback.format_exc()
        results[name] = {"error": error, "seconds": time.perf_counter() - start}
        # After every case: what ran before a hang is still known.
        partial = folder / f"rank{rank}.partial"
        partial.write_text(json.dumps(results))
        partial.replace(folder / f"rank{rank}.json")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), float(sys.argv[5]))
