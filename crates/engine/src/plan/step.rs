//! Which bytes travel in which chunk: decided before anything is allocated, the same for the same input.
//!
//! Tensors with the same columns of state form a bucket. A bucket has one arena per column, in parameter order, each
//! tensor starting at a multiple of [`ALIGN_ELEMENTS`] and of its columns' blocks. A chunk is the same range of elements
//! in every arena of its bucket, as many as fit a slot; it may cut tensors at such multiples. A piece is the part of one
//! tensor that lies in one chunk.

use std::fmt;
use std::fmt::Write as _;
use std::ops::Range;

use forebay_device::update::{BLOCK, MAX_COLUMNS};
use forebay_device::{ALIGN_BYTES, Column, MasterFormat, PIECE_BYTES, Rule, StateFormat};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use crate::error::{Error, Result};

/// Tensors start at multiples of this many elements, so that their state is aligned as the parts of a slab are.
pub const ALIGN_ELEMENTS: u64 = 64;

/// Bytes of an f32, as which a parameter or gradient on the host travels at the widest.
const OPERAND_BYTES: u64 = 4;

/// Parts of a slot that a parameter and a gradient on the host take, each with room for f32.
pub const HOST_OPERANDS: u64 = 2;

/// Arenas are smaller than this if their tensors allow it. Then the distance between the arenas of a bucket is within
/// the limit of a two-dimensional copy, and all columns of a chunk travel as one copy.
const ARENA_TARGET_BYTES: u64 = (1 << 31) - (1 << 16);

/// A parameter as the plan sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorSpec {
    /// Its name, for errors.
    pub name: String,
    /// Its local elements; 0 is fine.
    pub elements: u64,
    /// The columns of state that are kept for it; there may be none.
    #[serde(serialize_with = "columns")]
    pub columns: Vec<Column>,
    /// Whether the parameter and its gradient lie on the host and travel through the slot with the state.
    pub on_host: bool,
    /// Its place among the parameters of its optimizer: random numbers depend on it, so it is the same in every run.
    pub number: u64,
}

/// What the user asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PlanOptions {
    /// Bytes of one slot, all columns of state together.
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Bucket {
    /// Its arenas, one for each column.
    #[serde(serialize_with = "columns")]
    pub columns: Vec<Column>,
    /// Whether parameters and gradients travel too.
    pub on_host: bool,
    /// Elements that each arena covers, alignment included.
    pub elements: u64,
    /// The index of its first arena among all arenas of the plan.
    pub first_arena: usize,
}

/// The slot-sized unit of transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Chunk {
    /// Whose arenas it is a range of.
    pub bucket: usize,
    /// First element of the range.
    pub start: u64,
    /// Elements of the range, alignment included.
    pub elements: u64,
    /// Its pieces, as indices into all pieces of the plan.
    pub pieces: Range<usize>,
}

/// The part of one tensor that lies in one chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Piece {
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Home {
    /// Its bucket.
    pub bucket: usize,
    /// Its first element in each of the bucket's arenas.
    pub start: u64,
}

/// The immutable plan of a streamed step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StepPlan {
    options: PlanOptions,
    tensors: Vec<TensorSpec>,
    homes: Vec<Home>,
    buckets: Vec<Bucket>,
    chunks: Vec<Chunk>,
    pieces: Vec<Piece>,
}

/// Where a tensor starts in its arenas: at a line of the cache, and at a block of every column.
fn align_elements(columns: &[Column]) -> u64 {
    columns.iter().map(|column| u64::from(column.block)).fold(ALIGN_ELEMENTS, u64::max)
}

/// The formats in which a parameter of this many elements keeps the columns of its rule, where these are asked for. One
/// that has not a whole block keeps f32: its scale would be no smaller part of it.
pub fn formats_for(wanted: [StateFormat; MAX_COLUMNS], elements: u64) -> [StateFormat; MAX_COLUMNS] {
    let block = |format: StateFormat| if format == StateFormat::Blocks { u64::from(BLOCK) } else { 0 };
    wanted.map(|format| if elements < block(format) { StateFormat::F32 } else { format })
}

