//! Pinned memory for tensors of any size: ranges of a few slabs, reused from step to step.
//!
//! A forward pass takes blocks and its backward pass returns them, so between steps every slab is one free range again,
//! for any sequence lengths. A block is taken from the first range that is large enough, lowest slab first: small
//! tensors fill the ends that large ones leave. A new slab is pinned only if no range is large enough, and never beyond
//! the budget. Slabs that were not needed for many passes in a row are unpinned.
//!
//! A block may be returned while a fetch still reads it: it is in flight, and so is the free range that it becomes. The
//! next store into the range waits for the fetch on the device. Fetches end in the order in which their lane ran them,
//! so if two ranges are joined, the later fetch ends the use of both.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_device::{Error as DeviceError, HostMemory, Region, Slab, SlabLayout};

use crate::error::{Error, Result};
use crate::flow::{InFlight, Mark};
use crate::memory::{Allocator, Lease};
use crate::totals::Use;

/// Blocks start and end at multiples of this, so that copies are aligned.
const GRAIN_BYTES: u64 = 512;
/// A slab is at least this many times as large as the block that needs it, up to [`SMALL_SLAB_BYTES`].
const SMALL_SLAB_BLOCKS: u64 = 16;
const SMALL_SLAB_BYTES: u64 = 64 << 20;
/// And a quarter of what is pinned already, up to this.
const LARGE_SLAB_BYTES: u64 = 4 << 30;

/// Without a budget, one part in this many of the host's memory is left to others.
const HOST_MEMORY_PARTS: u64 = 16;
/// Passes that are looked at together before a slab is given back.
const PASSES_TO_LOOK: u32 = 8;

/// The later of the fetches that read two ranges.
fn later(a: Option<Arc<Mark>>, b: Option<Arc<Mark>>) -> Option<Arc<Mark>> {
    match (a, b) {
        (Some(a), Some(b)) => Some(if a.order() >= b.order() { a } else { b }),
        (a, b) => a.or(b),
    }
}

/// A free range: its length, and the fetch that may still read it.
#[derive(Debug)]
struct Gap {
    bytes: u64,
    end: Option<Arc<Mark>>,
}

#[derive(Debug)]
struct Space {
    slab: Lease<Slab>,
    /// Free ranges by offset; no two touch.
    gaps: BTreeMap<u64, Gap>,
}

impl Space {
    /// Whether no block of it is out.
    fn is_whole(&self) -> bool {
        let whole = self.slab.layout().part(0).map_or(0, |(_, bytes)| bytes / GRAIN_BYTES * GRAIN_BYTES);
        self.gaps.get(&0).is_some_and(|gap| gap.bytes == whole)
    }
}

/// A range of pinned memory, taken until it is given back.
#[derive(Debug)]
pub(crate) struct Block {
    slab: usize,
    offset: u64,
    bytes: u64,
    /// The requested bytes.
    pub(crate) region: Region,
}

/// Why there is no block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exhausted {
    /// The requested bytes.
    pub requested_bytes: u64,
    /// Bytes that are pinned.
    pub pinned_bytes: u64,
    /// What stood in the way: the budget, or the host's memory.
    pub reason: String,
}

/// The pool of blocks.
#[derive(Debug)]
pub(crate) struct Blocks {
    allocator: Arc<Allocator>,
    /// A place stays empty when its slab is given back: blocks know their slab by its place.
    spaces: Vec<Option<Space>>,
    pinned_bytes: u64,
    taken_bytes: u64,
    /// The most that was taken at once.
    pub(crate) peak_bytes: u64,
    /// The same in the passes that are looked at now, and their number.
    recent_bytes: u64,
    passes: u32,
}

impl Blocks {
    pub(crate) fn new(allocator: Arc<Allocator>) -> Self {
        Self {
            allocator,
            spaces: Vec::new(),
            pinned_bytes: 0,
            taken_bytes: 0,
            peak_bytes: 0,
            recent_bytes: 0,
            passes: 0,
        }
    }

    /// Bytes pinned, taken or not.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    /// Bytes of blocks that are out.
    #[cfg(all(test, not(loom)))]
    fn taken_bytes(&self) -> u64 {
        self.taken_bytes
    }

