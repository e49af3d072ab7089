"""The gradient checkpointing of models of transformers, which may be switched off and on between passes.

A layer of transformers recomputes itself in its own ``__call__``, outside of ours: it calls the function that the
switch has stored in it. So these functions are wrapped. Each switch, on or off, stores new functions, and trainers
switch around generation and reference passes. So the functions are looked at again before the layers are called: by
hooks on the model and on all modules between it and the layers, some of which a framework may skip by calling
``forward`` directly; and by each layer, if all of them were skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay.activations import frames
from forebay.activations.call import no_hook

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.activations.call import Layer

_FUNCTION = "_gradient_checkpointing_func"
"""Where models of transformers keep the function that recomputes a layer."""
FLAG = "gradient_checkpointing"
"""Whether it is used."""


def has_switch(module: torch.nn.Module) -> bool:
    """Whether a module recomputes, itself or its layers, if it is told to."""
    return isinstance(getattr(module, FLAG, None), bool)


def is_on(module: torch.nn.Module) -> bool:
    """Whether a module that has the switch is told to recompute."""
    return getattr(module, FLAG, False) is True


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class OffloadedCheckpoint:
    """Wraps a checkpoint function of transformers, so that hooks are outside the checkpoint, not inside."""

    def __init__(self, function: Callable[..., Any], layers: dict[int, Layer]) -> None:
        self.function, self.layers = function, layers

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not offloaded.
        return (_same, (self.function,))

    def __call__(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a layer under its checkpoint, or as a plan says."""
        if torch.compiler.is_compiling():
            return self.function(call, *args, **kwargs)
        owner = getattr(getattr(call, "func", call), "__self__", None)
        layer = self.layers.get(id(owner))
        if layer is None or not layer.takes(args, kwargs) or frames.inside_checkpoint():
            return self.function(call, *args, **kwargs)
        return layer.checkpointed(self.innermost(), call, args, kwargs)

    def innermost(self) -> Callable[..., Any]:
        """Return the model's own function."""
        return self.function.innermost() if isinstance(self.function, OffloadedCheckpoint) else self.function

    def is_of(self, layers: dict[int, Layer]) -> bool:
        """Whether this wrapper, or one inside it, belongs to these layers."""
        inner = self.function
        return self.layers is layers or (isinstance(inner, OffloadedCheckpoint) and inner.is_of(layers))

    def without(self, layers: dict[int, Layer]) -> Callable[..., Any]:
        """Return the function without the wrapper of these layers; those of other layers stay."""
        if isinstance(self.function, OffloadedCheckpoint):
            self.function = self.function.without(layers)
        return self.function if self.layers is layers else self


class Follows:
    """A hook that runs before the call of a module between the model and its layers."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not offloaded.
        return (no_hook, ())

    def __call__(self, *_: Any) -> None:
        """Wrap checkpoint functions that were replaced."""
        if not torch.compiler.is_compiling():
            self.switch.follow()


class Switch:
    """Keeps the checkpoint functions of a model wrapped, however often they are replaced."""

    def __init__(self, model: torch.nn.Module, layers: list[Layer]) -> None:
        self.layers = {id(layer.module): layer for layer in layers}
        found = dict.fromkeys((*model.modules(), *(layer.module for layer in layers)))
        # What is inside a layer recomputes parts of the layer. That is the layer's own affair.
        inside = {inner for layer in layers for inner in layer.module.modules() if inner is not layer.module}
        outside = [module for module in found if module not in inside]
        self.holders = [module for module in outside if has_switch(module)]
        self.around = [module for module in outside if module is not model and self._is_around(module)]
        self.hooks: list[Any] = []

    def _is_around(self, module: torch.nn.Module) -> bool:
        """Whether a module has layers inside and may be called."""
        if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.jit.ScriptModule)):
            return False
        return any(inner is not module and id(inner) in self.layers for inner in module.modules())

    def install(self) -> None:
        """Wrap the functions that there are, and follow the switch from now on."""
        for layer in self.layers.values():
            layer.switch = self
        if self.holders:
            self.hooks = [module.register_forward_pre_hook(Follows(self), prepend=True) for module in self.around]
        self.follow()

    def follow(self) -> None:
        """Wrap all functions that were replaced since."""
        for module in self.holders:
            if self._is_new(module):
                module.__dict__[_FUNCTION] = OffloadedCheckpoint(module.__dict__[_FUNCTION], self.layers)

    def follow_at(self, module: torch.nn.Module) -> bool:
        """Do the same if the function of this module was replaced; return whether it is wrapped since."""
        if not self._is_new(module):
            return False
        self.follow()
        return not self._is_new(module)

    def _is_new(self, module: torch.nn.Module) -> bool:
        function = module.__dict__.get(_FUNCTION)
        return not (function is None or (isinstance(function, OffloadedCheckpoint) and function.is_of(self.layers)))

    def remove(self) -> None:
        """Restore the functions that are in force now, and follow no more."""
        for hook in self.hooks:
            hook.remove()
        for module in self.holders:
            function = module.__dict__.get(_FUNCTION)
            if isinstance(function, OffloadedCheckpoint):
                module.__dict__[_FUNCTION] = function.without(self.layers)
        self.holders, self.around, self.hooks = [], [], []
        # A wrapper that someone has stored elsewhere does nothing from now on.
        self.layers.clear()
