//! Overlapped steps: a thread of the engine submits a step's chunks while the caller goes on with backward and with the
//! next forward.
//!
//! ```text
//! caller  begin  offer offer offer ... commit                 wait          wait
//! thread         chunk   chunk   chunk   chunk   chunk   chunk   chunk
//! ```
//!
//! A gradient is offered when the work that completes it was submitted. What was not offered is handed over at the
//! commit. [`Optimizer::overlap_wait`] orders a reader of a parameter behind its update. The bits are those of a plain
//! step: the thread runs the same chunks in another order, and no two chunks share a byte.
//!
//! - `schedule.rs` decides what runs next; it is pure.
//! - `front.rs` is the caller's side, `worker.rs` the thread with `step.rs`, what it knows of the step, and `host.rs`, for
//!   steps in which the host takes part. `handover.rs` is what both sides share, `points.rs` the ends of updates.
//! - `guess.rs` is for steps that update on a second copy of the state before it is known whether they are clipped.
//! - `report.rs` is what a step did.

mod front;
mod guess;
mod handover;
mod host;
#[cfg(all(test, loom))]
mod loom_tests;
mod points;
mod report;
mod schedule;
#[cfg(all(test, not(loom)))]
mod schedule_tests;
mod step;
mod worker;

use std::sync::Arc;

use forebay_device::{Region, Stream};

pub(super) use front::Overlap;
pub use report::{OverlapStats, OverlapUnit};

use self::front::{Expected, Front, OpenStep, not_open, unknown};
use self::guess::GuessMemory;
use self::schedule::{Layout, Lies, Part};
use self::step::{Commit, Message, NewStep, Offer};
use super::scalars::ScalarSets;
use super::segments::{self, Binding, TableInput, TableStep};
use super::table::StateTable;
use super::{Optimizer, OptimizerInner, StepFlags};
use crate::error::{Error, Result};
use crate::plan::StepPlan;
use crate::sync::lock;
use crate::trace::{self, Kind, Label, Reason, Span};

impl Optimizer {
    /// What overlapped steps need, if there was one.
    pub(super) fn overlap(&self) -> Option<&Overlap> {
        self.overlap.get()
    }

    /// The same, made now if it was not. The caller holds the optimizer's lock.
    fn overlap_of(&self, _inner: &mut OptimizerInner) -> Result<&Overlap> {
        match self.overlap.get() {
            Some(overlap) => Ok(overlap),
            None => {
                let made = Overlap::new(&self.device, self.owner)?;
                Ok(self.overlap.get_or_init(|| made))
            }
        }
    }

    /// Opens an overlapped step. `order` has for each table and tensor a number: smaller is needed earlier by the next
    /// forward. `groups` are as in [`Self::step`]. What [`Self::overlap_updated`] has not told of the step before is
    /// forgotten.
    pub fn overlap_begin(&self, order: &[Vec<i64>], groups: &[Vec<f64>]) -> Result<()> {
        self.begin(order, groups, false)
    }

    /// The same for a step whose gradients may be scaled by what the commit brings: those that are offered are used at
    /// once, as if that were 1, on the second copy of the state. If it turns out to be 1, the second copy becomes the
    /// state, else everything is done again from the first. Until then gradients stay in use, and [`Self::overlap_abort`]
    /// brings the weights back. Needs [`Self::open_second`], and a master for each tensor that is offered.
    pub fn overlap_begin_speculative(&self, order: &[Vec<i64>], groups: &[Vec<f64>]) -> Result<()> {
        self.begin(order, groups, true)
    }

