"""Saved-tensor hooks: tensors that autograd saves become numbers for the engine, and numbers become tensors again.

The engine decides, orders and waits, in Rust. This file identifies, holds and rebuilds tensors. The engine relies on
two promises of this file: a source is held until the engine reports it as freed, and the memory of a fetch is allocated
on the current stream and held until the entry is freed.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from forebay import _device
from forebay._core import Activations, Route
from forebay._tensors import storage_address
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

_Hook = TypeVar("_Hook", bound="Callable[..., Any]")

_empties: dict[torch.device, torch.Tensor] = {}

_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def untraced(hook: _Hook) -> _Hook:
    """Keep a hook out of compiled code: during tracing there are no real tensors."""
    return cast("_Hook", torch._disable_dynamo(hook))  # type: ignore[attr-defined]


def open_engine(
    device: torch.device,
    fraction: float | None,
    max_in_flight_bytes: int | None,
    pinned_budget_bytes: int | None,
    backend: str | None = None,
) -> Activations:
    """Open the engine for a device, driven as the option says."""
    name = _device.with_backend(_device.engine_name(device), backend)
    return Activations(name, fraction, max_in_flight_bytes, pinned_budget_bytes)


class UnmanagedTensor:
    """A saved tensor that the engine does not manage: small, a parameter, or on another device."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: an output that held itself through its own graph would never be freed.
        self.tensor, self.version = tensor.detach(), tensor._version

    @property
    def type(self) -> str:
        """What autograd calls a tensor of this kind."""
        return str(self.tensor.type())

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return self.tensor.shape


class SavedTensor:
    """A saved tensor on the engine's tape; it lives as long as autograd may ask for it."""

    __slots__ = (
        *("counter", "dtype", "engine", "entry", "first", "kept", "offset", "save", "shape", "start", "stride"),
        "version",
    )

    counter: torch.Tensor
    """Shares the tensor's version counter, and nothing else: see ``counter_of``."""
    first: bool
    """Whether no other tensor on the tape has the same memory."""
    kept: torch.Tensor | None
    """The tensor itself, if it stays on the device."""
    offset: int
    start: int
    """The offsets of the tensor and of the copied range, in elements of the storage."""

    def __init__(self, engine: Engine, tensor: torch.Tensor, save: int, entry: int) -> None:
        self.engine, self.save, self.entry = engine, save, entry
        self.counter, self.version = counter_of(tensor), tensor._version
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        self.kept = None

    @property
    def type(self) -> str:
        """What autograd calls a tensor of this kind."""
        return str(torch.empty(0, dtype=self.dtype, device=self.engine.device).type())

    def __del__(self) -> None:
        self.engine.release(self.save)


def counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor that shares the version counter of a tensor.

    ``detach`` shares the version counter and the memory. The result then gets other memory and keeps only the counter.
    Autograd keeps the same counter to detect changes in place, but only if there are no hooks.
    """
    empty = _empties.get(tensor.device)
    if empty is None:
        empty = _empties[tensor.device] = torch.empty(0, device=tensor.device)
    counter = tensor.detach()
    counter.data = empty
    return counter


def check_version(version: int, packed: SavedTensor | UnmanagedTensor) -> None:
    """Raise the same error as autograd if a tensor was changed between saving and use."""
    if version != packed.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{packed.type} {list(packed.shape)}] is at version {version}; expected version {packed.version} instead. "
            "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True, check_nan=False)."
        )


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of its storage that a tensor uses, as offset and length in bytes."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return start, tensor.nbytes
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, (reach + 1) * size


class Engine:
    """One device's engine, and the memory that must stay unchanged for it."""

    def __init__(self, device: torch.device, core: Activations) -> None:
        self.device, self.core = device, core
        self.held: dict[int, torch.UntypedStorage] = {}
        # While a weak reference to a storage exists, no other storage gets its identity: an entry belongs to this
        # storage, and never to a later one at its address.
        self.guards: dict[int, StorageWeakRef] = {}
        # The engine's state of an entry and the memory held for it change together, under this lock. Garbage collection
        # may release a saved tensor at any point, even while this thread has the lock.
        self.lock = threading.RLock()

    def stream(self) -> int:
        """Return torch's current stream."""
        return _device.stream_handle(self.device)

    def save(
        self, tensor: torch.Tensor, *, may_leave: bool, counted: bool, route: Route | None = None
    ) -> tuple[SavedTensor, str | None]:
        """Put a tensor on the tape, and offload it if it is chosen; a plan's route decides if there is one.

        Also returns the reason if a chosen tensor stays.
        """
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        start, length = extent(tensor)
        # If half of the storage or more is used, all of it is copied, so that its other views share the copy.
        if 2 * length >= size:
            start, length = 0, size
        with self.lock:
            answer = self.core.save(
                storage=storage._cdata,
                storage_bytes=size,
                addr=storage_address(storage),
                start_bytes=start,
                bytes=length,
                version=tensor._version,
                may_leave=may_leave,
                counted=counted,
                stream=self.stream(),
                route=route,
            )
            entry, leaves, freed = answer.entry, answer.leaves, answer.freed
            saved = SavedTensor(self, tensor, answer.save, entry)
            saved.first = answer.is_new
            if leaves:
                saved.offset = int(tensor.storage_offset())
                saved.start = answer.start_bytes // tensor.element_size()
            else:
                saved.kept = tensor.detach()
            if saved.first:
                self.guards[entry] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                if leaves and entry not in freed:
                    self.held[entry] = storage
            for gone in freed:
                self.held.pop(gone, None)
        return saved, answer.reason

    def free_before(self, layer: int) -> None:
        """Free the sources whose routes end before a layer begins."""
        with self.lock:
            for entry in self.core.free_before(layer):
                self.held.pop(entry, None)

    def load(self, saved: SavedTensor) -> torch.Tensor:
        """Return a saved tensor, fetched ahead or now."""
        with self.lock:
            stream = self.stream()
            opened = self.core.open(saved.save, stream)
            entry, is_fetched = opened.entry, not opened.is_on_device
            for wanted, length in opened.fetches:
                self.fetch(wanted, length, now=wanted == entry, stream=stream)
            if saved.kept is not None:
                return saved.kept
            if is_fetched:
                self.core.ready(entry, stream)
            tensor = torch.empty(0, dtype=saved.dtype, device=self.device)
            # Fetched memory begins where the saved range does; the source is the whole storage.
            offset = saved.offset - saved.start if is_fetched else saved.offset
            tensor.set_(self.held[entry], offset, saved.shape, saved.stride)
            if is_fetched and not opened.hold:
                del self.held[entry]
                self.core.free(entry)
            return tensor

    def fetch(self, entry: int, length: int, *, now: bool, stream: int) -> None:
        """Allocate memory for an entry and start its fetch."""
        try:
            memory = torch.empty(length, dtype=torch.uint8, device=self.device).untyped_storage()
        except torch.OutOfMemoryError:
            self.core.free(entry)
            if now:
                raise
            return  # it is tried again when it is used
        self.held[entry] = memory
        try:
            self.core.fetch(entry, storage_address(memory), length, now, stream)
        except OptionError:
            # Another thread has released the entry meanwhile: it is no longer needed.
            self.held.pop(entry, None)
            if now:
                raise

    def release(self, save: int) -> None:
        """Free the memory of a saved tensor that autograd has dropped."""
        entry = self.core.release(save)
        if entry is not None:
            self.held.pop(entry, None)
            self.guards.pop(entry, None)


