"""Clipping of the gradients' global norm inside the step."""

from __future__ import annotations

import pytest
import torch

import forebay
from support.optim import TINY, give_gradients, make, run, snapshot, train
from support.tensors import assert_same, bits, needs_cuda

SHAPES = ((300, 7), (5,), (1000,), ())


def total_norm(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.cat([parameter.grad.reshape(-1).double() for parameter in parameters]))


@pytest.mark.parametrize("limit", [0.5, 3, 1e6], ids=["clips", "clips with an int", "does not clip"])
def test_clipping_inside_equals_clipping_before(device: torch.device, placement: str, limit: float) -> None:
    ends = []
    for inside in (True, False):
        parameters = make(SHAPES, device=device)
        optimizer = forebay.AdamW(
            parameters, lr=0.1, placement=placement, max_grad_norm=limit if inside else None, chunk_bytes=TINY
        )
        for step in range(5):
            give_gradients(parameters, step)
            if not inside:
                torch.nn.utils.clip_grad_norm_(parameters, limit)
            optimizer.step()
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


@pytest.mark.parametrize("dtype", [[torch.float32], [torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16]])
def test_clipped_steps_are_the_same_at_every_placement(device: torch.device, dtype: list[torch.dtype]) -> None:
    common = {"device": device, "dtype": dtype, "max_grad_norm": 0.7}
    streamed = run(SHAPES, chunk_bytes=TINY, **common)
    assert_same(streamed, run(SHAPES, placement="resident", **common))
    assert_same(streamed, run(SHAPES, **common))


def test_a_clipped_run_is_torchs(device: torch.device) -> None:
    mine, others = make(SHAPES, device=device), make(SHAPES, device=device)
    ours, theirs = forebay.AdamW(mine, lr=0.1, max_grad_norm=0.5), torch.optim.AdamW(others, lr=0.1)
    for step in range(10):
        give_gradients(mine, step)
        ours.step()
        give_gradients(others, step)
        torch.nn.utils.clip_grad_norm_(others, 0.5)
        theirs.step()
    for a, b in zip(mine, others, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=2e-5)


def test_the_norm_is_that_of_all_gradients_and_they_stay_as_they_are(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.AdamW(
        [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}], placement=placement, max_grad_norm=0.1
    )
    assert optimizer.grad_norm is None
    give_gradients(parameters, 0)
    kept = [bits(parameter.grad) for parameter in parameters]
    optimizer.step()
    norm = optimizer.grad_norm
    assert norm.shape == ()
    assert norm.device == device
    torch.testing.assert_close(norm.double(), total_norm(parameters), rtol=1e-5, atol=0)
    assert all(torch.equal(bits(p.grad), before) for p, before in zip(parameters, kept, strict=True))


@pytest.mark.parametrize("dtype", [[torch.bfloat16], [torch.float16], [torch.float32, torch.bfloat16, torch.float16]])
def test_the_norm_of_half_precision_gradients_is_exact(device: torch.device, dtype: list[torch.dtype]) -> None:
    parameters = make(SHAPES, device=device, dtype=dtype)
    optimizer = forebay.AdamW(parameters, max_grad_norm=0.1)
    give_gradients(parameters, 0)
    optimizer.step()
    assert optimizer.grad_norm.dtype == torch.float32
    torch.testing.assert_close(optimizer.grad_norm.double(), total_norm(parameters), rtol=1e-6, atol=0)


def test_the_norm_of_half_precision_gradients_does_not_overflow(device: torch.device) -> None:
    parameter = torch.nn.Parameter(torch.zeros(100, device=device, dtype=torch.float16))
    parameter.grad = torch.full_like(parameter, 60000.0)
    optimizer = forebay.AdamW([parameter], lr=0.1, max_grad_norm=1.0, skip_nonfinite=True)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(600000.0, rel=1e-3)
    assert float(parameter.detach().abs().min()) > 0


def test_parameters_without_a_gradient_do_not_enter_the_norm(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.AdamW(parameters, max_grad_norm=1.0)
    give_gradients(parameters[:2], 0)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm.double(), total_norm(parameters[:2]), rtol=1e-5, atol=0)


def test_without_clipping_there_is_no_norm(device: torch.device) -> None:
    parameters = make([(5,)], device=device)
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    assert optimizer.grad_norm is None


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_skipping_changes_nothing(device: torch.device, placement: str, bad: float) -> None:
    parameters = make(SHAPES, device=device, dtype=[torch.float32, torch.bfloat16])
    optimizer = forebay.AdamW(
        parameters, lr=0.1, weight_decay=0.5, placement=placement, max_grad_norm=1.0, skip_nonfinite=True
    )
    train(optimizer, parameters, 2)
    before = snapshot(optimizer, parameters)
    versions = [parameter._version for parameter in parameters]
    give_gradients(parameters, 5)
    parameters[1].grad[2] = bad
    optimizer.step()
    assert_same(before, snapshot(optimizer, parameters))
    assert [parameter._version for parameter in parameters] == versions
    assert not torch.isfinite(optimizer.grad_norm)
    train(optimizer, parameters, range(2, 3))
    assert [int(values["step"]) for values in snapshot(optimizer, parameters)] == [3] * len(parameters)
    assert_same(
        snapshot(optimizer, parameters),
        run(
            SHAPES,
            device=device,
            dtype=[torch.float32, torch.bfloat16],
            steps=3,
            lr=0.1,
            weight_decay=0.5,
            max_grad_norm=1.0,
        ),
    )


def test_skipping_the_first_step_changes_nothing(device: torch.device, placement: str) -> None:
    parameters = make([(5,)], device=device)
    before = parameters[0].detach().clone()
    optimizer = forebay.AdamW(parameters, placement=placement, max_grad_norm=1.0, skip_nonfinite=True)
    parameters[0].grad = torch.full_like(parameters[0], float("nan"))
    optimizer.step()
    assert torch.equal(parameters[0], before)
    train(optimizer, parameters, 1)
    assert_same(snapshot(optimizer, parameters), run([(5,)], device=device, steps=1, lr=1e-3, max_grad_norm=1.0))


def test_without_skipping_a_bad_gradient_does_what_torch_does(device: torch.device, placement: str) -> None:
    # clip_grad_norm_ multiplies with max_norm / inf = 0, so finite gradients become 0 and infinite ones NaN.
    ends = []
    for inside in (True, False):
        parameters = make([(8,), (4,)], device=device)
        optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement, max_grad_norm=1.0 if inside else None)
        give_gradients(parameters, 0)
        parameters[0].grad[3] = float("inf")
        if not inside:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        ends.append(snapshot(optimizer, parameters))
    for kind in ("param", "exp_avg", "exp_avg_sq", "step"):
        for a, b in zip(*ends, strict=True):
            torch.testing.assert_close(a[kind], b[kind], rtol=0, atol=0, equal_nan=True)
    assert ends[0][0]["param"].isnan().sum() == 1


@needs_cuda
def test_the_norm_of_parameters_on_the_host_is_exact_too() -> None:
    expected = run(SHAPES, device="cpu", max_grad_norm=0.5, steps=1)
    parameters = make(SHAPES)
    optimizer = forebay.AdamW(parameters, lr=1e-2, max_grad_norm=0.5, device="cuda", chunk_bytes=TINY)
    train(optimizer, parameters, 1)
    assert_same(snapshot(optimizer, parameters), expected, kinds=("exp_avg", "exp_avg_sq"))
