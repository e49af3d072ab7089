//! The thread that submits the updates of an overlapped step.
//!
//! It works on tables and rings that it shares with the optimizer, and takes no lock of an optimizer: so calls of the
//! optimizer may wait for it. While it has nothing to submit it sleeps: until a message comes, or for a moment where a
//! gradient was offered and is not final yet.

use std::sync::Arc;
use std::time::Duration;

use forebay_device::{SharedDevice, Stream};

use super::handover::{Handover, Sleep};
use super::host::HostProgress;
use super::points::Points;
use super::report::Report;
use super::schedule::{Part, Schedule};
use super::step::{Message, Step};
use crate::error::{Error, Result};
use crate::flow::Mark;
use crate::optimizer::segments::{Segments, TableStep};
use crate::optimizer::streamed::{self, Way};
use crate::snapshot::Stepping;
use crate::sync::{Mutex, lock};
use crate::trace;

/// How long the thread sleeps between two looks at gradients that are not final yet.
pub(super) const NAP: Duration = Duration::from_micros(50);

/// Elements of resident tensors that one launch updates at the most, so that who waits for the first need not wait for
/// all.
const BATCH_ELEMENTS: u64 = 16 << 20;

/// The thread's own.
pub(super) struct Worker {
    pub(super) device: SharedDevice,
    /// Where updates run.
    pub(super) stream: Stream,
    pub(super) points: Arc<Points>,
    pub(super) handover: Arc<Handover<Message>>,
    pub(super) report: Arc<Mutex<Report>>,
    /// Whose steps they are, for a trace.
    pub(super) owner: u32,
}

/// What a step has come to.
enum Ended {
    Done,
    Aborted,
}

