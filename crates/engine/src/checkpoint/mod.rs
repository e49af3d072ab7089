//! Checkpoints: tensors in safetensors files, written from where they lie and read back into place, and a manifest.
//!
//! [Note: the format]
//! A checkpoint is a folder of safetensors files and one `manifest.json`. A path that is saved to again and again holds
//! such folders under increasing numbers, `00000001`, `00000002`; the last one with a manifest is the checkpoint.
//!
//! - Each rank writes files of its own. An entry of a file is one chunk: a box of a tensor. Any tool that reads
//!   safetensors can open the files; an entry that is not the whole tensor has its ranges in its name.
//! - The manifest says for each tensor its type, its shape, and for each of its chunks the box it covers and the bytes of
//!   which file it is. Values that are no tensors stand in the manifest itself, as JSON. There is no pickle anywhere.
//! - Each file is checksummed in blocks of `block_bytes`, header and all, with CRC-32 (zlib's). The manifest begins with
//!   `{"forebay_checkpoint":1,"crc32":"01234567",`, and that checksum covers every byte after this prefix. So each byte
//!   of each file is covered by one checksum.
//!
//! [Note: the commit]
//! Ranks write and `fsync` their files, then the folder. When all have, the coordinator writes the manifest under another
//! name, syncs it, renames it and syncs the folder. Before the rename the folder is an incomplete leftover, which a load
//! ignores and the next save removes; after it the checkpoint is complete. Nothing that is complete is touched before
//! that, and an old checkpoint is removed by taking its manifest away first.
//!
//! [Note: who is trusted]
//! Nobody. A manifest is checked as a whole when it is opened: names stay inside the folder, sizes agree with each other
//! and with the files there are, the chunks of a tensor cover it exactly once. Memory is taken for what is in the
//! manifest, never for what it claims. Checksums are compared while reading.

mod boxes;
mod convert;
mod folder;
mod manifest;
mod pages;
mod read;
mod snapshot;
mod verify;
mod write;

pub use boxes::{Extent, Run, runs};
pub use convert::{from_safetensors, to_safetensors};
pub use folder::{Saving, complete, latest, prune};
pub use manifest::{Chunk, FileRecord, Manifest, Tensor};
pub use read::{Checkpoint, Request};
pub use snapshot::{PAGE_BYTES, Snapshot, SnapshotStats, Stepping, release_spare, spare_bytes};
pub use verify::{Problem, Summary, TensorSummary, summarise, verify};
pub use write::{Entry, WriteOptions, WrittenFile, write_files};

use std::io;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::Error;

/// The manifest's name.
pub const MANIFEST: &str = "manifest.json";

/// Bytes that are checksummed, written and read together.
pub const BLOCK_BYTES: u64 = 8 << 20;

/// Bytes that one call writes or reads: summed while they are still in a core's cache, so memory is gone through once.
const CACHED_BYTES: u64 = 1 << 20;

fn file_error(action: &'static str, path: &Path, error: &io::Error) -> Error {
    Error::File { action, path: path.display().to_string(), errno: error.raw_os_error(), text: error.to_string() }
}

fn refuse<T>(path: &Path, reason: impl Into<String>) -> crate::error::Result<T> {
    Err(Error::Checkpoint { path: path.display().to_string(), reason: reason.into() })
}

/// A safetensors file up to its data: the header's length and the header, padded so that the data begins aligned.
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
