"""Cases about Ctrl-C and ``SystemExit`` on one rank: it raises just that, and the others get an error at once.

A rank that is not told would wait for a collective until its timeout, which fails the case.
"""

from __future__ import annotations

import errno
import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist

import forebay
from forebay import _core, checkpoint
from forebay.checkpoint import Reader, Writer, contents
from forebay.checkpoint import snapshot as _snapshot
from support.dist.checkpoints import SAVED, build, check, everywhere, reference, train
from support.dist.registry import case, shared_folder
from support.dist.saves import complete, fail, writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INTERRUPTS = (KeyboardInterrupt, SystemExit)


def trained() -> tuple[Any, forebay.AdamW]:
    """Return a sharded model and its optimizer after some steps."""
    net, optimizer = build("bf16")
    train(net, optimizer, *range(SAVED))
    return net, optimizer


def saved_once(path: Path) -> tuple[Any, forebay.AdamW]:
    """Return a run that was saved, and has taken a step since."""
    net, optimizer = trained()
    checkpoint.save(path, net, optimizer)
    train(net, optimizer, SAVED)
    return net, optimizer


def folders(path: Path) -> list[str]:
    """Return the checkpoints of a path, complete or not, when all ranks are here."""
    dist.barrier()
    found = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
    dist.barrier()
    return found


def raised(action: Callable[[], Any], patches: Any = None) -> tuple[BaseException | None, list[str]]:
    """Return what an action raises here, under some patches, and the types of what it raises on each rank."""
    error = None
    with patches or ExitStack():
        try:
            action()
        except BaseException as found:
            error = found
    return error, everywhere(type(error).__name__)


def check_told(error: BaseException | None, types: list[str], broken: int, interrupt: type[BaseException]) -> None:
    """Check that one rank was interrupted, and that the other was told so."""
    assert types[broken] == interrupt.__name__, types
    assert types[1 - broken] == "CheckpointError", types
    if dist.get_rank() == broken:
        assert type(error) is interrupt
        assert error.args == (("code",) if interrupt is SystemExit else ())
    else:
        assert f"failed on rank {broken}: {interrupt.__name__}" in str(error)


def interrupting(target: Any, name: str, broken: int, interrupt: type[BaseException], *, after: bool = False) -> Any:
    """Return a patch that interrupts one rank before or after a function."""
    original = getattr(target, name)
    error = interrupt("code") if interrupt is SystemExit else interrupt()

    def patched(*arguments: Any, **named: Any) -> Any:
        if dist.get_rank() != broken:
            return original(*arguments, **named)
        if after:
            original(*arguments, **named)
        raise error

    return mock.patch.object(target, name, patched)


@case(2)
def an_interrupted_save_raises_on_all_ranks() -> None:
    path = shared_folder() / "save"
    net, optimizer = saved_once(path)
    for broken in (0, 1):
        for interrupt in INTERRUPTS:
            for target, name in (
                (contents, "contents_to_save"),
                (Writer, "prepare_local_plan"),
                (Writer, "write_data"),
            ):
                with interrupting(target, name, broken, interrupt, after=name == "write_data"):
                    error, types = raised(lambda: checkpoint.save(path, net, optimizer, keep_last=1))
                check_told(error, types, broken, interrupt)
                assert folders(path) == complete(path) == ["00000001"]
    # The coordinator alone completes a checkpoint.
    for name in ("prepare_global_plan", "finish"):
        with interrupting(Writer, name, 0, KeyboardInterrupt):
            error, types = raised(lambda: checkpoint.save(path, net, optimizer, keep_last=1))
        check_told(error, types, 0, KeyboardInterrupt)
        assert folders(path) == complete(path) == ["00000001"]
    check(net, optimizer, reference("bf16", SAVED + 1))
    checkpoint.save(path, net, optimizer)
    assert folders(path) == complete(path) == ["00000001", "00000002"]
    checkpoint.load(path / "00000001", net, optimizer)
    check(net, optimizer, reference("bf16"))


LOADS = (
    (contents, "contents_of", False),
    (contents, "compare", False),
    (Reader, "prepare_local_plan", False),
    (Reader, "_read", True),
    (contents, "set_contents", True),
)
"""Moments of a load, and whether some rank has changed state by then."""


@case(2)
def an_interrupted_load_raises_on_all_ranks_and_mixed_state_is_refused() -> None:
    path = shared_folder() / "load"
    net, optimizer = saved_once(path)
    for broken in (0, 1):
        for interrupt in INTERRUPTS:
            for target, name, has_changed in LOADS:
                with interrupting(target, name, broken, interrupt):
                    error, types = raised(lambda: checkpoint.load(path, net, optimizer))
                check_told(error, types, broken, interrupt)
                if not has_changed:
                    check(net, optimizer, reference("bf16", SAVED + 1))
                    continue
                refusal, types = raised(lambda: train(net, optimizer, SAVED))
                assert types == ["CheckpointError"] * 2
                assert interrupt.__name__ in str(refusal) or "code" in str(refusal)
                checkpoint.load(path, net, optimizer)
                check(net, optimizer, reference("bf16"))
                train(net, optimizer, SAVED)
    check(net, optimizer, reference("bf16", SAVED + 1))


