"""The order in which storages wake: the caller's order, or the order in which a forward needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.errors import OptionError
from forebay.sleep.guards import calling_units
from forebay.sleep.transfer import batched
from forebay.sleep.walk import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from forebay.sleep.transfer import Mover
    from forebay.sleep.walk import StorageEntry

LAST = 1 << 60
"""The unit of storages that no forward needs."""


class Waking:
    """A running wake."""

    def __init__(self, mover: Mover, units: Units | None, begun: float) -> None:
        self.mover = mover
        self.units = units
        self.begun = begun

    def kinds(self) -> set[str]:
        """Return the kinds that this wake moves."""
        return {batch.kind for batch in self.mover.batches}


class Units:
    """Which batches each module needs before its forward.

    A unit is a module that waits for its own storages. Unit 0 is everything that no such module holds.
    """

    def __init__(self, models: dict[str, torch.nn.Module]) -> None:
        # The units that hold a container of tensors, or a parameter with its gradient.
        self._holders: dict[int, set[int]] = {}
        # The units that a module needs before its forward.
        self._inside: dict[int, set[int]] = {}
        # The last batch that each unit needs.
        self._last: dict[int, int] = {}
        self._batches = 0
        count = 0
        for model in models.values():
            units = calling_units(model)
            numbers = {id(module): count + 1 + i for i, module in enumerate(m for m in model.modules() if m in units)}
            count += len(numbers)
            self._visit(model, 0, numbers)

    def _visit(self, module: torch.nn.Module, unit: int, numbers: dict[int, int]) -> set[int]:
        """Record the unit of a module's own tensors; return the units that the module's parent must wait for."""
        unit = numbers.get(id(module), unit)
        if id(module) in self._inside:
            return self._inside[id(module)] if id(module) not in numbers else set()
        needed = {unit}
        self._inside[id(module)] = needed
        for container in (module._parameters, module._buffers):
            self._holders.setdefault(id(container), set()).add(unit)
        for parameter in module._parameters.values():
            if parameter is not None:
                self._holders.setdefault(id(parameter), set()).add(unit)
        for child in module.children():
            needed |= self._visit(child, unit, numbers)
        return set() if id(module) in numbers else needed

    def units_of(self, entry: StorageEntry) -> set[int]:
        """Return the units that hold a storage; an optimizer's storage has none."""
        return set().union(*(self._holders.get(id(container), set()) for container, _ in entry.holders))

    def first_use(self, entry: StorageEntry) -> int:
        """Return the unit in whose batch a storage moves."""
        if entry.kind == "buffers":
            # DDP broadcasts them before it calls anything.
            return -1
        if entry.kind == "optimizer":
            return LAST
        return min(self.units_of(entry), default=0)

    def note(self, unit: int, batch: list[StorageEntry]) -> None:
        """Record the next batch: every unit that holds a storage of it needs it."""
        for entry in batch:
            for user in self.units_of(entry) or {unit}:
                self._last[user] = self._batches
        self._batches += 1

    def needed_by(self, module: torch.nn.Module) -> int:
        """Return the last batch that a module's forward needs; -1 for none."""
        units = self._inside.get(id(module), {0})
        return max((self._last.get(unit, -1) for unit in units), default=-1)


def in_order(
    entries: list[StorageEntry], rank: Callable[[StorageEntry], int] | None, units: Units | None
) -> Iterator[list[StorageEntry]]:
    """Go through batches in the order in which they are needed."""
    if rank is not None:
        entries = sorted(entries, key=rank)
    if units is None:
        yield from batched(entries)
        return
    by_unit: dict[int, list[StorageEntry]] = {}
    for entry in entries:
        by_unit.setdefault(units.first_use(entry), []).append(entry)
    for unit in sorted(by_unit) if rank is None else by_unit:
        for batch in batched(by_unit[unit]):
            units.note(unit, batch)
            yield batch


def ranking(
    order: Sequence[str | torch.nn.Module] | None, models: dict[str, torch.nn.Module], asleep: Iterable[StorageEntry]
) -> Callable[[StorageEntry], int] | None:
    """Return a function that gives each storage its rank in the caller's order; None without an order."""
    if order is None:
        return None
    if isinstance(order, (str, torch.nn.Module)):
        raise OptionError(f"invalid order: {type(order).__name__}; order must be a list of modules, names or kinds")
    paths = {
        id(module): ".".join(filter(None, (label, path)))
        for label, model in models.items()
        for path, module in model.named_modules()
    }
    known = {*KINDS, *paths.values(), *_tensor_names(models)}
    known.update(name for entry in asleep for name in entry.names)
    wanted: list[str] = []
    for item in order:
        if isinstance(item, torch.nn.Module):
            if id(item) not in paths:
                raise OptionError(
                    f"order has a module that is in no model of this sleeper: {type(item).__name__}; leave it out"
                )
            wanted.append(paths[id(item)])
        elif item in known:
            wanted.append(item)
        else:
            raise OptionError(
                f"order has an unknown name: {item!r}; use names of modules, parameters, buffers or kinds"
            )

    def rank(entry: StorageEntry) -> int:
        return next((place for place, name in enumerate(wanted) if _matches(name, entry)), len(wanted))

    return rank


def _matches(name: str, entry: StorageEntry) -> bool:
    """Whether an item of an order names a storage: its kind, its own name, or a module that has it."""
    if name == entry.kind or name in entry.names:
        return True
    if entry.kind == "optimizer" or name in KINDS:
        return False
    # The model itself has the empty name.
    return not name or any(known.startswith(f"{name}.") for known in entry.names)


def _tensor_names(models: dict[str, torch.nn.Module]) -> set[str]:
    return {
        ".".join(filter(None, (label, name)))
        for label, model in models.items()
        for names in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, _ in names
    }
