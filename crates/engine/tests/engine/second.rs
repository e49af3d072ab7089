//! A second copy of the pinned state: what is current, what it costs, and what an exchange leaves as it is.

use std::sync::Arc;

use crate::common::trial::{Rig, Scenario, Tensor, group_tensors};
use crate::common::{Subject, device_error};
use forebay::Error;
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::update::RULES;
use forebay::device::{self, Buffer, Dtype, Region};
use forebay::memory::Allocator;
use forebay::optimizer::Placement::{self, Host, Hybrid, Resident, Stream};
use forebay::optimizer::{HostShare, Optimizer, StateTable};
use forebay::plan::StepPlan;

forebay_device::on_devices! {
    every:
        steps_on_alternating_sides_are_exact,
        an_exchange_moves_columns_and_nothing_else,
        closing_keeps_state_and_counters_whichever_side_is_current,
        both_copies_are_counted_to_the_byte,
        a_second_copy_that_cannot_be_pinned_changes_nothing,
        a_save_has_the_side_of_its_moment,
        a_save_that_begins_on_one_side_waits_for_a_save_of_the_other,
        chunks_of_the_other_side_are_where_columns_will_be,
        without_a_second_copy_there_is_no_exchange;
}

const PINNED: [Placement; 3] = [Stream, Host, Hybrid(HostShare::Fixed(0.5))];

fn small() -> Scenario {
    let tensors =
        vec![Tensor::f32(1000), Tensor::of(300, Dtype::Bf16, Dtype::Bf16).master(), Tensor::f32(64).on_host()];
    Scenario { second_table: Some(1), ..Scenario::new(tensors, 3, 2048) }
}

/// All columns, in the order of the tensors, where they are now.
fn columns(rig: &Rig<'_>) -> Vec<Region> {
    let of = |tensor: usize| rig.scenario.columns(tensor).into_iter().map(move |column| (tensor, column.name));
    (0..rig.scenario.tensors.len()).flat_map(of).map(|(tensor, name)| rig.column(tensor, name)).collect()
}

/// What they hold; no store is under way.
fn values(on: &Subject, regions: &[Region]) -> Vec<Vec<u8>> {
    regions.iter().map(|region| on.host_bytes(region).unwrap()).collect()
}

fn counters(on: &Subject, rig: &Rig<'_>) -> Vec<Vec<u8>> {
    (0..rig.scenario.tensors.len()).map(|tensor| on.host_bytes(&rig.counter(tensor)).unwrap()).collect()
}

/// Writes the state to the other side and makes that the current one.
fn move_over(on: &Subject, rig: &Rig<'_>) {
    rig.synchronize();
    let state = values(on, &columns(rig));
    rig.optimizer.exchange().unwrap();
    rig.optimizer.protect_all().unwrap();
    columns(rig).iter().zip(&state).for_each(|(region, bytes)| on.write(bytes, region).unwrap());
}

fn steps_on_alternating_sides_are_exact(on: &Subject) {
    for (rule, placement) in RULES.into_iter().flat_map(|rule| PINNED.map(|placement| (rule, placement))) {
        let scenario = Scenario { second_table: Some(5), ..Scenario::new(group_tensors(), 3, 4096) };
        let rig = Rig::placed(on, scenario.with(rule), 4, placement);
        rig.optimizer.open_second().unwrap();
        for step in 0..4 {
            rig.step(step).unwrap();
            rig.assert_idle();
            let before = columns(&rig);
            move_over(on, &rig);
            let after = columns(&rig);
            let apart = |(a, b): (&Region, &Region)| a.bytes() == 0 || !a.overlaps(b);
            assert!(before.iter().zip(&after).all(apart), "the columns are still where they were");
            // What the other side holds does not matter to what follows.
            before.iter().for_each(|region| on.write(&vec![0xee; region.bytes() as usize], region).unwrap());
        }
        rig.assert_exact(4);
    }
}

