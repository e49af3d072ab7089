"""The storage plugin for ``torch.distributed.checkpoint``: planning is DCP's, bytes are moved in Rust."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from forebay import _core
from forebay._progress import bar
from forebay._snapshot import wait_before_load
from forebay._torch import local, stream_handle
from forebay._values import decode, encode
from forebay.errors import CheckpointError, Error, OptionError
from forebay.optim import AdamW

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay._snapshot import Snapshot

StrPath = str | os.PathLike[str]

STAGE_BYTES = 128 << 20
"""Bytes read at a time for targets that cannot be read into: on a GPU, or of another type."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Types as safetensors names them."""

_TYPES = {name: dtype for dtype, name in DTYPES.items()}


def absolute(path: StrPath) -> Path:
    """Return a path that means the same wherever the process goes; ``~`` is the home folder, as in a shell."""
    text = os.fspath(path)
    if text == "":
        raise OptionError("invalid path: ''; name a folder")
    return (Path(text).expanduser() if text == "~" or text.startswith("~/") else Path(text)).absolute()


# What travels between the ranks.


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a rank writes: decided by the coordinator, the same folder for all."""

    folder: str
    prefix: str


@dataclasses.dataclass(frozen=True)
class _Stored:
    """One item as its rank has stored it; the first item of a rank also carries the rank's files."""

    value: Any = None
    tensor: dict[str, Any] | None = None
    files: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class _Opened:
    """Which checkpoint a rank reads: the same for all, if its manifest is."""

    folder: str
    manifest_crc: int


