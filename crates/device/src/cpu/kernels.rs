//! The kernels on the CPU: the reference that the GPU's are compared with.
//!
//! The update loop is written once, over blocks of f32, and compiled three times: for any CPU, for AVX2 with FMA and
//! for AVX-512. Half-precision operands are widened into a block on the stack and rounded back after it, so the loop
//! itself knows one type.

use half::f16;

use crate::arith::{AdamWElement, AdamWScalars, adamw_element, power_element, uniform_element};
use crate::kernel::{AdamWSegment, Dtype};
use crate::memory::Region;

/// Elements updated at a time: a few blocks fit the first-level cache.
const BLOCK: usize = 1024;

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

/// Rounds to nearest-even; every NaN becomes the one the GPU's conversion makes.
#[inline(always)]
pub(crate) fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() { 0x7fff } else { ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16 }
}

#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds to nearest-even; every NaN becomes the one the GPU's conversion makes.
#[inline(always)]
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    if value.is_nan() { 0x7fff } else { f16::from_f32(value).to_bits() }
}

#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// Widens part of a region into a block.
///
/// # Safety
/// As [`slice`], for the region's type.
unsafe fn widen(region: &Region, dtype: Dtype, start: usize, into: &mut [f32]) {
    let end = start + into.len();
    match dtype {
        // SAFETY: the caller promises it for the type named by `dtype`.
        Dtype::F32 => into.copy_from_slice(unsafe { &slice::<f32>(region)[start..end] }),
        Dtype::Bf16 | Dtype::F16 => {
            let convert = if dtype == Dtype::Bf16 { bf16_to_f32 } else { f16_to_f32 };
            // SAFETY: as above.
            let from = unsafe { &slice::<u16>(region)[start..end] };
            into.iter_mut().zip(from).for_each(|(to, &from)| *to = convert(from));
        }
    }
}

/// Rounds a block into part of a region.
///
/// # Safety
/// As [`slice`], for the region's type.
unsafe fn narrow(from: &[f32], region: &Region, dtype: Dtype, start: usize) {
    let end = start + from.len();
    match dtype {
        // SAFETY: the caller promises it for the type named by `dtype`.
        Dtype::F32 => unsafe { slice::<f32>(region)[start..end].copy_from_slice(from) },
        Dtype::Bf16 | Dtype::F16 => {
            let convert = if dtype == Dtype::Bf16 { f32_to_bf16 } else { f32_to_f16 };
            // SAFETY: as above.
            let into = unsafe { &mut slice::<u16>(region)[start..end] };
            into.iter_mut().zip(from).for_each(|(to, &from)| *to = convert(from));
        }
    }
}

/// Takes the master for every weight that is its rounding; see [`crate::arith`].
fn prefer_master(weights: &mut [f32], master: &[f32], dtype: Dtype) {
    let rounded: fn(f32) -> f32 = match dtype {
        Dtype::F32 => |value| value,
        Dtype::Bf16 => |value| bf16_to_f32(f32_to_bf16(value)),
        Dtype::F16 => |value| f16_to_f32(f32_to_f16(value)),
    };
    for (weight, &master) in weights.iter_mut().zip(master) {
        if rounded(master).to_bits() == weight.to_bits() {
            *weight = master;
        }
    }
}

/// The operands of one block, all of one length.
struct Block<'a> {
    p: &'a mut [f32],
    g: &'a [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
    x: Option<&'a mut [f32]>,
}

#[inline(always)]
fn update(block: Block<'_>, scale: f32, s: &AdamWScalars) {
    let Block { p, g, m, v, x } = block;
    let n = p.len();
    // Equal lengths, said so that the loops need no bounds checks and become vector code.
    let (g, m, v) = (&g[..n], &mut m[..n], &mut v[..n]);
    match x {
        None => {
            for i in 0..n {
                let new = adamw_element(AdamWElement { p: p[i], m: m[i], v: v[i], x: 0.0 }, g[i], scale, false, s);
                (p[i], m[i], v[i]) = (new.p, new.m, new.v);
            }
        }
        Some(x) => {
            let x = &mut x[..n];
            for i in 0..n {
                let new = adamw_element(AdamWElement { p: p[i], m: m[i], v: v[i], x: x[i] }, g[i], scale, true, s);
                (p[i], m[i], v[i], x[i]) = (new.p, new.m, new.v, new.x);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn update_avx2(block: Block<'_>, scale: f32, s: &AdamWScalars) {
    update(block, scale, s);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
fn update_avx512(block: Block<'_>, scale: f32, s: &AdamWScalars) {
    update(block, scale, s);
}

/// Which compilation of [`update`] this CPU runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Unit {
    /// All that this CPU has, the best last.
    pub(crate) fn available() -> Vec<Self> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut, reason = "only x86 has more than one"))]
        let mut units = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") {
                units.push(Self::Avx2);
                if has!("avx512f") && has!("avx512vl") && has!("avx512dq") && has!("avx512bw") {
                    units.push(Self::Avx512);
                }
            }
        }
        units
    }

    fn update(self, block: Block<'_>, scale: f32, s: &AdamWScalars) {
        match self {
            Self::Portable => update(block, scale, s),
            // SAFETY: a `Unit` other than `Portable` is only made after the CPU was asked for its features.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { update_avx2(block, scale, s) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { update_avx512(block, scale, s) },
        }
    }
}

