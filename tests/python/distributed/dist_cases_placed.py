"""Cases about gradients that lie over the ranks otherwise than their parameters, or that a collective still makes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import forebay
from support.dist.models import (
    STEPS,
    assert_close,
    assert_same_bits,
    assert_same_on_all_ranks,
    full,
    inner,
    parameters_of,
)
from support.dist.registry import case

PLACEMENTS: list[dict[str, Any]] = [
    {"placement": "stream"},
    {"placement": "resident"},
    {"placement": "host"},
    {"placement": "hybrid", "host_fraction": 0.7},
]


class Block(nn.Module):
    """Norms whose weights are replicated, around a layer cut over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.up, self.down, self.after = (
            nn.LayerNorm(8),
            nn.Linear(8, 12),
            nn.Linear(12, 8),
            nn.LayerNorm(8),
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the same shape."""
        return self.after(self.down(torch.tanh(self.up(self.before(rows)))))


def train(mesh: DeviceMesh, optimizer_of: Any, *, marks: bool = False) -> nn.Module:
    """Train the block with torch's sequence parallelism: gradients of the norms are parts, still to be summed."""
    torch.manual_seed(3)
    plan = {
        "before": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
        "after": SequenceParallel(sequence_dim=0),
    }
    block = parallelize_module(Block(), mesh, plan)
    optimizer = optimizer_of(block.parameters())
    for step in range(STEPS):
        torch.manual_seed(step)
        rows = distribute_tensor(torch.randn(12, 8), mesh, [Shard(0)])
        with optimizer.last_backward() if marks else nullcontext():
            full_rows = block(rows)
            full_rows = full_rows.full_tensor() if isinstance(full_rows, DTensor) else full_rows
            full_rows.square().mul(torch.randn(8)).mean().backward()
        assert block.before.weight.grad.placements == (Partial(),), "the case is about these"
        assert block.before.weight.placements == (Replicate(),)
        optimizer.step()
        optimizer.zero_grad()
    return block


@case(2)
def partial_gradients_of_replicated_weights_are_summed() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = parameters_of(train(mesh, lambda ps: torch.optim.AdamW(ps, lr=1e-2)))
    bits = None
    for options in PLACEMENTS:
        for marks in (False, True) if options["placement"] in ("host", "hybrid") else (False,):
            block = train(mesh, lambda ps, o=options: forebay.AdamW(ps, lr=1e-2, chunk_bytes=2048, **o), marks=marks)
            found = parameters_of(block)
            assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert_same_on_all_ranks(inner(parameter) for name, parameter in found.items() if "before" in name)
            bits = bits or found
            assert_same_bits(found, bits)


@case(2)
def the_norm_is_of_the_sum() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Replicate()]))
    # The parts cancel out but for the first element.
    part = torch.tensor([3.0, 1.0, 1.0, 1.0, 1.0, 1.0]) if dist.get_rank() == 0 else -torch.ones(6)
    parameter.grad = DTensor.from_local(part, mesh, [Partial()])
    optimizer = forebay.AdamW([parameter], max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.grad_norm == 2.0
    assert inner(optimizer.state[parameter]["exp_avg"]).count_nonzero() == 1


@case(2)
def whole_gradients_of_cut_weights_are_cut() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values, gradients = torch.linspace(-1, 1, 35).reshape(7, 5), torch.linspace(-2, 3, 35).reshape(7, 5)
    expected = nn.Parameter(values.clone())
    expected.grad = gradients.clone()
    forebay.AdamW([expected]).step()
    for options in PLACEMENTS:
        parameter = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(gradients, mesh, [Replicate()])
        forebay.AdamW([parameter], **options).step()
        assert torch.equal(full(parameter), expected)


@case(2)
def gradients_that_a_collective_still_makes_are_waited_for() -> None:
    mesh = init_device_mesh("cpu", (2,))
    own = torch.full((64,), float(dist.get_rank() + 1))
    for options in (*PLACEMENTS, {"max_grad_norm": 1.0}):
        plain = nn.Parameter(torch.ones(64))
        plain.grad = collectives.all_reduce(own.clone(), "sum", mesh)
        placed = nn.Parameter(distribute_tensor(torch.ones(64), mesh, [Replicate()]))
        partial = DTensor.from_local(own.clone(), mesh, [Partial()])
        placed.grad = partial.redistribute(placements=[Replicate()], async_op=True)
        for gradient in (plain.grad, placed.grad._local_tensor):
            assert isinstance(gradient, collectives.AsyncCollectiveTensor), "the case is about these"
        optimizer = forebay.AdamW([plain, placed], lr=1e-2, **options)
        optimizer.step()
        moments = [inner(optimizer.state[parameter]["exp_avg"]) for parameter in (plain, placed)]
        assert torch.equal(*moments)
        if "max_grad_norm" not in options:
            torch.testing.assert_close(moments[0], torch.full((64,), 0.3))


@case(2)
def gradients_of_another_kind_are_refused() -> None:
    line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    plain = nn.Parameter(torch.ones(4))
    placed = nn.Parameter(distribute_tensor(torch.ones(4), line, [Replicate()]))
    for parameter, mesh, placements in ((plain, line, [Partial()]), (placed, grid, [Replicate(), Partial()])):
        parameter.grad = DTensor.from_local(torch.ones(4), mesh, placements)
        before = inner(parameter).clone()
        with pytest.raises(forebay.OptionError, match="its gradient a DTensor over"):
            forebay.AdamW([parameter]).step()
        assert torch.equal(inner(parameter), before)
