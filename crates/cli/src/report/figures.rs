//! What the spans of one rank amount to: steps, waits, the wire, memory. It measures nothing itself and decides nothing.

use std::collections::BTreeMap;

use serde::Serialize;

use super::intervals::Intervals;
use super::plan::{PlannedPass, planned};
use super::trace::{Limit, Rank, Sample, Span};
use super::wire::{FETCHES, STORES, Wire, copied};

/// The rows of passes: as the caller's thread sees them, and as the device ran them.
const CALLER: u64 = 1;
const DEVICE: u64 = 2;

/// The figures of one rank.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Figures {
    pub(crate) rank: u64,
    pub(crate) seconds: f64,
    pub(crate) spans: usize,
    /// Spans that found no room in the recorder.
    pub(crate) dropped: u64,
    /// Whether work is missing because its device has no times.
    pub(crate) partial: bool,
    /// Whether the times of passes are those of the device; if not, those of the caller's thread.
    pub(crate) device_times: bool,
    pub(crate) steps: Vec<Step>,
    /// The mean of the steps; without the first one where there are three or more.
    pub(crate) typical: Option<Step>,
    /// Time in which the caller's thread or torch's stream waited.
    pub(crate) exposed_s: f64,
    pub(crate) waits: Vec<Wait>,
    pub(crate) wire: Wire,
    pub(crate) memory: Vec<Peak>,
    pub(crate) plans: Vec<PlannedPass>,
}

/// One step: from the end of the step before to its own end.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Step {
    pub(crate) step: u64,
    pub(crate) begin_ns: i64,
    pub(crate) end_ns: i64,
    pub(crate) total_s: f64,
    pub(crate) forward_s: f64,
    pub(crate) backward_s: f64,
    pub(crate) step_s: f64,
    pub(crate) exposed_s: f64,
    /// Seconds of waits by reason.
    pub(crate) waits: BTreeMap<String, f64>,
    pub(crate) fetch_bytes: u64,
    pub(crate) store_bytes: u64,
    /// The parts of forward and backward in which no copy was under way.
    pub(crate) idle_forward_s: f64,
    pub(crate) idle_backward_s: f64,
    /// Forward passes.
    pub(crate) micro_batches: f64,
}

/// All waits for one reason.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Wait {
    pub(crate) reason: String,
    pub(crate) count: usize,
    pub(crate) seconds: f64,
    /// Of the sum over reasons.
    pub(crate) share: f64,
    pub(crate) longest_s: f64,
}

/// The most and the last of one counter.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Peak {
    pub(crate) counter: String,
    pub(crate) series: String,
    pub(crate) peak: f64,
    pub(crate) last: f64,
}

/// Intervals by what they are for.
struct Sets {
    passes: BTreeMap<&'static str, Intervals>,
    waits: BTreeMap<String, Intervals>,
    all_waits: Intervals,
    fetch: Intervals,
    store: Intervals,
    wire: Intervals,
}

impl Figures {
    /// Computes the figures of a rank. `limit` replaces the one in the trace.
    pub(crate) fn new(rank: &Rank, limit: Option<Limit>) -> Self {
        let has_pass = |row: u64, name: &str| rank.spans.iter().any(|span| is_pass(span, row) && span.name == name);
        let device_times = ["forward", "step"].iter().all(|name| has_pass(DEVICE, name));
        let row = if device_times { DEVICE } else { CALLER };
        let sets = Sets::new(rank, row);
        let steps = steps(rank, row, &sets);
        let (begin, end) = rank.range_ns();
        Self {
            rank: rank.about.rank,
            seconds: (end - begin) as f64 / 1e9,
            spans: rank.spans.iter().filter(|span| !span.args.untimed).count(),
            partial: rank.about.partial,
            dropped: rank.about.dropped,
            device_times,
            typical: typical(&steps),
            steps,
            exposed_s: sets.all_waits.seconds(),
            waits: waits(rank, &sets),
            wire: Wire::new(rank, [&sets.fetch, &sets.store], limit.or(rank.about.wire), (end - begin) as f64 / 1e9),
            memory: peaks(&rank.samples),
            plans: rank.about.activations.iter().filter_map(planned).collect(),
        }
    }

