"""``forebay.move``: which tensors of a mapping move, and what the new ones are."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import forebay
from support.moving import Place, adam_state, copies, tensors_of
from support.sleep import OPTIMIZERS, Net, snapshot, train
from support.tensors import assert_same, bits, same_bits

if TYPE_CHECKING:
    from collections.abc import Iterator


class Pair(NamedTuple):
    """A tuple with names."""

    first: Any
    second: Any


def same_properties(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether everything but the device is equal."""
    about = [
        (type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.requires_grad, t.is_leaf, t.is_conj(), t.is_neg())
        for t in (old, new)
    ]
    return about[0] == about[1] and old.untyped_storage().nbytes() == new.untyped_storage().nbytes()


# Which tensors.


def test_every_tensor_of_every_container_moves_and_returns(place: Place) -> None:
    parameter = nn.Parameter(place.random(3, 5))
    other = object()
    mapping: dict[Any, Any] = {
        "tensor": place.random(4, seed=1),
        "number": torch.tensor(7.0, device=place.device),
        parameter: {"exp_avg": place.random(3, 5, seed=2), "step": 3},
        ("a", 1): OrderedDict(x=place.random(2, seed=3), y=None),
        5: defaultdict(dict, z={"deep": [{"deeper": place.random(6, seed=4)}]}),
        "list": [place.random(1, seed=5), "text", [place.random(2, 2, seed=6)]],
        "tuple": (place.random(3, seed=7), 1, (place.random(3, seed=8), {"in it": place.random(2, seed=9)})),
        "named": Pair(place.random(2, seed=10), "second"),
        "user": UserDict(q=place.random(2, seed=11)),
        "queue": deque([place.random(2, seed=12)]),
        "empty": {},
        "other": other,
        "set": {1, 2},
        "bytes": b"abc",
    }
    containers = [mapping[parameter], mapping["a", 1], mapping[5], mapping[5]["z"], mapping[5]["z"]["deep"]]
    containers += [mapping["list"], mapping["list"][2], mapping["tuple"][2][1], mapping["user"], mapping["queue"]]
    keys = list(mapping)

    def leaves() -> list[torch.Tensor]:
        _, number, state, ordered, default, items, tuples, pair, user, queue = list(mapping.values())[:10]
        return [
            mapping["tensor"],
            number,
            state["exp_avg"],
            ordered["x"],
            default["z"]["deep"][0]["deeper"],
            items[0],
            items[2][0],
            tuples[0],
            tuples[2][0],
            tuples[2][1]["in it"],
            pair.first,
            user["q"],
            queue[0],
        ]

    original = leaves()
    kept = [bits(tensor) for tensor in original]
    for direction, is_there in ((place.to_host, True), (place.back, False)):
        report = direction(mapping)
        assert all(place.is_on_host(tensor) is is_there for tensor in leaves())
        assert all(same_properties(old, new) for old, new in zip(original, leaves(), strict=True))
        assert not any(old is new for old, new in zip(original, leaves(), strict=True))
        assert_same([bits(tensor) for tensor in leaves()], kept)
        assert report["tensors"] == 13
        assert report["bytes"] == sum(tensor.untyped_storage().nbytes() for tensor in original)
        now = [mapping[parameter], mapping["a", 1], mapping[5], mapping[5]["z"], mapping[5]["z"]["deep"]]
        now += [mapping["list"], mapping["list"][2], mapping["tuple"][2][1], mapping["user"], mapping["queue"]]
        assert all(old is new for old, new in zip(containers, now, strict=True))
        assert list(mapping) == keys
        assert not place.is_on_host(parameter)
        assert mapping["other"] is other
        assert (mapping[parameter]["step"], mapping["a", 1]["y"], mapping["list"][1]) == (3, None, "text")
        assert mapping["named"].second == "second"
        assert type(mapping["named"]) is Pair
        assert type(mapping[5]) is defaultdict
        assert (mapping["set"], mapping["bytes"], mapping["tuple"][1]) == ({1, 2}, b"abc", 1)


def test_what_is_there_stays_the_same_object(place: Place) -> None:
    state = adam_state(place, (4, 4), (3,))
    tensors = list(tensors_of(state))
    values = (tensors[0], "text")
    state["tuple"] = {"tuple": values}
    report = place.back(state)
    assert all(old is new for old, new in zip(tensors, tensors_of(state), strict=True))
    assert state["tuple"]["tuple"] is values
    assert (report["bytes"], report["tensors"], report["gbps"], report["pinned_bytes"]) == (0, 0, 0.0, 0)
    place.to_host(state)
    tensors = list(tensors_of(state))
    assert place.to_host(state)["bytes"] == 0
    assert all(old is new for old, new in zip(tensors, tensors_of(state), strict=True))
    # Only what is missing moves.
    late = state[next(iter(state))]["exp_avg"] = place.random(4, 4, seed=9)
    assert place.to_host(state)["bytes"] == late.nbytes
    assert [old is new for old, new in zip(tensors, tensors_of(state), strict=True)].count(False) == 1


