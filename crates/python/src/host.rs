//! The host's threads, for Python: what may be asked of them here.

use forebay::device::HostOptions;
use pyo3::prelude::*;

use crate::guard;

/// Check a number of host threads and the name of a kernel against this machine; return the number of threads.
#[pyfunction]
#[pyo3(signature = (threads, kernel))]
pub(crate) fn check_host(py: Python<'_>, threads: Option<usize>, kernel: Option<String>) -> PyResult<usize> {
    guard::run(py, || Ok(HostOptions { threads, kernel }.check()?))
}