fn an_exchange_moves_columns_and_nothing_else(on: &Subject) {
    for placement in PINNED {
        let rig = Rig::placed(on, small(), 3, placement);
        rig.steps(1);
        rig.optimizer.open_second().unwrap();
        rig.optimizer.open_second().unwrap();
        rig.synchronize();
        let (generation, first) = (rig.optimizer.generation(), columns(&rig));
        let (state, counted) = (values(on, &first), counters(on, &rig));
        let counter = rig.counter(1).addr();
        rig.optimizer.exchange().unwrap();
        assert!(rig.optimizer.generation() > generation);
        let second = columns(&rig);
        assert!(values(on, &second).concat().iter().all(|&byte| byte == 0), "a fresh copy is zeroed");
        assert_eq!((counters(on, &rig), rig.counter(1).addr()), (counted.clone(), counter), "counters stay");
        // A step changes one side only.
        rig.step(1).unwrap();
        rig.synchronize();
        assert!(values(on, &first) == state && values(on, &second) != values(on, &first));
        let (generation, other) = (rig.optimizer.generation(), values(on, &second));
        rig.optimizer.exchange().unwrap();
        assert!(rig.optimizer.generation() > generation);
        assert!(values(on, &columns(&rig)) == state && values(on, &second) == other);
        assert!(counters(on, &rig) != counted, "the step on the other side has counted");
    }
}

fn closing_keeps_state_and_counters_whichever_side_is_current(on: &Subject) {
    for (exchanges, placement) in [0, 1, 2].into_iter().flat_map(|count| PINNED.map(|placement| (count, placement))) {
        let on = on.another();
        // Without tensors on the host: with them a step ends before it returns.
        let rig = Rig::placed(&on, Scenario { tensors: small().tensors[..2].to_vec(), ..small() }, 5, placement);
        let pinned = rig.optimizer.pinned_bytes();
        rig.optimizer.open_second().unwrap();
        rig.steps(2);
        (0..exchanges).for_each(|_| move_over(&on, &rig));
        rig.step(2).unwrap();
        rig.synchronize();
        let (state, counted) = (values(&on, &columns(&rig)), counters(&on, &rig));
        let (generation, held) = (rig.optimizer.generation(), on.memory().unwrap());
        rig.optimizer.close_second().unwrap();
        assert!(!rig.optimizer.has_second());
        assert_eq!(rig.optimizer.pinned_bytes(), pinned);
        let state_bytes: u64 = (0..2).map(|table| slab_bytes(&rig.optimizer.plan(table).unwrap())).sum();
        on.assert_holds(held.allocated_bytes, held.pinned_bytes - state_bytes);
        assert_eq!(values(&on, &columns(&rig)), state);
        assert_eq!(counters(&on, &rig), counted);
        // The first slab is gone with the counters that were there.
        assert_eq!(rig.optimizer.generation() > generation, exchanges == 1);
        rig.optimizer.close_second().unwrap();
        rig.step(3).unwrap();
        rig.optimizer.open_second().unwrap();
        move_over(&on, &rig);
        rig.step(4).unwrap();
        // It waits for the stores of the step: what it leaves can be read.
        rig.optimizer.close_second().unwrap();
        values(&on, &columns(&rig));
        rig.synchronize();
        rig.assert_exact(5);
    }
}

/// Arenas and counters, in whole pages.
fn slab_bytes(plan: &StepPlan) -> u64 {
    let arenas: u64 = plan.arena_bytes().iter().map(|bytes| bytes.next_multiple_of(256)).sum();
    (arenas + 4 * plan.tensors().len() as u64).next_multiple_of(4096)
}

fn refusal(requested_bytes: u64, available_bytes: u64, budget_bytes: u64) -> device::Error {
    device::Error::OutOfPinnedBudget { requested_bytes, available_bytes, budget_bytes }
}

