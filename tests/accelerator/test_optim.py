"""Optimizers on the fake accelerator: streamed through the engine's ring, with the bits of torch's own kernels."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay.errors import DeviceError, OptionError
from support import fake

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = [(64, 48), (1024,), (160, 64), (16,), (32, 32, 8)]
STEPS = 5


def parameters(device: torch.device, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype).to(device)) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(100 + step)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, steps: range, gradient: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Train with given gradients, which go away between steps as they do in training."""
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in steps:
        for parameter, grad in zip(owned, gradients(step, gradient), strict=True):
            parameter.grad = grad.to(parameter.device, non_blocking=True)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in owned]


def lion_by_hand(given: list[torch.nn.Parameter], lr: float, betas: tuple[float, float], decay: float) -> Any:
    """Lion in torch's own operations."""

    class Lion(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(given, {})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for parameter in given:
                mean = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                grad = parameter.grad
                direction = mean.mul(betas[0]).add_(grad, alpha=1 - betas[0]).sign_()
                parameter.mul_(1 - lr * decay)
                parameter.add_(direction, alpha=-lr)
                mean.mul_(betas[1]).add_(grad, alpha=1 - betas[1])

    return Lion()


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adamw": (
        lambda p, **o: forebay.AdamW(p, lr=1e-2, weight_decay=0.1, **o),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    ),
    "amsgrad": (
        lambda p, **o: forebay.AdamW(p, lr=1e-2, amsgrad=True, maximize=True, **o),
        lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, maximize=True, fused=True),
    ),
    "adam": (
        lambda p, **o: forebay.Adam(p, lr=1e-2, weight_decay=0.1, **o),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    ),
    "sgd": (
        lambda p, **o: forebay.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, **o),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    ),
    "plain sgd": (
        lambda p, **o: forebay.SGD(p, lr=1e-2, **o),
        lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
    ),
    "lion": (
        lambda p, **o: forebay.Lion(p, lr=1e-2, weight_decay=0.1, **o),
        lambda p: lion_by_hand(p, 1e-2, (0.9, 0.99), 0.1),
    ),
}


@pytest.mark.parametrize("placement", ["stream", "resident"])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_torchs_own_kernels(device: torch.device, case: str, placement: str) -> None:
    ours, torchs = CASES[case]
    expected = train(torchs(parameters(device)), range(STEPS))
    # Chunks that cut parameters.
    options = {"chunk_bytes": 32 << 10, "slots": 3} if placement == "stream" else {}
    with fake.delays(1):
        found = train(ours(parameters(device), placement=placement, **options), range(STEPS))
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["adamw", "sgd", "lion"])
def test_masters_have_the_bits_of_a_model_in_f32(device: torch.device, case: str, dtype: torch.dtype) -> None:
    ours, torchs = CASES[case]
    start = [parameter.detach().float() for parameter in parameters(device, dtype)]
    exact = torchs([torch.nn.Parameter(value) for value in start])
    expected = []
    for step in range(STEPS):
        for parameter, grad in zip(exact.param_groups[0]["params"], gradients(step, dtype), strict=True):
            parameter.grad = grad.to(device).float()
        exact.step()
    expected = [parameter.detach().to(dtype).cpu() for parameter in exact.param_groups[0]["params"]]
    with fake.delays(1):
        found = train(ours(parameters(device, dtype), chunk_bytes=32 << 10, slots=2), range(STEPS), dtype)
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)


