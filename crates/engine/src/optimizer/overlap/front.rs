//! The caller's side of overlapped steps: the step between begin and commit, and what later calls wait for.

use std::sync::{Arc, Weak};

use forebay_device::{Cores, Error as DeviceError, Scalars, SharedDevice, Stream, ThreadHandle};

use super::guess::GuessMemory;
use super::handover::{Handover, Phase};
use super::points::Points;
use super::report::Report;
use super::schedule::Layout;
use super::step::Message;
use super::worker::Worker;
use crate::error::{Error, Result};
use crate::flow::{Mark, Marks, Pipeline};
use crate::optimizer::scalars::{ScalarSets, SharedPowers};
use crate::optimizer::table::StateTable;
use crate::sync::{Mutex, lock};

/// What overlapped steps of one optimizer need; made with the first of them.
#[derive(Debug)]
pub(in crate::optimizer) struct Overlap {
    pub(super) device: SharedDevice,
    pub(super) points: Arc<Points>,
    pub(super) handover: Arc<Handover<Message>>,
    pub(super) report: Arc<Mutex<Report>>,
    pub(super) marks: Arc<Marks>,
    /// What the caller's stream had reached at the commit.
    pub(super) committed: Arc<Mark>,
    pub(super) front: Mutex<Front>,
    /// The last point for which each stream waits; for the host without a stream.
    pub(super) waited: Mutex<Vec<(Option<Stream>, u64)>>,
    pub(super) thread: Mutex<Option<ThreadHandle>>,
    pub(super) pid: u32,
}

/// The caller's side.
#[derive(Debug, Default)]
pub(super) struct Front {
    pub(super) layout: Arc<Layout>,
    /// By tensor: what the caller's stream had reached when its gradient was offered.
    pub(super) ready: Vec<Arc<Mark>>,
    /// By tensor: the group that it had in the last step.
    pub(super) groups: Vec<Option<u32>>,
    /// Whether parameters are on the host, where no stream orders who reads them.
    pub(super) on_host: bool,
    pub(super) pipeline: Weak<Pipeline>,
    /// What steps need that guess; made with the first of them.
    pub(super) guess: Option<Arc<GuessMemory>>,
    /// Whether the step under way, or the last one, guesses: then state may change its side until all was submitted.
    pub(super) guesses: bool,
    pub(super) step: Option<OpenStep>,
}

/// A step between begin and commit.
pub(super) struct OpenStep {
    pub(super) tables: Vec<Arc<StateTable>>,
    pub(super) sets: ScalarSets<'static>,
    /// Sets that the thread knows already.
    pub(super) sent: usize,
    pub(super) powers: SharedPowers,
    /// By tensor: what its next update will have if it stays in its group.
    pub(super) expected: Vec<Option<Expected>>,
    /// By tensor: what it has if it was offered.
    pub(super) offered: Vec<Option<Expected>>,
    /// By tensor: bytes of its gradient, if it was offered.
    pub(super) grad_bytes: Vec<u64>,
    /// Whether its updates go to the second copy until the commit says what they count for.
    pub(super) guesses: bool,
    /// Whether the host takes part: then gradients of tensors that are not resident are handed over at the commit.
    pub(super) shared: bool,
}

/// A tensor's numbers in a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected {
    pub(super) group: u32,
    pub(super) set: u32,
    pub(super) update: u64,
    pub(super) steps: f32,
}

impl std::fmt::Debug for OpenStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenStep").field("tables", &self.tables.len()).finish_non_exhaustive()
    }
}

impl OpenStep {
    /// A tensor's numbers in a group.
    pub(super) fn numbers(&mut self, layout: &Layout, tensor: usize, group: u32) -> Result<Expected> {
        match self.expected[tensor] {
            Some(expected) if expected.group == group => Ok(expected),
            _ => {
                let (table, place) = layout.home(tensor);
                self.advance(table, place, group)
            }
        }
    }

    fn advance(&mut self, table: usize, place: usize, group: u32) -> Result<Expected> {
        let (mut steps, spec) = (self.tables[table].steps()?[place], &self.tables[table].plan().tensors()[place]);
        let (set, update) = self.sets.advance(&self.powers, group, &mut steps, spec.elements)?;
        Ok(Expected { group, set, update, steps })
    }

    /// Sets that the thread does not know.
    pub(super) fn unsent(&mut self) -> Vec<Scalars> {
        let new = self.sets.scalars[self.sent..].to_vec();
        self.sent = self.sets.scalars.len();
        new
    }
}

