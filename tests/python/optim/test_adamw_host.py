"""The update on the host, and on host and device at once: the same bits, clear errors, nothing lost."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
import forebay.checkpoint
from support.optim import TINY, give_gradients, groups_of, make, run, snapshot, train
from support.tensors import assert_same, bits, needs_cuda, same_bits

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"f32": (F32,), "bf16": (BF16,), "mixed": (F32, BF16, F16)}

PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"placement": "host"},
    "one thread": {"placement": "host", "host_threads": 1},
    "portable": {"placement": "host", "host_kernel": "portable"},
    "auto": {"placement": "hybrid"},
    "0.0": {"placement": "hybrid", "host_fraction": 0.0},
    "0.3": {"placement": "hybrid", "host_fraction": 0.3},
    "0.8": {"placement": "hybrid", "host_fraction": 0.8},
    "1.0": {"placement": "hybrid", "host_fraction": 1},
}


@pytest.fixture(params=PLACEMENTS)
def placed(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options that let the host update all or some."""
    return PLACEMENTS[request.param]


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}], ids=["plain", "amsgrad"])
def test_every_share_gives_the_bits_of_stream(
    device: torch.device, placed: dict[str, Any], dtypes: tuple[torch.dtype, ...], options: dict[str, Any]
) -> None:
    common = {"device": device, "steps": 9, "dtype": dtypes, "max_grad_norm": 2.0, **options}
    assert_same(run(chunk_bytes=TINY, **common, **placed), run(chunk_bytes=TINY, **common))


def test_large_chunks_too(device: torch.device, placed: dict[str, Any]) -> None:
    common: dict[str, Any] = {"shapes": [(300, 700), (41,), (100_001,)], "device": device, "dtype": (BF16, F32)}
    assert_same(run(**common, **placed, chunk_bytes=1 << 20), run(**common))


def test_groups_and_missing_gradients(device: torch.device, placed: dict[str, Any]) -> None:
    ends = []
    for options in (placed, {"placement": "stream"}):
        parameters = make(device=device, dtype=DTYPES["mixed"])
        optimizer = forebay.AdamW(groups_of(parameters), chunk_bytes=TINY, **options)
        for step in range(8):
            train(optimizer, [p for i, p in enumerate(parameters) if (i + step) % 3], range(step, step + 1))
            optimizer.zero_grad()
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


def test_auto_settles_after_six_steps_and_stays(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, placement="hybrid", chunk_bytes=TINY)
    seen = []
    for step in range(10):
        train(optimizer, parameters, range(step, step + 1))
        stats = optimizer.stats()
        assert stats["host_settled"] == (step >= 5)
        seen.append(stats["host_fraction"])
    assert len(set(seen[6:])) == 1
    assert (seen[1], seen[2]) == (0.0, 1.0), "each was tried alone"
    assert seen[5] in (0.0, 1.0), "and the better one once more"


def test_a_fixed_share_is_what_the_host_takes(device: torch.device) -> None:
    parameters = make([(64,)] * 100, device=device)
    for fraction in (0.25, 0.5):
        optimizer = forebay.AdamW(parameters, placement="hybrid", host_fraction=fraction, chunk_bytes=TINY)
        train(optimizer, parameters, 1)
        stats = optimizer.stats()
        assert stats["host_fraction"] == pytest.approx(fraction, abs=0.02)
        assert stats["host_state_bytes"] + stats["store_bytes"] == 100 * 64 * 8
        assert stats["host_settled"]


def test_the_host_alone_needs_no_memory_on_the_device(device: torch.device) -> None:
    parameters = make([(5000,)], device=device, dtype=BF16)
    optimizer = forebay.AdamW(parameters, placement="host", slots=3, chunk_bytes=6000)
    train(optimizer, parameters, 2)
    stats = optimizer.stats()
    assert stats["device_bytes"] == 0
    assert stats["host_threads"] == len(os.sched_getaffinity(0))
    # 12 bytes of state for each; for parameters of a GPU a pinned ring of slots twice as large; slabs are whole pages.
    ring = 3 * 12_288 if device.type == "cuda" else 0
    assert 5000 * 12 + ring <= stats["pinned_bytes"] <= 5000 * 12 + ring + 4 * 4096
    travelled = 0 if device.type == "cpu" else 5000 * 2
    assert (stats["host_down_bytes"], stats["host_up_bytes"]) == (2 * travelled, travelled)


