"""Which storages a model and an optimizer have, by name and kind, and where their tensors are kept.

Sleep works on storages, not on tensors: views, aliases and tied weights share one, and it travels once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from forebay.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Collection = tuple[str, str, int, Any, Iterable[tuple[str, Any, torch.Tensor | None]]]
    """Kind, prefix of names, owner's number, container, and from it the rest of each name, the key and the tensor."""

KINDS = ("parameters", "buffers", "gradients", "optimizer")
"""What can sleep, in the order in which it does."""

PLAIN = (torch.Tensor, torch.nn.Parameter)

IPC = "other processes have its memory (IPC)"
FOREIGN = "its memory is not torch's own: mapped, shared between processes or through DLPack"


class Entry:
    """One storage: what it is, and everything that holds a tensor over it."""

    __slots__ = ("_more", "address", "container", "device", "key", "kind", "name", "number", "owner", "size", "storage")

    def __init__(
        self,
        kind: str,
        name: str,
        storage: torch.UntypedStorage,
        address: int,
        size: int,
        device: int,
        owner: int,
        container: Any,
        key: Any,
    ) -> None:
        self.kind = kind
        self.name = name
        self.storage = storage
        self.address = address
        self.size = size
        self.device = device
        # Which model or optimizer, by number.
        self.owner = owner
        # Where its tensor is kept, to see whether it was replaced: a dict, list or tensor, and the key in it.
        self.container = container
        self.key = key
        # Further names and holders, of tied weights and other aliases; most have none.
        self._more: list[tuple[str, Any, Any]] | None = None
        # Its number in the slab, once it has a place there.
        self.number = -1

    def alias(self, name: str, container: Any, key: Any) -> None:
        """Note another tensor over the same storage."""
        self._more = [*(self._more or ()), (name, container, key)]

    @property
    def names(self) -> list[str]:
        """All names it is known under."""
        return [self.name, *(name for name, _, _ in self._more or ())]

    @property
    def holders(self) -> list[tuple[Any, Any]]:
        """Everything that holds a tensor over it: a container and the key in it."""
        return [(self.container, self.key), *((container, key) for _, container, key in self._more or ())]


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
    address = entry.address
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

    def is_on_gpu(self) -> bool:
        """Whether anything is on a GPU; then what is on the CPU stays there."""
        if any(parameter.get_device() >= 0 for parameter in self.parameters()):
            return True
        found = any(
            part.get_device() >= 0
            for _, _, _, _, items in self._collections()
            for _, _, tensor in items
            if tensor is not None
            for part in dense(tensor)
        )
        # What stays is noted by the walk that matters.
        self.left.clear()
        return found

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

    def _collections(self) -> Iterator[Collection]:
        """Go through everything that holds tensors."""
        count = len(self.models)
        names: dict[int, str] = {}
        gradients: list[tuple[str, int, torch.Tensor]] = []
        for owner, prefix, module in self._modules():
            own = module._parameters
            if own:
                yield "parameters", prefix, owner, own, zip(own, own, own.values(), strict=True)
                for key, parameter in own.items():
                    if parameter is None:
                        continue
                    if self.optimizers:
                        names.setdefault(id(parameter), prefix + key)
                    if parameter.grad is not None:
                        gradients.append((prefix + key, owner, parameter))
        for owner, prefix, module in self._modules():
            held = module._buffers
            if held:
                yield "buffers", prefix, owner, held, zip(held, held, held.values(), strict=True)
        of_models = set(names)
        for owner, optimizer in enumerate(self.optimizers.values(), start=count):
            for index, group in enumerate(optimizer.param_groups):
                for position, tensor in enumerate(group["params"]):
                    if id(tensor) not in names:
                        names[id(tensor)] = f"group {index}.params[{position}]"
                        if tensor.grad is not None:
                            gradients.append((names[id(tensor)], owner, tensor))
        for name, owner, tensor in gradients:
            yield "gradients", "", owner, tensor, ((name, "grad", tensor.grad),)
        for owner, (label, optimizer) in enumerate(self.optimizers.items(), start=count):
            first = f"{label}." if label else ""
            for index, (of, state) in enumerate(dict.items(optimizer.state)):
                name = f"{first}state[{names.get(id(of), index)}]"
                for inner, container, key, tensor in nested(state, name, optimizer.state, of):
                    yield "optimizer", "", owner, container, ((inner, key, tensor),)
            yield from self._in_groups(owner, first, optimizer, of_models)

    def _modules(self) -> Iterator[tuple[int, str, torch.nn.Module]]:
        """Go through all modules: the model's number, the prefix of names, and the module."""
        for owner, (label, model) in enumerate(self.models.items()):
            first = f"{label}." if label else ""
            for path, module in model.named_modules():
                yield owner, f"{first}{path}." if path else first, module

    def _in_groups(
        self, owner: int, first: str, optimizer: torch.optim.Optimizer, of_models: set[int]
    ) -> Iterator[Collection]:
        """Go through what a parameter group holds besides the models' parameters: masters, for example."""
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
                    yield "optimizer", "", owner, container, ((inner, key, tensor),)

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
        shared = shared_storages()
        # State of these is on the host already, in slabs of their own.
        optimizers = enumerate(self.optimizers.values(), start=len(self.models))
        hosts = {owner for owner, optimizer in optimizers if is_ours(optimizer)}
        for kind, prefix, owner, container, items in self._collections():
            for suffix, key, tensor in items:
                if tensor is None:
                    continue
                for part in (tensor,) if type(tensor) in PLAIN else dense(tensor):
                    device = part.get_device()
                    if (device < 0) is on_gpu:
                        continue
                    try:
                        storage = part.untyped_storage()
                    except (NotImplementedError, RuntimeError):
                        self.left.append(Left(kind, prefix + suffix, 0, f"its layout is {part.layout}"))
                        continue
                    address = storage._cdata
                    if address in seen:
                        entry = seen[address]
                        if entry is not None and address not in known:
                            entry.alias(prefix + suffix, container, key)
                        continue
                    size = storage.nbytes()
                    if device < 0 and (part.device.type != "cpu" or (part.dim() == 0 and size == part.element_size())):
                        # A meta tensor has no memory, and on the CPU a lone number, such as a step counter, stays.
                        size = 0
                    if size == 0:
                        seen[address] = None
                    elif address in shared or not storage.resizable() or (device < 0 and storage.is_shared()):
                        seen[address] = None
                        if owner not in hosts:
                            reason = FOREIGN if not storage.resizable() else IPC
                            self.left.append(Left(kind, prefix + suffix, size, reason))
                    else:
                        entry = Entry(kind, prefix + suffix, storage, address, size, device, owner, container, key)
                        seen[address] = entry
                        yield entry


def shared_storages() -> set[int]:
    """Return the addresses of storages that this process has sent to others through CUDA IPC."""
    reductions = sys.modules.get("torch.multiprocessing.reductions")
    cache = getattr(reductions, "shared_cache", None)
    return {reference.cdata for reference in list(cache.values())} if cache else set()
