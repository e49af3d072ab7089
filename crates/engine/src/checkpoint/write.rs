//! Writing: regions of memory into safetensors files, straight from where they lie.
//!
//! The entries are spread over a few files of about equal size, and each file has a thread of its own: two threads in one
//! file would wait for each other in the kernel. A thread goes through its file block by block: it sums the block, writes
//! it, and asks for it to be brought to the disk while it goes on. Memory on a device comes through one block of pinned
//! memory for each thread.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_device::{Buffer, Cores, Event, Region, SharedDevice, SlabLayout, Stream, file};
use serde_json::{Map, json};

use super::folder::sync_folder;
use super::manifest::FileRecord;
use super::snapshot::{Pace, Snapshot, Turn};
use super::{BLOCK_BYTES, CACHED_BYTES, encode_header, file_error, refuse};
use crate::error::{Error, Result};

/// By default a file is worth a thread from this size on.
const FILE_BYTES: u64 = 64 << 20;
/// Data begins at a multiple of this in each file, so that blocks are whole pages.
const DATA_ALIGN: usize = 4096;

/// One chunk of a tensor to write.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its name in the file.
    pub name: String,
    /// Its type, as safetensors names them.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its bytes, contiguous, on the host or on the device of the options; none for an empty chunk.
    pub data: Option<Region>,
}

impl Entry {
    fn bytes(&self) -> u64 {
        self.data.as_ref().map_or(0, Region::bytes)
    }
}

