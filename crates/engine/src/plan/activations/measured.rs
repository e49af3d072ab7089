//! From a measured pass to its costs.
//!
//! A measuring pass is a list of samples: when each call of a layer began and ended, when its backward pass began, and
//! what was allocated at those moments. In such a pass the first call of each kind saves everything and the others are
//! recomputed, so no call shows all its figures. Calls of one family take the same time and memory, so the figures that
//! one call does not show are taken from others of its family.

use std::collections::BTreeMap;

use super::{LayerCost, PassCost, TensorCost};

/// Host time to watch one operation.
const SELECT_NS: u64 = 8_000;
/// A backward pass takes at most this many tenths of its forward pass: two products of the same size for each one, and
/// a little more. It bounds the time of a call that waited for its tensors one by one.
const BACKWARD_TENTHS: u64 = 22;

/// What a sample was taken at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassEvent {
    /// The pass begins.
    Begin,
    /// A call begins.
    Enter,
    /// A call ends.
    Leave,
    /// The backward pass of a call begins: its first saved tensor is used.
    Open,
    /// The backward pass ends.
    End,
}

/// One moment of a measured pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassSample {
    /// What happened.
    pub event: PassEvent,
    /// The number of the call; of no meaning for `Begin` and `End`.
    pub call: usize,
    /// On the device's clock, since the pass began.
    pub at_ns: u64,
    /// On the host's clock.
    pub host_ns: u64,
    /// Allocated on the device.
    pub allocated_bytes: u64,
    /// The most since the sample before.
    pub peak_bytes: u64,
    /// The part of the allocated bytes that are saved tensors on their way to or from the host.
    pub held_bytes: u64,
    /// The part of the allocated bytes that are gradients which the pass has made.
    pub gradient_bytes: u64,
    /// The same part of the peak.
    pub peak_gradient_bytes: u64,
}

/// What is known of calls of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct CallKind {
    /// The name of the module's class.
    pub name: String,
    /// Kinds of one family take the same time and memory.
    pub family: u64,
    /// Whether a call may run again.
    pub can_recompute: bool,
    /// The part of the forward pass that is recomputed: nothing after the last saved tensor.
    pub recompute_share: f64,
    /// What a call saves if it is not recomputed.
    pub saved_bytes: u64,
    /// What it saves if it is.
    pub input_bytes: u64,
    /// How many operations it consists of.
    pub operations: u64,
    /// Results that can be saved.
    pub tensors: Vec<TensorCost>,
}

/// One call in a measured pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeasuredCall {
    /// Its kind, as a place in [`MeasuredPass::kinds`]; `None` for a call that no measuring pass made.
    pub kind: Option<usize>,
    /// Whether it saved everything; if not, it was recomputed.
    pub saves: bool,
}

/// What one call took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallTimes {
    /// Its forward pass, if it was seen.
    pub forward_ns: Option<u64>,
    /// Its backward pass, if it was seen.
    pub backward_ns: Option<u64>,
}

/// A pass as it was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredPass {
    /// In the order in which they were taken; the first is [`PassEvent::Begin`].
    pub samples: Vec<PassSample>,
    /// All calls, in the order of the forward pass.
    pub calls: Vec<MeasuredCall>,
    /// The kinds of the calls.
    pub kinds: Vec<CallKind>,
}

/// The samples of each call.
#[derive(Debug, Default)]
struct Calls<'a> {
    enter: BTreeMap<usize, &'a PassSample>,
    leave: BTreeMap<usize, &'a PassSample>,
    open: BTreeMap<usize, &'a PassSample>,
    /// The sample that ends a call's backward pass.
    after: BTreeMap<usize, &'a PassSample>,
    /// The first sample of the backward pass.
    backward: Option<&'a PassSample>,
}

impl Calls<'_> {
    /// The calls whose forward pass was seen, in order.
    fn seen(&self) -> Vec<usize> {
        self.enter.keys().filter(|call| self.leave.contains_key(call)).copied().collect()
    }

    fn forward_ns(&self, call: usize) -> Option<u64> {
        Some(between(self.enter.get(&call)?, self.leave.get(&call)?))
    }

    fn backward_ns(&self, call: usize) -> Option<u64> {
        Some(between(self.open.get(&call)?, self.after.get(&call)?))
    }
}