fn both_copies_are_counted_to_the_byte(on: &Subject) {
    for placement in PINNED {
        let needed = Rig::placed(on, small(), 2, placement).optimizer.pinned_bytes();
        let plan = |specs| StepPlan::new(specs, small().options).unwrap();
        let mut specs = small().specs();
        let second_table = plan(specs.split_off(1));
        let state = slab_bytes(&plan(specs)) + slab_bytes(&second_table);
        for missing in [0, 1] {
            let on = on.another();
            let budget = needed + state - missing;
            let rig = Rig::within(&on, small(), 2, placement, Some(budget)).unwrap();
            let pins = on.counters().pins;
            if missing == 1 {
                // Two copies are asked for, and all that is not state is in use.
                let expected = refusal(2 * state, budget - (needed - state), budget);
                assert_eq!(device_error(rig.optimizer.open_second()), expected, "{placement:?}");
                assert_eq!((on.counters().pins, rig.optimizer.has_second()), (pins, false));
                assert_eq!(rig.optimizer.pinned_bytes(), needed);
                assert!(rig.optimizer.exchange().is_err());
            } else {
                rig.optimizer.open_second().unwrap();
                assert_eq!((on.counters().pins, rig.optimizer.has_second()), (pins + 2, true));
                assert_eq!(rig.optimizer.pinned_bytes(), budget);
                assert_eq!(rig.stats().pinned_bytes, budget);
                // A table that is added later has two copies too.
                let added = slab_bytes(&second_table);
                let error = device_error(rig.optimizer.add(small().specs().split_off(1)));
                assert_eq!(error, refusal(2 * added, 0, budget), "{placement:?}");
                assert_eq!((on.counters().pins, rig.optimizer.pinned_bytes()), (pins + 2, budget));
                rig.optimizer.close_second().unwrap();
                assert_eq!(rig.optimizer.pinned_bytes(), needed);
            }
            rig.step(0).unwrap();
            rig.synchronize();
            rig.assert_exact(1);
        }
        let rig = Rig::placed(on, small(), 1, placement);
        rig.optimizer.open_second().unwrap();
        let before = rig.optimizer.pinned_bytes();
        let table = rig.optimizer.add(small().specs().split_off(1)).unwrap();
        assert_eq!(rig.optimizer.pinned_bytes() - before, 2 * slab_bytes(&second_table));
        let column = |rig: &Rig<'_>| rig.optimizer.column(table, 0, "exp_avg").unwrap().unwrap().addr();
        let first = column(&rig);
        rig.optimizer.exchange().unwrap();
        assert_ne!(column(&rig), first);
    }
    on.assert_empty();
}

fn a_second_copy_that_cannot_be_pinned_changes_nothing(on: &Subject) {
    let rig = Rig::new(on, small(), 2);
    rig.steps(1);
    let (needed, generation) = (rig.optimizer.pinned_bytes(), rig.optimizer.generation());
    for nth in 0..2 {
        on.fault.on(Call::Pin, nth, Misbehaviour::OutOfMemory);
        device_error(rig.optimizer.open_second());
        on.fault.clear();
        assert_eq!((rig.optimizer.pinned_bytes(), rig.optimizer.has_second()), (needed, false), "{nth}");
        assert!(rig.optimizer.exchange().is_err());
        assert_eq!(rig.optimizer.generation(), generation);
    }
    rig.optimizer.open_second().unwrap();
    let refused = rig.optimizer.pinned_bytes();
    // Nor does a table that cannot have both.
    on.fault.on(Call::Pin, 1, Misbehaviour::OutOfMemory);
    device_error(rig.optimizer.add(small().specs()));
    on.fault.clear();
    assert_eq!(rig.optimizer.pinned_bytes(), refused);
    rig.step(1).unwrap();
    rig.synchronize();
    rig.assert_exact(2);
}

/// What a snapshot has of these regions.
fn saved(snapshot: &forebay::snapshot::Snapshot, regions: &[Region]) -> Vec<Vec<u8>> {
    let buffer = Buffer::pageable(1 << 16).unwrap();
    snapshot.plan(regions);
    let read = |region: &Region| {
        let mut bytes = Vec::new();
        let look = |piece: &Region| {
            device::file::visit(piece, |part| bytes.extend_from_slice(part)).unwrap();
            Ok(())
        };
        snapshot.read(region, &buffer, 0, look).unwrap();
        bytes
    };
    regions.iter().map(read).collect()
}

/// Without room for a copy, a step that writes to the other side waits for nobody.
fn a_save_has_the_side_of_its_moment(on: &Subject) {
    for placement in PINNED {
        let rig = Rig::placed(on, small(), 4, placement);
        rig.optimizer.open_second().unwrap();
        for step in 0..4 {
            let (regions, budget) = (columns(&rig), 0);
            rig.synchronize();
            let kept = values(on, &regions);
            let snapshot = Optimizer::snapshot(&[&rig.optimizer], budget).unwrap();
            assert!(regions.iter().all(|region| region.bytes() == 0 || snapshot.covers(region)));
            move_over(on, &rig);
            assert!(!columns(&rig).iter().any(|region| snapshot.covers(region)));
            rig.step(step).unwrap();
            rig.synchronize();
            assert_eq!(rig.stats().save_stalls, 0);
            assert!(saved(&snapshot, &regions) == kept, "{placement:?}");
            snapshot.finish();
        }
        rig.assert_exact(4);
    }
}

