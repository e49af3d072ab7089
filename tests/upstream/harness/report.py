"""Compares two runs of a suite, prints a table and writes JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.runs import Run
    from harness.suites import Suite

OUTCOMES = ("passed", "failed", "skipped")


def differences(ours: Run, theirs: Run | None) -> list[dict[str, Any]]:
    """Return every test that forebay does not pass although it ran, and whether the baseline passes it.

    A test that forebay skips or does not reach, and the baseline passes, counts as failed.
    """
    rows: list[dict[str, Any]] = []
    for name, test in ours.tests.items():
        other = theirs.tests.get(name) if theirs else None
        if test.outcome == "failed":
            theirs_reason = other.reason if other is not None and other.outcome == "failed" else None
            row = {"test": name, "reason": test.reason, "baseline_reason": theirs_reason}
            rows.append(
                {**row, "baseline_fails_too": theirs_reason is not None and kind(theirs_reason) == kind(test.reason)}
            )
        elif test.outcome == "skipped" and other is not None and other.outcome == "passed":
            rows.append({"test": name, "reason": f"skipped: {test.reason}", "baseline_fails_too": False})
    if theirs:
        for name in theirs.names("passed"):
            if name not in ours.tests:
                rows.append({"test": name, "reason": "did not run", "baseline_fails_too": False})
    return rows


def kind(reason: str) -> str:
    """Return the type of error that a reason begins with: only failures of the same type are the same failure."""
    return reason.partition(":")[0]


def verdict(suite: Suite, ours: Run, theirs: Run | None) -> list[str]:
    """Return why the runs do not show that forebay does as the baseline does; nothing if they do."""
    found = [f"{run.side}: {run.trouble}" for run in (ours, theirs) if run and run.trouble]
    if not ours.tests:
        found.append("no test ran")
    elif not ours.counts[suite.counts]:
        found.append(f"forebay was not used: {suite.counts} is 0")
    if ours.counts["escaped"] and not suite.compares:
        found.append(f"steps of torch's own optimizers in forebay's run: {ours.counts['escaped']}")
    worse = [row for row in differences(ours, theirs) if not row["baseline_fails_too"]]
    if worse:
        found.append(f"tests that fail with forebay{' only' if theirs else ''}: {len(worse)}")
    return found


def print_report(suite: Suite, ours: Run, theirs: Run | None) -> None:
    """Print the table, every failure and the verdict."""
    print(f"\n{suite.name}: {suite.about}\nforebay: {suite.standing_in}")
    if theirs:
        print(f"baseline: {suite.baseline}")
    print()
    rows = [["", *OUTCOMES, "optimizers made", "steps", f"tests with {suite.counts}"]]
    for run in filter(None, (ours, theirs)):
        name = run.side if run is ours else "baseline"
        figures = [len(run.names(outcome)) for outcome in OUTCOMES]
        used = sum(bool(test.counts.get(suite.counts)) for test in run.tests.values())
        rows.append([name, *map(str, [*figures, run.counts["made"], run.counts["steps"], used])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]).rstrip())
    for row in differences(ours, theirs):
        said = "baseline fails too" if row["baseline_fails_too"] else "FOREBAY ONLY"
        print(f"\n{said if theirs else 'failed'}: {row['test']}\n    {str(row['reason'])[:300]}")
        if row.get("baseline_reason") and not row["baseline_fails_too"]:
            print(f"    baseline: {str(row['baseline_reason'])[:300]}")
    for run in filter(None, (ours, theirs)):
        if run.trouble:
            print(f"\nthe end of what pytest printed with {run.side}:", *run.log.splitlines()[-30:], sep="\n    ")
    trouble = verdict(suite, ours, theirs)
    fine = "forebay passes every test that the baseline passes" if theirs else "forebay passes every test"
    print("\n" + ("\n".join(f"error: {line}" for line in trouble) if trouble else fine))


def as_json(suite: Suite, folder: Path, ours: Run, theirs: Run | None) -> dict[str, Any]:
    """Return everything that a report is made from."""
    return {
        "suite": suite.name,
        "folder": folder.name,
        "versions": versions(suite),
        "verdict": verdict(suite, ours, theirs),
        "runs": {
            ("forebay" if run is ours else "baseline"): {
                **{outcome: len(run.names(outcome)) for outcome in OUTCOMES},
                "counts": dict(run.counts),
                "tests": {name: asdict(test) for name, test in run.tests.items()},
            }
            for run in filter(None, (ours, theirs))
        },
        "failures": differences(ours, theirs),
    }


def versions(suite: Suite) -> dict[str, str]:
    """Return the versions of torch and of the packages that a suite uses."""
    found = {}
    for name in ("torch", *suite.packages):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write a report as JSON."""
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