/// Updates one segment. Operands were checked: live, equal in elements, aligned, and no two overlap.
pub(crate) fn adamw(segment: &AdamWSegment, scale: f32, s: &AdamWScalars, unit: Unit) {
    // SAFETY: `Kernel::check` refused anything that is not live, aligned device memory of the right size, and operands
    // of one segment that overlap, so these are the only slices over their bytes on this thread. Two streams that
    // touch them unordered break the contract of `Device` and get unspecified numbers.
    let (m, v, x, master) = unsafe {
        (
            slice::<f32>(&segment.exp_avg),
            slice::<f32>(&segment.exp_avg_sq),
            segment.max_exp_avg_sq.as_ref().map(|r| slice::<f32>(r)),
            segment.master.as_ref().map(|r| slice::<f32>(r)),
        )
    };
    let (mut x, mut master) = (x, master);
    let (mut weights, mut grads) = ([0f32; BLOCK], [0f32; BLOCK]);
    let mut start = 0;
    while start < m.len() {
        let range = start..(start + BLOCK).min(m.len());
        let (p, g) = (&mut weights[..range.len()], &mut grads[..range.len()]);
        // SAFETY: as above; neither the gradient nor the parameter overlaps the state.
        unsafe {
            widen(&segment.grad, segment.grad_dtype, start, g);
            widen(&segment.param, segment.param_dtype, start, p);
        }
        if let Some(master) = &master {
            prefer_master(p, &master[range.clone()], segment.param_dtype);
        }
        let block = Block {
            p,
            g,
            m: &mut m[range.clone()],
            v: &mut v[range.clone()],
            x: x.as_mut().map(|x| &mut x[range.clone()]),
        };
        unit.update(block, scale, s);
        let p = &weights[..range.len()];
        if let Some(master) = &mut master {
            master[range.clone()].copy_from_slice(p);
        }
        // SAFETY: as above.
        unsafe { narrow(p, &segment.param, segment.param_dtype, start) };
        start = range.end;
    }
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
pub(crate) fn powers(dst: &Region, beta: f32, first: u64) {
    // SAFETY: as in `uniform`.
    let values = unsafe { slice::<f32>(dst) };
    values.iter_mut().enumerate().for_each(|(i, value)| *value = power_element(beta, first + i as u64));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_precision_rounds_to_nearest_even_and_has_one_nan() {
        for (value, bits) in [(1.0f32, 0x3f80u16), (-2.5, 0xc020), (f32::INFINITY, 0x7f80), (f32::NAN, 0x7fff)] {
            assert_eq!(f32_to_bf16(value), bits, "{value}");
        }
        // Halfway between two bf16 values: to the even one, both ways.
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
        assert_eq!((f32_to_f16(65504.0), f32_to_f16(65520.0), f32_to_f16(f32::NAN)), (0x7bff, 0x7c00, 0x7fff));
        assert_eq!(f16_to_f32(0x3c00), 1.0);
    }

    /// One arithmetic, three compilations: the bits must not depend on the CPU.
    #[test]
    fn every_vector_unit_gives_the_scalar_bits() {
        let n = 3 * BLOCK + 17;
        let s = crate::arith::AdamWHyper { weight_decay: 0.1, ..Default::default() }.at_step(3);
        let start = |seed: u64, low: f32, high: f32| {
            (0..n as u64).map(|i| uniform_element(seed, i, low, high)).collect::<Vec<f32>>()
        };
        let g = start(1, -1.0, 1.0);
        let run = |unit: Unit| {
            let (mut p, mut m, mut v, mut x) =
                (start(2, -1.0, 1.0), start(3, -0.1, 0.1), start(4, 0.0, 0.1), start(5, 0.0, 0.1));
            let block = Block { p: &mut p, g: &g, m: &mut m, v: &mut v, x: Some(&mut x) };
            unit.update(block, 0.37, &s);
            [p, m, v, x].map(|values| values.iter().map(|f| f.to_bits()).collect::<Vec<_>>())
        };
        let reference = run(Unit::Portable);
        for unit in Unit::available() {
            assert_eq!(run(unit), reference, "{unit:?}");
        }
    }
}
