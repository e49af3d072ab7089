"""Loading state dicts: in the format of the optimizer's own class, one unit after the other."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from forebay._live import wait_for_live
from forebay.optim.units import trees
from forebay.optim.units.parameters import members_of
from forebay.optim.units.plan import size_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.optim.units.manager import Units

HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


@torch.no_grad()
def load(owner: Units, state_dict: dict[str, Any]) -> None:
    """Load a state dict. Only one unit's state is on the device at a time.

    The class's own rules decide what becomes of the values: torch's give state the type of its parameter. A class with
    a ``load_state_dict`` of its own loads everything at once.
    """
    optimizer = owner.optimizer
    owner.settle(None)
    wait_for_live(optimizer)
    if owner.theirs.load_state_dict is not torch.optim.Optimizer.load_state_dict:
        _load_at_once(owner, state_dict)
        return
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        if changed is not None:
            state_dict = changed
    with _without_hooks(optimizer):
        _load_in_units(owner, state_dict)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _load_at_once(owner: Units, state_dict: dict[str, Any]) -> None:
    earlier = owner.state.plain()
    owner.optimizer.state = earlier
    try:
        owner.theirs.load_state_dict(owner.optimizer, state_dict)
    finally:
        found = vars(owner.optimizer)["state"]
        owner.take_state(found)
    owner.plan()
    owner.distrusted = None


def _load_in_units(owner: Units, state_dict: dict[str, Any]) -> None:
    optimizer = owner.optimizer
    saved_groups, saved = state_dict["param_groups"], state_dict["state"]
    fits = [len(group["params"]) for group in saved_groups] == [
        len(group["params"]) for group in optimizer.param_groups
    ]
    if not fits:
        # Torch raises the error that says so.
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
        return
    keys = list(chain.from_iterable(group["params"] for group in saved_groups))
    members = members_of(optimizer)
    pairs = {id(parameter): key for key, (_, parameter) in zip(keys, members, strict=True)}
    others = {key: value for key, value in saved.items() if key not in set(keys)}
    values = {key: saved[key] for key in keys if key in saved}
    # Before anything changes: a value that forebay cannot keep is refused here.
    sizes = [size_of(values.get(pairs[id(parameter)])) for _, parameter in members]
    owner.make_room(members, sizes)
    numbers = {pairs[id(parameter)]: id(parameter) for _, parameter in members}
    values = {key: _apart(owner, numbers[key], tree) for key, tree in values.items()}
    has_begun = False
    try:
        for number, unit in enumerate(owner.units):
            mine = {pairs[one]: values[pairs[one]] for one in unit.numbers if pairs[one] in values}
            part = {**state_dict, "state": {**mine, **(others if not number else {})}}
            torch.optim.Optimizer.load_state_dict(optimizer, part)
            found, has_begun = vars(optimizer)["state"], True
            optimizer.state = owner.state
            if not number:
                for key in [key for key in owner.state if not isinstance(key, torch.Tensor)]:
                    dict.pop(owner.state, key)
            for parameter in unit.parameters:
                dict.pop(owner.state, parameter, None)
            dict.update(owner.state, found)
            owner.refresh(unit)
        here = {id(parameter) for _, parameter in members}
        for key in [key for key in owner.state if isinstance(key, torch.Tensor) and id(key) not in here]:
            dict.pop(owner.state, key)
    except BaseException as error:
        optimizer.state = owner.state
        if has_begun:
            owner.distrusted = f"its last load broke off with {type(error).__name__}: {error}"
        raise
    owner.distrusted = None


def _apart(owner: Units, number: int, tree: Any) -> Any:
    """Return a parameter's saved state with copies of tensors that are live state in another place."""

    def own(path: trees.Path, tensor: torch.Tensor) -> torch.Tensor:
        found = owner.home_of(tensor)
        is_elsewhere = found is not None and found != (number, path)
        return tensor.clone() if is_elsewhere else tensor

    return trees.replaced(trees.copied(tree), own)


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    kept = {name: getattr(optimizer, name) for name in HOOKS}
    for name in HOOKS:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, hooks in kept.items():
            setattr(optimizer, name, hooks)
