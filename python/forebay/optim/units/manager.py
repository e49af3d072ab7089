"""Everything that belongs to one optimizer that runs in units."""

from __future__ import annotations

import os
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core
from forebay._device import check_not_captured
from forebay._live import wait_for_live, waited_s
from forebay._progress import watch
from forebay._tensors import local
from forebay.errors import CheckpointError, DeviceError
from forebay.optim.units import trees
from forebay.optim.units.check import UntriedError, check
from forebay.optim.units.memory import SLOTS, HostMemory, check_budget
from forebay.optim.units.parameters import Member, check_parameters, has_gradient, kinds_of, members_of
from forebay.optim.units.plan import Forecast, plan, size_of
from forebay.optim.units.run import Run
from forebay.optim.units.state import UnitState
from forebay.optim.units.trials import Verdict
from forebay.optim.units.unit import Home, Key, Known, Leaf, Unit, is_unchanged, place, swap
from forebay.optim.units.wire import Wire, wire_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.optim.overlap.units import OverlappedUnits
    from forebay.optim.units.options import UnitOptions


class Units:
    """The units of an optimizer, their memory, and whether they can be trusted.

    Parameters
    ----------
    optimizer
        The optimizer.
    theirs
        Its own class.
    options
        The options.
    in_units
        Makes a small copy of the optimizer run in units, to try out whether that is exact. None for such a copy.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        theirs: Any,
        options: UnitOptions,
        in_units: Callable[[Any], None] | None,
    ) -> None:
        self.optimizer, self.theirs, self.options = optimizer, theirs, options
        self.label = f"{theirs.__module__}.{theirs.__qualname__}"
        self.state = UnitState(self.settle)
        self.units: list[Unit] = []
        # Whether the optimizer's own step is running.
        self.inside = False
        self.distrusted: str | None = None
        self.pins = in_units is not None
        self._in_units = in_units
        self._process = os.getpid()
        self._wire: tuple[torch.device, Wire] | None = None
        self._unit_of: dict[int, Unit] = {}
        self._lists: list[list[torch.Tensor]] = []
        self._expected: dict[int, int | None] = {}
        self._forecast = Forecast()
        # Tensors over homes: on the host, they stand for state on the device.
        self._hosted: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        # The same for state that was copied or unpickled and has no home yet.
        self.expected_keys: set[Key] = set()
        self._tried: set[Any] = set()
        # Of a small copy, all units take part in all steps.
        self.verdict = Verdict(skips_idle=False)
        # The overlapped steps, if ``overlap_step`` was called.
        self.overlap: OverlappedUnits | None = None
        self._last: Run | None = None
        self._step_s = 0.0

    # Parameters and units.

    @property
    def device(self) -> torch.device:
        """The device that the step runs on."""
        return local(self.optimizer.param_groups[0]["params"][0]).device

    @property
    def wire(self) -> Wire:
        """The wire to the device."""
        device = self.device
        if self._wire is None or self._wire[0] != device:
            self._wire = (device, wire_for(device))
        return self._wire[1]

    def try_out(self) -> None:
        """Raise if a step on some parameters is not the step on all; see ``check``. Each kind is tried out once."""
        if self._in_units is None:
            return
        kinds = kinds_of(self.optimizer)
        if kinds <= self._tried:
            return
        check_parameters(self.optimizer)
        self.verdict = check(self.optimizer, self.theirs, members_of(self.optimizer), self._in_units)
        self._tried |= kinds

    def trust_trial(self, other: Units) -> None:
        """Take over what another one has tried out with the same optimizer."""
        self._tried, self.verdict = other._tried, other.verdict

    def arrange(self) -> None:
        """Make units of the present parameters, unless they are made already."""
        found = vars(self.optimizer)["state"]
        if found is not self.state:
            self.take_state(found)
        lists = [group["params"] for group in self.optimizer.param_groups]
        is_same = len(lists) == len(self._lists) and all(
            len(mine) == len(now) and all(a is b for a, b in zip(mine, now, strict=True))
            for mine, now in zip(self._lists, lists, strict=True)
        )
        if not is_same:
            check_parameters(self.optimizer)
            self.plan()

    def plan(self) -> None:
        """Decide which parameters make a unit, and give each unit its memory."""
        members = members_of(self.optimizer)
        self.make_room(members, self._sizes(members))
        faulted = _core.bytes_faulted_in()
        to_pin = sum(self.expected_bytes(unit) for unit in self.units if unit.home is None) if self.pins else 0
        with watch("pinning optimizer state", to_pin, lambda: _core.bytes_faulted_in() - faulted):
            for unit in self.units:
                self.refresh(unit)
        self.expected_keys.clear()

    def make_room(self, members: list[Member], sizes: Sequence[int | None]) -> None:
        """Make units for parameters whose state has these sizes. Those that stay the same keep their memory."""
        units = plan(members, sizes, self.options.size_on(self.device))
        check_budget(sum(size or 0 for size in sizes), self.options.pinned_budget_bytes)
        self._expected = {id(p): size for (_, p), size in zip(members, sizes, strict=True)}
        self._lists = [list(group["params"]) for group in self.optimizer.param_groups]
        self.settle(None)
        kept = {unit.numbers: unit for unit in self.units}
        made = []
        for group in units:
            numbers = tuple(id(parameter) for _, parameter in group)
            unit = kept.pop(numbers, None) or Unit(group)
            unit.members = group
            made.append(unit)
        # Their memory is freed as the state moves to other units.
        for unit in kept.values():
            self.expected_keys.update(() if unit.home is None else unit.home.keys)
            unit.home = None
        self.units = made
        self._unit_of = {number: unit for unit in made for number in unit.numbers}

    def _sizes(self, members: list[Member]) -> list[int | None]:
        new = [one for one in members if not dict.get(self.state, one[1])]
        # Each parameter of a small copy is a unit of its own in any case.
        forecast = self._forecast.sizes(self.optimizer, self.theirs, new) if self.pins else [None] * len(new)
        following = iter(forecast)
        found: list[int | None] = []
        for _, parameter in members:
            tree = dict.get(self.state, parameter)
            unit = self._unit_of.get(id(parameter)) or Unit([(0, parameter)])
            if not tree:
                found.append(next(following))
            else:
                leaves = [Leaf((id(parameter), path), parameter, tensor) for path, tensor in trees.leaves(tree)]
                found.append(size_of([leaf.tensor for leaf in leaves if self.belongs({}, unit, leaf)]))
        return found

    def expected_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's state on the device; before its first step, as far as they are known."""
        if unit.home is not None:
            return unit.nbytes
        return sum(self._expected.get(number) or 0 for number in unit.numbers)

    # Memory.

    def host(self, home: Home) -> None:
        """Remember the tensors of a home."""
        for tensor in home.tensors:
            self._hosted[id(tensor)] = tensor

    def is_hosted(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the host in the place of state on the device."""
        return self._hosted.get(id(tensor)) is tensor

    def home_of(self, tensor: torch.Tensor) -> Key | None:
        """Return the parameter's id and the path of which a tensor is the live state; None if it is not."""
        for unit in self.units if self.is_hosted(tensor) else ():
            if unit.home is not None and (one := unit.home.known.get(id(tensor))) is not None:
                return unit.home.keys[one.number]
        return None

    def belongs(self, known: Known, unit: Unit, leaf: Leaf) -> bool:
        """Whether a tensor of state is on the device in a step, and so on the host between steps.

        Not so for state that is on the host in a step too, such as counters of steps, and for views of a parameter or
        of its gradient.
        """
        if id(leaf.tensor) in known or self.is_hosted(leaf.tensor):
            return True
        if local(leaf.tensor).device != self.device:
            return leaf.key in self.expected_keys or (unit.home is not None and leaf.key in unit.home.keys)
        return not unit.shares(leaf)

    @torch.no_grad()
    def refresh(self, unit: Unit) -> None:
        """Take over state that was assigned since the last step, or that has no memory of its own yet."""
        home = unit.home
        known: Known = {} if home is None else home.known
        leaves = unit.leaves(self.state, partial(self.belongs, known))
        if is_unchanged(leaves, known):
            return
        self.settle(None)
        wait_for_live(self.optimizer)
        made: list[HostMemory] = []

        def fresh(nbytes: int) -> torch.Tensor:
            made.append(HostMemory(nbytes, self.device, pinned=self.pins))
            return made[0].flat

        placed = place(home, leaves, known, None if home is None else home.memory.flat, fresh)
        if home is not None and not made:
            home.take_over(leaves)
        else:
            home = Home(placed.layout, made[0], leaves)
        pairs = zip(leaves, home.tensors, strict=True)
        swap(self.state, unit.parameters, {id(leaf.tensor): tensor for leaf, tensor in pairs})
        unit.home = home if leaves else None
        self.host(home)

    def check_room(self, unit: Unit, nbytes: int) -> None:
        """Raise if a unit's new size does not fit into the budget of pinned memory."""
        others = sum(one.nbytes for one in self.units if one is not unit)
        check_budget(others + nbytes, self.options.pinned_budget_bytes)

    def take_state(self, values: Any) -> None:
        """Make other values the state of all parameters."""
        self.settle(None)
        dict.clear(self.state)
        dict.update(self.state, dict.items(values))
        self.optimizer.state = self.state

    def settle(self, parameter: torch.Tensor | None) -> None:
        """Wait until a parameter's state on the host is complete, or all state."""
        if not self.units:
            return
        if self._process != os.getpid():
            raise DeviceError(
                "this optimizer was used before fork(), and its state is not available in the child; read it in the "
                "parent, or make a new optimizer in the child"
            )
        if self.overlap is not None:
            self.overlap.finish()
        if parameter is None:
            for unit in self.units:
                unit.settle()
        elif (found := self._unit_of.get(id(parameter))) is not None:
            found.settle()

    # Steps.

    def take_step(self, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None) -> Any:
        """Run the optimizer's own step on one unit after the other. Hooks and closures have run by now."""
        start = time.perf_counter()
        self.check_trusted("stepped")
        check_not_captured(self.device, f"{self.label}.step")
        self.arrange()
        self.settle_process()
        if self.overlap is not None:
            self.overlap.begin()
        try:
            self.try_out()
        except UntriedError as error:
            # The step would raise the same on the parameters themselves, after it has perhaps changed some of them.
            raise (error.__cause__ or error) from None
        chosen = [unit for unit in self.units if not self.verdict.skips_idle or any(map(has_gradient, unit.parameters))]
        # Counters advance in a step without gradients too.
        chosen = chosen or self.units[:1]
        for unit in chosen:
            self.refresh(unit)
        run = Run(self, chosen, arguments, keywords or {})
        result = run.go() if self.overlap is None else self.overlap.go(run)
        if run.grew:
            self.plan()
        self._last, self._step_s = run, time.perf_counter() - start
        return result

    def settle_process(self) -> None:
        """Raise in a forked child, which does not have the state."""
        self.settle(self.units[0].parameters[0] if self.units else None)

    def tear(self, done: int, count: int, error: BaseException) -> None:
        """Refuse steps until state is loaded: a step broke off after some units were updated."""
        if self.distrusted is None:
            text = f"{type(error).__name__}: {error}"
            self.distrusted = f"a step broke off with {text}; {done} of {count} units were updated before that"

    def check_trusted(self, done: str) -> None:
        """Raise if a step or a load failed and left state half written."""
        if self.distrusted is not None:
            raise CheckpointError(
                f"the optimizer cannot be {done}: {self.distrusted}; load a complete checkpoint of optimizer and model"
            )

    def stats(self) -> dict[str, float | int]:
        """Return the last step and the memory in numbers. Waits for the step's stores."""
        if not self.units and not self._lists:
            self.arrange()
        self.settle(None)
        fetches, stores = ([], []) if self._last is None else (self._last.fetches, self._last.stores)
        waited = waited_s(self.optimizer)
        return {
            "step_s": self._step_s,
            **self.memory(),
            "fetched_bytes": sum(copied.nbytes for copied in fetches),
            "stored_bytes": sum(copied.nbytes for copied in stores),
            "fetch_s": sum(copied.seconds() for copied in fetches),
            "store_s": sum(copied.seconds() for copied in stores),
            "save_stalls": int(waited > 0),
            "save_stall_s": waited,
        }

    def memory(self) -> dict[str, float | int]:
        """Return the memory in numbers. Waits for nothing."""
        sizes = [self.expected_bytes(unit) for unit in self.units]
        return {
            "units": len(self.units),
            "unit_bytes": max(sizes, default=0),
            "device_bytes": min(SLOTS, len(sizes)) * max(sizes, default=0),
            "pinned_bytes": sum(sizes),
        }
