"""Any order of use: what was saved comes back right, and all memory comes back in the end."""

import copy
import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import forebay
from forebay.activations import frames
from support.offload import (
    ROWS,
    WIDTH,
    Block,
    Of,
    Stack,
    assert_nothing_left,
    assert_same_in_threads,
    compare,
    data,
    gradients,
    gradients_of_multiple,
    offloaded,
    stack,
    train,
)
from support.tensors import assert_same


def test_forward_without_grad_in_train_mode(device: torch.device) -> None:
    model, x = stack(device), data(device)

    def run() -> list[torch.Tensor]:
        with torch.no_grad():
            model(x)
        found = train(model, x)
        with torch.inference_mode():
            model(x)
        return found

    compare(model, run)


@pytest.mark.parametrize("with_grad", [False, True])
def test_evaluation_in_between(with_grad: bool, device: torch.device) -> None:
    model, x = stack(device), data(device)

    def run() -> list[torch.Tensor]:
        loss = model(x).square().mean()
        model.eval()
        with torch.set_grad_enabled(with_grad):
            model(x * 2)
        model.train()
        loss.backward()
        return gradients(model)

    compare(model, run)


def test_a_forward_whose_backward_never_runs(device: torch.device) -> None:
    model, x = stack(device), data(device)

    def run() -> list[torch.Tensor]:
        unused = model(x * 3)
        dropped = model(x * 5)
        del dropped
        found = train(model, x)
        del unused
        return found

    handle = compare(model, run)
    again = handle.stats()["pinned_bytes"]
    assert again > 0


@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_before_one_backward(first: int, device: torch.device) -> None:
    model, x = stack(device), data(device)

    def run() -> list[torch.Tensor]:
        losses = [model(x).square().mean(), model(x * 2).square().mean()]
        losses[first].backward()
        losses[1 - first].backward()
        return gradients(model)

    compare(model, run, max_in_flight_bytes=60_000)


def test_a_backward_of_the_sum_of_two_forwards(device: torch.device) -> None:
    model, x = stack(device), data(device)

    def run() -> list[torch.Tensor]:
        (model(x).square().mean() + model(x * 2).square().mean()).backward()
        return gradients(model)

    compare(model, run)


@pytest.mark.parametrize("window", [1, 60_000, None])
def test_retain_graph(window: int | None, device: torch.device) -> None:
    model, x = stack(device), data(device)

    def run() -> list[torch.Tensor]:
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    compare(model, run, max_in_flight_bytes=window)


def test_gradients_of_some_layers_only(device: torch.device) -> None:
    model, x = stack(device), data(device)

    def run() -> list[torch.Tensor]:
        loss = model(x).square().mean()
        late = torch.autograd.grad(loss, list(model.layers[2].parameters()), retain_graph=True)
        early = torch.autograd.grad(loss, list(model.layers[0].parameters()))
        return [*late, *early]

    compare(model, run)


@pytest.mark.parametrize("frozen", [1, 2, 3])
def test_frozen_leading_layers(frozen: int, device: torch.device) -> None:
    model, x = stack(device), data(device)
    for layer in model.layers[:frozen]:
        layer.requires_grad_(False)

    def run() -> list[torch.Tensor]:
        model(x).square().mean().backward()
        return gradients(model)

    compare(model, run)


