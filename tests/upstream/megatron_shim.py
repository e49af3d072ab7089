"""A package ``megatron`` with the names that ``test_optimizer_cpu_offloading.py`` of Megatron-LM imports.

The hybrid optimizer in it is forebay's. The rest of Megatron is not needed, so the file runs on a machine without it:

- ``write(folder)`` writes the package; put the folder first on ``PYTHONPATH``;
- or give pytest ``-p megatron_shim``: the package lives in a temporary folder until the end of the run.
"""

from __future__ import annotations

import atexit
import sys
import tempfile
from pathlib import Path

HYBRID = '''"""forebay's hybrid optimizer under Megatron's name."""

from forebay.integrations.megatron import HybridDeviceOptimizer as HybridDeviceOptimizer
'''

MODULE = '''"""Parameters that stay in f32 when a module is converted."""

import torch


def mark_keep_in_fp32(parameter):
    parameter.stays_in_fp32 = True
    return parameter


def convert_module_to_dtype_except_fp32_marked(module, dtype):
    for parameter in module.parameters():
        if parameter.is_floating_point() and not getattr(parameter, "stays_in_fp32", False):
            parameter.data = parameter.data.to(dtype)
    return module
'''

FILES = {
    "megatron/__init__.py": "",
    "megatron/core/__init__.py": "",
    "megatron/core/optimizer/__init__.py": "",
    "megatron/core/optimizer/cpu_offloading/__init__.py": HYBRID,
    "megatron/core/transformer/__init__.py": "",
    "megatron/core/transformer/module.py": MODULE,
}


def write(folder: Path) -> Path:
    """Write the package into a folder and return the folder."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def pytest_configure() -> None:
    """Put the package in front of an installed Megatron for this run."""
    made = tempfile.TemporaryDirectory(prefix="megatron-")
    atexit.register(made.cleanup)
    sys.path.insert(0, str(write(Path(made.name))))
