//! The table of `beta^t` from which every placement takes its bias corrections.

use std::collections::HashMap;

use forebay_device::arith::{AdamWHyper, AdamWScalars};
use forebay_device::{Buffer, Event, Kernel, SharedDevice, Slab, Stream};

use crate::error::Result;
use crate::plan::STATE_BYTES;
use crate::pool::{Lease, Pool};

/// Exponents computed at a time. The host waits for the device once for each beta and so many steps.
const BLOCK: u64 = 4096;

/// Powers as the device computes them, kept on the host.
#[derive(Debug)]
pub struct Powers {
    device: SharedDevice,
    stream: Stream,
    scratch: Lease<Buffer>,
    landing: Lease<Slab>,
    done: Event,
    blocks: HashMap<(u32, u64), Vec<f32>>,
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
            blocks: HashMap::new(),
            device,
        })
    }

    /// `beta^t`.
    pub fn power(&mut self, beta: f32, t: u64) -> Result<f32> {
        let block = t / BLOCK;
        if !self.blocks.contains_key(&(beta.to_bits(), block)) {
            let values = self.compute(beta, block * BLOCK)?;
            self.blocks.insert((beta.to_bits(), block), values);
        }
        Ok(self.blocks[&(beta.to_bits(), block)][(t % BLOCK) as usize])
    }

    /// A set's scalars at step `t`, counted from 1.
    pub fn scalars(&mut self, hyper: &AdamWHyper, t: u64) -> Result<AdamWScalars> {
        Ok(hyper.with_powers(self.power(hyper.beta1 as f32, t)?, self.power(hyper.beta2 as f32, t)?))
    }

    fn compute(&self, beta: f32, first: u64) -> Result<Vec<f32>> {
        let landing = self.landing.part(0)?;
        self.device.launch(&self.stream, &Kernel::Powers { dst: self.scratch.all(), beta, first })?;
        self.device.copy(&self.stream, &self.scratch.all(), &landing)?;
        self.device.record(&self.done, &self.stream)?;
        self.device.synchronize(&self.done)?;
        super::read_f32(&self.device, &landing)
    }
}
