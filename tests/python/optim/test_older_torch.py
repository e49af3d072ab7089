"""Versions of torch whose classes lack an argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forebay


class OldAdam(torch.optim.Adam):
    """Adam as torch 2.6 has it: without ``decoupled_weight_decay``, as an argument and in the groups."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad)
        for group in (self.defaults, *self.param_groups):
            group.pop("decoupled_weight_decay", None)


def test_an_argument_that_torch_lacks_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    plain = forebay.Adam([parameter], lr=0.1)
    monkeypatch.setattr(forebay.Adam, "reference", OldAdam)
    twin = torch.nn.Parameter(torch.ones(3))
    optimizer = forebay.Adam([twin], lr=0.1)
    for one, of in ((parameter, plain), (twin, optimizer)):
        one.grad = torch.arange(3.0)
        of.step()
    assert torch.equal(parameter, twin)


def test_asking_for_it_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forebay.Adam, "reference", OldAdam)
    with pytest.raises(forebay.OptionError, match=r"torch .* does not have decoupled_weight_decay; leave it out"):
        forebay.Adam([torch.nn.Parameter(torch.ones(3))], decoupled_weight_decay=True)
