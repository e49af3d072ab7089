//! What becomes of each layer's activations: kept, offloaded or recomputed, for the least time under a budget of bytes.
//!
//! Pure: measured figures of one pass go in ([`PassCost`]), a plan comes out ([`ActivationPlan`]), and the same figures
//! give the same plan. Two parts: a *model* that says how long a pass takes and how much memory it needs at its worst
//! moment if each layer is treated in some way, and a *search* over ways.
//!
//! # The model
//! Layers run forward from 0 to n-1 and backward from n-1 to 0. A layer either saves what autograd asks for, or is
//! recomputed in its backward pass, all but the results of a few operations that are dear to recompute for their bytes.
//! Whatever a layer leaves behind for its backward pass is kept, or offloaded: then it is let go at the end of a later
//! layer ([`LayerPlan::let_go_at`]) and fetched from the beginning of a later layer's backward pass on
//! ([`LayerPlan::fetch_at`]). Both points are chosen so that the wire, first come first served, is done in time. With
//! `held` for what earlier layers have on the device at that moment, kept, leaving or arriving:
//!
//! | moment | bytes above the pass's beginning |
//! |---|---|
//! | forward pass of layer i | `forward_base + held + ` what the layer's forward pass takes, saving or not |
//! | loss | `tail + held` |
//! | backward pass of layer i | `backward_base + held + backward` (all that it saved is there, fetched or recomputed) |
//!
//! The time is that of all layers, of what is recomputed, of what lies outside of layers, and of the waits for the wire.
//!
//! # The search
//! It starts where nothing can be saved any more and takes, again and again, the change of one layer that gains most time
//! for its bytes. The way from there to where everything is kept does not depend on the budget; the plan is the fastest
//! point on it that fits, of several such ways with different tastes. So a larger budget never gives a slower plan.

use std::cmp::Ordering;
use std::fmt;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The result of an operation inside a layer, which need not be recomputed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorCost {
    /// The operation.
    pub name: String,
    /// Bytes of its results.
    pub bytes: u64,
    /// What recomputing it takes.
    pub recompute_ns: u64,
    /// Whether autograd saves it anyway; if not, having it takes memory of its own while the layer is recomputed.
    pub saved: bool,
}

/// What one layer takes, as measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerCost {
    /// Its name.
    pub name: String,
    /// Whether it gives the same results when it runs again.
    pub can_recompute: bool,
    /// Its forward pass.
    pub forward_ns: u64,
    /// Its backward pass, nothing recomputed.
    pub backward_ns: u64,
    /// What recomputing all that it saves adds to that.
    pub recompute_ns: u64,
    /// What watching its operations adds to a pass, if some of their results are had rather than recomputed.
    pub select_ns: u64,
    /// What is left of it if it is recomputed: its inputs.
    pub input_bytes: u64,
    /// What it saves if it is not.
    pub saved_bytes: u64,
    /// On the device as it begins, not counting what layers before it saved.
    pub forward_base_bytes: u64,
    /// The most its forward pass takes above that, if it saves.
    pub forward_saving_bytes: u64,
    /// The same if it does not.
    pub forward_bare_bytes: u64,
    /// On the device as its backward pass begins, not counting what it and layers before it saved.
    pub backward_base_bytes: u64,
    /// The most its backward pass takes above that, all that it saved included.
    pub backward_bytes: u64,
    /// Results that need not be recomputed.
    pub tensors: Vec<TensorCost>,
}

/// What one pass takes, as measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PassCost {
    /// Layers in the order of the forward pass.
    pub layers: Vec<LayerCost>,
    /// The most between the last layer and its backward pass, not counting what layers saved.
    pub tail_bytes: u64,
    /// Time outside of layers.
    pub outside_ns: u64,
    /// The wire, in GB/s.
    pub store_gbps: f64,
    /// The wire, in GB/s.
    pub fetch_gbps: f64,
    /// Most bytes that may be on the host at once.
    pub host_bytes: u64,
}

