"""How storages travel between device and slab: in batches, one transfer for each device."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from forebay import _core
from forebay._torch import stream_handle
from forebay.errors import Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from forebay._sleep_walk import Entry

BATCH_BYTES = 128 << 20
"""Bytes handed to the engine at a time: storages are emptied and allocated while others are on the wire."""

BATCH_ENTRIES = 1024


class Batch:
    """Storages of one kind and device that travel together."""

    def __init__(self, entries: list[Entry], number: int) -> None:
        self.entries = entries
        self.number = number
        self.kind = entries[0].kind
        self.device = entries[0].device
        self.size = sum(entry.size for entry in entries)


def batched(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Cut into batches of one kind and one device each."""
    batch: list[Entry] = []
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


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's cyclic garbage collector out: the objects of a walk are many, and it would look at all others."""
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
        return self._slabs_of(batch.device)

    def _begin(self, device: int) -> None:
        where = torch.device("cpu") if device < 0 else torch.device("cuda", device)
        handle = stream_handle(where)
        try:
            staging = torch.empty(_core.Slabs.staging_bytes(), dtype=torch.uint8, device=where)
        except torch.OutOfMemoryError:
            # Small storages then travel one by one, slower.
            staging = None
        slabs = self._slabs_of(device)
        slabs.begin(self._to_sleep, handle, 0 if staging is None else staging.data_ptr(), staging)
        self._begun[device] = handle

    def submit(self, entries: list[Entry]) -> None:
        """Send a batch on its way."""
        device = entries[0].device
        if device not in self._begun:
            self._begin(device)
        storages = [entry.storage for entry in entries]
        number = self._slabs_of(device).submit(
            [entry.number for entry in entries],
            [storage.data_ptr() for storage in storages],
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
        """Do the same after an error, which is the one that counts."""
        while self._begun:
            device, _ = self._begun.popitem()
            try:
                self._slabs_of(device).finish()
            except Error:
                continue