    /// Takes a block, pinning another slab if need be; or says why there is none. A fetch may still read it.
    pub(crate) fn take(&mut self, bytes: u64) -> Result<std::result::Result<InFlight<Block>, Exhausted>> {
        let wanted = bytes.max(1).next_multiple_of(GRAIN_BYTES);
        if let Some(block) = self.take_from_gap(bytes, wanted)? {
            return Ok(Ok(block));
        }
        if let Err(exhausted) = self.grow(wanted)? {
            return Ok(Err(Exhausted { requested_bytes: bytes, ..exhausted }));
        }
        match self.take_from_gap(bytes, wanted)? {
            Some(block) => Ok(Ok(block)),
            None => Err(DeviceError::OutOfRange {
                what: "new slab",
                offset_bytes: 0,
                len_bytes: wanted,
                size_bytes: self.pinned_bytes,
            }
            .into()),
        }
    }

    /// Gives a block back; a fetch may still read it.
    pub(crate) fn give(&mut self, block: InFlight<Block>) {
        let (block, mut end) = block.into_parts();
        self.taken_bytes -= block.bytes;
        let Some(Some(space)) = self.spaces.get_mut(block.slab) else { return };
        let gaps = &mut space.gaps;
        let (mut offset, mut bytes) = (block.offset, block.bytes);
        if let Some((&before, gap)) = gaps.range(..offset).next_back()
            && before + gap.bytes == offset
        {
            (offset, bytes) = (before, bytes + gap.bytes);
            end = later(end, gaps.remove(&before).and_then(|gap| gap.end));
        }
        if let Some(gap) = gaps.remove(&(block.offset + block.bytes)) {
            bytes += gap.bytes;
            end = later(end, gap.end);
        }
        gaps.insert(offset, Gap { bytes, end });
    }

    /// Pins slabs ahead of use, until this many bytes are pinned in all.
    pub(crate) fn reserve(&mut self, bytes: u64) -> Result<()> {
        self.allocator.budget().check(bytes.saturating_sub(self.pinned_bytes))?;
        while self.pinned_bytes < bytes {
            self.pin((bytes - self.pinned_bytes).min(LARGE_SLAB_BYTES))?;
        }
        Ok(())
    }

    fn take_from_gap(&mut self, bytes: u64, wanted: u64) -> Result<Option<InFlight<Block>>> {
        for (index, space) in self.spaces.iter_mut().enumerate() {
            let Some(space) = space else { continue };
            let found = space.gaps.iter().find(|(_, gap)| gap.bytes >= wanted).map(|(&offset, _)| offset);
            let Some(offset) = found else { continue };
            let region = space.slab.part(0)?.slice(offset, bytes)?;
            let Some(gap) = space.gaps.remove(&offset) else { continue };
            if gap.bytes > wanted {
                let rest = Gap { bytes: gap.bytes - wanted, end: gap.end.clone() };
                space.gaps.insert(offset + wanted, rest);
            }
            self.taken_bytes += wanted;
            self.peak_bytes = self.peak_bytes.max(self.taken_bytes);
            self.recent_bytes = self.recent_bytes.max(self.taken_bytes);
            return Ok(Some(InFlight::new(Block { slab: index, offset, bytes: wanted, region }, gap.end)));
        }
        Ok(None)
    }

    /// Pins a slab that has room for `wanted` bytes: somewhat more if there is memory for that, else just that.
    fn grow(&mut self, wanted: u64) -> Result<std::result::Result<(), Exhausted>> {
        let limit_bytes = self.allocator.budget().limit_bytes();
        let generous =
            (wanted * SMALL_SLAB_BLOCKS).min(SMALL_SLAB_BYTES).max((self.pinned_bytes / 4).min(LARGE_SLAB_BYTES));
        let exhausted = |reason| Exhausted { requested_bytes: wanted, pinned_bytes: self.pinned_bytes, reason };
        // A slab is whole pages, and so is what a budget allows.
        let page = SlabLayout::new(&[1])?.bytes();
        let left = self.allocator.budget().available_bytes() / page * page;
        if wanted > left {
            return Ok(Err(exhausted(format!("the budget is {} bytes", limit_bytes.unwrap_or_default()))));
        }
        let memory = HostMemory::now();
        let spared = if limit_bytes.is_some() { 0 } else { memory.total_bytes / HOST_MEMORY_PARTS };
        let sizes = [generous.max(wanted).min(left), wanted];
        let mut refusal = String::new();
        for bytes in sizes {
            if bytes > memory.available_bytes.saturating_sub(spared) {
                refusal = format!(
                    "the host has {} bytes left of {}, of which {spared} are left to others",
                    memory.available_bytes, memory.total_bytes
                );
                continue;
            }
            match self.pin(bytes) {
                Ok(()) => return Ok(Ok(())),
                // Lack of memory is an answer; anything else is a failure.
                Err(Error::Device(
                    error @ (DeviceError::OutOfPinnedBudget { .. }
                    | DeviceError::SlabLargerThanMemory { .. }
                    | DeviceError::Os { .. }),
                )) => refusal = error.to_string(),
                Err(error) => return Err(error),
            }
        }
        Ok(Err(Exhausted { requested_bytes: wanted, pinned_bytes: self.pinned_bytes, reason: refusal }))
    }

