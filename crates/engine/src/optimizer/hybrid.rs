//! Chunks divided between the device and the host, which work at the same time.
//!
//! The device takes chunks from the front of the list, the host from its back. A fixed share says beforehand where they
//! meet. "Auto" tries both ends without a fixed share, each end alone, and the share at which both would finish
//! together at their measured rates; then it keeps the fastest. Sharing can be slower than one end alone, if both ends
//! are limited by the wire or by memory. Device and host give the same bits: both run the same arithmetic.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use forebay_device::{HostOptions, Stream};

use super::host_lane::HostLane;
use super::segments::{StepInputs, TableStep};
use super::streamed;
use crate::error::{Error, Result};
use crate::flow::{Mark, Pipeline};
use crate::memory::Allocator;
use crate::sync::{Mutex, lock};
use crate::trace;

/// How much of the state the host updates, by bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HostShare {
    /// This fraction, from 0 to 1.
    Fixed(f64),
    /// What makes both ends finish together, found in the first steps.
    Auto,
}

/// What one of the first steps tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trial {
    /// Both, until they meet.
    Meet,
    /// The device alone.
    Stream,
    /// The host alone.
    Host,
    /// The better one alone, once more.
    Better,
    /// Both, with the share at which both ends of the trial before would have finished together.
    Balance,
}

/// What the first steps try. The very first makes pages, caches and clocks warm, and does not count.
const TRIALS: [Trial; 6] = [Trial::Meet, Trial::Stream, Trial::Host, Trial::Meet, Trial::Balance, Trial::Better];

/// Both must be faster than the better one alone by this much to be preferred: both at once also keep two busy.
const PREFERENCE: f64 = 0.99;

/// The host takes no more than this part of what is left at a time. It has up to three takings in hand when the ends
/// meet, so large ones would leave it working long after the device is done.
const TAKEN_OF_LEFT: usize = 8;

/// The host's takings grow from one chunk on, twice as many each time, but not for ever.
const MOST_DOUBLINGS: usize = 10;

/// Who follows a step while it runs, from both of its ends.
pub(super) trait Progress: Sync {
    /// How early a chunk of a table of the step is needed; smaller is earlier.
    fn need(&self, table: usize, chunk: usize) -> i64;

    /// The update of a chunk was submitted to the step's stream.
    fn on_device(&self, table: usize, chunk: usize) -> Result<()>;

    /// Chunks were updated on the host, and the copies of their weights end with the mark. Without a mark nothing is copied.
    fn on_host(&self, table: usize, chunks: Range<usize>, sent: Option<&Arc<Mark>>) -> Result<()>;
}

/// The list of chunks of one step, taken from both ends.
#[derive(Debug)]
pub(super) struct Claims {
    /// Table, chunk and bytes of each.
    order: Vec<(usize, usize, u64)>,
    ends: Mutex<Ends>,
}

#[derive(Debug)]
struct Ends {
    /// The next one for the device, and the last it may take plus one.
    front: usize,
    front_limit: usize,
    /// The last one taken by the host, and the first it may take.
    back: usize,
    back_limit: usize,
    /// How often the host took some.
    takings: usize,
}

impl Claims {
    /// Where nothing is copied to the host, it need not begin with few chunks.
    fn new(order: Vec<(usize, usize, u64)>, share: HostShare, in_place: bool) -> Self {
        let limits = match share {
            HostShare::Auto => (order.len(), 0),
            HostShare::Fixed(fraction) => {
                let at = meeting_point(&order, fraction);
                (at, at)
            }
        };
        Self::within(order, limits, in_place)
    }

    /// The same for a step that others wait for chunk by chunk: both ends take what is needed first, first.
    fn by_need(
        mut order: Vec<(usize, usize, u64)>,
        share: HostShare,
        in_place: bool,
        need: impl Fn(usize, usize) -> i64,
    ) -> Self {
        order.sort_by_key(|&(table, chunk, _)| need(table, chunk));
        let HostShare::Fixed(fraction) = share else { return Self::new(order, share, in_place) };
        let (mut device, mut host) = (Vec::with_capacity(order.len()), Vec::new());
        let (mut all_bytes, mut host_bytes) = (0.0, 0.0);
        for run in order.chunks(RUN) {
            let run_bytes = bytes(run) as f64;
            all_bytes += run_bytes;
            // Whatever part has been divided so far, the host has its share of it.
            if host_bytes + run_bytes / 2.0 <= fraction * all_bytes {
                host_bytes += run_bytes;
                host.extend_from_slice(run);
            } else {
                device.extend_from_slice(run);
            }
        }
        let at = device.len();
        // The host takes from the back.
        device.extend(host.into_iter().rev());
        Self::within(device, (at, at), in_place)
    }

