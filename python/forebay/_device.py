"""Torch's devices and streams: the only Python file that names a backend.

A device has three names. Torch's name is a ``torch.device``. ``Tensor.get_device()`` gives an index, where -1 is the
CPU. The engine takes a string. The CPU has no streams: work on it has ended when torch returns.

CUDA is driven by the engine itself. Any other accelerator that torch has is driven through torch: the engine's name for
it begins with ``torch:``. Here and in the rest of the package a GPU is either of them.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from forebay import _accelerator, _core
from forebay.errors import DeviceError, OptionError

CPU = torch.device("cpu")
GPU_TYPE = "cuda"
"""Torch's name for the type of GPU that the engine drives itself."""
SUPPORTED_TYPES = (GPU_TYPE, CPU.type)
"""The types of devices that the engine drives itself; another accelerator of torch's is served through torch."""
BACKENDS = ("torch", "torch_async")
"""Ways to choose torch's own streams and operations; the second refuses a device on which nothing overlaps."""

_others: set[str] = set()
"""Types of other accelerators, known to be served."""


def is_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU, or another accelerator, that the engine can use."""
    kind = device.type
    return kind == GPU_TYPE or (kind != "cpu" and _is_other(kind))


def is_cuda(device: torch.device) -> bool:
    """Whether a device is a GPU that the engine can drive itself."""
    return device.type == GPU_TYPE


def _is_other(kind: str) -> bool:
    if kind not in _others and _accelerator.serves(kind):
        _others.add(kind)
    return kind in _others


def is_cpu(device: torch.device) -> bool:
    """Whether a device is the CPU."""
    return device.type == CPU.type


def is_supported(device: torch.device) -> bool:
    """Whether the engine can use a device."""
    return is_cpu(device) or is_gpu(device)


def supported() -> str:
    """Return the types of devices that can be used here, for errors."""
    found = torch.accelerator.current_accelerator()
    others = [found.type] if found is not None and found.type != GPU_TYPE and _is_other(found.type) else []
    return " and ".join([GPU_TYPE, *others, CPU.type])


def gpu_type() -> str:
    """Return the type of GPU that this process has; the one that the engine drives itself if there is none."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and _is_other(found.type) else GPU_TYPE


def device_of(index: int) -> torch.device:
    """Return the device with an index of ``Tensor.get_device()``."""
    return CPU if index < 0 else torch.device(gpu_type(), index)


def engine_name(device: torch.device) -> str:
    """Return a device's name for the engine."""
    if is_cuda(device):
        return f"cuda:{device.index or 0}"
    return f"torch:{device.type}:{device.index or 0}" if is_gpu(device) else "cpu"


def with_backend(name: str, backend: str | None) -> str:
    """Return the engine's name for a device that is driven as an option says; the CPU has one way only."""
    if backend is None or name == "cpu":
        return name
    return "torch:" + name.removeprefix("torch:") + ("!" if backend == "torch_async" else "")


