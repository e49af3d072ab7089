"""Cases on a GPU, one rank: parameters on the GPU, and on the host with the step on the GPU."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from support.dist.models import (
    STEPS,
    adamw,
    assert_same_bits,
    backward,
    groups,
    inner,
    parameters_of,
    shard_on_gpu,
    state_of,
    train,
)
from support.dist.registry import case

KINDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")


@case(1)
def equals_torch_fused_and_resident() -> None:
    nets = [shard_on_gpu() for _ in range(3)]
    stream, resident, theirs = nets
    optimizers = [adamw(stream), adamw(resident, "resident"), torch.optim.AdamW(groups(theirs), fused=True)]
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, device="cuda")
    states = [state_of(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
    assert_same_bits(parameters_of(stream), parameters_of(resident))
    assert_same_bits(states[0], states[1])
    assert_same_bits(parameters_of(stream), parameters_of(theirs))
    assert_same_bits(states[0], states[2])


@case(1)
def state_stays_on_the_host_under_a_mesh_of_gpus() -> None:
    net = shard_on_gpu(torch.bfloat16)
    optimizer = adamw(net, amsgrad=True)
    train(net, optimizer, range(1), device="cuda")
    addresses = {}
    for parameter in net.parameters():
        assert inner(parameter).is_cuda
        for kind in KINDS:
            value = optimizer.state[parameter][kind]
            assert isinstance(value, DTensor)
            assert value.device_mesh == parameter.device_mesh
            assert value.device_mesh.device_type == "cuda"
            assert value.placements == parameter.placements
            assert value.dtype == torch.float32
            assert value._local_tensor.device.type == "cpu"
            assert value._local_tensor.is_pinned()
            addresses[parameter, kind] = value._local_tensor.data_ptr()
    train(net, optimizer, range(1, 3), device="cuda")
    for (parameter, kind), address in addresses.items():
        assert optimizer.state[parameter][kind]._local_tensor.data_ptr() == address


@case(1)
def parameters_on_the_host_stream_through_the_ring() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"amsgrad": True}, {"max_grad_norm": 0.05}):
            nets = shard_on_gpu(dtype), shard_on_gpu(dtype, offload=True)
            kept, offloaded = adamw(nets[0], **options), adamw(nets[1], device="cuda", **options)
            for step in range(STEPS):
                for net, optimizer in zip(nets, (kept, offloaded), strict=True):
                    backward(net, step, "cuda")
                    optimizer.step()
                # Read by the CPU at once: parameters on the host are final when the step returns.
                host = {name: inner(value).clone() for name, value in parameters_of(nets[1]).items()}
                if "max_grad_norm" in options:  # the CPU sums a norm up in another order than the GPU
                    for name, value in parameters_of(nets[0]).items():
                        torch.testing.assert_close(host[name], inner(value).cpu(), rtol=1e-2, atol=1e-5)
                else:
                    assert_same_bits(host, parameters_of(nets[0]))
                for optimizer in (kept, offloaded):
                    optimizer.zero_grad()
            for parameter in nets[1].parameters():
                assert inner(parameter).device.type == "cpu"
            assert offloaded.stats()["device_bytes"] > 0
            if "max_grad_norm" not in options:
                assert_same_bits(state_of(nets[1], offloaded), state_of(nets[0], kept))


@case(1)
def state_dicts_go_to_torch_and_back() -> None:
    for options in (StateDictOptions(), StateDictOptions(full_state_dict=True)):
        nets = [shard_on_gpu() for _ in range(3)]
        first, between, last = adamw(nets[0]), torch.optim.AdamW(groups(nets[1]), fused=True), adamw(nets[2])
        train(nets[0], first, range(2), device="cuda")
        for (giver, source), (taker, target) in (
            ((nets[0], first), (nets[1], between)),
            ((nets[1], between), (nets[2], last)),
        ):
            found = get_optimizer_state_dict(giver, source, options=options)
            set_optimizer_state_dict(taker, target, found, options=options)
        torch.cuda.synchronize()
        assert_same_bits(state_of(nets[2], last), state_of(nets[0], first))
        for value in state_of(nets[2], last).values():
            assert inner(value).device.type == "cpu"
