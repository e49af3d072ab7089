//! Which bytes travel in which chunk: decided before anything is allocated, the same for the same input.
//!
//! Tensors with the same kinds of state form a bucket. A bucket has one arena per kind, in parameter order, each tensor
//! starting at a multiple of [`ALIGN_ELEMENTS`]. A chunk is the same range of elements in every arena of its bucket,
//! as many as fit a slot; it may cut tensors anywhere. A segment is the part of one tensor that lies in one chunk.

mod activations;

use std::fmt;
use std::fmt::Write as _;
use std::ops::Range;

use forebay_device::{ALIGN_BYTES, PIECE_BYTES};
use serde::{Deserialize, Serialize};

pub use activations::{ActivationPlan, Choice, LayerCost, LayerPlan, Moment, PassCost, TensorCost};

use crate::error::{Error, Result};

/// Tensors start at multiples of this many elements, so that their state is aligned as the parts of a slab are.
pub const ALIGN_ELEMENTS: u64 = 64;

/// Bytes of one element of state.
pub const STATE_BYTES: u64 = 4;

/// Parts of a slot that a parameter and a gradient on the host take, each with room for f32.
pub const HOST_OPERANDS: u64 = 2;

/// Arenas are kept below this where their tensors allow it: then the distance between the arenas of a bucket is one that
/// a two-dimensional copy can take, and all kinds of a chunk travel as one copy.
const ARENA_TARGET_BYTES: u64 = (1 << 31) - (1 << 16);

/// What is kept for each element of a parameter, as f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateKind {
    /// First moment.
    ExpAvg,
    /// Second moment.
    ExpAvgSq,
    /// Largest second moment so far: amsgrad.
    MaxExpAvgSq,
    /// Master weights.
    Master,
}

impl StateKind {
    /// The kinds of a parameter, in the order of their arenas.
    pub fn set(amsgrad: bool, master: bool) -> Vec<Self> {
        let mut kinds = vec![Self::ExpAvg, Self::ExpAvgSq];
        kinds.extend(amsgrad.then_some(Self::MaxExpAvgSq));
        kinds.extend(master.then_some(Self::Master));
        kinds
    }
}

/// A parameter as the plan sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Its name, for errors.
    pub name: String,
    /// Its local elements; 0 is fine.
    pub elements: u64,
    /// What is kept for it.
    pub kinds: Vec<StateKind>,
    /// Whether the parameter and its gradient lie on the host and travel through the slot with the state.
    pub on_host: bool,
}

/// What the user asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanOptions {
    /// Bytes of one slot, all kinds of state together.
    pub slot_bytes: u64,
    /// Slots in the ring.
    pub slots: usize,
    /// Largest arena; a larger bucket is divided between tensors. Arenas must fit one registration.
    pub arena_limit_bytes: u64,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self { slot_bytes: 16 << 20, slots: 4, arena_limit_bytes: PIECE_BYTES }
    }
}

/// Tensors whose state lies together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// Its arenas, one for each kind.
    pub kinds: Vec<StateKind>,
    /// Whether parameters and gradients travel too.
    pub on_host: bool,
    /// Elements of each arena, alignment included.
    pub elements: u64,
    /// The index of its first arena among all arenas of the plan.
    pub first_arena: usize,
}

/// The slot-sized unit of transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// Whose arenas it is a range of.
    pub bucket: usize,
    /// First element of the range.
    pub start: u64,
    /// Elements of the range, alignment included.
    pub elements: u64,
    /// Its segments, as indices into [`StepPlan::segments`].
    pub segments: Range<usize>,
}

/// The part of one tensor that lies in one chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// The tensor.
    pub tensor: usize,
    /// Its first element of this part.
    pub tensor_offset: u64,
    /// Where that element lies in the chunk.
    pub chunk_offset: u64,
    /// Elements of the part.
    pub elements: u64,
}

/// Where a tensor's state lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    /// Its bucket.
    pub bucket: usize,
    /// Its first element in each of the bucket's arenas.
    pub start: u64,
}

/// The immutable plan of a streamed step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepPlan {
    options: PlanOptions,
    tensors: Vec<TensorSpec>,
    homes: Vec<Home>,
    buckets: Vec<Bucket>,
    chunks: Vec<Chunk>,
    segments: Vec<Segment>,
}

impl StepPlan {
    /// Plans the step. Pure: nothing is allocated and the same input gives the same plan.
    pub fn new(tensors: Vec<TensorSpec>, options: PlanOptions) -> Result<Self> {
        if options.slots < 2 {
            return Err(Error::InvalidOption {
                option: "slots",
                value: options.slots.to_string(),
                remedy: "use at least 2, so that one slot can be stored while the next is fetched".to_owned(),
            });
        }
        let mut plan =
            Self { options, tensors, homes: Vec::new(), buckets: Vec::new(), chunks: Vec::new(), segments: Vec::new() };
        plan.place_tensors()?;
        for bucket in 0..plan.buckets.len() {
            plan.cut_bucket(bucket)?;
        }
        Ok(plan)
    }

