//! AdamW on the host: gradients come down through a pinned ring, the host's threads update master and moments where they
//! live, and the new weights go up.
//!
//! ```text
//! gradient, weight ==down==> [pinned slot] --threads: master, moments, weight--> [same slot] ==up==> weight
//!                 stream D                                                      stream U
//! ```
//!
//! One thread drives: it submits the way down of a chunk, starts the update of the one before, and submits the way up
//! of the one before that when its update has ended. So the threads always have a chunk in hand and one waiting, and at
//! most as many chunks as there are slots are under way. What orders the streams:
//! - the way down waits for the caller's stream as it was when the step began;
//! - the host waits for the way down, then for its threads, then submits the way up;
//! - the caller's stream waits for the last way up, so what it does after the step sees the new weights.
//!
//! Beside a streamed half, D is its store stream and U its fetch stream; see [Note: one queue for each way].
//!
//! A slot takes as many chunks in a row as its bytes hold: gradient and weight are fewer bytes than the state that a chunk
//! is measured by, and few large copies keep a wire busier than many small ones.
//!
//! Parameters that lie on the host are updated in place and touch neither slots nor streams.
//!
//! Weights come down too, because a master gives way to a weight that is not its rounding, and only the weight itself can
//! tell: torch's version counters do not see what is written through `.data`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use forebay_device::arith::AdamWScalars;
use forebay_device::{
    ALIGN_BYTES, AdamWSegment, Error as DeviceError, Event, HostOptions, HostThreads, HostUpdate, HostWork, Region,
    SharedDevice, Slab, SlabLayout, Stream,
};
use serde::Serialize;

use super::hybrid::Claims;
use super::{Binding, HostState, StepInputs, payload_bytes};
use crate::error::{Error, Result};
use crate::pipeline::ring::Ring;
use crate::pipeline::{EventFence, Pipeline};
use crate::plan::{Chunk, STATE_BYTES, Segment, StateKind};
use crate::pool::{Lease, Pool};
use crate::sync::{Mutex, lock};

/// How many chunks may be on their way down, and how many in the threads' hands, when the next slot is asked for. One
/// slot has to be left for that: whoever held them all would wait for ever.
fn depths(slots: usize) -> (usize, usize) {
    match slots {
        // Nothing comes down, and no slot is asked for.
        0 => (0, 2),
        1..=2 => (0, 1),
        3 => (1, 1),
        4..=5 => (1, 2),
        6..=7 => (2, 2),
        _ => (3, 2),
    }
}

/// How many times more chunks are taken at once where parameters lie on the host.
const IN_PLACE: u64 = 16;

/// The streams of a step.
///
/// [Note: one queue for each way] A copy engine seems to stay with a stream for as long as that one has copies ready, and
/// a streamed step always has stores ready where the wire is its limit. Gradients on a stream of their own were seen to
/// wait until the streamed half was done. In one stream copies run in the order in which they were submitted, so each half gets what it
/// asks for: at most the streamed half's slots are ahead of a gradient.
struct Ways<'a> {
    down: &'a Stream,
    up: &'a Stream,
}

/// Weights and gradients start at multiples of this in a slot: a line of the cache.
const SLOT_ALIGN_BYTES: u64 = 64;

/// An f32 each for scale and skip.
const FLAG_BYTES: [u64; 2] = [4; 2];

fn ring_parts(slots: usize, slot_bytes: u64) -> Vec<u64> {
    vec![slot_bytes.next_multiple_of(ALIGN_BYTES); 2 * slots]
}

/// One state with its tensors at one step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) state: &'a HostState,
    pub(crate) tensors: &'a [Binding],
    /// Gradients that came down before the step, by tensor; empty where none did.
    pub(crate) landed: &'a [Option<Region>],
}

/// What the host's part of one step did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct HostStats {
    /// Chunks updated on the host.
    pub chunks: u64,
    /// Bytes of state updated there.
    pub state_bytes: u64,
    /// Bytes that came down in the step.
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

#[derive(Debug)]
struct LaneSlot {
    region: Region,
    landed: Event,
    sent: Event,
}

