//! Sleep and wake: every byte comes back, what sleeps is never touched, and every wait that is needed is there.

use std::collections::{HashMap, HashSet};

use crate::common::{Subject, device_error};
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::{Buffer, Error as DeviceError, Kernel, Stream};
use forebay::memory::Allocator;
use forebay::sleep::layout::{EXTENT_ALIGN_BYTES, EXTENT_MAX_BYTES};
use forebay::sleep::{COPY_BYTES, Direction, Extent, Layout, Move, PACK_BELOW_BYTES, SLOTS, Sleeper, Want, moves};
use forebay::{Error, Result};
use forebay_device::testing::noise;
use proptest::prelude::*;

forebay_device::on_devices! {
    every:
        bytes_come_back_into_other_memory,
        delays_anywhere_change_nothing,
        the_callers_work_before_a_sleep_is_waited_for,
        the_callers_use_of_fresh_memory_is_waited_for,
        a_batch_that_has_arrived_is_whole,
        what_sleeps_is_never_stored_to,
        growth_moves_nothing_that_sleeps,
        room_found_during_a_sleep_is_not_that_of_its_own_batches,
        from_the_third_time_on_nothing_is_made,
        a_refused_call_ends_the_transfer_and_loses_nothing,
        a_budget_is_kept_with_the_numbers,
        release_waits_for_the_last_sleeper,
        sleeping_bytes_can_be_read;
}

const KIB: u64 = 1 << 10;

/// Small ones of odd sizes, one that is cut by a small slot, and large ones that travel alone, one of them in pieces.
const SIZES: [u64; 9] =
    [1, 63, 64, 65, 5000, 3 * KIB, PACK_BELOW_BYTES - 1, PACK_BELOW_BYTES + 1, COPY_BYTES + 4 * KIB + 3];

struct Rig<'a> {
    on: &'a Subject,
    sleeper: Sleeper,
    sizes: Vec<u64>,
    compute: Stream,
    staging: Option<Buffer>,
}

impl<'a> Rig<'a> {
    /// `slot_bytes` of staging for each slot; none where 0.
    fn new(on: &'a Subject, sizes: &[u64], slot_bytes: u64) -> Self {
        let sleeper = Sleeper::new(Allocator::new(on.device.clone()));
        let staging = (slot_bytes > 0).then(|| on.alloc(slot_bytes * SLOTS as u64).unwrap());
        Self { on, sleeper, sizes: sizes.to_vec(), compute: on.stream("compute").unwrap(), staging }
    }

    fn wants(&self, ids: &[u64]) -> Vec<Want> {
        ids.iter().map(|&id| (id, self.sizes[id as usize])).collect()
    }

    fn ids(&self) -> Vec<u64> {
        (0..self.sizes.len() as u64).collect()
    }

    fn contents(&self, id: u64, round: u64) -> Vec<u8> {
        noise(1000 * round + id, self.sizes[id as usize] as usize)
    }

    fn memory(&self, ids: &[u64], round: u64) -> Vec<(u64, Buffer)> {
        ids.iter().map(|&id| (id, self.on.upload(&self.contents(id, round)))).collect()
    }

    /// Moves storages in batches of a few, and waits for each.
    fn transfer(&self, direction: Direction, memory: &[(u64, Buffer)]) -> Result<()> {
        let transfer = self.sleeper.begin(direction, Some(&self.compute), self.staging.as_ref())?;
        let outcome = (|| {
            let mut numbers = Vec::new();
            for batch in memory.chunks(4) {
                let batch = batch.iter().map(|(id, buffer)| (*id, buffer.all())).collect();
                let after = (direction == Direction::Wake).then_some(&self.compute);
                numbers.push(self.sleeper.submit(&transfer, batch, after)?);
            }
            numbers.into_iter().try_for_each(|number| transfer.wait(number))
        })();
        transfer.finish().and(outcome)
    }

    fn sleep(&self, memory: Vec<(u64, Buffer)>) {
        let ids: Vec<u64> = memory.iter().map(|&(id, _)| id).collect();
        self.sleeper.place(&self.wants(&ids), None).unwrap();
        self.transfer(Direction::Sleep, &memory).unwrap();
        // What is given back is soon somebody else's.
        memory.iter().for_each(|(_, buffer)| self.on.fill(&buffer.all(), 0xdb));
    }

