"""A layer under a budget: how one call of it is led, as its plan has it."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from forebay._budget import MEASURING
from forebay._layers import _CHECKPOINT, Layer, _inside_checkpoint, _stay_out
from forebay._saved import untraced
from forebay._select import Results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forebay._budget import Budget, Pass, Way
    from forebay._saved import Saved, Saver, Stay


def _is_managed(module: torch.nn.Module) -> bool:
    """Whether FSDP2 writes to the layer's parameters as the layer runs."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return False
    return any(isinstance(inner, FSDPModule) for inner in module.modules())


class _Call:
    """One call of a layer: what it saves goes where the plan says."""

    def __init__(self, layer: PlannedLayer, state: Pass, way: Way) -> None:
        self.layer, self.state, self.way = layer, state, way
        self.engine = layer.saver.engine(layer.device)
        self.left = 0
        self.seen: dict[int | None, bool] = {}
        self.probe = layer.budget.probe(state, layer)

    @untraced
    def pack(self, tensor: torch.Tensor) -> Saved | Stay:
        """Take a tensor that autograd saves: all that the layer saves, or the inputs of one that is recomputed."""
        saver, way = self.layer.saver, self.way
        storage = tensor.untyped_storage()._cdata if type(tensor) is torch.Tensor else None
        if self.probe is not None and storage is not None:
            self.probe.save(storage)
        if saver.stays(tensor) or storage in self.layer.own():
            return saver.stay(tensor)
        leaves = self.seen.get(storage)
        if leaves is None:
            size, leaves = tensor.untyped_storage().nbytes(), way.input_leaves
            if not way.recompute:
                leaves = self.left + size <= way.offload_bytes
                self.left += size if leaves else 0
            self.seen[storage] = leaves
            if self.state.watched:
                packed = self.state.packed
                packed[self.layer.number] = packed.get(self.layer.number, 0) + size
        return self.put(tensor, leaves)

    def put(self, tensor: torch.Tensor, leaves: bool) -> Saved | Stay:
        """Put a tensor on the tape, to leave or to stay."""
        way = self.way
        return self.layer.saver.route(tensor, (leaves, way.let_go_at, way.fetch_at))

    def take(self, tensor: torch.Tensor, leaves: bool) -> Saved | Stay:
        """Take a result that need not be recomputed."""
        saver = self.layer.saver
        if saver.stays(tensor) or tensor.untyped_storage()._cdata in self.layer.own():
            return saver.stay(tensor)
        return self.put(tensor, leaves)

    @untraced
    def unpack(self, packed: Saved | Stay) -> torch.Tensor:
        """Give a tensor back."""
        self.layer.budget.opens(self.state, self.layer.number, self.engine)
        return self.layer.saver.unpack(packed)


class PlannedLayer(Layer):
    """Stands before the call of one layer and has its plan followed."""

    def __init__(self, saver: Saver, number: int, module: torch.nn.Module, budget: Budget) -> None:
        super().__init__(saver, number, module, keep=False, recompute=True)
        self.budget = budget
        self.is_compiled = any(
            inner.__dict__.get("_compiled_call_impl") is not None or hasattr(inner, "_orig_mod")
            for inner in module.modules()
        )

    @property
    def is_managed(self) -> bool:
        """Whether FSDP2 has the layer's parameters, as it may from later on."""
        return _is_managed(self.module)

    def install(self) -> None:
        """Take the place of the module's call."""
        super().install()
        if self.previous_checkpoint is not None:
            self.module.__dict__[_CHECKPOINT] = Led(self)

    def can_recompute(self) -> bool:
        """Whether there is a way to recompute it: layers of transformers have theirs in training only."""
        return not self.has_checkpoint or self.module.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer as planned."""
        if _stay_out() or not self.is_ready(args, kwargs) or self.is_entered():
            return self.inner(*args, **kwargs)
        if _inside_checkpoint():
            self.warn_inside()
            return self.inner(*args, **kwargs)
        return self.lead(self.inner, args, kwargs, can_recompute=not self.has_checkpoint)

    def is_entered(self) -> bool:
        """Whether this thread is inside a call of it already."""
        return self.number in getattr(self.budget.local, "inside", ())

    def lead(self, call: Callable[..., Any], args: Any, kwargs: Any, *, can_recompute: bool) -> Any:
        """Call the layer, recomputed or not, with its saved tensors led where the plan says."""
        budget = self.budget
        state = budget.enter(self, args, kwargs)
        way = budget.way(state, self)
        run = _Call(self, state, way)
        with self.inside(run):
            if not (way.recompute and can_recompute):
                with run.probe or contextlib.nullcontext():
                    return call(*args, **kwargs)
            options: dict[str, Any] = {}
            if way.wanted and not self.is_compiled:
                options["context_fn"] = Results(way.wanted, run.take, self.saver.unpack, self.device).modes
            return checkpoint(call, *args, use_reentrant=False, **options, **kwargs)

    @contextlib.contextmanager
    def inside(self, run: _Call) -> Iterator[None]:
        """Lead what is saved inside."""
        budget, engine, state, number = self.budget, run.engine, run.state, self.number
        self.fixed = None
        inside = getattr(budget.local, "inside", None)
        if inside is None:
            inside = budget.local.inside = []
        engine.core.enter(number, engine.stream())
        if state.watched:
            budget.point(state, "enter", number, engine)
        inside.append(number)
        try:
            with saved_tensors_hooks(run.pack, run.unpack):
                yield
        finally:
            inside.pop()
        engine.core.leave(engine.stream())
        if state.watched:
            budget.point(state, "leave", number, engine)
        if state.stage < MEASURING:
            budget.vetted(self, run.probe)
        engine.let_go_before(number + 1)


def _nothing(*_: Any) -> None:
    """Stand where the hook is in the model that this one is a copy of."""


def _nothing_is_noted() -> Callable[..., None]:
    return _nothing


class Begins:
    """Stands before the call of the model: a pass begins there, not with its first layer."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not offloaded.
        return (_nothing_is_noted, ())

    def __call__(self, *_: Any) -> None:
        """Note it."""
        self.budget.model_begins()


def _plain() -> Callable[..., Any]:
    return functools.partial(checkpoint, use_reentrant=False)


class Led:
    """Stands where a layer of transformers looks for the function that recomputes it."""

    def __init__(self, layer: PlannedLayer) -> None:
        self.layer = layer

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not offloaded.
        return (_plain, ())

    def __call__(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Lead a call of the layer."""
        layer = self.layer
        if _stay_out() or _inside_checkpoint() or not layer.is_ready(args, kwargs) or layer.is_entered():
            return call(*args, **kwargs)
        return layer.lead(call, args, kwargs, can_recompute=True)
