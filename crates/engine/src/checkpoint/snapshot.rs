//! A snapshot of state on the host while it goes on being used: copied aside only where a step comes before the saver.
//!
//! The protocol is in `pages.rs`. Here are the memory and the copies: the saver reads through [`Snapshot::read`], a step
//! calls [`Snapshot::protect`] before it lets anything write, and [`Snapshot::copy_ahead`] copies in the time between two
//! steps, in the order in which the next step will come, so that it need not. A step also says when it begins and ends,
//! see [`Snapshot::step`], and the saver gives way to it: [`Snapshot::give_way`].
//!
//! One snapshot covers the state of all optimizers of a save, so that they share its blocks: whoever steps first takes
//! them, and none waits while another has some to spare. Its regions are laid end to end and cut into pages together, so a
//! hundred small ones are one page.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use forebay_device::{Buffer, Region, file};
use serde::Serialize;

use super::pages::{Duty, Pages, Source};
use crate::error::{Error, Result};

/// The unit that is kept or copied.
pub const PAGE_BYTES: u64 = 4 << 20;

/// The most that a stream pauses after one piece.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Of the time that a saver has worked, the most that it pauses for steps: what is left to it is a quarter or more.
const PAUSE_PER_WORK: u32 = 3;

/// And before it has worked at all.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Blocks of earlier snapshots with the process that made them, kept for the next one: fresh memory may be slow to come
/// by, above all on a virtual machine, and then a step would wait for it. Never more than the last snapshot was allowed.
static SPARE: Mutex<Vec<(u32, Buffer)>> = Mutex::new(Vec::new());

fn spare() -> std::sync::MutexGuard<'static, Vec<(u32, Buffer)>> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives back the memory that is kept for the next snapshot's copies; returns how many bytes that were.
pub fn release_spare() -> u64 {
    let blocks = std::mem::take(&mut *spare());
    blocks.iter().map(|(_, block)| block.bytes()).sum()
}

/// Bytes that are kept for the next snapshot's copies.
pub fn spare_bytes() -> u64 {
    spare().iter().filter(|(process, _)| *process == std::process::id()).map(|(_, block)| block.bytes()).sum()
}

/// A block for a page: one that is kept, or a new one. In a forked child the parent's are not there.
fn take_block(bytes: u64) -> Result<Buffer> {
    let kept = {
        let mut spare = spare();
        let fits = |(process, block): &(u32, Buffer)| *process == std::process::id() && block.bytes() == bytes;
        spare.iter().rposition(fits).map(|index| spare.swap_remove(index).1)
    };
    kept.map_or_else(|| Ok(Buffer::pageable(bytes)?), Ok)
}

/// What a snapshot cost so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SnapshotStats {
    /// Bytes that were copied aside.
    pub copied_bytes: u64,
    /// Bytes of host memory taken for copies.
    pub block_bytes: u64,
    /// How often a step waited for the saver.
    pub stalls: u64,
    /// How long it waited in all.
    pub stall_ns: u64,
    /// How often the saver gave way to a step.
    pub pauses: u64,
}

/// A stretch of memory, and where it begins when all are laid end to end.
#[derive(Debug)]
struct Guarded {
    region: Region,
    start: u64,
}

/// State at one moment.
#[derive(Debug)]
pub struct Snapshot {
    /// In ascending order of address.
    guarded: Vec<Guarded>,
    /// Of all regions together.
    bytes: u64,
    page_bytes: u64,
    /// The pages in the order in which a step comes to them.
    order: Vec<usize>,
    pages: Pages,
    blocks: Vec<OnceLock<Buffer>>,
    /// Why it had to be given up.
    failure: OnceLock<String>,
    copied_bytes: AtomicU64,
    taken_bytes: AtomicU64,
    stalls: AtomicU64,
    stall_ns: AtomicU64,
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        let process = std::process::id();
        let blocks = self.blocks.iter_mut().filter_map(OnceLock::take);
        spare().extend(blocks.map(|block| (process, block)));
    }
}

/// A part of a region that lies in one page.
struct Part {
    page: usize,
    /// Where it begins in the page.
    offset: u64,
    region: Region,
}

impl Snapshot {
    /// Begins a snapshot of regions of host memory that nobody is writing now, given in the order in which they will be
    /// written next. Copies take `budget_bytes` at most.
    pub fn new(arenas: Vec<Region>, next: &[Region], budget_bytes: u64) -> Self {
        Self::with_pages_of(PAGE_BYTES, arenas, next, budget_bytes)
    }

