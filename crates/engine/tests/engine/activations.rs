//! Activation offload: the right bytes come back, whatever the order of use and whichever stream is late.
//!
//! [`Model`] is a computation with an allocator like torch's: memory that is given back is handed out again at once,
//! ordered by the computation's stream alone. A source that is freed before its store has ended, or memory that is
//! fetched into too early, is then overwritten, which shows in the bits; on the checked devices it is found from the
//! order of submission.

use std::collections::HashMap;

use crate::common::{Subject, cases, device_error};
use forebay::Error;
use forebay::activations::{Compute, EntryId, Key, Location, Offload, OffloadOptions, Route, SaveId, SaveOutcome};
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::{Buffer, Kernel, Region, Stream};
use forebay::memory::{Allocator, PinnedBudget};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

forebay_device::on_devices! {
    every:
        any_order_of_use_gives_the_right_bytes,
        any_routes_give_the_right_bytes,
        a_late_store_holds_what_its_route_lets_go_of,
        a_late_store_holds_the_reuse_of_its_source,
        a_late_store_holds_the_fetch_of_its_entry,
        a_late_store_holds_the_fetch_on_another_stream,
        a_late_fetch_holds_the_use_of_its_bytes,
        a_late_fetch_holds_the_next_store_into_its_block,
        a_late_computation_holds_the_store_of_what_it_makes,
        late_use_of_freed_memory_holds_the_fetch_into_it,
        tensors_of_many_chunks_travel_whole,
        what_is_never_used_gives_everything_back,
        no_pinned_memory_keeps_the_tensor,
        a_refused_copy_is_told_and_the_rest_goes_on,
        a_save_that_fails_leaves_its_source_alone,
        later_passes_make_nothing,
        events_come_back_where_there_are_no_layers;
}

const DELAY: Misbehaviour = Misbehaviour::Late { ns: 25_000_000 };
const WORD: u64 = 8;

/// Memory of the computation: what is given back last is handed out first.
struct Arena {
    buffer: Buffer,
    free: Vec<(u64, u64)>,
    end: u64,
}

impl Arena {
    fn take(&mut self, bytes: u64) -> Region {
        let found = self.free.iter().rposition(|&(_, len)| len == bytes);
        let (offset, len) = match found {
            Some(at) => self.free.remove(at),
            None => {
                self.end += bytes;
                (self.end - bytes, bytes)
            }
        };
        self.buffer.region(offset, len).expect("the arena is large enough")
    }

    fn give(&mut self, region: &Region) {
        self.free.push((region.offset_bytes(), region.bytes()));
    }
}

/// A saved tensor as the front end knows it.
#[derive(Debug, Clone, Copy)]
struct Tensor {
    save: SaveId,
    entry: EntryId,
    value: u8,
    bytes: u64,
}

struct Model<'a> {
    on: &'a Subject,
    offload: Offload,
    stream: Stream,
    compute: Compute,
    arena: Arena,
    /// Memory by entry: sources that are held, fetched bytes, and what stays.
    held: HashMap<EntryId, Region>,
    differences: Region,
    storages: u64,
    fetched: u64,
}

impl<'a> Model<'a> {
    fn new(on: &'a Subject, options: OffloadOptions) -> Self {
        Self::within(on, options, None)
    }

    fn within(on: &'a Subject, options: OffloadOptions, budget_bytes: Option<u64>) -> Self {
        let allocator = Allocator::within(on.device.clone(), PinnedBudget::new(budget_bytes));
        let offload = Offload::new(allocator, options).unwrap();
        let stream = on.stream("computation").unwrap();
        let differences = on.upload(&[0; 8]).all();
        Self {
            on,
            offload,
            compute: Compute::on_stream(stream.clone()),
            stream,
            arena: Arena { buffer: on.alloc(4 << 20).unwrap(), free: Vec::new(), end: 0 },
            held: HashMap::new(),
            differences,
            storages: 0,
            fetched: 0,
        }
    }

    fn full(on: &'a Subject, window: u64) -> Self {
        Self::new(on, OffloadOptions { fraction: Some(1.0), max_in_flight_bytes: Some(window) })
    }

