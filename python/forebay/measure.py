"""Measurements of this machine, and of forebay on it. The work is done by the crate ``forebay-bench``."""

from __future__ import annotations

import json
from typing import Any

from forebay import _core


def backends() -> dict[str, Any]:
    """Return the devices that can be used, and why others cannot be used.

    Returns
    -------
    dict
        ``devices``, a list of names for ``probe``, and ``problems``, the reason for each backend that does not work on
        this machine.
    """
    devices, problems = _core.backends()
    return {"devices": devices, "problems": dict(problems)}


def probe(device: str | None = None) -> dict[str, Any]:
    """Measure copies, pinning, host memory and the kernel, as ``forebay probe --json`` does.

    Parameters
    ----------
    device
        ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; by default the first GPU, or the CPU if there is no GPU.
    """
    result: dict[str, Any] = json.loads(_core.probe(device))
    return result


def bench_step(
    device: str | None = None,
    *,
    params: int = 40_000_000,
    slots: int = 4,
    chunk_bytes: int = 16 << 20,
    steps: int = 5,
) -> dict[str, Any]:
    """Run the streamed step over synthetic parameters, as ``forebay bench step --json`` does."""
    result: dict[str, Any] = json.loads(_core.bench_step(device, params, slots, chunk_bytes, steps))
    return result