impl PassCost {
    /// The same for `tokens` instead of the `measured` ones, everything taken to grow with their number.
    pub fn scaled(&self, tokens: u64, measured: u64) -> Self {
        let grow = |value: &mut u64| {
            let grown = u128::from(*value) * u128::from(tokens) / u128::from(measured.max(1));
            *value = u64::try_from(grown).unwrap_or(u64::MAX);
        };
        let mut cost = self.clone();
        for layer in &mut cost.layers {
            for value in [
                &mut layer.forward_ns,
                &mut layer.backward_ns,
                &mut layer.recompute_ns,
                &mut layer.input_bytes,
                &mut layer.saved_bytes,
                &mut layer.forward_base_bytes,
                &mut layer.forward_saving_bytes,
                &mut layer.forward_bare_bytes,
                &mut layer.backward_base_bytes,
                &mut layer.backward_bytes,
            ] {
                grow(value);
            }
            for tensor in &mut layer.tensors {
                grow(&mut tensor.bytes);
                grow(&mut tensor.recompute_ns);
            }
        }
        grow(&mut cost.tail_bytes);
        grow(&mut cost.outside_ns);
        cost
    }
}

/// What becomes of a tensor between its forward and its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// It stays on the device.
    Keep,
    /// It goes to the host and comes back.
    Offload,
    /// It is dropped and computed again.
    Recompute,
}

/// What becomes of one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerPlan {
    /// All of it in one word or two, for tables.
    pub word: String,
    /// Whether it is recomputed, but for the tensors below; if not, all that it saves is kept or offloaded.
    pub recompute: bool,
    /// Its inputs, if it is recomputed.
    pub input: Choice,
    /// The tensors of [`LayerCost::tensors`], if it is recomputed.
    pub tensors: Vec<Choice>,
    /// How much of what it saves leaves, first saved first, if it is not recomputed.
    pub offload_bytes: u64,
    /// What leaves is let go at the end of the layer before this one; the number of layers stands for the last one's end.
    pub let_go_at: u32,
    /// What left is fetched from the beginning of this layer's backward pass on.
    pub fetch_at: u32,
    /// Bytes that stay on the device.
    pub kept_bytes: u64,
    /// Bytes that leave.
    pub offloaded_bytes: u64,
    /// Its forward pass, waits for its stores included.
    pub forward_ns: u64,
    /// Its backward pass, recomputation and waits for its fetches included.
    pub backward_ns: u64,
    /// What of both is recomputation.
    pub recompute_ns: u64,
    /// What of both is waiting.
    pub stall_ns: u64,
}

/// A moment of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// The forward pass of a layer.
    Forward(usize),
    /// Between the last layer and its backward pass.
    Tail,
    /// The backward pass of a layer.
    Backward(usize),
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forward(layer) => write!(f, "the forward pass of layer {layer}"),
            Self::Tail => write!(f, "the loss"),
            Self::Backward(layer) => write!(f, "the backward pass of layer {layer}"),
        }
    }
}

/// The immutable plan of a pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ActivationPlan {
    /// What was allowed.
    pub budget_bytes: u64,
    /// The least that would do.
    pub least_bytes: u64,
    /// The most memory that the pass takes, above what there is as it begins.
    pub peak_bytes: u64,
    /// When that is.
    pub peak_at: Moment,
    /// How long the pass takes.
    pub pass_ns: u64,
    /// What becomes of each layer.
    pub layers: Vec<LayerPlan>,
}

/// One way to treat a layer, with what follows from it.
#[derive(Debug, Clone)]
struct Way {
    recompute: bool,
    input: Choice,
    tensors: Vec<Choice>,
    kept_bytes: u64,
    offloaded_bytes: u64,
    /// What is recomputed, and what choosing costs.
    again_ns: u64,
    forward_bytes: u64,
    backward_bytes: u64,
    /// Let go and fetched as late and as early as memory would have it, whatever that costs in waiting.
    tight: bool,
}

impl Way {
    /// Whether results are had by this means alone. Layers that keep all are to anybody's taste.
    fn has_only(&self, choice: Choice) -> bool {
        let other = if choice == Choice::Keep { Choice::Offload } else { Choice::Keep };
        if self.recompute { !self.tensors.contains(&other) } else { self.offloaded_bytes == 0 || other == Choice::Keep }
    }

