//! `forebay bench step`: the streamed step over a model's shapes, compared with the wire and with an unstreamed
//! update.

use std::time::Instant;

use forebay::device::update::RULES;
use forebay::device::{self, Backend, HostMemory, SharedDevice};
use serde::Serialize;

use crate::exactness::{Exactness, Kept, Resident, Workload, cut_check, specs};
use crate::models::Model;
use crate::{Progress, finish, finish_with, giga_per_s, median, wire};
use forebay::error::{Error, Result};
use forebay::flow::RunStats;
use forebay::optimizer::{Optimizer, OptimizerOptions, StepFlags};
use forebay::plan::{PlanOptions, StepPlan};
use forebay::trace::{self, Recording, TraceOptions};

/// The run to make.
#[derive(Debug, Clone)]
pub struct StepBenchOptions {
    /// The shapes.
    pub model: Model,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Slots in the ring.
    pub slots: usize,
    /// Steps to time, after one that does not count.
    pub steps: u64,
    /// Bytes copied each way for each size when the wire is measured.
    pub wire_bytes: u64,
    /// Whether to record a trace of one more step.
    pub trace: bool,
    /// How the state is kept.
    pub kept: Kept,
}

impl StepBenchOptions {
    /// The defaults for a model: a ring of 4 slots of 16 MiB, five timed steps.
    pub fn new(model: Model) -> Self {
        let PlanOptions { slot_bytes, slots, .. } = PlanOptions::default();
        Self { model, slot_bytes, slots, steps: 5, wire_bytes: 2 << 30, trace: false, kept: Kept::default() }
    }

    /// The defaults for a backend: a model that it steps in seconds.
    pub fn for_backend(backend: Backend) -> Result<Self> {
        Ok(Self::new(match backend {
            Backend::Cuda | Backend::Torch => Model::named("qwen2.5-3b")?,
            Backend::Cpu => Model::synthetic(40_000_000)?,
        }))
    }

    /// Synthetic shapes with this many parameters. Sizes that can never fit are refused before the shapes are made:
    /// their list alone might not fit either.
    pub fn synthetic(device: &SharedDevice, params: u64, slot_bytes: u64, slots: usize) -> Result<Self> {
        check_fit(device, params, Kept::default(), slot_bytes, slots)?;
        Ok(Self { slot_bytes, slots, ..Self::new(Model::synthetic(params)?) })
    }
}

/// The results of a run.
#[derive(Debug, Clone, Serialize)]
pub struct StepBench {
    /// Version of the library that ran.
    pub version: &'static str,
    /// The name that opens the device.
    pub device: String,
    /// The product name of the device.
    pub device_model: String,
    /// The name of the model.
    pub model: String,
    /// Parameters.
    pub params: u64,
    /// The format of the moments.
    pub state: &'static str,
    /// The format of the masters; empty for f32 parameters, which have none.
    pub master: &'static str,
    /// Bytes of state for each parameter, each way.
    pub bytes_per_param: f64,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of one slot.
    pub chunk_bytes: u64,
    /// Slots.
    pub slots: usize,
    /// Chunks of one step.
    pub chunks: usize,
    /// Times of the timed steps, from the call until the last store has ended.
    pub step_s: Vec<f64>,
    /// Their median.
    pub median_step_s: f64,
    /// From the call until it returned, median.
    pub median_call_s: f64,
    /// 10^9 parameters per second, at the median.
    pub gparam_per_s: f64,
    /// Payload each way, at the median.
    pub gbps_each_way: f64,
    /// The wire: the better of two measurements, before and after the steps.
    pub wire_gbps: f64,
    /// The rate each way in percent of the wire.
    pub percent_of_wire: f64,
    /// The payload over the wire: the shortest time that the wire allows.
    pub floor_step_s: f64,
    /// Bytes of the ring on the device.
    pub ring_bytes: u64,
    /// Free memory that the driver lost to the ring, its streams and events.
    pub driver_ring_bytes: u64,
    /// Free memory that the driver lost to the mapping of pinned memory: 8 bytes for each page of 4 KiB.
    pub driver_pin_bytes: u64,
    /// Pinned host memory.
    pub pinned_bytes: u64,
    /// The rate of pinning.
    pub pin_gib_per_s: f64,
    /// Whether the pinned memory is in huge pages.
    pub pin_huge_pages: bool,
    /// Allocations, slabs, streams and events made during the timed steps; must be 0.
    pub resources_made_in_steps: u64,
    /// Times and bytes of the stages in the last timed step.
    pub last_step: RunStats,
    /// Exactness of the run itself; `None` if the device has no room for an unstreamed copy.
    pub exactness: Option<Exactness>,
    /// Exactness with every tensor cut and the ring wrapped at least three times.
    pub cut_exactness: Exactness,
    /// The trace of one more step, if requested.
    #[serde(skip)]
    pub trace: Option<Recording>,
}

