"""NeMo-RL's workers, with a package of ours that has NeMo-RL's contract."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import pytest
import torch

import forebay
from forebay.integrations import megatron
from forebay.moving import passes
from support.frameworks import Model, batches, loss_of, pretend_version, weights, with_stub
from support.moving import is_foreign
from support.tensors import assert_same, random

HERE = "forebay.integrations.nemo_rl"


class Actor:
    """What Ray makes of a class."""

    def __init__(self, cls: type, options: dict[str, Any]) -> None:
        self.cls, self.options = cls, options


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Any:
    ray = types.ModuleType("ray")
    ray.remote = lambda **options: lambda cls: Actor(cls, options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    return with_stub(monkeypatch, "nemo_rl")


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let ``forebay.move`` work without a GPU, which the CPU stands for; return where each call moved to."""
    found: list[str] = []

    def move(mapping: Any, device: str) -> Any:
        found.append(device)
        return passes.run(mapping, torch.device("cpu"), to_host=device == "cpu")

    monkeypatch.setattr(passes, "on_host", is_foreign)
    monkeypatch.setattr(forebay, "move", move, raising=False)
    return found


def step(worker: Any, batch: torch.Tensor) -> None:
    """Take a step, as a worker's ``train`` does."""
    loss_of(worker.model, batch).backward()
    worker.optimizer.step()
    worker.optimizer.zero_grad()


def phases(worker: Any, count: int) -> None:
    """Train and generate in turns, in NeMo-RL's order."""
    for batch in batches(count):
        worker.prepare_for_lp_inference()
        assert not worker.model.training
        with torch.no_grad():
            worker.model(batch)
        worker.prepare_for_training()
        assert worker.model.training
        step(worker, batch)
        expected = weights(worker.model)
        worker.offload_before_refit()
        assert_same(worker.stream_weights(), expected)
        worker.offload_after_refit()


def plain(make: Any, count: int) -> tuple[list[torch.Tensor], Any]:
    """Train without any phases."""
    model = Model()
    worker = types.SimpleNamespace(model=model, optimizer=make(model.parameters()))
    for batch in batches(count):
        step(worker, batch)
    return weights(model), worker.optimizer


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2)


def ours(parameters: Any) -> Any:
    return forebay.AdamW(parameters, lr=1e-2)


MAKE = {"torch": adamw, "forebay": ours}


# Moves of state.


@pytest.mark.parametrize("name", ["DTensorPolicyWorkerImpl", "DTensorPolicyWorkerV2Impl"])
def test_state_that_offloads_itself_is_not_moved(integration: Any, moves: list[str], name: str) -> None:
    model = Model()
    worker = getattr(integration, name)(model, ours(model.parameters()), offload_optimizer_for_logprob=True)
    phases(worker, 1)
    tensors = [value for state in worker.optimizer.state.values() for value in state.values()]
    phases(worker, 2)
    assert not moves
    assert all(now is before for now, before in zip(_tensors(worker), tensors, strict=True))


