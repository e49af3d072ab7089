"""What the checkpoint tests share: a model with every kind of parameter, steps, snapshots, children and manifests."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from adamw_helpers import bits, random

import forebay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 11, (4, 6), generator=generator)
        model.zero_grad()
        logits = model(tokens).float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
        for name, buffer in model.named_buffers():
            if name == "count":
                buffer += 1


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


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Assert that two snapshots have the same names and bits, and name the first difference."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        other = right[name]
        assert (value.shape, value.dtype) == (other.shape, other.dtype), name
        assert torch.equal(bits(value), bits(other)), name


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


def in_child(work: Callable[[], object]) -> str:
    """Run in a forked child; return what it returned as text, or what it raised, and fail if it was killed."""
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU torch cannot compute gradients in a forked child")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork.
        try:
            text = str(work())
        except BaseException as failure:
            text = f"{type(failure).__name__}: {failure}"
            if isinstance(failure, AssertionError):
                text += traceback.format_exc()
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        if not select.select([reader], [], [], 50)[0]:
            os.kill(child, signal.SIGKILL)
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child ended with status {status}"
    return text


def python(code: str, *arguments: object, timeout: float = 60) -> str:
    """Run code in a fresh interpreter in which warnings are errors; return what it printed."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent / "optim"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    return done.stdout


def pair(seed: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Net, forebay.AdamW]:
    """Return a model and an optimizer for all of it."""
    model = Net(seed, dtype)
    return model, forebay.AdamW(model.parameters(), **{"lr": 1e-2, **options})
