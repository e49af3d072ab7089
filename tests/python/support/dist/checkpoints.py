"""Runs whose outcome does not depend on the number of ranks, to save and load on any of them.

Gradients are given by name and step, and AdamW works element by element: a run in one process, without any sharding,
has the bits that every rank must find in its shards.
"""

from __future__ import annotations

import functools
import json
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from support.dist.models import SMALL, adamw, backward, describe, groups, inner, make, shard
from support.dist.registry import shared_folder
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import forebay
from support.steps import take_steps

if TYPE_CHECKING:
    from pathlib import Path

SAVED = 2
"""Steps before a save."""

UNEVEN_ROWS = {1: (7,), 2: (6, 1), 3: (4, 0, 3)}
"""Rows of a hand-made shard by rank; torch would cut 7 rows into 4 and 3, and into 3, 3 and 1."""


class Placed(nn.Module):
    """Parameters that are sharded by hand, in every way there is; without a mesh, the same ones whole."""

    def __init__(self, dtype: torch.dtype, mesh: Any = None) -> None:
        super().__init__()
        torch.manual_seed(12)
        whole = {name: torch.randn(7, 5).to(dtype) for name in ("rows", "columns", "copies", "turned", "own", "inner")}
        self.first_row = 0
        if mesh is None:
            for name, value in whole.items():
                self.register_parameter(f"{name}_weight", nn.Parameter(value))
            return
        rows, rank = UNEVEN_ROWS[mesh.size()], dist.get_rank()
        self.first_row = sum(rows[:rank])
        layouts = (("rows", [Shard(0)]), ("columns", [Shard(1)]), ("copies", [Replicate()]))
        for name, placements in layouts:
            self.register_parameter(f"{name}_weight", nn.Parameter(distribute_tensor(whole[name], mesh, placements)))
        # Column by column in memory, whereas files hold rows.
        part = inner(distribute_tensor(whole["turned"], mesh, [Shard(0)]))
        turned = part.t().contiguous().t()
        self.register_parameter("turned_weight", nn.Parameter(self._wrap(turned, mesh, (1, 7))))
        for name in ("own", "inner"):
            part = whole[name][self.first_row : self.first_row + rows[rank]].clone()
            parameter = nn.Parameter(self._wrap(part, mesh, (5, 1)))
            describe(parameter, self.first_row, on_local=name == "inner")
            self.register_parameter(f"{name}_weight", parameter)

    @staticmethod
    def _wrap(part: torch.Tensor, mesh: Any, stride: tuple[int, int]) -> DTensor:
        return DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=torch.Size((7, 5)), stride=stride)


KINDS_OF_RUN: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "f32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {"amsgrad": True}),
    "placed": (torch.bfloat16, {"amsgrad": True}),
    "compact": (torch.bfloat16, {"amsgrad": True, "master_weights": "compact"}),
}
"""Models, with their type and options; two groups of parameters each."""


def build(kind: str, placement: str = "stream") -> tuple[Any, forebay.AdamW]:
    """Return a model that is sharded over all ranks, and its optimizer."""
    dtype, options = KINDS_OF_RUN[kind]
    if kind == "placed":
        net: Any = Placed(dtype, init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        net = shard(make(dtype))
    return net, optimizer_of(net, placement, **options)


def build_torch(kind: str) -> tuple[Any, torch.optim.AdamW]:
    """Return the same with torch's optimizer."""
    net, _ = build(kind)
    return net, torch.optim.AdamW(groups(net), **KINDS_OF_RUN[kind][1])


def optimizer_of(net: Any, placement: str = "stream", **options: Any) -> forebay.AdamW:
    """Return the optimizer under test over two groups, whatever the model."""
    if not isinstance(net, Placed):
        return adamw(net, placement, **options)
    first, *rest = net.parameters()
    two = [{"params": [first], "lr": 1e-2}, {"params": rest, "lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.0}]
    return forebay.AdamW(two, placement=placement, **SMALL, **options)


def box(parameter: torch.Tensor) -> tuple[slice, ...]:
    """Return which part of a whole parameter this rank has."""
    (chunk,) = _create_chunk_list(parameter)
    return tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))


def give_gradients_of(net: Any, step: int) -> None:
    """Give every parameter its gradient of a step, or this rank's part of it."""
    for name, parameter in net.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        part = torch.empty_like(inner(parameter)).copy_(whole[box(parameter)])
        if isinstance(parameter, DTensor):
            meta = {"shape": parameter.shape, "stride": parameter.stride()}
            part = DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False, **meta)
        parameter.grad = part


