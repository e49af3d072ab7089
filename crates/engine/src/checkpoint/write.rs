//! Writing: regions of memory into safetensors files, without a copy.
//!
//! The entries are spread over a few files of about equal size, and each file has a thread of its own: two threads in
//! one file would wait for each other in the kernel. A thread writes its file block by block: it computes the block's
//! checksum, writes the block, and asks the system to start writing it to the disk. Device memory passes through one
//! block of pinned memory for each thread.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_device::{Buffer, Cores, Event, Region, SharedDevice, SlabLayout, Stream, file};
use serde_json::{Map, json};

use super::folder::sync_folder;
use super::manifest::FileRecord;
use super::sink::Sink;
use super::{BLOCK_BYTES, CACHED_BYTES, dense_bytes, encode_header, refuse};
use crate::error::{Error, Result};
use crate::snapshot::Snapshot;
use crate::trace::{Held, Pool};

/// Bytes from which on a file is worth a thread, by default.
const FILE_BYTES: u64 = 64 << 20;
/// In each file the data begins at a multiple of this, so that blocks are whole pages.
const DATA_ALIGN: usize = 4096;

/// One chunk of a tensor to write.
#[derive(Debug, Clone)]
pub struct FileEntry {
    /// Its name in the file.
    pub name: String,
    /// Its type, as safetensors names them.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its bytes, contiguous, on the host or on the device of the options; `None` for an empty chunk.
    pub data: Option<Region>,
}

impl FileEntry {
    fn bytes(&self) -> u64 {
        self.data.as_ref().map_or(0, Region::bytes)
    }
}

/// How to write.
#[derive(Debug, Clone)]
pub struct WriteOptions {
    /// The most files, and threads.
    pub threads: usize,
    /// Bytes that one checksum covers.
    pub block_bytes: u64,
    /// Bytes that are worth a file of their own.
    pub file_bytes: u64,
    /// The snapshot through which the entries that it covers are read.
    pub snapshot: Option<Arc<Snapshot>>,
    /// The most bytes per second, of all threads together.
    pub bytes_per_s: Option<f64>,
    /// Whether the threads run at low priority.
    pub gives_way: bool,
    /// Whether to write past the system's cache where the file system can. This takes no memory for the cache and no core's
    /// time for copies into it, but the next reader of the files finds nothing in memory.
    pub direct: bool,
    /// The device of entries that are not on the host, and the stream behind whose present work they may be read.
    pub device: Option<(SharedDevice, Stream)>,
}

impl Default for WriteOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        Self {
            threads: cores.min(8),
            block_bytes: BLOCK_BYTES,
            file_bytes: FILE_BYTES,
            snapshot: None,
            bytes_per_s: None,
            gives_way: false,
            direct: false,
            device: None,
        }
    }
}

/// A file that is on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenFile {
    /// Its name, length and checksums.
    pub record: FileRecord,
    /// For each of its entries: which of the given ones it is, and where it begins and ends in the file.
    pub entries: Vec<(usize, u64, u64)>,
}

/// The layout of one file.
struct FilePlan {
    path: PathBuf,
    name: String,
    header: Vec<u8>,
    entries: Vec<(usize, u64, u64)>,
    bytes: u64,
}

