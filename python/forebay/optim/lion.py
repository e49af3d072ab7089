"""Lion: the sign of an average of gradients, from "Symbolic Discovery of Optimization Algorithms" (2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

import torch

from forebay._checks import is_number
from forebay.errors import OptionError
from forebay.optim.base import Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.optim.options import Keywords


class Lion(Optimizer):
    """Lion with one average for each parameter, ``exp_avg``, and decoupled weight decay.

    Good rates are three to ten times smaller than Adam's, with a weight decay that is as much larger.

    Parameters
    ----------
    params
        The parameters, as torch's optimizers take them.
    lr
        The learning rate; may be a tensor on the CPU.
    betas
        The weight of the average in the update, and in the next average.
    weight_decay
        Decoupled weight decay.
    maximize
        Follow the gradient upwards.
    options
        See below.
    """

    rule = "lion"
    settings = ("lr", "betas", "weight_decay", "maximize")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Keywords],
    ) -> None:
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, settings, options)

    @classmethod
    def check_settings(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Refuse numbers that cannot work, in the words of torch's optimizers."""
        lr, decay = settings["lr"], settings["weight_decay"]
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise OptionError("Tensor lr must be 1-element")
        if not (isinstance(lr, torch.Tensor) or is_number(lr)) or not lr >= 0.0:
            raise OptionError(f"Invalid learning rate: {lr}")
        for index, beta in enumerate(settings["betas"]):
            if not 0.0 <= beta < 1.0:
                raise OptionError(f"Invalid beta parameter at index {index}: {beta}")
        if not decay >= 0.0:
            raise OptionError(f"Invalid weight_decay value: {decay}")
        return dict(settings)