    fn fresh(&self, ids: &[u64]) -> Vec<(u64, Buffer)> {
        ids.iter().map(|&id| (id, self.on.upload(&vec![0xee; self.sizes[id as usize] as usize]))).collect()
    }

    fn wake(&self, ids: &[u64], round: u64) {
        let memory = self.fresh(ids);
        self.transfer(Direction::Wake, &memory).unwrap();
        self.sleeper.free(ids);
        self.assert_contents(&memory, round);
    }

    fn assert_contents(&self, memory: &[(u64, Buffer)], round: u64) {
        for (id, buffer) in memory {
            let found = self.on.download(&buffer.all());
            assert!(found == self.contents(*id, round), "storage {id} of {} bytes, round {round}", found.len());
        }
    }
}

fn bytes_come_back_into_other_memory(on: &Subject) {
    // Slots that cut most storages and go round many times, slots that hold several, and none at all.
    for (slot_bytes, sizes, rounds) in [(KIB, 6, 3), (128 * KIB, 9, 1), (0, 6, 3)] {
        let rig = Rig::new(on, &SIZES[..sizes], slot_bytes);
        let mut pinned_bytes = HashSet::new();
        for round in 0..rounds {
            rig.sleep(rig.memory(&rig.ids(), round));
            pinned_bytes.insert(rig.sleeper.pinned_bytes());
            // In another order than they went.
            let order: Vec<u64> = if round == 1 { rig.ids().into_iter().rev().collect() } else { rig.ids() };
            rig.wake(&order, round);
        }
        assert_eq!(pinned_bytes.len(), 1, "laid out once");
    }
}

fn delays_anywhere_change_nothing(on: &Subject) {
    for call in [Call::Copy, Call::Launch, Call::Record, Call::Wait] {
        for nth in 0..4 {
            let on = on.another();
            let rig = Rig::new(&on, &[3000, 70, 900, 64, 1, 2000], KIB);
            on.fault.on(call, nth, Misbehaviour::Late { ns: 3_000_000 });
            rig.sleep(rig.memory(&rig.ids(), 0));
            on.fault.on(call, nth, Misbehaviour::Late { ns: 3_000_000 });
            rig.wake(&rig.ids(), 0);
        }
    }
}

fn the_callers_work_before_a_sleep_is_waited_for(on: &Subject) {
    for slot_bytes in [KIB, 0] {
        let rig = Rig::new(on, &[5000], slot_bytes);
        let memory = rig.memory(&[0], 0);
        rig.sleeper.place(&rig.wants(&[0]), None).unwrap();
        on.launch(&rig.compute, &Kernel::Spin { ns: 20_000_000 }).unwrap();
        on.launch(&rig.compute, &Kernel::Fill { dst: memory[0].1.all(), byte: 0x17 }).unwrap();
        rig.transfer(Direction::Sleep, &memory).unwrap();
        let back = rig.fresh(&[0]);
        rig.transfer(Direction::Wake, &back).unwrap();
        assert!(on.download(&back[0].1.all()) == vec![0x17; 5000], "the slab has what the caller wrote last");
    }
}

fn the_callers_use_of_fresh_memory_is_waited_for(on: &Subject) {
    for slot_bytes in [KIB, 0] {
        let rig = Rig::new(on, &[5000], slot_bytes);
        rig.sleep(rig.memory(&[0], 0));
        let fresh = rig.fresh(&[0]);
        let transfer = rig.sleeper.begin(Direction::Wake, Some(&rig.compute), rig.staging.as_ref()).unwrap();
        // After the transfer began and before the memory was handed over, as an allocator's reuse would have it.
        on.launch(&rig.compute, &Kernel::Spin { ns: 20_000_000 }).unwrap();
        on.launch(&rig.compute, &Kernel::Fill { dst: fresh[0].1.all(), byte: 0x17 }).unwrap();
        rig.sleeper.submit(&transfer, vec![(0, fresh[0].1.all())], Some(&rig.compute)).unwrap();
        transfer.finish().unwrap();
        rig.assert_contents(&fresh, 0);
    }
}

