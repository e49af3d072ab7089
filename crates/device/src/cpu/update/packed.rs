//! Columns in fewer bits than an f32, a block at a time; see [`crate::update::format`].
//!
//! The loops are plain: they are inlined into each compilation of the sweep, and over arrays of a fixed length, without a
//! branch, the compiler makes vectors of them. All of them are integers and single roundings, so the bits are the same.

use std::ops::Range;

use super::convert::{bf16_to_f32, f32_to_bf16};
use crate::update::format::{self, Code, Moment, bf16_at_random, random, scale_of};
use crate::update::{MAX_COLUMNS, Rule, Segment};

/// Elements that are widened at a time.
pub(super) const BLOCK: usize = format::BLOCK as usize;

/// The numbers of one block of each column, as f32.
#[repr(align(64))]
pub(super) struct Blocks([[f32; BLOCK]; MAX_COLUMNS]);

impl Default for Blocks {
    fn default() -> Self {
        Self([[0.0; BLOCK]; MAX_COLUMNS])
    }
}

/// A column in fewer bits.
#[derive(Clone, Copy)]
enum Kept {
    Bf16(usize),
    Blocks { codes: usize, scales: usize, code: Code },
}

/// The columns of a segment that are kept in fewer bits.
pub(super) struct Packed {
    columns: [Option<Kept>; MAX_COLUMNS],
    keys: Option<[u32; MAX_COLUMNS]>,
    /// The index in its parameter of the segment's first element, as far as random numbers depend on it.
    first: u32,
}

/// Elements of type `T` at an address.
///
/// # Safety
/// They must be live, aligned, valid for every bit pattern, and nobody else's.
#[inline(always)]
unsafe fn elements<'a, T>(address: usize, range: &Range<usize>) -> &'a mut [T] {
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts_mut((address as *mut T).add(range.start), range.len()) }
}

impl Packed {
    pub(super) fn of(rule: &Rule, segment: &Segment) -> Self {
        let kept = |i: usize| match segment.state[i].as_ref()? {
            Moment::F32(_) => None,
            Moment::Bf16(region) => Some(Kept::Bf16(region.addr())),
            Moment::Blocks { codes, scales } => {
                Some(Kept::Blocks { codes: codes.addr(), scales: scales.addr(), code: rule.columns[i].code() })
            }
        };
        Self { columns: std::array::from_fn(kept), keys: segment.keys, first: segment.first as u32 }
    }

    /// Widens a block of each column. Returns where the numbers of each are, for those that are kept in fewer bits.
    ///
    /// # Safety
    /// The segment's operands must be live memory that nobody else touches, and the range one block of it.
    #[inline(always)]
    pub(super) unsafe fn widen(&self, block: &Range<usize>, to: &mut Blocks) -> [Option<usize>; MAX_COLUMNS] {
        let mut addresses = [None; MAX_COLUMNS];
        for (i, column) in self.columns.iter().enumerate() {
            let Some(column) = column else { continue };
            let numbers = &mut to.0[i];
            // The sweep reaches them by their address, as it does all operands.
            addresses[i] = Some(numbers.as_mut_ptr().expose_provenance());
            // SAFETY: as the caller promises.
            unsafe {
                match *column {
                    Kept::Bf16(address) => {
                        let kept = elements::<u16>(address, block);
                        numbers.iter_mut().zip(kept).for_each(|(number, kept)| *number = bf16_to_f32(*kept));
                    }
                    Kept::Blocks { codes, scales, code } => {
                        let scale = elements::<f32>(scales, &scale_of_block(block))[0];
                        widen(&code, elements::<u8>(codes, block), scale, numbers);
                    }
                }
            }
        }
        addresses
    }

    /// Narrows them again.
    ///
    /// # Safety
    /// As [`Self::widen`].
    #[inline(always)]
    pub(super) unsafe fn narrow(&self, block: &Range<usize>, from: &mut Blocks) {
        let first = self.first.wrapping_add(block.start as u32);
        for (i, column) in self.columns.iter().enumerate() {
            let Some(column) = column else { continue };
            let numbers = &from.0[i][..block.len()];
            let key = self.keys.map(|keys| keys[i]);
            // SAFETY: as the caller promises.
            unsafe {
                match *column {
                    Kept::Bf16(address) => narrow_bf16(numbers, elements::<u16>(address, block), key, first),
                    Kept::Blocks { codes, scales, code } => {
                        let scale = narrow(&code, numbers, elements::<u8>(codes, block), key, first);
                        elements::<f32>(scales, &scale_of_block(block))[0] = scale;
                    }
                }
            }
        }
    }
}

/// The place of a block's scale.
fn scale_of_block(block: &Range<usize>) -> Range<usize> {
    block.start / BLOCK..block.start / BLOCK + 1
}

/// Codes to numbers.
#[inline(always)]
fn widen(code: &Code, codes: &[u8], scale: f32, to: &mut [f32]) {
    to.iter_mut().zip(codes).for_each(|(number, kept)| *number = code.share(*kept) * scale);
}

/// Numbers to codes; returns their scale.
#[inline(always)]
fn narrow(code: &Code, numbers: &[f32], codes: &mut [u8], key: Option<u32>, first: u32) -> f32 {
    let largest = numbers.iter().fold(0, |largest: u32, number| largest.max(number.to_bits() & 0x7fff_ffff));
    let (scale, inverse) = scale_of(largest);
    match key {
        None => {
            codes.iter_mut().zip(numbers).for_each(|(kept, number)| *kept = code.nearest(*number, inverse, None));
        }
        Some(key) => {
            for (i, (kept, number)) in codes.iter_mut().zip(numbers).enumerate() {
                *kept = code.nearest(*number, inverse, Some(random(key, first.wrapping_add(i as u32))));
            }
        }
    }
    scale
}

/// Numbers to bf16.
#[inline(always)]
fn narrow_bf16(numbers: &[f32], to: &mut [u16], key: Option<u32>, first: u32) {
    match key {
        None => to.iter_mut().zip(numbers).for_each(|(kept, number)| *kept = f32_to_bf16(*number)),
        Some(key) => {
            for (i, (kept, number)) in to.iter_mut().zip(numbers).enumerate() {
                *kept = bf16_at_random(*number, random(key, first.wrapping_add(i as u32)));
            }
        }
    }
}
