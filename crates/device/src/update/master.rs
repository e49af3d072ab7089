//! Masters: the f32 weights behind parameters in half precision, and the formats in which they are kept.
//!
//! # The compact format
//! A bf16 weight is its master rounded to nearest-even, so most of the master is in the weight already. Two columns keep
//! the rest, 17 bits for each element: the lower 16 bits of the master, and a *carry*, whether rounding made the upper half
//! one larger. With all numbers as integers
//!
//! ```text
//! weight = upper + carry      upper:lower = the bits of the master
//! master = (weight - carry):lower
//! ```
//!
//! 16 bits do not suffice: an even weight is the rounding of 65,537 masters, because both ties around it round to it. The
//! pair is exact for all of the 2^32 masters, but for the payload of a NaN. Where a weight was replaced, the pair is
//! usually a master of the new weight too, and counts. Where it is not (around zero and infinity, an odd weight at a tie)
//! the weight itself is the master. So columns of zeros are masters that equal their weights.

use std::ops::Range;

use super::shares::{check, elements, in_shares};
use super::{Column, Stored};
use crate::cpu::update::convert::{bf16_to_f32, f32_to_bf16};
use crate::error::{Error, Result};
use crate::kernel::Dtype;
use crate::memory::Region;

/// The f32 master of a half-precision parameter. Any rule may have it, after its own columns.
pub const MASTER: Column = Column::f32("master_param");

/// The lower halves of compact masters.
pub const MASTER_LOW: Column = Column { name: "master_low", stored: Stored::U16, block: 1 };

/// The carries of compact masters, a bit for each element, the first one lowest.
pub const MASTER_CARRY: Column = Column { name: "master_carry", stored: Stored::U8, block: CARRIES };

/// Carries in a byte.
pub const CARRIES: u32 = 8;

/// How the master of a parameter is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MasterFormat {
    /// There is none.
    #[default]
    None,
    /// As an f32.
    F32,
    /// In 17 bits beside a bf16 weight.
    Compact,
}

impl MasterFormat {
    /// Its columns.
    pub fn columns(self) -> &'static [Column] {
        match self {
            Self::None => &[],
            Self::F32 => &[MASTER],
            Self::Compact => &[MASTER_LOW, MASTER_CARRY],
        }
    }

    /// The format of that name; an empty one is none.
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "" => Ok(Self::None),
            "f32" => Ok(Self::F32),
            "compact" => Ok(Self::Compact),
            _ => Err(Error::InvalidOption {
                option: "master format",
                value: name.to_owned(),
                remedy: "use f32 or compact, or nothing for no masters".to_owned(),
            }),
        }
    }
}

impl From<bool> for MasterFormat {
    /// An f32 master, or none.
    fn from(kept: bool) -> Self {
        if kept { Self::F32 } else { Self::None }
    }
}

/// The memory of a segment's masters.
#[derive(Debug, Clone)]
pub enum Master {
    /// An f32 for each element.
    F32(Region),
    /// What a bf16 weight does not have of its master.
    Compact {
        /// [`MASTER_LOW`].
        low: Region,
        /// [`MASTER_CARRY`]; its first bit is that of the segment's first element.
        carry: Region,
    },
}

impl Master {
    /// Its columns with their memory.
    pub fn columns(&self) -> impl Iterator<Item = (&'static Column, &Region)> {
        let (first, second) = match self {
            Self::F32(master) => ((&MASTER, master), None),
            Self::Compact { low, carry } => ((&MASTER_LOW, low), Some((&MASTER_CARRY, carry))),
        };
        std::iter::once(first).chain(second)
    }
}

/// The number that a weight makes with what is kept beside it.
#[inline(always)]
fn paired(weight: u16, low: u16, carry: bool) -> f32 {
    f32::from_bits(u32::from(weight.wrapping_sub(carry.into())) << 16 | u32::from(low))
}

/// Whether that number is a master of the weight.
#[inline(always)]
pub(crate) fn is_pair(weight: u16, low: u16, carry: bool) -> bool {
    f32_to_bf16(paired(weight, low, carry)) == weight
}

/// The master of a bf16 weight, from what is kept beside it.
#[inline(always)]
pub fn join(weight: u16, low: u16, carry: bool) -> f32 {
    if is_pair(weight, low, carry) { paired(weight, low, carry) } else { bf16_to_f32(weight) }
}

