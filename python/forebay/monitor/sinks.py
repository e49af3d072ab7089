"""Where live figures are written: a file of JSON lines, TensorBoard, Weights & Biases.

No framework is imported here unless it is asked for. A writer and a run are known by their methods.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forebay.errors import OptionError
from forebay.monitor.figures import scalars

if TYPE_CHECKING:
    from forebay.monitor.schema import Stats

PREFIX = "forebay/"
"""What the names of scalars begin with in TensorBoard and Weights & Biases."""


class Sink(Protocol):
    """Something that takes records."""

    def write(self, step: int, record: Stats) -> None:
        """Write one record."""

    def close(self) -> None:
        """Write what is left, and close what this sink has opened."""


class JsonLines:
    """A file with one JSON object in each line. A line is complete once it was written: a kill loses none of them."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: one line is one write to the file's end, also if several processes write to it.
        self._file = path.open("ab", buffering=0)

    def write(self, step: int, record: Stats) -> None:
        """Write one line."""
        line = json.dumps({"step": step, **record}, allow_nan=False, separators=(",", ":"))
        self._file.write(f"{line}\n".encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars in event files, through a ``SummaryWriter``."""

    def __init__(self, writer: Any, *, owned: bool) -> None:
        self._writer, self._owned = writer, owned

    def write(self, step: int, record: Stats) -> None:
        """Add the scalars of a record."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(PREFIX + name, value, step)

    def close(self) -> None:
        """Write what is left. A writer of the caller's stays open."""
        self._writer.flush()
        if self._owned:
            self._writer.close()


class WandB:
    """Scalars in a run of Weights & Biases.

    They become part of the row that the run is about to write, and the program's next ``run.log`` writes it. Writing
    rows here would advance the run's step, and wandb drops what a program logs with an earlier step of its own.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        if callable(getattr(run, "define_metric", None)):
            run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")

    def write(self, step: int, record: Stats) -> None:
        """Add the scalars of a record to the run's next row."""
        named = {PREFIX + name: value for name, value in scalars(record).items()}
        self._run.log({f"{PREFIX}step": step, **named}, commit=False)

    def close(self) -> None:
        """Leave the run to the caller."""


def open_sink(to: Any, rank: int) -> Sink:
    """Return the sink for what a user has given. Ranks above 0 write paths of their own.

    Parameters
    ----------
    to
        A path that ends in ``.jsonl``, the path of a folder for TensorBoard, a ``SummaryWriter``, or a run of wandb.
    rank
        This process's rank.
    """
    if isinstance(to, (str, os.PathLike)):
        path = Path(os.fsdecode(to))
        if path.suffix == ".jsonl":
            return JsonLines(path.with_suffix(f".rank{rank}.jsonl") if rank else path)
        return TensorBoard(_writer(path / f"rank{rank}" if rank else path), owned=True)
    if callable(getattr(to, "add_scalar", None)):
        return TensorBoard(to, owned=False)
    if callable(getattr(to, "log", None)) and not isinstance(to, type):
        return WandB(to)
    raise OptionError(
        f"live figures cannot be written to {type(to).__name__}; give a path that ends in .jsonl, a folder for "
        "TensorBoard, a SummaryWriter or a run of wandb"
    )


def _writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise OptionError(
            f"{folder} is a folder for TensorBoard, and the package tensorboard is not installed; install it, or give "
            "a path that ends in .jsonl"
        ) from error
    return SummaryWriter(str(folder))
