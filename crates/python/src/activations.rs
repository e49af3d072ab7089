//! Activation offload as Python sees it: numbers in, frozen classes out.

use forebay::activations::{Compute, Key, Location, Offload, OffloadOptions};
use forebay::device::{Backend, CpuDevice, CpuOptions, LinkOptions, SharedDevice, open};
use forebay::memory::{Allocator, PinnedBudget};
use forebay::{Result, activations};
use pyo3::prelude::*;

use crate::accelerator::Unlocked;
use crate::guard;
use crate::torch;

/// Stores, fetches and pinned memory for the saved tensors of one device.
#[pyclass(frozen)]
pub(crate) struct Activations {
    offload: Unlocked<Offload>,
    /// On the CPU the computation runs on the calling thread.
    host: Option<Compute>,
}

/// Where a plan sends a saved tensor.
#[pyclass(frozen, from_py_object)]
#[derive(Clone, Copy)]
pub(crate) struct Route(activations::Route);

#[pymethods]
impl Route {
    /// Whether the tensor leaves; the layer before which it is freed; the layer from whose backward pass on it is fetched.
    #[new]
    #[pyo3(signature = (*, leaves, free_at, fetch_at))]
    fn new(leaves: bool, free_at: u32, fetch_at: u32) -> Self {
        Self(activations::Route { leaves, free_at, fetch_at })
    }
}

/// The answer to a save.
#[pyclass(frozen, get_all)]
pub(crate) struct Saved {
    /// The number of the save.
    save: u64,
    /// The entry that holds its bytes. Saves of the same bytes share one.
    entry: u64,
    /// Where the entry's range begins in its storage.
    start_bytes: u64,
    /// Whether the entry is new.
    is_new: bool,
    /// Whether the entry leaves the device.
    leaves: bool,
    /// Entries whose sources may be freed now.
    freed: Vec<u64>,
    /// Why an entry that was chosen to leave stays.
    reason: Option<String>,
}

/// The answer to the use of a saved tensor.
#[pyclass(frozen, get_all)]
pub(crate) struct Opened {
    /// The entry that holds its bytes.
    entry: u64,
    /// Whether its source is still on the device. If not, it is fetched.
    is_on_device: bool,
    /// Whether to hold its memory after this use.
    hold: bool,
    /// Entries to fetch, with their bytes; the entry itself is first if it has to be fetched now.
    fetches: Vec<(u64, u64)>,
}

/// Sums since the beginning.
#[pyclass(frozen, get_all)]
pub(crate) struct OffloadStats {
    stored_bytes: u64,
    fetched_bytes: u64,
    kept_bytes: u64,
    pinned_bytes: u64,
    pinned_peak_bytes: u64,
    stalls: u64,
    stall_ns: u64,
    window_bytes: u64,
    fraction: f64,
    store_gbps: f64,
    fetch_gbps: f64,
}

/// Sums of one layer since the beginning, and the times of its last pass that could be read.
#[pyclass(frozen, get_all)]
pub(crate) struct LayerStats {
    layer: u32,
    stored_bytes: u64,
    fetched_bytes: u64,
    kept_bytes: u64,
    stalls: u64,
    stall_ns: u64,
    forward_ns: u64,
    backward_ns: u64,
}

fn open_device(name: &str, link_bytes_per_s: Option<f64>) -> Result<SharedDevice> {
    let Some(rate) = link_bytes_per_s else { return Ok(open(name)?) };
    let link = LinkOptions { fetch_bytes_per_s: rate, store_bytes_per_s: rate, duplex: true };
    Ok(CpuDevice::open(CpuOptions { link: Some(link), ..CpuOptions::default() })?)
}

impl Activations {
    fn compute(&self, stream: u64) -> Result<Compute> {
        match &self.host {
            Some(host) => Ok(host.clone()),
            None => Ok(Compute::on_stream(torch::stream(self.offload.device(), stream)?)),
        }
    }
}

#[pymethods]
impl Activations {
    /// Open a device; nothing is pinned yet. Without a fraction the engine chooses one, so that copies hide under the
    /// computation. A link's rate makes the CPU backend as slow as that, for tests.
    #[new]
    #[pyo3(signature = (device, fraction, max_in_flight_bytes, pinned_budget_bytes, link_bytes_per_s=None))]
    fn new(
        py: Python<'_>,
        device: &str,
        fraction: Option<f64>,
        max_in_flight_bytes: Option<u64>,
        pinned_budget_bytes: Option<u64>,
        link_bytes_per_s: Option<f64>,
    ) -> PyResult<Self> {
        guard::run(py, || {
            let device = open_device(device, link_bytes_per_s)?;
            let is_cpu = device.info().backend == Backend::Cpu;
            let allocator = Allocator::within(device, PinnedBudget::new(pinned_budget_bytes));
            let offload = Offload::new(allocator, OffloadOptions { fraction, max_in_flight_bytes })?;
            let host = is_cpu.then(|| offload.own_compute()).transpose()?;
            Ok(Self { offload: Unlocked::new(offload), host })
        })
    }

    /// The number under which it reports to a trace.
    fn trace_owner(&self) -> u32 {
        self.offload.trace_owner()
    }

    /// Pin this many bytes ahead of use.
    fn reserve(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        guard::run(py, || self.offload.reserve(bytes))
    }

    /// A layer begins; a number below that of the layer before begins a new pass.
    fn enter(&self, py: Python<'_>, layer: u32, stream: u64) -> PyResult<()> {
        guard::run(py, || self.offload.enter(layer, &self.compute(stream)?))
    }

