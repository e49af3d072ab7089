//! The contract: what every backend can do.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::host::{HostThreads, HostUpdate, HostWork};
use crate::kernel::Kernel;
use crate::memory::{Buffer, DeviceId, Region, Slab, SlabLayout};
use crate::stream::{Event, Stream};
use crate::update::Rule;

/// Owns memory and runs work.
///
/// # Ordering
/// Work on one stream runs in the order of submission. Work on two streams is unordered unless an event orders it:
/// [`record`](Self::record) marks a point, [`wait`](Self::wait) makes another stream wait for it, and
/// [`synchronize`](Self::synchronize) makes the calling thread wait. Waiting for an event that was never recorded is a
/// no-op, as it is on CUDA; the [`Checked`](crate::Checked) device refuses it. Submission itself never blocks on work
/// that is still to be done, except where a driver's queue is full.
///
/// # Memory
/// Every call checks that its operands lie inside live memory of this device, so no sequence of safe calls reaches
/// freed or foreign memory. Two accesses to the same bytes that nothing orders leave those bytes unspecified; payload
/// is plain numbers, for which every bit pattern is valid. [`Checked`](crate::Checked) finds every such pair from the
/// order of submission alone, without needing the two to collide in time.
///
/// # Failure
/// A call that returns an error did nothing. Work that fails later marks its stream as failed: what is queued behind
/// it does not run, and the error comes out of every wait that depends on it.
pub trait Device: Send + Sync + fmt::Debug {
    /// What this device is.
    fn info(&self) -> &Info;

    /// How much memory there is and how much is taken, at this moment.
    fn memory(&self) -> Result<Memory>;

    /// How many resources were made since the device was opened; a steady state makes none.
    fn counters(&self) -> Counters;

    /// Allocates memory on the device, aligned to [`ALIGN_BYTES`](crate::ALIGN_BYTES), contents unspecified. It is
    /// freed when the last clone goes, after the device has ended the work that uses it.
    fn alloc(&self, bytes: u64) -> Result<Buffer>;

    /// Allocates one page-locked slab, zeroed. How much may be pinned is the caller's to decide.
    fn pin(&self, layout: SlabLayout) -> Result<Slab>;

    /// Makes a stream.
    fn stream(&self, name: &str) -> Result<Stream>;

    /// Makes a stream whose kernels begin before waiting kernels of other streams, where the backend has priorities.
    fn urgent_stream(&self, name: &str) -> Result<Stream> {
        self.stream(name)
    }

    /// Names a stream that other code made: torch's current stream, for example.
    ///
    /// # Safety
    /// `handle` must be a stream of this device's context that outlives the returned handle and its clones.
    #[expect(unsafe_code, reason = "the caller vouches for a driver handle")]
    unsafe fn borrow_stream(&self, handle: usize, name: &str) -> Result<Stream>;

    /// Makes an event, not yet recorded, that orders work. It carries no time: taking one costs a copy engine several
    /// microseconds at every recording.
    fn event(&self) -> Result<Event>;

    /// Makes an event, not yet recorded, that also carries the time at which it was reached.
    fn timed_event(&self) -> Result<Event>;

    /// Marks the present end of a stream.
    fn record(&self, event: &Event, stream: &Stream) -> Result<()>;

    /// Makes what is submitted to `stream` from now on wait for the event as it is marked now.
    fn wait(&self, stream: &Stream, event: &Event) -> Result<()>;

    /// Whether the point was reached; `true` for an event never recorded.
    fn query(&self, event: &Event) -> Result<bool>;

    /// Blocks the calling thread until the point was reached. A long wait sleeps, and may notice some tens of
    /// microseconds late.
    fn synchronize(&self, event: &Event) -> Result<()>;

    /// Time between two timed events that were both reached, in nanoseconds; 0 where `end` came first.
    fn elapsed_ns(&self, start: &Event, end: &Event) -> Result<u64>;

    /// Copies between regions of equal length, at least one of them on the device, on a stream.
    fn copy(&self, stream: &Stream, from: &Region, to: &Region) -> Result<()>;

