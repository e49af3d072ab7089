"""The one loop that takes steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def take_steps(
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    steps: int | Iterable[int],
    give: Callable[[int], None],
    after: Callable[[], None] | None = None,
) -> None:
    """Take steps: ``give`` makes the gradients of a step, ``after`` runs after it, as a scheduler does."""
    optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for step in range(steps) if isinstance(steps, int) else steps:
        give(step)
        for optimizer in optimizers:
            optimizer.step()
        if after is not None:
            after()
