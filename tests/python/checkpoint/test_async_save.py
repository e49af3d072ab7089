"""An asynchronous save is of the moment of its call, whatever training does meanwhile."""

from __future__ import annotations

import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay import _core, checkpoint
from forebay.checkpoint import writer
from forebay.optim.second import open_second
from support.optim import move_over
from support.processes import python
from support.saves import (
    ELEMENTS,
    PAGE,
    RUNS,
    assert_holds,
    build,
    end_of_saves,
    eventually,
    held,
    threads_of_saves,
    train,
    values,
)
from support.tensors import assert_same

BUDGETS = {"none": None, "small": 4 * ELEMENTS + PAGE, "no": 0}


pytestmark = pytest.mark.usefixtures("no_save_is_left")


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", RUNS)
def test_the_moment_of_the_call_is_saved(kind: str, budget: str, device: torch.device, tmp_path: Path) -> None:
    model, optimizers = build(kind, device=device)
    train(model, optimizers, 0, 1)
    kept = values(model, optimizers)
    with held() as gate:
        handle = checkpoint.async_save(
            tmp_path, model, optimizers, extra={"step": 2}, snapshot_budget_bytes=BUDGETS[budget]
        )
        if budget != "none":
            gate.open(after_s=0.1)
        train(model, optimizers, 2, 3)
        if budget == "none":
            assert not handle.done(), "with room for everything no step waits"
        gate.open()
        handle.result()
    assert_holds(tmp_path, kind, kept, {"step": 2}, device)
    twin, its = build(kind, device=device)
    train(twin, its, 0, 1, 2, 3)
    assert_same(values(model, optimizers), values(twin, its))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["f32", "masters", "two"])
def test_the_copy_that_was_the_state_is_saved(kind: str, budget: str, device: torch.device, tmp_path: Path) -> None:
    model, optimizers = build(kind, device=device)
    train(model, optimizers, 0, 1)
    for one in optimizers:
        open_second(one)
    kept = values(model, optimizers)
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=BUDGETS[budget])
        for one in optimizers:
            move_over(one, change=1.0)
        # The optimizers' own tensors are over the other copy now.
        moved = values(model, optimizers)
        assert not torch.equal(moved["0.exp_avg"], kept["0.exp_avg"])
        gate.open()
        handle.result()
    assert_holds(tmp_path, kind, kept, device=device)
    assert_same(values(model, optimizers), moved)


def test_each_of_many_saves_is_of_its_own_moment(tmp_path: Path) -> None:
    model, optimizers = build()
    kept = []
    for step in range(6):
        train(model, optimizers, step)
        kept.append(values(model, optimizers))
        checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=[None, 0, 3 * PAGE][step % 3])
    end_of_saves()
    for number, expected in enumerate(kept, 1):
        assert_holds(tmp_path / f"{number:08}", "f32", expected)


