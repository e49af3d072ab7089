//! Memory for the pipeline: pinned slabs and device rings, each allocated once, exact, named and counted.

use std::sync::{Arc, Weak};

use forebay_device::{Buffer, PinStats, SharedDevice, Slab, SlabLayout};

use crate::error::Result;
use crate::sync::{Mutex, lock};

/// Hands out slabs and rings of one device and knows what is out.
#[derive(Debug)]
pub struct Pool {
    device: SharedDevice,
    taken: Mutex<Vec<Taken>>,
}

#[derive(Debug)]
struct Taken {
    name: String,
    bytes: u64,
    pinned: Option<PinStats>,
    alive: Weak<()>,
}

/// Something taken from a pool; goes back when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Lease<T> {
    what: T,
    _alive: Arc<()>,
}

impl<T> std::ops::Deref for Lease<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.what
    }
}

/// One thing that is out, for reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolEntry {
    /// The name it was taken under.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// What pinning cost, for a slab; nothing for a device ring.
    pub pinned: Option<PinStats>,
}

impl Pool {
    /// A pool on a device.
    pub fn new(device: SharedDevice) -> Arc<Self> {
        Arc::new(Self { device, taken: Mutex::new(Vec::new()) })
    }

    /// The device it allocates on.
    pub fn device(&self) -> &SharedDevice {
        &self.device
    }

    /// Pins a slab with parts of these sizes.
    pub fn slab(&self, name: &str, part_bytes: &[u64]) -> Result<Lease<Slab>> {
        let slab = self.device.pin(SlabLayout::new(part_bytes)?)?;
        let (bytes, stats) = (slab.bytes(), slab.pin_stats());
        Ok(self.lease(name, bytes, Some(stats), slab))
    }

    /// Allocates device memory for a ring.
    pub fn device_buffer(&self, name: &str, bytes: u64) -> Result<Lease<Buffer>> {
        let buffer = self.device.alloc(bytes)?;
        Ok(self.lease(name, bytes, None, buffer))
    }

    fn lease<T>(&self, name: &str, bytes: u64, pinned: Option<PinStats>, what: T) -> Lease<T> {
        let alive = Arc::new(());
        let mut taken = lock(&self.taken);
        taken.retain(|entry| entry.alive.strong_count() > 0);
        taken.push(Taken { name: name.to_owned(), bytes, pinned, alive: Arc::downgrade(&alive) });
        Lease { what, _alive: alive }
    }

    /// What is out.
    pub fn entries(&self) -> Vec<PoolEntry> {
        lock(&self.taken)
            .iter()
            .filter(|entry| entry.alive.strong_count() > 0)
            .map(|entry| PoolEntry { name: entry.name.clone(), bytes: entry.bytes, pinned: entry.pinned })
            .collect()
    }
}
