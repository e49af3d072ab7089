//! An overlapped step as its thread has it: what it was told, and what is known of each gradient.

use std::collections::VecDeque;
use std::sync::Arc;

use forebay_device::{Region, Scalars};

use super::guess::{Guess, GuessMemory};
use super::handover::Sleep;
use super::schedule::{Layout, Need, Part, Schedule};
use super::worker::NAP;
use crate::error::{Error, Result};
use crate::flow::{Mark, Pipeline};
use crate::optimizer::hybrid::Hybrid;
use crate::optimizer::segments::{Binding, StepInputs, TableInput, TableStep};
use crate::optimizer::table::StateTable;
use crate::plan::state_bytes;

/// Fetches are queued for this part of the ring's slots at most, but for so many in any case.
const AHEAD_OF_RING: usize = 4;
const LEAST_AHEAD: usize = 4;

/// At most so many offered gradients are looked at in a row when none of them is final.
const LOOKS: usize = 16;

/// What the thread is told.
#[derive(Debug)]
pub(super) enum Message {
    Begin(Box<NewStep>),
    Offer(Box<Offer>),
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
    /// Updates what is not resident, where the host takes part.
    pub(super) hybrid: Option<Arc<Hybrid>>,
    pub(super) scalars: Vec<Scalars>,
    /// What a step needs that updates on the second copy before it is known whether it is clipped.
    pub(super) guess: Option<Arc<GuessMemory>>,
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
    /// Gradients that are on the host already, by table and tensor.
    pub(super) landed: Vec<Vec<Option<Region>>>,
    pub(super) mark: Option<Arc<Mark>>,
    pub(super) grad_scale: Option<Region>,
    pub(super) skip: Option<Region>,
    pub(super) scalars: Vec<Scalars>,
}

/// The step under way.
pub(super) struct Step {
    pub(super) tables: Vec<Arc<StateTable>>,
    pub(super) inputs: Vec<TableInput>,
    pub(super) values: StepInputs,
    pub(super) schedule: Schedule,
    pub(super) pipeline: Option<Arc<Pipeline>>,
    /// Until it has run.
    pub(super) hybrid: Option<Arc<Hybrid>>,
    landed: Vec<Vec<Option<Region>>>,
    /// Gradients that were offered and not seen to be final, in the order of the offers.
    offered: VecDeque<(Arc<Mark>, usize)>,
    /// The commit's mark, until the updates' stream waits for it or it was reached.
    pub(super) commit: Option<Arc<Mark>>,
    /// The first unit of which something was submitted.
    pub(super) first: Option<usize>,
    pub(super) guess: Option<Guess>,
    /// Ends of fetches that were not seen to be over, the oldest first.
    pub(super) ahead: VecDeque<Arc<Mark>>,
}

impl Step {
    pub(super) fn new(new: NewStep) -> Self {
        let NewStep { tables, layout, order, pipeline, hybrid, scalars, guess } = new;
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
            guess: guess.map(|memory| Guess::new(memory, tables.len())),
            landed: Vec::new(),
            ahead: VecDeque::new(),
            tables,
            pipeline,
            hybrid,
        }
    }

    pub(super) fn table(&self, table: usize) -> TableStep<'_> {
        let landed = self.landed.get(table).map_or(&[][..], Vec::as_slice);
        TableStep { table: &self.tables[table], input: &self.inputs[table], landed }
    }

    /// Bytes of the state of a unit whose state is on the device.
    pub(super) fn state_bytes(&self, unit: usize) -> u64 {
        let of = &self.schedule.layout().units[unit];
        let specs = self.tables[of.table].plan().tensors();
        match of.part {
            Part::Tensor(tensor) => state_bytes(&specs[tensor].columns, specs[tensor].elements),
            Part::Chunk(_) => 0,
        }
    }

    pub(super) fn take_offer(&mut self, offer: Offer) {
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

    pub(super) fn take_commit(&mut self, commit: Commit) {
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
        (self.commit, self.landed) = (commit.mark, commit.landed);
        if self.commit.is_none() && !self.is_guessing() {
            self.schedule.reach_commit();
        }
    }

    /// Whether it is not known yet what the updates so far count for.
    pub(super) fn is_guessing(&self) -> bool {
        self.guess.as_ref().is_some_and(|guess| !guess.is_decided())
    }

    /// Whether there is something to look at again soon.
    pub(super) fn is_looking(&self) -> bool {
        !self.offered.is_empty() || (self.is_guessing() && self.schedule.is_committed())
    }

    /// How long the thread may sleep if it has nothing to submit.
    pub(super) fn nap(&self) -> Sleep {
        if self.is_looking() || !self.ahead.is_empty() { Sleep::For(NAP) } else { Sleep::UntilMail }
    }

    /// Whether as many fetches are queued as the wire needs to stay busy. A larger ring is there for chunks that wait for
    /// their update behind long kernels; if all of its slots were fetched into ahead, what becomes final next and is needed
    /// first would stand behind all of them.
    pub(super) fn has_fetches_enough(&mut self) -> Result<bool> {
        while let Some(oldest) = self.ahead.front()
            && oldest.query()?
        {
            self.ahead.pop_front();
        }
        let slots = self.pipeline.as_ref().map_or(0, |pipeline| pipeline.slots());
        Ok(self.ahead.len() >= (slots / AHEAD_OF_RING).max(LEAST_AHEAD))
    }

    /// Looks which gradients have become final. Streams reach their marks in the order of the offers, and there are few
    /// streams: a few looks in vain are enough.
    pub(super) fn look(&mut self) -> Result<()> {
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
            && !self.is_guessing()
            && let Some(mark) = &self.commit
            && mark.query()?
        {
            self.commit = None;
            self.schedule.reach_commit();
        }
        Ok(())
    }

    /// What is wrong with a step that was given up when some of it had been submitted.
    pub(super) fn torn(&self) -> Error {
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
