//! The kernels on the CPU: the reference that the GPU's are compared with. The update itself is in
//! [`super::update`].

use super::update::convert::{f32_to_bf16, f32_to_f16};
use super::update::{Sweep, Unit};
use crate::kernel::{Dtype, Mastered, power_element, uniform_element};
use crate::memory::Region;
use crate::update::master::is_pair;
use crate::update::{Master, Rule, Scalars, Segment};

/// The region as a slice of elements.
///
/// # Safety
/// The region must be live memory that the CPU can write, aligned and sized for `T`, whose every bit pattern is valid,
/// no other slice over any of it may be alive, and the region must outlive `'a`.
unsafe fn slice<'a, T>(region: &Region) -> &'a mut [T] {
    let len = region.bytes() as usize / size_of::<T>();
    if len == 0 {
        return &mut [];
    }
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts_mut(region.addr() as *mut T, len) }
}

/// Updates one segment. Operands were checked: live, equal in elements, aligned, and no two overlap.
pub(crate) fn update(rule: &Rule, segment: &Segment, scale: f32, scalars: &Scalars, unit: Unit, trust_master: bool) {
    let sweep = Sweep { scale, scalars, trust_master };
    // SAFETY: `Kernel::check` refused anything that is not live, aligned device memory of the right size, and operands
    // of one segment that overlap. Two streams that touch them unordered break the contract of `Device` and get
    // unspecified numbers.
    unsafe { unit.sweep(rule, segment, 0..segment.elements() as usize, sweep) };
}

/// Sets a checked flag if a master of a segment that is about to be updated gives way to its weight. A pass of its own, so
/// that an update without a flag does no more than before.
pub(crate) fn note_followed(segment: &Segment, followed: &Region) {
    // SAFETY: as in `update`; the flag is 4 bytes, aligned, and overlaps no operand.
    unsafe {
        let flag = slice::<u32>(followed);
        let gives_way = || match &segment.master {
            None => false,
            Some(Master::F32(master)) => gives_way(&segment.weight, segment.weight_dtype, master),
            Some(Master::Compact { low, carry }) => is_no_pair(&segment.weight, low, carry),
        };
        if flag[0] != 1 && gives_way() {
            flag[0] = 1;
        }
    }
}

/// Sets a checked flag if the rounding of some master is not its weight.
pub(crate) fn compare_masters(pairs: &[Mastered], flag: &Region) {
    // SAFETY: `Kernel::check` passed: weights and masters are live, aligned, equal in elements and disjoint.
    if pairs.iter().any(|pair| unsafe { gives_way(&pair.weight, pair.dtype, &pair.master) }) {
        // SAFETY: as above; the flag is 4 bytes, aligned.
        unsafe { slice::<f32>(flag)[0] = 1.0 };
    }
}

/// Writes the rounding of checked masters to their weights.
pub(crate) fn round_masters(pairs: &[Mastered]) {
    fn round<T: Copy>(masters: &[f32], weights: &mut [T], round: impl Fn(f32) -> T) {
        masters.iter().zip(weights).for_each(|(&master, weight)| *weight = round(master));
    }
    for Mastered { weight, dtype, master } in pairs {
        // SAFETY: as in `compare_masters`.
        unsafe {
            let master = slice::<f32>(master);
            match dtype {
                Dtype::F32 => round(master, slice(weight), f32::to_bits),
                Dtype::Bf16 => round(master, slice(weight), f32_to_bf16),
                Dtype::F16 => round(master, slice(weight), f32_to_f16),
            }
        }
    }
}

/// Whether the rounding of some master is not its weight.
///
/// # Safety
/// Weights and masters must be checked, and nobody else may write to them meanwhile.
unsafe fn gives_way(weight: &Region, dtype: Dtype, master: &Region) -> bool {
    // SAFETY: as the caller promises; weight and master do not overlap.
    unsafe {
        let master = slice::<f32>(master);
        match dtype {
            Dtype::F32 => differ(master, slice(weight), f32::to_bits),
            Dtype::Bf16 => differ(master, slice(weight), f32_to_bf16),
            Dtype::F16 => differ(master, slice(weight), f32_to_f16),
        }
    }
}

