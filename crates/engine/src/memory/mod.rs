//! Memory for everything that moves bytes: pinned slabs and device buffers, allocated once, exact, within a budget.

mod budget;

use std::sync::Arc;

use forebay_device::{Buffer, SharedDevice, Slab, SlabLayout};

pub use budget::PinnedBudget;
use budget::PinnedBytes;

use crate::error::Result;
use crate::trace::{Held, Pool};

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
    _counted: Arc<(PinnedBytes, Option<Held>)>,
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

    /// Pins a slab with parts of these sizes.
    pub fn pin(&self, part_bytes: &[u64]) -> Result<Lease<Slab>> {
        self.pin_for(Pool::Optimizer, part_bytes)
    }

    /// The same for another use than an optimizer's, as traces show it.
    pub(crate) fn pin_for(&self, pool: Pool, part_bytes: &[u64]) -> Result<Lease<Slab>> {
        let layout = SlabLayout::new(part_bytes)?;
        let (bytes, counted) = (layout.bytes(), self.budget.take(layout.bytes())?);
        let memory = self.device.pin(layout)?;
        Ok(Lease { memory, _counted: Arc::new((counted, Some(Held::new(pool, bytes)))) })
    }

    /// Counts pinned memory against the budget, before it is pinned. Memory that several users share counts in full for
    /// each of them: whoever goes first, what the others have stays within their budgets.
    pub(crate) fn lease<T>(&self, bytes: u64, pin: impl FnOnce() -> Result<T>) -> Result<Lease<T>> {
        let counted = self.budget.take(bytes)?;
        Ok(Lease { memory: pin()?, _counted: Arc::new((counted, None)) })
    }

    /// Allocates device memory, which counts against no budget.
    pub fn alloc(&self, bytes: u64) -> Result<Buffer> {
        Ok(self.device.alloc(bytes)?)
    }
}
