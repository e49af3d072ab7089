"""
The compiled part of forebay.
"""

from _typeshed import Incomplete, SupportsGetItem, SupportsLenAndGetItem
from os import PathLike
from typing import Any, Final, SupportsFloat, SupportsIndex, final

__all__ = ["CHECKPOINT_BLOCK_BYTES", "Checkpoint", "Engine", "HostCopies", "HostView", "Moved", "Saving", "Slabs", "Snapshot", "_errors_for_test", "_gil_is_released_for_test", "_panic_for_test", "backends", "bench_step", "host_memory", "look", "probe", "version", "write_checkpoint"]

CHECKPOINT_BLOCK_BYTES: Final[int]
"""
Bytes of a checkpoint's file that one checksum covers.
"""

@final
class Checkpoint:
    """
    A complete checkpoint, its structure checked.
    """
    def __new__(cls, /, path: str | PathLike[str]) -> Checkpoint:
        """
        Open the last complete checkpoint of a path, or the one in that very folder.
        """
    def folder(self, /) -> str:
        """
        Its folder.
        """
    def manifest(self, /) -> str:
        """
        Its manifest, as JSON.
        """
    def read(self, /, requests: Incomplete, threads: SupportsIndex | None, moved: Moved) -> None:
        """
        Read boxes of chunks into memory on the host.
        """

@final
class Engine:
    """
    One optimizer's device, ring and host state.
    """
    def __new__(cls, /, device: str, slots: SupportsIndex, chunk_bytes: SupportsIndex) -> Engine:
        """
        Open a device; nothing is pinned or allocated yet.
        """
    def add(self, /, names: SupportsGetItem[int, str], elements: SupportsGetItem[int, SupportsIndex], amsgrad: SupportsGetItem[int, bool], master: SupportsGetItem[int, bool], on_host: SupportsGetItem[int, bool], budget_bytes: SupportsIndex | None) -> int:
        """
        Pin zeroed state for a list of tensors and return the number of their store.
        """
    def close(self, /) -> None:
        """
        Let go of ring and state. Buffers that are still held keep their slab.
        """
    def close_ring(self, /) -> None:
        """
        Wait for every store and let go of the ring; state stays, and `open_ring` makes steps possible again.
        """
    def open_ring(self, /, addr: SupportsIndex, owner: Any, stream: SupportsIndex) -> None:
        """
        Make the ring in memory that `owner` keeps alive, or on the device itself where the address is 0.
        """
    def pinned_bytes(self, /) -> int:
        """
        Pinned bytes of this optimizer's state.
        """
    def protect_all(self, /) -> None:
        """
        Return when the host may write into the state, as far as a save under way is concerned.
        """
    def resources_made(self, /) -> int:
        """
        Allocations, slabs, streams and events made on the device so far; constant from the second step on.
        """
    def ring_bytes(self, /) -> int:
        """
        Bytes of the ring to allocate for `open_ring`.
        """
    def settle(self, /, store: SupportsIndex, tensor: SupportsIndex) -> None:
        """
        Block until a tensor's stores have ended; others go on.
        """
    def snapshot(self, /, budget_bytes: SupportsIndex) -> Snapshot:
        """
        Begin a snapshot of all state that is in pinned memory; copies of it take so many bytes at most.
        """
    def stats(self, /) -> list[int]:
        """
        The last step in numbers, once its stores have ended: chunks, fetch_bytes, store_bytes, fetch_ns, update_ns,
        store_ns, stalls, stall_ns.
        """
    def step(self, /, tensors: SupportsGetItem[int, Incomplete], groups: SupportsGetItem[int, tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, bool]], stream: SupportsIndex, grad_scale: SupportsIndex) -> None:
        """
        Update the tensors of every store, in the order of the stores. Returns when the last update has been submitted,
        or for memory on the host when it is done.
        """
    def synchronize(self, /) -> None:
        """
        Block until every store has ended.
        """
    def update_resident(self, /, tensors: Incomplete, elements: SupportsGetItem[int, SupportsIndex], state: SupportsGetItem[int, SupportsLenAndGetItem[SupportsIndex]], steps: SupportsGetItem[int, SupportsIndex], groups: SupportsGetItem[int, tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, bool]], stream: SupportsIndex, grad_scale: SupportsIndex) -> None:
        """
        Update tensors whose state is on the device too: `state` has four addresses for each, 0 for an absent kind.
        """
    def view(self, /, store: SupportsIndex, tensor: SupportsIndex, kind: str) -> HostView | None:
        """
        A tensor's state of one kind, or its step counter, as a buffer. An absent kind gives nothing.
        """

@final
class HostCopies:
    """
    Copies of device memory in one pinned slab that is used again.
    """
    def __new__(cls, /, device: str) -> HostCopies: ...
    def fill(self, /, addresses: SupportsGetItem[int, SupportsIndex], bytes: SupportsGetItem[int, SupportsIndex], stream: SupportsIndex) -> list[HostView]:
        """
        Copy ranges of device memory to the host, behind what a stream has been given so far, and wait for them. The
        buffers of the call before must be out of use.
        """

@final
class HostView:
    """
    A range of a pinned slab as a Python buffer of exactly that size. It keeps the slab alive.
    """
    def __len__(self, /) -> int:
        """
        Bytes of the range.
        """

@final
class Moved:
    """
    Bytes moved so far, for a progress bar that another thread draws.
    """
    def __new__(cls, /) -> Moved: ...
    def bytes(self, /) -> int:
        """
        The bytes.
        """

