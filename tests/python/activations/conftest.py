"""Fixtures of the tests of activation offload: every test runs on the CPU backend, and on CUDA where there is one."""

import os

import pytest
import torch

from forebay._core import Activations
from forebay.activations import handle as activations
from forebay.activations import saved as _saved
from forebay.activations.budget import controller as _budget
from support.budget import Counted, CountedMeter

# cuBLAS gives the same bits only with a workspace of its own; it reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

LINK_BYTES_PER_S = 1.5e8
"""So slow that a copy nobody waits for is late: computation is done long before."""


@pytest.fixture
def meter(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Count memory on the CPU as torch does on a GPU."""
    if device.type == "cuda":
        yield _budget.Meter(device)
        return
    with Counted() as counted:
        found = CountedMeter(device, counted)
        monkeypatch.setattr(_budget, "meter_of", lambda _: found)
        yield found


@pytest.fixture(autouse=True)
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have copies of the CPU backend take their time, and start without pinned memory of another test."""
    opened = _saved.open_engine

    def open_engine(device, fraction, max_in_flight_bytes, pinned_budget_bytes):
        if device.type == "cpu":
            return Activations("cpu", fraction, max_in_flight_bytes, pinned_budget_bytes, LINK_BYTES_PER_S)
        return opened(device, fraction, max_in_flight_bytes, pinned_budget_bytes)

    monkeypatch.setattr(_saved, "open_engine", open_engine)
    monkeypatch.setattr(activations, "_savers", {})


@pytest.fixture(autouse=True)
def same_bits_each_time():
    """Have CUDA's kernels give the same bits each time, so that any difference is ours."""
    if not torch.cuda.is_available():
        yield
        return
    ways = ("flash", "mem_efficient", "cudnn")
    for way in ways:
        getattr(torch.backends.cuda, f"enable_{way}_sdp")(False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    for way in ways:
        getattr(torch.backends.cuda, f"enable_{way}_sdp")(True)
