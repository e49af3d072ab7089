//! The plan for a pass's activations: what each layer keeps, offloads and recomputes, for the least time within a
//! budget of bytes.
//!
//! Everything here is pure: measured figures of one pass go in ([`PassCost`]), a frozen plan comes out
//! ([`ActivationPlan`]), and the same figures give the same plan. Read it downwards: `measured` turns what a pass showed
//! into costs (`cost`), `treatment` lists what can be done with one layer, `model` predicts time and memory of a pass
//! whose layers have each a treatment, `search` chooses, `explain` prints.
//!
//! # The model
//! Layers run forward from 0 to n-1 and backward from n-1 to 0. A layer either saves what autograd asks for, or is
//! recomputed in its backward pass, except for the results of a few operations that are expensive to compute per byte;
//! these are saved. What a layer saves is kept, or offloaded: then its device memory is freed at the end of a later layer
//! ([`LayerPlan::free_at`]) and it is fetched from the beginning of a later layer's backward pass on
//! ([`LayerPlan::fetch_at`]). Both points are chosen so that the link, first come first served, is done in time. With
//! `held` for what earlier layers have on the device at that moment, kept, leaving or arriving:
//!
//! | moment | bytes above the pass's beginning |
//! |---|---|
//! | forward pass of layer i | `forward_base + held + ` what the layer's forward pass takes, saving or not |
//! | loss | `tail + held` |
//! | backward pass of layer i | `backward_base + held + backward` (all that it saved is there, fetched or recomputed) |
//!
//! The time is the sum of all layers, of recomputation, of what lies outside of layers, and of the waits for the link.
//!
//! # The search
//! It starts with the least memory and takes, again and again, the change of one layer that gains most time for its
//! bytes. The path from there to keeping everything does not depend on the budget; the plan is the fastest point on it
//! that fits, of several such paths with different preferences. So a larger budget never gives a slower plan.

mod cost;
mod explain;
mod measured;
mod model;
mod search;
mod treatment;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use cost::{LayerCost, PassCost, TensorCost};
pub use measured::{CallKind, CallTimes, MeasuredCall, MeasuredPass, PassEvent, PassSample};

/// What happens to a tensor between its forward and its backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// It stays on the device.
    Keep,
    /// It is copied to the host, freed on the device and fetched later.
    Offload,
    /// It is dropped and computed again.
    Recompute,
}

/// The plan for one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerPlan {
    /// The whole of it in one to three words, for tables.
    pub word: String,
    /// Whether it is recomputed, except for the tensors below; if not, all that it saves is kept or offloaded.
    pub recompute: bool,
    /// Its inputs, if it is recomputed.
    pub input: Choice,
    /// The tensors of [`LayerCost::tensors`], if it is recomputed.
    pub tensors: Vec<Choice>,
    /// How many bytes of what it saves are offloaded, first saved first, if it is not recomputed.
    pub offload_bytes: u64,
    /// What is offloaded is freed on the device before this layer begins; the number of layers stands for the end of the
    /// last one.
    pub free_at: u32,
    /// What was offloaded is fetched from the beginning of this layer's backward pass on.
    pub fetch_at: u32,
    /// Bytes that stay on the device.
    pub kept_bytes: u64,
    /// Bytes that are offloaded.
    pub offloaded_bytes: u64,
    /// Its forward pass, waits for its stores included.
    pub forward_ns: u64,
    /// Its backward pass, recomputation and waits for its fetches included.
    pub backward_ns: u64,
    /// The part of both that is recomputation.
    pub recompute_ns: u64,
    /// The part of both that is waiting.
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
    /// The budget.
    pub budget_bytes: u64,
    /// The smallest budget that has a plan.
    pub least_bytes: u64,
    /// The predicted peak of the pass, above what is allocated as it begins.
    pub peak_bytes: u64,
    /// When that is.
    pub peak_at: Moment,
    /// The predicted time of the pass.
    pub pass_ns: u64,
    /// The plan of each layer.
    pub layers: Vec<LayerPlan>,
}

impl ActivationPlan {
    /// The same plan with predictions corrected by what earlier passes showed: their peak exceeded the predicted one by
    /// `excess_bytes`, and they took `pace` times the predicted time.
    pub fn corrected(&self, budget_bytes: u64, excess_bytes: i64, pace: f64) -> Self {
        Self {
            budget_bytes,
            peak_bytes: self.peak_bytes.saturating_add_signed(excess_bytes),
            pass_ns: (self.pass_ns as f64 * pace) as u64,
            ..self.clone()
        }
    }
}
