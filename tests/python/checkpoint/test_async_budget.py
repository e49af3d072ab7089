"""What a save beside training copies and what it reads where it lies; who waits for that, and how it is counted."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import forebay
from forebay import _core, checkpoint
from forebay.checkpoint import snapshot as _snapshot
from forebay.checkpoint import writer
from support.processes import python
from support.saves import ELEMENTS, PAGE, build, eventually, held, train, values
from support.tensors import assert_same

pytestmark = pytest.mark.usefixtures("no_save_is_left")


# Changes that are no steps.


class Words(torch.nn.Module):
    """An embedding, whose forward pass may change it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(50, 8, max_norm=0.5)


def look_up(model: Words) -> None:
    model.words(torch.arange(50, device=model.words.weight.device))


def in_place(model: Words) -> None:
    with torch.no_grad():
        model.words.weight.mul_(0.5)


def load_into_model(model: Words) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("make", [forebay.AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("change", [look_up, in_place, load_into_model])
def test_a_change_that_is_no_step_is_not_saved(
    change: Any, make: Any, budget: int | None, device: torch.device, tmp_path: Path
) -> None:
    model = Words().to(device)
    optimizers: list[torch.optim.Optimizer] = [make(model.parameters(), lr=0.1)]
    train(model, optimizers, 0)
    kept = values(model, optimizers)
    with held():
        handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=budget)
        change(model)
        assert not torch.equal(model.words.weight.cpu(), kept["words.weight"])
    if budget == 0:
        with pytest.raises(forebay.CheckpointError, match=r"model\.words\.weight was modified .* larger budget"):
            handle.result()
        kept = values(model, optimizers)
        handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=budget)
        train(model, optimizers, 1)
    handle.result()
    checkpoint.load(tmp_path, model, optimizers)
    assert_same(values(model, optimizers), kept)


def test_a_change_of_a_sharded_parameter_is_noticed(tmp_path: Path) -> None:
    code = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import forebay
from support.saves import *
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(64, 64)
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
optimizer = forebay.AdamW(model.parameters())
train(model, [optimizer], 0)
for change in (lambda w: w.mul_(2), lambda w: w.to_local().mul_(2), lambda w: model(torch.ones(64))):
    with held(), torch.no_grad():
        handle = checkpoint.async_save(sys.argv[1], model, optimizer, snapshot_budget_bytes=0)
        change(model.weight)
    try:
        handle.result()
        print("saved")
    except forebay.CheckpointError as error:
        print(error)
dist.destroy_process_group()
"""
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second, third = done.stdout.splitlines()
    assert "model.weight was modified" in first
    assert "model.weight was modified" in second
    assert third == "saved", "a forward pass changes nothing"


@pytest.mark.parametrize("change", ["load_state_dict", "refresh_master_weights"])
def test_state_that_is_not_pinned_waits_too(change: str, device: torch.device, tmp_path: Path) -> None:
    model = torch.nn.Linear(40, 30, dtype=torch.bfloat16, device=device)
    optimizer = forebay.AdamW(model.parameters(), placement="resident")
    train(model, [optimizer], 0)
    other = optimizer.state_dict()
    train(model, [optimizer], 1)
    kept = values(model, [optimizer])
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizer, snapshot_budget_bytes=0)
        gate.open(after_s=0.2)
        getattr(optimizer, change)(*([other] if change == "load_state_dict" else []))
        assert gate.opened.is_set(), "it waits until the old state is written"
        handle.result()
    checkpoint.load(tmp_path, model, optimizer)
    assert_same(values(model, [optimizer]), kept)


def test_the_call_waits_for_what_no_step_holds_back(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(4)
    optimizer = forebay.AdamW(model.parameters())
    with held() as gate:
        gate.open(after_s=0.2)
        handle = checkpoint.async_save(tmp_path, model, optimizer, snapshot_budget_bytes=0)
        assert gate.opened.is_set(), "there was no room to copy the buffers"
        model(torch.randn(8, 4))
        handle.result()
    checkpoint.load(tmp_path, model, optimizer)
    assert model.running_mean is not None
    assert model.running_mean.eq(0).all()
    # They come before what a step holds back.
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizer, snapshot_budget_bytes=40)
        assert handle._snapshot.live.tensors.keys() >= {"model.weight", "model.bias"}
        assert not any("running" in name for name in handle._snapshot.live.tensors)


def test_others_use_the_optimizer_while_its_step_waits_for_the_writer(tmp_path: Path) -> None:
    # The writer needs the GIL to go on: whoever waits for the step must not hold it.
    code = """
import sys, threading
from forebay import checkpoint
from support.saves import ELEMENTS, PAGE, build, held, train

