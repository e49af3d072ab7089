//! Checkpoints: tensors in safetensors files and a manifest, written from their memory and read back into it.
//!
//! [Note: the format]
//! A checkpoint is a folder of safetensors files and one `manifest.json`. Every save to a path makes a folder with the next
//! number, `00000001`, `00000002`; the last one with a manifest is the checkpoint to load.
//!
//! - Each rank writes files of its own. An entry of a file is one chunk: a box of a tensor. Any tool that reads
//!   safetensors can open the files; the name of an entry that is a part of a tensor contains its ranges.
//! - The manifest has the type and shape of each tensor and, for each of its chunks, the box, the file and the bytes in
//!   it. Values that are no tensors are in the manifest itself, as JSON. There is no pickle anywhere.
//! - Each file is checksummed in blocks of `block_bytes`, header and all, with CRC-32 (zlib's). The manifest begins with
//!   `{"forebay_checkpoint":1,"crc32":"01234567",`, and that checksum covers every byte after this prefix. So each byte
//!   of each file is covered by one checksum.
//! - Boxes of a native checkpoint may be encoded: `encoding.rs` says how. Such a manifest begins with version 2, so that a
//!   program that knows no encodings refuses it.
//!
//! [Note: the commit]
//! Ranks write and `fsync` their files, then the folder. After that the coordinator writes the manifest under another
//! name, syncs it, renames it and syncs the folder. Before the rename the folder is incomplete: a load ignores it and the
//! next save removes it. After the rename the checkpoint is complete. Complete checkpoints are not touched before that,
//! and an old one is removed beginning with its manifest.
//!
//! [Note: what is checked]
//! Everything. A manifest is checked as a whole when it is opened: names stay inside the folder, sizes agree with each
//! other and with the files, and the chunks of a tensor cover it exactly once. Memory is allocated for what the manifest
//! contains, never for what it claims. Checksums are compared while reading.

mod boxes;
mod convert;
mod decode;
mod encoding;
mod folder;
mod host_copies;
mod manifest;
mod read;
mod reencode;
mod sink;
mod verify;
mod write;

#[cfg(test)]
mod native_tests;

pub use boxes::{CopyRun, TensorBox, dense_bytes, runs, span_bytes};
pub use convert::{export_weights, from_safetensors, to_safetensors};
pub use encoding::{Encoding, EncodingRecord};
pub use folder::{Saving, complete, latest, prune};
pub use host_copies::HostCopies;
pub use manifest::{FileRange, FileRecord, Manifest, StoredChunk, StoredPart, Tensor};
pub use read::{Checkpoint, Request};
pub use reencode::{Change, Changed, reencode};
pub use verify::{Problem, Summary, TensorSummary, summarise, verify};
pub use write::{FileEntry, WriteOptions, WrittenFile, write_files};

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::Error;

/// The manifest's name.
pub const MANIFEST: &str = "manifest.json";

/// Bytes that are checksummed, written and read together.
pub const BLOCK_BYTES: u64 = 8 << 20;

/// Bytes that one call writes or reads: they are summed while they are in a core's cache, so memory is read once.
const CACHED_BYTES: u64 = 1 << 20;

fn refuse<T>(path: &Path, reason: impl Into<String>) -> crate::error::Result<T> {
    Err(Error::Checkpoint { path: path.display().to_string(), reason: reason.into() })
}

/// The beginning of a safetensors file: the header's length and the header, padded so that the data is aligned.
fn encode_header(header: Map<String, Value>, align: usize) -> Vec<u8> {
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize((8 + text.len()).next_multiple_of(align) - 8, b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// Bytes of one element of a safetensors type.
pub fn element_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => 1,
        "U16" | "I16" | "F16" | "BF16" => 2,
        "U32" | "I32" | "F32" => 4,
        "U64" | "I64" | "F64" | "C64" => 8,
        _ => return None,
    })
}