    fn within(order: Vec<(usize, usize, u64)>, (front_limit, back_limit): (usize, usize), in_place: bool) -> Self {
        let n = order.len();
        Self {
            order,
            ends: Mutex::new(Ends {
                front: 0,
                front_limit,
                back: n,
                back_limit,
                takings: if in_place { MOST_DOUBLINGS } else { 0 },
            }),
        }
    }

    /// The next chunk for the device.
    pub(super) fn front(&self) -> Option<(usize, usize)> {
        let mut ends = lock(&self.ends);
        let at = ends.front;
        if at >= ends.front_limit.min(ends.back) {
            return None;
        }
        ends.front += 1;
        Some((self.order[at].0, self.order[at].1))
    }

    /// The next chunks for the host: consecutive ones of one table, as many as fit. Few at first, so that its threads
    /// have something to do soon, and few at last where the ends are to meet, so that both finish together.
    pub(super) fn back(&self, fits: impl Fn(usize, Range<usize>) -> bool) -> Option<(usize, Range<usize>)> {
        let mut ends = lock(&self.ends);
        let mut taken: Option<(usize, Range<usize>)> = None;
        let left = ends.back.saturating_sub(ends.back_limit.max(ends.front));
        let meets = ends.front_limit > ends.back_limit;
        let most = if meets { left / TAKEN_OF_LEFT } else { left }.min(1 << ends.takings.min(MOST_DOUBLINGS)).max(1);
        ends.takings += 1;
        while ends.back > ends.back_limit.max(ends.front) {
            if taken.as_ref().is_some_and(|(_, range)| range.len() >= most) {
                break;
            }
            let (table, chunk, _) = self.order[ends.back - 1];
            let more = match &taken {
                None => chunk..chunk + 1,
                Some((same, range)) if *same == table && chunk + 1 == range.start => chunk..range.end,
                Some((same, range)) if *same == table && chunk == range.end => range.start..chunk + 1,
                Some(_) => break,
            };
            if taken.is_some() && !fits(table, more.clone()) {
                break;
            }
            taken = Some((table, more));
            ends.back -= 1;
        }
        taken
    }

    /// Whether none is for the device.
    fn is_host_s(&self) -> bool {
        lock(&self.ends).front_limit == 0
    }

    /// Whether none is for the host.
    fn is_device_s(&self) -> bool {
        lock(&self.ends).back_limit == self.order.len()
    }

    /// No more chunks for either: something failed.
    fn close(&self) {
        let mut ends = lock(&self.ends);
        (ends.front_limit, ends.back_limit) = (0, self.order.len());
    }

    /// The part of the bytes that the host took.
    fn host_fraction(&self) -> f64 {
        let back = lock(&self.ends).back;
        bytes(&self.order[back..]) as f64 / bytes(&self.order).max(1) as f64
    }
}

fn bytes(chunks: &[(usize, usize, u64)]) -> u64 {
    chunks.iter().map(|chunk| chunk.2).sum()
}

/// The first chunk of the host's, so that its bytes come nearest to the fraction.
fn meeting_point(order: &[(usize, usize, u64)], fraction: f64) -> usize {
    let (wanted, mut taken) = (bytes(order) as f64 * fraction, 0.0);
    for (at, chunk) in order.iter().enumerate().rev() {
        let bytes = chunk.2 as f64;
        if taken + bytes / 2.0 > wanted {
            return at + 1;
        }
        taken += bytes;
    }
    0
}

/// Consecutive chunks that stay together where both ends take chunks in the order of need: about as many as fit a slot of
/// the host's ring.
const RUN: usize = 4;

/// What one trial found.
#[derive(Debug, Clone, Copy, Default)]
struct Tried {
    /// The part of the bytes that the host took.
    fraction: f64,
    /// How long the step took, and each end of it.
    seconds: f64,
    host_s: f64,
    device_s: f64,
}

