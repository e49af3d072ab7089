"""Gradients under overlapped steps: zero_grad in both forms and at any place, exceptions, and what comes too late."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay.optim.overlap.consumed import ConsumedGradient
from support.overlap import Run, adamw, batch, both, net

if TYPE_CHECKING:
    from collections.abc import Callable

CLIPS = pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clipped"])


def started(device: torch.device, **options: Any) -> tuple[torch.nn.Module, Any, Any]:
    """Return a model that has taken two overlapped steps, its optimizer and the handle."""
    model = net(device)
    optimizer = adamw(model, **options)
    handle = forebay.overlap_step(model, optimizer, accumulation_steps=1)
    for step in range(2):
        model(batch(step, model)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, handle


def by_optimizer(run: Run, to_none: bool) -> None:
    run.optimizer.zero_grad(set_to_none=to_none)


def by_model(run: Run, to_none: bool) -> None:
    run.model.zero_grad(set_to_none=to_none)


def by_torch(run: Run, to_none: bool) -> None:
    torch.optim.Optimizer.zero_grad(run.optimizer, set_to_none=to_none)


def by_hand(run: Run, to_none: bool) -> None:
    for parameter in run.model.parameters():
        if to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


@CLIPS
@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("place", ["after the step", "before the forward", "before the backward"])
@pytest.mark.parametrize("zero", [by_optimizer, by_model, by_torch, by_hand], ids=lambda zero: zero.__name__)
def test_zero_grad(device: torch.device, zero: Any, place: str, to_none: bool, clip: float | None) -> None:
    def body(run: Run) -> None:
        for step in range(5):
            if place == "before the forward":
                zero(run, to_none)
            loss = run.loss(step)
            if place == "before the backward":
                zero(run, to_none)
            with run.last():
                loss.backward()
            run.optimizer.step()
            if place == "after the step":
                zero(run, to_none)
            run.see(loss)
        # Zeros are zeros.
        zero(run, to_none)
        run.see(*(parameter.grad for parameter in run.model.parameters() if parameter.grad is not None))

    both(body, device, late=True, max_grad_norm=clip)


@CLIPS
def test_without_zero_grad_the_next_backward_raises(device: torch.device, clip: float | None) -> None:
    model, optimizer, _ = started(device, max_grad_norm=clip)
    model(batch(2, model)).sum().backward()
    optimizer.step()
    loss = model(batch(3, model)).sum()
    with pytest.raises(forebay.OptionError, match=r"zero_grad\(\)"):
        loss.backward()


@pytest.mark.parametrize("zero", [by_optimizer, by_model], ids=lambda zero: zero.__name__)
@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
def test_zero_grad_between_backward_and_step_raises(device: torch.device, zero: Any, to_none: bool) -> None:
    model, optimizer, handle = started(device)
    model(batch(2, model)).sum().backward()

    def zero_and_step() -> None:
        zero(Run(model, optimizer, handle), to_none)
        optimizer.step()

    with pytest.raises(forebay.OptionError, match=r"step\(\)"):
        zero_and_step()


@pytest.mark.parametrize("late", [False, True], ids=["soon", "late"])
def test_a_step_after_gradients_were_dropped_is_refused(device: torch.device, late: bool) -> None:
    model, optimizer, _ = started(device)
    model(batch(2, model)).sum().backward()
    if device.type == "cpu" and not late:
        optimizer._engine.overlap_wait(None, 0)
    model.zero_grad()
    with pytest.raises(forebay.OptionError, match="replaced or dropped"):
        optimizer.step()


@CLIPS
def test_dropping_gradients_instead_of_a_step(device: torch.device, clip: float | None) -> None:
    """With clipping nothing is used before ``step``: then a step may be left out as without overlapped steps."""

    def body(run: Run) -> None:
        for step in range(5):
            loss = run.loss(step)
            with run.last():
                loss.backward()
            if step == 3 and clip is not None:
                run.optimizer.zero_grad()
                continue
            run.optimizer.step()
            run.optimizer.zero_grad()

    both(body, device, late=True, max_grad_norm=clip)


USES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "clip_grad_norm_": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "get_total_norm": lambda model: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    "norm": lambda model: model[2].weight.grad.norm(),
    "item": lambda model: model[2].bias.grad[0].item(),
    "mul_": lambda model: model[2].weight.grad.mul_(0.5),
    "data": lambda model: model[2].weight.grad.data.mul_(0.5),
    "detach": lambda model: model[2].weight.grad.detach(),
    "clone": lambda model: model[2].weight.grad.clone(),
    "copy_": lambda model: model[2].weight.grad.copy_(torch.zeros(40, 40)),
    "copied from": lambda model: torch.zeros(40, 40).copy_(model[2].weight.grad),
    "data_ptr": lambda model: model[2].weight.grad.data_ptr(),
    "storage": lambda model: model[2].weight.grad.untyped_storage(),
    "numpy": lambda model: model[2].weight.grad.numpy(),
    "dlpack": lambda model: torch.from_dlpack(model[2].weight.grad),
    "tolist": lambda model: model[2].weight.grad.tolist(),
    "equal": lambda model: torch.equal(model[2].weight.grad, model[2].weight.grad),
    "deepcopy": lambda model: copy.deepcopy(model[2].weight.grad),
    "save": lambda model: torch.save(model[2].weight.grad, io.BytesIO()),
    "out=": lambda model: torch.add(torch.zeros(40, 40), 1, out=model[2].weight.grad),
    "foreach": lambda model: torch._foreach_add_([p.grad for p in model.parameters()], 1.0),
    "backward": lambda model: model[0].weight.grad.sum().backward(),
    "local": lambda model: model[2].weight.grad._local_tensor,
    "iteration": lambda model: list(model[2].weight.grad),
    "assignment": lambda model: model[2].weight.grad.__setitem__(0, 1.0),
    "another optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "to": lambda model: model.to(torch.float64),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_using_a_gradient_that_was_taken_raises(device: torch.device, use: str, when: str) -> None:
    model, optimizer, _ = started(device)
    model(batch(2, model)).sum().backward()
    if when == "after the step":
        optimizer.step()
    assert type(model[2].weight.grad) is ConsumedGradient
    assert model[2].weight.grad.shape == (40, 40)
    assert "ConsumedGradient" in repr(model[2].weight.grad)
    with pytest.raises(forebay.OptionError) as caught:
        USES[use](model)
    assert "parameter" in str(caught.value)
    assert any(remedy in str(caught.value) for remedy in ("max_grad_norm", "zero_grad()", "step()"))


def test_a_gradient_that_is_set_between_backward_and_step_is_refused(device: torch.device) -> None:
    model, optimizer, _ = started(device)
    model(batch(2, model)).sum().backward()
    model[2].weight.grad = torch.zeros(40, 40, device=device)
    with pytest.raises(forebay.OptionError, match="parameter 2 of group 0 was replaced or dropped"):
        optimizer.step()


def test_a_gradient_that_nobody_has_computed_takes_part(device: torch.device) -> None:
    """A parameter that backward did not reach may get a gradient by hand before the step."""

    class Partly(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = net(device), torch.nn.Linear(4, 4, device=device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def body(run: Run) -> None:
        for step in range(4):
            loss = run.loss(step)
            with run.last():
                loss.backward()
            run.model.other.weight.grad = torch.full((4, 4), 0.5 + step, device=run.device)
            run.optimizer.step()
            run.optimizer.zero_grad()

    both(body, device, model=lambda device: Partly(), late=True)


@pytest.mark.parametrize("name", ["lr", "betas", "weight_decay"])
def test_numbers_that_change_between_backward_and_step_are_refused(device: torch.device, name: str) -> None:
    model, optimizer, _ = started(device)
    model(batch(2, model)).sum().backward()
    group = optimizer.param_groups[0]
    before = group[name]
    group[name] = (0.5, 0.5) if name == "betas" else 0.5
    with pytest.raises(forebay.OptionError, match="numbers of group 0 were changed"):
        optimizer.step()
    group[name] = before
    optimizer.step()
    optimizer.zero_grad()
    # After the step they may change.
    group[name] = (0.5, 0.5) if name == "betas" else 0.5
    model(batch(3, model)).sum().backward()
    optimizer.step()


def test_a_group_added_between_backward_and_step_is_refused(device: torch.device) -> None:
    model, optimizer, _ = started(device)
    model(batch(2, model)).sum().backward()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device=device))]})
    with pytest.raises(forebay.OptionError, match="numbers of group 1 were changed"):
        optimizer.step()


def test_clipping_switched_on_between_backward_and_step_is_refused(device: torch.device) -> None:
    model, optimizer, _ = started(device)
    model(batch(2, model)).sum().backward()
    optimizer.max_grad_norm = 1.0
    with pytest.raises(forebay.OptionError, match="set max_grad_norm before the backward"):
        optimizer.step()
    optimizer.max_grad_norm = None
    optimizer.step()


def test_clipping_switched_on_and_off_between_steps(device: torch.device) -> None:
    def body(run: Run) -> None:
        for step, limit in enumerate((None, 0.05, 0.05, None, 0.1, None)):
            run.optimizer.max_grad_norm = limit
            run.train(range(step, step + 1))

    both(body, device, late=True)


def test_a_step_without_backward_raises(device: torch.device) -> None:
    model, optimizer, _ = started(device)
    with pytest.raises(forebay.OptionError, match="every step needs a backward before it"):
        optimizer.step()
    model(batch(2, model)).sum().backward()
    optimizer.step()


@CLIPS
def test_a_backward_without_a_step_raises(device: torch.device, clip: float | None) -> None:
    model = net(device)
    optimizer = adamw(model, max_grad_norm=clip)
    forebay.overlap_step(model, optimizer)
    for _ in range(2):
        loss = model(batch(2, model)).sum()
        with optimizer.last_backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = model(batch(2, model)).sum()
    with optimizer.last_backward():
        loss.backward()
    with pytest.raises(forebay.OptionError, match=r"call step\(\)"), optimizer.last_backward():
        pass
    optimizer.step()


@CLIPS
def test_more_backwards_than_announced_raise(device: torch.device, clip: float | None) -> None:
    model = net(device)
    optimizer = adamw(model, max_grad_norm=clip)
    forebay.overlap_step(model, optimizer, accumulation_steps=2)
    for _ in range(2):
        model(batch(2, model)).sum().backward()
    if clip is not None:
        loss = model(batch(2, model)).sum()
        with pytest.raises(forebay.OptionError, match="accumulation_steps is 2"):
            loss.backward()
    else:
        # Two losses of one forward: the model cannot be called any more.
        with pytest.raises(forebay.OptionError, match=r"step\(\)"):
            model(batch(2, model)).sum().backward()


def test_two_losses_in_the_last_backward_raise(device: torch.device) -> None:
    model = net(device)
    optimizer = adamw(model)
    forebay.overlap_step(model, optimizer)
    out = model(batch(2, model))
    # Torch's own error for a weight that was changed, or one about the gradient: whichever comes first.
    losses = [out.sum(), out.square().sum()]
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|one loss"), optimizer.last_backward():
        [loss.backward(retain_graph=True) for loss in losses]


def test_nested_marks_raise(device: torch.device) -> None:
    _, optimizer, _ = started(device)
    with (
        pytest.raises(forebay.OptionError, match="cannot be nested"),
        optimizer.last_backward(),
        optimizer.last_backward(),
    ):
        pass


class Failing(torch.nn.Module):
    """A model whose forward or backward can be told to fail."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first, self.rest = torch.nn.Linear(24, 24, device=device), net(device)
        self.fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        x = self.first(x)
        if self.fails == "forward":
            raise ArithmeticError("in the forward")
        if self.fails == "backward":
            x.register_hook(self.fail)
        return self.rest(x)

    def fail(self, grad: torch.Tensor) -> torch.Tensor:
        """Fail in the backward."""
        raise ArithmeticError("in the backward")


