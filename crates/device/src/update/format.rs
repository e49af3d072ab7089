//! Formats of state: how the columns of a rule are kept in memory, and how they are widened to f32 and narrowed again.
//!
//! A rule's arithmetic is f32. A column in fewer bits is widened before it and narrowed behind it, in registers or in a
//! cache; the weight is computed from the numbers before they are narrowed. Backends do this with integers and single
//! roundings, so the bits are the same everywhere.
//!
//! # bf16
//! The upper half of the f32, rounded to nearest-even, or at random in proportion to what is cut off.
//!
//! # 8 bits in blocks
//! [`BLOCK`] elements of a parameter share a scale, an f32: the largest magnitude among them. Blocks begin at the first
//! element of the parameter's local part; the last one may be shorter. Each element is a code of 8 bits for its share of
//! the scale, between 0 and 1 (with a sign, for columns that have one). Codes are small floating-point numbers whose
//! steps grow wider towards zero:
//!
//! ```text
//! without a sign   255 is 1; 16 codes for each halving down to 2^-12, 8 down to 2^-18, 2 down to 2^-25; 0 is 0
//! with a sign      bit 7 is the sign; 127 is 1; 8 codes for each halving down to 2^-11, 4 down to 2^-18, 2 down to 2^-23
//! ```
//!
//! Both ends are codes, so widening and narrowing again changes nothing, unless a number is subnormal. The first code above
//! zero is the end of the steps: with a sign, what is below three quarters of it is zero, however it is rounded. A number above zero never becomes zero in a
//! column without a sign: a second moment of zero beside a first one that is not would be a step without a bound. A block
//! whose scale is below the smallest normal f32 is zero, and one with a number that is not finite is NaN as a whole.

use std::ops::Range;

use super::shares::{check, elements, in_shares};
use super::{Column, Stored};
use crate::cpu::update::Unit;
use crate::cpu::update::convert::{bf16_to_f32, f32_to_bf16};
use crate::cpu::update::packed::Kept;
use crate::error::{Error, Result};
use crate::kernel::Dtype;
use crate::memory::Region;

/// Elements that share a scale.
pub const BLOCK: u32 = 256;

/// How a column of a rule is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum StateFormat {
    /// As an f32.
    #[default]
    F32,
    /// As a bf16.
    Bf16,
    /// In 8 bits with a scale for each block.
    Blocks,
}

impl StateFormat {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Blocks];

    /// Its name, as users write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Blocks => "8bit",
        }
    }

    /// The format of that name.
    pub fn named(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| Error::InvalidOption {
            option: "state format",
            value: name.to_owned(),
            remedy: format!("use one of {}", Self::ALL.map(Self::name).join(", ")),
        })
    }
}

/// One number that a rule keeps for each element, in whatever format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RuleColumn {
    /// Its name in `state_dict`.
    pub name: &'static str,
    /// The name of the column of its scales, if it is kept in blocks.
    pub scale: &'static str,
    /// Whether it may be below zero.
    pub signed: bool,
}

impl RuleColumn {
    /// A number of any sign.
    pub const fn signed(name: &'static str, scale: &'static str) -> Self {
        Self { name, scale, signed: true }
    }

    /// A number that is never below zero.
    pub const fn unsigned(name: &'static str, scale: &'static str) -> Self {
        Self { name, scale, signed: false }
    }

    /// Its column in f32.
    pub const fn f32(&self) -> Column {
        Column::f32(self.name)
    }

    /// Its columns in a format, the numbers first.
    pub fn kept_as(&self, format: StateFormat) -> Vec<Column> {
        match format {
            StateFormat::F32 => vec![self.f32()],
            StateFormat::Bf16 => vec![Column { stored: Stored::Number(Dtype::Bf16), ..self.f32() }],
            StateFormat::Blocks => {
                vec![Column { stored: Stored::U8, ..self.f32() }, Column { block: BLOCK, ..Column::f32(self.scale) }]
            }
        }
    }

    /// The format of which a column is the numbers.
    pub fn format_of(&self, column: &Column) -> Option<StateFormat> {
        StateFormat::ALL.into_iter().find(|format| self.kept_as(*format).first() == Some(column))
    }

