//! AdamW on the CPU: one sweep over a segment, from memory through registers and back.
//!
//! A vector of elements at a time: the gradient is widened where it is half precision, a master follows its weight, the
//! operations of [`crate::arith`] are applied, and master, moments and rounded weight are written. The sweep is written
//! once and compiled for each vector unit: for any CPU (on aarch64 that includes NEON), for AVX2 with FMA and F16C and
//! for AVX-512.

pub(crate) mod convert;
mod vector;

use std::ops::Range;
use std::sync::LazyLock;

use crate::arith::AdamWScalars;
use crate::error::{Error, Result};
use crate::kernel::{AdamWSegment, Dtype};
use crate::memory::Region;
use vector::Vector;

/// What every CPU of an architecture has.
#[cfg(target_arch = "aarch64")]
type Baseline = std::arch::aarch64::float32x4_t;
#[cfg(not(target_arch = "aarch64"))]
type Baseline = f32;

/// How many elements ahead memory is asked for: the time of about as many updates is what a line takes to come. AMD's
/// cores find five streams by themselves, and asking far ahead gets in their way; Intel's need to be asked. Measured: two
/// Zen 4 cores lose 2 to 4 % at 512 against 128, and 16 cores of a Xeon 4 % at 128 against 256.
fn ahead() -> usize {
    static AHEAD: LazyLock<usize> = LazyLock::new(|| if is_amd() { 128 } else { 256 });
    *AHEAD
}

#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_amd() -> bool {
    false
}

/// What one sweep needs to know besides its operands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sweep<'a> {
    pub(crate) scale: f32,
    pub(crate) scalars: &'a AdamWScalars,
    /// Whether masters follow weights. Where not, the weights are written and never read: the caller knows that they
    /// are their masters' rounding.
    pub(crate) follow: bool,
}

/// The numbers of a hyper-parameter set, in every lane.
#[derive(Clone, Copy)]
struct Lanes<V> {
    scale: V,
    minus_decay: V,
    beta1: V,
    one_minus_beta1: V,
    beta2: V,
    one_minus_beta2: V,
    step_size: V,
    bias_correction2_sqrt: V,
    eps: V,
}

impl<V: Vector> Lanes<V> {
    /// # Safety
    /// As [`Vector`]'s.
    #[inline(always)]
    unsafe fn new(scale: f32, s: &AdamWScalars) -> Self {
        // SAFETY: as the caller promises.
        unsafe {
            Self {
                scale: V::splat(scale),
                minus_decay: V::splat(-s.decay),
                beta1: V::splat(s.beta1),
                one_minus_beta1: V::splat(s.one_minus_beta1),
                beta2: V::splat(s.beta2),
                one_minus_beta2: V::splat(s.one_minus_beta2),
                step_size: V::splat(s.step_size),
                bias_correction2_sqrt: V::splat(s.bias_correction2_sqrt),
                eps: V::splat(s.eps),
            }
        }
    }
}

/// Asks for the cache line of an element before it is needed.
#[inline(always)]
fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address changes nothing and never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Orders streamed stores before what follows, for other threads and for devices.
#[inline(always)]
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a fence is part of the baseline of this architecture and takes no operands.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Elements of some type at an address.
#[derive(Clone, Copy)]
struct Elements {
    address: usize,
    dtype: Dtype,
}

impl Elements {
    fn new(region: &Region, dtype: Dtype) -> Self {
        Self { address: region.addr(), dtype }
    }

    #[inline(always)]
    fn at<T>(self, at: usize) -> *mut T {
        (self.address as *mut T).wrapping_add(at)
    }

    /// # Safety
    /// As [`Vector`]'s, for the elements from `at` on.
    #[inline(always)]
    unsafe fn load<V: Vector>(self, at: usize, ahead: usize) -> V {
        // SAFETY: as the caller promises.
        unsafe {
            match self.dtype {
                Dtype::F32 => {
                    prefetch::<f32>(self.at(at + ahead));
                    V::load(self.at(at))
                }
                Dtype::Bf16 => {
                    prefetch::<u16>(self.at(at + ahead));
                    V::load_bf16(self.at(at))
                }
                Dtype::F16 => {
                    prefetch::<u16>(self.at(at + ahead));
                    V::load_f16(self.at(at))
                }
            }
        }
    }

