//! Activations: they leave the device during the forward pass and return during the backward pass.
//!
//! ```text
//! forward:   saved tensor ==store==> block of pinned memory      its source is freed a window of bytes later
//! backward:  block        ==fetch==> memory on the device        asked for a window of bytes ahead of its use
//! ```
//!
//! [`Tape`] decides, from the order of the program alone; `Blocks` is the pinned memory; a `Lane` for each direction
//! submits copies from a thread of its own, a few chunks at a time. [`Offload`] puts them together. What events order:
//! - a store begins after the work that was submitted before the tensor was saved;
//! - a source is freed after the computation's stream has been made to wait for the end of its store;
//! - a fetch begins after its entry's store, and after what was submitted before its memory was allocated;
//! - the use of fetched bytes waits for the end of the fetch;
//! - a block is stored into again after the last fetch that reads it.
//!
//! A stream waits only for work that was submitted. So a caller that needs a mark which the lane has not recorded yet
//! waits for the recording on the host; the window limits how far the host can be ahead.
//!
//! The caller owns the tensors' memory: it keeps a source until [`Offload::save`] or [`Offload::release`] names its
//! entry, and the memory of a fetch until [`Offload::free_fetched`] or [`Offload::release`]. The caller also ends saved
//! tensors: in any order of use, an entry lives until its last save was released.

mod blocks;
mod clock;
mod tape;

use std::collections::HashMap;
use std::sync::Arc;

use forebay_device::{Backend, Region, SharedDevice, Stream};
use serde::Serialize;

pub use blocks::Exhausted;
use blocks::{Block, Blocks};
pub use clock::LayerStats;
use clock::{Balance, Clock, Half};
pub use tape::{EntryId, Key, Location, Opened, Route, SaveId, Saved, Tape};

use crate::error::{Error, Result};
use crate::flow::{Cancelled, CopyJob, InFlight, Lane, Mark, Marks, QueuedCopy, Shown};
use crate::memory::Allocator;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::trace::{self, Kind};

/// What to offload, and how much of it at a time.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OffloadOptions {
    /// Share of the bytes that leaves the device; `None` for as much as can be copied without waiting, as measured.
    pub fraction: Option<f64>,
    /// Bytes that may be on their way out, or fetched ahead; `None` for the bytes that the largest layer saves.
    pub max_in_flight_bytes: Option<u64>,
}

impl OffloadOptions {
    fn check(&self) -> Result<()> {
        if let Some(fraction) = self.fraction
            && !(0.0..=1.0).contains(&fraction)
        {
            return Err(Error::InvalidOption {
                option: "fraction",
                value: fraction.to_string(),
                remedy: "give a number from 0.0 to 1.0, or \"auto\"".to_owned(),
            });
        }
        Ok(())
    }
}

/// Where the computation runs: a stream, or the calling thread itself.
#[derive(Debug, Clone)]
pub struct Compute {
    stream: Stream,
    on_host: bool,
}

impl Compute {
    /// Work on a stream of the device.
    pub fn on_stream(stream: Stream) -> Self {
        Self { stream, on_host: false }
    }

    /// Work on the calling thread, as torch's on the CPU. The stream only carries marks of time.
    pub fn on_host(clock: Stream) -> Self {
        Self { stream: clock, on_host: true }
    }

    /// What comes next waits for a mark.
    fn join(&self, mark: &Mark) -> Result<()> {
        if self.on_host { mark.synchronize() } else { mark.wait(&self.stream) }
    }
}

/// The answer to [`Offload::save`].
#[derive(Debug)]
pub struct SaveOutcome {
    /// The save, its entry, and whether that is new and leaves the device.
    pub saved: Saved,
    /// Entries whose sources may be freed now.
    pub dropped: Vec<EntryId>,
    /// Why an entry that was chosen to leave stays.
    pub exhausted: Option<Exhausted>,
}

