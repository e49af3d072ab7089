"""Which storages sleep, and their numbers in the slabs.

Two facts must agree: a storage is empty on the device, and its place in a slab is in use. The engine assigns the places
and knows which are in use. Only the class here knows which storages are empty, and every change goes through it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from forebay.errors import AsleepError, Error
from forebay.sleep.walk import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.sleep.transfer import Batch, Mover
    from forebay.sleep.walk import StorageEntry


class Asleep:
    """The storages that sleep."""

    def __init__(self) -> None:
        self._entries: dict[int, StorageEntry] = {}
        # How many of each owner and kind: guards ask before every forward of every module.
        self._counts: Counter[tuple[int, str]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __iter__(self) -> Iterator[StorageEntry]:
        return iter(self._entries.values())

    def __contains__(self, identity: int) -> bool:
        return identity in self._entries

    def add(self, entry: StorageEntry) -> None:
        """Add a storage whose bytes are in its slab; it may be emptied now."""
        self._entries[entry.identity] = entry
        self._counts[entry.owner, entry.kind] += 1

    def remove(self, mover: Mover, batch: Batch) -> None:
        """Remove storages that have their bytes again; their places in the slab are free."""
        mover.slabs(batch).free([entry.number for entry in batch.entries])
        for entry in batch.entries:
            if self._entries.pop(entry.identity, None) is not None:
                self._counts[entry.owner, entry.kind] -= 1

    def free_others(self, mover: Mover) -> None:
        """Free the places of storages that were copied for a sleep that failed, and were not emptied."""
        for batch in mover.batches:
            awake = [entry.number for entry in batch.entries if entry.identity not in self._entries]
            mover.slabs(batch).free(awake)

    def of_kinds(self, kinds: set[str]) -> list[StorageEntry]:
        """Return the storages of some kinds."""
        return [entry for entry in self if entry.kind in kinds]

    def kinds(self, owner: int | None = None) -> set[str]:
        """Return the kinds of the sleeping storages, of one owner or of all."""
        return {kind for (of, kind), count in self._counts.items() if count and owner in (None, of)}

    def numbers(self) -> set[int]:
        """Return the numbers of the places that are in use."""
        return {entry.number for entry in self}

    def sizes(self) -> dict[str, int]:
        """Return the bytes that sleep, for each kind."""
        sizes = dict.fromkeys(KINDS, 0)
        for entry in self:
            sizes[entry.kind] += entry.size
        return sizes

    def size(self) -> int:
        """Return all bytes that sleep."""
        return sum(entry.size for entry in self)


class Numbers:
    """The number of each storage in the slabs. A storage of the same kind and name gets the same number again."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._last = 0

    def number(self, entries: Iterator[StorageEntry], used: set[int]) -> Iterator[StorageEntry]:
        """Give each storage of one walk a number that is not in use."""
        taken: set[str] = set()
        for entry in entries:
            key = entry.kind + entry.name
            while key in taken:
                # The parts of a wrapper share a name, and two optimizers may give their groups the same names.
                key += "'"
            taken.add(key)
            number = self._numbers.get(key)
            if number is None or number in used:
                number = self._numbers[key] = self._last = self._last + 1
            entry.number = number
            yield entry


def asleep_error(what: str, kinds: set[str]) -> AsleepError:
    """Return the error of an operation that needs sleeping tensors."""
    asked = ", ".join(kind for kind in KINDS if kind in kinds)
    return AsleepError(f"{what} needs tensors that are asleep: {asked}; call wake() of the forebay.Sleeper first")


def replaced_error(entries: list[StorageEntry]) -> Error:
    """Return the error of a wake of storages that their model or optimizer no longer has."""
    names = ", ".join(f"{entry.name} ({entry.kind}, {entry.size} bytes)" for entry in entries[:8])
    more = f" and {len(entries) - 8} more" if len(entries) > 8 else ""
    return Error(
        f"replaced while asleep: {names}{more}; everything is awake and has its bytes again, but the model or "
        "optimizer holds other tensors now; do not replace tensors while they sleep"
    )
