"""Models and comparisons that the tests of activation offload share."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import forebay
from support.tensors import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WIDTH, ROWS = 64, 96
ACTIVATION_BYTES = WIDTH * ROWS * 4
MIN_BYTES = 4096


class Block(nn.Module):
    """A layer that saves inputs, outputs and intermediate results, some of them twice."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many values as come in."""
        hidden = self.up(self.norm(x))
        return x + self.down(torch.tanh(hidden) * torch.sigmoid(hidden))


class Stack(nn.Module):
    """Layers in a ModuleList, one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them."""
        for layer in self.layers:
            x = layer(x)
        return x


class Of(nn.Module):
    """A layer made of a function of the input and a weight."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH) / 8)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the function."""
        return self.function(x, self.weight)


def stack(device: torch.device, depth: int = 4, seed: int = 0) -> Stack:
    """Return a model, the same one each time."""
    torch.manual_seed(seed)
    return Stack(*(Block() for _ in range(depth))).to(device)


def data(device: torch.device, rows: int = ROWS, seed: int = 1) -> torch.Tensor:
    """Return an input, the same one each time."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Take the gradients away."""
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def train(model: nn.Module, x: torch.Tensor, passes: int = 1) -> list[torch.Tensor]:
    """Return the gradients, of the input too, of some passes together."""
    x = x.clone().requires_grad_()
    for _ in range(passes):
        model(x).square().mean().backward()
    assert x.grad is not None
    return [*gradients(model), x.grad]


def assert_same_in_threads(model: nn.Module, x: torch.Tensor, expected: Sequence[Sequence[torch.Tensor]]) -> None:
    """Assert that passes of several threads at once give each its gradients: of the input times 1, 2 and so on."""
    found: dict[int, Sequence[torch.Tensor]] = {}

    def work(i: int) -> None:
        found[i] = gradients_of_multiple(model, x, i + 1)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(expected))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, gradients_of_one in enumerate(expected):
        assert_same(gradients_of_one, found[i])


def gradients_of_multiple(model: nn.Module, x: torch.Tensor, times: int) -> Sequence[torch.Tensor]:
    """Return the gradients of a multiple of an input, without leaving them in the model."""
    return torch.autograd.grad(model(x * times).square().mean(), list(model.parameters()))


def engines(handle: Any) -> list[Any]:
    """Return the engines behind a handle."""
    return list(handle._saver.engines.values())


def assert_nothing_left(handle: Any) -> None:
    """Assert that no memory is held once no graph is."""
    gc.collect()
    for engine in engines(handle):
        assert not engine.held
        assert not engine.guards


def offloaded(model: nn.Module, **options: Any) -> Any:
    """Offload with the small sizes of these tests."""
    return forebay.offload_activations(
        model, **{"min_bytes": MIN_BYTES, "fraction": 1.0, "keep_last": 0, "max_in_flight_bytes": 1, **options}
    )


def compare(model: nn.Module, run: Callable[[], Any], **options: Any) -> Any:
    """Assert that a run gives the same gradients with offload as without, and that bytes moved; return the handle."""
    expected = run()
    handle = offloaded(model, **options)
    found = run()
    handle.remove()
    assert_same(expected, found)
    stats = handle.stats()
    assert stats["stored_bytes"] > 0
    assert stats["fetched_bytes"] > 0
    assert_nothing_left(handle)
    return handle
