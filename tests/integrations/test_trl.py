"""TRL's trainers take forebay's steps: given the same gradients, a loop by hand ends with the same weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

import forebay
from forebay.integrations.trl import ForebayCallback, SleepCallback, attach, optimizer_cls_and_kwargs
from support.accelerators import assert_same_weights, weights
from support.hugging_face import LIMIT, Recorder, logged, text, tiny, tokenizer

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 3
LR = 1e-2
OFFLOAD = {"min_bytes": 0, "fraction": 1.0, "keep_last": 0}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return arguments for short runs on the CPU. What TRL switches on by itself stays on: bf16 and checkpointing."""
    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": LR,
        "weight_decay": 0.1,
        "max_grad_norm": LIMIT,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return {**given, **changes}


def sft(folder: Path, *callbacks: Any, way: str = "attach", **changes: Any) -> SFTTrainer:
    args = SFTConfig(**settings(folder, **changes))
    more = {} if way == "attach" else {"optimizer_cls_and_kwargs": optimizer_cls_and_kwargs(args)}
    data = Dataset.from_dict({"text": text(8, 12)})
    return SFTTrainer(tiny(), args, train_dataset=data, processing_class=tokenizer(), callbacks=list(callbacks), **more)


def dpo(folder: Path, *callbacks: Any, **changes: Any) -> DPOTrainer:
    args = DPOConfig(**settings(folder, **changes))
    rows = {"prompt": text(8, 6, 1), "chosen": text(8, 6, 2), "rejected": text(8, 6, 3)}
    reference = tiny()
    return DPOTrainer(
        tiny(),
        reference,
        args,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return the share of even words."""
    numbers = [[int(word[1:]) for word in one.split()] for one in completions]
    return [sum(number % 2 == 0 for number in one) / max(len(one), 1) for one in numbers]


def generating(cls: Any, config: Any, folder: Path, *callbacks: Any, **changes: Any) -> Any:
    more = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
    args = config(**settings(folder, **more, **changes))
    data = Dataset.from_dict({"prompt": text(8, 6)})
    return cls(tiny(), reward, args, train_dataset=data, processing_class=tokenizer(), callbacks=list(callbacks))


def grpo(folder: Path, *callbacks: Any, **changes: Any) -> GRPOTrainer:
    return generating(GRPOTrainer, GRPOConfig, folder, *callbacks, **changes)


def rloo(folder: Path, *callbacks: Any, **changes: Any) -> RLOOTrainer:
    # Without the penalty there is no reference model, which TRL would download.
    return generating(RLOOTrainer, RLOOConfig, folder, *callbacks, beta=0.0, **changes)


def check(trainer: Trainer, recorder: Recorder) -> None:
    """Fail unless the trainer took exactly forebay's steps, clipped once."""
    assert len(recorder.gradients) == STEPS
    assert isinstance(trainer.optimizer.optimizer, forebay.AdamW)
    norms = logged(trainer, "grad_norm")
    expected = recorder.replay(tiny(), lr=LR, max_grad_norm=LIMIT)
    assert_same_weights(weights(trainer.model), expected)
    whole = [float(torch.nn.utils.get_total_norm(list(one.values()))) for one in recorder.gradients]
    assert norms == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("make", [sft, dpo, grpo, rloo])
def test_a_trainer_takes_forebays_steps(tmp_path: Path, make):
    recorder = Recorder()
    trainer = make(tmp_path, recorder)
    attach(trainer)
    trainer.train()
    check(trainer, recorder)


def test_sft_with_arguments_of_the_constructor(tmp_path: Path):
    recorder = Recorder()
    trainer = sft(tmp_path, recorder, ForebayCallback(), way="constructor")
    trainer.train()
    check(trainer, recorder)


@pytest.mark.parametrize("make", [sft, dpo, grpo])
def test_weights_are_near_those_of_torch(tmp_path: Path, make):
    theirs = make(tmp_path, optim="adamw_torch", bf16=False)
    theirs.train()
    ours = make(tmp_path, bf16=False)
    attach(ours)
    ours.train()
    for name, value in weights(ours.model).items():
        torch.testing.assert_close(value, theirs.model.get_parameter(name).detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [True, False], ids=["recomputed", "saved"])
@pytest.mark.parametrize("make", [sft, dpo, grpo])
def test_activations_leave_in_every_step(tmp_path: Path, make, checkpointing):
    plain = make(tmp_path, gradient_checkpointing=checkpointing)
    attach(plain)
    plain.train()
    trainer = make(tmp_path, gradient_checkpointing=checkpointing)
    callback = attach(trainer, activations=OFFLOAD)
    stored: list[float] = []

    class Look(TrainerCallback):
        """Writes down how many bytes have left so far."""

        def on_optimizer_step(self, *args: Any, **options: Any) -> None:
            """Look after each step."""
            stored.append(callback.offload.stats()["stored_bytes"])

    trainer.add_callback(Look())
    trainer.train()
    assert_same_weights(weights(trainer.model), weights(plain.model))
    assert all(after > before for before, after in zip([0, *stored], stored, strict=False))
    assert len(stored) == STEPS


def test_activations_are_not_offloaded_twice(tmp_path: Path):
    trainer = sft(tmp_path)
    trainer.args.activation_offloading = True
    with pytest.raises(forebay.OptionError, match="offloads activations already"):
        attach(trainer, activations=True)


class Inside:
    """Looks at a trainer from inside its generation."""

    def __init__(self, trainer: Any, owner: Any) -> None:
        self.optimizer: list[bool] = []
        self.weights: list[bool] = []
        """Whether they slept, for each time that the trainer generated."""
        self._trainer = trainer
        self._generate = owner.generate
        owner.generate = self.generate

    def generate(self, *args: Any, **options: Any) -> Any:
        """Try to take a step, look for the memory of the weights, and generate."""
        try:
            self._trainer.optimizer.optimizer.step()
            self.optimizer.append(False)
        except forebay.AsleepError:
            self.optimizer.append(True)
        self.weights.append(not any(one.untyped_storage().size() for one in self._trainer.model.parameters()))
        return self._generate(*args, **options)


class Engine:
    """Stands in for vLLM on the trainer's GPU: it has a copy of the weights."""

    def __init__(self, trainer: Any) -> None:
        self._model, self._trainer = tiny(), trainer

    def sync_weights(self) -> None:
        """Read the trainer's weights, as TRL asks for after each step."""
        self._model.load_state_dict(self._trainer.model.state_dict())

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, list[list[int]], list[list[list[float]]], Any]:
        """Return some tokens after each prompt, and their probabilities."""
        generator = torch.Generator().manual_seed(sum(map(sum, prompts)))
        completions, chances = [], []
        for prompt in prompts:
            tokens = list(prompt)
            chance = []
            for _ in range(8):
                scores = self._model(torch.tensor([tokens])).logits[0, -1].log_softmax(0)
                tokens.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
                chance.append([float(scores[tokens[-1]])])
            completions.append(tokens[len(prompt) :])
            chances.append(chance)
        return None, completions, chances, None


