"""Cases about saves beside training on two ranks: complete when both have written, and the same for both."""

from __future__ import annotations

import errno
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import forebay
from forebay.checkpoint import async_save, load
from forebay.optim.second import open_second
from support.dist.checkpoints import SAVED, build, check, reference, refused, spoil, train
from support.dist.registry import case, shared_folder
from support.dist.saves import complete, fail, wait_for, writer
from support.optim import move_over

if TYPE_CHECKING:
    pass


@case(2)
def the_moment_of_the_call_is_saved_while_both_train_on() -> None:
    for kind in ("f32", "bf16"):
        for budget in (None, 0):
            path = shared_folder() / f"moment-{kind}-{budget}"
            net, optimizer = build(kind)
            train(net, optimizer, *range(SAVED))
            go = threading.Event()
            with writer(1, wait_for(go)):
                handle = async_save(path, net, optimizer, extra={"steps": SAVED}, snapshot_budget_bytes=budget)
                threading.Timer(0.1, go.set).start()
                train(net, optimizer, SAVED, SAVED + 1)
                handle.result()
            check(net, optimizer, reference(kind, SAVED + 2))
            spoil(net, optimizer)
            assert load(path, net, optimizer) == {"steps": SAVED}
            check(net, optimizer, reference(kind))


@case(2)
def the_copy_that_was_the_state_is_saved() -> None:
    for kind in ("f32", "bf16"):
        path = shared_folder() / f"copy-{kind}"
        net, optimizer = build(kind)
        train(net, optimizer, *range(SAVED))
        open_second(optimizer)
        go = threading.Event()
        with writer(1, wait_for(go)):
            handle = async_save(path, net, optimizer)
            move_over(optimizer, change=1.0)
            # Its own tensors are over the other copy from here on.
            optimizer.synchronize()
            go.set()
            handle.result()
        spoil(net, optimizer)
        load(path, net, optimizer)
        check(net, optimizer, reference(kind))


@case(2)
def it_is_complete_only_when_both_have_written() -> None:
    for slow in (0, 1):
        path = shared_folder() / f"slow-{slow}"
        net, optimizer = build("f32")
        train(net, optimizer, *range(SAVED))
        go = threading.Event()
        with writer(slow, wait_for(go)):
            handle = async_save(path, net, optimizer)
            if dist.get_rank() != slow:
                # It has written, and now waits for the other.
                own = f"{dist.get_rank()}-0.safetensors"
                while not list(path.glob(f"*/{own}")):
                    time.sleep(0.005)
                time.sleep(0.1)
            train(net, optimizer, SAVED)
            dist.barrier()
            assert complete(path) == []
            assert not handle.done()
            dist.barrier()
            go.set()
            handle.result()
        assert complete(path) == ["00000001"]
        load(path, net, optimizer)
        check(net, optimizer, reference("f32"))


@case(2)
def an_error_of_one_is_the_error_of_both_and_comes_once_to_each() -> None:
    for broken in (0, 1):
        path = shared_folder() / f"broken-{broken}"
        net, optimizer = build("f32")
        train(net, optimizer, *range(SAVED))
        async_save(path, net, optimizer).result()
        train(net, optimizer, SAVED)
        with writer(broken, fail):
            handle = async_save(path, net, optimizer, snapshot_budget_bytes=0)
            train(net, optimizer, SAVED + 1)
            handle._done.wait(9)
        # One asks for the result and knows; the other does not. At the next save both hear of it, and neither waits
        # for the other in a save that never begins.
        if dist.get_rank() == 0:
            error = refused(handle.result)
            assert isinstance(error, forebay.StorageError)
        error = refused(async_save, path, net, optimizer)
        assert isinstance(error, forebay.StorageError)
        assert error.errno == errno.ENOSPC
        assert complete(path) == ["00000001"]
        async_save(path, net, optimizer).result()
        assert complete(path) == ["00000001", "00000002"]
        check(net, optimizer, reference("f32", SAVED + 2))
        load(path / "00000001", net, optimizer)
        check(net, optimizer, reference("f32"))


@case(2)
def both_refuse_when_one_is_busy() -> None:
    path = shared_folder() / "busy"
    net, optimizer = build("f32")
    train(net, optimizer, *range(SAVED))
    handle = async_save(path, net, optimizer, when_busy="refuse")
    handle.result()
    dist.barrier()
    if dist.get_rank() == 0:
        # This one's thread has not come to its end yet, the other's has.
        handle._done.clear()
    error = refused(async_save, path, net, optimizer, when_busy="refuse")
    assert isinstance(error, forebay.CheckpointError)
    assert "is running" in str(error)
    handle._done.set()
    async_save(path, net, optimizer, when_busy="refuse").result()
    assert complete(path) == ["00000001", "00000002"]


@case(2)
def saves_do_not_disturb_the_collectives_of_training() -> None:
    path = shared_folder() / "collectives"
    net, optimizer = build("f32")
    for step in range(4):
        train(net, optimizer, step)
        async_save(path, net, optimizer, snapshot_budget_bytes=[None, 0][step % 2])
        found: list[Any] = [None, None]
        dist.all_gather_object(found, (step, dist.get_rank()))
        assert found == [(step, 0), (step, 1)]
    forebay.checkpoint.save(path, net, optimizer)
    assert complete(path) == [f"{number:08}" for number in range(1, 6)]
    for steps in range(1, 5):
        load(path / f"{steps:08}", net, optimizer)
        check(net, optimizer, reference("f32", steps))
