"""What the optimizer's tests share: parameters and gradients from a seed, runs and snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import forebay
from forebay._tensors import local
from support.steps import take_steps
from support.tensors import random

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

SHAPES = ((33, 7), (5,), (257,), (), (64, 40), (0, 3), (1,))
"""Odd, aligned, scalar, empty and single: with ``TINY`` chunks most are cut and the ring wraps."""

TINY = 6 * 64 * 4
"""The smallest chunk that the optimizer takes."""

KINDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")

Parameters = list[torch.nn.Parameter]


def make(
    shapes: Iterable[Sequence[int]] = SHAPES,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
    seed: int = 1,
) -> Parameters:
    """Return parameters of these shapes; several dtypes take turns."""
    dtypes = [dtype] if isinstance(dtype, torch.dtype) else list(dtype)
    return [
        torch.nn.Parameter(random(shape, 1000 * seed + i).to(device, dtypes[i % len(dtypes)]))
        for i, shape in enumerate(shapes)
    ]


def clone(parameters: Iterable[torch.Tensor]) -> Parameters:
    """Return equal parameters with memory of their own, strides kept."""
    return [torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad) for parameter in parameters]


def give_gradients(parameters: Sequence[torch.Tensor], step: int, *, scale: float = 1.0) -> None:
    """Set gradients that depend on the step and on the parameter's place alone."""
    for i, parameter in enumerate(parameters):
        parameter.grad = torch.empty_like(parameter).copy_(random(parameter.shape, 7919 * step + i) * scale)


def train(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    steps: int | range,
    after: Callable[[], None] | None = None,
) -> None:
    """Take steps with the gradients of those steps; ``after`` runs after each, as a scheduler does."""
    take_steps(optimizer, steps, lambda step: give_gradients(parameters, step), after)


Snapshot = list[dict[str, torch.Tensor]]


def snapshot(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> Snapshot:
    """Return copies of parameters and their state, on the CPU."""
    kept = []
    for parameter in parameters:
        values = {"param": parameter.detach().cpu().clone()}
        if parameter in optimizer.state:
            for kind, value in optimizer.state[parameter].items():
                values[kind] = value.detach().cpu().clone()
        kept.append(values)
    return kept


def move_over(optimizer: Any, change: float = 0.0) -> None:
    """Make the other copy the state, with the same values but for a change, as a step does that writes to it.

    The optimizer's tensors are not used. What was the state is no numbers from then on.
    """
    optimizer._settle(None)
    engine = optimizer._engine

    def columns() -> list[torch.Tensor]:
        views = [
            engine.view(*optimizer._homes[number], name)
            for number, room in optimizer.state.rooms.items()
            if local(room.parameter).numel()
            for name in room.columns
        ]
        return [torch.frombuffer(view, dtype=torch.float32) for view in views]

    state = columns()
    engine._exchange_for_test()
    for old, new in zip(state, columns(), strict=True):
        new.copy_(old + change if change else old)
        if not change:
            old.fill_(float("nan"))


def run(
    shapes: Iterable[Sequence[int]] = SHAPES,
    *,
    device: torch.device | str,
    steps: int = 6,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
    **options: Any,
) -> Snapshot:
    """Train fresh parameters with forebay and return where that led."""
    parameters = make(shapes, device=device, dtype=dtype)
    optimizer = forebay.AdamW(parameters, **{"lr": 1e-2, **options})
    train(optimizer, parameters, steps)
    return snapshot(optimizer, parameters)


def groups_of(parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Return three groups, each with numbers of its own."""
    return [
        {"params": list(parameters[0::3]), "lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
        {"params": list(parameters[1::3]), "lr": 1e-3, "weight_decay": 0.0},
        {"params": list(parameters[2::3]), "betas": (0.5, 0.7), "eps": 1e-4},
    ]
