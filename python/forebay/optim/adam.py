"""Adam, with weight decay as part of the gradient (L2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch

from forebay.optim.base import Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.optim.options import Keywords


class Adam(Optimizer):
    """``torch.optim.Adam``, bit for bit the same as its fused CUDA implementation in f32.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, amsgrad, maximize
        As in ``torch.optim.Adam``. ``lr`` may be a tensor on the CPU.
    options
        What every optimizer of forebay takes: see :class:`forebay.optim.base.Optimizer`.
    """

    rule = "adam"
    reference: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.Adam
    settings = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
    switches: ClassVar[dict[str, str]] = {"max_exp_avg_sq": "amsgrad"}
    fixed = ("decoupled_weight_decay",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Keywords],
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "amsgrad": amsgrad, "maximize": maximize}, options)
