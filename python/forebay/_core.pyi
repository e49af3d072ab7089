"""
The compiled part of forebay.
"""

from _typeshed import Incomplete, SupportsGetItem
from os import PathLike
from pathlib import Path
from typing import Any, Final, SupportsFloat, SupportsIndex, final

__all__ = ["CHECKPOINT_BLOCK_BYTES", "STATE_BLOCK", "ActivationPlan", "Activations", "CallKind", "CallTimes", "Checkpoint", "HostCopies", "HostView", "LayerCost", "LayerPlan", "LayerStats", "Looked", "MeasuredCall", "MeasuredPass", "Moved", "OffloadStats", "Opened", "Optimizer", "PassCost", "PassSample", "Route", "Rule", "Saved", "Saving", "Slabs", "Snapshot", "TensorCost", "Trace", "TracedWork", "_errors_for_test", "_gil_is_released_for_test", "_memory_for_test", "_panic_for_test", "backends", "bench_placements", "bench_step", "bytes_faulted_in", "check_contract", "check_host", "checkpoint_encoding", "checkpoint_encoding_record", "checkpoint_summary", "command", "count_copied", "count_save_wait", "export_weights", "forget_parent_totals", "host_memory", "keep_masters", "kept_copy_bytes", "latest_checkpoint", "look", "look_with_gradients", "open_through_torch", "probe", "read_masters", "release_copies", "totals", "verify_checkpoint", "version", "write_checkpoint"]

CHECKPOINT_BLOCK_BYTES: Final[int]
"""
Bytes of a checkpoint's file that one checksum covers.
"""

STATE_BLOCK: Final[int]
"""
Elements of a parameter that share a scale, in state of 8 bits.
"""

@final
class ActivationPlan:
    """
    The plan of a pass.
    """
    @property
    def budget_bytes(self, /) -> int:
        """
        The budget.
        """
    def corrected(self, /, *, budget_bytes: SupportsIndex, excess_bytes: SupportsIndex, pace: SupportsFloat | SupportsIndex) -> ActivationPlan:
        """
        The same plan with predictions corrected by the measurements of earlier passes: their peak exceeded the predicted
        peak by this many bytes, and they took `pace` times the predicted time.
        """
    def explain(self, /) -> str:
        """
        The plan as text: one line for the pass and one for each layer.
        """
    @staticmethod
    def from_json(text: str) -> ActivationPlan:
        """
        Read a plan that `to_json` wrote.
        """
    @property
    def layers(self, /) -> list[LayerPlan]:
        """
        The plan of each layer.
        """
    @property
    def least_bytes(self, /) -> int:
        """
        The smallest budget that has a plan.
        """
    @property
    def pass_ns(self, /) -> int:
        """
        The predicted time.
        """
    @property
    def peak_bytes(self, /) -> int:
        """
        The predicted peak, above what is allocated as the pass begins.
        """
    def to_json(self, /) -> str:
        """
        The plan as JSON.
        """

@final
class Activations:
    """
    Stores, fetches and pinned memory for the saved tensors of one device.
    """
    def __new__(cls, /, device: str, fraction: SupportsFloat | SupportsIndex | None, max_in_flight_bytes: SupportsIndex | None, pinned_budget_bytes: SupportsIndex | None, link_bytes_per_s: SupportsFloat | SupportsIndex | None = None) -> Activations:
        """
        Open a device; nothing is pinned yet. Without a fraction the engine chooses one, so that copies hide under the
        computation. A link's rate makes the CPU backend as slow as that, for tests.
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
        Fetch an entry into memory that is held until the entry is freed.
        """
    def free(self, /, entry: SupportsIndex) -> None:
        """
        Give up an entry's fetched bytes, or its fetch ahead of use.
        """
    def free_before(self, /, layer: SupportsIndex) -> list[int]:
        """
        Returns the entries whose routes have them freed before a layer begins.
        """
    def leave(self, /, stream: SupportsIndex) -> None:
        """
        The layer that began last has ended.
        """
    def open(self, /, save: SupportsIndex, stream: SupportsIndex) -> Opened:
        """
        A saved tensor is about to be used.
        """
    def pinned_bytes(self, /) -> int:
        """
        Bytes pinned now. Waits for nothing.
        """
    def ready(self, /, entry: SupportsIndex, stream: SupportsIndex) -> None:
        """
        What comes next on the stream waits for the entry's fetch.
        """
    def release(self, /, save: SupportsIndex) -> int | None:
        """
        A saved tensor is gone. Returns its entry if that can be freed now.
        """
    def reserve(self, /, bytes: SupportsIndex) -> None:
        """
        Pin this many bytes ahead of use.
        """
    def save(self, /, *, storage: SupportsIndex, storage_bytes: SupportsIndex, addr: SupportsIndex, start_bytes: SupportsIndex, bytes: SupportsIndex, version: SupportsIndex, may_leave: bool, counted: bool, stream: SupportsIndex, route: Route | None = None) -> Saved:
        """
        A tensor was saved: a range of a storage at a version. A new entry that leaves has to be held until it is named as
        freed. A save that is not counted only tells where its use is.
        """
    def stats(self, /) -> OffloadStats:
        """
        Sums since the beginning.
        """
    def table(self, /) -> list[LayerStats]:
        """
        The same for each layer.
        """
    def trace_owner(self, /) -> int:
        """
        The number under which it reports to a trace.
        """

