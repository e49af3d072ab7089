"""What the tests of torch's database share: where parameters are, and where forebay keeps its state."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from harness.swap import TORCHS, offload

import forebay

PLACEMENTS = ("stream", "host", "hybrid", "resident")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(name: str, params: Any, keywords: dict[str, Any], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer under test."""
    if os.environ["UPSTREAM_SIDE"] == "torch":
        return TORCHS[name](params, **keywords)
    if os.environ["UPSTREAM_THROUGH"] == "offload":
        return offload(TORCHS[name](params, **keywords), **options)
    made: torch.optim.Optimizer = getattr(forebay, name)(params, **keywords, **options)
    return made


@pytest.fixture(params=PLACEMENTS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the options that forebay gets."""
    return {"placement": request.param}
