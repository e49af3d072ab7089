"""The parameters of a step as lists: which have a gradient, where they lie, what they are.

This runs in every step for every parameter. Whole lists are gone through at a time, with as few looks at each tensor as
possible, and what cannot have changed since the last step is not looked at again.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import torch

from forebay._torch import DTYPES, Looked, addresses, check_overlap, dense_strides, in_order, local, locals_of, look

if TYPE_CHECKING:
    from collections.abc import Sequence


class Store:
    """Parameters whose state was created together, in the order in which the engine knows them."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.dtypes = [DTYPES[local(parameter).dtype] for parameter in parameters]
        # What the engine relies on from here on: a parameter that moves or changes its shape is refused.
        self.devices = [local(parameter).get_device() for parameter in parameters]
        self.shapes = [local(parameter).shape for parameter in parameters]
        # The order of the state's memory, into which parameters and gradients are brought where theirs is another.
        self.strides = [dense_strides(local(parameter)) for parameter in parameters]
        self.contiguous = all(local(parameter).is_contiguous() for parameter in parameters)

    def lists(self) -> dict[str, list[int]]:
        """Return the numbers of a step in which no parameter has a gradient."""
        none = [0] * len(self.parameters)
        return {
            "param": [1] * len(self.parameters),
            "param_dtype": list(self.dtypes),
            "grad": none,
            "grad_dtype": list(none),
            "group": list(none),
        }


def _same(known: list[torch.Tensor], now: list[torch.Tensor]) -> bool:
    return len(known) == len(now) and all(map(operator.is_, known, now))


@dataclass
class Properties:
    """What parameters at given addresses are."""

    param: list[int]
    devices: list[int]
    shapes: list[torch.Size]
    elements: list[int]
    # The store that they were found to fit.
    fits: Store | None = None


class Flat:
    """All parameters of all groups, each once."""

    def __init__(self, lists: list[list[torch.Tensor]]) -> None:
        self.lists = lists
        self.parameters: list[torch.Tensor] = []
        self.groups: list[int] = []
        self.positions: list[int] = []
        # As they were when all of them were last looked at.
        self.properties: Properties | None = None
        # Whether each group had amsgrad when state was last created for all of them; None before.
        self.created: list[bool] | None = None
        # Whether every one of them has state.
        self.complete = False
        # The one store that has just these parameters in this order, if there is one.
        self.store: Store | None = None
        seen: set[int] = set()
        for group, parameters in enumerate(lists):
            for position, parameter in enumerate(parameters):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.parameters.append(parameter)
                    self.groups.append(group)
                    self.positions.append(position)

    def settle(self, kinds: list[bool], stores: list[Store], homes: dict[int, tuple[int, int]]) -> None:
        """Note that every parameter that can have a gradient has state."""
        self.created = kinds
        self.complete = all(id(parameter) in homes for parameter in self.parameters)
        self.store = stores[0] if len(stores) == 1 and _same(stores[0].parameters, self.parameters) else None

    def is_still(self, lists: list[list[torch.Tensor]]) -> bool:
        """Whether these lists hold the very same tensors; groups may be edited behind our back."""
        return len(self.lists) == len(lists) and all(map(_same, self.lists, lists))


class Found:
    """The parameters of one step that have a gradient, and the memory that the kernels work on."""

    def __init__(self, flat: Flat) -> None:
        gradients = [parameter.grad for parameter in flat.parameters]
        self.flat = flat
        self.parameters, self.groups, self.positions = flat.parameters, flat.groups, flat.positions
        self.whole = not any(map(operator.is_, gradients, repeat(None)))
        if not self.whole:
            kept = [i for i, gradient in enumerate(gradients) if gradient is not None]
            self.parameters = [flat.parameters[i] for i in kept]
            self.groups, self.positions = [flat.groups[i] for i in kept], [flat.positions[i] for i in kept]
        self.gradients = [gradient for gradient in gradients if gradient is not None]
        self.inner = locals_of(self.parameters)
        self.inner_gradients = locals_of(self.gradients)
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.param: list[int] = []
        self.param_dtype: Sequence[int] = []
        self.grad: list[int] = []
        self.grad_dtype: Sequence[int] = []
        self.properties: Properties | None = None
        self.contiguous = False

    def read(self, compute: int) -> bool:
        """Take addresses and types. Returns whether the engine can work on all of them.

        Parameters
        ----------
        compute
            The device to compute on, as ``get_device`` numbers them; -1 for the CPU.
        """
        try:
            parameters, gradients = look(self.inner), look(self.inner_gradients)
            self.param, self.param_dtype = parameters.addresses, parameters.dtypes
            self.grad, self.grad_dtype = gradients.addresses, gradients.dtypes
            self.properties = self._properties(parameters)
        except (KeyError, RuntimeError):
            # A type that the kernels do not know, or a tensor that is not one stretch of memory.
            return False
        properties = self.properties
        if not set(properties.devices) <= {compute, -1}:
            return False
        if gradients.devices != properties.devices or gradients.elements != properties.elements:
            return False
        self.contiguous = parameters.contiguous and gradients.contiguous
        # A view that torch negates as it reads, such as the imaginary part of a conjugate, is every other element of
        # its memory, so never contiguous with more than one. Asking is slow, so only then.
        if not self.contiguous or 1 in properties.elements:
            self.inner_gradients = [gradient.resolve_neg() for gradient in self.inner_gradients]
            self.grad = addresses(self.inner_gradients)
        return True

    def _properties(self, looked: Looked) -> Properties:
        # Memory at the same address as in the last step is the same memory; its type and order may be others.
        known = self.flat.properties
        if self.whole and known is not None and known.param == self.param:
            return known
        properties = Properties(self.param, looked.devices, list(map(torch.Tensor.size, self.inner)), looked.elements)
        if self.whole:
            self.flat.properties = properties
        return properties

    def put_in_order(self, strides: list[tuple[int, ...]]) -> None:
        """Replace what is ordered otherwise than its state by copies, and keep which parameters to copy back."""
        self.inner, self.inner_gradients = list(self.inner), list(self.inner_gradients)
        for i, order in enumerate(strides):
            ordered = in_order(self.inner[i], order)
            if ordered is not self.inner[i]:
                check_overlap(self.inner[i], f"a parameter of shape {tuple(self.inner[i].shape)}")
                self.copies.append((self.inner[i], ordered))
                self.inner[i] = ordered
            self.inner_gradients[i] = in_order(self.inner_gradients[i], order)
        self.param, self.grad = addresses(self.inner), addresses(self.inner_gradients)

    def numbers(self) -> dict[str, Sequence[int]]:
        """Return addresses and types as the engine takes them."""
        return {
            "param": self.param,
            "param_dtype": self.param_dtype,
            "grad": self.grad,
            "grad_dtype": self.grad_dtype,
            "group": self.groups,
        }
