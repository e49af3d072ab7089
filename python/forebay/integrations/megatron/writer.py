"""Megatron's checkpoint writer reads tensors in other processes; pinned memory of the engine is not there.

The writer forks, or sends tensors to a process that it keeps. A forked child does not have the engine's memory, because
the GPU copies into it while the parent goes on. So the writer gets copies of such tensors, made before the fork. They
are also what an asynchronous save needs: the state of that moment.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from forebay._tensors import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def with_copies(prepare: Callable[..., None]) -> Callable[..., None]:
    """Return the writer's ``prepare_write_data`` with copies of tensors that a child cannot read.

    Parameters
    ----------
    prepare
        The method. It leaves a list of files in ``write_buckets``, each with its tensors.
    """

    @functools.wraps(prepare)
    def prepared(writer: Any, *args: Any, **keywords: Any) -> None:
        prepare(writer, *args, **keywords)
        writer.write_buckets = [
            (*names, (texts, [(item, _own(tensor)) for item, tensor in tensors]))
            for *names, (texts, tensors) in writer.write_buckets
        ]

    return prepared


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or its copy if torch has not allocated its memory."""
    if is_dtensor(tensor) or tensor.device.type != "cpu" or tensor.untyped_storage().resizable():
        return tensor
    return tensor.clone()
