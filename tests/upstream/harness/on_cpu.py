"""Runs tests that ask for CUDA without a GPU. They show results and where tensors are, nothing about streams."""

from __future__ import annotations

import pytest
import torch
from pretend_cuda import PretendCuda

pretend = PretendCuda()
# From here to the end of the process: files look for CUDA while pytest collects them.
pretend.__enter__()
# There is no stream to record, and torch would refuse ours.
torch.Tensor.record_stream = lambda *_: None  # type: ignore[assignment]
# AReaL asks for the maker of the GPU.
torch.cuda.get_device_name = lambda *_: "NVIDIA, pretended"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Free the tensors of a test, which are kept alive as long as they must be known as the host's."""
    pretend._host.clear()
