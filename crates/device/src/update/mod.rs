//! Update rules as data: the state an optimizer keeps, its numbers, and its arithmetic for one element.
//!
//! A [`Rule`] is all that the rest of the project knows about an optimizer. The plan, the ring, the host's threads,
//! checkpoints and Python depend on its columns, never on its name. To add an optimizer, write one file here and one in
//! `cuda/kernels`, list the rule in [`RULES`], and give it a class in Python.
//!
//! # The arithmetic
//! All values are f32, every operation rounds to nearest-even, and a fused multiply-add is used exactly where one is
//! written. Each rule writes its arithmetic once in Rust, generic over the vector unit, and once in CUDA C++ with every
//! rounding as an intrinsic. The contract tests compare their bits.
//!
//! Before a rule gets a gradient, the gradient is widened to f32, multiplied with the step's scale if there is one, and
//! negated if the group maximizes. The weight that a rule updates is the parameter, or its f32 master if there is one.
//! A master whose rounding is not the parameter is replaced by the parameter, element by element. So a master that
//! starts as zero becomes the weight at the first step, and a weight that was loaded replaces its stale master. An
//! update can say whether that happened ([`Update::followed`]), or trust its masters ([`Update::trust_master`]).
//! A master may be kept in fewer bits, with the same results; see [`master`].

mod adam;
mod adamw;
pub mod format;
mod lion;
pub mod master;
mod sgd;
mod shares;

use std::fmt;
use std::ops::Range;

use crate::cpu::update::vector::Vector;
use crate::cpu::update::{Sweep, Unit};
use crate::error::{Error, Result};
use crate::kernel::Dtype;
use crate::memory::Region;
pub use format::{BLOCK, Moment, RuleColumn, StateFormat};
pub use master::{MASTER, MASTER_CARRY, MASTER_LOW, Master, MasterFormat};

/// The rules there are.
pub static RULES: [&Rule; 4] = [&adamw::RULE, &adam::RULE, &sgd::RULE, &lion::RULE];

/// The most columns a rule may have, besides the master.
pub const MAX_COLUMNS: usize = 3;

/// Numbers in one set of [`Scalars`].
pub const MAX_SCALARS: usize = 8;

/// Flag of every rule: the gradient is negated.
pub const MAXIMIZE: u32 = 1;

/// The type of one stored value of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stored {
    /// A number that arithmetic reads and writes.
    Number(Dtype),
    /// 16 bits.
    U16,
    /// 8 bits.
    U8,
}

impl Stored {
    /// Bytes of one value.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Number(dtype) => dtype.bytes(),
            Self::U16 => 2,
            Self::U8 => 1,
        }
    }

    /// Its name in plans.
    pub fn name(self) -> &'static str {
        match self {
            Self::Number(Dtype::F32) => "f32",
            Self::Number(Dtype::Bf16) => "bf16",
            Self::Number(Dtype::F16) => "f16",
            Self::U16 => "u16",
            Self::U8 => "u8",
        }
    }
}

/// One kind of state that is kept for each element of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Column {
    /// Its name in `state_dict`, or inside the engine for a part of a format.
    pub name: &'static str,
    /// The type of one stored value.
    pub stored: Stored,
    /// Elements of the parameter for each stored value: 1, the block of a scale, or the bits of a byte.
    pub block: u32,
}

impl Column {
    /// A column with one f32 for each element.
    pub const fn f32(name: &'static str) -> Self {
        Self { name, stored: Stored::Number(Dtype::F32), block: 1 }
    }

    /// Bytes of this many elements of the parameter.
    pub fn bytes(&self, elements: u64) -> u64 {
        elements.div_ceil(u64::from(self.block)) * self.stored.bytes()
    }
}

/// The numbers of one group at one step, ready for the kernels. What each means is the rule's.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Scalars {
    /// Numbers, rounded to f32.
    pub values: [f32; MAX_SCALARS],
    /// Switches; [`MAXIMIZE`] is the same for all rules.
    pub flags: u32,
    /// What they were computed from, for a backend that computes its own.
    pub origin: Origin,
}

/// The most numbers that a group may have.
pub const MAX_HYPERS: usize = 8;

