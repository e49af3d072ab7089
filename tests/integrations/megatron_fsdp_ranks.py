"""One rank of the tests of Megatron-FSDP: real sharding over gloo, on a pretended GPU.

usage: python megatron_fsdp_ranks.py RANK WORLD FOLDER
It runs all cases, because importing Megatron takes longer than they do, and prints the name of each that has passed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from pretend_cuda import PretendCuda
from torch.distributed.tensor import DTensor

from forebay.integrations.megatron import HybridDeviceOptimizer, install
from support.tensors import assert_same


class Net(MegatronModule):
    """Layers whose shards are uneven; over two ranks, some of them are empty."""

    def __init__(self, config):
        super().__init__(config)
        self.first, self.norm, self.last = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
        self.to(torch.bfloat16)

    def forward(self, x):
        """Return the output of the last layer."""
        return self.last(self.norm(self.first(x)))


def build(seed=0, *, offload=True, fraction=0.5):
    """Return a model in Megatron-FSDP, and the optimizer that Megatron makes for it."""
    both = {"bf16": True, "params_dtype": torch.bfloat16}
    transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **both)
    torch.manual_seed(seed)
    sharding = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, **sharding)
    config.overlap_param_gather = True
    net = Net(transformer).cuda()
    fsdp = FullyShardedDataParallel(transformer, config, net, fsdp_unit_modules=[torch.nn.Linear])
    optim = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=fraction,
        **both,
    )
    return fsdp, get_megatron_optimizer(optim, [fsdp])


def train(fsdp, optimizer, *steps, attribute=None):
    """Train on data of this rank; with an attribute, without the wrapper's clipping."""
    for step in steps:
        fsdp.zero_grad_buffer()
        torch.manual_seed(10 * step + dist.get_rank())
        fsdp(torch.randn(4, 8).cuda().bfloat16()).square().sum().backward()
        fsdp.finish_grad_sync()
        if attribute is None:
            assert optimizer.step()[0]
        else:
            for parameter in optimizer.get_parameters():
                gradient, parameter.grad = parameter.grad, None
                setattr(parameter, attribute, gradient)
            optimizer.step_with_ready_grads()
        optimizer.zero_grad()


def named(fsdp, optimizer):
    """Return the sharded parameters by name."""
    # As before every save: the module then has them in place of the whole ones.
    fsdp.state_dict()
    return {optimizer._param_name(p): p for group in optimizer.optimizer.param_groups for p in group["params"]}


def found(fsdp, optimizer):
    """Return copies of this rank's part of weights and state."""
    inner, state = {}, optimizer.optimizer.state
    for name, parameter in named(fsdp, optimizer).items():
        inner[name] = parameter._local_tensor.detach().clone()
        for key, value in state[parameter].items():
            inner[f"{name}.{key}"] = getattr(value, "_local_tensor", value).detach().clone()
    return inner


def trains(_):
    """Compare with torch's AdamW, and over all fractions bit by bit."""
    fsdp, optimizer = build(offload=False)
    train(fsdp, optimizer, 0, 1, 2)
    expected = {name: p._local_tensor.detach().clone() for name, p in named(fsdp, optimizer).items()}
    assert any(value.numel() == 0 for value in expected.values())
    runs = []
    for fraction in (0.5, 0.0, 1.0):
        fsdp, optimizer = build(fraction=fraction)
        assert type(optimizer.optimizer) is HybridDeviceOptimizer
        train(fsdp, optimizer, 0, 1, 2)
        runs.append(found(fsdp, optimizer))
        assert_same(runs[0], runs[-1])
    for name, value in expected.items():
        torch.testing.assert_close(runs[0][name], value, rtol=1e-5, atol=1e-6)


def decouples(_):
    """Gradients in ``decoupled_grad``, as newer versions give them, have the bits of gradients in ``grad``."""
    runs = []
    for attribute in ("grad", "decoupled_grad"):
        fsdp, optimizer = build()
        for step in range(3):
            train(fsdp, optimizer, step, attribute=attribute)
        runs.append(found(fsdp, optimizer))
    assert_same(*runs)


def same_keys(_):
    """Every rank has the same state of every parameter, as DTensors, and the same count of steps."""
    fsdp, optimizer = build()
    train(fsdp, optimizer, 0, 1)
    parameters = named(fsdp, optimizer)
    state = optimizer.sharded_param_state_fsdp_dtensor()["state"]
    described = {name: {key: tuple(value.shape) for key, value in of.items()} for name, of in state.items()}
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, described)
    assert all(one == described for one in everywhere)
    assert all(of.keys() == {"step", "exp_avg", "exp_avg_sq"} for of in state.values())
    for name, parameter in parameters.items():
        assert float(state[name]["step"]) == 2
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(state[name][key], DTensor)
            assert state[name][key].placements == parameter.placements
            assert state[name][key]._local_tensor.shape == parameter._local_tensor.shape
        assert parameter.grad is None


def resumes(folder):
    """Save with torch.distributed.checkpoint, load into another model, and go on with the same bits."""
    fsdp, optimizer = build()
    train(fsdp, optimizer, 0, 1)
    saved = {"model": named(fsdp, optimizer), "optimizer": optimizer.sharded_param_state_fsdp_dtensor()}
    dcp.save(preprocess_state_dict_for_uneven_dtensor(saved), checkpoint_id=folder / "saved")
    train(fsdp, optimizer, 2)

    again, resumed = build(seed=7, fraction=0.9)
    target = {"model": named(again, resumed), "optimizer": resumed.sharded_param_state_fsdp_dtensor(is_loading=True)}
    preprocess_state_dict_for_uneven_dtensor(target)
    with torch.no_grad():
        dcp.load(target, checkpoint_id=folder / "saved")
    resumed.load_state_dict(target["optimizer"])
    again.module.param_and_grad_buffer.copy_main_weights_to_model_weights()
    assert {float(of["step"]) for of in resumed.optimizer.state.values()} == {2.0}
    train(again, resumed, 2)
    assert_same(found(fsdp, optimizer), found(again, resumed))


CASES = (trains, decouples, same_keys, resumes)


def main() -> None:
    """Run the cases on this rank; an error is the exit code."""
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    version = mock.patch("megatron.core.optimizer.optimizer_config.is_te_min_version", return_value=False)
    with version, PretendCuda(), install():
        parallel_state.initialize_model_parallel()
        for case in CASES:
            case(folder)
            dist.barrier()
            print(f"passed: {case.__name__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
