//! Fetch, update, store: three streams, a ring of slots, and events between them.
//!
//! ```text
//! host state ==fetch==> [slot] ==update==> [same slot] ==store==> host state
//!            stream F            caller's stream            stream S
//! ```
//!
//! Each arrow takes a slot by value and hands it on as [`InFlight`], with the mark that ends the arrow. What the events
//! order:
//! - an update waits for its slot's fetch, and a store for its slot's update;
//! - a slot is fetched into again after its store has ended: [`Pipeline::acquire`] waits for that on the host, so at
//!   most as many chunks as there are slots are ever queued, and small copies of others are not stuck behind them;
//! - bytes of the host are fetched again after their last store has ended: the fetch stream waits for it.
//!
//! A slot that is dropped after a failure goes back to the ring with the mark that ends the accepted part of its work.
//! Nothing is allocated after [`Pipeline::open`].
//!
//! [Note: users of one ring] A `Pipeline` is one user of a ring; optimizers that want the same slots on a device share
//! it, with its two copy streams. Each user drives its own chunks from one thread at a time. Users take no turns: their
//! chunks mix in the ring and in the streams, and no lock is held for longer than it takes to look at one slot. So a
//! user that waits, for a save or for its own stream, holds up others only while it has the slot that they need, and
//! nobody ever waits for a lock of another user. Why the order above holds for all of them:
//! - A slot has one owner, who alone records its marks. The next owner, whoever it is, has waited on the host for the
//!   end of the use before, so each stage of a trip is ordered behind the trip before it.
//! - Every wait of a stream is for a mark that was recorded before the wait was submitted. So the streams cannot wait
//!   for each other in a circle, whatever the users' compute streams are.
//! - A trip stays noted at its slot until its store was seen to have ended. Then the slot is given to another user, so
//!   who does not find a trip need not wait for it. Who finds one may wait for a mark that the slot's next owner has
//!   recorded again meanwhile: that point is later on the same store stream, so it waits too long but never too short.
//! - Waits and statistics are those of one user: [`Pipeline::drain`] waits for the trips and the broken-off work
//!   of its own user. A failure of one user leaves the others their slots. Only a stream that dies takes all users of
//!   the ring with it, as on CUDA it takes all users of the context. Such a ring is not given to new users.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use forebay_device::{ALIGN_BYTES, Buffer, Device, Event, Region, SharedDevice, Stream};
use serde::Serialize;

use super::in_flight::InFlight;
use super::marks::{Mark, Marks};
use super::ring::{Ring, RingUser};
use super::shared::{Shared, SharedKey};

use crate::error::Result;
use crate::memory::Allocator;
use crate::sync::{Mutex, lock};
use crate::totals::{Held, Use, Wait, count_fetched, count_stored, count_waits};
use crate::trace::{self, Kind, Label, Pace, Reason, Recorder, Source, Span};

/// The rings that users share.
static RINGS: Shared<PipelineCore> = Shared::new();

/// One user of a ring and its streams.
#[derive(Debug)]
pub struct Pipeline {
    core: Arc<PipelineCore>,
    log: Arc<RunLog>,
}

/// What users share, and what slots refer to; they may outlive the pipeline.
#[derive(Debug)]
struct PipelineCore {
    device: SharedDevice,
    fetch: Stream,
    store: Stream,
    marks: Arc<Marks>,
    ring: Ring<Arc<Mark>>,
    slots: Vec<SlotRecord>,
    pid: u32,
    /// How many of its chunks a trace times, and the trace that asks it at its end.
    pace: Pace,
    traced_by: AtomicU64,
    _held: Held,
}

/// What a chunk passes, in this order.
#[derive(Debug, Clone, Copy)]
enum Stage {
    Fetch,
    Update,
    Store,
}

/// What each stage is in a trace.
const KINDS: [Kind; 3] = [Kind::Fetch, Kind::Update, Kind::Store];

