"""The cache of keys and values that models of transformers pass from layer to layer.

A layer adds to the cache when it runs, so its call cannot be repeated with the same cache. If the layer's own part was
empty, as in training, the repeated call gets a cache in which that part is empty again. If not, the call is not
recomputed.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch


def cache_class() -> type | None:
    """Return the base class of transformers' caches, if transformers is imported."""
    found = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return found if isinstance(found, type) else None


def index_of(module: torch.nn.Module) -> int | None:
    """Return the number of a layer's own part of the cache."""
    found = (getattr(inner, "layer_idx", None) for inner in module.modules())
    return next((number for number in found if isinstance(number, int)), None)


class _OtherLayer:
    """Replaces another layer's part of the cache, which is not kept for recomputation."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "a recomputed layer read another layer's keys and values from the model's cache; "
            "pass use_cache=False in training"
        )


_OTHER_LAYER = _OtherLayer()


class CacheBefore:
    """A cache as it was before a layer added to it: the layer's own part is empty."""

    def __init__(self, cache: Any, index: int) -> None:
        self.cache, self.index, self.length = copy.copy(cache), index, len(cache.layers)
        self.part = copy.copy(cache.layers[index]) if index < self.length else None
        self.cache.layers = []

    def again(self) -> Any:
        """Return a cache that the layer can add to."""
        cache = copy.copy(self.cache)
        cache.layers = [_OTHER_LAYER] * self.length
        if self.part is not None:
            cache.layers[self.index] = copy.copy(self.part)
        return cache


def before(cache: Any, index: int | None) -> CacheBefore | None:
    """Return a cache as it is before a call; None if the call cannot be repeated with the same cache."""
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
