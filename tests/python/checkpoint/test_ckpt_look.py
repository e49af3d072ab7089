"""What is in a folder of checkpoints, without a model: latest, exists, inspect, verify, export_weights."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING

import pytest
import safetensors
import torch
from safetensors.torch import load_file

import forebay
from forebay import checkpoint
from support.checkpoint import Net, folders, train
from support.hugging_face import tiny

if TYPE_CHECKING:
    from pathlib import Path


def trained(dtype: torch.dtype = torch.float32) -> tuple[Net, forebay.AdamW]:
    model = Net(dtype=dtype)
    optimizer = forebay.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    return model, optimizer


def test_latest_is_the_last_complete_one(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert checkpoint.latest(path) is None
    assert not checkpoint.exists(path)
    for step in range(2):
        checkpoint.save(path, None, extra={"step": step})
    first, second = (path / name for name in folders(path))
    assert checkpoint.latest(path) == second
    assert checkpoint.latest(str(first)) == first
    assert checkpoint.exists(path)
    (second / "manifest.json").unlink()
    assert checkpoint.latest(path) == first
    (first / "manifest.json").unlink()
    assert checkpoint.latest(path) is None
    assert not checkpoint.exists(path)


def test_a_path_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert not checkpoint.exists(tmp_path / "nowhere" / "deep")
    (tmp_path / "file").write_text("")
    assert not checkpoint.exists(tmp_path / "file")
    with pytest.raises(forebay.OptionError, match="invalid path"):
        checkpoint.exists(3)  # type: ignore[arg-type]
    loop = tmp_path / "loop"
    os.symlink(loop, loop)
    with pytest.raises(forebay.StorageError):
        checkpoint.latest(loop)


def test_inspect_says_what_is_in_it(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path, model, optimizer, extra={"epoch": 3})
    found = checkpoint.inspect(tmp_path)
    assert found["path"] == str(tmp_path / folders(tmp_path)[-1])
    assert found["step"] == 2
    assert found["objects"]["extra"] == {"epoch": 3}
    assert found["groups"][0]["lr"] == 1e-2
    shapes = {tensor["name"]: tensor["shape"] for tensor in found["tensors"]}
    assert shapes["model.body.weight"] == [8, 8]
    assert found["tensor_bytes"] == sum(tensor["bytes"] for tensor in found["tensors"])


def test_verify_names_every_problem(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path, model, optimizer)
    assert checkpoint.verify(tmp_path) == checkpoint.inspect(tmp_path)["file_bytes"]
    file = next((tmp_path / folders(tmp_path)[-1]).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(forebay.CheckpointError, match=r"damaged: .*checksum") as caught:
        checkpoint.verify(tmp_path)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0][0].endswith(file.name)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)
    with pytest.raises(forebay.CheckpointError):
        checkpoint.export_weights(tmp_path, tmp_path / "weights.safetensors")
    assert not (tmp_path / "weights.safetensors").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exported_weights_are_the_models(dtype: torch.dtype, tmp_path: Path) -> None:
    model, optimizer = trained(dtype)
    checkpoint.save(tmp_path / "run", model, optimizer, extra={"t": torch.ones(2)})
    file = checkpoint.export_weights(tmp_path / "run", tmp_path / "weights.safetensors")
    found = load_file(file)
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_what_has_no_weights_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "run", None, extra={"t": torch.ones(2)})
    with pytest.raises(forebay.CheckpointError, match="it has no weights"):
        checkpoint.export_weights(tmp_path / "run", tmp_path / "weights.safetensors")


def test_from_pretrained_loads_exported_weights(tmp_path: Path) -> None:
    model = tiny()
    optimizer = forebay.AdamW(model.parameters())
    checkpoint.save(tmp_path / "run", model, optimizer)
    (tmp_path / "out").mkdir()
    model.config.save_pretrained(tmp_path / "out")
    assert checkpoint.export_weights(tmp_path / "run", tmp_path / "out").name == "model.safetensors"
    again, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
