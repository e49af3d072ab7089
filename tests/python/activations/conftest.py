"""Fixtures of the tests of activation offload: every test runs on the CPU backend, and on CUDA where there is one."""

import os
import sys
from pathlib import Path

import pytest
import torch

from forebay import _budget, _saved, activations
from forebay._core import Activations

# Test files are imported by path, so their common module has to be findable by name.
sys.path.insert(0, str(Path(__file__).parent))
# cuBLAS gives the same bits only with a workspace of its own; it reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
LINK_BYTES_PER_S = 1.5e8
"""So slow that a copy nobody waits for is late: computation is done long before."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the model is."""
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def meter(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """Count memory on the CPU as torch does on a GPU."""
    from budget_helpers import Counted, CountedMeter

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
def one_thread():
    """Compute small tensors on one thread: several would wait for each other on a machine that others use too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
