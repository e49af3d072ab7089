"""An optimizer that a framework has built becomes one of forebay's, and torch's again. It stays the same object.

[Note: the same object]
Schedulers, trainers and checkpoint managers hold the optimizer. So the object changes its class and keeps everything
else: groups, hooks, and attributes that others set. ``torch.optim.AdamW`` becomes ``forebay.AdamW``, which is its
subclass. A subclass of torch's class becomes a class that inherits from both.

Others may also hold torch's ``step``: a scheduler puts a wrapper of it on the object, and accelerate keeps the bound
method. Torch's ``step`` asks the object for the tensors of each group, and ``Optimizer._init_group`` answers by taking
forebay's step.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch
from torch._compile import _disable_dynamo

from forebay._tensors import check_parameter, local, state_like
from forebay._wrapped import bare, members
from forebay.errors import OptionError
from forebay.optim.adam import Adam
from forebay.optim.adamw import AdamW
from forebay.optim.base import Optimizer
from forebay.optim.load import loaded_values, replace_state
from forebay.optim.options import check_options
from forebay.optim.sgd import SGD
from forebay.optim.state import MASTER, STEP
from forebay.optim.units import InUnits, UnitKeywords, offload_in_units, restore_from_units

if TYPE_CHECKING:
    from collections.abc import Callable

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741

CLASSES: tuple[type[Optimizer], ...] = (AdamW, Adam, SGD)
"""The classes with a counterpart in torch; a subclass in torch stands before its base."""

_JOINED: dict[tuple[type, type], Any] = {}

INERT = {
    *("__init__", "__module__", "__doc__", "__qualname__", "__dict__", "__weakref__", "__annotations__"),
    # The compiler adds these to every class from Python 3.13 on.
    *("__firstlineno__", "__static_attributes__"),
}
"""What a subclass of torch's optimizer may define for itself: it has no part in a step, in state or in groups."""


def offload(optimizer: O, **options: Unpack[UnitKeywords]) -> O:
    """Move an optimizer's state to the host and its step into forebay's engine. Returns the same object.

    Takes ``torch.optim.AdamW``, ``Adam`` and ``SGD``, with or without state, also inside accelerate's wrapper and those
    like it. Schedulers, hooks, groups, state dicts and pickles keep working, also those made before. bf16 and f16
    parameters get masters. If something is refused, the optimizer stays as it was.

    Parameters
    ----------
    optimizer
        An optimizer of torch, or any other: without an update rule of forebay, its own step runs in units.
    options
        The options of :class:`forebay.AdamW` that torch's optimizers do not have, such as ``placement``.

    Returns
    -------
    The optimizer that was given.
    """
    inner = _one(optimizer)
    if isinstance(inner, (Optimizer, InUnits)):
        if options:
            raise OptionError(f"{type(inner).__name__} is offloaded already; give the options to its constructor")
        return optimizer
    for name in options:
        if name in inner.defaults and name not in UnitKeywords.__annotations__:
            raise OptionError(
                f"{name} is a setting of {type(inner).__name__}; set it there, and leave it out of offload"
            )
    cls = _class_for(inner)
    if cls is None:
        offload_in_units(inner, options)
        return optimizer
    checked = check_options(cls, options, "offload()")
    original, attributes = type(inner), dict(vars(inner))
    state = vars(inner).pop("state")
    try:
        inner.__class__ = cls
        _adopt(inner, checked, original, state)
    except BaseException:
        Optimizer.alive.discard(inner)
        inner.__class__ = original
        vars(inner).clear()
        vars(inner).update(attributes)
        raise
    return optimizer