fn between(begin: &PassSample, end: &PassSample) -> u64 {
    end.at_ns.saturating_sub(begin.at_ns)
}

/// A layer's cost while it is put together.
#[derive(Debug, Clone)]
struct Draft {
    cost: LayerCost,
    saves: bool,
    operations: u64,
    host_ns: u64,
}

impl MeasuredPass {
    /// What each call took.
    pub fn times(&self) -> Vec<CallTimes> {
        let calls = self.by_call();
        let times = |call| CallTimes { forward_ns: calls.forward_ns(call), backward_ns: calls.backward_ns(call) };
        (0..self.calls.len()).map(times).collect()
    }

    /// What the pass costs, with the rates of a link and the most bytes that may be on the host.
    pub fn cost(&self, store_gbps: f64, fetch_gbps: f64, host_bytes: u64) -> PassCost {
        let calls = self.by_call();
        let begin_bytes = self.samples.first().map_or(0, |begin| begin.allocated_bytes);
        let mut drafts: Vec<Draft> = (0..self.calls.len()).map(|call| self.draft(call, &calls, begin_bytes)).collect();
        let seen = calls.seen();
        let mut families: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for &call in &seen {
            if let Some(kind) = self.kind(call) {
                families.entry(kind.family).or_default().push(call);
            }
        }
        for family in families.values() {
            lend(&mut drafts, family);
        }
        self.fill(&mut drafts, &seen);
        PassCost {
            layers: drafts.into_iter().map(|draft| draft.cost).collect(),
            tail_bytes: calls
                .backward
                .map_or(0, |first| first.peak_bytes.saturating_sub(first.held_bytes).saturating_sub(begin_bytes)),
            tail_gradient_bytes: calls.backward.map_or(0, |first| first.peak_gradient_bytes),
            outside_ns: self.outside_ns(&calls, &seen),
            store_gbps,
            fetch_gbps,
            host_bytes,
        }
    }

    fn kind(&self, call: usize) -> Option<&CallKind> {
        self.kinds.get(self.calls[call].kind?)
    }

