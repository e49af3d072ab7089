"""Parameters whose update is still to come: whoever reads one waits for it.

Between ``step()`` and its update a parameter is of a subclass of its own class, made here. Torch hands every use of
such a tensor to ``__torch_function__``, which waits, makes the parameter an ordinary one again, and then does what was
asked. What only asks for shape, type or gradient does not wait. The object stays the same, and nothing is left of this
when the parameter was read.

Code that reads the memory without asking torch's Python door is not seen here: extensions in C++, compiled code, and
FSDP2's gathering of shards. For these, ``reads.py`` waits before modules are called.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo

from forebay.optim.overlap.getters import GETTERS, GRADIENT, METADATA

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.optim.overlap.units import Steps

_PASSES: set[Any] = {*GETTERS.values(), *METADATA, *GRADIENT}

_classes: dict[type, type] = {}
"""The class of pending parameters for each class of parameters."""

_waits: dict[int, weakref.ref[Steps]] = {}
"""The overlapped step that updates a pending parameter, by the parameter's id."""


class Pending:
    """What all classes of pending parameters have."""

    __slots__ = ()


# Left out of compiled graphs: a parameter that is pending when its module is first compiled.
@_disable_dynamo
def _torch_function(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Wait for the parameters that a function is given, unless it reads no memory; then call it."""
    if func in _PASSES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    found: list[torch.Tensor] = []
    _collect((args, kwargs), found)
    settle(found)
    if not found:
        # It is inside a kind of container that is unknown here.
        settle_everything()
    return func(*args, **(kwargs or {}))


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    """Find pending parameters in nested arguments."""
    if isinstance(value, Pending):
        found.append(value)  # type: ignore[arg-type]
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    settle([self])
    return self.__deepcopy__(memo)


def _reduce(self: Any, protocol: Any) -> Any:
    settle([self])
    return self.__reduce_ex__(protocol)


def _repr(self: Any, *arguments: Any, **keywords: Any) -> str:
    settle([self])
    return repr(self)


def class_for(plain: type) -> type:
    """Return the class of pending parameters of a class."""
    found = _classes.get(plain)
    if found is not None:
        return found
    attributes: dict[str, Any] = {
        # Without this, instances would have another layout and could not change their class.
        "__slots__": (),
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "__torch_function__": classmethod(_torch_function),
        # Python methods that look at the class before torch's door is reached.
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce,
        "__repr__": _repr,
        "_plain": plain,
    }
    if hasattr(plain, "_local_tensor"):
        attributes["_local_tensor"] = property(_local_tensor, _set_local_tensor)
    made = type(plain)(plain.__name__, (plain, Pending), attributes)
    return _classes.setdefault(plain, made)


def _local_tensor(self: Any) -> Any:
    """Return the shard of a DTensor, whose methods read it without torch's door."""
    settle([self])
    return self._local_tensor


def _set_local_tensor(self: Any, value: Any) -> None:
    settle([self])
    self._local_tensor = value


def mark(parameters: Iterable[torch.Tensor], overlap: weakref.ref[Steps]) -> None:
    """Make parameters pending: this overlapped step updates them."""
    for parameter in parameters:
        cls = type(parameter)
        if issubclass(cls, Pending):
            settle([parameter])
            cls = type(parameter)
        _waits[id(parameter)] = overlap
        parameter.__class__ = _classes.get(cls) or class_for(cls)


def restore(parameter: torch.Tensor) -> None:
    """Make a pending parameter an ordinary one, without waiting."""
    if isinstance(parameter, Pending):
        _waits.pop(id(parameter), None)
        parameter.__class__ = type(parameter)._plain  # type: ignore[attr-defined]


def settle(parameters: list[torch.Tensor]) -> None:
    """Wait for the updates of pending parameters, and make them ordinary ones."""
    for parameter in parameters:
        reference = _waits.get(id(parameter))
        overlap = None if reference is None else reference()
        if overlap is not None and isinstance(parameter, Pending):
            overlap.settle([parameter])
        # A copy has the class too, but nothing updates it; and so has what an optimizer has left behind.
        restore(parameter)


def settle_everything() -> None:
    """Wait for all pending parameters of all optimizers."""
    waiting = [reference() for reference in list(_waits.values())]
    for overlap in dict.fromkeys(one for one in waiting if one is not None):
        overlap.settle(None)
