"""xtuner's optimizer configuration, with a package of ours that has xtuner's contract."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch

import forebay
from forebay.optim.state import ParameterState
from support.frameworks import Model, batches, import_again, loop, loss_of, pretend_version, weights, with_stub
from support.tensors import assert_same


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Any:
    return with_stub(monkeypatch, "xtuner")


class Trained(Model):
    """A model with a layer that is not trained, as xtuner knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def trainable_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return names and parameters."""
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]


def engine(config: Any) -> Any:
    """Return the engine that xtuner makes from a configuration."""
    return importlib.import_module("xtuner.v1.engine").TrainEngine(Trained(), config)


def train(made: Any, steps: int) -> list[torch.Tensor]:
    """Train, with the moves of an RL worker around each step."""
    for batch in batches(steps):
        made.put_optimizer_to_device("cpu")
        loss_of(made.model, batch).backward()
        made.step()
        made.put_optimizer_to_device("cpu")
    return weights(made.model)


def test_training_and_moves(integration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(integration.ForebayAdamWConfig(lr=3e-3, options={"placement": "host"}))
    assert type(made.optimizer) is forebay.AdamW
    assert made.optimizer._options.placement == "host"
    assert made.optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    writes: list[str] = []
    monkeypatch.setattr(ParameterState, "__setitem__", lambda self, name, value: writes.append(name))
    found = train(made, 5)
    assert made.put_optimizer_to_device("cpu") is False
    assert writes == []
    model = Trained()
    trained = [parameter for _, parameter in model.trainable_parameters()]
    optimizer = forebay.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    loop(optimizer, model, 5, lambda: None)
    assert_same(found, weights(model))


def test_swap_optimizer_switches_it_off(integration: Any) -> None:
    made = engine(integration.ForebayAdamWConfig(lr=3e-3, swap_optimizer=False))
    assert type(made.optimizer) is torch.optim.AdamW
    plain = engine(importlib.import_module("xtuner.v1.config.optim").AdamWConfig(lr=3e-3))
    assert_same(train(made, 3), train(plain, 3))
    # Then xtuner moves the state.
    assert made.put_optimizer_to_device("cpu") is True


def test_a_configuration_is_a_model_of_pydantic(integration: Any) -> None:
    first = integration.ForebayAdamWConfig(lr=1e-4, options={"slots": 2})
    assert isinstance(first, importlib.import_module("xtuner.v1.config.optim").OptimConfig)
    again = integration.ForebayAdamWConfig.model_validate_json(first.model_dump_json())
    assert again == first == copy.deepcopy(first)
    assert integration.ForebayAdamWConfig().options == {}
    with pytest.raises(ValueError, match="placment"):
        integration.ForebayAdamWConfig(placment="host")


def test_what_is_not_supported_is_refused(integration: Any) -> None:
    with pytest.raises(forebay.OptionError, match="xtuner clips gradients before the step; leave max_grad_norm out"):
        engine(integration.ForebayAdamWConfig(options={"max_grad_norm": 1.0}))


def test_versions_are_checked(integration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(forebay.OptionError, match=r"this xtuner is V0, without xtuner.v1; install V1"):
        import_again("xtuner")
    pretend_version(monkeypatch, "xtuner", "0.1.23")
    with pytest.raises(forebay.OptionError, match=r"xtuner 0.1.23 is too old for forebay"):
        import_again("xtuner")
