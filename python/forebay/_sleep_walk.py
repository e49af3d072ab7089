"""Which storages a model and an optimizer have, by name and kind, and where their tensors are kept.

Sleep works on storages, not on tensors: views, aliases and tied weights share one, and it travels once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("parameters", "buffers", "gradients", "optimizer")
"""What can sleep, in the order in which it does."""

PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(slots=True, eq=False)
class Entry:
    """One storage: what it is, and everything that holds a tensor over it."""

    kind: str
    name: str
    storage: torch.UntypedStorage
    size: int
    device: int
    # Which model or optimizer, by number.
    owner: int
    # Where its tensors are kept, to see whether they were replaced: a dict, list or tensor, and the key in it.
    holders: list[tuple[Any, Any]]
    aliases: list[str] = field(default_factory=list)
    # Its number in the slab, once it has a place there.
    number: int = -1

    @property
    def names(self) -> list[str]:
        """All names it is known under."""
        return [self.name, *self.aliases]


@dataclass(slots=True)
class Left:
    """A storage that stays where it is, and why."""

    kind: str
    name: str
    size: int
    reason: str


def named(things: Any, what: str, base: type) -> dict[str, Any]:
    """Return models or optimizers by name; one of them alone has the empty name."""
    if things is None:
        return {}
    if isinstance(things, base):
        return {"": things}
    if isinstance(things, dict):
        found = {str(name): thing for name, thing in things.items()}
    elif isinstance(things, (list, tuple)):
        found = {str(index): thing for index, thing in enumerate(things)}
    else:
        found = {"": things}
    for name, thing in found.items():
        if not isinstance(thing, base):
            raise OptionError(
                f"{what} {name!r} is a {type(thing).__name__}; give a {base.__module__}.{base.__qualname__}, "
                "or a list or dict of them"
            )
    return found


def dense(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that have the bytes: a DTensor's local one, the parts of a wrapper, or the tensor itself."""
    if type(tensor) in PLAIN:
        return (tensor,)
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return (tensor,)
    found: list[torch.Tensor] = []
    for name in flatten()[0]:
        found.extend(dense(getattr(tensor, name)))
    return tuple(found)


def current(holder: tuple[Any, Any]) -> Any:
    """Return what a holder holds now; None where it holds nothing."""
    container, key = holder
    if isinstance(container, torch.Tensor):
        return container.grad
    try:
        return dict.get(container, key) if isinstance(container, dict) else container[key]
    except (IndexError, KeyError):
        return None


def is_held(entry: Entry) -> bool | None:
    """Whether some holder still has a tensor over the storage; None where a gradient was simply dropped."""
    address = entry.storage._cdata
    dropped = entry.kind == "gradients"
    for holder in entry.holders:
        found = current(holder)
        if isinstance(found, torch.Tensor):
            dropped = False
            for tensor in dense(found):
                try:
                    if tensor.untyped_storage()._cdata == address:
                        return True
                except (NotImplementedError, RuntimeError):
                    continue
    return None if dropped else False


def nested(value: Any, name: str, container: Any, key: Any) -> Iterator[tuple[str, Any, Any, torch.Tensor]]:
    """Go through the tensors in a value, however deep in dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield name, container, key, value
    elif isinstance(value, dict):
        for inner, item in dict.items(value):
            yield from nested(item, f"{name}.{inner}" if isinstance(inner, str) else f"{name}[{inner}]", value, inner)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from nested(item, f"{name}[{index}]", value, index)


def reshard(model: torch.nn.Module) -> None:
    """Let FSDP2 give its gathered parameters back: the shards are what sleeps."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", None)
    if sharded is not None:
        for module in model.modules():
            if isinstance(module, sharded):
                module.reshard()


def is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is forebay's, with a ring on the device and stores that may be under way."""
    return hasattr(optimizer, "_release_ring")


