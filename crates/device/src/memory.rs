//! Memory that a device can reach: buffers on it, page-locked slabs beside it, and ranges of either.
//!
//! A [`Buffer`] is an address, a length and an owner that frees it. Clones share the owner, so memory lives as long as
//! anything still uses it, including work queued on a CPU stream. Nothing here returns a reference into the bytes,
//! because the device may write them at any time. Bytes are reached through [`crate::Device::copy`],
//! [`crate::Device::launch`], and for host memory [`crate::Device::read`] and [`crate::Device::write`].

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::pinned::PinStats;

/// Alignment of every part of a slab and of every allocation, in bytes.
pub const ALIGN_BYTES: u64 = 256;

/// Largest range registered with the driver in one call, in bytes; one call fails from 512 GiB up.
pub const PIECE_BYTES: u64 = 64 << 30;

/// Which device some memory, stream or event belongs to; unique in the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(u64);

impl DeviceId {
    pub(crate) fn fresh() -> Self {
        Self(fresh_key())
    }
}

/// A number never given twice in this process; identifies buffers, streams and events in diagnostics.
pub(crate) fn fresh_key() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Where memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// On the device.
    Device,
    /// On the host, page-locked for one device.
    Pinned,
    /// On the host, ordinary memory.
    Pageable,
}

impl Place {
    /// Whether the CPU may read and write it.
    pub fn is_host(self) -> bool {
        self != Self::Device
    }
}

/// What keeps memory alive; dropping it gives the memory back.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// A block of memory that one device can reach.
#[derive(Clone)]
pub struct Buffer {
    addr: usize,
    bytes: u64,
    place: Place,
    device: Option<DeviceId>,
    key: u64,
    /// Where the driver's registrations begin, for a slab that has more than one.
    pieces: Option<Arc<[u64]>>,
    owner: Owner,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer#{}({:?}, {} bytes)", self.key, self.place, self.bytes)
    }
}

impl Buffer {
    pub(crate) fn new(addr: usize, bytes: u64, place: Place, device: Option<DeviceId>, owner: Owner) -> Self {
        Self { addr, bytes, place, device, key: fresh_key(), pieces: None, owner }
    }

    /// The same for a slab that is registered in several pieces.
    pub(crate) fn in_pieces(mut self, pieces: &[(u64, u64)]) -> Self {
        self.pieces = (pieces.len() > 1).then(|| pieces.iter().map(|&(start, _)| start).collect());
        self
    }

    /// Names memory that other code allocated, such as a torch tensor's.
    ///
    /// # Safety
    /// For as long as any clone of the buffer lives and until all work that was submitted with it has ended,
    /// `addr..addr + bytes` must be memory that `device` may read and write, at the stated place, and `owner` must keep
    /// it so.
    #[expect(unsafe_code, reason = "the caller vouches for an address")]
    pub unsafe fn borrow(
        addr: usize,
        bytes: u64,
        place: Place,
        device: DeviceId,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::ZeroSize { what: "a borrowed buffer" });
        }
        Ok(Self::new(addr, bytes, place, Some(device), owner))
    }

    /// Names host memory that other code allocated and that no device is asked to reach: for files.
    ///
    /// # Safety
    /// For as long as any clone of the buffer lives, `addr..addr + bytes` must be readable and writable memory of this
    /// process, and `owner` must keep it so.
    #[expect(unsafe_code, reason = "the caller vouches for an address")]
    pub unsafe fn borrow_host(addr: usize, bytes: u64, owner: Arc<dyn Any + Send + Sync>) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::ZeroSize { what: "a borrowed buffer" });
        }
        Ok(Self::new(addr, bytes, Place::Pageable, None, owner))
    }

    /// Allocates ordinary host memory, zeroed. Copies to and from it are slow; it exists to measure just that.
    pub fn pageable(bytes: u64) -> Result<Self> {
        let mapping = crate::pinned::HostMapping::new(bytes, 1)?;
        Ok(Self::new(mapping.addr(), bytes, Place::Pageable, None, Arc::new(mapping)))
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it lies.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Its address, for handing across a language border. Dereferencing it is the caller's `unsafe`.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// What keeps it alive.
    pub(crate) fn owner(&self) -> &(dyn Any + Send + Sync) {
        &*self.owner
    }

    /// How many clones name this memory, this one included.
    pub fn holders(&self) -> usize {
        Arc::strong_count(&self.owner)
    }

    #[cfg(feature = "testing")]
    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    /// What keeps the memory alive, without keeping it alive.
    #[cfg(feature = "testing")]
    pub(crate) fn weak_owner(&self) -> std::sync::Weak<dyn Any + Send + Sync> {
        Arc::downgrade(&self.owner)
    }

    /// All of it.
    pub fn all(&self) -> Region {
        Region { buffer: self.clone(), offset_bytes: 0, len_bytes: self.bytes }
    }

    /// All of it, from the buffer itself.
    pub fn into_region(self) -> Region {
        Region { offset_bytes: 0, len_bytes: self.bytes, buffer: self }
    }

    /// A part of it.
    pub fn region(&self, offset_bytes: u64, len_bytes: u64) -> Result<Region> {
        self.all().slice(offset_bytes, len_bytes)
    }
}

