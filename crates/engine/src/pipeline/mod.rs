//! Fetch, update, store: three streams, a ring of slots, and events between them.
//!
//! ```text
//! host state ==fetch==> [slot] ==update==> [same slot] ==store==> host state
//!            stream F            caller's stream            stream S
//! ```
//!
//! Each arrow takes a slot by value and hands it on as [`InFlight`], with the event that ends the arrow. What the events
//! order:
//! - an update waits for its slot's fetch, and a store for its slot's update;
//! - a slot is fetched into again after its store has ended: [`Pipeline::acquire`] waits for that on the host, so at
//!   most as many chunks as there are slots are ever queued, and small copies of others are not stuck behind them;
//! - bytes of the host are fetched again after their last store has ended: the fetch stream waits for it.
//!
//! A slot that is dropped on the way, because something failed, goes back to the ring with the event that ends
//! whatever was accepted of its work. Nothing is allocated after [`Pipeline::new`].

mod in_flight;
pub(crate) mod ring;

use std::sync::Arc;

use forebay_device::{ALIGN_BYTES, Buffer, Device, Event, Region, SharedDevice, Stream};
use serde::Serialize;

pub use in_flight::InFlight;
pub(crate) use ring::{Fence, Ring};

use crate::error::Result;
use crate::pool::{Lease, Pool};
use crate::sync::{Mutex, lock};
use crate::trace::{Span, Stage, Trace};

/// The three streams' worth of machinery, over one ring.
#[derive(Debug)]
pub struct Pipeline {
    fetch: Stream,
    store: Stream,
    shared: Arc<Shared>,
}

/// What slots refer to; they may outlive the pipeline.
#[derive(Debug)]
struct Shared {
    device: SharedDevice,
    ring: Ring<usize, EventFence>,
    slots: Vec<SlotRecord>,
    epoch: Event,
    books: Mutex<Books>,
    /// Holds the ring's entry in the pool's books; the slots' regions hold the memory itself.
    _lease: Option<Lease<Buffer>>,
}

#[derive(Debug)]
struct SlotRecord {
    region: Region,
    /// The end of each stage, in the order of [`Stage::ALL`].
    ends: [Event; 3],
    /// Begin and end of each stage with their times, recorded on the passages that are timed.
    timers: [[Event; 2]; 3],
    passage: Mutex<Option<Passage>>,
}

/// The last trip of a chunk through a slot, from its store until its times were read.
#[derive(Debug, Clone)]
struct Passage {
    run: u64,
    chunk: u32,
    payload_bytes: u64,
    stored: Vec<Region>,
    timed: bool,
}

/// An event as a fence of the ring.
#[derive(Debug)]
pub(crate) struct EventFence {
    pub(crate) device: SharedDevice,
    pub(crate) event: Event,
}

impl Fence for EventFence {
    fn reached(&self) -> Result<bool> {
        Ok(self.device.query(&self.event)?)
    }
    fn wait(&self) -> Result<()> {
        Ok(self.device.synchronize(&self.event)?)
    }
}

/// One chunk in so many is timed: a time costs the copy engine more than the ordering does.
const TIMED_EVERY: u64 = 64;

/// What one run through the pipeline did. Bytes are payload, each way. Without a trace, the times of the stages are
/// measured on one chunk in 64 and scaled by bytes.
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
    /// How long in all, from finding a slot's store not ended until it had; the next chunk is prepared meanwhile.
    pub stall_ns: u64,
}

#[derive(Debug, Default)]
struct Books {
    run: u64,
    /// Slots acquired in this run.
    acquired: u64,
    stats: RunStats,
    /// Bytes and times of the stages of the timed chunks alone.
    timed_bytes: u64,
    timed_ns: [u64; 3],
    trace: Trace,
}

impl Drop for Pipeline {
    /// The ring's memory may be somebody else's, who must not get it back while the device uses it.
    fn drop(&mut self) {
        let _ = self.drain();
    }
}

/// A fixed part of the ring's memory, owned until dropped.
#[derive(Debug)]
pub struct Slot {
    index: usize,
    /// The event that ends the work accepted so far; none while the device has not touched it.
    busy: Option<Event>,
    timed: bool,
    shared: Arc<Shared>,
}

