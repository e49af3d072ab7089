"""What else belongs to a run: every kind of value comes back as it was, and what cannot be kept is refused by name."""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import forebay
from forebay import checkpoint
from support.checkpoint import folders, read_manifest, seal

if TYPE_CHECKING:
    from pathlib import Path


def returned(path: Path, extra: dict[str, Any]) -> Any:
    checkpoint.save(path, None, extra=extra)
    return checkpoint.load(path, None)


VALUES: dict[str, Any] = {
    "none": None,
    "booleans": [True, False],
    "numbers": [0, -1, 1.5, 1e-320, -0.0, 0.1, 2**53 + 1],
    "big": [2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**40],
    "infinite": [math.inf, -math.inf],
    "texts": ["", "ä\n\"\0'", "\U0001f600", "$"],
    "bytes": [b"", bytes(range(256))],
    "tuples": ((), (1, (2, [3])), [(4,)]),
    "lists": [[], [[]], [[1], [2, [3]]]],
    "empty": {"dict": {}, "list": [], "tuple": ()},
    "keys": {1: "int", "1": "text", None: 0, (1, 2): 3, 2.5: 4},
    "order": {"b": 1, "a": 2, "$": 3},
    "dotted": {"a.b": 1, "a": {"b": 2}},
    "tag": {"$": "tuple", "value": [1]},
    "types": [torch.float32, torch.bfloat16, torch.int8],
    "devices": [torch.device("cpu"), torch.device("cuda", 3)],
    "size": torch.Size([2, 3]),
    "complex": [1 + 2j, complex(0.0, -0.0)],
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "counter": collections.Counter({3: 2, 1: 1}),
}


def shown(value: Any) -> str:
    """Return a value as text that also shows types, signs of zero and the order of keys."""
    return f"{type(value).__name__} {value!r}"


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    assert shown(returned(tmp_path, {"value": VALUES[kind]})["value"]) == shown(VALUES[kind])


def test_all_of_them_together(tmp_path: Path) -> None:
    assert shown(returned(tmp_path, VALUES)) == shown(VALUES)


def test_nothing_and_none_are_not_the_same(tmp_path: Path) -> None:
    assert returned(tmp_path / "a", {}) == {}
    checkpoint.save(tmp_path / "b", None)
    assert checkpoint.load(tmp_path / "b", None) is None


def test_nan_comes_back(tmp_path: Path) -> None:
    assert math.isnan(returned(tmp_path, {"loss": math.nan})["loss"])


def test_tensors_stay_tensors_wherever_they_stand(tmp_path: Path) -> None:
    extra = {
        "rng": torch.get_rng_state(),
        "list": [torch.arange(3), 1, [torch.tensor(True)]],
        "tuple": (torch.tensor(1.5), {"deep": [torch.zeros(0, 4)]}),
        "a.b": torch.tensor([1]),
        "a": {"b": torch.tensor([2])},
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "positions": {0: torch.tensor([7.0])},
    }
    back = returned(tmp_path, extra)
    assert back.keys() == extra.keys()
    assert torch.equal(back["rng"], extra["rng"])
    assert torch.equal(back["list"][0], torch.arange(3))
    assert back["list"][1] == 1
    assert back["list"][2][0].dtype == torch.bool
    assert type(back["tuple"]) is tuple
    assert torch.equal(back["tuple"][0], torch.tensor(1.5))
    assert back["tuple"][1]["deep"][0].shape == (0, 4)
    assert back["a.b"].tolist() == [1]
    assert back["a"]["b"].tolist() == [2]
    assert torch.equal(back["transposed"], extra["transposed"])
    assert list(back["positions"]) == [0]
    assert "extra.rng" in read_manifest(tmp_path / "00000001")["tensors"]


def test_scalars_of_numpy_become_pythons(tmp_path: Path) -> None:
    given = {"a": np.float64(0.1), "b": np.int32(7), "c": np.bool_(True), "d": np.str_("x"), np.str_("e"): 1}
    assert shown(returned(tmp_path, given)) == shown({"a": 0.1, "b": 7, "c": True, "d": "x", "e": 1})