def test_a_mapping_on_the_cpu_does_not_move_to_the_cpu() -> None:
    state = {"a": torch.ones(3), "b": [torch.zeros(2, requires_grad=True) * 2]}
    tensors = [state["a"], state["b"][0]]
    assert forebay.move(state, "cpu") == forebay.move(state, "cpu") | {"seconds": pytest.approx(0, abs=1)}
    assert forebay.move(state, torch.device("cpu"))["bytes"] == 0
    assert state["a"] is tensors[0]
    assert state["b"][0] is tensors[1]
    forebay.move(MappingProxyType(state), "cpu")
    for nothing in ({}, [], {"a": None}):
        assert forebay.move(nothing, "cpu")["bytes"] == 0


def test_aliases_stay_aliases_and_travel_once(place: Place) -> None:
    whole = place.random(1000)
    tied = place.random(5, seed=1)
    pair = (tied, whole[:10])
    mapping = {"whole": whole, "rows": [whole[100:300].view(20, 10).t()], "tied": tied, "twin": {"tied": tied}}
    mapping |= {"pair": pair, "same pair": [pair]}
    for direction in (place.to_host, place.back):
        assert direction(mapping)["bytes"] == whole.nbytes + tied.nbytes
        rows = mapping["rows"][0]
        assert mapping["twin"]["tied"] is mapping["tied"] is mapping["pair"][0]
        assert mapping["same pair"][0] is mapping["pair"]
        assert (rows.storage_offset(), rows.stride()) == (100, (1, 10))
        mapping["whole"].fill_(3.0)
        assert rows.eq(3).all()
        rows.fill_(4.0)
        assert mapping["whole"][100:300].eq(4).all()
        assert mapping["pair"][1].eq(3).all()


def test_a_mapping_that_contains_itself(place: Place) -> None:
    mapping: dict[str, Any] = {"a": place.random(3), "list": []}
    mapping["self"] = mapping
    mapping["list"].append(mapping["list"])
    place.to_host(mapping)
    assert mapping["self"] is mapping
    assert place.is_on_host(mapping["a"])


class Chained:
    """A mapping that is none for Python, as Megatron's chained optimizers have it."""

    def __init__(self, *inner: dict[Any, Any]) -> None:
        self.inner = inner

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        return self.inner[key[0]][key[1]]

    def items(self) -> Iterator[Any]:
        """Go through all of them."""
        for i, inner in enumerate(self.inner):
            for key, value in inner.items():
                yield (i, key), value


def test_a_mapping_of_dicts_need_not_be_editable_itself(place: Place) -> None:
    states = [adam_state(place, (3,)), adam_state(place, (4, 2))]
    kept = [copies(state) for state in states]
    for mapping in (Chained(*states), MappingProxyType({"a": states[0], "b": states[1]})):
        place.to_host(mapping)
        assert all(place.is_on_host(tensor) for state in states for tensor in tensors_of(state))
        place.back(mapping)
        assert_same(kept, [copies(state) for state in states])


# What the new ones are.


class Named(nn.Parameter):
    """A parameter of a type of its own."""


