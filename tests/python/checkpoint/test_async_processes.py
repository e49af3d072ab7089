"""Asynchronous saves and the end of a process; and how much memory a process needs for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import environment, python
from support.saves import PAGE, assert_holds, build, train, values
from support.sizes import times

KILLS = int(os.environ.get("FOREBAY_KILLS") or times(40, 1000))
LIMIT_S = 60 + KILLS

UNFINISHED = """
import os, sys
from support.saves import *
path, how = Path(sys.argv[1]), sys.argv[2]
model, optimizers = build()
train(model, optimizers, 0)
checkpoint.async_save(path, model, optimizers, extra={"step": 1}, snapshot_budget_bytes=0, write_gbps=0.03)
train(model, optimizers, 1)
del model, optimizers
if how == "error":
    raise SystemExit(3)
if how == "kill":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("how", "status"), [("end", 0), ("error", 3)])
def test_a_process_that_ends_completes_its_save(how: str, status: int, tmp_path: Path) -> None:
    done = python(UNFINISHED, tmp_path, how)
    assert (done.returncode, done.stderr) == (status, "")
    model, optimizers = build()
    train(model, optimizers, 0)
    assert_holds(tmp_path, "f32", values(model, optimizers), {"step": 1})


@pytest.mark.timeout(LIMIT_S + 10)
def test_killed_at_random_moments_of_training_the_last_complete_checkpoint_loads(tmp_path: Path) -> None:
    program = Path(__file__).parent / "async_killed.py"
    seed = int.from_bytes(os.urandom(4), "little")
    done = subprocess.run(
        [sys.executable, program, tmp_path / "run", str(KILLS), str(seed)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    kills, inside, last = done.stdout.split()
    assert int(kills) == KILLS
    # Most of them hit a save that was under way, and between them training got somewhere.
    assert int(inside) > KILLS // 4
    assert int(last) > 0


MEMORY = """
import sys
from support.saves import *

def peak(what):
    return int(next(line for line in open("/proc/self/status") if line.startswith(what)).split()[1]) << 10

path, budget = Path(sys.argv[1]), int(sys.argv[2])
# 96 MB of weights and 192 MB of state.
model, optimizers = build(sizes=((2000, 3000),) * 4)
checkpoint.async_save(path, torch.nn.Linear(2, 2)).result()
train(model, optimizers, 0, 1)
Path("/proc/self/clear_refs").write_text("5")
before, peak_before = peak("VmRSS"), peak("VmHWM")
handle = checkpoint.async_save(path, model, optimizers, snapshot_budget_bytes=budget, write_gbps=0.4)
for _ in range(2):
    optimizers[0].step()
handle.result()
assert eventually(lambda: not threads_of_saves())
kept, copies = peak("VmRSS") - before, handle.progress()["copy_memory_bytes"]
del handle
checkpoint.release()
print(peak("VmHWM") - peak_before, copies, kept, peak("VmRSS") - before)
"""


@pytest.mark.parametrize("budget_pages", [0, 60])
def test_extra_memory_is_within_the_budget(budget_pages: int, tmp_path: Path) -> None:
    budget = budget_pages * PAGE
    done = python(MEMORY, tmp_path, budget)
    assert done.returncode == 0, done.stderr
    extra, copies, kept, left = map(int, done.stdout.split())
    # Of the 256 MiB that are allowed above the budget, less is needed at this size: buffers, a thread or two.
    assert extra <= budget + (32 << 20)
    assert copies <= budget
    assert kept <= budget + (32 << 20)
    assert left <= 32 << 20, "memory of the copies is given back when asked for"
