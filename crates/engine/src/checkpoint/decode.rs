//! Reading encoded boxes as f32, a part at a time: memory for some of the bytes as they are kept, and for no more.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use forebay_device::{Buffer, Cores, Region, file};

use super::boxes::{TensorBox, row_major, runs, span_bytes};
use super::encoding::Encoding;
use super::manifest::StoredChunk;
use super::{Checkpoint, Request, refuse};
use crate::error::{Error, Result};

/// Bytes of an encoding that are read at a time, by each thread.
const PART_BYTES: u64 = 32 << 20;
/// Threads that decode at once.
const MAX_THREADS: usize = 4;
/// Elements that are decoded before they are put where they belong.
const PIECE_ELEMENTS: u64 = 16 << 10;

/// A request for numbers that are encoded.
pub(super) struct Decoding<'a> {
    request: &'a Request,
    chunk: &'a StoredChunk,
    encoding: Encoding,
    weight: Option<&'a str>,
    /// The chunk's dimensions in the order of its memory, and its shape in that order.
    order: Vec<usize>,
    shape: Vec<u64>,
    /// The request's box and strides in that order.
    wanted: TensorBox,
    strides: Vec<u64>,
}

impl<'a> Decoding<'a> {
    /// What has to be decoded for a request; `None` if its bytes are in the files as it wants them.
    pub(super) fn of(checkpoint: &'a Checkpoint, request: &'a Request) -> Result<Option<Self>> {
        let (tensor, chunk) = checkpoint.find(request)?;
        // Checked with the manifest.
        let Ok(Some(encoding)) = checkpoint.manifest().encoding(chunk) else { return Ok(None) };
        if request.kept.is_some() {
            return Ok(None);
        }
        let TensorBox { offsets, shape: lengths } = &request.part;
        let fits = request.part.is_inside(&chunk.extent.shape)
            && span_bytes("F32", lengths, &request.strides) == Some(request.into.bytes());
        if !fits {
            return refuse(
                checkpoint.folder(),
                format!(
                    "tensor {:?}: {lengths:?} elements at {offsets:?} of a chunk of {:?} do not fit into {} bytes",
                    request.tensor,
                    chunk.extent.shape,
                    request.into.bytes()
                ),
            );
        }
        let order = chunk.order();
        let ordered = |of: &[u64]| order.iter().map(|&dim| of[dim]).collect::<Vec<_>>();
        Ok(Some(Self {
            request,
            chunk,
            encoding,
            weight: tensor.weight.as_deref(),
            shape: chunk.ordered_shape(),
            wanted: TensorBox { offsets: ordered(offsets), shape: ordered(lengths) },
            strides: ordered(&request.strides),
            order,
        }))
    }

    /// The box in parts, of which each reaches over few enough elements of the chunk.
    fn parts(&self) -> Vec<TensorBox> {
        let (first, second) = self.encoding.widths();
        // The weights of compact masters are read too.
        let bytes = first + u64::from(second > 0) + if self.weight.is_some() { 2 } else { 0 };
        split(&self.shape, &self.wanted, PART_BYTES / bytes)
    }

    /// The box of the tensor that a part is.
    fn place_of(&self, part: &TensorBox) -> TensorBox {
        let mut place = self.chunk.extent.clone();
        for (i, &dim) in self.order.iter().enumerate() {
            place.offsets[dim] += part.offsets[i];
            place.shape[dim] = part.shape[i];
        }
        place
    }
}

/// Cuts a box inside a row-major chunk into boxes, in the order of their elements, that each reach over at most `most`
/// elements of the chunk.
pub(super) fn split(shape: &[u64], whole: &TensorBox, most: u64) -> Vec<TensorBox> {
    let strides = row_major(shape);
    let mut parts = Vec::new();
    let mut open = vec![whole.clone()];
    while let Some(part) = open.pop() {
        if part.shape.contains(&0) {
            continue;
        }
        let reach = |from: usize| -> u64 { (from..shape.len()).map(|i| (part.shape[i] - 1) * strides[i]).sum() };
        let outer = (0..shape.len()).find(|&i| part.shape[i] > 1).filter(|_| reach(0) + 1 > most);
        let Some(dim) = outer else {
            parts.push(part);
            continue;
        };
        let rows = most.saturating_sub(reach(dim + 1) + 1) / strides[dim] + 1;
        // The first is on top.
        for index in (0..part.shape[dim].div_ceil(rows)).rev() {
            let start = index * rows;
            let mut next = part.clone();
            next.offsets[dim] += start;
            next.shape[dim] = rows.min(part.shape[dim] - start);
            open.push(next);
        }
    }
    parts
}

