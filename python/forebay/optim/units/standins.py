"""Small copies of an optimizer, on which its step can be tried out."""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from collections import OrderedDict, defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forebay._device import is_gpu
from forebay._tensors import is_dtensor, local
from forebay.errors import OptionError
from forebay.optim.units import trees
from forebay.optim.units.counters import NOT_NUMBERS, OWN_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from forebay.optim.units.parameters import Member

MOST_ELEMENTS = 32768
"""The size of a small copy: large enough for optimizers that treat very small parameters in another way."""

MOST_CONSTANT = 1024
"""A dimension of state that is no dimension of the parameter is kept if it is at most this."""

Row = tuple[int, torch.Tensor, torch.Tensor]
"""The number of a group, one of its parameters, and the small copy of that parameter."""


class UnlikeError(Exception):
    """State has no small copy: its size does not follow from that of its parameter."""


class Kind(NamedTuple):
    """What an optimizer may treat parameters by. Two of a kind are enough to show whether they are coupled."""

    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    cls: type
    trains: bool
    placed: Any
    """Mesh and placements of a DTensor."""
    gradient: tuple[Any, ...]
    """Layout and type of the gradient."""
    state: tuple[str, ...]


def raw_step(theirs: Any) -> Callable[..., Any]:
    """Return the step of a class without torch's hooks around it."""
    step: Any = theirs.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


