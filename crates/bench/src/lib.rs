//! Measurements of a machine, and of forebay on it: what `forebay probe`, `forebay bench` and Python's
//! `forebay.probe` and `forebay.bench_step` run.
//!
//! # Contract
//!
//! - Results are data. Every result is a struct with named units that can be serialised. Callers print it.
//! - Rates are decimal: GB/s are 10^9 bytes per second, Gparam/s are 10^9 parameters per second. Sizes are bytes.
//! - A time is a median, after at least one repetition that does not count.
//! - Things that are compared run in one process, in turns, so that both have the same machine.
//! - A benchmark of the step also checks the bits it computed and reports how many values differ.
//! - Long measurements report their progress to a [`Progress`].
//!
//! # Refusals
//!
//! - A model or a ring that cannot fit is refused with all numbers, before anything is measured or allocated.
//! - A number of steps or repetitions that would measure nothing is refused.
//! - A link is simulated on the CPU backend only.
//! - Nothing here prints, reads the command line or writes files.

mod contract;
mod cpu_adam;
mod devices;
mod exactness;
mod models;
mod placements;
mod probe;
mod step;
mod wire;

pub use contract::{Checked, check_contract};
pub use cpu_adam::{CpuAdamBench, CpuAdamOptions, CpuAdamRow, bench_cpu_adam};
pub use devices::{Link, open_device};
pub use exactness::{Exactness, Kept};
pub use models::{Model, TensorShape};
pub use placements::{PlacementRow, Placements, PlacementsOptions, bench_placements};
pub use probe::{CopyRate, HostRates, KernelRate, Limits, PinRate, Probe, probe};
pub use step::{StepBench, StepBenchOptions, bench_step};

use forebay::device::{Device, Event, Stream};
use forebay::error::Result;

/// Receives the progress of a long measurement.
pub trait Progress {
    /// A phase of the measurement begins, with this many steps.
    fn begin(&mut self, what: &str, steps: u64);
    /// One step of the phase is done.
    fn advance(&mut self);
}

/// Ignores progress.
#[derive(Debug)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&mut self, _what: &str, _steps: u64) {}
    fn advance(&mut self) {}
}

/// Blocks until everything on a stream is done.
fn finish(device: &dyn Device, stream: &Stream) -> Result<()> {
    finish_with(device, stream, &device.event()?)
}

/// The same with an existing event, for loops that must not create resources.
fn finish_with(device: &dyn Device, stream: &Stream, end: &Event) -> Result<()> {
    device.record(end, stream)?;
    Ok(device.synchronize(end)?)
}

/// 10^9 per second.
fn giga_per_s(amount: u64, seconds: f64) -> f64 {
    amount as f64 / seconds / 1e9
}

/// The median of some times; of an even number of times the lower of the two in the middle.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((sorted.len().max(1) - 1) / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_one_of_the_values() {
        assert_eq!(median(&[3.0]), 3.0);
        assert_eq!(median(&[3.0, 1.0]), 1.0);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn rates_are_decimal() {
        assert_eq!(giga_per_s(3_000_000_000, 2.0), 1.5);
    }
}
