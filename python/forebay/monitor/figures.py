"""``stats``: the live figures of the whole process as one dict."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, cast

from forebay import _core
from forebay._rank import rank
from forebay._registry import seconds as seconds_so_far
from forebay.errors import OptionError
from forebay.monitor import glance
from forebay.monitor.schema import SCHEMA

if TYPE_CHECKING:
    from forebay.monitor.schema import Stall, Stalls, Stats, Uses

_version = _core.version()


def stats(since: Stats | None = None) -> Stats:
    """Return the live figures of this process. Waits for nothing, and may be called from any thread.

    Everything that can be written as JSON. Byte counts and stalls are sums since the process began; ``wire`` has mean
    rates. Objects that were collected, and those of a parent process, are not listed. torch is not imported.

    Parameters
    ----------
    since
        What an earlier call returned: the rates of ``wire`` are then those between both calls. By default they are
        those since forebay was imported.
    """
    if since is not None and (not isinstance(since, dict) or since.get("schema") != SCHEMA):
        raise OptionError(f"invalid since: {type(since).__name__}; give what an earlier call of forebay.stats returned")
    totals = _core.totals()
    elapsed_s = seconds_so_far()
    units = glance.units()
    pinned = dict(totals["pinned_bytes"])
    # Their memory belongs to tensors, which the engine no longer counts.
    pinned["optimizer"] += sum(one["pinned_bytes"] for one in units)
    fetched, stored = _with_total(totals["fetched_bytes"]), _with_total(totals["stored_bytes"])
    over_s = elapsed_s - (0.0 if since is None else since["seconds"])
    before_in, before_out = (
        (0, 0) if since is None else (since["fetched_bytes"]["total"], since["stored_bytes"]["total"])
    )
    return {
        "schema": SCHEMA,
        "version": _version,
        "pid": os.getpid(),
        "rank": rank(),
        "unix_s": time.time(),
        "seconds": elapsed_s,
        "optimizers": glance.optimizers(),
        "units": units,
        "overlaps": glance.overlaps(),
        "activations": glance.activations(),
        "sleepers": glance.sleepers(),
        "saves": glance.saves(),
        "pinned_bytes": _with_total(pinned),
        "ring_bytes": totals["ring_bytes"]["total"],
        "fetched_bytes": fetched,
        "stored_bytes": stored,
        "wire": {
            "fetch_gbps": _rate(fetched["total"] - before_in, over_s),
            "store_gbps": _rate(stored["total"] - before_out, over_s),
            "seconds": over_s,
        },
        "stalls": _stalls(totals["waits"], totals["wait_ns"]),
    }


def scalars(record: Stats) -> dict[str, float | int]:
    """Return the numbers of a record by name, for tools that draw curves.

    Names are those of the fields, joined with ``/``: ``pinned_bytes/total``, ``wire/fetch_gbps``,
    ``stalls/slot/count``. Of lists it is how many there are.
    """
    found: dict[str, float | int] = {"ring_bytes": record["ring_bytes"]}
    for name in ("optimizers", "units", "overlaps", "activations", "sleepers", "saves"):
        found[name] = len(cast("dict[str, list[Any]]", record)[name])
    found["step_s"] = sum(one["step_s"] for one in (*record["optimizers"], *record["units"]))
    found["exposed_s"] = sum(one["exposed_s"] for one in record["overlaps"])
    found["asleep_bytes"] = sum(one["asleep_bytes"] for one in record["sleepers"])
    for name in ("pinned_bytes", "fetched_bytes", "stored_bytes", "wire", "stalls"):
        _flatten(name, cast("dict[str, Any]", record)[name], found)
    return found


def _flatten(name: str, value: Any, found: dict[str, float | int]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{name}/{key}", inner, found)
    else:
        found[name] = value


def _with_total(by_use: dict[str, int]) -> Uses:
    return cast("Uses", {**by_use, "total": sum(by_use.values())})


def _rate(moved: int, over_s: float) -> float:
    return moved / over_s / 1e9 if over_s > 0 else 0.0


def _stalls(waits: dict[str, int], wait_ns: dict[str, int]) -> Stalls:
    found: dict[str, Stall] = {name: {"count": waits[name], "seconds": wait_ns[name] / 1e9} for name in waits}
    found["total"] = {"count": sum(waits.values()), "seconds": sum(wait_ns.values()) / 1e9}
    return cast("Stalls", found)
