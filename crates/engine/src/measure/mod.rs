//! What the machine can do, and how much of it the streamed step uses. Results are data; printing is for others.

mod cpu_adam;
mod exactness;
mod models;
mod placements;
mod probe;
mod step;
mod wire;

pub use cpu_adam::{CpuAdamBench, CpuAdamOptions, CpuAdamRow, bench_cpu_adam};
pub use exactness::Exactness;
pub use models::{Model, TensorShape};
pub use placements::{PlacementRow, Placements, PlacementsOptions, bench_placements};
pub use probe::{CopyRate, HostRates, KernelRate, Limits, PinRate, Probe, ProbeOptions, probe};
pub use step::{StepBench, StepBenchOptions, bench_step, check_fit};

use forebay_device::{Device, Event, Stream};

use crate::error::Result;

/// Told how far a long measurement is.
pub trait Progress {
    /// A part begins, with so many steps.
    fn begin(&mut self, what: &str, steps: u64);
    /// One step of it is done.
    fn advance(&mut self);
}

/// A listener for those who do not want to know.
#[derive(Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&mut self, _what: &str, _steps: u64) {}
    fn advance(&mut self) {}
}

/// Blocks until everything on a stream is done.
fn finish(device: &dyn Device, stream: &Stream) -> Result<()> {
    finish_with(device, stream, &device.event()?)
}

/// The same with an event that is there already.
fn finish_with(device: &dyn Device, stream: &Stream, end: &Event) -> Result<()> {
    device.record(end, stream)?;
    Ok(device.synchronize(end)?)
}

/// 10^9 per second.
fn giga_per_s(amount: u64, seconds: f64) -> f64 {
    amount as f64 / seconds / 1e9
}

/// The middle of some times; the lower one of two.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((sorted.len().max(1) - 1) / 2).copied().unwrap_or(f64::NAN)
}
