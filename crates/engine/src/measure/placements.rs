//! The same step at every placement, in turns: on the device, on the host, and on both at once.

use std::sync::Arc;
use std::time::Instant;

use forebay_device::arith::AdamWHyper;
use forebay_device::{Buffer, Dtype, HostOptions, Kernel, SharedDevice, Stream};
use serde::Serialize;

use super::{Model, finish, median};
use crate::error::Result;
use crate::pipeline::{Pipeline, RunStats};
use crate::plan::{PlanOptions, StateKind, StepPlan, TensorSpec};
use crate::pool::Pool;
use crate::step::{Binding, HostShare, HostState, HostStats, Hybrid, PlacedAdamW, StepInputs};

/// What to run.
#[derive(Debug, Clone)]
pub struct PlacementsOptions {
    /// Parameters, of made-up shapes; bf16 with f32 masters.
    pub params: u64,
    /// The host's threads and kernel.
    pub host: HostOptions,
    /// Slots of either ring, and their size.
    pub slots: usize,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Rounds to time, each with one step at every placement.
    pub rounds: usize,
    /// Fixed shares of the host to run as well.
    pub fractions: Vec<f64>,
}

/// One placement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlacementRow {
    /// `stream`, `host`, `hybrid`, or `hybrid` and a fixed share.
    pub placement: String,
    /// Times of the steps, each until everything had ended.
    pub step_s: Vec<f64>,
    /// Their middle.
    pub median_step_s: f64,
    /// 10^9 parameters per second.
    pub gparam_per_s: f64,
    /// The part of the state that the host updated in the last step.
    pub host_fraction: f64,
    /// What the host did in the last step.
    pub host: HostStats,
    /// When the device's end had submitted its last chunk; [`HostStats::run_ns`] is the other end.
    pub device_ns: u64,
    /// What the pipeline did; nothing on the host alone.
    pub streamed: Option<RunStats>,
}

/// All placements.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Placements {
    /// The device.
    pub device: String,
    /// Parameters.
    pub params: u64,
    /// The host's threads.
    pub host_threads: usize,
    /// The rows.
    pub rows: Vec<PlacementRow>,
    /// The better of stream and host, by the time of hybrid.
    pub hybrid_gain: f64,
    /// Words of parameters that differ between the placements; 0 if they are what they should be.
    pub differing: u64,
}

/// Steps before the timed ones: what "auto" needs to settle, and one more.
const WARMUP: usize = 7;

struct Contestant {
    placement: String,
    params: Buffer,
    bindings: Vec<Vec<Binding>>,
    stores: Vec<PlacedAdamW>,
    pipeline: Option<Arc<Pipeline>>,
    hybrid: Hybrid,
    step_s: Vec<f64>,
}

impl Contestant {
    fn new(
        pool: &Pool,
        share: Option<HostShare>,
        plan: &Arc<StepPlan>,
        grads: &Buffer,
        options: &PlacementsOptions,
    ) -> Result<Self> {
        let (slots, slot_bytes) = (options.slots, options.slot_bytes);
        let pipeline = match share {
            None => None,
            Some(_) => Some(Arc::new(Pipeline::new(pool, slots, slot_bytes)?)),
        };
        let placement = match share {
            None => "host".to_owned(),
            Some(HostShare::Fixed(0.0)) => "stream".to_owned(),
            Some(HostShare::Fixed(fraction)) => format!("hybrid {fraction}"),
            Some(HostShare::Auto) => "hybrid".to_owned(),
        };
        let share = share.unwrap_or(HostShare::Fixed(1.0));
        let params = pool.device().alloc(plan.elements() * 2)?;
        let mut offset = 0;
        let mut bindings = Vec::with_capacity(plan.tensors().len());
        for spec in plan.tensors() {
            let bytes = spec.elements * 2;
            bindings.push(Binding {
                param: params.region(offset, bytes)?,
                param_dtype: Dtype::Bf16,
                grad: Some((grads.region(offset, bytes)?, Dtype::Bf16)),
                scalars: 0,
            });
            offset += bytes;
        }
        let state = HostState::new(pool, plan.clone())?;
        Ok(Self {
            placement,
            params,
            bindings: vec![bindings],
            stores: vec![PlacedAdamW::new(state, pipeline.clone())],
            pipeline,
            hybrid: Hybrid::new(pool, share, &options.host, slots, slot_bytes)?,
            step_s: Vec::new(),
        })
    }

    fn step(&mut self, device: &SharedDevice, t: u64, compute: &Stream) -> Result<()> {
        let scalars = [AdamWHyper::default().at_step(t)];
        let inputs = StepInputs { scalars: &scalars, ..StepInputs::default() };
        self.pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.begin())?;
        let start = Instant::now();
        self.hybrid.run(&self.stores, &self.bindings, &[], &inputs, compute)?;
        self.pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.drain())?;
        finish(&**device, compute)?;
        self.step_s.push(start.elapsed().as_secs_f64());
        Ok(())
    }
}

