"""Every rule: torch's fused bits on CUDA, the same bits in every placement, torch's numbers on the CPU."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from typing import Any

import pytest
import torch

import forebay
from forebay import optim
from support.optim import TINY, clone, give_gradients, make, snapshot, train
from support.tensors import assert_same, needs_cuda

SIZES = ((4,), (7,), (64, 40), (33, 7), (1,), (257,), (), (0, 3), (4096,))
"""Multiples of 4, for which torch uses vectors of four elements, and others."""


def adam_options() -> list[dict[str, Any]]:
    """Return combinations of the settings of Adam and AdamW."""
    rows = itertools.product((False, True), (False, True), (0.0, 0.1))
    return [{"amsgrad": amsgrad, "maximize": maximize, "weight_decay": decay} for amsgrad, maximize, decay in rows]


def sgd_options() -> list[dict[str, Any]]:
    """Return combinations of the settings of SGD that torch allows."""
    rows = itertools.product((0.0, 0.9), (0.0, 0.3), (0.0, 0.1), (False, True), (False, True))
    return [
        {
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        for momentum, dampening, decay, nesterov, maximize in rows
        if not (nesterov and (momentum == 0 or dampening != 0))
    ]


def lion_options() -> list[dict[str, Any]]:
    """Return combinations of the settings of Lion."""
    rows = itertools.product((False, True), (0.0, 0.1), ((0.9, 0.99), (0.5, 0.7)))
    return [{"maximize": maximize, "weight_decay": decay, "betas": betas} for maximize, decay, betas in rows]


CASES = [
    *[("AdamW", options) for options in adam_options()],
    *[("Adam", options) for options in adam_options()],
    *[("SGD", options) for options in sgd_options()],
    *[("Lion", options) for options in lion_options()],
]
TORCH_CASES = [(name, options) for name, options in CASES if name != "Lion"]

TYPICAL: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "amsgrad": True},
    "Adam": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
}


def ids(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return a readable name for each case: its settings that are on."""
    return [
        "-".join(
            [name, *(f"{key}={value}" if not isinstance(value, bool) else key for key, value in of.items() if value)]
        )
        for name, of in cases
    ]


def build(name: str, parameters: Any, **options: Any) -> Any:
    """Return one of forebay's optimizers."""
    return getattr(forebay, name)(parameters, **options)


@pytest.fixture(params=TYPICAL)
def name(request: pytest.FixtureRequest) -> str:
    """Name an optimizer."""
    return str(request.param)


@needs_cuda
@pytest.mark.parametrize("where", ["stream", "resident"])
@pytest.mark.parametrize(("name", "options"), TORCH_CASES, ids=ids(TORCH_CASES))
def test_on_cuda_the_bits_are_those_of_torchs_fused_kernels(name: str, options: dict[str, Any], where: str) -> None:
    parameters = make(SIZES, device="cuda")
    others = clone(parameters)
    ours = build(name, parameters, lr=1e-2, placement=where, chunk_bytes=TINY, **options)
    theirs = getattr(torch.optim, name)(others, lr=1e-2, fused=True, **options)
    for optimizer, of in ((ours, parameters), (theirs, others)):
        train(optimizer, of, 20)
    assert_same(snapshot(ours, parameters), snapshot(theirs, others))


@pytest.mark.parametrize(("name", "options"), CASES, ids=ids(CASES))
def test_every_placement_has_the_same_bits(device: torch.device, name: str, options: dict[str, Any]) -> None:
    ends = []
    for where in ("stream", "resident", "host", "hybrid"):
        parameters = make(device=device, dtype=[torch.float32, torch.bfloat16, torch.float16])
        optimizer = build(name, parameters, lr=1e-2, placement=where, chunk_bytes=TINY, **options)
        train(optimizer, parameters, 5)
        ends.append(snapshot(optimizer, parameters))
        optimizer.close()
    for end in ends[1:]:
        assert_same(ends[0], end)


