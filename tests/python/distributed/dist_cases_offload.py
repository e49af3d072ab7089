"""Cases in which optimizers that were built over shards are offloaded, restored, or given their shards late."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import torch

import forebay
from support.dist.models import (
    SMALL,
    adamw,
    assert_same_bits,
    backward,
    groups,
    inner,
    make,
    parameters_of,
    shard,
    state_of,
    train,
)
from support.dist.registry import case


def torchs(net: torch.nn.Module) -> torch.optim.AdamW:
    """Return torch's optimizer over the same groups."""
    return torch.optim.AdamW(groups(net))


@case(2, 3)
def an_optimizer_over_shards_is_offloaded_with_its_state() -> None:
    nets = [shard(make()) for _ in range(2)]
    optimizer, before = (torchs(net) for net in nets)
    train(nets[0], optimizer, range(2))
    train(nets[1], before, range(2))
    assert forebay.offload(optimizer, **SMALL) is optimizer
    expected = adamw(nets[1])
    expected.load_state_dict(copy.deepcopy(before.state_dict()))
    train(nets[0], optimizer, range(2, 4))
    train(nets[1], expected, range(2, 4))
    assert_same_bits(parameters_of(nets[0]), parameters_of(nets[1]))
    assert_same_bits(state_of(nets[0], optimizer), state_of(nets[1], expected))


@case(2, 3)
def a_restored_optimizer_over_shards_is_torchs_own() -> None:
    nets = [shard(make(torch.bfloat16)) for _ in range(2)]
    optimizer, plain = forebay.offload(torchs(nets[0])), torchs(nets[1])
    train(nets[0], optimizer, range(2))
    forebay.restore(optimizer)
    assert type(optimizer) is torch.optim.AdamW
    train(nets[1], plain, range(1))
    for mine, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        found, expected = optimizer.state[mine], plain.state[theirs]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert type(found[name]) is type(value), name
            assert (found[name].dtype, inner(found[name]).shape) == (value.dtype, inner(value).shape), name
    train(nets[0], optimizer, range(2, 3))


@case(2)
def shards_that_replace_the_whole_parameters_leave_nothing_of_them() -> None:
    """Accelerate does so: it makes the optimizer first, loads its empty state, and shards then."""
    net: Any = make()
    optimizer = adamw(net)
    optimizer.load_state_dict(optimizer.state_dict())
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    whole = weakref.ref(net.inner.weight)
    places = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [torch.empty_like(parameter) for parameter in group["params"]]
    shard(net)
    for group, of_group in zip(optimizer.param_groups, places, strict=True):
        group["params"] = [net.get_parameter(name) for name in of_group]
    twin = shard(make())
    expected = adamw(twin)
    train(net, optimizer, range(2))
    train(twin, expected, range(2))
    gc.collect()
    assert whole() is None
    assert optimizer.stats()["pinned_bytes"] == expected.stats()["pinned_bytes"]
    assert_same_bits(state_of(net, optimizer), state_of(twin, expected))
    backward(net, 3)
