//! Optimizer state in one pinned slab: an arena for each kind of each bucket.

use std::sync::Arc;

use forebay_device::{Region, Slab};

use crate::error::Result;
use crate::plan::{ALIGN_ELEMENTS, Chunk, STATE_BYTES, Segment, StateKind, StepPlan};
use crate::pool::{Lease, Pool};

/// The state of all tensors of a plan.
#[derive(Debug)]
pub struct HostState {
    plan: Arc<StepPlan>,
    slab: Lease<Slab>,
}

impl HostState {
    /// Pins the arenas of a plan, zeroed.
    pub fn new(pool: &Pool, plan: Arc<StepPlan>) -> Result<Self> {
        let slab = pool.slab("optimizer state", &plan.arena_bytes())?;
        Ok(Self { plan, slab })
    }

    /// The plan that says what lies where.
    pub fn plan(&self) -> &Arc<StepPlan> {
        &self.plan
    }

    /// The slab that holds it.
    pub fn slab(&self) -> &Slab {
        &self.slab
    }

    /// One tensor's state of one kind: contiguous, in the tensor's own order. `None` where that kind is not kept.
    pub fn tensor(&self, tensor: usize, kind: StateKind) -> Result<Option<Region>> {
        let home = self.plan.home(tensor);
        let bytes = self.plan.tensors()[tensor].elements * STATE_BYTES;
        self.arena(home.bucket, kind)?.map(|arena| Ok(arena.slice(home.start * STATE_BYTES, bytes)?)).transpose()
    }

    fn arena(&self, bucket: usize, kind: StateKind) -> Result<Option<Region>> {
        let bucket = &self.plan.buckets()[bucket];
        let index = bucket.kinds.iter().position(|&k| k == kind);
        index.map(|index| Ok(self.slab.part(bucket.first_arena + index)?)).transpose()
    }

    /// A chunk's range of each arena of its bucket.
    pub(crate) fn chunk(&self, chunk: &Chunk) -> Result<Vec<Region>> {
        let bucket = &self.plan.buckets()[chunk.bucket];
        (0..bucket.kinds.len())
            .map(|i| {
                let arena = self.slab.part(bucket.first_arena + i)?;
                Ok(arena.slice(chunk.start * STATE_BYTES, chunk.elements * STATE_BYTES)?)
            })
            .collect()
    }

    /// Where a chunk's ranges lie in a slot: offset and length of each, in the order of [`Self::chunk`].
    pub(crate) fn parts(&self, chunk: &Chunk) -> Vec<(u64, u64)> {
        let kinds = self.plan.buckets()[chunk.bucket].kinds.len() as u64;
        (0..kinds).map(|i| (i * part_stride(chunk), chunk.elements * STATE_BYTES)).collect()
    }

    /// A segment's state of one kind inside the slot that holds its chunk.
    pub(crate) fn in_slot(
        &self,
        chunk: &Chunk,
        segment: &Segment,
        kind: StateKind,
        slot: &Region,
    ) -> Result<Option<Region>> {
        let kinds = &self.plan.buckets()[chunk.bucket].kinds;
        let Some(index) = kinds.iter().position(|&k| k == kind) else { return Ok(None) };
        let offset = index as u64 * part_stride(chunk) + segment.chunk_offset * STATE_BYTES;
        Ok(Some(slot.slice(offset, segment.elements * STATE_BYTES)?))
    }
}

/// Parts start aligned, also in the last, shorter chunk of a bucket.
fn part_stride(chunk: &Chunk) -> u64 {
    chunk.elements.next_multiple_of(ALIGN_ELEMENTS) * STATE_BYTES
}
