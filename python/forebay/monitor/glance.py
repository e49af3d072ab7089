"""What can be read of each object without waiting for it.

Everything here reads attributes of Python, or counters of the engine that take no lock. ``stats()`` of an object knows
more, but waits for its copies. So no method of an object is called that could wait, and torch is not imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay._registry import registered

if TYPE_CHECKING:
    from forebay.monitor.schema import (
        ActivationFigures,
        OptimizerFigures,
        OverlapFigures,
        SaveFigures,
        SleeperFigures,
        UnitsFigures,
    )


def _named(one: Any, number: int) -> str:
    return f"{type(one).__name__} {number}"


def _with_rule() -> list[tuple[int, Any]]:
    # One that `restore` has made torch's again has no options of forebay any more.
    return [(number, one) for number, one in registered("optimizer") if "_options" in vars(one)]


def optimizers() -> list[OptimizerFigures]:
    """Return the optimizers that have an update rule of forebay."""
    return [
        {
            "name": _named(one, number),
            "device": str(one._compute),
            "placement": one._options.placement,
            "parameters": sum(len(group["params"]) for group in list(vars(one).get("param_groups", ()))),
            "pinned_bytes": 0 if one._engine is None else one._engine.pinned_bytes(),
            "step_s": one._step_s,
            "overlapped": one._overlap is not None,
        }
        for number, one in _with_rule()
    ]


def units() -> list[UnitsFigures]:
    """Return the optimizers that run in units."""
    found: list[UnitsFigures] = []
    for number, one in registered("optimizer"):
        of = vars(one).get("_units")
        if of is None:
            continue
        members = list(of.units)
        found.append(
            {
                "name": f"{of.label.rpartition('.')[2]} {number}",
                "device": str(of.device),
                "units": len(members),
                "pinned_bytes": sum(unit.nbytes for unit in members),
                "step_s": of._step_s,
            }
        )
    return found


def overlaps() -> list[OverlapFigures]:
    """Return the overlapped steps."""
    found = [(_named(one, number), one._overlap) for number, one in _with_rule()]
    return [
        {
            "optimizer": name,
            "steps": overlap.steps,
            "exposed_s": overlap.exposure._last.seconds,
            "exposed_total_s": overlap.exposure._total_seconds,
        }
        for name, overlap in found
        if overlap is not None
    ]


def activations() -> list[ActivationFigures]:
    """Return the handles of ``offload_activations`` that were not removed."""
    found: list[ActivationFigures] = []
    for number, handle in registered("activations"):
        layers = handle._layers
        if layers:
            pinned = sum(engine.core.pinned_bytes() for engine in list(handle._saver.engines.values()))
            found.append(
                {
                    "name": f"{type(layers[0].module).__name__} {number}",
                    "layers": len(layers),
                    "has_budget": handle._budget is not None,
                    "pinned_bytes": pinned,
                }
            )
    return found


def sleepers() -> list[SleeperFigures]:
    """Return the sleepers."""
    return [
        {
            "name": " and ".join(type(one).__name__ for one in sleeper._models.values()) or f"Sleeper {number}",
            "asleep_bytes": sum(entry.size for entry in list(sleeper._asleep._entries.values())),
            "pinned_bytes": sum(slabs.pinned_bytes() for slabs in list(sleeper._slabs.values())),
        }
        for number, sleeper in registered("sleeper")
    ]


def saves() -> list[SaveFigures]:
    """Return the saves in the background that are under way."""
    found: list[SaveFigures] = []
    for _, handle in registered("save"):
        if not handle.done():
            total = handle._moved.expected()
            found.append(
                {
                    "path": str(handle._path),
                    "seconds": handle.seconds(),
                    "written_bytes": min(handle._moved.bytes(), total),
                    "total_bytes": total,
                }
            )
    return found