/// What is kept of a master beside its rounding.
#[inline(always)]
pub fn split(master: f32) -> (u16, bool) {
    let bits = master.to_bits();
    (bits as u16, f32_to_bf16(master) != (bits >> 16) as u16)
}

/// The operands of a conversion, all of them host memory that nobody else writes.
#[derive(Clone, Copy)]
struct Pairs<'a> {
    weights: Option<&'a Region>,
    low: &'a Region,
    carry: &'a Region,
    masters: &'a Region,
}

/// Writes the masters of bf16 weights on the host as f32. Nobody may write to any of this memory meanwhile.
pub fn masters_of(weights: &Region, low: &Region, carry: &Region, masters: &Region) -> Result<()> {
    let pairs = Pairs { weights: Some(weights), low, carry, masters };
    pairs.convert(|range| {
        // SAFETY: `Pairs::convert` checked all of them and gives disjoint ranges.
        let (weights, low, carry, masters) = unsafe {
            (
                elements::<u16>(weights, &range),
                elements::<u16>(low, &range),
                elements::<u8>(carry, &bytes_of(&range)),
                elements::<f32>(masters, &range),
            )
        };
        for (i, ((master, &weight), &low)) in masters.iter_mut().zip(&*weights).zip(&*low).enumerate() {
            *master = join(weight, low, carry[i / 8] >> (i % 8) & 1 != 0);
        }
    })
}

/// Writes what compact masters keep of these f32 masters, all of it on the host. Nobody may use this memory meanwhile.
pub fn keep_masters(masters: &Region, low: &Region, carry: &Region) -> Result<()> {
    Pairs { weights: None, low, carry, masters }.convert(|range| {
        // SAFETY: as in `masters_of`.
        let (masters, low, carry) = unsafe {
            (elements::<f32>(masters, &range), elements::<u16>(low, &range), elements::<u8>(carry, &bytes_of(&range)))
        };
        let eights = masters.chunks(CARRIES as usize).zip(low.chunks_mut(CARRIES as usize));
        for ((masters, low), carry) in eights.zip(carry) {
            *carry = 0;
            for (i, (&master, low)) in masters.iter().zip(low).enumerate() {
                let (lower, carries) = split(master);
                *low = lower;
                *carry |= u8::from(carries) << i;
            }
        }
    })
}

/// The bytes with the carries of these elements, the first of which begins a byte.
fn bytes_of(range: &Range<usize>) -> Range<usize> {
    range.start / 8..range.end.div_ceil(8)
}

impl Pairs<'_> {
    /// Converts ranges of the elements, on several threads where there are many. Ranges begin at multiples of a byte of
    /// carries.
    fn convert(&self, each: impl Fn(Range<usize>) + Sync) -> Result<()> {
        let elements = self.masters.bytes() / 4;
        let operands = [
            (Some(self.masters), &MASTER),
            (self.weights, &WEIGHT),
            (Some(self.low), &MASTER_LOW),
            (Some(self.carry), &MASTER_CARRY),
        ];
        let operands = operands.into_iter().filter_map(|(region, column)| Some((region?, *column)));
        check("convert masters", elements, &operands.collect::<Vec<_>>())?;
        in_shares(elements as usize, CARRIES as usize, each);
        Ok(())
    }
}

/// A bf16 weight, as if it were a column.
const WEIGHT: Column = Column { stored: Stored::Number(Dtype::Bf16), ..Column::f32("weight") };

#[cfg(test)]
mod tests {
    use super::super::shares::SHARE_ELEMENTS;
    use super::*;
    use crate::memory::Buffer;

    /// Everything about one master: its rounding and what is kept give it back, or a NaN for a NaN.
    fn check(bits: u32) {
        let master = f32::from_bits(bits);
        let (low, carry) = split(master);
        let found = join(f32_to_bf16(master), low, carry);
        assert!(found.to_bits() == bits || (found.is_nan() && master.is_nan()), "{bits:#010x} is {found:?}");
    }

