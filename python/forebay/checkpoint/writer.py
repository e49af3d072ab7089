"""Writes checkpoints: a storage plugin for ``torch.distributed.checkpoint`` (DCP). DCP plans, Rust moves the bytes."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from forebay import _core
from forebay._checks import whole
from forebay._device import engine_name, is_cpu, is_gpu, stream_handle
from forebay._progress import bar
from forebay._tensors import address, local
from forebay.checkpoint.files import StrPath, absolute, dtype_name, is_path
from forebay.checkpoint.interrupts import allowed
from forebay.checkpoint.native import find, record_of
from forebay.checkpoint.ranks import plain_errors, ranks_of
from forebay.checkpoint.values import encode
from forebay.errors import CheckpointError, Error, OptionError
from forebay.optim.packed import standing_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
    from torch.distributed.checkpoint.planner import TensorWriteData

    from forebay.checkpoint.native import Kept
    from forebay.checkpoint.snapshot import Snapshot

    Stored = list[dict[str, Any]]
    """For each item: its tensor's type and shape, its box, and where it is in which file."""
    Files = tuple[dict[str, Any], ...]
    """Name, length and checksums of each file."""


PART_BYTES = 1 << 30
"""How much of the packed columns exists as f32 at a time, while they are saved."""


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a rank writes. The coordinator decides it; the folder is the same for all ranks."""

    folder: str
    prefix: str


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One entry of a file: an item's tensor, or a part of its encoding."""

    item: int
    part: int
    name: str
    dtype: str
    shape: list[int]
    data: torch.Tensor


@dataclasses.dataclass(frozen=True)
class _StoredItem:
    """What a rank sends to the coordinator about one item. The first item of a rank also has the rank's files."""

    value: Any = None
    tensor: dict[str, Any] | None = None
    files: Files = ()