    fn word(&self) -> &'static str {
        let any = |wanted| self.tensors.contains(&wanted);
        match (self.recompute, self.offloaded_bytes > 0, self.kept_bytes > 0) {
            (false, false, _) => "keep",
            (false, true, false) => "offload",
            (false, true, true) => "keep, offload",
            (true, ..) if any(Choice::Offload) && any(Choice::Keep) => "keep, offload, recompute",
            (true, ..) if any(Choice::Offload) => "offload, recompute",
            (true, ..) if any(Choice::Keep) => "keep, recompute",
            (true, ..) => "recompute",
        }
    }
}

/// Levels of tensors that need not be recomputed, dearest first, are so large a part of what a layer saves at least.
const LEVEL_PARTS: u64 = 24;
/// And there are no more of them than this.
const LEVELS: usize = 12;
/// With more layers the search looks less closely.
const DEEP: usize = 32;
/// The wire is taken to be slower by one part in so many than it was seen to be.
const WIRE_MARGIN: u64 = 8;

fn ways(layer: &LayerCost) -> Vec<Way> {
    let mut found = Vec::new();
    let saving = layer.forward_saving_bytes.max(layer.saved_bytes);
    if layer.can_recompute {
        // Dearest for its bytes first; of equals the first.
        let mut order: Vec<usize> = (0..layer.tensors.len())
            .filter(|&i| layer.tensors[i].recompute_ns > 0 && layer.tensors[i].bytes > 0)
            .collect();
        order.sort_by(|&a, &b| {
            let (a_cost, b_cost) = (&layer.tensors[a], &layer.tensors[b]);
            let left = u128::from(a_cost.recompute_ns) * u128::from(b_cost.bytes);
            let right = u128::from(b_cost.recompute_ns) * u128::from(a_cost.bytes);
            right.cmp(&left).then(a.cmp(&b))
        });
        // A level ends where enough bytes have come together; small tensors go with larger ones.
        let (mut levels, mut bytes) = (vec![0], 0);
        for (at, &i) in order.iter().enumerate() {
            bytes += layer.tensors[i].bytes;
            if bytes.saturating_mul(LEVEL_PARTS) >= layer.saved_bytes || at + 1 == order.len() {
                (bytes, _) = (0, levels.push(at + 1));
            }
        }
        levels.truncate(LEVELS + 1);
        for (level, &had) in levels.iter().enumerate() {
            let mut leaving = vec![0, levels[level / 2], levels[level.saturating_sub(1)], had];
            leaving.sort_unstable();
            leaving.dedup();
            for &out in leaving.iter().rev() {
                for input in [Choice::Offload, Choice::Keep] {
                    if input == Choice::Keep && out > 0 {
                        continue;
                    }
                    let mut tensors = vec![Choice::Recompute; layer.tensors.len()];
                    let (mut kept, mut left, mut gained, mut extra, mut had_bytes) = (0, 0, 0, 0, 0);
                    for (at, &i) in order[..had].iter().enumerate() {
                        let tensor = &layer.tensors[i];
                        tensors[i] = if at < out { Choice::Offload } else { Choice::Keep };
                        *(if at < out { &mut left } else { &mut kept }) += tensor.bytes;
                        gained += tensor.recompute_ns;
                        had_bytes += tensor.bytes;
                        extra += if tensor.saved { 0 } else { tensor.bytes };
                    }
                    *(if input == Choice::Keep { &mut kept } else { &mut left }) += layer.input_bytes;
                    let select_ns = if had > 0 { layer.select_ns } else { 0 };
                    found.push(Way {
                        recompute: true,
                        input,
                        tensors,
                        kept_bytes: kept,
                        offloaded_bytes: left,
                        again_ns: layer.recompute_ns.saturating_sub(gained) + select_ns,
                        forward_bytes: (layer.forward_bare_bytes + had_bytes).min(saving.max(layer.forward_bare_bytes)),
                        // They are used up before the backward pass proper begins.
                        backward_bytes: layer.backward_bytes.max(layer.saved_bytes + extra),
                        tight: false,
                    });
                }
            }
        }
    }
    for quarters in [4u64, 3, 2, 1, 0] {
        let left = u64::try_from(u128::from(layer.saved_bytes) * u128::from(quarters) / 4).unwrap_or(u64::MAX);
        found.push(Way {
            recompute: false,
            input: Choice::Keep,
            tensors: Vec::new(),
            kept_bytes: layer.saved_bytes - left,
            offloaded_bytes: left,
            again_ns: 0,
            forward_bytes: saving,
            backward_bytes: layer.backward_bytes,
            tight: false,
        });
    }
    // The first way is the one that takes least memory; the last keeps everything.
    let frugal = Way { tight: true, ..found[0].clone() };
    found.insert(0, frugal);
    found
}

