"""Every error input of torch's database: the same type of error, and torch's own message in it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from database.conftest import DEVICE, make
from harness.swap import NAMES
from torch.testing._internal.common_optimizers import ErrorOptimizerInput, OptimizerErrorEnum, optim_db

# Most error inputs are given for the CPU only.
DEVICES = ("cpu",) if DEVICE == "cpu" else ("cpu", DEVICE)
ERRORS = [
    pytest.param(info.name, place, device, id=f"{info.name}-{device}-{place}-{found.optimizer_error_input.desc}")
    for info in optim_db
    if info.name in NAMES
    for device in DEVICES
    for place, found in enumerate(info.optim_error_inputs_func(device=device, dtype=torch.float32))
]


@pytest.mark.parametrize(("name", "place", "device"), ERRORS)
def test_errors(name: str, place: int, device: str, options: dict[str, Any]) -> None:
    # Made anew: inputs share parameters, and a test may have given them state.
    info = next(info for info in optim_db if info.name == name)
    found: ErrorOptimizerInput = info.optim_error_inputs_func(device=device, dtype=torch.float32)[place]
    asked = found.optimizer_error_input
    params = [torch.nn.Parameter(torch.randn(2, 3, device=device))] if asked.params is None else asked.params
    kind: type[Exception] = found.error_type
    if issubclass(kind, Warning):
        with pytest.warns(kind, match=found.error_regex):
            make(name, params, asked.kwargs, options)
        return
    if found.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
        with pytest.raises(kind, match=found.error_regex):
            make(name, params, asked.kwargs, options)
        return
    optimizer = make(name, params, asked.kwargs, options)
    with pytest.raises(kind, match=found.error_regex):
        optimizer.step()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("switch", ["capturable", "differentiable"])
def test_refused_by_name(name: str, switch: str, options: dict[str, Any]) -> None:
    params = [torch.nn.Parameter(torch.randn(2, 3, device=DEVICE))]
    if os.environ["UPSTREAM_SIDE"] == "torch":
        if name != "SGD" or switch != "capturable":
            make(name, params, {switch: True}, options)
        return
    with pytest.raises((TypeError, ValueError), match=switch):
        make(name, params, {switch: True}, options)
