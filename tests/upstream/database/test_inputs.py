"""Every input of torch's database: forebay's optimizer against torch's of the same name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from database.conftest import DEVICE, make
from harness.swap import NAMES, TORCHS
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

INFOS = {info.name: info for info in optim_db if info.name in NAMES}
# forebay refuses a differentiable step; torch's own, and forebay's reason, are in test_errors.py.
INPUTS = [
    pytest.param(name, found, id=f"{name}-{found.desc}")
    for name, info in INFOS.items()
    for found in _get_optim_inputs_including_global_cliquey_kwargs(DEVICE, torch.float32, info, ("differentiable",))
    if not found.kwargs.get("capturable")
]
SCHEDULES = [
    pytest.param(name, schedules, id=f"{name}-{place}")
    for name, info in INFOS.items()
    for place, schedules in enumerate(info.scheduler_inputs)
]
SHAPES = [(7,), (3, 5), (), (2, 3, 4), (1,), (0,)]
STEPS = 6


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(5)
    return [torch.nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in SHAPES]


def set_gradients(found: list[torch.nn.Parameter], step: int) -> None:
    """Give each parameter a gradient, but in one step none to the first."""
    torch.manual_seed(100 + step)
    for place, parameter in enumerate(found):
        gradient = torch.randn_like(parameter)
        parameter.grad = None if place == 0 and step == 2 else gradient


def both(name: str, keywords: dict[str, Any], options: dict[str, Any], groups: bool = False) -> Any:
    """Return parameters and optimizer under test, then torch's own over equal parameters."""
    for is_ours in (True, False):
        found = parameters()
        given: Any = [{"params": found[:2], "lr": 0.05}, {"params": found[2:]}] if groups else found
        own = copy.deepcopy(keywords)
        yield found, make(name, given, own, options) if is_ours else TORCHS[name](given, **own)


def assert_same(one: Any, other: Any) -> None:
    """Compare parameters and state: on CUDA bit for bit with torch's fused kernels, else within a few roundings."""
    (found, optimizer), (expected, reference) = one, other
    exact = DEVICE == "cuda" and reference.defaults["fused"]
    # Parameters are numbers near 1, and the smallest learning rate is 1e-3: a wrong digit in any number shows.
    near = {"rtol": 0, "atol": 0 if exact else 1e-6}
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **near)
    got, wanted = optimizer.state_dict(), reference.state_dict()
    for group, theirs in zip(got["param_groups"], wanted["param_groups"], strict=True):
        assert group.keys() >= theirs.keys()
    assert got["state"].keys() == wanted["state"].keys()
    for number, values in wanted["state"].items():
        for key, value in values.items():
            if value is not None:
                # torch may keep a step's number on the parameter's device.
                torch.testing.assert_close(got["state"][number][key], value, **near, check_device=False)


@pytest.mark.parametrize(("name", "found"), INPUTS)
@pytest.mark.parametrize("groups", [False, True], ids=["list", "groups"])
def test_steps(name: str, found: OptimizerInput, groups: bool, options: dict[str, Any]) -> None:
    ours, theirs = both(name, found.kwargs, options, groups)
    for step in range(STEPS):
        for side, optimizer in (ours, theirs):
            set_gradients(side, step)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(ours, theirs)


@pytest.mark.parametrize(("name", "found"), INPUTS)
def test_state_goes_both_ways(name: str, found: OptimizerInput, options: dict[str, Any]) -> None:
    ours, theirs = both(name, found.kwargs, options)
    for step in range(STEPS):
        for side, optimizer in (ours, theirs):
            set_gradients(side, step)
            optimizer.step()
        # A copy, because torch's optimizers hand out and keep their own tensors.
        saved = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in (ours, theirs)]
        ours[1].load_state_dict(saved[1])
        theirs[1].load_state_dict(saved[0])
    assert_same(ours, theirs)


@pytest.mark.parametrize(("name", "schedules"), SCHEDULES)
def test_schedulers(name: str, schedules: Any, options: dict[str, Any]) -> None:
    ours, theirs = both(name, {"lr": 0.1}, options)
    for side, optimizer in (ours, theirs):
        made = [schedule(optimizer) for schedule in schedules]
        for step in range(STEPS):
            set_gradients(side, step)
            optimizer.step()
            for schedule in made:
                if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    schedule.step(1.0)
                else:
                    schedule.step()
    assert_same(ours, theirs)
    assert ours[1].param_groups[0]["lr"] == theirs[1].param_groups[0]["lr"]


def test_the_database_has_what_is_tested() -> None:
    assert sorted(INFOS) == sorted(NAMES)
    assert all(isinstance(info, OptimizerInfo) for info in INFOS.values())