/// A range of a [`Buffer`]; it keeps the buffer alive.
#[derive(Debug, Clone)]
pub struct Region {
    buffer: Buffer,
    offset_bytes: u64,
    len_bytes: u64,
}

impl Region {
    /// A range of this range.
    pub fn slice(&self, offset_bytes: u64, len_bytes: u64) -> Result<Self> {
        let fits = offset_bytes.checked_add(len_bytes).is_some_and(|end| end <= self.len_bytes);
        if !fits {
            return Err(Error::OutOfRange { what: "region", offset_bytes, len_bytes, size_bytes: self.len_bytes });
        }
        Ok(Self { buffer: self.buffer.clone(), offset_bytes: self.offset_bytes + offset_bytes, len_bytes })
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Where it starts inside its buffer.
    pub fn offset_bytes(&self) -> u64 {
        self.offset_bytes
    }

    /// The buffer it is a range of.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Where it lies.
    pub fn place(&self) -> Place {
        self.buffer.place
    }

    /// The address of its first byte.
    pub fn addr(&self) -> usize {
        self.buffer.addr + self.offset_bytes as usize
    }

    /// Checks a host access of `bytes` bytes and gives the address to use.
    fn host_addr(&self, operation: &'static str, bytes: usize, device: DeviceId) -> Result<usize> {
        check_home(operation, self, device)?;
        if !self.place().is_host() || self.len_bytes != bytes as u64 {
            return Err(Error::BadOperands {
                operation,
                reason: format!("{self:?} and a host slice of {bytes} bytes"),
            });
        }
        Ok(self.addr())
    }

    #[expect(unsafe_code, reason = "host memory is reached by address")]
    pub(crate) fn read(&self, device: DeviceId, into: &mut [u8]) -> Result<()> {
        let addr = self.host_addr("read", into.len(), device)?;
        // SAFETY: live host memory of that length; `into` is the caller's own and cannot overlap a mapping of ours.
        unsafe { std::ptr::copy_nonoverlapping(addr as *const u8, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    #[expect(unsafe_code, reason = "host memory is reached by address")]
    pub(crate) fn write(&self, device: DeviceId, from: &[u8]) -> Result<()> {
        let addr = self.host_addr("write", from.len(), device)?;
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), addr as *mut u8, from.len()) };
        Ok(())
    }

    /// Whether one transfer may span from here to there: the same buffer, in one registration.
    pub(crate) fn reaches(&self, other: &Self) -> bool {
        let piece = |region: &Self| {
            self.buffer
                .pieces
                .as_ref()
                .map_or(0, |pieces| pieces.partition_point(|&start| start <= region.offset_bytes))
        };
        self.buffer.key == other.buffer.key && piece(self) == piece(other)
    }

    /// Whether both name at least one common byte.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.addr(), other.addr());
        self.buffer.place.is_host() == other.buffer.place.is_host()
            && a < b + other.len_bytes as usize
            && b < a + self.len_bytes as usize
    }
}

/// How the parts of a slab lie in it: decided before anything is allocated.
///
/// Parts start at multiples of [`ALIGN_BYTES`] in the order given. The driver registers a slab in pieces of limited
/// size; a part never straddles two pieces, so that every copy stays inside one registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlabLayout {
    parts: Vec<(u64, u64)>,
    pieces: Vec<(u64, u64)>,
    bytes: u64,
}

