"""The ``state`` of an optimizer: dicts as in ``torch.optim``, over memory that the engine works on.

Reading waits for the device. An assigned value is copied into the engine's memory. State that is removed starts from
zero with the next step, as with ``torch.optim``.

[Note: state that appears late]
A rule may have columns that a parameter gets with its first update, such as SGD's momentum. Their memory may exist
earlier. They become visible after the first update: when the engine's counter of updates is above zero.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import ItemsView, MutableMapping, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from forebay._tensors import address, dense_strides, follow_weight, is_dtensor, local, state_like
from forebay.optim.packed import F32, Packed
from forebay.optim.values import check_assigned, copy_into

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forebay.optim.base import Optimizer

MASTER = "master_param"
"""The name of a half-precision parameter's f32 master, which any rule may have beside its own columns."""

STEP = "step"
"""The name of the engine's counter of updates, whether it is shown or not."""


class ParameterState(dict[str, Any]):
    """The state of one parameter. Its tensors stay in place: an assigned tensor is copied into them.

    A packed column is read as an f32 copy: writing into the copy changes nothing.
    """

    def __init__(self, state: State, parameter: torch.Tensor) -> None:
        super().__init__()
        # None after it was removed from the state: then it is an ordinary dict.
        self.state: State | None = state
        self.parameter = parameter

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if not isinstance(value, Packed):
            return value
        if self.state is not None:
            self.state._optimizer._settle(self.parameter)
            if self.state.stands_in:
                return value.stand_in()
        return value.read()

    def __iter__(self) -> Iterator[str]:
        # Python then copies the dict through the methods above and not from its memory.
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default."""
        try:
            return self[name]
        except KeyError:
            return default

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return all names with their values."""
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Return all values."""
        return ValuesView(self)

    def copy(self) -> dict[str, Any]:
        """Return the values as an ordinary dict."""
        return dict(self)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.state is not None:
            value = self.state.write(self.parameter, name, value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        if self.state is not None:
            self.state.edited = True

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a value and return it, or return the default."""
        if name not in self and default:
            return default[0]
        value = self[name]
        del self[name]
        return value

    # The methods of dict do not call the methods above.
    clear = MutableMapping.clear
    popitem = MutableMapping.popitem
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


@dataclass(eq=False)
class Room:
    """The memory of one parameter's state."""

    parameter: torch.Tensor
    # The columns that the engine keeps for the parameter: the rule's columns, then the master.
    columns: tuple[str, ...]
    # The engine's counter of the parameter's updates.
    counter: torch.Tensor
    # Tensors over the memory, by column. In placement "resident" a column that is not shown may have none.
    views: dict[str, torch.Tensor]
    # A second tensor over the same pinned memory for each view. Assigning to ``.data`` of a view does not change these.
    origins: dict[str, torch.Tensor] = field(default_factory=dict)
    # Whether the memory is torch's, on the parameter's device.
    is_resident: bool = False
    # The columns that are kept in fewer bits than f32, by name; there is no view of these.
    packed: dict[str, Packed] = field(default_factory=dict)
    # Bytes of the columns.
    bytes: int = 0
    # A dict that was removed and still shows this memory.
    taken: weakref.ref[ParameterState] | None = None
    # The engine's number of the places that the tensors above have; see `State.follow`.
    generation: int = 0

    @property
    def formats(self) -> str:
        """The formats of the columns without the master, each once."""
        found = [F32 if (packed := self.packed.get(name)) is None else packed.format for name in self.own]
        return "+".join(dict.fromkeys(found))

    @property
    def own(self) -> list[str]:
        """The columns without the master."""
        return [name for name in self.columns if name != MASTER]


