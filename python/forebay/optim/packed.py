"""Packed columns: state that is kept in fewer bits than f32, and the f32 values that users see.

A packed column is its parts, tensors by the engine's names. The moments of a rule may be bf16, or codes of 8 bits with
a scale for each block (``crates/device/src/update/format.rs``). A compact master is what its bf16 weight lacks of it:
16 bits and a carry for each element (``crates/device/src/update/master.rs``).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core
from forebay._device import CPU
from forebay._tensors import address, check_memory, dense_strides, in_order, local, state_like, storage_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from forebay._core import HostView

F32, BF16, BLOCKS, COMPACT = "f32", "bf16", "8bit", "compact"
"""The formats of columns and masters, as the engine names them; no master is an empty name."""

LOW, CARRY = "master_low", "master_carry"
"""The engine's columns of a compact master."""

STORED = {"f32": torch.float32, "bf16": torch.bfloat16, "u16": torch.int16, "u8": torch.uint8}
"""The type of a part's tensor, by the engine's name of the type of its values."""

_standing: weakref.WeakValueDictionary[int, Packed] = weakref.WeakValueDictionary()
"""By the address of their storage: the columns for which tensors stand."""


class Packed(dict[str, torch.Tensor], ABC):
    """One packed column of one parameter: its parts, by the engine's names and in its order.

    A dict, so that whoever walks through nested state finds the memory. ``read`` returns the values.
    """

    def __init__(self, parameter: torch.Tensor, column: str, kept_as: str, parts: dict[str, torch.Tensor]) -> None:
        super().__init__(parts)
        self.parameter = parameter
        # Its name in the state, and its format.
        self.column, self.format = column, kept_as
        self._standing: torch.Tensor | None = None

    @abstractmethod
    def _widen(self, parts: list[torch.Tensor], numbers: torch.Tensor) -> None:
        """Write the values of all elements, f32 in the order of the parameter's memory. All of it is on the host."""

    @abstractmethod
    def _narrow(self, numbers: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Keep these values of all elements, f32 in the order of the parameter's memory. All of it is on the host."""

    def read(self) -> torch.Tensor:
        """Return a copy of the values as f32: on the host, or on the device if they are kept there."""
        return self._copy(self._device)

    def on_host(self) -> torch.Tensor:
        """Return a copy of the values as f32 on the host, without memory on a device."""
        return self._copy(CPU)

    def _copy(self, device: torch.device) -> torch.Tensor:
        inner = local(self.parameter).detach()
        strides, elements = dense_strides(inner), inner.numel()
        flat = torch.empty(elements, dtype=torch.float32, device=CPU)
        self.check_awake()
        if elements:
            self._widen([part.to(CPU) for part in self.values()], flat)
        values = torch.as_strided(flat.to(device), inner.shape, strides)
        return state_like(self.parameter, values)

    def write(self, value: torch.Tensor) -> None:
        """Keep these values, rounded to nearest."""
        inner = local(self.parameter)
        other = standing_for(value)
        if not inner.numel() or other is self:
            return
        self.check_awake()
        value = value if other is None else other.read()
        numbers = torch.empty_strided(inner.shape, dense_strides(inner), dtype=torch.float32, device=CPU)
        numbers.copy_(local(value).detach().reshape(inner.shape))
        parts = [part.to(CPU) for part in self.values()]
        self._narrow(numbers, parts)
        for mine, new in zip(self.values(), parts, strict=True):
            if new is not mine:
                mine.copy_(new)

    def write_part(self, offsets: Sequence[int], values: torch.Tensor) -> None:
        """Keep a box of values, which begins at these offsets in the local parameter.

        Elements outside of the box stay, as far as they do not share a scale with some inside; see ``Assembly``.
        """
        inner = local(self.parameter)
        if values.shape == inner.shape:
            self.write(values)
            return
        whole = local(self.read()).to(CPU)
        box_of(whole, offsets, values.shape).copy_(values)
        self.write(whole)

    def stand_in(self) -> torch.Tensor:
        """Return a tensor of the column's shape and type that takes no memory; ``standing_for`` finds the column.

        Saves and loads of checkpoints work with it, so that they need memory for a part of the columns at a time.
        """
        inner = local(self.parameter)
        if not inner.numel():
            return self.read()
        if self._standing is None:
            self._standing = torch.zeros((), dtype=torch.float32, device=CPU)
            _standing[address(self._standing)] = self
        return state_like(self.parameter, self._standing.expand(inner.shape))

    def reset(self) -> None:
        """Go back to the value before the first update."""
        for part in self.values():
            part.zero_()

    def refuses(self, value: torch.Tensor) -> str | None:
        """Return why a value of the right shape cannot be kept beside the present parameter; None if it can."""
        return None

    def follow(self, view: Callable[[str], HostView | None]) -> None:
        """Point the parts at the engine's memory, which has moved; ``view`` returns a part's memory by its name."""
        for name, part in self.items():
            if part.numel() and (memory := view(name)) is not None:
                moved = torch.frombuffer(memory, dtype=part.dtype)
                if address(moved) != address(part):
                    self[name] = moved

    @property
    def _device(self) -> torch.device:
        return next(iter(self.values())).device

    def check_awake(self) -> None:
        """Raise if memory was taken away, as from a sleeping model."""
        for part in self.values():
            check_memory(part, f"{self.column} of a parameter, kept as {self.format},")

    def __reduce__(self) -> str | tuple[object, ...]:
        # A copy belongs to no engine: it is the f32 values.
        return _itself, (self.read(),)


class Moment(Packed):
    """A column of a rule in bf16 or in 8 bits."""

    def __init__(
        self, rule: _core.Rule, parameter: torch.Tensor, column: str, kept_as: str, parts: dict[str, torch.Tensor]
    ) -> None:
        super().__init__(parameter, column, kept_as, parts)
        self._rule = rule

    @classmethod
    def over(
        cls,
        rule: _core.Rule,
        parameter: torch.Tensor,
        column: str,
        kept_as: str,
        view: Callable[[str], HostView],
    ) -> Moment:
        """Return a column over pinned memory; ``view`` returns a part's memory by its name."""
        if local(parameter).numel() == 0:
            return cls.resident(rule, parameter, column, kept_as, CPU)
        parts = rule.parts(column, kept_as)
        kept = {name: torch.frombuffer(view(name), dtype=STORED[stored]) for name, stored, _ in parts}
        return cls(rule, parameter, column, kept_as, kept)

    @classmethod
    def resident(
        cls,
        rule: _core.Rule,
        parameter: torch.Tensor,
        column: str,
        kept_as: str,
        device: torch.device | None = None,
    ) -> Moment:
        """Return a column of zeros in new memory; by default on the parameter's device."""
        inner = local(parameter)
        device, elements = device or inner.device, inner.numel()
        parts = {
            name: torch.zeros(-(-elements // block), dtype=STORED[stored], device=device)
            for name, stored, block in rule.parts(column, kept_as)
        }
        return cls(rule, parameter, column, kept_as, parts)

    def _widen(self, parts: list[torch.Tensor], numbers: torch.Tensor) -> None:
        self._rule.read_column(self.column, self.format, list(map(address, parts)), address(numbers), numbers.numel())

    def _narrow(self, numbers: torch.Tensor, parts: list[torch.Tensor]) -> None:
        self._rule.keep_column(self.column, self.format, address(numbers), list(map(address, parts)), numbers.numel())


class CompactMaster(Packed):
    """The lower halves and carries of one parameter's master."""

    def __init__(self, parameter: torch.Tensor, low: torch.Tensor, carry: torch.Tensor) -> None:
        super().__init__(parameter, "master_param", COMPACT, {LOW: low, CARRY: carry})

    @classmethod
    def over(cls, parameter: torch.Tensor, view: Callable[[str], HostView]) -> CompactMaster:
        """Return the master over pinned memory; ``view`` returns a part's memory by its name."""
        if local(parameter).numel() == 0:
            return cls.resident(parameter, CPU)
        low = torch.frombuffer(view(LOW), dtype=torch.int16)
        return cls(parameter, low, torch.frombuffer(view(CARRY), dtype=torch.uint8))

    @classmethod
    def resident(cls, parameter: torch.Tensor, device: torch.device | None = None) -> CompactMaster:
        """Return a master that equals its weight, in new memory; by default on the parameter's device."""
        inner = local(parameter)
        device, elements = device or inner.device, inner.numel()
        low = torch.zeros(elements, dtype=torch.int16, device=device)
        return cls(parameter, low, torch.zeros(-(-elements // 8), dtype=torch.uint8, device=device))

    def _widen(self, parts: list[torch.Tensor], numbers: torch.Tensor) -> None:
        inner = local(self.parameter).detach()
        weights = torch.as_strided(in_order(inner, dense_strides(inner)), (inner.numel(),), (1,)).to(CPU)
        low, carry = parts
        _core.read_masters(address(weights), address(low), address(carry), address(numbers), inner.numel())

    def _narrow(self, numbers: torch.Tensor, parts: list[torch.Tensor]) -> None:
        # They count from the moment at which the parameter is their rounding.
        low, carry = parts
        _core.keep_masters(address(numbers), address(low), address(carry), numbers.numel())

    def write_part(self, offsets: Sequence[int], values: torch.Tensor) -> None:
        """Keep a box of this master, which begins at these offsets in the local parameter. Other elements stay.

        Their weights need not be those of the master yet, so that they are not read.
        """
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
            box = box_of(torch.as_strided(mine, inner.shape, strides), offsets, values.shape)
            box.copy_(torch.as_strided(new, values.shape, dense_strides(values)))
        self[LOW].copy_(low)
        self[CARRY].copy_((carries.view(-1, 8) << eight).sum(1, dtype=torch.uint8))

    def refuses(self, value: torch.Tensor) -> str | None:
        """Return why a value cannot be the master: the parameter is not its rounding."""
        weights = local(self.parameter).detach()
        rounded = local(value).detach().reshape(weights.shape).to(weights.device, torch.float32).to(weights.dtype)
        if bool(((rounded == weights) | (rounded.isnan() & weights.isnan())).all()):
            return None
        return "does not round to the parameter, which has the upper half of a compact master"

    def check_awake(self) -> None:
        """Raise if memory was taken away, as from a sleeping model."""
        check_memory(local(self.parameter), "a parameter with a compact master")
        for part in self.values():
            check_memory(part, "a compact master")


class Assembly:
    """Puts boxes of values into packed columns, each column as soon as boxes of another one come.

    Elements of a block share a scale, so a box that cuts blocks would round their other elements once more.
    """

    def __init__(self) -> None:
        self._open: tuple[Packed, torch.Tensor] | None = None

    def put(self, packed: Packed, offsets: Iterable[int], values: torch.Tensor) -> None:
        """Take a box, which begins at these offsets in the local parameter."""
        inner = local(packed.parameter)
        if isinstance(packed, CompactMaster) or values.shape == inner.shape:
            self.finish()
            packed.write_part(list(offsets), values)
            return
        if self._open is None or self._open[0] is not packed:
            self.finish()
            self._open = packed, local(packed.on_host())
        box_of(self._open[1], offsets, values.shape).copy_(values)

    def finish(self) -> None:
        """Write the column whose boxes came last."""
        if self._open is not None:
            (packed, values), self._open = self._open, None
            packed.write(values)


def box_of(whole: torch.Tensor, offsets: Iterable[int], shape: torch.Size) -> torch.Tensor:
    """Return the view of a box in a tensor, from its offsets and its shape."""
    for dim, (offset, length) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, offset, length)
    return whole


def standing_for(value: object) -> Packed | None:
    """Return the column for which a tensor stands; None for an ordinary tensor."""
    if not isinstance(value, torch.Tensor) or not local(value).numel() or not _standing:
        return None
    inner = local(value)
    return _standing.get(storage_address(inner.untyped_storage())) if inner.device == CPU else None


def _itself(values: Any) -> Any:
    return values
