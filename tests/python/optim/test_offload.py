"""``forebay.offload`` and ``forebay.restore``: the same object, with forebay's step and torch's again."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay.optim.options import Keywords
from support.optim import clone, give_gradients, make, snapshot, train
from support.tensors import assert_same

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTIMIZERS = [
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "fused": True}),
    ("AdamW", {"foreach": True, "maximize": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {}),
]
if "decoupled_weight_decay" not in inspect.signature(torch.optim.Adam).parameters:
    # An older torch.
    OPTIMIZERS = [one for one in OPTIMIZERS if "decoupled_weight_decay" not in one[1]]
IDS = [f"{name}-{'-'.join(options) or 'plain'}" for name, options in OPTIMIZERS]


class Named(torch.optim.AdamW):
    """A subclass with a constructor and a method of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, weight_decay=0.3)
        self.note = "kept"

    def where(self) -> str:
        """Return something that torch's class does not know."""
        return f"{type(self).__name__} at {self.param_groups[0]['lr']}"


class Doubled(torch.optim.AdamW):
    """A subclass whose step is its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Take two steps."""
        super().step(closure)
        return super().step()


def torchs(name: str, parameters: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=1e-2, **options)
    return found


@pytest.mark.parametrize("steps", [0, 3], ids=["new", "with state"])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=IDS)
def test_the_same_object_takes_forebays_steps(
    device: torch.device, placement: str, name: str, options: dict[str, Any], steps: int
) -> None:
    parameters = make(device=device)
    optimizer = torchs(name, parameters, options)
    train(optimizer, parameters, steps)
    twins = clone(parameters)
    expected = getattr(forebay, name)(twins, lr=1e-2, placement=placement, **options)
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    assert forebay.offload(optimizer, placement=placement) is optimizer
    assert optimizer.param_groups is groups
    assert groups[0] is group
    assert isinstance(optimizer, getattr(torch.optim, name))
    assert isinstance(optimizer, forebay.optim.base.Optimizer)
    train(optimizer, parameters, range(steps, steps + 4))
    train(expected, twins, range(steps, steps + 4))
    assert_same(snapshot(optimizer, parameters), snapshot(expected, twins))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_half_precision_gets_masters_unless_told_otherwise(device: torch.device, name: str) -> None:
    parameters = make(device=device, dtype=torch.bfloat16)
    optimizer = torchs(name, parameters, {})
    train(optimizer, parameters, 2)
    forebay.offload(optimizer)
    train(optimizer, parameters, 1)
    assert all(optimizer.state[p]["master_param"].dtype == torch.float32 for p in parameters)
    plain = torchs(name, clone(parameters), {})
    forebay.offload(plain, master_weights=False)
    train(plain, plain.param_groups[0]["params"], 1)
    assert not any("master_param" in values for values in plain.state.values())


def test_a_scheduler_made_before_reaches_the_engine(device: torch.device, placement: str) -> None:
    parameters, twins = make(device=device), make(device=device)
    optimizer, expected = torch.optim.AdamW(parameters, lr=0.1), forebay.AdamW(twins, lr=0.1, placement=placement)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, expected)]
    assert "step" in vars(optimizer)
    forebay.offload(optimizer, placement=placement)
    train(optimizer, parameters, 4, schedules[0].step)
    train(expected, twins, 4, schedules[1].step)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    assert isinstance(optimizer.state[parameters[0]], forebay.optim.state.ParameterState)
    assert_same(snapshot(optimizer, parameters), snapshot(expected, twins))


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_a_step_that_a_framework_kept_reaches_the_engine(device: torch.device, name: str) -> None:
    parameters, twins = make(device=device), make(device=device)
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.5}]
    optimizer = torchs(name, groups, {})
    kept = optimizer.step
    forebay.offload(optimizer)
    expected = getattr(forebay, name)([{"params": twins[:3]}, {"params": twins[3:], "lr": 0.5}], lr=1e-2)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(3):
        give_gradients(parameters, step)
        give_gradients(twins, step)
        assert kept(lambda: 5.0) == 5.0
        expected.step()
    assert calls == ["before", "after"] * 3
    assert_same(snapshot(optimizer, parameters), snapshot(expected, twins))