class State(defaultdict["torch.Tensor", dict[str, Any]]):
    """The state of each parameter, as in ``torch.optim``. Reading waits until the bytes have arrived.

    Looking up one parameter waits only for the stores into that parameter's state. Iterating waits for all stores. A
    step overwrites tensors that were looked up before it: look them up again after the step, or call ``synchronize``.

    [Note: state that moves]
    With a second copy of the state, a step may write to the other copy, which then becomes the state. The tensors of
    this object are pointed at it when they are looked up again, or by ``synchronize``; they stay the same objects.
    Other tensors over the same memory, such as views and slices of them, stay with the copy that they were made from.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(dict)
        self._optimizer = optimizer
        # By the parameter's id.
        self.rooms: dict[int, Room] = {}
        # For each storage of a view: the parameter's id, and the column.
        self.owners: dict[int, tuple[int, str]] = {}
        # Parameters whose master is still zero: no step has made it from the weight yet.
        self.fresh: set[int] = set()
        # Parameters without an update yet, if the rule's state appears late.
        self.hidden: set[int] = set()
        self._shows_hidden = False
        # Whether packed columns are shown as tensors that stand for them.
        self.stands_in = False
        # Whether state was removed and must be reset before the next step.
        self.edited = False
        # The engine's number of the places that all tensors have.
        self._generation = 0

    # Reading.

    def _show(self, parameter: torch.Tensor | None) -> None:
        """Wait for a parameter's state, or for all, and point the tensors at the engine's memory.

        Some programs move state with ``value.data = value.to(...)``. The engine's memory stays the state.
        """
        self._optimizer._settle(parameter)
        for room in self._rooms_of(parameter):
            for name, origin in room.origins.items():
                view = local(room.counter if name == STEP else room.views[name])
                if address(view) != address(origin):
                    view.data = origin

    def follow(self, parameter: torch.Tensor | None = None) -> None:
        """Point a parameter's tensors, or all, at the engine's memory if it has moved; see [Note: state that moves]."""
        engine = self._optimizer._engine
        if engine is None or (generation := engine.generation) == self._generation:
            return
        for room in self._rooms_of(parameter):
            if room.generation != generation:
                number, index = self._optimizer._homes[id(room.parameter)]
                for name, origin in room.origins.items():
                    if origin.numel() and (view := engine.view(number, index, name)) is not None:
                        self._move(room, name, torch.frombuffer(view, dtype=torch.float32))
                for packed in () if room.is_resident else room.packed.values():
                    packed.follow(partial(engine.view, number, index))
                room.generation = generation
        if parameter is None:
            self._generation = generation

    def _move(self, room: Room, name: str, memory: torch.Tensor) -> None:
        """Point a column's tensor, or the counter, at the same values in other memory."""
        origin = room.origins[name]
        if address(memory) == address(origin):
            return
        room.origins[name] = moved = memory.as_strided(origin.shape, origin.stride())
        self.owners.pop(origin.untyped_storage()._cdata, None)
        self.owners[moved.untyped_storage()._cdata] = (id(room.parameter), name)
        # The object stays, so that whoever holds it sees the state.
        local(self.view(room, name)).data = moved

    def _rooms_of(self, parameter: torch.Tensor | None) -> Iterable[Room]:
        if parameter is None:
            return list(self.rooms.values())
        room = self.rooms.get(id(parameter))
        return () if room is None else (room,)

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        self._show(parameter)
        return super().__getitem__(parameter)

    def __missing__(self, parameter: torch.Tensor) -> dict[str, Any]:
        if id(parameter) not in self.rooms:
            return super().__missing__(parameter)
        self.edited = True
        return self._put_in(parameter)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Return a parameter's state, or the default."""
        self._show(parameter)
        return super().get(parameter, default)

    def items(self) -> ItemsView[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        """Return all parameters with their state."""
        self._show(None)
        return super().items()

    def values(self) -> ValuesView[dict[str, Any]]:  # type: ignore[override]
        """Return the state of all parameters."""
        self._show(None)
        return super().values()

    def plain(self) -> defaultdict[Any, Any]:
        """Return the state as plain dicts, as torch's optimizers have it. A copy belongs to no engine."""
        found: defaultdict[Any, Any] = defaultdict(dict)
        found.update((parameter, dict(values)) for parameter, values in self.items())
        return found

    def __reduce__(self) -> Any:
        return self.plain().__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        return copy.deepcopy(self.plain(), memo)

    # Writing, by users.

    def __setitem__(self, parameter: torch.Tensor, values: dict[str, Any]) -> None:
        if super().get(parameter) is values:
            return
        for name, value in values.items():
            check_assigned(self._optimizer, parameter, name, value)
        self._take_out(parameter)
        if id(parameter) in self.rooms:
            self._put_in(parameter).update(values)
            self.edited = True
        else:
            # Copied when the parameter's state is created.
            is_live = isinstance(values, ParameterState) and values.state is not None
            super().__setitem__(parameter, dict(values) if is_live else values)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self._take_out(parameter)
        super().__delitem__(parameter)

    def pop(self, parameter: torch.Tensor, *default: Any) -> Any:
        """Remove a parameter's state and return it. The state starts from zero with the next step."""
        if parameter not in self and default:
            return default[0]
        values = dict.__getitem__(self, parameter)
        del self[parameter]
        return values

    def popitem(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """Remove the last parameter's state and return both."""
        parameter = next(reversed(self))
        return parameter, self.pop(parameter)

    def clear(self) -> None:
        """Remove all state. It starts from zero with the next step."""
        for parameter in list(self):
            del self[parameter]

    def setdefault(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Return a parameter's state, or make the default its state."""
        if parameter not in self:
            self[parameter] = default
        return self[parameter]

    update = MutableMapping.update

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def replace(self, values: Any) -> None:
        """Replace the state of all parameters by these values."""
        for parameter in [parameter for parameter in self if parameter not in values]:
            del self[parameter]
        self.update(values)

    def write(self, parameter: torch.Tensor, name: str, value: Any) -> Any:
        """Copy a value into its column and return the column's tensor. Return a value that is no column unchanged."""
        room = self.rooms[id(parameter)]
        if not self.knows(room, name):
            return value
        check_assigned(self._optimizer, parameter, name, value)
        self._optimizer._settle(parameter)
        self._optimizer._protect()
        with torch.no_grad():
            if value is None:
                self.start_anew(room, name)
                return None
            self._copy_into(room, name, value)
            if self.is_late(name) and id(parameter) in self.hidden:
                room.counter.fill_(1)
                self.hidden.discard(id(parameter))
        return self.shown_value(room, name)

    def _copy_into(self, room: Room, name: str, value: Any) -> None:
        if (packed := room.packed.get(name)) is not None:
            packed.write(value)
        else:
            copy_into(value, self.view(room, name))

    def _take_out(self, parameter: torch.Tensor) -> None:
        """Detach a parameter's dict from the state; it is then an ordinary dict."""
        live = super().get(parameter)
        if not isinstance(live, ParameterState) or live.state is None:
            return
        self._optimizer._settle(parameter)
        live.state, self.edited = None, True
        room = self.rooms[id(parameter)]
        for name, packed in room.packed.items():
            if name in live:
                dict.__setitem__(live, name, packed.read())
        room.taken = weakref.ref(live)
        if self._optimizer.is_closed:
            self._forget(room)
        elif room.is_resident:
            # The memory is freed with the dict, and made again when it is needed.
            for name in list(room.views):
                self._drop_view(room, name)

    # Methods that the optimizer calls.

    def knows(self, room: Room, name: str) -> bool:
        """Whether a name is state of the engine, not a value that the user added."""
        return name in room.columns or (name == STEP and self._optimizer._rule.shows_step)

    def is_late(self, name: str) -> bool:
        """Whether a column appears with the first update."""
        return self._optimizer._rule.appears_late and name not in (MASTER, STEP)

    def shown(self, room: Room) -> list[str]:
        """Return the names that a parameter's dict has."""
        first = [STEP] if self._optimizer._rule.shows_step else []
        is_hidden = id(room.parameter) in self.hidden and not self._shows_hidden
        return first + [name for name in room.columns if not (is_hidden and self.is_late(name))]

    def shown_value(self, room: Room, name: str) -> torch.Tensor | Packed:
        """Return what a parameter's dict has under a name: ``view``, or a packed column."""
        return room.packed[name] if name in room.packed else self.view(room, name)

    def view(self, room: Room, name: str) -> torch.Tensor:
        """Return the tensor over a column's memory, or the counter. A missing resident column is created."""
        if name == STEP:
            return room.counter
        if name not in room.views:
            room.views[name] = resident_column(room.parameter)
            self._own(room, name)
        return room.views[name]

    def addresses(self, room: Room) -> list[int]:
        """Return the addresses of the engine's columns, for state on the device."""
        found: list[int] = []
        for name in room.columns:
            shown = self.shown_value(room, name)
            parts = dict.values(shown) if isinstance(shown, Packed) else (local(shown),)
            found += map(address, parts)
        return found

    def _own(self, room: Room, name: str) -> None:
        view = local(self.view(room, name))
        if view.numel():
            self.owners[view.untyped_storage()._cdata] = (id(room.parameter), name)

    def _drop_view(self, room: Room, name: str) -> None:
        view = room.views.pop(name, None)
        if view is not None:
            self.owners.pop(local(view).untyped_storage()._cdata, None)

    def place(self, room: Room) -> None:
        """Make this memory, which is zero, a parameter's state. Values that its dict has already are copied into it."""
        number = id(room.parameter)
        self.rooms[number] = room
        pinned = {STEP: room.counter} | ({} if room.is_resident else room.views)
        room.origins = {name: local(view).detach() for name, view in pinned.items()}
        for name in [STEP, *room.views]:
            self._own(room, name)
        self.fill(room, super().get(room.parameter, {}), zeroed=True)

    def fill(self, room: Room, values: dict[str, Any], *, zeroed: bool = False) -> None:
        """Copy values into a parameter's state.

        Columns without a value are reset. ``zeroed`` says that the memory is zero already.
        """
        rule, number = self._optimizer._rule, id(room.parameter)
        self.fresh.discard(number)
        found = [name for name in room.columns if values.get(name) is not None]
        for name in room.columns:
            if name in found:
                self._copy_into(room, name, values[name])
            else:
                self.start_anew(room, name, zeroed=zeroed)
        if rule.shows_step:
            copy_into(values.get(STEP, 0.0), room.counter)
        else:
            # A parameter with state was updated at least once. A rule that does not show the counter needs no more.
            room.counter.fill_(float(any(name != MASTER for name in found)))
        if room.counter.item():
            self.hidden.discard(number)
        self._refresh(room, values)

    def start_anew(self, room: Room, name: str, *, zeroed: bool = False) -> None:
        """Reset one column, or the counter, to its value before the first update."""
        number = id(room.parameter)
        if self.is_late(name):
            room.counter.zero_()
            self.hidden.add(number)
        if (packed := room.packed.get(name)) is not None:
            if not zeroed:
                packed.reset()
            return
        if self.is_late(name) and room.is_resident:
            self._drop_view(room, name)
        elif not zeroed:
            local(self.view(room, name)).zero_()
        if name == MASTER:
            self.fresh.add(number)

    def _refresh(self, room: Room, others: dict[str, Any] | None = None) -> None:
        """Make a parameter's dict show its visible columns and the user's own values. Remove an empty dict."""
        live = super().get(room.parameter)
        live = live if isinstance(live, ParameterState) and live.state is not None else None
        others = {name: value for name, value in (others or {}).items() if name not in self._optimizer.state_names}
        held = {} if live is None else dict.items(live)
        others |= {name: value for name, value in dict(held).items() if not self.knows(room, name)}
        shown = {name: self.shown_value(room, name) for name in self.shown(room)}
        if not shown and not others:
            dict.pop(self, room.parameter, None)
            return
        live = self._put_in(room.parameter) if live is None else live
        dict.clear(live)
        dict.update(live, shown, **others)

    def complete(self, room: Room) -> None:
        """Reset the parts of a parameter's state that were removed."""
        live = super().get(room.parameter)
        is_live = isinstance(live, ParameterState) and live.state is not None
        missing = [name for name in self.shown(room) if not is_live or name not in live]  # type: ignore[operator]
        if room.taken is not None:
            # The dict that was removed keeps its values.
            self._put_in(room.parameter)
        if missing:
            self._optimizer._settle(room.parameter)
            self._optimizer._protect()
            for name in missing:
                self.start_anew(room, name)
        self._refresh(room)

    def updated(self, parameters: list[torch.Tensor]) -> None:
        """Record that a step has updated these parameters: their masters exist and their state is visible."""
        if self.fresh:
            self.fresh.difference_update(map(id, parameters))
        if self.hidden:
            for number in self.hidden.intersection(map(id, parameters)):
                room = self.rooms[number]
                if room.counter.item():
                    self.hidden.discard(number)
                    self._refresh(room)

    def make_masters(self, parameter: torch.Tensor | None) -> None:
        """Make masters from their weights if no step has done so yet; for one parameter, or for all."""
        for number in list(self.fresh) if parameter is None else self.fresh & {id(parameter)}:
            self.fresh.discard(number)
            room = self.rooms[number]
            follow_weight(local(self.view(room, MASTER)), local(room.parameter).detach())

    @contextmanager
    def laid_out(self, *, whole: bool) -> Iterator[None]:
        """Within this context, state has the form that ``torch.distributed.checkpoint`` needs.

        The state is not empty: for empty state, torch takes a step with gradients of zero, which would make state
        appear. With ``whole``, columns that appear late are visible too, so that they can be loaded. Columns that were
        not loaded are hidden again. Packed columns are shown as tensors that stand for them.
        """
        self._shows_hidden, self.stands_in = whole, True
        for number in list(self.hidden) if whole else ():
            self._refresh(self.rooms[number])
        groups = self._optimizer.param_groups
        placeholder = None if self else next((p for group in groups for p in group["params"]), None)
        if placeholder is not None:
            self[placeholder]
        try:
            yield
        finally:
            self._shows_hidden = self.stands_in = False
            for number in list(self.hidden) if whole else ():
                room = self.rooms[number]
                if room.is_resident:
                    for name in room.own:
                        self._drop_view(room, name)
                self._refresh(room)
            if placeholder is not None and not super().get(placeholder, True):
                dict.pop(self, placeholder)

    def owner(self, value: torch.Tensor) -> tuple[int, str] | None:
        """Return the parameter's id and the column whose live state a tensor is; None if it is none."""
        found = self.owners.get(local(value).untyped_storage()._cdata) if local(value).numel() else None
        return None if found is None or self.rooms[found[0]].taken is not None else found

    def _put_in(self, parameter: torch.Tensor) -> ParameterState:
        """Give a parameter an empty dict over its memory. A removed dict gets copies of the tensors that it shows."""
        room = self.rooms[id(parameter)]
        held: dict[str, Any] = {} if room.taken is None else room.taken() or {}
        room.taken = None
        for name, view in ((STEP, room.counter), *room.views.items()):
            if held.get(name) is view:
                copied = local(view).clone()
                dict.__setitem__(held, name, state_like(parameter, copied) if is_dtensor(view) else copied)
        live = ParameterState(self, parameter)
        super().__setitem__(parameter, live)
        return live

    def _forget(self, room: Room) -> None:
        number = id(room.parameter)
        self._optimizer._forget_home(number)
        self.fresh.discard(number)
        self.hidden.discard(number)
        self.owners.pop(room.counter.untyped_storage()._cdata, None)
        for name in list(room.views):
            self._drop_view(room, name)
        del self.rooms[number]

    def forget_taken(self, keep: set[int] | None = None) -> None:
        """Free removed state, except for these parameters. It is not reset."""
        for number, room in list(self.rooms.items()):
            if room.taken is not None and (keep is None or number not in keep):
                self._forget(room)


def resident_column(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros for one column of a parameter's state, on its device and in the order of its memory."""
    inner = local(parameter)
    strides = dense_strides(inner)
    data = torch.empty_strided(inner.shape, strides, dtype=torch.float32, device=inner.device).zero_()
    return state_like(parameter, data)
