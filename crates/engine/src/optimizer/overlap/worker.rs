//! The thread that submits the updates of an overlapped step.
//!
//! It works on tables and rings that it shares with the optimizer, and takes no lock of an optimizer: so calls of the
//! optimizer may wait for it. While it has nothing to submit it sleeps: until a message comes, or for a moment where a
//! gradient was offered and is not final yet.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use forebay_device::{Region, Scalars, SharedDevice, Stream};

use super::handover::{Handover, Sleep};
use super::points::Points;
use super::report::Report;
use super::schedule::{Layout, Need, Part, Schedule};
use crate::error::{Error, Result};
use crate::flow::{Mark, Pipeline};
use crate::optimizer::segments::{Binding, Segments, StepInputs, TableInput, TableStep};
use crate::optimizer::streamed;
use crate::optimizer::table::StateTable;
use crate::snapshot::Stepping;
use crate::sync::{Mutex, lock};

/// How long the thread sleeps between two looks at gradients that are not final yet.
const NAP: Duration = Duration::from_micros(50);

/// At most so many offered gradients are looked at in a row when none of them is final.
const LOOKS: usize = 16;

/// Elements of resident tensors that one launch updates at the most, so that who waits for the first need not wait for
/// all.
const BATCH_ELEMENTS: u64 = 16 << 20;

/// What the thread is told.
#[derive(Debug)]
pub(super) enum Message {
    Begin(Box<NewStep>),
    Offer(Offer),
    Commit(Box<Commit>),
    Abort,
}

/// A step that begins.
#[derive(Debug)]
pub(super) struct NewStep {
    pub(super) tables: Vec<Arc<StateTable>>,
    pub(super) layout: Arc<Layout>,
    pub(super) order: Vec<Need>,
    pub(super) pipeline: Option<Arc<Pipeline>>,
    pub(super) scalars: Vec<Scalars>,
}

/// A gradient that will be final when its mark is reached; without a mark it is.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) tensor: usize,
    pub(super) binding: Binding,
    pub(super) columns: Vec<Region>,
    pub(super) mark: Option<Arc<Mark>>,
    /// Sets of scalars that were not known when the step began.
    pub(super) scalars: Vec<Scalars>,
}

/// All other gradients, final when the mark is reached.
#[derive(Debug)]
pub(super) struct Commit {
    pub(super) inputs: Vec<TableInput>,
    pub(super) tensors: Vec<usize>,
    pub(super) mark: Option<Arc<Mark>>,
    pub(super) grad_scale: Option<Region>,
    pub(super) skip: Option<Region>,
    pub(super) scalars: Vec<Scalars>,
}

/// The thread's own.
pub(super) struct Worker {
    pub(super) device: SharedDevice,
    /// Where updates run.
    pub(super) stream: Stream,
    pub(super) points: Arc<Points>,
    pub(super) handover: Arc<Handover<Message>>,
    pub(super) report: Arc<Mutex<Report>>,
}

/// What a step has come to.
enum Ended {
    Done,
    Aborted,
}

impl Worker {
    /// Works off steps until the optimizer goes.
    pub(super) fn run(self) {
        let mut mail = Vec::new();
        while self.handover.take(&mut mail, Sleep::UntilMail) {
            let mut messages = std::mem::take(&mut mail).into_iter();
            let Some(Message::Begin(new)) = messages.next() else { continue };
            let mut step = Step::new(*new);
            let work = std::panic::AssertUnwindSafe(|| self.work(&mut step, messages.collect()));
            let outcome = std::panic::catch_unwind(work).unwrap_or_else(|_| Err(panicked()));
            let outcome = self.settle(&step, outcome);
            drop(step);
            lock(&self.report).end();
            self.handover.end(outcome);
        }
    }

