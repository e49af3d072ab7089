//! The pinned memory of a table: one slab, or two of the same layout.
//!
//! The current side has the state. With a second slab a step can write to the other side and leave the current one as it
//! is; [`Sides::exchange`] then makes the other side the current one, without moving a byte. The step counters are in the
//! slab that was there first, whichever side is current.

use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_device::{Region, SharedDevice, Slab};

use crate::error::{Error, Result};
use crate::memory::{Allocator, Lease};

/// One of the two slabs of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// The one that has the state.
    Current,
    /// The one that a step may write while the state stays.
    Other,
}

/// The slabs of a table.
#[derive(Debug)]
pub(super) struct Sides {
    slabs: Mutex<Slabs>,
}

#[derive(Debug)]
struct Slabs {
    current: Lease<Slab>,
    other: Option<Lease<Slab>>,
    counters: Region,
    generation: u64,
}

impl Sides {
    /// A first slab, whose last part has the counters.
    pub(super) fn new(slab: Lease<Slab>) -> Result<Self> {
        let counters = last_part(&slab)?;
        Ok(Self { slabs: Mutex::new(Slabs { current: slab, other: None, counters, generation: 0 }) })
    }

    fn slabs(&self) -> MutexGuard<'_, Slabs> {
        self.slabs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pinned bytes of all slabs.
    pub(super) fn bytes(&self) -> u64 {
        let slabs = self.slabs();
        slabs.current.bytes() + slabs.other.as_ref().map_or(0, |slab| slab.bytes())
    }

    /// Whether there are two.
    pub(super) fn has_second(&self) -> bool {
        self.slabs().other.is_some()
    }

    /// The slab of a side. It stays pinned while the result is held, and is counted while it is a side.
    pub(super) fn slab(&self, side: Side) -> Result<Slab> {
        let slabs = self.slabs();
        match side {
            Side::Current => Ok((*slabs.current).clone()),
            Side::Other => slabs.other.as_deref().cloned().ok_or_else(no_second),
        }
    }

    /// The step counters.
    pub(super) fn counters(&self) -> Region {
        self.slabs().counters.clone()
    }

    /// A number that grows whenever a column or a counter has moved.
    pub(super) fn generation(&self) -> u64 {
        self.slabs().generation
    }

    /// Pins a second slab with these parts, zeroed, if there is none.
    pub(super) fn open_second(&self, memory: &Allocator, part_bytes: &[u64]) -> Result<()> {
        if !self.has_second() {
            // Not under the lock: pinning takes its time.
            let slab = memory.pin(part_bytes)?;
            self.slabs().other = Some(slab);
        }
        Ok(())
    }

    /// Gives the other side up. Nothing is under way into it or out of it.
    pub(super) fn close_second(&self, device: &SharedDevice) -> Result<()> {
        let mut slabs = self.slabs();
        let home = last_part(&slabs.current)?;
        if slabs.other.is_some() && slabs.counters.addr() != home.addr() {
            let mut counted = vec![0; home.bytes() as usize];
            device.read(&slabs.counters, &mut counted)?;
            device.write(&counted, &home)?;
            (slabs.counters, slabs.generation) = (home, slabs.generation + 1);
        }
        let closed = slabs.other.take();
        drop(slabs);
        drop(closed);
        Ok(())
    }

    /// Makes the other side the current one. The other one is then what was current.
    pub(super) fn exchange(&self) -> Result<()> {
        let mut slabs = self.slabs();
        let Slabs { current, other, generation, .. } = &mut *slabs;
        std::mem::swap(current, other.as_mut().ok_or_else(no_second)?);
        *generation += 1;
        Ok(())
    }
}

fn last_part(slab: &Slab) -> Result<Region> {
    Ok(slab.part(slab.layout().parts() - 1)?)
}

fn no_second() -> Error {
    Error::InvalidOption {
        option: "side",
        value: "the other one".to_owned(),
        remedy: "the state has one side; open a second one first".to_owned(),
    }
}
