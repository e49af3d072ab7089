"""Fixtures of the tests of sleep and wake: every test runs on the CPU, and on CUDA where there is one."""

import sys
from pathlib import Path

import pytest
import torch

# Test files are imported by path, so their common module has to be findable by name.
sys.path.insert(0, str(Path(__file__).parent))

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where models and optimizers are."""
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["eager", "lazy"])
def lazy(request: pytest.FixtureRequest) -> bool:
    """How to wake."""
    return bool(request.param)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Several threads for small tensors cost more than they bring where other tests use the machine too."""
    torch.set_num_threads(1)
