"""The state of the hybrid optimizer: as Megatron's own shows it, saves it and loads it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer as Megatrons
from megatron_support import ADAMW, RULES, SOME, gpu, make, offloaded, train, two_groups, values

import forebay
from forebay import checkpoint
from forebay.integrations.megatron import HybridDeviceOptimizer
from support.tensors import assert_same

__all__ = ["gpu"]  # a fixture
pytestmark = pytest.mark.usefixtures("gpu")


def test_there_is_no_state_before_the_first_step():
    parameters = make()
    optimizer = HybridDeviceOptimizer(parameters, 0.5, **ADAMW)
    assert not optimizer.state
    assert optimizer.state_dict()["state"] == {}
    assert parameters[0] not in optimizer.state
    with pytest.raises(KeyError):
        optimizer.state[torch.zeros(3)]
    train(optimizer, parameters, 0)
    assert list(optimizer.state) == parameters
    assert len(optimizer.state) == len(optimizer.state_dict()["state"]) == len(parameters)


def test_every_parameter_has_a_master_and_f32_parameters_are_their_own():
    parameters = [*make(torch.bfloat16), *make()]
    optimizer = HybridDeviceOptimizer(parameters, 0.5, param_update_in_fp32=True, **ADAMW)
    train(optimizer, parameters, 0)
    masters = [optimizer.state[p]["master_param"] for p in parameters]
    assert [m is p for m, p in zip(masters, parameters, strict=True)] == [p.dtype == torch.float32 for p in parameters]
    assert_same([m.to(p.dtype) for m, p in zip(masters, parameters, strict=True)], parameters)
    assert list(optimizer.param_to_fp32_param) == parameters[: len(SOME)]
    assert list(optimizer.inner_param_to_orig_param.items()) == [(p, p) for p in parameters]


@pytest.mark.parametrize("finish", ["_sync_hdo_state_to_sub_optimizers", "_move_new_state_to_right_device", "step"])
def test_an_assigned_master_changes_an_f32_parameter(finish):
    parameters = make()
    optimizer = HybridDeviceOptimizer(parameters, 0.5, param_update_in_fp32=True, **ADAMW)
    train(optimizer, parameters, 0)
    wanted = [torch.full_like(p, i) for i, p in enumerate(parameters)]
    optimizer.state[parameters[0]] = {
        **{name: value.clone() for name, value in optimizer.state[parameters[0]].items()},
        "master_param": wanted[0],
    }
    for parameter, value in zip(parameters[1:], wanted[1:], strict=True):
        optimizer.state[parameter]["master_param"] = value
    getattr(optimizer, finish)()
    assert_same(parameters, wanted)
    assert all(optimizer.state[p]["master_param"] is p for p in parameters)


def test_masters_follow_parameters_that_were_loaded():
    parameters = make(torch.bfloat16)
    optimizer = HybridDeviceOptimizer(parameters, 0.5, param_update_in_fp32=True, **ADAMW)
    optimizer.update_fp32_param_by_new_param()
    train(optimizer, parameters, 0)
    with torch.no_grad():
        parameters[0].copy_(parameters[0])
        parameters[1].fill_(2.0)
    optimizer.update_fp32_param_by_new_param()
    for parameter in parameters:
        assert_same(optimizer.state[parameter]["master_param"], parameter.detach().float())


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_dummy_step_makes_the_state_and_changes_nothing(rule, dtype):
    parameters, theirs = make(dtype), make(dtype)
    # Megatron's shards need no gradient.
    for parameter in parameters:
        parameter.requires_grad_(False)
    before = [p.clone() for p in parameters]
    kwargs = {**RULES[rule], "param_update_in_fp32": True}
    optimizer, reference = HybridDeviceOptimizer(parameters, 0.5, **kwargs), Megatrons(theirs, 0.5, **kwargs)
    optimizer.dummy_step()
    reference.dummy_step()
    assert_same(parameters, before)
    for mine, other in zip(parameters, theirs, strict=True):
        assert optimizer.state.get(mine, {}).keys() >= reference.state.get(other, {}).keys()


def test_it_is_made_again_from_its_defaults():
    parameters = make()
    optimizer = HybridDeviceOptimizer(parameters, 0.5, **RULES["adamw"], placement="stream", chunk_bytes=1 << 16)
    optimizer.load_state_dict(optimizer.state_dict())
    again = HybridDeviceOptimizer(params=[{"params": make()}], **optimizer.defaults)
    assert again.defaults == optimizer.defaults
    assert again.cpu_optimizers[0]._options == optimizer.cpu_optimizers[0]._options
    assert again.cpu_optimizers[0]._options.placement == "stream"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["ours", "megatrons", "pickled", "another split"])
@pytest.mark.parametrize("rule", ["adamw", "momentum"])
def test_a_loaded_run_goes_on_with_the_same_bits(rule, kind, dtype):
    kwargs = {**RULES[rule], "param_update_in_fp32": True}
    parameters = make(dtype)
    cls = Megatrons if kind == "megatrons" else HybridDeviceOptimizer
    first = cls(two_groups(parameters), 0.5, **kwargs)
    train(first, parameters, 0, 1)
    saved = first.state_dict()
    if kind == "pickled":
        file = io.BytesIO()
        torch.save(saved, file)
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    saved, weights = copy.deepcopy(saved), [p.detach().clone() for p in parameters]

    resumed = [torch.nn.Parameter(weight.clone().cuda()) for weight in weights]
    second = HybridDeviceOptimizer(two_groups(resumed), 0.9 if kind == "another split" else 0.5, **kwargs)
    second.load_state_dict(saved)
    for key, values_ in saved["state"].items():
        found = second.state[resumed[key]]
        assert found.keys() == values_.keys()
        assert_same({k: v.float() for k, v in values_.items()}, {k: v.float() for k, v in found.items()})
    if kind != "megatrons":
        train(first, parameters, 2, 3)
        train(second, resumed, 2, 3)
        assert_same(values(first, parameters), values(second, resumed))


def test_megatrons_own_loads_our_state():
    kwargs = {**RULES["adamw"], "param_update_in_fp32": True}
    parameters, theirs = make(torch.bfloat16), make(torch.bfloat16)
    optimizer = HybridDeviceOptimizer(two_groups(parameters), 0.5, **kwargs)
    train(optimizer, parameters, 0, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    reference = Megatrons(two_groups(theirs), 0.5, **kwargs)
    reference.load_state_dict(saved)
    for mine, other in zip(parameters, theirs, strict=True):
        found = reference.state[other]
        assert found.keys() == optimizer.state[mine].keys()
        assert_same(dict(optimizer.state[mine]), {name: value.detach() for name, value in found.items()})


def test_state_of_torchs_adamw_loads():
    parameters, theirs = make(), make()
    reference = torch.optim.AdamW(two_groups(theirs), lr=0.5)
    train(reference, theirs, 0)
    optimizer = HybridDeviceOptimizer(two_groups(parameters), 0.5, **ADAMW)
    optimizer.load_state_dict(reference.state_dict())
    assert_same([dict(reference.state[p]) for p in theirs], [dict(optimizer.state[p]) for p in parameters])
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 3e-2]


def test_a_state_dict_that_does_not_fit_is_refused():
    parameters = make()
    optimizer = HybridDeviceOptimizer(parameters, 0.5, **ADAMW)
    train(optimizer, parameters, 0)
    saved = optimizer.state_dict()
    short = {**saved, "param_groups": [{**saved["param_groups"][0], "params": [0, 1]}]}
    with pytest.raises(forebay.OptionError, match=r"groups of \[2\] parameters, the optimizer of \[6\]"):
        optimizer.load_state_dict(short)
    train(optimizer, parameters, 1)
    # The second part refuses after the first has loaded.
    last = len(parameters) - 1
    wrong = {**saved, "state": {**saved["state"], last: {"step": 1.0, "exp_avg": torch.zeros(99)}}}
    with pytest.raises(forebay.OptionError, match="shape"):
        optimizer.load_state_dict(wrong)
    with pytest.raises(forebay.CheckpointError, match="load a complete checkpoint"):
        train(optimizer, parameters, 2)
    optimizer.load_state_dict(saved)
    train(optimizer, parameters, 2)


def test_moves_of_state_by_a_framework_change_nothing():
    """As verl does: all state to the CPU, then back with the method that Megatron's has for it."""
    parameters, undisturbed = make(torch.bfloat16), make(torch.bfloat16)
    kwargs = {**RULES["adamw"], "param_update_in_fp32": True}
    optimizer, other = (
        HybridDeviceOptimizer(parameters, 0.5, **kwargs),
        HybridDeviceOptimizer(undisturbed, 0.5, **kwargs),
    )
    train(optimizer, parameters, 0)
    for part in optimizer.sub_optimizers:
        for parameter, state in part.state.items():
            for name, value in state.items():
                optimizer.state[optimizer.inner_param_to_orig_param[parameter]][name] = state[name] = value.to("cpu")
    optimizer._move_new_state_to_right_device()
    train(optimizer, parameters, 1)
    train(other, undisturbed, 0, 1)
    assert_same(values(optimizer, parameters), values(other, undisturbed))


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_go_on_by_themselves(how):
    parameters = make(torch.bfloat16)
    optimizer = HybridDeviceOptimizer(two_groups(parameters), 0.5, param_update_in_fp32=True, **RULES["adamw"])
    train(optimizer, parameters, 0)
    copied = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    theirs = [p for group in copied.param_groups for p in group["params"]]
    assert not set(map(id, theirs)) & set(map(id, parameters))
    train(optimizer, parameters, 1)
    train(copied, theirs, 1)
    assert_same(values(optimizer, parameters), values(copied, theirs))