def small(shape: Sequence[int]) -> dict[int, int]:
    """Return the size of each dimension in a small copy: all are halved until the copy is small enough."""
    sizes = {size: size for size in shape}

    def elements() -> int:
        count = 1
        for size in shape:
            count *= sizes[size]
        return count

    while elements() > MOST_ELEMENTS and any(size > 4 for size in sizes.values()):
        sizes = {size: now if now <= 4 else now // 2 for size, now in sizes.items()}
    return sizes


def kind_of(group: int, parameter: torch.Tensor, state: Any) -> Kind:
    """Return what an optimizer may treat a parameter by."""
    sizes = small(parameter.shape)
    gradient = parameter.grad
    spec: Any = (parameter.device_mesh, parameter.placements) if is_dtensor(parameter) else None  # type: ignore[attr-defined]
    return Kind(
        group,
        tuple(sizes[size] for size in parameter.shape),
        parameter.dtype,
        parameter.device,
        type(parameter),
        parameter.requires_grad,
        spec,
        (torch.strided, parameter.dtype) if gradient is None else (gradient.layout, gradient.dtype),
        tuple(sorted(map(str, state))) if isinstance(state, dict) else (),
    )


def two_of_each(members: Sequence[Member], state: Any) -> list[Member]:
    """Return at most two parameters of each kind, in order."""
    counts: dict[Kind, int] = {}
    found = []
    for group, parameter in members:
        kind = kind_of(group, parameter, dict.get(state, parameter))
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= 2:
            found.append((group, parameter))
    return found


def small_copy(parameter: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a small parameter of the same kind, with some of its values."""
    sizes = small(parameter.shape)
    shape = [sizes[size] for size in parameter.shape]
    if is_dtensor(parameter):
        from torch.distributed.tensor import zeros

        source: Any = parameter
        made: Any = zeros(shape, dtype=source.dtype, device_mesh=source.device_mesh, placements=source.placements)
        inner = made._local_tensor
        inner.copy_(random_like(inner, seed) * 0.02)
    else:
        made = parameter.detach()[tuple(slice(0, size) for size in shape)].clone()
    found: torch.Tensor = made
    if isinstance(parameter, torch.nn.Parameter):
        return torch.nn.Parameter(found, parameter.requires_grad)
    return found.requires_grad_(parameter.requires_grad)


def random_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return random numbers in the shape of a plain tensor, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    dtype = tensor.dtype if tensor.dtype.is_floating_point or tensor.dtype.is_complex else torch.float32
    numbers = torch.randn(tensor.shape, generator=generator, dtype=dtype if dtype.itemsize >= 4 else torch.float32)
    return torch.empty_like(tensor).copy_(numbers)


def small_state(tree: Any, parameter: torch.Tensor) -> Any:
    """Return small copies of a parameter's state; raise if a size does not follow from the parameter's."""
    sizes = small(parameter.shape)

    def shrink(_: trees.Path, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            raise UnlikeError
        shape = []
        for size in tensor.shape:
            if size not in sizes and size > MOST_CONSTANT:
                raise UnlikeError
            shape.append(sizes.get(size, size))
        # State of parameters on a device is on the host now, and on the device in a step.
        device = local(parameter).device if tensor.dim() else tensor.device
        return tensor[tuple(slice(0, size) for size in shape)].clone().to(device)

    return trees.replaced(copy.deepcopy({}) if tree is None else trees.copied(tree), shrink)


def copy_of(
    optimizer: torch.optim.Optimizer, theirs: Any, rows: Sequence[Row], *, state: dict[torch.Tensor, Any]
) -> Any:
    """Return a copy of an optimizer that has small parameters, and this state.

    Attributes are copied with it. A reference to a parameter becomes one to a small copy.
    """
    made = theirs.__new__(theirs)
    memo = _memo(optimizer, rows)
    memo[id(optimizer)] = made
    ids = {id(real): id(stand_in) for _, real, stand_in in rows}
    for name, value in vars(optimizer).items():
        if name in NOT_NUMBERS or (callable(value) and hasattr(theirs, name)):
            continue
        vars(made)[name] = _copied_attribute(name, value, memo, ids, optimizer)
    for name in NOT_NUMBERS:
        if name.endswith("_hooks"):
            vars(made)[name] = OrderedDict()
    others = {key: value for key, value in dict.items(optimizer.state) if not isinstance(key, torch.Tensor)}
    made.state = defaultdict(dict, copy.deepcopy(others, memo))
    made.state.update(state)
    made.param_groups = _groups(optimizer, rows, memo)
    return made


def constructed(optimizer: torch.optim.Optimizer, theirs: Any, rows: Sequence[Row]) -> Any:
    """Return a new optimizer of the class with small parameters, for classes whose constructor makes state."""
    takes = inspect.signature(theirs).parameters
    groups = _groups(optimizer, rows, _memo(optimizer, rows))
    made = theirs(groups, **{name: value for name, value in optimizer.defaults.items() if name in takes})
    for group, options in zip(made.param_groups, groups, strict=True):
        group.update({key: value for key, value in options.items() if key not in OWN_KEYS})
    return made


def _memo(optimizer: torch.optim.Optimizer, rows: Sequence[Row]) -> dict[int, Any]:
    memo: dict[int, Any] = {id(real): stand_in for _, real, stand_in in rows}
    for group, of_group in enumerate(optimizer.param_groups):
        own = [stand_in for index, _, stand_in in rows if index == group] or [rows[0][2]]
        for parameter in of_group["params"]:
            # Any small copy: this one only keeps a reference from copying the parameter itself.
            memo.setdefault(id(parameter), own[0])
    return memo


def _groups(optimizer: torch.optim.Optimizer, rows: Sequence[Row], memo: dict[int, Any]) -> list[dict[str, Any]]:
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        options = {key: copy.deepcopy(value, memo) for key, value in group.items() if key not in OWN_KEYS}
        own = [stand_in for number, _, stand_in in rows if number == index]
        names = {"param_names": [f"small.{index}.{i}" for i in range(len(own))]} if "param_names" in group else {}
        groups.append({"params": own, **names, **options})
    return groups


def _copied_attribute(
    name: str, value: Any, memo: dict[int, Any], ids: dict[int, int], optimizer: torch.optim.Optimizer
) -> Any:
    if isinstance(value, torch.optim.Optimizer) and value is not optimizer:
        raise OptionError(
            f"{type(optimizer).__qualname__} has another optimizer in {name}; offload that one, before it is wrapped"
        )
    if isinstance(value, torch.Generator):
        made = torch.Generator(device=value.device)
        made.set_state(value.get_state())
        return made
    if isinstance(value, dict) and any(isinstance(key, int) and key in ids for key in value):
        # Some optimizers know their parameters by id().
        value = {ids.get(key, key) if isinstance(key, int) else key: item for key, item in value.items()}
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, RuntimeError) as error:
        if type(value).__module__.startswith("torch.distributed") or "ProcessGroup" in type(value).__name__:
            return value
        raise OptionError(
            f"{type(optimizer).__qualname__} cannot be tried out on a small copy: its attribute {name} cannot be "
            f"copied ({error}); give it a __deepcopy__, or keep this optimizer as it is"
        ) from error


@contextmanager
def undisturbed(devices: set[torch.device]) -> Iterator[None]:
    """Within this context nothing is warned of. At its end, generators of random numbers are as before."""
    before = random_state(devices)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        set_random_state(before)


def random_state(devices: set[torch.device]) -> list[tuple[Any, Any]]:
    """Return the state of Python's generator and of torch's, on the host and on these devices."""
    found: list[tuple[Any, Any]] = [("python", random.getstate()), ("host", torch.get_rng_state())]
    for device in devices:
        if is_gpu(device) and hasattr(module := torch.get_device_module(device), "get_rng_state"):
            found.append((device, module.get_rng_state(device)))
    return found


def set_random_state(state: list[tuple[Any, Any]]) -> None:
    """Set the generators back to a state of ``random_state``."""
    for where, value in state:
        if where == "python":
            random.setstate(value)
        elif where == "host":
            torch.set_rng_state(value)
        else:
            torch.get_device_module(where).set_rng_state(value, where)
