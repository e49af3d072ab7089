"""A second copy of the pinned state, for steps that may be taken back; see [Note: state that moves] in ``state.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.optim.base import Optimizer


def open_second(optimizer: Optimizer) -> None:
    """Pin a second copy of all state in pinned memory, now and for state that is created later.

    Raises an ``OutOfMemoryError`` with the bytes of both copies if the budget has no room for them.
    """
    optimizer._open()[0].open_second()


def close_second(optimizer: Optimizer) -> None:
    """Free the copy that is not the state. Views of it that users made stay readable and keep its memory."""
    optimizer._open()[0].close_second()
    # Tensors over the copy that is gone would keep its memory pinned.
    optimizer.state.follow()
