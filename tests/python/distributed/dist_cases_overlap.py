"""Cases with overlapped steps under FSDP2 and with DTensors: the same bits as plain steps, on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import forebay
from forebay.optim.overlap.guess import Chances
from forebay.optim.overlap.pending import Pending
from support.dist.models import (
    SMALL,
    STEPS,
    adamw,
    assert_same_bits,
    backward,
    full,
    groups,
    inner,
    make,
    parameters_of,
    shard,
    state_of,
)
from support.dist.registry import case, shared_folder
from support.overlap import LateEngine

if TYPE_CHECKING:
    from collections.abc import Callable


def compare(
    body: Callable[[Any, Any, Callable[[], Any]], Any],
    make_net: Callable[[], Any] = lambda: shard(make()),
    *,
    late: bool = True,
    overlap: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train with overlapped steps and with plain ones; return the statistics of the last overlapped step."""
    found, stats = [], {}
    for overlaps in (True, False):
        net = make_net()
        optimizer = adamw(net, **options)
        last: Callable[[], Any] = nullcontext
        handle = None
        if overlaps:
            handle = forebay.overlap_step(net, optimizer, overlap_bytes=8 * SMALL["chunk_bytes"], **(overlap or {}))
            last = nullcontext if overlap else optimizer.last_backward
            if late:
                optimizer.prepare()
                optimizer._engine = LateEngine(optimizer._engine)
        seen = body(net, optimizer, last)
        if handle is not None:
            stats = handle.stats()
        found.append((seen, parameters_of(net), state_of(net, optimizer)))
    ours, plain = found
    assert_same_bits(ours[1], plain[1])
    assert_same_bits(ours[2], plain[2])
    if ours[0]:
        assert_same_bits(dict(enumerate(ours[0])), dict(enumerate(plain[0])))  # type: ignore[arg-type]
    return stats


def train(net: Any, optimizer: Any, last: Callable[[], Any], steps: range = range(STEPS)) -> list[torch.Tensor]:
    for step in steps:
        with last():
            backward(net, step)
        optimizer.step()
        optimizer.zero_grad()
    return []


def filled(net: Any) -> int:
    """Return how many parameters this rank has something of."""
    return sum(inner(parameter).numel() > 0 and parameter.requires_grad for parameter in net.parameters())


@case(2)
def training_with_and_without_clipping() -> None:
    for late in (False, True):
        for clip in (None, 0.05):
            stats = compare(train, late=late, max_grad_norm=clip)
            assert stats["taken_in_backward"] == (filled(shard(make())) if clip is None else 0)
            assert stats["waited_in_step"] == 0


@case(2)
def an_optimizer_without_an_update_rule() -> None:
    for policy in ({}, {"reshard_after_forward": False}):
        found = []
        for overlaps in (True, False):
            net = shard(make(), **policy)
            optimizer = forebay.offload(torch.optim.NAdam(net.parameters(), lr=1e-2), unit_bytes=1)
            handle = forebay.overlap_step(net, optimizer) if overlaps else None
            for step in range(STEPS):
                backward(net, step)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
                optimizer.step()
                # The first step makes new homes for its state, and waits for that.
                assert isinstance(next(net.parameters()), Pending) == (overlaps and step > 0)
                optimizer.zero_grad()
            if handle is not None:
                assert handle.stats()["waited_in_step"] == 0
                assert handle.stats()["steps"] == STEPS
            found.append((parameters_of(net), state_of(net, optimizer)))
        assert_same_bits(found[0][0], found[1][0])
        assert_same_bits(found[0][1], found[1][1])


@case(2)
def guesses_that_are_right_and_wrong() -> None:
    never, clips = 1e6, 1e-4

    def body(limits: list[float]) -> Callable[[Any, Any, Callable[[], Any]], Any]:
        def train(net: Any, optimizer: Any, last: Callable[[], Any]) -> None:
            for step, limit in enumerate(limits):
                with last():
                    backward(net, step)
                optimizer.max_grad_norm = limit
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()

        return train

    def sharded() -> Any:
        return shard(make(torch.bfloat16))

    overlap = {"speculate": True, "accumulation_steps": 1}
    for late in (False, True):
        for limits, guesses in (
            ([never] * 5, (4, 4)),
            # After the second step none is tried.
            ([never, clips, never, never, clips], (1, 0)),
        ):
            stats = compare(body(limits), sharded, late=late, overlap=overlap, max_grad_norm=never)
            assert (stats["speculated"], stats["accepted"]) == guesses
            of_all: list[Any] = [None, None]
            dist.all_gather_object(of_all, (stats["speculated"], stats["accepted"]))
            assert of_all[0] == of_all[1]
        with mock.patch.object(Chances, "allow", return_value=True):
            limits = [never, never, clips, never, clips, clips, never]
            stats = compare(body(limits), sharded, late=late, overlap=overlap, max_grad_norm=never)
            assert (stats["speculated"], stats["accepted"]) == (6, 3)


