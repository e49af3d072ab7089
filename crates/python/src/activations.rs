//! Activation offload as Python sees it: numbers in, numbers out.

use forebay::activations::{Compute, Key, Offload, OffloadOptions, Place, Route};
use forebay::device::{Backend, CpuDevice, CpuOptions, LinkOptions, SharedDevice, open_with_budget};
use forebay::plan::{ActivationPlan, PassCost};
use forebay::pool::Pool;
use forebay::{Error, Result};
use pyo3::prelude::*;

use crate::guard;
use crate::torch;

/// Stores, fetches and pinned memory for the saved tensors of one device.
#[pyclass(frozen)]
pub(crate) struct Activations {
    offload: Offload,
    /// On the CPU the computation runs on the calling thread.
    host: Option<Compute>,
}

/// Save, entry, where its range begins, whether it is new, whether it leaves, entries to let go of, why it stays.
type SavedNumbers = (u64, u64, u64, bool, bool, Vec<u64>, Option<String>);
/// Entry, its place, whether to hold it, entries to fetch with their bytes.
type OpenedNumbers = (u64, u8, bool, Vec<(u64, u64)>);

fn open_device(name: &str, pinned_budget_bytes: Option<u64>, link_bytes_per_s: Option<f64>) -> Result<SharedDevice> {
    let Some(rate) = link_bytes_per_s else { return Ok(open_with_budget(name, pinned_budget_bytes)?) };
    let link = LinkOptions { fetch_bytes_per_s: rate, store_bytes_per_s: rate, duplex: true };
    Ok(CpuDevice::open(CpuOptions { pinned_budget_bytes, link: Some(link), ..CpuOptions::default() })?)
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
    /// Open a device; nothing is pinned yet. No fraction stands for what hides under the computation. A link's rate
    /// makes the CPU backend as slow as that, for tests.
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
            let device = open_device(device, pinned_budget_bytes, link_bytes_per_s)?;
            let is_cpu = device.info().backend == Backend::Cpu;
            let options = OffloadOptions { fraction, max_in_flight_bytes, pinned_budget_bytes };
            let offload = Offload::new(Pool::new(device), options)?;
            let host = is_cpu.then(|| offload.own_compute()).transpose()?;
            Ok(Self { offload, host })
        })
    }

    /// Pin so many bytes ahead of use.
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

    /// Let go of what its route lets go of before a layer begins. Returns the entries.
    fn let_go_before(&self, py: Python<'_>, layer: u32) -> PyResult<Vec<u64>> {
        guard::run(py, || self.offload.let_go_before(layer))
    }

    /// A pass begins where there are no layers.
    fn begin_pass(&self) {
        self.offload.begin_pass();
    }

    /// A tensor was saved: a range of a storage at a version. Returns the numbers of the save and of its entry, where
    /// the entry's range begins, whether it is new and whether it leaves the device, the entries to let go of now, and
    /// why one that was to leave stays. A new entry that leaves has to be held until it is named. A route is what a plan
    /// says: whether it leaves, the layer before which it is let go, the layer in whose backward pass it is fetched.
    #[pyo3(signature = (storage, storage_bytes, addr, start_bytes, bytes, version, may_leave, counted, stream, route=None))]
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
        route: Option<(bool, u32, u32)>,
    ) -> PyResult<SavedNumbers> {
        guard::run(py, || {
            let key = Key { storage, storage_bytes, addr, start_bytes, bytes, version };
            let source = || torch::held(self.offload.device(), addr + start_bytes, bytes);
            let route = route.map(|(leaves, let_go_at, fetch_at)| Route { leaves, let_go_at, fetch_at });
            let outcome = self.offload.save_routed(key, (may_leave, counted), route, source, &self.compute(stream)?)?;
            let saved = outcome.saved;
            let reason = outcome.exhausted.map(|exhausted| {
                format!(
                    "no pinned memory for {} bytes: {} are pinned and {}",
                    exhausted.requested_bytes, exhausted.pinned_bytes, exhausted.reason
                )
            });
            Ok((saved.save, saved.entry, saved.start_bytes, saved.new, saved.offload, outcome.dropped, reason))
        })
    }

    /// A saved tensor is about to be used. Returns its entry; 0 if that is on the device, 1 if it is on its way or has
    /// arrived, 2 if it has to be fetched now; whether to hold it after this use; and the entries to fetch ahead, with
    /// their bytes, the entry itself first where it has to be fetched.
    fn open(&self, py: Python<'_>, save: u64, stream: u64) -> PyResult<OpenedNumbers> {
        guard::run(py, || {
            let opened = self.offload.open(save, &self.compute(stream)?)?;
            let (place, now) = match opened.place {
                Place::Kept | Place::Leaving => (0, None),
                Place::Arriving | Place::Here => (1, None),
                Place::Host => (2, Some(opened.entry)),
            };
            let wanted = now.into_iter().chain(opened.ahead);
            let wanted = wanted.map(|entry| (entry, self.offload.entry_bytes(entry))).collect();
            Ok((opened.entry, place, opened.hold, wanted))
        })
    }

    /// Fetch an entry into memory that is held until the entry is let go.
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

    /// Let go of an entry's fetched bytes, or give up fetching it ahead.
    fn let_go(&self, py: Python<'_>, entry: u64) -> PyResult<()> {
        guard::run(py, || self.offload.let_go(entry))
    }

    /// A saved tensor is gone. Returns its entry if that can be let go now.
    fn release(&self, py: Python<'_>, save: u64) -> PyResult<Option<u64>> {
        guard::run(py, || self.offload.release(save))
    }

    /// Sums since the beginning: stored_bytes, fetched_bytes, kept_bytes, pinned_bytes, pinned_peak_bytes, stalls,
    /// stall_ns, window_bytes; then fraction, store_gbps, fetch_gbps.
    fn stats(&self, py: Python<'_>) -> PyResult<(Vec<u64>, Vec<f64>)> {
        guard::run(py, || {
            let s = self.offload.stats()?;
            let counts = vec![
                s.stored_bytes,
                s.fetched_bytes,
                s.kept_bytes,
                s.pinned_bytes,
                s.pinned_peak_bytes,
                s.stalls,
                s.stall_ns,
                s.window_bytes,
            ];
            Ok((counts, vec![s.fraction, s.store_gbps, s.fetch_gbps]))
        })
    }

    /// For each layer its number, then stored_bytes, fetched_bytes, kept_bytes, stalls, stall_ns, forward_ns,
    /// backward_ns.
    fn table(&self, py: Python<'_>) -> PyResult<Vec<(u32, Vec<u64>)>> {
        guard::run(py, || {
            let rows = self.offload.table()?.into_iter().map(|(layer, s)| {
                let numbers = vec![
                    s.stored_bytes,
                    s.fetched_bytes,
                    s.kept_bytes,
                    s.stalls,
                    s.stall_ns,
                    s.forward_ns,
                    s.backward_ns,
                ];
                (layer, numbers)
            });
            Ok(rows.collect())
        })
    }
}

