"""Numbers that an optimizer keeps outside of a parameter's state: in its groups, and on the object.

A step in units calls the optimizer's own ``step`` several times. Each call must find these numbers as they were before
the step, and leave them as one step does.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from forebay._device import is_cpu
from forebay._tensors import local
from forebay.optim.units import trees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

OWN_KEYS = ("params", "param_names")
"""The keys of a group that say which parameters it has."""

NOT_NUMBERS = {
    "state",
    "param_groups",
    "step",
    "_units",
    "_opt_called",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
}
"""Attributes of an optimizer that a step does not count in."""


class Counters:
    """The numbers of an optimizer at one moment.

    Parameters
    ----------
    optimizer
        The optimizer.
    state
        Its state; entries that belong to no parameter are numbers too.
    waits
        Whether ``now`` reads tensors on a device too, and waits for it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state: dict[Any, Any], *, waits: bool) -> None:
        self._optimizer, self._state, self._waits = optimizer, state, waits
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Lists of parameters are no numbers: the parameters change in each call.
        self._fixed = {id(parameter) for parameter in parameters}
        self._storages = {
            local(one).untyped_storage()._cdata
            for one in parameters
            if type(local(one)) in trees.PLAIN and local(one).layout == torch.strided
        }
        self._kept = [(place, {key: self._keep(place[key]) for key in self._keys(place)}) for place in self._places()]

    def _places(self) -> list[dict[Any, Any]]:
        return [vars(self._optimizer), self._state, *self._optimizer.param_groups]

    def _keys(self, place: dict[Any, Any]) -> Iterable[Any]:
        if place is self._state:
            return [key for key in place if not isinstance(key, torch.Tensor)]
        left_out = NOT_NUMBERS if place is vars(self._optimizer) else OWN_KEYS
        return [key for key in place if key not in left_out]

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors among the present numbers, also those inside of containers."""
        found = [trees.leaves(place[key]) for place in self._places() for key in self._keys(place)]
        return [tensor for of_number in found for _, tensor in of_number if id(tensor) not in self._fixed]

    def restore(self) -> None:
        """Set all numbers back."""
        for place, kept in self._kept:
            for key in self._keys(place):
                if key not in kept:
                    dict.pop(place, key)
            for key, back in kept.items():
                dict.__setitem__(place, key, back())

    def _keep(self, value: Any) -> Callable[[], Any]:
        """Return a function that returns the value, with its present contents."""
        if isinstance(value, torch.Tensor):
            if not self._counts(value):
                return lambda: value
            kept = value.detach().clone()

            def back() -> Any:
                with torch.no_grad():
                    value.detach().copy_(kept)
                return value

            return back
        if isinstance(value, dict):
            items = {key: self._keep(item) for key, item in value.items()}

            def back_in_dict() -> Any:
                found = {key: item() for key, item in items.items()}
                value.clear()
                value.update(found)
                return value

            return back_in_dict
        if isinstance(value, (list, deque, set)):
            members = [self._keep(item) for item in value]

            def back_in_list() -> Any:
                found = [item() for item in members]
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(found)
                return value

            return back_in_list
        if isinstance(value, tuple):
            inside = [self._keep(item) for item in value]

            def back_in_tuple() -> Any:
                for item in inside:
                    item()
                return value

            return back_in_tuple
        return lambda: value

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor holds numbers: it is no parameter, and no view of one."""
        if id(tensor) in self._fixed or type(tensor) not in trees.PLAIN or tensor.layout != torch.strided:
            return False
        return tensor.untyped_storage()._cdata not in self._storages

    def now(self) -> dict[str, Any]:
        """Return the present numbers in a form that can be compared, by what error messages call them."""
        found: dict[str, Any] = {}
        for place in self._places():
            for key in self._keys(place):
                if place is vars(self._optimizer):
                    name = f"the attribute {key}"
                elif place is self._state:
                    name = f"state[{key!r}]"
                else:
                    index = next(i for i, group in enumerate(self._optimizer.param_groups) if group is place)
                    name = f"{key} of group {index}"
                found[name] = self._described(place[key])
        return found

    def _described(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_read = self._counts(value) and (is_cpu(value.device) or (self._waits and not value.is_meta))
            return (str(value.dtype), tuple(value.shape), bits(value) if is_read else None)
        return described(value, self._described)


def described(value: Any, tensor: Callable[[Any], Any]) -> Any:
    """Return a value in a form that can be compared bit for bit; ``tensor`` describes tensors.

    Objects of other kinds are compared by their type alone.
    """
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, dict):
        # A parameter as a key is known by its place.
        keys = ["" if isinstance(key, torch.Tensor) else repr(key) for key in value]
        return list(zip(keys, [described(item, tensor) for item in value.values()], strict=True))
    if isinstance(value, (list, tuple, deque)):
        return [described(item, tensor) for item in value]
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        # As text, which tells zeros of both signs apart, and is equal for two NaNs.
        return repr(value)
    return type(value).__qualname__


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements as bytes."""
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