    /// The same with pages of another size, for tests.
    #[doc(hidden)]
    pub fn with_pages_of(page_bytes: u64, mut arenas: Vec<Region>, next: &[Region], budget_bytes: u64) -> Self {
        arenas.retain(|region| region.bytes() > 0);
        arenas.sort_by_key(Region::addr);
        let mut bytes = 0;
        let guarded: Vec<Guarded> = arenas
            .into_iter()
            .map(|region| {
                bytes += region.bytes();
                Guarded { start: bytes - region.bytes(), region }
            })
            .collect();
        let pages = bytes.div_ceil(page_bytes) as usize;
        // The last page may be short of a whole one, and so may a budget that is enough.
        let allowed = usize::try_from(budget_bytes / page_bytes).unwrap_or(usize::MAX);
        let blocks = if budget_bytes >= bytes { pages } else { allowed.min(pages) };
        spare().truncate(allowed.max(blocks));
        let mut snapshot = Self {
            guarded,
            bytes,
            page_bytes,
            order: Vec::new(),
            pages: Pages::new(pages, blocks),
            blocks: (0..blocks).map(|_| OnceLock::new()).collect(),
            failure: OnceLock::new(),
            copied_bytes: AtomicU64::new(0),
            taken_bytes: AtomicU64::new(0),
            stalls: AtomicU64::new(0),
            stall_ns: AtomicU64::new(0),
        };
        let mut known = vec![false; pages];
        let mut order = Vec::with_capacity(pages);
        for region in next {
            for Part { page, .. } in snapshot.parts(region) {
                if !std::mem::replace(&mut known[page], true) {
                    order.push(page);
                }
            }
        }
        snapshot.order = order;
        snapshot
    }

    /// Whether a region is part of the snapshot. It is all of it or none.
    pub fn covers(&self, region: &Region) -> bool {
        self.find(region.addr()).is_some()
    }

    fn find(&self, addr: usize) -> Option<&Guarded> {
        let index = self.guarded.partition_point(|guarded| guarded.region.addr() <= addr).checked_sub(1)?;
        let guarded = &self.guarded[index];
        (addr < guarded.region.addr() + guarded.region.bytes() as usize).then_some(guarded)
    }

    /// Cuts a region at the borders of pages. What is not part of the snapshot has no pages.
    fn parts(&self, region: &Region) -> Vec<Part> {
        let Some(guarded) = self.find(region.addr()) else { return Vec::new() };
        let start = guarded.start + (region.addr() - guarded.region.addr()) as u64;
        let end = (start + region.bytes()).min(guarded.start + guarded.region.bytes());
        let (mut at, mut parts) = (start, Vec::new());
        while at < end {
            let page = at / self.page_bytes;
            let until = ((page + 1) * self.page_bytes).min(end);
            // Inside the region, as `end` is.
            if let Ok(part) = region.slice(at - start, until - at) {
                parts.push(Part { page: page as usize, offset: at % self.page_bytes, region: part });
            }
            at = until;
        }
        parts
    }

    /// Says which regions will be read. All else need not be kept any longer.
    pub fn plan(&self, regions: &[Region]) {
        let mut bytes = vec![0; self.bytes.div_ceil(self.page_bytes) as usize];
        for part in regions.iter().flat_map(|region| self.parts(region)) {
            bytes[part.page] += part.region.bytes();
        }
        self.pages.plan(&bytes);
    }

    /// Hands the bytes of a region as they were at the moment of the snapshot to `look`, in order, a piece at a time. A
    /// disk may take its time with them: what is in the buffer no step waits for. The buffer is gone through round and
    /// round, from byte `start` on, and no piece goes beyond its end.
    pub fn read(
        &self,
        region: &Region,
        buffer: &Buffer,
        start: u64,
        mut look: impl FnMut(&Region) -> Result<()>,
    ) -> Result<()> {
        let mut at = start;
        for part in self.parts(region) {
            let mut done = 0;
            while done < part.region.bytes() {
                at %= buffer.bytes();
                let bytes = (part.region.bytes() - done).min(buffer.bytes() - at);
                let piece = buffer.region(at, bytes)?;
                let taken = match self.pages.begin_read(part.page) {
                    Source::Live => part.region.slice(done, bytes).map_err(Error::from),
                    Source::Copy(block) => match self.blocks[block].get() {
                        Some(copy) => copy.region(part.offset + done, bytes).map_err(Error::from),
                        None => Err(self.given_up()),
                    },
                    Source::Gone => return Err(self.given_up()),
                };
                let taken = taken.and_then(|from| copy(&from, &piece));
                let is_whole = self.pages.end_read(part.page, bytes);
                taken?;
                if !is_whole {
                    return Err(self.given_up());
                }
                look(&piece)?;
                (done, at) = (done + bytes, at + bytes);
            }
        }
        Ok(())
    }

