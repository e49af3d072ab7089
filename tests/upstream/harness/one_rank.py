"""Runs tests for several ranks with one rank, in this process: on one GPU, or on the CPU with ``--on-cpu``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

ON_CPU = bool(os.environ["UPSTREAM_ON_CPU"])


def spawn(fn: Callable[..., None], args: tuple[Any, ...] = (), nprocs: int = 1, **_: Any) -> None:
    """Call the function as rank 0 instead of starting processes."""
    assert nprocs == 1, f"one rank, not {nprocs}"
    try:
        fn(0, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


mp.spawn = spawn

if ON_CPU:
    make_group, make_mesh = dist.init_process_group, dist.init_device_mesh

    def init_process_group(backend: str | None = None, **keywords: Any) -> None:
        """Make the group with gloo: NCCL needs a GPU."""
        make_group("gloo", **keywords)

    def init_device_mesh(device_type: str, *args: Any, **keywords: Any) -> Any:
        """Make the mesh on the CPU."""
        return make_mesh("cpu", *args, **keywords)

    dist.init_process_group = init_process_group
    dist.init_device_mesh = init_device_mesh
    torch.cuda.set_device = lambda *_: None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the number of ranks; the names of the tests stay upstream's."""
    for item in items:
        found = getattr(item, "callspec", None)
        if found is not None and "world_size" in found.params:
            found.params["world_size"] = 1
