//! The inner loop: state streams from the host through the ring and back, a chunk at a time.

use std::sync::Arc;

use forebay_device::{Region, Stream};

use super::segments::{Operand, Segments, StepInputs, TableStep, Work};
use super::sides::Side;
use crate::error::Result;
use crate::flow::{Mark, Pipeline};
use crate::plan::Chunk;
use crate::trace::{self, Kind, Label, Span};

/// Updates all tensors of a table that have a gradient, on `compute`, and returns when the last update was submitted; at
/// most as many stores as there are slots are then still under way.
pub(super) fn run(pipeline: &Pipeline, step: TableStep<'_>, inputs: &StepInputs, compute: &Stream) -> Result<()> {
    let _entered = pipeline.device().enter()?;
    (0..step.plan().chunks().len()).try_for_each(|index| run_chunk(pipeline, step, index, inputs, compute))
}

/// Where a chunk's state comes from and goes to, and what is done with it on the way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way<'a> {
    pub(super) from: Side,
    /// `None` if the state is used and not stored.
    pub(super) to: Option<Side>,
    pub(super) work: Work<'a>,
}

impl Default for Way<'_> {
    /// That of a plain step.
    fn default() -> Self {
        Self { from: Side::Current, to: Some(Side::Current), work: Work::Update }
    }
}

/// One chunk of [`run`].
pub(super) fn run_chunk(
    pipeline: &Pipeline,
    step: TableStep<'_>,
    index: usize,
    inputs: &StepInputs,
    compute: &Stream,
) -> Result<()> {
    run_chunk_on(pipeline, step, index, inputs, compute, Way::default()).map(drop)
}

/// The same on a way. Returns the end of its fetch, if it has one.
pub(super) fn run_chunk_on(
    pipeline: &Pipeline,
    step: TableStep<'_>,
    index: usize,
    inputs: &StepInputs,
    compute: &Stream,
    way: Way<'_>,
) -> Result<Option<Arc<Mark>>> {
    let chunk = &step.plan().chunks()[index];
    if !step.has_work(chunk) && !matches!(way.work, Work::Carry) {
        return Ok(None);
    }
    let (device, rule) = (&**pipeline.device(), step.table.rule());
    let launch = |segments: &Segments| inputs.launch_work(device, compute, rule, segments, way.work);
    let bucket = &step.plan().buckets()[chunk.bucket];
    if bucket.columns.is_empty() && !bucket.on_host {
        // Nothing travels.
        let traced = trace::timed(pipeline.device(), compute, None);
        launch(&segments(step, chunk, None)?)?;
        if let Some(traced) = traced {
            traced.end(compute, in_place(0, pipeline.owner()));
        }
        return Ok(None);
    }
    let (slot, prepared) = pipeline.acquire_while(|memory| -> Result<_> {
        Ok((ChunkCopies::new(step, chunk, way)?, segments(step, chunk, Some(memory))?))
    })?;
    let (ChunkCopies { fetch, store }, segments) = prepared?;
    let slot = pipeline.fetch(slot, &fetch.host, &fetch.slot)?;
    let fetched = slot.end().cloned();
    let slot = pipeline.update(slot, compute, |_, _| launch(&segments))?;
    if way.to.is_none() {
        pipeline.release(slot);
        return Ok(fetched);
    }
    step.table.protect(&store.host);
    let slot = pipeline.store(slot, &store.slot, &store.host, index, step.payload_bytes(chunk))?;
    pipeline.release(slot);
    Ok(fetched)
}

/// What a trace shows of an update of state that stays where it is.
pub(super) fn in_place(bytes: u64, owner: u32) -> Span {
    Span { bytes, owner, ..Span::new(Kind::Update, Label::Words("state on the device")) }
}

/// Adds the segments of a chunk that has no columns and stays where it is.
pub(super) fn chunk_segments(step: TableStep<'_>, index: usize, all: &mut Segments) -> Result<()> {
    let Segments { of_step, early } = segments(step, &step.plan().chunks()[index], None)?;
    all.of_step.extend(of_step);
    all.early.extend(early);
    Ok(())
}

