//! Times of a device as times of the host.
//!
//! An event of a device tells its distance from another event only. So a clock has an anchor: an event on a stream of its
//! own, and the host's time when it was reached, known to half of the time that recording and seeing it took. The anchor
//! is set again about once a second, because a distance is an f32 of milliseconds on CUDA and both clocks drift. Setting it
//! again waits a moment at most: if the device is busy, the old anchor stays.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_device::{Backend, Event, SharedDevice, Stream};

use super::PACE_NS;
use super::recorder::Recorder;
use super::span::Span;
use crate::error::Result;
use crate::flow::{Mark, Marks};

/// How old an anchor may be.
const ANCHOR_AGE: Duration = Duration::from_secs(1);
/// How long a thread waits at most to set it again.
const ANCHOR_WAIT: Duration = Duration::from_micros(200);
/// Of so many attempts at the beginning, the one that took least time counts.
const FIRST_ATTEMPTS: usize = 5;

#[derive(Debug)]
struct Anchor {
    mark: Arc<Mark>,
    at_ns: u64,
    set: Instant,
    /// For the next anchor, so that steps make no events.
    spare: Arc<Mark>,
}

/// The clock of one device in one trace.
#[derive(Debug)]
pub(crate) struct DeviceClock {
    device: SharedDevice,
    marks: Arc<Marks>,
    stream: Stream,
    zero: Instant,
    anchor: Mutex<Anchor>,
}

impl DeviceClock {
    pub(super) fn new(device: &SharedDevice, zero: Instant) -> Result<Self> {
        let (marks, stream) = (Marks::timed(device.clone()), device.stream("trace")?);
        let mut best: Option<(Duration, Anchor)> = None;
        for _ in 0..FIRST_ATTEMPTS {
            let (mark, spare) = (marks.take()?, marks.take()?);
            let before = Instant::now();
            mark.record(&stream)?;
            mark.synchronize()?;
            let (took, set) = (before.elapsed(), Instant::now());
            // Refused here where a device has events without times.
            mark.elapsed_ns(&mark)?;
            if best.as_ref().is_none_or(|(least, _)| took < *least) {
                let at_ns = middle(zero, before, set);
                best = Some((took, Anchor { mark, at_ns, set, spare }));
            }
        }
        let anchor = best.map(|(_, anchor)| anchor).ok_or_else(|| crate::Error::InvalidOption {
            option: "trace",
            value: device.info().name.clone(),
            remedy: "this device has no times".to_owned(),
        })?;
        Ok(Self { device: device.clone(), marks, stream, zero, anchor: Mutex::new(anchor) })
    }

    /// How often copies of one lane may be timed.
    pub(crate) fn pace_ns(&self) -> u64 {
        match self.device.info().backend {
            Backend::Cpu => 0,
            Backend::Cuda | Backend::Torch => PACE_NS,
        }
    }

    /// When an event that was reached was reached; `None` if that was before the trace.
    pub(crate) fn at_ns(&self, event: &Event) -> Option<u64> {
        let anchor = self.anchor();
        let after = self.device.elapsed_ns(anchor.mark.event(), event).ok()?;
        if after > 0 {
            return Some(anchor.at_ns + after);
        }
        anchor.at_ns.checked_sub(self.device.elapsed_ns(event, anchor.mark.event()).ok()?)
    }

    /// Begin and end of work that has ended, if it began within the trace. The anchor is not exact, but nothing ends after
    /// it was seen to have ended.
    pub(crate) fn span_ns(&self, begin: &Event, end: &Event) -> Option<(u64, u64)> {
        let start = self.at_ns(begin)?;
        let end = start + self.device.elapsed_ns(begin, end).ok()?;
        let seen = self.zero.elapsed().as_nanos() as u64;
        Some((start.min(seen), end.min(seen)))
    }

    fn anchor(&self) -> std::sync::MutexGuard<'_, Anchor> {
        let mut anchor = self.anchor.lock().unwrap_or_else(PoisonError::into_inner);
        if anchor.set.elapsed() > ANCHOR_AGE {
            // Whether or not it succeeds, the next attempt is a second away.
            let now = self.try_anchor(&anchor.spare);
            anchor.set = Instant::now();
            if let Some(at_ns) = now {
                let Anchor { mark, spare, .. } = &mut *anchor;
                std::mem::swap(mark, spare);
                anchor.at_ns = at_ns;
            }
        }
        anchor
    }

    fn try_anchor(&self, mark: &Mark) -> Option<u64> {
        let before = Instant::now();
        mark.record(&self.stream).ok()?;
        while before.elapsed() < ANCHOR_WAIT {
            if mark.query().ok()? {
                return Some(middle(self.zero, before, Instant::now()));
            }
            std::hint::spin_loop();
        }
        None
    }
}

