//! Checkpoints as Python sees them: addresses and boxes in, JSON out.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use forebay::checkpoint::{self, Encoding, FileEntry, Request, TensorBox, WriteOptions, dense_bytes};
use forebay::device::{Place, Region, SharedDevice, open};
use forebay::snapshot::{self, SnapshotStats};
use forebay::{Error, Result, optimizer};
use pyo3::prelude::*;

use crate::accelerator::Unlocked;
use crate::guard;
use crate::optimizer::Optimizer;
use crate::torch::{self, HostView, Keeper};

/// Bytes moved so far; other threads may ask for them.
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

    /// The bytes moved so far.
    fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Set how many bytes there will be.
    fn expect(&self, bytes: u64) {
        self.expected.store(bytes, Relaxed);
    }

    /// How many bytes there will be; 0 until `expect` is called.
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

impl Saving {
    fn take(&self) -> Option<checkpoint::Saving> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
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

    /// Complete it with a manifest, given as JSON. With `keep_last`, remove older checkpoints of the path.
    fn commit(&self, py: Python<'_>, manifest: &str, keep_last: Option<usize>) -> PyResult<()> {
        guard::run(py, || {
            let Some(saving) = self.take() else {
                let reason = "it was completed or given up already".to_owned();
                return Err(Error::Checkpoint { path: self.folder.clone(), reason });
            };
            saving.commit_json(manifest, keep_last).map(drop)
        })
    }

    /// Give it up; the next save removes what has been written.
    fn abandon(&self) {
        self.take();
    }

    /// Give it up and remove what has been written. No rank may be writing any more.
    fn discard(&self, py: Python<'_>) -> PyResult<()> {
        guard::run(py, || {
            if let Some(saving) = self.take() {
                saving.discard();
            }
            Ok(())
        })
    }
}

/// What to write: one list for each property, all of one length. An address is on `device` where `on_device` is true.
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

impl Entries {
    fn regions(self, device: Option<&SharedDevice>) -> Result<Vec<FileEntry>> {
        let keeper: Keeper = Arc::new(());
        let rows = self.name.into_iter().zip(self.dtype).zip(self.shape).zip(self.address).zip(self.on_device);
        rows.map(|((((name, dtype), shape), address), on_device)| {
            let data = match (dense_bytes(&dtype, &shape).unwrap_or(0), device) {
                (0, _) => None,
                (bytes, Some(device)) if on_device => {
                    Some(torch::region(device, address, bytes, Place::Device, &keeper)?)
                }
                (bytes, _) => Some(torch::host_region(address, bytes, &keeper)?),
            };
            Ok(FileEntry { name, dtype, shape, data })
        })
        .collect()
    }
}

/// How to write while training goes on: through which snapshot, how fast at most, and whether at low priority.
#[derive(FromPyObject)]
pub(crate) struct Manner {
    #[pyo3(item)]
    snapshot: Option<Py<Snapshot>>,
    #[pyo3(item)]
    bytes_per_s: Option<f64>,
    #[pyo3(item)]
    gives_way: bool,
}

/// State of one moment, kept while optimizers step.
#[pyclass(frozen)]
pub(crate) struct Snapshot {
    inner: Unlocked<Arc<snapshot::Snapshot>>,
}

#[pymethods]
impl Snapshot {
    /// Begin a snapshot of all state that these optimizers have in pinned memory; its copies take at most `budget_bytes`.
    #[new]
    fn new(py: Python<'_>, optimizers: Vec<Py<Optimizer>>, budget_bytes: u64) -> PyResult<Self> {
        let optimizers: Vec<_> = optimizers.iter().map(|optimizer| &*optimizer.get().inner).collect();
        guard::run(py, || Ok(Self { inner: Unlocked::new(optimizer::Optimizer::snapshot(&optimizers, budget_bytes)?) }))
    }

