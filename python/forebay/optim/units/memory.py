"""Memory of an optimizer that runs in units: pinned memory for its state, and slots on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay import _core
from forebay._device import CPU, accelerator_memory, engine_name, is_gpu, stream_handle, total_memory
from forebay._tensors import address
from forebay.errors import OutOfMemoryError
from forebay.optim.options import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOTS = 3
"""Units on the device at once: one is fetched, one is updated, one is stored."""

_RULE = _core.Rule("lion")
"""A rule with one column of state: its table is one range of pinned memory."""

_CHUNK_BYTES = 4 << 20


class HostMemory:
    """One unit's memory on the host.

    Parameters
    ----------
    nbytes
        Its size.
    device
        The device that copies from and to it.
    pinned
        Whether it is pinned; the small copies of a check need not be.
    """

    def __init__(self, nbytes: int, device: torch.device, *, pinned: bool) -> None:
        self.nbytes = nbytes
        if pinned and nbytes:
            self.flat = torch.frombuffer(_pin(nbytes, device), dtype=torch.uint8)[:nbytes]
        else:
            self.flat = torch.empty(nbytes, dtype=torch.uint8, device=CPU)


def _pin(nbytes: int, device: torch.device) -> _core.HostView:
    """Return pinned memory of the engine. It is freed with the last tensor over it.

    The memory is that of a table of state: the engine has no other that Python can read.
    """
    engine = resolve(chunk_bytes=_CHUNK_BYTES, slots=2).open(engine_name(device), _RULE.name)
    # A table needs the engine's ring, if only while it is made.
    ring = torch.empty(engine.ring_bytes(), dtype=torch.uint8, device=device) if is_gpu(device) else None
    engine.open_ring(0 if ring is None else address(ring), ring, stream_handle(device))
    table = engine.add([("state", -(-nbytes // 4), 0, "", False, 0)], [list(_RULE.defaults)])
    view = engine.view(table, 0, _RULE.columns[0])
    engine.close()
    assert view is not None
    return view


def free_bytes(device: torch.device) -> int:
    """Return how many bytes of a device's memory can be allocated now."""
    if not is_gpu(device):
        return int(_core.host_memory()[1])
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return accelerator_memory(device)[0]
    cached = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + cached)


def check_budget(total: int, limit: int | None) -> None:
    """Raise if the state of all units does not fit into the budget of pinned memory."""
    if limit is not None and total > limit:
        raise OutOfMemoryError(
            f"the optimizer's state needs {total} bytes of pinned memory; pinned_budget_bytes allows {limit}",
            requested_bytes=total,
            available_bytes=limit,
            limit_bytes=limit,
        )


def open_slots(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return memory on the device for the units of a step; raise if there is not enough.

    Parameters
    ----------
    sizes
        The bytes of each unit.
    device
        The device.
    """
    count, size = min(SLOTS, len(sizes)), max(sizes, default=0)
    available = free_bytes(device)
    cause: Exception | None = None
    if count * size <= available:
        try:
            return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        except torch.OutOfMemoryError as error:
            cause = error
    raise OutOfMemoryError(
        f"a step needs {count} units of {size} bytes on {device}, {available} bytes are free; use a smaller "
        "unit_bytes; a parameter with more state than that is a unit of its own",
        requested_bytes=count * size,
        available_bytes=available,
        limit_bytes=total_memory(device),
    ) from cause
