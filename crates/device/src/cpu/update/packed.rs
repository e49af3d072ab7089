//! Columns in fewer bits than an f32, a block at a time; see [`crate::update::format`].
//!
//! The loops are plain and compiled for each vector unit: over arrays of a fixed length, without a branch, the compiler
//! makes vectors of them. All of them are integers and single roundings, so the bits are the same.

use std::ops::Range;

use super::convert::{bf16_to_f32, f32_to_bf16};
use super::{Unit, prefetch};
use crate::update::format::{self, Code, Moment, bf16_at_random, random, scale_of};
use crate::update::{MAX_COLUMNS, Rule, RuleColumn, Segment};

/// Elements that are widened at a time.
pub(crate) const BLOCK: usize = format::BLOCK as usize;

/// How many blocks ahead codes are prefetched. A block of them is four cache lines, which is little for the time that its
/// update takes.
const BLOCKS_AHEAD: usize = 2;

/// The numbers of one block of each column, as f32.
#[repr(align(64))]
pub(super) struct Blocks([[f32; BLOCK]; MAX_COLUMNS]);

impl Default for Blocks {
    fn default() -> Self {
        Self([[0.0; BLOCK]; MAX_COLUMNS])
    }
}

/// A column in fewer bits, at these addresses.
#[derive(Clone, Copy)]
pub(crate) enum Kept {
    Bf16(usize),
    Blocks { codes: usize, scales: usize, signed: bool },
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
        let columns = std::array::from_fn(|i| Kept::of(rule.columns.get(i)?, segment.state[i].as_ref()?));
        Self { columns, keys: segment.keys, first: segment.first as u32 }
    }

    /// Widens a block of each column. Returns where the numbers of each are, for those that are kept in fewer bits.
    ///
    /// # Safety
    /// The segment's operands must be live memory that nobody else touches, and the range one block of it.
    pub(super) unsafe fn widen(
        &self,
        unit: Unit,
        block: &Range<usize>,
        to: &mut Blocks,
    ) -> [Option<usize>; MAX_COLUMNS] {
        let mut addresses = [None; MAX_COLUMNS];
        for ((column, numbers), address) in self.columns.iter().zip(&mut to.0).zip(&mut addresses) {
            let Some(column) = column else { continue };
            // SAFETY: as the caller promises.
            unsafe { column.widen(unit, block, &mut numbers[..block.len()]) };
            // The sweep reaches them by their address, as it does all operands.
            *address = Some(numbers.as_mut_ptr().expose_provenance());
        }
        addresses
    }

    /// Narrows them again.
    ///
    /// # Safety
    /// As [`Self::widen`].
    pub(super) unsafe fn narrow(&self, unit: Unit, block: &Range<usize>, from: &Blocks) {
        let first = self.first.wrapping_add(block.start as u32);
        for (i, (column, numbers)) in self.columns.iter().zip(&from.0).enumerate() {
            let Some(column) = column else { continue };
            let rounding = self.keys.map(|keys| (keys[i], first));
            // SAFETY: as the caller promises.
            unsafe { column.narrow(unit, block, &numbers[..block.len()], rounding) };
        }
    }
}

/// How numbers are rounded: at random with a key, from the index of the first one on, or to nearest.
type Rounding = Option<(u32, u32)>;

impl Kept {
    /// The memory of a column of a rule; `None` if that is f32.
    pub(crate) fn of(column: &RuleColumn, moment: &Moment) -> Option<Self> {
        match moment {
            Moment::F32(_) => None,
            Moment::Bf16(region) => Some(Self::Bf16(region.addr())),
            Moment::Blocks { codes, scales } => {
                Some(Self::Blocks { codes: codes.addr(), scales: scales.addr(), signed: column.signed })
            }
        }
    }

    /// Widens one block of the column.
    ///
    /// # Safety
    /// The column must be live memory that nobody else writes, with these elements, which begin a block and do not go
    /// beyond it.
    pub(crate) unsafe fn widen(&self, unit: Unit, block: &Range<usize>, to: &mut [f32]) {
        // SAFETY: as the caller promises; a unit is only made for a CPU with its instructions.
        unsafe {
            match unit {
                Unit::Portable => self.widen_with(block, to),
                #[cfg(target_arch = "x86_64")]
                Unit::Avx2 => self.widen_avx2(block, to),
                #[cfg(target_arch = "x86_64")]
                Unit::Avx512 => self.widen_avx512(block, to),
            }
        }
    }

    /// Narrows one block of the column.
    ///
    /// # Safety
    /// As [`Self::widen`], and nobody else may read it.
    pub(crate) unsafe fn narrow(&self, unit: Unit, block: &Range<usize>, from: &[f32], rounding: Rounding) {
        // SAFETY: as in `widen`.
        unsafe {
            match unit {
                Unit::Portable => self.narrow_with(block, from, rounding),
                #[cfg(target_arch = "x86_64")]
                Unit::Avx2 => self.narrow_avx2(block, from, rounding),
                #[cfg(target_arch = "x86_64")]
                Unit::Avx512 => self.narrow_avx512(block, from, rounding),
            }
        }
    }

