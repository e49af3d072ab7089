//! The engine through its own interface. One binary for all of it: each more would be linked with everything again.
//!
//! Traces and totals belong to a whole process. `cargo nextest` gives each test one; who runs the binary itself gives one
//! to each module, as `scripts/gpu_check.sh` does.

mod common;

#[path = "engine/activation_cost.rs"]
mod activation_cost;
#[path = "engine/activation_plan.rs"]
mod activation_plan;
#[path = "engine/activations.rs"]
mod activations;
#[path = "engine/checkpoint.rs"]
mod checkpoint;
#[path = "engine/faults.rs"]
mod faults;
#[path = "engine/formats.rs"]
mod formats;
#[path = "engine/host.rs"]
mod host;
#[path = "engine/optimizer.rs"]
mod optimizer;
#[path = "engine/overlap.rs"]
mod overlap;
#[path = "engine/overlap_faults.rs"]
mod overlap_faults;
#[path = "engine/pipeline.rs"]
mod pipeline;
#[path = "engine/plan.rs"]
mod plan;
#[path = "engine/second.rs"]
mod second;
#[path = "engine/shared_ring.rs"]
mod shared_ring;
#[path = "engine/sleep.rs"]
mod sleep;
#[path = "engine/snapshot.rs"]
mod snapshot;
#[path = "engine/speculative.rs"]
mod speculative;
#[path = "engine/step.rs"]
mod step;
#[path = "engine/totals.rs"]
mod totals;
#[path = "engine/trace.rs"]
mod trace;
