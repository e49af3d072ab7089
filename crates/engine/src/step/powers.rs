//! The table of `beta^t` from which every placement takes its bias corrections.

use forebay_device::arith::{AdamWHyper, AdamWScalars};
use forebay_device::{Buffer, Event, Kernel, SharedDevice, Slab, Stream};

use crate::error::Result;
use crate::plan::STATE_BYTES;
use crate::pool::{Lease, Pool};

/// Exponents computed at a time. The host waits for the device once for each beta and so many steps.
const BLOCK: u64 = 4096;

/// Runs of powers that are kept. A schedule that moves a beta asks for another one in every step, for ever.
const KEPT: usize = 64;

/// Powers of one beta, from one exponent on.
#[derive(Debug)]
struct Run {
    beta: u32,
    first: u64,
    values: Vec<f32>,
}

/// Powers as the device computes them, kept on the host.
#[derive(Debug)]
pub struct Powers {
    device: SharedDevice,
    stream: Stream,
    scratch: Lease<Buffer>,
    landing: Lease<Slab>,
    done: Event,
    /// The one used last comes first.
    runs: Vec<Run>,
}

impl Powers {
    /// Allocates what filling the table needs.
    pub fn new(pool: &Pool) -> Result<Self> {
        let device = pool.device().clone();
        Ok(Self {
            stream: device.stream("powers")?,
            scratch: pool.device_buffer("powers", BLOCK * STATE_BYTES)?,
            landing: pool.slab("powers", &[BLOCK * STATE_BYTES])?,
            done: device.event()?,
            runs: Vec::new(),
            device,
        })
    }

    /// `beta^t`.
    pub fn power(&mut self, beta: f32, t: u64) -> Result<f32> {
        let bits = beta.to_bits();
        let place = |run: &Run| (run.beta == bits && t >= run.first).then(|| (t - run.first) as usize);
        let has = |run: &Run| place(run).is_some_and(|at| at < run.values.len());
        match self.runs.iter().position(has) {
            Some(at) => self.runs[..=at].rotate_right(1),
            None => {
                // The first time, one is enough: the beta may never be seen again.
                let known = self.runs.iter().any(|run| run.beta == bits);
                let (first, count) = if known { (t / BLOCK * BLOCK, BLOCK) } else { (t, 1) };
                let values = self.compute(beta, first, count)?;
                self.runs.truncate(KEPT - 1);
                self.runs.insert(0, Run { beta: bits, first, values });
            }
        }
        Ok(self.runs[0].values[(t - self.runs[0].first) as usize])
    }

    /// A set's scalars at step `t`, counted from 1.
    pub fn scalars(&mut self, hyper: &AdamWHyper, t: u64) -> Result<AdamWScalars> {
        Ok(hyper.with_powers(self.power(hyper.beta1 as f32, t)?, self.power(hyper.beta2 as f32, t)?))
    }

    fn compute(&self, beta: f32, first: u64, count: u64) -> Result<Vec<f32>> {
        let bytes = count * STATE_BYTES;
        let (scratch, landing) = (self.scratch.region(0, bytes)?, self.landing.part(0)?.slice(0, bytes)?);
        self.device.launch(&self.stream, &Kernel::Powers { dst: scratch.clone(), beta, first })?;
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
        Powers::new(&Pool::new(forebay_device::open("cpu").unwrap())).unwrap()
    }

    #[test]
    fn a_beta_that_moves_in_every_step_needs_no_more_memory() {
        let mut powers = powers();
        for t in 1..=1000 {
            let beta = 0.8 + t as f32 * 1e-4;
            assert_eq!(powers.power(beta, t).unwrap(), powers.compute(beta, t, 1).unwrap()[0]);
            // One that stays beside it.
            assert_eq!(powers.power(0.999, t).unwrap(), powers.compute(0.999, t, 1).unwrap()[0]);
        }
        let kept: usize = powers.runs.iter().map(|run| run.values.len()).sum();
        assert!(powers.runs.len() == KEPT && kept < 2 * BLOCK as usize, "{} runs of {kept} values", powers.runs.len());
    }

    #[test]
    fn a_beta_that_stays_is_computed_once_in_a_block() {
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