    /// Every one of the 2^32 masters. Without `FOREBAY_LONG`, those whose lower halves decide a rounding, and one in 251
    /// of the others.
    #[test]
    fn every_master_comes_back() {
        if std::env::var_os("FOREBAY_LONG").is_some() {
            let threads = crate::cpu::threads() as u32;
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    scope.spawn(move || (thread..=u32::MAX).step_by(threads as usize).for_each(check));
                }
            });
            return;
        }
        for upper in 0..=u16::MAX {
            for low in [0, 1, 2, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0x8002, 0xfffe, 0xffff] {
                check(u32::from(upper) << 16 | low);
            }
        }
        (0..=u32::MAX).step_by(251).for_each(check);
    }

    /// No pair at all gives a master of another weight, so a weight that was replaced always counts.
    #[test]
    fn a_master_is_always_one_of_its_weight() {
        for weight in 0..=u16::MAX {
            for (low, carry) in
                [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].into_iter().flat_map(|low| [(low, false), (low, true)])
            {
                let master = join(weight, low, carry);
                let is_nan = bf16_to_f32(weight).is_nan();
                assert!(
                    f32_to_bf16(master) == weight || (is_nan && master.is_nan()),
                    "{weight:#06x} {low:#06x} {carry}: {master:?}"
                );
            }
        }
    }

    /// The lower half stays where the pair is a master of the new weight. Around zero and infinity, and for an odd weight
    /// at a tie, it is not.
    #[test]
    fn a_replaced_weight_keeps_a_lower_half_that_fits() {
        let (one, odd, zero, infinity) = (0x3f80, 0x3f81, 0x0000, 0x7f80);
        assert_eq!(join(one, 0x1234, false).to_bits(), 0x3f80_1234);
        assert_eq!(join(one, 0x9234, true).to_bits(), 0x3f7f_9234);
        // A tie belongs to the even neighbour.
        assert_eq!(join(one, 0x8000, false).to_bits(), 0x3f80_8000);
        assert_eq!(join(one, 0x8000, true).to_bits(), 0x3f7f_8000);
        assert_eq!(join(odd, 0x8000, false).to_bits(), 0x3f81_0000);
        assert_eq!(join(odd, 0x8000, true).to_bits(), 0x3f81_0000);
        // Below zero there is no number: the neighbour's bits are those of a NaN.
        assert_eq!(join(zero, 0x9234, true).to_bits(), 0);
        assert_eq!(join(zero | 0x8000, 0x9234, true).to_bits(), 0x8000_0000);
        assert_eq!(join(zero, 0x1234, false).to_bits(), 0x1234, "a subnormal");
        // Beside infinity there are NaNs above and numbers below.
        assert_eq!(join(infinity, 0x1234, false).to_bits(), 0x7f80_0000);
        assert_eq!(join(infinity, 0x9234, true).to_bits(), 0x7f7f_9234);
    }

    fn region(bytes: usize) -> Region {
        Buffer::pageable(bytes as u64).unwrap().into_region()
    }

    /// Whole regions have the bits of single elements, on any number of threads and with a last byte that is not full.
    #[test]
    fn regions_convert_as_their_elements_do() {
        for n in [1, 7, 8, 9, 1000, SHARE_ELEMENTS + 13] {
            let (weights, low, carry, masters) = (region(2 * n), region(2 * n), region(n.div_ceil(8)), region(4 * n));
            let value = |i: usize| (i as u32).wrapping_mul(2_654_435_761) & 0x7f7f_ffff;
            // SAFETY: memory of the test's own, of these lengths.
            let (w, m) = unsafe { (elements::<u16>(&weights, &(0..n)), elements::<f32>(&masters, &(0..n))) };
            for i in 0..n {
                (w[i], m[i]) = (f32_to_bf16(f32::from_bits(value(i))), f32::from_bits(value(i)));
            }
            keep_masters(&masters, &low, &carry).unwrap();
            m.fill(0.0);
            masters_of(&weights, &low, &carry, &masters).unwrap();
            assert!((0..n).all(|i| m[i].to_bits() == value(i)), "{n}");
            // SAFETY: as above.
            let carries = unsafe { elements::<u8>(&carry, &(0..n.div_ceil(8))) };
            let used = n % 8;
            assert!(used == 0 || carries[n / 8] >> used == 0, "bits behind the last element");
        }
        let refused = keep_masters(&region(4), &region(4), &region(1)).unwrap_err().to_string();
        assert!(refused.contains("not aligned host memory of 2 bytes"), "{refused}");
    }
}
