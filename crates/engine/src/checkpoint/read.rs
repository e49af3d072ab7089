//! Reading: parts of files into memory, each block checked against its checksum.
//!
//! A few threads share the blocks that are needed. A block whose bytes all go to one range of memory is read straight into
//! it and summed there. Any other block is read into a buffer and summed before its bytes are copied out. So memory holds
//! unchecked bytes only where a checksum then fails, and that is an error.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use forebay_device::{Cores, Region, file};

use super::boxes::{TensorBox, runs, span_bytes};
use super::decode::Decoding;
use super::manifest::{Manifest, StoredChunk, StoredPart, Tensor};
use super::{CACHED_BYTES, MANIFEST, element_bytes, folder, refuse};
use crate::error::{Error, Result};

/// The longest manifest that is read; one of ten thousand tensors on a thousand ranks is a few hundred MiB.
const MAX_MANIFEST_BYTES: u64 = 2 << 30;

/// A checkpoint whose manifest and files fit together.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
}

/// A box of a stored chunk, and where its elements go.
#[derive(Debug, Clone)]
pub struct Request {
    /// The tensor's name.
    pub tensor: String,
    /// Which of its chunks.
    pub chunk: usize,
    /// The box inside the chunk.
    pub part: TensorBox,
    /// Host memory from the box's first element to its last.
    pub into: Region,
    /// The target's strides, in elements.
    pub strides: Vec<u64>,
    /// Which part of an encoded chunk to read as it is; `None` for its numbers. A part has the shape of
    /// [`Manifest::parts`], and the box is one of that shape.
    pub kept: Option<usize>,
}

/// A range of a file that goes to a range of memory.
#[derive(Debug, Clone, Copy)]
struct FilePiece {
    begin: u64,
    end: u64,
    request: usize,
    to: u64,
}

impl Checkpoint {
    /// Opens the checkpoint to load at a path, and checks its manifest and the lengths of its files.
    pub fn open(path: &Path) -> Result<Self> {
        let folder = folder::latest(path)?;
        let manifest_path = folder.join(MANIFEST);
        let fail = |error: std::io::Error| Error::file("read", &manifest_path, &error);
        let bytes = std::fs::metadata(&manifest_path).map_err(fail)?.len();
        if bytes > MAX_MANIFEST_BYTES {
            return refuse(&manifest_path, format!("{bytes} bytes; a manifest has at most {MAX_MANIFEST_BYTES}"));
        }
        let text = std::fs::read(&manifest_path).map_err(fail)?;
        let manifest = Manifest::parse(&text, &manifest_path)?;
        for file in &manifest.files {
            let path = folder.join(&file.name);
            let found = match std::fs::symlink_metadata(&path) {
                Ok(found) if found.is_file() => found.len(),
                Ok(_) => return refuse(&path, "not a file"),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    return refuse(&path, format!("missing; the manifest has it with {} bytes", file.bytes));
                }
                Err(error) => return Err(Error::file("find", &path, &error)),
            };
            if found != file.bytes {
                return refuse(&path, format!("{found} bytes where the manifest has {}", file.bytes));
            }
        }
        Ok(Self { folder, manifest })
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What it consists of.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Takes a tensor out of it.
    #[cfg(test)]
    pub(super) fn forget(&mut self, tensor: &str) {
        self.manifest.tensors.remove(tensor);
    }

    pub(super) fn open_file(&self, index: usize) -> Result<(File, PathBuf)> {
        let path = self.folder.join(&self.manifest.files[index].name);
        let opened = File::open(&path).map_err(|error| Error::file("read", &path, &error))?;
        Ok((opened, path))
    }

    /// The tensor and the chunk that a request names.
    pub(super) fn find(&self, request: &Request) -> Result<(&Tensor, &StoredChunk)> {
        let found = self.manifest.tensors.get(&request.tensor);
        match found.and_then(|tensor| Some((tensor, tensor.chunks.get(request.chunk)?))) {
            Some(found) => Ok(found),
            None => refuse(&self.folder, format!("no chunk {} of tensor {:?}", request.chunk, request.tensor)),
        }
    }