ARRAYS: dict[str, Any] = {
    "f4": np.arange(6, dtype=np.float32).reshape(2, 3),
    "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
    "reversed": np.arange(5)[::-1],
    "empty": np.zeros((0, 3), dtype=np.int16),
    "scalar array": np.array(2.5),
    "unsigned": np.arange(3, dtype=np.uint32),
    "booleans": np.array([True, False]),
    "big endian": np.arange(3, dtype=">f4"),
    "texts": np.array(["a", "bc"]),
    "times": np.array(["2026-01-02"], dtype="datetime64[D]"),
    "long": np.arange(3, dtype=np.longdouble),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_of_numpy_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    array = ARRAYS[kind]
    array.setflags(write=False)
    back = returned(tmp_path, {"a": [array], "one": 1})["a"][0]
    assert type(back) is np.ndarray
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


def test_numpys_random_state_comes_back(tmp_path: Path) -> None:
    old, new = np.random.RandomState(3), np.random.default_rng(3)
    state = returned(tmp_path, {"old": old.get_state(), "new": new.bit_generator.state})
    again, fresh = np.random.RandomState(4), np.random.default_rng(4)
    again.set_state(state["old"])
    fresh.bit_generator.state = state["new"]
    assert again.random() == old.random()
    assert fresh.random() == new.random()


def test_an_array_may_change_after_the_call(tmp_path: Path) -> None:
    array = np.zeros(1000)
    save = checkpoint.async_save(tmp_path, None, extra={"a": array}, write_gbps=1e-4)
    array[:] = 1
    save.result()
    back = checkpoint.load(tmp_path, None)
    assert back is not None
    assert not back["a"].any()


def test_a_schedulers_state_comes_back(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = forebay.AdamW([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 2, 5])
    assert returned(tmp_path, {"scheduler": scheduler.state_dict()})["scheduler"] == scheduler.state_dict()


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (lambda: 0, "function"),
        (object(), "object"),
        ({1, 2}, "set"),
        (range(3), "range"),
        (np.array([object()]), "ndarray"),
        (np.zeros(2, dtype=[("a", "f4")]), "ndarray"),
        (np.ma.zeros(2), "MaskedArray"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(value: object, type_name: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, None, extra={"good": 1})
    with pytest.raises(forebay.CheckpointError, match=rf"extra\.outer\.1\.inner is a .*{type_name}"):
        checkpoint.save(tmp_path, None, extra={"outer": [0, {"inner": value}]})
    assert checkpoint.load(tmp_path, None) == {"good": 1}
    checkpoint.save(tmp_path, None, extra={"good": 2})
    assert checkpoint.load(tmp_path, None) == {"good": 2}
    assert len(folders(tmp_path)) == 2


def saved_beside(*arguments: Any, **named: Any) -> None:
    checkpoint.async_save(*arguments, **named).result()


@pytest.mark.parametrize("save", [checkpoint.save, saved_beside])
@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.eye(3).to_sparse(), r"has layout torch\.sparse_coo"),
        (torch.empty(3, device="meta"), "is on the device meta and has no data"),
    ],
)
def test_a_tensor_that_is_not_dense_is_refused_by_name(
    value: torch.Tensor, what: str, save: Any, tmp_path: Path
) -> None:
    with pytest.raises(forebay.CheckpointError, match=rf"extra\.masks\.1 {what}"):
        save(tmp_path, None, extra={"masks": [0, value]})


@pytest.mark.parametrize(
    "value",
    [
        {"$": "tensor", "value": "extra.absent"},
        {"$": "tensor", "value": 3},
        {"$": "function", "value": "os.system"},
        {"$": "dtype", "value": "load"},
        {"$": "scalar", "value": 1, "dtype": "nonsense"},
        {"$": "dict", "value": [[[1], 2]]},
        {"$": "bytes", "value": "!"},
        {"$": "int", "value": "x"},
        {"$": {}},
    ],
)
def test_a_value_that_is_nonsense_is_refused(value: Any, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, None, extra={"value": 1})
    manifest = read_manifest(tmp_path / "00000001")
    manifest["objects"]["extra"] = {"value": value}
    seal(tmp_path / "00000001", manifest)
    with pytest.raises(forebay.CheckpointError):
        checkpoint.load(tmp_path, None)