/// Whoever waits for a batch may use it, and what comes behind it goes on.
fn a_batch_that_has_arrived_is_whole(on: &Subject) {
    for slot_bytes in [KIB, 0] {
        let on = on.another();
        let rig = Rig::new(&on, &[5000, 300, 70, 900], slot_bytes);
        rig.sleep(rig.memory(&rig.ids(), 0));
        let fresh = rig.fresh(&rig.ids());
        on.fault.on(if slot_bytes > 0 { Call::Launch } else { Call::Copy }, 0, Misbehaviour::Late { ns: 20_000_000 });
        let transfer = rig.sleeper.begin(Direction::Wake, Some(&rig.compute), rig.staging.as_ref()).unwrap();
        for (id, buffer) in &fresh {
            rig.sleeper.submit(&transfer, vec![(*id, buffer.all())], Some(&rig.compute)).unwrap();
        }
        assert!(!transfer.has_arrived(3).unwrap());
        transfer.wait(1).unwrap();
        // Not asked before: a question is a wait too, where the answer is yes.
        rig.assert_contents(&fresh[..2], 0);
        assert!(transfer.has_arrived(0).unwrap() && transfer.has_arrived(1).unwrap());
        transfer.finish().unwrap();
        assert!(transfer.has_arrived(3).unwrap());
        transfer.wait(3).unwrap();
        rig.assert_contents(&fresh, 0);
    }
}

fn what_sleeps_is_never_stored_to(on: &Subject) {
    let rig = Rig::new(on, &SIZES[..6], KIB);
    rig.sleep(rig.memory(&[0, 1, 2, 3], 0));
    let again = rig.memory(&[2], 1);
    assert!(matches!(rig.sleeper.place(&rig.wants(&[2]), None), Err(Error::PlanMismatch { .. })));
    assert!(matches!(rig.transfer(Direction::Sleep, &again), Err(Error::PlanMismatch { .. })));
    // Nor is anything fetched that does not sleep, or to memory of another size.
    rig.sleeper.place(&rig.wants(&[4]), None).unwrap();
    assert!(matches!(rig.transfer(Direction::Wake, &rig.fresh(&[4])), Err(Error::PlanMismatch { .. })));
    let short = vec![(1, on.alloc(8).unwrap())];
    assert!(matches!(rig.transfer(Direction::Wake, &short), Err(Error::PlanMismatch { .. })));
    rig.wake(&[3, 2, 1, 0], 0);
}

fn growth_moves_nothing_that_sleeps(on: &Subject) {
    let rig = Rig::new(on, &SIZES[..6], KIB);
    rig.sleep(rig.memory(&[4, 0], 0));
    let before = rig.sleeper.pinned_bytes();
    rig.sleep(rig.memory(&[1, 5, 2], 1));
    assert!(rig.sleeper.pinned_bytes() > before);
    rig.wake(&[4], 0);
    // What woke makes room; nothing grows for that.
    let before = rig.sleeper.pinned_bytes();
    rig.sleep(rig.memory(&[3], 2));
    assert_eq!(rig.sleeper.pinned_bytes(), before);
    rig.wake(&[2, 1, 5], 1);
    rig.wake(&[3], 2);
    rig.wake(&[0], 0);
}

fn room_found_during_a_sleep_is_not_that_of_its_own_batches(on: &Subject) {
    let rig = Rig::new(on, &SIZES[..6], KIB);
    rig.sleep(rig.memory(&[0, 1, 2, 3], 0));
    rig.wake(&[0, 1, 2, 3], 0);
    // Two are on their way to their old places when another storage, that needs room, turns up.
    let memory = rig.memory(&[2, 3, 4, 5], 1);
    let transfer = rig.sleeper.begin(Direction::Sleep, Some(&rig.compute), rig.staging.as_ref()).unwrap();
    let regions = |part: &[(u64, Buffer)]| part.iter().map(|(id, buffer)| (*id, buffer.all())).collect();
    rig.sleeper.submit(&transfer, regions(&memory[..2]), None).unwrap();
    rig.sleeper.place(&rig.wants(&[4, 5]), None).unwrap();
    rig.sleeper.submit(&transfer, regions(&memory[2..]), None).unwrap();
    transfer.finish().unwrap();
    drop(transfer);
    rig.wake(&[2, 3, 4, 5], 1);
}

fn from_the_third_time_on_nothing_is_made(on: &Subject) {
    let rig = Rig::new(on, &SIZES[..6], KIB);
    // What the test itself makes is not counted.
    let (memory, back) = (rig.memory(&rig.ids(), 0), rig.fresh(&rig.ids()));
    let mut made = Vec::new();
    for _ in 0..4 {
        let before = on.counters();
        rig.sleeper.place(&rig.wants(&rig.ids()), None).unwrap();
        rig.transfer(Direction::Sleep, &memory).unwrap();
        rig.transfer(Direction::Wake, &back).unwrap();
        rig.sleeper.free(&rig.ids());
        let now = on.counters();
        made.push([
            now.allocations - before.allocations,
            now.pins - before.pins,
            now.streams - before.streams,
            now.events - before.events,
        ]);
    }
    assert_eq!((made[0][1], made[0][2]), (1, 3), "one slab and three streams");
    assert_eq!(made[2..], [[0; 4]; 2]);
}

