//! The plan of an activation offload, layer by layer, beside what was measured under it.

use serde::{Deserialize, Serialize};

use super::trace::Part;

/// One plan, and the pass that followed it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PlannedPass {
    pub(crate) name: String,
    pub(crate) budget_bytes: u64,
    pub(crate) least_bytes: u64,
    pub(crate) predicted_pass_s: f64,
    pub(crate) pass_s: Option<f64>,
    pub(crate) predicted_peak_bytes: u64,
    pub(crate) peak_bytes: Option<u64>,
    pub(crate) layers: Vec<PlannedLayer>,
}

/// One layer of a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PlannedLayer {
    pub(crate) layer: usize,
    /// Its name in the model, where that is known.
    pub(crate) name: Option<String>,
    /// What is done with it, in a few words.
    pub(crate) choice: String,
    pub(crate) kept_bytes: u64,
    pub(crate) offloaded_bytes: u64,
    pub(crate) predicted_forward_s: f64,
    pub(crate) forward_s: Option<f64>,
    pub(crate) predicted_backward_s: f64,
    pub(crate) backward_s: Option<f64>,
    pub(crate) recompute_s: f64,
    pub(crate) stall_s: f64,
}

#[derive(Deserialize)]
struct Plan {
    budget_bytes: u64,
    #[serde(default)]
    least_bytes: u64,
    peak_bytes: u64,
    pass_ns: u64,
    layers: Vec<Layer>,
    #[serde(default)]
    measured: Measured,
}

#[derive(Deserialize)]
struct Layer {
    word: String,
    kept_bytes: u64,
    offloaded_bytes: u64,
    forward_ns: u64,
    backward_ns: u64,
    #[serde(default)]
    recompute_ns: u64,
    #[serde(default)]
    stall_ns: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Measured {
    pass_s: Option<f64>,
    peak_bytes: Option<u64>,
    layers: Vec<Times>,
}

#[derive(Default, Clone, Copy, Deserialize)]
#[serde(default)]
struct Times {
    forward_s: Option<f64>,
    backward_s: Option<f64>,
}

/// The plan in a trace; `None` without a budget, or where the trace has a plan of another form.
pub(crate) fn planned(part: &Part) -> Option<PlannedPass> {
    let plan = Plan::deserialize(part.plan.as_ref()?).ok()?;
    let seconds = |ns: u64| ns as f64 / 1e9;
    let layer = |(number, layer): (usize, &Layer)| {
        let times = plan.measured.layers.get(number).copied().unwrap_or_default();
        PlannedLayer {
            layer: number,
            // A layer that is called twice has two places in the plan and one name.
            name: part.layers.get(number).filter(|_| part.layers.len() == plan.layers.len()).cloned(),
            choice: layer.word.clone(),
            kept_bytes: layer.kept_bytes,
            offloaded_bytes: layer.offloaded_bytes,
            predicted_forward_s: seconds(layer.forward_ns),
            forward_s: times.forward_s,
            predicted_backward_s: seconds(layer.backward_ns),
            backward_s: times.backward_s,
            recompute_s: seconds(layer.recompute_ns),
            stall_s: seconds(layer.stall_ns),
        }
    };
    Some(PlannedPass {
        name: part.name.clone(),
        budget_bytes: plan.budget_bytes,
        least_bytes: plan.least_bytes,
        predicted_pass_s: seconds(plan.pass_ns),
        pass_s: plan.measured.pass_s,
        predicted_peak_bytes: plan.peak_bytes,
        peak_bytes: plan.measured.peak_bytes,
        layers: plan.layers.iter().enumerate().map(layer).collect(),
    })
}
