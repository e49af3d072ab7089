//! One running sleep or wake: a thread that keeps the copy engine busy with a few transfers at a time.
//!
//! The caller submits batches and waits for them by number; the thread issues their moves in order. Each move takes a
//! slot of the ring before it is issued and gives it back with the mark that ends it, so no more moves than slots are
//! ever queued. A batch has arrived when the marks at its end are reached.
//!
//! What the events order:
//! - the first move waits for what was on the caller's stream when the transfer began, and on a wake each batch for what
//!   was on it when the batch was submitted: fresh memory may still be in use there;
//! - a staging slot is stored after it was packed, and unpacked after it was fetched;
//! - a slot is used again after its last use has ended, which the thread waits for.

use std::sync::mpsc;
use std::sync::{Arc, PoisonError};

use forebay_device::{Buffer, Cores, Kernel, Region, SharedDevice, Stream, ThreadHandle};

use super::layout::EXTENT_ALIGN_BYTES;
use super::moves::{Move, PackedRange};
use super::{SLOTS, SleepStreams};
use crate::error::{Error, Result};
use crate::flow::{InFlight, Mark, Ring, RingUser};
use crate::sync::{Condvar, Mutex, lock};
use crate::trace::{self, Kind, Label, Reason, Span};

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the device to the slab.
    Sleep,
    /// From the slab to the device.
    Wake,
}

/// A batch on its way to the thread.
#[derive(Debug)]
struct Batch {
    regions: Vec<Region>,
    moves: Vec<(Move, Region)>,
    after: Option<Arc<Mark>>,
}

#[derive(Debug, Default)]
struct Progress {
    /// Batches that the caller has submitted.
    submitted: usize,
    /// The marks that end each batch whose moves have all been issued.
    issued: Vec<[Arc<Mark>; 2]>,
    /// Everything has arrived.
    finished: bool,
    failed: Option<Error>,
}

#[derive(Debug)]
struct TransferCore {
    device: SharedDevice,
    streams: Arc<SleepStreams>,
    direction: Direction,
    /// Staging memory and the bytes of one slot in it.
    staging: Option<(Region, u64)>,
    progress: Mutex<Progress>,
    changed: Condvar,
}

/// A sleep or a wake under way. Ends when finished or dropped, and waits for what is in flight.
#[derive(Debug)]
pub struct Transfer {
    core: Arc<TransferCore>,
    queue: Mutex<Option<mpsc::Sender<Batch>>>,
    thread: Mutex<Option<ThreadHandle>>,
    _turn: Turn,
}

/// The streams serve one transfer at a time.
#[derive(Debug)]
struct Turn(Arc<Mutex<bool>>);

impl Drop for Turn {
    fn drop(&mut self) {
        *lock(&self.0) = false;
    }
}

impl Turn {
    fn take(busy: Arc<Mutex<bool>>) -> Result<Self> {
        let mut taken = lock(&busy);
        if *taken {
            return Err(Error::InvalidOption {
                option: "transfer",
                value: "another one is under way".to_owned(),
                remedy: "finish it first".to_owned(),
            });
        }
        *taken = true;
        drop(taken);
        Ok(Self(busy))
    }
}

impl Transfer {
    pub(super) fn begin(
        device: SharedDevice,
        streams: Arc<SleepStreams>,
        busy: Arc<Mutex<bool>>,
        direction: Direction,
        after: Option<&Stream>,
        staging: Option<&Buffer>,
    ) -> Result<Self> {
        let turn = Turn::take(busy)?;
        let slot_bytes = |memory: &Buffer| memory.bytes() / SLOTS as u64 / EXTENT_ALIGN_BYTES * EXTENT_ALIGN_BYTES;
        let staging = staging.map(|memory| (memory.all(), slot_bytes(memory))).filter(|&(_, bytes)| bytes > 0);
        // A transfer that failed may have left work that it could not wait for.
        streams.idle.iter().try_for_each(|idle| idle.synchronize())?;
        let (progress, changed) = (Mutex::default(), Condvar::new());
        let core = Arc::new(TransferCore { device, streams, direction, staging, progress, changed });
        if let Some(after) = after {
            let begun = core.streams.marks.take()?;
            begun.record(after)?;
            core.wait_for(&begun)?;
        }
        let (queue, batches) = mpsc::channel();
        let worker = core.clone();
        let thread = Cores::here().spawn("forebay-sleeper", move || worker.work(&batches))?;
        Ok(Self { core, queue: Mutex::new(Some(queue)), thread: Mutex::new(Some(thread)), _turn: turn })
    }