/// What one user's run has done so far. Whoever sees the end of a trip adds it to the log of its user.
#[derive(Debug)]
struct RunLog {
    user: RingUser,
    /// Whose run a trace shows.
    owner: AtomicU32,
    totals: Mutex<RunTotals>,
}

#[derive(Debug)]
struct SlotRecord {
    region: Region,
    /// The end of each stage, in their order.
    ends: [Arc<Mark>; 3],
    /// Begin and end of each stage with their times, recorded on the trips that are timed.
    timers: [[Event; 2]; 3],
    trip: Mutex<Option<Trip>>,
}

/// The last trip of a chunk through a slot, from its store until its times were read.
#[derive(Debug, Clone)]
struct Trip {
    log: Arc<RunLog>,
    run: u64,
    chunk: u32,
    payload_bytes: u64,
    stored: Vec<Region>,
    timed: Option<Timing>,
}

/// Why a chunk is timed.
#[derive(Debug, Clone, Copy)]
struct Timing {
    /// For a trace: the bytes of chunks before it that were not.
    traced: Option<u64>,
}

/// One chunk in this many is timed: a time costs the copy engine more than the ordering does.
const TIMED_EVERY: u64 = 64;

/// What one run through the pipeline did. Bytes are payload, each way. The times of the stages are measured on one chunk
/// in 64, or on those that a trace times, and scaled by bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RunStats {
    /// Chunks that went through.
    pub chunks: u64,
    /// Bytes fetched.
    pub fetch_bytes: u64,
    /// Bytes stored.
    pub store_bytes: u64,
    /// Sum of the fetches' times.
    pub fetch_ns: u64,
    /// Sum of the updates' times.
    pub update_ns: u64,
    /// Sum of the stores' times.
    pub store_ns: u64,
    /// How often the host waited for a slot.
    pub stalls: u64,
    /// How long in all, from finding a slot's store under way until it ended; the next chunk is prepared meanwhile.
    pub stall_ns: u64,
}

/// What the run has done so far.
#[derive(Debug, Default)]
struct RunTotals {
    run: u64,
    /// Slots acquired in this run.
    acquired: u64,
    stats: RunStats,
    /// Bytes and times of the stages of the timed chunks alone.
    timed_bytes: u64,
    timed_ns: [u64; 3],
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        // In a forked child a lock may be held for ever, by a thread that only the parent has.
        if self.core.is_forked() {
            return;
        }
        let _ = self.drain();
        // Also after a failure: a noted trip holds the host memory that it stores to, and other users keep the ring.
        for slot in &self.core.slots {
            let forgotten = lock(&slot.trip).take_if(|trip| Arc::ptr_eq(&trip.log, &self.log));
            drop(forgotten);
        }
    }
}

impl Drop for PipelineCore {
    /// The ring's memory may be the caller's, who must not get it back while the device uses it. Its users have waited for
    /// that when they went; this is for a wait of theirs that was refused.
    fn drop(&mut self) {
        if !self.is_forked() {
            let _ = self.ring.settle(None);
        }
    }
}

/// A fixed part of the ring's memory, owned until dropped.
#[derive(Debug)]
pub struct Slot {
    index: usize,
    /// The end of the work accepted so far; `None` while the device has not touched it.
    end: Option<Arc<Mark>>,
    timed: Option<Timing>,
    core: Arc<PipelineCore>,
    log: Arc<RunLog>,
}

impl Slot {
    /// Its memory on the device.
    pub fn region(&self) -> &Region {
        &self.core.slots[self.index].region
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.core.ring.release(self.index, self.log.user, self.end.take());
    }
}

impl Pipeline {
    /// The first user of a new ring in device memory that nobody else will share.
    pub fn new(allocator: &Allocator, slots: usize, slot_bytes: u64) -> Result<Self> {
        Self::of(Arc::new(PipelineCore::new(allocator.device(), None, slots, slot_bytes)?))
    }

