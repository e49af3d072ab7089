//! Updates on the host: gradients are copied to the host through a pinned ring, the host's threads update the state in
//! place, and the new weights are copied back.
//!
//! ```text
//! gradient, weight ==down==> [pinned slot] --threads: state, master, weight--> [same slot] ==up==> weight
//!                 stream D                                                    stream U
//! ```
//!
//! One thread drives. It submits the copy down of a chunk, starts the update of the chunk before, and submits the copy
//! up of the chunk before that when its update has ended. So the threads always have one chunk to work on and one
//! waiting, and at most as many chunks as there are slots are under way. What orders the streams:
//! - the copy down waits for the caller's stream as it was when the step began;
//! - the host waits for the copy down, then for its threads, then submits the copy up;
//! - the caller's stream waits for the last copy up, so what it does after the step sees the new weights.
//!
//! Beside a streamed half, D is its store stream and U its fetch stream; see [Note: one queue for each direction].
//!
//! A slot takes as many consecutive chunks as fit: the size of a chunk counts its state, and gradient and weight are
//! fewer bytes than that. Few large copies keep a wire busier than many small ones.
//!
//! Parameters that lie on the host are updated in place and touch neither slots nor streams.
//!
//! Weights are copied down too. If a weight is not the rounding of its master, it replaces the master. Only the weight
//! itself can show that: torch's version counters do not count changes through `.data`.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use forebay_device::{
    Error as DeviceError, HostOptions, HostThreads, HostUpdate, HostWork, Region, Scalars, SharedDevice, Slab,
    SlabLayout, Stream,
};
use serde::Serialize;

use super::host_ring::{HeldSlot, HostSlots, LaneSlot, LaneStreams};
use super::hybrid::{Claims, Progress};
use super::segments::{Operand, StepInputs, TableStep};
use crate::error::{Error, Result};
use crate::flow::{InFlight, Mark, Marks, Pipeline};
use crate::memory::{Allocator, Lease};
use crate::plan::{Chunk, Piece};
use crate::sync::{Mutex, lock};
use crate::totals::{Use, count_fetched, count_stored};
use crate::trace::{self, Kind, Label, Pace, Reason, Span};

/// The most chunks that may be on their way down, and the most that the threads may have, when the next slot is asked
/// for. One slot must remain free: a lane that held all slots would wait for ever.
fn depths(slots: usize) -> (usize, usize) {
    match slots {
        // Nothing is copied down, and no slot is needed.
        0 => (0, 2),
        1..=2 => (0, 1),
        3 => (1, 1),
        4..=5 => (1, 2),
        6..=7 => (2, 2),
        _ => (3, 2),
    }
}

/// How many times more chunks are taken at once if parameters lie on the host.
const IN_PLACE: u64 = 16;

/// The streams of a step.
///
/// [Note: one queue for each direction] A copy engine seems to stay with a stream for as long as that stream has copies
/// ready, and a streamed step that is limited by the wire always has stores ready. Gradients on a stream of their own
/// were seen to wait until the streamed half was done. In one stream, copies run in the order in which they were
/// submitted, so both halves progress: at most the streamed half's slots are ahead of a gradient.
struct Directions<'a> {
    down: &'a Stream,
    up: &'a Stream,
}

/// Weights and gradients start at multiples of this in a slot: a line of the cache.
const SLOT_ALIGN_BYTES: u64 = 64;

/// An f32 each for scale and skip.
const FLAG_BYTES: [u64; 2] = [4; 2];

/// What the host's part of one step did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct HostStats {
    /// Chunks updated on the host.
    pub chunks: u64,
    /// Bytes of state updated there.
    pub state_bytes: u64,
    /// Bytes copied down in the step.
    pub down_bytes: u64,
    /// Bytes that went up.
    pub up_bytes: u64,
    /// Time from the first chunk to the last.
    pub run_ns: u64,
    /// How long the driver waited for the wire: for gradients, and for slots whose weights were still going up.
    pub wire_wait_ns: u64,
    /// How long it waited for the threads.
    pub update_wait_ns: u64,
}

