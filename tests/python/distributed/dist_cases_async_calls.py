"""Cases about calls that ranks come to differently: later, with an error, or after the group is gone."""

from __future__ import annotations

import shutil
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import forebay
from forebay.checkpoint import Reader, async_save, contents, load, save
from support.dist.checkpoints import SAVED, build, check, reference, refused, spoil, state_for_dcp, train
from support.dist.registry import SurvivedError, case, shared_folder
from support.dist.saves import complete, fail, wait_for, writer

if TYPE_CHECKING:
    from pathlib import Path


def trained() -> tuple[Any, forebay.AdamW]:
    """Return a sharded model and its optimizer after some steps."""
    net, optimizer = build("f32")
    train(net, optimizer, *range(SAVED))
    return net, optimizer


def saved_twice(path: Path) -> tuple[Any, forebay.AdamW]:
    """Save into a path, and one step later into another; return the run."""
    net, optimizer = trained()
    save(path, net, optimizer, extra={"steps": SAVED})
    train(net, optimizer, SAVED)
    save(path.with_name(f"{path.name}-next"), net, optimizer, extra={"steps": SAVED + 1})
    dist.barrier()
    return net, optimizer


def completed_between(path: Path) -> Any:
    """Return a ``read_metadata`` for which the next checkpoint is there when rank 1 opens the path, and not before."""
    original = Reader.read_metadata
    opened = path.with_name(f"{path.name}-opened")

    def read(self: Reader, *arguments: Any, **named: Any) -> Any:
        if dist.get_rank() == 1 and not (path / "00000002").exists():
            while not opened.exists():
                time.sleep(0.005)
            shutil.copytree(path.with_name(f"{path.name}-next") / "00000001", path / "00000002")
        found = original(self, *arguments, **named)
        if dist.get_rank() == 0:
            opened.touch()
        return found

    return mock.patch.object(Reader, "read_metadata", read)


@case(2)
def all_load_one_checkpoint_though_the_next_is_completed_meanwhile() -> None:
    path = shared_folder() / "between"
    net, optimizer = saved_twice(path)
    with completed_between(path):
        assert load(path, net, optimizer) == {"steps": SAVED}
    check(net, optimizer, reference("f32"))
    dist.barrier()
    assert load(path, net, optimizer) == {"steps": SAVED + 1}
    check(net, optimizer, reference("f32", SAVED + 1))


@case(2)
def dcp_with_the_reader_does_not_load_one_rank_from_one_and_one_from_the_next() -> None:
    path = shared_folder() / "between-dcp"
    net, optimizer = saved_twice(path)
    with completed_between(path):
        error = refused(lambda: dcp.load(state_for_dcp(net, optimizer), storage_reader=Reader(path)))
    assert "different checkpoints" in str(error)
    assert f"{path}/00000001, {path}/00000002" in str(error)
    # Nothing was changed.
    check(net, optimizer, reference("f32", SAVED + 1))
    train(net, optimizer, SAVED + 1)


@case(2)
def a_load_has_what_is_being_saved_though_one_comes_later() -> None:
    path = shared_folder() / "later"
    net, optimizer = trained()
    save(path, net, optimizer, extra={"steps": SAVED})
    train(net, optimizer, SAVED)
    go = threading.Event()
    with writer(1, wait_for(go)):
        async_save(path, net, optimizer, extra={"steps": SAVED + 1}, keep_last=1)
        if dist.get_rank() == 1:
            go.set()
            time.sleep(0.1)
        spoil(net, optimizer)
        assert load(path, net, optimizer) == {"steps": SAVED + 1}
    check(net, optimizer, reference("f32", SAVED + 1))


@case(2)
def a_plain_save_after_one_that_failed_raises_on_both() -> None:
    path = shared_folder() / "plain after failed"
    net, optimizer = trained()
    with writer(1, fail):
        handle = async_save(path, net, optimizer)
        handle._done.wait(9)
    # One has asked for the result, the other has not.
    if dist.get_rank() == 0:
        assert isinstance(refused(handle.result), forebay.StorageError)
    assert isinstance(refused(save, path, net, optimizer), forebay.StorageError)
    # Neither is left behind in a collective that the other never comes to.
    found: list[Any] = [None, None]
    dist.all_gather_object(found, dist.get_rank())
    assert found == [0, 1]
    save(path, net, optimizer)
    assert complete(path) == ["00000001"]


@case(2)
def a_call_that_fails_on_one_rank_before_it_begins_fails_on_both() -> None:
    path = shared_folder() / "closed"
    net, optimizer = trained()
    save(path, net, optimizer)
    other, closed = trained()
    if dist.get_rank() == 1:
        closed.close()
    for call in (async_save, save, load):
        error = refused(call, path, other, closed)
        assert isinstance(error, forebay.OptionError), error
        assert "closed" in str(error)
    with mock.patch.object(contents, "get_model_state_dict", side_effect=KeyError("x") if dist.get_rank() else None):
        error = refused(async_save, path, net)
    expected = KeyError if dist.get_rank() else forebay.CheckpointError
    assert isinstance(error, expected), error
    assert dist.get_rank() or str(error) == "failed on rank 1: KeyError: 'x'"
    async_save(path, net, optimizer).result()
    load(path, net, optimizer)
    check(net, optimizer, reference("f32"))


@case(2)
def the_groups_of_saves_wait_as_long_as_the_default_group() -> None:
    net, _ = trained()
    async_save(shared_folder() / "timeout", net).result()

    def timeout(group: Any) -> Any:
        return group._get_backend(torch.device("cpu")).options._timeout

    made = [timeout(group) for group in dist.distributed_c10d._world.pg_names if group is not dist.group.WORLD]
    assert len(made) >= 2
    assert set(made) == {timeout(dist.group.WORLD)}


@case(2)
def each_rank_knows_how_much_of_what_both_have_it_writes() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40, bias=False) for _ in range(4)))
    handle = async_save(shared_folder() / "shares", model)
    handle.result()
    progress = handle.progress()
    assert progress["written_bytes"] == progress["total_bytes"]
    total = torch.tensor(progress["total_bytes"])
    dist.all_reduce(total)
    assert total == 4 * 40 * 40 * 4


@case(2)
def a_group_that_is_destroyed_before_the_save_has_ended() -> None:
    path = shared_folder() / "destroyed"
    net, optimizer = trained()
    save(path, net, optimizer)
    go = threading.Event()
    with mock.patch.object(forebay._core, "write_checkpoint", wait_for(go)):
        handle = async_save(path, net, optimizer)
        dist.barrier()
        dist.destroy_process_group()
        go.set()
        error = refused(handle.result)
    assert isinstance(error, forebay.CheckpointError)
    assert str(path) in str(error)
    assert "call result() on all ranks before one of them ends or destroys its process group" in str(error)
    assert complete(path) == ["00000001"]
    raise SurvivedError
