"""The statistics that ``Sleeper.stats`` reports."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from forebay._log import logger
from forebay.sleep.walk import KINDS

if TYPE_CHECKING:
    from forebay.sleep.transfer import Batch
    from forebay.sleep.walk import Left, StorageEntry


class Figures:
    """The numbers of the last sleep and the last wake."""

    def __init__(self) -> None:
        self.give_back_s = 0.0
        self.pin_s = 0.0
        self.left: list[Left] = []
        self._awake: dict[str, int] = {}
        self._sleep = _Totals()
        self._wake = _Totals()

    def begin_sleep(self) -> None:
        """Forget the last sleep."""
        self.give_back_s, self.pin_s, self.left, self._awake = 0.0, 0.0, [], {}
        self._sleep = _Totals()

    def stays(self, entry: StorageEntry) -> None:
        """Count a storage of a kind that was not asked to sleep."""
        self._awake[entry.kind] = self._awake.get(entry.kind, 0) + entry.size

    def slept(self, batch: Batch) -> None:
        """Count a batch that sleeps now."""
        self._sleep.add(batch)

    def end_sleep(self, seconds: float) -> None:
        """Set the time of the whole sleep."""
        self._sleep.seconds = seconds
        logger.info("asleep: %d bytes in %.3f s", self._sleep.size, seconds)

    def begin_wake(self) -> None:
        """Forget the last wake."""
        self._wake = _Totals()

    def woke(self, batch: Batch) -> None:
        """Count a batch that is awake now."""
        self._wake.add(batch)

    def end_wake(self, seconds: float) -> None:
        """Set the time of the whole wake."""
        self._wake.seconds = seconds
        logger.info("awake: %d bytes in %.3f s", self._wake.size, seconds)

    def report(self, asleep: dict[str, int]) -> dict[str, Any]:
        """Return all numbers; ``asleep`` has the bytes that sleep now, for each kind."""
        residual = [{"name": one.name, "kind": one.kind, "bytes": one.size, "reason": one.reason} for one in self.left]
        residual += [
            {"name": kind, "kind": kind, "bytes": size, "reason": "not asked to sleep"}
            for kind, size in self._awake.items()
        ]
        return {
            "bytes": self._sleep.size,
            "asleep_bytes": sum(asleep.values()),
            "sleep_s": self._sleep.seconds,
            "wake_s": self._wake.seconds,
            "sleep_gbps": self._sleep.rate(),
            "wake_gbps": self._wake.rate(),
            "pin_s": self.pin_s,
            "give_back_s": self.give_back_s,
            "residual_bytes": sum(one["bytes"] for one in residual),
            "residual": residual,
            "kinds": {
                kind: {
                    "bytes": self._sleep.sizes.get(kind, 0),
                    "asleep_bytes": asleep[kind],
                    "storages": self._sleep.counts.get(kind, 0),
                    "sleep_s": self._sleep.times.get(kind, 0.0),
                    "wake_s": self._wake.times.get(kind, 0.0),
                    "residual_bytes": sum(one["bytes"] for one in residual if one["kind"] == kind),
                }
                for kind in KINDS
            },
        }


class _Totals:
    """Bytes, counts and times of one sleep or wake."""

    def __init__(self) -> None:
        self.size = 0
        self.seconds = 0.0
        self.sizes: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.times: dict[str, float] = {}
        self._last = time.perf_counter()

    def add(self, batch: Batch) -> None:
        now = time.perf_counter()
        self.size += batch.size
        self.sizes[batch.kind] = self.sizes.get(batch.kind, 0) + batch.size
        self.counts[batch.kind] = self.counts.get(batch.kind, 0) + len(batch.entries)
        self.times[batch.kind] = self.times.get(batch.kind, 0.0) + now - self._last
        self._last = now

    def rate(self) -> float:
        return self.size / self.seconds / 1e9 if self.seconds and self.size else 0.0
