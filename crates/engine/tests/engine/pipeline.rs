//! The pipeline: what must be ordered is, whichever stream is late, and slots and memory come back.
//!
//! A delay is put in front of one copy or launch: work that does not wait for it runs first and shows in the bits. On
//! the checked devices the same is found without any delay, from the order of submission.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::trial::{Rig, Scenario, Tensor, mixed_tensors};
use crate::common::{Kind, Subject, device_error, in_one_of_three, under_sanitizer};
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::kernel::uniform_element;
use forebay::device::{self, Kernel, Region, Rule, Stream};
use forebay::flow::{InFlight, Pipeline, Slot};
use forebay::memory::{Allocator, PinnedBudget};
use forebay::optimizer::{Optimizer, OptimizerOptions};
use forebay::plan::StepPlan;

forebay_device::on_devices! {
    every:
        a_late_fetch_holds_its_update,
        a_late_update_holds_its_store,
        a_late_store_holds_the_next_use_of_its_slot,
        a_late_store_holds_the_next_fetch_of_its_chunk,
        a_late_store_of_a_parameter_holds_its_next_fetch,
        delays_anywhere_change_nothing,
        bytes_go_in_through_the_slot_and_out_again,
        a_chunk_stored_in_parts_is_fetched_whole,
        slots_that_are_dropped_come_back_when_their_work_has_ended,
        a_slot_whose_wait_was_refused_keeps_its_fence,
        a_slot_whose_end_could_not_be_recorded_is_waited_for,
        a_store_whose_end_could_not_be_recorded_is_waited_for,
        an_acquirer_sleeps_until_a_slot_comes_back,
        the_host_gets_a_value_when_its_use_has_ended,
        slabs_stay_inside_the_budget,
        memory_is_exact_and_comes_back,
        memory_comes_back_while_stores_are_under_way,
        the_pipeline_allocates_its_ring_and_nothing_after;
}

const DELAY: Misbehaviour = Misbehaviour::Late { ns: 25_000_000 };

/// Two columns, so that a chunk takes two copies each way, and eight chunks or two.
fn rig<'a>(on: &'a Subject, slots: usize, slot_bytes: u64, chunks: usize) -> Rig<'a> {
    let rig =
        Rig::new(on, Scenario::new(vec![Tensor::f32(1000), Tensor::f32(30), Tensor::f32(900)], slots, slot_bytes), 3);
    assert_eq!(rig.plan().chunks().len(), chunks);
    rig.warm()
}

const COPIES: usize = 2;

/// The `i`-th copy of a chunk's fetch, counted from the first copy of the step.
fn fetch_of(chunk: usize, i: usize) -> u64 {
    (chunk * 2 * COPIES + i) as u64
}

fn store_of(chunk: usize, i: usize) -> u64 {
    (chunk * 2 * COPIES + COPIES + i) as u64
}

/// Three steps in a row from the same start, with these delays.
fn check_with(on: &Subject, rig: &Rig<'_>, delays: &[(Call, u64)]) {
    rig.reset();
    delays.iter().for_each(|&(call, nth)| on.fault.on(call, nth, DELAY));
    rig.steps(3);
    rig.optimizer.synchronize().unwrap();
    rig.assert_exact(3);
}

fn a_late_fetch_holds_its_update(on: &Subject) {
    let rig = rig(on, 3, 2048, 8);
    for chunk in [0, 1, 4, 7, 8, 10] {
        check_with(on, &rig, &[(Call::Copy, fetch_of(chunk, chunk % 2))]);
    }
}

fn a_late_update_holds_its_store(on: &Subject) {
    let rig = rig(on, 3, 2048, 8);
    for chunk in [0, 1, 4, 7, 8, 10] {
        check_with(on, &rig, &[(Call::Launch, chunk)]);
    }
}