@final
class CallKind:
    """
    What is known of calls of one kind. Kinds of one family take the same time and memory.
    """
    def __new__(cls, /, name: str, *, family: SupportsIndex, can_recompute: bool, recompute_share: SupportsFloat | SupportsIndex, saved_bytes: SupportsIndex, input_bytes: SupportsIndex, operations: SupportsIndex, tensors: SupportsGetItem[int, TensorCost]) -> CallKind: ...

@final
class CallTimes:
    """
    What one call took; None where that was not seen.
    """
    @property
    def backward_ns(self, /) -> int | None:
        """
        Its backward pass.
        """
    @property
    def forward_ns(self, /) -> int | None:
        """
        Its forward pass.
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
        Read boxes of chunks into memory on the host. None of the boxes may be empty.
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
        Copy ranges of device memory to the host, behind the present work of a stream, and wait for them. The buffers of
        the call before must not be in use.
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
class LayerCost:
    """
    What one layer costs.
    """
    @property
    def input_bytes(self, /) -> int:
        """
        What it saves if it is recomputed.
        """
    @property
    def name(self, /) -> str:
        """
        Its name.
        """
    @property
    def saved_bytes(self, /) -> int:
        """
        What it saves if it is not.
        """
    @property
    def tensors(self, /) -> list[TensorCost]:
        """
        Results that can be saved when it is recomputed.
        """

@final
class LayerPlan:
    """
    The plan for one layer. Choices are "keep", "offload" and "recompute".
    """
    @property
    def backward_ns(self, /) -> int:
        """
        The predicted time of its backward pass.
        """
    @property
    def fetch_at(self, /) -> int:
        """
        What is offloaded is fetched from the beginning of this layer's backward pass on.
        """
    @property
    def forward_ns(self, /) -> int:
        """
        The predicted time of its forward pass.
        """
    @property
    def free_at(self, /) -> int:
        """
        What is offloaded is freed before this layer begins.
        """
    @property
    def input(self, /) -> str:
        """
        The choice for its inputs, if it is recomputed.
        """
    @property
    def kept_bytes(self, /) -> int:
        """
        Bytes that stay on the device.
        """
    @property
    def offload_bytes(self, /) -> int:
        """
        How many bytes of what it saves are offloaded, first saved first, if it is not recomputed.
        """
    @property
    def offloaded_bytes(self, /) -> int:
        """
        Bytes that are offloaded.
        """
    @property
    def recompute(self, /) -> bool:
        """
        Whether it is recomputed.
        """
    @property
    def tensors(self, /) -> list[str]:
        """
        The choice for each result that can be saved, if it is recomputed.
        """
    @property
    def word(self, /) -> str:
        """
        The whole of it in one to three words.
        """

@final
class LayerStats:
    """
    Sums of one layer since the beginning, and the times of its last pass that could be read.
    """
    @property
    def backward_ns(self, /) -> int: ...
    @property
    def fetched_bytes(self, /) -> int: ...
    @property
    def forward_ns(self, /) -> int: ...
    @property
    def kept_bytes(self, /) -> int: ...
    @property
    def layer(self, /) -> int: ...
    @property
    def stall_ns(self, /) -> int: ...
    @property
    def stalls(self, /) -> int: ...
    @property
    def stored_bytes(self, /) -> int: ...

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
class MeasuredCall:
    """
    One call in a measured pass: its kind, as a place in the list of kinds, and whether it saved everything.
    """
    def __new__(cls, /, *, kind: SupportsIndex | None, saves: bool) -> MeasuredCall: ...

@final
class MeasuredPass:
    """
    A pass as it was measured.
    """
    def __new__(cls, /, *, samples: SupportsGetItem[int, PassSample], calls: SupportsGetItem[int, MeasuredCall], kinds: SupportsGetItem[int, CallKind]) -> MeasuredPass: ...
    def cost(self, /, *, host_bytes: SupportsIndex) -> PassCost:
        """
        The costs of the pass, with this many bytes of host memory to offload to.
        """
    def times(self, /) -> list[CallTimes]:
        """
        What each call took.
        """

@final
class Moved:
    """
    Bytes moved so far; other threads may ask for them.
    """
    def __new__(cls, /) -> Moved: ...
    def bytes(self, /) -> int:
        """
        The bytes moved so far.
        """
    def expect(self, /, bytes: SupportsIndex) -> None:
        """
        Set how many bytes there will be.
        """
    def expected(self, /) -> int:
        """
        How many bytes there will be; 0 until `expect` is called.
        """

@final
class OffloadStats:
    """
    Sums since the beginning.
    """
    @property
    def fetch_gbps(self, /) -> float: ...
    @property
    def fetched_bytes(self, /) -> int: ...
    @property
    def fraction(self, /) -> float: ...
    @property
    def kept_bytes(self, /) -> int: ...
    @property
    def pinned_bytes(self, /) -> int: ...
    @property
    def pinned_peak_bytes(self, /) -> int: ...
    @property
    def stall_ns(self, /) -> int: ...
    @property
    def stalls(self, /) -> int: ...
    @property
    def store_gbps(self, /) -> float: ...
    @property
    def stored_bytes(self, /) -> int: ...
    @property
    def window_bytes(self, /) -> int: ...

@final
class Opened:
    """
    The answer to the use of a saved tensor.
    """
    @property
    def entry(self, /) -> int:
        """
        The entry that holds its bytes.
        """
    @property
    def fetches(self, /) -> list[tuple[int, int]]:
        """
        Entries to fetch, with their bytes; the entry itself is first if it has to be fetched now.
        """
    @property
    def hold(self, /) -> bool:
        """
        Whether to hold its memory after this use.
        """
    @property
    def is_on_device(self, /) -> bool:
        """
        Whether its source is still on the device. If not, it is fetched.
        """

@final
class Optimizer:
    """
    An optimizer: its state and its step.
    """
    def __new__(cls, /, device: str, rule: str, options: Incomplete) -> Optimizer:
        """
        Open a device for a rule; nothing is pinned or allocated yet. `options` are those of `forebay.optim.options`.
        """
    def _exchange_for_test(self, /) -> None:
        """
        Make the other copy of all state the current one, whatever it holds, for tests.
        """
    def _fail_on_host_for_test(self, /) -> None:
        """
        Make the next update on the host's threads fail, for tests.
        """
    def add(self, /, tensors: SupportsGetItem[int, tuple[str, SupportsIndex, SupportsIndex, str, bool, SupportsIndex]], hypers: SupportsGetItem[int, SupportsGetItem[int, SupportsFloat | SupportsIndex]], resident: bool = False, state_formats: SupportsGetItem[int, str] = ...) -> int:
        """
        Create zeroed state for a list of tensors and return the number of their table. A tensor is its name, elements,
        the number of its group in `hypers`, the format of its master ("f32", "compact" or ""), whether it lies on the
        host, and its place among the parameters. `state_formats` are those of the rule's columns; none for f32.
        State of a resident table is the caller's, on the device, whatever the placement of other tables is.
        """
    def close(self, /) -> None:
        """
        Free state, and the ring unless others use it. Buffers that are still held keep their memory.
        """
    def close_ring(self, /) -> None:
        """
        Wait for every store and free the ring, unless others use it. State stays, and `open_ring` makes steps possible.
        """
    def close_second(self, /) -> None:
        """
        Wait for every store and free the copy that is not current.
        """
    @property
    def closed(self, /) -> bool:
        """
        Whether it was closed.
        """
    def distrust(self, /, reason: str) -> None:
        """
        Refuse steps until `trust`: something wrong was written into the state.
        """
    @property
    def distrusted(self, /) -> str | None:
        """
        Why the state cannot be trusted, if it cannot.
        """
    def finish_landing(self, /, only: tuple[SupportsIndex, SupportsIndex] | None) -> None:
        """
        Forget gradients that were copied early, all or one tensor's, once the copies have ended.
        """
    @property
    def generation(self, /) -> int:
        """
        A number that grows whenever the memory that `view` gives has moved.
        """
    @property
    def has_ring(self, /) -> bool:
        """
        Whether the ring is there.
        """
    @property
    def has_second(self, /) -> bool:
        """
        Whether there is a second copy.
        """
    def host_kernel(self, /) -> str | None:
        """
        The vector unit that the host's threads use.
        """
    def join_ring(self, /) -> bool:
        """
        Use the ring that other optimizers have with the same slots on this device; whether there is one.
        """
    def land(self, /, table: SupportsIndex, tensor: SupportsIndex, addr: SupportsIndex, bytes: SupportsIndex, stream: SupportsIndex) -> None:
        """
        Copy a gradient to the host now. The caller keeps it until the next step or `finish_landing` has returned.
        """
    def open_landing(self, /, table: SupportsIndex, bytes: SupportsGetItem[int, SupportsIndex]) -> None:
        """
        Pin memory for the gradients of a table's tensors, with the given bytes for each, if there is none yet.
        """
    def open_ring(self, /, addr: SupportsIndex, owner: Any, stream: SupportsIndex) -> None:
        """
        Make the ring in memory that `owner` keeps alive, or on the device itself where the address is 0.
        """
    def open_second(self, /) -> None:
        """
        Pin a second copy of all state, now and for tables that are added later. An error names the bytes of both copies.
        """
    def overlap_abort(self, /) -> None:
        """
        Give an open step up; an error if some of it was submitted, unless it is speculative: then all is as it was.
        """
    def overlap_begin(self, /, order: SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]], hypers: SupportsGetItem[int, SupportsGetItem[int, SupportsFloat | SupportsIndex]], speculative: bool = False) -> None:
        """
        Open an overlapped step. `order` has a number for each tensor of each table: smaller is needed earlier by the next
        forward. A speculative one updates on the second copy of the state until its commit says whether it is clipped.
        """
    def overlap_commit(self, /, tensors: SupportsGetItem[int, tuple[Looked, Looked, SupportsGetItem[int, SupportsIndex]]], stream: SupportsIndex, grad_scale: SupportsIndex = 0, resident: SupportsGetItem[int, SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]]] | None = None) -> None:
        """
        Hand over all gradients that were not offered, as `step` takes them, and return at once.
        """
    def overlap_finish(self, /) -> None:
        """
        Block until everything that was committed was submitted.
        """
    def overlap_offer(self, /, table: SupportsIndex, tensor: SupportsIndex, weight: Looked, grad: Looked, group: SupportsIndex, stream: SupportsIndex, resident: SupportsGetItem[int, SupportsIndex] = ...) -> None:
        """
        Hand over a gradient that is final when what `stream` was given so far has ended. Never waits for the device.
        `resident` has the addresses of the tensor's columns if its state is on the device.
        """
    def overlap_plan(self, /) -> "list[dict[str, Any]]":
        """
        The units of the overlapped step under way, or of the last one: in the order in which they ran, then the others.
        """
    def overlap_stats(self, /) -> "dict[str, int]":
        """
        The overlapped step under way, or the last one, in numbers.
        """
    def overlap_updated(self, /) -> list[tuple[int, int]]:
        """
        Tensors (table and place) whose updates have ended since the last call: nothing reads their gradients any more. Never
        waits, and makes no stream wait.
        """
    def overlap_wait(self, /, homes: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]] | None, stream: SupportsIndex) -> bool:
        """
        Return when the updates of these tensors, or of all, were submitted; `stream` then waits for them. Whether one was
        still under way.
        """
    def pinned_bytes(self, /) -> int:
        """
        Bytes that are pinned for it. Waits for nothing.
        """
    def protect_all(self, /) -> None:
        """
        Return when the host may write into the state, as far as a save is concerned.
        """
    def resources_made(self, /) -> int:
        """
        Allocations, slabs, streams and events made on the device so far; constant from the second step on.
        """
    def ring_bytes(self, /) -> int:
        """
        Bytes of the ring to allocate for `open_ring`; 0 where nothing streams.
        """
    def set_slots(self, /, slots: SupportsIndex) -> None:
        """
        Change how many slots the next ring has, while there is none.
        """
    def settle(self, /, table: SupportsIndex, tensor: SupportsIndex) -> None:
        """
        Block until a tensor's stores have ended; others go on.
        """
    def stats(self, /) -> "dict[str, float]":
        """
        The last step in numbers, once its stores have ended.
        """
    def step(self, /, tensors: SupportsGetItem[int, tuple[Looked, Looked, SupportsGetItem[int, SupportsIndex]]], hypers: SupportsGetItem[int, SupportsGetItem[int, SupportsFloat | SupportsIndex]], stream: SupportsIndex, grad_scale: SupportsIndex, resident: SupportsGetItem[int, SupportsGetItem[int, SupportsGetItem[int, SupportsIndex]]] | None = None) -> None:
        """
        Update the tensors of every table.
        """
    def synchronize(self, /) -> None:
        """
        Block until every store has ended.
        """
    def touch_state(self, /, others: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex]]) -> tuple[int, float]:
        """
        Read and write every byte of the state, and of other memory on the host (address and bytes of each, whole words),
        with the host's threads, changing none; returns bytes and seconds. This is the pace that the memory allows.
        """
    def trace_owner(self, /) -> int:
        """
        The number under which it reports to a trace.
        """
    def trust(self, /) -> None:
        """
        Allow steps again.
        """
    def view(self, /, table: SupportsIndex, tensor: SupportsIndex, column: str) -> HostView | None:
        """
        A tensor's column in pinned memory, or its step counter, as a buffer. A column that is not there gives nothing.
        """

@final
class PassCost:
    """
    What one pass costs.
    """
    @staticmethod
    def from_json(text: str) -> PassCost:
        """
        Read costs that `to_json` wrote.
        """
    @property
    def layers(self, /) -> list[LayerCost]:
        """
        The layers in the order of the forward pass.
        """
    def plan(self, /, budget_bytes: SupportsIndex | None, *, tokens: SupportsIndex, measured_tokens: SupportsIndex, store_gbps: SupportsFloat | SupportsIndex, fetch_gbps: SupportsFloat | SupportsIndex) -> ActivationPlan:
        """
        Plan a pass of this many tokens from costs measured with another number, over a link with these rates. Without a
        budget the plan is the one that takes the least memory.
        """
    def to_json(self, /) -> str:
        """
        The costs as JSON.
        """

@final
class PassSample:
    """
    One moment of a watched pass.
    """
    def __new__(cls, /, event: str, *, call: SupportsIndex, at_ns: SupportsIndex, host_ns: SupportsIndex, allocated_bytes: SupportsIndex, peak_bytes: SupportsIndex, held_bytes: SupportsIndex, gradient_bytes: SupportsIndex, peak_gradient_bytes: SupportsIndex) -> PassSample:
        """
        The event is "begin", "enter", "leave", "open" or "end"; the call counts for the middle three. Times are since the
        pass began on the device's clock, and on the host's; bytes are allocated now, at the peak since the sample before,
        and held for saved tensors that leave or arrive; gradients that the pass has made are counted now and at the peak.
        """

@final
class Route:
    """
    Where a plan sends a saved tensor.
    """
    def __new__(cls, /, *, leaves: bool, free_at: SupportsIndex, fetch_at: SupportsIndex) -> Route:
        """
        Whether the tensor leaves; the layer before which it is freed; the layer from whose backward pass on it is fetched.
        """

@final
class Rule:
    """
    An update rule: the state an optimizer keeps and the numbers of its groups.
    """
    def __new__(cls, /, name: str) -> Rule:
        """
        The rule of a name.
        """
    @property
    def appears_late(self, /) -> bool:
        """
        Whether a parameter's state appears with its first update, not when it is created.
        """
    @property
    def columns(self, /) -> list[str]:
        """
        The columns of state that it may keep, without the master.
        """
    @property
    def defaults(self, /) -> list[float]:
        """
        What those numbers are if a user gives none.
        """
    def formats_for(self, /, state_formats: SupportsGetItem[int, str], elements: SupportsIndex) -> list[str]:
        """
        The format of each column for a parameter of this many elements, where these are asked for.
        """
    @property
    def hypers(self, /) -> list[str]:
        """
        The numbers of a group, by name and in order.
        """
    def keep_column(self, /, column: str, format: str, numbers: SupportsIndex, parts: SupportsGetItem[int, SupportsIndex], elements: SupportsIndex) -> None:
        """
        Keep these f32 numbers in a column of a format, rounded to nearest. All memory is on the host.
        """
    def keeps(self, /, hypers: SupportsGetItem[int, SupportsFloat | SupportsIndex]) -> list[str]:
        """
        The columns that a group with these numbers needs, without the master.
        """
    @property
    def name(self, /) -> str:
        """
        Its name.
        """
    def parts(self, /, column: str, format: str) -> list[tuple[str, str, int]]:
        """
        The memory of a column in a format, the numbers first: the engine's name, the type of a value, and the elements of
        the parameter for each.
        """
    def read_column(self, /, column: str, format: str, parts: SupportsGetItem[int, SupportsIndex], numbers: SupportsIndex, elements: SupportsIndex) -> None:
        """
        Write the numbers of a column in a format as f32. All memory is on the host, by address, and none of it is written
        by others meanwhile.
        """
    @property
    def shows_step(self, /) -> bool:
        """
        Whether a parameter's state shows its step counter.
        """
    def state_bytes(self, /, hypers: SupportsGetItem[int, SupportsFloat | SupportsIndex], state_formats: SupportsGetItem[int, str], master: str, elements: SupportsIndex) -> int:
        """
        Bytes of state of a parameter in a group with these numbers, whose columns are asked for in these formats and whose
        master has this one ("" for none).
        """

@final
class Saved:
    """
    The answer to a save.
    """
    @property
    def entry(self, /) -> int:
        """
        The entry that holds its bytes. Saves of the same bytes share one.
        """
    @property
    def freed(self, /) -> list[int]:
        """
        Entries whose sources may be freed now.
        """
    @property
    def is_new(self, /) -> bool:
        """
        Whether the entry is new.
        """
    @property
    def leaves(self, /) -> bool:
        """
        Whether the entry leaves the device.
        """
    @property
    def reason(self, /) -> str | None:
        """
        Why an entry that was chosen to leave stays.
        """
    @property
    def save(self, /) -> int:
        """
        The number of the save.
        """
    @property
    def start_bytes(self, /) -> int:
        """
        Where the entry's range begins in its storage.
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
        Give it up; the next save removes what has been written.
        """
    def commit(self, /, manifest: str, keep_last: SupportsIndex | None) -> None:
        """
        Complete it with a manifest, given as JSON. With `keep_last`, remove older checkpoints of the path.
        """
    def discard(self, /) -> None:
        """
        Give it up and remove what has been written. No rank may be writing any more.
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
    def __new__(cls, /, device: str, readable: bool = False) -> Slabs:
        """
        Open a device; nothing is pinned yet. If `readable` is set, storages in the slabs can be read on the host.
        """
    def begin(self, /, to_sleep: bool, stream: SupportsIndex, staging_addr: SupportsIndex, staging: Any) -> None:
        """
        Begin to move storages, behind the present work of `stream`. `staging` owns memory of `staging_bytes` at
        `staging_addr`; with address 0 nothing is packed.
        """
    def finish(self, /) -> None:
        """
        Block until nothing is in flight, also after a failure; then raise that failure.
        """
    def free(self, /, ids: SupportsGetItem[int, SupportsIndex]) -> None:
        """
        The places of these storages are no longer in use: the storages are awake.
        """
    def has_arrived(self, /, batch: SupportsIndex) -> bool:
        """
        Whether a batch has arrived.
        """
    def holds(self, /, ids: SupportsGetItem[int, SupportsIndex], sizes: SupportsGetItem[int, SupportsIndex]) -> bool:
        """
        Whether each storage has a place of this size that is not in use.
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
        Unpin and free everything; refused while anything is asleep.
        """
    def resources_made(self, /) -> int:
        """
        Allocations, slabs, streams and events made on the device so far; constant after the third sleep.
        """
    @staticmethod
    def staging_bytes() -> int:
        """
        Bytes of device memory that a transfer uses to pack small storages.
        """
    def submit(self, /, ids: SupportsGetItem[int, SupportsIndex], addrs: SupportsGetItem[int, SupportsIndex], sizes: SupportsGetItem[int, SupportsIndex], owner: Any, stream: SupportsIndex) -> int:
        """
        Submit a batch: numbers, addresses and sizes of storages that `owner` holds. Returns the batch's number. In a sleep
        the places of these storages are in use from now on until `free`: nothing else is stored there.
        """
    def views(self, /, ids: SupportsGetItem[int, SupportsIndex]) -> list[HostView]:
        """
        The memory of storages' places, for slabs that are readable. Valid when their batch has arrived, until `free`.
        """
    def wait(self, /, batch: SupportsIndex) -> None:
        """
        Block until a batch has arrived.
        """