    fn fill(&self, dst: &Region, byte: u8) {
        self.on.launch(&self.stream, &Kernel::Fill { dst: dst.clone(), byte }).unwrap();
    }

    /// Computes a tensor and saves it.
    fn save(&mut self, bytes: u64, value: u8, may_leave: bool) -> forebay::Result<Tensor> {
        self.save_by(bytes, value, may_leave, None)
    }

    /// The same, with what a plan says about it.
    fn save_by(&mut self, bytes: u64, value: u8, may_leave: bool, route: Option<Route>) -> forebay::Result<Tensor> {
        let memory = self.arena.take(bytes);
        self.fill(&memory, value);
        self.storages += 1;
        let key = Key {
            storage: self.storages,
            storage_bytes: bytes,
            addr: memory.addr() as u64,
            start_bytes: 0,
            bytes,
            version: 0,
        };
        let source = memory.clone();
        let outcome = self.offload.save(key, (may_leave, true), route, || Ok(source), &self.compute)?;
        self.take_note(outcome, memory, value, bytes)
    }

    fn save_as(&mut self, key: Key, memory: Region, value: u8, may_leave: bool) -> forebay::Result<Tensor> {
        let source = memory.clone();
        let outcome = self.offload.save(key, (may_leave, true), None, || Ok(source), &self.compute)?;
        self.take_note(outcome, memory, value, key.bytes)
    }

    fn take_note(&mut self, outcome: SaveOutcome, memory: Region, value: u8, bytes: u64) -> forebay::Result<Tensor> {
        if outcome.saved.new {
            self.held.insert(outcome.saved.entry, memory);
        }
        self.drop_sources(outcome.dropped);
        Ok(Tensor { save: outcome.saved.save, entry: outcome.saved.entry, value, bytes })
    }

    fn drop_sources(&mut self, dropped: Vec<EntryId>) {
        for entry in dropped {
            let source = self.held.remove(&entry).expect("only what is held is dropped");
            self.arena.give(&source);
        }
    }

    /// Uses a saved tensor: every byte must be the one that was saved.
    fn load(&mut self, tensor: Tensor) -> forebay::Result<()> {
        let opened = self.offload.open(tensor.save, &self.compute)?;
        assert_eq!(opened.entry, tensor.entry);
        let now = (opened.location == Location::Host).then_some(opened.entry);
        for entry in now.into_iter().chain(opened.ahead) {
            let memory = self.arena.take(self.offload.entry_bytes(entry));
            self.held.insert(entry, memory.clone());
            self.fetched += memory.bytes();
            self.offload.fetch(entry, memory, entry == opened.entry, &self.compute)?;
        }
        let stays = matches!(opened.location, Location::Kept | Location::Leaving);
        if !stays {
            self.offload.ready(opened.entry, &self.compute)?;
        }
        let memory = self.held[&opened.entry].clone();
        let expected = self.arena.take(tensor.bytes);
        self.fill(&expected, tensor.value);
        let compare = Kernel::CountDifferences { a: memory, b: expected.clone(), count: self.differences.clone() };
        self.on.launch(&self.stream, &compare).unwrap();
        self.arena.give(&expected);
        if !stays && !opened.hold {
            let memory = self.held.remove(&opened.entry).unwrap();
            self.arena.give(&memory);
            self.offload.free_fetched(opened.entry)?;
        }
        Ok(())
    }

    fn release(&mut self, tensor: Tensor) -> forebay::Result<()> {
        if let Some(entry) = self.offload.release(tensor.save)?
            && let Some(memory) = self.held.remove(&entry)
        {
            self.arena.give(&memory);
        }
        Ok(())
    }

    /// Overwrites memory as the next layer's work would.
    fn scribble(&mut self) {
        let free: Vec<(u64, u64)> = self.arena.free.clone();
        for (offset, bytes) in free {
            self.fill(&self.arena.buffer.region(offset, bytes).unwrap(), 0xEE);
        }
    }

    fn wrong_words(&self) -> u64 {
        self.on.finish(&self.stream).unwrap();
        u64::from_le_bytes(self.on.download(&self.differences).try_into().unwrap())
    }
}