@case(2)
def an_interrupted_call_of_an_async_save_raises_on_all_ranks() -> None:
    path = shared_folder() / "async"
    net, optimizer = saved_once(path)
    for broken in (0, 1):
        for interrupt in INTERRUPTS:
            for target, name in ((contents, "contents_to_save"), (_snapshot.Snapshot, "_copy")):
                with interrupting(target, name, broken, interrupt):
                    error, types = raised(lambda: checkpoint.async_save(path, net, optimizer, keep_last=1))
                check_told(error, types, broken, interrupt)
                assert folders(path) == complete(path) == ["00000001"]
    check(net, optimizer, reference("bf16", SAVED + 1))
    train(net, optimizer, SAVED + 1)
    checkpoint.async_save(path, net, optimizer).result()
    assert folders(path) == complete(path) == ["00000001", "00000002"]


COLLECTIVES = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list")


def pressed_at(place: int, broken: int, *, after: bool) -> Any:
    """Return patches with which Ctrl-C is pressed on one rank before or after its n-th collective, and a count."""
    patches, calls = ExitStack(), []
    for name in COLLECTIVES:
        original = getattr(dist, name)

        def patched(*arguments: Any, original: Any = original, **named: Any) -> Any:
            calls.append(original)
            press = dist.get_rank() == broken and len(calls) == place
            if press and not after:
                os.kill(os.getpid(), signal.SIGINT)
            result = original(*arguments, **named)
            if press and after:
                os.kill(os.getpid(), signal.SIGINT)
            return result

        patches.enter_context(mock.patch.object(dist, name, patched))
    return patches, calls


def press_everywhere(action: Callable[[], Any], check_outcome: Callable[[bool], None]) -> int:
    """Press Ctrl-C at every collective of an action, on either rank; return how often that made it fail."""
    failures = 0
    place = 1
    while True:
        for broken in (0, 1):
            for after in (False, True):
                patches, calls = pressed_at(place, broken, after=after)
                error, types = raised(action, patches)
                if max(everywhere(len(calls))) < place:
                    assert types == ["NoneType"] * 2
                    return failures
                assert types[broken] == "KeyboardInterrupt", (place, types)
                assert types[1 - broken] in ("CheckpointError", "NoneType"), (place, types, error)
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
                failed = types[1 - broken] == "CheckpointError"
                failures += failed
                check_outcome(failed)
        place += 1


@case(2)
def ctrl_c_during_a_collective_of_a_save_leaves_nobody_waiting() -> None:
    path = shared_folder() / "pressed"
    net, optimizer = saved_once(path)

    def check_outcome(failed: bool) -> None:
        found = folders(path)
        assert found == complete(path)
        assert len(found) == 1
        # Either all ranks agree that it was not saved, or it is complete.
        assert (found[0] == before[0]) is failed
        before[:] = found

    before = folders(path)
    assert press_everywhere(lambda: checkpoint.save(path, net, optimizer, keep_last=1), check_outcome) >= 4
    check(net, optimizer, reference("bf16", SAVED + 1))
    checkpoint.load(path, net, optimizer)
    check(net, optimizer, reference("bf16", SAVED + 1))


@case(2)
def ctrl_c_during_a_collective_of_a_load_leaves_nobody_waiting() -> None:
    path = shared_folder() / "pressed load"
    net, optimizer = trained()
    checkpoint.save(path, net, optimizer)

    def check_outcome(failed: bool) -> None:
        if failed:
            checkpoint.load(path, net, optimizer)
        check(net, optimizer, reference("bf16"))

    assert press_everywhere(lambda: checkpoint.load(path, net, optimizer), check_outcome) >= 4


@case(2)
def ctrl_c_during_the_call_of_an_async_save_leaves_nobody_waiting() -> None:
    path = shared_folder() / "pressed async"
    net, optimizer = saved_once(path)
    # The groups of background saves are made here.
    checkpoint.async_save(path, net, optimizer, keep_last=1).result()

    before = folders(path)
    # The background thread has collectives of its own, but handlers run in the main thread.
    for broken in (0, 1):
        for after in (False, True):
            patches, _ = pressed_at(1, broken, after=after)
            _, types = raised(lambda: checkpoint.async_save(path, net, optimizer, keep_last=1), patches)
            assert types[broken] == "KeyboardInterrupt", types
            # It was too late to stop the save, which is complete.
            assert types[1 - broken] == "NoneType", types
            for handle in list(checkpoint.handle.current):
                handle.result()
            found = folders(path)
            assert found == complete(path)
            assert len(found) == 1
            assert found != before
            before = found
    checkpoint.load(path, net, optimizer)
    check(net, optimizer, reference("bf16", SAVED + 1))


@case(2)
def a_full_disk_on_one_rank_leaves_nothing_of_an_async_save() -> None:
    path = shared_folder() / "full"
    net, optimizer = saved_once(path)
    for broken in (0, 1):
        with writer(broken, fail):
            handle = checkpoint.async_save(path, net, optimizer, keep_last=1)
            error, types = raised(handle.result)
        assert types == ["StorageError"] * 2
        assert isinstance(error, forebay.StorageError)
        assert error.errno == errno.ENOSPC
        assert folders(path) == complete(path) == ["00000001"]
    checkpoint.async_save(path, net, optimizer, keep_last=1).result()
    assert folders(path) == complete(path) == ["00000002"]
    assert _core.latest_checkpoint(path) == path / "00000002"
