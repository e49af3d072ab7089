"""Puts forebay's optimizers in the place of torch's, and counts which optimizers are made and stepped."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

NAMES = ("Adam", "AdamW", "SGD")

TORCHS: dict[str, type[torch.optim.Optimizer]] = {name: getattr(torch.optim, name) for name in NAMES}
"""Torch's own classes, also after ``replace_classes``."""

counts: Counter[str] = Counter()
"""``made`` and ``steps`` of the optimizers that a run is about; ``escaped``: torch's own steps in a run of forebay."""


def replace_classes() -> None:
    """Replace torch's classes in ``torch.optim``, and in every module that has taken them from there already."""
    import forebay

    ours: dict[type, type] = {TORCHS[name]: getattr(forebay, name) for name in NAMES}
    for name in NAMES:
        setattr(torch.optim, name, ours[TORCHS[name]])
    for module in list(sys.modules.values()):
        place = getattr(module, "__name__", "").partition(".")[0]
        if place in ("torch", "forebay", "harness"):
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, type) and value in ours:
                setattr(module, name, ours[value])


def offload_objects() -> None:
    """Give every optimizer of torch's classes to ``forebay.offload`` at the end of its constructor."""
    for cls in TORCHS.values():
        cls.__init__ = _offloading(cls)  # type: ignore[method-assign]


def offload(optimizer: torch.optim.Optimizer, **options: Any) -> torch.optim.Optimizer:
    """Call ``forebay.offload`` and count the optimizer as made."""
    import forebay

    counts["made"] += 1
    return forebay.offload(optimizer, **options)


def _offloading(cls: type[torch.optim.Optimizer]) -> Any:
    make: Any = cls.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **keywords: Any) -> None:
        make(self, *args, **keywords)
        # Not where this is the constructor of a base class: the object is not complete yet.
        if type(self) is cls:
            offload(self)

    return made


def count(side: str) -> None:
    """Count what the optimizers of this side do: ``forebay`` or ``torch``."""
    torchs = tuple(TORCHS.values())
    if side == "forebay":
        from forebay.optim.base import Optimizer

        counted: tuple[type, ...] = (Optimizer,)
    else:
        counted = torchs
    make = torch.optim.Optimizer.__init__

    @functools.wraps(make)
    def made(self: torch.optim.Optimizer, *args: Any, **keywords: Any) -> None:
        counts["made"] += isinstance(self, counted)
        make(self, *args, **keywords)

    def stepped(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        if isinstance(optimizer, counted):
            counts["steps"] += 1
        elif isinstance(optimizer, torchs):
            counts["escaped"] += 1

    torch.optim.Optimizer.__init__ = made  # type: ignore[method-assign]
    register_optimizer_step_post_hook(stepped)
