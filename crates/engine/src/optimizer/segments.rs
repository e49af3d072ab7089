//! The memory of one update: the caller's operands for each tensor, and the one function that builds segments.

use forebay_device::update::{MASTER_LOW, MAX_COLUMNS};
use forebay_device::{
    Device, Dtype, Kernel, Master, Mastered, Moment, Region, Rule, Scalars, Segment, StateFormat, Stream, Update,
};

use super::table::StateTable;
use crate::error::{Error, Result};
use crate::plan::{Chunk, StepPlan, TensorSpec, state_bytes};

/// A parameter and its gradient at one step, both on the device, or both on the host where that was planned.
#[derive(Debug, Clone)]
pub struct Binding {
    /// The parameter's elements.
    pub weight: Region,
    /// Their type.
    pub weight_dtype: Dtype,
    /// The gradient's elements.
    pub grad: Region,
    /// Their type.
    pub grad_dtype: Dtype,
    /// The number of the parameter's group.
    pub group: u32,
    /// Which set of scalars applies; the step finds it.
    pub(super) scalars: u32,
    /// Which update of the parameter it is, counted from 1; 0 if it does not count. The step finds it.
    pub(super) update: u64,
    /// Whether the gradient was offered before the step had a scale or a skip flag: neither applies to it.
    pub(super) early: bool,
}

impl Binding {
    /// A parameter of a group with its gradient.
    pub fn new((weight, weight_dtype): (Region, Dtype), (grad, grad_dtype): (Region, Dtype), group: u32) -> Self {
        Self { weight, weight_dtype, grad, grad_dtype, group, scalars: 0, update: 0, early: false }
    }
}

/// What the caller gives for one table at one step.
#[derive(Debug, Clone, Default)]
pub struct TableInput {
    /// The tensors in the table's order. Without a gradient there is nothing, and parameter and state stay as they are.
    pub tensors: Vec<Option<Binding>>,
    /// For a resident table: the columns of each tensor, in the order of [`StateTable::columns`].
    pub resident: Vec<Vec<Region>>,
}

/// What applies to all tensors of one step.
#[derive(Debug, Clone, Default)]
pub(super) struct StepInputs {
    /// The sets of scalars that the bindings name.
    pub(super) scalars: Vec<Scalars>,
    /// An f32 on the device that every gradient is multiplied with.
    pub(super) grad_scale: Option<Region>,
    /// An f32 on the device; where it is not zero, nothing changes.
    pub(super) skip: Option<Region>,
}

/// What is done with a chunk in a slot.
#[derive(Debug, Clone, Copy, Default)]
pub(super) enum Work<'a> {
    /// Its update.
    #[default]
    Update,
    /// Its update without scale and skip, unless a weight is not the rounding of its master: then nothing but this f32 on
    /// the device changes, which becomes 1.
    Guess(&'a Region),
    /// Its update once more, after a guess has overwritten its weights.
    Again,
    /// Its weights are overwritten by the roundings of their masters.
    Restore,
    /// Nothing: its state goes to the other side as it is.
    Carry,
}

impl StepInputs {
    /// Launches what a chunk's work is.
    pub(super) fn launch_work(
        &self,
        device: &dyn Device,
        compute: &Stream,
        rule: &'static Rule,
        segments: &Segments,
        work: Work<'_>,
    ) -> Result<()> {
        let all = &segments.of_step;
        let plain = Update::new(rule, all, &self.scalars);
        match work {
            Work::Update => self.launch(device, compute, rule, segments),
            Work::Guess(differ) => {
                device.launch(compute, &Kernel::CompareMasters { pairs: &mastered(all), differ: differ.clone() })?;
                Ok(device.launch(compute, &Kernel::Update(Update { skip: Some(differ.clone()), ..plain }))?)
            }
            Work::Again => {
                let update = Update { grad_scale: self.grad_scale.clone(), trust_master: true, ..plain };
                Ok(device.launch(compute, &Kernel::Update(update))?)
            }
            Work::Restore => Ok(device.launch(compute, &Kernel::RoundMasters { pairs: &mastered(all) })?),
            Work::Carry => Ok(()),
        }
    }