class Writer(StorageWriter):
    """Writes a checkpoint for ``dcp.save`` into a new numbered subfolder of a path. It is complete or ignored.

    Parameters
    ----------
    path
        The folder. Its earlier checkpoints stay, unless ``keep_last`` says otherwise.
    keep_last
        After a save, keep this many complete checkpoints of this path; by default all.
    threads
        Number of files that each rank writes at once; by default one for each core, at most 8.
    progress
        Whether to draw a progress bar; by default as ``forebay.progress`` has set.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        keep_last: int | None = None,
        threads: int | None = None,
        progress: bool | None = None,
    ) -> None:
        super().__init__()
        self.path = absolute(path)
        self.keep_last = whole("keep_last", keep_last, 1, optional=True)
        self.threads = whole("threads", threads, 1, optional=True)
        self.progress = progress
        # For saves while training goes on: the snapshot, the highest rate, and the bytes written so far.
        self.snapshot: Snapshot | None = None
        self.bytes_per_s: float | None = None
        self.moved: _core.Moved | None = None
        # Columns that are written as they are kept, by the address of what stands for them.
        self.native: dict[int, Kept] = {}
        # Each raises if there is a reason not to save.
        self.checks: list[Callable[[], None]] = []
        # Bytes of tensors that this rank has written.
        self.written_bytes = 0
        self._saving: _core.Saving | None = None

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Start again, with another path if one is given."""
        self.abandon()
        if checkpoint_id is not None:
            self.path = absolute(checkpoint_id)

    def abandon(self) -> None:
        """Give up a save that is not complete; the next save removes what it wrote."""
        if self._saving is not None:
            self._saving.abandon()
            self._saving = None

    def discard(self) -> None:
        """Give up a save that is not complete, and remove what it wrote. No rank may be writing any more."""
        if self._saving is not None:
            self._saving.discard()
            self._saving = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise if the save has no collectives."""
        if kwargs.get("use_collectives") is False:
            raise OptionError(
                "use_collectives=False is not supported: a checkpoint is complete when every rank's part is; leave it "
                "out"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged, or raise a reason not to save. DCP sends errors from here to all ranks."""
        for check in self.checks:
            check()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the new subfolder and send its name to every rank."""
        self.abandon()
        self._saving = _core.Saving(self.path)
        folder = self._saving.folder()
        return [dataclasses.replace(plan, storage_data=_Place(folder, f"{i}-")) for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part and sync it."""
        place: _Place = plan.storage_data
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        results = [
            WriteResult(item.index, 0, _StoredItem(value=_look_up(planner, item)))
            for item in plan.items
            if item.type == WriteItemType.BYTE_IO
        ]
        if self.moved is not None:
            # Each rank writes its share of what all ranks have.
            kept = [self._kept(item, planner) for item in tensors]
            pairs = zip(tensors, kept, strict=True)
            self.moved.expect(sum(_bytes(item) if of is None else of.bytes for item, of in pairs))
        stored, files = self._write_all(place, tensors, planner)
        for item, tensor in zip(tensors, stored, strict=True):
            size = sum(place["end"] - place["begin"] for place in (tensor, tensor.get("beside")) if place)
            results.append(WriteResult(item.index, size, _StoredItem(tensor=tensor)))
        if files:
            first = results[0]
            with_files = dataclasses.replace(first.storage_data, files=files)
            results[0] = dataclasses.replace(first, storage_data=with_files)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_all(self, place: _Place, items: list[WriteItem], planner: SavePlanner) -> tuple[Stored, Files]:
        # Tensors that were not copied are written first: a step waits for them.
        live = {} if self.snapshot is None else self.snapshot.live.tensors
        first = [item for item in items if item.index.fqn in live]
        rest = [item for item in items if item.index.fqn not in live]
        where, files = self._write_live(place, first, planner)

        # Packed columns are written a part at a time, so that their f32 values need little memory.
        def is_ordinary(item: WriteItem) -> bool:
            return self._kept(item, planner) is not None or standing_for(_look_at(planner, item)) is None

        ordinary = [item for item in rest if is_ordinary(item)]
        unpacked = set(map(id, ordinary))
        packed = [item for item in rest if id(item) not in unpacked]
        for number, part in enumerate(_parts(packed)):
            apart = _Place(place.folder, f"{place.prefix}packed{number}-")
            others, more = self._write_tensors(apart, part, planner, is_last=False)
            where, files, first = where + others, files + more, first + part
        if ordinary:
            others, more = self._write_tensors(place, ordinary, planner, is_last=True)
            where, files = where + others, files + more
        stored = {id(item): at for item, at in zip(first + ordinary, where, strict=True)}
        return [stored[id(item)] for item in items], files

    def _write_live(self, place: _Place, items: list[WriteItem], planner: SavePlanner) -> tuple[Stored, Files]:
        if self.snapshot is None:
            return [], ()
        try:
            if not items:
                return [], ()
            self.snapshot.live.order()
            apart = _Place(place.folder, f"{place.prefix}first-")
            written = self._write_tensors(apart, items, planner, is_last=False)
            self.snapshot.live.check()
            return written
        finally:
            self.snapshot.live.written.set()

    def _write_tensors(
        self, place: _Place, items: list[WriteItem], planner: SavePlanner, *, is_last: bool
    ) -> tuple[Stored, Files]:
        # Held until the call below returns: the engine reads their memory.
        held, gpu = self._entries(items, planner)
        manner = {
            "snapshot": self.snapshot.kept if self.snapshot is not None and is_last else None,
            "bytes_per_s": self.bytes_per_s,
            "gives_way": self.snapshot is not None,
        }
        device = None if gpu is None else engine_name(gpu)
        stream = 0 if gpu is None else stream_handle(gpu)
        shown = False if self.snapshot is not None else self.progress
        total = sum(entry.data.nbytes for entry in held)
        with bar(f"saving {self.path.name}", total, shown=shown) as counted:
            moved = self.moved or counted
            written = _core.write_checkpoint(
                place.folder, place.prefix, _columns(held), device, stream, self.threads, moved, manner
            )
        self.written_bytes += total
        return self._where(items, held, written, planner)

    def _kept(self, item: WriteItem, planner: SavePlanner) -> Kept | None:
        """Return the column that is written as it is kept in place of an item; None for an ordinary item."""
        if not self.native:
            return None
        kept = find(self.native, _look_at(planner, item))
        # A part of a local tensor has no parts of its own.
        whole = kept is not None and _described(item).chunk.sizes == local(kept.packed.parameter).shape
        return kept if whole else None

    def _entries(self, items: list[WriteItem], planner: SavePlanner) -> tuple[list[_Entry], torch.device | None]:
        """Return what is written for items, on the host or on one GPU, and that GPU."""
        entries: list[_Entry] = []
        gpu: torch.device | None = None

        def add(number: int, part: int, suffix: str, dtype: str | None, shape: list[int], data: torch.Tensor) -> None:
            nonlocal gpu
            if is_gpu(data.device) and gpu in (None, data.device):
                gpu = data.device
            elif not is_cpu(data.device):
                # On a second GPU, or on a device that only torch can read.
                data = data.cpu()
            of, name = _described(items[number]), items[number].index.fqn
            entry_name = _entry_name(name + suffix, of.chunk, of.size)
            entries.append(_Entry(number, part, entry_name, dtype or dtype_name(data.dtype, name), shape, data))

        for number, item in enumerate(items):
            if (kept := self._kept(item, planner)) is not None:
                for part, (data, described) in enumerate(zip(kept.tensors, kept.parts, strict=True)):
                    add(number, part, *described, data)
                continue
            data = _look_at(planner, item)
            packed = standing_for(data)
            data = _dense(data if packed is None else packed.on_host())
            add(number, 0, "", None, list(data.shape), data)
        return entries, gpu

    def _where(
        self, items: list[WriteItem], entries: list[_Entry], written: list[Any], planner: SavePlanner
    ) -> tuple[Stored, Files]:
        """Return where the engine has written each item, and the files."""
        files: list[dict[str, Any]] = []
        stored: Stored = [{} for _ in items]
        for name, length, blocks, inside in written:
            files.append({"name": name, "bytes": length, "blocks": blocks})
            for number, begin, end in inside:
                entry = entries[number]
                place = {"file": name, "begin": begin, "end": end}
                if entry.part:
                    stored[entry.item]["beside"] = place
                else:
                    stored[entry.item].update(place)
        first = {entry.item: entry for entry in reversed(entries)}
        for number, item in enumerate(items):
            described = _described(item)
            stored[number].update(size=list(described.size), offsets=list(described.chunk.offsets))
            if (kept := self._kept(item, planner)) is None:
                stored[number].update(dtype=first[number].dtype, shape=first[number].shape)
                continue
            stored[number].update(dtype="F32", shape=list(described.chunk.sizes), encoding=kept.encoding)
            if kept.order is not None:
                stored[number]["order"] = kept.order
            if kept.weight is not None:
                stored[number]["weight"] = kept.weight
        return stored, tuple(files)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest: after this the checkpoint is complete."""
        assert self._saving is not None
        stored: list[tuple[str, _StoredItem]] = [(w.index.fqn, w.storage_data) for rank in results for w in rank]
        manifest = _manifest(stored, metadata.planner_data)
        self._saving.commit(json.dumps(manifest, allow_nan=False), self.keep_last)
        self._saving = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether this is a path in a file system."""
        return is_path(checkpoint_id)