    fn by_call(&self) -> Calls<'_> {
        let mut calls = Calls::default();
        let mut opened = None;
        for sample in &self.samples {
            match sample.event {
                PassEvent::Begin => continue,
                PassEvent::Enter => _ = calls.enter.insert(sample.call, sample),
                PassEvent::Leave => _ = calls.leave.insert(sample.call, sample),
                PassEvent::Open | PassEvent::End => {
                    calls.backward.get_or_insert(sample);
                    if let Some(before) = opened.take() {
                        calls.after.insert(before, sample);
                    }
                }
            }
            if sample.event == PassEvent::Open {
                calls.open.insert(sample.call, sample);
                opened = Some(sample.call);
            }
        }
        calls
    }

    /// What a call's own samples say.
    fn draft(&self, call: usize, calls: &Calls<'_>, begin_bytes: u64) -> Draft {
        let kind = self.kind(call);
        let (enter, leave) = (calls.enter.get(&call), calls.leave.get(&call));
        let forward_ns = calls.forward_ns(call).unwrap_or(0);
        let forward_bytes = match (enter, leave) {
            (Some(enter), Some(leave)) => leave.peak_bytes.saturating_sub(enter.allocated_bytes),
            _ => 0,
        };
        let host_ns = match (enter, leave) {
            (Some(enter), Some(leave)) => leave.host_ns.saturating_sub(enter.host_ns),
            _ => 0,
        };
        let saved_bytes = kind.map_or(0, |kind| kind.saved_bytes);
        let base = |at: &PassSample| at.allocated_bytes.saturating_sub(at.held_bytes).saturating_sub(begin_bytes);
        let (mut backward_base_bytes, mut backward_bytes) = (0, saved_bytes);
        let (mut base_gradient_bytes, mut gradient_bytes) = (0, 0);
        if let (Some(open), Some(after)) = (calls.open.get(&call), calls.after.get(&call)) {
            backward_base_bytes = base(open);
            let above = after.peak_bytes.saturating_sub(begin_bytes).saturating_sub(backward_base_bytes);
            let measured = above.saturating_sub(after.held_bytes);
            backward_bytes = measured.max(saved_bytes);
            base_gradient_bytes = open.gradient_bytes;
            gradient_bytes = base_gradient_bytes;
            // All that it saved is there as its backward pass begins, before it makes gradients.
            if measured >= saved_bytes {
                gradient_bytes = gradient_bytes.max(after.peak_gradient_bytes);
            }
        }
        let cost = LayerCost {
            name: format!("layer {call}, {}", kind.map_or("not called", |kind| &kind.name)),
            // There is no point in it where nothing is saved.
            can_recompute: kind.is_some_and(|kind| kind.can_recompute) && saved_bytes > 0,
            forward_ns,
            backward_ns: calls.backward_ns(call).unwrap_or(0),
            recompute_ns: (forward_ns as f64 * kind.map_or(0.0, |kind| kind.recompute_share)) as u64,
            select_ns: 0,
            input_bytes: kind.map_or(0, |kind| kind.input_bytes),
            saved_bytes,
            forward_base_bytes: enter.map_or(0, |enter| base(enter)),
            forward_saving_bytes: forward_bytes,
            forward_bare_bytes: forward_bytes,
            backward_base_bytes,
            backward_bytes,
            base_gradient_bytes,
            gradient_bytes,
            tensors: kind.map_or_else(Vec::new, |kind| kind.tensors.clone()),
        };
        Draft { cost, saves: self.calls[call].saves, operations: kind.map_or(0, |kind| kind.operations), host_ns }
    }

    /// Gives a call that this pass left out the figures of one like it, and the base of its neighbour.
    fn fill(&self, drafts: &mut [Draft], seen: &[usize]) {
        let Some(&first) = seen.first() else { return };
        for call in 0..drafts.len() {
            if seen.contains(&call) {
                continue;
            }
            let last = |alike: &dyn Fn(usize) -> bool| seen.iter().rev().copied().find(|&other| alike(other));
            let same_kind =
                |other: usize| self.calls[call].kind.is_some() && self.calls[other].kind == self.calls[call].kind;
            let same_family = |other: usize| match (self.kind(other), self.kind(call)) {
                (Some(other), Some(own)) => other.family == own.family,
                _ => false,
            };
            let beside = seen.iter().rev().copied().find(|&other| other < call).unwrap_or(first);
            let beside = &drafts[beside].cost;
            let bases = (beside.forward_base_bytes, beside.backward_base_bytes);
            let base_gradient_bytes = beside.base_gradient_bytes;
            let like = last(&same_kind).or_else(|| last(&same_family));
            let like = like.map(|other| drafts[other].cost.clone());
            let cost = &mut drafts[call].cost;
            if let Some(like) = like {
                *cost = LayerCost { name: std::mem::take(&mut cost.name), ..like };
            }
            (cost.forward_base_bytes, cost.backward_base_bytes) = bases;
            cost.gradient_bytes = base_gradient_bytes + cost.gradient_bytes.saturating_sub(cost.base_gradient_bytes);
            cost.base_gradient_bytes = base_gradient_bytes;
        }
    }

    /// Time before, between and after the calls of the forward pass.
    fn outside_ns(&self, calls: &Calls<'_>, seen: &[usize]) -> u64 {
        let (Some(first), Some(last)) = (seen.first(), seen.last()) else { return 0 };
        let before = self.samples.first().map_or(0, |begin| between(begin, calls.enter[first]));
        let gaps: Vec<u64> =
            seen.windows(2).map(|pair| between(calls.leave[&pair[0]], calls.enter[&pair[1]])).collect();
        let after = calls.backward.map_or(0, |backward| between(calls.leave[last], backward));
        before + median(&gaps) * gaps.len() as u64 + after
    }
}