model, optimizers = build()
train(model, optimizers, 0)
with held() as gate:
    # Room for the parameters, and for no page of the state: the step waits in the engine.
    budget = 4 * ELEMENTS + PAGE // 4
    handle = checkpoint.async_save(sys.argv[1], model, optimizers, snapshot_budget_bytes=budget)
    step = threading.Thread(target=train, args=(model, optimizers, 1))
    step.start()
    gate.open(after_s=0.3)
    while step.is_alive():
        assert not optimizers[0].is_closed
        optimizers[0].check_trusted("read")
handle.result()
assert optimizers[0]._engine.stats()["save_stalls"] > 0
"""
    done = python(code, tmp_path, timeout=50)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_forked_child_does_not_wait_for_its_parents_writer(tmp_path: Path) -> None:
    code = """
import os, signal, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch's AdamW does not work in a forked child where it has seen a GPU
from support.saves import *
torch.set_num_threads(1)
model, optimizers = build("torch", sizes=((8, 8),))
train(model, optimizers, 0)
kept = values(model, optimizers)
with held() as gate:
    handle = checkpoint.async_save(sys.argv[1], model, optimizers, snapshot_budget_bytes=0)
    assert gate.reached.wait(20)
    if (child := os.fork()) == 0:
        signal.alarm(10)
        train(model, optimizers, 1)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
handle.result()
checkpoint.load(sys.argv[1], model, optimizers)
assert_same(values(model, optimizers), kept)
"""
    done = python(code, tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr[-2000:]


def test_a_forked_child_loads_while_its_parents_writer_is_at_work(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from support.saves import *
torch.set_num_threads(1)
model, optimizers = build("masters", sizes=((8, 8),))
train(model, optimizers, 0)
checkpoint.save(sys.argv[1] + "/earlier", torch.nn.Linear(8, 8))
with held() as gate:
    handle = checkpoint.async_save(sys.argv[1] + "/now", model, optimizers, snapshot_budget_bytes=0)
    assert gate.reached.wait(20)
    if (child := os.fork()) == 0:
        signal.alarm(10)
        checkpoint.load(sys.argv[1] + "/earlier", torch.nn.Linear(8, 8))
        os._exit(0)
    print(os.waitpid(child, 0)[1])
handle.result()
"""
    done = python(code, tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr[-2000:]


# What the budget is for, and what is counted.


@pytest.mark.parametrize("kind", ["torch", "resident", "f32", "masters", "two"])
def test_all_copies_are_within_the_budget(kind: str, device: torch.device, tmp_path: Path) -> None:
    model, optimizers = build(kind, device=device)
    train(model, optimizers, 0)
    everything = sum(value.nbytes for value in values(model, optimizers).values())
    for budget in (0, 1 << 20, 6 * PAGE, None):
        with held() as gate:
            handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=budget)
            mine = sum(parameter.nbytes for parameter in model.parameters())
            copied = handle.progress()["copied_bytes"]
            if budget is not None:
                assert copied <= handle.progress()["copy_memory_bytes"] <= budget
                gate.open(after_s=0.1)
            train(model, optimizers, 1)
            if budget is None:
                assert handle.progress()["copied_bytes"] >= everything >= mine
                assert handle.progress()["copy_memory_bytes"] <= everything + PAGE
            gate.open()
            handle.result()


def test_many_small_optimizers_share_memory_and_threads(tmp_path: Path) -> None:
    model, _ = build(sizes=((16, 16),) * 12)
    optimizers: list[torch.optim.Optimizer] = [forebay.AdamW([parameter]) for parameter in model.parameters()]
    train(model, optimizers, 0)
    kept = values(model, optimizers)
    with held():
        handle = checkpoint.async_save(tmp_path, model, optimizers)
        train(model, optimizers, 1)
        assert handle.progress()["stalls"] == 0
    handle.result()
    assert handle.progress()["copy_memory_bytes"] <= sum(value.nbytes for value in kept.values()) + PAGE
    checkpoint.load(tmp_path, model, optimizers)
    assert_same(values(model, optimizers), kept)


@pytest.mark.parametrize("budget", [None, 64 << 20])
def test_a_small_optimizer_beside_a_large_one_waits_for_nobody(budget: int | None, tmp_path: Path) -> None:
    model, _ = build(sizes=((1500, 1500), (4,)))
    large, small = model.parameters()
    optimizers: list[torch.optim.Optimizer] = [forebay.AdamW([large]), forebay.AdamW([small])]
    train(model, optimizers, 0)
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=budget)
        # Only for a step that does wait.
        gate.open(after_s=5)
        train(model, optimizers, 1)
        assert not gate.opened.is_set()
        gate.open()
        handle.result()
    assert handle.progress()["stalls"] == 0


