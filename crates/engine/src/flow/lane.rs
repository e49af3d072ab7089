//! One direction of the wire: a stream, and a thread of the engine that submits a few chunks at a time to it.
//!
//! A deep queue on a copy engine delays small copies of all streams. So a lane never has more than [`IN_FLIGHT_BYTES`]
//! under way and submits the next chunk when one has ended. Requesting a copy is cheap and never blocks. A caller that
//! needs the copy's mark waits until the lane has recorded it ([`Lane::wait`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use forebay_device::{Cores, Event, Region, SharedDevice, Stream};

use super::marks::{Mark, Marks};
use super::queue::{Cancelled, Queue, Ticket};
use crate::error::Result;
use crate::trace::{self, Kind, Label, Pace, Span};

/// Bytes of one copy.
const CHUNK_BYTES: u64 = 16 << 20;
/// Bytes that are submitted and have not ended: 1.2 milliseconds of a PCIe Gen5 wire.
const IN_FLIGHT_BYTES: u64 = 64 << 20;
/// Copies that are submitted and have not ended.
const IN_FLIGHT_COPIES: usize = 16;

/// With each timed copy, the times of earlier copies lose one part in this many of their weight.
const FADE_PARTS: u64 = 8;

/// A copy to make.
#[derive(Debug)]
pub(crate) struct CopyJob {
    pub(crate) from: Region,
    pub(crate) to: Region,
    /// What has to end before it may begin.
    pub(crate) after: Vec<Arc<Mark>>,
    /// Recorded when it has been submitted.
    pub(crate) end: Arc<Mark>,
    /// How a trace shows it: whose it is, and the layer.
    pub(crate) shown: Shown,
}

/// What a trace says about a copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown {
    pub(crate) kind: Kind,
    pub(crate) owner: u32,
    pub(crate) layer: u32,
}

/// A copy that was requested from a lane.
#[derive(Debug, Clone)]
pub(crate) struct QueuedCopy {
    ticket: Ticket,
    /// The end of the copy; it means something once the copy was submitted.
    end: Arc<Mark>,
}

impl QueuedCopy {
    /// The end of the copy, for one who has [waited](Lane::wait) for its submission.
    pub(crate) fn end(&self) -> &Arc<Mark> {
        &self.end
    }
}

/// Bytes and times of recent copies.
#[derive(Debug, Default)]
struct Observed {
    bytes: AtomicU64,
    ns: AtomicU64,
}

/// One direction.
#[derive(Debug)]
pub(crate) struct Lane {
    queue: Arc<Queue<CopyJob>>,
    observed: Arc<Observed>,
    pid: u32,
}

impl Lane {
    /// Starts the thread.
    pub(crate) fn new(device: &SharedDevice, marks: &Arc<Marks>, name: &str) -> Result<Self> {
        let (queue, observed) = (Arc::new(Queue::new()), Arc::new(Observed::default()));
        let mut worker = Worker {
            device: device.clone(),
            stream: device.stream(name)?,
            marks: marks.clone(),
            under_way: VecDeque::new(),
            timer: [device.timed_event()?, device.timed_event()?],
            timed_bytes: 0,
            observed: observed.clone(),
            longest_bytes: 0,
            jobs: 0,
            pace: Pace::default(),
        };
        let jobs = queue.clone();
        Cores::here().spawn(&format!("forebay-{name}"), move || {
            while let Some((ticket, job)) = jobs.next() {
                let outcome = worker.run(&job, &jobs);
                drop(job);
                jobs.finish(ticket, outcome);
            }
        })?;
        Ok(Self { queue, observed, pid: std::process::id() })
    }

    /// Asks for a copy; before all others if it is needed now.
    pub(crate) fn submit(&self, job: CopyJob, urgent: bool) -> QueuedCopy {
        let end = job.end.clone();
        QueuedCopy { ticket: self.queue.push(job, urgent), end }
    }

    /// Moves a copy that has not begun before all others.
    pub(crate) fn hurry(&self, copy: &QueuedCopy) {
        self.queue.hurry(copy.ticket);
    }

    /// Whether the copy has been submitted.
    pub(crate) fn is_submitted(&self, copy: &QueuedCopy) -> bool {
        self.queue.is_over(copy.ticket)
    }

    /// Blocks until the copy has been submitted: its mark is recorded.
    pub(crate) fn wait(&self, copy: &QueuedCopy) -> Result<()> {
        self.queue.wait(copy.ticket)
    }

