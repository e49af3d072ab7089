"""The state of one moment, for a save that runs during training.

Optimizer state in pinned memory is not copied here: the engine keeps it, page by page, until it is written
(``crates/engine/src/snapshot/pages.rs``). Everything else (parameters, buffers, counters) is copied at once, until the
budget is used up. Tensors that do not fit are read in place (``_live.py``).
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from forebay import _core
from forebay._device import CPU, engine_name, is_cpu, is_gpu, stream_handle
from forebay._live import Live, wait_for_live
from forebay._tensors import address, addresses, local, state_like
from forebay.checkpoint.contents import ours
from forebay.checkpoint.native import Kept, find, frozen
from forebay.optim.base import Optimizer
from forebay.optim.packed import Packed, standing_for

SMALL_BYTES = 64 << 10
"""Host tensors smaller than this are copied one by one."""

_copies: dict[tuple[int, str], _core.HostCopies] = {}
"""For each process and device, the memory for the copies of the next snapshot."""


class Snapshot:
    """Nested state as it is now.

    Parameters
    ----------
    state
        The state, as DCP takes it.
    optimizers
        The optimizers whose state is part of it.
    budget_bytes
        The most host memory for copies; None for as much as needed, up to 75 % of the available memory.
    native
        Columns that are saved as they are kept, by the address of what stands for them. All others are copied as f32.
    """

    def __init__(
        self,
        state: dict[str, Any],
        optimizers: list[torch.optim.Optimizer],
        budget_bytes: int | None,
        native: dict[int, Kept] | None = None,
    ) -> None:
        self.state: dict[str, Any] = {}
        # The columns of this moment that are saved as they are kept, by the address of what stands for them in `state`.
        self.native: dict[int, Kept] = {}
        self.kept: _core.Snapshot | None = None
        self.live = Live({}, {}, [])
        self.copied_bytes = 0
        self._is_loose = False
        self._slabs: dict[tuple[int, str], _core.HostCopies] = {}
        engines = [one._engine for one in _keepers(optimizers) if one._engine is not None]
        room = _room() if budget_bytes is None else budget_bytes
        try:
            in_engine = _pinned(optimizers)
            pinned, others = _sorted(state, in_engine)
            # The engine keeps parts in its memory; the others are copied as tensors are.
            native = native or {}
            loose = [part for of in native.values() for part in of.tensors if address(part) not in in_engine]
            others += loose
            # If all tensors fit, it does not matter which of them steps change.
            is_short = sum(local(tensor).nbytes for tensor in others) > room
            stepped = _stepped(optimizers) if is_short else {}
            # Tensors that no step waits for are copied first.
            others.sort(key=lambda tensor: is_short and address(local(tensor)) in stepped)
            replaced = self._copy(others, room)
            # Tensors of their own: those of the optimizer follow its state when that moves.
            replaced.update((id(tensor), state_like(tensor, local(tensor).detach())) for tensor in pinned)
            replaced.update(self._stand_ins(native, replaced, set(map(id, loose))))
            self.state = _rebuilt(state, replaced)
            if uncopied := {id(tensor) for tensor in others} - replaced.keys():
                named, _ = flatten_state_dict(self.state)
                tensors = {name: value for name, value in named.items() if id(value) in uncopied}
                tensors |= self._uncopied_parts(named, uncopied)
                self._is_loose = any(address(local(tensor)) not in stepped for tensor in tensors.values())
                self.live = Live(tensors, stepped, optimizers)
            # One for all engines, so that they share the room.
            self.kept = _core.Snapshot(list(dict.fromkeys(engines)), room - self.copied_bytes)
        except BaseException:
            self.finish()
            raise

    def _stand_ins(
        self, native: dict[int, Kept], replaced: dict[int, torch.Tensor], loose: set[int]
    ) -> dict[int, torch.Tensor]:
        """Return what stands for columns of this moment, by the ids of the tensors that stand for the optimizer's."""
        found = {}
        for of in native.values():
            # Tensors of their own: those of the optimizer follow its state when that moves.
            parts = [replaced.get(id(part), part if id(part) in loose else part.detach()) for part in of.tensors]
            where, kept = frozen(of, parts)
            self.native[where] = kept
            found[id(of.stand_in)] = kept.stand_in
        return found

    def _uncopied_parts(self, named: dict[str, Any], uncopied: set[int]) -> dict[str, torch.Tensor]:
        """Return the parts of columns that are read in place. The first of a column has the column's name."""
        found: dict[str, torch.Tensor] = {}
        for name, value in named.items():
            kept = find(self.native, value)
            parts = [] if kept is None else [part for part in kept.tensors if id(part) in uncopied]
            found.update((f"{name}:{number}" if number else name, part) for number, part in enumerate(parts))
        return found

    def _copy(self, tensors: list[torch.Tensor], room: int) -> dict[int, torch.Tensor]:
        """Return copies of the tensors that fit into the budget."""
        replaced: dict[int, torch.Tensor] = {}
        together: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            inner = local(tensor).detach()
            if inner.nbytes > room - self.copied_bytes:
                continue
            self.copied_bytes += inner.nbytes
            on_host = is_cpu(inner.device)
            if _is_plain(inner) and (is_gpu(inner.device) or (on_host and inner.nbytes >= SMALL_BYTES)):
                together.setdefault(inner.device, []).append(tensor)
            else:
                replaced[id(tensor)] = state_like(tensor, inner.to(CPU, copy=True))
        for device, found in together.items():
            for tensor, data in zip(found, self._to_host(device, [local(tensor) for tensor in found]), strict=True):
                replaced[id(tensor)] = state_like(tensor, data)
        return replaced

    def _to_host(self, device: torch.device, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors of one device into pinned memory. The caller holds the tensors; the copies have ended."""
        name = engine_name(device)
        key = (os.getpid(), name)
        # Taken out until this snapshot ends, so that no other snapshot uses the memory.
        self._slabs[key] = copies = _copies.pop(key, None) or _core.HostCopies(name)
        views = copies.fill(addresses(tensors), [tensor.nbytes for tensor in tensors], stream_handle(device))
        return [
            torch.frombuffer(view, dtype=tensor.dtype).view(tensor.shape)
            if tensor.numel()
            else torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU)
            for view, tensor in zip(views, tensors, strict=True)
        ]

    def wait_for_loose(self) -> None:
        """Wait until live tensors that no step waits for are written, so that they may be changed."""
        if self._is_loose:
            self.live.written.wait()

    def copy_ahead(self, threads: int, bytes_per_s: float | None) -> None:
        """Copy pages in the background, before the next step."""
        if (kept := self.kept) is not None:
            kept.copy_ahead(threads, bytes_per_s)

    def stats(self) -> dict[str, float | int]:
        """Return the snapshot's copies and waits so far."""
        kept = self.kept  # The saving thread may set it to None meanwhile.
        copied, taken, stalls, stall_ns, pauses = (0,) * 5 if kept is None else kept.stats()
        return {
            "copied_bytes": self.copied_bytes + copied,
            "copy_memory_bytes": self.copied_bytes + taken,
            "stalls": stalls + self.live.stalls,
            "stall_s": stall_ns / 1e9 + self.live.stall_s,
            "pauses": pauses,
        }

    def finish(self) -> None:
        """End the snapshot and free its copies."""
        self.live.finish()
        if self.kept is not None:
            self.kept.finish()
        # This frees the memory of the copies.
        self.kept, self.state = None, {}
        _copies.update(self._slabs)
        self._slabs = {}


def release_copies() -> None:
    """Free the memory that is kept for the copies of the next snapshot."""
    _copies.clear()
    _core.release_copies()


def wait_before_load() -> None:
    """Wait until no save needs the present parameters and state any longer."""
    wait_for_live()
    for optimizer in list(Optimizer.alive):
        optimizer._protect()


def _room() -> int:
    """Return the default budget: three quarters of the memory that is available or kept for copies."""
    ours = sum(copies.bytes() for (process, _), copies in _copies.items() if process == os.getpid())
    return int((_core.host_memory()[1] + _core.kept_copy_bytes() + ours) * 0.75)


def _keepers(optimizers: list[torch.optim.Optimizer]) -> list[Optimizer]:
    """Return the optimizers that have state in pinned memory."""
    return [one for one in ours(optimizers) if one._tables and not one._options.is_resident and not one.is_closed]


def _pinned(optimizers: list[torch.optim.Optimizer]) -> set[int]:
    """Return the addresses of state that the engine keeps: everything except the counters."""
    return {
        address(local(view))
        for one in _keepers(optimizers)
        for room in one.state.rooms.values()
        for view in (*room.views.values(), *(part for packed in room.packed.values() for part in packed.values()))
        if local(view).numel() and not room.is_resident
    }


def _stepped(optimizers: list[torch.optim.Optimizer]) -> dict[int, torch.Tensor]:
    """Return the parameters and state that normally only steps of these optimizers change, by address."""
    return {
        address(local(tensor)): tensor
        for one in optimizers
        for group in one.param_groups
        for parameter in group["params"]
        for value in (parameter, *dict.values(dict.get(one.state, parameter, {})))
        for tensor in (value.values() if isinstance(value, Packed) else (value,))
        if isinstance(tensor, torch.Tensor)
    }


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are its elements in order. Torch may conjugate or negate elements when it reads them."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _sorted(state: Any, pinned: set[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors in nested state that the engine keeps, and all others.

    The others include tensors in the engine's memory whose elements are in another order than in a file: torch would
    read that memory to put them in order, and the engine would not know of it. What stands for a
    packed column is in neither.
    """
    kept: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for tensor in _leaves(state):
        inner = local(tensor)
        is_kept = inner.numel() and address(inner) in pinned and _is_plain(inner)
        (kept if is_kept else others).append(tensor)
    return kept, others


def _leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested state."""
    if isinstance(value, torch.Tensor):
        return [] if standing_for(value) is not None else [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return []


def _rebuilt(value: Any, replaced: dict[int, torch.Tensor]) -> Any:
    """Return nested state with some tensors replaced, and with copies of all other values."""
    if isinstance(value, torch.Tensor):
        if id(value) not in replaced and (packed := standing_for(value)) is not None:
            # Steps may change its parts, and the weight of a master, before it is written.
            return packed.on_host()
        return replaced.get(id(value), value)
    if isinstance(value, dict):
        return {key: _rebuilt(item, replaced) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_rebuilt(item, replaced) for item in value)
    return copy.deepcopy(value)
