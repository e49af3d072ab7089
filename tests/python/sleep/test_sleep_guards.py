"""A sleeping model is guarded: whatever reads or writes it through torch raises, and after waking all is as before."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import forebay
from support.sleep import Net, batch, snapshot, train
from support.tensors import assert_same, bits

Use = Callable[[Net, torch.optim.Optimizer, torch.device], object]


def dcp_state(model: Net, optimizer: torch.optim.Optimizer, device: torch.device) -> object:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return get_state_dict(model, optimizer)


USES: dict[str, Use] = {
    "forward": lambda model, _, device: model(batch(device, 0)),
    "forward without grad": lambda model, _, device: torch.no_grad()(model)(batch(device, 0)),
    "forward of a part": lambda model, _, device: model.layers[1].linear(batch(device, 0)),
    "state_dict": lambda model, *_: model.state_dict(),
    "state_dict of a part": lambda model, *_: model.layers.state_dict(),
    "load_state_dict": lambda model, *_: model.load_state_dict({}, strict=False),
    "step": lambda _, optimizer, __: optimizer.step(),
    "optimizer state_dict": lambda _, optimizer, __: optimizer.state_dict(),
    "optimizer load_state_dict": lambda _, optimizer, __: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    "torch.save of the model": lambda model, *_: torch.save(model, io.BytesIO()),
    "torch.save of a part": lambda model, *_: torch.save(model.layers[0], io.BytesIO()),
    "torch.save of the optimizer": lambda _, optimizer, __: torch.save(optimizer, io.BytesIO()),
    "conversion": lambda model, *_: model.double().float(),
    "conversion of a part": lambda model, _, device: model.layers[0].norm.to(device, torch.float64).float(),
    "pickle": lambda model, *_: pickle.dumps(model),
    "deepcopy": lambda model, *_: copy.deepcopy(model),
    "deepcopy of the optimizer": lambda _, optimizer, __: copy.deepcopy(optimizer),
    "distributed checkpoint": dcp_state,
}


@pytest.fixture
def trained(device: torch.device) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, device, 2)
    return model, optimizer


@pytest.mark.parametrize("use", USES)
def test_use_of_what_sleeps_is_an_error_that_names_the_remedy(trained, device: torch.device, use: str) -> None:
    model, optimizer = trained
    before = snapshot(model, optimizer)
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.sleep()
    for _ in range(2):
        with pytest.raises(forebay.AsleepError, match=r"wake\(\)"):
            USES[use](model, optimizer, device)
    sleeper.wake()
    assert_same(before, snapshot(model, optimizer))
    if use.startswith("optimizer load"):
        with pytest.raises(ValueError, match="param"):
            USES[use](model, optimizer, device)
    else:
        USES[use](model, optimizer, device)


def attributes(thing: object) -> dict[str, object]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(thing).items()}


def test_guards_leave_no_trace(trained, device: torch.device) -> None:
    model, optimizer = trained
    things = [*model.modules(), optimizer]
    before = [attributes(thing) for thing in things]
    sleeper = forebay.Sleeper(model, optimizer)
    for lazy in (False, True):
        sleeper.sleep()
        assert before != [attributes(thing) for thing in things]
        sleeper.wake(lazy=lazy)
        sleeper.stats()
        assert before == [attributes(thing) for thing in things]


def test_a_model_without_gradients_may_run_while_only_gradients_sleep(trained, device: torch.device) -> None:
    model, optimizer = trained
    model(batch(device, 0)).sum().backward()
    sleeper = forebay.Sleeper(model, optimizer, gradients="keep")
    with sleeper.asleep(("gradients", "optimizer")):
        with torch.no_grad():
            model(batch(device, 0))
        # A backward would add to gradients that are not there.
        with pytest.raises(forebay.AsleepError, match="gradients"):
            model(batch(device, 0))
    model(batch(device, 0)).sum().backward()


@pytest.mark.parametrize("grad", [False, True])
def test_no_part_of_a_model_runs_while_only_buffers_sleep(trained, device: torch.device, grad: bool) -> None:
    model, optimizer = trained
    with (
        forebay.Sleeper(model, optimizer).asleep("buffers"),
        torch.set_grad_enabled(grad),
        pytest.raises(forebay.AsleepError, match="needs tensors that are asleep: buffers;"),
    ):
        # A part without buffers: a test that fails does not read what sleeps.
        model.head(batch(device, 0))
    model(batch(device, 0))


def test_gradients_may_be_dropped_but_not_zeroed_while_they_sleep(trained, device: torch.device) -> None:
    model, optimizer = trained
    model(batch(device, 0)).sum().backward()
    sleeper = forebay.Sleeper(model, optimizer, gradients="keep")
    with sleeper.asleep("gradients"):
        for thing in (model, optimizer):
            with pytest.raises(forebay.AsleepError, match="set_to_none=False"):
                thing.zero_grad(set_to_none=False)
    model.zero_grad(set_to_none=False)
    assert model.embed.weight.grad.eq(0).all()


def test_the_users_own_hooks_run_in_their_order(trained, device: torch.device) -> None:
    model, _ = trained
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("first"))
    model.register_forward_pre_hook(lambda *_: calls.append("second"))
    sleeper = forebay.Sleeper(model)
    with sleeper.asleep(), pytest.raises(forebay.AsleepError):
        model(batch(device, 0))
    assert calls == [], "the guard comes before them"
    model(batch(device, 0))
    assert calls == ["first", "second"]


@pytest.mark.parametrize("what", ["parameter", "data", "state", "gradient"])
def test_a_tensor_that_was_replaced_while_asleep_is_named_and_nothing_is_lost(
    trained, device: torch.device, what: str
) -> None:
    model, optimizer = trained
    model(batch(device, 0)).sum().backward()
    weight = model.layers[0].linear.weight
    old = {"state": optimizer.state[weight]["exp_avg"], "gradient": weight.grad}.get(what, weight)
    alias = old.detach()
    kept = bits(old)
    rest = snapshot(model, optimizer)
    sleeper = forebay.Sleeper(model, optimizer, gradients="keep")
    sleeper.sleep()
    new = torch.zeros(weight.shape, device=device)
    if what == "parameter":
        model.layers[0].linear.weight = nn.Parameter(new)
    elif what == "data":
        weight.data = new
    elif what == "state":
        optimizer.state[weight]["exp_avg"] = new
    else:
        weight.grad = new
    with pytest.raises(RuntimeError, match=r"replaced while asleep: .*layers\.0\.linear\.weight"):
        sleeper.wake()
    assert torch.equal(bits(alias), kept), "what slept has its bytes again"
    assert sleeper.stats()["asleep_bytes"] == 0
    if what == "gradient":
        assert_same(rest, snapshot(model, optimizer))
    model(batch(device, 0))
    with sleeper.asleep():
        pass


def test_a_checkpoint_in_flight_is_finished_first(trained, device: torch.device) -> None:
    model, optimizer = trained
    want = {name: bits(value) for name, value in model.state_dict().items()}
    go, written = threading.Event(), {}

    def write(state: dict[str, torch.Tensor]) -> None:
        go.wait(30)
        written.update({name: bits(value) for name, value in state.items()})

    writer = threading.Thread(target=write, args=(model.state_dict(),))
    writer.start()
    sleeper = forebay.Sleeper(model, optimizer)
    sleeper.protect(writer)
    # Comes while sleep waits for the writer.
    threading.Timer(0.05, go.set).start()
    sleeper.sleep()
    assert written.keys() == want.keys()
    assert all(torch.equal(written[name], want[name]) for name in want)
    sleeper.wake()
    # Once only, and a failure of the checkpoint is not swallowed.
    sleeper.protect(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sleeper.sleep()
    assert sleeper.stats()["asleep_bytes"] == 0
    with pytest.raises(forebay.OptionError, match="future"):
        sleeper.protect(3)
