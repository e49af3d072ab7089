"""Cases with FSDP2: uneven and empty shards, types, clipping, frozen and tied parameters, parameters on the host.

Element for element the optimizer does the same to a shard as to the whole, so an unsharded run that is given the same
gradients must come to the same bits; a second one that computes its own gradients shows that FSDP2 and the optimizer
understand each other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from support.dist.models import (
    STEPS,
    adamw,
    assert_close,
    assert_same_bits,
    assert_same_on_all_ranks,
    backward,
    backward_all,
    full,
    give_gradients,
    groups,
    inner,
    make,
    parameters_of,
    shard,
    state_of,
)
from support.dist.registry import case


def compare(
    *,
    fsdp: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    freeze: tuple[str, ...] = (),
    **options: Any,
) -> tuple[Any, Any]:
    """Train sharded, streamed and resident, and beside them unsharded; return the streamed model and its optimizer."""
    sharded = [make(**(model or {})) for _ in range(2)]
    plain = make(**(model or {}))
    for net in (*sharded, plain):
        for name in freeze:
            net.get_parameter(name).requires_grad_(False)
    stream, resident = (shard(net, **(fsdp or {})) for net in sharded)
    nets = (stream, resident, plain)
    optimizers = [adamw(stream, **options), adamw(resident, "resident", **options), adamw(plain, **options)]
    for step in range(STEPS):
        for net in (stream, resident):
            backward(net, step)
        give_gradients(stream, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = [state_of(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
    assert_same_bits(parameters_of(stream), parameters_of(resident))
    assert_same_bits(states[0], states[1])
    if "max_grad_norm" in options:  # a norm depends on the order in which it is summed up
        assert_close(parameters_of(stream), parameters_of(plain))
        assert_close(states[0], states[2])
    else:
        assert_same_bits(parameters_of(stream), parameters_of(plain), full)
        assert_same_bits(states[0], states[2], full)
    for parameter in stream.parameters():
        if parameter.requires_grad:
            assert optimizers[0].state[parameter]["step"].item() == STEPS
        else:
            assert parameter not in optimizers[0].state
    return stream, optimizers[0]


def empty_here(net: torch.nn.Module) -> set[str]:
    """Return the names of the parameters of which this rank has nothing."""
    return {name for name, parameter in net.named_parameters() if inner(parameter).numel() == 0}


@case(2, 3)
def uneven_and_empty_shards_in_several_groups() -> None:
    net, optimizer = compare()
    last = dist.get_rank() == dist.get_world_size() - 1
    if last:
        assert empty_here(net) >= {"one"}, "this case is about empty shards"
        assert inner(net.embed.weight).numel() * dist.get_world_size() < net.embed.weight.numel(), "and uneven ones"
    for name in empty_here(net):
        state = optimizer.state[net.get_parameter(name)]
        assert state["step"].item() == STEPS
        assert state["exp_avg"].shape == net.get_parameter(name).shape
        assert inner(state["exp_avg"]).numel() == 0


@case(2, 3)
def equals_torch_on_the_whole_model() -> None:
    sharded, theirs, alone = shard(make()), make(), make()
    optimizer = adamw(sharded)
    fed, independent = torch.optim.AdamW(groups(theirs)), torch.optim.AdamW(groups(alone))
    for step in range(STEPS):
        backward(sharded, step)
        give_gradients(sharded, theirs)
        backward_all(alone, step)
        for update in (optimizer, fed, independent):
            update.step()
            update.zero_grad()
    assert_close(parameters_of(sharded), parameters_of(theirs))
    assert_close(state_of(sharded, optimizer), state_of(theirs, fed))
    # Gradients summed up in another order differ, and where they are small Adam makes that larger.
    assert_close(parameters_of(sharded), parameters_of(alone), rtol=1e-4, atol=2e-5)
    assert_same_on_all_ranks([full(parameter) for parameter in sharded.parameters()])


@case(2, 3)
def bf16_parameters_keep_masters() -> None:
    net, optimizer = compare(model={"dtype": torch.bfloat16})
    for parameter in net.parameters():
        master = optimizer.state[parameter]["master_param"]
        assert master.dtype == torch.float32
        assert torch.equal(inner(master).bfloat16(), inner(parameter))
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
    if dist.get_rank() == 0:
        masters = [inner(optimizer.state[parameter]["master_param"]) for parameter in net.parameters()]
        assert any(not torch.equal(master, master.bfloat16().float()) for master in masters), "masters are finer"


@case(2)
def bf16_masters_equal_a_torch_run_in_f32() -> None:
    sharded, theirs = shard(make(torch.bfloat16)), make(torch.bfloat16).float()
    optimizer, reference = adamw(sharded), torch.optim.AdamW(groups(theirs))
    for step in range(STEPS):
        backward(sharded, step)
        give_gradients(sharded, theirs)
        for update in (optimizer, reference):
            update.step()
            update.zero_grad()
    masters = {name: optimizer.state[parameter]["master_param"] for name, parameter in sharded.named_parameters()}
    assert_close(masters, parameters_of(theirs))


@case(2, 3)
def mixed_precision_policy() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net, optimizer = compare(fsdp={"mp_policy": policy})
    for parameter in net.parameters():
        assert parameter.dtype == torch.float32
        assert "master_param" not in optimizer.state[parameter]
    compare(fsdp={"mp_policy": policy}, model={"dtype": torch.bfloat16})


@case(2, 3)
def amsgrad() -> None:
    net, optimizer = compare(amsgrad=True)
    for parameter in net.parameters():
        assert optimizer.state[parameter]["max_exp_avg_sq"].placements == parameter.placements


@case(2, 3)
def frozen_parameters_stay_as_they_are() -> None:
    before = {name: value.clone() for name, value in parameters_of(make()).items()}
    net, optimizer = compare(freeze=("embed.weight", "inner.bias", "one"))
    for name in ("embed.weight", "inner.bias", "one"):
        assert torch.equal(full(net.get_parameter(name)), before[name])
    assert len(optimizer.state) == len(before) - 3


@case(2, 3)
def tied_parameters_are_updated_once() -> None:
    net, optimizer = compare(model={"tied": True})
    assert net.head.weight is net.embed.weight
    assert optimizer.state[net.head.weight]["step"].item() == STEPS


@case(2, 3)
def a_parameter_without_gradient_is_untouched() -> None:
    net = shard(make())
    optimizer = adamw(net)
    for step in range(2):
        backward(net, step)
        net.outer.weight.grad = None
        net.one.grad = None
        optimizer.step()
        optimizer.zero_grad()
    expected = make()
    for name, steps in (("outer.weight", 0), ("one", 0), ("two", 2), ("inner.weight", 2)):
        parameter = net.get_parameter(name)
        assert optimizer.state[parameter]["step"].item() == steps, name
        assert torch.equal(full(parameter), expected.get_parameter(name).detach()) == (steps == 0), name


@case(2, 3)
def clipping_uses_the_norm_of_the_whole_model() -> None:
    limit = 0.05
    compare(max_grad_norm=limit)
    compare(max_grad_norm=limit, model={"tied": True}, freeze=("inner.weight",))
    sharded, theirs = shard(make()), make()
    optimizer, reference = adamw(sharded, max_grad_norm=limit), torch.optim.AdamW(groups(theirs))
    for step in range(STEPS):
        backward(sharded, step)
        give_gradients(sharded, theirs)
        before = [inner(parameter.grad).clone() for parameter in sharded.parameters()]
        exact = torch.stack([parameter.grad.double().square().sum() for parameter in theirs.parameters()]).sum().sqrt()
        local = torch.stack([gradient.double().square().sum() for gradient in before]).sum().sqrt()
        assert exact > 2 * limit, "the limit must matter"
        assert local < 0.99 * exact, "and so must the other ranks"
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        optimizer.step()
        reference.step()
        norm = optimizer.grad_norm
        assert type(norm) is torch.Tensor
        assert norm.shape == ()
        torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
        assert_same_on_all_ranks([norm])
        for parameter, gradient in zip(sharded.parameters(), before, strict=True):
            assert torch.equal(inner(parameter.grad), gradient), "gradients stay as they are"
        optimizer.zero_grad()
        reference.zero_grad()
    assert_close(parameters_of(sharded), parameters_of(theirs))
    assert_close(state_of(sharded, optimizer), state_of(theirs, reference))


@case(2)
def clipping_takes_sharded_and_plain_parameters_together() -> None:
    """As with modules left out of FSDP2, whose parameters are ordinary tensors, the same on all ranks."""
    limit = 0.05
    sharded, theirs = make(), make()
    for module in (sharded.inner, sharded.outer):
        fully_shard(module)
    optimizer, reference = adamw(sharded, max_grad_norm=limit), torch.optim.AdamW(groups(theirs))
    for step in range(STEPS):
        backward_all(sharded, step)
        give_gradients(sharded, theirs)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        optimizer.step()
        reference.step()
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-6, atol=0)
        optimizer.zero_grad()
        reference.zero_grad()
    assert_close(parameters_of(sharded), parameters_of(theirs))


@case(2, 3)
def skipping_agrees_on_all_ranks() -> None:
    net = shard(make())
    optimizer = adamw(net, max_grad_norm=1.0, skip_nonfinite=True)
    backward(net, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = {name: inner(value).clone() for name, value in (parameters_of(net) | state_of(net, optimizer)).items()}
    backward(net, 1)
    if dist.get_rank() == 0:  # on one rank only: the others must learn of it
        inner(net.inner.weight.grad)[0, 0] = float("nan")
    optimizer.step()
    assert not optimizer.grad_norm.isfinite()
    assert_same_bits(parameters_of(net) | state_of(net, optimizer), before)


@case(2, 3)
def parameters_on_the_host_are_final_on_return() -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    compare(fsdp={"offload_policy": policy})
    offloaded, kept = shard(make(), offload_policy=policy), shard(make())
    optimizers = [adamw(offloaded), adamw(kept)]
    for step in range(STEPS):
        for net, optimizer in zip((offloaded, kept), optimizers, strict=True):
            backward(net, step)
            optimizer.step()
        # Read at once, by address: nothing waits for anything here.
        assert_same_bits(parameters_of(offloaded), parameters_of(kept))
        for optimizer in optimizers:
            optimizer.zero_grad()
    for parameter in offloaded.parameters():
        assert inner(parameter).device.type == "cpu"


@case(2)
def versions_of_sharded_parameters_are_bumped() -> None:
    net, theirs = shard(make()), shard(make())
    optimizer, reference = adamw(net), torch.optim.AdamW(groups(theirs))
    for step in range(2):
        for model, update in ((net, optimizer), (theirs, reference)):
            backward(model, step)
            before = {name: (value._version, inner(value)._version) for name, value in model.named_parameters()}
            update.step()
            for name, value in model.named_parameters():
                assert value._version > before[name][0], (type(update), name)
            update.zero_grad()


@case(2, 3)
def every_placement_comes_to_the_same_bits() -> None:
    nets = [shard(make()) for _ in range(3)]
    optimizers = [
        adamw(nets[0], max_grad_norm=0.05),
        adamw(nets[1], "host", max_grad_norm=0.05),
        adamw(nets[2], "hybrid", host_fraction=0.5, max_grad_norm=0.05),
    ]
    for step in range(STEPS):
        for net, optimizer in zip(nets, optimizers, strict=True):
            backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
    for net, optimizer in zip(nets[1:], optimizers[1:], strict=True):
        assert_same_bits(parameters_of(nets[0]), parameters_of(net))
        assert_same_bits(state_of(nets[0], optimizers[0]), state_of(net, optimizer))


@case(2)
def gradients_come_down_during_the_last_backward() -> None:
    plain, marked = shard(make()), shard(make())
    reference = adamw(plain, max_grad_norm=0.05)
    optimizer = adamw(marked, "hybrid", host_fraction=0.9, max_grad_norm=0.05)
    for step in range(STEPS):
        for part in range(2):
            last = part == 1
            for net in (plain, marked):
                net.set_requires_gradient_sync(last)
            backward(plain, 10 * step + part)
            if last:
                with optimizer.last_backward():
                    backward(marked, 10 * step + part)
                # FSDP2 calls the hooks with reduced gradients of its own shards.
                landed = {id(parameter) for parameter, _, _ in optimizer._landed.gradients.values()}
                assert landed == {id(p) for p in marked.parameters() if inner(p).numel()}
            else:
                backward(marked, 10 * step + part)
        for update in (reference, optimizer):
            update.step()
            update.zero_grad()
        stats = optimizer.stats()
        # f32 weights alone: their gradients were there already, and none was fetched again.
        assert stats["host_down_bytes"] == stats["host_up_bytes"] > 0
    assert_same_bits(parameters_of(plain), parameters_of(marked))
    assert_same_bits(state_of(plain, reference), state_of(marked, optimizer))
