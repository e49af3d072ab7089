"""torchtitan's container on a small model, with the version that is installed: 0.2 or 0.3."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import forebay
from forebay.integrations.torchtitan import VERSION, offloaded
from support.frameworks import Model, batches, import_again, loss_of, pretend_version, weights
from support.tensors import assert_same

if TYPE_CHECKING:
    from pathlib import Path

optimizers: Any = importlib.import_module("torchtitan.components.optimizer")
CONFIGURED = hasattr(optimizers.OptimizersContainer, "Config")
"""Whether a container is built from a configuration, as since torchtitan 0.3."""
PARALLEL = SimpleNamespace(ep_enabled=False, pp_enabled=False)


def parts_of() -> list[torch.nn.Module]:
    """Return two models with names of their own, as the stages of a pipeline have."""
    return [torch.nn.ModuleDict({name: Model()}) for name in ("first", "second")]


def plain(implementation: str = "fused", **settings: Any) -> Any:
    """Return what torchtitan builds containers from."""
    if CONFIGURED:
        config = optimizers.default_adamw(lr=3e-3)
        return config.__class__(param_groups=config.param_groups, implementation=implementation)
    config = importlib.import_module("torchtitan.config").Optimizer(lr=3e-3, implementation=implementation, **settings)
    return lambda parts: optimizers.build_optimizers(parts, config, PARALLEL)


def build(target: Any, parts: list[torch.nn.Module]) -> Any:
    """Build a container."""
    return target.build(model_parts=parts) if CONFIGURED else target(parts)


def schedulers(container: Any) -> Any:
    """Build torchtitan's schedulers: two steps of warm-up, then a decay."""
    if CONFIGURED:
        return optimizers.LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=container, training_steps=9)
    config = importlib.import_module("torchtitan.config").LRScheduler(warmup_steps=2)
    return importlib.import_module("torchtitan.components.lr_scheduler").build_lr_schedulers(container, config, 9)


def train(container: Any, parts: list[torch.nn.Module], steps: range, schedules: Any) -> None:
    """Train as torchtitan's trainer does."""
    for step in steps:
        container.zero_grad()
        for part, name in zip(parts, ("first", "second"), strict=True):
            loss_of(part[name], batches(9)[step]).backward()
        torch.nn.utils.clip_grad_norm_([p for part in parts for p in part.parameters()], 1.0)
        container.step()
        schedules.step()


def all_weights(parts: list[torch.nn.Module]) -> list[torch.Tensor]:
    return [tensor for part in parts for tensor in weights(part)]


def test_training_through_the_container() -> None:
    parts = parts_of()
    container = build(offloaded(plain(), placement="host"), parts)
    assert isinstance(container, optimizers.OptimizersContainer)
    assert [type(one) for one in container] == [forebay.AdamW, forebay.AdamW]
    assert all(one._options.placement == "host" for one in container)
    steps: list[int] = []
    container.register_step_pre_hook(lambda *_: steps.append(len(steps)))
    train(container, parts, range(6), schedulers(container))
    assert steps == list(range(6))

    other, schedules = parts_of(), []
    made = [forebay.AdamW(part.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1) for part in other]
    for one in made:
        rates = [0.5, 1.0, 1.0, 6 / 7, 5 / 7, 4 / 7, 3 / 7]
        schedules.append(torch.optim.lr_scheduler.LambdaLR(one, rates.__getitem__))
    for step in range(6):
        for part, name, one in zip(other, ("first", "second"), made, strict=True):
            one.zero_grad()
            loss_of(part[name], batches(9)[step]).backward()
        torch.nn.utils.clip_grad_norm_([p for part in other for p in part.parameters()], 1.0)
        for one, schedule in zip(made, schedules, strict=True):
            one.step()
            schedule.step()
    assert_same(all_weights(parts), all_weights(other))


def save(path: Path, container: Any, parts: list[torch.nn.Module], schedules: Any) -> dict[str, Any]:
    """Return what torchtitan's checkpoints have, to save it or to load into it."""
    return {"model": torch.nn.ModuleList(parts).state_dict(), "optimizer": container, "lr_scheduler": schedules}


@pytest.mark.parametrize("saved_by", ["forebay", "torch"])
def test_a_distributed_checkpoint_resumes_bit_for_bit(tmp_path: Path, saved_by: str) -> None:
    parts = parts_of()
    container = build(offloaded(plain()) if saved_by == "forebay" else plain(), parts)
    schedules = schedulers(container)
    train(container, parts, range(4), schedules)
    dcp.save(save(tmp_path, container, parts, schedules), checkpoint_id=tmp_path)
    if saved_by == "torch":
        # The same state, in forebay's optimizers: in place, so that it is the expected run.
        for optimizer in container:
            forebay.offload(optimizer)

    others = parts_of()
    other = build(offloaded(plain()), others)
    again = schedulers(other)
    contents = save(tmp_path, other, others, again)
    dcp.load(contents, checkpoint_id=tmp_path)
    torch.nn.ModuleList(others).load_state_dict(contents["model"])
    assert_same(
        dict(other.state_dict()),
        dict(container.state_dict()),
        kinds=[name for name, value in container.state_dict().items() if isinstance(value, torch.Tensor)],
    )
    train(container, parts, range(4, 8), schedules)
    train(other, others, range(4, 8), again)
    assert_same(all_weights(others), all_weights(parts))


def test_reading_the_state_of_a_new_container_changes_no_weight() -> None:
    parts = parts_of()
    container = build(offloaded(plain()), parts)
    before = all_weights(parts)
    names = container.state_dict()
    assert_same(all_weights(parts), before)
    assert all(parameter.grad is None for part in parts for parameter in part.parameters())
    assert "state.second.head.weight.exp_avg" in names
    assert all(not names[name].any() for name in names if name.endswith((".exp_avg", ".exp_avg_sq")))


def test_what_is_not_supported_is_refused() -> None:
    refused = {"implementation": "fused_opt_states_bf16"} if CONFIGURED else {"early_step_in_backward": True}
    reason = "forebay's state is f32; use fused" if CONFIGURED else "OptimizersInBackwardContainer is not supported"
    with pytest.raises(forebay.OptionError, match=reason):
        build(offloaded(plain(**refused)), parts_of())
    with pytest.raises(forebay.OptionError, match=rf"invalid target: .*torchtitan {VERSION} takes"):
        offloaded(3)


def test_clipping_twice_is_refused() -> None:
    with pytest.raises(forebay.OptionError, match=r"leave max_grad_norm out, and set training\.max_norm"):
        offloaded(plain(), max_grad_norm=1.0)
    if CONFIGURED:
        config = offloaded(plain())
        config.optimizer_factory_kwargs_by_name["AdamW"]["max_grad_norm"] = 1.0
        with pytest.raises(forebay.OptionError, match="leave max_grad_norm out"):
            build(config, parts_of())
    build(offloaded(plain(), max_grad_norm=None), parts_of())


def test_versions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, "torchtitan", "0.1.0")
    with pytest.raises(
        forebay.OptionError, match=r"torchtitan 0.1.0 is too old for forebay; install torchtitan>=0.2.2"
    ):
        import_again("torchtitan")
    pretend_version(monkeypatch, "torchtitan", "0.4.0")
    with pytest.warns(UserWarning, match=r"torchtitan 0.4.0 is newer than forebay knows"):
        import_again("torchtitan")
