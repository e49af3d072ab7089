//! To and from one plain safetensors file.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use forebay_device::{Buffer, file};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use super::boxes::{TensorBox, row_major, runs, volume};
use super::decode::split;
use super::folder::{Saving, sync_folder};
use super::manifest::{FileRecord, Manifest, StoredChunk, Tensor};
use super::verify::{Header, HeaderEntry};
use super::{BLOCK_BYTES, Checkpoint, Request, element_bytes, encode_header, refuse, verify};
use crate::error::{Error, Result};

/// The texts of a plain file that hold values which are no tensors: beside tensors, safetensors has texts only.
const OBJECTS: &str = "forebay.objects";
const PATHS: &str = "forebay.paths";

/// Elements that are decoded before they are written.
const DECODED_ELEMENTS: u64 = 4 << 20;

/// The start of the names of a model's tensors in a checkpoint.
pub(super) const WEIGHTS: &str = "model.";

/// Writes all of a checkpoint into one file, each tensor whole, after comparing every checksum. `moved` counts bytes.
pub fn to_safetensors(checkpoint: &Checkpoint, target: &Path, moved: &AtomicU64) -> Result<()> {
    let manifest = checkpoint.manifest();
    let texts = json!({"format": "pt", OBJECTS: to_text(&manifest.objects), PATHS: to_text(&manifest.paths)});
    let all = manifest.tensors.iter().map(|(name, tensor)| (name.as_str(), (name.as_str(), tensor)));
    write_plain(checkpoint, all.collect(), texts, target, moved)
}

/// Writes a model's parameters and buffers into one file, under the model's own names, as other tools expect them. Every
/// checksum of the checkpoint is compared before. `moved` counts bytes.
pub fn export_weights(checkpoint: &Checkpoint, target: &Path, moved: &AtomicU64) -> Result<()> {
    let named = checkpoint.manifest().tensors.iter();
    let weights: Vec<_> =
        named.filter_map(|(name, tensor)| Some((name.strip_prefix(WEIGHTS)?, (name.as_str(), tensor)))).collect();
    if weights.is_empty() {
        return refuse(checkpoint.folder(), "it has no weights: no tensor in it was saved as a part of a model");
    }
    write_plain(checkpoint, weights, json!({"format": "pt"}), target, moved)
}

/// Writes tensors of a checkpoint, under these names, into one file that is complete or absent. What is encoded is
/// written as its numbers.
fn write_plain(
    checkpoint: &Checkpoint,
    mut order: Vec<(&str, (&str, &Tensor))>,
    texts: Value,
    target: &Path,
    moved: &AtomicU64,
) -> Result<()> {
    let problems = verify::verify(checkpoint, moved)?;
    if let Some(problem) = problems.into_iter().next() {
        return Err(problem.into());
    }
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), texts);
    order.sort_by_key(|(name, (_, tensor))| (std::cmp::Reverse(element_bytes(&tensor.dtype)), *name));
    let mut at = 0u64;
    let mut starts = Vec::with_capacity(order.len());
    for (name, (_, tensor)) in &order {
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + tensor.bytes()]});
        header.insert((*name).to_owned(), entry);
        starts.push(at);
        at += tensor.bytes();
    }
    let head = encode_header(header, 64);
    let data = head.len() as u64;

    // Written under another name first, so that the target is complete or absent.
    let partial = target.with_extension("partial");
    let fail = |error: std::io::Error| Error::file("write", &partial, &error);
    let out = File::create(&partial).map_err(fail)?;
    let outcome = (|| {
        out.write_all_at(&head, 0).map_err(fail)?;
        out.set_len(data + at).map_err(fail)?;
        let mut buffer = vec![0; BLOCK_BYTES as usize];
        for ((_, named), start) in order.iter().zip(starts) {
            copy_tensor(checkpoint, *named, (&out, &partial), data + start, &mut buffer, moved)?;
        }
        out.sync_all().map_err(fail)?;
        fs::rename(&partial, target).map_err(|error| Error::file("write", target, &error))?;
        sync_folder(target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new(".")))
    })();
    if outcome.is_err() {
        let _ = fs::remove_file(&partial);
    }
    outcome
}

fn copy_tensor(
    checkpoint: &Checkpoint,
    (name, tensor): (&str, &Tensor),
    (out, target): (&File, &Path),
    start: u64,
    buffer: &mut [u8],
    moved: &AtomicU64,
) -> Result<()> {
    let width = element_bytes(&tensor.dtype).unwrap_or(1);
    let strides = row_major(&tensor.shape);
    for (number, chunk) in tensor.chunks.iter().enumerate() {
        let TensorBox { offsets, shape } = &chunk.extent;
        if chunk.encoding.is_some() {
            copy_decoded(checkpoint, (name, number), (&tensor.shape, &chunk.extent), (out, target), start, moved)?;
            continue;
        }
        let base: u64 = offsets.iter().zip(&strides).map(|(offset, stride)| offset * stride).sum();
        let (source, path) = checkpoint.open_file(chunk.file)?;
        for run in runs(shape, &vec![0; shape.len()], shape, &strides) {
            let (mut done, bytes) = (0, run.elements * width);
            while done < bytes {
                let len = (bytes - done).min(buffer.len() as u64);
                let piece = &mut buffer[..len as usize];
                let read = source.read_exact_at(piece, chunk.begin + run.from * width + done);
                read.map_err(|error| Error::file("read", &path, &error))?;
                let written = out.write_all_at(piece, start + (base + run.to) * width + done);
                written.map_err(|error| Error::file("write", target, &error))?;
                done += len;
                moved.fetch_add(len, Relaxed);
            }
        }
    }
    Ok(())
}

