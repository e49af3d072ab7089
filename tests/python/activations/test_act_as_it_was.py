"""A layer that is recomputed finds itself and torch as they were in the forward pass, and leaves them as they are."""

import contextlib

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 -- its usual name
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.budget import HOWS, PASSES, recomputed
from support.offload import MIN_BYTES, WIDTH, Block, Stack, data, gradients, stack, train
from support.tensors import assert_same


class Dropped(Block):
    """Does otherwise in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop and run."""
        return super().forward(F.dropout(x, 0.2, self.training)) * (1.0 if self.training else 0.5)


class Adapted(nn.Module):
    """Has two adapters, one of which is chosen, by its name or by a list of names."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
        self.chosen: str | list[str] = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the chosen adapters make."""
        return x + torch.tanh(self.up(x) + sum(self.adapters[name](x) for name in self.chosen))


class Scaled(Block):
    """Has its settings in a dict, a list and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling, self.gains, self.shift = {"a": 1.0}, [1.0], None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale what comes in."""
        return super().forward(x * self.scaling["a"] * self.gains[0] + (0 if self.shift is None else self.shift))


class Attention(nn.Module):
    """A layer with attention, whose kernel may be chosen from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q, k, v = self.up(x).view(1, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        return x + self.down(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Noisy(Block):
    """Draws numbers of torch's default type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add noise."""
        return super().forward(x) + torch.rand(x.shape, device=x.device).sum().to(x.dtype) * x.tanh()


class Counting(Block):
    """Counts its calls, and keeps a table that grows with its input, as old layers of rotary positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.longest = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count and run."""
        self.calls += 1
        if len(x) > self.longest:
            self.longest = len(x)
            self.register_buffer("table", torch.arange(len(x), device=x.device)[:, None] / 100.0, persistent=False)
        return super().forward(x) + self.table[: len(x)] * x


def toggled(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.train()
    loss = model(x).square().mean()
    model.eval()
    loss.backward()
    assert not any(module.training for module in model.modules())
    return gradients(model)


def adapters(*choices: str | list[str]):
    def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for chosen in choices:
            for layer in model.layers:
                layer.chosen = chosen
                for name, adapter in layer.adapters.items():
                    adapter.requires_grad_(name in chosen)
            losses.append(model(x).square().mean())
        sum(losses).backward()
        for layer in model.layers:
            assert layer.chosen is choices[-1]
            assert [one.weight.requires_grad for one in layer.adapters.values()] == [name in chosen for name in "ab"]
        return gradients(model)

    return run


def rescaled(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Set in place for the forward pass, as PEFT does, and back before the backward pass."""
    for layer in model.layers:
        layer.scaling["a"], layer.gains[0], layer.shift = 0.5, 1.5, x.mean()
    loss = model(x).square().mean()
    for layer in model.layers:
        layer.scaling["a"], layer.gains[0], layer.shift = 1.0, 1.0, None
    loss.backward()
    assert all(layer.scaling == {"a": 1.0} and layer.gains == [1.0] for layer in model.layers)
    return gradients(model)


def around(context):
    def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        with context():
            loss = model(x).square().mean()
        loss.backward()
        return gradients(model)

    return run


@contextlib.contextmanager
def in_double():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def with_others(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Parameters that are in place for one call."""
    others = {name: (value.detach() * 1.5).requires_grad_() for name, value in model.named_parameters()}
    loss = torch.func.functional_call(model, others, (x,)).square().mean()
    return list(torch.autograd.grad(loss, list(others.values())))


def adapted_fast(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Take a step inside the step, with gradients through it."""
    slow = dict(model.named_parameters())
    loss = torch.func.functional_call(model, slow, (x,)).square().mean()
    steps = torch.autograd.grad(loss, list(slow.values()), create_graph=True)
    fast = {name: value - 0.1 * step for (name, value), step in zip(slow.items(), steps, strict=True)}
    torch.func.functional_call(model, fast, (x,)).square().mean().backward()
    return gradients(model)


def frozen_before_backward(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = model(x).square().mean()
    model.layers[1].requires_grad_(False)
    loss.backward()
    found = gradients(model)
    model.requires_grad_(True)
    return found


def lengths(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = sum(model(x[:rows]).square().mean() for rows in (40, 96, 60))
    loss.backward()
    return [*gradients(model), *train(model, x[:70])]


CASES = {
    "evaluation before backward": (Dropped, toggled),
    "another adapter": (Adapted, adapters("a", "b")),
    "other lists of adapters": (Adapted, adapters(["a"], ["a", "b"], ["b"])),
    "settings in place": (Scaled, rescaled),
    "a kernel of attention": (Attention, around(lambda: sdpa_kernel(SDPBackend.MATH))),
    "another default type": (Noisy, around(in_double)),
    "parameters of one call": (Block, with_others),
    "a step inside a step": (Block, adapted_fast),
    "frozen before backward": (Block, frozen_before_backward),
    "what it changes itself": (Counting, lengths),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_recomputed_as_it_was(case: str, how: str, device: torch.device) -> None:
    kind, run = CASES[case]
    torch.manual_seed(0)
    model, x = Stack(*(kind() for _ in range(3))).to(device), data(device)

    def seeded() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return run(model, x)

    expected = seeded()
    with recomputed(model, how):
        for _ in range(PASSES):
            assert_same(expected, seeded())
    assert_same(expected, seeded())


def test_what_a_layer_changes_itself_is_left_as_it_left_it(device: torch.device) -> None:
    model, x = Stack(Counting()).to(device), data(device)
    with recomputed(model, "option"):
        loss = sum(model(x[:rows]).square().mean() for rows in (40, 96))
        loss.backward()
    assert len(model.layers[0].table) == model.layers[0].longest == 96


@pytest.mark.parametrize("how", HOWS)
def test_a_parameter_that_is_changed_in_place_is_named(how: str, device: torch.device) -> None:
    """A bias too, whose old values autograd would not have wanted, but a layer that runs again does."""
    model, x = stack(device), data(device)
    with recomputed(model, how):
        loss = model(x).square().mean()
        with torch.no_grad():
            model.layers[3].up.bias.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a parameter of layer 3, \[128\]"):
            loss.backward()


@pytest.mark.parametrize("how", HOWS)
def test_adapters_of_peft_are_those_of_the_call(how: str, device: torch.device) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = stack(device)
    config = peft.LoraConfig(r=4, target_modules=["up", "down"], lora_dropout=0.1)
    tuned = peft.get_peft_model(model, config, adapter_name="first")
    tuned.add_adapter("second", config)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    x = data(device).requires_grad_()

    def run() -> list[torch.Tensor]:
        torch.manual_seed(7)
        losses = []
        for name in ("first", "second"):
            tuned.set_adapter(name)
            losses.append(tuned(x).square().mean())
        x.grad = None
        sum(losses).backward()
        assert tuned.active_adapters == ["second"]
        return [*gradients(tuned), x.grad]

    expected = run()
    with recomputed(model, how):
        for _ in range(PASSES):
            assert_same(expected, run())


def test_nothing_of_a_pass_is_held_for_long(device: torch.device) -> None:
    """What a layer keeps of a call, a loss of its own for one, is not held by the next call."""
    import gc
    import weakref

    class Keeps(Block):
        loss: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.loss = out.abs().mean()
            return out

    model, x = Stack(Keeps(), Keeps()).to(device), data(device)
    assert x.nbytes > MIN_BYTES
    with recomputed(model, "option"):
        train(model, x)
        old = weakref.ref(model.layers[0].loss)
        loss = model(x).square().mean()
        gc.collect()
        assert old() is None
        loss.backward()
