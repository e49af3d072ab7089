"""The state of one moment, for a save that goes on beside training.

Optimizer state in pinned memory is not copied here: the engine keeps it as it is, page by page, until it is written
(see ``crates/engine/src/checkpoint/pages.rs``). Everything else is copied at once: parameters, buffers, counters.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import traceback
import weakref
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core
from forebay._torch import local, state_like, stream_handle
from forebay.optim import AdamW

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL_BYTES = 64 << 10
"""Tensors of the host that have less are copied one by one."""

_copies: dict[tuple[int, str], _core.HostCopies] = {}
"""For each device, where its tensors are copied to. A forked child does not have its parent's."""
_under_way: weakref.WeakSet[Snapshot] = weakref.WeakSet()
_live: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Snapshot]] = weakref.WeakKeyDictionary()
"""For each optimizer that had to wait once: what it has to wait for before it changes its parameters."""


class Snapshot:
    """Nested state as it is now.

    Parameters
    ----------
    state
        The state, as DCP takes it.
    optimizers
        The optimizers whose state is part of it.
    budget_bytes
        The most host memory that copies may take; None for as much as they need, as far as there is memory.
    """

    def __init__(
        self, state: dict[str, Any], optimizers: list[torch.optim.Optimizer], budget_bytes: int | None
    ) -> None:
        self.optimizers = optimizers
        # Parameters that the budget did not allow to copy: written first, and a step waits for that.
        self.live: list[torch.Tensor] = []
        self.live_written = threading.Event()
        self.waits, self.waited_s = 0, 0.0
        self.kept: _core.Snapshot | None = None
        engines = [
            one._engine
            for one in optimizers
            if isinstance(one, AdamW) and one._engine is not None and one._stores and not one._closed
        ]
        pinned = _pinned(optimizers)
        others = _leaves(state, pinned)
        room = _room() if budget_bytes is None else budget_bytes
        replaced = self._copy(others, room)
        room = max(room - sum(local(value).nbytes for value in replaced.values()), 0)
        self.state = _rebuilt(state, replaced)
        try:
            # One for all engines, so that each finds room as long as there is any.
            self.kept = _core.Snapshot(list(dict.fromkeys(engines)), room)
            _under_way.add(self)
            if self.live:
                self._hold_steps()
            else:
                self.live_written.set()
        except BaseException:
            self.finish()
            raise

    def _hold_steps(self) -> None:
        for one in self.optimizers:
            # Never removed: that would be by another thread, maybe while a step is going through its hooks.
            if one not in _live:
                one.register_step_pre_hook(_wait_for_live)
            _live[one] = weakref.ref(self)

    def wait_for_live(self) -> None:
        """Wait until parameters that were not copied are written."""
        if not self.live_written.is_set():
            start = time.perf_counter()
            self.live_written.wait()
            self.waits, self.waited_s = self.waits + 1, self.waited_s + time.perf_counter() - start

    def _copy(self, tensors: list[torch.Tensor], room: int) -> dict[int, torch.Tensor]:
        replaced: dict[int, torch.Tensor] = {}
        together: dict[torch.device, list[torch.Tensor]] = {}
        # Only a step changes these; of anything else nobody knows when it changes.
        stepped = {
            local(parameter).data_ptr()
            for one in self.optimizers
            for group in one.param_groups
            for parameter in group["params"]
        }
        for tensor in tensors:
            inner = local(tensor).detach()
            if room < inner.nbytes and inner.data_ptr() in stepped:
                self.live.append(tensor)
                continue
            room -= inner.nbytes
            on_host = inner.device.type == "cpu"
            # Bytes alone do not say that torch conjugates or negates them as it reads.
            plain = inner.is_contiguous() and not inner.is_conj() and not inner.is_neg()
            if plain and (inner.device.type == "cuda" or (on_host and inner.nbytes >= SMALL_BYTES)):
                together.setdefault(inner.device, []).append(tensor)
            else:
                replaced[id(tensor)] = state_like(tensor, inner.to("cpu", copy=True))
        for device, found in together.items():
            for tensor, data in zip(found, _to_host(device, [local(tensor) for tensor in found]), strict=True):
                replaced[id(tensor)] = state_like(tensor, data)
        return replaced

    def copy_ahead(self, threads: int, bytes_per_s: float | None) -> None:
        """Copy pages aside in the background, before the next step comes."""
        if self.kept is not None:
            self.kept.copy_ahead(threads, bytes_per_s)

    def stats(self) -> dict[str, float | int]:
        """Return what it cost so far."""
        copied, taken, stalls, stall_ns, pauses = (0,) * 5 if self.kept is None else self.kept.stats()
        return {
            "copied_bytes": copied,
            "copy_memory_bytes": taken,
            "stalls": stalls + self.waits,
            "stall_s": stall_ns / 1e9 + self.waited_s,
            "pauses": pauses,
        }

    def finish(self) -> None:
        """Keep nothing any longer."""
        self.live_written.set()
        if self.kept is not None:
            self.kept.finish()
        # With these goes the memory of the copies.
        self.kept, self.live, self.state = None, [], {}


