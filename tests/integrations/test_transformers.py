"""A Trainer with forebay's optimizer and callback computes what a loop written by hand computes."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import forebay
from forebay.integrations.transformers import ForebayCallback, attach, optimizer_cls_and_kwargs
from support.accelerators import assert_same_weights, weights
from support.hugging_face import LIMIT, arguments, grouped, logged, tiny, tokens, train_by_hand

if TYPE_CHECKING:
    from pathlib import Path


def make(way: str, model: torch.nn.Module, args: Any, *more: TrainerCallback, **options: Any) -> Trainer:
    """Return a Trainer with forebay, with arguments of the constructor or attached later."""
    data = tokens()
    if way == "attach":
        trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=list(more))
        attach(trainer, **options)
        return trainer
    switches = {name: options.pop(name) for name in ("activations", "overlap", "saves", "clip") if name in options}
    return Trainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data,
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, **options),
        callbacks=[ForebayCallback(**switches), *more],
    )


@pytest.fixture(params=["callback", "attach"])
def way(request: pytest.FixtureRequest) -> str:
    """How forebay gets into the Trainer."""
    return str(request.param)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_equals_a_loop_by_hand_with_clipping_inside_the_step(tmp_path: Path, way, accumulate):
    expected = tiny()
    optimizer = forebay.AdamW(grouped(expected), lr=1e-2, max_grad_norm=LIMIT)
    norms = train_by_hand(expected, optimizer, 3, accumulate=accumulate)
    args = arguments(tmp_path, gradient_accumulation_steps=accumulate)
    trainer = make(way, tiny(), args)
    trainer.train()
    assert_same_weights(weights(trainer.model), weights(expected))
    # Without its accelerator, the Trainer computes the norm for its log itself, and adds in another order.
    assert logged(trainer, "grad_norm") == (norms if way == "attach" else pytest.approx(norms, rel=1e-6))
    assert min(norms) > 2 * LIMIT


class Watch(TrainerCallback):
    """Writes down what a Trainer's clipping leaves at each step, and what the arguments say between the steps."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.limits: list[float | None] = []
        self.arguments: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **_):
        """Look at the gradients that the step gets."""
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        self.limits.append(getattr(optimizer.optimizer, "max_grad_norm", None))

    def on_step_end(self, args, state, control, **_):
        """Look at the arguments between the steps."""
        self.arguments.append(args.max_grad_norm)


def test_gradients_are_clipped_once_and_the_arguments_are_as_before(tmp_path: Path, way):
    args = arguments(tmp_path)
    watch = Watch()
    trainer = make(way, tiny(), args, watch)
    trainer.train()
    assert min(watch.norms) > 2 * LIMIT
    assert watch.limits == [LIMIT] * 3
    assert watch.arguments == [LIMIT] * 3
    assert args.max_grad_norm == LIMIT
    assert trainer.optimizer.optimizer.max_grad_norm is None
    assert "clip_grad_norm_" not in vars(trainer.accelerator)


def test_clip_false_leaves_clipping_to_the_trainer(tmp_path: Path, way):
    watch = Watch()
    trainer = make(way, tiny(), arguments(tmp_path), watch, clip=False)
    trainer.train()
    assert watch.norms == pytest.approx([LIMIT] * 3, rel=1e-4)
    assert watch.limits == [None] * 3
    assert min(logged(trainer, "grad_norm")) > 2 * LIMIT


def test_an_optimizer_of_torch_is_clipped_by_the_trainer(tmp_path: Path):
    watch = Watch()
    trainer = Trainer(
        tiny(), arguments(tmp_path), train_dataset=tokens(), callbacks=[ForebayCallback(activations=True), watch]
    )
    trainer.train()
    assert watch.norms == pytest.approx([LIMIT] * 3, rel=1e-4)


def test_an_optimizer_without_an_update_rule_is_clipped_by_the_trainer(tmp_path: Path):
    expected = tiny()
    plain = Trainer(
        expected, arguments(tmp_path), train_dataset=tokens(), optimizers=(torch.optim.NAdam(grouped(expected)), None)
    )
    plain.train()
    model = tiny()
    watch, given = Watch(), torch.optim.NAdam(grouped(model))
    trainer = Trainer(model, arguments(tmp_path), train_dataset=tokens(), optimizers=(given, None), callbacks=[watch])
    attach(trainer)
    trainer.train()
    assert watch.norms == pytest.approx([LIMIT] * 3, rel=1e-4)
    assert given.stats()["pinned_bytes"] > 0
    assert_same_weights(weights(model), weights(expected))