    /// Whether a column is its scales.
    pub fn is_scale(&self, column: &Column) -> bool {
        self.kept_as(StateFormat::Blocks).get(1) == Some(column)
    }

    /// What its codes of 8 bits mean.
    pub fn code(&self) -> Code {
        if self.signed { Code::SIGNED } else { Code::UNSIGNED }
    }
}

/// The memory of one column of a segment.
#[derive(Debug, Clone)]
pub enum Moment {
    /// An f32 for each element.
    F32(Region),
    /// A bf16 for each element.
    Bf16(Region),
    /// A code for each element, and an f32 for each [`BLOCK`] of them; the first block begins at the segment's first
    /// element.
    Blocks {
        /// The codes.
        codes: Region,
        /// The scales.
        scales: Region,
    },
}

impl From<Region> for Moment {
    fn from(region: Region) -> Self {
        Self::F32(region)
    }
}

impl Moment {
    /// Its format.
    pub fn format(&self) -> StateFormat {
        match self {
            Self::F32(_) => StateFormat::F32,
            Self::Bf16(_) => StateFormat::Bf16,
            Self::Blocks { .. } => StateFormat::Blocks,
        }
    }

    /// Its memory, in the order of [`RuleColumn::kept_as`].
    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        let (first, second) = match self {
            Self::F32(region) | Self::Bf16(region) => (region, None),
            Self::Blocks { codes, scales } => (codes, Some(scales)),
        };
        std::iter::once(first).chain(second)
    }
}

/// What codes of 8 bits mean: from 1 downwards, three ranges of f32 whose mantissas keep fewer and fewer bits.
///
/// As integers, `code = (bits of the share >> shift) - offset` in each range, and ranges meet without a gap. As steps grow
/// wider towards zero, the range that a number is in is the one that gives it the largest code, and gives a code the
/// smallest number. So nobody has to ask which it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code {
    /// Whether bit 7 is a sign.
    pub(crate) signed: bool,
    /// By range: the bits that are cut off, and the offset.
    pub(crate) ranges: [(u32, u32); 3],
}

/// All bits of an f32 but its sign.
const MAGNITUDE: u32 = 0x7fff_ffff;

impl Code {
    pub(crate) const UNSIGNED: Self = Self { signed: false, ranges: [(19, 1777), (20, 857), (22, 203)] };
    pub(crate) const SIGNED: Self = Self { signed: true, ranges: [(20, 889), (21, 425), (22, 207)] };

    /// The code of 1.
    const fn top(&self) -> i32 {
        if self.signed { 127 } else { 255 }
    }

    /// The number that a code stands for, as a share of its scale.
    #[inline(always)]
    pub fn share(&self, code: u8) -> f32 {
        let code = u32::from(code);
        let (magnitude, sign) = if self.signed { (code & 0x7f, (code & 0x80) << 24) } else { (code, 0) };
        let [a, b, c] = self.ranges.map(|(shift, offset)| (magnitude + offset) << shift);
        let bits = a.min(b).min(c);
        f32::from_bits(if magnitude == 0 { sign } else { bits | sign })
    }

    /// The code of a number, `inverse` being one over the scale; `random` is what is added below the code's last bit, of
    /// which the uppermost bits count: half for the nearest code.
    #[inline(always)]
    pub fn nearest(&self, value: f32, inverse: f32, random: Option<u32>) -> u8 {
        let share = (value * inverse).to_bits() & MAGNITUDE;
        let [a, b, c] = self.ranges.map(|(shift, offset)| {
            let up = random.map_or(1 << (shift - 1), |random| random >> (32 - shift));
            // Below the range this is negative.
            (share + up).wrapping_sub(offset << shift) as i32 >> shift
        });
        // Random numbers may carry 1 beyond itself.
        let code = a.max(b).max(c).max(0).min(self.top()) as u32;
        if self.signed {
            (code | (value.to_bits() >> 31) << 7) as u8
        } else {
            code.max(u32::from(value.to_bits() & MAGNITUDE != 0)) as u8
        }
    }
}

/// The scale of a block, from the largest bits among its magnitudes, and one over it.
#[inline(always)]
pub fn scale_of(largest: u32) -> (f32, f32) {
    const INFINITE: u32 = 0x7f80_0000;
    const NORMAL: u32 = 0x0080_0000;
    if largest >= INFINITE {
        // Codes of zero: zero times this is NaN.
        (f32::NAN, 0.0)
    } else if largest < NORMAL {
        (0.0, 0.0)
    } else {
        (f32::from_bits(largest), 1.0 / f32::from_bits(largest))
    }
}

/// A random number for one element of one column: 32 bits that depend on nothing but the key and the lower half of the
/// element's index in its parameter.
#[inline(always)]
pub fn random(key: u32, index: u32) -> u32 {
    let mut x = index ^ key;
    x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_add(key).wrapping_mul(0x846c_a68b);
    x ^ x >> 16
}

/// The key of a column of one parameter at one step.
pub fn random_key(seed: u64, step: u64, column: u32, parameter: u64) -> u32 {
    // The finalizer of splitmix64, fed with one number after the other.
    let mix = |state: u64, number: u64| {
        let mut x = (state ^ number).wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    };
    (mix(mix(mix(mix(0, seed), step), u64::from(column)), parameter) >> 32) as u32
}

/// An f32 to bf16, at random in proportion to what is cut off.
#[inline(always)]
pub fn bf16_at_random(value: f32, random: u32) -> u16 {
    let bits = value.to_bits();
    if bits & 0x7f80_0000 == 0x7f80_0000 { f32_to_bf16(value) } else { ((bits + (random >> 16)) >> 16) as u16 }
}

/// An f32 to bf16, to nearest-even.
#[inline(always)]
pub fn to_bf16(value: f32) -> u16 {
    f32_to_bf16(value)
}

/// A bf16 as an f32.
#[inline(always)]
pub fn from_bf16(bits: u16) -> f32 {
    bf16_to_f32(bits)
}

/// Writes the numbers of a column on the host as f32. Nobody may write to any of this memory meanwhile.
pub fn numbers_of(column: &RuleColumn, kept: &Moment, numbers: &Region) -> Result<()> {
    convert(column, kept, numbers, |of, unit, block, numbers| {
        // SAFETY: `convert` checked the column and gives blocks of it.
        unsafe { of.widen(unit, block, numbers) };
    })
}

/// Keeps these f32 as a column, all of it on the host, each as the nearest number that the format has. Nobody may use this
/// memory meanwhile.
pub fn keep_numbers(column: &RuleColumn, numbers: &Region, kept: &Moment) -> Result<()> {
    convert(column, kept, numbers, |of, unit, block, numbers| {
        // SAFETY: as in `numbers_of`; blocks are disjoint.
        unsafe { of.narrow(unit, block, numbers, None) };
    })
}

