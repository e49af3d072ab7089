//! What can be done with one layer: first the candidates are listed, then each is priced.

use super::{Choice, LayerCost};

/// A level of saved results holds at least one part in this many of the bytes that a layer saves.
const LEVEL_PARTS: u64 = 24;
/// The most levels of a layer.
const LEVELS: usize = 12;

/// One way to treat a layer, with its time and memory.
#[derive(Debug, Clone)]
pub(super) struct Treatment {
    pub(super) recompute: bool,
    pub(super) input: Choice,
    pub(super) tensors: Vec<Choice>,
    pub(super) kept_bytes: u64,
    pub(super) offloaded_bytes: u64,
    /// Recomputation, and watching operations for the results that are saved.
    pub(super) recompute_ns: u64,
    pub(super) forward_bytes: u64,
    pub(super) backward_bytes: u64,
    /// Freed as early and fetched as late as possible, even if the computation must wait.
    pub(super) tight: bool,
}

impl Treatment {
    /// Whether saved results are all kept, or all offloaded, as `choice` says. A layer that keeps everything always
    /// qualifies.
    pub(super) fn saves_only_by(&self, choice: Choice) -> bool {
        let other = if choice == Choice::Keep { Choice::Offload } else { Choice::Keep };
        if self.recompute { !self.tensors.contains(&other) } else { self.offloaded_bytes == 0 || other == Choice::Keep }
    }

    pub(super) fn word(&self) -> &'static str {
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

/// A recomputed layer: how many of its results are saved, most expensive per byte first, and how many of these, counted
/// from the same end, are offloaded.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    saved: usize,
    offloaded: usize,
    input: Choice,
}

/// All treatments of a layer. The first takes the least memory; the last keeps everything.
pub(super) fn treatments(layer: &LayerCost) -> Vec<Treatment> {
    let mut found = Vec::new();
    if layer.can_recompute {
        let order = by_time_per_byte(layer);
        found.extend(candidates(&levels(layer, &order)).into_iter().map(|one| recomputed(layer, &order, one)));
    }
    found.extend([4u64, 3, 2, 1, 0].map(|quarters| saved(layer, quarters)));
    let frugal = Treatment { tight: true, ..found[0].clone() };
    found.insert(0, frugal);
    found
}

/// The results worth saving, most expensive per byte first; among equals the first.
fn by_time_per_byte(layer: &LayerCost) -> Vec<usize> {
    let mut order: Vec<usize> =
        (0..layer.tensors.len()).filter(|&i| layer.tensors[i].recompute_ns > 0 && layer.tensors[i].bytes > 0).collect();
    order.sort_by(|&a, &b| {
        let (a_cost, b_cost) = (&layer.tensors[a], &layer.tensors[b]);
        let left = u128::from(a_cost.recompute_ns) * u128::from(b_cost.bytes);
        let right = u128::from(b_cost.recompute_ns) * u128::from(a_cost.bytes);
        right.cmp(&left).then(a.cmp(&b))
    });
    order
}

/// How many results of `order` may be saved. A level ends where it holds enough bytes, so that small results join larger
/// ones.
fn levels(layer: &LayerCost, order: &[usize]) -> Vec<usize> {
    let (mut levels, mut bytes) = (vec![0], 0u64);
    for (at, &i) in order.iter().enumerate() {
        bytes += layer.tensors[i].bytes;
        if bytes.saturating_mul(LEVEL_PARTS) >= layer.saved_bytes || at + 1 == order.len() {
            levels.push(at + 1);
            bytes = 0;
        }
    }
    levels.truncate(LEVELS + 1);
    levels
}

/// Of each level: nothing, half, all but the last level or everything offloaded. Inputs are kept only where all else is.
fn candidates(levels: &[usize]) -> Vec<Candidate> {
    let mut found = Vec::new();
    for (level, &saved) in levels.iter().enumerate() {
        let mut splits = vec![0, levels[level / 2], levels[level.saturating_sub(1)], saved];
        splits.sort_unstable();
        splits.dedup();
        for &offloaded in splits.iter().rev() {
            found.push(Candidate { saved, offloaded, input: Choice::Offload });
            if offloaded == 0 {
                found.push(Candidate { saved, offloaded, input: Choice::Keep });
            }
        }
    }
    found
}

/// The price of a recomputed layer.
fn recomputed(layer: &LayerCost, order: &[usize], candidate: Candidate) -> Treatment {
    let mut tensors = vec![Choice::Recompute; layer.tensors.len()];
    let (mut kept_bytes, mut offloaded_bytes) = match candidate.input {
        Choice::Keep => (layer.input_bytes, 0),
        _ => (0, layer.input_bytes),
    };
    let (mut gained_ns, mut extra_bytes, mut result_bytes) = (0, 0, 0);
    for (at, &i) in order[..candidate.saved].iter().enumerate() {
        let tensor = &layer.tensors[i];
        if at < candidate.offloaded {
            tensors[i] = Choice::Offload;
            offloaded_bytes += tensor.bytes;
        } else {
            tensors[i] = Choice::Keep;
            kept_bytes += tensor.bytes;
        }
        gained_ns += tensor.recompute_ns;
        result_bytes += tensor.bytes;
        extra_bytes += if tensor.saved { 0 } else { tensor.bytes };
    }
    let select_ns = if candidate.saved > 0 { layer.select_ns } else { 0 };
    let bare_bytes = layer.forward_bare_bytes;
    Treatment {
        recompute: true,
        input: candidate.input,
        tensors,
        kept_bytes,
        offloaded_bytes,
        recompute_ns: layer.recompute_ns.saturating_sub(gained_ns) + select_ns,
        forward_bytes: (bare_bytes + result_bytes).min(forward_saving_bytes(layer).max(bare_bytes)),
        // Saved results are used up before the backward pass proper begins.
        backward_bytes: layer.backward_bytes.max(layer.saved_bytes + extra_bytes),
        tight: false,
    }
}

/// The price of a layer that is not recomputed and offloads some quarters of what it saves.
fn saved(layer: &LayerCost, quarters: u64) -> Treatment {
    let offloaded = u64::try_from(u128::from(layer.saved_bytes) * u128::from(quarters) / 4).unwrap_or(u64::MAX);
    Treatment {
        recompute: false,
        input: Choice::Keep,
        tensors: Vec::new(),
        kept_bytes: layer.saved_bytes - offloaded,
        offloaded_bytes: offloaded,
        recompute_ns: 0,
        forward_bytes: forward_saving_bytes(layer),
        backward_bytes: layer.backward_bytes,
        tight: false,
    }
}

fn forward_saving_bytes(layer: &LayerCost) -> u64 {
    layer.forward_saving_bytes.max(layer.saved_bytes)
}
