"""What stands in for a framework's wrapper that streams an optimizer's state layer by layer: ``forebay.offload``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from harness.swap import offload


class Offloaded:
    """Has the constructor and ``step`` of such a wrapper; forebay streams chunks, so there is nothing to prefetch."""

    takes_host_parameters = True

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        device_id: Any,
        prefetch_layers: int = 1,
        kernel: object = None,
    ) -> None:
        on_gpu = all(local(parameter).is_cuda for parameter in model.parameters())
        if not self.takes_host_parameters and not on_gpu:
            raise ValueError("parameters are on the CPU")
        # Parameters on the host are updated on the GPU, where there is one.
        as_they_are = on_gpu or bool(os.environ["UPSTREAM_ON_CPU"])
        self.optimizer = offload(optimizer, **({} if as_they_are else {"device": torch.device("cuda", device_id)}))
        self._layer_param_groups = groups(model)

    def step(self) -> None:
        """Take the optimizer's step."""
        self.optimizer.step()


class OffloadedOnGpu(Offloaded):
    """The same for wrappers that refuse parameters on the host."""

    takes_host_parameters = False


def groups(model: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    """Return the parameters of each part that FSDP2 wraps, and the rest at the end."""
    parts = [part for part in model.modules() if part is not model and isinstance(part, FSDPModule)]
    found: list[list[torch.nn.Parameter]] = []
    seen: set[int] = set()
    for part in (*parts, model):
        own = [parameter for parameter in part.parameters() if parameter.requires_grad and id(parameter) not in seen]
        seen.update(map(id, own))
        found += [own] if own else []
    return found


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside a DTensor."""
    inner: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return inner
