"""The rank of this process, without importing torch."""

from __future__ import annotations

import os
import sys


def rank() -> int:
    """Return torch's rank, or what the launcher has set, or 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    given = os.environ.get("RANK", "")
    return int(given) if given.isascii() and given.isdigit() else 0
