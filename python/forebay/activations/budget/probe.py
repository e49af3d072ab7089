"""The probe: watches the operations of one call of a layer while the first passes measure.

It measures the cost of each operation, and finds which results can be saved and whether the layer can be recomputed.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forebay._core import TensorCost
from forebay._fingerprint import Fingerprint
from forebay._tensors import is_dtensor
from forebay.activations.recompute.replay import (
    Key,
    below_autograd,
    is_scratch,
    is_seeded,
    makes_new,
    next_key,
    random_state,
    written_arguments,
)
from forebay.activations.saved import counter_of

if TYPE_CHECKING:
    from forebay._device import Clock

_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")

_BATCH_NORMS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
)
"""Operations that write to their fourth and fifth argument if the sixth is true, and do not declare it."""


class Result(NamedTuple):
    """The result of an operation, which can be saved when the layer is recomputed."""

    key: Key
    cost: TensorCost


class ProbeFigures(NamedTuple):
    """What a probe found."""

    results: list[Result]
    recompute_share: float | None
    """The share of the layer's time up to its last saved tensor; None if no time was measured."""
    operations: int


class Op:
    """An operation that was seen."""

    __slots__ = ("begin", "bytes", "counters", "end", "fits", "key", "storages")

    def __init__(self, key: Key, begin: Any, end: Any, fits: bool, outputs: list[torch.Tensor]) -> None:
        self.key, self.begin, self.end, self.fits = key, begin, end, fits
        self.bytes = sum(one.untyped_storage().nbytes() for one in outputs)
        self.storages = [one.untyped_storage()._cdata for one in outputs]
        self.counters = [(counter_of(one), one._version) for one in outputs] if fits else []


class Probe(TorchDispatchMode):
    """Watches the operations of one call of a layer.

    Parameters
    ----------
    clock
        Times the operations.
    module
        The layer.
    managed
        Whether FSDP2 writes to the layer's parameters as it runs.
    fingerprints
        Whether to detect results that are changed by kernels that torch does not know. This takes time, so it is used
        only in passes whose times are not used.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled parts of a layer as they are."""
        return True

    def __init__(self, clock: Clock, module: torch.nn.Module, *, managed: bool, fingerprints: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock, self.module, self.managed = clock, module, managed
        # Fingerprints of new results; and whether the results differ at the layer's end, as tensors on the device.
        self.fingerprints: dict[Key, list[Fingerprint]] | None = {} if fingerprints else None
        self.changed: dict[Key, list[torch.Tensor]] = {}
        self.ops: list[Op] = []
        self.counts: dict[tuple[Any, ...], int] = {}
        self.created: dict[int, StorageWeakRef] = {}
        self.saved: set[int] = set()
        self.last_save = 0
        self.begin: Any = None
        self.reason: str | None = None
        self.random: Any = None
        if not managed and any(is_dtensor(parameter) for parameter in module.parameters()):
            self.refuse("its parameters are spread over ranks")

    def __enter__(self) -> Any:
        self.begin = self.clock.mark()
        self.random = self._random()
        self.buffers = [(buffer, buffer._version) for buffer in self.module.buffers()]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for key, fingerprints in (self.fingerprints or {}).items():
            self.changed[key] = [one.differs() for one in fingerprints]
        # Fingerprints hold the results' memory.
        self.fingerprints = None
        # A state is None if NumPy was imported during the call.
        if any(a != b for a, b in zip(self._random(), self.random, strict=True) if a is not None is not b):
            self.refuse("it draws from Python's or NumPy's random numbers")
        if any(buffer._version != version for buffer, version in self.buffers):
            self.refuse("it changes its buffers")

    def _random(self) -> Any:
        numpy = sys.modules.get("numpy.random")
        state = numpy.get_state() if numpy is not None else None
        return random.getstate(), None if state is None else (state[1].tobytes(), state[2])

    def refuse(self, reason: str) -> None:
        """Record why the layer cannot be recomputed."""
        self.reason = self.reason or reason

    def save(self, storage: int) -> None:
        """Record that autograd saves a tensor of a storage."""
        self.saved.add(storage)
        self.last_save = len(self.ops)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(one, torch.Generator) for one in (*args, *kwargs.values())):
            self.refuse("it draws from a random generator of its own")
        if not self.managed:
            for where in written_arguments(func):
                one = kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
                for tensor in one if isinstance(one, (list, tuple)) else (one,):
                    if isinstance(tensor, torch.Tensor) and self._storage(tensor) not in self.created:
                        self.refuse(f"it changes a tensor in place that it did not make ({func})")
        if func in _BATCH_NORMS and args[5] and args[3] is not None:
            self.refuse("it updates running statistics")
        if getattr(func, "namespace", None) in _COMMUNICATION and (not self.managed or torch.is_grad_enabled()):
            # Each rank plans for itself, and all must communicate equally often.
            self.refuse("it communicates with other ranks")
        seeded = is_seeded(func)
        before = random_state(self.clock.device) if seeded else None
        begin = self.clock.mark()
        out = func(*args, **kwargs)
        end = self.clock.mark()
        key = next_key(self.counts, func, args)
        tensors = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        outputs = [one for one in tensors if type(one) is torch.Tensor and one.layout == torch.strided]
        here = all(one.device.type == self.clock.device.type for one in outputs)
        # Code without gradients may run differently when recomputed: FSDP2 gathers parameters only once.
        fits = here and 0 < len(outputs) == len(tensors) and makes_new(func) and torch.is_grad_enabled()
        # Operations without an input make memory for later writes, and autocast caches some casts.
        fits = fits and bool(key.kinds) and not is_scratch(func) and func is not torch.ops.aten._to_copy.default
        if seeded and random_state(self.clock.device) != before:
            # Reusing the result would skip this draw, and later draws would get other numbers.
            fits = False
        with below_autograd():
            for one in outputs:
                storage = one.untyped_storage()
                if storage._cdata in self.created:
                    fits = False  # a view, even if its schema says otherwise
                elif makes_new(func):
                    self.created[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self.ops.append(Op(key, begin, end, fits, outputs))
            if fits and self.fingerprints is not None:
                self.fingerprints[key] = [Fingerprint.of_storage(one) for one in outputs]
        return out

    def _storage(self, tensor: torch.Tensor) -> int:
        try:
            return int(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return -1

    def unchanged(self) -> set[Key]:
        """Return the operations whose results had the same bits at the layer's end; waits for the device."""
        return {key for key, changed in self.changed.items() if not any(map(bool, changed))}

    def figures(self, min_bytes: int) -> ProbeFigures:
        """Return the results that can be saved, and how much of the layer is recomputed."""
        results: list[Result] = []
        # From the layer's beginning: kernels that torch does not launch lie between operations.
        recomputed_ns = self.clock.ns(self.begin, self.ops[self.last_save - 1].end) if self.last_save else 0
        total_ns = self.clock.ns(self.begin, self.ops[-1].end) if self.ops else 0
        for op in self.ops[: self.last_save]:
            unchanged = all(counter._version == version for counter, version in op.counters)
            if op.fits and unchanged and op.bytes >= max(min_bytes, 1):
                saved = all(one in self.saved for one in op.storages)
                ns = self.clock.ns(op.begin, op.end)
                results.append(Result(op.key, TensorCost(str(op.key), bytes=op.bytes, recompute_ns=ns, saved=saved)))
        return ProbeFigures(results, recomputed_ns / total_ns if total_ns else None, len(self.ops))
