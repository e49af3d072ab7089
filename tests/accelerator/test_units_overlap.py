"""Overlapped steps in units on the fake accelerator: its streams run late, so that a missing wait shows."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay.optim.units import manager
from forebay.optim.units.wire import Copied, StreamWire
from support import fake

if TYPE_CHECKING:
    from collections.abc import Iterator

SEEDS = range(8)
MISSING = ("the step waits for torch's stream", "readers wait for their units", "gradients are held")
WIDTH = 96


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


class FakeWire(StreamWire):
    """The wire of a device with streams, over torch's generic streams; ``missing`` names what is left out."""

    missing = ""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = SimpleNamespace(
            Stream=lambda device: torch.Stream(device=device),
            Event=lambda enable_timing: torch.Event(device=device, enable_timing=enable_timing),
            current_stream=torch.accelerator.current_stream,
            stream=on,
        )
        self._in, self._out, self._beside = self._module.Stream(device), self._module.Stream(device), None
        self._kept: list[torch.Tensor] = []

    def close(self, slots: Any) -> None:
        """Keep the slots: this device has no ``record_stream``."""
        self._kept.extend(slots)

    def store(self, device: torch.Tensor, host: torch.Tensor) -> Copied:
        """Copy from the device to the host, when the current stream's work so far has ended."""
        self._kept.append(device)
        self._out.wait_event(self._module.current_stream(self._device).record_event())
        return self._submit(self._out, device, host)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Submit the work of this context to a stream of its own."""
        if self.missing != "the step waits for torch's stream":
            with super().beside():
                yield
            return
        self._beside = self._beside or self._module.Stream(self._device)
        with on(self._beside):
            yield

    def wait(self, mark: Any, stream: int) -> None:
        """Make a stream wait for a mark."""
        if self.missing != "readers wait for their units":
            super().wait(mark, stream)


@pytest.fixture(autouse=True)
def wires(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put wires with streams into all optimizers."""
    monkeypatch.setattr(manager, "wire_for", lambda device: FakeWire(device))


def train(device: torch.device, *, overlaps: bool, seed: int = 0) -> list[torch.Tensor]:
    """Return the weights and losses of a short run on a stream of the caller's."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to(device)
    data = [torch.randn(16, WIDTH).to(device) for _ in range(4)]
    torch.accelerator.synchronize()
    optimizer: Any = torch.optim.NAdam(model.parameters(), lr=1e-2)
    losses = []
    if overlaps:
        optimizer = forebay.offload(optimizer, unit_bytes=1)
        handle = forebay.overlap_step(model, optimizer)
    with fake.delays(3, seed) if overlaps else torch.enable_grad(), on(torch.Stream(device=device)):
        for batch in data:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            if overlaps and FakeWire.missing == "gradients are held":
                handle._overlap._held.clear()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found = [*losses, *(parameter.detach().clone() for parameter in model.parameters())]
        torch.accelerator.synchronize()
        return [tensor.cpu() for tensor in found]


def differs(device: torch.device) -> bool:
    """Whether some run differs from a plain one."""
    for seed in SEEDS:
        found, expected = train(device, overlaps=True, seed=seed), train(device, overlaps=False, seed=seed)
        if not all(map(torch.equal, found, expected)):
            return True
    return False


def test_with_all_waits_every_run_is_the_plain_one(device: torch.device) -> None:
    assert not differs(device)


@pytest.mark.parametrize("missing", MISSING)
def test_without_a_wait_some_run_differs(device: torch.device, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(FakeWire, "missing", missing)
    assert differs(device)


def test_gradients_are_held_until_the_step_has_used_them(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]).to(device)
    optimizer = forebay.offload(torch.optim.NAdam(model.parameters()), unit_bytes=1)
    handle = forebay.overlap_step(model, optimizer)
    for _ in range(2):
        model(torch.ones(4, WIDTH).to(device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(4, WIDTH).to(device)).sum().backward()
    # The step waits for it.
    fake.sleep(300)
    optimizer.step()
    optimizer.zero_grad()
    assert handle.stats()["held_bytes"] == 3 * 4 * WIDTH * WIDTH
    torch.accelerator.synchronize()
    model(torch.ones(4, WIDTH).to(device))
    assert handle.stats()["held_bytes"] == 0
