"""forebay keeps a GPU fed with training state that does not fit on it.

``import forebay`` does not import torch: reading a version or catching an error should not cost seconds.
What needs torch imports it when it is used.
"""

from forebay import errors
from forebay._core import version
from forebay.errors import (
    DeviceError,
    Error,
    InternalError,
    OptionError,
    OutOfMemoryError,
    StorageError,
)

__all__ = [
    "DeviceError",
    "Error",
    "InternalError",
    "OptionError",
    "OutOfMemoryError",
    "StorageError",
    "__version__",
    "errors",
    "version",
]

__version__ = version()
