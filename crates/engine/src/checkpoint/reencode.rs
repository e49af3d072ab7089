//! One checkpoint from another, with an optimizer's state kept in other formats.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use forebay_device::update::{MASTER, RULES};
use forebay_device::{Buffer, Cores, MasterFormat, Region, StateFormat, file};
use serde::Serialize;
use serde_json::{Map, json};

use super::boxes::{TensorBox, row_major, volume};
use super::convert::WEIGHTS;
use super::decode::split;
use super::encoding::Encoding;
use super::folder::{Saving, sync_folder};
use super::manifest::{FileRange, FileRecord, Manifest, StoredChunk, Tensor};
use super::{BLOCK_BYTES, Checkpoint, Request, dense_bytes, element_bytes, encode_header, refuse};
use crate::error::{Error, Result};

/// The start of the names of an optimizer's state in a checkpoint.
const STATE: &str = "optimizer.state.";
/// Elements that are in memory at a time, for each thread; whole blocks of every encoding.
const PART_ELEMENTS: u64 = 4 << 20;
/// In each file the data begins at a multiple of this.
const DATA_ALIGN: usize = 4096;
/// Threads that write files at once.
const MAX_THREADS: usize = 4;

/// Which formats a checkpoint is to have; what is not said stays as it is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Change {
    /// Of columns of rules.
    pub state: Option<StateFormat>,
    /// Of the masters of bf16 weights. Those of other weights are f32.
    pub master: Option<MasterFormat>,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// The new checkpoint's folder.
    pub path: String,
    /// Bytes of the tensors in the old files, and in the new ones.
    pub bytes_before: u64,
    /// Bytes of the tensors in the new files.
    pub bytes: u64,
    /// How many tensors of state are kept in each format now.
    pub formats: BTreeMap<String, usize>,
}

/// How a tensor of a checkpoint is to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goal {
    Same,
    Plain,
    Encoded(Encoding),
}

/// One part of one chunk of the new checkpoint.
struct Entry<'a> {
    tensor: &'a str,
    chunk: usize,
    part: usize,
    goal: Goal,
    name: String,
    dtype: String,
    shape: Vec<u64>,
}

/// Makes a checkpoint at `path` that has what `checkpoint` has, with state in other formats. Every checksum is compared on
/// the way. `moved` counts bytes of the new one. Nothing is left of it after a failure.
pub fn reencode(checkpoint: &Checkpoint, path: &Path, change: Change, moved: &AtomicU64) -> Result<Changed> {
    let old = checkpoint.manifest();
    let goals: BTreeMap<&str, Goal> = old
        .tensors
        .iter()
        .map(|(name, tensor)| Ok((name.as_str(), goal(checkpoint, name, tensor, change)?)))
        .collect::<Result<_>>()?;
    let saving = Saving::begin(path)?;
    match write(checkpoint, &goals, saving.folder(), moved) {
        Ok(manifest) => {
            let summary = Changed {
                path: saving.folder().display().to_string(),
                bytes_before: old.tensor_bytes(),
                bytes: manifest.tensor_bytes(),
                formats: formats(&manifest),
            };
            saving.commit(&manifest, None)?;
            Ok(summary)
        }
        Err(error) => {
            saving.discard();
            Err(error)
        }
    }
}

/// How a tensor is to be kept.
fn goal(checkpoint: &Checkpoint, name: &str, tensor: &Tensor, change: Change) -> Result<Goal> {
    let Some((parameter, column)) = name.strip_prefix(STATE).and_then(|rest| rest.rsplit_once('.')) else {
        return Ok(Goal::Same);
    };
    if tensor.dtype != "F32" {
        return Ok(Goal::Same);
    }
    if column == MASTER.name {
        return match change.master {
            None => Ok(Goal::Same),
            Some(MasterFormat::Compact) => {
                let weight = format!("{WEIGHTS}{parameter}");
                match checkpoint.manifest().tensors.get(&weight) {
                    Some(found) if found.dtype == "BF16" && found.shape == tensor.shape => {
                        Ok(Goal::Encoded(Encoding::Compact))
                    }
                    Some(found) if found.shape == tensor.shape => Ok(Goal::Plain),
                    _ => refuse(
                        checkpoint.folder(),
                        format!(
                            "{name:?} cannot be a compact master: its weight {weight:?} is not in the checkpoint with \
                             its shape; use --master f32"
                        ),
                    ),
                }
            }
            Some(_) => Ok(Goal::Plain),
        };
    }
    let is_known = RULES.iter().flat_map(|rule| rule.columns).any(|known| known.name == column);
    Ok(match change.state {
        Some(format) if is_known => Encoding::of_column(column, format.name()).map_or(Goal::Plain, Goal::Encoded),
        _ => Goal::Same,
    })
}