    /// # Safety
    /// As [`Vector`]'s, for the elements from `at` on. Only an aligned vector may be streamed.
    #[inline(always)]
    unsafe fn store<V: Vector>(self, at: usize, value: V, streams: bool) {
        // SAFETY: as the caller promises.
        unsafe {
            match self.dtype {
                Dtype::F32 => value.store(self.at(at)),
                Dtype::Bf16 if streams => value.stream_bf16(self.at(at)),
                Dtype::Bf16 => value.store_bf16(self.at(at)),
                Dtype::F16 => value.store_f16(self.at(at)),
            }
        }
    }
}

/// The operands of a segment, for [`lanes`].
#[derive(Clone, Copy)]
struct Operands {
    param: Elements,
    grad: Elements,
    exp_avg: Elements,
    exp_avg_sq: Elements,
    max_exp_avg_sq: Option<Elements>,
    master: Option<Elements>,
}

impl Operands {
    fn new(segment: &AdamWSegment) -> Self {
        let state = |region: &Region| Elements::new(region, Dtype::F32);
        Self {
            param: Elements::new(&segment.param, segment.param_dtype),
            grad: Elements::new(&segment.grad, segment.grad_dtype),
            exp_avg: state(&segment.exp_avg),
            exp_avg_sq: state(&segment.exp_avg_sq),
            max_exp_avg_sq: segment.max_exp_avg_sq.as_ref().map(state),
            master: segment.master.as_ref().map(state),
        }
    }
}

/// [`crate::arith::adamw_element`], operation by operation, over whole vectors from `start` on; returns where it ended.
///
/// What does not change from vector to vector is asked for each: the processor foresees the answer.
///
/// # Safety
/// As [`sweep`].
#[inline(always)]
unsafe fn lanes<V: Vector>(on: Operands, range: Range<usize>, how: Sweep<'_>) -> usize {
    let Range { start: mut at, end } = range;
    let (s, ahead) = (how.scalars, ahead());
    // Weights that are not read are written whole: past the cache, so that their lines need not be read either.
    let streams =
        !how.follow && on.master.is_some() && on.param.at::<u16>(at).addr().is_multiple_of(2 * V::N) && V::N > 1;
    // SAFETY: every vector lies inside the range, and the caller promises the rest.
    unsafe {
        let with = Lanes::<V>::new(how.scale, s);
        while at + V::N <= end {
            let grad = on.grad.load::<V>(at, ahead).mul(with.scale);
            let grad = if s.maximize { grad.neg() } else { grad };
            let old = match on.master {
                None => on.param.load::<V>(at, ahead),
                Some(master) => {
                    let master = master.load::<V>(at, ahead);
                    if how.follow {
                        let weight = on.param.load::<V>(at, ahead);
                        let rounded = match on.param.dtype {
                            Dtype::F32 => master,
                            Dtype::Bf16 => master.rounded_bf16(),
                            Dtype::F16 => master.rounded_f16(),
                        };
                        master.unless_replaced(rounded, weight)
                    } else {
                        master
                    }
                }
            };
            let decayed = if s.decays { with.minus_decay.mul_add(old, old) } else { old };
            let mean = with.beta1.mul_add(on.exp_avg.load(at, ahead), with.one_minus_beta1.mul(grad));
            let square = with.beta2.mul_add(on.exp_avg_sq.load(at, ahead), with.one_minus_beta2.mul(grad.mul(grad)));
            let mut under = square;
            if let Some(largest) = on.max_exp_avg_sq {
                under = largest.load::<V>(at, ahead).raised_to(square);
                largest.store(at, under, false);
            }
            let divisor = under.sqrt().div(with.bias_correction2_sqrt).add(with.eps);
            let new = decayed.sub(with.step_size.mul(mean).div(divisor));
            on.exp_avg.store(at, mean, false);
            on.exp_avg_sq.store(at, square, false);
            if let Some(master) = on.master {
                master.store(at, new, false);
            }
            on.param.store(at, new, streams);
            at += V::N;
        }
    }
    if streams {
        fence();
    }
    at
}

