"""Where each tensor of a unit's state is in the unit's memory. The memory is one range, so that one copy moves it.

Tensors that overlap in memory, as views of each other do, overlap in the same way here. Strides stay as they are: the
bits of a sum may depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from forebay._tensors import address, check_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ALIGN_BYTES = 256
"""Places begin at multiples of this, as in memory of torch: the choice of a kernel may depend on it."""


class Spot(NamedTuple):
    """Where one tensor is, and how to read it there."""

    place: int
    """Where its place begins. Tensors that overlap share one."""
    place_bytes: int
    behind: int
    """How many bytes behind the place's beginning it begins."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    elements: int
    """Elements between the first and the last, both included."""


@dataclass(frozen=True)
class Layout:
    """The spots of all tensors of a unit, in order, and the size of its memory."""

    spots: tuple[Spot, ...]
    nbytes: int

    def views(self, device: torch.device, carve: Callable[[int, int], torch.UntypedStorage]) -> list[torch.Tensor]:
        """Return the tensors in a unit's memory.

        Each place is a storage of its own, of exactly its size, as the tensors had it before. Views of one large
        storage would do too, but some operations of torch (adding a sparse tensor) write to a wrong place in a view
        that does not begin where its storage does.

        Parameters
        ----------
        device
            Where the memory is.
        carve
            Takes the beginning and the size of a place, and returns its storage.
        """
        places: dict[int, torch.UntypedStorage] = {}
        found = []
        for spot in self.spots:
            if not spot.elements:
                found.append(torch.empty_strided(spot.shape, spot.stride, dtype=spot.dtype, device=device))
                continue
            if spot.place not in places:
                places[spot.place] = carve(spot.place, spot.place_bytes)
            made = torch.empty(0, dtype=spot.dtype, device=device)
            found.append(made.set_(places[spot.place], spot.behind // spot.dtype.itemsize, spot.shape, spot.stride))
        return found

    def views_in(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in a unit's memory, given as a tensor of bytes. They keep the memory alive."""
        storage, start = memory.untyped_storage(), memory.storage_offset()
        return self.views(memory.device, lambda place, size: storage[start + place : start + place + size])

    def copies(self, memory: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
        """Return copies of the tensors in a unit's memory, each place in memory of its own on a device."""

        def copy(place: int, size: int) -> torch.UntypedStorage:
            return memory[place : place + size].to(device, copy=True).untyped_storage()

        return self.views(device, copy)


def span(tensor: torch.Tensor) -> int:
    """Return how many elements there are between a tensor's first and last in memory, both included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def aligned(size: int) -> int:
    """Return a size as a multiple of the alignment."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def lay_out(tensors: Sequence[torch.Tensor]) -> Layout:
    """Return where tensors go: side by side, in order, and overlapping ones as they overlap now."""
    spans = [span(tensor) for tensor in tensors]
    ranges = []
    for index, (tensor, elements) in enumerate(zip(tensors, spans, strict=True)):
        if elements:
            check_memory(tensor, "a tensor of the optimizer's state")
            start = address(tensor)
            ranges.append((str(tensor.device), start, start + elements * tensor.element_size(), index))
    # For each tensor, the first one in memory of those that it overlaps, and how many bytes behind that one it begins.
    first: dict[int, tuple[int, int]] = {}
    sizes: dict[int, int] = {}
    device, begin, end, leader = "", 0, 0, -1
    for one, start, stop, index in sorted(ranges):
        if one != device or start >= end:
            device, begin, end, leader = one, start, stop, index
        end = max(end, stop)
        first[index] = (leader, start - begin)
        sizes[leader] = end - begin
    places: dict[int, int] = {}
    spots, total = [], 0
    for index, (tensor, elements) in enumerate(zip(tensors, spans, strict=True)):
        leader, behind = first.get(index, (index, 0))
        size = sizes.get(leader, 0)
        if leader not in places:
            places[leader] = total
            total += aligned(size)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        spots.append(Spot(places[leader], size, behind, tensor.dtype, shape, stride, elements))
    return Layout(tuple(spots), total)


def write(views: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors into a unit's memory; all bytes between first and last element, so that views stay views."""
    for view, source in zip(views, sources, strict=True):
        if source.numel():
            # Both in the order of their memory: a tensor may have the same element in several places.
            extent = ((span(source),), (1,))
            view.as_strided(*extent).copy_(source.as_strided(*extent))


def lies_in(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether a tensor has elements in some memory, which is a tensor of bytes."""
    if tensor.device != memory.device or not tensor.numel() or not memory.numel():
        return False
    start, begin = address(tensor), address(memory)
    return start < begin + memory.numel() and begin < start + span(tensor) * tensor.element_size()