/// One program: sizes of saved tensors, which of them are saved twice, in which order they are used and freed.
#[derive(Debug, Clone)]
struct Program {
    fraction: f64,
    window: u64,
    keep_every: usize,
    passes: Vec<Vec<(u64, bool)>>,
    order: u64,
    late: Vec<u64>,
    backward_by_pass: bool,
}

fn programs() -> impl Strategy<Value = Program> {
    let tensor = (1u64..5, any::<bool>()).prop_map(|(size, again)| (size * 4096, again));
    let pass = prop::collection::vec(tensor, 1..14);
    (
        prop_oneof![Just(1.0), Just(0.0), 0.1..0.9],
        prop_oneof![Just(1u64), Just(1 << 30), 4096u64..80_000],
        2usize..9,
        prop::collection::vec(pass, 1..4),
        any::<u64>(),
        prop::collection::vec(0u64..40, 0..2),
        any::<bool>(),
    )
        .prop_map(|(fraction, window, keep_every, passes, order, late, backward_by_pass)| Program {
            fraction,
            window,
            keep_every,
            passes,
            order,
            late,
            backward_by_pass,
        })
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % sides
    }
}

fn run_program(on: &Subject, program: &Program) -> u64 {
    let options = OffloadOptions { fraction: Some(program.fraction), max_in_flight_bytes: Some(program.window) };
    let mut model = Model::new(on, options);
    for &nth in &program.late {
        on.fault.on(Call::Copy, nth, Misbehaviour::Late { ns: 2_000_000 });
    }
    let mut dice = Dice(program.order | 1);
    let mut alive: Vec<Vec<Tensor>> = Vec::new();
    let mut value = 0u8;
    for (number, sizes) in program.passes.iter().enumerate() {
        model.offload.enter(0, &model.compute).unwrap();
        model.offload.begin_pass();
        let mut saved = Vec::new();
        for (i, &(bytes, again)) in sizes.iter().enumerate() {
            value = value.wrapping_add(1 + (number as u8));
            let may_leave = i % program.keep_every != 1;
            let tensor = model.save(bytes, value, may_leave).unwrap();
            saved.push(tensor);
            if again && let Some(memory) = model.held.get(&tensor.entry).cloned() {
                let key = Key {
                    storage: model.storages,
                    storage_bytes: bytes,
                    addr: memory.addr() as u64,
                    start_bytes: 0,
                    bytes,
                    version: 0,
                };
                let twin = model.save_as(key, memory, value, may_leave).unwrap();
                assert_eq!(twin.entry, tensor.entry, "the same storage at the same version is one entry");
                saved.push(twin);
            }
            model.scribble();
        }
        model.offload.leave(&model.compute).unwrap();
        alive.push(saved);
    }
    // Backward: mostly from the end, with jumps; some used twice, some never.
    let mut alive: Vec<Tensor> = if program.backward_by_pass {
        alive.into_iter().rev().flatten().collect()
    } else {
        alive.into_iter().flatten().collect()
    };
    while !alive.is_empty() {
        let back = if dice.roll(4) == 0 { dice.roll(alive.len()) } else { dice.roll(alive.len().min(3)) };
        let tensor = alive.remove(alive.len() - 1 - back);
        match dice.roll(8) {
            0 => {}
            1 => {
                model.load(tensor).unwrap();
                model.scribble();
                model.load(tensor).unwrap();
            }
            _ => model.load(tensor).unwrap(),
        }
        model.release(tensor).unwrap();
        model.scribble();
    }
    assert!(model.held.is_empty(), "all memory is back");
    model.wrong_words()
}

fn any_order_of_use_gives_the_right_bytes(on: &Subject) {
    let cases = cases(30);
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    runner
        .run(&programs(), |program| {
            prop_assert_eq!(run_program(&on.another(), &program), 0, "words differ");
            Ok(())
        })
        .unwrap();
}

/// Layers, and for each what it saves: bytes, whether that leaves, when it is freed and when it is fetched.
type Routed = Vec<Vec<(u64, bool, u32, u32)>>;

