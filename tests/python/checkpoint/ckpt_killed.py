"""Children that are killed while they save. Run as a program: path, number of kills, seed.

Every byte of a state is the number of its save.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import forebay
from forebay import checkpoint
from forebay.optim.packed import Packed
from support import kill_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def memory(model: torch.nn.Module, optimizer: forebay.AdamW) -> Iterator[torch.Tensor]:
    """Return the bytes of weights, moments and masters, as they are kept."""
    optimizer.synchronize()
    for parameter in model.parameters():
        yield parameter.detach().reshape(-1).view(torch.uint8)
        for kind, value in dict.items(dict.__getitem__(optimizer.state, parameter)):
            if kind != "step":
                for part in value.values() if isinstance(value, Packed) else (value,):
                    yield part.reshape(-1).view(torch.uint8)


class Saves:
    """Fills and saves."""

    sizes = ((64, 1000), (3,), (300, 70), ())
    choices = (None, 1, 2)
    spread, longest_s = 3.0, 0.1

    def make(self) -> tuple[torch.nn.Module, forebay.AdamW]:
        """Return a model with its optimizer."""
        return kill_loop.plain(self.sizes)

    def fill(self, model: torch.nn.Module, optimizer: forebay.AdamW, number: int) -> None:
        """Make every byte the number."""
        for part in memory(model, optimizer):
            part.fill_(number % 251)

    def check(self, model: torch.nn.Module, optimizer: forebay.AdamW, number: int) -> None:
        """Fail where a byte is not the number."""
        for found in memory(model, optimizer):
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
            self.fill(model, optimizer, number)
            tell(kill_loop.BEGUN, number)
            self.save(path, model, optimizer, extra={"number": number}, keep_last=choice)
            tell(kill_loop.SAVED, number)


class NativeSaves(Saves):
    """The same with state in fewer bits, saved as it is kept."""

    def make(self) -> tuple[torch.nn.Module, forebay.AdamW]:
        """Return a model with its optimizer."""
        model = torch.nn.ParameterList([torch.zeros(size, dtype=torch.bfloat16) for size in self.sizes])
        return model, forebay.AdamW(model.parameters(), state_dtype="8bit", master_weights="compact")

    def save(self, path: Path, model: torch.nn.Module, optimizer: Any, **options: Any) -> None:
        """Save once."""
        checkpoint.save(path, model, optimizer, native=True, **options)


if __name__ == "__main__":
    saves = NativeSaves() if "native" in sys.argv else Saves()
    kill_loop.main(saves, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
