"""The contract of xtuner's optimizer configurations: pydantic models that refuse unknown fields, with ``build``."""

from __future__ import annotations

from typing import Any

import pydantic
import torch


class OptimConfig(pydantic.BaseModel):
    """The base class that an engine takes."""

    model_config = pydantic.ConfigDict(extra="forbid")
    lr: float = 1e-5
    max_grad_norm: float = 1.0


class AdamWConfig(OptimConfig):
    """AdamW, swapped between host and device or not."""

    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    foreach: bool | None = None
    swap_optimizer: bool | None = False

    def build(self, model: Any) -> torch.optim.Optimizer:
        """Return the optimizer of what is trained."""
        if self.swap_optimizer:
            raise AssertionError("xtuner's own swapped AdamW is not wanted here")
        trained = [parameter for _, parameter in model.trainable_parameters()]
        settings = {name: getattr(self, name) for name in ("lr", "betas", "eps", "weight_decay", "foreach")}
        return torch.optim.AdamW(trained, **settings)