class Writer(StorageWriter):
    """Writes a checkpoint for ``dcp.save``: into a new numbered subfolder of a path, complete or not there at all.

    Parameters
    ----------
    path
        The folder. Checkpoints that it has already stay, unless ``keep_last`` says otherwise.
    keep_last
        After a save, keep so many complete checkpoints of this path; by default all.
    threads
        Files written at once by each rank; by default as many as there are cores, at most 8.
    progress
        Whether to draw a progress bar; by default on a terminal.
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
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise OptionError(f"invalid keep_last: {keep_last!r}; use 1 or more, or None to keep all")
        if threads is not None and (type(threads) is not int or threads < 1):
            raise OptionError(f"invalid threads: {threads!r}; use 1 or more")
        self.path = absolute(path)
        self.keep_last = keep_last
        self.threads = threads
        self.progress = progress
        # For saves beside training: the snapshot, how fast to write at most, and the bytes written so far.
        self.snapshot: Snapshot | None = None
        self.bytes_per_s: float | None = None
        self.moved: _core.Moved | None = None
        self._saving: _core.Saving | None = None
        self._checks: list[Callable[[], None]] = []

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin anew, at another path if one is given."""
        self.abandon()
        if checkpoint_id is not None:
            self.path = absolute(checkpoint_id)

    def abandon(self) -> None:
        """Give up a save that did not finish; the next one removes what it wrote."""
        if self._saving is not None:
            self._saving.abandon()
            self._saving = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take note of how DCP is run."""
        if kwargs.get("use_collectives") is False:
            raise OptionError(
                "use_collectives=False is not supported: a checkpoint is complete when every rank's part is"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is, unless there is a reason not to save: from here every rank hears of it."""
        for check in self._checks:
            check()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the new subfolder and tell every rank."""
        self.abandon()
        self._saving = _core.Saving(self.path)
        folder = self._saving.folder()
        return [dataclasses.replace(plan, storage_data=_Place(folder, f"{i}-")) for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part and sync it."""
        place: _Place = plan.storage_data
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        results = [
            WriteResult(item.index, 0, _Stored(value=_look_up(planner, item)))
            for item in plan.items
            if item.type == WriteItemType.BYTE_IO
        ]
        if self.moved is not None:
            # Of what all ranks have, each writes a share.
            self.moved.expect(sum(_bytes(item) for item in tensors))
        stored, files = self._write_all(place, tensors, planner)
        for item, tensor in zip(tensors, stored, strict=True):
            results.append(WriteResult(item.index, tensor["end"] - tensor["begin"], _Stored(tensor=tensor)))
        if files:
            first = results[0]
            with_files = dataclasses.replace(first.storage_data, files=files)
            results[0] = dataclasses.replace(first, storage_data=with_files)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_all(
        self, place: _Place, items: list[WriteItem], planner: SavePlanner
    ) -> tuple[list[dict[str, Any]], tuple[dict[str, Any], ...]]:
        # Memory that could not be copied comes first: a step waits for it.
        live = {} if self.snapshot is None else self.snapshot.live.tensors
        first = [item for item in items if item.index.fqn in live]
        rest = [item for item in items if item.index.fqn not in live]
        where, files = self._write_live(place, first, planner)
        if rest:
            others, more = self._write_tensors(place, rest, planner, is_last=True)
            where, files = where + others, files + more
        stored = {id(item): at for item, at in zip(first + rest, where, strict=True)}
        return [stored[id(item)] for item in items], files

    def _write_live(
        self, place: _Place, items: list[WriteItem], planner: SavePlanner
    ) -> tuple[list[dict[str, Any]], tuple[dict[str, Any], ...]]:
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
    ) -> tuple[list[dict[str, Any]], tuple[dict[str, Any], ...]]:
        entries: dict[str, list[Any]] = {key: [] for key in ("name", "dtype", "shape", "address", "on_device")}
        held = []
        gpu: torch.device | None = None
        for item in items:
            assert item.tensor_data is not None
            data = _dense(planner.resolve_data(item))
            if data.device.type == "cuda" and gpu in (None, data.device):
                gpu = data.device
            elif data.device.type != "cpu":
                # Another GPU than the first, or a device that only torch can read.
                data = data.cpu()
            held.append(data)
            chunk, size = item.tensor_data.chunk, item.tensor_data.size
            entries["name"].append(_entry_name(item.index.fqn, chunk, size))
            entries["dtype"].append(_dtype_name(data.dtype, item.index.fqn))
            entries["shape"].append(list(data.shape))
            entries["address"].append(data.data_ptr())
            entries["on_device"].append(data.device.type == "cuda")
        total = sum(data.nbytes for data in held)
        device = None if gpu is None else f"cuda:{gpu.index or 0}"
        stream = 0 if gpu is None else stream_handle(gpu)
        manner = {
            "snapshot": self.snapshot.kept if self.snapshot is not None and is_last else None,
            "bytes_per_s": self.bytes_per_s,
            "gives_way": self.snapshot is not None,
        }
        shown = False if self.snapshot is not None else self.progress
        with bar(f"saving {self.path.name}", total, shown=shown) as counted:
            moved = self.moved or counted
            written = _core.write_checkpoint(
                place.folder, place.prefix, entries, device, stream, self.threads, moved, manner
            )
        files: list[dict[str, Any]] = []
        stored: list[dict[str, Any]] = [{} for _ in items]
        for name, length, blocks, inside in written:
            files.append({"name": name, "bytes": length, "blocks": blocks})
            for number, begin, end in inside:
                described = items[number].tensor_data
                assert described is not None
                stored[number] = {
                    "dtype": entries["dtype"][number],
                    "size": list(described.size),
                    "offsets": list(described.chunk.offsets),
                    "shape": entries["shape"][number],
                    "file": name,
                    "begin": begin,
                    "end": end,
                }
        return stored, tuple(files)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest: the checkpoint is complete from here on."""
        assert self._saving is not None
        manifest: dict[str, Any] = {
            "block_bytes": _core.CHECKPOINT_BLOCK_BYTES,
            "files": [],
            "tensors": {},
            "objects": {},
            "paths": _paths(metadata.planner_data),
            "made_by": {"forebay": _core.version(), "torch": torch.__version__},
        }
        stored: list[tuple[str, _Stored]] = [(w.index.fqn, w.storage_data) for rank in results for w in rank]
        for _, part in stored:
            manifest["files"] += part.files
        numbers = {file["name"]: number for number, file in enumerate(manifest["files"])}
        for name, part in stored:
            if part.tensor is None:
                manifest["objects"][name] = part.value
                continue
            of = part.tensor
            tensor = manifest["tensors"].setdefault(name, {"dtype": of["dtype"], "shape": of["size"], "chunks": []})
            chunk = {key: of[key] for key in ("offsets", "shape", "begin", "end")}
            tensor["chunks"].append({**chunk, "file": numbers[of["file"]]})
        saving, self._saving = self._saving, None
        saving.commit(json.dumps(manifest, allow_nan=False), self.keep_last)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether this is a path in a file system."""
        return "://" not in os.fspath(checkpoint_id)


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _look_up(planner: SavePlanner, item: WriteItem) -> Any:
    # `resolve_data` would give the value pickled.
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise OptionError(
            f"{type(planner).__name__} cannot give {item.index.fqn!r} as a value; use DCP's DefaultSavePlanner or a "
            "planner with its lookup_object"
        )
    return encode(look_up(item.index), item.index.fqn)


def _dense(data: Any) -> torch.Tensor:
    """Return a tensor's elements as they go to a file: in order, without gaps."""
    tensor = local(data).detach()
    return tensor.resolve_conj().resolve_neg().contiguous()


def _dtype_name(dtype: torch.dtype, name: str) -> str:
    if dtype not in DTYPES:
        raise CheckpointError(f"{name} is of type {dtype}, which safetensors does not have; cast it before saving")
    return DTYPES[dtype]


