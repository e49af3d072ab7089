"""Optimizers of one process share a ring and threads: each trains as if it were alone."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay import _core, checkpoint
from support.optim import SHAPES, TINY, clone, give_gradients, make, run, snapshot, train
from support.processes import in_child
from support.saves import held
from support.tensors import assert_same, needs_cuda

SIX = range(6)
SHARING = ("stream", "host", "hybrid")


@pytest.fixture(params=SHARING)
def sharing(request: pytest.FixtureRequest) -> str:
    """Return a placement that shares something."""
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """Free what other tests have left behind, which could be shared."""
    gc.collect()


def several(count: int, device: torch.device, **options: Any) -> tuple[list[Any], list[forebay.AdamW]]:
    """Return models and their optimizers, all alike but for the rate."""
    models = [make(device=device, seed=i) for i in range(count)]
    options = {"chunk_bytes": TINY, **options}
    return models, [forebay.AdamW(model, lr=1e-2 * (i + 1), **options) for i, model in enumerate(models)]


def alone(number: int, device: torch.device, steps: int, **options: Any) -> Any:
    """Return where one of ``several`` gets to with nobody beside it: chunks of another size are not shared."""
    model = make(device=device, seed=number)
    optimizer = forebay.AdamW(model, lr=1e-2 * (number + 1), **{"chunk_bytes": 7 * 1024, **options})
    train(optimizer, model, steps)
    return snapshot(optimizer, model)


def threads() -> Counter[str]:
    """Return how many threads of each kind forebay has; the CPU's own compute streams do not count."""
    names: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end while others are read.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names[(task / "comm").read_text().strip()] += 1
    return Counter({name: n for name, n in names.items() if name.startswith("forebay") and name != "forebay-compute"})


def allocated() -> int:
    """Return the bytes that the CPU backend has allocated as device memory."""
    return _core._memory_for_test("cpu")[0]


def test_six_optimizers_have_one_ring(device: torch.device) -> None:
    # A ring whose size shows, and that no optimizer of another test has.
    chunk_bytes = 17 << 20
    models, optimizers = several(6, device, chunk_bytes=chunk_bytes)
    size = (lambda: torch.cuda.memory_allocated(device)) if device.type == "cuda" else allocated
    optimizers[0].prepare()
    before, made = size(), optimizers[0]._engine.resources_made()
    for optimizer in optimizers[1:]:
        optimizer.prepare()
    assert size() - before < 1 << 20
    # State is pinned, and the first time that a ring is joined an event is made to see that it works.
    assert optimizers[0]._engine.resources_made() - made <= 5 * 2 + 2
    for optimizer in optimizers:
        assert optimizer.stats()["device_bytes"] == 4 * chunk_bytes
    for optimizer, model in zip(optimizers, models, strict=True):
        train(optimizer, model, 1)
    made = optimizers[0]._engine.resources_made()
    for step in range(1, 4):
        for optimizer, model in zip(optimizers, models, strict=True):
            train(optimizer, model, range(step, step + 1))
    assert optimizers[0]._engine.resources_made() == made, "steps make nothing"
    held = size()
    for optimizer in optimizers[1:]:
        optimizer.close()
    assert held - size() < 32 << 20
    optimizers[0].close()
    assert held - size() >= 4 * chunk_bytes


def test_six_optimizers_have_one_set_of_threads(device: torch.device, sharing: str) -> None:
    # Optimizers of other tests end their threads here, and not between the two counts.
    gc.collect()
    models, optimizers = several(6, device, placement=sharing)
    train(optimizers[0], models[0], 1)
    before = threads()
    assert sum(before.values()) > 0
    for optimizer, model in zip(optimizers[1:], models[1:], strict=True):
        train(optimizer, model, 1)
    assert threads() == before


