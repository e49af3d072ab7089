"""Gradients that are copied to the host during the last backward: the same bits as when the step fetches them."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import forebay
from support.optim import TINY, make, snapshot
from support.tensors import assert_same

# On the CPU gradients need not be copied for "host"; "hybrid" copies them there too.
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
    # f32 weights are copied with the step, and their gradients before it.
    assert down[0] == 2 * down[1] > 0


def unscale(parameter: torch.nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


def replace(parameter: torch.nn.Parameter) -> None:
    parameter.grad = parameter.grad * 0.5


def accumulate(parameter: torch.nn.Parameter) -> None:
    (parameter * 0.01).sum().backward()


def drop(parameter: torch.nn.Parameter) -> None:
    parameter.grad = None


def negate(parameter: torch.nn.Parameter) -> None:
    parameter.grad.data.neg_()


def turn(parameter: torch.nn.Parameter) -> None:
    parameter.grad.data.copy_(parameter.grad.flip(0))


def exchange_two(parameter: torch.nn.Parameter) -> None:
    first, last = parameter.grad.data.view(-1)[0].clone(), parameter.grad.data.view(-1)[-1].clone()
    parameter.grad.data.view(-1)[0], parameter.grad.data.view(-1)[-1] = last, first


def transpose(parameter: torch.nn.Parameter) -> None:
    # As memory it is the same, at the same address.
    parameter.grad = parameter.grad.t()


def put_elsewhere(parameter: torch.nn.Parameter) -> None:
    parameter.grad.data = parameter.grad.data * 2


CHANGES = [unscale, replace, accumulate, drop, negate, turn, exchange_two, transpose, put_elsewhere]


@pytest.mark.parametrize("change", CHANGES)
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
            # A square weight.
            change(parameters[2])
            optimizer.step()
            optimizer.zero_grad()
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


def scaled_step(optimizer: forebay.AdamW, scaler: torch.amp.GradScaler, loss: torch.Tensor, *, lands: bool) -> None:
    """Take a step with a scaled loss, with gradients that are copied during its backward pass or not."""
    with optimizer.last_backward() if lands else nullcontext():
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def test_a_scaler_that_unscales_afterwards_is_honoured(device: torch.device, placed: dict[str, Any]) -> None:
    ends = []
    for options in (placed, {}):
        model = model_of(device)
        parameters = list(model.parameters())
        optimizer = forebay.AdamW(parameters, lr=1e-2, chunk_bytes=TINY, **options)
        scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
        for step in range(3):
            scaled_step(optimizer, scaler, loss_of(model, step, device), lands=bool(options))
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


@pytest.mark.parametrize("scale", [1e-28, 1.0], ids=["tiny", "plain"])
def test_gradients_too_small_for_a_norm_are_noticed(device: torch.device, placed: dict[str, Any], scale: float) -> None:
    ends = []
    for options in (placed, {}):
        parameters = make([(40, 40), ()], device=device)
        optimizer = forebay.AdamW(parameters, lr=1e-2, chunk_bytes=TINY, **options)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**16)
        for _ in range(2):
            loss = sum((parameter * parameter).sum() for parameter in parameters) * scale
            scaled_step(optimizer, scaler, loss, lands=bool(options))
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


# Memory that is held for the copies.


def held_bytes(optimizer: forebay.AdamW) -> int:
    return sum(gradient.tensor.nbytes for _, _, gradient in optimizer._landed.gradients.values())


def landed(device: torch.device) -> tuple[list[torch.nn.Parameter], forebay.AdamW, Any]:
    """Return parameters whose gradients are down or on their way, and what makes others."""
    parameters = make([(1000,), (300, 5)], device=device)
    optimizer = forebay.AdamW(parameters, placement="hybrid", host_fraction=0.7, chunk_bytes=TINY)

    def backward() -> None:
        sum((parameter * parameter).sum() for parameter in parameters).backward()

    with optimizer.last_backward():
        backward()
    assert held_bytes(optimizer) == 4 * 2500
    return parameters, optimizer, backward


def test_gradients_of_a_step_left_out_are_let_go_of(device: torch.device) -> None:
    parameters, optimizer, backward = landed(device)
    optimizer.zero_grad()
    assert held_bytes(optimizer) == 0
    # The model's own zero_grad tells nobody: the next backward finds out, gradient by gradient.
    with optimizer.last_backward():
        backward()
    for parameter in parameters:
        parameter.grad = None
    backward()
    assert held_bytes(optimizer) == 0
    with optimizer.last_backward():
        pass
    with optimizer.last_backward():
        backward()
    for parameter in parameters:
        parameter.grad = None
    optimizer.step()
    assert held_bytes(optimizer) == 0


def test_a_gradient_is_held_until_its_copy_has_ended(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    # Large and quick enough that copies would still be reading the gradients that were replaced.
    elements = 4_000_000
    parameter = torch.nn.Parameter(torch.zeros(elements, device=device))
    optimizer = forebay.AdamW([parameter], placement="hybrid", host_fraction=0.5)
    with optimizer.last_backward():
        pass
    (hook,) = parameter._post_accumulate_grad_hooks.values()
    monkeypatch.setattr(forebay.optim.backward, "Fingerprint", lambda _: None)
    ended: list[Any] = []
    finish = optimizer._engine.finish_landing

    class Engine:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def finish_landing(self, home: Any) -> None:
            finish(home)
            ended.append([known() is not None for known in held])

    engine, optimizer._engine = optimizer._engine, Engine()
    held: list[weakref.ref[Any]] = []
    with optimizer.last_backward():
        for value in range(20):
            parameter.grad = torch.full_like(parameter, float(value))
            held.append(weakref.ref(parameter.grad))
            hook(parameter)
            assert sum(known() is not None for known in held) == 1
    # Each was there until the wait for its copy was over.
    assert [alive[-2] for alive in ended if len(alive) > 1] == [True] * 19
    optimizer._engine = engine


def test_hooks_go_with_the_optimizer(device: torch.device, placed: dict[str, Any]) -> None:
    model = model_of(device)
    optimizer = forebay.AdamW(model.parameters(), **placed)
    with optimizer.last_backward():
        loss_of(model, 0, device).backward()
    assert all(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    del optimizer
    gc.collect()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


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
        with pytest.raises(forebay.OptionError, match="last_backward needs placement"), optimizer.last_backward():
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
