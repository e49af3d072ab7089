"""Cases about state dicts of sharded state, by themselves and through ``torch.distributed.checkpoint.state_dict``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

import forebay
from support.dist.models import (
    STEPS,
    adamw,
    assert_close,
    assert_same_bits,
    full,
    groups,
    inner,
    make,
    parameters_of,
    shard,
    state_of,
    train,
)
from support.dist.registry import case


def copied(tree: Any) -> Any:
    """Return a state dict that shares no memory with the optimizer."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), tree)


def refused(function: Any, *arguments: Any) -> str:
    """Return the message with which something is refused."""
    try:
        function(*arguments)
    except forebay.OptionError as error:
        return str(error)
    raise AssertionError("not refused")


def same_on_all_ranks(value: Any) -> bool:
    """Whether every rank has an equal object."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


def names_in(state: dict[Any, dict[str, Any]]) -> list[Any]:
    """Return which state there is, with types and global shapes, in order."""
    return [
        (key, kind, type(value).__name__, tuple(value.shape))
        for key, kinds in state.items()
        for kind, value in kinds.items()
    ]


@case(2, 3)
def every_rank_has_the_same_keys_and_torchs_groups() -> None:
    net, theirs = shard(make(torch.bfloat16)), shard(make(torch.bfloat16))
    optimizer, reference = adamw(net, amsgrad=True), torch.optim.AdamW(groups(theirs), amsgrad=True)
    for model, update in ((net, optimizer), (theirs, reference)):
        train(model, update, range(1))
    ours, expected = optimizer.state_dict(), reference.state_dict()
    assert same_on_all_ranks(names_in(ours["state"]))
    assert [set(group) for group in ours["param_groups"]] == [set(group) for group in expected["param_groups"]]
    assert ours["param_groups"] == expected["param_groups"]
    assert ours["state"].keys() == expected["state"].keys()
    for key, state in ours["state"].items():
        assert set(state) == {*expected["state"][key], "master_param"}
        for kind, value in expected["state"][key].items():
            assert type(state[kind]) is type(value)
            assert state[kind].shape == value.shape
    flat, theirs_flat = (
        get_optimizer_state_dict(model, update, options=StateDictOptions(flatten_optimizer_state_dict=True))
        for model, update in ((net, optimizer), (theirs, reference))
    )
    assert same_on_all_ranks(list(flat))
    assert {key for key in flat if not key.endswith("master_param")} == set(theirs_flat)


@case(2, 3)
def loading_its_own_dict_changes_nothing() -> None:
    net = shard(make(torch.bfloat16))
    optimizer = adamw(net)
    train(net, optimizer, range(2))
    before = copied(state_of(net, optimizer))
    addresses = {name: inner(value).data_ptr() for name, value in state_of(net, optimizer).items()}
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_bits(state_of(net, optimizer), before)
    assert {name: inner(value).data_ptr() for name, value in state_of(net, optimizer).items()} == addresses


@case(2, 3)
def training_goes_on_from_a_loaded_dict() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for source, destination in (("stream", "stream"), ("stream", "resident"), ("resident", "stream")):
            net, other = shard(make(dtype)), shard(make(dtype))
            optimizer, loaded = adamw(net, source), adamw(other, destination)
            train(net, optimizer, range(2))
            train(other, loaded, range(5, 6))  # state that loading must replace, in place
            addresses = {name: inner(value).data_ptr() for name, value in state_of(other, loaded).items()}
            with torch.no_grad():
                for target, value in zip(other.parameters(), net.parameters(), strict=True):
                    inner(target).copy_(inner(value))
            loaded.load_state_dict(copied(optimizer.state_dict()))
            assert {name: inner(value).data_ptr() for name, value in state_of(other, loaded).items()} == addresses
            assert all(isinstance(value, DTensor) for name, value in state_of(other, loaded).items() if "exp" in name)
            for model, update in ((net, optimizer), (other, loaded)):
                train(model, update, range(2, STEPS))
            assert_same_bits(parameters_of(other), parameters_of(net))
            assert_same_bits(state_of(other, loaded), state_of(net, optimizer))


@case(2, 3)
def asking_before_the_first_step_changes_no_weight() -> None:
    net = shard(make(torch.bfloat16))
    optimizer = adamw(net)
    before = copied(parameters_of(net))
    found = get_optimizer_state_dict(net, optimizer)
    assert_same_bits(parameters_of(net), before)
    assert same_on_all_ranks(names_in(found["state"]))
    assert found["state"].keys() == parameters_of(net).keys()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-3]
    for name, parameter in net.named_parameters():
        assert torch.equal(inner(found["state"][name]["master_param"]), inner(parameter).float())


WAYS = {
    "sharded": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "from rank 0": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}


def ways() -> list[str]:
    """Return all ways on two ranks; on three, which differ by their shards alone, the two that differ most."""
    return list(WAYS) if dist.get_world_size() == 2 else ["flattened", "full"]


FROZEN = ("embed.weight", "one")


def exchange(source: Any, destination: Any, way: str, dtype: torch.dtype, freeze: tuple[str, ...] = ()) -> None:
    """Hand training over from one kind of optimizer to another, and compare with going on."""
    options = WAYS[way]
    nets = make(dtype), make(dtype)
    for model in nets:
        for name in freeze:
            model.get_parameter(name).requires_grad_(False)
    net, other = map(shard, nets)
    optimizer, loaded = source(net), destination(other)
    train(net, optimizer, range(2))
    model_state = copied(get_model_state_dict(net))
    optimizer_state = copied(get_optimizer_state_dict(net, optimizer, options=options))
    if options.full_state_dict:
        values = [value for state in optimizer_state["state"].values() for value in state.values()]
        assert not any(isinstance(value, DTensor) for value in values)
    for group in loaded.param_groups:
        group["lr"] *= 7  # the loaded rate has to replace it
    if options.broadcast_from_rank0 and dist.get_rank() > 0:
        optimizer_state = {}
    set_model_state_dict(other, model_state)
    set_optimizer_state_dict(other, loaded, optimizer_state, options=options)
    ours, theirs = state_of(other, loaded), state_of(net, optimizer)
    kinds = ours.keys() & theirs.keys()
    trained = [name for name in parameters_of(net) if name not in freeze]
    assert kinds >= {f"{name}.{kind}" for name in trained for kind in ("step", "exp_avg", "exp_avg_sq")}
    if dtype == torch.float32:
        assert_same_bits({name: ours[name] for name in kinds}, {name: theirs[name] for name in kinds})
    for name, parameter in other.named_parameters():
        if name in freeze:
            assert not loaded.state.get(parameter), name
            continue
        assert loaded.state[parameter]["step"].item() == 2, name
        if "master_param" in loaded.state[parameter] and isinstance(loaded, forebay.AdamW):
            assert torch.equal(inner(loaded.state[parameter]["master_param"]).to(dtype), inner(parameter)), name
    assert [group["lr"] for group in loaded.param_groups] == [1e-2, 3e-3]
    for model, update in ((net, optimizer), (other, loaded)):
        train(model, update, range(2, STEPS))
    if type(optimizer) is type(loaded):
        assert_same_bits(parameters_of(other), parameters_of(net))
        assert_same_bits(state_of(other, loaded), state_of(net, optimizer))
    elif dtype == torch.float32:
        assert_close(parameters_of(other), parameters_of(net))


def stream(net: Any) -> torch.optim.Optimizer:
    """Return our optimizer."""
    return adamw(net)


def torchs(net: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer over the same groups."""
    return torch.optim.AdamW(groups(net))