/// Updates part of a segment.
///
/// # Safety
/// The segment's operands must be checked (live, aligned, equal in elements, no two overlapping) memory that the CPU
/// can reach, `range` must lie inside them, nobody else may touch that range of any of them meanwhile, and the CPU must
/// have the vector's instructions.
#[inline(always)]
unsafe fn sweep<V: Vector>(segment: &AdamWSegment, range: Range<usize>, how: Sweep<'_>) {
    let on = Operands::new(segment);
    // SAFETY: as the caller promises; what is left after the last whole vector goes one by one.
    unsafe {
        let left = lanes::<V>(on, range.clone(), how);
        lanes::<f32>(on, left..range.end, how);
    }
}

/// # Safety
/// As [`sweep`], on a CPU with these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sweep_avx2(segment: &AdamWSegment, range: Range<usize>, how: Sweep<'_>) {
    // SAFETY: as the caller promises.
    unsafe { sweep::<std::arch::x86_64::__m256>(segment, range, how) };
}

/// # Safety
/// As [`sweep`], on a CPU with these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn sweep_avx512(segment: &AdamWSegment, range: Range<usize>, how: Sweep<'_>) {
    // SAFETY: as the caller promises.
    unsafe { sweep::<std::arch::x86_64::__m512>(segment, range, how) };
}

