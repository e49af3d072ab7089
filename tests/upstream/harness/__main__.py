"""The command: ``scripts/upstream.sh SUITE [FOLDER]``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from harness.report import as_json, print_report, verdict, write_json
from harness.runs import HERE, run
from harness.suites import SUITES, Suite


def main() -> int:
    """Run what the command line asks for; 0 if forebay does as the baseline, 1 if not, 2 if it cannot run here."""
    parser = argparse.ArgumentParser(
        prog="scripts/upstream.sh",
        description="Run a project's own test files against forebay, and again with torch's optimizers.",
        epilog="suites: " + "; ".join(f"{suite.name} ({suite.about})" for suite in SUITES.values()),
    )
    parser.add_argument("suite", choices=SUITES, metavar="SUITE")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="a checkout of the project")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the files with torch's optimizers")
    parser.add_argument(
        "--through",
        choices=("class", "offload"),
        default="class",
        help="how forebay gets in: its classes under torch's names, or forebay.offload of each optimizer",
    )
    parser.add_argument("--on-cpu", action="store_true", help="run a suite for GPUs with cuda taken for the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write what pytest printed")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="of each run; 1800 by default")
    parser.add_argument("--keyword", default="", metavar="WORDS", help="only tests that match, as pytest's -k")
    asked = parser.parse_args()
    suite = SUITES[asked.suite]
    trouble = refusal(suite, asked.folder, on_cpu=asked.on_cpu)
    if trouble:
        print(f"error: {trouble}", file=sys.stderr)
        return 2
    folder = asked.folder.resolve() if suite.needs_folder else HERE
    sides = ["forebay", "torch"] if suite.has_baseline and not asked.no_baseline else ["forebay"]
    runs = [
        run(suite, side, folder, through=asked.through, on_cpu=asked.on_cpu, words=asked.keyword, limit_s=asked.limit)
        for side in sides
    ]
    ours, theirs = runs[0], runs[1] if len(runs) > 1 else None
    print_report(suite, ours, theirs)
    if asked.log:
        asked.log.write_text("\n".join(one.log for one in runs), encoding="utf-8")
    if asked.json:
        write_json(asked.json, as_json(suite, folder, ours, theirs))
    return 1 if verdict(suite, ours, theirs) else 0


def refusal(suite: Suite, folder: Path | None, *, on_cpu: bool) -> str:
    """Return why a suite cannot run here; nothing if it can."""
    if suite.needs_folder:
        if folder is None:
            return f"suite {suite.name} needs the folder of a checkout; its files are not in this repository"
        repository = HERE.parents[1]
        if folder.resolve().is_relative_to(repository):
            return f"the folder must be outside of this repository: {folder}"
        absent = [file for file in suite.files if not (folder / file.partition("::")[0]).is_file()]
        if absent:
            return f"{folder} does not have {', '.join(absent)}; check out a version that has"
    elif folder is not None:
        return f"suite {suite.name} takes no folder"
    missing = [name for name in suite.packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"suite {suite.name} needs packages that are not installed; run: pip install {' '.join(missing)}"
    if suite.needs_gpu and not on_cpu:
        import torch

        if not torch.cuda.is_available():
            return f"suite {suite.name} needs a GPU, and torch finds none; --on-cpu runs what can run without one"
    return ""


if __name__ == "__main__":
    sys.exit(main())
