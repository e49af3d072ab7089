"""Writers of asynchronous saves that one rank has in the place of its own."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist

import forebay
from forebay import _core

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator
    from pathlib import Path

WRITE = _core.write_checkpoint


def complete(path: Path) -> list[str]:
    """Return the checkpoints of a path that have a manifest."""
    return sorted(found.parent.name for found in path.glob("*/manifest.json"))


@contextlib.contextmanager
def writer(on: int, write: Any) -> Iterator[None]:
    """Put something in the place of one rank's writer."""
    with mock.patch.object(_core, "write_checkpoint", write if dist.get_rank() == on else WRITE):
        yield


def wait_for(event: threading.Event) -> Any:
    """Return a writer that waits before it writes."""

    def write(*arguments: Any) -> Any:
        assert event.wait(8)
        return WRITE(*arguments)

    return write


def fail(*_: Any) -> None:
    """Take the place of a writer that finds no room."""
    raise forebay.StorageError("write: no space left", errno=errno.ENOSPC)