def test_hooks_from_before_run_once_in_each_step(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = torch.optim.AdamW(parameters)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, found: calls.append("saved") or found)
    forebay.offload(optimizer)
    train(optimizer, parameters, 2)
    optimizer.state_dict()
    assert calls == ["before", "after", "before", "after", "saved"]


def test_state_dicts_go_both_ways(device: torch.device, placement: str) -> None:
    parameters = make(device=device)
    optimizer = forebay.offload(torch.optim.AdamW(parameters, lr=0.1), placement=placement)
    train(optimizer, parameters, 3)
    twins = clone(parameters)
    plain = torch.optim.AdamW(twins, lr=0.1)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(snapshot(plain, twins), snapshot(optimizer, parameters))
    assert plain.param_groups[0].keys() == optimizer.param_groups[0].keys()


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, Named])
def test_copies_are_offloaded_too(device: torch.device, how: str, cls: Any) -> None:
    parameters = make(device=device)
    optimizer = forebay.offload(cls(parameters, lr=0.1))
    train(optimizer, parameters, 2)
    other = pickle.loads(pickle.dumps(optimizer)) if how == "pickle" else copy.deepcopy(optimizer)
    copies = [p for group in other.param_groups for p in group["params"]]
    assert type(other) is type(optimizer)
    train(optimizer, parameters, range(2, 4))
    train(other, copies, range(2, 4))
    assert_same(snapshot(other, copies), snapshot(optimizer, parameters))
    assert type(forebay.restore(other)) is cls


def test_a_subclass_with_its_own_step_keeps_that_step(device: torch.device) -> None:
    parameters, twins = make(device=device), make(device=device)
    optimizer, expected = forebay.offload(Doubled(parameters, lr=0.1)), Doubled(twins, lr=0.1)
    train(optimizer, parameters, 2)
    train(expected, twins, 2)
    assert_same(snapshot(optimizer, parameters), snapshot(expected, twins))


