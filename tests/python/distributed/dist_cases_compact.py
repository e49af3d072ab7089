"""Cases about compact masters of sharded parameters: the bits of f32 masters, and f32 towards everybody else."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from support.dist.models import adamw, assert_same_bits, inner, make, parameters_of, shard, state_of, train
from support.dist.registry import case


def sharded(master_weights: Any, placement: str = "stream", **options: Any) -> tuple[Any, Any]:
    """Return a sharded model of bf16 with its optimizer."""
    net = shard(make(torch.bfloat16))
    return net, adamw(net, placement, master_weights=master_weights, **options)


@case(2, 3)
def compact_masters_of_shards_have_the_bits_of_f32_masters() -> None:
    for placement in ("stream", "host", "resident"):
        (net, optimizer), (other, compact) = (sharded(kind, placement, max_grad_norm=0.5) for kind in (True, "compact"))
        train(net, optimizer)
        train(other, compact)
        assert_same_bits(parameters_of(other), parameters_of(net))
        assert_same_bits(state_of(other, compact), state_of(net, optimizer))
        # Shards end where their rank's rows do, in the middle of a byte of carries for some.
        sizes = [inner(parameter).numel() for parameter in other.parameters()]
        assert any(size % 8 for size in sizes), sizes
        for parameter in other.parameters():
            master = compact.state[parameter]["master_param"]
            assert isinstance(master, DTensor) == isinstance(parameter, DTensor)
            assert inner(master).shape == inner(parameter).shape
            assert master.dtype == torch.float32


@case(2, 3)
def state_dicts_of_shards_load_into_either_format() -> None:
    for saves, loads in ((True, "compact"), ("compact", True), ("compact", "compact")):
        net, optimizer = sharded(saves)
        train(net, optimizer)
        found = get_optimizer_state_dict(net, optimizer)
        other, fresh = sharded(loads)
        with torch.no_grad():
            for ours, theirs in zip(other.parameters(), net.parameters(), strict=True):
                ours.copy_(theirs)
        set_optimizer_state_dict(other, fresh, found)
        assert_same_bits(state_of(other, fresh), state_of(net, optimizer))
        train(net, optimizer, range(4, 6))
        train(other, fresh, range(4, 6))
        assert_same_bits(parameters_of(other), parameters_of(net))
        assert_same_bits(state_of(other, fresh), state_of(net, optimizer))
