"""Calls that meet: loads and saves while a save ends, from several threads, folders and processes."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import forebay
from forebay import _core, checkpoint
from forebay.checkpoint import contents
from support.processes import in_child, python
from support.saves import WRITE, assert_holds, build, end_of_saves, held, train, values
from support.tensors import assert_same

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_save_is_left")


def saved(path: Path, *steps: int) -> dict[str, torch.Tensor]:
    """Save a run after some steps, with their number; return what was saved."""
    model, optimizers = build()
    train(model, optimizers, *steps)
    checkpoint.save(path, model, optimizers, extra={"steps": len(steps)})
    return values(model, optimizers)


# Loads while a save ends.


def test_a_load_has_what_this_process_was_saving(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    checkpoint.save(tmp_path, model, optimizers, extra={"steps": 1})
    train(model, optimizers, 1)
    kept = values(model, optimizers)
    with held() as gate:
        checkpoint.async_save(tmp_path, model, optimizers, extra={"steps": 2}, keep_last=1)
        train(model, optimizers, 2)
        gate.open(after_s=0.2)
        assert checkpoint.load(tmp_path, model, optimizers) == {"steps": 2}
    assert_same(values(model, optimizers), kept)


def test_a_load_is_of_one_checkpoint_though_another_process_completes_the_next(tmp_path: Path) -> None:
    first, _ = saved(tmp_path / "run", 0), saved(tmp_path / "next", 0, 1)
    extra_of = contents.extra_of

    def meanwhile(reader: Any) -> Any:
        extra = extra_of(reader)
        shutil.copytree(tmp_path / "next/00000001", tmp_path / "run/00000002")
        return extra

    with mock.patch.object(contents, "extra_of", meanwhile):
        assert_holds(tmp_path / "run", "f32", first, {"steps": 1})


def test_a_failed_save_does_not_fail_a_load_and_is_told_at_the_next_save(tmp_path: Path) -> None:
    kept = saved(tmp_path, 0)
    model, optimizers = build()
    checkpoint.async_save(tmp_path, model, optimizers, extra={"steps": object()})
    assert checkpoint.load(tmp_path, model, optimizers) == {"steps": 1}
    assert_same(values(model, optimizers), kept)
    with pytest.raises(forebay.CheckpointError, match=r"extra\.steps is a builtins\.object"):
        checkpoint.save(tmp_path, model, optimizers)


# Saves from several threads.


def test_threads_save_their_own_models_one_after_the_other(tmp_path: Path) -> None:
    models = [torch.nn.Linear(300, 300) for _ in range(3)]
    begun = [threading.Event() for _ in models]

    def write(*arguments: Any) -> Any:
        # The first ends when both others are at their calls; these give each other time to begin as well.
        begun[0].wait(10)
        for event in begun[1:]:
            event.wait(0.2)
        return WRITE(*arguments)

    def save(number: int) -> None:
        checkpoint.async_save(tmp_path / str(number), models[number])
        begun[number].set()

    with mock.patch.object(_core, "write_checkpoint", write):
        checkpoint.async_save(tmp_path / "0", models[0])
        others = [threading.Thread(target=save, args=(number,)) for number in (1, 2)]
        for thread in others:
            thread.start()
        threading.Timer(0.1, begun[0].set).start()
        for thread in others:
            thread.join(20)
        end_of_saves()
    for number, model in enumerate(models):
        twin = torch.nn.Linear(300, 300)
        checkpoint.load(tmp_path / str(number), twin)
        assert torch.equal(twin.weight, model.weight), number


def test_a_save_that_may_not_wait_does_not_wait_for_another_threads_call(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with held() as gate:
        checkpoint.async_save(tmp_path / "first", model)
        waiting = threading.Thread(target=checkpoint.async_save, args=(tmp_path / "second", model))
        waiting.start()
        with pytest.raises(forebay.CheckpointError, match="when_busy='wait'"):
            checkpoint.async_save(tmp_path / "third", model, when_busy="refuse")
        gate.open()
        waiting.join(20)


def test_a_signals_handler_may_save_while_a_save_begins(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    contents_of = contents.contents_of

    def interrupted(*arguments: Any, **named: Any) -> Any:
        # A handler runs in the main thread, between any two of its instructions.
        with mock.patch.object(contents, "contents_of", contents_of):
            checkpoint.save(tmp_path / "handler", model)
        return contents_of(*arguments, **named)

    with mock.patch.object(contents, "contents_of", interrupted):
        checkpoint.async_save(tmp_path / "run", model).result()
    assert (tmp_path / "handler/00000001/manifest.json").exists()


def test_a_forked_child_leaves_its_parents_save_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(512, 512)
    with held() as gate:

        def in_turn() -> None:
            gate.open()
            checkpoint.async_save(tmp_path / "child", model).result()

        handle = checkpoint.async_save(tmp_path / "parent", model)
        assert in_child(in_turn) == "None"
        assert not handle.done()
        gate.open()
        handle.result()
    assert (tmp_path / "child/00000001/manifest.json").exists()
    assert (tmp_path / "parent/00000001/manifest.json").exists()


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


# Words at the end.


def test_a_last_save_that_failed_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    code = """
import sys, torch
from pathlib import Path
from forebay import checkpoint
(path := Path(sys.argv[1]) / "file").touch()
checkpoint.async_save(path, torch.nn.Linear(2, 2))
"""
    done = python(code, tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith("forebay: the last checkpoint was not saved: StorageError: cannot create ")
    assert done.stderr.count("\n") == 1


def test_what_was_told_is_not_told_again_at_exit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    handle = checkpoint.async_save(tmp_path / "file", torch.nn.Linear(2, 2))
    with pytest.raises(forebay.StorageError):
        handle.result()
    checkpoint.handle.print_failures()
    assert capsys.readouterr().err == ""


def test_what_is_written_is_never_more_than_there_is(tmp_path: Path) -> None:
    handle = checkpoint.async_save(tmp_path, torch.nn.Linear(3, 5))
    handle.result()
    assert handle.progress()["written_bytes"] == handle.progress()["total_bytes"] == (3 * 5 + 5) * 4
