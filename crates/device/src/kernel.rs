//! The closed list of kernels, and the checks that their operands pass before any backend sees them.

use crate::error::{Error, Result};
use crate::memory::{DeviceId, Place, Region, check_home};
use crate::update::{Segment, Update};

/// Element types of parameters and gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// The upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// A run of weights with the masters that they are roundings of.
#[derive(Debug, Clone)]
pub struct Mastered {
    /// The weights.
    pub weight: Region,
    /// Their type.
    pub dtype: Dtype,
    /// As many f32 masters.
    pub master: Region,
}

/// Everything a device can compute. Operands lie on the device, with every backend.
#[derive(Debug, Clone)]
pub enum Kernel<'a> {
    /// Sets every byte.
    Fill {
        /// What to set.
        dst: Region,
        /// The byte.
        byte: u8,
    },
    /// Fills f32 elements with values in `low..high` that depend on the seed and the element's index alone, the same on
    /// every backend.
    Uniform {
        /// What to fill.
        dst: Region,
        /// Chooses the sequence.
        seed: u64,
        /// Smallest value.
        low: f32,
        /// Upper bound.
        high: f32,
    },
    /// `dst[i] = base^(first + i)` as the device's own `powf` gives it: the raw material of bias corrections.
    Powers {
        /// Where the f32 powers go.
        dst: Region,
        /// The base.
        base: f32,
        /// The first exponent.
        first: u64,
    },
    /// Adds the number of differing 4-byte words to a u64.
    CountDifferences {
        /// One side.
        a: Region,
        /// The other.
        b: Region,
        /// Where the count is added: 8 bytes.
        count: Region,
    },
    /// Updates parts of parameters by a rule.
    Update(Update<'a>),
    /// Copies pairs of regions on the device, first to second, in as few launches as they fit into: thousands of small
    /// copies at the speed of one. A pair is shorter than 4 GiB, and what one pair writes no other touches.
    CopyPairs {
        /// From and to.
        pairs: &'a [(Region, Region)],
    },
    /// Sets an f32 to 1 if the rounding of some master is not its weight, and leaves it as it is if all are.
    CompareMasters {
        /// Weights and their masters.
        pairs: &'a [Mastered],
        /// What is set.
        differ: Region,
    },
    /// Writes the rounding of each master to its weight.
    RoundMasters {
        /// Weights and their masters.
        pairs: &'a [Mastered],
    },
    /// Keeps the stream busy, so that a missing wait shows.
    Spin {
        /// For how long.
        ns: u64,
    },
    /// Makes the stream fail. On CUDA the whole context is lost, as with any faulting kernel.
    Trap,
}