@final
class Snapshot:
    """
    State of one moment, kept while optimizers step.
    """
    def __new__(cls, /, optimizers: SupportsGetItem[int, Optimizer], budget_bytes: SupportsIndex) -> Snapshot:
        """
        Begin a snapshot of all state that these optimizers have in pinned memory; its copies take at most `budget_bytes`.
        """
    def copy_ahead(self, /, threads: SupportsIndex, bytes_per_s: SupportsFloat | SupportsIndex | None) -> None:
        """
        Copy in the background what the next step will change.
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
        Bytes copied, bytes of memory for the copies, how often a step waited and for how many nanoseconds, and how often
        the writer paused for a step.
        """

@final
class TensorCost:
    """
    The results of one operation inside a layer, which can be saved when the layer is recomputed.
    """
    def __new__(cls, /, name: str, *, bytes: SupportsIndex, recompute_ns: SupportsIndex, saved: bool) -> TensorCost: ...
    @property
    def bytes(self, /) -> int:
        """
        Bytes of its results.
        """
    @property
    def name(self, /) -> str:
        """
        The operation.
        """
    @property
    def recompute_ns(self, /) -> int:
        """
        The time to recompute it.
        """
    @property
    def saved(self, /) -> bool:
        """
        Whether autograd saves it anyway.
        """