/// The numbers of a group and the step that a set of [`Scalars`] is of.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Origin {
    /// In the order of [`Rule::hypers`]; zeros behind them.
    pub hypers: [f64; MAX_HYPERS],
    /// How many updates the parameter has had, this one included.
    pub step: u64,
}

/// What a rule's scalars are computed from.
#[derive(Debug, Clone, Copy)]
pub struct ScalarInputs<'a> {
    /// The group's numbers, in the order of [`Rule::hypers`].
    pub hypers: &'a [f64],
    /// For each of [`Rule::powers`], that number to the power of `step`, as the device computes it.
    pub powers: &'a [f32],
    /// How many updates the parameter has had, this one included.
    pub step: u64,
    /// The kind of the parameter: see [`Rule::kind`].
    pub kind: u32,
}

impl ScalarInputs<'_> {
    /// What the scalars keep of it.
    fn origin(&self) -> Origin {
        let mut hypers = [0.0; MAX_HYPERS];
        hypers.iter_mut().zip(self.hypers).for_each(|(kept, given)| *kept = *given);
        Origin { hypers, step: self.step }
    }
}

/// An elementwise optimizer.
pub struct Rule {
    /// Its name.
    pub name: &'static str,
    /// The state it may keep for each element.
    pub columns: &'static [RuleColumn],
    /// The numbers of a group, by name. Switches are 0 or 1.
    pub hypers: &'static [&'static str],
    /// Their values if a user gives none.
    pub defaults: &'static [f64],
    /// Which columns a group with these numbers needs: bit `i` for column `i`.
    pub keeps: fn(hypers: &[f64]) -> u32,
    /// The numbers whose power by step the scalars need, as indices into `hypers`.
    pub powers: &'static [usize],
    /// Whether an update with these numbers advances the parameter's step counter.
    pub counts: fn(hypers: &[f64]) -> bool,
    /// Whether the step counter is state that users see, under the name `step`.
    pub shows_step: bool,
    /// Whether state appears with a parameter's first update, and not when it is created.
    pub appears_late: bool,
    /// The kind of a parameter, for rules whose scalars depend on its number of elements; else 0. A group has one set of
    /// scalars for each step and kind.
    pub kind: fn(hypers: &[f64], elements: u64) -> u32,
    /// The scalars of a group at one step.
    pub scalars: fn(&ScalarInputs<'_>) -> Scalars,
    /// The arithmetic of one element; returns the new weight. `grad` is scaled and signed already, `kept` has a bit for
    /// each column that is there, and `position` is the element's index in its parameter.
    pub element:
        fn(weight: f32, grad: f32, state: &mut [f32; MAX_COLUMNS], kept: u32, s: &Scalars, position: u64) -> f32,
    /// The same for a range of a segment, on a vector unit of the CPU.
    pub(crate) sweep: SweepFn,
    /// Its kernels for CUDA, made from the file of its name in `cuda/kernels`.
    pub(crate) ptx: &'static str,
    /// The same for segments with compact masters, from the file with `_compact` behind the name.
    pub(crate) compact_ptx: &'static str,
    /// The same for segments with columns in fewer bits, from the file with `_packed` behind the name.
    pub(crate) packed_ptx: &'static str,
}

/// A sweep over part of a segment; see [`Unit::sweep`] for what the caller promises.
pub(crate) type SweepFn = unsafe fn(Unit, &Rule, &Segment, Range<usize>, Sweep<'_>);

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rule({})", self.name)
    }
}

impl PartialEq for Rule {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Rule {}

impl Rule {
    /// The rule of that name.
    pub fn named(name: &str) -> Result<&'static Self> {
        RULES.into_iter().find(|rule| rule.name == name).ok_or_else(|| {
            let names: Vec<&str> = RULES.iter().map(|rule| rule.name).collect();
            Error::InvalidOption {
                option: "rule",
                value: name.to_owned(),
                remedy: format!("use one of {}", names.join(", ")),
            }
        })
    }

    /// Its place in [`RULES`].
    pub fn index(&self) -> usize {
        RULES.iter().position(|rule| *rule == self).unwrap_or(0)
    }

    /// The columns that a group with these numbers keeps in f32, then those of the master.
    pub fn kept(&self, hypers: &[f64], master: impl Into<MasterFormat>) -> Vec<Column> {
        self.kept_as(hypers, [StateFormat::F32; MAX_COLUMNS], master)
    }

