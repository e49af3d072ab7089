"""The figures of the whole process: exact, complete, and read without waiting for anything."""

from __future__ import annotations

import gc
import json
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import forebay
from forebay import checkpoint
from forebay.errors import OptionError
from forebay.monitor import SCHEMA, scalars, schema
from support import saves
from support.optim import make, train
from support.processes import in_child, python
from support.tensors import assert_same

BYTES_OF_STATE = 2 * 4
"""Of an element, for AdamW."""


def layers(count: int = 3, width: int = 64) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count)))


def moved(since: forebay.Stats, use: str) -> tuple[int, int]:
    now = forebay.stats()
    return now["fetched_bytes"][use] - since["fetched_bytes"][use], now["stored_bytes"][use] - since["stored_bytes"][
        use
    ]  # type: ignore[literal-required]


def functions_of(thread: threading.Thread) -> list[str]:
    """Return the names of the functions that a thread is in."""
    frame = sys._current_frames().get(thread.ident or 0)
    return [] if frame is None else [one.name for one in traceback.extract_stack(frame)]


def check_types(value: Any, wanted: Any, where: str = "stats") -> None:
    """Raise if a value is not what its typed dict says."""
    if hasattr(wanted, "__annotations__"):
        hints = get_type_hints(wanted)
        assert value.keys() == hints.keys(), where
        for name, hint in hints.items():
            check_types(value[name], hint, f"{where}.{name}")
    elif getattr(wanted, "__origin__", None) is list:
        for number, one in enumerate(value):
            check_types(one, wanted.__args__[0], f"{where}[{number}]")
    else:
        assert type(value) is wanted, where


def test_bytes_of_a_step_are_counted_exactly(device: torch.device) -> None:
    parameters = make(((300, 70), (33,)), device=device)
    optimizer = forebay.AdamW(parameters, chunk_bytes=1 << 16, slots=3)
    train(optimizer, parameters, 1)
    optimizer.synchronize()
    before, payload = forebay.stats(), BYTES_OF_STATE * sum(one.numel() for one in parameters)
    train(optimizer, parameters, range(1, 4))
    optimizer.synchronize()
    assert moved(before, "optimizer") == (3 * payload, 3 * payload)
    assert moved(before, "activations") == moved(before, "sleep") == moved(before, "saves") == (0, 0)
    (mine,) = [one for one in forebay.stats()["optimizers"] if one["pinned_bytes"] == optimizer.stats()["pinned_bytes"]]
    assert mine["name"].startswith("AdamW ")
    assert (mine["parameters"], mine["placement"], mine["device"]) == (2, "stream", str(device))
    assert mine["step_s"] == optimizer.stats()["step_s"] > 0


@pytest.mark.parametrize("placement", ["host", "hybrid"])
def test_pinned_bytes_are_those_of_the_optimizers(placement: str) -> None:
    gc.collect()
    # Powers of betas are pinned too, once for all optimizers of a device, and no optimizer counts them.
    first = forebay.AdamW(make(((3,),)))
    train(first, first.param_groups[0]["params"], 1)
    before = forebay.stats()["pinned_bytes"]["optimizer"]
    parameters = make(((4000, 7),))
    optimizer = forebay.AdamW(parameters, placement=placement, chunk_bytes=1 << 16)
    train(optimizer, parameters, 1)
    pinned = int(optimizer.stats()["pinned_bytes"])
    assert pinned >= BYTES_OF_STATE * 28000
    assert forebay.stats()["pinned_bytes"]["optimizer"] == before + pinned
    optimizer.close()
    assert forebay.stats()["pinned_bytes"]["optimizer"] == before


def test_a_shared_ring_counts_once() -> None:
    gc.collect()
    before = forebay.stats()["ring_bytes"]
    several = [forebay.AdamW(make(((64, 8),)), chunk_bytes=3 << 16, slots=5) for _ in range(3)]
    for optimizer in several:
        train(optimizer, optimizer.param_groups[0]["params"], 1)
    assert forebay.stats()["ring_bytes"] - before == 5 * 3 << 16
    for optimizer in several:
        optimizer.close()
    assert forebay.stats()["ring_bytes"] == before