fn a_late_store_holds_the_next_use_of_its_slot(on: &Subject) {
    for slots in [2, 3] {
        let rig = rig(on, slots, 2048, 8);
        for chunk in [0, 1, 4, 5] {
            check_with(on, &rig, &[(Call::Copy, store_of(chunk, chunk % 2))]);
        }
    }
}

/// With more slots than chunks, the second step fetches a chunk into a fresh slot while the first step's store of that
/// chunk is still to come.
fn a_late_store_holds_the_next_fetch_of_its_chunk(on: &Subject) {
    let rig = rig(on, 7, 10 << 10, 2);
    for copy in [store_of(0, 0), store_of(0, 1), store_of(1, 0), store_of(2, 0), store_of(3, 1)] {
        check_with(on, &rig, &[(Call::Copy, copy)]);
    }
}

/// A parameter on the host is stored and fetched again like state, by its own copies.
fn a_late_store_of_a_parameter_holds_its_next_fetch(on: &Subject) {
    let rig = Rig::new(on, Scenario::new(vec![Tensor::f32(1000).on_host()], 5, 8 << 10), 3).warm();
    assert_eq!(rig.plan().chunks().len(), 2);
    // In: two columns, the parameter, the gradient. Out: the columns, the parameter.
    for copy in [3, 6, 7 + 6, 2 * 7 + 6, 3 * 7 + 6] {
        check_with(on, &rig, &[(Call::Copy, copy)]);
    }
}

fn delays_anywhere_change_nothing(on: &Subject) {
    for (slots, slot_bytes, chunks) in [(2, 2048, 8), (4, 2048, 8), (7, 10 << 10, 2)] {
        let rig = rig(on, slots, slot_bytes, chunks);
        for round in 0..4 {
            let random = |i: u64, below: usize| (uniform_element(round, i, 0.0, 1.0) * below as f32) as u64;
            let copies = 3 * chunks * 2 * COPIES;
            let delays: Vec<_> = (0..3)
                .map(|i| (Call::Copy, random(i, copies)))
                .chain([(Call::Launch, random(3, 3 * chunks)), (Call::Wait, random(4, 6 * chunks))])
                .collect();
            check_with(on, &rig, &delays);
        }
    }
}

struct Bare {
    pipeline: Pipeline,
    compute: Stream,
    host: Region,
}

const BYTES: u64 = 4096;

/// A pipeline without an optimizer, and host memory to move.
fn bare(on: &Subject, slots: usize) -> Bare {
    let pipeline = Pipeline::new(&Allocator::new(on.device.clone()), slots, BYTES).unwrap();
    let bare = Bare { pipeline, compute: on.stream("compute").unwrap(), host: on.pinned(8 * BYTES) };
    on.write(&[0; 8 * BYTES as usize], &bare.host).unwrap();
    bare.pipeline.begin();
    bare
}

impl Bare {
    fn part(&self, part: u64) -> Region {
        self.host.slice(part * BYTES, BYTES).unwrap()
    }

    fn fetch(&self, part: u64) -> forebay::Result<InFlight<Slot>> {
        self.pipeline.fetch(self.pipeline.acquire()?, &[self.part(part)], &[(0, BYTES)])
    }

    fn fill(&self, slot: InFlight<Slot>, byte: u8) -> forebay::Result<InFlight<Slot>> {
        self.pipeline.update(slot, &self.compute, |device, memory| {
            Ok(device.launch(&self.compute, &Kernel::Fill { dst: memory.slice(0, BYTES / 2)?, byte })?)
        })
    }

    fn store(&self, slot: InFlight<Slot>, part: u64) -> forebay::Result<InFlight<Slot>> {
        self.pipeline.store(slot, &[(0, BYTES)], &[self.part(part)], part as usize, BYTES)
    }

    /// One part through all stages, with its first half overwritten.
    fn pass(&self, part: u64, byte: u8) -> forebay::Result<()> {
        let slot = self.store(self.fill(self.fetch(part)?, byte)?, part)?;
        self.pipeline.release(slot);
        Ok(())
    }
}