    /// The same with each of the rule's columns in its format.
    pub fn kept_as(
        &self,
        hypers: &[f64],
        formats: [StateFormat; MAX_COLUMNS],
        master: impl Into<MasterFormat>,
    ) -> Vec<Column> {
        let mask = (self.keeps)(hypers);
        let own = self.columns.iter().zip(formats).enumerate().filter(|(i, _)| mask & 1 << i != 0);
        let own = own.flat_map(|(_, (column, format))| column.kept_as(format));
        own.chain(master.into().columns().iter().copied()).collect()
    }

    /// The scalars at step `t`, counted from 1, with correctly rounded powers.
    pub fn at_step(&self, hypers: &[f64], step: u64, elements: u64) -> Scalars {
        let powers: Vec<f32> =
            self.powers.iter().map(|&i| crate::kernel::power_element(hypers[i] as f32, step)).collect();
        (self.scalars)(&ScalarInputs { hypers, powers: &powers, step, kind: (self.kind)(hypers, elements) })
    }
}

/// The arithmetic of a rule, written once for every vector unit.
pub(crate) trait Arithmetic {
    /// Updates the state of `V::N` elements and returns their new weights; see [`Rule::element`] for the arguments.
    ///
    /// # Safety
    /// The CPU must have the vector's instructions.
    unsafe fn update<V: Vector>(
        weight: V,
        grad: V,
        state: &mut [V; MAX_COLUMNS],
        kept: u32,
        s: &Splat<V>,
        position: u64,
    ) -> V;
}

/// A set of scalars, each in every lane.
#[derive(Clone, Copy)]
pub(crate) struct Splat<V> {
    pub(crate) values: [V; MAX_SCALARS],
    pub(crate) flags: u32,
}

impl<V: Vector> Splat<V> {
    /// # Safety
    /// The CPU must have the vector's instructions.
    #[inline(always)]
    pub(crate) unsafe fn new(s: &Scalars) -> Self {
        // SAFETY: as the caller promises.
        Self { values: s.values.map(|value| unsafe { V::splat(value) }), flags: s.flags }
    }

    #[inline(always)]
    pub(crate) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// [`Rule::element`] from an arithmetic.
fn element<A: Arithmetic>(
    weight: f32,
    grad: f32,
    state: &mut [f32; MAX_COLUMNS],
    kept: u32,
    s: &Scalars,
    position: u64,
) -> f32 {
    // SAFETY: a vector of one f32 needs no instructions that a CPU may lack.
    unsafe { A::update::<f32>(weight, grad, state, kept, &Splat::new(s), position) }
}

/// A flag where a switch is on.
const fn flag(on: bool, flag: u32) -> u32 {
    if on { flag } else { 0 }
}

/// One update of any number of segments.
#[derive(Debug, Clone)]
pub struct Update<'a> {
    /// The rule.
    pub rule: &'static Rule,
    /// The parts of parameters to update. No two may overlap.
    pub segments: &'a [Segment],
    /// The sets of scalars that the segments name.
    pub scalars: &'a [Scalars],
    /// An f32 on the device that every gradient is multiplied with: a clip coefficient.
    pub grad_scale: Option<Region>,
    /// An f32 on the device; where it is not zero, nothing is changed: GradScaler's `found_inf`.
    pub skip: Option<Region>,
    /// Whether masters count as they are, also where their rounding is not the weight. Weights with a master are then only
    /// written. So an update can be done again after its weights were overwritten.
    pub trust_master: bool,
    /// A u32 on the device that becomes 1 where a master gives way to its weight, and is never set back. Where nothing
    /// gives way it is not touched.
    pub followed: Option<Region>,
}

impl<'a> Update<'a> {
    /// An update that is not scaled, not skipped, and whose masters follow weights.
    pub fn new(rule: &'static Rule, segments: &'a [Segment], scalars: &'a [Scalars]) -> Self {
        Self { rule, segments, scalars, grad_scale: None, skip: None, trust_master: false, followed: None }
    }
}

