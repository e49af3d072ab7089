"""What forebay raises.

Every exception is an :class:`Error`, and the ones that have a counterpart among the built-in exceptions
are that too, so that ``except MemoryError`` works. The extension module raises these classes; the
numbers are attributes, not only text.
"""

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
    """The base of everything that forebay raises on purpose."""


class DeviceError(Error):
    """The device is absent, unfit or has failed.

    No device of that number, a driver that is too old, kernels that the driver refused, a stream that
    failed, or a device used in a forked child.
    """


class OutOfMemoryError(Error, MemoryError):
    """Device memory or the budget of pinned host memory does not suffice.

    Nothing was allocated, and what was allocated before is untouched.

    Parameters
    ----------
    message
        What was asked for, and what would help.
    requested_bytes
        The size that was asked for.
    available_bytes
        What was free at that moment.
    limit_bytes
        The whole of it: the device's capacity, the pinned budget, or the host's memory.
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
    """An option or an argument has a value that cannot work; the message names the remedy."""


class StorageError(Error, OSError):
    """The operating system refused memory or a file.

    Parameters
    ----------
    message
        The call that failed, and why.
    errno
        The system's error number, where there is one.
    """

    def __init__(self, message: str, *, errno: int | None = None) -> None:
        # One positional argument: OSError would turn two into "[Errno n] text" and drop the call's name.
        super().__init__(message)
        self.errno = errno

    def __reduce__(self) -> tuple[object, ...]:
        # `errno` is a slot of OSError's, so it is not in `__dict__`.
        return (_storage, (str(self), self.errno))


class CheckpointError(Error, ValueError):
    """A checkpoint is incomplete, damaged or another model's; the message names the file and the reason."""


class AsleepError(Error):
    """A model or an optimizer was used while what it needs sleeps; the message names the remedy."""


class InternalError(Error):
    """A defect in forebay itself: a panic in the Rust core. The message is the panic's."""


def _out_of_memory(message: str, numbers: dict[str, int]) -> OutOfMemoryError:
    return OutOfMemoryError(message, **numbers)


def _storage(message: str, errno: int | None) -> StorageError:
    return StorageError(message, errno=errno)
