"""Small runs with Lightning, with either of its packages."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

import forebay
from support.frameworks import Model, batches, loss_of, weights

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = {"min_bytes": 0, "fraction": 1.0}
"""Options that offload the activations of a model of any size."""


def make(pl: Any, optimizer: Callable[..., Any] = forebay.AdamW, **settings: Any) -> Any:
    """Return a ``LightningModule`` of one of the packages."""

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return loss_of(self.model, batch.to(self.dtype))

        def configure_optimizers(self) -> Any:
            made = optimizer(self.parameters(), **{"lr": 3e-3, **settings})
            return [made], [torch.optim.lr_scheduler.StepLR(made, 2, 0.5)]

    return Module()


def trainer(pl: Any, *callbacks: Any, **options: Any) -> Any:
    """Return a quiet ``Trainer`` on the CPU."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    defaults = {"devices": 1, "max_epochs": 2, **quiet}
    return pl.Trainer(accelerator="cpu", callbacks=list(callbacks), **{**defaults, **options})


def fit(module: Any, made: Any, **options: Any) -> list[torch.Tensor]:
    """Train, and return the weights."""
    with warnings.catch_warnings():
        # A loader of a few tensors needs no workers.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        made.fit(module, torch.utils.data.DataLoader(batches(5), batch_size=None), **options)
    return weights(module)


def loop(optimizer: Callable[..., Any] = forebay.AdamW, limit: float | None = None) -> list[torch.Tensor]:
    """Train as the ``Trainer`` does, without it."""
    model = Model()
    made = optimizer(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
    for _ in range(2):
        for batch in batches(5):
            loss_of(model, batch).backward()
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            made.step()
            made.zero_grad()
        schedule.step()
    return weights(model)
