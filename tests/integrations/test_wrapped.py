"""The optimizers that frameworks hand to their users: saves, loads and sleep take them as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning.fabric import Fabric
from lightning.pytorch.core.optimizer import LightningOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torchtitan.components.optimizer import OptimizersContainer

import forebay
from forebay import checkpoint
from forebay._wrapped import bare, members
from support.accelerators import forget_accelerators
from support.sleep import WIDTH, Net, is_empty, snapshot, train
from support.tensors import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_accelerators() -> Iterator[None]:
    """Forget what the accelerators of a process share."""
    forget_accelerators()
    yield
    forget_accelerators()


def accelerated(model: torch.nn.Module, inner: torch.optim.Optimizer) -> Any:
    """Return what accelerate's users have."""
    found = Accelerator(cpu=True).prepare_optimizer(inner)
    assert isinstance(found, AcceleratedOptimizer)
    return found


def fabric(model: torch.nn.Module, inner: torch.optim.Optimizer) -> Any:
    """Return what users of Lightning's Fabric have."""
    _, found = Fabric(accelerator="cpu", devices=1).setup(model, inner)
    return found


def megatron(model: torch.nn.Module, inner: torch.optim.Optimizer) -> Any:
    """Return what Megatron has around an optimizer. Its constructor makes tensors on a GPU."""
    found = object.__new__(FP32Optimizer)
    found.optimizer = inner
    return found


WRAPPERS: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer], Any]] = {
    "accelerate": accelerated,
    "lightning": lambda _, inner: LightningOptimizer(inner),
    "fabric": fabric,
    "twice": lambda model, inner: AcceleratedOptimizer(accelerated(model, inner), device_placement=False),
    "megatron": megatron,
}
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
every_kind = pytest.mark.parametrize("kind", [forebay.AdamW, torch.optim.AdamW], ids=["forebay", "torch"])


def trained(kind: Any, steps: int = 2) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(CPU)
    optimizer = kind(model.parameters(), lr=1e-2)
    train(model, optimizer, CPU, steps)
    return model, optimizer


@every_kind
@every_wrapper
def test_the_optimizer_inside_is_found(wrap: Any, kind: Any) -> None:
    model, inner = trained(kind)
    assert bare(wrap(model, inner)) is inner


@every_kind
@every_wrapper
@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
def test_it_is_saved_and_loaded(wrap: Any, kind: Any, is_async: bool, tmp_path: Path) -> None:
    model, inner = trained(kind)
    wrapped = wrap(model, inner)
    kept = snapshot(model, inner)
    if is_async:
        checkpoint.async_save(tmp_path, model, wrapped).result()
    else:
        checkpoint.save(tmp_path, model, wrapped)
    train(model, inner, CPU, 2)
    checkpoint.load(tmp_path, model, wrapped)
    assert_same(kept, snapshot(model, inner))
    twin, its = trained(kind, 1)
    checkpoint.load(tmp_path, twin, its)
    assert_same(kept, snapshot(twin, its))


@every_kind
@every_wrapper
def test_it_sleeps(wrap: Any, kind: Any) -> None:
    model, inner = trained(kind)
    wrapped = wrap(model, inner)
    kept = snapshot(model, inner)
    sleeper = forebay.Sleeper(model, wrapped)
    with sleeper.asleep():
        assert is_empty(model.embed.weight)
        if kind is torch.optim.AdamW:
            assert is_empty(inner.state[model.embed.weight]["exp_avg"])
        with pytest.raises(forebay.AsleepError):
            inner.step()
    assert_same(kept, snapshot(model, inner))
    train(model, inner, CPU, 1)


def test_accelerates_own_step_refuses_to_run_asleep() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*trained(torch.optim.AdamW))
    sleeper = forebay.Sleeper(model, optimizer)
    with sleeper.asleep():
        with pytest.raises(forebay.AsleepError, match="step"):
            optimizer.step()
        with pytest.raises(forebay.AsleepError, match="forward"):
            model(torch.ones(2, WIDTH))
    train(model, optimizer, CPU, 1)


@pytest.mark.parametrize("kind", [forebay.AdamW, torch.optim.AdamW], ids=["forebay", "torch"])
def test_the_members_of_torchtitans_container(kind: Any, tmp_path: Path) -> None:
    model = torch.nn.ModuleList([Net(CPU), Net(CPU)])
    container = OptimizersContainer(list(model), kind, {"lr": 1e-2})
    assert members(container) == container.optimizers
    for part, inner in zip(model, container.optimizers, strict=True):
        train(part, inner, CPU, 2)
    kept = [snapshot(part, inner) for part, inner in zip(model, container.optimizers, strict=True)]
    checkpoint.save(tmp_path, model, container)
    for part, inner in zip(model, container.optimizers, strict=True):
        train(part, inner, CPU, 1)
    checkpoint.load(tmp_path, model, container)
    assert_same(kept, [snapshot(part, inner) for part, inner in zip(model, container.optimizers, strict=True)])
    with forebay.Sleeper(model, container).asleep():
        assert is_empty(model[1].embed.weight)
        with pytest.raises(forebay.AsleepError, match="step"):
            container.step()
    assert_same(kept, [snapshot(part, inner) for part, inner in zip(model, container.optimizers, strict=True)])
