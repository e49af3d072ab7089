"""The parts of a hybrid optimizer: which parameters are offloaded, and the optimizers of both parts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forebay._tensors import local

if TYPE_CHECKING:
    import torch

    from forebay.optim.base import Optimizer

Groups = list[dict[str, Any]]
Make = Callable[[Groups, bool], "Optimizer"]
"""Returns a new optimizer for groups; the second argument says whether they are offloaded."""


@dataclass
class Parts:
    """The optimizers of the offloaded and of the resident parameters."""

    # For each group, its parameters when they were last divided.
    lists: list[list[torch.Tensor]] = field(default_factory=list)
    offloaded: Optimizer | None = None
    resident: Optimizer | None = None
    # By a parameter's id: whether it is offloaded.
    homes: dict[int, bool] = field(default_factory=dict)

    @property
    def all(self) -> list[Optimizer]:
        """The optimizers that have parameters, the offloaded part first."""
        return [part for part in (self.offloaded, self.resident) if part is not None and part.param_groups]

    def part_of(self, parameter: torch.Tensor) -> Optimizer | None:
        """Return the optimizer that has a parameter."""
        is_offloaded = self.homes.get(id(parameter))
        return None if is_offloaded is None else self.offloaded if is_offloaded else self.resident

    def is_of(self, groups: Groups) -> bool:
        """Whether these groups have the very same parameters as before; frameworks may replace them at any time."""
        lists = [group["params"] for group in groups]
        return len(lists) == len(self.lists) and all(
            len(before) == len(now) and all(map(operator.is_, before, now))
            for before, now in zip(self.lists, lists, strict=True)
        )

    def divide(self, groups: Groups, fraction: float, make: Make) -> None:
        """Give each part its parameters.

        Parameters that have a part stay there. The others are offloaded in their order, until that part has its share
        of the elements on the GPU. Parameters on the CPU are always offloaded.

        Parameters
        ----------
        groups
            The groups of the hybrid optimizer.
        fraction
            The offloaded share.
        make
            Makes the optimizer of a part.
        """
        inner = {id(p): local(p) for group in groups for p in group["params"]}
        on_gpu = {number: tensor.numel() for number, tensor in inner.items() if tensor.is_cuda}
        homes = {number: home for number, home in self.homes.items() if number in inner}
        wanted = sum(on_gpu.values()) * fraction
        taken = sum(size for number, size in on_gpu.items() if homes.get(number))
        for number in inner:
            if number in homes:
                continue
            # With a share of 1, empty shards at the end are offloaded too.
            homes[number] = number not in on_gpu or taken < wanted or fraction == 1
            taken += on_gpu.get(number, 0) if homes[number] else 0
        for is_offloaded, name in ((True, "offloaded"), (False, "resident")):
            mine = [
                {**group, "params": [p for p in group["params"] if homes[id(p)] == is_offloaded]} for group in groups
            ]
            mine = [group for group in mine if group["params"]]
            part: Optimizer | None = getattr(self, name)
            if part is not None:
                known = part.defaults
                part.param_groups = [{**known, **group} for group in mine]
            elif mine:
                setattr(self, name, make(mine, is_offloaded))
        self.homes = homes
        self.lists = [list(group["params"]) for group in groups]

    def follow(self, groups: Groups) -> None:
        """Copy the settings of the hybrid optimizer's groups, such as the learning rate, into those of the parts."""
        group_of = {id(p): group for group in groups for p in group["params"]}
        for part in self.all:
            for mine in part.param_groups:
                theirs = group_of[id(mine["params"][0])]
                mine.update((name, value) for name, value in theirs.items() if name != "params")