impl StepBench {
    /// Whether every value compared was equal.
    pub fn is_exact(&self) -> bool {
        self.cut_exactness.differing == 0 && self.exactness.as_ref().is_none_or(|e| e.differing == 0)
    }
}

/// Refuses a model or a ring that can never fit, with all the numbers, before anything is measured.
fn check_fit(device: &SharedDevice, params: u64, kept: Kept, slot_bytes: u64, slots: usize) -> Result<()> {
    let state = (params as f64 * kept.bytes_per_element(RULES[0])) as u64;
    let ring = slot_bytes.saturating_mul(slots as u64);
    let on_device = params.saturating_mul(2 * kept.dtype().bytes()).saturating_add(ring);
    let (memory, host) = (device.memory()?, HostMemory::now());
    if on_device > memory.free_bytes {
        return Err(Error::Device(device::Error::OutOfDeviceMemory {
            device: format!("{} (parameters, gradients and ring)", device.info().name),
            requested_bytes: on_device,
            available_bytes: memory.free_bytes,
            capacity_bytes: memory.capacity_bytes,
        }));
    }
    // The CPU backend's device memory is host memory too.
    let on_host = if device.info().backend == Backend::Cpu { state.saturating_add(on_device) } else { state };
    if on_host > host.available_bytes {
        return Err(Error::Device(device::Error::SlabLargerThanMemory {
            requested_bytes: on_host,
            available_bytes: host.available_bytes,
            memory_bytes: host.total_bytes,
        }));
    }
    Ok(())
}

/// Whether an unstreamed copy fits too. A tenth of the device stays free for the driver and other processes.
fn has_room(device: &SharedDevice, bytes: u64) -> Result<bool> {
    let memory = device.memory()?;
    let on_device = memory.free_bytes > bytes + memory.capacity_bytes / 10;
    Ok(on_device && (device.info().backend != Backend::Cpu || HostMemory::now().available_bytes > 2 * bytes))
}

