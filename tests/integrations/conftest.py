"""How tests are spread over workers, and on how many threads they compute."""

from __future__ import annotations

import os
from typing import Any

import pytest

# Sums over several threads have other bits. Processes that a test starts inherit this.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file on one worker: they share a framework's import and what one of them starts."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)
