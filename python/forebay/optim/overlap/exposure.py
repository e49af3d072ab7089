"""How long readers of parameters had to wait for updates: the part of a step that nothing has hidden."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forebay._device import Clock, is_gpu

if TYPE_CHECKING:
    import torch

    from forebay import _core


@dataclass
class Waits:
    """The waits of one step."""

    # Before and after each wait that was not read yet.
    marks: deque[tuple[Any, Any]] = field(default_factory=deque)
    seconds: float = 0.0
    count: int = 0


class Exposure:
    """The waits of all steps.

    On a GPU a wait is the time that its stream stood still: between two marks in the stream, before and after. They
    are read when they were reached, without waiting: the host may be steps ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._is_gpu = is_gpu(device)
        self._steps: deque[Waits] = deque([Waits()])
        self._spare: list[Any] = []
        # The last step whose waits were all read, and the sum of all of them.
        self._last = Waits()
        self._total_seconds, self._total_steps = 0.0, 0
        self._has_begun = False

    def begin(self) -> None:
        """Begin a step; readers have waited for all of the one before."""
        self._read()
        if self._has_begun:
            self._steps.append(Waits())
        self._has_begun = True

    def wait(self, engine: _core.Optimizer, homes: list[tuple[int, int]] | None, stream: int) -> None:
        """Wait for updates, and note how long."""
        before = self._mark()
        if not engine.overlap_wait(homes, stream):
            if self._is_gpu:
                self._spare.append(before)
            return
        step = self._steps[-1]
        step.count += 1
        step.marks.append((before, self._mark()))

    def stats(self) -> dict[str, float | int]:
        """Return the seconds and number of the last whole step's waits, and the sum over steps."""
        self._read()
        return {
            "exposed_s": self._last.seconds,
            "waits": self._last.count,
            "exposed_total_s": self._total_seconds,
            "exposed_steps": self._total_steps,
        }

    def _read(self) -> None:
        while True:
            step = self._steps[0]
            while step.marks and self._clock.is_reached(step.marks[0][1]):
                begin, end = step.marks.popleft()
                step.seconds += self._clock.ns(begin, end) / 1e9
                if self._is_gpu:
                    self._spare += begin, end
            if step.marks or len(self._steps) == 1:
                return
            self._last = self._steps.popleft()
            self._total_seconds, self._total_steps = self._total_seconds + step.seconds, self._total_steps + 1

    def _mark(self) -> Any:
        return self._clock.mark(self._spare.pop() if self._spare else None)