    /// A new user of the ring of this process that has such slots on this device; `None` if there is none. A ring is
    /// there from its first [`Self::open`] until its last user was dropped.
    pub fn join(device: &SharedDevice, slots: usize, slot_bytes: u64) -> Result<Option<Self>> {
        let found = RINGS.find(SharedKey::new(device, slots, slot_bytes), PipelineCore::is_sound);
        found.map(Self::of).transpose()
    }

    /// The same, or the first user of a new ring: in memory of the caller's, of at least [`Self::ring_bytes`], or on the
    /// device itself. What was submitted so far to the stream that comes with that memory may still use it; the first
    /// fetch waits for it.
    pub fn open(
        device: &SharedDevice,
        memory: Option<(&Buffer, &Stream)>,
        slots: usize,
        slot_bytes: u64,
    ) -> Result<Self> {
        let make = || PipelineCore::new(device, memory, slots, slot_bytes);
        Self::of(RINGS.find_or_make(SharedKey::new(device, slots, slot_bytes), PipelineCore::is_sound, make)?)
    }

    fn of(core: Arc<PipelineCore>) -> Result<Self> {
        let log = RunLog { user: core.ring.join(), owner: AtomicU32::new(0), totals: Mutex::default() };
        Ok(Self { core, log: Arc::new(log) })
    }

    /// Says whose chunks a trace shows.
    pub(crate) fn set_owner(&self, owner: u32) {
        self.log.owner.store(owner, Relaxed);
    }

    /// Whose chunks they are.
    pub(crate) fn owner(&self) -> u32 {
        self.log.owner.load(Relaxed)
    }

    /// Bytes of a ring. Slots of any size start aligned: a kernel refuses an f32 at an odd address.
    pub fn ring_bytes(slots: usize, slot_bytes: u64) -> u64 {
        slot_bytes.next_multiple_of(ALIGN_BYTES) * slots as u64
    }

    /// Bytes of its ring.
    pub fn bytes(&self) -> u64 {
        Self::ring_bytes(self.core.slots.len(), self.core.slots.first().map_or(0, |slot| slot.region.bytes()))
    }

    /// The device it runs on.
    pub fn device(&self) -> &SharedDevice {
        &self.core.device
    }

    /// Where it fetches, for others who copy the same way at the same time.
    pub(crate) fn fetch_stream(&self) -> &Stream {
        &self.core.fetch
    }

    /// Where it stores, likewise.
    pub(crate) fn store_stream(&self) -> &Stream {
        &self.core.store
    }

    /// Slots in the ring.
    pub(crate) fn slots(&self) -> usize {
        self.core.slots.len()
    }

    /// Slots that nobody has; all of them while no user has a run.
    pub fn idle_slots(&self) -> usize {
        self.core.ring.idle()
    }

    /// Begins a run: statistics start from zero.
    pub fn begin(&self) {
        // Stores of the run before that are still under way do not belong in this one's.
        let mut totals = lock(&self.log.totals);
        *totals = RunTotals { run: totals.run + 1, ..RunTotals::default() };
    }

    /// Takes the slot whose store ends first, waiting for that store on the host if need be.
    pub fn acquire(&self) -> Result<Slot> {
        self.acquire_while(|_| ()).map(|(slot, ())| slot)
    }

    /// The same with something to do before the wait that needs to know the slot's memory and does not touch it.
    pub fn acquire_while<R>(&self, prepare: impl FnOnce(&Region) -> R) -> Result<(Slot, R)> {
        let slots = &self.core.slots;
        let (index, prepared, stall) = self.core.ring.acquire_while(|index| prepare(&slots[index].region))?;
        // From here on a failure gives the slot back.
        let mut slot = Slot { index, end: None, timed: None, core: self.core.clone(), log: self.log.clone() };
        self.core.harvest(index, None);
        if stall.waited {
            count_waits(Wait::Slot, 1, stall.time.as_nanos() as u64);
            trace::waited(stall.time, Reason::Slot, "wait for a slot", self.owner());
        }
        let traced = self.core.is_traced();
        let mut totals = lock(&self.log.totals);
        slot.timed = (totals.acquired.is_multiple_of(TIMED_EVERY) || traced.is_some()).then_some(Timing { traced });
        totals.acquired += 1;
        totals.stats.stalls += u64::from(stall.waited);
        totals.stats.stall_ns += stall.time.as_nanos() as u64;
        drop(totals);
        Ok((slot, prepared))
    }

