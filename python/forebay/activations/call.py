"""Wrappers around the calls of layers and of the model."""

from __future__ import annotations

import contextlib
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from forebay import _device
from forebay._tensors import local
from forebay.activations import frames
from forebay.activations.recompute import kv_cache as _kv_cache
from forebay.activations.recompute.call import RecomputedCall
from forebay.activations.saved import untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from forebay.activations.saved import SavedTensor, Saver, UnmanagedTensor
    from forebay.activations.switch import Switch

_CALL = "_compiled_call_impl"
"""The attribute that ``Module.__call__`` calls if it is set, outside of compiled code and of the module's hooks."""


class _Running(threading.local):
    """The layer that a thread runs under a checkpoint that :class:`Layer` controls."""

    layer: Layer | None = None


_running = _Running()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module was compiled, in place or as another that calls it."""
    call = module.__dict__.get(_CALL)
    return hasattr(module, "_orig_mod") or not (call is None or isinstance(call, Layer))


def is_offloaded(module: torch.nn.Module) -> bool:
    """Whether a :class:`Layer` wraps the calls of a module."""
    return isinstance(module.__dict__.get(_CALL), Layer)


def _first_device(values: Iterable[Any]) -> torch.device | None:
    return next((value.device for value in values if isinstance(value, torch.Tensor)), None)


def _saves_nothing() -> bool:
    """Whether nothing is saved now that can be offloaded."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return True
    # Transforms of torch.func and forward-mode differentiation, which support neither hooks nor a checkpoint.
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return True
    # Recomputed inside a backward pass, for use at once; or captured into a graph, where nothing may be waited for.
    if torch._C._current_graph_task_id() != -1:
        return True
    return _device.capturing()


