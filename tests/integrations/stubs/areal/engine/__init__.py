"""Engines, imported when they are asked for; trainers import them from here at the moment of use."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = ("FSDPEngine", "FSDPPPOActor", "FSDPLMEngine")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(name)
    return getattr(importlib.import_module("areal.engine.fsdp_engine"), name)
