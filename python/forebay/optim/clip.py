"""How a step clips the gradients' norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Clip:
    """How a step clips the gradients' norm."""

    # The factor of all gradients, an f32 on the device; None for no clipping.
    coefficient: torch.Tensor | None = None
    # Whether the norm is not finite and the step is skipped.
    skips: bool = False