impl Overlap {
    pub(super) fn new(device: &SharedDevice, owner: u32) -> Result<Self> {
        let marks = Marks::new(device.clone());
        let overlap = Self {
            points: Arc::new(Points::new(&marks)?),
            handover: Arc::new(Handover::new()),
            report: Arc::new(Mutex::new(Report::new())),
            committed: marks.take()?,
            front: Mutex::default(),
            waited: Mutex::default(),
            thread: Mutex::new(None),
            pid: std::process::id(),
            device: device.clone(),
            marks,
        };
        let worker = Worker {
            device: device.clone(),
            stream: device.urgent_stream("updates")?,
            points: overlap.points.clone(),
            handover: overlap.handover.clone(),
            report: overlap.report.clone(),
            owner,
        };
        let thread = Cores::here().spawn("forebay-overlap", move || worker.run())?;
        *lock(&overlap.thread) = Some(thread);
        Ok(overlap)
    }

    /// In a forked child there is no thread, and one of the parent's may hold a lock for ever.
    pub(super) fn not_forked(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::Device(DeviceError::Forked { device: self.device.info().name.clone() }))
    }

    /// Ends the thread: a step that is committed is completed first, an open one is given up.
    pub(in crate::optimizer) fn close(&self) {
        if self.not_forked().is_err() {
            return;
        }
        lock(&self.front).step = None;
        self.handover.abort_open(Message::Abort);
        self.handover.close();
        let thread = lock(&self.thread).take();
        // A panic of the thread's was caught and is the step's failure.
        let _ = thread.map(ThreadHandle::join);
    }

    /// Returns when a committed step was submitted. An open step is an error.
    pub(in crate::optimizer) fn finish(&self) -> Result<()> {
        self.check_not_open()?;
        self.handover.wait(None).map(drop)
    }

    /// The same for one tensor.
    pub(in crate::optimizer) fn finish_tensor(&self, table: usize, tensor: usize) -> Result<()> {
        self.check_not_open()?;
        let front = lock(&self.front);
        if front.guesses {
            // Its state may move with that of others, also if it has no update.
            drop(front);
            return self.finish();
        }
        let number = front.layout.number(table, tensor);
        drop(front);
        number.map_or(Ok(()), |number| self.handover.wait(Some(&[number])).map(drop))
    }

    fn check_not_open(&self) -> Result<()> {
        self.not_forked()?;
        if self.handover.phase() == Phase::Open {
            return Err(Error::InvalidOption {
                option: "optimizer",
                value: "in the middle of an overlapped step".to_owned(),
                remedy: "call step() first".to_owned(),
            });
        }
        Ok(())
    }

    /// Why the state cannot be trusted.
    pub(in crate::optimizer) fn failed(&self) -> Option<Error> {
        self.not_forked().ok().and_then(|()| self.handover.failed())
    }

    pub(in crate::optimizer) fn forget_failure(&self) {
        if self.not_forked().is_ok() {
            self.handover.forget_failure();
        }
    }

    /// The numbers of some tensors. Those that were added since have no update that anybody could wait for.
    pub(super) fn numbers(&self, homes: &[(usize, usize)]) -> Vec<usize> {
        let front = lock(&self.front);
        homes.iter().filter_map(|&(table, tensor)| front.layout.number(table, tensor)).collect()
    }

    /// Orders a stream behind all updates that were submitted.
    pub(in crate::optimizer) fn order_all(&self, stream: &Stream) -> Result<()> {
        self.order(self.points.latest(), Some(stream)).map(drop)
    }

    /// Orders a stream, or without one the host, behind a point. Whether it was not reached yet.
    pub(super) fn order(&self, point: u64, stream: Option<&Stream>) -> Result<bool> {
        let is_same = |of: &Option<Stream>| match (of, stream) {
            (None, None) => true,
            (Some(of), Some(stream)) => of.is_same(stream),
            _ => false,
        };
        if lock(&self.waited).iter().any(|(of, until)| is_same(of) && *until >= point) {
            return Ok(false);
        }
        // Once reached, it is for all: what a stream is given from now on comes after it.
        let under_way = !self.points.is_reached(point)?;
        if under_way {
            self.points.wait(point, stream)?;
        }
        let mut waited = lock(&self.waited);
        match waited.iter_mut().find(|(of, _)| is_same(of)) {
            Some((_, until)) => *until = point.max(*until),
            None => waited.push((stream.cloned(), point)),
        }
        Ok(under_way)
    }
}

impl Drop for Overlap {
    fn drop(&mut self) {
        self.close();
    }
}

pub(super) fn unknown(table: usize, tensor: usize) -> Error {
    Error::InvalidOption {
        option: "tensor",
        value: format!("{tensor} of table {table}"),
        remedy: "there is no such tensor".to_owned(),
    }
}

pub(super) fn not_open() -> Error {
    Error::InvalidOption {
        option: "overlapped step",
        value: "not begun".to_owned(),
        remedy: "call overlap_begin first".to_owned(),
    }
}
