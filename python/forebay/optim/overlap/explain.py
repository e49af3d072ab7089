"""The plan of an overlapped step as text."""

from __future__ import annotations

from typing import Any

SHOWN = 40
"""The most parts that are listed."""


def explained(stats: dict[str, float | int], plan: list[dict[str, Any]]) -> str:
    """Return what a step has done, and when, as lines of text."""
    ran = [part for part in plan if part["position"] is not None]
    early = [part for part in ran if not part["late"]]
    lines = [
        f"{len(ran)} parts were updated, {len(early)} of them in backward; {len(plan) - len(ran)} had no gradient",
        f"bytes each way: {_mib(ran)} MiB, of them {_mib(early)} MiB submitted in backward",
        f"gradients freed before the last one was final: {stats['freed_bytes'] / 2**20:.1f} MiB",
        f"readers waited {stats['exposed_s'] * 1e3:.1f} ms in {stats['waits']} waits"
        f" (at least {predicted_s(stats, ran, early) * 1e3:.1f} ms of copies were left after step())",
    ]
    if stats["waited_in_step"]:
        lines.append(f"step() waited for {stats['waited_in_step']} parameters whose modules were not called")
    if stats["speculated"]:
        lines.append(
            f"{stats['speculated']} steps so far have updated before it was known whether they clip, and"
            f" {stats['accepted']} of them did not"
        )
    lines.append("order      at ms      MiB  when      parameters")
    for part in ran[:SHOWN]:
        names = part["tensors"]
        shown = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        when = "forward" if part["late"] else "backward"
        lines.append(
            f"{part['position']:5} {part['submitted_ns'] / 1e6:10.3f} {part['bytes'] / 2**20:8.2f}  {when:8}  {shown}"
        )
    if len(ran) > SHOWN:
        lines.append(f"... and {len(ran) - SHOWN} more")
    return "\n".join(lines)


def predicted_s(stats: dict[str, float | int], ran: list[dict[str, Any]], early: list[dict[str, Any]]) -> float:
    """Return the seconds that the bytes which were left after ``step`` take at the measured pace of the copies."""
    done, busy_ns = stats.get("fetch_bytes", 0), stats.get("fetch_ns", 0)
    if not done or not busy_ns:
        return 0.0
    left = sum(part["bytes"] for part in ran) - sum(part["bytes"] for part in early)
    return float(left / done * busy_ns / 1e9)


def _mib(parts: list[dict[str, Any]]) -> str:
    return f"{sum(part['bytes'] for part in parts) / 2**20:.1f}"