@pytest.mark.parametrize("doubled", [False, True])
def test_the_first_optimizer_of_a_process_may_be_of_a_subclass(doubled: bool) -> None:
    # Torch puts a wrapper of the inherited step on the class of the first instance.
    own = "def step(self, closure=None): super().step(closure); return super().step()" if doubled else "note = 1"
    code = f"""
import sys, torch, forebay
class Sub(torch.optim.AdamW):
    {own}
first = Sub([torch.nn.Parameter(torch.ones(3))])
assert "step" in vars(Sub)
later = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
sys.exit(isinstance(forebay.offload(first), forebay.AdamW) is {doubled})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_subclass_keeps_what_is_its_own(device: torch.device) -> None:
    parameters, twins = make(device=device), make(device=device)
    optimizer = forebay.offload(Named(parameters, lr=0.1))
    assert isinstance(optimizer, Named)
    assert isinstance(optimizer, forebay.AdamW)
    assert (optimizer.note, optimizer.where()) == ("kept", "Named at 0.1")
    expected = forebay.AdamW(twins, lr=0.1, weight_decay=0.3)
    train(optimizer, parameters, 2)
    train(expected, twins, 2)
    assert_same(snapshot(optimizer, parameters), snapshot(expected, twins))


def state_of(optimizer: Any) -> tuple[Any, ...]:
    return type(optimizer), sorted(vars(optimizer)), {id(p): sorted(of) for p, of in optimizer.state.items()}


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), {}, "LBFGS"),
        (
            lambda p: torch.optim.AdamW([{"params": p, "differentiable": True}]),
            {},
            "differentiable=True is not supported",
        ),
        (lambda p: torch.optim.AdamW(p), {"pinned_budget_bytes": 100}, "pinned"),
        (lambda p: torch.optim.AdamW(p), {"placement": "disk"}, "invalid placement"),
        (
            lambda p: torch.optim.Adam([{"params": p[:2]}, {"params": p[2:], "decoupled_weight_decay": True}]),
            {},
            "decoupled_weight_decay=True is not supported",
        ),
    ],
    ids=["coupled", "differentiable", "budget", "option", "mixed decay"],
)
def test_what_is_refused_stays_as_it_was(device: torch.device, build: Any, options: Any, message: str) -> None:
    parameters = make(device=device)
    optimizer = build(parameters)
    if not isinstance(optimizer, torch.optim.LBFGS):
        train(optimizer, parameters, 1)
    before = state_of(optimizer)
    kept = snapshot(optimizer, parameters)
    with pytest.raises(forebay.Error, match=message):
        forebay.offload(optimizer, **options)
    assert state_of(optimizer) == before
    assert_same(snapshot(optimizer, parameters), kept)


@pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_typo_names_the_nearest_option(device: torch.device, build: Any) -> None:
    optimizer = build(make(device=device))
    with pytest.raises(TypeError, match="'placment'; did you mean 'placement'"):
        forebay.offload(optimizer, placment="host")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", sorted(set(Keywords.__annotations__) - {"pinned_budget_bytes"}))
def test_each_option_that_units_lack_is_refused_with_the_reason(device: torch.device, name: str) -> None:
    optimizer = torch.optim.Adagrad(make(device=device))
    with pytest.raises(forebay.OptionError, match=f"no update rule for .*Adagrad, so {name}=7 does not apply: "):
        forebay.offload(optimizer, **{name: 7})


@pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.Adagrad])
def test_settings_are_not_options(device: torch.device, build: Any) -> None:
    optimizer = build(make(device=device), lr=1e-2)
    with pytest.raises(forebay.OptionError, match=f"lr is a setting of {build.__name__}; set it there"):
        forebay.offload(optimizer, lr=1.0)
    assert type(optimizer) is build


class Container(torch.optim.Optimizer):
    """Steps its members, as torchtitan's container does."""

    def __init__(self, *held: torch.optim.Optimizer) -> None:
        super().__init__([p for one in held for group in one.param_groups for p in group["params"]], {})
        self.held = held

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.held)

    def step(self, closure: Any = None) -> None:
        """Step all members."""
        for one in self.held:
            one.step()


@pytest.mark.parametrize("call", [forebay.offload, forebay.restore])
def test_what_is_not_one_optimizer_is_refused(call: Any) -> None:
    held = [torch.optim.AdamW(make([(3,)])), torch.optim.AdamW(make([(3,)]))]
    for thing in ("adamw", None, torch.nn.Linear(2, 2), torch.optim.lr_scheduler.ConstantLR(held[0])):
        message = f"invalid optimizer: {type(thing).__name__}; give a torch.optim.Optimizer"
        with pytest.raises(forebay.OptionError, match=message):
            call(thing)
    with pytest.raises(forebay.OptionError, match="Container holds other optimizers; give each of them"):
        call(Container(*held))
    assert all(type(one) is torch.optim.AdamW for one in held)


def test_offloading_twice_changes_nothing(device: torch.device) -> None:
    optimizer = torch.optim.AdamW(make(device=device))
    assert forebay.offload(forebay.offload(optimizer)) is optimizer
    with pytest.raises(forebay.OptionError, match="offloaded already"):
        forebay.offload(optimizer, placement="host")


def test_torchs_state_is_freed(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = torch.optim.AdamW(parameters)
    train(optimizer, parameters, 1)
    kept = weakref.ref(optimizer.state[parameters[0]]["exp_avg"])
    forebay.offload(optimizer)
    assert kept() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=IDS)
