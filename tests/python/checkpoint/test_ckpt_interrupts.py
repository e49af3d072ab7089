"""Ctrl-C and ``SystemExit`` in saves and loads come out as themselves, and nothing half-done is taken for done."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import forebay
from forebay import checkpoint
from forebay.checkpoint import contents, handle, interrupts
from forebay.checkpoint import snapshot as _snapshot
from support import saves
from support.checkpoint import folders, pair, snapshot, train
from support.tensors import assert_same

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_save_is_left")

every_interrupt = pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(3)], ids=["ctrl-c", "exit"])


def interrupting(target: Any, name: str, interrupt: BaseException, *, after: bool = False) -> Any:
    """Return a patch that interrupts before or after a function."""
    original = getattr(target, name)

    def patched(*arguments: Any, **named: Any) -> Any:
        if after:
            original(*arguments, **named)
        raise interrupt

    return mock.patch.object(target, name, patched)


def press() -> None:
    """Press Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


SAVES = [
    (handle, "take_turn"),
    (contents, "contents_to_save"),
    (checkpoint.Writer, "prepare_local_plan"),
    (checkpoint.Writer, "prepare_global_plan"),
    (checkpoint.Writer, "write_data"),
    (checkpoint.Writer, "finish"),
]


@every_interrupt
@pytest.mark.parametrize(("target", "name"), SAVES, ids=[name for _, name in SAVES])
def test_an_interrupted_save(target: Any, name: str, interrupt: BaseException, tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path, model, optimizer)
    kept = snapshot(model, optimizer)
    train(model, optimizer, range(2, 3))
    late = name in ("prepare_global_plan", "write_data")
    with interrupting(target, name, interrupt, after=late), pytest.raises(type(interrupt)) as caught:
        checkpoint.save(tmp_path, model, optimizer, keep_last=1)
    assert caught.value is interrupt
    assert caught.value.__cause__ is None
    assert folders(tmp_path) == ["00000001"]
    now = snapshot(model, optimizer)
    checkpoint.load(tmp_path, model, optimizer)
    assert_same(kept, snapshot(model, optimizer))
    train(model, optimizer, range(2, 3))
    checkpoint.save(tmp_path, model, optimizer, keep_last=1)
    assert folders(tmp_path) == ["00000002"]
    assert_same(now, snapshot(model, optimizer))


def test_an_interrupt_behind_the_commit_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    model, optimizer = pair()
    with (
        interrupting(checkpoint.Writer, "finish", KeyboardInterrupt(), after=True),
        pytest.raises(KeyboardInterrupt),
    ):
        checkpoint.save(tmp_path, model, optimizer)
    assert folders(tmp_path) == ["00000001"]
    checkpoint.load(tmp_path, model, optimizer)


LOADS = [
    (contents, "contents_of", False),
    (checkpoint.Reader, "_open", False),
    (contents, "compare", False),
    (contents, "extra_of", False),
    (checkpoint.Reader, "prepare_local_plan", False),
    (checkpoint.Reader, "prepare_global_plan", False),
    (checkpoint.Reader, "_read_into", True),
    (checkpoint.Reader, "_read_staged", True),
    (contents, "set_contents", True),
]
"""Moments of a load, and whether state may have changed by then."""


@every_interrupt
@pytest.mark.parametrize(("target", "name", "has_changed"), LOADS, ids=[name for _, name, _ in LOADS])
def test_an_interrupted_load(
    target: Any, name: str, has_changed: bool, interrupt: BaseException, tmp_path: Path
) -> None:
    model, optimizer = pair()
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path, model, optimizer)
    kept = snapshot(model, optimizer)
    train(model, optimizer, range(2, 3))
    before = snapshot(model, optimizer)
    with interrupting(target, name, interrupt), pytest.raises(type(interrupt)) as caught:
        checkpoint.load(tmp_path, model, optimizer)
    assert caught.value is interrupt
    if has_changed:
        said = str(interrupt) or "KeyboardInterrupt"
        with pytest.raises(forebay.CheckpointError, match=f"broke off with: {said}"):
            train(model, optimizer, range(1))
        with pytest.raises(forebay.CheckpointError, match=f"broke off with: {said}"):
            checkpoint.save(tmp_path, model, optimizer)
    else:
        assert_same(before, snapshot(model, optimizer))
        train(model, optimizer, range(3, 4))
    checkpoint.load(tmp_path, model, optimizer)
    assert_same(kept, snapshot(model, optimizer))
    train(model, optimizer, range(1))