@pytest.mark.parametrize("own", [0.25, 0.75])
def test_a_second_limit_is_said_once_and_the_smaller_one_is_used(tmp_path: Path, way, own):
    args = arguments(tmp_path)
    with pytest.warns(UserWarning, match=r"the Trainer clips with args.max_grad_norm=0.5 before it"):
        trainer = make(way, tiny(), args, watch := Watch(), max_grad_norm=own)
    with pytest.warns(UserWarning, match=rf"max_grad_norm={own} and the Trainer args.max_grad_norm=0.5") as said:
        trainer.train()
    assert sum("smaller limit" in str(one.message) for one in said) == 1
    assert min(watch.norms) > 2 * LIMIT
    assert watch.limits == [min(own, LIMIT)] * 3
    assert trainer.optimizer.optimizer.max_grad_norm == own


def test_without_a_limit_nothing_is_clipped(tmp_path: Path, way):
    expected = tiny()
    train_by_hand(expected, forebay.AdamW(grouped(expected), lr=1e-2), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer = make(way, tiny(), arguments(tmp_path, max_grad_norm=0.0))
    trainer.train()
    assert_same_weights(weights(trainer.model), weights(expected))
    assert trainer.optimizer.optimizer.grad_norm is None
    assert min(logged(trainer, "grad_norm")) > 2 * LIMIT


def test_arguments_become_settings_of_the_optimizer(tmp_path: Path):
    args = arguments(tmp_path, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6)
    chosen, given = optimizer_cls_and_kwargs(args, placement="host", eps=1e-5)
    assert chosen is forebay.AdamW
    assert given == {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1, "placement": "host"}
    assert optimizer_cls_and_kwargs(args, forebay.SGD)[1] == {"lr": 1e-2, "weight_decay": 0.1}


def test_another_optimizer_in_the_arguments_is_not_replaced_in_silence(tmp_path: Path):
    args = arguments(tmp_path, optim="adafactor")
    with pytest.warns(UserWarning, match=r"args.optim='adafactor' is not used, forebay.AdamW takes its place"):
        attach(Trainer(tiny(), args, train_dataset=tokens()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer_cls_and_kwargs(args, forebay.SGD)
        optimizer_cls_and_kwargs(arguments(tmp_path, optim="adamw_torch"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["autocast", "masters"])
def test_bf16_equals_a_loop_by_hand(tmp_path: Path, dtype):
    expected = tiny().to(dtype)
    optimizer = forebay.AdamW(grouped(expected), lr=1e-2, max_grad_norm=LIMIT)
    train_by_hand(expected, optimizer, 3, autocast=True)
    trainer = make("attach", tiny().to(dtype), arguments(tmp_path, bf16=True))
    trainer.train()
    assert_same_weights(weights(trainer.model), weights(expected))
    inner = trainer.optimizer.optimizer
    assert all(("master_param" in state) == (dtype == torch.bfloat16) for state in inner.state.values())


def test_an_optimizer_that_the_trainer_was_given_is_converted(tmp_path: Path):
    expected = tiny()
    optimizer = forebay.AdamW(grouped(expected), lr=1e-2, max_grad_norm=LIMIT)
    train_by_hand(expected, optimizer, 3)
    model = tiny()
    given = torch.optim.AdamW(grouped(model), lr=1e-2)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=tokens(), optimizers=(given, None))
    with pytest.raises(forebay.OptionError, match=r"has an optimizer already.*SGD"):
        attach(trainer, forebay.SGD)
    attach(trainer, placement="host")
    trainer.train()
    assert trainer.optimizer.optimizer is given
    assert isinstance(given, forebay.AdamW)
    assert_same_weights(weights(model), weights(expected))


def test_training_twice_and_evaluating_between(tmp_path: Path, way):
    expected = tiny()
    optimizer = forebay.AdamW(grouped(expected), lr=1e-2, max_grad_norm=LIMIT)
    for _ in range(2):
        train_by_hand(expected, optimizer, 3)
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2)
    trainer = make(way, tiny(), args)
    for _ in range(2):
        trainer.train()
        assert args.max_grad_norm == LIMIT
        assert len(logged(trainer, "eval_loss")) == 2
    assert_same_weights(weights(trainer.model), weights(expected))


class FailsOnce(TrainerCallback):
    """Raises inside the second step, and not again."""

    raised = False

    def on_pre_optimizer_step(self, args, state, control, **_):
        """Raise before the step."""
        if state.global_step == 1 and not self.raised:
            self.raised = True
            raise ZeroDivisionError


@pytest.mark.parametrize("by", ["restore", "train"])
def test_an_error_inside_training_leaves_nothing_behind(tmp_path: Path, way, by):
    args = arguments(tmp_path)
    trainer = make(way, tiny(), args, FailsOnce(), activations={"min_bytes": 0})
    (callback,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, ForebayCallback)]
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    if by == "restore":
        callback.restore()
    else:
        trainer.train()
    assert args.max_grad_norm == LIMIT
    assert trainer.optimizer.optimizer.max_grad_norm is None
    assert "clip_grad_norm_" not in vars(trainer.accelerator)
    # Layers that are offloaded already are refused.
    forebay.offload_activations(trainer.model).remove()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("early", [False, True], ids=["callback", "before train"])
def test_activations_leave_with_the_same_gradients(tmp_path: Path, checkpointing, early):
    changes = {"gradient_checkpointing": checkpointing, "eval_strategy": "steps", "eval_steps": 1}
    plain = make("callback", tiny(), arguments(tmp_path / "plain", **changes))
    plain.train()
    options = {"min_bytes": 0, "fraction": 1.0, "keep_last": 0}
    model = tiny()
    handle = forebay.offload_activations(model, **options) if early else None
    trainer = make("attach", model, arguments(tmp_path / "ours", **changes), activations=None if early else options)
    trainer.train()
    (callback,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, ForebayCallback)]
    stats = (handle or callback.offload).stats()
    assert stats["stored_bytes"] > 0
    assert_same_weights(weights(trainer.model), weights(plain.model))
    if not early:
        forebay.offload_activations(trainer.model).remove()


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path):
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "learning_rate": 0.2,
    }
    args = arguments(tmp_path, **changes)
    trainer = make("attach", tiny(), args, saves=True)
    trainer.train()
    best = min(range(3), key=logged(trainer, "eval_loss").__getitem__)
    assert best < 2
    stepped = tiny()
    optimizer = forebay.AdamW(grouped(stepped), lr=0.2, max_grad_norm=LIMIT)
    train_by_hand(stepped, optimizer, best + 1)
    assert_same_weights(weights(trainer.model), weights(stepped))
    assert args.save_only_model is False


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"activations": 3}, {}, "invalid activations: 3"),
        ({"activations": True}, {"torch_compile": True}, "torch_compile=True compiles the whole model"),
        ({"saves": True}, {"save_total_limit": 1}, "save_total_limit=1 removes the only complete checkpoint"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, way, options, changes, message):
    with pytest.raises(forebay.OptionError, match=message):
        make(way, tiny(), arguments(tmp_path, **changes), **options).train()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("limit", [LIMIT, 0.0])