@case(2, 3)
def forebay_to_forebay() -> None:
    for way in ways():
        exchange(stream, stream, way, torch.float32)
        exchange(stream, stream, way, torch.bfloat16)


@case(2, 3)
def torch_to_forebay() -> None:
    for way in ways():
        exchange(torchs, stream, way, torch.float32)


@case(2, 3)
def forebay_to_torch() -> None:
    for way in ways():
        exchange(stream, torchs, way, torch.float32)


@case(2)
def frozen_parameters_have_no_state_either_way() -> None:
    for way in ways():
        exchange(stream, torchs, way, torch.float32, FROZEN)
        exchange(torchs, stream, way, torch.float32, FROZEN)


@case(2)
def torch_to_forebay_without_masters_in_the_dict() -> None:
    for way in ways():
        exchange(torchs, stream, way, torch.bfloat16)


@case(2, 3)
def full_state_is_that_of_the_whole_model() -> None:
    net = shard(make())
    optimizer = adamw(net)
    train(net, optimizer, range(2))
    found = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    for name, parameter in net.named_parameters():
        for kind in ("exp_avg", "exp_avg_sq"):
            value = found["state"][name][kind]
            assert value.shape == parameter.shape
            assert torch.equal(value, full(optimizer.state[parameter][kind])), name


@case(2)
def state_of_another_layout_is_refused_and_changes_nothing() -> None:
    """Shards of one size may be of different places: a square, halved by rows or by columns."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(7)
    parameter = torch.nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    optimizer = forebay.AdamW([parameter])
    optimizer.step()
    whole = torch.randn(8, 8)
    for wrong in (
        distribute_tensor(whole, mesh, [Shard(1)]),
        distribute_tensor(whole, mesh, [Replicate()]),
        whole,
    ):
        before = {kind: inner(value).clone() for kind, value in optimizer.state[parameter].items()}
        loaded = copied(optimizer.state_dict())
        loaded["param_groups"][0]["lr"] = 0.5
        loaded["state"][0]["exp_avg_sq"] = wrong
        message = refused(optimizer.load_state_dict, loaded)
        assert "parameter 0 of group 0" in message, message
        assert "exp_avg_sq" in message, message
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert_same_bits(optimizer.state[parameter], before)