    /// The peak of a counter.
    pub(crate) fn peak(&self, counter: &str, series: &str) -> Option<f64> {
        self.memory.iter().find(|peak| peak.counter == counter && peak.series == series).map(|peak| peak.peak)
    }
}

fn is_pass(span: &Span, row: u64) -> bool {
    span.row == row && span.category == "pass"
}

/// The reason of a wait; `None` for other spans.
fn reason(span: &Span) -> Option<&str> {
    (span.category == "wait").then(|| span.args.reason.as_deref().unwrap_or("other"))
}

fn union<'a>(spans: impl Iterator<Item = &'a Span>) -> Intervals {
    spans.map(|span| (span.start_ns, span.end_ns)).collect()
}

impl Sets {
    fn new(rank: &Rank, row: u64) -> Self {
        let spans = || rank.spans.iter();
        let mut by_reason = BTreeMap::<String, Vec<&Span>>::new();
        for span in spans() {
            if let Some(reason) = reason(span) {
                by_reason.entry(reason.to_owned()).or_default().push(span);
            }
        }
        let copies = |kinds| union(spans().filter(|span| copied(span, kinds).is_some()));
        let (fetch, store) = (copies(&FETCHES), copies(&STORES));
        Self {
            passes: ["forward", "backward", "step"]
                .map(|name| (name, union(spans().filter(|span| is_pass(span, row) && span.name == name))))
                .into(),
            waits: by_reason.into_iter().map(|(reason, spans)| (reason, union(spans.into_iter()))).collect(),
            all_waits: union(spans().filter(|span| reason(span).is_some())),
            wire: fetch.or(&store),
            fetch,
            store,
        }
    }
}

/// The steps, in order. What follows the last one is in none.
fn steps(rank: &Rank, row: u64, sets: &Sets) -> Vec<Step> {
    let passes = || rank.spans.iter().filter(|span| is_pass(span, row));
    let mut begin_ns = passes().map(|span| span.start_ns).min().unwrap_or(0);
    let forwards: Vec<i64> = passes().filter(|span| span.name == "forward").map(|span| span.start_ns).collect();
    let mut steps = Vec::<Step>::new();
    let mut all: Vec<&Span> = passes().collect();
    all.sort_by_key(|span| span.start_ns);
    for (place, span) in all.iter().enumerate() {
        // Of several optimizers that step one after the other, the last one ends the step.
        if span.name != "step" || all.get(place + 1).is_some_and(|next| next.name == "step") {
            continue;
        }
        let end_ns = span.end_ns.max(begin_ns);
        let seen = forwards.partition_point(|begin| *begin < begin_ns) as f64;
        let part = |set: &Intervals| set.within(begin_ns, end_ns);
        let seconds = |name: &str| part(&sets.passes[name]).seconds();
        let idle = |name: &str| {
            let pass = part(&sets.passes[name]);
            pass.seconds() - pass.and(&part(&sets.wire)).seconds()
        };
        let waits = sets.waits.iter().map(|(reason, set)| (reason.clone(), part(set).seconds()));
        steps.push(Step {
            step: span.step.unwrap_or(steps.len() as u64 + 1),
            begin_ns,
            end_ns,
            total_s: (end_ns - begin_ns) as f64 / 1e9,
            forward_s: seconds("forward"),
            backward_s: seconds("backward"),
            step_s: seconds("step"),
            exposed_s: part(&sets.all_waits).seconds(),
            waits: waits.filter(|(_, seconds)| *seconds > 0.0).collect(),
            idle_forward_s: idle("forward"),
            idle_backward_s: idle("backward"),
            micro_batches: forwards.partition_point(|begin| *begin < end_ns) as f64 - seen,
            ..Step::default()
        });
        begin_ns = end_ns;
    }
    for span in &rank.spans {
        let middle = span.start_ns.midpoint(span.end_ns);
        let place = steps.partition_point(|step| step.end_ns <= middle);
        if let Some(step) = steps.get_mut(place).filter(|step| step.begin_ns <= middle) {
            step.fetch_bytes += copied(span, &FETCHES).unwrap_or(0);
            step.store_bytes += copied(span, &STORES).unwrap_or(0);
        }
    }
    steps
}

