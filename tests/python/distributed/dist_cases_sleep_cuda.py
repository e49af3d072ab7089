"""Sleep and wake of a model sharded over one GPU."""

from __future__ import annotations

import torch

import forebay
from support.dist.models import adamw, assert_same_bits, parameters_of, shard_on_gpu, state_of, train
from support.dist.registry import case


@case(1)
def fsdp_sleeps_between_steps() -> None:
    nets = [shard_on_gpu() for _ in range(2)]
    optimizers = [adamw(net, "resident") for net in nets]
    sleeper = forebay.Sleeper(nets[0], optimizers[0])
    for step in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            train(net, optimizer, range(step, step + 1), device="cuda")
        before = torch.cuda.memory_allocated()
        sleeper.sleep()
        assert torch.cuda.memory_allocated() < before
        sleeper.wake(lazy=step % 2 == 1)
    assert_same_bits(parameters_of(nets[0]), parameters_of(nets[1]))
    assert_same_bits(state_of(nets[0], optimizers[0]), state_of(nets[1], optimizers[1]))