impl Slot {
    /// Its memory on the device.
    pub fn region(&self) -> &Region {
        &self.shared.slots[self.index].region
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let fence = self.busy.take().map(|event| EventFence { device: self.shared.device.clone(), event });
        self.shared.ring.release(self.index, fence);
    }
}

impl Pipeline {
    /// Allocates the ring, the streams and the events.
    pub fn new(pool: &Pool, slots: usize, slot_bytes: u64) -> Result<Self> {
        let memory = pool.device_buffer("slot ring", Self::ring_bytes(slots, slot_bytes))?;
        Self::build(pool.device().clone(), &memory, slots, slot_bytes, Some(memory.clone()))
    }

    /// The same in memory that somebody else allocated, of at least [`Self::ring_bytes`]. What was submitted to `after`
    /// so far may still use that memory; the first fetch waits for it.
    pub fn in_memory(
        device: SharedDevice,
        memory: &Buffer,
        slots: usize,
        slot_bytes: u64,
        after: &Stream,
    ) -> Result<Self> {
        let pipeline = Self::build(device, memory, slots, slot_bytes, None)?;
        pipeline.device().record(&pipeline.shared.epoch, after)?;
        pipeline.device().wait(&pipeline.fetch, &pipeline.shared.epoch)?;
        Ok(pipeline)
    }

    /// Bytes of a ring. Slots start aligned, whatever their size: a kernel refuses an f32 at an odd address.
    pub fn ring_bytes(slots: usize, slot_bytes: u64) -> u64 {
        slot_bytes.next_multiple_of(ALIGN_BYTES) * slots as u64
    }

