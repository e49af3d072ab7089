"""Checkpoints that load on any number of ranks: a storage plugin for ``torch.distributed.checkpoint``, and two calls.

``Writer`` and ``Reader`` take the place of DCP's ``FileSystemWriter`` and ``FileSystemReader``. Planning, sharding and
the collectives stay DCP's; bytes go between memory and files in Rust, without a copy, and every byte has a checksum.
``save`` and ``load`` do a whole model and its optimizers.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from forebay import _core
from forebay._ranks import groups, on_all_ranks, ranks_of
from forebay._snapshot import Handle, Snapshot, release_copies
from forebay._storage import Reader, StrPath, Writer, absolute
from forebay._torch import describe_like, is_dtensor, local
from forebay._values import Encoded
from forebay.errors import CheckpointError, Error, OptionError
from forebay.optim import AdamW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

__all__ = ["Handle", "Reader", "Writer", "async_save", "load", "release", "save"]


def save(
    path: StrPath,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    process_group: Any = None,
) -> None:
    """Save a model, its optimizers and whatever else belongs to the run. All ranks call it.

    Parameters
    ----------
    path
        The folder. Each save makes a numbered subfolder; the one before stays complete until the new one is.
    model
        The model; its parameters may be sharded by FSDP2.
    optimizer
        Its optimizer or optimizers, of forebay's or of torch's.
    extra
        More to save, the same on every rank: tensors, numbers, texts, bytes, and lists, tuples and dicts of them.
    keep_last
        Keep so many complete checkpoints of this path; by default all.
    process_group
        The ranks that save; by default all of them.
    """
    optimizers = _optimizers(optimizer)
    writer = _writer(path, keep_last, optimizers)
    state: dict[str, Any] = {}

    def begin() -> None:
        with ExitStack() as turn:
            _end_earlier(turn)
        state.update(_state_to_save(model, optimizers, extra))

    on_all_ranks(begin, process_group)
    _write(state, writer, process_group)


def _state_to_save(
    model: torch.nn.Module | None, optimizers: list[torch.optim.Optimizer], extra: Mapping[str, Any] | None
) -> dict[str, Any]:
    state = _state(model, optimizers)
    if extra is not None:
        tensors: dict[str, torch.Tensor] = {}
        state["extra"] = Encoded(dict(extra), tensors, "extra")
        # Not nested: DCP would flatten lists and dicts, and lose empty ones and the types of keys.
        state.update(tensors)
    return state


def _writer(path: StrPath, keep_last: int | None, optimizers: list[torch.optim.Optimizer]) -> Writer:
    writer = Writer(path, keep_last=keep_last)
    writer._checks = [partial(one.check_trusted, "saved") for one in optimizers if isinstance(one, AdamW)]
    return writer


def _write(state: dict[str, Any], writer: Writer, process_group: Any) -> None:
    """Plan, write and commit, as ``dcp.save`` does: without its warning that one process is one process."""
    planner = DefaultSavePlanner()
    ranks = ranks_of(process_group)
    metadata: Metadata | None = None

    def plan() -> SavePlan:
        planner.set_up_planner(state, storage_meta=writer.storage_meta(), is_coordinator=ranks.is_coordinator)
        writer.set_up_storage_writer(ranks.is_coordinator)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    def write() -> list[WriteResult]:
        return writer.write_data(planner.finish_plan(mine), planner).wait()

    def commit(results: list[list[WriteResult]]) -> None:
        assert metadata is not None
        writer.finish(metadata=metadata, results=results)

    try:
        with _plain_errors("save"):
            mine = ranks.reduce_scatter("plan", plan, plan_all)
            ranks.all_reduce("write", write, commit)
    finally:
        writer.abandon()


_earlier: list[Handle] = []
"""The last save beside training, until the next one has seen its end."""
_turn = threading.RLock()
"""Held from the end of the earlier save until the next is under way, so that threads begin theirs one after the other.
A signal's handler may save in the midst of that: the thread that holds it may take it again."""