/// The host's threads, a pinned ring and two streams; several states may share them.
#[derive(Debug)]
pub struct HostLane {
    device: SharedDevice,
    threads: HostThreads,
    ring: Ring<usize, EventFence>,
    slots: Vec<LaneSlot>,
    down: Stream,
    up: Stream,
    /// What the caller's stream had reached when the step began; and the end of the last way up.
    ready: Event,
    ended: Event,
    /// Scale and skip of the step, brought down.
    flags: Lease<Slab>,
    flags_landed: Event,
    stats: Mutex<HostStats>,
    slot_bytes: u64,
    /// The slots' memory; nothing where all parameters lie on the host.
    slab: Option<Lease<Slab>>,
}

/// A slot of the lane, given back when dropped, with the event that ends what was accepted of its work.
struct Held<'a> {
    lane: &'a HostLane,
    index: usize,
    busy: Option<Event>,
}

impl Held<'_> {
    fn slot(&self) -> &LaneSlot {
        &self.lane.slots[self.index]
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let fence = self.busy.take().map(|event| EventFence { device: self.lane.device.clone(), event });
        self.lane.ring.release(self.index, fence);
    }
}

/// Consecutive elements of one tensor that has a gradient.
struct Run {
    tensor: usize,
    offset: u64,
    elements: u64,
    /// Where weight and gradient lie in the slot.
    param_at: u64,
    grad_at: u64,
}

impl Run {
    /// These elements of a tensor.
    fn of(&self, tensor: &Region, width: u64) -> Result<Region> {
        Ok(tensor.slice(self.offset * width, self.elements * width)?)
    }

    /// Their weights in a slot.
    fn param(&self, held: &Held<'_>, width: u64) -> Result<Region> {
        Ok(held.slot().region.slice(self.param_at, self.elements * width)?)
    }

    /// Their gradients in a slot.
    fn grad(&self, held: &Held<'_>, width: u64) -> Result<Region> {
        Ok(held.slot().region.slice(self.grad_at, self.elements * width)?)
    }
}

/// Chunks on their way: down, then in the threads' hands.
struct Passage<'a> {
    part: Part<'a>,
    chunks: &'a [Chunk],
    runs: Vec<Run>,
    /// None for parameters on the host.
    held: Option<Held<'a>>,
}

impl HostLane {
    /// Starts the threads and pins the ring; no slots are enough where all parameters lie on the host.
    pub fn new(pool: &Pool, options: &HostOptions, slots: usize, slot_bytes: u64) -> Result<Self> {
        let device = pool.device().clone();
        let mut lane = Self {
            threads: HostThreads::new(options)?,
            ring: Ring::new(0..0),
            slots: Vec::new(),
            down: device.stream("down")?,
            up: device.stream("up")?,
            ready: device.event()?,
            ended: device.event()?,
            flags: pool.slab("host flags", &FLAG_BYTES)?,
            flags_landed: device.event()?,
            stats: Mutex::default(),
            slot_bytes,
            slab: None,
            device,
        };
        lane.open_ring(pool, slots)?;
        Ok(lane)
    }

    /// Pins the ring where there is none yet: twice as many slots as there are in a plan, of its size. A slot spends most
    /// of its time waiting, first for its turn on the way down and then on the way up.
    pub fn open_ring(&mut self, pool: &Pool, slots: usize) -> Result<()> {
        if slots == 0 || self.slab.is_some() {
            return Ok(());
        }
        let slab = pool.slab("host ring", &ring_parts(slots, self.slot_bytes))?;
        let slot = |i| -> Result<LaneSlot> {
            Ok(LaneSlot { region: slab.part(i)?, landed: self.device.event()?, sent: self.device.event()? })
        };
        self.slots = (0..2 * slots).map(slot).collect::<Result<_>>()?;
        self.ring = Ring::new(0..2 * slots);
        self.slab = Some(slab);
        Ok(())
    }

    /// Bytes that a lane with so many slots pins.
    pub fn bytes_to_pin(slots: usize, slot_bytes: u64) -> Result<u64> {
        let ring = if slots == 0 { 0 } else { SlabLayout::new(&ring_parts(slots, slot_bytes))?.bytes() };
        Ok(SlabLayout::new(&FLAG_BYTES)?.bytes() + ring)
    }

