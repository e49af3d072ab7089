"""Megatron's ``HybridDeviceOptimizer``, made of two optimizers: one offloads its state, one keeps it on the GPU."""

from __future__ import annotations

import weakref
from copy import deepcopy
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from forebay._checks import share
from forebay._tensors import local, state_like
from forebay.errors import OptionError
from forebay.integrations.megatron.parts import Parts
from forebay.integrations.megatron.rules import (
    OPTIONS,
    SETTINGS,
    SHARED,
    check_arguments,
    counterpart,
    settings_of,
)
from forebay.integrations.megatron.sources import DECOUPLED, gradients_of
from forebay.integrations.megatron.state import HybridState
from forebay.optim.create import create
from forebay.optim.state import MASTER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from forebay.optim.base import Optimizer

NAMED = (
    *("offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32"),
    *("pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d"),
)
"""The arguments of Megatron's class, without those of the update rules."""

CLASSES = ("cpu_optimizer_cls", "gpu_optimizer_cls")
"""Not kept in groups: checkpoints save groups, and torch refuses to load classes."""

OWN = ("params", *NAMED, *OPTIONS, "fused", "foreach", "capturable", "differentiable")
"""The keys of a group that a load does not change."""


class HybridDeviceOptimizer(torch.optim.Optimizer):
    """An optimizer that keeps the state of a share of its parameters on the host and updates it there.

    It has the arguments, methods and state of Megatron's class of this name. There are at most two optimizers inside,
    and parameters, gradients and weights have no copies of their own: the engine reads gradients and writes weights
    where they are. All parts give the same bits.

    Parameters
    ----------
    params
        As in ``torch.optim``. Megatron's shards, which are views, may be among them.
    offload_fraction
        The share of the elements on the GPU that is offloaded, in the order of the parameters. The others stay
        ``"resident"``. Parameters on the CPU are always in the offloaded part.
    cpu_optimizer_cls, gpu_optimizer_cls
        They name the update rule of each part: AdamW, Adam or SGD of torch, or FusedAdam or FusedSGD of Transformer
        Engine or apex. forebay's own class of that rule computes.
    param_update_in_fp32
        Keep an f32 master of each bf16 and f16 parameter, as ``state[p]["master_param"]``.
    pin_cpu_grads, pin_cpu_params
        True: host memory of the engine is pinned. False raises an error.
    overlap_cpu_optimizer_d2h_h2d
        Recorded. Copies and updates always overlap.
    kwargs
        The settings of the update rule, and these options of forebay: ``placement`` of the offloaded part (``"host"``
        by default, ``"stream"`` or ``"hybrid"``), ``host_fraction``, ``host_threads``, ``host_kernel``,
        ``chunk_bytes``, ``slots``, ``pinned_budget_bytes`` and ``grad_source`` (by default ``decoupled_grad`` of the
        parameters that have this attribute, else ``grad``).
    """

    options: ClassVar[dict[str, Any]] = {}
    """Options of forebay for each instance, as ``install`` gives them."""
    offloads_itself: ClassVar[bool] = True
    """As of every optimizer of forebay: frameworks need not move the state."""
    alive: ClassVar[weakref.WeakSet[HybridDeviceOptimizer]] = weakref.WeakSet()
    """Every hybrid optimizer of this process."""

    def __init__(
        self,
        params: Iterable[Any],
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: Any = None,
        gpu_optimizer_cls: Any = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        **kwargs: Any,
    ) -> None:
        self._set_up(
            {
                "offload_fraction": offload_fraction,
                "cpu_optimizer_cls": cpu_optimizer_cls,
                "gpu_optimizer_cls": gpu_optimizer_cls,
                "param_update_in_fp32": param_update_in_fp32,
                "pin_cpu_grads": pin_cpu_grads,
                "pin_cpu_params": pin_cpu_params,
                "overlap_cpu_optimizer_d2h_h2d": overlap_cpu_optimizer_d2h_h2d,
                **self.options,
                **kwargs,
            }
        )
        super().__init__(params, self._arguments)
        self._parts()

    def _set_up(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self.offload_fraction = share("offload_fraction", arguments["offload_fraction"])
        self.cpu_optimizer_cls = arguments["cpu_optimizer_cls"]
        self.gpu_optimizer_cls = arguments["gpu_optimizer_cls"]
        self.param_update_in_fp32 = bool(arguments["param_update_in_fp32"])
        self.overlap_cpu_optimizer_d2h_h2d = bool(arguments["overlap_cpu_optimizer_d2h_h2d"])
        for name in ("pin_cpu_grads", "pin_cpu_params"):
            if not arguments[name]:
                raise OptionError(f"{name}=False is not supported: host memory of the engine is pinned; leave it out")
            setattr(self, name, True)
        self.sub_optimizer_kwargs = {name: value for name, value in arguments.items() if name not in NAMED}
        check_arguments(self.sub_optimizer_kwargs)
        self.alive.add(self)
        self._divided = Parts()
        self._state = HybridState(self)

    # The parts.

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _parts(self) -> Parts:
        """Return the parts; divide the parameters first if they were replaced."""
        if not self._divided.is_of(self.param_groups):
            self._divided.divide(self.param_groups, self.offload_fraction, self._make)
        return self._divided

    def _make(self, groups: list[dict[str, Any]], is_offloaded: bool) -> Optimizer:
        given = self.sub_optimizer_kwargs
        cls = self.cpu_optimizer_cls if is_offloaded else self.gpu_optimizer_cls
        if cls is None:
            raise OptionError(f"give {'cpu_optimizer_cls' if is_offloaded else 'gpu_optimizer_cls'}: it names the rule")
        options = {name: given[name] for name in (OPTIONS if is_offloaded else SHARED) if name in given}
        options.pop("grad_source", None)
        placement = options.pop("placement", "host") if is_offloaded else "resident"
        ours: Any = counterpart(cls, given)
        part: Optimizer = ours(
            groups,
            placement=placement,
            master_weights=self.param_update_in_fp32,
            **settings_of(cls, ours, given),
            **options,
        )
        return part

    @property
    def sub_optimizers(self) -> list[Optimizer]:
        """The optimizers of the parts: of the offloaded parameters, then of the others."""
        return self._parts().all

    @property
    def cpu_optimizers(self) -> list[Optimizer]:
        """The optimizer of the offloaded parameters, if there are any."""
        parts = self._parts()
        return [part for part in parts.all if part is parts.offloaded]

    @property
    def gpu_optimizer(self) -> Optimizer | None:
        """The optimizer of the parameters whose state stays on the GPU, if there are any."""
        parts = self._parts()
        return parts.resident if parts.resident in parts.all else None

    @property
    def inner_param_to_orig_param(self) -> dict[torch.Tensor, torch.Tensor]:
        """Each parameter with itself: the parts have the original parameters."""
        return {parameter: parameter for parameter in self._parameters()}

    param_to_inner_param = inner_param_to_orig_param

    @property
    def param_to_fp32_param(self) -> dict[torch.Tensor, torch.Tensor]:
        """Each bf16 and f16 parameter that has state, with its master."""
        halves = [p for p in self._parameters() if local(p).dtype != torch.float32 and p in self.state]
        return {p: self.state[p][MASTER] for p in halves if MASTER in self.state[p]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Views of parameters, as Megatron's shards are, are taken too."""
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        for one in params:
            # Torch takes a tensor that is no leaf if it keeps its gradient.
            if isinstance(one, torch.Tensor) and not one.is_leaf and one._base is not None and one._base.is_leaf:
                one.retain_grad()
        super().add_param_group({**param_group, "params": params})
        for name in CLASSES:
            self.param_groups[-1].pop(name, None)

    # Steps.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Parameters
        ----------
        closure
            A function that computes the loss again; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.state.take_masters()
        self._sync_hdo_param_groups_to_sub_optimizers()
        # The step of the resident part returns when it is launched; the host works meanwhile.
        for part in reversed(self.sub_optimizers):
            with gradients_of(part, self.sub_optimizer_kwargs.get("grad_source")):
                part.step()
        self.state.show_masters(self._parameters())
        return loss

    def dummy_step(self) -> None:
        """Create the state of every parameter, so that a checkpoint can be loaded into it; no parameter changes."""
        self._sync_hdo_param_groups_to_sub_optimizers()
        for part in self.sub_optimizers:
            flat = part._flatten()
            part._open()
            create(part, flat, flat.parameters)
            for parameter in flat.parameters:
                for name in part.state.rooms[id(parameter)].own:
                    if part.state.is_late(name) and id(parameter) in part.state.hidden:
                        zeros = torch.zeros_like(local(parameter), dtype=torch.float32)
                        part.state[parameter][name] = state_like(parameter, zeros)
        self.state.show_masters(self._parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``grad`` and ``decoupled_grad`` of all parameters."""
        for part in self.sub_optimizers:
            part.zero_grad(set_to_none)
        for parameter in self._parameters():
            gradient = getattr(parameter, DECOUPLED, None)
            if gradient is not None and set_to_none:
                setattr(parameter, DECOUPLED, None)
            elif gradient is not None:
                gradient.zero_()

    # State.

    @property  # type: ignore[override]
    def state(self) -> HybridState:
        """The state of each parameter. The next step uses assigned values."""
        return self._state

    @state.setter
    def state(self, values: Any) -> None:
        if values is not self._state and (values or self._divided.lists):
            self._state.replace(values)

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups as in torch. The tensors are the live ones, the dicts around them are copies."""
        self.state.take_masters()
        packed = super().state_dict()
        return {**packed, "state": {key: dict(values) for key, values in packed.get("state", {}).items()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of Megatron's or of torch's optimizer of this rule, in place."""
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved = deepcopy(state_dict["param_groups"])
        for loaded, name in product(saved, CLASSES):
            loaded.pop(name, None)
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in saved] != sizes:
            counts = [len(group["params"]) for group in saved]
            raise OptionError(
                f"the state dict has groups of {counts} parameters, the optimizer of {sizes}; load it into an "
                "optimizer with the same groups"
            )
        self._load_parts(saved, state_dict["state"])
        self.param_groups = [
            {**group, **loaded, **{name: group[name] for name in OWN if name in group}}
            for group, loaded in zip(self.param_groups, saved, strict=True)
        ]
        self.state.show_masters(self._parameters())
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_parts(self, saved: list[dict[str, Any]], state: Mapping[Any, Mapping[str, Any]]) -> None:
        settings: dict[int, dict[str, Any]] = {}
        values: dict[int, dict[str, Any]] = {}
        for group, loaded in zip(self.param_groups, saved, strict=True):
            known = {name: loaded[name] for name in SETTINGS if name in loaded}
            for parameter, key in zip(group["params"], loaded["params"], strict=True):
                settings[id(parameter)] = known
                values[id(parameter)] = dict(state.get(key, {}))
        done: list[Optimizer] = []
        for part in self.sub_optimizers:
            numbers = [list(map(id, group["params"])) for group in part.param_groups]
            groups = [{**settings[of[0]], "params": of} for of in numbers]
            mine = {number: _known(part, values[number]) for of in numbers for number in of if values[number]}
            try:
                part.load_state_dict({"state": mine, "param_groups": groups})
            except BaseException as error:
                for earlier in done:
                    earlier.distrust(str(error))
                raise
            done.append(part)

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Finish a load that assigned state: f32 parameters get the values of their masters. The rest is in place."""
        self.state.take_masters()

    def _move_new_state_to_right_device(self) -> None:
        """Do the same: assigned state was copied to where it belongs."""
        self.state.take_masters()

    def _sync_hdo_param_groups_to_sub_optimizers(self) -> None:
        """Copy the settings of the groups, such as the learning rate, to the parts."""
        self._parts().follow(self.param_groups)

    @torch.no_grad()
    def update_fp32_param_by_new_param(self) -> None:
        """Set each master to its parameter's value, after the parameters were loaded."""
        for parameter in self.param_to_fp32_param:
            self.state[parameter][MASTER] = parameter.detach()

    # The rest.

    def __iter__(self) -> Iterator[Optimizer]:
        """Go through the parts: a :class:`forebay.Sleeper` and :mod:`forebay.checkpoint` work on them."""
        return iter(self.sub_optimizers)

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "state": self.state.plain(), "param_groups": self.param_groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        values = state.pop("state", None)
        super().__setstate__(state)
        if "_arguments" not in vars(self):
            self._set_up(self.defaults)
        if values:
            self.state = values

    def close(self) -> None:
        """Free rings and pinned memory of the parts."""
        for part in self._divided.all:
            part.close()


def _known(part: Optimizer, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return state without the flags that Megatron leaves in it, such as ``padding``."""
    return {name: value for name, value in values.items() if name in part.state_names or torch.is_tensor(value)}
