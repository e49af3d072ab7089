"""Optimizers of other packages, through ``forebay.offload``: in units, with the bits of a plain run."""

from __future__ import annotations

from typing import Any

import pytest
import schedulefree
import torch

import forebay

SHAPES = ((64, 128), (4096,), (32, 256), (7,))


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def give_gradients(step: int, *both: list[torch.nn.Parameter]) -> None:
    for given in both:
        torch.manual_seed(100 + step)
        for parameter in given:
            parameter.grad = torch.randn_like(parameter)


def bits(value: Any) -> Any:
    """Return nested state with lists in the place of tensors, and of the tensors that others consist of."""
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        return [bits(getattr(value, name)) for name in names] or value.view(-1).view(torch.uint8).tolist()
    return value


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_schedulefree(name: str) -> None:
    mine, others = parameters(), parameters()
    cls = getattr(schedulefree, name)
    plain, optimizer = cls(others, lr=0.1), forebay.offload(cls(mine, lr=0.1), unit_bytes=1)
    for step in range(6):
        plain.train()
        optimizer.train()
        give_gradients(step, mine, others)
        plain.step()
        optimizer.step()
        if step % 2:
            plain.eval()
            optimizer.eval()
        assert all(map(torch.equal, mine, others))
    assert optimizer.param_groups[0]["k"] == plain.param_groups[0]["k"] == 6
    assert optimizer.stats()["pinned_bytes"] > 0
    assert bits(optimizer.state_dict()["state"]) == bits(plain.state_dict()["state"])


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchaos_state_of_few_bits(name: str) -> None:
    # Not among the requirements: its import warns, and programs that treat warnings as errors stop there.
    torchao = pytest.importorskip("torchao.optim")
    mine, others = parameters(), parameters()
    cls = getattr(torchao, name)
    plain, optimizer = cls(others, lr=1e-2), forebay.offload(cls(mine, lr=1e-2), unit_bytes=1)
    for step in range(4):
        if step == 2:
            optimizer.load_state_dict(plain.state_dict())
        give_gradients(step, mine, others)
        plain.step()
        optimizer.step()
        assert all(map(torch.equal, mine, others))
    state = optimizer.state[mine[0]]["exp_avg"]
    assert type(state) is type(plain.state[others[0]]["exp_avg"])
    assert hasattr(state, "__tensor_flatten__")
    assert bits(optimizer.state_dict()["state"]) == bits(plain.state_dict()["state"])