class Breaks(Block):
    """Raises in its forward pass when asked to."""

    broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run, and raise after everything has been saved."""
        x = super().forward(x)
        if self.broken:
            raise ValueError("broken on purpose")
        return x


@pytest.mark.parametrize("recompute", [False, True])
def test_an_exception_in_a_layer(recompute: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    model = Stack(Block(), Breaks(), Block()).to(device)
    x = data(device)

    def run() -> list[torch.Tensor]:
        Breaks.broken = True
        with pytest.raises(ValueError, match="broken on purpose"):
            model(x)
        Breaks.broken = False
        # The hooks are off again: what is saved out here is not offloaded.
        if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        return train(model, x)

    compare(model, run, recompute=recompute)


def test_an_exception_in_the_backward_pass(device: torch.device) -> None:
    model, x = stack(device), data(device)

    class Raise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("broken on purpose")

    def run() -> list[torch.Tensor]:
        h = model.layers[3](model.layers[2](Raise.apply(model.layers[1](model.layers[0](x)))))
        with pytest.raises(ValueError, match="broken on purpose"):
            h.sum().backward()
        del h
        gradients(model)
        return train(model, x)

    compare(model, run, max_in_flight_bytes=60_000)


@dataclasses.dataclass
class Result:
    """What a layer returns."""

    hidden: torch.Tensor
    extra: torch.Tensor


WRAPPED = {
    "tuple": (lambda h, e: (h, e), lambda r: (r[0], r[1])),
    "dict": (lambda h, e: {"h": h, "e": [e]}, lambda r: (r["h"], r["e"][0])),
    "dataclass": (Result, lambda r: (r.hidden, r.extra)),
}


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("recompute", [False, True])
def test_outputs_of_any_kind(kind: str, recompute: bool, device: torch.device) -> None:
    wrap, unwrap = WRAPPED[kind]

    class Layer(Of):
        def forward(self, given, *, scale=1.0):
            x, extra = unwrap(given)
            h = (x @ self.weight).exp() * scale
            return wrap(h.sigmoid(), extra + h.tanh())

    torch.manual_seed(0)
    layers = torch.nn.ModuleList(Layer(None) for _ in range(3)).to(device)
    model = Stack()
    model.layers = layers
    x = data(device) / 8

    def run() -> list[torch.Tensor]:
        given = wrap(x.clone().requires_grad_(), x)
        for layer in layers:
            given = layer(given, scale=0.5)
        sum(t.sum() for t in unwrap(given)).backward()
        return gradients(model)

    expected = run()
    with offloaded(model, recompute=recompute) as handle:
        assert_same(expected, run())
        assert_nothing_left(handle)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("torch_is_old", [False, True])
@pytest.mark.filterwarnings("ignore:layer . runs inside a checkpoint")
def test_recomputation_by_the_user(
    where: str, reentrant: bool, torch_is_old: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    if torch_is_old:
        monkeypatch.setattr(frames, "_top_hooks", None)

    class Layer(Block):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            return checkpoint(self.body, x, use_reentrant=reentrant) if where == "inside" else self.body(x)

    torch.manual_seed(0)
    model = Stack(*(Layer() for _ in range(4))).to(device)
    x = data(device)

    def run() -> list[torch.Tensor]:
        calls.clear()
        h = x.clone().requires_grad_()
        for layer in model.layers:
            h = checkpoint(layer, h, use_reentrant=reentrant) if where == "outside" else layer(h)
        h.square().mean().backward()
        return gradients(model)

    expected = run()
    assert len(calls) == 8
    with offloaded(model) as handle:
        assert_same(expected, run())
        assert len(calls) == 8, "every layer is recomputed once, as without offload"
        assert (handle.stats()["stored_bytes"] > 0) == (where == "inside")
        assert_nothing_left(handle)


def test_nested_recomputation(device: torch.device) -> None:
    calls = []

    class Layer(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(x)

        def outer(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x.exp(), use_reentrant=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.outer, x.sin(), use_reentrant=False)

    torch.manual_seed(0)
    model = Stack(*(Layer() for _ in range(3))).to(device)

    def run() -> list[torch.Tensor]:
        calls.clear()
        return train(model, data(device) / 8)

    expected = run()
    count = len(calls)
    with offloaded(model):
        assert_same(expected, run())
        assert len(calls) == count


def test_gradient_accumulation(device: torch.device) -> None:
    model, x = stack(device), data(device)
    compare(model, lambda: train(model, x, passes=5), max_in_flight_bytes=None)


def test_double_backward(device: torch.device) -> None:
    model, x = stack(device), data(device)

    def run() -> list[torch.Tensor]:
        y = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(y).square().mean(), y, create_graph=True)
        slope.square().sum().backward()
        return [*gradients(model), y.grad]

    compare(model, run)


def test_a_layer_that_is_called_again_and_again(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Stack(Block(), Block()).to(device)
    x = data(device)

    def run() -> list[torch.Tensor]:
        h = x.clone().requires_grad_()
        for _ in range(3):
            for layer in model.layers:
                h = layer(layer(h))
        h.square().mean().backward()
        return gradients(model)

    compare(model, run, max_in_flight_bytes=None)


def test_layers_in_another_order_each_time(device: torch.device) -> None:
    model, x = stack(device, depth=5), data(device)
    orders = [[4, 0, 2], [1, 3], [2, 2, 0, 4], [3]]

    def run() -> list[torch.Tensor]:
        for order in orders:
            h = x
            for i in order:
                h = model.layers[i](h)
            h.square().mean().backward()
        return gradients(model)

    compare(model, run, max_in_flight_bytes=None)


def test_several_models_at_once(device: torch.device) -> None:
    first, second, x = stack(device, seed=1), stack(device, seed=2), data(device)

    def run() -> list[torch.Tensor]:
        losses = [first(x).square().mean(), second(x).square().mean(), second(first(x)).square().mean()]
        losses[1].backward()
        losses[2].backward()
        losses[0].backward()
        return [*gradients(first), *gradients(second)]

    expected = run()
    with offloaded(first) as a, offloaded(second, fraction=0.5, max_in_flight_bytes=None) as b:
        assert_same(expected, run())
        assert a.stats()["stored_bytes"] > b.stats()["stored_bytes"] > 0
        assert_nothing_left(a)
        assert_nothing_left(b)


def test_threads_at_once(device: torch.device) -> None:
    model, x = stack(device), data(device)
    expected = [gradients_of_multiple(model, x, times) for times in (1, 2, 3)]
    with offloaded(model, max_in_flight_bytes=60_000) as handle:
        assert_same_in_threads(model, x, expected)
        assert_nothing_left(handle)


def test_removed_while_a_graph_is_alive(device: torch.device) -> None:
    model, x = stack(device), data(device)
    expected = train(model, x)[:-1]
    handle = offloaded(model)
    loss = model(x).square().mean()
    handle.remove()
    loss.backward()
    assert_same(expected, gradients(model))


def test_copies_of_the_model_are_not_offloaded(device: torch.device) -> None:
    model, x = stack(device), data(device)
    expected = train(model, x)
    with offloaded(model, recompute=True) as handle:
        twin = copy.deepcopy(model)
        assert_same(expected, train(twin, x))
        assert handle.stats()["stored_bytes"] == 0
        assert model.state_dict().keys() == twin.state_dict().keys()


def test_save_on_host_around_any_code(device: torch.device) -> None:
    w = torch.randn(WIDTH, WIDTH, device=device, requires_grad=True)
    x = data(device) / 8

    def run(around) -> list[torch.Tensor]:
        w.grad = None
        with around:
            h = x
            for _ in range(5):
                h = (h @ w).tanh()
            loss = h.square().mean()
        loss.backward()
        return [w.grad]

    expected = run(torch.enable_grad())
    options = {"min_bytes": 1024, "device": device.type}
    for _ in range(3):
        assert_same(expected, run(forebay.save_on_host(**options)))
    context = forebay.save_on_host(**options)
    stats = context.stats()
    assert stats["stored_bytes"] >= 3 * 5 * ROWS * WIDTH * 4
    assert stats["pinned_bytes"] <= 16 * 6 * ROWS * WIDTH * 4, "pinned memory is used again"
    assert_nothing_left(context)
    context.close()
    assert forebay.save_on_host(**options).stats()["stored_bytes"] == 0
