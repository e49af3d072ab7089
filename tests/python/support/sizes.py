"""How much a run tries: a little in the short run, everything where ``FOREBAY_LONG=1`` is set (`make test-long`)."""

from __future__ import annotations

import os
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

LONG = os.environ.get("FOREBAY_LONG", "0") not in ("", "0")


def seeds(many: int, few: int = 1) -> list[int]:
    """Return the seeds to try: the first few, or all of them in a long run."""
    return list(range(many if LONG else few))


def times(few: int, many: int) -> int:
    """Return how often to try something by chance."""
    return many if LONG else few


def combinations(*axes: Iterable[Any], step: int = 3) -> list[tuple[Any, ...]]:
    """Return all combinations, or every third: where axes have two or four values, each value is still tried."""
    return list(product(*axes))[:: 1 if LONG else step]
