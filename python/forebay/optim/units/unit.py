"""A unit: a few whole parameters, and the memory on the host that has all their state."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forebay._tensors import address, bump_versions, local
from forebay.optim.units import trees
from forebay.optim.units.layout import Layout, lay_out, lies_in, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from forebay.optim.units.memory import HostMemory
    from forebay.optim.units.wire import Copied

Key = tuple[int, trees.Path]
"""A parameter's id, and the path of a tensor in its state."""


class Held(NamedTuple):
    """A tensor over a unit's memory, as it was made."""

    number: int
    """Its place in the home's list."""
    tensor: torch.Tensor
    addresses: tuple[int, ...]
    """Those of its parts."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def is_as_made(self) -> bool:
        """Whether the tensor still has this memory: someone may have assigned to its ``data``."""
        tensor = self.tensor
        if tuple(tensor.shape) != self.shape or tuple(tensor.stride()) != self.stride:
            return False
        parts = (tensor,) if type(tensor) in trees.PLAIN else trees.parts(tensor, "")
        return tuple(address(part) for part in parts) == self.addresses


Known = dict[int, Held]
"""Tensors over a unit's memory by their id."""


def held(tensors: list[torch.Tensor]) -> Known:
    """Return tensors that were made over a unit's memory by their id."""
    found = {}
    for index, tensor in enumerate(tensors):
        addresses = tuple(address(part) for part in trees.parts(tensor, ""))
        found[id(tensor)] = Held(index, tensor, addresses, tuple(tensor.shape), tuple(tensor.stride()))
    return found


class Leaf(NamedTuple):
    """A tensor of a parameter's state."""

    key: Key
    parameter: torch.Tensor
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        """What error messages call it."""
        return f"state{trees.text_of(self.key[1])} of a parameter of shape {tuple(self.parameter.shape)}"


