"""How long readers of parameters had to wait for updates: the part of a step that nothing has hidden."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay._device import Clock, is_gpu

if TYPE_CHECKING:
    import torch

    from forebay import _core


class Exposure:
    """The waits of one step.

    On a GPU a wait is the time that its stream stood still: between two marks in the stream, before and after. They
    are read when they were reached, without waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._is_gpu = is_gpu(device)
        self._marks: list[tuple[Any, Any]] = []
        self._spare: list[Any] = []
        self._seconds = 0.0
        self.waits = 0

    def begin(self) -> None:
        """Begin a step: forget the waits of the one before."""
        self.seconds()
        # Marks that were not reached are not used again.
        self._marks.clear()
        self._seconds, self.waits = 0.0, 0

    def wait(self, engine: _core.Optimizer, homes: list[tuple[int, int]] | None, stream: int) -> None:
        """Wait for updates, and note how long."""
        before = self._mark()
        if engine.overlap_wait(homes, stream) is False:
            if self._is_gpu:
                self._spare.append(before)
            return
        self.waits += 1
        self._marks.append((before, self._mark()))

    def seconds(self) -> float:
        """Return the seconds of the waits that have ended."""
        rest = []
        for begin, end in self._marks:
            if self._clock.is_reached(end):
                self._seconds += self._clock.ns(begin, end) / 1e9
                if self._is_gpu:
                    self._spare += begin, end
            else:
                rest.append((begin, end))
        self._marks = rest
        return self._seconds

    def _mark(self) -> Any:
        return self._clock.mark(self._spare.pop() if self._spare else None)