/// Sums since the beginning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct OffloadStats {
    /// Bytes that left the device.
    pub stored_bytes: u64,
    /// Bytes that came back.
    pub fetched_bytes: u64,
    /// Bytes of tensors that were saved and stayed.
    pub kept_bytes: u64,
    /// Bytes pinned, used or not.
    pub pinned_bytes: u64,
    /// The most pinned bytes that were used at once.
    pub pinned_peak_bytes: u64,
    /// How often the computation waited for a copy.
    pub stalls: u64,
    /// How long it waited in all.
    pub stall_ns: u64,
    /// The part of the bytes that leaves at present.
    pub fraction: f64,
    /// The window at present.
    pub window_bytes: u64,
    /// Rate of stores in GB/s, 0 before one has been timed.
    pub store_gbps: f64,
    /// Rate of fetches in GB/s, 0 before one has been timed.
    pub fetch_gbps: f64,
}

/// A fetch under way or over.
#[derive(Debug)]
struct Fetch {
    copy: QueuedCopy,
    /// The computation waits for the fetch's end from here on.
    joined: bool,
}

/// An entry that left the device or is about to.
#[derive(Debug)]
struct Offloaded {
    block: Block,
    compute: Compute,
    layer: u32,
    pass: u64,
    store: QueuedCopy,
    /// The computation waits for the store's end from here on.
    left: bool,
    fetch: Option<Fetch>,
}

#[derive(Debug)]
struct OffloadState {
    tape: Tape,
    blocks: Blocks,
    offloaded: HashMap<EntryId, Offloaded>,
    clock: Clock,
    balance: Option<Balance>,
    layer: u32,
    entered: bool,
}

/// Stores, fetches and the memory behind them, for one device.
#[derive(Debug)]
pub struct Offload {
    device: SharedDevice,
    marks: Arc<Marks>,
    store: Lane,
    fetch: Lane,
    state: Mutex<OffloadState>,
    pid: u32,
    /// What it is called in a trace.
    owner: u32,
}

impl Offload {
    /// Starts the two lanes; nothing is pinned yet. What is pinned later stays within the allocator's budget.
    pub fn new(allocator: Arc<Allocator>, options: OffloadOptions) -> Result<Self> {
        options.check()?;
        let device = allocator.device().clone();
        let marks = Marks::new(device.clone());
        let (owner, balance) = (trace::owner(), options.fraction.is_none().then(Balance::new));
        let state = OffloadState {
            tape: Tape::new(options.max_in_flight_bytes, options.fraction.unwrap_or(1.0)),
            blocks: Blocks::new(allocator),
            offloaded: HashMap::new(),
            clock: Clock::new(device.clone(), owner),
            balance,
            layer: 0,
            entered: false,
        };
        Ok(Self {
            store: Lane::new(&device, &marks, "store")?,
            fetch: Lane::new(&device, &marks, "fetch")?,
            device,
            marks,
            state: Mutex::new(state),
            pid: std::process::id(),
            owner,
        })
    }

    /// The number under which it reports to a trace.
    pub fn trace_owner(&self) -> u32 {
        self.owner
    }

    /// The device it serves.
    pub fn device(&self) -> &SharedDevice {
        &self.device
    }

    /// A stream of the computation, or of marks alone where that runs on the calling thread.
    pub fn own_compute(&self) -> Result<Compute> {
        let stream = self.device.stream("compute")?;
        let on_host = self.device.info().backend == Backend::Cpu;
        Ok(Compute { stream, on_host })
    }

