"""Checkpoints that load on any number of ranks: a storage plugin for ``torch.distributed.checkpoint``, and two calls.

``Writer`` and ``Reader`` take the place of DCP's ``FileSystemWriter`` and ``FileSystemReader``. Planning, sharding and
the collectives stay DCP's; bytes go between memory and files in Rust, without a copy, and every byte has a checksum.
``save`` and ``load`` do a whole model and its optimizers.
"""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
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
from torch.distributed.checkpoint.utils import _DistWrapper

from forebay import _core
from forebay._snapshot import Handle, Snapshot, release_copies
from forebay._storage import Reader, StrPath, Writer
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
    state = _state(model, optimizers)
    _add_extra(state, extra)
    _wait_for_earlier()
    _write(state, _writer(path, keep_last, optimizers), process_group)


def _add_extra(state: dict[str, Any], extra: Mapping[str, Any] | None) -> None:
    if extra is not None:
        tensors: dict[str, torch.Tensor] = {}
        state["extra"] = Encoded(dict(extra), tensors, "extra")
        # Not nested: DCP would flatten lists and dicts, and lose empty ones and the types of keys.
        state.update(tensors)


def _writer(path: StrPath, keep_last: int | None, optimizers: list[torch.optim.Optimizer]) -> Writer:
    writer = Writer(path, keep_last=keep_last)
    writer._checks = [partial(one.check_trusted, "saved") for one in optimizers if isinstance(one, AdamW)]
    return writer


def _write(state: dict[str, Any], writer: Writer, process_group: Any) -> None:
    """Plan, write and commit, as ``dcp.save`` does: without its warning that one process is one process."""
    planner = DefaultSavePlanner()
    ranks = _DistWrapper(process_group, dist.is_available() and dist.is_initialized(), 0)
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
_group: list[Any] = []


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
        if gbps is not None and not gbps > 0:
            raise OptionError(f"invalid {option}: {gbps!r}; use a positive number, or None")
    optimizers = _optimizers(optimizer)
    writer = _writer(path, keep_last, optimizers)
    # As things are now: whatever is loaded from here on does not mend what is saved.
    writer._checks = [_outcome(check) for check in writer._checks]
    group = _end_earlier_on_all_ranks(when_busy)
    state = _state(model, optimizers)
    _add_extra(state, extra)
    snapshot = Snapshot(state, optimizers, snapshot_budget_bytes)
    try:
        writer.snapshot, writer.moved = snapshot, _core.Moved()
        writer.bytes_per_s = None if write_gbps is None else write_gbps * 1e9
        leaves, _ = flatten_state_dict(snapshot.state)
        total = sum(local(value).nbytes for value in leaves.values() if isinstance(value, torch.Tensor))
        threads = max(min((os.cpu_count() or 2) // 2, 8), 1)
        snapshot.copy_ahead(threads, None if copy_gbps is None else copy_gbps * 1e9)
        handle = Handle(snapshot, lambda: _write(snapshot.state, writer, group), total, writer.moved)
    except BaseException:
        # Nobody will write it, so no step may wait for it.
        snapshot.finish()
        raise
    _earlier[:] = [handle]
    snapshot.wait_for_loose()
    return handle


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


def _wait_for_earlier() -> None:
    """Wait for a save under way; raise what went wrong with one that nobody asked for its result."""
    for handle in list(_earlier):
        handle._done.wait()
        _earlier.clear()
        handle.raise_untold()


def _end_earlier_on_all_ranks(when_busy: str) -> Any:
    """Wait for a save under way or refuse, and raise its error if any: the same on all ranks, or they would part ways.

    Return the group for the new one.
    """
    saves, calls = _groups()
    handle = _earlier[0] if _earlier else None
    if when_busy == "refuse" and _on_any_rank(handle is not None and not handle.done(), calls):
        progress = {} if handle is None else handle.progress()
        raise CheckpointError(
            f"an earlier save is under way: {progress}; wait for its result(), or use when_busy='wait'"
        )
    if handle is not None:
        handle._done.wait()
        _earlier.clear()
    if _on_any_rank(handle is not None and handle.has_untold(), calls):
        if handle is not None:
            handle.raise_untold(again=True)
        raise CheckpointError("the save before this one failed on another rank")
    return saves


def _on_any_rank(flag: bool, group: Any) -> bool:
    if group is None:
        return flag
    flags = torch.tensor([flag], dtype=torch.int32, device="cpu")
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    return bool(flags.item())


def _groups() -> tuple[Any, Any]:
    """Return a process group that only saves in the background use, and one for the calls that begin them.

    Training's own must not be shared with a thread, and these two not with each other.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None, None
    if not _group or _group[0] is not dist.group.WORLD:
        _group[:] = [dist.group.WORLD, dist.new_group(backend="gloo"), dist.new_group(backend="gloo")]
    return _group[1], _group[2]


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
    master weight that it does not have is made from the weight.

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
    reader = Reader(path)
    state = _state(model, optimizers)
    wanted, _ = flatten_state_dict(state)
    missing: list[str] = []
    extra: dict[str, Any] | None = None
    try:
        missing = _compare(reader.path, wanted, reader.read_metadata(), strict)
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
            if name.startswith("optimizer.") and not name.endswith(".master_param") and isinstance(value, torch.Tensor):
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
    for handle in list(_earlier):
        handle._done.wait()
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
            if not name.endswith(".master_param") and name.rsplit(".", 1)[0] not in without_state
        ]
        foreign = [
            name
            for name in found
            if name not in wanted
            and name.split(".", 1)[0] in ("model", "optimizer")
            and not name.endswith(".master_param")
            and not (name.startswith("optimizer.") and not any(key.startswith("optimizer.") for key in wanted))
        ]
        if lacking or foreign:
            both = [_listed("it lacks", lacking), _listed("it also has", foreign)]
            raise CheckpointError(
                f"{path}: not a checkpoint of this model and optimizer: {' and '.join(filter(None, both))}; "
                "strict=False loads what fits"
            )
    return missing


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
