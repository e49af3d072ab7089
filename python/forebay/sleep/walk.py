"""Which storages a model and an optimizer have, by name and kind, and which objects hold tensors over them.

Sleep works on storages, not on tensors: views, aliases and tied weights share one storage, which moves once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from forebay._device import is_cpu
from forebay._wrapped import members
from forebay.errors import OptionError

KINDS = ("parameters", "buffers", "gradients", "optimizer")
"""The kinds of storages that can sleep, in the order in which they are moved."""

PLAIN = (torch.Tensor, torch.nn.Parameter)

IPC = "other processes have its memory (IPC)"
FOREIGN = "its memory is not torch's own: mapped, shared between processes or through DLPack"


class Collection(NamedTuple):
    """Tensors in one container."""

    kind: str
    prefix: str
    """The beginning of the tensors' names."""
    owner: int
    """The number of the model or optimizer."""
    container: Any
    items: Iterable[tuple[str, Any, torch.Tensor | None]]
    """The rest of each name, the key in the container, and the tensor."""


class StorageEntry:
    """One storage: its properties, and everything that holds a tensor over it."""

    __slots__ = (
        "_more",
        "container",
        "device",
        "identity",
        "key",
        "kind",
        "name",
        "number",
        "owner",
        "size",
        "storage",
    )

    def __init__(
        self,
        kind: str,
        name: str,
        storage: torch.UntypedStorage,
        identity: int,
        size: int,
        device: int,
        owner: int,
        container: Any,
        key: Any,
    ) -> None:
        self.kind = kind
        self.name = name
        self.storage = storage
        # Of the storage object, which stays when its memory is freed.
        self.identity = identity
        self.size = size
        self.device = device
        # The number of the model or optimizer.
        self.owner = owner
        # What holds its tensor, to see whether it was replaced: a dict, list or tensor, and the key in it.
        self.container = container
        self.key = key
        # Further names and holders, for tied weights and other aliases; most storages have none.
        self._more: list[tuple[str, Any, Any]] | None = None
        # Its number in the slabs, once it has one.
        self.number = -1

    def alias(self, name: str, container: Any, key: Any) -> None:
        """Record another tensor over the same storage."""
        self._more = [*(self._more or ()), (name, container, key)]

    @property
    def names(self) -> list[str]:
        """All names of the storage."""
        return [self.name, *(name for name, _, _ in self._more or ())]

    @property
    def holders(self) -> list[tuple[Any, Any]]:
        """Everything that holds a tensor over it: a container and the key in it."""
        return [(self.container, self.key), *((container, key) for _, container, key in self._more or ())]


@dataclass(slots=True)
class Left:
    """A storage that does not sleep, and the reason."""

    kind: str
    name: str
    size: int
    reason: str


def named(things: Any, what: str, base: type) -> dict[str, Any]:
    """Return models or optimizers by name; a single one has the empty name."""
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


def named_optimizers(things: Any) -> dict[str, torch.optim.Optimizer]:
    """Return optimizers by name, without the wrappers of frameworks around them."""
    if isinstance(things, dict):
        found = {name: members(one) for name, one in things.items()}
        things = {f"{name}.{i}" if i else name: one for name, inner in found.items() for i, one in enumerate(inner)}
    elif isinstance(things, (list, tuple)):
        things = [one for thing in things for one in members(thing)]
    elif things is not None:
        inner = members(things)
        things = inner[0] if len(inner) == 1 else inner
    return named(things, "optimizer", torch.optim.Optimizer)


