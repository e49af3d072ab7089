"""The model of ``bench/overlap.py``: random weights in the shape of Qwen2.5, and whole passes over it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

# cuBLAS gives the same bits only with a workspace of its own; it reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

# Tokens whose logits exist at the same time: 152,000 f32 for each are 0.6 GB.
LOGIT_TOKENS = 1024


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and of a sequence that it is trained on."""

    label: str
    vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    layers: int
    tied: bool
    context: int = 4096


SHAPES = {
    "3b": Shape("Qwen2.5-3B", 151_936, 2048, 16, 2, 11_008, 36, tied=True),
    "7b": Shape("Qwen2.5-7B", 152_064, 3584, 28, 4, 18_944, 28, tied=False),
    "14b": Shape("Qwen2.5-14B", 152_064, 5120, 40, 8, 13_824, 48, tied=False),
    "32b": Shape("Qwen2.5-32B", 152_064, 5120, 40, 8, 27_648, 64, tied=False),
    "small": Shape("a small Qwen2", 3000, 128, 4, 2, 688, 3, tied=True, context=32),
}


def build(shape: Shape, device: torch.device) -> Any:
    """Return the model of ``transformers`` in bf16, with its gradient checkpointing on."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if (model.lm_head.weight is model.model.embed_tokens.weight) != shape.tied:
        raise AssertionError(f"this version of transformers does not tie the embedding as asked: {shape.tied}")
    return model


class Trained(nn.Module):
    """The model with its loss. Logits are made and made again for a part of the tokens at a time."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        self.shape, self.device = shape, device
        self.causal = build(shape, device)
        self.reset()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each token from those before it."""
        hidden = self.causal.model(input_ids=tokens, use_cache=False).last_hidden_state
        hidden, wanted = hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        parts = zip(hidden.split(LOGIT_TOKENS), wanted.split(LOGIT_TOKENS), strict=True)
        losses = [checkpoint(self.loss_of, part, of, use_reentrant=False) for part, of in parts]
        return torch.stack(losses).sum() / wanted.numel()

    def loss_of(self, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the summed loss of some tokens."""
        return cross_entropy(self.causal.lm_head(hidden).float(), wanted, reduction="sum")

    @torch.no_grad()
    def reset(self) -> None:
        """Give every parameter its first value again."""
        random = torch.Generator(self.device).manual_seed(0)
        for name, parameter in self.named_parameters():
            parameter.grad = None
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02, generator=random)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)

    def tokens(self, sequences: int, context: int, seed: int = 0) -> torch.Tensor:
        """Return random tokens."""
        random = torch.Generator().manual_seed(seed)
        return torch.randint(self.shape.vocabulary, (sequences, context), generator=random).to(self.device)

    @property
    def count(self) -> int:
        """Parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def first_needed(self) -> int:
        """Parameters that the next forward needs first and whose gradient is final last: the embedding's."""
        return int(self.causal.model.embed_tokens.weight.numel())


def fingerprint(tensors: list[torch.Tensor], device: torch.device) -> int:
    """Return a sum over the bits of tensors and the places of their elements, computed on a device."""
    total, views = 0, {2: torch.int16, 4: torch.int32}
    for number, tensor in enumerate(tensors):
        bits = tensor.detach().flatten().view(views[tensor.element_size()])
        for first, part in enumerate(bits.split(1 << 24)):
            values = part.to(device).to(torch.int64)
            places = torch.arange(1, 2 * values.numel(), 2, device=device)
            total += (2 * number + 1) * (2 * first + 1) * int((values * places).sum())
    return total % (1 << 64)