/// A run of elements of one parameter, with the state that belongs to them.
#[derive(Debug, Clone)]
pub struct Segment {
    /// The parameter's elements.
    pub weight: Region,
    /// Their type.
    pub weight_dtype: Dtype,
    /// The gradient's elements.
    pub grad: Region,
    /// Their type.
    pub grad_dtype: Dtype,
    /// The rule's columns, in its order; `None` for a column that is not kept.
    pub state: [Option<Moment>; MAX_COLUMNS],
    /// Master weights.
    pub master: Option<Master>,
    /// The index in its parameter of the first element.
    pub first: u64,
    /// Which set of scalars applies.
    pub scalars: u32,
    /// Keys of the random numbers with which columns in fewer bits are rounded, one for each column; `None` to round to
    /// nearest. See [`format::random`].
    pub keys: Option<[u32; MAX_COLUMNS]>,
}

impl Segment {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.weight.bytes() / self.weight_dtype.bytes()
    }

    /// A bit for each column that is there.
    pub fn kept(&self) -> u32 {
        self.state.iter().enumerate().fold(0, |kept, (i, column)| kept | u32::from(column.is_some()) << i)
    }

    /// Everything it touches, and whether it is written.
    pub(crate) fn operands(&self) -> impl Iterator<Item = (&Region, bool)> {
        let masters = self.master.iter().flat_map(Master::columns).map(|(_, region)| region);
        let state = self.state.iter().flatten().flat_map(Moment::regions).chain(masters);
        state.map(|region| (region, true)).chain([(&self.weight, true), (&self.grad, false)])
    }

    /// Whether its masters are compact.
    pub(crate) fn is_compact(&self) -> bool {
        matches!(self.master, Some(Master::Compact { .. }))
    }

    /// Whether a column is kept in fewer bits than an f32.
    pub(crate) fn is_packed(&self) -> bool {
        self.state.iter().flatten().any(|moment| moment.format() != StateFormat::F32)
    }

    /// The same by the names that errors give them.
    fn named(&self, rule: &Rule) -> impl Iterator<Item = (&'static str, &Region)> {
        let own = rule.columns.iter().zip(&self.state).filter_map(|(column, moment)| Some((column, moment.as_ref()?)));
        let own = own.flat_map(|(column, moment)| column.kept_as(moment.format()).into_iter().zip(moment.regions()));
        let masters = self.master.iter().flat_map(Master::columns).map(|(column, region)| (*column, region));
        let columns = own.chain(masters);
        columns.map(|(column, region)| (column.name, region)).chain([("weight", &self.weight), ("grad", &self.grad)])
    }

    /// Refuses operands that do not fit together.
    pub(crate) fn check(&self, rule: &Rule, scalars: usize, trust_master: bool) -> Result<()> {
        let refuse = |reason: String| Err(Error::BadOperands { operation: rule.name, reason });
        let elements = self.elements();
        if elements == 0 || elements > u64::from(u32::MAX) {
            return refuse(format!("a segment of {elements} elements; it takes 1 to {}", u32::MAX));
        }
        let fits = |what: &str, region: &Region, bytes: u64, align: u64| {
            if region.bytes() != bytes {
                return refuse(format!("{what} has {} bytes where {elements} elements need {bytes}", region.bytes()));
            }
            if !(region.addr() as u64).is_multiple_of(align) {
                return refuse(format!("{what} at {:#x} is not aligned to its {align}-byte elements", region.addr()));
            }
            Ok(())
        };
        for (what, region, dtype) in
            [("weight", &self.weight, self.weight_dtype), ("grad", &self.grad, self.grad_dtype)]
        {
            fits(what, region, elements * dtype.bytes(), dtype.bytes())?;
        }
        let needed = least_kept(rule);
        for (i, moment) in self.state.iter().enumerate() {
            match (moment, rule.columns.get(i)) {
                (Some(moment), Some(column)) => {
                    for (column, region) in column.kept_as(moment.format()).iter().zip(moment.regions()) {
                        fits(column.name, region, column.bytes(elements), column.stored.bytes())?;
                    }
                }
                (None, Some(column)) if needed & 1 << i != 0 => return refuse(format!("{} is missing", column.name)),
                (Some(moment), None) => {
                    let names: Vec<&str> = rule.columns.iter().map(|column| column.name).collect();
                    let region = moment.regions().next();
                    return refuse(format!("{region:?} is column {i} of its state, which is {}", names.join(", ")));
                }
                (None, _) => {}
            }
        }
        for (column, region) in self.master.iter().flat_map(Master::columns) {
            fits(column.name, region, column.bytes(elements), column.stored.bytes())?;
        }
        if self.is_compact() && self.weight_dtype != Dtype::Bf16 {
            return refuse(format!("compact masters of {:?} weights; they are for bf16", self.weight_dtype));
        }
        if self.is_compact() && trust_master {
            return refuse("compact masters cannot be trusted without their weights; use f32 masters".to_owned());
        }
        // Backends update in place and read ahead: an operand that aliases another would give results that depend on how.
        for (i, (name, a)) in self.named(rule).enumerate() {
            if let Some((other, b)) = self.named(rule).skip(i + 1).find(|(_, b)| a.overlaps(b)) {
                return refuse(format!("{name} overlaps {other}: {a:?} and {b:?}"));
            }
        }
        if self.scalars as usize >= scalars {
            return refuse(format!("scalar set {} of {scalars}", self.scalars));
        }
        Ok(())
    }
}

