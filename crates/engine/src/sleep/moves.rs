//! How a batch of storages crosses the wire: large ones with their own copies, small ones packed together.
//!
//! Pure: ranges in, moves out. A move is one use of a copy engine and fits a staging slot or a large copy.

use super::layout::Extent;

/// Smaller storages are packed: their own copies would spend more time between transfers than in them.
pub const PACK_BELOW_BYTES: u64 = 8 << 20;
/// Longest copy: a few of them in flight keep the wire busy, and more would hold up everybody else's small copies.
pub const COPY_BYTES: u64 = 32 << 20;

/// One transfer between the slab and the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Move {
    /// A range of one storage, straight from or to its own memory.
    Direct {
        /// Which storage of the batch.
        item: usize,
        /// Where the range starts in the storage.
        at_bytes: u64,
        /// Where it lies in the slab.
        extent: Extent,
    },
    /// Small ranges that lie side by side in the slab, through a staging slot.
    Packed {
        /// All of them together.
        whole: Extent,
        /// Each of them.
        ranges: Vec<PackedRange>,
    },
}

/// A range of one storage inside a packed move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedRange {
    /// Which storage of the batch.
    pub item: usize,
    /// Where the range starts in the storage.
    pub at_bytes: u64,
    /// Where it starts in the move.
    pub offset_bytes: u64,
    /// Its length.
    pub bytes: u64,
}

/// The moves of a batch, given the ranges of each storage. Packed ones come first: they are needed soonest where a
/// batch is a layer. Without a staging slot nothing is packed.
pub fn moves(batch: &[Vec<Extent>], slot_bytes: Option<u64>) -> Vec<Move> {
    let size = |extents: &[Extent]| extents.iter().map(|extent| extent.bytes).sum::<u64>();
    let is_small = |extents: &[Extent]| slot_bytes.is_some() && size(extents) < PACK_BELOW_BYTES;
    let mut small: Vec<(usize, Extent)> = Vec::new();
    let mut found = Vec::new();
    for (item, extents) in batch.iter().enumerate() {
        if is_small(extents) {
            // A small storage has one range, or none.
            small.extend(extents.iter().map(|&extent| (item, extent)));
        }
    }
    if let Some(slot_bytes) = slot_bytes {
        small.sort_by_key(|(_, extent)| (extent.segment, extent.offset_bytes));
        pack(&small, slot_bytes, &mut found);
    }
    for (item, extents) in batch.iter().enumerate().filter(|(_, extents)| !is_small(extents)) {
        let mut at_bytes = 0;
        for extent in extents {
            for start in (0..extent.bytes).step_by(COPY_BYTES as usize) {
                let bytes = COPY_BYTES.min(extent.bytes - start);
                let part = Extent { offset_bytes: extent.offset_bytes + start, bytes, ..*extent };
                found.push(Move::Direct { item, at_bytes: at_bytes + start, extent: part });
            }
            at_bytes += extent.bytes;
        }
    }
    found
}

/// Puts neighbouring ranges together, up to the size of a slot.
fn pack(small: &[(usize, Extent)], slot_bytes: u64, found: &mut Vec<Move>) {
    let mut open: Option<(Extent, Vec<PackedRange>)> = None;
    let mut close = |open: &mut Option<(Extent, Vec<PackedRange>)>| {
        found.extend(open.take().map(|(whole, ranges)| Move::Packed { whole, ranges }));
    };
    for &(item, extent) in small {
        let mut at_bytes = 0;
        while at_bytes < extent.bytes {
            let start = extent.offset_bytes + at_bytes;
            let follows = open.as_ref().is_some_and(|(whole, _)| {
                whole.segment == extent.segment && whole.end_bytes() == start && start - whole.offset_bytes < slot_bytes
            });
            if !follows {
                close(&mut open);
            }
            let (whole, ranges) = open
                .get_or_insert_with(|| (Extent { segment: extent.segment, offset_bytes: start, bytes: 0 }, Vec::new()));
            let offset_bytes = start - whole.offset_bytes;
            let bytes = (extent.bytes - at_bytes).min(slot_bytes - offset_bytes);
            whole.bytes = offset_bytes + bytes;
            ranges.push(PackedRange { item, at_bytes, offset_bytes, bytes });
            at_bytes += bytes;
        }
    }
    close(&mut open);
}