def write_state(state: dict[str, Any], writer: Writer, process_group: Any) -> None:
    """Plan, write and commit as ``dcp.save`` does, without its warning that there is only one process.

    If the save fails, what it wrote is removed, unless ranks cannot reach each other: then one may still be writing.
    """
    planner = DefaultSavePlanner()
    ranks = ranks_of(process_group)
    metadata: Metadata | None = None

    def plan() -> SavePlan:
        with allowed():
            planner.set_up_planner(state, storage_meta=writer.storage_meta(), is_coordinator=ranks.is_coordinator)
            writer.set_up_storage_writer(ranks.is_coordinator)
            return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    def write() -> list[WriteResult]:
        with allowed():
            return writer.write_data(planner.finish_plan(mine), planner).wait()

    def commit(results: list[list[WriteResult]]) -> None:
        assert metadata is not None
        writer.finish(metadata=metadata, results=results)

    try:
        with plain_errors("save", ranks.rank):
            mine = ranks.reduce_scatter("plan", plan, plan_all)
            ranks.all_reduce("write", write, commit)
    except BaseException as error:
        # An `Error` or an interrupt has been exchanged by all ranks, so none of them is writing. Anything else is a
        # failure of the exchange itself.
        if isinstance(error, Error) or not isinstance(error, Exception):
            writer.discard()
        raise
    finally:
        writer.abandon()


