//! The contents of a checkpoint, and whether every byte is as it was written.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use forebay_device::{Buffer, file};
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Serialize;
use serde_json::{Map, Value};

use super::boxes::TensorBox;
use super::encoding::Encoding;
use super::manifest::{FileRange, Manifest, StoredPart, Tensor};
use super::{Checkpoint, Request};
use crate::error::{Error, Result};

/// Something wrong with a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// The file.
    pub file: String,
    /// What is wrong with it.
    pub reason: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file, self.reason)
    }
}

/// Checks every checksum of every file, that every byte of data belongs to one tensor, that the files say the same about
/// their entries as the manifest, and that scales are such as encodings have. `read` counts bytes. The manifest itself was checked when it was opened.
pub fn verify(checkpoint: &Checkpoint, read: &AtomicU64) -> Result<Vec<Problem>> {
    let manifest = checkpoint.manifest();
    let mut problems = Vec::new();
    let mut buffer = Vec::new();
    for (index, record) in manifest.files.iter().enumerate() {
        let mut wrong = |reason: String| problems.push(Problem { file: record.name.clone(), reason });
        let (opened, path) = checkpoint.open_file(index)?;
        for (block, &stated) in record.blocks.iter().enumerate() {
            let begin = block as u64 * manifest.block_bytes;
            let end = (begin + manifest.block_bytes).min(record.bytes);
            buffer.resize((end - begin) as usize, 0);
            opened.read_exact_at(&mut buffer, begin).map_err(|error| Error::file("read", &path, &error))?;
            let found = crc32fast::hash(&buffer);
            if found != stated {
                wrong(format!("block {block}, bytes {begin}..{end}: checksum {found:08x} instead of {stated:08x}"));
            }
            read.fetch_add(end - begin, Relaxed);
        }
        match Header::read(&opened, record.bytes) {
            Err(reason) => wrong(reason),
            Ok(header) => check_entries(manifest, index, &header).into_iter().for_each(&mut wrong),
        }
        for (name, place) in scales(manifest, index) {
            buffer.resize((place.end - place.begin) as usize, 0);
            opened.read_exact_at(&mut buffer, place.begin).map_err(|error| Error::file("read", &path, &error))?;
            let scales = buffer.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            if let Some((block, scale)) = scales.enumerate().find(|(_, scale)| !is_scale(*scale)) {
                wrong(format!("{name:?}: block {block} of its elements has the scale {scale}"));
            }
        }
    }
    Ok(problems)
}

/// The scales that one file has, with their tensors.
fn scales(manifest: &Manifest, index: usize) -> impl Iterator<Item = (&String, FileRange)> {
    let chunks =
        manifest.tensors.iter().flat_map(|(name, tensor)| tensor.chunks.iter().map(move |chunk| (name, chunk)));
    let scaled = chunks.filter(|(_, chunk)| matches!(manifest.encoding(chunk), Ok(Some(Encoding::Blocks { .. }))));
    scaled.filter_map(|(name, chunk)| Some((name, chunk.beside.clone()?))).filter(move |(_, place)| place.file == index)
}

/// Whether a block may have this scale: the largest magnitude of its numbers, zero, or what is not a number.
fn is_scale(scale: f32) -> bool {
    scale.is_nan() || scale.to_bits() == 0 || (scale.is_normal() && scale > 0.0)
}

/// The longest header that readers of safetensors accept.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// What the header of a safetensors file says.
pub(super) struct Header {
    /// Where the data begins in the file.
    pub(super) start: u64,
    pub(super) entries: BTreeMap<String, HeaderEntry>,
    /// The texts that are kept beside the tensors.
    pub(super) texts: HashMap<String, String>,
}

/// A tensor of a safetensors file.
pub(super) struct HeaderEntry {
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    /// Where the tensor begins, counted from the start of the data.
    pub(super) begin: u64,
    /// Where the tensor ends.
    pub(super) end: u64,
}

