"""Gradients that are taken in backward, each as soon as it is final."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import BackwardCFunction

from forebay._tensors import address, is_placed_like, local, look
from forebay.optim.overlap.consumed import ConsumedGradient

if TYPE_CHECKING:
    from types import FrameType

    from forebay import _core
    from forebay.optim.overlap.step import Overlap

_NESTED = BackwardCFunction.apply.__code__
"""Torch runs this around the backward of functions that users define, as reentrant checkpoints are."""


@dataclass(eq=False)
class Trained:
    """A parameter that overlapped steps update."""

    parameter: torch.Tensor
    # Where the engine has its state: table and place there. None before there is state.
    home: tuple[int, int] | None
    group: int
    consumed: ConsumedGradient
    # Its address, length and type, if gradients may be taken in backward.
    weight: _core.Looked | None = None
    # The order of its state's memory; a gradient in another order is left to ``step``.
    strides: tuple[int, ...] = ()
    # Addresses of its columns, if its state is on the device.
    columns: list[int] = field(default_factory=list)
    # The gradient that the present step has taken in backward.
    taken: torch.Tensor | None = None
    # Backwards since the last step.
    backwards: int = 0
    # Address and version of the gradient after the last of them.
    seen: tuple[int, int] = (0, 0)

    def count(self, gradient: torch.Tensor) -> int:
        """Count a backward, and return how many have added to this gradient."""
        inner = local(gradient)
        pointer, version = address(inner), inner._version
        # Adding to a gradient is one change. After any other, as when it was dropped, the count starts again. Gradients
        # of FSDP2 share their memory and its count of changes.
        changes = version - self.seen[1]
        goes_on = pointer == self.seen[0] and (changes == 1 or (changes > 1 and inner is not gradient))
        self.backwards, self.seen = self.backwards + 1 if goes_on else 1, (pointer, version)
        return self.backwards

    def fitting(self, gradient: torch.Tensor) -> _core.Looked | None:
        """Return address, length and type of a gradient; None if it is left to ``step``, which copies or refuses it."""
        if self.weight is None or not is_placed_like(self.parameter, gradient):
            return None
        inner = local(gradient)
        if inner.layout != torch.strided or inner.numel() == 0:
            return None
        if inner.numel() > 1 and inner.stride() != self.strides:
            return None
        if inner.is_neg() or inner.is_conj():
            return None
        try:
            looked = look([inner])
        except (KeyError, RuntimeError):
            return None
        return looked if looked.fits(self.weight) else None


class Hook:
    """What autograd and FSDP2 call when a gradient is final. It keeps nothing alive."""

    __slots__ = ("_overlap",)

    def __init__(self, overlap: weakref.ref[Overlap]) -> None:
        self._overlap = overlap

    def __call__(self, parameter: torch.Tensor) -> None:
        """Take the gradient if this is the last backward before a step."""
        overlap = self._overlap()
        if overlap is not None:
            overlap.final(parameter)


def is_nested() -> bool:
    """Whether this backward runs inside the backward of a function, as that of a reentrant checkpoint does.

    To such a gradient, a later part of the same backward may add.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _NESTED:
            return True
        frame = frame.f_back
    return False
