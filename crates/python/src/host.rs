//! The host's threads, for Python: what may be asked of them here.

use forebay::device::{CpuDevice, CpuOptions, HostOptions, LinkOptions, SharedDevice, open};
use forebay::measure::{PlacementsOptions, bench_placements as bench};
use pyo3::prelude::*;

use crate::guard;

/// Check the name of a kernel against this machine; return how many threads the host may have.
#[pyfunction]
#[pyo3(signature = (kernel))]
pub(crate) fn check_host(py: Python<'_>, kernel: Option<String>) -> PyResult<usize> {
    guard::run(py, || Ok(HostOptions { threads: None, kernel }.check()?))
}

/// Run the step at every placement over made-up bf16 parameters, in turns, and at fixed shares of the host where asked
/// for; JSON text. On the CPU backend the link may be given a rate.
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
        let device: SharedDevice = match link_gbps {
            None => open(&device)?,
            Some(gbps) => {
                let rate = gbps * 1e9;
                let link = LinkOptions { fetch_bytes_per_s: rate, store_bytes_per_s: rate, duplex: true };
                CpuDevice::open(CpuOptions { link: Some(link), ..CpuOptions::default() })?
            }
        };
        let host = HostOptions { threads: host_threads, kernel: host_kernel };
        let options = PlacementsOptions { params, host, slots, slot_bytes: chunk_bytes, rounds, fractions };
        let found = bench(&device, &options)?;
        Ok(serde_json::to_string(&found).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}")))
    })
}