fn middle(zero: Instant, before: Instant, after: Instant) -> u64 {
    let since = |at: Instant| at.saturating_duration_since(zero).as_nanos() as u64;
    u64::midpoint(since(before), since(after))
}

/// How densely one lane is timed; see [Note: what timing costs].
#[derive(Debug, Default)]
pub(crate) struct Pace {
    last_ns: AtomicU64,
    untimed_bytes: AtomicU64,
}

impl Pace {
    /// Whether to time a copy now, and if so the bytes that were not timed since the last one.
    pub(crate) fn take(&self, pace_ns: u64, now_ns: u64) -> Option<u64> {
        // Of two threads that look at once both may time theirs: no harm.
        let last_ns = self.last_ns.load(Relaxed);
        // A later trace starts from 0 again.
        if (last_ns..last_ns.saturating_add(pace_ns)).contains(&now_ns) {
            return None;
        }
        self.last_ns.store(now_ns, Relaxed);
        Some(self.untimed_bytes.swap(0, Relaxed))
    }

    /// These bytes are not timed.
    pub(crate) fn skip(&self, bytes: u64) {
        self.untimed_bytes.fetch_add(bytes, Relaxed);
    }
}

/// Work on a stream that is being submitted.
#[derive(Debug)]
pub struct Timed {
    recorder: Arc<Recorder>,
    clock: Arc<DeviceClock>,
    begin: Arc<Mark>,
    untimed_bytes: u64,
}

impl Timed {
    pub(super) fn begin(
        recorder: &Arc<Recorder>,
        clock: Arc<DeviceClock>,
        stream: &Stream,
        untimed_bytes: u64,
    ) -> Option<Self> {
        let begin = clock.marks.take().ok()?;
        // A trace never fails the work that it watches.
        begin.record(stream).ok()?;
        Some(Self { recorder: recorder.clone(), clock, begin, untimed_bytes })
    }

    /// All of it was submitted to the stream.
    pub fn end(self, stream: &Stream, span: Span) {
        let Ok(end) = self.clock.marks.take() else { return };
        if end.record(stream).is_ok() {
            let span = Span { untimed_bytes: self.untimed_bytes, ..span };
            self.recorder.keep_pending(Pending { clock: self.clock, begin: self.begin, end, span });
        }
    }
}

/// A span whose end may not have been reached.
#[derive(Debug)]
pub(super) struct Pending {
    clock: Arc<DeviceClock>,
    begin: Arc<Mark>,
    end: Arc<Mark>,
    span: Span,
}

impl Pending {
    /// Whether its end was reached, or will never be.
    pub(super) fn has_ended(&self) -> bool {
        self.end.query().unwrap_or(true)
    }

    /// Blocks until its end was reached.
    pub(super) fn wait(&self) {
        let _ = self.end.synchronize();
    }

    /// The span, with its times; nothing if they cannot be known.
    pub(super) fn span(&self) -> Option<Span> {
        let (start_ns, end_ns) = self.clock.span_ns(self.begin.event(), self.end.event())?;
        Some(Span { start_ns, end_ns, ..self.span })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A thread that is interrupted while it sets the anchor sets it too late.
    #[test]
    fn nothing_ends_after_it_was_seen_to_have_ended() {
        let (device, zero) = (forebay_device::open("cpu").unwrap(), Instant::now());
        let clock = DeviceClock::new(&device, zero).unwrap();
        clock.anchor.lock().unwrap().at_ns += 3_600_000_000_000;
        let (begin, end) = (clock.marks.take().unwrap(), clock.marks.take().unwrap());
        begin.record(&clock.stream).unwrap();
        end.record(&clock.stream).unwrap();
        end.synchronize().unwrap();
        let (started, ended) = clock.span_ns(begin.event(), end.event()).unwrap();
        assert!(started <= ended && ended <= zero.elapsed().as_nanos() as u64, "{started} to {ended}");
    }
}
