"""Where the checkpoint tests find what they share, and where their models are."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Test files are imported by path, so their common modules have to be findable by name.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "optim"))


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Where models are."""
    return str(request.param)


@pytest.fixture
def no_save_is_left() -> Iterator[None]:
    """End what a test has left under way."""
    from async_helpers import end_of_saves

    yield
    end_of_saves()
