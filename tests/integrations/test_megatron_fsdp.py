"""Megatron-FSDP with offloaded optimizer state, on two ranks: each case of ``megatron_fsdp_ranks.py``."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.processes import environment

SCRIPT = Path(__file__).with_name("megatron_fsdp_ranks.py")
WORLD, LIMIT_S = 2, 400

pytestmark = pytest.mark.timeout(LIMIT_S + 20)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Run all ranks; return what each of them printed."""
    folder = tmp_path_factory.mktemp("ranks")
    files = [folder / f"{rank}.txt" for rank in range(WORLD)]
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(folder)],
            env=environment(GLOO_SOCKET_IFNAME="lo"),
            stdout=file.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, file in enumerate(files)
    ]
    end = time.monotonic() + LIMIT_S
    try:
        # A rank that failed leaves the others waiting for it.
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            assert time.monotonic() < end, [file.read_text()[-2000:] for file in files]
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [file.read_text() for file in files]


@pytest.mark.parametrize("case", ["trains", "decouples", "same_keys", "resumes"])
def test_case_passes_on_every_rank(case, said):
    for rank, text in enumerate(said):
        assert f"passed: {case}\n" in text, f"rank {rank}: {text[-4000:]}"
