//! The kernels on the CPU: the reference that the GPU's are compared with. The update itself is in
//! [`super::update`].

use super::update::convert::{f32_to_bf16, f32_to_f16};
use super::update::{Sweep, Unit};
use crate::kernel::{Dtype, power_element, uniform_element};
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
        if flag[0] != 1 && gives_way(segment) {
            flag[0] = 1;
        }
    }
}

/// Whether the rounding of some master is not its weight.
///
/// # Safety
/// The segment's operands must be checked, and nobody else may write to them meanwhile.
unsafe fn gives_way(segment: &Segment) -> bool {
    let Some(master) = &segment.master else { return false };
    // SAFETY: as the caller promises; weight and master do not overlap.
    unsafe {
        let master = match master {
            Master::F32(master) => slice::<f32>(master),
            Master::Compact { low, carry } => {
                let (weights, carry) = (slice::<u16>(&segment.weight), slice::<u8>(carry));
                let pairs = weights.iter().zip(&*slice::<u16>(low)).enumerate();
                return pairs.fold(false, |gives, (i, (&weight, &low))| {
                    gives | !is_pair(weight, low, carry[i / 8] >> (i % 8) & 1 != 0)
                });
            }
        };
        match segment.weight_dtype {
            Dtype::F32 => differ(master, slice(&segment.weight), f32::to_bits),
            Dtype::Bf16 => differ(master, slice(&segment.weight), f32_to_bf16),
            Dtype::F16 => differ(master, slice(&segment.weight), f32_to_f16),
        }
    }
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