    fn begin(&self, order: &[Vec<i64>], groups: &[Vec<f64>], guesses: bool) -> Result<()> {
        let mut inner = self.open()?;
        inner.check_trusted()?;
        if guesses {
            guess::check(&self.device, inner.second, inner.hybrid.is_some())?;
        }
        let planned = inner.tables.iter().map(|table| table.plan().tensors().len());
        if !order.iter().map(Vec::len).eq(planned) {
            return Err(Error::PlanMismatch {
                tensor: format!("an order of {} tables", order.len()),
                reason: format!("{} were added, and each has a number for each tensor", inner.tables.len()),
            });
        }
        inner.check_ring()?;
        let Some(powers) = inner.powers.clone() else {
            return Err(Error::InvalidOption {
                option: "optimizer",
                value: "without state".to_owned(),
                remedy: "create its state before an overlapped step".to_owned(),
            });
        };
        let overlap = self.overlap_of(&mut inner)?;
        let mut front = lock(&overlap.front);
        if front.layout.tables() != inner.tables.len() {
            let on_host = if inner.hybrid.is_some() { Lies::Shared } else { Lies::OnHost };
            let lies = |table: &StateTable| if table.is_resident() { Lies::OnDevice } else { on_host };
            let tables = inner.tables.iter().map(|table| (&**table.plan(), lies(table)));
            front.layout = Arc::new(Layout::new(tables));
        }
        let (layout, tensors) = (front.layout.clone(), front.layout.tensors());
        while front.ready.len() < tensors {
            front.ready.push(overlap.marks.take()?);
        }
        front.groups.resize(tensors, None);
        front.pipeline = inner.pipeline.as_ref().map(Arc::downgrade).unwrap_or_default();
        front.on_host = layout.units.iter().any(|unit| unit.on_host);
        if guesses && front.guess.as_ref().is_none_or(|memory| !memory.is_for(layout.units.len())) {
            front.guess = Some(Arc::new(GuessMemory::new(&self.device, &overlap.marks, layout.units.len())?));
        }
        front.guesses = guesses;
        let mut step = OpenStep {
            guesses,
            tables: inner.tables.clone(),
            sets: ScalarSets::new(self.rule, groups.to_vec())?,
            sent: 0,
            powers,
            expected: vec![None; tensors],
            offered: vec![None; tensors],
            grad_bytes: vec![0; tensors],
            shared: inner.hybrid.is_some(),
        };
        // A hook must not wait for the device to compute a power: whatever can be known is computed here.
        for (table, state) in inner.tables.iter().enumerate() {
            let counters = state.steps()?;
            for (place, spec) in state.plan().tensors().iter().enumerate() {
                let Some(tensor) = layout.number(table, place) else { continue };
                let known = front.groups[tensor].filter(|&group| (group as usize) < groups.len());
                let likely = known.map_or(0..groups.len() as u32, |group| group..group + 1);
                for group in likely {
                    let mut steps = counters[place];
                    let (set, update) = step.sets.advance(&step.powers, group, &mut steps, spec.elements)?;
                    step.expected[tensor] = Some(Expected { group, set, update, steps });
                }
            }
        }
        let new = NewStep {
            tables: inner.tables.clone(),
            order: order.iter().flatten().copied().collect(),
            pipeline: inner.pipeline.clone(),
            hybrid: inner.hybrid.clone(),
            scalars: step.unsent(),
            layout,
            guess: front.guess.clone().filter(|_| guesses),
        };
        front.step = Some(step);
        lock(&overlap.report).begin();
        lock(&overlap.waited).clear();
        overlap.handover.begin(tensors, Message::Begin(Box::new(new)));
        Ok(())
    }

    /// What lies where in a table of the open step. Unlike [`Self::plan`] it never waits for another call.
    pub fn overlap_table(&self, table: usize) -> Result<Arc<StepPlan>> {
        let overlap = self.overlap().ok_or_else(not_open)?;
        overlap.not_forked()?;
        let front = lock(&overlap.front);
        let step = front.step.as_ref().ok_or_else(|| overlap.failed().unwrap_or_else(not_open))?;
        step.tables.get(table).map(|table| table.plan().clone()).ok_or_else(|| unknown(table, 0))
    }

    /// Hands a gradient over that is final when what `after` was given so far has ended; without a stream it is final.
    /// `columns` are those of a tensor whose state is on the device. Never waits for the device.
    pub fn overlap_offer(
        &self,
        (table, place): (usize, usize),
        mut binding: Binding,
        columns: Vec<Region>,
        after: Option<&Stream>,
    ) -> Result<()> {
        let overlap = self.overlap().ok_or_else(not_open)?;
        overlap.not_forked()?;
        let mut front = lock(&overlap.front);
        let (layout, Front { ready, groups, step, .. }) = (front.layout.clone(), &mut *front);
        let step = match step {
            Some(step) => step,
            None => return Err(overlap.failed().unwrap_or_else(not_open)),
        };
        let tensor = layout.number(table, place).ok_or_else(|| unknown(table, place))?;
        let (state, spec) = (&step.tables[table], &step.tables[table].plan().tensors()[place]);
        segments::check_binding(spec, &binding, state.is_resident().then_some(columns.len()))?;
        if step.shared && !state.is_resident() {
            return Err(Error::InvalidOption {
                option: "offer",
                value: spec.name.clone(),
                remedy: "the host takes part in its update, so hand its gradient over at the commit".to_owned(),
            });
        }
        if step.guesses {
            guess::check_offer(spec, state.is_resident())?;
        }
        if step.offered[tensor].is_some() {
            return Err(Error::PlanMismatch { tensor: spec.name.clone(), reason: "it was offered already".to_owned() });
        }
        let numbers = step.numbers(&layout, tensor, binding.group)?;
        // What is done again has the scale of the commit.
        (binding.scalars, binding.update, binding.early) = (numbers.set, numbers.update, !step.guesses);
        (step.offered[tensor], step.grad_bytes[tensor]) = (Some(numbers), binding.grad.bytes());
        groups[tensor] = Some(numbers.group);
        let (scalars, mark) = (step.unsent(), after.map(|_| ready[tensor].clone()));
        drop(front);
        if let (Some(mark), Some(after)) = (&mark, after)
            && let Err(error) = mark.record(after)
        {
            // The commit can hand it over.
            if let Some(step) = &mut lock(&overlap.front).step {
                step.offered[tensor] = None;
            }
            return Err(error);
        }
        overlap.handover.offer(tensor, Message::Offer(Box::new(Offer { tensor, binding, columns, mark, scalars })))
    }

