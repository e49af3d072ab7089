//! The totals of the process as Python sees them: counters by name. Reading them takes no lock.

use forebay::device::faulted_bytes;
use forebay::totals::{Use, Wait, count_fetched, count_stored, count_waits, forget_parent, totals as counted};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The counters of the process: `pinned_bytes`, `fetched_bytes` and `stored_bytes` by use, `waits` and `wait_ns` by
/// reason, and `ring_bytes` with one entry, `total`. Waits for nothing.
#[pyfunction]
#[pyo3(signature = () -> "dict[str, dict[str, int]]")]
pub(crate) fn totals(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let (found, all) = (counted(), PyDict::new(py));
    let put = |name: &str, keys: &[&str], values: &[u64]| -> PyResult<()> {
        let one = PyDict::new(py);
        keys.iter().zip(values).try_for_each(|(key, value)| one.set_item(key, value))?;
        all.set_item(name, one)
    };
    let (uses, waits) = (Use::ALL.map(Use::name), Wait::ALL.map(Wait::name));
    put("pinned_bytes", &uses, &found.pinned_bytes)?;
    put("fetched_bytes", &uses, &found.fetched_bytes)?;
    put("stored_bytes", &uses, &found.stored_bytes)?;
    put("waits", &waits, &found.waits)?;
    put("wait_ns", &waits, &found.wait_ns)?;
    put("ring_bytes", &["total"], &[found.ring_bytes])?;
    Ok(all)
}

/// Count bytes that Python copied for an optimizer: those that came from the host, and those that went there.
#[pyfunction]
pub(crate) fn count_copied(fetched_bytes: u64, stored_bytes: u64) {
    count_fetched(Use::Optimizer, fetched_bytes);
    count_stored(Use::Optimizer, stored_bytes);
}

/// Count one wait of a step for a save that reads its tensors in place.
#[pyfunction]
pub(crate) fn count_save_wait(seconds: f64) {
    count_waits(Wait::Save, 1, (seconds * 1e9) as u64);
}

/// Start the totals from zero, in a forked child.
#[pyfunction]
pub(crate) fn forget_parent_totals() {
    forget_parent();
}

/// Bytes of host memory that were faulted in so far, to be pinned; other threads may ask.
#[pyfunction]
pub(crate) fn bytes_faulted_in() -> u64 {
    faulted_bytes()
}