def test_properties_are_kept(place: Place) -> None:
    made = {
        "transposed": place.random(4, 6).t(),
        "strided": place.random(8, 8)[1::2, ::3],
        "expanded": place.random(5, 1).expand(5, 7),
        "number": torch.tensor(3.0, device=place.device),
        "view of a number": place.random(9)[4],
        "empty": torch.empty(0, 3, device=place.device),
        "nothing": place.random(4)[4:],
        "parameter": nn.Parameter(place.random(3)),
        "frozen": nn.Parameter(place.random(3), requires_grad=False),
        "own type": Named(place.random(3)),
        "leaf": place.random(2, 2).requires_grad_(),
        "conjugated": torch.view_as_complex(place.random(4, 2)).conj(),
        "negated": torch.view_as_complex(place.random(4, 2)).conj().imag,
        "bool": place.random(5) > 0,
        "channels": place.random(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn):
        made[str(dtype)] = place.random(7).mul(50).to(dtype)
    mapping: dict[str, torch.Tensor] = dict(made)
    for direction, on_host in ((place.to_host, True), (place.back, False)):
        direction(mapping)
        for name, new in mapping.items():
            assert new is not made[name] or not new.numel(), name
            assert same_properties(made[name], new), name
            assert torch.equal(bits(made[name].resolve_conj().resolve_neg()), bits(new.resolve_conj().resolve_neg()))
            if new.numel():
                assert place.is_on_host(new) is on_host, name


def test_gradients_and_attributes_come_along(place: Place) -> None:
    parameter = nn.Parameter(place.random(3, 2))
    parameter.grad = place.random(3, 2, seed=1)
    parameter.shared = "yes"  # type: ignore[attr-defined]
    kept = bits(parameter), bits(parameter.grad)
    mapping: dict[str, Any] = {"p": parameter, "gradient": parameter.grad}
    for direction, on_host in ((place.to_host, True), (place.back, False)):
        direction(mapping)
        new = mapping["p"]
        assert new is not parameter
        assert new.shared == "yes"
        assert new.grad is mapping["gradient"]
        assert place.is_on_host(new.grad) is on_host
        assert_same((bits(new), bits(new.grad)), kept)
    assert parameter.grad is not None
    mapping["p"].sum().backward()


def test_what_was_made_in_inference_mode_can_be_trained_with(place: Place) -> None:
    mapping = {"a": place.random(3)}
    with torch.inference_mode():
        place.to_host(mapping)
        assert not mapping["a"].is_inference()
        place.back(mapping)
    mapping["a"].requires_grad_().mul(2).sum().backward()


def test_tensors_in_wrappers(place: Place) -> None:
    wrapped = TwoTensor(place.random(4, 3), place.random(4, 3, seed=1))
    kept = bits(wrapped.a), bits(wrapped.b)
    mapping = {"two": wrapped, "inner": wrapped.b}
    for direction, on_host in ((place.to_host, True), (place.back, False)):
        direction(mapping)
        new = mapping["two"]
        assert type(new) is TwoTensor
        assert place.is_on_host(new.a) is place.is_on_host(new.b) is on_host
        assert new.b is mapping["inner"]
        assert_same((bits(new.a), bits(new.b)), kept)


def test_dtensors(place: Place) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(place.device.type, (1,))
        shards = distribute_tensor(place.random(6, 4), mesh, [Shard(0)])
        parameter = nn.Parameter(distribute_tensor(place.random(5, seed=1), mesh, [Replicate()]))
        parameter.__create_chunk_list__ = list  # type: ignore[attr-defined]
        parameter._local_tensor.__create_write_items__ = list
        mapping: dict[str, Any] = {"state": shards, "parameter": parameter, "local": shards._local_tensor}
        addresses = []
        for _ in range(2):
            for direction, on_host in ((place.to_host, True), (place.back, False)):
                direction(mapping)
                new, also = mapping["state"], mapping["parameter"]
                assert type(new) is type(shards)
                assert (new.shape, new.stride(), new._spec.placements) == ((6, 4), (4, 1), shards._spec.placements)
                assert new.device_mesh is mesh
                assert new._local_tensor is mapping["local"]
                assert isinstance(also, nn.Parameter)
                assert also.requires_grad
                assert also.__create_chunk_list__ is also._local_tensor.__create_write_items__ is list
                assert place.is_on_host(new._local_tensor) is place.is_on_host(also._local_tensor) is on_host
                assert same_bits(new._local_tensor, shards._local_tensor)
                assert same_bits(also._local_tensor, parameter._local_tensor)
                if on_host:
                    addresses.append([new._local_tensor.data_ptr(), also._local_tensor.data_ptr()])
                del new, also
        assert addresses[0] == addresses[1]
    finally:
        dist.destroy_process_group()


def test_sparse_tensors_move_too(place: Place) -> None:
    sparse = place.random(4, 4).relu().to_sparse()
    mapping = {"sparse": sparse, "parameter": nn.Parameter(sparse.clone()), "dense": place.random(3)}
    place.to_host(mapping)
    assert mapping["sparse"].layout == torch.sparse_coo
    assert isinstance(mapping["parameter"], nn.Parameter)
    if place.device.type != "cpu":
        assert place.is_on_host(mapping["sparse"])
    assert torch.equal(mapping["sparse"].to_dense().cpu(), sparse.to_dense().cpu())
    place.back(mapping)
    assert mapping["sparse"].device == place.device


# Optimizers.


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.startswith("forebay")])
def test_training_with_moves_equals_training_without(place: Place, name: str) -> None:
    plain, moved = Net(place.device), Net(place.device)
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (plain, moved)]
    state = optimizers[1].state

    def between() -> None:
        assert place.to_host(state)["bytes"] > 0
        assert all(place.is_on_host(tensor) for tensor in tensors_of(state))
        place.back(state)

    train(plain, optimizers[0], place.device, 5)
    train(moved, optimizers[1], place.device, 5, between)
    assert optimizers[1].state is state
    assert_same(snapshot(plain, optimizers[0]), snapshot(moved, optimizers[1]))


def test_a_state_dict_moves(place: Place) -> None:
    model = Net(place.device)
    weights = model.state_dict()
    kept = {name: value.cpu().clone() for name, value in weights.items()}
    place.to_host(weights)
    assert all(place.is_on_host(value) for value in weights.values())
    assert weights["head.weight"].untyped_storage().data_ptr() == weights["embed.weight"].untyped_storage().data_ptr()
    assert not place.is_on_host(model.frozen)
    model.load_state_dict(weights)
    assert_same({name: value.cpu() for name, value in weights.items()}, kept)


def test_state_of_forebays_optimizers_stays(place: Place) -> None:
    model = Net(place.device)
    optimizer = forebay.AdamW(model.parameters())
    train(model, optimizer, place.device, 2)
    before = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    for mapping in (optimizer.state, {"state": optimizer.state}, dict(optimizer.state)):
        for direction in (place.to_host, place.back):
            assert direction(mapping)["bytes"] == 0
    for parameter, values in before.items():
        assert all(optimizer.state[parameter][name] is value for name, value in values.items())
    train(model, optimizer, place.device, 1)
