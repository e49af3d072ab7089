//! The numbers of one step: a set of scalars for each group and step count that occur, from one table of `base^t` for
//! every placement.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use forebay_device::{Buffer, Event, Kernel, Rule, ScalarInputs, Scalars, SharedDevice, Slab, Stream};

use crate::error::{Error, Result};
use crate::flow::{Shared, SharedKey};
use crate::memory::{Allocator, Lease};
use crate::sync::{Mutex, lock};

/// Bytes of a power, an f32.
const POWER_BYTES: u64 = 4;

/// The sets of scalars of one step.
pub(super) struct ScalarSets<'a> {
    rule: &'static Rule,
    groups: Cow<'a, [Vec<f64>]>,
    /// The set found last: neighbours mostly share one.
    last: Option<(SetKey, u32)>,
    index: HashMap<SetKey, u32>,
    pub(super) scalars: Vec<Scalars>,
}

/// What tells sets apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct SetKey {
    group: u32,
    step: u64,
    /// The kind of the parameter: see [`Rule::kind`].
    kind: u32,
}

impl<'a> ScalarSets<'a> {
    /// None yet. A group is its numbers in the order of [`Rule::hypers`].
    pub(super) fn new(rule: &'static Rule, groups: impl Into<Cow<'a, [Vec<f64>]>>) -> Result<Self> {
        let groups = groups.into();
        let wanted = rule.hypers.len();
        if let Some((group, found)) = groups.iter().enumerate().find(|(_, hypers)| hypers.len() != wanted) {
            return Err(Error::InvalidOption {
                option: "group",
                value: format!("{} numbers in group {group}", found.len()),
                remedy: format!("{} takes {wanted}: {}", rule.name, rule.hypers.join(", ")),
            });
        }
        Ok(Self { rule, groups, last: None, index: HashMap::new(), scalars: Vec::new() })
    }

    /// The set of a parameter of this many elements at its next update, and the number of that update; advances its
    /// counter if the rule counts it. An update that does not count has the number 0.
    pub(super) fn advance(
        &mut self,
        powers: &Mutex<Powers>,
        group: u32,
        steps: &mut f32,
        elements: u64,
    ) -> Result<(u32, u64)> {
        let Some(hypers) = self.groups.get(group as usize) else {
            return Err(Error::InvalidOption {
                option: "group",
                value: group.to_string(),
                remedy: format!("there are {}", self.groups.len()),
            });
        };
        let counts = (self.rule.counts)(hypers);
        if counts {
            *steps += 1.0;
        }
        let update = if counts { *steps as u64 } else { 0 };
        let key = SetKey { group, step: *steps as u64, kind: (self.rule.kind)(hypers, elements) };
        if let Some((last, index)) = self.last
            && last == key
        {
            return Ok((index, update));
        }
        let index = match self.index.get(&key) {
            Some(&index) => index,
            None => {
                self.scalars.push(lock(powers).scalars(self.rule, hypers, key.step, key.kind)?);
                self.scalars.len() as u32 - 1
            }
        };
        self.index.insert(key, index);
        self.last = Some((key, index));
        Ok((index, update))
    }
}

/// Exponents computed at a time. The host waits for the device once for each base and this many steps.
const BLOCK: u64 = 4096;

/// Runs of powers that are kept. A schedule that moves a base asks for another one in every step, for ever.
const KEPT: usize = 64;

/// Powers of one base, from one exponent on.
#[derive(Debug)]
struct PowerRun {
    base: u32,
    first: u64,
    values: Vec<f32>,
}

/// Powers as the device computes them, kept on the host.
#[derive(Debug)]
pub(super) struct Powers {
    device: SharedDevice,
    stream: Stream,
    scratch: Buffer,
    landing: Lease<Slab>,
    done: Event,
    /// The one used last comes first.
    runs: Vec<PowerRun>,
}

/// Powers that several optimizers use.
pub(super) type SharedPowers = Arc<Mutex<Powers>>;

impl Powers {
    /// Those of a device, for all its optimizers.
    pub(super) fn of(device: &SharedDevice) -> Result<SharedPowers> {
        static POWERS: Shared<Mutex<Powers>> = Shared::new();
        let make = || Ok(Mutex::new(Self::new(device)?));
        POWERS.find_or_make(SharedKey::new(device, 0, 0), |powers| lock(powers).is_sound(), make)
    }

