"""Layers and calls that look alike and are not: no result is taken for another, nothing runs twice that must not."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from forebay._device import Clock
from forebay._fingerprint import Fingerprint
from forebay.activations.budget.controller import MEASURING
from forebay.activations.budget.probe import Probe
from forebay.activations.recompute.replay import Results, next_key
from forebay.activations.saved import UnmanagedTensor
from support.budget import budgeted
from support.offload import WIDTH, Stack, data, train
from support.tensors import assert_same

LARGE = 1 << 29


def have_everything(handle, *, leaves: bool = False) -> None:
    """Recompute every layer that may be, and have every result that could be had."""
    budget = handle._budget

    def ways(found):
        if all(workload.cost is None for workload in budget.workloads.values()):
            return found
        for way, kind in zip(found, budget.kinds, strict=True):
            way.recompute, way.wanted = kind.reason is None, dict.fromkeys(kind.keys, leaves)
        return found

    budget.forced = ways


class Layer(nn.Module):
    """A layer with room for something that another one like it does otherwise."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Drops(Layer):
    """Draws or not, by a number that is no part of the module."""

    draws = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Draw in the middle, as attention does, and at the end."""
        h = torch.native_dropout(self.one(x).tanh(), 0.3, self.draws())[0]
        return x + nn.functional.dropout(self.two(h), 0.3)


def test_a_layer_that_begins_to_draw(device: torch.device) -> None:
    drawing = []
    Drops.draws = staticmethod(lambda: bool(drawing))
    torch.manual_seed(0)
    model, x = Stack(*(Drops() for _ in range(3))).to(device), data(device)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(5)
        return train(model, x)

    with budgeted(model, LARGE, min_bytes=1) as handle:
        have_everything(handle)
        for _ in range(MEASURING + 1):
            run()
        drawing.append(1)
        found = run()
    assert_same(run(), found)


class Remembers(Layer):
    """Computes something once and then has it."""

    memory = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use what was computed before."""
        if self.memory is None:
            self.memory = x.detach().cos().tanh()
        return x + self.two(self.one(x).tanh() * self.memory)