def test_every_kind_of_object_is_listed_and_leaves_the_list(tmp_path: Path) -> None:
    gc.collect()
    model = layers()
    optimizer = forebay.AdamW(model.parameters())
    overlap = forebay.overlap_step(model, optimizer, accumulation_steps=1)
    handle = forebay.offload_activations(model, layers=list(model), min_bytes=1, fraction=1.0)
    sleeper = forebay.Sleeper(layers(1))
    other = layers(1)
    units = forebay.offload(torch.optim.Adagrad(other.parameters()))
    other(torch.ones(2, 64)).sum().backward()
    units.step()
    start = forebay.stats()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    overlap.remove()
    overlap = forebay.overlap_step(model, optimizer, accumulation_steps=1)
    sleeper.sleep()
    with saves.held() as gate:
        save = checkpoint.async_save(tmp_path / "run", other, units)
        assert gate.reached.wait(50)
        found = forebay.stats(start)
        (saving,) = found["saves"]
        assert saving["path"] == str(tmp_path / "run")
        assert 0 <= saving["written_bytes"] <= saving["total_bytes"]
        assert saving["total_bytes"] > 0
    save.result()
    check_types(found, schema.Stats)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    mine = found["optimizers"][-1]
    assert mine["overlapped"] is True
    assert found["overlaps"][-1]["optimizer"] == mine["name"]
    assert found["units"][-1]["name"].startswith("Adagrad ")
    assert found["units"][-1]["pinned_bytes"] == units.stats()["pinned_bytes"] > 0
    assert found["activations"][-1]["pinned_bytes"] == handle.stats()["pinned_bytes"] > 0
    assert found["activations"][-1]["layers"] == 3
    assert moved(start, "activations") == (handle.stats()["fetched_bytes"], handle.stats()["stored_bytes"])
    slept = sum(parameter.numel() * 4 for parameter in layers(1).parameters())
    assert found["sleepers"][-1]["asleep_bytes"] == slept
    assert found["sleepers"][-1]["pinned_bytes"] == sleeper.stats()["pinned_bytes"]
    assert moved(start, "sleep")[1] >= slept
    sleeper.wake()
    assert forebay.stats()["saves"] == []
    counts = {name: len(found[name]) for name in ("optimizers", "units", "overlaps", "activations", "sleepers")}  # type: ignore[literal-required]
    overlap.remove()
    handle.remove()
    forebay.restore(units)
    del sleeper, optimizer, handle, overlap, save, units
    model.zero_grad()
    del model, other, gate
    gc.collect()
    left = forebay.stats()
    assert {name: len(left[name]) for name in counts} == {name: count - 1 for name, count in counts.items()}  # type: ignore[literal-required]


def test_figures_are_read_while_a_step_waits_for_a_save(tmp_path: Path) -> None:
    model, optimizers = saves.build()
    saves.train(model, optimizers, 0)
    before = forebay.stats()
    with saves.held() as gate:
        save = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=0)
        assert gate.reached.wait(50)
        stepping = threading.Thread(target=saves.train, args=(model, optimizers, 1))
        stepping.start()
        assert saves.eventually(lambda: "_before_step" in functions_of(stepping))
        for _ in range(50):
            during = forebay.stats()
        assert stepping.is_alive()
        assert len(during["saves"]) == 1
        assert during["pinned_bytes"]["optimizer"] >= before["pinned_bytes"]["optimizer"]
    stepping.join(50)
    save.result()
    after = forebay.stats()["stalls"]["save"]
    assert after["count"] > before["stalls"]["save"]["count"]
    assert after["seconds"] > before["stalls"]["save"]["seconds"]


def test_pinned_bytes_take_no_lock_of_a_step(tmp_path: Path) -> None:
    model, optimizers = saves.build()
    saves.train(model, optimizers, 0)
    (optimizer,) = optimizers
    pinned = optimizer._engine.pinned_bytes()  # type: ignore[attr-defined]
    with saves.held() as gate:
        # Parameters are copied, and state is not: the step waits for its pages, inside of the engine.
        room = sum(parameter.nbytes for parameter in model.parameters()) + 4096
        save = checkpoint.async_save(tmp_path, model, optimizers, snapshot_budget_bytes=room)
        assert gate.reached.wait(50)
        stepping = threading.Thread(target=saves.train, args=(model, optimizers, 1))
        stepping.start()
        assert saves.eventually(lambda: "_update" in functions_of(stepping))
        for _ in range(50):
            assert forebay.stats()["optimizers"][-1]["pinned_bytes"] == pinned
        assert stepping.is_alive()
    stepping.join(50)
    save.result()


