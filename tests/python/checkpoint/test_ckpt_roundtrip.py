"""Save and load give back the same bits, and training after a load is as if it had never stopped."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay import checkpoint
from support.checkpoint import Net, files, pair, read_manifest, snapshot, train
from support.processes import python_in_silence
from support.tensors import assert_same

if TYPE_CHECKING:
    from pathlib import Path


def groups(model: Net) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": parameters[:2], "lr": 3e-2, "betas": (0.8, 0.95), "weight_decay": 0.3},
        {"params": parameters[2:4], "amsgrad": True, "eps": 1e-4},
        {"params": parameters[4:], "maximize": True},
    ]


VARIANTS: dict[str, Any] = {
    "f32": {},
    "bf16 with masters": {"dtype": torch.bfloat16},
    "bf16 with compact masters": {"dtype": torch.bfloat16, "master_weights": "compact"},
    "resident, with compact masters": {
        "placement": "resident",
        "dtype": torch.bfloat16,
        "master_weights": "compact",
    },
    "f16 with masters": {"dtype": torch.float16},
    "bf16 without masters": {"dtype": torch.bfloat16, "master_weights": False},
    "amsgrad": {"amsgrad": True, "dtype": torch.bfloat16},
    "resident": {"placement": "resident", "dtype": torch.bfloat16},
    "small chunks": {"chunk_bytes": 6 * 64 * 4, "slots": 2},
    "groups": {"groups": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_after_a_load_is_as_if_it_had_never_stopped(variant: str, tmp_path: Path) -> None:
    options = dict(VARIANTS[variant])
    dtype, grouped = options.pop("dtype", torch.float32), options.pop("groups", False)

    def make(seed: int) -> tuple[Net, forebay.AdamW]:
        model = Net(seed, dtype)
        of = groups(model) if grouped else model.parameters()
        return model, forebay.AdamW(of, lr=1e-2, **options)

    model, optimizer = make(1)
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.5
    checkpoint.save(tmp_path, model, optimizer)
    saved = snapshot(model, optimizer)
    train(model, optimizer, range(3, 6))

    again, restored = make(2)
    train(again, restored, range(7, 9))
    assert checkpoint.load(tmp_path, again, restored) is None
    assert_same(saved, snapshot(again, restored))
    assert again.head.weight is again.embed.weight
    train(again, restored, range(3, 6))
    assert_same(snapshot(model, optimizer), snapshot(again, restored))


def test_an_optimizer_that_never_stepped_is_saved_and_loaded(tmp_path: Path) -> None:
    model, optimizer = pair(dtype=torch.bfloat16)
    checkpoint.save(tmp_path, model, optimizer)
    again, restored = pair(2, torch.bfloat16)
    train(again, restored, range(2))
    checkpoint.load(tmp_path, again, restored)
    assert_same(snapshot(model, optimizer), snapshot(again, restored))
    for one, its in ((model, optimizer), (again, restored)):
        train(one, its, range(3))
    assert_same(snapshot(model, optimizer), snapshot(again, restored))


def test_saving_changes_nothing(tmp_path: Path) -> None:
    models = [pair(dtype=torch.bfloat16) for _ in range(2)]
    for i, (model, optimizer) in enumerate(models):
        for step in range(4):
            train(model, optimizer, [step])
            if i == 0:
                checkpoint.save(tmp_path, model, optimizer, keep_last=1)
    assert_same(snapshot(*models[0]), snapshot(*models[1]))


def test_several_optimizers(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[Net, list[forebay.AdamW]]:
        model = Net(seed)
        parameters = list(model.parameters())
        return model, [
            forebay.AdamW(parameters[::2], lr=1e-2, amsgrad=True),
            forebay.AdamW(parameters[1::2], lr=3e-3, betas=(0.5, 0.6)),
        ]

    model, optimizers = make(1)
    train(model, optimizers, range(3))
    checkpoint.save(tmp_path, model, optimizers)
    again, restored = make(2)
    checkpoint.load(tmp_path, again, restored)
    assert_same(snapshot(model, optimizers), snapshot(again, restored))
    for one, its in ((model, optimizers), (again, restored)):
        train(one, its, range(3, 6))
    assert_same(snapshot(model, optimizers), snapshot(again, restored))


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    model, optimizer = pair(lr=torch.tensor(3e-2))
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path, model, optimizer)
    again, restored = pair(2, lr=torch.tensor(1.0))
    checkpoint.load(tmp_path, again, restored)
    assert restored.param_groups[0]["lr"] == torch.tensor(3e-2)
    for one, its in ((model, optimizer), (again, restored)):
        train(one, its, range(2, 4))
    assert_same(snapshot(model, optimizer), snapshot(again, restored))


def test_a_model_alone_and_its_part_of_a_whole_checkpoint(tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path / "alone", model)
    checkpoint.save(tmp_path / "whole", model, optimizer)
    for name in ("alone", "whole"):
        again = Net(2)
        checkpoint.load(tmp_path / name, again)
        assert_same(snapshot(model), snapshot(again))


def test_every_type_of_tensor(tmp_path: Path) -> None:
    types = [torch.float64, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    types += [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
    raw = torch.arange(1, 65, dtype=torch.uint8)
    tensors = {str(dtype): raw.clone() % 2 > 0 if dtype == torch.bool else raw.clone().view(dtype) for dtype in types}
    tensors |= {"conjugate": torch.view_as_complex(torch.randn(3, 2)).conj(), "expanded": torch.ones(1).expand(5)}
    checkpoint.save(tmp_path, None, extra=tensors)
    extra = checkpoint.load(tmp_path, None)
    assert extra is not None
    assert list(extra) == list(tensors)
    for name, tensor in tensors.items():
        assert extra[name].dtype == tensor.dtype
        same = tensor.resolve_conj().contiguous().view(torch.uint8), extra[name].contiguous().view(torch.uint8)
        assert torch.equal(*same), name


def test_nan_and_negative_zero_keep_their_bits(tmp_path: Path) -> None:
    model, optimizer = pair()
    with torch.no_grad():
        model.body.weight[0, :4] = torch.tensor([float("nan"), -0.0, float("inf"), float("-inf")])
        model.body.weight.view(torch.int32)[1, 0] = 0x7FC12345
    checkpoint.save(tmp_path, model, optimizer)
    again, restored = pair(2)
    checkpoint.load(tmp_path, again, restored)
    assert_same(snapshot(model, optimizer), snapshot(again, restored))


def test_without_a_process_group_nothing_warns(tmp_path: Path) -> None:
    code = """
