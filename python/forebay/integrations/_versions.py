"""Checks which version of a framework is installed."""

from __future__ import annotations

import re
import warnings
from importlib import metadata

from forebay.errors import OptionError


def check_version(package: str, least: str, below: str) -> str:
    """Return the installed version of a package.

    Raises if the package is absent or older than ``least``. Warns if its version is ``below`` or newer: nobody has
    tried it, and it may work.

    Parameters
    ----------
    package
        The name under which the package is installed.
    least
        The oldest version that works.
    below
        The first version that is not known.
    """
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise OptionError(f"{package} is not installed; install {package}>={least},<{below}") from error
    if _numbers(found) < _numbers(least):
        raise OptionError(f"{package} {found} is too old for forebay; install {package}>={least},<{below}")
    if _numbers(found) >= _numbers(below):
        warnings.warn(
            f"{package} {found} is newer than forebay knows; it was tried with {package}>={least},<{below}",
            stacklevel=3,
        )
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version; a suffix such as ``.dev0`` does not count."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()
