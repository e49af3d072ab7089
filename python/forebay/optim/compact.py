"""Compact masters: what is kept of an f32 master beside its bf16 weight, and the f32 values that users see.

The format is in ``crates/device/src/update/master.rs``: 16 bits and a carry for each element, 17 bits in all.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from forebay import _core
from forebay._device import CPU
from forebay._tensors import address, check_memory, dense_strides, in_order, local, state_like, storage_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay._core import HostView

F32, COMPACT = "f32", "compact"
"""The formats of a master, as the engine names them; no master is an empty name."""

LOW, CARRY = "master_low", "master_carry"
"""The engine's columns of a compact master."""

_standing: weakref.WeakValueDictionary[int, CompactMaster] = weakref.WeakValueDictionary()
"""By the address of their storage: the masters for which tensors stand."""


class CompactMaster(dict[str, torch.Tensor]):
    """The lower halves and carries of one parameter's master, by the engine's names.

    A dict, so that whoever walks through nested state finds the memory. ``read`` returns the master itself.
    """

    def __init__(self, parameter: torch.Tensor, low: torch.Tensor, carry: torch.Tensor) -> None:
        super().__init__({LOW: low, CARRY: carry})
        self.parameter = parameter
        self._standing: torch.Tensor | None = None

    @classmethod
    def over(cls, parameter: torch.Tensor, low: HostView, carry: HostView) -> CompactMaster:
        """Return the master over pinned memory."""
        if local(parameter).numel() == 0:
            return cls.resident(parameter, CPU)
        return cls(parameter, torch.frombuffer(low, dtype=torch.int16), torch.frombuffer(carry, dtype=torch.uint8))

    @classmethod
    def resident(cls, parameter: torch.Tensor, device: torch.device | None = None) -> CompactMaster:
        """Return a master that equals its weight, in new memory; by default on the parameter's device."""
        inner = local(parameter)
        device, elements = device or inner.device, inner.numel()
        low = torch.zeros(elements, dtype=torch.int16, device=device)
        return cls(parameter, low, torch.zeros(-(-elements // 8), dtype=torch.uint8, device=device))

    def read(self) -> torch.Tensor:
        """Return a copy of the master as f32: on the host, or on the device if it is kept there."""
        inner = local(self.parameter).detach()
        strides, elements = dense_strides(inner), inner.numel()
        flat = torch.empty(elements, dtype=torch.float32, device=CPU)
        self._check_awake()
        if elements:
            weights = torch.as_strided(in_order(inner, strides), (elements,), (1,)).to(CPU)
            low, carry = self[LOW].to(CPU), self[CARRY].to(CPU)
            _core.read_masters(address(weights), address(low), address(carry), address(flat), elements)
        master = torch.as_strided(flat.to(self[LOW].device), inner.shape, strides)
        return state_like(self.parameter, master)

    def stand_in(self) -> torch.Tensor:
        """Return a tensor of the master's shape and type that takes no memory; ``standing_for`` finds the master.

        Saves and loads of checkpoints work with it, so that they need memory for a part of the masters at a time.
        """
        inner = local(self.parameter)
        if not inner.numel():
            return self.read()
        if self._standing is None:
            self._standing = torch.zeros((), dtype=torch.float32, device=CPU)
            _standing[address(self._standing)] = self
        return state_like(self.parameter, self._standing.expand(inner.shape))

    def write(self, value: torch.Tensor) -> None:
        """Keep this master. It counts from the moment at which the parameter is its rounding."""
        inner = local(self.parameter)
        strides, elements = dense_strides(inner), inner.numel()
        if not elements or standing_for(value) is self:
            return
        self._check_awake()
        masters = torch.empty_strided(inner.shape, strides, dtype=torch.float32, device=CPU)
        masters.copy_(local(value).detach().reshape(inner.shape))
        low, carry = (part if part.device == CPU else part.to(CPU) for part in (self[LOW], self[CARRY]))
        _core.keep_masters(address(masters), address(low), address(carry), elements)
        for name, part in ((LOW, low), (CARRY, carry)):
            if part is not self[name]:
                self[name].copy_(part)

    def write_part(self, offsets: Sequence[int], values: torch.Tensor) -> None:
        """Keep a box of this master, which begins at these offsets in the local parameter. Other elements stay."""
        inner = local(self.parameter)
        if values.shape == inner.shape:
            self.write(values)
            return
        strides = dense_strides(inner)
        part = CompactMaster.resident(values, CPU)
        part.write(values)
        eight = torch.arange(8, dtype=torch.uint8)
        # One byte for each carry, in the order of the parameter's memory.
        carries = ((self[CARRY].to(CPU)[:, None] >> eight) & 1).flatten()
        news = (((part[CARRY][:, None] >> eight) & 1).flatten()[: values.numel()], part[LOW])
        for mine, new in zip((carries, low := self[LOW].to(CPU)), news, strict=True):
            box = torch.as_strided(mine, inner.shape, strides)
            for dim, (offset, length) in enumerate(zip(offsets, values.shape, strict=True)):
                box = box.narrow(dim, offset, length)
            box.copy_(torch.as_strided(new, values.shape, dense_strides(values)))
        self[LOW].copy_(low)
        self[CARRY].copy_((carries.view(-1, 8) << eight).sum(1, dtype=torch.uint8))

    def rounds_to_weight(self, value: torch.Tensor) -> bool:
        """Whether the parameter is the rounding of a value that may become its master."""
        weights = local(self.parameter).detach()
        rounded = local(value).detach().reshape(weights.shape).to(weights.device, torch.float32).to(weights.dtype)
        return bool(((rounded == weights) | (rounded.isnan() & weights.isnan())).all())

    def _check_awake(self) -> None:
        """Raise if memory was taken away, as from a sleeping model."""
        check_memory(local(self.parameter), "a parameter with a compact master")
        for part in self.values():
            check_memory(part, "a compact master")

    def reset(self) -> None:
        """Make the master equal its weight."""
        for part in self.values():
            part.zero_()

    def __reduce__(self) -> str | tuple[object, ...]:
        # A copy belongs to no engine: it is the f32 master.
        return _itself, (self.read(),)


def standing_for(value: object) -> CompactMaster | None:
    """Return the master for which a tensor stands; None for an ordinary tensor."""
    if not isinstance(value, torch.Tensor) or not local(value).numel() or not _standing:
        return None
    inner = local(value)
    return _standing.get(storage_address(inner.untyped_storage())) if inner.device == CPU else None


def _itself(master: torch.Tensor) -> torch.Tensor:
    return master
