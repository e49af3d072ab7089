"""What ranks do together beside DCP's own plans: begin together, and have groups for saves in the background."""

from __future__ import annotations

import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from forebay.errors import CheckpointError, Error

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_group: list[Any] = []
_making_groups = threading.Lock()


def ranks_of(group: Any) -> _DistWrapper:
    """Return a group, or all ranks, or the only process, in the form that DCP uses."""
    return _DistWrapper(group, dist.is_available() and dist.is_initialized(), 0)


def on_all_ranks(work: Callable[[], T], group: Any) -> list[T]:
    """Return what the work of every rank returned. Where the work fails on one rank, this raises on all ranks."""
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
        # Otherwise the error and this frame would keep each other alive, and with them the state to be saved.
        del error


def _sendable(error: BaseException | None, rank: int) -> Error | None:
    """Return an error that can be sent to other ranks. Of an error that is not ours only the text surely can."""
    if error is None or isinstance(error, Error):
        return error
    return CheckpointError(f"failed on rank {rank}: {type(error).__name__}: {error}")


def groups() -> tuple[Any, Any]:
    """Return a process group that only saves in the background use, and one for the calls that begin them.

    A thread must not share training's group, nor may these two be one. Their timeout is that of training's group.
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
    """Return the timeout of a group's collectives; None where its backend has none."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: datetime.timedelta = options._timeout
            return timeout
    return None


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress DCP's warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.distributed is (disabled, )?unavailable.*")
        yield


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Turn DCP's collection of every rank's failures, which is no ``Exception``, into the first of them."""
    try:
        yield
    except CheckpointException as failed:
        if not failed.failures:
            raise CheckpointError(f"{what} failed: {failed}") from failed
        rank = min(failed.failures)
        error = failed.failures[rank][0]
        if isinstance(error, Error):
            raise error from failed
        raise CheckpointError(f"{what} failed on rank {rank}: {type(error).__name__}: {error}") from failed
