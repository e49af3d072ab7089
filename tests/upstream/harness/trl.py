"""TRL's tests of activation offload that compare gradients, with ``forebay.save_on_host`` in place of its context."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
import trl.models.activation_offloading as offloading

from harness.swap import counts

MODEL = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"
load = transformers.AutoModelForCausalLM.from_pretrained


def from_pretrained(name: str, *args: Any, **keywords: Any) -> Any:
    """Return a small random model of the same kind: nothing is downloaded."""
    if name != MODEL:
        return load(name, *args, **keywords)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


transformers.AutoModelForCausalLM.from_pretrained = from_pretrained

if os.environ["UPSTREAM_SIDE"] == "forebay":
    import forebay

    class OffloadActivations(forebay.save_on_host):
        """Takes TRL's arguments. forebay decides about streams and pinned memory itself."""

        def __init__(
            self,
            use_pin_memory: bool = True,
            use_streams: bool = True,
            min_offload_size: int = 1024,
            max_fwd_stash_size: int = 5,
        ) -> None:
            device = "cpu" if os.environ["UPSTREAM_ON_CPU"] else "cuda"
            super().__init__(min_bytes=min_offload_size, device=device)

        def __enter__(self) -> None:
            self._before = self.stats()["stored_bytes"]
            super().__enter__()

        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            counts["stored_bytes"] += int(self.stats()["stored_bytes"] - self._before)

    offloading.OffloadActivations = OffloadActivations
