"""The hybrid optimizer trains as Megatron's own does: its arguments, parts and gradients, step by step beside it.

Both run on a pretended GPU, so that there is something to offload.
"""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer as Megatrons
from megatron_support import ADAMW, RULES, SOME, give, gpu, make, offloaded, settings, train, two_groups

import forebay
from forebay.integrations.megatron import HybridDeviceOptimizer
from support.tensors import assert_same, random

__all__ = ["gpu"]  # a fixture
pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.parametrize("fraction", [0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", list(RULES))
def test_trains_as_megatrons_and_as_plain_forebay(rule, dtype, fraction):
    kwargs = {**RULES[rule], "offload_fraction": fraction, "param_update_in_fp32": True}
    mine, theirs, plain = make(dtype), make(dtype), make(dtype)
    ours, reference = HybridDeviceOptimizer(two_groups(mine), **kwargs), Megatrons(two_groups(theirs), **kwargs)
    cls = {"adamw": forebay.AdamW, "adam": forebay.Adam}.get(rule, forebay.SGD)
    alone = cls(two_groups(plain), **settings(rule), placement="resident")
    for optimizer, parameters in ((ours, mine), (reference, theirs), (alone, plain)):
        train(optimizer, parameters, 0, 1, 2)

    assert_same(mine, plain)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    for a, b in zip(mine, theirs, strict=True):
        expected = reference.state.get(b, {})
        # Without momentum torch's SGD has no state, also no master in it.
        for name in expected:
            torch.testing.assert_close(ours.state[a][name].float(), expected[name].float(), rtol=1e-4, atol=1e-6)
            assert ours.state[a][name].is_cuda == expected[name].is_cuda or name in ("step", "master_param"), name


@pytest.mark.parametrize("fraction", [0, 0.01, 0.3, 0.5, 0.9, 1])
def test_offloads_the_same_parameters_as_megatrons(fraction):
    mine, theirs = make(), make()
    for optimizer, parameters in (
        (HybridDeviceOptimizer(two_groups(mine), fraction, **ADAMW), mine),
        (Megatrons(two_groups(theirs), fraction, **ADAMW), theirs),
    ):
        train(optimizer, parameters, 0)
        found = offloaded(optimizer, parameters)
        if parameters is mine:
            expected = found
    assert found == expected
    assert any(found) == (fraction > 0)
    assert all(found) == (fraction == 1)


def test_the_parts_are_the_offloaded_and_the_resident_parameters():
    parameters = make()
    optimizer = HybridDeviceOptimizer(two_groups(parameters), 0.5, **ADAMW)
    host, device = optimizer.sub_optimizers
    assert optimizer.cpu_optimizers == [host]
    assert optimizer.gpu_optimizer is device
    assert all(isinstance(part, torch.optim.AdamW) for part in optimizer.sub_optimizers)
    assert [(part._options.placement) for part in (host, device)] == ["host", "resident"]
    count = sum(len(g["params"]) for part in optimizer.sub_optimizers for g in part.param_groups)
    assert count == len(parameters)
    assert HybridDeviceOptimizer(make(), 0, **ADAMW).cpu_optimizers == []
    assert HybridDeviceOptimizer(make(), 1, **ADAMW).gpu_optimizer is None


@pytest.mark.parametrize("options", [{"placement": "stream"}, {"placement": "hybrid", "host_fraction": 0.5}], ids=str)
def test_no_placement_of_the_offloaded_part_changes_a_bit(options):
    mine, plain = make(torch.bfloat16), make(torch.bfloat16)
    for parameters, more in ((mine, {**options, "chunk_bytes": 1 << 12}), (plain, {})):
        optimizer = HybridDeviceOptimizer(parameters, 0.5, param_update_in_fp32=True, **RULES["adamw"], **more)
        train(optimizer, parameters, 0, 1)
        assert optimizer.cpu_optimizers[0]._options.placement == more.get("placement", "host")
    assert_same(mine, plain)


def test_empty_shards_make_no_resident_part_when_all_is_offloaded():
    optimizer = HybridDeviceOptimizer(make(shapes=[(3,), (0,)]), 1.0, **ADAMW)
    assert optimizer.gpu_optimizer is None


def test_parameters_on_the_cpu_are_offloaded():
    parameters = [torch.nn.Parameter(torch.ones(5)), *make()]
    assert not parameters[0].is_cuda
    optimizer = HybridDeviceOptimizer(parameters, 0, **ADAMW)
    train(optimizer, parameters, 0)
    assert offloaded(optimizer, parameters) == [True] + [False] * len(SOME)


def test_each_class_gives_its_part_its_rule_and_its_defaults():
    class FusedAdam(torch.optim.Optimizer):
        __module__ = "transformer_engine.pytorch.optimizers.fused_adam"

        def __init__(self, params, lr=1e-3, betas=(0.9, 0.98), eps=1e-5, adam_w_mode=True, weight_decay=0.0):
            raise AssertionError("only its signature is read")

    given = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": FusedAdam}
    host, device = HybridDeviceOptimizer(make(), 0.5, **given).sub_optimizers
    assert type(host) is type(device) is forebay.AdamW
    assert (host.defaults["weight_decay"], device.defaults["weight_decay"]) == (1e-2, 0.0)
    assert (host.defaults["betas"], device.defaults["betas"]) == ((0.9, 0.999), (0.9, 0.98))
    _, device = HybridDeviceOptimizer(make(), 0.5, **given, adam_w_mode=False, lr=0.5).sub_optimizers
    assert type(device) is forebay.Adam
    assert device.defaults["lr"] == 0.5


# Gradients.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoupled_gradients_are_used_and_cleared(dtype):
    mine, theirs = make(dtype), make(dtype)
    kwargs = {**RULES["adamw"], "param_update_in_fp32": True}
    ours, reference = HybridDeviceOptimizer(mine, **kwargs), Megatrons(theirs, **kwargs)
    for optimizer, parameters in ((ours, mine), (reference, theirs)):
        train(optimizer, parameters, 0, 1, attribute="decoupled_grad", dtype=torch.float32)
        assert all(p.decoupled_grad is None and p.grad is None for p in parameters)
    for a, b in zip(mine, theirs, strict=True):
        # Megatron's own leaves an f32 parameter as it is if it is resident and has a decoupled gradient.
        if b in reference.state:
            torch.testing.assert_close(ours.state[a]["master_param"], reference.state[b]["master_param"].detach())
    plain = make(dtype)
    alone = forebay.AdamW(plain, **settings("adamw"), grad_source="decoupled_grad")
    train(alone, plain, 0, 1, attribute="decoupled_grad", dtype=torch.float32)
    assert_same(mine, plain)
    give(mine, 2, "decoupled_grad")
    ours.zero_grad(set_to_none=False)
    assert all(p.decoupled_grad.count_nonzero() == 0 for p in mine)


@pytest.mark.parametrize("fraction", [0, 0.5, 1])
def test_a_parameter_with_the_attribute_does_not_use_grad(fraction):
    parameters = make(shapes=[(4,), (4,), (4,)])
    optimizer = HybridDeviceOptimizer(parameters, fraction, **RULES["sgd"])
    before = [p.detach().clone() for p in parameters]
    give(parameters, 0)
    parameters[0].decoupled_grad = None
    parameters[1].decoupled_grad = torch.full((4,), 100.0)
    optimizer.step()
    torch.testing.assert_close(parameters[0], before[0])
    torch.testing.assert_close(parameters[1], before[1] - 1.0)
    torch.testing.assert_close(parameters[2], before[2] - 1e-2 * parameters[2].grad)
    assert not hasattr(parameters[2], "decoupled_grad")


def test_main_grad_is_used_if_asked_for():
    parameters = make(torch.bfloat16, shapes=[(4,), (4,)])
    optimizer = HybridDeviceOptimizer(
        parameters, 0.5, param_update_in_fp32=True, grad_source="main_grad", **RULES["sgd"]
    )
    before = [p.detach().float() for p in parameters]
    give(parameters, 0)
    for parameter in parameters:
        parameter.main_grad = torch.full((4,), 100.0)
    optimizer.step()
    optimizer.zero_grad()
    for parameter, was in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter, (was - 1.0).bfloat16())
        assert parameter.main_grad is not None


def test_a_closure_runs_once():
    parameters, calls = make(), []

    def closure():
        calls.append(torch.is_grad_enabled())
        give(parameters, 0)
        return 5.0

    assert HybridDeviceOptimizer(parameters, 0.5, **ADAMW).step(closure) == 5.0
    assert calls == [True]


def test_groups_changed_between_steps_count():
    mine, plain = make(), make()
    ours, alone = (
        HybridDeviceOptimizer(two_groups(mine), 0.5, **ADAMW, lr=0.1),
        forebay.AdamW(two_groups(plain), lr=0.1),
    )
    for optimizer, parameters in ((ours, mine), (alone, plain)):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            train(optimizer, parameters, step)
            schedule.step()
        # As Megatron does: groups are replaced by copies.
        optimizer.param_groups = [{**group, "weight_decay": 0.5} for group in optimizer.param_groups]
        train(optimizer, parameters, 3)
    assert_same(mine, plain)


# Parameters that change.


def test_parameters_replaced_before_the_first_step_leave_nothing_behind():
    """As Megatron's wrapper for bf16 does: the groups get f32 copies in place."""
    halves = make(torch.bfloat16)
    optimizer = HybridDeviceOptimizer(two_groups(halves), 0.5, **ADAMW)
    copies = [p.detach().float().requires_grad_() for p in halves]
    for group in optimizer.param_groups:
        group["params"][:] = [copies[[p is h for h in halves].index(True)] for p in group["params"]]
    fresh = [torch.nn.Parameter(p.detach().clone()) for p in copies]
    other = HybridDeviceOptimizer(two_groups(fresh), 0.5, **ADAMW)
    train(optimizer, copies, 0)
    train(other, fresh, 0)
    assert_same(copies, fresh)
    assert offloaded(optimizer, copies) == offloaded(other, fresh)
    assert all(p not in optimizer.state for p in halves)


def test_a_group_added_later_is_divided_too():
    first, second = make(), make()
    optimizer = HybridDeviceOptimizer(first, 0.5, **ADAMW)
    train(optimizer, first, 0)
    before = offloaded(optimizer, first)
    optimizer.add_param_group({"params": second, "lr": 1.0})
    train(optimizer, [*first, *second], 1)
    found = offloaded(optimizer, [*first, *second])
    assert found[: len(first)] == before
    sizes = [p.numel() for p in [*first, *second]]
    share = sum(size for size, is_out in zip(sizes, found, strict=True) if is_out) / sum(sizes)
    assert 0.5 <= share < 1
    assert [optimizer.state[p]["step"].item() for p in (first[0], second[0])] == [2, 1]


def test_shards_that_are_views_are_taken():
    whole = torch.nn.Parameter(random((10,), 1).cuda())
    shard = whole.view(-1)[2:7]
    with pytest.raises(ValueError, match="non-leaf"):
        Megatrons([shard], 0.5, **ADAMW)
    with pytest.raises(ValueError, match="non-leaf"):
        HybridDeviceOptimizer([whole * 2], 0.5, **ADAMW)
    before = whole.detach().clone()
    optimizer = HybridDeviceOptimizer([shard], 0.5, **RULES["sgd"])
    shard.grad = torch.ones(5).cuda()
    optimizer.step()
    before[2:7] -= 1e-2
    torch.testing.assert_close(whole.detach(), before)


# Arguments.


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"pin_cpu_grads": False}, forebay.OptionError, "pin_cpu_grads=False is not supported"),
        ({"pin_cpu_params": False}, forebay.OptionError, "pin_cpu_params=False is not supported"),
        ({"bias_correction": False}, forebay.OptionError, "bias_correction=False is not supported"),
        ({"capturable": True}, forebay.OptionError, "capturable=True is not supported"),
        ({"offload_fraction": 1.5}, forebay.OptionError, "invalid offload_fraction: 1.5"),
        ({"placement": "resident"}, forebay.OptionError, "offload_fraction=0"),
        ({"exp_avg_dtype": torch.bfloat16}, TypeError, "unexpected keyword argument 'exp_avg_dtype'"),
        ({"max_grad_norm": 1.0}, TypeError, "unexpected keyword argument 'max_grad_norm'"),
        ({"chunk_byte": 1}, TypeError, "did you mean 'chunk_bytes'"),
        (
            {"cpu_optimizer_cls": torch.optim.RMSprop},
            forebay.OptionError,
            "no update rule for torch.RMSprop",
        ),
        ({"cpu_optimizer_cls": None}, forebay.OptionError, "give cpu_optimizer_cls"),
        ({"grad_source": "gradient"}, forebay.OptionError, "invalid grad_source: 'gradient'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_done_is_refused_by_name(given, error, message):
    with pytest.raises(error, match=message):
        HybridDeviceOptimizer(make(), **{**ADAMW, **given})


def test_arguments_that_change_nothing_are_accepted():
    optimizer = HybridDeviceOptimizer(
        *(make(), 0.5, torch.optim.AdamW, torch.optim.AdamW, True, True, True, False),
        bias_correction=True,
        fused=True,
        foreach=False,
        capturable=False,
        differentiable=False,
    )
    assert optimizer.overlap_cpu_optimizer_d2h_h2d is False
    assert optimizer.param_groups[0]["fused"] is True
    assert optimizer.offloads_itself
