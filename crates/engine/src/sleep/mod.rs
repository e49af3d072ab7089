//! Sleep and wake: whole storages leave the device for a pinned slab, and come back, at the speed of the wire.
//!
//! ```text
//! sleep:  storages ==pack==> [staging slot] ==store==> slab       large storages go straight
//! wake:   slab ==fetch==> [staging slot] ==unpack==> storages
//! ```
//!
//! [`layout`] says where each storage lies in the slab, [`moves`] what travels in one transfer, and [`transfer`] runs
//! one sleep or wake on a thread of its own, so that the caller can walk, empty and allocate storages meanwhile.
//!
//! # Refusals
//! Nothing here empties or allocates storages: the caller does, and learns batch by batch which storages have arrived.
//! Sleeping bytes are never overwritten: a store into their place is an error.

pub mod layout;
pub mod moves;
pub mod transfer;

use std::sync::Arc;

use forebay_device::{Buffer, Region, SharedDevice, Slab, SlabLayout, Stream};

pub use layout::{Extent, Layout, Want};
pub use moves::{COPY_BYTES, Move, PACK_BELOW_BYTES, PackedRange};
pub use transfer::{Direction, Transfer};

use crate::error::{Error, Result};
use crate::flow::{Mark, Marks};
use crate::memory::{Allocator, Lease};
use crate::sync::{Mutex, lock};
use crate::totals::Use;

/// Staging slots, and transfers in flight.
pub const SLOTS: usize = 4;
/// Bytes of one staging slot.
pub const SLOT_BYTES: u64 = 16 << 20;

/// The slab of one device, and what moves bytes into it and out of it.
#[derive(Debug)]
pub struct Sleeper {
    allocator: Arc<Allocator>,
    slabs: Mutex<SleepSlabs>,
    streams: Mutex<Option<Arc<SleepStreams>>>,
    busy: Arc<Mutex<bool>>,
}

/// The layout and the memory behind its segments.
#[derive(Debug, Default)]
struct SleepSlabs {
    layout: Layout,
    slabs: Vec<Lease<Slab>>,
    /// Slab and part of each segment.
    segments: Vec<(usize, usize)>,
}

/// Streams and marks, made once.
#[derive(Debug)]
pub(crate) struct SleepStreams {
    pub(crate) store: Stream,
    pub(crate) fetch: Stream,
    pub(crate) pack: Stream,
    /// For each staging slot: its staging is filled, and its use has ended.
    pub(crate) slots: Vec<[Arc<Mark>; 2]>,
    /// The ends of the last transfer, on the stream that copied and on the one that packed.
    pub(crate) idle: [Arc<Mark>; 2],
    pub(crate) marks: Arc<Marks>,
}

impl SleepSlabs {
    fn region(&self, extent: &Extent) -> Result<Region> {
        let (slab, part) = self.segments[extent.segment];
        Ok(self.slabs[slab].part(part)?.slice(extent.offset_bytes, extent.bytes)?)
    }

    /// Frees all slabs.
    fn clear(&mut self) {
        *self = Self { layout: self.layout.emptied(), ..Self::default() };
    }

    /// Makes room for all of these: existing room first, then one more slab of exactly what is missing.
    fn place(&mut self, allocator: &Allocator, wants: &[Want]) -> Result<()> {
        let mut layout = self.layout.clone();
        let added = layout.place(wants)?;
        if added.is_empty() {
            self.layout = layout;
            return Ok(());
        }
        let budget = allocator.budget();
        if let Err(refused) = budget.check(SlabLayout::new(&added)?.bytes()) {
            // Room that is free, but cut up by an earlier layout, is not worth an error.
            let whole = SlabLayout::new(&self.layout.emptied().place(wants)?)?.bytes();
            let too_large = budget.limit_bytes().is_some_and(|limit| whole > limit);
            if self.slabs.is_empty() || self.layout.any_asleep() || too_large {
                return Err(refused);
            }
            self.clear();
            return self.place(allocator, wants);
        }
        let slab = allocator.pin_for(Use::Sleep, &added)?;
        self.slabs.push(slab);
        self.segments.extend((0..added.len()).map(|part| (self.slabs.len() - 1, part)));
        self.layout = layout;
        Ok(())
    }
}

impl Sleeper {
    /// A sleeper without a slab.
    pub fn new(allocator: Arc<Allocator>) -> Self {
        Self { allocator, slabs: Mutex::default(), streams: Mutex::default(), busy: Arc::default() }
    }

    /// A sleeper whose sleeping storages can be read on the host: see [`Layout::uncut`] and [`Self::region`].
    pub fn readable(allocator: Arc<Allocator>) -> Self {
        let slabs = SleepSlabs { layout: Layout::uncut(), ..SleepSlabs::default() };
        Self { slabs: Mutex::new(slabs), ..Self::new(allocator) }
    }

    /// The device it serves.
    pub fn device(&self) -> &SharedDevice {
        self.allocator.device()
    }

    /// Bytes of staging memory that keep the wire busy.
    pub fn staging_bytes() -> u64 {
        SLOT_BYTES * SLOTS as u64
    }

