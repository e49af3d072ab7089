"""Signals while ranks exchange something: a handler that raises must not leave the other ranks waiting.

Ctrl-C raises ``KeyboardInterrupt`` between any two lines, and programs have handlers that raise ``SystemExit``. Between
two collectives, that would leave the other ranks waiting until their timeout. So a save or a load of several ranks
delays handlers, except while a rank works alone: an exception there reaches the other ranks with the next exchange.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

_delays: list[_Delay] = []
"""The delay in effect. Python runs handlers in the main thread only, so there is at most one."""


def delayed(is_needed: bool) -> AbstractContextManager[None]:
    """Delay handlers of signals until the end of the block, except inside ``allowed``.

    Parameters
    ----------
    is_needed
        Whether other ranks may wait for this one. Otherwise nothing is delayed.
    """
    if not is_needed or _delays or threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return _delay()


def allowed() -> AbstractContextManager[None]:
    """Run handlers inside the block at once, those that were delayed first."""
    if not _delays or threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return _delays[0].allowed()


@contextmanager
def _delay() -> Iterator[None]:
    delay = _Delay()
    _delays.append(delay)
    try:
        delay.begin()
        yield
    finally:
        _delays.clear()
        delay.end()


class _Delay:
    """Takes the place of all handlers that are Python functions."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, Any], Any]] = {}
        self._waiting: list[tuple[int, Any]] = []
        self._is_open = False

    def begin(self) -> None:
        """Replace the handlers."""
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._on_signal)

    def end(self) -> None:
        """Restore the handlers, and run those that were delayed. One that raises does so from here."""
        left = [number for number in self._handlers if signal.getsignal(number) == self._on_signal]
        error: BaseException | None = None
        while left:
            try:
                while left:
                    signal.signal(left[-1], self._handlers[left[-1]])
                    left.pop()
            except BaseException as raised:
                # A handler that is restored already. The others must be restored too.
                error = raised
        while self._waiting:
            number, frame = self._waiting.pop(0)
            self._handlers[number](number, frame)
        if error is not None:
            raise error

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Run handlers at once until one raises."""
        self._is_open = True
        try:
            while self._waiting:
                self._run(*self._waiting.pop(0))
            yield
        finally:
            self._is_open = False

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._is_open:
            self._run(number, frame)
        else:
            self._waiting.append((number, frame))

    def _run(self, number: int, frame: Any) -> None:
        # Closed if it raises: a second exception could reach the code that handles the first one.
        self._is_open = False
        self._handlers[number](number, frame)
        self._is_open = True