/// Refuses the n-th call of a kind in a sleep, and in a wake, for every n there is.
fn a_refused_call_ends_the_transfer_and_loses_nothing(on: &Subject) {
    let once =
        [Call::Copy, Call::Launch, Call::Record, Call::Wait, Call::Synchronize, Call::Event].map(|call| (call, 1));
    // A recording that is refused is tried again: both attempts, and the attempt of whoever waits for it.
    for (call, times) in once.into_iter().chain([(Call::Record, 2), (Call::Record, 3)]) {
        for direction in [Direction::Sleep, Direction::Wake] {
            let refused = (0..).take_while(|&nth| refuse(&on.another(), call, times, direction, nth)).count();
            // Events of the sleep before serve the wake.
            let least = if call == Call::Event && direction == Direction::Wake { 0 } else { 1 };
            assert!(refused >= least, "{call:?} was never refused in a {direction:?}");
        }
    }
}

/// Whether there was such a call; whatever it was, nothing is lost and the next transfer works.
fn refuse(on: &Subject, call: Call, times: u64, direction: Direction, nth: u64) -> bool {
    let refuse = || (nth..nth + times).for_each(|nth| on.fault.on(call, nth, Misbehaviour::Fail));
    let rig = Rig::new(on, &[3000, 70, 900, 64, 1], KIB);
    let (ids, memory) = (rig.ids(), rig.memory(&rig.ids(), 0));
    if direction == Direction::Wake {
        rig.sleep(memory);
        refuse();
        let outcome = rig.transfer(direction, &rig.fresh(&ids));
        on.fault.clear();
        if outcome.is_ok() {
            return false;
        }
        device_error(outcome);
    } else {
        rig.sleeper.place(&rig.wants(&ids), None).unwrap();
        refuse();
        let outcome = rig.transfer(direction, &memory);
        on.fault.clear();
        rig.assert_contents(&memory, 0);
        if outcome.is_ok() {
            return false;
        }
        device_error(outcome);
        rig.sleeper.free(&ids);
        rig.sleep(memory);
    }
    rig.wake(&ids, 0);
    true
}

fn a_budget_is_kept_with_the_numbers(on: &Subject) {
    let rig = Rig::new(on, &[100_000, 50_000, 90_000], KIB);
    let Err(Error::Device(DeviceError::OutOfPinnedBudget { requested_bytes, available_bytes, budget_bytes })) =
        rig.sleeper.place(&rig.wants(&[0, 1]), Some(120_000))
    else {
        panic!("150,000 bytes in a budget of 120,000")
    };
    assert_eq!((available_bytes, budget_bytes), (120_000, 120_000));
    assert!((150_000..160_000).contains(&requested_bytes), "{requested_bytes}");
    assert_eq!(rig.sleeper.pinned_bytes(), 0);
    // Room that is free but cut up gives way to a new slab within the budget.
    rig.sleeper.place(&rig.wants(&[1]), Some(120_000)).unwrap();
    rig.sleeper.place(&rig.wants(&[0]), Some(120_000)).unwrap();
    assert!(rig.sleeper.pinned_bytes() <= 120_000);
    // But never what sleeps.
    rig.sleep(rig.memory(&[0], 0));
    assert!(rig.sleeper.place(&rig.wants(&[1]), Some(120_000)).is_err());
    rig.wake(&[0], 0);
}

fn release_waits_for_the_last_sleeper(on: &Subject) {
    let on = on.another();
    let rig = Rig::new(&on, &[100_000], KIB);
    rig.sleep(rig.memory(&[0], 0));
    assert!(matches!(rig.sleeper.release(), Err(Error::InvalidOption { option: "release", .. })));
    let transfer = rig.sleeper.begin(Direction::Wake, None, None).unwrap();
    assert!(rig.sleeper.begin(Direction::Wake, None, None).is_err(), "one transfer at a time");
    assert!(transfer.wait(0).is_err(), "no batch yet");
    drop(transfer);
    rig.wake(&[0], 0);
    rig.sleeper.release().unwrap();
    assert_eq!(rig.sleeper.pinned_bytes(), 0);
    drop(rig);
    on.assert_empty();
}

