"""Cases of activation offload with DistributedDataParallel and FSDP2."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import forebay
from support.budget import by_chance
from support.dist.registry import case

WIDTH, ROWS = 48, 64
OPTIONS: dict[str, Any] = {"fraction": 1.0, "keep_last": 1, "min_bytes": 2048}


class Block(nn.Module):
    """A layer whose parameters are larger than what offload leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use a weight as it is, transposed and detached."""
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden) + (hidden @ self.down.weight.detach().t()).sin()


class Net(nn.Module):
    """Layers, and what stands around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all of it."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make() -> Net:
    torch.manual_seed(3)
    return Net()


def train(net: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Take steps on data of this rank and return the last gradients and the parameters, as this rank has them."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for half in range(2):  # gradient accumulation
            seed = 100 * step + 10 * half + dist.get_rank()
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
            net(x).square().mean().backward()
        optimizer.step()
    tensors = [tensor for parameter in net.parameters() for tensor in (parameter.grad, parameter.detach())]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def check(wrap: Any, **options: Any) -> None:
    """Compare training with offload to training without; before and after wrapping."""
    expected = train(wrap(make()))
    for first in (False, True):
        net = make()
        if first:
            handle = forebay.offload_activations(net, **OPTIONS, **options)
            wrapped = wrap(net)
        else:
            wrapped = wrap(net)
            handle = forebay.offload_activations(wrapped, **OPTIONS, **options)
        found = train(wrapped)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert [row["stored_bytes"] > 0 for row in handle.table()] == [True, True, True, False]
        stats = handle.stats()
        assert stats["fetched_bytes"] > 0
        # Three activations of a layer travel, two of them twice as wide; its weights and their transposes do not.
        passes, layers = 6, 3
        most = passes * layers * (1 + 2 + 1 + 1) * ROWS * WIDTH * 4
        if "recompute" not in options:
            assert stats["stored_bytes"] <= most, f"{stats['stored_bytes']} of at most {most}"
        for engine in handle._saver.engines.values():
            assert not engine.held
            assert not engine.guards
        handle.remove()


def check_budget(wrap: Any) -> None:
    """Compare training under a budget to training without, each rank with its own plans; before and after wrapping."""
    expected = train(wrap(make()), steps=6)
    for seed, first in enumerate((False, True)):
        net = make()
        budget: dict[str, Any] = {"budget_bytes": 1 << 29, "min_bytes": 256}
        if first:
            handle = forebay.offload_activations(net, **budget)
            wrapped = wrap(net)
        else:
            wrapped = wrap(net)
            handle = forebay.offload_activations(wrapped, **budget)
        by_chance(handle, 10 * seed + dist.get_rank())
        found = train(wrapped, steps=6)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert handle.stats()["fetched_bytes"] > 0
        assert handle._budget.kinds[0].reason is None, handle._budget.kinds[0].reason
        assert handle.plan() is not None
        gc.collect()
        for engine in handle._saver.engines.values():
            assert not engine.held
            assert not engine.guards
        handle.remove()


def sharded(**options: Any) -> Any:
    def wrap(net: Net) -> Net:
        for block in net.blocks:
            fully_shard(block, **options)
        return fully_shard(net, **options)

    return wrap


@case(2)
def ddp_gives_the_same_bits() -> None:
    check(DistributedDataParallel)


@case(2)
def ddp_with_recomputation_gives_the_same_bits() -> None:
    check(DistributedDataParallel, recompute=True)


@case(2)
def ddp_under_a_budget_gives_the_same_bits() -> None:
    check_budget(DistributedDataParallel)


@case(2)
def fsdp_under_a_budget_gives_the_same_bits() -> None:
    check_budget(sharded(reshard_after_forward=True))


@case(2)
def fsdp_in_bf16_under_a_budget_gives_the_same_bits() -> None:
    check_budget(sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)))


@case(2, 3)
def fsdp_gives_the_same_bits_after_resharding() -> None:
    check(sharded(reshard_after_forward=True))


@case(2)
def fsdp_gives_the_same_bits_without_resharding() -> None:
    check(sharded(reshard_after_forward=False))


@case(2)
def fsdp_with_recomputation_gives_the_same_bits() -> None:
    check(sharded(), recompute=True)


@case(2)
def fsdp_in_bf16_gives_the_same_bits() -> None:
    check(sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)))


@case(2)
def fsdp_layers_are_found() -> None:
    net = sharded()(make())
    net.blocks = nn.Sequential(*net.blocks)  # no ModuleList is left: only the wrapping tells
    handle = forebay.offload_activations(net, **OPTIONS)
    assert [layer.module for layer in handle._layers] == list(net.blocks)
    handle.remove()


@case(2)
def parameters_made_whole_stay() -> None:
    net = sharded()(make())
    handle = forebay.offload_activations(net, **{**OPTIONS, "keep_last": 0, "min_bytes": 1})
    seen: list[int] = []
    whole: set[int] = set()
    x = torch.randn(ROWS, WIDTH)
    net(x).sum().backward()
    (engine,) = handle._saver.engines.values()
    save = engine.save

    def watched(tensor: torch.Tensor, **options: Any) -> Any:
        seen.append(tensor.untyped_storage()._cdata)
        return save(tensor, **options)

    engine.save = watched  # type: ignore[method-assign]
    for block in net.blocks:
        # After FSDP2's own hook, which comes first.
        block.register_forward_pre_hook(
            lambda module, _: whole.update(p.untyped_storage()._cdata for p in module.parameters())
        )
    net(x).sum().backward()
    assert len(whole) >= 4
    assert seen
    assert not whole & set(seen)
    handle.remove()
