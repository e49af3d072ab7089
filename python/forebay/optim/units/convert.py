"""An optimizer without an update rule runs in units, and plainly again. It stays the same object.

Its class becomes a subclass of the one that it had, so that everything else about it stays: its own methods, groups,
hooks, and whatever others hold of it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._compile import _disable_dynamo

from forebay._registry import register
from forebay.errors import OptionError
from forebay.optim.base import Optimizer
from forebay.optim.units import trees
from forebay.optim.units.check import UntriedError
from forebay.optim.units.load import load
from forebay.optim.units.manager import Units
from forebay.optim.units.options import UnitOptions, check_unit_options
from forebay.optim.units.parameters import check_parameters
from forebay.optim.units.standins import raw_step
from forebay.optim.units.unit import swap

if TYPE_CHECKING:
    from collections.abc import Mapping

_JOINED: dict[type, Any] = {}

YIELDING = ("stats", "synchronize", "last_backward", "check_trusted", "distrust")
"""Methods that give way to those of the user's class."""


NOT_METHODS = (
    *("__slots__", "__dict__", "__weakref__", "__qualname__", "__annotations__"),
    *("__firstlineno__", "__static_attributes__"),
)


class InUnits:
    """What an optimizer that runs in units has in addition to its own class.

    [Note: the order of the bases]
    An object can change its class only if both classes lay out their objects in the same way, and the first base
    decides on that. So the user's class is the first base, and the methods below are put into the new class itself.
    """

    __slots__ = ()
    offloads_itself: ClassVar[bool] = True
    """True: frameworks need not move the state between host and GPU."""
    _theirs: ClassVar[Any]
    """The class that the object has without forebay."""
    _units: Units

    @_disable_dynamo
    def step(self, *arguments: Any, **keywords: Any) -> Any:
        """Update every parameter that has a gradient, in units, with the class's own step.

        Parameters
        ----------
        arguments, keywords
            As for the class's own step. A closure is called once, before the first unit.
        """
        if not isinstance(self, InUnits):
            # A wrapper kept this method, and ``restore`` has made the object its own class's again since.
            return type(self).step.__wrapped__(self, *arguments, **keywords)
        own = raw_step(self._units.theirs)
        if self._units.inside:
            return own(self, *arguments, **keywords)
        names = [name for name in inspect.signature(own).parameters if name != "self"]
        place = names.index("closure") if "closure" in names else len(arguments)
        closure = arguments[place] if place < len(arguments) else keywords.get("closure")
        if closure is not None and self._units.overlap is not None:
            raise OptionError("step(closure) is not supported under overlap_step; call step() after a backward")
        if closure is not None and self._units.verdict.calls_closure:
            # Before the first unit: a closure may read all groups. Each unit is given the loss.
            with torch.enable_grad():
                loss = closure()
            if place < len(arguments):
                arguments = (*arguments[:place], lambda: loss, *arguments[place + 1 :])
            else:
                keywords["closure"] = lambda: loss
        return self._units.take_step(arguments, keywords)

    @_disable_dynamo
    def _take_step(self) -> None:
        self._units.take_step()

    def _init_group(self, group: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        """Take the step when torch's own ``step``, kept from before ``offload``, runs on this object.

        Torch's ``step`` calls this for each group. It is given no tensors to update then.
        """
        if self._units.inside:
            return self._theirs._init_group(self, group, *arguments, **keywords)
        if group is self._units.optimizer.param_groups[0]:
            if torch._guards.TracingContext.try_get() is not None:
                # As in ``forebay.optim.base``: torch.compile then leaves the call out of its graph.
                from torch._dynamo.exc import Unsupported

                raise Unsupported("forebay takes its step outside of compiled graphs")
            self._take_step()
        return self._theirs._init_group(self, {**group, "params": []}, *arguments, **keywords)

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups in the class's own format. Tensors are the live ones, dicts and lists are copies."""
        packed: dict[str, Any] = self._theirs.state_dict(self)
        return {**packed, "state": {key: trees.copied(value) for key, value in packed.get("state", {}).items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the class's own format, one unit after the other."""
        load(self._units, state_dict)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        units = self._units
        units.check_trusted("copied")
        units.settle(None)
        kept = {
            parameter: [path for path, tensor in trees.leaves(tree) if units.is_hosted(tensor)]
            for parameter, tree in dict.items(units.state)
            if isinstance(parameter, torch.Tensor)
        }
        own: Any = self.__getstate__()
        return _remake, (units.theirs,), {**own, "_units": (units.options, kept)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_units" not in state:
            self._theirs.__setstate__(self, state)
            return
        state = dict(state)
        options, kept = state.pop("_units")
        self._theirs.__setstate__(self, state)
        units = _attach(self, self._theirs, options, _small_in_units)
        units.expected_keys = {(id(parameter), path) for parameter, paths in kept.items() for path in paths}

    def stats(self) -> dict[str, float | int]:
        """Return the last step and the memory in numbers. Waits for the step's stores.

        ``device_bytes`` is the memory on the device in a step: three units, or fewer if there are fewer. ``unit_bytes``
        is the largest unit. Before the first step both are forecasts, and 0 if no forecast is possible.
        """
        return self._units.stats()

    def synchronize(self) -> None:
        """Wait until every store of the last step has ended."""
        self._units.settle(None)

    def last_backward(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: updates begin at ``step``, so the last backward needs no mark."""
        return contextlib.nullcontext()

    def check_trusted(self, done: str) -> None:
        """Raise if a step or a load failed and left the state half written."""
        self._units.check_trusted(done)

    def distrust(self, reason: str) -> None:
        """Refuse steps until state is loaded again."""
        self._units.distrusted = f"its last load broke off with: {reason}"

    # Other parts of forebay call these for all of its optimizers.

    def _release_ring(self) -> None:
        self._units.settle(None)

    def _restore_ring(self) -> None:
        """Do nothing: the memory on the device is allocated in each step."""

    def _protect(self) -> None:
        from forebay._live import wait_for_live

        wait_for_live(self._units.optimizer)


def joined(theirs: type[torch.optim.Optimizer]) -> Any:
    """Return the class of this class's optimizers that run in units; it has the same name."""
    if theirs not in _JOINED:
        # See the note at ``InUnits``.
        own = {name: value for name, value in vars(InUnits).items() if name not in NOT_METHODS}
        for name in YIELDING:
            if hasattr(theirs, name):
                own.pop(name, None)
        own |= {"__module__": theirs.__module__, "__doc__": theirs.__doc__, "_theirs": theirs}
        _JOINED[theirs] = type(theirs.__name__, (theirs, InUnits), own)
    return _JOINED[theirs]


def _remake(theirs: type[torch.optim.Optimizer]) -> Any:
    cls = joined(theirs)
    return cls.__new__(cls)


def _attach(optimizer: Any, theirs: Any, options: UnitOptions, in_units: Any) -> Units:
    """Make an optimizer run in units. Its state is moved when units are made."""
    units = Units(optimizer, theirs, options, in_units)
    values = vars(optimizer)["state"]
    optimizer.__class__ = joined(theirs)
    optimizer._units = units
    units.take_state(values)
    # The class may never have been constructed, and construction is when torch puts its hooks around ``step``.
    optimizer._patch_step_function()
    if in_units is not None:
        alive: Any = Optimizer.alive
        alive.add(optimizer)
        register("optimizer", optimizer)
    return units


def _small_in_units(small: Any) -> None:
    _attach(small, type(small), UnitOptions(unit_bytes=1), None)


def offload_in_units(optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Make an optimizer run in units, and move its state to the host. If something is refused, it stays as it was.

    Parameters
    ----------
    optimizer
        An optimizer for which forebay has no update rule.
    given
        The options by name.
    """
    from forebay.optim.offload import follow_class

    theirs = type(optimizer)
    options = check_unit_options(f"{theirs.__module__}.{theirs.__qualname__}", given)
    trial = Units(optimizer, theirs, options, _small_in_units)
    check_parameters(optimizer)
    # An optimizer that cannot take a step yet is tried out with its first one. Some must be switched to training first.
    with contextlib.suppress(UntriedError):
        trial.try_out()
    attributes, state = dict(vars(optimizer)), vars(optimizer)["state"]
    backup = {key: trees.copied(value) for key, value in dict.items(state)}
    try:
        units = _attach(optimizer, theirs, options, _small_in_units)
        units.trust_trial(trial)
        units.plan()
        follow_class(optimizer)
    except BaseException as error:
        if isinstance(error, TypeError) and type(optimizer) is theirs:
            raise OptionError(
                f"the class of {theirs.__qualname__} cannot be extended: {error}; keep this optimizer as it is"
            ) from error
        Optimizer.alive.discard(optimizer)  # type: ignore[arg-type]
        optimizer.__class__ = theirs
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        dict.update(state, backup)
        raise


@torch.no_grad()
def restore_from_units(optimizer: Any) -> None:
    """Make an optimizer that runs in units its own class's again, with its state on the parameters' device."""
    from forebay.optim.offload import follow_class

    units: Units = optimizer._units
    units.check_trusted("restored")
    if units.overlap is not None:
        units.overlap.remove()
    units.arrange()
    units.settle(None)
    for unit in units.units:
        units.refresh(unit)
        if (home := unit.home) is not None:
            swap(units.state, unit.parameters, home.on(units.device))
    optimizer.state = defaultdict(dict, dict.items(units.state))
    Optimizer.alive.discard(optimizer)
    del optimizer._units
    optimizer.__class__ = units.theirs
    follow_class(optimizer)
