//! One file on its way to the disk: its checksums, whole pages if the system's cache is bypassed, and a limited rate.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use forebay_device::{Buffer, Region, file};

use super::CACHED_BYTES;
use crate::error::{Error, Result};
use crate::snapshot::{Pace, Snapshot, WriterPauses};

/// A file that is written from its first byte to its last.
pub(super) struct Sink<'a> {
    path: &'a Path,
    file: File,
    /// Bytes so far.
    at: u64,
    /// The buffer in which bytes are gathered, where the file is written past the system's cache: that takes whole pages.
    /// Byte `n` of the file lies at `n` modulo the buffer's length.
    gathered: Option<&'a Buffer>,
    sum: crc32fast::Hasher,
    snapshot: Option<&'a Snapshot>,
    pace: Pace,
    pauses: WriterPauses,
}

impl<'a> Sink<'a> {
    pub(super) fn new(
        path: &'a Path,
        file: File,
        gathered: Option<&'a Buffer>,
        snapshot: Option<&'a Snapshot>,
        bytes_per_s: Option<f64>,
    ) -> Self {
        let (sum, pace, pauses) = (crc32fast::Hasher::new(), Pace::new(bytes_per_s), WriterPauses::new());
        Self { path, file, at: 0, gathered, sum, snapshot, pace, pauses }
    }

    /// Adds a piece. Where bytes are gathered, the piece lies at its place in the buffer.
    pub(super) fn put(&mut self, piece: &Region) -> Result<()> {
        if let Some(snapshot) = self.snapshot {
            snapshot.yield_to_steps(&mut self.pauses);
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

    /// Adds host memory.
    pub(super) fn put_region(&mut self, part: &Region) -> Result<()> {
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

    /// Adds bytes.
    pub(super) fn put_bytes(&mut self, mut bytes: &[u8]) -> Result<()> {
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

    /// The most bytes that one piece may have.
    fn room(&self) -> u64 {
        CACHED_BYTES - self.gathered.map_or(0, |buffer| self.at % buffer.bytes())
    }

    /// Writes the last `bytes` bytes: whole pages past the system's cache, the rest through it.
    fn write_gathered(&self, buffer: &Buffer, bytes: u64) -> Result<()> {
        let (start, pages) = (self.at - bytes, bytes - bytes % file::DIRECT_BYTES);
        let write = |from, to| -> Result<std::io::Result<()>> {
            Ok(file::write_at(&self.file, start + from, &buffer.region(from, to - from)?))
        };
        let written = match write(0, pages)? {
            // Some file systems refuse only here. And a disk that is nearly full gives its true reason only this way.
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

    /// Ends a block: returns its checksum and asks for its bytes to be brought to the disk.
    pub(super) fn end_block(&mut self, start: u64, bytes: u64) -> u32 {
        file::start_writeback(&self.file, start, bytes);
        std::mem::take(&mut self.sum).finalize()
    }

    /// Writes what is left and returns the file, which is not synced yet.
    pub(super) fn finish(self) -> Result<File> {
        if let Some(buffer) = self.gathered {
            let left = self.at % buffer.bytes();
            self.write_gathered(buffer, left)?;
        }
        Ok(self.file)
    }

    fn fail(&self) -> impl Fn(std::io::Error) -> Error + '_ {
        |error| Error::file("write", self.path, &error)
    }
}
