//! Room for the gradients that come down during backward, and which of them have.

use forebay::device::{Error as DeviceError, Region, Slab, SlabLayout, Stream};
use forebay::pool::{Lease, Pool};
use forebay::step::HostLane;
use forebay::{Error, Result};

/// Refuses to pin what a budget has no room for, before anything is pinned.
pub(crate) fn check_budget(requested_bytes: u64, taken_bytes: u64, budget_bytes: Option<u64>) -> Result<()> {
    match budget_bytes {
        Some(budget_bytes) if taken_bytes + requested_bytes > budget_bytes => {
            Err(Error::Device(DeviceError::OutOfPinnedBudget {
                requested_bytes,
                available_bytes: budget_bytes.saturating_sub(taken_bytes),
                budget_bytes,
            }))
        }
        _ => Ok(()),
    }
}

/// One store's gradients.
struct Room {
    slab: Lease<Slab>,
    landed: Vec<Option<Region>>,
}

/// Gradients by store and tensor.
#[derive(Default)]
pub(crate) struct Landing {
    rooms: Vec<Option<Room>>,
}

impl Landing {
    /// Pins room for a store's gradients, against the budget, where there is none yet.
    pub(crate) fn open(
        &mut self,
        pool: &Pool,
        store: usize,
        bytes: &[u64],
        taken_bytes: u64,
        budget_bytes: Option<u64>,
    ) -> Result<()> {
        if self.rooms.len() <= store {
            self.rooms.resize_with(store + 1, || None);
        }
        if self.rooms[store].is_some() || bytes.iter().sum::<u64>() == 0 {
            return Ok(());
        }
        check_budget(SlabLayout::new(bytes)?.bytes(), taken_bytes, budget_bytes)?;
        let slab = pool.slab("gradients", bytes)?;
        self.rooms[store] = Some(Room { landed: vec![None; bytes.len()], slab });
        Ok(())
    }

    /// Brings one down, where there is room of its size.
    pub(crate) fn land(
        &mut self,
        lane: &HostLane,
        grad: &Region,
        store: usize,
        tensor: usize,
        after: &Stream,
    ) -> Result<()> {
        let Some(room) = self.rooms.get_mut(store).and_then(Option::as_mut) else { return Ok(()) };
        let home = room.slab.part(tensor)?;
        // Of another type than was foreseen: it comes down with the step, as without this.
        if grad.bytes() == 0 || home.bytes() != grad.bytes() {
            return Ok(());
        }
        room.landed[tensor] = None;
        lane.land(grad, &home, after)?;
        room.landed[tensor] = Some(home);
        Ok(())
    }

    /// Forgets one.
    pub(crate) fn forget(&mut self, store: usize, tensor: usize) {
        if let Some(landed) =
            self.rooms.get_mut(store).and_then(Option::as_mut).and_then(|room| room.landed.get_mut(tensor))
        {
            *landed = None;
        }
    }

    /// Takes what has come down, by store and tensor; nothing is left.
    pub(crate) fn take(&mut self) -> Vec<Vec<Option<Region>>> {
        let taken = |room: &mut Option<Room>| {
            room.as_mut().map_or_else(Vec::new, |room| {
                let none = vec![None; room.landed.len()];
                std::mem::replace(&mut room.landed, none)
            })
        };
        self.rooms.iter_mut().map(taken).collect()
    }

    /// Pinned bytes of the room.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.rooms.iter().flatten().map(|room| room.slab.bytes()).sum()
    }
}