def test_overlapped_steps_have_the_bits_of_plain_ones(tmp_path: Path, limit, accumulate):
    def trained(**options: Any) -> tuple[Trainer, ForebayCallback]:
        args = arguments(tmp_path, gradient_accumulation_steps=accumulate, max_grad_norm=limit)
        trainer = Trainer(tiny(), args, train_dataset=tokens())
        callback = attach(trainer, **options)
        trainer.train()
        return trainer, callback

    plain, _ = trained()
    overlapped, callback = trained(overlap={"overlap_bytes": 64 << 20})
    assert_same_weights(weights(overlapped.model), weights(plain.model))
    norms = logged(overlapped, "grad_norm")
    assert norms == logged(plain, "grad_norm") if limit else all(math.isnan(norm) for norm in norms)
    assert callback.overlapped.stats()["device_bytes"] >= 0
    assert overlapped.optimizer.optimizer._overlap is None, "training has ended"


def test_what_an_overlapped_step_cannot_do_is_said(tmp_path: Path):
    with pytest.raises(forebay.OptionError, match="clip=False leaves clipping to the Trainer"):
        ForebayCallback(overlap=True, clip=False)
    args = arguments(tmp_path, max_grad_norm=0.0)
    trainer = make("callback", tiny(), args, overlap=True)
    with pytest.raises(forebay.OptionError, match="use attach"):
        trainer.train()
