//! The search for a plan: paths from the least memory to keeping everything, and the fastest point that fits.

use std::cmp::Ordering;

use super::model::{Model, Outcome};
use super::{ActivationPlan, Choice, PassCost};
use crate::error::{Error, Result};

/// With more layers the search looks less closely.
const DEEP: usize = 32;

/// A treatment for each layer, with what the model predicts for it.
type PathPoint = (Vec<usize>, Outcome);

impl ActivationPlan {
    /// Plans a pass. Pure: the same figures and the same budget give the same plan.
    pub fn new(cost: &PassCost, budget_bytes: u64) -> Result<Self> {
        let model = Model::new(cost);
        let mut points: Vec<PathPoint> = preferences(cost.layers.len()).flat_map(|one| model.path(one)).collect();
        let all: Vec<usize> = model.treatments.iter().map(|treatments| treatments.len() - 1).collect();
        let kept = model.run(&all);
        // Keeping takes less where offloading or recomputing needs more room than it saves.
        let least = points
            .iter()
            .map(|(_, outcome)| outcome)
            .fold(&kept, |least, found| if found.peak_bytes < least.peak_bytes { found } else { least });
        let (least_bytes, refusal) = (least.peak_bytes, refusal(least));
        points.push((all, kept));
        let fitting = points.into_iter().filter(|(_, outcome)| outcome.peak_bytes <= budget_bytes);
        // Among equals the one that moves least.
        let best = fitting.min_by_key(|(pick, outcome)| (outcome.pass_ns, model.moved(pick), outcome.peak_bytes));
        let Some((pick, outcome)) = best else {
            return Err(Error::InvalidOption {
                option: "budget_bytes",
                value: budget_bytes.to_string(),
                remedy: refusal,
            });
        };
        Ok(model.plan(&pick, &outcome, budget_bytes, least_bytes))
    }

    /// The plan that takes the least memory: every layer recomputed or offloaded.
    pub fn frugal(cost: &PassCost) -> Self {
        let model = Model::new(cost);
        let pick = vec![0; cost.layers.len()];
        let outcome = model.run(&pick);
        model.plan(&pick, &outcome, outcome.peak_bytes, outcome.peak_bytes)
    }
}

/// Why a budget below the least is refused, and what would do.
fn refusal(least: &Outcome) -> String {
    let Outcome { peak_at, peak_bytes, gradient_bytes, .. } = least;
    let needs = format!("{peak_at} needs at least {peak_bytes} bytes under every plan");
    let raise = "raise the budget to at least that";
    if *gradient_bytes == 0 {
        return format!("{needs}; {raise}, or lower the batch or the sequence length");
    }
    format!(
        "{needs}, of which about {gradient_bytes} are gradients that the pass makes; {raise}, lower the batch or the \
         sequence length, or keep gradients from pass to pass, as zero_grad(set_to_none=False) does: a pass that adds to \
         them does not make them"
    )
}

/// What one path prefers. No preference is best for all budgets, and several are cheap.
#[derive(Debug, Clone, Copy)]
struct Preference {
    /// Whether a change that does not raise the peak is judged by its bytes, too.
    by_bytes: bool,
    /// Only consider this choice for saved results, while it is available.
    only: Option<Choice>,
}

fn preferences(layers: usize) -> impl Iterator<Item = Preference> {
    let only = [None, Some(Choice::Offload), Some(Choice::Keep)];
    // In a deep model each step is small, and one path is as good as another.
    let only = only.into_iter().take(if layers > DEEP { 1 } else { 3 });
    only.flat_map(|only| [false, true].map(|by_bytes| Preference { by_bytes, only }))
}

/// Another treatment for one layer.
#[derive(Debug)]
struct Change {
    gain: Gain,
    layer: usize,
    to: usize,
    outcome: Outcome,
}

#[derive(Debug, Clone, Copy)]
struct Gain {
    ns: u64,
    peak_bytes: u64,
    bytes: u64,
}

impl Gain {
    /// Which is better: time per byte of the peak, and where the peak does not rise, per byte at all.
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

impl Model<'_> {
    /// The points from least memory to most.
    fn path(&self, preference: Preference) -> Vec<PathPoint> {
        let mut pick = vec![0usize; self.treatments.len()];
        let mut path = vec![(pick.clone(), self.run(&pick))];
        self.walk(preference, &mut pick, &mut path);
        // What it does not prefer comes last.
        self.walk(Preference { only: None, ..preference }, &mut pick, &mut path);
        path
    }

    fn walk(&self, preference: Preference, pick: &mut [usize], path: &mut Vec<PathPoint>) {
        let mut now = self.run(pick);
        // Every change, best first as of its last evaluation; all are evaluated again now and then.
        let mut changes: Vec<Change> = Vec::new();
        for step in 0usize.. {
            if step % (1 + pick.len() / 8).max(pick.len().saturating_sub(DEEP)) == 0 || changes.is_empty() {
                changes = self.changes(pick, &now, preference);
                if changes.is_empty() {
                    break;
                }
            }
            let Some(taken) = self.best(&mut changes, pick, &now, preference) else { continue };
            pick[taken.layer] = taken.to;
            now = taken.outcome;
            path.push((pick.to_vec(), now.clone()));
        }
    }

    /// All changes of one layer that gain time, best first; among equals the last layer's, and of those the first.
    fn changes(&self, pick: &mut [usize], now: &Outcome, preference: Preference) -> Vec<Change> {
        let mut found = Vec::new();
        for layer in (0..pick.len()).rev() {
            for to in 0..self.treatments[layer].len() {
                found.extend(self.change(pick, now, layer, to, preference));
            }
        }
        found.sort_by(|a, b| b.gain.compare(&a.gain));
        found
    }

    fn change(
        &self,
        pick: &mut [usize],
        now: &Outcome,
        layer: usize,
        to: usize,
        preference: Preference,
    ) -> Option<Change> {
        let from = pick[layer];
        let (old, new) = (&self.treatments[layer][from], &self.treatments[layer][to]);
        // Only less recomputation or less waiting can gain time.
        let same_recompute = new.recompute_ns == old.recompute_ns;
        if to == from || new.recompute_ns > old.recompute_ns || (same_recompute && !old.tight) {
            return None;
        }
        if preference.only.is_some_and(|choice| !new.saves_only_by(choice)) {
            return None;
        }
        pick[layer] = to;
        let outcome = self.run(pick);
        pick[layer] = from;
        if outcome.pass_ns >= now.pass_ns {
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
            ns: now.pass_ns - outcome.pass_ns,
            peak_bytes: outcome.peak_bytes.saturating_sub(now.peak_bytes),
            bytes: if preference.by_bytes { bytes.saturating_sub(before).max(1) } else { 1 },
        };
        Some(Change { gain, layer, to, outcome })
    }

    /// The best change from here; a change that is worse than at its last evaluation moves back in the list.
    fn best(
        &self,
        changes: &mut Vec<Change>,
        pick: &mut [usize],
        now: &Outcome,
        preference: Preference,
    ) -> Option<Change> {
        while !changes.is_empty() {
            let first = changes.remove(0);
            let Some(fresh) = self.change(pick, now, first.layer, first.to, preference) else { continue };
            if changes.first().is_none_or(|next| fresh.gain.compare(&next.gain).is_ge()) {
                return Some(fresh);
            }
            let at = changes.partition_point(|other| other.gain.compare(&fresh.gain).is_ge());
            changes.insert(at, fresh);
        }
        None
    }
}
