"""Optimizers whose state may be larger than the GPU's memory.

A new optimizer is a file here, named as its class in lower case, and that name in ``__all__``. The second line, below
``TYPE_CHECKING``, lets type checkers see its signature. ``import forebay.optim`` does not import torch; the first use
of a class does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.optim.adam import Adam
    from forebay.optim.adamw import AdamW
    from forebay.optim.base import Optimizer
    from forebay.optim.lion import Lion
    from forebay.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion"]


def __getattr__(name: str) -> type[Optimizer]:
    if name not in __all__:
        raise AttributeError(f"module 'forebay.optim' has no attribute {name!r}")
    found: type[Optimizer] = getattr(import_module(f"forebay.optim.{name.lower()}"), name)
    globals()[name] = found
    return found