    /// The layer that began last has ended.
    fn leave(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        guard::run(py, || self.offload.leave(&self.compute(stream)?))
    }

    /// Returns the entries whose routes have them freed before a layer begins.
    fn free_before(&self, py: Python<'_>, layer: u32) -> PyResult<Vec<u64>> {
        guard::run(py, || self.offload.free_before(layer))
    }

    /// A pass begins where there are no layers.
    fn begin_pass(&self, py: Python<'_>) -> PyResult<()> {
        guard::call(py, || self.offload.begin_pass())
    }

    /// A tensor was saved: a range of a storage at a version. A new entry that leaves has to be held until it is named as
    /// freed. A save that is not counted only tells where its use is.
    #[pyo3(signature = (
        *, storage, storage_bytes, addr, start_bytes, bytes, version, may_leave, counted, stream, route=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "numbers cross the border faster than objects")]
    fn save(
        &self,
        py: Python<'_>,
        storage: u64,
        storage_bytes: u64,
        addr: u64,
        start_bytes: u64,
        bytes: u64,
        version: u64,
        may_leave: bool,
        counted: bool,
        stream: u64,
        route: Option<Route>,
    ) -> PyResult<Saved> {
        guard::run(py, || {
            let key = Key { storage, storage_bytes, addr, start_bytes, bytes, version };
            let source = || torch::held(self.offload.device(), addr + start_bytes, bytes);
            let route = route.map(|route| route.0);
            let outcome = self.offload.save(key, (may_leave, counted), route, source, &self.compute(stream)?)?;
            let reason = outcome.exhausted.map(|exhausted| {
                format!(
                    "no pinned memory for {} bytes: {} are pinned and {}",
                    exhausted.requested_bytes, exhausted.pinned_bytes, exhausted.reason
                )
            });
            let saved = outcome.saved;
            Ok(Saved {
                save: saved.save,
                entry: saved.entry,
                start_bytes: saved.start_bytes,
                is_new: saved.new,
                leaves: saved.offload,
                freed: outcome.dropped,
                reason,
            })
        })
    }

    /// A saved tensor is about to be used.
    fn open(&self, py: Python<'_>, save: u64, stream: u64) -> PyResult<Opened> {
        guard::run(py, || {
            let opened = self.offload.open(save, &self.compute(stream)?)?;
            let now = (opened.location == Location::Host).then_some(opened.entry);
            let fetches = now.into_iter().chain(opened.ahead);
            Ok(Opened {
                entry: opened.entry,
                is_on_device: matches!(opened.location, Location::Kept | Location::Leaving),
                hold: opened.hold,
                fetches: fetches.map(|entry| (entry, self.offload.entry_bytes(entry))).collect(),
            })
        })
    }

    /// Fetch an entry into memory that is held until the entry is freed.
    fn fetch(&self, py: Python<'_>, entry: u64, addr: u64, bytes: u64, urgent: bool, stream: u64) -> PyResult<()> {
        guard::run(py, || {
            let into = torch::held(self.offload.device(), addr, bytes)?;
            self.offload.fetch(entry, into, urgent, &self.compute(stream)?)
        })
    }

    /// What comes next on the stream waits for the entry's fetch.
    fn ready(&self, py: Python<'_>, entry: u64, stream: u64) -> PyResult<()> {
        guard::run(py, || self.offload.ready(entry, &self.compute(stream)?))
    }

    /// Give up an entry's fetched bytes, or its fetch ahead of use.
    fn free(&self, py: Python<'_>, entry: u64) -> PyResult<()> {
        guard::run(py, || self.offload.free_fetched(entry))
    }

    /// A saved tensor is gone. Returns its entry if that can be freed now.
    fn release(&self, py: Python<'_>, save: u64) -> PyResult<Option<u64>> {
        guard::run(py, || self.offload.release(save))
    }

    /// Sums since the beginning.
    fn stats(&self, py: Python<'_>) -> PyResult<OffloadStats> {
        guard::run(py, || {
            let stats = self.offload.stats()?;
            Ok(OffloadStats {
                stored_bytes: stats.stored_bytes,
                fetched_bytes: stats.fetched_bytes,
                kept_bytes: stats.kept_bytes,
                pinned_bytes: stats.pinned_bytes,
                pinned_peak_bytes: stats.pinned_peak_bytes,
                stalls: stats.stalls,
                stall_ns: stats.stall_ns,
                window_bytes: stats.window_bytes,
                fraction: stats.fraction,
                store_gbps: stats.store_gbps,
                fetch_gbps: stats.fetch_gbps,
            })
        })
    }

    /// Bytes pinned now. Waits for nothing.
    fn pinned_bytes(&self) -> u64 {
        self.offload.pinned_bytes()
    }

    /// The same for each layer.
    fn table(&self, py: Python<'_>) -> PyResult<Vec<LayerStats>> {
        guard::run(py, || {
            let rows = self.offload.table()?.into_iter().map(|(layer, stats)| LayerStats {
                layer,
                stored_bytes: stats.stored_bytes,
                fetched_bytes: stats.fetched_bytes,
                kept_bytes: stats.kept_bytes,
                stalls: stats.stalls,
                stall_ns: stats.stall_ns,
                forward_ns: stats.forward_ns,
                backward_ns: stats.backward_ns,
            });
            Ok(rows.collect())
        })
    }
}
