"""The slab, the budget, what cannot sleep, and forebay's own optimizer."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import forebay
from support.processes import in_child
from support.sleep import Net, batch, is_empty, snapshot, train
from support.tensors import assert_same, bits, needs_cuda


def layers(device: torch.device, count: int = 6, size: int = 1000) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.full((size,), float(i), device=device)) for i in range(count))


def check(model: nn.ParameterList) -> None:
    assert all(parameter.eq(i).all() for i, parameter in enumerate(model))


def test_the_slab_is_exact_pinned_once_and_released(device: torch.device) -> None:
    model = layers(device, count=50, size=1024)
    sleeper = forebay.Sleeper(model)
    assert sleeper.stats()["pinned_bytes"] == 0
    for _ in range(3):
        with sleeper.asleep():
            assert sleeper.stats()["pinned_bytes"] == 50 * 4096
    made = sleeper._slabs_of(model[0].get_device()).resources_made()
    for _ in range(2):
        with sleeper.asleep():
            pass
    assert sleeper._slabs_of(model[0].get_device()).resources_made() == made
    with sleeper.asleep(), pytest.raises(forebay.AsleepError, match="204800 bytes"):
        sleeper.release()
    sleeper.release()
    assert sleeper.stats()["pinned_bytes"] == 0
    with sleeper.asleep():
        pass
    check(model)


def test_the_slab_grows_under_what_sleeps(device: torch.device) -> None:
    model, optimizer = Net(device), None
    optimizer = torch.optim.AdamW(model.parameters())
    sleeper = forebay.Sleeper(model, optimizer)
    with sleeper.asleep():
        pass
    small = sleeper.stats()["pinned_bytes"]
    train(model, optimizer, device, 1)
    before = snapshot(model, optimizer)
    sleeper.sleep(("parameters", "buffers"))
    sleeper.sleep("optimizer")
    assert sleeper.stats()["pinned_bytes"] > small
    sleeper.wake()
    assert_same(before, snapshot(model, optimizer))


def test_a_first_sleep_pins_in_pieces_and_a_budget_in_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.sleep import sleeper as module
    from forebay.sleep import transfer as _sleep_moves

    monkeypatch.setattr(module, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(_sleep_moves, "BATCH_ENTRIES", 1)
    placed: list[int] = []
    real = module.Sleeper._place

    def place(self: forebay.Sleeper, entries: list) -> None:
        placed.append(len(entries))
        real(self, entries)

    monkeypatch.setattr(module.Sleeper, "_place", place)
    model = layers(device, count=7, size=1024)
    for budget, pieces in ((None, [2, 2, 2, 1]), (7 * 4096, [7])):
        placed.clear()
        sleeper = forebay.Sleeper(model, pinned_budget_bytes=budget)
        for _ in range(2):
            with sleeper.asleep():
                assert sleeper.stats()["pinned_bytes"] == 7 * 4096
            check(model)
        assert placed == pieces, "and nothing the second time"


def test_prepare_pins_ahead(device: torch.device) -> None:
    model = layers(device)
    sleeper = forebay.Sleeper(model, prepare=True)
    sleeper._join_pinning()
    pinned = sleeper.stats()["pinned_bytes"]
    assert pinned >= 24_000
    sleeper.sleep()
    assert sleeper.stats()["pin_s"] == 0
    assert sleeper.stats()["pinned_bytes"] == pinned
    sleeper.wake()
    check(model)
    # A budget that does not suffice is told when it matters.
    sleeper = forebay.Sleeper(model, prepare=True, pinned_budget_bytes=8192)
    with pytest.raises(forebay.OutOfMemoryError):
        sleeper.sleep()
    check(model)


def test_a_budget_too_small_is_told_with_the_numbers_and_nothing_is_lost(device: torch.device) -> None:
    model = layers(device, count=6, size=4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    sum(parameter.sum() for parameter in model).backward()
    optimizer.step()
    optimizer.zero_grad()
    sleeper = forebay.Sleeper(model, optimizer, pinned_budget_bytes=6 * 16384)
    with pytest.raises(forebay.OutOfMemoryError, match="bytes") as caught:
        sleeper.sleep()
    error = caught.value
    assert (error.requested_bytes, error.available_bytes, error.limit_bytes) == (12 * 16384, 6 * 16384, 6 * 16384)
    check(model)
    sleeper.sleep("parameters")
    with pytest.raises(forebay.OutOfMemoryError) as caught:
        sleeper.sleep("optimizer")
    assert (caught.value.requested_bytes, caught.value.available_bytes) == (6 * 16384, 0)
    assert is_empty(model[0])
    sleeper.wake()
    check(model)
    assert all(state["momentum_buffer"].eq(1).all() for state in optimizer.state.values())
    optimizer.step()


def test_what_cannot_be_emptied_stays_and_is_named(device: torch.device, tmp_path) -> None:
    model = nn.Module()
    model.normal = nn.Parameter(torch.ones(100, device=device))
    source = torch.full((300,), 2.0, device=device)
    model.register_buffer("through_dlpack", torch.from_dlpack(source))
    sizes = {"through_dlpack": 1200}
    if device.type == "cpu":
        file = tmp_path / "weights"
        file.write_bytes(bytes(400))
        model.register_buffer("mapped", torch.from_file(str(file), shared=True, size=100))
        model.register_buffer("between_processes", torch.ones(50).share_memory_())
        sizes |= {"mapped": 400, "between_processes": 200}
    sleeper = forebay.Sleeper(model)
    sleeper.sleep()
    assert is_empty(model.normal)
    assert model.through_dlpack.eq(2).all()
    stats = sleeper.stats()
    assert {one["name"]: one["bytes"] for one in stats["residual"]} == sizes
    reasons = {one["name"]: one["reason"] for one in stats["residual"]}
    assert "IPC" in reasons.pop("between_processes", "IPC")
    assert all("not torch's own" in reason for reason in reasons.values())
    assert stats["residual_bytes"] == sum(sizes.values()) == stats["kinds"]["buffers"]["residual_bytes"]
    sleeper.wake()
    assert model.normal.eq(1).all()


@needs_cuda
def test_memory_that_was_sent_to_other_processes_stays() -> None:
    from torch.multiprocessing.reductions import reduce_tensor

    model = layers(torch.device("cuda"))
    handle = reduce_tensor(model[2].detach())
    sleeper = forebay.Sleeper(model)
    with sleeper.asleep():
        assert [(one["name"], one["bytes"]) for one in sleeper.stats()["residual"]] == [("2", 4000)]
        assert "IPC" in sleeper.stats()["residual"][0]["reason"]
        assert model[2].eq(2).all()
    check(model)
    del handle


def test_numbers_of_a_sleep_and_a_wake(device: torch.device) -> None:
    model = Net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, device, 1)
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.sleep(("parameters", "optimizer"))
    sleeper.wake()
    stats = sleeper.stats()
    own = {id(p): p.numel() * 4 for p in model.parameters()}
    assert stats["kinds"]["parameters"]["bytes"] == sum(own.values())
    assert stats["kinds"]["parameters"]["storages"] == len(own)
    moments = [p for p in model.parameters() if p.requires_grad]
    lone = 4 * len(moments) if device.type == "cuda" else 0
    least = sum(8 * p.numel() for p in moments)
    assert least <= stats["kinds"]["optimizer"]["bytes"] <= least + lone
    assert stats["bytes"] == sum(kind["bytes"] for kind in stats["kinds"].values())
    for way in ("sleep", "wake"):
        assert stats[f"{way}_s"] > 0
        assert stats[f"{way}_gbps"] == pytest.approx(stats["bytes"] / stats[f"{way}_s"] / 1e9)
        assert stats["kinds"]["optimizer"][f"{way}_s"] > 0
    assert [one["name"] for one in stats["residual"]] == ["buffers"]
    assert stats["residual"][0]["reason"] == "not asked to sleep"


def test_streamed_state_is_on_the_host_and_its_ring_goes(device: torch.device) -> None:
    model = Net(device)
    optimizer = forebay.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, device, 2)
    reference = snapshot(model, optimizer)
    pinned = optimizer.stats()["pinned_bytes"]
    assert optimizer.stats()["device_bytes"] > 0
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.sleep()
    assert optimizer.stats()["device_bytes"] == 0
    assert optimizer.stats()["pinned_bytes"] == pinned
    assert sleeper.stats()["kinds"]["optimizer"]["bytes"] == 0
    # Right data: a checkpoint of the optimizer can be written while the model sleeps.
    assert_same(reference[-3:], list(list(optimizer.state_dict()["state"].values())[-1].values()))
    with pytest.raises(forebay.AsleepError):
        optimizer.step()
    with pytest.raises(forebay.AsleepError):
        optimizer.load_state_dict(optimizer.state_dict())
    sleeper.wake()
    assert optimizer.stats()["device_bytes"] > 0
    assert_same(reference, snapshot(model, optimizer))
    train(model, optimizer, device, 1)
    with forebay.Sleeper(optimizer=optimizer).asleep(), pytest.raises(forebay.AsleepError):
        optimizer.step()
    train(model, optimizer, device, 1)


def test_a_ring_that_could_not_be_made_again_is_made_by_the_step(device: torch.device, monkeypatch) -> None:
    model, plain = Net(device), Net(device)
    optimizer, reference = (forebay.AdamW(net.parameters(), lr=1e-2) for net in (model, plain))
    train(plain, reference, device, 2)
    train(model, optimizer, device, 1)
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(forebay.AdamW, "_open_ring", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            sleeper.wake()
        with pytest.raises(forebay.AsleepError):
            optimizer.step()
    sleeper.wake()
    for step in (1,):
        model(batch(device, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(snapshot(plain, reference), snapshot(model, optimizer))
    # Even where somebody else took it away, a step never passes over the state in silence.
    optimizer._release_ring()
    before = snapshot(model)
    train(model, optimizer, device, 1)
    assert any(not torch.equal(a, b) for a, b in zip(before, snapshot(model), strict=True))
    assert optimizer.stats()["chunks"] > 0


def test_masters_that_are_still_to_be_made_are_made_before_the_weights_sleep(device: torch.device) -> None:
    model = nn.Linear(40, 40, device=device, dtype=torch.bfloat16)
    optimizer = forebay.AdamW(model.parameters())
    optimizer.prepare()
    with forebay.Sleeper(model, optimizer).asleep():
        master = optimizer.state[model.weight]["master_param"]
        assert master.abs().sum() > 0
    assert torch.equal(bits(master), bits(model.weight.float()))


@needs_cuda
def test_the_ring_of_forebay_adamw_goes_back() -> None:
    # A ring that no optimizer of another test has: it would stay with that one.
    chunk_bytes = 19 << 20
    model = Net(torch.device("cuda"))
    optimizer = forebay.AdamW(model.parameters(), chunk_bytes=chunk_bytes)
    train(model, optimizer, torch.device("cuda"), 1)
    before = torch.cuda.memory_allocated()
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.sleep()
    assert before - torch.cuda.memory_allocated() >= 4 * chunk_bytes
    sleeper.wake()
    train(model, optimizer, torch.device("cuda"), 1)


def test_an_allocation_that_fails_leaves_the_rest_asleep(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.sleep import sleeper as module
    from forebay.sleep import transfer as _sleep_moves

    monkeypatch.setattr(_sleep_moves, "BATCH_ENTRIES", 2)
    model = layers(device)
    sleeper = forebay.Sleeper(model)
    sleeper.sleep()
    real = module.Sleeper._allocate
    calls = []

    def fail(self: forebay.Sleeper, mover, entries) -> None:
        calls.append(entries)
        if len(calls) == 3:
            # As a full GPU does, in the middle of a batch.
            entries[1].size = 1 << 60
        try:
            real(self, mover, entries)
        finally:
            if len(calls) == 3:
                entries[1].size = 4000

    monkeypatch.setattr(module.Sleeper, "_allocate", fail)
    with pytest.raises(RuntimeError) as caught:
        sleeper.wake()
    assert "8000 bytes still sleep" in str(caught.value.__notes__)
    assert [is_empty(parameter) for parameter in model] == [False] * 4 + [True] * 2
    with pytest.raises(forebay.AsleepError):
        model.state_dict()
    sleeper.wake()
    check(model)


@pytest.mark.parametrize("interrupted", range(6))
def test_what_sleeps_is_what_the_slabs_keep_wherever_a_sleep_is_interrupted(
    interrupted: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.sleep import transfer

    monkeypatch.setattr(transfer, "BATCH_ENTRIES", 2)
    model = layers(device)
    sleeper = forebay.Sleeper(model)
    with sleeper.asleep():
        storages = {entry.number: entry.size for entry in sleeper._asleep}

    def assert_agreed() -> None:
        asleep = {entry.number for entry in sleeper._asleep}
        (slabs,) = sleeper._slabs.values()
        assert {number for number, size in storages.items() if not slabs.holds([number], [size])} == asleep
        empty = [is_empty(parameter) for parameter in model]
        assert sum(empty) == len(asleep)
        assert sleeper.stats()["asleep_bytes"] == sum(storages[number] for number in asleep)
        assert sleeper._asleep.kinds() == ({"parameters"} if asleep else set())

    real = transfer.Mover.wait
    waits = []

    def wait(self: transfer.Mover, batch: transfer.Batch) -> None:
        waits.append(batch)
        if len(waits) > interrupted:
            raise KeyboardInterrupt
        real(self, batch)

    assert len(storages) == 6
    assert_agreed()
    with monkeypatch.context() as patch:
        patch.setattr(transfer.Mover, "wait", wait)
        if interrupted < 3:
            with pytest.raises(KeyboardInterrupt):
                sleeper.sleep()
        else:
            sleeper.sleep()
            with pytest.raises(KeyboardInterrupt):
                sleeper.wake()
    if interrupted < 3:
        assert_agreed()
    sleeper.wake()
    assert_agreed()
    check(model)
    sleeper.sleep()
    assert len(list(sleeper._asleep)) == 6
    assert_agreed()
    sleeper.wake()
    check(model)


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        ((), {}, "nothing to put to sleep"),
        ((3,), {}, "give a torch"),
        (([nn.Linear(1, 1), 4],), {}, "model '1' is a int"),
        ((nn.Linear(1, 1), nn.Linear(1, 1)), {}, "optimizer"),
        ((nn.Linear(1, 1),), {"gradients": "lose"}, "'refuse', 'keep' or 'drop'"),
        ((nn.Linear(1, 1),), {"pinned_budget_bytes": 0}, "pinned_budget_bytes"),
        ((nn.Linear(1, 1),), {"pinned_budget_bytes": "1GB"}, "pinned_budget_bytes"),
    ],
)
def test_options_are_checked_when_it_is_made(arguments, options, match: str) -> None:
    with pytest.raises(forebay.OptionError, match=match):
        forebay.Sleeper(*arguments, **options)


@pytest.mark.parametrize("what", [("weights",), "gradient", ("parameters", 3)])
def test_a_name_that_does_not_exist_is_refused(device: torch.device, what) -> None:
    sleeper = forebay.Sleeper(layers(device))
    with pytest.raises(forebay.OptionError, match="use any of 'parameters', 'buffers', 'gradients', 'optimizer'"):
        sleeper.sleep(what)
    sleeper.sleep()
    with pytest.raises(forebay.OptionError, match="use any of"):
        sleeper.wake(what)
    sleeper.wake()


def test_an_exception_inside_asleep_wakes(device: torch.device) -> None:
    model = layers(device)
    sleeper = forebay.Sleeper(model)
    with pytest.raises(KeyError), sleeper.asleep():
        raise KeyError
    check(model)


def test_a_forked_child_is_told(device: torch.device) -> None:
    model = layers(device)
    sleeper = forebay.Sleeper(model)
    sleeper.sleep()
    assert in_child(sleeper.wake).startswith("DeviceError: ")
    sleeper.wake()
    check(model)


def test_a_forked_child_collects_a_sleeper_that_was_waking(device: torch.device) -> None:
    model = layers(device)
    sleeper = forebay.Sleeper(model)
    sleeper.sleep()
    sleeper.wake(lazy=True)

    def forget() -> str:
        nonlocal sleeper
        del sleeper
        gc.collect()
        return "fine"

    assert in_child(forget) == "fine"
    sleeper.wake()
    check(model)


def test_a_sleeper_is_not_copied(device: torch.device) -> None:
    import copy

    with pytest.raises(forebay.Error, match="pinned memory"):
        copy.deepcopy(forebay.Sleeper(layers(device)))
