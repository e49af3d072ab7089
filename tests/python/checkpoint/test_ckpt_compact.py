"""Checkpoints of compact masters: f32 in the files, so that either format loads into either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay import _core, checkpoint
from forebay.checkpoint import writer
from forebay.optim.packed import CompactMaster
from support.checkpoint import Net, files, folders, pair, read_manifest, snapshot, train
from support.tensors import assert_same, random

if TYPE_CHECKING:
    from pathlib import Path

BF16 = torch.bfloat16
KINDS = ("compact", True)


@pytest.mark.parametrize("placed", ["stream", "host", "resident"])
@pytest.mark.parametrize("loads", KINDS, ids=str)
@pytest.mark.parametrize("saves", KINDS, ids=str)
@pytest.mark.parametrize("waits", [True, False], ids=["save", "async_save"])
def test_either_format_loads_into_either(saves: Any, loads: Any, placed: str, waits: bool, tmp_path: Path) -> None:
    model, optimizer = pair(1, BF16, master_weights=saves, placement=placed)
    train(model, optimizer, range(3))
    if waits:
        checkpoint.save(tmp_path, model, optimizer)
        saved = snapshot(model, optimizer)
    else:
        saved = snapshot(model, optimizer)
        handle = checkpoint.async_save(tmp_path, model, optimizer)
        # What is saved is the state of the call.
        train(model, optimizer, range(20, 22))
        handle.result()
        checkpoint.load(tmp_path, model, optimizer)
        assert_same(snapshot(model, optimizer), saved)
    again, restored = pair(2, BF16, master_weights=loads, placement=placed)
    train(again, restored, range(7, 9))
    checkpoint.load(tmp_path, again, restored)
    assert_same(snapshot(again, restored), saved)
    for step in (3, 4):
        train(model, optimizer, [step])
        train(again, restored, [step])
    assert_same(snapshot(again, restored), snapshot(model, optimizer))


def test_the_files_have_f32_masters(tmp_path: Path) -> None:
    found = []
    for kind in KINDS:
        model, optimizer = pair(1, BF16, master_weights=kind)
        train(model, optimizer, range(3))
        checkpoint.save(tmp_path / str(kind), model, optimizer)
        folder = tmp_path / str(kind) / folders(tmp_path / str(kind))[-1]
        manifest = read_manifest(folder)
        assert manifest["tensors"]["optimizer.state.embed.weight.master_param"]["dtype"] == "F32"
        about = {name: (of["dtype"], of["shape"]) for name, of in manifest["tensors"].items()}
        found.append((about, manifest["paths"], manifest["objects"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("placed", ["stream", "resident"])
def test_a_save_makes_f32_masters_a_part_at_a_time(
    placed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = pair(1, BF16, master_weights="compact", placement=placed)
    train(model, optimizer, range(3))
    write, calls = _core.write_checkpoint, []

    def counted(folder: Any, prefix: str, entries: dict[str, Any], *others: Any) -> Any:
        calls.append([name for name in entries["name"] if name.endswith("master_param")])
        return write(folder, prefix, entries, *others)

    monkeypatch.setattr(_core, "write_checkpoint", counted)
    monkeypatch.setattr(writer, "PART_BYTES", 1)
    checkpoint.save(tmp_path, model, optimizer)
    masters = sum(p.requires_grad and p.numel() > 0 for p in model.parameters())
    assert [len(names) for names in calls[:-1]] == [1] * masters
    # The empty parameter has no memory to save.
    assert calls[-1] == ["optimizer.state.nothing.master_param"]
    saved = snapshot(model, optimizer)
    again, restored = pair(2, BF16, master_weights="compact", placement=placed)
    checkpoint.load(tmp_path, again, restored)
    assert_same(snapshot(again, restored), saved)


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_parts_of_a_master_are_kept_in_any_order(turned: bool) -> None:
    master = random((13, 7), 1)
    master.view(torch.int32)[3, 4] = 0x3F80_8000
    parameter = torch.nn.Parameter(master.to(BF16).t().contiguous().t() if turned else master.to(BF16))
    kept = CompactMaster.resident(parameter)
    for rows, columns in (((5, 13), (0, 7)), ((0, 5), (3, 7)), ((0, 5), (0, 3))):
        values = master[slice(*rows), slice(*columns)].clone()
        kept.write_part((rows[0], columns[0]), values)
    assert torch.equal(kept.read(), master)


def test_a_load_that_breaks_off_makes_the_state_distrusted(tmp_path: Path) -> None:
    def make() -> tuple[Net, forebay.SGD]:
        model = Net(1, BF16)
        return model, forebay.SGD(model.parameters(), lr=1e-2, master_weights="compact")

    model, optimizer = make()
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path, model, optimizer)
    damaged = next(file for file in files(tmp_path / folders(tmp_path)[-1]) if "packed" in file.name)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    again, restored = make()
    train(again, restored, range(1))
    with pytest.raises(forebay.CheckpointError, match="damaged"):
        checkpoint.load(tmp_path, again, restored)
    with pytest.raises(forebay.CheckpointError, match="cannot be stepped"):
        restored.step()


def test_masters_that_a_checkpoint_lacks_are_their_weights(tmp_path: Path) -> None:
    model, optimizer = pair(1, BF16, master_weights=False)
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path, model, optimizer)
    again, restored = pair(2, BF16, master_weights="compact")
    train(again, restored, range(7, 9))
    checkpoint.load(tmp_path, again, restored)
    for parameter, state in restored.state.items():
        assert torch.equal(state["master_param"], parameter.detach().float())


class Two(torch.nn.Module):
    """Two parameters, of which one is in the checkpoint with a master."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.nn.Parameter(torch.linspace(0.1, 3.0, 300).to(BF16))
        self.bare = torch.nn.Parameter(torch.linspace(-3.0, 0.1, 200).to(BF16))


def test_masters_that_a_checkpoint_has_stay_when_it_lacks_others(tmp_path: Path) -> None:
    def run(*kinds: Any) -> tuple[Two, list[forebay.AdamW]]:
        model = Two()
        of = zip((model.kept, model.bare), kinds, strict=True)
        optimizers = [forebay.AdamW([parameter], lr=1e-2, master_weights=kind) for parameter, kind in of]
        for step in range(3):
            for i, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, (step + i) / 4 - 0.3)
            for optimizer in optimizers:
                optimizer.step()
        return model, optimizers

    model, optimizers = run("compact", False)
    checkpoint.save(tmp_path, model, optimizers)
    expected = optimizers[0].state[model.kept]["master_param"]
    assert not torch.equal(expected, model.kept.detach().float())
    again, restored = run("compact", "compact")
    checkpoint.load(tmp_path, again, restored)
    assert torch.equal(restored[0].state[again.kept]["master_param"], expected)
    assert torch.equal(restored[1].state[again.bare]["master_param"], again.bare.detach().float())


def test_torch_loads_them(tmp_path: Path) -> None:
    model, optimizer = pair(1, BF16, master_weights="compact")
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path, model, optimizer)
    again = Net(2, BF16)
    theirs = torch.optim.AdamW(again.parameters(), lr=1e-2)
    checkpoint.load(tmp_path, again, theirs)
    names = dict(again.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(names[name].detach(), parameter.detach())
