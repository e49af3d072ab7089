"""A small model with awkward sizes, its data, and ways to compare what two runs made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import forebay
from support.steps import take_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

STEPS = 4
SMALL: dict[str, Any] = {"chunk_bytes": 4096, "slots": 2}
"""A ring that cuts parameters into several chunks and reuses its slots."""


class Net(nn.Module):
    """Sizes that neither 2 nor 3 divides, and first dimensions smaller than the number of ranks."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 29)
        self.inner = nn.Linear(29, 37)
        self.outer = nn.Linear(37, 29)
        self.one = nn.Parameter(torch.randn(1, 29))  # empty on every rank but the first
        self.two = nn.Parameter(torch.randn(2, 29))  # empty on the third of three ranks
        self.head = nn.Linear(29, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        hidden = self.embed(tokens)
        hidden = hidden + self.outer(torch.tanh(self.inner(hidden))) * self.one
        return self.head(hidden + self.two[0] * self.two[1])


def make(dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> Net:
    """Return the model with the same weights at every call and on every rank."""
    torch.manual_seed(11)
    return Net(**options).to(device=device, dtype=dtype)


def shard(net: Net, **options: Any) -> Net:
    """Shard a model with FSDP2: two modules by themselves, and the rest."""
    for module in (net.inner, net.outer, net):
        fully_shard(module, **options)
    return net


def shard_on_gpu(dtype: torch.dtype = torch.float32, offload: bool = False) -> Any:
    """Return the model sharded over one GPU, its parameters there or on the host."""
    mesh = init_device_mesh("cuda", (1,))
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=True)} if offload else {}
    return shard(make(dtype, "cpu" if offload else "cuda"), mesh=mesh, **options)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Return all parameters, also frozen ones, in two groups with hyper-parameters of their own."""
    named = list(net.named_parameters())
    decay = [parameter for name, parameter in named if name.endswith("weight")]
    rest = [parameter for name, parameter in named if not name.endswith("weight")]
    return [
        {"params": decay, "lr": 1e-2, "weight_decay": 0.1},
        {"params": rest, "lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0},
    ]


def loss(net: Callable[[torch.Tensor], torch.Tensor], step: int, rank: int, device: str = "cpu") -> torch.Tensor:
    """Return the loss on a rank's own batch of a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens, labels = torch.randint(0, 11, (2, 24), generator=generator).to(device)
    return nn.functional.cross_entropy(net(tokens).float(), labels)


def backward(net: Callable[[torch.Tensor], torch.Tensor], step: int, device: str = "cpu") -> None:
    """Compute gradients on this rank's batch; whatever wraps the model averages them over ranks."""
    loss(net, step, dist.get_rank(), device).backward()


def backward_all(net: Callable[[torch.Tensor], torch.Tensor], step: int) -> None:
    """Compute in one process the gradients that ``backward`` on all ranks comes to."""
    world = dist.get_world_size()
    torch.stack([loss(net, step, rank) for rank in range(world)]).mean().backward()


def train(net: Any, optimizer: torch.optim.Optimizer, steps: range = range(STEPS), device: str = "cpu") -> None:
    """Train for some steps on this rank's batches, waiting for nothing."""
    take_steps(optimizer, steps, lambda step: backward(net, step, device), optimizer.zero_grad)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, on every rank."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def inner(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank has."""
    tensor = tensor.detach()
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def give_gradients(source: nn.Module, *targets: nn.Module) -> None:
    """Give other models, unsharded, all of a sharded model's gradients."""
    for name, parameter in source.named_parameters():
        gradient = None if parameter.grad is None else full(parameter.grad)
        for target in targets:
            place = target.get_parameter(name)
            place.grad = None if gradient is None else gradient.to(place.dtype).clone()


def parameters_of(net: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters under their names."""
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return an optimizer's state under the parameters' names."""
    return {
        f"{name}.{kind}": value
        for name, parameter in net.named_parameters()
        if parameter in optimizer.state
        for kind, value in optimizer.state[parameter].items()
    }


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], how: Any = inner) -> None:
    """Compare, bit for bit, what this rank has (``inner``) or everything (``full``)."""
    assert found.keys() == expected.keys()
    assert found, "nothing to compare"
    for name, value in found.items():
        ours, theirs = how(value), how(expected[name])
        assert ours.dtype == theirs.dtype, name
        assert ours.shape == theirs.shape, name
        assert torch.equal(ours.cpu().contiguous(), theirs.cpu().contiguous()), (
            f"{name}: {int((ours.cpu() != theirs.cpu()).sum())} of {ours.numel()} elements differ"
        )


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Compare all of two runs' tensors within a tolerance."""
    assert found, "nothing to compare"
    for name, value in expected.items():
        torch.testing.assert_close(
            full(found[name]).cpu().float(),
            full(value).cpu().float(),
            rtol=rtol,
            atol=atol,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def assert_same_on_all_ranks(tensors: Iterable[torch.Tensor]) -> None:
    """Compare plain tensors over the ranks, bit for bit."""
    for tensor in tensors:
        copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, tensor.detach().contiguous())
        assert all(torch.equal(copy, tensor) for copy in copies)


def adamw(net: nn.Module, placement: str = "stream", **options: Any) -> forebay.AdamW:
    """Return the optimizer under test, over the model's groups, with a small ring."""
    return forebay.AdamW(groups(net), placement=placement, **SMALL, **options)


def describe(tensor: DTensor, first_row: int, on_local: bool) -> ChunkStorageMetadata:
    """Describe a shard that torch cannot work out, as Megatron-FSDP does: an empty one is not written at all."""
    local = tensor._local_tensor
    chunk = ChunkStorageMetadata(offsets=torch.Size((first_row, 0)), sizes=local.shape)

    def chunk_list() -> list[ChunkStorageMetadata]:
        return [chunk]

    def write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
        if tensor.to_local().numel() == 0:
            return []
        properties = TensorProperties.create_from_tensor(tensor.to_local())
        data = TensorWriteData(chunk=chunk, properties=properties, size=tensor.size())
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    carrier: Any = local if on_local else tensor
    carrier.__create_chunk_list__ = chunk_list
    carrier.__create_write_items__ = write_items
    return chunk
