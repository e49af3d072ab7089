"""A layer under a budget: its calls follow the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from forebay._core import Route
from forebay.activations.budget.controller import MEASURING
from forebay.activations.call import Layer, is_compiled
from forebay.activations.recompute.replay import Results
from forebay.activations.saved import UnmanagedTensor, untraced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forebay.activations.budget.controller import Budget
    from forebay.activations.budget.passes import Pass, Way
    from forebay.activations.saved import SavedTensor, Saver

_CHECKPOINT_OPTIONS = ("use_reentrant", "context_fn", "determinism_check", "debug", "preserve_rng_state", "early_stop")
"""Arguments of torch's checkpoint itself, not of the layer."""


def _is_managed(module: torch.nn.Module) -> bool:
    """Whether FSDP2 writes to the layer's parameters as the layer runs."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return False
    return any(isinstance(inner, FSDPModule) for inner in module.modules())


class _PlannedCall:
    """One call of a layer: its saved tensors are kept or offloaded as the plan says."""

    def __init__(self, layer: PlannedLayer, state: Pass, number: int, way: Way) -> None:
        self.layer, self.state, self.number, self.way = layer, state, number, way
        self.engine = layer.saver.engine(layer.device)
        self.left = 0
        self.seen: dict[int | None, bool] = {}
        self.probe = layer.budget.probe(state, number, layer)
        leaves, stays = (Route(leaves=one, free_at=way.free_at, fetch_at=way.fetch_at) for one in (True, False))
        self.routes = {True: leaves, False: stays}

    @untraced
    def pack(self, tensor: torch.Tensor) -> SavedTensor | UnmanagedTensor:
        """Take a tensor that autograd saves: any tensor of the layer, or an input of a recomputed layer."""
        saver, way = self.layer.saver, self.way
        storage = tensor.untyped_storage()._cdata if type(tensor) is torch.Tensor else None
        if self.probe is not None and storage is not None:
            self.probe.save(storage)
        if saver.is_unmanaged(tensor) or storage in self.layer.own():
            return UnmanagedTensor(tensor)
        leaves = self.seen.get(storage)
        if leaves is None:
            size, leaves = tensor.untyped_storage().nbytes(), way.input_leaves
            if not way.recompute:
                leaves = self.left + size <= way.offload_bytes
                self.left += size if leaves else 0
            self.seen[storage] = leaves
            saved = self.put(tensor, leaves)
            if self.state.watched:
                # Masks and positions are inputs of all layers, and are counted once.
                counts = self.state.packed if saved.first or not way.recompute else self.state.shared
                counts[self.number] = counts.get(self.number, 0) + size
            return saved
        return self.put(tensor, leaves)

    def put(self, tensor: torch.Tensor, leaves: bool) -> SavedTensor:
        """Put a tensor on the tape, to leave or to stay."""
        return self.layer.saver.pack_by(self.routes[leaves], tensor, leaves=leaves)

    def pack_result(self, tensor: torch.Tensor, leaves: bool) -> SavedTensor | UnmanagedTensor:
        """Take the result of an operation that a recomputed layer saves."""
        saver = self.layer.saver
        if saver.is_unmanaged(tensor) or tensor.untyped_storage()._cdata in self.layer.own():
            return UnmanagedTensor(tensor)
        return self.put(tensor, leaves)

    @untraced
    def unpack(self, packed: SavedTensor | UnmanagedTensor) -> torch.Tensor:
        """Return a saved tensor."""
        self.layer.budget.note_use(self.state, self.number, self.engine)
        try:
            return self.layer.saver.unpack(packed)
        except RuntimeError as error:
            if self.way.recompute:
                error.add_note(
                    f"the tensor is an input of layer {self.layer.number}, which is recomputed from it; if inputs of "
                    "layers are changed in place, use budget_bytes together with recompute=False"
                )
            raise


class PlannedLayer(Layer):
    """Wraps the calls of one layer and follows its plan."""

    advice = "the plan cannot be followed; remove that checkpoint"

    def __init__(self, saver: Saver, number: int, module: torch.nn.Module, budget: Budget) -> None:
        super().__init__(saver, number, module, keep=False, recompute=True)
        self.budget = budget
        self.is_compiled = any(map(is_compiled, module.modules()))

    @property
    def is_managed(self) -> bool:
        """Whether FSDP2 manages the layer's parameters; it may be applied later."""
        return _is_managed(self.module)

    def stay_installed(self) -> bool:
        """Replace the module's call again if the module was compiled since; return whether it was."""
        compiled = super().stay_installed()
        self.is_compiled = self.is_compiled or compiled
        return compiled

    def is_entered(self) -> bool:
        """Whether this thread is already inside a call of this layer."""
        return self.number in self.budget.local.inside

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the layer as the plan says."""
        if self.is_entered():
            return self.inner(*args, **kwargs)
        budget = self.budget
        state, number = budget.enter(self, args, kwargs)
        way = budget.way(state, number)
        call = self.recomputed(args, kwargs) if way.recompute else None
        if way.recompute and call is None:
            way = state.ways[number] = dataclasses.replace(way, recompute=False, offload_bytes=math.inf)
        run = _PlannedCall(self, state, number, way)
        with self.inside(run):
            if call is None:
                with run.probe or contextlib.nullcontext():
                    return self.inner(*args, **kwargs)
            options: dict[str, Any] = {}
            if way.wanted and not self.is_compiled:
                options["context_fn"] = Results(way.wanted, run.pack_result, self.saver.unpack, self.device).modes
            return call.run(self.device, **options)

    def checkpointed(
        self, function: Callable[..., Any], call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the layer as the plan says, without the model's own checkpoint: the plan decides what is recomputed."""
        needed = any(isinstance(one, torch.Tensor) and one.requires_grad for one in args)
        if not needed and getattr(function, "keywords", {}).get("use_reentrant") is not False:
            # A reentrant checkpoint gives no gradients then, and so do we.
            return function(call, *args, **kwargs)
        return call(*args, **{name: value for name, value in kwargs.items() if name not in _CHECKPOINT_OPTIONS})

    @contextlib.contextmanager
    def inside(self, run: _PlannedCall) -> Iterator[None]:
        """Save the tensors of the call as the plan says, and take samples of a watched pass."""
        budget, engine, state, number = self.budget, run.engine, run.state, run.number
        self.fixed = None
        inside = budget.local.inside
        engine.core.enter(number, engine.stream())
        if state.watched:
            budget.sample(state, "enter", number, engine)
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
            budget.sample(state, "leave", number, engine)
        if state.stage < MEASURING:
            budget.vet(state, number, run.probe)
        engine.free_before(number + 1)