def default_device() -> torch.device:
    """Return the device assumed for a computation without tensors: the current GPU, or the CPU if there is none."""
    kind = gpu_type()
    if kind != GPU_TYPE:
        return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device(GPU_TYPE, torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def stream_handle(device: torch.device) -> int:
    """Return torch's current stream as a number; 0 on the CPU."""
    if not is_cuda(device):
        # A number of 64 bits, which the engine takes without a sign.
        return torch.accelerator.current_stream(device).stream_id % (1 << 64) if is_gpu(device) else 0
    index = torch.cuda.current_device() if device.index is None else device.index
    # Several times faster than an object of the stream; hooks ask for every saved tensor.
    return int(torch._C._cuda_getCurrentRawStream(index))


def record_event(device: torch.device) -> Any:
    """Return an event behind all work that was submitted to the current stream of a GPU so far."""
    if is_cuda(device):
        return torch.cuda.current_stream(device).record_event()
    event = torch.Event(device=device)
    event.record(torch.accelerator.current_stream(device))
    return event


def wait_event(device: torch.device, event: Any) -> None:
    """Make the current stream of a GPU wait for an event."""
    if is_cuda(device):
        torch.cuda.current_stream(device).wait_event(event)
    else:
        torch.accelerator.current_stream(device).wait_event(event)


def capturing() -> bool:
    """Whether work is being captured into a CUDA graph. Never in a forked child, which cannot even ask."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def empty_cache() -> None:
    """Return the blocks that torch's allocator caches to the driver; does nothing if no GPU is in use."""
    if gpu_type() == GPU_TYPE:
        torch.cuda.empty_cache()
        return
    module: Any = torch.get_device_module(gpu_type())
    getattr(module, "empty_cache", torch.accelerator.empty_cache)()


def device_named(name: torch.device | str) -> torch.device:
    """Return the device that an option names, with its index; raise if the engine cannot use it."""
    kind = gpu_type()
    remedy = f"use 'cpu', '{kind}' or '{kind}:N'"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"invalid device: {name!r}; {remedy}") from error
    if not is_supported(device):
        raise OptionError(f"invalid device: {name!r}; {remedy}")
    if is_gpu(device) and device.index is None:
        if not is_cuda(device):
            return torch.device(device.type, torch.accelerator.current_device_index())
        return torch.device(device.type, torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return device


def check_not_captured(device: torch.device, what: str) -> None:
    """Raise while a CUDA graph is being captured: the engine's work would not be part of the graph."""
    if is_cuda(device) and capturing():
        raise DeviceError(f"{what} cannot be captured into a CUDA graph; call it outside the capture")


def total_memory(device: torch.device) -> int:
    """Return all memory of a device, in bytes."""
    if is_cuda(device):
        return int(torch.cuda.get_device_properties(device).total_memory)
    if is_gpu(device):
        return accelerator_memory(device)[1]
    return int(_core.host_memory()[0])


def accelerator_memory(device: torch.device) -> tuple[int, int]:
    """Return bytes that are free, and bytes in all, of an accelerator that is driven through torch."""
    return _accelerator.memory_of(device)


def model_name(device: torch.device) -> str:
    """Return what a device is called by who made it, or torch's name where only that is known."""
    return str(torch.cuda.get_device_name(device)) if is_cuda(device) else str(device)


def has_nvtx() -> bool:
    """Whether ranges of NVTX can be made: where CUDA is there."""
    return torch.cuda.is_available()


def begin_nvtx(name: str) -> Any:
    """Begin a range of NVTX, and return what ends it."""
    return torch.cuda.nvtx.range_start(name)


def end_nvtx(begun: Any) -> None:
    """End a range of NVTX."""
    torch.cuda.nvtx.range_end(begun)


def random_offset(device: torch.device) -> int | None:
    """Return how many numbers a GPU's default generator has drawn; None on the CPU."""
    return int(torch.cuda.default_generators[device.index or 0].get_offset()) if is_cuda(device) else None


class Meter:
    """Bytes that torch has allocated on a device, and their peak since the last reset; unknown on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self) -> tuple[int, int]:
        """Return bytes now, and at the peak."""
        if not is_gpu(self.device):
            return 0, 0
        if not is_cuda(self.device):
            return torch.accelerator.memory_allocated(self.device), torch.accelerator.max_memory_allocated(self.device)
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        return int(stats["current"]), int(stats["peak"])

    def reset(self) -> None:
        """Reset the peak."""
        if is_cuda(self.device):
            torch.cuda.reset_peak_memory_stats(self.device)
        elif is_gpu(self.device):
            torch.accelerator.reset_peak_memory_stats(self.device)

    def given_out(self) -> tuple[int, int]:
        """Return bytes that torch's allocator has given out, and bytes that it has reserved."""
        if not is_gpu(self.device):
            return 0, 0
        if not is_cuda(self.device):
            return torch.accelerator.memory_allocated(self.device), torch.accelerator.memory_reserved(self.device)
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return (
            int(stats["allocated_bytes"]["all"]["current"]),
            int(stats["reserved_bytes"]["all"]["current"]),
        )

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
        if not is_cuda(self.device):
            mark = spare or torch.Event(device=self.device, enable_timing=True)
            mark.record(torch.accelerator.current_stream(self.device))
            return mark
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
