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
//! Nothing is allocated after [`Pipeline::new`].

use std::sync::Arc;

use forebay_device::{ALIGN_BYTES, Buffer, Device, Event, Region, SharedDevice, Stream};
use serde::Serialize;

use super::in_flight::InFlight;
use super::marks::{Mark, Marks};
use super::ring::Ring;

use crate::error::Result;
use crate::memory::Allocator;
use crate::sync::{Mutex, lock};
use crate::trace::{Span, Stage, Trace};

/// The three streams' worth of machinery, over one ring.
#[derive(Debug)]
pub struct Pipeline {
    fetch: Stream,
    store: Stream,
    core: Arc<PipelineCore>,
}

/// What slots refer to; they may outlive the pipeline.
#[derive(Debug)]
struct PipelineCore {
    device: SharedDevice,
    ring: Ring<usize, Arc<Mark>>,
    slots: Vec<SlotRecord>,
    epoch: Event,
    totals: Mutex<RunTotals>,
}

#[derive(Debug)]
struct SlotRecord {
    region: Region,
    /// The end of each stage, in the order of [`Stage::ALL`].
    ends: [Arc<Mark>; 3],
    /// Begin and end of each stage with their times, recorded on the trips that are timed.
    timers: [[Event; 2]; 3],
    trip: Mutex<Option<Trip>>,
}

/// The last trip of a chunk through a slot, from its store until its times were read.
#[derive(Debug, Clone)]
struct Trip {
    run: u64,
    chunk: u32,
    payload_bytes: u64,
    stored: Vec<Region>,
    timed: bool,
}

/// One chunk in this many is timed: a time costs the copy engine more than the ordering does.
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
    trace: Trace,
}

impl Drop for Pipeline {
    /// The ring's memory may be the caller's, who must not get it back while the device uses it.
    fn drop(&mut self) {
        let _ = self.drain();
    }
}

/// A fixed part of the ring's memory, owned until dropped.
#[derive(Debug)]
pub struct Slot {
    index: usize,
    /// The end of the work accepted so far; `None` while the device has not touched it.
    end: Option<Arc<Mark>>,
    timed: bool,
    core: Arc<PipelineCore>,
}

impl Slot {
    /// Its memory on the device.
    pub fn region(&self) -> &Region {
        &self.core.slots[self.index].region
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.core.ring.release(self.index, self.end.take());
    }
}

impl Pipeline {
    /// Allocates the ring, the streams and the events.
    pub fn new(allocator: &Allocator, slots: usize, slot_bytes: u64) -> Result<Self> {
        let memory = allocator.alloc(Self::ring_bytes(slots, slot_bytes))?;
        Self::build(allocator.device().clone(), &memory, slots, slot_bytes)
    }

    /// The same in memory of the caller's, of at least [`Self::ring_bytes`]. What was submitted to `after`
    /// so far may still use that memory; the first fetch waits for it.
    pub fn in_memory(
        device: SharedDevice,
        memory: &Buffer,
        slots: usize,
        slot_bytes: u64,
        after: &Stream,
    ) -> Result<Self> {
        let pipeline = Self::build(device, memory, slots, slot_bytes)?;
        pipeline.device().record(&pipeline.core.epoch, after)?;
        pipeline.device().wait(&pipeline.fetch, &pipeline.core.epoch)?;
        Ok(pipeline)
    }

    /// Bytes of a ring. Slots of any size start aligned: a kernel refuses an f32 at an odd address.
    pub fn ring_bytes(slots: usize, slot_bytes: u64) -> u64 {
        slot_bytes.next_multiple_of(ALIGN_BYTES) * slots as u64
    }