    /// Returns when a region may be written. Pages that are still needed are copied aside, or waited for. Where a copy
    /// fails, the snapshot is given up: a save may fail for lack of memory, a step may not. Says how often it waited, and
    /// for how many nanoseconds.
    pub fn protect(&self, region: &Region) -> (u64, u64) {
        let (mut stalls, mut stall_ns) = (0, 0);
        for part in self.parts(region) {
            let (duty, waited) = self.pages.begin_protect(part.page, true);
            if let Some(waited) = waited {
                (stalls, stall_ns) = (stalls + 1, stall_ns + waited.as_nanos() as u64);
            }
            self.fulfil(part.page, duty);
        }
        self.stalls.fetch_add(stalls, Relaxed);
        self.stall_ns.fetch_add(stall_ns, Relaxed);
        (stalls, stall_ns)
    }

    fn fulfil(&self, page: usize, duty: Duty) {
        let Duty::Copy(block) = duty else { return };
        if let Err(error) = self.copy(page, block) {
            // Before anybody who waits hears of the end.
            let _ = self.failure.set(error.to_string());
            self.pages.finish();
        }
        self.pages.end_copy(page);
    }

    fn copy(&self, page: usize, block: usize) -> Result<()> {
        let memory = match self.blocks[block].get() {
            Some(memory) => memory,
            None => {
                let made = take_block(self.page_bytes)?;
                self.taken_bytes.fetch_add(self.page_bytes, Relaxed);
                self.blocks[block].get_or_init(|| made)
            }
        };
        let start = page as u64 * self.page_bytes;
        let end = (start + self.page_bytes).min(self.bytes);
        let first = self.guarded.partition_point(|guarded| guarded.start + guarded.region.bytes() <= start);
        for Guarded { region, start: at } in self.guarded[first..].iter().take_while(|guarded| guarded.start < end) {
            let (from, to) = (start.max(*at), end.min(at + region.bytes()));
            copy(&region.slice(from - at, to - from)?, &memory.region(from - start, to - from)?)?;
        }
        self.copied_bytes.fetch_add(end - start, Relaxed);
        Ok(())
    }

    /// Copies pages aside for as long as there are blocks and pages to copy, at `bytes_per_s` at most. Several threads may
    /// do this at once, each with its own share: `turn` of `turns`.
    pub fn copy_ahead(&self, turn: usize, turns: usize, bytes_per_s: Option<f64>) {
        let mut pace = Pace::new(bytes_per_s.map(|rate| rate / turns as f64));
        for &page in self.order.iter().skip(turn).step_by(turns) {
            loop {
                let (duty, _) = self.pages.begin_protect(page, false);
                if duty == Duty::None {
                    break;
                }
                if duty != Duty::Busy {
                    self.fulfil(page, duty);
                    self.pages.rest(pace.ahead(self.page_bytes));
                    break;
                }
                // No block is free, or the saver is at it.
                if !self.pages.wait_for_change() {
                    return;
                }
            }
        }
    }

    /// A step begins, and goes on until the value is dropped.
    pub fn step(self: &Arc<Self>) -> Stepping {
        self.pages.begin_step();
        Stepping(self.clone())
    }

    /// Lets a step that is under way have the machine to itself, unless it waits for what is still to be written.
    pub(super) fn give_way(&self, turn: &mut Turn) {
        turn.paused += self.pages.pause(turn.allowance(turn.start.elapsed()));
    }

    /// Ends it: nothing is kept any longer.
    pub fn finish(&self) {
        self.pages.finish();
    }

    /// Whether it has ended.
    pub fn is_over(&self) -> bool {
        self.pages.is_over()
    }

    /// Whether a step would neither copy nor wait.
    pub fn is_safe(&self) -> bool {
        self.pages.is_safe()
    }

    fn given_up(&self) -> Error {
        let why = self.failure.get().map(|why| format!(": {why}")).unwrap_or_default();
        let reason = format!("it was given up before all of it was written{why}");
        Error::Checkpoint { path: "snapshot".to_owned(), reason }
    }

    /// What it cost so far.
    pub fn stats(&self) -> SnapshotStats {
        SnapshotStats {
            copied_bytes: self.copied_bytes.load(Relaxed),
            block_bytes: self.taken_bytes.load(Relaxed),
            stalls: self.stalls.load(Relaxed),
            stall_ns: self.stall_ns.load(Relaxed),
            pauses: self.pages.pauses(),
        }
    }
}

fn copy(from: &Region, to: &Region) -> Result<()> {
    file::copy(from, to).map_err(|error| super::file_error("copy", std::path::Path::new("memory"), &error))
}