class Home:
    """The memory on the host that has a unit's state, and the tensors over it."""

    def __init__(self, layout: Layout, memory: HostMemory, leaves: list[Leaf]) -> None:
        self.layout, self.memory = layout, memory
        views = layout.views_in(memory.flat)
        # Shared by all tensors: the next part is the next tensor's.
        following = iter(views)
        self.keys = [leaf.key for leaf in leaves]
        self.tensors = [trees.rebuilt(leaf.tensor, following) for leaf in leaves]
        following = iter(views)
        # Second tensors over the same memory: assigning to ``data`` of a tensor does not change these.
        self._parts = [[next(following).detach() for _ in trees.parts(tensor, "")] for tensor in self.tensors]
        self.known = held(self.tensors)
        # Copies that may still use the memory.
        self.busy: list[Copied] = []
        self._process = os.getpid()

    def __del__(self) -> None:
        # The memory must not be unpinned while a copy uses it. A forked child has neither.
        if getattr(self, "_process", None) == os.getpid():
            self.settle()

    @property
    def nbytes(self) -> int:
        """The size of the memory."""
        return self.layout.nbytes

    def settle(self) -> None:
        """Wait until no copy uses the memory."""
        busy, self.busy = getattr(self, "busy", []), []
        for copied in busy:
            copied.wait()

    def take_over(self, leaves: list[Leaf]) -> None:
        """Make the tensors of this home as those of the present state, whose values it has already."""
        for index, leaf in enumerate(leaves):
            mine = self.tensors[index]
            if leaf.tensor is mine and type(mine) in trees.PLAIN:
                # Its ``data`` may be other memory.
                mine.data = self._parts[index][0]
            elif leaf.tensor is not mine and type(leaf.tensor) is not torch.Tensor:
                self.tensors[index] = trees.rebuilt(leaf.tensor, iter(self._parts[index]))
        self.known = held(self.tensors)

    def over(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the same tensors over other memory."""
        following = iter(self.layout.views_in(memory))
        return [trees.rebuilt(tensor, following) for tensor in self.tensors]

    def on(self, device: torch.device) -> dict[int, torch.Tensor]:
        """Return copies of the tensors on a device, by the ids of those here, each place in memory of its own."""
        following = iter(self.layout.copies(self.memory.flat, device))
        return {id(tensor): trees.rebuilt(tensor, following) for tensor in self.tensors}

    def changed(self) -> None:
        """Record that the memory has new values."""
        tensors = [local(tensor) for tensor in self.tensors if not tensor.is_inference()]
        bump_versions([tensor for tensor in tensors if type(tensor) in trees.PLAIN])


class Unit:
    """A few whole parameters.

    Parameters
    ----------
    members
        The number of each parameter's group, and the parameter, in the order of a step.
    """

    def __init__(self, members: list[tuple[int, torch.Tensor]]) -> None:
        self.members = members
        self.parameters = [parameter for _, parameter in members]
        self.numbers = tuple(id(parameter) for parameter in self.parameters)
        self.home: Home | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the unit's state on the host."""
        return 0 if self.home is None else self.home.nbytes

    def settle(self) -> None:
        """Wait until the state on the host is complete."""
        if self.home is not None:
            self.home.settle()

    def leaves(self, state: dict[Any, Any], belongs: Callable[[Unit, Leaf], bool]) -> list[Leaf]:
        """Return the tensors of the unit's state that are kept on the host between steps, each once."""
        found: dict[int, Leaf] = {}
        for parameter in self.parameters:
            tree = dict.get(state, parameter)
            for path, tensor in trees.leaves(tree):
                leaf = Leaf((id(parameter), path), parameter, tensor)
                if id(tensor) not in found and belongs(self, leaf):
                    found[id(tensor)] = leaf
        return list(found.values())

    def shares(self, leaf: Leaf) -> bool:
        """Whether the memory of a tensor of state is that of one of the parameters or gradients."""
        storages = {
            local(one).untyped_storage()._cdata
            for parameter in self.parameters
            for one in (parameter, parameter.grad)
            if one is not None and local(one).layout == torch.strided and type(local(one)) in trees.PLAIN
        }
        return any(part.untyped_storage()._cdata in storages for part in trees.parts(leaf.tensor, leaf.name))


def is_unchanged(leaves: list[Leaf], known: Known) -> bool:
    """Whether these are all the tensors over a unit's memory, and no others."""
    return len(leaves) == len(known) and all(
        id(leaf.tensor) in known and known[id(leaf.tensor)].is_as_made() for leaf in leaves
    )


class Placed(NamedTuple):
    """Where a unit's state was put."""

    layout: Layout
    memory: torch.Tensor
    fits: bool
    """Whether the home stays as it is."""


def place(
    home: Home | None,
    leaves: list[Leaf],
    known: Known,
    memory: torch.Tensor | None,
    fresh: Callable[[int], torch.Tensor],
) -> Placed:
    """Put a unit's state into one range of memory, on the host or on the device.

    Parameters
    ----------
    home
        The unit's present home.
    leaves
        The tensors of its state.
    known
        Those over ``memory``.
    memory
        The memory in which the state was so far, as the home has it; None if there is none.
    fresh
        Returns other memory of a given size.
    """
    parts = [trees.parts(leaf.tensor, leaf.name) for leaf in leaves]
    sources = [part for of_leaf in parts for part in of_leaf]
    layout = lay_out(sources)
    fits = home is not None and layout == home.layout and [leaf.key for leaf in leaves] == home.keys
    if fits and memory is not None:
        stays = [known.get(id(leaf.tensor)) for leaf in leaves]
        moved = [i for i, one in enumerate(stays) if one is None or one.number != i or not one.is_as_made()]
        if not any(lies_in(part, memory) for index in moved for part in parts[index]):
            # Only what was replaced is copied.
            views = iter(layout.views_in(memory))
            targets = [[next(views) for _ in of_leaf] for of_leaf in parts]
            for index in moved:
                write(targets[index], parts[index])
            return Placed(layout, memory, True)
    target = fresh(layout.nbytes)
    write(layout.views_in(target), sources)
    return Placed(layout, target, fits)


def swap(state: dict[Any, Any], parameters: Iterable[torch.Tensor], new: Mapping[int, torch.Tensor]) -> None:
    """Replace tensors in the state of some parameters, given by their ids."""
    for parameter in parameters:
        tree = dict.get(state, parameter)
        changed = trees.replaced(tree, lambda _, tensor: new.get(id(tensor), tensor))
        if changed is not tree:
            dict.__setitem__(state, parameter, changed)
