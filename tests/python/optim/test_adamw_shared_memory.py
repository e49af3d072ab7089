"""Memory that two tensors share, or that no kernel can work on: refused by name before anything has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import forebay
from support.optim import TINY, Parameters, give_gradients, make, snapshot, train
from support.tensors import assert_same, random

if TYPE_CHECKING:
    from collections.abc import Callable

BEFORE = 3000


def tied(memory: torch.Tensor) -> list[torch.Tensor]:
    """Return two names for one memory."""
    return [memory[:4000], memory[:4000]]


def overlapping(memory: torch.Tensor) -> list[torch.Tensor]:
    """Return two, the last element of one the first of the other."""
    return [memory[:2001], memory[2000:4000]]


def inside(memory: torch.Tensor) -> list[torch.Tensor]:
    """Return a small one in the middle of a large one."""
    return [memory[700:701], memory[:4000]]


def refused(optimizer: forebay.AdamW, parameters: Parameters, match: str) -> None:
    """Assert that a step is refused twice, and that it changes nothing."""
    before = [parameter.detach().clone() for parameter in parameters]
    for _ in range(2):
        with pytest.raises(forebay.OptionError, match=match):
            optimizer.step()
    assert all(torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True))
    for values in snapshot(optimizer, parameters):
        assert not values["step"].any()
        assert not values["exp_avg"].any()


@pytest.mark.parametrize("share", [tied, overlapping, inside])
def test_parameters_that_share_memory_are_refused(
    device: torch.device, placement: str, share: Callable[[torch.Tensor], list[torch.Tensor]]
) -> None:
    first, second = (torch.nn.Parameter(part) for part in share(random((5000,), 1).to(device)))
    parameters = [*make([(BEFORE,)], device=device), first, second]
    optimizer = forebay.AdamW([("body", parameters[0]), ("a", first), ("b", second)], lr=1e-2, placement=placement)
    give_gradients(parameters, 0)
    refused(optimizer, parameters, r"^a and b share memory; use the same parameter .* clone")
    # One at a time is as with torch.
    second.grad = None
    optimizer.step()
    assert [int(optimizer.state[parameter]["step"]) for parameter in parameters] == [1, 1, 0]


def test_parameters_that_come_to_share_memory_are_refused(device: torch.device, placement: str) -> None:
    parameters = make([(100,), (100,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement)
    train(optimizer, parameters, 2)
    apart = parameters[1].data
    parameters[1].data = parameters[0].data
    before = parameters[0].detach().clone()
    give_gradients(parameters, 2)
    with pytest.raises(forebay.OptionError, match="parameter 0 of group 0 and parameter 1 of group 0 share memory"):
        optimizer.step()
    assert torch.equal(parameters[0], before)
    parameters[1].data = apart
    train(optimizer, parameters, range(2, 4))
    expected = forebay.AdamW(others := make([(100,), (100,)], device=device), lr=1e-2)
    train(expected, others, 4)
    assert_same(snapshot(optimizer, parameters), snapshot(expected, others))


def test_neighbours_in_one_memory_are_no_overlap(device: torch.device, placement: str) -> None:
    """As data parallel wrappers flatten parameters: views of one storage, side by side, with empty ones between."""
    flat = random((1000,), 1).to(device)
    cuts = [flat[:300], flat[300:300], flat[300:301], flat[301:], flat[301:301]]
    views, copies = ([torch.nn.Parameter(make(cut)) for cut in cuts] for make in (torch.Tensor.detach, torch.clone))
    for parameters in (views, copies):
        optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, chunk_bytes=TINY)
        train(optimizer, parameters, 3)
    assert all(map(torch.equal, views, copies))


def test_a_gradient_that_is_its_parameter_is_refused(device: torch.device, placement: str) -> None:
    parameters = make([(BEFORE,), (BEFORE,), (BEFORE,)], device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, chunk_bytes=TINY)
    give_gradients(parameters, 0)
    parameters[1].grad = parameters[1].detach()
    name = "parameter 1 of group 0"
    refused(optimizer, parameters, rf"^{name} .* shares memory with its gradient; clone the gradient")
    give_gradients(parameters, 0)
    optimizer.step()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("gradient", [False, True])
def test_memory_that_begins_inside_an_element_is_refused(placement: str, gradient: bool) -> None:
    """As weights do that lie in a file's bytes at any place."""
    parameters = make([(BEFORE,), (1000,)])
    odd = torch.frombuffer(bytearray(4001), dtype=torch.float32, offset=1)
    if not gradient:
        parameters[1].data = odd
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, chunk_bytes=TINY)
    give_gradients(parameters, 0)
    if gradient:
        parameters[1].grad = odd
    what = "its gradient" if gradient else "it"
    name = "parameter 1 of group 0"
    refused(optimizer, parameters, rf"^{name} .*: {what} begins at 0x[0-9a-f]+, inside an element of 4 bytes; clone it")
