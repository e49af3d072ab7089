"""The ``state`` of an optimizer whose state lies in memory of the engine's, which the device may still be writing.

Reading waits, and writing goes through: what is assigned is copied to where the engine works, and what is taken out
starts anew with the next step, as with ``torch.optim``.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Self

import torch

from forebay._loading import check_assigned
from forebay._torch import is_dtensor, local, state_like

if TYPE_CHECKING:
    from collections.abc import ItemsView, ValuesView

    from forebay.optim import AdamW


class Kept(dict[str, Any]):
    """The state of one parameter, whose tensors stay where they are: assigning one copies into it."""

    def __init__(self, state: State, parameter: torch.Tensor) -> None:
        super().__init__()
        # None once it was taken out of the state: then it is a dict like any other.
        self.state: State | None = state
        self.parameter = parameter

    def __setitem__(self, kind: str, value: Any) -> None:
        if self.state is not None:
            value = self.state.write(self.parameter, kind, value)
        super().__setitem__(kind, value)

    def __delitem__(self, kind: str) -> None:
        super().__delitem__(kind)
        if self.state is not None:
            self.state.edited = True

    # A dict's own do not call the two above.
    clear = MutableMapping.clear
    pop = MutableMapping.pop
    popitem = MutableMapping.popitem
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class State(defaultdict["torch.Tensor", dict[str, Any]]):
    """A parameter's state by parameter, as in ``torch.optim``, read only after its bytes have arrived.

    Looking up one parameter waits for the stores into that parameter's state and for nothing else; going through all
    of them waits for all stores. Tensors that were looked up before a step are overwritten by that step: look them up
    again, or call ``synchronize``.
    """

    def __init__(self, optimizer: AdamW) -> None:
        super().__init__(dict)
        self._optimizer = optimizer
        # The tensors over the memory of each parameter's state, by the parameter's id, whatever the dicts say.
        self.places: dict[int, dict[str, Any]] = {}
        # Those in a slab once more: what is assigned to the ``.data`` of one that was handed out does not reach these.
        self._origins: dict[int, dict[str, torch.Tensor]] = {}
        # Whose the storages of these tensors are.
        self.storages: dict[int, tuple[int, str]] = {}
        # Dicts that were taken out while their values still lie where the parameter's state will lie again.
        self._taken: dict[int, weakref.ref[Kept]] = {}
        # Whether something was taken out that has to start anew before the next step.
        self.edited = False

    # Reading.

    def _show(self, parameter: torch.Tensor | None) -> None:
        """Wait for a parameter's state, or for all, and have the tensors show what is there.

        Some programs move state by ``value.data = value.to(...)``. The engine goes on where it was, and so does this.
        """
        self._optimizer._settle(parameter)
        for number in list(self._origins) if parameter is None else [id(parameter)]:
            for kind, origin in self._origins.get(number, {}).items():
                view = local(self.places[number][kind])
                if view.data_ptr() != origin.data_ptr():
                    view.data = origin

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        self._show(parameter)
        return super().__getitem__(parameter)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Return a parameter's state, or the default."""
        self._show(parameter)
        return super().get(parameter, default)

    def items(self) -> ItemsView[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        """Go through all parameters and their state."""
        self._show(None)
        return super().items()

    def values(self) -> ValuesView[dict[str, Any]]:  # type: ignore[override]
        """Go through the state of all parameters."""
        self._show(None)
        return super().values()

    def plain(self) -> defaultdict[Any, Any]:
        """Return what torch's own optimizers have: a copy belongs to no engine."""
        found: defaultdict[Any, Any] = defaultdict(dict)
        found.update((parameter, dict(values)) for parameter, values in self.items())
        return found

    def __reduce__(self) -> Any:
        return self.plain().__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        return copy.deepcopy(self.plain(), memo)

    # Writing.

    def __setitem__(self, parameter: torch.Tensor, values: dict[str, Any]) -> None:
        if super().get(parameter) is values:
            return
        for kind, value in values.items():
            check_assigned(self._optimizer, parameter, kind, value)
        self._take_out(parameter)
        if id(parameter) in self.places:
            self._put_in(parameter).update(values)
            self.edited = True
        else:
            # Taken over when the parameter's state is created.
            live = isinstance(values, Kept) and values.state is not None
            super().__setitem__(parameter, dict(values) if live else values)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self._take_out(parameter)
        super().__delitem__(parameter)

    def pop(self, parameter: torch.Tensor, *default: Any) -> Any:
        """Take a parameter's state out and return it; it starts anew with the next step."""
        if parameter not in self and default:
            return default[0]
        values = dict.__getitem__(self, parameter)
        del self[parameter]
        return values

    def popitem(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """Take some parameter's state out and return both."""
        parameter = next(reversed(self))
        return parameter, self.pop(parameter)

    def clear(self) -> None:
        """Take all state out; it starts anew with the next step."""
        for parameter in list(self):
            del self[parameter]

    def setdefault(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Return a parameter's state, the default where it had none."""
        if parameter not in self:
            self[parameter] = default
        return self[parameter]

    update = MutableMapping.update

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def replace(self, values: Any) -> None:
        """Let this be all there is."""
        for parameter in [parameter for parameter in self if parameter not in values]:
            del self[parameter]
        self.update(values)

    # What the optimizer does with it.

    def place(self, parameter: torch.Tensor, views: dict[str, Any]) -> None:
        """Make these tensors a parameter's state from now on."""
        self.places[id(parameter)] = views
        if self._optimizer._homes[id(parameter)][0] >= 0:
            self._origins[id(parameter)] = {kind: local(view).detach() for kind, view in views.items()}
        for kind, view in views.items():
            if local(view).numel():
                self.storages[local(view).untyped_storage()._cdata] = (id(parameter), kind)
        dict.update(self._put_in(parameter), views)

    def complete(self, parameter: torch.Tensor) -> None:
        """Let what was taken out of a parameter's state start anew."""
        kept = super().get(parameter)
        kept = kept if isinstance(kept, Kept) else self._put_in(parameter)
        missing = self.places[id(parameter)].keys() - kept.keys()
        if missing:
            self._optimizer._settle(parameter)
            self._optimizer._protect()
        for kind in missing:
            self._optimizer._start_anew(parameter, kind)
        dict.update(kept, self.places[id(parameter)])

    def write(self, parameter: torch.Tensor, kind: str, value: Any) -> Any:
        """Copy a value to its place and return what is there; the value itself where it is not the engine's."""
        view = self.places[id(parameter)].get(kind)
        if view is None:
            return value
        self._optimizer._assign(parameter, kind, value)
        return view

    def _take_out(self, parameter: torch.Tensor) -> None:
        """Make a parameter's dict one that belongs to whoever holds it."""
        kept = super().get(parameter)
        if isinstance(kept, Kept) and kept.state is not None:
            self._optimizer._settle(parameter)
            kept.state, self.edited = None, True
            if self._optimizer._homes[id(parameter)][0] >= 0 and not self._optimizer._closed:
                self._taken[id(parameter)] = weakref.ref(kept)
            else:
                # Not in a slab that is used again: the memory goes with whoever holds the dict.
                self._forget(id(parameter))

    def _forget(self, number: int) -> None:
        del self._optimizer._homes[number]
        self._origins.pop(number, None)
        for view in self.places.pop(number).values():
            self.storages.pop(local(view).untyped_storage()._cdata, None)

    def let_go(self) -> None:
        """Keep no memory of what was taken out: the optimizer is closed, and nothing starts anew."""
        for number in list(self._taken):
            self._forget(number)
        self._taken.clear()

    def owner(self, value: torch.Tensor) -> tuple[int, str] | None:
        """Return whose live state a tensor is: a parameter's id, and the kind."""
        found = self.storages.get(local(value).untyped_storage()._cdata) if local(value).numel() else None
        return None if found is None or found[0] in self._taken else found

    def _put_in(self, parameter: torch.Tensor) -> Kept:
        """Give a parameter an empty dict over its memory; whoever holds an earlier one keeps the values it had."""
        taken = self._taken.pop(id(parameter), None)
        held: dict[str, Any] = {} if taken is None else taken() or {}
        for kind, view in self.places[id(parameter)].items():
            if kind in held and held[kind] is view:
                copied = local(view).clone()
                dict.__setitem__(held, kind, state_like(parameter, copied) if is_dtensor(view) else copied)
        kept = Kept(self, parameter)
        super().__setitem__(parameter, kept)
        return kept
