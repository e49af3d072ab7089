"""The cache of keys and values that models of transformers pass from layer to layer.

A layer adds to it as it runs, so a call that is given one must not run again with the same. Where the layer's own part
of it was still empty, as in training, there is an empty one to run again with.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch


def cache_class() -> type | None:
    """Return what all caches of transformers are, if it is there."""
    found = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return found if isinstance(found, type) else None


def index_of(module: torch.nn.Module) -> int | None:
    """Return which part of a cache is a layer's own."""
    found = (getattr(inner, "layer_idx", None) for inner in module.modules())
    return next((number for number in found if isinstance(number, int)), None)


class _Left:
    """Stands where other layers have their parts, which are not held on to."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "a layer that is recomputed looked at another layer's keys and values in the model's cache; "
            "pass use_cache=False in training"
        )


_LEFT = _Left()


class CacheBefore:
    """A cache as it was before a layer added to it: nothing in the layer's own part."""

    def __init__(self, cache: Any, index: int) -> None:
        self.cache, self.index, self.length = copy.copy(cache), index, len(cache.layers)
        self.part = copy.copy(cache.layers[index]) if index < self.length else None
        self.cache.layers = []

    def again(self) -> Any:
        """Return one to add to."""
        cache = copy.copy(self.cache)
        cache.layers = [_LEFT] * self.length
        if self.part is not None:
            cache.layers[self.index] = copy.copy(self.part)
        return cache


def before(cache: Any, index: int | None) -> CacheBefore | None:
    """Return a cache as it is before a call; None where the call cannot be given the same again."""
    parts = getattr(cache, "layers", None)
    if type(cache).__name__ != "DynamicCache" or index is None or not isinstance(parts, list):
        return None
    if getattr(cache, "offloading", False):
        return None
    if index < len(parts):
        part = parts[index]
        if type(part).__name__ not in ("DynamicLayer", "DynamicSlidingWindowLayer") or part.keys is not None:
            return None
    return CacheBefore(cache, index)