impl Tried {
    /// The fraction at which both ends would have finished together, at the rates that they had.
    fn balanced(&self) -> f64 {
        if self.host_s <= 0.0 || self.device_s <= 0.0 || self.fraction <= 0.0 || self.fraction >= 1.0 {
            return self.fraction;
        }
        let (host, device) = (self.fraction / self.host_s, (1.0 - self.fraction) / self.device_s);
        host / (host + device)
    }
}

#[derive(Debug, Default)]
struct Measured {
    tried: Vec<Tried>,
    settled: Option<f64>,
    /// Whether the step under way is a trial.
    trying: bool,
    /// Bytes of the step with which trials began.
    bytes: u64,
    last: f64,
    /// When the device's end of the last step was done.
    device_ns: u64,
}

impl Measured {
    /// Begins a step of this many bytes, and decides whether it is a trial. A step of more than twice the bytes starts
    /// the trials again: steps that train only a head say nothing about the whole model. A step of less than half the
    /// bytes is no trial, for the same reason.
    fn begin(&mut self, bytes: u64) {
        if bytes > 2 * self.bytes {
            (self.tried, self.settled, self.bytes) = (Vec::new(), None, bytes);
        }
        self.trying = self.settled.is_none() && bytes > 0 && 2 * bytes >= self.bytes;
    }

    /// Ends a step.
    fn end(&mut self, tried: Tried) {
        self.last = tried.fraction;
        if !self.trying {
            return;
        }
        self.tried.push(tried);
        if self.tried.len() == TRIALS.len() {
            self.settled = Some(choose(&self.tried));
        }
    }
}

/// The fastest trial with one end alone, or with both. The very first does not count.
fn fastest(tried: &[Tried], alone: bool) -> Tried {
    let ends = |tried: &&Tried| (tried.fraction == 0.0 || tried.fraction == 1.0) == alone;
    let found = tried.iter().skip(1).filter(ends).min_by(|a, b| a.seconds.total_cmp(&b.seconds));
    found.copied().unwrap_or(Tried { seconds: f64::INFINITY, ..Tried::default() })
}

/// The best of all trials.
fn choose(tried: &[Tried]) -> f64 {
    let (both, alone) = (fastest(tried, false), fastest(tried, true));
    if both.seconds < alone.seconds * PREFERENCE { both.fraction } else { alone.fraction }
}

/// A step on the host, or on host and device at once.
#[derive(Debug)]
pub(super) struct Hybrid {
    lane: HostLane,
    share: HostShare,
    measured: Mutex<Measured>,
}

impl Hybrid {
    /// Starts the host's threads and pins its ring; see [`HostLane::new`].
    pub(super) fn new(
        memory: &Allocator,
        share: HostShare,
        options: &HostOptions,
        slots: usize,
        slot_bytes: u64,
        owner: u32,
    ) -> Result<Self> {
        if let HostShare::Fixed(fraction) = share
            && !(0.0..=1.0).contains(&fraction)
        {
            return Err(Error::InvalidOption {
                option: "host_fraction",
                value: fraction.to_string(),
                remedy: "give a number from 0.0 to 1.0, or \"auto\"".to_owned(),
            });
        }
        let lane = HostLane::new(memory, options, slots, slot_bytes, owner)?;
        Ok(Self { lane, share, measured: Mutex::default() })
    }

    /// The host's threads, ring and statistics.
    pub(super) fn lane(&self) -> &HostLane {
        &self.lane
    }

    /// Pins the host's ring if there is none yet, between steps.
    pub(super) fn open_ring(&self, memory: &Allocator, slots: usize) -> Result<()> {
        self.lane.open_ring(memory, slots)
    }

    /// The part of the bytes that the host updated in the last step.
    pub(super) fn last_fraction(&self) -> f64 {
        lock(&self.measured).last
    }

    /// Time from the beginning of the last step until the device's end had submitted its last chunk (in a trial: until
    /// that was stored), next to [`HostStats::run_ns`](super::HostStats::run_ns): where the split is right, the two are
    /// close.
    pub(super) fn device_ns(&self) -> u64 {
        lock(&self.measured).device_ns
    }

