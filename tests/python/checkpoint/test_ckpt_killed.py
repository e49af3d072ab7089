"""Killed at any moment of a save, the last complete checkpoint loads and is consistent."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from support.processes import environment
from support.sizes import times

KILLS = int(os.environ.get("FOREBAY_KILLS") or times(60, 2000))
LIMIT_S = 60 + KILLS


@pytest.mark.parametrize("kind", ["portable", "native"])
@pytest.mark.timeout(LIMIT_S + 10)
def test_killed_at_random_moments_the_last_complete_checkpoint_loads(kind: str) -> None:
    program = Path(__file__).parent / "ckpt_killed.py"
    seed = int.from_bytes(os.urandom(4), "little")
    # What a killed process wrote is in the system's cache, whatever the disk: a disk in memory is as good and faster.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        arguments = [sys.executable, program, Path(folder) / "run", str(KILLS), str(seed), kind]
        done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    kills, _, last = done.stdout.split()
    assert int(kills) == KILLS
    # It did get somewhere: most children complete no more than a save or two before they are killed.
    assert int(last) > KILLS // 10
