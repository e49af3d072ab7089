"""Calls that meet: loads and saves while a save ends, from several threads, folders and processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from async_helpers import held

import forebay
from forebay import checkpoint

if TYPE_CHECKING:
    from pathlib import Path


# Paths.


def test_a_relative_path_is_of_the_moment_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    with held():
        handle = checkpoint.async_save("run", model)
        monkeypatch.chdir("elsewhere")
    handle.result()
    assert (tmp_path / "run/00000001/manifest.json").exists()
    checkpoint.load("../run", model)
    for made in (checkpoint.Reader("x"), checkpoint.Writer("x")):
        assert made.path == tmp_path / "elsewhere/x"
        made.reset("y")
        assert made.path == tmp_path / "elsewhere/y"


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 2)
    checkpoint.save("~/run", model)
    checkpoint.load("~/run", model)
    assert (tmp_path / "run/00000001").is_dir()
    assert checkpoint.Writer("~run").path == tmp_path / "~run"


@pytest.mark.parametrize("call", [checkpoint.save, checkpoint.async_save, checkpoint.load])
def test_no_path(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(forebay.OptionError, match="invalid path: ''"):
        call("", torch.nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []
