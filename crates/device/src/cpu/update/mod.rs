//! Updates on the CPU: one sweep over a segment, from memory through registers and back.
//!
//! It works on a vector of elements at a time: a gradient in half precision is widened, a master whose rounding differs
//! from its weight is replaced, the rule's arithmetic is applied, and master, state and rounded weight are written. A
//! compact master is put together from its weight and taken apart again, see [`crate::update::master`]. The
//! sweep is written once and compiled for each vector unit: for any CPU (on aarch64 that includes NEON), for AVX2 with
//! FMA and F16C, and for AVX-512.

pub(crate) mod convert;
mod halves;
pub(crate) mod packed;
pub(crate) mod vector;

use std::ops::Range;
use std::sync::LazyLock;

use crate::error::{Error, Result};
use crate::kernel::Dtype;
use crate::memory::Region;
use crate::update::{Arithmetic, MAX_COLUMNS, MAXIMIZE, Master, Moment, Rule, Scalars, Segment, Splat};
use halves::Halves;
use packed::Packed;
use vector::Vector;

/// What every CPU of an architecture has.
#[cfg(target_arch = "aarch64")]
type Baseline = std::arch::aarch64::float32x4_t;
#[cfg(not(target_arch = "aarch64"))]
type Baseline = f32;

/// How many elements ahead memory is prefetched: a cache line takes about the time of that many updates. AMD's
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
    pub(crate) scalars: &'a Scalars,
    /// Whether masters count as they are; see [`crate::update::Update::trust_master`]. Weights with a master are then
    /// written and never read.
    pub(crate) trust_master: bool,
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
    const NONE: Self = Self { address: 0, dtype: Dtype::F32 };

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
    weight: Elements,
    grad: Elements,
    /// The columns that `kept` names; the others have no address.
    state: [Elements; MAX_COLUMNS],
    kept: u32,
    master: Option<Elements>,
    /// Where they have addresses, masters are compact.
    halves: Halves,
    /// The place in its parameter of the first element.
    first: u64,
    /// Whether weights that are not read may be written past the cache.
    streams: bool,
}

impl Operands {
    fn new(segment: &Segment) -> Self {
        let state = |region: &Region| Elements::new(region, Dtype::F32);
        let (master, halves) = match &segment.master {
            None => (None, Halves::NONE),
            Some(Master::F32(master)) => (Some(state(master)), Halves::NONE),
            Some(Master::Compact { low, carry }) => (None, Halves { low: low.addr(), carry: carry.addr() }),
        };
        Self {
            weight: Elements::new(&segment.weight, segment.weight_dtype),
            grad: Elements::new(&segment.grad, segment.grad_dtype),
            state: segment.state.each_ref().map(|column| match column {
                Some(Moment::F32(region)) => state(region),
                // A column in fewer bits is widened into memory of the sweep's own: see `packed`.
                _ => Elements::NONE,
            }),
            kept: segment.kept(),
            master,
            halves,
            first: segment.first,
            streams: true,
        }
    }
}

/// Stands for any set of columns, in [`lanes`].
const ANY: u32 = u32::MAX;

/// A rule's arithmetic over whole vectors from `start` on; returns where it ended. `KEPT` has a bit for each column that
/// is there, or is [`ANY`]. `COMPACT` says whether the masters are.
///
/// Types and switches do not change from vector to vector and are tested for each: the processor predicts the branches.
/// Columns are fixed at compile time: with a test for each of them at each vector, an update in the cache takes up to 18 %
/// longer.
///
/// # Safety
/// As [`Unit::sweep`], on a CPU with the vector's instructions.
#[inline(always)]
unsafe fn lanes<A: Arithmetic, V: Vector, const KEPT: u32, const COMPACT: bool>(
    on: Operands,
    range: Range<usize>,
    how: Sweep<'_>,
) -> usize {
    let Range { start: mut at, end } = range;
    let (ahead, kept) = (ahead(), if KEPT == ANY { on.kept } else { KEPT });
    // Weights that are not read are written whole: past the cache, so that their lines need not be read either.
    let streams = on.streams
        && how.trust_master
        && on.master.is_some()
        && on.weight.at::<u16>(at).addr().is_multiple_of(2 * V::N)
        && V::N > 1;
    // SAFETY: every vector lies inside the range, and the caller promises the rest.
    unsafe {
        let (scale, s) = (V::splat(how.scale), Splat::<V>::new(how.scalars));
        while at + V::N <= end {
            let grad = on.grad.load::<V>(at, ahead).mul(scale);
            let grad = if s.has(MAXIMIZE) { grad.neg() } else { grad };
            let old = match on.master {
                _ if COMPACT => on.halves.join(on.weight.load::<V>(at, ahead), at, ahead),
                None => on.weight.load::<V>(at, ahead),
                Some(master) => {
                    let master = master.load::<V>(at, ahead);
                    if how.trust_master {
                        master
                    } else {
                        let weight = on.weight.load::<V>(at, ahead);
                        let rounded = match on.weight.dtype {
                            Dtype::F32 => master,
                            Dtype::Bf16 => master.rounded_bf16(),
                            Dtype::F16 => master.rounded_f16(),
                        };
                        master.unless_replaced(rounded, weight)
                    }
                }
            };
            let mut state = [V::splat(0.0); MAX_COLUMNS];
            for (i, column) in on.state.iter().enumerate().filter(|(i, _)| kept & 1 << i != 0) {
                state[i] = column.load(at, ahead);
            }
            let new = A::update(old, grad, &mut state, kept, &s, on.first + at as u64);
            for (i, column) in on.state.iter().enumerate().filter(|(i, _)| kept & 1 << i != 0) {
                column.store(at, state[i], false);
            }
            if COMPACT {
                on.halves.keep(new, at);
            } else if let Some(master) = on.master {
                master.store(at, new, false);
            }
            on.weight.store(at, new, streams);
            at += V::N;
        }
    }
    if streams {
        fence();
    }
    at
}

/// Updates part of a segment with vectors of one width; what is left after the last whole vector goes one by one.
///
/// # Safety
/// As [`lanes`].
#[inline(always)]
unsafe fn sweep_with<A: Arithmetic, V: Vector>(
    unit: Unit,
    rule: &Rule,
    segment: &Segment,
    range: Range<usize>,
    how: Sweep<'_>,
) {
    let on = Operands::new(segment);
    // SAFETY: as the caller promises.
    unsafe {
        match (segment.is_packed(), segment.is_compact()) {
            (false, false) => sweep_lanes::<A, V, false>(on, range, how),
            (false, true) => sweep_lanes::<A, V, true>(on, range, how),
            (true, false) => sweep_packed::<A, V, false>(unit, on, &Packed::of(rule, segment), range, how),
            (true, true) => sweep_packed::<A, V, true>(unit, on, &Packed::of(rule, segment), range, how),
        }
    }
}

/// The same where some columns are kept in fewer bits: a block at a time is widened into the cache, updated there, and
/// narrowed again.
///
/// # Safety
/// As [`lanes`].
#[inline(always)]
unsafe fn sweep_packed<A: Arithmetic, V: Vector, const COMPACT: bool>(
    unit: Unit,
    mut on: Operands,
    packed: &Packed,
    range: Range<usize>,
    how: Sweep<'_>,
) {
    on.streams = false;
    let mut blocks = packed::Blocks::default();
    let mut start = range.start;
    while start < range.end {
        let block = start..range.end.min(start + packed::BLOCK);
        // SAFETY: as the caller promises; the blocks have room for the elements of one.
        unsafe {
            for (column, numbers) in on.state.iter_mut().zip(packed.widen(unit, &block, &mut blocks)) {
                // Elements count from the segment's begin.
                if let Some(numbers) = numbers {
                    column.address = numbers.wrapping_sub(4 * start);
                }
            }
            sweep_lanes::<A, V, COMPACT>(on, block.clone(), how);
            packed.narrow(unit, &block, &blocks);
        }
        start = block.end;
    }
}

/// # Safety
/// As [`lanes`].
#[inline(always)]
unsafe fn sweep_lanes<A: Arithmetic, V: Vector, const COMPACT: bool>(
    on: Operands,
    range: Range<usize>,
    how: Sweep<'_>,
) {
    let whole = range.clone();
    // SAFETY: as the caller promises.
    unsafe {
        let left = match on.kept {
            0b000 => lanes::<A, V, 0b000, COMPACT>(on, whole, how),
            0b001 => lanes::<A, V, 0b001, COMPACT>(on, whole, how),
            0b011 => lanes::<A, V, 0b011, COMPACT>(on, whole, how),
            0b111 => lanes::<A, V, 0b111, COMPACT>(on, whole, how),
            _ => lanes::<A, V, ANY, COMPACT>(on, whole, how),
        };
        lanes::<A, f32, ANY, COMPACT>(on, left..range.end, how);
    }
}

/// # Safety
/// As [`lanes`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sweep_avx2<A: Arithmetic>(rule: &Rule, segment: &Segment, range: Range<usize>, how: Sweep<'_>) {
    // SAFETY: as the caller promises.
    unsafe { sweep_with::<A, std::arch::x86_64::__m256>(Unit::Avx2, rule, segment, range, how) };
}

/// # Safety
/// As [`lanes`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn sweep_avx512<A: Arithmetic>(rule: &Rule, segment: &Segment, range: Range<usize>, how: Sweep<'_>) {
    // SAFETY: as the caller promises.
    unsafe { sweep_with::<A, std::arch::x86_64::__m512>(Unit::Avx512, rule, segment, range, how) };
}

/// A rule's sweep over part of a segment, on one vector unit: what a rule keeps as a function.
///
/// # Safety
/// As [`Unit::sweep`].
pub(crate) unsafe fn sweep<A: Arithmetic>(
    unit: Unit,
    rule: &Rule,
    segment: &Segment,
    range: Range<usize>,
    how: Sweep<'_>,
) {
    // SAFETY: the caller's promise, and a `Unit` other than `Portable` is only made after the CPU was asked for its
    // features.
    unsafe {
        match unit {
            Unit::Portable => sweep_with::<A, Baseline>(unit, rule, segment, range, how),
            #[cfg(target_arch = "x86_64")]
            Unit::Avx2 => sweep_avx2::<A>(rule, segment, range, how),
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => sweep_avx512::<A>(rule, segment, range, how),
        }
    }
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

    /// Updates part of a segment by a rule.
    ///
    /// # Safety
    /// The segment's operands must be checked for the rule (live, aligned, equal in elements, no two overlapping) memory
    /// that the CPU can reach, `range` must lie inside them, and nobody else may touch that range of any of them
    /// meanwhile. A range begins at a multiple of the block of every column that the segment has.
    pub(crate) unsafe fn sweep(self, rule: &Rule, segment: &Segment, range: Range<usize>, how: Sweep<'_>) {
        // SAFETY: as the caller promises.
        unsafe { (rule.sweep)(self, rule, segment, range, how) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::uniform_element;
    use crate::memory::Buffer;
    use crate::update::{RULES, StateFormat};

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

    /// A segment with these columns. A master agrees with this many weights and is stale for the others.
    fn segment(n: usize, dtypes: (Dtype, Dtype), kept: u32, master: Option<usize>) -> Segment {
        let state = |seed, low, high| numbers(n, seed, low, high, Dtype::F32);
        let columns = [state(3, -0.1, 0.1), state(4, 0.0, 0.1), state(5, 0.0, 0.1)];
        let mut i = 0;
        Segment {
            weight: numbers(n, 1, -1.0, 1.0, dtypes.0),
            weight_dtype: dtypes.0,
            grad: numbers(n, 2, -1.0, 1.0, dtypes.1),
            grad_dtype: dtypes.1,
            state: columns.map(|column| {
                i += 1;
                (kept & 1 << (i - 1) != 0).then_some(column.into())
            }),
            master: master.map(|agree| {
                let [agreeing, stale] = [1, 6].map(|seed| bytes(&state(seed, -1.0, 1.0)));
                Master::F32(buffer(&[&agreeing[..4 * agree], &stale[4 * agree..]].concat()))
            }),
            first: 37,
            scalars: 0,
            keys: None,
        }
    }

    fn swept(
        unit: Unit,
        case: &Case,
        cuts: &[usize],
        trust_master: bool,
        dtypes: (Dtype, Dtype),
        master: Option<usize>,
    ) -> Vec<Vec<u8>> {
        let n = cuts[cuts.len() - 1];
        let segment = segment(n, dtypes, (case.rule.keeps)(&case.hypers), master);
        let scalars = case.rule.at_step(&case.hypers, case.step, case.elements);
        let how = Sweep { scale: 0.37, scalars: &scalars, trust_master };
        for ends in cuts.windows(2) {
            // SAFETY: fresh memory of the test's own, and the ranges lie inside it.
            unsafe { unit.sweep(case.rule, &segment, ends[0]..ends[1], how) };
        }
        segment.operands().map(|(region, _)| bytes(region)).collect()
    }

    struct Case {
        rule: &'static Rule,
        hypers: Vec<f64>,
        step: u64,
        elements: u64,
    }

    /// Every rule with its switches off and on, for parameters of a multiple of four elements and others.
    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for rule in RULES {
            for switches in 0..8u32 {
                let number = |name: &&str| match *name {
                    "lr" => 3e-3,
                    "beta1" | "momentum" => 0.9,
                    "beta2" => 0.99,
                    "eps" => 1e-8,
                    "dampening" => 0.25,
                    "weight_decay" => {
                        if switches & 1 != 0 {
                            0.1
                        } else {
                            0.0
                        }
                    }
                    "maximize" => f64::from(switches >> 1 & 1),
                    _ => f64::from(switches >> 2 & 1),
                };
                let hypers: Vec<f64> = rule.hypers.iter().map(number).collect();
                for elements in [4096, 4097] {
                    cases.push(Case { rule, hypers: hypers.clone(), step: 1 + u64::from(switches % 3), elements });
                }
            }
        }
        cases
    }

    /// One arithmetic, three compilations: the bits depend neither on the CPU nor on where a segment is cut.
    #[test]
    fn every_vector_unit_gives_the_scalar_bits() {
        let n = 1553;
        let types = [Dtype::F32, Dtype::Bf16, Dtype::F16];
        for (i, case) in cases().iter().enumerate() {
            // All nine pairs come up for every rule; each case has three of them.
            for dtypes in (0..3).map(|j| (types[(i + j) % 3], types[(i / 3 + j) % 3])) {
                for master in [None, Some(n / 2)] {
                    let what = || format!("{:?} {:?} {dtypes:?}", case.rule, case.hypers);
                    let reference = swept(Unit::Portable, case, &[0, n], false, dtypes, master);
                    for unit in Unit::available() {
                        let whole = swept(unit, case, &[0, n], false, dtypes, master);
                        assert!(whole == reference, "{unit:?} {}", what());
                        let cut = swept(unit, case, &[0, 1, 64, 700, 1029, n], false, dtypes, master);
                        assert!(cut == reference, "cut, {unit:?} {}", what());
                    }
                }
            }
        }
    }

    /// Compact masters give the bits of f32 masters, on every vector unit and however a segment is cut: weights, state, and
    /// the masters that are put together again.
    #[test]
    fn compact_masters_have_the_bits_of_f32_masters() {
        let n = 1553;
        for (i, case) in cases().iter().enumerate() {
            let (dtypes, kept) =
                ((Dtype::Bf16, [Dtype::F32, Dtype::Bf16, Dtype::F16][i % 3]), (case.rule.keeps)(&case.hypers));
            let compact = || {
                let mut segment = segment(n, dtypes, kept, None);
                let pattern = |seed: u64, i: usize| (uniform_element(seed, i as u64, 0.0, 1.0) * 65536.0) as u16;
                // Some lower halves are ties or next to one; a carry that does not belong to its half comes up too.
                let low: Vec<u16> = (0..n).map(|i| [pattern(8, i), 0x8000, 0x7fff, 0x8001, 0][i % 5]).collect();
                let carry: Vec<u8> = (0..n.div_ceil(8)).map(|i| pattern(9, i) as u8).collect();
                segment.master = Some(Master::Compact {
                    low: buffer(&low.iter().flat_map(|low| low.to_le_bytes()).collect::<Vec<_>>()),
                    carry: buffer(&carry),
                });
                segment
            };
            let masters = |segment: &Segment| -> Region {
                let (Some(Master::Compact { low, carry }), masters) = (&segment.master, buffer(&vec![0; 4 * n])) else {
                    panic!("made so above")
                };
                crate::update::master::masters_of(&segment.weight, low, carry, &masters).unwrap();
                masters
            };
            let scalars = case.rule.at_step(&case.hypers, case.step, case.elements);
            let sweep = |unit: Unit, segment: &Segment, cuts: &[usize]| {
                let how = Sweep { scale: 0.37, scalars: &scalars, trust_master: false };
                for ends in cuts.windows(2) {
                    // SAFETY: fresh memory of the test's own, and the ranges lie inside it.
                    unsafe { unit.sweep(case.rule, segment, ends[0]..ends[1], how) };
                }
            };
            let mut reference = compact();
            reference.master = Some(Master::F32(masters(&reference)));
            sweep(Unit::Portable, &reference, &[0, n]);
            let expected: Vec<Vec<u8>> = reference.operands().map(|(region, _)| bytes(region)).collect();
            let all_cuts = [vec![0, n], vec![0, 8, 64, 696, 1032, n]];
            for (unit, cuts) in
                Unit::available().into_iter().flat_map(|unit| all_cuts.each_ref().map(|cuts| (unit, cuts)))
            {
                let mut segment = compact();
                sweep(unit, &segment, cuts);
                segment.master = Some(Master::F32(masters(&segment)));
                let found: Vec<Vec<u8>> = segment.operands().map(|(region, _)| bytes(region)).collect();
                assert!(found == expected, "{unit:?} {:?} {:?} {cuts:?}", case.rule, case.hypers);
            }
        }
    }

    /// Columns in fewer bits have the same bits on every vector unit, however a segment is cut where its blocks are.
    #[test]
    fn columns_in_fewer_bits_have_the_scalar_bits() {
        let n = 1553;
        let formats = {
            use StateFormat::{Bf16, Blocks, F32};
            [[Blocks; 3], [Bf16; 3], [Blocks, Bf16, Blocks], [Bf16, F32, Blocks]]
        };
        for (i, case) in cases().iter().enumerate() {
            let kept = (case.rule.keeps)(&case.hypers);
            for (turn, formats) in formats.iter().enumerate().filter(|_| kept != 0) {
                let made = || {
                    let dtypes = (Dtype::Bf16, [Dtype::F32, Dtype::Bf16, Dtype::F16][(i + turn) % 3]);
                    let mut segment = segment(n, dtypes, kept, [None, Some(n / 2)][i % 2]);
                    if (i + turn) % 3 == 0 {
                        let pattern =
                            |seed: u64, i: usize| (uniform_element(seed, i as u64, 0.0, 1.0) * 65536.0) as u16;
                        let low: Vec<u8> = (0..n).flat_map(|i| pattern(8, i).to_le_bytes()).collect();
                        let carry: Vec<u8> = (0..n.div_ceil(8)).map(|i| pattern(9, i) as u8).collect();
                        segment.master = Some(Master::Compact { low: buffer(&low), carry: buffer(&carry) });
                    }
                    for (column, format) in formats.iter().enumerate().filter(|(column, _)| kept & 1 << column != 0) {
                        let seed = 20 + column as u64;
                        segment.state[column] = Some(match format {
                            StateFormat::F32 => numbers(n, seed, 0.0, 0.1, Dtype::F32).into(),
                            StateFormat::Bf16 => Moment::Bf16(numbers(n, seed, 0.0, 0.1, Dtype::Bf16)),
                            StateFormat::Blocks => Moment::Blocks {
                                codes: buffer(
                                    &(0..n as u64)
                                        .map(|i| uniform_element(seed, i, 0.0, 256.0) as u8)
                                        .collect::<Vec<_>>(),
                                ),
                                scales: numbers(n.div_ceil(256), seed, 0.01, 0.1, Dtype::F32),
                            },
                        });
                    }
                    segment.keys = ((i + turn) % 2 == 0).then_some([5, 6, 7]);
                    segment
                };
                let scalars = case.rule.at_step(&case.hypers, case.step, case.elements);
                let swept = |unit: Unit, cuts: &[usize]| {
                    let (segment, how) = (made(), Sweep { scale: 0.37, scalars: &scalars, trust_master: false });
                    for ends in cuts.windows(2) {
                        // SAFETY: fresh memory of the test's own, and the ranges lie inside it and begin with a block.
                        unsafe { unit.sweep(case.rule, &segment, ends[0]..ends[1], how) };
                    }
                    segment.operands().map(|(region, _)| bytes(region)).collect::<Vec<_>>()
                };
                let reference = swept(Unit::Portable, &[0, n]);
                for unit in Unit::available() {
                    for cuts in [&[0, n][..], &[0, 256, 1024, 1280, n]] {
                        assert!(swept(unit, cuts) == reference, "{unit:?} {:?} {formats:?} {cuts:?}", case.rule);
                    }
                }
            }
        }
    }

    /// Where weights are their masters' rounding, not reading them changes no bit.
    #[test]
    fn weights_that_agree_need_not_be_read() {
        for (case, dtype) in cases().iter().flat_map(|case| [Dtype::Bf16, Dtype::F16].map(|dtype| (case, dtype))) {
            for unit in Unit::available() {
                let swept = |trust| swept(unit, case, &[0, 1033], trust, (dtype, dtype), Some(1033));
                assert!(swept(false) == swept(true), "{:?} {dtype:?}", case.rule);
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