def _wait_for_live(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    kept = _live.get(optimizer)
    snapshot = None if kept is None else kept()
    if snapshot is not None:
        snapshot.wait_for_live()


def release_copies() -> None:
    """Give back what is kept for the copies of the next snapshot."""
    _copies.clear()
    _core.release_copies()


def wait_for_live() -> None:
    """Return when no save under way reads a model's own memory any more: before that memory goes elsewhere."""
    for snapshot in list(_under_way):
        snapshot.live_written.wait()


def wait_before_load() -> None:
    """Return when parameters and state may be written from here, as far as a save under way is concerned."""
    wait_for_live()
    for optimizer in list(AdamW.alive):
        optimizer._protect()


def _room() -> int:
    """Return how much memory copies may take by default: three quarters of what is available, or theirs already."""
    ours = sum(copies.bytes() for (process, _), copies in _copies.items() if process == os.getpid())
    return int((_core.host_memory()[1] + _core.kept_copy_bytes() + ours) * 0.75)


def _pinned(optimizers: list[torch.optim.Optimizer]) -> set[int]:
    """Return the addresses of state that the engine keeps by itself: all but the counters.

    And but for what lies in another order than it is written in: putting it in order would read it behind the engine's
    back.
    """
    return {
        local(value).data_ptr()
        for one in optimizers
        if isinstance(one, AdamW) and one._stores
        for parameter, state in one.state.items()
        if one._homes.get(id(parameter), (-1, 0))[0] >= 0
        for kind, value in state.items()
        if kind != "step" and local(value).numel() and local(value).is_contiguous()
    }


def _leaves(value: Any, pinned: set[int]) -> list[torch.Tensor]:
    """Return the tensors in nested state that are not pinned."""
    if isinstance(value, torch.Tensor):
        return [] if local(value).data_ptr() in pinned and local(value).numel() else [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item, pinned)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item, pinned)]
    return []


def _rebuilt(value: Any, replaced: dict[int, torch.Tensor]) -> Any:
    """Return nested state with some tensors replaced, and with nothing that later changes could reach."""
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, dict):
        return {key: _rebuilt(item, replaced) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(item, replaced) for item in value)
    return copy.deepcopy(value)


def _to_host(device: torch.device, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors of one device into pinned memory, at the speed of the wire."""
    name = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
    key = (os.getpid(), name)
    if key not in _copies:
        _copies[key] = _core.HostCopies(name)
    addresses, sizes = [tensor.data_ptr() for tensor in tensors], [tensor.nbytes for tensor in tensors]
    views = _copies[key].fill(addresses, sizes, stream_handle(device))
    return [
        torch.frombuffer(view, dtype=tensor.dtype).view(tensor.shape)
        if tensor.numel()
        else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for view, tensor in zip(views, tensors, strict=True)
    ]


class Handle:
    """A save under way.

    Parameters
    ----------
    snapshot
        What is saved.
    work
        Writes and commits it.
    total_bytes
        How much there is to write.
    moved
        Counts the bytes written.
    """

    def __init__(self, snapshot: Snapshot, work: Callable[[], None], total_bytes: int, moved: _core.Moved) -> None:
        self._snapshot = snapshot
        self._total_bytes = total_bytes
        self._moved = moved
        self._error: BaseException | None = None
        self._told = False
        self._stats: dict[str, float | int] = {}
        self._done = threading.Event()
        self._start = time.perf_counter()
        self._end: float | None = None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                _forget_frames(error)
                self._error = error
            finally:
                self._stats = snapshot.stats()
                self._end = time.perf_counter()
                snapshot.finish()
                self._done.set()

        # Not a daemon: at exit Python waits until the save is complete.
        self._thread = threading.Thread(target=run, name="forebay-save")
        self._thread.start()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._done.is_set()

    def seconds(self) -> float:
        """Return how long the save has taken so far, or took in all."""
        return (self._end or time.perf_counter()) - self._start

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete; raise what went wrong.

        Parameters
        ----------
        timeout
            Seconds to wait at most; then a ``TimeoutError``.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the save has not ended after {timeout} s: {self.progress()}")
        self._thread.join()
        self.raise_untold(again=True)

    def has_untold(self) -> bool:
        """Whether something went wrong that has not been raised yet."""
        return self._error is not None and not self._told

    def raise_untold(self, *, again: bool = False) -> None:
        """Raise what went wrong, unless it has been raised before."""
        if self._error is not None and (again or not self._told):
            self._told = True
            raise self._error

    def progress(self) -> dict[str, float | int]:
        """Return how far it is: bytes written and to write, and what it costs.

        ``copied_bytes`` were copied aside, into ``copy_memory_bytes`` of memory. Steps waited for the writer ``stalls``
        times, ``stall_s`` in all, and the writer gave way to steps ``pauses`` times.
        """
        stats = self._stats or self._snapshot.stats()
        return {"written_bytes": self._moved.bytes(), "total_bytes": self._total_bytes, **stats}


def _forget_frames(error: BaseException | None) -> None:
    """Drop the local variables of an error that is kept: the whole state hangs on them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
