"""A second copy of the pinned state: tensors of the state follow an exchange, and nothing else changes."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay.errors import OptionError, OutOfMemoryError
from forebay.optim.second import close_second, open_second
from support.optim import TINY, give_gradients, make, move_over, snapshot, train
from support.tensors import assert_same, random

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.optim.base import Optimizer

MIXED = [torch.float32, torch.bfloat16]

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": lambda p, **options: forebay.AdamW(p, lr=1e-2, amsgrad=True, **options),
    "sgd": lambda p, **options: forebay.SGD(p, lr=1e-2, momentum=0.9, **options),
    "lion": lambda p, **options: forebay.Lion(p, lr=1e-3, **options),
}


@pytest.fixture(params=["stream", "host", "hybrid"])
def pinned(request: pytest.FixtureRequest) -> str:
    """Placements with state in pinned memory."""
    return str(request.param)


class Spy:
    """An engine that counts the views it gives."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.views = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def view(self, *arguments: Any) -> Any:
        """Count a call and pass it on."""
        self.views += 1
        return self.engine.view(*arguments)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("reads", [False, True])
def test_steps_on_both_copies_have_the_same_bits(kind: str, reads: bool, device: torch.device, pinned: str) -> None:
    ends = []
    for moves in (False, True):
        parameters = make(device=device, dtype=MIXED)
        optimizer = OPTIMIZERS[kind](parameters, placement=pinned, chunk_bytes=TINY)
        if moves:
            optimizer.prepare()
            open_second(optimizer)
        for step in range(5):
            give_gradients(parameters, step)
            optimizer.step()
            if moves:
                move_over(optimizer)
            if reads:
                ends.append(snapshot(optimizer, parameters))
        ends.append(snapshot(optimizer, parameters))
    half = len(ends) // 2
    for one, other in zip(ends[:half], ends[half:], strict=True):
        assert_same(one, other)


READERS: dict[str, Callable[[Optimizer, torch.Tensor], Any]] = {
    "item": lambda optimizer, p: optimizer.state[p],
    "get": lambda optimizer, p: optimizer.state.get(p),
    "items": lambda optimizer, p: list(optimizer.state.items()),
    "values": lambda optimizer, p: list(optimizer.state.values()),
    "state_dict": lambda optimizer, p: optimizer.state_dict(),
    "synchronize": lambda optimizer, p: optimizer.synchronize(),
}


@pytest.mark.parametrize("reader", READERS)
def test_tensors_are_the_same_objects_over_the_other_copy(reader: str, device: torch.device) -> None:
    parameters = [
        torch.nn.Parameter(random((20, 48), 1).to(device)),
        torch.nn.Parameter(random((4, 6, 5, 3), 2).to(device, torch.bfloat16).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.empty((0, 3), device=device)),
    ]
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 2)
    open_second(optimizer)
    held = [dict(optimizer.state[parameter]) for parameter in parameters]
    for change in range(3):
        expected = [{kind: value + (kind != "step") for kind, value in values.items()} for values in held]
        places = [{kind: value.data_ptr() for kind, value in values.items()} for values in held]
        shapes = [{kind: (value.shape, value.stride()) for kind, value in values.items()} for values in held]
        move_over(optimizer, change=1.0)
        for parameter, values, wanted, before, shaped in zip(parameters, held, expected, places, shapes, strict=True):
            READERS[reader](optimizer, parameter)
            for kind, value in values.items():
                assert value is dict.__getitem__(optimizer.state, parameter)[kind]
                assert torch.equal(value, wanted[kind]), (kind, change)
                assert (value.shape, value.stride()) == shaped[kind]
                assert (value.data_ptr() != before[kind]) == (kind != "step" and value.numel() > 0)


def test_reading_makes_no_tensors_while_nothing_has_moved(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, chunk_bytes=TINY)
    train(optimizer, parameters, 1)
    open_second(optimizer)
    spy: Any = Spy(optimizer._engine)
    optimizer._engine = spy
    for _ in range(3):
        snapshot(optimizer, parameters)
        optimizer.state_dict()
    assert spy.views == 0
    move_over(optimizer)
    spy.views = 0
    optimizer.state[parameters[0]]
    assert spy.views == 3, "only what is looked up"
    optimizer.synchronize()
    assert spy.views == sum(3 if parameter.numel() else 1 for parameter in parameters), "each once"
    every = spy.views
    snapshot(optimizer, parameters)
    optimizer.synchronize()
    assert spy.views == every


def test_what_is_written_goes_to_the_current_copy(device: torch.device, pinned: str) -> None:
    ends = []
    for moves in (False, True):
        parameters = make(device=device, dtype=MIXED)
        optimizer = forebay.AdamW(parameters, lr=1e-2, placement=pinned, chunk_bytes=TINY)
        optimizer.prepare()
        if moves:
            open_second(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())

        def move(optimizer: Optimizer = optimizer, moves: bool = moves) -> None:
            if moves:
                move_over(optimizer)

        train(optimizer, parameters, 1, move)
        optimizer.state[parameters[0]]["exp_avg"] = torch.full((33, 7), 0.25)
        move()
        dict.__getitem__(optimizer.state, parameters[1])["step"] = 7.0
        move()
        del optimizer.state[parameters[2]]
        move()
        train(optimizer, parameters, range(1, 2), move)
        optimizer.state[parameters[4]]["exp_avg_sq"].fill_(0.5)
        train(optimizer, parameters, range(2, 3), move)
        with torch.no_grad():
            parameters[1].add_(0.125)
        optimizer.refresh_master_weights()
        ends.append(snapshot(optimizer, parameters))
        move()
        optimizer.load_state_dict(saved)
        move()
        ends.append(snapshot(optimizer, parameters))
        train(optimizer, parameters, range(3, 5), move)
        ends.append(snapshot(optimizer, parameters))
    for one, other in zip(ends[:3], ends[3:], strict=True):
        assert_same(one, other)


