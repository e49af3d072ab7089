"""
The compiled part of forebay.
"""

from typing import Any

__all__ = ["_errors_for_test", "_gil_is_released_for_test", "_panic_for_test", "version"]

def _errors_for_test() -> list[tuple[str, Any]]:
    """
    Every error of the engine by the name of its variant, with the exception that it becomes.

    Byte counts are 3 requested, 2 available, 5 in all; errno is 12.
    """

def _gil_is_released_for_test() -> bool:
    """
    Whether another thread can take the GIL while the guard runs.
    """

def _panic_for_test(message: str) -> None:
    """
    Panic inside the guard; it must arrive as an InternalError.
    """

def version() -> str:
    """
    The version of the extension module, which is the version of the package.
    """
