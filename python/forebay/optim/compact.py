"""Compact masters: what is kept of an f32 master beside its bf16 weight, and the f32 values that users see.

The format is in ``crates/device/src/update/master.rs``: 16 bits and a carry for each element, 17 bits in all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay import _core
from forebay._device import CPU
from forebay._tensors import address, dense_strides, in_order, local, state_like

if TYPE_CHECKING:
    from forebay._core import HostView

F32, COMPACT = "f32", "compact"
"""The formats of a master, as the engine names them; no master is an empty name."""

LOW, CARRY = "master_low", "master_carry"
"""The engine's columns of a compact master."""

_COPIED = "_forebay_is_copy"
"""The attribute of tensors that ``CompactMaster.read`` has made."""


class CompactMaster(dict[str, torch.Tensor]):
    """The lower halves and carries of one parameter's master, by the engine's names.

    A dict, so that whoever walks through nested state finds the memory. ``read`` returns the master itself.
    """

    def __init__(self, parameter: torch.Tensor, low: torch.Tensor, carry: torch.Tensor) -> None:
        super().__init__({LOW: low, CARRY: carry})
        self.parameter = parameter

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
        if elements:
            weights = torch.as_strided(in_order(inner, strides), (elements,), (1,)).to(CPU)
            low, carry = self[LOW].to(CPU), self[CARRY].to(CPU)
            _core.read_masters(address(weights), address(low), address(carry), address(flat), elements)
        master = torch.as_strided(flat.to(self[LOW].device), inner.shape, strides)
        setattr(master, _COPIED, True)
        return state_like(self.parameter, master)

    def write(self, value: torch.Tensor) -> None:
        """Keep this master. It counts from the moment at which the parameter is its rounding."""
        inner = local(self.parameter)
        strides, elements = dense_strides(inner), inner.numel()
        if not elements:
            return
        masters = torch.empty_strided(inner.shape, strides, dtype=torch.float32, device=CPU)
        masters.copy_(local(value).detach().reshape(inner.shape))
        low, carry = (part if part.device == CPU else part.to(CPU) for part in (self[LOW], self[CARRY]))
        _core.keep_masters(address(masters), address(low), address(carry), elements)
        for name, part in ((LOW, low), (CARRY, carry)):
            if part is not self[name]:
                self[name].copy_(part)

    def rounds_to_weight(self, value: torch.Tensor) -> bool:
        """Whether the parameter is the rounding of a value that may become its master."""
        weights = local(self.parameter).detach()
        rounded = local(value).detach().reshape(weights.shape).to(weights.device, torch.float32).to(weights.dtype)
        return bool(((rounded == weights) | (rounded.isnan() & weights.isnan())).all())

    def reset(self) -> None:
        """Make the master equal its weight."""
        for part in self.values():
            part.zero_()

    def __reduce__(self) -> str | tuple[object, ...]:
        # A copy belongs to no engine: it is the f32 master.
        return _itself, (self.read(),)


def is_copy(value: object) -> bool:
    """Whether a value is the f32 copy of a compact master, which nothing else changes."""
    return isinstance(value, torch.Tensor) and hasattr(local(value), _COPIED)


def _itself(master: torch.Tensor) -> torch.Tensor:
    return master
