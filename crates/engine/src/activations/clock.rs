//! When layers ran and how long the computation waited, read from events after the work has ended; and the fraction
//! that those times allow.
//!
//! A time is read if its event has been reached; nothing here waits for it. The exception is statistics: they call
//! `read_stalls` with `wait` set.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use forebay_device::SharedDevice;
use serde::Serialize;

use crate::error::Result;
use crate::flow::{Mark, Marks};
use crate::trace::{self, Kind, Label, Reason, Span};

/// Passes whose times have not been read; more are forgotten, oldest first.
const PASSES: usize = 8;
/// Waits whose times have not been read, before they are looked through.
const STALLS: usize = 256;
/// A shorter wait is the cost of two events.
const STALL_NS: u64 = 30_000;

/// Which half of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    Forward,
    Backward,
}

/// What one layer did, summed over all passes; its times are those of the last pass that was read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LayerStats {
    /// Bytes that left the device.
    pub stored_bytes: u64,
    /// Bytes that came back.
    pub fetched_bytes: u64,
    /// Bytes that stayed.
    pub kept_bytes: u64,
    /// How often the computation waited for a copy.
    pub stalls: u64,
    /// How long it waited in all.
    pub stall_ns: u64,
    /// The last forward pass, waits included.
    pub forward_ns: u64,
    /// The last backward pass, waits included, from the layer's first use of a saved tensor to the next layer's.
    pub backward_ns: u64,
}

#[derive(Debug, Default)]
struct LayerTimes {
    enter: Option<Arc<Mark>>,
    leave: Option<Arc<Mark>>,
    open: Option<Arc<Mark>>,
}

#[derive(Debug, Default)]
struct WatchedPass {
    number: u64,
    layers: BTreeMap<u32, LayerTimes>,
    eligible_bytes: u64,
    stall_ns: [u64; 2],
}

#[derive(Debug)]
struct Stall {
    begin: Arc<Mark>,
    end: Arc<Mark>,
    layer: u32,
    pass: u64,
    half: Half,
}

/// The times of a pass: computation alone, without the waits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PassTimes {
    pub(crate) forward_ns: u64,
    pub(crate) backward_ns: u64,
    pub(crate) stall_ns: u64,
    pub(crate) eligible_bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Clock {
    device: SharedDevice,
    /// What the offload is called in a trace.
    owner: u32,
    marks: Arc<Marks>,
    passes: VecDeque<WatchedPass>,
    stalls: Vec<Stall>,
    pub(crate) table: BTreeMap<u32, LayerStats>,
}

impl Clock {
    pub(crate) fn new(device: SharedDevice, owner: u32) -> Self {
        Self {
            marks: Marks::timed(device.clone()),
            device,
            owner,
            passes: VecDeque::new(),
            stalls: Vec::new(),
            table: BTreeMap::new(),
        }
    }

    pub(crate) fn mark(&self, stream: &forebay_device::Stream) -> Result<Arc<Mark>> {
        let mark = self.marks.take()?;
        mark.record(stream)?;
        Ok(mark)
    }

    pub(crate) fn begin(&mut self, number: u64) {
        self.passes.push_back(WatchedPass { number, ..WatchedPass::default() });
        if self.passes.len() > PASSES {
            self.passes.pop_front();
        }
    }

    pub(crate) fn entered(&mut self, pass: u64, layer: u32, mark: Arc<Mark>) {
        if let Some(times) = self.times(pass, layer) {
            times.enter = Some(mark);
        }
    }

    pub(crate) fn left(&mut self, pass: u64, layer: u32, mark: Arc<Mark>) {
        if let Some(times) = self.times(pass, layer) {
            times.leave = Some(mark);
        }
    }

    /// Whether this is the first use of a layer's tensors in a pass that is watched.
    pub(crate) fn wants_open(&mut self, pass: u64, layer: u32) -> bool {
        self.times(pass, layer).is_some_and(|times| times.open.is_none())
    }

    pub(crate) fn opened(&mut self, pass: u64, layer: u32, mark: Arc<Mark>) {
        if let Some(times) = self.times(pass, layer) {
            times.open = Some(mark);
        }
    }

    pub(crate) fn eligible(&mut self, pass: u64, bytes: u64) {
        if let Some(pass) = self.passes.iter_mut().find(|found| found.number == pass) {
            pass.eligible_bytes += bytes;
        }
    }

    pub(crate) fn stalled(
        &mut self,
        begin: Arc<Mark>,
        end: Arc<Mark>,
        layer: u32,
        pass: u64,
        half: Half,
    ) -> Result<()> {
        self.stalls.push(Stall { begin, end, layer, pass, half });
        // Where no pass is ever measured, their events have to come back too.
        if self.stalls.len() > STALLS { self.read_stalls(false) } else { Ok(()) }
    }

