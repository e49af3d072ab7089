"""Tensors in mappings move between a GPU and pinned host memory: the mapping stays, its tensors are replaced.

A :class:`forebay.Sleeper` keeps tensors the same objects, and nothing can read them while they sleep. ``move`` is for
code that replaces tensors with ``state[key] = tensor.to(device)`` and reads them on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay._device import device_named, is_cpu
from forebay.moving.passes import run

if TYPE_CHECKING:
    import torch

__all__ = ["move"]


def move(mapping: Any, device: torch.device | str) -> dict[str, float | int]:
    """Move every tensor of a mapping to a device, all of them in one pass. The mapping is edited in place.

    Dicts and lists stay the same objects, also nested ones, and get new tensors. A tuple of tensors is replaced. Keys,
    values that are no tensors, and tensors that are on the device already stay. New tensors have the shapes, strides,
    offsets, types, gradients and attributes of the old ones. Parameters stay parameters, and DTensors stay DTensors. A
    tensor that is in the mapping twice is there twice afterwards, and views of one storage are views of one storage.
    Whole storages move: a view takes all of its storage with it.

    On the way to the CPU, the bytes of a GPU's tensors go into pinned memory, one slab for the mapping. The next call
    for it uses the slab again, each tensor at its old address if its size is the same, and pins more only if it must.
    The slab is freed with the last of the tensors. A tensor that somebody still holds is never overwritten.

    State of forebay's optimizers stays where it is: they offload themselves.

    Parameters
    ----------
    mapping
        A dict or any other mapping, such as ``optimizer.state`` or a state dict.
    device
        ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.

    Returns
    -------
    dict
        ``bytes`` and ``tensors`` that were moved, ``seconds`` of the whole call, ``gbps``, ``pin_s`` of these seconds
        for pinning memory, and ``pinned_bytes`` of the slabs that were used.

    Raises
    ------
    forebay.OptionError
        If a tensor cannot be moved or replaced; the message names the key. Nothing was moved then.
    """
    target = device_named(device)
    return run(mapping, target, to_host=is_cpu(target))
