//! Points: the ends of updates, numbered, in the one stream that runs them.
//!
//! A few marks are recorded in turn. Work on a stream runs in order, so a later point is also good for an earlier one:
//! who waits for a point whose mark was recorded again since waits for the oldest point that still has one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};

use forebay_device::Stream;

use crate::error::Result;
use crate::flow::{Mark, Marks};

/// Marks that are recorded in turn: more than a ring has slots, so that a point without a mark was mostly reached.
const KEPT: u64 = 128;

/// Numbered points of one stream. Number 0 is its beginning.
#[derive(Debug)]
pub(super) struct Points {
    marks: Vec<Arc<Mark>>,
    latest: AtomicU64,
}

impl Points {
    pub(super) fn new(marks: &Arc<Marks>) -> Result<Self> {
        let marks = (0..KEPT).map(|_| marks.take()).collect::<Result<_>>()?;
        Ok(Self { marks, latest: AtomicU64::new(0) })
    }

    /// The newest point.
    pub(super) fn latest(&self) -> u64 {
        self.latest.load(Acquire)
    }

    /// Marks the present end of the stream, by the one thread that does so.
    pub(super) fn record(&self, stream: &Stream) -> Result<u64> {
        let next = self.latest() + 1;
        self.marks[(next % KEPT) as usize].record(stream)?;
        self.latest.store(next, Release);
        Ok(next)
    }

    /// The mark of a point, or of the oldest later one.
    fn mark(&self, point: u64) -> Option<&Arc<Mark>> {
        let oldest = (self.latest() + 1).saturating_sub(KEPT);
        (point > 0).then(|| &self.marks[(point.max(oldest) % KEPT) as usize])
    }

    /// Makes a stream wait for a point; without a stream the calling thread waits.
    pub(super) fn wait(&self, point: u64, stream: Option<&Stream>) -> Result<()> {
        match (self.mark(point), stream) {
            (None, _) => Ok(()),
            (Some(mark), Some(stream)) => mark.wait(stream),
            (Some(mark), None) => mark.synchronize(),
        }
    }

    /// A point that was reached: the newest one among those that have a mark, else the beginning.
    pub(super) fn newest_reached(&self) -> Result<u64> {
        let latest = self.latest();
        for point in (latest.saturating_sub(KEPT - 1)..=latest).rev() {
            if self.is_reached(point)? {
                return Ok(point);
            }
        }
        Ok(0)
    }

    /// Whether a point was reached.
    pub(super) fn is_reached(&self, point: u64) -> Result<bool> {
        self.mark(point).map_or(Ok(true), |mark| mark.query())
    }
}
