"""The harness itself, over test files that are made here: a good table must mean something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.report import differences, verdict
from harness.runs import HERE, Run, collect, run
from harness.suites import Suite

FILE = """
import os
import subprocess
import sys

import pytest
import torch

SIDE = os.environ["UPSTREAM_SIDE"]


def train(make):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = make([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer


def test_uses():
    assert type(train(torch.optim.AdamW)).__module__.startswith(SIDE)


def test_uses_in_a_process():
    if "INNER" not in os.environ:
        command = [sys.executable, "-m", "pytest", f"{__file__}::test_uses_in_a_process"]
        subprocess.run(command, check=True, env={**os.environ, "INNER": "1"})
    else:
        train(torch.optim.SGD)


def test_fails_with_forebay():
    assert SIDE == "torch"


def test_fails_with_both():
    raise OSError("no network")


def test_fails_with_both_otherwise():
    raise KeyError("one") if SIDE == "torch" else TypeError("another")


def test_skips_with_forebay():
    if SIDE == "forebay":
        pytest.skip("not today")


@pytest.mark.skipif(True, reason="never")
def test_skips():
    pass


def test_escapes():
    from torch.optim.adam import Adam

    train(Adam)
"""


def runs_of(folder: Path, text: str, sides: tuple[str, ...], through: str = "class", limit_s: float = 100) -> list[Run]:
    (folder / "test_made.py").write_text(text)
    suite = Suite("made", "made here", files=("test_made.py",))
    return [run(suite, side, folder, through=through, on_cpu=False, words="", limit_s=limit_s) for side in sides]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    ours, theirs = runs_of(tmp_path_factory.mktemp("made"), FILE, ("forebay", "torch"))
    return ours, theirs


def test_outcomes_are_counted(both: tuple[Run, Run]) -> None:
    ours, theirs = both
    assert [len(ours.names(outcome)) for outcome in ("passed", "failed", "skipped")] == [3, 3, 2]
    assert [len(theirs.names(outcome)) for outcome in ("passed", "failed", "skipped")] == [5, 2, 1]
    assert ours.tests["test_made.py::test_skips"].reason == "never"


def test_each_side_has_its_own_classes_and_steps(both: tuple[Run, Run]) -> None:
    ours, theirs = both
    assert "test_made.py::test_uses" in ours.names("passed")
    # A process that a test starts counts too.
    assert (ours.counts["made"], ours.counts["steps"]) == (2, 2)
    assert (theirs.counts["made"], theirs.counts["steps"]) == (3, 3)
    assert ours.tests["test_made.py::test_uses"].counts == {"made": 1, "steps": 1}


def test_only_the_same_failure_of_the_baseline_excuses(both: tuple[Run, Run]) -> None:
    rows = {row["test"].partition("::test_")[2]: row["baseline_fails_too"] for row in differences(*both)}
    assert rows == {
        "fails_with_forebay": False,
        "fails_with_both": True,
        "fails_with_both_otherwise": False,
        "skips_with_forebay": False,
    }
    assert "tests that fail with forebay only: 3" in verdict(SUITE, *both)


def test_steps_of_torchs_own_are_seen(both: tuple[Run, Run]) -> None:
    assert "steps of torch's own optimizers in forebay's run: 1" in verdict(SUITE, *both)


def test_through_offload(tmp_path: Path) -> None:
    (ours,) = runs_of(tmp_path, FILE, ("forebay",), through="offload")
    assert (ours.counts["made"], ours.counts["steps"], ours.counts["escaped"]) == (3, 3, 0)
    assert "test_made.py::test_uses" in ours.names("passed")


def test_a_run_without_forebay_is_no_result(tmp_path: Path) -> None:
    (ours,) = runs_of(tmp_path, "def test_nothing():\n    pass\n", ("forebay",))
    assert ours.names("passed") == ["test_made.py::test_nothing"]
    assert verdict(SUITE, ours, None) == ["forebay was not used: steps is 0"]


def test_a_crash_is_no_result(tmp_path: Path) -> None:
    text = "import os\ndef test_one():\n    pass\ndef test_two():\n    os._exit(9)\ndef test_three():\n    pass\n"
    (ours,) = runs_of(tmp_path, text, ("forebay",))
    assert ours.trouble == "pytest ended with exit code 9"
    assert ours.names("failed") == ["test_made.py::test_two"]
    assert any("exit code 9" in line for line in verdict(SUITE, ours, None))


def test_a_run_that_hangs_is_no_result(tmp_path: Path) -> None:
    (ours,) = runs_of(tmp_path, "import time\ndef test_one():\n    time.sleep(600)\n", ("torch",), limit_s=15)
    assert ours.trouble == "the run took longer than 15 s"
    assert ours.names("failed") == ["test_made.py::test_one"]


def test_a_file_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    (ours,) = runs_of(tmp_path, "import absent_package\n", ("torch",))
    assert ours.names("failed") == ["test_made.py"]
    assert "absent_package" in ours.tests["test_made.py"].reason


def test_a_test_that_did_not_run_counts() -> None:
    line = '{"pid": 1, "test": "one", "outcome": "passed", "reason": "", "counts": {"steps": 1}}'
    theirs = collect("torch", [line], "", "")
    ours = collect("forebay", [], "", "")
    assert [row["reason"] for row in differences(ours, theirs)] == ["did not run"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["accelerate"], "needs the folder of a checkout"),
        (["accelerate", "{tmp}"], "does not have tests/test_optimizer.py"),
        (["accelerate", "{here}"], "must be outside of this repository"),
        (["torch", "{tmp}"], "takes no folder"),
        (["megatron", "{tmp}"], "does not have tests/unit_tests/test_optimizer_cpu_offloading.py"),
        (["unknown"], "invalid choice"),
    ],
)
def test_what_cannot_run_is_said_at_once(arguments: list[str], said: str, tmp_path: Path) -> None:
    given = [one.format(tmp=tmp_path, here=HERE) for one in arguments]
    environment = {**os.environ, "PYTHON": sys.executable}
    script = HERE.parents[1] / "scripts" / "upstream.sh"
    ended = subprocess.run([script, *given], env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert said in ended.stderr


SUITE = Suite("made", "made here")