impl Header {
    /// Reads the header of an open file.
    pub(super) fn read(opened: &File, file_bytes: u64) -> std::result::Result<Self, String> {
        let mut length = [0; 8];
        opened.read_exact_at(&mut length, 0).map_err(|error| format!("no safetensors header: {error}"))?;
        let length = u64::from_le_bytes(length);
        let start = length.checked_add(8).filter(|&start| start <= file_bytes && length <= MAX_HEADER_BYTES);
        let Some(start) = start else {
            return Err(format!("a safetensors header of {length} bytes in a file of {file_bytes}"));
        };
        let mut text = vec![0; length as usize];
        opened.read_exact_at(&mut text, 8).map_err(|error| format!("no safetensors header: {error}"))?;
        let metadata: Metadata =
            serde_json::from_slice(&text).map_err(|error| format!("not a safetensors header: {error}"))?;
        if start + metadata.data_len() as u64 != file_bytes {
            return Err(format!("{} bytes of data behind a header for {}", file_bytes - start, metadata.data_len()));
        }
        let entry = |info: &TensorInfo| HeaderEntry {
            dtype: info.dtype.to_string(),
            shape: info.shape.iter().map(|&side| side as u64).collect(),
            begin: info.data_offsets.0 as u64,
            end: info.data_offsets.1 as u64,
        };
        let entries = metadata.tensors().iter().map(|(name, info)| (name.clone(), entry(info))).collect();
        Ok(Self { start, entries, texts: metadata.metadata().clone().unwrap_or_default() })
    }
}

/// Compares the manifest's chunks of one file with the entries of the file's header: both must be the same list.
fn check_entries(manifest: &Manifest, index: usize, header: &Header) -> Vec<String> {
    let mut stated: Vec<_> = manifest
        .tensors
        .iter()
        .flat_map(|(name, tensor)| tensor.chunks.iter().map(move |chunk| (name, tensor, chunk)))
        .flat_map(|(name, tensor, chunk)| {
            manifest.parts(tensor, chunk).unwrap_or_default().into_iter().map(move |part| (name, part))
        })
        .filter(|(_, part)| part.place.file == index)
        .map(|(name, StoredPart { dtype, shape, place })| ((place.begin, place.end, dtype, shape), name.clone()))
        .collect();
    let place = |HeaderEntry { dtype, shape, begin, end }: &HeaderEntry| {
        (header.start + begin, header.start + end, dtype.clone(), shape.clone())
    };
    let mut found: Vec<_> = header.entries.iter().map(|(name, entry)| (place(entry), name.clone())).collect();
    stated.sort();
    found.sort();
    let mut problems = Vec::new();
    for (place, name) in &stated {
        if found.binary_search_by(|(other, _)| other.cmp(place)).is_err() {
            problems.push(format!("{name:?} at {}..{} is not an entry of the file", place.0, place.1));
        }
    }
    for (place, name) in &found {
        if stated.binary_search_by(|(other, _)| other.cmp(place)).is_err() {
            problems.push(format!("its entry {name:?} at {}..{} is not in the manifest", place.0, place.1));
        }
    }
    problems
}

/// What is in a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Its folder.
    pub path: String,
    /// The optimizer's step: the highest of its tensors' counters.
    pub step: Option<f64>,
    /// Bytes that files have of all tensors.
    pub tensor_bytes: u64,
    /// Bytes of all files, the manifest not counted.
    pub file_bytes: u64,
    /// How many files there are.
    pub files: usize,
    /// The tensors.
    pub tensors: Vec<TensorSummary>,
    /// The optimizer's groups: their options, and the names of their parameters.
    pub groups: Vec<Map<String, Value>>,
    /// The other values that are no tensors.
    pub objects: BTreeMap<String, Value>,
    /// Who wrote it.
    pub made_by: BTreeMap<String, String>,
}

/// One tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorSummary {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// In how many chunks it is stored.
    pub shards: usize,
    /// Bytes that files have of it.
    pub bytes: u64,
    /// In which formats boxes of it are kept, if they are kept in fewer bytes than their numbers have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
}

