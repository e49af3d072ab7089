"""AdamW: Adam with weight decay that is decoupled from the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch

from forebay.optim.adam import Adam
from forebay.optim.base import Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.optim.options import Keywords


class AdamW(Adam, torch.optim.AdamW):
    """``torch.optim.AdamW`` with its state in host memory.

    For f32 parameters on CUDA it has the bits of ``torch.optim.AdamW(fused=True)`` of torch 2.11. In all other cases,
    results may differ from torch's in the last bits, and masters make bf16 and f16 parameters more exact.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, amsgrad, maximize
        As in ``torch.optim.AdamW``. ``lr`` may be a tensor on the CPU.
    foreach, fused
        Recorded in the groups, as torch does. The update is always forebay's own. With ``fused=True`` a ``GradScaler``
        leaves unscaling and skipping to the step.
    capturable, differentiable
        True is refused: the step runs on the engine's own streams.
    options
        See below.
    """

    rule = "adamw"
    reference = torch.optim.AdamW
    settings = tuple(name for name in Adam.settings if name != "decoupled_weight_decay")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Keywords],
    ) -> None:
        given = locals()
        Optimizer.__init__(self, params, {name: given[name] for name in self.settings}, options)
