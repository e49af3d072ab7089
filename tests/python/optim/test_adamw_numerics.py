"""forebay.AdamW computes what torch.optim.AdamW computes.

On CUDA the bits are those of ``torch.optim.AdamW(fused=True)`` of torch 2.11. Elsewhere each operation may round once,
so every step is compared with the same step in f64, and whole runs with torch's within the bounds that follow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import forebay
from support.optim import KINDS, SHAPES, clone, give_gradients, groups_of, make, snapshot, train
from support.tensors import assert_same, needs_cuda

U = 2.0**-24
"""Half a unit in the last place of f32: the error of one operation, relative to its result."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "maximize": {"maximize": True},
    "amsgrad": {"amsgrad": True},
    "amsgrad and maximize": {"amsgrad": True, "maximize": True},
    "no decay": {"weight_decay": 0.0},
    "strong decay": {"weight_decay": 0.5},
    "other betas and eps": {"betas": (0.5, 0.7), "eps": 1e-3},
    "beta of zero": {"betas": (0.0, 0.0)},
    "rate of zero": {"lr": 0.0},
}


@pytest.fixture(params=CASES)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments that both optimizers take."""
    return {"lr": 1e-2, **CASES[request.param]}


def single(value: float) -> float:
    """Round to f32: the kernels know hyper-parameters in f32."""
    return float(np.float32(value))


def check_step(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], grad: torch.Tensor, group: Any) -> None:
    """Assert that one step is AdamW's, with an error of at most one rounding for each operation."""
    old = {kind: value.double() for kind, value in before.items()}
    new = {kind: value.double() for kind, value in after.items()}
    beta1, beta2 = map(single, group["betas"])
    lr, eps, weight_decay = single(float(group["lr"])), single(group["eps"]), single(group["weight_decay"])
    g = grad.double() * (-1 if group["maximize"] else 1)
    t = int(after["step"])
    assert t == int(before["step"]) + 1

    exp_avg = beta1 * old["exp_avg"] + (1 - beta1) * g
    bound = 1.01 * U * (exp_avg.abs() + 2 * (1 - beta1) * g.abs()) + 1e-44
    assert ((new["exp_avg"] - exp_avg).abs() <= bound).all()

    exp_avg_sq = beta2 * old["exp_avg_sq"] + (1 - beta2) * g * g
    bound = 1.01 * U * (exp_avg_sq + 3 * (1 - beta2) * g * g) + 1e-44
    assert ((new["exp_avg_sq"] - exp_avg_sq).abs() <= bound).all()

    second = new["exp_avg_sq"]
    if group["amsgrad"]:
        second = torch.maximum(old["max_exp_avg_sq"], second)
        assert torch.equal(new["max_exp_avg_sq"], second)

    # A power may be off by two units in its last place (CUDA's powf), and the complements magnify that.
    complement1, complement2 = 1 - beta1**t, 1 - beta2**t
    update = lr / complement1 * new["exp_avg"] / (second.sqrt() / complement2**0.5 + eps)
    param = old["param"] * (1 - lr * weight_decay) - update
    bound = (
        1.01 * U * (old["param"].abs() * (1 + 2 * lr * weight_decay) + param.abs())
        + U * (10 + 4 / complement1 + 4 / complement2) * update.abs()
        + 1e-44
    )
    assert ((new["param"] - param).abs() <= bound).all()


def test_every_step_is_adamw_up_to_rounding(device: torch.device, options: dict[str, Any]) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, **options)
    optimizer.prepare()
    for step in range(12):
        give_gradients(parameters, step)
        before = snapshot(optimizer, parameters)
        optimizer.step()
        after = snapshot(optimizer, parameters)
        for old, new, parameter in zip(before, after, parameters, strict=True):
            check_step(old, new, parameter.grad.cpu(), optimizer.param_groups[0])


def assert_close_to_torch(
    ours: torch.optim.Optimizer, mine: list[Any], theirs: torch.optim.Optimizer, others: list[Any], steps: int
) -> None:
    """Assert equality within what rounding of operations and of the betas to f32 can make."""
    group_of = {id(parameter): group for group in ours.param_groups for parameter in group["params"]}
    for parameter, other in zip(mine, others, strict=True):
        group = group_of[id(parameter)]
        state, reference = ours.state[parameter], theirs.state[other]
        assert state.keys() == reference.keys()
        assert float(state["step"]) == float(reference["step"]) == steps
        beta1, beta2 = group["betas"]
        # 1 - beta in f32 is off by up to U, which is large relative to a small difference.
        relative1, relative2 = U * (3 * steps + 1 / (1 - beta1)), U * (4 * steps + 1 / (1 - beta2))
        for kind, relative in (("exp_avg", relative1), ("exp_avg_sq", relative2), ("max_exp_avg_sq", relative2)):
            if kind in state and parameter.numel():
                value = reference[kind].cpu()
                torch.testing.assert_close(state[kind].cpu(), value, rtol=relative, atol=relative * 4)
        rate = 3e-2
        absolute = steps * (rate * (relative1 + relative2) * 3 + 4 * U)
        torch.testing.assert_close(parameter.detach(), other.detach(), rtol=4 * U * steps, atol=absolute)


