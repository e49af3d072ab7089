//! Where sleeping storages lie: ranges only, decided before anything is pinned or copied.
//!
//! Storages are numbers with a size. A storage keeps its ranges from one sleep to the next, so that the usual sleep
//! decides nothing. Sleeping storages never move and their ranges are never reused; if there is not enough room, a new
//! segment is added beside the old ones. This file touches no memory: a segment is a number and a size.

use std::collections::{BTreeMap, HashMap};

use forebay_device::PIECE_BYTES;

use crate::error::{Error, Result};

/// Ranges start at multiples of this: vector loads stay aligned, and cache lines are not shared.
pub const EXTENT_ALIGN_BYTES: u64 = 64;
/// Longest range by default; a longer storage is cut, so that any fits into one registration.
pub const EXTENT_MAX_BYTES: u64 = 1 << 30;

/// A range of one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Which segment.
    pub segment: usize,
    /// Where it starts there.
    pub offset_bytes: u64,
    /// Its length; room is taken up to the next multiple of [`EXTENT_ALIGN_BYTES`].
    pub bytes: u64,
}

impl Extent {
    fn room_bytes(&self) -> u64 {
        self.bytes.next_multiple_of(EXTENT_ALIGN_BYTES)
    }

    /// Where the next range would start.
    pub fn end_bytes(&self) -> u64 {
        self.offset_bytes + self.room_bytes()
    }
}

/// A storage to be put to sleep: its number and its size.
pub type Want = (u64, u64);

#[derive(Debug, Clone)]
struct StorageExtents {
    bytes: u64,
    extents: Vec<Extent>,
    asleep: bool,
}

/// Segments, free ranges in them, and who lies where.
#[derive(Debug, Clone)]
pub struct Layout {
    longest_bytes: u64,
    segments: Vec<u64>,
    /// Free ranges: length by segment and offset; neighbours of one segment are joined.
    free: BTreeMap<(usize, u64), u64>,
    storages: HashMap<u64, StorageExtents>,
}

impl Default for Layout {
    /// Long storages are cut into ranges of at most [`EXTENT_MAX_BYTES`].
    fn default() -> Self {
        Self::cut_at(EXTENT_MAX_BYTES)
    }
}

impl Layout {
    /// Every storage lies in one range, so that the host can read it as one piece of memory. A storage of more than
    /// [`PIECE_BYTES`] does not fit into a registration and is refused.
    pub fn uncut() -> Self {
        Self::cut_at(u64::MAX)
    }

    fn cut_at(longest_bytes: u64) -> Self {
        Self { longest_bytes, segments: Vec::new(), free: BTreeMap::new(), storages: HashMap::new() }
    }

    /// A layout of the same kind without segments.
    pub fn emptied(&self) -> Self {
        Self::cut_at(self.longest_bytes)
    }

    /// Whether every storage has its ranges, of this size, with nothing asleep in them.
    pub fn holds(&self, wants: &[Want]) -> bool {
        wants
            .iter()
            .all(|(id, bytes)| self.storages.get(id).is_some_and(|storage| storage.bytes == *bytes && !storage.asleep))
    }

    /// The ranges of a storage, in its order.
    pub fn extents(&self, id: u64) -> Option<&[Extent]> {
        self.storages.get(&id).map(|storage| &*storage.extents)
    }

    /// Whether a storage sleeps.
    pub fn is_asleep(&self, id: u64) -> bool {
        self.storages.get(&id).is_some_and(|storage| storage.asleep)
    }

    /// Whether anything sleeps.
    pub fn any_asleep(&self) -> bool {
        self.storages.values().any(|storage| storage.asleep)
    }

    /// Marks storages as asleep or awake.
    pub fn mark(&mut self, ids: &[u64], asleep: bool) {
        for id in ids {
            if let Some(storage) = self.storages.get_mut(id) {
                storage.asleep = asleep;
            }
        }
    }

    /// Sizes of the segments.
    pub fn segments(&self) -> &[u64] {
        &self.segments
    }

