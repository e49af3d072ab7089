"""Accelerators on the CPU: a small model, loops with and without one, and comparisons of weights."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 64
LR = 1e-2


class Block(torch.nn.Module):
    """One layer of :class:`Blocks`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with something added."""
        return x + torch.tanh(self.linear(x))


class Blocks(torch.nn.Module):
    """A small model, the same one at each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number for each row."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(number: int, rank: int = 0) -> torch.Tensor:
    """Return the input of one pass."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def train(accelerator: Any, model: Any, optimizer: Any, steps: range, limit: float | None = None) -> None:
    """Train as accelerate's documentation does; clip with the accelerator if there is a limit."""
    for step in steps:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(step, accelerator.process_index)).square().mean())
            if limit is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()


def train_by_hand(model: Any, optimizer: Any, steps: range, accumulate: int = 1, rank: int = 0) -> None:
    """Train without an accelerator."""
    for step in steps:
        is_last = (step + 1) % accumulate == 0
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_last)
        with model.no_sync() if hasattr(model, "no_sync") and not is_last else nullcontext():
            (model(batch(step, rank)).square().mean() / accumulate).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's trained parameters."""
    return {name: _whole(one.detach()).clone() for name, one in model.named_parameters() if one.requires_grad}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Fail where a parameter differs in any bit."""
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), f"{name} differs by {(value - expected[name]).abs().max()}"


@contextmanager
def sharding_on_cpu() -> Iterator[None]:
    """Make accelerate take a group of CPU processes for one of GPUs: by itself it shards no model on CPUs."""
    original = PartialState.__init__

    def init(self: PartialState, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init
    try:
        yield
    finally:
        PartialState.__init__ = original


def forget_accelerators() -> None:
    """Forget the state that all accelerators of a process share, so that the next one can be of another kind."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
