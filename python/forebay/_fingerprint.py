"""Fingerprints of memory: whether a tensor still has the bits it had, without a copy of it.

torch's version counters miss what is written through ``.data``, by a collective, by ``GradScaler.unscale_`` or by a
kernel that torch does not know.
"""

from __future__ import annotations

import torch

COLUMNS = 1021
"""A prime, so that parts of the usual sizes that swap places do not land in the same sums."""

BEFORE, AFTER = 7, 15
"""The most elements before the first whole word and after the last word that is counted."""

TOGETHER = 256
"""Tensors that are compared at a time, to bound the memory that takes."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Fingerprint:
    """The sums of a dense tensor's bits, taken as 64-bit words, in ``COLUMNS`` columns.

    One pass over the memory and a vector of 8 KiB, whatever the size. Sums of integers wrap around, so they do not
    depend on the order in which a device adds. A word that changes changes its column; and in some column the number of
    words is odd, so that signs which change in all of them do not cancel out. The fingerprint holds the memory: freed
    memory could be changed and come back as another tensor's.

    Parameters
    ----------
    tensor
        A dense tensor with elements of at most 4 bytes.
    """

    _storage: torch.UntypedStorage | None = None
    _storage_bytes = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        width = 8 // size
        bits = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(_BITS[size])
        before = min(-bits.storage_offset() % width, bits.numel())
        count = (bits.numel() - before) // width
        if count and count % (2 * COLUMNS) == 0:
            count -= 1
        after = before + count * width
        words = bits[before:after].view(torch.int64) if count else bits[:0]
        summed = count // COLUMNS * COLUMNS
        self._rows = words[:summed].view(-1, COLUMNS) if summed else None
        rest = ((0, words[summed:]), (COLUMNS, bits[:before]), (COLUMNS + BEFORE, bits[after:]))
        self._rest = [(start, start + part.numel(), part) for start, part in rest if part.numel()]
        self.sums = self._add_up(_zeros(1, tensor.device)[0])

    @classmethod
    def of_storage(cls, tensor: torch.Tensor) -> Fingerprint:
        """Return the fingerprint of all memory of a tensor's storage, whatever the tensor's type."""
        storage = tensor.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        found = cls(memory.set_(storage, 0, (storage.nbytes(),), (1,)))
        found._storage, found._storage_bytes = storage, storage.nbytes()
        return found

    def _add_up(self, into: torch.Tensor) -> torch.Tensor:
        if self._rows is not None:
            torch.sum(self._rows, 0, out=into[:COLUMNS])
        for start, end, part in self._rest:
            into[start:end].add_(part)
        return into

    def differs(self) -> torch.Tensor:
        """Return whether the tensor has other bits now, as a tensor on its device: nothing is waited for."""
        if self._storage is not None and self._storage.nbytes() != self._storage_bytes:
            # Resized: its memory was given back, and must not be read.
            return torch.ones((), dtype=torch.bool)
        return (self._add_up(_zeros(1, self.sums.device)[0]) != self.sums).any()

    @staticmethod
    def changed(fingerprints: list[Fingerprint]) -> list[bool]:
        """Return whose tensor has other bits than it had. They are on one device, which this waits for once."""
        differ = []
        for first in range(0, len(fingerprints), TOGETHER):
            batch = fingerprints[first : first + TOGETHER]
            now = _zeros(len(batch), batch[0].sums.device)
            for one, row in zip(batch, now.unbind(0), strict=True):
                one._add_up(row)
            differ.append((now != torch.stack([one.sums for one in batch])).any(1))
        found: list[bool] = torch.cat(differ).tolist() if differ else []
        return found


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros((count, COLUMNS + BEFORE + AFTER), dtype=torch.int64, device=device)
