"""A checkpoint of forebay's AdamW loads into torch's and the reverse; DCP's own calls work with the storage plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import forebay
from forebay import checkpoint
from support.checkpoint import ALONE, Net, folders, pair, snapshot, train
from support.tensors import assert_same

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP's own calls say so.


def torch_pair(seed: int, dtype: torch.dtype, **options: Any) -> tuple[Net, torch.optim.AdamW]:
    model = Net(seed, dtype)
    return model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def state_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the moments and steps by name, of parameters that have had a gradient."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    kinds = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    return {
        f"{names[parameter]}.{kind}": state[kind].detach().clone()
        for parameter, state in optimizer.state.items()
        for kind in kinds
        if kind in state and names[parameter] != "unused"
    }


@pytest.mark.parametrize("amsgrad", [False, True])
def test_from_forebay_to_torch_and_back(amsgrad: bool, tmp_path: Path) -> None:
    model, optimizer = pair(amsgrad=amsgrad, betas=(0.8, 0.9))
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path / "a", model, optimizer)
    other, theirs = torch_pair(2, torch.float32, amsgrad=amsgrad)
    checkpoint.load(tmp_path / "a", other, theirs)
    assert_same(snapshot(model), snapshot(other))
    assert_same(state_of(optimizer, model), state_of(theirs, other))
    assert theirs.param_groups[0]["betas"] == (0.8, 0.9)
    train(other, theirs, range(3, 5))
    checkpoint.save(tmp_path / "b", other, theirs)
    back, again = pair(3, amsgrad=amsgrad)
    checkpoint.load(tmp_path / "b", back, again)
    assert_same(snapshot(other), snapshot(back))
    assert_same(state_of(theirs, other), state_of(again, back))
    train(back, again, range(5, 6))


def test_masters_that_torch_does_not_have_are_made_from_the_weights(tmp_path: Path) -> None:
    model, theirs = torch_pair(1, torch.bfloat16)
    train(model, theirs, range(3))
    assert theirs.state[model.body.weight]["exp_avg"].dtype == torch.bfloat16
    checkpoint.save(tmp_path, model, theirs)
    again, restored = pair(2, torch.bfloat16)
    train(again, restored, range(2))
    checkpoint.load(tmp_path, again, restored)
    for name, parameter in again.named_parameters():
        if not parameter.requires_grad:
            continue
        state = restored.state[parameter]
        assert torch.equal(state["master_param"], parameter.detach().float()), name
        assert state["exp_avg"].dtype == torch.float32
        if name != "unused":
            theirs_of = theirs.state[dict(model.named_parameters())[name]]
            assert torch.equal(state["exp_avg"], theirs_of["exp_avg"].float()), name
            assert torch.equal(state["exp_avg_sq"], theirs_of["exp_avg_sq"].float()), name
            assert state["step"] == 3
        else:
            assert not state["exp_avg"].any()
            assert state["step"] == 0
    train(again, restored, range(3, 4))


def test_masters_do_not_disturb_torch(tmp_path: Path) -> None:
    model, optimizer = pair(dtype=torch.bfloat16)
    train(model, optimizer, range(3))
    checkpoint.save(tmp_path, model, optimizer)
    other, theirs = torch_pair(2, torch.bfloat16)
    checkpoint.load(tmp_path, other, theirs)
    assert_same(snapshot(model), snapshot(other))
    moment = theirs.state[other.body.weight]["exp_avg"]
    assert torch.equal(moment, optimizer.state[model.body.weight]["exp_avg"].to(moment.dtype))
    assert "master_param" not in theirs.state[other.body.weight]
    train(other, theirs, range(3, 4))


def test_state_that_the_checkpoint_does_not_have_starts_anew(tmp_path: Path) -> None:
    # torch's optimizer has no state before its first step.
    model = Net(1)
    checkpoint.save(tmp_path, model)
    again, restored = pair(2)
    train(again, restored, range(3))
    checkpoint.load(tmp_path, again, restored, strict=False)
    fresh, its = pair(1)
    for one, of in ((again, restored), (fresh, its)):
        train(one, of, range(3))
    kept, expected = state_of(restored, again), state_of(its, fresh)
    assert_same(expected, kept)


# DCP's own calls.


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "epoch": 3, "shape": (1, 2.5)}


def test_under_plain_dcp(tmp_path: Path) -> None:
    model, optimizer = pair(dtype=torch.bfloat16)
    train(model, optimizer, range(3))
    dcp.save(whole_state(model, optimizer), storage_writer=checkpoint.Writer(tmp_path, threads=2, keep_last=1))
    again, restored = pair(2, torch.bfloat16)
    state = {**whole_state(again, restored), "epoch": 0, "shape": ()}
    dcp.load(state, storage_reader=checkpoint.Reader(tmp_path, threads=2))
    set_state_dict(again, restored, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert (state["epoch"], state["shape"]) == (3, (1, 2.5))
    assert_same(snapshot(model, optimizer), snapshot(again, restored))
    # What DCP writes and what `load` reads is the same.
    third, its = pair(3, torch.bfloat16)
    checkpoint.load(tmp_path, third, its)
    assert_same(snapshot(model, optimizer), snapshot(third, its))


def test_a_writer_may_be_used_again_and_at_another_path(tmp_path: Path) -> None:
    writer = checkpoint.Writer(tmp_path / "a")
    for number in range(2):
        dcp.save({"w": torch.full((3,), number)}, storage_writer=writer, **ALONE)
    dcp.save({"w": torch.full((3,), 7)}, checkpoint_id=tmp_path / "b", storage_writer=writer, **ALONE)
    assert (folders(tmp_path / "a"), folders(tmp_path / "b")) == (["00000001", "00000002"], ["00000001"])
    reader = checkpoint.Reader(tmp_path / "a")
    state = {"w": torch.zeros(3, dtype=torch.int64)}
    dcp.load(state, storage_reader=reader, **ALONE)
    assert state["w"].tolist() == [1, 1, 1]
    dcp.load(state, checkpoint_id=tmp_path / "b", storage_reader=reader, **ALONE)
    assert state["w"].tolist() == [7, 7, 7]


def test_a_partial_load_reads_what_is_asked_for(tmp_path: Path) -> None:
    model, optimizer = pair()
    train(model, optimizer, range(2))
    dcp.save(whole_state(model, optimizer), storage_writer=checkpoint.Writer(tmp_path), **ALONE)
    weight = torch.zeros(8, 8)
    state = {"model": {"body.weight": weight, "new.weight": torch.ones(2)}}
    with pytest.raises(dcp.api.CheckpointException, match=r"model\.new\.weight"):
        dcp.load(state, storage_reader=checkpoint.Reader(tmp_path), **ALONE)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=checkpoint.Reader(tmp_path), planner=planner, **ALONE)
    assert torch.equal(weight, model.body.weight)
    assert state["model"]["new.weight"].tolist() == [1, 1]


def test_a_load_casts_and_follows_strides(tmp_path: Path) -> None:
    source = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    dcp.save({"w": source}, storage_writer=checkpoint.Writer(tmp_path), **ALONE)
    wide = torch.zeros(6, 8)
    targets = [
        torch.zeros(3, 4, dtype=torch.bfloat16),
        torch.zeros(3, 4, dtype=torch.float64),
        torch.zeros(4, 3).t(),
        wide[::2, 1:8:2],
    ]
    for target in targets:
        dcp.load({"w": target}, storage_reader=checkpoint.Reader(tmp_path), **ALONE)
        assert torch.equal(target.float(), source)
    assert wide.sum() == source.sum()


def test_another_shape_is_refused_by_dcp_and_changes_nothing(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3, 4), "v": torch.ones(2)}, storage_writer=checkpoint.Writer(tmp_path), **ALONE)
    state = {"v": torch.zeros(2), "w": torch.zeros(4, 3)}
    with pytest.raises((ValueError, dcp.api.CheckpointException), match="w"):
        dcp.load(state, storage_reader=checkpoint.Reader(tmp_path), **ALONE)
    assert not state["v"].any()


@pytest.mark.parametrize("make", [checkpoint.Writer, checkpoint.Reader])
def test_threads_have_to_be_a_number(make: Any, tmp_path: Path) -> None:
    for threads in (0, 1.5, True):
        with pytest.raises(forebay.OptionError, match="threads"):
            make(tmp_path, threads=threads)


def test_a_type_that_safetensors_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(forebay.CheckpointError, match=r"extra\.z is of type torch\.complex128"):
        checkpoint.save(tmp_path, None, extra={"z": torch.zeros(2, dtype=torch.complex128)})