fn run_routed(on: &Subject, layers: &Routed) -> u64 {
    let mut model = Model::full(on, 1);
    for pass in 0..2u8 {
        let mut saved: Vec<Vec<Tensor>> = Vec::new();
        for (i, tensors) in layers.iter().enumerate() {
            model.offload.enter(i as u32, &model.compute).unwrap();
            let mut own = Vec::new();
            for (t, &(words, leaves, free, fetch)) in tensors.iter().enumerate() {
                let route = Route { leaves, free_at: i as u32 + 1 + free, fetch_at: i as u32 + fetch };
                let value = 1 + pass * 100 + (i * 7 + t) as u8;
                own.push(model.save_by(words * WORD, value, true, Some(route)).unwrap());
            }
            model.offload.leave(&model.compute).unwrap();
            let dropped = model.offload.free_before(i as u32 + 1).unwrap();
            model.drop_sources(dropped);
            model.scribble();
            saved.push(own);
        }
        for own in saved.iter().rev() {
            for &tensor in own.iter().rev() {
                model.load(tensor).unwrap();
                model.release(tensor).unwrap();
                model.scribble();
            }
        }
        assert!(model.held.is_empty(), "everything came back");
    }
    model.wrong_words()
}

fn any_routes_give_the_right_bytes(on: &Subject) {
    let tensor = (1u64..300, prop::bool::weighted(0.7), 0u32..4, 0u32..4);
    let layers = prop::collection::vec(prop::collection::vec(tensor, 0..5), 1..6);
    let mut runner = TestRunner::new(Config { cases: cases(24), failure_persistence: None, ..Config::default() });
    runner
        .run(&layers, |layers| {
            prop_assert_eq!(run_routed(&on.another(), &layers), 0, "words differ");
            Ok(())
        })
        .unwrap();
}

fn a_late_store_holds_what_its_route_lets_go_of(on: &Subject) {
    on.fault.on(Call::Copy, 0, DELAY);
    let layers = vec![vec![(64, true, 0, 0), (64, true, 1, 1)], vec![(64, true, 0, 0)]];
    assert_eq!(run_routed(on, &layers), 0);
}

fn a_late_store_holds_the_reuse_of_its_source(on: &Subject) {
    let mut model = Model::full(on, 4096);
    on.fault.on(Call::Copy, 0, DELAY);
    let first = model.save(4096, 1, true).unwrap();
    let second = model.save(4096, 2, true).unwrap();
    assert!(!model.held.contains_key(&first.entry), "a window of bytes later its source is freed");
    model.scribble();
    for tensor in [second, first] {
        model.load(tensor).unwrap();
    }
    assert_eq!(model.wrong_words(), 0);
}

fn a_late_store_holds_the_fetch_of_its_entry(on: &Subject) {
    let mut model = Model::full(on, 1);
    on.fault.on(Call::Copy, 0, DELAY);
    // Freed at once: nothing but its own store stands between it and its fetch.
    let tensor = model.save(4096, 1, true).unwrap();
    assert!(model.held.is_empty());
    model.load(tensor).unwrap();
    assert_eq!(model.wrong_words(), 0);
}

fn a_late_store_holds_the_fetch_on_another_stream(on: &Subject) {
    let mut model = Model::full(on, 1);
    on.fault.on(Call::Copy, 0, DELAY);
    let tensor = model.save(4096, 1, true).unwrap();
    // The stream it was saved on waits for its store; this one does not.
    model.stream = on.stream("another computation").unwrap();
    model.compute = Compute::on_stream(model.stream.clone());
    // Memory of this stream's own: torch has a pool for each.
    model.arena = Arena { buffer: on.alloc(1 << 20).unwrap(), free: Vec::new(), end: 0 };
    model.load(tensor).unwrap();
    assert_eq!(model.wrong_words(), 0);
}

fn a_late_fetch_holds_the_use_of_its_bytes(on: &Subject) {
    let mut model = Model::full(on, 8192);
    let tensors: Vec<Tensor> = (1..6).map(|value| model.save(4096, value, true).unwrap()).collect();
    for nth in 0..3 {
        on.fault.on(Call::Copy, nth, DELAY);
    }
    for &tensor in tensors.iter().rev() {
        model.load(tensor).unwrap();
    }
    assert!(model.fetched >= 3 * 4096);
    assert_eq!(model.wrong_words(), 0);
}