def write_in_background(state: dict[str, Any], writer: Writer, process_group: Any) -> None:
    """Run ``write_state`` in its own thread. A rank may end meanwhile, because nothing in training waits for this."""
    try:
        write_state(state, writer, process_group)
    except Error:
        raise
    except Exception as error:
        # A failure of one rank reaches all ranks as an `Error`. Only the exchange itself can fail in another way.
        raise CheckpointError(
            f"{writer.path}: not saved: communication between ranks failed: {type(error).__name__}: {error}; call "
            "result() on all ranks before one of them ends or destroys its process group"
        ) from error


def _described(item: WriteItem) -> TensorWriteData:
    """Return what DCP says about an item that is a tensor."""
    assert item.tensor_data is not None
    return item.tensor_data


def _bytes(item: WriteItem) -> int:
    of = _described(item)
    return of.chunk.sizes.numel() * of.properties.dtype.itemsize


def _look_up(planner: SavePlanner, item: WriteItem) -> Any:
    # `resolve_data` would return the value pickled.
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise OptionError(
            f"{type(planner).__name__} cannot give {item.index.fqn!r} as a value; use DCP's DefaultSavePlanner or a "
            "planner with its lookup_object"
        )
    return encode(look_up(item.index), item.index.fqn)


def _look_at(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """Return an item's tensor."""
    found: torch.Tensor = planner.resolve_data(item)  # type: ignore[assignment]
    return found


def _parts(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    """Divide items into parts of about ``PART_BYTES``."""
    part: list[WriteItem] = []
    for item in items:
        part.append(item)
        if sum(map(_bytes, part)) >= PART_BYTES:
            yield part
            part = []
    if part:
        yield part


def _dense(data: Any) -> torch.Tensor:
    """Return a tensor's elements as a file stores them: in order, without gaps."""
    tensor = local(data).detach()
    return tensor.resolve_conj().resolve_neg().contiguous()


def _columns(entries: list[_Entry]) -> dict[str, list[Any]]:
    """Return the properties of entries that the engine needs: one list for each property."""
    return {
        "name": [entry.name for entry in entries],
        "dtype": [entry.dtype for entry in entries],
        "shape": [entry.shape for entry in entries],
        "address": [address(entry.data) for entry in entries],
        "on_device": [is_gpu(entry.data.device) for entry in entries],
    }


def _entry_name(name: str, chunk: ChunkStorageMetadata, size: torch.Size) -> str:
    """Return a chunk's name in its file: the tensor's, with ranges if the chunk is a part."""
    if chunk.sizes == size:
        return name
    ranges = (f"{offset}:{offset + length}" for offset, length in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{name}[{','.join(ranges)}]"


def _manifest(stored: list[tuple[str, _StoredItem]], planner_data: Any) -> dict[str, Any]:
    """Return the manifest of what all ranks have stored."""
    manifest: dict[str, Any] = {
        "block_bytes": _core.CHECKPOINT_BLOCK_BYTES,
        "files": [],
        "tensors": {},
        "objects": {},
        "paths": _paths(planner_data),
        "made_by": {"forebay": _core.version(), "torch": torch.__version__},
    }
    for _, part in stored:
        manifest["files"] += part.files
    numbers = {file["name"]: number for number, file in enumerate(manifest["files"])}
    for name, part in stored:
        if part.tensor is None:
            manifest["objects"][name] = part.value
            continue
        of = part.tensor
        tensor = manifest["tensors"].setdefault(name, {"dtype": of["dtype"], "shape": of["size"], "chunks": []})
        keys = ("offsets", "shape", "begin", "end", "encoding", "order")
        chunk: dict[str, Any] = {key: of[key] for key in keys if key in of}
        if "beside" in of:
            chunk["beside"] = {**of["beside"], "file": numbers[of["beside"]["file"]]}
        tensor["chunks"].append({**chunk, "file": numbers[of["file"]]})
        if "weight" in of:
            tensor["weight"] = of["weight"]
        if "encoding" in of:
            manifest.setdefault("encodings", {})[of["encoding"]] = record_of(of["encoding"])
    return manifest


def _paths(planner_data: Any) -> dict[str, list[str | int]]:
    if planner_data is None:
        return {}
    plain = isinstance(planner_data, dict) and all(
        isinstance(path, tuple) and all(type(key) in (str, int) for key in path) for path in planner_data.values()
    )
    if not plain:
        raise OptionError("the planner's own data cannot be kept without pickle; use DCP's DefaultSavePlanner")
    return {name: list(path) for name, path in planner_data.items()}
