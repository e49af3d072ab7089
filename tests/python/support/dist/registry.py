"""The list of cases: functions that every rank of a group of processes runs together.

A case says with which numbers of processes it runs, and fails by raising on any rank. It may use the default process
group, which the worker makes for it and takes down after it.

Of some kinds, one group of processes runs every case with every number of ranks that it names, first the one and then
the other, the processes that are too many sitting out: what one number of ranks saved, another loads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODULES = {
    "cpu": (
        "dist_cases_ddp",
        "dist_cases_fsdp",
        "dist_cases_dtensor",
        "dist_cases_compact",
        "dist_cases_formats",
        "dist_cases_offload",
        "dist_cases_state_dict",
        "dist_cases_sleep",
        "dist_cases_activations",
    ),
    "cuda": ("dist_cases_cuda", "dist_cases_sleep_cuda"),
    "checkpoint": (
        "dist_cases_checkpoint",
        "dist_cases_native",
        "dist_cases_checkpoint_failures",
        "dist_cases_checkpoint_killed",
    ),
    "async": ("dist_cases_async", "dist_cases_async_calls", "dist_cases_async_killed"),
    "interrupts": ("dist_cases_interrupts",),
    "placed": ("dist_cases_placed",),
    "overlap": ("dist_cases_overlap",),
    "trace": ("dist_cases_trace",),
}
"""Where the cases are in the folder ``distributed``, by what the ranks need."""

RESIZED = ("checkpoint",)
"""Kinds whose cases run with one number of ranks after the other, in one group of processes."""

_worlds: dict[Callable[[], None], tuple[int, ...]] = {}
_killed: dict[Callable[[], None], tuple[int, ...]] = {}
_folder: list[Path] = []


class Case(NamedTuple):
    """A function, the number of ranks that run it together, and those that are dead at its end."""

    function: Callable[[], None]
    ranks: int
    killed: tuple[int, ...]


class SurvivedError(Exception):
    """Ends a case well on the ranks that survive it: another rank is dead, so that they cannot meet any more."""


def shared_folder() -> Path:
    """Return the folder that all ranks of this group of processes see, in all cases."""
    return _folder[0]


def set_shared_folder(folder: Path) -> None:
    """Say where the folder is; the worker does."""
    _folder[:] = [folder]


def case(*worlds: int, killed: tuple[int, ...] = ()) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Run a function as a case, with each of these numbers of processes; say which ranks do not see its end."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        _worlds[function], _killed[function] = worlds, killed
        return function

    return register


def cases(kind: str, world: int) -> dict[str, Case]:
    """Return the cases for a number of processes, by name, in the order in which they run."""
    for module in MODULES[kind]:
        importlib.import_module(f"distributed.{module}")
    found = {}
    for function, worlds in _worlds.items():
        module = function.__module__.removeprefix("distributed.")
        if module not in MODULES[kind]:
            continue
        name = f"{module.removeprefix('dist_cases_')}-{function.__name__}"
        if kind in RESIZED:
            for ranks in worlds:
                found[f"{name}-{ranks}"] = Case(function, ranks, _killed[function])
        elif world in worlds:
            found[name] = Case(function, world, _killed[function])
    return found
