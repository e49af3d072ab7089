"""The list of cases: functions that every rank of a group of processes runs together.

A case says with which numbers of processes it runs, and fails by raising on any rank. It may use the default process
group, which the worker makes for it and takes down after it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MODULES = {
    "cpu": (
        "dist_cases_ddp",
        "dist_cases_fsdp",
        "dist_cases_dtensor",
        "dist_cases_state_dict",
        "dist_cases_activations",
    ),
    "cuda": ("dist_cases_cuda",),
}
"""Where the cases are, by what the ranks need."""

_worlds: dict[Callable[[], None], tuple[int, ...]] = {}


def case(*worlds: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Run a function as a case, with each of these numbers of processes."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        _worlds[function] = worlds
        return function

    return register


def cases(kind: str, world: int) -> dict[str, Callable[[], None]]:
    """Return the cases for a number of processes, by name, in the order in which they run."""
    for module in MODULES[kind]:
        importlib.import_module(module)
    return {
        f"{function.__module__.removeprefix('dist_cases_')}-{function.__name__}": function
        for function, worlds in _worlds.items()
        if function.__module__ in MODULES[kind] and world in worlds
    }
