//! Sleep and wake as Python sees them: numbers of storages, their addresses and sizes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay::device::open;
use forebay::memory::Allocator;
use forebay::sleep::{Direction, Sleeper, Transfer};
use forebay::{Error, Result};
use pyo3::prelude::*;

use crate::accelerator::Unlocked;
use crate::guard;
use crate::torch::{self, HostView, Keeper};

/// The slabs of one device in which storages sleep, and the transfer under way.
#[pyclass(frozen)]
pub(crate) struct Slabs {
    // Dropped first: it waits for its work.
    transfer: Unlocked<Mutex<Option<Arc<Transfer>>>>,
    sleeper: Unlocked<Sleeper>,
}

impl Slabs {
    fn current(&self) -> MutexGuard<'_, Option<Arc<Transfer>>> {
        self.transfer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn transfer(&self) -> Result<Arc<Transfer>> {
        self.current().clone().ok_or_else(|| Error::InvalidOption {
            option: "transfer",
            value: "none".to_owned(),
            remedy: "begin one first".to_owned(),
        })
    }
}

#[pymethods]
impl Slabs {
    /// Open a device; nothing is pinned yet. If `readable` is set, storages in the slabs can be read on the host.
    #[new]
    #[pyo3(signature = (device, readable=false))]
    fn new(py: Python<'_>, device: &str, readable: bool) -> PyResult<Self> {
        guard::run(py, || {
            let allocator = Allocator::new(open(device)?);
            let sleeper = if readable { Sleeper::readable(allocator) } else { Sleeper::new(allocator) };
            Ok(Self { transfer: Unlocked::new(Mutex::default()), sleeper: Unlocked::new(sleeper) })
        })
    }

    /// The memory of storages' places, for slabs that are readable. Valid when their batch has arrived, until `free`.
    fn views(&self, py: Python<'_>, ids: Vec<u64>) -> PyResult<Vec<HostView>> {
        guard::run(py, || ids.into_iter().map(|id| Ok(HostView::new(self.sleeper.region(id)?))).collect())
    }

    /// Bytes of device memory that a transfer uses to pack small storages.
    #[staticmethod]
    fn staging_bytes() -> u64 {
        Sleeper::staging_bytes()
    }

    /// Whether each storage has a place of this size that is not in use.
    fn holds(&self, py: Python<'_>, ids: Vec<u64>, sizes: Vec<u64>) -> PyResult<bool> {
        guard::run(py, || Ok(self.sleeper.holds(&ids.into_iter().zip(sizes).collect::<Vec<_>>())))
    }

    /// Give each storage a place; pins what is missing.
    #[pyo3(signature = (ids, sizes, budget_bytes=None))]
    fn place(&self, py: Python<'_>, ids: Vec<u64>, sizes: Vec<u64>, budget_bytes: Option<u64>) -> PyResult<()> {
        guard::run(py, || self.sleeper.place(&ids.into_iter().zip(sizes).collect::<Vec<_>>(), budget_bytes))
    }

    /// Begin to move storages, behind the present work of `stream`. `staging` owns memory of `staging_bytes` at
    /// `staging_addr`; with address 0 nothing is packed.
    fn begin(
        &self,
        py: Python<'_>,
        to_sleep: bool,
        stream: u64,
        staging_addr: u64,
        staging: Py<PyAny>,
    ) -> PyResult<()> {
        guard::run(py, || {
            let device = self.sleeper.device();
            let after = torch::stream_of(device, stream)?;
            let memory = (staging_addr != 0)
                .then(|| torch::buffer(device, staging_addr, Sleeper::staging_bytes(), Arc::new(staging)))
                .transpose()?;
            let direction = if to_sleep { Direction::Sleep } else { Direction::Wake };
            let transfer = self.sleeper.begin(direction, after.as_ref(), memory.as_ref())?;
            *self.current() = Some(Arc::new(transfer));
            Ok(())
        })
    }

    /// Submit a batch: numbers, addresses and sizes of storages that `owner` holds. Returns the batch's number. In a sleep
    /// the places of these storages are in use from now on until `free`: nothing else is stored there.
    fn submit(
        &self,
        py: Python<'_>,
        ids: Vec<u64>,
        addrs: Vec<u64>,
        sizes: Vec<u64>,
        owner: Py<PyAny>,
        stream: u64,
    ) -> PyResult<usize> {
        guard::run(py, || {
            let transfer = self.transfer()?;
            let (device, keeper): (_, Keeper) = (self.sleeper.device(), Arc::new(owner));
            let wakes = transfer.direction() == Direction::Wake;
            let after = if wakes { torch::stream_of(device, stream)? } else { None };
            let batch = ids.into_iter().zip(addrs.into_iter().zip(sizes));
            let batch = batch.map(|(id, (addr, size))| Ok((id, torch::storage(device, addr, size, &keeper)?)));
            self.sleeper.submit(&transfer, batch.collect::<Result<Vec<_>>>()?, after.as_ref())
        })
    }

    /// Block until a batch has arrived.
    fn wait(&self, py: Python<'_>, batch: usize) -> PyResult<()> {
        guard::run(py, || self.transfer()?.wait(batch))
    }

    /// Whether a batch has arrived.
    fn has_arrived(&self, py: Python<'_>, batch: usize) -> PyResult<bool> {
        guard::run(py, || self.transfer()?.has_arrived(batch))
    }

    /// Block until nothing is in flight, also after a failure; then raise that failure.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || {
            let transfer = self.current().clone();
            let outcome = transfer.map_or(Ok(()), |transfer| transfer.finish());
            self.current().take();
            outcome
        })
    }

    /// The places of these storages are no longer in use: the storages are awake.
    fn free(&self, py: Python<'_>, ids: Vec<u64>) -> PyResult<()> {
        guard::run(py, || {
            self.sleeper.free(&ids);
            Ok(())
        })
    }

    /// Pinned bytes.
    fn pinned_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        guard::run(py, || Ok(self.sleeper.pinned_bytes()))
    }

    /// Allocations, slabs, streams and events made on the device so far; constant after the third sleep.
    fn resources_made(&self) -> u64 {
        self.sleeper.device().counters().total()
    }

    /// Unpin and free everything; refused while anything is asleep.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || self.sleeper.release())
    }
}
