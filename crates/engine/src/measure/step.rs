//! `forebay bench step`: the streamed AdamW step over a model's shapes, beside the wire and an unstreamed update.

use std::sync::Arc;
use std::time::Instant;

use forebay_device::arith::AdamWHyper;
use forebay_device::{self as device, Backend, HostMemory, SharedDevice};
use serde::Serialize;

use super::exactness::{Exactness, Resident, Workload, cut_check, specs};
use super::models::Model;
use super::{Progress, finish, finish_with, giga_per_s, median, wire};
use crate::error::{Error, Result};
use crate::pipeline::{Pipeline, RunStats};
use crate::plan::{PlanOptions, StepPlan};
use crate::pool::Pool;
use crate::step::{HostState, StepInputs, StreamedAdamW};
use crate::trace::Trace;

/// What to run.
#[derive(Debug, Clone)]
pub struct StepBenchOptions {
    /// The shapes.
    pub model: Model,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Slots in the ring.
    pub slots: usize,
    /// Steps that are timed, after one that is not.
    pub steps: u64,
    /// Bytes copied each way for each size when the wire is measured.
    pub wire_bytes: u64,
    /// Whether to keep the spans of one more step.
    pub trace: bool,
}

impl StepBenchOptions {
    /// The defaults for a model: a ring of 4 slots of 16 MiB, five timed steps.
    pub fn new(model: Model) -> Self {
        let PlanOptions { slot_bytes, slots, .. } = PlanOptions::default();
        Self { model, slot_bytes, slots, steps: 5, wire_bytes: 2 << 30, trace: false }
    }

    /// The model to use where none is named: what a machine of this kind does in seconds.
    pub fn default_model(backend: Backend) -> Result<Model> {
        match backend {
            Backend::Cuda => Model::named("qwen2.5-3b"),
            Backend::Cpu => Model::synthetic(40_000_000),
        }
    }
}

/// What came out.
#[derive(Debug, Clone, Serialize)]
pub struct StepBench {
    /// Version of the library that ran.
    pub version: &'static str,
    /// The device, as it is asked for.
    pub device: String,
    /// What it is.
    pub device_model: String,
    /// The shapes.
    pub model: String,
    /// Parameters.
    pub params: u64,
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
    /// The wire, measured before and after the steps; the better one.
    pub wire_gbps: f64,
    /// How much of it the step reached.
    pub percent_of_wire: f64,
    /// The least time the wire allows.
    pub floor_step_s: f64,
    /// Device memory of the ring.
    pub ring_bytes: u64,
    /// What the driver says went from the device for the ring, its streams and events.
    pub driver_ring_bytes: u64,
    /// What the driver says went from the device for mapping the pinned memory: 8 bytes for each page of 4 KiB.
    pub driver_pin_bytes: u64,
    /// Pinned host memory.
    pub pinned_bytes: u64,
    /// How fast it was pinned.
    pub pin_gib_per_s: f64,
    /// Whether as huge pages.
    pub pin_huge_pages: bool,
    /// Allocations, slabs, streams and events made during the timed steps; must be 0.
    pub resources_made_in_steps: u64,
    /// Stages of the last timed step.
    pub last_step: RunStats,
    /// Exactness of the run itself; nothing where the device has no room for a second copy.
    pub exactness: Option<Exactness>,
    /// Exactness with every tensor cut and the ring wrapped at least three times.
    pub cut_exactness: Exactness,
    /// The spans of the traced step.
    #[serde(skip)]
    pub trace: Option<Trace>,
}

impl StepBench {
    /// Whether every value compared was equal.
    pub fn is_exact(&self) -> bool {
        self.cut_exactness.differing == 0 && self.exactness.as_ref().is_none_or(|e| e.differing == 0)
    }
}

