"""A tensor changed in place between saving and use raises autograd's own error, wherever it is."""

import re

import pytest
import torch

import forebay
from support.offload import WIDTH, Of, Stack, data, offloaded

# What is saved, and what then changes it.
CHANGES = {
    "the tensor": lambda h: h.add_(1),
    "a view of it": lambda h: h[:2].zero_(),
    "its transpose": lambda h: h.t().mul_(2),
    "with no_grad": lambda h: _without_grad(h),
    "detached": lambda h: h.detach().add_(1),
    "filled through an index": lambda h: h.__setitem__((0, 0), 5.0),
}


def _without_grad(h: torch.Tensor) -> None:
    with torch.no_grad():
        h.add_(1)


class Changed(torch.nn.Module):
    """Saves a result and then changes it."""

    def __init__(self, change: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what was made of the result before it changed."""
        h = x @ self.weight
        y = h.exp() if self.change is None else h.sin()
        if self.change is not None:
            self.change(h)
        return y


def error_of(model: torch.nn.Module, x: torch.Tensor) -> str:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        model(x).sum().backward()
    return str(caught.value)


def words(message: str) -> list[str]:
    """Return what depends neither on who raises (without hooks it also names a function) nor on torch's version."""
    known = r"\[(\S+) (\[.*?\])\].* is at version (\d+); expected version (\d+) instead. (Hint: .*?anomaly\(True)"
    found = re.search(known, message)
    assert found, message
    return list(found.groups())


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("options", [{}, {"keep_last": 3}, {"min_bytes": 1 << 30}, {"max_in_flight_bytes": None}])
def test_the_error_is_autograds(what: str, options: dict[str, object], device: torch.device) -> None:
    model = Stack(Of(lambda x, w: x @ w), Changed(CHANGES[what]), Of(lambda x, w: x @ w)).to(device)
    x = data(device)
    plain = error_of(model, x)
    with offloaded(model, **options):
        assert words(error_of(model, x)) == words(plain)


def test_a_changed_parameter_is_noticed(device: torch.device) -> None:
    model = Stack(*(Of(lambda x, w: (x @ w).exp()) for _ in range(3))).to(device)
    with offloaded(model):
        out = model(data(device) / 8).sum()
        with torch.no_grad():
            model.layers[1].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_a_change_before_saving_is_none(device: torch.device) -> None:
    model = Stack(*(Of(lambda x, w: (x @ w).add_(1).sin().mul_(2).sigmoid()) for _ in range(2)))
    model.to(device)
    x = data(device) / 8
    expected = _gradients(model, x)
    with offloaded(model):
        assert all(torch.equal(a, b) for a, b in zip(expected, _gradients(model, x), strict=True))


def test_each_version_is_its_own(device: torch.device) -> None:
    context = forebay.save_on_host(min_bytes=0, max_in_flight_bytes=1, device=device.type)
    tensor = torch.zeros(64, 64, device=device)
    first = context.pack_hook(tensor)
    tensor.add_(1)
    second = context.pack_hook(tensor)
    assert context.stats()["stored_bytes"] == 2 * tensor.nbytes
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        context.unpack_hook(first)
    assert torch.equal(context.unpack_hook(second), torch.ones(64, 64, device=device))
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="is at version 2; expected version 1"):
        context.unpack_hook(second)


def test_the_counter_holds_no_memory(device: torch.device) -> None:
    context = forebay.save_on_host(min_bytes=0, max_in_flight_bytes=1, device=device.type)
    tensor = torch.zeros(64, 64, device=device)
    storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    packed = context.pack_hook(tensor)
    del tensor
    assert storage.expired()
    assert packed.counter._version == 0


def _gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]