fn formats(manifest: &Manifest) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    let columns: Vec<&str> =
        RULES.iter().flat_map(|rule| rule.columns).map(|column| column.name).chain([MASTER.name]).collect();
    for (name, tensor) in &manifest.tensors {
        let column = name.strip_prefix(STATE).and_then(|rest| rest.rsplit_once('.')).map(|(_, column)| column);
        if column.is_some_and(|column| columns.contains(&column)) {
            let first = tensor.chunks.first().and_then(|chunk| manifest.encoding(chunk).ok().flatten());
            *found.entry(first.map_or("f32", Encoding::kind).to_owned()).or_insert(0) += 1;
        }
    }
    found
}

/// The encoding that a chunk has in the new checkpoint, and whether its bytes stay as they are.
fn encoding_of(manifest: &Manifest, chunk: &StoredChunk, goal: Goal) -> (Option<Encoding>, bool) {
    let now = manifest.encoding(chunk).ok().flatten();
    let next = match goal {
        Goal::Same => now,
        Goal::Plain => None,
        Goal::Encoded(encoding) => Some(encoding),
    };
    (next, now == next)
}

fn write(checkpoint: &Checkpoint, goals: &BTreeMap<&str, Goal>, folder: &Path, moved: &AtomicU64) -> Result<Manifest> {
    let old = checkpoint.manifest();
    // What was in one file is in one file again.
    let mut files: Vec<Vec<Entry<'_>>> = old.files.iter().map(|_| Vec::new()).collect();
    for (name, tensor) in &old.tensors {
        let goal = goals.get(name.as_str()).copied().unwrap_or(Goal::Same);
        for (number, chunk) in tensor.chunks.iter().enumerate() {
            let (encoding, stays) = encoding_of(old, chunk, goal);
            let shape = if stays { chunk.ordered_shape() } else { chunk.extent.shape.clone() };
            let parts = encoding.map_or_else(
                || vec![(tensor.dtype.as_str(), chunk.extent.shape.clone())],
                |encoding| encoding.parts(&shape),
            );
            let suffixes = encoding.map_or(&[""][..], Encoding::suffixes);
            for (part, ((dtype, shape), suffix)) in parts.into_iter().zip(suffixes).enumerate() {
                files[chunk.file].push(Entry {
                    tensor: name,
                    chunk: number,
                    part,
                    goal,
                    name: entry_name(&format!("{name}{suffix}"), &chunk.extent, &tensor.shape),
                    dtype: dtype.to_owned(),
                    shape,
                });
            }
        }
    }
    files.retain(|entries| !entries.is_empty());
    for entries in &mut files {
        entries.sort_by_key(|entry| std::cmp::Reverse(element_bytes(&entry.dtype)));
    }
    let next = AtomicUsize::new(0);
    let (done, failed) = (Mutex::new(Vec::new()), Mutex::new(None));
    let work = || {
        while let Some((number, entries)) = {
            let number = next.fetch_add(1, Relaxed);
            files.get(number).map(|entries| (number, entries))
        } {
            if failed.lock().unwrap_or_else(PoisonError::into_inner).is_some() {
                return;
            }
            match write_file(checkpoint, entries, folder, number, moved) {
                Ok(written) => done.lock().unwrap_or_else(PoisonError::into_inner).push((number, written)),
                Err(error) => {
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    return;
                }
            }
        }
    };
    let cores = Cores::here();
    std::thread::scope(|scope| {
        for _ in 1..files.len().min(MAX_THREADS) {
            let _ = cores.spawn_scoped(scope, "forebay-checkpoint", work);
        }
        work();
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    sync_folder(folder)?;
    let mut written = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    written.sort_by_key(|(number, _)| *number);
    let places: BTreeMap<(&str, usize, usize), FileRange> = written
        .iter()
        .flat_map(|(number, (_, ranges))| {
            files[*number].iter().zip(ranges).map(|(entry, &(begin, end))| {
                ((entry.tensor, entry.chunk, entry.part), FileRange { file: *number, begin, end })
            })
        })
        .collect();
    let records = written.into_iter().map(|(_, (record, _))| record).collect();
    Ok(manifest_of(old, goals, &places, records))
}

fn manifest_of(
    old: &Manifest,
    goals: &BTreeMap<&str, Goal>,
    places: &BTreeMap<(&str, usize, usize), FileRange>,
    files: Vec<FileRecord>,
) -> Manifest {
    let mut manifest = Manifest { block_bytes: BLOCK_BYTES, files, encodings: BTreeMap::new(), ..old.clone() };
    manifest.made_by.insert("forebay".to_owned(), crate::VERSION.to_owned());
    for (name, tensor) in &mut manifest.tensors {
        let goal = goals.get(name.as_str()).copied().unwrap_or(Goal::Same);
        for (number, chunk) in tensor.chunks.iter_mut().enumerate() {
            let (encoding, stays) = encoding_of(old, chunk, goal);
            let place = |part| places.get(&(name.as_str(), number, part)).cloned();
            let first = place(0).unwrap_or(FileRange { file: 0, begin: 0, end: 0 });
            *chunk = StoredChunk {
                encoding: encoding.map(|encoding| encoding.name().to_owned()),
                order: chunk.order.clone().filter(|_| stays),
                beside: place(1),
                ..StoredChunk::plain(chunk.extent.clone(), first.file, first.begin, first.end)
            };
            if let Some(encoding) = encoding {
                manifest.encodings.entry(encoding.name().to_owned()).or_insert_with(|| encoding.record());
            }
        }
        tensor.weight = match (goal, tensor.weight.take()) {
            (Goal::Encoded(Encoding::Compact), _) => {
                name.strip_prefix(STATE).and_then(|rest| rest.rsplit_once('.')).map(|(of, _)| format!("{WEIGHTS}{of}"))
            }
            (Goal::Same, weight) => weight,
            _ => None,
        };
    }
    manifest
}

/// An entry's name: the tensor's, with ranges if it is a part of it.
fn entry_name(name: &str, extent: &TensorBox, shape: &[u64]) -> String {
    if extent.shape == shape {
        return name.to_owned();
    }
    let range = |(offset, len): (&u64, &u64)| format!("{offset}:{}", offset + len);
    let ranges: Vec<String> = extent.offsets.iter().zip(&extent.shape).map(range).collect();
    format!("{name}[{}]", ranges.join(","))
}

/// A file's record, and where each entry begins and ends in it.
type Written = (FileRecord, Vec<(u64, u64)>);

fn write_file(
    checkpoint: &Checkpoint,
    entries: &[Entry<'_>],
    folder: &Path,
    number: usize,
    moved: &AtomicU64,
) -> Result<Written> {
    let name = format!("0-{number}.safetensors");
    let path = folder.join(&name);
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let (mut at, mut ranges) = (0, Vec::with_capacity(entries.len()));
    for Entry { name, dtype, shape, .. } in entries {
        let bytes = dense_bytes(dtype, shape).unwrap_or(0);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]});
        if header.insert(name.clone(), entry).is_some() {
            return refuse(&path, format!("two entries are called {name:?}"));
        }
        ranges.push((at, at + bytes));
        at += bytes;
    }
    let header = encode_header(header, DATA_ALIGN);
    let start = header.len() as u64;
    let mut out = Summed::new(&path)?;
    out.put(&header)?;
    for (entry, (begin, end)) in entries.iter().zip(&ranges) {
        let before = out.at;
        entry.write(checkpoint, &mut |bytes| {
            moved.fetch_add(bytes.len() as u64, Relaxed);
            out.put(bytes)
        })?;
        if out.at - before != end - begin {
            return refuse(&path, format!("{:?}: {} bytes instead of {}", entry.name, out.at - before, end - begin));
        }
    }
    let (bytes, blocks) = out.finish()?;
    let ranges = ranges.into_iter().map(|(begin, end)| (start + begin, start + end)).collect();
    Ok((FileRecord { name, bytes, blocks }, ranges))
}