    fn state(&self) -> MutexGuard<'_, OffloadState> {
        lock(&self.state)
    }

    /// Pins this many bytes ahead of use.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        self.state().blocks.reserve(bytes)
    }

    /// A layer begins. Layers are numbered in the order of the forward pass; a number below the one before begins a new
    /// pass.
    pub fn enter(&self, layer: u32, compute: &Compute) -> Result<()> {
        let state = &mut *self.state();
        let first = !std::mem::replace(&mut state.entered, true);
        if state.tape.enter(layer, first) {
            self.learn(state)?;
            state.clock.begin(state.tape.pass());
            let spare = state.blocks.begin_pass();
            if !spare.is_empty() {
                // Giving memory back waits for the device: not on the thread that feeds it.
                let _ = std::thread::Builder::new().name("forebay-unpin".to_owned()).spawn(move || drop(spare));
            }
        }
        state.layer = layer;
        let mark = state.clock.mark(&compute.stream)?;
        state.clock.entered(state.tape.pass(), layer, mark);
        Ok(())
    }

    /// The layer that began last has ended.
    pub fn leave(&self, compute: &Compute) -> Result<()> {
        let state = &mut *self.state();
        state.tape.leave();
        let mark = state.clock.mark(&compute.stream)?;
        state.clock.left(state.tape.pass(), state.layer, mark);
        Ok(())
    }

    /// Makes the computation wait for the stores of entries whose routes free their sources before `layer` begins. Returns
    /// the entries: the caller may free those sources.
    pub fn free_before(&self, layer: u32) -> Result<Vec<EntryId>> {
        let state = &mut *self.state();
        let mut dropped = Vec::new();
        while let Some(entry) = state.tape.due_before(layer) {
            self.finish_store(state, entry)?;
            dropped.push(entry);
        }
        Ok(dropped)
    }

    /// A pass begins where there are no layers.
    pub fn begin_pass(&self) {
        self.state().tape.begin();
    }

    fn learn(&self, state: &mut OffloadState) -> Result<()> {
        while let Some(pass) = state.clock.measured()? {
            if let (Some(balance), Some(store)) = (&mut state.balance, self.store.rate()) {
                // Before anything has been fetched both ways are taken to be alike.
                let fetch = self.fetch.rate().unwrap_or(store);
                if balance.learn(&pass, store, fetch) {
                    let fraction = balance.fraction;
                    state.tape.set_fraction(fraction);
                }
            }
        }
        Ok(())
    }

    /// A tensor was saved. `source` names the range of `key` on the device, and is asked for only if it leaves: it must
    /// then stay as it is until its entry is named in an answer. Sources of entries named in this answer may be freed. A
    /// save that is not counted takes no room on the tape and only tells where its use is. `route` is what a plan says
    /// about it.
    pub fn save(
        &self,
        key: Key,
        (may_leave, counted): (bool, bool),
        route: Option<Route>,
        source: impl FnOnce() -> Result<Region>,
        compute: &Compute,
    ) -> Result<SaveOutcome> {
        let state = &mut *self.state();
        let (layer, pass) = (state.layer, state.tape.pass());
        let mut saved = state.tape.save(key, may_leave, counted, route);
        let mut exhausted = None;
        if saved.new && may_leave {
            state.clock.eligible(pass, key.bytes);
        }
        if saved.new && saved.offload {
            match self.begin_store(state, saved.entry, key.bytes, source, compute) {
                Ok(None) => state.clock.layer(layer).stored_bytes += key.bytes,
                Ok(reason) => {
                    state.tape.keep(saved.entry);
                    (saved.offload, exhausted) = (false, reason);
                }
                Err(error) => {
                    state.tape.release(saved.save);
                    return Err(error);
                }
            }
        }
        if saved.new && !saved.offload {
            state.clock.layer(layer).kept_bytes += key.bytes;
        }
        let mut dropped = Vec::new();
        while let Some(entry) = state.tape.due() {
            if let Err(error) = self.finish_store(state, entry) {
                // The caller gets no save to hold the source for, so the engine must not read it any more.
                let _ = self.release_in(state, saved.save);
                return Err(error);
            }
            dropped.push(entry);
        }
        Ok(SaveOutcome { saved, dropped, exhausted })
    }

    fn begin_store(
        &self,
        state: &mut OffloadState,
        entry: EntryId,
        bytes: u64,
        source: impl FnOnce() -> Result<Region>,
        compute: &Compute,
    ) -> Result<Option<Exhausted>> {
        let (block, last_use) = match state.blocks.take(bytes)? {
            Ok(block) => block.into_parts(),
            Err(exhausted) => return Ok(Some(exhausted)),
        };
        let job = (|| {
            let ready = self.marks.take()?;
            ready.record(&compute.stream)?;
            let after = [Some(ready), last_use.clone()].into_iter().flatten().collect();
            let shown = Shown { kind: Kind::ActivationStore, owner: self.owner, layer: state.layer };
            Ok(CopyJob { from: source()?, to: block.region.clone(), after, end: self.marks.take()?, shown })
        })();
        let job = match job {
            Ok(job) => job,
            Err(error) => {
                state.blocks.give(InFlight::new(block, last_use));
                return Err(error);
            }
        };
        let store = self.store.submit(job, false);
        let (layer, pass) = (state.layer, state.tape.pass());
        let offloaded = Offloaded { block, compute: compute.clone(), layer, pass, store, left: false, fetch: None };
        state.offloaded.insert(entry, offloaded);
        Ok(None)
    }

    /// What comes next on the stream that the entry was saved on waits for its store.
    fn finish_store(&self, state: &mut OffloadState, entry: EntryId) -> Result<()> {
        let Some(found) = state.offloaded.get_mut(&entry) else { return Ok(()) };
        let wait = join(&state.clock, &self.store, &found.store, &found.compute)?;
        found.left = true;
        if let Some((begin, end)) = wait {
            state.clock.stalled(begin, end, state.layer, found.pass, Half::Forward)?;
        }
        Ok(())
    }

    /// A saved tensor is about to be used. Where its entry was on the host, it is arriving from now on and the caller
    /// fetches it; so are the entries named as ahead, which the caller may give up with [`Offload::free_fetched`].
    pub fn open(&self, save: SaveId, compute: &Compute) -> Result<Opened> {
        let state = &mut *self.state();
        let origin = state.tape.origin(save);
        let opened = state.tape.open(save).ok_or_else(|| unknown("save", save))?;
        if let Some((layer, pass)) = origin
            && state.clock.wants_open(pass, layer)
        {
            let mark = state.clock.mark(&compute.stream)?;
            state.clock.opened(pass, layer, mark);
        }
        Ok(opened)
    }

    /// Bytes of an entry: what the caller allocates for its fetch.
    pub fn entry_bytes(&self, entry: EntryId) -> u64 {
        self.state().tape.bytes(entry)
    }

    /// Fetches an arriving entry into memory that was allocated on `compute`, which stays the entry's until it is freed.
    /// The fetch waits for what was submitted to `compute` so far.
    pub fn fetch(&self, entry: EntryId, into: Region, urgent: bool, compute: &Compute) -> Result<()> {
        let state = &mut *self.state();
        let found = state.offloaded.get_mut(&entry).ok_or_else(|| unknown("entry", entry))?;
        // Its own store has been submitted: that was waited for before the source was freed.
        self.store.wait(&found.store)?;
        let ready = self.marks.take()?;
        ready.record(&compute.stream)?;
        let after = vec![ready, found.store.end().clone()];
        let shown = Shown { kind: Kind::ActivationFetch, owner: self.owner, layer: found.layer };
        let job = CopyJob { from: found.block.region.clone(), to: into, after, end: self.marks.take()?, shown };
        let bytes = found.block.region.bytes();
        let copy = self.fetch.submit(job, urgent);
        // The fetch may run on another stream than the tensor was saved on; what ends its use is that stream's.
        found.compute = compute.clone();
        found.fetch = Some(Fetch { copy, joined: false });
        state.clock.layer(found.layer).fetched_bytes += bytes;
        Ok(())
    }

    /// What comes next on `compute` waits for the entry's fetch.
    pub fn ready(&self, entry: EntryId, compute: &Compute) -> Result<()> {
        let state = &mut *self.state();
        let found = state.offloaded.get_mut(&entry).ok_or_else(|| unknown("entry", entry))?;
        let Some(fetch) = &mut found.fetch else { return Ok(()) };
        self.fetch.hurry(&fetch.copy);
        let wait = join(&state.clock, &self.fetch, &fetch.copy, compute)?;
        fetch.joined = true;
        if let Some((begin, end)) = wait {
            state.clock.stalled(begin, end, found.layer, found.pass, Half::Backward)?;
        }
        state.tape.arrived(entry);
        Ok(())
    }

    /// The caller frees an entry's fetched bytes, or could not allocate memory for them. They are fetched again when they
    /// are needed again.
    pub fn free_fetched(&self, entry: EntryId) -> Result<()> {
        let state = &mut *self.state();
        if matches!(state.tape.location(entry), Some(Location::Arriving | Location::Here)) {
            if let Some(found) = state.offloaded.get_mut(&entry) {
                self.end_fetch(found)?;
            }
            state.tape.fetched_freed(entry);
        }
        Ok(())
    }

    /// Takes the fetch back as far as it has not been submitted, and has the computation wait for the rest of it.
    fn end_fetch(&self, found: &mut Offloaded) -> Result<()> {
        let Some(fetch) = &mut found.fetch else { return Ok(()) };
        if fetch.joined {
            return Ok(());
        }
        if self.fetch.cancel(&fetch.copy) == Cancelled::Unrun {
            found.fetch = None;
            return Ok(());
        }
        fetch.joined = true;
        found.compute.join(fetch.copy.end())
    }

    /// A saved tensor is gone. Returns the entry if it was the last save of it: its source or fetched bytes may be freed.
    pub fn release(&self, save: SaveId) -> Result<Option<EntryId>> {
        // The lanes' threads do not exist in a forked child, and nothing there is to be given back.
        if self.pid != std::process::id() {
            return Ok(None);
        }
        self.release_in(&mut self.state(), save)
    }

    fn release_in(&self, state: &mut OffloadState, save: SaveId) -> Result<Option<EntryId>> {
        let Some((entry, _)) = state.tape.release(save) else { return Ok(None) };
        let Some(mut found) = state.offloaded.remove(&entry) else { return Ok(Some(entry)) };
        let fetched = self.end_fetch(&mut found);
        let stored = if found.left {
            Ok(())
        } else {
            match self.store.cancel(&found.store) {
                Cancelled::Unrun => Ok(()),
                Cancelled::Submitted => found.compute.join(found.store.end()),
            }
        };
        // The next store into the block follows this entry's store on the same stream; only a fetch has to be waited for.
        let last_use = found.fetch.map(|fetch| fetch.copy.end().clone());
        state.blocks.give(InFlight::new(found.block, last_use));
        fetched.and(stored)?;
        Ok(Some(entry))
    }

    /// Sums since the beginning; waits until the times of all waits can be read.
    pub fn stats(&self) -> Result<OffloadStats> {
        let state = &mut *self.state();
        state.clock.read_stalls(true)?;
        let mut stats = OffloadStats {
            pinned_bytes: state.blocks.pinned_bytes(),
            pinned_peak_bytes: state.blocks.peak_bytes,
            fraction: state.tape.fraction(),
            window_bytes: state.tape.window(),
            store_gbps: self.store.rate().unwrap_or(0.0),
            fetch_gbps: self.fetch.rate().unwrap_or(0.0),
            ..OffloadStats::default()
        };
        for layer in state.clock.table.values() {
            stats.stored_bytes += layer.stored_bytes;
            stats.fetched_bytes += layer.fetched_bytes;
            stats.kept_bytes += layer.kept_bytes;
            stats.stalls += layer.stalls;
            stats.stall_ns += layer.stall_ns;
        }
        Ok(stats)
    }

    /// The same for each layer that saved anything.
    pub fn table(&self) -> Result<Vec<(u32, LayerStats)>> {
        let state = &mut *self.state();
        state.clock.read_stalls(true)?;
        self.learn(state)?;
        Ok(state.clock.table.iter().map(|(&layer, &stats)| (layer, stats)).collect())
    }
}

/// Makes the computation wait for a copy; the two points in time around that wait, unless it was over already.
fn join(clock: &Clock, lane: &Lane, copy: &QueuedCopy, compute: &Compute) -> Result<Option<(Arc<Mark>, Arc<Mark>)>> {
    if lane.is_submitted(copy) {
        lane.wait(copy)?;
        if copy.end().query()? {
            return Ok(None);
        }
    }
    let begin = clock.mark(&compute.stream)?;
    lane.wait(copy)?;
    compute.join(copy.end())?;
    Ok(Some((begin, clock.mark(&compute.stream)?)))
}

fn unknown(what: &'static str, id: u64) -> Error {
    Error::InvalidOption {
        option: what,
        value: id.to_string(),
        remedy: "it was released, or belongs to another offload".to_owned(),
    }
}
