"""The base class of all optimizers: torch's contract over the engine, for every update rule.

A subclass names a rule of the engine and says how a group's settings become the rule's numbers. Everything else depends
on the rule's columns only. This file names no optimizer.
"""

from __future__ import annotations

import inspect
import os
import time
import warnings
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._compile import _disable_dynamo

from forebay import _core, _trace
from forebay._checks import positive
from forebay._device import CPU, check_not_captured, device_of, engine_name, is_gpu, stream_handle
from forebay._live import wait_for_live, waited_s
from forebay._registry import register
from forebay._tensors import (
    address,
    bump_versions,
    check_gradient,
    check_parameter,
    follow_weight,
    local,
    total_norm,
)
from forebay.errors import CheckpointError, DeviceError, OptionError
from forebay.optim.amp import unscale
from forebay.optim.backward import Landed, last_backward
from forebay.optim.clip import Clip
from forebay.optim.create import create
from forebay.optim.gather import Flat, Found, Table
from forebay.optim.load import load
from forebay.optim.options import NO_NORM, Keywords, Options, check_options
from forebay.optim.packed import BLOCKS
from forebay.optim.signature import describe
from forebay.optim.state import MASTER, STEP, ParameterState, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from forebay.optim.gather import Tensors
    from forebay.optim.overlap.step import Overlap
    from forebay.optim.state import Room


class Optimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` that can keep its state in host memory and update it on the GPU, the host or both.

    State lives in pinned host memory, flat and of exact size. During ``step`` it streams through a ring of ``slots``
    buffers of ``chunk_bytes`` on the GPU, at the speed of the link. ``step`` returns when the last update has been
    launched. At most ``slots`` stores are then still running. Reading the state through this object waits for the
    stores that it needs.

    Parameters
    ----------
    params
        As in ``torch.optim``.
    settings
        The settings of the subclass, which become the defaults of the groups.
    options
        The options below, by name.

    Other Parameters
    ----------------
    placement
        Where state is and what updates it; all placements give the same bits. ``"stream"`` keeps state on the host and
        updates it on the GPU. ``"resident"`` keeps state on the parameters' device. ``"host"`` keeps and updates state
        on the host: gradients are copied to the host and weights back. ``"hybrid"`` keeps state on the host; GPU and
        host share the update and work at the same time.
    chunk_bytes
        Bytes of one slot, for all columns of state together.
    slots
        Slots in the ring; ``slots * chunk_bytes`` is the GPU memory that a step needs. All optimizers of a process that
        have the same ``slots`` and ``chunk_bytes`` on a GPU share one ring.
    master_weights
        Keep an f32 master of each bf16 and f16 parameter, as ``state[p]["master_param"]``. By default on. ``"compact"``
        keeps the masters of bf16 parameters in 17 bits beside the parameter, with the same bits in every step:
        ``state[p]["master_param"]`` is then an f32 copy, and takes values that round to the parameter.
    state_dtype
        How the columns of state are kept: ``torch.float32``; ``torch.bfloat16``; or ``"8bit"``, codes of 8 bits with an
        f32 scale for each 256 elements. Or a dict by column, such as ``{"exp_avg": torch.bfloat16}``: columns that it
        does not name are f32, and ``max_exp_avg_sq`` is as ``exp_avg_sq`` is. The arithmetic is f32.
        ``state[p]["exp_avg"]`` is then an f32 copy, and assigned values are rounded to nearest. A parameter with fewer
        than 256 elements on this rank keeps f32 instead of ``"8bit"``; ``stats()`` names these.
    stochastic_rounding
        Round state in fewer bits at random, in proportion to what is cut off, so that the error is zero on average. The
        random numbers depend on ``rounding_seed``, the parameter's place in the groups, its count of updates, the
        column and the element: the bits are the same in every placement, and after a restart.
    rounding_seed
        The seed, from 0 to 2**63 - 1.
    max_grad_norm
        Clip the gradients' global norm inside the step. The coefficient is computed and used on the device. The
        gradients themselves are not changed.
    skip_nonfinite
        Skip a step whose norm is not finite. This costs one wait for the device in each step.
    pinned_budget_bytes
        The most host memory to pin; a larger need raises an error. It covers state and the gradients of
        ``last_backward``. If the host updates parameters of a GPU, it also covers a ring of
        ``2 * slots * chunk_bytes`` for their gradients and weights. Optimizers that share this ring each count all of
        it: the ring stays while any of them uses it.
    resident_bytes
        Keep as much state on the GPU, for whole parameters in the order of the groups. With ``overlap_step`` this is
        state whose update nothing hides: what the forward needs first has its gradient last.
    resident_fraction
        The same as a share of all state.
    grad_source
        The attribute of a parameter that has its gradient: ``"grad"``, or ``"decoupled_grad"`` or ``"main_grad"``, as
        Megatron-LM has them. ``zero_grad`` clears ``grad`` only.
    device
        Where to compute when parameters are on the CPU; by default on the CPU.
    host_fraction
        The part of the state, by bytes, that the host updates in placement ``"hybrid"``. ``"auto"``, the default,
        measures the fastest share in the first steps. It measures again when a step updates more than twice as many
        bytes.
    host_threads
        Number of threads that update on the host; by default one for each core of this process.
    host_kernel
        ``"portable"``, ``"avx2"`` or ``"avx512"``; by default the best that this CPU has.
    backend
        ``"torch"`` drives a GPU through torch's own streams, and updates have the bits of torch's kernels. On CUDA the
        default is the engine's own way; other accelerators have this one only. Where the device lacks streams or
        page-locked memory, a warning says so and all copies are waited for; ``"torch_async"`` raises an error instead.
    """

    rule: ClassVar[str]
    """The name of the engine's update rule."""
    reference: ClassVar[type[torch.optim.Optimizer] | None] = None
    """Torch's class that checks the settings and names the keys of a group."""
    settings: ClassVar[tuple[str, ...]]
    """The keys of a group that the subclass's constructor takes."""
    switches: ClassVar[dict[str, str]] = {}
    """For columns that not every group has: the setting that decides."""
    follows: ClassVar[dict[str, str]] = {}
    """For columns that are like another one: the column whose format they have, unless one is given for them."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """The keys of a group whose value the class decides: another value is refused, and a loaded one ignored."""
    alive: ClassVar[weakref.WeakSet[Optimizer]] = weakref.WeakSet()
    """Every optimizer of this process."""
    offloads_itself: ClassVar[bool] = True
    """True: frameworks need not move the state between host and GPU. An assigned tensor is copied into the state, so a
    move to the GPU and back would cross the wire twice and change nothing."""

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        describe(cls, Optimizer)

    def __init__(self, params: Iterable[Any], settings: dict[str, Any], options: Keywords) -> None:
        checked = check_options(type(self), options)
        defaults = self.check_settings(settings)
        self._set_up(checked, defaults)
        # The base class, not torch's optimizer of the same name: ``check_settings`` has done what that one does.
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._choose_device()

    def __del__(self) -> None:
        # A trace says what became of it.
        with suppress(Exception):
            _trace.leaves(self)

    def numbers(self, group: dict[str, Any]) -> list[float]:
        """Return a group's numbers, in the order of the rule's ``hypers``: the settings of the same names.

        ``beta1`` and ``beta2`` are those of the setting ``betas``.
        """
        named = {**group, **{f"beta{i}": beta for i, beta in enumerate(group.get("betas", ()), 1)}}
        return [rate(group) if name == "lr" else float(named[name] or 0) for name in self._rule.hypers]

    @classmethod
    def check_settings(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Raise if a setting is invalid; return the defaults of a group, with all keys of this version of torch."""
        assert cls.reference is not None
        reference: Any = cls.reference
        # Older versions of torch lack some arguments; a value that asks for nothing may be left out.
        takes = inspect.signature(reference).parameters
        settings = {name: value for name, value in settings.items() if name in takes or value}
        for name in settings:
            if name not in takes:
                raise OptionError(f"torch {torch.__version__} does not have {name}; leave it out, or update torch")
        try:
            return dict(reference([torch.zeros(1)], **settings).defaults)
        except ValueError as error:
            raise OptionError(str(error)) from error

    @classmethod
    def rule_for(cls, defaults: dict[str, Any]) -> str:
        """Return the name of the engine's rule for groups with these defaults."""
        return cls.rule

    def _set_up(self, options: Options, defaults: dict[str, Any]) -> None:
        others = set(vars(self))
        Optimizer.alive.add(self)
        self._options = options
        self._rule = _core.Rule(self.rule_for(defaults))
        # The format of each column of the rule; small parameters keep f32 instead of blocks.
        self._formats = options.formats_of(self._rule.columns, self.follows)
        # GradScaler then leaves unscaling and skipping to the step.
        self._step_supports_amp_scaling = bool(defaults.get("fused"))
        self._state = State(self)
        # Opened at its first use, never in the constructor. The engine knows whether it is closed, has a ring, and can
        # be trusted.
        self._engine: _core.Optimizer | None = None
        # The process that opened the engine.
        self._process = 0
        self._compute = CPU
        # Where the engine has the state of a parameter, by its id: the table's number, and the place there.
        self._homes: dict[int, tuple[int, int]] = {}
        self._tables: list[Table] = []
        # The parameters of the last step, no two of which share memory.
        self._apart: _core.Looked | None = None
        self._flat: Flat | None = None
        self._landed = Landed()
        # What ``overlap_step`` has put around backward and step.
        self._overlap: Overlap | None = None
        self._grad_norm: torch.Tensor | None = None
        self._has_stepped = False
        self._step_s = 0.0
        # Torch's class that ``offload`` has replaced; None for an optimizer that was made by forebay's class.
        self._restores: type[torch.optim.Optimizer] | None = None
        # What torch's optimizers do not have.
        self._own_attributes = {*vars(self), "_own_attributes"} - others
        # Other threads read what was set above from here on.
        register("optimizer", self)

    # The methods of torch's optimizers.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their state is created with the next step, load or ``prepare``."""
        torch.optim.Optimizer.add_param_group(self, param_group)
        index = len(self.param_groups) - 1
        group = self.param_groups[index]
        try:
            for position, parameter in enumerate(group["params"]):
                check_parameter(parameter, self._name(index, position), self._label)
            self._check_new_group(group)
            # Groups of an older torch lack some settings.
            self.check_settings({name: group[name] for name in self.settings if name in group})
        except OptionError:
            self.param_groups.pop()
            raise

    def _check_new_group(self, group: dict[str, Any]) -> None:
        self._refuse(group, "capturable")
        self._check_group(group)

    def _refuse(self, group: dict[str, Any], option: str) -> None:
        if group.get(option):
            raise OptionError(
                f"{option}=True is not supported: the step runs on the engine's own streams; leave {option} out"
            )

    def _check_group(self, group: dict[str, Any]) -> None:
        self._refuse(group, "differentiable")
        for name in self.fixed:
            if group.get(name, self.defaults.get(name)) != self.defaults.get(name):
                raise OptionError(f"{name}={group[name]} is not supported by {self._label}; leave {name} out")
        rate(group)

    @property
    def _label(self) -> str:
        """What error messages call this optimizer."""
        return f"forebay.{type(self).__name__}"

    @property
    def state_names(self) -> list[str]:
        """The names that a parameter's state may have."""
        return [*([STEP] if self._rule.shows_step else []), *self._rule.columns, MASTER]

    def _name(self, group: int, position: int) -> str:
        names = self.param_groups[group].get("param_names")
        return names[position] if names else f"parameter {position} of group {group}"

    def _name_of(self, parameter: torch.Tensor) -> str:
        for index, group in enumerate(self.param_groups):
            for position, one in enumerate(group["params"]):
                if one is parameter:
                    return self._name(index, position)
        return f"a parameter of shape {tuple(parameter.shape)}"

    def __getstate__(self) -> dict[str, Any]:
        return {
            "defaults": self.defaults,
            "state": self.state,
            "param_groups": self.param_groups,
            "_options": self._options,
            "_restores": self._restores,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "_options" in state:
            self._set_up(state.pop("_options"), state["defaults"])
        loaded = state.pop("state", None)
        torch.optim.Optimizer.__setstate__(self, state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        if loaded is not None:
            self.state = loaded

    @property  # type: ignore[override]
    def state(self) -> State:
        """The state of each parameter. Reading waits for pending stores. The next step uses assigned values."""
        return self._state

    @state.setter
    def state(self, values: Any) -> None:
        if values is not self._state:
            self._state.replace(values)

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups as in torch. The tensors are the live ones, the dicts around them are copies."""
        packed = super().state_dict()
        state = packed.get("state", {})
        return {
            **packed,
            "state": {key: dict(of) if isinstance(of, ParameterState) else of for key, of in state.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state in the format of torch's optimizer of this kind, in place and without using the GPU.

        Everything is checked before anything is changed. State that the dict does not have is reset.
        """
        load(self, state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Parameters
        ----------
        closure
            A function that computes the loss again; its value is returned.
        """
        if not isinstance(self, Optimizer):
            # A wrapper kept this method, and ``restore`` has made the object torch's again since.
            return type(self).step.__wrapped__(self, closure)
        loss = None
        if closure is not None:
            if self._overlap is not None:
                raise OptionError("step(closure) is not supported under overlap_step; call step() after a backward")
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    def _init_group(self, group: dict[str, Any], *_: Any) -> bool:
        """Take the step when torch's own ``step`` runs on this object; torch is given no tensors to update.

        Torch's ``step`` calls this for each group. It runs here if a scheduler or a framework kept it from before
        ``offload``. Hooks and closures have run by then.
        """
        if group is self.param_groups[0]:
            if torch._guards.TracingContext.try_get() is not None:
                # torch.compile calls this once, while it traces torch's step, and would reuse what it got. With this
                # exception it leaves the call out of the graph, and calls it in every step.
                from torch._dynamo.exc import Unsupported

                raise Unsupported("forebay takes its step outside of compiled graphs")
            self._take_step()
        return False

    @_disable_dynamo
    def _take_step(self) -> None:
        start = time.perf_counter()
        self.check_trusted("stepped")
        if self._overlap is not None:
            self._overlap.step()
            return
        engine, compute = self._open()
        if not unscale(self):
            self._landed.forget(engine)
            return
        found = self._collect(compute, self._flatten())
        clip = self._clip(found.gradients, compute) if found.parameters else Clip(skips=True)
        if clip.skips:
            self._landed.forget(engine)
            return
        create(self, found.flat, found.parameters)
        engine, compute = self._open()
        self._landed.check(engine)
        try:
            self._update(engine, compute, found, clip)
        finally:
            self._landed.forget(engine)
        self._has_stepped = True
        self.state.updated(found.parameters)
        bump_versions(found.parameters)
        if found.inner is not found.parameters:
            bump_versions(found.inner)
        for original, copy in found.copies:
            original.copy_(copy)
        self._step_s = time.perf_counter() - start

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do the same as torch. Also drop gradients that ``last_backward`` copied."""
        if self._overlap is not None:
            self._overlap.before_zero_grad(set_to_none)
        super().zero_grad(set_to_none)
        if self._engine is not None and not self._is_inherited():
            self._landed.forget(self._engine)

    # The parts of a step.

    def _collect(self, compute: torch.device, flat: Flat) -> Found:
        """Return the parameters that have a gradient, checked before anything is changed."""
        for group in self.param_groups:
            if group.get("capturable"):
                # Set by torch.compile, where it traced code that reads the groups before the first step, for parameters
                # on a GPU. The step is no part of what is compiled.
                group["capturable"] = False
            self._check_group(group)
        found = Found(flat, self._options.grad_source)
        if not found.read(compute.index if is_gpu(compute) else -1):
            self._explain(found, compute)
        return found

    def _flatten(self) -> Flat:
        lists = [group["params"] for group in self.param_groups]
        if self._flat is None or not self._flat.is_still(lists):
            self._flat = Flat([list(parameters) for parameters in lists])
        return self._flat

    def _explain(self, found: Found, compute: torch.device) -> None:
        """Raise an error that names the parameter or gradient that the engine cannot use."""
        rows = zip(found.inner, found.inner_gradients, found.groups, found.positions, strict=True)
        for parameter, gradient, group, position in rows:
            name = self._name(group, position)
            check_parameter(parameter, name, self._label)
            check_gradient(parameter, gradient, name, self._label)
            if parameter.device != compute and is_gpu(parameter.device):
                raise OptionError(
                    f"{name} is on {parameter.device}, this optimizer computes on {compute}; make the optimizer "
                    "after moving the model, or use one optimizer for each device"
                )
        raise OptionError(
            "parameters and gradients differ in device, type or size; give gradients that are like their parameters"
        )

    def _clip(self, gradients: list[torch.Tensor], compute: torch.device) -> Clip:
        limit = self._options.max_grad_norm
        if limit is None:
            return Clip()
        self._grad_norm = norm = total_norm(gradients)
        if self._options.skip_nonfinite and not bool(torch.isfinite(norm)):
            return Clip(skips=True)
        # As torch.nn.utils.clip_grad_norm_ computes it.
        return Clip(torch.clamp(limit / (norm + 1e-6), max=1.0).to(device=compute, dtype=torch.float32))

    def _update(self, engine: _core.Optimizer, compute: torch.device, found: Found, clip: Clip) -> None:
        """Let the engine update the parameters, after the checks that need its state."""
        tensors, numbers, resident = self._inputs(engine, compute, found)
        scale = 0 if clip.coefficient is None else address(clip.coefficient)
        engine.step(tensors, numbers, stream_handle(compute), scale, resident)

    def _inputs(
        self, engine: _core.Optimizer, compute: torch.device, found: Found
    ) -> tuple[list[Tensors], list[list[float]], list[list[list[int]]] | None]:
        """Return what a step gives the engine: tensors, the groups' numbers, and the addresses of resident state."""
        assert found.properties is not None
        self._open_ring(engine, compute)
        table = found.flat.table if found.whole else None
        # If all parameters are those of one table, parameters that fitted in the last step are not checked again.
        homes = [self._homes[id(parameter)] for parameter in found.parameters] if table is None else None
        if table is None or found.properties.fits is not table:
            self._check_unchanged(found, *self._created_as(table, homes))
            self._warn_of_casts(found)
            found.properties.fits = table
        if not (found.contiguous and all(table.contiguous for table in self._tables)):
            found.put_in_order(self._strides(table, homes))
        tensors = found.tensors_of(self._tables, homes)
        self._check_apart(found)
        numbers = [self.numbers(group) for group in self.param_groups]
        has_resident = any(table.is_resident for table in self._tables)
        return tensors, numbers, self._addresses(found) if has_resident else None

    def _created_as(
        self, table: Table | None, homes: list[tuple[int, int]] | None
    ) -> tuple[list[int], list[torch.Size]]:
        """Return the devices and shapes that state was created for."""
        if table is not None:
            return table.devices, table.shapes
        places = [(self._tables[number], index) for number, index in homes or ()]
        return [table.devices[index] for table, index in places], [table.shapes[index] for table, index in places]

    def _strides(self, table: Table | None, homes: list[tuple[int, int]] | None) -> list[tuple[int, ...]]:
        if table is not None:
            return table.strides
        return [self._tables[number].strides[index] for number, index in homes or ()]

    def _check_unchanged(self, found: Found, devices: list[int], shapes: list[torch.Size]) -> None:
        """Raise if a parameter has another device or shape than its state was created for."""
        assert found.properties is not None
        if found.properties.looked.devices == devices and found.properties.shapes == shapes:
            return
        rows = zip(found.inner, devices, shapes, found.groups, found.positions, strict=True)
        for parameter, number, shape, group, position in rows:
            name = self._name(group, position)
            if parameter.get_device() != number:
                raise OptionError(
                    f"{name} is on {parameter.device}, its state was created for {device_of(number)}; make the "
                    "optimizer after moving the model"
                )
            if parameter.shape != shape:
                raise OptionError(
                    f"{name} has shape {tuple(parameter.shape)}, its state {tuple(shape)}; make a new optimizer after "
                    "changing a parameter's shape"
                )

    def _warn_of_casts(self, found: Found) -> None:
        """Warn about parameters that were cast to half precision after their state was created without a master."""
        cast = []
        for parameter, inner, group, position in zip(
            found.parameters, found.inner, found.groups, found.positions, strict=True
        ):
            number, index = self._homes[id(parameter)]
            known = self._tables[number].dtypes
            if inner.dtype == known[index]:
                continue
            if self._options.keeps_master(inner.dtype) and MASTER not in self.state.rooms[id(parameter)].columns:
                cast.append(f"{self._name(group, position)} (now {inner.dtype})")
            known[index] = inner.dtype
        if cast:
            shown = ", ".join(cast[:4]) + (f" and {len(cast) - 4} others" if len(cast) > 4 else "")
            warnings.warn(
                f"parameters were cast after their state was created and have no master, so small updates are rounded "
                f"away: {shown}; make the optimizer after the cast",
                stacklevel=4,
            )

    def _check_apart(self, found: Found) -> None:
        """Raise if parameters share memory: torch updates them in turn, the engine updates them together."""
        assert found.looked is not None
        parameters = found.looked[0]
        pair = parameters.overlap(self._apart)
        if pair is not None:
            first, second = (self._name(found.groups[place], found.positions[place]) for place in pair)
            raise OptionError(
                f"{first} and {second} share memory; use the same parameter in both places, or give each its own "
                "memory with clone"
            )
        self._apart = parameters

    def _addresses(self, found: Found) -> list[list[list[int]]]:
        """Return the addresses of resident columns, for each parameter of each table."""
        state = self.state
        addresses: list[list[list[int]]] = [[[] for _ in table.parameters] for table in self._tables]
        for parameter, group, position in zip(found.parameters, found.groups, found.positions, strict=True):
            number, index = self._homes[id(parameter)]
            room, table = state.rooms[id(parameter)], self._tables[number]
            if not table.is_resident:
                continue
            for column in room.columns:
                if (packed := room.packed.get(column)) is not None:
                    addresses[number][index].extend(map(address, dict.values(packed)))
                    continue
                inner = local(state.view(room, column))
                if inner.get_device() != table.devices[index] or inner.dtype != torch.float32:
                    name = self._name(group, position)
                    raise OptionError(f"{column} of {name} was moved to {inner.device} as {inner.dtype}; move it back")
                if inner.shape != table.shapes[index] or (inner.numel() > 1 and inner.stride() != table.strides[index]):
                    name = self._name(group, position)
                    raise OptionError(
                        f"{column} of {name} has another shape or stride; assign it with state[p][{column!r}] = tensor"
                    )
                addresses[number][index].append(address(inner))
        return addresses

    # Creating state.

    def prepare(self) -> None:
        """Create and pin the state of every parameter that can have a gradient, now instead of at the first step."""
        self._open()
        create(self, self._flatten(), [])

    def _open(self) -> tuple[_core.Optimizer, torch.device]:
        """Return the engine and the device that it computes on."""
        if self._engine is None:
            self._compute = self._choose_device()
            self._engine, self._process = self._options.open(engine_name(self._compute), self._rule.name), os.getpid()
        if self._is_inherited():
            raise DeviceError(
                "this optimizer was used before fork() and does not work in the child; make a new one there"
            )
        if self._engine.closed:
            raise OptionError("this optimizer was closed; make a new one")
        check_not_captured(self._compute, f"{self._label}.step")
        return self._engine, self._compute

    def _choose_device(self) -> torch.device:
        devices = {local(parameter).device for group in self.param_groups for parameter in group["params"]}
        gpus = sorted({(device.type, device.index or 0) for device in devices if is_gpu(device)})
        asked = self._options.device
        kinds = {kind for kind, _ in gpus}
        if len(kinds) > 1:
            several = " and ".join(f"{kind}:{index}" for kind, index in gpus)
            raise OptionError(f"parameters are on several accelerators: {several}; use one optimizer for each")
        if len(gpus) > 1:
            raise OptionError(f"parameters are on several GPUs: {[i for _, i in gpus]}; use one optimizer for each")
        if not gpus:
            return asked or CPU
        found = torch.device(*gpus[0])
        if asked is not None and asked != found:
            raise OptionError(f"device={asked} contradicts parameters on {found}; leave it out")
        return found

    def _start_over(self) -> None:
        """Free all state and the engine; the next use opens a new one. The values of ``state`` become plain copies."""
        kept = {parameter: _copy(values) for parameter, values in self.state.items()}
        self.state.clear()
        self.close()
        self._engine, self._apart = None, None
        self._tables.clear()
        self.state.update(kept)

    def _forget_home(self, number: int) -> None:
        """Forget a parameter, given by its id; nothing updates it again."""
        table, index = self._homes.pop(number)
        self._tables[table].parameters[index] = None

    def _open_ring(self, engine: _core.Optimizer, compute: torch.device) -> None:
        """Use the ring of other optimizers with the same slots, or make one, if this placement needs one."""
        if engine.has_ring or not (size := engine.ring_bytes()) or engine.join_ring():
            return
        # From torch's own allocator, so that its statistics include the ring.
        ring = torch.empty(size, dtype=torch.uint8, device=compute) if is_gpu(compute) else None
        engine.open_ring(0 if ring is None else address(ring), ring, stream_handle(compute))

    def _release_ring(self) -> None:
        """Wait for all stores and give the ring up; its memory is freed if no other optimizer uses it.

        ``_restore_ring`` makes the ring again.
        """
        self.synchronize()
        if self._engine is not None and not self.is_closed:
            self._engine.close_ring()

    def _restore_ring(self) -> None:
        if self._engine is not None and self._tables and not self.is_closed:
            self._open_ring(self._engine, self._compute)

    # Reading state.

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._engine is not None and not self._is_inherited() and self._engine.closed

    def _is_inherited(self) -> bool:
        """Whether this is a forked child, which has neither the engine's threads nor its memory."""
        return self._engine is not None and self._process != os.getpid()

    def _check_available(self) -> None:
        """Raise in a forked child, which does not have the state."""
        if self._tables and self._is_inherited():
            raise DeviceError(
                "this optimizer was used before fork(), and its state is not available in the child; read it in the "
                "parent, or make a new optimizer in the child"
            )

    def _settle(self, parameter: torch.Tensor | None) -> None:
        """Wait for the stores into a parameter's state, or for all of them."""
        self._check_available()
        if self._engine is not None and not self.is_closed:
            if parameter is None:
                self._engine.synchronize()
            elif (home := self._homes.get(id(parameter))) is not None:
                self._engine.settle(*home)
            self.state.follow(parameter)
        if self.state.fresh:
            # The first step makes each master from its weight. A reader before that step must see the master too. This
            # comes after the wait: a store of neighbours in the same chunk may still be writing the zeros.
            self.state.make_masters(parameter)

    def _protect(self) -> None:
        """Wait until no save needs the present state any longer."""
        wait_for_live(self)
        if self._engine is not None and not self._is_inherited() and not self._engine.closed:
            self._engine.protect_all()

    def synchronize(self) -> None:
        """Wait until every store of the last step has ended."""
        if self._overlap is not None:
            self._overlap.finish()
        self._settle(None)

    def refresh_master_weights(self) -> None:
        """Update each master whose rounding differs from its parameter.

        Every step does the same. Call this if code reads ``master_param`` before the next step. All compact masters
        become equal to their parameters: nothing shows which of these were replaced.
        """
        self._follow_weights(compact=True)

    @torch.no_grad()
    def _follow_weights(self, *, compact: bool) -> None:
        """Update masters from their parameters; compact ones only if the caller says so."""
        self.synchronize()
        self._protect()
        for group in self.param_groups:
            for parameter in group["params"]:
                room = self.state.rooms.get(id(parameter))
                if room is None:
                    continue
                if MASTER in room.packed and compact:
                    room.packed[MASTER].reset()
                elif MASTER in room.views:
                    follow_weight(local(room.views[MASTER]), local(parameter).detach())

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The gradients' norm at the last step; None without ``max_grad_norm``.

        It is a 0-dim tensor. Reading its value waits for the device.
        """
        return self._grad_norm

    @property
    def max_grad_norm(self) -> float | None:
        """The largest norm of the gradients; a larger one is clipped inside the step. None for no clipping."""
        return self._options.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        if value is None and self._options.skip_nonfinite:
            raise OptionError(NO_NORM)
        limit = positive("max_grad_norm", value, without="for no clipping")
        self._options = replace(self._options, max_grad_norm=limit)

    def stats(self) -> dict[str, Any]:
        """Return statistics of the last step. Waits for its stores.

        Bytes are payload: two f32 columns without masters are exactly 8 bytes for each element and direction. The times
        of the stages are sums over chunks, measured on one chunk in 64. The step waited ``stalls`` times for a slot of
        the ring, and ``save_stalls`` times for the writer of an ``async_save``. ``device_bytes`` and ``pinned_bytes``
        include rings that this optimizer shares with others, and each of them reports all of it. ``f32_masters`` and
        ``compact_masters`` are numbers of parameters. ``state_formats`` has the number of parameters for each format of
        state, and ``f32_state`` the names of those that have fewer elements than a block of 8-bit state: theirs is f32.
        """
        self._check_available()
        engine = self._engine or self._options.open(engine_name(CPU), self._rule.name)
        found: dict[str, Any] = {"step_s": self._step_s, **engine.stats()}
        before_s = waited_s(self)
        found["save_stalls"] += before_s > 0
        found["save_stall_s"] += before_s
        rooms = self.state.rooms.values()
        masters = [MASTER in room.packed for room in rooms if MASTER in room.columns]
        found["f32_masters"], found["compact_masters"] = masters.count(False), masters.count(True)
        formats = {id(room.parameter): room.formats for room in rooms if room.own}
        found["state_formats"] = {of: list(formats.values()).count(of) for of in sorted(set(formats.values()))}
        found["f32_state"] = [self._name_of(room.parameter) for room in rooms if self._is_too_small(room)]
        return found

    def _is_too_small(self, room: Room) -> bool:
        """Whether a parameter has state of f32 only because it has not a whole block."""
        asked = dict(zip(self._rule.columns, self._formats, strict=True))
        return any(asked[name] == BLOCKS and name not in room.packed for name in room.own)

    def last_backward(self) -> AbstractContextManager[None]:
        """Mark the last backward before a step: ``with optimizer.last_backward(): loss.backward()``.

        Gradients are then copied to the host as they become final, and the step uses the copies. This works with
        placements ``"host"`` and ``"hybrid"``, with plain modules and FSDP2. Under DDP and FSDP1, which reduce
        gradients later, it raises an error. Memory for the copies is pinned at the first use: as many bytes as the
        gradients have.
        """
        return last_backward(self) if self._overlap is None else self._overlap.last_backward()

    # Failure, and the end.

    def distrust(self, reason: str) -> None:
        """Refuse steps and saves until state is loaded again, because a load failed after it had changed some state."""
        engine = self._engine or self._open()[0]
        engine.distrust(f"its last load broke off with: {reason}")

    def check_trusted(self, done: str) -> None:
        """Raise if a load or a step failed and left the state half written."""
        reason = None if self._engine is None or self._is_inherited() else self._engine.distrusted
        if reason is not None:
            raise CheckpointError(
                f"the optimizer cannot be {done}: {reason}; load a complete checkpoint of optimizer and model"
            )

    def close(self) -> None:
        """Free pinned memory, and the ring if no other optimizer uses it.

        Tensors of state that are still in use stay readable and keep their memory.
        """
        if not self._is_inherited() and not self.is_closed:
            if self._engine is None:
                # An optimizer that was never used has nothing to free. A new engine records that it is closed.
                self._engine, self._process = self._options.open(engine_name(CPU), self._rule.name), os.getpid()
            self._landed.forget(self._engine)
            _trace.leaves(self)
            if self._overlap is not None:
                self._overlap.close()
            # Tensors that stay in use show the state, not what another copy of it had.
            self.state.follow()
            self._engine.close()
        self._landed.close()
        self.state.forget_taken()


def _copy(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def rate(group: dict[str, Any]) -> float:
    """Return a group's learning rate; refuses a tensor on a GPU."""
    lr = group["lr"]
    if not isinstance(lr, torch.Tensor):
        return float(lr)
    if lr.device.type != CPU.type:
        raise OptionError(f"lr is a tensor on {lr.device}; keep it on the CPU, reading it would wait for the GPU")
    return float(lr.item())
