"""Cases with DistributedDataParallel."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import forebay
from support.dist.models import (
    STEPS,
    adamw,
    assert_close,
    assert_same_bits,
    assert_same_on_all_ranks,
    backward,
    groups,
    make,
    parameters_of,
    state_of,
)
from support.dist.registry import case


@case(2)
def equals_torch_and_resident_on_all_ranks() -> None:
    nets = [make() for _ in range(3)]
    stream, resident, theirs = nets
    optimizers = [adamw(stream), adamw(resident, "resident"), torch.optim.AdamW(groups(theirs))]
    wrapped = [DistributedDataParallel(net) for net in nets]
    for step in range(STEPS):
        for net, optimizer in zip(wrapped, optimizers, strict=True):
            backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(parameters_of(stream), parameters_of(resident))
    assert_same_bits(state_of(stream, optimizers[0]), state_of(resident, optimizers[1]))
    assert_close(parameters_of(stream), parameters_of(theirs))
    assert_close(state_of(stream, optimizers[0]), state_of(theirs, optimizers[2]))
    assert_same_on_all_ranks(stream.parameters())
    assert_same_on_all_ranks(state_of(stream, optimizers[0]).values())


@case(2)
def clips_the_averaged_gradients() -> None:
    ours, theirs = make(), make()
    optimizer, reference = adamw(ours, max_grad_norm=0.05), torch.optim.AdamW(groups(theirs))
    wrapped = [DistributedDataParallel(net) for net in (ours, theirs)]
    for step in range(STEPS):
        for net in wrapped:
            backward(net, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        assert norm > 0.1, "the limit must matter"
        for update in (optimizer, reference):
            update.step()
            update.zero_grad()
        torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-5, atol=0)
    assert_close(parameters_of(ours), parameters_of(theirs))
    assert_same_on_all_ranks(ours.parameters())


@case(2)
def gradients_during_backward_are_refused() -> None:
    net = make()
    optimizer = adamw(net, "host")
    wrapped = DistributedDataParallel(net)
    with pytest.raises(forebay.OptionError, match="DistributedDataParallel"), optimizer.last_backward():
        backward(wrapped, 0)
    # A model beside it, of which the other knows nothing, is nobody's business.
    other = make()
    with adamw(other, "host").last_backward():
        backward(other, 0)
    backward(wrapped, 0)
    optimizer.step()
    assert_same_on_all_ranks(net.parameters())


@case(2)
def gradients_during_backward_are_refused_of_models_wrapped_later() -> None:
    net = make()
    optimizer = adamw(net, "host")
    with optimizer.last_backward():
        backward(net, 0)
    optimizer.zero_grad()
    wrapped = DistributedDataParallel(net)
    with pytest.raises(forebay.OptionError, match="DistributedDataParallel"), optimizer.last_backward():
        backward(wrapped, 0)