/// The columns of a parameter of this many elements, in a group with these numbers.
pub fn columns_for(
    rule: &Rule,
    hypers: &[f64],
    wanted: [StateFormat; MAX_COLUMNS],
    master: MasterFormat,
    elements: u64,
) -> Vec<Column> {
    rule.kept_as(hypers, formats_for(wanted, elements), master)
}

/// Bytes of state of this many elements.
pub fn state_bytes(columns: &[Column], elements: u64) -> u64 {
    columns.iter().map(|column| column.bytes(elements)).sum()
}

/// The most elements for which every column has at most this many bytes.
fn elements_within(columns: &[Column], bytes: u64) -> u64 {
    let widest = |column: &Column| bytes / column.stored.bytes() * u64::from(column.block);
    columns.iter().map(widest).min().unwrap_or(bytes / OPERAND_BYTES)
}

impl Bucket {
    /// Parameters and gradients that travel with the state.
    fn operands(&self) -> u64 {
        if self.on_host { HOST_OPERANDS } else { 0 }
    }

    /// Where each column's part of a chunk of this many elements begins in a slot, then where each operand's does;
    /// last, where all of it ends. Parts start aligned, also in the last, shorter chunk of a bucket.
    pub fn part_offsets(&self, elements: u64) -> Vec<u64> {
        let elements = elements.next_multiple_of(align_elements(&self.columns));
        let columns = self.columns.iter().map(|column| column.bytes(elements));
        let operands = (0..self.operands()).map(|_| elements * OPERAND_BYTES);
        let mut end = 0;
        let starts = columns.chain(operands).map(|bytes| {
            let start = end;
            end = start + bytes.next_multiple_of(ALIGN_BYTES);
            start
        });
        let mut starts: Vec<u64> = starts.collect();
        starts.push(end);
        starts
    }

    /// Bytes of a slot that a chunk of this many elements needs.
    fn slot_bytes(&self, elements: u64) -> u64 {
        self.part_offsets(elements).last().copied().unwrap_or(0)
    }

    /// Bytes of a slot that so many times [`align_elements`] need. A slot holds the columns and operands of a chunk, and a
    /// slot of the host's ring, which has the same size, holds its parameters and gradients: few columns leave room in the
    /// first.
    fn units_bytes(&self, units: u64) -> u64 {
        let elements = units * align_elements(&self.columns);
        self.slot_bytes(elements).max(elements * HOST_OPERANDS * OPERAND_BYTES)
    }

    /// The most elements that a chunk may have.
    fn chunk_elements(&self, slot_bytes: u64) -> u64 {
        let align = align_elements(&self.columns);
        // Without what aligns the parts, which is some 100 bytes for each: the number of tries is small.
        let packed = state_bytes(&self.columns, align) + self.operands() * align * OPERAND_BYTES;
        let most = slot_bytes / packed.max(align * HOST_OPERANDS * OPERAND_BYTES);
        (0..=most).rev().find(|&units| self.units_bytes(units) <= slot_bytes).unwrap_or(0) * align
    }
}

/// Columns by name, type and block.
fn columns<S: Serializer>(columns: &[Column], serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_seq(columns.iter().map(|column| AsData(*column)))
}

struct AsData(Column);