    pub(crate) fn layer(&mut self, layer: u32) -> &mut LayerStats {
        self.table.entry(layer).or_default()
    }

    fn times(&mut self, pass: u64, layer: u32) -> Option<&mut LayerTimes> {
        self.passes
            .iter_mut()
            .rev()
            .find(|found| found.number == pass)
            .map(|pass| pass.layers.entry(layer).or_default())
    }

    /// Reads what has been reached; with `wait`, waits for what has not.
    pub(crate) fn read_stalls(&mut self, wait: bool) -> Result<()> {
        for stall in std::mem::take(&mut self.stalls) {
            if wait {
                stall.end.synchronize()?;
            } else if !stall.end.query()? {
                self.stalls.push(stall);
                continue;
            }
            let ns = stall.begin.elapsed_ns(&stall.end)?;
            if ns < STALL_NS {
                continue;
            }
            self.show(&stall);
            if let Some(pass) = self.passes.iter_mut().find(|pass| pass.number == stall.pass) {
                pass.stall_ns[stall.half as usize] += ns;
            }
            let sums = self.layer(stall.layer);
            sums.stalls += 1;
            sums.stall_ns += ns;
        }
        Ok(())
    }

    fn show(&self, stall: &Stall) {
        let Some(recorder) = trace::current() else { return };
        let Some(clock) = recorder.clock(&self.device) else { return };
        if let Some((start_ns, end_ns)) = clock.span_ns(stall.begin.event(), stall.end.event()) {
            let words = if stall.half == Half::Forward { "wait for a store" } else { "wait for a fetch" };
            let (layer, reason) = (Some(stall.layer), Some(Reason::Activation));
            let span = Span::new(Kind::Wait, Label::Words(words));
            recorder.push(Span { start_ns, end_ns, owner: self.owner, layer, reason, ..span });
        }
    }

    /// The oldest pass that ran forward and backward to its end, once its times can be read.
    pub(crate) fn measured(&mut self) -> Result<Option<PassTimes>> {
        self.read_stalls(false)?;
        for at in 0..self.passes.len() {
            let pass = &self.passes[at];
            if self.stalls.iter().any(|stall| stall.pass == pass.number) || !self.is_complete(pass)? {
                continue;
            }
            let Some(pass) = self.passes.remove(at) else { continue };
            let found = self.read(&pass)?;
            // Earlier ones will not be completed any more, or say no more than this one.
            self.passes.drain(..at);
            return Ok(Some(found));
        }
        Ok(None)
    }

