"""Overlapped steps of optimizers without an update rule: their own step runs in units, under the next forward."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

import forebay
from forebay.optim.overlap import handle as handles
from forebay.optim.overlap.pending import Pending
from forebay.optim.overlap.units import OverlappedUnits
from support.overlap import Run, batch, both
from support.units import Counting, Idle, Momentum, Noisy, Rebinding


class LateUnits(OverlappedUnits):
    """Updates that are as late as they can be: a parameter has its old value until somebody waits for it."""

    def begin(self) -> None:
        """Note the values before the step."""
        super().begin()
        self.new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.old = {id(p): p.detach().clone() for group in self.units.optimizer.param_groups for p in group["params"]}

    def _updated(self, unit: Any) -> None:
        super()._updated(unit)
        for parameter in unit.parameters:
            self.new[id(parameter)] = parameter, parameter.detach().clone()
            parameter.data.copy_(self.old[id(parameter)])

    def _wait(self, parameters: Any) -> None:
        chosen = list(self.new) if parameters is None else [id(one) for one in parameters if id(one) in self.new]
        for number in chosen:
            parameter, value = self.new.pop(number)
            with torch._C.DisableTorchFunctionSubclass():
                parameter.data.copy_(value)
        super()._wait(parameters)


@pytest.fixture(params=["at once", "late"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether updates come as late as they can."""
    if request.param == "late":
        monkeypatch.setattr(handles, "OverlappedUnits", LateUnits)
    return bool(request.param == "late")


def matrices(device: torch.device) -> torch.nn.Module:
    """Return a model of matrices alone, the same one each time."""
    torch.manual_seed(3)
    sizes = ((24, 40), (40, 40), (40, 8))
    layers = [torch.nn.Linear(*size, bias=False) for size in sizes]
    return torch.nn.Sequential(layers[0], torch.nn.GELU(), layers[1], torch.nn.GELU(), layers[2]).to(device)


def units(cls: Any, **settings: Any) -> Any:
    """Return what makes an optimizer in units of one parameter."""
    return lambda model: forebay.offload(cls(model.parameters(), lr=1e-2, **settings), unit_bytes=1)


CLASSES = (torch.optim.Muon, torch.optim.NAdam, torch.optim.Adafactor, Momentum, Rebinding, Counting, Idle, Noisy)
WHOLE: dict[str, Any] = {"overlap_bytes": handles.OVERLAP_BYTES}


@pytest.mark.parametrize("cls", CLASSES)
def test_bits_are_those_of_plain_steps(device: torch.device, late: bool, cls: Any) -> None:
    def body(run: Run) -> None:
        torch.manual_seed(0)
        run.train(5, 2)

    stats = both(body, device, model=matrices, optimizer=units(cls), overlap=WHOLE)
    assert stats["steps"] == 5
    # An optimizer that counts in a tensor on the device may count on before the step has read it.
    assert stats["waited_in_step"] == (3 if cls is Counting and device.type == "cpu" else 0)
    assert stats["pinned_bytes"] > 0


@pytest.mark.usefixtures("late")
def test_every_reader_waits(device: torch.device, tmp_path: Any) -> None:
    def body(run: Run) -> None:
        model, optimizer, path = run.model, run.optimizer, tmp_path / str(run.overlaps)
        run.train(2)

        def step(number: int) -> None:
            run.loss(number).backward()
            optimizer.step()
            assert isinstance(model[0].weight, Pending) == run.overlaps

        step(10)
        run.see(model[0].weight * 1, *model.state_dict().values())
        optimizer.zero_grad(set_to_none=False)
        step(11)
        run.see(*copy.deepcopy(model).parameters(), optimizer.state[model[2].weight]["momentum_buffer"])
        optimizer.zero_grad()
        step(12)
        forebay.checkpoint.save(path, model, optimizer)
        optimizer.zero_grad()
        step(13)
        saving = forebay.checkpoint.async_save(f"{path}-async", model, optimizer)
        optimizer.zero_grad()
        step(14)
        optimizer.zero_grad()
        saving.result()
        with forebay.Sleeper(model, optimizer).asleep(), pytest.raises(forebay.AsleepError):
            model(batch(0, matrices(run.device)))
        for name in (path, f"{path}-async"):
            forebay.checkpoint.load(name, model, optimizer)
            run.see(*model.parameters())
            run.train(range(20, 22))

    both(body, device, model=matrices, optimizer=units(torch.optim.Muon), overlap=WHOLE)


class Unseen(torch.nn.Module):
    """Reads weights as extensions in C++ do, one of them without a call of the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = torch.nn.Linear(24, 8, bias=False)
        torch.manual_seed(4)
        self.mine = torch.nn.Parameter(torch.randn(24, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with all weights."""
        with torch._C.DisableTorchFunctionSubclass():
            return x @ self.mine.t() @ self.owner.weight.t()


