//! Follows a step in which the host takes part, from both of its ends, for those who wait for its tensors.

use std::ops::Range;
use std::sync::Arc;

use super::schedule::Schedule;
use super::worker::Worker;
use crate::error::Result;
use crate::flow::{Mark, Pipeline};
use crate::optimizer::hybrid::Progress;
use crate::sync::{Mutex, lock};

/// The progress of a step. Both ends may call at once; they take turns.
pub(super) struct HostProgress<'a> {
    worker: &'a Worker,
    /// The numbers of the tables that the step was given.
    tables: &'a [usize],
    schedule: Mutex<Schedule>,
    pipeline: Option<&'a Pipeline>,
}

impl<'a> HostProgress<'a> {
    pub(super) fn new(
        worker: &'a Worker,
        tables: &'a [usize],
        schedule: Schedule,
        pipeline: Option<&'a Pipeline>,
    ) -> Self {
        Self { worker, tables, schedule: Mutex::new(schedule), pipeline }
    }

    pub(super) fn into_schedule(self) -> Schedule {
        std::mem::take(&mut *lock(&self.schedule))
    }

    /// These chunks are updated when the updates' stream gets to its present end.
    fn ran(&self, schedule: &mut Schedule, table: usize, chunks: Range<usize>) -> Result<()> {
        for chunk in chunks {
            let Some(unit) = schedule.layout().chunk(self.tables[table], chunk) else { continue };
            let bytes = schedule.layout().units[unit].bytes;
            schedule.ran(unit);
            lock(&self.worker.report).ran(unit, bytes, schedule.is_late(unit));
        }
        self.worker.publish(schedule, true)
    }
}

impl Progress for HostProgress<'_> {
    fn need(&self, table: usize, chunk: usize) -> i64 {
        let schedule = lock(&self.schedule);
        schedule.layout().chunk(self.tables[table], chunk).and_then(|unit| schedule.need(unit)).unwrap_or(i64::MAX)
    }

    fn on_device(&self, table: usize, chunk: usize) -> Result<()> {
        let mut schedule = lock(&self.schedule);
        let unit = schedule.layout().chunk(self.tables[table], chunk);
        if unit.is_some_and(|unit| schedule.layout().units[unit].on_host) {
            self.pipeline.map_or(Ok(()), |pipeline| pipeline.after_stores(&self.worker.stream))?;
        }
        self.ran(&mut schedule, table, chunk..chunk + 1)
    }

    fn on_host(&self, table: usize, chunks: Range<usize>, sent: Option<&Arc<Mark>>) -> Result<()> {
        let mut schedule = lock(&self.schedule);
        // The copies up share a stream with the fetches of later chunks, so this holds up no update for long.
        sent.map_or(Ok(()), |sent| sent.wait(&self.worker.stream))?;
        self.ran(&mut schedule, table, chunks)
    }
}
