//! Streaming changes no bit: the streamed step and an unstreamed one over the same state, compared bit for bit.

use forebay::device::{Buffer, Dtype, Kernel, Region, Rule, SharedDevice, Stream};
use serde::Serialize;

use crate::finish;
use crate::models::TensorShape;
use forebay::error::{Error, Result};
use forebay::optimizer::{Binding, Optimizer, OptimizerOptions, Placement, StepFlags, TableInput};
use forebay::plan::{PlanOptions, TensorSpec, state_bytes};

/// Elements moved at a time when host state is compared.
const COMPARE_ELEMENTS: u64 = 16 << 20;

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exactness {
    /// Steps taken on both sides.
    pub steps: u64,
    /// f32 values compared: parameters and state.
    pub compared: u64,
    /// Values whose bits differ.
    pub differing: u64,
    /// All tensors.
    pub tensors: usize,
    /// Tensors that are in more than one chunk.
    pub cut_tensors: usize,
    /// How often the ring wrapped in one step.
    pub ring_wraps: usize,
}

/// Parameters and gradients on the device, with values that depend on the seeds only.
pub(crate) struct Workload {
    device: SharedDevice,
    params: Buffer,
    grads: Buffer,
    pub(crate) bindings: Vec<Binding>,
}

impl Workload {
    pub(crate) fn new(device: &SharedDevice, tensors: &[TensorShape], stream: &Stream) -> Result<Self> {
        let (offsets, bytes) = lay_out(tensors);
        let (params, grads) = (device.alloc(bytes)?, device.alloc(bytes)?);
        let bindings = tensors
            .iter()
            .zip(&offsets)
            .map(|(tensor, &offset)| {
                let f32s = |buffer: &Buffer| Ok::<_, Error>((buffer.region(offset, tensor.elements * 4)?, Dtype::F32));
                Ok(Binding::new(f32s(&params)?, f32s(&grads)?, 0))
            })
            .collect::<Result<Vec<_>>>()?;
        let workload = Self { device: device.clone(), params, grads, bindings };
        fill(device, stream, workload.params.all(), 1, 0.05)?;
        workload.new_gradients(stream, 0)?;
        Ok(workload)
    }

    /// What a step is given.
    pub(crate) fn input(&self) -> Vec<TableInput> {
        vec![TableInput { tensors: self.bindings.iter().cloned().map(Some).collect(), resident: Vec::new() }]
    }

    /// Other gradients for each step, so that no step repeats the one before.
    pub(crate) fn new_gradients(&self, stream: &Stream, step: u64) -> Result<()> {
        fill(&self.device, stream, self.grads.all(), 1000 + step, 1e-3)
    }
}

fn fill(device: &SharedDevice, stream: &Stream, dst: Region, seed: u64, scale: f32) -> Result<()> {
    Ok(device.launch(stream, &Kernel::Uniform { dst, seed, low: -scale, high: scale })?)
}

/// Offsets of packed tensors with aligned starts, and their bytes together.
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
pub(crate) struct Resident {
    device: SharedDevice,
    optimizer: Optimizer,
    params: Buffer,
    /// One for each column of state.
    columns: Vec<(&'static str, Buffer)>,
    input: TableInput,
    scratch: Buffer,
    count: Buffer,
}

impl Resident {
    /// Device bytes that it needs for a workload.
    pub(crate) fn bytes(rule: &Rule, tensors: &[TensorShape]) -> u64 {
        let columns = rule.kept(rule.defaults, false).len() as u64;
        (1 + columns) * lay_out(tensors).1 + COMPARE_ELEMENTS * 4
    }

    pub(crate) fn new(
        device: &SharedDevice,
        rule: &'static Rule,
        tensors: &[TensorShape],
        workload: &Workload,
        stream: &Stream,
    ) -> Result<Self> {
        let bytes = workload.params.bytes();
        let params = device.alloc(bytes)?;
        device.copy(stream, &workload.params.all(), &params.all())?;
        let mut columns = Vec::new();
        for column in rule.kept(rule.defaults, false) {
            let buffer = device.alloc(bytes)?;
            device.launch(stream, &Kernel::Fill { dst: buffer.all(), byte: 0 })?;
            columns.push((column.name, buffer));
        }
        let mut input = TableInput::default();
        for binding in &workload.bindings {
            let (offset, len) = (binding.weight.offset_bytes(), binding.weight.bytes());
            let weight = (params.region(offset, len)?, binding.weight_dtype);
            input.tensors.push(Some(Binding::new(weight, (binding.grad.clone(), binding.grad_dtype), 0)));
            let state = columns.iter().map(|(_, buffer)| Ok(buffer.region(offset, len)?));
            input.resident.push(state.collect::<Result<_>>()?);
        }
        let options = OptimizerOptions { placement: Placement::Resident, ..OptimizerOptions::default() };
        let optimizer = Optimizer::new(device.clone(), rule, options)?;
        optimizer.add(specs(rule, tensors))?;
        let (scratch, count) = (device.alloc(COMPARE_ELEMENTS * 4)?, device.alloc(8)?);
        Ok(Self { device: device.clone(), optimizer, params, columns, input, scratch, count })
    }