/// Writes entries into files `<prefix><n>.safetensors` and syncs them and their folder. `written` counts bytes.
pub fn write_files(
    folder: &Path,
    prefix: &str,
    entries: &[FileEntry],
    options: &WriteOptions,
    written: &AtomicU64,
) -> Result<Vec<WrittenFile>> {
    let plans = plan_files(folder, prefix, entries, options)?;
    let ready = options.device.as_ref().map(|(device, stream)| recorded(device, stream)).transpose()?;
    if let Some(snapshot) = &options.snapshot {
        let regions = entries.iter().filter_map(|entry| entry.data.clone());
        snapshot.plan(&regions.filter(|region| region.place().is_host()).collect::<Vec<_>>());
    }
    let threads = plans.len().min(options.threads).max(1);
    // Each thread that has a file gets its share of the rate.
    let bytes_per_s = options.bytes_per_s.map(|rate| rate / threads as f64);
    let next = AtomicUsize::new(0);
    let (done, failed) = (Mutex::new(Vec::new()), Mutex::new(None));
    let write_next_files = || -> Result<()> {
        if options.gives_way {
            file::give_way();
        }
        let mut memory = ThreadMemory::default();
        while let Some(plan) = plans.get(next.fetch_add(1, Relaxed)) {
            if lock(&failed).is_some() {
                return Ok(());
            }
            let record = write_file(plan, entries, options, bytes_per_s, ready.as_ref(), &mut memory, written)?;
            lock(&done).push(WrittenFile { record, entries: plan.entries.clone() });
        }
        Ok(())
    };
    let work = || {
        if let Err(error) = write_next_files() {
            lock(&failed).get_or_insert(error);
        }
    };
    let cores = Cores::here();
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // The calling thread works too, so where no more threads can be started the save is only slower.
            let _ = cores.spawn_scoped(scope, "forebay-checkpoint", work);
        }
        work();
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    sync_folder(folder)?;
    let mut files = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    files.sort_by(|a: &WrittenFile, b| a.record.name.cmp(&b.record.name));
    Ok(files)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An event behind the present work of a stream.
fn recorded(device: &SharedDevice, stream: &Stream) -> Result<Event> {
    let event = device.event()?;
    device.record(&event, stream)?;
    Ok(event)
}

/// Spreads the entries over files, the largest first, each into the file with the fewest bytes.
fn plan_files(folder: &Path, prefix: &str, entries: &[FileEntry], options: &WriteOptions) -> Result<Vec<FilePlan>> {
    if entries.is_empty() {
        return Ok(Vec::new());
    }
    let total: u64 = entries.iter().map(FileEntry::bytes).sum();
    let count = (total.div_ceil(options.file_bytes.max(1)) as usize).clamp(1, options.threads.max(1));
    let mut files: Vec<(u64, Vec<usize>)> = vec![(0, Vec::new()); count];
    let mut order: Vec<usize> = (0..entries.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(entries[i].bytes()));
    for i in order {
        if let Some(file) = files.iter_mut().min_by_key(|(bytes, _)| *bytes) {
            file.0 += entries[i].bytes();
            file.1.push(i);
        }
    }
    files
        .into_iter()
        .enumerate()
        .map(|(number, (_, mut inside))| {
            // Wide elements first, so that every entry is aligned to its own elements.
            inside.sort_by_key(|&i| (std::cmp::Reverse(super::element_bytes(&entries[i].dtype)), i));
            let name = format!("{prefix}{number}.safetensors");
            plan_file(folder.join(&name), name, &inside, entries)
        })
        .collect()
}

fn plan_file(path: PathBuf, name: String, inside: &[usize], entries: &[FileEntry]) -> Result<FilePlan> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let (mut at, mut places) = (0u64, Vec::with_capacity(inside.len()));
    for &i in inside {
        let FileEntry { name, dtype, shape, .. } = &entries[i];
        let bytes = entries[i].bytes();
        if dense_bytes(dtype, shape) != Some(bytes) {
            return refuse(&path, format!("{name:?}: {bytes} bytes for {dtype} of shape {shape:?}"));
        }
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]});
        if header.insert(name.clone(), entry).is_some() {
            return refuse(&path, format!("two entries are called {name:?}"));
        }
        places.push((i, at, at + bytes));
        at += bytes;
    }
    let header = encode_header(header, DATA_ALIGN);
    let start = header.len() as u64;
    let entries = places.into_iter().map(|(i, begin, end)| (i, start + begin, start + end)).collect();
    Ok(FilePlan { path, name, header, entries, bytes: start + at })
}

/// Memory that a thread needs for entries of a device or a snapshot, allocated for the first of them.
#[derive(Default)]
struct ThreadMemory {
    staging: Option<Staging>,
    buffer: Option<Buffer>,
}

