//! Boxes: which part of a tensor a chunk is, and where its elements are in memory.

use serde::{Deserialize, Serialize};

use super::element_bytes;

/// A box in a tensor: where it starts in each dimension and how long it is there.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorBox {
    /// Where it starts.
    pub offsets: Vec<u64>,
    /// How long it is.
    pub shape: Vec<u64>,
}

/// The number of elements of a shape; `None` if the number does not fit into 64 bits.
pub(super) fn volume(shape: &[u64]) -> Option<u64> {
    // A tensor with an empty dimension is empty, however large the others are.
    if shape.contains(&0) { Some(0) } else { shape.iter().try_fold(1u64, |product, &side| product.checked_mul(side)) }
}

/// The bytes of a contiguous tensor; `None` if its type is unknown or the number does not fit into 64 bits.
pub fn dense_bytes(dtype: &str, shape: &[u64]) -> Option<u64> {
    volume(shape)?.checked_mul(element_bytes(dtype)?)
}

/// The bytes from a tensor's first element to the end of its last, with strides in elements; `None` if its type is
/// unknown, it has another number of strides than of dimensions, or the number does not fit into 64 bits.
pub fn span_bytes(dtype: &str, shape: &[u64], strides: &[u64]) -> Option<u64> {
    let width = element_bytes(dtype)?;
    if strides.len() != shape.len() {
        return None;
    }
    if shape.contains(&0) {
        return Some(0);
    }
    let mut sides = shape.iter().zip(strides);
    let elements = sides.try_fold(1u64, |last, (&side, &stride)| last.checked_add((side - 1).checked_mul(stride)?))?;
    elements.checked_mul(width)
}

/// The strides of a contiguous tensor of a shape, in elements.
pub(super) fn row_major(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    strides
}

impl TensorBox {
    /// All of a tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Self { offsets: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// Whether it lies inside a tensor of this shape.
    pub(super) fn is_inside(&self, shape: &[u64]) -> bool {
        self.offsets.len() == shape.len()
            && self.shape.len() == shape.len()
            && self
                .offsets
                .iter()
                .zip(&self.shape)
                .zip(shape)
                .all(|((offset, len), side)| offset.checked_add(*len).is_some_and(|end| end <= *side))
    }

    /// Whether two boxes inside the same tensor share an element.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        // Sums cannot overflow: both are inside a tensor.
        let apart = |i: usize| {
            self.offsets[i] + self.shape[i] <= other.offsets[i] || other.offsets[i] + other.shape[i] <= self.offsets[i]
        };
        let empty = |extent: &Self| extent.shape.contains(&0);
        !empty(self) && !empty(other) && (0..self.shape.len()).all(|i| !apart(i))
    }
}

/// Whether boxes cover a tensor exactly once; if not, why. All of them are inside it.
pub(super) fn check_cover(boxes: &[&TensorBox], shape: &[u64]) -> Result<(), String> {
    let total = volume(shape).ok_or("its shape is too large")?;
    let mut covered = 0u64;
    for extent in boxes {
        let elements = volume(&extent.shape).ok_or("a chunk is too large")?;
        covered = covered.checked_add(elements).ok_or("its chunks add up to too much")?;
    }
    // Sorted by the first dimension, a box can only overlap those that follow before its own end.
    let mut order: Vec<&TensorBox> = boxes.iter().copied().filter(|extent| !extent.shape.contains(&0)).collect();
    order.sort_by_key(|extent| extent.offsets.first().copied().unwrap_or(0));
    for (i, a) in order.iter().enumerate() {
        let end = a.offsets.first().map_or(1, |&offset| offset + a.shape[0]);
        let near = order[i + 1..].iter().take_while(|b| b.offsets.first().copied().unwrap_or(0) < end);
        if let Some(b) = near.into_iter().find(|b| a.overlaps(b)) {
            return Err(format!("chunks at {:?} and {:?} overlap", a.offsets, b.offsets));
        }
    }
    if covered != total {
        return Err(format!("its chunks cover {covered} of {total} elements"));
    }
    Ok(())
}

/// Elements that are contiguous on both sides of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRun {
    /// Where they start in the chunk, which is contiguous.
    pub from: u64,
    /// Where they start in the target, counted in elements from the box's first.
    pub to: u64,
    /// How many they are.
    pub elements: u64,
}

