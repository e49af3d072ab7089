//! Checkpoints as Python sees them: addresses and boxes in, JSON out.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use forebay::checkpoint::{self, Entry, Extent, Manifest, Request, SnapshotStats, WriteOptions, element_bytes};
use forebay::device::{Backend, Cores, Place, SharedDevice, Slab, SlabLayout, Stream, open};
use forebay::{Error, Result};
use pyo3::prelude::*;

use crate::guard;
use crate::optimizer::Engine;
use crate::torch::{self, HostView, Keeper};

/// Bytes moved so far, for whoever asks from another thread how far it is.
#[pyclass(frozen)]
#[derive(Default)]
pub(crate) struct Moved {
    bytes: AtomicU64,
    expected: AtomicU64,
}

#[pymethods]
impl Moved {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// The bytes.
    fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Say how many there will be.
    fn expect(&self, bytes: u64) {
        self.expected.store(bytes, Relaxed);
    }

    /// How many there will be, as far as anybody has said.
    fn expected(&self) -> u64 {
        self.expected.load(Relaxed)
    }
}

/// Name, length, checksums and entries of a written file; an entry is its number, where it begins and where it ends.
type File = (String, u64, Vec<u32>, Vec<(usize, u64, u64)>);

/// A save under way: the coordinator's part of it.
#[pyclass(frozen)]
pub(crate) struct Saving {
    inner: Mutex<Option<checkpoint::Saving>>,
    folder: String,
}

#[pymethods]
impl Saving {
    /// Begin a checkpoint in a new subfolder of a path.
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        guard::run(py, || {
            let saving = checkpoint::Saving::begin(&path)?;
            let folder = saving.folder().display().to_string();
            Ok(Self { inner: Mutex::new(Some(saving)), folder })
        })
    }

    /// The subfolder.
    fn folder(&self) -> &str {
        &self.folder
    }

    /// Complete it with a manifest, given as JSON; keep only the last few checkpoints of the path if asked to.
    fn commit(&self, py: Python<'_>, manifest: &str, keep_last: Option<usize>) -> PyResult<()> {
        guard::run(py, || {
            let Some(saving) = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take() else {
                return refuse(&self.folder, "it was completed or given up already".to_owned());
            };
            let manifest: Manifest = match serde_json::from_str(manifest) {
                Ok(manifest) => manifest,
                Err(error) => return refuse(&self.folder, format!("its manifest: {error}")),
            };
            saving.commit(&manifest, keep_last).map(drop)
        })
    }

    /// Give it up; what is written so far is removed by the next save.
    fn abandon(&self) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

fn refuse<T>(path: &str, reason: String) -> Result<T> {
    Err(Error::Checkpoint { path: path.to_owned(), reason })
}

/// What to write: a list for each property, all of one length. An address is on `device` where `on_device` says so.
#[derive(FromPyObject)]
pub(crate) struct Entries {
    #[pyo3(item)]
    name: Vec<String>,
    #[pyo3(item)]
    dtype: Vec<String>,
    #[pyo3(item)]
    shape: Vec<Vec<u64>>,
    #[pyo3(item)]
    address: Vec<u64>,
    #[pyo3(item)]
    on_device: Vec<bool>,
}

/// How to write beside other work: through which snapshot, how fast at most, and whether to give way.
#[derive(FromPyObject)]
pub(crate) struct Manner {
    #[pyo3(item)]
    snapshot: Option<Py<Snapshot>>,
    #[pyo3(item)]
    bytes_per_s: Option<f64>,
    #[pyo3(item)]
    gives_way: bool,
}

/// State of one moment, kept while optimizers go on.
#[pyclass(frozen)]
pub(crate) struct Snapshot {
    inner: Arc<checkpoint::Snapshot>,
}

#[pymethods]
impl Snapshot {
    /// Begin one of all state that these engines have in pinned memory; copies of it take so many bytes at most.
    #[new]
    fn new(py: Python<'_>, engines: Vec<Py<Engine>>, budget_bytes: u64) -> PyResult<Self> {
        let engines: Vec<&Engine> = engines.iter().map(Py::get).collect();
        guard::run(py, || Ok(Self { inner: Engine::snapshot(&engines, budget_bytes)? }))
    }

    /// Copy aside in the background what the next step will change.
    fn copy_ahead(&self, py: Python<'_>, threads: usize, bytes_per_s: Option<f64>) -> PyResult<()> {
        guard::run(py, || {
            for turn in 0..threads {
                let snapshot = self.inner.clone();
                // At full priority: a step may come to wait for the page that is being copied.
                let work = move || snapshot.copy_ahead(turn, threads, bytes_per_s);
                // Without the thread the step copies for itself.
                let _ = Cores::here().spawn("forebay-snapshot", work);
            }
            Ok(())
        })
    }

