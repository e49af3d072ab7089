"""Tensors from a seed, and their comparison bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return normal numbers on the CPU, the same ones on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers on the CPU: -0.0 is not 0.0, and a NaN is itself."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).clone()
    return flat.view(_INTEGERS.get(flat.element_size(), torch.uint8))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested dicts and lists, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def assert_same(a: Any, b: Any, *, kinds: Iterable[str] | None = None) -> None:
    """Assert that two tensors, lists or dicts of them have the same names and the same bits; name every difference.

    With ``kinds`` only these keys of the innermost dicts are compared.
    """
    pairs = list(_pairs(a, b, None if kinds is None else list(kinds), ""))
    assert pairs, "nothing to compare"
    different = []
    for name, left, right in pairs:
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            different.append(f"{name}: {left.dtype} {tuple(left.shape)}, not {right.dtype} {tuple(right.shape)}")
        elif differ := int((bits(left) != bits(right)).sum()):
            different.append(f"{name}: {differ} of {left.numel()} elements differ")
    assert not different, f"{len(different)} of {len(pairs)} tensors differ: " + "; ".join(different[:20])


def _pairs(a: Any, b: Any, kinds: list[str] | None, name: str) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield what belongs together, under its name."""
    if isinstance(a, torch.Tensor):
        yield name, a, b
    elif isinstance(a, Mapping):
        if kinds is None:
            assert a.keys() == b.keys(), f"{name}: {sorted(map(str, a.keys() ^ b.keys()))} only on one side"
        for key in a if kinds is None else kinds:
            yield from _pairs(a[key], b[key], kinds, f"{name}.{key}" if name else str(key))
    else:
        assert len(a) == len(b), f"{name}: {len(a)} and {len(b)} tensors"
        for i, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _pairs(left, right, kinds, f"{name}[{i}]")