/// Runs all placements on one device, a step of each in turn.
pub fn bench_placements(device: &SharedDevice, options: &PlacementsOptions) -> Result<Placements> {
    let model = Model::synthetic(options.params)?;
    let tensors = model.tensors.iter().map(|shape| TensorSpec {
        name: shape.name.clone(),
        elements: shape.elements,
        kinds: StateKind::set(false, true),
        on_host: false,
    });
    let plan_options = PlanOptions { slots: options.slots, slot_bytes: options.slot_bytes, ..PlanOptions::default() };
    let plan = Arc::new(StepPlan::new(tensors.collect(), plan_options)?);
    let (pool, compute) = (Pool::new(device.clone()), device.stream("compute")?);
    // The upper halves of numbers around 1, so that no element is subnormal, whichever half is read.
    let grads = device.alloc(plan.elements() * 2)?;
    device.launch(&compute, &Kernel::Fill { dst: grads.all(), byte: 0x3c })?;
    let fixed = options.fractions.iter().map(|&fraction| Some(HostShare::Fixed(fraction)));
    let mut all = [Some(HostShare::Fixed(0.0)), None, Some(HostShare::Auto)]
        .into_iter()
        .chain(fixed)
        .map(|share| Contestant::new(&pool, share, &plan, &grads, options))
        .collect::<Result<Vec<_>>>()?;
    for contestant in &all {
        device.launch(&compute, &Kernel::Fill { dst: contestant.params.all(), byte: 0x3f })?;
    }
    finish(&**device, &compute)?;
    for round in 0..WARMUP + options.rounds {
        for contestant in &mut all {
            contestant.step(device, 1 + round as u64, &compute)?;
        }
    }
    let differing = differing(device, &pool, &compute, &all)?;
    let rows: Vec<PlacementRow> = all
        .iter()
        .map(|contestant| {
            let step_s = contestant.step_s[WARMUP..].to_vec();
            let median_step_s = median(&step_s);
            PlacementRow {
                placement: contestant.placement.clone(),
                median_step_s,
                gparam_per_s: plan.elements() as f64 / median_step_s / 1e9,
                host_fraction: contestant.hybrid.last_fraction(),
                host: contestant.hybrid.lane().stats(),
                device_ns: contestant.hybrid.device_ns(),
                streamed: contestant.pipeline.as_ref().map(|pipeline| pipeline.stats()),
                step_s,
            }
        })
        .collect();
    let [stream, host, hybrid] = [0, 1, 2].map(|i| rows.get(i).map_or(f64::NAN, |row| row.median_step_s));
    Ok(Placements {
        device: device.info().name.clone(),
        params: plan.elements(),
        host_threads: all.first().map_or(0, |contestant| contestant.hybrid.lane().threads().threads()),
        rows,
        hybrid_gain: stream.min(host) / hybrid,
        differing,
    })
}

/// Words in which the parameters of the others differ from the first's.
fn differing(device: &SharedDevice, pool: &Pool, compute: &Stream, all: &[Contestant]) -> Result<u64> {
    let (count, landing) = (pool.device_buffer("count", 8)?, pool.slab("count", &[8])?);
    device.launch(compute, &Kernel::Fill { dst: count.all(), byte: 0 })?;
    if let Some((first, others)) = all.split_first() {
        let words = |buffer: &Buffer| buffer.region(0, buffer.bytes() / 4 * 4);
        for other in others {
            let (a, b) = (words(&first.params)?, words(&other.params)?);
            device.launch(compute, &Kernel::CountDifferences { a, b, count: count.all() })?;
        }
    }
    device.copy(compute, &count.all(), &landing.part(0)?)?;
    finish(&**device, compute)?;
    let mut bytes = [0; 8];
    device.read(&landing.part(0)?, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_agree_and_are_timed() {
        let device = forebay_device::open("cpu").unwrap();
        let options = PlacementsOptions {
            params: 100_000,
            host: HostOptions::default(),
            slots: 3,
            slot_bytes: 64 << 10,
            rounds: 2,
            fractions: vec![0.5],
        };
        let found = bench_placements(&device, &options).unwrap();
        assert_eq!(found.differing, 0);
        let names: Vec<&str> = found.rows.iter().map(|row| row.placement.as_str()).collect();
        assert_eq!(names, ["stream", "host", "hybrid", "hybrid 0.5"]);
        assert!(found.rows.iter().all(|row| row.step_s.len() == 2 && row.median_step_s > 0.0));
        assert_eq!((found.rows[0].host_fraction, found.rows[1].host_fraction), (0.0, 1.0));
    }
}