/// Writes the numbers of an encoded chunk to their places in a plain file, a part at a time.
fn copy_decoded(
    checkpoint: &Checkpoint,
    (name, number): (&str, usize),
    (whole, extent): (&[u64], &TensorBox),
    (out, target): (&File, &Path),
    start: u64,
    moved: &AtomicU64,
) -> Result<()> {
    let strides = row_major(whole);
    let fail = |error: std::io::Error| Error::file("write", target, &error);
    let memory = Buffer::pageable(4 * DECODED_ELEMENTS)?;
    for part in split(&extent.shape, &TensorBox::whole(&extent.shape), DECODED_ELEMENTS) {
        let elements = volume(&part.shape).unwrap_or(0);
        let into = memory.region(0, 4 * elements)?;
        let request = Request {
            tensor: name.to_owned(),
            chunk: number,
            strides: row_major(&part.shape),
            part: part.clone(),
            into: into.clone(),
            kept: None,
        };
        checkpoint.read(&[request], 1, &AtomicU64::new(0))?;
        let offsets = part.offsets.iter().zip(&extent.offsets).zip(&strides);
        let base: u64 = offsets.map(|((inner, outer), stride)| (inner + outer) * stride).sum();
        for run in runs(&part.shape, &vec![0; part.shape.len()], &part.shape, &strides) {
            let piece = into.slice(4 * run.from, 4 * run.elements)?;
            file::write_at(out, start + 4 * (base + run.to), &piece).map_err(fail)?;
        }
        moved.fetch_add(4 * elements, Relaxed);
    }
    Ok(())
}

/// Makes a checkpoint of one plain file at a path. `moved` counts bytes.
pub fn from_safetensors(source: &Path, path: &Path, moved: &AtomicU64) -> Result<()> {
    let fail = |error: std::io::Error| Error::file("read", source, &error);
    let opened = File::open(source).map_err(fail)?;
    let bytes = opened.metadata().map_err(fail)?.len();
    let Header { start, entries, texts } = Header::read(&opened, bytes).or_else(|reason| refuse(source, reason))?;
    let saving = Saving::begin(path)?;
    let record = match copy_whole((&opened, source), bytes, saving.folder(), moved) {
        Ok(record) => record,
        Err(error) => {
            saving.discard();
            return Err(error);
        }
    };
    let tensor = |HeaderEntry { dtype, shape, begin, end }: HeaderEntry| {
        let chunk = StoredChunk::plain(TensorBox::whole(&shape), 0, start + begin, start + end);
        Tensor { dtype, shape, chunks: vec![chunk], weight: None }
    };
    let manifest = Manifest {
        block_bytes: BLOCK_BYTES,
        files: vec![record],
        tensors: entries.into_iter().map(|(name, entry)| (name, tensor(entry))).collect(),
        objects: from_text(texts.get(OBJECTS)),
        paths: from_text(texts.get(PATHS)),
        made_by: [("forebay".to_owned(), crate::VERSION.to_owned())].into(),
        ..Manifest::default()
    };
    saving.commit(&manifest, None)?;
    Ok(())
}

/// Copies a plain file into a checkpoint's folder as it is: it has the right format, and only needs checksums.
fn copy_whole((opened, source): (&File, &Path), bytes: u64, folder: &Path, moved: &AtomicU64) -> Result<FileRecord> {
    let name = "0-0.safetensors".to_owned();
    let target = folder.join(&name);
    let fail = |error: std::io::Error| Error::file("write", &target, &error);
    let mut out = OpenOptions::new().write(true).create_new(true).open(&target).map_err(fail)?;
    let (mut blocks, mut buffer, mut at) = (Vec::new(), vec![0; BLOCK_BYTES as usize], 0);
    while at < bytes {
        let len = (bytes - at).min(BLOCK_BYTES);
        let block = &mut buffer[..len as usize];
        opened.read_exact_at(block, at).map_err(|error| Error::file("read", source, &error))?;
        blocks.push(crc32fast::hash(block));
        out.write_all(block).map_err(fail)?;
        at += len;
        moved.fetch_add(len, Relaxed);
    }
    out.sync_all().map_err(fail)?;
    sync_folder(folder)?;
    Ok(FileRecord { name, bytes, blocks })
}

fn to_text<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// The value of a text that [`to_text`] made; an empty one where another tool wrote the file.
fn from_text<T: DeserializeOwned + Default>(text: Option<&String>) -> T {
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}
