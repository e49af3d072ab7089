"""Megatron's tests of its hybrid optimizer: with forebay's, and with the checkout's own as the baseline."""

from __future__ import annotations

import os

import torch

from harness.hollow import hollow, module

OFFLOADING = "megatron.core.optimizer.cpu_offloading"


def mark_keep_in_fp32(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Mark a parameter that stays in f32 when its module is converted."""
    parameter.stays_in_fp32 = True  # type: ignore[attr-defined]
    return parameter


def convert_module_to_dtype_except_fp32_marked(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Convert all other parameters."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not getattr(parameter, "stays_in_fp32", False):
            parameter.data = parameter.data.to(dtype)
    return module


hollow("megatron", "megatron.core", "megatron.core.optimizer", "megatron.core.transformer")
module(
    "megatron.core.transformer.module",
    mark_keep_in_fp32=mark_keep_in_fp32,
    convert_module_to_dtype_except_fp32_marked=convert_module_to_dtype_except_fp32_marked,
)
if os.environ["UPSTREAM_SIDE"] == "forebay":
    from forebay.integrations.megatron import HybridDeviceOptimizer

    module(OFFLOADING, HybridDeviceOptimizer=HybridDeviceOptimizer)