/// Times the step, and compares its result with an unstreamed one bit for bit.
pub fn bench_step(device: &SharedDevice, options: &StepBenchOptions, progress: &mut dyn Progress) -> Result<StepBench> {
    let StepBenchOptions { model, slot_bytes, slots, steps, wire_bytes, kept, .. } = options;
    let kept = *kept;
    let tensors = &model.tensors;
    if *steps == 0 {
        return Err(Error::InvalidOption {
            option: "steps",
            value: "0".to_owned(),
            remedy: "time at least one step".to_owned(),
        });
    }
    check_fit(device, model.params(), kept, *slot_bytes, *slots)?;
    let plan_options =
        PlanOptions { slot_bytes: *slot_bytes, slots: *slots, on_host_too: false, ..PlanOptions::default() };
    let (rule, groups) = (RULES[0], [RULES[0].defaults.to_vec()]);
    // Before anything is measured: a plan that cannot be made is refused at once.
    let plan = StepPlan::new(specs(rule, tensors, kept), plan_options)?;

    progress.begin("exactness, every tensor cut", 1);
    let cut_exactness = cut_check(device, rule, tensors, kept, *slots)?;
    progress.advance();

    let sizes = wire::WIRE_SIZES.len() as u64;
    progress.begin("wire", sizes);
    let wire_before = wire::measure(device, *wire_bytes, || progress.advance())?;

    progress.begin("set-up: parameters, gradients, pinned state", 3);
    let compute = device.stream("compute")?;
    let workload = Workload::new(device, tensors, kept, &compute)?;
    finish(&**device, &compute)?;
    progress.advance();
    let free = || -> Result<u64> { Ok(device.memory()?.free_bytes) };
    let before = free()?;
    let options_of_step = OptimizerOptions { plan: plan_options, ..OptimizerOptions::default() };
    let streamed = Optimizer::new(device.clone(), rule, options_of_step)?;
    streamed.open_ring(None)?;
    let with_ring = free()?;
    streamed.add(specs(rule, tensors, kept))?;
    let driver_ring_bytes = before.saturating_sub(with_ring);
    let driver_pin_bytes = with_ring.saturating_sub(free()?);
    progress.advance();
    let resident = if has_room(device, Resident::bytes(rule, tensors, kept))? {
        Some(Resident::new(device, rule, tensors, &workload, &compute)?)
    } else {
        None
    };
    finish(&**device, &compute)?;
    progress.advance();

    progress.begin("steps", steps + 1);
    let (mut times, mut calls) = (Vec::new(), Vec::new());
    let idle = device.event()?;
    let mut made_before = device.counters().total();
    for t in 1..=steps + 1 {
        workload.new_gradients(&compute, t)?;
        finish_with(&**device, &compute, &idle)?;
        let (input, flags) = (workload.input(), StepFlags::default());
        let start = Instant::now();
        streamed.step(input, &groups, Some(&compute), flags)?;
        let call = start.elapsed().as_secs_f64();
        streamed.synchronize()?;
        if t == 1 {
            made_before = device.counters().total();
        } else {
            times.push(start.elapsed().as_secs_f64());
            calls.push(call);
        }
        if let Some(resident) = &resident {
            resident.step(&groups, &compute)?;
        }
        progress.advance();
    }
    let made = device.counters().total();
    let last_step = streamed.stats()?.streamed;

    let exactness = match &resident {
        None => None,
        Some(resident) => {
            progress.begin("exactness, this run", 1);
            let (compared, differing) = resident.differing(&workload, &streamed, &compute)?;
            progress.advance();
            Some(Exactness {
                steps: steps + 1,
                compared,
                differing,
                tensors: tensors.len(),
                cut_tensors: plan.cut_tensors(),
                ring_wraps: plan.chunks().len() / slots,
            })
        }
    };
    let trace = if options.trace {
        let recorder = trace::start(TraceOptions { capacity: 8 * plan.chunks().len() + 1024 })?;
        let step = streamed.step(workload.input(), &groups, Some(&compute), StepFlags::default());
        let ended = step.and_then(|()| streamed.synchronize());
        let recording = recorder.stop();
        ended?;
        Some(recording)
    } else {
        None
    };

    progress.begin("wire, again", sizes);
    let wire_gbps = wire::measure(device, *wire_bytes, || progress.advance())?.max(wire_before);

    let pin = streamed.pin_stats(0)?.unwrap_or_default();
    let (median_step_s, payload) = (median(&times), plan.payload_bytes());
    let gbps_each_way = giga_per_s(payload, median_step_s);
    Ok(StepBench {
        version: forebay::VERSION,
        device: device.info().name.clone(),
        device_model: device.info().model.clone(),
        model: model.name.clone(),
        params: model.params(),
        state: kept.state.name(),
        master: kept.master_name(),
        bytes_per_param: payload as f64 / model.params() as f64,
        tensors: tensors.len(),
        chunk_bytes: *slot_bytes,
        slots: *slots,
        chunks: plan.chunks().len(),
        median_step_s,
        median_call_s: median(&calls),
        step_s: times,
        gparam_per_s: giga_per_s(model.params(), median_step_s),
        gbps_each_way,
        wire_gbps,
        percent_of_wire: 100.0 * gbps_each_way / wire_gbps,
        floor_step_s: payload as f64 / (wire_gbps * 1e9),
        ring_bytes: plan.ring_bytes(),
        driver_ring_bytes,
        driver_pin_bytes,
        pinned_bytes: pin.bytes,
        pin_gib_per_s: pin.bytes as f64 / f64::from(1 << 30) / ((pin.fault_ns + pin.register_ns) as f64 / 1e9),
        pin_huge_pages: pin.huge_pages,
        resources_made_in_steps: made - made_before,
        last_step,
        exactness,
        cut_exactness,
        trace,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Silent;

    /// A device that no other test creates resources on.
    fn device() -> SharedDevice {
        device::CpuDevice::open(device::CpuOptions::default()).unwrap()
    }

    #[test]
    fn a_run_is_exact_and_makes_nothing_in_its_steps() {
        let device = device();
        let mut options = StepBenchOptions::synthetic(&device, 100_000, 64 << 10, 3).unwrap();
        (options.steps, options.wire_bytes, options.trace) = (2, 1 << 20, true);
        let found = bench_step(&device, &options, &mut Silent).unwrap();
        assert!(found.is_exact() && found.exactness.is_some());
        assert_eq!((found.params, found.slots, found.step_s.len()), (100_000, 3, 2));
        assert_eq!(found.resources_made_in_steps, 0);
        assert_eq!(found.ring_bytes, 3 * (64 << 10));
        assert_eq!(found.last_step.fetch_bytes, 8 * 100_000);
        assert!(found.trace.is_some() && found.percent_of_wire > 0.0);
        let json = serde_json::to_value(&found).unwrap();
        assert!(json["median_step_s"].is_f64() && json.get("trace").is_none());
    }

    #[test]
    fn every_format_of_state_is_exact_and_moves_its_bytes() {
        use forebay::device::{MasterFormat, StateFormat};
        let device = device();
        for (state, master, bytes) in [
            (StateFormat::F32, MasterFormat::F32, 12.0),
            (StateFormat::F32, MasterFormat::Compact, 10.125),
            (StateFormat::Bf16, MasterFormat::Compact, 6.125),
            (StateFormat::Blocks, MasterFormat::Compact, 4.156),
            (StateFormat::Blocks, MasterFormat::None, 2.031),
        ] {
            let mut options = StepBenchOptions::synthetic(&device, 300_000, 64 << 10, 3).unwrap();
            (options.steps, options.wire_bytes, options.kept) = (2, 1 << 20, Kept { state, master });
            let found = bench_step(&device, &options, &mut Silent).unwrap();
            assert!(found.is_exact() && found.exactness.is_some(), "{state:?} {master:?}: {found:?}");
            // Small tensors are kept in f32, and blocks are not all full.
            assert!(
                (found.bytes_per_param - bytes).abs() < 0.02 * bytes,
                "{state:?} {master:?}: {}",
                found.bytes_per_param
            );
        }
    }

    #[test]
    fn a_run_without_steps_is_refused() {
        let device = device();
        let mut options = StepBenchOptions::new(Model::synthetic(1000).unwrap());
        options.steps = 0;
        let refused = bench_step(&device, &options, &mut Silent).unwrap_err().to_string();
        assert!(refused.contains("steps: 0"), "{refused}");
    }

    #[test]
    fn what_cannot_fit_is_refused_with_the_numbers_and_without_overflow() {
        for (params, slot_bytes, slots) in
            [(9 << 50, 16 << 20, 4), (1000, 1 << 60, 2), (u64::MAX, u64::MAX, usize::MAX)]
        {
            let refused = StepBenchOptions::synthetic(&device(), params, slot_bytes, slots).unwrap_err();
            let Error::Device(device::Error::OutOfDeviceMemory { requested_bytes, available_bytes, .. }) = refused
            else {
                panic!("{refused}");
            };
            assert!(requested_bytes > available_bytes);
        }
    }
}
