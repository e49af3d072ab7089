"""The exceptions that forebay raises.

Every exception is an :class:`Error`. An exception with a built-in counterpart is a subclass of it too, so that ``except
MemoryError`` works. The extension module also raises these classes. Numbers are attributes, not only text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "AsleepError",
    "CheckpointError",
    "DeviceError",
    "Error",
    "InternalError",
    "OptionError",
    "OutOfMemoryError",
    "StorageError",
]


class Error(RuntimeError):
    """The base class of all forebay errors."""


class DeviceError(Error):
    """The device is absent or not supported, or has failed.

    For example: no device of that number, a driver that is too old, kernels that the driver does not accept, a stream
    that failed, or a device used in a forked child.
    """


class OutOfMemoryError(Error, MemoryError):
    """There is not enough device memory, or the budget of pinned host memory is too small.

    Nothing was allocated. Earlier allocations are not affected.

    Parameters
    ----------
    message
        The request, and the remedy.
    requested_bytes
        The requested size.
    available_bytes
        The free bytes at that moment.
    limit_bytes
        The total: the device's capacity, the pinned budget, or the host's memory.
    """

    requested_bytes: int
    available_bytes: int
    limit_bytes: int

    def __init__(
        self,
        message: str,
        *,
        requested_bytes: int,
        available_bytes: int,
        limit_bytes: int,
    ) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.available_bytes = available_bytes
        self.limit_bytes = limit_bytes

    def __reduce__(self) -> tuple[object, ...]:
        # The default calls the class with `args` alone, which the keyword-only numbers refuse.
        return (_out_of_memory, (str(self), self.__dict__.copy()))


class OptionError(Error, ValueError):
    """An option or an argument has an invalid value; the message names the remedy."""


class StorageError(Error, OSError):
    """The operating system refused memory or a file.

    Parameters
    ----------
    message
        The call that failed, and why.
    errno
        The system's error number, if there is one.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        # One positional argument: OSError would turn two into "[Errno n] text" and drop the call's name.
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[object, ...]:
        # `errno` is a slot of OSError, so it is not in `__dict__`.
        return (_storage, (str(self), self.errno))


class CheckpointError(Error, ValueError):
    """A checkpoint is incomplete, damaged or of another model; the message names the file and the reason.

    Parameters
    ----------
    message
        The file, and the reason.
    problems
        A pair of file and reason for each problem that ``checkpoint.verify`` found; otherwise none.
    """

    problems: tuple[tuple[str, str], ...]

    def __init__(self, message: str = "", problems: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.problems))


class AsleepError(Error):
    """A model or an optimizer was used while its tensors are asleep; the message names the remedy."""


class InternalError(Error):
    """A defect in forebay itself: a panic in the Rust core. The message is that of the panic."""


def _out_of_memory(message: str, numbers: dict[str, int]) -> OutOfMemoryError:
    return OutOfMemoryError(message, **numbers)


def _storage(message: str, errno: int | None) -> StorageError:
    return StorageError(message, errno=errno)