def test_the_key_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = pair()
    write = checkpoint.Writer.write_data

    def pressed(self: Any, *arguments: Any) -> Any:
        press()
        return write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Writer, "write_data", pressed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, model, optimizer)
    assert folders(tmp_path) == []
    checkpoint.save(tmp_path, model, optimizer)


# Saves beside training.


@every_interrupt
@pytest.mark.parametrize("moment", ["contents_to_save", "_copy"])
def test_an_interrupted_call_of_an_async_save(moment: str, interrupt: BaseException, tmp_path: Path) -> None:
    model, optimizers = saves.build()
    saves.train(model, optimizers, 0)
    target = contents if moment == "contents_to_save" else _snapshot.Snapshot
    with interrupting(target, moment, interrupt), pytest.raises(type(interrupt)) as caught:
        checkpoint.async_save(tmp_path, model, optimizers)
    assert caught.value is interrupt
    assert not saves.threads_of_saves()
    assert not list(tmp_path.iterdir())
    # No step waits for a snapshot that nobody writes.
    saves.train(model, optimizers, 1)
    kept = saves.values(model, optimizers)
    checkpoint.async_save(tmp_path, model, optimizers).result()
    saves.assert_holds(tmp_path, "f32", kept)


def test_an_interrupted_wait_for_the_result_leaves_the_save_alone(tmp_path: Path) -> None:
    model, optimizers = saves.build()
    saves.train(model, optimizers, 0)
    kept = saves.values(model, optimizers)
    with saves.held() as gate:
        saving = checkpoint.async_save(tmp_path, model, optimizers)
        assert gate.reached.wait(20)
        threading.Timer(0.1, press).start()
        with pytest.raises(KeyboardInterrupt):
            saving.result(20)
        assert not saving.done()
        gate.open()
        saving.result()
    saves.assert_holds(tmp_path, "f32", kept)


# Delayed handlers.


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """Count SIGUSR1 with a handler that raises nothing; whatever happens, handlers are as before."""
    counted: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: counted.append(number))
    yield counted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGUSR1, before)


def test_a_delayed_handler_runs_at_the_end(alarms: list[int]) -> None:
    reached = []

    def work() -> None:
        press()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not alarms
        reached.append("the end")

    with pytest.raises(KeyboardInterrupt), interrupts.delayed(True):
        work()
    assert reached == ["the end"]
    os.kill(os.getpid(), signal.SIGUSR1)
    assert len(alarms) >= 1


def test_what_waits_runs_where_it_is_allowed(alarms: list[int]) -> None:
    with interrupts.delayed(True):
        os.kill(os.getpid(), signal.SIGUSR1)
        press()
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            pytest.fail("the handler raises before the block")
        assert alarms == [signal.SIGUSR1]
        with interrupts.allowed():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert len(alarms) == 2
            with pytest.raises(KeyboardInterrupt):
                press()
            # The code that handles it is not interrupted again.
            press()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert len(alarms) == 2
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            pass
        with interrupts.allowed():
            assert len(alarms) == 3


def test_an_error_of_the_block_is_not_lost_without_signals(alarms: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), interrupts.delayed(True):
        raise ZeroDivisionError

    def work() -> None:
        press()
        raise ZeroDivisionError

    with pytest.raises(KeyboardInterrupt) as caught, interrupts.delayed(True):
        work()
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert not alarms


def test_a_handler_that_the_block_sets_stays(alarms: list[int]) -> None:
    others: list[int] = []

    def other(number: int, _: Any) -> None:
        others.append(number)

    with interrupts.delayed(True):
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGUSR1) is other


def test_blocks_inside_blocks_and_other_threads_delay_nothing_themselves(alarms: list[int]) -> None:
    found: list[Any] = []

    def elsewhere() -> None:
        with interrupts.delayed(True), interrupts.allowed():
            found.append(signal.getsignal(signal.SIGUSR1))

    before = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]
    with interrupts.delayed(False):
        assert signal.getsignal(signal.SIGUSR1) is before
    with interrupts.delayed(True):
        # A thread of a background save must not open what the main thread has closed.
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with interrupts.delayed(True):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert not alarms
    assert alarms == [signal.SIGUSR1]
