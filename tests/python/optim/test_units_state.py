"""State of optimizers that run in units: where it is, what may be assigned to it, and which tensors it may have."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Self

import pytest
import torch

import forebay
from forebay.optim.units import run
from forebay.optim.units.layout import ALIGN_BYTES
from support.optim import clone, give_gradients, make, train
from support.tensors import same_bits
from support.units import SHAPES, SIZES, Momentum, Nested, Plain, Rebinding, Swapping, Twins, assert_equal, contents


def padded(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def test_state_is_on_the_host_in_memory_of_its_own(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.offload(Momentum(parameters), unit_bytes=3000)
    train(optimizer, parameters, 2)
    means = [optimizer.state[parameter]["mean"] for parameter in parameters]
    for parameter, mean in zip(parameters, means, strict=True):
        assert mean.device.type == "cpu"
        assert mean.shape == parameter.shape
        assert mean.untyped_storage().nbytes() == parameter.numel() * 4
        assert not mean.untyped_storage().resizable()
    train(optimizer, parameters, range(2, 3))
    # The same tensors, with the values of now.
    assert all(optimizer.state[parameter]["mean"] is mean for parameter, mean in zip(parameters, means, strict=True))
    plain = Momentum(twins := make(SHAPES, device=device))
    train(plain, twins, 3)
    assert all(same_bits(mean, plain.state[twin]["mean"]) for mean, twin in zip(means, twins, strict=True))


def test_units_leave_the_device_after_a_step(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.offload(Momentum(parameters), unit_bytes=1)
    made: list[weakref.ref[torch.Tensor]] = []
    real = run.open_slots

    def noting(*arguments: Any) -> list[torch.Tensor]:
        assert all(one() is None for one in made), "a step begins with the memory of the one before"
        slots = real(*arguments)
        # The small copies of a check have slots too.
        made[:] = [weakref.ref(slot) for slot in slots]
        return slots

    train(optimizer, parameters, 1)
    monkeypatch.setattr(run, "open_slots", noting)
    train(optimizer, parameters, 3)
    assert len(made) == 3
    assert all(one() is None for one in made)


def test_figures_of_memory_and_of_a_step(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = torch.optim.RMSprop(parameters, momentum=0.9, capturable=False, foreach=False)
    forebay.offload(optimizer, unit_bytes=4000)
    # The counters of steps are on the host in a step too, unless the parameters are.
    counter = padded(4) if device.type == "cpu" else 0
    sizes = [2 * padded(4 * parameter.numel()) + counter for parameter in parameters]
    units: list[int] = []
    room = 0
    for size in sizes:
        if size > room:
            units.append(0)
            room = 4000
        units[-1] += size
        room -= size
    assert 3 < len(units) < len(sizes)
    memory = {
        "units": len(units),
        "unit_bytes": max(units),
        "device_bytes": 3 * max(units),
        "pinned_bytes": sum(units),
    }
    before = optimizer.stats()
    assert {name: before[name] for name in memory} == memory
    assert before["fetched_bytes"] == before["stored_bytes"] == 0
    train(optimizer, parameters, 1)
    first = optimizer.stats()
    assert {name: first[name] for name in memory} == memory
    assert (first["fetched_bytes"], first["stored_bytes"]) == (0, sum(units))
    train(optimizer, parameters, 2)
    later = optimizer.stats()
    assert {name: later[name] for name in memory} == memory
    assert (later["fetched_bytes"], later["stored_bytes"]) == (sum(units), sum(units))
    assert later["step_s"] > 0
    assert later["fetch_s"] > 0
    assert later["store_s"] > 0


def test_a_parameter_with_more_state_is_a_unit_of_its_own(device: torch.device) -> None:
    parameters = make([(4,), (50, 50), (4,), (4,)], device=device)
    optimizer = forebay.offload(Momentum(parameters), unit_bytes=1024)
    train(optimizer, parameters, 1)
    assert optimizer.stats()["units"] == 3
    assert optimizer.stats()["unit_bytes"] == padded(4 * 2500)


def test_the_default_size_comes_from_the_machine(device: torch.device) -> None:
    optimizer = forebay.offload(Momentum(make(device=device)))
    size = optimizer._units.options.size_on(device)
    assert 16 << 20 <= size <= 256 << 20


def test_units_without_a_gradient_do_not_travel(device: torch.device) -> None:
    twins = Twins(Momentum, make(SHAPES, device=device))
    twins.step(2)
    twins.step(range(2, 4), without=[0, 1, 3, 5])
    moved = sum(padded(twins.parameters[i].numel() * 4) for i in (2, 4))
    stats = twins.optimizer.stats()
    assert (stats["fetched_bytes"], stats["stored_bytes"]) == (moved, moved)
    twins.check()


def test_torchs_memory_is_freed(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = Momentum(parameters)
    train(optimizer, parameters, 1)
    kept = weakref.ref(optimizer.state[parameters[0]]["mean"])
    forebay.offload(optimizer)
    assert kept() is None


def test_the_host_memory_is_freed_with_the_optimizer(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.offload(Momentum(parameters))
    train(optimizer, parameters, 1)
    kept = weakref.ref(optimizer._units.units[0].home.memory)
    del optimizer
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("unit_bytes", SIZES)
def test_assigned_state_is_used(device: torch.device, unit_bytes: int | None) -> None:
    twins = Twins(Momentum, make(SHAPES, device=device), unit_bytes)
    twins.step(2)
    pairs = ((twins.plain, twins.plain_parameters), (twins.optimizer, twins.parameters))
    for optimizer, parameters in pairs:
        optimizer.state[parameters[0]]["mean"] = torch.full_like(parameters[0], 0.5)
        optimizer.state[parameters[1]]["mean"].mul_(3)
        del optimizer.state[parameters[2]]
        optimizer.state[parameters[3]] = {"mean": torch.full_like(parameters[3], 2.0), "note": "mine"}
        # Some programs move state so.
        mean = optimizer.state[parameters[4]]["mean"]
        mean.data = mean.data.clone() * 2
    twins.step(range(2, 4))
    twins.check()
    for optimizer, parameters in pairs:
        first, second = (optimizer.state[parameters[i]]["mean"] for i in (2, 3))
        optimizer.state[parameters[2]]["mean"], optimizer.state[parameters[3]]["mean"] = first * 2, second.clone()
        optimizer.state = {p: dict(values) for p, values in optimizer.state.items()} | {"word": {"a": 1}}
        optimizer.state.pop(parameters[5])
        optimizer.state = torch.optim.Optimizer([torch.zeros(1)], {}).state | optimizer.state
    twins.step(range(4, 6))
    twins.check()
    assert all(one.untyped_storage().resizable() is False for p in twins.parameters for one in state_of(twins, p))


def state_of(twins: Twins, parameter: torch.Tensor) -> list[torch.Tensor]:
    return [value for value in twins.optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]


def test_cleared_state_starts_anew(device: torch.device) -> None:
    twins = Twins(Momentum, make(SHAPES, device=device))
    twins.step(2)
    for optimizer in (twins.plain, twins.optimizer):
        optimizer.state.clear()
    twins.step(range(2, 4), without=[3])
    twins.check()


def test_rebound_state_keeps_its_memory(device: torch.device) -> None:
    twins = Twins(Rebinding, make(SHAPES, device=device), 3000)
    twins.step(2)
    means = [twins.optimizer.state[parameter]["mean"] for parameter in twins.parameters]
    homes = [unit.home for unit in twins.optimizer._units.units]
    twins.step(range(2, 5))
    twins.check()
    assert [unit.home for unit in twins.optimizer._units.units] == homes
    assert all(twins.optimizer.state[p]["mean"] is mean for p, mean in zip(twins.parameters, means, strict=True))


@pytest.mark.parametrize("unit_bytes", SIZES)
def test_state_of_other_sizes_after_a_step(device: torch.device, unit_bytes: int | None) -> None:
    twins = Twins(Nested, make(SHAPES, device=device), unit_bytes)
    sizes = []
    for number in range(6):
        twins.step(range(number, number + 1))
        twins.check()
        sizes.append(twins.optimizer.stats()["pinned_bytes"])
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[3] == sizes[4] == sizes[5]


def test_views_of_other_state_stay_views(device: torch.device) -> None:
    twins = Twins(Swapping, make([(6, 4), (3,)], device=device))
    twins.step(3)
    twins.check()
    state = twins.optimizer.state[twins.parameters[0]]
    state["pool"].fill_(7.0)
    assert torch.equal(state["view"], torch.full((6, 4), 7.0))
    before = state["pool"].untyped_storage().nbytes()
    assert before == 4 * 27
    twins.plain.state[twins.plain_parameters[0]]["pool"].fill_(7.0)
    twins.step(range(3, 5))
    twins.check()


class Sharing(Plain):
    """State that is the parameter's own memory, and state that is the gradient itself."""

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        state.setdefault("alias", parameter.data.view(-1))
        last = state.get("last")
        parameter.sub_(parameter.grad + (0 if last is None else last) + state["alias"].sum() * 1e-3, alpha=group["lr"])
        state["last"] = parameter.grad


