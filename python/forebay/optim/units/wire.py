"""Copies between a unit's memory on the host and on the device, in order with the step that uses them.

On an accelerator there is one stream for each direction. Events order them with the stream that computes:

- a fetch waits until the memory on the device is free: its last store has ended;
- a fetch waits until the memory on the host is up to date: the same unit's last store has ended;
- the step on a unit waits for the unit's fetch;
- a store waits for the step on its unit.

An overlapped step computes on a stream of its own, which waits for torch's when it begins (``beside``). Torch's stream
waits for the step where something reads what the step has written.

The host waits for nothing. On the CPU a copy has ended when its call returns.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from forebay._core import count_copied
from forebay._device import is_gpu, stream_handle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Copied:
    """One copy that was begun.

    Parameters
    ----------
    nbytes
        Its size.
    begin, end
        Where it begins and ends: times in nanoseconds on the CPU, events on an accelerator.
    """

    def __init__(self, nbytes: int, begin: Any, end: Any) -> None:
        self.nbytes, self.begin, self.end = nbytes, begin, end

    def wait(self) -> None:
        """Wait until the copy has ended; the host waits."""
        if not isinstance(self.end, int):
            self.end.synchronize()

    def seconds(self) -> float:
        """Return how long the copy took; it must have ended."""
        if isinstance(self.end, int):
            return float(self.end - self.begin) / 1e9
        return float(self.begin.elapsed_time(self.end)) / 1e3


class Wire:
    """Both directions of copies for one device. This class is the CPU's, where each copy is done at once."""

    def open(self, slots: Iterable[torch.Tensor]) -> None:
        """Begin a step with memory that was allocated just now."""

    def close(self, slots: Iterable[torch.Tensor]) -> None:
        """End a step; its memory may be freed as soon as the copies have ended."""

    def fetch(self, host: torch.Tensor, device: torch.Tensor, after: Iterable[Copied]) -> Copied:
        """Copy from the host to the device, when these copies have ended."""
        count_copied(host.numel(), 0)
        return self._copy(host, device)

    def arrive(self, fetched: Copied) -> None:
        """Make the work that is submitted from now on wait for a fetch."""

    def store(self, device: torch.Tensor, host: torch.Tensor) -> Copied:
        """Copy from the device to the host, when the work that was submitted so far has ended."""
        count_copied(0, device.numel())
        return self._copy(device, host)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Submit the work of this context to a stream of its own, behind the current stream's work so far."""
        yield

    def mark(self) -> Any:
        """Return a mark behind the current stream's work so far."""
        return 0

    def is_reached(self, mark: Any) -> bool:
        """Whether the work before a mark has ended."""
        return True

    def wait(self, mark: Any, stream: int) -> None:
        """Make a stream, given by its handle, wait for a mark."""

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Copied:
        begin = time.perf_counter_ns()
        target.copy_(source)
        return Copied(source.numel(), begin, time.perf_counter_ns())


class StreamWire(Wire):
    """The wire of a device with streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._in = self._module.Stream(device)
        self._out = self._module.Stream(device)
        self._beside: Any = None

    def open(self, slots: Iterable[torch.Tensor]) -> None:
        """Make the copies wait for the work that used the slots' memory before."""
        point = self._module.current_stream(self._device).record_event()
        for stream in (self._in, self._out):
            stream.wait_event(point)

    def close(self, slots: Iterable[torch.Tensor]) -> None:
        """Tell torch's allocator which streams still use the slots."""
        current = self._module.current_stream(self._device)
        for slot, stream in product(slots, (self._in, self._out, current)):
            slot.record_stream(stream)

    def fetch(self, host: torch.Tensor, device: torch.Tensor, after: Iterable[Copied]) -> Copied:
        """Copy from the host to the device, when these copies have ended."""
        for copied in after:
            self._in.wait_event(copied.end)
        count_copied(host.numel(), 0)
        return self._submit(self._in, host, device)

    def arrive(self, fetched: Copied) -> None:
        """Make the current stream wait for a fetch."""
        self._module.current_stream(self._device).wait_event(fetched.end)

    def store(self, device: torch.Tensor, host: torch.Tensor) -> Copied:
        """Copy from the device to the host, when the current stream's work so far has ended."""
        self._out.wait_event(self._module.current_stream(self._device).record_event())
        device.record_stream(self._out)
        count_copied(0, device.numel())
        return self._submit(self._out, device, host)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Submit the work of this context to a stream of its own, behind the current stream's work so far."""
        if self._beside is None:
            self._beside = self._module.Stream(self._device)
        current = self._module.current_stream(self._device)
        self._beside.wait_event(current.record_event())
        try:
            with self._module.stream(self._beside):
                yield
        except BaseException:
            # What was submitted before the error may still use memory of the current stream.
            current.wait_event(self._beside.record_event())
            raise

    def mark(self) -> Any:
        """Return a mark behind the current stream's work so far."""
        return self._module.current_stream(self._device).record_event()

    def is_reached(self, mark: Any) -> bool:
        """Whether the work before a mark has ended."""
        return bool(mark.query())

    def wait(self, mark: Any, stream: int) -> None:
        """Make a stream, given by its handle, wait for a mark."""
        current = self._module.current_stream(self._device)
        is_current = stream == stream_handle(self._device)
        (current if is_current else self._module.ExternalStream(stream, device=self._device)).wait_event(mark)

    def _submit(self, stream: Any, source: torch.Tensor, target: torch.Tensor) -> Copied:
        begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
        with self._module.stream(stream):
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        return Copied(source.numel(), begin, end)


def wire_for(device: torch.device) -> Wire:
    """Return the wire of a device."""
    # A device whose module in torch has no streams of its own copies in the order of its work.
    return StreamWire(device) if is_gpu(device) and hasattr(torch.get_device_module(device), "Stream") else Wire()
