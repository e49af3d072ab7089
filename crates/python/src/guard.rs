//! The door between Python and the engine: every entry point that can block or fail goes through it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::prelude::*;

use crate::error;

/// Runs `work` without the GIL and raises what it returns or panics with.
///
/// A panic becomes `forebay.InternalError`. PyO3's own `PanicException` is no `Exception`, so it would pass through
/// a training script's `except Exception` and lose its checkpoint.
pub(crate) fn run<T, F>(py: Python<'_>, work: F) -> PyResult<T>
where
    F: FnOnce() -> forebay::Result<T> + Send,
    T: Send,
{
    // Unwind safety: what `work` shares with later calls stands behind locks, which a panic poisons.
    match py.detach(|| catch_unwind(AssertUnwindSafe(work))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(failure)) => Err(error::to_py(py, &failure)),
        Err(panic) => Err(error::internal(py, message(panic.as_ref()))),
    }
}

/// [`run`] for work that cannot fail. It may still wait: for a lock that a step holds, for example.
pub(crate) fn call<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    run(py, || Ok(work()))
}

/// The text of a panic: `panic!` carries a `&str` or a `String`, `panic_any` may carry anything.
fn message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message")
}
