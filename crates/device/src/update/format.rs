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
//! Both ends are codes, so widening and narrowing again changes nothing. A number above zero never becomes zero in a
//! column without a sign: a second moment of zero beside a first one that is not would be a step without a bound. A block
//! whose scale is below the smallest normal f32 is zero, and one with a number that is not finite is NaN as a whole.

use super::{Column, Stored};
use crate::cpu::update::convert::{bf16_to_f32, f32_to_bf16};
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
/// As integers, `code = (bits of the share >> shift) - offset` in each range, and ranges meet without a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code {
    /// Whether bit 7 is a sign.
    pub(crate) signed: bool,
    /// By range: the exponent field of its smallest share, the bits that are cut off, and the offset.
    pub(crate) ranges: [(u32, u32, u32); 3],
}

impl Code {
    pub(crate) const UNSIGNED: Self =
        Self { signed: false, ranges: [(127 - 12, 19, 1777), (127 - 18, 20, 857), (0, 22, 203)] };
    pub(crate) const SIGNED: Self =
        Self { signed: true, ranges: [(127 - 11, 20, 889), (127 - 18, 21, 425), (0, 22, 207)] };

    /// The least magnitude of a range, as a code.
    #[inline(always)]
    pub(crate) const fn least(&self, range: usize) -> u32 {
        let (exponent, shift, offset) = self.ranges[range];
        (exponent << (23 - shift)) - offset
    }

    /// The number that a code stands for, as a share of its scale.
    #[inline(always)]
    pub fn share(&self, code: u8) -> f32 {
        let code = u32::from(code);
        let (magnitude, sign) = if self.signed { (code & 0x7f, (code & 0x80) << 24) } else { (code, 0) };
        let [(_, a, offset_a), (_, b, offset_b), (_, c, offset_c)] = self.ranges;
        let bits = if magnitude >= self.least(0) {
            (magnitude + offset_a) << a
        } else if magnitude >= self.least(1) {
            (magnitude + offset_b) << b
        } else {
            (magnitude + offset_c) << c
        };
        f32::from_bits(if magnitude == 0 { sign } else { bits | sign })
    }

    /// The code of a number, `inverse` being one over the scale; `random` is what is added below the code's last bit, of
    /// which the uppermost bits count: half for the nearest code.
    #[inline(always)]
    pub fn nearest(&self, value: f32, inverse: f32, random: Option<u32>) -> u8 {
        let magnitude = f32::from_bits(value.to_bits() & 0x7fff_ffff);
        let share = (magnitude * inverse).to_bits().min(1f32.to_bits());
        let [(least_a, a, offset_a), (least_b, b, offset_b), (_, c, offset_c)] = self.ranges;
        let (shift, offset) = if share >= least_a << 23 {
            (a, offset_a)
        } else if share >= least_b << 23 {
            (b, offset_b)
        } else {
            (c, offset_c)
        };
        let up = random.map_or(1 << (shift - 1), |random| random >> (32 - shift));
        let code = (((share + up) >> shift) as i32 - offset as i32).max(0) as u32;
        // Random numbers may carry 1 beyond itself.
        let code = code.min(if self.signed { 127 } else { 255 });
        if self.signed {
            (code | (value.to_bits() >> 31) << 7) as u8
        } else {
            code.max(u32::from(magnitude > 0.0)) as u8
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
