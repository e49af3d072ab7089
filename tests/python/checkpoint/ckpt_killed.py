"""Children that are killed while they save. Run as a program: path, number of kills, seed.

Every byte of a state is the number of its save.
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


def fill(model: torch.nn.Module, optimizer: forebay.AdamW, number: int) -> None:
    """Make every byte of weights and moments the number."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.reshape(-1).view(torch.uint8).fill_(number % 251)
            for kind in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[parameter][kind].reshape(-1)
                moment.view(torch.uint8).fill_(number % 251)


class Saves:
    """Fills and saves."""

    sizes = ((64, 1000), (3,), (300, 70), ())
    choices = (None, 1, 2)
    spread, longest_s = 3.0, 0.1

    def check(self, model: torch.nn.Module, optimizer: forebay.AdamW, number: int) -> None:
        """Fail where a byte is not the number."""
        for parameter in model.parameters():
            for tensor in (parameter, optimizer.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg_sq"]):
                found = tensor.detach().reshape(-1).view(torch.uint8)
                assert bool((found == number % 251).all()), f"save {number} holds bytes of another"

    def save(self, path: Path, model: torch.nn.Module, optimizer: Any, **options: Any) -> None:
        """Save once."""
        checkpoint.save(path, model, optimizer, **options)

    def go_on(
        self,
        path: Path,
        model: torch.nn.Module,
        optimizer: forebay.AdamW,
        number: int,
        choice: int | None,
        tell: Callable[[int, int], None],
    ) -> None:
        """Fill and save for ever."""
        while True:
            number += 1
            fill(model, optimizer, number)
            tell(kill_loop.BEGUN, number)
            self.save(path, model, optimizer, extra={"number": number}, keep_last=choice)
            tell(kill_loop.SAVED, number)


if __name__ == "__main__":
    kill_loop.main(Saves(), Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