def train(net: Any, optimizer: torch.optim.Optimizer, *steps: int) -> None:
    """Train on the given gradients of some steps."""
    take_steps(optimizer, steps, lambda step: give_gradients_of(net, step), optimizer.zero_grad)


def values_of(net: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return weights and state under the model's names."""
    found = {name: parameter.detach() for name, parameter in net.named_parameters()}
    for name, parameter in net.named_parameters():
        found.update({f"{name}.{key}": value for key, value in optimizer.state[parameter].items()})
    return found


@functools.cache
def reference(kind: str, steps: int = SAVED) -> dict[str, torch.Tensor]:
    """Return what weights and state are after some steps of one process, whole."""
    dtype, options = KINDS_OF_RUN[kind]
    net: Any = Placed(dtype) if kind == "placed" else make(dtype)
    optimizer = optimizer_of(net, "resident", **options)
    train(net, optimizer, *range(steps))
    return {name: value.clone() for name, value in values_of(net, optimizer).items()}


def check(net: Any, optimizer: torch.optim.Optimizer, expected: dict[str, torch.Tensor]) -> None:
    """Compare this rank's part of everything with the run of one process, bit for bit."""
    found = values_of(net, optimizer)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, parameter in net.named_parameters():
        for key, value in found.items():
            if key != name and key.rpartition(".")[0] != name:
                continue
            whole = expected[key]
            part = whole[box(parameter)] if whole.dim() else whole
            assert inner(value).dtype == part.dtype, key
            assert inner(value).shape == part.shape, key
            assert torch.equal(inner(value), part), f"{key}: not this rank's part of the whole"


def spoil(net: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Make weights, state and rates wrong, so that loading has to replace them; return where the tensors are."""
    train(net, optimizer, 77, 78, 79)
    for group in optimizer.param_groups:
        group["lr"] *= 7
    return addresses(net, optimizer)


def addresses(net: Any, optimizer: Any) -> dict[str, int]:
    """Return where the tensors are, on this rank. Compact masters are copies."""
    options = getattr(optimizer, "_options", None)
    copies = ".master_param" if options is not None and options.has_compact_masters else " "
    found = values_of(net, optimizer).items()
    return {name: inner(value).data_ptr() for name, value in found if not name.endswith(copies)}


def one_more_step(net: Any, optimizer: torch.optim.Optimizer, step: int = SAVED) -> None:
    """Train on, with the model's own gradients where it has a forward."""
    if isinstance(net, Placed):
        train(net, optimizer, step)
        return
    backward(net, step)
    optimizer.step()
    optimizer.zero_grad()


def state_for_dcp(net: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict that is given to DCP.

    A module's state dict has new tensors, without what describes uneven shards: whoever makes such parameters
    describes these again. The optimizer's state is described by the optimizer.
    """
    model, state = get_state_dict(net, optimizer)
    if isinstance(net, Placed):
        for name in ("own_weight", "inner_weight"):
            describe(model[name], net.first_row, on_local=True)
    return {"model": model, "optimizer": state}


def set_from_dcp(net: Any, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Hand back what DCP has loaded."""
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def place(kind: str, how: str, ranks: int) -> Path:
    """Return where a number of ranks saved a kind of run in some way."""
    return shared_folder() / f"{kind}-{how}-{ranks}"


def refused(function: Any, *arguments: Any, **options: Any) -> BaseException:
    """Return the error with which something ends; DCP's own is no ``Exception``."""
    try:
        function(*arguments, **options)
    except (Exception, CheckpointException) as error:
        return error
    raise AssertionError("no error")


def everywhere(value: Any) -> list[Any]:
    """Return what every rank has."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a path's last checkpoint."""
    latest = max(path.parent for path in folder.glob("*/manifest.json"))
    found: dict[str, Any] = json.loads((latest / "manifest.json").read_text())
    return found
