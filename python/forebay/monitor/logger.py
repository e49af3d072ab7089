"""``log_stats``: live figures are written once for each step, without a change of the training loop."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Self

from forebay._checks import whole
from forebay._rank import rank
from forebay.errors import OptionError
from forebay.monitor.figures import stats
from forebay.monitor.sinks import open_sink

if TYPE_CHECKING:
    from types import TracebackType

    from forebay.monitor.schema import Stats
    from forebay.monitor.sinks import Sink


class StatsLogger:
    """Writes live figures: when ``log`` is called, or after the steps of an optimizer once it was started.

    Parameters
    ----------
    to
        A path that ends in ``.jsonl``, the path of a folder for TensorBoard, a ``SummaryWriter``, or a run of wandb.
    every
        After how many steps a record is written.
    optimizer
        Whose steps count, in a wrapper or not. By default the first optimizer that steps after the start, which may be
        torch's.
    all_ranks
        Whether all ranks write, each to a path of its own; by default only rank 0 does.
    """

    def __init__(self, to: Any, *, every: int = 1, optimizer: Any = None, all_ranks: bool = False) -> None:
        self._every = whole("every", every, 1)
        self._optimizer = optimizer
        mine = rank()
        self._sink: Sink | None = open_sink(to, mine if all_ranks else 0) if all_ranks or mine == 0 else None
        self._lock = threading.Lock()
        self._hook: Any = None
        self._clock: weakref.ref[Any] | None = None
        self._steps = 0
        self._last: Stats | None = None

    def log(self, step: int | None = None) -> None:
        """Write a record now.

        Parameters
        ----------
        step
            The number of the step; by default how many steps this logger has seen.
        """
        number = self._steps if step is None else whole("step", step, 0)
        with self._lock:
            if self._sink is not None:
                record = stats(self._last)
                self._sink.write(number, record)
                self._last = record

    def start(self) -> Self:
        """Write a record after every ``every``-th step from now on."""
        if self._hook is not None:
            raise OptionError("this logger was started already; call close() first, or make another logger")
        from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

        from forebay._wrapped import bare

        if self._optimizer is None:
            self._hook = register_optimizer_step_post_hook(self._after_step)
            return self
        inner = bare(self._optimizer)
        if not isinstance(inner, Optimizer):
            raise OptionError(f"invalid optimizer: {type(self._optimizer).__name__}; give a torch.optim.Optimizer")
        self._hook = inner.register_step_post_hook(self._after_step)
        return self

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._optimizer is None:
            clock = None if self._clock is None else self._clock()
            if clock is None:
                self._clock = weakref.ref(optimizer)
            elif clock is not optimizer:
                return
        self._steps += 1
        if self._steps % self._every:
            return
        try:
            self.log()
        except Exception as error:
            # A full disk must not end the training.
            self._sink = None
            warnings.warn(
                f"live figures are no longer logged: {type(error).__name__}: {error}; make room or repair the sink, "
                "and start a new logger",
                stacklevel=2,
            )

    def close(self) -> None:
        """Stop writing, and close what this logger has opened. May be called again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        with self._lock:
            sink, self._sink = self._sink, None
            if sink is not None:
                sink.close()

    def __enter__(self) -> Self:
        return self if self._hook is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def log_stats(to: Any, *, every: int = 1, optimizer: Any = None, all_ranks: bool = False) -> StatsLogger:
    """Write live figures after every ``every``-th step from now on, without a change of the training loop.

    Returns a started :class:`StatsLogger`. Use it in a ``with`` statement, or call its ``close`` when training ends. If
    writing fails in a step, a warning says why, nothing more is written, and training goes on.

    Parameters
    ----------
    to, every, optimizer, all_ranks
        As in :class:`StatsLogger`.
    """
    return StatsLogger(to, every=every, optimizer=optimizer, all_ranks=all_ranks).start()