    /// Which way it goes.
    pub fn direction(&self) -> Direction {
        self.core.direction
    }

    pub(super) fn slot_bytes(&self) -> Option<u64> {
        self.core.staging.as_ref().map(|&(_, slot_bytes)| slot_bytes)
    }

    pub(super) fn submit(
        &self,
        regions: Vec<Region>,
        moves: Vec<(Move, Region)>,
        after: Option<&Stream>,
    ) -> Result<usize> {
        let after = after
            .map(|stream| {
                let mark = self.core.streams.marks.take()?;
                mark.record(stream)?;
                Ok::<_, Error>(mark)
            })
            .transpose()?;
        let mut progress = lock(&self.core.progress);
        let sent = lock(&self.queue).as_ref().is_some_and(|queue| queue.send(Batch { regions, moves, after }).is_ok());
        if !sent {
            return Err(progress.failed.clone().unwrap_or_else(unknown));
        }
        progress.submitted += 1;
        Ok(progress.submitted - 1)
    }

    /// Blocks until a batch has arrived, whole. Then nothing touches its memory any more.
    pub fn wait(&self, batch: usize) -> Result<()> {
        let waiting = trace::wait();
        let arrived = self.arrive(batch);
        waiting.end(Reason::Sleep, "wait for a batch", 0);
        arrived
    }