/// Whether some halves are not of a master of their weight.
///
/// # Safety
/// As for [`gives_way`].
unsafe fn is_no_pair(weight: &Region, low: &Region, carry: &Region) -> bool {
    // SAFETY: as the caller promises; the three do not overlap.
    let (weights, lows, carry) = unsafe { (slice::<u16>(weight), slice::<u16>(low), slice::<u8>(carry)) };
    let pairs = weights.iter().zip(&*lows).enumerate();
    pairs.fold(false, |gives, (i, (&weight, &low))| gives | !is_pair(weight, low, carry[i / 8] >> (i % 8) & 1 != 0))
}

/// Whether some weight does not have the bits of its rounded master.
fn differ<T: Copy + PartialEq>(masters: &[f32], weights: &[T], round: impl Fn(f32) -> T) -> bool {
    // A block at a time: without a branch for each element, so that it becomes vector code.
    const BLOCK: usize = 1024;
    let differs = |(masters, weights): (&[f32], &[T])| {
        let pairs = masters.iter().zip(weights);
        pairs.fold(false, |differs, (&master, &weight)| differs | (round(master) != weight))
    };
    masters.chunks(BLOCK).zip(weights.chunks(BLOCK)).any(differs)
}

/// Sets every byte of a checked region.
pub(crate) fn fill(dst: &Region, byte: u8) {
    // SAFETY: `Kernel::check` passed: live device memory of this backend, which is host memory.
    unsafe { slice::<u8>(dst) }.fill(byte);
}

/// Fills a checked region of f32.
pub(crate) fn uniform(dst: &Region, seed: u64, low: f32, high: f32) {
    // SAFETY: as in `fill`; `Kernel::check` also saw to alignment and size.
    let values = unsafe { slice::<f32>(dst) };
    values.iter_mut().enumerate().for_each(|(i, value)| *value = uniform_element(seed, i as u64, low, high));
}

/// Fills a checked region of f32 with powers.
pub(crate) fn powers(dst: &Region, base: f32, first: u64) {
    // SAFETY: as in `uniform`.
    let values = unsafe { slice::<f32>(dst) };
    values.iter_mut().enumerate().for_each(|(i, value)| *value = power_element(base, first + i as u64));
}

/// Adds the number of differing words to a count.
pub(crate) fn count_differences(a: &Region, b: &Region, count: &Region) {
    // Two views of one region are legal here, so these are read through pointers, one word at a time.
    let word = |region: &Region, i: u64| {
        // SAFETY: `Kernel::check` passed: both are live, aligned and `bytes / 4` words long.
        unsafe { ((region.addr() + i as usize * 4) as *const u32).read() }
    };
    let differing = (0..a.bytes() / 4).filter(|&i| word(a, i) != word(b, i)).count() as u64;
    // SAFETY: as in `fill`; 8 bytes, aligned.
    let total = unsafe { slice::<u64>(count) };
    total[0] = total[0].wrapping_add(differing);
}

/// Copies checked pairs, first to second.
pub(crate) fn copy_pairs(pairs: &[(Region, Region)]) {
    for (from, to) in pairs {
        // SAFETY: `Kernel::check` passed: live memory of this backend, equal in length and disjoint.
        unsafe {
            std::ptr::copy_nonoverlapping(from.addr() as *const u8, to.addr() as *mut u8, from.bytes() as usize);
        }
    }
}

/// The f32 in a checked flag region.
pub(crate) fn flag(region: &Region) -> f32 {
    // SAFETY: `Kernel::check` passed: live, aligned, 4 bytes.
    unsafe { (region.addr() as *const f32).read() }
}
