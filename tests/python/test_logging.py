"""The logger ``forebay``: silent unless asked, and what it says."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

import forebay
from forebay import checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def test_it_says_what_was_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forebay")
    model = torch.nn.Linear(4, 3)
    optimizer = forebay.AdamW(model.parameters())
    optimizer.prepare()
    checkpoint.save(tmp_path, model, optimizer)
    checkpoint.async_save(tmp_path, model, optimizer).result()
    checkpoint.load(tmp_path, model, optimizer)
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.sleep()
    sleeper.wake()
    said = [record.getMessage().split(" in ")[0] for record in caplog.records if record.name == "forebay"]
    assert said == [
        "forebay.AdamW: state of 2 parameters, 15 elements, created",
        f"saved {tmp_path}",
        f"saved {tmp_path}",
        f"loaded {tmp_path}",
        "asleep: 60 bytes",
        "awake: 60 bytes",
    ]


def test_a_failed_save_is_an_error_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(forebay.Error):
        checkpoint.async_save(tmp_path / "run", torch.nn.Linear(2, 2)).result()
    # What is refused before it begins is raised at once, without a record.
    assert all(record.levelno >= logging.ERROR for record in caplog.records)


def test_it_prints_nothing_unless_asked(tmp_path: Path) -> None:
    code = (
        "import sys, torch, forebay; m = torch.nn.Linear(2, 2); o = forebay.AdamW(m.parameters()); o.prepare();"
        "forebay.checkpoint.save(sys.argv[1], m, o)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