impl SlabLayout {
    /// Lays out parts of the given sizes. Empty parts are allowed and take no space.
    pub fn new(part_bytes: &[u64]) -> Result<Self> {
        Self::with_piece_limit(part_bytes, PIECE_BYTES)
    }

    /// The same with another limit on a piece, for tests and for drivers with smaller limits.
    pub fn with_piece_limit(part_bytes: &[u64], piece_limit_bytes: u64) -> Result<Self> {
        let page = crate::pinned::page_bytes();
        // Pieces are whole pages, so a limit is too.
        let piece_limit_bytes = piece_limit_bytes / page * page;
        let total = part_bytes.iter().try_fold(0u64, |sum, &bytes| sum.checked_add(bytes)?.checked_add(page));
        if total.is_none() {
            return Err(Error::InvalidOption {
                option: "slab parts",
                value: format!("{} of them", part_bytes.len()),
                remedy: "their sizes add up to more than can be addressed".to_owned(),
            });
        }
        let mut parts = Vec::with_capacity(part_bytes.len());
        let mut pieces: Vec<(u64, u64)> = Vec::new();
        let (mut piece_start, mut end) = (0u64, 0u64);
        for &bytes in part_bytes {
            if bytes > piece_limit_bytes {
                return Err(Error::InvalidOption {
                    option: "slab part",
                    value: format!("{bytes} bytes"),
                    remedy: format!("a part must fit into one registration of at most {piece_limit_bytes} bytes"),
                });
            }
            let mut start = end.next_multiple_of(ALIGN_BYTES);
            if start + bytes - piece_start > piece_limit_bytes {
                // Two registrations may not share a page.
                let boundary = end.next_multiple_of(page);
                pieces.push((piece_start, boundary - piece_start));
                (piece_start, start) = (boundary, boundary);
            }
            parts.push((start, bytes));
            end = start + bytes;
        }
        if end == 0 {
            return Err(Error::ZeroSize { what: "a slab" });
        }
        let bytes = end.next_multiple_of(page);
        pieces.push((piece_start, bytes - piece_start));
        Ok(Self { parts, pieces, bytes })
    }

    /// Bytes of the whole slab: the parts, their alignment, and the rest of the last page of each piece.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of parts.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Offset and length of each range that is registered in one call.
    pub fn pieces(&self) -> &[(u64, u64)] {
        &self.pieces
    }

    /// Offset and length of one part.
    pub fn part(&self, index: usize) -> Option<(u64, u64)> {
        self.parts.get(index).copied()
    }
}

/// One large page-locked allocation, cut into parts.
#[derive(Debug, Clone)]
pub struct Slab {
    buffer: Buffer,
    layout: Arc<SlabLayout>,
    stats: PinStats,
}

impl Slab {
    pub(crate) fn new(buffer: Buffer, layout: SlabLayout, stats: PinStats) -> Self {
        Self { buffer, layout: Arc::new(layout), stats }
    }

    /// Bytes of the whole slab.
    pub fn bytes(&self) -> u64 {
        self.layout.bytes()
    }

    /// The memory of one part.
    pub fn part(&self, index: usize) -> Result<Region> {
        let (offset, len) = self.layout.part(index).ok_or(Error::OutOfRange {
            what: "slab part",
            offset_bytes: index as u64,
            len_bytes: 1,
            size_bytes: self.layout.parts() as u64,
        })?;
        self.buffer.region(offset, len)
    }

    /// How the parts lie.
    pub fn layout(&self) -> &SlabLayout {
        &self.layout
    }

    /// All of it as one buffer.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// What pinning it cost.
    pub fn pin_stats(&self) -> PinStats {
        self.stats
    }

    /// Gives the slab back. Returns whether its memory is free now; `false` says that a region, a clone or queued work
    /// still names it, and that it goes when the last of them does.
    pub fn release(self) -> bool {
        self.buffer.holders() == 1
    }
}

/// Refuses memory of another device before its address reaches a driver.
pub(crate) fn check_home(operation: &'static str, region: &Region, device: DeviceId) -> Result<()> {
    match region.buffer.device {
        Some(home) if home != device => {
            Err(Error::BadOperands { operation, reason: format!("{:?} belongs to another device", region.buffer) })
        }
        _ => Ok(()),
    }
}
