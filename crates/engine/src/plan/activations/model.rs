//! The model of a pass: its time and its peak if each layer has some treatment.

use std::collections::VecDeque;

use super::treatment::{Treatment, treatments};
use super::{ActivationPlan, Choice, LayerPlan, Moment, PassCost};

/// The link is assumed to be slower than measured, by one part in this many.
const LINK_MARGIN: u64 = 8;

/// What the model predicts for a choice of treatments.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    pub(super) peak_bytes: u64,
    pub(super) peak_at: Moment,
    /// Gradients that the pass has made at the peak.
    pub(super) gradient_bytes: u64,
    pub(super) pass_ns: u64,
    free_at: Vec<usize>,
    fetch_at: Vec<usize>,
    stall_ns: Vec<[u64; 2]>,
}

impl Outcome {
    fn note(&mut self, bytes: u64, at: Moment, gradient_bytes: u64) {
        if bytes > self.peak_bytes {
            (self.peak_bytes, self.peak_at, self.gradient_bytes) = (bytes, at, gradient_bytes);
        }
    }
}

pub(super) struct Model<'a> {
    pub(super) cost: &'a PassCost,
    pub(super) treatments: Vec<Vec<Treatment>>,
}

fn transfer_ns(bytes: u64, gbps: f64) -> u64 {
    if bytes == 0 {
        return 0;
    }
    // Bytes per nanosecond; a link that was never measured counts as slow.
    (bytes as f64 / if gbps > 0.0 { gbps } else { 1.0 }).ceil() as u64
}

impl<'a> Model<'a> {
    pub(super) fn new(cost: &'a PassCost) -> Self {
        Self { cost, treatments: cost.layers.iter().map(treatments).collect() }
    }

    fn treatment(&self, pick: &[usize], layer: usize) -> &Treatment {
        &self.treatments[layer][pick[layer]]
    }

    /// Bytes that go to the host.
    pub(super) fn moved(&self, pick: &[usize]) -> u64 {
        (0..pick.len()).map(|i| self.treatment(pick, i).offloaded_bytes).sum()
    }

    /// Runs a pass in which layer `i` has treatment number `pick[i]`.
    pub(super) fn run(&self, pick: &[usize]) -> Outcome {
        let n = pick.len();
        let mut outcome = Outcome {
            peak_bytes: 0,
            peak_at: Moment::Tail,
            gradient_bytes: 0,
            pass_ns: 0,
            free_at: vec![n; n],
            fetch_at: vec![0; n],
            stall_ns: vec![[0, 0]; n],
        };
        let forward_ns = self.forward(pick, &mut outcome);
        self.schedule_fetches(pick, &mut outcome);
        let backward_ns = self.backward(pick, &mut outcome);
        outcome.pass_ns = forward_ns + self.cost.outside_ns + backward_ns;
        outcome
    }

    fn forward(&self, pick: &[usize], outcome: &mut Outcome) -> u64 {
        let n = pick.len();
        let (mut now, mut link) = (0u64, 0u64);
        // Stores in flight: layer, bytes, when done.
        let mut stores: VecDeque<(usize, u64, u64)> = VecDeque::new();
        let (mut kept, mut leaving) = (0u64, 0u64);
        for i in 0..n {
            let (layer, treatment) = (&self.cost.layers[i], self.treatment(pick, i));
            outcome.note(layer.forward_base_bytes + kept + leaving + treatment.forward_bytes, Moment::Forward(i), 0);
            let begin = now;
            now += layer.forward_ns;
            if treatment.offloaded_bytes > 0 {
                let took = transfer_ns(treatment.offloaded_bytes, self.cost.store_gbps);
                link = link.max(begin) + took;
                if treatment.offloaded_bytes > layer.input_bytes || !treatment.recompute {
                    // The last of it is saved at the layer's end.
                    link = link.max(now);
                }
                stores.push_back((i, treatment.offloaded_bytes, link + took / LINK_MARGIN));
                leaving += treatment.offloaded_bytes;
            }
            kept += treatment.kept_bytes;
            // At the end of the layer: what is stored is freed, and what must be freed here is waited for.
            while let Some(&(from, bytes, done)) = stores.front() {
                let must = i + 1 == n || self.treatment(pick, from).tight;
                if done > now && !must {
                    break;
                }
                outcome.stall_ns[from][0] = done.saturating_sub(now);
                now = now.max(done);
                outcome.free_at[from] = i + 1;
                leaving -= bytes;
                stores.pop_front();
            }
        }
        outcome.note(self.cost.tail_bytes + kept, Moment::Tail, self.cost.tail_gradient_bytes);
        now
    }

