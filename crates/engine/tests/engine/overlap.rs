//! Overlapped steps: whatever is offered when, the bits are those of a plain step, and nobody reads a weight too early.

use std::time::{Duration, Instant};

use crate::common::overlapped::{Way, commit, committed, homes, offer, offer_all, order, tell, until};
use crate::common::trial::{Rig, Scenario, Tensor, group_tensors, mixed_tensors};
use crate::common::{Subject, cases};
use forebay::Error;
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::{Dtype, Kernel, Region, Rule};
use forebay::optimizer::{HostShare, Optimizer, Placement};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

forebay_device::on_devices! {
    every:
        any_order_of_offers_gives_the_bits_of_a_plain_step,
        every_placement_gives_the_bits_of_a_plain_step,
        delays_anywhere_change_nothing,
        updates_wait_for_the_work_that_makes_gradients,
        a_gradient_that_is_not_final_holds_up_no_other,
        what_is_needed_first_is_updated_first,
        a_deep_ring_leaves_room_for_what_is_needed_first,
        who_waits_for_a_tensor_reads_its_new_weights,
        a_wait_lasts_until_the_update_was_submitted,
        gradients_are_told_when_nothing_reads_them,
        many_steps_allocate_nothing,
        a_step_without_a_stream_is_over_when_it_was_waited_for,
        two_optimizers_share_a_ring,
        tensors_may_change_their_groups,
        slots_are_changed_while_there_is_no_ring;
}

const EARLY: Duration = Duration::from_millis(100);

/// Some steps, in their ways or plain, compared with plain ones.
fn check(on: &Subject, scenario: Scenario, ways: &[Option<Way>], placement: Placement) {
    let rig = Rig::placed(on, scenario, ways.len(), placement);
    for (at, way) in ways.iter().enumerate() {
        match way {
            Some(way) => committed(&rig, at, way).unwrap(),
            None => rig.step(at).unwrap(),
        }
    }
    rig.synchronize();
    rig.assert_idle();
    rig.assert_exact(ways.len());
}

fn ways(tensors: usize) -> impl Strategy<Value = Vec<Option<Way>>> {
    let all: Vec<usize> = (0..tensors).collect();
    let way = (
        prop::collection::vec(-3..tensors as i64, tensors),
        prop::sample::subsequence(all, 0..=tensors).prop_shuffle(),
    );
    let way = way.prop_map(|(need, offered)| Way { need, offered });
    prop::collection::vec(prop::option::weighted(0.8, way), 1..4)
}

fn sometimes_missing(step: usize, tensor: usize) -> bool {
    (3 * step + tensor).is_multiple_of(5)
}