def test_state_that_is_the_parameter_or_its_gradient_stays_so(device: torch.device) -> None:
    twins = Twins(Sharing, make(SHAPES, device=device))
    twins.step(2)
    twins.check()
    state = twins.optimizer.state[twins.parameters[0]]
    assert state["last"] is twins.parameters[0].grad
    assert state["alias"].data_ptr() == twins.parameters[0].data_ptr()
    for parameters in (twins.plain_parameters, twins.parameters):
        for number, parameter in enumerate(parameters):
            parameter.grad.fill_(number)
    for optimizer in (twins.plain, twins.optimizer):
        optimizer.step()
    twins.check()


class Halves(torch.Tensor):
    """A tensor that keeps its values in two others, as quantized state does."""

    @staticmethod
    def __new__(cls, low: torch.Tensor, high: torch.Tensor, note: str = "") -> Self:
        """Return a tensor over these two."""
        made = torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=torch.float32, device=low.device)
        made.low, made.high, made.note = low, high, note
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["low", "high"], self.note

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], note: Any, *_: Any) -> Halves:
        return cls(inner["low"], inner["high"], note)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten.detach.default):
            return cls(args[0].low.clone(), args[0].high.clone(), args[0].note)
        raise NotImplementedError(func)


class Opaque(Halves):
    """The same, without a way to take it apart."""

    __tensor_flatten__ = None  # type: ignore[assignment]


