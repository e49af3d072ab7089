"""One step in units: the optimizer's own step runs on one unit while others are fetched and stored."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forebay._tensors import local
from forebay.errors import OptionError
from forebay.optim.units import trees
from forebay.optim.units.counters import OWN_KEYS, Counters, bits
from forebay.optim.units.memory import SLOTS, HostMemory, open_slots
from forebay.optim.units.standins import raw_step
from forebay.optim.units.unit import Home, held, is_unchanged, place, swap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forebay.optim.units.manager import Units
    from forebay.optim.units.unit import Known, Unit
    from forebay.optim.units.wire import Copied


class Run:
    """One step.

    Parameters
    ----------
    owner
        The optimizer's units.
    units
        Those that take part, in order.
    arguments, keywords
        What the optimizer's own step is called with.
    """

    def __init__(self, owner: Units, units: list[Unit], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._owner, self.units = owner, units
        self._arguments, self._keywords = arguments, keywords
        self._wire = owner.wire
        self._optimizer = owner.optimizer
        self._step = raw_step(owner.theirs)
        self._slots = open_slots([owner.expected_bytes(unit) for unit in units], owner.device)
        # For each slot: what must have ended before it is used again.
        self._last: list[list[Copied]] = [[] for _ in self._slots]
        self._fetched: dict[int, Copied] = {}
        self._names = {
            id(parameter): name
            for group in self._optimizer.param_groups
            for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        # A step of a small copy may wait for the device, to see all that it counts in.
        self._counters = Counters(self._optimizer, owner.state, waits=not owner.pins)
        self._numbers: dict[str, Any] | None = None
        self.fetches: list[Copied] = []
        self.stores: list[Copied] = []
        self.grew = False

    def go(self, after: Callable[[Unit], None] | None = None) -> Any:
        """Take the step and return what the optimizer's own step returned.

        Parameters
        ----------
        after
            Called after the update of each unit was submitted.
        """
        self._wire.open(self._slots)
        result, done = None, 0
        try:
            self._fetch(0)
            for index in range(len(self.units)):
                self._fetch(index + 1)
                result = self._update(index)
                done += 1
                if after is not None:
                    after(self.units[index])
            return result
        except BaseException as error:
            if done:
                self._owner.tear(done, len(self.units), error)
            raise
        finally:
            self._wire.close(self._slots)
            # The next step makes its own before this run is forgotten.
            self._slots = []

    def reads_elsewhere(self) -> bool:
        """Whether the step uses memory on the device besides parameters, gradients and state on the host.

        Tensors in groups, on the object, in attributes of parameters, and what a ``GradScaler`` has set, may be changed
        in place after the step.
        """
        owner = self._owner
        parameters = [parameter for unit in self.units for parameter in unit.parameters]
        attributes = [tensor for parameter in parameters for _, tensor in trees.leaves(vars(parameter))]
        state = [tensor for parameter in parameters for _, tensor in trees.leaves(dict.get(owner.state, parameter))]
        others = [*self._counters.tensors(), *attributes, *(one for one in state if not owner.is_hosted(one))]
        return any(local(tensor).device == owner.device for tensor in others)

    def _fetch(self, index: int) -> None:
        """Begin to fetch a unit's state, if there is such a unit and it has state."""
        home = self.units[index].home if index < len(self.units) else None
        if home is None or not home.nbytes:
            return
        slot = index % SLOTS
        copied = self._wire.fetch(home.memory.flat, self._memory(index, home), [*self._last[slot], *home.busy])
        self._fetched[index] = copied
        home.busy.append(copied)
        self.fetches.append(copied)

    def _memory(self, index: int, home: Home) -> torch.Tensor:
        return self._slots[index % SLOTS][: home.nbytes]

    def _update(self, index: int) -> Any:
        unit, owner = self.units[index], self._owner
        home = unit.home
        backup = {p: trees.copied(dict.get(owner.state, p)) for p in unit.parameters if p in owner.state}
        versions = [parameter._version for parameter in unit.parameters]
        memory = None if home is None else self._memory(index, home)
        known: Known = {}
        try:
            if home is not None and memory is not None:
                if index in self._fetched:
                    self._wire.arrive(self._fetched[index])
                on_device = home.over(memory)
                known = held(on_device)
                pairs = zip(home.tensors, on_device, strict=True)
                swap(owner.state, unit.parameters, {id(host): there for host, there in pairs})
            if index:
                self._counters.restore()
            result = self._call(unit)
            self._check_numbers()
        except BaseException as error:
            self._put_back(unit, backup)
            is_untouched = index == 0 and self._is_untouched(unit, versions, memory, error)
            self._counters.restore()
            if not is_untouched:
                owner.tear(index, len(self.units), error)
            raise
        try:
            self._store(index, unit, known, memory)
        except BaseException as error:
            owner.tear(index, len(self.units), error)
            raise
        return result

    def _put_back(self, unit: Unit, backup: dict[torch.Tensor, Any]) -> None:
        """Make a unit's state the one on the host, which is as it was before the step."""
        for parameter in unit.parameters:
            dict.pop(self._owner.state, parameter, None)
        dict.update(self._owner.state, backup)

    def _call(self, unit: Unit) -> Any:
        """Run the optimizer's own step on one unit."""
        state = self._owner.state
        mine = {parameter: dict.__getitem__(state, parameter) for parameter in unit.parameters if parameter in state}
        others = {key: value for key, value in dict.items(state) if not isinstance(key, torch.Tensor)}
        working: defaultdict[Any, Any] = defaultdict(dict, {**mine, **others})
        with self._narrowed(unit, working):
            result = self._step(self._optimizer, *self._arguments, **self._keywords)
            if vars(self._optimizer).get("state") is not working:
                raise OptionError(
                    f"{self._owner.label} replaces its state dict inside of its step; only a part of the parameters is "
                    "in it then, so forebay cannot run it in units"
                )
        numbers = set(unit.numbers)
        for key, value in working.items():
            if isinstance(key, torch.Tensor) and id(key) not in numbers:
                raise OptionError(
                    f"{self._owner.label} changes the state of another parameter than the ones that it updates; "
                    "forebay cannot run it in units"
                )
            dict.__setitem__(state, key, value)
        for key in [*mine, *others]:
            if key not in working:
                dict.__delitem__(state, key)
        return result

    @contextmanager
    def _narrowed(self, unit: Unit | None, working: dict[Any, Any]) -> Iterator[None]:
        """Within this context, the optimizer has the parameters and the state of one unit; with None, no parameters."""
        optimizer, owner = self._optimizer, self._owner
        groups = optimizer.param_groups
        kept = [{key: group[key] for key in OWN_KEYS if key in group} for group in groups]
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        own: list[dict[str, list[Any]]] = [{key: [] for key in OWN_KEYS if key in group} for group in groups]
        for index, parameter in [] if unit is None else unit.members:
            own[index]["params"].append(parameter)
            if "param_names" in own[index]:
                own[index]["param_names"].append(self._names[id(parameter)])
        try:
            for group, narrow in zip(groups, own, strict=True):
                group.update(narrow)
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
            optimizer.state = working  # type: ignore[assignment]
            owner.inside = True
            yield
            is_same = optimizer.param_groups is groups and all(
                group["params"] is narrow["params"] for group, narrow in zip(groups, own, strict=True)
            )
            if not is_same:
                raise OptionError(
                    f"{owner.label} replaces its groups inside of its step; forebay cannot run it in units"
                )
        finally:
            owner.inside = False
            optimizer.param_groups = groups
            for group, whole in zip(groups, kept, strict=True):
                group.update(whole)
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
            optimizer.state = owner.state

    def _check_numbers(self) -> None:
        """Raise if the numbers in groups and on the object depend on the unit."""
        now = self._counters.now()
        before, self._numbers = self._numbers or now, now
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                raise OptionError(
                    f"{name} depends on the parameters that a step of {self._owner.label} is given; forebay cannot run "
                    "it in units"
                )

    def _is_untouched(self, unit: Unit, versions: list[int], memory: torch.Tensor | None, error: BaseException) -> bool:
        """Whether an error came before anything was changed: the step raises it without any parameters too."""
        if versions != [parameter._version for parameter in unit.parameters]:
            return False
        if memory is not None and unit.home is not None and bits(memory) != bits(unit.home.memory.flat):
            return False
        self._counters.restore()
        try:
            with self._narrowed(None, defaultdict(dict)):
                self._step(self._optimizer, *self._arguments, **self._keywords)
        except Exception as again:
            return type(again) is type(error) and str(again) == str(error)
        return False

    @torch.no_grad()
    def _store(self, index: int, unit: Unit, known: Known, memory: torch.Tensor | None) -> None:
        """Begin to store a unit's state, and show the tensors on the host again."""
        owner, home, slot = self._owner, unit.home, index % SLOTS
        leaves = unit.leaves(owner.state, partial(owner.belongs, known))
        if home is not None and memory is not None and is_unchanged(leaves, known):
            swap(owner.state, unit.parameters, {i: home.tensors[one.number] for i, one in known.items()})
        else:
            fresh = partial(self._fresh, slot, is_used=memory is not None)
            placed = place(home, leaves, known, memory, fresh)
            if home is not None and placed.fits:
                home.take_over(leaves)
            else:
                self.grew = True
                owner.check_room(unit, placed.layout.nbytes)
                home = Home(placed.layout, HostMemory(placed.layout.nbytes, owner.device, pinned=owner.pins), leaves)
                unit.home = home
                owner.host(home)
            memory = placed.memory
            swap(
                owner.state, unit.parameters, {id(leaf.tensor): t for leaf, t in zip(leaves, home.tensors, strict=True)}
            )
        if home.nbytes:
            copied = self._wire.store(memory, home.memory.flat)
            # The store is behind the fetch.
            home.busy, self._last[slot] = [copied], [copied]
            self.stores.append(copied)
        home.changed()

    def _fresh(self, slot: int, nbytes: int, *, is_used: bool) -> torch.Tensor:
        """Return memory on the device for a unit whose state is new or has another size."""
        if not is_used and nbytes <= self._slots[slot].numel():
            for copied in self._last[slot]:
                self._wire.arrive(copied)
            return self._slots[slot][:nbytes]
        return torch.empty(nbytes, dtype=torch.uint8, device=self._owner.device)