def async_save(
    path: StrPath,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    snapshot_budget_bytes: int | None = None,
    write_gbps: float | None = None,
    copy_gbps: float | None = None,
    when_busy: str = "wait",
) -> Handle:
    """Save as ``save`` does, of the state at this moment, while training goes on. All ranks call it.

    State of ``forebay.AdamW`` in pinned memory is written from where it lies. Pages of it that a later step comes to
    before they are written are copied aside; beyond the budget that step waits. Everything else is copied before this
    returns, as far as the budget goes. What it does not reach is written first: parameters and other state of the
    optimizers after this has returned, with the next step waiting for it, and all else before.

    Steps and loads of a checkpoint are safe. So is any change of what was copied. Parameters that were not copied must
    not be changed by anything else (``model.load_state_dict``, averaged weights swapped in, ``max_norm`` of an
    embedding) before the next step: torch counts such changes, and then the save fails with an error that names the
    tensor. Changes that torch does not count are not noticed: through ``.data``, in a CUDA graph, and by hand in
    ``optimizer.state`` of ``forebay.AdamW`` before the save is complete.

    Parameters
    ----------
    path, model, optimizer, extra, keep_last
        As in ``save``.
    snapshot_budget_bytes
        The most host memory that copies may take, of parameters, buffers and state together; by default as much as
        they need, of what is available. It is kept for the next save; ``release`` gives it back.
    write_gbps
        Write no faster than this on each rank; by default as fast as the disk takes it.
    copy_gbps
        Copy state aside no faster than this between steps, on each rank; by default as fast as memory is. A step that
        comes to state which is not copied yet copies it by itself.
    when_busy
        What to do while an earlier save is under way: ``"wait"`` for it, or ``"refuse"``.
    """
    if when_busy not in ("wait", "refuse"):
        raise OptionError(f"invalid when_busy: {when_busy!r}; use 'wait' or 'refuse'")
    if snapshot_budget_bytes is not None and (type(snapshot_budget_bytes) is not int or snapshot_budget_bytes < 0):
        raise OptionError(f"invalid snapshot_budget_bytes: {snapshot_budget_bytes!r}; use 0 or more, or None")
    for option, gbps in (("write_gbps", write_gbps), ("copy_gbps", copy_gbps)):
        if gbps is not None and not (isinstance(gbps, Real) and gbps > 0):
            raise OptionError(f"invalid {option}: {gbps!r}; use a positive number, or None")
    optimizers = _optimizers(optimizer)
    writer = _writer(path, keep_last, optimizers)
    # As things are now: whatever is loaded from here on does not mend what is saved.
    writer._checks = [_outcome(check) for check in writer._checks]
    writer.bytes_per_s = None if write_gbps is None else float(write_gbps) * 1e9
    writer.moved = moved = _core.Moved()
    saves, calls = groups()
    snapshot: Snapshot | None = None
    with ExitStack() as turn:

        def begin() -> None:
            nonlocal snapshot
            _end_earlier(turn, refuse=when_busy == "refuse")
            snapshot = Snapshot(_state_to_save(model, optimizers, extra), optimizers, snapshot_budget_bytes)

        try:
            on_all_ranks(begin, calls)
            assert snapshot is not None
            writer.snapshot = kept = snapshot
            leaves, _ = flatten_state_dict(kept.state)
            moved.expect(sum(local(value).nbytes for value in leaves.values() if isinstance(value, torch.Tensor)))
            threads = max(min((os.cpu_count() or 2) // 2, 8), 1)
            snapshot.copy_ahead(threads, None if copy_gbps is None else float(copy_gbps) * 1e9)
            handle = Handle(snapshot, lambda: _write_beside(kept.state, writer, saves), moved)
        except BaseException:
            # Nobody will write it, so no step may wait for it.
            if snapshot is not None:
                snapshot.finish()
            raise
        _earlier[:] = [handle]
    kept.wait_for_loose()
    return handle


def _write_beside(state: dict[str, Any], writer: Writer, group: Any) -> None:
    try:
        _write(state, writer, group)
    except Error:
        raise
    except Exception as error:
        # What fails on a rank has been told to all as an `Error`; only telling itself can fail in another way.
        raise CheckpointError(
            f"{writer.path}: not saved, since the ranks did not reach each other: {type(error).__name__}: {error}; "
            "call result() on all of them before one ends or destroys its process group"
        ) from error


def _outcome(check: Callable[[], None]) -> Callable[[], None]:
    """Run a check now; return what raises its error later, where all ranks hear of it."""
    error: Error | None = None
    try:
        check()
    except Error as refused:
        error = refused

    def repeat() -> None:
        if error is not None:
            raise error

    return repeat


def _end_earlier(turn: ExitStack, *, refuse: bool = False) -> None:
    """Wait for a save under way, or refuse; raise what went wrong with it where nobody has heard of it.

    No other thread begins one before ``turn`` ends.
    """
    if not _turn.acquire(blocking=not refuse):
        raise CheckpointError("another thread begins a save; wait for it, or use when_busy='wait'")
    turn.callback(_turn.release)
    for handle in list(_earlier):
        if refuse and not handle.done():
            raise CheckpointError(
                f"an earlier save is under way: {handle.progress()}; wait for its result(), or use when_busy='wait'"
            )
        handle._done.wait()
        _earlier.clear()
        handle.raise_untold()


def _wait_for_earlier() -> None:
    for handle in list(_earlier):
        handle._done.wait()


@atexit.register
def _tell_at_exit() -> None:
    """Say that the last save failed where nobody has heard of it. Python has waited for its end."""
    for handle in _earlier:
        if handle.has_untold():
            error = handle._error
            sys.stderr.write(f"forebay: the last checkpoint was not saved: {type(error).__name__}: {error}\n")


_parents: list[Handle] = []
"""A forked child keeps its parent's save as it was: to let go of it may mean to wait for a thread of the parent."""


def _leave_save_to_parent() -> None:
    """Begin anew in a forked child: the thread that saves, and one that holds the turn, are its parent's."""
    global _turn
    _turn = threading.RLock()
    _parents.extend(_earlier)
    _earlier.clear()


os.register_at_fork(after_in_child=_leave_save_to_parent)


def load(
    path: StrPath,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    strict: bool = True,
    process_group: Any = None,
) -> dict[str, Any] | None:
    """Load the last complete checkpoint of a path, in place, and return what was saved as ``extra``. All ranks call it.

    It may have been saved by another number of ranks, and with torch's AdamW instead of forebay's or the reverse: a
    master weight that it does not have is made from the weight. A save of this process that is under way comes first.

    Parameters
    ----------
    path
        What was given to ``save``, or one numbered subfolder of it.
    model
        The model to load into.
    optimizer
        Its optimizer or optimizers.
    strict
        Whether to refuse a checkpoint that lacks something of the model or the optimizer, or has something else.
    process_group
        The ranks that load; by default all of them.
    """
    optimizers = _optimizers(optimizer)
    path = absolute(path)
    state: dict[str, Any] = {}

    def begin() -> Path:
        _wait_for_earlier()
        state.update(_state(model, optimizers))
        return _core.latest_checkpoint(path).relative_to(path)

    # One for all ranks and for the whole load, though another save may end at any moment.
    reader = Reader(path / on_all_ranks(begin, process_group)[0])
    wanted, _ = flatten_state_dict(state)
    missing: list[str] = []
    extra: dict[str, Any] | None = None
    try:
        metadata = reader.read_metadata()
        missing = _compare(reader.path, wanted, metadata, strict)
        _add_options(state, metadata)
        # First, so that nothing is changed where it cannot be read.
        extra = _extra(reader)
    except Error as error:
        # The others may have found nothing wrong: they hear of it from DCP, instead of waiting for this rank.
        reader._refused = error
    try:
        with _plain_errors("load"), _quietly():
            planner = DefaultLoadPlanner(allow_partial_load=True)
            dcp_load(state, storage_reader=reader, planner=planner, process_group=process_group)
    except BaseException as error:
        if reader._has_read:
            # Whichever rank failed, what this one has is of one checkpoint in part and of another in part.
            for one in optimizers:
                if isinstance(one, AdamW):
                    one.distrust(str(error))
        raise
    with torch.no_grad():
        for name in missing:
            # State that the checkpoint does not have starts anew; a master follows its weight below.
            value = wanted[name]
            is_master = name.endswith(".master_param")
            if name.startswith("optimizer.state.") and not is_master and isinstance(value, torch.Tensor):
                local(value).zero_()
    options = StateDictOptions(strict=strict)
    if model is not None:
        set_model_state_dict(model, state["model"], options=options)
        if optimizers:
            set_optimizer_state_dict(model, optimizers, state["optimizer"], options=options)
    for one in optimizers:
        if isinstance(one, AdamW) and any(name.endswith(".master_param") for name in missing):
            one.refresh_master_weights()
    return extra


def release() -> None:
    """Give back the host memory that ``async_save`` keeps for the copies of the next save, after one under way."""
    _wait_for_earlier()
    release_copies()


def _optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def _state(model: torch.nn.Module | None, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    if model is None:
        if optimizers:
            raise OptionError("an optimizer needs its model: the state's names are the model's")
        return {}
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_dtensor(parameter):
            # A module's state dict has new tensors, which are not described as the parameters are.
            for key in _get_fqns(model, name):
                if key in state["model"]:
                    describe_like(parameter, state["model"][key])
    if optimizers:
        for one in optimizers:
            if isinstance(one, AdamW):
                # Otherwise DCP makes the state appear by taking a step.
                one.prepare()
        state["optimizer"] = get_optimizer_state_dict(model, optimizers)
    return state


def _compare(path: Path, wanted: Mapping[str, Any], metadata: Metadata, strict: bool) -> list[str]:
    """Return the names that the checkpoint does not have; refuse it where it is another model's."""
    found = metadata.state_dict_metadata
    for name, value in wanted.items():
        stored = found.get(name)
        if isinstance(stored, TensorStorageMetadata) and isinstance(value, torch.Tensor) and stored.size != value.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(stored.size)} in the checkpoint and {tuple(value.shape)} here"
            )
        if stored is not None and isinstance(stored, TensorStorageMetadata) != isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: {name} is a tensor on one side and a value on the other")
    missing = [name for name in wanted if name not in found]
    if strict:
        # A parameter that never had a gradient has no state at all, and torch's AdamW has no masters.
        without_state = {
            name.rsplit(".", 1)[0] for name in missing if name.startswith("optimizer.state.") and name.endswith(".step")
        }
        lacking = [
            name
            for name in missing
            if not name.endswith(".master_param")
            and name.rsplit(".", 1)[0] not in without_state
            and not _is_option(name)
        ]
        foreign = [
            name
            for name in found
            if name not in wanted
            and name.split(".", 1)[0] in ("model", "optimizer")
            and not name.endswith(".master_param")
            and not _is_option(name)
            and not (name.startswith("optimizer.") and not any(key.startswith("optimizer.") for key in wanted))
        ]
        if lacking or foreign:
            both = [_listed("it lacks", lacking), _listed("it also has", foreign)]
            raise CheckpointError(
                f"{path}: not a checkpoint of this model and optimizer: {' and '.join(filter(None, both))}; "
                "strict=False loads what fits"
            )
    return missing


def _is_option(name: str) -> bool:
    """Whether something is an option of a group: schedulers and versions of torch add some, and each has a default."""
    return name.startswith("optimizer.param_groups.") and not name.endswith(".params")


def _add_options(state: dict[str, Any], metadata: Metadata) -> None:
    """Make places for options of groups that only the checkpoint has; torch's own optimizers take them as well."""
    groups = state.get("optimizer", {}).get("param_groups", [])
    for name, stored in metadata.state_dict_metadata.items():
        match metadata.planner_data.get(name):
            case ("optimizer", "param_groups", int(number), option) if number < len(groups):
                place: torch.Tensor | None = None
                if isinstance(stored, TensorStorageMetadata):
                    place = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
                groups[number].setdefault(option, place)


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{more}"


def _extra(reader: Reader) -> dict[str, Any] | None:
    """Return what was saved as ``extra``, put together again."""
    if "extra" not in reader.objects:
        return None
    extra = reader.value("extra")
    return extra if isinstance(extra, dict) else None


@contextmanager
def _quietly() -> Iterator[None]:
    """Without DCP's warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.distributed is (disabled, )?unavailable.*")
        yield


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Turn DCP's collection of every rank's failures, which is no ``Exception``, into the first of them."""
    try:
        yield
    except CheckpointException as failed:
        if not failed.failures:
            raise CheckpointError(f"{what} failed: {failed}") from failed
        rank = min(failed.failures)
        error = failed.failures[rank][0]
        if isinstance(error, Error):
            raise error from failed
        raise CheckpointError(f"{what} failed on rank {rank}: {type(error).__name__}: {error}") from failed