    /// What a request reads of the files: a whole chunk, or one part of its encoding.
    fn part(&self, request: &Request) -> Result<StoredPart> {
        let (tensor, chunk) = self.find(request)?;
        let parts = self.manifest.parts(tensor, chunk).unwrap_or_default();
        match parts.into_iter().nth(request.kept.unwrap_or(0)) {
            Some(part) => Ok(part),
            None => refuse(&self.folder, format!("no part {:?} of tensor {:?}", request.kept, request.tensor)),
        }
    }

    /// Refuses requests that do not fit the checkpoint or their memory, and cuts them into pieces of files.
    fn pieces(&self, requests: &[&Request]) -> Result<Vec<Vec<FilePiece>>> {
        let mut pieces: Vec<Vec<FilePiece>> = vec![Vec::new(); self.manifest.files.len()];
        for (index, &request) in requests.iter().enumerate() {
            let StoredPart { dtype, shape, place } = self.part(request)?;
            let TensorBox { offsets, shape: lengths } = &request.part;
            let width = element_bytes(&dtype).unwrap_or(1);
            let fits = request.part.is_inside(&shape)
                && span_bytes(&dtype, lengths, &request.strides) == Some(request.into.bytes());
            if !fits {
                return refuse(
                    &self.folder,
                    format!(
                        "tensor {:?}: {lengths:?} elements at {offsets:?} of a chunk of {:?} do not fit into {} bytes",
                        request.tensor,
                        shape,
                        request.into.bytes()
                    ),
                );
            }
            for run in runs(&shape, offsets, lengths, &request.strides) {
                let begin = place.begin + run.from * width;
                pieces[place.file].push(FilePiece {
                    begin,
                    end: begin + run.elements * width,
                    request: index,
                    to: run.to * width,
                });
            }
        }
        for file in &mut pieces {
            file.sort_unstable_by_key(|piece| (piece.begin, piece.end));
        }
        Ok(pieces)
    }

    /// Its manifest, as JSON.
    pub fn manifest_json(&self) -> Result<String> {
        serde_json::to_string(&self.manifest).or_else(|error| refuse(&self.folder, error.to_string()))
    }

    /// Host memory for a box of a chunk must have this many bytes: from the box's first element to its last. `kept` is a
    /// part of an encoding, as in a [`Request`].
    pub fn bytes_into(
        &self,
        tensor: &str,
        chunk: usize,
        kept: Option<usize>,
        shape: &[u64],
        strides: &[u64],
    ) -> Result<u64> {
        let Some(found) = self.manifest.tensors.get(tensor) else {
            return refuse(&self.folder, format!("no tensor {tensor:?}"));
        };
        let part = kept.and_then(|kept| {
            self.manifest.parts(found, found.chunks.get(chunk)?)?.into_iter().nth(kept).map(|part| part.dtype)
        });
        match span_bytes(part.as_ref().unwrap_or(&found.dtype), shape, strides) {
            Some(bytes) => Ok(bytes),
            None => {
                refuse(&self.folder, format!("tensor {tensor:?}: no memory has {shape:?} with strides {strides:?}"))
            }
        }
    }

    /// Reads all requests with at most `threads` threads; `read` counts bytes of files. Numbers that are encoded come as
    /// f32. Whatever can be refused is refused before any memory is written. After a wrong checksum the memory may hold
    /// anything.
    pub fn read(&self, requests: &[Request], threads: usize, read: &AtomicU64) -> Result<()> {
        let (mut plain, mut encoded) = (Vec::new(), Vec::new());
        for request in requests {
            match Decoding::of(self, request)? {
                Some(decoding) => encoded.push(decoding),
                None => plain.push(request),
            }
        }
        self.read_plain(&plain, threads, read)?;
        self.decode(&encoded, threads, read)
    }

