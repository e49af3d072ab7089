"""Checkpoints that load on any number of ranks.

``save``, ``async_save`` and ``load`` handle a whole model and its optimizers. ``Writer`` and ``Reader`` replace DCP's
``FileSystemWriter`` and ``FileSystemReader`` (``torch.distributed.checkpoint``). DCP plans, shards and runs the
collectives. Rust moves the bytes between memory and files, without a copy, and every byte has a checksum. ``exists``,
``latest``, ``inspect``, ``verify`` and ``export_weights`` need no model.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from forebay import _core, _trace
from forebay._checks import flag, one_of, positive, whole
from forebay._log import logger
from forebay._tensors import local
from forebay.checkpoint import arguments, contents, handle
from forebay.checkpoint.files import StrPath, absolute
from forebay.checkpoint.handle import Handle
from forebay.checkpoint.interrupts import allowed
from forebay.checkpoint.look import exists, export_weights, inspect, latest, verify
from forebay.checkpoint.native import columns_of, find
from forebay.checkpoint.ranks import groups, on_all_ranks, plain_errors, quietly, ranks_of, uninterrupted
from forebay.checkpoint.reader import Reader
from forebay.checkpoint.snapshot import Snapshot, release_copies
from forebay.checkpoint.writer import Writer, write_in_background, write_state
from forebay.errors import Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

__all__ = [
    "Handle",
    "Reader",
    "Writer",
    "async_save",
    "exists",
    "export_weights",
    "inspect",
    "latest",
    "load",
    "release",
    "save",
    "verify",
]


def save(
    path: StrPath,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    trained_only: bool = False,
    native: bool = False,
    process_group: Any = None,
) -> None:
    """Save a model, its optimizers and other values of the run. All ranks call it.

    If an earlier ``async_save`` from this thread or to this path failed and its ``result()`` was not called, this
    function raises that error and saves nothing.

    Parameters
    ----------
    path
        The folder. Each save makes a numbered subfolder. The earlier checkpoint stays until the new one is complete.
    model
        The model; its parameters may be sharded by FSDP2.
    optimizer
        Its optimizer or optimizers, of forebay or of torch.
    extra
        Other values to save, the same on every rank: tensors, arrays and scalars of numpy, numbers, strings, bytes, and
        lists, tuples and dicts of them.
    keep_last
        Keep this many complete checkpoints of this path; by default all.
    trained_only
        Save no parameters that do not require gradients, as the base model of LoRA. ``load`` leaves such parameters as
        they are. Buffers are saved.
    native
        Write state that is kept in fewer bits than f32 as it is kept: bf16, 8 bits, compact masters. The files are
        smaller, and loading them into the same formats and shards converts nothing. Any optimizer loads them.
    process_group
        The ranks that save; by default all of them.
    """
    state: dict[str, Any] = {}
    writer: Writer | None = None

    def begin() -> None:
        nonlocal writer
        optimizers = _checked(path, model, optimizer, extra)
        writer = _writer(path, keep_last, optimizers)
        flag("native", native)
        with ExitStack() as turn:
            handle.take_turn(turn, writer.path)
        state.update(contents.contents_to_save(model, optimizers, extra, trained_only=trained_only))
        if native:
            writer.native = columns_of(state)

    begun = time.perf_counter()
    with uninterrupted(process_group):
        on_all_ranks(begin, process_group)
        assert writer is not None
        write_state(state, writer, process_group)
    if _trace.current is not None:
        _trace.current.saved("save", begun, writer.written_bytes)
    logger.info("saved %s in %.2f s", writer.path, time.perf_counter() - begun)


def async_save(
    path: StrPath,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    trained_only: bool = False,
    native: bool = False,
    snapshot_budget_bytes: int | None = None,
    write_gbps: float | None = None,
    copy_gbps: float | None = None,
    when_busy: str = "wait",
) -> Handle:
    """Save the present state as ``save`` does, while training goes on. All ranks call it.

    State of forebay's optimizers in pinned memory is written in place. Before a step changes a page that is not written
    yet, the page is copied; when the budget is used up, the step waits. Other tensors are copied before this function
    returns, if they fit into the budget. Tensors that do not fit are written first. The next step waits for parameters
    and optimizer state; this call waits for the rest.

    Steps and loads of a checkpoint are safe. Copied tensors may be changed at any time. Before the next step, nothing
    else (``model.load_state_dict``, averaged weights swapped in, ``max_norm`` of an embedding) may change parameters
    that were not copied. Torch counts such changes, and the save then fails with an error that names the tensor. Some
    changes are not counted and not detected: through ``.data``, in a CUDA graph, and by hand in ``optimizer.state`` of
    such an optimizer before the save is complete.

    ``result()`` of the handle raises the error if the save failed. An unobserved failure is raised by the next save
    from the same thread or to the same path, or printed at exit.

    Parameters
    ----------
    path, model, optimizer, extra, keep_last, trained_only, native
        As in ``save``.
    snapshot_budget_bytes
        The most host memory for copies of parameters, buffers and state together. By default as much as needed, up to
        75 % of the available memory. The memory is kept for the next save; ``release`` frees it. The f32 values of
        compact masters and of state in fewer bits, 4 bytes for each element of a column, are beyond it; a native save
        makes none.
    write_gbps
        Write no faster than this, on each rank; by default at full speed.
    copy_gbps
        Copy state between steps no faster than this, on each rank; by default at full speed. A step that needs state
        which is not copied yet copies it itself.
    when_busy
        What to do while an earlier save is running: ``"wait"`` for it, or ``"refuse"``, which raises an error.
    """
    snapshot: Snapshot | None = None
    writer: Writer | None = None
    moved = _core.Moved()

    def begin() -> None:
        nonlocal snapshot, writer
        one_of("when_busy", when_busy, ("wait", "refuse"))
        whole("snapshot_budget_bytes", snapshot_budget_bytes, 0, optional=True)
        write_rate = positive("write_gbps", write_gbps, without="for full speed")
        positive("copy_gbps", copy_gbps, without="for full speed")
        flag("native", native)
        optimizers = _checked(path, model, optimizer, extra)
        writer = _writer(path, keep_last, optimizers)
        # Checked now: a later load does not change the state that is saved.
        writer.checks = [_outcome(check) for check in writer.checks]
        writer.bytes_per_s = None if write_rate is None else write_rate * 1e9
        writer.moved = moved
        handle.take_turn(turn, writer.path, refuse=when_busy == "refuse")
        state = contents.contents_to_save(model, optimizers, extra, trained_only=trained_only)
        columns = columns_of(state) if native else {}
        writer.snapshot = snapshot = Snapshot(state, optimizers, snapshot_budget_bytes, columns)
        writer.native = snapshot.native

    with uninterrupted(None), ExitStack() as turn:
        saves, calls = groups()
        try:
            on_all_ranks(begin, calls)
            assert snapshot is not None
            assert writer is not None
            saving = _start(writer, snapshot, moved, saves, copy_gbps)
        except BaseException:
            # Nothing will write the snapshot, so no step may wait for it.
            if snapshot is not None:
                snapshot.finish()
            raise
        handle.current[:] = [saving]
    with _trace.waiting("save", "wait for tensors that fit no budget"):
        snapshot.wait_for_loose()
    return saving


def _start(writer: Writer, snapshot: Snapshot, moved: _core.Moved, group: Any, copy_gbps: float | None) -> Handle:
    """Start to write a snapshot in the background."""
    leaves, _ = flatten_state_dict(snapshot.state)
    tensors = [value for value in leaves.values() if isinstance(value, torch.Tensor)]
    kept = [find(snapshot.native, value) for value in tensors]
    pairs = zip(tensors, kept, strict=True)
    moved.expect(sum(local(value).nbytes if of is None else of.bytes for value, of in pairs))
    threads = max(min((os.cpu_count() or 2) // 2, 8), 1)
    snapshot.copy_ahead(threads, None if copy_gbps is None else copy_gbps * 1e9)
    return Handle(writer.path, snapshot, lambda: write_in_background(snapshot.state, writer, group), moved)


def load(
    path: StrPath,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    strict: bool = True,
    process_group: Any = None,
) -> dict[str, Any] | None:
    """Load the last complete checkpoint of a path, in place, and return its ``extra`` values. All ranks call it.

    The number of ranks may differ from that of the save, and optimizers of torch and forebay are interchangeable. A
    master weight that the checkpoint lacks is made from the weight. If this process is saving, the load waits for the
    save.

    Parameters
    ----------
    path
        The path that was given to ``save``, or one numbered subfolder of it.
    model
        The model to load into.
    optimizer
        Its optimizer or optimizers.
    strict
        Whether to raise an error if the checkpoint lacks values of the model or the optimizer, or has other values.
    process_group
        The ranks that load; by default all of them.
    """
    begun = time.perf_counter()
    with uninterrupted(process_group), ExitStack() as laid_out:
        extra = _load(model, optimizer, path, strict, process_group, laid_out)
    logger.info("loaded %s in %.2f s", path, time.perf_counter() - begun)
    return extra


def _load(
    model: torch.nn.Module | None, optimizer: Any, path: StrPath, strict: bool, process_group: Any, laid_out: ExitStack
) -> dict[str, Any] | None:
    state: dict[str, Any] = {}
    optimizers: list[torch.optim.Optimizer] = []

    def begin() -> Path:
        optimizers[:] = _checked(path, model, optimizer)
        handle.wait_for_current()
        state.update(contents.contents_of(model, optimizers, laid_out, whole=True))
        return _core.latest_checkpoint(absolute(path)).relative_to(absolute(path))

    # Chosen once, for all ranks and the whole load: another save may complete at any moment.
    chosen = on_all_ranks(begin, process_group)[0]
    reader = Reader(absolute(path) / chosen)
    wanted, _ = flatten_state_dict(state)
    missing: list[str] = []
    extra: dict[str, Any] | None = None
    try:
        with allowed():
            metadata = reader.read_metadata()
            spared = contents.frozen_names(model) if reader.objects.get(contents.TRAINED_ONLY) else frozenset[str]()
            missing = contents.compare(reader.path, wanted, metadata, strict, spared, reader.formats)
            contents.add_options(state, metadata)
            # Read first, so that nothing is changed if it cannot be read.
            extra = contents.extra_of(reader)
    except BaseException as error:
        # Other ranks may have found no error. DCP reports this one to them, so they do not wait for this rank.
        reader.refused = error

    def finish() -> None:
        contents.set_contents(model, optimizers, state, wanted, missing, strict=strict)
        contents.go_on_rounding(model, optimizers, reader)

    try:
        with plain_errors("load", ranks_of(process_group).rank), quietly():
            planner = DefaultLoadPlanner(allow_partial_load=True)
            dcp_load(state, storage_reader=reader, planner=planner, process_group=process_group)
        on_all_ranks(finish, process_group)
    except BaseException as error:
        if reader.has_read:
            # Whichever rank failed, the state of this one is now a mix of two checkpoints.
            for one in contents.guarded(optimizers):
                one.distrust(str(error) or type(error).__name__)
        raise
    return extra


def release() -> None:
    """Free the host memory that ``async_save`` keeps for the copies of the next save. Waits for a running save."""
    handle.wait_for_current()
    release_copies()


def _checked(path: Any, model: Any, optimizer: Any, extra: Any = None) -> list[torch.optim.Optimizer]:
    """Check what users pass; return the optimizers. Runs on all ranks together, so that none waits for a refusal."""
    arguments.check_path(path)
    arguments.check_model(model)
    arguments.check_extra(extra)
    return arguments.optimizers_of(optimizer)


def _writer(path: StrPath, keep_last: int | None, optimizers: list[torch.optim.Optimizer]) -> Writer:
    writer = Writer(path, keep_last=keep_last)
    writer.checks = [partial(one.check_trusted, "saved") for one in contents.guarded(optimizers)]
    return writer


def _outcome(check: Callable[[], None]) -> Callable[[], None]:
    """Run a check now; return a function that raises its error later, when all ranks can receive it."""
    error: Error | None = None
    try:
        check()
    except Error as refused:
        error = refused

    def repeat() -> None:
        if error is not None:
            raise error

    return repeat
