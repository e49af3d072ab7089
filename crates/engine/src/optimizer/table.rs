//! The state of tensors that were created together: an arena for each column of each bucket, and a step counter for each
//! tensor.
//!
//! The arenas lie in one pinned slab, or in two, of which one is current: see `sides.rs`. All regions are those of the
//! current side, where nothing else is said. A resident table has none: its columns are the caller's, on the device, and
//! only the counters are here.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use forebay_device::update::format::random_key;
use forebay_device::update::{MASTER_CARRY, MASTER_LOW, MAX_COLUMNS};
use forebay_device::{
    Buffer, Column, MasterFormat, Region, Rule, RuleColumn, SharedDevice, Slab, SlabLayout, StateFormat,
};

use super::segments::Operand;
use super::sides::{Side, Sides};
use crate::error::{Error, Result};
use crate::memory::Allocator;
use crate::plan::{Chunk, Piece, StepPlan, TensorSpec};
use crate::snapshot::{Snapshot, Stepping};
use crate::trace::{self, Reason};

/// Bytes of a step counter, an f32.
const COUNTER_BYTES: u64 = 4;

/// The state of all tensors of a plan.
#[derive(Debug)]
pub struct StateTable {
    device: SharedDevice,
    rule: &'static Rule,
    plan: Arc<StepPlan>,
    /// Which operand of a segment each column of each bucket is.
    operands: Vec<Vec<Operand>>,
    /// The seed with which columns in fewer bits are rounded at random; `None` to round them to nearest.
    rounding_seed: Option<u64>,
    memory: TableMemory,
    save: SaveWatch,
}

#[derive(Debug)]
enum TableMemory {
    /// Slabs with the arenas, then the counters.
    Pinned(Box<Sides>),
    /// The counters.
    Resident(Buffer),
}

/// An asynchronous save, as far as the state knows of one.
#[derive(Debug, Default)]
struct SaveWatch {
    /// What still needs the state as it was. The save owns it, and its memory is freed when the save ends.
    snapshot: Mutex<Weak<Snapshot>>,
    /// How often the last step waited for it, and how long in all.
    stalls: AtomicU64,
    stall_ns: AtomicU64,
}

impl SaveWatch {
    fn snapshot(&self) -> Option<Arc<Snapshot>> {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }
}

impl StateTable {
    /// Pinned bytes of a plan's table.
    pub fn bytes_to_pin(plan: &StepPlan) -> Result<u64> {
        Ok(SlabLayout::new(&part_bytes(plan))?.bytes())
    }

    /// Pins the arenas of a plan, zeroed.
    pub fn pinned(memory: &Allocator, rule: &'static Rule, plan: Arc<StepPlan>) -> Result<Self> {
        check_columns(rule, plan.tensors())?;
        let sides = Box::new(Sides::new(memory.pin(&part_bytes(&plan))?)?);
        Ok(Self::build(memory.device().clone(), rule, plan, TableMemory::Pinned(sides)))
    }

    /// Counters alone, for tensors whose columns are the caller's, on the device.
    pub fn resident(device: SharedDevice, rule: &'static Rule, plan: Arc<StepPlan>) -> Result<Self> {
        check_columns(rule, plan.tensors())?;
        let counters = Buffer::pageable((plan.tensors().len() as u64 * COUNTER_BYTES).max(COUNTER_BYTES))?;
        Ok(Self::build(device, rule, plan, TableMemory::Resident(counters)))
    }

    fn build(device: SharedDevice, rule: &'static Rule, plan: Arc<StepPlan>, memory: TableMemory) -> Self {
        let operands = plan.buckets().iter().map(|bucket| operands(rule, &bucket.columns)).collect();
        Self { device, rule, plan, operands, rounding_seed: None, memory, save: SaveWatch::default() }
    }

    /// The same with columns in fewer bits rounded at random, if there is a seed.
    pub fn rounded_with(self, rounding_seed: Option<u64>) -> Self {
        Self { rounding_seed, ..self }
    }

    /// The keys of the random numbers for a tensor's columns at one of its updates, where they are rounded at random. An
    /// update that does not count changes no column, so that rounding to nearest gives it back.
    pub(super) fn keys(&self, tensor: usize, update: u64) -> Option<[u32; MAX_COLUMNS]> {
        let seed = self.rounding_seed.filter(|_| update > 0)?;
        let reduced =
            |operand: &Operand| matches!(operand, Operand::Column(_, StateFormat::Bf16 | StateFormat::Blocks));
        let number = self.plan.tensors()[tensor].number;
        let keys = || std::array::from_fn(|column| random_key(seed, update, column as u32, number));
        self.operands(tensor).iter().any(reduced).then(keys)
    }

