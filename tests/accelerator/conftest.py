"""Tests that run on the fake accelerator, in processes of their own: it is torch's accelerator from here on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from support import fake
from support.broken import Broken

if TYPE_CHECKING:
    from collections.abc import Iterator

fake.enable()


@pytest.fixture
def device() -> torch.device:
    """Where models and optimizers are."""
    return torch.device("fake", 0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: a kernel that is cut for several rounds the last elements of each part its own way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.accelerator.synchronize()
    torch.set_num_threads(threads)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    """Give a driver to take waits out of."""
    return Broken(monkeypatch)