@pytest.mark.parametrize("other", [{"chunk_bytes": TINY + 64}, {"slots": 5}])
def test_other_slots_are_not_shared(device: torch.device, other: dict[str, int]) -> None:
    models, (first, second, third) = several(3, device)
    third = forebay.AdamW(models[2], lr=1e-2, **{"chunk_bytes": TINY, **other})
    first.prepare()
    before = first._engine.resources_made()
    second.prepare()
    joined = second._engine.resources_made() - before
    third.prepare()
    apart = third._engine.resources_made() - before - joined
    assert joined <= 4 < apart, "a ring has streams, and events for each slot"
    assert third.stats()["device_bytes"] != second.stats()["device_bytes"] == first.stats()["device_bytes"]


@pytest.mark.parametrize("slots", [2, 4])
def test_steps_in_turn_equal_steps_alone(device: torch.device, sharing: str, slots: int) -> None:
    models, optimizers = several(6, device, placement=sharing, slots=slots)
    twins = [clone(model) for model in models]
    references = [torch.optim.AdamW(twin, lr=1e-2 * (i + 1), fused=True) for i, twin in enumerate(twins)]
    for step in range(4):
        for optimizer, model in zip([*optimizers, *references], [*models, *twins], strict=True):
            train(optimizer, model, range(step, step + 1))
    for number in SIX:
        found = snapshot(optimizers[number], models[number])
        assert_same(found, alone(number, device, 4, placement=sharing))
        theirs = snapshot(references[number], twins[number])
        if device.type == "cuda":
            assert_same(found, theirs)
        for ours, of_torch in zip(found, theirs, strict=True):
            torch.testing.assert_close(ours["param"], of_torch["param"], rtol=1e-5, atol=1e-6)


def test_steps_of_several_threads_equal_steps_alone(device: torch.device, sharing: str) -> None:
    models, optimizers = several(4, device, placement=sharing, slots=2)

    def work(number: int) -> int:
        optimizer, model = optimizers[number], models[number]
        for step in range(8):
            train(optimizer, model, range(step, step + 1))
            if step % 3 == number % 3:
                optimizer.stats()
                optimizer.state_dict()
        return number

    with ThreadPoolExecutor(4) as pool:
        assert [done.result(timeout=50) for done in [pool.submit(work, number) for number in range(4)]] == [0, 1, 2, 3]
    for number in range(4):
        assert_same(snapshot(optimizers[number], models[number]), alone(number, device, 8, placement=sharing))


def test_statistics_are_those_of_the_own_last_step(device: torch.device) -> None:
    models, (first, second) = several(2, device)
    train(first, models[0], 2)
    mine = first.stats()
    second.add_param_group({"params": make([(5000,)], device=device)})
    train(second, models[1], 3)
    assert first.stats() == mine
    assert second.stats()["store_bytes"] == mine["store_bytes"]
    train(first, models[0][:2], range(2, 3))
    assert second.stats()["chunks"] == mine["chunks"]


@pytest.mark.parametrize("ends", ["close", "del"])
def test_the_first_one_may_end_before_the_others(device: torch.device, sharing: str, ends: str) -> None:
    models, optimizers = several(3, device, placement=sharing)
    for step in range(2):
        for optimizer, model in zip(optimizers, models, strict=True):
            train(optimizer, model, range(step, step + 1))
    ring = optimizers[1].stats()["device_bytes"]
    if ends == "close":
        optimizers[0].close()
    del optimizers[0], models[0]
    gc.collect()
    for optimizer, model in zip(optimizers, models, strict=True):
        train(optimizer, model, range(2, 4))
        assert optimizer.stats()["device_bytes"] == ring
    for place, number in enumerate([1, 2]):
        assert_same(snapshot(optimizers[place], models[place]), alone(number, device, 4, placement=sharing))


def test_a_new_one_may_come_when_the_others_are_gone(device: torch.device, sharing: str) -> None:
    for _ in range(3):
        models, optimizers = several(2, device, placement=sharing)
        for optimizer, model in zip(optimizers, models, strict=True):
            train(optimizer, model, 2)
        assert_same(snapshot(optimizers[1], models[1]), alone(1, device, 2, placement=sharing))
        for optimizer in optimizers:
            optimizer.close()


