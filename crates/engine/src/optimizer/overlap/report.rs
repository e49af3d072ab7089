//! What an overlapped step did, for statistics and for `explain`.

use std::time::Instant;

use serde::Serialize;

use crate::flow::RunStats;

/// One unit of an overlapped step: a chunk, or a tensor whose state is on the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OverlapUnit {
    /// Its table.
    pub table: usize,
    /// Its chunk; `None` for a tensor whose state is on the device.
    pub chunk: Option<usize>,
    /// Its tensors, by their place in the table.
    pub tensors: Vec<usize>,
    /// Bytes of state that travel each way.
    pub bytes: u64,
    /// The place of its update among all of the step; `None` where it had none.
    pub position: Option<usize>,
    /// When that was submitted, in nanoseconds since the step began.
    pub submitted_ns: Option<u64>,
    /// Whether it had to wait for the commit.
    pub late: bool,
}

/// An overlapped step in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct OverlapStats {
    /// Units that were submitted before the commit, and their bytes.
    pub early_units: u64,
    /// Bytes of state of these.
    pub early_bytes: u64,
    /// Units that were submitted after it.
    pub late_units: u64,
    /// Bytes of state of these.
    pub late_bytes: u64,
    /// Tensors whose update is not submitted yet.
    pub pending: u64,
    /// Bytes of gradients that were free to go before the commit.
    pub freed_bytes: u64,
    /// Steps so far that updated on the second copy before their coefficient was known.
    pub speculated: u64,
    /// How many of them were not clipped, so that the second copy became the state.
    pub accepted: u64,
    /// When the step began; this and what follows are nanoseconds of one clock.
    pub begin_ns: u64,
    /// When it was committed; 0 before.
    pub commit_ns: u64,
    /// When all of it was submitted; 0 before.
    pub end_ns: u64,
    /// Bytes of the ring on the device.
    pub ring_bytes: u64,
    /// What went through the ring so far, with the times of its stages.
    pub streamed: RunStats,
}

impl OverlapStats {
    /// All numbers by name.
    pub fn named(&self) -> [(&'static str, u64); 19] {
        [
            ("early_units", self.early_units),
            ("early_bytes", self.early_bytes),
            ("late_units", self.late_units),
            ("late_bytes", self.late_bytes),
            ("pending", self.pending),
            ("freed_bytes", self.freed_bytes),
            ("speculated", self.speculated),
            ("accepted", self.accepted),
            ("begin_ns", self.begin_ns),
            ("commit_ns", self.commit_ns),
            ("end_ns", self.end_ns),
            ("ring_bytes", self.ring_bytes),
            ("fetch_bytes", self.streamed.fetch_bytes),
            ("store_bytes", self.streamed.store_bytes),
            ("fetch_ns", self.streamed.fetch_ns),
            ("update_ns", self.streamed.update_ns),
            ("store_ns", self.streamed.store_ns),
            ("stalls", self.streamed.stalls),
            ("stall_ns", self.streamed.stall_ns),
        ]
    }
}

/// The log of the step under way, or of the last one.
#[derive(Debug)]
pub(super) struct Report {
    origin: Instant,
    pub(super) stats: OverlapStats,
    /// Unit, time since the step began, and whether it waited for the commit, in the order of submission.
    pub(super) ran: Vec<(usize, u64, bool)>,
}

impl Report {
    pub(super) fn new() -> Self {
        Self { origin: Instant::now(), stats: OverlapStats::default(), ran: Vec::new() }
    }

    fn now(&self) -> u64 {
        (self.origin.elapsed().as_nanos() as u64).max(1)
    }

    pub(super) fn begin(&mut self) {
        let OverlapStats { speculated, accepted, .. } = self.stats;
        self.stats = OverlapStats { begin_ns: self.now(), speculated, accepted, ..OverlapStats::default() };
        self.ran.clear();
    }

    pub(super) fn commit(&mut self) {
        self.stats.commit_ns = self.now();
    }

    pub(super) fn end(&mut self) {
        self.stats.end_ns = self.now();
    }

    /// It is known whether a guess was right.
    pub(super) fn guessed(&mut self, accepted: bool) {
        self.stats.speculated += 1;
        self.stats.accepted += u64::from(accepted);
    }

    /// A unit was submitted.
    pub(super) fn ran(&mut self, unit: usize, bytes: u64, late: bool) {
        self.ran.push((unit, self.now() - self.stats.begin_ns, late));
        let (units, all) = match self.stats.commit_ns {
            0 => (&mut self.stats.early_units, &mut self.stats.early_bytes),
            _ => (&mut self.stats.late_units, &mut self.stats.late_bytes),
        };
        *units += 1;
        *all += bytes;
    }
}
