"""Cases about checkpoints on 1, 2 and 3 ranks: each number of ranks saves, then each loads what every one saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import forebay
from forebay.checkpoint import Reader, Writer
from support.dist.checkpoints import (
    KINDS_OF_RUN,
    SAVED,
    addresses,
    box,
    build,
    build_torch,
    check,
    everywhere,
    give_gradients_of,
    manifest,
    one_more_step,
    place,
    reference,
    refused,
    set_from_dcp,
    spoil,
    state_for_dcp,
    train,
    values_of,
)
from support.dist.models import adamw, inner, make, shard
from support.dist.registry import case, shared_folder

if TYPE_CHECKING:
    pass

WAYS = {
    "dcp": (dcp.FileSystemWriter, dcp.FileSystemReader),
    "forebay": (Writer, Reader),
}
"""Where DCP's bytes go."""

RATES = [1e-2, 3e-3]
EXTRA = {"tokens": 12345, "sampler": {"epoch": 3, "order": torch.arange(7)}, "notes": ["a", None, 1.5, True]}


def same_extra(found: Any) -> bool:
    """Whether ``EXTRA`` came back."""
    order = found["sampler"].pop("order")
    return torch.equal(order, EXTRA["sampler"]["order"]) and found == {  # type: ignore[index]
        **EXTRA,
        "sampler": {"epoch": 3},
    }


# Every number of ranks saves.


@case(1, 2, 3)
def forebays_state_is_saved() -> None:
    ranks = dist.get_world_size()
    for kind in KINDS_OF_RUN:
        net, optimizer = build(kind)
        train(net, optimizer, *range(SAVED))
        check(net, optimizer, reference(kind))
        for way, (writer, _) in WAYS.items():
            dcp.save(state_for_dcp(net, optimizer), storage_writer=writer(place(kind, way, ranks)))
        forebay.checkpoint.save(place(kind, "ours", ranks), net, optimizer, extra=EXTRA)
        check(net, optimizer, reference(kind))


@case(1, 2, 3)
def torchs_state_is_saved() -> None:
    ranks = dist.get_world_size()
    for kind in ("f32", "bf16"):
        net, optimizer = build_torch(kind)
        train(net, optimizer, *range(SAVED))
        expected = reference(kind)
        with torch.no_grad():
            # Sums of the CPU's vector units differ in the last bit with a shard's length: have the reference's.
            for name, value in values_of(net, optimizer).items():
                owner = name if name in dict(net.named_parameters()) else name.rpartition(".")[0]
                part = expected[name]
                inner(value).copy_(part[box(net.get_parameter(owner))] if part.dim() else part)
        for way, (writer, _) in WAYS.items():
            dcp.save(state_for_dcp(net, optimizer), storage_writer=writer(place(kind, f"torch-{way}", ranks)))
        forebay.checkpoint.save(place(kind, "torch-ours", ranks), net, optimizer)


# Every number of ranks loads.


def load(kind: str, way: str, source: int, net: Any, optimizer: Any, **options: Any) -> None:
    """Load a checkpoint in one of the ways."""
    path = place(kind, way, source)
    if way.endswith("ours"):
        extra = forebay.checkpoint.load(path, net, optimizer)
        assert (extra is None) if way.startswith("torch") else same_extra(extra)
        return
    state = state_for_dcp(net, optimizer)
    _, reader = WAYS[way.removeprefix("torch-")]
    dcp.load(state, storage_reader=reader(path), **options)
    set_from_dcp(net, optimizer, state)


def sources(way: str) -> tuple[int, ...]:
    """Return whose checkpoints to load: everybody's; through DCP with our files, which are the same, another's."""
    return (dist.get_world_size() % 3 + 1,) if way == "forebay" else (1, 2, 3)


def goes_on(kind: str) -> dict[str, torch.Tensor]:
    """Return what a run that nobody interrupted has after one more step, on as many ranks as there are."""
    net, optimizer = build(kind)
    train(net, optimizer, *range(SAVED))
    one_more_step(net, optimizer)
    return {name: inner(value).clone() for name, value in values_of(net, optimizer).items()}


