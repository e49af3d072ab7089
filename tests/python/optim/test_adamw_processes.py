"""Several optimizers, threads, failures in the middle, and forked children."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import pytest
import torch

import forebay
from support.optim import SHAPES, TINY, give_gradients, make, run, snapshot, train
from support.processes import in_child
from support.tensors import assert_same, random


def test_interleaved_optimizers_do_not_disturb_each_other(device: torch.device) -> None:
    variants: list[dict[str, Any]] = [
        {"lr": 0.1, "chunk_bytes": TINY},
        {"lr": 0.01, "betas": (0.5, 0.7), "chunk_bytes": TINY, "slots": 2},
        {"lr": 0.3, "placement": "resident"},
        {"lr": 0.2, "amsgrad": True, "max_grad_norm": 0.3},
    ]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32]
    models = [make(device=device, dtype=dtype) for dtype in dtypes]
    optimizers = [forebay.AdamW(model, **options) for model, options in zip(models, variants, strict=True)]
    for step in range(6):
        for optimizer, model in zip(optimizers, models, strict=True):
            train(optimizer, model, range(step, step + 1))
    for optimizer, model, options, dtype in zip(optimizers, models, variants, dtypes, strict=True):
        assert_same(snapshot(optimizer, model), run(device=device, dtype=dtype, steps=6, **options))


def test_closing_one_optimizer_leaves_the_others_alone(device: torch.device) -> None:
    models = [make(device=device) for _ in range(2)]
    optimizers = [forebay.AdamW(model, lr=1e-2) for model in models]
    for optimizer, model in zip(optimizers, models, strict=True):
        train(optimizer, model, 3)
    optimizers[0].close()
    train(optimizers[1], models[1], range(3, 6))
    assert_same(snapshot(optimizers[1], models[1]), run(device=device))


def in_threads(works: list[Any]) -> None:
    """Run in a thread each; raise what the first failing one raised."""
    failures: list[BaseException] = []

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_threads_may_step_optimizers_of_their_own(device: torch.device) -> None:
    models = [make(device=device) for _ in range(3)]
    optimizers = [forebay.AdamW(model, lr=1e-2, chunk_bytes=TINY) for model in models]
    in_threads(
        [lambda o=optimizer, m=model: train(o, m, 10) for optimizer, model in zip(optimizers, models, strict=True)]
    )
    expected = run(device=device, steps=10)
    for optimizer, model in zip(optimizers, models, strict=True):
        assert_same(snapshot(optimizer, model), expected)


def test_state_may_be_read_while_another_thread_steps(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, chunk_bytes=TINY)
    optimizer.prepare()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            optimizer.state_dict()
            optimizer.stats()

    def write() -> None:
        try:
            train(optimizer, parameters, 10)
        finally:
            done.set()

    in_threads([read, write])
    assert_same(snapshot(optimizer, parameters), run(device=device, steps=10))


def test_steps_inside_backward_work(device: torch.device) -> None:
    # One optimizer for each parameter, stepped as soon as its gradient is there.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)
    twin = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)
    twin.load_state_dict(model.state_dict())
    optimizers = {p: forebay.AdamW([p], lr=1e-2) for p in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    reference = forebay.AdamW(twin.parameters(), lr=1e-2)
    for step in range(4):
        data = random((5, 8), step).to(device)
        model(data).square().sum().backward()
        reference.zero_grad()
        twin(data).square().sum().backward()
        reference.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


# Failures in the middle.


def test_a_failure_before_the_engine_runs_changes_nothing(
    device: torch.device, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement, chunk_bytes=TINY)
    train(optimizer, parameters, 2)
    before = snapshot(optimizer, parameters)
    give_gradients(parameters, 2)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(forebay.AdamW, "_check_apart", fail)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert_same(before, snapshot(optimizer, parameters))
    train(optimizer, parameters, range(2, 6))
    assert_same(snapshot(optimizer, parameters), run(device=device))


def test_a_failing_hook_leaves_the_optimizer_usable(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2)
    train(optimizer, parameters, 2)

    def fail(*_: Any) -> None:
        raise RuntimeError("mine")

    handle = optimizer.register_step_pre_hook(fail)
    give_gradients(parameters, 2)
    with pytest.raises(RuntimeError, match="mine"):
        optimizer.step()
    handle.remove()
    train(optimizer, parameters, range(2, 6))
    assert_same(snapshot(optimizer, parameters), run(device=device))


def test_many_refused_steps_use_up_no_slot(device: torch.device, placement: str) -> None:
    parameters = make(SHAPES, device=device)
    optimizer = forebay.AdamW(
        [{"params": parameters[:3]}, {"params": parameters[3:]}],
        lr=1e-2,
        placement=placement,
        chunk_bytes=TINY,
        slots=2,
    )
    for step in range(6):
        give_gradients(parameters, step)
        kept = parameters[4].grad
        parameters[4].grad = kept.to_sparse()
        for _ in range(4):
            with pytest.raises(forebay.OptionError, match="sparse"):
                optimizer.step()
        parameters[4].grad = kept
        optimizer.step()
    assert_same(snapshot(optimizer, parameters), run(device=device))


# Forks.


def test_in_a_forked_child_the_optimizer_says_so_and_the_parent_goes_on(device: torch.device, placement: str) -> None:
    if device.type == "cuda":
        pytest.skip("a forked child cannot use torch's CUDA at all")
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2, placement=placement)
    train(optimizer, parameters, 3)
    give_gradients(parameters, 3)
    assert in_child(optimizer.step).startswith("DeviceError: ")
    assert "fork" in in_child(optimizer.step)
    train(optimizer, parameters, range(3, 6))
    assert_same(snapshot(optimizer, parameters), run(device=device))


READS: dict[str, Any] = {
    "state": lambda optimizer, parameter: optimizer.state[parameter]["exp_avg"].sum(),
    "state_dict": lambda optimizer, _: optimizer.state_dict(),
    "copy": lambda optimizer, _: copy.deepcopy(optimizer),
    "write": lambda optimizer, parameter: optimizer.state[parameter].clear(),
    "synchronize": lambda optimizer, _: optimizer.synchronize(),
    "stats": lambda optimizer, _: optimizer.stats(),
    "prepare": lambda optimizer, _: optimizer.prepare(),
    "closed": lambda optimizer, parameter: (optimizer.close(), optimizer.state[parameter]),
}


@pytest.mark.parametrize("read", READS)
def test_state_that_a_forked_child_does_not_have_is_not_read_there(device: torch.device, read: str) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2)
    train(optimizer, parameters, 1)
    told = in_child(lambda: READS[read](optimizer, parameters[0]), computes=False)
    assert told.startswith("DeviceError: this optimizer was used")


def test_a_child_may_do_what_needs_no_state(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, placement="hybrid", host_fraction=0.5)
    with optimizer.last_backward():
        sum(parameter.sum() for parameter in parameters).backward()

    def tidy() -> str:
        optimizer.zero_grad()
        optimizer.close()
        return f"fine, {len(optimizer.state)} parameters"

    assert in_child(tidy, computes=False) == f"fine, {len(parameters)} parameters"


def test_a_child_may_end_and_collect_what_it_inherited(device: torch.device) -> None:
    parameters = make(device=device)
    optimizer = forebay.AdamW(parameters, lr=1e-2)
    train(optimizer, parameters, 3)

    def forget() -> str:
        nonlocal optimizer
        del optimizer
        gc.collect()
        return "fine"

    assert in_child(forget, computes=False) == "fine"
    train(optimizer, parameters, range(3, 6))
    assert_same(snapshot(optimizer, parameters), run(device=device))


def test_an_optimizer_made_in_a_child_works_there(device: torch.device) -> None:
    expected = run(device=device)[0]["param"].sum().item()
    assert in_child(lambda: run(device=device)[0]["param"].sum().item()) == str(expected)


def test_a_child_collects_optimizers_whose_threads_it_does_not_have(device: torch.device) -> None:
    # The child's own optimizer starts and ends threads, and the C library then unmaps stacks of the parent's.
    models = [make(device=device) for _ in range(32)]
    optimizers = [forebay.AdamW(model, lr=1e-2, placement="host") for model in models]
    for optimizer, model in zip(optimizers, models, strict=True):
        train(optimizer, model, 1)

    def work() -> float:
        total: float = run(device=device)[0]["param"].sum().item()
        optimizers.clear()
        gc.collect()
        return total

    assert in_child(work) == str(run(device=device)[0]["param"].sum().item())