def test_restored_it_is_torchs_own(
    device: torch.device, placement: str, name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    parameters, twins = make(device=device, dtype=dtype), make(device=device, dtype=dtype)
    optimizer, plain = torchs(name, parameters, options), torchs(name, twins, options)
    attributes = set(vars(optimizer))
    forebay.offload(optimizer, placement=placement)
    train(optimizer, parameters, 3)
    assert forebay.restore(optimizer) is optimizer
    assert type(optimizer) is getattr(torch.optim, name)
    assert set(vars(optimizer)) == attributes
    train(plain, twins, 1)
    for parameter, twin in zip(parameters, twins, strict=True):
        mine, theirs = optimizer.state.get(parameter, {}), plain.state.get(twin, {})
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert (mine[key].dtype, mine[key].device, mine[key].shape) == (value.dtype, value.device, value.shape)
            assert mine[key].stride() == value.stride()
    # It goes on as torch's optimizer does from the same state.
    twins = clone(parameters)
    plain = torchs(name, twins, options)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, parameters, range(3, 5))
    train(plain, twins, range(3, 5))
    assert_same(snapshot(optimizer, parameters), snapshot(plain, twins))


def test_a_class_of_forebay_is_restored_to_its_counterpart(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = forebay.SGD(parameters, momentum=0.9)
    train(optimizer, parameters, 2)
    assert type(forebay.restore(optimizer)) is torch.optim.SGD
    train(optimizer, parameters, 1)
    with pytest.raises(forebay.OptionError, match=r"no counterpart of forebay\.Lion"):
        forebay.restore(forebay.Lion(parameters))


def test_what_was_kept_of_forebays_step_runs_torchs_after_restoring(device: torch.device) -> None:
    parameters, twins = make(device=device), make(device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1)
    kept = optimizer.step
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    forebay.restore(optimizer)
    plain = torch.optim.AdamW(twins, lr=0.1)
    for step in range(4):
        give_gradients(parameters, step)
        give_gradients(twins, step)
        (kept if step % 2 else optimizer.step)()
        schedule.step()
        plain.step()
        plain.param_groups[0]["lr"] *= 0.5
    assert len(calls) == 4
    assert_same(snapshot(optimizer, parameters), snapshot(plain, twins))


@pytest.mark.parametrize("made", ["forebay", "offloaded", "scheduled", "kept", "read"])
def test_a_compiled_step_updates_every_time(device: torch.device, made: str) -> None:
    parameters, twins = make(device=device), make(device=device)
    expected = forebay.AdamW(twins, lr=0.1)
    optimizer: torch.optim.Optimizer
    take = None
    if made in ("forebay", "read"):
        optimizer = forebay.AdamW(parameters, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        if made == "scheduled":
            torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        take = optimizer.step if made == "kept" else None
        forebay.offload(optimizer)

    @torch.compile(backend="eager")
    def step() -> None:
        if made == "read":
            assert all(group["lr"] == 0.1 for group in optimizer.param_groups)
        (take or optimizer.step)()

    for number in range(4):
        give_gradients(parameters, number)
        give_gradients(twins, number)
        step()
        expected.step()
        assert not optimizer.param_groups[0]["capturable"]
    assert_same(snapshot(optimizer, parameters), snapshot(expected, twins))


def test_what_torch_compile_sets_in_groups_is_taken_back(device: torch.device) -> None:
    parameters, twins = make(device=device), make(device=device)
    optimizer, expected = forebay.AdamW(parameters), forebay.AdamW(twins)
    for number in range(2):
        # As torch.compile does on a GPU before it traces a step, or other code that reads the groups.
        optimizer.param_groups[0]["capturable"] = True
        train(optimizer, parameters, range(number, number + 1))
        train(expected, twins, range(number, number + 1))
        assert not optimizer.param_groups[0]["capturable"]
    optimizer.param_groups[0]["capturable"] = True
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same(snapshot(optimizer, parameters), snapshot(expected, twins))
    forebay.restore(optimizer)
    # Where torch's step has it then.
    assert all(optimizer.state[parameter]["step"].device == parameter.device for parameter in parameters)