/// What the model says about a choice of ways.
#[derive(Debug, Clone)]
struct Outcome {
    peak_bytes: u64,
    peak_at: Moment,
    pass_ns: u64,
    let_go_at: Vec<usize>,
    fetch_at: Vec<usize>,
    stall_ns: Vec<[u64; 2]>,
}

struct Model<'a> {
    cost: &'a PassCost,
    ways: Vec<Vec<Way>>,
}

fn transfer_ns(bytes: u64, gbps: f64) -> u64 {
    if bytes == 0 {
        return 0;
    }
    // Bytes per nanosecond; a wire that was never seen is a slow one.
    (bytes as f64 / if gbps > 0.0 { gbps } else { 1.0 }).ceil() as u64
}

impl Model<'_> {
    fn way(&self, pick: &[usize], layer: usize) -> &Way {
        &self.ways[layer][pick[layer]]
    }

    /// Bytes that go to the host.
    fn moved(&self, pick: &[usize]) -> u64 {
        (0..pick.len()).map(|i| self.way(pick, i).offloaded_bytes).sum()
    }

    fn run(&self, pick: &[usize]) -> Outcome {
        let n = pick.len();
        let mut outcome = Outcome {
            peak_bytes: 0,
            peak_at: Moment::Tail,
            pass_ns: 0,
            let_go_at: vec![n; n],
            fetch_at: vec![0; n],
            stall_ns: vec![[0, 0]; n],
        };
        let forward_ns = self.forward(pick, &mut outcome);
        let backward_ns = self.backward(pick, &mut outcome);
        outcome.pass_ns = forward_ns + self.cost.outside_ns + backward_ns;
        outcome
    }

    fn forward(&self, pick: &[usize], outcome: &mut Outcome) -> u64 {
        let n = pick.len();
        let (mut now, mut wire) = (0u64, 0u64);
        // Stores under way: layer, bytes, when done. Times of later layers are known unless somebody waits.
        let mut out: std::collections::VecDeque<(usize, u64, u64)> = std::collections::VecDeque::new();
        let (mut kept, mut leaving) = (0u64, 0u64);
        for i in 0..n {
            let (layer, way) = (&self.cost.layers[i], self.way(pick, i));
            let needs = layer.forward_base_bytes + kept + leaving + way.forward_bytes;
            note(outcome, needs, Moment::Forward(i));
            let begin = now;
            now += layer.forward_ns;
            if way.offloaded_bytes > 0 {
                let took = transfer_ns(way.offloaded_bytes, self.cost.store_gbps);
                wire = wire.max(begin) + took;
                if way.offloaded_bytes > layer.input_bytes || !way.recompute {
                    // The last of it is saved at the layer's end.
                    wire = wire.max(now);
                }
                out.push_back((i, way.offloaded_bytes, wire + took / WIRE_MARGIN));
                leaving += way.offloaded_bytes;
            }
            kept += way.kept_bytes;
            // At the end of the layer: what is done is let go, what has to be is waited for.
            while let Some(&(from, bytes, done)) = out.front() {
                let must = i + 1 == n || self.way(pick, from).tight;
                if done > now && !must {
                    break;
                }
                outcome.stall_ns[from][0] = done.saturating_sub(now);
                now = now.max(done);
                outcome.let_go_at[from] = i + 1;
                leaving -= bytes;
                out.pop_front();
            }
        }
        note(outcome, self.cost.tail_bytes + kept, Moment::Tail);
        now
    }

    fn backward(&self, pick: &[usize], outcome: &mut Outcome) -> u64 {
        let n = pick.len();
        let takes = |j: usize| self.cost.layers[j].backward_ns + self.way(pick, j).again_ns;
        // When each layer begins if nobody waits.
        let mut begins = vec![0i128; n];
        for j in (0..n.saturating_sub(1)).rev() {
            begins[j] = begins[j + 1] + i128::from(takes(j + 1));
        }
        // The latest beginning of each fetch that is done in time, from the last fetch to the first. Fetches are asked for
        // in the order of use, so an early one takes with it all that are used before.
        let (mut free, mut first, mut at) = (i128::MAX, 0, 0);
        for j in 0..n {
            let way = self.way(pick, j);
            if way.offloaded_bytes == 0 {
                first = first.max(j);
                outcome.fetch_at[j] = first;
                continue;
            }
            let took = transfer_ns(way.offloaded_bytes, self.cost.fetch_gbps);
            free = begins[j].min(free) - i128::from(took + took / WIRE_MARGIN);
            while at + 1 < n && begins[at] > free {
                at += 1;
            }
            let wanted = match (way.tight, way.recompute) {
                (true, true) => (j + 1).min(n - 1),
                (true, false) => j,
                (false, _) => at.max(j),
            };
            first = first.max(wanted);
            outcome.fetch_at[j] = first;
        }
        let held: Vec<u64> = (0..n).map(|j| self.way(pick, j).kept_bytes).collect();
        let mut kept: u64 = held.iter().sum();
        let (mut now, mut wire, mut arrived) = (0u64, 0u64, 0u64);
        let mut done = vec![0u64; n];
        let mut next = n;
        for j in (0..n).rev() {
            while next > 0 && outcome.fetch_at[next - 1] >= j {
                next -= 1;
                let bytes = self.way(pick, next).offloaded_bytes;
                if bytes > 0 {
                    wire = wire.max(now) + transfer_ns(bytes, self.cost.fetch_gbps);
                    done[next] = wire;
                    arrived += bytes;
                }
            }
            let way = self.way(pick, j);
            kept -= held[j];
            arrived -= way.offloaded_bytes;
            let needs = self.cost.layers[j].backward_base_bytes + kept + arrived + way.backward_bytes;
            note(outcome, needs, Moment::Backward(j));
            if way.offloaded_bytes > 0 {
                outcome.stall_ns[j][1] = done[j].saturating_sub(now);
                now = now.max(done[j]);
            }
            now += takes(j);
        }
        now
    }

    /// The picks on the way from least memory to most.
    fn path(&self, taste: Taste) -> Vec<(Vec<usize>, Outcome)> {
        let mut pick = vec![0usize; self.ways.len()];
        let mut path = vec![(pick.clone(), self.run(&pick))];
        self.walk(taste, &mut pick, &mut path);
        // What it has no taste for comes when there is nothing else.
        self.walk(Taste { only: None, ..taste }, &mut pick, &mut path);
        path
    }

    fn walk(&self, taste: Taste, pick: &mut [usize], path: &mut Vec<(Vec<usize>, Outcome)>) {
        let mut here = self.run(pick);
        // Every change, best first as it was when it was last looked at; all are looked at again now and then.
        let mut changes: Vec<Change> = Vec::new();
        for step in 0usize.. {
            if step % (1 + pick.len() / 8).max(pick.len().saturating_sub(DEEP)) == 0 || changes.is_empty() {
                changes = self.changes(pick, &here, taste);
                if changes.is_empty() {
                    break;
                }
            }
            let Some(taken) = self.best(&mut changes, pick, &here, taste) else { continue };
            pick[taken.layer] = taken.to;
            here = taken.there;
            path.push((pick.to_vec(), here.clone()));
        }
    }

    /// All changes of one layer that gain time, best first; of equals the last layer's, and of those the first.
    fn changes(&self, pick: &mut [usize], here: &Outcome, taste: Taste) -> Vec<Change> {
        let mut found = Vec::new();
        for layer in (0..pick.len()).rev() {
            for to in 0..self.ways[layer].len() {
                found.extend(self.change(pick, here, layer, to, taste));
            }
        }
        found.sort_by(|a, b| b.gain.compare(&a.gain));
        found
    }

    fn change(&self, pick: &mut [usize], here: &Outcome, layer: usize, to: usize, taste: Taste) -> Option<Change> {
        let from = pick[layer];
        let (old, new) = (&self.ways[layer][from], &self.ways[layer][to]);
        // Time can only be gained by recomputing less, or by waiting less.
        if to == from || new.again_ns > old.again_ns || (new.again_ns == old.again_ns && !old.tight) {
            return None;
        }
        if taste.only.is_some_and(|choice| !new.has_only(choice)) {
            return None;
        }
        pick[layer] = to;
        let there = self.run(pick);
        pick[layer] = from;
        if there.pass_ns >= here.pass_ns {
            return None;
        }
        if new.offloaded_bytes > old.offloaded_bytes {
            let others = self.moved(pick) - old.offloaded_bytes;
            if others.saturating_add(new.offloaded_bytes) > self.cost.host_bytes {
                return None;
            }
        }
        let (bytes, before) = (new.kept_bytes + new.offloaded_bytes, old.kept_bytes + old.offloaded_bytes);
        let gain = Gain {
            ns: here.pass_ns - there.pass_ns,
            peak_bytes: there.peak_bytes.saturating_sub(here.peak_bytes),
            bytes: if taste.by_bytes { bytes.saturating_sub(before).max(1) } else { 1 },
        };
        Some(Change { gain, layer, to, there })
    }

    /// The best change as things are now; changes that turn out to be worse than they were move back.
    fn best(&self, changes: &mut Vec<Change>, pick: &mut [usize], here: &Outcome, taste: Taste) -> Option<Change> {
        while !changes.is_empty() {
            let first = changes.remove(0);
            let Some(now) = self.change(pick, here, first.layer, first.to, taste) else { continue };
            if changes.first().is_none_or(|next| now.gain.compare(&next.gain).is_ge()) {
                return Some(now);
            }
            let at = changes.partition_point(|other| other.gain.compare(&now.gain).is_ge());
            changes.insert(at, now);
        }
        None
    }
}

