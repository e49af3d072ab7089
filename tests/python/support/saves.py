"""What the tests of asynchronous saves share: runs of several pages of state, and a writer that waits for a word."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import forebay
from forebay import _core, checkpoint
from support.steps import take_steps
from support.tensors import assert_same, random

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

PAGE = 4 << 20
SIZES = ((900, 1300), (700, 31), (3,), ())
"""More than a page in the largest, so that every kind of state has several."""
ELEMENTS = sum(torch.Size(size).numel() for size in SIZES)

WRITE = _core.write_checkpoint

Optimizers = list[torch.optim.Optimizer]


def model_of(sizes: Iterable[tuple[int, ...]] = SIZES, dtype: torch.dtype = torch.float32) -> torch.nn.ParameterList:
    """Return a model of nothing but parameters."""
    return torch.nn.ParameterList([random(size, 100 + i).to(dtype) for i, size in enumerate(sizes)])


def two(parameters: Iterable[torch.nn.Parameter]) -> Optimizers:
    first, *rest = parameters
    return [forebay.AdamW([first], lr=1e-2), forebay.AdamW(rest, lr=3e-2, amsgrad=True)]


RUNS: dict[str, tuple[torch.dtype, Callable[[Any], Optimizers]]] = {
    "f32": (torch.float32, lambda p: [forebay.AdamW(p, lr=1e-2)]),
    "masters": (torch.bfloat16, lambda p: [forebay.AdamW(p, lr=1e-2)]),
    "compact": (torch.bfloat16, lambda p: [forebay.AdamW(p, lr=1e-2, master_weights="compact")]),
    "amsgrad": (torch.float32, lambda p: [forebay.AdamW(p, lr=1e-2, amsgrad=True)]),
    "resident": (torch.float32, lambda p: [forebay.AdamW(p, lr=1e-2, placement="resident")]),
    "two": (torch.float32, two),
    "torch": (torch.float32, lambda p: [torch.optim.AdamW(p, lr=1e-2)]),
}
"""Types of the parameters, and their optimizers."""


def build(
    kind: str = "f32", sizes: Iterable[tuple[int, ...]] = SIZES, device: torch.device | str = "cpu"
) -> tuple[torch.nn.ParameterList, Optimizers]:
    """Return a model and its optimizers, the same ones every time."""
    dtype, make = RUNS[kind]
    model = model_of(sizes, dtype).to(device)
    return model, make(model.parameters())


def train(model: torch.nn.Module, optimizers: Optimizers, *steps: int) -> None:
    """Take steps with gradients of their own."""

    def give(step: int) -> None:
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, ((step * 7 + i) % 5 - 2) / 8)

    take_steps(optimizers, steps, give)


def values(model: torch.nn.Module, optimizers: Optimizers) -> dict[str, torch.Tensor]:
    """Return copies of weights and state, by name."""
    found = {name: value.detach().cpu().clone() for name, value in model.named_parameters()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            found |= {f"{names[parameter]}.{kind}": value.detach().cpu().clone() for kind, value in state.items()}
    return found


def assert_holds(
    path: Path, kind: str, expected: dict[str, torch.Tensor], extra: Any = None, device: torch.device | str = "cpu"
) -> None:
    """Assert that the last checkpoint of a path has these values, in a run that has never seen them."""
    model, optimizers = build(kind, device=device)
    train(model, optimizers, 50)
    assert checkpoint.load(path, model, optimizers) == extra
    assert_same(values(model, optimizers), expected)


class Gate:
    """Holds the writer before the first byte, or from the n-th call on, until it is opened."""

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.manners: list[dict[str, Any]] = []

    def write(self, *arguments: Any) -> Any:
        """Take the place of the engine's function."""
        self.manners.append(arguments[-1])
        if len(self.manners) > self.calls:
            self.reached.set()
            assert self.opened.wait(50)
        return WRITE(*arguments)

    def open(self, after_s: float = 0.0) -> None:
        """Let it go, now or in a while."""
        if after_s:
            threading.Timer(after_s, self.opened.set).start()
        else:
            self.opened.set()


@contextlib.contextmanager
def held(calls: int = 0) -> Iterator[Gate]:
    """Hold all saves of a block; they go on at its end at the latest."""
    gate = Gate(calls)
    with mock.patch.object(_core, "write_checkpoint", gate.write):
        try:
            yield gate
        finally:
            gate.open()
            end_of_saves()


def end_of_saves() -> None:
    """Wait for a save that a test left under way, whatever came of it."""
    for save in list(checkpoint.handle.current):
        save._done.wait(50)
    checkpoint.handle.current.clear()
    checkpoint.handle.failed.clear()


def threads_of_saves() -> list[str]:
    """Return the names of this process's threads that belong to saves."""
    gc.collect()
    names = []
    for task in Path("/proc/self/task").iterdir():
        # A thread may end while others are read: then its file is gone, or has no process.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((task / "comm").read_text().strip())
    return [name for name in names if name.startswith(("forebay-save", "forebay-snapsho", "forebay-checkpo"))] + [
        thread.name for thread in threading.enumerate() if thread.name == "forebay-save"
    ]


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something comes true; what never does takes ten seconds."""
    for _ in range(1000):
        if holds():
            return True
        time.sleep(0.01)
    return False
