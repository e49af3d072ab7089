"""What is in the file: every category with the right bytes, passes, waits, memory, and what forebay's objects say."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import threading
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch

import forebay
from forebay import _registry, checkpoint
from forebay.optim.base import Optimizer
from support.optim import TINY, give_gradients, make
from support.trace import blocks, everything, read, steps

STATE_BYTES = 8 * 4 * (64 * 64 + 64)
"""Both moments of the model."""


def traced(tmp_path: Path, work, **options):
    # What is alive is in the file, and what ends meanwhile; other tests may have left something.
    gc.collect()
    alive = mock.patch.object(Optimizer, "alive", weakref.WeakSet())
    with alive, mock.patch.dict(_registry._found, clear=True), forebay.trace(tmp_path / "run.json", **options):
        kept = work()
    return read(tmp_path / "run.json"), kept


def test_every_part_is_there_with_its_bytes(device, placement, tmp_path, no_save_is_left):
    trace, _ = traced(tmp_path, lambda: everything(device, tmp_path, placement))
    assert trace.header["dropped"] == 0
    assert not trace.header["partial"]
    (optimizer,), (overlap,) = trace.header["optimizers"], trace.header["overlaps"]
    assert (optimizer["name"], optimizer["class"], overlap["optimizer"]) == ("AdamW 0", "AdamW", "AdamW 0")
    assert optimizer["settings"]["placement"] == placement
    (activations,), (sleeper,) = trace.header["activations"], trace.header["sleepers"]
    assert (activations["name"], sleeper["name"]) == ("Sequential 0", "Sequential and AdamW")
    # Six steps, each of all the state; a trial of "hybrid" may give either end all of it.
    updated = [span for span in trace.spans("update") if span["args"].get("bytes")]
    assert sum(span["args"]["bytes"] for span in updated) == 6 * STATE_BYTES
    if placement == "stream":
        assert trace.sum("fetch") == trace.sum("store") == 6 * STATE_BYTES
    elif placement == "resident":
        assert trace.sum("fetch") == trace.sum("store") == 0
    assert {span["args"]["optimizer"] for span in updated} == {"AdamW 0"}
    # A copy that is not needed any more before it begins is counted and not made.
    for category, counted in (("activation_store", "stored_bytes"), ("activation_fetch", "fetched_bytes")):
        asked = activations["stats"][counted]
        assert 0 < trace.sum(category) <= asked
        assert all(span["args"]["bytes"] == 4 * 32 * 64 for span in trace.spans(category))
    layers = {span["args"]["layer"] for span in trace.spans("activation_store")}
    assert layers <= set(activations["layers"]) == {"0", "1", "2", "3"}
    slept = sleeper["stats"]["bytes"]
    assert trace.sum("sleep") == trace.sum("wake") == slept >= 4 * 4 * (64 * 64 + 64)
    assert trace.names("save") == [save["name"] for save in trace.header["saves"]] == ["save", "async save"]
    assert trace.sum("save") == sum(save["bytes"] for save in trace.header["saves"])
    assert all(save["bytes"] >= STATE_BYTES * 3 // 2 for save in trace.header["saves"])


def test_passes_are_the_outermost_ones_of_the_callers_thread(device, tmp_path):
    model = blocks(device)
    optimizer = torch.optim.SGD(model.parameters())

    def elsewhere() -> None:
        model(torch.ones(2, 64, device=device))

    def work() -> None:
        for _ in range(2):
            value = torch.ones(2, 64, device=device, requires_grad=True)
            output = torch.utils.checkpoint.checkpoint(model, value, use_reentrant=False)
            output.sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(value)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    trace, _ = traced(tmp_path, work)
    rows = [span for span in trace.spans("pass") if span["tid"] == 1]
    assert [row["name"] for row in rows] == ["forward", "backward", "step"] * 2 + ["forward without gradients"]
    assert [row["args"]["step"] for row in rows] == [0] * 3 + [1] * 3 + [2]
    assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in itertools.pairwise(rows))
    assert any(span["tid"] == 2 for span in trace.spans("pass")) == (device.type != "cpu")


def test_a_step_or_a_forward_that_raises_ends_its_pass(tmp_path):
    model = blocks(torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters())

    def broken(*_: object) -> None:
        raise RuntimeError("on purpose")

    def work() -> None:
        hook = model[1].register_forward_hook(broken)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(torch.ones(2, 64))
        hook.remove()
        loss = model(torch.ones(2, 64)).sum()
        handle = next(model.parameters()).register_hook(broken)
        with pytest.raises(RuntimeError, match="on purpose"):
            loss.backward()
        handle.remove()
        with pytest.raises(TypeError):
            optimizer.step(closure=broken, nothing=1)
        optimizer.step()

    trace, _ = traced(tmp_path, work)
    assert trace.names("pass") == ["forward", "forward", "backward", "step"]


def test_a_wait_for_a_save_is_shown(device, tmp_path, no_save_is_left):
    def work():
        model = blocks(device)
        optimizer = forebay.AdamW(model.parameters(), lr=1e-2, chunk_bytes=1 << 14, slots=3)
        steps(model, optimizer, 1)
        save = checkpoint.async_save(tmp_path / "saved", model, optimizer, snapshot_budget_bytes=0, write_gbps=2e-3)
        steps(model, optimizer, 1)
        stats = optimizer.stats()
        save.result()
        return stats

    trace, stats = traced(tmp_path, work)
    waited = sum(span["dur"] for span in trace.spans("wait") if span["args"]["reason"] == "save") / 1e6
    assert stats["save_stalls"] > 0
    assert waited > 0


def test_memory_is_shown_over_time(device, tmp_path):
    def work() -> int:
        parameters = make(device=device)
        optimizer = forebay.AdamW(parameters, chunk_bytes=TINY, slots=3)
        give_gradients(parameters, 0)
        optimizer.step()
        pinned = optimizer.stats()["pinned_bytes"]
        optimizer.close()
        return int(pinned)

    gc.collect()
    trace, pinned = traced(tmp_path, work)
    values = [event["args"]["optimizer"] for event in trace.events if event["name"] == "pinned bytes"]
    rings = [event["args"]["ring"] for event in trace.events if event["name"] == "ring bytes"]
    assert max(values) - values[0] >= pinned
    # The ring of a device is torch's; on the CPU it is the engine's.
    assert max(rings) - rings[0] == 3 * TINY
    assert rings[-1] == rings[0]


def test_memory_of_the_trace_is_fixed_and_drops_are_counted(tmp_path):
    def work() -> None:
        parameters = make()
        optimizer = forebay.AdamW(parameters, chunk_bytes=TINY, slots=3)
        for step in range(20):
            give_gradients(parameters, step)
            optimizer.step()

    trace, _ = traced(tmp_path, work, capacity=50)
    kept = [event for event in trace.events if event["ph"] != "M"]
    assert (len(kept), trace.header["capacity"]) == (50, 50)
    assert trace.header["dropped"] > 50
    # The newest are kept.
    assert max(event["ts"] for event in kept) > trace.header["seconds"] * 1e6 / 2


def test_objects_that_ended_within_the_trace_are_described(tmp_path):
    def work() -> None:
        for _ in range(2):
            parameters = make()
            optimizer = forebay.SGD(parameters, lr=0.1, momentum=0.5, chunk_bytes=TINY, slots=2)
            give_gradients(parameters, 0)
            optimizer.step()
            optimizer.close()
        del optimizer
        gc.collect()

    trace, _ = traced(tmp_path, work)
    assert [row["name"] for row in trace.header["optimizers"]] == ["SGD 0", "SGD 1"]
    assert all(row["stats"]["chunks"] > 0 and row["settings"]["momentum"] == 0.5 for row in trace.header["optimizers"])
    assert {span["args"]["optimizer"] for span in trace.spans("fetch")} == {"SGD 0", "SGD 1"}


def test_a_probe_is_the_limit_of_the_wire(tmp_path):
    copies = [
        {"copy_bytes": 1 << 20, "pinned_fetch_gbps": 40.0, "pinned_store_gbps": 41.5},
        {"copy_bytes": 1 << 24, "pinned_fetch_gbps": 55.0, "pinned_store_gbps": 39.0},
    ]
    trace, _ = traced(tmp_path, lambda: None, probe={"copies": copies, "wire_gbps": 50.5})
    assert trace.header["wire"] == {"fetch_gbps": 55.0, "store_gbps": 41.5, "both_gbps": 50.5}
    assert traced(tmp_path, lambda: None)[0].header["wire"] is None


def test_a_plan_of_activations_is_in_the_file(tmp_path):
    def work():
        model = blocks(torch.device("cpu"), count=5)
        handle = forebay.offload_activations(model, layers=list(model), budget_bytes=1 << 20, min_bytes=1024)
        optimizer = torch.optim.SGD(model.parameters())
        steps(model, optimizer, 4)
        return handle, model

    trace, (handle, _) = traced(tmp_path, work)
    (row,) = trace.header["activations"]
    assert row["plan"] == handle.plan()
    assert row["explain"] == handle.explain()
    assert row["settings"]["budget_bytes"] == 1 << 20
    assert row["layers"] == ["0", "1", "2", "3", "4"]
    handle.remove()


def test_there_are_no_secrets_in_the_file(tmp_path, monkeypatch, no_save_is_left):
    monkeypatch.setenv("FOREBAY_SECRET", "swordfish")
    traced(tmp_path, lambda: everything(torch.device("cpu"), tmp_path, "stream"))
    text = (tmp_path / "run.json").read_text()
    for secret in ("swordfish", str(Path.home()) + "/", str(tmp_path), socket.gethostname(), os.getcwd()):
        assert secret not in text, secret