/// Converts a column block by block, on several threads where there are many.
fn convert(
    column: &RuleColumn,
    kept: &Moment,
    numbers: &Region,
    each: impl Fn(&Kept, Unit, &Range<usize>, &mut [f32]) + Sync,
) -> Result<()> {
    let count = numbers.bytes() / 4;
    // Named apart from a column of f32.
    let as_f32 = (numbers, Column::f32("numbers"));
    let columns = kept.regions().zip(column.kept_as(kept.format())).chain([as_f32]);
    check("convert state", count, &columns.collect::<Vec<_>>())?;
    let Some(of) = Kept::of(column, kept) else {
        let reason = format!("{} is kept in f32, which needs no conversion", column.name);
        return Err(Error::BadOperands { operation: "convert state", reason });
    };
    let unit = Unit::best();
    in_shares(count as usize, BLOCK as usize, |range| {
        for start in range.clone().step_by(BLOCK as usize) {
            let block = start..range.end.min(start + BLOCK as usize);
            // SAFETY: they were checked, and ranges are disjoint.
            each(&of, unit, &block, unsafe { elements::<f32>(numbers, &block) });
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::shares::SHARE_ELEMENTS;
    use super::*;
    use crate::memory::Buffer;

    const CODES: [Code; 2] = [Code::UNSIGNED, Code::SIGNED];

    /// The shares that codes without a sign stand for, from what the head of this file says of them.
    fn table(code: &Code) -> Vec<f64> {
        let steps: &[(usize, usize)] =
            if code.signed { &[(11, 8), (18, 4), (23, 2)] } else { &[(12, 16), (18, 8), (25, 2)] };
        let mut shares = vec![1.0];
        let mut halving = 0;
        for &(until, codes) in steps {
            while halving < until {
                halving += 1;
                shares.extend((0..codes).rev().map(|i| (1.0 + i as f64 / codes as f64) / f64::from(1u32 << halving)));
            }
        }
        shares.push(0.0);
        shares.reverse();
        shares
    }

    /// Powers of two and numbers beside them, over all exponents whose shares are normal numbers.
    fn scales() -> impl Iterator<Item = f32> {
        (29..=254u32).flat_map(|exponent| {
            [0, 1, 0x2a_aaaa, 0x40_0000, 0x7f_fffe, 0x7f_ffff].map(|low| f32::from_bits(exponent << 23 | low))
        })
    }

    fn inverse(scale: f32) -> f32 {
        scale_of(scale.to_bits()).1
    }

    #[test]
    fn codes_are_what_their_description_says() {
        for code in CODES {
            let shares = table(&code);
            assert_eq!(shares.len(), if code.signed { 128 } else { 256 });
            for (i, share) in shares.iter().enumerate() {
                assert_eq!(f64::from(code.share(i as u8)), *share, "{code:?} {i}");
                if code.signed {
                    let negative = code.share(i as u8 | 0x80);
                    assert_eq!((f64::from(-negative), negative.is_sign_negative()), (*share, true), "{i}");
                }
            }
            assert!(shares.is_sorted_by(|a, b| a < b), "strictly monotone");
        }
    }

    #[test]
    fn every_code_comes_back_from_its_number() {
        for (code, scale) in CODES.into_iter().flat_map(|code| scales().map(move |scale| (code, scale))) {
            for kept in 0..=u8::MAX {
                let number = code.share(kept) * scale;
                assert_eq!(code.nearest(number, inverse(scale), None), kept, "{code:?} {scale:e} {number:e}");
            }
        }
    }

    /// Whatever the scale: no other code is nearer, but for the error of a product.
    #[test]
    fn the_nearest_code_is_the_nearest() {
        for code in CODES {
            let shares = table(&code);
            for scale in (1..=254).map(|exponent| f32::from_bits(exponent << 23)).chain([0.7, 1.999, 1e20, 3e-30]) {
                for (halving, low) in (0..32).flat_map(|halving| (0..29u32).map(move |i| (halving, i * 0x4_8d15))) {
                    let number = f32::from_bits((0x3f80_0000 - (halving << 23)) | low) * scale;
                    let share = f64::from(number) / f64::from(scale);
                    // Beside the smallest normal number some shares are none.
                    if share > 1.0 || number < 16.0 * f32::MIN_POSITIVE {
                        continue;
                    }
                    let kept = code.nearest(number, inverse(scale), None);
                    let error = (shares[usize::from(kept)] - share).abs();
                    let above = shares.partition_point(|known| *known < share);
                    if above <= 1 {
                        // Beside zero there is no step: seven eighths of the first code are the middle.
                        let sure = !code.signed || share > 0.876 * shares[1];
                        assert!(kept <= 1 && (kept == 1 || !sure), "{code:?}: {number:e} of {scale:e} is {kept}");
                        assert!(kept == 0 || !code.signed || share > 0.874 * shares[1], "{number:e} of {scale:e}");
                        continue;
                    }
                    let least = (shares[above] - share).min(share - shares[above - 1]);
                    assert!(error <= least + 3e-7 * share, "{code:?}: {number:e} of {scale:e} is {kept}");
                }
            }
        }
    }

    #[test]
    fn what_is_above_zero_stays_above_zero() {
        let code = Code::UNSIGNED;
        for exponent in 0..=254u32 {
            let number = f32::from_bits(exponent << 23 | 1);
            for (scale, random) in scales().step_by(7).flat_map(|scale| [(scale, None), (scale, Some(0))]) {
                assert!(code.nearest(number, inverse(scale), random) >= 1, "{number:e} of {scale:e}");
            }
            assert_eq!(code.nearest(number, 0.0, None), 1, "in a block of subnormal numbers");
        }
        assert_eq!(code.nearest(0.0, 1.0, Some(u32::MAX)), 0);
        assert_eq!((code.nearest(-0.0, 1.0, None), Code::SIGNED.nearest(-0.0, 1.0, None)), (0, 0x80));
        assert_eq!(Code::SIGNED.nearest(-1.0, 1.0, Some(u32::MAX)), 0xff, "no carry into the sign");
        assert_eq!(code.nearest(1.0, 1.0, Some(u32::MAX)), 0xff, "no carry beyond 1");
        // A product with one over the scale may be a little more than 1.
        let more = 1.0 + f32::EPSILON;
        assert_eq!(
            (code.nearest(more, 1.0, Some(u32::MAX)), Code::SIGNED.nearest(-more, 1.0, Some(u32::MAX))),
            (255, 255)
        );
        assert_eq!(Code::SIGNED.nearest(more, 1.0, Some(u32::MAX)), 127);
    }

    #[test]
    fn scales_are_numbers_of_their_block_or_none() {
        let found = |number: f32| scale_of(number.to_bits());
        assert_eq!(found(3.0), (3.0, 1.0 / 3.0));
        assert_eq!(found(f32::MAX), (f32::MAX, 1.0 / f32::MAX));
        assert_eq!(found(f32::MIN_POSITIVE), (f32::MIN_POSITIVE, 1.0 / f32::MIN_POSITIVE));
        assert_eq!((found(0.0), found(1e-39)), ((0.0, 0.0), (0.0, 0.0)));
        for not_finite in [f32::INFINITY, f32::NAN] {
            let (scale, inverse) = found(not_finite);
            assert!(scale.is_nan() && inverse == 0.0);
            assert!((0..=u8::MAX).all(|kept| CODES.iter().all(|code| (code.share(kept) * scale).is_nan())));
        }
    }

    /// How often a number is rounded up, over keys and over indices, is what it is above the number below: within five
    /// deviations of a fair coin. Half a step more or less would be dozens of them.
    #[test]
    fn rounding_at_random_is_fair() {
        const TRIES: u32 = 1 << 16;
        let is_fair = |what: &str, chance: f64, up: &dyn Fn(u32) -> bool| {
            for fixed in [0, 0x9e37_79b9] {
                let keys = (0..TRIES).filter(|&i| up(random(i.wrapping_mul(0x85eb_ca6b), fixed))).count();
                let indices = (0..TRIES).filter(|&i| up(random(fixed, i))).count();
                let (mean, bound) =
                    (chance * f64::from(TRIES), 5.0 * (chance * (1.0 - chance) * f64::from(TRIES)).sqrt());
                for (of, found) in [("keys", keys), ("indices", indices)] {
                    assert!(
                        (found as f64 - mean).abs() <= bound,
                        "{what} over {of}: {found}, not {mean} within {bound}"
                    );
                }
            }
        };
        for code in CODES {
            let shares = table(&code);
            for (below, chance) in [0, 1, 5, 20, 60, 100, 126]
                .into_iter()
                .chain(if code.signed { 30..31 } else { 200..201 })
                .flat_map(|below| [0.03, 0.25, 0.5, 0.9].map(|chance| (below, chance)))
            {
                // What is above zero never becomes zero without a sign; between zero and the first code there is no step.
                if below == 0 {
                    continue;
                }
                let number = (shares[below] + chance * (shares[below + 1] - shares[below])) as f32;
                is_fair(&format!("{code:?} {below} {chance}"), chance, &|random| {
                    let kept = code.nearest(number, 1.0, Some(random));
                    assert!((below..=below + 1).contains(&usize::from(kept)), "{kept}");
                    usize::from(kept) == below + 1
                });
            }
        }
        for (upper, low) in [(0x3f80u32, 0x0800u32), (0x3f80, 0x8000), (0xbe12, 0xf000), (0x0000, 0x4000)] {
            let number = f32::from_bits(upper << 16 | low);
            is_fair(&format!("{number:e} as bf16"), f64::from(low) / 65536.0, &|random| {
                let kept = u32::from(bf16_at_random(number, random));
                assert!((upper..=upper + 1).contains(&kept), "{kept:#x}");
                kept == upper + 1
            });
        }
    }

    /// Numbers of neighbours, of neighbouring keys, and of halves of one number have nothing to do with each other.
    #[test]
    fn random_numbers_are_independent() {
        const TRIES: u32 = 1 << 14;
        // The mean of 2^19 fair bits; five deviations.
        let is_even = |what: &str, ones: u32| {
            let (mean, bound) = (16.0 * f64::from(TRIES), 5.0 * (8.0 * f64::from(TRIES)).sqrt());
            assert!((f64::from(ones) - mean).abs() <= bound, "{what}: {ones}, not {mean} within {bound}");
        };
        for key in [0, 1, 0xdead_beef] {
            let ones = |of: &dyn Fn(u32) -> u32| (0..TRIES).map(|i| of(i).count_ones()).sum();
            is_even("bits", ones(&|i| random(key, i)));
            is_even("neighbours", ones(&|i| random(key, i) ^ random(key, i + 1)));
            is_even("keys", ones(&|i| random(key, i) ^ random(key + 1, i)));
            is_even("places of blocks", ones(&|i| random(key, i) ^ random(key, i + 256)));
            is_even("halves", ones(&|i| random(key, i) ^ random(key, i).rotate_left(16)));
        }
        let keys = [(1, 1, 0, 0), (2, 1, 0, 0), (1, 2, 0, 0), (1, 1, 1, 0), (1, 1, 0, 1), (0, 1, 1, 0)];
        let keys = keys.map(|(seed, step, column, parameter)| random_key(seed, step, column, parameter));
        assert!((0..keys.len()).all(|i| !keys[..i].contains(&keys[i])), "{keys:x?}");
        assert_eq!(random_key(1, 2, 3, 4), random_key(1, 2, 3, 4));
    }

    #[test]
    fn every_bf16_comes_back() {
        for kept in 0..=u16::MAX {
            let number = bf16_to_f32(kept);
            for random in [0, 0x8000_0000, u32::MAX] {
                let found = bf16_at_random(number, random);
                assert!(found == kept || (number.is_nan() && bf16_to_f32(found).is_nan()), "{kept:#x}: {found:#x}");
            }
        }
        assert!(bf16_to_f32(bf16_at_random(f32::from_bits(0x7f80_0001), u32::MAX)).is_nan());
    }

    #[test]
    fn formats_have_names() {
        assert_eq!(StateFormat::ALL.map(|format| StateFormat::named(format.name()).unwrap()), StateFormat::ALL);
        let refused = StateFormat::named("fp8").unwrap_err().to_string();
        assert!(refused.contains("state format: fp8; use one of f32, bf16, 8bit"), "{refused}");
    }

    const COLUMNS: [RuleColumn; 2] =
        [RuleColumn::signed("mean", "mean_scale"), RuleColumn::unsigned("square", "square_scale")];

    fn region(bytes: usize) -> Region {
        Buffer::pageable(bytes as u64).unwrap().into_region()
    }

    fn moment(format: StateFormat, elements: usize) -> Moment {
        match format {
            StateFormat::F32 => Moment::F32(region(4 * elements)),
            StateFormat::Bf16 => Moment::Bf16(region(2 * elements)),
            StateFormat::Blocks => {
                Moment::Blocks { codes: region(elements), scales: region(4 * elements.div_ceil(BLOCK as usize)) }
            }
        }
    }

    /// Whole regions have the bits of single elements, on any number of threads and with a last block that is not full.
    #[test]
    fn regions_convert_as_their_elements_do() {
        for (column, n) in COLUMNS
            .into_iter()
            .flat_map(|column| [1, 255, 256, 257, 1000, SHARE_ELEMENTS + 300].map(|elements| (column, elements)))
        {
            let value = |i: usize| {
                let number = f32::from_bits(0x3000_0000 + ((i as u32).wrapping_mul(2_654_435_761) >> 4));
                if column.signed && i.is_multiple_of(3) { -number } else { number }
            };
            let (numbers, back) = (region(4 * n), region(4 * n));
            // SAFETY: memory of the test's own, of these lengths.
            let (given, found) = unsafe { (elements::<f32>(&numbers, &(0..n)), elements::<f32>(&back, &(0..n))) };
            (0..n).for_each(|i| given[i] = value(i));
            let bf16 = moment(StateFormat::Bf16, n);
            keep_numbers(&column, &numbers, &bf16).unwrap();
            numbers_of(&column, &bf16, &back).unwrap();
            assert!((0..n).all(|i| found[i].to_bits() == bf16_to_f32(f32_to_bf16(value(i))).to_bits()), "bf16, {n}");
            let (codes, scales) = (region(n), region(4 * n.div_ceil(256)));
            let blocks = Moment::Blocks { codes: codes.clone(), scales: scales.clone() };
            keep_numbers(&column, &numbers, &blocks).unwrap();
            numbers_of(&column, &blocks, &back).unwrap();
            // SAFETY: as above.
            let (codes, scales) =
                unsafe { (elements::<u8>(&codes, &(0..n)), elements::<f32>(&scales, &(0..n.div_ceil(256)))) };
            for (block, of_block) in given.chunks(256).enumerate() {
                let scale = of_block.iter().fold(0f32, |largest, number| largest.max(number.abs()));
                assert_eq!(scales[block], scale, "{n}");
                for (i, number) in (256 * block..).zip(of_block) {
                    let kept = column.code().nearest(*number, 1.0 / scale, None);
                    assert_eq!((codes[i], found[i]), (kept, column.code().share(kept) * scale), "{i} of {n}");
                }
            }
            // What was kept is kept as it is.
            keep_numbers(&column, &back, &bf16).unwrap();
            let again = moment(StateFormat::Blocks, n);
            keep_numbers(&column, &back, &again).unwrap();
            let Moment::Blocks { codes: other, .. } = &again else { panic!("made so above") };
            // SAFETY: as above.
            assert!(unsafe { elements::<u8>(other, &(0..n)) } == codes, "{n}");
        }
    }

    #[test]
    fn regions_that_do_not_fit_are_refused_by_name() {
        let [column, _] = COLUMNS;
        let (n, spare) = (300, region(4096));
        let at = |offset, bytes| spare.slice(offset, bytes).unwrap();
        let blocks = |codes: Region, scales: Region| Moment::Blocks { codes, scales };
        let cases = [
            (moment(StateFormat::Bf16, n - 1), region(4 * n), "mean: ", "host memory of 600 bytes"),
            (Moment::Bf16(at(1, 600)), region(4 * n), "mean: ", "host memory of 600 bytes"),
            (blocks(region(n + 1), region(8)), region(4 * n), "mean: ", "host memory of 300 bytes"),
            (blocks(region(n), region(4)), region(4 * n), "mean_scale: ", "host memory of 8 bytes"),
            (blocks(region(n), at(2, 8)), region(4 * n), "mean_scale: ", "host memory of 8 bytes"),
            (moment(StateFormat::Bf16, n), region(4 * n + 2), "numbers: ", "host memory of 1200 bytes"),
            (blocks(at(0, 300), at(296, 8)), region(4 * n), "mean overlaps mean_scale", ""),
            (blocks(at(0, 300), region(8)), at(200, 1200), "mean overlaps numbers", ""),
            (moment(StateFormat::F32, n), region(4 * n), "mean is kept in f32", ""),
        ];
        for (kept, numbers, name, says) in cases {
            for refused in [numbers_of(&column, &kept, &numbers), keep_numbers(&column, &numbers, &kept)] {
                let refused = refused.unwrap_err().to_string();
                assert!(refused.contains("convert state") && refused.contains(name), "{refused}");
                assert!(refused.contains(says), "{refused}");
            }
        }
        numbers_of(&column, &blocks(at(0, 0), at(0, 0)), &at(0, 0)).unwrap();
    }
}
