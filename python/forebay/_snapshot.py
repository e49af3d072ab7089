"""The state of one moment, for a save that goes on beside training.

Optimizer state in pinned memory is not copied here: the engine keeps it as it is, page by page, until it is written
(see ``crates/engine/src/checkpoint/pages.rs``). Everything else is copied at once, as far as the budget goes:
parameters, buffers, counters. What it does not reach is read where it lies (``_live.py``).
"""

from __future__ import annotations

import copy
import os
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from forebay import _core
from forebay._live import Live, wait_for_live
from forebay._torch import local, state_like, stream_handle
from forebay.optim import AdamW

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL_BYTES = 64 << 10
"""Tensors of the host that have less are copied one by one."""

_copies: dict[tuple[int, str], _core.HostCopies] = {}
"""For each device, where the next snapshot copies its tensors to. A forked child does not have its parent's."""


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
        self.state: dict[str, Any] = {}
        self.kept: _core.Snapshot | None = None
        self.live = Live({}, {}, [])
        self.copied_bytes = 0
        self._is_loose = False
        self._slabs: dict[tuple[int, str], _core.HostCopies] = {}
        engines = [
            one._engine
            for one in optimizers
            if isinstance(one, AdamW) and one._engine is not None and one._stores and not one._closed
        ]
        room = _room() if budget_bytes is None else budget_bytes
        try:
            others = _leaves(state, _pinned(optimizers))
            # With room for all of them it does not matter whose they are.
            is_short = sum(local(tensor).nbytes for tensor in others) > room
            stepped = _stepped(optimizers) if is_short else {}
            others.sort(key=lambda tensor: is_short and local(tensor).data_ptr() in stepped)
            replaced = self._copy(others, room)
            self.state = _rebuilt(state, replaced)
            if uncopied := {id(tensor) for tensor in others} - replaced.keys():
                named, _ = flatten_state_dict(self.state)
                tensors = {name: value for name, value in named.items() if id(value) in uncopied}
                self._is_loose = any(local(tensor).data_ptr() not in stepped for tensor in tensors.values())
                self.live = Live(tensors, stepped, optimizers)
            # One for all engines, so that each finds room as long as there is any.
            self.kept = _core.Snapshot(list(dict.fromkeys(engines)), room - self.copied_bytes)
        except BaseException:
            self.finish()
            raise

    def _copy(self, tensors: list[torch.Tensor], room: int) -> dict[int, torch.Tensor]:
        """Return copies of the tensors for which there is room."""
        replaced: dict[int, torch.Tensor] = {}
        together: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            inner = local(tensor).detach()
            if inner.nbytes > room - self.copied_bytes:
                continue
            self.copied_bytes += inner.nbytes
            on_host = inner.device.type == "cpu"
            if _is_plain(inner) and (inner.device.type == "cuda" or (on_host and inner.nbytes >= SMALL_BYTES)):
                together.setdefault(inner.device, []).append(tensor)
            else:
                replaced[id(tensor)] = state_like(tensor, inner.to("cpu", copy=True))
        for device, found in together.items():
            for tensor, data in zip(found, self._to_host(device, [local(tensor) for tensor in found]), strict=True):
                replaced[id(tensor)] = state_like(tensor, data)
        return replaced

    def _to_host(self, device: torch.device, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors of one device into pinned memory, at the speed of the wire."""
        name = "cpu" if device.type == "cpu" else f"cuda:{device.index or 0}"
        key = (os.getpid(), name)
        # Nobody else's until this snapshot is done with it.
        self._slabs[key] = copies = _copies.pop(key, None) or _core.HostCopies(name)
        addresses, sizes = [tensor.data_ptr() for tensor in tensors], [tensor.nbytes for tensor in tensors]
        views = copies.fill(addresses, sizes, stream_handle(device))
        return [
            torch.frombuffer(view, dtype=tensor.dtype).view(tensor.shape)
            if tensor.numel()
            else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for view, tensor in zip(views, tensors, strict=True)
        ]

    def wait_for_loose(self) -> None:
        """Return when the caller may change what no step holds back."""
        if self._is_loose:
            self.live.written.wait()

    def copy_ahead(self, threads: int, bytes_per_s: float | None) -> None:
        """Copy pages aside in the background, before the next step comes."""
        if self.kept is not None:
            self.kept.copy_ahead(threads, bytes_per_s)

    def stats(self) -> dict[str, float | int]:
        """Return what it cost so far."""
        copied, taken, stalls, stall_ns, pauses = (0,) * 5 if self.kept is None else self.kept.stats()
        return {
            "copied_bytes": self.copied_bytes + copied,
            "copy_memory_bytes": self.copied_bytes + taken,
            "stalls": stalls + self.live.stalls,
            "stall_s": stall_ns / 1e9 + self.live.stall_s,
            "pauses": pauses,
        }

    def finish(self) -> None:
        """Keep nothing any longer."""
        self.live.finish()
        if self.kept is not None:
            self.kept.finish()
        # With these goes the memory of the copies.
        self.kept, self.state = None, {}
        _copies.update(self._slabs)
        self._slabs = {}


def release_copies() -> None:
    """Give back what is kept for the copies of the next snapshot."""
    _copies.clear()
    _core.release_copies()


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
    """Return the addresses of state that the engine keeps by itself: all but the counters."""
    return {
        local(value).data_ptr()
        for one in optimizers
        if isinstance(one, AdamW) and one._stores
        for parameter, state in one.state.items()
        if one._homes.get(id(parameter), (-1, 0))[0] >= 0
        for kind, value in state.items()
        if kind != "step" and local(value).numel()
    }


def _stepped(optimizers: list[torch.optim.Optimizer]) -> dict[int, torch.Tensor]:
    """Return by address what only steps of these optimizers change, as a rule: parameters and state."""
    return {
        local(tensor).data_ptr(): tensor
        for one in optimizers
        for group in one.param_groups
        for parameter in group["params"]
        for tensor in (parameter, *dict.get(one.state, parameter, {}).values())
        if isinstance(tensor, torch.Tensor)
    }


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are its elements in order: torch may also conjugate or negate them as it reads."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _leaves(value: Any, pinned: set[int]) -> list[torch.Tensor]:
    """Return the tensors in nested state that the engine does not keep.

    It does not keep what lies in another order than it is written in, also if the memory is its own: putting that in
    order would read it behind the engine's back.
    """
    if isinstance(value, torch.Tensor):
        inner = local(value)
        return [] if inner.numel() and inner.data_ptr() in pinned and _is_plain(inner) else [value]
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


class Handle:
    """A save under way.

    Parameters
    ----------
    snapshot
        What is saved.
    work
        Writes and commits it.
    moved
        Counts the bytes written, and knows how many there are to write.
    """

    def __init__(self, snapshot: Snapshot, work: Callable[[], None], moved: _core.Moved) -> None:
        self._snapshot = snapshot
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
        total = self._moved.expected()
        # Files also have headers.
        return {"written_bytes": min(self._moved.bytes(), total), "total_bytes": total, **stats}


def _forget_frames(error: BaseException | None) -> None:
    """Drop the local variables of an error that is kept: the whole state hangs on them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