@CLIPS
def test_an_exception_in_forward(device: torch.device, clip: float | None) -> None:
    def body(run: Run) -> None:
        run.train(2)
        run.model.fails = "forward"
        with pytest.raises(ArithmeticError):
            run.loss(5)
        run.model.fails = ""
        run.train(range(2, 4))

    both(body, device, model=Failing, late=True, max_grad_norm=clip)


@CLIPS
@pytest.mark.parametrize("then", ["give up", "step"])
def test_an_exception_in_backward_before_anything_was_updated(
    device: torch.device, clip: float | None, then: str
) -> None:
    """The engine is told late: nothing was updated, so everything is as without overlapped steps."""

    def body(run: Run) -> None:
        run.train(2)
        run.model.fails = "backward"
        loss = run.loss(5)
        with pytest.raises(ArithmeticError), run.last():
            loss.backward()
        run.model.fails = ""
        run.see(*(parameter.grad for parameter in run.model.rest.parameters()))
        if then == "step":
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.train(range(2, 4))

    both(body, device, model=Failing, late=True, max_grad_norm=clip)


def test_a_step_after_an_exception_in_an_unmarked_backward(device: torch.device) -> None:
    """What was taken until then is updated, and nothing else: as a plain step after such a backward does."""

    def body(run: Run) -> None:
        run.last = nullcontext  # type: ignore[method-assign]
        run.train(2)
        run.model.fails = "backward"
        with pytest.raises(ArithmeticError):
            run.loss(5).backward()
        run.model.fails = ""
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.train(range(2, 4))

    for late in (False, True):
        both(body, device, model=Failing, late=late, overlap={"accumulation_steps": 1})