class Saver:
    """Packs and unpacks for one set of options, on any number of devices."""

    def __init__(
        self, device_type: str | None, min_bytes: int, open_core: Callable[[torch.device], Activations]
    ) -> None:
        # The type of device whose tensors are offloaded; with layers, the device type of the running layer.
        self.device_type, self.min_bytes, self.open_core = device_type, min_bytes, open_core
        self.engines: dict[torch.device, Engine] = {}
        self.warned_kept = False
        # The texts of layers' warnings, each given once.
        self.warnings: set[str] = set()

    def engine(self, device: torch.device) -> Engine:
        """Return the engine of a device, opened at its first use."""
        engine = self.engines.get(device)
        if engine is None:
            engine = self.engines[device] = Engine(device, self.open_core(device))
        return engine

    def is_unmanaged(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stays off the tape: because of its type, device or size, or as a view of a parameter."""
        if type(tensor) is not torch.Tensor or tensor.device.type != self.device_type:
            return True
        if tensor.layout != torch.strided or tensor.nbytes < self.min_bytes:
            return True
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return True
        if _is_wrapped(tensor) or extent(tensor)[1] < max(self.min_bytes, 1):
            return True
        base = tensor._base
        return base is not None and type(base) is not torch.Tensor

    @untraced
    def pack(
        self,
        tensor: torch.Tensor,
        *,
        may_leave: bool = True,
        counted: bool = True,
        fixed: Callable[[], set[int]] | None = None,
    ) -> SavedTensor | UnmanagedTensor:
        """Take a tensor that autograd saves."""
        if self.is_unmanaged(tensor) or (fixed is not None and tensor.untyped_storage()._cdata in fixed()):
            return UnmanagedTensor(tensor)
        saved, reason = self.engine(tensor.device).save(tensor, may_leave=may_leave, counted=counted)
        self.warn_kept(reason)
        return saved

    def pack_by(self, route: Route, tensor: torch.Tensor, *, leaves: bool) -> SavedTensor:
        """Put a tensor on the tape, with a plan's route: it leaves the device or stays."""
        saved, reason = self.engine(tensor.device).save(tensor, may_leave=leaves, counted=True, route=route)
        self.warn_kept(reason)
        return saved

    def warn_kept(self, reason: str | None) -> None:
        """Warn once about chosen tensors that stay on the device."""
        if reason is not None and not self.warned_kept:
            self.warned_kept = True
            warnings.warn(
                f"activations stay on the GPU: {reason}; raise pinned_budget_bytes, or lower fraction",
                stacklevel=3,
            )

    @untraced
    def unpack(self, packed: SavedTensor | UnmanagedTensor) -> torch.Tensor:
        """Return a tensor; raise if it was changed in place."""
        if isinstance(packed, UnmanagedTensor):
            check_version(packed.tensor._version, packed)
            return packed.tensor
        check_version(packed.counter._version, packed)
        return packed.engine.load(packed)

    def stats(self) -> dict[str, float]:
        """Return sums over all devices; the fraction and the rates are those of the last one."""
        counts = ("stored_bytes", "fetched_bytes", "kept_bytes", "pinned_bytes", "pinned_peak_bytes", "stalls")
        found: dict[str, float] = dict.fromkeys((*counts, "stall_s", "max_in_flight_bytes"), 0)
        rates = {"fraction": 0.0, "store_gbps": 0.0, "fetch_gbps": 0.0}
        for engine in self.engines.values():
            stats = engine.core.stats()
            for name in counts:
                found[name] += getattr(stats, name)
            found["stall_s"] += stats.stall_ns / 1e9
            found["max_in_flight_bytes"] = max(found["max_in_flight_bytes"], stats.window_bytes)
            rates = {name: getattr(stats, name) for name in rates}
        return found | rates
