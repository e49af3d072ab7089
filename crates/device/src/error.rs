//! Everything that can go wrong on a device, as one enum.
//!
//! Each variant carries the numbers that a user needs to act: the bytes requested and the bytes available, and the
//! remedy if it is not obvious. The enum is exhaustive on purpose: the Python binding maps it in one `match`, which
//! does not compile until it handles a new variant.

/// The result of a device call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a device call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The requested backend or device is not on this machine.
    #[error("device {device} is not available: {reason}; use another device, or the CPU")]
    DeviceAbsent {
        /// The name of the requested device, `cuda:0` for example.
        device: String,
        /// What was looked for and not found.
        reason: String,
    },
    /// The driver is older than the kernels and calls in this binary need.
    #[error(
        "the CUDA driver is too old: it supports CUDA {}.{}, forebay needs {}.{} or newer; update the NVIDIA driver",
        found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10
    )]
    DriverTooOld {
        /// Version reported by the driver, as `major * 1000 + minor * 10`.
        found: i32,
        /// Oldest version that works, in the same form.
        needed: i32,
    },
    /// The driver refused the kernels shipped in this binary.
    #[error("the driver refused the kernels for {device}: {log}; use a GPU of compute capability 8.0 or newer")]
    KernelsRefused {
        /// The device that refused them.
        device: String,
        /// The driver's own words.
        log: String,
    },
    /// An allocation does not fit into the device's memory.
    #[error(
        "out of device memory on {device}: {requested_bytes} bytes requested, {available_bytes} available of {capacity_bytes}; \
         free memory there, or use fewer or smaller slots"
    )]
    OutOfDeviceMemory {
        /// The device that is full.
        device: String,
        /// Bytes asked for.
        requested_bytes: u64,
        /// Bytes that were free.
        available_bytes: u64,
        /// Bytes of the whole device, or of the capacity set for it.
        capacity_bytes: u64,
    },
    /// A slab does not fit into the pinned budget.
    #[error(
        "out of pinned memory: {requested_bytes} bytes requested, {available_bytes} left of a budget of {budget_bytes}; \
         raise the budget or release a slab"
    )]
    OutOfPinnedBudget {
        /// Bytes asked for.
        requested_bytes: u64,
        /// Bytes left under the budget.
        available_bytes: u64,
        /// The budget.
        budget_bytes: u64,
    },
    /// A slab is larger than what this machine's memory can hold now.
    #[error(
        "a slab of {requested_bytes} bytes does not fit into host memory: {available_bytes} available of {memory_bytes}; \
         free memory, or raise the limit of the container"
    )]
    SlabLargerThanMemory {
        /// Bytes asked for.
        requested_bytes: u64,
        /// Bytes the machine (or this process's control group) can still give.
        available_bytes: u64,
        /// Bytes the machine (or the control group) has.
        memory_bytes: u64,
    },
    /// A request for nothing, which is always a mistake of the caller.
    #[error("{what} must not be empty: 0 bytes; report this as a defect")]
    ZeroSize {
        /// What was requested.
        what: &'static str,
    },
    /// A range that leaves its memory.
    #[error(
        "{what} out of range: {len_bytes} bytes at offset {offset_bytes} of {size_bytes}; check the tensors that were given, or report this as a defect"
    )]
    OutOfRange {
        /// What was being addressed.
        what: &'static str,
        /// Where the range starts.
        offset_bytes: u64,
        /// How long it is.
        len_bytes: u64,
        /// How much there is.
        size_bytes: u64,
    },
    /// Operands that do not fit together: sizes, alignment, place or owner.
    #[error(
        "{operation} cannot take these operands: {reason}; check the tensors that were given, or report this as a defect"
    )]
    BadOperands {
        /// The call.
        operation: &'static str,
        /// What does not fit, with the numbers.
        reason: String,
    },
    /// An option with a value that cannot work.
    #[error("invalid {option}: {value}; {remedy}")]
    InvalidOption {
        /// The option's name as the user writes it.
        option: &'static str,
        /// The value given.
        value: String,
        /// What would work.
        remedy: String,
    },
    /// Work on a stream failed after it had been accepted; the stream takes no more work.
    #[error("stream {stream} failed: {reason}; load a checkpoint in a new process")]
    StreamFailed {
        /// The stream's name.
        stream: String,
        /// What failed on it first.
        reason: String,
    },
    /// Two accesses to the same bytes are not ordered by any event, or a wait names work that was never submitted.
    #[error("unordered access: {detail}; report this as a defect")]
    Unordered {
        /// Both accesses, with streams and ranges.
        detail: String,
    },
    /// A driver call returned an error of its own.
    #[error("{call} failed with {name} ({code}): {text}; load a checkpoint in a new process")]
    Driver {
        /// The driver function.
        call: &'static str,
        /// Its numeric result.
        code: u32,
        /// The result's name.
        name: String,
        /// The driver's description.
        text: String,
    },
    /// A system call failed.
    #[error("{call} of {bytes} bytes failed: {text}; check the limits of this process, such as `ulimit -l`")]
    Os {
        /// The system call.
        call: &'static str,
        /// Its size argument.
        bytes: u64,
        /// `errno`.
        errno: i32,
        /// The system's description.
        text: String,
    },
    /// The process was forked after the device was opened.
    #[error("device {device} was opened before fork() and does not work in the child; open it again there")]
    Forked {
        /// The device.
        device: String,
    },
}
