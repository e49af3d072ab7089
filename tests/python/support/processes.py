"""Children of a test: fresh interpreters that find these modules, and forks."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).parents[1]
"""The folder in which ``support`` is."""


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which a child imports what this process imports, and computes on one thread."""
    path = os.pathsep.join(dict.fromkeys([str(TESTS), *filter(None, sys.path)]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def python(code: str, *arguments: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter. Memory that it frees goes back to the system."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment(MALLOC_MMAP_THRESHOLD_="1000000"),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def python_in_silence(code: str, *arguments: object, timeout: float = 60) -> str:
    """Run code in a fresh interpreter in which warnings are errors; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    return done.stdout


def in_child(work: Callable[[], object], *, computes: bool = True) -> str:
    """Run in a forked child; return what it returned as text, or what it raised, and fail if it was killed.

    Work that computes with torch is skipped on a machine with a GPU.
    """
    if computes and torch.cuda.is_available():
        pytest.skip("where there is a GPU torch cannot compute gradients in a forked child")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks in a process that has threads, which is the very case.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork.
        try:
            text = str(work())
        except BaseException as failure:
            text = f"{type(failure).__name__}: {failure}"
            if isinstance(failure, AssertionError):
                text += traceback.format_exc()
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        if not select.select([reader], [], [], 50)[0]:
            os.kill(child, signal.SIGKILL)
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child ended with status {status}"
    return text
