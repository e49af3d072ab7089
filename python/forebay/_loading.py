"""Loading state dicts in the format of ``torch.optim.AdamW`` into arenas, in place."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from forebay._torch import check_memory, is_dtensor, local
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Container

    from forebay.optim import AdamW

KINDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")
"""What may be kept for a parameter, besides ``step``."""

OWN = ("params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")
"""What a group keeps when it is loaded: its parameters, and how to compute rather than what."""


@torch.no_grad()
def load(optimizer: AdamW, state_dict: dict[str, Any]) -> None:
    """Load state in the format of ``torch.optim.AdamW``, in place: nothing passes through the GPU.

    Everything is checked before anything is changed. State of parameters that the dict does not have starts anew.
    """
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        if changed is not None:
            state_dict = changed
    saved_groups = deepcopy(state_dict["param_groups"])
    by_parameter = _check_loaded(optimizer, saved_groups, state_dict["state"])
    groups = [_merge_group(group, saved) for group, saved in zip(optimizer.param_groups, saved_groups, strict=True)]
    for group in groups:
        optimizer._check_group(group)
    optimizer._check_kinds(groups)
    optimizer._open()
    optimizer._settle(None)
    optimizer._protect()
    earlier, optimizer.param_groups = optimizer.param_groups, groups
    try:
        optimizer._create(optimizer._flatten(), [parameter for parameter, _ in by_parameter])
    except BaseException:
        optimizer.param_groups = earlier
        raise
    loaded = set()
    # A source may be another parameter's live state: take such ones aside first.
    sources = [
        (
            parameter,
            {
                kind: _aside(value, optimizer.state.storages, dict.get(optimizer.state, parameter, {}).get(kind))
                for kind, value in state.items()
            },
        )
        for parameter, state in by_parameter
    ]
    for parameter, state in sources:
        loaded.add(id(parameter))
        optimizer._fill(parameter, state)
    for parameter in list(optimizer.state):
        if id(parameter) in optimizer.state.places and id(parameter) not in loaded:
            optimizer._fill(parameter, {})
        elif id(parameter) not in loaded:
            del optimizer.state[parameter]
    optimizer._distrusted = None
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _merge_group(group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    return {**group, **saved, **{key: group[key] for key in OWN if key in group}}


def _check_loaded(
    optimizer: AdamW, saved_groups: list[dict[str, Any]], saved_state: dict[Any, Any]
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Refuse a state dict of another model, with names and shapes."""
    if len(saved_groups) != len(optimizer.param_groups):
        raise OptionError(f"the state dict has {len(saved_groups)} groups, the optimizer {len(optimizer.param_groups)}")
    pairs = []
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise OptionError(
                f"group {index} has {len(saved['params'])} parameters in the state dict and "
                f"{len(group['params'])} in the optimizer"
            )
        for position, (key, parameter) in enumerate(zip(saved["params"], group["params"], strict=True)):
            state = saved_state.get(key)
            # DCP gives an empty dict for a kind that its flattened state dict does not have.
            state = {kind: value for kind, value in (state or {}).items() if not isinstance(value, dict) or value}
            if not state:
                continue
            name = optimizer._name(index, position)
            for kind, value in state.items():
                if kind != "step" and kind not in KINDS:
                    raise OptionError(f"{name} has state {kind!r} in the state dict, which is not AdamW's")
                if kind == "step":
                    continue
                check_layout(name, parameter, kind, value)
            pairs.append((parameter, state))
    return pairs


def check_layout(name: str, parameter: torch.Tensor, kind: str, value: Any, source: str = " in the state dict") -> None:
    """Refuse a tensor that is not the parameter's state: of another shape, or cut over the ranks in another way."""
    if fits(parameter, value):
        return
    if not isinstance(value, torch.Tensor):
        raise OptionError(f"{name} has a {type(value).__name__} as its {kind}{source}; give a tensor of its shape")
    if value.shape != parameter.shape:
        raise OptionError(f"{name} has shape {tuple(parameter.shape)}, its {kind}{source} {tuple(value.shape)}")
    raise OptionError(
        f"{name} is {_layout(parameter)} on this rank, its {kind}{source} {_layout(value)}; load it with "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
    )


def fits(parameter: torch.Tensor, value: Any) -> bool:
    """Whether a value can be a parameter's state: it has the shape, and lies over the ranks alike."""
    if not isinstance(value, torch.Tensor) or local(value).shape != local(parameter).shape:
        return False
    placements = getattr(value, "placements", None)
    return placements is None or (
        value.shape == parameter.shape and placements == getattr(parameter, "placements", placements)
    )


def check_assigned(optimizer: AdamW, parameter: torch.Tensor, kind: str, value: Any) -> None:
    """Refuse what cannot be copied into a parameter's state."""
    state = optimizer.state
    view = state.places.get(id(parameter), {}).get(kind)
    if view is None:
        return
    if kind == "step":
        one = local(value).numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))
        if not one or not 0 <= float(value) < float("inf"):
            raise OptionError(f"invalid step of {optimizer._name_of(parameter)}: {value!r}; give a number of steps")
        return
    if not fits(parameter, value):
        check_layout(optimizer._name_of(parameter), parameter, kind, value, " as assigned")
    check_memory(local(view), f"{kind} of a parameter")
    owner = state.owner(value)
    if owner not in (None, (id(parameter), kind)):
        # It would be overwritten with its own next step, and a swap of two would lose one of them.
        raise OptionError(
            f"{kind} of {optimizer._name_of(parameter)} is to be state of this optimizer at another place; give a clone"
        )


def _layout(tensor: Any) -> str:
    return f"{tensor.placements if is_dtensor(tensor) else 'unsharded'} with shape {tuple(local(tensor).shape)}"


def _aside(value: Any, mine: Container[int], destination: Any) -> Any:
    """Return the value, or a copy of it where it is live state of this optimizer at another place."""
    if not isinstance(value, torch.Tensor) or local(value).numel() == 0:
        return value
    storage = local(value).untyped_storage()._cdata
    at_home = destination is not None and local(destination).data_ptr() == local(value).data_ptr()
    return local(value).clone() if storage in mine and not at_home else value


def copy_into(value: Any, view: torch.Tensor) -> None:
    """Copy a loaded value into its place, unless it is there already."""
    target = local(view)
    if not isinstance(value, torch.Tensor):
        target.fill_(value)
        return
    source = local(value).detach()
    if source.data_ptr() == target.data_ptr() and source.dtype == target.dtype and source.stride() == target.stride():
        return
    if target.numel() and source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
        # The same memory in another order: a transposed square, say.
        source = source.clone()
    target.copy_(source.reshape(target.shape))
