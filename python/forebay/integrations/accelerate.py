"""Hugging Face's accelerate: ``prepare`` for an optimizer of forebay, or for one that becomes forebay's.

``accelerator.prepare`` itself works with forebay's optimizers. This function also converts optimizers of torch, keeps
accelerate from moving state to the GPU, and warns if gradients are clipped twice.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
import weakref
from typing import Any

import torch

import forebay
from forebay._wrapped import bare
from forebay.errors import OptionError
from forebay.integrations._versions import check_version
from forebay.optim.base import Optimizer

check_version("accelerate", "1.6", "2.0")

accelerate: Any = importlib.import_module("accelerate")

__all__ = ["prepare"]

OTHER_ENGINES = ("DEEPSPEED", "MEGATRON_LM")
"""Ways to train in which accelerate replaces the optimizer by one of another engine."""


def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
    """Do what ``accelerator.prepare`` does, with the state of the optimizers on the host.

    Parameters
    ----------
    accelerator
        An ``accelerate.Accelerator``, for one process, DDP or FSDP.
    objects
        What ``accelerator.prepare`` takes: models, optimizers, data loaders, schedulers. Optimizers of torch become
        forebay's with ``forebay.offload``, and stay the same objects inside accelerate's wrapper.
    options
        Options of ``forebay.offload``, such as ``placement="hybrid"``.

    Returns
    -------
    The prepared objects, in the same order.
    """
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind in OTHER_ENGINES:
        raise OptionError(
            f"forebay does not work with an engine that replaces the optimizer: {kind}; use FSDP2, DDP or one process"
        )
    given: list[Any] = list(objects)
    for number, one in enumerate(given):
        if isinstance(one, torch.optim.Optimizer):
            forebay.offload(one, **options)
            given[number] = _without_moves(accelerator, one)
            if isinstance(inner := bare(one), Optimizer):
                _watch_clipping(accelerator, inner)
    return accelerator.prepare(*given)


def _without_moves(accelerator: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return accelerate's wrapper of an optimizer, without the copy of all state to the GPU and back.

    ``accelerator.prepare`` has an argument for this, and ignores it under FSDP2.
    """
    if getattr(optimizer, "_is_accelerate_prepared", False):
        return optimizer
    wrapper = accelerator.prepare_optimizer(optimizer, device_placement=False)
    # Otherwise ``prepare`` would wrap it again.
    wrapper._is_accelerate_prepared = True
    return wrapper


def _watch_clipping(accelerator: Any, optimizer: Any) -> None:
    """Warn once if the accelerator clips gradients that the optimizer's step clips too."""
    clip = accelerator.clip_grad_norm_
    if not isinstance(clip, _Watched):
        accelerator.clip_grad_norm_ = clip = _Watched(clip)
    clip.optimizers.add(optimizer)


class _Watched:
    """``accelerator.clip_grad_norm_``, with a warning."""

    def __init__(self, original: Any) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._said = False

    def __call__(self, parameters: Any, max_norm: float, *args: Any, **options: Any) -> Any:
        limits = [one.max_grad_norm for one in self.optimizers if one.max_grad_norm is not None]
        if limits and not math.isinf(max_norm) and not self._said:
            self._said = True
            warnings.warn(
                f"accelerator.clip_grad_norm_ clips to {max_norm} before the step, and the optimizer's "
                f"max_grad_norm={limits[0]} clips inside it; use one of them",
                stacklevel=2,
            )
        return self._original(parameters, max_norm, *args, **options)
