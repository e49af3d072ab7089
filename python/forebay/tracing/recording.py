"""The context manager that users call."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from forebay import _core, _device, _trace
from forebay._checks import whole
from forebay._rank import ranks
from forebay.errors import Error, OptionError
from forebay.tracing.contents import Contents
from forebay.tracing.passes import Passes

if TYPE_CHECKING:
    from types import TracebackType

CAPACITY = 1 << 18
"""Records that a trace keeps by default."""


class trace:  # noqa: N801 -- a context manager, named as it is used
    """Record what forebay and torch's stream do inside a ``with`` block, and write it to a file.

    The file opens in Perfetto and in chrome://tracing. It has the passes of the training loop, every fetch, update and
    store of forebay's steps, copies of activations, sleeps and wakes, saves, waits with their reasons, and memory over
    time. Training has the same bits with and without it. The file is also written if the block raises an error.

    Of several ranks each writes its own file. ``{rank}`` in the path stands for the rank; without it rank 0 writes the
    path as given and rank 1 writes ``run.rank1.json`` for ``run.json``. ``forebay trace merge`` makes one file of them.

    Parameters
    ----------
    path
        The file to write. It is opened when the block is entered, and an error is raised then if that fails.
    capacity
        How many spans and values of counters to keep. Their memory is allocated once; when it is full, the oldest are
        dropped and counted.
    nvtx
        Whether passes are also NVTX ranges, for Nsight Systems. By default where CUDA is available.
    probe
        What ``forebay.probe()`` has measured on this machine. A report then compares the wire with its limit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity: int = CAPACITY,
        nvtx: bool | None = None,
        probe: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
            raise OptionError(f"invalid path: {path!r}; give the name of the file to write")
        if nvtx is not None and not isinstance(nvtx, bool):
            raise OptionError(f"invalid nvtx: {nvtx!r}; use True, False or None")
        if nvtx and not _device.has_nvtx():
            raise OptionError("nvtx=True needs CUDA, which this process does not have; leave it out")
        self._given = os.fspath(path)
        self._capacity = whole("capacity", capacity, 1)
        self._nvtx = _device.has_nvtx() if nvtx is None else nvtx
        self._reports: _trace.Reports | None = None
        self._passes: Passes | None = None
        self._contents = Contents(_limit(probe))
        self._process = 0
        # As they were when the block was entered.
        self._ranks: tuple[int, int] | None = None

    @property
    def path(self) -> Path:
        """The file that this rank writes."""
        return path_of(self._given, *(self._ranks or ranks()))

    @property
    def dropped(self) -> int:
        """How many records were dropped so far."""
        return 0 if self._reports is None else self._reports.core.dropped()

    def __enter__(self) -> Self:
        if self._reports is not None:
            raise OptionError("this trace was used already; make a new one for another block")
        self._ranks = ranks()
        reports = _trace.Reports(_core.Trace(self.path, self._capacity), self._contents.describe)
        self._reports, self._process = reports, os.getpid()
        self._passes = Passes(reports, nvtx=self._nvtx)
        self._passes.install()
        _trace.current = reports
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        reports, passes = self._reports, self._passes
        if reports is None or passes is None or self._ranks is None or self._process != os.getpid():
            return
        passes.remove()
        try:
            found = self._contents
            others = json.dumps(found.collect(reports.saves), allow_nan=False)
            layers = [(owner, number, name) for (owner, number), name in found.layers.items()]
            reports.core.finish(*self._ranks, list(found.owners.items()), layers, others)
        except Error as failed:
            # An error of the block says more than one of its trace.
            if error is None:
                raise
            error.add_note(f"its trace was not written: {failed}")
        finally:
            _trace.current = None


def _limit(probe: dict[str, Any] | None) -> dict[str, float] | None:
    """Return the limit of the wire that a probe has found: one way alone, and each way with both busy."""
    if probe is None:
        return None
    try:
        fetch = max(float(copy["pinned_fetch_gbps"]) for copy in probe["copies"])
        store = max(float(copy["pinned_store_gbps"]) for copy in probe["copies"])
        return {"fetch_gbps": fetch, "store_gbps": store, "both_gbps": float(probe["wire_gbps"])}
    except (KeyError, TypeError, ValueError):
        raise OptionError(f"invalid probe: {type(probe).__name__}; give what forebay.probe() returns") from None


def path_of(given: str, rank: int, count: int) -> Path:
    """Return the file that a rank writes."""
    if "{rank}" in given:
        return Path(given.replace("{rank}", str(rank)))
    path = Path(given)
    return path if rank == 0 or count == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _leave_trace_to_parent() -> None:
    """In a forked child nothing is recorded."""
    _trace.current = None


os.register_at_fork(after_in_child=_leave_trace_to_parent)
