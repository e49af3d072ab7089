"""Fixtures of the optimizer's tests: every test runs on the CPU, and on CUDA where there is one."""

import sys
from pathlib import Path

import pytest
import torch

# Test files are imported by path, so their common module has to be findable by name.
sys.path.insert(0, str(Path(__file__).parent))

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the parameters are."""
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(params=["stream", "resident", "host", "hybrid"])
def placement(request: pytest.FixtureRequest) -> str:
    """Where the state is."""
    return str(request.param)