fn bytes_go_in_through_the_slot_and_out_again(on: &Subject) {
    let bare = bare(on, 3);
    let mut expected: Vec<u8> = (0..8 * BYTES).map(|i| (i * 31 % 251) as u8).collect();
    on.write(&expected, &bare.host).unwrap();
    for round in 0..3 {
        for part in 0..8u64 {
            let byte = (10 * round + part) as u8;
            bare.pass(part, byte).unwrap();
            expected[(part * BYTES) as usize..][..BYTES as usize / 2].fill(byte);
        }
    }
    bare.pipeline.drain().unwrap();
    assert!(on.host_bytes(&bare.host).unwrap() == expected);
    let stats = bare.pipeline.stats();
    assert_eq!((stats.chunks, stats.fetch_bytes, stats.store_bytes), (24, 24 * BYTES, 24 * BYTES));
}

/// What a fetch must wait for is decided by bytes, not by chunk numbers.
fn a_chunk_stored_in_parts_is_fetched_whole(on: &Subject) {
    let bare = bare(on, 5);
    for late in [0, 1, 2] {
        // One copy in and one out for each pass.
        on.fault.on(Call::Copy, 2 * late + 1, DELAY);
        (0..3).for_each(|part| bare.pass(part, 0x40 + late as u8).unwrap());
        let slot = bare.pipeline.acquire().unwrap();
        let across = bare.host.slice(BYTES / 2, 2 * BYTES).unwrap();
        let half = BYTES / 2;
        let parts = [across.slice(half, half).unwrap(), across.slice(3 * half, half).unwrap()];
        let slot = bare.pipeline.fetch(slot, &parts, &[(0, half), (half, half)]).unwrap();
        let out = bare.host.slice(5 * BYTES, BYTES).unwrap();
        let slot = bare.pipeline.update(slot, &bare.compute, |_, _| Ok(())).unwrap();
        bare.pipeline.release(bare.pipeline.store(slot, &[(0, BYTES)], std::slice::from_ref(&out), 9, BYTES).unwrap());
        bare.pipeline.settle(&out).unwrap();
        assert_eq!(on.host_bytes(&out).unwrap(), vec![0x40 + late as u8; BYTES as usize], "store {late} was late");
    }
}

fn slots_that_are_dropped_come_back_when_their_work_has_ended(on: &Subject) {
    let bare = bare(on, 2);
    let idle = || bare.pipeline.idle_slots();
    let unused = bare.pipeline.acquire().unwrap();
    assert_eq!((idle(), unused.region().bytes()), (1, BYTES));
    drop(unused);
    assert_eq!(idle(), 2);
    // Dropped after each stage while the stage is held up: who gets the slot next must not meet its work.
    for (call, nth) in [(Call::Copy, 0), (Call::Launch, 0), (Call::Copy, 1)] {
        for _ in 0..2 {
            on.fault.on(call, nth, DELAY);
            let mut slot = bare.fetch(0).unwrap();
            if call == Call::Launch || nth == 1 {
                slot = bare.fill(slot, 7).unwrap();
            }
            if nth == 1 {
                slot = bare.store(slot, 0).unwrap();
            }
            assert_eq!(idle(), 1);
            drop(slot);
            assert_eq!(idle(), 2);
            bare.pass(1, 1).unwrap();
            bare.pass(2, 2).unwrap();
        }
        bare.pipeline.drain().unwrap();
        for part in [1, 2] {
            let bytes = on.host_bytes(&bare.part(part)).unwrap();
            assert!(bytes[..BYTES as usize / 2].iter().all(|&byte| u64::from(byte) == part), "{call:?} {nth}");
            assert!(bytes[BYTES as usize / 2..].iter().all(|&byte| byte == 0), "{call:?} {nth}");
        }
    }
}