/// The columns that a rule always keeps: those with all switches off.
fn least_kept(rule: &Rule) -> u32 {
    const OFF: [f64; 16] = [0.0; 16];
    (rule.keeps)(&OFF[..rule.hypers.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_fits_the_kernels() {
        for rule in RULES {
            assert!(rule.columns.len() <= MAX_COLUMNS, "{rule:?}");
            assert_eq!(rule.hypers.len(), rule.defaults.len(), "{rule:?}");
            assert!(rule.hypers.len() <= MAX_HYPERS && rule.powers.iter().all(|&i| i < rule.hypers.len()), "{rule:?}");
            let names = rule.columns.iter().flat_map(|column| [column.name, column.scale]);
            assert_eq!(names.collect::<std::collections::HashSet<_>>().len(), 2 * rule.columns.len(), "{rule:?}");
            assert!(rule.columns.iter().all(|column| column.name != "step" && column.name != MASTER.name), "{rule:?}");
            assert_eq!(Rule::named(rule.name).unwrap().index(), rule.index());
            assert!(rule.ptx.contains(&format!(".entry {}_bf16_f32", rule.name)), "{rule:?}: make ptx");
            assert!(rule.compact_ptx.contains(&format!(".entry {}_compact_f32", rule.name)), "{rule:?}: make ptx");
            assert!(rule.packed_ptx.contains(&format!(".entry {}_packed", rule.name)), "{rule:?}: make ptx");
        }
        let refusal = Rule::named("rprop").unwrap_err().to_string();
        assert!(refusal.starts_with("invalid rule: rprop; use one of adamw, adam, sgd, lion"), "{refusal}");
    }

    /// With every combination of switches, a rule keeps the columns that it cannot do without.
    #[test]
    fn every_group_keeps_what_its_rule_needs() {
        for rule in RULES {
            let every = 1u32 << rule.hypers.len();
            for on in 0..every {
                let hypers: Vec<f64> = (0..rule.hypers.len()).map(|i| f64::from(on >> i & 1) * 0.5).collect();
                let kept = (rule.keeps)(&hypers);
                assert_eq!(kept & least_kept(rule), least_kept(rule), "{rule:?} {hypers:?}");
                assert!(kept < 1 << rule.columns.len(), "{rule:?} {hypers:?}");
                assert_eq!(rule.kept(&hypers, true).len() as u32, kept.count_ones() + 1, "{rule:?} {hypers:?}");
            }
        }
    }

    #[test]
    fn bytes_come_from_columns() {
        assert_eq!(Column::f32("x").bytes(1000), 4000);
        let scale = Column { name: "scale", stored: Stored::Number(Dtype::Bf16), block: 256 };
        assert_eq!((scale.bytes(0), scale.bytes(1), scale.bytes(256), scale.bytes(257)), (0, 2, 2, 4));
        let compact =
            |elements| MasterFormat::Compact.columns().iter().map(|column| column.bytes(elements)).sum::<u64>();
        assert_eq!((compact(1), compact(8), compact(9), compact(8000)), (3, 17, 20, 17_000));
    }
}
