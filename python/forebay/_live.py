"""Tensors that a save beside training reads where they lie, since its budget did not allow to copy them.

They are written first. Until then a step waits that would change them, and so does whatever else of forebay writes into
them. Of any other change torch's version counters tell, and then the save fails: what it has may be of two moments.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from forebay._torch import is_dtensor, local
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

_under_way: weakref.WeakSet[Live] = weakref.WeakSet()
_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Live]] = weakref.WeakKeyDictionary()
"""For each optimizer that had to wait once: what it has to wait for."""
_waited: weakref.WeakKeyDictionary[torch.optim.Optimizer, float] = weakref.WeakKeyDictionary()
"""For each that waited in its last step: how many seconds."""


class Live:
    """What one save reads where it lies.

    Parameters
    ----------
    tensors
        The tensors, by their names in the checkpoint.
    owners
        By address, the parameters and state that these tensors are, where they are of optimizers.
    optimizers
        Whose steps wait.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        owners: dict[int, torch.Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        self.tensors = tensors
        self._owners = owners
        self.written = threading.Event()
        self.stalls, self.stall_s = 0, 0.0
        self._versions = {name: self._version(tensor) for name, tensor in tensors.items()}
        gpus = {local(tensor).device for tensor in tensors.values() if local(tensor).device.type == "cuda"}
        # What the caller's streams have been given so far may still change them.
        self._points = {gpu: torch.cuda.current_stream(gpu).record_event() for gpu in gpus}
        if not tensors:
            self.written.set()
            return
        _under_way.add(self)
        for one in optimizers:
            # Never removed: that would be by another thread, maybe while a step is going through its hooks.
            if one not in _of:
                one.register_step_pre_hook(_before_step)
            _of[one] = weakref.ref(self)

    def order(self) -> None:
        """Let the present streams of this thread, which is not the caller's, wait for the caller's at the call."""
        for gpu, point in self._points.items():
            torch.cuda.current_stream(gpu).wait_event(point)

    def check(self) -> None:
        """Refuse to go on if anything has been changed since the call.

        Called when all of it is written and synced: an operation counts when it ends on the host, and one that changed
        what was read has ended by then.
        """
        for name, tensor in self.tensors.items():
            if self._version(tensor) != self._versions[name]:
                raise CheckpointError(
                    f"{name} was changed while it was being saved, by something else than a step of its optimizer: it "
                    f"has {local(tensor).nbytes} bytes, for which snapshot_budget_bytes left no room to copy them; use "
                    "a larger budget, or wait for the save's result() before such a change"
                )

    def finish(self) -> None:
        """Hold nobody and nothing any longer."""
        self.written.set()
        self.tensors, self._owners = {}, {}

    def _version(self, tensor: torch.Tensor) -> int:
        """Return how often a tensor was changed, as torch counts it.

        What a state dict has of a parameter shares its count. But a DTensor has two, its own and that of what it has
        locally, and a state dict's DTensor shares only the first.
        """
        if tensor.is_inference():
            return 0
        if not is_dtensor(tensor):
            return tensor._version
        inner = local(tensor)
        return tensor._version + local(self._owners.get(inner.data_ptr(), tensor))._version


def wait_for_live(optimizer: torch.optim.Optimizer | None = None) -> None:
    """Return when no save under way reads an optimizer's parameters and state where they lie any more; or of any."""
    if optimizer is None:
        for live in list(_under_way):
            live.written.wait()
    elif (live_of := _live_of(optimizer)) is not None:
        live_of.written.wait()


def _leave_to_parent() -> None:
    """Wait for nothing in a forked child: the thread that writes is its parent's."""
    for live in list(_under_way):
        # A new one: the old one's lock may be held by such a thread.
        live.written = threading.Event()
        live.written.set()


os.register_at_fork(after_in_child=_leave_to_parent)


def waited_s(optimizer: torch.optim.Optimizer) -> float:
    """Return how long an optimizer's last step waited for what is read where it lies."""
    return _waited.get(optimizer, 0.0)


def _live_of(optimizer: torch.optim.Optimizer) -> Live | None:
    found = _of.get(optimizer)
    return None if found is None else found()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _waited.pop(optimizer, None)
    live = _live_of(optimizer)
    if live is not None and not live.written.is_set():
        start = time.perf_counter()
        live.written.wait()
        _waited[optimizer] = waited = time.perf_counter() - start
        live.stalls, live.stall_s = live.stalls + 1, live.stall_s + waited
