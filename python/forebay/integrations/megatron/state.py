"""The state of a hybrid optimizer: that of its parts, by parameter, as one mapping.

[Note: masters of f32 parameters]
Megatron reads ``state[parameter]["master_param"]`` of every parameter if updates are in f32. A bf16 parameter has a
master. An f32 parameter is its own master, so its dict shows the parameter itself under this name. A loaded checkpoint
assigns another tensor there: the parameter gets its values when Megatron says that state was loaded, and at the latest
before the next step. DTensors do not show it, because Megatron-FSDP saves the parameters with the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from forebay._tensors import is_dtensor, local
from forebay.optim.state import MASTER

if TYPE_CHECKING:
    from forebay.integrations.megatron.hybrid import HybridDeviceOptimizer
    from forebay.optim.base import Optimizer


class HybridState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """The state of each parameter, in the part that has the parameter. Reading waits until the bytes have arrived."""

    def __init__(self, optimizer: HybridDeviceOptimizer) -> None:
        self._optimizer = optimizer

    def _find(self, parameter: Any) -> Optimizer | None:
        """Return the part that has a parameter."""
        optimizer = self._optimizer
        # Parameters are compared with those of the groups only if this one is not known: there may be thousands.
        return optimizer._divided.part_of(parameter) or optimizer._parts().part_of(parameter)

    def _part(self, parameter: torch.Tensor) -> Optimizer:
        part = self._find(parameter)
        if part is None:
            raise KeyError(parameter)
        return part

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        return self._part(parameter).state[parameter]

    def __setitem__(self, parameter: torch.Tensor, values: dict[str, Any]) -> None:
        self._part(parameter).state[parameter] = values
        self.show_masters([parameter])

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._part(parameter).state[parameter]

    def __contains__(self, parameter: object) -> bool:
        part = self._find(parameter)
        return part is not None and parameter in part.state

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter in self._optimizer._parameters() if parameter in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(self.plain())

    def plain(self) -> defaultdict[torch.Tensor, dict[str, Any]]:
        """Return the state as plain dicts, as torch's optimizers have it."""
        return defaultdict(dict, {parameter: dict(values) for parameter, values in self.items()})

    def __reduce__(self) -> Any:
        return self.plain().__reduce__()

    def replace(self, values: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Replace the state of all parameters by these values."""
        for part in self._optimizer._parts().all:
            mine = [p for group in part.param_groups for p in group["params"] if p in values]
            part.state = {p: values[p] for p in mine}
        self.show_masters(self._optimizer._parameters())

    # See [Note: masters of f32 parameters].

    def _own_masters(self, parameters: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """Return the parameters that are their own masters and have state, without waiting for it."""
        if not self._optimizer.param_update_in_fp32:
            return
        for parameter in parameters:
            part = self._find(parameter) if is_own_master(parameter) else None
            values = None if part is None else dict.get(part.state, parameter)
            if values:
                yield parameter, values

    def show_masters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Show each f32 parameter as its own master."""
        for parameter, values in self._own_masters(parameters):
            if MASTER not in values:
                values[MASTER] = parameter

    @torch.no_grad()
    def take_masters(self) -> None:
        """Copy masters that were assigned to f32 parameters into the parameters."""
        for parameter, values in self._own_masters(self._optimizer._parameters()):
            value = values.get(MASTER, parameter)
            if value is not parameter:
                parameter.copy_(local(value).reshape(parameter.shape))
                values[MASTER] = parameter


def is_own_master(parameter: torch.Tensor) -> bool:
    """Whether a parameter is f32 and not a DTensor."""
    return not is_dtensor(parameter) and parameter.dtype == torch.float32