def test_extra_and_rates_are_of_the_moment_too(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    extra = {"tensor": torch.arange(5), "list": [1, 2]}
    with held():
        handle = checkpoint.async_save(tmp_path, model, optimizers, extra=extra)
        extra["tensor"].zero_()
        extra["list"].append(3)
        optimizers[0].param_groups[0]["lr"] = 0.5
    handle.result()
    twin, its = build()
    loaded = checkpoint.load(tmp_path, twin, its)
    assert loaded is not None
    assert loaded["tensor"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["list"] == [1, 2]
    assert its[0].param_groups[0]["lr"] == 1e-2


def test_buffers_and_frozen_parameters_are_of_the_moment_too(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(4)
    model.bias.requires_grad_(False)
    optimizer = forebay.AdamW([model.weight])
    with held():
        handle = checkpoint.async_save(tmp_path, model, optimizer)
        with torch.no_grad():
            model.running_mean.fill_(7)
            model.bias.fill_(7)
    handle.result()
    checkpoint.load(tmp_path, model, optimizer)
    assert model.running_mean.eq(0).all()
    assert model.bias.eq(0).all()


def test_state_in_another_order_is_of_the_moment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to be put in order for the file, which must not happen behind the engine's back."""
    begins, write = threading.Event(), writer.write_state

    def late(*arguments: Any) -> None:
        begins.wait()
        write(*arguments)

    monkeypatch.setattr(writer, "write_state", late)
    ordered = torch.randn(40, 30, 3, 3).to(memory_format=torch.channels_last)
    model = torch.nn.ParameterList([torch.randn(50, 70).t(), ordered])
    optimizer = forebay.AdamW(model.parameters())
    train(model, [optimizer], 0, 1)
    assert not any(optimizer.state[parameter]["exp_avg"].is_contiguous() for parameter in model)
    kept = values(model, [optimizer])
    handle = checkpoint.async_save(tmp_path, model, optimizer)
    train(model, [optimizer], 2, 3)
    begins.set()
    handle.result()
    checkpoint.load(tmp_path, model, optimizer)
    assert_same(values(model, [optimizer]), kept)


@pytest.mark.parametrize("elements", [100, 20_000], ids=["small", "large"])
def test_what_torch_conjugates_and_negates_as_it_reads(elements: int, tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.register_buffer("turned", torch.polar(torch.ones(elements), torch.arange(elements).float()).conj())
    model.register_buffer("negative", torch.ones(elements, dtype=torch.complex64).conj().imag)
    assert model.turned.is_conj()
    assert model.negative.is_neg()
    expected = {name: value.clone().resolve_conj().resolve_neg() for name, value in model.named_buffers()}
    checkpoint.async_save(tmp_path, model).result()
    for name, value in expected.items():
        setattr(model, name, torch.zeros_like(value))
    checkpoint.load(tmp_path, model)
    for name, value in expected.items():
        assert torch.equal(getattr(model, name), value), name


def test_a_forked_child_has_copies_of_its_own(tmp_path: Path) -> None:
    code = """
import os, sys, torch
torch.set_num_threads(1)
from forebay import checkpoint
model = torch.nn.Linear(512, 512)
checkpoint.async_save(sys.argv[1] + "/parent", model).result()
child = os.fork()
checkpoint.async_save(sys.argv[1] + ("/parent" if child else "/child"), model).result()
if child:
    print(os.waitpid(child, 0)[1])
else:
    os._exit(0)
"""
    done = python(code, tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr[-2000:]
    checkpoint.load(tmp_path / "child", torch.nn.Linear(512, 512))


def test_an_optimizer_that_was_never_stepped(tmp_path: Path) -> None:
    for kind in ("masters", "torch"):
        model, optimizers = build(kind)
        with held():
            handle = checkpoint.async_save(tmp_path / kind, model, optimizers)
            kept = values(model, optimizers)
            train(model, optimizers, 0)
        handle.result()
        assert_holds(tmp_path / kind, kind, kept)


def test_a_model_alone_and_values_alone(tmp_path: Path) -> None:
    model, _ = build()
    checkpoint.async_save(tmp_path / "model", model).result()
    twin, _ = build()
    torch.nn.init.zeros_(twin[0])
    checkpoint.load(tmp_path / "model", twin)
    assert_same(values(model, []), values(twin, []))
    checkpoint.async_save(tmp_path / "values", None, extra={"a": 1}).result()
    assert checkpoint.load(tmp_path / "values", None) == {"a": 1}


# The handle.


def test_progress_goes_from_nothing_to_everything(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizers)
        assert gate.reached.wait(20)
        assert not handle.done()
        with pytest.raises(TimeoutError, match=r"has not ended after 0\.01 s"):
            handle.result(timeout=0.01)
        assert handle.progress()["written_bytes"] == 0
        train(model, optimizers, 1)
        # Weights, and what the step came to: by the step, or ahead of it.
        assert 12 * ELEMENTS <= handle.progress()["copied_bytes"] <= handle.progress()["copy_memory_bytes"]
        gate.open()
        handle.result()
        handle.result()
    progress = handle.progress()
    assert handle.done()
    assert progress["total_bytes"] == sum(v.nbytes for v in values(model, optimizers).values())
    assert progress["written_bytes"] >= progress["total_bytes"]
    assert progress["stalls"] == 0
    assert handle.seconds() > 0


def test_progress_counts_the_waits_of_steps(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    with held() as gate:
        # Parameters fit, state does not.
        handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=4 * ELEMENTS)
        gate.open(after_s=0.1)
        train(model, optimizers, 1)
        handle.result()
    progress = handle.progress()
    assert progress["stalls"] > 0
    assert progress["stall_s"] > 0
    assert progress["copied_bytes"] == progress["copy_memory_bytes"] == 4 * ELEMENTS


def test_one_budget_for_all_optimizers(tmp_path: Path) -> None:
    sizes = ((1500, 1500),) * 4
    model, _ = build(sizes=sizes)
    optimizers = [forebay.AdamW([parameter]) for parameter in model.parameters()]
    train(model, optimizers, 0)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=weights + 6 * PAGE)
        gate.open(after_s=0.1)
        train(model, optimizers, 1)
        handle.result()
    assert weights + 4 * PAGE <= handle.progress()["copy_memory_bytes"] <= weights + 6 * PAGE


def test_options_are_checked_before_anything_happens(tmp_path: Path) -> None:
    model, optimizers = build()
    for options in (
        {"when_busy": "never"},
        {"snapshot_budget_bytes": -1},
        {"snapshot_budget_bytes": 1.5},
        {"write_gbps": 0},
        {"write_gbps": float("nan")},
        {"write_gbps": "1"},
        {"copy_gbps": -1},
        {"keep_last": 0},
    ):
        with pytest.raises(forebay.OptionError):
            checkpoint.async_save(tmp_path / "run", model, optimizers, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


# Manners.


def test_it_gives_way_and_a_plain_save_does_not(tmp_path: Path) -> None:
    model, optimizers = build()
    with held() as gate:
        gate.open()
        checkpoint.async_save(tmp_path, model, optimizers).result()
        asynchronous = gate.manners.copy()
        checkpoint.save(tmp_path, model, optimizers)
        plain = gate.manners[len(asynchronous) :]
        checkpoint.async_save(tmp_path, model, optimizers, write_gbps=Fraction(5, 2)).result()
    assert all(manner["gives_way"] and manner["bytes_per_s"] is None for manner in asynchronous)
    assert not any(manner["gives_way"] or manner["snapshot"] for manner in plain)
    assert gate.manners[-1]["bytes_per_s"] == 2.5e9


def test_the_writer_gives_way_to_steps(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    # A second's worth of pieces, with steps all the time.
    handle = checkpoint.async_save(tmp_path, model, optimizers, write_gbps=0.015)
    while not handle.done():
        train(model, optimizers, 1)
    handle.result()
    assert handle.progress()["pauses"] > 0
    assert handle.progress()["stalls"] == 0


def test_waits_for_weights_are_counted_too(tmp_path: Path) -> None:
    model, optimizers = build("torch")
    train(model, optimizers, 0)
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=0)
        gate.open(after_s=0.1)
        train(model, optimizers, 1)
        handle.result()
    assert handle.progress()["stalls"] == 1
    assert handle.progress()["stall_s"] > 0


def test_a_rate_holds_the_writer_back(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    # A bound from below, which a slow machine cannot break.
    handle = checkpoint.async_save(tmp_path, model, optimizers, write_gbps=0.05)
    handle.result()
    assert handle.seconds() >= handle.progress()["total_bytes"] / 0.05e9 * 0.9


def test_the_interpreter_goes_on_while_the_writer_writes(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    handle = checkpoint.async_save(tmp_path, model, optimizers, write_gbps=0.05)
    assert eventually(lambda: handle.progress()["written_bytes"] > 0 or handle.done())
    turns = 0
    while not handle.done():
        turns += 1
    handle.result()
    # A writer that held the interpreter's lock would leave a few turns at most.
    assert turns > 1000


def test_a_step_that_waits_lets_other_threads_run(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    for budget in (0, 4 * ELEMENTS):
        with held() as gate:
            handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=budget)
            # Only another Python thread opens the gate.
            gate.open(after_s=0.05)
            train(model, optimizers, 1)
            handle.result()


def test_no_thread_is_left(tmp_path: Path) -> None:
    model, optimizers = build("two")
    train(model, optimizers, 0)
    for budget in (None, 0):
        checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=budget).result()
    assert eventually(lambda: not threads_of_saves()), threads_of_saves()


# Steps and hooks.


def test_a_step_that_fails_spoils_no_save(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    kept = values(model, optimizers)
    with held():
        handle = checkpoint.async_save(tmp_path, model, optimizers)
        optimizers[0].param_groups[0]["amsgrad"] = True
        with pytest.raises(forebay.OptionError, match="amsgrad was switched on"):
            train(model, optimizers, 1)
        optimizers[0].param_groups[0]["amsgrad"] = False
        train(model, optimizers, 1)
    handle.result()
    assert_holds(tmp_path, "f32", kept)


def test_hooks_stay_whole_when_a_save_ends_inside_a_step(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    seen: list[Any] = []
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=0)

        def end_the_save(*_: Any) -> None:
            seen.append(1)
            gate.open()
            handle._done.wait(20)

        # Between the save's own hook and this one's end the save is over.
        optimizers[0].register_step_pre_hook(lambda *_: seen.append(2))
        hooks = optimizers[0]._optimizer_step_pre_hooks
        first = next(iter(hooks))
        original = hooks[first]
        hooks[first] = lambda *a: (end_the_save(), original(*a))[1]
        train(model, optimizers, 1)
    assert seen == [1, 2]


def test_a_save_that_cannot_begin_holds_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=0)
    train(model, optimizers, 1)
    checkpoint.async_save(tmp_path, model, optimizers).result()


def test_a_snapshot_that_is_lost_holds_no_step() -> None:
    model, (optimizer,) = build()
    train(model, [optimizer], 0)
    assert isinstance(optimizer, forebay.AdamW)
    assert optimizer._engine is not None
    lost = _core.Snapshot([optimizer._engine], 0)
    lost.copy_ahead(1, None)
    assert not lost.is_safe()
    del lost
    train(model, [optimizer], 1)
    assert eventually(lambda: not threads_of_saves())


def test_memory_of_copies_is_given_back_at_the_end(tmp_path: Path) -> None:
    model, optimizers = build()
    train(model, optimizers, 0)
    with held() as gate:
        handle = checkpoint.async_save(tmp_path, model, optimizers)
        train(model, optimizers, 1)
        kept = handle._snapshot.kept
        assert kept is not None
        assert kept.stats()[1] >= 8 * ELEMENTS
        del kept
        gate.open()
        handle.result()
    # The handle is still here, and holds nothing but numbers.
    assert handle._snapshot.kept is None
    assert handle._snapshot.state == {}
    assert handle.progress()["copied_bytes"] > 0
