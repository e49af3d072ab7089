"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch

from forebay.optim.base import Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.optim.options import Keywords


class SGD(Optimizer, torch.optim.SGD):
    """``torch.optim.SGD`` with its state in host memory.

    For f32 parameters on CUDA it has the bits of ``torch.optim.SGD(fused=True)`` of torch 2.11. In all other cases,
    results may differ from torch's in the last bits, and masters make bf16 and f16 parameters more exact.

    As in torch, a parameter has a ``momentum_buffer`` from its first update with momentum, and no state without
    momentum. Momentum may be set to zero later; the buffer then keeps its values until momentum is switched on again.
    If momentum was zero when the state was created, it cannot be switched on: this raises an error.

    Parameters
    ----------
    params, lr, momentum, dampening, weight_decay, nesterov, maximize
        As in ``torch.optim.SGD``. ``lr`` may be a tensor on the CPU.
    foreach, fused
        Recorded in the groups, as torch does. The update is always forebay's own. With ``fused=True`` a ``GradScaler``
        leaves unscaling and skipping to the step.
    differentiable
        True is refused: the step runs on the engine's own streams.
    options
        See below.
    """

    rule = "sgd"
    reference: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.SGD
    settings = (
        "lr",
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
        "maximize",
        "foreach",
        "differentiable",
        "fused",
    )
    switches: ClassVar[dict[str, str]] = {"momentum_buffer": "momentum"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Keywords],
    ) -> None:
        given = locals()
        Optimizer.__init__(self, params, {name: given[name] for name in self.settings}, options)