def test_an_exception_after_updates_have_begun_is_a_torn_step(device: torch.device) -> None:
    model = Failing(device)
    optimizer = adamw(model)
    forebay.overlap_step(model, optimizer)
    for step in range(2):
        loss = model(batch(step, model)).sum()
        with optimizer.last_backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.fails = "backward"
    original = model.fail

    def after_an_update(grad: torch.Tensor) -> torch.Tensor:
        # Until something was updated.
        while not optimizer._engine.overlap_stats()["early_units"]:
            pass
        return original(grad)

    model.fail = after_an_update  # type: ignore[method-assign]
    loss = model(batch(5, model)).sum()
    with pytest.raises(ArithmeticError), optimizer.last_backward():
        loss.backward()
    model.fails = ""
    optimizer.zero_grad()
    model(batch(6, model)).sum().backward()
    with pytest.raises(forebay.CheckpointError, match="load a complete checkpoint"):
        optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    loss = model(batch(6, model)).sum()
    with optimizer.last_backward():
        loss.backward()
    optimizer.step()


def test_saved_gradient_objects_of_an_earlier_step_raise(device: torch.device) -> None:
    model, optimizer, _ = started(device)
    model(batch(2, model)).sum().backward()
    kept = model[2].weight.grad
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert not model[2].weight.grad.any()
    with pytest.raises(forebay.OptionError):
        kept.sum()