    /// Whether every storage has its place in the slab already, with nothing asleep there.
    pub fn holds(&self, wants: &[Want]) -> bool {
        lock(&self.slabs).layout.holds(wants)
    }

    /// Gives every storage a place in the slab, pinning what is missing, within a budget that holds from now on. What
    /// sleeps stays where it is, also after an error. Where nothing sleeps, slabs that leave no room are freed first.
    pub fn place(&self, wants: &[Want], budget_bytes: Option<u64>) -> Result<()> {
        self.allocator.budget().set_limit(budget_bytes);
        lock(&self.slabs).place(&self.allocator, wants)
    }

    /// The memory of a storage's place in the slab. Its bytes are those of the storage from the arrival of a sleep's batch
    /// until the storage is [freed](Self::free).
    pub fn region(&self, id: u64) -> Result<Region> {
        let slabs = lock(&self.slabs);
        let refuse = |reason: &str| Error::PlanMismatch { tensor: format!("storage {id}"), reason: reason.to_owned() };
        match slabs.layout.extents(id) {
            Some([extent]) => slabs.region(extent),
            Some(_) => Err(refuse("it lies in several ranges and cannot be read as one")),
            None => Err(refuse("it has no place in the slab")),
        }
    }

    /// Marks storages as awake: their places may be stored to again, or given away.
    pub fn free(&self, ids: &[u64]) {
        lock(&self.slabs).layout.mark(ids, false);
    }

    /// Bytes pinned now. Takes no lock, which is held while memory is pinned.
    pub fn pinned_bytes(&self) -> u64 {
        self.allocator.budget().used_bytes()
    }

    /// Unpins and frees everything. Refused while anything sleeps.
    pub fn release(&self) -> Result<()> {
        let mut slabs = lock(&self.slabs);
        if slabs.layout.any_asleep() {
            return Err(Error::InvalidOption {
                option: "release",
                value: "something still sleeps".to_owned(),
                remedy: "its only copy is in the slab; wake it first".to_owned(),
            });
        }
        slabs.clear();
        Ok(())
    }

    /// Begins to move storages. What was submitted to `after` so far happens before. Small storages are packed where
    /// there is staging memory; [`Self::staging_bytes`] of it keep the wire busy, less works too.
    pub fn begin(&self, direction: Direction, after: Option<&Stream>, staging: Option<&Buffer>) -> Result<Transfer> {
        let streams = {
            let mut made = lock(&self.streams);
            match &*made {
                Some(streams) => streams.clone(),
                None => made.insert(Arc::new(SleepStreams::new(self.device())?)).clone(),
            }
        };
        Transfer::begin(self.device().clone(), streams, self.busy.clone(), direction, after, staging)
    }

    /// Hands a batch of storages with their memory to a transfer, and returns its number. From here on a sleep's
    /// storages count as asleep, until they are [freed](Self::free), also where the transfer fails. On a wake, what was submitted
    /// to `after` so far may still use that memory; the batch waits for it.
    pub fn submit(&self, transfer: &Transfer, batch: Vec<(u64, Region)>, after: Option<&Stream>) -> Result<usize> {
        let mut slabs = lock(&self.slabs);
        let storing = transfer.direction() == Direction::Sleep;
        let mut extents = Vec::with_capacity(batch.len());
        for (id, region) in &batch {
            let refuse = |reason: String| Error::PlanMismatch { tensor: format!("storage {id}"), reason };
            let found = slabs.layout.extents(*id).ok_or_else(|| refuse("it has no place in the slab".to_owned()))?;
            let bytes: u64 = found.iter().map(|extent| extent.bytes).sum();
            if bytes != region.bytes() {
                return Err(refuse(format!("{bytes} bytes in the slab, {} on the device", region.bytes())));
            }
            if slabs.layout.is_asleep(*id) == storing {
                return Err(refuse(if storing { "it sleeps already" } else { "it does not sleep" }.to_owned()));
            }
            extents.push(found.to_vec());
        }
        let moves = moves::moves(&extents, transfer.slot_bytes());
        let moves = moves.into_iter().map(|one| {
            let slab = slabs.region(match &one {
                Move::Direct { extent, .. } => extent,
                Move::Packed { whole, .. } => whole,
            })?;
            Ok((one, slab))
        });
        let moves = moves.collect::<Result<Vec<_>>>()?;
        let (ids, regions): (Vec<u64>, Vec<Region>) = batch.into_iter().unzip();
        let number = transfer.submit(regions, moves, after)?;
        if storing {
            // Now, not when it has arrived: another batch may need room meanwhile.
            slabs.layout.mark(&ids, true);
        }
        Ok(number)
    }
}

impl SleepStreams {
    fn new(device: &SharedDevice) -> Result<Self> {
        let marks = Marks::new(device.clone());
        Ok(Self {
            store: device.stream("sleep")?,
            fetch: device.stream("wake")?,
            pack: device.stream("pack")?,
            slots: (0..SLOTS).map(|_| Ok([marks.take()?, marks.take()?])).collect::<Result<_>>()?,
            idle: [marks.take()?, marks.take()?],
            marks,
        })
    }
}
