"""The types of what ``forebay.stats`` returns. ``docs/live.md`` has the same as a table.

A field may be added within a schema. A field that changes its meaning, its unit or its type makes a new one.
"""

from __future__ import annotations

from typing import TypedDict

SCHEMA = 1
"""The version of the dict, of a line of JSON and of the names of scalars."""


class OptimizerFigures(TypedDict):
    """One optimizer with an update rule of forebay."""

    name: str
    device: str
    placement: str
    parameters: int
    pinned_bytes: int
    step_s: float
    overlapped: bool


class UnitsFigures(TypedDict):
    """One optimizer that runs in units."""

    name: str
    device: str
    units: int
    pinned_bytes: int
    step_s: float


class OverlapFigures(TypedDict):
    """One ``forebay.overlap_step``."""

    optimizer: str
    steps: int
    exposed_s: float
    exposed_total_s: float


class ActivationFigures(TypedDict):
    """One ``forebay.offload_activations``."""

    name: str
    layers: int
    has_budget: bool
    pinned_bytes: int


class SleeperFigures(TypedDict):
    """One ``forebay.Sleeper``."""

    name: str
    asleep_bytes: int
    pinned_bytes: int


class SaveFigures(TypedDict):
    """One ``async_save`` under way."""

    path: str
    seconds: float
    written_bytes: int
    total_bytes: int


class Uses(TypedDict):
    """Bytes by use, and their sum."""

    optimizer: int
    activations: int
    sleep: int
    saves: int
    total: int


class Wire(TypedDict):
    """Mean rates of both directions, and over how many seconds."""

    fetch_gbps: float
    store_gbps: float
    seconds: float


class Stall(TypedDict):
    """How often and how long something waited."""

    count: int
    seconds: float


class Stalls(TypedDict):
    """Waits by reason, and their sum."""

    slot: Stall
    save: Stall
    activation: Stall
    total: Stall


class Stats(TypedDict):
    """What ``forebay.stats`` returns. It can be written as JSON."""

    schema: int
    version: str
    pid: int
    rank: int
    unix_s: float
    seconds: float
    optimizers: list[OptimizerFigures]
    units: list[UnitsFigures]
    overlaps: list[OverlapFigures]
    activations: list[ActivationFigures]
    sleepers: list[SleeperFigures]
    saves: list[SaveFigures]
    pinned_bytes: Uses
    ring_bytes: int
    fetched_bytes: Uses
    stored_bytes: Uses
    wire: Wire
    stalls: Stalls