impl Entry<'_> {
    /// Passes its bytes on, in order.
    fn write(&self, checkpoint: &Checkpoint, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let manifest = checkpoint.manifest();
        let tensor = &manifest.tensors[self.tensor];
        let chunk = &tensor.chunks[self.chunk];
        let (encoding, stays) = encoding_of(manifest, chunk, self.goal);
        let Some(encoding) = encoding.filter(|_| !stays) else {
            // As it is in the files, or the numbers of what was encoded.
            let kept = (stays && encoding.is_some()).then_some(self.part);
            return self.visit(checkpoint, (&self.dtype, &self.shape), kept, &mut |_, bytes| put(bytes));
        };
        let (mut values, mut weights) = (Vec::<f32>::new(), Vec::new());
        let (mut numbers, mut beside) = (Vec::new(), Vec::new());
        let weight = format!("{WEIGHTS}{}", self.parameter());
        let mut flush = |values: &mut Vec<f32>, weights: &mut Vec<u8>, is_last: bool| {
            let count = values.len() - if is_last { 0 } else { values.len() % encoding.granule() as usize };
            numbers.clear();
            beside.clear();
            encoding.encode(&values[..count], weights.get(..2 * count).unwrap_or_default(), &mut numbers, &mut beside);
            values.drain(..count);
            if !weights.is_empty() {
                weights.drain(..2 * count);
            }
            put(if self.part == 0 { &numbers } else { &beside })
        };
        self.visit(checkpoint, ("F32", &chunk.extent.shape), None, &mut |part, bytes| {
            values.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
            if encoding == Encoding::Compact {
                let mut place = part.clone();
                place.offsets.iter_mut().zip(&chunk.extent.offsets).for_each(|(inner, outer)| *inner += outer);
                let elements = volume(&part.shape).unwrap_or(0);
                let into = Buffer::pageable((2 * elements).max(1))?.into_region().slice(0, 2 * elements)?;
                checkpoint.read_box(&weight, &place, &row_major(&part.shape), &into, &AtomicU64::new(0))?;
                look(checkpoint, &into, &mut weights)?;
            }
            flush(&mut values, &mut weights, false)
        })?;
        flush(&mut values, &mut weights, true)
    }

    /// The name of the parameter whose state it is.
    fn parameter(&self) -> &str {
        let of = self.tensor.strip_prefix(STATE).and_then(|rest| rest.rsplit_once('.'));
        of.map_or(self.tensor, |(parameter, _)| parameter)
    }

    /// Shows elements of the chunk, or of a part of its encoding, in order, with the boxes that they are.
    fn visit(
        &self,
        checkpoint: &Checkpoint,
        (dtype, shape): (&str, &[u64]),
        kept: Option<usize>,
        see: &mut dyn FnMut(&TensorBox, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let width = element_bytes(dtype).unwrap_or(1);
        let whole = TensorBox::whole(shape);
        let most = PART_ELEMENTS.min(volume(shape).unwrap_or(0)).max(1);
        let memory = Buffer::pageable(width * most)?;
        let mut bytes = Vec::new();
        for part in split(shape, &whole, PART_ELEMENTS) {
            let into = memory.region(0, width * volume(&part.shape).unwrap_or(0))?;
            let request = Request {
                tensor: self.tensor.to_owned(),
                chunk: self.chunk,
                strides: row_major(&part.shape),
                part: part.clone(),
                into: into.clone(),
                kept,
            };
            checkpoint.read(&[request], 1, &AtomicU64::new(0))?;
            bytes.clear();
            look(checkpoint, &into, &mut bytes)?;
            see(&part, &bytes)?;
        }
        Ok(())
    }
}