    /// Allocates what filling the table needs.
    fn new(device: &SharedDevice) -> Result<Self> {
        let (memory, device) = (Allocator::new(device.clone()), device.clone());
        Ok(Self {
            stream: device.stream("powers")?,
            scratch: memory.alloc(BLOCK * POWER_BYTES)?,
            landing: memory.pin(&[BLOCK * POWER_BYTES])?,
            done: device.event()?,
            runs: Vec::new(),
            device,
        })
    }

    /// Whether its stream takes work: new users must not get one that died.
    fn is_sound(&self) -> bool {
        self.device.record(&self.done, &self.stream).is_ok()
    }

    /// `base^t`.
    fn power(&mut self, base: f32, t: u64) -> Result<f32> {
        let bits = base.to_bits();
        let place = |run: &PowerRun| (run.base == bits && t >= run.first).then(|| (t - run.first) as usize);
        let has = |run: &PowerRun| place(run).is_some_and(|at| at < run.values.len());
        match self.runs.iter().position(has) {
            Some(at) => self.runs[..=at].rotate_right(1),
            None => {
                // The first time, one is enough: the base may never be seen again.
                let known = self.runs.iter().any(|run| run.base == bits);
                let (first, count) = if known { (t / BLOCK * BLOCK, BLOCK) } else { (t, 1) };
                let values = self.compute(base, first, count)?;
                self.runs.truncate(KEPT - 1);
                self.runs.insert(0, PowerRun { base: bits, first, values });
            }
        }
        Ok(self.runs[0].values[(t - self.runs[0].first) as usize])
    }

    /// The scalars of a group at one step, for parameters of one kind.
    fn scalars(&mut self, rule: &Rule, hypers: &[f64], step: u64, kind: u32) -> Result<Scalars> {
        let powers = rule.powers.iter().map(|&i| self.power(hypers[i] as f32, step)).collect::<Result<Vec<f32>>>()?;
        Ok((rule.scalars)(&ScalarInputs { hypers, powers: &powers, step, kind }))
    }

    fn compute(&self, base: f32, first: u64, count: u64) -> Result<Vec<f32>> {
        let bytes = count * POWER_BYTES;
        let (scratch, landing) = (self.scratch.region(0, bytes)?, self.landing.part(0)?.slice(0, bytes)?);
        self.device.launch(&self.stream, &Kernel::Powers { dst: scratch.clone(), base, first })?;
        self.device.copy(&self.stream, &scratch, &landing)?;
        self.device.record(&self.done, &self.stream)?;
        self.device.synchronize(&self.done)?;
        super::read_f32(&self.device, &landing)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn powers() -> Powers {
        Powers::new(&forebay_device::open("cpu").unwrap()).unwrap()
    }

    #[test]
    fn a_base_that_moves_in_every_step_needs_no_more_memory() {
        let mut powers = powers();
        for t in 1..=1000 {
            let base = 0.8 + t as f32 * 1e-4;
            assert_eq!(powers.power(base, t).unwrap(), powers.compute(base, t, 1).unwrap()[0]);
            // One that stays beside it.
            assert_eq!(powers.power(0.999, t).unwrap(), powers.compute(0.999, t, 1).unwrap()[0]);
        }
        let kept: usize = powers.runs.iter().map(|run| run.values.len()).sum();
        assert!(powers.runs.len() == KEPT && kept < 2 * BLOCK as usize, "{} runs of {kept} values", powers.runs.len());
    }

    #[test]
    fn a_base_that_stays_is_computed_once_in_a_block() {
        let mut powers = powers();
        // Steps of several tensors, apart from each other and across the ends of blocks.
        let mut seen = Vec::new();
        for t in (1..3 * BLOCK).flat_map(|t| [t, t + 100]) {
            let power = powers.power(0.9, t).unwrap();
            assert!(seen.is_empty() || t % 997 != 0 || power == powers.compute(0.9, t, 1).unwrap()[0]);
            seen = powers.runs.iter().map(|run| (run.first, run.values.len() as u64)).collect();
        }
        seen.sort_unstable();
        assert_eq!(seen, [(0, BLOCK), (1, 1), (BLOCK, BLOCK), (2 * BLOCK, BLOCK), (3 * BLOCK, BLOCK)]);
    }
}
