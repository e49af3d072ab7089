//! Streaming changes no bit: the streamed step and an unstreamed one over the same state, compared bit for bit.

use forebay::device::update::MAX_COLUMNS;
use forebay::device::{
    Buffer, Column, Dtype, Kernel, MasterFormat, Mastered, Region, Rule, SharedDevice, StateFormat, Stream,
};
use serde::Serialize;

use crate::finish;
use crate::models::TensorShape;
use forebay::error::{Error, Result};
use forebay::optimizer::{Binding, Optimizer, OptimizerOptions, Placement, StepFlags, TableInput};
use forebay::plan::{PlanOptions, TensorSpec, columns_for, state_bytes};

/// Bytes moved at a time when host state is compared.
const COMPARE_BYTES: u64 = 64 << 20;

/// How the state of a run is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kept {
    /// The format of the rule's columns.
    pub state: StateFormat,
    /// The format of masters. With masters, weights and gradients are bf16, else f32.
    pub master: MasterFormat,
}

impl Kept {
    /// The type of weights and gradients.
    pub fn dtype(self) -> Dtype {
        if self.master == MasterFormat::None { Dtype::F32 } else { Dtype::Bf16 }
    }

    /// The name of the format of the masters; empty without masters.
    pub fn master_name(self) -> &'static str {
        match self.master {
            MasterFormat::None => "",
            MasterFormat::F32 => "f32",
            MasterFormat::Compact => "compact",
        }
    }

    /// The columns of a tensor of this many elements.
    fn columns(self, rule: &Rule, elements: u64) -> Vec<Column> {
        columns_for(rule, rule.defaults, [self.state; MAX_COLUMNS], self.master, elements)
    }

    /// Bytes of state of a large tensor for each element, rounded up.
    pub(crate) fn bytes_per_element(self, rule: &Rule) -> f64 {
        const MANY: u64 = 1 << 20;
        state_bytes(&self.columns(rule, MANY), MANY) as f64 / MANY as f64
    }
}

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Exactness {
    /// Steps taken on both sides.
    pub steps: u64,
    /// Words of four bytes compared: parameters and state.
    pub compared: u64,
    /// Words that differ.
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
    kept: Kept,
    params: Buffer,
    grads: Buffer,
    /// Numbers in f32, before they are rounded.
    scratch: Buffer,
    pub(crate) bindings: Vec<Binding>,
}

impl Workload {
    pub(crate) fn new(device: &SharedDevice, tensors: &[TensorShape], kept: Kept, stream: &Stream) -> Result<Self> {
        let dtype = kept.dtype();
        let (offsets, bytes) = lay_out(tensors.iter().map(|tensor| tensor.elements * dtype.bytes()));
        let (params, grads) = (device.alloc(bytes)?, device.alloc(bytes)?);
        let bindings = tensors
            .iter()
            .zip(&offsets)
            .map(|(tensor, &offset)| {
                let bytes = tensor.elements * dtype.bytes();
                let of = |buffer: &Buffer| Ok::<_, Error>((buffer.region(offset, bytes)?, dtype));
                Ok(Binding::new(of(&params)?, of(&grads)?, 0))
            })
            .collect::<Result<Vec<_>>>()?;
        let scratch = device.alloc(COMPARE_BYTES.min(2 * bytes))?;
        let workload = Self { device: device.clone(), kept, params, grads, bindings, scratch };
        workload.fill(stream, workload.params.all(), 1, 0.05)?;
        workload.new_gradients(stream, 0)?;
        Ok(workload)
    }

    /// What a step is given.
    pub(crate) fn input(&self) -> Vec<TableInput> {
        vec![TableInput { tensors: self.bindings.iter().cloned().map(Some).collect(), resident: Vec::new() }]
    }

    /// Other gradients for each step, so that no step repeats the one before.
    pub(crate) fn new_gradients(&self, stream: &Stream, step: u64) -> Result<()> {
        self.fill(stream, self.grads.all(), 1000 + step, 1e-3)
    }