    /// The rule that updates it.
    pub fn rule(&self) -> &'static Rule {
        self.rule
    }

    /// The plan that says what lies where.
    pub fn plan(&self) -> &Arc<StepPlan> {
        &self.plan
    }

    /// Whether its columns are the caller's, on the device.
    pub fn is_resident(&self) -> bool {
        matches!(self.memory, TableMemory::Resident(_))
    }

    fn sides(&self) -> Option<&Sides> {
        match &self.memory {
            TableMemory::Pinned(sides) => Some(sides),
            TableMemory::Resident(_) => None,
        }
    }

    /// Bytes that are pinned for it, on both sides.
    pub fn pinned_bytes(&self) -> u64 {
        self.sides().map_or(0, Sides::bytes)
    }

    /// The slab with the arenas.
    pub fn slab(&self) -> Option<Slab> {
        self.slab_of(Side::Current).ok()
    }

    fn slab_of(&self, side: Side) -> Result<Slab> {
        match self.sides() {
            Some(sides) => sides.slab(side),
            None => Err(Error::PlanMismatch {
                tensor: "a resident tensor".to_owned(),
                reason: "its state is not in host memory".to_owned(),
            }),
        }
    }

    /// Pins a second slab, zeroed, which counts against the budget before it is pinned. Nothing happens if there is one, or
    /// if the table is resident.
    pub fn open_second(&self, memory: &Allocator) -> Result<()> {
        self.sides().map_or(Ok(()), |sides| sides.open_second(memory, &part_bytes(&self.plan)))
    }

    /// Frees the side that is not current, once no save needs it. Nothing is under way into it or out of it.
    pub fn close_second(&self) -> Result<()> {
        let Some(sides) = self.sides().filter(|sides| sides.has_second()) else { return Ok(()) };
        self.protect_side(Side::Other)?;
        sides.close_second(&self.device)
    }

    /// Whether there are two sides.
    pub fn has_second(&self) -> bool {
        self.sides().is_some_and(Sides::has_second)
    }

    /// Makes the other side the current one. Stores into either may be under way; the counters stay.
    pub fn exchange(&self) -> Result<()> {
        match self.sides() {
            Some(sides) => sides.exchange(),
            None => self.slab_of(Side::Other).map(drop),
        }
    }

    /// A number that grows whenever a column or a counter has moved.
    pub fn generation(&self) -> u64 {
        self.sides().map_or(0, Sides::generation)
    }

    fn arena(&self, arena: usize) -> Result<Region> {
        Ok(self.slab_of(Side::Current)?.part(arena)?)
    }

    fn arenas(&self, side: Side) -> Result<Vec<Region>> {
        let slab = self.slab_of(side)?;
        (0..self.plan.arena_bytes().len()).map(|arena| Ok(slab.part(arena)?)).collect()
    }

    /// The arenas, and the ranges of all chunks in the order of a step: what a snapshot is made of.
    pub(super) fn extent(&self) -> Result<(Vec<Region>, Vec<Region>)> {
        if self.is_resident() {
            return Ok((Vec::new(), Vec::new()));
        }
        // The counters are not part of it: a save copies them by itself.
        let arenas = self.arenas(Side::Current)?;
        let mut next = Vec::new();
        for chunk in self.plan.chunks() {
            next.extend(self.chunk(chunk)?);
        }
        Ok((arenas, next))
    }

    /// Remembers a snapshot: from now on chunks are protected before they change.
    pub(super) fn keep(&self, snapshot: &Arc<Snapshot>) {
        *self.save.snapshot.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(snapshot);
    }

    /// Begins to count anew how often a step waits for a save.
    pub(super) fn count_stalls(&self) {
        self.save.stalls.store(0, Relaxed);
        self.save.stall_ns.store(0, Relaxed);
    }

    /// Tells a save that a step goes on; it pauses when the value is dropped.
    pub(super) fn stepping(&self) -> Option<Stepping> {
        self.save.snapshot().map(|snapshot| snapshot.step())
    }

    /// Returns when no save needs these regions any longer, so that a step may write them.
    pub(super) fn protect(&self, regions: &[Region]) {
        let Some(snapshot) = self.save.snapshot() else { return };
        for region in regions {
            let (stalls, stall_ns) = snapshot.protect(region);
            self.save.stalls.fetch_add(stalls, Relaxed);
            self.save.stall_ns.fetch_add(stall_ns, Relaxed);
            if stalls > 0 {
                trace::waited(Duration::from_nanos(stall_ns), Reason::Save, "wait for a save", 0);
            }
        }
    }

    /// The same for all of the current side, before the host writes into it.
    pub(super) fn protect_all(&self) -> Result<()> {
        self.protect_side(Side::Current)
    }

    /// The same for both sides, before another save begins: they may have been exchanged since the save before.
    pub(super) fn protect_sides(&self) -> Result<()> {
        if self.has_second() {
            self.protect_side(Side::Other)?;
        }
        self.protect_all()
    }

    fn protect_side(&self, side: Side) -> Result<()> {
        if let Some(snapshot) = self.save.snapshot().filter(|_| !self.is_resident()) {
            for arena in self.arenas(side)? {
                snapshot.protect(&arena);
            }
        }
        Ok(())
    }

    /// How often the last step waited for a save, and for how many nanoseconds.
    pub(super) fn save_stalls(&self) -> (u64, u64) {
        (self.save.stalls.load(Relaxed), self.save.stall_ns.load(Relaxed))
    }

    /// The columns that a tensor keeps.
    pub fn columns(&self, tensor: usize) -> &[Column] {
        &self.plan.tensors()[tensor].columns
    }

    /// One tensor's column: contiguous, in the tensor's own order. `None` where that column is not kept here.
    pub fn column(&self, tensor: usize, name: &str) -> Result<Option<Region>> {
        let found = self.columns(tensor).iter().position(|column| column.name == name);
        found.filter(|_| !self.is_resident()).map(|index| self.tensor(tensor, index)).transpose()
    }

    /// One tensor's column by its place among the tensor's columns.
    pub(super) fn tensor(&self, tensor: usize, index: usize) -> Result<Region> {
        let (home, spec) = (self.plan.home(tensor), &self.plan.tensors()[tensor]);
        let column = spec.columns[index];
        let arena = self.arena(self.plan.buckets()[home.bucket].first_arena + index)?;
        Ok(arena.slice(column.bytes(home.start), column.bytes(spec.elements))?)
    }

    /// What each column of a tensor is to a segment.
    pub(super) fn operands(&self, tensor: usize) -> &[Operand] {
        &self.operands[self.plan.home(tensor).bucket]
    }

    /// One tensor's step counter, an f32.
    pub fn step_counter(&self, tensor: usize) -> Result<Region> {
        Ok(self.step_counters()?.slice(tensor as u64 * COUNTER_BYTES, COUNTER_BYTES)?)
    }

    fn step_counters(&self) -> Result<Region> {
        let bytes = self.plan.tensors().len() as u64 * COUNTER_BYTES;
        match &self.memory {
            TableMemory::Pinned(sides) => Ok(sides.counters()),
            TableMemory::Resident(counters) => Ok(counters.region(0, bytes)?),
        }
    }

    /// Updates that each tensor has had.
    pub fn steps(&self) -> Result<Vec<f32>> {
        super::read_f32(&self.device, &self.step_counters()?)
    }

    /// Sets the counters. Only the host touches them, so this needs no wait.
    pub fn set_steps(&self, steps: &[f32]) -> Result<()> {
        let bytes: Vec<u8> = steps.iter().flat_map(|step| step.to_le_bytes()).collect();
        Ok(self.device.write(&bytes, &self.step_counters()?)?)
    }

    /// A chunk's range of each arena of its bucket.
    pub(super) fn chunk(&self, chunk: &Chunk) -> Result<Vec<Region>> {
        self.chunk_of(Side::Current, chunk)
    }

    /// The same ranges on the other side.
    pub fn other_chunk(&self, chunk: &Chunk) -> Result<Vec<Region>> {
        self.chunk_of(Side::Other, chunk)
    }

    /// A chunk's range of each arena of its bucket, on a side.
    pub(super) fn chunk_of(&self, side: Side, chunk: &Chunk) -> Result<Vec<Region>> {
        let (bucket, slab) = (&self.plan.buckets()[chunk.bucket], self.slab_of(side)?);
        let range = |(i, column): (usize, &Column)| {
            let arena = slab.part(bucket.first_arena + i)?;
            Ok(arena.slice(column.bytes(chunk.start), column.bytes(chunk.elements))?)
        };
        bucket.columns.iter().enumerate().map(range).collect()
    }

    /// How a chunk lies in a slot.
    pub(super) fn in_slot(&self, chunk: &Chunk) -> SlotLayout<'_> {
        let bucket = &self.plan.buckets()[chunk.bucket];
        SlotLayout { columns: &bucket.columns, offsets: bucket.part_offsets(chunk.elements), elements: chunk.elements }
    }
}