// The layout and the moves, which know no device.

fn sleeping_bytes_can_be_read(on: &Subject) {
    let sleeper = Sleeper::readable(Allocator::new(on.device.clone()));
    let rig = Rig { sleeper, ..Rig::new(on, &SIZES, 4 * KIB) };
    let mut addresses = Vec::new();
    for round in 0..3 {
        rig.sleep(rig.memory(&rig.ids(), round));
        let regions: Vec<_> = rig.ids().iter().map(|&id| rig.sleeper.region(id).unwrap()).collect();
        for (id, region) in regions.iter().enumerate() {
            assert!(on.host_bytes(region).unwrap() == rig.contents(id as u64, round), "storage {id}, round {round}");
        }
        addresses.push(regions.iter().map(|region| region.addr()).collect::<Vec<_>>());
        rig.wake(&rig.ids(), round);
    }
    assert!(addresses.iter().all(|found| *found == addresses[0]), "a storage keeps its place");
    assert!(rig.sleeper.region(99).unwrap_err().to_string().contains("no place in the slab"));
    rig.sleeper.release().unwrap();
    assert!(rig.sleeper.region(0).is_err());
    rig.sleep(rig.memory(&rig.ids(), 7));
    assert!(
        on.host_bytes(&rig.sleeper.region(8).unwrap()).unwrap() == rig.contents(8, 7),
        "readable after a release too"
    );
    rig.wake(&rig.ids(), 7);
}

fn room(bytes: u64) -> u64 {
    bytes.next_multiple_of(EXTENT_ALIGN_BYTES)
}

fn extents_of(layout: &Layout, wants: &[Want]) -> HashMap<u64, Vec<Extent>> {
    wants.iter().map(|&(id, _)| (id, layout.extents(id).unwrap().to_vec())).collect()
}

fn assert_sound(layout: &Layout, sizes: &HashMap<u64, u64>) {
    let mut taken: Vec<(usize, u64, u64)> = Vec::new();
    for (&id, &bytes) in sizes {
        let Some(extents) = layout.extents(id) else { continue };
        assert_eq!(extents.iter().map(|extent| extent.bytes).sum::<u64>(), bytes);
        taken.extend(extents.iter().map(|e| (e.segment, e.offset_bytes, e.end_bytes())));
    }
    taken.sort_unstable();
    for pair in taken.windows(2) {
        assert!(pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1, "{pair:?} overlap");
    }
    for &(segment, start, end) in &taken {
        assert!(end <= layout.segments()[segment] && start % EXTENT_ALIGN_BYTES == 0);
    }
    let used: u64 = taken.iter().map(|&(_, start, end)| end - start).sum();
    assert_eq!(used + layout.free_bytes(), layout.segments().iter().sum::<u64>(), "no byte is lost");
}

