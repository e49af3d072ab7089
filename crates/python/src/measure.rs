//! Measurements for Python, as JSON text, and facts about the machine. Only forwards.

use forebay::device::{BackendStatus, HostMemory, HostOptions, backends as found, open};
use forebay_bench::{Link, PlacementsOptions, Silent, StepBenchOptions, open_device};
use pyo3::prelude::*;
use serde::Serialize;

use crate::guard;

/// Names of backends and why they cannot be used.
type Problems = Vec<(String, String)>;

/// The devices that can be opened, and for each backend that cannot be used here its name and the reason.
#[pyfunction]
pub(crate) fn backends(py: Python<'_>) -> PyResult<(Vec<String>, Problems)> {
    guard::run(py, || {
        let (mut devices, mut problems) = (Vec::new(), Vec::new());
        for BackendStatus { backend, devices: here, problem } in found() {
            devices.extend(here);
            problems.extend(problem.map(|problem| (format!("{backend:?}").to_lowercase(), problem.to_string())));
        }
        Ok((devices, problems))
    })
}

/// Bytes of host memory that this process may use in all, and that are available now.
#[pyfunction]
pub(crate) fn host_memory() -> (u64, u64) {
    let memory = HostMemory::now();
    (memory.total_bytes, memory.available_bytes)
}

/// Check the name of a kernel against this machine; return how many threads the host may have.
#[pyfunction]
#[pyo3(signature = (kernel))]
pub(crate) fn check_host(py: Python<'_>, kernel: Option<String>) -> PyResult<usize> {
    guard::run(py, || Ok(HostOptions { threads: None, kernel }.check()?))
}

/// Measure a device, by default the first GPU; JSON text.
#[pyfunction]
#[pyo3(signature = (device=None))]
pub(crate) fn probe(py: Python<'_>, device: Option<String>) -> PyResult<String> {
    guard::run(py, || {
        let device = open_device(device.as_deref(), None)?;
        Ok(json(&forebay_bench::probe(&device, &mut Silent)?))
    })
}

/// What a device must do and does not: each check with its problem, or nothing.
#[pyfunction]
pub(crate) fn check_contract(py: Python<'_>, device: &str) -> PyResult<Vec<(String, Option<String>)>> {
    guard::run(py, || {
        let checks = forebay_bench::check_contract(&open(device)?)?;
        Ok(checks.into_iter().map(|checked| (checked.what.to_owned(), checked.problem)).collect())
    })
}

/// Run the streamed step over synthetic parameters; JSON text.
#[pyfunction]
#[pyo3(signature = (device, params, slots, chunk_bytes, steps))]
pub(crate) fn bench_step(
    py: Python<'_>,
    device: Option<String>,
    params: u64,
    slots: usize,
    chunk_bytes: u64,
    steps: u64,
) -> PyResult<String> {
    guard::run(py, || {
        let device = open_device(device.as_deref(), None)?;
        let options = StepBenchOptions::synthetic(&device, params, chunk_bytes, slots)?;
        Ok(json(&forebay_bench::bench_step(&device, &StepBenchOptions { steps, ..options }, &mut Silent)?))
    })
}

/// Run the step at every placement over synthetic bf16 parameters, in turns, and at fixed shares of the host if given;
/// JSON text. On the CPU backend the link may be given a rate.
#[pyfunction]
#[pyo3(signature = (device, link_gbps, params, host_threads, host_kernel, slots, chunk_bytes, rounds, fractions=Vec::new()))]
#[expect(clippy::too_many_arguments, reason = "numbers cross the border, not objects")]
pub(crate) fn bench_placements(
    py: Python<'_>,
    device: String,
    link_gbps: Option<f64>,
    params: u64,
    host_threads: Option<usize>,
    host_kernel: Option<String>,
    slots: usize,
    chunk_bytes: u64,
    rounds: usize,
    fractions: Vec<f64>,
) -> PyResult<String> {
    guard::run(py, || {
        let device = open_device(Some(&device), link_gbps.map(|gbps| Link { gbps, is_shared: false }))?;
        let host = HostOptions { threads: host_threads, kernel: host_kernel };
        let options = PlacementsOptions { params, host, slots, slot_bytes: chunk_bytes, rounds, fractions };
        Ok(json(&forebay_bench::bench_placements(&device, &options)?))
    })
}

fn json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
}
