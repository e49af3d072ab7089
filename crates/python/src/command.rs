//! The `forebay` command, for the wheel's entry point. Only forwards.

use std::ffi::OsString;

use pyo3::prelude::*;

use crate::guard;

/// Run the command with arguments, the first of which is the program's name; return its exit code. What it prints goes
/// to the process's own output, past `sys.stdout`.
#[pyfunction]
pub(crate) fn command(py: Python<'_>, arguments: Vec<OsString>, built_by: &str) -> PyResult<u8> {
    guard::call(py, || forebay_cli::run(arguments, built_by))
}