    /// The same for requests whose bytes are in the files as they are wanted.
    pub(super) fn read_plain(&self, requests: &[&Request], threads: usize, read: &AtomicU64) -> Result<()> {
        let pieces = self.pieces(requests)?;
        let mut files = Vec::new();
        let mut blocks = Vec::new();
        for (index, pieces) in pieces.iter().enumerate().filter(|(_, pieces)| !pieces.is_empty()) {
            let mut last = None;
            for piece in pieces {
                let first = piece.begin / self.manifest.block_bytes;
                let end = piece.end.div_ceil(self.manifest.block_bytes);
                // Pieces are sorted by where they begin, so blocks come in order.
                let from = last.map_or(first, |last: u64| first.max(last + 1));
                for block in from..end {
                    blocks.push((files.len(), block));
                    last = Some(block);
                }
            }
            files.push((index, self.open_file(index)?, longest(pieces)));
        }
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let lock = || failed.lock().unwrap_or_else(PoisonError::into_inner);
        let work = || {
            let mut buffer = Vec::new();
            while let Some(&(slot, block)) = blocks.get(next.fetch_add(1, Relaxed)) {
                if lock().is_some() {
                    return;
                }
                let (index, (opened, path), longest) = &files[slot];
                let pieces = &pieces[*index];
                let reader = BlockReader { checkpoint: self, requests, pieces, longest: *longest, opened, path };
                match reader.read(*index, block, &mut buffer) {
                    Ok(bytes) => read.fetch_add(bytes, Relaxed),
                    Err(error) => {
                        lock().get_or_insert(error);
                        return;
                    }
                };
            }
        };
        let cores = Cores::here();
        std::thread::scope(|scope| {
            for _ in 1..threads.min(blocks.len()) {
                let _ = cores.spawn_scoped(scope, "forebay-checkpoint", work);
            }
            work();
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

fn longest(pieces: &[FilePiece]) -> u64 {
    pieces.iter().map(|piece| piece.end - piece.begin).max().unwrap_or(0)
}

/// Reads blocks of one file.
struct BlockReader<'a> {
    checkpoint: &'a Checkpoint,
    requests: &'a [&'a Request],
    pieces: &'a [FilePiece],
    /// The length of the longest piece: a piece that reaches into a block begins at most this far before it.
    longest: u64,
    opened: &'a File,
    path: &'a Path,
}

impl BlockReader<'_> {
    fn read(&self, file_index: usize, block: u64, buffer: &mut Vec<u8>) -> Result<u64> {
        let manifest = &self.checkpoint.manifest;
        let record = &manifest.files[file_index];
        let begin = block * manifest.block_bytes;
        let end = (begin + manifest.block_bytes).min(record.bytes);
        let fail = |error: std::io::Error| Error::file("read", self.path, &error);
        let stated = record.blocks[block as usize];
        let from = self.pieces.partition_point(|piece| piece.begin + self.longest <= begin);
        let touching =
            self.pieces[from..].iter().take_while(|piece| piece.begin < end).filter(|piece| piece.end > begin);
        let mut first_two = touching.clone();
        if let (Some(piece), None) = (first_two.next(), first_two.next())
            && piece.begin <= begin
            && piece.end >= end
        {
            let into = self.requests[piece.request].into.slice(piece.to + (begin - piece.begin), end - begin)?;
            let (mut sum, mut done) = (crc32fast::Hasher::new(), 0);
            while done < into.bytes() {
                let piece = into.slice(done, (into.bytes() - done).min(CACHED_BYTES))?;
                file::read_at(self.opened, begin + done, &piece).map_err(fail)?;
                file::visit(&piece, |bytes| sum.update(bytes)).map_err(fail)?;
                done += piece.bytes();
            }
            self.compare(block, stated, sum.finalize(), begin, end)?;
            return Ok(end - begin);
        }
        buffer.resize((end - begin) as usize, 0);
        self.opened.read_exact_at(buffer, begin).map_err(fail)?;
        self.compare(block, stated, crc32fast::hash(buffer), begin, end)?;
        for piece in touching {
            let (from, to) = (piece.begin.max(begin), piece.end.min(end));
            let into = self.requests[piece.request].into.slice(piece.to + (from - piece.begin), to - from)?;
            file::fill(&into, &buffer[(from - begin) as usize..(to - begin) as usize]).map_err(fail)?;
        }
        Ok(end - begin)
    }

    fn compare(&self, block: u64, stated: u32, found: u32, begin: u64, end: u64) -> Result<()> {
        if stated == found {
            return Ok(());
        }
        refuse(
            self.path,
            format!("damaged: block {block}, bytes {begin}..{end}, has checksum {found:08x} instead of {stated:08x}"),
        )
    }
}
