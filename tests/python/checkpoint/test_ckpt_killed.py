"""Killed at any moment of a save, the last complete checkpoint loads and is consistent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KILLS = int(os.environ.get("FOREBAY_KILLS", "200"))


def test_killed_at_random_moments_the_last_complete_checkpoint_loads(tmp_path: Path) -> None:
    program = Path(__file__).parent / "ckpt_killed.py"
    seed = int.from_bytes(os.urandom(4), "little")
    done = subprocess.run(
        [sys.executable, program, tmp_path, str(KILLS), str(seed)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    kills, _, last, _ = done.stdout.split()
    assert int(kills) == KILLS
    # It did get somewhere: most children complete no more than a save or two before they are killed.
    assert int(last) > KILLS // 10
