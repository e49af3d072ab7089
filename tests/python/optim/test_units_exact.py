"""Optimizers without an update rule run in units with the bits that they have without forebay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forebay
from support.optim import give_gradients, make
from support.units import KNOWN_NOT, SHAPES, SIZES, Plain, ScheduleFree, Twins

MATRICES = ((33, 7), (16, 24), (24, 16), (5, 5))

TORCHS: list[tuple[str, dict[str, Any]]] = [
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("NAdam", {"foreach": True}),
    ("RAdam", {"weight_decay": 0.1}),
    ("RAdam", {"foreach": True}),
    ("Adamax", {"weight_decay": 0.1}),
    ("Adamax", {"foreach": True}),
    ("Adadelta", {}),
    ("Adadelta", {"foreach": True, "maximize": True}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    ("Adagrad", {"foreach": True}),
    ("Adagrad", {"fused": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("RMSprop", {"foreach": True}),
    ("Rprop", {}),
    ("Rprop", {"foreach": True}),
    ("ASGD", {"t0": 2.0}),
    ("ASGD", {"foreach": True}),
    ("Adafactor", {}),
    ("Adafactor", {"foreach": True}),
    ("Muon", {}),
    ("Muon", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    ("SparseAdam", {}),
]
IDS = [f"{name}-{'-'.join(options) or 'plain'}" for name, options in TORCHS]


def shapes_of(name: str) -> tuple[tuple[int, ...], ...]:
    return MATRICES if name == "Muon" else SHAPES


def sparse(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None if parameter.grad is None else parameter.grad.to_sparse(1)


@pytest.mark.parametrize("unit_bytes", SIZES)
@pytest.mark.parametrize(("name", "options"), TORCHS, ids=IDS)
def test_torchs_classes_have_their_own_bits(
    device: torch.device, name: str, options: dict[str, Any], unit_bytes: int | None
) -> None:
    if name == "SparseAdam":
        parameters = make(SHAPES, device=device)
        twins = Twins(lambda p: torch.optim.SparseAdam(p, lr=0.1), parameters, unit_bytes)
        for number in range(4):
            for optimizer, of in ((twins.plain, twins.plain_parameters), (twins.optimizer, twins.parameters)):
                give_gradients(of, number)
                sparse(of)
                optimizer.step()
        twins.check()
        return
    twins = Twins(lambda p: getattr(torch.optim, name)(p, **options), make(shapes_of(name), device=device), unit_bytes)
    if name == "Adagrad" and options.get("fused") and device.type == "cuda":
        for optimizer, of in ((twins.plain, twins.plain_parameters), (twins.optimizer, twins.parameters)):
            give_gradients(of, 0)
            with pytest.raises(RuntimeError, match="`fused=True` requires"):  # Torch has it for the CPU only.
                optimizer.step()
        return
    twins.step(4)
    twins.check()
    twins.step(range(4, 6), without=[1, 2])
    twins.step(1, without=range(len(twins.parameters)))
    twins.step(range(7, 9), closure=True)
    twins.check()


@pytest.mark.parametrize("unit_bytes", SIZES)
@pytest.mark.parametrize("cls", KNOWN_NOT)
def test_classes_that_forebay_does_not_know_have_their_own_bits(
    device: torch.device, cls: Any, unit_bytes: int | None
) -> None:
    twins = Twins(cls, make(SHAPES, device=device), unit_bytes)
    twins.step(4)
    twins.check()
    twins.step(range(4, 6), without=[0, 3])
    twins.step(1, without=range(len(SHAPES)))
    twins.step(range(7, 9), closure=True)
    twins.check()


@pytest.mark.parametrize("unit_bytes", SIZES)
def test_a_class_that_is_switched_between_training_and_evaluation(device: torch.device, unit_bytes: int | None) -> None:
    twins = Twins(ScheduleFree, make(SHAPES, device=device), unit_bytes)
    for start in (0, 3):
        for optimizer in (twins.plain, twins.optimizer):
            optimizer.train()
        twins.step(range(start, start + 3))
        twins.step(1, without=range(len(SHAPES)))
        twins.check()
        for optimizer in (twins.plain, twins.optimizer):
            optimizer.eval()
        twins.check()
    assert [group["k"] for group in twins.optimizer.param_groups] == [8]
    with pytest.raises(RuntimeError, match=r"call train\(\) before step"):
        twins.optimizer.step()
    for optimizer in (twins.plain, twins.optimizer):
        optimizer.train()
    twins.step(2)
    twins.check()


@pytest.mark.parametrize("name", ["NAdam", "Adafactor", "RMSprop"])
def test_groups_with_numbers_of_their_own(device: torch.device, name: str) -> None:
    def build(parameters: Any) -> Any:
        groups = [
            {"params": parameters[0::2], "lr": 3e-2, "weight_decay": 0.3},
            {"params": parameters[1::2], "lr": 1e-3},
        ]
        return getattr(torch.optim, name)(groups, lr=1e-2)

    twins = Twins(build, make(SHAPES, device=device), 1500)
    twins.step(3)
    for optimizer, of in ((twins.plain, twins.plain_parameters), (twins.optimizer, twins.parameters)):
        new = make([(9, 3), (4,)], device=device, seed=5)
        of += new
        optimizer.add_param_group({"params": new, "lr": 0.2})
    twins.step(range(3, 6))
    twins.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["NAdam", "Adamax", "Adagrad"])
def test_types_of_parameters(device: torch.device, name: str, dtype: torch.dtype) -> None:
    twins = Twins(lambda p: getattr(torch.optim, name)(p), make(SHAPES, device=device, dtype=dtype), 1)
    twins.step(4)
    twins.check()


def test_orders_in_memory_are_kept(device: torch.device) -> None:
    parameters = make([(4, 3, 5, 5), (6, 8)], device=device)
    parameters[0].data = parameters[0].data.to(memory_format=torch.channels_last)
    parameters[1].data = parameters[1].data.t()
    twins = Twins(lambda p: torch.optim.RMSprop(p, momentum=0.9), parameters)
    twins.step(4)
    twins.check()
    state = twins.optimizer.state[twins.parameters[0]]["square_avg"]
    assert state.stride() == twins.parameters[0].stride()


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers(device: torch.device, when: str) -> None:
    twins: Any = None

    def build(parameters: Any) -> Any:
        optimizer = torch.optim.NAdam(parameters, lr=0.1)
        if when == "before":
            schedules.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        return optimizer

    schedules: list[Any] = []
    twins = Twins(build, make(SHAPES, device=device), 1500)
    if when == "after":
        schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (twins.plain, twins.optimizer)]
    for number in range(4):
        twins.step(range(number, number + 1))
        for schedule in schedules:
            schedule.step()
    assert twins.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    twins.check()


def test_hooks_and_closures_run_once(device: torch.device) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = torch.optim.NAdam(parameters)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("early"))
    forebay.offload(optimizer, unit_bytes=1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    give_gradients(parameters, 0)
    assert optimizer.step(lambda: calls.append("closure") or 4) == 4
    assert optimizer.step(closure=lambda: 5) == 5
    assert optimizer.step() is None
    assert optimizer.step(closure=None) is None
    assert calls == ["early", "before", "closure", "after", *["early", "before", "after"] * 3]


@pytest.mark.parametrize("name", ["NAdam", "Adagrad", "Muon"])
def test_a_step_that_was_kept_from_before_runs_in_units(device: torch.device, name: str) -> None:
    kept: list[Any] = []

    def build(parameters: Any) -> Any:
        optimizer = getattr(torch.optim, name)(parameters)
        kept.append(optimizer.step)
        return optimizer

    twins = Twins(build, make(MATRICES, device=device))
    calls: list[int] = []
    twins.optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    for number in range(3):
        for step, of in zip(kept, (twins.plain_parameters, twins.parameters), strict=True):
            give_gradients(of, number)
            assert step(lambda: 3.0) == 3.0
    assert len(calls) == 3
    assert twins.optimizer.stats()["fetched_bytes"] > 0
    twins.check()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", ["NAdam", "Adagrad", "Rprop"])
def test_state_from_before_is_moved(device: torch.device, name: str, steps: int) -> None:
    def build(parameters: Any) -> Any:
        optimizer = getattr(torch.optim, name)(parameters)
        for number in range(steps):
            give_gradients(parameters, number)
            optimizer.step()
        return optimizer

    twins = Twins(build, make(SHAPES, device=device), 1500)
    twins.check()
    twins.step(range(steps, steps + 3))
    twins.check()


class Doubled(torch.optim.AdamW):
    """A subclass of a class with a rule, with a step of its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Take two steps."""
        super().step(closure)
        return super().step()


def test_a_subclass_with_its_own_step_keeps_it(device: torch.device) -> None:
    twins = Twins(Doubled, make(SHAPES, device=device), 1500)
    twins.step(3)
    twins.check()
    assert isinstance(twins.optimizer, Doubled)
    assert not isinstance(twins.optimizer, forebay.optim.base.Optimizer)


class Named(Plain):
    """A class with names of its own that forebay's optimizers have too."""

    def stats(self) -> str:
        """Return something."""
        return "mine"

    def update(self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Update one parameter."""
        state["last"] = parameter.grad.clone()
        parameter.sub_(parameter.grad)


def test_names_of_the_users_class_stay_its_own(device: torch.device) -> None:
    twins = Twins(Named, make(SHAPES, device=device))
    twins.step(2)
    twins.check()
    assert twins.optimizer.stats() == "mine"
    assert type(twins.optimizer).__name__ == "Named"
