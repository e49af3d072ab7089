"""Files that are not as they were written: refused with their name, without a crash and without a huge allocation."""

from __future__ import annotations

import os
import random
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import forebay
from forebay import checkpoint
from support.checkpoint import ALONE, Net, files, pair, read_manifest, seal, snapshot, train
from support.processes import in_child
from support.tensors import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 8 << 20

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP's own calls say so.


class Big(torch.nn.Module):
    """Long enough for a state of several blocks."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Parameter(torch.randn(1100, 1000, generator=generator))
        self.second = torch.nn.Parameter(torch.randn(700, generator=generator))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of several blocks, which is copied and never changed."""
    path = tmp_path_factory.mktemp("saved")
    model = Big()
    optimizer = forebay.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    checkpoint.save(path, model, optimizer, extra={"epoch": 3, "rng": torch.arange(10)})
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """Copy the checkpoint's folder, for harm."""
    return Path(shutil.copytree(saved / "00000001", tmp_path / "copy"))


@pytest.fixture
def target() -> Iterator[tuple[Big, forebay.AdamW]]:
    """Make something to load into, that has taken a step."""
    model = Big(2)
    optimizer = forebay.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    yield model, optimizer
    optimizer.close()


def refused(folder: Path, target: tuple[Big, forebay.AdamW], reason: str, file: str) -> None:
    """Assert that a load is refused for its structure: with the file's name, and nothing is changed."""
    before = snapshot(*target)
    with pytest.raises(forebay.CheckpointError, match=reason) as caught:
        checkpoint.load(folder, *target)
    assert str(folder / file) in str(caught.value)
    assert_same(before, snapshot(*target))
    step(*target)


# Lengths.


def truncations(path: Path) -> list[int]:
    """Return one length of each class: nothing, in the length, in the header, at its end, in the data, at blocks."""
    size = path.stat().st_size
    if path.name == "manifest.json":
        return [1, 20, 40, 44, 45, size // 2, size - 2, size - 1]
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    lengths = [0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, size // 2, size - 1, size + 1]
    lengths += [at + by for at in range(BLOCK, size, BLOCK) for by in (-1, 0, 1)]
    return lengths


def test_every_truncation_of_every_file_is_refused(copy: Path, target: tuple[Big, forebay.AdamW]) -> None:
    assert len(files(copy)) == 1
    assert files(copy)[0].stat().st_size > BLOCK
    for file in [*files(copy), copy / "manifest.json"]:
        whole = file.read_bytes()
        for length in truncations(file):
            os.truncate(file, length)
            refused(copy, target, "bytes where the manifest has|damaged|not a manifest", file.name)
            file.write_bytes(whole)
    checkpoint.load(copy, *target)


def test_an_empty_manifest_and_a_missing_file_are_refused(copy: Path, target: tuple[Big, forebay.AdamW]) -> None:
    (file,) = files(copy)
    file.rename(copy / "aside")
    refused(copy, target, "missing", file.name)
    (copy / "aside").rename(file)
    (copy / "manifest.json").write_bytes(b"")
    refused(copy, target, "not a manifest", "manifest.json")


# Bits.


def test_a_flipped_bit_anywhere_is_refused(copy: Path, target: tuple[Big, forebay.AdamW], saved: Path) -> None:
    choose = random.Random(7)
    (file,) = files(copy)
    size = file.stat().st_size
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    manifest = copy / "manifest.json"
    offsets = [
        0,
        7,
        8,
        60,
        header - 1,
        header,
        BLOCK - 1,
        BLOCK,
        size - 1,
        *(choose.randrange(size) for _ in range(12)),
    ]
    places = [(file, at) for at in offsets]
    length = manifest.stat().st_size
    places += [(manifest, at) for at in (0, 30, 33, 40, 43, length - 1, *(choose.randrange(length) for _ in range(12)))]
    for damaged, at in places:
        flip(damaged, at, 1 << choose.randrange(8))
        with pytest.raises(forebay.CheckpointError, match=r"damaged|not a manifest") as caught:
            checkpoint.load(copy, *target)
        assert str(damaged) in str(caught.value), at
        shutil.copy(saved / "00000001" / damaged.name, damaged)
    checkpoint.load(copy, *target)
    step(*target)


def flip(file: Path, at: int, bit: int = 1) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ bit]))


# What a manifest may say.


def whole_first(manifest: dict[str, Any]) -> dict[str, Any]:
    tensor: dict[str, Any] = manifest["tensors"]["model.first"]
    return tensor


def overlap(manifest: dict[str, Any]) -> None:
    tensor = whole_first(manifest)
    tensor["chunks"].append(dict(tensor["chunks"][0]))


