"""A real ``torch.optim.Optimizer``: groups, hooks, closures, schedulers, scalers, copies, version counters."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import lr_scheduler

import forebay
from support.optim import TINY, clone, give_gradients, groups_of, make, run, snapshot, train
from support.tensors import assert_same, random

if TYPE_CHECKING:
    from collections.abc import Callable


def test_is_a_torch_optimizer(device: torch.device) -> None:
    assert isinstance(forebay.AdamW(make(device=device)), torch.optim.Optimizer)


def test_groups_have_exactly_torchs_keys(device: torch.device, placement: str) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(groups_of(parameters), placement=placement, max_grad_norm=1.0)
    expected = torch.optim.AdamW(clone(parameters)).param_groups[0].keys()
    train(optimizer, parameters, 2)
    optimizer.add_param_group({"params": make([(3,)], device=device)})
    for group in (*optimizer.param_groups, *optimizer.state_dict()["param_groups"]):
        assert group.keys() == expected
    assert optimizer.defaults.keys() == torch.optim.AdamW(clone(parameters)).defaults.keys()


def test_state_has_exactly_torchs_keys(device: torch.device, placement: str) -> None:
    for options in ({}, {"amsgrad": True}):
        parameters = make([(5,)], device=device)
        others = clone(parameters)
        ours, theirs = forebay.AdamW(parameters, placement=placement, **options), torch.optim.AdamW(others, **options)
        train(ours, parameters, 1)
        train(theirs, others, 1)
        assert ours.state[parameters[0]].keys() == theirs.state[others[0]].keys()


def test_names_of_parameters_are_kept(device: torch.device) -> None:
    model = torch.nn.Linear(3, 2).to(device)
    optimizer = forebay.AdamW(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    train(optimizer, list(model.parameters()), 1)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


# Hooks.


def test_step_hooks_run_around_every_step(device: torch.device, placement: str) -> None:
    parameters = make([(5,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    seen: list[Any] = []
    before = optimizer.register_step_pre_hook(lambda *_: seen.append(("pre", parameters[0].detach().clone())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("post", parameters[0].detach().clone())))
    start = parameters[0].detach().clone()
    train(optimizer, parameters, 1)
    assert [name for name, _ in seen] == ["pre", "post"]
    assert torch.equal(seen[0][1], start)
    assert torch.equal(seen[1][1], parameters[0])
    assert not torch.equal(start, parameters[0])
    before.remove()
    train(optimizer, parameters, 1)
    assert [name for name, _ in seen] == ["pre", "post", "post"]


def test_a_step_pre_hook_may_change_gradients(device: torch.device) -> None:
    ends = []
    for hooked in (True, False):
        parameters = make([(50,)], device=device)
        optimizer = forebay.AdamW(parameters, lr=0.1)
        if hooked:

            def quarter(own: torch.optim.Optimizer, *_: Any) -> None:
                own.param_groups[0]["params"][0].grad.mul_(0.25)

            optimizer.register_step_pre_hook(quarter)
        give_gradients(parameters, 0, scale=1.0 if hooked else 0.25)
        optimizer.step()
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


def test_state_dict_hooks_run(device: torch.device) -> None:
    parameters = make([(5,)], device=device)
    optimizer = forebay.AdamW(parameters)
    train(optimizer, parameters, 1)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save pre"))

    def mark(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("save post")
        return {**state_dict, "mark": 1}

    optimizer.register_state_dict_post_hook(mark)
    saved = optimizer.state_dict()
    assert saved["mark"] == 1
    assert calls == ["save pre", "save post"]


def test_load_hooks_run_and_the_first_may_replace_the_dict(device: torch.device, placement: str) -> None:
    parameters = make([(5,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    calls = []

    def halve(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append("load pre")
        replaced = copy.deepcopy(state_dict)
        replaced["state"][0]["exp_avg"] *= 0.5
        return replaced

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(
        lambda own: calls.append(("load post", own.state[parameters[0]]["exp_avg"].cpu().clone()))
    )
    optimizer.load_state_dict(saved)
    assert calls[0] == "load pre"
    assert torch.equal(calls[1][1], saved["state"][0]["exp_avg"].cpu() * 0.5)
    assert len(calls) == 2


# Closures.


def test_a_closure_runs_with_gradients_on_and_its_loss_is_returned(device: torch.device, placement: str) -> None:
    weight = torch.nn.Parameter(random((6,), 1).to(device))
    optimizer = forebay.AdamW([weight], lr=1e-2, placement=placement)
    losses = []

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        losses.append(loss.detach().item())
        return loss

    with torch.no_grad():
        returned = [optimizer.step(closure).item() for _ in range(10)]
        assert not torch.is_grad_enabled()
    assert returned == losses
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert optimizer.step() is None


def test_an_exception_in_a_closure_changes_nothing(device: torch.device, placement: str) -> None:
    parameters = make([(5,)], device=device)
    optimizer = forebay.AdamW(parameters, placement=placement)
    train(optimizer, parameters, 1)
    before = snapshot(optimizer, parameters)

    def closure() -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        optimizer.step(closure)
    assert_same(before, snapshot(optimizer, parameters))


# Schedulers.

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "cosine restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o, 0.5, 2)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_work_as_with_torch_and_do_not_warn(device: torch.device, name: str) -> None:
    ends, rates, betas = [], [], []
    for kind in ("forebay", "resident", "torch"):
        parameters = make([(20,)], device=device)
        if kind == "torch":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=0.1)
        else:
            optimizer = forebay.AdamW(parameters, lr=0.1, placement="stream" if kind == "forebay" else kind)
        with warnings.catch_warnings():
            if kind == "torch":
                warnings.simplefilter("ignore")
            if name == "sequential":
                # It warns about itself in some versions of torch.
                warnings.filterwarnings("ignore", message=".*epoch parameter.*")
            scheduler = SCHEDULERS[name](optimizer)
            seen = []
            for step in range(6):
                train(optimizer, parameters, range(step, step + 1))
                scheduler.step()
                seen.append((float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["betas"]))
        rates.append([rate for rate, _ in seen])
        betas.append([beta for _, beta in seen])
        ends.append(snapshot(optimizer, parameters))
    assert rates[0] == rates[1] == rates[2]
    assert betas[0] == betas[1] == betas[2]
    assert_same(ends[0], ends[1])
    torch.testing.assert_close(ends[0][0]["param"], ends[2][0]["param"], rtol=1e-5, atol=1e-5)


def test_reduce_on_plateau_works(device: torch.device) -> None:
    parameters = make([(20,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    train(optimizer, parameters, 3, after=lambda: scheduler.step(1.0))
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_a_scheduler_can_be_resumed_from_a_loaded_state_dict(device: torch.device) -> None:
    parameters = make([(20,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(optimizer, parameters, 4, after=scheduler.step)
    fresh = forebay.AdamW(clone(parameters), lr=123.0)
    fresh.load_state_dict(optimizer.state_dict())
    # torch's schedulers ask for the group's `initial_lr`, which came with the state dict.
    lr_scheduler.StepLR(fresh, 2, 0.5, last_epoch=4)
    assert fresh.param_groups[0]["initial_lr"] == 0.1
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.025


# GradScaler.


def test_grad_scaler_unscales_and_steps(device: torch.device, placement: str) -> None:
    ends = []
    for scaled in (True, False):
        parameters = make([(20,), (30,)], device=device)
        optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement)
        scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=scaled)
        for step in range(4):
            loss = sum((parameter * random(parameter.shape, step).to(device)).sum() for parameter in parameters)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_grad_scaler_skips_non_finite_gradients(device: torch.device, placement: str, bad: float) -> None:
    parameters = make([(20,), (30,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=0.1, placement=placement)
    scaler = torch.amp.GradScaler(device.type, init_scale=16.0)
    train(optimizer, parameters, 1)
    before = snapshot(optimizer, parameters)
    for value, scale in ((bad, 8.0), (1.0, 8.0)):
        optimizer.zero_grad()
        loss = (parameters[0] * value).sum() + parameters[1].sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if value == bad:
            assert_same(before, snapshot(optimizer, parameters))
        scaler.update()
        assert scaler.get_scale() == scale
    assert [int(values["step"]) for values in snapshot(optimizer, parameters)] == [2, 2]


# Copies.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_go_on_by_themselves_with_the_same_bits(
    device: torch.device, placement: str, dtype: torch.dtype, duplicate: Callable[[Any], Any]
) -> None:
    options = {"lr": 0.1, "placement": placement, "chunk_bytes": TINY, "amsgrad": True, "max_grad_norm": 1.0}
    expected = run(device=device, dtype=dtype, steps=6, **options)
    parameters = make(device=device, dtype=dtype)
    optimizer = forebay.AdamW(parameters, **options)
    train(optimizer, parameters, 3)
    at_copy = snapshot(optimizer, parameters)
    twin_parameters, twin = duplicate((parameters, optimizer))
    assert_same(snapshot(twin, twin_parameters), at_copy)
    train(optimizer, parameters, range(3, 6))
    assert_same(snapshot(twin, twin_parameters), at_copy)
    train(twin, twin_parameters, range(3, 6))
    assert_same(snapshot(optimizer, parameters), expected)
    assert_same(snapshot(twin, twin_parameters), expected)
    assert twin.param_groups[0].keys() == optimizer.param_groups[0].keys()


def test_a_copy_from_before_the_first_step_works(device: torch.device, placement: str) -> None:
    parameters = make([(20,)], device=device)
    twin_parameters, twin = copy.deepcopy((parameters, forebay.AdamW(parameters, lr=0.1, placement=placement)))
    train(twin, twin_parameters, 2)
    assert_same(snapshot(twin, twin_parameters), run([(20,)], device=device, steps=2, lr=0.1))


def test_a_copy_can_be_prepared_loaded_and_read_first(device: torch.device) -> None:
    parameters = make([(20,), (30,)], device=device, dtype=torch.bfloat16)
    optimizer = forebay.AdamW(parameters, lr=0.1)
    train(optimizer, parameters, 2)
    expected = snapshot(optimizer, parameters)
    for act in (
        lambda twin: twin.prepare(),
        lambda twin: twin.state_dict(),
        lambda twin: twin.synchronize(),
        lambda twin: twin.load_state_dict(twin.state_dict()),
    ):
        twin_parameters, twin = copy.deepcopy((parameters, optimizer))
        act(twin)
        assert_same(snapshot(twin, twin_parameters), expected)


def test_repr_and_zero_grad_work(device: torch.device) -> None:
    parameters = make([(5,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=0.5)
    assert "lr: 0.5" in repr(optimizer)
    train(optimizer, parameters, 1)
    optimizer.zero_grad()
    assert parameters[0].grad is None


# Autograd.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_versions_are_bumped(device: torch.device, placement: str, dtype: torch.dtype) -> None:
    sliced = torch.nn.Parameter(torch.ones(9, 9, device=device)[::2, ::2])
    parameters = [*make([(5,), (6, 7)], device=device, dtype=dtype), sliced]
    optimizer = forebay.AdamW(parameters, placement=placement)
    for step in range(2):
        versions = [parameter._version for parameter in parameters]
        train(optimizer, parameters, range(step, step + 1))
        assert all(p._version > version for p, version in zip(parameters, versions, strict=True))


def test_versions_of_untouched_parameters_stay(device: torch.device) -> None:
    parameters = make([(5,), (6,)], device=device)
    optimizer = forebay.AdamW(parameters)
    version = parameters[1]._version
    train(optimizer, parameters[:1], 2)
    assert parameters[1]._version == version


def test_a_weight_saved_for_backward_and_then_updated_is_noticed(device: torch.device, placement: str) -> None:
    weight = torch.nn.Parameter(random((4, 4), 1).to(device))
    data = random((4, 4), 2).to(device).requires_grad_()
    optimizer = forebay.AdamW([weight], placement=placement)
    output = (data @ weight).sum()
    train(optimizer, [weight], 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_gradients_that_carry_a_graph_are_fine(device: torch.device) -> None:
    ends = []
    for create_graph in (False, True):
        weight = torch.nn.Parameter(random((4, 4), 1).to(device))
        optimizer = forebay.AdamW([weight], lr=0.1, max_grad_norm=1.0)
        (weight.grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=create_graph)
        assert weight.grad.requires_grad == create_graph
        optimizer.step()
        assert weight.is_leaf
        assert weight.grad_fn is None
        ends.append(snapshot(optimizer, [weight]))
    assert_same(*ends)


def test_training_a_model_follows_torch(device: torch.device, placement: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.GELU(), torch.nn.Linear(24, 3)).to(device)
    twin = copy.deepcopy(model)
    data, target = random((32, 12), 1).to(device), random((32, 3), 2).to(device)
    ours = forebay.AdamW(model.parameters(), lr=1e-2, placement=placement)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        pair = []
        for net, optimizer in ((model, ours), (twin, theirs)):
            loss = torch.nn.functional.mse_loss(net(data), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pair.append(loss.item())
        losses.append(pair)
    torch.testing.assert_close(*map(list, zip(*losses, strict=True)), rtol=1e-4, atol=1e-5)
    assert losses[-1][0] < losses[0][0] * 0.8
