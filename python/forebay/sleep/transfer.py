"""How storages move between device and slab: in batches, with one transfer for each device."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from forebay import _core
from forebay._device import device_of, stream_handle
from forebay._tensors import address, storage_address
from forebay.errors import Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from forebay.sleep.walk import StorageEntry

BATCH_BYTES = 128 << 20
"""Bytes submitted to the engine at a time: storages are emptied and allocated while others are being copied."""

BATCH_ENTRIES = 1024


class Batch:
    """Storages of one kind and device that move together."""

    def __init__(self, entries: list[StorageEntry], number: int) -> None:
        self.entries = entries
        self.number = number
        self.kind = entries[0].kind
        self.device = entries[0].device
        self.size = sum(entry.size for entry in entries)


def batched(entries: Iterable[StorageEntry]) -> Iterator[list[StorageEntry]]:
    """Cut storages into batches of one kind and one device each."""
    batch: list[StorageEntry] = []
    size, kind, device = 0, "", -1
    for entry in entries:
        if entry.kind != kind or entry.device != device or size >= BATCH_BYTES or len(batch) >= BATCH_ENTRIES:
            if batch:
                yield batch
            batch, size, kind, device = [], 0, entry.kind, entry.device
        batch.append(entry)
        size += entry.size
    if batch:
        yield batch


def in_pieces(entries: list[StorageEntry], limit: float) -> Iterator[list[StorageEntry]]:
    """Cut storages into pieces of at most ``limit`` bytes, or of one storage."""
    piece: list[StorageEntry] = []
    size = 0
    for entry in entries:
        if piece and size + entry.size > limit:
            yield piece
            piece, size = [], 0
        piece.append(entry)
        size += entry.size
    if piece:
        yield piece


def by_device(entries: Iterable[StorageEntry]) -> dict[int, list[StorageEntry]]:
    """Return storages for each device; -1 is the CPU."""
    found: dict[int, list[StorageEntry]] = {}
    for entry in entries:
        found.setdefault(entry.device, []).append(entry)
    return found


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable Python's garbage collector: a walk makes many objects, and would trigger slow collections."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Mover:
    """The transfers of one sleep or wake, one for each device."""

    def __init__(self, slabs_of: Callable[[int], _core.Slabs], *, to_sleep: bool) -> None:
        self._slabs_of = slabs_of
        self._to_sleep = to_sleep
        self._begun: dict[int, int] = {}
        self.batches: list[Batch] = []

    def slabs(self, batch: Batch) -> _core.Slabs:
        """Return the slabs of a batch's device."""
        return self._slabs_of(batch.device)

    def _begin(self, index: int) -> None:
        device = device_of(index)
        handle = stream_handle(device)
        try:
            staging = torch.empty(_core.Slabs.staging_bytes(), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            # Then small storages are not packed, which is slower.
            staging = None
        self._slabs_of(index).begin(self._to_sleep, handle, 0 if staging is None else address(staging), staging)
        self._begun[index] = handle

    def submit(self, entries: list[StorageEntry]) -> None:
        """Start moving a batch. The engine holds the storages until the transfer ends."""
        device = entries[0].device
        if device not in self._begun:
            self._begin(device)
        storages = [entry.storage for entry in entries]
        number = self._slabs_of(device).submit(
            [entry.number for entry in entries],
            [storage_address(storage) for storage in storages],
            [entry.size for entry in entries],
            storages,
            self._begun[device],
        )
        self.batches.append(Batch(entries, number))

    def wait(self, batch: Batch) -> None:
        """Block until a batch has arrived."""
        self.slabs(batch).wait(batch.number)

    def has_arrived(self, batch: Batch) -> bool:
        """Whether a batch has arrived."""
        return self.slabs(batch).has_arrived(batch.number)

    def finish(self) -> None:
        """Block until nothing is in flight."""
        while self._begun:
            device, _ = self._begun.popitem()
            self._slabs_of(device).finish()

    def abort(self) -> None:
        """Do the same as ``finish`` after an error, and ignore further errors."""
        while self._begun:
            device, _ = self._begun.popitem()
            try:
                self._slabs_of(device).finish()
            except Error:
                continue
