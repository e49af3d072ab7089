"""One call of a layer that runs twice, the second time in the backward pass and with the same to go by.

It is torch's checkpoint, given what it leaves out. Tensors are saved wherever they are among the arguments, so that a
change in place is noticed and hooks see all of them; names of arguments are the layer's own; arguments that the layer
changes are for the second time what they were; and so is the layer, see :mod:`forebay._as_it_was`.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from forebay import _kv_cache
from forebay._as_it_was import AsItWas

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from forebay._layers import Layer

_Stop: type[Exception] = torch.utils.checkpoint._StopRecomputationError


class Arguments:
    """What a call is given: its tensors, and all else with places for them."""

    def __init__(self, given: Any, index: int | None, *, open_records: bool = True) -> None:
        kind = _kv_cache.cache_class()
        is_cache = None if kind is None else lambda one: isinstance(one, kind)
        self.leaves, self.spec = tree_flatten(given, is_leaf=is_cache)
        self.tensors: list[torch.Tensor] = []
        self.refused = ""
        """The kind of what must not be given a second time."""
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
        """Return the same once more, with these tensors."""
        leaves = [leaf.again() if isinstance(leaf, _kv_cache.CacheBefore) else leaf for leaf in self.leaves]
        for i in self.places:
            leaves[i] = next(tensors)
        for i, (kind, inner) in self.records.items():
            leaves[i] = object.__new__(kind)
            vars(leaves[i]).update(inner.again(tensors))
        return tree_unflatten(leaves, self.spec)


def _is_over() -> bool:
    """Whether everything was recomputed that the innermost checkpoint around this is asked for."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "unpack_hook" and code.co_filename == torch.utils.checkpoint.__file__:
            wanted, group = frame.f_locals.get("frame"), frame.f_locals.get("gid")
            return wanted is not None and wanted.recomp_counter[group] == len(wanted.weak_holders)
        frame = frame.f_back
    return False


class Call:
    """A call of a layer, which runs as it is the first time and as it was from then on."""

    def __init__(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Not the layer itself, which knows the engine: what waits for its backward pass must not hold that.
        self.module, self.inner, self.name = layer.module, layer.inner, f"layer {layer.number}"
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.arguments = Arguments((args, kwargs), layer.cache_index)
        self.was: AsItWas | None = None

    def run(self, device: torch.device, **options: Any) -> Any:
        """Run it, to be recomputed."""
        tensors, self.arguments.tensors = self.arguments.tensors, []
        if not any(tensor.device == device for tensor in tensors):
            # Random numbers and autocast are kept for the devices of the tensors.
            tensors.append(torch.empty(0, device=device))
        return checkpoint(self, *tensors, use_reentrant=False, **options)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run the layer, or run it again with its saved tensors."""
        if self.given is not None:
            (args, kwargs), self.given = self.given, None
            self.was = AsItWas(self.module, self.name)
            result = self.inner(*args, **kwargs)
            self.was.settle()
            return result
        assert self.was is not None
        args, kwargs = self.arguments.again(iter(tensors))
        with self.was.restored():
            try:
                return self.inner(*args, **kwargs)
            except RuntimeError as error:
                # What ends a recomputation early is an exception. TorchScript puts its own in place of it.
                if _is_over():
                    raise _Stop from error
                raise
