"""Saved-tensor hooks: what autograd saves becomes numbers for the engine, and numbers become tensors again.

Everything that is decided, ordered or waited for is decided, ordered and waited for in Rust; here tensors are told
apart, held and rebuilt. The engine trusts two promises of this file: a source is held until the engine names it, and
the memory of a fetch is allocated on the current stream and held until the entry is let go.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from forebay._core import Activations
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

ON_DEVICE, FETCH_NOW = 0, 2
"""What the engine says about an entry's place; 1 is in between: on its way, or arrived."""

_Hook = TypeVar("_Hook", bound="Callable[..., Any]")

_empties: dict[torch.device, torch.Tensor] = {}

_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def untraced(hook: _Hook) -> _Hook:
    """Mark a hook: compiled code inside a layer would have it traced, and what it looks at is not there then."""
    return cast("_Hook", torch._disable_dynamo(hook))  # type: ignore[attr-defined]


def open_engine(
    device: torch.device, fraction: float | None, max_in_flight_bytes: int | None, pinned_budget_bytes: int | None
) -> Activations:
    """Open the engine for a device."""
    name = "cpu" if device.type == "cpu" else f"cuda:{device.index}"
    return Activations(name, fraction, max_in_flight_bytes, pinned_budget_bytes)


class Stay:
    """A saved tensor that is not the engine's business: small, a parameter, on another device."""

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


class Saved:
    """A saved tensor on the engine's tape; it lives as long as autograd may ask for it."""

    __slots__ = (
        *("counter", "dtype", "engine", "entry", "first", "kept", "offset", "save", "shape", "start", "stride"),
        "version",
    )

    counter: torch.Tensor
    """Shares the tensor's version counter, and nothing else: see ``counter_of``."""
    first: bool
    """Whether nothing else on the tape is of the same memory."""
    kept: torch.Tensor | None
    """The tensor itself, where it stays on the device."""
    offset: int
    start: int
    """Where it begins, and where the range begins that travels, in elements of its storage."""

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
    """Return an empty tensor whose ``_version`` is that of a tensor, now and later.

    ``detach`` shares the version counter and the memory; giving the result other memory leaves it the counter alone.
    Autograd keeps the same counter to notice changes in place, but only where there are no hooks.
    """
    empty = _empties.get(tensor.device)
    if empty is None:
        empty = _empties[tensor.device] = torch.empty(0, device=tensor.device)
    counter = tensor.detach()
    counter.data = empty
    return counter


def check_version(version: int, packed: Saved | Stay) -> None:
    """Raise what autograd raises for a tensor that was changed between saving and use."""
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
    """One device's engine, with the memory that it must find unchanged."""

    def __init__(self, device: torch.device, core: Activations) -> None:
        self.device, self.core = device, core
        self.held: dict[int, torch.UntypedStorage] = {}
        # A storage's identity cannot be used again while a weak reference to it exists, so that an entry is found by
        # this very storage and by no later one at its address.
        self.guards: dict[int, StorageWeakRef] = {}
        # What the engine says about an entry and what is held of it change together. A collected tensor may release its
        # own anywhere, also while this thread has the lock.
        self.lock = threading.RLock()

    def stream(self) -> int:
        """Return torch's current stream."""
        if self.device.type == "cpu":
            return 0
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))

    def save(
        self, tensor: torch.Tensor, *, may_leave: bool, counted: bool, route: tuple[bool, int, int] | None = None
    ) -> tuple[Saved, str | None]:
        """Put a tensor on the tape, and on its way to the host if it is chosen, by a plan's route if there is one."""
        storage = tensor.untyped_storage()
        start, length = extent(tensor)
        # All of a storage travels if most of it is used, so that its other views find it; else the part that is.
        if 2 * length >= storage.nbytes():
            start, length = 0, storage.nbytes()
        address, size, version = storage.data_ptr(), storage.nbytes(), tensor._version
        with self.lock:
            save, entry, start, new, leaves, dropped, reason = self.core.save(
                storage._cdata, size, address, start, length, version, may_leave, counted, self.stream(), route
            )
            saved = Saved(self, tensor, save, entry)
            saved.first = new
            if leaves:
                saved.offset, saved.start = int(tensor.storage_offset()), start // tensor.element_size()
            else:
                saved.kept = tensor.detach()
            if new:
                self.guards[entry] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                if leaves and entry not in dropped:
                    self.held[entry] = storage
            for entry in dropped:
                self.held.pop(entry, None)
        return saved, reason

    def let_go_before(self, layer: int) -> None:
        """Let go of the sources whose routes say so before a layer begins."""
        with self.lock:
            for entry in self.core.let_go_before(layer):
                self.held.pop(entry, None)

    def load(self, saved: Saved) -> torch.Tensor:
        """Return a saved tensor, fetched ahead or now."""
        with self.lock:
            stream = self.stream()
            entry, place, hold, wanted = self.core.open(saved.save, stream)
            for wanted_entry, length in wanted:
                self.fetch(wanted_entry, length, wanted_entry == entry, stream)
            if saved.kept is not None:
                return saved.kept
            if place != ON_DEVICE:
                self.core.ready(entry, stream)
            tensor = torch.empty(0, dtype=saved.dtype, device=self.device)
            # What was fetched begins where the range that was saved does; the source is the whole storage still.
            offset = saved.offset if place == ON_DEVICE else saved.offset - saved.start
            tensor.set_(self.held[entry], offset, saved.shape, saved.stride)
            if place != ON_DEVICE and not hold:
                del self.held[entry]
                self.core.let_go(entry)
            return tensor

    def fetch(self, entry: int, length: int, now: bool, stream: int) -> None:
        """Allocate memory for an entry and have it filled."""
        try:
            memory = torch.empty(length, dtype=torch.uint8, device=self.device).untyped_storage()
        except torch.OutOfMemoryError:
            self.core.let_go(entry)
            if now:
                raise
            return  # there is time to try again when it is wanted
        self.held[entry] = memory
        try:
            self.core.fetch(entry, memory.data_ptr(), length, now, stream)
        except OptionError:
            # Released by another thread meanwhile: nobody wants it.
            self.held.pop(entry, None)
            if now:
                raise

    def release(self, save: int) -> None:
        """Let go of what a saved tensor had, now that it is gone."""
        entry = self.core.release(save)
        if entry is not None:
            self.held.pop(entry, None)
            self.guards.pop(entry, None)


