//! A snapshot of host memory that stays in use: a page is copied only if a step reaches it before the writer.
//!
//! `pages.rs` has the protocol and `pace.rs` the rates. Here are the memory and the copies:
//!
//! - The writer reads through [`Snapshot::read`], and yields to steps with `yield_to_steps`.
//! - A step calls [`Snapshot::protect`] before anything writes into the memory, and [`Snapshot::step`] says when the step
//!   begins and ends.
//! - [`Snapshot::copy_ahead`] copies pages between two steps, in the order in which the next step will need them.
//!
//! One snapshot covers the state of all optimizers of a save, so that they share its blocks: no optimizer waits for a
//! block while another has one to spare. The regions are laid end to end and cut into pages together, so a hundred small
//! regions share one page.

mod pace;
mod pages;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use forebay_device::{Buffer, Cores, Region, file};
use serde::Serialize;

pub(crate) use self::pace::{Pace, WriterPauses};
use self::pages::{Duty, Pages, Source};
use crate::error::{Error, Result};
use crate::totals::{Wait, count_waits};

/// Bytes of a page of a save, the unit that is kept or copied.
pub const PAGE_BYTES: u64 = 4 << 20;

/// Blocks of earlier snapshots, kept for the next one, each with the process that allocated it. New memory can be slow to
/// get, above all on a virtual machine, and a step would wait for it. At most what the last snapshot was allowed.
static SPARE: Mutex<Vec<(u32, Buffer)>> = Mutex::new(Vec::new());

fn spare() -> std::sync::MutexGuard<'static, Vec<(u32, Buffer)>> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Frees the memory that is kept for the next snapshot's copies, and returns how many bytes that were.
pub fn release_spare() -> u64 {
    let blocks = std::mem::take(&mut *spare());
    blocks.iter().map(|(_, block)| block.bytes()).sum()
}

/// Bytes that are kept for the next snapshot's copies.
pub fn spare_bytes() -> u64 {
    spare().iter().filter(|(process, _)| *process == std::process::id()).map(|(_, block)| block.bytes()).sum()
}

/// A block for a page: one that was kept, or a new one. A forked child does not use its parent's blocks.
fn take_block(bytes: u64) -> Result<Buffer> {
    let kept = {
        let mut spare = spare();
        let fits = |(process, block): &(u32, Buffer)| *process == std::process::id() && block.bytes() == bytes;
        spare.iter().rposition(fits).map(|index| spare.swap_remove(index).1)
    };
    kept.map_or_else(|| Ok(Buffer::pageable(bytes)?), Ok)
}

/// What a snapshot has cost so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct SnapshotStats {
    /// Bytes that were copied.
    pub copied_bytes: u64,
    /// Bytes of host memory for the copies.
    pub block_bytes: u64,
    /// How often a step waited for the writer.
    pub stalls: u64,
    /// How long steps waited in total.
    pub stall_ns: u64,
    /// How often the writer paused for a step.
    pub pauses: u64,
}

/// A region of the snapshot, and where it begins when all regions are laid end to end.
#[derive(Debug)]
struct Covered {
    region: Region,
    start: u64,
}

/// The contents of memory at one moment.
#[derive(Debug)]
pub struct Snapshot {
    /// In ascending order of address.
    covered: Vec<Covered>,
    /// Of all regions together.
    bytes: u64,
    page_bytes: u64,
    /// The pages in the order in which the next step reaches them.
    order: Vec<usize>,
    pages: Pages,
    blocks: Vec<OnceLock<Buffer>>,
    /// Why the snapshot was given up.
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

/// The part of a region that lies in one page.
struct PagePart {
    page: usize,
    /// Where the part begins in the page.
    offset: u64,
    region: Region,
}

impl Snapshot {
    /// Begins a snapshot of regions of host memory, into which nothing is being written now. `next` has their parts in the
    /// order in which they will be written next. Copies take at most `budget_bytes`.
    pub fn new(page_bytes: u64, mut arenas: Vec<Region>, next: &[Region], budget_bytes: u64) -> Self {
        arenas.retain(|region| region.bytes() > 0);
        arenas.sort_by_key(Region::addr);
        let mut bytes = 0;
        let covered: Vec<Covered> = arenas
            .into_iter()
            .map(|region| {
                bytes += region.bytes();
                Covered { start: bytes - region.bytes(), region }
            })
            .collect();
        let pages = bytes.div_ceil(page_bytes) as usize;
        // The last page may be shorter than the others, and so may a budget that covers everything.
        let allowed = usize::try_from(budget_bytes / page_bytes).unwrap_or(usize::MAX);
        let blocks = if budget_bytes >= bytes { pages } else { allowed.min(pages) };
        spare().truncate(allowed.max(blocks));
        let mut snapshot = Self {
            covered,
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
            for PagePart { page, .. } in snapshot.parts(region) {
                if !std::mem::replace(&mut known[page], true) {
                    order.push(page);
                }
            }
        }
        snapshot.order = order;
        snapshot
    }

    /// Whether a region is part of the snapshot. A region is covered as a whole or not at all.
    pub fn covers(&self, region: &Region) -> bool {
        self.find(region.addr()).is_some()
    }

    fn find(&self, addr: usize) -> Option<&Covered> {
        let index = self.covered.partition_point(|covered| covered.region.addr() <= addr).checked_sub(1)?;
        let covered = &self.covered[index];
        (addr < covered.region.addr() + covered.region.bytes() as usize).then_some(covered)
    }

