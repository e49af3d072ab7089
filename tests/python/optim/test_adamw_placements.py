"""Where state lies and how it is cut changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forebay
from support.optim import TINY, groups_of, make, run, snapshot, train
from support.tensors import assert_same, needs_cuda, same_bits

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

DTYPES = {"f32": (F32,), "bf16": (BF16,), "f16": (F16,), "mixed": (F32, BF16, F16)}


@pytest.fixture(params=DTYPES)
def dtypes(request: pytest.FixtureRequest) -> tuple[torch.dtype, ...]:
    """Types of the parameters, in turns."""
    return DTYPES[request.param]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}], ids=["plain", "amsgrad"])
@pytest.mark.parametrize("master_weights", [None, False])
def test_streamed_equals_resident(
    device: torch.device, dtypes: tuple[torch.dtype, ...], options: dict[str, Any], master_weights: bool | None
) -> None:
    common: dict[str, Any] = {"device": device, "steps": 10, "dtype": dtypes, "master_weights": master_weights}
    streamed = run(placement="stream", chunk_bytes=TINY, **common, **options)
    resident = run(placement="resident", **common, **options)
    assert_same(streamed, resident)


@pytest.mark.parametrize("slots", [2, 3, 4, 5])
def test_chunks_and_slots_change_no_bit(device: torch.device, dtypes: tuple[torch.dtype, ...], slots: int) -> None:
    large = run(device=device, dtype=dtypes, chunk_bytes=16 << 20)
    tiny = run(device=device, dtype=dtypes, chunk_bytes=TINY, slots=slots)
    odd = run(device=device, dtype=dtypes, chunk_bytes=5000, slots=slots)
    assert_same(tiny, large)
    assert_same(odd, large)


def test_tiny_chunks_do_cut_and_wrap(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, chunk_bytes=TINY, slots=2)
    train(optimizer, parameters, 1)
    elements = sum(parameter.numel() for parameter in parameters)
    assert optimizer.stats()["chunks"] >= elements * 8 // TINY > 2


def test_groups_are_the_same_at_every_placement(device: torch.device) -> None:
    ends = []
    for options in ({"placement": "resident"}, {"chunk_bytes": TINY}, {}):
        parameters = make(device=device, dtype=DTYPES["mixed"])
        optimizer = forebay.AdamW(groups_of(parameters), **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        train(optimizer, parameters, 6, after=scheduler.step)
        ends.append(snapshot(optimizer, parameters))
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


def test_neighbours_in_a_chunk_may_be_at_different_steps(device: torch.device) -> None:
    ends = []
    for options in ({"placement": "resident"}, {"chunk_bytes": TINY}, {}):
        parameters = make([(40,)] * 12, device=device)
        optimizer = forebay.AdamW(parameters, lr=1e-2, **options)
        for step in range(8):
            # Parameter i has a gradient at every (i + 1)-th step.
            train(optimizer, [p for i, p in enumerate(parameters) if step % (i + 1) == 0], range(step, step + 1))
            optimizer.zero_grad()
        ends.append(snapshot(optimizer, parameters))
    assert [int(values["step"]) for values in ends[0]] == [8, 4, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1]
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


@needs_cuda
@pytest.mark.parametrize("chunk_bytes", [TINY, 1 << 20])
def test_parameters_on_the_host_stream_through_the_gpu(dtypes: tuple[torch.dtype, ...], chunk_bytes: int) -> None:
    expected = run(device="cuda", steps=8, dtype=dtypes)
    parameters = make(dtype=dtypes)
    optimizer = forebay.AdamW(parameters, lr=1e-2, device="cuda", chunk_bytes=chunk_bytes)
    train(optimizer, parameters, 8)
    # Final on return: nothing waits between the step and this comparison.
    values = [parameter.detach().clone() for parameter in parameters]
    assert all(same_bits(value, end["param"]) for value, end in zip(values, expected, strict=True))
    assert_same(snapshot(optimizer, parameters), expected)
    assert all(parameter.device.type == "cpu" for parameter in parameters)


@needs_cuda
def test_parameters_of_host_and_gpu_mix_in_one_optimizer() -> None:
    shapes = [(300,)] * 6
    expected = run(shapes, device="cuda")
    parameters = make(shapes)
    mixed = [
        torch.nn.Parameter(parameter.detach().cuda()) if i % 2 else parameter for i, parameter in enumerate(parameters)
    ]
    optimizer = forebay.AdamW(mixed, lr=1e-2, chunk_bytes=TINY)
    train(optimizer, mixed, 6)
    assert_same(snapshot(optimizer, mixed), expected)
