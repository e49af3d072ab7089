"""forebay keeps a GPU fed with training state that does not fit on it.

``import forebay`` does not import torch, so that reading a version or catching an error does not take seconds. Names
that need torch import it at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay import errors, optim
from forebay._core import open_through_torch, version
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
    from forebay.activations import ActivationOffload, offload_activations, save_on_host
    from forebay.moving import move
    from forebay.optim import *  # noqa: F403
    from forebay.optim.offload import offload, restore
    from forebay.optim.overlap import OverlappedStep, overlap_step
    from forebay.sleep import Sleeper
    from forebay.tracing import trace

__all__ = [
    "ActivationOffload",
    "AsleepError",
    "CheckpointError",
    "DeviceError",
    "Error",
    "InternalError",
    "OptionError",
    "OutOfMemoryError",
    "OverlappedStep",
    "Sleeper",
    "StorageError",
    "__version__",
    "backends",
    "bench_step",
    "checkpoint",
    "errors",
    "move",
    "offload",
    "offload_activations",
    "optim",
    "overlap_step",
    "probe",
    "restore",
    "save_on_host",
    "trace",
    "version",
]

__all__ += optim.__all__

__version__ = version()

open_through_torch()


def __dir__() -> list[str]:
    """List all names, those that are not imported yet too."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in optim.__all__:
        return getattr(optim, name)
    if name == "checkpoint":
        import importlib

        return importlib.import_module("forebay.checkpoint")
    if name in ("offload", "restore"):
        from forebay.optim import offload as module

        return getattr(module, name)
    if name in ("OverlappedStep", "overlap_step"):
        from forebay.optim import overlap

        return getattr(overlap, name)
    if name == "move":
        from forebay.moving import move

        return move
    if name == "trace":
        from forebay.tracing import trace

        return trace
    if name == "Sleeper":
        from forebay.sleep import Sleeper

        return Sleeper
    if name in ("ActivationOffload", "offload_activations", "save_on_host"):
        from forebay import activations

        return getattr(activations, name)
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")