@final
class Trace:
    """
    A trace of this process while it is recorded, and its file.
    """
    def __new__(cls, /, path: str | PathLike[str], capacity: SupportsIndex) -> Trace:
        """
        Begin a trace. The file is opened now, and written by `finish`; what is in it until then stays.
        """
    def begin_on_stream(self, /, device: str, stream: SupportsIndex, name: str, step: SupportsIndex) -> TracedWork | None:
        """
        Begin a pass as torch's stream runs it; nothing where the device has no times.
        """
    def count_device(self, /, allocated: SupportsIndex, reserved: SupportsIndex) -> None:
        """
        Add a counter of torch's memory on the device.
        """
    def dropped(self, /) -> int:
        """
        Records that were dropped so far.
        """
    def finish(self, /, rank: SupportsIndex, ranks: SupportsIndex, owners: SupportsGetItem[int, tuple[SupportsIndex, str]], layers: SupportsGetItem[int, tuple[SupportsIndex, SupportsIndex, str]], others: str) -> None:
        """
        End the trace and write its file. `owners` and `layers` have the names of what reported; `others` is JSON of what
        else the file says. In a forked child it does nothing.
        """
    def now_ns(self, /) -> int:
        """
        Nanoseconds since it began.
        """
    def span(self, /, category: str, name: str, start_ns: SupportsIndex, end_ns: SupportsIndex, *, size: SupportsIndex = 0, owner: SupportsIndex = 0, reason: str | None = None, step: SupportsIndex | None = None) -> None:
        """
        Add a span. `category` is one of the file's, and `owner` a number that `trace_owner` of something returned.
        """