@final
class Saving:
    """
    A save under way: the coordinator's part of it.
    """
    def __new__(cls, /, path: str | PathLike[str]) -> Saving:
        """
        Begin a checkpoint in a new subfolder of a path.
        """
    def abandon(self, /) -> None:
        """
        Give it up; what is written so far is removed by the next save.
        """
    def commit(self, /, manifest: str, keep_last: SupportsIndex | None) -> None:
        """
        Complete it with a manifest, given as JSON; keep only the last few checkpoints of the path if asked to.
        """
    def folder(self, /) -> str:
        """
        The subfolder.
        """

@final
class Slabs:
    """
    The slabs of one device in which storages sleep, and the transfer under way.
    """
    def __new__(cls, /, device: str) -> Slabs:
        """
        Open a device; nothing is pinned yet.
        """
    def begin(self, /, to_sleep: bool, stream: SupportsIndex, staging_addr: SupportsIndex, staging: Any) -> None:
        """
        Begin to move storages, behind what was submitted to `stream`. `staging` owns memory of `staging_bytes` at
        `staging_addr`; with address 0 nothing is packed.
        """
    def finish(self, /) -> None:
        """
        Block until all batches have arrived and nothing is in flight, also where one failed; then raise that failure.
        """
    def free(self, /, ids: SupportsGetItem[int, SupportsIndex]) -> None:
        """
        Note that storages are awake.
        """
    def has_arrived(self, /, batch: SupportsIndex) -> bool:
        """
        Whether a batch has arrived.
        """
    def holds(self, /, ids: SupportsGetItem[int, SupportsIndex], sizes: SupportsGetItem[int, SupportsIndex]) -> bool:
        """
        Whether each storage has its place, of this size, with nothing asleep there.
        """
    def pin_stats(self, /) -> tuple[int, int]:
        """
        What pinning took: bytes and nanoseconds of the slabs there are.
        """
    def pinned_bytes(self, /) -> int:
        """
        Pinned bytes.
        """
    def place(self, /, ids: SupportsGetItem[int, SupportsIndex], sizes: SupportsGetItem[int, SupportsIndex], budget_bytes: SupportsIndex | None = None) -> None:
        """
        Give each storage a place; pins what is missing.
        """
    def release(self, /) -> None:
        """
        Unpin and free everything; refused while anything sleeps.
        """
    def resources_made(self, /) -> int:
        """
        Allocations, slabs, streams and events made on the device so far; constant from the third sleep on.
        """
    @staticmethod
    def staging_bytes() -> int:
        """
        Bytes of device memory that a transfer uses to pack small storages.
        """
    def submit(self, /, ids: SupportsGetItem[int, SupportsIndex], addrs: SupportsGetItem[int, SupportsIndex], sizes: SupportsGetItem[int, SupportsIndex], owner: Any, stream: SupportsIndex) -> int:
        """
        Hand over a batch: numbers, addresses and sizes of storages that `owner` holds. Returns its number. Storages of
        a sleep count as asleep until they are freed: their places are neither given away nor stored to.
        """
    def wait(self, /, batch: SupportsIndex) -> None:
        """
        Block until a batch has arrived.
        """

@final
class Snapshot:
    """
    State of one moment, kept while an optimizer goes on.
    """
    def copy_ahead(self, /, threads: SupportsIndex, bytes_per_s: SupportsFloat | SupportsIndex | None) -> None:
        """
        Copy aside in the background what the next step will change.
        """
    def finish(self, /) -> None:
        """
        Keep nothing any longer.
        """
    def is_safe(self, /) -> bool:
        """
        Whether a step would neither copy nor wait.
        """
    def stats(self, /) -> tuple[int, int, int, int]:
        """
        Bytes copied aside, bytes of memory taken for that, how often a step waited, and how long in nanoseconds.
        """

def _errors_for_test() -> list[tuple[str, Any]]:
    """
    Every error of the engine by the name of its variant, with the exception that it becomes.

    Byte counts are 3 requested, 2 available, 5 in all; errno is 12.
    """

def _gil_is_released_for_test() -> bool:
    """
    Whether another thread can take the GIL while the guard runs.
    """

def _panic_for_test(message: str) -> None:
    """
    Panic inside the guard; it must arrive as an InternalError.
    """

def backends() -> tuple[list[str], list[tuple[str, str]]]:
    """
    The devices that can be opened, and for each backend that cannot be used here its name and the reason.
    """

def bench_step(device: str | None, params: SupportsIndex, slots: SupportsIndex, chunk_bytes: SupportsIndex, steps: SupportsIndex) -> str:
    """
    Run the streamed step over synthetic parameters; JSON text.
    """

def host_memory() -> tuple[int, int]:
    """
    Bytes of host memory that this process may use in all, and that are available now.
    """

def look(tensors: Any, table: Any) -> tuple[list[int], bytes, list[int], list[int], bool] | None:
    """
    Look at torch's tensors through the table that `torch.Tensor.__dlpack_c_exchange_api__` names: one call for each
    tensor instead of five from Python. Nothing where the table or a tensor is not as expected; then Python looks itself.
    """

def probe(device: str | None = None) -> str:
    """
    Measure a device, by default the first GPU; JSON text.
    """

def version() -> str:
    """
    The version of the extension module, which is the version of the package.
    """

def write_checkpoint(folder: str | PathLike[str], prefix: str, entries: Incomplete, device: str | None, stream: SupportsIndex, threads: SupportsIndex | None, moved: Moved, manner: Incomplete) -> list[tuple[str, int, list[int], list[tuple[int, int, int]]]]:
    """
    Write entries into files of a folder, and sync them.
    """
