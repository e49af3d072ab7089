"""The handle of ``overlap_step``: what is refused, what it reports, and the placements where the host takes part."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import forebay
from support.optim import TINY
from support.overlap import Run, adamw, batch, both, net

CLIPS = pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clipped"])

PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"placement": "host"},
    "hybrid": {"placement": "hybrid", "host_fraction": 0.7},
    "auto": {"placement": "hybrid"},
}


@CLIPS
@pytest.mark.parametrize("how", ["marked", "counted", "not at all"])
@pytest.mark.parametrize("placed", PLACEMENTS)
def test_the_host_updates_under_the_next_forward(
    device: torch.device, placed: str, how: str, clip: float | None
) -> None:
    def body(run: Run) -> None:
        if how != "marked":
            run.last = nullcontext  # type: ignore[method-assign]
        run.train(5, 2)

    overlap = {"accumulation_steps": 2} if how == "counted" else {}
    for late in (False, True):
        both(body, device, overlap=overlap, late=late, max_grad_norm=clip, **PLACEMENTS[placed])


def refused(match: str, model: Any, optimizer: Any, **options: Any) -> None:
    with pytest.raises(forebay.OptionError, match=match):
        forebay.overlap_step(model, optimizer, **options)


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    model, other = net(device), net(device)
    optimizer = adamw(model)
    refused("not those of forebay.AdamW", other, optimizer)
    refused("not those of forebay.AdamW", [model, other], optimizer)
    refused("none was given", [], optimizer)
    refused("takes a module or several, not a int", [3], optimizer)
    refused("accumulation_steps: 0", model, optimizer, accumulation_steps=0)
    refused("accumulation_steps: 1.5", model, optimizer, accumulation_steps=1.5)
    refused("overlap_bytes: 5", model, optimizer, overlap_bytes=5)
    refused("is for steps with max_grad_norm", model, optimizer, speculate=True)
    refused("use forebay.offload first", model, torch.optim.AdamW(model.parameters()))
    refused("grad_source is 'main_grad'", model, adamw(model, grad_source="main_grad"))
    units = forebay.offload(torch.optim.Adagrad(model.parameters()))
    refused("has no update rule", model, units, overlap_bytes=1 << 20)
    handle = forebay.overlap_step(model, optimizer)
    refused("is overlapped already", model, optimizer)
    handle.remove()
    forebay.overlap_step(model, optimizer)


def test_closures_are_refused(device: torch.device) -> None:
    model = net(device)
    optimizer = adamw(model)
    forebay.overlap_step(model, optimizer)
    with pytest.raises(forebay.OptionError, match="closure"):
        optimizer.step(lambda: 1.0)


def test_a_handle_is_not_copied(device: torch.device) -> None:
    model = net(device)
    handle = forebay.overlap_step(model, adamw(model))
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(forebay.OptionError, match="call overlap_step for the copy"):
            make(handle)


def test_statistics_and_the_plan(device: torch.device) -> None:
    model = net(device)
    optimizer = adamw(model)
    handle = forebay.overlap_step(model, optimizer, accumulation_steps=1, overlap_bytes=8 * TINY)
    assert handle.stats()["steps"] == 0
    assert "0 parts" in handle.explain()
    for step in range(3):
        model(batch(step, model)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    stats = handle.stats()
    for name in ("exposed_s", "freed_bytes", "speculated", "accepted", "pinned_bytes", "device_bytes"):
        assert name in stats
    assert stats["steps"] == 3
    assert stats["taken_in_backward"] == 6
    assert stats["device_bytes"] == 8 * TINY
    assert stats["pinned_bytes"] == optimizer.stats()["pinned_bytes"] > 0
    plan = handle.plan()
    assert {name for part in plan for name in part["tensors"]} == {f"parameter {i} of group 0" for i in range(6)}
    ran = [part["position"] for part in plan]
    assert sorted(ran) == list(range(len(plan)))
    text = handle.explain()
    assert f"{len(plan)} parts were updated" in text
    assert "parameter 0 of group 0" in text
    handle.remove()
    assert optimizer._options.slots == 4


def test_a_restored_optimizer_is_plain(device: torch.device) -> None:
    model = net(device)
    optimizer = forebay.offload(torch.optim.AdamW(model.parameters()), chunk_bytes=TINY)
    forebay.overlap_step(model, optimizer, accumulation_steps=1)
    for step in range(2):
        model(batch(step, model)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    forebay.restore(optimizer)
    assert type(optimizer) is torch.optim.AdamW
    model(batch(5, model)).sum().backward()
    assert torch.isfinite(model[0].weight.grad).all()
    optimizer.step()


@CLIPS
def test_sleep_between_steps(device: torch.device, clip: float | None) -> None:
    def body(run: Run) -> None:
        run.train(2)
        with run.last():
            run.loss(7).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        sleeper = forebay.Sleeper(run.model, run.optimizer)
        sleeper.sleep()
        sleeper.wake()
        run.train(range(3, 5))

    both(body, device, max_grad_norm=clip)


@CLIPS
@pytest.mark.parametrize("zero", [True, False])
def test_saves_and_loads(device: torch.device, clip: float | None, zero: bool, tmp_path: Any) -> None:
    def body(run: Run) -> None:
        path = tmp_path / str(run.overlaps)
        run.train(2)
        with run.last():
            run.loss(7).backward()
        run.optimizer.step()
        if zero:
            run.optimizer.zero_grad()
        forebay.checkpoint.save(path, run.model, run.optimizer)
        saving = forebay.checkpoint.async_save(f"{path}-async", run.model, run.optimizer)
        run.optimizer.zero_grad()
        run.train(range(3, 5))
        saving.result()
        run.see(*run.model.parameters())
        for name in (f"{path}-async", path):
            forebay.checkpoint.load(name, run.model, run.optimizer)
            run.see(*run.model.parameters())
            run.train(range(5, 7))

    both(body, device, max_grad_norm=clip)


def test_a_save_between_backward_and_step_is_refused(device: torch.device, tmp_path: Any) -> None:
    model = net(device)
    optimizer = adamw(model)
    forebay.overlap_step(model, optimizer, accumulation_steps=1)
    for step in range(2):
        model(batch(step, model)).sum().backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(forebay.Error, match=r"step\(\)"):
        forebay.checkpoint.save(tmp_path / "a", model, optimizer)
    with pytest.raises(forebay.Error, match=r"step\(\)"):
        forebay.Sleeper(model, optimizer, gradients="drop").sleep()
    optimizer.step()
    forebay.checkpoint.save(tmp_path / "a", model, optimizer)
