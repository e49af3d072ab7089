"""A disk that is full, forbidden, read-only or gone: an error with the path, and training goes on from where it was."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import forebay
from forebay import _core, checkpoint
from support.checkpoint import folders, pair, snapshot, train
from support.processes import in_child
from support.tensors import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Save = Callable[..., None]

NOBODY = 65534


def beside(*arguments: Any, **options: Any) -> None:
    """Save beside training, and ask for the result."""
    checkpoint.async_save(*arguments, **options).result()


def unasked(*arguments: Any, **options: Any) -> None:
    """Save beside training without asking for the result: the next save tells."""
    assert checkpoint.async_save(*arguments, **options)._done.wait(20)
    checkpoint.save(*arguments, **options)


every_way = pytest.mark.parametrize("save", [checkpoint.save, beside, unasked])


def saved_once(path: Path) -> tuple[torch.nn.Module, forebay.AdamW, dict[str, torch.Tensor]]:
    """Return a pair that was saved after two steps, and what it was then; it has taken a third since."""
    model, optimizer = pair()
    train(model, optimizer, range(2))
    checkpoint.save(path, model, optimizer, extra={"step": 2})
    kept = snapshot(model, optimizer)
    train(model, optimizer, range(2, 3))
    return model, optimizer, kept


def assert_intact(path: Path, kept: dict[str, torch.Tensor]) -> None:
    """Assert that the checkpoint of the path is the one of two steps."""
    model, optimizer = pair(5)
    assert checkpoint.load(path, model, optimizer) == {"step": 2}
    assert_same(kept, snapshot(model, optimizer))


def assert_goes_on(model: torch.nn.Module, optimizer: forebay.AdamW) -> None:
    """Assert that training goes on as if nothing had been."""
    train(model, optimizer, range(3, 5))
    twin, its = pair()
    train(twin, its, range(5))
    assert_same(snapshot(model, optimizer), snapshot(twin, its))


# Full.


@every_way
def test_a_file_that_may_not_grow(save: Save, tmp_path: Path) -> None:
    model, optimizer, kept = saved_once(tmp_path)

    def refused(limit: int) -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        twin, its = pair()
        its.prepare()
        with pytest.raises(forebay.StorageError) as caught:
            save(tmp_path, twin, its, extra={"step": 3}, keep_last=1)
        assert caught.value.errno == errno.EFBIG
        train(twin, its, range(1))
        return str(caught.value)

    # In the middle of the data; then in the manifest, behind files that are complete.
    size = (tmp_path / "00000001" / "0-0.safetensors").stat().st_size
    manifest = (tmp_path / "00000001" / "manifest.json").stat().st_size
    assert 4096 < size < manifest
    places = ((4096, "0-0.safetensors"), (size + 100, "manifest.json.partial"))
    for limit, file in places:
        said = in_child(lambda limit=limit: refused(limit))
        assert said.startswith(f"cannot write {tmp_path}/00000002/{file}: "), said
        assert folders(tmp_path) == ["00000001"], "what was written is removed"
        assert_intact(tmp_path, kept)
    assert_goes_on(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer)
    assert folders(tmp_path) == ["00000001", "00000002"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@every_way
def test_a_full_disk(save: Save, small_disk: Path) -> None:
    path = small_disk / "run"
    model, optimizer, kept = saved_once(path)
    filler = small_disk / "filler"
    room = shutil.disk_usage(small_disk).free
    # No room at all, room for a part of the data, room for data but not for the manifest.
    for left in (0, 8192, (path / "00000001" / "0-0.safetensors").stat().st_size + 4096):
        filler.write_bytes(b"x" * (room - left))
        with pytest.raises(forebay.StorageError, match=f"cannot (write|create) {path}/00000002") as caught:
            save(path, model, optimizer, keep_last=1)
        assert caught.value.errno == errno.ENOSPC
        assert folders(path) == ["00000001"], "the disk has its room again"
        filler.unlink()
        assert_intact(path, kept)
    assert_goes_on(model, optimizer)
    checkpoint.save(path, model, optimizer, keep_last=1)
    assert folders(path) == ["00000002"]


@every_way
def test_what_a_full_disk_refused_is_removed(save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, kept = saved_once(tmp_path)
    moments: list[list[str]] = []
    write = _core.write_checkpoint

    def full(*arguments: Any) -> Any:
        write(*arguments)
        moments.append(folders(tmp_path))
        raise forebay.StorageError("cannot write: no space left on device", errno=errno.ENOSPC)

    with monkeypatch.context() as patch:
        patch.setattr(_core, "write_checkpoint", full)
        with pytest.raises(forebay.StorageError, match="no space left") as caught:
            save(tmp_path, model, optimizer, keep_last=1)
    assert caught.value.errno == errno.ENOSPC
    assert moments == [["00000001", "00000002"]]
    assert folders(tmp_path) == ["00000001"]
    assert_intact(tmp_path, kept)
    assert_goes_on(model, optimizer)
    checkpoint.save(tmp_path, model, optimizer, keep_last=1)
    assert folders(tmp_path) == ["00000002"]


@every_way
def test_a_checkpoint_that_is_complete_is_not_removed(save: Save, tmp_path: Path) -> None:
    path = tmp_path / "run"
    saved_once(path)
    open_to_all(path)
    path.chmod(0o777)
    (path / ".saving").chmod(0o666)
    (path / "00000001").chmod(0o555)

    def pruned() -> str:
        twin, its = pair()
        train(twin, its, range(3))
        # The new checkpoint is complete when an old one cannot be removed.
        with pytest.raises(forebay.StorageError) as caught:
            save(path, twin, its, keep_last=1)
        return str(caught.value)

    try:
        assert without_rights(pruned).startswith(f"cannot remove {path}/00000001/manifest.json: ")
    finally:
        (path / "00000001").chmod(0o755)
    assert folders(path) == ["00000001", "00000002"]
    assert (path / "00000002" / "manifest.json").exists()
    checkpoint.load(path / "00000002", *pair(5))


@every_way
def test_what_cannot_be_removed_does_not_hide_the_error(save: Save, tmp_path: Path) -> None:
    path = tmp_path / "run"
    model, optimizer, kept = saved_once(path)
    open_to_all(path)
    path.chmod(0o777)
    (path / ".saving").chmod(0o666)
    write = _core.write_checkpoint

    def full(*arguments: Any) -> Any:
        write(*arguments)
        # Now nobody can remove what is in it.
        (path / "00000002").chmod(0o555)
        raise forebay.StorageError("cannot write: no space left on device", errno=errno.ENOSPC)

    def refused() -> str:
        twin, its = pair()
        with mock.patch.object(_core, "write_checkpoint", full), pytest.raises(forebay.StorageError) as caught:
            save(path, twin, its)
        assert caught.value.errno == errno.ENOSPC
        return str(caught.value)

    assert without_rights(refused) == "cannot write: no space left on device"
    assert folders(path) == ["00000001", "00000002"]
    (path / "00000002").chmod(0o755)
    assert_intact(path, kept)
    checkpoint.save(path, model, optimizer)
    assert folders(path) == ["00000001", "00000003"]


def test_leftovers_of_a_full_disk_make_room_for_the_next_save(small_disk: Path) -> None:
    path = small_disk / "run"
    model, optimizer, _ = saved_once(path)
    (path / "00000002").mkdir()
    (path / "00000002" / "0-0.safetensors").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 4096))
    checkpoint.save(path, model, optimizer)
    checkpoint.load(path, model, optimizer)


# Forbidden.


def without_rights(work: object) -> str:
    """Run in a child that is nobody, or as we are where we are nobody special."""

    def run() -> object:
        if os.geteuid() == 0:
            os.setegid(NOBODY)
            os.seteuid(NOBODY)
        return work()  # type: ignore[operator]

    return in_child(run)


def open_to_all(path: Path) -> None:
    """Let everybody reach a folder that pytest made for us alone."""
    for folder in [path, *path.parents]:
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)


@every_way
def test_a_folder_that_may_not_be_written(save: Save, tmp_path: Path) -> None:
    path = tmp_path / "run"
    model, optimizer, kept = saved_once(path)
    open_to_all(path)
    path.chmod(0o555)
    (path / ".saving").chmod(0o444)

    def refused() -> str:
        twin, its = pair()
        train(twin, its, range(3))
        with pytest.raises(OSError, match="cannot create") as caught:
            save(path, twin, its, keep_last=1)
        assert caught.value.errno == errno.EACCES
        assert_goes_on(twin, its)
        return str(caught.value)

    try:
        assert without_rights(refused).startswith(f"cannot create {path}/.saving: Permission denied")
        (path / ".saving").chmod(0o666)
        assert without_rights(refused).startswith(f"cannot create {path}/00000002: Permission denied")
    finally:
        path.chmod(0o755)
    assert_intact(path, kept)
    assert_goes_on(model, optimizer)


def test_files_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run"
    saved_once(path)
    open_to_all(path)
    for name in ("manifest.json", "0-0.safetensors"):
        file = path / "00000001" / name
        file.chmod(0)

        def load() -> str:
            twin, its = pair()
            train(twin, its, range(3))
            before = snapshot(twin, its)
            with pytest.raises(forebay.StorageError) as caught:
                checkpoint.load(path, twin, its)
            assert caught.value.errno == errno.EACCES
            assert_same(before, snapshot(twin, its))
            return str(caught.value)

        assert without_rights(load).startswith(f"cannot read {file}: Permission denied")
        file.chmod(0o644)


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    model, optimizer = pair()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(forebay.StorageError, match=f"cannot create {path}"):
            checkpoint.save(path, model, optimizer)
        with pytest.raises(forebay.StorageError, match=f"cannot list {path}"):
            checkpoint.load(path, model, optimizer)
    assert (tmp_path / "file").read_text() == "mine"
    train(model, optimizer, range(1))


@every_way
def test_a_disk_that_becomes_read_only(save: Save, small_disk: Path) -> None:
    path = small_disk / "run"
    model, optimizer, kept = saved_once(path)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(forebay.StorageError, match=f"cannot create {path}") as caught:
        save(path, model, optimizer)
    assert caught.value.errno == errno.EROFS
    assert_intact(path, kept)
    assert_goes_on(model, optimizer)


# Gone.


@pytest.mark.parametrize("moment", ["before the data", "before the manifest"])
@pytest.mark.parametrize("what", ["subfolder", "path"])
def test_a_folder_that_vanishes_during_a_save(
    moment: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    model, optimizer, kept = saved_once(path)
    method = "write_data" if moment == "before the data" else "finish"
    original = getattr(checkpoint.Writer, method)

    def vanish(self: checkpoint.Writer, *arguments: object, **named: object) -> object:
        if what == "path":
            path.rename(tmp_path / "moved")
        else:
            shutil.rmtree(path / "00000002")
        return original(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Writer, method, vanish)
        with pytest.raises(
            forebay.StorageError, match=f"cannot (write|find) {path}/00000002/0-0.safetensors"
        ) as caught:
            checkpoint.save(path, model, optimizer, keep_last=1)
    assert caught.value.errno == errno.ENOENT
    assert_intact(tmp_path / "moved" if what == "path" else path, kept)
    assert_goes_on(model, optimizer)
    checkpoint.save(path, model, optimizer)
    checkpoint.load(path, *pair())


def test_a_checkpoint_that_vanished_before_it_was_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model, optimizer, _ = saved_once(path)
    before = snapshot(model, optimizer)
    shutil.rmtree(path / "00000001")
    with pytest.raises(forebay.CheckpointError, match=f"{path}: no complete checkpoint"):
        checkpoint.load(path, model, optimizer)
    shutil.rmtree(path)
    with pytest.raises(forebay.StorageError, match=f"cannot list {path}"):
        checkpoint.load(path, model, optimizer)
    assert_same(before, snapshot(model, optimizer))
    assert_goes_on(model, optimizer)


def test_a_checkpoint_that_vanishes_while_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    model, optimizer, _ = saved_once(path)
    original = checkpoint.Reader.read_data

    def vanish(self: checkpoint.Reader, *arguments: object) -> object:
        shutil.rmtree(path)
        return original(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Reader, "read_data", vanish)
        with pytest.raises(forebay.StorageError, match=f"cannot read {path}/00000001/0-0.safetensors"):
            checkpoint.load(path, model, optimizer)
