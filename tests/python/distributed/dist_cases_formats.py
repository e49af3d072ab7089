"""Cases about state in fewer bits of sharded parameters: blocks belong to the local shard, and all others see f32."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import forebay
from support.dist.models import (
    SMALL,
    STEPS,
    adamw,
    assert_same_bits,
    assert_same_on_all_ranks,
    backward,
    full,
    groups,
    inner,
    make,
    parameters_of,
    shard,
    state_of,
    train,
)
from support.dist.registry import case, shared_folder
from support.formats import BF16, BLOCKS, Twin, format_for, kept

RING = {**SMALL, "chunk_bytes": 6 << 10}
COLUMNS = ("exp_avg", "exp_avg_sq")


def sharded(state_dtype: Any, placement: str = "stream", **options: Any) -> tuple[Any, Any]:
    """Return a sharded model with its optimizer."""
    net = shard(make())
    return net, forebay.AdamW(groups(net), placement=placement, state_dtype=state_dtype, **{**RING, **options})


def whole(state_dtype: Any) -> tuple[Any, Any]:
    """Return the same model unsharded."""
    net = make()
    return net, forebay.AdamW(groups(net), state_dtype=state_dtype, **RING)


def kept_in(net: Any, state: dict[str, torch.Tensor], state_dtype: Any) -> dict[str, torch.Tensor]:
    """Return these whole columns as a model's optimizer keeps its part of them."""
    found = {}
    for name, parameter in net.named_parameters():
        for column in COLUMNS:
            value = state[f"{name}.{column}"]
            if isinstance(parameter, DTensor):
                value = part_of(value, parameter)
            of = format_for(state_dtype, inner(parameter).numel())
            found[f"{name}.{column}"] = kept(parameter, value, of, signed=column == "exp_avg")
    return found


def part_of(value: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """Return this rank's rows of a whole tensor."""
    rows = value.chunk(dist.get_world_size())
    mine = rows[dist.get_rank()] if dist.get_rank() < len(rows) else value[:0]
    assert mine.shape == inner(parameter).shape
    return mine


def columns_of(net: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the columns without the counters."""
    return {name: value for name, value in state_of(net, optimizer).items() if name.endswith(COLUMNS)}


@case(2, 3)
def shards_have_blocks_of_their_own() -> None:
    for state_dtype in (BF16, BLOCKS):
        for placement in ("stream", "host", "resident"):
            for seed in (None, 5):
                more = {} if seed is None else {"stochastic_rounding": True, "rounding_seed": seed}
                net, optimizer = sharded(state_dtype, placement, **more)
                train(net, optimizer)
                other = shard(make())
                plain = adamw(other, placement)
                twin = Twin(plain, dict.fromkeys(plain._rule.columns, state_dtype), seed)
                for step in range(STEPS):
                    backward(other, step)
                    twin.step()
                    plain.zero_grad()
                assert_same_bits(parameters_of(net), parameters_of(other))
                assert_same_bits(state_of(net, optimizer), state_of(other, plain))
        # Some shard ends in the middle of a block of the whole parameter.
        sizes = [inner(parameter).numel() for parameter in net.parameters()]
        assert any(size > 256 and size % 256 for size in sizes), sizes
        column = optimizer.state[next(net.parameters())]["exp_avg"]
        assert isinstance(column, DTensor)
        assert column.dtype == torch.float32


@case(2, 3)
def state_dicts_of_shards_load_into_any_format() -> None:
    for saves, loads in ((BLOCKS, BLOCKS), (BF16, BLOCKS), (BLOCKS, torch.float32)):
        net, optimizer = sharded(saves)
        train(net, optimizer)
        found = get_optimizer_state_dict(net, optimizer)
        other, fresh = sharded(loads)
        set_optimizer_state_dict(other, fresh, found)
        wholes = {name: full(value) for name, value in columns_of(net, optimizer).items()}
        assert_same_bits(columns_of(other, fresh), kept_in(other, wholes, loads))


@case(2, 3)
def checkpoints_load_over_other_shards_and_round_once() -> None:
    for number, (saves, loads) in enumerate(((BLOCKS, BLOCKS), (torch.float32, BLOCKS), (BLOCKS, BF16))):
        for way in ("save", "async_save"):
            for first, second in ((sharded, whole), (whole, sharded), (sharded, sharded)):
                path = shared_folder() / f"formats-{number}-{way}-{first.__name__}-{second.__name__}"
                net, optimizer = first(saves)
                if first is whole:
                    # The same gradients everywhere: a model that is not sharded is the same on all ranks.
                    for parameter in net.parameters():
                        generator = torch.Generator().manual_seed(parameter.numel())
                        parameter.grad = torch.randn(parameter.shape, generator=generator)
                    optimizer.step()
                else:
                    train(net, optimizer)
                wholes = {name: full(value) for name, value in columns_of(net, optimizer).items()}
                if way == "save":
                    forebay.checkpoint.save(path, net, optimizer)
                else:
                    forebay.checkpoint.async_save(path, net, optimizer).result()
                other, fresh = second(loads)
                forebay.checkpoint.load(path, other, fresh)
                assert_same_bits(columns_of(other, fresh), kept_in(other, wholes, loads))
                if second is whole:
                    assert_same_on_all_ranks(columns_of(other, fresh).values())
                if first is second and saves == loads:
                    train(net, optimizer, range(4, 6))
                    train(other, fresh, range(4, 6))
                    assert_same_bits(parameters_of(other), parameters_of(net))
                    assert_same_bits(state_of(other, fresh), state_of(net, optimizer))