/// One optimizer's part on the host. Threads, ring and streams are shared with others that want the same.
#[derive(Debug)]
pub(super) struct HostLane {
    device: SharedDevice,
    threads: Arc<HostThreads>,
    streams: Arc<LaneStreams>,
    /// `None` if all parameters lie on the host.
    slots: OnceLock<HostSlots>,
    slot_bytes: u64,
    /// What the caller's stream had reached when the step began; and the end of the last copy up.
    ready: Arc<Mark>,
    ended: Arc<Mark>,
    /// Scale and skip of the step, brought down.
    flags: Lease<Slab>,
    flags_landed: Arc<Mark>,
    stats: Mutex<HostStats>,
    /// Whose it is in a trace.
    owner: u32,
    /// How much of what goes down, and of what goes up, a trace times.
    paces: [Pace; 2],
    /// Set by tests: the next update fails on a thread.
    fails_next: AtomicBool,
}

/// Submits copies to or from a slot; `end` marks their end, even if some were refused.
fn transfer<'a>(
    mut held: HeldSlot<'a>,
    stream: &Stream,
    pairs: &[(Region, Region)],
    end: fn(&LaneSlot) -> &Arc<Mark>,
    (pace, shown): (&Pace, Span),
) -> Result<InFlight<HeldSlot<'a>>> {
    let bytes = pairs.iter().map(|(from, _)| from.bytes()).sum();
    let traced = trace::timed(held.device(), stream, Some((pace, bytes)));
    let end = end(held.slot()).clone();
    let outcome = held.device().copy_all(stream, pairs);
    if let Some(traced) = traced {
        traced.end(stream, Span { bytes, ..shown });
    }
    let recorded = end.record(stream);
    held.end = Some(end.clone());
    outcome?;
    recorded?;
    Ok(InFlight::until(held, end))
}

/// Consecutive elements of one tensor that has a gradient.
struct TensorRun {
    tensor: usize,
    offset: u64,
    elements: u64,
    /// Where weight and gradient lie in the slot.
    weight_at: u64,
    grad_at: u64,
}

impl TensorRun {
    /// These elements of a tensor.
    fn of(&self, tensor: &Region, width: u64) -> Result<Region> {
        Ok(tensor.slice(self.offset * width, self.elements * width)?)
    }

    /// Their weights in a slot.
    fn weight(&self, held: &HeldSlot<'_>, width: u64) -> Result<Region> {
        Ok(held.slot().region.slice(self.weight_at, self.elements * width)?)
    }

    /// Their gradients in a slot.
    fn grad(&self, held: &HeldSlot<'_>, width: u64) -> Result<Region> {
        Ok(held.slot().region.slice(self.grad_at, self.elements * width)?)
    }
}

/// Chunks under way: first their slot is in flight to the host, then it is with the threads.
struct Passage<'a, S> {
    table: TableStep<'a>,
    chunks: &'a [Chunk],
    /// Table and chunks by their numbers.
    claimed: (usize, Range<usize>),
    runs: Vec<TensorRun>,
    /// None for parameters on the host.
    slot: Option<S>,
}

impl HostLane {
    /// Starts the threads and pins the ring, unless others have them; no slots are needed if all parameters lie on the
    /// host.
    pub(super) fn new(
        memory: &Allocator,
        options: &HostOptions,
        slots: usize,
        slot_bytes: u64,
        owner: u32,
    ) -> Result<Self> {
        let device = memory.device().clone();
        let marks = Marks::new(device.clone());
        let lane = Self {
            threads: HostThreads::shared(options)?,
            streams: LaneStreams::of(&device)?,
            slots: OnceLock::new(),
            slot_bytes,
            ready: marks.take()?,
            ended: marks.take()?,
            flags: memory.pin(&FLAG_BYTES)?,
            flags_landed: marks.take()?,
            stats: Mutex::default(),
            owner,
            paces: Default::default(),
            fails_next: AtomicBool::new(false),
            device,
        };
        lane.open_ring(memory, slots)?;
        Ok(lane)
    }

