//! Totals of the whole process, by use: pinned bytes, bytes of rings, bytes that crossed the wire, and waits.
//!
//! Plain counters. Whoever does the work adds to them, a few times for each chunk; reading them takes no lock and waits
//! for nothing, also while a step or a save is under way. Counters of one object are with that object; these are for
//! a process that is watched from outside.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::trace;

/// What memory and copies are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// State and gradients of optimizers.
    Optimizer,
    /// Saved activations.
    Activations,
    /// Storages that sleep or were moved.
    Sleep,
    /// Copies for saves.
    Saves,
}

impl Use {
    /// All of them, in the order of the arrays in [`Totals`].
    pub const ALL: [Self; 4] = [Self::Optimizer, Self::Activations, Self::Sleep, Self::Saves];

    /// As users read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Sleep => "sleep",
            Self::Saves => "saves",
        }
    }
}

/// What held up a step or a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The host waited for a slot of the ring.
    Slot,
    /// A step waited for a save that still needed its state.
    Save,
    /// A pass waited for the copy of a saved activation.
    Activation,
}

impl Wait {
    /// All of them, in the order of the arrays in [`Totals`].
    pub const ALL: [Self; 3] = [Self::Slot, Self::Save, Self::Activation];

    /// As users read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Slot => "slot",
            Self::Save => "save",
            Self::Activation => "activation",
        }
    }
}

/// What the process has pinned now, and what it has moved and waited since it began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Pinned bytes of each [`Use`]. What several users share counts once.
    pub pinned_bytes: [u64; 4],
    /// Bytes of all rings on devices. What several users share counts once.
    pub ring_bytes: u64,
    /// Bytes that came from the host, for each [`Use`].
    pub fetched_bytes: [u64; 4],
    /// Bytes that went to the host, for each [`Use`].
    pub stored_bytes: [u64; 4],
    /// How often each [`Wait`] happened.
    pub waits: [u64; 3],
    /// How long each took in all.
    pub wait_ns: [u64; 3],
}

static PINNED: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
static RINGS: AtomicU64 = AtomicU64::new(0);
static FETCHED: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
static STORED: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
static WAITS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
static WAIT_NS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];

fn read<const N: usize>(counters: &[AtomicU64; N]) -> [u64; N] {
    std::array::from_fn(|i| counters[i].load(Relaxed))
}

/// The counters now. Each is exact; two of them may be of slightly different moments.
pub fn totals() -> Totals {
    Totals {
        pinned_bytes: read(&PINNED),
        ring_bytes: RINGS.load(Relaxed),
        fetched_bytes: read(&FETCHED),
        stored_bytes: read(&STORED),
        waits: read(&WAITS),
        wait_ns: read(&WAIT_NS),
    }
}

/// Starts from zero in a forked child, which has neither its parent's memory nor its threads.
pub fn forget_parent() {
    let all = PINNED.iter().chain([&RINGS]).chain(&FETCHED).chain(&STORED).chain(&WAITS).chain(&WAIT_NS);
    all.for_each(|counter| counter.store(0, Relaxed));
}

/// Counts bytes that come from the host.
pub fn count_fetched(of: Use, bytes: u64) {
    FETCHED[of as usize].fetch_add(bytes, Relaxed);
}

/// Counts bytes that go to the host.
pub fn count_stored(of: Use, bytes: u64) {
    STORED[of as usize].fetch_add(bytes, Relaxed);
}

/// Counts waits, and how long they took in all.
pub fn count_waits(on: Wait, waits: u64, ns: u64) {
    WAITS[on as usize].fetch_add(waits, Relaxed);
    WAIT_NS[on as usize].fetch_add(ns, Relaxed);
}

/// Bytes that count until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    counter: &'static AtomicU64,
    bytes: u64,
    pid: u32,
}

impl Held {
    /// Pinned bytes.
    pub(crate) fn pinned(of: Use, bytes: u64) -> Self {
        Self::new(&PINNED[of as usize], bytes)
    }

    /// Bytes of a ring on a device.
    pub(crate) fn ring(bytes: u64) -> Self {
        Self::new(&RINGS, bytes)
    }

    fn new(counter: &'static AtomicU64, bytes: u64) -> Self {
        counter.fetch_add(bytes, Relaxed);
        trace::memory_changed();
        Self { counter, bytes, pid: std::process::id() }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // A forked child has begun from zero: what its parent counted is not in these counters.
        if self.pid == std::process::id() {
            self.counter.fetch_sub(self.bytes, Relaxed);
            trace::memory_changed();
        }
    }
}