/// Refuses a model or a ring that can never fit, with all the numbers, before anything is measured.
pub fn check_fit(device: &SharedDevice, params: u64, slot_bytes: u64, slots: usize) -> Result<()> {
    let state = params.saturating_mul(8);
    let on_device = params.saturating_mul(8).saturating_add(slot_bytes.saturating_mul(slots as u64));
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

/// Whether a second, unstreamed copy fits beside what is there: with a tenth of the device left free, which the driver
/// or others may need.
fn has_room(device: &SharedDevice, bytes: u64) -> Result<bool> {
    let memory = device.memory()?;
    let on_device = memory.free_bytes > bytes + memory.capacity_bytes / 10;
    Ok(on_device && (device.info().backend != Backend::Cpu || HostMemory::now().available_bytes > 2 * bytes))
}

/// Runs it.
pub fn bench_step(device: &SharedDevice, options: &StepBenchOptions, progress: &mut dyn Progress) -> Result<StepBench> {
    let StepBenchOptions { model, slot_bytes, slots, steps, wire_bytes, .. } = options;
    let tensors = &model.tensors;
    if *steps == 0 {
        return Err(Error::InvalidOption {
            option: "steps",
            value: "0".to_owned(),
            remedy: "time at least one step".to_owned(),
        });
    }
    check_fit(device, model.params(), *slot_bytes, *slots)?;
    let plan_options = PlanOptions { slot_bytes: *slot_bytes, slots: *slots, ..PlanOptions::default() };
    let plan = Arc::new(StepPlan::new(specs(tensors), plan_options)?);

    progress.begin("exactness, every tensor cut", 1);
    let cut_exactness = cut_check(device, tensors, *slots)?;
    progress.advance();

    let sizes = wire::WIRE_SIZES.len() as u64;
    progress.begin("wire", sizes);
    let wire_before = wire::measure(device, *wire_bytes, || progress.advance())?;

    progress.begin("set-up: parameters, gradients, pinned state", 3);
    let compute = device.stream("compute")?;
    let workload = Workload::new(device, tensors, &compute)?;
    finish(&**device, &compute)?;
    progress.advance();
    let pool = Pool::new(device.clone());
    let free = || -> Result<u64> { Ok(device.memory()?.free_bytes) };
    let before = free()?;
    let state = HostState::new(&pool, plan.clone())?;
    let pinned = free()?;
    let pipeline = Pipeline::new(&pool, *slots, *slot_bytes)?;
    let driver_ring_bytes = pinned.saturating_sub(free()?);
    let driver_pin_bytes = before.saturating_sub(pinned);
    let streamed = StreamedAdamW::from_parts(state, Arc::new(pipeline));
    progress.advance();
    let resident = if has_room(device, Resident::bytes(tensors))? {
        Some(Resident::new(device, &workload, &compute)?)
    } else {
        None
    };
    finish(&**device, &compute)?;
    progress.advance();

    progress.begin("steps", steps + 1);
    let hyper = AdamWHyper::default();
    let (mut times, mut calls) = (Vec::new(), Vec::new());
    let idle = device.event()?;
    let mut made_before = device.counters().total();
    for t in 1..=steps + 1 {
        workload.new_gradients(&compute, t)?;
        finish_with(&**device, &compute, &idle)?;
        let scalars = [hyper.at_step(t)];
        let start = Instant::now();
        streamed.step(&workload.bindings, &StepInputs { scalars: &scalars, ..Default::default() }, &compute)?;
        let call = start.elapsed().as_secs_f64();
        streamed.synchronize()?;
        if t == 1 {
            made_before = device.counters().total();
        } else {
            times.push(start.elapsed().as_secs_f64());
            calls.push(call);
        }
        if let Some(resident) = &resident {
            resident.step(&hyper, t, &compute)?;
        }
        progress.advance();
    }
    let made = device.counters().total();
    let last_step = streamed.synchronize()?;

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
        streamed.pipeline().set_trace(3 * plan.chunks().len());
        let scalars = [hyper.at_step(steps + 2)];
        streamed.step(&workload.bindings, &StepInputs { scalars: &scalars, ..Default::default() }, &compute)?;
        streamed.synchronize()?;
        Some(streamed.trace())
    } else {
        None
    };

    progress.begin("wire, again", sizes);
    let wire_gbps = wire::measure(device, *wire_bytes, || progress.advance())?.max(wire_before);

    let pin = streamed.state().slab().pin_stats();
    let (median_step_s, payload) = (median(&times), plan.payload_bytes());
    let gbps_each_way = giga_per_s(payload, median_step_s);
    Ok(StepBench {
        version: crate::VERSION,
        device: device.info().name.clone(),
        device_model: device.info().model.clone(),
        model: model.name.clone(),
        params: model.params(),
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
