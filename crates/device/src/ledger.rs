//! The books of one device: what was made, what is taken, what the budget allows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::device::Counters;
use crate::error::{Error, Result};

/// Shared by a device and everything it handed out; each entry is taken back by the drop of its [`Entry`].
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) allocated_bytes: AtomicU64,
    pub(crate) pinned_bytes: AtomicU64,
    pub(crate) pinned_budget_bytes: Option<u64>,
    allocations: AtomicU64,
    pins: AtomicU64,
    streams: AtomicU64,
    events: AtomicU64,
}

impl Ledger {
    pub(crate) fn new(pinned_budget_bytes: Option<u64>) -> Arc<Self> {
        Arc::new(Self { pinned_budget_bytes, ..Self::default() })
    }

    pub(crate) fn counters(&self) -> Counters {
        Counters {
            allocations: self.allocations.load(Relaxed),
            pins: self.pins.load(Relaxed),
            streams: self.streams.load(Relaxed),
            events: self.events.load(Relaxed),
        }
    }

    // Counted when made, not when the bytes are taken: what fails in between was never made.
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

    /// Takes pinned bytes out of the budget, or says what is left of it.
    pub(crate) fn pin(self: &Arc<Self>, bytes: u64) -> Result<Entry> {
        let limit = self.pinned_budget_bytes.unwrap_or(u64::MAX);
        self.take(Book::Pinned, bytes, limit).map_err(|available_bytes| Error::OutOfPinnedBudget {
            requested_bytes: bytes,
            available_bytes,
            budget_bytes: limit,
        })
    }

    /// Takes device bytes out of a capacity; on failure says what is left of it.
    pub(crate) fn allocate(self: &Arc<Self>, bytes: u64, capacity_bytes: u64) -> std::result::Result<Entry, u64> {
        self.take(Book::Allocated, bytes, capacity_bytes)
    }

    fn take(self: &Arc<Self>, book: Book, bytes: u64, limit: u64) -> std::result::Result<Entry, u64> {
        let total = match book {
            Book::Allocated => &self.allocated_bytes,
            Book::Pinned => &self.pinned_bytes,
        };
        total
            .fetch_update(Relaxed, Relaxed, |taken| taken.checked_add(bytes).filter(|&sum| sum <= limit))
            .map_err(|taken| limit.saturating_sub(taken))?;
        Ok(Entry { ledger: self.clone(), book, bytes })
    }
}

#[derive(Debug, Clone, Copy)]
enum Book {
    Allocated,
    Pinned,
}

/// Bytes that are taken until this goes.
#[derive(Debug)]
pub(crate) struct Entry {
    ledger: Arc<Ledger>,
    book: Book,
    bytes: u64,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let total = match self.book {
            Book::Allocated => &self.ledger.allocated_bytes,
            Book::Pinned => &self.ledger.pinned_bytes,
        };
        total.fetch_sub(self.bytes, Relaxed);
    }
}
