//! Rust errors as the exceptions of `forebay.errors`.
//!
//! The classes are Python's, so that they can have two bases, docstrings and a pickled form. Numbers travel as
//! attributes. [`to_py`] has no `_` arm: a new error does not compile until someone has chosen its exception.

use forebay::Error;
use forebay::device::Error as Device;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

/// The exception for `error`, not yet raised.
pub(crate) fn to_py(py: Python<'_>, error: &Error) -> PyErr {
    let text = error.to_string();
    match error {
        Error::Device(device) => device_to_py(py, device, &text),
        Error::InvalidOption { .. } | Error::PlanMismatch { .. } => plain(py, "OptionError", &text),
        Error::Checkpoint { .. } | Error::Distrusted { .. } => plain(py, "CheckpointError", &text),
        Error::File { errno, .. } => build(py, "StorageError", &text, |numbers| numbers.set_item("errno", errno)),
    }
}

fn device_to_py(py: Python<'_>, error: &Device, text: &str) -> PyErr {
    match *error {
        Device::DeviceAbsent { .. }
        | Device::DriverTooOld { .. }
        | Device::KernelsRefused { .. }
        | Device::StreamFailed { .. }
        | Device::Driver { .. }
        | Device::Forked { .. } => plain(py, "DeviceError", text),
        Device::OutOfDeviceMemory { requested_bytes, available_bytes, capacity_bytes: limit_bytes, .. }
        | Device::OutOfPinnedBudget { requested_bytes, available_bytes, budget_bytes: limit_bytes }
        | Device::SlabLargerThanMemory { requested_bytes, available_bytes, memory_bytes: limit_bytes } => {
            build(py, "OutOfMemoryError", text, |numbers| {
                numbers.set_item("requested_bytes", requested_bytes)?;
                numbers.set_item("available_bytes", available_bytes)?;
                numbers.set_item("limit_bytes", limit_bytes)
            })
        }
        Device::ZeroSize { .. }
        | Device::OutOfRange { .. }
        | Device::BadOperands { .. }
        | Device::InvalidOption { .. } => plain(py, "OptionError", text),
        Device::Os { errno, .. } => build(py, "StorageError", text, |numbers| numbers.set_item("errno", errno)),
        // Ordering is the engine's own business; no argument can cause this.
        Device::Unordered { .. } => internal(py, text),
    }
}

/// A defect in forebay itself.
pub(crate) fn internal(py: Python<'_>, text: &str) -> PyErr {
    plain(py, "InternalError", text)
}

fn plain(py: Python<'_>, class: &str, text: &str) -> PyErr {
    build(py, class, text, |_| Ok(()))
}

/// Calls `forebay.errors.<class>(text, **keywords)`. Should that itself fail, its failure is what gets raised.
fn build(py: Python<'_>, class: &str, text: &str, keywords: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<()>) -> PyErr {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let build = || {
        let errors = ERRORS.get_or_try_init(py, || py.import("forebay.errors").map(Bound::unbind))?;
        let arguments = PyDict::new(py);
        keywords(&arguments)?;
        errors.bind(py).getattr(class)?.call((text,), Some(&arguments))
    };
    build().map_or_else(|failure| failure, PyErr::from_value)
}
