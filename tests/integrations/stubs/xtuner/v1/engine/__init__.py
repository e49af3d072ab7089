"""The contract of xtuner's engine: it builds the optimizer from its configuration, moves state, clips and steps."""

from __future__ import annotations

from typing import Any

import torch


class TrainEngine:
    """Trains a model that is sharded already."""

    def __init__(self, model: Any, optim_cfg: Any) -> None:
        self.model, self.optim_cfg = model, optim_cfg
        self.optimizer = optim_cfg.build(model)

    def put_optimizer_to_device(self, device: str) -> bool:
        """Move the state; return whether it was moved."""
        if getattr(self.optim_cfg, "swap_optimizer", False) or not self.optimizer.state:
            return False
        for state in self.optimizer.state.values():
            for name, value in state.items():
                state[name] = value.to(device)
        return True

    def step(self) -> None:
        """Clip the groups that may be clipped, then step."""
        groups = [group for group in self.optimizer.param_groups if group.get("clip_grad", True)]
        clipped = [parameter for group in groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(clipped, self.optim_cfg.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