    /// The threads.
    pub fn threads(&self) -> &HostThreads {
        &self.threads
    }

    /// Pinned bytes, nearly all of them the ring's.
    pub fn pinned_bytes(&self) -> u64 {
        self.flags.bytes() + self.slab.as_ref().map_or(0, |slab| slab.bytes())
    }

    /// Slots that nobody owns; all of them between steps.
    pub fn idle_slots(&self) -> usize {
        self.ring.idle()
    }

    /// What the last step did.
    pub fn stats(&self) -> HostStats {
        *lock(&self.stats)
    }

    /// Blocks until every way down and up has ended.
    pub fn drain(&self) -> Result<()> {
        self.ring.settle()
    }

    /// Brings a gradient down before the step, after what `stream` was given so far. The caller keeps the gradient as
    /// it is until a step or [`Self::finish_landing`] has ended.
    pub fn land(&self, grad: &Region, into: &Region, stream: &Stream) -> Result<()> {
        self.device.record(&self.ready, stream)?;
        self.device.wait(&self.down, &self.ready)?;
        Ok(self.device.copy(&self.down, grad, into)?)
    }

    /// Blocks until the gradients that were to come down have done so.
    pub fn finish_landing(&self) -> Result<()> {
        self.device.record(&self.flags_landed, &self.down)?;
        self.wait_for_landing()
    }

    /// The same for those from before [`Self::begin`].
    pub(crate) fn wait_for_landing(&self) -> Result<()> {
        Ok(self.device.synchronize(&self.flags_landed)?)
    }

    /// The pipeline's streams where there is one, and else this lane's own.
    fn ways<'a>(&'a self, pipeline: Option<&'a Pipeline>) -> Ways<'a> {
        match pipeline {
            Some(pipeline) => Ways { down: pipeline.store_stream(), up: pipeline.fetch_stream() },
            None => Ways { down: &self.down, up: &self.up },
        }
    }

    /// Begins a step: what comes down waits for what the caller's stream was given so far. What goes up need not: it is
    /// submitted after what came down for it has been waited for.
    pub(crate) fn begin(&self, inputs: &StepInputs<'_>, compute: &Stream, pipeline: Option<&Pipeline>) -> Result<()> {
        *lock(&self.stats) = HostStats::default();
        self.device.record(&self.ready, compute)?;
        self.device.wait(&self.down, &self.ready)?;
        self.device.wait(self.ways(pipeline).down, &self.ready)?;
        for (i, flag) in [&inputs.grad_scale, &inputs.skip].into_iter().enumerate() {
            if let Some(flag) = flag {
                self.device.copy(&self.down, flag, &self.flags.part(i)?)?;
            }
        }
        // Also without flags: gradients that came down earlier are there when this is reached.
        Ok(self.device.record(&self.flags_landed, &self.down)?)
    }

    /// Ends a step: what the caller's stream is given from now on sees the new weights.
    pub(crate) fn end(&self, compute: &Stream, pipeline: Option<&Pipeline>) -> Result<()> {
        self.device.record(&self.ended, self.ways(pipeline).up)?;
        Ok(self.device.wait(compute, &self.ended)?)
    }