/// Bytes of the parts of a plan's slab: its arenas, then the step counters.
fn part_bytes(plan: &StepPlan) -> Vec<u64> {
    let mut parts = plan.arena_bytes();
    parts.push(plan.tensors().len() as u64 * COUNTER_BYTES);
    parts
}

/// Refuses tensors whose columns are not those of the rule: each that it has at most once and in its order, and all that
/// it cannot do without.
fn check_columns(rule: &Rule, tensors: &[TensorSpec]) -> Result<()> {
    let formats = [MasterFormat::F32, MasterFormat::Compact];
    let masters = || formats.iter().flat_map(|format| format.columns());
    let in_all = |column: &RuleColumn| StateFormat::ALL.map(|format| column.kept_as(format)).into_iter().flatten();
    let own: Vec<Column> = rule.columns.iter().flat_map(in_all).chain(masters().copied()).collect();
    // With all switches off.
    let needed = (rule.keeps)(&vec![0.0; rule.hypers.len()]);
    for TensorSpec { name, columns, .. } in tensors {
        let refuse = |reason: String| Err(Error::PlanMismatch { tensor: name.clone(), reason });
        let place = |column: &Column| own.iter().position(|own| own == column);
        if let Some(other) = columns.iter().find(|column| place(column).is_none()) {
            return refuse(format!("{} has no column like its {}", rule.name, other.name));
        }
        for (i, column) in rule.columns.iter().enumerate() {
            let found: Vec<Column> =
                columns.iter().filter(|found| in_all(column).any(|of| of == **found)).copied().collect();
            if found.is_empty() && needed & 1 << i != 0 {
                return refuse(format!("{} needs the column {}", rule.name, column.name));
            }
            if !found.is_empty() && StateFormat::ALL.into_iter().all(|format| column.kept_as(format) != found) {
                return refuse(format!("its {} is not in one format of state", column.name));
            }
        }
        let of_master: Vec<Column> =
            columns.iter().filter(|column| masters().any(|of| of == *column)).copied().collect();
        if !of_master.is_empty() && formats.iter().all(|format| format.columns() != of_master) {
            let names: Vec<&str> = of_master.iter().map(|column| column.name).collect();
            return refuse(format!("{} are not the columns of one format of masters", names.join(", ")));
        }
        if !columns.is_sorted_by(|a, b| place(a) < place(b)) {
            return refuse(format!("its columns are not in the order of {}", rule.name));
        }
    }
    Ok(())
}

