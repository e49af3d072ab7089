"""How much a run tries: a little in the short run, everything where ``FOREBAY_LONG=1`` is set (`make test-long`)."""

from __future__ import annotations

import os

LONG = os.environ.get("FOREBAY_LONG", "0") not in ("", "0")


def seeds(many: int, few: int = 1) -> list[int]:
    """Return the seeds to try: the first few, or all of them in a long run."""
    return list(range(many if LONG else few))


def times(few: int, many: int) -> int:
    """Return how often to try something by chance."""
    return many if LONG else few
