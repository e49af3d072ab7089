"""
The compiled part of forebay.
"""

from _typeshed import Incomplete, SupportsGetItem, SupportsLenAndGetItem
from typing import Any, SupportsFloat, SupportsIndex, final

__all__ = ["Activations", "Engine", "HostView", "_errors_for_test", "_gil_is_released_for_test", "_panic_for_test", "backends", "bench_step", "probe", "version"]

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
    def save(self, /, storage: SupportsIndex, storage_bytes: SupportsIndex, addr: SupportsIndex, start_bytes: SupportsIndex, bytes: SupportsIndex, version: SupportsIndex, may_leave: bool, counted: bool, stream: SupportsIndex) -> tuple[int, int, int, bool, bool, list[int], str | None]:
        """
        A tensor was saved: a range of a storage at a version. Returns the numbers of the save and of its entry, where
        the entry's range begins, whether it is new and whether it leaves the device, the entries to let go of now, and
        why one that was to leave stays. A new entry that leaves has to be held until it is named.
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
    def open_ring(self, /, addr: SupportsIndex, owner: Any, stream: SupportsIndex) -> None:
        """
        Make the ring in memory that `owner` keeps alive, or on the device itself where the address is 0.
        """
    def pinned_bytes(self, /) -> int:
        """
        Pinned bytes of this optimizer's state.
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
class HostView:
    """
    A range of a pinned slab as a Python buffer of exactly that size. It keeps the slab alive.
    """
    def __len__(self, /) -> int:
        """
        Bytes of the range.
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

def probe(device: str | None = None) -> str:
    """
    Measure a device, by default the first GPU; JSON text.
    """

def version() -> str:
    """
    The version of the extension module, which is the version of the package.
    """