def _one(optimizer: Any) -> Any:
    """Return the optimizer that is meant, without wrappers; raise if there is none or more than one."""
    inner = bare(optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise OptionError(f"invalid optimizer: {type(inner).__name__}; give a torch.optim.Optimizer")
    if any(one is not inner for one in members(inner)):
        raise OptionError(f"{type(inner).__name__} holds other optimizers; give each of them")
    return inner


def _adopt(optimizer: Any, options: Any, original: type, state: dict[torch.Tensor, dict[str, Any]]) -> None:
    """Give forebay's attributes and state to an object that has just become one of forebay's optimizers."""
    optimizer._set_up(options, optimizer.defaults)
    optimizer._restores = original
    # The class may never have been constructed, and construction is when torch puts its hooks around ``step``.
    optimizer._patch_step_function()
    for index, group in enumerate(optimizer.param_groups):
        for key, value in optimizer.defaults.items():
            group.setdefault(key, value)
        for position, parameter in enumerate(group["params"]):
            check_parameter(parameter, optimizer._name(index, position), optimizer._label)
        optimizer._check_new_group(group)
    optimizer._choose_device()
    follow_class(optimizer)
    places = [
        (p, index, at) for index, group in enumerate(optimizer.param_groups) for at, p in enumerate(group["params"])
    ]
    values = [(p, loaded_values(optimizer, optimizer._name(index, at), p, state.get(p))) for p, index, at in places]
    found = [(parameter, of_parameter) for parameter, of_parameter in values if of_parameter]
    if found:
        with torch.no_grad():
            replace_state(optimizer, found)


def follow_class(optimizer: torch.optim.Optimizer) -> None:
    """Make the ``step`` that a scheduler has put on the object call the one of its present class."""
    if getattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched", False):
        vars(optimizer)["step"] = _tracked(optimizer)


def _tracked(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the object's ``step`` with the mark by which schedulers know that it was called.

    Schedulers put such a function on the object and keep the ``step`` of the class that it had then. Through that,
    ``torch.compile`` would trace torch's own step.
    """
    import weakref

    reference = weakref.ref(optimizer)

    @_disable_dynamo
    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        alive: Any = reference()
        alive._opt_called = True
        return type(alive).step(alive, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _class_for(optimizer: torch.optim.Optimizer) -> type[Optimizer] | None:
    """Return the class that an optimizer becomes; None if no update rule does the same as its step."""
    found = type(optimizer)
    ours = next((one for one in CLASSES if one.reference is not None and issubclass(found, one.reference)), None)
    if ours is None:
        return None
    assert ours.reference is not None
    if found is ours.reference:
        return ours
    for cls in found.__mro__[: found.__mro__.index(ours.reference)]:
        if any(name not in INERT and hasattr(ours, name) and not _is_hook(cls, name) for name in vars(cls)):
            return None
    joined: type[Optimizer] = _joined(ours, found)
    return joined


def _is_hook(cls: type, name: str) -> bool:
    """Whether an attribute is the wrapper of an inherited ``step`` that torch puts on the class of a first instance."""
    value = vars(cls)[name]
    if name != "step" or not getattr(value, "hooked", False):
        return False
    base = next(vars(one)["step"] for one in cls.__mro__[1:] if "step" in vars(one))
    # The base's step may have got a wrapper of its own since.
    return value.__wrapped__ in (base, getattr(base, "__wrapped__", None))


def _joined(ours: type[Optimizer], theirs: type[torch.optim.Optimizer]) -> Any:
    """Return a class that is both; it has the name of the user's class."""
    if (ours, theirs) in _JOINED:
        return _JOINED[ours, theirs]

    def reduce(self: Any, _protocol: Any) -> Any:
        return _remake, (ours, theirs), self.__getstate__()

    attributes = {"__module__": theirs.__module__, "__doc__": theirs.__doc__, "__reduce_ex__": reduce}
    return _JOINED.setdefault((ours, theirs), type(theirs.__name__, (ours, theirs), attributes))


def _remake(ours: type[Optimizer], theirs: type[torch.optim.Optimizer]) -> Optimizer:
    cls = _joined(ours, theirs)
    made: Optimizer = cls.__new__(cls)
    return made


def restore(optimizer: O) -> O:
    """Make one of forebay's optimizers torch's again: state on the parameters' device. Returns the same object.

    The state has torch's keys and types, and no masters: a bf16 parameter keeps its rounded weight, and its moments
    become bf16. An optimizer that ``offload`` has converted gets the class that it had before.

    Parameters
    ----------
    optimizer
        An optimizer of forebay with a counterpart in torch, also inside a wrapper. One of torch's is returned as it is.
    """
    inner: Any = _one(optimizer)
    if isinstance(inner, InUnits):
        restore_from_units(inner)
        return optimizer
    if not isinstance(inner, Optimizer):
        return optimizer
    original: Any = inner._restores or inner.reference
    if original is None:
        raise OptionError(f"torch has no counterpart of {inner._label}; keep it, or read its state with state_dict")
    inner.check_trusted("restored")
    inner._check_available()
    if inner._overlap is not None:
        inner._overlap.remove()
    state = inner.state.__class__.plain(inner.state)
    for group in inner.param_groups:
        for parameter in group["params"]:
            if parameter in state:
                state[parameter] = _as_torch(parameter, state[parameter], group)
    inner.close()
    Optimizer.alive.discard(inner)
    for name in inner._own_attributes:
        vars(inner).pop(name, None)
    inner.__class__ = original
    inner.state = state
    follow_class(inner)
    if inner.defaults.get("fused"):
        inner._step_supports_amp_scaling = True
    return optimizer


def _as_torch(parameter: torch.Tensor, values: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Return copies of a parameter's state with the types and on the devices that torch's optimizer gives them."""
    inner = local(parameter)
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name == MASTER:
            continue
        if name == STEP:
            is_on_device = group.get("fused") or group.get("capturable")
            found[name] = value.detach().clone().to(inner.device if is_on_device else "cpu")
        elif isinstance(value, torch.Tensor):
            found[name] = state_like(parameter, local(value).to(inner.device, inner.dtype, copy=True))
        else:
            found[name] = value
    return found