class Quantized(Plain):
    """State of tensors that consist of others."""

    kind = Halves

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        if not state:
            low, high = torch.zeros_like(parameter, dtype=torch.int8), torch.zeros(3, device=parameter.device)
            state["both"] = self.kind(low, high, "note")
        both = state["both"]
        both.low.add_((parameter.grad * 10).to(torch.int8))
        both.high = both.high + 1
        parameter.sub_(both.low.float() * both.high.sum(), alpha=group["lr"] * 1e-3)


class Sealed(Quantized):
    """State that cannot be taken apart."""

    kind = Opaque


@pytest.mark.parametrize("unit_bytes", SIZES)
def test_tensors_that_consist_of_others(device: torch.device, unit_bytes: int | None) -> None:
    parameters = make(SHAPES, device=device)
    pairs = [(Quantized(of), of) for of in (clone(parameters), clone(parameters))]
    plain, twins = pairs[0]
    optimizer, mine = pairs[1]
    forebay.offload(optimizer, unit_bytes=unit_bytes)
    for number in range(4):
        for one, of in pairs:
            give_gradients(of, number)
            one.step()
    for parameter, twin in zip(mine, twins, strict=True):
        found, expected = optimizer.state[parameter]["both"], plain.state[twin]["both"]
        assert type(found) is Halves
        assert found.note == "note"
        assert same_bits(parameter, twin)
        for name in ("low", "high"):
            assert getattr(found, name).device.type == "cpu"
            assert same_bits(getattr(found, name), getattr(expected, name))
    assert optimizer.stats()["pinned_bytes"] == sum(padded(p.numel()) + padded(12) for p in mine)


def test_tensors_that_cannot_be_taken_apart_are_refused_by_name(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = Sealed(parameters)
    with pytest.raises(forebay.OptionError, match=r"state\['both'\] .* is a Opaque, which forebay cannot take apart"):
        forebay.offload(optimizer)
    assert type(optimizer) is Sealed


def test_a_restored_optimizer_is_its_own_classs_again(device: torch.device) -> None:
    twins = Twins(Nested, make(SHAPES, device=device), 3000)
    attributes = set(vars(twins.plain))
    twins.step(3)
    assert forebay.restore(twins.optimizer) is twins.optimizer
    assert type(twins.optimizer) is Nested
    assert set(vars(twins.optimizer)) == attributes
    assert type(twins.optimizer.state) is type(twins.plain.state)
    assert_equal(contents(twins.optimizer, twins.parameters), contents(twins.plain, twins.plain_parameters))
    for parameter in twins.parameters:
        history = twins.optimizer.state[parameter]["history"]
        assert all(one.device == parameter.device and one.untyped_storage().resizable() for one in history)
    twins.step(range(3, 5))
    twins.check()
    forebay.offload(twins.optimizer)
    twins.step(range(5, 7))
    twins.check()
