//! Memory for everything that moves bytes: pinned slabs and device buffers, allocated once, exact, within a budget.

mod budget;

use std::sync::Arc;

use forebay_device::{Buffer, SharedDevice, Slab, SlabLayout};

pub use budget::PinnedBudget;
use budget::PinnedBytes;

use crate::error::Result;
use crate::totals::{Held, Use};

/// Allocates slabs and buffers of one device, for one user of the engine. Slabs count against its budget.
#[derive(Debug)]
pub struct Allocator {
    device: SharedDevice,
    budget: PinnedBudget,
}

/// Pinned memory of an [`Allocator`]. It counts against the budget until the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Lease<T> {
    // Declared before the count: memory is unpinned first, and then no longer counted.
    memory: T,
    _counted: Arc<PinnedBytes>,
    /// For memory of one user; what several share is counted where they share it.
    _held: Option<Arc<Held>>,
}

impl<T> std::ops::Deref for Lease<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.memory
    }
}

impl Allocator {
    /// On a device, without a limit on what is pinned.
    pub fn new(device: SharedDevice) -> Arc<Self> {
        Self::within(device, PinnedBudget::default())
    }

    /// On a device and within a budget.
    pub fn within(device: SharedDevice, budget: PinnedBudget) -> Arc<Self> {
        Arc::new(Self { device, budget })
    }

    /// The device it allocates on.
    pub fn device(&self) -> &SharedDevice {
        &self.device
    }

    /// The budget that its slabs count against.
    pub fn budget(&self) -> &PinnedBudget {
        &self.budget
    }

    /// Pins a slab with parts of these sizes, for an optimizer.
    pub fn pin(&self, part_bytes: &[u64]) -> Result<Lease<Slab>> {
        self.pin_for(Use::Optimizer, part_bytes)
    }

    /// The same for what the process's totals then say.
    pub fn pin_for(&self, of: Use, part_bytes: &[u64]) -> Result<Lease<Slab>> {
        let layout = SlabLayout::new(part_bytes)?;
        let bytes = layout.bytes();
        let lease = self.lease(bytes, || Ok(self.device.pin(layout)?))?;
        Ok(Lease { _held: Some(Arc::new(Held::pinned(of, bytes))), ..lease })
    }

    /// Counts pinned memory against the budget, before it is pinned. Memory that several users share counts in full for
    /// each of them: whoever goes first, what the others have stays within their budgets.
    pub(crate) fn lease<T>(&self, bytes: u64, pin: impl FnOnce() -> Result<T>) -> Result<Lease<T>> {
        let counted = self.budget.take(bytes)?;
        Ok(Lease { memory: pin()?, _counted: Arc::new(counted), _held: None })
    }

    /// Allocates device memory, which counts against no budget.
    pub fn alloc(&self, bytes: u64) -> Result<Buffer> {
        Ok(self.device.alloc(bytes)?)
    }
}
