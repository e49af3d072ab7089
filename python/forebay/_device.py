"""Torch's devices and streams: the only Python file that names a backend.

A device has three names. Torch's name is a ``torch.device``. ``Tensor.get_device()`` gives an index, where -1 is the
CPU. The engine takes a string. The CPU has no streams: work on it has ended when torch returns.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core
from forebay.errors import DeviceError, OptionError

if TYPE_CHECKING:
    from torch.cuda import Event

CPU = torch.device("cpu")
GPU_TYPE = "cuda"
"""Torch's name for the type of GPU that the engine can use."""
SUPPORTED_TYPES = (GPU_TYPE, CPU.type)
"""The types of devices that the engine can use."""


def is_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU that the engine can use."""
    return device.type == GPU_TYPE


def is_cpu(device: torch.device) -> bool:
    """Whether a device is the CPU."""
    return device.type == CPU.type


def is_supported(device: torch.device) -> bool:
    """Whether the engine can use a device."""
    return device.type in SUPPORTED_TYPES


def device_of(index: int) -> torch.device:
    """Return the device with an index of ``Tensor.get_device()``."""
    return CPU if index < 0 else torch.device("cuda", index)


def engine_name(device: torch.device) -> str:
    """Return a device's name for the engine."""
    return f"cuda:{device.index or 0}" if is_gpu(device) else "cpu"


def default_device() -> torch.device:
    """Return the device assumed for a computation without tensors: the current GPU, or the CPU if there is none."""
    return torch.device(GPU_TYPE, torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def stream_handle(device: torch.device) -> int:
    """Return torch's current stream as a number; 0 on the CPU."""
    if not is_gpu(device):
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    # Several times faster than an object of the stream; hooks ask for every saved tensor.
    return int(torch._C._cuda_getCurrentRawStream(index))


def record_event(device: torch.device) -> Event:
    """Return an event behind all work that was submitted to the current stream of a GPU so far."""
    event: Event = torch.cuda.current_stream(device).record_event()
    return event


def wait_event(device: torch.device, event: Event) -> None:
    """Make the current stream of a GPU wait for an event."""
    torch.cuda.current_stream(device).wait_event(event)


def capturing() -> bool:
    """Whether work is being captured into a CUDA graph. Never in a forked child, which cannot even ask."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def empty_cache() -> None:
    """Return the blocks that torch's allocator caches to the driver; does nothing if no GPU is in use."""
    torch.cuda.empty_cache()


def device_named(name: torch.device | str) -> torch.device:
    """Return the device that an option names, with its index; raise if the engine cannot use it."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"invalid device: {name!r}; use 'cpu', 'cuda' or 'cuda:N'") from error
    if not is_supported(device):
        raise OptionError(f"invalid device: {name!r}; use 'cpu', 'cuda' or 'cuda:N'")
    if is_gpu(device) and device.index is None:
        return torch.device(device.type, torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return device


def check_not_captured(device: torch.device, what: str) -> None:
    """Raise while a CUDA graph is being captured: the engine's work would not be part of the graph."""
    if is_gpu(device) and capturing():
        raise DeviceError(f"{what} cannot be captured into a CUDA graph; call it outside the capture")


def total_memory(device: torch.device) -> int:
    """Return all memory of a device, in bytes."""
    if is_gpu(device):
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(_core.host_memory()[0])


def random_offset(device: torch.device) -> int | None:
    """Return how many numbers a GPU's default generator has drawn; None on the CPU."""
    return int(torch.cuda.default_generators[device.index or 0].get_offset()) if is_gpu(device) else None


class Meter:
    """Bytes that torch has allocated on a device, and their peak since the last reset; unknown on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self) -> tuple[int, int]:
        """Return bytes now, and at the peak."""
        if not is_gpu(self.device):
            return 0, 0
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        return int(stats["current"]), int(stats["peak"])

    def reset(self) -> None:
        """Reset the peak."""
        if is_gpu(self.device):
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to read."""
        return is_gpu(self.device)


class Clock:
    """Marks in time on a GPU's current stream, or on the host's clock for the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self, spare: Any = None) -> Any:
        """Return a mark at this moment; a mark that is not needed any more may be used again for it."""
        if not is_gpu(self.device):
            return time.perf_counter_ns()
        event = spare or torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def ns(self, begin: Any, end: Any) -> int:
        """Return the time between two marks that were reached."""
        if not is_gpu(self.device):
            return max(0, int(end - begin))
        return max(0, int(begin.elapsed_time(end) * 1e6))

    def wait(self, mark: Any) -> None:
        """Wait until a mark is reached."""
        if is_gpu(self.device):
            mark.synchronize()

    def is_reached(self, mark: Any) -> bool:
        """Whether a mark was reached."""
        return not is_gpu(self.device) or bool(mark.query())