    /// Copy in the background what the next step will change.
    fn copy_ahead(&self, py: Python<'_>, threads: usize, bytes_per_s: Option<f64>) -> PyResult<()> {
        guard::run(py, || {
            self.inner.copy_in_background(threads, bytes_per_s);
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

    /// Bytes copied, bytes of memory for the copies, how often a step waited and for how many nanoseconds, and how often
    /// the writer paused for a step.
    fn stats(&self) -> (u64, u64, u64, u64, u64) {
        let SnapshotStats { copied_bytes, block_bytes, stalls, stall_ns, pauses } = self.inner.stats();
        (copied_bytes, block_bytes, stalls, stall_ns, pauses)
    }
}

impl Drop for Snapshot {
    /// No step may wait for a snapshot that nobody will write.
    fn drop(&mut self) {
        self.inner.finish();
    }
}

/// Bytes of memory that are kept for the copies of the next snapshot.
#[pyfunction]
pub(crate) fn kept_copy_bytes(py: Python<'_>) -> PyResult<u64> {
    guard::run(py, || Ok(snapshot::spare_bytes()))
}

/// Free the memory that is kept for the copies of the next snapshot, and return how many bytes that were.
#[pyfunction]
pub(crate) fn release_copies(py: Python<'_>) -> PyResult<u64> {
    guard::run(py, || Ok(snapshot::release_spare()))
}

/// Copies of device memory in one pinned slab that is used again.
#[pyclass(frozen)]
pub(crate) struct HostCopies {
    inner: Unlocked<checkpoint::HostCopies>,
}

#[pymethods]
impl HostCopies {
    #[new]
    fn new(py: Python<'_>, device: &str) -> PyResult<Self> {
        guard::run(py, || Ok(Self { inner: Unlocked::new(checkpoint::HostCopies::new(open(device)?)) }))
    }

    /// Bytes of the slab.
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    /// Copy ranges of device memory to the host, behind the present work of a stream, and wait for them. The buffers of
    /// the call before must not be in use.
    fn fill(&self, py: Python<'_>, addresses: Vec<u64>, bytes: Vec<u64>, stream: u64) -> PyResult<Vec<HostView>> {
        guard::run(py, || {
            let (device, keeper): (_, Keeper) = (self.inner.device(), Arc::new(()));
            let region = |(address, bytes)| torch::region(device, address, bytes, Place::Device, &keeper);
            let from = addresses.into_iter().zip(bytes).map(region).collect::<Result<Vec<Region>>>()?;
            let copies = self.inner.fill(&from, torch::stream_of(device, stream)?.as_ref())?;
            Ok(copies.into_iter().map(HostView::new).collect())
        })
    }
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
    let Manner { snapshot, bytes_per_s, gives_way } = manner;
    let snapshot = snapshot.map(|snapshot| snapshot.get().inner.clone());
    guard::run(py, || {
        let device = device.map(open).transpose()?;
        let entries = entries.regions(device.as_ref())?;
        let mut options =
            WriteOptions { snapshot, bytes_per_s, gives_way, direct: gives_way, ..WriteOptions::default() };
        options.threads = threads.unwrap_or(options.threads);
        if let Some(device) = device {
            let after = torch::stream(&device, stream)?;
            options.device = Some((device, after));
        }
        let files = checkpoint::write_files(&folder, prefix, &entries, &options, &moved.bytes)?;
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

/// What is in the last complete checkpoint of a path, or in that very folder; JSON text.
#[pyfunction]
pub(crate) fn checkpoint_summary(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    guard::run(py, || {
        let summary = checkpoint::summarise(&checkpoint::Checkpoint::open(&path)?)?;
        Ok(serde_json::to_string(&summary).unwrap_or_default())
    })
}

/// Compare every checksum of a checkpoint; return the bytes of its files, and the file and the reason of each problem.
#[pyfunction]
pub(crate) fn verify_checkpoint(
    py: Python<'_>,
    path: PathBuf,
    moved: &Moved,
) -> PyResult<(u64, Vec<(String, String)>)> {
    guard::run(py, || {
        let opened = checkpoint::Checkpoint::open(&path)?;
        let bytes = opened.manifest().files.iter().map(|file| file.bytes).sum();
        moved.expected.store(bytes, Relaxed);
        let problems = checkpoint::verify(&opened, &moved.bytes)?;
        Ok((bytes, problems.into_iter().map(|problem| (problem.file, problem.reason)).collect()))
    })
}

/// Write a checkpoint's weights into one safetensors file, after comparing every checksum.
#[pyfunction]
pub(crate) fn export_weights(py: Python<'_>, path: PathBuf, target: PathBuf, moved: &Moved) -> PyResult<()> {
    guard::run(py, || checkpoint::export_weights(&checkpoint::Checkpoint::open(&path)?, &target, &moved.bytes))
}

/// A complete checkpoint, its structure checked.
#[pyclass(frozen)]
pub(crate) struct Checkpoint {
    inner: checkpoint::Checkpoint,
}

/// How a checkpoint keeps a column of state in a format, for a box of this shape in the order of its memory: the
/// encoding's name, and the ending of the name, the type and the shape of each part. None if it is kept as f32.
#[pyfunction]
#[expect(clippy::type_complexity, reason = "numbers and names cross the border, not types")]
pub(crate) fn checkpoint_encoding(
    column: &str,
    format: &str,
    shape: Vec<u64>,
) -> Option<(String, Vec<(String, String, Vec<u64>)>)> {
    let encoding = Encoding::of_column(column, format)?;
    let parts = encoding.parts(&shape).into_iter().zip(encoding.suffixes());
    let parts = parts.map(|((dtype, shape), suffix)| ((*suffix).to_owned(), dtype.to_owned(), shape)).collect();
    Some((encoding.name().to_owned(), parts))
}

/// What a manifest says about an encoding of this name; JSON text.
#[pyfunction]
pub(crate) fn checkpoint_encoding_record(name: &str) -> String {
    let record = Encoding::named(name).map(Encoding::record);
    serde_json::to_string(&record).unwrap_or_default()
}

/// What to read: one list for each property, all of one length. `offset` and `length` say which box of which chunk,
/// `stride` (in elements) how the memory at `address` is laid out; `kept` which part of an encoding to read as it is, or
/// None for numbers.
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
    #[pyo3(item)]
    kept: Vec<Option<usize>>,
}

impl Requests {
    fn regions(self, checkpoint: &checkpoint::Checkpoint) -> Result<Vec<Request>> {
        let keeper: Keeper = Arc::new(());
        let rows = self.tensor.into_iter().zip(self.chunk).zip(self.offset).zip(self.length).zip(self.stride);
        rows.zip(self.address)
            .zip(self.kept)
            .map(|((((((tensor, chunk), offsets), shape), strides), address), kept)| {
                let into = checkpoint.bytes_into(&tensor, chunk, kept, &shape, &strides)?;
                let into = torch::host_region(address, into, &keeper)?;
                Ok(Request { tensor, chunk, part: TensorBox { offsets, shape }, into, strides, kept })
            })
            .collect()
    }
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
        guard::run(py, || self.inner.manifest_json())
    }

    /// Read boxes of chunks into memory on the host. None of the boxes may be empty.
    fn read(&self, py: Python<'_>, requests: Requests, threads: Option<usize>, moved: &Moved) -> PyResult<()> {
        guard::run(py, || {
            let threads = threads.unwrap_or(WriteOptions::default().threads);
            self.inner.read(&requests.regions(&self.inner)?, threads, &moved.bytes)
        })
    }
}