    /// Hands over all gradients that were not offered, as [`Self::step`] takes them. What has none by now stays as it is.
    /// Scale and skip apply to these gradients only. Returns at once; the updates wait for `compute`.
    pub fn overlap_commit(
        &self,
        mut inputs: Vec<TableInput>,
        compute: Option<&Stream>,
        flags: StepFlags,
    ) -> Result<()> {
        let mut inner = self.lock();
        let overlap = self.overlap().ok_or_else(not_open)?;
        overlap.not_forked()?;
        let mut front = lock(&overlap.front);
        let (layout, Front { groups, step, .. }) = (front.layout.clone(), &mut *front);
        if let Some(error) = overlap.failed() {
            *step = None;
            return Err(error);
        }
        let of_step = step.as_mut().ok_or_else(not_open)?;
        if of_step.guesses && flags.skip.is_some() {
            return Err(guess::no_skip());
        }
        if inputs.len() != of_step.tables.len() {
            return Err(Error::PlanMismatch {
                tensor: format!("a step of {} tables", inputs.len()),
                reason: format!("{} were added", of_step.tables.len()),
            });
        }
        let (mut tensors, mut counters) = (Vec::new(), Vec::with_capacity(inputs.len()));
        for (table, input) in inputs.iter_mut().enumerate() {
            let state = of_step.tables[table].clone();
            TableStep { table: &state, input, landed: &[] }.check()?;
            let mut steps = state.steps()?;
            for (place, spec) in state.plan().tensors().iter().enumerate() {
                let Some(tensor) = layout.number(table, place) else { continue };
                match (&mut input.tensors[place], of_step.offered[tensor]) {
                    (Some(_), Some(_)) => {
                        let reason = "it was offered already".to_owned();
                        return Err(Error::PlanMismatch { tensor: spec.name.clone(), reason });
                    }
                    (None, None) => {}
                    (None, Some(offered)) => steps[place] = offered.steps,
                    (Some(binding), None) => {
                        let numbers = of_step.numbers(&layout, tensor, binding.group)?;
                        (binding.scalars, binding.update) = (numbers.set, numbers.update);
                        steps[place] = numbers.steps;
                        groups[tensor] = Some(numbers.group);
                        tensors.push(tensor);
                    }
                }
            }
            counters.push(steps);
        }
        if let Some(compute) = compute {
            overlap.committed.record(compute)?;
        }
        let counted = of_step.tables.iter().zip(&counters).try_for_each(|(table, steps)| table.set_steps(steps));
        let commit = Commit {
            inputs,
            tensors: tensors.clone(),
            landed: inner.landing.take(),
            mark: compute.map(|_| overlap.committed.clone()),
            grad_scale: flags.grad_scale,
            skip: flags.skip,
            scalars: of_step.unsent(),
        };
        counted?;
        *step = None;
        lock(&overlap.report).commit();
        drop((front, inner));
        overlap.handover.commit(&tensors, Message::Commit(Box::new(commit)))
    }

    /// Tensors whose updates have ended since the last call, by table and place: nothing reads their gradients any more.
    /// Never waits, and makes no stream wait: that would hold up a backward pass for the wire.
    pub fn overlap_updated(&self) -> Result<Vec<(usize, usize)>> {
        let Some(overlap) = self.overlap() else { return Ok(Vec::new()) };
        overlap.not_forked()?;
        if !overlap.handover.has_updated() {
            return Ok(Vec::new());
        }
        let reached = overlap.points.newest_reached()?;
        let tensors = overlap.handover.take_updated(reached)?;
        let front = lock(&overlap.front);
        if let Some(step) = &front.step {
            let bytes: u64 = tensors.iter().map(|&tensor| step.grad_bytes[tensor]).sum();
            lock(&overlap.report).stats.freed_bytes += bytes;
        }
        Ok(tensors.into_iter().map(|tensor| front.layout.home(tensor)).collect())
    }

