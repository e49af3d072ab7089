"""A driver of the torch backend from which a test takes waits out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay import _accelerator

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Broken:
    """A driver without some of its waits; counts what it left out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left_out = 0
        self._names: dict[tuple[int, int], str] = {}
        self._monkeypatch = monkeypatch
        made = _accelerator.Driver.stream

        def stream(driver: Any, name: str) -> Any:
            found = made(driver, name)
            self._names[found.device_index, found.stream_id] = name
            return found

        monkeypatch.setattr(_accelerator.Driver, "stream", stream)

    def name(self, stream: Any) -> str:
        """Return the engine's name for a stream; ``torch`` for torch's own."""
        return self._names.get((stream.device_index, stream.stream_id), "torch")

    def stream(self, name: str) -> torch.Stream:
        """Return the stream that the engine calls so."""
        index, number = next(place for place, known in self._names.items() if known == name)
        return torch.Stream(stream_id=number, device_index=index, device_type=20)

    def leave_out(self, call: str, where: Callable[..., bool], answer: Any = None) -> None:
        """Leave out calls of the driver where ``where`` is true of their arguments."""
        original = getattr(_accelerator.Driver, call)

        def changed(driver: Any, *arguments: Any) -> Any:
            if where(*arguments):
                self.left_out += 1
                return answer
            return original(driver, *arguments)

        self._monkeypatch.setattr(_accelerator.Driver, call, changed)
