"""verl's tests of a per-layer step, without the rest of verl."""

from __future__ import annotations

import os

from harness.hollow import absent, hollow, module

absent("tensordict", "ray", "omegaconf")
hollow("verl", "verl.utils")
# It names classes that newer versions of transformers do not have. Nothing here calls these functions.
module("verl.utils.model", check_exclude_modules=None, check_target_modules=None)

if os.environ["UPSTREAM_SIDE"] == "forebay":
    import verl.utils.fsdp_utils as fsdp_utils

    from harness.per_layer import OffloadedOnGpu

    fsdp_utils.PerLayerGPUOptimizerStep = OffloadedOnGpu
