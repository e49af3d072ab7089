"""Cases about state as DTensors: over the pinned memory itself, laid out as the parameter, true towards DCP."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_write_items
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import forebay
from forebay._tensors import local
from forebay.optim.second import open_second
from support.dist.models import (
    STEPS,
    adamw,
    assert_same_bits,
    backward,
    describe,
    full,
    inner,
    make,
    parameters_of,
    shard,
    state_of,
)
from support.dist.registry import case
from support.optim import move_over

KINDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")


@case(2, 3)
def state_has_the_parameters_layout_over_pinned_memory() -> None:
    net = shard(make(torch.bfloat16))
    optimizer = adamw(net, amsgrad=True)
    with mock.patch.object(DTensor, "from_local", side_effect=AssertionError("from_local moves data to the mesh")):
        optimizer.prepare()
    held = {}
    for name, parameter in net.named_parameters():
        state = optimizer.state[parameter]
        assert set(state) == {"step", *KINDS}
        assert type(state["step"]) is torch.Tensor
        for kind in KINDS:
            value = state[kind]
            assert isinstance(value, DTensor), (name, kind)
            assert value.device_mesh == parameter.device_mesh
            assert value.placements == parameter.placements
            assert value.shape == parameter.shape
            assert value.stride() == parameter.stride()
            assert value.dtype == torch.float32
            assert value._spec.tensor_meta.dtype == torch.float32
            assert not value.requires_grad
            data = value._local_tensor
            assert data.shape == parameter._local_tensor.shape
            assert data.stride() == parameter._local_tensor.stride()
            assert data.dtype == torch.float32
            assert data.untyped_storage().nbytes() == 4 * data.numel(), "a storage of its own exact size"
            assert parameter._local_tensor.dtype == torch.bfloat16
            table, index = optimizer._homes[id(parameter)]
            view = optimizer._engine.view(table, index, kind)
            if data.numel():
                assert data.data_ptr() == torch.frombuffer(view, dtype=torch.float32).data_ptr(), "no copy"
            held[name, kind] = (value, data, data.data_ptr())
    for step in range(2):
        backward(net, step)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    for name, parameter in net.named_parameters():
        for kind in KINDS:
            value, data, address = held[name, kind]
            now = optimizer.state[parameter][kind]
            assert now is value
            assert now._local_tensor is data
            assert now._local_tensor.data_ptr() == address
            if data.numel():
                assert data.count_nonzero(), f"{name} {kind}: the step wrote elsewhere"


@case(2, 3)
def state_follows_to_the_other_copy() -> None:
    nets = []
    for moves in (False, True):
        net = shard(make(torch.bfloat16))
        optimizer = adamw(net, amsgrad=True)
        optimizer.prepare()
        open_second(optimizer)
        held = {
            p: {kind: (v, local(v), local(v).data_ptr()) for kind, v in optimizer.state[p].items()}
            for p in net.parameters()
        }
        for step in range(3):
            backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
            if moves:
                move_over(optimizer)
        for parameter, values in held.items():
            for kind, (value, data, address) in values.items():
                now = optimizer.state[parameter][kind]
                assert now is value
                assert local(now) is data
                assert (data.data_ptr() != address) == (moves and kind != "step" and data.numel() > 0)
        nets.append((net, optimizer))
    assert_same_bits(*(state_of(*one) for one in nets), full)


@case(2, 3)
def state_gathers_like_the_parameter() -> None:
    """Global offsets are true: what is written by rank and row arrives there in the whole tensor."""
    net = shard(make())
    optimizer = adamw(net)
    optimizer.prepare()
    for parameter in net.parameters():
        expected = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
        chunk = _create_chunk_list(parameter)[0]
        rows = slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
        value = optimizer.state[parameter]["exp_avg"]
        assert _create_chunk_list(value) == [chunk]
        value._local_tensor.copy_(expected[rows])
        assert torch.equal(full(value), expected)


def train_placed(placements: list[Any], mesh: Any, placement: str) -> tuple[dict[str, Any], Any]:
    """Train a few hand-placed parameters with given gradients; return them with their optimizer."""
    torch.manual_seed(5)
    whole = {f"{rows}x{columns}": torch.randn(rows, columns) for rows, columns in ((7, 33), (40, 3), (1, 5))}
    parameters = {
        name: nn.Parameter(distribute_tensor(value.clone(), mesh, placements)) for name, value in whole.items()
    }
    optimizer = forebay.AdamW(list(parameters.values()), lr=1e-2, placement=placement, chunk_bytes=2048, slots=2)
    for _ in range(STEPS):
        for parameter in parameters.values():
            parameter.grad = distribute_tensor(torch.randn(parameter.shape), mesh, placements)
        optimizer.step()
    return parameters, optimizer


@case(2, 3)
def any_placement_gives_the_bits_of_the_whole() -> None:
    world = dist.get_world_size()
    line, grid = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (world, 1))
    expected, _ = train_placed([Replicate()], line, "resident")
    for mesh, placements in (
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (line, [Replicate()]),
        (grid, [Shard(0), Shard(1)]),
        (grid, [Shard(1), Replicate()]),
    ):
        for placement in ("stream", "resident"):
            parameters, optimizer = train_placed(placements, mesh, placement)
            assert_same_bits(parameters, expected, full)
            for parameter in parameters.values():
                assert optimizer.state[parameter]["exp_avg"].placements == tuple(placements)
                assert optimizer.state[parameter]["step"].item() == STEPS


@case(2, 3)
def one_norm_over_several_meshes() -> None:
    world = dist.get_world_size()
    line, grid = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (1, world))
    torch.manual_seed(6)
    layouts = [(line, [Shard(0)]), (grid, [Replicate(), Shard(1)]), (line, [Replicate()]), (None, None)]
    parameters, squares = [], 0.0
    for mesh, placements in layouts:
        value, gradient = torch.randn(5, 7), torch.randn(5, 7)
        squares += gradient.double().square().sum()
        if mesh is not None:
            value, gradient = (distribute_tensor(tensor, mesh, placements) for tensor in (value, gradient))
        parameters.append(nn.Parameter(value))
        parameters[-1].grad = gradient
    optimizer = forebay.AdamW(parameters, max_grad_norm=1.0)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm.double(), squares.sqrt(), rtol=1e-6, atol=0)
    # After one step exp_avg is (1 - beta1) times the clipped gradient.
    for parameter in parameters:
        expected = 0.1 * full(parameter.grad) / squares.sqrt().float()
        torch.testing.assert_close(full(optimizer.state[parameter]["exp_avg"]), expected, rtol=1e-5, atol=1e-7)


@case(2)
def chunk_metadata_is_carried_to_the_state() -> None:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    rows, first_row = ((6, 0), (1, 6))[rank]  # torch would cut 7 rows into 4 and 3
    for on_local in (True, False):
        for placement in ("stream", "resident"):
            data = torch.ones(rows, 5, dtype=torch.bfloat16)
            parameter = nn.Parameter(DTensor.from_local(data, mesh, [Shard(0)], shape=(7, 5), stride=(5, 1)))
            chunk = describe(parameter, first_row, on_local)
            assert _create_chunk_list(parameter) == [chunk], "the test describes shards as DCP reads them"
            parameter.grad = torch.ones_like(parameter)
            optimizer = forebay.AdamW([parameter], amsgrad=True, placement=placement)
            optimizer.step()
            state = optimizer.state[parameter]
            for kind in KINDS:
                assert state[kind].shape == (7, 5)
                assert state[kind]._local_tensor.shape == (rows, 5)
                assert _create_chunk_list(state[kind]) == [chunk], kind
                (item,) = _create_write_items(f"state.{kind}", state[kind])
                assert item.index == MetadataIndex(f"state.{kind}", torch.Size((first_row, 0)))
                assert item.tensor_data.chunk == chunk
                assert item.tensor_data.size == (7, 5)
                assert item.tensor_data.properties.dtype == torch.float32, "described as the state, not the parameter"
            assert inner(state["exp_avg"]).count_nonzero() == 5 * rows


@case(2)
def parameters_of_fsdp_may_be_described_too() -> None:
    net = shard(make())
    chunks = {}
    for name, parameter in net.named_parameters():
        if parameter.ndim == 2:
            first_row = _create_chunk_list(parameter)[0].offsets[0]
            chunks[name] = describe(parameter, first_row + 100, on_local=True)
    optimizer = adamw(net)
    backward(net, 0)
    optimizer.step()
    for name, value in state_of(net, optimizer).items():
        owner, kind = name.rsplit(".", 1)
        if owner in chunks and kind != "step":
            assert _create_chunk_list(value) == [chunks[owner]], name
    assert parameters_of(net).keys() > chunks.keys()
