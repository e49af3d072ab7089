"""Fixtures of the tests of sleep and of ``forebay.move``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.moving import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@pytest.fixture
def place(device: torch.device) -> Iterator[Place]:
    """Return a device from which mappings move to the host and back."""
    found = Place(device)
    with found.patched():
        yield found