impl Kernel<'_> {
    /// Its name in errors and traces.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fill { .. } => "fill",
            Self::Uniform { .. } => "uniform",
            Self::Powers { .. } => "powers",
            Self::CountDifferences { .. } => "count differences",
            Self::Update(update) => update.rule.name,
            Self::CopyPairs { .. } => "copy pairs",
            Self::CompareMasters { .. } => "compare masters",
            Self::RoundMasters { .. } => "round masters",
            Self::Spin { .. } => "spin",
            Self::Trap => "trap",
        }
    }

    /// Every region the kernel touches, and whether it writes it.
    #[cfg(feature = "testing")]
    pub(crate) fn accesses(&self) -> Vec<(&Region, bool)> {
        let mut accesses = Vec::new();
        let _ = self.try_each(|region, writes| {
            accesses.push((region, writes));
            Ok(())
        });
        accesses
    }

    /// Goes through the regions the kernel touches without collecting them: a step launches thousands of segments.
    fn try_each<'a>(&'a self, mut visit: impl FnMut(&'a Region, bool) -> Result<()>) -> Result<()> {
        match self {
            Self::Fill { dst, .. } | Self::Uniform { dst, .. } | Self::Powers { dst, .. } => visit(dst, true),
            Self::CountDifferences { a, b, count } => [(a, false), (b, false), (count, true)]
                .into_iter()
                .try_for_each(|(region, writes)| visit(region, writes)),
            Self::Update(update) => {
                update.grad_scale.iter().chain(&update.skip).try_for_each(|region| visit(region, false))?;
                update.followed.iter().try_for_each(|region| visit(region, true))?;
                let mut operands = update.segments.iter().flat_map(Segment::operands);
                operands.try_for_each(|(region, writes)| visit(region, writes))
            }
            Self::CopyPairs { pairs } => pairs.iter().try_for_each(|(from, to)| {
                visit(from, false)?;
                visit(to, true)
            }),
            Self::CompareMasters { pairs, differ } => {
                visit(differ, true)?;
                pairs.iter().flat_map(|pair| [&pair.weight, &pair.master]).try_for_each(|region| visit(region, false))
            }
            Self::RoundMasters { pairs } => pairs.iter().try_for_each(|pair| {
                visit(&pair.master, false)?;
                visit(&pair.weight, true)
            }),
            Self::Spin { .. } | Self::Trap => Ok(()),
        }
    }

    /// Refuses operands that do not fit together; what passes can be run by any backend without further checks.
    pub(crate) fn check(&self, device: DeviceId) -> Result<()> {
        let operation = self.name();
        let refuse = |reason: String| Err(Error::BadOperands { operation, reason });
        self.try_each(|region, _| {
            check_home(operation, region, device)?;
            if region.place() == Place::Device { Ok(()) } else { refuse(format!("{region:?} is not device memory")) }
        })?;
        let words = |region: &Region, width: u64| {
            if !region.bytes().is_multiple_of(width) || !(region.addr() as u64).is_multiple_of(width) {
                return refuse(format!(
                    "{} bytes at {:#x} are not whole {width}-byte words",
                    region.bytes(),
                    region.addr()
                ));
            }
            Ok(())
        };
        match self {
            Self::Fill { .. } | Self::Spin { .. } | Self::Trap => Ok(()),
            Self::Uniform { dst, low, high, .. } => {
                if low.is_nan() || high.is_nan() || low > high {
                    return refuse(format!("an empty range of values: {low}..{high}"));
                }
                words(dst, 4)
            }
            Self::Powers { dst, .. } => words(dst, 4),
            Self::CountDifferences { a, b, count } => {
                words(a, 4)?;
                words(b, 4)?;
                words(count, 8)?;
                if a.bytes() != b.bytes() || count.bytes() != 8 {
                    return refuse(format!(
                        "{} bytes, {} bytes and a count of {}",
                        a.bytes(),
                        b.bytes(),
                        count.bytes()
                    ));
                }
                Ok(())
            }
            Self::Update(update) => {
                let one_word = |flag: &Region, what: &str| {
                    words(flag, 4)?;
                    if flag.bytes() == 4 { Ok(()) } else { refuse(format!("{what}, of {} bytes", flag.bytes())) }
                };
                let read = update.grad_scale.iter().chain(&update.skip);
                read.clone().try_for_each(|flag| one_word(flag, "a scale or skip flag, which is one f32"))?;
                if let Some(followed) = &update.followed {
                    one_word(followed, "a flag for masters that gave way, which is one u32")?;
                    let mut others = read.chain(update.segments.iter().flat_map(Segment::operands).map(|(of, _)| of));
                    if let Some(other) = others.find(|other| other.overlaps(followed)) {
                        return refuse(format!("the flag for masters that gave way overlaps {other:?}"));
                    }
                }
                let sets = update.scalars.len();
                update.segments.iter().try_for_each(|segment| segment.check(update.rule, sets, update.trust_master))
            }
            Self::CompareMasters { pairs, .. } | Self::RoundMasters { pairs } => {
                if let Self::CompareMasters { differ, .. } = self {
                    words(differ, 4)?;
                    if differ.bytes() != 4 {
                        return refuse(format!("a flag of {} bytes, which is one f32", differ.bytes()));
                    }
                }
                pairs.iter().try_for_each(|Mastered { weight, dtype, master }| {
                    words(weight, dtype.bytes())?;
                    words(master, 4)?;
                    if weight.bytes() / dtype.bytes() != master.bytes() / 4 || master.bytes() / 4 > u64::from(u32::MAX)
                    {
                        return refuse(format!(
                            "{} bytes of weights of {} bytes each, and {} bytes of f32 masters",
                            weight.bytes(),
                            dtype.bytes(),
                            master.bytes()
                        ));
                    }
                    if weight.overlaps(master) {
                        return refuse(format!("{weight:?} overlaps {master:?}"));
                    }
                    Ok(())
                })
            }
            Self::CopyPairs { pairs } => pairs.iter().try_for_each(|(from, to)| {
                if from.bytes() != to.bytes() || from.bytes() > u64::from(u32::MAX) {
                    return refuse(format!(
                        "{} bytes into {} bytes; a pair is equal, and at most {}",
                        from.bytes(),
                        to.bytes(),
                        u32::MAX
                    ));
                }
                if from.overlaps(to) { refuse(format!("{from:?} overlaps {to:?}")) } else { Ok(()) }
            }),
        }
    }
}

/// `base^t`, correctly rounded but for rare ties.
#[inline(always)]
pub fn power_element(base: f32, t: u64) -> f32 {
    f64::from(base).powf(t as f64) as f32
}

/// The value at `index` of the sequence `seed`, uniform in `low..high`.
#[inline(always)]
pub fn uniform_element(seed: u64, index: u64, low: f32, high: f32) -> f32 {
    let mut z = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    // 24 bits: every value is exact in f32, and so is the product with a power of two.
    let unit = (z >> 40) as f32 * (1.0 / 16_777_216.0);
    unit.mul_add(high - low, low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_stays_in_range_and_depends_on_seed_and_index() {
        let values: Vec<f32> = (0..1000).map(|i| uniform_element(1, i, -2.0, 3.0)).collect();
        assert!(values.iter().all(|v| (-2.0..3.0).contains(v)));
        assert_ne!(values, (0..1000).map(|i| uniform_element(2, i, -2.0, 3.0)).collect::<Vec<_>>());
        let mean = values.iter().sum::<f32>() / 1000.0;
        assert!((mean - 0.5).abs() < 0.2, "{mean}");
    }
}