def test_one_of_two_sleeps(device: torch.device) -> None:
    modules = [torch.nn.ParameterList(make(device=device, seed=i)) for i in range(2)]
    models = [list(module.parameters()) for module in modules]
    first, second = (forebay.AdamW(model, lr=1e-2 * (i + 1), chunk_bytes=TINY) for i, model in enumerate(models))
    train(first, models[0], 2)
    train(second, models[1], 1)
    ring = first.stats()["device_bytes"]
    sleeper = forebay.Sleeper(modules[0], first, gradients="drop")
    sleeper.sleep()
    assert (first.stats()["device_bytes"], second.stats()["device_bytes"]) == (0, ring)
    train(second, models[1], range(1, 3))
    sleeper.wake()
    assert first.stats()["device_bytes"] == ring
    for step in range(2, 4):
        train(first, models[0], range(step, step + 1))
    train(second, models[1], range(3, 4))
    # Both: then there is no ring.
    other = forebay.Sleeper(modules[1], second, gradients="drop")
    with sleeper.asleep(), other.asleep():
        assert first.stats()["device_bytes"] == second.stats()["device_bytes"] == 0
    for number, (optimizer, model) in enumerate(zip((first, second), models, strict=True)):
        train(optimizer, model, range(4, 6))
        assert_same(snapshot(optimizer, model), alone(number, device, 6))


@needs_cuda
def test_memory_of_the_ring_goes_with_the_last_one_that_sleeps() -> None:
    device = torch.device("cuda", 0)
    models, optimizers = several(2, device, chunk_bytes=1 << 20, slots=3)
    for optimizer, model in zip(optimizers, models, strict=True):
        train(optimizer, model, 1)
    before = torch.cuda.memory_allocated()
    for freed, optimizer in zip((0, 3 << 20), optimizers, strict=True):
        optimizer._release_ring()
        gc.collect()
        assert before - torch.cuda.memory_allocated() == freed


@pytest.mark.parametrize("placement", ["host", "hybrid"])
def test_a_budget_counts_the_whole_pinned_ring_for_each(placement: str) -> None:
    # On the CPU only "hybrid" needs one: "host" updates in place there.
    device = torch.device("cpu")
    _, optimizers = several(3, device, placement=placement, chunk_bytes=1 << 16)
    for optimizer in optimizers[:2]:
        optimizer.prepare()
    pinned = optimizers[0].stats()["pinned_bytes"]
    assert optimizers[1].stats()["pinned_bytes"] == pinned
    assert (pinned > 2 * 4 << 16) == (placement == "hybrid")
    options: dict[str, Any] = {"placement": placement, "chunk_bytes": 1 << 16}
    exact = forebay.AdamW(make(device=device), pinned_budget_bytes=pinned, **options)
    exact.prepare()
    short = forebay.AdamW(make(device=device), pinned_budget_bytes=pinned - 1, **options)
    with pytest.raises(forebay.OutOfMemoryError) as refusal:
        short.prepare()
    assert (refusal.value.requested_bytes, refusal.value.available_bytes) == (pinned, pinned - 1)


def test_a_failed_step_leaves_the_others_usable(device: torch.device) -> None:
    models, optimizers = several(3, device, placement="hybrid", host_fraction=0.5)
    for optimizer, model in zip(optimizers, models, strict=True):
        train(optimizer, model, 1)
    optimizers[0]._engine._fail_on_host_for_test()
    for number in (1, 2):
        train(optimizers[number], models[number], range(1, 2))
    with pytest.raises(forebay.Error, match="on purpose"):
        train(optimizers[0], models[0], range(1, 2))
    for number in (1, 2):
        train(optimizers[number], models[number], range(2, 4))
        assert_same(
            snapshot(optimizers[number], models[number]),
            alone(number, device, 4, placement="hybrid", host_fraction=0.5),
        )