/// The other slot is held, so that nothing but the fence stands between the late store and the next fetch.
fn a_slot_whose_wait_was_refused_keeps_its_fence(on: &Subject) {
    let bare = bare(on, 2);
    let held = bare.pipeline.acquire().unwrap();
    on.fault.on(Call::Copy, 1, Misbehaviour::Late { ns: 200_000_000 });
    bare.pass(0, 5).unwrap();
    on.fault.on(Call::Synchronize, 0, Misbehaviour::Fail);
    if !under_sanitizer(on.kind) {
        device_error(bare.pipeline.acquire().map(drop));
        assert_eq!(bare.pipeline.idle_slots(), 1);
        bare.pass(1, 6).unwrap();
        bare.pipeline.drain().unwrap();
        for (part, byte) in [(0, 5), (1, 6)] {
            assert!(on.host_bytes(&bare.part(part)).unwrap()[..BYTES as usize / 2].iter().all(|&b| b == byte));
        }
    }
    drop(held);
    assert_eq!(bare.pipeline.idle_slots(), 2);
}

/// A passage of `part` in which the work of one stage is late and both recordings of its end are refused. The slot's
/// marks were recorded and reached in an earlier passage.
fn break_off(on: &Subject, bare: &Bare, stage: u64, part: u64) {
    bare.pass(0, 1).unwrap();
    bare.pipeline.drain().unwrap();
    let (call, nth) = [(Call::Copy, 0), (Call::Launch, 0), (Call::Copy, 1)][stage as usize];
    on.fault.on(call, nth, Misbehaviour::Late { ns: 100_000_000 });
    (0..2).for_each(|attempt| on.fault.on(Call::Record, stage + attempt, Misbehaviour::Fail));
    let error = device_error(bare.pass(part, 9));
    assert!(error.to_string().contains("injected into Record"), "{error}");
}

/// The end of a slot's use is known by an event. Where that could not be recorded, it still stands for an earlier use.
fn a_slot_whose_end_could_not_be_recorded_is_waited_for(on: &Subject) {
    for stage in 0..3 {
        let bare = bare(on, 2);
        let held = bare.pipeline.acquire().unwrap();
        break_off(on, &bare, stage, 3);
        assert_eq!(bare.pipeline.idle_slots(), 1);
        // Refused once more: then nobody gets the slot.
        on.fault.on(Call::Record, 0, Misbehaviour::Fail);
        device_error(bare.pipeline.acquire().map(drop));
        assert_eq!(bare.pipeline.idle_slots(), 1);
        let slot = bare.pipeline.acquire().unwrap();
        on.fill(slot.region(), 7);
        on.finish(&bare.compute).unwrap();
        std::thread::sleep(Duration::from_millis(if on.kind.is_checked() { 0 } else { 120 }));
        assert_eq!(on.download(slot.region()), vec![7; BYTES as usize], "stage {stage}");
        drop((slot, held));
        bare.pipeline.drain().unwrap();
        let stored = if stage == 2 { 9 } else { 0 };
        let half = BYTES as usize / 2;
        assert_eq!(on.host_bytes(&bare.part(3)).unwrap()[..half], vec![stored; half], "stage {stage}");
    }
}

/// Those who wait for a store of certain bytes, on the host or on a stream, wait for that one too.
fn a_store_whose_end_could_not_be_recorded_is_waited_for(on: &Subject) {
    let half = BYTES as usize / 2;
    let bare = bare(on, 3);
    drop(bare.pipeline.acquire().unwrap());
    (0..3).for_each(|part| bare.pass(part, 1).unwrap());
    break_off(on, &bare, 2, 3);
    bare.pipeline.settle(&bare.part(3)).unwrap();
    assert_eq!(on.host_bytes(&bare.part(3)).unwrap()[..half], vec![9; half]);
    break_off(on, &bare, 2, 4);
    let slot = bare.store(bare.fill(bare.fetch(4).unwrap(), 2).unwrap(), 4).unwrap();
    bare.pipeline.release(slot);
    bare.pipeline.drain().unwrap();
    assert_eq!(on.host_bytes(&bare.part(4)).unwrap()[..half], vec![2; half]);
}

