"""The contract of NeMo-RL's Megatron worker: ``move_optimizer`` over the state of Megatron's optimizer."""

from __future__ import annotations

from typing import Any

import torch


class MegatronPolicyWorkerImpl:
    """Trains a model of Megatron's between phases of generation."""

    def __init__(self, config: Any, optimizer: Any = None) -> None:
        self.cfg, self.optimizer = config, optimizer

    def move_optimizer(self, device: str) -> None:
        """Move the state, tensor by tensor, in memory that is not pinned."""
        if device not in ("cpu", "cuda"):
            raise ValueError(f"Invalid device: {device}. Only strings 'cpu' and 'cuda' are supported.")
        pinned, coalesced = (self.cfg.get(f"use_{kind}_optimizer_offload") for kind in ("pinned", "coalesced"))
        if coalesced and not pinned:
            raise ValueError("use_coalesced_optimizer_offload requires use_pinned_optimizer_offload=True.")
        for state in self.optimizer._get_state().values():
            for key, value in state.items():
                if torch.is_tensor(value):
                    state[key] = value.to(device)