    /// The fraction that stays: the requested one, or the one that "auto" has chosen.
    pub(super) fn settled_fraction(&self) -> Option<f64> {
        match self.share {
            HostShare::Fixed(fraction) => Some(fraction),
            HostShare::Auto => lock(&self.measured).settled,
        }
    }

    /// Updates every tensor that has a gradient, in the order in which `progress` needs them, and returns when the last weights are on their way to the device.
    /// Without a pipeline the host updates all of them.
    pub(super) fn run(
        &self,
        tables: &[TableStep<'_>],
        pipeline: Option<&Pipeline>,
        inputs: &StepInputs,
        compute: &Stream,
        progress: Option<&dyn Progress>,
    ) -> Result<()> {
        let order = tables.iter().enumerate().flat_map(|(i, step)| {
            let chunks = step.plan().chunks().iter().enumerate().filter(|(_, chunk)| step.has_work(chunk));
            // Chunks without state have the work of their elements.
            chunks.map(move |(index, chunk)| (i, index, step.payload_bytes(chunk).max(chunk.elements)))
        });
        let order: Vec<_> = order.collect();
        let in_place = tables.iter().all(|step| step.plan().buckets().iter().all(|bucket| bucket.on_host));
        if self.share == HostShare::Auto {
            lock(&self.measured).begin(bytes(&order));
        }
        let share = self.next_share(pipeline.is_some());
        let claims = match progress {
            None => Claims::new(order, share, in_place),
            Some(progress) => Claims::by_need(order, share, in_place, |table, chunk| progress.need(table, chunk)),
        };
        let start = Instant::now();
        // The host alone is just that, on streams of its own; but it reads what earlier steps have stored.
        let pipeline = match pipeline {
            Some(pipeline) if claims.is_host_s() => pipeline.drain().map(|()| None)?,
            pipeline => pipeline,
        };
        lock(&self.measured).device_ns = 0;
        self.lane.begin(inputs, compute, pipeline)?;
        let outcome = self.run_both(tables, &claims, inputs, (compute, pipeline), progress);
        // Also after a failure: weights may be on their way up.
        outcome.and(self.lane.end(compute, pipeline))?;
        let (fraction, seconds) = (claims.host_fraction(), start.elapsed().as_secs_f64());
        let mut measured = lock(&self.measured);
        let (host_s, device_s) = (self.lane.stats().run_ns as f64 / 1e9, measured.device_ns as f64 / 1e9);
        measured.end(Tried { fraction, seconds, host_s, device_s });
        Ok(())
    }

    fn next_share(&self, streams: bool) -> HostShare {
        if !streams {
            return HostShare::Fixed(1.0);
        }
        if let Some(fraction) = self.settled_fraction() {
            return HostShare::Fixed(fraction);
        }
        let measured = lock(&self.measured);
        match TRIALS.get(measured.tried.len()).filter(|_| measured.trying) {
            Some(Trial::Stream) => HostShare::Fixed(0.0),
            Some(Trial::Host) => HostShare::Fixed(1.0),
            Some(Trial::Better) => HostShare::Fixed(fastest(&measured.tried, true).fraction),
            Some(Trial::Balance) => HostShare::Fixed(measured.tried.last().map_or(0.0, Tried::balanced)),
            _ => HostShare::Auto,
        }
    }

    fn run_both(
        &self,
        tables: &[TableStep<'_>],
        claims: &Claims,
        inputs: &StepInputs,
        (compute, pipeline): (&Stream, Option<&Pipeline>),
        progress: Option<&dyn Progress>,
    ) -> Result<()> {
        let closing = |outcome: Result<()>| {
            if outcome.is_err() {
                claims.close();
            }
            outcome
        };
        let host = |first| closing(self.lane.run(tables, claims, inputs, pipeline, (first, progress)));
        let Some(pipeline) = pipeline else { return host(None) };
        let tries = lock(&self.measured).trying;
        let device = |begun: Option<Receiver<()>>| -> Result<()> {
            let _entered = pipeline.device().enter()?;
            let start = Instant::now();
            // Ends when the sender is gone, which goes with its thread at the latest.
            let _ = begun.map(|begun| begun.recv());
            while let Some((table, chunk)) = claims.front() {
                streamed::run_chunk(pipeline, tables[table], chunk, inputs, compute)?;
                progress.map_or(Ok(()), |progress| progress.on_device(table, chunk))?;
            }
            // A trial's time includes the last stores, for which a step does not wait otherwise.
            if tries {
                pipeline.drain()?;
            }
            lock(&self.measured).device_ns = start.elapsed().as_nanos() as u64;
            Ok(())
        };
        if claims.is_device_s() {
            return device(None).and(self.lane.wait_for_landing());
        }
        // The host's first gradients go before the device's first stores, which have a fetch to wait for: behind a ring
        // full of stores they would keep the host's threads idle.
        let (first, begun) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let cores = self.lane.threads().cores();
            let driver = cores.spawn_scoped(scope, "forebay-host", || {
                // The caller works at the other end meanwhile.
                trace::in_background();
                host(Some(first))
            })?;
            let device = closing(device(Some(begun)));
            let host = driver.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            device.and(host)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(bytes: &[u64]) -> Vec<(usize, usize, u64)> {
        bytes.iter().enumerate().map(|(i, &bytes)| (0, i, bytes)).collect()
    }

    #[test]
    fn the_ends_of_the_range_give_all_to_one_side() {
        let chunks = order(&[5, 1, 9, 3]);
        assert_eq!(meeting_point(&chunks, 0.0), 4);
        assert_eq!(meeting_point(&chunks, 1.0), 0);
        assert_eq!(meeting_point(&[], 0.5), 0);
    }

    #[test]
    fn a_fraction_is_met_as_nearly_as_chunks_allow() {
        let chunks = order(&[10; 10]);
        for (fraction, host) in [(0.04, 0), (0.06, 1), (0.5, 5), (0.94, 9), (0.96, 10)] {
            assert_eq!(meeting_point(&chunks, fraction), 10 - host, "{fraction}");
        }
    }

    #[test]
    fn every_chunk_is_claimed_once_wherever_the_ends_meet() {
        for share in [HostShare::Auto, HostShare::Fixed(0.3), HostShare::Fixed(0.0), HostShare::Fixed(1.0)] {
            let patterns = [[true; 8], [false; 8], [true, false, true, false, true, true, false, true]];
            for (pattern, room) in patterns.into_iter().flat_map(|pattern| [1, 2, 9].map(|room| (pattern, room))) {
                let claims = Claims::new(order(&[1; 8]), share, false);
                let mut seen: Vec<usize> = Vec::new();
                // In the pattern's order, then whatever is left on either side.
                for front in pattern.into_iter().chain([true; 8]).chain([false; 8]) {
                    if front {
                        seen.extend(claims.front().map(|(_, chunk)| chunk));
                    } else if let Some((_, chunks)) = claims.back(|_, chunks: Range<usize>| chunks.len() <= room) {
                        assert!((1..=room).contains(&chunks.len()));
                        seen.extend(chunks);
                    }
                }
                seen.sort_unstable();
                assert_eq!(seen, (0..8).collect::<Vec<_>>(), "{share:?}");
                let host = match share {
                    HostShare::Fixed(fraction) => (fraction * 8.0).round() / 8.0,
                    HostShare::Auto => claims.host_fraction(),
                };
                assert_eq!(claims.host_fraction(), host);
            }
        }
    }

    #[test]
    fn the_best_of_the_trials_stays() {
        let tried = |found: &[(f64, f64)]| -> Vec<Tried> {
            found.iter().map(|&(fraction, seconds)| Tried { fraction, seconds, ..Tried::default() }).collect()
        };
        // Meet, stream, host, meet, balance, the better alone: the first does not count.
        let chosen = |stream: f64, host: f64| {
            let better = if stream <= host { (0.0, stream) } else { (1.0, host) };
            choose(&tried(&[(0.9, 1.0), (0.0, stream), (1.0, host), (0.3, 7.0), (0.4, 6.0), better]))
        };
        assert_eq!(chosen(9.0, 8.0), 0.4);
        assert_eq!(chosen(4.0, 8.0), 0.0);
        assert_eq!(chosen(9.0, 4.0), 1.0);
        assert_eq!((chosen(4.0, 3.0), chosen(3.0, 4.0)), (1.0, 0.0));
        assert_eq!(chosen(6.01, 7.0), 0.0, "a hair's breadth does not count");
        let again = tried(&[(0.9, 1.0), (0.0, 8.0), (1.0, 9.0), (0.3, 7.0), (0.4, 6.0), (0.0, 5.0)]);
        assert_eq!(choose(&again), 0.0, "the second look at the better one counts");
        assert_eq!(fastest(&again[..3], true).fraction, 0.0);
    }

    #[test]
    fn steps_that_update_little_are_not_what_auto_goes_by() {
        let mut measured = Measured::default();
        let mut step = |bytes: u64, fraction: f64| {
            measured.begin(bytes);
            measured.end(Tried { fraction, seconds: 1.0, ..Tried::default() });
            (measured.trying, measured.settled)
        };
        assert_eq!(step(0, 0.0), (false, None), "nothing at all");
        assert!((0..6).all(|_| step(40, 1.0).0), "a head alone");
        assert_eq!(step(40, 0.0), (false, Some(1.0)));
        assert_eq!(step(80, 0.0), (false, Some(1.0)), "twice as much is still the same");
        assert_eq!(step(1000, 0.0), (true, None), "the body with it is not");
        assert_eq!(step(499, 0.0), (false, None), "nor is the head alone one of its trials");
        assert!((0..4).all(|_| step(500, 0.0) == (true, None)));
        assert_eq!(step(1000, 0.0), (true, Some(0.0)));
        assert_eq!(step(40, 1.0), (false, Some(0.0)), "what was found stays");
        assert_eq!(step(1000, 1.0), (false, Some(0.0)));
    }

    #[test]
    fn a_share_is_moved_towards_the_end_that_was_done_first() {
        let tried = |fraction, host_s, device_s| Tried { fraction, seconds: 1.0, host_s, device_s }.balanced();
        assert_eq!(tried(0.5, 1.0, 1.0), 0.5);
        assert!((tried(0.5, 1.0, 3.0) - 0.75).abs() < 1e-12, "the host is three times as fast");
        assert!((tried(0.2, 1.0, 1.0) - 0.2).abs() < 1e-12);
        assert!(tried(0.5, 2.0, 1.0) < 0.5);
        // Nothing to go by.
        assert_eq!((tried(0.0, 0.0, 1.0), tried(1.0, 1.0, 0.0), tried(0.5, 0.0, 1.0)), (0.0, 1.0, 0.5));
    }

    /// Parameters on the host are updated in place, so nothing but the wait for its store orders a chunk that the device
    /// had in one step and the host has in the next. A whole step of the optimizer waits for all stores by itself.
    #[cfg(not(loom))]
    #[test]
    fn the_host_waits_for_the_store_of_a_chunk_that_was_the_device_s() {
        use crate::optimizer::segments::{Binding, TableInput};
        use crate::plan::{PlanOptions, StepPlan, TensorSpec};
        use forebay_device::{Buffer, Checked, Dtype, Rule, SharedDevice, open};

        const ELEMENTS: u64 = 256;
        let device: SharedDevice = Checked::wrap(open("cpu").unwrap());
        let (memory, rule) = (Allocator::new(device.clone()), Rule::named("adamw").unwrap());
        // A chunk for each tensor: two moments, the weight and the gradient.
        let options = PlanOptions { slots: 4, slot_bytes: 4 * 4 * ELEMENTS, ..PlanOptions::default() };
        let columns = rule.kept(rule.defaults, false);
        let spec = |i: usize| TensorSpec {
            name: format!("tensor.{i}"),
            elements: ELEMENTS,
            columns: columns.clone(),
            on_host: true,
            number: i as u64,
        };
        let plan = StepPlan::new((0..4).map(spec).collect(), options).unwrap();
        let table = super::super::StateTable::pinned(&memory, rule, Arc::new(plan)).unwrap();
        let pipeline = Pipeline::new(&memory, options.slots, options.slot_bytes).unwrap();
        let share = HostShare::Fixed(0.5);
        let hybrid = Hybrid::new(&memory, share, &HostOptions::default(), 0, options.slot_bytes, 0).unwrap();
        let compute = device.stream("compute").unwrap();
        let inputs = StepInputs { scalars: vec![rule.at_step(rule.defaults, 1, ELEMENTS)], ..StepInputs::default() };
        let region = || (Buffer::pageable(4 * ELEMENTS).unwrap().into_region(), Dtype::F32);
        let bindings: Vec<Binding> = (0..4).map(|_| Binding::new(region(), region(), 0)).collect();
        // The device takes 0 and 1 of four, then 0 of two.
        for with_gradient in [4, 2] {
            let mut input = TableInput::default();
            input.tensors.extend((0..4).map(|i| (i < with_gradient).then(|| bindings[i].clone())));
            let step = TableStep { table: &table, input: &input, landed: &[] };
            pipeline.begin();
            hybrid.run(&[step], Some(&pipeline), &inputs, &compute, None).unwrap();
            assert_eq!(hybrid.last_fraction(), 0.5);
        }
        pipeline.drain().unwrap();
    }

    #[test]
    fn by_need_both_ends_take_what_is_needed_first() {
        // Needed in the order of their numbers, backwards.
        let need = |_: usize, chunk: usize| -(chunk as i64);
        for (fraction, host) in [(0.0, 0), (0.25, 10), (0.5, 20), (1.0, 40)] {
            let claims = Claims::by_need(order(&[1; 40]), HostShare::Fixed(fraction), false, need);
            let device: Vec<usize> = std::iter::from_fn(|| claims.front()).map(|(_, chunk)| chunk).collect();
            let taken: Vec<Range<usize>> =
                std::iter::from_fn(|| claims.back(|_, chunks| chunks.len() <= RUN)).map(|(_, chunks)| chunks).collect();
            assert!(device.is_sorted_by(|a, b| a > b) && taken.is_sorted_by(|a, b| a.start > b.start), "{taken:?}");
            let mut all: Vec<usize> = taken.into_iter().flatten().chain(device.iter().copied()).collect();
            assert!(all.len() - device.len() >= host && all.len() - device.len() < host + RUN, "{fraction}");
            all.sort_unstable();
            assert_eq!(all, (0..40).collect::<Vec<_>>());
        }
        // Each has its share of what is needed early.
        let claims = Claims::by_need(order(&[1; 40]), HostShare::Fixed(0.5), false, |_, chunk| chunk as i64);
        let early: Vec<usize> = std::iter::from_fn(|| claims.front()).map(|(_, chunk)| chunk).take(10).collect();
        assert!(early.iter().all(|&chunk| chunk < 24), "{early:?}");
    }

    #[test]
    fn a_closed_list_gives_nothing() {
        let claims = Claims::new(order(&[1; 8]), HostShare::Auto, false);
        assert!(claims.front().is_some() && claims.back(|_, _| false).is_some());
        claims.close();
        assert!(claims.front().is_none() && claims.back(|_, _| true).is_none());
    }

    #[test]
    fn the_host_takes_chunks_of_one_table_in_a_row() {
        // Chunk 1 of the second table has no gradients, so the others do not follow each other.
        let chunks = vec![(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 2, 1), (1, 3, 1)];
        let claims = Claims::new(chunks, HostShare::Fixed(1.0), false);
        let taken: Vec<_> = std::iter::from_fn(|| claims.back(|_, _| true)).collect();
        assert_eq!(taken, [(1, 3..4), (1, 2..3), (1, 0..1), (0, 0..2)]);
    }

    #[test]
    fn the_host_takes_few_chunks_at_first_and_at_last() {
        let takings = |share| {
            let claims = Claims::new(order(&[1; 200]), share, false);
            std::iter::from_fn(|| claims.back(|_, chunks| chunks.len() <= 6)).map(|(_, chunks)| chunks.len()).collect()
        };
        let shared: Vec<usize> = takings(HostShare::Auto);
        assert_eq!(shared[..5], [1, 2, 4, 6, 6]);
        assert_eq!(shared[shared.len() - 8..], [1; 8], "the device could have met it at any of these");
        assert_eq!(shared.iter().sum::<usize>(), 200);
        let alone: Vec<usize> = takings(HostShare::Fixed(1.0));
        assert_eq!(alone[..5], [1, 2, 4, 6, 6]);
        assert!(alone[5..alone.len() - 1].iter().all(|&taken| taken == 6), "nobody to meet: {alone:?}");
        let fixed: Vec<usize> = takings(HostShare::Fixed(0.5));
        assert!(fixed[5..fixed.len() - 1].iter().all(|&taken| taken == 6), "where is known: {fixed:?}");
    }
}