def _tensors(worker: Any) -> list[torch.Tensor]:
    return [value for state in worker.optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("kind", list(MAKE))
def test_training_between_moves_has_the_bits_of_training_alone(integration: Any, moves: list[str], kind: str) -> None:
    model = Model()
    worker = integration.DTensorPolicyWorkerV2Impl(model, MAKE[kind](model.parameters()))
    phases(worker, 3)
    expected, alone = plain(MAKE[kind], 3)
    assert_same(weights(model), expected)
    assert_same(_tensors(worker), [value for state in alone.state.values() for value in state.values()])
    assert moves == ([] if kind == "forebay" else ["cuda", "cpu", "cpu"] * 3)
    assert all(is_foreign(tensor) for tensor in _tensors(worker))


class MegatronOptimizer:
    """As Megatron's wrappers give their state."""

    def __init__(self, state: Any) -> None:
        self._get_state = lambda: state


class Chained:
    """As Megatron's chain of wrappers does."""

    def __init__(self, state: Any) -> None:
        self.chained_optimizers = [MegatronOptimizer(state)]
        self.state = state


@pytest.mark.parametrize("kind", [MegatronOptimizer, Chained])
@pytest.mark.parametrize("pinned", [None, True])
def test_the_megatron_worker_moves_all_state_together(
    integration: Any, moves: list[str], kind: Any, pinned: Any
) -> None:
    state = {i: {"exp_avg": random((7, i + 1), i), "step": torch.tensor(3.0), "name": "x"} for i in range(3)}
    before = [(one["exp_avg"].clone(), one["step"].clone()) for one in state.values()]
    cfg = {} if pinned is None else {"use_pinned_optimizer_offload": pinned, "use_coalesced_optimizer_offload": False}
    worker = integration.MegatronPolicyWorkerImpl(cfg, kind(state))
    for device in ("cpu", "cuda"):
        worker.move_optimizer(device)
        assert all(is_foreign(one["exp_avg"]) is (device == "cpu") for one in state.values())
        assert_same([(one["exp_avg"], one["step"]) for one in state.values()], before)
    assert moves == ["cpu", "cuda"]


def test_memory_that_is_not_pinned_is_nemo_rls(integration: Any, moves: list[str]) -> None:
    state = {0: {"exp_avg": random((3,), 0)}}
    worker = integration.MegatronPolicyWorkerImpl({"use_pinned_optimizer_offload": False}, MegatronOptimizer(state))
    worker.move_optimizer("cpu")
    assert not moves
    with pytest.raises(ValueError, match="Invalid device: tpu"):
        integration.MegatronPolicyWorkerImpl({}, MegatronOptimizer(state)).move_optimizer("tpu")


@pytest.mark.parametrize("offload", [True, False])
def test_the_megatron_worker_offloads_through_forebay(integration: Any, offload: bool) -> None:
    config = {"megatron_cfg": {"optimizer": {"optimizer_cpu_offload": offload}}}
    try:
        integration.MegatronPolicyWorkerImpl(config)
        integration.MegatronPolicyWorkerImpl(config)
        assert megatron.is_installed() is offload
    finally:
        megatron.uninstall()


@pytest.mark.parametrize("theirs", [1.0, None])
@pytest.mark.parametrize("name", ["DTensorPolicyWorkerImpl", "SleepingDTensorPolicyWorkerV2Impl"])
def test_clipping_twice_is_said_once(integration: Any, name: str, theirs: float | None) -> None:
    model = Model()
    optimizer = forebay.AdamW(model.parameters(), max_grad_norm=0.5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        worker = getattr(integration, name)(model, optimizer, max_grad_norm=theirs)
        step(worker, batches(1)[0])
    expected = "gradients are clipped both by NeMo-RL, to 1.0, and by the optimizer's max_grad_norm, to 0.5"
    assert [str(one.message).partition(";")[0] for one in said] == ([] if theirs is None else [expected])


# Sleep.


@pytest.mark.parametrize("logprob", [False, True])
@pytest.mark.parametrize("kind", list(MAKE))
def test_a_sleeping_worker_trains_with_the_same_bits(integration: Any, kind: str, logprob: bool) -> None:
    model = Model()
    made = MAKE[kind](model.parameters())
    worker = integration.SleepingDTensorPolicyWorkerV2Impl(model, made, offload_optimizer_for_logprob=logprob)
    phases(worker, 3)
    with pytest.raises(forebay.AsleepError):
        model(batches(1)[0])
    with pytest.raises(forebay.AsleepError):
        made.step()
    sleeper = worker._sleeper
    assert sleeper.stats()["asleep_bytes"] > sum(4 * p.numel() for p in Model().parameters()) * 0.99
    worker.prepare_for_training()
    assert sleeper.stats()["asleep_bytes"] == 0
    expected, _ = plain(MAKE[kind], 3)
    assert_same(weights(model), expected)


def test_the_weights_are_awake_where_they_are_used(integration: Any) -> None:
    model = Model()
    worker = integration.SleepingDTensorPolicyWorkerV2Impl(model, adamw(model.parameters()))
    step(worker, batches(1)[0])
    expected = weights(model)
    worker.offload_after_refit()
    # A refit without training before it.
    worker.offload_before_refit()
    assert_same(worker.stream_weights(), expected)
    worker.offload_after_refit()
    worker.prepare_for_lp_inference(keep_train_buffers=True)
    assert_same(worker.stream_weights(), expected)
    worker.finish_inference()
    with pytest.raises(forebay.AsleepError):
        model(batches(1)[0])


def test_a_sleeping_worker_saves_and_loads(integration: Any, tmp_path: Any) -> None:
    model, data = Model(), batches(3)
    worker = integration.SleepingDTensorPolicyWorkerV2Impl(model, adamw(model.parameters()))
    step(worker, data[0])
    step(worker, data[1])
    worker.offload_after_refit()
    worker.save_checkpoint(str(tmp_path / "saved"))
    with pytest.raises(forebay.AsleepError):
        model(data[2])

    other = Model()
    loaded = integration.SleepingDTensorPolicyWorkerV2Impl(other, adamw(other.parameters()))
    step(loaded, data[2])
    loaded.offload_after_refit()
    loaded.load_checkpoint(str(tmp_path / "saved"))
    loaded.prepare_for_training()
    step(loaded, data[2])
    expected, _ = plain(adamw, 3)
    assert_same(weights(other), expected)


def test_a_worker_without_an_optimizer_sleeps(integration: Any) -> None:
    model = Model()
    worker = integration.SleepingDTensorPolicyWorkerV2Impl(model, None)
    expected = weights(model)
    worker.offload_after_refit()
    worker.prepare_for_lp_inference()
    assert_same(weights(model), expected)


def test_weights_that_are_on_the_cpu_cannot_sleep(integration: Any) -> None:
    model = Model()
    worker = integration.SleepingDTensorPolicyWorkerV2Impl(model, adamw(model.parameters()), cpu_offload=True)
    with pytest.raises(forebay.OptionError, match=r"dtensor_cfg\.cpu_offload=true keeps weights on the CPU"):
        worker.offload_before_refit()


# The driver.


def policy_of(config: dict[str, Any], **given: Any) -> Any:
    from nemo_rl.models.policy.lm_policy import Policy

    return Policy("cluster", config, "tokenizer", skip_weight_load=True, **given)


V1, V2 = {"dtensor_cfg": {"enabled": True}}, {"dtensor_cfg": {"enabled": True, "_v2": True}}
MEGATRON = {"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": False}}


@pytest.mark.parametrize(
    ("config", "sleep", "name", "environment"),
    [
        (V1, False, "DTensorPolicyWorker", "fsdp"),
        (V2, False, "DTensorPolicyWorkerV2", "automodel"),
        (V1, True, "SleepingDTensorPolicyWorker", "fsdp"),
        (V2, True, "SleepingDTensorPolicyWorkerV2", "automodel"),
        (MEGATRON, False, "MegatronPolicyWorker", "mcore"),
    ],
)
def test_policies_use_our_workers(integration: Any, config: Any, sleep: bool, name: str, environment: str) -> None:
    assert policy_of(config).environment == "default"
    integration.use(sleep=not sleep)
    integration.use(sleep=sleep)
    policy = policy_of(config)
    assert (policy.path, policy.environment, policy.skips) == (f"{HERE}.{name}", environment, True)
    actor = policy.worker_class()
    assert isinstance(actor, Actor)
    assert (actor.cls.__name__, actor.cls.__module__) == (name, HERE)
    bases = [base.__name__ for base in actor.cls.__mro__]
    assert f"{name.removeprefix('Sleeping')}Impl" in bases
    assert ("Sleeps" in bases) is sleep
    modules = {"fsdp": "dtensor_policy_worker", "automodel": "dtensor_policy_worker_v2"}
    assert actor.options == {"runtime_env": {"for": modules.get(environment, "megatron_policy_worker")}}
    assert policy.worker_class() is actor


def test_a_worker_that_a_user_names_is_used(integration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    integration.use()
    monkeypatch.setitem(ACTOR_ENVIRONMENT_REGISTRY, "mine.Worker", "own")
    assert policy_of(V2, worker_extension_cls_fqn="mine.Worker").path == "mine.Worker"


def test_what_cannot_be_done_is_refused(integration: Any) -> None:
    integration.use(sleep=True)
    with pytest.raises(forebay.OptionError, match="Megatron moves its weights by itself"):
        policy_of(MEGATRON)
    with pytest.raises(forebay.OptionError, match="quant_cfg has workers of its own"):
        policy_of({**V2, "quant_cfg": "fp8"})
    for name in ("SleepingMegatronPolicyWorker", "SomeWorker", "Impl"):
        with pytest.raises(AttributeError, match=name):
            getattr(integration, name)


@pytest.mark.parametrize(("version", "message"), [("0.5.1", "too old"), (None, "not installed")])
def test_a_version_that_does_not_fit_is_refused(
    integration: Any, monkeypatch: pytest.MonkeyPatch, version: str | None, message: str
) -> None:
    pretend_version(monkeypatch, "nemo-rl", version)
    with pytest.raises(forebay.OptionError, match=message):
        integration.use()
    with pytest.raises(forebay.OptionError, match=message):
        integration.DTensorPolicyWorkerV2  # noqa: B018


def test_a_newer_version_is_warned_about(integration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, "nemo-rl", "0.7.0")
    with pytest.warns(UserWarning, match=r"nemo-rl 0\.7\.0 is newer than forebay knows"):
        integration.use()