    /// Cuts a region at the borders of pages. A region outside of the snapshot has no parts.
    fn parts(&self, region: &Region) -> Vec<PagePart> {
        let Some(covered) = self.find(region.addr()) else { return Vec::new() };
        let start = covered.start + (region.addr() - covered.region.addr()) as u64;
        let end = (start + region.bytes()).min(covered.start + covered.region.bytes());
        let (mut at, mut parts) = (start, Vec::new());
        while at < end {
            let page = at / self.page_bytes;
            let until = ((page + 1) * self.page_bytes).min(end);
            // Inside the region, as `end` is.
            if let Ok(part) = region.slice(at - start, until - at) {
                parts.push(PagePart { page: page as usize, offset: at % self.page_bytes, region: part });
            }
            at = until;
        }
        parts
    }

    /// Says which regions will be read. Pages of no such region are not kept any longer.
    pub fn plan(&self, regions: &[Region]) {
        let mut bytes = vec![0; self.bytes.div_ceil(self.page_bytes) as usize];
        for part in regions.iter().flat_map(|region| self.parts(region)) {
            bytes[part.page] += part.region.bytes();
        }
        self.pages.plan(&bytes);
    }

    /// Passes the bytes of a region as they were at the moment of the snapshot to `look`, in order, piece by piece. The
    /// pieces lie in `buffer`, so no step waits for a slow disk. The buffer is used as a ring that begins at byte `start`;
    /// no piece crosses its end.
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

    /// Returns when a region may be written: pages that are still needed are copied, or waited for. Where a copy fails,
    /// the snapshot is given up, because a save may fail for lack of memory and a step may not. Returns how often this
    /// call waited, and for how many nanoseconds.
    pub fn protect(&self, region: &Region) -> (u64, u64) {
        let (mut stalls, mut stall_ns) = (0, 0);
        for part in self.parts(region) {
            let (duty, waited) = self.pages.begin_protect(part.page);
            if let Some(waited) = waited {
                (stalls, stall_ns) = (stalls + 1, stall_ns + waited.as_nanos() as u64);
            }
            self.fulfil(part.page, duty);
        }
        self.stalls.fetch_add(stalls, Relaxed);
        self.stall_ns.fetch_add(stall_ns, Relaxed);
        count_waits(Wait::Save, stalls, stall_ns);
        (stalls, stall_ns)
    }

    fn fulfil(&self, page: usize, duty: Duty) {
        let Duty::Copy(block) = duty else { return };
        if let Err(error) = self.copy(page, block) {
            // Set before `finish` wakes the threads that will ask for the reason.
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
        let first = self.covered.partition_point(|covered| covered.start + covered.region.bytes() <= start);
        for Covered { region, start: at } in self.covered[first..].iter().take_while(|covered| covered.start < end) {
            let (from, to) = (start.max(*at), end.min(at + region.bytes()));
            copy(&region.slice(from - at, to - from)?, &memory.region(from - start, to - from)?)?;
        }
        self.copied_bytes.fetch_add(end - start, Relaxed);
        Ok(())
    }

    /// Starts threads that [copy ahead](Self::copy_ahead) together, until all pages are copied or the snapshot ends.
    pub fn copy_in_background(self: &Arc<Self>, threads: usize, bytes_per_s: Option<f64>) {
        for share in 0..threads {
            let snapshot = self.clone();
            // At normal priority: a step may have to wait for the page that is being copied.
            let work = move || snapshot.copy_ahead(share, threads, bytes_per_s);
            // Where no thread can be started, the step copies by itself.
            let _ = Cores::here().spawn("forebay-snapshot", work);
        }
    }

    /// Copies pages that the next step will change, at most at `bytes_per_s`, until none is left. Waits while no block is
    /// free. Several threads can do this at once: this one copies the pages of one `share` of `shares`.
    pub fn copy_ahead(&self, share: usize, shares: usize, bytes_per_s: Option<f64>) {
        let mut pace = Pace::new(bytes_per_s.map(|rate| rate / shares as f64));
        for &page in self.order.iter().skip(share).step_by(shares) {
            let duty = self.pages.begin_copy_ahead(page);
            if duty != Duty::None {
                self.fulfil(page, duty);
                self.pages.rest(pace.ahead(self.page_bytes));
            }
        }
    }

    /// A step begins. It ends when the value is dropped.
    pub fn step(self: &Arc<Self>) -> Stepping {
        self.pages.begin_step();
        Stepping(self.clone())
    }

    /// Pauses the writer while a step runs, unless the step waits for the writer.
    pub(crate) fn yield_to_steps(&self, pauses: &mut WriterPauses) {
        pauses.add_pause(self.pages.pause(pauses.allowance()));
    }

    /// Ends the snapshot: nothing is kept any longer.
    pub fn finish(&self) {
        self.pages.finish();
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

    /// What the snapshot has cost so far.
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
    file::copy(from, to).map_err(|error| Error::file("copy", std::path::Path::new("memory"), &error))
}

/// A running step, for which the writer of a snapshot pauses.
#[derive(Debug)]
pub struct Stepping(Arc<Snapshot>);

impl Drop for Stepping {
    fn drop(&mut self) {
        self.0.pages.end_step();
    }
}
