//! What runs next in an overlapped step: pure data, no device and no thread.
//!
//! A unit runs as a whole: a chunk that travels, or a tensor whose state is on the device. A unit may run when each of
//! its tensors is ready (its gradient is final, and was seen to be) or is known to have no gradient. Of the units that may
//! run, the one whose tensors the next forward needs first goes first.
//!
//! Tensors that are handed over at the commit are ready when the commit's mark is reached. Nobody waits for that on the
//! host: their units may be submitted before, so that fetches run ahead. But while an earlier gradient is awaited, units
//! behind the commit's mark would block the ring for those that can run sooner, so they come after them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use crate::plan::{StepPlan, state_bytes};

/// How early the next forward needs a tensor; smaller is earlier.
pub(super) type Need = i64;

/// What one unit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// A chunk of its table.
    Chunk(usize),
    /// A tensor of its table, whose state is on the device.
    Tensor(usize),
}

/// What is updated as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unit {
    pub(super) table: usize,
    pub(super) part: Part,
    /// Its tensors, by their number among those of all tables.
    pub(super) tensors: Vec<usize>,
    pub(super) elements: u64,
    /// Bytes of state that travel each way.
    pub(super) bytes: u64,
    /// Whether it goes through a slot of the ring.
    pub(super) travels: bool,
    /// Whether its weights are on the host: new ones are there when they are stored.
    pub(super) on_host: bool,
}

/// Where a table's state is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lies {
    /// On the device: its tensors are units.
    OnDevice,
    /// On the host: its chunks are units.
    OnHost,
    /// On the host, and the host takes part: no chunk is a matter of the device alone.
    Shared,
}

/// The units of all tables: the same for every step until a table is added.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) units: Vec<Unit>,
    /// The number of the first tensor of each table.
    firsts: Vec<usize>,
    /// Table and place of each tensor.
    homes: Vec<(usize, usize)>,
    /// By table: the first of its units.
    first_units: Vec<usize>,
    /// The units of each tensor.
    units_of: Vec<Vec<usize>>,
}

impl Layout {
    /// The units of these plans.
    pub(super) fn new<'a>(tables: impl Iterator<Item = (&'a StepPlan, Lies)>) -> Self {
        let mut layout = Self::default();
        for (table, (plan, lies)) in tables.enumerate() {
            let first = layout.homes.len();
            layout.firsts.push(first);
            layout.first_units.push(layout.units.len());
            layout.homes.extend((0..plan.tensors().len()).map(|tensor| (table, tensor)));
            if lies == Lies::OnDevice {
                let whole = plan.tensors().iter().enumerate().filter(|(_, spec)| spec.elements > 0);
                layout.units.extend(whole.map(|(tensor, spec)| Unit {
                    table,
                    part: Part::Tensor(tensor),
                    tensors: vec![first + tensor],
                    elements: spec.elements,
                    bytes: 0,
                    travels: false,
                    on_host: spec.on_host,
                }));
                continue;
            }
            layout.units.extend(plan.chunks().iter().enumerate().map(|(index, chunk)| {
                let (bucket, pieces) = (&plan.buckets()[chunk.bucket], plan.pieces(chunk));
                Unit {
                    table,
                    part: Part::Chunk(index),
                    tensors: pieces.iter().map(|piece| first + piece.tensor).collect(),
                    elements: chunk.elements,
                    bytes: state_bytes(&bucket.columns, pieces.iter().map(|piece| piece.elements).sum()),
                    travels: lies == Lies::Shared || bucket.on_host || !bucket.columns.is_empty(),
                    on_host: bucket.on_host,
                }
            }));
        }
        layout.units_of = vec![Vec::new(); layout.homes.len()];
        for (index, unit) in layout.units.iter().enumerate() {
            unit.tensors.iter().for_each(|&tensor| layout.units_of[tensor].push(index));
        }
        layout
    }

    /// Tensors of all tables.
    pub(super) fn tensors(&self) -> usize {
        self.homes.len()
    }

    /// Tables.
    pub(super) fn tables(&self) -> usize {
        self.firsts.len()
    }

    /// The number of a tensor, where there is such a one.
    pub(super) fn number(&self, table: usize, tensor: usize) -> Option<usize> {
        let number = self.firsts.get(table)? + tensor;
        (self.homes.get(number) == Some(&(table, tensor))).then_some(number)
    }

    /// The unit of a chunk.
    pub(super) fn chunk(&self, table: usize, chunk: usize) -> Option<usize> {
        let unit = self.first_units.get(table)? + chunk;
        let of = self.units.get(unit)?;
        (of.table == table && of.part == Part::Chunk(chunk)).then_some(unit)
    }

    /// Table and place of a tensor.
    pub(super) fn home(&self, number: usize) -> (usize, usize) {
        self.homes[number]
    }
}

/// What is known of a tensor's gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    Nothing,
    /// Offered; not yet seen to be final.
    Offered,
    /// Final.
    Ready,
    /// Handed over at the commit: final when the commit's mark is reached.
    Late,
    /// There is none in this step.
    Absent,
}

/// Units that may run, the one that is needed first on top.
type Heap = BinaryHeap<Reverse<(Need, usize)>>;

/// One step's schedule.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    layout: Arc<Layout>,
    order: Vec<Need>,
    known: Vec<Known>,
    /// By unit: tensors of which it is not known whether they may be updated.
    waiting: Vec<usize>,
    /// By tensor: units that have not run.
    left: Vec<usize>,
    /// Units that may run: without a slot, and with one.
    now: [Heap; 2],
    /// The same for units that have to wait for the commit's mark.
    late: [Heap; 2],
    /// Gradients that were offered and not seen to be final.
    awaited: usize,
    /// Units that have not run and will.
    units_left: usize,
    committed: bool,
    /// Whether nothing has to wait for the commit's mark any more.
    commit_reached: bool,
    /// Tensors all of whose units have run, since they were last taken.
    completed: Vec<usize>,
}

