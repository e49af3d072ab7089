"""verl's tests of activation offload, without the rest of verl, flash-attn and a tokenizer on disk."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import transformers

from harness.hollow import absent, hollow, module
from harness.swap import counts

if TYPE_CHECKING:
    import pytest

ON_CPU = bool(os.environ["UPSTREAM_ON_CPU"])
DEVICE = "cpu" if ON_CPU else "cuda"
# The defaults are those of a model with 2.6e9 parameters, of which each test saves and loads all state.
SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}

absent("tensordict", "ray", "omegaconf")
hollow("verl", "verl.utils", "verl.utils.checkpoint")
module(
    "verl.utils.device",
    get_device_id=lambda: 0,
    get_device_name=lambda: DEVICE,
    get_nccl_backend=lambda: "gloo" if ON_CPU else "nccl",
    get_torch_device=lambda: getattr(torch, DEVICE),
    is_cuda_available=not ON_CPU,
    is_device_available=lambda: not ON_CPU,
    is_npu_available=False,
)
# Nothing here calls these functions.
module("verl.utils.model", check_exclude_modules=None, check_target_modules=None)

handles: list[Any] = []
"""What forebay has returned in this test."""

make = transformers.AutoModelForCausalLM.from_config


def from_config(config: Any, attn_implementation: str = "", **keywords: Any) -> Any:
    """Return the model with torch's attention."""
    model = make(config, attn_implementation="sdpa", **keywords)
    # A set in newer versions of transformers; verl's functions index it.
    model._no_split_modules = sorted(model._no_split_modules)
    return model


transformers.AutoModelForCausalLM.from_config = from_config
transformers.AutoTokenizer.from_pretrained = lambda *_, **__: SimpleNamespace(save_pretrained=lambda *_: None)


def random_input(batch: int, length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a batch without padding, one after the other, and their positions."""
    tokens = torch.randint(0, vocabulary, (1, batch * length), device=DEVICE)
    return tokens, torch.arange(length, device=DEVICE).repeat(batch).unsqueeze(0)


def pytest_runtest_teardown() -> None:
    """Count the bytes that left in a test."""
    counts["stored_bytes"] += sum(int(handle.stats()["stored_bytes"]) for handle in handles)
    handles.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the test file inputs that need no flash-attn, and a small model."""
    for item in items:
        tests: Any = item.module  # type: ignore[attr-defined]
        tests.create_random_input_ids = random_input
        tests.Qwen2Config = functools.partial(transformers.Qwen2Config, vocab_size=32000, **SMALL)


if os.environ["UPSTREAM_SIDE"] == "forebay":
    import verl.utils.activation_offload as activation_offload

    import forebay

    def enable_activation_offloading(model: torch.nn.Module, strategy: str, enable_ckpt: bool = False) -> None:
        """Do as forebay's plugin for verl does."""
        handles.append(forebay.offload_activations(model, fraction=1.0, min_bytes=0))

    activation_offload.enable_activation_offloading = enable_activation_offloading
