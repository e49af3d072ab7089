"""Children that are killed while they train and save beside it. Run as a program: path, number of kills, seed.

A child steps without a pause. Every element of a state after step n is what one element alone becomes in n steps, so a
mixture of two moments shows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forebay import checkpoint
from support import kill_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    import forebay


def step(model: torch.nn.Module, optimizer: forebay.AdamW) -> None:
    """Take a step with the same gradient for every element."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()


class SavesBeside:
    """Steps and saves."""

    sizes = ((700, 1000), (3,), (300, 70), ())
    """One page of state and a bit, of each kind."""
    choices = (None, 0, 8 << 20)
    spread, longest_s = 1.5, float("inf")

    def make(self) -> tuple[torch.nn.Module, forebay.AdamW]:
        """Return a model with its optimizer."""
        return kill_loop.plain(self.sizes)

    def check(self, model: torch.nn.Module, optimizer: forebay.AdamW, number: int) -> None:
        """Fail where an element is not that of its moment: all of them had the same gradients."""
        for i, parameter in enumerate(model.parameters()):
            state = optimizer.state[parameter]
            assert int(state["step"]) == number, f"{int(state['step'])} steps in a save of {number}"
            for what, tensor in (("weight", parameter), *((k, state[k]) for k in ("exp_avg", "exp_avg_sq"))):
                flat = tensor.detach().reshape(-1)
                assert bool((flat == flat[0]).all()), f"{what} {i} of save {number} is of several moments"
                first = next(iter(model.parameters())).detach().reshape(-1)[0] if what == "weight" else None
                assert first is None or bool(first == flat[0]), f"weight {i} of save {number} is of another moment"

    def save(self, path: Path, model: torch.nn.Module, optimizer: Any, **options: Any) -> None:
        """Save once, and wait for it."""
        checkpoint.async_save(path, model, optimizer, **options).result()

    def go_on(
        self,
        path: Path,
        model: torch.nn.Module,
        optimizer: forebay.AdamW,
        number: int,
        choice: int | None,
        tell: Callable[[int, int], None],
    ) -> None:
        """Train and save for ever."""
        while True:
            number += 1
            step(model, optimizer)
            handle = checkpoint.async_save(
                path, model, optimizer, extra={"number": number}, keep_last=2, snapshot_budget_bytes=choice
            )
            saved = number
            tell(kill_loop.BEGUN, saved)
            while not handle.done():
                number += 1
                step(model, optimizer)
            handle.result()
            tell(kill_loop.SAVED, saved)


if __name__ == "__main__":
    kill_loop.main(SavesBeside(), Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
