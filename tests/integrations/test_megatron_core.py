"""Training through megatron-core's own entry points: ``get_megatron_optimizer``, its wrappers and its checkpoints.

One rank over gloo, on a pretended GPU. Megatron's DDP, its distributed optimizer and its checkpoint files are real.
"""

from __future__ import annotations

import copy
import gc
import inspect
import sys
import warnings

import megatron.core
import megatron.core.optimizer as entry
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from pretend_cuda import PretendCuda

import forebay
from forebay.integrations.megatron import HybridDeviceOptimizer, install, uninstall
from support.tensors import assert_same

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with PretendCuda():
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def as_with_transformer_engine(monkeypatch):
    """Megatron asks for its version, and takes the branches that it takes on a machine with a GPU."""
    monkeypatch.setattr("megatron.core.optimizer.optimizer_config.is_te_min_version", lambda *_: False)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)


@pytest.fixture
def installed():
    with install():
        yield


class Net(MegatronModule):
    """Two layers and a norm."""

    def __init__(self, config, dtype):
        super().__init__(config)
        self.first, self.norm, self.last = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
        self.to(dtype)

    def forward(self, x):
        """Return the output of the last layer."""
        return self.last(self.norm(self.first(x)))


def build(dtype=BF16, seed=0, *, aware=True, experts=False, **config):
    """Return a model in Megatron's DDP, and the optimizer that Megatron makes for it."""
    bf16 = dtype == BF16
    transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, bf16=bf16, params_dtype=dtype)
    torch.manual_seed(seed)
    net = Net(transformer, dtype).cuda()
    if experts:
        for parameter in net.last.parameters():
            parameter.allreduce = False
    ddp = DistributedDataParallel(transformer, DistributedDataParallelConfig(use_distributed_optimizer=True), net)
    given = {
        "optimizer": "adam",
        "lr": 1e-2,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "bf16": bf16,
        "params_dtype": dtype,
        "use_distributed_optimizer": True,
        "use_precision_aware_optimizer": aware,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": True,
        **config,
    }
    return ddp, get_megatron_optimizer(OptimizerConfig(**given), [ddp])


def train(ddp, optimizer, *steps):
    norms = []
    for step in steps:
        ddp.zero_grad_buffer()
        torch.manual_seed(step)
        x = torch.randn(4, 8).to(next(ddp.parameters()).dtype).cuda()
        ddp(x).square().sum().backward()
        ddp.finish_grad_sync()
        done, norm, _ = optimizer.step()
        assert done
        norms.append(float(norm))
        optimizer.zero_grad()
    return norms


def weights(ddp):
    return {name: parameter.detach().clone() for name, parameter in ddp.named_parameters()}


def hybrid(optimizer):
    """Return the innermost optimizer."""
    return optimizer.chained_optimizers[0].optimizer


def masters(optimizer):
    names = ("step", "exp_avg", "exp_avg_sq", "master_param")
    state = hybrid(optimizer).state.values()
    return [{name: values[name].detach().clone().flatten() for name in names} for values in state]


# Training.


@pytest.mark.parametrize("aware", [True, False], ids=["precision-aware", "plain"])
def test_bf16_training_is_that_of_megatrons_own(aware):
    ddp, optimizer = build(aware=aware)
    assert not isinstance(hybrid(optimizer), HybridDeviceOptimizer)
    norms, expected = train(ddp, optimizer, 0, 1, 2), weights(ddp)
    with install():
        ddp, optimizer = build(aware=aware)
        assert type(hybrid(optimizer)) is HybridDeviceOptimizer
        assert train(ddp, optimizer, 0, 1, 2) == pytest.approx(norms, rel=1e-2)
    for name, value in weights(ddp).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("aware", [True, False], ids=["precision-aware", "plain"])
@pytest.mark.usefixtures("installed")
def test_no_fraction_changes_a_bit(aware, dtype):
    found = []
    for fraction in (0.0, 0.5, 1.0):
        ddp, optimizer = build(dtype, aware=aware, optimizer_offload_fraction=fraction)
        train(ddp, optimizer, 0, 1, 2)
        found.append((weights(ddp), masters(optimizer)))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_offloading_changes_no_bit_of_forebays_adamw(monkeypatch, dtype):
    """Megatron's optimizer without offload, its torch.optim.AdamW replaced by forebay's, is the same training."""
    with install():
        ddp, optimizer = build(dtype, aware=False)
        norms, expected = train(ddp, optimizer, 0, 1, 2), weights(ddp)
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", forebay.AdamW)
        ddp, optimizer = build(dtype, aware=False, optimizer_cpu_offload=False)
        assert type(hybrid(optimizer)) is forebay.AdamW
        assert train(ddp, optimizer, 0, 1, 2) == norms
    assert_same(weights(ddp), expected)


@pytest.mark.usefixtures("installed")
def test_sgd_is_trained_with_momentum():
    ddp, optimizer = build(optimizer="sgd", sgd_momentum=0.9, aware=False)
    before = weights(ddp)
    train(ddp, optimizer, 0, 1)
    assert [type(part) for part in hybrid(optimizer).sub_optimizers] == [forebay.SGD, forebay.SGD]
    assert all("momentum_buffer" in values for values in hybrid(optimizer).state.values())
    assert not torch.equal(weights(ddp)["module.first.weight"], before["module.first.weight"])


