//! The same step at every placement, in turns: on the device, on the host, on both at once.

use std::time::Instant;

use forebay::device::update::RULES;
use forebay::device::{Buffer, Dtype, HostOptions, Kernel, SharedDevice, SlabLayout, Stream};
use serde::Serialize;

use crate::{Model, finish, median};
use forebay::error::Result;
use forebay::flow::RunStats;
use forebay::optimizer::{
    Binding, HostShare, HostStats, Optimizer, OptimizerOptions, OptimizerStats, Placement, StepFlags, TableInput,
};
use forebay::plan::{PlanOptions, TensorSpec};

/// The run to make.
#[derive(Debug, Clone)]
pub struct PlacementsOptions {
    /// Parameters, of synthetic shapes; bf16 with f32 masters.
    pub params: u64,
    /// The host's threads and kernel.
    pub host: HostOptions,
    /// Slots of the device's ring and of the host's.
    pub slots: usize,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Rounds to time, each with one step at every placement.
    pub rounds: usize,
    /// Fixed shares of the host to run too.
    pub fractions: Vec<f64>,
}

/// One placement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlacementRow {
    /// `stream`, `host`, `hybrid`, or `hybrid` and a fixed share.
    pub placement: String,
    /// Times of the steps, each until all its work has ended.
    pub step_s: Vec<f64>,
    /// Their median.
    pub median_step_s: f64,
    /// 10^9 parameters per second.
    pub gparam_per_s: f64,
    /// The share of the state that the host updated in the last step.
    pub host_fraction: f64,
    /// Statistics of the host in the last step.
    pub host: HostStats,
    /// When the device's last chunk was submitted; [`HostStats::run_ns`] is the host's time.
    pub device_ns: u64,
    /// Statistics of the pipeline; `None` for the host alone.
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
    /// The better time of stream and host, divided by the time of hybrid.
    pub hybrid_gain: f64,
    /// Words of parameters that differ between the placements; must be 0.
    pub differing: u64,
}

/// Steps before the timed ones: an automatic share needs six to settle.
const WARMUP: usize = 7;

struct Contestant {
    placement: String,
    params: Buffer,
    input: TableInput,
    optimizer: Optimizer,
    step_s: Vec<f64>,
}

impl Contestant {
    fn new(
        device: &SharedDevice,
        placement: Placement,
        tensors: &[TensorSpec],
        grads: &Buffer,
        options: &PlacementsOptions,
    ) -> Result<Self> {
        let name = match placement {
            Placement::Resident => "resident".to_owned(),
            Placement::Stream => "stream".to_owned(),
            Placement::Host => "host".to_owned(),
            Placement::Hybrid(HostShare::Fixed(fraction)) => format!("hybrid {fraction}"),
            Placement::Hybrid(HostShare::Auto) => "hybrid".to_owned(),
        };
        let plan = PlanOptions { slots: options.slots, slot_bytes: options.slot_bytes, ..PlanOptions::default() };
        let made = OptimizerOptions { placement, plan, host: options.host.clone(), ..OptimizerOptions::default() };
        let optimizer = Optimizer::new(device.clone(), RULES[0], made)?;
        if placement.streams() {
            optimizer.open_ring(None)?;
        }
        optimizer.add(tensors.to_vec())?;
        let params = device.alloc(tensors.iter().map(|spec| spec.elements * 2).sum())?;
        let (mut offset, mut input) = (0, TableInput::default());
        for spec in tensors {
            let bytes = spec.elements * 2;
            let (weight, grad) = (params.region(offset, bytes)?, grads.region(offset, bytes)?);
            input.tensors.push(Some(Binding::new((weight, Dtype::Bf16), (grad, Dtype::Bf16), 0)));
            offset += bytes;
        }
        Ok(Self { placement: name, params, input, optimizer, step_s: Vec::new() })
    }

    fn step(&mut self, device: &SharedDevice, compute: &Stream) -> Result<()> {
        let (input, groups) = (vec![self.input.clone()], [RULES[0].defaults.to_vec()]);
        let start = Instant::now();
        self.optimizer.step(input, &groups, Some(compute), StepFlags::default())?;
        self.optimizer.synchronize()?;
        finish(&**device, compute)?;
        self.step_s.push(start.elapsed().as_secs_f64());
        Ok(())
    }
}

/// Runs all placements on one device, a step of each in turn.
pub fn bench_placements(device: &SharedDevice, options: &PlacementsOptions) -> Result<Placements> {
    let model = Model::synthetic(options.params)?;
    let tensors = model.tensors.iter().zip(0..).map(|(shape, number)| TensorSpec {
        name: shape.name.clone(),
        elements: shape.elements,
        columns: RULES[0].kept(RULES[0].defaults, true),
        on_host: false,
        number,
    });
    let tensors: Vec<TensorSpec> = tensors.collect();
    let elements: u64 = tensors.iter().map(|spec| spec.elements).sum();
    let compute = device.stream("compute")?;
    // The upper halves of numbers around 1, so that no element is subnormal, whichever half is read.
    let grads = device.alloc(elements * 2)?;
    device.launch(&compute, &Kernel::Fill { dst: grads.all(), byte: 0x3c })?;
    let fixed = options.fractions.iter().map(|&fraction| Placement::Hybrid(HostShare::Fixed(fraction)));
    let mut all = [Placement::Stream, Placement::Host, Placement::Hybrid(HostShare::Auto)]
        .into_iter()
        .chain(fixed)
        .map(|placement| Contestant::new(device, placement, &tensors, &grads, options))
        .collect::<Result<Vec<_>>>()?;
    for contestant in &all {
        device.launch(&compute, &Kernel::Fill { dst: contestant.params.all(), byte: 0x3f })?;
    }
    finish(&**device, &compute)?;
    for _ in 0..WARMUP + options.rounds {
        for contestant in &mut all {
            contestant.step(device, &compute)?;
        }
    }
    let differing = differing(device, &compute, &all)?;
    let stats = all.iter().map(|contestant| contestant.optimizer.stats()).collect::<Result<Vec<_>>>()?;
    let row = |(contestant, stats): (&Contestant, &OptimizerStats)| {
        let step_s = contestant.step_s[WARMUP..].to_vec();
        let (median_step_s, host) = (median(&step_s), stats.host.unwrap_or_default());
        PlacementRow {
            placement: contestant.placement.clone(),
            median_step_s,
            gparam_per_s: elements as f64 / median_step_s / 1e9,
            host_fraction: host.fraction,
            host: host.stats,
            device_ns: host.device_ns,
            streamed: contestant.optimizer.has_ring().then_some(stats.streamed),
            step_s,
        }
    };
    let rows: Vec<PlacementRow> = all.iter().zip(&stats).map(row).collect();
    let [stream, host, hybrid] = [0, 1, 2].map(|i| rows.get(i).map_or(f64::NAN, |row| row.median_step_s));
    Ok(Placements {
        device: device.info().name.clone(),
        params: elements,
        host_threads: stats.iter().filter_map(|stats| stats.host).map(|host| host.threads as usize).max().unwrap_or(0),
        rows,
        hybrid_gain: stream.min(host) / hybrid,
        differing,
    })
}

/// Words in which the parameters of the others differ from the first's.
fn differing(device: &SharedDevice, compute: &Stream, all: &[Contestant]) -> Result<u64> {
    let (count, landing) = (device.alloc(8)?, device.pin(SlabLayout::new(&[8])?)?);
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
        let device = forebay::device::open("cpu").unwrap();
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