    /// Takes a copy back as far as it has not been submitted.
    pub(crate) fn cancel(&self, copy: &QueuedCopy) -> Cancelled {
        self.queue.cancel(copy.ticket)
    }

    /// The rate of the last copies, in bytes per nanosecond, which is GB/s; `None` before the first has been timed.
    pub(crate) fn rate(&self) -> Option<f64> {
        let (bytes, ns) = (self.observed.bytes.load(Relaxed), self.observed.ns.load(Relaxed));
        (ns > 0).then(|| bytes as f64 / ns as f64)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // A forked child does not have the thread, and a thread of its parent may have held the lock when it forked.
        if self.pid == std::process::id() {
            self.queue.close();
        }
    }
}

struct Worker {
    device: SharedDevice,
    stream: Stream,
    marks: Arc<Marks>,
    /// Copies that may not have ended, oldest first.
    under_way: VecDeque<(Arc<Mark>, u64)>,
    timer: [Event; 2],
    /// Bytes between the timer's two events, until their times were read.
    timed_bytes: u64,
    observed: Arc<Observed>,
    longest_bytes: u64,
    /// Jobs run so far.
    jobs: u64,
    pace: Pace,
}

impl Worker {
    fn run(&mut self, job: &CopyJob, queue: &Queue<CopyJob>) -> Result<()> {
        let outcome = self.copy(job, queue);
        // Recorded even after a failure or a stop: it ends everything that was submitted.
        self.jobs += 1;
        job.end.set_order(self.jobs);
        outcome.and(job.end.record(&self.stream))
    }

    fn copy(&mut self, job: &CopyJob, queue: &Queue<CopyJob>) -> Result<()> {
        for mark in &job.after {
            // A mark that was reached long ago needs no wait.
            if !mark.query()? {
                mark.wait(&self.stream)?;
            }
        }
        // Short copies say little about the wire's rate, so only those near the longest are timed, one at a time.
        self.longest_bytes = self.longest_bytes.max(job.from.bytes());
        let timed = 2 * job.from.bytes() >= self.longest_bytes && self.read_timer()?;
        if timed {
            self.device.record(&self.timer[0], &self.stream)?;
        }
        let traced = trace::timed(&self.device, &self.stream, Some((&self.pace, job.from.bytes())));
        let mut offset = 0;
        while offset < job.from.bytes() && !queue.should_stop() {
            let bytes = CHUNK_BYTES.min(job.from.bytes() - offset);
            self.make_room(bytes)?;
            self.device.copy(&self.stream, &job.from.slice(offset, bytes)?, &job.to.slice(offset, bytes)?)?;
            let mark = self.marks.take()?;
            mark.record(&self.stream)?;
            self.under_way.push_back((mark, bytes));
            offset += bytes;
        }
        // Nothing to show of a copy that was taken back before its first bytes.
        if let Some(traced) = traced.filter(|_| offset > 0) {
            let Shown { kind, owner, layer } = job.shown;
            let span = Span { bytes: offset, owner, layer: Some(layer), ..Span::new(kind, Label::Layer) };
            traced.end(&self.stream, span);
        }
        if timed {
            self.device.record(&self.timer[1], &self.stream)?;
            self.timed_bytes = offset;
        }
        Ok(())
    }

    fn make_room(&mut self, bytes: u64) -> Result<()> {
        while let Some((oldest, _)) = self.under_way.front() {
            let total: u64 = self.under_way.iter().map(|(_, bytes)| bytes).sum();
            if total + bytes <= IN_FLIGHT_BYTES && self.under_way.len() < IN_FLIGHT_COPIES {
                break;
            }
            oldest.synchronize()?;
            self.under_way.pop_front();
        }
        Ok(())
    }

    /// Counts the last timed copy; whether the timer is free for another.
    fn read_timer(&mut self) -> Result<bool> {
        if self.timed_bytes == 0 {
            return Ok(true);
        }
        if !self.device.query(&self.timer[1])? {
            return Ok(false);
        }
        let ns = self.device.elapsed_ns(&self.timer[0], &self.timer[1])?;
        // The first copies are slow in many ways: older times count less and less.
        let fade = |sum: &AtomicU64, new: u64| {
            let old = sum.load(Relaxed);
            sum.store(old - old / FADE_PARTS + new, Relaxed);
        };
        fade(&self.observed.bytes, std::mem::take(&mut self.timed_bytes));
        fade(&self.observed.ns, ns);
        Ok(true)
    }
}
