"""What ranks do together beside DCP's own plans: agree on how to begin, and have groups for saves in the background."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.utils import _DistWrapper

from forebay.errors import CheckpointError, Error

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable

T = TypeVar("T")

_group: list[Any] = []
_making_groups = threading.Lock()


def ranks_of(group: Any) -> _DistWrapper:
    """Return a group, or all ranks, or the one process that there is, as DCP deals with them."""
    return _DistWrapper(group, dist.is_available() and dist.is_initialized(), 0)


def on_all_ranks(work: Callable[[], T], group: Any) -> list[T]:
    """Return what the work of every rank returned. Where it fails on one, it raises on all: none goes on alone."""
    ranks = ranks_of(group)
    if not ranks.use_dist:
        return [work()]
    mine: T | None = None
    error: BaseException | None = None
    try:
        mine = work()
    except BaseException as failure:
        error = failure
    try:
        found = ranks.all_gather_object((mine, _sendable(error, ranks.rank)))
        if error is not None:
            raise error
        for _, other in found:
            if other is not None:
                raise other
        return [value for value, _ in found]  # type: ignore[misc]
    finally:
        # Otherwise an error and this frame would keep each other, and the state that is to be saved.
        del error


def _sendable(error: BaseException | None, rank: int) -> Error | None:
    """Return an error as other ranks can be told of it; of one that is not ours only the text surely can."""
    if error is None or isinstance(error, Error):
        return error
    return CheckpointError(f"failed on rank {rank}: {type(error).__name__}: {error}")


def groups() -> tuple[Any, Any]:
    """Return a process group that only saves in the background use, and one for the calls that begin them.

    Training's own must not be shared with a thread, and these two not with each other. They wait as long as it does.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None, None
    with _making_groups:
        world = dist.group.WORLD
        if not _group or _group[0] is not world:
            timeout = _timeout(world)
            _group[:] = [world, *(dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))]
        return _group[1], _group[2]


def _timeout(group: Any) -> datetime.timedelta | None:
    """Return how long collectives of a group wait; None where its backend does not say."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: datetime.timedelta = options._timeout
            return timeout
    return None