    /// Bytes that no storage has.
    pub fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }

    /// Gives every storage its ranges and returns the sizes of the segments that must be added for them.
    ///
    /// Who has ranges of the right size keeps them. Others get free room, small ones first and side by side, so that
    /// they travel together. Where that does not suffice, storages that are awake and not asked for lose theirs; what
    /// still does not fit makes new segments of exactly that size.
    pub fn place(&mut self, wants: &[Want]) -> Result<Vec<u64>> {
        let mut unplaced = Vec::new();
        for &(id, bytes) in wants {
            if bytes.min(self.longest_bytes) > PIECE_BYTES {
                return Err(Error::PlanMismatch {
                    tensor: format!("storage {id}"),
                    reason: format!("{bytes} bytes are more than one piece of pinned memory has, {PIECE_BYTES}"),
                });
            }
            match self.storages.get(&id) {
                Some(storage) if storage.asleep => {
                    return Err(Error::PlanMismatch {
                        tensor: format!("storage {id}"),
                        reason: format!("its {} bytes are asleep and would be overwritten", storage.bytes),
                    });
                }
                Some(storage) if storage.bytes == bytes => {}
                _ => {
                    self.evict(id);
                    unplaced.push((id, bytes));
                }
            }
        }
        unplaced.sort_by_key(|&(_, bytes)| bytes >= super::PACK_BELOW_BYTES);
        let mut left = self.fill(&unplaced);
        if !left.is_empty() {
            let asked: std::collections::HashSet<u64> = wants.iter().map(|&(id, _)| id).collect();
            let idle: Vec<u64> = self
                .storages
                .iter()
                .filter(|(id, storage)| !storage.asleep && !asked.contains(id))
                .map(|(&id, _)| id)
                .collect();
            if !idle.is_empty() {
                idle.into_iter().for_each(|id| self.evict(id));
                left = self.fill(&left);
            }
        }
        Ok(self.grow(&left))
    }

    /// Gives free room to storages that fit whole; returns the others.
    fn fill(&mut self, wants: &[Want]) -> Vec<Want> {
        let mut left = Vec::new();
        for &(id, bytes) in wants {
            let taken: Vec<Option<Extent>> = cuts(bytes, self.longest_bytes).map(|cut| self.take(cut)).collect();
            if taken.iter().all(Option::is_some) {
                let extents = taken.into_iter().flatten().collect();
                self.storages.insert(id, StorageExtents { bytes, extents, asleep: false });
            } else {
                taken.into_iter().flatten().for_each(|extent| self.give(extent));
                left.push((id, bytes));
            }
        }
        left
    }

    /// Adds segments for storages, full to the last byte.
    fn grow(&mut self, wants: &[Want]) -> Vec<u64> {
        let mut added: Vec<u64> = Vec::new();
        for &(id, bytes) in wants {
            let mut extents = Vec::new();
            for cut in cuts(bytes, self.longest_bytes) {
                let room = cut.next_multiple_of(EXTENT_ALIGN_BYTES);
                if added.last().is_none_or(|&size| size + room > PIECE_BYTES) {
                    added.push(0);
                }
                let segment = self.segments.len() + added.len() - 1;
                if let Some(size) = added.last_mut() {
                    extents.push(Extent { segment, offset_bytes: *size, bytes: cut });
                    *size += room;
                }
            }
            self.storages.insert(id, StorageExtents { bytes, extents, asleep: false });
        }
        self.segments.extend(&added);
        added
    }

    fn evict(&mut self, id: u64) {
        if let Some(storage) = self.storages.remove(&id) {
            storage.extents.into_iter().for_each(|extent| self.give(extent));
        }
    }

    /// The first free range that is long enough.
    fn take(&mut self, bytes: u64) -> Option<Extent> {
        let room = bytes.next_multiple_of(EXTENT_ALIGN_BYTES);
        let (&(segment, offset), &len) = self.free.iter().find(|&(_, &len)| len >= room)?;
        self.free.remove(&(segment, offset));
        if len > room {
            self.free.insert((segment, offset + room), len - room);
        }
        Some(Extent { segment, offset_bytes: offset, bytes })
    }

    fn give(&mut self, extent: Extent) {
        let (segment, mut offset, mut len) = (extent.segment, extent.offset_bytes, extent.room_bytes());
        if let Some(after) = self.free.remove(&(segment, offset + len)) {
            len += after;
        }
        if let Some((&(before_segment, before), &before_len)) = self.free.range(..(segment, offset)).next_back()
            && before_segment == segment
            && before + before_len == offset
        {
            self.free.remove(&(segment, before));
            (offset, len) = (before, before_len + len);
        }
        self.free.insert((segment, offset), len);
    }
}

/// The lengths into which a storage is cut.
fn cuts(bytes: u64, longest_bytes: u64) -> impl Iterator<Item = u64> {
    (0..bytes.div_ceil(longest_bytes)).map(move |i| (bytes - i * longest_bytes).min(longest_bytes))
}