    /// Pins the ring or joins its users, if it does not use one yet.
    pub(super) fn open_ring(&self, memory: &Allocator, slots: usize) -> Result<()> {
        if slots > 0 && self.slots.get().is_none() {
            // Set once: calls that add state hold the optimizer's lock.
            let _ = self.slots.set(HostSlots::open(memory, slots, self.slot_bytes)?);
        }
        Ok(())
    }

    /// Bytes that a lane with this many slots pins.
    pub(super) fn bytes_to_pin(slots: usize, slot_bytes: u64) -> Result<u64> {
        let ring = if slots == 0 { 0 } else { HostSlots::bytes_to_pin(slots, slot_bytes)? };
        Ok(SlabLayout::new(&FLAG_BYTES)?.bytes() + ring)
    }

    /// The threads.
    pub(super) fn threads(&self) -> &HostThreads {
        &self.threads
    }

    /// Makes the next update fail on a thread, for tests.
    pub(super) fn fail_next_update(&self) {
        self.fails_next.store(true, Relaxed);
    }

    /// Pinned bytes, nearly all of them the ring's.
    pub(super) fn pinned_bytes(&self) -> u64 {
        self.flags.bytes() + self.slots.get().map_or(0, HostSlots::bytes)
    }

    /// Slots that nobody owns; all of them between steps.
    pub(super) fn idle_slots(&self) -> usize {
        self.slots.get().map_or(0, HostSlots::idle)
    }

    /// What the last step did.
    pub(super) fn stats(&self) -> HostStats {
        *lock(&self.stats)
    }

    /// Blocks until every copy down and up of this optimizer has ended.
    pub(super) fn drain(&self) -> Result<()> {
        self.slots.get().map_or(Ok(()), HostSlots::settle)
    }

    /// Brings a gradient down before the step, after what `stream` was given so far. The caller keeps the gradient as
    /// it is until a step or [`Self::finish_landing`] has ended.
    pub(super) fn land(&self, grad: &Region, into: &Region, stream: &Stream) -> Result<()> {
        self.ready.record(stream)?;
        self.ready.wait(&self.streams.down)?;
        let traced = trace::timed(&self.device, &self.streams.down, Some((&self.paces[0], grad.bytes())));
        self.device.copy(&self.streams.down, grad, into)?;
        count_stored(Use::Optimizer, grad.bytes());
        if let Some(traced) = traced {
            let (bytes, owner) = (grad.bytes(), self.owner);
            let label = Label::Words("gradient");
            traced.end(&self.streams.down, Span { bytes, owner, ..Span::new(Kind::Store, label) });
        }
        Ok(())
    }

    /// Blocks until the gradients under way have arrived.
    pub(super) fn finish_landing(&self) -> Result<()> {
        let recorded = self.flags_landed.record(&self.streams.down);
        // Also after a refusal: the gradients may be freed when this returns.
        self.wait_for_landing().and(recorded)
    }

    /// The same for those from before [`Self::begin`].
    pub(super) fn wait_for_landing(&self) -> Result<()> {
        self.flags_landed.synchronize()
    }

    /// The pipeline's streams if there is a pipeline, otherwise those of the host's part.
    fn directions<'a>(&'a self, pipeline: Option<&'a Pipeline>) -> Directions<'a> {
        match pipeline {
            Some(pipeline) => Directions { down: pipeline.store_stream(), up: pipeline.fetch_stream() },
            None => Directions { down: &self.streams.down, up: &self.streams.up },
        }
    }

    /// Begins a step: copies down wait for the work that the caller's stream has now. Copies up need no such wait: each
    /// is submitted after its copy down has ended.
    pub(super) fn begin(&self, inputs: &StepInputs, compute: &Stream, pipeline: Option<&Pipeline>) -> Result<()> {
        *lock(&self.stats) = HostStats::default();
        self.ready.record(compute)?;
        self.ready.wait(&self.streams.down)?;
        self.ready.wait(self.directions(pipeline).down)?;
        for (i, flag) in [&inputs.grad_scale, &inputs.skip].into_iter().enumerate() {
            if let Some(flag) = flag {
                self.device.copy(&self.streams.down, flag, &self.flags.part(i)?)?;
            }
        }
        // Also without flags: gradients that were copied earlier are there when this is reached.
        self.flags_landed.record(&self.streams.down)
    }

