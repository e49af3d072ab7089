"""Operations inside a layer: what each of them costs, and having the results of a few when the layer is recomputed.

A checkpoint of torch's recomputes all that a layer saves. Here two dispatch modes stand inside of it: the first takes
the results of chosen operations in the forward pass, the second gives them back when the same operations run again.
Whatever does not fit (another shape, a tensor that was changed in place meanwhile, a second backward pass) is computed
again, as it would have been without.
"""

from __future__ import annotations

import random
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from forebay._saved import Saved, counter_of
from forebay._torch import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay._saved import Stay

_WRITES: dict[Any, tuple[int | str, ...] | None] = {}
_VIEWS: dict[Any, bool] = {}
_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
COLUMNS = 1021
"""Of a checksum. A prime: whatever swaps parts of usual sizes moves them to other columns."""


class Key(NamedTuple):
    """An operation inside a layer, told by what it is given and how many like it came before, not by sizes."""

    func: Any
    kinds: tuple[Any, ...]
    number: int

    def __str__(self) -> str:
        """Return its name."""
        return f"{self.func}#{self.number}"


def _next_key(counts: dict[tuple[Any, ...], int], func: Any, args: tuple[Any, ...]) -> Key:
    """Return an operation's key: watching, taking and giving must count alike."""
    kinds: list[Any] = []
    for arg in args:
        for one in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(one, torch.Tensor):
                kinds.append((one.dtype, one.dim()))
    alike = (func, tuple(kinds))
    number = counts.get(alike, 0)
    counts[alike] = number + 1
    return Key(*alike, number)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what an operation is given: types and shapes of tensors, and numbers and names as they are."""
    found: list[Any] = []
    for arg in (*args, *kwargs.items()):
        for one in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(one, torch.Tensor):
                found.append((one.dtype, one.shape))
            elif one is None or isinstance(one, (bool, int, float, str, torch.dtype, torch.device)):
                found.append(one)
    return tuple(found)


def draws(device: torch.device) -> Any:
    """Return how far the random numbers are that an operation on a device may draw from."""
    here = torch.cuda.default_generators[device.index or 0].get_offset() if device.type == "cuda" else None
    return here, torch.get_rng_state().numpy().tobytes()


def _is_seeded(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _below_autograd() -> Any:
    """Let ``detach`` share the version counter, which inside a dispatch mode it would not."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def _version(packed: Saved | Stay) -> int:
    return packed.counter._version if isinstance(packed, Saved) else packed.tensor._version


