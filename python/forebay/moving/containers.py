"""Where a mapping holds tensors: dicts and lists, nested in each other, and tuples in them.

Dicts and lists are edited. A tuple cannot be, so the dict or list that holds it gets a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableSequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch

from forebay.errors import Error, OptionError
from forebay.optim.state import ParameterState, State

OURS = (State, ParameterState)
"""State of forebay's optimizers, which moves by itself."""


class Slot(NamedTuple):
    """A place in a dict or list that holds a tensor, or a tuple with tensors."""

    name: str
    container: Any
    key: Any
    value: Any


def check_mapping(mapping: Any) -> None:
    """Raise if something is no mapping."""
    if isinstance(mapping, torch.optim.Optimizer):
        raise OptionError(f"cannot move a {type(mapping).__name__}; give its state, or use forebay.Sleeper")
    if isinstance(mapping, (torch.nn.Module, torch.Tensor)):
        raise OptionError(f"cannot move a {type(mapping).__name__}; use its to(), or forebay.Sleeper for a module")
    if not (isinstance(mapping, list) or _is_mapping(mapping)):
        raise OptionError(f"cannot move a {type(mapping).__name__}; give a dict, another mapping, or a list")


def _is_mapping(thing: Any) -> bool:
    """Whether a thing is a mapping. Megatron's chained optimizers have one that is no ``Mapping`` for Python."""
    kind = type(thing)
    return isinstance(thing, Mapping) or (hasattr(kind, "items") and hasattr(kind, "__getitem__"))


def slots(mapping: Any) -> Iterator[Slot]:
    """Go through all places of a mapping that hold tensors."""
    seen: set[int] = set()
    # Containers to be looked into, and their names. Not recursive: a mapping may contain itself.
    left: list[tuple[str, Any]] = [("", mapping)]
    while left:
        name, container = left.pop()
        if id(container) in seen or isinstance(container, OURS):
            continue
        seen.add(id(container))
        for index, (key, value) in enumerate(list(_items(container))):
            inner = f"{name}[{_label(key, index)}]"
            if any(True for _ in tensors_in(value)):
                yield Slot(inner, container, key, value)
            left.extend(_containers_in(value, inner))


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    pairs: Any = enumerate(container) if isinstance(container, MutableSequence) else container.items()
    yield from pairs


def _label(key: Any, index: int) -> str:
    """Return a key as a message shows it. A parameter would be shown with its values."""
    text = f"key {index}" if isinstance(key, torch.Tensor) else repr(key)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _containers_in(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Go through the dicts and lists that a value is, or that are in its tuples."""
    if isinstance(value, (Mapping, MutableSequence)):
        yield name, value
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _containers_in(item, f"{name}[{index}]")
    elif isinstance(value, AbstractSet) and any(isinstance(item, torch.Tensor) for item in value):
        raise OptionError(f"cannot replace tensors in the {type(value).__name__} {name}; use a list or a dict")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Go through the tensors that a value is, or that are in its tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)


def replaced(value: Any, new: dict[int, torch.Tensor]) -> Any:
    """Return a value with new tensors; the value itself if it has none of the old ones."""
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    if not isinstance(value, tuple):
        return value
    items = [replaced(item, new) for item in value]
    if all(item is old for item, old in zip(items, value, strict=True)):
        return value
    # A named tuple takes its items one by one.
    kind: Any = type(value)
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def check_editable(found: list[Slot]) -> None:
    """Raise if a value cannot be replaced."""
    for slot in found:
        try:
            # Whether an assignment is refused shows only when one is tried; this one changes nothing.
            slot.container[slot.key] = slot.value
            if isinstance(slot.value, tuple):
                replaced(slot.value, {id(tensor): tensor.detach() for tensor in tensors_in(slot.value)})
        except Exception as error:
            raise _refusal(slot, error) from error


def rebind(found: list[Slot], new: dict[int, torch.Tensor]) -> None:
    """Put new tensors in the place of old ones; if that fails, the old ones are put back."""
    # A tuple that is held twice stays one tuple.
    tuples: dict[int, Any] = {}
    done: list[Slot] = []
    slot: Slot | None = None
    try:
        for slot in found:
            if id(slot.value) not in tuples:
                tuples[id(slot.value)] = replaced(slot.value, new)
            done.append(slot)
            slot.container[slot.key] = tuples[id(slot.value)]
    except BaseException as error:
        for old in done:
            old.container[old.key] = old.value
        if slot is not None and isinstance(error, Exception):
            raise _refusal(slot, error) from error
        raise


def _refusal(slot: Slot, error: Exception) -> Error:
    kind = type(slot.container).__name__
    return OptionError(
        f"cannot replace {slot.name} in a {kind}: {type(error).__name__}: {error}; make a dict of it that can be edited"
    )
