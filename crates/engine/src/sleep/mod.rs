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
//! Nothing here empties or allocates storages: that is the caller's, who learns batch by batch what has arrived. Bytes
//! that sleep are never overwritten: storing to where something sleeps is an error.

pub mod layout;
pub mod moves;
pub mod transfer;

use std::sync::Arc;

use forebay_device::{Buffer, Error as DeviceError, Event, PinStats, Region, SharedDevice, Slab, SlabLayout, Stream};

pub use layout::{Extent, Layout, Want};
pub use moves::{COPY_BYTES, Move, PACK_BELOW_BYTES, Part};
pub use transfer::{Direction, Transfer};

use crate::error::{Error, Result};
use crate::pool::{Lease, Pool};
use crate::sync::{Mutex, lock};

/// Staging slots, and transfers in flight.
pub const SLOTS: usize = 4;
/// Bytes of one staging slot.
pub const SLOT_BYTES: u64 = 16 << 20;

/// The slab of one device, and what moves bytes into it and out of it.
#[derive(Debug)]
pub struct Sleeper {
    pool: Arc<Pool>,
    room: Mutex<Room>,
    lanes: Mutex<Option<Arc<Lanes>>>,
    busy: Arc<Mutex<bool>>,
}

/// The layout and the memory behind its segments.
#[derive(Debug, Default)]
struct Room {
    layout: Layout,
    slabs: Vec<Lease<Slab>>,
    /// Slab and part of each segment.
    segments: Vec<(usize, usize)>,
}

/// Streams and events, made once.
#[derive(Debug)]
pub(crate) struct Lanes {
    pub(crate) store: Stream,
    pub(crate) fetch: Stream,
    pub(crate) pack: Stream,
    /// For each staging slot: its staging is filled, and its use has ended.
    pub(crate) slots: Vec<[Event; 2]>,
    /// Used again from one transfer to the next.
    pub(crate) spare: Mutex<Vec<Event>>,
}

impl Room {
    fn region(&self, extent: &Extent) -> Result<Region> {
        let (slab, part) = self.segments[extent.segment];
        Ok(self.slabs[slab].part(part)?.slice(extent.offset_bytes, extent.bytes)?)
    }

    fn pinned_bytes(&self) -> u64 {
        self.slabs.iter().map(|slab| slab.bytes()).sum()
    }

    /// Makes room for all of these: existing room first, then one more slab of exactly what is missing.
    fn place(&mut self, pool: &Pool, wants: &[Want], budget_bytes: Option<u64>) -> Result<()> {
        let mut layout = self.layout.clone();
        let added = layout.place(wants)?;
        if added.is_empty() {
            self.layout = layout;
            return Ok(());
        }
        let (taken, bytes) = (self.pinned_bytes(), SlabLayout::new(&added)?.bytes());
        if let Some(budget_bytes) = budget_bytes
            && taken + bytes > budget_bytes
        {
            // Room that is free, but cut up by an earlier layout, is not worth an error.
            let mut fresh = Layout::default();
            let whole = SlabLayout::new(&fresh.place(wants)?)?.bytes();
            if taken == 0 || self.layout.any_asleep() || whole > budget_bytes {
                return Err(Error::Device(DeviceError::OutOfPinnedBudget {
                    requested_bytes: bytes,
                    available_bytes: budget_bytes.saturating_sub(taken),
                    budget_bytes,
                }));
            }
            *self = Self::default();
            return self.place(pool, wants, Some(budget_bytes));
        }
        let slab = pool.slab("sleep", &added)?;
        self.slabs.push(slab);
        self.segments.extend((0..added.len()).map(|part| (self.slabs.len() - 1, part)));
        self.layout = layout;
        Ok(())
    }
}

impl Sleeper {
    /// A sleeper without a slab.
    pub fn new(pool: Arc<Pool>) -> Self {
        Self { pool, room: Mutex::default(), lanes: Mutex::default(), busy: Arc::default() }
    }

    /// The device it serves.
    pub fn device(&self) -> &SharedDevice {
        self.pool.device()
    }

    /// Bytes of staging memory that keep the wire busy.
    pub fn staging_bytes() -> u64 {
        SLOT_BYTES * SLOTS as u64
    }

    /// Whether every storage has its place in the slab already, with nothing asleep there.
    pub fn holds(&self, wants: &[Want]) -> bool {
        lock(&self.room).layout.holds(wants)
    }

