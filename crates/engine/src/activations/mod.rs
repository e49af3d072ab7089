//! Activations: they leave the device under the forward pass and return under the backward pass.
//!
//! ```text
//! forward:   saved tensor ==store==> block of pinned memory      its source is let go a window of bytes later
//! backward:  block        ==fetch==> memory on the device        asked for a window of bytes ahead of its use
//! ```
//!
//! [`Tape`] decides, from the order of the program alone; `Blocks` is the pinned memory; a `Lane` for each direction
//! issues copies from a thread of its own, a few chunks at a time. [`Offload`] puts them together. What events order:
//! - a store begins after the work that was submitted before the tensor was saved;
//! - a source is let go after the computation's stream has been made to wait for the end of its store;
//! - a fetch begins after its entry's store, and after what was submitted before its memory was allocated;
//! - the use of fetched bytes waits for the end of the fetch;
//! - a block is stored into again after the last fetch that reads it.
//!
//! A stream waits only for work that was submitted, so whoever needs an event that the lane has not recorded yet waits
//! for that on the host; the window bounds how far the host can be ahead.
//!
//! The caller owns the tensors' memory: it holds a source until [`Offload::save`] or [`Offload::release`] names its
//! entry, and the memory of a fetch until the entry has been let go. It also says where saved tensors end: whatever the
//! order of use turns out to be, an entry lives until its last save was released.

mod blocks;
mod clock;
mod lane;
mod marks;
mod queue;
mod tape;

use std::collections::HashMap;
use std::sync::Arc;

use forebay_device::{Backend, Device, Region, SharedDevice, Stream};
use serde::Serialize;

pub use blocks::Exhausted;
use blocks::{Block, Blocks};
pub use clock::LayerStats;
use clock::{Balance, Clock, Half};
use lane::{Job, Lane};
use marks::{Mark, Marks};
use queue::{Cancelled, Ticket};
pub use tape::{EntryId, Key, Opened, Place, Route, SaveId, Saved, Tape};

use crate::error::{Error, Result};
use crate::pool::Pool;
use crate::sync::{Mutex, MutexGuard, lock};

/// What to offload, and how much of it at a time.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OffloadOptions {
    /// Part of the bytes that leaves the device; none for what hides under the computation as measured.
    pub fraction: Option<f64>,
    /// Bytes that may be on their way out, or fetched ahead; none for what the largest layer saves.
    pub max_in_flight_bytes: Option<u64>,
    /// Most bytes to pin.
    pub pinned_budget_bytes: Option<u64>,
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
    fn join(&self, device: &dyn Device, mark: &Mark) -> Result<()> {
        if self.on_host {
            device.synchronize(mark.event())?;
        } else {
            device.wait(&self.stream, mark.event())?;
        }
        Ok(())
    }
}

/// The answer to [`Offload::save`].
#[derive(Debug)]
pub struct SaveOutcome {
    /// The save, its entry, and whether that is new and leaves the device.
    pub saved: Saved,
    /// Entries whose sources may be let go now.
    pub dropped: Vec<EntryId>,
    /// Why the entry stays although it was to leave.
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

#[derive(Debug)]
struct Fetch {
    ticket: Ticket,
    done: Arc<Mark>,
    joined: bool,
}

#[derive(Debug)]
struct Body {
    block: Block,
    compute: Compute,
    layer: u32,
    pass: u64,
    store: Ticket,
    stored: Arc<Mark>,
    /// The computation waits for the store's end from here on.
    left: bool,
    fetch: Option<Fetch>,
}

#[derive(Debug)]
struct State {
    tape: Tape,
    blocks: Blocks,
    bodies: HashMap<EntryId, Body>,
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
    state: Mutex<State>,
    pid: u32,
}

impl Offload {
    /// Starts the two lanes; nothing is pinned yet.
    pub fn new(pool: Arc<Pool>, options: OffloadOptions) -> Result<Self> {
        options.check()?;
        let device = pool.device().clone();
        let marks = Marks::new(device.clone());
        let balance = options.fraction.is_none().then(Balance::new);
        let state = State {
            tape: Tape::new(options.max_in_flight_bytes, options.fraction.unwrap_or(1.0)),
            blocks: Blocks::new(pool, options.pinned_budget_bytes),
            bodies: HashMap::new(),
            clock: Clock::new(device.clone()),
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
        })
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

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Pins so many bytes ahead of use.
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