    fn work(&self, step: &mut Step, mut mail: Vec<Message>) -> Result<Ended> {
        let _entered = self.device.enter()?;
        step.pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.begin())?;
        step.tables.iter().for_each(|table| table.count_stalls());
        // A save pauses while there is something to submit.
        let mut stepping: Vec<Stepping> = Vec::new();
        let mut sleep = Sleep::Not;
        loop {
            if sleep != Sleep::Not {
                stepping.clear();
            }
            self.handover.take(&mut mail, sleep);
            for message in mail.drain(..) {
                match message {
                    Message::Begin(_) => {}
                    Message::Offer(offer) => step.take_offer(offer),
                    Message::Commit(commit) => step.take_commit(*commit),
                    Message::Abort => return Ok(Ended::Aborted),
                }
            }
            step.look()?;
            let mut ran = false;
            for travels in [false, true] {
                if stepping.is_empty() {
                    stepping.extend(step.tables.iter().filter_map(|table| table.stepping()));
                }
                ran |= if travels { self.run_chunk(step)? } else { self.run_resident(step)? };
                self.publish(step)?;
            }
            if step.schedule.is_over() {
                return Ok(Ended::Done);
            }
            sleep = match (ran, step.is_looking()) {
                (true, _) => Sleep::Not,
                (false, true) => Sleep::For(NAP),
                (false, false) => Sleep::UntilMail,
            };
        }
    }

    /// Submits the chunk that is needed first, if one may run.
    fn run_chunk(&self, step: &mut Step) -> Result<bool> {
        let Some(unit) = step.schedule.next(true) else { return Ok(false) };
        let Some(pipeline) = step.pipeline.clone() else { return Err(crate::optimizer::no_ring()) };
        let late = self.follow(step, unit)?;
        let of = &step.schedule.layout().units[unit];
        let (table, Part::Chunk(chunk)) = (of.table, of.part) else { return Ok(false) };
        let (on_host, bytes) = (step.is_on_host(table, chunk), of.bytes);
        streamed::run_chunk(&pipeline, step.table(table), chunk, &step.values, &self.stream)?;
        if on_host {
            // The new weights are there when they are stored, not when they are updated.
            pipeline.after_stores(&self.stream)?;
        }
        step.schedule.ran(unit);
        lock(&self.report).ran(unit, bytes, late);
        Ok(true)
    }

    /// Submits tensors whose state is on the device, those needed first; as many as one launch should have.
    fn run_resident(&self, step: &mut Step) -> Result<bool> {
        let (mut segments, mut elements) = (Segments::default(), 0);
        let mut rule = None;
        while elements < BATCH_ELEMENTS
            && let Some(unit) = step.schedule.next(false)
        {
            let late = self.follow(step, unit)?;
            let of = &step.schedule.layout().units[unit];
            let table = step.table(of.table);
            match of.part {
                Part::Tensor(tensor) => streamed::resident_segment(table, tensor, &mut segments)?,
                Part::Chunk(chunk) => streamed::chunk_segments(table, chunk, &mut segments)?,
            }
            rule = Some(table.table.rule());
            elements += of.elements;
            step.schedule.ran(unit);
            lock(&self.report).ran(unit, 0, late);
        }
        let Some(rule) = rule else { return Ok(false) };
        step.values.launch(&*self.device, &self.stream, rule, &segments)?;
        Ok(true)
    }

    /// Begins a unit. Whether it has gradients of the commit: then what is submitted from now on is ordered behind the
    /// commit's mark, once.
    fn follow(&self, step: &mut Step, unit: usize) -> Result<bool> {
        let late = step.schedule.is_late(unit);
        if late && let Some(mark) = step.commit.take() {
            mark.wait(&self.stream)?;
            step.schedule.reach_commit();
        }
        step.first.get_or_insert(unit);
        Ok(late)
    }

    /// Tells who waits which tensors are updated.
    fn publish(&self, step: &mut Step) -> Result<()> {
        let completed = step.schedule.take_completed();
        if completed.is_empty() {
            return Ok(());
        }
        let point = if step.first.is_some() { self.points.record(&self.stream)? } else { self.points.latest() };
        self.handover.submitted(&completed, point);
        Ok(())
    }

    /// After a failure or an abort that came too late, nothing of the step is under way any more when this returns.
    fn settle(&self, step: &Step, outcome: Result<Ended>) -> Result<()> {
        let failed = match outcome {
            Ok(Ended::Done) => return Ok(()),
            Ok(Ended::Aborted) if step.first.is_none() => return Ok(()),
            Ok(Ended::Aborted) => step.torn(),
            Err(error) => error,
        };
        let _ = step.pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.drain());
        let _ = self.points.record(&self.stream).and_then(|point| self.points.wait(point, None));
        Err(failed)
    }
}