    /// Uniform numbers of the run's type.
    fn fill(&self, stream: &Stream, dst: Region, seed: u64, scale: f32) -> Result<()> {
        let uniform = |dst: Region, part: u64| {
            let seed = seed ^ part << 32;
            self.device.launch(stream, &Kernel::Uniform { dst, seed, low: -scale, high: scale })
        };
        if self.kept.dtype() == Dtype::F32 {
            return Ok(uniform(dst, 0)?);
        }
        // As roundings of f32, a part at a time.
        for (part, start) in (0..dst.bytes()).step_by(self.scratch.bytes() as usize / 2).enumerate() {
            let weight = dst.slice(start, (self.scratch.bytes() / 2).min(dst.bytes() - start))?;
            let master = self.scratch.region(0, 2 * weight.bytes())?;
            uniform(master.clone(), part as u64)?;
            let pairs = [Mastered { weight, dtype: Dtype::Bf16, master }];
            self.device.launch(stream, &Kernel::RoundMasters { pairs: &pairs })?;
        }
        Ok(())
    }
}

/// Offsets of packed regions of these bytes with aligned starts, and their bytes together, in whole words.
fn lay_out(regions: impl Iterator<Item = u64>) -> (Vec<u64>, u64) {
    let mut end = 0u64;
    let offsets = regions.map(|bytes| {
        let start = end.next_multiple_of(256);
        end = start + bytes;
        start
    });
    let offsets = offsets.collect();
    (offsets, end.next_multiple_of(256))
}

/// The unstreamed side: a copy of the parameters, and all state on the device.
pub(crate) struct Resident {
    device: SharedDevice,
    optimizer: Optimizer,
    params: Buffer,
    /// All columns of all tensors, and the columns of each.
    _state: Buffer,
    columns: Vec<Vec<(Column, Region)>>,
    input: TableInput,
    /// Two parts of a comparison.
    scratch: [Buffer; 2],
    count: Buffer,
}

impl Resident {
    /// Device bytes that it needs for a workload.
    pub(crate) fn bytes(rule: &Rule, tensors: &[TensorShape], kept: Kept) -> u64 {
        let weights = lay_out(tensors.iter().map(|tensor| tensor.elements * kept.dtype().bytes())).1;
        weights + lay_out(Self::parts(rule, tensors, kept)).1 + 2 * COMPARE_BYTES
    }

    /// Bytes of each column of each tensor.
    fn parts(rule: &Rule, tensors: &[TensorShape], kept: Kept) -> impl Iterator<Item = u64> {
        tensors.iter().flat_map(move |tensor| {
            kept.columns(rule, tensor.elements).into_iter().map(|column| column.bytes(tensor.elements))
        })
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
        let kept = workload.kept;
        let (starts, state_bytes) = lay_out(Self::parts(rule, tensors, kept));
        let state = device.alloc(state_bytes)?;
        device.launch(stream, &Kernel::Fill { dst: state.all(), byte: 0 })?;
        let (mut starts, mut columns) = (starts.into_iter(), Vec::new());
        for tensor in tensors {
            let part =
                |(column, start): (Column, u64)| Ok((column, state.region(start, column.bytes(tensor.elements))?));
            let own = kept.columns(rule, tensor.elements).into_iter().zip(starts.by_ref());
            columns.push(own.map(part).collect::<Result<Vec<_>>>()?);
        }
        let mut input = TableInput::default();
        for (binding, columns) in workload.bindings.iter().zip(&columns) {
            let (offset, len) = (binding.weight.offset_bytes(), binding.weight.bytes());
            let weight = (params.region(offset, len)?, binding.weight_dtype);
            input.tensors.push(Some(Binding::new(weight, (binding.grad.clone(), binding.grad_dtype), 0)));
            input.resident.push(columns.iter().map(|(_, region)| region.clone()).collect());
        }
        let options = OptimizerOptions { placement: Placement::Resident, ..OptimizerOptions::default() };
        let optimizer = Optimizer::new(device.clone(), rule, options)?;
        optimizer.add(specs(rule, tensors, kept))?;
        let (scratch, count) = ([device.alloc(COMPARE_BYTES)?, device.alloc(COMPARE_BYTES)?], device.alloc(8)?);
        Ok(Self { device: device.clone(), optimizer, params, _state: state, columns, input, scratch, count })
    }