def with_engine(folder: Path) -> GRPOTrainer:
    """Return a trainer that generates with another engine."""
    trainer = grpo(folder)
    trainer.use_vllm, trainer.vllm_mode = True, "colocate"
    trainer.vllm_generation, trainer._last_loaded_step = Engine(trainer), -1
    return trainer


@pytest.mark.parametrize("placement", ["stream", "resident"])
@pytest.mark.parametrize("engine", [False, True], ids=["own weights", "vllm"])
@pytest.mark.parametrize("sleep", ["optimizer", "all"])
def test_sleep_while_generating_changes_no_bit(tmp_path: Path, sleep, engine, placement):
    if sleep == "all" and not engine:
        with pytest.raises(forebay.OptionError, match="sleep='all' needs use_vllm=True"):
            attach(grpo(tmp_path), sleep=sleep)
        return
    make = with_engine if engine else grpo
    trainers, insides = [], []
    for what in (None, sleep):
        trainer = make(tmp_path)
        attach(trainer, placement=placement, sleep=what)
        insides.append(Inside(trainer, trainer.vllm_generation if engine else trainer.model))
        trainer.train()
        trainers.append(trainer)
    plain, trainer = trainers
    assert_same_weights(weights(trainer.model), weights(plain.model))
    assert logged(trainer, "reward") == logged(plain, "reward")
    assert [one.optimizer for one in insides] == [[False] * STEPS, [True] * STEPS]
    assert [one.weights for one in insides] == [[False] * STEPS, [sleep == "all"] * STEPS]
    # Generation after training is as before.
    owner = trainer.vllm_generation if engine else trainer.model
    assert owner.generate == insides[1].generate


def test_sleep_with_gradients_of_an_earlier_pass(tmp_path: Path):
    """Completions for the second half of a step are generated while the gradients of the first half exist."""
    changes = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
    found = []
    for sleep in (None, "optimizer"):
        trainer = grpo(tmp_path, **changes)
        attach(trainer, sleep=sleep)
        trainer.train()
        found.append(weights(trainer.model))
        assert "generate" not in vars(trainer.model)
    assert_same_weights(*found)


def test_sleep_is_refused_where_it_makes_no_sense(tmp_path: Path):
    with pytest.raises(forebay.OptionError, match=r"invalid sleep: 'weights'; use 'optimizer' or 'all'"):
        attach(grpo(tmp_path), sleep="weights")
    with pytest.raises(forebay.OptionError, match="sleep is for trainers that generate; leave it out for SFTTrainer"):
        attach(trainer := sft(tmp_path), sleep="optimizer")
    # Nothing was attached.
    assert trainer.optimizer_cls_and_kwargs is None
    trainer = with_engine(tmp_path)
    trainer.vllm_mode = "server"
    with pytest.raises(forebay.OptionError, match="vllm_mode='server'"):
        SleepCallback(trainer, "all")
