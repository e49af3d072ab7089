//! The closed list of kernels, and the checks that their operands pass before any backend sees them.

use crate::arith::AdamWScalars;
use crate::error::{Error, Result};
use crate::memory::{DeviceId, Place, Region, check_home};

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
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// Everything a device can compute. Operands lie on the device, whatever the backend.
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
    /// `dst[i] = beta^(first + i)` as the device's own `powf` gives it: the raw material of bias corrections.
    Powers {
        /// Where the f32 powers go.
        dst: Region,
        /// The base.
        beta: f32,
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
    /// One AdamW step over parts of parameters.
    AdamW(AdamW<'a>),
    /// Copies pairs of regions on the device, first to second, in as few launches as they fit into: thousands of small
    /// copies at the speed of one. A pair is shorter than 4 GiB, and what one pair writes no other touches.
    CopyPairs {
        /// From and to.
        pairs: &'a [(Region, Region)],
    },
    /// Keeps the stream busy, so that a missing wait shows.
    Spin {
        /// For how long.
        ns: u64,
    },
    /// Makes the stream fail. On CUDA the whole context is lost, as with any faulting kernel.
    Trap,
}

/// One AdamW step over any number of segments; see [`crate::arith`] for the arithmetic.
#[derive(Debug, Clone)]
pub struct AdamW<'a> {
    /// The parts of parameters to update. No two may overlap.
    pub segments: &'a [AdamWSegment],
    /// The hyper-parameter sets that the segments name.
    pub scalars: &'a [AdamWScalars],
    /// An f32 on the device that every gradient is multiplied with: a clip coefficient.
    pub grad_scale: Option<Region>,
    /// An f32 on the device; where it is not zero, nothing is changed: GradScaler's `found_inf`.
    pub skip: Option<Region>,
}

/// A run of elements of one parameter, with the state that belongs to them.
#[derive(Debug, Clone)]
pub struct AdamWSegment {
    /// The parameter's elements.
    pub param: Region,
    /// Their type.
    pub param_dtype: Dtype,
    /// The gradient's elements.
    pub grad: Region,
    /// Their type.
    pub grad_dtype: Dtype,
    /// First moment, f32.
    pub exp_avg: Region,
    /// Second moment, f32.
    pub exp_avg_sq: Region,
    /// Largest second moment so far, f32: amsgrad.
    pub max_exp_avg_sq: Option<Region>,
    /// Master weights, f32; where the parameter is not their rounding, they give way to it.
    pub master: Option<Region>,
    /// Which entry of [`AdamW::scalars`] applies.
    pub scalars: u32,
}

impl AdamWSegment {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.exp_avg.bytes() / 4
    }

    /// The f32 state of the segment, all of it written.
    pub(crate) fn state(&self) -> impl Iterator<Item = &Region> {
        [Some(&self.exp_avg), Some(&self.exp_avg_sq), self.max_exp_avg_sq.as_ref(), self.master.as_ref()]
            .into_iter()
            .flatten()
    }

    /// Everything it touches, and whether it is written.
    fn operands(&self) -> impl Iterator<Item = (&Region, bool)> {
        self.state().map(|region| (region, true)).chain([(&self.param, true), (&self.grad, false)])
    }

    fn check(&self, scalars: usize) -> Result<()> {
        let refuse = |reason: String| Err(Error::BadOperands { operation: "adamw", reason });
        let elements = self.elements();
        if elements == 0 || elements > u64::from(u32::MAX) {
            return refuse(format!("a segment of {elements} elements; it takes 1 to {}", u32::MAX));
        }
        for (what, region, width) in
            [("param", &self.param, self.param_dtype.bytes()), ("grad", &self.grad, self.grad_dtype.bytes())]
                .into_iter()
                .chain(self.state().map(|region| ("state", region, 4)))
        {
            if region.bytes() != elements * width {
                return refuse(format!(
                    "{what} has {} bytes where {elements} elements need {}",
                    region.bytes(),
                    elements * width
                ));
            }
            if !(region.addr() as u64).is_multiple_of(width) {
                return refuse(format!("{what} at {:#x} is not aligned to its {width}-byte elements", region.addr()));
            }
        }
        // Backends update in place and read ahead: an operand that aliases another would give results that depend on how.
        let operands = || self.operands().map(|(region, _)| region);
        for (i, a) in operands().enumerate() {
            if let Some(b) = operands().skip(i + 1).find(|b| a.overlaps(b)) {
                return refuse(format!("{a:?} overlaps {b:?}"));
            }
        }
        if self.scalars as usize >= scalars {
            return refuse(format!("scalar set {} of {scalars}", self.scalars));
        }
        Ok(())
    }
}

impl Kernel<'_> {
    /// Its name in errors and traces.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fill { .. } => "fill",
            Self::Uniform { .. } => "uniform",
            Self::Powers { .. } => "powers",
            Self::CountDifferences { .. } => "count differences",
            Self::AdamW(_) => "adamw",
            Self::CopyPairs { .. } => "copy pairs",
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
            Self::AdamW(step) => {
                step.grad_scale.iter().chain(&step.skip).try_for_each(|region| visit(region, false))?;
                let mut operands = step.segments.iter().flat_map(AdamWSegment::operands);
                operands.try_for_each(|(region, writes)| visit(region, writes))
            }
            Self::CopyPairs { pairs } => pairs.iter().try_for_each(|(from, to)| {
                visit(from, false)?;
                visit(to, true)
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
            Self::AdamW(step) => {
                for flag in step.grad_scale.iter().chain(&step.skip) {
                    words(flag, 4)?;
                    if flag.bytes() != 4 {
                        return refuse(format!("a scale or skip flag of {} bytes; it is one f32", flag.bytes()));
                    }
                }
                step.segments.iter().try_for_each(|segment| segment.check(step.scalars.len()))
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
