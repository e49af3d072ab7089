"""What the tests of the hybrid optimizer share: parameters on a pretended GPU, gradients from a seed, and runs."""

from __future__ import annotations

import pytest
import torch
from pretend_cuda import PretendCuda

from support.optim import SHAPES
from support.tensors import random

ADAMW = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.AdamW}
SGD = {"cpu_optimizer_cls": torch.optim.SGD, "gpu_optimizer_cls": torch.optim.SGD}
RULES = {
    "adamw": {**ADAMW, "lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "fused": True},
    "adam": {"cpu_optimizer_cls": torch.optim.Adam, "gpu_optimizer_cls": torch.optim.Adam, "weight_decay": 0.1},
    "momentum": {**SGD, "lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "sgd": {**SGD, "lr": 1e-2},
}
# What is empty has nothing to offload, and Megatron's own then fails in torch.
SOME = [shape for shape in SHAPES if 0 not in shape]


def make(dtype=torch.float32, shapes=SOME):
    return [torch.nn.Parameter(random(shape, i).cuda().to(dtype)) for i, shape in enumerate(shapes)]


def two_groups(parameters):
    half = len(parameters) // 2
    return [{"params": parameters[:half], "wd_mult": 1.0}, {"params": parameters[half:], "lr": 3e-2, "wd_mult": 0.0}]


def settings(rule):
    return {name: value for name, value in RULES[rule].items() if not name.endswith("cls")}


def give(parameters, step, attribute="grad", dtype=None):
    for i, parameter in enumerate(parameters):
        value = random(parameter.shape, 100 * step + i).cuda().to(dtype or parameter.dtype)
        setattr(parameter, attribute, value)


def train(optimizer, parameters, *steps, **how):
    for step in steps:
        give(parameters, step, **how)
        optimizer.step()
        optimizer.zero_grad()


def values(optimizer, parameters):
    """Return copies of parameters and state."""
    state = [{k: v.detach().clone() for k, v in optimizer.state.get(p, {}).items() if v is not p} for p in parameters]
    return [p.detach().clone() for p in parameters], state


def offloaded(optimizer, parameters):
    return [not optimizer.state[parameter]["exp_avg"].is_cuda for parameter in parameters]


@pytest.fixture
def gpu():
    """Pretend that there is a GPU, for one test."""
    with PretendCuda() as pretended:
        yield pretended