    /// Launches the update of segments of a rule: those of the step, and those to which scale and skip do not apply.
    pub(super) fn launch(
        &self,
        device: &dyn Device,
        compute: &Stream,
        rule: &'static Rule,
        segments: &Segments,
    ) -> Result<()> {
        let update = |segments: &[Segment], grad_scale: Option<Region>, skip: Option<Region>| {
            let update = Update { grad_scale, skip, ..Update::new(rule, segments, &self.scalars) };
            device.launch(compute, &Kernel::Update(update))
        };
        if !segments.early.is_empty() {
            update(&segments.early, None, None)?;
        }
        if !segments.of_step.is_empty() || segments.early.is_empty() {
            update(&segments.of_step, self.grad_scale.clone(), self.skip.clone())?;
        }
        Ok(())
    }
}

fn mastered(segments: &[Segment]) -> Vec<Mastered> {
    let pair = |of: &Segment| {
        // A compact master is no master without its weight, so its tensors do not guess (see `check_offer`).
        let Some(Master::F32(master)) = of.master.clone() else { return None };
        Some(Mastered { weight: of.weight.clone(), dtype: of.weight_dtype, master })
    };
    segments.iter().filter_map(pair).collect()
}

/// Segments of one launch, or of two where some gradients were offered early.
#[derive(Debug, Default)]
pub(super) struct Segments {
    pub(super) of_step: Vec<Segment>,
    pub(super) early: Vec<Segment>,
}

impl Segments {
    pub(super) fn push(&mut self, segment: Option<Segment>, binding: &Binding) {
        let list = if binding.early { &mut self.early } else { &mut self.of_step };
        list.extend(segment);
    }
}

/// One table at one step.
#[derive(Debug, Clone, Copy)]
pub(super) struct TableStep<'a> {
    pub(super) table: &'a StateTable,
    pub(super) input: &'a TableInput,
    /// Gradients that were copied to the host before the step, by tensor; empty where none were.
    pub(super) landed: &'a [Option<Region>],
}

/// What a segment is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operand {
    Weight,
    Grad,
    /// A column of the rule, by its place in the rule, and its format.
    Column(usize, StateFormat),
    /// The scales of the column before it.
    Scale(usize),
    Master,
    /// The lower halves of compact masters.
    Low,
    /// Their carries.
    Carry,
}

impl<'a> TableStep<'a> {
    pub(super) fn plan(&self) -> &'a StepPlan {
        self.table.plan()
    }

    pub(super) fn binding(&self, tensor: usize) -> Option<&'a Binding> {
        self.input.tensors[tensor].as_ref()
    }

    /// A gradient that was copied to the host before the step.
    pub(super) fn landed(&self, tensor: usize) -> Option<&'a Region> {
        self.landed.get(tensor).and_then(Option::as_ref)
    }

    /// Builds the segment of some elements of a tensor, on every path: `find` gives the memory of each operand, and for a
    /// column of state its place among the tensor's columns.
    pub(super) fn segment(
        &self,
        tensor: usize,
        first: u64,
        find: impl Fn(Operand, usize) -> Result<Region>,
    ) -> Result<Option<Segment>> {
        let Some(binding) = self.binding(tensor) else { return Ok(None) };
        let (mut state, mut master) = ([const { None }; MAX_COLUMNS], None);
        let (mut codes, mut halves) = (None, None);
        for (index, &operand) in self.table.operands(tensor).iter().enumerate() {
            let region = find(operand, index)?;
            match operand {
                // The scales of codes come behind them.
                Operand::Column(_, StateFormat::Blocks) => codes = Some(region),
                Operand::Scale(column) => {
                    state[column] = codes.take().map(|codes| Moment::Blocks { codes, scales: region });
                }
                Operand::Column(column, StateFormat::Bf16) => state[column] = Some(Moment::Bf16(region)),
                Operand::Column(column, StateFormat::F32) => state[column] = Some(Moment::F32(region)),
                // The lower halves come first.
                Operand::Low => halves = Some(region),
                Operand::Carry => master = halves.take().map(|low| Master::Compact { low, carry: region }),
                Operand::Master | Operand::Weight | Operand::Grad => master = Some(Master::F32(region)),
            }
        }
        Ok(Some(Segment {
            weight: find(Operand::Weight, 0)?,
            weight_dtype: binding.weight_dtype,
            grad: find(Operand::Grad, 0)?,
            grad_dtype: binding.grad_dtype,
            state,
            master,
            first,
            scalars: binding.scalars,
            keys: self.table.keys(tensor, binding.update),
        }))
    }

    /// Whether a chunk has a tensor with a gradient.
    pub(super) fn has_work(&self, chunk: &Chunk) -> bool {
        self.plan().pieces(chunk).iter().any(|piece| self.binding(piece.tensor).is_some())
    }

    /// Bytes of state in a chunk that belong to tensors with a gradient.
    pub(super) fn payload_bytes(&self, chunk: &Chunk) -> u64 {
        let columns = &self.plan().buckets()[chunk.bucket].columns;
        let with_grad = self.plan().pieces(chunk).iter().filter(|piece| self.binding(piece.tensor).is_some());
        with_grad.map(|piece| state_bytes(columns, piece.elements)).sum()
    }

    /// Bytes of state of all tensors with a gradient.
    pub(super) fn state_bytes(&self) -> u64 {
        let tensors = self.plan().tensors().iter().enumerate();
        let with_grad = tensors.filter(|(tensor, _)| self.binding(*tensor).is_some());
        with_grad.map(|(_, spec)| state_bytes(&spec.columns, spec.elements)).sum()
    }

    /// Refuses tensors that are not the planned ones, before anything is touched.
    pub(super) fn check(&self) -> Result<()> {
        let (planned, given) = (self.plan().tensors(), &self.input.tensors);
        if given.len() != planned.len() {
            return Err(Error::PlanMismatch {
                tensor: format!("a list of {} tensors", given.len()),
                reason: format!("{} were planned", planned.len()),
            });
        }
        (0..planned.len()).try_for_each(|tensor| self.check_tensor(tensor))
    }

    /// The same for one tensor.
    pub(super) fn check_tensor(&self, tensor: usize) -> Result<()> {
        let (spec, Some(binding)) = (&self.plan().tensors()[tensor], self.binding(tensor)) else { return Ok(()) };
        let columns = self.table.is_resident().then(|| self.input.resident.get(tensor).map_or(0, Vec::len));
        check_binding(spec, binding, columns)
    }
}

