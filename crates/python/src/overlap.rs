//! Overlapped steps of the engine's optimizer, as Python sees them; what they do is in `forebay::optimizer`.

use forebay::device::Place;
use forebay::optimizer::{Binding, OverlapUnit, StepFlags};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::guard;
use crate::inputs::{Resident, Tensors, scalar, table_input};
use crate::looked::{Looked, Row};
use crate::optimizer::Optimizer;
use crate::torch::{self, Keeper};

impl Drop for Optimizer {
    /// A committed step is completed before its memory goes. It may wait for a save, whose writer needs the GIL.
    fn drop(&mut self) {
        if !self.inner.overlap_is_quiet() {
            let _ = Python::try_attach(|py| py.detach(|| self.inner.overlap_finish()));
        }
    }
}

#[pymethods]
impl Optimizer {
    /// Change how many slots the next ring has, while there is none.
    fn set_slots(&self, py: Python<'_>, slots: usize) -> PyResult<()> {
        guard::run(py, || self.inner.set_slots(slots))
    }

    /// Open an overlapped step. `order` has a number for each tensor of each table: smaller is needed earlier by the next
    /// forward. A speculative one updates on the second copy of the state until its commit says whether it is clipped.
    #[pyo3(signature = (order, hypers, speculative=false))]
    fn overlap_begin(
        &self,
        py: Python<'_>,
        order: Vec<Vec<i64>>,
        hypers: Vec<Vec<f64>>,
        speculative: bool,
    ) -> PyResult<()> {
        guard::run(py, || {
            if speculative {
                self.inner.overlap_begin_speculative(&order, &hypers)
            } else {
                self.inner.overlap_begin(&order, &hypers)
            }
        })
    }

    /// Hand over a gradient that is final when what `stream` was given so far has ended. Never waits for the device.
    /// `resident` has the addresses of the tensor's columns if its state is on the device.
    #[pyo3(signature = (table, tensor, weight, grad, group, stream, resident=Vec::new()))]
    #[expect(clippy::too_many_arguments, reason = "numbers of one tensor")]
    fn overlap_offer(
        &self,
        py: Python<'_>,
        table: usize,
        tensor: usize,
        weight: PyRef<'_, Looked>,
        grad: PyRef<'_, Looked>,
        group: u32,
        stream: u64,
        resident: Vec<u64>,
    ) -> PyResult<()> {
        let (weight, grad) = (weight.rows().first().copied(), grad.rows().first().copied());
        guard::run(py, || {
            let (device, plan) = (self.inner.device(), self.inner.overlap_table(table)?);
            let (Some(weight), Some(grad), Some(spec)) = (weight, grad, plan.tensors().get(tensor)) else {
                return Err(forebay::Error::InvalidOption {
                    option: "tensor",
                    value: format!("{tensor} of table {table}"),
                    remedy: "offer one weight and one gradient of a tensor that was added".to_owned(),
                });
            };
            let (keeper, place): (Keeper, _) =
                (std::sync::Arc::new(()), if spec.on_host { Place::Pageable } else { Place::Device });
            let operand = |row: Row| {
                let region = torch::region(device, row.addr, row.elements * row.dtype.bytes(), place, &keeper)?;
                Ok::<_, forebay::Error>((region, row.dtype))
            };
            let columns = resident.iter().zip(&spec.columns).map(|(addr, column)| {
                torch::region(device, *addr, column.bytes(spec.elements), Place::Device, &keeper)
            });
            let columns = columns.collect::<forebay::Result<Vec<_>>>()?;
            let binding = Binding::new(operand(weight)?, operand(grad)?, group);
            self.inner.overlap_offer((table, tensor), binding, columns, torch::stream_of(device, stream)?.as_ref())
        })
    }

    /// Hand over all gradients that were not offered, as `step` takes them, and return at once.
    #[pyo3(signature = (tensors, stream, grad_scale=0, resident=None))]
    fn overlap_commit(
        &self,
        py: Python<'_>,
        tensors: Vec<Tensors>,
        stream: u64,
        grad_scale: u64,
        resident: Option<Resident>,
    ) -> PyResult<()> {
        guard::run(py, || {
            let (device, resident) = (self.inner.device(), resident.unwrap_or_default());
            let input = |(i, of): (usize, &Tensors)| table_input(device, &*self.inner.plan(i)?, of, resident.get(i));
            let inputs = tensors.iter().enumerate().map(input).collect::<forebay::Result<_>>()?;
            let flags = StepFlags { grad_scale: scalar(device, grad_scale)?, skip: None };
            self.inner.overlap_commit(inputs, torch::stream_of(device, stream)?.as_ref(), flags)
        })
    }

    /// Tensors (table and place) whose updates have ended since the last call: nothing reads their gradients any more. Never
    /// waits, and makes no stream wait.
    fn overlap_updated(&self, py: Python<'_>) -> PyResult<Vec<(usize, usize)>> {
        guard::run(py, || self.inner.overlap_updated())
    }

    /// Return when the updates of these tensors, or of all, were submitted; `stream` then waits for them. Whether one was
    /// still under way.
    fn overlap_wait(&self, py: Python<'_>, homes: Option<Vec<(usize, usize)>>, stream: u64) -> PyResult<bool> {
        if self.inner.overlap_is_quiet() {
            return Ok(false);
        }
        guard::run(py, || {
            self.inner.overlap_wait(homes.as_deref(), torch::stream_of(self.inner.device(), stream)?.as_ref())
        })
    }

    /// Block until everything that was committed was submitted.
    fn overlap_finish(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || self.inner.overlap_finish())
    }

    /// Give an open step up; an error if some of it was submitted, unless it is speculative: then all is as it was.
    fn overlap_abort(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || self.inner.overlap_abort())
    }

    /// The overlapped step under way, or the last one, in numbers.
    #[pyo3(signature = () -> "dict[str, int]")]
    fn overlap_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = guard::call(py, || self.inner.overlap_stats())?;
        let numbers = PyDict::new(py);
        for (name, number) in stats.named() {
            numbers.set_item(name, number)?;
        }
        Ok(numbers)
    }

    /// The units of the overlapped step under way, or of the last one: in the order in which they ran, then the others.
    #[pyo3(signature = () -> "list[dict[str, Any]]")]
    fn overlap_plan<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let plan = guard::call(py, || self.inner.overlap_plan())?;
        let row = |unit: OverlapUnit| -> PyResult<Bound<'py, PyDict>> {
            let row = PyDict::new(py);
            row.set_item("table", unit.table)?;
            row.set_item("chunk", unit.chunk)?;
            row.set_item("tensors", unit.tensors)?;
            row.set_item("bytes", unit.bytes)?;
            row.set_item("position", unit.position)?;
            row.set_item("submitted_ns", unit.submitted_ns)?;
            row.set_item("late", unit.late)?;
            Ok(row)
        };
        PyList::new(py, plan.into_iter().map(row).collect::<PyResult<Vec<_>>>()?)
    }
}