/// Gives the calls of one family both sorts of figures: of a call that saves and of one that is recomputed.
fn lend(drafts: &mut [Draft], family: &[usize]) {
    let (saving, recomputed): (Vec<usize>, Vec<usize>) = family.iter().partition(|&&call| drafts[call].saves);
    let most = |drafts: &[Draft], calls: &[usize], figure: fn(&LayerCost) -> u64| {
        calls.iter().map(|&call| figure(&drafts[call].cost)).max().unwrap_or(0)
    };
    let most_saving = most(drafts, &saving, |cost| cost.forward_saving_bytes);
    let most_input = most(drafts, family, |cost| cost.input_bytes);
    for &call in &recomputed {
        let cost = &mut drafts[call].cost;
        cost.forward_saving_bytes = most_saving.max(cost.saved_bytes);
        if cost.backward_ns > 0 {
            cost.backward_ns = cost.forward_ns.max(cost.backward_ns.saturating_sub(cost.recompute_ns));
        }
    }
    let bare = most(drafts, &recomputed, |cost| cost.forward_bare_bytes);
    let [forward_ns, backward_ns, recompute_ns] = TIMES.map(|time| usual(drafts, &recomputed, time));
    for &call in &saving {
        let cost = &mut drafts[call].cost;
        if !recomputed.is_empty() {
            (cost.forward_bare_bytes, cost.forward_ns, cost.recompute_ns) = (bare, forward_ns, recompute_ns);
            if cost.backward_ns > 0 && backward_ns > 0 {
                cost.backward_ns = backward_ns;
            }
        } else if cost.backward_ns > 0 {
            cost.backward_ns = cost.backward_ns.min(cost.forward_ns.saturating_mul(BACKWARD_TENTHS) / 10);
        }
        if cost.input_bytes == 0 {
            cost.input_bytes = if most_input > 0 { most_input } else { cost.saved_bytes.min(cost.forward_bare_bytes) };
            cost.can_recompute &= !recomputed.is_empty();
        }
    }
    for time in TIMES {
        smooth(drafts, family, time);
    }
    let hosts: Vec<u64> =
        (if recomputed.is_empty() { family } else { &recomputed }).iter().map(|&call| drafts[call].host_ns).collect();
    let host_ns_twice = median_twice(&hosts);
    for &call in family {
        let draft = &mut drafts[call];
        // Watching operations takes time on the host, forward and again; it shows where the host is the slower one.
        let watched_twice = host_ns_twice + 2 * SELECT_NS * draft.operations;
        draft.cost.select_ns = watched_twice.saturating_sub(2 * draft.cost.forward_ns);
        share_out(&mut draft.cost);
    }
}

/// The times of a layer.
type Time = fn(&mut LayerCost) -> &mut u64;
const TIMES: [Time; 3] = [|cost| &mut cost.forward_ns, |cost| &mut cost.backward_ns, |cost| &mut cost.recompute_ns];

/// The median of a time. Calls without one, such as those that no gradient reached, do not count.
fn usual(drafts: &mut [Draft], calls: &[usize], time: Time) -> u64 {
    let mut known = Vec::with_capacity(calls.len());
    for &call in calls {
        known.push(*time(&mut drafts[call].cost));
    }
    known.retain(|&ns| ns > 0);
    median(&known)
}

/// Layers of one family take the same time except for noise, which is not planned for.
fn smooth(drafts: &mut [Draft], family: &[usize], time: Time) {
    let usual = usual(drafts, family, time);
    for &call in family {
        let ns = time(&mut drafts[call].cost);
        if ns.abs_diff(usual).saturating_mul(3) <= usual {
            *ns = usual;
        }
    }
}

/// Operations were timed one by one, in one layer; their times are shares of the layer's recomputation.
fn share_out(cost: &mut LayerCost) {
    let total: u64 = cost.tensors.iter().map(|tensor| tensor.recompute_ns).sum();
    if total > cost.recompute_ns && cost.recompute_ns > 0 {
        for tensor in &mut cost.tensors {
            let part = u128::from(tensor.recompute_ns) * u128::from(cost.recompute_ns) / u128::from(total);
            tensor.recompute_ns = part as u64;
        }
    }
}

/// Twice the median: the mean of two middle values is not always whole.
fn median_twice(values: &[u64]) -> u64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    match sorted.len() {
        0 => 0,
        n => sorted[(n - 1) / 2] + sorted[n / 2],
    }
}

fn median(values: &[u64]) -> u64 {
    median_twice(values) / 2
}
