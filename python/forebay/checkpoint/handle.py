"""Saves in the background, one at a time: the handle of each save, and unobserved failures.

A failure is unobserved if it has not been raised yet. It is raised by the next save from the same thread or to the same
path, or printed at exit.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import weakref
from typing import TYPE_CHECKING

from forebay import _trace
from forebay._log import logger
from forebay.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    from forebay import _core
    from forebay.checkpoint.snapshot import Snapshot

current: list[Handle] = []
"""The last save in the background, until the next save has seen its end."""
failed: list[Handle] = []
"""Earlier saves with unobserved failures."""

_turn = threading.RLock()
"""Held from the end of the earlier save until the next one has begun, so that threads begin saves one after the other.
Reentrant, because a signal handler may save while its thread holds the lock."""


class Handle:
    """A save that runs in the background.

    Parameters
    ----------
    path
        The checkpoint's path.
    snapshot
        The state to save.
    work
        Writes and commits the snapshot.
    moved
        Counts the bytes written, and knows the total.
    """

    def __init__(self, path: Path, snapshot: Snapshot, work: Callable[[], None], moved: _core.Moved) -> None:
        self._path = path
        self._caller = weakref.ref(threading.current_thread())
        self._snapshot = snapshot
        self._moved = moved
        self._error: BaseException | None = None
        self._observed = False
        self._stats: dict[str, float | int] = {}
        self._done = threading.Event()
        self._start = time.perf_counter()
        self._end: float | None = None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                _forget_frames(error)
                self._error = error
            finally:
                self._stats = snapshot.stats()
                self._end = time.perf_counter()
                if self._error is None:
                    if _trace.current is not None:
                        written = int(self.progress()["written_bytes"])
                        _trace.current.saved("async save", self._start, written)
                    logger.info("saved %s in %.2f s, beside training", path, self.seconds())
                else:
                    logger.error("not saved: %s: %s", path, self._error)
                snapshot.finish()
                self._done.set()

        # Not a daemon: at exit Python waits until the save is complete.
        self._thread = threading.Thread(target=run, name="forebay-save")
        self._thread.start()

    def done(self) -> bool:
        """Whether the save has ended, with success or without."""
        return self._done.is_set()

    def seconds(self) -> float:
        """Return how long the save has taken so far, or in total."""
        return (self._end or time.perf_counter()) - self._start

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete; raise the error if the save failed.

        Parameters
        ----------
        timeout
            The most seconds to wait; after that a ``TimeoutError`` is raised.
        """
        with _trace.waiting("save", "wait for the end of a save"):
            is_done = self._done.wait(timeout)
        if not is_done:
            raise TimeoutError(f"the save has not ended after {timeout} s: {self.progress()}")
        self._thread.join()
        self.raise_failure()

    def progress(self) -> dict[str, float | int]:
        """Return the progress of the save, and its cost.

        ``written_bytes`` of ``total_bytes`` are written. ``copied_bytes`` were copied, into ``copy_memory_bytes`` of
        memory. Steps waited for the writer ``stalls`` times, ``stall_s`` in total, and the writer paused for steps
        ``pauses`` times.
        """
        stats = self._stats or self._snapshot.stats()
        total = self._moved.expected()
        # The files also have headers.
        return {"written_bytes": min(self._moved.bytes(), total), "total_bytes": total, **stats}

    def has_unobserved_failure(self) -> bool:
        """Whether the save failed and the error has not been raised yet."""
        return self._error is not None and not self._observed

    def raise_failure(self) -> None:
        """Raise the error if the save failed."""
        if self._error is not None:
            self._observed = True
            raise self._error

    def concerns(self, path: Path) -> bool:
        """Whether a save to this path, from the current thread, must raise a failure of this save."""
        return self._path == path or self._caller() is threading.current_thread()


def _forget_frames(error: BaseException | None) -> None:
    """Clear the local variables of an error that is kept: they refer to the whole state."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def take_turn(turn: ExitStack, path: Path, *, refuse: bool = False) -> None:
    """Wait for a running save, or raise if ``refuse`` is set; raise an unobserved failure that concerns the caller.

    Until ``turn`` ends, no other thread can begin a save.
    """
    if not _turn.acquire(blocking=not refuse):
        raise CheckpointError("another thread is starting a save; wait for it, or use when_busy='wait'")
    turn.callback(_turn.release)
    for handle in list(current):
        if refuse and not handle.done():
            raise CheckpointError(
                f"an earlier save is running: {handle.progress()}; wait for its result(), or use when_busy='wait'"
            )
        with _trace.waiting("save", "wait for the save before"):
            handle._done.wait()
        current.clear()
        failed.append(handle)
    failed[:] = [handle for handle in failed if handle.has_unobserved_failure()]
    for handle in list(failed):
        if handle.concerns(path):
            failed.remove(handle)
            handle.raise_failure()


def wait_for_current() -> None:
    """Wait for a running save, whether it succeeds or not."""
    for handle in list(current):
        handle._done.wait()


@atexit.register
def print_failures() -> None:
    """Print unobserved failures. At this point Python has waited for the end of the last save."""
    for handle in (*failed, *current):
        if handle.has_unobserved_failure():
            which = "the last" if handle in current else "an earlier"
            error = handle._error
            sys.stderr.write(f"forebay: {which} checkpoint was not saved: {type(error).__name__}: {error}\n")


_parents: list[Handle] = []
"""A forked child keeps its parent's handles: freeing them could wait for a thread of the parent."""


def _leave_saves_to_parent() -> None:
    """Start again in a forked child: the saving thread, and one that holds the turn, are its parent's."""
    global _turn
    _turn = threading.RLock()
    _parents.extend((*failed, *current))
    failed.clear()
    current.clear()


os.register_at_fork(after_in_child=_leave_saves_to_parent)
