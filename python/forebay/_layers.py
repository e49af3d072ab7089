"""Which modules are a model's layers, and how a call of one is stepped into."""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from forebay import _kv_cache
from forebay._recompute import Call
from forebay._saved import untraced
from forebay._torch import capturing, local
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from forebay._saved import Saved, Saver, Stay

_CALL = "_compiled_call_impl"
"""The attribute through which ``Module.__call__`` can be led elsewhere, from outside compiled code and hooks."""
_CPU = torch.device("cpu")
_CHECKPOINT = "_gradient_checkpointing_func"
"""Where models of transformers keep the function that recomputes a layer."""

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""Tells which hooks are in place; before torch 2.8 there is no such function, and the callers have to tell."""


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _sharded(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost modules below the root that FSDP2 wraps, those in lists if there are any."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return []
    found: list[tuple[str, torch.nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if name and isinstance(module, FSDPModule) and not inside:
            found.append((name, module))  # type: ignore[arg-type]
    listed = [module for name, module in found if name.rpartition(".")[2].isdigit()]
    return listed or [module for _, module in found]


def find_layers(model: torch.nn.Module, layers: Any) -> list[torch.nn.Module]:
    """Return the layers that were asked for, or those that a model of the usual build has, in their order."""
    if layers is None:
        if sharded := _sharded(model):
            return sharded
        lists = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.ModuleList) and len(module)
        ]
        outermost: list[torch.nn.ModuleList] = [
            module for name, module in lists if not any(name.startswith(f"{outer}.") for outer, _ in lists if outer)
        ]
        if not outermost:
            raise OptionError(
                f"{type(model).__name__} has no recognisable layers: no module that FSDP2 wraps and no ModuleList; "
                "pass layers=[...], the modules to offload in the order in which they run, "
                "or put `with forebay.save_on_host():` around the forward pass"
            )
        largest: torch.nn.ModuleList = max(outermost, key=_count)
        # A list may have a module several times; that is one layer, called as often.
        return list(dict.fromkeys(largest))
    if isinstance(layers, str):
        try:
            layers = model.get_submodule(layers)
        except AttributeError as error:
            raise OptionError(f"invalid layers: {error}; name a ModuleList of the model, or pass modules") from error
    try:
        found = list(layers)
    except TypeError as error:
        raise OptionError(f"invalid layers: {layers!r}; pass a list of modules, or the name of a ModuleList") from error
    if not found or not all(isinstance(module, torch.nn.Module) for module in found):
        raise OptionError(f"invalid layers: {found!r}; pass a list of one or more modules")
    for module in found:
        for other in found:
            if other is not module and any(inner is module for inner in other.modules()):
                raise OptionError(
                    f"invalid layers: a {type(module).__name__} is inside a {type(other).__name__} that is listed too; "
                    "list one of them"
                )
    if len({id(module) for module in found}) != len(found):
        raise OptionError("invalid layers: a module is listed twice; list each once")
    return found


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module was compiled, in place or as another that calls it."""
    call = module.__dict__.get(_CALL)
    return hasattr(module, "_orig_mod") or not (call is None or isinstance(call, Layer))


def compiled_around(model: torch.nn.Module, layers: list[torch.nn.Module]) -> str | None:
    """Return the name of a module that is compiled with layers inside, if there is one."""
    for module in model.modules():
        if is_compiled(module) and any(inner in layers for inner in module.modules() if inner is not module):
            return "the model" if module is model else f"a {type(module).__name__}"
    return None


def _inside_checkpoint() -> bool:
    """Whether a checkpoint of torch's own has its hooks in place: ours on top of them would stop its recomputation."""
    if _top_hooks is None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
            frame = frame.f_back
        return frame is not None
    top = _top_hooks(False)
    return top is not None and getattr(top[0], "__module__", "") == checkpoint.__module__


def _device_of(values: Iterable[Any]) -> torch.device | None:
    """Return the device of the first tensor, if there is one."""
    return next((value.device for value in values if isinstance(value, torch.Tensor)), None)