    /// Copies regions of the host into parts of the slot: `to` gives offset and length of each.
    pub fn fetch(&self, slot: Slot, from: &[Region], to: &[(u64, u64)]) -> Result<InFlight<Slot>> {
        for stored in self.core.stores_of(from) {
            stored.wait(&self.core.fetch)?;
        }
        slot.stage(&self.core.fetch, Stage::Fetch, |device, memory| {
            let in_slot = |&(offset, len): &(u64, u64)| memory.slice(offset, len);
            let pairs = from.iter().zip(to).map(|(from, part)| Ok((from.clone(), in_slot(part)?)));
            Ok(device.copy_all(&self.core.fetch, &pairs.collect::<Result<Vec<_>>>()?)?)
        })
    }

    /// Runs work on the slot's memory on the caller's stream, after its fetch.
    pub fn update(
        &self,
        slot: InFlight<Slot>,
        compute: &Stream,
        work: impl FnOnce(&dyn Device, &Region) -> Result<()>,
    ) -> Result<InFlight<Slot>> {
        slot.on(compute)?.stage(compute, Stage::Update, work)
    }

    /// Copies parts of the slot back to the host, after its update. `chunk` and `payload_bytes` are for the statistics.
    pub fn store(
        &self,
        slot: InFlight<Slot>,
        from: &[(u64, u64)],
        to: &[Region],
        chunk: usize,
        payload_bytes: u64,
    ) -> Result<InFlight<Slot>> {
        let slot = slot.on(&self.core.store)?;
        let (run, index) = (lock(&self.log.totals).run, slot.index);
        let log = self.log.clone();
        if slot.timed.and_then(|timing| timing.traced).is_none() && trace::is_on() {
            self.core.pace.skip(payload_bytes);
        }
        let trip = Trip { log, run, chunk: chunk as u32, payload_bytes, stored: to.to_vec(), timed: slot.timed };
        slot.stage(&self.core.store, Stage::Store, |device, memory| {
            // Noted before the copies are submitted: those that are accepted must be found even when a later one is
            // refused. Not noted before the stage begins: its end is recorded from here on, and others will wait for it.
            *lock(&self.core.slots[index].trip) = Some(trip);
            let in_slot = |&(offset, len): &(u64, u64)| memory.slice(offset, len);
            let pairs = from.iter().zip(to).map(|(part, to)| Ok((in_slot(part)?, to.clone())));
            Ok(device.copy_all(&self.core.store, &pairs.collect::<Result<Vec<_>>>()?)?)
        })
    }

    /// Gives a slot back to the ring with the mark that ends its use.
    pub fn release(&self, slot: InFlight<Slot>) {
        let (mut slot, end) = slot.into_parts();
        slot.end = end;
    }

    /// Makes a stream wait for all stores that were submitted so far.
    pub(crate) fn after_stores(&self, stream: &Stream) -> Result<()> {
        let stored = self.core.marks.take()?;
        stored.record(&self.core.store)?;
        stored.wait(stream)
    }

    /// Blocks until the stores under way into a region have ended; other stores go on.
    pub fn settle(&self, region: &Region) -> Result<()> {
        for stored in self.core.stores_of(std::slice::from_ref(region)) {
            stored.synchronize()?;
        }
        Ok(())
    }