fn an_acquirer_sleeps_until_a_slot_comes_back(on: &Subject) {
    in_one_of_three("the statistics do not count the wait", || {
        let bare = bare(on, 2);
        let (held, released) = (bare.pipeline.acquire().unwrap(), AtomicBool::new(false));
        let other = bare.pipeline.acquire().unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let slot = bare.pipeline.acquire().unwrap();
                assert!(released.load(Ordering::SeqCst), "a slot was handed out twice");
                drop(slot);
            });
            std::thread::sleep(Duration::from_millis(20));
            released.store(true, Ordering::SeqCst);
            drop(held);
            waiter.join().unwrap();
        });
        drop(other);
        assert_eq!(bare.pipeline.idle_slots(), 2);
        let stats = bare.pipeline.stats();
        stats.stalls == 1 && stats.stall_ns > 0
    });
}

fn the_host_gets_a_value_when_its_use_has_ended(on: &Subject) {
    let bare = bare(on, 2);
    on.fault.on(Call::Copy, 1, DELAY);
    let slot = bare.store(bare.fill(bare.fetch(3).unwrap(), 9).unwrap(), 3).unwrap();
    let slot = slot.wait().unwrap();
    assert_eq!(on.host_bytes(&bare.part(3)).unwrap()[..BYTES as usize / 2], [9; BYTES as usize / 2]);
    assert_eq!(on.download(slot.region()), on.host_bytes(&bare.part(3)).unwrap());
    drop(slot);
    assert_eq!(bare.pipeline.idle_slots(), 2);
}

fn slabs_stay_inside_the_budget(on: &Subject) {
    let budget = PinnedBudget::new(Some(64 << 10));
    let allocator = Allocator::within(on.device.clone(), budget.clone());
    let pin = |bytes| allocator.pin(&[bytes]);
    let over = |requested_bytes, available_bytes| device::Error::OutOfPinnedBudget {
        requested_bytes,
        available_bytes,
        budget_bytes: 64 << 10,
    };
    let first = pin(40 << 10).unwrap();
    assert_eq!(device_error(pin((24 << 10) + 1)), over(28 << 10, 24 << 10));
    assert_eq!((budget.used_bytes(), on.memory().unwrap().pinned_bytes, on.counters().pins), (40 << 10, 40 << 10, 1));
    let second = pin(24 << 10).unwrap();
    assert_eq!(device_error(pin(1)), over(4096, 0));
    let clone = first.clone();
    drop(first);
    assert_eq!(budget.used_bytes(), 64 << 10, "a clone keeps it");
    drop(clone);
    assert_eq!((budget.used_bytes(), on.memory().unwrap().pinned_bytes), (24 << 10, 24 << 10));
    // What is refused for another reason counts nothing.
    on.fault.on(Call::Pin, 0, Misbehaviour::Fail);
    device_error(pin(40 << 10));
    allocator.pin(&[]).unwrap_err();
    assert_eq!(budget.used_bytes(), 24 << 10);
    let third = pin(40 << 10).unwrap();
    drop((second, third));
    assert_eq!(pin(64 << 10).unwrap().bytes(), 64 << 10);
    on.assert_empty();
}

