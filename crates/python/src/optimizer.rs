//! The engine's optimizer as Python sees it: numbers in, numbers out. What it does is in `forebay::optimizer`.

use std::sync::Arc;

use forebay::device::{Rule, open};
use forebay::optimizer::StepFlags;
use forebay::{Result, optimizer};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::accelerator::Unlocked;
use crate::guard;
use crate::inputs::{NewTensor, Options, Resident, Tensors, dict, formats, host_regions, scalar, specs, table_input};
use crate::torch::{self, HostView};

/// An optimizer: its state and its step.
#[pyclass(frozen)]
pub(crate) struct Optimizer {
    pub(crate) inner: Unlocked<optimizer::Optimizer>,
}

#[pymethods]
impl Optimizer {
    /// Open a device for a rule; nothing is pinned or allocated yet. `options` are those of `forebay.optim.options`.
    #[new]
    fn new(py: Python<'_>, device: &str, rule: &str, options: Options) -> PyResult<Self> {
        guard::run(py, || {
            let (device, rule) = (open(device)?, Rule::named(rule)?);
            Ok(Self { inner: Unlocked::new(optimizer::Optimizer::new(device, rule, options.parsed()?)?) })
        })
    }

    /// The number under which it reports to a trace.
    fn trace_owner(&self) -> u32 {
        self.inner.trace_owner()
    }

    /// Bytes of the ring to allocate for `open_ring`; 0 where nothing streams.
    fn ring_bytes(&self) -> u64 {
        self.inner.ring_bytes()
    }

    /// Use the ring that other optimizers have with the same slots on this device; whether there is one.
    fn join_ring(&self, py: Python<'_>) -> PyResult<bool> {
        guard::run(py, || self.inner.join_ring())
    }

    /// Make the ring in memory that `owner` keeps alive, or on the device itself where the address is 0.
    fn open_ring(&self, py: Python<'_>, addr: u64, owner: Py<PyAny>, stream: u64) -> PyResult<()> {
        guard::run(py, || {
            if addr == 0 {
                return self.inner.open_ring(None);
            }
            let ring = torch::buffer(self.inner.device(), addr, self.ring_bytes(), Arc::new(owner))?;
            let after = torch::stream_of(self.inner.device(), stream)?;
            self.inner.open_ring(Some((&ring, after.as_ref())))
        })
    }

    /// Wait for every store and free the ring, unless others use it. State stays, and `open_ring` makes steps possible.
    fn close_ring(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || self.inner.close_ring())
    }

    /// Whether the ring is there.
    #[getter]
    fn has_ring(&self, py: Python<'_>) -> PyResult<bool> {
        guard::call(py, || self.inner.has_ring())
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self, py: Python<'_>) -> PyResult<bool> {
        guard::call(py, || self.inner.is_closed())
    }

    /// Why the state cannot be trusted, if it cannot.
    #[getter]
    fn distrusted(&self, py: Python<'_>) -> PyResult<Option<String>> {
        guard::call(py, || self.inner.distrusted())
    }

    /// Refuse steps until `trust`: something wrong was written into the state.
    fn distrust(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        guard::call(py, || self.inner.distrust(reason))
    }

    /// Allow steps again.
    fn trust(&self, py: Python<'_>) -> PyResult<()> {
        guard::call(py, || self.inner.trust())
    }

    /// Create zeroed state for a list of tensors and return the number of their table. A tensor is its name, elements,
    /// the number of its group in `hypers`, the format of its master ("f32", "compact" or ""), whether it lies on the
    /// host, and its place among the parameters. `state_formats` are those of the rule's columns; none for f32.
    /// State of a resident table is the caller's, on the device, whatever the placement of other tables is.
    #[pyo3(signature = (tensors, hypers, resident=false, state_formats=Vec::new()))]
    fn add(
        &self,
        py: Python<'_>,
        tensors: Vec<NewTensor>,
        hypers: Vec<Vec<f64>>,
        resident: bool,
        state_formats: Vec<String>,
    ) -> PyResult<usize> {
        guard::run(py, || {
            self.inner.add_at(specs(self.inner.rule(), tensors, &hypers, formats(&state_formats)?)?, resident)
        })
    }

    /// A tensor's column in pinned memory, or its step counter, as a buffer. A column that is not there gives nothing.
    fn view(&self, py: Python<'_>, table: usize, tensor: usize, column: &str) -> PyResult<Option<HostView>> {
        guard::run(py, || match column {
            "step" => self.inner.step_counter(table, tensor).map(|counter| Some(HostView::new(counter))),
            _ => Ok(self.inner.column(table, tensor, column)?.map(HostView::new)),
        })
    }

    /// Update the tensors of every table.
    #[pyo3(signature = (tensors, hypers, stream, grad_scale, resident=None))]
    fn step(
        &self,
        py: Python<'_>,
        tensors: Vec<Tensors>,
        hypers: Vec<Vec<f64>>,
        stream: u64,
        grad_scale: u64,
        resident: Option<Resident>,
    ) -> PyResult<()> {
        guard::run(py, || {
            let (device, resident) = (self.inner.device(), resident.unwrap_or_default());
            let input = |(i, of): (usize, &Tensors)| table_input(device, &*self.inner.plan(i)?, of, resident.get(i));
            let inputs = tensors.iter().enumerate().map(input).collect::<Result<_>>()?;
            let flags = StepFlags { grad_scale: scalar(device, grad_scale)?, skip: None };
            self.inner.step(inputs, &hypers, torch::stream_of(device, stream)?.as_ref(), flags)
        })
    }

    /// Block until a tensor's stores have ended; others go on.
    fn settle(&self, py: Python<'_>, table: usize, tensor: usize) -> PyResult<()> {
        guard::run(py, || self.inner.settle(table, tensor))
    }

    /// Block until every store has ended.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || self.inner.synchronize())
    }

    /// Return when the host may write into the state, as far as a save is concerned.
    fn protect_all(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || self.inner.protect_all())
    }

    /// The last step in numbers, once its stores have ended.
    #[pyo3(signature = () -> "dict[str, float]")]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        dict(py, guard::run(py, || Ok(self.inner.stats()?.named()))?)
    }

    /// The vector unit that the host's threads use.
    fn host_kernel(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        guard::call(py, || self.inner.host_kernel())
    }

    /// Read and write every byte of the state, and of other memory on the host (address and bytes of each, whole words),
    /// with the host's threads, changing none; returns bytes and seconds. This is the pace that the memory allows.
    fn touch_state(&self, py: Python<'_>, others: Vec<(u64, u64)>) -> PyResult<(u64, f64)> {
        guard::run(py, || {
            let (others, start) = (host_regions(others)?, std::time::Instant::now());
            Ok((self.inner.touch(others)?, start.elapsed().as_secs_f64()))
        })
    }

    /// Make the next update on the host's threads fail, for tests.
    fn _fail_on_host_for_test(&self, py: Python<'_>) -> PyResult<()> {
        guard::call(py, || self.inner.fail_next_host_update())
    }

    /// Bytes that are pinned for it. Waits for nothing.
    fn pinned_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        guard::call(py, || self.inner.pinned_bytes())
    }

    /// Allocations, slabs, streams and events made on the device so far; constant from the second step on.
    fn resources_made(&self) -> u64 {
        self.inner.device().counters().total()
    }

    /// Free state, and the ring unless others use it. Buffers that are still held keep their memory.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || self.inner.close())
    }
}