@pytest.mark.parametrize(("name", "options"), TORCH_CASES, ids=ids(TORCH_CASES))
def test_the_numbers_are_torchs(name: str, options: dict[str, Any]) -> None:
    parameters = make(SIZES)
    others = clone(parameters)
    ours = build(name, parameters, lr=1e-2, chunk_bytes=TINY, **options)
    theirs = getattr(torch.optim, name)(others, lr=1e-2, foreach=False, **options)
    for optimizer, of in ((ours, parameters), (theirs, others)):
        train(optimizer, of, 20)
    for found, wanted in zip(snapshot(ours, parameters), snapshot(theirs, others), strict=True):
        assert found.keys() == wanted.keys()
        for kind, value in wanted.items():
            torch.testing.assert_close(found[kind], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_defaults_and_positions_are_torchs(name: str) -> None:
    positional = (0.5, 0.1, 0.2) if name == "SGD" else (0.5, (0.1, 0.2), 1e-3)
    for given in ((), positional):
        ours = getattr(forebay, name)(make([(3,)]), *given)
        theirs = getattr(torch.optim, name)(make([(3,)]), *given)
        assert ours.defaults == theirs.defaults
        assert ours.param_groups[0].keys() == theirs.param_groups[0].keys()


# What the base class does, for each optimizer.


def test_groups_have_numbers_of_their_own(device: torch.device, placement: str, name: str) -> None:
    def groups(parameters: Any) -> list[dict[str, Any]]:
        return [{"params": parameters[0::2], "lr": 3e-2, "weight_decay": 0.3}, {"params": parameters[1::2]}]

    parameters = make(device=device)
    optimizer = build(name, groups(parameters), placement=placement, chunk_bytes=TINY, **TYPICAL[name])
    train(optimizer, parameters, 4)
    found = snapshot(optimizer, parameters)
    for part, of_group in ((0, {"lr": 3e-2, "weight_decay": 0.3}), (1, {})):
        others = make(device=device)
        alone = build(name, others, placement=placement, chunk_bytes=TINY, **{**TYPICAL[name], **of_group})
        train(alone, others, 4)
        assert_same(found[part::2], snapshot(alone, others)[part::2])


def test_a_group_may_be_added_later(device: torch.device, placement: str, name: str) -> None:
    parameters = make([(40,), (33, 7)], device=device)
    late = make([(50,)], device=device, seed=2)
    optimizer = build(name, parameters, placement=placement, chunk_bytes=TINY, **TYPICAL[name])
    train(optimizer, parameters, 2)
    optimizer.add_param_group({"params": late, "lr": 0.5e-2})
    for step in range(2):
        give_gradients(parameters, 2 + step)
        give_gradients(late, step)
        optimizer.step()
    others, alone = make([(40,), (33, 7)], device=device), make([(50,)], device=device, seed=2)
    first = build(name, others, **TYPICAL[name])
    train(first, others, 4)
    second = build(name, alone, **{**TYPICAL[name], "lr": 0.5e-2})
    train(second, alone, 2)
    assert_same(snapshot(optimizer, parameters), snapshot(first, others))
    assert_same(snapshot(optimizer, late), snapshot(second, alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dicts_copies_and_pickles_go_on_as_before(
    device: torch.device, placement: str, name: str, dtype: torch.dtype
) -> None:
    parameters = make(device=device, dtype=dtype)
    optimizer = build(name, parameters, placement=placement, chunk_bytes=TINY, **TYPICAL[name])
    train(optimizer, parameters, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    pickled = pickle.dumps((parameters, optimizer))
    copied = copy.deepcopy((parameters, optimizer))
    loaded = clone(parameters)
    other = build(name, loaded, placement=placement, chunk_bytes=TINY, **TYPICAL[name])
    other.load_state_dict(saved)
    train(optimizer, parameters, range(3, 6))
    expected = snapshot(optimizer, parameters)
    for of, one in ((loaded, other), copied, pickle.loads(pickled)):
        train(one, of, range(3, 6))
        assert_same(snapshot(one, of), expected)


def test_clipping_scales_gradients(device: torch.device, placement: str, name: str) -> None:
    parameters, others = make(device=device), make(device=device)
    ours = build(name, parameters, placement=placement, chunk_bytes=TINY, max_grad_norm=0.5, **TYPICAL[name])
    by_hand = build(name, others, placement=placement, chunk_bytes=TINY, **TYPICAL[name])
    for step in range(3):
        for of in (parameters, others):
            give_gradients(of, step)
        torch.nn.utils.clip_grad_norm_(others, 0.5)
        ours.step()
        by_hand.step()
    assert_same(snapshot(ours, parameters), snapshot(by_hand, others))


def test_a_step_that_is_not_finite_is_left_out(device: torch.device, placement: str, name: str) -> None:
    parameters, others = make(device=device), make(device=device)
    options = {"placement": placement, "max_grad_norm": 1.0, "skip_nonfinite": True, **TYPICAL[name]}
    ours, untouched = build(name, parameters, **options), build(name, others, **options)
    give_gradients(parameters, 9)
    parameters[0].grad[0] = float("inf")
    ours.step()
    for optimizer, of in ((ours, parameters), (untouched, others)):
        train(optimizer, of, 3)
    assert_same(snapshot(ours, parameters), snapshot(untouched, others))


def test_closures_hooks_and_schedulers_work(device: torch.device, placement: str, name: str) -> None:
    parameters, others = make(device=device), make(device=device)
    optimizer = build(name, parameters, placement=placement, **TYPICAL[name])
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure(step: int) -> float:
        give_gradients(parameters, step)
        return float(step)

    for step in range(3):
        assert optimizer.step(lambda step=step: closure(step)) == step
        scheduler.step()
    assert seen == ["before", "after"] * 3
    by_hand = build(name, others, **TYPICAL[name])

    def halve() -> None:
        by_hand.param_groups[0]["lr"] *= 0.5

    train(by_hand, others, 3, halve)
    assert_same(snapshot(optimizer, parameters), snapshot(by_hand, others))


@pytest.mark.parametrize("where", ["host", "hybrid"])
def test_gradients_of_a_marked_backward_are_used(device: torch.device, where: str, name: str) -> None:
    ends = []
    for marked in (True, False):
        parameters = make(device=device)
        optimizer = build(name, parameters, placement=where, chunk_bytes=TINY, **TYPICAL[name])
        for step in range(3):
            optimizer.zero_grad()
            give_gradients(parameters, step)
            wanted = [parameter.grad for parameter in parameters]
            optimizer.zero_grad()
            loss = sum((parameter * grad).sum() for parameter, grad in zip(parameters, wanted, strict=True))
            if marked:
                with optimizer.last_backward():
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


def test_stats_and_memory_follow_the_columns(device: torch.device, name: str) -> None:
    parameters = make([(1000,), (24,)], device=device)
    optimizer = build(name, parameters, placement="stream", **TYPICAL[name])
    train(optimizer, parameters, 2)
    columns = sum(kind != "step" for kind in optimizer.state[parameters[0]])
    assert columns == {"AdamW": 3, "Adam": 2, "SGD": 1, "Lion": 1}[name]
    stats = optimizer.stats()
    assert stats["fetch_bytes"] == stats["store_bytes"] == 4 * columns * 1024


def test_a_sleeper_frees_and_restores_each(device: torch.device, placement: str, name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)).to(device)
    twin = copy.deepcopy(model)
    ends = []
    for of, sleeps in ((model, True), (twin, False)):
        parameters = list(of.parameters())
        optimizer = build(name, parameters, placement=placement, **TYPICAL[name])
        train(optimizer, parameters, 2)
        if sleeps:
            optimizer.zero_grad()
            sleeper = forebay.Sleeper(of, optimizer)
            sleeper.sleep()
            sleeper.wake()
        train(optimizer, parameters, range(2, 4))
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


def test_unknown_options_are_refused_in_pythons_words(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        build(name, make([(3,)]), placements="host")
    assert (
        str(caught.value)
        == f"{name}.__init__() got an unexpected keyword argument 'placements'; did you mean 'placement'?"
    )


def test_errors_name_the_class(name: str) -> None:
    with pytest.raises(forebay.OptionError, match=f"forebay.{name} takes"):
        build(name, [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    ({"weight_decay": -0.5}, "Invalid weight_decay value: -0.5"),
]


@pytest.mark.parametrize(("numbers", "message"), WRONG, ids=[str(numbers) for numbers, _ in WRONG])
def test_wrong_numbers_are_refused_in_torchs_words(name: str, numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(forebay.OptionError, match=message):
        build(name, make([(3,)]), **numbers)
    with pytest.raises(forebay.OptionError, match=message):
        build(name, [{"params": make([(3,)]), **numbers}])


def test_state_of_another_optimizer_is_refused(name: str) -> None:
    parameters = make([(3,)])
    optimizer = build(name, parameters, **TYPICAL[name])
    saved = optimizer.state_dict()
    saved["state"] = {0: {"shampoo": torch.zeros(3)}}
    with pytest.raises(forebay.OptionError, match=f"has state 'shampoo' in the state dict, which {name} does not have"):
        optimizer.load_state_dict(saved)


def test_a_closed_optimizer_says_so(name: str) -> None:
    for used in (False, True):
        parameters = make([(30,)])
        optimizer = build(name, parameters, **TYPICAL[name])
        if used:
            train(optimizer, parameters, 1)
        optimizer.close()
        optimizer.close()
        with pytest.raises(forebay.OptionError, match="was closed"):
            train(optimizer, parameters, 1)
        assert optimizer.stats()["device_bytes"] == 0


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_a_decay_of_the_other_kind_is_refused(name: str) -> None:
    group = {"params": make([(3,)]), "decoupled_weight_decay": name == "Adam"}
    with pytest.raises(forebay.OptionError, match=f"decoupled_weight_decay={name == 'Adam'} .* forebay.{name}"):
        build(name, [group])


def test_resident_state_that_was_taken_out_is_freed_with_its_dict(device: torch.device, name: str) -> None:
    parameters = make([(40,), (33, 7)], device=device)
    optimizer = build(name, parameters, placement="resident", **TYPICAL[name])
    train(optimizer, parameters, 2)
    column = next(kind for kind in optimizer.state[parameters[0]] if kind != "step")
    popped = optimizer.state.pop(parameters[0])
    gone = [weakref.ref(popped[column])]
    del popped
    gc.collect()
    assert gone[0]() is None
    # A parameter that is replaced is freed at the next step.
    gone.append(weakref.ref(parameters[0]))
    optimizer.param_groups[0]["params"][0] = parameters[0] = make([(50,)], device=device)[0]
    train(optimizer, parameters, 2)
    gc.collect()
    assert gone[1]() is None


@pytest.mark.parametrize("name", optim.__all__)
def test_defaults_are_those_of_the_rule(name: str) -> None:
    assert set(TYPICAL) == set(optim.__all__), "every class is tested here"
    optimizer = getattr(forebay, name)(make())
    assert optimizer.numbers(optimizer.param_groups[0]) == optimizer._rule.defaults
