"""What the tests of overlapped steps share: runs with and without, and an engine whose updates come late."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import forebay
from support.optim import TINY, snapshot
from support.tensors import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable

RING = 8 * TINY
"""A small ring: the largest of these models' states goes through it many times."""


class LateEngine:
    """An engine that is told of a step only when somebody waits for it: an update that is as late as it can be.

    Whoever reads a parameter without waiting reads the old value, every time.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._kept: list[tuple[str, tuple[Any, ...]]] = []

    def overlap_offer(self, *arguments: Any) -> None:
        """Keep a gradient for later."""
        self._kept.append(("overlap_offer", arguments))

    def overlap_commit(self, *arguments: Any) -> None:
        """Keep a commit for later."""
        self._kept.append(("overlap_commit", arguments))

    def overlap_abort(self) -> None:
        """Forget what was kept."""
        self._kept.clear()
        self._engine.overlap_abort()

    def overlap_updated(self) -> list[tuple[int, int]]:
        """Return nothing while something is kept."""
        return self._engine.overlap_updated() if not self._kept else []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if not callable(found) or name in ("overlap_begin", "view", "overlap_stats"):
            return found
        if name not in ("overlap_decide",) and not any(kept == "overlap_commit" for kept, _ in self._kept):
            return found

        def after(*arguments: Any) -> Any:
            kept, self._kept = self._kept, []
            for call, of_call in kept:
                getattr(self._engine, call)(*of_call)
            return found(*arguments)

        return after


@dataclass
class Run:
    """One of the two runs that are compared: with overlapped steps, or plain."""

    model: torch.nn.Module
    optimizer: Any
    handle: Any = None
    # What the run has read, in order.
    seen: list[torch.Tensor] = field(default_factory=list)

    @property
    def overlaps(self) -> bool:
        """Whether this is the run with overlapped steps."""
        return self.handle is not None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def last(self) -> AbstractContextManager[None]:
        """Mark the last backward."""
        return self.optimizer.last_backward() if self.overlaps else nullcontext()

    def see(self, *tensors: torch.Tensor) -> None:
        """Keep copies of what was read."""
        self.seen.extend(tensor.detach().cpu().clone() for tensor in tensors)

    def train(self, steps: int | range, micro: int = 1, after: Callable[[], None] | None = None) -> None:
        """Take steps of some micro-batches."""
        for step in range(steps) if isinstance(steps, int) else steps:
            for part in range(micro):
                loss = self.loss(100 * step + part)
                with self.last() if part == micro - 1 else nullcontext():
                    loss.backward()
                self.see(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if after is not None:
                after()

    def loss(self, number: int) -> torch.Tensor:
        """Return the loss of one batch."""
        return self.model(batch(number, self.model)).float().square().mean()


def batch(number: int, model: torch.nn.Module, width: int = 24) -> torch.Tensor:
    """Return one batch for a model, the same on every machine."""
    first = next(model.parameters())
    numbers = torch.randn((6, width), generator=torch.Generator().manual_seed(number))
    return numbers.to(first.device, first.dtype)


def net(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a small model, the same one each time."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 40), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(40, 8)).to(device, dtype)


def adamw(model: torch.nn.Module, **options: Any) -> Any:
    """Return an optimizer with small chunks."""
    return forebay.AdamW(model.parameters(), **{"lr": 1e-2, "chunk_bytes": TINY, **options})


def both(
    body: Callable[[Run], None],
    device: torch.device,
    *,
    model: Callable[[torch.device], torch.nn.Module] = net,
    optimizer: Callable[..., Any] = adamw,
    late: bool = False,
    overlap: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, float | int]:
    """Run something with overlapped steps and plain, and compare parameters, state and what was read, bit for bit.

    Parameters
    ----------
    body
        What is run.
    device, model, optimizer, options
        What makes the model, and with it the optimizer.
    late
        Whether updates come as late as they can.
    overlap
        Options of ``overlap_step``.

    Returns
    -------
    The statistics of the last overlapped step.
    """
    found, stats = [], {}
    for overlaps in (True, False):
        one = model(device)
        run = Run(one, optimizer(one, **options))
        if overlaps:
            run.handle = forebay.overlap_step(one, run.optimizer, overlap_bytes=RING, **(overlap or {}))
            if late:
                run.optimizer.prepare()
                run.optimizer._engine = LateEngine(run.optimizer._engine)
        body(run)
        if overlaps:
            stats = run.handle.stats()
        names = [name for name, _ in one.named_parameters()]
        state = dict(zip(names, snapshot(run.optimizer, list(one.parameters())), strict=True))
        found.append({"seen": run.seen, "state": state} if run.seen else {"state": state})
    assert_same(*found)
    return stats
