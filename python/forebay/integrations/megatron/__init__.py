"""Megatron-LM: its ``HybridDeviceOptimizer``, with state and update through forebay.

``install`` puts :class:`HybridDeviceOptimizer` in the place of Megatron's, so that ``--optimizer-cpu-offload`` uses it.
The class itself needs no Megatron. ``docs/integrations/megatron.md`` has the lines that a user writes.
"""

from __future__ import annotations

from forebay.integrations.megatron.hybrid import HybridDeviceOptimizer
from forebay.integrations.megatron.patching import install, is_installed, uninstall

__all__ = ["HybridDeviceOptimizer", "install", "is_installed", "uninstall"]
