//! Host memory to and from files, with no copy of our own in between.
//!
//! As with [`crate::Device::read`] and [`crate::Device::write`], the caller has waited for the work that uses the memory.
//! If the bytes change meanwhile, the result is an unspecified mixture of old and new; a checksum detects that.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::AsRawFd as _;

use crate::memory::Region;

/// Most bytes that one system call is asked to move; Linux itself stops a little short of 2 GiB.
const CALL_BYTES: usize = 1 << 30;

/// Bytes handed to [`visit`]'s caller at a time: they stay in a core's own cache.
const VISIT_BYTES: usize = 64 << 10;

/// Writes a region of host memory into a file at an offset.
pub fn write_at(file: &File, offset: u64, from: &Region) -> Result<()> {
    let addr = host(from)?;
    transfer(offset, from.bytes(), |done, len, at| {
        // SAFETY: `len` bytes at this address lie in a live host region; the kernel only reads them.
        unsafe { libc::pwrite(file.as_raw_fd(), (addr + done) as *const _, len, at) }
    })
}

/// Reads a range of a file into a region of host memory.
pub fn read_at(file: &File, offset: u64, into: &Region) -> Result<()> {
    let addr = host(into)?;
    transfer(offset, into.bytes(), |done, len, at| {
        // SAFETY: `len` bytes at this address lie in a live host region. Any bytes may be written there: payload is
        // plain numbers, and nobody holds a reference into it.
        unsafe { libc::pread(file.as_raw_fd(), (addr + done) as *mut _, len, at) }
    })
}

/// Shows the bytes of a region of host memory, in order, a piece at a time. The pieces are copies.
pub fn visit(region: &Region, mut look: impl FnMut(&[u8])) -> Result<()> {
    let addr = host(region)?;
    let mut piece = [0u8; VISIT_BYTES];
    let total = region.bytes() as usize;
    let mut done = 0;
    while done < total {
        let len = (total - done).min(VISIT_BYTES);
        // SAFETY: the source lies in a live host region; the piece is our own.
        unsafe { std::ptr::copy_nonoverlapping((addr + done) as *const u8, piece.as_mut_ptr(), len) };
        look(&piece[..len]);
        done += len;
    }
    Ok(())
}

/// Copies one region of host memory into another of the same length, elsewhere.
pub fn copy(from: &Region, to: &Region) -> Result<()> {
    let (source, target) = (host(from)?, host(to)?);
    if from.bytes() != to.bytes() || from.overlaps(to) {
        return Err(Error::new(ErrorKind::InvalidInput, format!("{from:?} into {to:?}")));
    }
    // SAFETY: two live, disjoint host regions of that length.
    unsafe { std::ptr::copy_nonoverlapping(source as *const u8, target as *mut u8, from.bytes() as usize) };
    Ok(())
}

/// Copies bytes into a region of host memory of the same length.
pub fn fill(region: &Region, from: &[u8]) -> Result<()> {
    let addr = host(region)?;
    if region.bytes() != from.len() as u64 {
        return Err(Error::new(ErrorKind::InvalidInput, format!("{} bytes into {region:?}", from.len())));
    }
    // SAFETY: a live host region of that length; `from` is the caller's own and cannot overlap it.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), addr as *mut u8, from.len()) };
    Ok(())
}

/// Asks the system to start writing a range of a file to its disk, without waiting for it. A hint: errors show at `fsync`.
pub fn start_writeback(file: &File, offset: u64, bytes: u64) {
    #[cfg(target_os = "linux")]
    // SAFETY: takes numbers only; the descriptor is open for as long as `file` is borrowed.
    unsafe {
        libc::sync_file_range(file.as_raw_fd(), offset as i64, bytes as i64, libc::SYNC_FILE_RANGE_WRITE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, bytes);
}

/// What offset, length and memory must be multiples of where a file is written past the system's cache.
pub const DIRECT_BYTES: u64 = 4096;

/// Has a file written past the system's cache from now on, or through it again; returns whether that could be done. Not
/// every file system can.
pub fn bypass_cache(file: &File, bypass: bool) -> bool {
    #[cfg(target_os = "linux")]
    // SAFETY: both calls take numbers only; the descriptor is open for as long as `file` is borrowed.
    unsafe {
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        let wanted = if bypass { flags | libc::O_DIRECT } else { flags & !libc::O_DIRECT };
        flags >= 0 && libc::fcntl(file.as_raw_fd(), libc::F_SETFL, wanted) == 0
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        !bypass
    }
}

/// Makes the calling thread give way to others, in the use of the cores and of the disk. A hint: nothing depends on it.
pub fn give_way() {
    #[cfg(target_os = "linux")]
    // SAFETY: both calls take numbers only and act on the calling thread.
    unsafe {
        const BEST_EFFORT_LAST: libc::c_int = (2 << 13) | 7;
        const THIS_THREAD: libc::c_int = 1;
        libc::setpriority(libc::PRIO_PROCESS, 0, 10);
        libc::syscall(libc::SYS_ioprio_set, THIS_THREAD, 0, BEST_EFFORT_LAST);
    }
}

fn host(region: &Region) -> Result<usize> {
    if region.place().is_host() {
        Ok(region.addr())
    } else {
        Err(Error::new(ErrorKind::InvalidInput, format!("{region:?} is not host memory")))
    }
}

/// Repeats a call that may move fewer bytes than asked for, until all are moved.
fn transfer(offset: u64, bytes: u64, mut call: impl FnMut(usize, usize, i64) -> isize) -> Result<()> {
    let total = bytes as usize;
    let mut done = 0;
    while done < total {
        let at = i64::try_from(offset + done as u64).map_err(|_| Error::from(ErrorKind::FileTooLarge))?;
        match call(done, (total - done).min(CALL_BYTES), at) {
            0 => return Err(Error::from(ErrorKind::UnexpectedEof)),
            moved if moved > 0 => done += moved as usize,
            _ => {
                let error = Error::last_os_error();
                if error.kind() != ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}
