"""Switches off a framework's moves of optimizer state, for optimizers that offload themselves."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from forebay._wrapped import bare

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def offloads_itself(optimizer: Any) -> bool:
    """Whether an optimizer keeps its state where it belongs, so that nobody has to move the state."""
    return bool(getattr(bare(optimizer), "offloads_itself", False))


def skip_moves(module: ModuleType, *names: str) -> None:
    """Have functions that move an optimizer's state leave those optimizers alone that offload themselves.

    Other optimizers are moved as before. A function that is replaced already stays.

    Parameters
    ----------
    module
        The module that defines the functions. Modules that have imported them by name get the new ones too.
    names
        The names of the functions. Their first argument is the optimizer.
    """
    for name in names:
        move = getattr(module, name)
        if hasattr(move, "_forebay_skips"):
            continue
        replace(move, name, _skipping(move))


def replace(function: Callable[..., Any], name: str, new: Callable[..., Any]) -> None:
    """Replace a function in every module that has it under this name."""
    for module in list(sys.modules.values()):
        # Not getattr: some modules import others when they are asked for a name.
        if getattr(module, "__dict__", {}).get(name) is function:
            setattr(module, name, new)


def _skipping(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def moved(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return None if offloads_itself(optimizer) else move(optimizer, *args, **kwargs)

    moved._forebay_skips = True  # type: ignore[attr-defined]
    return moved