fn a_late_fetch_holds_the_next_store_into_its_block(on: &Subject) {
    let mut model = Model::full(on, 1);
    let tensor = model.save(4096, 1, true).unwrap();
    on.fault.on(Call::Copy, 0, DELAY);
    model.load(tensor).unwrap();
    model.release(tensor).unwrap();
    // The block is free and its fetch still reads it. Another computation's stream knows nothing of that fetch.
    let other = on.stream("another computation").unwrap();
    let next = on.alloc(4096).unwrap().all();
    on.launch(&other, &Kernel::Fill { dst: next.clone(), byte: 9 }).unwrap();
    let key =
        Key { storage: 99, storage_bytes: 4096, addr: next.addr() as u64, start_bytes: 0, bytes: 4096, version: 0 };
    model.offload.save(key, (true, true), None, || Ok(next), &Compute::on_stream(other)).unwrap();
    assert_eq!(model.wrong_words(), 0, "the fetch had the old bytes");
}

fn a_late_computation_holds_the_store_of_what_it_makes(on: &Subject) {
    let mut model = Model::full(on, 1);
    on.launch(&model.stream, &Kernel::Spin { ns: 25_000_000 }).unwrap();
    let tensor = model.save(4096, 1, true).unwrap();
    model.scribble();
    model.load(tensor).unwrap();
    assert_eq!(model.wrong_words(), 0);
}

fn late_use_of_freed_memory_holds_the_fetch_into_it(on: &Subject) {
    let mut model = Model::full(on, 1);
    let tensor = model.save(4096, 1, true).unwrap();
    // The memory it left is in use on the computation's stream until after the spin.
    let last_use = model.arena.take(4096);
    on.launch(&model.stream, &Kernel::Spin { ns: 25_000_000 }).unwrap();
    model.fill(&last_use, 0xDD);
    model.arena.give(&last_use);
    model.load(tensor).unwrap();
    assert_eq!(model.wrong_words(), 0, "the fetch came after the last use of its memory");
}

fn tensors_of_many_chunks_travel_whole(on: &Subject) {
    let mut model = Model::full(on, 1);
    model.arena.buffer = on.alloc(48 << 20).unwrap();
    let (large, small) = (model.save((18 << 20) + WORD, 7, true).unwrap(), model.save(4096, 8, true).unwrap());
    model.scribble();
    model.load(small).unwrap();
    model.load(large).unwrap();
    assert_eq!(model.wrong_words(), 0);
    let stats = model.offload.stats().unwrap();
    assert_eq!((stats.stored_bytes, stats.fetched_bytes), ((18 << 20) + WORD + 4096, (18 << 20) + WORD + 4096));
}

fn what_is_never_used_gives_everything_back(on: &Subject) {
    let on = &on.another();
    {
        let mut model = Model::full(on, 8192);
        on.fault.on(Call::Copy, 1, DELAY);
        // Some stored, some under way, some waiting; some fetched ahead and never used.
        let tensors: Vec<Tensor> = (1..8).map(|value| model.save(4096, value, true).unwrap()).collect();
        model.load(tensors[3]).unwrap();
        for tensor in tensors {
            model.release(tensor).unwrap();
            model.scribble();
        }
        assert!(model.held.is_empty());
        assert_eq!(model.wrong_words(), 0);
    }
    on.assert_empty();
}