/// Memory of one thread.
#[derive(Default)]
struct Memory {
    buffers: [Option<Buffer>; 3],
    bytes: [Vec<u8>; 3],
}

impl Memory {
    /// A region of this length.
    fn room(&mut self, index: usize, bytes: u64) -> Result<Region> {
        let buffer = &mut self.buffers[index];
        let room = match buffer.take().filter(|buffer| buffer.bytes() >= bytes) {
            Some(room) => room,
            // The old one has been freed.
            None => Buffer::pageable(bytes.max(1))?,
        };
        Ok(buffer.insert(room).region(0, bytes)?)
    }

    /// Makes a region's bytes readable.
    fn look(&mut self, index: usize, region: &Region, failed: impl FnOnce(std::io::Error) -> Error) -> Result<()> {
        let bytes = &mut self.bytes[index];
        bytes.clear();
        file::visit(region, |piece| bytes.extend_from_slice(piece)).map_err(failed)
    }
}

impl Checkpoint {
    /// Decodes all of these with at most `threads` threads.
    pub(super) fn decode(&self, decodings: &[Decoding<'_>], threads: usize, read: &AtomicU64) -> Result<()> {
        let parts: Vec<(&Decoding<'_>, TensorBox)> = decodings
            .iter()
            .flat_map(|decoding| decoding.parts().into_iter().map(move |part| (decoding, part)))
            .collect();
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let lock = || failed.lock().unwrap_or_else(PoisonError::into_inner);
        let work = || {
            let mut memory = Memory::default();
            while let Some((decoding, part)) = parts.get(next.fetch_add(1, Relaxed)) {
                if lock().is_some() {
                    return;
                }
                if let Err(error) = self.decode_part(decoding, part, &mut memory, read) {
                    lock().get_or_insert(error);
                    return;
                }
            }
        };
        let cores = Cores::here();
        std::thread::scope(|scope| {
            for _ in 1..threads.min(parts.len()).min(MAX_THREADS) {
                let _ = cores.spawn_scoped(scope, "forebay-checkpoint", work);
            }
            work();
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    fn decode_part(
        &self,
        decoding: &Decoding<'_>,
        part: &TensorBox,
        memory: &mut Memory,
        read: &AtomicU64,
    ) -> Result<()> {
        let Decoding { request, encoding, shape, .. } = decoding;
        let fail = |error: std::io::Error| Error::file("read", self.folder(), &error);
        let strides = row_major(shape);
        let at = |offsets: &[u64]| offsets.iter().zip(&strides).map(|(offset, stride)| offset * stride).sum::<u64>();
        let first = at(&part.offsets);
        let last = first + part.shape.iter().zip(&strides).map(|(len, stride)| (len - 1) * stride).sum::<u64>();
        let elements: u64 = part.shape.iter().product();
        let (width, wide) = encoding.widths();
        let kept = |kept, extent: TensorBox, into: Region| Request {
            tensor: request.tensor.clone(),
            chunk: request.chunk,
            strides: row_major(&extent.shape),
            part: extent,
            into,
            kept: Some(kept),
        };
        let mut wanted = vec![kept(0, part.clone(), memory.room(0, elements * width)?)];
        if wide > 0 {
            let (from, to) = (first / encoding.granule(), last / encoding.granule() + 1);
            let extent = TensorBox { offsets: vec![from], shape: vec![to - from] };
            wanted.push(kept(1, extent, memory.room(1, (to - from) * wide)?));
        }
        self.read_plain(&wanted.iter().collect::<Vec<_>>(), 1, read)?;
        for (index, request) in wanted.iter().enumerate() {
            memory.look(index, &request.into, fail)?;
        }
        memory.bytes[2].clear();
        if let (Encoding::Compact, Some(weight)) = (encoding, decoding.weight) {
            // The weights in the order of the masters.
            let weights = memory.room(2, 2 * elements)?;
            let mut strides = vec![0; part.shape.len()];
            for (&dim, stride) in decoding.order.iter().zip(row_major(&part.shape)) {
                strides[dim] = stride;
            }
            self.read_box(weight, &decoding.place_of(part), &strides, &weights, read)?;
            memory.look(2, &weights, fail)?;
        }
        let [numbers, beside, weights] = &memory.bytes;
        let offset = |i: usize| (part.offsets[i] - decoding.wanted.offsets[i]) * decoding.strides[i];
        let base: u64 = (0..part.shape.len()).map(offset).sum();
        let (mut done, mut values) = (0, Vec::new());
        for run in runs(shape, &part.offsets, &part.shape, &decoding.strides) {
            for start in (0..run.elements).step_by(PIECE_ELEMENTS as usize) {
                let count = PIECE_ELEMENTS.min(run.elements - start);
                let range = |width: u64| (done * width) as usize..((done + count) * width) as usize;
                values.clear();
                let weights = weights.get(range(2)).unwrap_or_default();
                let from = run.from + start;
                let skipped = from / encoding.granule() - first / encoding.granule();
                let beside = beside.get((skipped * wide) as usize..).unwrap_or_default();
                encoding.decode(&numbers[range(width)], from, (beside, from), weights, &mut values);
                let into = request.into.slice(4 * (base + run.to + start), 4 * count)?;
                file::fill(&into, &values).map_err(fail)?;
                done += count;
            }
        }
        Ok(())
    }

    /// Reads a box of a tensor that is kept as its numbers are, from whatever chunks have it. `into` has room from the
    /// box's first element to its last.
    pub(super) fn read_box(
        &self,
        name: &str,
        place: &TensorBox,
        strides: &[u64],
        into: &Region,
        read: &AtomicU64,
    ) -> Result<()> {
        let Some(tensor) = self.manifest().tensors.get(name) else {
            return refuse(self.folder(), format!("no tensor {name:?}"));
        };
        let mut requests = Vec::new();
        for (number, chunk) in tensor.chunks.iter().enumerate() {
            if !chunk.extent.overlaps(place) {
                continue;
            }
            let mut common = TensorBox { offsets: Vec::new(), shape: Vec::new() };
            let mut begin = 0;
            for (dim, stride) in strides.iter().enumerate() {
                let (ours, theirs) = (place.offsets[dim], chunk.extent.offsets[dim]);
                let from = ours.max(theirs);
                let to = (ours + place.shape[dim]).min(theirs + chunk.extent.shape[dim]);
                common.offsets.push(from - theirs);
                common.shape.push(to - from);
                begin += (from - ours) * stride;
            }
            let width = super::element_bytes(&tensor.dtype).unwrap_or(1);
            let bytes = span_bytes(&tensor.dtype, &common.shape, strides).unwrap_or(0);
            requests.push(Request {
                tensor: name.to_owned(),
                chunk: number,
                part: common,
                into: into.slice(begin * width, bytes)?,
                strides: strides.to_vec(),
                kept: None,
            });
        }
        self.read_plain(&requests.iter().collect::<Vec<_>>(), 1, read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The parts of a box are the box, in the order of its elements, and none reaches too far unless it is one element.
        #[test]
        fn parts_are_the_box_in_order(
            dims in prop::collection::vec((1u64..6, 0u64..3, 0u64..4), 0..4),
            most in 1u64..80,
        ) {
            let whole = TensorBox {
                offsets: dims.iter().map(|&(_, offset, _)| offset).collect(),
                shape: dims.iter().map(|&(len, ..)| len).collect(),
            };
            let shape: Vec<u64> = dims.iter().map(|&(len, offset, after)| len + offset + after).collect();
            let dense = row_major(&shape);
            let elements = |part: &TensorBox| -> Vec<u64> {
                runs(&shape, &part.offsets, &part.shape, &row_major(&part.shape))
                    .flat_map(|run| run.from..run.from + run.elements)
                    .collect()
            };
            let parts = split(&shape, &whole, most);
            let all: Vec<u64> = parts.iter().flat_map(elements).collect();
            prop_assert_eq!(all, elements(&whole));
            for part in parts {
                let reach: u64 = part.shape.iter().zip(&dense).map(|(len, stride)| (len - 1) * stride).sum();
                prop_assert!(reach < most, "{:?}", part);
            }
        }
    }
}