impl Worker {
    /// Works off steps until the optimizer goes.
    pub(super) fn run(self) {
        trace::in_background();
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
        step.pipeline.iter().for_each(|pipeline| pipeline.begin());
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
                    Message::Offer(offer) => step.take_offer(*offer),
                    Message::Commit(commit) => step.take_commit(*commit),
                    Message::Abort => return Ok(Ended::Aborted),
                }
            }
            step.look()?;
            if stepping.is_empty() {
                stepping.extend(step.tables.iter().filter_map(|table| table.stepping()));
            }
            if step.is_guessing() {
                let ran = self.guess(step)?;
                sleep = if ran { Sleep::Not } else { step.nap() };
                continue;
            }
            let mut ran = self.run_resident(step)?;
            self.publish(&mut step.schedule, step.first.is_some())?;
            if step.hybrid.is_none() {
                ran |= self.run_chunk(step)?;
            } else if !ran && step.schedule.is_committed() {
                self.run_hybrid(step)?;
            }
            self.publish(&mut step.schedule, step.first.is_some())?;
            ran = ran || self.carry(step)?;
            if !ran && step.schedule.is_over() {
                return Ok(Ended::Done);
            }
            sleep = if ran { Sleep::Not } else { step.nap() };
        }
    }

    /// Submits the chunk that is needed first, if one may run.
    fn run_chunk(&self, step: &mut Step) -> Result<bool> {
        if step.has_fetches_enough()? {
            return Ok(false);
        }
        let Some(unit) = step.schedule.next(true) else { return Ok(false) };
        let way = step.guess.as_ref().map_or_else(Way::default, |guess| guess.way(step.schedule.layout(), unit));
        let late = self.follow(step, unit)?;
        self.run_unit(step, unit, way)?;
        let pipeline = step.pipeline.clone().ok_or_else(crate::optimizer::no_ring)?;
        let of = &step.schedule.layout().units[unit];
        let (bytes, on_host) = (of.bytes, of.on_host);
        if on_host {
            // The new weights are there when they are stored, not when they are updated.
            pipeline.after_stores(&self.stream)?;
        }
        step.schedule.ran(unit);
        lock(&self.report).ran(unit, bytes, late);
        Ok(true)
    }

    /// Submits the chunk of a unit.
    pub(super) fn run_unit(&self, step: &mut Step, unit: usize, way: Way<'_>) -> Result<()> {
        let fetched = self.submit_unit(step, unit, way)?;
        step.ahead.extend(fetched);
        Ok(())
    }

    /// The same; returns the end of its fetch.
    pub(super) fn submit_unit(&self, step: &Step, unit: usize, way: Way<'_>) -> Result<Option<Arc<Mark>>> {
        let of = &step.schedule.layout().units[unit];
        let (Some(pipeline), Part::Chunk(chunk)) = (&step.pipeline, of.part) else {
            return Err(crate::optimizer::no_ring());
        };
        streamed::run_chunk_on(pipeline, step.table(of.table), chunk, &step.values, &self.stream, way)
    }

    /// Submits tensors whose state is on the device, those needed first; as many as one launch should have.
    fn run_resident(&self, step: &mut Step) -> Result<bool> {
        let (mut segments, mut elements) = (Segments::default(), 0);
        let (mut rule, mut bytes) = (None, 0);
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
            bytes += step.state_bytes(unit);
            step.schedule.ran(unit);
            lock(&self.report).ran(unit, 0, late);
        }
        let Some(rule) = rule else { return Ok(false) };
        let traced = trace::timed(&self.device, &self.stream, None);
        step.values.launch(&*self.device, &self.stream, rule, &segments)?;
        if let Some(traced) = traced {
            traced.end(&self.stream, streamed::in_place(bytes, self.owner));
        }
        Ok(true)
    }

    /// Begins a unit; whether it has gradients of the commit.
    pub(super) fn follow(&self, step: &mut Step, unit: usize) -> Result<bool> {
        let late = step.schedule.is_late(unit);
        if late {
            self.pass_commit(step)?;
        }
        step.first.get_or_insert(unit);
        Ok(late)
    }

    /// Lets the host take part, once all is known: in the order of need, until the last weights are on their way.
    fn run_hybrid(&self, step: &mut Step) -> Result<()> {
        let Some(hybrid) = step.hybrid.take() else { return Ok(()) };
        self.pass_commit(step)?;
        let tables: Vec<usize> = (0..step.tables.len()).filter(|&table| !step.tables[table].is_resident()).collect();
        step.first = step.first.or_else(|| tables.first().and_then(|&table| step.schedule.layout().chunk(table, 0)));
        let progress = HostProgress::new(self, &tables, std::mem::take(&mut step.schedule), step.pipeline.as_deref());
        let steps: Vec<TableStep<'_>> = tables.iter().map(|&table| step.table(table)).collect();
        let outcome = hybrid.run(&steps, step.pipeline.as_deref(), &step.values, &self.stream, Some(&progress));
        drop(steps);
        step.schedule = progress.into_schedule();
        if outcome.is_err() {
            // Nothing of it may be under way when the caller learns of it.
            let _ = hybrid.lane().drain().and(hybrid.lane().finish_landing());
        }
        // What the skip flag held back was not told of.
        step.schedule.skip_rest();
        outcome
    }

    /// Orders what is submitted from now on behind the commit's mark, once.
    fn pass_commit(&self, step: &mut Step) -> Result<()> {
        if let Some(mark) = step.commit.take() {
            mark.wait(&self.stream)?;
            step.schedule.reach_commit();
        }
        Ok(())
    }

    /// Tells who waits which tensors are updated. Before anything was submitted there is no point to record.
    pub(super) fn publish(&self, schedule: &mut Schedule, begun: bool) -> Result<()> {
        let completed = schedule.take_completed();
        if completed.is_empty() {
            return Ok(());
        }
        let point = if begun { self.points.record(&self.stream)? } else { self.points.latest() };
        self.handover.submitted(&completed, point);
        Ok(())
    }

    /// After a failure or an abort that came too late, nothing of the step is under way any more when this returns.
    fn settle(&self, step: &Step, outcome: Result<Ended>) -> Result<()> {
        let failed = match outcome {
            Ok(Ended::Done) => return Ok(()),
            Ok(Ended::Aborted) if step.first.is_none() => return Ok(()),
            Ok(Ended::Aborted) if step.is_guessing() => match self.take_back(step) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            },
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