/// A step under way, as far as a snapshot is concerned.
#[derive(Debug)]
pub struct Stepping(Arc<Snapshot>);

impl Drop for Stepping {
    fn drop(&mut self) {
        self.0.pages.end_step();
    }
}

/// How long one thread of a saver has been at it, and how much of that it gave way.
#[derive(Debug)]
pub(super) struct Turn {
    start: Instant,
    paused: Duration,
}

impl Turn {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), paused: Duration::ZERO }
    }

    /// How long it may pause now, so long after the start: a save must end, however closely step follows step.
    fn allowance(&self, elapsed: Duration) -> Duration {
        let worked = elapsed.saturating_sub(self.paused);
        (worked * PAUSE_PER_WORK + FIRST_PAUSE).saturating_sub(self.paused)
    }
}

/// Holds a stream of bytes to a rate.
#[derive(Debug)]
pub(super) struct Pace {
    bytes_per_s: Option<f64>,
    start: Instant,
    moved: u64,
}

impl Pace {
    pub(super) fn new(bytes_per_s: Option<f64>) -> Self {
        Self { bytes_per_s, start: Instant::now(), moved: 0 }
    }

    /// Notes bytes, and sleeps if they came too soon.
    pub(super) fn moved(&mut self, bytes: u64) {
        std::thread::sleep(self.ahead(bytes));
    }

    /// Notes bytes, and returns how much too soon they came.
    fn ahead(&mut self, bytes: u64) -> Duration {
        self.early(bytes, self.start.elapsed())
    }

    /// Notes bytes, and returns how much too soon they came, so long after the start.
    fn early(&mut self, bytes: u64, elapsed: Duration) -> Duration {
        let Some(rate) = self.bytes_per_s else { return Duration::ZERO };
        self.moved += bytes;
        // A rate of next to nothing is not for ever.
        let due = Duration::try_from_secs_f64(self.moved as f64 / rate).unwrap_or(LONGEST_PAUSE);
        due.saturating_sub(elapsed).min(LONGEST_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    /// Steps that follow each other without a gap leave a quarter of the time, and a saver that has worked long may pause
    /// long.
    #[test]
    fn pauses_are_a_share_of_the_time() {
        let (mut turn, mut clock) = (Turn { start: Instant::now(), paused: Duration::ZERO }, Duration::ZERO);
        let mut worked = Duration::ZERO;
        while clock < Duration::from_secs(1000) {
            let pause = turn.allowance(clock);
            let work = Duration::from_millis(7);
            turn.paused += pause;
            worked += work;
            clock += pause + work;
        }
        let share = worked.as_secs_f64() / clock.as_secs_f64();
        assert!((0.24..0.26).contains(&share), "{share}");
        let turn = Turn { start: Instant::now(), paused: Duration::ZERO };
        assert_eq!(turn.allowance(Duration::from_secs(2)), Duration::from_secs(7));
    }

    /// A stream that takes no time of its own ends when its bytes over the rate have passed, whatever its pieces.
    #[test]
    fn pace_is_bytes_over_time() {
        for pieces in [vec![MB; 40], vec![40 * MB], vec![3 * MB, 7 * MB, 1, 30 * MB - 1]] {
            let mut pace = Pace::new(Some(10e6));
            let mut clock = Duration::ZERO;
            for bytes in pieces {
                clock += pace.early(bytes, clock);
            }
            assert!(clock.abs_diff(Duration::from_secs(4)) < Duration::from_micros(1), "{clock:?}");
        }
    }

    /// A disk slower than the rate is not slowed down; after a pause of its own the stream may catch up, and no more.
    #[test]
    fn pace_waits_only_for_who_is_early() {
        let mut pace = Pace::new(Some(10e6));
        assert_eq!(pace.early(MB, Duration::from_secs(2)), Duration::ZERO);
        assert_eq!(pace.early(18 * MB, Duration::from_secs(2)), Duration::ZERO);
        let early = pace.early(11 * MB, Duration::from_secs(2));
        assert!(early.abs_diff(Duration::from_secs(1)) < Duration::from_micros(1), "{early:?}");
        assert_eq!(Pace::new(None).early(u64::MAX, Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn pace_of_next_to_nothing_does_not_overflow() {
        for rate in [f64::MIN_POSITIVE, 1e-12, 1e-3] {
            assert_eq!(Pace::new(Some(rate)).early(u64::MAX, Duration::ZERO), LONGEST_PAUSE);
        }
        assert_eq!(Pace::new(Some(f64::INFINITY)).early(u64::MAX, Duration::ZERO), Duration::ZERO);
    }
}