/// Refuses a parameter and a gradient that are not the planned ones, and for a resident table another number of columns.
pub(super) fn check_binding(spec: &TensorSpec, binding: &Binding, columns: Option<usize>) -> Result<()> {
    let mismatch = |reason: String| Err(Error::PlanMismatch { tensor: spec.name.clone(), reason });
    let (weight, grad) = ((&binding.weight, binding.weight_dtype), (&binding.grad, binding.grad_dtype));
    if [weight, grad].iter().any(|(region, _)| region.place().is_host() != spec.on_host) {
        let planned = if spec.on_host { "the host" } else { "the device" };
        return mismatch(format!("it was planned with parameter and gradient on {planned}"));
    }
    let elements = |(region, dtype): (&Region, Dtype)| region.bytes() / dtype.bytes();
    if elements(weight) != spec.elements {
        return mismatch(format!("{} elements where {} were planned", elements(weight), spec.elements));
    }
    if elements(grad) != spec.elements {
        return mismatch(format!("a gradient of {} elements for {}", elements(grad), spec.elements));
    }
    check_memory(&spec.name, weight, grad)?;
    if spec.columns.contains(&MASTER_LOW) && binding.weight_dtype != Dtype::Bf16 {
        return mismatch(format!(
            "it is {:?}, and its master is compact, which is for bf16; make a new optimizer after the cast",
            binding.weight_dtype
        ));
    }
    match columns {
        Some(columns) if columns != spec.columns.len() => {
            mismatch(format!("{columns} columns of state where {} are kept", spec.columns.len()))
        }
        _ => Ok(()),
    }
}

/// Refuses a parameter and its gradient that no kernel can work on where they lie: the first chunk in which that showed
/// would find others updated already.
fn check_memory(name: &str, weight: (&Region, Dtype), grad: (&Region, Dtype)) -> Result<()> {
    let mismatch = |reason: String| Err(Error::PlanMismatch { tensor: name.to_owned(), reason });
    for (what, (region, dtype)) in [("it", weight), ("its gradient", grad)] {
        if !(region.addr() as u64).is_multiple_of(dtype.bytes()) {
            let (addr, width) = (region.addr(), dtype.bytes());
            return mismatch(format!("{what} begins at {addr:#x}, inside an element of {width} bytes; clone it"));
        }
    }
    if weight.0.overlaps(grad.0) {
        return mismatch("it shares memory with its gradient; clone the gradient".to_owned());
    }
    Ok(())
}