proptest! {
    #[test]
    fn places_are_disjoint_and_sleepers_stay(
        rounds in prop::collection::vec(
            (prop::collection::vec((0u64..12, 1u64..5000), 1..10), prop::collection::vec(any::<bool>(), 12)), 1..8)
    ) {
        let (mut layout, mut sizes) = (Layout::default(), HashMap::new());
        for (wants, stay) in rounds {
            let asleep: Vec<u64> = (0..12).filter(|&id| layout.is_asleep(id)).collect();
            let mut wants: Vec<Want> = wants.into_iter().filter(|(id, _)| !asleep.contains(id)).collect();
            wants.sort_unstable();
            wants.dedup_by_key(|want| want.0);
            let sleeping: Vec<Want> = asleep.iter().map(|&id| (id, sizes[&id])).collect();
            let before = extents_of(&layout, &sleeping);
            let grown = layout.place(&wants).unwrap();
            sizes.extend(wants.iter().copied());
            assert_sound(&layout, &sizes);
            prop_assert_eq!(before, extents_of(&layout, &sleeping), "what sleeps has moved");
            prop_assert!(layout.holds(&wants));
            prop_assert!(grown.iter().sum::<u64>() <= wants.iter().map(|&(_, bytes)| room(bytes)).sum());
            // The same again decides nothing.
            let known = extents_of(&layout, &wants);
            prop_assert!(layout.place(&wants).unwrap().is_empty());
            prop_assert_eq!(known, extents_of(&layout, &wants));
            let ids: Vec<u64> = wants.iter().map(|want| want.0).collect();
            layout.mark(&ids, true);
            for id in (0..12).filter(|&id| !stay[id as usize]) {
                layout.mark(&[id], false);
            }
        }
    }

    #[test]
    fn moves_carry_every_byte_once(
        sizes in prop::collection::vec(prop_oneof![1u64..3000, Just(PACK_BELOW_BYTES), Just(COPY_BYTES * 2 + 5)], 1..30),
        slot in prop::option::of(1u64..40),
    ) {
        let slot_bytes = slot.map(|slots| slots * EXTENT_ALIGN_BYTES);
        let wants: Vec<Want> = sizes.iter().copied().enumerate().map(|(i, bytes)| (i as u64, bytes)).collect();
        let mut layout = Layout::default();
        prop_assert_eq!(layout.place(&wants).unwrap(), vec![sizes.iter().map(|&b| room(b)).sum::<u64>()]);
        let batch: Vec<Vec<Extent>> = wants.iter().map(|w| layout.extents(w.0).unwrap().to_vec()).collect();
        let mut carried: Vec<Vec<(u64, u64)>> = vec![Vec::new(); sizes.len()];
        for one in moves::moves(&batch, slot_bytes) {
            match one {
                Move::Direct { item, at_bytes, extent } => {
                    prop_assert!(extent.bytes <= COPY_BYTES);
                    prop_assert_eq!(extent.offset_bytes, batch[item][0].offset_bytes + at_bytes);
                    carried[item].push((at_bytes, extent.bytes));
                }
                Move::Packed { whole, ranges } => {
                    prop_assert!(whole.bytes <= slot_bytes.unwrap());
                    for part in ranges {
                        prop_assert!(part.offset_bytes + part.bytes <= whole.bytes);
                        let place = whole.offset_bytes + part.offset_bytes;
                        prop_assert_eq!(place, batch[part.item][0].offset_bytes + part.at_bytes);
                        carried[part.item].push((part.at_bytes, part.bytes));
                    }
                }
            }
        }
        for (item, mut ranges) in carried.into_iter().enumerate() {
            ranges.sort_unstable();
            let mut next = 0;
            for (at, bytes) in ranges {
                prop_assert_eq!(at, next);
                next += bytes;
            }
            prop_assert_eq!(next, sizes[item]);
        }
    }
}

#[test]
fn small_storages_fill_their_slots() {
    let wants: Vec<Want> = (0..1000).map(|id| (id, 100)).collect();
    let mut layout = Layout::default();
    layout.place(&wants).unwrap();
    let batch: Vec<Vec<Extent>> = wants.iter().map(|w| layout.extents(w.0).unwrap().to_vec()).collect();
    // 128 bytes of room each.
    assert_eq!(moves::moves(&batch, Some(12_800)).len(), 10);
    assert_eq!(moves::moves(&batch, None).len(), 1000);
}

#[test]
fn a_storage_larger_than_a_registration_is_cut() {
    let mut layout = Layout::default();
    let huge = 100 * EXTENT_MAX_BYTES + 5;
    let segments = layout.place(&[(0, huge), (1, 1)]).unwrap();
    assert!(segments.len() == 2 && segments.iter().all(|&bytes| bytes <= forebay::device::PIECE_BYTES));
    assert_eq!(layout.extents(0).unwrap().len(), 101);
    assert_sound(&layout, &HashMap::from([(0, huge), (1, 1)]));
}

#[test]
fn a_storage_of_a_readable_sleeper_is_not_cut() {
    let piece = forebay::device::PIECE_BYTES;
    let mut layout = Layout::uncut();
    assert_eq!(layout.place(&[(0, 5 * EXTENT_MAX_BYTES), (1, 7), (2, piece)]).unwrap().len(), 2);
    for id in 0..3 {
        assert_eq!(layout.extents(id).unwrap().len(), 1);
    }
    let refused = layout.place(&[(3, piece + 1)]).unwrap_err().to_string();
    assert!(refused.contains(&format!("{} bytes", piece + 1)), "{refused}");
    assert!(layout.emptied().place(&[(0, 5 * EXTENT_MAX_BYTES)]).is_ok_and(|segments| segments.len() == 1));
    assert_sound(&layout, &HashMap::from([(0, 5 * EXTENT_MAX_BYTES), (1, 7), (2, piece)]));
}
