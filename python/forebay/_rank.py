"""The rank of this process, without importing torch."""

from __future__ import annotations

import os
import sys


def ranks() -> tuple[int, int]:
    """Return this process's rank and how many there are: as torch says, or as the launcher has set, or one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    mine, count = _number("RANK"), _number("WORLD_SIZE")
    # Without the number of ranks there is at least this one.
    return (0, 1) if 0 < count <= mine else (mine, count or mine + 1)


def rank() -> int:
    """Return the rank alone."""
    return ranks()[0]


def _number(name: str) -> int:
    given = os.environ.get(name, "")
    return int(given) if given.isascii() and given.isdigit() else 0
