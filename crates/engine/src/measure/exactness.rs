//! Off equals on: the streamed step beside an unstreamed one of the same state, compared bit for bit.

use std::sync::Arc;

use forebay_device::arith::AdamWHyper;
use forebay_device::{AdamW, AdamWSegment, Buffer, Dtype, Kernel, Region, SharedDevice, Stream};
use serde::Serialize;

use super::finish;
use super::models::TensorShape;
use crate::error::{Error, Result};
use crate::plan::{PlanOptions, StateKind, StepPlan, TensorSpec};
use crate::pool::Pool;
use crate::step::{Binding, StepInputs, StreamedAdamW};

/// Elements moved at a time when host state is compared.
const COMPARE_ELEMENTS: u64 = 16 << 20;

/// How a comparison ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exactness {
    /// Steps taken on both sides.
    pub steps: u64,
    /// f32 values compared: parameters and both moments.
    pub compared: u64,
    /// Values whose bits differ.
    pub differing: u64,
    /// Tensors in all.
    pub tensors: usize,
    /// Tensors that lay in more than one chunk.
    pub cut_tensors: usize,
    /// How often the ring was gone through.
    pub ring_wraps: usize,
}

/// Parameters and gradients on the device, with values that depend on the seeds alone.
pub(super) struct Workload {
    device: SharedDevice,
    params: Buffer,
    grads: Buffer,
    pub(super) bindings: Vec<Binding>,
}

