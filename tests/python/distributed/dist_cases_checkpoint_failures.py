"""Cases about saves and loads that fail on one rank: all ranks hear of it, and nothing that was complete is lost."""

from __future__ import annotations

import datetime
import errno
import shutil
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import forebay
from forebay import _core
from forebay.checkpoint import Reader, Writer
from support.dist.checkpoints import (
    SAVED,
    build,
    check,
    everywhere,
    manifest,
    place,
    reference,
    refused,
    spoil,
    state_for_dcp,
    train,
)
from support.dist.registry import case, shared_folder

if TYPE_CHECKING:
    from pathlib import Path


def folders(path: Path) -> list[str]:
    """Return the checkpoints of a path, complete or not, by name."""
    dist.barrier()
    found = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
    dist.barrier()
    return found


def complete(path: Path) -> list[str]:
    """Return the checkpoints of a path that have a manifest."""
    return sorted(found.parent.name for found in path.glob("*/manifest.json"))


def same_error(error: BaseException) -> None:
    """Check that all ranks tell the same story."""
    assert everywhere(str(error)) == [str(error)] * dist.get_world_size()


def half_written(*arguments: Any) -> Any:
    """Write half the tensors, and then find the disk full."""
    folder, prefix, entries, *rest = arguments
    half = {key: values[: len(values) // 2] for key, values in entries.items()}
    WRITE(folder, prefix, half, *rest)
    raise forebay.StorageError(f"write {folder}: no space left", errno=errno.ENOSPC)


WRITE = _core.write_checkpoint


@case(2, 3)
def a_rank_that_cannot_write_fails_the_save_on_all_of_them() -> None:
    ranks = dist.get_world_size()
    for broken in (0, ranks - 1):
        path = shared_folder() / f"write-{ranks}-{broken}"
        net, optimizer = build("bf16")
        train(net, optimizer, *range(SAVED))
        forebay.checkpoint.save(path, net, optimizer)
        train(net, optimizer, SAVED)
        with mock.patch.object(_core, "write_checkpoint", half_written if dist.get_rank() == broken else WRITE):
            error = refused(forebay.checkpoint.save, path, net, optimizer)
        assert isinstance(error, forebay.StorageError)
        assert error.errno == errno.ENOSPC
        assert f"{path}/00000002" in str(error)
        same_error(error)
        assert folders(path) == complete(path) == ["00000001"], "what the ranks wrote is removed"
        # Training goes on, and the old one loads.
        check(net, optimizer, reference("bf16", SAVED + 1))
        forebay.checkpoint.load(path, net, optimizer)
        check(net, optimizer, reference("bf16"))
        train(net, optimizer, SAVED)
        forebay.checkpoint.save(path, net, optimizer)
        assert folders(path) == complete(path) == ["00000001", "00000002"]
        spoil(net, optimizer)
        forebay.checkpoint.load(path, net, optimizer)
        check(net, optimizer, reference("bf16", SAVED + 1))


@case(2)
def a_commit_that_fails_leaves_the_old_checkpoint() -> None:
    path = shared_folder() / "commit"
    net, optimizer = build("f32")
    train(net, optimizer, *range(SAVED))
    # Through DCP alone, with one writer for all: nobody but the writer itself knows that a save has failed.
    writer = Writer(path)
    dcp.save(state_for_dcp(net, optimizer), storage_writer=writer)
    train(net, optimizer, SAVED)
    with mock.patch.object(Writer, "finish", side_effect=OSError(errno.EIO, "the disk went away")):
        error = refused(lambda: dcp.save(state_for_dcp(net, optimizer), storage_writer=writer))
    assert isinstance(error, dcp.api.CheckpointException)
    assert "the disk went away" in str(error)
    assert complete(path) == ["00000001"]
    dcp.save(state_for_dcp(net, optimizer), storage_writer=writer)
    assert folders(path) == complete(path) == ["00000001", "00000003"]
    forebay.checkpoint.load(path / "00000001", net, optimizer)
    check(net, optimizer, reference("f32"))


@case(2)
def a_rank_that_stalls_ends_the_save_with_the_groups_timeout() -> None:
    path = shared_folder() / "stalled"
    net, optimizer = build("f32")
    train(net, optimizer, *range(SAVED))
    forebay.checkpoint.save(path, net, optimizer)
    train(net, optimizer, SAVED)
    impatient = dist.new_group(timeout=datetime.timedelta(seconds=1))
    released = shared_folder() / "released"

    def stall(*arguments: Any) -> Any:
        # Its connections stay open: only the timeout tells the other that nothing will come.
        while not released.exists():
            time.sleep(0.01)
        return WRITE(*arguments)

    with mock.patch.object(_core, "write_checkpoint", stall if dist.get_rank() == 1 else WRITE):
        refused(forebay.checkpoint.save, path, net, optimizer, process_group=impatient)
    if dist.get_rank() == 0:
        released.touch()
    assert folders(path) == ["00000001", "00000002"]
    assert complete(path) == ["00000001"]
    forebay.checkpoint.save(path, net, optimizer)
    assert folders(path) == complete(path) == ["00000001", "00000003"]
    forebay.checkpoint.load(path, net, optimizer)
    check(net, optimizer, reference("f32", SAVED + 1))


@case(2)
def a_value_that_cannot_be_kept_fails_on_all_ranks() -> None:
    path = shared_folder() / "value"
    net, optimizer = build("f32")
    error = refused(forebay.checkpoint.save, path, net, optimizer, extra={"lock": {1, 2}})
    assert isinstance(error, forebay.CheckpointError)
    assert "extra.lock" in str(error)
    same_error(error)
    assert complete(path) == []


@case(2, 3)
def a_checkpoint_that_one_rank_does_not_see_fails_on_all_ranks() -> None:
    ranks = dist.get_world_size()
    for blind in (0, ranks - 1):
        net, optimizer = build("bf16")
        train(net, optimizer, *range(SAVED))
        path = place("bf16", "ours", ranks)
        if dist.get_rank() == blind:
            path = shared_folder() / "elsewhere"
        error = refused(forebay.checkpoint.load, path, net, optimizer)
        assert isinstance(error, forebay.Error)
        assert "elsewhere" in str(error)
        same_error(error)
        check(net, optimizer, reference("bf16"))
        train(net, optimizer, SAVED)  # nothing was changed, so nothing is refused
        check(net, optimizer, reference("bf16", SAVED + 1))


def damaged(source: Path, name: str, file: int, tensor: str) -> Path:
    """Return a copy of a checkpoint with one bit flipped in one rank's part of a tensor."""
    path = shared_folder() / name
    if dist.get_rank() == 0:
        shutil.copytree(source, path)
        found = manifest(path)
        names = [stored["name"] for stored in found["files"]]
        (chunk,) = (c for c in found["tensors"][tensor]["chunks"] if names[c["file"]].startswith(f"{file}-"))
        flipped = path / "00000001" / names[chunk["file"]]
        data = bytearray(flipped.read_bytes())
        data[(chunk["begin"] + chunk["end"]) // 2] ^= 4
        flipped.write_bytes(data)
    dist.barrier()
    return path


@case(2)
def a_flipped_bit_is_found_and_no_rank_goes_on() -> None:
    # Without anything extra: that is read first, and a bit flipped beside it is found before anything was changed.
    good = shared_folder() / "nothing extra"
    net, optimizer = build("bf16")
    train(net, optimizer, *range(SAVED))
    forebay.checkpoint.save(good, net, optimizer)
    tensor = "optimizer.state.inner.weight.exp_avg"
    # In what either rank has saved; and where one rank alone is given bad bytes by its disk.
    for file, reads_it in ((0, (0, 1)), (1, (0, 1)), (0, (0,)), (1, (1,))):
        path = damaged(good, f"flipped-{file}-{len(reads_it)}", file, tensor)
        if dist.get_rank() not in reads_it:
            path = good
        net, optimizer = build("bf16")
        train(net, optimizer, *range(SAVED))
        error = refused(forebay.checkpoint.load, path, net, optimizer)
        assert isinstance(error, forebay.CheckpointError)
        assert f"{file}-0.safetensors" in str(error)
        same_error(error)
        # The rank that has read it, and the others, whose state is of one checkpoint and whose groups of another.
        for action in (
            lambda: train(net, optimizer, SAVED),  # noqa: B023
            lambda: forebay.checkpoint.save(shared_folder() / "untrusted", net, optimizer),  # noqa: B023
        ):
            assert "flipped" in str(refused(action))
        assert not (shared_folder() / "untrusted").exists()
        forebay.checkpoint.load(good, net, optimizer)
        check(net, optimizer, reference("bf16"))
        train(net, optimizer, SAVED)
        check(net, optimizer, reference("bf16", SAVED + 1))


@case(2)
def a_flipped_bit_is_found_by_dcp_with_the_reader() -> None:
    good = place("f32", "forebay", 2)
    path = damaged(good, "flipped-dcp", 1, "optimizer.state.outer.weight.exp_avg_sq")
    if dist.get_rank() == 0:
        path = good
    net, optimizer = build("f32")
    optimizer.prepare()
    error = refused(lambda: dcp.load(state_for_dcp(net, optimizer), storage_reader=Reader(path)))
    assert isinstance(error, dcp.api.CheckpointException)
    assert list(error.failures) == [1]
    assert "1-0.safetensors" in str(error)
    if dist.get_rank() == 1:
        refusal = refused(train, net, optimizer, SAVED)
        assert isinstance(refusal, forebay.CheckpointError)
        assert "1-0.safetensors" in str(refusal)
    # One rank knows better than to save; the others hear of it instead of waiting.
    refusal = refused(forebay.checkpoint.save, shared_folder() / "one knows", net, optimizer)
    assert isinstance(refusal, forebay.CheckpointError)
    same_error(refusal)
    forebay.checkpoint.load(good, net, optimizer)
    check(net, optimizer, reference("f32"))
    train(net, optimizer, SAVED)


@case(2)
def dcp_says_why_a_checkpoint_cannot_be_opened() -> None:
    path = shared_folder() / "no manifest"
    if dist.get_rank() == 0:
        shutil.copytree(place("f32", "forebay", 2), path)
        text = (path / "00000001" / "manifest.json").read_bytes()
        (path / "00000001" / "manifest.json").write_bytes(text[: len(text) // 2])
    dist.barrier()
    net, optimizer = build("f32")
    train(net, optimizer, *range(SAVED))
    error = refused(lambda: dcp.load(state_for_dcp(net, optimizer), storage_reader=Reader(path)))
    assert isinstance(error, dcp.api.CheckpointException)
    assert list(error.failures) == [0, 1]
    for rank in (0, 1):
        found, _ = error.failures[rank]
        assert isinstance(found, forebay.CheckpointError)
        assert "no manifest/00000001/manifest.json" in str(found)
    train(net, optimizer, SAVED)
    check(net, optimizer, reference("f32", SAVED + 1))
