"""The parameters of a step as lists: which have a gradient, where they lie, what they are."""

from __future__ import annotations

import operator

import torch

from forebay._torch import DTYPES, addresses, dense_like, is_dense, local, locals_of


class Store:
    """Parameters whose state was created together, in the order in which the engine knows them."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.dtypes = [DTYPES[local(parameter).dtype] for parameter in parameters]

    def lists(self) -> dict[str, list[int]]:
        """Return the numbers of a step in which no parameter has a gradient."""
        none = [0] * len(self.parameters)
        return {
            "param": [1] * len(self.parameters),
            "param_dtype": list(self.dtypes),
            "grad": none,
            "grad_dtype": list(none),
            "group": list(none),
        }


class Flat:
    """All parameters of all groups, each once."""

    def __init__(self, lists: list[list[torch.Tensor]]) -> None:
        self.lists = lists
        self.parameters: list[torch.Tensor] = []
        self.groups: list[int] = []
        self.positions: list[int] = []
        seen: set[int] = set()
        for group, parameters in enumerate(lists):
            for position, parameter in enumerate(parameters):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.parameters.append(parameter)
                    self.groups.append(group)
                    self.positions.append(position)


def same_list(known: list[torch.Tensor], now: list[torch.Tensor]) -> bool:
    """Whether two lists hold the very same tensors."""
    return len(known) == len(now) and all(map(operator.is_, known, now))


class Found:
    """The parameters of one step, their gradients, and the memory that the kernels work on."""

    def __init__(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], groups: list[int]) -> None:
        self.parameters = parameters
        self.gradients = gradients
        self.groups = groups
        self.inner = locals_of(parameters)
        self.inner_gradients = locals_of(gradients)
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make_dense(self) -> None:
        """Replace what is not dense, or ordered otherwise than its parameter, by copies; keep what to copy back."""
        if not all(map(torch.Tensor.is_contiguous, self.inner)):
            self.inner = list(self.inner)
            for i, tensor in enumerate(self.inner):
                if not is_dense(tensor):
                    self.inner[i] = tensor.contiguous()
                    self.copies.append((tensor, self.inner[i]))
        strides = list(map(torch.Tensor.stride, self.inner))
        if strides != list(map(torch.Tensor.stride, self.inner_gradients)):
            self.inner_gradients = [
                dense_like(gradient, tensor) for gradient, tensor in zip(self.inner_gradients, self.inner, strict=True)
            ]

    def numbers(self) -> dict[str, list[int]]:
        """Return addresses and types as the engine takes them."""
        return {
            "param": addresses(self.inner),
            "param_dtype": [DTYPES[tensor.dtype] for tensor in self.inner],
            "grad": addresses(self.inner_gradients),
            "grad_dtype": [DTYPES[tensor.dtype] for tensor in self.inner_gradients],
            "group": self.groups,
        }
