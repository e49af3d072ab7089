"""Progress bars: drawn by tqdm, only where somebody looks at them, and never by a rank above 0."""

from __future__ import annotations

import io
import threading
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

import forebay
from forebay import _progress, checkpoint
from forebay.errors import OptionError
from support.processes import python_in_silence
from support.tensors import assert_same

if TYPE_CHECKING:
    from collections.abc import Iterator


class Terminal(io.StringIO):
    """A terminal that keeps what was written."""

    def isatty(self) -> bool:
        """Whether it is one."""
        return True


@contextmanager
def on_terminal(delay_s: float = 0.0) -> Iterator[Terminal]:
    """Make standard error a terminal. No fixture could: pytest sets it again before each test."""
    with redirect_stderr(Terminal()) as shown, mock.patch.object(_progress, "DELAY_S", delay_s):
        try:
            yield shown
        finally:
            forebay.progress(None)


def model() -> torch.nn.Linear:
    torch.manual_seed(5)
    return torch.nn.Linear(64, 64)


def save_and_load(folder: Path) -> dict[str, torch.Tensor]:
    """Pin, save, check, export and load; return the state at the end."""
    first, second = model(), torch.nn.Linear(64, 64)
    optimizer, other = forebay.AdamW(first.parameters()), forebay.AdamW(second.parameters())
    optimizer.prepare()
    first(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    checkpoint.save(folder, first, optimizer)
    checkpoint.verify(folder)
    checkpoint.export_weights(folder, folder / "weights.safetensors")
    checkpoint.load(folder, second, other)
    return {f"{i}.{name}": value.clone() for i, one in enumerate(other.state.values()) for name, value in one.items()}


def test_bars_are_drawn_on_a_terminal_and_cleared(tmp_path: Path) -> None:
    with on_terminal() as terminal:
        save_and_load(tmp_path / "run")
    text = terminal.getvalue()
    for what in ("pinning optimizer state", "saving run", "verifying", "exporting", "loading run/"):
        assert f"\r{what}" in text, what
    assert "%|" in text, "tqdm has drawn them"
    assert text.rpartition("\r")[2] == "", "nothing is left on the line"
    assert threads() == []


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "forebay-progress"]


def test_a_bar_follows_its_counter() -> None:
    seen = threading.Event()
    counts = iter([100, 250, 400, 1000])

    def done() -> int:
        count = next(counts, None)
        if count is None:
            seen.set()
        return count or 1000

    with on_terminal() as terminal, _progress.watch("moving", 1000, done):
        assert seen.wait(50)
    text = terminal.getvalue()
    places = [text.index(share) for share in (" 10%", " 25%", " 40%", "100%")]
    assert places == sorted(places)


def test_work_without_a_total_shows_its_time() -> None:
    with on_terminal() as terminal, _progress.watch("planning activations", None, lambda: 0):
        pass
    assert "planning activations 00:00" in terminal.getvalue()


def test_bars_change_no_bit(tmp_path: Path) -> None:
    with on_terminal() as terminal:
        shown = save_and_load(tmp_path / "a")
    assert terminal.getvalue()
    with on_terminal() as terminal:
        forebay.progress(False)
        assert_same(save_and_load(tmp_path / "b"), shown)
    assert terminal.getvalue() == ""


def test_an_error_ends_the_bar() -> None:
    with on_terminal() as terminal, pytest.raises(ValueError, match="broke"), _progress.bar("saving", 10):
        raise ValueError("broke")
    assert "saving" in terminal.getvalue()
    assert terminal.getvalue().rpartition("\r")[2] == ""
    assert threads() == []


def test_short_work_has_no_bar(tmp_path: Path) -> None:
    with on_terminal(delay_s=50.0) as terminal:
        save_and_load(tmp_path)
    assert terminal.getvalue() == ""


def test_other_ranks_draw_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with on_terminal() as terminal:
        save_and_load(tmp_path / "a")
        forebay.progress(True)
        save_and_load(tmp_path / "b")
    assert terminal.getvalue() == ""


def test_where_there_is_no_terminal_nothing_is_drawn_or_imported(tmp_path: Path) -> None:
    code = """
import sys, torch, forebay
from forebay import _progress, checkpoint
_progress.DELAY_S = 0.0
model = torch.nn.Linear(64, 64)
optimizer = forebay.AdamW(model.parameters())
optimizer.prepare()
checkpoint.save(sys.argv[1], model, optimizer)
print("tqdm.auto" in sys.modules)
"""
    assert python_in_silence(code, tmp_path, timeout=100).strip() == "False"


def test_a_switch_draws_them_anywhere(tmp_path: Path) -> None:
    forebay.progress(True)
    try:
        with redirect_stderr(io.StringIO()) as shown:
            checkpoint.save(tmp_path, model())
    finally:
        forebay.progress(None)
    assert "saving" in shown.getvalue()
    for wrong in ("yes", 2, []):
        with pytest.raises(OptionError, match=r"invalid enabled: .*; use True, False or None"):
            forebay.progress(wrong)  # type: ignore[arg-type]
