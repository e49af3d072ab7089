"""prime-rl's optimizers, with a package of ours that has prime-rl's contract."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forebay
from support.frameworks import STUBS, Model, import_again, loop, pretend_version, weights, with_stub
from support.processes import environment
from support.tensors import assert_same


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Any:
    return with_stub(monkeypatch, "prime_rl")


def config(kind: str = "adamw") -> Any:
    """Return an optimizer's configuration."""
    return SimpleNamespace(type=kind, lr=3e-3, weight_decay=0.1, betas1=0.9, betas2=0.95, momentum=0.9)


def setup(trained: torch.nn.Module, /, kind: str = "adamw", **options: Any) -> Any:
    """Call prime-rl's function as its trainers do."""
    function = importlib.import_module("prime_rl.trainer.optim").setup_optimizer
    return function(config(kind), list(trained.named_parameters()), None, **options)


def test_offload_is_forebays(integration: Any) -> None:
    integration.use(placement="host")
    model = Model()
    optimizer, manager = setup(model, cpu_offload=True, full_offload_config=None, model=model)
    assert type(optimizer) is forebay.AdamW
    assert manager is None
    assert optimizer._options.placement == "host"
    other = Model()
    expected = forebay.AdamW(other.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95))
    loop(optimizer, model, 5, lambda: None)
    loop(expected, other, 5, lambda: None)
    assert_same(weights(model), weights(other))
    assert type(setup(Model(), "sgd", cpu_offload=True)[0]) is forebay.SGD


def test_without_offload_nothing_changes(integration: Any) -> None:
    integration.use()
    assert type(setup(Model(), cpu_offload=False)[0]) is torch.optim.AdamW
    assert setup(Model(), full_offload_config="full")[1] == "full"
    with pytest.raises(ValueError, match="one offload at a time"):
        setup(Model(), cpu_offload=True, full_offload_config="full")


def test_modules_that_have_the_function_get_the_new_one_once(integration: Any) -> None:
    train = importlib.import_module("prime_rl.trainer.train")
    original = train.setup_optimizer
    integration.use()
    integration.use(slots=2)
    assert train.setup_optimizer is importlib.import_module("prime_rl.trainer.optim").setup_optimizer
    assert train.setup_optimizer.__wrapped__ is original
    model = Model()
    assert train.setup_optimizer(config(), list(model.named_parameters()), None, True)[0]._options.slots == 2


def test_what_is_not_supported_is_refused(integration: Any) -> None:
    integration.use()
    with pytest.raises(
        forebay.OptionError, match=r"no update rule for optim.type=muon; use adamw or sgd, or set model"
    ):
        setup(Model(), "muon", cpu_offload=True)
    with pytest.raises(forebay.OptionError, match=r"prime-rl clips gradients .* set optim.max_norm"):
        integration.use(max_grad_norm=1.0)


def test_a_trainer_is_run_as_a_module() -> None:
    given = environment()
    path = os.pathsep.join([given["PYTHONPATH"], str(STUBS)])
    done = subprocess.run(
        [sys.executable, "-m", "forebay.integrations.prime_rl", "prime_rl.trainer.train", "@", "run.toml"],
        env={**given, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["forebay.optim.adamw", "@", "run.toml"], done.stderr[-2000:]


def test_versions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_version(monkeypatch, "prime-rl", None)
    with pytest.raises(forebay.OptionError, match=r"prime-rl is not installed; install prime-rl>=0.8,<0.9"):
        import_again("prime_rl")
    pretend_version(monkeypatch, "prime-rl", "0.4")
    with pytest.raises(forebay.OptionError, match=r"prime-rl 0.4 is too old for forebay"):
        import_again("prime_rl")