    /// Ends a step: what the caller's stream is given from now on sees the new weights.
    pub(super) fn end(&self, compute: &Stream, pipeline: Option<&Pipeline>) -> Result<()> {
        let recorded = self.ended.record(self.directions(pipeline).up);
        // Also after a refusal: weights may still be on their way.
        self.ended.wait(compute).and(recorded)
    }

    /// Updates the chunks that it can claim, and tells `progress` of them. Called between [`Self::begin`] and
    /// [`Self::end`]. Drops `first` when its first copies are submitted.
    pub(super) fn run(
        &self,
        tables: &[TableStep<'_>],
        claims: &Claims,
        inputs: &StepInputs,
        pipeline: Option<&Pipeline>,
        (first, progress): (Option<Sender<()>>, Option<&dyn Progress>),
    ) -> Result<()> {
        let _entered = self.device.enter()?;
        let _turn = self.slots.get().map(HostSlots::turn);
        let start = Instant::now();
        let step = Step {
            inputs,
            scalars: inputs.scalars.as_slice().into(),
            flags: None,
            first,
            progress,
            directions: self.directions(pipeline),
            pipeline,
            landing: VecDeque::new(),
            updating: VecDeque::new(),
            stats: HostStats::default(),
            updated_ns: 0,
            lane: self,
        };
        let stats = step.drive(tables, claims)?;
        *lock(&self.stats) = HostStats { run_ns: start.elapsed().as_nanos() as u64, ..stats };
        Ok(())
    }

    /// Scale and skip of the step, once they were copied to the host.
    fn read_flags(&self, inputs: &StepInputs) -> Result<Flags> {
        self.wait_for_landing()?;
        let flag = |given: &Option<Region>, i: usize| -> Result<Option<f32>> {
            Ok(match given {
                Some(_) => super::read_f32(&self.device, &self.flags.part(i)?)?.first().copied(),
                None => None,
            })
        };
        let (scale, skip) = (flag(&inputs.grad_scale, 0)?, flag(&inputs.skip, 1)?);
        Ok(Flags { grad_scale: scale.unwrap_or(1.0), skip: skip.is_some_and(|skip| skip != 0.0) })
    }
}

/// Flags of a step that the device computes and the host needs.
#[derive(Clone, Copy)]
struct Flags {
    grad_scale: f32,
    skip: bool,
}

/// When the threads got an update, and its bytes of state, for a trace.
type Began = Option<(u64, u64)>;

/// The chunks under way in one step.
struct Step<'a> {
    lane: &'a HostLane,
    inputs: &'a StepInputs,
    scalars: Arc<[Scalars]>,
    /// Not known before the first update: copies set out without them.
    flags: Option<Flags>,
    first: Option<Sender<()>>,
    progress: Option<&'a dyn Progress>,
    directions: Directions<'a>,
    /// The streamed half of a hybrid step, whose stores into a chunk must have ended before the host updates it.
    pipeline: Option<&'a Pipeline>,
    landing: VecDeque<Passage<'a, InFlight<HeldSlot<'a>>>>,
    updating: VecDeque<(Passage<'a, HeldSlot<'a>>, HostWork, Began)>,
    stats: HostStats,
    /// When the update before was seen to have ended, for a trace.
    updated_ns: u64,
}

impl Drop for Step<'_> {
    /// After a failure: slots go back only when the threads are done with them, and nothing is read any more.
    fn drop(&mut self) {
        let _ = self.wait_for_landing();
        for (passage, work, _) in self.updating.drain(..) {
            let _ = self.lane.device.finish_on_host(work);
            drop(passage);
        }
    }
}