class Results:
    """The results of one call of a layer that need not be recomputed."""

    def __init__(
        self,
        wanted: dict[Key, bool],
        pack: Callable[[torch.Tensor, bool], Saved | Stay],
        unpack: Callable[[Saved | Stay], torch.Tensor],
        device: torch.device,
    ) -> None:
        self.wanted, self.pack, self.unpack, self.device = wanted, pack, unpack, device
        self.funcs = {key.func for key in wanted}
        self.held: dict[Key, tuple[int, Any]] = {}

    def modes(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Return what stands inside a checkpoint, and inside its recomputation."""
        return _Taking(self), _Giving(self)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells operations by their number."""

    # Compiled parts of a layer are left as they are.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results
        self.counts: dict[tuple[Any, ...], int] = {}
        # Stands for every operation so far and what it was given. A result is that of another computation, and not
        # given back, where these differ: a cache may be filled in the forward pass and found full afterwards.
        self.trail = 0

    def __enter__(self) -> Any:
        self.counts, self.trail = {}, 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def key(self, func: Any, args: Any, kwargs: Any) -> Key | None:
        """Note an operation; return its key if results of its kind are wanted."""
        if _is_view(func):
            # These compute nothing, and recomputation has some of its own.
            return None
        self.trail = hash((self.trail, func, _given(args, kwargs)))
        return _next_key(self.counts, func, args) if func in self.results.funcs else None


class _Taking(_Counting):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = self.results
        key = self.key(func, args, kwargs)
        leaves = None if key is None else results.wanted.get(key)
        if key is None or leaves is None:
            return func(*args, **kwargs)
        before = draws(results.device) if _is_seeded(func) else None
        out = func(*args, **kwargs)
        if before is not None and draws(results.device) != before:
            # To have it instead would leave later draws with other numbers.
            return out
        with _below_autograd():
            pack = results.pack
            packed = tree_map(lambda one: pack(one, leaves) if isinstance(one, torch.Tensor) else one, out)
        results.held[key] = (self.trail, packed)
        return out


class _Giving(_Counting):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = self.results
        key = self.key(func, args, kwargs)
        if key is not None:
            # Once: a second backward pass computes it.
            trail, packed = results.held.pop(key, (None, None))
            if trail == self.trail:
                ours = [one for one in tree_leaves(packed) if hasattr(one, "version")]
                if all(_version(one) == one.version for one in ours):
                    unpack = results.unpack
                    return tree_map(lambda one: unpack(one).detach() if hasattr(one, "version") else one, packed)
        return func(*args, **kwargs)


class Clock:
    """Moments on the device's own clock, or on the host's where there is none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Note this moment."""
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def ns(self, begin: Any, end: Any) -> int:
        """Return the time between two moments that were reached."""
        if self.device.type != "cuda":
            return max(0, int(end - begin))
        return max(0, int(begin.elapsed_time(end) * 1e6))

    def wait(self, mark: Any) -> None:
        """Wait until a moment was reached."""
        if self.device.type == "cuda":
            mark.synchronize()

    def is_over(self, mark: Any) -> bool:
        """Whether a moment was reached."""
        return self.device.type != "cuda" or bool(mark.query())


class Op:
    """An operation that was seen."""

    __slots__ = ("begin", "bytes", "counters", "end", "fits", "key", "storages")

    def __init__(self, key: Key, begin: Any, end: Any, fits: bool, outputs: list[torch.Tensor]) -> None:
        self.key, self.begin, self.end, self.fits = key, begin, end, fits
        self.bytes = sum(one.untyped_storage().nbytes() for one in outputs)
        self.storages = [one.untyped_storage()._cdata for one in outputs]
        self.counters = [(counter_of(one), one._version) for one in outputs] if fits else []


class Sum:
    """The bits of a storage, added up column by column, and whether they are still the same."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Held: what is freed without having been used once more was perhaps written to nevertheless.
        self.storage, self.device = tensor.untyped_storage(), tensor.device
        self.bytes = self.storage.nbytes()
        self.before = self._take()

    def _take(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.bytes // (8 * COLUMNS)
        words = torch.empty(0, dtype=torch.int64, device=self.device)
        words.set_(self.storage, 0, (rows, COLUMNS), (COLUMNS, 1))
        rest = torch.empty(0, dtype=torch.uint8, device=self.device)
        rest.set_(self.storage, rows * COLUMNS * 8, (self.bytes - rows * COLUMNS * 8,), (1,))
        # Integers are added without loss in any order, and without a copy of another type.
        return words.sum(0), rest.clone()

    def changed(self) -> torch.Tensor | bool:
        """Let go of the storage; return whether it was changed, for whoever may wait for that."""
        if self.storage.nbytes() != self.bytes:
            return True
        (words, rest), (words_now, rest_now) = self.before, self._take()
        del self.storage, self.before
        return (words != words_now).any() | (rest != rest_now).any()


def _written(func: Any) -> tuple[int | str, ...]:
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


def _makes_room(func: Any) -> bool:
    """Whether an operation makes memory for others to write to, who may do so behind torch's back."""
    schema = getattr(func, "_schema", None)
    name = "" if schema is None else schema.name.rpartition("::")[2]
    return name == "clone" or name.startswith("new_") or name.endswith("_like")


def _makes_new(func: Any) -> bool:
    """Whether all results of an operation are its own, and none of its arguments is changed."""
    schema = getattr(func, "_schema", None)
    if schema is None or _written(func):
        return False
    return all(result.alias_info is None for result in schema.returns)


def _is_view(func: Any) -> bool:
    """Whether all results of an operation are views of its arguments, none of which it changes."""
    found = _VIEWS.get(func)
    if found is None:
        schema = getattr(func, "_schema", None)
        returns = [] if schema is None or _written(func) else list(schema.returns)
        found = bool(returns) and all(result.alias_info is not None for result in returns)
        _VIEWS[func] = found
    return found


class Probe(TorchDispatchMode):
    """Watches the operations of a layer: what they cost, what could be had, and whether it may run again at all."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, clock: Clock, module: torch.nn.Module, *, managed: bool, sums: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock, self.module, self.managed = clock, module, managed
        # What results are when they are made, and whether they are so at the end: kernels that torch does not see may
        # write to them. That takes time, so there are no sums where times are taken.
        self.sums: dict[Key, list[Sum]] | None = {} if sums else None
        self.changed: dict[Key, list[torch.Tensor | bool]] = {}
        self.ops: list[Op] = []
        self.counts: dict[tuple[Any, ...], int] = {}
        self.created: dict[int, StorageWeakRef] = {}
        self.saved: set[int] = set()
        self.last_save = 0
        self.begin: Any = None
        self.reason: str | None = None
        self.random: Any = None
        if not managed and any(is_dtensor(parameter) for parameter in module.parameters()):
            self.refuse("its parameters are spread over ranks")

    def __enter__(self) -> Any:
        self.begin = self.clock.mark()
        self.random = self._random()
        self.buffers = [(buffer, buffer._version) for buffer in self.module.buffers()]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.changed = {key: [one.changed() for one in sums] for key, sums in (self.sums or {}).items()}
        self.sums = None
        # NumPy may have been imported meanwhile.
        if any(a != b for a, b in zip(self._random(), self.random, strict=True) if a is not None is not b):
            self.refuse("it draws from Python's or NumPy's random numbers")
        if any(buffer._version != version for buffer, version in self.buffers):
            self.refuse("it changes its buffers")

    def _random(self) -> Any:
        numpy = sys.modules.get("numpy.random")
        state = numpy.get_state() if numpy is not None else None
        return random.getstate(), None if state is None else (state[1].tobytes(), state[2])

    def refuse(self, reason: str) -> None:
        """Note why the layer must not run again."""
        self.reason = self.reason or reason

    def save(self, storage: int) -> None:
        """Autograd saves a tensor of a storage."""
        self.saved.add(storage)
        self.last_save = len(self.ops)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(one, torch.Generator) for one in (*args, *kwargs.values())):
            self.refuse("it draws from a random generator of its own")
        if not self.managed:
            for where in _written(func):
                one = kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
                for tensor in one if isinstance(one, (list, tuple)) else (one,):
                    if isinstance(tensor, torch.Tensor) and self._storage(tensor) not in self.created:
                        self.refuse(f"it changes a tensor in place that it did not make ({func})")
        if getattr(func, "namespace", None) in _COMMUNICATION and (not self.managed or torch.is_grad_enabled()):
            # Ranks plan for themselves, and must not call a different number of times.
            self.refuse("it communicates with other ranks")
        seeded = _is_seeded(func)
        before = draws(self.clock.device) if seeded else None
        begin = self.clock.mark()
        out = func(*args, **kwargs)
        end = self.clock.mark()
        key = _next_key(self.counts, func, args)
        tensors = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        outputs = [one for one in tensors if type(one) is torch.Tensor and one.layout == torch.strided]
        here = all(one.device.type == self.clock.device.type for one in outputs)
        # What runs without gradients is not recomputed in the same way: FSDP2 makes parameters whole only once.
        fits = here and 0 < len(outputs) == len(tensors) and _makes_new(func) and torch.is_grad_enabled()
        # Memory that is made of nothing is made to be written to; and of casts autocast keeps some.
        fits = fits and bool(key.kinds) and not _makes_room(func) and func is not torch.ops.aten._to_copy.default
        if seeded and draws(self.clock.device) != before:
            # Results that are had instead would leave later draws with other numbers.
            fits = False
        with _below_autograd():
            for one in outputs:
                storage = one.untyped_storage()
                if storage._cdata in self.created:
                    fits = False  # a view, whatever its schema says
                elif _makes_new(func):
                    self.created[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self.ops.append(Op(key, begin, end, fits, outputs))
            if fits and self.sums is not None:
                self.sums[key] = [Sum(one) for one in outputs]
        return out

    def _storage(self, tensor: torch.Tensor) -> int:
        try:
            return int(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return -1

    def sound(self) -> set[Key]:
        """Return whose results were at the layer's end what they were when made."""
        return {key for key, changed in self.changed.items() if not any(map(bool, changed))}

    def costs(self, min_bytes: int) -> tuple[list[tuple[Key, int, int, bool]], int, int]:
        """Return the results that could be had, and how much of the layer is recomputed.

        Results come as key, bytes, nanoseconds and whether autograd saves them; then what of the layer's time comes
        before its last saved tensor, and all of it.
        """
        found: list[tuple[Key, int, int, bool]] = []
        # Kernels that torch does not launch lie between operations.
        again = self.clock.ns(self.begin, self.ops[self.last_save - 1].end) if self.last_save else 0
        total = self.clock.ns(self.begin, self.ops[-1].end) if self.ops else 0
        for op in self.ops[: self.last_save]:
            ns = self.clock.ns(op.begin, op.end)
            unchanged = all(counter._version == version for counter, version in op.counters)
            if op.fits and unchanged and op.bytes >= max(min_bytes, 1):
                found.append((op.key, op.bytes, ns, all(one in self.saved for one in op.storages)))
        return found, again, total