/// Which compilation of the sweep to run.
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
            if has!("avx2") && has!("fma") && has!("f16c") {
                units.push(Self::Avx2);
                if has!("avx512f") && has!("avx512vl") && has!("avx512dq") && has!("avx512bw") {
                    units.push(Self::Avx512);
                }
            }
        }
        units
    }

    /// The best that this CPU has.
    pub(crate) fn best() -> Self {
        Self::available().pop().unwrap_or(Self::Portable)
    }

    /// Its name as a user writes it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
        }
    }

    /// The one of that name, or the best where none is named.
    pub(crate) fn named(name: Option<&str>) -> Result<Self> {
        name.map_or_else(|| Ok(Self::best()), |name| Self::among(&Self::available(), name))
    }

    fn among(available: &[Self], name: &str) -> Result<Self> {
        available.iter().copied().find(|unit| unit.name() == name).ok_or_else(|| {
            let names: Vec<&str> = available.iter().map(|unit| unit.name()).collect();
            let known = ["portable", "avx2", "avx512"].contains(&name);
            let why = if known { "this CPU lacks its instructions" } else { "there is no such kernel" };
            Error::InvalidOption {
                option: "host_kernel",
                value: name.to_owned(),
                remedy: format!("{why}; use one of {}", names.join(", ")),
            }
        })
    }

    /// Updates part of a segment.
    ///
    /// # Safety
    /// The segment's operands must be checked (live, aligned, equal in elements, no two overlapping) memory that the
    /// CPU can reach, `range` must lie inside them, and nobody else may touch that range of any of them meanwhile.
    pub(crate) unsafe fn sweep(self, segment: &AdamWSegment, range: Range<usize>, how: Sweep<'_>) {
        // SAFETY: the caller's promise, and a `Unit` other than `Portable` is only made after the CPU was asked for its
        // features.
        unsafe {
            match self {
                Self::Portable => sweep::<Baseline>(segment, range, how),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => sweep_avx2(segment, range, how),
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => sweep_avx512(segment, range, how),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arith::uniform_element;
    use crate::memory::Buffer;

    /// A buffer with these bytes.
    fn buffer(bytes: &[u8]) -> Region {
        let region = Buffer::pageable(bytes.len() as u64).unwrap().into_region();
        // SAFETY: the region is fresh memory of that length.
        unsafe { std::slice::from_raw_parts_mut(region.addr() as *mut u8, bytes.len()) }.copy_from_slice(bytes);
        region
    }

    fn bytes(region: &Region) -> Vec<u8> {
        // SAFETY: live memory that nobody writes now.
        unsafe { std::slice::from_raw_parts(region.addr() as *const u8, region.bytes() as usize) }.to_vec()
    }

    fn numbers(n: usize, seed: u64, low: f32, high: f32, dtype: Dtype) -> Region {
        let values = (0..n as u64).map(|i| uniform_element(seed, i, low, high));
        buffer(&match dtype {
            Dtype::F32 => values.flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>(),
            Dtype::Bf16 => values.flat_map(|value| convert::f32_to_bf16(value).to_le_bytes()).collect(),
            Dtype::F16 => values.flat_map(|value| convert::f32_to_f16(value).to_le_bytes()).collect(),
        })
    }

    fn segment(n: usize, param_dtype: Dtype, grad_dtype: Dtype, amsgrad: bool, master: bool) -> AdamWSegment {
        let state = |seed, low, high| numbers(n, seed, low, high, Dtype::F32);
        AdamWSegment {
            param: numbers(n, 1, -1.0, 1.0, param_dtype),
            param_dtype,
            grad: numbers(n, 2, -1.0, 1.0, grad_dtype),
            grad_dtype,
            exp_avg: state(3, -0.1, 0.1),
            exp_avg_sq: state(4, 0.0, 0.1),
            max_exp_avg_sq: amsgrad.then(|| state(5, 0.0, 0.1)),
            // Some of these round to the weight and some do not.
            master: master.then(|| state(1, -1.0, 1.0)),
            scalars: 0,
        }
    }

    fn swept(unit: Unit, segment: AdamWSegment, cuts: &[usize], follow: bool) -> Vec<Vec<u8>> {
        let scalars = crate::arith::AdamWHyper { weight_decay: 0.1, ..Default::default() }.at_step(3);
        let how = Sweep { scale: 0.37, scalars: &scalars, follow };
        for ends in cuts.windows(2) {
            // SAFETY: fresh memory of the test's own, and the ranges lie inside it.
            unsafe { unit.sweep(&segment, ends[0]..ends[1], how) };
        }
        segment.state().chain([&segment.param]).map(bytes).collect()
    }

    /// One arithmetic, three compilations: the bits depend neither on the CPU nor on where a segment is cut.
    #[test]
    fn every_vector_unit_gives_the_scalar_bits() {
        let n = 1553;
        let types = [Dtype::F32, Dtype::Bf16, Dtype::F16];
        for (param, grad) in types.into_iter().flat_map(|param| types.map(|grad| (param, grad))) {
            for (amsgrad, master) in [(false, false), (false, true), (true, false), (true, true)] {
                let fresh = || segment(n, param, grad, amsgrad, master);
                let reference = swept(Unit::Portable, fresh(), &[0, n], true);
                for unit in Unit::available() {
                    assert!(swept(unit, fresh(), &[0, n], true) == reference, "{unit:?} {param:?} {grad:?}");
                    let cut = swept(unit, fresh(), &[0, 1, 64, 700, 1029, n], true);
                    assert!(cut == reference, "cut, {unit:?} {param:?} {grad:?}");
                }
            }
        }
    }

    /// Where weights are their masters' rounding, not reading them changes no bit.
    #[test]
    fn weights_that_agree_need_not_be_read() {
        let n = 1033;
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let agreed = || segment(n, dtype, dtype, false, true);
            for unit in Unit::available() {
                assert!(swept(unit, agreed(), &[0, n], false) == swept(unit, agreed(), &[0, n], true), "{dtype:?}");
            }
        }
    }

    #[test]
    fn a_kernel_that_this_cpu_lacks_is_refused_by_name() {
        assert_eq!(Unit::named(None).unwrap(), Unit::best());
        assert_eq!(Unit::named(Some("portable")).unwrap(), Unit::Portable);
        let refusal = Unit::named(Some("sve")).unwrap_err().to_string();
        assert!(
            refusal.contains("invalid host_kernel: sve; there is no such kernel; use one of portable"),
            "{refusal}"
        );
        let refusal = Unit::among(&[Unit::Portable], "avx512").unwrap_err().to_string();
        let expected = "invalid host_kernel: avx512; this CPU lacks its instructions; use one of portable";
        assert_eq!(refusal, expected);
    }
}
