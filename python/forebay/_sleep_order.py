"""In which order storages wake under a forward: each module's before it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay._sleep_guards import calling_units

if TYPE_CHECKING:
    import torch

    from forebay._sleep_moves import Mover
    from forebay._sleep_walk import Entry


class Waking:
    """A wake under way."""

    def __init__(self, mover: Mover, units: Units | None, begun: float) -> None:
        self.mover = mover
        self.units = units
        self.begun = begun

    def kinds(self) -> set[str]:
        return {batch.kind for batch in self.mover.batches}


class Units:
    """Which batches each module needs before its forward."""

    def __init__(self, models: dict[str, torch.nn.Module]) -> None:
        # The unit that needs a storage first: 0 is what no unit holds, and comes first.
        self._unit_of: dict[int, int] = {}
        self._holders: dict[int, set[int]] = {}
        self._inside: dict[int, set[int]] = {}
        self._last: dict[int, int] = {}
        self._batches = 0
        count = 0
        for model in models.values():
            units = calling_units(model)
            numbers = {id(module): count + 1 + i for i, module in enumerate(m for m in model.modules() if m in units)}
            count += len(numbers)
            self._visit(model, 0, numbers)

    def _visit(self, module: torch.nn.Module, unit: int, numbers: dict[int, int]) -> set[int]:
        """Note the unit of a module's own tensors, and which units must be there when it is called."""
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

    def units_of(self, entry: Entry) -> set[int]:
        """Return the units that hold a storage; an optimizer's are in none."""
        return set().union(*(self._holders.get(id(container), set()) for container, _ in entry.holders))

    def first_use(self, entry: Entry) -> int:
        """Return the unit in whose batch a storage travels."""
        if entry.kind == "buffers":
            # DDP broadcasts them before it calls anything.
            return -1
        if entry.kind == "optimizer":
            return 1 << 60
        return min(self.units_of(entry), default=0)

    def note(self, unit: int, batch: list[Entry]) -> None:
        """Note the next batch: it is needed by every unit that holds any of it."""
        for entry in batch:
            for user in self.units_of(entry) or {unit}:
                self._last[user] = self._batches
        self._batches += 1

    def needed_by(self, module: torch.nn.Module) -> int:
        """Return the last batch that a module's forward needs; -1 for none."""
        units = self._inside.get(id(module), {0})
        return max((self._last.get(unit, -1) for unit in units), default=-1)