def test_who_waits_for_a_save_holds_up_nobody(device: torch.device, tmp_path: Path) -> None:
    """A step waits for the writer in the middle, with a slot of the ring; the writer is a thread that needs the GIL."""
    models, (saved, other, gone) = several(3, device)
    for optimizer, model in zip((saved, other, gone), models, strict=True):
        train(optimizer, model, 1)
    module = torch.nn.ParameterList(models[0])
    # The parameters are written, the state is not.
    with held(1) as gate, ThreadPoolExecutor(1) as pool:
        handle = checkpoint.async_save(tmp_path, module, saved, snapshot_budget_bytes=0)
        assert gate.reached.wait(20)
        waits = pool.submit(train, saved, models[0], range(1, 2))
        train(other, models[1], range(1, 4))
        other.stats()
        # Python frees it now, with the GIL held.
        del optimizer, gone
        gc.collect()
        train(other, models[1], range(4, 6))
        assert_same(snapshot(other, models[1]), alone(1, device, 6))
        assert not waits.done()
        gate.open()
        waits.result(timeout=50)
        handle.result()
    assert saved.stats()["save_stalls"] > 0
    assert_same(snapshot(saved, models[0]), alone(0, device, 2))


def test_a_save_of_several_while_threads_step(device: torch.device, tmp_path: Path) -> None:
    models, optimizers = several(2, device, slots=2)
    for optimizer, model in zip(optimizers, models, strict=True):
        train(optimizer, model, 1)
    module = torch.nn.ParameterList([parameter for model in models for parameter in model])
    ended = threading.Event()

    def step(number: int) -> None:
        try:
            train(optimizers[number], models[number], range(1, 20))
        finally:
            ended.set()

    with ThreadPoolExecutor(2) as pool:
        steps = [pool.submit(step, number) for number in range(2)]
        saves = 0
        while not ended.is_set() or saves < 2:
            checkpoint.async_save(tmp_path, module, optimizers, snapshot_budget_bytes=None).result(timeout=50)
            saves += 1
        for done in steps:
            done.result(timeout=50)
    for number in range(2):
        assert_same(snapshot(optimizers[number], models[number]), alone(number, device, 20))


def test_a_forked_child_has_a_ring_of_its_own(device: torch.device, sharing: str) -> None:
    models, optimizers = several(2, device, placement=sharing)
    for optimizer, model in zip(optimizers, models, strict=True):
        train(optimizer, model, 1)
    give_gradients(models[0], 1)
    expected = run(SHAPES, device=device, steps=3, chunk_bytes=7 * 1024)[0]["param"].sum().item()

    def work() -> float:
        # The same slots as the parent's, whose threads are not here.
        total: float = run(SHAPES, device=device, steps=3, chunk_bytes=TINY, placement=sharing)[0]["param"].sum().item()
        optimizers.clear()
        gc.collect()
        return total

    assert in_child(work) == str(expected)
    for number in range(2):
        train(optimizers[number], models[number], range(1, 3))
        assert_same(snapshot(optimizers[number], models[number]), alone(number, device, 3, placement=sharing))


def test_torch_allocates_one_ring_that_stays_until_the_last_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the ring is a tensor of the optimizer that came first."""
    device, rings, empty = torch.device("cpu"), [], torch.empty

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*arguments, **options)
        rings.append(weakref.ref(tensor))
        return tensor

    models, optimizers = several(3, device)
    for optimizer in optimizers:
        engine, compute = optimizer._open()
        with monkeypatch.context() as patch:
            patch.setattr("forebay.optim.base.is_gpu", lambda _: True)
            patch.setattr(torch, "empty", noted)
            optimizer._open_ring(engine, compute)
    assert len(rings) == 1, "memory is allocated only if there is no ring to share"
    for step in range(2):
        for optimizer, model in zip(optimizers, models, strict=True):
            train(optimizer, model, range(step, step + 1))
    optimizers[0].close()
    optimizers[1]._release_ring()
    gc.collect()
    assert rings[0]() is not None
    train(optimizers[2], models[2], range(2, 4))
    assert_same(snapshot(optimizers[2], models[2]), alone(2, device, 4))
    optimizers[2]._release_ring()
    gc.collect()
    assert rings[0]() is None
    for number in (1, 2):
        train(optimizers[number], models[number], range(2 * number, 6))
        assert_same(snapshot(optimizers[number], models[number]), alone(number, device, 6))