def test_it_sleeps_and_wakes():
    net = torch.nn.ParameterList(make())
    parameters = list(net)
    optimizer = HybridDeviceOptimizer(parameters, 0.5, param_update_in_fp32=True, **RULES["adamw"])
    train(optimizer, parameters, 0)
    before = values(optimizer, parameters)
    resident = sum(p.numel() for p in parameters if not offloaded(optimizer, [p])[0])
    sleeper = forebay.Sleeper(net, optimizer, gradients="drop")
    sleeper.sleep()
    assert sleeper.stats()["kinds"]["optimizer"]["asleep_bytes"] == 8 * resident > 0
    with pytest.raises(forebay.AsleepError):
        optimizer.step()
    sleeper.wake()
    assert_same(values(optimizer, parameters), before)
    train(optimizer, parameters, 1)


@pytest.mark.parametrize("fraction", [0.5, 0.95])
def test_forebays_checkpoints_have_it(tmp_path, fraction):
    nets = [torch.nn.ParameterList(make(torch.bfloat16)) for _ in range(2)]
    kwargs = {**RULES["adamw"], "param_update_in_fp32": True}
    first, second = (HybridDeviceOptimizer(net, f, **kwargs) for net, f in zip(nets, (0.5, fraction), strict=True))
    train(first, list(nets[0]), 0, 1)
    checkpoint.save(tmp_path / "saved", nets[0], first)
    checkpoint.load(tmp_path / "saved", nets[1], second)
    for net, optimizer in zip(nets, (first, second), strict=True):
        train(optimizer, list(net), 2)
    assert_same(values(first, nets[0]), values(second, nets[1]))
