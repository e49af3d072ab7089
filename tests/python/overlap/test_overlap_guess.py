"""``overlap_step(speculate=True)``: updates before it is known whether a step clips, with the bits of plain steps."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import forebay
from forebay.errors import OptionError, OutOfMemoryError
from forebay.optim.overlap.guess import PAUSE, Chances
from support.models import tiny
from support.optim import TINY
from support.overlap import Run, adamw, both, net
from support.tensors import assert_same

SPECULATE: dict[str, Any] = {"speculate": True}
NEVER, ALWAYS = 1e6, 1e-3
"""Limits that no gradient of these tests comes near, and that all go beyond."""


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step guess, whatever came of the guesses before."""
    monkeypatch.setattr(Chances, "allow", lambda self: True)


def half(device: torch.device) -> torch.nn.Module:
    """Return a small model in bf16."""
    return net(device, torch.bfloat16)


def train(run: Run, scales: list[float], micro: int = 1, first: int = 0) -> None:
    """Take a step for each scale of the loss: the gradients are in proportion."""
    for step, scale in enumerate(scales, first):
        for part in range(micro):
            loss = scale * run.loss(100 * step + part)
            with run.last() if part == micro - 1 else nullcontext():
                loss.backward()
            run.see(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()


def compare(body: Any, device: torch.device, **options: Any) -> dict[str, float | int]:
    """Run something with steps that guess and plain; return the statistics after the last guess was decided."""

    def whole(run: Run) -> None:
        body(run)
        run.optimizer.synchronize()

    return both(whole, device, **{"overlap": SPECULATE, **options})


PATTERNS = {
    "accepted": [1.0] * 5,
    "rejected": [1e9] * 5,
    "alternating": [1.0, 1e9, 1.0, 1e9, 1.0, 1.0, 1e9],
    "not finite": [1.0, 1.0, float("inf"), 1.0, float("nan"), 1.0],
}

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (forebay.AdamW, {"amsgrad": True}),
    "adam": (forebay.Adam, {"weight_decay": 0.1}),
    "sgd": (forebay.SGD, {"momentum": 0.9}),
    "lion": (forebay.Lion, {}),
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_pattern_has_the_bits_of_plain_steps(device: torch.device, kind: str, pattern: str) -> None:
    cls, settings = OPTIMIZERS[kind]
    scales = PATTERNS[pattern]

    def make(model: torch.nn.Module, **options: Any) -> Any:
        return cls(model.parameters(), lr=1e-3, **settings, **options)

    for late in (False, True):
        for options in ({"chunk_bytes": TINY}, {"chunk_bytes": 1 << 16}, {"chunk_bytes": TINY, "slots": 2}):
            skips = {"skip_nonfinite": True} if pattern == "not finite" and kind == "adamw" else {}
            stats = compare(
                lambda run: train(run, scales), device, model=half, optimizer=make, late=late,
                max_grad_norm=100.0, **options, **skips,
            )  # fmt: skip
            if pattern != "not finite":
                # The first step has no state to guess with.
                assert stats["speculated"] == len(scales) - 1
                assert stats["accepted"] == sum(scale == 1 for scale in scales[1:])
            # After a step that was not skipped all weights are NaN.
            assert stats["accepted"] == 3 if skips else stats["accepted"] > 0 or pattern == "rejected"


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("counted", [False, True], ids=["marked", "counted"])
def test_micro_batches_groups_and_a_scheduler(device: torch.device, counted: bool, micro: int) -> None:
    def groups(model: torch.nn.Module, **options: Any) -> Any:
        parameters = list(model.parameters())
        settings = [{"params": parameters[:3], "lr": 3e-2}, {"params": parameters[3:], "weight_decay": 0.3}]
        return forebay.AdamW(settings, lr=1e-2, chunk_bytes=TINY, **options)

    def body(run: Run) -> None:
        if counted:
            run.last = nullcontext  # type: ignore[method-assign]
        schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.9**step)
        for step, scale in enumerate([1.0, 1e9, 1.0, 1.0]):
            train(run, [scale], micro, step)
            schedule.step()

    overlap = {**SPECULATE, **({"accumulation_steps": micro} if counted else {})}
    stats = compare(body, device, model=half, optimizer=groups, overlap=overlap, late=True, max_grad_norm=1000.0)
    assert (stats["speculated"], stats["accepted"]) == (3, 2)


