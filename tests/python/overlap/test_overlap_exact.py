"""With overlapped steps and without: the same bits, whatever is trained, and however."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import forebay
from support.optim import TINY
from support.overlap import Run, adamw, batch, both, net
from support.tensors import assert_same

CLIPS = pytest.mark.parametrize("clip", [None, 0.05], ids=["plain", "clipped"])


@CLIPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("placed", ["stream", "resident"])
def test_training(device: torch.device, dtype: torch.dtype, placed: str, clip: float | None) -> None:
    def body(run: Run) -> None:
        run.train(6)

    for late in (False, True):
        stats = both(
            body, device, model=lambda device: net(device, dtype), late=late, placement=placed, max_grad_norm=clip
        )
        assert stats["taken_in_backward"] == (6 if clip is None else 0)


RULES: dict[str, tuple[type, dict[str, Any]]] = {
    "Adam": (forebay.Adam, {"weight_decay": 0.1}),
    "AdamW, amsgrad and maximize": (forebay.AdamW, {"amsgrad": True, "maximize": True}),
    "SGD with momentum": (forebay.SGD, {"momentum": 0.9, "nesterov": True}),
    "Lion": (forebay.Lion, {}),
}


@CLIPS
@pytest.mark.parametrize("name", RULES)
def test_every_rule(device: torch.device, name: str, clip: float | None) -> None:
    cls, settings = RULES[name]

    def make(model: torch.nn.Module, **options: Any) -> Any:
        return cls(model.parameters(), lr=1e-3, chunk_bytes=TINY, **settings, **options)

    both(lambda run: run.train(5), device, optimizer=make, max_grad_norm=clip, late=True)


@CLIPS
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("how", ["marked", "counted", "not at all"])
def test_micro_batches(device: torch.device, micro: int, how: str, clip: float | None) -> None:
    def body(run: Run) -> None:
        if how != "marked":
            run.last = nullcontext  # type: ignore[method-assign]
        run.train(4, micro)

    overlap = {"accumulation_steps": micro} if how == "counted" else {}
    stats = both(body, device, overlap=overlap, max_grad_norm=clip, late=True)
    assert stats["taken_in_backward"] == (6 if clip is None and how != "not at all" else 0)


def test_fewer_backwards_than_were_announced(device: torch.device) -> None:
    def body(run: Run) -> None:
        run.last = nullcontext  # type: ignore[method-assign]
        for step, micro in enumerate((3, 3, 1, 2, 3)):
            run.train(range(step, step + 1), micro)

    assert both(body, device, overlap={"accumulation_steps": 3}, late=True)["taken_in_backward"] == 6


@CLIPS
def test_gradients_that_were_given_up_do_not_count(device: torch.device, clip: float | None) -> None:
    def body(run: Run) -> None:
        run.last = nullcontext  # type: ignore[method-assign]
        for step, zero in enumerate(
            (run.optimizer.zero_grad, run.model.zero_grad, lambda: run.model.zero_grad(set_to_none=False))
        ):
            run.loss(1000 + step).backward()
            zero()
            run.train(range(step, step + 1), 2)

    both(body, device, overlap={"accumulation_steps": 2}, max_grad_norm=clip, late=True)


def groups_of(model: torch.nn.Module, **options: Any) -> Any:
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[0::2], "lr": 3e-2, "betas": (0.8, 0.95), "weight_decay": 0.3},
        {"params": parameters[1::2], "lr": 1e-3, "weight_decay": 0.0},
    ]
    return forebay.AdamW(groups, chunk_bytes=TINY, **options)


@CLIPS
def test_groups_and_a_scheduler(device: torch.device, clip: float | None) -> None:
    def body(run: Run) -> None:
        schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.9**step)
        run.train(5, after=schedule.step)

    both(body, device, optimizer=groups_of, max_grad_norm=clip, late=True)


def test_a_group_that_is_added(device: torch.device) -> None:
    def half(model: torch.nn.Module, **options: Any) -> Any:
        return forebay.AdamW(list(model.parameters())[:3], lr=1e-2, chunk_bytes=TINY, **options)

    def body(run: Run) -> None:
        run.train(3)
        run.optimizer.add_param_group({"params": list(run.model.parameters())[3:], "lr": 1e-3})
        run.train(range(3, 6))

    assert both(body, device, optimizer=half, late=True)["taken_in_backward"] == 6


class Odd(torch.nn.Module):
    """A model with what is unusual: tied, shared, unused, frozen, sometimes skipped, used without its module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(24, 24)
        self.tied = torch.nn.Linear(24, 24, bias=False)
        self.shared = torch.nn.Linear(24, 24)
        self.unused = torch.nn.Linear(24, 24)
        self.frozen = torch.nn.Linear(24, 24).requires_grad_(requires_grad=False)
        self.skipped = torch.nn.Linear(24, 24)
        self.bare = torch.nn.Parameter(torch.randn(24, 24) / 5)
        self.scalar = torch.nn.Parameter(torch.tensor(1.5))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.turned = torch.nn.Parameter((torch.randn(24, 24) / 5).t())
        self.holed = torch.nn.Parameter((torch.randn(24, 48) / 5)[:, ::2])
        self.last = torch.nn.Linear(24, 24, bias=False)
        self.last.weight = self.tied.weight
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output."""
        x = self.shared(self.tied(self.first(x)).tanh())
        x = self.shared(self.frozen(x)) * self.scalar
        if not self.skips:
            x = self.skipped(x).tanh()
        x = torch.nn.functional.linear(x, self.frozen.weight) @ self.bare
        return self.last((x @ self.turned).tanh() @ self.holed) + self.empty.sum()


@CLIPS
@pytest.mark.parametrize("late", [False, True], ids=["soon", "late"])
def test_an_odd_model(device: torch.device, clip: float | None, late: bool) -> None:
    def body(run: Run) -> None:
        for step in range(6):
            run.model.skips = step in (1, 2, 4)  # type: ignore[assignment]
            run.model.frozen.requires_grad_(step > 3)  # type: ignore[operator]
            run.train(range(step, step + 1), 2)

    both(body, device, model=lambda device: Odd().to(device), max_grad_norm=clip, late=late)


@CLIPS
def test_two_models_with_one_optimizer(device: torch.device, clip: float | None) -> None:
    def make(model: torch.nn.Module, **options: Any) -> Any:
        return forebay.AdamW(model.parameters(), lr=1e-2, chunk_bytes=TINY, **options)

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = net(device), net(device)

    def body(run: Run) -> None:
        one, two = run.model.one, run.model.two
        for step in range(5):
            # The second model's pass is another one, and in every other step there is none.
            losses = [one(batch(step, one)).square().mean()]
            if step % 2 == 0:
                losses.append(two(batch(50 + step, two)).square().mean())
            with run.last():
                sum(losses).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.see(*losses)

    both(body, device, model=lambda device: Two(), optimizer=make, max_grad_norm=clip, late=True)


@CLIPS
def test_two_optimizers_for_one_model(device: torch.device, clip: float | None) -> None:
    ends = []
    for overlaps in (True, False):
        model = net(device)
        parameters = list(model.parameters())
        optimizers = [
            forebay.AdamW(parameters[:2], lr=1e-2, chunk_bytes=TINY, max_grad_norm=clip),
            forebay.SGD(parameters[2:], lr=1e-1, chunk_bytes=TINY),
        ]
        if overlaps:
            for optimizer in optimizers:
                forebay.overlap_step(model, optimizer, accumulation_steps=1)
        for step in range(4):
            model(batch(step, model)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        ends.append([parameter.detach().cpu().clone() for parameter in parameters])
    assert_same(*ends)


def test_an_optimizer_of_torch_that_was_offloaded(device: torch.device) -> None:
    def make(model: torch.nn.Module, **options: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(batch(7, model)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return forebay.offload(optimizer, chunk_bytes=TINY, **options)

    def body(run: Run) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, gamma=0.5)
        run.train(5, after=schedule.step)

    both(body, device, optimizer=make, late=True)


def test_a_handle_that_is_removed_and_made_again(device: torch.device) -> None:
    def body(run: Run) -> None:
        run.train(2)
        if run.overlaps:
            run.handle.remove()
            run.handle.remove()
            run.last = nullcontext  # type: ignore[method-assign]
        run.train(range(2, 4))
        if run.overlaps:
            assert run.model[0].weight.grad is None
            assert not run.model[0]._forward_pre_hooks
            run.handle = forebay.overlap_step(run.model, run.optimizer, accumulation_steps=1)
        run.train(range(4, 6))

    both(body, device, optimizer=adamw, late=True)
