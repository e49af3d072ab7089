"""AdamW: Adam with weight decay that is decoupled from the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch

from forebay.optim.adam import Adam

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.optim.options import Keywords


class AdamW(Adam):
    """``torch.optim.AdamW``, bit for bit the same as its fused CUDA implementation in f32.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, amsgrad, maximize
        As in ``torch.optim.AdamW``. ``lr`` may be a tensor on the CPU.
    options
        What every optimizer of forebay takes: see :class:`forebay.optim.base.Optimizer`.
    """

    rule = "adamw"
    reference = torch.optim.AdamW

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Keywords],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **options)