def dense(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with the bytes: a DTensor's local tensor, the parts of a wrapper, or the tensor itself."""
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
    """Return what a holder holds now; None if nothing."""
    container, key = holder
    if isinstance(container, torch.Tensor):
        return container.grad
    try:
        return dict.get(container, key) if isinstance(container, dict) else container[key]
    except (IndexError, KeyError):
        return None


def is_held(entry: StorageEntry) -> bool | None:
    """Whether some holder still has a tensor over the storage; None for a gradient that was dropped."""
    dropped = entry.kind == "gradients"
    for holder in entry.holders:
        found = current(holder)
        if isinstance(found, torch.Tensor):
            dropped = False
            for tensor in dense(found):
                try:
                    if tensor.untyped_storage()._cdata == entry.identity:
                        return True
                except (NotImplementedError, RuntimeError):
                    continue
    return None if dropped else False


def nested(value: Any, name: str, container: Any, key: Any) -> Iterator[tuple[str, Any, Any, torch.Tensor]]:
    """Go through the tensors in nested dicts, lists and tuples: name, container, key and tensor."""
    if isinstance(value, torch.Tensor):
        yield name, container, key, value
    elif isinstance(value, dict):
        for inner, item in dict.items(value):
            yield from nested(item, f"{name}.{inner}" if isinstance(inner, str) else f"{name}[{inner}]", value, inner)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from nested(item, f"{name}[{index}]", value, index)


def reshard(model: torch.nn.Module) -> None:
    """Make FSDP2 free its gathered parameters: only the shards sleep."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", None)
    if sharded is not None:
        for module in model.modules():
            if isinstance(module, sharded):
                module.reshard()


def is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is forebay's: it has a ring on the device, and stores may be running."""
    return hasattr(optimizer, "_release_ring")


def kinds_of(what: Iterable[str] | str) -> set[str]:
    """Return the kinds that a caller names."""
    asked = [what] if isinstance(what, str) else list(what)
    for kind in asked:
        if kind not in KINDS:
            raise OptionError(f"invalid what: {kind!r}; use any of {', '.join(map(repr, KINDS))}")
    return set(asked)


class Walk:
    """One walk through everything that models and optimizers hold."""

    def __init__(self, models: dict[str, torch.nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> None:
        self.models, self.optimizers = models, optimizers
        self.left: list[Left] = []
        # The state of these is on the host already, in slabs of their own.
        owners = enumerate(optimizers.values(), start=len(models))
        self._hosts = {owner for owner, optimizer in owners if is_ours(optimizer)}

    def is_on_gpu(self) -> bool:
        """Whether anything is on a GPU; then tensors on the CPU stay there."""
        if any(parameter.get_device() >= 0 for parameter in self.parameters()):
            return True
        found = any(
            part.get_device() >= 0
            for collection in self._collections()
            for _, _, tensor in collection.items
            if tensor is not None
            for part in dense(tensor)
        )
        # `entries` records these again.
        self.left.clear()
        return found

    def parameters(self) -> Iterator[torch.Tensor]:
        """Go through all parameters of models and optimizers; some appear twice."""
        for model in self.models.values():
            for module in model.modules():
                for parameter in module._parameters.values():
                    if parameter is not None:
                        yield parameter
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _collections(self) -> Iterator[Collection]:
        """Go through everything that holds tensors, in the order of ``KINDS``."""
        names: dict[int, str] = {}
        gradients: list[tuple[str, int, torch.Tensor]] = []
        yield from self._parameters(names, gradients)
        for owner, prefix, module in self._modules():
            held = module._buffers
            if held:
                yield Collection("buffers", prefix, owner, held, zip(held, held, held.values(), strict=True))
        of_models = set(names)
        self._name_others(names, gradients)
        for name, owner, tensor in gradients:
            yield Collection("gradients", "", owner, tensor, ((name, "grad", tensor.grad),))
        for owner, (label, optimizer) in enumerate(self.optimizers.items(), start=len(self.models)):
            first = f"{label}." if label else ""
            for index, (of, state) in enumerate(dict.items(optimizer.state)):
                name = f"{first}state[{names.get(id(of), index)}]"
                for inner, container, key, tensor in nested(state, name, optimizer.state, of):
                    yield Collection("optimizer", "", owner, container, ((inner, key, tensor),))
            yield from self._in_groups(owner, first, optimizer, of_models)

    def _parameters(
        self, names: dict[int, str], gradients: list[tuple[str, int, torch.Tensor]]
    ) -> Iterator[Collection]:
        """Go through the models' parameters; record their names and the ones with gradients."""
        for owner, prefix, module in self._modules():
            own = module._parameters
            if not own:
                continue
            yield Collection("parameters", prefix, owner, own, zip(own, own, own.values(), strict=True))
            for key, parameter in own.items():
                if parameter is None:
                    continue
                if self.optimizers:
                    names.setdefault(id(parameter), prefix + key)
                if parameter.grad is not None:
                    gradients.append((prefix + key, owner, parameter))

    def _name_others(self, names: dict[int, str], gradients: list[tuple[str, int, torch.Tensor]]) -> None:
        """Record names and gradients of the optimizers' parameters that are in no model."""
        for owner, optimizer in enumerate(self.optimizers.values(), start=len(self.models)):
            for index, group in enumerate(optimizer.param_groups):
                for position, tensor in enumerate(group["params"]):
                    if id(tensor) not in names:
                        names[id(tensor)] = f"group {index}.params[{position}]"
                        if tensor.grad is not None:
                            gradients.append((names[id(tensor)], owner, tensor))

    def _modules(self) -> Iterator[tuple[int, str, torch.nn.Module]]:
        """Go through all modules: the model's number, the beginning of the names, and the module."""
        for owner, (label, model) in enumerate(self.models.items()):
            first = f"{label}." if label else ""
            for path, module in model.named_modules():
                yield owner, f"{first}{path}." if path else first, module

    def _in_groups(
        self, owner: int, first: str, optimizer: torch.optim.Optimizer, of_models: set[int]
    ) -> Iterator[Collection]:
        """Go through the tensors of parameter groups that are in no model, such as master weights."""
        for index, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                for inner, container, key, tensor in nested(value, f"{first}group {index}.{name}", group, name):
                    # A learning rate is a single number, and schedulers write to it.
                    if tensor.dim() == 0 or id(tensor) in of_models:
                        continue
                    if name == "params" and (isinstance(tensor, torch.nn.Parameter) or not self.models):
                        # Its model was not given, so its forward would have no guard.
                        self._leave("optimizer", inner, tensor, "a parameter of no model of this sleeper")
                        continue
                    yield Collection("optimizer", "", owner, container, ((inner, key, tensor),))

    def _leave(self, kind: str, name: str, tensor: torch.Tensor, reason: str) -> None:
        for part in dense(tensor):
            if part.device.type != "meta" and part.layout == torch.strided:
                self.left.append(Left(kind, name, part.untyped_storage().nbytes(), reason))

    def entries(self, *, on_gpu: bool, known: Callable[[int], bool]) -> Iterator[StorageEntry]:
        """Go through all storages that can sleep, each once.

        Parameters
        ----------
        on_gpu
            Whether there are tensors on a GPU; then those on the CPU stay.
        known
            Whether the storage with an identity sleeps already; such storages are left out.
        """
        seen: dict[int, StorageEntry | None] = {}
        shared = shared_storages()
        for kind, prefix, owner, container, items in self._collections():
            for suffix, key, tensor in items:
                if tensor is None:
                    continue
                for part in (tensor,) if type(tensor) in PLAIN else dense(tensor):
                    device = part.get_device()
                    if (device < 0) is on_gpu:
                        continue
                    name = prefix + suffix
                    try:
                        storage = part.untyped_storage()
                    except (NotImplementedError, RuntimeError):
                        self.left.append(Left(kind, name, 0, f"its layout is {part.layout}"))
                        continue
                    identity = storage._cdata
                    if identity in seen:
                        entry = seen[identity]
                        if entry is not None:
                            entry.alias(name, container, key)
                        continue
                    seen[identity] = None
                    if known(identity) or not (size := _size(part, storage)):
                        continue
                    if reason := _reason_to_stay(part, storage, shared):
                        if owner not in self._hosts:
                            self.left.append(Left(kind, name, size, reason))
                        continue
                    entry = StorageEntry(kind, name, storage, identity, size, device, owner, container, key)
                    seen[identity] = entry
                    yield entry


def _size(tensor: torch.Tensor, storage: torch.UntypedStorage) -> int:
    """Return the bytes of a storage that could sleep; 0 if there are none."""
    size = storage.nbytes()
    if tensor.get_device() < 0:
        # A meta tensor has no memory, and on the CPU a single number, such as a step counter, stays.
        is_number = tensor.dim() == 0 and size == tensor.element_size()
        return 0 if not is_cpu(tensor.device) or is_number else size
    return size


def _reason_to_stay(tensor: torch.Tensor, storage: torch.UntypedStorage, shared: set[int]) -> str | None:
    """Return why a storage cannot be emptied; None if it can."""
    if not storage.resizable():
        return FOREIGN
    if storage._cdata in shared or (tensor.get_device() < 0 and storage.is_shared()):
        return IPC
    return None


def shared_storages() -> set[int]:
    """Return the identities of storages that this process has sent to others by IPC."""
    reductions = sys.modules.get("torch.multiprocessing.reductions")
    cache = getattr(reductions, "shared_cache", None)
    return {reference.cdata for reference in list(cache.values())} if cache else set()