    fn build(
        device: SharedDevice,
        memory: &Buffer,
        slots: usize,
        slot_bytes: u64,
        lease: Option<Lease<Buffer>>,
    ) -> Result<Self> {
        let stride = slot_bytes.next_multiple_of(ALIGN_BYTES);
        let timers = || -> Result<[Event; 2]> { Ok([device.timed_event()?, device.timed_event()?]) };
        let records = (0..slots)
            .map(|i| {
                Ok(SlotRecord {
                    region: memory.region(i as u64 * stride, slot_bytes)?,
                    ends: [device.event()?, device.event()?, device.event()?],
                    timers: [timers()?, timers()?, timers()?],
                    passage: Mutex::new(None),
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let (fetch, store, epoch) = (device.stream("fetch")?, device.stream("store")?, device.timed_event()?);
        let shared =
            Shared { ring: Ring::new(0..slots), slots: records, epoch, books: Mutex::default(), _lease: lease, device };
        Ok(Self { fetch, store, shared: Arc::new(shared) })
    }

    /// The device it runs on.
    pub fn device(&self) -> &SharedDevice {
        &self.shared.device
    }

    /// Where it fetches, for others who copy the same way at the same time.
    pub(crate) fn fetch_stream(&self) -> &Stream {
        &self.fetch
    }

    /// Where it stores, likewise.
    pub(crate) fn store_stream(&self) -> &Stream {
        &self.store
    }

    /// Slots that nobody owns; all of them between runs.
    pub fn idle_slots(&self) -> usize {
        self.shared.ring.idle()
    }

    /// Keeps the spans of the next runs, at most so many for each. A traced run begins only after the one before has
    /// ended, so that their times have one origin.
    pub fn set_trace(&self, spans: usize) {
        lock(&self.shared.books).trace = Trace::with_capacity(spans);
    }

    /// Begins a run: statistics start from zero.
    pub fn begin(&self) -> Result<()> {
        // The books first: stores of the run before that are still under way do not belong in this one's.
        let mut books = lock(&self.shared.books);
        books.trace.clear();
        let (run, trace) = (books.run + 1, std::mem::take(&mut books.trace));
        *books = Books { run, trace, ..Books::default() };
        drop(books);
        if !self.shared.is_untraced() {
            self.drain()?;
            self.device().record(&self.shared.epoch, &self.fetch)?;
        }
        Ok(())
    }

    /// Takes the slot whose store ends first, waiting for that store on the host if need be.
    pub fn acquire(&self) -> Result<Slot> {
        self.acquire_while(|_| ()).map(|(slot, ())| slot)
    }

    /// The same with something to do before the wait that needs to know the slot's memory and does not touch it.
    pub fn acquire_while<R>(&self, prepare: impl FnOnce(&Region) -> R) -> Result<(Slot, R)> {
        let slots = &self.shared.slots;
        let (index, prepared, stall) = self.shared.ring.acquire_while(|&index| prepare(&slots[index].region))?;
        // From here on a failure gives the slot back.
        let mut slot = Slot { index, busy: None, timed: false, shared: self.shared.clone() };
        self.shared.harvest(index)?;
        let mut books = lock(&self.shared.books);
        slot.timed = books.acquired.is_multiple_of(TIMED_EVERY) || !books.trace.is_off();
        books.acquired += 1;
        books.stats.stalls += u64::from(stall.waited);
        books.stats.stall_ns += stall.time.as_nanos() as u64;
        drop(books);
        Ok((slot, prepared))
    }

    /// Copies regions of the host into parts of the slot: `to` gives offset and length of each.
    pub fn fetch(&self, slot: Slot, from: &[Region], to: &[(u64, u64)]) -> Result<InFlight<Slot>> {
        for stored in self.shared.stores_of(from) {
            self.device().wait(&self.fetch, &stored)?;
        }
        slot.stage(&self.fetch, Stage::Fetch, |device, memory| {
            let in_slot = |&(offset, len): &(u64, u64)| memory.slice(offset, len);
            let pairs = from.iter().zip(to).map(|(from, part)| Ok((from.clone(), in_slot(part)?)));
            Ok(device.copy_all(&self.fetch, &pairs.collect::<Result<Vec<_>>>()?)?)
        })
    }

    /// Runs work on the slot's memory on the caller's stream, after its fetch.
    pub fn update(
        &self,
        slot: InFlight<Slot>,
        compute: &Stream,
        work: impl FnOnce(&dyn Device, &Region) -> Result<()>,
    ) -> Result<InFlight<Slot>> {
        slot.on(&**self.device(), compute)?.stage(compute, Stage::Update, work)
    }

    /// Copies parts of the slot back to the host, after its update. `chunk` and `payload_bytes` are for the books.
    pub fn store(
        &self,
        slot: InFlight<Slot>,
        from: &[(u64, u64)],
        to: &[Region],
        chunk: usize,
        payload_bytes: u64,
    ) -> Result<InFlight<Slot>> {
        let slot = slot.on(&**self.device(), &self.store)?;
        let (run, index) = (lock(&self.shared.books).run, slot.index);
        let passage = Passage { run, chunk: chunk as u32, payload_bytes, stored: to.to_vec(), timed: slot.timed };
        slot.stage(&self.store, Stage::Store, |device, memory| {
            // Noted before the copies are submitted: those that are accepted must be found even when a later one is
            // refused. Not noted before the stage begins: its end is recorded from here on, and somebody will wait.
            *lock(&self.shared.slots[index].passage) = Some(passage);
            let in_slot = |&(offset, len): &(u64, u64)| memory.slice(offset, len);
            let pairs = from.iter().zip(to).map(|(part, to)| Ok((in_slot(part)?, to.clone())));
            Ok(device.copy_all(&self.store, &pairs.collect::<Result<Vec<_>>>()?)?)
        })
    }

    /// Gives a slot back to the ring with the event that ends its use.
    pub fn release(&self, slot: InFlight<Slot>) {
        let (mut slot, done) = slot.into_parts();
        slot.busy = Some(done);
    }

    /// Blocks until the stores under way into a region have ended; other stores go on.
    pub fn settle(&self, region: &Region) -> Result<()> {
        for stored in self.shared.stores_of(std::slice::from_ref(region)) {
            self.device().synchronize(&stored)?;
        }
        Ok(())
    }

    /// Blocks until every store has ended, and whatever a failed run left under way, and completes the books.
    pub fn drain(&self) -> Result<()> {
        for (index, slot) in self.shared.slots.iter().enumerate() {
            if lock(&slot.passage).is_some() {
                self.device().synchronize(slot.stored())?;
                self.shared.harvest(index)?;
            }
        }
        // A passage that broke off before its store may still be fetching: the host must not write under it.
        self.shared.ring.settle()
    }

    /// What the run did so far; complete after [`Self::drain`].
    pub fn stats(&self) -> RunStats {
        let books = lock(&self.shared.books);
        let scaled = |ns: u64| (ns as f64 * books.stats.store_bytes as f64 / books.timed_bytes.max(1) as f64) as u64;
        let [fetch_ns, update_ns, store_ns] = books.timed_ns.map(scaled);
        RunStats { fetch_ns, update_ns, store_ns, ..books.stats }
    }

    /// The spans of the run; complete after [`Self::drain`].
    pub fn trace(&self) -> Trace {
        lock(&self.shared.books).trace.clone()
    }
}

impl SlotRecord {
    /// The end of the slot's last store.
    fn stored(&self) -> &Event {
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
        let shared = self.shared.clone();
        let (device, record) = (&*shared.device, &shared.slots[self.index]);
        let (end, [begin_time, end_time]) = (&record.ends[stage as usize], &record.timers[stage as usize]);
        if self.timed {
            device.record(begin_time, stream)?;
        }
        let mut outcome = work(device, &record.region);
        if self.timed {
            outcome = outcome.and(device.record(end_time, stream).map_err(Into::into));
        }
        // Whatever was accepted uses the slot until here, also when the rest was refused. A refused record is tried
        // once more: without it the slot would go back while work on it may still be running.
        let recorded = device.record(end, stream).or_else(|error| device.record(end, stream).and(Err(error)));
        self.busy = Some(end.clone());
        outcome?;
        recorded?;
        Ok(InFlight::new(self, end.clone()))
    }
}

impl Shared {
    fn is_untraced(&self) -> bool {
        lock(&self.books).trace.is_off()
    }

    /// The ends of stores under way into any of these regions.
    fn stores_of(&self, regions: &[Region]) -> Vec<Event> {
        let touches = |passage: &Passage| {
            passage.stored.iter().any(|stored| regions.iter().any(|region| region.overlaps(stored)))
        };
        self.slots
            .iter()
            .filter(|slot| lock(&slot.passage).as_ref().is_some_and(touches))
            .map(|slot| slot.stored().clone())
            .collect()
    }

    /// Reads the times of a slot's last passage, which has ended, into the books.
    fn harvest(&self, index: usize) -> Result<()> {
        let slot = &self.slots[index];
        let Some(passage) = lock(&slot.passage).take() else { return Ok(()) };
        let mut times = [0; 3];
        if passage.timed {
            for (time, [begin, end]) in times.iter_mut().zip(&slot.timers) {
                // A passage that broke off has no times worth keeping; what broke it was told where it happened.
                let Ok(elapsed) = self.device.elapsed_ns(begin, end) else { return Ok(()) };
                *time = elapsed;
            }
        }
        let mut books = lock(&self.books);
        if books.run != passage.run {
            return Ok(());
        }
        books.stats.chunks += 1;
        books.stats.fetch_bytes += passage.payload_bytes;
        books.stats.store_bytes += passage.payload_bytes;
        if passage.timed {
            books.timed_bytes += passage.payload_bytes;
            books.timed_ns.iter_mut().zip(times).for_each(|(sum, time)| *sum += time);
        }
        if books.trace.is_off() {
            return Ok(());
        }
        for ((stage, time), [begin, _]) in Stage::ALL.into_iter().zip(times).zip(&slot.timers) {
            // A passage from before the trace was asked for has no place in it.
            let Ok(start_ns) = self.device.elapsed_ns(&self.epoch, begin) else { return Ok(()) };
            books.trace.push(Span {
                stage,
                chunk: passage.chunk,
                slot: index as u32,
                start_ns,
                end_ns: start_ns + time,
                bytes: passage.payload_bytes,
            });
        }
        Ok(())
    }
}
