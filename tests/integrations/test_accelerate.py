"""Optimizers of forebay in accelerate's wrapper compute what they compute without it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType

import forebay
from forebay.integrations.accelerate import prepare
from support.accelerators import (
    LR,
    Blocks,
    assert_same_weights,
    batch,
    forget_accelerators,
    train,
    train_by_hand,
    weights,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def own_accelerators() -> Iterator[None]:
    """Forget what the accelerators of a process share."""
    forget_accelerators()
    yield
    forget_accelerators()


def expected(steps: int = 4, accumulate: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a run without an accelerator."""
    model = Blocks()
    train_by_hand(model, forebay.AdamW(model.parameters(), lr=LR, **options), range(steps), accumulate)
    return weights(model)


WAYS = ["prepare", "class", "offload before", "offload after", "optimizer first"]


def prepared(accelerator: Accelerator, way: str) -> tuple[Any, Any]:
    """Return a model and an optimizer that is forebay's, prepared in one of the ways that work."""
    model = Blocks()
    if way == "prepare":
        return prepare(accelerator, model, torch.optim.AdamW(model.parameters(), lr=LR), placement="host")
    if way == "class":
        return accelerator.prepare(model, forebay.AdamW(model.parameters(), lr=LR))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    if way == "offload before":
        return accelerator.prepare(model, forebay.offload(optimizer))
    if way == "offload after":
        model, wrapper = accelerator.prepare(model, optimizer)
        return model, forebay.offload(wrapper)
    wrapper, model = prepare(accelerator, optimizer, model)
    return model, wrapper


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_training_equals_a_loop_without_accelerate(way, accumulate):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, optimizer = prepared(accelerator, way)
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert isinstance(optimizer.optimizer, forebay.AdamW)
    train(accelerator, model, optimizer, range(4))
    assert_same_weights(weights(model), expected(4, accumulate))


@pytest.mark.parametrize("way", WAYS)
def test_save_state_and_load_state_go_on_bit_for_bit(tmp_path: Path, way):
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, way)
    train(accelerator, model, optimizer, range(2))
    accelerator.save_state(str(tmp_path / "state"))
    train(accelerator, model, optimizer, range(2, 4))
    assert_same_weights(weights(model), expected(4))
    forget_accelerators()
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, way)
    accelerator.load_state(str(tmp_path / "state"))
    train(accelerator, model, optimizer, range(2, 4))
    assert_same_weights(weights(model), expected(4))


def test_schedulers_step_with_the_optimizer():
    accelerator = Accelerator(cpu=True)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, wrapper, schedule = prepare(accelerator, model, optimizer, schedule)
    with warnings.catch_warnings():
        # The scheduler warns if it believes that the optimizer has taken no step.
        warnings.simplefilter("error")
        train(accelerator, model, wrapper, range(1))
        schedule.step()
    assert wrapper.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == LR / 2
    assert schedule.get_last_lr() == [LR / 2]


def test_state_is_not_copied_when_an_optimizer_with_state_is_prepared(monkeypatch: pytest.MonkeyPatch):
    model = Blocks()
    optimizer = forebay.AdamW(model.parameters(), lr=LR)
    train_by_hand(model, optimizer, range(2))
    monkeypatch.setattr(forebay.AdamW, "load_state_dict", lambda *_: pytest.fail("state was loaded"))
    accelerator = Accelerator(cpu=True)
    model, wrapper = prepare(accelerator, model, optimizer)
    train(accelerator, model, wrapper, range(2, 4))
    assert_same_weights(weights(model), expected(4))
    # A second call wraps nothing again.
    assert prepare(accelerator, wrapper) is wrapper


def test_clipping_by_the_accelerator_alone_is_not_warned_of():
    accelerator = Accelerator(cpu=True)
    model, optimizer = prepared(accelerator, "prepare")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(accelerator, model, optimizer, range(2), limit=0.1)
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0


