"""Moves a Trainer's clipping into the optimizer's step, so that gradients are clipped once."""

from __future__ import annotations

import functools
import math
import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def limit_of(args: Any) -> float | None:
    """Return the norm to which a Trainer with these arguments clips, or None if it does not clip."""
    return args.max_grad_norm if args.max_grad_norm is not None and args.max_grad_norm > 0 else None


class Clipping:
    """The clipping of one run.

    The Trainer reads ``args.max_grad_norm`` between the beginning and the end of a step. The argument is 0 there, and
    has the user's value at all other times, so that saved arguments are the user's.

    Parameters
    ----------
    args
        The ``TrainingArguments``.
    optimizer
        forebay's optimizer, without wrappers.
    accelerator
        The Trainer's accelerator, or None if it is not known. The Trainer asks it for the norm that it logs. If it is
        known, the norm is the one that the step computes.
    """

    def __init__(self, args: Any, optimizer: Any, accelerator: Any) -> None:
        self._args, self._optimizer, self._accelerator = args, optimizer, accelerator
        self._own: float | None = optimizer.max_grad_norm
        if self._own is not None and limit_of(args) not in (None, self._own):
            warnings.warn(
                f"the optimizer has max_grad_norm={self._own} and the Trainer args.max_grad_norm={args.max_grad_norm}; "
                "the smaller limit is used; give one of them",
                stacklevel=4,
            )
        # Whether an overlapped step takes the gradients during backward, so that nobody can read their norm.
        self.takes_gradients = False
        # The argument's value while a step is taken.
        self._taken: float | None = None
        self._norm: torch.Tensor | None = None
        # With a scaler the Trainer's own norm is needed: a step that overflows is skipped and computes none.
        self._measures = accelerator is not None and getattr(accelerator, "scaler", None) is None
        # Another integration may have put a method on the instance.
        self._before = vars(accelerator).get("clip_grad_norm_") if self._measures else None
        if self._measures:
            accelerator.clip_grad_norm_ = functools.partial(self._measure, accelerator.clip_grad_norm_)

    def begin_step(self) -> None:
        """Give the Trainer's limit to the optimizer until the step is taken."""
        if self._taken is not None:
            return
        limit = limit_of(self._args)
        least = min((one for one in (limit, self._own) if one is not None), default=None)
        if self._optimizer.max_grad_norm != least:
            self._optimizer.max_grad_norm = least
        if limit is not None:
            self._taken, self._args.max_grad_norm = limit, 0.0

    def end_step(self) -> None:
        """Return the Trainer's limit, and fill in the norm of this step."""
        if self._taken is not None:
            self._args.max_grad_norm, self._taken = self._taken, None
        norm, self._norm = self._norm, None
        if norm is not None and self._optimizer.grad_norm is not None:
            norm.copy_(self._optimizer.grad_norm)

    def _measure(
        self, original: Callable[..., Any], parameters: Any, max_norm: float, *args: Any, **options: Any
    ) -> Any:
        """Stand in for ``accelerator.clip_grad_norm_``: a Trainer that does not clip calls it for the norm."""
        unknown = self._taken is None and self.takes_gradients
        if not math.isinf(max_norm) or (self._taken is None and not unknown):
            return original(parameters, max_norm, *args, **options)
        # The Trainer reads the value after the step, when ``end_step`` has filled it in.
        device = self._optimizer.param_groups[0]["params"][0].device
        self._norm = torch.full((), math.nan if unknown else 0.0, device=device)
        return self._norm

    def remove(self) -> None:
        """Undo everything."""
        self.end_step()
        if self._measures:
            del self._accelerator.clip_grad_norm_
            if self._before is not None:
                self._accelerator.clip_grad_norm_ = self._before
        self._optimizer.max_grad_norm = self._own
