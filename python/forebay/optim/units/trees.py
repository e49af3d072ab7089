"""Nested state: dicts, lists and tuples with tensors inside, and tensors that consist of others."""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from forebay._tensors import describe_like, is_dtensor
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Path = tuple[Any, ...]
"""The keys that lead to a tensor in a parameter's state."""

PLAIN = (torch.Tensor, torch.nn.Parameter)


def replaced(value: Any, change: Callable[[Path, torch.Tensor], torch.Tensor]) -> Any:
    """Return nested state in which ``change`` has replaced each tensor. Dicts and lists are changed in place.

    Parameters
    ----------
    value
        Nested state.
    change
        Takes a tensor's path and the tensor, and returns the one to put there.
    """
    return _replaced(value, change, (), set())


def _replaced(value: Any, change: Callable[[Path, torch.Tensor], torch.Tensor], path: Path, seen: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, (dict, list, deque)):
        # A list that is in the state twice is changed once.
        if id(value) not in seen:
            seen.add(id(value))
            for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                new = _replaced(item, change, (*path, key), seen)
                if new is not item:
                    value[key] = new
        return value
    if isinstance(value, tuple):
        items = [_replaced(item, change, (*path, index), seen) for index, item in enumerate(value)]
        if all(new is item for new, item in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def leaves(value: Any) -> list[tuple[Path, torch.Tensor]]:
    """Return the tensors in nested state with their paths; a tensor that is there twice comes once."""
    found: dict[int, tuple[Path, torch.Tensor]] = {}

    def note(path: Path, tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(id(tensor), (path, tensor))
        return tensor

    replaced(value, note)
    return list(found.values())


def copied(value: Any) -> Any:
    """Return nested state with new dicts, lists and tuples around the same values."""
    if isinstance(value, (dict, list, deque)):
        new = copy.copy(value)
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            new[key] = copied(item)
        return new
    if type(value) is tuple:
        return tuple(copied(item) for item in value)
    return value


def text_of(path: Path) -> str:
    """Return a path as text: ``['momentum'][0]``."""
    return "".join(f"[{key!r}]" for key in path)


def parts(tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Return the tensors that have the bytes of a tensor of state.

    A DTensor has a local tensor, and a wrapper such as an 8-bit tensor says of which tensors it consists.

    Parameters
    ----------
    tensor
        A tensor of state.
    name
        What error messages call it.
    """
    if type(tensor) in PLAIN:
        if tensor.layout != torch.strided:
            raise OptionError(f"{name} has layout {tensor.layout}; forebay keeps dense state only")
        if tensor.grad_fn is not None or (tensor.requires_grad and type(tensor) is torch.Tensor):
            raise OptionError(f"{name} is part of an autograd graph; detach it")
        return [tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor]
    if is_dtensor(tensor):
        return parts(tensor._local_tensor, name)  # type: ignore[attr-defined]
    wait = getattr(tensor, "trigger_wait", None)
    if wait is not None:
        return parts(wait(), name)
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or not hasattr(type(tensor), "__tensor_unflatten__"):
        raise OptionError(
            f"{name} is a {type(tensor).__name__}, which forebay cannot take apart; the class needs "
            "__tensor_flatten__ and __tensor_unflatten__"
        )
    return [part for key in flatten()[0] for part in parts(getattr(tensor, key), name)]


def rebuilt(tensor: torch.Tensor, new: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the same kind as ``tensor`` over other memory.

    Parameters
    ----------
    tensor
        A tensor of state.
    new
        Gives one tensor for each of its ``parts``.
    """
    if type(tensor) is torch.Tensor:
        return next(new)
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(next(new), tensor.requires_grad)
    if is_dtensor(tensor):
        from torch.distributed.tensor import DTensor

        source: Any = tensor
        inner = rebuilt(source._local_tensor, new)
        made: Any = DTensor(inner, source._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        describe_like(tensor, made)
        result: torch.Tensor = made
        return result
    if hasattr(tensor, "trigger_wait"):
        return next(new)
    flatten: Any = tensor.__tensor_flatten__  # type: ignore[attr-defined]
    keys, context = flatten()
    inside = {key: rebuilt(getattr(tensor, key), new) for key in keys}
    unflatten: Any = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
    whole: torch.Tensor = unflatten(inside, context, tensor.size(), tensor.stride())
    return whole
