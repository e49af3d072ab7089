//! The trace: one recorder for each process, to which all rooms report what they do and when.
//!
//! Nothing is recorded, opened or listened to unless [`start`] was called. Without a trace each report costs one relaxed
//! load. With one, a report is a record of fixed size in a ring of fixed size: the oldest records are dropped and counted.
//! Names become text when the file is written.
//!
//! - `span` is what is recorded, `recorder` where it is kept; what memory there is comes from [`crate::totals`].
//! - `clock` turns times of a device into times of the host, and holds spans whose end was not reached yet.
//! - `write` makes the file, and `merge` one file of several ranks.
//!
//! [Note: what timing costs] A timed event costs a copy engine of a GPU 5 to 8 microseconds. So where copies are timed by
//! events of a GPU, at most one copy of each lane in [`PACE_NS`] is timed, by two events: less than 1 % of the engine's
//! time. The bytes of the others are added to the next span as `untimed_bytes`. Events of the CPU backend cost nothing,
//! and every copy is timed there.
//!
//! [Note: a trace and a fork] The child inherits the switch and nothing else: it finds no recorder, and reports go
//! nowhere.

mod clock;
mod merge;
mod recorder;
mod span;
mod write;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use forebay_device::{SharedDevice, Stream};

pub(crate) use clock::Pace;
pub use clock::Timed;
pub use merge::merge;
pub use recorder::{Recorder, Recording, TraceOptions, is_on, start};
pub(crate) use recorder::{Source, current};
pub use span::{Counter, Kind, Label, Reason, Record, Span};
pub use write::About;

use crate::totals::{Totals, totals};

/// Between two copies of a lane that are timed by events of a GPU; see [Note: what timing costs].
pub const PACE_NS: u64 = 2_400_000;

/// Waits below this are the cost of looking.
const LEAST_WAIT: Duration = Duration::from_micros(10);

/// A number for something that reports: an optimizer, an offload of activations. Names are given at the end.
pub fn owner() -> u32 {
    static OWNERS: AtomicU32 = AtomicU32::new(0);
    OWNERS.fetch_add(1, Relaxed) + 1
}

thread_local! {
    static IN_BACKGROUND: Cell<bool> = const { Cell::new(false) };
}

/// Says that the present thread is one of the engine's: its waits stall nobody.
pub(crate) fn in_background() {
    IN_BACKGROUND.set(true);
}

/// A wait of the calling thread, from [`wait`] to [`Waiting::end`].
#[derive(Debug)]
pub(crate) struct Waiting(Option<(Arc<Recorder>, u64)>);

/// What may be a wait begins.
pub(crate) fn wait() -> Waiting {
    Waiting(current().map(|recorder| {
        let now = recorder.now_ns();
        (recorder, now)
    }))
}

impl Waiting {
    /// It is over, and recorded if it was a wait.
    pub(crate) fn end(self, reason: Reason, words: &'static str, owner: u32) {
        if let Some((recorder, start_ns)) = self.0 {
            recorder.wait(start_ns, recorder.now_ns(), reason, words, owner);
        }
    }
}

/// The calling thread has waited for this long, until now.
pub(crate) fn waited(time: Duration, reason: Reason, words: &'static str, owner: u32) {
    if let Some(recorder) = current() {
        let now = recorder.now_ns();
        recorder.wait(now.saturating_sub(time.as_nanos() as u64), now, reason, words, owner);
    }
}

/// Begins a span of work that is submitted to a stream from now on; `None` without a trace, where the device has no
/// times, or where the pace of a lane leaves these bytes untimed.
pub(crate) fn timed(device: &SharedDevice, stream: &Stream, paced: Option<(&Pace, u64)>) -> Option<Timed> {
    current()?.timed(device, stream, paced)
}

/// The same for code outside of the engine, unpaced.
pub fn timed_on(recorder: &Arc<Recorder>, device: &SharedDevice, stream: &Stream) -> Option<Timed> {
    recorder.timed(device, stream, None)
}

/// Memory was pinned or freed.
pub(crate) fn memory_changed() {
    if let Some(recorder) = current() {
        memory().into_iter().for_each(|counter| recorder.count(counter));
    }
}

/// The memory that a trace shows over time.
fn memory() -> [Counter; 2] {
    let Totals { pinned_bytes, ring_bytes, .. } = totals();
    [Counter::Pinned(pinned_bytes), Counter::Ring(ring_bytes)]
}

impl Recorder {
    fn wait(&self, start_ns: u64, end_ns: u64, reason: Reason, words: &'static str, owner: u32) {
        let is_wait = end_ns.saturating_sub(start_ns) >= LEAST_WAIT.as_nanos() as u64;
        if is_wait && !IN_BACKGROUND.get() {
            let wait = Span::new(Kind::Wait, Label::Words(words));
            self.push(Span { start_ns, end_ns, reason: Some(reason), owner, ..wait });
        }
    }

    /// Nanoseconds since the trace began.
    pub fn now_ns(&self) -> u64 {
        Instant::now().saturating_duration_since(self.zero()).as_nanos() as u64
    }
}
