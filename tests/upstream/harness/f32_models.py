"""Makes the models of a suite with f32 parameters.

forebay gives bf16 parameters f32 masters. Torch's update of bf16 parameters has none and rounds after every operation,
so a comparison with it would find differences of one bf16 rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

make = transformers.AutoModelForCausalLM.from_config


def from_config(config: Any, **keywords: Any) -> Any:
    """Return the model that was asked for, in f32."""
    keywords.pop("torch_dtype", None)
    model = make(config, dtype=torch.float32, **keywords)
    # A set in newer versions of transformers; verl's functions index it.
    model._no_split_modules = sorted(model._no_split_modules)
    return model


transformers.AutoModelForCausalLM.from_config = from_config
