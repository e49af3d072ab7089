"""Loading state dicts in the format of torch's optimizers into the engine's memory, in place."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from forebay._tensors import address, local
from forebay.errors import OptionError
from forebay.optim.create import check_columns, create
from forebay.optim.values import check_layout

if TYPE_CHECKING:
    from collections.abc import Container

    from forebay.optim.base import Optimizer

OWN = ("params", "foreach", "fused", "capturable", "differentiable")
"""The keys of a group that a load does not change: its parameters, and how the update is computed."""


@torch.no_grad()
def load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state dict; see ``Optimizer.load_state_dict``."""
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        if changed is not None:
            state_dict = changed
    saved_groups = deepcopy(state_dict["param_groups"])
    by_parameter = _check_loaded(optimizer, saved_groups, state_dict["state"])
    pairs = zip(optimizer.param_groups, saved_groups, strict=True)
    groups = [_merge_group(optimizer, group, saved) for group, saved in pairs]
    for group in groups:
        optimizer._check_group(group)
    check_columns(optimizer, groups)
    earlier, optimizer.param_groups = optimizer.param_groups, groups
    try:
        # Frameworks load the empty state of a new optimizer, perhaps before they move or shard the model.
        if by_parameter or optimizer.state.rooms:
            replace_state(optimizer, by_parameter)
        elif optimizer.state:
            optimizer.state.clear()
    except BaseException:
        optimizer.param_groups = earlier
        raise
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def replace_state(optimizer: Optimizer, by_parameter: list[tuple[torch.Tensor, dict[str, Any]]]) -> None:
    """Make these values the state of their parameters, and reset the state of all others.

    Creates state for these parameters only. The others get theirs with the next step or ``prepare``.
    """
    engine, _ = optimizer._open()
    optimizer._settle(None)
    optimizer._protect()
    create(optimizer, optimizer._flatten(), [parameter for parameter, _ in by_parameter], only=True)
    state = optimizer.state
    # A source may be the live state of another parameter: copy such sources before anything is overwritten.
    sources = {
        id(parameter): {
            name: _copied(value, state.owners, state.rooms[id(parameter)].views.get(name))
            for name, value in values.items()
        }
        for parameter, values in by_parameter
    }
    for number, room in state.rooms.items():
        if room.taken is None:
            state.fill(room, sources.get(number, {}))
    for parameter in list(state):
        if id(parameter) not in state.rooms:
            del state[parameter]
    engine.trust()


def _merge_group(optimizer: Optimizer, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    return {**group, **saved, **{key: group[key] for key in (*OWN, *optimizer.fixed) if key in group}}


def _check_loaded(
    optimizer: Optimizer, saved_groups: list[dict[str, Any]], saved_state: dict[Any, Any]
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Raise if a state dict is of another model; return the parameters that have state."""
    if len(saved_groups) != len(optimizer.param_groups):
        raise OptionError(
            f"the state dict has {len(saved_groups)} groups, the optimizer {len(optimizer.param_groups)}; load it "
            "into an optimizer with the same groups"
        )
    pairs = []
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise OptionError(
                f"group {index} has {len(saved['params'])} parameters in the state dict and "
                f"{len(group['params'])} in the optimizer; load it into an optimizer with the same groups"
            )
        for position, (key, parameter) in enumerate(zip(saved["params"], group["params"], strict=True)):
            values = loaded_values(optimizer, optimizer._name(index, position), parameter, saved_state.get(key))
            if values:
                pairs.append((parameter, values))
    return pairs


def loaded_values(
    optimizer: Optimizer, parameter_name: str, parameter: torch.Tensor, found: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the values of a parameter's saved state that are there; raise if one cannot be its state."""
    values = {name: value for name, value in (found or {}).items() if not _is_none(optimizer, name, value)}
    for name, value in values.items():
        check_value(optimizer, parameter_name, parameter, name, value)
    return values


def _is_none(optimizer: Optimizer, name: str, value: Any) -> bool:
    """Whether a value stands for no state.

    Torch may have None for state that appears late. DCP gives an empty dict for a name that its flattened state dict
    does not have.
    """
    return (value is None and optimizer.state.is_late(name)) or (isinstance(value, dict) and not value)


def check_value(optimizer: Optimizer, parameter_name: str, parameter: torch.Tensor, name: str, value: Any) -> None:
    """Raise if a value of a state dict cannot be the parameter's state."""
    if name not in optimizer.state_names:
        kind = type(optimizer).__name__
        raise OptionError(
            f"{parameter_name} has state {name!r} in the state dict, which {kind} does not have; load it into "
            "an optimizer of the class that saved it"
        )
    if name != "step":
        check_layout(parameter_name, parameter, name, value)


def _copied(value: Any, mine: Container[int], destination: torch.Tensor | None) -> Any:
    """Return the value, or a copy of it if it is other live state of this optimizer."""
    if not isinstance(value, torch.Tensor) or local(value).numel() == 0:
        return value
    is_mine = local(value).untyped_storage()._cdata in mine
    is_home = destination is not None and address(local(destination)) == address(local(value))
    return local(value).clone() if is_mine and not is_home else value
