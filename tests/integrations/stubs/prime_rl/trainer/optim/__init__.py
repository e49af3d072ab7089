"""The contract of prime-rl's optimizers: ``setup_optimizer`` returns an optimizer, wrapped or not, and a manager."""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, AdamW, Optimizer


class CPUOffloadOptimizer:
    """Moves the state to the device and back around each step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def setup_optimizer(
    config: Any,
    named_params: list[tuple[str, Any]],
    parallel_dims: Any,
    cpu_offload: bool = False,
    full_offload_config: Any = None,
    model: Any = None,
    full_offload_dtype_policy: Any = None,
) -> tuple[Any, Any]:
    """Return the optimizer that a configuration names, and what manages gradients on the host."""
    if cpu_offload and full_offload_config is not None:
        raise ValueError("one offload at a time")
    trained = [parameter for _, parameter in named_params if parameter.requires_grad]
    settings = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.type == "adamw":
        made: Optimizer = AdamW(trained, betas=(config.betas1, config.betas2), fused=not cpu_offload, **settings)
    else:
        made = SGD(trained, momentum=config.momentum, **settings)
    if full_offload_config is not None:
        return made, full_offload_config
    return (CPUOffloadOptimizer(made) if cpu_offload else made), None
