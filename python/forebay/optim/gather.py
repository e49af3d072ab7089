"""The parameters of a step as lists: which have a gradient, their addresses, types and shapes.

This code runs in every step for every parameter. It works on whole lists, reads each tensor as few times as possible,
and does not read properties again that cannot have changed since the last step.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from forebay._tensors import (
    check_overlap,
    dense_strides,
    in_order,
    local,
    locals_of,
    look,
    look_with_gradients,
    placed_like,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay._core import Looked

    Tensors = tuple[Looked, Looked, list[int]]


class Table:
    """Parameters whose state was created together, in the order in which the engine knows them."""

    def __init__(self, parameters: list[torch.Tensor], *, is_resident: bool = False) -> None:
        # Whether its state is in torch's memory on the device.
        self.is_resident = is_resident
        # None in the place of a parameter that the optimizer has forgotten.
        self.parameters: list[torch.Tensor | None] = [*parameters]
        # The engine relies on these: a parameter that changes its device or shape later raises an error.
        self.devices = [local(parameter).get_device() for parameter in parameters]
        self.shapes = [local(parameter).shape for parameter in parameters]
        # Whether a parameter has a master depends on these.
        self.dtypes = [local(parameter).dtype for parameter in parameters]
        # The order of the state's memory; parameters and gradients in another order are copied to this one.
        self.strides = [dense_strides(local(parameter)) for parameter in parameters]
        self.contiguous = all(local(parameter).is_contiguous() for parameter in parameters)


def _same(known: Sequence[torch.Tensor | None], now: Sequence[torch.Tensor]) -> bool:
    return len(known) == len(now) and all(map(operator.is_, known, now))


@dataclass
class Properties:
    """Properties of parameters at given addresses."""

    looked: Looked
    shapes: list[torch.Size]
    # The table that they were found to fit.
    fits: Table | None = None


class Flat:
    """All parameters of all groups, each once."""

    def __init__(self, lists: list[list[torch.Tensor]]) -> None:
        self.lists = lists
        self.parameters: list[torch.Tensor] = []
        self.groups: list[int] = []
        self.positions: list[int] = []
        # Their properties when all of them were last read.
        self.properties: Properties | None = None
        # The columns that each group needed when state was last created for all of them; None before.
        self.created: list[list[str]] | None = None
        # Whether every one of them has state.
        self.complete = False
        # The one table that has just these parameters in this order, if there is one.
        self.table: Table | None = None
        seen: set[int] = set()
        for group, parameters in enumerate(lists):
            for position, parameter in enumerate(parameters):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.parameters.append(parameter)
                    self.groups.append(group)
                    self.positions.append(position)

    def settle(self, columns: list[list[str]], tables: list[Table], homes: dict[int, tuple[int, int]]) -> None:
        """Record that every parameter that can have a gradient has state."""
        self.created = columns
        self.complete = all(id(parameter) in homes for parameter in self.parameters)
        self.table = tables[0] if len(tables) == 1 and _same(tables[0].parameters, self.parameters) else None

    def is_still(self, lists: list[list[torch.Tensor]]) -> bool:
        """Whether these lists hold the very same tensors; users may edit groups at any time."""
        return len(self.lists) == len(lists) and all(map(_same, self.lists, lists))


class Found:
    """The parameters of one step that have a gradient, and the memory that the kernels work on."""

    def __init__(self, flat: Flat, source: str = "grad") -> None:
        self.flat = flat
        self.parameters, self.groups, self.positions = flat.parameters, flat.groups, flat.positions
        self.whole = True
        self.gradients: list[torch.Tensor] = []
        self.looked: tuple[Looked, Looked] | None = None
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.properties: Properties | None = None
        self.contiguous = False
        at_once = look_with_gradients(flat.parameters) if source == "grad" else None
        if at_once is not None:
            self.gradients, kept, *looked = at_once
            self.looked = (looked[0], looked[1])
        else:
            gradients = [(parameter, getattr(parameter, source, None)) for parameter in flat.parameters]
            self.gradients = [placed_like(parameter, found) for parameter, found in gradients if found is not None]
            every = len(self.gradients) == len(gradients)
            kept = None if every else [i for i, (_, gradient) in enumerate(gradients) if gradient is not None]
        if kept is not None:
            self.whole = False
            self.parameters = [flat.parameters[i] for i in kept]
            self.groups, self.positions = [flat.groups[i] for i in kept], [flat.positions[i] for i in kept]
        self.inner = self.parameters if at_once is not None else locals_of(self.parameters)
        self.inner_gradients = self.gradients if at_once is not None else locals_of(self.gradients)

    def read(self, compute: int) -> bool:
        """Read addresses and types. Returns whether the engine can work on all of them.

        Parameters
        ----------
        compute
            The device to compute on, as ``get_device`` numbers them; -1 for the CPU.
        """
        try:
            parameters, gradients = self.looked or (look(self.inner), look(self.inner_gradients))
        except (KeyError, RuntimeError):
            # A type that the kernels do not know, or a tensor without memory of its own.
            return False
        self.looked = (parameters, gradients)
        self.properties = self._properties(parameters)
        if not parameters.reachable(compute) or not gradients.fits(parameters):
            return False
        self.contiguous = parameters.contiguous and gradients.contiguous
        # A view that torch negates as it reads, such as the imaginary part of a conjugate, is every other element of
        # its memory, so never contiguous with more than one. Asking is slow, so only then.
        if not self.contiguous or parameters.has_single():
            self.inner_gradients = [gradient.resolve_neg() for gradient in self.inner_gradients]
            self.looked = (parameters, look(self.inner_gradients))
        return True

    def _properties(self, looked: Looked) -> Properties:
        # Memory at the same address as in the last step is the same memory; its type and order may be others, and with
        # another order the shape, as after a transposition in place.
        known = self.flat.properties
        both_contiguous = known is not None and known.looked.contiguous and looked.contiguous
        if self.whole and known is not None and both_contiguous and known.looked.same_memory(looked):
            return known
        properties = Properties(looked, list(map(torch.Tensor.size, self.inner)))
        if self.whole:
            self.flat.properties = properties
        return properties

    def put_in_order(self, strides: list[tuple[int, ...]]) -> None:
        """Replace tensors that are in another order than their state by copies, and note which to copy back."""
        self.inner, self.inner_gradients = list(self.inner), list(self.inner_gradients)
        for i, order in enumerate(strides):
            ordered = in_order(self.inner[i], order)
            if ordered is not self.inner[i]:
                check_overlap(self.inner[i], f"a parameter of shape {tuple(self.inner[i].shape)}")
                self.copies.append((self.inner[i], ordered))
                self.inner[i] = ordered
            self.inner_gradients[i] = in_order(self.inner_gradients[i], order)
        self.looked = (look(self.inner), look(self.inner_gradients))

    def tensors_of(self, tables: list[Table], homes: list[tuple[int, int]] | None) -> list[Tensors]:
        """Return what the engine updates in each table: nothing where a parameter has no gradient in this step.

        Parameters
        ----------
        tables
            All tables.
        homes
            The number of the table of each of these parameters, and its place there. None where they are the parameters
            of the one table, in its order.
        """
        assert self.looked is not None
        if homes is None:
            return [(*self.looked, self.groups)]
        parameters, gradients = self.looked
        parts: list[Tensors] = []
        for number, table in enumerate(tables):
            here = [(place, at) for place, (home, at) in enumerate(homes) if home == number]
            groups = [0] * len(table.parameters)
            for place, at in here:
                groups[at] = self.groups[place]
            parts.append((parameters.spread(here, len(groups)), gradients.spread(here, len(groups)), groups))
        return parts