    /// Keep nothing any longer.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || {
            self.inner.finish();
            Ok(())
        })
    }

    /// Whether a step would neither copy nor wait.
    fn is_safe(&self) -> bool {
        self.inner.is_safe()
    }

    /// Bytes copied aside, bytes of memory taken for that, how often a step waited and how long in nanoseconds, and how
    /// often the writer gave way to a step.
    fn stats(&self) -> (u64, u64, u64, u64, u64) {
        let SnapshotStats { copied_bytes, block_bytes, stalls, stall_ns, pauses } = self.inner.stats();
        (copied_bytes, block_bytes, stalls, stall_ns, pauses)
    }
}

impl Drop for Snapshot {
    /// Whoever loses it must not leave a step waiting for it.
    fn drop(&mut self) {
        self.inner.finish();
    }
}

/// Bytes of memory that are kept for the copies of the next snapshot.
#[pyfunction]
pub(crate) fn kept_copy_bytes(py: Python<'_>) -> PyResult<u64> {
    guard::run(py, || Ok(checkpoint::spare_bytes()))
}

/// Give back the memory that is kept for the copies of the next snapshot; returns how many bytes that were.
#[pyfunction]
pub(crate) fn release_copies(py: Python<'_>) -> PyResult<u64> {
    guard::run(py, || Ok(checkpoint::release_spare()))
}

/// Copies of device memory in one pinned slab that is used again.
#[pyclass(frozen)]
pub(crate) struct HostCopies {
    device: SharedDevice,
    slab: Mutex<Option<Slab>>,
}

#[pymethods]
impl HostCopies {
    #[new]
    fn new(py: Python<'_>, device: &str) -> PyResult<Self> {
        guard::run(py, || Ok(Self { device: open(device)?, slab: Mutex::new(None) }))
    }

    /// Bytes of the slab.
    fn bytes(&self) -> u64 {
        self.slab.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, |slab| slab.layout().bytes())
    }

    /// Copy ranges of device memory to the host, behind what a stream has been given so far, and wait for them. The
    /// buffers of the call before must be out of use.
    fn fill(&self, py: Python<'_>, addresses: Vec<u64>, bytes: Vec<u64>, stream: u64) -> PyResult<Vec<HostView>> {
        guard::run(py, || {
            let mut kept = self.slab.lock().unwrap_or_else(PoisonError::into_inner);
            let layout = SlabLayout::new(&bytes)?;
            if kept.as_ref().is_none_or(|slab| slab.layout() != &layout) {
                // The old one first: both together may not fit.
                *kept = None;
                *kept = Some(self.device.pin(layout)?);
            }
            let Some(slab) = kept.as_ref() else { return Ok(Vec::new()) };
            // One stream fills the wire; on the CPU each is a thread, and torch has none: what was asked for is done.
            let on_cpu = self.device.info().backend == Backend::Cpu;
            let count =
                if on_cpu { std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4)) } else { 1 };
            let lanes: Vec<Stream> =
                (0..count).map(|_| self.device.stream("snapshot")).collect::<std::result::Result<_, _>>()?;
            let point = self.device.event()?;
            if !on_cpu {
                self.device.record(&point, &torch::stream(&self.device, stream)?)?;
                lanes.iter().try_for_each(|lane| self.device.wait(lane, &point))?;
            }
            let views = self.copy(slab, &addresses, &bytes, &lanes);
            // Also after a failure: torch may free the memory as soon as this returns.
            let wait = |lane: &Stream| -> Result<()> {
                self.device.record(&point, lane)?;
                Ok(self.device.synchronize(&point)?)
            };
            let mut waited = Ok(());
            for lane in &lanes {
                waited = waited.and(wait(lane));
            }
            views.and_then(|views| waited.map(|()| views))
        })
    }
}

impl HostCopies {
    fn copy(&self, slab: &Slab, addresses: &[u64], bytes: &[u64], lanes: &[Stream]) -> Result<Vec<HostView>> {
        let keeper: Keeper = Arc::new(());
        let mut views = Vec::with_capacity(bytes.len());
        for (index, (&address, &bytes)) in addresses.iter().zip(bytes).enumerate() {
            let part = slab.part(index)?;
            if bytes > 0 {
                let from = torch::region(&self.device, address, bytes, Place::Device, &keeper)?;
                self.device.copy(&lanes[index % lanes.len()], &from, &part)?;
            }
            views.push(HostView::new(part));
        }
        Ok(views)
    }
}

/// Bytes of a dense tensor.
fn bytes(dtype: &str, shape: &[u64]) -> u64 {
    shape.iter().fold(element_bytes(dtype).unwrap_or(0), |bytes, &side| bytes.saturating_mul(side))
}