def test_masters_that_no_step_has_made_are_made_in_the_current_copy(device: torch.device) -> None:
    parameters = make(device=device, dtype=torch.bfloat16)
    optimizer = forebay.AdamW(parameters, chunk_bytes=TINY)
    optimizer.prepare()
    open_second(optimizer)
    move_over(optimizer)
    for parameter in parameters:
        assert torch.equal(optimizer.state[parameter]["master_param"], parameter.detach().float().cpu())
    move_over(optimizer)
    for parameter in parameters:
        assert torch.equal(optimizer.state[parameter]["master_param"], parameter.detach().float().cpu())


def test_a_tensor_that_is_other_state_is_refused_in_both_copies(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    open_second(optimizer)
    for _ in range(3):
        state = optimizer.state[parameters[0]]
        with pytest.raises(OptionError, match="already used as other state"):
            state["exp_avg"] = state["exp_avg_sq"]
        state["exp_avg"] = state["exp_avg"]
        move_over(optimizer)
    # Storages that are gone are forgotten: another tensor may have their place.
    optimizer.synchronize()
    assert len(optimizer.state.owners) == sum(3 if parameter.numel() else 1 for parameter in parameters)


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_closing_keeps_the_state_and_frees_the_other_copy(moves: int, device: torch.device, pinned: str) -> None:
    parameters = make(device=device, dtype=MIXED)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=pinned, chunk_bytes=TINY)
    train(optimizer, parameters, 2)
    held = [dict(optimizer.state[parameter]) for parameter in parameters]
    before = optimizer.stats()["pinned_bytes"]
    open_second(optimizer)
    assert optimizer.stats()["pinned_bytes"] > before
    assert optimizer._engine is not None
    assert optimizer._engine.has_second
    for _ in range(moves):
        move_over(optimizer)
    close_second(optimizer)
    assert optimizer.stats()["pinned_bytes"] == before
    assert not optimizer._engine.has_second
    # Nothing that the optimizer holds is over the copy that is gone.
    for (number, index), parameter, values in zip(optimizer._homes.values(), parameters, held, strict=True):
        for kind, value in values.items():
            view = optimizer._engine.view(number, index, kind)
            assert view is not None
            if value.numel():
                assert value.data_ptr() == torch.frombuffer(view, dtype=torch.float32).data_ptr(), kind
            assert value is optimizer.state[parameter][kind]
    train(optimizer, parameters, range(2, 4))
    twins = make(device=device, dtype=MIXED)
    twin = forebay.AdamW(twins, lr=1e-2, placement=pinned, chunk_bytes=TINY)
    train(twin, twins, 4)
    assert_same(snapshot(optimizer, parameters), snapshot(twin, twins))


def test_views_of_users_stay_with_their_copy(device: torch.device) -> None:
    parameters = make([(300,)], device=device)
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    open_second(optimizer)
    state = optimizer.state[parameters[0]]["exp_avg"]
    view, kept = state[10:20], state[10:20].clone()
    move_over(optimizer, change=1.0)
    optimizer.synchronize()
    assert torch.equal(view, kept)
    assert torch.equal(state[10:20], kept + 1)
    close_second(optimizer)
    assert torch.equal(view, kept)


def test_a_closed_optimizer_shows_the_state_of_the_end(device: torch.device) -> None:
    parameters = make([(300,)], device=device)
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    open_second(optimizer)
    state = optimizer.state[parameters[0]]["exp_avg"]
    expected = state + 1
    move_over(optimizer, change=1.0)
    optimizer.close()
    assert torch.equal(state, expected)


def test_state_that_was_moved_by_its_data_comes_back_to_the_current_copy(device: torch.device) -> None:
    parameters = make([(300,)], device=device)
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    open_second(optimizer)
    state = optimizer.state[parameters[0]]["exp_avg"]
    expected = state + 1
    state.data = state.data.clone()
    move_over(optimizer, change=1.0)
    assert optimizer.state[parameters[0]]["exp_avg"] is state
    assert torch.equal(state, expected)
    assert optimizer._engine is not None
    view = optimizer._engine.view(0, 0, "exp_avg")
    assert view is not None
    assert state.data_ptr() == torch.frombuffer(view, dtype=torch.float32).data_ptr()


def test_a_copy_over_the_budget_is_refused_with_the_bytes_of_both(device: torch.device) -> None:
    parameters = make([(100_000,)], device=device)
    needed = 800_000
    optimizer = forebay.AdamW(parameters, pinned_budget_bytes=2 * needed - 1)
    train(optimizer, parameters, 1)
    bytes_of_one = optimizer.stats()["pinned_bytes"]
    assert needed < bytes_of_one < needed + 8192
    with pytest.raises(OutOfMemoryError) as refused:
        open_second(optimizer)
    assert refused.value.requested_bytes == 2 * bytes_of_one
    assert refused.value.available_bytes == refused.value.limit_bytes == 2 * needed - 1
    assert optimizer.stats()["pinned_bytes"] == bytes_of_one
    train(optimizer, parameters, range(1, 3))
    twins = make([(100_000,)], device=device)
    twin = forebay.AdamW(twins)
    train(twin, twins, 3)
    assert_same(snapshot(optimizer, parameters), snapshot(twin, twins))
