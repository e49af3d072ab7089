"""AdamW with its state in pinned host memory, streamed through a small ring on the GPU."""

from __future__ import annotations

import os
import time
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from forebay import _core
from forebay._arguments import Options, check_numbers, check_options
from forebay._backward import Landed, last_backward
from forebay._gather import Flat, Found, Store
from forebay._live import wait_for_live, waited_s
from forebay._loading import KINDS, check_assigned, check_layout, copy_into, load
from forebay._state import Kept, State
from forebay._torch import (
    address,
    bump_versions,
    capturing,
    check_gradient,
    check_parameter,
    dense_strides,
    follow_weight,
    host_tensor,
    local,
    state_like,
    stream_handle,
    total_norm,
)
from forebay.errors import CheckpointError, DeviceError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

MOMENTS = KINDS[:2]


class AdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` with its state on the host and its update on the GPU, bit for bit the same.

    Moments and master weights live in pinned host memory, flat and of exact size. During ``step`` they stream through a
    ring of ``slots`` buffers of ``chunk_bytes`` on the GPU, at the speed of the wire. ``step`` returns when the last
    update has been launched; at most ``slots`` stores are then still under way, and whatever reads the state through
    this object waits for the ones it needs.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay, amsgrad, maximize
        As in ``torch.optim.AdamW``. ``lr`` may be a tensor on the CPU.
    placement
        Where state lies and who updates it, with the same bits everywhere. ``"stream"`` keeps it on the host and
        updates it on the GPU; ``"resident"`` keeps it on the parameters' device; ``"host"`` keeps and updates it on the
        host, so that gradients come down and weights go up; ``"hybrid"`` shares it out between GPU and host, both at
        work at once.
    chunk_bytes
        Bytes of one slot, all kinds of state together.
    slots
        Slots in the ring; ``slots * chunk_bytes`` is the GPU memory that a step needs.
    master_weights
        Keep an f32 master of each bf16 and f16 parameter, as ``state[p]["master_param"]``. By default on.
    state_dtype
        The type of the state; ``torch.float32``.
    max_grad_norm
        Clip the gradients' global norm inside the step. The coefficient is computed and used on the device. Gradients
        themselves stay as they are.
    skip_nonfinite
        Leave everything as it is when the norm is not finite. Costs one wait for the device in each step.
    pinned_budget_bytes
        Refuse to pin more than this: state, the gradients of ``last_backward``, and where the host updates parameters
        of a GPU a ring of ``2 * slots * chunk_bytes`` for their gradients and weights.
    device
        Where to compute when parameters are on the CPU; by default on the CPU.
    host_fraction
        The part of the state, by bytes, that the host updates in placement ``"hybrid"``; ``"auto"``, the default, finds
        in the first steps the part that makes both ends finish together, and keeps to it until a step updates more than
        twice as much.
    host_threads
        Threads that update on the host; by default as many as this process has cores.
    host_kernel
        ``"portable"``, ``"avx2"`` or ``"avx512"``; by default the best that this CPU has.
    """

    alive: ClassVar[weakref.WeakSet[AdamW]] = weakref.WeakSet()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        placement: str = "stream",
        chunk_bytes: int = 16 << 20,
        slots: int = 4,
        master_weights: bool | None = None,
        state_dtype: torch.dtype = torch.float32,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        pinned_budget_bytes: int | None = None,
        device: torch.device | str | None = None,
        host_fraction: float | str | None = None,
        host_threads: int | None = None,
        host_kernel: str | None = None,
    ) -> None:
        options = check_options(
            placement=placement,
            chunk_bytes=chunk_bytes,
            slots=slots,
            master_weights=master_weights,
            state_dtype=state_dtype,
            max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite,
            pinned_budget_bytes=pinned_budget_bytes,
            device=device,
            host_fraction=host_fraction,
            host_threads=host_threads,
            host_kernel=host_kernel,
        )
        defaults = check_numbers(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, maximize=maximize
        )
        self._set_up(options)
        super().__init__(params, defaults)
        self._choose_device()

    def _set_up(self, options: Options) -> None:
        AdamW.alive.add(self)
        self._options = options
        self._state = State(self)
        # Why the state cannot be trusted: what broke off in the middle, and with what.
        self._distrusted: str | None = None
        # What the parameters of the last step were: no two of them share memory.
        self._apart: _core.Looked | None = None
        self._engine: _core.Engine | None = None
        # The process that opened it.
        self._process = 0
        self._compute: torch.device | None = None
        self._stores: list[Store] = []
        self._homes: dict[int, tuple[int, int]] = {}
        self._closed = False
        self._has_ring = False
        self._step_s = 0.0
        self._grad_norm: torch.Tensor | None = None
        self._flat: Flat | None = None
        self._landed = Landed()
        # Parameters whose master is still zero: no step has made it from the weight yet.
        self._fresh: dict[int, torch.Tensor] = {}

    # What torch's optimizers do, adapted to state that lives in arenas.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their state is created with the next step, load or ``prepare``."""
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        try:
            for position, parameter in enumerate(self.param_groups[index]["params"]):
                check_parameter(parameter, self._name(index, position))
            self._check_group(self.param_groups[index])
            numbers = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
            check_numbers(**{key: self.param_groups[index][key] for key in numbers})
        except OptionError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise OptionError(f"{option}=True is not supported: the step runs on the engine's own streams")
        self._rate(group)

    @staticmethod
    def _rate(group: dict[str, Any]) -> float:
        lr = group["lr"]
        if isinstance(lr, torch.Tensor):
            if lr.device.type != "cpu":
                raise OptionError(
                    f"lr is a tensor on {lr.device}; keep it on the CPU, reading it would wait for the GPU"
                )
            return float(lr.item())
        return float(lr)

    def _name(self, group: int, position: int) -> str:
        names = self.param_groups[group].get("param_names")
        return names[position] if names else f"parameter {position} of group {group}"

    def __getstate__(self) -> dict[str, Any]:
        return {
            "defaults": self.defaults,
            "state": self.state,
            "param_groups": self.param_groups,
            "_options": self._options,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "_options" in state:
            self._set_up(state.pop("_options"))
        loaded = state.pop("state", None)
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        if loaded is not None:
            self.state = loaded

    @property  # type: ignore[override]
    def state(self) -> State:
        """A parameter's state by parameter. Reading waits for its stores, and what is written is what counts."""
        return self._state

    @state.setter
    def state(self, values: Any) -> None:
        if values is not self._state:
            self._state.replace(values)

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups as in torch. The tensors are the live ones, the dicts around them are not."""
        packed = super().state_dict()
        state = packed.get("state", {})
        return {**packed, "state": {key: dict(of) if isinstance(of, Kept) else of for key, of in state.items()}}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Parameters
        ----------
        closure
            Computes the loss again; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        start = time.perf_counter()
        self.check_trusted("stepped")
        engine, compute = self._open()
        found = self._collect(compute)
        if not found.parameters:
            self._landed.forget(engine)
            return loss
        scale = self._clip(found.gradients, compute)
        if scale is False:
            self._landed.forget(engine)
            return loss
        self._create(found.flat, found.parameters)
        run = self._step_resident if self._options.placement == "resident" else self._step_streamed
        self._landed.check(engine)
        try:
            run(engine, compute, found, scale.data_ptr() if isinstance(scale, torch.Tensor) else 0)
        except Exception as error:
            if engine.take_torn():
                self.distrust(str(error), "its last step")
            raise
        finally:
            self._landed.forget(engine)
        if self._fresh:
            for parameter in found.parameters:
                self._fresh.pop(id(parameter), None)
        bump_versions(found.parameters)
        if found.inner is not found.parameters:
            bump_versions(found.inner)
        for original, copy in found.copies:
            original.copy_(copy)
        self._step_s = time.perf_counter() - start
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Gradients that came down for a step that was left out are let go of too."""
        super().zero_grad(set_to_none)
        if self._engine is not None and not self._is_inherited():
            self._landed.forget(self._engine)

    def _collect(self, compute: torch.device) -> Found:
        """Return the parameters that have a gradient, checked before anything is changed."""
        for group in self.param_groups:
            self._check_group(group)
        found = Found(self._flatten())
        if not found.read(-1 if compute.type == "cpu" else compute.index):
            self._explain(found, compute)
        return found

    def _flatten(self) -> Flat:
        lists = [group["params"] for group in self.param_groups]
        if self._flat is None or not self._flat.is_still(lists):
            self._flat = Flat([list(parameters) for parameters in lists])
        return self._flat

    def _explain(self, found: Found, compute: torch.device) -> None:
        """Say which parameter or gradient the engine cannot work on."""
        rows = zip(found.inner, found.inner_gradients, found.groups, found.positions, strict=True)
        for parameter, gradient, group, position in rows:
            name = self._name(group, position)
            check_parameter(parameter, name)
            check_gradient(parameter, gradient, name)
            if parameter.device != compute and parameter.device.type != "cpu":
                raise OptionError(
                    f"{name} is on {parameter.device}, this optimizer computes on {compute}; make the optimizer "
                    "after moving the model, or use one optimizer for each device"
                )
        raise OptionError("parameters and gradients do not fit together")

    def _clip(self, gradients: list[torch.Tensor], compute: torch.device) -> torch.Tensor | bool | None:
        """Return the coefficient on the device; None without clipping, False to leave everything as it is."""
        limit = self._options.max_grad_norm
        if limit is None:
            return None
        norm = total_norm(gradients)
        self._grad_norm = norm
        if self._options.skip_nonfinite and not bool(torch.isfinite(norm)):
            return False
        # As torch.nn.utils.clip_grad_norm_ computes it.
        return torch.clamp(limit / (norm + 1e-6), max=1.0).to(device=compute, dtype=torch.float32)

    def _groups(self) -> list[tuple[float, float, float, float, float, bool]]:
        return [
            (
                self._rate(group),
                float(group["betas"][0]),
                float(group["betas"][1]),
                float(group["eps"]),
                float(group["weight_decay"]),
                bool(group["maximize"]),
            )
            for group in self.param_groups
        ]

    def _step_streamed(self, engine: _core.Engine, compute: torch.device, found: Found, scale: int) -> None:
        assert found.properties is not None
        self._restore_ring()
        store = found.flat.store if found.whole else None
        homes = [] if store is not None else [self._homes[id(parameter)] for parameter in found.parameters]
        if store is not None:
            if found.properties.fits is not store:
                self._check_unchanged(found, store.devices, store.shapes)
                found.properties.fits = store
            if not (store.contiguous and found.contiguous):
                found.put_in_order(store.strides)
            tensors = [found.tensors()]
        else:
            self._check_unchanged(
                found,
                [self._stores[number].devices[index] for number, index in homes],
                [self._stores[number].shapes[index] for number, index in homes],
            )
            if not (found.contiguous and all(store.contiguous for store in self._stores)):
                found.put_in_order([self._stores[number].strides[index] for number, index in homes])
            tensors = found.tensors_of(self._stores, homes)
        self._check_apart(found)
        engine.step(tensors, self._groups(), stream_handle(compute), scale)

    def _check_apart(self, found: Found) -> None:
        """Refuse parameters that share memory: torch updates one after the other, here they take no turns."""
        assert found.looked is not None
        parameters = found.looked[0]
        pair = parameters.overlap(self._apart)
        if pair is not None:
            first, second = (self._name(found.groups[place], found.positions[place]) for place in pair)
            raise OptionError(
                f"{first} and {second} share memory; use one and the same parameter in both places, or give each "
                "memory of its own with clone"
            )
        self._apart = parameters

    def _check_unchanged(self, found: Found, devices: list[int], shapes: list[torch.Size]) -> None:
        """Refuse parameters that are no longer what their state was created for."""
        assert found.properties is not None
        if found.properties.looked.devices == devices and found.properties.shapes == shapes:
            return
        rows = zip(found.inner, devices, shapes, found.groups, found.positions, strict=True)
        for parameter, number, shape, group, position in rows:
            name = self._name(group, position)
            if parameter.get_device() != number:
                there = "cpu" if number < 0 else f"cuda:{number}"
                raise OptionError(
                    f"{name} is on {parameter.device}, its state was created for {there}; make the optimizer after "
                    "moving the model"
                )
            if parameter.shape != shape:
                raise OptionError(
                    f"{name} has shape {tuple(parameter.shape)}, its state {tuple(shape)}; make a new optimizer after "
                    "changing a parameter's shape"
                )

    def _step_resident(self, engine: _core.Engine, compute: torch.device, found: Found, scale: int) -> None:
        states = [self.state[parameter] for parameter in found.parameters]
        moments = [local(state["exp_avg"]) for state in states]
        self._check_unchanged(found, [moment.get_device() for moment in moments], [moment.shape for moment in moments])
        found.put_in_order([moment.stride() for moment in moments])
        addresses = [[address(local(state[kind])) if kind in state else 0 for kind in KINDS] for state in states]
        steps = [int(state["step"].item()) + 1 for state in states]
        groups = self._groups()
        self._check_apart(found)
        engine.update_resident(found.tensors(), addresses, steps, groups, stream_handle(compute), scale)
        for state in states:
            state["step"].add_(1)

    # Creating state.

    def prepare(self) -> None:
        """Create and pin the state of every parameter that can have a gradient, now instead of at the first step."""
        self._open()
        self._create(self._flatten(), [])

    def _open(self) -> tuple[_core.Engine, torch.device]:
        """Return the engine, opened at its first use and never in the constructor."""
        if self._closed:
            raise OptionError("this optimizer was closed; make a new one")
        if self._engine is None:
            compute = self._choose_device()
            name = "cpu" if compute.type == "cpu" else f"cuda:{compute.index or 0}"
            self._engine = _core.Engine(name, self._options.slots, self._options.chunk_bytes)
            self._process = os.getpid()
            self._compute = compute
        assert self._compute is not None
        if self._is_inherited():
            raise DeviceError(
                "this optimizer was used before fork() and does not work in the child; make another there"
            )
        if self._compute.type == "cuda" and capturing():
            raise DeviceError("forebay.AdamW.step cannot be captured into a CUDA graph; call it outside the capture")
        return self._engine, self._compute

    def _choose_device(self) -> torch.device:
        devices = {
            (local(parameter).device.type, local(parameter).device.index)
            for group in self.param_groups
            for parameter in group["params"]
        }
        gpus = sorted(index or 0 for kind, index in devices if kind == "cuda")
        asked = self._options.device
        if len(gpus) > 1:
            raise OptionError(f"parameters are on several GPUs: {gpus}; use one optimizer for each")
        if gpus:
            if asked is not None and asked != torch.device("cuda", gpus[0]):
                raise OptionError(f"device={asked} contradicts parameters on cuda:{gpus[0]}; leave it out")
            return torch.device("cuda", gpus[0])
        return asked or torch.device("cpu")

    def _create(self, flat: Flat, found: list[torch.Tensor]) -> None:
        """Create state for all parameters that can have a gradient and have none yet."""
        kinds = [bool(group["amsgrad"]) for group in self.param_groups]
        known = flat.complete or self._homes.keys() >= set(map(id, found))
        if flat.created == kinds and known and not self.state.edited:
            return
        self._check_kinds(self.param_groups)
        wanted = {id(parameter) for parameter in found}
        new: dict[int, torch.Tensor] = {}
        names: list[str] = []
        amsgrad: list[bool] = []
        for index, group in enumerate(self.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) in self._homes:
                    self.state.complete(parameter)
                elif id(parameter) not in new and (parameter.requires_grad or id(parameter) in wanted):
                    name = self._name(index, position)
                    check_parameter(parameter, name)
                    for kind, value in dict.get(self.state, parameter, {}).items():
                        if kind in KINDS:
                            check_layout(name, parameter, kind, value, " as assigned")
                    new[id(parameter)] = parameter
                    names.append(name)
                    amsgrad.append(kinds[index])
        if new:
            create = self._create_resident if self._options.placement == "resident" else self._create_streamed
            create(list(new.values()), names, amsgrad)
        self.state.edited = False
        flat.settle(kinds, self._stores, self._homes)

    def _check_kinds(self, groups: list[dict[str, Any]]) -> None:
        """Refuse groups that ask for other state than was created."""
        for index, group in enumerate(groups):
            for parameter in group["params"]:
                kept = "max_exp_avg_sq" in self.state.places.get(id(parameter), {})
                if id(parameter) in self._homes and kept != bool(group["amsgrad"]):
                    raise OptionError(
                        f"amsgrad was switched {'off' if kept else 'on'} for group {index} after its state was "
                        "created; make a new optimizer"
                    )

    def _create_streamed(self, new: list[torch.Tensor], names: list[str], amsgrad: list[bool]) -> None:
        engine, compute = self._open()
        inner = [local(parameter) for parameter in new]
        master = [self._options.keeps_master(tensor.dtype) for tensor in inner]
        options = self._options
        # Where nothing goes through the device, a parameter on the host is updated in place.
        on_host = [tensor.device != compute or (compute.type == "cpu" and not options.streams) for tensor in inner]
        if not self._stores and options.streams:
            self._open_ring(engine, compute)
        if not self._stores and options.updates_on_host:
            engine.open_host(options.host_fraction, options.host_threads, options.host_kernel)
        elements = [tensor.numel() for tensor in inner]
        number = engine.add(names, elements, amsgrad, master, on_host, self._options.pinned_budget_bytes)
        self._stores.append(Store(new))
        for index, parameter in enumerate(new):
            self._homes[id(parameter)] = (number, index)
            earlier = dict.get(self.state, parameter, {})
            views: dict[str, Any] = {}
            for kind in ("step", *KINDS):
                view = engine.view(number, index, "master" if kind == "master_param" else kind)
                if view is not None and kind == "step":
                    views[kind] = torch.frombuffer(view, dtype=torch.float32)[0]
                elif view is not None:
                    views[kind] = state_like(parameter, host_tensor(view, inner[index]))
            self._adopt(parameter, views, earlier)

    def _open_ring(self, engine: _core.Engine, compute: torch.device) -> None:
        # torch's own allocator, so that its statistics tell the truth about the ring.
        ring = None
        if compute.type == "cuda":
            ring = torch.empty(engine.ring_bytes(), dtype=torch.uint8, device=compute)
        engine.open_ring(0 if ring is None else ring.data_ptr(), ring, stream_handle(compute))
        self._has_ring = True

    def _release_ring(self) -> None:
        """Wait for all stores and give the ring's memory on the device back; ``_restore_ring`` makes it again."""
        self.synchronize()
        if self._engine is not None and self._has_ring and not self._closed:
            self._engine.close_ring()
            self._has_ring = False

    def _restore_ring(self) -> None:
        if self._engine is None or self._compute is None or self._closed:
            return
        if self._stores and self._options.streams and not self._has_ring:
            self._open_ring(self._engine, self._compute)

    def _create_resident(self, new: list[torch.Tensor], names: list[str], amsgrad: list[bool]) -> None:
        _, compute = self._open()
        for name, parameter in zip(names, new, strict=True):
            if local(parameter).device != compute:
                raise OptionError(
                    f"{name} is on {local(parameter).device}, this optimizer computes on {compute}; placement "
                    "'resident' cannot bring it there, use 'stream'"
                )
        for index, parameter in enumerate(new):
            inner = local(parameter)
            self._homes[id(parameter)] = (-1, index)
            strides = dense_strides(inner)
            kinds = [*MOMENTS]
            kinds += ["max_exp_avg_sq"] if amsgrad[index] else []
            kinds += ["master_param"] if self._options.keeps_master(inner.dtype) else []
            views: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
            for kind in kinds:
                data = torch.empty_strided(inner.shape, strides, dtype=torch.float32, device=inner.device).zero_()
                views[kind] = state_like(parameter, data)
            earlier = dict.get(self.state, parameter, {})
            self._adopt(parameter, views, earlier)

    def _adopt(self, parameter: torch.Tensor, views: dict[str, Any], earlier: dict[str, Any]) -> None:
        """Make the views a parameter's state, with the values of state that came before it."""
        self.state.place(parameter, views)
        self._fill(parameter, earlier, zeroed=True)

    def _fill(self, parameter: torch.Tensor, values: dict[str, Any], *, zeroed: bool = False) -> None:
        """Copy values into a parameter's state; what they do not have starts anew, from zeros that may be there."""
        self._fresh.pop(id(parameter), None)
        for kind, view in self.state.places[id(parameter)].items():
            if kind in values:
                copy_into(values[kind], view)
            else:
                self._start_anew(parameter, kind, zeroed=zeroed)

    def _start_anew(self, parameter: torch.Tensor, kind: str, *, zeroed: bool = False) -> None:
        """Let one kind of a parameter's state be as before its first step."""
        if not zeroed:
            local(self.state.places[id(parameter)][kind]).zero_()
        if kind == "master_param":
            self._fresh[id(parameter)] = parameter

    @torch.no_grad()
    def _assign(self, parameter: torch.Tensor, kind: str, value: Any) -> None:
        """Copy a value into a parameter's state, as its user asks."""
        check_assigned(self, parameter, kind, value)
        self._settle(parameter)
        self._protect()
        copy_into(value, self.state.places[id(parameter)][kind])

    def _name_of(self, parameter: torch.Tensor) -> str:
        for index, group in enumerate(self.param_groups):
            for position, one in enumerate(group["params"]):
                if one is parameter:
                    return self._name(index, position)
        return f"a parameter of shape {tuple(parameter.shape)}"

    # Reading state.

    def _is_inherited(self) -> bool:
        """Whether this is a forked child, in which the engine's threads and memory are not."""
        return self._engine is not None and self._process != os.getpid()

    def _settle(self, parameter: torch.Tensor | None) -> None:
        """Wait for the stores into a parameter's state, or for all of them."""
        if self._stores and self._is_inherited():
            raise DeviceError(
                "this optimizer was used before fork(), and its pinned state is not there in the child; read it in the "
                "parent, or make another optimizer in the child"
            )
        if self._engine is not None and not self._closed:
            if parameter is None:
                self._engine.synchronize()
            elif (home := self._homes.get(id(parameter))) is not None and home[0] >= 0 and self._stores:
                self._engine.settle(*home)
        if self._fresh:
            # A step makes a master from its weight by itself; whoever looks before the first one sees it too. Not
            # before the wait: a store of neighbours in the same chunk may still be bringing the zeros back.
            asked = list(self._fresh.values()) if parameter is None else [self._fresh.get(id(parameter))]
            for fresh in asked:
                if fresh is not None:
                    del self._fresh[id(fresh)]
                    follow_weight(local(self.state.places[id(fresh)]["master_param"]), local(fresh).detach())

    def _protect(self) -> None:
        """Wait until state may be written here, as far as a save under way is concerned."""
        wait_for_live(self)
        if self._engine is not None and not self._closed and not self._is_inherited():
            self._engine.protect_all()

    def synchronize(self) -> None:
        """Wait until every store of the last step has ended."""
        self._settle(None)

    @torch.no_grad()
    def refresh_master_weights(self) -> None:
        """Make every master follow its parameter now: where a master's rounding is not the weight, the weight wins.

        The step does the same by itself; this is for those who read ``master_param`` before it.
        """
        self.synchronize()
        self._protect()
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self.state.places.get(id(parameter), {}).get("master_param")
                if master is not None:
                    follow_weight(local(master), local(parameter).detach())

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The gradients' norm at the last step, a 0-dim tensor; None without ``max_grad_norm``. Reading it waits."""
        return self._grad_norm

    def stats(self) -> dict[str, float | int]:
        """Return the last step in numbers. Waits for its stores.

        Bytes are payload: f32 moments without masters are exactly 8 bytes for each parameter and way. The times of the
        stages are sums over chunks, measured on one chunk in 64. The step waited ``stalls`` times for a slot of the
        ring, and ``save_stalls`` times for the writer of an ``async_save``.
        """
        numbers = self._engine.stats() if self._engine is not None else [0] * 10
        chunks, fetch_bytes, store_bytes, fetch_ns, update_ns, store_ns, stalls, stall_ns, saves, save_ns = numbers
        before_s = waited_s(self)
        engine = self._engine
        return {
            "step_s": self._step_s,
            "fetch_s": fetch_ns / 1e9,
            "update_s": update_ns / 1e9,
            "store_s": store_ns / 1e9,
            "fetch_bytes": fetch_bytes,
            "store_bytes": store_bytes,
            "fetch_gbps": fetch_bytes / fetch_ns if fetch_ns else 0.0,
            "store_gbps": store_bytes / store_ns if store_ns else 0.0,
            "device_bytes": engine.ring_bytes() if engine is not None and self._has_ring and not self._closed else 0,
            "pinned_bytes": engine.pinned_bytes() if engine is not None else 0,
            "chunks": chunks,
            "stalls": stalls,
            "stall_s": stall_ns / 1e9,
            "save_stalls": saves + (before_s > 0),
            "save_stall_s": save_ns / 1e9 + before_s,
            **self._host_stats(),
        }

    def _host_stats(self) -> dict[str, float | int]:
        """Return the host's part of the last step; nothing for placements in which it has none."""
        if self._options.placement not in ("host", "hybrid"):
            return {}
        numbers = self._engine.host_stats() if self._engine is not None else [0] * 9
        threads, chunks, state_bytes, down_bytes, up_bytes, run_ns, wire_wait_ns, update_wait_ns, device_ns = numbers
        last, settled = self._engine.host_fractions() if self._engine is not None else (0.0, None)
        return {
            "host_fraction": last,
            "host_settled": settled is not None,
            "host_threads": threads,
            "host_chunks": chunks,
            "host_state_bytes": state_bytes,
            "host_down_bytes": down_bytes,
            "host_up_bytes": up_bytes,
            "host_s": run_ns / 1e9,
            "host_wire_wait_s": wire_wait_ns / 1e9,
            "host_update_wait_s": update_wait_ns / 1e9,
            "device_s": device_ns / 1e9,
        }

    def last_backward(self) -> AbstractContextManager[None]:
        """Mark the last backward before a step: ``with optimizer.last_backward(): loss.backward()``.

        Gradients then come down to the host as they become final, and the step finds them there. For placements
        ``"host"`` and ``"hybrid"``, plain modules and FSDP2; refused under DDP, whose gradients are reduced later. The
        room for them is pinned at the first use: as many bytes as the gradients have.
        """
        return last_backward(self)

    def distrust(self, reason: str, what: str = "its last load") -> None:
        """Refuse to step until the state has been loaded anew: something has been written into it that is wrong."""
        self._distrusted = f"{what} broke off with: {reason}"

    def check_trusted(self, done: str) -> None:
        """Refuse state that a load or a step left half written."""
        if self._distrusted is not None:
            raise CheckpointError(
                f"the optimizer cannot be {done}: {self._distrusted}; load a checkpoint that is whole, and the model's "
                "with it"
            )

    def close(self) -> None:
        """Give ring and pinned memory back. State that is still held stays readable, and keeps its memory."""
        if self._engine is not None and not self._closed and not self._is_inherited():
            self._landed.forget(self._engine)
            self._engine.close()
        self._landed.close()
        self._closed = True
        self.state.let_go()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state in the format of ``torch.optim.AdamW``, in place: nothing passes through the GPU.

        Everything is checked before anything is changed. State of parameters that the dict does not have starts anew.
        """
        load(self, state_dict)
