"""``forebay.move``: what cannot be moved is named by its key, before anything has moved."""

from __future__ import annotations

from collections import UserDict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch

import forebay
from support.sleep import Net, train
from support.tensors import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.moving import Place


class Frozen(dict[Any, Any]):
    """A dict that cannot be edited."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise PermissionError("frozen")


class Fussy(dict[Any, Any]):
    """A dict that takes what it has and nothing else."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if self[key] is not value and not self.get("easy"):
            raise KeyError("not this one")
        super().__setitem__(key, value)


class Odd(tuple[Any, ...]):
    """A tuple that cannot be made from its items."""

    def __new__(cls, first: Any, second: Any) -> Self:
        """Take two items."""
        return super().__new__(cls, (first, second))


def refused(place: Place, mapping: Any, error: type[Exception] = forebay.OptionError) -> str:
    """Return what a refusal says."""
    with pytest.raises(error) as caught:
        place.to_host(mapping)
    return str(caught.value)


CANNOT: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "proxy": (lambda t: MappingProxyType({"x": t}), r"cannot replace ['bad']['x'] in a mappingproxy: TypeError: "),
    "frozen": (lambda t: Frozen(x=t), r"cannot replace ['bad']['x'] in a Frozen: PermissionError: frozen; "),
    "set": (lambda t: {t}, r"cannot replace tensors in the set ['bad']; use a list or a dict"),
    "nested": (lambda t: [1, {"y": Frozen({3: t})}], r"cannot replace ['bad'][1]['y'][3] in a Frozen: "),
    "tuple": (lambda t: Odd(t, 1), r"cannot replace ['bad'] in a dict: TypeError: "),
    "graph": (lambda t: t.requires_grad_() * 2, r"cannot move ['bad']: it is part of an autograd graph; detach() it"),
    "meta": (lambda _: torch.empty(3, device="meta"), r"cannot move ['bad']: it is on meta, and has no data"),
    "emptied": (lambda t: t, r"cannot move ['bad']: its storage is empty; wake it first if it sleeps"),
    "gradient": (lambda t: t, r"cannot move ['bad'].grad: its storage is empty"),
    "parameter": (lambda t: {torch.nn.Parameter(t.clone()): Frozen(x=t)}, r"cannot replace ['bad'][key 0]['x'] in"),
    "long": (lambda t: Frozen({"k" * 100: t}), rf"cannot replace ['bad']['{'k' * 56}...] in a Frozen"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_nothing_moves_if_something_cannot(place: Place, name: str) -> None:
    make, said = CANNOT[name]
    tensor = place.random(4)
    mapping: dict[str, Any] = {"first": place.random(3), "bad": None, "last": {"x": place.random(2)}}
    mapping["bad"] = make(tensor)
    if name == "emptied":
        tensor.untyped_storage().resize_(0)
    if name == "gradient":
        tensor.requires_grad_().grad = place.random(4)
        tensor.grad.untyped_storage().resize_(0)  # type: ignore[union-attr]
    before = mapping["first"], mapping["bad"], mapping["last"]["x"]
    assert said in refused(place, mapping)
    now = mapping["first"], mapping["bad"], mapping["last"]["x"]
    assert all(old is new for old, new in zip(before, now, strict=True))
    assert not place.is_on_host(mapping["first"])


def test_tensors_that_are_there_need_no_dict_that_can_be_edited(place: Place) -> None:
    place.back(MappingProxyType({"x": place.random(3), "y": Frozen(z=place.random(2))}))


def test_a_dict_that_refuses_in_the_middle_gets_the_old_tensors_back(place: Place) -> None:
    mapping = {"first": place.random(3), "fussy": Fussy(x=place.random(4), easy=False), "last": [place.random(2)]}
    tensors = [mapping["first"], mapping["fussy"]["x"], mapping["last"][0]]
    kept = [tensor.cpu().clone() for tensor in tensors]
    said = refused(place, mapping)
    assert said.startswith("cannot replace ['fussy']['x'] in a Fussy: KeyError: 'not this one'; ")
    now = [mapping["first"], mapping["fussy"]["x"], mapping["last"][0]]
    assert all(old is new for old, new in zip(tensors, now, strict=True))
    assert_same(kept, [tensor.cpu() for tensor in now])
    dict.__setitem__(mapping["fussy"], "easy", True)
    place.to_host(mapping)
    assert place.is_on_host(mapping["fussy"]["x"])


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (torch.nn.Linear(2, 2), "cannot move a Linear; use its to(), or forebay.Sleeper for a module"),
        (torch.optim.SGD([torch.zeros(1)]), "cannot move a SGD; give its state, or use forebay.Sleeper"),
        (torch.ones(2), "cannot move a Tensor; use its to(), or forebay.Sleeper for a module"),
        ((torch.ones(2),), "cannot move a tuple; give a dict, another mapping, or a list"),
        (None, "cannot move a NoneType; give a dict, another mapping, or a list"),
        ("text", "cannot move a str; give a dict, another mapping, or a list"),
    ],
    ids=["module", "optimizer", "tensor", "tuple", "none", "text"],
)
def test_what_is_no_mapping(thing: Any, said: str) -> None:
    with pytest.raises(forebay.OptionError) as caught:
        forebay.move(thing, "cpu")
    assert str(caught.value) == said


@pytest.mark.parametrize("device", ["tpu", "meta", "xpu", "nonsense", 3.5])
def test_devices_that_forebay_cannot_use(device: Any) -> None:
    with pytest.raises((forebay.OptionError, TypeError)):
        forebay.move({"a": torch.ones(2)}, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    mapping = {"a": torch.ones(2)}
    with pytest.raises(forebay.DeviceError, match=r"cannot move to cuda:0: torch finds no GPU; use 'cpu'"):
        forebay.move(mapping, "cuda")
    assert mapping["a"].device.type == "cpu"
    forebay.move({"a": 1}, "cuda")


def test_sleeping_state_does_not_move(place: Place) -> None:
    model = Net(place.device)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, place.device, 2)
    sleeper = forebay.Sleeper(model, optimizer)
    with sleeper.asleep():
        assert "its storage is empty; wake it first if it sleeps" in refused(place, optimizer.state)
    place.to_host(optimizer.state)
    place.back(optimizer.state)
    train(model, optimizer, place.device, 1)


def test_user_dicts_are_edited(place: Place) -> None:
    mapping = UserDict(a=place.random(3))
    place.to_host(mapping)
    assert place.is_on_host(mapping["a"])
