"""Saving to a path again and again: the last complete one counts, and what is incomplete goes."""

from __future__ import annotations

import io
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed import checkpoint as dcp

import forebay
from forebay import _core, checkpoint
from support.checkpoint import ALONE, folders, pair, snapshot, train
from support.processes import in_child
from support.tensors import assert_same

if TYPE_CHECKING:
    from pathlib import Path


def save(path: Path, number: int, **options: int) -> None:
    checkpoint.save(path, None, extra={"number": number, "tensor": torch.full((10,), number)}, **options)


def loaded(path: Path) -> int:
    extra = checkpoint.load(path, None)
    assert extra is not None
    assert extra["tensor"].tolist() == [extra["number"]] * 10
    return int(extra["number"])


def test_each_save_is_a_new_folder_and_the_last_one_counts(tmp_path: Path) -> None:
    for number in range(1, 4):
        save(tmp_path, number)
        assert loaded(tmp_path) == number
    assert folders(tmp_path) == ["00000001", "00000002", "00000003"]
    assert loaded(tmp_path / "00000002") == 2


@pytest.mark.parametrize("keep", [1, 2])
def test_keep_last(keep: int, tmp_path: Path) -> None:
    for number in range(1, 5):
        save(tmp_path, number, keep_last=keep)
        assert loaded(tmp_path) == number
        assert folders(tmp_path) == [f"{i:08}" for i in range(max(1, number - keep + 1), number + 1)]


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "2"])
def test_keep_last_has_to_be_a_number(keep: object, tmp_path: Path) -> None:
    with pytest.raises(forebay.OptionError, match="keep_last"):
        save(tmp_path, 1, keep_last=keep)  # type: ignore[arg-type]
    assert folders(tmp_path) == []


def test_the_old_ones_are_there_until_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 3):
        save(tmp_path, number)
    original = checkpoint.Writer.finish
    seen = []

    def look(self: checkpoint.Writer, **arguments: object) -> None:
        seen.append((loaded(tmp_path), folders(tmp_path), sorted(p.name for p in tmp_path.glob("*/manifest.json"))))
        original(self, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint.Writer, "finish", look)
    save(tmp_path, 3, keep_last=1)
    assert seen == [(2, ["00000001", "00000002", "00000003"], ["manifest.json"] * 2)]
    assert folders(tmp_path) == ["00000003"]


def test_a_commit_that_fails_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 3):
        save(tmp_path, number)
    original = checkpoint.Writer.finish

    def harm(self: checkpoint.Writer, **arguments: object) -> None:
        # The manifest cannot be renamed into place.
        (tmp_path / "00000003" / "manifest.json" / "in the way").mkdir(parents=True)
        original(self, **arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Writer, "finish", harm)
        with pytest.raises(forebay.StorageError, match="cannot rename"):
            save(tmp_path, 3, keep_last=1)
    assert loaded(tmp_path) == 2
    assert loaded(tmp_path / "00000001") == 1
    save(tmp_path, 4, keep_last=1)
    assert (loaded(tmp_path), len(folders(tmp_path))) == (4, 1)


def test_leftovers_are_ignored_and_the_next_save_removes_them(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name, file in (("00000002", "0-0.safetensors"), ("00000005", "manifest.json.partial")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_bytes(b"half")
    assert loaded(tmp_path) == 1
    save(tmp_path, 2)
    assert folders(tmp_path) == ["00000001", "00000006"]
    assert loaded(tmp_path) == 2


def test_a_second_save_at_the_same_time_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    first = _core.Saving(tmp_path)
    with pytest.raises(forebay.CheckpointError, match="another save to this path is running"):
        save(tmp_path, 2)
    assert in_child(lambda: save(tmp_path, 2)).startswith(f"CheckpointError: {tmp_path}: another save")
    save(tmp_path / "other", 3)
    assert (tmp_path / "00000002").is_dir()
    first.abandon()
    save(tmp_path, 4)
    assert loaded(tmp_path) == 4


def test_of_many_saves_at_once_each_is_whole_or_refused(tmp_path: Path) -> None:
    outcomes: list[str] = []

    def work(number: int) -> None:
        try:
            save(tmp_path, number)
            outcomes.append("saved")
        except forebay.CheckpointError as error:
            outcomes.append("refused" if "is running" in str(error) else str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(outcomes) <= {"saved", "refused"}
    assert len(folders(tmp_path)) == outcomes.count("saved") > 0
    for name in folders(tmp_path):
        loaded(tmp_path / name)


def test_a_save_that_failed_lets_the_next_one_through(tmp_path: Path) -> None:
    with pytest.raises(forebay.CheckpointError):
        checkpoint.save(tmp_path, None, extra={"bad": object()})
    save(tmp_path, 1)
    assert loaded(tmp_path) == 1


def test_a_checkpoints_own_folder_is_no_path_to_save_to(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(forebay.CheckpointError, match="it is a checkpoint itself"):
        save(tmp_path / "00000001", 2)
    assert loaded(tmp_path / "00000001") == 1


def test_a_path_with_odd_characters(tmp_path: Path) -> None:
    path = tmp_path / "a b" / "ü%s {0}\n"
    save(path, 1)
    assert loaded(path) == 1
    assert checkpoint.load(str(path), None) is not None


# The progress bar.


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        """Say so."""
        return True


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_bar_may_be_asked_for_and_declined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shown, terminal in ((True, False), (False, True)):
        screen = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr(sys, "stderr", screen)
        writer = checkpoint.Writer(tmp_path, progress=shown)
        dcp.save({"w": torch.ones(3)}, storage_writer=writer, **ALONE)
        assert bool(screen.getvalue()) == shown


def test_an_interrupted_load_is_distrusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair()
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path, model, optimizer)
    kept = snapshot(model, optimizer)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Reader, "_read_staged", interrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.load(tmp_path, model, optimizer)
    with pytest.raises(forebay.CheckpointError, match="KeyboardInterrupt"):
        train(model, optimizer, range(1))
    checkpoint.load(tmp_path, model, optimizer)
    assert_same(kept, snapshot(model, optimizer))