def test_a_run_is_torchs(device: torch.device, options: dict[str, Any]) -> None:
    mine = make(device=device)
    others = clone(mine)
    ours, theirs = forebay.AdamW(mine, **options), torch.optim.AdamW(others, **options)
    train(ours, mine, 15)
    train(theirs, others, 15)
    assert_close_to_torch(ours, mine, theirs, others, 15)


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
def test_groups_and_a_scheduler_are_torchs(device: torch.device, tensor_lr: bool) -> None:
    mine = make(device=device)
    others = clone(mine)
    lr = torch.tensor(2e-2) if tensor_lr else 2e-2
    groups, reference_groups = groups_of(mine), groups_of(others)
    if tensor_lr:
        for group in (*groups, *reference_groups):
            group["lr"] = torch.tensor(group.get("lr", 2e-2))
    ours = forebay.AdamW(groups, lr=lr)
    theirs = torch.optim.AdamW(reference_groups, lr=lr, foreach=False)
    for optimizer, parameters in ((ours, mine), (theirs, others)):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
        train(optimizer, parameters, 12, after=scheduler.step)
    assert [float(group["lr"]) for group in ours.param_groups] == [float(group["lr"]) for group in theirs.param_groups]
    assert float(ours.param_groups[0]["lr"]) < 1e-3
    assert_close_to_torch(ours, mine, theirs, others, 12)


def test_the_rate_is_read_at_every_step(device: torch.device, placement: str) -> None:
    parameters = make([(10,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, weight_decay=0.0, placement=placement)
    train(optimizer, parameters, 2)
    optimizer.param_groups[0]["lr"] = 0.0
    before = snapshot(optimizer, parameters)
    train(optimizer, parameters, range(2, 3))
    after = snapshot(optimizer, parameters)
    assert torch.equal(before[0]["param"], after[0]["param"])
    assert not torch.equal(before[0]["exp_avg"], after[0]["exp_avg"])


def test_a_rate_in_a_tensor_is_read_at_every_step(device: torch.device, placement: str) -> None:
    ends = []
    for as_tensor in (True, False):
        parameters = make([(10,)], device=device)
        optimizer = forebay.AdamW(parameters, lr=torch.tensor(0.5) if as_tensor else 0.5, placement=placement)
        train(optimizer, parameters, 1)
        if as_tensor:
            optimizer.param_groups[0]["lr"].fill_(0.25)
        else:
            optimizer.param_groups[0]["lr"] = 0.25
        train(optimizer, parameters, range(1, 3))
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


def test_other_numbers_of_a_group_are_read_at_every_step(device: torch.device) -> None:
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    changed = {"betas": (0.5, 0.6), "eps": 1e-2, "weight_decay": 0.0, "maximize": True}
    parameters = make([(50,)], device=device)
    optimizer = forebay.AdamW(parameters, **options)
    train(optimizer, parameters, 3)
    optimizer.param_groups[0].update(changed)
    before = snapshot(optimizer, parameters)
    train(optimizer, parameters, range(3, 4))
    after = snapshot(optimizer, parameters)
    check_step(before[0], after[0], parameters[0].grad.cpu(), {**optimizer.param_groups[0]})


def test_late_steps_use_the_right_bias_corrections(device: torch.device, placement: str) -> None:
    # 4095, 4096 and 4097 lie around the end of the first table of powers.
    parameters = make([(10,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, betas=(0.9, 0.9995))
    optimizer.prepare()
    optimizer.state[parameters[0]]["step"].fill_(4094)
    for step in range(4):
        give_gradients(parameters, step)
        before = snapshot(optimizer, parameters)
        optimizer.step()
        check_step(before[0], snapshot(optimizer, parameters)[0], parameters[0].grad.cpu(), optimizer.param_groups[0])
    assert optimizer.state[parameters[0]]["step"].item() == 4098


def test_non_finite_gradients_give_what_torch_gives(device: torch.device, placement: str) -> None:
    mine = make([(8,)], device=device)
    others = clone(mine)
    for optimizer, parameters in (
        (forebay.AdamW(mine, amsgrad=True, placement=placement), mine),
        (torch.optim.AdamW(others, amsgrad=True), others),
    ):
        for step in range(3):
            give_gradients(parameters, step)
            if step == 1:
                parameters[0].grad[0:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
            optimizer.step()
    assert torch.equal(mine[0].isnan(), others[0].isnan())
    assert mine[0].isnan().sum() == 3


@needs_cuda
@pytest.mark.skipif(not torch.__version__.startswith("2.11."), reason="other versions' fused kernels differ")
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
def test_bits_are_those_of_the_fused_kernel(options: dict[str, Any], cut: bool) -> None:
    mine = make([*SHAPES, (1023, 65)], device="cuda")
    others = clone(mine)
    ours = forebay.AdamW(mine, **options, chunk_bytes=1 << 15 if cut else 1 << 24)
    theirs = torch.optim.AdamW(others, **options, fused=True)
    for step in range(100):
        for parameters, optimizer in ((mine, ours), (others, theirs)):
            give_gradients(parameters, step)
            optimizer.step()
    kinds = ["param", "step", *KINDS[: 3 if options.get("amsgrad") else 2]]
    assert_same(snapshot(ours, mine), snapshot(theirs, others), kinds=kinds)