/// Copies of one stage: regions of the host, and the offset and length of each in the slot.
struct Copies {
    host: Vec<Region>,
    slot: Vec<(u64, u64)>,
}

impl Copies {
    fn push(&mut self, host: Region, slot: (u64, u64)) {
        self.host.push(host);
        self.slot.push(slot);
    }
}

/// What a chunk moves: its state both ways, and for tensors on the host the gradient in and the parameter in and out.
struct ChunkCopies {
    fetch: Copies,
    store: Copies,
}

impl ChunkCopies {
    fn new(step: TableStep<'_>, chunk: &Chunk, way: Way<'_>) -> Result<Self> {
        let (layout, table) = (step.table.in_slot(chunk), step.table);
        let (from, slot) = (table.chunk_of(way.from, chunk)?, layout.parts());
        let to = way.to.map_or(Ok(Vec::new()), |side| table.chunk_of(side, chunk))?;
        let fetch = Copies { host: from, slot: slot.clone() };
        let mut copies = Self { fetch, store: Copies { host: to, slot } };
        if !step.plan().buckets()[chunk.bucket].on_host {
            return Ok(copies);
        }
        for piece in step.plan().pieces(chunk) {
            let Some(binding) = step.binding(piece.tensor) else { continue };
            for (operand, region, dtype) in
                [(0, &binding.weight, binding.weight_dtype), (1, &binding.grad, binding.grad_dtype)]
            {
                let width = dtype.bytes();
                let host = region.slice(piece.tensor_offset * width, piece.elements * width)?;
                let slot = layout.operand(operand, piece, width);
                if operand == 0 {
                    copies.store.push(host.clone(), slot);
                }
                copies.fetch.push(host, slot);
            }
        }
        Ok(copies)
    }
}

/// The segments of a chunk: state in the slot; weight and gradient in the slot if they travel, in place if they live on
/// the device.
fn segments(step: TableStep<'_>, chunk: &Chunk, slot: Option<&Region>) -> Result<Segments> {
    let (pieces, layout) = (step.plan().pieces(chunk), step.table.in_slot(chunk));
    let mut segments = Segments::default();
    for piece in pieces {
        let Some(binding) = step.binding(piece.tensor) else { continue };
        let operand = |number: usize, region: &Region, width: u64| match slot.filter(|_| region.place().is_host()) {
            Some(slot) => {
                let (offset, len) = layout.operand(number, piece, width);
                Ok(slot.slice(offset, len)?)
            }
            None => Ok(region.slice(piece.tensor_offset * width, piece.elements * width)?),
        };
        let find = |wanted: Operand, index: usize| match (wanted, slot) {
            (Operand::Weight, _) => operand(0, &binding.weight, binding.weight_dtype.bytes()),
            (Operand::Grad, _) => operand(1, &binding.grad, binding.grad_dtype.bytes()),
            (_, Some(slot)) => {
                let (offset, len) = layout.column(index, piece);
                Ok(slot.slice(offset, len)?)
            }
            (_, None) => step.table.tensor(piece.tensor, index),
        };
        segments.push(step.segment(piece.tensor, piece.tensor_offset, find)?, binding);
    }
    Ok(segments)
}

/// Adds the segment of a resident tensor that has a gradient: all of it, its state where the caller has it.
pub(super) fn resident_segment(step: TableStep<'_>, tensor: usize, segments: &mut Segments) -> Result<()> {
    let spec = &step.plan().tensors()[tensor];
    let Some(binding) = step.binding(tensor).filter(|_| spec.elements > 0) else { return Ok(()) };
    let find = |wanted: Operand, index: usize| {
        Ok(match wanted {
            Operand::Weight => binding.weight.clone(),
            Operand::Grad => binding.grad.clone(),
            _ => step.input.resident[tensor][index].clone(),
        })
    };
    segments.push(step.segment(tensor, 0, find)?, binding);
    Ok(())
}
