"""A progress bar on a terminal, for work that runs in Rust.

tqdm could draw it, but neither torch nor forebay depends on tqdm, and a bar that reads one counter needs little code.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from forebay import _core

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 30


@contextmanager
def bar(what: str, total_bytes: int, *, shown: bool | None = None) -> Iterator[_core.Moved]:
    """Yield a counter of bytes, and draw how far it is; by default only on a terminal."""
    moved = _core.Moved()
    if not (sys.stderr.isatty() if shown is None else shown) or total_bytes == 0:
        yield moved
        return
    done = threading.Event()

    def draw() -> None:
        start = time.perf_counter()
        while True:
            over = done.wait(0.1)
            share = min(moved.bytes() / total_bytes, 1.0)
            rate = moved.bytes() / max(time.perf_counter() - start, 1e-9) / 1e9
            filled = "=" * int(share * WIDTH)
            text = f"{what} [{filled:{WIDTH}}] {moved.bytes() / 1e9:.2f} of {total_bytes / 1e9:.2f} GB, {rate:.2f} GB/s"
            sys.stderr.write(f"\r{text:<78}" if not over else f"\r{'':78}\r")
            sys.stderr.flush()
            if over:
                return

    drawing = threading.Thread(target=draw, name="forebay-progress", daemon=True)
    drawing.start()
    try:
        yield moved
    finally:
        done.set()
        drawing.join()
