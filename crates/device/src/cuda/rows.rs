//! Several copies as one: equally long regions at equal distances are the rows of a two-dimensional copy.

use cudarc::driver::sys;

use crate::memory::{Place, Region};

/// Largest distance between two rows that the driver takes.
const MAX_PITCH: usize = (1 << 31) - 1;

/// A run of pairs at the head of a list, and the distances between its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    /// Pairs in the run; at least 1.
    pub(super) count: usize,
    from_pitch: usize,
    to_pitch: usize,
}

/// The longest run at the head of a non-empty list whose pairs are rows of one copy between host and device.
pub(super) fn evenly_spaced(pairs: &[(Region, Region)]) -> Rows {
    let single = Rows { count: 1, from_pitch: 0, to_pitch: 0 };
    let [(from, to), (next_from, next_to), ..] = pairs else { return single };
    let pitch = |a: &Region, b: &Region| b.addr().checked_sub(a.addr()).filter(|&pitch| pitch <= MAX_PITCH);
    let (Some(from_pitch), Some(to_pitch)) = (pitch(from, next_from), pitch(to, next_to)) else { return single };
    let width = from.bytes() as usize;
    if width == 0 || from_pitch < width || to_pitch < width || from.place() == to.place() {
        return single;
    }
    let fits = |row: usize, (row_from, row_to): &(Region, Region)| {
        row_from.bytes() as usize == width
            && row_to.bytes() as usize == width
            && row_from.addr() == from.addr() + row * from_pitch
            && row_to.addr() == to.addr() + row * to_pitch
            && from.reaches(row_from)
            && to.reaches(row_to)
    };
    let count = pairs.iter().enumerate().take_while(|&(row, pair)| fits(row, pair)).count();
    if count < 2 { single } else { Rows { count, from_pitch, to_pitch } }
}

impl Rows {
    /// The driver's description of the copy whose first row is this pair.
    pub(super) fn describe(&self, from: &Region, to: &Region) -> sys::CUDA_MEMCPY2D {
        let kind = |region: &Region| match region.place() {
            Place::Device => sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            Place::Pinned | Place::Pageable => sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        };
        // The driver reads the address that goes with the kind and ignores the other.
        sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: kind(from),
            srcHost: from.addr() as *const _,
            srcDevice: from.addr() as u64,
            srcArray: std::ptr::null_mut(),
            srcPitch: self.from_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: kind(to),
            dstHost: to.addr() as *mut _,
            dstDevice: to.addr() as u64,
            dstArray: std::ptr::null_mut(),
            dstPitch: self.to_pitch,
            WidthInBytes: from.bytes() as usize,
            Height: self.count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Buffer, DeviceId};
    use std::sync::Arc;

    fn memory(place: Place, pieces: &[(u64, u64)]) -> Buffer {
        Buffer::new(1 << 20, 1 << 16, place, Some(DeviceId::fresh()), Arc::new(())).in_pieces(pieces)
    }

    fn pairs(host: &Buffer, device: &Buffer, offsets: &[(u64, u64)]) -> Vec<(Region, Region)> {
        offsets.iter().map(|&(h, d)| (host.region(h, 256).unwrap(), device.region(d, 256).unwrap())).collect()
    }

    #[test]
    fn even_rows_become_one_copy_and_others_do_not() {
        let (host, device) = (memory(Place::Pinned, &[]), memory(Place::Device, &[]));
        let count = |offsets: &[(u64, u64)]| evenly_spaced(&pairs(&host, &device, offsets)).count;
        assert_eq!(count(&[(0, 0)]), 1);
        assert_eq!(count(&[(0, 0), (4096, 256), (8192, 512)]), 3);
        assert_eq!(count(&[(0, 0), (4096, 256), (8192, 1024)]), 2, "the third row is elsewhere");
        assert_eq!(count(&[(4096, 0), (0, 256)]), 1, "backwards");
        assert_eq!(count(&[(0, 0), (128, 256)]), 1, "rows that overlap");
        let copy = evenly_spaced(&pairs(&host, &device, &[(0, 0), (4096, 256)]))
            .describe(&host.region(0, 256).unwrap(), &device.region(0, 256).unwrap());
        assert_eq!((copy.srcPitch, copy.dstPitch, copy.WidthInBytes, copy.Height), (4096, 256, 256, 2));
    }

    #[test]
    fn rows_stay_in_one_registration() {
        let (host, device) = (memory(Place::Pinned, &[(0, 8192), (8192, 57_344)]), memory(Place::Device, &[]));
        let rows = evenly_spaced(&pairs(&host, &device, &[(0, 0), (4096, 256), (8192, 512)]));
        assert_eq!(rows.count, 2, "the third row is in another registration");
    }
}