/// The formats of a tensor's boxes.
fn format_of(manifest: &Manifest, tensor: &Tensor) -> Option<String> {
    let kinds = tensor.chunks.iter().filter(|chunk| !chunk.extent.shape.contains(&0));
    let kinds: BTreeSet<&str> = kinds
        .filter_map(|chunk| manifest.encoding(chunk).ok())
        .map(|encoding| encoding.map_or("f32", Encoding::kind))
        .collect();
    let is_plain = kinds.iter().all(|kind| *kind == "f32");
    (!is_plain).then(|| kinds.into_iter().collect::<Vec<_>>().join(", "))
}

/// Says what is in a checkpoint.
pub fn summarise(checkpoint: &Checkpoint) -> Result<Summary> {
    let manifest = checkpoint.manifest();
    let tensors = manifest.tensors.iter().map(|(name, tensor)| TensorSummary {
        name: name.clone(),
        dtype: tensor.dtype.clone(),
        shape: tensor.shape.clone(),
        shards: tensor.chunks.len(),
        bytes: tensor.stored_bytes(),
        format: format_of(manifest, tensor),
    });
    let (groups, objects) = split_groups(manifest);
    Ok(Summary {
        path: checkpoint.folder().display().to_string(),
        step: highest_step(checkpoint)?,
        tensor_bytes: manifest.tensor_bytes(),
        file_bytes: manifest.files.iter().map(|file| file.bytes).fold(0, u64::saturating_add),
        files: manifest.files.len(),
        tensors: tensors.collect(),
        groups,
        objects,
        made_by: manifest.made_by.clone(),
    })
}

/// Puts the groups together again: they are stored value by value.
fn split_groups(manifest: &Manifest) -> (Vec<Map<String, Value>>, BTreeMap<String, Value>) {
    let mut groups: BTreeMap<u64, Map<String, Value>> = BTreeMap::new();
    let mut others = BTreeMap::new();
    for (name, value) in &manifest.objects {
        match manifest.paths.get(name).map(Vec::as_slice) {
            Some([.., parent, number, key]) if parent == "param_groups" && number.is_u64() && key.is_string() => {
                let (number, key) = (number.as_u64().unwrap_or(0), key.as_str().unwrap_or_default());
                groups.entry(number).or_default().insert(key.to_owned(), value.clone());
            }
            _ => drop(others.insert(name.clone(), value.clone())),
        }
    }
    (groups.into_values().collect(), others)
}

fn highest_step(checkpoint: &Checkpoint) -> Result<Option<f64>> {
    let counters: Vec<&String> = checkpoint
        .manifest()
        .tensors
        .iter()
        .filter(|(name, tensor)| name.ends_with(".step") && tensor.dtype == "F32" && tensor.shape.is_empty())
        .map(|(name, _)| name)
        .collect();
    if counters.is_empty() {
        return Ok(None);
    }
    let memory = Buffer::pageable(4 * counters.len() as u64)?;
    let request = |(i, name): (usize, &&String)| -> Result<Request> {
        Ok(Request {
            tensor: (*name).clone(),
            chunk: 0,
            part: TensorBox::whole(&[]),
            into: memory.region(4 * i as u64, 4)?,
            strides: Vec::new(),
            kept: None,
        })
    };
    let requests = counters.iter().enumerate().map(request).collect::<Result<Vec<_>>>()?;
    checkpoint.read(&requests, 1, &AtomicU64::new(0))?;
    let mut bytes = Vec::new();
    let looked = file::visit(&memory.all(), |piece| bytes.extend_from_slice(piece));
    looked.map_err(|error| Error::file("read", Path::new("memory"), &error))?;
    let steps = bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
    Ok(steps.filter(|step| step.is_finite()).reduce(f64::max))
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        Self::Checkpoint { path: problem.file, reason: problem.reason }
    }
}
