//! Steps that update on a second copy of the state before it is known whether their gradients are clipped.
//!
//! [Note: a guess] A gradient that is offered is used at once, as if the coefficient of the commit were 1.
//! 1. The update reads the current side of the state and writes the other one. The weights have no second copy: they are
//!    overwritten. So an update first compares them with the roundings of their masters, in the slot. Where some weight is
//!    another one, as after it was replaced by hand, the update leaves its whole chunk as it is and says so in a flag: the
//!    chunk was *held*.
//! 2. Nobody is told of these updates, so nobody reads such a weight, and gradients stay.
//! 3. When the stream has come to the commit, the coefficient and the flags are copied to the host: the answer.
//! 4. If the coefficient is 1 the guess was right. The other side of each table that was updated becomes the current one.
//!    Chunks that were held, and all that had not run, are updated now, from the earlier side to the current one. Chunks
//!    without a gradient are carried over as they are, when nothing else is left to do.
//! 5. Else the sides stay. Everything is updated with the coefficient, in place. Where the guess has overwritten the
//!    weights, the masters count as they are: each weight was the rounding of its master, so the bits are those of an
//!    update that comes first.
//! 6. A step that is given up before its commit writes the rounding of each master over its weight, but where a chunk was
//!    held. Then all is as it was before the step.

use std::sync::Arc;

use forebay_device::update::MASTER;
use forebay_device::{Backend, Buffer, Kernel, Region, SharedDevice, Slab};

use super::schedule::Layout;
use super::step::Step;
use super::worker::Worker;
use crate::error::{Error, Result};
use crate::flow::{Mark, Marks};
use crate::memory::{Allocator, Lease};
use crate::optimizer::segments::Work;
use crate::optimizer::sides::Side;
use crate::optimizer::streamed::Way;
use crate::plan::TensorSpec;
use crate::sync::lock;

/// Bytes of a flag and of the coefficient, an f32 each.
const WORD_BYTES: u64 = 4;

/// What steps that guess need, the same from step to step.
#[derive(Debug)]
pub(super) struct GuessMemory {
    /// By unit, on the device: not zero where it was held.
    held: Buffer,
    /// On the host: the coefficient, then the flags of all units.
    answer: Lease<Slab>,
    /// The end of their copies.
    answered: Arc<Mark>,
    units: usize,
}

impl GuessMemory {
    pub(super) fn new(device: &SharedDevice, marks: &Arc<Marks>, units: usize) -> Result<Self> {
        let (memory, bytes) = (Allocator::new(device.clone()), units as u64 * WORD_BYTES);
        Ok(Self {
            held: memory.alloc(bytes.max(WORD_BYTES))?,
            answer: memory.pin(&[WORD_BYTES + bytes])?,
            answered: marks.take()?,
            units,
        })
    }

    /// Whether it is for this many units.
    pub(super) fn is_for(&self, units: usize) -> bool {
        self.units == units
    }

    fn flag(&self, unit: usize) -> Result<Region> {
        Ok(self.held.region(unit as u64 * WORD_BYTES, WORD_BYTES)?)
    }
}

/// How far a guess has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// It goes on.
    Open,
    /// The answer is on its way.
    Asked,
    Decided,
}

/// A step's guess.
pub(super) struct Guess {
    memory: Arc<GuessMemory>,
    phase: Phase,
    /// Units that were updated on the other side.
    ran: Vec<usize>,
    /// By unit: whether a guess has overwritten its weights, and it is done again.
    again: Vec<bool>,
    /// By table: whether its sides were exchanged.
    moved: Vec<bool>,
    /// Units without a gradient, of tables whose sides were exchanged.
    carried: Vec<usize>,
}

impl Guess {
    pub(super) fn new(memory: Arc<GuessMemory>, tables: usize) -> Self {
        let again = vec![false; memory.units];
        Self { memory, phase: Phase::Open, ran: Vec::new(), again, moved: vec![false; tables], carried: Vec::new() }
    }

    pub(super) fn is_decided(&self) -> bool {
        self.phase == Phase::Decided
    }

    /// Where a unit's state comes from and goes to after the decision.
    pub(super) fn way(&self, layout: &Layout, unit: usize) -> Way<'static> {
        let from = if self.moved[layout.units[unit].table] { Side::Other } else { Side::Current };
        let work = if self.again[unit] { Work::Again } else { Work::Update };
        Way { from, to: Some(Side::Current), work }
    }
}

impl Worker {
    /// Goes on with a step that guesses; whether something was submitted.
    pub(super) fn guess(&self, step: &mut Step) -> Result<bool> {
        let Some(Guess { phase, memory, ran, .. }) = &step.guess else { return Ok(false) };
        if *phase == Phase::Asked {
            return if memory.answered.query()? { self.decide(step).map(|()| true) } else { Ok(false) };
        }
        let (memory, is_first) = (memory.clone(), ran.is_empty());
        let reached = |mark: &Arc<Mark>| mark.query();
        let may_ask = step.schedule.is_committed() && step.commit.as_ref().map_or(Ok(true), reached)?;
        if !may_ask && step.has_fetches_enough()? {
            return Ok(false);
        }
        // What is left is updated after the decision, for which others wait. One unit at least: so it does not depend on
        // time whether a step has guessed.
        let next = if may_ask && !is_first { None } else { step.schedule.next_offered() };
        let Some(unit) = next else {
            return if may_ask { self.ask(step).map(|()| true) } else { Ok(false) };
        };
        if is_first {
            self.device.launch(&self.stream, &Kernel::Fill { dst: memory.held.all(), byte: 0 })?;
        }
        self.follow(step, unit)?;
        let flag = memory.flag(unit)?;
        // From here on its weights may be overwritten.
        step.guess.iter_mut().for_each(|guess| guess.ran.push(unit));
        let way = Way { from: Side::Current, to: Some(Side::Other), work: Work::Guess(&flag) };
        self.run_unit(step, unit, way)?;
        step.schedule.ran(unit);
        lock(&self.report).ran(unit, step.schedule.layout().units[unit].bytes, false);
        Ok(true)
    }