    fn is_complete(&self, pass: &WatchedPass) -> Result<bool> {
        // A pass is over when the tensors of its first layer have been used.
        if pass.layers.values().next().is_none_or(|times| times.open.is_none()) {
            return Ok(false);
        }
        for times in pass.layers.values() {
            let (Some(enter), Some(leave)) = (&times.enter, &times.leave) else { return Ok(false) };
            // Layers may be used in any order, so that the first one's event need not be the last.
            for mark in [Some(enter), Some(leave), times.open.as_ref()].into_iter().flatten() {
                if !mark.query()? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn read(&mut self, pass: &WatchedPass) -> Result<PassTimes> {
        let mut forward_ns = 0;
        let mut opens: Vec<(u32, &Arc<Mark>)> = Vec::new();
        for (&layer, times) in &pass.layers {
            if let (Some(enter), Some(leave)) = (&times.enter, &times.leave) {
                let ns = enter.elapsed_ns(leave)?;
                self.table.entry(layer).or_default().forward_ns = ns;
                forward_ns += ns;
            }
            if let Some(open) = &times.open {
                opens.push((layer, open));
            }
        }
        let mut backward_ns = 0;
        for pair in opens.windows(2) {
            let ((_, lower), (layer, upper)) = (pair[0], pair[1]);
            let ns = upper.elapsed_ns(lower)?;
            self.table.entry(layer).or_default().backward_ns = ns;
            backward_ns += ns;
        }
        let [forward_stall_ns, backward_stall_ns] = pass.stall_ns;
        let backward_ns = backward_ns.saturating_sub(backward_stall_ns);
        let forward_ns = forward_ns.saturating_sub(forward_stall_ns);
        // Nothing marks the end of the first layer's backward pass: it is taken to be as long as the others.
        let backward_ns = match opens.len() as u64 {
            0 | 1 => 2 * forward_ns,
            layers => backward_ns * layers / (layers - 1),
        };
        let stall_ns = forward_stall_ns + backward_stall_ns;
        Ok(PassTimes { forward_ns, backward_ns, stall_ns, eligible_bytes: pass.eligible_bytes })
    }
}

/// The share that is used of the bytes that could be copied during the computation.
const MARGIN: f64 = 0.92;
/// Passes at full offload before the first choice; the first one of a program is slow in many ways.
const PASSES_TO_LEARN: u32 = 2;
/// Passes after which the choice is left alone while the sizes stay.
const PASSES_TO_SETTLE: u32 = 8;
/// A larger share of waiting lowers the fraction.
const STALL_SHARE: f64 = 0.01;

/// The fraction that hides under the computation, from measured times. Until it has been learnt everything leaves: that
/// is slow and safe, where keeping everything might not fit.
#[derive(Debug)]
pub(crate) struct Balance {
    pub(crate) fraction: f64,
    passes: u32,
    cap: f64,
    for_bytes: u64,
}

impl Balance {
    pub(crate) fn new() -> Self {
        Self { fraction: 1.0, passes: 0, cap: 1.0, for_bytes: 0 }
    }

    /// Takes a pass into account; rates are in bytes per nanosecond. Returns whether the fraction changed.
    pub(crate) fn learn(&mut self, pass: &PassTimes, store_rate: f64, fetch_rate: f64) -> bool {
        if pass.eligible_bytes == 0 {
            return false;
        }
        self.passes += 1;
        let resized = self.for_bytes.abs_diff(pass.eligible_bytes) * 10 > self.for_bytes;
        if self.passes < PASSES_TO_LEARN || (self.passes > PASSES_TO_SETTLE && !resized) {
            return false;
        }
        // What the first choices cost in waiting says more than the model below.
        let waited = pass.stall_ns as f64 / (pass.forward_ns + pass.backward_ns).max(1) as f64;
        if self.fraction < 1.0 && !resized && waited > STALL_SHARE {
            self.cap *= 1.0 - waited.min(0.2);
        }
        let carried = (store_rate * pass.forward_ns as f64).min(fetch_rate * pass.backward_ns as f64);
        let fraction = (MARGIN * self.cap * carried / pass.eligible_bytes as f64).min(1.0);
        let changed = (fraction - self.fraction).abs() > 0.02 * self.fraction;
        if changed {
            (self.fraction, self.for_bytes) = (fraction, pass.eligible_bytes);
        }
        changed
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn pass(stall_ns: u64, eligible_bytes: u64) -> PassTimes {
        PassTimes { forward_ns: 100, backward_ns: 200, stall_ns, eligible_bytes }
    }

    #[test]
    fn a_pass_in_another_order_is_read_when_its_last_event_is_reached() {
        let device = forebay_device::open("cpu").unwrap();
        let stream = device.stream("compute").unwrap();
        let mut clock = Clock::new(device.clone(), 0);
        clock.begin(0);
        for layer in [3, 0] {
            let (enter, leave) = (clock.mark(&stream).unwrap(), clock.mark(&stream).unwrap());
            clock.entered(0, layer, enter);
            clock.left(0, layer, leave);
        }
        let first = clock.mark(&stream).unwrap();
        first.synchronize().unwrap();
        clock.opened(0, 0, first);
        device.launch(&stream, &forebay_device::Kernel::Spin { ns: 200_000_000 }).unwrap();
        let last = clock.mark(&stream).unwrap();
        clock.opened(0, 3, last.clone());
        assert!(clock.measured().unwrap().is_none());
        last.synchronize().unwrap();
        assert!(clock.measured().unwrap().is_some());
    }

    #[test]
    fn the_fraction_is_what_the_slower_half_can_carry() {
        let mut balance = Balance::new();
        assert!(!balance.learn(&pass(900, 10_000), 50.0, 50.0), "the first pass is not trusted");
        assert_eq!(balance.fraction, 1.0);
        assert!(balance.learn(&pass(900, 10_000), 50.0, 50.0));
        assert!((balance.fraction - 0.92 * 0.5).abs() < 1e-9, "{balance:?}");
        let mut slow_back = Balance::new();
        slow_back.learn(&pass(0, 10_000), 50.0, 5.0);
        slow_back.learn(&pass(0, 10_000), 50.0, 5.0);
        assert!((slow_back.fraction - 0.92 * 0.1).abs() < 1e-9, "{slow_back:?}");
    }

    #[test]
    fn waiting_lowers_it_and_other_sizes_start_it_again() {
        let mut balance = Balance::new();
        for _ in 0..2 {
            balance.learn(&pass(900, 10_000), 50.0, 50.0);
        }
        let first = balance.fraction;
        assert!(balance.learn(&pass(30, 10_000), 50.0, 50.0));
        assert!(balance.fraction < first * 0.95);
        let settled = balance.fraction;
        for _ in 0..20 {
            balance.learn(&pass(0, 10_000), 50.0, 50.0);
        }
        assert_eq!(balance.fraction, settled);
        assert!(balance.learn(&pass(0, 20_000), 50.0, 50.0), "twice the bytes");
        assert!((balance.fraction - settled / 2.0).abs() < 1e-9);
    }
}
