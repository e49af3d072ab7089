"""A budget that is too small: the error says how much of the least is gradients, and the number is true."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.activations.budget import controller as _budget
from forebay.activations.budget.controller import MEASURING
from forebay.activations.budget.gradients import GradientCount
from support.budget import Counted, CountedMeter, budgeted
from support.models import tiny
from support.offload import WIDTH, Block, Stack, data, stack

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
CPU = torch.device("cpu")


class Snapshot(Counted):
    """Counts memory, and knows which storages there were at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.highest, self.then = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.now > self.highest:
            # With its references, so that no later storage has the same identity.
            self.highest, self.then = self.now, dict(self.alive)
        return out

    def begin(self) -> int:
        """Look for the peak from now on; return the bytes now."""
        self.look()
        self.highest, self.then = self.now, {}
        return self.now


class Words(nn.Module):
    """Layers between two large tables, whose gradients are the first and the last."""

    def __init__(self, *, tied: bool = False, words: int = 2000) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layers = nn.Embedding(words, WIDTH), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores for each word."""
        h = self.table(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def frozen(model: nn.Module) -> nn.Module:
    """Train one part of each layer only, as adapters do."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down" in name)
    return model


def numbers(length: int) -> torch.Tensor:
    return torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(4))


def of_hf(kind: str, length: int) -> tuple[nn.Module, Callable[[Any], torch.Tensor]]:
    x = numbers(length)
    return tiny(kind, CPU), lambda model: model(input_ids=x, labels=x, use_cache=False).loss


def of(model: nn.Module, x: torch.Tensor) -> tuple[nn.Module, Callable[[Any], torch.Tensor]]:
    return model, lambda model: model(x).square().mean()


CASES = {
    "few rows": lambda: of(stack(CPU), data(CPU, rows=4)),
    "few rows, deep": lambda: of(stack(CPU, depth=12), data(CPU, rows=4)),
    "many rows": lambda: of(stack(CPU), data(CPU, rows=2048)),
    "tables": lambda: of(Words(), numbers(8)),
    "one table": lambda: of(Words(tied=True), numbers(8)),
    "frozen": lambda: of(frozen(stack(CPU, depth=8)), data(CPU, rows=4).requires_grad_()),
    "llama, few tokens": lambda: of_hf("llama", 8),
    "qwen2, few tokens": lambda: of_hf("qwen2", 8),
    "llama, more tokens": lambda: of_hf("llama", 64),
}


def refused(model: nn.Module, step: Callable[[], Any], budget: int = 1) -> str:
    """Return the error of a budget that is too small."""
    with budgeted(model, budget, min_bytes=256):
        for _ in range(MEASURING):
            step()
        with pytest.raises(forebay.OptionError, match="invalid budget_bytes") as caught:
            step()
    return str(caught.value)


def figures(text: str) -> tuple[int, int]:
    """Return the least, and the gradients in it."""
    found = re.search(r"needs at least (\d+) bytes under every plan, of which about (\d+) are gradients", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch):
    with Snapshot() as found:
        monkeypatch.setattr(_budget, "meter_of", lambda _: CountedMeter(CPU, found))
        yield found


@pytest.mark.parametrize("case", CASES)
def test_the_gradients_at_the_peak_are_counted(case: str, counted: Snapshot) -> None:
    model, loss = CASES[case]()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss(model).backward()

    least, gradients = figures(refused(model, step))
    # Under the least budget, the storages at the peak of a pass show the truth.
    with budgeted(model, int(1.01 * least), min_bytes=256):
        for _ in range(MEASURING + 2):
            step()
        model.zero_grad(set_to_none=True)
        before = counted.begin()
        loss(model).backward()
    made = {p.grad.untyped_storage()._cdata: p.grad.nbytes for p in model.parameters() if p.grad is not None}
    assert abs(counted.highest - before - least) < 0.02 * least
    assert gradients == sum(size for storage, size in made.items() if storage in counted.then)
    assert 0 < gradients <= sum(made.values())
    if "few" in case:
        assert gradients > 0.95 * sum(made.values())
        assert least - gradients < 0.15 * least, "the rest is what few rows take"


