"""New tensors over new storages: everything but the device is as in the old ones."""

from __future__ import annotations

from typing import Any

import torch

from forebay._tensors import describe_like, is_dtensor
from forebay.sleep.walk import PLAIN, dense


class Rebuild:
    """Makes one new tensor for each old one.

    Parameters
    ----------
    storages
        The new storages, by the identities of the old ones.
    device
        Where tensors go that are no views of storages, such as sparse ones.
    """

    def __init__(self, storages: dict[int, torch.UntypedStorage], device: torch.device) -> None:
        self._storages = storages
        self._device = device
        # Old and new ones, by the ids of the old ones.
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensor(self, old: torch.Tensor) -> torch.Tensor:
        """Return the new tensor of an old one; an old one that need not move is returned unchanged."""
        if id(old) not in self._made:
            new = self._new(old)
            self._made[id(old)] = (old, new)
            if new is not old:
                self._finish(old, new)
        return self._made[id(old)][1]

    def _new(self, old: torch.Tensor) -> torch.Tensor:
        if not is_strided(old):
            new = old.to(self._device)
            is_parameter = isinstance(old, torch.nn.Parameter)
            return torch.nn.Parameter(new, old.requires_grad) if is_parameter else new.requires_grad_(old.requires_grad)
        flatten = None if type(old) in PLAIN else getattr(old, "__tensor_flatten__", None)
        if flatten is None:
            return self._over_storage(old)
        names, context = flatten()
        inner = {name: self.tensor(getattr(old, name)) for name in names}
        if all(inner[name] is getattr(old, name) for name in names):
            return old
        kind: Any = type(old)
        new = kind.__tensor_unflatten__(inner, context, old.size(), old.stride())
        if isinstance(old, torch.nn.Parameter):
            return torch.nn.Parameter(new, requires_grad=old.requires_grad)
        found: torch.Tensor = new.requires_grad_(old.requires_grad)
        return found

    def _over_storage(self, old: torch.Tensor) -> torch.Tensor:
        storage = self._storages.get(old.untyped_storage()._cdata)
        if storage is None:
            return old
        new = torch.empty(0, dtype=old.dtype, device=storage.device)
        new.set_(storage, old.storage_offset(), old.size(), old.stride())
        # The storage has the elements as they are before they are conjugated or negated.
        if old.is_conj():
            new = new.conj()
        if old.is_neg():
            new = torch._neg_view(new)
        if type(old) is torch.Tensor:
            return new.requires_grad_(old.requires_grad)
        return torch.Tensor._make_subclass(type(old), new, old.requires_grad)

    def _finish(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Give a new tensor the attributes and the gradient of the old one."""
        mine = vars(new)
        for name, value in vars(old).items():
            if name not in mine:
                setattr(new, name, value)
        if is_dtensor(old):
            describe_like(old, new)
        if (gradient := gradient_of(old)) is not None:
            new.grad = self.tensor(gradient)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's gradient; None if it has none."""
    return tensor.grad if tensor.is_leaf else None


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of storages, which can be moved without it."""
    return all(part.layout == torch.strided and not part.is_quantized for part in dense(tensor))