def test_hooks_on_tensors_see_and_change_gradients(device: torch.device) -> None:
    def body(run: Run) -> None:
        run.model[2].weight.register_hook(lambda grad: grad * 0.5)  # type: ignore[index,union-attr]
        run.train(4)

    both(body, device, late=True)


def test_gradients_are_freed_in_backward(device: torch.device) -> None:
    layers = [torch.nn.Linear(64, 64) for _ in range(30)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = adamw(model)
    handle = forebay.overlap_step(model, optimizer, accumulation_steps=1)
    freed = []

    def wait(grad: torch.Tensor) -> torch.Tensor:
        # The engine may take its time: wait until it has updated what it can.
        while optimizer._engine.overlap_stats()["early_units"] < 600:
            pass
        if device.type == "cpu":
            optimizer._engine.overlap_wait(None, 0)
        return grad

    layers[0].bias.register_hook(wait)
    for step in range(2):
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(device)).sum().backward()
        optimizer.step()
        freed.append(handle.stats()["freed_bytes"])
        optimizer.zero_grad()
    assert freed[1] > 0


def test_gradients_that_the_engine_has_are_not_held_for_ever(device: torch.device) -> None:
    model, optimizer, handle = started(device)
    model(batch(2, model)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    assert handle.stats()["held_bytes"] == 0
