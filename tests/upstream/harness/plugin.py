"""The pytest plugin of every run: chooses the optimizers, and writes a line of JSON for each test.

``UPSTREAM_SIDE`` is ``forebay`` or ``torch``. ``UPSTREAM_THROUGH`` is how forebay gets in: by ``class`` or ``offload``.
``UPSTREAM_REPLACES`` is empty if the suite does that itself. ``UPSTREAM_RESULTS`` is the file of results. Processes
that a test starts inherit all of them, so that their optimizers are replaced and counted too.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from harness import swap

SIDE = os.environ["UPSTREAM_SIDE"]
THROUGH = os.environ["UPSTREAM_THROUGH"]
RESULTS = os.environ["UPSTREAM_RESULTS"]

swap.count(SIDE)
if SIDE == "forebay" and os.environ["UPSTREAM_REPLACES"]:
    {"class": swap.replace_classes, "offload": swap.offload_objects}[THROUGH]()

RANK = {"passed": 0, "skipped": 1, "failed": 2}
reports: dict[str, dict[str, str]] = {}
"""The worst outcome of each test so far, and its reason."""


def write(line: dict[str, Any]) -> None:
    """Add a line to the results."""
    # One write of a short line: those of several processes do not mix.
    with open(RESULTS, "a", encoding="utf-8") as file:
        file.write(json.dumps({"pid": os.getpid(), **line}) + "\n")


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the line that says most: of a traceback the error, of a skipped test why."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(report.longrepr if crash is None else crash.message).strip().splitlines()
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[0 if crash is not None else -1]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    found = reports.setdefault(report.nodeid, {"outcome": "passed", "reason": ""})
    if RANK[report.outcome] > RANK[found["outcome"]]:
        found.update(outcome=report.outcome, reason=getattr(report, "wasxfail", "") or reason(report))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = Counter(swap.counts)
    write({"began": item.nodeid})
    try:
        return (yield)
    finally:
        found = reports.get(item.nodeid, {"outcome": "failed", "reason": "the test did not end"})
        write({"test": item.nodeid, **found, "counts": swap.counts - before})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        write({"test": report.nodeid, "outcome": "failed", "reason": reason(report), "counts": {}})
