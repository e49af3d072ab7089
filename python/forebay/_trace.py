"""The trace that is being recorded, if one is: what other parts of the package report to.

This file imports nothing heavy. Without a trace a report is one look at ``current``.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forebay import _core

LEAST_WAIT_NS = 10_000
"""A shorter wait is the cost of looking."""


class Reports:
    """Takes reports for one trace.

    Parameters
    ----------
    core
        The engine's recorder.
    describe
        Describes an object of forebay's that ends before the trace.
    """

    def __init__(self, core: _core.Trace, describe: Callable[[Any], None]) -> None:
        self.core, self.describe = core, describe
        self.saves: list[dict[str, float | int | str]] = []
        self._thread = threading.get_ident()
        # Python's clock and the engine's are the same one, from different zeros.
        self._zero_ns = time.perf_counter_ns() - core.now_ns()

    def ns(self, perf_counter_ns: int) -> int:
        """Return a time of ``time.perf_counter_ns`` on the trace's clock."""
        return max(0, perf_counter_ns - self._zero_ns)

    def is_caller(self) -> bool:
        """Whether this is the thread that began the trace."""
        return threading.get_ident() == self._thread

    def waited(self, reason: str, name: str, start_ns: int) -> None:
        """Add a wait of the caller's thread that ends now."""
        now = self.core.now_ns()
        if self.is_caller() and now - start_ns >= LEAST_WAIT_NS:
            self.core.span("wait", name, start_ns, now, reason=reason)

    def saved(self, name: str, begun_s: float, nbytes: int) -> None:
        """Add a save that ends now and began at a time of ``time.perf_counter``."""
        start, now = self.ns(int(begun_s * 1e9)), self.core.now_ns()
        self.core.span("save", name, start, now, size=nbytes)
        self.saves.append({"name": name, "seconds": time.perf_counter() - begun_s, "bytes": nbytes})


current: Reports | None = None


def leaves(thing: Any) -> None:
    """Describe an object that ends now, if a trace is recorded."""
    reports = current
    if reports is not None:
        reports.describe(thing)


@contextmanager
def waiting(reason: str, name: str) -> Iterator[None]:
    """Report what is done inside as a wait, if it is one."""
    reports = current
    if reports is None:
        yield
        return
    start = reports.core.now_ns()
    try:
        yield
    finally:
        reports.waited(reason, name, start)
