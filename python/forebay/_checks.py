"""Checks of options. Each returns the value, or raises an error with the option, the value and a remedy."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar, overload

from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    T = TypeVar("T")


def is_number(value: Any) -> bool:
    """Whether a value is a number, and neither a truth value nor NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


@overload
def whole(name: str, value: Any, least: int) -> int: ...
@overload
def whole(name: str, value: Any, least: int, *, optional: Literal[True]) -> int | None: ...


def whole(name: str, value: Any, least: int, *, optional: bool = False) -> int | None:
    """Check a whole number of at least ``least``; None is allowed if ``optional`` is set."""
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        extra = ", or None" if optional else ""
        raise OptionError(f"invalid {name}: {value!r}; give a whole number of at least {least}{extra}")
    return value


@overload
def share(name: str, value: Any) -> float: ...
@overload
def share(name: str, value: Any, *, auto: bool) -> float | None: ...


def share(name: str, value: Any, *, auto: bool = False) -> float | None:
    """Check a share from 0.0 to 1.0. With ``auto``, the value "auto" is allowed and gives None."""
    if auto and isinstance(value, str) and value == "auto":
        return None
    if not is_number(value) or not 0 <= value <= 1:
        extra = ", or 'auto'" if auto else ""
        raise OptionError(f"invalid {name}: {value!r}; give a number from 0.0 to 1.0{extra}")
    return float(value)


def one_of(name: str, value: T, choices: Sequence[T]) -> T:
    """Check that a value is one of the choices."""
    if value not in choices:
        raise OptionError(f"invalid {name}: {value!r}; use one of {tuple(choices)}")
    return value


def switch(name: str, value: Any, *others: str) -> bool | None:
    """Check a switch that is True, False, or None for the default. ``others`` are what the caller takes besides."""
    if value not in (None, True, False):
        named = "".join(f", {other!r}" for other in others)
        raise OptionError(f"invalid {name}: {value!r}; use True, False{named} or None")
    return None if value is None else bool(value)


def flag(name: str, value: Any) -> None:
    """Check a switch that is True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"invalid {name}: {value!r}; use True or False")


def positive(name: str, value: Any, *, without: str) -> float | None:
    """Check a number above zero. None is allowed; ``without`` says what None means."""
    if value is None:
        return None
    # Real, not float: numbers of numpy are not Python floats.
    if not isinstance(value, Real) or not float(value) > 0:
        raise OptionError(f"invalid {name}: {value!r}; give a positive number, or None {without}")
    return float(value)
