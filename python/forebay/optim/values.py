"""Checks and copies values of state that come from a state dict or an assignment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay._tensors import address, check_memory, is_dtensor, local, storage_address
from forebay.errors import OptionError

if TYPE_CHECKING:
    from forebay.optim.base import Optimizer


def check_layout(
    parameter_name: str, parameter: torch.Tensor, name: str, value: Any, source: str = " in the state dict"
) -> None:
    """Raise if a tensor cannot be the parameter's state: it has another shape, or is sharded in another way."""
    if fits(parameter, value):
        return
    if not isinstance(value, torch.Tensor):
        kind = type(value).__name__
        raise OptionError(f"{parameter_name} has a {kind} as its {name}{source}; give a tensor of its shape")
    if value.shape != parameter.shape:
        raise OptionError(
            f"{parameter_name} has shape {tuple(parameter.shape)}, its {name}{source} {tuple(value.shape)}; give "
            "a tensor of the parameter's shape"
        )
    raise OptionError(
        f"{parameter_name} is {_layout(parameter)} on this rank, its {name}{source} {_layout(value)}; load it with "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
    )


def fits(parameter: torch.Tensor, value: Any) -> bool:
    """Whether a value can be a parameter's state: it has the same shape and the same placements over the ranks."""
    if not isinstance(value, torch.Tensor) or local(value).shape != local(parameter).shape:
        return False
    placements = getattr(value, "placements", None)
    return placements is None or (
        value.shape == parameter.shape and placements == getattr(parameter, "placements", placements)
    )


def check_assigned(optimizer: Optimizer, parameter: torch.Tensor, name: str, value: Any) -> None:
    """Raise if a value cannot be copied into a parameter's state."""
    state = optimizer.state
    room = state.rooms.get(id(parameter))
    if room is None or not state.knows(room, name):
        return
    if name == "step":
        one = local(value).numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))
        if not one or not 0 <= float(value) < float("inf"):
            raise OptionError(f"invalid step of {optimizer._name_of(parameter)}: {value!r}; give a number of steps")
        return
    if value is None and state.is_late(name):
        return
    if not fits(parameter, value):
        check_layout(optimizer._name_of(parameter), parameter, name, value, " as assigned")
    if name in room.packed and (reason := room.packed[name].refuses(value)) is not None:
        raise OptionError(
            f"the tensor assigned to {name} of {optimizer._name_of(parameter)} {reason}; set the parameter first"
        )
    if name in room.views:
        check_memory(local(room.views[name]), f"{name} of a parameter")
    if state.owner(value) not in (None, (id(parameter), name)):
        # The next step would overwrite it, and a swap of two would lose one of them.
        raise OptionError(
            f"the tensor assigned to {name} of {optimizer._name_of(parameter)} is already used as other state of this "
            "optimizer; assign a clone"
        )


def _layout(tensor: Any) -> str:
    return f"{tensor.placements if is_dtensor(tensor) else 'unsharded'} with shape {tuple(local(tensor).shape)}"


def copy_into(value: Any, view: torch.Tensor) -> None:
    """Copy a value into a view, unless the value is the same memory in the same order."""
    target = local(view)
    if not isinstance(value, torch.Tensor):
        target.fill_(value)
        return
    source = local(value).detach()
    if address(source) == address(target) and source.dtype == target.dtype and source.stride() == target.stride():
        return
    if target.numel() and storage_address(source.untyped_storage()) == storage_address(target.untyped_storage()):
        # The same memory in another order, such as a transposed square.
        source = source.clone()
    target.copy_(source.reshape(target.shape))
