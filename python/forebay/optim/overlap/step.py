"""The overlapped steps of one optimizer: backward, ``step``, and whoever reads a parameter.

[Note: what stands for what]
- In the last backward before a step, ``final`` takes each gradient: the engine gets it, this class holds it, and
  ``parameter.grad`` becomes a ``ConsumedGradient``. From then on the parameter is pending (see ``pending.py``), and
  reading it raises an error: it has neither its old value nor, before ``step``, a meaning.
- ``step`` hands the other gradients over and returns. Reading a pending parameter now waits for its own update.
- With ``speculate`` gradients are taken although they may be clipped: see [Note: a step that guesses] in ``guess.py``.
- A gradient is held until its update has ended, or until torch's stream runs behind the update.

Nothing here waits for the device, except on the CPU, which has no streams.
"""

from __future__ import annotations

import time
import weakref
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core, _trace
from forebay._device import capturing, check_not_captured, is_gpu, stream_handle
from forebay._live import is_live
from forebay._tensors import address, bump_versions, local, locals_of, look
from forebay.errors import DeviceError, Error, OptionError
from forebay.optim.amp import unscale
from forebay.optim.backward import last_backward, late_reducers, refuse_late_reduction, take_off
from forebay.optim.clip import Clip
from forebay.optim.create import create
from forebay.optim.gather import Flat
from forebay.optim.overlap.consumed import ConsumedGradient, is_consumed, put_zeros
from forebay.optim.overlap.exposure import Exposure
from forebay.optim.overlap.guess import Chances, can_guess, check_masters
from forebay.optim.overlap.pending import Pending, mark, restore
from forebay.optim.overlap.reads import Reader, Readers
from forebay.optim.overlap.taking import Hook, Trained, is_nested
from forebay.optim.second import close_second, open_second

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forebay.optim.base import Optimizer
    from forebay.optim.gather import Found, Tensors

Home = tuple[int, int]