fn run<S: Strategy>(short: u32, strategy: S, test: impl Fn(S::Value)) {
    let mut runner = TestRunner::new(ProptestConfig { cases: cases(short), ..ProptestConfig::default() });
    let outcome = runner.run(&strategy, |value| {
        test(value);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

fn any_order_of_offers_gives_the_bits_of_a_plain_step(on: &Subject) {
    let tensors = mixed_tensors().len();
    let rules = prop::sample::select(vec!["adamw", "sgd", "lion"]);
    let strategy = (ways(tensors), 2..6usize, rules, prop::option::of(1..tensors), any::<bool>());
    run(12, strategy, |(ways, slots, rule, second_table, second_resident)| {
        let scenario = Scenario::new(mixed_tensors(), slots, 8192).with(Rule::named(rule).unwrap());
        let scenario = Scenario { second_table, second_resident, missing: sometimes_missing, ..scenario };
        check(on, scenario, &ways, Placement::Stream);
    });
}

/// Where the host takes part, gradients of what is not resident are handed over at the commit.
fn every_placement_gives_the_bits_of_a_plain_step(on: &Subject) {
    let hybrid = |share| Placement::Hybrid(share);
    let placements = vec![
        Placement::Resident,
        Placement::Host,
        hybrid(HostShare::Auto),
        hybrid(HostShare::Fixed(0.5)),
        hybrid(HostShare::Fixed(0.0)),
        hybrid(HostShare::Fixed(1.0)),
    ];
    let tensors = group_tensors().len();
    let strategy = (ways(tensors), prop::sample::select(placements), prop::option::of(1..tensors), any::<bool>());
    run(16, strategy, |(mut ways, placement, second_table, on_host)| {
        let mut scenario = Scenario::new(group_tensors(), 3, 8192);
        let second_resident = second_table.is_some();
        scenario = Scenario { second_table, second_resident, missing: sometimes_missing, ..scenario };
        let first_resident = if placement == Placement::Resident { 0 } else { second_table.unwrap_or(tensors) };
        if placement.host_share().is_some() {
            ways.iter_mut().flatten().for_each(|way| way.offered.retain(|&tensor| tensor >= first_resident));
            scenario.tensors[..first_resident].iter_mut().step_by(2).for_each(|tensor| tensor.on_host = on_host);
        }
        check(on, scenario, &ways, placement);
    });
}

fn delays_anywhere_change_nothing(on: &Subject) {
    let calls = prop::sample::select(vec![Call::Copy, Call::Launch, Call::Record, Call::Wait]);
    let delays = prop::collection::vec((calls, 0..40u64), 1..4);
    let tensors = group_tensors().len();
    run(6, (ways(tensors), delays, prop::option::of(1..tensors)), |(ways, delays, second_table)| {
        for (call, nth) in delays {
            on.fault.on(call, nth, Misbehaviour::Late { ns: 10_000_000 });
        }
        let scenario = Scenario::new(group_tensors(), 3, 8192);
        let scenario = Scenario { second_table, second_resident: true, ..scenario };
        check(on, scenario, &ways, Placement::Stream);
        on.fault.clear();
    });
}

/// Gradients are made on the caller's stream, late, as they are offered or before the commit.
fn updates_wait_for_the_work_that_makes_gradients(on: &Subject) {
    for (placement, offered) in
        [(Placement::Stream, vec![9, 2, 0, 5]), (Placement::Stream, vec![]), (Placement::Host, vec![])]
    {
        let second_resident = placement == Placement::Stream;
        let scenario = Scenario { second_table: Some(7), second_resident, ..Scenario::new(group_tensors(), 3, 8192) };
        let rig = Rig::placed(on, scenario, 1, placement).warm();
        let tensors = rig.scenario.tensors.len();
        let made: Vec<_> = (0..tensors)
            .map(|tensor| {
                let grad = rig.grad(0, tensor).unwrap();
                let source = on.upload(&on.download(&grad));
                on.fill(&grad, 0xff);
                (source, grad)
            })
            .collect();
        let make = |tensor: usize| {
            on.launch(&rig.compute, &Kernel::Spin { ns: 10_000_000 }).unwrap();
            on.copy(&rig.compute, &made[tensor].0.all(), &made[tensor].1).unwrap();
        };
        rig.optimizer.overlap_begin(&order(&rig, &vec![0; tensors]), &rig.scenario.groups_at(0)).unwrap();
        for &tensor in &offered {
            make(tensor);
            offer(&rig, 0, tensor).unwrap();
        }
        (0..tensors).filter(|tensor| !offered.contains(tensor)).for_each(make);
        commit(&rig, 0, &offered).unwrap();
        rig.synchronize();
        rig.assert_exact(1);
    }
}

/// Tensors of a chunk each, so that each is a unit of its own.
fn apart(tensors: usize, slots: usize) -> Scenario {
    // Two columns of 1024 elements fill a slot; types differ where columns must, so that no two share a chunk.
    Scenario::new(vec![Tensor::f32(1024); tensors], slots, 8192)
}

fn a_gradient_that_is_not_final_holds_up_no_other(on: &Subject) {
    let rig = Rig::new(on, apart(4, 2), 1).warm();
    let optimizer = &rig.optimizer;
    optimizer.overlap_begin(&order(&rig, &[3, 2, 1, 0]), &rig.scenario.groups_at(0)).unwrap();
    offer(&rig, 0, 2).unwrap();
    until("the first update", || optimizer.overlap_stats().early_units == 1);
    // Needed before all others, and not final for a while.
    let late = on.stream("late").unwrap();
    let event = on.event().unwrap();
    on.record(&event, &rig.compute).unwrap();
    on.wait(&late, &event).unwrap();
    on.launch(&late, &Kernel::Spin { ns: 300_000_000 }).unwrap();
    let binding = rig.bindings(0)[3].clone().unwrap();
    optimizer.overlap_offer((0, 3), binding, Vec::new(), Some(&late)).unwrap();
    offer(&rig, 0, 0).unwrap();
    until("an update beside a gradient that is awaited", || optimizer.overlap_stats().early_units == 2);
    // Those of the commit would keep it out of the ring, so they come after it.
    on.launch(&rig.compute, &Kernel::Spin { ns: 600_000_000 }).unwrap();
    commit(&rig, 0, &[0, 2, 3]).unwrap();
    optimizer.overlap_finish().unwrap();
    let ran: Vec<usize> = optimizer.overlap_plan().iter().map(|unit| unit.tensors[0]).collect();
    assert_eq!(ran, [2, 0, 3, 1], "{:?}", optimizer.overlap_plan());
    rig.synchronize();
    rig.assert_exact(1);
}

fn what_is_needed_first_is_updated_first(on: &Subject) {
    for placement in [Placement::Stream, Placement::Host, Placement::Hybrid(HostShare::Fixed(0.5))] {
        let need = [4, 0, 3, 1, 2, 5, 7, 6];
        let rig = Rig::placed(on, apart(8, 2), 1, placement).warm();
        committed(&rig, 0, &Way { need: need.to_vec(), offered: Vec::new() }).unwrap();
        rig.optimizer.overlap_finish().unwrap();
        let ran: Vec<i64> = rig.optimizer.overlap_plan().iter().map(|unit| need[unit.tensors[0]]).collect();
        let both = matches!(placement, Placement::Hybrid(_));
        assert!(both || ran.is_sorted(), "{placement:?}: {ran:?}");
        let stats = rig.optimizer.overlap_stats();
        assert_eq!((stats.early_units, stats.late_units, stats.pending), (0, 8, 0));
        assert!(stats.begin_ns < stats.commit_ns && stats.commit_ns < stats.end_ns, "{stats:?}");
        rig.synchronize();
        rig.assert_exact(1);
    }
}

/// While the wire is slow, only some slots of a deep ring are fetched into ahead: what becomes final meanwhile and is needed
/// first comes right after those.
fn a_deep_ring_leaves_room_for_what_is_needed_first(on: &Subject) {
    let rig = Rig::new(on, apart(12, 16), 1).warm();
    let optimizer = &rig.optimizer;
    let need: Vec<i64> = (0..12).rev().collect();
    optimizer.overlap_begin(&order(&rig, &need), &rig.scenario.groups_at(0)).unwrap();
    on.fault.on(Call::Copy, 0, Misbehaviour::Late { ns: 400_000_000 });
    offer_all(&rig, 0, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]).unwrap();
    until("what is fetched ahead", || optimizer.overlap_stats().early_units == 4);
    offer(&rig, 0, 11).unwrap();
    commit(&rig, 0, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11]).unwrap();
    optimizer.overlap_finish().unwrap();
    on.fault.clear();
    let ran: Vec<usize> = optimizer.overlap_plan().iter().map(|unit| unit.tensors[0]).collect();
    assert_eq!(ran.iter().position(|&tensor| tensor == 11), Some(4), "{ran:?}");
    rig.synchronize();
    rig.assert_exact(1);
}

/// Each weight is read on a stream of its own right after the wait for its tensor; updates and stores are late.
fn who_waits_for_a_tensor_reads_its_new_weights(on: &Subject) {
    for placement in [Placement::Stream, Placement::Host, Placement::Hybrid(HostShare::Fixed(0.5)), Placement::Resident]
    {
        let scenario = Scenario::new(group_tensors(), 3, 8192);
        let tensors = scenario.tensors.len();
        let rig = Rig::placed(on, scenario, 1, placement).warm();
        let offered = if placement.host_share().is_some() { Vec::new() } else { (0..tensors / 2).collect() };
        for nth in [0, 2, 5] {
            on.fault.on(Call::Launch, nth, Misbehaviour::Late { ns: 30_000_000 });
        }
        committed(&rig, 0, &Way { need: (0..tensors as i64).collect(), offered }).unwrap();
        let readers = [on.stream("reader").unwrap(), on.stream("another").unwrap()];
        let read: Vec<Region> = (0..tensors)
            .map(|tensor| {
                let (weight, reader) = (rig.weight(tensor), &readers[tensor % 2]);
                rig.optimizer.overlap_wait(Some(&[rig.scenario.place(tensor)]), Some(reader)).unwrap();
                let into = on.pinned(weight.bytes());
                on.copy(reader, &weight, &into).unwrap();
                into
            })
            .collect();
        on.fault.clear();
        readers.iter().for_each(|reader| on.finish(reader).unwrap());
        rig.optimizer.overlap_wait(None, Some(&rig.compute)).unwrap();
        rig.synchronize();
        rig.assert_exact(1);
        for (tensor, read) in read.into_iter().enumerate() {
            assert_eq!(on.host_bytes(&read).unwrap(), on.download(&rig.weight(tensor)), "{placement:?} {tensor}");
        }
    }
}

fn a_wait_lasts_until_the_update_was_submitted(on: &Subject) {
    let rig = Rig::new(on, apart(6, 2), 1).warm();
    let need: Vec<i64> = (0..6).collect();
    let optimizer = &rig.optimizer;
    assert!(!optimizer.overlap_wait(None, Some(&rig.compute)).unwrap(), "there was no step");
    optimizer.overlap_begin(&order(&rig, &need), &rig.scenario.groups_at(0)).unwrap();
    // Recomputation in backward: what is not handed over is not waited for.
    assert!(!optimizer.overlap_wait(Some(&[(0, 5)]), Some(&rig.compute)).unwrap());
    on.launch(&rig.compute, &Kernel::Spin { ns: 400_000_000 }).unwrap();
    let since = Instant::now();
    commit(&rig, 0, &[]).unwrap();
    assert!(since.elapsed() < EARLY, "a commit waits for nothing");
    // Two fit the ring and are submitted at once; the sixth needs a slot that comes back only after the spin.
    assert!(optimizer.overlap_wait(Some(&[(0, 0)]), Some(&rig.compute)).unwrap());
    assert!(since.elapsed() < EARLY, "the first needs no slot of another");
    assert!(optimizer.overlap_wait(Some(&[(0, 5)]), Some(&rig.compute)).unwrap());
    assert!(since.elapsed() >= Duration::from_millis(390), "{:?}", since.elapsed());
    optimizer.overlap_wait(None, None).unwrap();
    optimizer.overlap_finish().unwrap();
    assert!(!optimizer.overlap_wait(None, None).unwrap() && optimizer.overlap_is_quiet());
    rig.synchronize();
    rig.assert_exact(1);
}

/// Gradients are overwritten as soon as they are told.
fn gradients_are_told_when_nothing_reads_them(on: &Subject) {
    let scenario = Scenario { second_table: Some(7), second_resident: true, ..Scenario::new(group_tensors(), 3, 8192) };
    let rig = Rig::new(on, scenario, 1).warm();
    let tensors = rig.scenario.tensors.len();
    for nth in [0, 1, 4] {
        on.fault.on(Call::Launch, nth, Misbehaviour::Late { ns: 20_000_000 });
    }
    let optimizer = &rig.optimizer;
    optimizer.overlap_begin(&order(&rig, &vec![0; tensors]), &rig.scenario.groups_at(0)).unwrap();
    let (mut told, mut bytes) = (Vec::new(), 0);
    let mut take = || {
        for home in optimizer.overlap_updated().unwrap() {
            let tensor = homes(&rig).iter().position(|&of| of == home).unwrap();
            let grad = rig.grad(0, tensor).unwrap();
            bytes += if optimizer.overlap_stats().commit_ns == 0 { grad.bytes() } else { 0 };
            on.fill(&grad, 0xff);
            told.push(tensor);
        }
        told.len()
    };
    offer_all(&rig, 0, &[3, 1, 8, 2, 0, 11]).unwrap();
    until("the offered ones", || take() >= 3);
    offer_all(&rig, 0, &[4]).unwrap();
    let early = take();
    commit(&rig, 0, &[3, 1, 8, 2, 0, 11, 4]).unwrap();
    until("all of them", || take() == tensors);
    assert!(early < tensors && optimizer.overlap_stats().freed_bytes == bytes && bytes > 0);
    told.sort_unstable();
    assert_eq!(told, (0..tensors).collect::<Vec<_>>(), "each is told once");
    on.fault.clear();
    rig.synchronize();
    rig.assert_exact(1);
}

fn many_steps_allocate_nothing(on: &Subject) {
    for placement in [Placement::Stream, Placement::Hybrid(HostShare::Fixed(0.5)), Placement::Host] {
        let on = on.another();
        let scenario =
            Scenario { second_table: Some(7), second_resident: true, ..Scenario::new(group_tensors(), 3, 8192) };
        let rig = Rig::placed(&on, scenario, 1, placement);
        let tensors = rig.scenario.tensors.len();
        let step = |offered: &[usize]| {
            let offered = offered.iter().copied().filter(|&tensor| placement == Placement::Stream || tensor >= 7);
            committed(&rig, 0, &Way { need: vec![0; tensors], offered: offered.collect() }).unwrap();
            rig.optimizer.overlap_wait(Some(&[(0, 0)]), Some(&rig.compute)).unwrap();
            tell(&rig);
        };
        step(&[]);
        step(&[0, 1, 2, 3, 4, 5]);
        rig.synchronize();
        let made = on.counters();
        for i in 0..20 {
            if i % 3 == 0 {
                on.fault.on(Call::Launch, i % 5, Misbehaviour::Late { ns: 2_000_000 });
            }
            let offered: Vec<usize> = (0..tensors).filter(|tensor| !(tensor + i as usize).is_multiple_of(4)).collect();
            step(&offered);
        }
        rig.optimizer.synchronize().unwrap();
        assert_eq!(on.counters(), made, "{placement:?}");
    }
}

/// As on the CPU with torch: gradients are final when they are offered, and waits are the host's.
fn a_step_without_a_stream_is_over_when_it_was_waited_for(on: &Subject) {
    let rig = Rig::new(on, Scenario::new(group_tensors(), 3, 8192), 2).warm();
    let tensors = rig.scenario.tensors.len();
    for step in 0..2 {
        let optimizer = &rig.optimizer;
        optimizer.overlap_begin(&order(&rig, &vec![1; tensors]), &rig.scenario.groups_at(step)).unwrap();
        let mut bindings = rig.bindings(step);
        for (tensor, binding) in bindings.iter_mut().enumerate().take(5) {
            optimizer.overlap_offer((0, tensor), binding.take().unwrap(), Vec::new(), None).unwrap();
        }
        optimizer.overlap_commit(rig.tables(bindings), None, rig.flags(step)).unwrap();
        optimizer.overlap_wait(None, None).unwrap();
        // All weights are there, and all gradients may go.
        assert_eq!(optimizer.overlap_updated().unwrap().len(), tensors);
        for tensor in 0..tensors {
            on.fill(&rig.grad(step, tensor).unwrap(), 0xff);
        }
    }
    rig.synchronize();
    rig.assert_exact(2);
}

fn two_optimizers_share_a_ring(on: &Subject) {
    let rigs: Vec<Rig<'_>> = (0..2).map(|_| Rig::new(on, Scenario::new(group_tensors(), 3, 8192), 3)).collect();
    let tensors = rigs[0].scenario.tensors.len() as i64;
    for step in 0..3 {
        let way = Way { need: (0..tensors).rev().collect(), offered: vec![5, 1, 3] };
        rigs.iter().for_each(|rig| committed(rig, step, &way).unwrap());
        rigs.iter().for_each(|rig| assert!(rig.optimizer.overlap_wait(None, Some(&rig.compute)).is_ok()));
    }
    for rig in &rigs {
        rig.synchronize();
        rig.assert_idle();
        rig.assert_exact(3);
    }
}

/// What is computed before a step goes by the groups of the step before.
fn tensors_may_change_their_groups(on: &Subject) {
    let scenario = Scenario::new(vec![Tensor::f32(500), Tensor::of(300, Dtype::Bf16, Dtype::F32).master()], 2, 8192);
    let outcome = |overlapped: bool| {
        let rig = Rig::new(on, scenario.clone(), 4);
        for step in 0..4 {
            let mut bindings = rig.bindings(step);
            bindings.iter_mut().enumerate().for_each(|(i, of)| of.as_mut().unwrap().group = ((i + step) % 3) as u32);
            if !overlapped {
                rig.step_with(step, bindings).unwrap();
                continue;
            }
            let optimizer: &Optimizer = &rig.optimizer;
            optimizer.overlap_begin(&[vec![0, 1]], &rig.scenario.groups_at(step)).unwrap();
            let first = bindings[0].take().unwrap();
            optimizer.overlap_offer((0, 0), first, Vec::new(), Some(&rig.compute)).unwrap();
            optimizer.overlap_commit(rig.tables(bindings), Some(&rig.compute), rig.flags(step)).unwrap();
        }
        rig.synchronize();
        rig.outcome()
    };
    assert_eq!(outcome(true), outcome(false));
}

fn slots_are_changed_while_there_is_no_ring(on: &Subject) {
    let rig = Rig::new(on, Scenario::new(group_tensors(), 3, 8192), 1).warm();
    let bytes = rig.optimizer.ring_bytes();
    let refused =
        |slots: usize| matches!(rig.optimizer.set_slots(slots), Err(Error::InvalidOption { option: "slots", .. }));
    assert!(refused(6));
    rig.optimizer.set_slots(3).unwrap();
    rig.optimizer.close_ring().unwrap();
    assert!(refused(1));
    rig.optimizer.set_slots(6).unwrap();
    assert_eq!(rig.optimizer.ring_bytes(), 2 * bytes);
    rig.optimizer.open_ring(None).unwrap();
    assert_eq!((rig.optimizer.idle_slots().0, rig.stats().device_bytes), (6, 2 * bytes));
    committed(&rig, 0, &Way { need: vec![0; rig.scenario.tensors.len()], offered: vec![2] }).unwrap();
    rig.synchronize();
    rig.assert_exact(1);
}
