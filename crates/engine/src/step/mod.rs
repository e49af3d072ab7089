//! The AdamW step: state on the host, updated chunk by chunk, on the device through the ring, on the host in place, or
//! on both at once.

mod host;
mod hybrid;
mod placed;
mod powers;
mod state;

use std::sync::Arc;

use forebay_device::arith::AdamWScalars;
use forebay_device::{AdamW, AdamWSegment, Dtype, Kernel, Region, SharedDevice, Stream};

pub use host::{HostLane, HostStats};
pub use hybrid::{HostShare, Hybrid};
pub use placed::PlacedAdamW;
pub use powers::Powers;
pub use state::HostState;

use crate::error::{Error, Result};
use crate::pipeline::{Pipeline, RunStats};
use crate::plan::{Chunk, Segment, StateKind, StepPlan};
use crate::pool::Pool;
use crate::trace::Trace;

/// A parameter and its gradient at one step, both on the device, or both on the host where that was planned.
#[derive(Debug, Clone)]
pub struct Binding {
    /// The parameter's elements.
    pub param: Region,
    /// Their type.
    pub param_dtype: Dtype,
    /// The gradient's elements and their type. Without one the parameter and its state stay as they are.
    pub grad: Option<(Region, Dtype)>,
    /// Which set of scalars applies.
    pub scalars: u32,
}

/// What applies to all tensors of one step.
#[derive(Debug, Clone, Default)]
pub struct StepInputs<'a> {
    /// The hyper-parameter sets at this step.
    pub scalars: &'a [AdamWScalars],
    /// An f32 on the device that every gradient is multiplied with.
    pub grad_scale: Option<Region>,
    /// An f32 on the device; where it is not zero, nothing changes.
    pub skip: Option<Region>,
}

