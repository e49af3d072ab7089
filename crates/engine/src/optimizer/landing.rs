//! Pinned memory for gradients that are copied to the host during backward, and which of them have landed.

use forebay_device::{Region, Slab, SlabLayout, Stream};

use super::host_lane::HostLane;
use crate::error::Result;
use crate::memory::{Allocator, Lease};

/// One table's gradients.
#[derive(Debug)]
struct LandingRoom {
    slab: Lease<Slab>,
    landed: Vec<Option<Region>>,
}

/// Gradients by table and tensor.
#[derive(Debug, Default)]
pub(super) struct Landing {
    rooms: Vec<Option<LandingRoom>>,
}

impl Landing {
    /// Bytes to pin for a table's gradients; `None` if they are pinned already, or if there are no gradients.
    pub(super) fn bytes_to_pin(&self, table: usize, bytes: &[u64]) -> Result<Option<u64>> {
        let is_there = self.rooms.get(table).is_some_and(Option::is_some);
        if is_there || bytes.iter().sum::<u64>() == 0 {
            return Ok(None);
        }
        Ok(Some(SlabLayout::new(bytes)?.bytes()))
    }

    /// Pins memory for a table's gradients.
    pub(super) fn open(&mut self, memory: &Allocator, table: usize, bytes: &[u64]) -> Result<()> {
        if self.rooms.len() <= table {
            self.rooms.resize_with(table + 1, || None);
        }
        let slab = memory.pin(bytes)?;
        self.rooms[table] = Some(LandingRoom { landed: vec![None; bytes.len()], slab });
        Ok(())
    }

    /// Copies a gradient to the host after what `after` was given so far, where there is memory of its size.
    pub(super) fn land(
        &mut self,
        lane: &HostLane,
        grad: &Region,
        (table, tensor): (usize, usize),
        after: &Stream,
    ) -> Result<()> {
        let Some(room) = self.rooms.get_mut(table).and_then(Option::as_mut) else { return Ok(()) };
        let home = room.slab.part(tensor)?;
        // Of another type than was expected: the step copies it, as without this.
        if grad.bytes() == 0 || home.bytes() != grad.bytes() {
            return Ok(());
        }
        room.landed[tensor] = None;
        lane.land(grad, &home, after)?;
        room.landed[tensor] = Some(home);
        Ok(())
    }

    /// Forgets one.
    pub(super) fn forget(&mut self, (table, tensor): (usize, usize)) {
        let room = self.rooms.get_mut(table).and_then(Option::as_mut);
        if let Some(landed) = room.and_then(|room| room.landed.get_mut(tensor)) {
            *landed = None;
        }
    }

    /// Takes all that have landed, by table and tensor; none is left.
    pub(super) fn take(&mut self) -> Vec<Vec<Option<Region>>> {
        let taken = |room: &mut Option<LandingRoom>| {
            room.as_mut().map_or_else(Vec::new, |room| {
                let none = vec![None; room.landed.len()];
                std::mem::replace(&mut room.landed, none)
            })
        };
        self.rooms.iter_mut().map(taken).collect()
    }

    /// Pinned bytes.
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.rooms.iter().flatten().map(|room| room.slab.bytes()).sum()
    }
}
