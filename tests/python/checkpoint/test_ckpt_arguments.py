"""Wrong arguments of saves and loads: errors that say which, and what to do instead."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forebay
from forebay import checkpoint
from support.checkpoint import pair, snapshot, train
from support.tensors import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("no_save_is_left")

every_call = pytest.mark.parametrize("call", [checkpoint.save, checkpoint.async_save, checkpoint.load])


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def adamw(of: torch.nn.Module) -> torch.optim.Optimizer:
    return forebay.AdamW(of.parameters())


def refused(call: Call, *arguments: Any, **named: Any) -> str:
    """Return what an argument error says."""
    with pytest.raises(forebay.OptionError) as caught:
        call(*arguments, **named)
    return str(caught.value)


@every_call
def test_swapped_arguments(call: Call, tmp_path: Path) -> None:
    net = model()
    optimizer = adamw(net)
    order = "the order is path, model, optimizer"
    assert refused(call, net, tmp_path, optimizer) == f"invalid path: a Sequential; {order}"
    assert refused(call, optimizer, tmp_path, net) == f"invalid path: an AdamW; {order}"
    assert refused(call, tmp_path, optimizer, net) == f"invalid model: an AdamW; {order}"
    assert refused(call, tmp_path, "elsewhere", net) == f"invalid model: 'elsewhere'; {order}"
    assert refused(call, tmp_path, net, tmp_path) == f"invalid optimizer: '{tmp_path}'; {order}"
    assert refused(call, tmp_path, net, net) == f"invalid optimizer: a Sequential; {order}"
    assert not list(tmp_path.iterdir())


@every_call
def test_a_model_that_is_none(call: Call, tmp_path: Path) -> None:
    net = model()
    said = refused(call, tmp_path, net.state_dict())
    assert said == (
        "invalid model: an OrderedDict; give the module itself, not its state dict; extra= saves other values"
    )
    assert "not its state dict" in refused(call, tmp_path, {"model": net})
    said = refused(call, tmp_path, [net, model()])
    assert said == (
        "invalid model: a list of Sequential; give one module: put several into a torch.nn.ModuleList or save each to "
        "a path of its own"
    )
    assert "ModuleList" in refused(call, tmp_path, (net, None))
    assert refused(call, tmp_path, torch.nn.Linear) == "invalid model: the class Linear; give a torch.nn.Module"
    assert refused(call, tmp_path, torch.ones(2)) == "invalid model: a Tensor; give a torch.nn.Module"
    assert refused(call, tmp_path, 3) == "invalid model: 3; give a torch.nn.Module"


@every_call
@pytest.mark.parametrize("path", [None, 3, b"bytes", ["run"], {"path": "run"}, Path, object()])
def test_a_path_that_is_none(call: Call, path: Any) -> None:
    said = refused(call, path, model())
    assert re.fullmatch(r"invalid path: .+; name a folder with a string or a path", said), said


@every_call
def test_a_path_that_is_empty(call: Call) -> None:
    assert refused(call, "", model()) == "invalid path: ''; name a folder"


@every_call
def test_an_optimizer_that_is_none(call: Call, tmp_path: Path) -> None:
    net = model()
    optimizer = adamw(net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    said = refused(call, tmp_path, net, optimizer.state_dict())
    assert said == (
        "invalid optimizer: a dict; give the optimizer itself, not its state dict; several are given as a list"
    )
    said = refused(call, tmp_path, net, scheduler)
    assert said == (
        "invalid optimizer: a LambdaLR; give the optimizer, and save the scheduler's state_dict() with extra="
    )
    assert "state_dict() with extra=" in refused(call, tmp_path, net, [optimizer, scheduler])
    give = "give a torch.optim.Optimizer or a list of them"
    assert refused(call, tmp_path, net, 3) == f"invalid optimizer: 3; {give}"
    assert refused(call, tmp_path, net, [optimizer, None]) == f"invalid optimizer: None; {give}"
    assert refused(call, tmp_path, net, torch.optim.AdamW) == f"invalid optimizer: the class AdamW; {give}"
    assert refused(call, tmp_path, net, net.parameters()) == f"invalid optimizer: a Parameter; {give}"
    assert "needs its model" in refused(call, tmp_path, None, optimizer)


@every_call
def test_an_optimizer_of_another_model(call: Call, tmp_path: Path) -> None:
    net, other = model(), model()
    checkpoint.save(tmp_path, net, adamw(net))
    said = refused(call, tmp_path, net, adamw(other))
    assert said == (
        "the optimizer AdamW is not of this model: 4 of its 4 parameters are not in the model, the first is parameter "
        "0 of group 0 with shape (4, 3); give the model's own optimizer, made after the model was sharded, cast or "
        "moved"
    )
    # With state too, which torch names by number.
    for params in (other.parameters(), [*net[0].parameters(), *other[1].parameters()]):
        foreign = torch.optim.AdamW(params)
        for group in foreign.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        foreign.step()
        assert "not of this model" in refused(call, tmp_path, net, foreign)
    said = refused(call, tmp_path, net, [adamw(net[0]), torch.optim.SGD(other.parameters())])
    assert said.startswith("the optimizer SGD 1 is not of this model: ")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".saving", "00000001"]


def test_values_beside_it_that_have_no_names(tmp_path: Path) -> None:
    for call in (checkpoint.save, checkpoint.async_save):
        for extra in ([1, 2], "text", 3):
            said = refused(call, tmp_path, model(), extra=extra)
            assert said.startswith("invalid extra: ")
            assert said.endswith("; give a dict of names and values")


# Torch's compiler warns of itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_what_is_right_is_taken(tmp_path: Path) -> None:
    net, optimizer = pair()
    train(net, optimizer, range(2))
    kept = snapshot(net, optimizer)
    halves = list(net.parameters())
    for number, (path, given, optimizers, extra) in enumerate(
        (
            (tmp_path / "a", net, optimizer, None),
            (str(tmp_path / "b"), net, (optimizer,), {}),
            (tmp_path / "c", net, iter([optimizer]), OrderedDict(x=1)),
            (tmp_path / "d", torch.nn.ModuleDict({"net": net}), optimizer, None),
            (tmp_path / "e", torch.compile(net), optimizer, None),
            (tmp_path / "f", net, None, None),
            (tmp_path / "g", net, [torch.optim.SGD(halves[:2]), torch.optim.SGD(halves[2:4])], None),
            (tmp_path / "h", None, None, {"x": 1}),
        )
    ):
        checkpoint.save(path, given, optimizers, extra=extra)
        again = [optimizer] if number == 2 else optimizers
        assert checkpoint.load(path, given, again) == extra
    assert_same(kept, snapshot(net, optimizer))