@pytest.mark.usefixtures("installed")
def test_experts_have_an_optimizer_of_their_own():
    ddp, optimizer = build(experts=True)
    train(ddp, optimizer, 0, 1)
    plain, alone = build()
    train(plain, alone, 0, 1)
    dense, expert = (one.optimizer for one in optimizer.chained_optimizers)
    assert isinstance(dense, HybridDeviceOptimizer)
    assert isinstance(expert, HybridDeviceOptimizer)
    assert sum(len(group["params"]) for group in expert.param_groups) == 2
    assert_same(weights(ddp), weights(plain))


@pytest.mark.usefixtures("installed")
def test_masters_follow_reloaded_weights():
    ddp, optimizer = build()
    train(ddp, optimizer, 0)
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.fill_(0.25)
    optimizer.reload_model_params()
    assert all(torch.all(values["master_param"] == 0.25) for values in masters(optimizer))


# Checkpoints.


def save(ddp, optimizer, folder, kind):
    folder.mkdir(exist_ok=True)
    model = ddp.module.sharded_state_dict()
    state = optimizer.sharded_state_dict(model, metadata={"distrib_optim_sharding_type": kind})
    dist_checkpointing.save({"model": model, "optimizer": state}, str(folder))


def load(ddp, optimizer, folder, kind):
    model = ddp.module.sharded_state_dict()
    state = optimizer.sharded_state_dict(model, is_loading=True, metadata={"distrib_optim_sharding_type": kind})
    found = dist_checkpointing.load({"model": model, "optimizer": state}, str(folder))
    ddp.module.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])


@pytest.mark.parametrize(
    ("kind", "dtype"), [("dp_reshardable", BF16), ("fully_reshardable", BF16), ("fully_reshardable", F32)], ids=str
)
@pytest.mark.usefixtures("installed")
def test_a_resumed_run_has_the_bits_of_one_that_went_on(tmp_path, kind, dtype):
    ddp, optimizer = build(dtype)
    train(ddp, optimizer, 0, 1)
    assert optimizer.state_dict()["optimizer"]["param_groups"][0]["step"] == 2
    save(ddp, optimizer, tmp_path / "saved", kind)
    train(ddp, optimizer, 2, 3)

    again, resumed = build(dtype, seed=7, optimizer_offload_fraction=0.9)
    load(again, resumed, tmp_path / "saved", kind)
    assert {float(values["step"]) for values in hybrid(resumed).state.values()} == {2.0}
    train(again, resumed, 2, 3)
    assert_same((weights(ddp), masters(optimizer)), (weights(again), masters(resumed)))
    # Going back in the same process: Megatron has left values of its own in the state.
    load(again, resumed, tmp_path / "saved", kind)
    train(again, resumed, 2, 3)
    assert_same((weights(ddp), masters(optimizer)), (weights(again), masters(resumed)))


@pytest.mark.usefixtures("installed")
def test_the_legacy_format_resumes_too(tmp_path):
    ddp, optimizer = build()
    train(ddp, optimizer, 0, 1)
    saved, model = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(ddp.module.state_dict())
    optimizer.chained_optimizers[0].save_parameter_state(str(tmp_path / "state.pt"))
    train(ddp, optimizer, 2)

    again, resumed = build(seed=7)
    again.module.load_state_dict(model)
    resumed.load_state_dict(saved)
    resumed.chained_optimizers[0].load_parameter_state(str(tmp_path / "state.pt"))
    train(again, resumed, 2)
    assert_same((weights(ddp), masters(optimizer)), (weights(again), masters(resumed)))


# Installing.


def classes():
    modules = (entry, distrib_optimizer, entry.cpu_offloading, entry.cpu_offloading.hybrid_optimizer)
    return [module.HybridDeviceOptimizer for module in modules]


def test_uninstalling_restores_everything():
    theirs, prepare = classes(), inspect.unwrap(FileSystemWriterAsync.prepare_write_data)
    installed = install(placement="stream", chunk_bytes=1 << 16)
    try:
        assert classes() == [HybridDeviceOptimizer] * 4
        with pytest.raises(forebay.OptionError, match="installed in Megatron already"):
            install()
        _, optimizer = build()
        (part,) = hybrid(optimizer).cpu_optimizers
        assert (part._options.placement, part._options.chunk_bytes) == ("stream", 1 << 16)
    finally:
        uninstall()
    assert classes() == theirs
    assert HybridDeviceOptimizer.options == {}
    # The writer still serves the optimizer that is there.
    assert FileSystemWriterAsync.prepare_write_data is not prepare
    del optimizer, part
    gc.collect()
    uninstall()
    assert FileSystemWriterAsync.prepare_write_data is prepare
    with installed, pytest.raises(ZeroDivisionError):
        raise ZeroDivisionError
    assert classes() == theirs


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_grad_norm'"):
        install(max_grad_norm=1.0)
    assert HybridDeviceOptimizer not in classes()


@pytest.mark.parametrize(("version", "message"), [("0.15.3", "too old"), (None, "cannot be imported")])
def test_a_megatron_that_does_not_fit_is_refused(monkeypatch, version, message):
    if version is None:
        monkeypatch.setitem(sys.modules, "megatron.core", None)
    else:
        monkeypatch.setattr(megatron.core, "__version__", version)
    with pytest.raises(forebay.OptionError, match=message):
        install()
    assert HybridDeviceOptimizer not in classes()


def test_a_newer_megatron_is_warned_about(monkeypatch):
    monkeypatch.setattr(megatron.core, "__version__", "0.20.0rc0")
    with pytest.warns(UserWarning, match=r"megatron-core 0\.20\.0rc0 is newer than forebay knows"), install():
        assert HybridDeviceOptimizer in classes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(megatron.core, "__version__", "0.16.9")
        with install():
            pass
