//! Bytes of the memory that a trace shows over time: pinned memory by its use, and rings on devices.
//!
//! They are counted always, where memory is pinned or a ring is made, so that a trace knows them when it begins.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::span::Counter;

/// What memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pool {
    Optimizer,
    Activations,
    Sleep,
    Saves,
    Ring,
}

static BYTES: [AtomicU64; 5] = [const { AtomicU64::new(0) }; 5];

/// Bytes of a pool that count until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    pool: Pool,
    bytes: u64,
}

impl Held {
    pub(crate) fn new(pool: Pool, bytes: u64) -> Self {
        BYTES[pool as usize].fetch_add(bytes, Relaxed);
        report(pool);
        Self { pool, bytes }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        BYTES[self.pool as usize].fetch_sub(self.bytes, Relaxed);
        report(self.pool);
    }
}

fn report(pool: Pool) {
    if let Some(recorder) = super::current() {
        let [pinned, ring] = now();
        recorder.count(if pool == Pool::Ring { ring } else { pinned });
    }
}

/// The bytes of all pools.
pub(super) fn now() -> [Counter; 2] {
    let of = |pool: Pool| BYTES[pool as usize].load(Relaxed);
    let pinned = [Pool::Optimizer, Pool::Activations, Pool::Sleep, Pool::Saves].map(of);
    [Counter::Pinned(pinned), Counter::Ring(of(Pool::Ring))]
}
