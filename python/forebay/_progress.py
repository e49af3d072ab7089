"""Progress bars for work that takes long: a first pinning of state, saves, loads, checks and exports.

tqdm draws them, on a terminal and in notebooks. A bar is off for work that ends within two seconds, where standard
error is no terminal, and on ranks above 0. The work never waits for its bar: a thread of the bar's own reads a counter
ten times a second.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forebay import _core
from forebay._rank import rank
from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DELAY_S = 2.0
"""Work that takes less gets no bar."""
_PERIOD_S = 0.1

_enabled: list[bool | None] = [None]


def progress(enabled: bool | None) -> None:
    """Switch progress bars on or off, for the whole process.

    Parameters
    ----------
    enabled
        False for none. True to draw them where standard error is no terminal too, and from the first moment. None, as
        at the start, for bars on a terminal or in a notebook, on rank 0, for work that takes more than two seconds.
    """
    if enabled not in (None, True, False):
        raise OptionError(f"invalid enabled: {enabled!r}; use True, False or None")
    _enabled[0] = None if enabled is None else bool(enabled)


@contextmanager
def bar(what: str, total_bytes: int, *, shown: bool | None = None) -> Iterator[_core.Moved]:
    """Yield a counter of bytes, and show how far it is.

    Parameters
    ----------
    what
        What is done.
    total_bytes
        How many bytes there will be.
    shown
        As the argument of ``progress``; by default what that function has set.
    """
    moved = _core.Moved()
    with watch(what, total_bytes, moved.bytes, shown=shown):
        yield moved


@contextmanager
def watch(what: str, total_bytes: int | None, done: Callable[[], int], *, shown: bool | None = None) -> Iterator[None]:
    """Show how far work is that something else counts, or only how long it takes if there is no total.

    ``done`` returns the bytes so far, without waiting.
    """
    if total_bytes == 0 or not _is_wanted(shown):
        yield
        return
    delay_s = 0.0 if shown or _enabled[0] else DELAY_S
    ended = threading.Event()
    drawing = threading.Thread(
        target=_draw, args=(what, total_bytes, done, delay_s, ended), name="forebay-progress", daemon=True
    )
    drawing.start()
    try:
        yield
    finally:
        ended.set()
        drawing.join()


def _is_wanted(shown: bool | None) -> bool:
    if shown is False or _enabled[0] is False or rank() > 0:
        return False
    # In a notebook nothing is a terminal, and tqdm draws a widget.
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return bool(shown or _enabled[0] or on_terminal or "ipykernel.zmqshell" in sys.modules)


def _draw(what: str, total_bytes: int | None, done: Callable[[], int], delay_s: float, ended: threading.Event) -> None:
    # tqdm can delay a bar too, but importing it takes longer than most of the work.
    if ended.wait(delay_s) and delay_s:
        return
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    only_time = {"bar_format": "{desc} {elapsed}"} if total_bytes is None else {}
    with tqdm(
        desc=what, total=total_bytes, leave=False, unit="B", unit_scale=True, mininterval=0, **only_time
    ) as drawn:
        over = False
        while not over:
            over = ended.wait(_PERIOD_S)
            drawn.update(done() - drawn.n if total_bytes is None else min(done(), total_bytes) - drawn.n)
            drawn.refresh()