    /// Waits for every store of this user and for all work that its failed runs left under way, and completes its
    /// statistics.
    pub fn drain(&self) -> Result<()> {
        let is_own = |trip: &Trip| Arc::ptr_eq(&trip.log, &self.log);
        for (index, slot) in self.core.slots.iter().enumerate() {
            if lock(&slot.trip).as_ref().is_some_and(is_own) {
                slot.stored().synchronize()?;
                self.core.harvest(index, Some(&self.log));
            }
        }
        // A trip that broke off before its store may still be fetching: the host must not write under it.
        self.core.ring.settle(Some(self.log.user))
    }

    /// What the run did so far; complete after [`Self::drain`].
    pub fn stats(&self) -> RunStats {
        let totals = lock(&self.log.totals);
        let scaled = |ns: u64| (ns as f64 * totals.stats.store_bytes as f64 / totals.timed_bytes.max(1) as f64) as u64;
        let [fetch_ns, update_ns, store_ns] = totals.timed_ns.map(scaled);
        RunStats { fetch_ns, update_ns, store_ns, ..totals.stats }
    }
}

impl SlotRecord {
    /// The end of the slot's last store.
    fn stored(&self) -> &Arc<Mark> {
        &self.ends[Stage::Store as usize]
    }
}

impl Slot {
    /// Runs one stage on the slot and makes its end the slot's fence.
    fn stage(
        mut self,
        stream: &Stream,
        stage: Stage,
        work: impl FnOnce(&dyn Device, &Region) -> Result<()>,
    ) -> Result<InFlight<Self>> {
        let core = self.core.clone();
        let (device, record) = (&*core.device, &core.slots[self.index]);
        let (end, [begin_time, end_time]) = (&record.ends[stage as usize], &record.timers[stage as usize]);
        if self.timed.is_some() {
            device.record(begin_time, stream)?;
        }
        let mut outcome = work(device, &record.region);
        if self.timed.is_some() {
            outcome = outcome.and(device.record(end_time, stream).map_err(Into::into));
        }
        // Whatever was accepted uses the slot until here, also when the rest was refused.
        let recorded = end.record(stream);
        self.end = Some(end.clone());
        outcome?;
        recorded?;
        Ok(InFlight::until(self, end.clone()))
    }
}

impl PipelineCore {
    /// A ring in memory of the caller's, which the first fetch gets after what the stream was given so far; or on the
    /// device itself.
    fn new(device: &SharedDevice, memory: Option<(&Buffer, &Stream)>, slots: usize, slot_bytes: u64) -> Result<Self> {
        let buffer = match memory {
            Some((given, _)) => given.clone(),
            None => device.alloc(Pipeline::ring_bytes(slots, slot_bytes))?,
        };
        let (stride, marks) = (slot_bytes.next_multiple_of(ALIGN_BYTES), Marks::new(device.clone()));
        let timers = || -> Result<[Event; 2]> { Ok([device.timed_event()?, device.timed_event()?]) };
        let record = |i: usize| -> Result<SlotRecord> {
            Ok(SlotRecord {
                region: buffer.region(i as u64 * stride, slot_bytes)?,
                ends: [marks.take()?, marks.take()?, marks.take()?],
                timers: [timers()?, timers()?, timers()?],
                trip: Mutex::new(None),
            })
        };
        let core = Self {
            slots: (0..slots).map(record).collect::<Result<_>>()?,
            fetch: device.stream("fetch")?,
            store: device.stream("store")?,
            ring: Ring::new(slots),
            pid: std::process::id(),
            device: device.clone(),
            marks,
            pace: Pace::default(),
            traced_by: AtomicU64::new(0),
            _held: Held::ring(buffer.bytes()),
        };
        if let Some((_, after)) = memory {
            let free = core.marks.take()?;
            free.record(after)?;
            free.wait(&core.fetch)?;
        }
        Ok(core)
    }

    /// Whether its streams take work and every slot can be had again: new users must not get a ring that died.
    fn is_sound(&self) -> bool {
        let takes_work = |stream: &Stream| self.marks.take()?.record(stream);
        takes_work(&self.fetch).and(takes_work(&self.store)).and(self.ring.check()).is_ok()
    }

