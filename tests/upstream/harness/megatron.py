"""Megatron's tests of its hybrid optimizer: with forebay's, and with the checkout's own as the baseline."""

from __future__ import annotations

import os

if os.environ["UPSTREAM_SIDE"] == "forebay":
    pytest_plugins = ("megatron_shim",)
else:
    from megatron_shim import MODULE

    from harness.hollow import hollow, module

    hollow("megatron", "megatron.core", "megatron.core.optimizer", "megatron.core.transformer")
    exec(MODULE, vars(module("megatron.core.transformer.module")))