class Walk:
    """One look at everything that models and optimizers hold."""

    def __init__(self, models: dict[str, torch.nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> None:
        self.models, self.optimizers = models, optimizers
        self.left: list[Left] = []

    def parameters(self) -> Iterator[torch.Tensor]:
        """Go through all parameters of models and optimizers; some come twice."""
        for model in self.models.values():
            for module in model.modules():
                for parameter in module._parameters.values():
                    if parameter is not None:
                        yield parameter
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def members(self) -> Iterator[tuple[str, str, int, Any, Any, torch.Tensor]]:
        """Go through all tensors: kind, name, owner's number, container, key and the tensor."""
        parameters: dict[int, tuple[str, int, torch.Tensor]] = {}
        for owner, (label, model) in enumerate(self.models.items()):
            first = f"{label}." if label else ""
            for path, module in model.named_modules():
                prefix = f"{first}{path}." if path else first
                for key, parameter in module._parameters.items():
                    if parameter is not None:
                        name = prefix + key
                        parameters.setdefault(id(parameter), (name, owner, parameter))
                        yield "parameters", name, owner, module._parameters, key, parameter
        for owner, (label, model) in enumerate(self.models.items()):
            first = f"{label}." if label else ""
            for path, module in model.named_modules():
                prefix = f"{first}{path}." if path else first
                for key, buffer in module._buffers.items():
                    if buffer is not None:
                        yield "buffers", prefix + key, owner, module._buffers, key, buffer
        count = len(self.models)
        for owner, optimizer in enumerate(self.optimizers.values(), start=count):
            for index, group in enumerate(optimizer.param_groups):
                for position, parameter in enumerate(group["params"]):
                    known = (f"group {index}[{position}]", owner, parameter)
                    parameters.setdefault(id(parameter), known)
        for name, owner, parameter in parameters.values():
            if parameter.grad is not None:
                yield "gradients", name, owner, parameter, "grad", parameter.grad
        of_models = {key for key, (_, owner, _) in parameters.items() if owner < count}
        for owner, (label, optimizer) in enumerate(self.optimizers.items(), start=count):
            first = f"{label}." if label else ""
            yield from self._state(owner, first, optimizer, parameters)
            yield from self._groups(owner, first, optimizer, of_models)

    def _state(
        self,
        owner: int,
        first: str,
        optimizer: torch.optim.Optimizer,
        parameters: dict[int, tuple[str, int, torch.Tensor]],
    ) -> Iterator[tuple[str, str, int, Any, Any, torch.Tensor]]:
        for index, (parameter, state) in enumerate(dict.items(optimizer.state)):
            known = parameters.get(id(parameter))
            name = f"{first}state[{known[0] if known else index}]"
            for inner, container, key, tensor in nested(state, name, optimizer.state, parameter):
                yield "optimizer", inner, owner, container, key, tensor

    def _groups(
        self, owner: int, first: str, optimizer: torch.optim.Optimizer, of_models: set[int]
    ) -> Iterator[tuple[str, str, int, Any, Any, torch.Tensor]]:
        for index, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                for inner, container, key, tensor in nested(value, f"{first}group {index}.{name}", group, name):
                    # A learning rate is a lone number, and schedulers write to it.
                    if tensor.dim() == 0 or id(tensor) in of_models:
                        continue
                    if name == "params" and (isinstance(tensor, torch.nn.Parameter) or not self.models):
                        # Its model was not given, so nobody would guard its forward.
                        self._leave("optimizer", inner, tensor, "a parameter of no model of this sleeper")
                        continue
                    yield "optimizer", inner, owner, container, key, tensor

    def _leave(self, kind: str, name: str, tensor: torch.Tensor, reason: str) -> None:
        for part in dense(tensor):
            if part.device.type != "meta" and part.layout == torch.strided:
                self.left.append(Left(kind, name, part.untyped_storage().nbytes(), reason))

    def entries(self, *, on_gpu: bool, known: dict[int, Entry]) -> Iterator[Entry]:
        """Go through all storages that can sleep, each once.

        Parameters
        ----------
        on_gpu
            Whether there are tensors on a GPU; then those on the CPU stay.
        known
            Storages that sleep already, by address; they are passed over.
        """
        seen: dict[int, Entry | None] = dict(known)
        shared: set[int] | None = None
        # State of these is on the host already, in slabs of their own.
        hosts = {
            owner
            for owner, optimizer in enumerate(self.optimizers.values(), start=len(self.models))
            if is_ours(optimizer)
        }
        for kind, name, owner, container, key, tensor in self.members():
            for part in (tensor,) if type(tensor) in PLAIN else dense(tensor):
                device = part.get_device()
                if (device < 0) is on_gpu:
                    continue
                try:
                    storage = part.untyped_storage()
                except (NotImplementedError, RuntimeError):
                    size = part.element_size() * part._nnz() if part.is_sparse else 0
                    self.left.append(Left(kind, name, size, f"its layout is {part.layout}"))
                    continue
                address = storage._cdata
                if address in seen:
                    entry = seen[address]
                    if entry is not None and address not in known:
                        entry.holders.append((container, key))
                        entry.aliases.append(name)
                    continue
                size = storage.nbytes()
                # On the CPU a lone number, such as a step counter, stays; and a meta tensor has no memory.
                lone = device < 0 and part.dim() == 0 and size == part.element_size()
                if size == 0 or lone or (device < 0 and part.device.type != "cpu"):
                    seen[address] = None
                    continue
                if shared is None:
                    shared = shared_storages()
                if address in shared:
                    reason = "other processes have its memory (IPC)"
                elif not storage.resizable():
                    if owner in hosts:
                        seen[address] = None
                        continue
                    reason = "its memory is not torch's own: mapped, shared between processes or through DLPack"
                else:
                    entry = Entry(kind, name, storage, size, device, owner, [(container, key)])
                    seen[address] = entry
                    yield entry
                    continue
                seen[address] = None
                self.left.append(Left(kind, name, size, reason))


def shared_storages() -> set[int]:
    """Return the addresses of storages that this process has sent to others through CUDA IPC."""
    reductions = sys.modules.get("torch.multiprocessing.reductions")
    cache = getattr(reductions, "shared_cache", None)
    return {reference.cdata for reference in list(cache.values())} if cache else set()
