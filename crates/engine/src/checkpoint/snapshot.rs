//! A snapshot of state on the host while it goes on being used: copied aside only where a step comes before the saver.
//!
//! The protocol is in `pages.rs`. Here are the memory and the copies: the saver reads through [`Snapshot::read`], a step
//! calls [`Snapshot::protect`] before it lets anything write, and [`Snapshot::copy_ahead`] copies in the time between two
//! steps, in the order in which the next step will come, so that it need not.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use forebay_device::{Buffer, Region, file};
use serde::Serialize;

use super::pages::{Duty, Pages, Source};
use crate::error::{Error, Result};

/// The unit that is kept or copied.
const PAGE_BYTES: u64 = 4 << 20;

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
}

/// A stretch of memory and the number of its first page.
#[derive(Debug)]
struct Guarded {
    region: Region,
    first_page: usize,
}

impl Guarded {
    fn pages(&self) -> usize {
        self.region.bytes().div_ceil(PAGE_BYTES) as usize
    }
}

/// State at one moment.
#[derive(Debug)]
pub struct Snapshot {
    /// In ascending order of address.
    guarded: Vec<Guarded>,
    /// The pages in the order in which a step comes to them.
    order: Vec<usize>,
    pages: Pages,
    blocks: Vec<OnceLock<Buffer>>,
    copied_bytes: AtomicU64,
    taken_bytes: AtomicU64,
    stalls: AtomicU64,
    stall_ns: AtomicU64,
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
    pub fn new(mut arenas: Vec<Region>, next: &[Region], budget_bytes: u64) -> Self {
        arenas.retain(|region| region.bytes() > 0);
        arenas.sort_by_key(Region::addr);
        let mut first_page = 0;
        let guarded: Vec<Guarded> = arenas
            .into_iter()
            .map(|region| {
                let guarded = Guarded { region, first_page };
                first_page += guarded.pages();
                guarded
            })
            .collect();
        let blocks = (budget_bytes / PAGE_BYTES).min(first_page as u64) as usize;
        let mut snapshot = Self {
            guarded,
            order: Vec::new(),
            pages: Pages::new(first_page, blocks),
            blocks: (0..blocks).map(|_| OnceLock::new()).collect(),
            copied_bytes: AtomicU64::new(0),
            taken_bytes: AtomicU64::new(0),
            stalls: AtomicU64::new(0),
            stall_ns: AtomicU64::new(0),
        };
        let mut known = vec![false; first_page];
        let mut order = Vec::with_capacity(first_page);
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
        let start = (region.addr() - guarded.region.addr()) as u64;
        let end = (start + region.bytes()).min(guarded.region.bytes());
        let (mut at, mut parts) = (start, Vec::new());
        while at < end {
            let page = at / PAGE_BYTES;
            let until = ((page + 1) * PAGE_BYTES).min(end);
            // Inside the region, as `end` is.
            if let Ok(part) = region.slice(at - start, until - at) {
                parts.push(Part { page: guarded.first_page + page as usize, offset: at % PAGE_BYTES, region: part });
            }
            at = until;
        }
        parts
    }

    /// Says which regions will be read. All else need not be kept any longer.
    pub fn plan(&self, regions: &[Region]) {
        let pages = self.guarded.last().map_or(0, |last| last.first_page + last.pages());
        let mut bytes = vec![0; pages];
        for part in regions.iter().flat_map(|region| self.parts(region)) {
            bytes[part.page] += part.region.bytes();
        }
        self.pages.plan(&bytes);
    }

    /// Hands the bytes of a region as they were at the moment of the snapshot to `look`, in order, a buffer at a time. A
    /// disk may take its time with them: what is in the buffer no step waits for.
    pub fn read(&self, region: &Region, buffer: &Buffer, mut look: impl FnMut(&Region) -> Result<()>) -> Result<()> {
        for part in self.parts(region) {
            let mut done = 0;
            while done < part.region.bytes() {
                let bytes = (part.region.bytes() - done).min(buffer.bytes());
                let piece = buffer.region(0, bytes)?;
                let taken = match self.pages.begin_read(part.page) {
                    Source::Live => part.region.slice(done, bytes).map_err(Error::from),
                    Source::Copy(block) => match self.blocks[block].get() {
                        Some(copy) => copy.region(part.offset + done, bytes).map_err(Error::from),
                        None => Err(given_up()),
                    },
                    Source::Gone => return Err(given_up()),
                };
                let taken = taken.and_then(|from| copy(&from, &piece));
                self.pages.end_read(part.page, bytes);
                taken?;
                look(&piece)?;
                done += bytes;
            }
        }
        Ok(())
    }