/// Appends the bytes of a region.
fn look(checkpoint: &Checkpoint, region: &Region, to: &mut Vec<u8>) -> Result<()> {
    let looked = file::visit(region, |piece| to.extend_from_slice(piece));
    looked.map_err(|error| Error::file("read", checkpoint.folder(), &error))
}

/// A new file with the checksums of its blocks.
struct Summed {
    path: PathBuf,
    file: File,
    at: u64,
    sum: crc32fast::Hasher,
    blocks: Vec<u32>,
}

impl Summed {
    fn new(path: &Path) -> Result<Self> {
        let opened = OpenOptions::new().write(true).create_new(true).open(path);
        let file = opened.map_err(|error| Error::file("write", path, &error))?;
        Ok(Self { path: path.to_owned(), file, at: 0, sum: crc32fast::Hasher::new(), blocks: Vec::new() })
    }

    fn put(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|error| Error::file("write", &self.path, &error))?;
        while !bytes.is_empty() {
            let room = BLOCK_BYTES - self.at % BLOCK_BYTES;
            let (piece, rest) = bytes.split_at(bytes.len().min(room as usize));
            self.sum.update(piece);
            self.at += piece.len() as u64;
            if self.at.is_multiple_of(BLOCK_BYTES) {
                self.blocks.push(std::mem::take(&mut self.sum).finalize());
            }
            bytes = rest;
        }
        Ok(())
    }

    /// Its length and checksums, when it is on the disk.
    fn finish(mut self) -> Result<(u64, Vec<u32>)> {
        if !self.at.is_multiple_of(BLOCK_BYTES) {
            self.blocks.push(self.sum.finalize());
        }
        self.file.sync_all().map_err(|error| Error::file("sync", &self.path, &error))?;
        Ok((self.at, self.blocks))
    }
}