@case(2)
def every_way_of_sharding() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in (
        {"reshard_after_forward": False},
        {"mp_policy": policy},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ):
        for clip in (None, 0.05):
            compare(train, lambda options=options: shard(make(), **options), max_grad_norm=clip)
    compare(train, lambda: shard(make(torch.bfloat16)))
    compare(train, lambda: shard(make(tied=True)))

    def frozen() -> Any:
        net = make()
        for name in ("embed.weight", "inner.bias", "one"):
            net.get_parameter(name).requires_grad_(requires_grad=False)
        return shard(net)

    compare(train, frozen)


@case(2)
def micro_batches_without_reduction() -> None:
    def body(net: Any, optimizer: Any, last: Callable[[], Any]) -> None:
        for step in range(STEPS):
            for part in range(3):
                net.set_requires_gradient_sync(part == 2)
                with last() if part == 2 else nullcontext():
                    backward(net, 10 * step + part)
            optimizer.step()
            optimizer.zero_grad()

    stats = compare(body)
    assert stats["taken_in_backward"] == filled(shard(make()))


@case(2)
def micro_batches_that_are_counted() -> None:
    def body(net: Any, optimizer: Any, last: Callable[[], Any]) -> None:
        for step in range(STEPS):
            for part in range(2):
                backward(net, 10 * step + part)
            optimizer.step()
            optimizer.zero_grad()

    stats = compare(body, overlap={"accumulation_steps": 2})
    assert stats["taken_in_backward"] == filled(shard(make()))


@case(2)
def weights_gathered_ahead_and_by_hand() -> None:
    def ahead(net: Any, optimizer: Any, last: Callable[[], Any]) -> list[torch.Tensor]:
        net.inner.set_modules_to_forward_prefetch([net.outer])
        net.outer.set_modules_to_backward_prefetch([net.inner])
        train(net, optimizer, last)
        with last():
            backward(net, 50)
        optimizer.step()
        optimizer.zero_grad()
        net.outer.unshard()
        seen = net.outer.weight.detach().clone()
        net.outer.reshard()
        return [seen]

    compare(ahead)
    compare(ahead, max_grad_norm=0.05)


READS: dict[str, Callable[[Any], list[torch.Tensor]]] = {
    "to_local": lambda net: [parameter.to_local() for parameter in net.parameters()],
    "full_tensor": lambda net: [parameter.full_tensor() for parameter in net.parameters()],
    "inner": lambda net: [parameter._local_tensor for parameter in net.parameters()],
    "state_dict": lambda net: [full(value) for value in net.state_dict().values()],
    "get_model_state_dict": lambda net: [full(value) for value in get_model_state_dict(net).values()],
    "detach": lambda net: [full(parameter.detach()) for parameter in net.parameters()],
    "norm": lambda net: [full(torch.nn.utils.get_total_norm(list(net.parameters())))],
    "printed": lambda net: [torch.tensor(list(repr(net.inner.weight).encode()))],
}


@case(2)
def reading_shards_waits() -> None:
    for name, read in READS.items():

        def body(net: Any, optimizer: Any, last: Any, read: Any = read, name: str = name) -> list[torch.Tensor]:
            train(net, optimizer, last)
            with last():
                backward(net, 50)
            optimizer.step()
            if isinstance(optimizer._engine, LateEngine):
                assert all(isinstance(p, Pending) for p in net.parameters() if inner_of(p).numel()), name
            found = [value.detach().clone() for value in read(net)]
            optimizer.zero_grad()
            return found

        compare(body)


def inner_of(parameter: Any) -> torch.Tensor:
    """Return a DTensor's shard without waiting."""
    from torch.distributed.tensor import DTensor

    found: torch.Tensor = DTensor._local_tensor.__get__(parameter)  # type: ignore[attr-defined]
    return found


@case(2)
def reading_shards_between_backward_and_step_raises() -> None:
    net = shard(make())
    optimizer = adamw(net)
    forebay.overlap_step(net, optimizer, accumulation_steps=1)
    for step in range(2):
        backward(net, step)
        optimizer.step()
        optimizer.zero_grad()
    backward(net, 3)
    for read in (
        lambda: net.inner.weight.to_local(),
        lambda: net.inner.unshard(),
        lambda: net.state_dict(),
        lambda: net(torch.zeros(3, dtype=torch.int64)),
    ):
        with pytest.raises(forebay.OptionError, match=r"step\(\)"):
            read()
    optimizer.step()
    optimizer.zero_grad()
    backward(net, 4)
    optimizer.step()


