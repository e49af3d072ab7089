"""Activations, sleep and checkpoints on the fake accelerator: bits, and waits that are taken out."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import forebay
from forebay import checkpoint
from support import fake
from support.broken import Broken

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH, DEPTH, BATCH = 64, 6, 128
SEEDS = range(6)


class Layer(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with something added."""
        return x + torch.tanh(x @ self.weight)


def model_on(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(DEPTH))).to(device)


def batch(device: torch.device, number: int = 0) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)


def gradients(device: torch.device, seed: int, **options: Any) -> list[torch.Tensor]:
    """Return the gradients of two passes; with options, of a model whose activations are offloaded."""
    model = model_on(device)
    if options:
        forebay.offload_activations(model, layers=list(model), min_bytes=0, **options)
    with fake.delays(3, seed):
        for number in range(2):
            model(batch(device, number)).square().mean().backward()
        return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def differs(run: Callable[[int], list[torch.Tensor]], wanted: list[torch.Tensor]) -> bool:
    """Whether a run with some seed gives other bits."""
    return any(not all(map(torch.equal, run(seed), wanted)) for seed in SEEDS)


OPTIONS = [{"fraction": 1.0, "max_in_flight_bytes": 1}, {"fraction": 1.0}, {"fraction": 0.5}, {}]


@pytest.mark.parametrize("options", OPTIONS)
def test_offloaded_activations_give_the_same_gradients(device: torch.device, options: dict[str, Any]) -> None:
    plain = gradients(device, 0)
    assert len(plain) == DEPTH
    assert not differs(lambda seed: gradients(device, seed, keep_last=0, **options), plain)


def test_activations_leave_the_device(device: torch.device) -> None:
    model = model_on(device)
    options = {"fraction": 1.0, "keep_last": 0, "max_in_flight_bytes": 1}
    handle = forebay.offload_activations(model, layers=list(model), min_bytes=0, **options)
    model(batch(device)).square().mean().backward()
    stats = handle.stats()
    assert stats["stored_bytes"] >= (DEPTH - 2) * BATCH * WIDTH * 4
    assert stats["fetched_bytes"] == stats["stored_bytes"]


ACTIVATION_WAITS: dict[str, tuple[str, Callable[[Broken], Callable[..., bool]]]] = {
    "a store waits for what computes the tensor": ("wait", lambda b: lambda stream, _: "store" in b.name(stream)),
    "torch's stream waits for fetches and stores": ("wait", lambda b: lambda stream, _: b.name(stream) == "torch"),
    "a fetch waits for the store and for its memory": ("wait", lambda b: lambda stream, _: "fetch" in b.name(stream)),
}


@pytest.mark.parametrize("wait", ACTIVATION_WAITS)
def test_without_a_wait_some_gradient_differs(device: torch.device, broken: Broken, wait: str) -> None:
    plain = gradients(device, 0)
    call, where = ACTIVATION_WAITS[wait]
    broken.leave_out(call, where(broken))
    assert differs(lambda seed: gradients(device, seed, keep_last=0, fraction=1.0, max_in_flight_bytes=1), plain)
    assert broken.left_out


def slept(device: torch.device, seed: int, sleeps: int = 2) -> list[torch.Tensor]:
    """Return the parameters after training that sleeps in between."""
    model = model_on(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sleeper = forebay.Sleeper(model, optimizer)
    with fake.delays(3, seed):
        for number in range(sleeps + 1):
            model(batch(device, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number < sleeps:
                sleeper.sleep()
                # Others use the memory meanwhile.
                others = [torch.full((WIDTH, WIDTH), float(i), device=device) for i in range(4 * DEPTH)]
                del others
                sleeper.wake()
        return [parameter.detach().cpu() for parameter in model.parameters()]


def awake(device: torch.device) -> list[torch.Tensor]:
    """Return the same without sleep."""
    model = model_on(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for number in range(3):
        model(batch(device, number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_training_with_sleep_is_training_without(device: torch.device) -> None:
    assert not differs(lambda seed: slept(device, seed), awake(device))


def test_a_sleeping_model_takes_no_memory(device: torch.device) -> None:
    model = model_on(device)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated(device)
    sleeper = forebay.Sleeper(model)
    sleeper.sleep()
    assert torch.accelerator.memory_allocated(device) <= before - DEPTH * WIDTH * WIDTH * 4
    sleeper.wake()
    assert torch.accelerator.memory_allocated(device) >= before


@pytest.mark.parametrize("call", ["wait", "synchronize"])
def test_without_the_waits_of_a_sleep_some_run_differs(device: torch.device, broken: Broken, call: str) -> None:
    expected = awake(device)
    broken.leave_out(call, lambda *_: True)
    if call == "synchronize":
        broken.leave_out("query", lambda *_: True, True)
    assert differs(lambda seed: slept(device, seed), expected)
    assert broken.left_out


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_continues_the_run(device: torch.device, tmp_path: Path, asynchronous: bool) -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = model_on(device)
        return model, forebay.AdamW(model.parameters(), lr=1e-2, chunk_bytes=32 << 10)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        model(batch(device, number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with fake.delays(2):
        model, optimizer = start()
        for number in range(2):
            step(model, optimizer, number)
        if asynchronous:
            handle = checkpoint.async_save(tmp_path / "one", model, optimizer)
            step(model, optimizer, 2)
            handle.result()
        else:
            checkpoint.save(tmp_path / "one", model, optimizer)
            step(model, optimizer, 2)
        step(model, optimizer, 3)
        again, its = start()
        checkpoint.load(tmp_path / "one", again, its)
        for number in (2, 3):
            step(again, its, number)
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one.cpu(), other.cpu())


def test_everything_is_given_back(device: torch.device) -> None:
    gradients(device, 0, fraction=1.0, keep_last=0)
    slept(device, 0)
    gc.collect()
    # What the saves of other tests keep for the next one.
    checkpoint.release()
    assert forebay._core._memory_for_test("torch:fake:0") == (0, 0)


def test_a_backend_is_chosen_by_name(device: torch.device) -> None:
    plain = gradients(device, 0)
    assert not differs(lambda seed: gradients(device, seed, keep_last=0, fraction=1.0, backend="torch_async"), plain)
    with pytest.raises(forebay.OptionError, match="invalid backend: 'cuda'"):
        gradients(device, 0, backend="cuda")