    /// Lets go of the sources whose routes say so before `layer` begins; the caller may do the same.
    pub fn let_go_before(&self, layer: u32) -> Result<Vec<EntryId>> {
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

    fn learn(&self, state: &mut State) -> Result<()> {
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
    /// then stay as it is until its entry is named in an answer. Entries named in this answer may be let go. A save that is
    /// not counted takes no room on the tape and only tells where its use is.
    pub fn save(
        &self,
        key: Key,
        how: (bool, bool),
        source: impl FnOnce() -> Result<Region>,
        compute: &Compute,
    ) -> Result<SaveOutcome> {
        self.save_routed(key, how, None, source, compute)
    }

    /// The same, with what a plan says about it.
    pub fn save_routed(
        &self,
        key: Key,
        (may_leave, counted): (bool, bool),
        route: Option<Route>,
        source: impl FnOnce() -> Result<Region>,
        compute: &Compute,
    ) -> Result<SaveOutcome> {
        let state = &mut *self.state();
        let (layer, pass) = (state.layer, state.tape.pass());
        let mut saved = state.tape.save_routed(key, may_leave, counted, route);
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
            self.finish_store(state, entry)?;
            dropped.push(entry);
        }
        Ok(SaveOutcome { saved, dropped, exhausted })
    }

    fn begin_store(
        &self,
        state: &mut State,
        entry: EntryId,
        bytes: u64,
        source: impl FnOnce() -> Result<Region>,
        compute: &Compute,
    ) -> Result<Option<Exhausted>> {
        let mut block = match state.blocks.take(bytes)? {
            Ok(block) => block,
            Err(exhausted) => return Ok(Some(exhausted)),
        };
        let job = (|| {
            let ready = self.marks.take()?;
            self.device.record(ready.event(), &compute.stream)?;
            let after = [Some(ready), block.reader.clone()];
            let after = after.into_iter().flatten().collect();
            Ok(Job { from: source()?, to: block.region.clone(), after, done: self.marks.take()? })
        })();
        let job = match job {
            Ok(job) => job,
            Err(error) => {
                state.blocks.give(block, None);
                return Err(error);
            }
        };
        block.reader = None;
        let stored = job.done.clone();
        let store = self.store.submit(job, false);
        let (layer, pass) = (state.layer, state.tape.pass());
        let body = Body { block, compute: compute.clone(), layer, pass, store, stored, left: false, fetch: None };
        state.bodies.insert(entry, body);
        Ok(None)
    }

    /// What comes next on the stream that the entry was saved on waits for its store.
    fn finish_store(&self, state: &mut State, entry: EntryId) -> Result<()> {
        let Some(body) = state.bodies.get_mut(&entry) else { return Ok(()) };
        let wait = self.join(&state.clock, &self.store, body.store, &body.stored, &body.compute)?;
        body.left = true;
        if let Some((begin, end)) = wait {
            state.clock.stalled(begin, end, state.layer, body.pass, Half::Forward)?;
        }
        Ok(())
    }

    /// Makes the computation wait for a copy; the two points in time around that wait, unless it was over already.
    fn join(
        &self,
        clock: &Clock,
        lane: &Lane,
        ticket: Ticket,
        done: &Mark,
        compute: &Compute,
    ) -> Result<Option<(Arc<Mark>, Arc<Mark>)>> {
        if lane.is_submitted(ticket) {
            lane.wait(ticket)?;
            if self.device.query(done.event())? {
                return Ok(None);
            }
        }
        let begin = clock.mark(&compute.stream)?;
        lane.wait(ticket)?;
        compute.join(&*self.device, done)?;
        Ok(Some((begin, clock.mark(&compute.stream)?)))
    }

    /// A saved tensor is about to be used. Where its entry was on the host, it is arriving from now on and the caller
    /// fetches it; so are the entries named as ahead, which the caller may give up with [`Offload::let_go`].
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

    /// Fetches an arriving entry into memory that was allocated on `compute`, which stays the entry's until it is let
    /// go. The fetch waits for what was submitted to `compute` so far.
    pub fn fetch(&self, entry: EntryId, into: Region, urgent: bool, compute: &Compute) -> Result<()> {
        let state = &mut *self.state();
        let body = state.bodies.get_mut(&entry).ok_or_else(|| unknown("entry", entry))?;
        // Its own store has been submitted: that was waited for before the source was let go.
        self.store.wait(body.store)?;
        let ready = self.marks.take()?;
        self.device.record(ready.event(), &compute.stream)?;
        let done = self.marks.take()?;
        let after = vec![ready, body.stored.clone()];
        let job = Job { from: body.block.region.clone(), to: into, after, done: done.clone() };
        let bytes = body.block.region.bytes();
        let ticket = self.fetch.submit(job, urgent);
        // The fetch may run on another stream than the tensor was saved on; what ends its use is that stream's.
        body.compute = compute.clone();
        body.fetch = Some(Fetch { ticket, done, joined: false });
        state.clock.layer(body.layer).fetched_bytes += bytes;
        Ok(())
    }

    /// What comes next on `compute` waits for the entry's fetch.
    pub fn ready(&self, entry: EntryId, compute: &Compute) -> Result<()> {
        let state = &mut *self.state();
        let body = state.bodies.get_mut(&entry).ok_or_else(|| unknown("entry", entry))?;
        let Some(fetch) = &mut body.fetch else { return Ok(()) };
        self.fetch.hurry(fetch.ticket);
        let wait = self.join(&state.clock, &self.fetch, fetch.ticket, &fetch.done, compute)?;
        fetch.joined = true;
        if let Some((begin, end)) = wait {
            state.clock.stalled(begin, end, body.layer, body.pass, Half::Backward)?;
        }
        state.tape.arrived(entry);
        Ok(())
    }

    /// The caller lets go of an entry's fetched bytes, or could not allocate memory for them. They are fetched again
    /// when they are wanted again.
    pub fn let_go(&self, entry: EntryId) -> Result<()> {
        let state = &mut *self.state();
        if matches!(state.tape.place(entry), Some(Place::Arriving | Place::Here)) {
            if let Some(body) = state.bodies.get_mut(&entry) {
                self.end_fetch(body)?;
            }
            state.tape.let_go(entry);
        }
        Ok(())
    }

    /// Takes the fetch back as far as it has not been submitted, and has the computation wait for the rest of it.
    fn end_fetch(&self, body: &mut Body) -> Result<()> {
        let Some(fetch) = &mut body.fetch else { return Ok(()) };
        if fetch.joined {
            return Ok(());
        }
        if self.fetch.cancel(fetch.ticket) == Cancelled::Unrun {
            body.fetch = None;
            return Ok(());
        }
        fetch.joined = true;
        body.compute.join(&*self.device, &fetch.done)
    }

    /// A saved tensor is gone. Returns the entry if it was the last of it: its source or fetched bytes may be let go.
    pub fn release(&self, save: SaveId) -> Result<Option<EntryId>> {
        // The lanes' threads do not exist in a forked child, and nothing there is to be given back.
        if self.pid != std::process::id() {
            return Ok(None);
        }
        let state = &mut *self.state();
        let Some((entry, _)) = state.tape.release(save) else { return Ok(None) };
        let Some(mut body) = state.bodies.remove(&entry) else { return Ok(Some(entry)) };
        let fetched = self.end_fetch(&mut body);
        let stored = if body.left {
            Ok(())
        } else {
            match self.store.cancel(body.store) {
                Cancelled::Unrun => Ok(()),
                Cancelled::Submitted => body.compute.join(&*self.device, &body.stored),
            }
        };
        state.blocks.give(body.block, body.fetch.take().map(|fetch| fetch.done));
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

fn unknown(what: &'static str, id: u64) -> Error {
    Error::InvalidOption {
        option: what,
        value: id.to_string(),
        remedy: "it was released, or belongs to another offload".to_owned(),
    }
}