class Layer:
    """Wraps the calls of one layer and offloads its saved tensors."""

    advice = (
        "call forebay.offload_activations after that checkpoint was put around the layer, or remove it and use "
        "recompute=True"
    )

    def __init__(self, saver: Saver, number: int, module: torch.nn.Module, *, keep: bool, recompute: bool) -> None:
        self.saver, self.number, self.module, self.keep, self.recompute = saver, number, module, keep, recompute
        self.inner: Callable[..., Any] = module.__dict__.get(_CALL) or module._call_impl
        self.previous = module.__dict__.get(_CALL)
        self.cache_index = _kv_cache.index_of(module)
        self.fixed: set[int] | None = None
        self.device = _device.default_device()
        # The model's own checkpointing, which may be switched off and on.
        self.switch: Switch | None = None

    def install(self) -> None:
        """Replace the module's call. Avoids ``__setattr__``, which a compiled module redirects."""
        self.module.__dict__[_CALL] = self

    def stay_installed(self) -> bool:
        """Replace the module's call again if the module was compiled since; return whether it was."""
        found = self.module.__dict__.get(_CALL)
        if found is self or found is None:
            return False
        self.inner = self.previous = found
        self.install()
        return True

    def remove(self) -> None:
        """Restore the module's call."""
        if self.module.__dict__.get(_CALL) is self:
            if self.previous is None:
                del self.module.__dict__[_CALL]
            else:
                self.module.__dict__[_CALL] = self.previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer, offloading what it saves."""
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        # A replica of DataParallel has a copy of the module's attributes, but parameters of its own.
        if (replica := frames.called_replica(self.module)) is not None:
            return replica._call_impl(*args, **kwargs)
        switched = self.switch is not None and self.switch.follow_at(self.module)
        if not self.takes(args, kwargs):
            return self.inner(*args, **kwargs)
        if frames.inside_checkpoint():
            if not switched and _running.layer is not self:
                self.warn_inside()
            return self.inner(*args, **kwargs)
        return self.call(args, kwargs)

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call saves tensors that can be offloaded. Sets the device of the call."""
        if _saves_nothing():
            return False
        device = self.device_of(args, kwargs)
        self.compute_on(device)
        return _device.is_supported(device)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the layer, recomputed or not."""
        call = self.recomputed(args, kwargs) if self.recompute and not self.keep else None
        with self.entered():
            return call.run(self.device) if call is not None else self.inner(*args, **kwargs)

    def checkpointed(
        self, function: Callable[..., Any], call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the layer under the model's own checkpoint, offloading what that saves: the layer's inputs."""
        before, _running.layer = _running.layer, self
        try:
            with self.entered():
                return function(call, *args, **kwargs)
        finally:
            _running.layer = before

    def recomputed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecomputedCall | None:
        """Return the call as a recomputed call; None if it cannot be recomputed."""
        call = RecomputedCall(self, args, kwargs)
        if not call.arguments.refused:
            return call
        self.warn_once(
            f"gets a {call.arguments.refused} that is not empty or not supported, so this call is not recomputed; pass "
            "use_cache=False if no cache is wanted"
        )
        return None

    def warn_inside(self) -> None:
        """Warn that a checkpoint around the layer leaves nothing to offload."""
        self.warn_once(
            f"runs inside a checkpoint that forebay does not control, so nothing of it is offloaded; {self.advice}"
        )

    def warn_once(self, text: str) -> None:
        """Warn about the layer, once for all layers."""
        if text not in self.saver.warnings:
            self.saver.warnings.add(text)
            warnings.warn(f"layer {self.number} {text}", stacklevel=5)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Offload what is saved inside."""
        engine = self.saver.engine(self.device)
        self.fixed = None
        engine.core.enter(self.number, engine.stream())
        with saved_tensors_hooks(self.pack, self.saver.unpack):
            yield
        engine.core.leave(engine.stream())

    def device_of(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> torch.device:
        """Return the device on which a call computes.

        The inputs decide: parameters may be on another device until the layer runs, as with FSDP2's offload to the CPU.
        Without inputs and parameters it is the device of the previous call.
        """
        given = (*args, *(kwargs or {}).values())
        found = _first_device(given) or _first_device(tree_leaves(given))
        return found or _first_device(map(local, self.module.parameters())) or self.device

    def compute_on(self, device: torch.device) -> None:
        """Set the device of the next call."""
        self.device = device
        self.saver.device_type = device.type

    @untraced
    def pack(self, tensor: torch.Tensor) -> SavedTensor | UnmanagedTensor:
        """Take a tensor that the layer saves."""
        # With recomputation only inputs are on the tape. The many tensors of a kept layer would make them look few.
        counted = not (self.keep and self.recompute)
        return self.saver.pack(tensor, may_leave=not self.keep, counted=counted, fixed=self.own)

    def own(self) -> set[int]:
        """Return the present storages of parameters and buffers. FSDP2 has gathered the parameters at this point."""
        if self.fixed is None:
            tensors = (*self.module.parameters(), *self.module.buffers())
            self.fixed = {local(tensor).untyped_storage()._cdata for tensor in tensors}
        return self.fixed


def _do_nothing(*_: Any) -> None:
    """Replace a hook in a copy of a model."""


def no_hook() -> Callable[..., None]:
    """Return what a hook is in a copy of a model."""
    return _do_nothing


@untraced
def _warn_compiled() -> None:
    warnings.warn(
        "the model was compiled as a whole after offload_activations, so its layers are not called one by one and "
        "nothing is offloaded; compile the layers instead, `for layer in layers: layer.compile()`",
        stacklevel=2,
    )


class Begins:
    """A hook that runs before the call of the model."""

    def __init__(self, layers: list[Layer], switch: Switch, begin: Callable[[], None] | None = None) -> None:
        self.layers, self.switch, self.begin = layers, switch, begin

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not offloaded.
        return (no_hook, ())

    def __call__(self, *_: Any) -> None:
        """Make sure that layers are called through their :class:`Layer`; under a budget a pass begins."""
        if torch.compiler.is_compiling():
            _warn_compiled()
            return
        for layer in self.layers:
            layer.stay_installed()
        self.switch.follow()
        if self.begin is not None:
            self.begin()


class Ends:
    """A hook that runs after the call of the model."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def __reduce__(self) -> tuple[Any, ...]:
        return (no_hook, ())

    def __call__(self, *_: Any) -> None:
        """Record that the model has returned."""
        if not torch.compiler.is_compiling():
            self.end()