@case(2)
def units_that_run_several_times() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()
            self.again = torch.nn.Linear(29, 29)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.net.embed(tokens)
            for _ in range(2):
                hidden = self.again(hidden).tanh()
            hidden = checkpoint(self.net.inner, hidden, use_reentrant=False)
            return self.net.head(self.net.outer(hidden) * self.net.one + self.net.two[0])

    def build() -> Any:
        torch.manual_seed(4)
        found = Twice()
        for module in (found.again, found.net.inner, found.net.outer, found):
            fully_shard(module)
        return found

    for clip in (None, 0.05):
        compare(train, build, max_grad_norm=clip)


@case(2)
def two_forwards_before_one_backward() -> None:
    def body(net: Any, optimizer: Any, last: Callable[[], Any]) -> None:
        for step in range(STEPS):
            tokens = torch.randint(0, 11, (2, 24), generator=torch.Generator().manual_seed(step))
            losses = [net(tokens[i]).square().mean() for i in range(2)]
            with last():
                sum(losses).backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(body)


@case(2)
def tensor_parallel_parameters() -> None:
    def build() -> Any:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(4)
        net = torch.nn.Sequential(
            torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 8), torch.nn.LayerNorm(8)
        )
        return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def body(net: Any, optimizer: Any, last: Callable[[], Any]) -> None:
        for step in range(STEPS):
            rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
            with last():
                (net(rows) * rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for clip in (None, 0.05):
        compare(body, build, max_grad_norm=clip)


@case(2)
def collectives_of_weights_wait() -> None:
    def body(net: Any, optimizer: Any, last: Callable[[], Any]) -> list[torch.Tensor]:
        found = []
        for step in range(STEPS):
            with last():
                backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                dist.broadcast(net.inner.weight, 0)
                dist.all_reduce(net.outer.weight)
                net.outer.weight.div_(2)
                room = [torch.empty_like(net.one) for _ in range(2)]
                dist.all_gather(room, net.one)
                found += [*room, net.inner.weight.clone(), net.outer.weight.clone()]
        return found

    compare(body, make)


@case(2)
def checkpoints_are_of_the_step() -> None:
    for clip in (None, 0.05):
        loaded = []
        for overlaps in (True, False):
            net = shard(make())
            optimizer = adamw(net, max_grad_norm=clip)
            if overlaps:
                forebay.overlap_step(net, optimizer, accumulation_steps=1)
            path = shared_folder() / f"overlap-{clip}-{overlaps}"
            saves = []
            for step in range(STEPS):
                backward(net, step)
                optimizer.step()
                if step == 1:
                    forebay.checkpoint.save(path, net, optimizer)
                if step == 2:
                    saves.append(forebay.checkpoint.async_save(f"{path}-async", net, optimizer))
                optimizer.zero_grad()
            saves[0].result()
            for name in (path, f"{path}-async"):
                again = shard(make())
                fresh = adamw(again, max_grad_norm=clip)
                if overlaps:
                    forebay.overlap_step(again, fresh, accumulation_steps=1)
                forebay.checkpoint.load(name, again, fresh)
                backward(again, 9)
                fresh.step()
                loaded.append(parameters_of(again) | state_of(again, fresh))
            forebay.checkpoint.load(path, net, optimizer)
            backward(net, 9)
            optimizer.step()
            loaded.append(parameters_of(net) | state_of(net, optimizer))
        for ours, plain in zip(loaded[:3], loaded[3:], strict=True):
            assert_same_bits(ours, plain)
        assert_same_bits(loaded[0], loaded[2])


@case(2)
def what_reduces_late_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for wrap in (DistributedDataParallel, FullyShardedDataParallel):
        if wrap is FullyShardedDataParallel and not torch.cuda.is_available():
            continue
        net = make()
        wrapped = wrap(net)
        optimizer = forebay.AdamW(groups(net), **SMALL)
        for model in (wrapped, net):
            with pytest.raises(forebay.OptionError, match=f"under {wrap.__name__}.*reduces gradients too late"):
                forebay.overlap_step(model, optimizer)
    net = make()
    optimizer = forebay.AdamW(groups(net), **SMALL)
    forebay.overlap_step(net, optimizer, accumulation_steps=1)
    wrapped = DistributedDataParallel(net)
    with pytest.raises(forebay.OptionError, match="DistributedDataParallel"):
        backward(wrapped, 0)