    /// Updates the chunks that it can claim. Between [`Self::begin`] and [`Self::end`]. Lets go of `first` when its first
    /// copies are submitted.
    pub(crate) fn run(
        &self,
        parts: &[Part<'_>],
        claims: &Claims,
        inputs: &StepInputs<'_>,
        pipeline: Option<&Pipeline>,
        first: Option<Sender<()>>,
    ) -> Result<()> {
        let _entered = self.device.enter()?;
        let start = Instant::now();
        let step = Step {
            inputs,
            scalars: inputs.scalars.into(),
            flags: None,
            first,
            ways: self.ways(pipeline),
            pipeline,
            landing: VecDeque::new(),
            updating: VecDeque::new(),
            stats: HostStats::default(),
            lane: self,
        };
        let stats = step.drive(parts, claims)?;
        *lock(&self.stats) = HostStats { run_ns: start.elapsed().as_nanos() as u64, ..stats };
        Ok(())
    }

    /// Scale and skip of the step, once they have come down.
    fn read_flags(&self, inputs: &StepInputs<'_>) -> Result<Flags> {
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

impl Drop for HostLane {
    /// Slots may still be on their way up, from memory that goes with this.
    fn drop(&mut self) {
        let _ = self.drain();
    }
}

/// What the device knows about a step and the host has to be told.
#[derive(Clone, Copy)]
struct Flags {
    grad_scale: f32,
    skip: bool,
}

/// The chunks under way in one step.
struct Step<'a> {
    lane: &'a HostLane,
    inputs: &'a StepInputs<'a>,
    scalars: Arc<[AdamWScalars]>,
    /// Not known before the first update: copies set out without them.
    flags: Option<Flags>,
    first: Option<Sender<()>>,
    ways: Ways<'a>,
    /// The streamed half of a hybrid step, whose stores into a chunk must have ended before the host updates it.
    pipeline: Option<&'a Pipeline>,
    landing: VecDeque<Passage<'a>>,
    updating: VecDeque<(Passage<'a>, HostWork)>,
    stats: HostStats,
}

impl Drop for Step<'_> {
    /// After a failure: slots go back only when the threads are done with them, and nothing is read any more.
    fn drop(&mut self) {
        let _ = self.wait_for_landing();
        for (passage, work) in self.updating.drain(..) {
            let _ = self.lane.device.finish_on_host(work);
            drop(passage);
        }
    }
}

impl<'a> Step<'a> {
    fn drive(mut self, parts: &[Part<'a>], claims: &Claims) -> Result<HostStats> {
        let (landing, updating) = depths(self.lane.slots.len());
        let capacity = self.lane.slot_bytes;
        let fits = |part: usize, chunks: &[usize]| {
            let plan = parts[part].state.plan();
            let (all, bucket) = (plan.chunks(), plan.chunks()[chunks[0]].bucket);
            let bytes = |&chunk: &usize| operand_bytes(parts[part], &all[chunk]);
            // What stays where it is needs no slot; fewer and larger jobs then wake the driver less often.
            let room = if plan.buckets()[bucket].on_host { IN_PLACE * capacity } else { capacity };
            chunks.iter().map(bytes).sum::<u64>() <= room && chunks.iter().all(|&chunk| all[chunk].bucket == bucket)
        };
        while !self.flags.is_some_and(|flags| flags.skip)
            && let Some((part, chunks)) = claims.back(fits)
        {
            let part = parts[part];
            let passage = self.bring_down(part, &part.state.plan().chunks()[chunks])?;
            self.landing.push_back(passage);
            self.advance(landing, updating)?;
        }
        self.advance(0, 0)?;
        // Also where there was nothing to update: what came down before the step has done so when it ends.
        self.flags()?;
        Ok(self.stats)
    }

    /// Starts and finishes the oldest chunks until no more than so many are left in each state.
    fn advance(&mut self, landing: usize, updating: usize) -> Result<()> {
        while self.landing.len() > landing {
            if self.flags()?.skip {
                return self.wait_for_landing();
            }
            if let Some(passage) = self.landing.pop_front() {
                let work = self.start(&passage)?;
                self.updating.push_back((passage, work));
            }
            self.finish_beyond(updating)?;
        }
        self.finish_beyond(updating)
    }

    /// Lets go of chunks whose gradients and weights are still coming down, once they have: whoever owns those may free
    /// them when the step has ended.
    fn wait_for_landing(&mut self) -> Result<()> {
        let device = &self.lane.device;
        let held = self.landing.iter().filter_map(|passage| passage.held.as_ref());
        let mut outcome = Ok(());
        for held in held {
            outcome = outcome.and(device.synchronize(&held.slot().landed));
        }
        self.landing.clear();
        Ok(outcome?)
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
            if let Some((passage, work)) = self.updating.pop_front() {
                let since = Instant::now();
                let outcome = self.lane.device.finish_on_host(work);
                self.stats.update_wait_ns += since.elapsed().as_nanos() as u64;
                outcome?;
                self.send_up(passage)?;
            }
        }
        Ok(())
    }

    /// Submits the way down of gradients and weights.
    fn bring_down(&mut self, part: Part<'a>, chunks: &'a [Chunk]) -> Result<Passage<'a>> {
        let runs = runs(part, chunks);
        if chunks.first().is_some_and(|chunk| part.state.plan().buckets()[chunk.bucket].on_host) {
            return Ok(Passage { part, chunks, runs, held: None });
        }
        if self.lane.slots.is_empty() {
            return Err(Error::Device(DeviceError::ZeroSize { what: "the host's ring" }));
        }
        let since = Instant::now();
        let (index, _) = self.lane.ring.acquire()?;
        self.stats.wire_wait_ns += since.elapsed().as_nanos() as u64;
        let mut held = Held { lane: self.lane, index, busy: None };
        let mut pairs = Vec::with_capacity(2 * runs.len());
        for run in &runs {
            let binding = &part.tensors[run.tensor];
            if let (Some((grad, dtype)), None) = (&binding.grad, landed(part, run.tensor)) {
                pairs.push((run.of(grad, dtype.bytes())?, run.grad(&held, dtype.bytes())?));
            }
            let width = binding.param_dtype.bytes();
            pairs.push((run.of(&binding.param, width)?, run.param(&held, width)?));
        }
        self.stats.down_bytes += pairs.iter().map(|(from, _)| from.bytes()).sum::<u64>();
        let landing = held.slot().landed.clone();
        transfer(&self.lane.device, self.ways.down, &pairs, &landing, &mut held.busy)?;
        Ok(Passage { part, chunks, runs, held: Some(held) })
    }

    /// Waits for the way down and gives all of it to the threads.
    fn start(&mut self, passage: &Passage<'a>) -> Result<HostWork> {
        let Passage { part, chunks, runs, held } = passage;
        if let Some(held) = held {
            let since = Instant::now();
            self.lane.device.synchronize(&held.slot().landed)?;
            self.stats.wire_wait_ns += since.elapsed().as_nanos() as u64;
        }
        for chunk in *chunks {
            let regions = part.state.chunk(chunk)?;
            if let Some(pipeline) = self.pipeline {
                regions.iter().try_for_each(|region| pipeline.settle(region))?;
            }
            part.state.protect(&regions);
            self.stats.chunks += 1;
            self.stats.state_bytes += payload_bytes(part.state.plan(), chunk, part.tensors);
        }
        let mut segments = Vec::with_capacity(runs.len());
        for run in runs {
            let binding = &part.tensors[run.tensor];
            let Some((grad, grad_dtype)) = &binding.grad else { continue };
            let state = |kind: StateKind| -> Result<Option<Region>> {
                part.state.tensor(run.tensor, kind)?.map(|region| run.of(&region, STATE_BYTES)).transpose()
            };
            let needed = |kind: StateKind| -> Result<Region> {
                state(kind)?.ok_or_else(|| Error::PlanMismatch {
                    tensor: part.state.plan().tensors()[run.tensor].name.clone(),
                    reason: format!("AdamW needs {kind:?}"),
                })
            };
            let (width, grad_width) = (binding.param_dtype.bytes(), grad_dtype.bytes());
            segments.push(AdamWSegment {
                param: match held {
                    Some(held) => run.param(held, width)?,
                    None => run.of(&binding.param, width)?,
                },
                param_dtype: binding.param_dtype,
                grad: match (held, landed(*part, run.tensor)) {
                    (_, Some(landed)) => run.of(landed, grad_width)?,
                    (Some(held), None) => run.grad(held, grad_width)?,
                    (None, None) => run.of(grad, grad_width)?,
                },
                grad_dtype: *grad_dtype,
                exp_avg: needed(StateKind::ExpAvg)?,
                exp_avg_sq: needed(StateKind::ExpAvgSq)?,
                max_exp_avg_sq: state(StateKind::MaxExpAvgSq)?,
                master: state(StateKind::Master)?,
                scalars: binding.scalars,
            });
        }
        let (scalars, grad_scale) = (self.scalars.clone(), self.flags()?.grad_scale);
        let update = HostUpdate { segments, scalars, grad_scale, follow_weights: true };
        Ok(self.lane.device.update_on_host(&self.lane.threads, update)?)
    }

    /// Submits the way up of the new weights.
    fn send_up(&mut self, passage: Passage<'a>) -> Result<()> {
        let Passage { part, runs, held, .. } = passage;
        let Some(mut held) = held else { return Ok(()) };
        let mut pairs = Vec::with_capacity(runs.len());
        for run in &runs {
            let binding = &part.tensors[run.tensor];
            let width = binding.param_dtype.bytes();
            pairs.push((run.param(&held, width)?, run.of(&binding.param, width)?));
        }
        self.stats.up_bytes += pairs.iter().map(|(from, _)| from.bytes()).sum::<u64>();
        let sent = held.slot().sent.clone();
        // The way down has ended; from here on the slot is busy with the way up.
        held.busy = None;
        transfer(&self.lane.device, self.ways.up, &pairs, &sent, &mut held.busy)
    }
}

/// Submits copies and records their end, which becomes the end of the slot's use, also when some were refused.
fn transfer(
    device: &SharedDevice,
    stream: &Stream,
    pairs: &[(Region, Region)],
    end: &Event,
    busy: &mut Option<Event>,
) -> Result<()> {
    let outcome = device.copy_all(stream, pairs);
    // A refused record is tried once more: without it the slot would go back while copies may still be running.
    let recorded = device.record(end, stream).or_else(|error| device.record(end, stream).and(Err(error)));
    *busy = Some(end.clone());
    outcome?;
    Ok(recorded?)
}

/// The segments of a chunk whose tensors have a gradient, with the bytes of their weights and gradients in a slot.
fn members<'a>(part: Part<'a>, chunk: &'a Chunk) -> impl Iterator<Item = (&'a Segment, [u64; 2])> {
    part.state.plan().segments(chunk).iter().filter_map(move |segment| {
        let binding = &part.tensors[segment.tensor];
        let (_, grad_dtype) = binding.grad.as_ref()?;
        Some((segment, [binding.param_dtype.bytes(), grad_dtype.bytes()]))
    })
}

