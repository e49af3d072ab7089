"""What the tests of ``forebay.move`` share: mappings that move to the host and back, on a GPU or on the CPU.

The CPU stands in for the GPU by the backend of the engine that the sleeper's tests use too. Then a tensor is on the
host if torch did not allocate its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import forebay
from forebay.moving import passes
from support.tensors import random

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

Report = dict[str, float | int]


def is_foreign(part: torch.Tensor) -> bool:
    """Whether torch did not allocate a tensor's memory."""
    return part.layout == torch.strided and not part.untyped_storage().resizable()


class Place:
    """A device from which mappings move to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def patched(self) -> AbstractContextManager[Any]:
        """Return a context in which the CPU stands in for a GPU."""
        return mock.patch.object(passes, "on_host", is_foreign if self.device.type == "cpu" else passes.on_host)

    def to_host(self, mapping: Any) -> Report:
        """Move a mapping to the host."""
        if self.device.type != "cpu":
            return forebay.move(mapping, "cpu")
        return passes.run(mapping, self.device, to_host=True)

    def back(self, mapping: Any) -> Report:
        """Move a mapping to the device."""
        if self.device.type != "cpu":
            return forebay.move(mapping, self.device)
        return passes.run(mapping, self.device, to_host=False)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the host."""
        return passes.on_host(tensor)

    def random(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return numbers on the device."""
        return random(shape, seed).to(dtype).to(self.device)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host that forebay has not made."""
        tensor = tensor.detach().cpu().contiguous()
        data = bytearray(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape)


def adam_state(place: Place, *shapes: tuple[int, ...]) -> dict[Any, dict[str, Any]]:
    """Return what an optimizer has, keyed by parameters."""
    state: dict[Any, dict[str, Any]] = {}
    for i, shape in enumerate(shapes):
        state[torch.nn.Parameter(place.random(*shape, seed=i))] = {
            "step": torch.tensor(10.0 + i, device=place.device),
            "exp_avg": place.random(*shape, seed=100 + i),
            "exp_avg_sq": place.random(*shape, seed=200 + i).abs(),
            "name": f"parameter {i}",
        }
    return state


def tensors_of(state: dict[Any, dict[str, Any]]) -> Iterator[torch.Tensor]:
    """Go through the tensors of such a state."""
    for values in state.values():
        for value in values.values():
            if isinstance(value, torch.Tensor):
                yield value


def copies(state: dict[Any, dict[str, Any]]) -> list[torch.Tensor]:
    """Return copies of the tensors of such a state."""
    return [tensor.detach().cpu().clone() for tensor in tensors_of(state)]