fn panicked() -> Error {
    Error::InvalidOption {
        option: "overlapped step",
        value: "panicked".to_owned(),
        remedy: "this is a defect of forebay; please report it".to_owned(),
    }
}

/// The step under way.
struct Step {
    tables: Vec<Arc<StateTable>>,
    inputs: Vec<TableInput>,
    values: StepInputs,
    schedule: Schedule,
    pipeline: Option<Arc<Pipeline>>,
    /// Gradients that were offered and not seen to be final, in the order of the offers.
    offered: VecDeque<(Arc<Mark>, usize)>,
    /// The commit's mark, until the updates' stream waits for it or it was reached.
    commit: Option<Arc<Mark>>,
    /// The first unit of which something was submitted.
    first: Option<usize>,
}

impl Step {
    fn new(new: NewStep) -> Self {
        let NewStep { tables, layout, order, pipeline, scalars } = new;
        let empty = |table: &Arc<StateTable>| {
            let tensors = table.plan().tensors().len();
            TableInput { tensors: vec![None; tensors], resident: vec![Vec::new(); tensors] }
        };
        Self {
            inputs: tables.iter().map(empty).collect(),
            values: StepInputs { scalars, ..StepInputs::default() },
            schedule: Schedule::new(layout, order),
            offered: VecDeque::new(),
            commit: None,
            first: None,
            tables,
            pipeline,
        }
    }

    fn table(&self, table: usize) -> TableStep<'_> {
        TableStep { table: &self.tables[table], input: &self.inputs[table], landed: &[] }
    }

    fn is_on_host(&self, table: usize, chunk: usize) -> bool {
        let plan = self.tables[table].plan();
        plan.buckets()[plan.chunks()[chunk].bucket].on_host
    }

    fn take_offer(&mut self, offer: Offer) {
        let (table, place) = self.schedule.layout().home(offer.tensor);
        self.inputs[table].tensors[place] = Some(offer.binding);
        self.inputs[table].resident[place] = offer.columns;
        self.values.scalars.extend(offer.scalars);
        self.schedule.offer(offer.tensor);
        match offer.mark {
            Some(mark) => self.offered.push_back((mark, offer.tensor)),
            None => self.schedule.ready(offer.tensor),
        }
    }

    fn take_commit(&mut self, commit: Commit) {
        for (own, given) in self.inputs.iter_mut().zip(commit.inputs) {
            let mut columns = given.resident.into_iter();
            for (tensor, binding) in given.tensors.into_iter().enumerate() {
                let columns = columns.next();
                if binding.is_some() {
                    own.tensors[tensor] = binding;
                    own.resident[tensor] = columns.unwrap_or_default();
                }
            }
        }
        self.values.scalars.extend(commit.scalars);
        (self.values.grad_scale, self.values.skip) = (commit.grad_scale, commit.skip);
        self.schedule.commit(commit.tensors.into_iter());
        self.commit = commit.mark;
        if self.commit.is_none() {
            self.schedule.reach_commit();
        }
    }

    /// Whether there is something to look at again soon.
    fn is_looking(&self) -> bool {
        !self.offered.is_empty()
    }

    /// Looks which gradients have become final. Streams reach their marks in the order of the offers, and there are few
    /// streams: a few looks in vain are enough.
    fn look(&mut self) -> Result<()> {
        let (mut at, mut vain) = (0, 0);
        while at < self.offered.len() && vain < LOOKS {
            if self.offered[at].0.query()? {
                if let Some((_, tensor)) = self.offered.remove(at) {
                    self.schedule.ready(tensor);
                }
            } else {
                (at, vain) = (at + 1, vain + 1);
            }
        }
        if !self.offered.is_empty()
            && let Some(mark) = &self.commit
            && mark.query()?
        {
            self.commit = None;
            self.schedule.reach_commit();
        }
        Ok(())
    }

    /// What is wrong with a step that was given up when some of it had been submitted.
    fn torn(&self) -> Error {
        let units = &self.schedule.layout().units;
        let name = self.first.map(|unit| {
            let (table, place) = self.schedule.layout().home(units[unit].tensors[0]);
            self.tables[table].plan().tensors()[place].name.clone()
        });
        Error::PlanMismatch {
            tensor: name.unwrap_or_default(),
            reason: "the step was given up after its update had been submitted".to_owned(),
        }
    }
}