impl Serialize for AsData {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let Column { name, stored, block } = self.0;
        let mut data = serializer.serialize_struct("Column", 3)?;
        data.serialize_field("name", name)?;
        data.serialize_field("dtype", stored.name())?;
        data.serialize_field("block", &block)?;
        data.end()
    }
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
            Self { options, tensors, homes: Vec::new(), buckets: Vec::new(), chunks: Vec::new(), pieces: Vec::new() };
        plan.place_tensors()?;
        for bucket in 0..plan.buckets.len() {
            plan.cut_bucket(bucket)?;
        }
        Ok(plan)
    }

    /// Gives every tensor its home, in parameter order within its bucket.
    fn place_tensors(&mut self) -> Result<()> {
        for tensor in &self.tensors {
            let limit = elements_within(&tensor.columns, self.options.arena_limit_bytes);
            let target = elements_within(&tensor.columns, self.options.arena_limit_bytes.min(ARENA_TARGET_BYTES));
            let align = align_elements(&tensor.columns);
            if tensor.elements > limit {
                return Err(Error::PlanMismatch {
                    tensor: tensor.name.clone(),
                    reason: format!(
                        "{} elements, and an arena holds at most {limit}; shard the parameter",
                        tensor.elements
                    ),
                });
            }
            // The newest bucket of its columns, unless it is full.
            let same = |b: &Bucket| b.columns == tensor.columns && b.on_host == tensor.on_host;
            let open = self.buckets.iter().rposition(same);
            let bucket = open
                .filter(|&b| self.buckets[b].elements.next_multiple_of(align) + tensor.elements <= target)
                .unwrap_or_else(|| {
                    let (columns, on_host) = (tensor.columns.clone(), tensor.on_host);
                    self.buckets.push(Bucket { columns, on_host, elements: 0, first_arena: 0 });
                    self.buckets.len() - 1
                });
            let elements = &mut self.buckets[bucket].elements;
            let start = elements.next_multiple_of(align);
            *elements = start + tensor.elements;
            self.homes.push(Home { bucket, start });
        }
        let mut arenas = 0;
        for bucket in &mut self.buckets {
            bucket.first_arena = arenas;
            arenas += bucket.columns.len();
        }
        Ok(())
    }

    fn cut_bucket(&mut self, bucket: usize) -> Result<()> {
        let bucket_plan = &self.buckets[bucket];
        let (capacity, total) = (bucket_plan.chunk_elements(self.options.slot_bytes), bucket_plan.elements);
        if capacity == 0 {
            return Err(Error::InvalidOption {
                option: "chunk_bytes",
                value: self.options.slot_bytes.to_string(),
                remedy: format!(
                    "{} values for each element need at least {}",
                    (bucket_plan.columns.len() as u64 + bucket_plan.operands()).max(HOST_OPERANDS),
                    bucket_plan.units_bytes(1)
                ),
            });
        }
        let Self { tensors, homes, pieces, chunks, .. } = self;
        let mut members = (0..tensors.len()).filter(|&t| homes[t].bucket == bucket).peekable();
        for start in (0..total).step_by(capacity as usize) {
            let end = (start + capacity).min(total);
            let first = pieces.len();
            while let Some(&tensor) = members.peek() {
                let home = homes[tensor].start;
                let (low, high) = (home.max(start), (home + tensors[tensor].elements).min(end));
                if low < high {
                    pieces.push(Piece {
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
            if pieces.len() > first {
                chunks.push(Chunk { bucket, start, elements: end - start, pieces: first..pieces.len() });
            }
        }
        Ok(())
    }

    /// The options that the plan was made with.
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

    /// The pieces of one chunk.
    pub fn pieces(&self, chunk: &Chunk) -> &[Piece] {
        &self.pieces[chunk.pieces.clone()]
    }

    /// Bytes of each arena, in the order in which the slab holds them.
    pub fn arena_bytes(&self) -> Vec<u64> {
        self.buckets.iter().flat_map(|b| b.columns.iter().map(|column| column.bytes(b.elements))).collect()
    }

    /// Bytes of state without alignment: what one step moves each way at the least.
    pub fn payload_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| state_bytes(&t.columns, t.elements)).sum()
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
        let mut counts = vec![0usize; self.tensors.len()];
        self.pieces.iter().for_each(|piece| counts[piece.tensor] += 1);
        counts.iter().filter(|&&n| n > 1).count()
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
            let names: Vec<&str> = bucket.columns.iter().map(|column| column.name).collect();
            let names = if names.is_empty() { "no state".to_owned() } else { names.join(", ") };
            let _ = writeln!(text, "bucket {i}: {names}; {} elements each, {chunks} chunks", bucket.elements);
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