    /// Gives every tensor its home, in parameter order within its bucket.
    fn place_tensors(&mut self) -> Result<()> {
        let limit = self.options.arena_limit_bytes / STATE_BYTES;
        let target = limit.min(ARENA_TARGET_BYTES / STATE_BYTES);
        for tensor in &self.tensors {
            if tensor.kinds.is_empty() {
                let reason = "no kind of state is kept for it; leave it out".to_owned();
                return Err(Error::PlanMismatch { tensor: tensor.name.clone(), reason });
            }
            if tensor.elements > limit {
                return Err(Error::PlanMismatch {
                    tensor: tensor.name.clone(),
                    reason: format!(
                        "{} elements, and an arena holds at most {limit}; shard the parameter",
                        tensor.elements
                    ),
                });
            }
            // The newest bucket of its kinds, unless it is full.
            let open = self.buckets.iter().rposition(|b| b.kinds == tensor.kinds && b.on_host == tensor.on_host);
            let bucket = open
                .filter(|&b| self.buckets[b].elements.next_multiple_of(ALIGN_ELEMENTS) + tensor.elements <= target)
                .unwrap_or_else(|| {
                    let (kinds, on_host) = (tensor.kinds.clone(), tensor.on_host);
                    self.buckets.push(Bucket { kinds, on_host, elements: 0, first_arena: 0 });
                    self.buckets.len() - 1
                });
            let elements = &mut self.buckets[bucket].elements;
            let start = elements.next_multiple_of(ALIGN_ELEMENTS);
            *elements = start + tensor.elements;
            self.homes.push(Home { bucket, start });
        }
        let mut arenas = 0;
        for bucket in &mut self.buckets {
            bucket.first_arena = arenas;
            arenas += bucket.kinds.len();
        }
        Ok(())
    }

    fn cut_bucket(&mut self, bucket: usize) -> Result<()> {
        let Bucket { kinds, on_host, elements, .. } = &self.buckets[bucket];
        let (kinds, total) = (kinds.len() as u64 + if *on_host { HOST_OPERANDS } else { 0 }, *elements);
        let capacity = self.options.slot_bytes / (STATE_BYTES * kinds) / ALIGN_ELEMENTS * ALIGN_ELEMENTS;
        if capacity == 0 {
            return Err(Error::InvalidOption {
                option: "chunk_bytes",
                value: self.options.slot_bytes.to_string(),
                remedy: format!(
                    "{kinds} values for each element need at least {}",
                    STATE_BYTES * kinds * ALIGN_ELEMENTS
                ),
            });
        }
        let Self { tensors, homes, segments, chunks, .. } = self;
        let mut members = (0..tensors.len()).filter(|&t| homes[t].bucket == bucket).peekable();
        for start in (0..total).step_by(capacity as usize) {
            let end = (start + capacity).min(total);
            let first = segments.len();
            while let Some(&tensor) = members.peek() {
                let home = homes[tensor].start;
                let (low, high) = (home.max(start), (home + tensors[tensor].elements).min(end));
                if low < high {
                    segments.push(Segment {
                        tensor,
                        tensor_offset: low - home,
                        chunk_offset: low - start,
                        elements: high - low,
                    });
                }
                if home + tensors[tensor].elements > end {
                    break;
                }
                members.next();
            }
            // A range that holds nothing but alignment needs no transfer.
            if segments.len() > first {
                chunks.push(Chunk { bucket, start, elements: end - start, segments: first..segments.len() });
            }
        }
        Ok(())
    }

    /// What was asked for.
    pub fn options(&self) -> PlanOptions {
        self.options
    }

    /// The tensors, in the order given.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Where a tensor's state lies.
    pub fn home(&self, tensor: usize) -> Home {
        self.homes[tensor]
    }

    /// The buckets.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The chunks, in the order in which they travel.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// The segments of one chunk.
    pub fn segments(&self, chunk: &Chunk) -> &[Segment] {
        &self.segments[chunk.segments.clone()]
    }

    /// Bytes of each arena, in the order in which the slab holds them.
    pub fn arena_bytes(&self) -> Vec<u64> {
        self.buckets.iter().flat_map(|b| b.kinds.iter().map(|_| b.elements * STATE_BYTES)).collect()
    }

    /// Bytes of state without alignment: what one step moves each way at the least.
    pub fn payload_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.elements * t.kinds.len() as u64 * STATE_BYTES).sum()
    }

    /// Elements of all tensors.
    pub fn elements(&self) -> u64 {
        self.tensors.iter().map(|t| t.elements).sum()
    }

    /// Bytes of the ring on the device, whose slots start aligned.
    pub fn ring_bytes(&self) -> u64 {
        self.options.slot_bytes.next_multiple_of(ALIGN_BYTES) * self.options.slots as u64
    }

    /// How many tensors lie in more than one chunk.
    pub fn cut_tensors(&self) -> usize {
        let mut pieces = vec![0usize; self.tensors.len()];
        self.segments.iter().for_each(|segment| pieces[segment.tensor] += 1);
        pieces.iter().filter(|&&n| n > 1).count()
    }

    /// The plan in words.
    pub fn explain(&self) -> String {
        let mut text = String::new();
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let _ = writeln!(
            text,
            "{} tensors, {} elements, {:.1} MiB of state on the host",
            self.tensors.len(),
            self.elements(),
            mib(self.arena_bytes().iter().sum())
        );
        for (i, bucket) in self.buckets.iter().enumerate() {
            let chunks = self.chunks.iter().filter(|chunk| chunk.bucket == i).count();
            let _ =
                writeln!(text, "bucket {i}: {:?}, {} elements each, {chunks} chunks", bucket.kinds, bucket.elements);
        }
        let _ = writeln!(
            text,
            "ring: {} slots of {:.1} MiB, {:.1} MiB on the device; {} chunks, so it wraps {} times; {} tensors are cut",
            self.options.slots,
            mib(self.options.slot_bytes),
            mib(self.ring_bytes()),
            self.chunks.len(),
            self.chunks.len() / self.options.slots,
            self.cut_tensors()
        );
        text
    }
}

impl fmt::Display for StepPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.explain())
    }
}