class Sometimes(torch.nn.Module):
    """A tied weight, a frozen one, one that nobody uses, and a layer that every second call leaves out."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.tied, self.second, self.rare, self.unused = (torch.nn.Linear(24, 24) for _ in range(5))
        self.tied.weight = self.first.weight
        self.second.bias.requires_grad_(requires_grad=False)
        self.calls = 0
        self.to(device, torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        self.calls += 1
        x = self.second(self.tied(self.first(x).tanh()).tanh())
        return self.rare(x.tanh()) if self.calls % 2 else x


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("pattern", ["accepted", "rejected", "alternating"])
@pytest.mark.parametrize("resident", [0, 3000])
@pytest.mark.parametrize("chunk", [TINY, 1 << 20])
def test_tied_frozen_unused_and_sometimes_unused_parameters(
    device: torch.device, chunk: int, resident: int, pattern: str
) -> None:
    def body(run: Run) -> None:
        train(run, PATTERNS[pattern])

    stats = compare(
        body, device, model=Sometimes, late=True, max_grad_norm=100.0, chunk_bytes=chunk,
        resident_bytes=resident,
    )  # fmt: skip
    assert stats["speculated"] > 0
    assert (stats["accepted"] > 0) == (pattern != "rejected")


@pytest.mark.parametrize("how", ["plain", "checkpointed", "offloaded", "recomputed", "compiled"])
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_models_of_transformers(device: torch.device, how: str) -> None:
    def make(device: torch.device) -> Any:
        model = tiny("qwen2", device).to(torch.bfloat16)
        if how == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif how in ("offloaded", "recomputed"):
            forebay.offload_activations(model, min_bytes=1024, recompute=how == "recomputed")
        elif how == "compiled":
            for layer in model.model.layers:
                layer.mlp.compile(backend="aot_eager")
        return model

    def body(run: Run) -> None:
        generator = torch.Generator().manual_seed(5)
        for step in range(5):
            tokens = torch.randint(3, 97, (2, 24), generator=generator).to(run.device)
            loss = run.model(input_ids=tokens, labels=tokens).loss * (1e6 if step == 3 else 1)
            with run.last():
                loss.backward()
            run.see(loss)
            run.optimizer.step()
            run.optimizer.zero_grad()

    stats = compare(body, device, model=make, late=True, max_grad_norm=1000.0, chunk_bytes=1 << 15)
    # After the step that is clipped none is tried.
    assert (stats["speculated"], stats["accepted"]) == (3, 2)


# What comes between.


def state_dict(run: Run) -> None:
    run.see(*(value for state in run.optimizer.state_dict()["state"].values() for value in state.values()))


def looked_up(run: Run) -> None:
    run.see(*(run.optimizer.state[parameter]["exp_avg"] for parameter in run.model.parameters()))


def state_written(run: Run) -> None:
    # Right after a step: what is written must count, and not what comes from the other copy.
    for parameter in list(run.model.parameters())[:2]:
        run.optimizer.state[parameter]["exp_avg"].fill_(0.25)


def loaded(run: Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def weights_replaced(run: Run) -> None:
    with torch.no_grad():
        list(run.model.parameters())[2].mul_(1.01)


def weights_replaced_in_silence(run: Run) -> None:
    next(run.model.parameters()).data[3:7] = 0.5


def masters_replaced(run: Run) -> None:
    run.optimizer.state[next(run.model.parameters())]["master_param"].add_(1.0)


def asleep(run: Run) -> None:
    sleeper = forebay.Sleeper(run.model, run.optimizer)
    sleeper.sleep()
    sleeper.wake()


def evaluated(run: Run) -> None:
    with torch.no_grad():
        run.see(run.loss(77))


def synchronized(run: Run) -> None:
    run.optimizer.synchronize()


BETWEEN = [
    state_dict, looked_up, state_written, loaded, weights_replaced, weights_replaced_in_silence, masters_replaced,
    asleep, evaluated, synchronized,
]  # fmt: skip


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
def test_whatever_comes_between_two_steps(device: torch.device, between: Any) -> None:
    def body(run: Run) -> None:
        for step, scale in enumerate([1.0, 1.0, 1e9, 1.0, 1.0]):
            train(run, [scale], first=step)
            between(run)
            train(run, [scale], first=10 + step)

    for late in (False, True):
        stats = compare(body, device, model=half, late=late, max_grad_norm=100.0)
        assert stats["speculated"] == 9
        assert stats["accepted"] == 7 or between is state_written


@pytest.mark.usefixtures("always")
def test_saves_between_steps_have_the_state_of_their_moment(device: torch.device, tmp_path: Any) -> None:
    def body(run: Run) -> None:
        folder = tmp_path / str(run.overlaps)
        handles = []
        for step, scale in enumerate([1.0, 1.0, 1e9, 1.0, 1.0]):
            train(run, [scale], first=step)
            handles.append(forebay.checkpoint.async_save(folder / str(step), run.model, run.optimizer))
        for handle in handles:
            handle.result()
        for step in range(5):
            other = half(run.device)
            optimizer = adamw(other, max_grad_norm=100.0)
            forebay.checkpoint.load(folder / str(step), other, optimizer)
            run.see(*other.parameters())
            run.see(*(value for state in optimizer.state.values() for value in state.values()))

    compare(body, device, model=half, max_grad_norm=100.0)


# What gives a guess up: then the step is done as if there had been none.


def clip(run: Run) -> None:
    run.see(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-2))


def scaled(run: Run) -> None:
    for parameter in run.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def read(run: Run) -> None:
    run.see(*(parameter.grad for parameter in run.model.parameters() if parameter.grad is not None))


def replaced(run: Run) -> None:
    parameter = next(run.model.parameters())
    parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def dropped(run: Run) -> None:
    next(run.model.parameters()).grad = None


def rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.5


def unlimited(run: Run) -> None:
    run.optimizer.max_grad_norm = None


GIVES_UP = [clip, scaled, read, replaced, dropped, rate, unlimited]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("late", [False, True], ids=["soon", "late"])
@pytest.mark.parametrize("what", GIVES_UP, ids=lambda what: what.__name__)
def test_what_gives_a_guess_up(device: torch.device, what: Any, late: bool) -> None:
    def body(run: Run) -> None:
        train(run, [1.0, 1.0])
        with run.last():
            run.loss(7).backward()
        what(run)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.optimizer.max_grad_norm = NEVER
        train(run, [1.0], first=8)

    stats = compare(body, device, model=half, late=late, max_grad_norm=NEVER)
    assert stats["accepted"] == 2
    # A guess may be given up before its first update.
    assert stats["speculated"] in (2, 3)


@pytest.mark.usefixtures("always")
def test_a_step_that_is_skipped_leaves_weights_and_gradients(device: torch.device) -> None:
    def body(run: Run) -> None:
        train(run, [1.0, 1.0])
        with run.last():
            (run.loss(7) * float("inf")).backward()
        run.optimizer.step()
        run.see(*run.model.parameters())
        run.see(*(parameter.grad for parameter in run.model.parameters() if parameter.grad is not None))
        run.optimizer.zero_grad()
        train(run, [1.0], first=8)

    for late in (False, True):
        stats = compare(body, device, model=half, late=late, max_grad_norm=NEVER, skip_nonfinite=True)
        assert stats["accepted"] == 2


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
def test_zero_grad_instead_of_a_step(device: torch.device, to_none: bool) -> None:
    def body(run: Run) -> None:
        train(run, [1.0, 1.0])
        with run.last():
            run.loss(7).backward()
        run.optimizer.zero_grad(set_to_none=to_none)
        run.see(*run.model.parameters())
        train(run, [1.0], first=8)

    assert compare(body, device, model=half, max_grad_norm=NEVER)["speculated"] in (2, 3)


class Failing(torch.autograd.Function):
    """Fails in backward if it is told to."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the gradient, or fail."""
        if Failing.fails:
            raise ValueError("asked to fail")
        return gradient


