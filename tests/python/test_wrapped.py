"""Optimizers inside wrappers: which one is found. The wrappers of frameworks are in the integration tests."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import forebay
from forebay import _live, checkpoint
from forebay._wrapped import bare, members
from support import saves
from support.checkpoint import pair, snapshot, train
from support.sleep import is_empty
from support.tensors import assert_same


class Held:
    """A wrapper that is no optimizer for torch."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """Step the inner one."""
        self.optimizer.step()


class Forwarding(torch.optim.Optimizer):
    """A wrapper that is an optimizer for torch and forwards its state, as AcceleratedOptimizer does."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        """The inner one's state."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        """The inner one's groups."""
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        """Step the inner one."""
        self.optimizer.step(closure)


class WithoutState(torch.optim.Optimizer):
    """A wrapper that is an optimizer for torch and has nothing of one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class Container(torch.optim.Optimizer):
    """Several optimizers in one, as torchtitan has them: what it has itself does not count."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers
        super().__init__([torch.zeros(1)], {})

    def __iter__(self) -> Any:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:
        """Step all of them."""
        for one in self.optimizers:
            one.step(closure)


class WithOwnState(Forwarding):
    """An optimizer around another one: what it keeps itself is not in the inner one."""

    state = None  # type: ignore[assignment]

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.state = defaultdict(dict)


def optimizer() -> torch.optim.Optimizer:
    return forebay.AdamW(torch.nn.Linear(4, 4).parameters(), device="cpu")


@pytest.mark.parametrize("wrapper", [Held, Forwarding, WithoutState])
def test_the_inner_optimizer_is_found(wrapper: Any) -> None:
    inner = optimizer()
    assert bare(wrapper(inner)) is inner
    assert bare(wrapper(wrapper(inner))) is inner
    assert bare(Held(wrapper(inner))) is bare(Forwarding(wrapper(inner))) is inner


def test_an_optimizer_is_its_own() -> None:
    for inner in (optimizer(), torch.optim.AdamW([torch.zeros(2)])):
        assert bare(inner) is inner


def test_an_optimizer_with_state_of_its_own_is_no_wrapper() -> None:
    outer = WithOwnState(optimizer())
    assert bare(outer) is outer
    assert bare(Held(outer)) is outer


def test_an_optimizer_attribute_that_is_no_optimizer() -> None:
    inner = optimizer()
    inner.optimizer = "adamw"  # type: ignore[attr-defined]
    assert bare(inner) is inner
    assert bare(Held(inner)) is inner


def test_loops_end() -> None:
    outer, other = Held(None), Held(None)
    outer.optimizer, other.optimizer = other, outer
    assert bare(outer) is outer
    inner = optimizer()
    inner.optimizer = inner  # type: ignore[attr-defined]
    assert bare(inner) is inner
    inner.optimizer = Held(inner)  # type: ignore[attr-defined]
    assert bare(inner) is inner
    assert bare(Held(inner)) is inner


def test_what_is_no_optimizer_is_returned_unchanged() -> None:
    class Trained(torch.nn.Module):
        def step(self) -> None: ...

    model: Any = Trained()
    model.optimizer = optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer(), lambda _: 1.0)
    for thing in (None, 3, "adamw", [optimizer()], torch.nn.Linear(2, 2), model, scheduler, Held(None), Held, object()):
        assert bare(thing) is thing


def test_members_of_containers() -> None:
    first, second = optimizer(), optimizer()
    assert members(Held(first)) == [first]
    assert members(Container(first, second)) == [first, second]
    assert members(Held(Container(Held(first), Container(second)))) == [first, second]
    assert members(None) == [None]


# Where optimizers are taken.

WRAPPERS: dict[str, Any] = {
    "none": lambda one: one,
    "held": Held,
    "forwarding": Forwarding,
    "both": lambda one: Held(Forwarding(one)),
    "list": lambda one: [Forwarding(one)],
    "container": lambda one: Container(one),
}
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
every_save = pytest.mark.parametrize(
    "save",
    [checkpoint.save, lambda *arguments: checkpoint.async_save(*arguments).result()],
    ids=["save", "async_save"],
)


@every_save
@every_wrapper
def test_wrapped_optimizers_are_saved_and_loaded(wrap: Any, save: Any, tmp_path: Path) -> None:
    model, inner = pair()
    train(model, inner, range(2))
    kept = snapshot(model, inner)
    save(tmp_path, model, wrap(inner))
    train(model, inner, range(2, 4))
    checkpoint.load(tmp_path, model, wrap(inner))
    assert_same(kept, snapshot(model, inner))
    # What is saved does not depend on wrappers.
    twin, its = pair(7)
    checkpoint.load(tmp_path, twin, its)
    assert_same(kept, snapshot(twin, its))


def test_steps_of_wrapped_optimizers_wait_for_a_save(tmp_path: Path) -> None:
    model, (inner,) = saves.build("torch")
    wrapped = Held(Forwarding(inner))
    saves.train(model, [inner], 0)
    kept = saves.values(model, [inner])
    with saves.held() as gate:
        saving = checkpoint.async_save(tmp_path, model, wrapped, snapshot_budget_bytes=0)
        gate.open(after_s=0.3)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        wrapped.step()
        assert _live.waited_s(wrapped) > 0  # type: ignore[arg-type]
        assert _live.waited_s(wrapped) == _live.waited_s(inner)  # type: ignore[arg-type]
        _live.wait_for_live(wrapped)  # type: ignore[arg-type]
    saving.result()
    saves.assert_holds(tmp_path, "torch", kept)


@every_wrapper
@pytest.mark.parametrize("kind", [forebay.AdamW, torch.optim.AdamW])
def test_wrapped_optimizers_sleep(wrap: Any, kind: Any) -> None:
    model, _ = pair()
    inner = kind(model.parameters(), lr=1e-2)
    train(model, inner, range(2))
    kept = snapshot(model, inner)
    wrapped = wrap(inner)
    sleeper = forebay.Sleeper(model, wrapped, gradients="drop")
    sleeper.sleep()
    assert is_empty(model.body.weight)
    with pytest.raises(forebay.AsleepError, match="step"):
        inner.step()
    if not isinstance(wrapped, list):
        with pytest.raises(forebay.AsleepError, match="step"):
            wrapped.step()
    if kind is torch.optim.AdamW:
        assert is_empty(inner.state[model.body.weight]["exp_avg"])
    sleeper.wake()
    assert_same(kept, snapshot(model, inner))
    train(model, inner, range(2, 3))


def test_wrapped_optimizers_sleep_by_name() -> None:
    models = [pair()[0] for _ in range(2)]
    inner = [torch.optim.AdamW(model.parameters()) for model in models]
    for model, one in zip(models, inner, strict=True):
        train(model, one, range(1))
    for given in (
        [Held(one) for one in inner],
        {"first": Forwarding(inner[0]), "second": inner[1]},
        {"both": Container(*inner)},
        Container(*inner),
    ):
        sleeper = forebay.Sleeper(models, given)
        sleeper.sleep("optimizer")
        assert all(is_empty(one.state[m.body.weight]["exp_avg"]) for m, one in zip(models, inner, strict=True))
        sleeper.wake()
    with pytest.raises(forebay.OptionError, match="optimizer '1' is a Linear"):
        forebay.Sleeper(models, [inner[0], torch.nn.Linear(2, 2)])
    with pytest.raises(forebay.OptionError, match="optimizer '' is a LambdaLR"):
        forebay.Sleeper(models, torch.optim.lr_scheduler.LambdaLR(inner[0], lambda _: 1.0))
