"""The objects of this process that have live figures: optimizers, activation handles, sleepers and saves.

They are held weakly. Reading is safe from any thread: it copies a dict in one operation of the interpreter. A forked
child begins with none, because it has neither the engine's threads nor its memory.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from typing import Any

from forebay import _core

_found: dict[tuple[str, int], weakref.ref[Any]] = {}
_numbers: dict[str, itertools.count[int]] = {}
_start = [time.monotonic()]


def register(kind: str, one: Any) -> int:
    """Add an object, unless it is there already, and return its number: the n-th of its kind."""
    for key, reference in list(_found.items()):
        known = reference()
        if known is one and key[0] == kind:
            return key[1]
        if known is None:
            _found.pop(key, None)
    number = next(_numbers.setdefault(kind, itertools.count()))
    _found[kind, number] = weakref.ref(one)
    return number


def registered(kind: str) -> list[tuple[int, Any]]:
    """Return the objects of a kind that still exist, with their numbers."""
    found = [(number, reference()) for (of, number), reference in list(_found.items()) if of == kind]
    return [(number, one) for number, one in found if one is not None]


def seconds() -> float:
    """Return how long ago forebay was imported, or this process was forked."""
    return time.monotonic() - _start[0]


def _begin_child() -> None:
    _found.clear()
    _start[0] = time.monotonic()
    _core.forget_parent_totals()


os.register_at_fork(after_in_child=_begin_child)
