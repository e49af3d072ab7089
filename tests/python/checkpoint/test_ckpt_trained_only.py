"""Saves without frozen parameters, as for adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay import checkpoint
from support.checkpoint import read_manifest

if TYPE_CHECKING:
    from pathlib import Path


class Adapted(torch.nn.Module):
    """A frozen layer with a small trained one beside it, and a layer with running statistics."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(64, 64)
        self.base.requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(64, affine=False)
        self.down = torch.nn.Linear(64, 2, bias=False)
        self.up = torch.nn.Linear(2, 64, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add the trained layer to the frozen one."""
        return self.norm(self.base(inputs) + self.up(self.down(inputs)))


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(how: str, path: Path, model: torch.nn.Module, optimizer: Any) -> None:
    if how == "save":
        checkpoint.save(path, model, optimizer, trained_only=True)
    else:
        checkpoint.async_save(path, model, optimizer, trained_only=True).result()


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_run_goes_on_from_what_is_trained(how: str, tmp_path: Path) -> None:
    model = Adapted(1)
    optimizer = forebay.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(model, optimizer, range(3))
    save(how, tmp_path, model, optimizer)
    names = {name for name in read_manifest(tmp_path / "00000001")["tensors"] if name.startswith("model.")}
    assert names == {
        "model.down.weight",
        "model.up.weight",
        "model.norm.running_mean",
        "model.norm.running_var",
        "model.norm.num_batches_tracked",
    }
    train(model, optimizer, range(3, 6))

    again = Adapted(1)  # the frozen layer comes from elsewhere
    resumed = forebay.AdamW([p for p in again.parameters() if p.requires_grad], lr=1e-2)
    checkpoint.load(tmp_path, again, resumed)
    train(again, resumed, range(3, 6))
    for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_a_parameter_that_is_trained_only_here_is_missed(tmp_path: Path) -> None:
    model = Adapted(1)
    checkpoint.save(tmp_path, model, trained_only=True)
    model.base.requires_grad_(True)
    with pytest.raises(forebay.CheckpointError, match=r"it lacks model\.base"):
        checkpoint.load(tmp_path, model)


def test_a_whole_checkpoint_must_be_whole(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, torch.nn.ModuleDict({"down": torch.nn.Linear(64, 2, bias=False)}))
    with pytest.raises(forebay.CheckpointError, match="it lacks"):
        checkpoint.load(tmp_path, Adapted(1))
