"""Adam, with weight decay as part of the gradient (L2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch

from forebay.optim.base import Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.optim.options import Keywords


class Adam(Optimizer, torch.optim.Adam):
    """``torch.optim.Adam`` with its state in host memory.

    For f32 parameters on CUDA it has the bits of ``torch.optim.Adam(fused=True)`` of torch 2.11. In all other cases,
    results may differ from torch's in the last bits, and masters make bf16 and f16 parameters more exact.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay
        As in ``torch.optim.Adam``. ``lr`` may be a tensor on the CPU.
    foreach, fused
        Recorded in the groups, as torch does. The update is always forebay's own. With ``fused=True`` a ``GradScaler``
        leaves unscaling and skipping to the step.
    capturable, differentiable
        True is refused: the step runs on the engine's own streams.
    options
        See below.
    """

    rule = "adam"
    reference: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.Adam
    settings: ClassVar[tuple[str, ...]] = (
        *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"),
        *("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"),
    )
    switches: ClassVar[dict[str, str]] = {"max_exp_avg_sq": "amsgrad"}
    follows: ClassVar[dict[str, str]] = {"max_exp_avg_sq": "exp_avg_sq"}
    fixed = ("decoupled_weight_decay",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Keywords],
    ) -> None:
        given = locals()
        Optimizer.__init__(self, params, {name: given[name] for name in self.settings}, options)

    @classmethod
    def rule_for(cls, defaults: dict[str, Any]) -> str:
        """Return the rule with decoupled weight decay if these defaults ask for it."""
        return "adamw" if defaults.get("decoupled_weight_decay") else cls.rule