/// The f32 values in a region of host memory that nobody is writing.
fn read_f32(device: &SharedDevice, region: &Region) -> Result<Vec<f32>> {
    let mut bytes = vec![0; region.bytes() as usize];
    device.read(region, &mut bytes)?;
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

/// Copies of one stage: regions of the host, and the offset and length of each in the slot.
struct Moves {
    host: Vec<Region>,
    slot: Vec<(u64, u64)>,
}

impl Moves {
    fn push(&mut self, host: Region, slot: (u64, u64)) {
        self.host.push(host);
        self.slot.push(slot);
    }
}

/// Both stages of one chunk.
struct Route {
    fetch: Moves,
    store: Moves,
}

/// AdamW with its state on the host.
#[derive(Debug)]
pub struct StreamedAdamW {
    plan: Arc<StepPlan>,
    state: HostState,
    pipeline: Arc<Pipeline>,
}

impl StreamedAdamW {
    /// Pins the state, zeroed, and allocates the ring.
    pub fn new(pool: &Pool, plan: Arc<StepPlan>) -> Result<Self> {
        let options = plan.options();
        let pipeline = Pipeline::new(pool, options.slots, options.slot_bytes)?;
        Ok(Self::from_parts(HostState::new(pool, plan)?, Arc::new(pipeline)))
    }

    /// The same from parts that are there already. The pipeline's slots are at least as large as the plan's; several
    /// states may share one.
    pub fn from_parts(state: HostState, pipeline: Arc<Pipeline>) -> Self {
        Self { plan: state.plan().clone(), state, pipeline }
    }

    /// The plan it follows.
    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// The state on the host. Read it after [`Self::settle`] or [`Self::synchronize`].
    pub fn state(&self) -> &HostState {
        &self.state
    }

    /// The pipeline, for its statistics, its trace and its slots.
    pub fn pipeline(&self) -> &Pipeline {
        &self.pipeline
    }

    /// Updates every tensor that has a gradient, on `compute`, and returns when the last update has been submitted; at
    /// most as many stores as there are slots are then still under way.
    pub fn step(&self, tensors: &[Binding], inputs: &StepInputs<'_>, compute: &Stream) -> Result<()> {
        self.check(tensors, inputs)?;
        let _stepping = self.state.stepping();
        self.pipeline.begin()?;
        self.run(tensors, inputs, compute)
    }

    /// The inner loop of [`Self::step`], for several states in one run: check them all, begin, run each.
    pub fn run(&self, tensors: &[Binding], inputs: &StepInputs<'_>, compute: &Stream) -> Result<()> {
        let _entered = self.pipeline.device().enter()?;
        (0..self.plan.chunks().len()).try_for_each(|index| self.run_chunk(index, tensors, inputs, compute))
    }

    /// One chunk of [`Self::run`].
    fn run_chunk(&self, index: usize, tensors: &[Binding], inputs: &StepInputs<'_>, compute: &Stream) -> Result<()> {
        let chunk = &self.plan.chunks()[index];
        let segments = self.plan.segments(chunk);
        let payload_bytes = payload_bytes(&self.plan, chunk, tensors);
        if payload_bytes == 0 {
            return Ok(());
        }
        let (slot, prepared) = self.pipeline.acquire_while(|memory| -> Result<_> {
            Ok((self.route(chunk, segments, tensors)?, self.bind(chunk, segments, tensors, memory)?))
        })?;
        let (Route { fetch, store }, segments) = prepared?;
        let slot = self.pipeline.fetch(slot, &fetch.host, &fetch.slot)?;
        let slot = self.pipeline.update(slot, compute, |device, _| {
            let (grad_scale, skip) = (inputs.grad_scale.clone(), inputs.skip.clone());
            let step = AdamW { segments: &segments, scalars: inputs.scalars, grad_scale, skip };
            Ok(device.launch(compute, &Kernel::AdamW(step))?)
        })?;
        self.state.protect(&store.host);
        let slot = self.pipeline.store(slot, &store.slot, &store.host, index, payload_bytes)?;
        self.pipeline.release(slot);
        Ok(())
    }

    /// Blocks until a tensor's stores have ended; others go on.
    pub fn settle(&self, tensor: usize) -> Result<()> {
        for kind in &self.plan.tensors()[tensor].kinds {
            if let Some(region) = self.state.tensor(tensor, *kind)? {
                self.pipeline.settle(&region)?;
            }
        }
        Ok(())
    }

    /// Blocks until all stores have ended and returns the statistics of the last step.
    pub fn synchronize(&self) -> Result<RunStats> {
        self.pipeline.drain()?;
        Ok(self.pipeline.stats())
    }

    /// The spans of the last step, after [`Self::synchronize`].
    pub fn trace(&self) -> Trace {
        self.pipeline.trace()
    }

    /// Refuses tensors that are not the planned ones, before anything is touched.
    pub fn check(&self, tensors: &[Binding], inputs: &StepInputs<'_>) -> Result<()> {
        check(&self.plan, tensors, inputs)
    }

    /// What a chunk moves: its state both ways, and for tensors on the host the gradient in and the parameter in and
    /// out.
    fn route(&self, chunk: &Chunk, segments: &[Segment], tensors: &[Binding]) -> Result<Route> {
        let (host, slot) = (self.state.chunk(chunk)?, self.state.parts(chunk));
        let mut route = Route { fetch: Moves { host: host.clone(), slot: slot.clone() }, store: Moves { host, slot } };
        if !self.plan.buckets()[chunk.bucket].on_host {
            return Ok(route);
        }
        for segment in segments {
            let binding = &tensors[segment.tensor];
            let Some((grad, grad_dtype)) = &binding.grad else { continue };
            for (operand, region, width) in
                [(0, &binding.param, binding.param_dtype.bytes()), (1, grad, grad_dtype.bytes())]
            {
                let host = region.slice(segment.tensor_offset * width, segment.elements * width)?;
                let slot = self.state.operand(chunk, segment, operand, width);
                if operand == 0 {
                    route.store.push(host.clone(), slot);
                }
                route.fetch.push(host, slot);
            }
        }
        Ok(route)
    }

    /// The segments of a chunk with their memory: parameter, gradient and the state in the slot.
    fn bind(
        &self,
        chunk: &Chunk,
        segments: &[Segment],
        tensors: &[Binding],
        memory: &Region,
    ) -> Result<Vec<AdamWSegment>> {
        let mut bound = Vec::with_capacity(segments.len());
        for segment in segments {
            let binding = &tensors[segment.tensor];
            let Some((grad, grad_dtype)) = &binding.grad else { continue };
            // In the slot if it travels, in place if it lives on the device.
            let operand = |operand: u64, region: &Region, width: u64| {
                if region.place().is_host() {
                    let (offset, len) = self.state.operand(chunk, segment, operand, width);
                    memory.slice(offset, len)
                } else {
                    region.slice(segment.tensor_offset * width, segment.elements * width)
                }
            };
            let state =
                |kind: StateKind| -> Result<Option<Region>> { self.state.in_slot(chunk, segment, kind, memory) };
            let needed = |kind: StateKind| -> Result<Region> {
                state(kind)?.ok_or_else(|| Error::PlanMismatch {
                    tensor: self.plan.tensors()[segment.tensor].name.clone(),
                    reason: format!("AdamW needs {kind:?}"),
                })
            };
            bound.push(AdamWSegment {
                param: operand(0, &binding.param, binding.param_dtype.bytes())?,
                param_dtype: binding.param_dtype,
                grad: operand(1, grad, grad_dtype.bytes())?,
                grad_dtype: *grad_dtype,
                exp_avg: needed(StateKind::ExpAvg)?,
                exp_avg_sq: needed(StateKind::ExpAvgSq)?,
                max_exp_avg_sq: state(StateKind::MaxExpAvgSq)?,
                master: state(StateKind::Master)?,
                scalars: binding.scalars,
            });
        }
        Ok(bound)
    }
}

/// Refuses tensors that are not the planned ones, before anything is touched.
fn check(plan: &StepPlan, tensors: &[Binding], inputs: &StepInputs<'_>) -> Result<()> {
    let planned = plan.tensors();
    if tensors.len() != planned.len() {
        return Err(Error::PlanMismatch {
            tensor: format!("a list of {} tensors", tensors.len()),
            reason: format!("{} were planned", planned.len()),
        });
    }
    for (binding, spec) in tensors.iter().zip(planned) {
        let mismatch = |reason: String| Err(Error::PlanMismatch { tensor: spec.name.clone(), reason });
        if binding.grad.is_some() && binding.scalars as usize >= inputs.scalars.len() {
            return mismatch(format!("scalar set {} of {}", binding.scalars, inputs.scalars.len()));
        }
        let on_host = |region: &Region| region.place().is_host();
        if on_host(&binding.param) != spec.on_host
            || binding.grad.as_ref().is_some_and(|(grad, _)| on_host(grad) != spec.on_host)
        {
            let planned = if spec.on_host { "the host" } else { "the device" };
            return mismatch(format!("it was planned with parameter and gradient on {planned}"));
        }
        let param = binding.param.bytes() / binding.param_dtype.bytes();
        if param != spec.elements {
            return mismatch(format!("{param} elements where {} were planned", spec.elements));
        }
        if let Some((grad, dtype)) = &binding.grad
            && grad.bytes() / dtype.bytes() != spec.elements
        {
            return mismatch(format!("a gradient of {} elements for {}", grad.bytes() / dtype.bytes(), spec.elements));
        }
        if let Some((grad, dtype)) = &binding.grad {
            check_memory(|| spec.name.clone(), (&binding.param, binding.param_dtype), (grad, *dtype))?;
        }
    }
    Ok(())
}

/// Refuses a parameter and its gradient that no kernel can work on where they lie: the first chunk in which that showed
/// would find others updated already.
pub fn check_memory(name: impl Fn() -> String, param: (&Region, Dtype), grad: (&Region, Dtype)) -> Result<()> {
    let mismatch = |reason: String| Err(Error::PlanMismatch { tensor: name(), reason });
    for (what, (region, dtype)) in [("it", param), ("its gradient", grad)] {
        if !(region.addr() as u64).is_multiple_of(dtype.bytes()) {
            let (addr, width) = (region.addr(), dtype.bytes());
            return mismatch(format!("{what} begins at {addr:#x}, inside an element of {width} bytes; clone it"));
        }
    }
    if param.0.overlaps(grad.0) {
        return mismatch("it shares memory with its gradient; clone the gradient".to_owned());
    }
    Ok(())
}

/// Bytes of state in a chunk that belong to tensors with a gradient.
fn payload_bytes(plan: &StepPlan, chunk: &Chunk, tensors: &[Binding]) -> u64 {
    let width = plan.buckets()[chunk.bucket].kinds.len() as u64 * crate::plan::STATE_BYTES;
    plan.segments(chunk).iter().filter(|s| tensors[s.tensor].grad.is_some()).map(|s| s.elements * width).sum()
}