def gap(manifest: dict[str, Any]) -> None:
    chunk = whole_first(manifest)["chunks"][0]
    chunk["shape"][0] -= 1
    chunk["end"] -= 4 * 1000


def share(manifest: dict[str, Any]) -> None:
    other = manifest["tensors"]["optimizer.state.first.exp_avg"]["chunks"][0]
    whole_first(manifest)["chunks"][0].update(begin=other["begin"], end=other["end"])


def huge_file(manifest: dict[str, Any]) -> None:
    manifest["files"][0]["bytes"] = 1 << 60


def huge_tensor(manifest: dict[str, Any]) -> None:
    whole_first(manifest)["shape"] = [1 << 30, 1 << 30]


def huge_chunk(manifest: dict[str, Any]) -> None:
    whole_first(manifest)["chunks"][0]["shape"] = [1 << 60, 1]


def huge_blocks(manifest: dict[str, Any]) -> None:
    manifest["block_bytes"] = 1 << 60


def leave(manifest: dict[str, Any]) -> None:
    manifest["files"][0]["name"] = "../0-0.safetensors"


def leave_absolutely(manifest: dict[str, Any]) -> None:
    manifest["files"][0]["name"] = "/etc/passwd.safetensors"


def other_file(manifest: dict[str, Any]) -> None:
    whole_first(manifest)["chunks"][0]["file"] = 1 << 60


def unknown_type(manifest: dict[str, Any]) -> None:
    whole_first(manifest)["dtype"] = "PICKLE"


def unknown_key(manifest: dict[str, Any]) -> None:
    manifest["more"] = 1


def negative(manifest: dict[str, Any]) -> None:
    whole_first(manifest)["chunks"][0]["begin"] = -1


CLAIMS: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (overlap, "overlap|share bytes"),
    (gap, "cover 1099000 of 1100000"),
    (share, "share bytes"),
    (huge_file, "checksums"),
    (huge_tensor, "too large"),
    (huge_chunk, "leaves its shape"),
    (huge_blocks, "blocks of"),
    (leave, "plain name"),
    (leave_absolutely, "plain name"),
    (other_file, "in file"),
    (unknown_type, "PICKLE"),
    (unknown_key, "more"),
    (negative, "not a manifest|-1"),
]


@pytest.mark.parametrize(("change", "reason"), CLAIMS)
def test_a_manifest_that_contradicts_itself_is_refused(
    change: Callable[[dict[str, Any]], None], reason: str, copy: Path, target: tuple[Big, forebay.AdamW]
) -> None:
    manifest = read_manifest(copy)
    change(manifest)
    seal(copy, manifest)

    def load() -> str:
        # Room for what is there, and for nothing that a manifest might claim.
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
        forebay.checkpoint.Reader(copy).read_metadata()
        return "read"

    assert in_child(load).startswith(f"CheckpointError: {copy}/manifest.json: ")
    refused(copy, target, reason, "manifest.json")


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", "{" * 100_000, '{"a":' * 100_000, '{"block_bytes":1e999}', "\0" * 99]
)
def test_a_manifest_that_is_none_is_refused(text: str, copy: Path, target: tuple[Big, forebay.AdamW]) -> None:
    seal(copy, text)
    refused(copy, target, "not a manifest", "manifest.json")
    (copy / "manifest.json").write_text(text)
    refused(copy, target, "not a manifest", "manifest.json")


def test_links_and_folders_are_no_files(copy: Path, target: tuple[Big, forebay.AdamW]) -> None:
    (file,) = files(copy)
    file.rename(copy.parent / "elsewhere.safetensors")
    file.symlink_to(copy.parent / "elsewhere.safetensors")
    refused(copy, target, "not a file", file.name)
    file.unlink()
    file.mkdir()
    refused(copy, target, "not a file", file.name)
    file.rmdir()
    os.mkfifo(file)
    refused(copy, target, "not a file", file.name)


def test_a_foreign_file_of_the_same_length_is_refused(copy: Path, target: tuple[Big, forebay.AdamW]) -> None:
    (file,) = files(copy)
    other = copy.parent / "other"
    model = Big(5)
    optimizer = forebay.AdamW(model.parameters())
    step(model, optimizer)
    checkpoint.save(other, model, optimizer, extra={"epoch": 4, "rng": torch.zeros(10, dtype=torch.int64)})
    (foreign,) = files(other / "00000001")
    assert foreign.stat().st_size == file.stat().st_size
    shutil.copy(foreign, file)
    with pytest.raises(forebay.CheckpointError, match="damaged") as caught:
        checkpoint.load(copy, *target)
    assert str(file) in str(caught.value)


