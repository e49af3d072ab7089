"""Training with a trace has the bits of training without one, and leaves nothing behind."""

from __future__ import annotations

import sys

import torch

import forebay
from forebay import _trace
from support.tensors import assert_same
from support.trace import blocks, everything, read, steps


def hooks() -> tuple[object, ...]:
    module = torch.nn.modules.module
    optimizer = sys.modules["torch.optim.optimizer"]
    return (
        len(module._global_forward_pre_hooks),
        len(module._global_forward_hooks),
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
        torch.autograd._engine_run_backward,
    )


def test_everything_has_the_same_bits(device, placement, tmp_path, no_save_is_left):
    before = hooks()
    plain = everything(device, tmp_path / "off", placement)
    with forebay.trace(tmp_path / "run.json"):
        traced = everything(device, tmp_path / "on", placement)
    assert_same(traced, plain)
    assert hooks() == before
    assert _trace.current is None
    read(tmp_path / "run.json")


def test_a_trace_may_begin_and_end_anywhere(device, tmp_path):
    results = []
    for traced in (False, True):
        model = blocks(device)
        optimizer = forebay.AdamW(model.parameters(), lr=1e-2, chunk_bytes=1 << 14, slots=3)
        handle = forebay.overlap_step(model, optimizer, accumulation_steps=1)
        steps(model, optimizer, 1)
        value = torch.ones(8, 64, device=device)
        trace = forebay.trace(tmp_path / "run.json")
        if traced:
            # Between a forward and its backward, with stores under way; until between a backward and its step.
            loss = model(value).sum()
            with trace:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                model(value).sum().backward()
            optimizer.step()
        else:
            for _ in range(2):
                model(value).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        handle.remove()
        results.append([parameter.detach().cpu().clone() for parameter in model.parameters()])
    assert_same(*results)
    assert read(tmp_path / "run.json").names("pass") == ["backward", "step", "forward", "backward"]


def test_modules_inside_of_a_call_and_compiled_code_meet_no_hook(device, tmp_path):
    met = []

    class Inner(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            met.append(len(torch.nn.modules.module._global_forward_pre_hooks))
            return value * 2

    model = torch.nn.Sequential(Inner(), Inner()).to(device)
    with forebay.trace(tmp_path / "run.json"):
        for _ in range(3):
            model(torch.ones(3, device=device, requires_grad=True)).sum().backward()
    assert met == [0] * 6
    assert read(tmp_path / "run.json").names("pass") == ["forward", "backward"] * 3
    assert not model._forward_hooks


def test_a_compiled_module_is_compiled_once(tmp_path):
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    model = torch.compile(torch.nn.Linear(4, 4), backend=backend)
    model(torch.ones(2, 4)).sum().backward()
    with forebay.trace(tmp_path / "run.json"):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4))
    assert len(graphs) == 1
    assert read(tmp_path / "run.json").names("pass") == ["forward", "backward"] * 2
