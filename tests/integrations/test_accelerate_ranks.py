"""Accelerators on two ranks, with DDP and FSDP2, compute what loops without them compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import forebay
from forebay.integrations.accelerate import prepare
from support.accelerators import (
    LR,
    Blocks,
    assert_same_weights,
    forget_accelerators,
    sharding_on_cpu,
    train,
    train_by_hand,
    weights,
)
from support.ranks import be_a_rank, run_on_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from support.dist.launch import Outcome

LIMIT = 0.1


def expected(sharded: bool, accumulate: int, limit: float | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of a run without an accelerator."""
    model: Any = Blocks()
    wrapped = model
    if sharded:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = forebay.AdamW(model.parameters(), lr=LR, max_grad_norm=limit)
    train_by_hand(wrapped, optimizer, range(4), accumulate, dist.get_rank())
    return weights(model)


def make(sharded: bool, accumulate: int = 1) -> Accelerator:
    plugin = None
    if sharded:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=accumulate)
    assert accelerator.is_fsdp2 == sharded
    return accelerator


def prepared(accelerator: Accelerator, way: str, **options: Any) -> tuple[Any, Any]:
    """Return a model and an optimizer that is forebay's, prepared in one of the ways that work."""
    model = Blocks()
    if way == "class":
        return accelerator.prepare(model, forebay.AdamW(model.parameters(), lr=LR, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    if way == "prepare":
        return prepare(accelerator, model, optimizer, **options)
    if way == "offload before":
        return accelerator.prepare(model, forebay.offload(optimizer, **options))
    model, wrapper = accelerator.prepare(model, optimizer)
    return model, forebay.offload(wrapper, **options)


def every_way_equals_the_loop(sharded: bool) -> None:
    for accumulate in (1, 2):
        reference = expected(sharded, accumulate)
        for way in ("class", "prepare", "offload before", "offload after"):
            accelerator = make(sharded, accumulate)
            model, wrapper = prepared(accelerator, way)
            train(accelerator, model, wrapper, range(4))
            assert_same_weights(weights(accelerator.unwrap_model(model)), reference)
            assert isinstance(wrapper.optimizer, forebay.AdamW)
            forget_accelerators()


def ddp(folder: Path) -> None:
    every_way_equals_the_loop(sharded=False)


@sharding_on_cpu()
def fsdp2(folder: Path) -> None:
    every_way_equals_the_loop(sharded=True)


@sharding_on_cpu()
def fsdp2_pins_the_shards_only(folder: Path) -> None:
    accelerator = make(sharded=True)
    model, wrapper = prepared(accelerator, "class")
    train(accelerator, model, wrapper, range(1))
    local = sum(one.to_local().numel() for one in model.parameters())
    assert local < 0.51 * sum(one.numel() for one in Blocks().parameters())
    assert wrapper.optimizer.stats()["pinned_bytes"] < 9 * local


@sharding_on_cpu()
def fsdp2_clips_inside_the_step(folder: Path) -> None:
    reference = expected(True, 1, LIMIT)
    accelerator = make(sharded=True)
    model, wrapper = prepared(accelerator, "prepare", max_grad_norm=LIMIT)
    train(accelerator, model, wrapper, range(4))
    assert_same_weights(weights(model), reference)
    assert float(wrapper.optimizer.grad_norm) > 2 * LIMIT
    with pytest.warns(UserWarning, match=r"clips to 0.2 before the step"):
        train(accelerator, model, wrapper, range(1), limit=0.2)


@sharding_on_cpu()
def fsdp2_saves_and_loads(folder: Path) -> None:
    reference = expected(True, 1)
    for way in ("class", "prepare", "offload after"):
        state = str(folder / way)
        accelerator = make(sharded=True)
        model, wrapper = prepared(accelerator, way)
        train(accelerator, model, wrapper, range(2))
        accelerator.save_state(state)
        train(accelerator, model, wrapper, range(2, 4))
        assert_same_weights(weights(model), reference)
        forget_accelerators()
        accelerator = make(sharded=True)
        model, wrapper = prepared(accelerator, way)
        accelerator.load_state(state)
        train(accelerator, model, wrapper, range(2, 4))
        assert_same_weights(weights(model), reference)
        forget_accelerators()


CASES = [ddp, fsdp2, fsdp2_pins_the_shards_only, fsdp2_clips_inside_the_step, fsdp2_saves_and_loads]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return how all cases went."""
    return run_on_ranks(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_case_passes_on_both_ranks(outcome: Outcome, case: str):
    outcome.check(case)


if __name__ == "__main__":
    be_a_rank(CASES, after=forget_accelerators)