/// What a walk prefers. No taste is best for all budgets, and several are cheap.
#[derive(Debug, Clone, Copy)]
struct Taste {
    /// Whether the bytes count of what does not raise the peak.
    by_bytes: bool,
    /// What alone may become of results that are not recomputed, while there is any of that to be had.
    only: Option<Choice>,
}

#[derive(Debug)]
struct Change {
    gain: Gain,
    layer: usize,
    to: usize,
    there: Outcome,
}

#[derive(Debug, Clone, Copy)]
struct Gain {
    ns: u64,
    peak_bytes: u64,
    bytes: u64,
}

impl Gain {
    /// Which is better: time for bytes of the peak, and where the peak does not rise, for bytes at all.
    fn compare(&self, other: &Self) -> Ordering {
        let (mine, theirs) = match (self.peak_bytes, other.peak_bytes) {
            (0, 0) => (self.bytes, other.bytes),
            (0, _) => return Ordering::Greater,
            (_, 0) => return Ordering::Less,
            pair => pair,
        };
        (u128::from(self.ns) * u128::from(theirs)).cmp(&(u128::from(other.ns) * u128::from(mine)))
    }
}

fn note(outcome: &mut Outcome, bytes: u64, at: Moment) {
    if bytes > outcome.peak_bytes {
        (outcome.peak_bytes, outcome.peak_at) = (bytes, at);
    }
}

