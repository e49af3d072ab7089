"""Sleep and wake: a model and its optimizer leave the GPU for pinned host memory, and come back, at wire speed."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core
from forebay._live import wait_for_live
from forebay._sleep_figures import Figures
from forebay._sleep_guards import Guard, ModuleGuard, OptimizerGuard, gathers_ahead
from forebay._sleep_moves import Mover, batched, no_collection
from forebay._sleep_order import Units, Waking
from forebay._sleep_walk import KINDS, Entry, Walk, is_held, is_ours, named, reshard
from forebay._torch import capturing
from forebay.errors import AsleepError, Error, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

PIECE_BYTES = 2 << 30
"""Bytes pinned at a time in a first sleep."""


class Sleeper:
    """Puts models and optimizers to sleep in pinned host memory, and wakes them.

    While they sleep their storages on the device are empty; tensors, parameters, views and optimizer state stay the
    objects that they are. What uses them through torch raises :class:`forebay.AsleepError`; reading a sleeping tensor
    by hand is not supported, and torch itself may crash on it.

    Work that was submitted to the current stream before ``sleep`` is finished first, and work submitted after ``wake``
    sees the data. Both calls return when the bytes have arrived.

    Parameters
    ----------
    model
        A module, or a list or dict of modules.
    optimizer
        An optimizer, or a list or dict of optimizers. ``forebay.AdamW`` gives its ring back; its state is on the host
        already and stays readable.
    gradients
        What ``sleep`` does about gradients: ``"refuse"`` to go on while there are any, ``"keep"`` them in the slab, or
        ``"drop"`` them.
    pinned_budget_bytes
        Refuse to pin more than this.
    prepare
        Begin to pin at once, in the background, for what is there now.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        gradients: str = "refuse",
        pinned_budget_bytes: int | None = None,
        prepare: bool = False,
    ) -> None:
        if gradients not in ("refuse", "keep", "drop"):
            raise OptionError(f"gradients must be 'refuse', 'keep' or 'drop': {gradients!r}")
        budget = pinned_budget_bytes
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget <= 0):
            raise OptionError(f"pinned_budget_bytes must be a positive number of bytes or None: {budget!r}")
        self._models: dict[str, torch.nn.Module] = named(model, "model", torch.nn.Module)
        self._optimizers: dict[str, torch.optim.Optimizer] = named(optimizer, "optimizer", torch.optim.Optimizer)
        if not self._models and not self._optimizers:
            raise OptionError("nothing to put to sleep: give a model, an optimizer or both")
        self._gradients = gradients
        self._budget = budget
        # One for each device; -1 is the CPU.
        self._slabs: dict[int, _core.Slabs] = {}
        # Numbers of storages in the slabs, by kind and name.
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        # What sleeps, by the storage's address.
        self._asleep: dict[int, Entry] = {}
        self._asleep_numbers: set[int] = set()
        self._rings: list[Any] = []
        self._guards: list[Guard] = []
        self._waking: Waking | None = None
        self._protected: list[Any] = []
        self._figures = Figures()
        self._pinning: threading.Thread | None = None
        # Opened now, not in the first sleep: the driver may have kernels to compile.
        for device in {parameter.get_device() for parameter in self._walk().parameters()}:
            if device >= 0:
                self._slabs_of(device)
        if prepare:
            self.prepare()

    def __getstate__(self) -> dict[str, Any]:
        raise Error("a sleeper cannot be pickled or copied: it holds pinned memory")

    # Preparing.

    def prepare(self) -> None:
        """Begin to pin, in the background, what ``sleep`` would need now. The next ``sleep`` waits for it."""
        self._join_pinning()
        found: dict[int, list[Entry]] = {}
        kinds = set(KINDS) if self._gradients == "keep" else set(KINDS) - {"gradients"}
        for entry in self._choose(self._walk(), kinds):
            found.setdefault(entry.device, []).append(entry)
        # Numbers only: a thread that held storages would keep what the user drops meanwhile.
        wanted = [
            (self._slabs_of(device), [e.number for e in entries], [e.size for e in entries])
            for device, entries in found.items()
        ]

        def pin() -> None:
            # What fails here fails again in sleep, where somebody hears it.
            with suppress(Error):
                for slabs, numbers, sizes in wanted:
                    slabs.place(numbers, sizes, self._budget_for(slabs))

        self._pinning = threading.Thread(target=pin, name="forebay-prepare", daemon=True)
        self._pinning.start()

    def _join_pinning(self) -> None:
        thread, self._pinning = self._pinning, None
        if thread is not None:
            thread.join()

    def protect(self, task: Any) -> None:
        """Finish something before the next ``sleep``: a checkpoint that still reads the tensors, for example.

        Parameters
        ----------
        task
            A future or a thread, or anything with ``result``, ``wait`` or ``join``, or a function to call.
        """
        for name in ("result", "wait", "join"):
            if callable(getattr(task, name, None)):
                self._protected.append(getattr(task, name))
                return
        if not callable(task):
            raise OptionError(f"protect takes a future, a thread or a function: {type(task).__name__}")
        self._protected.append(task)

    # Sleeping.

    def sleep(self, what: Iterable[str] | str = KINDS, *, give_back: bool = True) -> None:
        """Move storages to pinned host memory and empty them on the device.

        Returns when the bytes are safe. What sleeps already stays as it is.

        Parameters
        ----------
        what
            Any of ``"parameters"``, ``"buffers"``, ``"gradients"`` and ``"optimizer"``.
        give_back
            Also return the blocks that torch's allocator caches to the driver, which may wait for the device.
        """
        kinds = _kinds(what)
        self._refuse_capture()
        self._finish_wake()
        if "gradients" in kinds and self._gradients == "refuse":
            self._refuse_gradients()
        wait_for_live()
        while self._protected:
            self._protected[0]()
            self._protected.pop(0)
        for optimizer in self._optimizers.values():
            if is_ours(optimizer):
                # Stores end, and masters that are still to be made from their weights are made.
                optimizer.synchronize()  # type: ignore[attr-defined]
        if kinds & {"parameters", "buffers"}:
            for model in self._models.values():
                reshard(model)
        self._join_pinning()
        with no_collection():
            self._sleep(kinds)
        # Where CUDA is not in use, this does nothing.
        if give_back:
            begun = time.perf_counter()
            torch.cuda.empty_cache()
            self._figures.give_back_s = time.perf_counter() - begun

    def _sleep(self, kinds: set[str]) -> None:
        begun = time.perf_counter()
        figures = self._figures
        figures.begin_sleep()
        walk = self._walk()
        mover = Mover(self._slabs_of, to_sleep=True)
        rings = self._rings_to_release() if "optimizer" in kinds else []
        try:
            deferred: list[Entry] = []
            for batch in batched(self._choose(walk, kinds)):
                self._offer(mover, batch, deferred)
            for piece in self._pieces(deferred):
                self._place(piece)
                for batch in batched(piece):
                    mover.submit(batch)
            # From here on nothing is refused any more.
            if mover.batches or rings:
                self._guard()
            if "gradients" in kinds and self._gradients == "drop":
                for parameter in walk.parameters():
                    parameter.grad = None
            self._empty(mover)
            mover.finish()
            for optimizer in rings:
                optimizer._release_ring()
                self._rings.append(optimizer)
        except BaseException:
            mover.abort()
            for sent in mover.batches:
                awake = [entry.number for entry in sent.entries if entry.address not in self._asleep]
                mover.slabs(sent).free(awake)
            if not self._asleep and not self._rings:
                self._unguard()
            raise
        figures.left = walk.left
        figures.end_sleep(time.perf_counter() - begun)

    def _choose(self, walk: Walk, kinds: set[str]) -> Iterator[Entry]:
        """Go through the storages that are to sleep, each with its number."""
        numbers = self._numbers
        taken: set[str] = set()
        for entry in walk.entries(on_gpu=walk.is_on_gpu(), known=self._asleep):
            if entry.kind == "gradients" and self._gradients == "drop" and "gradients" in kinds:
                continue
            if entry.kind in kinds:
                key = entry.kind + entry.name
                while key in taken:
                    # The parts of a wrapper have one name, and two optimizers may call their groups the same.
                    key += "'"
                taken.add(key)
                number = numbers.get(key)
                if number is None or number in self._asleep_numbers:
                    number = numbers[key] = self._next_number = self._next_number + 1
                entry.number = number
                yield entry
            else:
                self._figures.stays(entry)

    def _offer(self, mover: Mover, batch: list[Entry], deferred: list[Entry]) -> None:
        """Submit a batch whose places are known; copying is harmless, whatever else is found. Others come later."""
        slabs = self._slabs_of(batch[0].device)
        if slabs.holds([entry.number for entry in batch], [entry.size for entry in batch]):
            mover.submit(batch)
        else:
            deferred.extend(batch)

    def _pieces(self, entries: list[Entry]) -> Iterator[list[Entry]]:
        """Cut what has no place yet, so that one part is copied while the next is being pinned."""
        # A budget is met or refused as a whole, before anything is pinned.
        limit = PIECE_BYTES if self._budget is None else float("inf")
        piece: list[Entry] = []
        size = 0
        for entry in entries:
            if piece and size + entry.size > limit:
                yield piece
                piece, size = [], 0
            piece.append(entry)
            size += entry.size
        if piece:
            yield piece

    def _place(self, entries: list[Entry]) -> None:
        by_device: dict[int, list[Entry]] = {}
        for entry in entries:
            by_device.setdefault(entry.device, []).append(entry)
        for device, found in by_device.items():
            slabs = self._slabs_of(device)
            begun = time.perf_counter()
            slabs.place([e.number for e in found], [e.size for e in found], self._budget_for(slabs))
            self._figures.pin_s += time.perf_counter() - begun

    def _empty(self, mover: Mover) -> None:
        """Empty the storages of each batch as soon as its bytes are safe."""
        for batch in mover.batches:
            mover.wait(batch)
            # Noted first: whatever stops this in the middle, what is empty can be woken.
            self._asleep_numbers.update([entry.number for entry in batch.entries])
            for entry in batch.entries:
                self._asleep[entry.address] = entry
                entry.storage.resize_(0)
            self._figures.slept(batch)

    def _refuse_gradients(self) -> None:
        found = [parameter for parameter in self._walk().parameters() if parameter.grad is not None]
        if found:
            count = len({id(parameter) for parameter in found})
            raise Error(
                f"{count} parameters have gradients, and sleeping would have to keep or drop them; call zero_grad() "
                "first, leave 'gradients' out of what, or make the sleeper with gradients='keep' or 'drop'"
            )

    def _rings_to_release(self) -> list[Any]:
        """Return the optimizers of forebay's own whose rings are still on the device."""
        return [one for one in self._optimizers.values() if is_ours(one) and one not in self._rings]

    # Waking.

    def wake(
        self,
        what: Iterable[str] | str | None = None,
        *,
        order: Sequence[str | torch.nn.Module] | None = None,
        lazy: bool = False,
    ) -> None:
        """Bring storages back to the device.

        Parameters
        ----------
        what
            Any of the kinds that ``sleep`` takes; by default all that sleeps.
        order
            What to bring first: modules, names of modules or tensors, or kinds. The rest follows.
        lazy
            Return while bytes are still on their way, layer after layer. A module's forward waits for what it needs;
            ``state_dict``, ``step`` and another ``sleep`` or ``wake`` wait for everything. Tensors that are read by
            hand have their bytes only then. Where FSDP2 gathers weights ahead of their modules, nothing is lazy.
        """
        kinds = set(KINDS) if what is None else _kinds(what)
        ranks = self._ranks(order)
        self._refuse_capture()
        self._finish_wake()
        begun = time.perf_counter()
        figures = self._figures
        figures.begin_wake()
        chosen = [entry for entry in self._asleep.values() if entry.kind in kinds]
        mover = Mover(self._slabs_of, to_sleep=False)
        lazy = lazy and not any(map(gathers_ahead, self._models.values()))
        units = Units(self._models) if lazy else None
        try:
            with no_collection():
                for batch in self._in_order(chosen, ranks, units):
                    self._allocate(mover, batch)
            while "optimizer" in kinds and self._rings:
                self._rings[-1]._restore_ring()
                self._rings.pop()
        except BaseException as error:
            try:
                self._arrive(mover)
            finally:
                mover.abort()
            left = sum(entry.size for entry in self._asleep.values())
            error.add_note(f"{left} bytes still sleep, whole; make room and call wake() again")
            raise
        replaced = [entry for entry in chosen if is_held(entry) is False]
        self._waking = Waking(mover, units, begun)
        if not lazy or not chosen:
            self._finish_wake()
        else:
            for sent in mover.batches:
                if sent.kind == "buffers":
                    mover.wait(sent)
        if replaced:
            raise _replaced(replaced)

    def _allocate(self, mover: Mover, batch: list[Entry]) -> None:
        """Give storages their memory again and send their bytes after them."""
        done: list[Entry] = []
        try:
            for entry in batch:
                done.append(entry)
                entry.storage.resize_(entry.size)
        except BaseException as error:
            for entry in done:
                entry.storage.resize_(0)
            error.add_note(f"while waking {done[-1].name}, {done[-1].size} bytes")
            raise
        mover.submit(batch)

    def _arrive(self, mover: Mover) -> None:
        """Wait for everything submitted, and note it as awake."""
        for batch in mover.batches:
            mover.wait(batch)
            numbers = [entry.number for entry in batch.entries]
            mover.slabs(batch).free(numbers)
            self._asleep_numbers.difference_update(numbers)
            for entry in batch.entries:
                self._asleep.pop(entry.address, None)
            self._figures.woke(batch)

    def _finish_wake(self) -> None:
        """End a wake that is under way, if there is one."""
        waking, self._waking = self._waking, None
        if waking is None:
            return
        try:
            self._arrive(waking.mover)
            waking.mover.finish()
        except BaseException:
            waking.mover.abort()
            raise
        self._figures.end_wake(time.perf_counter() - waking.begun)
        if not self._asleep and not self._rings:
            self._unguard()

    def _in_order(
        self, entries: list[Entry], ranks: Callable[[Entry], int] | None, units: Units | None
    ) -> Iterator[list[Entry]]:
        """Go through batches in the order in which they are needed."""
        if ranks is not None:
            entries = sorted(entries, key=ranks)
        if units is None:
            yield from batched(entries)
            return
        by_unit: dict[int, list[Entry]] = {}
        for entry in entries:
            by_unit.setdefault(units.first_use(entry), []).append(entry)
        for unit in sorted(by_unit) if ranks is None else by_unit:
            for batch in batched(by_unit[unit]):
                units.note(unit, batch)
                yield batch

    def _ranks(self, order: Sequence[str | torch.nn.Module] | None) -> Callable[[Entry], int] | None:
        if order is None:
            return None
        if isinstance(order, (str, torch.nn.Module)):
            raise OptionError("order is a list of modules, names or kinds")
        paths = {
            id(module): ".".join(filter(None, (label, path)))
            for label, model in self._models.items()
            for path, module in model.named_modules()
        }
        known = {*KINDS, *paths.values(), *_tensor_names(self._models)}
        known.update(name for entry in self._asleep.values() for name in entry.names)
        wanted: list[str] = []
        for item in order:
            if isinstance(item, torch.nn.Module):
                if id(item) not in paths:
                    raise OptionError(f"order names a {type(item).__name__} that is in no model of this sleeper")
                wanted.append(paths[id(item)])
            elif item in known:
                wanted.append(item)
            else:
                raise OptionError(f"order names nothing that there is: {item!r}")

        def rank(entry: Entry) -> int:
            for position, name in enumerate(wanted):
                if name == entry.kind:
                    return position
                if entry.kind != "optimizer" and name not in KINDS:
                    if any(not name or known == name or known.startswith(f"{name}.") for known in entry.names):
                        return position
                elif name in entry.names:
                    return position
            return len(wanted)

        return rank

    @contextmanager
    def asleep(self, what: Iterable[str] | str = KINDS, *, give_back: bool = True) -> Iterator[Sleeper]:
        """Sleep inside a ``with`` block, and wake at its end, also after an exception."""
        self.sleep(what, give_back=give_back)
        try:
            yield self
        finally:
            self.wake()

    # Guards.

    def _guard(self) -> None:
        """Put guards before everything that could touch what sleeps."""
        if self._guards:
            return
        try:
            for owner, model in enumerate(self._models.values()):
                for module in model.modules():
                    self._guards.append(ModuleGuard(module, self._on_forward(owner), self._check("the model", owner)))
            for owner, optimizer in enumerate(self._optimizers.values(), start=len(self._models)):
                self._guards.append(
                    OptimizerGuard(optimizer, self._check("the optimizer", None), self._check("the optimizer", owner))
                )
        except BaseException:
            self._unguard()
            raise

    def _unguard(self) -> None:
        while self._guards:
            self._guards.pop().remove()

    def _on_forward(self, owner: int) -> Callable[[torch.nn.Module, bool], None]:
        def on_forward(module: torch.nn.Module, whole: bool) -> None:
            waking = self._waking
            if waking is not None:
                if whole or waking.units is None:
                    self._finish_wake()
                else:
                    self._wait_for(waking, waking.units.needed_by(module))
            kinds = {entry.kind for entry in self._asleep.values() if entry.owner == owner} - self._coming()
            if kinds & {"parameters", "buffers"} or (kinds and torch.is_grad_enabled()):
                raise _asleep("forward of the model", kinds)

        return on_forward

    def _check(self, what: str, owner: int | None) -> Callable[[str], None]:
        """Return a check that raises while anything of one owner, or of any, sleeps."""

        def check(operation: str) -> None:
            self._finish_wake()
            kinds = {entry.kind for entry in self._asleep.values() if owner is None or entry.owner == owner}
            if owner is None and self._rings:
                kinds.add("optimizer")
            if kinds:
                raise _asleep(f"{operation} of {what}", kinds)

        return check

    def _coming(self) -> set[str]:
        """Kinds that a wake under way brings."""
        return set() if self._waking is None else self._waking.kinds()

    def _wait_for(self, waking: Waking, last: int) -> None:
        """Wait for the batches up to one, in a wake under way."""
        batches = waking.mover.batches
        for batch in batches[: last + 1]:
            waking.mover.wait(batch)
        # With everything there, hooks and staging memory need not stay.
        if all(waking.mover.has_arrived(batch) for batch in reversed(batches)):
            self._finish_wake()

    # Numbers.

    def stats(self) -> dict[str, Any]:
        """Return the last sleep and the last wake in numbers. Waits for a lazy wake under way.

        ``bytes`` went to sleep; ``sleep_s`` and ``wake_s`` are whole calls, without giving memory back, which took
        ``give_back_s``. ``residual_bytes`` stayed on the device, and ``residual`` says which and why. ``kinds`` has
        the same for each kind.
        """
        self._finish_wake()
        asleep: dict[str, int] = dict.fromkeys(KINDS, 0)
        for entry in self._asleep.values():
            asleep[entry.kind] += entry.size
        found = self._figures.report(asleep)
        found["pinned_bytes"] = sum(slabs.pinned_bytes() for slabs in self._slabs.values())
        return found

    def release(self) -> None:
        """Unpin and free the slab. Refused while anything sleeps in it."""
        self._finish_wake()
        self._join_pinning()
        if self._asleep:
            size = sum(entry.size for entry in self._asleep.values())
            raise AsleepError(f"{size} bytes sleep in the slab and would be lost; call wake() first")
        for slabs in self._slabs.values():
            slabs.release()

    # Helpers.

    def _walk(self) -> Walk:
        return Walk(self._models, self._optimizers)

    def _slabs_of(self, device: int) -> _core.Slabs:
        slabs = self._slabs.get(device)
        if slabs is None:
            slabs = self._slabs[device] = _core.Slabs("cpu" if device < 0 else f"cuda:{device}")
        return slabs

    def _budget_for(self, slabs: _core.Slabs) -> int | None:
        if self._budget is None:
            return None
        others = sum(other.pinned_bytes() for other in self._slabs.values() if other is not slabs)
        return max(self._budget - others, 0)

    def _refuse_capture(self) -> None:
        if capturing():
            raise Error("sleep and wake cannot be captured into a CUDA graph; call them outside the capture")


def _kinds(what: Iterable[str] | str) -> set[str]:
    asked = [what] if isinstance(what, str) else list(what)
    for kind in asked:
        if kind not in KINDS:
            raise OptionError(f"what names {kind!r}, which is none of {', '.join(KINDS)}")
    return set(asked)


def _tensor_names(models: dict[str, torch.nn.Module]) -> set[str]:
    return {
        ".".join(filter(None, (label, name)))
        for label, model in models.items()
        for names in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, _ in names
    }


def _asleep(what: str, kinds: set[str]) -> AsleepError:
    asked = ", ".join(kind for kind in KINDS if kind in kinds)
    return AsleepError(f"{what} needs what sleeps: {asked}; call wake() of the forebay.Sleeper first")


def _replaced(entries: list[Entry]) -> Error:
    names = ", ".join(f"{entry.name} ({entry.kind}, {entry.size} bytes)" for entry in entries[:8])
    more = f" and {len(entries) - 8} more" if len(entries) > 8 else ""
    return Error(
        f"replaced while asleep: {names}{more}; everything else is awake, and the tensors that slept have their bytes "
        "again, but the model or optimizer holds others now: put them in place before sleeping, not meanwhile"
    )
