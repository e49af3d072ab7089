//! What the host's parts of several optimizers share: the pinned ring, and the streams of both directions.
//!
//! A step on the host holds several slots at once. Two steps that held some each and waited for more would wait for
//! ever, so the users of a ring take turns: a step has all slots to itself. The turn is taken in the middle of a step,
//! and who has it waits for the device, for the host's threads, for slots of the device's ring and for a save; nothing of
//! that ever waits for the turn. Waits outside of a step ([`HostSlots::settle`]) are for uses of one optimizer and need
//! no turn.

use std::sync::Arc;

use forebay_device::{ALIGN_BYTES, Region, SharedDevice, Slab, SlabLayout, Stream};

use crate::error::Result;
use crate::flow::{Mark, Marks, Ring, RingUser, Shared, SharedKey};
use crate::memory::{Allocator, Lease};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::trace::{Held, Pool};

/// Pinned slots of one size.
#[derive(Debug)]
pub(super) struct HostRing {
    ring: Ring<Arc<Mark>>,
    slots: Vec<LaneSlot>,
    turn: Mutex<()>,
    /// The slots' memory.
    slab: Slab,
    _held: Held,
    device: SharedDevice,
    pid: u32,
}

/// One slot, with the marks that end the copy down into it and the copy up out of it.
#[derive(Debug)]
pub(super) struct LaneSlot {
    pub(super) region: Region,
    pub(super) landed: Arc<Mark>,
    pub(super) sent: Arc<Mark>,
}

impl HostRing {
    fn new(device: &SharedDevice, slots: usize, layout: SlabLayout) -> Result<Self> {
        let (slab, marks) = (device.pin(layout)?, Marks::new(device.clone()));
        let slot = |i| -> Result<LaneSlot> {
            Ok(LaneSlot { region: slab.part(i)?, landed: marks.take()?, sent: marks.take()? })
        };
        let slots = (0..2 * slots).map(slot).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            ring: Ring::new(slots.len()),
            slots,
            turn: Mutex::default(),
            _held: Held::new(Pool::Optimizer, slab.bytes()),
            slab,
            device: device.clone(),
            pid: std::process::id(),
        })
    }

    /// Whether every slot can be had again: new users must not get a ring whose copies died.
    fn is_sound(&self) -> bool {
        self.ring.check().is_ok()
    }
}

impl Drop for HostRing {
    /// Its users have waited for their copies when they went; this is for a wait of theirs that was refused.
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            let _ = self.ring.settle(None);
        }
    }
}

/// One optimizer's use of a ring, which counts in full against its budget.
#[derive(Debug)]
pub(super) struct HostSlots {
    shared: Lease<Arc<HostRing>>,
    user: RingUser,
}

impl HostSlots {
    /// Uses the ring of this process that has twice as many slots of this size on the device, or pins one. A slot spends
    /// most of its time waiting, first for its turn on the copy down and then on the copy up.
    pub(super) fn open(memory: &Allocator, slots: usize, slot_bytes: u64) -> Result<Self> {
        static RINGS: Shared<HostRing> = Shared::new();
        let (device, layout) = (memory.device(), layout(slots, slot_bytes)?);
        let (key, bytes) = (SharedKey::new(device, slots, slot_bytes), layout.bytes());
        let make = || HostRing::new(device, slots, layout);
        let shared = memory.lease(bytes, || RINGS.find_or_make(key, HostRing::is_sound, make))?;
        Ok(Self { user: shared.ring.join(), shared })
    }

    /// Bytes of such a ring.
    pub(super) fn bytes_to_pin(slots: usize, slot_bytes: u64) -> Result<u64> {
        Ok(layout(slots, slot_bytes)?.bytes())
    }

    /// Pinned bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.shared.slab.bytes()
    }

    /// Slots in all.
    pub(super) fn len(&self) -> usize {
        self.shared.slots.len()
    }

    /// Slots that nobody owns.
    pub(super) fn idle(&self) -> usize {
        self.shared.ring.idle()
    }

    /// Waits for this user's turn; it ends when the guard is dropped.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        lock(&self.shared.turn)
    }

    /// Takes the slot that came back first, in this user's turn.
    pub(super) fn acquire(&self) -> Result<HeldSlot<'_>> {
        let (index, _) = self.shared.ring.acquire()?;
        Ok(HeldSlot { slots: self, index, end: None })
    }

    /// Waits for this user's copies.
    pub(super) fn settle(&self) -> Result<()> {
        self.shared.ring.settle(Some(self.user))
    }
}

impl Drop for HostSlots {
    /// Weights may still be on their way up, to memory that goes next.
    fn drop(&mut self) {
        if self.shared.pid == std::process::id() {
            let _ = self.settle();
        }
    }
}

/// A slot of the ring, owned until dropped. It goes back with the mark that ends what was accepted of its work.
pub(super) struct HeldSlot<'a> {
    slots: &'a HostSlots,
    index: usize,
    pub(super) end: Option<Arc<Mark>>,
}

impl HeldSlot<'_> {
    pub(super) fn slot(&self) -> &LaneSlot {
        &self.slots.shared.slots[self.index]
    }

    pub(super) fn device(&self) -> &SharedDevice {
        &self.slots.shared.device
    }
}

impl Drop for HeldSlot<'_> {
    fn drop(&mut self) {
        self.slots.shared.ring.release(self.index, self.slots.user, self.end.take());
    }
}

fn layout(slots: usize, slot_bytes: u64) -> Result<SlabLayout> {
    Ok(SlabLayout::new(&vec![slot_bytes.next_multiple_of(ALIGN_BYTES); 2 * slots])?)
}

/// The streams of both directions, for steps without a streamed half and for gradients that are copied early.
///
/// Optimizers share them. A copy then also waits for the copies of others before it, and for what these wait for: work
/// that was submitted before. So nothing waits in a circle, and nothing runs earlier than on streams of its own.
#[derive(Debug)]
pub(super) struct LaneStreams {
    pub(super) down: Stream,
    pub(super) up: Stream,
    marks: Arc<Marks>,
    _device: SharedDevice,
}

impl LaneStreams {
    /// Those of a device, made by the first who asks.
    pub(super) fn of(device: &SharedDevice) -> Result<Arc<Self>> {
        static STREAMS: Shared<LaneStreams> = Shared::new();
        let make = || {
            let (down, up) = (device.stream("down")?, device.stream("up")?);
            Ok(Self { down, up, marks: Marks::new(device.clone()), _device: device.clone() })
        };
        STREAMS.find_or_make(SharedKey::new(device, 0, 0), Self::is_sound, make)
    }

    /// Whether they take work: new users must not get streams that died.
    fn is_sound(&self) -> bool {
        let takes_work = |stream: &Stream| self.marks.take()?.record(stream);
        takes_work(&self.down).and(takes_work(&self.up)).is_ok()
    }
}
