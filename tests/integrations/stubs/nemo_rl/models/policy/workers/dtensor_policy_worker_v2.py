"""The contract of NeMo-RL's DTensor worker: which methods move what, and in which order they are called.

Everything is on the CPU, which stands for the GPU as well.
"""

from __future__ import annotations

from typing import Any

import torch


class DTensorPolicyWorkerV2Impl:
    """Trains a model between phases of generation."""

    def __init__(
        self, model: torch.nn.Module, optimizer: Any, max_grad_norm: float | None = None, **switches: bool
    ) -> None:
        self.model, self.optimizer, self.max_grad_norm = model, optimizer, max_grad_norm
        self.cpu_offload = switches.get("cpu_offload", False)
        self.offload_optimizer_for_logprob = switches.get("offload_optimizer_for_logprob", False)
        self.saved: dict[str, Any] = {}

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Bring the model; the optimizer may go."""
        self.model.eval()
        if not keep_train_buffers and self.optimizer is not None and self.offload_optimizer_for_logprob:
            self.move_optimizer_to_device("cpu")

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring model and optimizer, whatever went before."""
        self.model.train()
        if self.optimizer is not None and not self.cpu_offload:
            self.move_optimizer_to_device("cuda")

    def finish_inference(self) -> None:
        """Take the model away."""
        self.model.eval()

    def offload_before_refit(self) -> None:
        """Take the optimizer away."""
        if self.optimizer is not None:
            self.move_optimizer_to_device("cpu")

    def offload_after_refit(self) -> None:
        """Take model and optimizer away."""
        self.model.eval()
        self.offload_before_refit()

    def move_optimizer_to_device(self, device: str) -> None:
        """Move the state, tensor by tensor."""
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = value.to("cpu" if device == "cuda" else device).clone()

    def stream_weights(self) -> list[torch.Tensor]:
        """Return what a refit sends."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Save model and optimizer."""
        held = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(held, weights_path)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Load model and optimizer."""
        held = torch.load(weights_path, weights_only=True)
        self.model.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
