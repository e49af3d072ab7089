"""Fingerprints of memory: they show whether a tensor still has the same bits, without a copy of it.

torch's version counters do not count changes through ``.data``, by a collective, by ``GradScaler.unscale_`` or by a
kernel that torch does not know.
"""

from __future__ import annotations

import torch

COLUMNS = 1021
"""A prime, so that parts of the usual sizes that swap places change the sums."""

BEFORE, AFTER = 7, 15
"""The most elements before the first whole word and after the last word that is counted."""

TOGETHER = 256
"""Tensors that are compared at a time; this limits the memory for the comparison."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Fingerprint:
    """The sums of a dense tensor's bits, taken as 64-bit words, in ``COLUMNS`` columns.

    It takes one pass over the memory and a vector of 8 KiB for any size. Sums of integers wrap around, so they do not
    depend on the order in which a device adds. If one word changes, the sum of its column changes. At least one column
    has an odd number of words, so that a change of all signs does not cancel out. The fingerprint holds the memory:
    freed memory could be reused by another tensor and changed.

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
        """Return the fingerprint of a tensor's whole storage; the tensor may have any type."""
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
        """Return whether the tensor has other bits now, as a tensor on its device, without waiting."""
        if self._storage is not None and self._storage.nbytes() != self._storage_bytes:
            # Resized: its memory was freed, and must not be read.
            return torch.ones((), dtype=torch.bool)
        return (self._add_up(_zeros(1, self.sums.device)[0]) != self.sums).any()

    @staticmethod
    def changed(fingerprints: list[Fingerprint]) -> list[bool]:
        """Return for each fingerprint whether its tensor has changed. All are on one device; waits for it once."""
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