impl Workload {
    pub(super) fn new(device: &SharedDevice, tensors: &[TensorShape], stream: &Stream) -> Result<Self> {
        let (offsets, bytes) = lay_out(tensors);
        let (params, grads) = (device.alloc(bytes)?, device.alloc(bytes)?);
        let bindings = tensors
            .iter()
            .zip(&offsets)
            .map(|(tensor, &offset)| {
                Ok(Binding {
                    param: params.region(offset, tensor.elements * 4)?,
                    param_dtype: Dtype::F32,
                    grad: Some((grads.region(offset, tensor.elements * 4)?, Dtype::F32)),
                    scalars: 0,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let workload = Self { device: device.clone(), params, grads, bindings };
        fill(device, stream, workload.params.all(), 1, 0.05)?;
        workload.new_gradients(stream, 0)?;
        Ok(workload)
    }

    /// Other gradients for each step, so that no step repeats the one before.
    pub(super) fn new_gradients(&self, stream: &Stream, step: u64) -> Result<()> {
        fill(&self.device, stream, self.grads.all(), 1000 + step, 1e-3)
    }
}

fn fill(device: &SharedDevice, stream: &Stream, dst: Region, seed: u64, scale: f32) -> Result<()> {
    Ok(device.launch(stream, &Kernel::Uniform { dst, seed, low: -scale, high: scale })?)
}

/// Offsets of tensors packed with aligned starts, and the bytes of all.
fn lay_out(tensors: &[TensorShape]) -> (Vec<u64>, u64) {
    let mut end = 0u64;
    let offsets = tensors
        .iter()
        .map(|tensor| {
            let start = end.next_multiple_of(256);
            end = start + tensor.elements * 4;
            start
        })
        .collect();
    (offsets, end)
}

/// The unstreamed side: a copy of the parameters, and all state on the device.
pub(super) struct Resident {
    device: SharedDevice,
    params: Buffer,
    moments: [Buffer; 2],
    segments: Vec<AdamWSegment>,
    scratch: Buffer,
    count: Buffer,
}

impl Resident {
    /// Device bytes that it needs for a workload.
    pub(super) fn bytes(tensors: &[TensorShape]) -> u64 {
        3 * lay_out(tensors).1 + COMPARE_ELEMENTS * 4
    }

    pub(super) fn new(device: &SharedDevice, workload: &Workload, stream: &Stream) -> Result<Self> {
        let bytes = workload.params.bytes();
        let (params, moments) = (device.alloc(bytes)?, [device.alloc(bytes)?, device.alloc(bytes)?]);
        device.copy(stream, &workload.params.all(), &params.all())?;
        for moment in &moments {
            device.launch(stream, &Kernel::Fill { dst: moment.all(), byte: 0 })?;
        }
        let mut segments = Vec::with_capacity(workload.bindings.len());
        for binding in &workload.bindings {
            let (offset, len) = (binding.param.offset_bytes(), binding.param.bytes());
            if let Some((grad, grad_dtype)) = &binding.grad {
                segments.push(AdamWSegment {
                    param: params.region(offset, len)?,
                    param_dtype: binding.param_dtype,
                    grad: grad.clone(),
                    grad_dtype: *grad_dtype,
                    exp_avg: moments[0].region(offset, len)?,
                    exp_avg_sq: moments[1].region(offset, len)?,
                    max_exp_avg_sq: None,
                    master: None,
                    scalars: 0,
                });
            }
        }
        let (scratch, count) = (device.alloc(COMPARE_ELEMENTS * 4)?, device.alloc(8)?);
        Ok(Self { device: device.clone(), params, moments, segments, scratch, count })
    }

    pub(super) fn step(&self, hyper: &AdamWHyper, t: u64, stream: &Stream) -> Result<()> {
        let scalars = [hyper.at_step(t)];
        let step = AdamW { segments: &self.segments, scalars: &scalars, grad_scale: None, skip: None };
        Ok(self.device.launch(stream, &Kernel::AdamW(step))?)
    }

    /// How many values of the streamed side differ from this one's. The streamed side has been synchronised.
    pub(super) fn differing(
        &self,
        workload: &Workload,
        streamed: &StreamedAdamW,
        stream: &Stream,
    ) -> Result<(u64, u64)> {
        let device = &*self.device;
        device.launch(stream, &Kernel::Fill { dst: self.count.all(), byte: 0 })?;
        let count =
            |a: Region, b: Region| device.launch(stream, &Kernel::CountDifferences { a, b, count: self.count.all() });
        let mut compared = 0;
        for (tensor, binding) in workload.bindings.iter().enumerate() {
            let (offset, len) = (binding.param.offset_bytes(), binding.param.bytes());
            count(binding.param.clone(), self.params.region(offset, len)?)?;
            compared += len / 4;
            for (kind, moment) in [StateKind::ExpAvg, StateKind::ExpAvgSq].into_iter().zip(&self.moments) {
                let Some(host) = streamed.state().tensor(tensor, kind)? else { continue };
                for start in (0..len).step_by(self.scratch.bytes() as usize) {
                    let bytes = self.scratch.bytes().min(len - start);
                    let scratch = self.scratch.region(0, bytes)?;
                    device.copy(stream, &host.slice(start, bytes)?, &scratch)?;
                    count(scratch, moment.region(offset + start, bytes)?)?;
                    compared += bytes / 4;
                }
            }
        }
        let slab = device.pin(forebay_device::SlabLayout::new(&[8])?)?;
        device.copy(stream, &self.count.all(), &slab.part(0)?)?;
        finish(device, stream)?;
        let mut bytes = [0; 8];
        device.read(&slab.part(0)?, &mut bytes)?;
        Ok((compared, u64::from_le_bytes(bytes)))
    }
}

/// Tensors as the plan wants them: both moments, no master.
pub(super) fn specs(tensors: &[TensorShape]) -> Vec<TensorSpec> {
    tensors
        .iter()
        .map(|tensor| TensorSpec {
            name: tensor.name.clone(),
            elements: tensor.elements,
            kinds: StateKind::set(false, false),
            on_host: false,
        })
        .collect()
}

/// A comparison in which every tensor is cut and the ring wraps at least three times: the model's tensors, shortened,
/// in chunks smaller than the smallest of them.
pub(super) fn cut_check(device: &SharedDevice, tensors: &[TensorShape], slots: usize) -> Result<Exactness> {
    const CHUNK_ELEMENTS: u64 = 128;
    let short: Vec<TensorShape> = tensors
        .iter()
        .map(|t| TensorShape { name: t.name.clone(), elements: t.elements.clamp(2 * CHUNK_ELEMENTS + 1, 1537) })
        .collect();
    // A small model alone would not wrap a long ring three times.
    let rounds = (3 * slots as u64 * CHUNK_ELEMENTS).div_ceil(short.iter().map(|t| t.elements).sum()).max(1);
    let short: Vec<TensorShape> = (0..rounds).flat_map(|_| short.iter().cloned()).collect();
    let options = PlanOptions { slot_bytes: CHUNK_ELEMENTS * 8, slots, ..PlanOptions::default() };
    let plan = Arc::new(StepPlan::new(specs(&short), options)?);
    let stream = device.stream("compute")?;
    let workload = Workload::new(device, &short, &stream)?;
    let resident = Resident::new(device, &workload, &stream)?;
    let streamed = StreamedAdamW::new(&Pool::new(device.clone()), plan.clone())?;
    let hyper = AdamWHyper::default();
    let steps = 3;
    for t in 1..=steps {
        workload.new_gradients(&stream, t)?;
        resident.step(&hyper, t, &stream)?;
        streamed.step(
            &workload.bindings,
            &StepInputs { scalars: &[hyper.at_step(t)], ..Default::default() },
            &stream,
        )?;
    }
    streamed.synchronize()?;
    let (compared, differing) = resident.differing(&workload, &streamed, &stream)?;
    let exactness = Exactness {
        steps,
        compared,
        differing,
        tensors: short.len(),
        cut_tensors: plan.cut_tensors(),
        ring_wraps: plan.chunks().len() / slots,
    };
    if exactness.cut_tensors < short.len() || exactness.ring_wraps < 3 {
        return Err(Error::PlanMismatch {
            tensor: "the exactness check".to_owned(),
            reason: format!(
                "it cuts {} of {} tensors and wraps {} times",
                exactness.cut_tensors,
                short.len(),
                exactness.ring_wraps
            ),
        });
    }
    Ok(exactness)
}
