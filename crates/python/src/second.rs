//! A second copy of an optimizer's pinned state, as Python sees it; what it does is in `forebay::optimizer`.

use pyo3::prelude::*;

use crate::guard;
use crate::optimizer::Optimizer;

#[pymethods]
impl Optimizer {
    /// Pin a second copy of all state, now and for tables that are added later. An error names the bytes of both copies.
    fn open_second(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || self.inner.open_second())
    }

    /// Wait for every store and free the copy that is not current.
    fn close_second(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || self.inner.close_second())
    }

    /// Whether there is a second copy.
    #[getter]
    fn has_second(&self, py: Python<'_>) -> PyResult<bool> {
        guard::call(py, || self.inner.has_second())
    }

    /// A number that grows whenever the memory that `view` gives has moved.
    #[getter]
    fn generation(&self, py: Python<'_>) -> PyResult<u64> {
        guard::call(py, || self.inner.generation())
    }

    /// Make the other copy of all state the current one, whatever it holds, for tests.
    fn _exchange_for_test(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || self.inner.exchange())
    }
}