/// The runs of a box inside a contiguous chunk, copied to a target with these strides (in elements).
///
/// `offsets` is where the box starts in the chunk and `lengths` how long it is; the target's first element is the box's.
pub fn runs(chunk_shape: &[u64], offsets: &[u64], lengths: &[u64], strides: &[u64]) -> impl Iterator<Item = CopyRun> {
    let dims = chunk_shape.len();
    let chunk_strides = row_major(chunk_shape);
    // Trailing dimensions that are contiguous on both sides are one run; a dimension of one element never matters.
    let (mut inner, mut elements) = (dims, 1u64);
    while inner > 0 {
        let i = inner - 1;
        let together = lengths[i] <= 1 || (chunk_strides[i] == elements && strides[i] == elements);
        if !together {
            break;
        }
        elements *= lengths[i];
        inner = i;
        // The next dimension out continues the run only if this one is whole in the chunk, which its stride says.
    }
    let outer: u64 = lengths[..inner].iter().product();
    let base: u64 = offsets.iter().zip(&chunk_strides).map(|(offset, stride)| offset * stride).sum();
    let (lengths, strides) = (lengths[..inner].to_vec(), strides[..inner].to_vec());
    let count = if elements == 0 { 0 } else { outer };
    (0..count).map(move |index| {
        let (mut rest, mut from, mut to) = (index, base, 0);
        for i in (0..inner).rev() {
            let at = rest % lengths[i];
            rest /= lengths[i];
            from += at * chunk_strides[i];
            to += at * strides[i];
        }
        CopyRun { from, to, elements }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extent(offsets: &[u64], shape: &[u64]) -> TensorBox {
        TensorBox { offsets: offsets.to_vec(), shape: shape.to_vec() }
    }

    #[test]
    fn cover_is_exact_or_says_why() {
        let cover = |boxes: &[TensorBox], shape: &[u64]| check_cover(&boxes.iter().collect::<Vec<_>>(), shape);
        assert_eq!(cover(&[extent(&[0, 0], &[2, 4]), extent(&[2, 0], &[1, 4])], &[3, 4]), Ok(()));
        assert_eq!(cover(&[extent(&[0, 0], &[3, 2]), extent(&[0, 2], &[3, 2])], &[3, 4]), Ok(()));
        assert_eq!(cover(&[extent(&[], &[])], &[]), Ok(()));
        assert_eq!(cover(&[extent(&[5], &[0]), extent(&[0], &[5])], &[5]), Ok(()), "an empty chunk covers nothing");
        assert!(cover(&[], &[5]).unwrap_err().contains("0 of 5"));
        assert!(cover(&[extent(&[0], &[3]), extent(&[2], &[2])], &[5]).unwrap_err().contains("overlap"));
        assert!(cover(&[extent(&[], &[]), extent(&[], &[])], &[]).unwrap_err().contains("overlap"));
        assert!(cover(&[extent(&[0], &[2]), extent(&[3], &[2])], &[5]).unwrap_err().contains("4 of 5"));
    }

    #[test]
    fn contiguous_boxes_are_one_run() {
        let all = |chunk: &[u64], offsets: &[u64], lengths: &[u64], strides: &[u64]| {
            runs(chunk, offsets, lengths, strides).collect::<Vec<_>>()
        };
        assert_eq!(all(&[4, 8], &[1, 0], &[2, 8], &[8, 1]), [CopyRun { from: 8, to: 0, elements: 16 }]);
        assert_eq!(all(&[], &[], &[], &[]), [CopyRun { from: 0, to: 0, elements: 1 }]);
        assert_eq!(all(&[4, 8], &[1, 0], &[0, 8], &[8, 1]), []);
        assert_eq!(
            all(&[2, 4], &[0, 1], &[2, 2], &[2, 1]),
            [CopyRun { from: 1, to: 0, elements: 2 }, CopyRun { from: 5, to: 2, elements: 2 }]
        );
    }

    #[test]
    fn bytes_of_dense_and_strided_tensors() {
        assert_eq!(dense_bytes("BF16", &[3, 5]), Some(30));
        assert_eq!(dense_bytes("F32", &[]), Some(4));
        assert_eq!(dense_bytes("F32", &[u64::MAX, 0]), Some(0));
        assert_eq!(dense_bytes("F32", &[u64::MAX, 2]), None);
        assert_eq!(dense_bytes("F33", &[1]), None);
        assert_eq!(span_bytes("F32", &[3, 5], &[5, 1]), Some(60));
        assert_eq!(span_bytes("F32", &[3, 5], &[1, 10]), Some(4 * 43));
        assert_eq!(span_bytes("F32", &[], &[]), Some(4));
        assert_eq!(span_bytes("F32", &[3, 0], &[7, 1]), Some(0));
        assert_eq!(span_bytes("F32", &[3], &[u64::MAX]), None);
        assert_eq!(span_bytes("F32", &[3, 5], &[5]), None);
    }

    proptest! {
        /// Runs move every element of the box, each to its own place, whatever the strides.
        #[test]
        fn runs_equal_a_loop_over_elements(
            dims in prop::collection::vec((1u64..5, 0u64..3, 0u64..4), 0..4),
            order in any::<prop::sample::Index>(),
            gap in 0u64..3,
        ) {
            let lengths: Vec<u64> = dims.iter().map(|&(len, ..)| len).collect();
            let offsets: Vec<u64> = dims.iter().map(|&(_, offset, _)| offset).collect();
            let chunk: Vec<u64> = dims.iter().map(|&(len, offset, after)| offset + len + after).collect();
            // Strides of some permutation of the dimensions, with gaps.
            let mut sequence: Vec<usize> = (0..dims.len()).collect();
            if !sequence.is_empty() {
                let turn = order.index(sequence.len());
                sequence.rotate_left(turn);
            }
            let mut strides = vec![0; dims.len()];
            let mut next = 1;
            for &dim in sequence.iter().rev() {
                strides[dim] = next;
                next = next * lengths[dim] + gap;
            }
            let mut expected = std::collections::BTreeMap::new();
            let total: u64 = lengths.iter().product();
            for index in 0..total {
                let (mut rest, mut from, mut to, mut stride) = (index, 0, 0, 1);
                for i in (0..dims.len()).rev() {
                    let at = rest % lengths[i];
                    rest /= lengths[i];
                    from += (offsets[i] + at) * stride;
                    stride *= chunk[i];
                    to += at * strides[i];
                }
                expected.insert(to, from);
            }
            let mut found = std::collections::BTreeMap::new();
            for run in runs(&chunk, &offsets, &lengths, &strides) {
                for i in 0..run.elements {
                    prop_assert!(found.insert(run.to + i, run.from + i).is_none());
                }
            }
            prop_assert_eq!(found, expected);
        }
    }
}