def test_rates_are_those_since_an_earlier_call() -> None:
    parameters = make(((300, 70),))
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    optimizer.synchronize()
    first = forebay.stats()
    train(optimizer, parameters, range(1, 3))
    optimizer.synchronize()
    second = forebay.stats(first)
    fetched = second["fetched_bytes"]["total"] - first["fetched_bytes"]["total"]
    wire = second["wire"]
    assert wire["seconds"] == second["seconds"] - first["seconds"] > 0
    assert wire["fetch_gbps"] == pytest.approx(fetched / wire["seconds"] / 1e9)
    assert wire["store_gbps"] > 0
    whole = forebay.stats()["wire"]
    assert whole["seconds"] > second["seconds"] > wire["seconds"]
    with pytest.raises(OptionError, match="invalid since: dict; give what an earlier call"):
        forebay.stats({"schema": SCHEMA + 1})  # type: ignore[typeddict-item]
    with pytest.raises(OptionError, match="invalid since: float"):
        forebay.stats(1.0)  # type: ignore[arg-type]


def test_scalars_are_the_numbers_of_a_record() -> None:
    record = forebay.stats()
    found = scalars(record)
    assert found["pinned_bytes/total"] == record["pinned_bytes"]["total"]
    assert found["stalls/slot/count"] == record["stalls"]["slot"]["count"]
    assert found["wire/fetch_gbps"] == record["wire"]["fetch_gbps"]
    assert found["optimizers"] == len(record["optimizers"])
    assert all(isinstance(value, (int, float)) for value in found.values())


def test_reading_changes_no_bit() -> None:
    def trained(*, watched: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model = layers()
        optimizer = forebay.AdamW(model.parameters(), max_grad_norm=0.1)
        forebay.overlap_step(model, optimizer, accumulation_steps=1)
        for step in range(4):
            model(torch.full((4, 64), 0.1 * step)).square().sum().backward()
            if watched:
                forebay.stats()
            optimizer.step()
            if watched:
                forebay.stats()
            optimizer.zero_grad()
        state = {f"state {i}": one["exp_avg"].clone() for i, one in enumerate(optimizer.state.values())}
        return {**{name: value.detach().clone() for name, value in model.named_parameters()}, **state}

    assert_same(trained(watched=True), trained(watched=False))


def test_nothing_was_used_and_torch_is_not_imported() -> None:
    code = "import json, sys, forebay; found = forebay.stats(); print(json.dumps([found, 'torch' in sys.modules]))"
    found, has_torch = json.loads(python(code).stdout)
    assert not has_torch
    assert found["optimizers"] == found["saves"] == found["sleepers"] == []
    assert found["pinned_bytes"]["total"] == found["ring_bytes"] == found["stalls"]["total"]["count"] == 0


def test_a_forked_child_begins_with_nothing() -> None:
    parameters = make(((300, 70),))
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    assert forebay.stats()["pinned_bytes"]["total"] > 0

    def look() -> object:
        found = forebay.stats()
        lists = [found["optimizers"], found["units"], found["saves"], found["sleepers"], found["activations"]]
        return [*map(len, lists), found["pinned_bytes"]["total"], found["fetched_bytes"]["total"], found["ring_bytes"]]

    assert in_child(look, computes=False) == str([0] * 8)

    def work() -> object:
        own = make(((64, 64),))
        mine = forebay.AdamW(own, chunk_bytes=1 << 16)
        train(mine, own, 1)
        found = forebay.stats()
        pinned = found["optimizers"][0]["pinned_bytes"]
        return len(found["optimizers"]), pinned == mine.stats()["pinned_bytes"] <= found["pinned_bytes"]["total"]

    assert in_child(work) == "(1, True)"
    assert optimizer.stats()["pinned_bytes"] > 0


def test_threads_may_make_objects_meanwhile() -> None:
    ended = threading.Event()
    failures: list[BaseException] = []

    def look() -> None:
        try:
            while not ended.is_set():
                forebay.stats()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            forebay.AdamW(make(((3,),)))
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        for thread in threads:
            thread.join()
    assert failures == []