    /// Copies pairs of regions, in this order. Equally long and equally spaced pairs may become one transfer, which saves
    /// the copy engine the pause between two. Where one is refused, those before it may have been accepted.
    fn copy_all(&self, stream: &Stream, pairs: &[(Region, Region)]) -> Result<()> {
        pairs.iter().try_for_each(|(from, to)| self.copy(stream, from, to))
    }

    /// Runs a kernel on a stream.
    fn launch(&self, stream: &Stream, kernel: &Kernel<'_>) -> Result<()>;

    /// Loads the kernels of a rule, so that the first step need not.
    fn load(&self, _rule: &'static Rule) -> Result<()> {
        Ok(())
    }

    /// Readies the calling thread for many calls in a row; until the guard goes, each of them costs less.
    fn enter(&self) -> Result<Entered> {
        Ok(Entered::default())
    }

    /// Starts an update of host memory on the host's threads. The caller has waited for the work that uses it, and
    /// waits for its end with [`finish_on_host`](Self::finish_on_host) before anything else does.
    fn update_on_host(&self, threads: &HostThreads, update: HostUpdate) -> Result<HostWork> {
        threads.update(self.info().id, update)
    }

    /// Blocks until work on the host's threads has ended.
    fn finish_on_host(&self, work: HostWork) -> Result<()> {
        work.wait()
    }

    /// Reads host memory on the calling thread, now. The caller has waited for the work that writes it.
    fn read(&self, from: &Region, into: &mut [u8]) -> Result<()>;

    /// Writes host memory on the calling thread, now. The caller has waited for the work that uses it.
    fn write(&self, from: &[u8], to: &Region) -> Result<()>;
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// Unique in the process; memory, streams and events carry it.
    pub id: DeviceId,
    /// How it is asked for: `cpu` or `cuda:0`.
    pub name: String,
    /// What it is: the GPU's product name, or a word on the CPU.
    pub model: String,
    /// The backend that drives it.
    pub backend: Backend,
}

/// The backends there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// The reference, on the host's own memory.
    Cpu,
    /// NVIDIA GPUs through the driver API.
    Cuda,
}

impl Backend {
    /// Whether torch frees memory of this backend in the order of its streams. Where it does not, work on torch's memory
    /// must have ended before a call returns.
    pub fn is_stream_ordered(self) -> bool {
        match self {
            Self::Cpu => false,
            Self::Cuda => true,
        }
    }
}

/// Memory figures of one moment, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// On the device, in all.
    pub capacity_bytes: u64,
    /// On the device, free.
    pub free_bytes: u64,
    /// Allocated through this [`Device`] and not freed.
    pub allocated_bytes: u64,
    /// Pinned through this [`Device`] and not released.
    pub pinned_bytes: u64,
}

/// Counts of resources made; never reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Device allocations.
    pub allocations: u64,
    /// Slabs.
    pub pins: u64,
    /// Streams.
    pub streams: u64,
    /// Events.
    pub events: u64,
}

impl Counters {
    /// All of them together: what a steady state leaves unchanged.
    pub fn total(&self) -> u64 {
        self.allocations + self.pins + self.streams + self.events
    }
}

/// A thread's readiness for calls to one device; it ends when this goes, on the thread that entered.
#[derive(Default)]
pub struct Entered {
    _guard: Option<Box<dyn Any>>,
}

impl Entered {
    pub(crate) fn holding(guard: impl Any) -> Self {
        Self { _guard: Some(Box::new(guard)) }
    }
}

/// Refuses operands that no backend could copy.
pub(crate) fn check_copy(device: DeviceId, from: &Region, to: &Region) -> Result<()> {
    let refuse = |reason: String| Err(Error::BadOperands { operation: "copy", reason });
    crate::memory::check_home("copy", from, device)?;
    crate::memory::check_home("copy", to, device)?;
    if from.bytes() != to.bytes() {
        return refuse(format!("{} bytes into {} bytes", from.bytes(), to.bytes()));
    }
    if from.place().is_host() && to.place().is_host() {
        return refuse("both sides are on the host".to_owned());
    }
    if from.overlaps(to) {
        return refuse(format!("{from:?} overlaps {to:?}"));
    }
    Ok(())
}

/// A device to share.
pub type SharedDevice = Arc<dyn Device>;
