"""Optimizers inside the wrappers of frameworks.

Accelerate's ``AcceleratedOptimizer``, Lightning's ``LightningOptimizer`` and many others hold the optimizer that they
wrap in ``optimizer``. No framework is imported here: a wrapper is known by what it has.
"""

from __future__ import annotations

from typing import Any

import torch

_MISSING = object()


def bare(optimizer: Any) -> Any:
    """Return the innermost optimizer of wrappers around it.

    Parameters
    ----------
    optimizer
        An optimizer, or an object that holds one in ``optimizer``. Anything else is returned unchanged, so that the
        caller can raise an error that names it. An optimizer that keeps state of its own around another one, as
        Lookahead does, is no wrapper and is returned unchanged.
    """
    found = optimizer
    seen: list[Any] = []
    current = optimizer
    while not any(current is one for one in seen):
        if isinstance(current, torch.optim.Optimizer):
            found = current
        seen.append(current)
        inner = _inner(current)
        if inner is None:
            break
        current = inner
    return found


def members(optimizer: Any) -> list[Any]:
    """Return the innermost optimizers of a wrapper, or of a container that is an optimizer for torch.

    Torchtitan's ``OptimizersContainer`` is such a container: it steps its members, and its own state is empty.
    """
    inner = bare(optimizer)
    if isinstance(inner, torch.optim.Optimizer) and hasattr(type(inner), "__iter__"):
        found: Any = inner
        return [one for member in found for one in members(member)]
    return [inner]


def _inner(wrapper: Any) -> Any:
    """Return what a wrapper wraps; None for anything that is no wrapper."""
    # These have a `step` or an `optimizer` as well, but are not optimizers.
    if isinstance(wrapper, (type, torch.nn.Module, torch.optim.lr_scheduler.LRScheduler)):
        return None
    if not callable(getattr(wrapper, "step", None)):
        return None
    inner = getattr(wrapper, "optimizer", None)
    if inner is None or not isinstance(wrapper, torch.optim.Optimizer):
        return inner
    own = getattr(wrapper, "state", _MISSING)
    return inner if own is _MISSING or own is getattr(inner, "state", _MISSING) else None
