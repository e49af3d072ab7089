"""What the checkpoint tests share: a model with every kind of parameter, steps, snapshots and manifests."""

from __future__ import annotations

import inspect
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import checkpoint as dcp

import forebay
from support.steps import take_steps
from support.tensors import random

if TYPE_CHECKING:
    from collections.abc import Iterable

ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}
"""What DCP takes so that it does not warn about a single process; an older torch has no such argument."""

PREFIX = '{"forebay_checkpoint":1,"crc32":"'


class Net(torch.nn.Module):
    """Tied, frozen, unused, scalar, empty and transposed parameters, and buffers."""

    def __init__(self, seed: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))
        self.turned = torch.nn.Parameter(torch.empty(8, 6).t())
        self.frozen = torch.nn.Parameter(torch.empty(5), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.empty(7))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(random(parameter.shape, 1000 * seed + i))
        self.count.fill_(seed)
        self.to(dtype)
        self.head.weight = self.embed.weight
        assert not self.turned.is_contiguous()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Use everything but what is called unused."""
        hidden = (
            self.body(self.embed(tokens)) * self.scale + self.frozen.sum() + self.turned.sum(0) + self.nothing.sum()
        )
        return self.head(torch.tanh(hidden))


def train(model: torch.nn.Module, optimizers: Any, steps: Iterable[int]) -> None:
    """Take the steps with these numbers; the data depend on the number alone."""

    def backward(step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 11, (4, 6), generator=generator)
        model.zero_grad()
        logits = model(tokens).float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

    def count() -> None:
        for name, buffer in model.named_buffers():
            if name == "count":
                buffer += 1

    take_steps(optimizers, steps, backward, count)


def snapshot(model: torch.nn.Module, optimizers: Any = ()) -> dict[str, torch.Tensor]:
    """Return copies of everything that a checkpoint keeps, by name; numbers of groups too."""
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    kept = {f"model.{name}": value.detach().cpu().clone() for name, value in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            for kind, value in state.items():
                kept[f"state.{names[parameter]}.{kind}"] = value.detach().cpu().clone()
        for i, group in enumerate(optimizer.param_groups):
            for key in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"):
                kept[f"group.{number}.{i}.{key}"] = torch.as_tensor(group[key], dtype=torch.float64)
    return kept


def folders(path: Path) -> list[str]:
    """Return the names of the numbered subfolders."""
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint's folder."""
    return sorted(folder.glob("*.safetensors"))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a manifest's contents without its seal."""
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    del manifest["forebay_checkpoint"], manifest["crc32"]
    return manifest


def seal(folder: Path, manifest: dict[str, Any] | str) -> None:
    """Write a manifest with a right checksum, whatever it says."""
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    rest = text[1:].encode()
    (folder / "manifest.json").write_bytes(f'{PREFIX}{zlib.crc32(rest):08x}",'.encode() + rest)


def pair(seed: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Net, forebay.AdamW]:
    """Return a model and an optimizer for all of it."""
    model = Net(seed, dtype)
    return model, forebay.AdamW(model.parameters(), **{"lr": 1e-2, **options})
