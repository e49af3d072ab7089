"""Sleep and wake: a model and its optimizer leave the GPU for pinned host memory, and return."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from forebay import _core, _trace
from forebay._device import capturing, device_of, empty_cache, engine_name
from forebay._live import wait_for_live
from forebay._registry import register
from forebay.errors import AsleepError, Error, OptionError
from forebay.sleep.asleep import Asleep, Numbers, asleep_error, replaced_error
from forebay.sleep.guards import Guards, gathers_ahead
from forebay.sleep.stats import Figures
from forebay.sleep.transfer import Mover, batched, by_device, in_pieces, no_collection
from forebay.sleep.wake_order import Units, Waking, in_order, ranking
from forebay.sleep.walk import KINDS, StorageEntry, Walk, is_held, is_ours, kinds_of, named, named_optimizers, reshard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

PIECE_BYTES = 2 << 30
"""Bytes pinned at a time in a first sleep."""


class Sleeper:
    """Puts models and optimizers to sleep in pinned host memory, and wakes them.

    While they sleep, their storages on the device are empty. Tensors, parameters, views and optimizer state stay the
    same objects. Operations that use them through torch raise :class:`forebay.AsleepError`. Reading a sleeping tensor
    directly is not supported, and torch may crash on it.

    Work that was submitted to the current stream before ``sleep`` ends first, and work submitted after ``wake`` sees
    the data. Both calls return when the bytes have arrived.

    Parameters
    ----------
    model
        A module, or a list or dict of modules.
    optimizer
        An optimizer, or a list or dict of optimizers; wrappers of frameworks, such as accelerate's, are taken off.
        Optimizers of forebay free their ring, unless others that share it are awake; their state is on the host already
        and stays readable.
    gradients
        What ``sleep`` does with gradients: ``"refuse"`` raises an error while there are any, ``"keep"`` moves them to
        the slab, ``"drop"`` frees them.
    pinned_budget_bytes
        The most host memory to pin; a larger need raises an error.
    prepare
        Start pinning memory for the present tensors at once, in the background.
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
            raise OptionError(f"invalid gradients: {gradients!r}; gradients must be 'refuse', 'keep' or 'drop'")
        budget = pinned_budget_bytes
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget <= 0):
            raise OptionError(f"invalid pinned_budget_bytes: {budget!r}; it must be a positive number of bytes or None")
        self._models: dict[str, torch.nn.Module] = named(model, "model", torch.nn.Module)
        self._optimizers: dict[str, torch.optim.Optimizer] = named_optimizers(optimizer)
        if not self._models and not self._optimizers:
            raise OptionError("nothing to put to sleep; give a model, an optimizer or both")
        self._gradients = gradients
        self._budget = budget
        # For each device; -1 is the CPU.
        self._slabs: dict[int, _core.Slabs] = {}
        self._numbers = Numbers()
        self._asleep = Asleep()
        # Optimizers of forebay whose rings are freed.
        self._rings: list[Any] = []
        self._guards = Guards()
        self._waking: Waking | None = None
        self._protected: list[Any] = []
        self._figures = Figures()
        self._pinning: threading.Thread | None = None
        # Opened now, because the driver may have kernels to compile and the first sleep would wait for that.
        for device in {parameter.get_device() for parameter in self._walk().parameters()}:
            if device >= 0:
                self._slabs_of(device)
        self.number = register("sleeper", self)
        if prepare:
            self.prepare()

    def __del__(self) -> None:
        # A trace says what became of it.
        with suppress(Exception):
            _trace.leaves(self)

    def __getstate__(self) -> dict[str, Any]:
        raise Error("a sleeper cannot be pickled or copied: it holds pinned memory; make one for the copy")

    # Preparing.

    def prepare(self) -> None:
        """Start pinning the memory that ``sleep`` would need now, in the background. The next ``sleep`` waits."""
        self._join_pinning()
        kinds = set(KINDS) if self._gradients == "keep" else set(KINDS) - {"gradients"}
        # Numbers only: a thread that held storages would keep memory that the user frees meanwhile.
        wanted = [
            (self._slabs_of(device), [e.number for e in entries], [e.size for e in entries])
            for device, entries in by_device(self._choose(self._walk(), kinds)).items()
        ]

        def pin() -> None:
            # What fails here fails again in sleep, which raises it.
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
        """Make the next ``sleep`` wait for a task, such as a checkpoint that still reads the tensors.

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
            raise OptionError(f"invalid task: {type(task).__name__}; protect takes a future, a thread or a function")
        self._protected.append(task)

    # Sleeping.

    def sleep(self, what: Iterable[str] | str = KINDS, *, give_back: bool = True) -> None:
        """Move storages to pinned host memory and empty them on the device.

        Returns when the bytes are in host memory. Storages that already sleep are not touched.

        Parameters
        ----------
        what
            Any of ``"parameters"``, ``"buffers"``, ``"gradients"`` and ``"optimizer"``.
        give_back
            Also return the blocks that torch's allocator caches to the driver, which may wait for the device.
        """
        kinds = kinds_of(what)
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
                # Waits for stores, and makes master weights that no step has made yet.
                optimizer.synchronize()  # type: ignore[attr-defined]
        if kinds & {"parameters", "buffers"}:
            for model in self._models.values():
                reshard(model)
        self._join_pinning()
        with no_collection():
            self._sleep(kinds)
        if give_back:
            begun = time.perf_counter()
            empty_cache()
            self._figures.give_back_s = time.perf_counter() - begun

    def _sleep(self, kinds: set[str]) -> None:
        begun = time.perf_counter()
        figures = self._figures
        figures.begin_sleep()
        walk = self._walk()
        mover = Mover(self._slabs_of, to_sleep=True)
        rings = self._rings_to_release() if "optimizer" in kinds else []
        try:
            self._store(mover, walk, kinds)
            # From here on nothing is refused.
            if mover.batches or rings:
                guarded = self._models.values(), self._optimizers.values()
                self._guards.put(*guarded, self._on_forward, self._check, self._finish_wake)
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
            self._asleep.free_others(mover)
            self._unguard_awake()
            raise
        figures.left = walk.left
        figures.end_sleep(time.perf_counter() - begun)

    def _store(self, mover: Mover, walk: Walk, kinds: set[str]) -> None:
        """Start copying all storages of these kinds; those that have a place in the slabs first."""
        homeless: list[StorageEntry] = []
        for batch in batched(self._choose(walk, kinds)):
            slabs = self._slabs_of(batch[0].device)
            if slabs.holds([entry.number for entry in batch], [entry.size for entry in batch]):
                mover.submit(batch)
            else:
                homeless.extend(batch)
        # In pieces, so that one is copied while the next is being pinned. But a budget is checked as a whole, before
        # anything is pinned.
        for piece in in_pieces(homeless, PIECE_BYTES if self._budget is None else float("inf")):
            self._place(piece)
            for batch in batched(piece):
                mover.submit(batch)

    def _choose(self, walk: Walk, kinds: set[str]) -> Iterator[StorageEntry]:
        """Yield the storages that will sleep, each with its number."""

        def chosen() -> Iterator[StorageEntry]:
            drops = "gradients" in kinds and self._gradients == "drop"
            for entry in walk.entries(on_gpu=walk.is_on_gpu(), known=self._asleep.__contains__):
                if entry.kind not in kinds:
                    self._figures.stays(entry)
                elif not (drops and entry.kind == "gradients"):
                    yield entry

        return self._numbers.number(chosen(), self._asleep.numbers())

    def _place(self, entries: list[StorageEntry]) -> None:
        """Give storages places in the slabs."""
        for device, found in by_device(entries).items():
            slabs = self._slabs_of(device)
            begun = time.perf_counter()
            slabs.place([e.number for e in found], [e.size for e in found], self._budget_for(slabs))
            self._figures.pin_s += time.perf_counter() - begun

    def _empty(self, mover: Mover) -> None:
        """Empty the storages of each batch as soon as its bytes have arrived."""
        for batch in mover.batches:
            mover.wait(batch)
            for entry in batch.entries:
                # Added first: if this is interrupted, every empty storage can still be woken.
                self._asleep.add(entry)
                entry.storage.resize_(0)
            self._figures.slept(batch)

    def _refuse_gradients(self) -> None:
        found = [parameter for parameter in self._walk().parameters() if parameter.grad is not None]
        if found:
            count = len({id(parameter) for parameter in found})
            raise Error(
                f"{count} parameters have gradients, which sleep must keep or drop; call zero_grad() first, leave "
                "'gradients' out of what, or make the sleeper with gradients='keep' or 'drop'"
            )

    def _rings_to_release(self) -> list[Any]:
        """Return the optimizers of forebay whose rings are on the device."""
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
            Any of the kinds that ``sleep`` takes; by default everything that sleeps.
        order
            What to copy first: modules, names of modules or tensors, or kinds. The rest follows.
        lazy
            Return while bytes are still being copied, layer after layer. A module's forward waits for its own tensors.
            ``state_dict``, ``step``, the ``state`` of forebay's optimizers and another ``sleep`` or ``wake`` wait for
            everything; tensors that are read directly are valid only after that. If FSDP2 gathers weights ahead of
            their modules, ``lazy`` has no effect.
        """
        kinds = set(KINDS) if what is None else kinds_of(what)
        rank = ranking(order, self._models, self._asleep)
        self._refuse_capture()
        self._finish_wake()
        begun = time.perf_counter()
        self._figures.begin_wake()
        chosen = self._asleep.of_kinds(kinds)
        mover = Mover(self._slabs_of, to_sleep=False)
        lazy = lazy and not any(map(gathers_ahead, self._models.values()))
        units = Units(self._models) if lazy else None
        try:
            with no_collection():
                for batch in in_order(chosen, rank, units):
                    self._allocate(mover, batch)
            while "optimizer" in kinds and self._rings:
                self._rings[-1]._restore_ring()
                self._rings.pop()
        except BaseException as error:
            try:
                self._arrive(mover)
            finally:
                mover.abort()
            error.add_note(f"{self._asleep.size()} bytes still sleep, whole; make room and call wake() again")
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
            raise replaced_error(replaced)

    def _allocate(self, mover: Mover, batch: list[StorageEntry]) -> None:
        """Allocate storages again and begin to copy their bytes."""
        done: list[StorageEntry] = []
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
        """Wait for all submitted batches, and mark them as awake."""
        for batch in mover.batches:
            mover.wait(batch)
            self._asleep.remove(mover, batch)
            self._figures.woke(batch)

    def _finish_wake(self) -> None:
        """Wait for the end of a running wake, if there is one."""
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
        self._unguard_awake()

    @contextmanager
    def asleep(self, what: Iterable[str] | str = KINDS, *, give_back: bool = True) -> Iterator[Sleeper]:
        """Sleep inside a ``with`` block, and wake at its end, even after an exception."""
        self.sleep(what, give_back=give_back)
        try:
            yield self
        finally:
            self.wake()

    # Guards.

    def _unguard_awake(self) -> None:
        """Remove the guards if nothing sleeps."""
        if not self._asleep and not self._rings:
            self._guards.remove()

    def _on_forward(self, owner: int) -> Callable[[torch.nn.Module, bool], None]:
        def on_forward(module: torch.nn.Module, whole: bool) -> None:
            waking = self._waking
            if waking is not None:
                if whole or waking.units is None:
                    self._finish_wake()
                else:
                    self._wait_for(waking, waking.units.needed_by(module))
            coming = set() if self._waking is None else self._waking.kinds()
            kinds = self._asleep.kinds(owner) - coming
            if kinds & {"parameters", "buffers"} or (kinds and torch.is_grad_enabled()):
                raise asleep_error("forward of the model", kinds)

        return on_forward

    def _check(self, what: str, owner: int | None) -> Callable[[str], None]:
        """Return a check that raises while tensors of an owner sleep; without an owner, tensors of any."""

        def check(operation: str) -> None:
            self._finish_wake()
            kinds = self._asleep.kinds(owner)
            if owner is None and self._rings:
                kinds.add("optimizer")
            if kinds:
                raise asleep_error(f"{operation} of {what}", kinds)

        return check

    def _wait_for(self, waking: Waking, last: int) -> None:
        """Wait for the batches of a running wake, up to and including ``last``."""
        batches = waking.mover.batches
        for batch in batches[: last + 1]:
            waking.mover.wait(batch)
        # When everything has arrived, hooks and staging memory are no longer needed.
        if all(waking.mover.has_arrived(batch) for batch in reversed(batches)):
            self._finish_wake()

    # Numbers.

    def stats(self) -> dict[str, Any]:
        """Return statistics of the last sleep and the last wake. Waits for a running lazy wake.

        ``bytes`` were put to sleep. ``sleep_s`` and ``wake_s`` are the times of whole calls, except for returning
        memory to the driver, which took ``give_back_s``. ``residual_bytes`` stayed on the device, and ``residual`` says
        which and why. ``kinds`` has the same for each kind.
        """
        self._finish_wake()
        return self.figures()

    @property
    def trace_name(self) -> str:
        """What a trace calls it: the classes of what it puts to sleep."""
        return " and ".join(type(one).__name__ for one in (*self._models.values(), *self._optimizers.values()))

    def figures(self) -> dict[str, Any]:
        """Return the same as ``stats`` without waiting."""
        found = self._figures.report(self._asleep.sizes())
        found["pinned_bytes"] = sum(slabs.pinned_bytes() for slabs in self._slabs.values())
        return found

    def release(self) -> None:
        """Unpin and free the slab. Raises an error while storages sleep in it."""
        self._finish_wake()
        self._join_pinning()
        if self._asleep:
            raise AsleepError(f"{self._asleep.size()} bytes sleep in the slab and would be lost; call wake() first")
        for slabs in self._slabs.values():
            slabs.release()

    # Helpers.

    def _walk(self) -> Walk:
        return Walk(self._models, self._optimizers)

    def _slabs_of(self, device: int) -> _core.Slabs:
        slabs = self._slabs.get(device)
        if slabs is None:
            slabs = self._slabs[device] = _core.Slabs(engine_name(device_of(device)))
        return slabs

    def _budget_for(self, slabs: _core.Slabs) -> int | None:
        if self._budget is None:
            return None
        others = sum(other.pinned_bytes() for other in self._slabs.values() if other is not slabs)
        return max(self._budget - others, 0)

    def _refuse_capture(self) -> None:
        if capturing():
            raise Error("sleep and wake cannot be captured into a CUDA graph; call them outside the capture")
