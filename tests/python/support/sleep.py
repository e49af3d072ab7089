"""What the tests of sleep and wake share: models, training and snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import forebay
from support.tensors import tensors

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 24


class Block(nn.Module):
    """A layer with modules of its own, a buffer and a residual."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, device=device)
        self.linear = nn.Linear(WIDTH, WIDTH, device=device)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the input."""
        return x + self.scale * self.linear(self.norm(x)).tanh()


class Net(nn.Module):
    """Layers in a list, weights tied between first and last, a frozen weight and batch statistics."""

    def __init__(self, device: torch.device, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
        self.layers = nn.ModuleList(Block(device) for _ in range(layers))
        self.stats = nn.BatchNorm1d(WIDTH, device=device)
        self.frozen = nn.Parameter(torch.randn(WIDTH, device=device), requires_grad=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Go through all layers."""
        x = self.embed(x) + self.frozen
        for layer in self.layers:
            x = layer(x)
        return self.head(self.stats(x))


def batch(device: torch.device, step: int) -> torch.Tensor:
    """Return the input of a step, the same on every machine."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    steps: int,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Take steps; ``between`` runs after each."""
    for step in range(steps):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(device, step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()
        between()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """Return copies of everything, on the CPU."""
    found = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        found += tensors(optimizer.state_dict()["state"])
    return [tensor.detach().cpu().clone() for tensor in found]


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory was taken away."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "lbfgs": lambda params: torch.optim.LBFGS([p for p in params if p.requires_grad], max_iter=3, history_size=3),
    "forebay": lambda params: forebay.AdamW(params, lr=1e-2),
    "forebay-resident": lambda params: forebay.AdamW(params, lr=1e-2, placement="resident"),
}