    pub(crate) fn step(&self, groups: &[Vec<f64>], stream: &Stream) -> Result<()> {
        self.optimizer.step(vec![self.input.clone()], groups, Some(stream), StepFlags::default())
    }

    /// How many values of the streamed side differ from this one's. The streamed side has been synchronised.
    pub(crate) fn differing(&self, workload: &Workload, streamed: &Optimizer, stream: &Stream) -> Result<(u64, u64)> {
        let device = &*self.device;
        device.launch(stream, &Kernel::Fill { dst: self.count.all(), byte: 0 })?;
        let count =
            |a: Region, b: Region| device.launch(stream, &Kernel::CountDifferences { a, b, count: self.count.all() });
        let mut compared = 0;
        for (tensor, binding) in workload.bindings.iter().enumerate() {
            let (offset, len) = (binding.weight.offset_bytes(), binding.weight.bytes());
            count(binding.weight.clone(), self.params.region(offset, len)?)?;
            compared += len / 4;
            for (name, column) in &self.columns {
                let Some(host) = streamed.column(0, tensor, name)? else { continue };
                for start in (0..len).step_by(self.scratch.bytes() as usize) {
                    let bytes = self.scratch.bytes().min(len - start);
                    let scratch = self.scratch.region(0, bytes)?;
                    device.copy(stream, &host.slice(start, bytes)?, &scratch)?;
                    count(scratch, column.region(offset + start, bytes)?)?;
                    compared += bytes / 4;
                }
            }
        }
        let slab = device.pin(forebay::device::SlabLayout::new(&[8])?)?;
        device.copy(stream, &self.count.all(), &slab.part(0)?)?;
        finish(device, stream)?;
        let mut bytes = [0; 8];
        device.read(&slab.part(0)?, &mut bytes)?;
        Ok((compared, u64::from_le_bytes(bytes)))
    }
}

/// Tensors as the plan wants them: the rule's columns, no master.
pub(crate) fn specs(rule: &Rule, tensors: &[TensorShape]) -> Vec<TensorSpec> {
    tensors
        .iter()
        .zip(0..)
        .map(|(tensor, number)| TensorSpec {
            name: tensor.name.clone(),
            elements: tensor.elements,
            columns: rule.kept(rule.defaults, false),
            on_host: false,
            number,
        })
        .collect()
}

/// A comparison in which every tensor is cut and the ring wraps at least three times: the model's tensors, shortened,
/// in chunks smaller than the smallest of them.
pub(crate) fn cut_check(
    device: &SharedDevice,
    rule: &'static Rule,
    tensors: &[TensorShape],
    slots: usize,
) -> Result<Exactness> {
    const CHUNK_ELEMENTS: u64 = 128;
    let short: Vec<TensorShape> = tensors
        .iter()
        .map(|t| TensorShape { name: t.name.clone(), elements: t.elements.clamp(2 * CHUNK_ELEMENTS + 1, 1537) })
        .collect();
    // A small model alone would not wrap a long ring three times.
    let rounds = (3 * slots as u64 * CHUNK_ELEMENTS).div_ceil(short.iter().map(|t| t.elements).sum()).max(1);
    let short: Vec<TensorShape> = (0..rounds).flat_map(|_| short.iter().cloned()).collect();
    let options = PlanOptions {
        slot_bytes: CHUNK_ELEMENTS * state_bytes(&rule.kept(rule.defaults, false), 1).max(4),
        slots,
        ..PlanOptions::default()
    };
    let stream = device.stream("compute")?;
    let workload = Workload::new(device, &short, &stream)?;
    let resident = Resident::new(device, rule, &short, &workload, &stream)?;
    let options = OptimizerOptions { plan: options, ..OptimizerOptions::default() };
    let streamed = Optimizer::new(device.clone(), rule, options)?;
    streamed.open_ring(None)?;
    streamed.add(specs(rule, &short))?;
    let (plan, groups) = (streamed.plan(0)?, [rule.defaults.to_vec()]);
    let steps = 3;
    for t in 1..=steps {
        workload.new_gradients(&stream, t)?;
        resident.step(&groups, &stream)?;
        streamed.step(workload.input(), &groups, Some(&stream), StepFlags::default())?;
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