    /// Gives every storage a place in the slab, pinning what is missing. What sleeps stays where it is; on an error
    /// everything does.
    pub fn place(&self, wants: &[Want], budget_bytes: Option<u64>) -> Result<()> {
        lock(&self.room).place(&self.pool, wants, budget_bytes)
    }

    /// Marks storages as awake: their places may be stored to again, or given away.
    pub fn free(&self, ids: &[u64]) {
        lock(&self.room).layout.mark(ids, false);
    }

    /// Bytes pinned now.
    pub fn pinned_bytes(&self) -> u64 {
        lock(&self.room).pinned_bytes()
    }

    /// What pinning the present slabs cost, each.
    pub fn pin_stats(&self) -> Vec<PinStats> {
        lock(&self.room).slabs.iter().map(|slab| slab.pin_stats()).collect()
    }

    /// Unpins and frees everything. Refused while anything sleeps.
    pub fn release(&self) -> Result<()> {
        let mut room = lock(&self.room);
        if room.layout.any_asleep() {
            return Err(Error::InvalidOption {
                option: "release",
                value: "something still sleeps".to_owned(),
                remedy: "its only copy is in the slab; wake it first".to_owned(),
            });
        }
        *room = Room::default();
        Ok(())
    }

    /// Begins to move storages. What was submitted to `after` so far happens before. Small storages are packed where
    /// there is staging memory; [`Self::staging_bytes`] of it keep the wire busy, less works too.
    pub fn begin(&self, direction: Direction, after: Option<&Stream>, staging: Option<&Buffer>) -> Result<Transfer> {
        let lanes = {
            let mut made = lock(&self.lanes);
            match &*made {
                Some(lanes) => lanes.clone(),
                None => made.insert(Arc::new(Lanes::new(self.device())?)).clone(),
            }
        };
        Transfer::begin(self.device().clone(), lanes, self.busy.clone(), direction, after, staging)
    }

    /// Hands a batch of storages with their memory to a transfer, and returns its number. From here on a sleep's
    /// storages count as asleep, until they are [freed](Self::free), also where the transfer fails. On a wake, what was submitted
    /// to `after` so far may still use that memory; the batch waits for it.
    pub fn submit(&self, transfer: &Transfer, batch: Vec<(u64, Region)>, after: Option<&Stream>) -> Result<usize> {
        let mut room = lock(&self.room);
        let storing = transfer.direction() == Direction::Sleep;
        let mut extents = Vec::with_capacity(batch.len());
        for (id, region) in &batch {
            let refuse = |reason: String| Error::PlanMismatch { tensor: format!("storage {id}"), reason };
            let found = room.layout.extents(*id).ok_or_else(|| refuse("it has no place in the slab".to_owned()))?;
            let bytes: u64 = found.iter().map(|extent| extent.bytes).sum();
            if bytes != region.bytes() {
                return Err(refuse(format!("{bytes} bytes in the slab, {} on the device", region.bytes())));
            }
            if room.layout.is_asleep(*id) == storing {
                return Err(refuse(if storing { "it sleeps already" } else { "it does not sleep" }.to_owned()));
            }
            extents.push(found.to_vec());
        }
        let moves = moves::moves(&extents, transfer.slot_bytes());
        let moves = moves.into_iter().map(|one| {
            let slab = room.region(match &one {
                Move::Direct { extent, .. } => extent,
                Move::Packed { run, .. } => run,
            })?;
            Ok((one, slab))
        });
        let moves = moves.collect::<Result<Vec<_>>>()?;
        let (ids, regions): (Vec<u64>, Vec<Region>) = batch.into_iter().unzip();
        let number = transfer.submit(regions, moves, after)?;
        if storing {
            // Now, not when it has arrived: somebody may need room meanwhile.
            room.layout.mark(&ids, true);
        }
        Ok(number)
    }
}

impl Lanes {
    fn new(device: &SharedDevice) -> Result<Self> {
        Ok(Self {
            store: device.stream("sleep")?,
            fetch: device.stream("wake")?,
            pack: device.stream("pack")?,
            slots: (0..SLOTS).map(|_| Ok([device.event()?, device.event()?])).collect::<Result<_>>()?,
            spare: Mutex::default(),
        })
    }

    pub(crate) fn event(&self, device: &SharedDevice) -> Result<Event> {
        match lock(&self.spare).pop() {
            Some(event) => Ok(event),
            None => Ok(device.event()?),
        }
    }
}