impl Schedule {
    /// Of a step about which nothing is known but what the next forward needs first.
    pub(super) fn new(layout: Arc<Layout>, order: Vec<Need>) -> Self {
        Self {
            known: vec![Known::Nothing; layout.tensors()],
            waiting: layout.units.iter().map(|unit| unit.tensors.len()).collect(),
            left: layout.units_of.iter().map(Vec::len).collect(),
            now: Default::default(),
            late: Default::default(),
            awaited: 0,
            units_left: 0,
            committed: false,
            commit_reached: false,
            completed: Vec::new(),
            order,
            layout,
        }
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The same, to keep while the schedule changes.
    pub(super) fn layout_shared(&self) -> Arc<Layout> {
        self.layout.clone()
    }

    /// A gradient was offered.
    pub(super) fn offer(&mut self, tensor: usize) {
        self.known[tensor] = Known::Offered;
        self.awaited += 1;
    }

    /// A gradient that was offered is final.
    pub(super) fn ready(&mut self, tensor: usize) {
        self.awaited -= 1;
        self.learn(tensor, Known::Ready);
    }

    /// These have gradients too, and no others that were not offered.
    pub(super) fn commit(&mut self, late: impl Iterator<Item = usize>) {
        self.committed = true;
        let nothing = |known: &Known| *known == Known::Nothing;
        late.for_each(|tensor| self.known[tensor] = Known::Late);
        // Units that have both kinds must see all of them before one is let go.
        for tensor in 0..self.known.len() {
            if nothing(&self.known[tensor]) {
                self.learn(tensor, Known::Absent);
            }
        }
        for tensor in 0..self.known.len() {
            if self.known[tensor] == Known::Late {
                self.learn(tensor, Known::Late);
            }
        }
    }

    fn learn(&mut self, tensor: usize, known: Known) {
        self.known[tensor] = known;
        if known != Known::Absent && self.left[tensor] == 0 {
            self.completed.push(tensor);
        }
        let layout = self.layout.clone();
        for &unit in &layout.units_of[tensor] {
            self.waiting[unit] -= 1;
            if self.waiting[unit] == 0 {
                self.let_go(unit);
            }
        }
    }

    /// How early a unit is needed; `None` if it has nothing to update.
    pub(super) fn need(&self, unit: usize) -> Option<Need> {
        let with_gradient = |&&tensor: &&usize| self.known[tensor] != Known::Absent;
        self.layout.units[unit].tensors.iter().filter(with_gradient).map(|&tensor| self.order[tensor]).min()
    }

    /// Whether all gradients were handed over, and none of those that were offered is awaited.
    pub(super) fn is_committed(&self) -> bool {
        self.committed && self.awaited == 0
    }

    /// Whatever has not run will not.
    pub(super) fn skip_rest(&mut self) {
        self.units_left = 0;
        for tensor in 0..self.known.len() {
            if std::mem::take(&mut self.left[tensor]) > 0 && self.known[tensor] != Known::Absent {
                self.completed.push(tensor);
            }
        }
    }

    /// All is known about a unit.
    fn let_go(&mut self, unit: usize) {
        let Some(need) = self.need(unit) else { return };
        let travels = self.layout.units[unit].travels;
        let heaps = if self.is_late(unit) && !self.commit_reached { &mut self.late } else { &mut self.now };
        heaps[usize::from(travels)].push(Reverse((need, unit)));
        self.units_left += 1;
    }

    /// The commit's mark was reached: nothing has to wait for it any more.
    pub(super) fn reach_commit(&mut self) {
        self.commit_reached = true;
        for (now, late) in self.now.iter_mut().zip(&mut self.late) {
            now.append(late);
        }
    }

    /// Takes the unit to run next, among those that travel or among those that do not.
    pub(super) fn next(&mut self, travels: bool) -> Option<usize> {
        let kind = usize::from(travels);
        let heap = match self.now[kind].is_empty() {
            true if self.awaited > 0 => return None,
            true => &mut self.late[kind],
            false => &mut self.now[kind],
        };
        heap.pop().map(|Reverse((_, unit))| unit)
    }

    /// Takes the unit to run next among those that travel and have no gradient of the commit.
    pub(super) fn next_offered(&mut self) -> Option<usize> {
        debug_assert!(!self.commit_reached, "late ones are among the others then");
        self.now[1].pop().map(|Reverse((_, unit))| unit)
    }

    /// A unit that has run has to run once more.
    pub(super) fn again(&mut self, unit: usize) {
        let layout = self.layout.clone();
        for &tensor in &layout.units[unit].tensors {
            self.left[tensor] += 1;
        }
        let left = &self.left;
        self.completed.retain(|&tensor| left[tensor] == 0);
        self.let_go(unit);
    }

    /// Whether a unit has a gradient that was handed over at the commit.
    pub(super) fn is_late(&self, unit: usize) -> bool {
        self.layout.units[unit].tensors.iter().any(|&tensor| self.known[tensor] == Known::Late)
    }

    /// A unit's update was submitted.
    pub(super) fn ran(&mut self, unit: usize) {
        self.units_left -= 1;
        for &tensor in &self.layout.units[unit].tensors {
            self.left[tensor] -= 1;
            if self.left[tensor] == 0 && self.known[tensor] != Known::Absent {
                self.completed.push(tensor);
            }
        }
    }

    /// Takes the tensors that were completed since: all their units have run.
    pub(super) fn take_completed(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.completed)
    }

    /// Whether all has run that will ever run in this step.
    pub(super) fn is_over(&self) -> bool {
        self.is_committed() && self.units_left == 0
    }
}
