"""Puts our ``HybridDeviceOptimizer`` in the place of Megatron's, and takes it out again."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from forebay.errors import OptionError
from forebay.integrations._versions import _numbers
from forebay.integrations.megatron.hybrid import HybridDeviceOptimizer
from forebay.integrations.megatron.rules import OPTIONS
from forebay.integrations.megatron.writer import with_copies

if TYPE_CHECKING:
    from types import TracebackType

LEAST, BELOW = "0.16", "0.17"
NAME = "HybridDeviceOptimizer"
MODULES = (
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
    "megatron.core.optimizer.cpu_offloading",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer",
)
"""Where Megatron looks up the class."""

WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"

_replaced: list[tuple[Any, str, Any]] = []
_writer: list[tuple[Any, str, Any]] = []


class Installed:
    """Ours is in place. Leaving this context restores Megatron's class."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        uninstall()


def install(**options: Any) -> Installed:
    """Make Megatron's ``--optimizer-cpu-offload`` use forebay. Call this before Megatron makes its optimizer.

    Parameters
    ----------
    options
        Options of forebay for each optimizer made from now on: see :class:`HybridDeviceOptimizer`.

    Returns
    -------
    Installed
        A context manager, for use in a ``with`` statement: at its end Megatron's own class is back.
    """
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise TypeError(f"install() got an unexpected keyword argument {unknown[0]!r}; use one of {OPTIONS}")
    if is_installed():
        raise OptionError("forebay is installed in Megatron already; call uninstall() first")
    _check_version()
    modules = [importlib.import_module(name) for name in MODULES]
    writer = importlib.import_module(WRITER).FileSystemWriterAsync
    for module in modules:
        _put(_replaced, module, NAME, HybridDeviceOptimizer)
    if not _writer:
        _put(_writer, writer, "prepare_write_data", with_copies(writer.prepare_write_data))
    HybridDeviceOptimizer.options = options
    return Installed()


def uninstall() -> None:
    """Restore Megatron's own class. Optimizers that exist go on as they are, and can be saved."""
    HybridDeviceOptimizer.options = {}
    _restore(_replaced)
    if not HybridDeviceOptimizer.alive:
        _restore(_writer)


def is_installed() -> bool:
    """Whether Megatron uses forebay's class now."""
    return bool(_replaced)


def _put(kept: list[tuple[Any, str, Any]], owner: Any, name: str, value: Any) -> None:
    kept.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _restore(kept: list[tuple[Any, str, Any]]) -> None:
    while kept:
        setattr(*kept.pop())


def _check_version() -> None:
    """Raise if Megatron is absent or too old; warn if it is newer than the versions that were tried.

    Reads the package's own version: Megatron-LM is often used from a checkout, without being installed.
    """
    try:
        found = str(importlib.import_module("megatron.core").__version__)
    except ImportError as error:
        raise OptionError(f"megatron.core cannot be imported: {error}; install megatron-core>={LEAST}") from error
    if _numbers(found) < _numbers(LEAST):
        raise OptionError(f"megatron-core {found} is too old for forebay; install megatron-core>={LEAST}")
    if _numbers(found) >= _numbers(BELOW):
        warnings.warn(
            f"megatron-core {found} is newer than forebay knows; it was tried with megatron-core>={LEAST},<{BELOW}",
            stacklevel=3,
        )
