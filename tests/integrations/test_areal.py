"""AReaL's engines, with a package of ours that has AReaL's contract."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forebay
from support.frameworks import Model, batches, import_again, loop, loss_of, pretend_version, weights, with_stub
from support.tensors import assert_same

SPEC = SimpleNamespace(total_train_steps=10)


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Any:
    return with_stub(monkeypatch, "areal")


def config(kind: str = "adam", **fsdp: bool) -> Any:
    """Return an engine's configuration."""
    optimizer = SimpleNamespace(type=kind, lr=3e-3, weight_decay=0.1, gradient_clipping=1.0)
    switches = {"offload_params": False, "per_layer_optim_step": False, **fsdp}
    return SimpleNamespace(optimizer=optimizer, fsdp=SimpleNamespace(**switches))


def train(engine: Any) -> list[torch.Tensor]:
    """Train five steps."""
    for batch in batches(5):
        loss_of(engine.model, batch).backward()
        engine.optimizer_step()
    return weights(engine.model)


@pytest.mark.parametrize("offload_params", [False, True])
def test_training(integration: Any, offload_params: bool) -> None:
    engine = integration.FSDPPPOActor(config(offload_params=offload_params))
    engine.initialize(Model(), SPEC)
    assert type(engine.optimizer) is forebay.AdamW
    # With parameters on the CPU the step has to be told where to run.
    assert engine.optimizer._options.device == (torch.device("cpu") if offload_params else None)
    assert engine.lr_scheduler.optimizer is engine.optimizer
    model = Model()
    made = forebay.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 - step / 10)
    loop(made, model, 5, schedule.step)
    assert_same(train(engine), weights(model))


def test_sgd_and_options_of_a_subclass(integration: Any) -> None:
    class Engine(integration.FSDPLMEngine):  # type: ignore[misc,name-defined]
        forebay_options = {"placement": "host"}  # noqa: RUF012

    engine = Engine(config("sgd"))
    engine.initialize(Model(), SPEC)
    assert type(engine.optimizer) is forebay.SGD
    assert engine.optimizer._options.placement == "host"


def test_trainers_and_their_workers_take_the_classes(integration: Any) -> None:
    engines = importlib.import_module("areal.engine")
    assert engines.FSDPPPOActor is not integration.FSDPPPOActor
    integration.use()
    from areal.engine import FSDPLMEngine, FSDPPPOActor

    assert FSDPPPOActor is integration.FSDPPPOActor
    assert FSDPLMEngine is integration.FSDPLMEngine
    module, _, name = FSDPPPOActor.as_controller().rpartition(".")
    assert getattr(importlib.import_module(module), name) is FSDPPPOActor
    assert issubclass(FSDPPPOActor, importlib.import_module("areal.engine.fsdp_engine").FSDPPPOActor)


def test_an_engine_that_only_infers_has_no_optimizer(integration: Any) -> None:
    found = config()
    found.optimizer = None
    engine = integration.FSDPEngine(found)
    engine.initialize(Model(), SPEC)
    assert engine.optimizer is None


def test_what_is_not_supported_is_refused(integration: Any) -> None:
    class Clips(integration.FSDPEngine):  # type: ignore[misc,name-defined]
        forebay_options = {"max_grad_norm": 1.0}  # noqa: RUF012

    for cls, given, reason in (
        (
            integration.FSDPEngine,
            config(per_layer_optim_step=True),
            "per_layer_optim_step=true offloads .* set it to false",
        ),
        (
            integration.FSDPEngine,
            config("adam_bf16"),
            "adam_bf16 is not supported: forebay's state is f32; use adam or sgd",
        ),
        (Clips, config(), "AReaL clips gradients before the step; leave max_grad_norm out"),
    ):
        with pytest.raises(forebay.OptionError, match=reason):
            cls(given).initialize(Model(), SPEC)


def test_versions_are_checked(integration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, "areal", "0.5.0")
    with pytest.raises(forebay.OptionError, match=r"areal 0.5.0 is too old for forebay; install areal>=1.0.4,<1.1"):
        import_again("areal")
