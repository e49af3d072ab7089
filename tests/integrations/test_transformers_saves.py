"""Saves of a Trainer in the background: a run that ends anywhere goes on bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import Trainer, TrainerCallback

import forebay
from forebay.integrations.transformers import ForebayCallback, attach
from support.accelerators import assert_same_weights, weights
from support.hugging_face import arguments, logged, tiny, tokens
from support.processes import environment

EPOCH = 4
"""Steps of an epoch."""


def make(folder: Path, model: torch.nn.Module | None = None, **changes: Any) -> tuple[Trainer, ForebayCallback]:
    """Return a Trainer whose result depends on the schedule, the order of the batches and the random state."""
    given = {
        "num_train_epochs": 2,
        "max_steps": -1,
        "lr_scheduler_type": "linear",
        "train_sampling_strategy": "random",
        "save_strategy": "steps",
        "save_steps": 1,
    }
    args = arguments(folder, **{**given, **changes})
    trainer = Trainer(tiny(attention_dropout=0.2) if model is None else model, args, train_dataset=tokens(2 * EPOCH))
    return trainer, attach(trainer, saves=True)


def again(folder: Path, model: torch.nn.Module | None = None) -> tuple[Trainer, ForebayCallback]:
    """Return the same Trainer for the rest of a run, which it does not save."""
    return make(folder, model, save_strategy="no")


def result(trainer: Trainer) -> dict[str, Any]:
    """Return what a run leaves: weights, state and log."""
    inner = trainer.optimizer.optimizer
    items = inner.state_dict()["state"].items()
    state = {f"{number}.{name}": value for number, one in items for name, value in one.items()}
    return {"weights": weights(trainer.model), "state": state, "loss": logged(trainer, "loss")}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["loss"] == expected["loss"]
    assert_same_weights(found["weights"], expected["weights"])
    assert_same_weights(found["state"], expected["state"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a run from the beginning to the end, and its result."""
    folder = tmp_path_factory.mktemp("whole")
    trainer, _ = make(folder)
    trainer.train()
    return folder, result(trainer)


@pytest.mark.parametrize("step", [3, EPOCH, 5], ids=["inside an epoch", "between epochs", "in the second epoch"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path, whole, step):
    shutil.copytree(whole[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    torch.manual_seed(99)
    trainer, callback = again(tmp_path)
    callback.resume(trainer)
    assert_same(result(trainer), whole[1])


def test_a_checkpoint_of_another_folder(tmp_path: Path, whole):
    trainer, callback = again(tmp_path)
    callback.resume(trainer, whole[0] / "checkpoint-5")
    assert_same(result(trainer), whole[1])


def test_the_trainers_own_resume(whole, tmp_path: Path):
    shutil.copytree(whole[0] / "checkpoint-5", tmp_path / "checkpoint-5")
    trainer, _ = again(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert_same(result(trainer), whole[1])


def test_the_trainer_writes_no_optimizer(whole):
    names = {path.name for path in (whole[0] / "checkpoint-5").iterdir()}
    assert {"model.safetensors", "trainer_state.json", "forebay"} <= names
    assert not names & {"optimizer.pt", "optimizer.bin", "scheduler.pt"}


def test_a_checkpoint_whose_save_is_not_complete_is_passed_over(whole, tmp_path: Path):
    for step in (5, 6, 7):
        shutil.copytree(whole[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    shutil.rmtree(tmp_path / "checkpoint-7" / "forebay")
    for manifest in (tmp_path / "checkpoint-6" / "forebay").rglob("*.json"):
        manifest.unlink()
    trainer, _ = again(tmp_path)
    with pytest.raises(forebay.CheckpointError, match=r"use callback.resume\(trainer\).*checkpoint-7"):
        trainer.train(resume_from_checkpoint=True)
    trainer, callback = again(tmp_path)
    with pytest.raises(forebay.CheckpointError, match=r"absent or not complete.*checkpoint-6"):
        callback.resume(trainer, tmp_path / "checkpoint-6")
    callback.resume(trainer)
    assert_same(result(trainer), whole[1])


def test_no_complete_checkpoint_is_an_error(whole, tmp_path: Path):
    trainer, callback = again(tmp_path)
    with pytest.raises(forebay.CheckpointError, match="it has no checkpoint"):
        callback.resume(trainer)
    shutil.copytree(whole[0] / "checkpoint-3", tmp_path / "checkpoint-3")
    shutil.rmtree(tmp_path / "checkpoint-3" / "forebay")
    with pytest.raises(forebay.CheckpointError, match="it has checkpoint-3"):
        callback.resume(trainer)


def test_a_checkpoint_with_the_trainers_own_optimizer(tmp_path: Path, whole):
    trainer, callback = make(tmp_path, save_steps=5)
    trainer.remove_callback(callback)
    attach(trainer)
    trainer.train()
    trainer, _ = again(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same(result(trainer), whole[1])


def test_old_checkpoints_are_removed_when_the_next_one_is_complete(tmp_path: Path):
    trainer, callback = make(tmp_path, save_total_limit=2)
    trainer.train()
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert kept == ["checkpoint-7", "checkpoint-8"]
    expected = result(trainer)
    shutil.rmtree(tmp_path / "checkpoint-8")
    trainer, callback = again(tmp_path)
    callback.resume(trainer)
    assert_same(result(trainer), expected)


def adapter() -> torch.nn.Module:
    """Return a model of which only small adapters are trained."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    torch.manual_seed(3)
    return get_peft_model(tiny(), config)


def test_adapters_are_saved_without_their_base_model(tmp_path: Path):
    trainer, _ = make(tmp_path, adapter())
    trainer.train()
    expected = result(trainer)
    names: set[str] = set()
    for file in (tmp_path / "checkpoint-5" / "forebay").rglob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names |= set(tensors.keys())
    of_model = {name for name in names if name.startswith("model.")}
    assert len(of_model) == 8
    assert all("lora" in name for name in of_model)
    for step in (6, 7, 8):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    trainer, callback = again(tmp_path, adapter())
    callback.resume(trainer)
    assert_same(result(trainer), expected)


class Announces(TrainerCallback):
    """Says which step begins, so that the parent can kill this process there."""

    def on_step_begin(self, args, state, control, **_):
        """Print the number of steps so far."""
        print(f"step {state.global_step}", flush=True)


def train_in_a_process(folder: str) -> None:
    """Train in a process of its own."""
    torch.set_num_threads(1)
    trainer, _ = make(Path(folder))
    trainer.add_callback(Announces())
    trainer.train()
    (Path(folder) / "ended").touch()


def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path: Path, whole):
    command = [sys.executable, __file__, str(tmp_path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("step 6"):
                os.kill(child.pid, signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL
    assert not (tmp_path / "ended").exists()
    trainer, callback = again(tmp_path)
    callback.resume(trainer)
    assert len(logged(trainer, "loss")) == 2 * EPOCH
    assert_same(result(trainer), whole[1])


if __name__ == "__main__":
    train_in_a_process(sys.argv[1])