impl<'a> Step<'a> {
    fn drive(mut self, tables: &[TableStep<'a>], claims: &Claims) -> Result<HostStats> {
        let (landing, updating) = depths(self.lane.slots.get().map_or(0, HostSlots::len));
        let capacity = self.lane.slot_bytes;
        let fits = |table: usize, chunks: Range<usize>| {
            let (table, plan) = (tables[table], tables[table].plan());
            let (all, bucket) = (&plan.chunks()[chunks.clone()], plan.chunks()[chunks.start].bucket);
            // What stays where it is needs no slot; fewer and larger jobs then wake the driver less often.
            let room = if plan.buckets()[bucket].on_host { IN_PLACE * capacity } else { capacity };
            all.iter().map(|chunk| operand_bytes(table, chunk)).sum::<u64>() <= room
                && all.iter().all(|chunk| chunk.bucket == bucket)
        };
        while !self.flags.is_some_and(|flags| flags.skip)
            && let Some(claimed) = claims.back(fits)
        {
            let passage = self.copy_down(tables[claimed.0], claimed)?;
            self.landing.push_back(passage);
            self.advance(landing, updating)?;
        }
        self.advance(0, 0)?;
        // Even if there was nothing to update: copies that began before the step have ended when it ends.
        self.flags()?;
        Ok(self.stats)
    }

    /// Starts and finishes the oldest chunks until no more than this many are left in each state.
    fn advance(&mut self, landing: usize, updating: usize) -> Result<()> {
        while self.landing.len() > landing {
            if self.flags()?.skip {
                return self.wait_for_landing();
            }
            if let Some(passage) = self.landing.pop_front() {
                let started = self.start(passage)?;
                self.updating.push_back(started);
            }
            self.finish_beyond(updating)?;
        }
        self.finish_beyond(updating)
    }

    /// Waits for chunks whose gradients and weights are still being copied down, and releases them: when the step has
    /// ended, the owner of gradients and weights may free them.
    fn wait_for_landing(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        for slot in self.landing.drain(..).filter_map(|passage| passage.slot) {
            // All of them, also after a failure.
            outcome = outcome.and(slot.wait().map(drop));
        }
        outcome
    }

    fn flags(&mut self) -> Result<Flags> {
        drop(self.first.take());
        if self.flags.is_none() {
            self.flags = Some(self.lane.read_flags(self.inputs)?);
        }
        Ok(self.flags.unwrap_or(Flags { grad_scale: 1.0, skip: false }))
    }

    fn finish_beyond(&mut self, updating: usize) -> Result<()> {
        while self.updating.len() > updating {
            if let Some((passage, work, began)) = self.updating.pop_front() {
                let since = Instant::now();
                let outcome = self.lane.device.finish_on_host(work);
                self.stats.update_wait_ns += since.elapsed().as_nanos() as u64;
                trace::waited(since.elapsed(), Reason::Other, "wait for the host's threads", self.lane.owner);
                self.show_update(&passage.claimed.1, began);
                outcome?;
                self.copy_up(passage)?;
            }
        }
        Ok(())
    }

    /// Submits the copy down of gradients and weights.
    fn copy_down(
        &mut self,
        table: TableStep<'a>,
        claimed: (usize, Range<usize>),
    ) -> Result<Passage<'a, InFlight<HeldSlot<'a>>>> {
        let chunks = &table.plan().chunks()[claimed.1.clone()];
        let runs = runs(table, chunks);
        if chunks.first().is_some_and(|chunk| table.plan().buckets()[chunk.bucket].on_host) {
            return Ok(Passage { table, chunks, claimed, runs, slot: None });
        }
        let Some(slots) = self.lane.slots.get() else {
            return Err(Error::Device(DeviceError::ZeroSize { what: "the host's ring" }));
        };
        let since = Instant::now();
        let held = slots.acquire()?;
        self.stats.wire_wait_ns += since.elapsed().as_nanos() as u64;
        trace::waited(since.elapsed(), Reason::Slot, "wait for a slot of the host", self.lane.owner);
        let mut pairs = Vec::with_capacity(2 * runs.len());
        for run in &runs {
            let Some(binding) = table.binding(run.tensor) else { continue };
            if table.landed(run.tensor).is_none() {
                let width = binding.grad_dtype.bytes();
                pairs.push((run.of(&binding.grad, width)?, run.grad(&held, width)?));
            }
            let width = binding.weight_dtype.bytes();
            pairs.push((run.of(&binding.weight, width)?, run.weight(&held, width)?));
        }
        let bytes = pairs.iter().map(|(from, _)| from.bytes()).sum();
        self.stats.down_bytes += bytes;
        count_stored(Use::Optimizer, bytes);
        let shown = self.shown(Kind::Store, "down", &claimed.1);
        let slot = transfer(held, self.directions.down, &pairs, |slot| &slot.landed, (&self.lane.paces[0], shown))?;
        Ok(Passage { table, chunks, claimed, runs, slot: Some(slot) })
    }

    /// Waits for the copy down and gives all of it to the threads.
    fn start(
        &mut self,
        passage: Passage<'a, InFlight<HeldSlot<'a>>>,
    ) -> Result<(Passage<'a, HeldSlot<'a>>, HostWork, Began)> {
        let Passage { table, chunks, claimed, runs, slot } = passage;
        let since = Instant::now();
        let slot = slot.map(InFlight::wait).transpose()?;
        self.stats.wire_wait_ns += since.elapsed().as_nanos() as u64;
        trace::waited(since.elapsed(), Reason::Gradients, "wait for gradients", self.lane.owner);
        let before = self.stats.state_bytes;
        for chunk in chunks {
            let regions = table.table.chunk(chunk)?;
            if let Some(pipeline) = self.pipeline {
                regions.iter().try_for_each(|region| pipeline.settle(region))?;
            }
            table.table.protect(&regions);
            self.stats.chunks += 1;
            self.stats.state_bytes += table.payload_bytes(chunk);
        }
        let mut segments = Vec::with_capacity(runs.len());
        for run in &runs {
            let Some(binding) = table.binding(run.tensor) else { continue };
            let (width, grad_width) = (binding.weight_dtype.bytes(), binding.grad_dtype.bytes());
            let find = |operand: Operand, index: usize| match (operand, &slot) {
                (Operand::Weight, Some(held)) => run.weight(held, width),
                (Operand::Weight, None) => run.of(&binding.weight, width),
                (Operand::Grad, held) => match (table.landed(run.tensor), held) {
                    (Some(landed), _) => run.of(landed, grad_width),
                    (None, Some(held)) => run.grad(held, grad_width),
                    (None, None) => run.of(&binding.grad, grad_width),
                },
                (Operand::Column(..) | Operand::Scale(_) | Operand::Master | Operand::Low | Operand::Carry, _) => {
                    let column = table.table.columns(run.tensor)[index];
                    let all = table.table.tensor(run.tensor, index)?;
                    Ok(all.slice(column.bytes(run.offset), column.bytes(run.elements))?)
                }
            };
            segments.extend(table.segment(run.tensor, run.offset, find)?);
        }
        let (scalars, grad_scale) = (self.scalars.clone(), self.flags()?.grad_scale);
        let update = HostUpdate { rule: table.table.rule(), segments, scalars, grad_scale, trust_master: false };
        let began = trace::current().map(|recorder| (recorder.now_ns(), self.stats.state_bytes - before));
        let fails = self.lane.fails_next.swap(false, Relaxed);
        let work = if fails {
            self.lane.threads.fail()?
        } else {
            self.lane.device.update_on_host(&self.lane.threads, update)?
        };
        Ok((Passage { table, chunks, claimed, runs, slot }, work, began))
    }

    /// A span of some chunks.
    fn shown(&self, kind: Kind, what: &'static str, chunks: &Range<usize>) -> Span {
        let (chunk, chunks) = (Some(chunks.start as u32), chunks.len() as u32);
        Span { owner: self.lane.owner, chunk, chunks, ..Span::new(kind, Label::ChunkAnd(what)) }
    }

    /// An update that has ended. The threads work on one after the other.
    fn show_update(&mut self, chunks: &Range<usize>, began: Began) {
        let (Some(recorder), Some((began_ns, bytes))) = (trace::current(), began) else { return };
        let (start_ns, end_ns) = (began_ns.max(self.updated_ns), recorder.now_ns());
        recorder.push(Span { start_ns, end_ns, bytes, ..self.shown(Kind::Update, "on the host", chunks) });
        self.updated_ns = end_ns;
    }

    /// Submits the copy up of the new weights.
    fn copy_up(&mut self, passage: Passage<'a, HeldSlot<'a>>) -> Result<()> {
        let Passage { table, runs, slot, claimed: (number, chunks), .. } = passage;
        let progress = self.progress;
        let shown = self.shown(Kind::Fetch, "up", &chunks);
        let done = |sent: Option<&Arc<Mark>>| progress.map_or(Ok(()), |of| of.on_host(number, chunks, sent));
        let Some(held) = slot else { return done(None) };
        let mut pairs = Vec::with_capacity(runs.len());
        for run in &runs {
            let Some(binding) = table.binding(run.tensor) else { continue };
            let width = binding.weight_dtype.bytes();
            pairs.push((run.weight(&held, width)?, run.of(&binding.weight, width)?));
        }
        let bytes = pairs.iter().map(|(from, _)| from.bytes()).sum();
        self.stats.up_bytes += bytes;
        count_fetched(Use::Optimizer, bytes);
        // Back to the ring, with the mark that ends the copies.
        let (mut held, end) =
            transfer(held, self.directions.up, &pairs, |slot| &slot.sent, (&self.lane.paces[1], shown))?.into_parts();
        held.end = end;
        done(held.end.as_ref())
    }
}

/// The pieces of a chunk whose tensors have a gradient, with the bytes of an element of their weights and gradients.
fn members<'a>(table: TableStep<'a>, chunk: &'a Chunk) -> impl Iterator<Item = (&'a Piece, [u64; 2])> {
    table.plan().pieces(chunk).iter().filter_map(move |piece| {
        let binding = table.binding(piece.tensor)?;
        Some((piece, [binding.weight_dtype.bytes(), binding.grad_dtype.bytes()]))
    })
}