    /// Lets the answer come to the host, behind all updates so far. The commit's mark was reached.
    fn ask(&self, step: &mut Step) -> Result<()> {
        let Some(guess) = &mut step.guess else { return Ok(()) };
        guess.phase = Phase::Asked;
        // It was seen to be reached, so all that is submitted from now on comes after it.
        step.commit = None;
        if guess.ran.is_empty() {
            guess.phase = Phase::Decided;
            step.schedule.reach_commit();
            return Ok(());
        }
        if let Some(scale) = &step.values.grad_scale {
            self.device.copy(&self.stream, scale, &guess.memory.answer.part(0)?.slice(0, WORD_BYTES)?)?;
        }
        self.fetch_flags(&guess.memory)
    }

    fn fetch_flags(&self, memory: &GuessMemory) -> Result<()> {
        let bytes = memory.units as u64 * WORD_BYTES;
        let (from, to) = (memory.held.region(0, bytes)?, memory.answer.part(0)?.slice(WORD_BYTES, bytes)?);
        self.device.copy(&self.stream, &from, &to)?;
        memory.answered.record(&self.stream)
    }

    /// The answer is there.
    fn decide(&self, step: &mut Step) -> Result<()> {
        let Some(guess) = &mut step.guess else { return Ok(()) };
        let answer = crate::optimizer::read_f32(&self.device, &guess.memory.answer.part(0)?)?;
        let accepted = step.values.grad_scale.is_none() || answer[0] == 1.0;
        lock(&self.report).guessed(accepted);
        step.schedule.reach_commit();
        let layout = step.schedule.layout_shared();
        for &unit in &guess.ran {
            let (was_held, table) = (answer[1 + unit] != 0.0, layout.units[unit].table);
            if accepted && !was_held {
                guess.moved[table] = true;
            } else {
                guess.again[unit] = !was_held;
                step.schedule.again(unit);
            }
        }
        let moved = step.tables.iter().zip(&guess.moved).filter(|(_, moved)| **moved);
        moved.map(|(table, _)| table).try_for_each(|table| table.exchange())?;
        let stays = |&unit: &usize| {
            let of = &layout.units[unit];
            guess.moved[of.table] && of.bytes > 0 && step.schedule.need(unit).is_none()
        };
        guess.carried = (0..layout.units.len()).filter(stays).collect();
        guess.phase = Phase::Decided;
        Ok(())
    }

    /// Carries one unit without a gradient over; whether there was one.
    pub(super) fn carry(&self, step: &mut Step) -> Result<bool> {
        let Some(unit) = step.guess.as_mut().and_then(|guess| guess.carried.pop()) else { return Ok(false) };
        let way = Way { from: Side::Other, to: Some(Side::Current), work: Work::Carry };
        self.run_unit(step, unit, way)?;
        Ok(true)
    }

    /// Brings the weights back that a guess has overwritten, and returns when they are there.
    pub(super) fn take_back(&self, step: &Step) -> Result<()> {
        let (Some(guess), Some(pipeline)) = (&step.guess, &step.pipeline) else { return Ok(()) };
        let _entered = self.device.enter()?;
        lock(&self.report).guessed(false);
        self.fetch_flags(&guess.memory)?;
        guess.memory.answered.synchronize()?;
        let answer = crate::optimizer::read_f32(&self.device, &guess.memory.answer.part(0)?)?;
        let way = Way { from: Side::Current, to: None, work: Work::Restore };
        let overwritten = guess.ran.iter().filter(|&&unit| answer[1 + unit] == 0.0);
        overwritten.copied().try_for_each(|unit| self.submit_unit(step, unit, way).map(drop))?;
        pipeline.drain()?;
        self.points.record(&self.stream).and_then(|point| self.points.wait(point, None))
    }
}

/// Refuses steps that cannot guess.
pub(super) fn check(device: &SharedDevice, has_second: bool, on_host: bool) -> Result<()> {
    let refuse = |value: &str, remedy: &str| {
        Err(Error::InvalidOption { option: "speculative step", value: value.to_owned(), remedy: remedy.to_owned() })
    };
    if device.info().backend == Backend::Torch {
        return refuse(
            "on the backend torch",
            "only cpu and cuda have its kernels; begin a step that is not speculative",
        );
    }
    if on_host {
        return refuse("with updates on the host", "use placement stream");
    }
    if !has_second { refuse("without a second copy of the state", "open a second copy first") } else { Ok(()) }
}

/// Refuses a gradient that cannot be used on the second copy.
pub(super) fn check_offer(spec: &TensorSpec, is_resident: bool) -> Result<()> {
    let refuse = |reason: &str| Err(Error::PlanMismatch { tensor: spec.name.clone(), reason: reason.to_owned() });
    if is_resident || spec.on_host {
        return refuse("its state or its weight has no second copy; hand its gradient over at the commit");
    }
    if !spec.columns.contains(&MASTER) {
        return refuse("a speculative step needs its master to bring it back; hand its gradient over at the commit");
    }
    Ok(())
}

/// Why a commit is refused.
pub(super) fn no_skip() -> Error {
    Error::InvalidOption {
        option: "skip",
        value: "with a speculative step".to_owned(),
        remedy: "give the step up with overlap_abort to skip it".to_owned(),
    }
}
