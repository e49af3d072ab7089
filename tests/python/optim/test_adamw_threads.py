"""The threads of forebay's own: where they run and how they round does not depend on the thread that starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import forebay
from support.optim import TINY
from support.tensors import random

# The cores to which the main thread was bound, those of each thread of forebay's, and how many threads update.
SEEN = """
import json, os, sys
os.sched_setaffinity(0, json.loads(sys.argv[1]))
import torch, forebay
bound = sorted(os.sched_getaffinity(0))
parameter = torch.nn.Parameter(torch.ones(100_000))
parameter.grad = torch.ones(100_000)
optimizer = forebay.AdamW([parameter], placement="hybrid", host_fraction=0.5, chunk_bytes=1 << 16)
optimizer.step()
ours = []
for task in os.listdir("/proc/self/task"):
    try:
        if open(f"/proc/self/task/{task}/comm").read().startswith("forebay"):
            ours.append(sorted(os.sched_getaffinity(int(task))))
    except (FileNotFoundError, ProcessLookupError):
        pass  # A thread that has just ended.
print(json.dumps({"bound": bound, "ours": ours, "threads": optimizer.stats()["host_threads"]}))
"""


@pytest.mark.parametrize(("variable", "value", "narrow"), [("OMP_PROC_BIND", "true", 0), ("OMP_PLACES", "threads", 1)])
def test_threads_run_on_the_cores_that_the_process_was_given(variable: str, value: str, narrow: int) -> None:
    """OpenMP binds the importing thread to one core; ours have all of them, and none that the process has not."""
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[: max(1, len(cores) - narrow)]
    command = [sys.executable, "-c", SEEN, json.dumps(cores)]
    environment = {key: text for key, text in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment[variable] = value
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found["bound"]) == 1, "nothing was bound, so nothing was tested"
    assert found["ours"]
    assert all(thread == cores for thread in found["ours"])
    # A quota of the control group's may allow fewer than there are cores.
    assert min(2, len(cores)) <= found["threads"] <= len(cores)


def test_flushing_small_numbers_in_the_program_changes_no_bit(device: torch.device, placement: str) -> None:
    """``torch.set_flush_denormal`` is the calling thread's; threads that are started afterwards keep small numbers."""
    weights, gradient = random((20_000,), 1).to(device), (random((20_000,), 2) * 1e-19).to(device)

    def trained() -> torch.Tensor:
        parameter = torch.nn.Parameter(weights.clone())
        optimizer = forebay.AdamW([parameter], lr=1e-2, chunk_bytes=TINY, placement=placement)
        for _ in range(3):
            parameter.grad = gradient.clone()
            optimizer.step()
        squares: torch.Tensor = optimizer.state[parameter]["exp_avg_sq"]
        return squares.cpu().clone().view(torch.int32)

    kept = trained()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush")
    try:
        flushed = trained()
    finally:
        torch.set_flush_denormal(False)
    assert kept.count_nonzero() > 19_000, "the squares were not small numbers"
    assert torch.equal(kept, flushed)
