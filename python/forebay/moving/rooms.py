"""Pinned memory for the storages of a mapping, and which of its ranges are in use.

A range is in use while a tensor over it exists. Then nothing is stored into it: somebody may have taken the tensor out
of the mapping. A storage that comes from the host gets its old range when it returns, if the range is free.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from forebay import _core
from forebay._device import device_of, engine_name
from forebay._tensors import storage_address
from forebay.sleep.transfer import Mover, batched, no_collection

if TYPE_CHECKING:
    from forebay.sleep.walk import StorageEntry


class Home(NamedTuple):
    """The place of a storage on the host."""

    room: Room
    number: int

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage on the host is this very range. A tensor may have got another storage meanwhile."""
        return self.room.address(self.number) == storage_address(storage)


_homes: Any = WeakTensorKeyDictionary()
"""The homes of tensors that were moved, while the tensors exist. A room is freed with the last of its tensors."""


def home_of(part: torch.Tensor) -> Home | None:
    """Return the home of a tensor that was moved before."""
    found: Home | None = _homes.get(part)
    return found


def remember(part: torch.Tensor, home: Home) -> None:
    """Record the home of a new tensor."""
    _homes[part] = home


class Room:
    """The slabs of one mapping, for one device.

    Parameters
    ----------
    device
        The number of the device; -1 for the CPU.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.pin_s = 0.0
        self._slabs = _core.Slabs(engine_name(device_of(device)), readable=True)
        # Ranges in use: address, and the memory that tensors hold.
        self._used: dict[int, tuple[int, weakref.ref[memoryview]]] = {}
        self._last = 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the slabs."""
        return self._slabs.pinned_bytes()

    def address(self, number: int) -> int | None:
        """Return where a range in use is."""
        address, memory = self._used.get(number, (None, None))
        return address if memory is not None and memory() is not None else None

    def store(self, entries: list[StorageEntry]) -> list[torch.UntypedStorage]:
        """Copy storages of the device into pinned memory, and return storages over it. All bytes have arrived."""
        self._free_unused()
        self._number(entries)
        numbers = [entry.number for entry in entries]
        begun = time.perf_counter()
        self._slabs.place(numbers, [entry.size for entry in entries])
        self.pin_s = time.perf_counter() - begun
        try:
            self._run(entries, to_host=True)
            found = []
            views: list[Any] = self._slabs.views(numbers)
            for number, view in zip(numbers, views, strict=True):
                # Unlike the view it can be referred to weakly, and torch holds it as long as there is a tensor.
                memory = memoryview(view)
                storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
                self._used[number] = (storage_address(storage), weakref.ref(memory))
                found.append(storage)
        except BaseException:
            for number in numbers:
                self._used.pop(number, None)
            self._slabs.free(numbers)
            raise
        return found

    def fetch(self, entries: list[StorageEntry]) -> None:
        """Copy ranges into new storages of the device. All bytes have arrived."""
        self._run(entries, to_host=False)

    def _run(self, entries: list[StorageEntry], *, to_host: bool) -> None:
        mover = Mover(lambda _: self._slabs, to_sleep=to_host)
        try:
            with no_collection():
                for batch in batched(entries):
                    mover.submit(batch)
            mover.finish()
        except BaseException:
            mover.abort()
            raise

    def _free_unused(self) -> None:
        unused = [number for number, (_, memory) in self._used.items() if memory() is None]
        self._slabs.free(unused)
        for number in unused:
            del self._used[number]

    def _number(self, entries: list[StorageEntry]) -> None:
        """Give each storage a number: the one that it has, unless that range is in use."""
        taken = set(self._used)
        for entry in entries:
            if entry.number < 0 or entry.number in taken:
                self._last += 1
                entry.number = self._last
            taken.add(entry.number)
