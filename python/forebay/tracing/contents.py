"""What the file of a trace says besides spans: the machine, and forebay's objects with settings and figures."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core, _device
from forebay._registry import registered
from forebay.activations.handle import ActivationOffload
from forebay.optim.base import Optimizer
from forebay.sleep.sleeper import Sleeper

if TYPE_CHECKING:
    from collections.abc import Callable

Row = dict[str, Any]


@dataclass
class Contents:
    """Forebay's objects: those that ended within the trace as they were then, the others as they are at its end."""

    wire: Row | None = None
    optimizers: dict[int, Row] = field(default_factory=dict)
    overlaps: dict[int, Row] = field(default_factory=dict)
    activations: dict[int, Row] = field(default_factory=dict)
    sleepers: dict[int, Row] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    layers: dict[tuple[int, int], str] = field(default_factory=dict)

    def describe(self, thing: Any) -> None:
        """Describe an object."""
        if isinstance(thing, Optimizer):
            self._describe_optimizer(thing)
        elif isinstance(thing, ActivationOffload):
            self._describe_activations(thing)
        elif isinstance(thing, Sleeper):
            self.sleepers[thing.number] = {"name": thing.trace_name, "stats": _figures(thing.figures)}

    def collect(self, saves: list[Row]) -> Row:
        """Describe what is alive, and return everything as plain data."""
        live = [thing for kind in ("activations", "sleeper") for _, thing in registered(kind)]
        for thing in (*Optimizer.alive, *live):
            self.describe(thing)
        self._name("class", self.optimizers)
        self._name("name", self.activations)
        for owner, row in self.optimizers.items():
            self.owners[owner] = row["name"]
        for owner, row in self.overlaps.items():
            row["optimizer"] = self.owners[owner]
        for row in self.activations.values():
            for owner in row.pop("owners"):
                self.owners[owner] = row["name"]
                self.layers |= {(owner, number): layer for number, layer in enumerate(row["layers"])}
        return {
            "machine": _machine(),
            "wire": self.wire,
            "optimizers": _in_order(self.optimizers),
            "overlaps": _in_order(self.overlaps),
            "activations": _in_order(self.activations),
            "sleepers": _in_order(self.sleepers),
            "saves": saves,
        }

    def _name(self, key: str, rows: dict[int, Row]) -> None:
        """Give each row a name of its own: ``AdamW 0``."""
        counts: dict[str, int] = {}
        for number in sorted(rows):
            kind = rows[number][key]
            rows[number]["name"] = f"{kind} {counts.setdefault(kind, 0)}"
            counts[kind] += 1

    def _describe_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer._engine is None or optimizer._is_inherited():
            return
        if optimizer.is_closed and optimizer._engine.trace_owner() in self.optimizers:
            # As it was when it was closed.
            return
        owner, kind = optimizer._engine.trace_owner(), type(optimizer).__name__
        settings = {**optimizer.defaults, **dataclasses.asdict(optimizer._options)}
        self.optimizers[owner] = {
            "name": kind,
            "class": kind,
            "settings": plain(settings),
            "stats": _figures(optimizer.stats),
        }
        if optimizer._overlap is not None:
            self.overlaps[owner] = {"optimizer": kind, "stats": _figures(optimizer._overlap.stats)}

    def _describe_activations(self, handle: ActivationOffload) -> None:
        if handle.is_removed and handle.number in self.activations:
            # As it was when it was removed.
            return
        self.activations[handle.number] = {
            "name": handle.model_name,
            "settings": plain(handle.settings),
            "stats": _figures(handle.stats),
            "plan": _figures(handle.plan) or None,
            "explain": str(_figures(handle.explain) or ""),
            "layers": handle.layer_names(),
            "owners": handle.trace_owners(),
        }


def _in_order(rows: dict[int, Row]) -> list[Row]:
    return [rows[number] for number in sorted(rows)]


def _machine() -> Row:
    device = _device.default_device()
    is_gpu = _device.is_gpu(device)
    name = _device.model_name(device)
    return {
        "device": str(device),
        "name": name if is_gpu else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "host_bytes": int(_core.host_memory()[0]),
        "device_bytes": _device.total_memory(device) if is_gpu else 0,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _figures(read: Callable[[], Any]) -> Any:
    """Return figures as plain data; none of something that is closed or broken."""
    try:
        return plain(read())
    except Exception:
        # Whatever is wrong with one object, the file is written.
        return {}


def plain(value: Any) -> Any:
    """Return a value as JSON can say it; NaN and infinity are None."""
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one) for one in value]
    if isinstance(value, torch.Tensor):
        # Reading its value might wait for the device.
        return f"tensor of shape {list(value.shape)}"
    return str(value) if isinstance(value, (torch.device, torch.dtype)) else type(value).__name__
