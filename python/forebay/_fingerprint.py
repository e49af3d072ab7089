"""Fingerprints of gradients: whether a tensor still has the bits it had, without a copy of it.

torch's version counters do not see what is written through ``.data``, by a collective or by ``GradScaler.unscale_``.
"""

from __future__ import annotations

import torch

COLUMNS = 1021
"""A prime, so that rows and columns of a tensor that change places do not land in the same sums."""

BEFORE, AFTER = 3, 7
"""Elements that may lie before the first whole word and after the last one counted."""

TOGETHER = 256
"""Tensors that are looked at again at a time, to bound the memory that takes."""


class Fingerprint:
    """The sums of a dense tensor's bits, taken as 64-bit words, in ``COLUMNS`` columns.

    One pass over the memory and a vector of 8 KiB, whatever the size. Sums of integers wrap around, so they are the
    same in whatever order a device adds. A word that changes changes its column; and in some column the number of words
    is odd, so that signs which change in all of them do not cancel out.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        width = 8 // tensor.element_size()
        bits = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.int32 if width == 2 else torch.int16)
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

    def _add_up(self, into: torch.Tensor) -> torch.Tensor:
        if self._rows is not None:
            torch.sum(self._rows, 0, out=into[:COLUMNS])
        for start, end, part in self._rest:
            into[start:end].add_(part)
        return into

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
