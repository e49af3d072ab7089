"""Cases of sleep and wake with FSDP2, DDP and DTensor: shards sleep, and training goes on as if nothing had been."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import forebay
from support.dist.models import (
    STEPS,
    adamw,
    assert_same_bits,
    backward,
    groups,
    inner,
    loss,
    make,
    parameters_of,
    shard,
    state_of,
)
from support.dist.registry import case


def optimizer_of(net: Any, which: str) -> torch.optim.Optimizer:
    """Return torch's AdamW, or forebay's with a placement."""
    return torch.optim.AdamW(groups(net)) if which == "torch" else adamw(net, which)


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether the local memory was taken away; an empty shard has none to take."""
    return inner(tensor).untyped_storage().nbytes() == 0


def compare(which: str, *, lazy: bool, **fsdp: Any) -> None:
    """Train sharded, with and without sleeping after each step."""
    slept, plain = (shard(make(tied=True), **fsdp) for _ in range(2))
    optimizers = [optimizer_of(net, which) for net in (slept, plain)]
    sleeper = forebay.Sleeper(slept, optimizers[0])
    kinds = [type(parameter) for parameter in slept.parameters()]
    for step in range(STEPS):
        for net, optimizer in zip((slept, plain), optimizers, strict=True):
            backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                # Leaves parameters gathered where they are kept after forward.
                loss(net, step, dist.get_rank())
        sleeper.sleep()
        assert all(map(is_empty, slept.parameters()))
        for use in (lambda: backward(slept, 0), optimizers[0].step, slept.state_dict):
            try:
                use()
            except forebay.AsleepError:
                continue
            raise AssertionError("what sleeps was used")
        sleeper.wake(lazy=lazy)
    assert kinds == [type(parameter) for parameter in slept.parameters()] == [DTensor] * len(kinds)
    backward(slept, STEPS)
    backward(plain, STEPS)
    assert_same_bits(parameters_of(slept), parameters_of(plain))
    assert_same_bits(state_of(slept, optimizers[0]), state_of(plain, optimizers[1]))
    assert sleeper.stats()["residual"] == []


@case(2, 3)
def fsdp_with_torch_adamw() -> None:
    compare("torch", lazy=False)


@case(2)
def fsdp_with_torch_adamw_lazily() -> None:
    compare("torch", lazy=True)


@case(2)
def fsdp_streamed() -> None:
    compare("stream", lazy=True)


@case(3)
def fsdp_resident() -> None:
    compare("resident", lazy=False)


@case(2)
def fsdp_that_keeps_gathered_parameters() -> None:
    compare("torch", lazy=False, reshard_after_forward=False)


@case(2)
def fsdp_that_gathers_ahead_is_not_woken_piece_by_piece() -> None:
    slept, plain = (shard(make()) for _ in range(2))
    for net in (slept, plain):
        net.inner.set_modules_to_forward_prefetch([net.outer])
        backward(net, 0)
        net.zero_grad()
    sleeper = forebay.Sleeper(slept)
    sleeper.sleep()
    sleeper.wake(lazy=True)
    for net in (slept, plain):
        backward(net, 1)
    gradients = [{name: p.grad for name, p in net.named_parameters()} for net in (slept, plain)]
    assert_same_bits(*gradients)


@case(2)
def ddp_with_buffers_that_it_broadcasts() -> None:
    nets = []
    for _ in range(2):
        torch.manual_seed(3)
        blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)) for _ in range(3)]
        nets.append(DistributedDataParallel(torch.nn.Sequential(*blocks)))
    sleeper = forebay.Sleeper(nets[0], gradients="keep")
    for step in range(3):
        for net in nets:
            torch.manual_seed(step)
            net(torch.randn(4, 8)).square().mean().backward()
        sleeper.sleep()
        sleeper.wake(lazy=True)
    sleeper.wake()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert_same_bits(nets[0].state_dict(), nets[1].state_dict())


@case(2)
def dtensors_of_every_placement() -> None:
    mesh = init_device_mesh("cpu", (2,))
    module = torch.nn.Module()
    for index, placement in enumerate(([Shard(0)], [Shard(1)], [Replicate()])):
        whole = torch.arange(35.0).reshape(5, 7) + index
        module.register_parameter(f"p{index}", torch.nn.Parameter(distribute_tensor(whole, mesh, placement)))
    sleeper = forebay.Sleeper(module)
    sizes = [inner(parameter).untyped_storage().nbytes() for parameter in module.parameters()]
    before = {name: inner(p).clone() for name, p in module.named_parameters()}
    with sleeper.asleep():
        assert all(map(is_empty, module.parameters()))
        # An uneven shard's storage may be padded.
        assert sleeper.stats()["bytes"] == sum(sizes)
    for name, parameter in module.named_parameters():
        assert torch.equal(inner(parameter), before[name])
        index = int(name[1:])
        assert torch.equal(parameter.full_tensor(), torch.arange(35.0).reshape(5, 7) + index)