/// The mean step. The first of many creates state and pins memory, which no other step does.
fn typical(steps: &[Step]) -> Option<Step> {
    let steps = if steps.len() >= 3 { &steps[1..] } else { steps };
    let (first, last) = (steps.first()?, steps.last()?);
    let count = steps.len() as f64;
    let mean = |of: fn(&Step) -> f64| steps.iter().map(of).sum::<f64>() / count;
    let mut waits = BTreeMap::<String, f64>::new();
    for (reason, seconds) in steps.iter().flat_map(|step| &step.waits) {
        *waits.entry(reason.clone()).or_default() += seconds / count;
    }
    Some(Step {
        step: first.step,
        begin_ns: first.begin_ns,
        end_ns: last.end_ns,
        total_s: mean(|step| step.total_s),
        forward_s: mean(|step| step.forward_s),
        backward_s: mean(|step| step.backward_s),
        step_s: mean(|step| step.step_s),
        exposed_s: mean(|step| step.exposed_s),
        waits,
        fetch_bytes: mean(|step| step.fetch_bytes as f64) as u64,
        store_bytes: mean(|step| step.store_bytes as f64) as u64,
        idle_forward_s: mean(|step| step.idle_forward_s),
        idle_backward_s: mean(|step| step.idle_backward_s),
        micro_batches: mean(|step| step.micro_batches),
    })
}

/// Waits by reason, the longest first.
fn waits(rank: &Rank, sets: &Sets) -> Vec<Wait> {
    let sum: f64 = sets.waits.values().map(Intervals::seconds).sum();
    let mut found: Vec<Wait> = sets
        .waits
        .iter()
        .map(|(name, set)| {
            let all = || rank.spans.iter().filter(|span| reason(span) == Some(name));
            let longest_ns = all().map(|span| span.end_ns - span.start_ns).max().unwrap_or(0);
            let seconds = set.seconds();
            let share = if sum > 0.0 { seconds / sum } else { 0.0 };
            Wait { reason: name.clone(), count: all().count(), seconds, share, longest_s: longest_ns as f64 / 1e9 }
        })
        .collect();
    found.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    found
}

/// The counter whose series add up.
const PINNED: &str = "pinned bytes";

/// Peaks of every series, and of all pinned bytes together.
fn peaks(samples: &[Sample]) -> Vec<Peak> {
    let mut found = BTreeMap::<(String, String), Peak>::new();
    let mut note = |counter: &str, series: &str, value: f64| {
        let key = (counter.to_owned(), series.to_owned());
        let (counter, series) = key.clone();
        let peak = found.entry(key).or_insert(Peak { counter, series, peak: value, last: value });
        peak.peak = peak.peak.max(value);
        peak.last = value;
    };
    let mut pinned = BTreeMap::<&str, f64>::new();
    for (place, sample) in samples.iter().enumerate() {
        note(&sample.counter, &sample.series, sample.value);
        if sample.counter == PINNED {
            pinned.insert(&sample.series, sample.value);
            // The series of one event follow each other.
            let next = samples.get(place + 1);
            if next.is_none_or(|next| next.at_ns != sample.at_ns || next.counter != PINNED) {
                note(PINNED, "all", pinned.values().sum());
            }
        }
    }
    found.into_values().collect()
}
