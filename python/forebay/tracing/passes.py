"""Passes of the training loop: forward, backward and step, on the caller's thread and on torch's stream.

A forward is the call of an outermost module. A global hook of torch's sees its begin and takes itself away until its
end, so modules inside are called as without a trace, and code that is compiled inside them meets no hook. A backward is
a run of autograd's engine; a step is that of any ``torch.optim.Optimizer``. Only the outermost pass counts: what is
recomputed in a backward is part of the backward.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from forebay import _device
from forebay.errors import Error

if TYPE_CHECKING:
    from forebay import _core
    from forebay._trace import Reports

_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"
"""Torch's warning about hooks that fire twice around a compiled module. This one fires once."""


@dataclass(frozen=True)
class _Open:
    """The pass under way."""

    name: str
    owner: int
    start_ns: int
    work: _core.TracedWork | None
    nvtx: Any


class Passes:
    """Follows the passes of one thread.

    Parameters
    ----------
    reports
        Where they are reported to.
    nvtx
        Whether they are NVTX ranges too.
    """

    def __init__(self, reports: Reports, *, nvtx: bool) -> None:
        self._reports, self._nvtx = reports, nvtx
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._open: _Open | None = None
        self._step = 0
        self._global: Any = None
        self._hooks: list[Any] = []
        self._roots: dict[int, tuple[weakref.ref[torch.nn.Module], Any]] = {}
        self._active = False
        self._run_backward: Any = None
        self._filter: Any = None

    def install(self) -> None:
        """Begin to follow passes."""
        self._active = True
        self._hooks = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        self._watch_backward()
        # Before all others, which stay as they are.
        warnings.filterwarnings("ignore", _WARNING)
        self._filter = warnings.filters[0]
        self._arm()

    def remove(self) -> None:
        """Stop. Passes that are under way are left out."""
        self._active = False
        self._disarm()
        for hook in (*self._hooks, *(hook for _, hook in self._roots.values())):
            hook.remove()
        self._hooks, self._roots = [], {}
        autograd: Any = torch.autograd
        if getattr(autograd._engine_run_backward, "forebay", None) is self:
            autograd._engine_run_backward = self._run_backward
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]

    # Forward.

    def _arm(self) -> None:
        if self._global is None and self._active:
            self._global = register_module_forward_pre_hook(self._forward_begins)

    def _disarm(self) -> None:
        if self._global is not None:
            self._global.remove()
            self._global = None

    def _forward_begins(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_mine() or self._open is not None:
            return
        known = self._roots.get(id(module))
        if known is None or known[0]() is not module:
            try:
                hook = module.register_forward_hook(self._forward_ends, always_call=True)
            except (AttributeError, RuntimeError):
                # A module that takes no hooks, as scripted ones may.
                return
            self._roots[id(module)] = weakref.ref(module), hook
        self._begin("forward" if torch.is_grad_enabled() else "forward without gradients", id(module))

    def _forward_ends(self, module: torch.nn.Module, *_: Any) -> None:
        if self._is_open("forward", id(module)):
            self._end()

    # Backward.

    def _watch_backward(self) -> None:
        autograd: Any = torch.autograd
        run = self._run_backward = autograd._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if not self._is_mine() or self._open is not None:
                return run(*args, **kwargs)
            self._begin("backward", 0)
            try:
                return run(*args, **kwargs)
            finally:
                if self._is_open("backward", 0):
                    self._end()

        run_backward.forebay = self  # type: ignore[attr-defined]
        autograd._engine_run_backward = run_backward

    # Step.

    def _step_begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_mine():
            return
        if self._is_open("step", id(optimizer)):
            # The one before raised an error: torch calls no hook then.
            self._abandon()
        if self._open is None:
            self._begin("step", id(optimizer))

    def _step_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_mine() and self._is_open("step", id(optimizer)):
            self._end()
            self._step += 1

    # All of them.

    def _is_mine(self) -> bool:
        return self._active and threading.get_ident() == self._thread and os.getpid() == self._process

    def _is_open(self, name: str, owner: int) -> bool:
        return self._open is not None and self._open.name.startswith(name) and self._open.owner == owner

    def _begin(self, name: str, owner: int) -> None:
        self._disarm()
        work = None
        device = self._gpu()
        if device is not None:
            # A trace never fails what it watches.
            with suppress(Error, RuntimeError):
                handle = _device.stream_handle(device)
                work = self._reports.core.begin_on_stream(_device.engine_name(device), handle, name, self._step)
        nvtx = _device.begin_nvtx(name) if self._nvtx else None
        self._open = _Open(name, owner, self._reports.core.now_ns(), work, nvtx)

    def _end(self) -> None:
        of = self._open
        assert of is not None
        core = self._reports.core
        core.span("pass", of.name, of.start_ns, core.now_ns(), step=self._step)
        device = self._gpu()
        if device is not None:
            with suppress(Error, RuntimeError):
                if of.work is not None:
                    of.work.end(_device.stream_handle(device))
                core.count_device(*_device.Meter(device).given_out())
        self._abandon()

    def _abandon(self) -> None:
        if self._open is not None and self._open.nvtx is not None:
            _device.end_nvtx(self._open.nvtx)
        self._open = None
        self._arm()

    def _gpu(self) -> torch.device | None:
        """Return the device whose stream runs the passes, if there is one and it can be marked now."""
        if _device.capturing():
            return None
        try:
            device = _device.default_device()
        except Error:
            return None
        return device if _device.is_gpu(device) else None