/// A table remembers one save only: pages that the earlier one still needs are copied before the next begins, also those
/// of the side that is not current any more. The same before that side is given up.
fn a_save_that_begins_on_one_side_waits_for_a_save_of_the_other(on: &Subject) {
    let rig = Rig::new(on, small(), 4);
    rig.optimizer.open_second().unwrap();
    let snapshot = || Optimizer::snapshot(&[&rig.optimizer], u64::MAX).unwrap();
    rig.steps(1);
    rig.synchronize();
    let (regions, kept) = (columns(&rig), values(on, &columns(&rig)));
    let first = snapshot();
    move_over(on, &rig);
    let (others, second) = (columns(&rig), snapshot());
    assert!(first.is_safe(), "nothing is left that a step could change");
    move_over(on, &rig);
    rig.step(1).unwrap();
    rig.synchronize();
    assert!(saved(&first, &regions) == kept && saved(&second, &others) == kept);
    drop((first, second));
    let third = snapshot();
    rig.optimizer.exchange().unwrap();
    assert!(!third.is_safe());
    rig.optimizer.close_second().unwrap();
    assert!(third.is_safe());
}

/// The chunks of the other side make up the columns that an exchange gives.
fn chunks_of_the_other_side_are_where_columns_will_be(on: &Subject) {
    let (memory, rule) = (Allocator::new(on.device.clone()), RULES[0]);
    let scenario = Scenario::new(vec![Tensor::f32(1000), Tensor::f32(500).full().master()], 3, 2048);
    let plan = Arc::new(scenario.plan());
    let table = StateTable::pinned(&memory, rule, plan.clone()).unwrap();
    assert!(plan.chunks().iter().all(|chunk| table.other_chunk(chunk).is_err()));
    table.open_second(&memory).unwrap();
    let others: Vec<Vec<Region>> = plan.chunks().iter().map(|chunk| table.other_chunk(chunk).unwrap()).collect();
    assert!(plan.chunks().len() > 4);
    for (region, byte) in others.iter().flatten().zip(1u8..) {
        on.write(&vec![byte; region.bytes() as usize], region).unwrap();
    }
    table.exchange().unwrap();
    let mut at = 1u8;
    for (chunk, regions) in plan.chunks().iter().zip(&others) {
        for (index, region) in regions.iter().enumerate() {
            for piece in plan.pieces(chunk) {
                let (columns, (start, elements)) = (table.columns(piece.tensor), (piece.tensor_offset, piece.elements));
                let column = table.column(piece.tensor, columns[index].name).unwrap().unwrap();
                let part = column.slice(start * 4, elements * 4).unwrap();
                assert_eq!(on.host_bytes(&part).unwrap(), vec![at; part.bytes() as usize]);
            }
            assert_eq!(region.bytes(), chunk.elements * 4);
            at += 1;
        }
    }
    let back: Vec<Vec<Region>> = plan.chunks().iter().map(|chunk| table.other_chunk(chunk).unwrap()).collect();
    let apart = |(a, b): (&Region, &Region)| !a.overlaps(b) && a.bytes() == b.bytes();
    assert!(back.iter().flatten().zip(others.iter().flatten()).all(apart));
}

fn without_a_second_copy_there_is_no_exchange(on: &Subject) {
    for placement in [Stream, Resident] {
        let tensors = small().tensors[..2].to_vec();
        let rig = Rig::placed(on, Scenario { tensors, second_table: None, ..small() }, 1, placement);
        assert!(!rig.optimizer.has_second());
        rig.optimizer.close_second().unwrap();
        if placement == Resident {
            // What is resident has no copy, and none is pinned.
            rig.optimizer.open_second().unwrap();
            rig.optimizer.exchange().unwrap();
            assert_eq!((rig.optimizer.pinned_bytes(), rig.optimizer.generation()), (0, 0));
        } else {
            let said = rig.optimizer.exchange().unwrap_err();
            assert!(matches!(said, Error::InvalidOption { .. }), "{said}");
            assert!(said.to_string().contains("open a second one first"), "{said}");
        }
        rig.steps(1);
        rig.synchronize();
        rig.assert_exact(1);
    }
    let rig = Rig::new(on, small(), 1);
    rig.optimizer.open_second().unwrap();
    rig.optimizer.close().unwrap();
    assert!(!rig.optimizer.has_second() && rig.optimizer.open_second().is_err());
    assert_eq!(rig.optimizer.pinned_bytes(), 0);
}