def test_memory_is_kept_for_the_next_save_of_several_optimizers(tmp_path: Path) -> None:
    model, _ = build(sizes=((1500, 1500), (4,)))
    optimizers: list[torch.optim.Optimizer] = [forebay.AdamW([parameter]) for parameter in model.parameters()]
    train(model, optimizers, 0)
    checkpoint.release()
    with held():
        handle = checkpoint.async_save(tmp_path, model, optimizers)
        train(model, optimizers, 1)
    handle.result()
    assert eventually(lambda: _core.kept_copy_bytes() >= 8 * 1500 * 1500)
    kept = _core.kept_copy_bytes()
    with held(), mock.patch.object(_snapshot.Snapshot, "copy_ahead"):
        checkpoint.async_save(tmp_path, model, optimizers)
        assert _core.kept_copy_bytes() == kept
    checkpoint.release()
    assert eventually(lambda: _core.kept_copy_bytes() == 0)


def test_two_snapshots_do_not_share_the_memory_of_parameters() -> None:
    # Other tests of this process may have left the memory of other devices.
    checkpoint.release()
    first, second = torch.full((50_000,), 1.0), torch.full((50_000,), 2.0)
    one = _snapshot.Snapshot({"a": first}, [], None)
    other = _snapshot.Snapshot({"a": second}, [], None)
    assert one.state["a"].eq(1).all()
    assert other.state["a"].eq(2).all()
    one.finish()
    other.finish()
    assert len(_snapshot._copies) == 1, "and the memory of one is kept"
    checkpoint.release()


def test_the_optimizer_tells_how_long_it_waited(tmp_path: Path) -> None:
    model, (optimizer,) = build()
    assert isinstance(optimizer, forebay.AdamW)
    train(model, [optimizer], 0)
    for budget in (0, 4 * ELEMENTS + 16):
        with held() as gate:
            handle = checkpoint.async_save(tmp_path, model, optimizer, snapshot_budget_bytes=budget)
            assert bool(handle._snapshot.live.tensors) == (budget == 0)
            gate.open(after_s=0.1)
            train(model, [optimizer], 1)
            stats = optimizer.stats()
            handle.result()
        assert stats["save_stalls"] == handle.progress()["stalls"] > 0
        assert stats["save_stall_s"] == pytest.approx(handle.progress()["stall_s"])
        train(model, [optimizer], 2)
        assert (optimizer.stats()["save_stalls"], optimizer.stats()["save_stall_s"]) == (0, 0.0)


def test_the_rate_of_copies_is_passed_on(tmp_path: Path) -> None:
    model, optimizers = build()
    with mock.patch.object(_snapshot.Snapshot, "copy_ahead") as copy_ahead:
        for gbps in (None, 2.5):
            checkpoint.async_save(tmp_path, model, optimizers, copy_gbps=gbps).result()
    assert [call.args[1] for call in copy_ahead.call_args_list] == [None, 2.5e9]


def test_nothing_is_alive_after_a_save(tmp_path: Path) -> None:
    for budget in (None, 0):
        model, (optimizer,) = build()
        train(model, [optimizer], 0)
        handle = checkpoint.async_save(tmp_path, model, optimizer, snapshot_budget_bytes=budget)
        handle.result()
        gone = [weakref.ref(optimizer), weakref.ref(model[0])]
        del model, optimizer
        gc.collect()
        assert [one() for one in gone] == [None, None]
        del handle


# Memory that is not what it seems.


@pytest.mark.parametrize("budget", [None, 0])
def test_views_of_state_are_of_the_moment_too(
    budget: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, write = threading.Event(), writer.write_state

    def late(*arguments: Any) -> None:
        assert begins.wait(20)
        write(*arguments)

    monkeypatch.setattr(writer, "write_state", late)
    model, optimizers = build()
    train(model, optimizers, 0)
    moment = optimizers[0].state[model[0]]["exp_avg"]
    views = {"columns": moment[:, :100], "turned": moment.t(), "rows": moment[5:], "whole": moment[:7]}
    kept = {name: view.clone() for name, view in views.items()}
    threading.Timer(0.0 if budget == 0 else 1.0, begins.set).start()
    handle = checkpoint.async_save(tmp_path, model, optimizers, extra=views, snapshot_budget_bytes=budget)
    train(model, optimizers, 1, 2)
    begins.set()
    handle.result()
    extra = checkpoint.load(tmp_path, model, optimizers)
    assert extra is not None
    assert_same(extra, kept)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are a GPU's")
@pytest.mark.parametrize("turned", [False, True])
def test_weights_that_a_stream_is_still_changing(turned: bool, tmp_path: Path) -> None:
    model = torch.nn.ParameterList([torch.zeros(300, 400, device="cuda")])
    if turned:
        model[0].data = model[0].data.t()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        torch.cuda._sleep(1_000_000_000)
        model[0].fill_(7)
        handle = checkpoint.async_save(tmp_path, model, optimizer, snapshot_budget_bytes=0)
        assert handle._snapshot.live.tensors
        handle.result()
    torch.cuda.synchronize()
    with torch.no_grad():
        model[0].zero_()
    checkpoint.load(tmp_path, model)
    assert model[0].eq(7).all()
