"""Live tensors, which a save reads in place while training goes on, because its budget left no room for copies.

Live tensors are written first. Until they are written, steps that would change them wait, and so does every other part
of forebay that writes into them. Torch's version counters show any other change. The save then fails, because the bytes
that it has read may be of two moments.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from forebay import _trace
from forebay._device import is_gpu, record_event, wait_event
from forebay._tensors import address, is_dtensor, local
from forebay._wrapped import bare
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

_under_way: weakref.WeakSet[Live] = weakref.WeakSet()
_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Live]] = weakref.WeakKeyDictionary()
"""For each optimizer, the live tensors for which its steps wait."""
_waited: weakref.WeakKeyDictionary[torch.optim.Optimizer, float] = weakref.WeakKeyDictionary()
"""For each optimizer that waited in its last step, how many seconds it waited."""


class Live:
    """The tensors that one save reads in place.

    Parameters
    ----------
    tensors
        The tensors, by their names in the checkpoint.
    owners
        Parameters and state of optimizers, by address; used to find the ones behind these tensors.
    optimizers
        The optimizers whose steps wait.
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
        gpus = {local(tensor).device for tensor in tensors.values() if is_gpu(local(tensor).device)}
        # Work that was submitted to the caller's streams before the call may still change the tensors.
        self._points = {gpu: record_event(gpu) for gpu in gpus}
        if not tensors:
            self.written.set()
            return
        _under_way.add(self)
        for one in map(bare, optimizers):
            # Never removed: another thread would do it, perhaps while a step runs its hooks.
            if one not in _of:
                one.register_step_pre_hook(_before_step)
            _of[one] = weakref.ref(self)

    def order(self) -> None:
        """Make the writing thread's streams wait for work that the caller's streams had at the call."""
        for gpu, point in self._points.items():
            wait_event(gpu, point)

    def check(self) -> None:
        """Raise if a tensor was changed since the call.

        Called when all tensors are written and synced. Torch counts an operation when it ends on the host, and an
        operation that changed what was read has ended by then.
        """
        for name, tensor in self.tensors.items():
            if self._version(tensor) != self._versions[name]:
                raise CheckpointError(
                    f"{name} was modified during the save, not by its optimizer; snapshot_budget_bytes was too small "
                    f"to copy its {local(tensor).nbytes} bytes; use a larger budget, or wait for the save's result() "
                    "before such a change"
                )

    def finish(self) -> None:
        """Let steps continue, and release the tensors."""
        self.written.set()
        self.tensors, self._owners = {}, {}

    def _version(self, tensor: torch.Tensor) -> int:
        """Return how often a tensor was changed, by torch's version counters.

        A tensor of a state dict shares the counter of its parameter. A DTensor has two counters, its own and that of
        its local tensor, and a DTensor of a state dict shares only the first.
        """
        if tensor.is_inference():
            return 0
        if not is_dtensor(tensor):
            return tensor._version
        inner = local(tensor)
        return tensor._version + local(self._owners.get(address(inner), tensor))._version


def wait_for_live(optimizer: torch.optim.Optimizer | None = None) -> None:
    """Wait until no save reads an optimizer's parameters and state in place; without one, those of any optimizer."""
    if optimizer is None:
        for live in list(_under_way):
            live.written.wait()
    elif (live_of := _live_of(bare(optimizer))) is not None:
        live_of.written.wait()


def _leave_to_parent() -> None:
    """Wait for nothing in a forked child: the writing thread is its parent's."""
    for live in list(_under_way):
        # A new event, because that thread may hold the old one's lock.
        live.written = threading.Event()
        live.written.set()


def is_live(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a save reads an optimizer's parameters or state in place now."""
    live = _live_of(bare(optimizer))
    return live is not None and not live.written.is_set()


os.register_at_fork(after_in_child=_leave_to_parent)


def waited_s(optimizer: torch.optim.Optimizer) -> float:
    """Return how many seconds an optimizer's last step waited for live tensors."""
    return _waited.get(bare(optimizer), 0.0)


def _live_of(optimizer: torch.optim.Optimizer) -> Live | None:
    found = _of.get(optimizer)
    return None if found is None else found()


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _waited.pop(optimizer, None)
    live = _live_of(optimizer)
    if live is not None and not live.written.is_set():
        start = time.perf_counter()
        with _trace.waiting("save", "wait for a save"):
            live.written.wait()
        _waited[optimizer] = waited = time.perf_counter() - start
        live.stalls, live.stall_s = live.stalls + 1, live.stall_s + waited