def _entry_name(name: str, chunk: ChunkStorageMetadata, size: torch.Size) -> str:
    """Name a chunk in its file: as the tensor, with its ranges where it is a part."""
    if chunk.sizes == size:
        return name
    ranges = (f"{offset}:{offset + length}" for offset, length in zip(chunk.offsets, chunk.sizes, strict=True))
    return f"{name}[{','.join(ranges)}]"


def _paths(planner_data: Any) -> dict[str, list[str | int]]:
    if planner_data is None:
        return {}
    plain = isinstance(planner_data, dict) and all(
        isinstance(path, tuple) and all(type(key) in (str, int) for key in path) for path in planner_data.values()
    )
    if not plain:
        raise OptionError("the planner's own data cannot be kept without pickle; use DCP's DefaultSavePlanner")
    return {name: list(path) for name, path in planner_data.items()}


class Reader(StorageReader):
    """Reads a checkpoint for ``dcp.load``: straight into the tensors, each block checked.

    Parameters
    ----------
    path
        What was given to ``Writer``, for its last complete checkpoint; or one numbered subfolder of it.
    threads
        Blocks read at once; by default as many as there are cores, at most 8.
    progress
        Whether to draw a progress bar; by default on a terminal.
    """

    def __init__(self, path: StrPath, *, threads: int | None = None, progress: bool | None = None) -> None:
        super().__init__()
        if threads is not None and (type(threads) is not int or threads < 1):
            raise OptionError(f"invalid threads: {threads!r}; use 1 or more")
        self.path = absolute(path)
        self.threads = threads
        self.progress = progress
        self._checkpoint: _core.Checkpoint | None = None
        self._opened = _Opened("", 0)
        self._manifest: dict[str, Any] = {}
        self._chunks: dict[tuple[str, tuple[int, ...]], int] = {}
        # Why nothing can be loaded, until all ranks hear of it; and whether anything has been read.
        self._refused: Error | None = None
        self._has_read = False

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin anew, at another path if one is given."""
        self._checkpoint = None
        self._refused = None
        self._has_read = False
        if checkpoint_id is not None:
            self.path = absolute(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint, check its structure, and say what is in it."""
        try:
            return self._open()
        except Error as error:
            if "rank" not in kwargs:
                raise
            # DCP passes over the first error, asks again for metadata of one rank, and would then only say that there
            # is none.
            self._refused = error
            return Metadata({})

    def _open(self) -> Metadata:
        self._checkpoint = _core.Checkpoint(self.path)
        text = self._checkpoint.manifest()
        self._opened = _Opened(self._checkpoint.folder(), zlib.crc32(text.encode()))
        self._manifest = manifest = json.loads(text)
        described: dict[str, Any] = {name: BytesStorageMetadata() for name in manifest["objects"]}
        storage = {}
        self._chunks = {}
        for name, tensor in manifest["tensors"].items():
            chunks = []
            for number, chunk in enumerate(tensor["chunks"]):
                chunks.append(ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["shape"])))
                storage[MetadataIndex(name, chunk["offsets"])] = number
                # An empty chunk may stand where another begins; nothing is ever read from it.
                if 0 not in chunk["shape"]:
                    self._chunks[name, tuple(chunk["offsets"])] = number
            properties = TensorProperties(dtype=_type(tensor["dtype"], name))
            described[name] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        paths = {name: tuple(path) for name, path in manifest["paths"].items()}
        return Metadata(described, planner_data=paths, storage_data=storage)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse what could not be opened: from here every rank hears of it."""
        if self._refused is not None:
            raise self._refused

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say which checkpoint this rank has opened."""
        return dataclasses.replace(plan, storage_data=self._opened)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse to load some ranks from one checkpoint and some from another that was completed in between."""
        opened = [plan.storage_data for plan in plans if isinstance(plan.storage_data, _Opened)]
        if len({one.manifest_crc for one in opened}) > 1:
            folders = ", ".join(sorted({one.folder for one in opened}))
            raise CheckpointError(f"the ranks found different checkpoints: {folders}; load one of them by its folder")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for."""
        self._has_read = True
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(self.value(item.storage_index.fqn)))
        items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(item).detach() for item in items]
        total = sum(target.nbytes for target in targets)
        with torch.no_grad(), bar(f"loading {self._label()}", total, shown=self.progress) as moved:
            self._read(items, targets, moved)
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _label(self) -> str:
        return "/".join(Path(self._opened.folder).parts[-2:])

    def value(self, name: str) -> Any:
        """Return a value that is no tensor, with the tensors in it."""
        return decode(self.objects[name], self.tensor)

    @property
    def objects(self) -> dict[str, Any]:
        """The values that are no tensors, as JSON."""
        found: dict[str, Any] = self._manifest["objects"]
        return found

    def _read(self, items: list[ReadItem], targets: list[torch.Tensor], moved: _core.Moved) -> None:
        direct: list[tuple[ReadItem, torch.Tensor, torch.dtype]] = []
        staged: list[tuple[ReadItem, torch.Tensor, torch.dtype]] = []
        for item, target in zip(items, targets, strict=True):
            stored = _TYPES[self._manifest["tensors"][item.storage_index.fqn]["dtype"]]
            (direct if _is_direct(target, stored) else staged).append((item, target, stored))
        # A save under way may still need what is about to be overwritten.
        wait_before_load()
        try:
            # All of one kind first: whatever can be refused is refused before anything is written.
            self._read_into([(item, target) for item, target, _ in direct], moved)
            batch: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
            for item, target, stored in staged:
                batch.append((item, target, torch.empty(tuple(item.lengths), dtype=stored, device="cpu")))
                if sum(buffer.nbytes for _, _, buffer in batch) >= STAGE_BYTES:
                    self._read_staged(batch, moved)
                    batch = []
            self._read_staged(batch, moved)
        except BaseException as error:
            # An interrupt between two batches leaves the state as mixed as a damaged file does.
            _distrust(
                {target.untyped_storage().data_ptr() for target in targets if target.numel()},
                str(error) or type(error).__name__,
            )
            raise

    def _read_staged(self, batch: list[tuple[ReadItem, torch.Tensor, torch.Tensor]], moved: _core.Moved) -> None:
        self._read_into([(item, buffer) for item, _, buffer in batch], moved)
        for _, target, buffer in batch:
            target.copy_(buffer)

    def _read_into(self, pairs: list[tuple[ReadItem, torch.Tensor]], moved: _core.Moved) -> None:
        assert self._checkpoint is not None
        keys = ("tensor", "chunk", "offset", "length", "stride", "address")
        requests: dict[str, list[Any]] = {key: [] for key in keys}
        for item, target in pairs:
            if target.numel() == 0:
                continue
            index = item.storage_index
            requests["tensor"].append(index.fqn)
            shape = self._manifest["tensors"][index.fqn]["shape"]
            offset = tuple(index.offset) if index.offset is not None else (0,) * len(shape)
            requests["chunk"].append(self._chunks[index.fqn, offset])
            requests["offset"].append(list(item.storage_offsets))
            requests["length"].append(list(item.lengths))
            requests["stride"].append(list(target.stride()))
            requests["address"].append(target.data_ptr())
        self._checkpoint.read(requests, self.threads, moved)

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, whole, on the CPU."""
        assert self._checkpoint is not None
        described = self._manifest["tensors"].get(name)
        if described is None:
            raise CheckpointError(f"{self._checkpoint.folder()}: a value names a tensor {name!r}, which is not there")
        whole = torch.empty(described["shape"], dtype=_type(described["dtype"], name), device="cpu")
        parts = []
        for chunk in described["chunks"]:
            view = whole
            for dim, (offset, length) in enumerate(zip(chunk["offsets"], chunk["shape"], strict=True)):
                view = view.narrow(dim, offset, length)
            index = MetadataIndex(name, chunk["offsets"])
            zeros, lengths = torch.Size([0] * whole.dim()), torch.Size(chunk["shape"])
            parts.append((ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, lengths), view))
        self._read_into(parts, _core.Moved())
        return whole

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether this is a path in a file system."""
        return "://" not in os.fspath(checkpoint_id)


def _type(name: str, tensor: str) -> torch.dtype:
    if name not in _TYPES:
        raise CheckpointError(f"tensor {tensor!r} is of type {name}, which torch {torch.__version__} does not have")
    return _TYPES[name]


def _is_direct(target: torch.Tensor, stored: torch.dtype) -> bool:
    """Whether bytes can be read straight into a tensor's memory."""
    return (
        target.device.type == "cpu"
        and target.dtype == stored
        and target.layout == torch.strided
        and not target.is_conj()
        and not target.is_neg()
        and torch._debug_has_internal_overlap(target) != 1
    )


def _pickled(value: Any) -> io.BytesIO:
    # What DCP's planners take; it never touches the disk.
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _distrust(storages: set[int], reason: str) -> None:
    """Make the optimizers whose state lies in these storages refuse to step until they are loaded anew."""
    for optimizer in list(AdamW.alive):
        states = dict.values(optimizer.state)
        mine = (local(value) for state in states for value in state.values() if isinstance(value, torch.Tensor))
        if any(value.numel() and value.untyped_storage().data_ptr() in storages for value in mine):
            optimizer.distrust(reason)
