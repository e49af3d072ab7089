"""Gradients that come down during the last backward: the same bits as when the step fetches them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from adamw_helpers import TINY, assert_same, make, snapshot

import forebay

# On the CPU gradients need not come down at all for "host"; "hybrid" brings them down there too.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {"placement": "host"},
    "hybrid": {"placement": "hybrid", "host_fraction": 0.7},
}


@pytest.fixture(params=PLACEMENTS)
def placed(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options that let the host update."""
    return PLACEMENTS[request.param]


def model_of(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 40), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(40, 8)).to(device, dtype)


def loss_of(model: torch.nn.Module, step: int, device: torch.device) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    batch = torch.randn((6, 24), generator=torch.Generator().manual_seed(step)).to(device, dtype)
    return model(batch).float().square().mean()


def trained(
    device: torch.device, marks: bool, dtype: torch.dtype = torch.float32, micro: int = 3, **options: Any
) -> tuple[list[dict[str, torch.Tensor]], forebay.AdamW]:
    model = model_of(device, dtype)
    parameters = list(model.parameters())
    optimizer = forebay.AdamW(parameters, lr=1e-2, chunk_bytes=TINY, **options)
    for step in range(4):
        for part in range(micro):
            loss = loss_of(model, 10 * step + part, device)
            if marks and part == micro - 1:
                with optimizer.last_backward():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(optimizer, parameters), optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clipped"])
def test_the_bits_are_those_of_a_step_without_it(
    device: torch.device, placed: dict[str, Any], dtype: torch.dtype, clip: float | None
) -> None:
    with_it, optimizer = trained(device, True, dtype, max_grad_norm=clip, **placed)
    without, _ = trained(device, False, dtype, max_grad_norm=clip)
    assert_same(with_it, without)
    if device.type == "cuda" and clip is None and dtype == torch.bfloat16:
        # Only weights came down in the step itself.
        stats = optimizer.stats()
        assert stats["host_down_bytes"] == stats["host_up_bytes"] > 0


def test_gradients_did_come_down(device: torch.device) -> None:
    model = model_of(device)
    optimizer = forebay.AdamW(model.parameters(), placement="hybrid", host_fraction=0.9, chunk_bytes=TINY)
    down = []
    for marks in (False, True):
        if marks:
            with optimizer.last_backward():
                loss_of(model, 1, device).backward()
        else:
            loss_of(model, 1, device).backward()
        optimizer.step()
        down.append(optimizer.stats()["host_down_bytes"])
        optimizer.zero_grad()
    # f32 weights come down with the step, and their gradients before it.
    assert down[0] == 2 * down[1] > 0


def unscale(parameter: torch.nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


def replace(parameter: torch.nn.Parameter) -> None:
    parameter.grad = parameter.grad * 0.5


def accumulate(parameter: torch.nn.Parameter) -> None:
    (parameter * 0.01).sum().backward()


def drop(parameter: torch.nn.Parameter) -> None:
    parameter.grad = None


@pytest.mark.parametrize("change", [unscale, replace, accumulate, drop])
def test_a_gradient_changed_afterwards_is_fetched_anew(
    device: torch.device, placed: dict[str, Any], change: Any
) -> None:
    ends = []
    for options in (placed, {}):
        model = model_of(device)
        parameters = list(model.parameters())
        optimizer = forebay.AdamW(parameters, lr=1e-2, chunk_bytes=TINY, **options)
        for step in range(2):
            if options:
                with optimizer.last_backward():
                    loss_of(model, step, device).backward()
            else:
                loss_of(model, step, device).backward()
            change(parameters[2])
            optimizer.step()
            optimizer.zero_grad()
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


def test_a_scaler_that_unscales_afterwards_is_honoured(device: torch.device, placed: dict[str, Any]) -> None:
    ends = []
    for options in (placed, {}):
        model = model_of(device)
        parameters = list(model.parameters())
        optimizer = forebay.AdamW(parameters, lr=1e-2, chunk_bytes=TINY, **options)
        scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
        for step in range(3):
            loss = scaler.scale(loss_of(model, step, device))
            if options:
                with optimizer.last_backward():
                    loss.backward()
            else:
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


def test_a_backward_that_fails_leaves_nothing_behind(device: torch.device, placed: dict[str, Any]) -> None:
    model = model_of(device)
    parameters = list(model.parameters())
    optimizer = forebay.AdamW(parameters, lr=1e-2, chunk_bytes=TINY, **placed)

    def fails() -> None:
        with optimizer.last_backward():
            loss_of(model, 0, device).backward()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fails()
    optimizer.zero_grad()
    loss_of(model, 1, device).backward()
    optimizer.step()
    other = model_of(device)
    reference = forebay.AdamW(other.parameters(), lr=1e-2)
    loss_of(other, 1, device).backward()
    reference.step()
    assert_same(snapshot(optimizer, parameters), snapshot(reference, list(other.parameters())))


def test_placements_without_a_host_part_refuse_it(device: torch.device) -> None:
    options: list[dict[str, Any]] = [
        {"placement": "stream"},
        {"placement": "resident"},
        {"placement": "hybrid", "host_fraction": 0.0},
    ]
    for option in options:
        optimizer = forebay.AdamW(make([(3,)], device=device), **option)
        with pytest.raises(forebay.OptionError, match="last_backward belongs to"), optimizer.last_backward():
            pass


def test_nesting_is_refused(device: torch.device, placed: dict[str, Any]) -> None:
    optimizer = forebay.AdamW(make([(3,)], device=device), **placed)
    with optimizer.last_backward(), pytest.raises(forebay.OptionError, match="nested"), optimizer.last_backward():
        pass


def test_room_for_gradients_counts_against_the_budget(device: torch.device) -> None:
    parameters = make([(100_000,)], device=device)
    optimizer = forebay.AdamW(
        parameters, placement="hybrid", slots=2, chunk_bytes=TINY, pinned_budget_bytes=900_000, host_fraction=0.5
    )
    with pytest.raises(forebay.OutOfMemoryError) as caught, optimizer.last_backward():
        pass
    assert caught.value.requested_bytes >= 400_000
    assert caught.value.limit_bytes == 900_000


def test_hooks_keep_no_optimizer_alive_and_close_takes_them_off(device: torch.device, placed: dict[str, Any]) -> None:
    model = model_of(device)
    optimizer = forebay.AdamW(model.parameters(), **placed)
    with optimizer.last_backward():
        loss_of(model, 0, device).backward()
    optimizer.step()
    optimizer.close()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    other = forebay.AdamW(model.parameters(), **placed)
    with other.last_backward():
        loss_of(model, 0, device).backward()
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    loss_of(model, 0, device).backward()
