//! Gradients that go to the host before the step, as Python sees them; what is done is in `forebay::optimizer`.

use pyo3::prelude::*;

use crate::guard;
use crate::inputs::on_device;
use crate::optimizer::Optimizer;
use crate::torch;

#[pymethods]
impl Optimizer {
    /// Pin memory for the gradients of a table's tensors, with the given bytes for each, if there is none yet.
    fn open_landing(&self, py: Python<'_>, table: usize, bytes: Vec<u64>) -> PyResult<()> {
        guard::run(py, || self.inner.open_landing(table, &bytes))
    }

    /// Copy a gradient to the host now. The caller keeps it until the next step or `finish_landing` has returned.
    fn land(&self, py: Python<'_>, table: usize, tensor: usize, addr: u64, bytes: u64, stream: u64) -> PyResult<()> {
        guard::run(py, || {
            let device = self.inner.device();
            let grad = on_device(device, addr, bytes)?;
            self.inner.land(table, tensor, &grad, torch::stream_of(device, stream)?.as_ref())
        })
    }

    /// Forget gradients that were copied early, all or one tensor's, once the copies have ended.
    fn finish_landing(&self, py: Python<'_>, only: Option<(usize, usize)>) -> PyResult<()> {
        guard::run(py, || self.inner.finish_landing(only))
    }
}
