"""The parameters of an optimizer that runs in units: their order, names, kinds, and what they must be like."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from forebay._device import SUPPORTED_TYPES, is_supported
from forebay._tensors import address, local
from forebay.errors import OptionError
from forebay.optim.units import trees
from forebay.optim.units.layout import span

Member = tuple[int, torch.Tensor]
"""The number of a parameter's group, and the parameter."""


def members_of(optimizer: torch.optim.Optimizer) -> list[Member]:
    """Return all parameters with their groups, in the order of a step."""
    return [(index, parameter) for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]]


def name_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> str:
    """Return what error messages call a parameter."""
    for index, group in enumerate(optimizer.param_groups):
        for position, one in enumerate(group["params"]):
            if one is parameter:
                names = group.get("param_names")
                return names[position] if names else f"parameter {position} of group {index}"
    return f"a parameter of shape {tuple(parameter.shape)}"


def has_gradient(parameter: torch.Tensor) -> bool:
    """Whether a parameter may have a gradient: some programs keep it in an attribute of their own."""
    return parameter.grad is not None or any(isinstance(value, torch.Tensor) for value in vars(parameter).values())


def kinds_of(optimizer: torch.optim.Optimizer) -> set[Any]:
    """Return what a step may depend on, apart from values: kinds of parameters, of gradients, and of options."""
    kinds: set[Any] = set()
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if value is None or isinstance(value, (bool, str)):
                kinds.add((index, key, value))
        for parameter in group["params"]:
            gradient = parameter.grad
            of = (torch.strided, parameter.dtype) if gradient is None else (gradient.layout, gradient.dtype)
            kinds.add((index, parameter.shape, parameter.dtype, parameter.device, parameter.requires_grad, of))
    return kinds


def check_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the parameters cannot be updated in units."""
    first: dict[torch.device, torch.Tensor] = {}
    ranges = []
    for _, parameter in members_of(optimizer):
        inner = local(parameter)
        if not is_supported(inner.device):
            kinds = " and ".join(SUPPORTED_TYPES)
            name = name_of(optimizer, parameter)
            raise OptionError(f"{name} is on {inner.device}; forebay takes parameters on {kinds}")
        first.setdefault(inner.device, parameter)
        if type(inner) in trees.PLAIN and inner.layout == torch.strided and inner.numel():
            start = address(inner)
            ranges.append((start, start + span(inner) * inner.element_size(), parameter))
    if len(first) > 1:
        places = " and ".join(f"{name_of(optimizer, parameter)} on {device}" for device, parameter in first.items())
        raise OptionError(f"the parameters are on several devices, {places}; use one optimizer for each device")
    ranges.sort(key=lambda one: one[:2])
    for (_, stop, one), (start, _, other) in pairwise(ranges):
        if start < stop:
            raise OptionError(
                f"{name_of(optimizer, one)} and {name_of(optimizer, other)} share memory; units are updated one after "
                "the other, so give each its own memory"
            )
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise OptionError(
                f"differentiable=True of group {index} is not supported: state leaves the device; leave it out"
            )