    fn is_forked(&self) -> bool {
        self.pid != std::process::id()
    }

    /// The ends of stores under way into any of these regions.
    fn stores_of(&self, regions: &[Region]) -> Vec<Arc<Mark>> {
        let touches =
            |trip: &Trip| trip.stored.iter().any(|stored| regions.iter().any(|region| region.overlaps(stored)));
        self.slots
            .iter()
            .filter(|slot| lock(&slot.trip).as_ref().is_some_and(touches))
            .map(|slot| slot.stored().clone())
            .collect()
    }

    /// Reads the times of a slot's last trip, which has ended, into the log of its user. With `of`, only if it is that
    /// user's. The slot's next owner harvests too before it records the timers again, so it waits here while another user
    /// reads them.
    fn harvest(&self, index: usize, of: Option<&Arc<RunLog>>) {
        let slot = &self.slots[index];
        let mut noted = lock(&slot.trip);
        let Some(trip) = noted.take_if(|trip| of.is_none_or(|log| Arc::ptr_eq(log, &trip.log))) else { return };
        count_fetched(Use::Optimizer, trip.payload_bytes);
        count_stored(Use::Optimizer, trip.payload_bytes);
        let mut times = [0; 3];
        if trip.timed.is_some() {
            for (time, [begin, end]) in times.iter_mut().zip(&slot.timers) {
                // A trip that failed has no times worth keeping; its error was returned when it failed.
                let Ok(elapsed) = self.device.elapsed_ns(begin, end) else { return };
                *time = elapsed;
            }
        }
        if let Some(recorder) = trace::current() {
            self.report_trip(&recorder, index, &trip);
        }
        let mut totals = lock(&trip.log.totals);
        if totals.run != trip.run {
            return;
        }
        totals.stats.chunks += 1;
        totals.stats.fetch_bytes += trip.payload_bytes;
        totals.stats.store_bytes += trip.payload_bytes;
        if trip.timed.is_some() {
            totals.timed_bytes += trip.payload_bytes;
            totals.timed_ns.iter_mut().zip(times).for_each(|(sum, time)| *sum += time);
        }
    }

    /// Whether the next chunk is timed for a trace, with the bytes of those before it that were not.
    fn is_traced(self: &Arc<Self>) -> Option<u64> {
        let recorder = trace::current()?;
        if self.traced_by.swap(recorder.id(), Relaxed) != recorder.id() {
            let core: Arc<dyn Source> = self.clone();
            recorder.add_source(Arc::downgrade(&core));
        }
        let clock = recorder.clock(&self.device)?;
        self.pace.take(clock.pace_ns(), recorder.now_ns())
    }

    /// The spans of a trip that has ended.
    fn report_trip(&self, recorder: &Recorder, index: usize, trip: &Trip) {
        let Some(Timing { traced: Some(untimed_bytes) }) = trip.timed else { return };
        let Some(clock) = recorder.clock(&self.device) else { return };
        for (kind, [begin, end]) in KINDS.into_iter().zip(&self.slots[index].timers) {
            let Some((start_ns, end_ns)) = clock.span_ns(begin, end) else { return };
            recorder.push(Span {
                start_ns,
                end_ns,
                bytes: trip.payload_bytes,
                untimed_bytes,
                owner: trip.log.owner.load(Relaxed),
                chunk: Some(trip.chunk),
                slot: Some(index as u32),
                ..Span::new(kind, Label::Chunk)
            });
        }
    }
}

impl Source for PipelineCore {
    /// Trips that nobody has followed to their ends yet. They stay noted, for the statistics of their users.
    fn report(&self, recorder: &Recorder) {
        if self.is_forked() {
            return;
        }
        for (index, slot) in self.slots.iter().enumerate() {
            let noted = lock(&slot.trip);
            if let Some(trip) = &*noted
                && slot.stored().synchronize().is_ok()
            {
                self.report_trip(recorder, index, trip);
            }
        }
    }
}