def test_stats_of_other_placements_do_not_speak_of_the_host(device: torch.device) -> None:
    for placement in ("stream", "resident"):
        optimizer = forebay.AdamW(make([(5,)], device=device), placement=placement)
        assert not [key for key in optimizer.stats() if key.startswith("host")]


def test_stats_of_a_share_of_nothing_say_so(device: torch.device) -> None:
    parameters = make([(5,)], device=device)
    optimizer = forebay.AdamW(parameters, placement="hybrid", host_fraction=0.0)
    train(optimizer, parameters, 1)
    stats = optimizer.stats()
    assert (stats["host_fraction"], stats["host_settled"], stats["host_chunks"]) == (0.0, True, 0)


def test_auto_finds_its_share_anew_when_steps_become_much_larger(device: torch.device) -> None:
    parameters = make([(10,), (5000,), (4000,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement="hybrid", chunk_bytes=TINY)
    settled = []
    for step in range(14):
        # At first a head alone.
        give_gradients(parameters if step >= 7 else parameters[:1], step)
        optimizer.step()
        settled.append(optimizer.stats()["host_settled"])
    assert settled == [False] * 5 + [True] * 2 + [False] * 5 + [True] * 2


@pytest.mark.parametrize("placement", ["host", "hybrid"])
def test_a_failure_on_a_thread_surfaces_in_the_step(device: torch.device, placement: str) -> None:
    options: dict[str, Any] = {"host_fraction": 0.6} if placement == "hybrid" else {}
    parameters = make(device=device, dtype=DTYPES["mixed"])
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, chunk_bytes=TINY, **options)
    train(optimizer, parameters, 2)
    before = [int(values["step"]) for values in snapshot(optimizer, parameters)]
    optimizer._engine._fail_on_host_for_test()
    give_gradients(parameters, 2)
    with pytest.raises(forebay.DeviceError, match=r"the host's threads.*an update failed on purpose"):
        optimizer.step()
    assert [int(values["step"]) for values in snapshot(optimizer, parameters)] == before
    # Some of it is updated and some is not: it can be closed, and that is all.
    with pytest.raises(forebay.CheckpointError, match=r"cannot be stepped: its last step broke off .* on purpose"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("placement", ["host", "hybrid"])
def test_after_a_failure_in_mid_step_a_load_brings_all_back(device: torch.device, placement: str) -> None:
    options: dict[str, Any] = {"host_fraction": 0.6} if placement == "hybrid" else {}
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, chunk_bytes=TINY, **options)
    train(optimizer, parameters, 2)
    before, saved = snapshot(optimizer, parameters), copy.deepcopy(optimizer.state_dict())
    optimizer._engine._fail_on_host_for_test()
    give_gradients(parameters, 2)
    with pytest.raises(forebay.DeviceError, match="on purpose"):
        optimizer.step()
    with torch.no_grad():
        for parameter, values in zip(parameters, before, strict=True):
            parameter.copy_(values["param"])
    optimizer.load_state_dict(saved)
    # What is refused beforehand is no such failure.
    parameters[0].data = torch.zeros(1, device=device)
    parameters[0].grad = torch.zeros(1, device=device)
    with pytest.raises(forebay.OptionError, match="shape"):
        optimizer.step()
    parameters[0].data = before[0]["param"].to(device)
    train(optimizer, parameters, range(2, 4))
    assert_same(snapshot(optimizer, parameters), run(device=device, steps=4, chunk_bytes=TINY))


@pytest.mark.parametrize("placed", ["host", "0.3", "auto"], indirect=True)
def test_a_budget_counts_the_hosts_ring_before_anything_is_pinned(device: torch.device, placed: dict[str, Any]) -> None:
    parameters = make([(5000,)], device=device)
    size = {"slots": 2, "chunk_bytes": 1 << 20}
    give_gradients(parameters, 0)

    def refused(budget: int) -> int:
        optimizer = forebay.AdamW(parameters, pinned_budget_bytes=budget, **size, **placed)
        with pytest.raises(forebay.OutOfMemoryError) as caught:
            optimizer.step()
        assert optimizer.stats()["pinned_bytes"] == 0
        assert (caught.value.limit_bytes, caught.value.available_bytes) == (budget, budget)
        return int(caught.value.requested_bytes)

    needed = refused(100)
    # Parameters on the host are updated in place: no ring for them.
    ring = 0 if placed["placement"] == "host" and device.type == "cpu" else 4 << 20
    assert ring + 40_000 < needed < ring + 60_000
    assert refused(needed - 1) == needed
    optimizer = forebay.AdamW(parameters, pinned_budget_bytes=needed, **size, **placed)
    optimizer.step()
    assert optimizer.stats()["pinned_bytes"] == needed


def test_parameters_that_come_to_the_device_later_get_a_ring(device: torch.device) -> None:
    first, second = make([(500,)]), make([(700,), (30,)], device=device)
    optimizer = forebay.AdamW(first, lr=1e-2, placement="host", device=device, chunk_bytes=TINY)
    train(optimizer, first, 1)
    pinned = optimizer.stats()["pinned_bytes"]
    optimizer.add_param_group({"params": second})
    train(optimizer, [*first, *second], range(1, 4))
    ring = 8 * TINY if device.type == "cuda" else 0
    assert ring + 730 * 8 < optimizer.stats()["pinned_bytes"] - pinned < ring + 730 * 8 + 2 * 4096
    expected = forebay.AdamW(others := make([(500,)]), lr=1e-2)
    train(expected, others, 4)
    assert_same(snapshot(optimizer, first), snapshot(expected, others))


def test_state_dicts_pass_from_placement_to_placement(device: torch.device, placed: dict[str, Any]) -> None:
    parameters = make(device=device, dtype=DTYPES["mixed"])
    optimizer = forebay.AdamW(parameters, lr=1e-2, chunk_bytes=TINY, **placed)
    train(optimizer, parameters, 3)
    resumed = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    fresh = forebay.AdamW(resumed, lr=1e-2)
    fresh.load_state_dict(optimizer.state_dict())
    train(optimizer, parameters, range(3, 6))
    train(fresh, resumed, range(3, 6))
    assert_same(snapshot(optimizer, parameters), snapshot(fresh, resumed))


@needs_cuda
@pytest.mark.parametrize("placed", ["host", "0.3", "1.0"], indirect=True)
def test_weights_written_after_a_step_are_not_overtaken(placed: dict[str, Any]) -> None:
    # Whatever follows the step on the caller's stream sees its weights, and is not overwritten by them.
    parameters = make([(3_000_000,)], device="cuda", dtype=BF16)
    expected = run([(3_000_000,)], device="cuda", dtype=BF16, steps=1)
    optimizer = forebay.AdamW(parameters, lr=1e-2, **placed)
    give_gradients(parameters, 0)
    optimizer.step()
    seen = parameters[0].detach().clone()
    with torch.no_grad():
        parameters[0].zero_()
    torch.cuda.synchronize()
    optimizer.synchronize()
    assert same_bits(seen, expected[0]["param"].cuda())
    assert not bits(parameters[0]).any()


@pytest.mark.parametrize("placed", ["host", "0.8"], indirect=True)
def test_a_save_under_way_keeps_its_moment(device: torch.device, placed: dict[str, Any], tmp_path: Path) -> None:
    model = torch.nn.Linear(900, 700, device=device)
    parameters = list(model.parameters())
    optimizer = forebay.AdamW(parameters, lr=1e-2, chunk_bytes=1 << 16, **placed)
    train(optimizer, parameters, 2)
    before = snapshot(optimizer, parameters)
    save = forebay.checkpoint.async_save(tmp_path / "run", model, optimizer)
    train(optimizer, parameters, range(2, 6))
    save.result()
    fresh = torch.nn.Linear(900, 700, device=device)
    other = forebay.AdamW(fresh.parameters(), lr=1e-2)
    forebay.checkpoint.load(tmp_path / "run", fresh, other)
    assert_same(snapshot(other, list(fresh.parameters())), before)