/// How to write.
#[derive(Debug, Clone)]
pub struct WriteOptions {
    /// Files, and threads, at most.
    pub threads: usize,
    /// Bytes that one checksum covers.
    pub block_bytes: u64,
    /// As many bytes are worth a file of their own.
    pub file_bytes: u64,
    /// The snapshot through which entries are read that are part of it.
    pub snapshot: Option<Arc<Snapshot>>,
    /// Bytes a second at most, all threads together.
    pub bytes_per_s: Option<f64>,
    /// Whether the threads give way to others.
    pub gives_way: bool,
    /// Whether to write past the system's cache where the file system can: no memory is taken for the cache, and no core's
    /// time for copies into it, but what was saved is not in memory for whoever reads it next.
    pub direct: bool,
    /// The device of entries that are not on the host, and the stream after whose present work they may be read.
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

/// What goes where in one file.
struct Plan {
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
    entries: &[Entry],
    options: &WriteOptions,
    written: &AtomicU64,
) -> Result<Vec<WrittenFile>> {
    let plans = plan_files(folder, prefix, entries, options)?;
    // What the device still has to do before the memory may be read.
    let ready = match &options.device {
        None => None,
        Some((device, stream)) => {
            let event = device.event()?;
            device.record(&event, stream)?;
            Some(event)
        }
    };
    let on_host: Vec<Region> =
        entries.iter().filter_map(|entry| entry.data.clone()).filter(|region| region.place().is_host()).collect();
    if let Some(snapshot) = &options.snapshot {
        snapshot.plan(&on_host);
    }
    // Of the rate, each thread that has a file gets its share.
    let share = options.bytes_per_s.map(|rate| rate / plans.len().min(options.threads).max(1) as f64);
    let next = AtomicUsize::new(0);
    let (done, failed) = (Mutex::new(Vec::new()), Mutex::new(None));
    let work = || -> Result<()> {
        if options.gives_way {
            file::give_way();
        }
        let mut memory = Memory::default();
        while let Some(plan) = plans.get(next.fetch_add(1, Relaxed)) {
            if failed.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
                return Ok(());
            }
            let record = write_file(plan, entries, options, share, ready.as_ref(), &mut memory, written)?;
            let file = WrittenFile { record, entries: plan.entries.clone() };
            done.lock().unwrap_or_else(PoisonError::into_inner).push(file);
        }
        Ok(())
    };
    let cores = Cores::here();
    std::thread::scope(|scope| {
        let spawn = |_| {
            cores.spawn_scoped(scope, "forebay-checkpoint", || {
                if let Err(error) = work() {
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            })
        };
        // The calling thread works too, so a system that gives no more threads only makes it slower.
        let others: Vec<_> = (1..plans.len().min(options.threads)).map(spawn).collect();
        drop(others);
        if let Err(error) = work() {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    sync_folder(folder)?;
    let mut files = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    files.sort_by(|a: &WrittenFile, b| a.record.name.cmp(&b.record.name));
    Ok(files)
}

/// Spreads the entries over files, largest first, each into the file that has least.
fn plan_files(folder: &Path, prefix: &str, entries: &[Entry], options: &WriteOptions) -> Result<Vec<Plan>> {
    if entries.is_empty() {
        return Ok(Vec::new());
    }
    let total: u64 = entries.iter().map(Entry::bytes).sum();
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
            // In the order given, wide elements first: then every entry is aligned to its own elements.
            inside.sort_by_key(|&i| (std::cmp::Reverse(super::element_bytes(&entries[i].dtype)), i));
            let name = format!("{prefix}{number}.safetensors");
            plan_file(folder.join(&name), name, &inside, entries)
        })
        .collect()
}

fn plan_file(path: PathBuf, name: String, inside: &[usize], entries: &[Entry]) -> Result<Plan> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let (mut at, mut places) = (0u64, Vec::with_capacity(inside.len()));
    for &i in inside {
        let Entry { name, dtype, shape, .. } = &entries[i];
        let bytes = entries[i].bytes();
        let needed = super::boxes::volume(shape).zip(super::element_bytes(dtype)).map(|(n, width)| n * width);
        if needed != Some(bytes) {
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
    Ok(Plan { path, name, header, entries, bytes: start + at })
}

/// What a thread needs for entries that it cannot write from where they lie, made when it meets the first.
#[derive(Default)]
struct Memory {
    staging: Option<Staging>,
    buffer: Option<Buffer>,
}

/// A block of pinned memory and a stream to bring memory of the device into it.
struct Staging {
    device: SharedDevice,
    stream: Stream,
    arrived: Event,
    block: Region,
}

impl Staging {
    fn new(device: &SharedDevice, bytes: u64, ready: Option<&Event>) -> Result<Self> {
        let stream = device.stream("checkpoint")?;
        if let Some(ready) = ready {
            device.wait(&stream, ready)?;
        }
        let block = device.pin(SlabLayout::new(&[bytes])?)?.part(0)?;
        Ok(Self { stream, arrived: device.event()?, block, device: device.clone() })
    }

    /// Brings a region to the host.
    fn bring(&self, from: &Region) -> Result<Region> {
        let here = self.block.slice(0, from.bytes())?;
        self.device.copy(&self.stream, from, &here)?;
        self.device.record(&self.arrived, &self.stream)?;
        self.device.synchronize(&self.arrived)?;
        Ok(here)
    }
}

fn write_file(
    plan: &Plan,
    entries: &[Entry],
    options: &WriteOptions,
    bytes_per_s: Option<f64>,
    ready: Option<&Event>,
    Memory { staging, buffer }: &mut Memory,
    written: &AtomicU64,
) -> Result<FileRecord> {
    let path = &plan.path;
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    let file = file.map_err(|error| file_error("write", path, &error))?;
    let mut blocks = Vec::with_capacity(plan.bytes.div_ceil(options.block_bytes) as usize);
    let mut places = plan.entries.iter().filter(|(_, begin, end)| begin < end).peekable();
    let gathers = options.direct && file::bypass_cache(&file, true);
    if buffer.is_none() && (gathers || options.snapshot.is_some()) {
        *buffer = Some(Buffer::pageable(CACHED_BYTES)?);
    }
    let mut sink = Sink {
        path,
        file,
        at: 0,
        gathered: buffer.as_ref().filter(|_| gathers),
        sum: crc32fast::Hasher::new(),
        snapshot: options.snapshot.as_deref(),
        pace: Pace::new(bytes_per_s),
        turn: Turn::new(),
    };
    let mut start = 0;
    while start < plan.bytes {
        let end = (start + options.block_bytes).min(plan.bytes);
        let header = plan.header.len() as u64;
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
                staging.bring(&part)?
            };
            match (options.snapshot.as_ref().filter(|snapshot| snapshot.covers(&part)), &*buffer) {
                (Some(snapshot), Some(buffer)) => snapshot.read(&part, buffer, from, |piece| sink.put(piece))?,
                _ => sink.put_region(&part)?,
            }
            if finish > end {
                break;
            }
            places.next();
        }
        blocks.push(std::mem::take(&mut sink.sum).finalize());
        file::start_writeback(&sink.file, start, end - start);
        written.fetch_add(end - start, Relaxed);
        start = end;
    }
    let file = sink.finish()?;
    file.sync_all().map_err(|error| file_error("sync", path, &error))?;
    check_length(&file, plan)?;
    Ok(FileRecord { name: plan.name.clone(), bytes: plan.bytes, blocks })
}

/// A file on its way to the disk, from its first byte to its last.
struct Sink<'a> {
    path: &'a Path,
    file: File,
    /// Bytes so far.
    at: u64,
    /// Where bytes come together before they are written past the system's cache, which takes whole pages: byte `n` of the
    /// file lies at `n` modulo the length.
    gathered: Option<&'a Buffer>,
    sum: crc32fast::Hasher,
    snapshot: Option<&'a Snapshot>,
    pace: Pace,
    turn: Turn,
}