@pytest.mark.usefixtures("late")
def test_readers_that_torchs_door_does_not_see_wait(device: torch.device) -> None:
    def model(device: torch.device) -> torch.nn.Module:
        torch.manual_seed(3)
        return Unseen().to(device)

    # The module's own weight is waited for before its forward, the other one in ``step``.
    stats = both(lambda run: run.train(5), device, model=model, optimizer=units(Momentum), overlap=WHOLE)
    assert stats["waited_in_step"] == 1


def test_synchronize_waits_for_all(device: torch.device) -> None:
    model = matrices(device)
    optimizer = units(torch.optim.Muon)(model)
    forebay.overlap_step(model, optimizer)
    for read in (optimizer.synchronize, lambda: optimizer.state[model[0].weight], optimizer.state_dict):
        for number in range(2):
            model(batch(number, model)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert isinstance(model[4].weight, Pending)
        read()
        assert type(model[4].weight) is torch.nn.Parameter


def test_numbers_and_gradients_may_change_until_step(device: torch.device) -> None:
    def body(run: Run) -> None:
        for number in range(4):
            run.loss(number).backward()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
            run.optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
            run.optimizer.step()
            run.optimizer.zero_grad()

    both(body, device, model=matrices, optimizer=units(torch.optim.NAdam), overlap=WHOLE)


@pytest.mark.usefixtures("late")
def test_two_optimizers_of_one_model(device: torch.device) -> None:
    found = []
    for overlaps in (True, False):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 8)).to(device)
        weights = [one for one in model.parameters() if one.dim() == 2]
        rest = [one for one in model.parameters() if one.dim() != 2]
        both_of = [forebay.offload(torch.optim.Muon(weights)), forebay.AdamW(rest, max_grad_norm=0.1)]
        handles_of = [forebay.overlap_step(model, one) for one in both_of] if overlaps else []
        for number in range(4):
            with both_of[1].last_backward() if overlaps else torch.enable_grad():
                model(batch(number, model)).square().mean().backward()
            for one in both_of:
                one.step()
                one.zero_grad()
        for one in handles_of:
            one.remove()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_gradient_is_used_once(device: torch.device) -> None:
    model = matrices(device)
    optimizer = units(torch.optim.NAdam)(model)
    forebay.overlap_step(model, optimizer)
    model(batch(0, model)).sum().backward()
    optimizer.step()
    with pytest.raises(forebay.OptionError, match="parameter 0 of group 0 was used by the overlapped step before"):
        optimizer.step()
    with pytest.raises(forebay.OptionError, match="was taken by the overlapped step"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()
    model(batch(1, model)).sum().backward()
    optimizer.step()
    with pytest.raises(forebay.OptionError, match="closure"):
        optimizer.step(lambda: 1.0)


def test_a_step_that_fails_leaves_gradients(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = matrices(device)
    optimizer = units(Momentum)(model)
    forebay.overlap_step(model, optimizer)
    for number in range(2):
        model(batch(number, model)).sum().backward()
        if number == 0:
            optimizer.step()
            optimizer.zero_grad()

    def fail(*_: Any) -> None:
        raise ArithmeticError("no")

    monkeypatch.setattr(Momentum, "update", fail)
    with pytest.raises(ArithmeticError, match="no"):
        optimizer.step()
    assert all(type(one) is torch.nn.Parameter and torch.isfinite(one.grad).all() for one in model.parameters())


def test_what_ends_it(device: torch.device) -> None:
    model = matrices(device)
    optimizer = units(torch.optim.Muon)(model)

    def step() -> None:
        model(batch(0, model)).sum().backward()
        current().step()
        current().zero_grad()

    current = weakref.ref(optimizer)
    handle = forebay.overlap_step(model, optimizer)
    with pytest.raises(forebay.OptionError, match=r"torch.optim.*Muon is overlapped already"):
        forebay.overlap_step(model, optimizer)
    step()
    assert "3 parts were updated" in handle.explain()
    assert pickle.loads(pickle.dumps(optimizer))._units.overlap is None
    handle.remove()
    handle.remove()
    step()
    assert type(model[0].weight) is torch.nn.Parameter
    forebay.overlap_step(model, optimizer)
    step()
    assert isinstance(model[0].weight, Pending)
    forebay.restore(optimizer)
    step()
    assert type(model[0].weight) is torch.nn.Parameter
    optimizer = forebay.offload(optimizer)
    handle = forebay.overlap_step(model, optimizer)
    step()
    gone = weakref.ref(optimizer)
    del optimizer, handle
    gc.collect()
    assert gone() is None
    assert type(model[0].weight) is torch.nn.Parameter
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    model, other = matrices(device), matrices(device)
    optimizer = units(torch.optim.Muon)(model)
    with pytest.raises(forebay.OptionError, match=r"overlap_bytes=1048576 does not apply; give unit_bytes"):
        forebay.overlap_step(model, optimizer, overlap_bytes=1 << 20)
    with pytest.raises(forebay.OptionError, match="not those of"):
        forebay.overlap_step(other, optimizer)
    with pytest.raises(forebay.OptionError, match="speculate=True"):
        forebay.overlap_step(model, optimizer, speculate=True)