import sys, torch
from support.checkpoint import pair, snapshot, train
from support.tensors import assert_same
from forebay import checkpoint
model, optimizer = pair()
train(model, optimizer, range(2))
checkpoint.save(sys.argv[1], model, optimizer, extra={"epoch": 3})
before = snapshot(model, optimizer)
again, restored = pair(2)
assert checkpoint.load(sys.argv[1], again, restored) == {"epoch": 3}
assert_same(before, snapshot(again, restored))
assert not torch.distributed.is_initialized()
"""
    assert python_in_silence(code, tmp_path) == ""


def test_other_tools_open_the_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = pair(dtype=torch.bfloat16)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path, model, optimizer)
    (file,) = files(tmp_path / "00000001")
    found = safetensors.load_file(file)
    for name, value in model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], value), name
    assert torch.equal(found["optimizer.state.body.weight.exp_avg"], optimizer.state[model.body.weight]["exp_avg"])
    assert found.keys() == read_manifest(tmp_path / "00000001")["tensors"].keys()


def test_there_is_no_pickle_on_the_disk(tmp_path: Path) -> None:
    model, optimizer = pair()
    checkpoint.save(tmp_path, model, optimizer, extra={"values": [1, (2, b"3")]})
    assert {file.name for file in (tmp_path / "00000001").iterdir()} == {"0-0.safetensors", "manifest.json"}
    read_manifest(tmp_path / "00000001")  # It is JSON.


def test_a_state_dict_still_goes_through_torch_load(tmp_path: Path) -> None:
    model, optimizer = pair(dtype=torch.bfloat16)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path, model, optimizer)
    again, restored = pair(2, torch.bfloat16)
    checkpoint.load(tmp_path, again, restored)
    stream = io.BytesIO()
    torch.save({"model": again.state_dict(), "optimizer": restored.state_dict()}, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    third, optimizer3 = pair(3, torch.bfloat16)
    third.load_state_dict(loaded["model"])
    optimizer3.load_state_dict(loaded["optimizer"])
    assert_same(snapshot(model, optimizer), snapshot(third, optimizer3))