    /// # Safety
    /// As [`Self::widen`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn widen_avx2(&self, block: &Range<usize>, to: &mut [f32]) {
        // SAFETY: as the caller promises.
        unsafe { self.widen_with(block, to) };
    }

    /// # Safety
    /// As [`Self::widen`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
    unsafe fn widen_avx512(&self, block: &Range<usize>, to: &mut [f32]) {
        // SAFETY: as the caller promises.
        unsafe { self.widen_with(block, to) };
    }

    /// # Safety
    /// As [`Self::narrow`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn narrow_avx2(&self, block: &Range<usize>, from: &[f32], rounding: Rounding) {
        // SAFETY: as the caller promises.
        unsafe { self.narrow_with(block, from, rounding) };
    }

    /// # Safety
    /// As [`Self::narrow`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
    unsafe fn narrow_avx512(&self, block: &Range<usize>, from: &[f32], rounding: Rounding) {
        // SAFETY: as the caller promises.
        unsafe { self.narrow_with(block, from, rounding) };
    }

    /// # Safety
    /// As [`Self::widen`].
    #[inline(always)]
    unsafe fn widen_with(&self, block: &Range<usize>, to: &mut [f32]) {
        // SAFETY: as the caller promises.
        unsafe {
            match *self {
                Self::Bf16(address) => {
                    ask::<u16>(address, block);
                    by_blocks(elements::<u16>(address, block), to, |kept, numbers| {
                        numbers.iter_mut().zip(kept).for_each(|(number, kept)| *number = bf16_to_f32(*kept));
                    });
                }
                Self::Blocks { codes, scales, signed } => {
                    ask::<u8>(codes, block);
                    let scale = elements::<f32>(scales, &scale_of_block(block))[0];
                    let codes = elements::<u8>(codes, block);
                    if signed {
                        by_blocks(codes, to, |codes, to| widen::<true>(codes, scale, to));
                    } else {
                        by_blocks(codes, to, |codes, to| widen::<false>(codes, scale, to));
                    }
                }
            }
        }
    }

    /// # Safety
    /// As [`Self::narrow`].
    #[inline(always)]
    unsafe fn narrow_with(&self, block: &Range<usize>, from: &[f32], rounding: Rounding) {
        // SAFETY: as the caller promises.
        unsafe {
            match *self {
                Self::Bf16(address) => {
                    by_blocks(from, elements::<u16>(address, block), |from, to| narrow_bf16(from, to, rounding));
                }
                Self::Blocks { codes, scales, signed } => {
                    let (scale, inverse) = scale_of(largest(from));
                    elements::<f32>(scales, &scale_of_block(block))[0] = scale;
                    let codes = elements::<u8>(codes, block);
                    if signed {
                        by_blocks(from, codes, |from, codes| narrow::<true>(from, inverse, codes, rounding));
                    } else {
                        by_blocks(from, codes, |from, codes| narrow::<false>(from, inverse, codes, rounding));
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

/// Asks for the cache lines of a later block.
#[inline(always)]
fn ask<T>(address: usize, block: &Range<usize>) {
    let lines = (BLOCK * size_of::<T>()).div_ceil(64);
    let first = (address as *const T).wrapping_add(block.start + BLOCKS_AHEAD * BLOCK).cast::<u8>();
    (0..lines).for_each(|line| prefetch(first.wrapping_add(64 * line)));
}

/// Over a block: as an array, whose length the compiler knows, if it is whole.
#[inline(always)]
fn by_blocks<A, B, F: Fn(&[A], &mut [B])>(from: &[A], to: &mut [B], each: F) {
    if let (Ok(from), Ok(to)) = (<&[A; BLOCK]>::try_from(from), <&mut [B; BLOCK]>::try_from(&mut *to)) {
        each(from, to);
    } else {
        each(from, to);
    }
}

const fn code(signed: bool) -> Code {
    if signed { Code::SIGNED } else { Code::UNSIGNED }
}

/// The largest bits among magnitudes.
#[inline(always)]
fn largest(numbers: &[f32]) -> u32 {
    numbers.iter().fold(0, |largest: u32, number| largest.max(number.to_bits() & 0x7fff_ffff))
}

/// Codes to numbers.
#[inline(always)]
fn widen<const SIGNED: bool>(codes: &[u8], scale: f32, to: &mut [f32]) {
    to.iter_mut().zip(codes).for_each(|(number, kept)| *number = code(SIGNED).share(*kept) * scale);
}

/// Numbers to codes.
#[inline(always)]
fn narrow<const SIGNED: bool>(numbers: &[f32], inverse: f32, codes: &mut [u8], rounding: Rounding) {
    match rounding {
        None => {
            let each = |(kept, number): (&mut u8, &f32)| *kept = code(SIGNED).nearest(*number, inverse, None);
            codes.iter_mut().zip(numbers).for_each(each);
        }
        Some((key, first)) => {
            for (i, (kept, number)) in codes.iter_mut().zip(numbers).enumerate() {
                *kept = code(SIGNED).nearest(*number, inverse, Some(random(key, first.wrapping_add(i as u32))));
            }
        }
    }
}

/// Numbers to bf16.
#[inline(always)]
fn narrow_bf16(numbers: &[f32], to: &mut [u16], rounding: Rounding) {
    match rounding {
        None => to.iter_mut().zip(numbers).for_each(|(kept, number)| *kept = f32_to_bf16(*number)),
        Some((key, first)) => {
            for (i, (kept, number)) in to.iter_mut().zip(numbers).enumerate() {
                *kept = bf16_at_random(*number, random(key, first.wrapping_add(i as u32)));
            }
        }
    }
}