def test_state_comes_and_goes_as_torchs_does(device: torch.device) -> None:
    ours, torchs = CASES["adamw"]
    plain, streamed = torchs(parameters(device)), ours(parameters(device), chunk_bytes=32 << 10)
    train(plain, range(2))
    with fake.delays(1):
        train(streamed, range(2))
        state, wanted = streamed.state_dict()["state"], plain.state_dict()["state"]
        for number, values in wanted.items():
            for name, value in values.items():
                assert torch.equal(state[number][name].cpu(), value.cpu()), (number, name)
        again = ours(parameters(device), chunk_bytes=32 << 10)
        again.load_state_dict(plain.state_dict())
        with torch.no_grad():
            for one, other in zip(again.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
                one.copy_(other)
        found = train(again, range(2, 4))
    expected = train(plain, range(2, 4))
    assert all(torch.equal(value, wanted) for value, wanted in zip(found, expected, strict=True))


def test_clipping_is_computed_on_the_device(device: torch.device) -> None:
    plain = torch.optim.AdamW(parameters(device), lr=1e-2, fused=True)
    for step in range(STEPS):
        for parameter, grad in zip(plain.param_groups[0]["params"], gradients(step, torch.float32), strict=True):
            parameter.grad = grad.to(device)
        torch.nn.utils.clip_grad_norm_(plain.param_groups[0]["params"], 0.5)
        plain.step()
    expected = [parameter.detach().cpu() for parameter in plain.param_groups[0]["params"]]
    with fake.delays(1):
        found = train(forebay.AdamW(parameters(device), lr=1e-2, max_grad_norm=0.5, chunk_bytes=32 << 10), range(STEPS))
    for value, wanted in zip(found, expected, strict=True):
        assert torch.equal(value, wanted)


def test_steps_make_no_resources(device: torch.device) -> None:
    optimizer = forebay.AdamW(parameters(device), chunk_bytes=32 << 10)
    train(optimizer, range(2))
    engine = optimizer._engine
    before = engine.resources_made()
    train(optimizer, range(2, 5))
    assert engine.resources_made() == before


def test_an_optimizer_that_is_dropped_gives_everything_back(device: torch.device) -> None:
    optimizer = forebay.AdamW(parameters(device), chunk_bytes=32 << 10)
    train(optimizer, range(1))
    assert forebay._core._memory_for_test("torch:fake:0")[1] > 0
    del optimizer
    gc.collect()
    assert forebay._core._memory_for_test("torch:fake:0") == (0, 0)


def test_a_device_without_streams_or_pinned_memory_says_so(device: torch.device) -> None:
    ours, torchs = CASES["adamw"]
    expected = train(torchs(parameters(device)), range(STEPS))
    for missing, words in (("streams", "no streams"), ("pinned", "no page-locked memory")):
        # A name of its own for each: a device is opened once.
        other = torch.device("fake", 1)
        with fake.without(**{missing: True}):
            with pytest.raises(DeviceError, match=words):
                train(ours(parameters(other), backend="torch_async"), range(1))
            if missing == "streams":
                with pytest.warns(UserWarning, match=f"fake:1 has {words}: forebay works there"):
                    found = train(ours(parameters(other), chunk_bytes=32 << 10), range(STEPS))
                assert all(torch.equal(value, wanted) for value, wanted in zip(found, expected, strict=True))


def test_what_cannot_be_served_is_refused_by_name(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    given = parameters(device)
    with pytest.raises(OptionError, match="placement 'host' is not for fake:0 through torch"):
        train(forebay.AdamW(given, placement="host"), range(1))
    with pytest.raises(OptionError, match="master_weights='compact' is not for fake:0 through torch"):
        train(forebay.AdamW(given, master_weights="compact"), range(1))
    for reduced in (torch.bfloat16, "8bit", {"exp_avg": "8bit"}):
        with pytest.raises(OptionError, match="state_dtype is not for fake:0 through torch"):
            train(forebay.AdamW(given, state_dtype=reduced), range(1))
    train(forebay.AdamW(given, state_dtype={"exp_avg": torch.float32}), range(1))
    with pytest.raises(OptionError, match="invalid backend: 'cuda'; use one of"):
        forebay.AdamW(given, backend="cuda")
    with pytest.raises(OptionError, match=r"on meta; forebay.AdamW takes parameters on cuda and fake and cpu"):
        train(forebay.AdamW([torch.nn.Parameter(torch.empty(4, device="meta"))]), range(1))
    monkeypatch.setattr("forebay._device._others", {"meta", "fake"})
    mixed = [given[0], torch.nn.Parameter(torch.empty(4, device="meta"))]
    with pytest.raises(OptionError, match="several accelerators: fake:0 and meta:0; use one optimizer for each"):
        forebay.AdamW(mixed)


def test_an_optimizer_without_a_rule_goes_through_units(device: torch.device) -> None:
    plain = torch.optim.NAdam(parameters(device), lr=1e-2)
    expected = train(plain, range(STEPS))
    with fake.delays(1):
        found = train(forebay.offload(torch.optim.NAdam(parameters(device), lr=1e-2)), range(STEPS))
    assert all(torch.equal(value, wanted) for value, wanted in zip(found, expected, strict=True))