@case(1, 2, 3)
def every_rank_finds_its_part_of_the_whole() -> None:
    for kind in KINDS_OF_RUN:
        uninterrupted = goes_on(kind)
        for way in (*WAYS, "ours"):
            for source in sources(way):
                for placement in ("stream", "resident") if (way, source) == ("ours", 2) else ("stream",):
                    net, optimizer = build(kind, placement)
                    where = spoil(net, optimizer)
                    load(kind, way, source, net, optimizer)
                    check(net, optimizer, reference(kind))
                    assert addresses(net, optimizer) == where, "loaded elsewhere"
                    assert [group["lr"] for group in optimizer.param_groups] == RATES
                    one_more_step(net, optimizer)
                    for name, value in values_of(net, optimizer).items():
                        assert torch.equal(inner(value), uninterrupted[name]), f"{name} after one more step"


@case(1, 2, 3)
def a_new_optimizer_that_never_stepped_is_loaded_too() -> None:
    for kind in KINDS_OF_RUN:
        for way in ("dcp", "ours"):
            net, optimizer = build(kind)
            load(kind, way, 3, net, optimizer)
            check(net, optimizer, reference(kind))


@case(1)
def a_whole_model_loads_what_ranks_saved() -> None:
    for kind in ("f32", "bf16"):
        for source in (2, 3):
            dtype, options = KINDS_OF_RUN[kind]
            net = make(dtype)
            optimizer = adamw(net, **options)
            spoil(net, optimizer)
            load(kind, "ours", source, net, optimizer)
            check(net, optimizer, reference(kind))


@case(1, 2, 3)
def torchs_optimizer_loads_forebays_state() -> None:
    for kind in ("f32", "bf16"):
        expected = {name: value for name, value in reference(kind).items() if not name.endswith("master_param")}
        for name, value in expected.items():
            # torch keeps the state in the weights' type.
            if not name.endswith("step"):
                expected[name] = value.to(KINDS_OF_RUN[kind][0])
        for way in (*WAYS, "ours"):
            for source in sources(way):
                net, optimizer = build_torch(kind)
                spoil(net, optimizer)
                load(kind, way, source, net, optimizer)
                check(net, optimizer, expected)
                assert [group["lr"] for group in optimizer.param_groups] == RATES
                if kind == "f32":
                    train(net, optimizer, SAVED)
                    for name, parameter in net.named_parameters():
                        part = reference(kind, SAVED + 1)[name][box(parameter)]
                        torch.testing.assert_close(inner(parameter), part, rtol=1e-5, atol=1e-6)


@case(1, 2, 3)
def forebay_loads_torchs_state_and_makes_masters_from_weights() -> None:
    for kind in ("f32", "bf16"):
        dtype, _ = KINDS_OF_RUN[kind]
        expected = {
            # torch kept the state in the weights' type.
            name: value.to(dtype).float() if "." in name and "exp_avg" in name else value
            for name, value in reference(kind).items()
        }
        for name in list(expected):
            if name.endswith("master_param"):
                expected[name] = expected[name.removesuffix(".master_param")].float()
        for way in (*WAYS, "ours"):
            for source in sources(way):
                net, optimizer = build(kind)
                where = spoil(net, optimizer)
                with torch.no_grad():
                    for name, value in values_of(net, optimizer).items():
                        if name.endswith("master_param"):
                            inner(value).fill_(1e9)  # no weight rounds to it
                planner = {} if way == "ours" else {"planner": DefaultLoadPlanner(allow_partial_load=kind == "bf16")}
                load(kind, f"torch-{way}", source, net, optimizer, **planner)
                if way != "ours":
                    optimizer.refresh_master_weights()
                check(net, optimizer, expected)
                assert addresses(net, optimizer) == where, "loaded elsewhere"
                train(net, optimizer, SAVED)
                if kind == "f32":
                    check(net, optimizer, reference(kind, SAVED + 1))