    fn pin(&mut self, bytes: u64) -> Result<()> {
        let slab = self.allocator.pin_for(Use::Activations, &[bytes])?;
        // A slab ends with its page; the part asked for is what the gaps cover.
        self.pinned_bytes += slab.bytes();
        let gaps = BTreeMap::from([(0, Gap { bytes: bytes / GRAIN_BYTES * GRAIN_BYTES, end: None })]);
        let space = Some(Space { slab, gaps });
        match self.spaces.iter_mut().find(|space| space.is_none()) {
            Some(place) => *place = space,
            None => self.spaces.push(space),
        }
        Ok(())
    }

    /// A pass begins. Returns slabs that were not needed for a while, for the caller to drop where waiting for the
    /// device does no harm: half as much again as was taken at most stays.
    pub(crate) fn begin_pass(&mut self) -> Vec<Lease<Slab>> {
        self.passes += 1;
        if self.passes < PASSES_TO_LOOK {
            return Vec::new();
        }
        let enough = self.recent_bytes + self.recent_bytes / 2;
        (self.passes, self.recent_bytes) = (0, self.taken_bytes);
        let mut spare = Vec::new();
        // From the top: blocks are taken from the lowest slabs first.
        for place in self.spaces.iter_mut().rev() {
            let Some(space) = place else { continue };
            if space.is_whole() && self.pinned_bytes - space.slab.bytes() >= enough {
                self.pinned_bytes -= space.slab.bytes();
                spare.extend(place.take().map(|space| space.slab));
            }
        }
        spare
    }

    /// Whether every slab is one free range again.
    #[cfg(all(test, not(loom)))]
    fn is_whole(&self) -> bool {
        self.spaces.iter().flatten().all(Space::is_whole)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::memory::PinnedBudget;
    use forebay_device::open;
    use proptest::prelude::*;

    fn blocks(budget_bytes: Option<u64>) -> Blocks {
        Blocks::new(Allocator::within(open("cpu").unwrap(), PinnedBudget::new(budget_bytes)))
    }

    /// A block, without a wait for its last use.
    fn taken(blocks: &mut Blocks, bytes: u64) -> Block {
        blocks.take(bytes).unwrap().unwrap().into_parts().0
    }

    fn disjoint(held: &[Block]) -> bool {
        held.iter().enumerate().all(|(i, a)| held[i + 1..].iter().all(|b| !a.region.overlaps(&b.region)))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(forebay_device::testing::kinds::cases(64)))]