def _stay_out() -> bool:
    """Whether nothing is saved now that should be offloaded."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return True
    # Transforms of torch.func and forward-mode differentiation, which have no place for hooks or a checkpoint.
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return True
    # Recomputed inside a backward pass, for use at once; or captured into a graph, where nothing may be waited for.
    if torch._C._current_graph_task_id() != -1:
        return True
    return capturing()


class Layer:
    """Stands before the call of one layer and has its saved tensors offloaded."""

    advice = (
        "call forebay.offload_activations after gradient_checkpointing_enable, or drop that checkpoint and use "
        "recompute=True"
    )

    def __init__(self, saver: Saver, number: int, module: torch.nn.Module, *, keep: bool, recompute: bool) -> None:
        self.saver, self.number, self.module, self.keep, self.recompute = saver, number, module, keep, recompute
        self.inner: Callable[..., Any] = module.__dict__.get(_CALL) or module._call_impl
        self.previous = module.__dict__.get(_CALL)
        self.cache_index = _kv_cache.index_of(module)
        self.fixed: set[int] | None = None
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU

    def install(self) -> None:
        """Take the place of the module's call. Written past ``__setattr__``, which a compiled module redirects."""
        self.module.__dict__[_CALL] = self

    def stay_installed(self) -> bool:
        """Take the place again if the module was compiled since, which puts the compiled call there; whether it was."""
        found = self.module.__dict__.get(_CALL)
        if found is self or found is None:
            return False
        self.inner = self.previous = found
        self.install()
        return True

    def remove(self) -> None:
        """Put the module's call back."""
        if self.module.__dict__.get(_CALL) is self:
            if self.previous is None:
                del self.module.__dict__[_CALL]
            else:
                self.module.__dict__[_CALL] = self.previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer, offloading what it saves."""
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        # Replicas of DataParallel come with all that the module has, but are called with parameters of their own.
        called = sys._getframe(1).f_locals.get("self")
        if called is not None and called is not self.module and getattr(called, "_is_replica", False):
            return called._call_impl(*args, **kwargs)
        if _stay_out() or not self.is_ready(args, kwargs):
            return self.inner(*args, **kwargs)
        if _inside_checkpoint():
            self.warn_inside()
            return self.inner(*args, **kwargs)
        return self.lead(args, kwargs)

    def lead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the layer, recomputed or not."""
        call = self.twice(args, kwargs) if self.recompute and not self.keep else None
        with self.entered():
            return call.run(self.device) if call is not None else self.inner(*args, **kwargs)

    def twice(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Return the call as one that can be recomputed; None where it cannot."""
        call = Call(self, args, kwargs)
        if not call.arguments.refused:
            return call
        self.say_once(
            f"is given a {call.arguments.refused} that is filled already, or that forebay does not know, so this call "
            "is not recomputed; pass use_cache=False if no cache is wanted"
        )
        return None

    def warn_inside(self) -> None:
        """Say once that a checkpoint around the layer leaves nothing to offload."""
        if not isinstance(self.module.__dict__.get(_CHECKPOINT), Recomputed):
            self.say_once(
                f"runs inside a checkpoint that forebay does not know of, so nothing of it is offloaded; {self.advice}"
            )

    def say_once(self, what: str) -> None:
        """Warn of what happens to the layer, once for all layers."""
        if what not in self.saver.said:
            self.saver.said.add(what)
            warnings.warn(f"layer {self.number} {what}", stacklevel=5)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Offload what is saved inside."""
        engine = self.saver.engine(self.device)
        self.fixed = None
        engine.core.enter(self.number, engine.stream())
        with saved_tensors_hooks(self.pack, self.saver.unpack):
            yield
        engine.core.leave(engine.stream())

    def is_ready(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
        """Find out where the layer computes; whether that is a GPU or the CPU.

        Its inputs tell: parameters may be elsewhere until the layer runs, as FSDP2 has them on the host if asked to.
        """
        given = (*args, *(kwargs or {}).values())
        device = _device_of(given) or _device_of(tree_leaves(given)) or _device_of(map(local, self.module.parameters()))
        self.device = device or self.device
        self.saver.devices = self.device.type
        return self.device.type in ("cuda", "cpu")

    @untraced
    def pack(self, tensor: torch.Tensor) -> Saved | Stay:
        """Take a tensor that the layer saves."""
        # Beside recomputation only inputs are on the tape. What a kept layer saves would make them look few.
        counted = not (self.keep and self.recompute)
        return self.saver.pack(tensor, may_leave=not self.keep, counted=counted, fixed=self.own)

    def own(self) -> set[int]:
        """Return the storages of parameters and buffers as they are now; FSDP2 has put the whole ones in place."""
        if self.fixed is None:
            tensors = (*self.module.parameters(), *self.module.buffers())
            self.fixed = {local(tensor).untyped_storage()._cdata for tensor in tensors}
        return self.fixed


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _nothing(*_: Any) -> None:
    """Stand where the hook is in the model that this one is a copy of."""


def _nothing_is_noted() -> Callable[..., None]:
    return _nothing


@untraced
def _say_compiled() -> None:
    warnings.warn(
        "the model was compiled as a whole after offload_activations, so its layers are not called one by one and "
        "nothing is offloaded; compile the layers instead, `for layer in layers: layer.compile()`",
        stacklevel=2,
    )


class Begins:
    """Stands before the call of the model."""

    def __init__(self, layers: list[Layer], begin: Callable[[], None] | None = None) -> None:
        self.layers, self.begin = layers, begin

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not offloaded.
        return (_nothing_is_noted, ())

    def __call__(self, *_: Any) -> None:
        """See to it that calls of layers come by us, and note under a budget that a pass begins."""
        if torch.compiler.is_compiling():
            _say_compiled()
            return
        for layer in self.layers:
            layer.stay_installed()
        if self.begin is not None:
            self.begin()


class Ends:
    """Stands behind the call of the model."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def __reduce__(self) -> tuple[Any, ...]:
        return (_nothing_is_noted, ())

    def __call__(self, *_: Any) -> None:
        """Note that the model has returned."""
        if not torch.compiler.is_compiling():
            self.end()


class Recomputed:
    """Stands before a checkpoint function of transformers, so that hooks are outside the checkpoint, not inside."""

    def __init__(self, function: Callable[..., Any], layers: dict[int, Layer]) -> None:
        self.function, self.layers = function, layers

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not offloaded.
        return (_same, (self.function,))

    def __call__(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Recompute a layer, offloading its inputs."""
        owner = getattr(getattr(call, "func", call), "__self__", None)
        layer = self.layers.get(id(owner))
        if layer is None or _stay_out() or _inside_checkpoint() or not layer.is_ready(args, kwargs):
            return self.function(call, *args, **kwargs)
        with layer.entered():
            return self.function(call, *args, **kwargs)


def is_checkpointed(model: torch.nn.Module) -> bool:
    """Whether a model of transformers has its gradient checkpointing switched on."""
    return any(
        getattr(module, "gradient_checkpointing", False) is True and module.__dict__.get(_CHECKPOINT) is not None
        for module in model.modules()
    )


def wrap_checkpoints(model: torch.nn.Module, layers: list[Layer]) -> list[Callable[[], None]]:
    """Stand before the checkpoint functions that a model has switched on; return what undoes it."""
    undo: list[Callable[[], None]] = []
    by_id = {id(layer.module): layer for layer in layers}
    for module in model.modules():
        function = module.__dict__.get(_CHECKPOINT)
        if function is None or isinstance(function, Recomputed) or not getattr(module, "gradient_checkpointing", False):
            continue
        module.__dict__[_CHECKPOINT] = Recomputed(function, by_id)

        def restore(module: torch.nn.Module = module, function: Any = function) -> None:
            if isinstance(module.__dict__.get(_CHECKPOINT), Recomputed):
                module.__dict__[_CHECKPOINT] = function

        undo.append(restore)
    return undo
