"""One run of a suite's files in a process of its own, and what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.suites import Suite

HERE = Path(__file__).resolve().parents[1]


@dataclass
class Test:
    """The result of one test."""

    outcome: str
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Run:
    """The results of all tests of a suite with one side's optimizers."""

    side: str
    tests: dict[str, Test]
    counts: Counter[str]
    trouble: str = ""
    """Why there are no more results, if the process ended before it should."""
    log: str = ""

    def names(self, outcome: str) -> list[str]:
        """Return the tests with this outcome, in the order in which they ran."""
        return [name for name, test in self.tests.items() if test.outcome == outcome]


def run(suite: Suite, side: str, folder: Path, *, through: str, on_cpu: bool, words: str, limit_s: float) -> Run:
    """Run a suite's files and return what came of each test.

    Parameters
    ----------
    suite, side, folder
        The files, whose optimizers they use, and where the files are.
    through
        How forebay gets in: ``class`` or ``offload``.
    on_cpu
        Whether to run tests for GPUs without one.
    words
        Which tests, as pytest's ``-k``.
    limit_s
        The most seconds that the run may take.
    """
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch:
        results = Path(scratch) / "results.jsonl"
        results.touch()
        plugins = ("harness.on_cpu",) if on_cpu and suite.pretends else ()
        # Given by the environment, so that a test that starts pytest again has the plugin there too.
        loaded = " ".join(f"-p {name}" for name in ("harness.plugin", *plugins, *suite.plugins))
        paths = [*(str(folder / path) for path in suite.paths), str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTEST_ADDOPTS": f"-p no:cacheprovider {loaded}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": scratch,
            "UPSTREAM_RESULTS": str(results),
            "UPSTREAM_SIDE": side,
            "UPSTREAM_ON_CPU": "1" if on_cpu else "",
            "UPSTREAM_REPLACES": "1" if suite.replaces else "",
            "UPSTREAM_THROUGH": through,
        }
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--rootdir={folder}"]
        command += [*suite.options, *(["-k", words] if words else []), *suite.files]
        trouble, log = "", ""
        try:
            # A test may read from the terminal, and waits for an answer if there is one.
            ended = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                timeout=limit_s,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            log = ended.stdout
            # 0: all passed; 1: some failed. Anything else, a crash above all, is not a result.
            if ended.returncode not in (0, 1):
                trouble = f"pytest ended with exit code {ended.returncode}"
        except subprocess.TimeoutExpired as error:
            log = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
            trouble = f"the run took longer than {limit_s:.0f} s"
        return collect(side, results.read_text(encoding="utf-8").splitlines(), trouble, log)


def collect(side: str, lines: list[str], trouble: str, log: str) -> Run:
    """Return the results in the lines of a run's file; a test that began and did not end has failed."""
    tests: dict[str, Test] = {}
    counts: Counter[str] = Counter()
    first: int | None = None
    for line in lines:
        found: dict[str, Any] = json.loads(line)
        first = first or found["pid"]
        counts.update(found.get("counts", {}))
        if found["pid"] != first:
            # A process that a test started: the test itself reports the outcome.
            continue
        if "began" in found:
            tests[found["began"]] = Test("failed", f"the process ended during this test: {trouble}")
        else:
            tests[found["test"]] = Test(found["outcome"], found["reason"], found["counts"])
    return Run(side, tests, counts, trouble, log)
