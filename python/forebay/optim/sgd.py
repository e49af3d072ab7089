"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch

from forebay.optim.base import Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.optim.options import Keywords


class SGD(Optimizer):
    """``torch.optim.SGD``, bit for bit the same as its fused CUDA implementation in f32.

    As in torch, a parameter has a ``momentum_buffer`` from its first update with momentum, and no state without
    momentum. Momentum may be set to zero later; the buffer then keeps its values until momentum is switched on again.
    If momentum was zero when the state was created, it cannot be switched on: this raises an error.

    Parameters
    ----------
    params, lr, momentum, dampening, weight_decay, nesterov, maximize
        As in ``torch.optim.SGD``. ``lr`` may be a tensor on the CPU.
    options
        What every optimizer of forebay takes: see :class:`forebay.optim.base.Optimizer`.
    """

    rule = "sgd"
    reference: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.SGD
    settings = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
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
        **options: Unpack[Keywords],
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "nesterov": nesterov, "maximize": maximize}, options)