impl ActivationPlan {
    /// Plans a pass. Pure: the same figures and the same budget give the same plan.
    pub fn new(cost: &PassCost, budget_bytes: u64) -> Result<Self> {
        let model = Model { cost, ways: cost.layers.iter().map(ways).collect() };
        let tastes = [None, Some(Choice::Offload), Some(Choice::Keep)];
        // In a deep model each step is small, and one way is as good as another.
        let tastes = tastes.into_iter().take(if cost.layers.len() > DEEP { 1 } else { 3 });
        let tastes = tastes.flat_map(|only| [false, true].map(|by_bytes| Taste { by_bytes, only }));
        let mut paths: Vec<_> = tastes.flat_map(|taste| model.path(taste)).collect();
        let all: Vec<usize> = model.ways.iter().map(|ways| ways.len() - 1).collect();
        let kept = model.run(&all);
        // Where what is offloaded or recomputed needs more room than it saves, keeping takes less.
        let (least_bytes, least_at) =
            paths.iter().map(|(_, outcome)| outcome).fold((kept.peak_bytes, kept.peak_at), |least, found| {
                if found.peak_bytes < least.0 { (found.peak_bytes, found.peak_at) } else { least }
            });
        paths.push((all, kept));
        let fitting = paths.into_iter().filter(|(_, outcome)| outcome.peak_bytes <= budget_bytes);
        // Of equals the one that moves least.
        let best = fitting.min_by_key(|(pick, outcome)| (outcome.pass_ns, model.moved(pick), outcome.peak_bytes));
        let Some((pick, outcome)) = best else {
            return Err(Error::InvalidOption {
                option: "budget_bytes",
                value: budget_bytes.to_string(),
                remedy: format!(
                    "{least_at} takes {least_bytes} bytes whatever is kept, offloaded or recomputed; raise the budget to \
                     at least that, or lower the batch or the sequence length"
                ),
            });
        };
        Ok(model.plan(&pick, &outcome, budget_bytes, least_bytes))
    }

