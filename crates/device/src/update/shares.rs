//! Conversions of whole columns on the host: the checks of their operands, and their threads.

use std::ops::Range;

use super::Column;
use crate::error::{Error, Result};
use crate::memory::Region;

/// Elements that one thread converts.
pub(super) const SHARE_ELEMENTS: usize = 4 << 20;

/// Refuses columns of so many elements that are not aligned memory of the host, or that overlap.
pub(super) fn check(operation: &'static str, elements: u64, columns: &[(&Region, Column)]) -> Result<()> {
    let refuse = |reason: String| Err(Error::BadOperands { operation, reason });
    for (i, (region, column)) in columns.iter().enumerate() {
        let (bytes, align) = (column.bytes(elements), column.stored.bytes() as usize);
        if !region.place().is_host() || region.bytes() != bytes || !region.addr().is_multiple_of(align) {
            return refuse(format!("{}: {region:?} is not aligned host memory of {bytes} bytes", column.name));
        }
        if let Some((other, of)) = columns.iter().skip(i + 1).find(|(other, _)| region.overlaps(other)) {
            return refuse(format!("{} overlaps {}: {region:?} and {other:?}", column.name, of.name));
        }
    }
    Ok(())
}

/// Elements of a region.
///
/// # Safety
/// The region must be live host memory that is aligned for `T` and has these elements, `T` must be valid for every bit
/// pattern, and no other slice over any of them may be alive unless all of them are only read.
pub(super) unsafe fn elements<'a, T>(region: &Region, range: &Range<usize>) -> &'a mut [T] {
    if range.is_empty() {
        return &mut [];
    }
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts_mut((region.addr() as *mut T).add(range.start), range.len()) }
}

/// Ranges of so many elements, on several threads where there are many. Ranges begin at multiples of `aligned`.
pub(super) fn in_shares(elements: usize, aligned: usize, each: impl Fn(Range<usize>) + Sync) {
    let shares = elements.div_ceil(SHARE_ELEMENTS).clamp(1, crate::cpu::threads());
    let share = elements.div_ceil(shares).next_multiple_of(aligned);
    let range = |i: usize| (i * share).min(elements)..((i + 1) * share).min(elements);
    std::thread::scope(|scope| {
        (1..shares).for_each(|i| {
            let each = &each;
            scope.spawn(move || each(range(i)));
        });
        each(range(0));
    });
}