    pub(crate) fn step(&self, groups: &[Vec<f64>], stream: &Stream) -> Result<()> {
        self.optimizer.step(vec![self.input.clone()], groups, Some(stream), StepFlags::default())
    }

    /// How many words were compared, and how many of the streamed side differ from this one's. The streamed side has been
    /// synchronised.
    pub(crate) fn differing(&self, workload: &Workload, streamed: &Optimizer, stream: &Stream) -> Result<(u64, u64)> {
        let device = &*self.device;
        device.launch(stream, &Kernel::Fill { dst: self.count.all(), byte: 0 })?;
        // Through memory that ends in zeros: not every region is made of whole words.
        let mut compared = 0;
        let mut compare = |a: &Region, b: &Region| -> Result<()> {
            for start in (0..a.bytes()).step_by(COMPARE_BYTES as usize) {
                let bytes = COMPARE_BYTES.min(a.bytes() - start);
                let words = bytes.next_multiple_of(4);
                let mut sides = Vec::new();
                for (side, scratch) in [a, b].into_iter().zip(&self.scratch) {
                    let last = scratch.region(words - 4, 4)?;
                    device.launch(stream, &Kernel::Fill { dst: last, byte: 0 })?;
                    device.copy(stream, &side.slice(start, bytes)?, &scratch.region(0, bytes)?)?;
                    sides.push(scratch.region(0, words)?);
                }
                let (a, b) = (sides[0].clone(), sides[1].clone());
                device.launch(stream, &Kernel::CountDifferences { a, b, count: self.count.all() })?;
                compared += words / 4;
            }
            Ok(())
        };
        for (tensor, binding) in workload.bindings.iter().enumerate() {
            let (offset, len) = (binding.weight.offset_bytes(), binding.weight.bytes());
            compare(&binding.weight, &self.params.region(offset, len)?)?;
            for (column, region) in &self.columns[tensor] {
                if let Some(host) = streamed.column(0, tensor, column.name)? {
                    compare(&host, region)?;
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

/// Tensors as the plan wants them.
pub(crate) fn specs(rule: &Rule, tensors: &[TensorShape], kept: Kept) -> Vec<TensorSpec> {
    tensors
        .iter()
        .zip(0..)
        .map(|(tensor, number)| TensorSpec {
            name: tensor.name.clone(),
            elements: tensor.elements,
            columns: kept.columns(rule, tensor.elements),
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
    kept: Kept,
    slots: usize,
) -> Result<Exactness> {
    // A block of 8 bits is not cut.
    let chunk_elements: u64 = if kept.state == StateFormat::Blocks { 512 } else { 128 };
    let short: Vec<TensorShape> = tensors
        .iter()
        .map(|t| TensorShape { name: t.name.clone(), elements: t.elements.clamp(2 * chunk_elements + 1, 1537) })
        .collect();
    // A small model alone would not wrap a long ring three times.
    let rounds = (3 * slots as u64 * chunk_elements).div_ceil(short.iter().map(|t| t.elements).sum()).max(1);
    let short: Vec<TensorShape> = (0..rounds).flat_map(|_| short.iter().cloned()).collect();
    let options = PlanOptions {
        slot_bytes: (chunk_elements as f64 * kept.bytes_per_element(rule).max(8.0)).ceil() as u64 + 512,
        slots,
        ..PlanOptions::default()
    };
    let stream = device.stream("compute")?;
    let workload = Workload::new(device, &short, kept, &stream)?;
    let resident = Resident::new(device, rule, &short, &workload, &stream)?;
    let options = OptimizerOptions { plan: options, ..OptimizerOptions::default() };
    let streamed = Optimizer::new(device.clone(), rule, options)?;
    streamed.open_ring(None)?;
    streamed.add(specs(rule, &short, kept))?;
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