/// Write entries into files of a folder, and sync them.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "numbers cross the border one by one")]
pub(crate) fn write_checkpoint(
    py: Python<'_>,
    folder: PathBuf,
    prefix: &str,
    entries: Entries,
    device: Option<&str>,
    stream: u64,
    threads: Option<usize>,
    moved: &Moved,
    manner: Manner,
) -> PyResult<Vec<File>> {
    let snapshot = manner.snapshot.map(|snapshot| snapshot.get().inner.clone());
    guard::run(py, || {
        let keeper: Keeper = Arc::new(());
        let device = device.map(open).transpose()?;
        let mut list = Vec::with_capacity(entries.name.len());
        let Entries { name, dtype, shape, address, on_device } = entries;
        for ((((name, dtype), shape), address), on_device) in
            name.into_iter().zip(dtype).zip(shape).zip(address).zip(on_device)
        {
            let bytes = bytes(&dtype, &shape);
            let data = match &device {
                _ if bytes == 0 => None,
                Some(device) if on_device => Some(torch::region(device, address, bytes, Place::Device, &keeper)?),
                _ => Some(torch::host_region(address, bytes, &keeper)?),
            };
            list.push(Entry { name, dtype, shape, data });
        }
        let mut options = WriteOptions { snapshot, bytes_per_s: manner.bytes_per_s, ..WriteOptions::default() };
        options.threads = threads.unwrap_or(options.threads);
        (options.gives_way, options.direct) = (manner.gives_way, manner.gives_way);
        if let Some(device) = device {
            let after = torch::stream(&device, stream)?;
            options.device = Some((device, after));
        }
        let files = checkpoint::write_files(&folder, prefix, &list, &options, &moved.bytes)?;
        Ok(files
            .into_iter()
            .map(|file| (file.record.name, file.record.bytes, file.record.blocks, file.entries))
            .collect())
    })
}

/// The folder of the checkpoint to load: a path itself if it is one, else its last complete subfolder.
#[pyfunction]
pub(crate) fn latest_checkpoint(py: Python<'_>, path: PathBuf) -> PyResult<PathBuf> {
    guard::run(py, || checkpoint::latest(&path))
}

/// A complete checkpoint, its structure checked.
#[pyclass(frozen)]
pub(crate) struct Checkpoint {
    inner: checkpoint::Checkpoint,
}

/// What to read: a list for each property, all of one length. `offset` and `length` say which box of which chunk,
/// `stride` (in elements) how the memory at `address` is laid out.
#[derive(FromPyObject)]
pub(crate) struct Requests {
    #[pyo3(item)]
    tensor: Vec<String>,
    #[pyo3(item)]
    chunk: Vec<usize>,
    #[pyo3(item)]
    offset: Vec<Vec<u64>>,
    #[pyo3(item)]
    length: Vec<Vec<u64>>,
    #[pyo3(item)]
    stride: Vec<Vec<u64>>,
    #[pyo3(item)]
    address: Vec<u64>,
}

#[pymethods]
impl Checkpoint {
    /// Open the last complete checkpoint of a path, or the one in that very folder.
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        guard::run(py, || Ok(Self { inner: checkpoint::Checkpoint::open(&path)? }))
    }

    /// Its folder.
    fn folder(&self) -> String {
        self.inner.folder().display().to_string()
    }

    /// Its manifest, as JSON.
    fn manifest(&self, py: Python<'_>) -> PyResult<String> {
        guard::run(py, || match serde_json::to_string(self.inner.manifest()) {
            Ok(text) => Ok(text),
            Err(error) => refuse(&self.folder(), error.to_string()),
        })
    }

    /// Read boxes of chunks into memory on the host.
    fn read(&self, py: Python<'_>, requests: Requests, threads: Option<usize>, moved: &Moved) -> PyResult<()> {
        guard::run(py, || {
            let keeper: Keeper = Arc::new(());
            let mut list = Vec::with_capacity(requests.tensor.len());
            let Requests { tensor, chunk, offset, length, stride, address } = requests;
            for (((((tensor, chunk), offsets), shape), strides), address) in
                tensor.into_iter().zip(chunk).zip(offset).zip(length).zip(stride).zip(address)
            {
                let Some(found) = self.inner.manifest().tensors.get(&tensor) else {
                    return refuse(&self.folder(), format!("no tensor {tensor:?}"));
                };
                if shape.contains(&0) {
                    continue;
                }
                let last = shape.iter().zip(&strides).map(|(&len, &stride)| (len - 1) * stride).sum::<u64>() + 1;
                let into = torch::host_region(address, last * element_bytes(&found.dtype).unwrap_or(1), &keeper)?;
                list.push(Request { tensor, chunk, part: Extent { offsets, shape }, into, strides });
            }
            let threads = threads.unwrap_or(WriteOptions::default().threads);
            self.inner.read(&list, threads, &moved.bytes)
        })
    }
}