/// A pinned block, and a stream that copies memory of the device into it.
struct Staging {
    device: SharedDevice,
    stream: Stream,
    arrived: Event,
    block: Region,
    _held: Held,
}

impl Staging {
    fn new(device: &SharedDevice, bytes: u64, ready: Option<&Event>) -> Result<Self> {
        let stream = device.stream("checkpoint")?;
        if let Some(ready) = ready {
            device.wait(&stream, ready)?;
        }
        let block = device.pin(SlabLayout::new(&[bytes])?)?.part(0)?;
        Ok(Self {
            stream,
            arrived: device.event()?,
            block,
            device: device.clone(),
            _held: Held::new(Pool::Saves, bytes),
        })
    }

    /// Copies a region to the host, and returns the copy when it has arrived.
    fn fetch(&self, from: &Region) -> Result<Region> {
        let here = self.block.slice(0, from.bytes())?;
        self.device.copy(&self.stream, from, &here)?;
        self.device.record(&self.arrived, &self.stream)?;
        self.device.synchronize(&self.arrived)?;
        Ok(here)
    }
}

fn write_file(
    plan: &FilePlan,
    entries: &[FileEntry],
    options: &WriteOptions,
    bytes_per_s: Option<f64>,
    ready: Option<&Event>,
    memory: &mut ThreadMemory,
    written: &AtomicU64,
) -> Result<FileRecord> {
    let path = &plan.path;
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    let file = file.map_err(|error| Error::file("write", path, &error))?;
    let gathers = options.direct && file::bypass_cache(&file, true);
    if memory.buffer.is_none() && (gathers || options.snapshot.is_some()) {
        memory.buffer = Some(Buffer::pageable(CACHED_BYTES)?);
    }
    let ThreadMemory { staging, buffer } = memory;
    let snapshot = options.snapshot.as_deref();
    let mut sink = Sink::new(path, file, buffer.as_ref().filter(|_| gathers), snapshot, bytes_per_s);
    let mut blocks = Vec::with_capacity(plan.bytes.div_ceil(options.block_bytes) as usize);
    let mut places = plan.entries.iter().filter(|(_, begin, end)| begin < end).peekable();
    let header = plan.header.len() as u64;
    let mut start = 0;
    while start < plan.bytes {
        let end = (start + options.block_bytes).min(plan.bytes);
        if start < header {
            sink.put_bytes(&plan.header[start as usize..header.min(end) as usize])?;
        }
        while let Some(&&(index, begin, finish)) = places.peek() {
            if begin >= end {
                break;
            }
            let (from, to) = (begin.max(start), finish.min(end));
            let Some(data) = &entries[index].data else { break };
            let part = data.slice(from - begin, to - from)?;
            let part = if part.place().is_host() {
                part
            } else {
                let Some((device, _)) = &options.device else {
                    return refuse(path, format!("{:?} is on a device and none was given", entries[index].name));
                };
                let staging = match staging {
                    Some(staging) => staging,
                    None => staging.insert(Staging::new(device, options.block_bytes, ready)?),
                };
                staging.fetch(&part)?
            };
            match (snapshot.filter(|snapshot| snapshot.covers(&part)), &*buffer) {
                (Some(snapshot), Some(buffer)) => snapshot.read(&part, buffer, from, |piece| sink.put(piece))?,
                _ => sink.put_region(&part)?,
            }
            if finish > end {
                break;
            }
            places.next();
        }
        blocks.push(sink.end_block(start, end - start));
        written.fetch_add(end - start, Relaxed);
        start = end;
    }
    let file = sink.finish()?;
    file.sync_all().map_err(|error| Error::file("sync", path, &error))?;
    check_length(&file, plan)?;
    Ok(FileRecord { name: plan.name.clone(), bytes: plan.bytes, blocks })
}

fn check_length(out: &File, plan: &FilePlan) -> Result<()> {
    let found = out.metadata().map_err(|error| Error::file("find", &plan.path, &error))?.len();
    if found == plan.bytes {
        Ok(())
    } else {
        refuse(&plan.path, format!("{found} bytes where {} were written", plan.bytes))
    }
}