    /// The plan that takes least memory: every layer recomputed or offloaded.
    pub fn frugal(cost: &PassCost) -> Self {
        let model = Model { cost, ways: cost.layers.iter().map(ways).collect() };
        let pick = vec![0; cost.layers.len()];
        let outcome = model.run(&pick);
        model.plan(&pick, &outcome, outcome.peak_bytes, outcome.peak_bytes)
    }

    /// The plan in words.
    pub fn explain(&self) -> String {
        let size = |bytes: u64| match bytes as f64 {
            bytes if bytes >= 1e8 => format!("{:.2} GiB", bytes / f64::from(1 << 30)),
            bytes => format!("{:.2} MiB", bytes / f64::from(1 << 20)),
        };
        let ms = |ns: u64| ns as f64 / 1e6;
        let mut text = format!(
            "budget {} (the least is {}): {:.1} ms a pass, {} at the peak, in {}\n",
            size(self.budget_bytes),
            size(self.least_bytes),
            ms(self.pass_ns),
            size(self.peak_bytes),
            self.peak_at
        );
        for (i, layer) in self.layers.iter().enumerate() {
            let _ = write!(
                text,
                "layer {i}: {}; {} kept, {} offloaded; forward {:.1} ms, backward {:.1} ms",
                layer.word,
                size(layer.kept_bytes),
                size(layer.offloaded_bytes),
                ms(layer.forward_ns),
                ms(layer.backward_ns)
            );
            if layer.recompute_ns > 0 {
                let _ = write!(text, ", {:.1} of them recomputing", ms(layer.recompute_ns));
            }
            if layer.stall_ns > 0 {
                let _ = write!(text, ", {:.1} waiting", ms(layer.stall_ns));
            }
            text.push('\n');
        }
        text
    }
}

impl Model<'_> {
    fn plan(&self, pick: &[usize], outcome: &Outcome, budget_bytes: u64, least_bytes: u64) -> ActivationPlan {
        let layers = (0..pick.len()).map(|i| {
            let (way, cost, stalls) = (self.way(pick, i), &self.cost.layers[i], outcome.stall_ns[i]);
            LayerPlan {
                word: way.word().to_owned(),
                recompute: way.recompute,
                input: if way.recompute { way.input } else { Choice::Keep },
                tensors: way.tensors.clone(),
                offload_bytes: if way.recompute { 0 } else { way.offloaded_bytes },
                let_go_at: outcome.let_go_at[i] as u32,
                fetch_at: outcome.fetch_at[i] as u32,
                kept_bytes: way.kept_bytes,
                offloaded_bytes: way.offloaded_bytes,
                forward_ns: cost.forward_ns + stalls[0],
                backward_ns: cost.backward_ns + way.again_ns + stalls[1],
                recompute_ns: way.again_ns,
                stall_ns: stalls[0] + stalls[1],
            }
        });
        ActivationPlan {
            budget_bytes,
            least_bytes,
            peak_bytes: outcome.peak_bytes,
            peak_at: outcome.peak_at,
            pass_ns: outcome.pass_ns,
            layers: layers.collect(),
        }
    }
}

impl fmt::Display for ActivationPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.explain())
    }
}
