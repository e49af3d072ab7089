//! The counts of one device: resources made, and bytes in use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::device::Counters;

/// Shared by a device and everything it handed out; bytes are given back when their [`Charge`] is dropped.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) allocated_bytes: AtomicU64,
    pub(crate) pinned_bytes: AtomicU64,
    allocations: AtomicU64,
    pins: AtomicU64,
    streams: AtomicU64,
    events: AtomicU64,
}

impl Ledger {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(crate) fn counters(&self) -> Counters {
        Counters {
            allocations: self.allocations.load(Relaxed),
            pins: self.pins.load(Relaxed),
            streams: self.streams.load(Relaxed),
            events: self.events.load(Relaxed),
        }
    }

    // Counted after the resource exists: an attempt that fails made nothing.
    pub(crate) fn count_allocation(&self) {
        self.allocations.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_pin(&self) {
        self.pins.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_stream(&self) {
        self.streams.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_event(&self) {
        self.events.fetch_add(1, Relaxed);
    }

    /// Counts pinned bytes until the charge is dropped.
    pub(crate) fn pin(self: &Arc<Self>, bytes: u64) -> Charge {
        self.pinned_bytes.fetch_add(bytes, Relaxed);
        Charge { ledger: self.clone(), what: Counted::Pinned, bytes }
    }

    /// Counts device bytes against a capacity; on failure returns how many bytes are left of it.
    pub(crate) fn allocate(self: &Arc<Self>, bytes: u64, capacity_bytes: u64) -> std::result::Result<Charge, u64> {
        self.allocated_bytes
            .fetch_update(Relaxed, Relaxed, |taken| taken.checked_add(bytes).filter(|&sum| sum <= capacity_bytes))
            .map_err(|taken| capacity_bytes.saturating_sub(taken))?;
        Ok(Charge { ledger: self.clone(), what: Counted::Allocated, bytes })
    }
}

#[derive(Debug, Clone, Copy)]
enum Counted {
    Allocated,
    Pinned,
}

/// Bytes in use until this is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    ledger: Arc<Ledger>,
    what: Counted,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let total = match self.what {
            Counted::Allocated => &self.ledger.allocated_bytes,
            Counted::Pinned => &self.ledger.pinned_bytes,
        };
        total.fetch_sub(self.bytes, Relaxed);
    }
}