@case(2)
def what_is_missing_is_refused_unless_asked_for() -> None:
    net, optimizer = build("bf16")
    state = state_for_dcp(net, optimizer)
    error = refused(lambda: dcp.load(state, storage_reader=Reader(place("bf16", "torch-forebay", 3))))
    assert isinstance(error, dcp.api.CheckpointException)
    assert "master_param" in str(error.failures[0][0])


# Saving and loading by themselves.


@case(2, 3)
def bytes_go_straight_into_the_arenas() -> None:
    for kind in KINDS_OF_RUN:
        net, optimizer = build(kind)
        optimizer.prepare()
        staged = mock.patch.object(Reader, "_read_staged", autospec=True, side_effect=Reader._read_staged)
        with staged as read:
            forebay.checkpoint.load(place(kind, "ours", 1), net, optimizer)
        names = [item.storage_index.fqn for call in read.call_args_list for item, *_ in call.args[1]]
        assert read.called
        # Compact masters are made of f32 values and weights.
        assert bool(names) == (kind == "compact"), "nothing else goes through a buffer"
        assert all(name.endswith("master_param") for name in names)
        check(net, optimizer, reference(kind))


COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
)


def collectives(function: Any) -> list[str]:
    """Return which collectives a function calls on this rank, in order."""
    called: list[str] = []

    def noting(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{name: noting(name, getattr(dist, name)) for name in COLLECTIVES}):
        function()
    return called


