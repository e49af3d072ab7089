"""A layer under a budget: how one call of it is led, as its plan has it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from forebay._budget import MEASURING
from forebay._layers import Layer, is_compiled
from forebay._saved import untraced
from forebay._select import Results

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay._budget import Budget
    from forebay._passes import Pass, Way
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

    def __init__(self, layer: PlannedLayer, state: Pass, number: int, way: Way) -> None:
        self.layer, self.state, self.number, self.way = layer, state, number, way
        self.engine = layer.saver.engine(layer.device)
        self.left = 0
        self.seen: dict[int | None, bool] = {}
        self.probe = layer.budget.probe(state, number, layer)

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
            saved = self.put(tensor, leaves)
            if self.state.watched:
                # Masks and positions are inputs of all layers, and there once.
                counts = self.state.packed if saved.first or not way.recompute else self.state.shared
                counts[self.number] = counts.get(self.number, 0) + size
            return saved
        return self.put(tensor, leaves)

    def put(self, tensor: torch.Tensor, leaves: bool) -> Saved:
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
        self.layer.budget.opens(self.state, self.number, self.engine)
        try:
            return self.layer.saver.unpack(packed)
        except RuntimeError as error:
            if self.way.recompute:
                error.add_note(
                    f"it is an input of layer {self.layer.number}, which is recomputed from it; if inputs of layers "
                    "are changed in place, give budget_bytes together with recompute=False"
                )
            raise


class PlannedLayer(Layer):
    """Stands before the call of one layer and has its plan followed."""

    advice = (
        "the plan cannot be followed; drop that checkpoint, which of transformers is gradient_checkpointing_disable()"
    )

    def __init__(self, saver: Saver, number: int, module: torch.nn.Module, budget: Budget) -> None:
        super().__init__(saver, number, module, keep=False, recompute=True)
        self.budget = budget
        self.is_compiled = any(map(is_compiled, module.modules()))

    @property
    def is_managed(self) -> bool:
        """Whether FSDP2 has the layer's parameters, as it may from later on."""
        return _is_managed(self.module)

    def stay_installed(self) -> bool:
        """Take the place of the module's call again if it was compiled since; whether it was."""
        compiled = super().stay_installed()
        self.is_compiled = self.is_compiled or compiled
        return compiled

    def is_entered(self) -> bool:
        """Whether this thread is inside a call of it already."""
        return self.number in self.budget.local.inside

    def lead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the layer, recomputed or not, with its saved tensors led where the plan says."""
        if self.is_entered():
            return self.inner(*args, **kwargs)
        budget = self.budget
        state, number = budget.enter(self, args, kwargs)
        way = budget.way(state, number)
        call = self.twice(args, kwargs) if way.recompute else None
        if way.recompute and call is None:
            way = state.ways[number] = dataclasses.replace(way, recompute=False, offload_bytes=math.inf)
        run = _Call(self, state, number, way)
        with self.inside(run):
            if call is None:
                with run.probe or contextlib.nullcontext():
                    return self.inner(*args, **kwargs)
            options: dict[str, Any] = {}
            if way.wanted and not self.is_compiled:
                options["context_fn"] = Results(way.wanted, run.take, self.saver.unpack, self.device).modes
            return call.run(self.device, **options)

    @contextlib.contextmanager
    def inside(self, run: _Call) -> Iterator[None]:
        """Lead what is saved inside."""
        budget, engine, state, number = self.budget, run.engine, run.state, run.number
        self.fixed = None
        inside = budget.local.inside
        engine.core.enter(number, engine.stream())
        if state.watched:
            budget.point(state, "enter", number, engine)
        inside.append(self.number)
        state.running += 1
        try:
            with saved_tensors_hooks(run.pack, run.unpack):
                yield
        finally:
            inside.pop()
            state.running -= 1
        engine.core.leave(engine.stream())
        if state.watched:
            budget.point(state, "leave", number, engine)
        if state.stage < MEASURING:
            budget.vetted(state, number, run.probe)
        engine.let_go_before(number + 1)
