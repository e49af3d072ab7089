//! Optimizer state in one pinned slab: an arena for each kind of each bucket, and a step counter for each tensor.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use forebay_device::{Region, SharedDevice, Slab};

use crate::checkpoint::{Snapshot, Stepping};
use crate::error::{Error, Result};
use crate::plan::{ALIGN_ELEMENTS, Chunk, HOST_OPERANDS, STATE_BYTES, Segment, StateKind, StepPlan};
use crate::pool::{Lease, Pool};

/// What every parameter has.
const MOMENTS: [StateKind; 2] = [StateKind::ExpAvg, StateKind::ExpAvgSq];

/// The state of all tensors of a plan.
#[derive(Debug, Clone)]
pub struct HostState {
    device: SharedDevice,
    plan: Arc<StepPlan>,
    slab: Lease<Slab>,
    /// Shared by all clones.
    save: Arc<Save>,
}

/// A save under way, as far as the state knows of one.
#[derive(Debug, Default)]
struct Save {
    /// What still needs the state as it was. The save owns it, and its memory goes when the save does.
    snapshot: Mutex<Weak<Snapshot>>,
    /// How often the last step waited for it, and how long in all.
    stalls: AtomicU64,
    stall_ns: AtomicU64,
}

impl Save {
    fn snapshot(&self) -> Option<Arc<Snapshot>> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }
}

impl HostState {
    /// Bytes of the parts of a plan's slab: its arenas, then the step counters.
    pub fn part_bytes(plan: &StepPlan) -> Vec<u64> {
        let mut parts = plan.arena_bytes();
        parts.push(plan.tensors().len() as u64 * STATE_BYTES);
        parts
    }

    /// Pins the arenas of a plan, zeroed.
    pub fn new(pool: &Pool, plan: Arc<StepPlan>) -> Result<Self> {
        for (spec, kind) in plan.tensors().iter().flat_map(|spec| MOMENTS.map(|kind| (spec, kind))) {
            if !spec.kinds.contains(&kind) {
                let reason = format!("AdamW needs {kind:?}");
                return Err(Error::PlanMismatch { tensor: spec.name.clone(), reason });
            }
        }
        let slab = pool.slab("optimizer state", &Self::part_bytes(&plan))?;
        Ok(Self { device: pool.device().clone(), plan, slab, save: Arc::default() })
    }

    /// The plan that says what lies where.
    pub fn plan(&self) -> &Arc<StepPlan> {
        &self.plan
    }

    /// The slab that holds it.
    pub fn slab(&self) -> &Slab {
        &self.slab
    }

    /// The arenas, and the ranges of all chunks in the order of a step: what a snapshot is made of.
    pub fn extent(&self) -> Result<(Vec<Region>, Vec<Region>)> {
        // The last part are the step counters, which whoever saves copies by itself.
        let arenas = (0..self.slab.layout().parts() - 1).map(|part| Ok(self.slab.part(part)?));
        let mut next = Vec::new();
        for chunk in self.plan.chunks() {
            next.extend(self.chunk(chunk)?);
        }
        Ok((arenas.collect::<Result<_>>()?, next))
    }

    /// Keeps a snapshot in mind: from now on chunks are protected before they change.
    pub fn keep(&self, snapshot: &Arc<Snapshot>) {
        *self.save.snapshot.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(snapshot);
    }

    /// Tells a save under way that a step begins; it ends when the value is dropped.
    pub fn stepping(&self) -> Option<Stepping> {
        self.save.stalls.store(0, Relaxed);
        self.save.stall_ns.store(0, Relaxed);
        self.save.snapshot().map(|snapshot| snapshot.step())
    }

    /// Returns when a step may write regions of this state, as far as a save under way is concerned.
    pub(crate) fn protect(&self, regions: &[Region]) {
        let Some(snapshot) = self.save.snapshot() else { return };
        for region in regions {
            let (stalls, stall_ns) = snapshot.protect(region);
            self.save.stalls.fetch_add(stalls, Relaxed);
            self.save.stall_ns.fetch_add(stall_ns, Relaxed);
        }
    }

    /// The same for all of it, before the host writes into it.
    pub fn protect_all(&self) -> Result<()> {
        if let Some(snapshot) = self.save.snapshot() {
            for arena in self.extent()?.0 {
                snapshot.protect(&arena);
            }
        }
        Ok(())
    }

    /// How often the last step waited for a save, and for how many nanoseconds.
    pub fn save_stalls(&self) -> (u64, u64) {
        (self.save.stalls.load(Relaxed), self.save.stall_ns.load(Relaxed))
    }

    /// One tensor's state of one kind: contiguous, in the tensor's own order. `None` where that kind is not kept.
    pub fn tensor(&self, tensor: usize, kind: StateKind) -> Result<Option<Region>> {
        let home = self.plan.home(tensor);
        let bytes = self.plan.tensors()[tensor].elements * STATE_BYTES;
        self.arena(home.bucket, kind)?.map(|arena| Ok(arena.slice(home.start * STATE_BYTES, bytes)?)).transpose()
    }

    /// One tensor's step counter, an f32.
    pub fn step_counter(&self, tensor: usize) -> Result<Region> {
        Ok(self.step_counters()?.slice(tensor as u64 * STATE_BYTES, STATE_BYTES)?)
    }

    fn step_counters(&self) -> Result<Region> {
        Ok(self.slab.part(self.slab.layout().parts() - 1)?)
    }

    /// Steps taken by each tensor.
    pub fn steps(&self) -> Result<Vec<f32>> {
        super::read_f32(&self.device, &self.step_counters()?)
    }

    /// Sets the counters. Only the host touches them, so this needs no wait.
    pub fn set_steps(&self, steps: &[f32]) -> Result<()> {
        let bytes: Vec<u8> = steps.iter().flat_map(|step| step.to_le_bytes()).collect();
        Ok(self.device.write(&bytes, &self.step_counters()?)?)
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

    /// Where a segment's parameter (0) or gradient (1) of the given width lies in the slot, for tensors on the host:
    /// behind the state, at f32 spacing, so that every segment starts aligned.
    pub(crate) fn operand(&self, chunk: &Chunk, segment: &Segment, operand: u64, width: u64) -> (u64, u64) {
        debug_assert!(operand < HOST_OPERANDS);
        let kinds = self.plan.buckets()[chunk.bucket].kinds.len() as u64;
        let offset = (kinds + operand) * part_stride(chunk) + segment.chunk_offset * STATE_BYTES;
        (offset, segment.elements * width)
    }
}

/// Parts start aligned, also in the last, shorter chunk of a bucket.
fn part_stride(chunk: &Chunk) -> u64 {
    chunk.elements.next_multiple_of(ALIGN_ELEMENTS) * STATE_BYTES
}