class Narrow(nn.Module):
    """One row: of several ranks, only the first has any of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.weight = nn.Parameter(torch.randn(1, 31))
        self.bias = nn.Parameter(torch.randn(1))


@case(2, 3)
def ranks_with_nothing_but_empty_shards_take_part() -> None:
    path = shared_folder() / f"narrow-{dist.get_world_size()}"
    net = Narrow()
    fully_shard(net)
    optimizer = adamw(net, amsgrad=True)
    train(net, optimizer, 0, 1)
    if dist.get_rank() > 0:
        assert not any(inner(parameter).numel() for parameter in net.parameters())
    before = {name: inner(value).clone() for name, value in values_of(net, optimizer).items()}
    saving = collectives(lambda: forebay.checkpoint.save(path, net, optimizer))
    assert saving
    assert everywhere(saving) == [saving] * dist.get_world_size()
    spoil(net, optimizer)
    loading = collectives(lambda: forebay.checkpoint.load(path, net, optimizer))
    assert everywhere(loading) == [loading] * dist.get_world_size()
    for name, value in values_of(net, optimizer).items():
        assert torch.equal(inner(value), before[name]), name


@case(2, 3)
def keys_are_the_same_on_every_rank_without_asking_the_others() -> None:
    for kind in KINDS_OF_RUN:
        net, optimizer = build(kind)
        keys: list[Any] = []

        def ask(net: Any = net, optimizer: Any = optimizer, keys: list[Any] = keys) -> None:
            state = state_for_dcp(net, optimizer)
            keys.extend(dcp._nested_dict.flatten_state_dict(state)[0])

        assert not collectives(ask), "a rank that asks alone would hang"
        assert everywhere(keys) == [keys] * dist.get_world_size()
        assert {key for key in keys if key.startswith("optimizer.state.")} == {
            f"optimizer.state.{name}" for name in reference(kind) if name not in dict(net.named_parameters())
        }


@case(2, 3)
def saving_again_keeps_what_was_asked_for() -> None:
    path = shared_folder() / f"again-{dist.get_world_size()}"
    net, optimizer = build("bf16")
    for step in range(4):
        train(net, optimizer, step)
        extra = {**EXTRA, "step": step}
        forebay.checkpoint.save(path, net, optimizer, extra=extra, keep_last=2 if step else None)
    if dist.get_rank() == 0:
        assert sorted(folder.name for folder in path.iterdir() if folder.is_dir()) == ["00000003", "00000004"]
    dist.barrier()
    for folder, steps in ((path, 4), (path / "00000003", 3)):
        spoil(net, optimizer)
        found = forebay.checkpoint.load(folder, net, optimizer)
        assert found is not None
        assert found.pop("step") == steps - 1
        assert same_extra(found)
        check(net, optimizer, reference("bf16", steps))


@case(2, 3)
def ranks_write_files_of_their_own_and_every_byte_once() -> None:
    ranks = dist.get_world_size()
    for kind in KINDS_OF_RUN:
        path = place(kind, "ours", ranks)
        found = manifest(path)
        assert {file["name"].split("-")[0] for file in found["files"]} == {str(rank) for rank in range(ranks)}
        expected = reference(kind)
        stored = {name: tensor for name, tensor in found["tensors"].items() if not name.startswith("extra.")}
        assert stored.keys() == {
            f"optimizer.state.{name}" if name.rpartition(".")[2] in SUFFIXES else f"model.{name}" for name in expected
        }
        for name, tensor in stored.items():
            sizes = [torch.Size(chunk["shape"]).numel() for chunk in tensor["chunks"]]
            assert sum(sizes) == torch.Size(tensor["shape"]).numel(), name


SUFFIXES = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")


@case(2, 3)
def replicas_are_stored_once() -> None:
    ranks = dist.get_world_size()
    path = shared_folder() / f"ddp-{ranks}"
    dtype, options = KINDS_OF_RUN["bf16"]
    net = make(dtype)
    optimizer = adamw(net, **options)
    wrapped = DistributedDataParallel(net)
    train(net, optimizer, *range(SAVED))
    forebay.checkpoint.save(path, wrapped, optimizer)
    found = manifest(path)
    assert all(len(tensor["chunks"]) == 1 for tensor in found["tensors"].values())
    used = sum(chunk["end"] - chunk["begin"] for tensor in found["tensors"].values() for chunk in tensor["chunks"])
    assert used == sum(value.nbytes for value in reference("bf16").values()), "each byte of one replica, no more"
    assert sum(file["bytes"] for file in found["files"]) < used + 16384 * ranks, "headers only besides"
    dist.barrier()
    for other, update in ((wrapped, optimizer), build("bf16")):
        bare = other.module if isinstance(other, DistributedDataParallel) else other
        spoil(bare, update)
        forebay.checkpoint.load(path, other, update)
        check(bare, update, reference("bf16"))
    # And what was sharded loads into replicas.
    spoil(net, optimizer)
    forebay.checkpoint.load(place("bf16", "ours", ranks), wrapped, optimizer)
    check(net, optimizer, reference("bf16"))


@case(3)
def some_of_the_ranks_save_and_load_by_themselves() -> None:
    group = dist.new_group([0, 1])
    path = shared_folder() / "some"
    if dist.get_rank() < 2:
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        net = shard(make(), mesh=mesh)
        optimizer = adamw(net)
        train(net, optimizer, *range(SAVED))
        forebay.checkpoint.save(path, net, optimizer, extra=EXTRA, process_group=group)
        spoil(net, optimizer)
        assert same_extra(forebay.checkpoint.load(path, net, optimizer, process_group=group))
        check(net, optimizer, reference("f32"))


@case(2)
def another_models_checkpoint_is_refused_before_anything_is_changed() -> None:
    net, optimizer = build("bf16")
    train(net, optimizer, *range(SAVED))
    for path in (place("placed", "ours", 2), place("f32", "ours", 2), shared_folder() / "nothing here"):
        error = refused(forebay.checkpoint.load, path, net, optimizer)
        assert isinstance(error, forebay.Error)
        assert str(path) in str(error), error
    check(net, optimizer, reference("bf16"))
    give_gradients_of(net, SAVED)
    optimizer.step()
    check(net, optimizer, reference("bf16", SAVED + 1))
