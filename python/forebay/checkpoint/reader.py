"""Reads checkpoints: a storage plugin for ``torch.distributed.checkpoint`` (DCP). DCP plans, Rust moves the bytes."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from forebay import _core
from forebay._checks import whole
from forebay._device import CPU, is_cpu
from forebay._log import logger
from forebay._progress import bar
from forebay._tensors import address, local, storage_address
from forebay.checkpoint.files import StrPath, absolute, dtype_of, is_path
from forebay.checkpoint.interrupts import allowed
from forebay.checkpoint.native import readable_as_kept
from forebay.checkpoint.snapshot import wait_before_load
from forebay.checkpoint.values import decode
from forebay.errors import CheckpointError, Error
from forebay.optim.base import Optimizer
from forebay.optim.packed import Assembly, Packed, standing_for

STAGE_BYTES = 128 << 20
"""Bytes read at a time for tensors that need a copy: on a GPU, or of another type."""


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """A box of a chunk, or of one part of its encoding, and the tensor on the host that it is read into."""

    index: MetadataIndex
    offsets: list[int]
    lengths: list[int]
    into: torch.Tensor
    # Its part of the encoding, to be read as it is; None for numbers.
    kept: int | None = None


@dataclasses.dataclass(frozen=True)
class _Opened:
    """Which checkpoint a rank reads. All ranks read the same one if its manifest is the same."""

    folder: str
    manifest_crc: int


class Reader(StorageReader):
    """Reads a checkpoint for ``dcp.load`` straight into the tensors, and checks every block.

    Parameters
    ----------
    path
        The path that was given to ``Writer``, for its last complete checkpoint; or one numbered subfolder of it.
    threads
        Number of blocks read at once; by default one for each core, at most 8.
    progress
        Whether to draw a progress bar; by default as ``forebay.progress`` has set.
    """

    def __init__(self, path: StrPath, *, threads: int | None = None, progress: bool | None = None) -> None:
        super().__init__()
        self.path = absolute(path)
        self.threads = whole("threads", threads, 1, optional=True)
        self.progress = progress
        # Why nothing can be loaded. Raised in `set_up_storage_reader`: errors from there reach all ranks.
        self.refused: BaseException | None = None
        # Whether any tensor may have been written to.
        self.has_read = False
        self._checkpoint: _core.Checkpoint | None = None
        self._opened = _Opened("", 0)
        self._manifest: dict[str, Any] = {}
        self._chunks: dict[tuple[str, tuple[int, ...]], int] = {}

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Start again, with another path if one is given."""
        self._checkpoint = None
        self.refused = None
        self.has_read = False
        if checkpoint_id is not None:
            self.path = absolute(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint, check its structure, and return its contents."""
        try:
            return self._open()
        except Error as error:
            if "rank" not in kwargs:
                raise
            # DCP ignores this error, asks for the metadata of one rank, and then only reports that there is none.
            self.refused = error
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
                # An empty chunk may begin where another does. Nothing is ever read from it.
                if 0 not in chunk["shape"]:
                    self._chunks[name, tuple(chunk["offsets"])] = number
            properties = TensorProperties(dtype=dtype_of(tensor["dtype"], name))
            described[name] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        paths = {name: tuple(path) for name, path in manifest["paths"].items()}
        return Metadata(described, planner_data=paths, storage_data=storage)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise the error if the checkpoint cannot be loaded. DCP sends errors from here to all ranks."""
        if self.refused is not None:
            raise self.refused

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add which checkpoint this rank has opened."""
        return dataclasses.replace(plan, storage_data=self._opened)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise if ranks opened different checkpoints: another save may have been completed meanwhile."""
        opened = [plan.storage_data for plan in plans if isinstance(plan.storage_data, _Opened)]
        if len({one.manifest_crc for one in opened}) > 1:
            folders = ", ".join(sorted({one.folder for one in opened}))
            raise CheckpointError(f"the ranks found different checkpoints: {folders}; load one of them by its folder")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for."""
        with allowed():
            return self._read_data(plan, planner)

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.has_read = True
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(self.value(item.storage_index.fqn)))
        items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(item).detach() for item in items]
        total = sum(self._stored_bytes(item, target) for item, target in zip(items, targets, strict=True))
        label = "/".join(Path(self._opened.folder).parts[-2:])
        with torch.no_grad(), bar(f"loading {label}", total, shown=self.progress) as moved:
            self._read(items, targets, moved)
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _stored_bytes(self, item: ReadItem, target: torch.Tensor) -> int:
        """Return about how many bytes of files an item needs."""
        if not target.numel():
            return 0
        chunk = self._chunk_of(item)
        whole = sum(place["end"] - place["begin"] for place in (chunk, chunk.get("beside")) if place)
        return int(whole * target.numel() // math.prod(chunk["shape"]))

    @property
    def objects(self) -> dict[str, Any]:
        """The values that are no tensors, as JSON."""
        found: dict[str, Any] = self._manifest["objects"]
        return found

    @property
    def formats(self) -> dict[str, str]:
        """The formats of tensors that are kept in fewer bits than f32."""
        kinds = {name: of["kind"] for name, of in self._manifest.get("encodings", {}).items()}
        tensors: dict[str, Any] = self._manifest["tensors"]
        found = {name: {chunk.get("encoding") for chunk in of["chunks"]} - {None} for name, of in tensors.items()}
        return {name: ", ".join(sorted(kinds[one] for one in of)) for name, of in found.items() if of}

    def value(self, name: str) -> Any:
        """Return a value that is no tensor, with the tensors in it."""
        return decode(self.objects[name], self.tensor)

    def tensor(self, name: str) -> torch.Tensor:
        """Return one whole tensor, on the CPU."""
        assert self._checkpoint is not None
        described = self._manifest["tensors"].get(name)
        if described is None:
            raise CheckpointError(
                f"{self._checkpoint.folder()}: a value refers to a tensor that is missing: {name!r}; load an earlier "
                "checkpoint"
            )
        found = torch.empty(described["shape"], dtype=dtype_of(described["dtype"], name), device=CPU)
        parts = []
        for chunk in described["chunks"]:
            view = found
            for dim, (offset, length) in enumerate(zip(chunk["offsets"], chunk["shape"], strict=True)):
                view = view.narrow(dim, offset, length)
            zeros = [0] * found.dim()
            parts.append(_Wanted(MetadataIndex(name, chunk["offsets"]), zeros, chunk["shape"], view))
        self._read_into(parts, _core.Moved())
        return found

    def _read(self, items: list[ReadItem], targets: list[torch.Tensor], moved: _core.Moved) -> None:
        direct: list[_Wanted] = []
        staged: list[tuple[ReadItem, torch.Tensor, torch.dtype]] = []
        # Columns that are not on the host, to be read as they are.
        apart: list[tuple[ReadItem, Packed]] = []
        converted: set[str] = set()
        for item, target in zip(items, targets, strict=True):
            name = item.storage_index.fqn
            stored = dtype_of(self._manifest["tensors"][name]["dtype"], name)
            packed = standing_for(target)
            if packed is not None and (as_kept := self._as_kept(item, packed, list(packed.values()))) is not None:
                if all(is_cpu(part.device) for part in packed.values()):
                    direct += as_kept
                else:
                    apart.append((item, packed))
                continue
            if packed is not None and "encoding" in self._chunk_of(item):
                converted.add(name)
            if packed is None and _is_direct(target, stored):
                direct.append(_wanted(item, target))
            else:
                staged.append((item, target, stored))
        if converted:
            logger.info(
                "%s: %d tensors of state are decoded and encoded again: here they are in other shards or formats",
                self._opened.folder,
                len(converted),
            )
        # A running save may still need the bytes that are about to be overwritten.
        wait_before_load()
        try:
            # All errors that can be detected early are raised here, before anything is written.
            self._read_into(direct, moved)
            self._read_apart(apart, moved)
            batch: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
            assembly = Assembly()
            # Boxes of one packed column follow each other.
            staged.sort(key=lambda one: id(standing_for(one[1])))
            for item, target, stored in staged:
                batch.append((item, target, torch.empty(tuple(item.lengths), dtype=stored, device=CPU)))
                if sum(buffer.nbytes for _, _, buffer in batch) >= STAGE_BYTES:
                    self._read_staged(batch, assembly, moved)
                    batch = []
            self._read_staged(batch, assembly, moved)
            assembly.finish()
        except BaseException as error:
            # An interrupt between two batches leaves the state as mixed as a damaged file does.
            storages = {storage_address(target.untyped_storage()) for target in targets if target.numel()}
            _distrust(storages, str(error) or type(error).__name__)
            raise

    def _read_staged(
        self, batch: list[tuple[ReadItem, torch.Tensor, torch.Tensor]], assembly: Assembly, moved: _core.Moved
    ) -> None:
        self._read_into([_wanted(item, buffer) for item, _, buffer in batch], moved)
        for item, target, buffer in batch:
            if (packed := standing_for(target)) is None:
                target.copy_(buffer)
            else:
                assembly.put(packed, item.dest_offsets, buffer)

    def _chunk_of(self, item: ReadItem) -> dict[str, Any]:
        """Return what the manifest says about the chunk of an item that is not empty."""
        found: dict[str, Any] = self._manifest["tensors"][item.storage_index.fqn]["chunks"][
            self._number(item.storage_index)
        ]
        return found

    def _number(self, index: MetadataIndex) -> int:
        shape = self._manifest["tensors"][index.fqn]["shape"]
        offset = (0,) * len(shape) if index.offset is None else tuple(index.offset)
        number: int = self._chunks[index.fqn, offset]
        return number

    def _as_kept(self, item: ReadItem, packed: Packed, into: list[torch.Tensor]) -> list[_Wanted] | None:
        """Return what is read into a column's parts as it is in the files; None if its numbers have to be read."""
        chunk = self._chunk_of(item)
        parts = readable_as_kept(packed, self._manifest, chunk, item.storage_offsets, item.lengths)
        if parts is None or any(item.dest_offsets):
            return None
        packed.check_awake()
        return [
            _Wanted(item.storage_index, [0] * len(shape), shape, part.view(shape), number)
            for number, (part, (_, _, shape)) in enumerate(zip(into, parts, strict=True))
        ]

    def _read_apart(self, columns: list[tuple[ReadItem, Packed]], moved: _core.Moved) -> None:
        """Read columns that are on a device as they are in the files, through memory for some of them at a time."""
        wanted: list[_Wanted] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, (item, packed) in enumerate(columns, 1):
            parts = [torch.empty(part.shape, dtype=part.dtype, device=CPU) for part in packed.values()]
            wanted += self._as_kept(item, packed, parts) or []
            copies += zip(packed.values(), parts, strict=True)
            if number == len(columns) or sum(part.nbytes for _, part in copies) >= STAGE_BYTES:
                self._read_into(wanted, moved)
                for part, read in copies:
                    part.copy_(read)
                wanted, copies = [], []

    def _read_into(self, boxes: list[_Wanted], moved: _core.Moved) -> None:
        """Read boxes into tensors on the CPU. The caller's list holds the tensors until the engine returns."""
        assert self._checkpoint is not None
        keys = ("tensor", "chunk", "offset", "length", "stride", "address", "kept")
        requests: dict[str, list[Any]] = {key: [] for key in keys}
        for box in boxes:
            if box.into.numel() == 0:
                continue
            requests["tensor"].append(box.index.fqn)
            requests["chunk"].append(self._number(box.index))
            requests["offset"].append(box.offsets)
            requests["length"].append(box.lengths)
            requests["stride"].append(list(box.into.stride()))
            requests["address"].append(address(box.into))
            requests["kept"].append(box.kept)
        self._checkpoint.read(requests, self.threads, moved)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Whether this is a path in a file system."""
        return is_path(checkpoint_id)


def _wanted(item: ReadItem, into: torch.Tensor) -> _Wanted:
    """Return the box of numbers that an item asks for."""
    return _Wanted(item.storage_index, list(item.storage_offsets), list(item.lengths), into)


def _is_direct(target: torch.Tensor, stored: torch.dtype) -> bool:
    """Whether bytes can be read straight into a tensor's memory."""
    return (
        is_cpu(target.device)
        and target.dtype == stored
        and target.layout == torch.strided
        and not target.is_conj()
        and not target.is_neg()
        and torch._debug_has_internal_overlap(target) != 1
    )


def _pickled(value: Any) -> io.BytesIO:
    # DCP's planners expect this. It is never written to the disk.
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _distrust(storages: set[int], reason: str) -> None:
    """Make optimizers whose state is in these storages refuse steps and saves until state is loaded again."""
    for optimizer in list(Optimizer.alive):
        shown = [value for state in dict.values(optimizer.state) for value in dict.values(state)]
        mine = [local(value) for value in shown if isinstance(value, torch.Tensor)]
        mine += [value.stand_in() for value in shown if isinstance(value, Packed)]
        if any(value.numel() and storage_address(value.untyped_storage()) in storages for value in map(local, mine)):
            optimizer.distrust(reason)
