"""Tiny models, data and Trainers of Hugging Face, and the loop that a Trainer runs, written by hand."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import forebay
from support.accelerators import weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VOCABULARY = 64
LIMIT = 0.5
"""The norm to clip to: below the norm of every step."""


def tiny(**settings: Any) -> LlamaForCausalLM:
    """Return a model of two layers, the same one at each call."""
    set_seed(0)
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**config, **settings}))


def tokens(count: int = 16, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Return samples of random tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, VOCABULARY, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Return arguments for short runs on the CPU, whose steps are all clipped and logged."""
    given = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": LIMIT,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }
    return TrainingArguments(str(folder), **{**given, **changes})


def logged(trainer: Trainer, name: str) -> list[float]:
    """Return the values of one name in a Trainer's log."""
    return [row[name] for row in trainer.state.log_history if name in row]


def grouped(model: torch.nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Return a model's parameters in the groups that a Trainer makes: matrices decay, norms do not."""
    trained = [one for one in model.named_parameters() if one[1].requires_grad]
    return [
        {"params": [one for name, one in trained if "norm" not in name], "weight_decay": weight_decay},
        {"params": [one for name, one in trained if "norm" in name], "weight_decay": 0.0},
    ]


def batches(data: list[dict[str, torch.Tensor]], size: int, rank: int = 0, world: int = 1) -> Iterator[dict[str, Any]]:
    """Return the batches of one rank, in the order of the samples, without an end."""
    while True:
        for start in range(rank * size, len(data), size * world):
            rows = data[start : start + size]
            yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def train_by_hand(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    accumulate: int = 1,
    autocast: bool = False,
    rank: int = 0,
    world: int = 1,
) -> list[float]:
    """Train as a Trainer with :func:`arguments` does; return the norms."""
    model.train()
    norms = []
    feed = batches(tokens(), 2, rank, world)
    for _ in range(steps):
        rows = [next(feed) for _ in range(accumulate)]
        # The first token of a row is not predicted.
        count = sum(row["labels"][:, 1:].numel() for row in rows) * world
        for number, row in enumerate(rows):
            is_last = number == len(rows) - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            with model.no_sync() if hasattr(model, "no_sync") and not is_last else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model(**row, num_items_in_batch=count).loss
                # The Trainer multiplies by the number of ranks, because DDP and FSDP take the mean over them.
                (loss * world).backward()
        optimizer.step()
        if isinstance(optimizer, forebay.AdamW) and optimizer.grad_norm is not None:
            norms.append(float(optimizer.grad_norm))
        model.zero_grad()
    return norms


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a word for each token of :func:`tiny`."""
    words = {f"w{number}": number for number in range(3, VOCABULARY)}
    model = WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **words}, unk_token="<pad>")
    made = Tokenizer(model)
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def text(count: int, length: int, seed: int = 1) -> list[str]:
    """Return random texts of so many words."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, VOCABULARY, (count, length), generator=generator).tolist()
    return [" ".join(f"w{number}" for number in row) for row in rows]


class Recorder(TrainerCallback):
    """Copies the gradients that a Trainer gives to each step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        """Copy the gradients."""
        found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        self.gradients.append(found)

    def replay(self, model: torch.nn.Module, **settings: Any) -> dict[str, torch.Tensor]:
        """Take the same steps with forebay's optimizer, by hand; return the weights."""
        optimizer = forebay.AdamW(grouped(model), **settings)
        for gradients in self.gradients:
            for name, parameter in model.named_parameters():
                parameter.grad = gradients.get(name)
            optimizer.step()
        return weights(model)
