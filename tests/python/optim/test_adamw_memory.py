"""Bytes: what is pinned, what is on the device, what travels, and that a step allocates nothing."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

import forebay
from forebay import _core
from forebay._device import engine_name
from support.optim import SHAPES, TINY, make, train
from support.tensors import needs_cuda

FIELDS = {
    "step_s",
    "fetch_s",
    "update_s",
    "store_s",
    "fetch_bytes",
    "store_bytes",
    "fetch_gbps",
    "store_gbps",
    "device_bytes",
    "pinned_bytes",
    "chunks",
    "stalls",
}


def test_stats_have_every_field(device: torch.device, placement: str) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    assert optimizer.stats().keys() >= FIELDS
    train(optimizer, parameters, 2)
    stats = optimizer.stats()
    assert stats.keys() >= FIELDS
    numbers = {name: value for name, value in stats.items() if name not in ("state_formats", "f32_state")}
    assert all(isinstance(value, (int, float)) and value >= 0 for value in numbers.values())
    assert stats["step_s"] > 0
    if placement == "stream":
        assert stats["chunks"] >= 1
        assert stats["fetch_s"] > 0
        assert stats["fetch_gbps"] == pytest.approx(stats["fetch_bytes"] / stats["fetch_s"] / 1e9)


@pytest.mark.parametrize(
    ("dtype", "options", "width"),
    [
        (torch.float32, {}, 8),
        (torch.float32, {"amsgrad": True}, 12),
        (torch.bfloat16, {}, 12),
        (torch.float16, {"amsgrad": True}, 16),
        (torch.bfloat16, {"master_weights": False}, 8),
        (torch.float16, {"master_weights": False, "amsgrad": True}, 12),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [TINY, 1 << 20])
def test_bytes_moved_are_the_payload(
    device: torch.device, dtype: torch.dtype, options: dict[str, bool], width: int, chunk_bytes: int
) -> None:
    parameters = make(device=device, dtype=dtype)
    optimizer = forebay.AdamW(parameters, chunk_bytes=chunk_bytes, **options)
    for _ in range(2):
        train(optimizer, parameters, 1)
        stats = optimizer.stats()
        elements = sum(parameter.numel() for parameter in parameters)
        assert stats["fetch_bytes"] == stats["store_bytes"] == width * elements


def test_parameters_without_a_gradient_do_not_count(device: torch.device) -> None:
    parameters = make([(5000,), (300,), (5000,)], device=device)
    optimizer = forebay.AdamW(parameters, chunk_bytes=TINY)
    train(optimizer, parameters, 1)
    whole = optimizer.stats()["chunks"]
    optimizer.zero_grad()
    train(optimizer, parameters[1:2], 1)
    stats = optimizer.stats()
    assert stats["fetch_bytes"] == 8 * 300
    assert stats["chunks"] < whole / 4


@pytest.mark.parametrize("slots", [2, 5])
@pytest.mark.parametrize("chunk_bytes", [TINY, 4096, 1 << 20])
def test_the_ring_is_slots_times_chunk(device: torch.device, slots: int, chunk_bytes: int) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, slots=slots, chunk_bytes=chunk_bytes)
    assert optimizer.stats()["device_bytes"] == 0
    train(optimizer, parameters, 1)
    assert optimizer.stats()["device_bytes"] == slots * chunk_bytes


@pytest.mark.parametrize(("dtype", "arenas"), [(torch.float32, 2), (torch.bfloat16, 3)])
def test_pinned_bytes_are_exact(device: torch.device, dtype: torch.dtype, arenas: int) -> None:
    shapes = [(1000, 70), (33,), (12345,), ()]
    parameters = make(shapes, device=device, dtype=dtype)
    optimizer = forebay.AdamW(parameters)
    optimizer.prepare()
    payload = sum(4 * arenas * parameter.numel() for parameter in parameters) + 4 * len(parameters)
    # Tensors start at multiples of 64 elements, arenas at multiples of 256 bytes, and the slab ends with a page.
    slack = (arenas + 1) * 256 + arenas * len(parameters) * 256 + mmap.PAGESIZE
    assert payload <= optimizer.stats()["pinned_bytes"] <= payload + slack
    pinned = optimizer.stats()["pinned_bytes"]
    train(optimizer, parameters, 3)
    assert optimizer.stats()["pinned_bytes"] == pinned


def test_a_large_tensor_has_next_to_no_slack(device: torch.device) -> None:
    parameters = make([(1 << 18,)], device=device)
    optimizer = forebay.AdamW(parameters)
    optimizer.prepare()
    assert optimizer.stats()["pinned_bytes"] <= 8 * (1 << 18) + 3 * 256 + mmap.PAGESIZE


def test_the_constructor_pins_nothing(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters)
    stats = optimizer.stats()
    assert (stats["pinned_bytes"], stats["device_bytes"]) == (0, 0)
    assert optimizer._engine is None
    optimizer.add_param_group({"params": make([(5,)], device=device)})
    optimizer.state_dict()
    assert optimizer.stats()["pinned_bytes"] == 0
    optimizer.prepare()
    assert optimizer.stats()["pinned_bytes"] > 0


def test_resident_state_pins_nothing(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, placement="resident")
    train(optimizer, parameters, 2)
    stats = optimizer.stats()
    assert (stats["pinned_bytes"], stats["fetch_bytes"]) == (0, 0)


def test_close_gives_pinned_memory_back(device: torch.device) -> None:
    parameters = make([(1 << 20,)], device=device)
    # A ring that is smaller than the state: on the CPU that goes too.
    optimizer = forebay.AdamW(parameters, chunk_bytes=1 << 20, slots=2)
    train(optimizer, parameters, 1)

    gc.collect()  # What other tests left behind must not look like ours.
    pinned = _core._memory_for_test(engine_name(device))[1]
    optimizer.state.clear()
    optimizer.close()
    assert pinned - _core._memory_for_test(engine_name(device))[1] >= 8 << 20


def test_steps_make_no_resources(device: torch.device, placement: str) -> None:
    parameters = make(device=device, dtype=[torch.float32, torch.bfloat16])
    optimizer = forebay.AdamW(parameters, placement=placement, chunk_bytes=TINY, max_grad_norm=1.0)
    train(optimizer, parameters, 1)
    made = optimizer._engine.resources_made()
    for step in range(1, 6):
        optimizer.param_groups[0]["lr"] = 0.1 / step
        train(optimizer, parameters, range(step, step + 1))
        assert optimizer._engine.resources_made() == made
    optimizer.state_dict()
    optimizer.stats()
    assert optimizer._engine.resources_made() == made


@needs_cuda
def test_no_spike_at_the_first_step() -> None:
    ring = 4 << 20
    # For the sums of a norm and the rounding of the allocator; any one tensor of the state is four times as large.
    allowance = 8 << 20
    parameters = [torch.nn.Parameter(torch.ones(8_000_000, device="cuda", dtype=torch.bfloat16)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    gc.collect()  # What other tests left behind must not be freed in the middle.
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer = forebay.AdamW(parameters, chunk_bytes=ring // 4, slots=4, max_grad_norm=1.0)
    assert torch.cuda.max_memory_allocated() - before <= allowance
    optimizer.step()
    assert all(value.device.type == "cpu" for state in optimizer.state.values() for value in state.values())
    assert torch.cuda.max_memory_allocated() - before <= ring + allowance
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - held <= allowance
    assert torch.cuda.memory_allocated() - held <= 1 << 20, "steps keep nothing"
    optimizer.close()


@needs_cuda
def test_the_ring_is_in_torchs_books_and_goes_back_with_close() -> None:
    parameters = make(SHAPES, device="cuda")
    train(forebay.AdamW(parameters), parameters, 1)
    gc.collect()
    before = torch.cuda.memory_allocated()
    optimizer = forebay.AdamW(parameters, chunk_bytes=1 << 20, slots=3)
    optimizer.prepare()
    assert torch.cuda.memory_allocated() - before == 3 << 20
    optimizer.close()
    assert torch.cuda.memory_allocated() == before