        /// Blocks never overlap, all comes back, and what is pinned stays near the largest step, whatever the sizes.
        #[test]
        fn growth_is_bounded_under_varying_sizes(
            steps in prop::collection::vec(prop::collection::vec(1u64..200_000, 1..40), 1..12),
            shuffle in any::<u64>(),
        ) {
            let mut blocks = blocks(None);
            let mut after_largest = None;
            let largest = steps.iter().map(|s| s.iter().sum::<u64>()).max().unwrap_or(0);
            for sizes in &steps {
                let mut held: Vec<Block> = sizes.iter().map(|&b| taken(&mut blocks, b)).collect();
                prop_assert!(disjoint(&held));
                prop_assert_eq!(held.iter().map(|b| b.bytes).sum::<u64>(), blocks.taken_bytes());
                // Given back in any order.
                let mut seed = shuffle | 1;
                while !held.is_empty() {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let block = held.swap_remove((seed >> 33) as usize % held.len());
                    blocks.give(InFlight::new(block, None));
                }
                prop_assert!(blocks.is_whole(), "free ranges grow together again");
                if sizes.iter().sum::<u64>() == largest {
                    after_largest = Some(blocks.pinned_bytes());
                }
            }
            // Half as much again for the ends of slabs, and one small slab.
            prop_assert!(blocks.pinned_bytes() <= largest * 3 / 2 + SMALL_SLAB_BLOCKS * 200_000 + (1 << 20));
            prop_assert!(after_largest.is_some());
            // The same sizes once more take no more memory.
            let before = blocks.pinned_bytes();
            for sizes in &steps {
                let held: Vec<Block> = sizes.iter().map(|&b| taken(&mut blocks, b)).collect();
                held.into_iter().for_each(|block| blocks.give(InFlight::new(block, None)));
            }
            prop_assert_eq!(blocks.pinned_bytes(), before);
        }
    }

    #[test]
    fn the_budget_is_exact_and_running_out_is_an_answer() {
        let mut blocks = blocks(Some(1 << 20));
        let first = blocks.take(600 << 10).unwrap().unwrap();
        assert!(blocks.pinned_bytes() <= 1 << 20);
        let refusal = blocks.take(600 << 10).unwrap().unwrap_err();
        assert_eq!((refusal.requested_bytes, refusal.pinned_bytes), (600 << 10, blocks.pinned_bytes()));
        assert!(refusal.reason.contains("1048576"), "{refusal:?}");
        blocks.give(first);
        assert!(blocks.take(600 << 10).unwrap().is_ok(), "what came back is used again");
    }

    #[test]
    fn a_range_is_in_flight_until_the_last_fetch_that_reads_it() {
        let mut blocks = blocks(None);
        let marks = crate::flow::Marks::new(open("cpu").unwrap());
        let read_until = |block, order| {
            let mark = marks.take().unwrap();
            mark.set_order(order);
            InFlight::until(block, mark)
        };
        let order = |block: InFlight<Block>| block.into_parts().1.map(|end| end.order());
        let (a, b) = (taken(&mut blocks, 1000), taken(&mut blocks, 1000));
        blocks.give(read_until(a, 7));
        blocks.give(read_until(b, 3));
        assert_eq!(order(blocks.take(2048).unwrap().unwrap()), Some(7));
        assert!(matches!(order(blocks.take(1000).unwrap().unwrap()), None | Some(7)));
    }

    #[test]
    fn slabs_that_passes_have_no_use_for_are_given_back() {
        let mut blocks = blocks(None);
        let mut pass = |sizes: &[u64]| {
            let spare = blocks.begin_pass();
            let held: Vec<Block> = sizes.iter().map(|&b| taken(&mut blocks, b)).collect();
            held.into_iter().for_each(|block| blocks.give(InFlight::new(block, None)));
            (blocks.pinned_bytes(), spare.len())
        };
        let (long, _) = pass(&[40 << 20; 8]);
        // Long and short in turn: the long ones are wanted again.
        for _ in 0..3 * PASSES_TO_LOOK {
            pass(&[40 << 20; 8]);
            assert_eq!(pass(&[1 << 20]).0, long);
        }
        let given: usize = (0..2 * PASSES_TO_LOOK).map(|_| pass(&[1 << 20; 8]).1).sum();
        let (short, _) = pass(&[1 << 20; 8]);
        assert!(given > 0 && short < long, "{given} slabs, {long} bytes before and {short} after");
        assert!(short >= 8 << 20);
        assert!(pass(&[40 << 20; 8]).0 >= 8 * (40 << 20), "and pinned again when they are wanted");
    }

    #[test]
    fn without_a_budget_some_of_the_host_memory_is_left_to_others() {
        let memory = HostMemory::now();
        let nearly_all = memory.available_bytes.saturating_sub(memory.total_bytes / HOST_MEMORY_PARTS / 2).max(1 << 30);
        let refusal = blocks(None).take(nearly_all).unwrap().unwrap_err();
        assert!(refusal.reason.contains("left to others"), "{refusal:?}");
    }

    #[test]
    fn reserving_pins_ahead_and_respects_the_budget() {
        let mut blocks = blocks(Some(3 << 20));
        blocks.reserve(2 << 20).unwrap();
        assert_eq!(blocks.pinned_bytes(), 2 << 20);
        assert!(blocks.take(2 << 20).unwrap().is_ok());
        assert_eq!(blocks.pinned_bytes(), 2 << 20, "what was reserved is used");
        assert!(matches!(blocks.reserve(4 << 20), Err(Error::Device(DeviceError::OutOfPinnedBudget { .. }))));
    }
}
