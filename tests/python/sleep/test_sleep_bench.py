"""The benchmark of sleep and wake, small, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(REPOSITORY / "bench/sleep.py"), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


def test_every_row_has_numbers_or_a_reason_and_changes_no_bit(tmp_path: Path) -> None:
    if not (REPOSITORY / "bench/sleep.py").exists():
        pytest.skip("the benchmark is not beside the tests")
    path = tmp_path / "sleep.json"
    done = run("--quick", "--device", "cpu", "--repeats", "2", "--workloads", "400", "--commit", "abc", "--json", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert (found["commit"], found["device"]) == ("abc", "cpu")
    rows = {row["name"]: row for row in found["rows"]}
    assert "cannot_run" in rows.pop("memory-saver"), "it is for GPUs only"
    assert rows.keys() == {"flat", "to-cpu", "non-blocking", "forebay", "forebay-give-back", "forebay-prepared"}
    for row in rows.values():
        assert row["differing"] == 0
        assert row["sleep_percent"] == pytest.approx(100 * row["sleep_gbps"] / rows["flat"]["sleep_gbps"])
        assert row["label"] in done.stdout
    assert rows["forebay"]["stats"]["bytes"] == rows["forebay"]["bytes"]
    assert run("--rows", "fastest").returncode == 2
    assert run("--repeats", "1").returncode == 2