fn no_pinned_memory_keeps_the_tensor(on: &Subject) {
    let options = OffloadOptions { fraction: Some(1.0), max_in_flight_bytes: Some(1) };
    let mut model = Model::within(on, options, Some(10_000));
    let first = model.save(8192, 1, true).unwrap();
    let memory = model.arena.take(8192);
    model.fill(&memory, 2);
    let key =
        Key { storage: 77, storage_bytes: 8192, addr: memory.addr() as u64, start_bytes: 0, bytes: 8192, version: 0 };
    let outcome =
        model.offload.save(key, (true, true), None, || panic!("nothing is copied"), &model.compute.clone()).unwrap();
    let reason = outcome.exhausted.expect("the budget is spent");
    assert_eq!((reason.requested_bytes, outcome.saved.offload), (8192, false));
    assert!(reason.pinned_bytes <= 10_000);
    model.held.insert(outcome.saved.entry, memory);
    let second = Tensor { save: outcome.saved.save, entry: outcome.saved.entry, value: 2, bytes: 8192 };
    for tensor in [second, first] {
        model.load(tensor).unwrap();
        model.release(tensor).unwrap();
    }
    assert_eq!(model.wrong_words(), 0);
    let third = model.save(8192, 3, true).unwrap();
    assert!(!model.held.contains_key(&third.entry), "with the block back, tensors leave again");
}

fn a_refused_copy_is_told_and_the_rest_goes_on(on: &Subject) {
    let mut model = Model::full(on, 1);
    on.fault.on(Call::Copy, 0, Misbehaviour::Fail);
    device_error(model.save(4096, 1, true));
    let tensor = model.save(4096, 2, true).unwrap();
    on.fault.on(Call::Copy, 0, Misbehaviour::Fail);
    device_error(model.load(tensor));
    on.fault.on(Call::Pin, 0, Misbehaviour::Fail);
    let large = model.save(2 << 20, 3, true);
    assert!(large.is_err(), "a pin that fails for another reason than memory is an error: {:?}", large.is_ok());
    let tensor = model.save(4096, 4, true).unwrap();
    model.load(tensor).unwrap();
    assert_eq!(model.wrong_words(), 0);
    assert!(matches!(model.offload.open(1 << 40, &model.compute), Err(Error::InvalidOption { .. })));
}

/// The store of an earlier tensor fails when a later one is saved. The caller may free the later one's memory at once.
fn a_save_that_fails_leaves_its_source_alone(on: &Subject) {
    let mut model = Model::full(on, 4096);
    on.fault.on(Call::Copy, 0, Misbehaviour::Fail);
    model.save(4096, 1, true).unwrap();
    device_error(model.save(4096, 2, true));
    // On a checked device this is a race with a store that still reads the memory.
    model.fill(&model.arena.buffer.region(4096, 4096).unwrap(), 0xEE);
    on.finish(&model.stream).unwrap();
    let tensor = model.save(4096, 3, true).unwrap();
    model.load(tensor).unwrap();
    assert_eq!(model.wrong_words(), 0);
}

fn later_passes_make_nothing(on: &Subject) {
    let mut model = Model::full(on, 8192);
    let pass = |model: &mut Model<'_>| {
        model.offload.enter(0, &model.compute).unwrap();
        let tensors: Vec<Tensor> = (1..12).map(|value| model.save(4096, value, true).unwrap()).collect();
        model.offload.leave(&model.compute).unwrap();
        for tensor in tensors.into_iter().rev() {
            model.load(tensor).unwrap();
            model.release(tensor).unwrap();
        }
        on.finish(&model.stream).unwrap();
        model.offload.stats().unwrap();
    };
    (0..2).for_each(|_| pass(&mut model));
    let before = on.counters();
    (0..40).for_each(|_| pass(&mut model));
    let after = on.counters();
    assert_eq!((after.allocations, after.pins, after.streams), (before.allocations, before.pins, before.streams));
    // How many events are out at once depends on how far the computation is behind: at most all of a pass.
    assert!(after.events < 200, "{} events in 42 passes of 11 tensors", after.events);
}

fn events_come_back_where_there_are_no_layers(on: &Subject) {
    let mut model = Model::full(on, 1);
    for value in 0..700u32 {
        on.launch(&model.stream, &Kernel::Spin { ns: 1000 }).unwrap();
        let tensor = model.save(4096, value as u8, true).unwrap();
        model.load(tensor).unwrap();
        model.release(tensor).unwrap();
    }
    // At most 257 waits of two events each are unread at a time; without reading there would be 1400.
    let events = on.counters().events;
    assert!(events < 800, "{events} events");
    assert_eq!(model.wrong_words(), 0);
}
