"""What ranks do together, besides DCP's plans: they begin together, and have process groups for background saves."""

from __future__ import annotations

import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from forebay.checkpoint.interrupts import allowed, delayed
from forebay.errors import CheckpointError, Error

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

T = TypeVar("T")

_group: list[Any] = []
_making_groups = threading.Lock()


def ranks_of(group: Any) -> _DistWrapper:
    """Return a group, or all ranks, or the only process, in the form that DCP uses."""
    return _DistWrapper(group, dist.is_available() and dist.is_initialized(), 0)


def are_several(group: Any) -> bool:
    """Whether other ranks take part."""
    return ranks_of(group).get_world_size() > 1


def uninterrupted(group: Any) -> AbstractContextManager[None]:
    """Delay signals such as Ctrl-C while other ranks wait for this one; see ``interrupts``."""
    return delayed(are_several(group))


def on_all_ranks(work: Callable[[], T], group: Any) -> list[T]:
    """Return the results of the work of all ranks. If the work fails on one rank, this raises on all ranks.

    A rank raises its own error if it has one, also ``KeyboardInterrupt`` and ``SystemExit``.
    """
    ranks = ranks_of(group)
    if not ranks.use_dist:
        return [work()]
    mine: T | None = None
    error: BaseException | None = None
    try:
        with allowed():
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
    """Return an error that can be sent to other ranks. Of other errors than forebay's, only the text is sent."""
    if error is None or isinstance(error, Error):
        return error
    return CheckpointError(f"failed on rank {rank}: {told(error)}")


def told(error: BaseException) -> str:
    """Return an error's type and text. ``KeyboardInterrupt`` has no text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def groups() -> tuple[Any, Any]:
    """Return a process group for background saves only, and one for the calls that begin them.

    A background thread must not share the group of training, and these two groups must differ. Both have the timeout of
    training's group.
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
    """Return the timeout of a group's collectives; None if its backend has none."""
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
def plain_errors(what: str, mine: int) -> Iterator[None]:
    """Raise the first error of DCP's collection of errors of all ranks, which itself is no ``Exception``.

    If the rank ``mine`` was interrupted, by ``KeyboardInterrupt`` or ``SystemExit``, it raises just that.
    """
    try:
        yield
    except CheckpointException as failed:
        own = failed.failures[mine][0] if mine in failed.failures else None
        if own is not None and not isinstance(own, Exception):
            raise own from None
        if not failed.failures:
            raise CheckpointError(f"{what} failed: {failed}") from failed
        rank = min(failed.failures)
        error = failed.failures[rank][0]
        if isinstance(error, Error):
            raise error from failed
        raise CheckpointError(f"{what} failed on rank {rank}: {told(error)}") from failed