/// Bytes of a slot that a chunk's weights and gradients need at most.
fn operand_bytes(part: Part<'_>, chunk: &Chunk) -> u64 {
    let aligned = |segment: &Segment, width: u64| (segment.elements * width).next_multiple_of(SLOT_ALIGN_BYTES);
    members(part, chunk).map(|(segment, widths)| widths.map(|width| aligned(segment, width)).iter().sum::<u64>()).sum()
}

/// The tensors' parts in consecutive chunks, what continues from chunk to chunk put together, each with its place.
fn runs(part: Part<'_>, chunks: &[Chunk]) -> Vec<Run> {
    let mut runs: Vec<(Run, [u64; 2])> = Vec::new();
    for (segment, widths) in chunks.iter().flat_map(|chunk| members(part, chunk)) {
        match runs.last_mut() {
            Some((run, _)) if run.tensor == segment.tensor && run.offset + run.elements == segment.tensor_offset => {
                run.elements += segment.elements;
            }
            _ => {
                let (tensor, offset, elements) = (segment.tensor, segment.tensor_offset, segment.elements);
                runs.push((Run { tensor, offset, elements, param_at: 0, grad_at: 0 }, widths));
            }
        }
    }
    let mut end = 0u64;
    let mut place = |bytes: u64| {
        let start = end;
        end = (start + bytes).next_multiple_of(SLOT_ALIGN_BYTES);
        start
    };
    for (run, [param_width, grad_width]) in &mut runs {
        run.param_at = place(run.elements * *param_width);
        run.grad_at = place(run.elements * *grad_width);
    }
    runs.into_iter().map(|(run, _)| run).collect()
}

fn landed(part: Part<'_>, tensor: usize) -> Option<&Region> {
    part.landed.get(tensor).and_then(Option::as_ref)
}