    /// Returns when a region may be written. Pages that are still needed are copied aside, or waited for.
    pub fn protect(&self, region: &Region) -> Result<()> {
        for part in self.parts(region) {
            let (duty, waited) = self.pages.begin_protect(part.page, true);
            if let Some(waited) = waited {
                self.stalls.fetch_add(1, Relaxed);
                self.stall_ns.fetch_add(waited.as_nanos() as u64, Relaxed);
            }
            self.fulfil(part.page, duty)?;
        }
        Ok(())
    }

    fn fulfil(&self, page: usize, duty: Duty) -> Result<()> {
        let Duty::Copy(block) = duty else { return Ok(()) };
        let outcome = self.copy(page, block);
        if outcome.is_err() {
            // Without the copy there is no snapshot any more; whoever waits for it must not wait for ever.
            self.pages.finish();
        }
        self.pages.end_copy(page);
        outcome
    }

    fn copy(&self, page: usize, block: usize) -> Result<()> {
        let index = self.guarded.partition_point(|guarded| guarded.first_page <= page) - 1;
        let guarded = &self.guarded[index];
        let offset = (page - guarded.first_page) as u64 * PAGE_BYTES;
        let from = guarded.region.slice(offset, (guarded.region.bytes() - offset).min(PAGE_BYTES))?;
        let memory = match self.blocks[block].get() {
            Some(memory) => memory,
            None => {
                let made = Buffer::pageable(PAGE_BYTES)?;
                self.taken_bytes.fetch_add(PAGE_BYTES, Relaxed);
                self.blocks[block].get_or_init(|| made)
            }
        };
        let to = memory.region(0, from.bytes())?;
        copy(&from, &to)?;
        self.copied_bytes.fetch_add(from.bytes(), Relaxed);
        Ok(())
    }

    /// Copies pages aside for as long as there are blocks and pages to copy, at `bytes_per_s` at most. Several threads may
    /// do this at once, each with its own share: `turn` of `turns`.
    pub fn copy_ahead(&self, turn: usize, turns: usize, bytes_per_s: Option<f64>) -> Result<()> {
        let mut pace = Pace::new(bytes_per_s.map(|rate| rate / turns as f64));
        for &page in self.order.iter().skip(turn).step_by(turns) {
            loop {
                let (duty, _) = self.pages.begin_protect(page, false);
                if duty != Duty::Busy {
                    self.fulfil(page, duty)?;
                    break;
                }
                // No block is free, or the saver is at it.
                if !self.pages.wait_for_change() {
                    return Ok(());
                }
            }
            pace.moved(PAGE_BYTES);
        }
        Ok(())
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

    /// What it cost so far.
    pub fn stats(&self) -> SnapshotStats {
        SnapshotStats {
            copied_bytes: self.copied_bytes.load(Relaxed),
            block_bytes: self.taken_bytes.load(Relaxed),
            stalls: self.stalls.load(Relaxed),
            stall_ns: self.stall_ns.load(Relaxed),
        }
    }
}

fn copy(from: &Region, to: &Region) -> Result<()> {
    file::copy(from, to).map_err(|error| super::file_error("copy", std::path::Path::new("memory"), &error))
}

fn given_up() -> Error {
    Error::Checkpoint { path: "snapshot".to_owned(), reason: "it was given up before all of it was written".to_owned() }
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
        let Some(rate) = self.bytes_per_s else { return };
        self.moved += bytes;
        let due = Duration::from_secs_f64(self.moved as f64 / rate);
        if let Some(early) = due.checked_sub(self.start.elapsed()) {
            std::thread::sleep(early);
        }
    }
}
