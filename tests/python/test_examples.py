"""The programs in ``examples`` run as they stand, on the CPU, and print what they are for."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples"

SAYS = {
    "activation_budget": r"predicted",
    "async_saves": r"saved: \{'step': 3\} although \d+ steps were taken",
    "finetune_loop": r"unexpected keys: 0 missing keys: 0",
    "finetune_trainer": r"MB of state on the host",
    "fsdp_resume": r"exit code of the first run: 1\nresumed after step 4 on 1 process\n(.*\n)*step 8 on 1: loss",
    "largest_model": r"torch: +12 layers, .*\nforebay: 42 layers, .*\na step took",
    "lora": r"saved 0\.05 MB; the model has 0\.61 MB\nresumed",
    "quickstart": r"resumed after 10 steps",
    "rl_turns": r"turn 3: loss .*(.*\n)*using a model that sleeps: ",
}
"""What each program prints, as a pattern."""


def test_every_example_is_listed() -> None:
    programs = {path.stem for path in FOLDER.glob("*.py")}
    assert programs == set(SAYS)
    for page in (FOLDER / "README.md", FOLDER.parent / "docs/examples.md"):
        assert set(re.findall(r"`(\w+)\.py`", page.read_text())) == programs, page.name


@pytest.mark.parametrize("name", sorted(set(SAYS) - {"fsdp_resume"}))
@pytest.mark.filterwarnings("default")  # frameworks warn about themselves
def test_an_example_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    no_save_is_left: None,
) -> None:
    # Small, as on a laptop, wherever it runs.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert re.search(SAYS[name], capfd.readouterr().out)


def test_the_example_of_two_processes_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    program = FOLDER / "fsdp_resume.py"
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(SAYS["fsdp_resume"], done.stdout)
