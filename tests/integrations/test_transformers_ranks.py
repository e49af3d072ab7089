"""Trainers on two ranks, with DDP and FSDP2, compute what loops written by hand compute."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

import forebay
from forebay.integrations.transformers import ForebayCallback, attach, optimizer_cls_and_kwargs
from support.accelerators import assert_same_weights, forget_accelerators, sharding_on_cpu, weights
from support.hugging_face import LIMIT, arguments, grouped, logged, tiny, tokens, train_by_hand
from support.ranks import be_a_rank, run_on_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from support.dist.launch import Outcome

SHARDED = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
OFFLOAD = {"min_bytes": 0, "fraction": 1.0, "keep_last": 0}


def by_hand(sharded: bool, steps: int, accumulate: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train on two ranks without a framework; return weights and norms."""
    model: Any = tiny()
    if sharded:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        wrapped = model
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = forebay.AdamW(grouped(model), lr=1e-2, max_grad_norm=LIMIT)
    norms = train_by_hand(wrapped, optimizer, steps, accumulate=accumulate, rank=dist.get_rank(), world=2)
    return weights(model), norms


def equals_a_loop_by_hand(folder: Path, accumulate: int, **changes: Any) -> None:
    expected, norms = by_hand(bool(changes), 3, accumulate)
    args = arguments(folder, gradient_accumulation_steps=accumulate, **changes)
    trainer = Trainer(tiny(), args, train_dataset=tokens())
    callback = attach(trainer, activations=OFFLOAD)
    trainer.train()
    assert trainer.accelerator.is_fsdp2 == bool(changes)
    assert_same_weights(weights(trainer.model), expected)
    assert logged(trainer, "grad_norm") == norms
    assert min(norms) > LIMIT
    assert args.max_grad_norm == LIMIT
    assert callback.offload.stats()["stored_bytes"] > 0


def ddp(folder: Path) -> None:
    equals_a_loop_by_hand(folder, 1)


def ddp_with_accumulation(folder: Path) -> None:
    equals_a_loop_by_hand(folder, 2)


@sharding_on_cpu()
def fsdp2(folder: Path) -> None:
    equals_a_loop_by_hand(folder, 1, **SHARDED)


@sharding_on_cpu()
def fsdp2_with_accumulation(folder: Path) -> None:
    equals_a_loop_by_hand(folder, 2, **SHARDED)


@sharding_on_cpu()
def fsdp2_pins_the_shards_only(folder: Path) -> None:
    """State is for the shards of this rank, although the Trainer makes the optimizer before it shards the model."""
    args = arguments(folder, **SHARDED)
    chosen = optimizer_cls_and_kwargs(args)
    trainer = Trainer(
        tiny(), args, train_dataset=tokens(), optimizer_cls_and_kwargs=chosen, callbacks=[ForebayCallback()]
    )
    trainer.train()
    inner = trainer.optimizer.optimizer
    local = sum(one.to_local().numel() for one in trainer.model.parameters())
    whole = sum(one.numel() for one in tiny().parameters())
    assert local == whole // 2
    assert inner.stats()["pinned_bytes"] < 9 * local
    assert min(logged(trainer, "grad_norm")) > LIMIT


@sharding_on_cpu()
def fsdp2_saves_and_resumes(folder: Path, **config: Any) -> None:
    changes = {**SHARDED, "fsdp_config": {**SHARDED["fsdp_config"], **config}}
    changes |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    results = []
    for resumes in (False, True):
        trainer = Trainer(tiny(attention_dropout=0.2), arguments(folder, **changes), train_dataset=tokens())
        callback = attach(trainer, saves=True)
        if resumes:
            torch.manual_seed(99)
            callback.resume(trainer)
        else:
            trainer.train()
            assert not any(path.name.startswith("optimizer") for path in (folder / "checkpoint-2").iterdir())
        results.append((weights(trainer.model), logged(trainer, "loss")))
        forget_accelerators()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "checkpoint-4")
        dist.barrier()
    assert results[1][1] == results[0][1]
    assert_same_weights(results[1][0], results[0][0])


def fsdp2_saves_and_resumes_sharded(folder: Path) -> None:
    fsdp2_saves_and_resumes(folder, state_dict_type="SHARDED_STATE_DICT")


@sharding_on_cpu()
def fsdp2_resumes_from_the_trainers_own_checkpoint(folder: Path) -> None:
    changes = {**SHARDED, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    results = []
    for resumes in (None, str(folder / "checkpoint-2")):
        trainer = Trainer(tiny(attention_dropout=0.2), arguments(folder, **changes), train_dataset=tokens())
        attach(trainer)
        trainer.train(resume_from_checkpoint=resumes)
        results.append(weights(trainer.model))
        forget_accelerators()
        dist.barrier()
    assert_same_weights(results[1], results[0])


@sharding_on_cpu()
def saves_under_fsdp2_need_the_trainer(folder: Path) -> None:
    args = arguments(folder, **SHARDED)
    trainer = Trainer(tiny(), args, train_dataset=tokens(), callbacks=[ForebayCallback(saves=True)])
    with pytest.raises(forebay.OptionError, match=r"use attach\(trainer, saves=...\)"):
        trainer.train()
    args.save_strategy = "best"
    with pytest.raises(forebay.OptionError, match="save_strategy='best'"):
        trainer.train()


CASES = [
    ddp,
    ddp_with_accumulation,
    fsdp2,
    fsdp2_with_accumulation,
    fsdp2_pins_the_shards_only,
    fsdp2_saves_and_resumes,
    fsdp2_saves_and_resumes_sharded,
    fsdp2_resumes_from_the_trainers_own_checkpoint,
    saves_under_fsdp2_need_the_trainer,
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """How all cases went."""
    return run_on_ranks(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_case_passes_on_both_ranks(outcome: Outcome, case: str):
    outcome.check(case)


if __name__ == "__main__":
    be_a_rank(CASES, after=forget_accelerators)