class Saver:
    """Packs and unpacks for one set of options, on as many devices as tensors are found on."""

    def __init__(self, devices: str | None, min_bytes: int, open_core: Callable[[torch.device], Activations]) -> None:
        # The type of device whose tensors are offloaded; that of the layers, where there are any.
        self.devices, self.min_bytes, self.open_core = devices, min_bytes, open_core
        self.engines: dict[torch.device, Engine] = {}
        self.warned = False
        self.said: set[str] = set()

    def engine(self, device: torch.device) -> Engine:
        """Return the engine of a device, opened at its first use."""
        engine = self.engines.get(device)
        if engine is None:
            engine = self.engines[device] = Engine(device, self.open_core(device))
        return engine

    def stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is none to put on the tape; parameters and their views among them."""
        if type(tensor) is not torch.Tensor or tensor.device.type != self.devices or tensor.layout != torch.strided:
            return True
        if tensor.nbytes < self.min_bytes or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
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
    ) -> Saved | Stay:
        """Take a tensor that autograd saves."""
        if self.stays(tensor) or (fixed is not None and tensor.untyped_storage()._cdata in fixed()):
            return Stay(tensor)
        saved, reason = self.engine(tensor.device).save(tensor, may_leave=may_leave, counted=counted)
        self.warn_kept(reason)
        return saved

    def route(self, tensor: torch.Tensor, route: tuple[bool, int, int]) -> Saved:
        """Take a tensor that does not stay out of it, and have it go by a plan's route."""
        saved, reason = self.engine(tensor.device).save(tensor, may_leave=route[0], counted=True, route=route)
        self.warn_kept(reason)
        return saved

    def stay(self, tensor: torch.Tensor) -> Stay:
        """Take a tensor that stays where it is."""
        return Stay(tensor)

    def warn_kept(self, reason: str | None) -> None:
        """Say once why tensors stay that were to leave."""
        if reason is not None and not self.warned:
            self.warned = True
            warnings.warn(
                f"forebay keeps activations on the GPU: {reason}; raise pinned_budget_bytes, or lower fraction",
                stacklevel=3,
            )

    @untraced
    def unpack(self, packed: Saved | Stay) -> torch.Tensor:
        """Give it back, unchanged or not at all."""
        if isinstance(packed, Stay):
            check_version(packed.tensor._version, packed)
            return packed.tensor
        check_version(packed.counter._version, packed)
        return packed.engine.load(packed)

    def stats(self) -> dict[str, float]:
        """Return sums over all devices."""
        counts = ("stored_bytes", "fetched_bytes", "kept_bytes", "pinned_bytes", "pinned_peak_bytes", "stalls")
        found: dict[str, float] = dict.fromkeys((*counts, "stall_s", "max_in_flight_bytes"), 0)
        rates = dict.fromkeys(("fraction", "store_gbps", "fetch_gbps"), 0.0)
        for engine in self.engines.values():
            numbers, floats = engine.core.stats()
            for name, number in zip(counts, numbers, strict=False):
                found[name] += number
            found["stall_s"] += numbers[6] / 1e9
            found["max_in_flight_bytes"] = max(found["max_in_flight_bytes"], numbers[7])
            rates = dict(zip(rates, floats, strict=True))
        return found | rates
