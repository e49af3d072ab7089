"""Checkpoints that load on any number of ranks: a storage plugin for ``torch.distributed.checkpoint``, and two calls.

``Writer`` and ``Reader`` take the place of DCP's ``FileSystemWriter`` and ``FileSystemReader``. Planning, sharding and
the collectives stay DCP's; bytes go between memory and files in Rust, without a copy, and every byte has a checksum.
``save`` and ``load`` do a whole model and its optimizers.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from forebay._storage import Reader, StrPath, Writer
from forebay._torch import local
from forebay.errors import CheckpointError, Error, OptionError
from forebay.optim import AdamW

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

__all__ = ["Reader", "Writer", "load", "save"]


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
        More to save, the same on every rank: tensors, numbers, texts, lists and dicts.
    keep_last
        Keep so many complete checkpoints of this path; by default all.
    process_group
        The ranks that save; by default all of them.
    """
    optimizers = _optimizers(optimizer)
    for one in optimizers:
        if isinstance(one, AdamW):
            one.check_trusted("saved")
    state = _state(model, optimizers)
    if extra is not None:
        state["extra"] = dict(extra)
    writer = Writer(path, keep_last=keep_last)
    try:
        with _plain_errors("save"), _quietly():
            dcp_save(state, storage_writer=writer, process_group=process_group)
    finally:
        writer.abandon()


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
    metadata = reader.read_metadata()
    state = _state(model, optimizers)
    wanted, _ = flatten_state_dict(state)
    missing = _compare(reader.path, wanted, metadata, strict)
    with _plain_errors("load"), _quietly():
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp_load(state, storage_reader=reader, planner=planner, process_group=process_group)
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
    return _extra(reader)


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
    manifest = reader._manifest
    names = [name for name, path in manifest["paths"].items() if path[:1] == ["extra"]]
    if not names:
        return None
    extra: dict[str, Any] = {}
    for name in names:
        value = reader.tensor(name) if name in manifest["tensors"] else reader.value(name)
        path = manifest["paths"][name][1:]
        if path:
            _place(extra, path, value)
    return extra


def _place(root: Any, path: list[str | int], value: Any) -> None:
    for key, following in pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(root, list):
            root.extend([None] * (int(key) + 1 - len(root)))
            if root[int(key)] is None:
                root[int(key)] = empty
            root = root[int(key)]
        else:
            root = root.setdefault(key, empty)
    last = path[-1]
    if isinstance(root, list):
        root.extend([None] * (int(last) + 1 - len(root)))
    root[last] = value


@contextmanager
def _quietly() -> Iterator[None]:
    """Without DCP's warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
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