def test_gradients_that_are_kept_are_the_remedy(counted: Snapshot) -> None:
    model, loss = CASES["few rows, deep"]()

    def step(*, keep: bool = False) -> None:
        model.zero_grad(set_to_none=not keep)
        loss(model).backward()

    text = refused(model, step)
    assert "raise the budget to at least that" in text
    assert "zero_grad(set_to_none=False)" in text
    least, gradients = figures(text)
    # A pass that adds to gradients makes those of one operation, and adds them.
    rest = least - gradients + 2 * max(parameter.nbytes for parameter in model.parameters())
    assert rest < least / 4
    assert figures(refused(model, step, rest)) == (least, gradients)
    step()
    with budgeted(model, rest, min_bytes=256) as handle:
        for _ in range(MEASURING + 2):
            step(keep=True)
        assert handle.plan() is not None
        assert handle.plan()["least_bytes"] <= rest
    kept = refused(model, lambda: step(keep=True))
    assert "gradients" not in kept
    assert kept.endswith("; raise the budget to at least that, or lower the batch or the sequence length")


def test_gradients_that_a_hook_frees_are_not_counted(counted: Snapshot) -> None:
    """As an optimizer does that steps within the backward pass."""
    model, loss = CASES["few rows, deep"]()

    def free(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(free)
    assert "gradients" not in refused(model, lambda: loss(model).backward())


def hooks(model: nn.Module) -> int:
    return sum(len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) for parameter in model.parameters())


def test_nothing_is_left_on_the_parameters(counted: Snapshot) -> None:
    model, loss = CASES["few rows"]()
    with budgeted(model, 1 << 29) as handle:
        for number in range(MEASURING + 2):
            model.zero_grad(set_to_none=True)
            found = loss(model)
            assert (hooks(model) > 0) == (number == MEASURING - 1), "only the pass that measures counts"
            found.backward()
        assert handle.plan() is not None
        assert hooks(model) == 0


@pytest.mark.parametrize("how", ["removed", "dropped"])
def test_nothing_is_left_by_a_pass_without_a_backward_pass(how: str, counted: Snapshot) -> None:
    model, loss = CASES["few rows"]()
    handle = budgeted(model, 1 << 29)
    for _ in range(MEASURING - 1):
        model.zero_grad(set_to_none=True)
        loss(model).backward()
    model.zero_grad(set_to_none=True)
    found = loss(model)
    assert hooks(model) > 0
    if how == "dropped":
        del found
        model.zero_grad(set_to_none=True)
        loss(model).backward()
        loss(model).backward()
    handle.remove()
    assert hooks(model) == 0


class Script:
    """A meter that shows what it is told."""

    device = CPU

    def __init__(self) -> None:
        self.shown = (0, 0)

    def read(self) -> tuple[int, int]:
        """Return bytes now, and at the peak."""
        return self.shown


def counting(*sizes: int) -> tuple[Script, GradientCount, Callable[[int, int, int], None]]:
    meter, parameters = Script(), nn.ParameterList(torch.zeros(size // 4) for size in sizes)
    count = GradientCount(parameters, meter)  # type: ignore[arg-type]

    def make(which: int, now: int, peak: int) -> None:
        meter.shown = (now, peak)
        parameters[which].sum().backward()

    return meter, count, make


def test_a_gradient_counts_from_the_peak_of_its_operation_on() -> None:
    _, count, make = counting(400, 40, 800)
    # Much was freed since the peak: it came before the operation.
    make(0, 1000, 5000)
    assert count.read(5000) == (400, 0)
    # Bias and weight of one operation; 100 bytes of its input were freed since.
    make(1, 5900, 6000)
    make(2, 5900, 6000)
    assert count.read(6000) == (1240, 1240)
    # A higher peak after all of them.
    assert count.read(7000) == (1240, 1240)


def test_a_later_operation_does_not_belong_to_the_peak() -> None:
    _, count, make = counting(400, 800)
    make(0, 5900, 6000)
    make(1, 5000, 6000)
    assert count.read(6000) == (1200, 400)
    make(0, 5000, 6000)
    assert count.read(6000)[0] == 1200, "adding to a gradient makes none"


def test_gradients_that_were_there_are_not_counted() -> None:
    model = Stack(Block())
    model.layers[0].up.requires_grad_(False)
    model.layers[0].norm.weight.grad = torch.zeros(WIDTH)
    count = GradientCount(model, Script())  # type: ignore[arg-type]
    assert hooks(model) == len(count.handles) == 3
    count.close()
    assert hooks(model) == 0
