"""Which parameters make a unit: whole parameters in order, up to a number of bytes of state."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from forebay._tensors import local
from forebay.optim.units import trees
from forebay.optim.units.layout import aligned, span
from forebay.optim.units.standins import copy_of, raw_step, small, small_copy, undisturbed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.optim.units.parameters import Member


def plan(members: Sequence[Member], sizes: Sequence[int | None], unit_bytes: int) -> list[list[Member]]:
    """Return the members of each unit.

    Parameters
    ----------
    members
        All parameters in the order of a step.
    sizes
        Bytes of state of each; None if that is not known before its first step.
    unit_bytes
        The most bytes of a unit. A parameter with more, or with an unknown number, is a unit of its own.
    """
    units: list[list[Member]] = []
    room = -1
    for member, size in zip(members, sizes, strict=True):
        if size is None or size > room:
            units.append([])
            room = unit_bytes
        units[-1].append(member)
        room = -1 if size is None else room - size
    return units


def size_of(tree: Any) -> int:
    """Return the bytes of memory for the tensors in a parameter's state."""
    found = 0
    for path, tensor in trees.leaves(tree):
        name = f"state{trees.text_of(path)}"
        found += sum(aligned(span(part) * part.element_size()) for part in trees.parts(tensor, name))
    return found


class Forecast:
    """How many bytes of state parameters will have, before their first step.

    The optimizer's step runs once on a parameter without memory, on torch's device ``meta``. Optimizers that read
    values cannot do that. Theirs runs on a small copy, and sizes are carried over from the small parameter's.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int | None] = {}

    def sizes(self, optimizer: torch.optim.Optimizer, theirs: Any, members: Sequence[Member]) -> list[int | None]:
        """Return the bytes of each parameter's state after its first step; None if they are unknown."""
        found: list[int | None] = []
        for group, parameter in members:
            inner = local(parameter)
            key = (group, tuple(inner.shape), inner.dtype)
            if not parameter.requires_grad:
                found.append(0)
                continue
            if key not in self._known:
                self._known[key] = _forecast(optimizer, theirs, group, parameter)
            found.append(self._known[key])
        return found


def _forecast(optimizer: torch.optim.Optimizer, theirs: Any, group: int, parameter: torch.Tensor) -> int | None:
    inner = local(parameter).detach()
    for make in (_without_memory, _small):
        stand_in = make(inner)
        # What a step raises on such a parameter says nothing about a step on the parameter itself.
        with contextlib.suppress(Exception), undisturbed({inner.device}):
            tree = _first_step(optimizer, theirs, (group, parameter, stand_in))
            sizes: dict[int, int] = {}
            for size, now in small(inner.shape).items() if make is _small else ():
                # The largest one, if two became the same.
                sizes[now] = max(size, sizes.get(now, 0))
            return sum(
                _size(part, stand_in, inner, sizes)
                for path, tensor in trees.leaves(tree)
                if tensor.is_meta or tensor.device == inner.device
                for part in trees.parts(tensor, f"state{trees.text_of(path)}")
            )
    return None


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))


def _small(parameter: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(small_copy(parameter, 0).detach())


def _first_step(optimizer: torch.optim.Optimizer, theirs: Any, row: tuple[int, torch.Tensor, torch.Tensor]) -> Any:
    """Return the state that a first step gives to the copy of a parameter."""
    stand_in = row[2]
    stand_in.grad = torch.zeros_like(stand_in)
    other = copy_of(optimizer, theirs, [row], state={})
    raw_step(theirs)(other)
    return dict.get(other.state, stand_in, {})


def _size(part: torch.Tensor, stand_in: torch.Tensor, parameter: torch.Tensor, sizes: dict[int, int]) -> int:
    """Return the bytes of a tensor of state, carried over to a parameter of another size."""
    if part.is_meta or part.shape == stand_in.shape:
        count = span(part) if part.is_meta else parameter.numel()
    else:
        count = 1
        for size in part.shape:
            count *= sizes.get(size, size)
    return aligned(count * part.element_size())
