"""Replay: a recomputed layer reuses the saved results of a few operations.

Torch's checkpoint recomputes everything that a layer saves. Here two dispatch modes run inside the checkpoint. One
saves the results of chosen operations in the forward pass. The other returns them when the same operations run again.
An operation whose saved result cannot be used (another shape, changed in place, a second backward pass) is computed
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from forebay import _device
from forebay.activations.saved import SavedTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.activations.saved import UnmanagedTensor

_WRITES: dict[Any, tuple[int | str, ...] | None] = {}
_VIEWS: dict[Any, bool] = {}


class Key(NamedTuple):
    """An operation inside a layer: its function, the types of its tensors, and how many like it came before.

    The key has no sizes, so that plans can be used for other sizes too.
    """

    func: Any
    kinds: tuple[Any, ...]
    number: int

    def __str__(self) -> str:
        """Return its name."""
        return f"{self.func}#{self.number}"


def next_key(counts: dict[tuple[Any, ...], int], func: Any, args: tuple[Any, ...]) -> Key:
    """Return an operation's key. The probe and both modes use this function, so that they count in the same way."""
    kinds: list[Any] = []
    for arg in args:
        for one in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(one, torch.Tensor):
                kinds.append((one.dtype, one.dim()))
    alike = (func, tuple(kinds))
    number = counts.get(alike, 0)
    counts[alike] = number + 1
    return Key(*alike, number)


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return an operation's arguments: types and shapes of tensors, and numbers and names as they are."""
    found: list[Any] = []
    for arg in (*args, *kwargs.items()):
        for one in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(one, torch.Tensor):
                found.append((one.dtype, one.shape))
            elif one is None or isinstance(one, (bool, int, float, str, torch.dtype, torch.device)):
                found.append(one)
    return tuple(found)


def random_state(device: torch.device) -> Any:
    """Return the state of the random numbers that an operation on a device may draw."""
    return _device.random_offset(device), torch.get_rng_state().numpy().tobytes()


def is_seeded(func: Any) -> bool:
    """Whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def below_autograd() -> Any:
    """Return a guard under which ``detach`` shares the version counter even inside a dispatch mode."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def _version(packed: SavedTensor | UnmanagedTensor) -> int:
    return packed.counter._version if isinstance(packed, SavedTensor) else packed.tensor._version


def written_arguments(func: Any) -> tuple[int | str, ...]:
    """Return which arguments an operation writes to."""
    found = _WRITES.get(func)
    if found is None:
        schema = getattr(func, "_schema", None)
        arguments = list(schema.arguments) if schema is not None else []
        found = tuple(
            argument.name if argument.kwarg_only else i
            for i, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        _WRITES[func] = found
    return found


def is_scratch(func: Any) -> bool:
    """Whether an operation makes memory to be written to, possibly by kernels that torch does not know."""
    schema = getattr(func, "_schema", None)
    name = "" if schema is None else schema.name.rpartition("::")[2]
    return name == "clone" or name.startswith("new_") or name.endswith("_like")


def makes_new(func: Any) -> bool:
    """Whether all results of an operation are new memory, and none of its arguments is changed."""
    schema = getattr(func, "_schema", None)
    if schema is None or written_arguments(func):
        return False
    return all(result.alias_info is None for result in schema.returns)


def is_view(func: Any) -> bool:
    """Whether all results of an operation are views of its arguments, none of which it changes."""
    found = _VIEWS.get(func)
    if found is None:
        schema = getattr(func, "_schema", None)
        returns = [] if schema is None or written_arguments(func) else list(schema.returns)
        found = bool(returns) and all(result.alias_info is not None for result in returns)
        _VIEWS[func] = found
    return found


class Results:
    """The saved results of one call of a recomputed layer."""

    def __init__(
        self,
        wanted: dict[Key, bool],
        pack: Callable[[torch.Tensor, bool], SavedTensor | UnmanagedTensor],
        unpack: Callable[[SavedTensor | UnmanagedTensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        self.wanted, self.pack, self.unpack, self.device = wanted, pack, unpack, device
        self.funcs = {key.func for key in wanted}
        self.held: dict[Key, tuple[int, Any]] = {}

    def modes(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Return the mode of the forward pass and that of the recomputation."""
        return _SaveResults(self), _ReuseResults(self)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives each operation its key."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled parts of a layer as they are."""
        return True

    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results
        self.counts: dict[tuple[Any, ...], int] = {}
        # A hash of all operations so far and their arguments. If it differs, the saved result is of another computation
        # and is not reused: for example, a cache that the forward pass fills is full afterwards.
        self.trail = 0

    def __enter__(self) -> Any:
        self.counts, self.trail = {}, 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def key(self, func: Any, args: Any, kwargs: Any) -> Key | None:
        """Record an operation; return its key if results of this operation are wanted."""
        if is_view(func):
            # Views compute nothing, and recomputation makes additional ones.
            return None
        self.trail = hash((self.trail, func, _described(args, kwargs)))
        return next_key(self.counts, func, args) if func in self.results.funcs else None


class _SaveResults(_Counting):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = self.results
        key = self.key(func, args, kwargs)
        leaves = None if key is None else results.wanted.get(key)
        if key is None or leaves is None:
            return func(*args, **kwargs)
        before = random_state(results.device) if is_seeded(func) else None
        out = func(*args, **kwargs)
        if before is not None and random_state(results.device) != before:
            # Reusing it would skip this draw, and later draws would get other numbers.
            return out
        with below_autograd():
            pack = results.pack
            packed = tree_map(lambda one: pack(one, leaves) if isinstance(one, torch.Tensor) else one, out)
        results.held[key] = (self.trail, packed)
        return out


class _ReuseResults(_Counting):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = self.results
        key = self.key(func, args, kwargs)
        if key is not None:
            # Reused once: a second backward pass computes it.
            trail, packed = results.held.pop(key, (None, None))
            if trail == self.trail:
                ours = [one for one in tree_leaves(packed) if hasattr(one, "version")]
                if all(_version(one) == one.version for one in ours):
                    unpack = results.unpack
                    return tree_map(lambda one: unpack(one).detach() if hasattr(one, "version") else one, packed)
        return func(*args, **kwargs)
