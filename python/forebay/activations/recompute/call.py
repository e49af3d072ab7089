"""One call of a layer that runs twice: again in the backward pass, with the same arguments and settings.

It is torch's checkpoint with additions:

- Tensors anywhere among the arguments are saved, so that a change in place is detected and hooks see all of them.
- Arguments may have any name.
- The second run gets the arguments, caches included, as they were before the first run.
- The layer has the settings of the first run, see :mod:`forebay.activations.recompute.settings`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from forebay.activations import frames
from forebay.activations.recompute import kv_cache as _kv_cache
from forebay.activations.recompute.settings import LayerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.activations.call import Layer

_Stop: type[Exception] = torch.utils.checkpoint._StopRecomputationError


class Arguments:
    """The arguments of a call: its tensors, and everything else with places for them."""

    def __init__(self, given: Any, index: int | None, *, open_records: bool = True) -> None:
        kind = _kv_cache.cache_class()
        is_cache = None if kind is None else lambda one: isinstance(one, kind)
        self.leaves, self.spec = tree_flatten(given, is_leaf=is_cache)
        self.tensors: list[torch.Tensor] = []
        self.refused = ""
        """The type of an argument that cannot be passed a second time."""
        self.places: list[int] = []
        self.records: dict[int, tuple[type, Arguments]] = {}
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                self.places.append(i)
                self.tensors.append(leaf)
                self.leaves[i] = None
            elif is_cache is not None and is_cache(leaf):
                self.leaves[i] = _kv_cache.before(leaf, index)
                if self.leaves[i] is None:
                    self.refused = type(leaf).__name__
        if open_records:
            for i, leaf in enumerate(self.leaves):
                if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and hasattr(leaf, "__dict__"):
                    inner = Arguments(dict(vars(leaf)), index, open_records=False)
                    self.records[i] = (type(leaf), inner)
                    self.tensors += inner.tensors
                    self.refused = self.refused or inner.refused
                    self.leaves[i], inner.tensors = None, []

    def again(self, tensors: Iterator[torch.Tensor]) -> Any:
        """Return the same arguments again, with these tensors."""
        leaves = [leaf.again() if isinstance(leaf, _kv_cache.CacheBefore) else leaf for leaf in self.leaves]
        for i in self.places:
            leaves[i] = next(tensors)
        for i, (kind, inner) in self.records.items():
            leaves[i] = object.__new__(kind)
            vars(leaves[i]).update(inner.again(tensors))
        return tree_unflatten(leaves, self.spec)


class RecomputedCall:
    """A call of a layer, to run once in the forward pass and again, with the same settings, from saved tensors."""

    def __init__(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Not the layer itself, which refers to the engine: a graph that waits for backward must not hold the engine.
        self.module, self.inner, self.name = layer.module, layer.inner, f"layer {layer.number}"
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.arguments = Arguments((args, kwargs), layer.cache_index)
        self.settings: LayerSettings | None = None

    def run(self, device: torch.device, **options: Any) -> Any:
        """Run the call under a checkpoint, so that it is recomputed in the backward pass."""
        tensors, self.arguments.tensors = self.arguments.tensors, []
        if not any(tensor.device == device for tensor in tensors):
            # torch restores random numbers and autocast for the devices of the tensors.
            tensors.append(torch.empty(0, device=device))
        return checkpoint(self, *tensors, use_reentrant=False, **options)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run the layer, or run it again with its saved tensors."""
        if self.given is not None:
            (args, kwargs), self.given = self.given, None
            self.settings = LayerSettings(self.module, self.name)
            result = self.inner(*args, **kwargs)
            self.settings.settle()
            return result
        assert self.settings is not None
        args, kwargs = self.arguments.again(iter(tensors))
        with self.settings.restored():
            try:
                return self.inner(*args, **kwargs)
            except RuntimeError as error:
                # torch ends a recomputation early by an exception. TorchScript replaces it by its own.
                if frames.recomputation_is_complete():
                    raise _Stop from error
                raise