    fn arrive(&self, batch: usize) -> Result<()> {
        let mut progress = lock(&self.core.progress);
        let ends = loop {
            match (progress.issued.get(batch), &progress.failed) {
                (Some(ends), _) => break ends.clone(),
                (None, Some(error)) => return Err(error.clone()),
                (None, None) if batch >= progress.submitted => return Err(unknown()),
                (None, None) if progress.finished => return Ok(()),
                (None, None) => {
                    progress = self.core.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        drop(progress);
        ends.iter().try_for_each(|end| end.synchronize())
    }

    /// Whether a batch has arrived.
    pub fn has_arrived(&self, batch: usize) -> Result<bool> {
        let progress = lock(&self.core.progress);
        let Some(ends) = progress.issued.get(batch).cloned() else { return Ok(progress.finished) };
        drop(progress);
        for end in &ends {
            if !end.query()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes no more batches, and blocks until all have arrived and nothing is in flight, also after a failure.
    pub fn finish(&self) -> Result<()> {
        lock(&self.queue).take();
        if let Some(thread) = lock(&self.thread).take()
            && thread.join().is_err()
        {
            self.core.fail(Error::InvalidOption {
                option: "transfer",
                value: "its thread panicked".to_owned(),
                remedy: "report this as a defect".to_owned(),
            });
        }
        let settled = self.core.settle();
        let mut progress = lock(&self.core.progress);
        if let Some(error) = &progress.failed {
            return Err(error.clone());
        }
        settled?;
        progress.finished = true;
        progress.issued.clear();
        Ok(())
    }
}

impl Drop for Transfer {
    /// Memory that is in flight must not go back to its owner.
    fn drop(&mut self) {
        if lock(&self.queue).is_some() {
            let _ = self.finish();
        }
    }
}

fn unknown() -> Error {
    Error::InvalidOption {
        option: "batch",
        value: "no such batch".to_owned(),
        remedy: "the transfer is finished, or the batch was never submitted".to_owned(),
    }
}

impl TransferCore {
    fn copying(&self) -> &Stream {
        match self.direction {
            Direction::Sleep => &self.streams.store,
            Direction::Wake => &self.streams.fetch,
        }
    }

    /// Both streams wait for a mark.
    fn wait_for(&self, mark: &Mark) -> Result<()> {
        mark.wait(self.copying())?;
        mark.wait(&self.streams.pack)
    }

    fn fail(&self, error: Error) {
        lock(&self.progress).failed.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Issues batch after batch until there are no more, or one fails; those behind it are dropped.
    fn work(&self, batches: &mpsc::Receiver<Batch>) {
        let ring = Ring::new(SLOTS);
        let user = ring.join();
        for (number, batch) in batches.iter().enumerate() {
            let outcome = self.issue((&ring, user), batch, number);
            match outcome {
                Ok(ends) => {
                    lock(&self.progress).issued.push(ends);
                    self.changed.notify_all();
                }
                Err(error) => return self.fail(error),
            }
        }
    }

    fn issue(&self, (ring, user): (&Ring<Arc<Mark>>, RingUser), batch: Batch, number: usize) -> Result<[Arc<Mark>; 2]> {
        if let Some(after) = batch.after {
            self.wait_for(&after)?;
        }
        let traced = trace::timed(&self.device, self.copying(), None);
        for (one, slab) in &batch.moves {
            let (slot, _) = ring.acquire()?;
            let issued = self.issue_move(slot, one, slab, &batch.regions);
            // A move that was refused half way may have left work on the slot: it is not used again, the transfer ends.
            ring.give_back(user, InFlight::until(slot, self.streams.slots[slot][1].clone()));
            issued?;
        }
        if let Some(traced) = traced {
            let kind = if self.direction == Direction::Sleep { Kind::Sleep } else { Kind::Wake };
            let (bytes, chunk) = (batch.regions.iter().map(Region::bytes).sum(), Some(number as u32));
            traced.end(self.copying(), Span { bytes, chunk, ..Span::new(kind, Label::Batch) });
        }
        let ends = [self.streams.marks.take()?, self.streams.marks.take()?];
        ends[0].record(self.copying())?;
        ends[1].record(&self.streams.pack)?;
        Ok(ends)
    }

    /// One move, ended by the slot's second mark.
    fn issue_move(&self, slot: usize, one: &Move, slab: &Region, regions: &[Region]) -> Result<()> {
        let (device, copying) = (&self.device, self.copying());
        let [staged, ended] = &self.streams.slots[slot];
        match (one, self.direction) {
            (Move::Direct { item, at_bytes, extent }, direction) => {
                let memory = regions[*item].slice(*at_bytes, extent.bytes)?;
                match direction {
                    Direction::Sleep => device.copy(copying, &memory, slab)?,
                    Direction::Wake => device.copy(copying, slab, &memory)?,
                }
                ended.record(copying)?;
            }
            (Move::Packed { whole, ranges }, Direction::Sleep) => {
                let memory = self.slot(slot, whole.bytes)?;
                let pairs = pairs(&memory, ranges, regions)?;
                device.launch(&self.streams.pack, &Kernel::CopyPairs { pairs: &pairs })?;
                staged.record(&self.streams.pack)?;
                staged.wait(copying)?;
                device.copy(copying, &memory, slab)?;
                ended.record(copying)?;
            }
            (Move::Packed { whole, ranges }, Direction::Wake) => {
                let memory = self.slot(slot, whole.bytes)?;
                device.copy(copying, slab, &memory)?;
                staged.record(copying)?;
                staged.wait(&self.streams.pack)?;
                let pairs: Vec<_> = pairs(&memory, ranges, regions)?.into_iter().map(|(a, b)| (b, a)).collect();
                device.launch(&self.streams.pack, &Kernel::CopyPairs { pairs: &pairs })?;
                ended.record(&self.streams.pack)?;
            }
        }
        Ok(())
    }

    fn slot(&self, slot: usize, bytes: u64) -> Result<Region> {
        let (staging, slot_bytes) = self.staging.as_ref().ok_or_else(|| Error::InvalidOption {
            option: "staging",
            value: "none".to_owned(),
            remedy: "nothing is packed without staging memory".to_owned(),
        })?;
        Ok(staging.slice(slot as u64 * slot_bytes, bytes)?)
    }

    /// Blocks until both streams are idle.
    fn settle(&self) -> Result<()> {
        let mut outcome = Ok(());
        for (idle, stream) in self.streams.idle.iter().zip([self.copying(), &self.streams.pack]) {
            // A refused call is tried once more: without it memory would go back while it may still be in use. A mark
            // whose recording was refused is recorded by the wait.
            let _ = idle.record(stream);
            outcome = outcome.and(idle.synchronize().or_else(|_| idle.synchronize()));
        }
        outcome
    }
}

/// Storages and their places in a staging slot.
fn pairs(slot: &Region, ranges: &[PackedRange], regions: &[Region]) -> Result<Vec<(Region, Region)>> {
    ranges
        .iter()
        .map(|range| {
            Ok((regions[range.item].slice(range.at_bytes, range.bytes)?, slot.slice(range.offset_bytes, range.bytes)?))
        })
        .collect()
}