class FailingNet(torch.nn.Module):
    """Fails in backward behind the gradients of its last layers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.net = half(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        first, *rest = self.net
        return torch.nn.Sequential(*rest)(Failing.apply(first(x)))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("late", [False, True], ids=["soon", "late"])
def test_an_exception_in_backward_changes_nothing(
    device: torch.device, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(run: Run) -> None:
        train(run, [1.0, 1.0])
        monkeypatch.setattr(Failing, "fails", True)
        loss = run.loss(7)
        with pytest.raises(ValueError, match="asked to fail"), run.last():
            loss.backward()
        monkeypatch.setattr(Failing, "fails", False)
        run.see(*run.model.parameters())
        run.optimizer.zero_grad()
        train(run, [1.0, 1e9], first=8)

    compare(body, device, model=FailingNet, late=late, max_grad_norm=100.0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("how", ["closed", "gone"])
def test_an_optimizer_that_ends_in_the_middle_leaves_the_weights_as_they_were(device: torch.device, how: str) -> None:
    model = half(device)
    optimizer = adamw(model, max_grad_norm=NEVER)
    handle = forebay.overlap_step(model, optimizer, speculate=True)
    run = Run(model, optimizer, handle)
    train(run, [1.0, 1.0])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with run.last():
        run.loss(7).backward()
    if how == "closed":
        optimizer.close()
    del run, handle, optimizer
    gc.collect()
    assert_same(before, [parameter.detach() for parameter in model.parameters()])


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_grad_scaler(device: torch.device, fused: bool) -> None:
    def make(model: torch.nn.Module, **options: Any) -> Any:
        return forebay.AdamW(model.parameters(), lr=1e-3, fused=fused, chunk_bytes=TINY, **options)

    def body(run: Run) -> None:
        scaler = torch.amp.GradScaler(run.device.type, init_scale=64.0, growth_interval=2)
        for step in range(6):
            loss = run.loss(step) * (float("inf") if step == 3 else 1)
            with run.last():
                scaler.scale(loss).backward()
            if not fused:
                scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            run.see(torch.tensor(scaler.get_scale()))

    stats = compare(body, device, model=half, optimizer=make, max_grad_norm=0.5)
    assert stats["accepted"] == 0


def test_parameters_are_not_read_between_the_last_backward_and_the_step(device: torch.device) -> None:
    model = half(device)
    optimizer = adamw(model, max_grad_norm=NEVER)
    run = Run(model, optimizer, forebay.overlap_step(model, optimizer, speculate=True))
    train(run, [1.0])
    with run.last():
        run.loss(7).backward()
    with pytest.raises(OptionError, match="between the last backward and step"):
        next(model.parameters()).sum()
    with pytest.raises(OptionError, match="call step\\(\\) first"):
        optimizer.state_dict()
    optimizer.step()
    next(model.parameters()).sum()
    assert optimizer._overlap.stats()["speculated"] == 1


# When it tries.


def test_it_stops_while_norms_are_near_the_limit_and_begins_again(device: torch.device) -> None:
    model = half(device)
    optimizer = adamw(model, max_grad_norm=NEVER)
    handle = forebay.overlap_step(model, optimizer, speculate=True)
    run = Run(model, optimizer, handle)
    train(run, [1.0, 1.0])
    optimizer.synchronize()
    guessed = []

    def step(near: bool) -> None:
        before = handle.stats()["speculated"]
        with run.last():
            run.loss(3).backward()
        norm = float(torch.linalg.vector_norm(torch.stack([_norm(one) for one in handle._overlap._all()])))
        optimizer.max_grad_norm = norm / 0.95 if near else NEVER
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        guessed.append(handle.stats()["speculated"] - before)

    step(near=False)
    step(near=True)
    for _ in range(PAUSE + 2):
        step(near=False)
    # The step whose norm is near still guesses: its norm is known only when it is over.
    assert guessed == [1, 1, *[0] * PAUSE, 1, 1]
    # It was near, and not clipped.
    assert handle.stats()["accepted"] == handle.stats()["speculated"]


def _norm(one: Any) -> torch.Tensor:
    gradient = one.taken if one.taken is not None else one.parameter.grad
    return torch.linalg.vector_norm(gradient.detach().float())


def test_chances_are_a_matter_of_norms_alone() -> None:
    chances = Chances()
    assert chances.allow()
    for norm, limit in ((0.89, 1.0), (0.5, 0.6)):
        chances.note(torch.tensor(norm), limit)
        assert chances.allow()
    for bad in (0.91, 2.0, float("nan"), float("inf")):
        chances.note(torch.tensor(bad), 1.0)
        allowed = []
        for _ in range(PAUSE):
            allowed.append(chances.allow())
            chances.note(torch.tensor(0.1), 1.0)
        assert allowed == [False] * PAUSE
        assert chances.allow()


def test_clipped_steps_are_not_tried_for_long(device: torch.device) -> None:
    stats = compare(lambda run: train(run, [1.0] * 8), device, model=half, max_grad_norm=ALWAYS)
    assert stats["speculated"] == 0


# Memory, and what is refused.


def test_pinned_memory_is_twice_that_of_one_copy_and_given_back(device: torch.device) -> None:
    model = half(device)
    optimizer = adamw(model, max_grad_norm=NEVER)
    optimizer.prepare()
    single = optimizer.stats()["pinned_bytes"]
    handle = forebay.overlap_step(model, optimizer, speculate=True)
    assert handle.stats()["pinned_bytes"] in (0, 2 * single)
    train(Run(model, optimizer, handle), [1.0] * 3)
    assert handle.stats()["pinned_bytes"] == optimizer.stats()["pinned_bytes"] == 2 * single
    handle.remove()
    assert optimizer.stats()["pinned_bytes"] == single
    train(Run(model, optimizer), [1.0])
    # The same if state is created later.
    model = half(device)
    optimizer = adamw(model, max_grad_norm=NEVER)
    handle = forebay.overlap_step(model, optimizer, speculate=True)
    train(Run(model, optimizer, handle), [1.0] * 2)
    assert handle.stats()["pinned_bytes"] == 2 * single


def test_a_second_copy_beyond_the_budget_is_refused_with_the_bytes_of_both(device: torch.device) -> None:
    model = half(device)
    optimizer = adamw(model, max_grad_norm=NEVER)
    optimizer.prepare()
    single = optimizer.stats()["pinned_bytes"]
    for prepared in (True, False):
        for missing in (1, 0):
            model = half(device)
            optimizer = adamw(model, max_grad_norm=NEVER, pinned_budget_bytes=2 * single - missing)
            if prepared:
                optimizer.prepare()

            def begin(model: Any = model, optimizer: Any = optimizer) -> Any:
                handle = forebay.overlap_step(model, optimizer, speculate=True)
                optimizer.prepare()
                return handle

            if not missing:
                begin()
                continue
            with pytest.raises(OutOfMemoryError) as refused:
                begin()
            assert refused.value.requested_bytes == 2 * single
            if prepared:
                # It is as it was, and trains.
                assert optimizer._overlap is None
                assert optimizer._options.slots == adamw(half(device))._options.slots
                train(Run(model, optimizer), [1.0])


def test_what_cannot_speculate_is_refused(device: torch.device) -> None:
    def refused(match: str, model: Any, **options: Any) -> None:
        optimizer = adamw(model, **options)
        with pytest.raises(OptionError, match=match):
            forebay.overlap_step(model, optimizer, speculate=True)
        assert optimizer._overlap is None

    refused("is for steps with max_grad_norm", half(device))
    for placement in ("resident", "host", "hybrid"):
        refused(
            f"needs placement='stream', and this is '{placement}'", half(device), max_grad_norm=1.0, placement=placement
        )
    refused("parameter 0 of group 0 in torch.bfloat16 has none", half(device), max_grad_norm=1.0, master_weights=False)
    refused("speculate=True needs f32 masters", half(device), max_grad_norm=1.0, master_weights="compact")
    mixed = half(device)
    mixed[2].to(torch.float32)
    refused("parameter 2 of group 0 in torch.float32 has none", mixed, max_grad_norm=1.0)
    mixed[2].requires_grad_(requires_grad=False)
    forebay.overlap_step(mixed, adamw(mixed, max_grad_norm=1.0), speculate=True)


def test_a_group_without_masters_that_is_added_is_refused(device: torch.device) -> None:
    model = half(device)
    optimizer = forebay.AdamW(list(model.parameters())[:2], max_grad_norm=NEVER, chunk_bytes=TINY)
    handle = forebay.overlap_step(model, optimizer, speculate=True)
    model[2].to(torch.float32)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    with pytest.raises(OptionError, match=r"parameter 0 of group 1 in torch\.float32 has none"):
        model(torch.zeros((2, 24), dtype=torch.bfloat16, device=device))
    handle.remove()