    fn backward_ns(&self, pick: &[usize], layer: usize) -> u64 {
        self.cost.layers[layer].backward_ns + self.treatment(pick, layer).recompute_ns
    }

    /// Finds in which layer's backward pass each layer's fetch begins: as late as it is still done in time. Fetches are
    /// submitted in the order of use, so an early one takes with it all that are used before.
    fn schedule_fetches(&self, pick: &[usize], outcome: &mut Outcome) {
        let n = pick.len();
        // When each layer begins if there are no waits.
        let mut begins = vec![0i128; n];
        for j in (0..n.saturating_sub(1)).rev() {
            begins[j] = begins[j + 1] + i128::from(self.backward_ns(pick, j + 1));
        }
        // From the last fetch to the first: the latest beginning of each.
        let (mut free, mut first, mut at) = (i128::MAX, 0, 0);
        for j in 0..n {
            let treatment = self.treatment(pick, j);
            if treatment.offloaded_bytes == 0 {
                first = first.max(j);
                outcome.fetch_at[j] = first;
                continue;
            }
            let took = transfer_ns(treatment.offloaded_bytes, self.cost.fetch_gbps);
            free = begins[j].min(free) - i128::from(took + took / LINK_MARGIN);
            while at + 1 < n && begins[at] > free {
                at += 1;
            }
            let wanted = match (treatment.tight, treatment.recompute) {
                (true, true) => (j + 1).min(n - 1),
                (true, false) => j,
                (false, _) => at.max(j),
            };
            first = first.max(wanted);
            outcome.fetch_at[j] = first;
        }
    }

    fn backward(&self, pick: &[usize], outcome: &mut Outcome) -> u64 {
        let n = pick.len();
        let mut kept: u64 = (0..n).map(|j| self.treatment(pick, j).kept_bytes).sum();
        let (mut now, mut link, mut arrived) = (0u64, 0u64, 0u64);
        let mut done = vec![0u64; n];
        let mut next = n;
        for j in (0..n).rev() {
            while next > 0 && outcome.fetch_at[next - 1] >= j {
                next -= 1;
                let bytes = self.treatment(pick, next).offloaded_bytes;
                if bytes > 0 {
                    link = link.max(now) + transfer_ns(bytes, self.cost.fetch_gbps);
                    done[next] = link;
                    arrived += bytes;
                }
            }
            let treatment = self.treatment(pick, j);
            kept -= treatment.kept_bytes;
            arrived -= treatment.offloaded_bytes;
            let layer = &self.cost.layers[j];
            let needs = layer.backward_base_bytes + kept + arrived + treatment.backward_bytes;
            // With more than was measured, the peak is as the backward pass begins.
            let measured = treatment.backward_bytes <= layer.backward_bytes;
            let gradient_bytes = if measured { layer.gradient_bytes } else { layer.base_gradient_bytes };
            outcome.note(needs, Moment::Backward(j), gradient_bytes);
            if treatment.offloaded_bytes > 0 {
                outcome.stall_ns[j][1] = done[j].saturating_sub(now);
                now = now.max(done[j]);
            }
            now += self.backward_ns(pick, j);
        }
        now
    }

    /// The plan that a choice of treatments amounts to.
    pub(super) fn plan(
        &self,
        pick: &[usize],
        outcome: &Outcome,
        budget_bytes: u64,
        least_bytes: u64,
    ) -> ActivationPlan {
        let layers = (0..pick.len()).map(|i| {
            let (treatment, cost, stalls) = (self.treatment(pick, i), &self.cost.layers[i], outcome.stall_ns[i]);
            LayerPlan {
                word: treatment.word().to_owned(),
                recompute: treatment.recompute,
                input: if treatment.recompute { treatment.input } else { Choice::Keep },
                tensors: treatment.tensors.clone(),
                offload_bytes: if treatment.recompute { 0 } else { treatment.offloaded_bytes },
                free_at: outcome.free_at[i] as u32,
                fetch_at: outcome.fetch_at[i] as u32,
                kept_bytes: treatment.kept_bytes,
                offloaded_bytes: treatment.offloaded_bytes,
                forward_ns: cost.forward_ns + stalls[0],
                backward_ns: cost.backward_ns + treatment.recompute_ns + stalls[1],
                recompute_ns: treatment.recompute_ns,
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