/// What each of these columns is to a segment of the rule.
fn operands(rule: &Rule, columns: &[Column]) -> Vec<Operand> {
    let of_rule = |column: &Column| {
        rule.columns.iter().enumerate().find_map(|(i, own)| match own.format_of(column) {
            Some(format) => Some(Operand::Column(i, format)),
            None => own.is_scale(column).then_some(Operand::Scale(i)),
        })
    };
    let operand = |column: &Column| match of_rule(column) {
        Some(operand) => operand,
        None if *column == MASTER_LOW => Operand::Low,
        None if *column == MASTER_CARRY => Operand::Carry,
        None => Operand::Master,
    };
    columns.iter().map(operand).collect()
}

/// A chunk in a slot: its columns one after the other, then for tensors on the host their weights and gradients.
pub(super) struct SlotLayout<'a> {
    columns: &'a [Column],
    offsets: Vec<u64>,
    elements: u64,
}

impl SlotLayout<'_> {
    /// Offset and length of each column's part, in the order of [`StateTable::chunk`].
    pub(super) fn parts(&self) -> Vec<(u64, u64)> {
        let parts = self.columns.iter().zip(&self.offsets);
        parts.map(|(column, &offset)| (offset, column.bytes(self.elements))).collect()
    }

    /// Offset and length of a piece's part of a column.
    pub(super) fn column(&self, index: usize, piece: &Piece) -> (u64, u64) {
        let column = self.columns[index];
        (self.offsets[index] + column.bytes(piece.chunk_offset), column.bytes(piece.elements))
    }

    /// Where a piece's weights (0) or gradients (1) of the given width lie, for tensors on the host: behind the state, at
    /// f32 spacing, so that every piece starts aligned.
    pub(super) fn operand(&self, operand: usize, piece: &Piece, width: u64) -> (u64, u64) {
        (self.offsets[self.columns.len() + operand] + piece.chunk_offset * 4, piece.elements * width)
    }
}
