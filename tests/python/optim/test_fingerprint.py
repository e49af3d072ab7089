"""Fingerprints of gradients: other bits or other places give other sums, on every device the same."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from forebay._fingerprint import COLUMNS, Fingerprint
from support.tensors import random

if TYPE_CHECKING:
    from collections.abc import Callable

# Around a word, a row of words and two rows, of either width, and a size that two rows divide.
SIZES = [1, 2, 3, 5, 8, 9, COLUMNS, 2 * COLUMNS, 4 * COLUMNS + 3, 8 * COLUMNS, 50_000]


def at_offset(values: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the values in memory that begins in the middle of a word."""
    room = torch.zeros(values.numel() + offset, dtype=values.dtype, device=values.device)
    return room[offset:].copy_(values)


def exchange(tensor: torch.Tensor) -> None:
    first, last = tensor[0].clone(), tensor[-1].clone()
    tensor[0], tensor[-1] = last, first


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "neg": lambda tensor: tensor.neg_(),
    "half": lambda tensor: tensor.mul_(0.5),
    "tiny": lambda tensor: tensor[-1:].mul_(1.02),
    "first": lambda tensor: tensor[:1].neg_(),
    "flip": lambda tensor: tensor.copy_(tensor.flip(0)),
    "roll": lambda tensor: tensor.copy_(tensor.roll(1)),
    "exchange words": lambda tensor: tensor[8:24].copy_(tensor[8:24].roll(8)),
    "exchange": exchange,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(device: torch.device, dtype: torch.dtype, change: str) -> None:
    for size, offset in itertools.product(SIZES, (0, 1, 3)):
        if size < {"flip": 2, "roll": 2, "exchange": 2, "exchange words": 32}.get(change, 1):
            continue
        tensor = at_offset(random((size,), size).to(device, dtype), offset)
        then = Fingerprint(tensor)
        assert Fingerprint.changed([then]) == [False]
        CHANGES[change](tensor)
        assert Fingerprint.changed([then]) == [True], (size, offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [1, 2, 4, 8])
def test_signs_that_alternate_and_flip_do_not_cancel_out(device: torch.device, dtype: torch.dtype, run: int) -> None:
    for size in SIZES:
        signs = 1.0 - 2.0 * (torch.arange(size, device=device) // run % 2)
        tensor = signs.to(dtype)
        then = Fingerprint(tensor)
        tensor.neg_()
        assert Fingerprint.changed([then]) == [True], size


def test_many_are_told_apart_at_once(device: torch.device) -> None:
    tensors = [random((100 + i,), i).to(device) for i in range(600)]
    fingerprints = [Fingerprint(tensor) for tensor in tensors]
    for i in (0, 255, 256, 599):
        tensors[i].neg_()
    assert [i for i, changed in enumerate(Fingerprint.changed(fingerprints)) if changed] == [0, 255, 256, 599]
    assert Fingerprint.changed([]) == []


def test_all_devices_agree(device: torch.device) -> None:
    values = random((100_003,), 1)
    assert torch.equal(Fingerprint(values).sums, Fingerprint(values.to(device)).sums.cpu())