impl Sink<'_> {
    /// Adds a piece. One that is gathered lies in its place already.
    fn put(&mut self, piece: &Region) -> Result<()> {
        if let Some(snapshot) = self.snapshot {
            snapshot.give_way(&mut self.turn);
        }
        file::visit(piece, |bytes| self.sum.update(bytes)).map_err(self.fail())?;
        if self.gathered.is_none() {
            file::write_at(&self.file, self.at, piece).map_err(self.fail())?;
        }
        self.at += piece.bytes();
        if let Some(buffer) = self.gathered.filter(|buffer| self.at.is_multiple_of(buffer.bytes())) {
            self.write_gathered(buffer, buffer.bytes())?;
        }
        self.pace.moved(piece.bytes());
        Ok(())
    }

    /// Adds host memory from where it lies.
    fn put_region(&mut self, part: &Region) -> Result<()> {
        let mut done = 0;
        while done < part.bytes() {
            let piece = part.slice(done, (part.bytes() - done).min(self.room()))?;
            match self.gathered {
                None => self.put(&piece)?,
                Some(buffer) => {
                    let place = buffer.region(self.at % buffer.bytes(), piece.bytes())?;
                    file::copy(&piece, &place).map_err(self.fail())?;
                    self.put(&place)?;
                }
            }
            done += piece.bytes();
        }
        Ok(())
    }

    fn put_bytes(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let (piece, rest) = bytes.split_at(bytes.len().min(self.room() as usize));
            match self.gathered {
                None => {
                    self.sum.update(piece);
                    self.file.write_all_at(piece, self.at).map_err(self.fail())?;
                    self.at += piece.len() as u64;
                }
                Some(buffer) => {
                    let place = buffer.region(self.at % buffer.bytes(), piece.len() as u64)?;
                    file::fill(&place, piece).map_err(self.fail())?;
                    self.put(&place)?;
                }
            }
            bytes = rest;
        }
        Ok(())
    }

    /// The most that one piece may have.
    fn room(&self) -> u64 {
        CACHED_BYTES - self.gathered.map_or(0, |buffer| self.at % buffer.bytes())
    }

    /// Writes the last bytes, of which there are so many: whole pages past the cache, what is left through it.
    fn write_gathered(&self, buffer: &Buffer, bytes: u64) -> Result<()> {
        let (start, pages) = (self.at - bytes, bytes - bytes % file::DIRECT_BYTES);
        let write = |from, to| -> Result<std::io::Result<()>> {
            Ok(file::write_at(&self.file, start + from, &buffer.region(from, to - from)?))
        };
        let written = match write(0, pages)? {
            // Some file systems find out only here; and a disk that is about to be full gives its true reason this way.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {
                file::bypass_cache(&self.file, false);
                write(0, pages)?
            }
            outcome => outcome,
        };
        written.map_err(self.fail())?;
        if pages < bytes {
            file::bypass_cache(&self.file, false);
            write(pages, bytes)?.map_err(self.fail())?;
        }
        Ok(())
    }

    fn finish(self) -> Result<File> {
        if let Some(buffer) = self.gathered {
            let left = self.at % buffer.bytes();
            self.write_gathered(buffer, left)?;
        }
        Ok(self.file)
    }

    fn fail(&self) -> impl Fn(std::io::Error) -> Error + '_ {
        |error| file_error("write", self.path, &error)
    }
}

fn check_length(out: &File, plan: &Plan) -> Result<()> {
    let found = out.metadata().map_err(|error| file_error("find", &plan.path, &error))?.len();
    if found == plan.bytes {
        Ok(())
    } else {
        refuse(&plan.path, format!("{found} bytes where {} were written", plan.bytes))
    }
}
