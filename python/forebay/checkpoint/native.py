"""Native checkpoints: columns of state that are kept in fewer bits than f32, in the files as they are in memory.

``torch.distributed.checkpoint`` plans with f32 tensors that stand for the columns. The writer looks up here what is
written instead, and the reader what can be read without a conversion. The format is in
``crates/engine/src/checkpoint/encoding.rs``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core
from forebay._device import CPU
from forebay._tensors import address, dense_strides, local, state_like, storage_address
from forebay.optim.packed import CompactMaster, Packed, standing_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    Parts = list[tuple[str, str, list[int]]]
    """For each part of an encoding: the ending of its name, its type as safetensors names it, and its shape."""


@dataclass(frozen=True)
class Kept:
    """A column as it is in memory at one moment: the local part of a tensor of a checkpoint."""

    packed: Packed
    # The encoding's name in a manifest, and what its parts are.
    encoding: str
    parts: Parts
    # Their memory, flat.
    tensors: list[torch.Tensor]
    # The tensor's dimensions in the order of the memory, if that is not row by row.
    order: list[int] | None
    # The name of the bf16 weight, for compact masters.
    weight: str | None
    # Held, so that no other tensor gets the address by which it is found.
    stand_in: torch.Tensor

    @property
    def bytes(self) -> int:
        """Bytes of its parts."""
        return sum(tensor.nbytes for tensor in self.tensors)


def order_of(parameter: torch.Tensor) -> list[int] | None:
    """Return the dimensions of a parameter's local part in the order of its state's memory; None if row by row."""
    inner = local(parameter)
    strides = dense_strides(inner)
    long = [dim for dim, side in enumerate(inner.shape) if side > 1]
    found = sorted(long, key=lambda dim: -strides[dim])
    # Dimensions of one element may be anywhere.
    return None if found == long else found + [dim for dim in range(inner.dim()) if dim not in long]


def encoding_of(packed: Packed) -> tuple[str, Parts] | None:
    """Return the name and the parts of a column's encoding; None if checkpoints have none for it."""
    shape = list(local(packed.parameter).shape)
    order = order_of(packed.parameter) or range(len(shape))
    return _core.checkpoint_encoding(packed.column, packed.format, [shape[dim] for dim in order])


@cache
def record_of(encoding: str) -> dict[str, Any]:
    """Return what a manifest says about an encoding of ours; the same dict each time."""
    found: dict[str, Any] = json.loads(_core.checkpoint_encoding_record(encoding))
    return found


def columns_of(contents: dict[str, Any]) -> dict[int, Kept]:
    """Return the columns for which tensors of a checkpoint's contents stand, by the address of those tensors.

    A compact master is among them if its weight is in the checkpoint too.
    """
    found: dict[int, Kept] = {}
    weights = contents.get("model", {})
    for name, state in contents.get("optimizer", {}).get("state", {}).items():
        for value in state.values():
            packed = standing_for(value)
            encoding = None if packed is None else encoding_of(packed)
            if packed is None or encoding is None:
                continue
            weight: str | None = None
            if isinstance(packed, CompactMaster):
                if not _is_weight(weights.get(name), packed.parameter):
                    continue
                weight = f"model.{name}"
            tensors = list(packed.values())
            kept = Kept(packed, *encoding, tensors, order_of(packed.parameter), weight, value)
            found[storage_address(local(value).untyped_storage())] = kept
    return found


def frozen(kept: Kept, tensors: Sequence[torch.Tensor]) -> tuple[int, Kept]:
    """Return a column over other memory, which a step does not change, and the address that stands for it."""
    # Not the tensor that stands for the optimizer's column: a save finds this one.
    scalar = torch.zeros((), dtype=torch.float32, device=CPU)
    parameter = kept.packed.parameter
    stand_in = state_like(parameter, scalar.expand(local(parameter).shape))
    of = Kept(kept.packed, kept.encoding, kept.parts, list(tensors), kept.order, kept.weight, stand_in)
    return address(scalar), of


def find(native: dict[int, Kept], value: object) -> Kept | None:
    """Return the column for which a tensor stands, if it is one of these."""
    if not native or not isinstance(value, torch.Tensor):
        return None
    inner = local(value)
    return native.get(storage_address(inner.untyped_storage())) if inner.numel() and inner.device == CPU else None


def readable_as_kept(
    packed: Packed, manifest: dict[str, Any], chunk: dict[str, Any], offsets: Sequence[int], lengths: Sequence[int]
) -> Parts | None:
    """Return the parts of a chunk if they can be read into a column as they are; else None.

    The whole chunk must be the whole local column, in the same format and the same order of memory.
    """
    inner = local(packed.parameter)
    mine = encoding_of(packed)
    if "encoding" not in chunk or mine is None or any(offsets):
        return None
    same_box = list(lengths) == chunk["shape"] == list(inner.shape)
    theirs = manifest["encodings"][chunk["encoding"]]
    rows = range(inner.dim())
    same_order = _long(chunk.get("order") or rows, inner.shape) == _long(
        order_of(packed.parameter) or rows, inner.shape
    )
    return mine[1] if same_box and same_order and theirs == record_of(mine[0]) else None


def _long(order: Sequence[int], shape: torch.Size) -> list[int]:
    """Return the dimensions that have more than one element."""
    return [dim for dim in order if shape[dim] > 1]


def _is_weight(value: object, parameter: torch.Tensor) -> bool:
    """Whether a model's tensor in a checkpoint is a parameter itself, in bf16."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.bfloat16
        and value.shape == parameter.shape
        and address(local(value)) == address(local(parameter))
    )