fn json<T: serde::de::DeserializeOwned>(what: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| Error::InvalidOption {
        option: what,
        value: text.chars().take(80).collect(),
        remedy: error.to_string(),
    })
}

/// Plan a pass: its costs and the plan as JSON. Costs were measured for so many tokens and are scaled to others. Without a
/// budget the plan is the one that takes least memory.
#[pyfunction]
pub(crate) fn plan_activations(
    py: Python<'_>,
    cost: &str,
    budget_bytes: Option<u64>,
    tokens: u64,
    measured_tokens: u64,
) -> PyResult<String> {
    guard::run(py, || {
        let cost = json::<PassCost>("cost", cost)?.scaled(tokens, measured_tokens);
        let plan = match budget_bytes {
            Some(budget) => ActivationPlan::new(&cost, budget)?,
            None => ActivationPlan::frugal(&cost),
        };
        serde_json::to_string(&plan).map_err(|error| Error::InvalidOption {
            option: "plan",
            value: String::new(),
            remedy: error.to_string(),
        })
    })
}

/// A plan in words.
#[pyfunction]
pub(crate) fn explain_activations(py: Python<'_>, plan: &str) -> PyResult<String> {
    guard::run(py, || Ok(json::<ActivationPlan>("plan", plan)?.to_string()))
}
