"""AReaL's tests of its per-layer step, without the rest of AReaL."""

from __future__ import annotations

import os

from harness.hollow import absent, hollow

absent("colorlog")
hollow("areal", "areal.engine", "areal.infra", "areal.utils")

if os.environ["UPSTREAM_SIDE"] == "forebay":
    import areal.engine.fsdp_utils as fsdp_utils

    from harness.per_layer import Offloaded

    fsdp_utils.PerLayerOptimWrapper = Offloaded