    /// Blocks until the updates of these tensors were submitted, of all where none are named; then makes `stream` wait for
    /// them, or without a stream, or where a tensor is on the host, waits itself. Before the commit it waits for what was
    /// submitted, and for nothing else. Returns whether an update was still under way.
    pub fn overlap_wait(&self, homes: Option<&[(usize, usize)]>, stream: Option<&Stream>) -> Result<bool> {
        let Some(overlap) = self.overlap() else { return Ok(false) };
        overlap.not_forked()?;
        if overlap.handover.is_quiet() {
            return Ok(false);
        }
        let tensors = homes.map(|homes| overlap.numbers(homes));
        let waiting = trace::wait();
        let (point, waited) = overlap.handover.wait(tensors.as_deref())?;
        let stream = stream.filter(|_| !lock(&overlap.front).on_host);
        let ordered = stream.and_then(|stream| trace::timed(&self.device, stream, None));
        let under_way = overlap.order(point, stream)?;
        waiting.end(Reason::Weights, "wait for weights", self.owner);
        if let (Some(ordered), Some(stream), true) = (ordered, stream, under_way) {
            let wait = Span::new(Kind::Wait, Label::Words("wait for weights"));
            ordered.end(stream, Span { reason: Some(Reason::Weights), owner: self.owner, ..wait });
        }
        if !under_way && overlap.points.latest() == point {
            overlap.handover.reached(point);
        }
        Ok(waited || under_way)
    }

    /// Whether nobody has to wait for an update: [`Self::overlap_wait`] would return at once.
    pub fn overlap_is_quiet(&self) -> bool {
        self.overlap().is_none_or(|overlap| overlap.not_forked().is_ok() && overlap.handover.is_quiet())
    }

    /// Blocks until everything that was committed was submitted.
    pub fn overlap_finish(&self) -> Result<()> {
        self.overlap().map_or(Ok(()), Overlap::finish)
    }

    /// Gives an open step up. If some of it was submitted, the state cannot be trusted any more, and this returns an error.
    pub fn overlap_abort(&self) -> Result<()> {
        let _inner = self.lock();
        let Some(overlap) = self.overlap() else { return Ok(()) };
        overlap.not_forked()?;
        lock(&overlap.front).step = None;
        overlap.handover.abort_open(Message::Abort);
        overlap.failed().map_or(Ok(()), Err)
    }

    /// The overlapped step under way, or the last one, in numbers.
    pub fn overlap_stats(&self) -> OverlapStats {
        self.overlap().map_or_else(OverlapStats::default, |overlap| {
            let stats = lock(&overlap.report).stats;
            let pending = overlap.handover.pending() as u64;
            let Some(pipeline) = lock(&overlap.front).pipeline.upgrade() else {
                return OverlapStats { pending, ..stats };
            };
            OverlapStats { pending, ring_bytes: pipeline.bytes(), streamed: pipeline.stats(), ..stats }
        })
    }

    /// The units of the overlapped step under way, or of the last one: those that ran in their order, then the others.
    pub fn overlap_plan(&self) -> Vec<OverlapUnit> {
        let Some(overlap) = self.overlap() else { return Vec::new() };
        let (layout, ran) = (lock(&overlap.front).layout.clone(), lock(&overlap.report).ran.clone());
        let mut plan: Vec<OverlapUnit> = layout
            .units
            .iter()
            .map(|unit| OverlapUnit {
                table: unit.table,
                chunk: match unit.part {
                    Part::Chunk(chunk) => Some(chunk),
                    Part::Tensor(_) => None,
                },
                tensors: unit.tensors.iter().map(|&tensor| layout.home(tensor).1).collect(),
                bytes: unit.bytes,
                position: None,
                submitted_ns: None,
                late: false,
            })
            .collect();
        for (position, (unit, at, late)) in ran.into_iter().enumerate() {
            let unit = &mut plan[unit];
            (unit.position, unit.submitted_ns, unit.late) = (Some(position), Some(at), late);
        }
        plan.sort_by_key(|unit| (unit.position.is_none(), unit.position));
        plan
    }
}