@final
class TracedWork:
    """
    Work on torch's stream that is being submitted.
    """
    def end(self, /, stream: SupportsIndex) -> None:
        """
        All of it was submitted.
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

def _memory_for_test(device: str) -> tuple[int, int]:
    """
    Bytes on a device that were allocated and pinned through it and not freed.
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
    Run the step at every placement over synthetic bf16 parameters, in turns, and at fixed shares of the host if given;
    JSON text. On the CPU backend the link may be given a rate.
    """

def bench_step(device: str | None, params: SupportsIndex, slots: SupportsIndex, chunk_bytes: SupportsIndex, steps: SupportsIndex) -> str:
    """
    Run the streamed step over synthetic parameters; JSON text.
    """

def bytes_faulted_in() -> int:
    """
    Bytes of host memory that were faulted in so far, to be pinned; other threads may ask.
    """

def check_contract(device: str) -> list[tuple[str, str | None]]:
    """
    What a device must do and does not: each check with its problem, or nothing.
    """

def check_host(kernel: str | None) -> int:
    """
    Check the name of a kernel against this machine; return how many threads the host may have.
    """

def checkpoint_encoding(column: str, format: str, shape: SupportsGetItem[int, SupportsIndex]) -> tuple[str, list[tuple[str, str, list[int]]]] | None:
    """
    How a checkpoint keeps a column of state in a format, for a box of this shape in the order of its memory: the
    encoding's name, and the ending of the name, the type and the shape of each part. None if it is kept as f32.
    """

def checkpoint_encoding_record(name: str) -> str:
    """
    What a manifest says about an encoding of this name; JSON text.
    """

def checkpoint_summary(path: str | PathLike[str]) -> str:
    """
    What is in the last complete checkpoint of a path, or in that very folder; JSON text.
    """

def command(arguments: SupportsGetItem[int, str], built_by: str) -> int:
    """
    Run the command with arguments, the first of which is the program's name; return its exit code. What it prints goes
    to the process's own output, past `sys.stdout`.
    """

def count_copied(fetched_bytes: SupportsIndex, stored_bytes: SupportsIndex) -> None:
    """
    Count bytes that Python copied for an optimizer: those that came from the host, and those that went there.
    """

def count_save_wait(seconds: SupportsFloat | SupportsIndex) -> None:
    """
    Count one wait of a step for a save that reads its tensors in place.
    """

def export_weights(path: str | PathLike[str], target: str | PathLike[str], moved: Moved) -> None:
    """
    Write a checkpoint's weights into one safetensors file, after comparing every checksum.
    """

def forget_parent_totals() -> None:
    """
    Start the totals from zero, in a forked child.
    """

def host_memory() -> tuple[int, int]:
    """
    Bytes of host memory that this process may use in all, and that are available now.
    """

def keep_masters(masters: SupportsIndex, low: SupportsIndex, carry: SupportsIndex, elements: SupportsIndex) -> None:
    """
    Write what is kept of f32 masters beside their weights: lower halves and carries. All of it is on the host.
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