    fn build(device: SharedDevice, memory: &Buffer, slots: usize, slot_bytes: u64) -> Result<Self> {
        let stride = slot_bytes.next_multiple_of(ALIGN_BYTES);
        let marks = Marks::new(device.clone());
        let timers = || -> Result<[Event; 2]> { Ok([device.timed_event()?, device.timed_event()?]) };
        let records = (0..slots)
            .map(|i| {
                Ok(SlotRecord {
                    region: memory.region(i as u64 * stride, slot_bytes)?,
                    ends: [marks.take()?, marks.take()?, marks.take()?],
                    timers: [timers()?, timers()?, timers()?],
                    trip: Mutex::new(None),
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let (fetch, store, epoch) = (device.stream("fetch")?, device.stream("store")?, device.timed_event()?);
        let core = PipelineCore { ring: Ring::new(0..slots), slots: records, epoch, totals: Mutex::default(), device };
        Ok(Self { fetch, store, core: Arc::new(core) })
    }

    /// The device it runs on.
    pub fn device(&self) -> &SharedDevice {
        &self.core.device
    }

    /// Where it fetches, for others who copy the same way at the same time.
    pub(crate) fn fetch_stream(&self) -> &Stream {
        &self.fetch
    }

    /// Where it stores, likewise.
    pub(crate) fn store_stream(&self) -> &Stream {
        &self.store
    }

    /// Slots in the ring; all of them between runs.
    pub fn idle_slots(&self) -> usize {
        self.core.ring.idle()
    }

    /// Keeps the spans of the next runs, at most this many for each. A traced run begins only after the one before has
    /// ended, so that their times have one origin.
    pub fn set_trace(&self, spans: usize) {
        lock(&self.core.totals).trace = Trace::with_capacity(spans);
    }

    /// Begins a run: statistics start from zero.
    pub fn begin(&self) -> Result<()> {
        // The totals first: stores of the run before that are still under way do not belong in this one's.
        let mut totals = lock(&self.core.totals);
        totals.trace.clear();
        let (run, trace) = (totals.run + 1, std::mem::take(&mut totals.trace));
        *totals = RunTotals { run, trace, ..RunTotals::default() };
        drop(totals);
        if !self.core.is_untraced() {
            self.drain()?;
            self.device().record(&self.core.epoch, &self.fetch)?;
        }
        Ok(())
    }

    /// Takes the slot whose store ends first, waiting for that store on the host if need be.
    pub fn acquire(&self) -> Result<Slot> {
        self.acquire_while(|_| ()).map(|(slot, ())| slot)
    }

    /// The same with something to do before the wait that needs to know the slot's memory and does not touch it.
    pub fn acquire_while<R>(&self, prepare: impl FnOnce(&Region) -> R) -> Result<(Slot, R)> {
        let slots = &self.core.slots;
        let (index, prepared, stall) = self.core.ring.acquire_while(|&index| prepare(&slots[index].region))?;
        // From here on a failure gives the slot back.
        let mut slot = Slot { index, end: None, timed: false, core: self.core.clone() };
        self.core.harvest(index)?;
        let mut totals = lock(&self.core.totals);
        slot.timed = totals.acquired.is_multiple_of(TIMED_EVERY) || !totals.trace.is_off();
        totals.acquired += 1;
        totals.stats.stalls += u64::from(stall.waited);
        totals.stats.stall_ns += stall.time.as_nanos() as u64;
        drop(totals);
        Ok((slot, prepared))
    }

    /// Copies regions of the host into parts of the slot: `to` gives offset and length of each.
    pub fn fetch(&self, slot: Slot, from: &[Region], to: &[(u64, u64)]) -> Result<InFlight<Slot>> {
        for stored in self.core.stores_of(from) {
            stored.wait(&self.fetch)?;
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
        let slot = slot.on(&self.store)?;
        let (run, index) = (lock(&self.core.totals).run, slot.index);
        let trip = Trip { run, chunk: chunk as u32, payload_bytes, stored: to.to_vec(), timed: slot.timed };
        slot.stage(&self.store, Stage::Store, |device, memory| {
            // Noted before the copies are submitted: those that are accepted must be found even when a later one is
            // refused. Not noted before the stage begins: its end is recorded from here on, and others will wait for it.
            *lock(&self.core.slots[index].trip) = Some(trip);
            let in_slot = |&(offset, len): &(u64, u64)| memory.slice(offset, len);
            let pairs = from.iter().zip(to).map(|(part, to)| Ok((in_slot(part)?, to.clone())));
            Ok(device.copy_all(&self.store, &pairs.collect::<Result<Vec<_>>>()?)?)
        })
    }

    /// Gives a slot back to the ring with the mark that ends its use.
    pub fn release(&self, slot: InFlight<Slot>) {
        let (mut slot, end) = slot.into_parts();
        slot.end = end;
    }

    /// Blocks until the stores under way into a region have ended; other stores go on.
    pub fn settle(&self, region: &Region) -> Result<()> {
        for stored in self.core.stores_of(std::slice::from_ref(region)) {
            stored.synchronize()?;
        }
        Ok(())
    }

    /// Waits for every store and for all work that a failed run left under way, and completes the statistics.
    pub fn drain(&self) -> Result<()> {
        for (index, slot) in self.core.slots.iter().enumerate() {
            if lock(&slot.trip).is_some() {
                slot.stored().synchronize()?;
                self.core.harvest(index)?;
            }
        }
        // A trip that broke off before its store may still be fetching: the host must not write under it.
        self.core.ring.settle()
    }

    /// What the run did so far; complete after [`Self::drain`].
    pub fn stats(&self) -> RunStats {
        let totals = lock(&self.core.totals);
        let scaled = |ns: u64| (ns as f64 * totals.stats.store_bytes as f64 / totals.timed_bytes.max(1) as f64) as u64;
        let [fetch_ns, update_ns, store_ns] = totals.timed_ns.map(scaled);
        RunStats { fetch_ns, update_ns, store_ns, ..totals.stats }
    }

    /// The spans of the run; complete after [`Self::drain`].
    pub fn trace(&self) -> Trace {
        lock(&self.core.totals).trace.clone()
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
        if self.timed {
            device.record(begin_time, stream)?;
        }
        let mut outcome = work(device, &record.region);
        if self.timed {
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
    fn is_untraced(&self) -> bool {
        lock(&self.totals).trace.is_off()
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

    /// Reads the times of a slot's last trip, which has ended, into the totals.
    fn harvest(&self, index: usize) -> Result<()> {
        let slot = &self.slots[index];
        let Some(trip) = lock(&slot.trip).take() else { return Ok(()) };
        let mut times = [0; 3];
        if trip.timed {
            for (time, [begin, end]) in times.iter_mut().zip(&slot.timers) {
                // A trip that failed has no times worth keeping; its error was returned when it failed.
                let Ok(elapsed) = self.device.elapsed_ns(begin, end) else { return Ok(()) };
                *time = elapsed;
            }
        }
        let mut totals = lock(&self.totals);
        if totals.run != trip.run {
            return Ok(());
        }
        totals.stats.chunks += 1;
        totals.stats.fetch_bytes += trip.payload_bytes;
        totals.stats.store_bytes += trip.payload_bytes;
        if trip.timed {
            totals.timed_bytes += trip.payload_bytes;
            totals.timed_ns.iter_mut().zip(times).for_each(|(sum, time)| *sum += time);
        }
        if totals.trace.is_off() {
            return Ok(());
        }
        for ((stage, time), [begin, _]) in Stage::ALL.into_iter().zip(times).zip(&slot.timers) {
            // A trip from before the trace was asked for has no place in it.
            let Ok(start_ns) = self.device.elapsed_ns(&self.epoch, begin) else { return Ok(()) };
            totals.trace.push(Span {
                stage,
                chunk: trip.chunk,
                slot: index as u32,
                start_ns,
                end_ns: start_ns + time,
                bytes: trip.payload_bytes,
            });
        }
        Ok(())
    }
}