/// Bytes of a slot that a chunk's weights and gradients need at most.
fn operand_bytes(table: TableStep<'_>, chunk: &Chunk) -> u64 {
    let aligned = |piece: &Piece, width: u64| (piece.elements * width).next_multiple_of(SLOT_ALIGN_BYTES);
    members(table, chunk).map(|(piece, widths)| widths.map(|width| aligned(piece, width)).iter().sum::<u64>()).sum()
}

/// The tensors' parts in consecutive chunks, what continues from chunk to chunk put together, each with its place.
fn runs(table: TableStep<'_>, chunks: &[Chunk]) -> Vec<TensorRun> {
    let mut runs: Vec<(TensorRun, [u64; 2])> = Vec::new();
    for (piece, widths) in chunks.iter().flat_map(|chunk| members(table, chunk)) {
        match runs.last_mut() {
            Some((run, _)) if run.tensor == piece.tensor && run.offset + run.elements == piece.tensor_offset => {
                run.elements += piece.elements;
            }
            _ => {
                let (tensor, offset, elements) = (piece.tensor, piece.tensor_offset, piece.elements);
                runs.push((TensorRun { tensor, offset, elements, weight_at: 0, grad_at: 0 }, widths));
            }
        }
    }
    let mut end = 0u64;
    let mut place = |bytes: u64| {
        let start = end;
        end = (start + bytes).next_multiple_of(SLOT_ALIGN_BYTES);
        start
    };
    for (run, [weight_width, grad_width]) in &mut runs {
        run.weight_at = place(run.elements * *weight_width);
        run.grad_at = place(run.elements * *grad_width);
    }
    runs.into_iter().map(|(run, _)| run).collect()
}
