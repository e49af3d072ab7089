"""Which kinds sleep, gradients, repetition, and the order of waking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import forebay
from forebay.sleep import sleeper as sleep_module
from forebay.sleep import transfer as _sleep_moves
from support.sleep import Net, batch, is_empty, snapshot, train
from support.tensors import assert_same, bits

KINDS = ("parameters", "buffers", "gradients", "optimizer")


def trained(device: torch.device, *, gradients: bool = False) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, device, 2)
    if gradients:
        model(batch(device, 9)).square().mean().backward()
    return model, optimizer


def by_kind(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    weight = model.layers[0].linear.weight
    kinds = {"parameters": weight, "buffers": model.layers[0].scale, "optimizer": optimizer.state[weight]["exp_avg"]}
    return kinds if weight.grad is None else kinds | {"gradients": weight.grad}


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_sleeps_and_the_others_do_not(device: torch.device, kind: str) -> None:
    model, optimizer = trained(device, gradients=True)
    before = snapshot(model, optimizer)
    gradients = [bits(p.grad) for p in model.parameters() if p.grad is not None]
    sleeper = forebay.Sleeper(model, optimizer, gradients="keep")
    sleeper.sleep((kind,))
    found = by_kind(model, optimizer)
    assert {name for name, tensor in found.items() if is_empty(tensor)} == {kind}
    assert [name for name, numbers in sleeper.stats()["kinds"].items() if numbers["bytes"]] == [kind]
    sleeper.wake()
    assert not any(is_empty(tensor) for tensor in by_kind(model, optimizer).values())
    assert_same(before, snapshot(model, optimizer))
    assert_same(gradients, [bits(p.grad) for p in model.parameters() if p.grad is not None])


def test_one_kind_wakes_and_the_others_sleep_on(device: torch.device) -> None:
    model, optimizer = trained(device)
    before = snapshot(model, optimizer)
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.sleep()
    sleeper.wake(("parameters", "buffers"))
    assert {name for name, tensor in by_kind(model, optimizer).items() if is_empty(tensor)} == {"optimizer"}
    model(batch(device, 0))
    with pytest.raises(forebay.AsleepError, match="optimizer"):
        optimizer.step()
    model.load_state_dict(model.state_dict())
    sleeper.wake("optimizer")
    train_after = snapshot(model, optimizer)
    assert_same(before[-3:], train_after[-3:])


def test_sleeping_twice_and_waking_what_is_awake(device: torch.device) -> None:
    model, optimizer = trained(device)
    before = snapshot(model, optimizer)
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.wake()
    sleeper.sleep()
    asleep = sleeper.stats()["asleep_bytes"]
    sleeper.sleep()
    assert sleeper.stats()["asleep_bytes"] == asleep
    assert sleeper.stats()["bytes"] == 0
    sleeper.wake()
    sleeper.wake()
    sleeper.wake(lazy=True)
    assert_same(before, snapshot(model, optimizer))
    assert sleeper.stats()["asleep_bytes"] == 0


def test_sleeping_before_any_state_exists(device: torch.device) -> None:
    model = Net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.sleep("optimizer")
    assert sleeper.stats()["bytes"] == 0
    train(model, optimizer, device, 1)
    sleeper.wake()
    with sleeper.asleep():
        assert all(is_empty(state["exp_avg"]) for state in optimizer.state.values())


def test_a_second_sleep_never_overwrites_what_sleeps(device: torch.device) -> None:
    model, optimizer = trained(device)
    before = snapshot(model, optimizer)
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.sleep("optimizer")
    sleeper.sleep("buffers")
    sleeper.sleep()
    sleeper.wake("buffers")
    sleeper.sleep("buffers")
    sleeper.wake("optimizer")
    sleeper.wake()
    assert_same(before, snapshot(model, optimizer))


def test_a_new_tensor_of_the_same_name_gets_a_place_of_its_own(device: torch.device) -> None:
    model = nn.Linear(30, 30, device=device)
    old, before = model.weight, bits(model.weight)
    sleeper = forebay.Sleeper(model)
    sleeper.sleep()
    model.weight = nn.Parameter(torch.full((30, 30), 5.0, device=device))
    sleeper.sleep()
    assert is_empty(model.weight)
    with pytest.raises(forebay.Error, match="weight"):
        sleeper.wake()
    assert model.weight.eq(5).all()
    assert torch.equal(bits(old), before)


def test_gradients_are_refused_by_default_and_nothing_has_moved(device: torch.device) -> None:
    model, optimizer = trained(device, gradients=True)
    sleeper = forebay.Sleeper(model, optimizer)
    with pytest.raises(RuntimeError, match=r"zero_grad.*gradients='keep'"):
        sleeper.sleep()
    assert not any(is_empty(tensor) for tensor in by_kind(model, optimizer).values())
    model(batch(device, 0))
    optimizer.step()
    # Without gradients in what, they are nobody's business.
    sleeper.sleep(("parameters", "optimizer"))
    assert model.embed.weight.grad is not None
    sleeper.wake()


def test_gradients_are_kept_bit_for_bit(device: torch.device, lazy: bool) -> None:
    model, optimizer = trained(device, gradients=True)
    reference, other = trained(device, gradients=True)
    sleeper = forebay.Sleeper(model, optimizer, gradients="keep")
    sleeper.sleep()
    assert is_empty(model.embed.weight.grad)
    sleeper.wake(lazy=lazy)
    for net, steps in ((model, optimizer), (reference, other)):
        net(batch(device, 10)).square().mean().backward()
        steps.step()
    assert_same(snapshot(reference, other), snapshot(model, optimizer))


def test_gradients_are_dropped_when_asked(device: torch.device) -> None:
    model, optimizer = trained(device, gradients=True)
    sleeper = forebay.Sleeper(model, optimizer, gradients="drop", pinned_budget_bytes=4096)
    with pytest.raises(forebay.OutOfMemoryError):
        sleeper.sleep()
    assert model.embed.weight.grad is not None, "what was refused dropped nothing"
    sleeper = forebay.Sleeper(model, optimizer, gradients="drop")
    with sleeper.asleep():
        assert all(parameter.grad is None for parameter in model.parameters())
    assert sleeper.stats()["kinds"]["gradients"]["bytes"] == 0


def test_a_gradient_that_was_dropped_while_asleep_is_gone_without_a_word(device: torch.device) -> None:
    model, optimizer = trained(device, gradients=True)
    sleeper = forebay.Sleeper(model, optimizer, gradients="keep")
    with sleeper.asleep():
        optimizer.zero_grad()
    assert model.embed.weight.grad is None


class Spy:
    """Slabs that note what was submitted and waited for, and move nothing before somebody waits for it."""

    log: ClassVar[list[tuple[str, Any]]] = []

    def __init__(self, device: str) -> None:
        self._slabs = REAL(device)
        self._held: list[tuple[Any, ...]] = []
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slabs, name)

    @staticmethod
    def staging_bytes() -> int:
        """Pass on."""
        return int(REAL.staging_bytes())

    def begin(self, to_sleep: bool, *rest: Any) -> None:
        """Pass on."""
        self._held, self._sent = [], 0
        self._slabs.begin(to_sleep, *rest)

    def _send(self, count: int) -> None:
        while self._sent < count:
            self._slabs.submit(*self._held[self._sent])
            self._sent += 1

    def submit(self, *arguments: Any) -> int:
        """Note, and hold back."""
        self._held.append(arguments)
        self.log.append(("submit", (len(self._held) - 1, arguments[2])))
        return len(self._held) - 1

    def wait(self, batch: int) -> None:
        """Note, and let come what was held back."""
        self.log.append(("wait", batch))
        self._send(batch + 1)
        self._slabs.wait(batch)

    def has_arrived(self, batch: int) -> bool:
        """Whether somebody has waited for it."""
        return batch < self._sent

    def finish(self) -> None:
        """Pass on."""
        self._send(len(self._held))
        self._slabs.finish()


REAL = sleep_module._core.Slabs


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    class Core:
        Slabs = Spy

    Spy.log = []
    monkeypatch.setattr(sleep_module, "_core", Core)
    return Spy.log


def test_nothing_is_emptied_before_its_bytes_are_safe(
    device: torch.device, log: list[tuple[str, Any]], monkeypatch: Any
) -> None:
    monkeypatch.setattr(_sleep_moves, "BATCH_ENTRIES", 2)
    model, optimizer = trained(device)
    before = snapshot(model, optimizer)
    sleeper = forebay.Sleeper(model, optimizer)
    for _ in range(2):
        sleeper.sleep()
        sleeper.wake()
        assert_same(before, snapshot(model, optimizer))


def test_a_lazy_wake_lets_the_first_layer_run_before_the_last_has_arrived(
    device: torch.device, log: list[tuple[str, Any]]
) -> None:
    model, optimizer = trained(device)
    model.eval()
    want = model(batch(device, 0))
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.sleep()
    log.clear()
    sleeper.wake(lazy=True)
    batches = [payload[0] for what, payload in log if what == "submit"]
    assert [b for what, b in log if what == "wait"] == [0], "a lazy wake waits for buffers and for nothing else"
    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append(max(b for what, b in log if what == "wait")))
    assert torch.equal(bits(model(batch(device, 0))), bits(want))
    assert seen == sorted(seen)
    assert seen[0] < seen[1] < seen[2] < batches[-1], (
        "each layer waited for itself, and the optimizer's state for nobody"
    )
    train(model, optimizer, device, 1)
    assert max(b for what, b in log if what == "wait") == batches[-1]


def test_a_module_waits_for_weights_that_it_reads_from_inside_another(
    device: torch.device, log: list[tuple[str, Any]], monkeypatch: Any
) -> None:
    monkeypatch.setattr(_sleep_moves, "BATCH_ENTRIES", 1)
    # MultiheadAttention never calls out_proj: it reads its weight.
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, device=device) for _ in range(3)))
    model.eval()
    x = torch.randn(2, 5, 16, device=device)
    with torch.no_grad():
        want = model(x)
        sleeper = forebay.Sleeper(model)
        sleeper.sleep()
        sleeper.wake(lazy=True)
        assert torch.equal(bits(model(x)), bits(want))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("wrapped", [False, True], ids=["module.compile", "torch.compile"])
def test_a_compiled_model_is_guarded_and_not_compiled_again(
    device: torch.device, wrapped: bool, lazy: bool, log: list[tuple[str, Any]]
) -> None:
    torch._dynamo.reset()
    model = Net(device).eval()
    x = batch(device, 0)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend) if wrapped else model
    if not wrapped:
        model.compile(backend=backend)
    want = compiled(x)
    sleeper = forebay.Sleeper(compiled)
    for _ in range(2):
        sleeper.sleep()
        with pytest.raises(forebay.AsleepError):
            compiled(x)
        sleeper.wake(lazy=lazy)
        assert torch.equal(bits(compiled(x)), bits(want))
    assert len(graphs) == 1


@pytest.mark.parametrize("use", ["state_dict", "step", "sleep", "wake", "stats", "release"])
def test_everything_else_waits_for_the_whole_of_a_lazy_wake(device: torch.device, use: str) -> None:
    model, optimizer = trained(device)
    before = snapshot(model, optimizer)
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.sleep()
    sleeper.wake(lazy=True)
    if use == "state_dict":
        model.state_dict()
    elif use == "step":
        optimizer.step()
    else:
        getattr(sleeper, use)()
    assert sleeper._waking is None
    sleeper.wake()
    assert_same(before, snapshot(model, optimizer))


def test_wake_follows_the_order_asked_for(device: torch.device, log: list[tuple[str, Any]], monkeypatch: Any) -> None:
    monkeypatch.setattr(_sleep_moves, "BATCH_ENTRIES", 1)
    model = nn.ModuleDict(
        {name: nn.Linear(8, width, bias=False, device=device) for name, width in (("a", 1), ("b", 2), ("c", 3))}
    )
    model.register_buffer("table", torch.ones(40, device=device))
    sleeper = forebay.Sleeper(model)

    def woken(order: Any) -> list[int]:
        sleeper.sleep()
        log.clear()
        sleeper.wake(order=order)
        return [sizes[0] // 32 for what, (_, sizes) in ((w, p) for w, p in log if w == "submit")]

    assert woken(None) == [1, 2, 3, 5]
    assert woken([model["c"], "a"]) == [3, 1, 2, 5]
    assert woken(["buffers", "b.weight"]) == [5, 2, 1, 3]
    with pytest.raises(forebay.OptionError, match="unknown name: 'd'"):
        sleeper.wake(order=["d"])
    with pytest.raises(forebay.OptionError, match="in no model"):
        sleeper.wake(order=[nn.Linear(1, 1)])
