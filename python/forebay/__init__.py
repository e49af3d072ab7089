"""forebay keeps a GPU fed with training state that does not fit on it.

``import forebay`` does not import torch: reading a version or catching an error should not cost seconds.
What needs torch imports it when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay import errors
from forebay._core import version
from forebay.errors import (
    AsleepError,
    CheckpointError,
    DeviceError,
    Error,
    InternalError,
    OptionError,
    OutOfMemoryError,
    StorageError,
)
from forebay.measure import backends, bench_step, probe

if TYPE_CHECKING:
    from forebay import checkpoint
    from forebay.optim import AdamW
    from forebay.sleep import Sleeper

__all__ = [
    "AdamW",
    "AsleepError",
    "CheckpointError",
    "DeviceError",
    "Error",
    "InternalError",
    "OptionError",
    "OutOfMemoryError",
    "Sleeper",
    "StorageError",
    "__version__",
    "backends",
    "bench_step",
    "checkpoint",
    "errors",
    "probe",
    "version",
]

__version__ = version()


def __getattr__(name: str) -> Any:
    if name == "AdamW":
        from forebay.optim import AdamW

        return AdamW
    if name == "checkpoint":
        import importlib

        return importlib.import_module("forebay.checkpoint")
    if name == "Sleeper":
        from forebay.sleep import Sleeper

        return Sleeper
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")