def open_through_torch() -> None:
    """
    Make devices of torch's openable. The package calls it once; an initializer of the module would leave the stubs
    without its list of names.
    """

def probe(device: str | None = None) -> str:
    """
    Measure a device, by default the first GPU; JSON text.
    """

def read_masters(weights: SupportsIndex, low: SupportsIndex, carry: SupportsIndex, masters: SupportsIndex, elements: SupportsIndex) -> None:
    """
    Write the f32 masters of bf16 weights, from the lower halves and carries that are kept beside them. All of it is on
    the host, by address, and none of it is written by others meanwhile.
    """

def release_copies() -> int:
    """
    Free the memory that is kept for the copies of the next snapshot, and return how many bytes that were.
    """

def totals() -> "dict[str, dict[str, int]]":
    """
    The counters of the process: `pinned_bytes`, `fetched_bytes` and `stored_bytes` by use, `waits` and `wait_ns` by
    reason, and `ring_bytes` with one entry, `total`. Waits for nothing.
    """

def verify_checkpoint(path: str | PathLike[str], moved: Moved) -> tuple[int, list[tuple[str, str]]]:
    """
    Compare every checksum of a checkpoint; return the bytes of its files, and the file and the reason of each problem.
    """

def version() -> str:
    """
    The version of the extension module, which is the version of the package.
    """

def write_checkpoint(folder: str | PathLike[str], prefix: str, entries: Incomplete, device: str | None, stream: SupportsIndex, threads: SupportsIndex | None, moved: Moved, manner: Incomplete) -> list[tuple[str, int, list[int], list[tuple[int, int, int]]]]:
    """
    Write entries into files of a folder, and sync them.
    """