def test_junk_beside_it_is_ignored(saved: Path, tmp_path: Path, target: tuple[Big, forebay.AdamW]) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "path"))
    (path / "00000001" / "junk.safetensors").write_bytes(b"junk")
    (path / "00000001" / ".DS_Store").write_bytes(b"junk")
    (path / "notes.txt").write_text("mine")
    (path / "00000007").write_text("a file, not a folder")
    (path / "9").mkdir()
    (path / "9" / "manifest.json").write_text("another tool's")
    (path / "0000000x").mkdir()
    assert checkpoint.load(path, *target) is not None
    checkpoint.save(path, *target)
    assert (path / "notes.txt").read_text() == "mine"
    assert (path / "9" / "manifest.json").is_file()


# A checksum that fails in the middle.


def harm_data(copy: Path) -> None:
    (file,) = files(copy)
    flip(file, BLOCK + 1000)


def harmed(copy: Path, model: torch.nn.Module, optimizer: forebay.AdamW) -> None:
    harm_data(copy)
    with pytest.raises(forebay.CheckpointError, match="damaged: block 1"):
        checkpoint.load(copy, model, optimizer)
    before = snapshot(model)
    with pytest.raises(
        forebay.CheckpointError, match=r"cannot be stepped: its last load broke off with: .*0-0\.safetens"
    ):
        step(model, optimizer)
    assert_same(before, snapshot(model))
    with pytest.raises(forebay.CheckpointError, match="cannot be saved"):
        checkpoint.save(copy.parent / "new", model, optimizer)
    assert not (copy.parent / "new").exists()


def reference(saved: Path) -> dict[str, torch.Tensor]:
    model = Big(9)
    optimizer = forebay.AdamW(model.parameters())
    checkpoint.load(saved, model, optimizer)
    return snapshot(model, optimizer)


def test_after_a_failed_checksum_the_optimizer_waits_for_a_good_load(
    copy: Path, saved: Path, target: tuple[Big, forebay.AdamW]
) -> None:
    harmed(copy, *target)
    checkpoint.load(saved, *target)
    assert_same(reference(saved), snapshot(*target))
    step(*target)
    checkpoint.save(copy.parent / "new", *target)


def test_a_plain_dcp_load_distrusts_and_heals_too(copy: Path, saved: Path, target: tuple[Big, forebay.AdamW]) -> None:
    model, optimizer = target

    def load(path: Path) -> None:
        state = get_state_dict(model, optimizer)
        both = {"model": state[0], "optimizer": state[1]}
        dcp.load(both, storage_reader=checkpoint.Reader(path), **ALONE)
        set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])

    harm_data(copy)
    with pytest.raises(dcp.api.CheckpointException, match="damaged"):
        load(copy)
    with pytest.raises(forebay.CheckpointError, match="cannot be stepped"):
        step(*target)
    load(saved)
    assert_same(reference(saved), snapshot(*target))
    step(*target)


def test_a_load_state_dict_heals(copy: Path, target: tuple[Big, forebay.AdamW]) -> None:
    model, optimizer = target
    kept = torch.optim.AdamW(model.parameters()).state_dict()
    harmed(copy, *target)
    optimizer.load_state_dict(kept)
    step(*target)


def test_only_the_optimizer_that_was_loaded_is_distrusted(copy: Path, target: tuple[Big, forebay.AdamW]) -> None:
    other = pair()
    train(*other, range(1))
    harmed(copy, *target)
    train(*other, range(1, 2))


def test_damage_in_what_is_staged_is_found_too(tmp_path: Path) -> None:
    # The weights are of another type here, so they cannot be read straight into place.
    model, optimizer = pair()
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path, model, optimizer)
    (file,) = files(tmp_path / "00000001")
    again = Net(2, torch.bfloat16)
    restored = forebay.AdamW(again.parameters(), master_weights=False)
    flip(file, file.stat().st_size - 1)
    with pytest.raises(forebay.CheckpointError, match="damaged"):
        checkpoint.load(tmp_path, again, restored)
    with pytest.raises(forebay.CheckpointError, match="cannot be stepped"):
        train(again, restored, range(1))


def test_damage_in_extra_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = pair()
    checkpoint.save(tmp_path, model, optimizer, extra={"rng": torch.arange(3 << 20)})
    chunk = read_manifest(tmp_path / "00000001")["tensors"]["extra.rng"]["chunks"][0]
    (file,) = files(tmp_path / "00000001")
    flip(file, (chunk["begin"] + chunk["end"]) // 2)
    again, restored = pair(2)
    train(again, restored, range(2))
    before = snapshot(again, restored)
    with pytest.raises(forebay.CheckpointError, match="damaged"):
        checkpoint.load(tmp_path, again, restored)
    assert_same(before, snapshot(again, restored))
    train(again, restored, range(2, 3))