fn memory_is_exact_and_comes_back(on: &Subject) {
    let allocator = Allocator::new(on.device.clone());
    let slab = allocator.pin(&[100, 5000]).unwrap();
    let slab_bytes = slab.layout().bytes();
    assert_eq!(slab.pin_stats().bytes, slab_bytes, "what pinning cost is known");
    assert_eq!((allocator.budget().used_bytes(), on.memory().unwrap().pinned_bytes), (slab_bytes, slab_bytes));
    drop(slab);
    on.assert_empty();

    let scenario = Scenario::new(mixed_tensors(), 3, 4096);
    let options = OptimizerOptions { plan: scenario.options, ..OptimizerOptions::default() };
    let optimizer = Optimizer::new(on.device.clone(), scenario.rule, options).unwrap();
    assert_eq!((optimizer.has_ring(), on.memory().unwrap().allocated_bytes), (false, 0));
    optimizer.open_ring(None).unwrap();
    optimizer.add(scenario.specs()).unwrap();
    let slab_bytes = optimizer.pinned_bytes();
    assert_eq!(optimizer.pin_stats(0).unwrap().unwrap().bytes, slab_bytes);
    let memory = on.memory().unwrap();
    let powers = POWERS_BYTES;
    assert_eq!((memory.allocated_bytes, memory.pinned_bytes), (3 * 4096 + powers, slab_bytes + powers));
    assert!(slab_bytes - scenario.plan().payload_bytes() < 20_000, "exact, but for alignment: {slab_bytes}");
    // A region that somebody still holds keeps the memory, though nothing else does.
    let view = optimizer.column(0, 0, "exp_avg").unwrap().unwrap();
    drop(optimizer);
    on.assert_holds(0, slab_bytes);
    drop(view);
    on.assert_empty();

    // It is no longer counted, though: what the budget limits is what the optimizer holds.
    let slab = allocator.pin(&[5000]).unwrap();
    let (slab_bytes, view) = (slab.bytes(), slab.part(0).unwrap());
    drop(slab);
    assert_eq!((allocator.budget().used_bytes(), on.memory().unwrap().pinned_bytes), (0, slab_bytes));
    drop(view);
    on.assert_empty();
}

/// What the powers of the betas are computed in, on the device and on the host, beside state and ring.
const POWERS_BYTES: u64 = 4096 * 4;

fn memory_comes_back_while_stores_are_under_way(on: &Subject) {
    let rig = rig(on, 3, 2048, 8);
    on.fault.on(Call::Copy, store_of(7, 0), DELAY);
    rig.step(0).unwrap();
    drop(rig);
    on.assert_empty();
}

fn the_pipeline_allocates_its_ring_and_nothing_after(on: &Subject) {
    let bare = bare(on, 4);
    assert_eq!(on.memory().unwrap().allocated_bytes, 4 * BYTES);
    let before = on.taken();
    for part in 0..8 {
        bare.pass(part, 1).unwrap();
    }
    bare.pipeline.drain().unwrap();
    assert_eq!(on.taken(), before);
}

/// The default ring is the one the plan announces.
#[test]
fn the_ring_is_what_the_plan_says() {
    let on = Subject::open(Kind::Cpu);
    let tensors = Scenario::new(mixed_tensors(), 2, 1280).plan().tensors().to_vec();
    let plan = StepPlan::new(tensors, Default::default()).unwrap();
    let ring_bytes = plan.ring_bytes();
    let rule = Rule::named("adamw").unwrap();
    let optimizer = Optimizer::new(on.device.clone(), rule, OptimizerOptions::default()).unwrap();
    optimizer.open_ring(None).unwrap();
    assert_eq!(optimizer.ring_bytes(), ring_bytes);
    assert_eq!((on.memory().unwrap().allocated_bytes, ring_bytes), (64 << 20, 64 << 20));
}

/// The checker refuses a wait for what was never recorded, and the pipeline makes none.
#[test]
fn nothing_waits_for_what_was_never_submitted() {
    let on = Subject::open(Kind::CpuChecked);
    let bare = bare(&on, 4);
    for part in 0..8 {
        bare.pass(part, 1).unwrap();
        // Overlapping regions of earlier passes, of this one and of none.
        bare.pipeline.settle(&bare.host).unwrap();
    }
    let unrecorded = on.wait(&bare.compute, &on.event().unwrap());
    assert!(matches!(unrecorded, Err(device::Error::Unordered { .. })), "the checker does find it: {unrecorded:?}");
}