def test_clipping_twice_is_said_once():
    accelerator = Accelerator(cpu=True)
    model = Blocks()
    optimizer = forebay.AdamW(model.parameters(), lr=LR, max_grad_norm=0.1)
    model, wrapper = prepare(accelerator, model, optimizer)
    with pytest.warns(
        UserWarning, match=r"clips to 0.2 before the step, and the optimizer's max_grad_norm=0.1"
    ) as said:
        train(accelerator, model, wrapper, range(4), limit=0.2)
    assert len(said) == 1
    assert said[0].filename.endswith("accelerators.py")


def test_clipping_inside_the_step_equals_the_loop_without_accelerate():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Blocks()
    model, wrapper = prepare(accelerator, model, forebay.AdamW(model.parameters(), lr=LR, max_grad_norm=0.1))
    train(accelerator, model, wrapper, range(4))
    assert float(wrapper.optimizer.grad_norm) > 0.2
    assert_same_weights(weights(model), expected(4, 2, max_grad_norm=0.1))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["class", "offload before", "offload after"])
def test_a_scaler_skips_steps_that_overflow(way, fused):
    Accelerator(cpu=True)
    model = Blocks()
    if way == "class":
        optimizer: Any = forebay.AdamW(model.parameters(), lr=LR, fused=fused)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    if way == "offload before":
        forebay.offload(optimizer)
    # accelerate makes no scaler for the CPU by itself.
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    wrapper = AcceleratedOptimizer(optimizer, device_placement=True, scaler=scaler)
    if way == "offload after":
        forebay.offload(wrapper)
    reference = Blocks()
    theirs = forebay.AdamW(reference.parameters(), lr=LR)
    for step in range(4):
        scaler.scale(model(batch(step)).square().mean()).backward()
        if step == 1:
            next(model.parameters()).grad[0, 0] = torch.inf
        else:
            reference(batch(step)).square().mean().backward()
            theirs.step()
        wrapper.step()
        # Torch calls a fused optimizer even then, and accelerate does not see that it skips the step.
        assert wrapper.step_was_skipped == (step == 1 and not fused)
        wrapper.zero_grad()
        theirs.zero_grad()
    assert scaler.get_scale() == 2.0
    assert_same_weights(weights(model), weights(reference))


def test_an_engine_that_replaces_the_optimizer_is_refused():
    model = Blocks()
    accelerator = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    with pytest.raises(forebay.OptionError, match="an engine that replaces the optimizer: DEEPSPEED"):
        prepare(accelerator, model, torch.optim.AdamW(model.parameters()))


def test_an_optimizer_that_couples_parameters_is_refused():
    model = Blocks()
    with pytest.raises(forebay.OptionError, match="LBFGS"):
        prepare(Accelerator(cpu=True), model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("limit", [None, 0.1], ids=["not clipped", "clipped"])
def test_an_optimizer_without_an_update_rule_keeps_its_step(limit):
    ends = []
    for takes in (prepare, lambda accelerator, *both: accelerator.prepare(*both)):
        torch.manual_seed(1)
        accelerator, model = Accelerator(cpu=True), Blocks()
        model, optimizer = takes(accelerator, model, torch.optim.Adagrad(model.parameters(), lr=0.1))
        train(accelerator, model, optimizer, range(2), limit=limit)
        ends.append(weights(model))
    assert_same_weights(*ends)


def test_the_wrapper_is_taken_for_the_optimizer(tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    model, wrapper = prepared(accelerator, "class")
    train(accelerator, model, wrapper, range(2))
    forebay.checkpoint.save(tmp_path, model, wrapper)
    with forebay.Sleeper(model, wrapper).asleep(), pytest.raises(forebay.AsleepError):
        wrapper.step()
    train(accelerator, model, wrapper, range(2, 4))
    assert_same_weights(weights(model), expected(4))
    model, wrapper = prepared(accelerator, "class")
    forebay.checkpoint.load(tmp_path, model, wrapper)
    train(accelerator, model, wrapper, range(2, 4))
    assert_same_weights(weights(model), expected(4))
