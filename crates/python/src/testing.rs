//! Hidden entry points with which tests/python checks the door itself: the GIL, panics and every error.
//!
//! They are functions of the module because this crate cannot have test binaries of its own (see its Cargo.toml).

use std::sync::mpsc;
use std::time::Duration;

use forebay::Error;
use forebay::device::Error as Device;
use pyo3::prelude::*;

use crate::{error, guard};

/// Panic inside the guard; it must arrive as an InternalError.
#[pyfunction]
pub(crate) fn _panic_for_test(py: Python<'_>, message: String) -> PyResult<()> {
    guard::run(py, || panic!("{message}"))
}

/// Whether another thread can take the GIL while the guard runs.
#[pyfunction]
pub(crate) fn _gil_is_released_for_test(py: Python<'_>) -> PyResult<bool> {
    guard::run(py, || {
        let (done, waiting) = mpsc::channel();
        std::thread::spawn(move || Python::attach(|_| done.send(())));
        // With the GIL held the other thread could never answer: the time limit keeps that from hanging.
        Ok(waiting.recv_timeout(Duration::from_secs(10)).is_ok())
    })
}

/// Bytes on a device that were allocated and pinned through it and not freed.
#[pyfunction]
pub(crate) fn _memory_for_test(py: Python<'_>, device: &str) -> PyResult<(u64, u64)> {
    guard::run(py, || {
        let memory = forebay::device::open(device)?.memory()?;
        Ok((memory.allocated_bytes, memory.pinned_bytes))
    })
}

/// Every error of the engine by the name of its variant, with the exception that it becomes.
///
/// Byte counts are 3 requested, 2 available, 5 in all; errno is 12.
#[pyfunction]
pub(crate) fn _errors_for_test(py: Python<'_>) -> Vec<(String, Py<PyAny>)> {
    let text = || "sample".to_owned();
    let devices = [
        Device::DeviceAbsent { device: text(), reason: text() },
        Device::DriverTooOld { found: 11_080, needed: 12_000 },
        Device::KernelsRefused { device: text(), log: text() },
        Device::OutOfDeviceMemory { device: text(), requested_bytes: 3, available_bytes: 2, capacity_bytes: 5 },
        Device::OutOfPinnedBudget { requested_bytes: 3, available_bytes: 2, budget_bytes: 5 },
        Device::SlabLargerThanMemory { requested_bytes: 3, available_bytes: 2, memory_bytes: 5 },
        Device::ZeroSize { what: "sample" },
        Device::OutOfRange { what: "sample", offset_bytes: 4, len_bytes: 3, size_bytes: 5 },
        Device::BadOperands { operation: "sample", reason: text() },
        Device::InvalidOption { option: "sample", value: text(), remedy: text() },
        Device::StreamFailed { stream: text(), reason: text() },
        Device::Unordered { detail: text() },
        Device::Driver { call: "sample", code: 2, name: text(), text: text() },
        Device::Os { call: "sample", bytes: 3, errno: 12, text: text() },
        Device::Forked { device: text() },
    ];
    let engine = [
        Error::InvalidOption { option: "sample", value: text(), remedy: text() },
        Error::PlanMismatch { tensor: text(), reason: text() },
        Error::Checkpoint { path: text(), reason: text() },
        Error::Distrusted { reason: text() },
        Error::File { action: "sample", path: text(), errno: Some(12), text: text() },
    ];
    let samples = devices.map(Error::from).into_iter().chain(engine);
    samples.map(|sample| (variant(&sample), error::to_py(py, &sample).into_value(py).into_any())).collect()
}

/// `PlanMismatch`, or `Device.Forked` for what came from the device.
fn variant(error: &Error) -> String {
    let debug = format!("{error:?}");
    debug.split(' ').next().unwrap_or_default().replace('(', ".")
}
