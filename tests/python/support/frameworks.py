"""What tests of integrations share: a small model, and files of ``forebay.integrations`` that are imported again."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import forebay
from support.tensors import random

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

WIDTH = 24


class Block(torch.nn.Module):
    """A layer with a residual, whose activations are worth saving."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.down = torch.nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input and what the layer adds to it."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """Four layers and a head; the same weights each time."""

    def __init__(self) -> None:
        super().__init__()
        state = torch.random.get_rng_state()
        torch.manual_seed(7)
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        torch.random.set_rng_state(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head of the last layer."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batches(count: int) -> list[torch.Tensor]:
    """Return inputs, the same ones each time."""
    return [random((8, WIDTH), 100 + i) for i in range(count)]


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients are not small."""
    return (model(batch) - batch.roll(1, 1)).square().sum() / 8


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return copies of a model's parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def import_again(name: str) -> Any:
    """Import a file of ``forebay.integrations`` once more, as another module; the first stays."""
    path = Path(forebay.__file__).parent / "integrations" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"forebay_again_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pretend_version(patch: pytest.MonkeyPatch, package: str, version: str | None) -> None:
    """Have a package look as if another version of it, or none, were installed."""
    real = metadata.version

    def pretend(name: str) -> str:
        if name != package:
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    patch.setattr(metadata, "version", pretend)


STUBS = Path(__file__).parents[2] / "integrations" / "stubs"
"""Packages that stand for frameworks which cannot be installed, with the contract that forebay relies on."""


def with_stub(patch: pytest.MonkeyPatch, name: str) -> Any:
    """Import a file of ``forebay.integrations`` with a package that stands for its framework."""
    patch.syspath_prepend(STUBS)
    for module in list(sys.modules):
        if module.partition(".")[0] == name or module == f"forebay.integrations.{name}":
            patch.delitem(sys.modules, module)
    return importlib.import_module(f"forebay.integrations.{name}")


def loop(optimizer: torch.optim.Optimizer, model: torch.nn.Module, steps: int, after: Callable[[], None]) -> None:
    """Train with gradients clipped to a norm of one; ``after`` runs after each step."""
    for batch in batches(steps):
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after()
        optimizer.zero_grad()
