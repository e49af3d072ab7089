"""Lion: the paper's update, its state dict, and its settings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import forebay
from support.optim import TINY, clone, give_gradients, make, snapshot, train
from support.tensors import assert_same


class Reference:
    """The update as the paper gives it, in f64."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], lr: float, betas: tuple[float, float], decay: float
    ) -> None:
        self.lr, self.betas, self.decay = lr, betas, decay
        self.weights = [parameter.detach().cpu().double() for parameter in parameters]
        self.averages = [torch.zeros_like(weight) for weight in self.weights]

    def step(self, gradients: list[torch.Tensor]) -> None:
        """Take one step."""
        beta1, beta2 = self.betas
        for i, gradient in enumerate(gradients):
            grad, average = gradient.detach().cpu().double(), self.averages[i]
            update = torch.sign(beta1 * average + (1 - beta1) * grad)
            self.weights[i] = self.weights[i] - self.lr * (update + self.decay * self.weights[i])
            self.averages[i] = beta2 * average + (1 - beta2) * grad


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.5), (0.0, 0.0)])
def test_the_update_is_the_papers(
    device: torch.device, placement: str, betas: tuple[float, float], decay: float, maximize: bool
) -> None:
    parameters = make(device=device)
    reference = Reference(parameters, 1e-2, betas, decay)
    options: dict[str, Any] = {"lr": 1e-2, "betas": betas, "weight_decay": decay, "maximize": maximize}
    optimizer = forebay.Lion(parameters, placement=placement, chunk_bytes=TINY, **options)
    for step in range(8):
        give_gradients(parameters, step)
        reference.step([-parameter.grad if maximize else parameter.grad for parameter in parameters])
        optimizer.step()
    found = snapshot(optimizer, parameters)
    for values, weight, average in zip(found, reference.weights, reference.averages, strict=True):
        assert values.keys() == {"param", "exp_avg"}
        torch.testing.assert_close(values["param"].double(), weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(values["exp_avg"].double(), average, rtol=1e-5, atol=1e-6)


def test_an_update_of_zero_changes_nothing(device: torch.device, placement: str) -> None:
    parameters = make(device=device)
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = forebay.Lion(parameters, lr=0.1, placement=placement)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(map(torch.equal, parameters, before))


def test_defaults_are_the_papers() -> None:
    optimizer = forebay.Lion(make([(3,)]))
    assert optimizer.defaults == {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
    assert forebay.Lion(make([(3,)]), 0.1, (0.5, 0.6), 0.7).defaults["weight_decay"] == 0.7


def test_its_state_dict_goes_on_elsewhere(device: torch.device, placement: str) -> None:
    parameters = make(device=device, dtype=[torch.float32, torch.bfloat16])
    optimizer = forebay.Lion(parameters, placement=placement, chunk_bytes=TINY)
    train(optimizer, parameters, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved["state"][0]) == {"exp_avg"}
    assert set(saved["state"][1]) == {"exp_avg", "master_param"}
    for where in ("stream", "resident", "host", "hybrid"):
        copied = clone(parameters)
        other = forebay.Lion(copied, placement=where)
        other.load_state_dict(saved)
        ours = clone(parameters)
        same = forebay.Lion(ours, placement=placement)
        same.load_state_dict(saved)
        for one, of in ((other, copied), (same, ours)):
            train(one, of, range(3, 6))
        assert_same(snapshot(other, copied), snapshot(same, ours))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    ({"lr": torch.tensor([1.0, 2.0])}, "Tensor lr must be 1-element"),
    ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
    ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
    ({"betas": (0.9, float("nan"))}, "Invalid beta parameter at index 1: nan"),
    ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(options) for options, _ in WRONG])
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(forebay.OptionError, match=message):
        forebay.Lion(make([(3,)]), **options)


def test_a_rate_may_be_a_tensor(device: torch.device) -> None:
    ends = []
    for lr in (0.5, torch.tensor(0.5)):
        parameters = make(device=device)
        optimizer = forebay.Lion(parameters, lr=lr)
        train(optimizer, parameters, 2)
        ends.append(snapshot(optimizer, parameters))
    assert_same(*ends)