class Overlap:
    """The overlapped steps of one optimizer, from ``overlap_step`` to ``remove``.

    Parameters
    ----------
    optimizer
        The optimizer.
    models
        The models that read its parameters.
    every
        How many backwards make a step; None if ``last_backward`` marks the last.
    speculates
        Whether updates may begin before it is known whether the step clips.
    """

    def __init__(
        self, optimizer: Optimizer, models: list[torch.nn.Module], every: int | None, speculates: bool = False
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.readers = Readers(self, models)
        self.every = every
        self.compute = optimizer._choose_device()
        self.exposure = Exposure(self.compute)
        # Whether a step has taken gradients and ``step`` was not called yet; whether one was called and may go on.
        self.is_begun, self.is_open = False, False
        # Whether to guess that nothing is clipped, and whether the step that has begun does.
        self.chances = Chances() if speculates else None
        self.is_guessing = False
        # Steps, and passes since the beginning.
        self.steps, self.passes = 0, 0
        # Whether a backward has run since the last forward.
        self.in_backward = False
        # Whether this backward was marked as the last one.
        self._is_marked = False
        # Whether a marked backward has ended and no step followed.
        self._awaits_step = False
        # Whether the present step cannot take gradients in backward.
        self._is_left = False
        self._trained: dict[int, Trained] = {}
        self._hooks: dict[int, Any] = {}
        self._pending: dict[int, torch.Tensor] = {}
        # Where the engine has the parameters that the step under way, or the last one, updates; by their ids.
        self._updated: dict[int, Home] = {}
        # Gradients that the engine may still read.
        self._held: dict[Home, list[torch.Tensor]] = {}
        self._coefficient: torch.Tensor | None = None
        # Of the step under way.
        self._engine: _core.Optimizer | None = None
        self._numbers: list[list[float]] = []
        self._flat: Flat | None = None
        self._rest: Flat | None = None
        self._looked: _core.Looked | None = None
        self._tables = -1
        self._places = 0
        self._order: tuple[int, list[list[int]]] | None = None
        self._checked: tuple[Flat, int] | None = None
        # Bytes of gradients that were dropped in this step, now and before the last gradient was final.
        self._freed = self._freed_before = 0
        self.taken_in_backward = self.waited_in_step = 0

    # What is around it.

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        found = self._optimizer()
        if found is None:
            raise OptionError("the optimizer of this overlapped step is gone; call overlap_step for the new one")
        return found

    @property
    def engine(self) -> _core.Optimizer:
        """The engine of the step under way."""
        assert self._engine is not None
        return self._engine

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return what messages call a parameter."""
        optimizer = self._optimizer()
        return "a parameter" if optimizer is None else optimizer._name_of(parameter)

    def install(self, slots: int) -> None:
        """Put hooks on parameters and modules, and let the ring have so many slots."""
        optimizer = self.optimizer
        self._slots = optimizer._options.slots
        self._resize(optimizer, slots)
        try:
            self._follow(optimizer)
            if self.chances is not None:
                open_second(optimizer)
        except BaseException:
            self._resize(optimizer, self._slots)
            self.readers.remove()
            take_off(self._hooks)
            raise
        optimizer._overlap = self
        # Whatever is under way must not outlive the gradients that it reads.
        self._finalizer = weakref.finalize(optimizer, self._outlive)
        self._finalizer.atexit = False

    def _outlive(self) -> None:
        """Complete what is under way, and take all hooks off: the optimizer is gone."""
        engine, self._engine = self._engine, None
        if engine is not None and (self.is_open or self.is_begun):
            with suppress(Error):
                if self.is_begun:
                    engine.overlap_abort()
                engine.overlap_wait(None, stream_handle(self.compute))
        self.is_begun = self.is_open = False
        self._let_go(None)
        self._held.clear()
        self.readers.remove()
        take_off(self._hooks)

    def _resize(self, optimizer: Optimizer, slots: int) -> None:
        """Give the ring another number of slots."""
        had_ring = optimizer._engine is not None and not optimizer.is_closed and optimizer._engine.has_ring
        if had_ring:
            optimizer._release_ring()
        optimizer._options = replace(optimizer._options, slots=slots)
        if optimizer._engine is not None and not optimizer.is_closed:
            optimizer._engine.set_slots(slots)
        if had_ring:
            optimizer._restore_ring()

    def _follow(self, optimizer: Optimizer) -> None:
        """Follow changes of groups, parameters and state."""
        flat = optimizer._flatten()
        if flat is not self._flat:
            if self.chances is not None:
                check_masters(optimizer)
            self._flat, self._tables = flat, -1
            self.readers.install(set(map(id, flat.parameters)))
            self._places, self._order = 0, None
        for parameter in flat.parameters:
            if parameter.requires_grad and id(parameter) not in self._hooks:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks[id(parameter)] = register(Hook(weakref.ref(self)))
        if self._tables == len(optimizer._homes):
            return
        self._tables, self._order, self._looked = len(optimizer._homes), None, None
        earlier, here = self._trained, weakref.ref(self)
        self._trained = {}
        for parameter, group in zip(flat.parameters, flat.groups, strict=True):
            known = earlier.get(id(parameter))
            home = optimizer._homes.get(id(parameter))
            if known is None:
                known = Trained(parameter, home, group, ConsumedGradient(parameter, here))
            known.home, known.group, known.weight = home, group, None
            self._trained[id(parameter)] = known

    # The forward.

    def prepare_pass(self) -> None:
        """Before a model is called: create state, so that no hook has to, and follow changes."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        if self.is_open:
            self.readers.follow_compiled()
        if not torch.is_grad_enabled() or self.is_begun or torch._C._current_graph_task_id() != -1:
            return
        self._prepare(optimizer)

    def _prepare(self, optimizer: Optimizer) -> None:
        """Create what state is missing, and follow changes."""
        flat, homes = optimizer._flatten(), optimizer._homes
        if flat is not self._flat or any(one.requires_grad and id(one) not in homes for one in flat.parameters):
            optimizer.prepare()
        self._follow(optimizer)
        if self.chances is not None and (engine := optimizer._engine) is not None and not engine.closed:
            # The optimizer may have started over, with an engine that has one copy.
            engine.open_second()
        self._check_late_reduction(optimizer)

    def begin_pass(self) -> None:
        """Count a new pass: a module is called after a backward."""
        self.in_backward, self.passes = False, self.passes + 1

    def next_place(self) -> int:
        """Return the next number in the order of a forward."""
        self._places += 1
        return self._places

    def check_readable(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise if the step under way has begun to update one of these parameters."""
        for parameter in parameters:
            if isinstance(parameter, Pending):
                raise OptionError(
                    f"{self.name_of(parameter)} is read between the last backward and step(), and its update may have "
                    "begun; call step() first, or read it before the last backward"
                )

    def wait_for(self, reader: Reader) -> None:
        """Make the current stream wait for the updates of a reader's parameters."""
        reader.step, reader.stream = self.steps, stream_handle(self.compute)
        self._wait(reader.parameters, reader.stream)
        self._release()

    def order(self, parameters: Iterable[torch.Tensor], stream: int) -> None:
        """Make another stream wait for the updates of parameters."""
        homes = self._homes(parameters)
        if homes:
            self.engine.overlap_wait(homes, stream)

    def settle(self, parameters: Iterable[torch.Tensor] | None) -> None:
        """Wait for the updates of some parameters or of all, which are ordinary parameters from then on."""
        if self.is_begun:
            self.check_readable(self._pending.values() if parameters is None else parameters)
        elif self.is_open:
            self._wait(parameters, stream_handle(self.compute))

    def _homes(self, parameters: Iterable[torch.Tensor]) -> list[Home]:
        return [self._updated[id(parameter)] for parameter in parameters if id(parameter) in self._updated]

    def _wait(self, parameters: Iterable[torch.Tensor] | None, stream: int) -> None:
        if is_gpu(self.compute) and capturing():
            raise DeviceError(
                "a parameter whose update is still to come is read while a CUDA graph is captured; call "
                "optimizer.synchronize() before the capture"
            )
        homes = None if parameters is None else self._homes(parameters)
        if homes is None or homes:
            self.exposure.wait(self.engine, homes, stream)
        self._let_go(parameters)

    def _let_go(self, parameters: Iterable[torch.Tensor] | None) -> None:
        for parameter in list(self._pending.values()) if parameters is None else parameters:
            if self._pending.pop(id(parameter), None) is not None:
                restore(parameter)

    def _release(self) -> None:
        """Drop the gradients whose updates have ended."""
        if not self._held:
            return
        for home in self.engine.overlap_updated():
            gradient = self._held.pop(home, None)
            if gradient is not None:
                self._freed += _bytes(gradient)

    # The backward.

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Mark the last backward before a step; see ``Optimizer.last_backward``."""
        optimizer = self.optimizer
        if self._is_marked:
            raise OptionError("last_backward cannot be nested; put one around the last backward of a step")
        if self.is_begun or (self._awaits_step and any(one.parameter.grad is not None for one in self._all())):
            raise OptionError(
                "the last backward of a step was run already, and step() was not called; call step(), or zero_grad() "
                "to give these gradients up"
            )
        self._prepare(optimizer)
        lands = optimizer._options.updates_on_host
        self._is_marked, self._is_left = True, lands
        try:
            if lands:
                with last_backward(optimizer):
                    yield
            else:
                yield
        except BaseException:
            self._give_up()
            raise
        finally:
            self._is_marked = False
        self._awaits_step = True

    def _all(self) -> Iterable[Trained]:
        return self._trained.values()

    def _check_late_reduction(self, optimizer: Optimizer) -> None:
        flat, reducers = optimizer._flatten(), late_reducers()
        if self._checked is None or self._checked[0] is not flat or self._checked[1] != reducers:
            refuse_late_reduction(flat.parameters)
            self._checked = (flat, reducers)

    def final(self, parameter: torch.Tensor) -> None:
        """Take a gradient if this is the last backward before a step. Autograd calls this, also in its own threads."""
        one = self._trained.get(id(parameter))
        gradient = parameter.grad
        if one is None or gradient is None:
            return
        self.in_backward = True
        if one.taken is not None:
            raise OptionError(
                f"a backward has made another gradient of {self.name_of(parameter)}, and the one before was taken by a "
                "step that was not called; call step() after the last backward"
            )
        if self.readers.calls(parameter) > 1 and (self.readers.is_sharded(parameter) or is_nested()):
            # Its hook runs once for each call of its module, so this may not be the last time in this backward.
            return
        if not self._is_last(one, gradient) or self._is_left:
            return
        if not self.is_begun and not self._begin():
            self._is_left = True
            return
        self._take(one, gradient)

    def _is_last(self, one: Trained, gradient: torch.Tensor) -> bool:
        if self.every is None or self._is_marked:
            return self._is_marked
        backwards = one.count(gradient) if self.every > 1 else 1
        if backwards > self.every:
            raise OptionError(
                f"{backwards} backwards without a step, and accumulation_steps is {self.every}; call step() after each "
                f"{self.every}"
            )
        return backwards == self.every

    def _begin(self) -> bool:
        """Open a step in the engine; returns whether gradients can be taken. Creates and pins nothing."""
        optimizer = self._optimizer()
        if optimizer is None or optimizer._engine is None or optimizer.is_closed or optimizer._is_inherited():
            return False
        options, engine = optimizer._options, optimizer._engine
        guesses = options.max_grad_norm is not None
        if options.updates_on_host or engine.distrusted is not None or (guesses and not self._may_guess(optimizer)):
            return False
        check_not_captured(self.compute, f"a backward with {optimizer._label} under overlap_step")
        if self._pending or self._held:
            self._end()
        if is_live(optimizer) or not self._is_prepared(optimizer):
            return False
        if options.streams and not engine.has_ring:
            return False
        self._numbers = [optimizer.numbers(group) for group in optimizer.param_groups]
        self._open(optimizer, engine, guesses)
        return True

    def _may_guess(self, optimizer: Optimizer) -> bool:
        # In the first step masters are not made yet, so that nothing could be brought back.
        has_second = optimizer._engine is not None and optimizer._engine.has_second
        return self.chances is not None and has_second and optimizer._has_stepped and self.chances.allow()

    def _is_prepared(self, optimizer: Optimizer) -> bool:
        """Whether every parameter has state, and the engine can work on it as it is."""
        flat, state = optimizer._flatten(), optimizer.state
        try:
            columns = [optimizer._rule.keeps(optimizer.numbers(group)) for group in optimizer.param_groups]
        except Error:
            return False
        if flat is not self._flat or flat.created != columns or state.edited:
            return False
        if len(optimizer._homes) != self._tables:
            return False
        inner = locals_of(flat.parameters)
        try:
            looked = look(inner)
        except (KeyError, RuntimeError, OptionError):
            return False
        known = self._looked
        if any(one.requires_grad and id(one) not in optimizer._homes for one in flat.parameters):
            return False
        same = known is not None and known.contiguous and looked.contiguous and known.same_memory(looked)
        if same and known is not None and known.dtypes == looked.dtypes:
            return True
        if looked.overlap(None) is not None:
            return False
        self._looked = looked
        for parameter, tensor in zip(flat.parameters, inner, strict=True):
            one = self._trained[id(parameter)]
            one.weight = None
            if one.home is None:
                continue
            table, index = optimizer._tables[one.home[0]], one.home[1]
            one.strides = table.strides[index]
            fits = (
                tensor.get_device() == table.devices[index]
                and tensor.shape == table.shapes[index]
                and tensor.dtype == table.dtypes[index]
                and (tensor.stride() == one.strides or tensor.numel() <= 1)
                and tensor.device == self.compute
            )
            if fits:
                one.weight = look([tensor])
        return True

    def _order_of(self, optimizer: Optimizer) -> list[list[int]]:
        """Return for each table when the next forward needs its parameters."""
        if self._order is not None and self._order[0] == self._places:
            return self._order[1]
        flat = optimizer._flatten()
        last = self._places + 1
        places = [self.readers.place(parameter) or last for parameter in flat.parameters]
        ranks = sorted(range(len(places)), key=lambda i: (places[i], i))
        order = [[len(places)] * len(table.parameters) for table in optimizer._tables]
        for rank, i in enumerate(ranks):
            home = optimizer._homes.get(id(flat.parameters[i]))
            if home is not None:
                order[home[0]][home[1]] = rank
        self._order = (self._places, order)
        return order

    def _take(self, one: Trained, gradient: torch.Tensor) -> None:
        """Give a gradient to the engine, and hold it until its update was submitted."""
        looked = one.fitting(gradient)
        if looked is None or one.weight is None or one.home is None:
            return
        if self.is_guessing and not can_guess(self.optimizer, one):
            return
        engine, stream, parameter = self.engine, stream_handle(self.compute), one.parameter
        # What is freed now is freed before the last gradient is final, unless this is the last.
        self._freed_before = self._freed
        self._release()
        table, index = one.home
        columns = self._columns(one)
        engine.overlap_offer(table, index, one.weight, looked, one.group, stream, columns)
        one.taken, self._held[one.home] = gradient, [gradient]
        parameter.grad = one.consumed
        self._make_pending([parameter])

    def _columns(self, one: Trained) -> list[int]:
        optimizer = self.optimizer
        if one.home is None or not optimizer._tables[one.home[0]].is_resident:
            return []
        room = optimizer.state.rooms[id(one.parameter)]
        return optimizer.state.addresses(room)

    def _make_pending(self, parameters: list[torch.Tensor]) -> None:
        # A saved weight that is used later must raise torch's error instead of having new values.
        bump_versions(parameters)
        inner = locals_of(parameters)
        if inner is not parameters:
            bump_versions(inner)
        for parameter in parameters:
            home = self._trained[id(parameter)].home
            assert home is not None
            self._pending[id(parameter)], self._updated[id(parameter)] = parameter, home
        mark(parameters, weakref.ref(self))

    def _give_up(self) -> None:
        """Forget a step whose backward has failed. If updates have begun, the state is torn, and the engine says so.

        Nothing is torn by a step that guesses: the engine brings its weights back.
        """
        self._is_left = False
        if not self.is_begun:
            return
        taken = [one for one in self._all() if one.taken is not None]
        if self.is_guessing and self.chances is not None:
            self.chances.fail()
        self.is_begun = self.is_guessing = False
        try:
            self.engine.overlap_abort()
        except Error:
            # The next step, save or load says what happened.
            self._abandon()
            return
        for one in taken:
            if one.parameter.grad is one.consumed:
                one.parameter.grad = one.taken
        self._abandon()

    def give_back(self) -> bool:
        """Give gradients back if this step has only guessed; return whether steps of this kind can."""
        if self.chances is None:
            return False
        self.discard()
        return True

    def discard(self) -> None:
        """Give a guess up: weights and gradients are as they were after the backward."""
        if self.is_guessing:
            self._give_up()

    def _abandon(self) -> None:
        """Hold no gradient and no parameter of a step any more."""
        if self._engine is not None:
            with suppress(Error):
                self._engine.overlap_wait(None, stream_handle(self.compute))
        self._let_go(None)
        self._held.clear()
        for one in self._all():
            one.taken, one.backwards = None, 0

    # The step.

    def step(self) -> None:
        """Hand over what backward has not taken, and return."""
        start = time.perf_counter()
        optimizer = self.optimizer
        engine, compute = optimizer._open()
        taken = [one for one in self._all() if one.taken is not None]
        if self.is_guessing and not self._holds(optimizer, taken):
            self.discard()
            optimizer.check_trusted("stepped")
            taken = []
        if self.is_begun and not self.is_guessing:
            self._check_unchanged(optimizer, taken)
        elif not self.is_begun:
            self._end()
        flat = optimizer._flatten()
        if not unscale(optimizer):
            optimizer._landed.forget(engine)
            return
        found = optimizer._collect(compute, self._rest_of(flat, taken) if taken else flat)
        if not found.parameters and not taken:
            raise OptionError(
                "step() without a gradient: under overlap_step every step needs a backward before it; call backward, "
                "or remove() of the handle"
            )
        gradients = _in_order(flat, found, taken) if self.is_guessing else found.gradients
        clip = optimizer._clip(gradients, compute) if gradients else Clip()
        limit = optimizer._options.max_grad_norm
        if self.chances is not None and limit is not None and optimizer._grad_norm is not None:
            self.chances.note(optimizer._grad_norm, limit)
        if clip.skips:
            self.discard()
            optimizer._landed.forget(engine)
            return
        if not self.is_begun:
            create(optimizer, flat, found.parameters)
            engine, compute = optimizer._open()
            self._follow(optimizer)
            optimizer._landed.check(engine)
        self._commit(optimizer, engine, found, taken, clip.coefficient)
        optimizer._step_s = time.perf_counter() - start

    def _holds(self, optimizer: Optimizer, taken: list[Trained]) -> bool:
        """Whether gradients and numbers are those that a guess has used."""
        asked = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        return (
            optimizer._options.max_grad_norm is not None
            and asked == (None, None)
            and all(one.parameter.grad is one.consumed for one in taken)
            and [optimizer.numbers(group) for group in optimizer.param_groups] == self._numbers
        )

    def _check_unchanged(self, optimizer: Optimizer, taken: list[Trained]) -> None:
        """Raise if gradients or numbers were changed after gradients were taken: their updates may have run."""
        if optimizer._options.max_grad_norm is not None or getattr(optimizer, "grad_scale", None) is not None:
            raise OptionError(
                "gradients were taken in backward without clipping or scaling, so this step can do neither; set "
                "max_grad_norm before the backward, and use no GradScaler without it"
            )
        for one in taken:
            if one.parameter.grad is not one.consumed:
                name = self.name_of(one.parameter)
                # Nothing that a caller could do now leads to what a plain step gives.
                self._give_up()
                raise OptionError(
                    f"the gradient of {name} was replaced or dropped between the last backward and step(), and it was "
                    "used already; call zero_grad() after step(), and change gradients before the last backward"
                )
        numbers = [optimizer.numbers(group) for group in optimizer.param_groups]
        if numbers != self._numbers:
            count = max(len(numbers), len(self._numbers))
            changed = next(i for i in range(count) if numbers[i : i + 1] != self._numbers[i : i + 1])
            raise OptionError(
                f"numbers of group {changed} were changed between the last backward and step(), and gradients were "
                "used with the earlier ones; change lr and the like after step() or before the last backward"
            )

    def _rest_of(self, flat: Flat, taken: list[Trained]) -> Flat:
        """Return the parameters whose gradients were not taken."""
        without = {id(one.parameter) for one in taken}
        lists = [[one for one in parameters if id(one) not in without] for parameters in flat.lists]
        if self._rest is None or not self._rest.is_still(lists):
            self._rest = Flat(lists)
        return self._rest

    def _commit(
        self,
        optimizer: Optimizer,
        engine: _core.Optimizer,
        found: Found,
        taken: list[Trained],
        coefficient: torch.Tensor | None,
    ) -> None:
        if found.parameters:
            tensors, numbers, resident = optimizer._inputs(engine, self.compute, found)
        else:
            tensors, numbers, resident = self._nothing(optimizer), self._numbers, None
        if not self.is_begun:
            self._numbers = numbers
            self._open(optimizer, engine)
        stream, scale = stream_handle(self.compute), 0 if coefficient is None else address(coefficient)
        try:
            engine.overlap_commit(tensors, stream, scale, resident)
        except BaseException:
            if not taken or self.is_guessing:
                self._give_up()
            raise
        self.is_guessing = False
        self.is_begun, self.is_open, self.steps = False, True, self.steps + 1
        # The engine reads all of these until the updates were submitted.
        self._coefficient = coefficient
        gradients = zip(found.parameters, found.gradients, found.inner_gradients, strict=True)
        for parameter, *gradient in gradients:
            one = self._trained[id(parameter)]
            assert one.home is not None
            self._held[one.home] = gradient
            parameter.grad = one.consumed
        optimizer._landed.gradients.clear()
        optimizer._has_stepped = True
        updated = [*found.parameters, *(one.parameter for one in taken)]
        optimizer.state.updated(updated)
        self._make_pending(found.parameters)
        if found.copies:
            self._wait(None, stream)
            for original, copy in found.copies:
                original.copy_(copy)
        # See [Note: parameters that step() waits for] in reads.py.
        if unseen := [parameter for parameter in updated if not self.readers.waits_for(parameter)]:
            self._wait(unseen, stream)
        self.waited_in_step = len(unseen)
        self.taken_in_backward = len(taken)
        self._forget()
        self.readers.begin_step()

    def _nothing(self, optimizer: Optimizer) -> list[Tensors]:
        """Return what the engine is given for tables of which nothing is left."""
        found: list[Tensors] = []
        for table in optimizer._tables:
            count = len(table.parameters)
            looked = _core.Looked([0] * count, [0] * count, [-1] * count, [0] * count, True)
            found.append((looked, looked, [0] * count))
        return found

    def _open(self, optimizer: Optimizer, engine: _core.Optimizer, guesses: bool = False) -> None:
        """Open a step in the engine."""
        self._engine = engine
        self._updated.clear()
        engine.overlap_begin(self._order_of(optimizer), self._numbers, guesses)
        self.is_begun, self.is_open, self.is_guessing = True, False, guesses
        self._freed = self._freed_before = 0
        self.exposure.begin()

    def _forget(self) -> None:
        """Forget the backwards so far."""
        self._awaits_step = self._is_left = False
        for one in self._all():
            one.taken, one.backwards = None, 0

    def _end(self) -> None:
        """Wait for what the last step has not updated yet, and drop its gradients."""
        if self.is_open:
            # From here on the stream runs behind the updates, so torch may give it the memory of their gradients.
            self._wait(None, stream_handle(self.compute))
            self.is_open = False
        self._held.clear()

    # What others ask for.

    def before_zero_grad(self, set_to_none: bool) -> None:
        """Prepare for ``zero_grad`` of the optimizer."""
        self.discard()
        if self.is_begun:
            raise OptionError(
                "zero_grad() between the last backward and step(): gradients were used already; call step() first, or "
                "decide before the last backward whether to take the step"
            )
        self._forget()
        for one in () if set_to_none else self._all():
            if is_consumed(one.parameter.grad):
                put_zeros(one.parameter)

    def check_between(self, what: str) -> None:
        """Raise if gradients were taken and ``step`` was not called yet."""
        if self.is_begun:
            raise OptionError(f"{what} between the last backward and step(); call step() first")

    def finish(self) -> None:
        """Wait for the step under way, and drop its gradients."""
        self.check_between("the optimizer is used")
        self._end()

    def close(self) -> None:
        """Give everything up: the optimizer is closed."""
        if self.is_begun:
            self._give_up()
        with suppress(Error):
            self._end()
        self._abandon()
        self.is_open = False

    def remove(self) -> None:
        """Wait for the step under way, and take all hooks off."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._overlap is self:
            self.check_between("remove()")
            self._end()
            self._finalizer.detach()
            _trace.leaves(optimizer)
            optimizer._overlap = None
            if self.chances is not None and not optimizer.is_closed and not optimizer._is_inherited():
                close_second(optimizer)
            self._resize(optimizer, self._slots)
        self.readers.remove()
        take_off(self._hooks)

    def stats(self) -> dict[str, float | int]:
        """Return the numbers of the last step; see ``OverlappedStep.stats``."""
        engine = self._engine
        optimizer = self._optimizer()
        found: dict[str, float | int] = {
            "steps": self.steps,
            **self.exposure.stats(),
            "freed_bytes": self._freed_before,
            "held_bytes": sum(_bytes(gradient) for gradient in self._held.values()),
            "taken_in_backward": self.taken_in_backward,
            "waited_in_step": self.waited_in_step,
            "speculated": 0,
            "accepted": 0,
            "pinned_bytes": 0,
            "device_bytes": 0,
        }
        if engine is not None and optimizer is not None and not optimizer.is_closed and not optimizer._is_inherited():
            others = engine.overlap_stats()
            found = {**found, **others, "freed_bytes": self._freed_before}
            rooms = optimizer.state.rooms.values()
            resident = sum(room.bytes for room in rooms if room.is_resident)
            found["resident_bytes"] = resident
            found["device_bytes"] = found["ring_bytes"] + resident
            found["pinned_bytes"] = engine.pinned_bytes()
        return found

    def plan(self) -> list[dict[str, Any]]:
        """Return the parts of the last step, with the names of their parameters."""
        optimizer, engine = self._optimizer(), self._engine
        if optimizer is None or engine is None:
            return []
        rows: list[dict[str, Any]] = engine.overlap_plan()
        names = {home: self.name_of(one.parameter) for one in self._all() if (home := one.home) is not None}
        return [
            {**row, "tensors": [names.get((row["table"], tensor), "?") for tensor in row["tensors"]]} for row in rows
        ]


def _in_order(flat: Flat, found: Found, taken: list[Trained]) -> list[torch.Tensor]:
    """Return all gradients of a step in the order of the parameters: a norm depends on it."""
    known = dict(zip(map(id, found.parameters), found.gradients, strict=True))
    known.update((id(one.parameter), one.taken) for one in taken if one.taken is not None)
    return [known[id(parameter)] for parameter in flat.parameters if id(parameter) in known]


def _bytes(gradient: list[torch.Tensor]) -> int:
    return local(gradient[0]).nbytes
