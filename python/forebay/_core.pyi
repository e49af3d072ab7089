"""
The compiled part of forebay.
"""

from _typeshed import Incomplete, SupportsGetItem, SupportsLenAndGetItem
from os import PathLike
from pathlib import Path
from typing import Any, Final, SupportsFloat, SupportsIndex, final

__all__ = ["CHECKPOINT_BLOCK_BYTES", "Activations", "Checkpoint", "Engine", "HostCopies", "HostView", "Looked", "Moved", "Saving", "Slabs", "Snapshot", "_errors_for_test", "_gil_is_released_for_test", "_panic_for_test", "backends", "bench_placements", "bench_step", "check_host", "explain_activations", "host_memory", "kept_copy_bytes", "latest_checkpoint", "look", "look_with_gradients", "plan_activations", "probe", "release_copies", "version", "write_checkpoint"]

CHECKPOINT_BLOCK_BYTES: Final[int]
"""
Bytes of a checkpoint's file that one checksum covers.
"""

@final
class Activations:
    """
    Stores, fetches and pinned memory for the saved tensors of one device.
    """
    def __new__(cls, /, device: str, fraction: SupportsFloat | SupportsIndex | None, max_in_flight_bytes: SupportsIndex | None, pinned_budget_bytes: SupportsIndex | None, link_bytes_per_s: SupportsFloat | SupportsIndex | None = None) -> Activations:
        """
        Open a device; nothing is pinned yet. No fraction stands for what hides under the computation. A link's rate
        makes the CPU backend as slow as that, for tests.
        """
    def begin_pass(self, /) -> None:
        """
        A pass begins where there are no layers.
        """
    def enter(self, /, layer: SupportsIndex, stream: SupportsIndex) -> None:
        """
        A layer begins; a number below that of the layer before begins a new pass.
        """
    def fetch(self, /, entry: SupportsIndex, addr: SupportsIndex, bytes: SupportsIndex, urgent: bool, stream: SupportsIndex) -> None:
        """
        Fetch an entry into memory that is held until the entry is let go.
        """
    def leave(self, /, stream: SupportsIndex) -> None:
        """
        The layer that began last has ended.
        """
    def let_go(self, /, entry: SupportsIndex) -> None:
        """
        Let go of an entry's fetched bytes, or give up fetching it ahead.
        """
    def let_go_before(self, /, layer: SupportsIndex) -> list[int]:
        """
        Let go of what its route lets go of before a layer begins. Returns the entries.
        """
    def open(self, /, save: SupportsIndex, stream: SupportsIndex) -> tuple[int, int, bool, list[tuple[int, int]]]:
        """
        A saved tensor is about to be used. Returns its entry; 0 if that is on the device, 1 if it is on its way or has
        arrived, 2 if it has to be fetched now; whether to hold it after this use; and the entries to fetch ahead, with
        their bytes, the entry itself first where it has to be fetched.
        """
    def ready(self, /, entry: SupportsIndex, stream: SupportsIndex) -> None:
        """
        What comes next on the stream waits for the entry's fetch.
        """
    def release(self, /, save: SupportsIndex) -> int | None:
        """
        A saved tensor is gone. Returns its entry if that can be let go now.
        """
    def reserve(self, /, bytes: SupportsIndex) -> None:
        """
        Pin so many bytes ahead of use.
        """
    def save(self, /, storage: SupportsIndex, storage_bytes: SupportsIndex, addr: SupportsIndex, start_bytes: SupportsIndex, bytes: SupportsIndex, version: SupportsIndex, may_leave: bool, counted: bool, stream: SupportsIndex, route: tuple[bool, SupportsIndex, SupportsIndex] | None = None) -> tuple[int, int, int, bool, bool, list[int], str | None]:
        """
        A tensor was saved: a range of a storage at a version. Returns the numbers of the save and of its entry, where
        the entry's range begins, whether it is new and whether it leaves the device, the entries to let go of now, and
        why one that was to leave stays. A new entry that leaves has to be held until it is named. A route is what a plan
        says: whether it leaves, the layer before which it is let go, the layer in whose backward pass it is fetched.
        """
    def stats(self, /) -> tuple[list[int], list[float]]:
        """
        Sums since the beginning: stored_bytes, fetched_bytes, kept_bytes, pinned_bytes, pinned_peak_bytes, stalls,
        stall_ns, window_bytes; then fraction, store_gbps, fetch_gbps.
        """
    def table(self, /) -> list[tuple[int, list[int]]]:
        """
        For each layer its number, then stored_bytes, fetched_bytes, kept_bytes, stalls, stall_ns, forward_ns,
        backward_ns.
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
    def _fail_on_host_for_test(self, /) -> None:
        """
        Make the next update on the host's threads fail, for tests.
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
    def finish_landing(self, /, only: tuple[SupportsIndex, SupportsIndex] | None) -> None:
        """
        Forget gradients that came down, all or one tensor's, and block until they have: the next step brings them anew.
        """
    def host_fractions(self, /) -> tuple[float, float | None]:
        """
        The part of the state that the host updated in the last step, and the part on which it has settled.
        """
    def host_kernel(self, /) -> str | None:
        """
        The vector unit that the host's threads use.
        """
    def host_stats(self, /) -> list[int]:
        """
        The host's part of the last step: threads, chunks, state_bytes, down_bytes, up_bytes, run_ns, wire_wait_ns,
        update_wait_ns, and the time of the device's part. Zeros where it has none.
        """
    def land(self, /, store: SupportsIndex, tensor: SupportsIndex, addr: SupportsIndex, bytes: SupportsIndex, stream: SupportsIndex) -> None:
        """
        Bring a gradient down now. The caller keeps it as it is until the next step has returned, or `finish_landing`.
        """
    def open_host(self, /, fraction: SupportsFloat | SupportsIndex | None, threads: SupportsIndex | None, kernel: str | None) -> None:
        """
        Let the host update its share: a fraction, or nothing for what makes both ends finish together. Without a ring it
        updates all. Its threads are started and its own ring is pinned with the state.
        """
    def open_landing(self, /, store: SupportsIndex, bytes: SupportsGetItem[int, SupportsIndex], budget_bytes: SupportsIndex | None) -> None:
        """
        Pin room for the gradients of a store's tensors, so many bytes for each, where there is none yet.
        """
    def open_ring(self, /, addr: SupportsIndex, owner: Any, stream: SupportsIndex) -> None:
        """
        Make the ring in memory that `owner` keeps alive, or on the device itself where the address is 0.
        """
    def pinned_bytes(self, /) -> int:
        """
        Pinned bytes of this optimizer's state, and of the host's ring and gradients where there are any.
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
    def stats(self, /) -> list[int]:
        """
        The last step in numbers, once its stores have ended: chunks, fetch_bytes, store_bytes, fetch_ns, update_ns,
        store_ns, stalls, stall_ns; then how often it waited for a save, and for how many nanoseconds.
        """
    def step(self, /, tensors: SupportsGetItem[int, tuple[Looked, Looked, SupportsGetItem[int, SupportsIndex]]], groups: SupportsGetItem[int, tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, bool]], stream: SupportsIndex, grad_scale: SupportsIndex) -> None:
        """
        Update the tensors of every store, in the order of the stores. Returns when the last update has been submitted,
        or for memory on the host when it is done.
        """
    def synchronize(self, /) -> None:
        """
        Block until every store has ended.
        """
    def take_torn(self, /) -> bool:
        """
        Whether the last step broke off when some of it was done already. Says so once.
        """
    def touch_state(self, /, others: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]]) -> tuple[int, float]:
        """
        Read and write every byte of the state, and of other memory on the host (address and bytes of each, whole words),
        with the host's threads, changing none; returns bytes and seconds. This is the pace that the memory allows.
        """
    def update_resident(self, /, tensors: tuple[Looked, Looked, SupportsGetItem[int, SupportsIndex]], state: SupportsGetItem[int, SupportsLenAndGetItem[SupportsIndex]], steps: SupportsGetItem[int, SupportsIndex], groups: SupportsGetItem[int, tuple[SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, SupportsFloat | SupportsIndex, bool]], stream: SupportsIndex, grad_scale: SupportsIndex) -> None:
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
    def bytes(self, /) -> int:
        """
        Bytes of the slab.
        """
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
class Looked:
    """
    What a look at many tensors found.
    """
    def __new__(cls, /, addresses: SupportsGetItem[int, SupportsIndex], dtypes: SupportsGetItem[int, SupportsIndex], devices: SupportsGetItem[int, SupportsIndex], elements: SupportsGetItem[int, SupportsIndex], contiguous: bool) -> Looked:
        """
        The same from lists, all of one length. Types are 0 for f32, 1 for bf16, 2 for f16; address 0 is no tensor.
        """
    @property
    def addresses(self, /) -> list[int]:
        """
        The address of each.
        """
    @property
    def contiguous(self, /) -> bool:
        """
        Whether every one is contiguous.
        """
    @property
    def devices(self, /) -> list[int]:
        """
        The number of each one's device, -1 for the host.
        """
    @property
    def dtypes(self, /) -> bytes:
        """
        The number of each one's type.
        """
    @property
    def elements(self, /) -> list[int]:
        """
        The elements of each.
        """
    def fits(self, /, other: Looked) -> bool:
        """
        Whether each is on the device of its counterpart and has as many elements.
        """
    def has_single(self, /) -> bool:
        """
        Whether one has a single element.
        """
    def overlap(self, /, apart: Looked | None) -> tuple[int, int] | None:
        """
        The places of two that share memory, if there are such. These are not gone through where they are the ones that
        are known to be apart.
        """
    def reachable(self, /, device: SupportsIndex) -> bool:
        """
        Whether each is on this device or on the host.
        """
    def same_memory(self, /, other: Looked) -> bool:
        """
        Whether these are at the addresses of those, one by one.
        """
    def spread(self, /, places: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]], count: SupportsIndex) -> Looked:
        """
        These at other places of a longer list, with no tensor at the rest: `places` has old and new place of each.
        """

@final
class Moved:
    """
    Bytes moved so far, for whoever asks from another thread how far it is.
    """
    def __new__(cls, /) -> Moved: ...
    def bytes(self, /) -> int:
        """
        The bytes.
        """
    def expect(self, /, bytes: SupportsIndex) -> None:
        """
        Say how many there will be.
        """
    def expected(self, /) -> int:
        """
        How many there will be, as far as anybody has said.
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
    State of one moment, kept while optimizers go on.
    """
    def __new__(cls, /, engines: SupportsGetItem[int, Engine], budget_bytes: SupportsIndex) -> Snapshot:
        """
        Begin one of all state that these engines have in pinned memory; copies of it take so many bytes at most.
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
    def stats(self, /) -> tuple[int, int, int, int, int]:
        """
        Bytes copied aside, bytes of memory taken for that, how often a step waited and how long in nanoseconds, and how
        often the writer gave way to a step.
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

def bench_placements(device: str, link_gbps: SupportsFloat | SupportsIndex | None, params: SupportsIndex, host_threads: SupportsIndex | None, host_kernel: str | None, slots: SupportsIndex, chunk_bytes: SupportsIndex, rounds: SupportsIndex, fractions: SupportsGetItem[int, SupportsFloat | SupportsIndex] = ...) -> str:
    """
    Run the step at every placement over made-up bf16 parameters, in turns, and at fixed shares of the host where asked
    for; JSON text. On the CPU backend the link may be given a rate.
    """

def bench_step(device: str | None, params: SupportsIndex, slots: SupportsIndex, chunk_bytes: SupportsIndex, steps: SupportsIndex) -> str:
    """
    Run the streamed step over synthetic parameters; JSON text.
    """

def check_host(kernel: str | None) -> int:
    """
    Check the name of a kernel against this machine; return how many threads the host may have.
    """

def explain_activations(plan: str) -> str:
    """
    A plan in words.
    """

def host_memory() -> tuple[int, int]:
    """
    Bytes of host memory that this process may use in all, and that are available now.
    """

def kept_copy_bytes() -> int:
    """
    Bytes of memory that are kept for the copies of the next snapshot.
    """

def latest_checkpoint(path: str | PathLike[str]) -> Path:
    """
    The folder of the checkpoint to load: a path itself if it is one, else its last complete subfolder.
    """

def look(tensors: Any, table: Any, plain: tuple[Any, Any]) -> Looked | None:
    """
    Look at torch's tensors through the table that `torch.Tensor.__dlpack_c_exchange_api__` names: one call for each
    tensor instead of five from Python. Nothing where the table or a tensor is not as expected: then Python looks itself.
    `plain` are the types of which a tensor may be.
    """

def look_with_gradients(parameters: Any, table: Any, plain: tuple[Any, Any]) -> tuple[Any, list[int] | None, Looked, Looked] | None:
    """
    Look at the parameters that have a gradient, and at their gradients, in one go. Returns the gradients, the places of
    these parameters in the list (nothing where they are all of it), and what `look` finds for both.
    """

def plan_activations(cost: str, budget_bytes: SupportsIndex | None, tokens: SupportsIndex, measured_tokens: SupportsIndex) -> str:
    """
    Plan a pass: its costs and the plan as JSON. Costs were measured for so many tokens and are scaled to others. Without a
    budget the plan is the one that takes least memory.
    """

def probe(device: str | None = None) -> str:
    """
    Measure a device, by default the first GPU; JSON text.
    """

def release_copies() -> int:
    """
    Give back the memory that is kept for the copies of the next snapshot; returns how many bytes that were.
    """

def version() -> str:
    """
    The version of the extension module, which is the version of the package.
    """

def write_checkpoint(folder: str | PathLike[str], prefix: str, entries: Incomplete, device: str | None, stream: SupportsIndex, threads: SupportsIndex | None, moved: Moved, manner: Incomplete) -> list[tuple[str, int, list[int], list[tuple[int, int, int]]]]:
    """
    Write entries into files of a folder, and sync them.
    """
