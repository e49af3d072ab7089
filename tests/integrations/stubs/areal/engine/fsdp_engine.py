"""The contract of AReaL's FSDP engines: an optimizer by type, a schedule on it, clipping before the step."""

from __future__ import annotations

from typing import Any

import torch


class FSDPEngine:
    """Trains a model; ``initialize`` is given what AReaL calls a finetune spec."""

    def __init__(self, config: Any) -> None:
        self.config, self.optimizer_config = config, config.optimizer
        self.cpu_offload = object() if config.fsdp.offload_params else None
        self.device = torch.device("cpu")
        self.model: Any = None
        self.optimizer: Any = None
        self.lr_scheduler: Any = None

    def initialize(self, model: torch.nn.Module, ft_spec: Any) -> None:
        """Take a model and build its optimizer."""
        self.model = model
        self._create_optimizer(ft_spec)

    def _create_optimizer(self, ft_spec: Any) -> None:
        if self.optimizer_config is None:
            return
        lr, decay = self.optimizer_config.lr, self.optimizer_config.weight_decay
        if self.optimizer_config.type == "adam":
            made: Any = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=decay, fused=True)
        else:
            made = torch.optim.SGD(self.model.parameters(), lr=lr, weight_decay=decay)
        total = ft_spec.total_train_steps
        self.optimizer = made
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 - step / total)

    def optimizer_step(self) -> None:
        """Clip, step and advance the schedule."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optimizer_config.gradient_clipping)
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad()


class FSDPPPOActor(FSDPEngine):
    """An actor, which may train on several workers."""

    @classmethod
    def as_controller(cls) -> str:
        """Return the path by which workers import the class."""
        return f"{cls.__module__}.{cls.__name__}"


class FSDPLMEngine(FSDPEngine):
    """A language model."""