def test_what_is_computed_once_is_not_taken_for_what_is_computed_always(device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = Stack(*(Remembers() for _ in range(3))).to(device), data(device)
    with budgeted(model, LARGE, min_bytes=1) as handle:
        have_everything(handle)
        for _ in range(MEASURING + 2):
            for layer in model.layers:
                layer.memory = None
            found = train(model, x)
    assert_same(train(model, x), found)


class Scratch(Layer):
    """Adds to fresh memory in a way that torch does not see."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to what is zero only once."""
        room = torch.zeros(x.shape)
        room.numpy()[:] += 2.0
        return x + self.two(self.one(x).tanh() * room.to(x.device))


def test_memory_that_others_write_to_is_made_anew(device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = Stack(*(Scratch() for _ in range(3))).to(device), data(device)
    with budgeted(model, LARGE, min_bytes=1) as handle:
        have_everything(handle)
        for _ in range(MEASURING + 2):
            found = train(model, x)
    assert_same(train(model, x), found)


class Normed(Layer):
    """Has statistics that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise in the middle."""
        return x + self.two(self.norm(self.one(x)).tanh())


@pytest.mark.filterwarnings("ignore:layer .* are not recomputed")
def test_evaluation_says_nothing_about_training(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Stack(*(Normed() for _ in range(3))).to(device)
    twin, x = copy.deepcopy(model), data(device)
    with budgeted(model, LARGE, min_bytes=1):
        for one in (model, twin):
            one.eval()
            train(one, x, 3)
            one.train()
            train(one, x, 2)
        for mine, other in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, other)


class Skips(Layer):
    """Is left out now and then, as its rate says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Draw from Python's numbers, unless the rate is none."""
        here = 1.0 if self.rate == 0 else float(random.random() >= self.rate)
        return x + self.two((here * self.one(x)).tanh())


@pytest.mark.filterwarnings("ignore:layer .* are not recomputed")
def test_layers_with_other_rates_are_looked_at_by_themselves(device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = Stack(*(Skips(rate) for rate in (0.0, 0.3, 0.5))).to(device), data(device)

    def run(seed: int) -> list[torch.Tensor]:
        random.seed(seed)
        return train(model, x)

    with budgeted(model, LARGE, min_bytes=1) as handle:
        have_everything(handle)
        found = [run(seed) for seed in range(MEASURING + 3)]
    for seed, gradients in enumerate(found):
        assert_same(run(seed), gradients)


def test_each_shape_has_its_own_operations(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Stack(*(Skips() for _ in range(3))).to(device)
    # Of the shorter input fewer results are large enough to count.
    with budgeted(model, LARGE, min_bytes=64 * WIDTH * 4) as handle:
        for rows in (128, 40):
            for _ in range(MEASURING + 2):
                train(model, data(device, rows=rows))
        workloads = list(handle._budget.workloads.values())
    assert len(workloads) >= 2
    assert len({len(workload.keys[0]) for workload in workloads}) > 1, "they differ"
    for workload in workloads:
        assert workload.cost is not None
        for keys, layer in zip(workload.keys, workload.cost.layers, strict=True):
            assert [str(key) for key in keys] == [tensor.name for tensor in layer.tensors]


def test_a_layer_that_communicates_is_not_recomputed() -> None:
    import torch.distributed as dist

    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        probe = Probe(Clock(torch.device("cpu")), nn.Linear(2, 2), managed=False)
        with probe:
            dist.all_reduce(torch.ones(3))
        assert probe.reason == "it communicates with other ranks"
    finally:
        dist.destroy_process_group()


def test_a_managed_layer_that_changes_its_buffers_is_not_recomputed() -> None:
    """FSDP2 writes to what it manages, so writes in place say nothing there: the buffers themselves do."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x * 2

    layer = Counting()
    probe = Probe(Clock(torch.device("cpu")), layer, managed=True)
    with probe:
        layer(torch.ones(2))
    assert probe.reason == "it changes its buffers"


class Unseen(torch.autograd.Function):
    """Turns a tensor round in place, as kernels do that are not torch's, and says nothing of it."""

    @staticmethod
    def forward(ctx, q: torch.Tensor) -> torch.Tensor:
        """Write to memory, or where that cannot be done, to what has a version of its own."""
        if q.device.type == "cpu":
            q.numpy()[:] = q.numpy()[:, ::-1].copy() * 0.5
        else:
            q.data.copy_(q.data.flip(1) * 0.5)
        return q

    @staticmethod
    def backward(ctx, slope: torch.Tensor) -> torch.Tensor:
        """Turn it back."""
        return slope.flip(1) * 0.5


UNSEEN = {
    "a product": lambda layer, x: Unseen.apply(layer.one(x)).sin(),
    "a copy": lambda layer, x: Unseen.apply(layer.one(x).tanh().clone()).square(),
    "zeros like another": lambda layer, x: layer.one(x).tanh() * Unseen.apply(torch.zeros_like(x) + 1.0),
    "ones of a shape": lambda layer, x: layer.one(x).tanh() * Unseen.apply(x.new_ones(x.shape)),
}


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("what", UNSEEN)
def test_results_that_others_write_to_are_computed_again(what: str, leaves: bool, device: torch.device) -> None:
    class Turning(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.two(UNSEEN[what](self, x))

    torch.manual_seed(0)
    model, x = Stack(*(Turning() for _ in range(3))).to(device), data(device)
    expected = train(model, x)
    with budgeted(model, LARGE, min_bytes=1) as handle:
        have_everything(handle, leaves=leaves)
        for _ in range(MEASURING + 2):
            assert_same(expected, train(model, x))
        assert any(kind.keys for kind in handle._budget.kinds), "something is had"


def test_what_is_looked_at_is_not_held_afterwards(device: torch.device) -> None:
    """Sums are of one pass, that takes no times; a swap of parts shows in them as well as other numbers do."""
    a = torch.randn(64, 1024, device=device)
    same, swapped = Fingerprint.of_storage(a), Fingerprint.of_storage(a)
    assert not bool(same.differs())
    a[[0, 1]] = a[[1, 0]]
    assert bool(swapped.differs())
    last = Fingerprint.of_storage(a)
    a.view(-1)[-1] += 1
    assert bool(last.differs())
    gone = Fingerprint.of_storage(a)
    a.untyped_storage().resize_(0)
    assert bool(gone.differs()), "memory that was given back is not read"
    probe = Probe(Clock(device), nn.Linear(2, 2), managed=False, fingerprints=True)
    with probe:
        result = torch.ones(64, 1024, device=device, requires_grad=True).sin()
        key, storage = probe.ops[-1].key, StorageWeakRef(result.untyped_storage())
        del result
        assert not storage.expired()
    assert storage.expired()
    assert probe.unchanged() == {key}


def test_a_saved_result_is_reused_once_and_not_held_afterwards(device: torch.device) -> None:
    x = torch.randn(8, 8, device=device)
    key = next_key({}, torch.ops.aten.sin.default, (x,))
    results = Results({key: False}, lambda one, _: UnmanagedTensor(one), lambda packed: packed.tensor, device)
    saving, reusing = results.modes()
    with saving:
        first = x.sin()
    assert list(results.held) == [key]
    with reusing:
        assert x.sin().data_ptr() == first.data_ptr()
    assert not results.held
    with reusing:
        assert x.sin().data_ptr() != first.data_ptr(), "a second backward pass computes it"
