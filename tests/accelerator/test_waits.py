"""Each wait of the backend is taken out in turn, and the fake accelerator shows that it was needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay import _accelerator
from support import fake
from support.broken import Broken

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = range(8)
SIZE = 24 << 10
STEPS = 4


def streamed(device: torch.device, seed: int, slots: int) -> list[torch.Tensor]:
    """Train on a stream of the caller's, with chunks that cut the parameters; fresh memory for each run."""
    torch.manual_seed(seed)
    stream = torch.Stream(device=device)
    data = [torch.randn(SIZE).to(device) for _ in range(2)]
    torch.accelerator.synchronize()
    with fake.delays(4, seed), stream:
        given = [torch.nn.Parameter(tensor.clone()) for tensor in data]
        optimizer = forebay.AdamW(given, lr=1e-2, chunk_bytes=64 << 10, slots=slots)
        for _ in range(STEPS):
            for parameter in given:
                parameter.grad = parameter.detach().mul(0.5)
            optimizer.step()
        state = [optimizer.state[parameter]["exp_avg"].clone() for parameter in given]
        found = [parameter.detach().cpu() for parameter in given]
        # Keeps the ring until all is over, also where a wait is missing.
        torch.accelerator.synchronize()
        optimizer.close()
    return [*found, *state]


def expected(device: torch.device, seed: int) -> list[torch.Tensor]:
    """Train with torch in the same way."""
    torch.manual_seed(seed)
    given = [torch.nn.Parameter(torch.randn(SIZE).to(device)) for _ in range(2)]
    optimizer = torch.optim.AdamW(given, lr=1e-2, fused=True)
    for _ in range(STEPS):
        for parameter in given:
            parameter.grad = parameter.detach().mul(0.5)
        optimizer.step()
    return [tensor.cpu() for tensor in [*given, *(optimizer.state[one]["exp_avg"] for one in given)]]


def differs(device: torch.device, slots: int) -> bool:
    """Whether some run differs from torch's."""
    for seed in SEEDS:
        found = streamed(device, seed, slots)
        if not all(torch.equal(*pair) for pair in zip(found, expected(device, seed), strict=True)):
            return True
    return False


@pytest.mark.parametrize("slots", [2, 12])
def test_with_all_waits_every_run_has_torchs_bits(device: torch.device, slots: int) -> None:
    assert not differs(device, slots)


WAITS: dict[str, tuple[str, Callable[[Broken], Callable[..., bool]], Any, int]] = {
    "the update waits for the fetch": ("wait", lambda b: lambda stream, _: b.name(stream) == "torch", None, 2),
    "the store waits for the update": ("wait", lambda b: lambda stream, _: b.name(stream) == "store", None, 2),
    "a fetch waits for a store of its bytes": (
        "wait",
        lambda b: lambda stream, _: b.name(stream) == "fetch",
        None,
        12,
    ),
    "the host waits for a slot": ("synchronize", lambda _: lambda _: True, None, 2),
    "the host asks whether a slot is free": ("query", lambda _: lambda _: True, True, 2),
}


@pytest.mark.parametrize("wait", WAITS)
def test_without_a_wait_some_run_differs(device: torch.device, broken: Broken, wait: str) -> None:
    call, where, answer, slots = WAITS[wait]
    # Opened before: what is counted are waits of steps.
    streamed(device, 0, slots)
    broken.leave_out(call, where(broken), answer)
    assert differs(device, slots)
    assert broken.left_out


def test_work_on_another_stream_than_the_callers_shows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    borrow = _accelerator.Driver.borrow_stream
    monkeypatch.setattr(_accelerator.Driver, "borrow_stream", lambda driver, _: borrow(driver, 0))
    assert differs(device, 2)


def test_copies_go_to_their_own_streams(device: torch.device, broken: Broken) -> None:
    given = [torch.nn.Parameter(torch.randn(SIZE).to(device))]
    # Slots of their own, so that the ring and its streams are made here.
    optimizer = forebay.AdamW(given, chunk_bytes=68 << 10, slots=12)
    given[0].grad = torch.ones_like(given[0])
    optimizer.step()
    optimizer.synchronize()
    fake.sleep(300)
    busy = torch.Event(device=device)
    busy.record()
    optimizer.step()
    fetched = torch.Event(device=device)
    fetched.record(broken.stream("fetch"))
    fetched.synchronize()
    assert not busy.query(), "fetches waited for the caller's stream"
    optimizer.synchronize()
