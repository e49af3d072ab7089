//! What the machine can do, for Python: the same measurements as the command's, as JSON text.

use forebay::device::{BackendStatus, HostMemory, backends as found, open, open_default};
use forebay::measure::{Model, ProbeOptions, Silent, StepBenchOptions};
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

/// Measure a device, by default the first GPU; JSON text.
#[pyfunction]
#[pyo3(signature = (device=None))]
pub(crate) fn probe(py: Python<'_>, device: Option<String>) -> PyResult<String> {
    guard::run(py, || {
        let device = device.map_or_else(|| open_default(None), |name| open(&name))?;
        let options = ProbeOptions::for_backend(device.info().backend);
        Ok(json(&forebay::measure::probe(&device, &options, &mut Silent)?))
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
        let device = device.map_or_else(|| open_default(None), |name| open(&name))?;
        forebay::measure::check_fit(&device, params, chunk_bytes, slots)?;
        let mut options = StepBenchOptions::new(Model::synthetic(params)?);
        (options.slots, options.slot_bytes, options.steps) = (slots, chunk_bytes, steps);
        Ok(json(&forebay::measure::bench_step(&device, &options, &mut Silent)?))
    })
}

fn json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
}
