//! Optimizers that share rings and threads: each trains as if it were alone, and what they share goes with the last one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::trial::{Rig, Scenario, Tensor, mixed_tensors};
use crate::common::{Subject, cases, device_error, in_one_of_three, traced, under_sanitizer};
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::update::RULES;
use forebay::device::{Buffer, Dtype, Error, Kernel, Region};
use forebay::optimizer::Placement::{self, Host, Hybrid, Stream};
use forebay::optimizer::{HostShare, Optimizer, OptimizerOptions};
use forebay::trace::{Span, TraceOptions};

forebay_device::on_devices! {
    every:
        six_optimizers_have_one_ring,
        other_slots_sizes_and_devices_are_not_shared,
        the_pinned_ring_is_shared_and_counts_for_each,
        steps_in_turn_equal_steps_alone,
        steps_of_several_threads_equal_steps_alone,
        any_order_of_calls_equals_steps_alone,
        statistics_and_traces_are_one_user_s,
        who_waits_does_not_wait_for_others,
        a_failed_step_leaves_the_others_usable,
        a_failed_step_on_the_host_leaves_the_others_usable,
        a_late_failure_is_waited_for_by_its_own_user,
        the_first_user_s_memory_stays_until_the_last_one_goes,
        what_was_dropped_is_freed_though_others_keep_the_ring,
        a_ring_that_one_of_two_has_closed_goes_on,
        saves_and_steps_of_several_threads_end;
    cpu: a_ring_that_died_is_not_given_to_new_users;
}

const PLACEMENTS: [Placement; 3] = [Stream, Hybrid(HostShare::Fixed(0.5)), Host];

/// What powers are computed in, on the device and on the host: one of each for all optimizers of a device.
const POWERS_BYTES: u64 = 4096 * 4;

fn tensors(number: usize) -> Vec<Tensor> {
    match number % 3 {
        0 => vec![Tensor::f32(1000), Tensor::f32(30), Tensor::of(300, Dtype::Bf16, Dtype::Bf16).master()],
        1 => vec![Tensor::of(700, Dtype::F16, Dtype::F32).master(), Tensor::f32(64)],
        _ => vec![Tensor::f32(129).full(), Tensor::f32(900).on_host(), Tensor::f32(5)],
    }
}

/// The scenario of one of several optimizers: tensors and a rule of its own, the slots of all.
fn scenario(number: usize, slots: usize) -> Scenario {
    Scenario::new(tensors(number), slots, 2048).with(RULES[number % RULES.len()])
}

/// Optimizers that share everything that they can, each with a stream of its own to compute on.
fn rigs<'a>(on: &'a Subject, placements: &[Placement], slots: usize, steps: usize) -> Vec<Rig<'a>> {
    let rig = |(i, &placement): (usize, &Placement)| Rig::placed(on, scenario(i, slots), steps, placement);
    placements.iter().enumerate().map(rig).collect()
}

fn assert_exact(rigs: &[Rig<'_>], steps: usize) {
    for rig in rigs {
        rig.synchronize();
        rig.assert_exact(steps);
        rig.assert_idle();
    }
}

fn make(on: &Subject, placement: Placement, scenario: &Scenario, budget: Option<u64>) -> forebay::Result<Optimizer> {
    let options = OptimizerOptions {
        placement,
        plan: scenario.options,
        pinned_budget_bytes: budget,
        ..OptimizerOptions::default()
    };
    let optimizer = Optimizer::new(on.device.clone(), scenario.rule, options)?;
    if placement.streams() {
        optimizer.open_ring(None)?;
    }
    optimizer.add(scenario.specs())?;
    Ok(optimizer)
}

fn six_optimizers_have_one_ring(on: &Subject) {
    let scenario = scenario(0, 3);
    let first = make(on, Stream, &scenario, None).unwrap();
    let (alone, made, ring) = (on.memory().unwrap(), on.counters(), first.ring_bytes());
    assert_eq!(alone.allocated_bytes, ring + POWERS_BYTES);
    let others: Vec<_> = (1..6).map(|_| make(on, Stream, &scenario, None).unwrap()).collect();
    assert_eq!(on.memory().unwrap().allocated_bytes, ring + POWERS_BYTES, "not one byte more on the device");
    let state = first.pinned_bytes();
    assert_eq!(on.memory().unwrap().pinned_bytes, 6 * state + POWERS_BYTES);
    let now = on.counters();
    assert_eq!((now.streams, now.allocations, now.pins), (made.streams, made.allocations, made.pins + 5));
    assert!(
        now.events - made.events <= 6,
        "an event for each to begin its times with, and one to see that all is well"
    );
    for optimizer in others.iter().chain([&first]) {
        assert_eq!(optimizer.stats().unwrap().device_bytes, ring);
    }
    // It goes with the last one, whichever that is.
    drop(first);
    on.assert_holds(ring + POWERS_BYTES, 5 * state + POWERS_BYTES);
    drop(others);
    on.assert_empty();
    let again = make(on, Stream, &scenario, None).unwrap();
    on.assert_holds(ring + POWERS_BYTES, state + POWERS_BYTES);
    drop(again);
    on.assert_empty();
}

fn other_slots_sizes_and_devices_are_not_shared(on: &Subject) {
    let (plain, others) = (scenario(0, 3), [(4, 2048), (3, 4096)]);
    let first = make(on, Stream, &plain, None).unwrap();
    for (slots, slot_bytes) in others {
        let other = Scenario::new(tensors(0), slots, slot_bytes);
        let optimizer = make(on, Stream, &other, None).unwrap();
        on.assert_holds(
            first.ring_bytes() + optimizer.ring_bytes() + POWERS_BYTES,
            first.pinned_bytes() + optimizer.pinned_bytes() + POWERS_BYTES,
        );
    }
    let elsewhere = on.another();
    let second = make(&elsewhere, Stream, &plain, None).unwrap();
    elsewhere.assert_holds(second.ring_bytes() + POWERS_BYTES, second.pinned_bytes() + POWERS_BYTES);
    // Another way to the same device is another device to those who use it.
    let options = OptimizerOptions { plan: plain.options, ..OptimizerOptions::default() };
    let past = Optimizer::new(on.calm.clone(), plain.rule, options).unwrap();
    assert!(!past.join_ring().unwrap() && !past.has_ring());
}

/// A budget is kept by each optimizer for itself: what is shared stays with the others when one of them goes.
fn the_pinned_ring_is_shared_and_counts_for_each(on: &Subject) {
    for placement in [Host, Hybrid(HostShare::Fixed(0.5))] {
        let on = on.another();
        let scenario = scenario(0, 3);
        let ring = 6 * 4096;
        let scenario =
            Scenario { options: forebay::plan::PlanOptions { slot_bytes: 4096, ..scenario.options }, ..scenario };
        let first = make(&on, placement, &scenario, None).unwrap();
        let each = first.pinned_bytes();
        assert!(each > ring);
        on.assert_holds(on.memory().unwrap().allocated_bytes, each + POWERS_BYTES);
        let others: Vec<_> = (1..4).map(|_| make(&on, placement, &scenario, Some(each)).unwrap()).collect();
        assert!(others.iter().all(|other| other.pinned_bytes() == each));
        assert_eq!(on.memory().unwrap().pinned_bytes, each + 3 * (each - ring) + POWERS_BYTES);
        // One byte too few, though most of them are pinned already.
        let before = (on.memory().unwrap(), on.counters().pins);
        let error = device_error(make(&on, placement, &scenario, Some(each - 1)));
        let refusal = |requested_bytes, available_bytes, budget_bytes| Error::OutOfPinnedBudget {
            requested_bytes,
            available_bytes,
            budget_bytes,
        };
        assert_eq!(error, refusal(each, each - 1, each - 1));
        // What is shared is counted, so there is room for nothing else.
        for other in &others {
            assert_eq!(device_error(other.open_landing(0, &[4000, 120, 600])), refusal(8192, 0, each));
        }
        assert_eq!((on.memory().unwrap(), on.counters().pins), before);
        drop(first);
        assert_eq!(on.memory().unwrap().pinned_bytes, ring + 3 * (each - ring) + POWERS_BYTES);
        drop(others);
        on.assert_empty();
    }
}

/// Nobody waits between the steps, and one call or another of some step is late.
fn steps_in_turn_equal_steps_alone(on: &Subject) {
    // The third has parameters on the host and waits for its own stores, which are behind those of the others.
    let hybrid = Hybrid(HostShare::Fixed(0.5));
    for placements in [vec![Stream; 2], vec![Stream; 3], vec![hybrid; 3], vec![Host; 3], PLACEMENTS.to_vec()] {
        // With 40, nothing but the wait for its store holds up the next fetch of a chunk.
        for slots in [2, 5, 40] {
            let rigs = rigs(on, &placements, slots, 3);
            for (call, nth) in
                [(Call::Copy, 1), (Call::Copy, 17), (Call::Launch, 4), (Call::Wait, 9), (Call::Record, 21)]
            {
                rigs.iter().for_each(Rig::reset);
                on.fault.on(call, nth, Misbehaviour::Late { ns: 5_000_000 });
                for step in 0..3 {
                    rigs.iter().for_each(|rig| rig.step(step).unwrap());
                }
                assert_exact(&rigs, 3);
                on.fault.clear();
            }
        }
    }
}

fn steps_of_several_threads_equal_steps_alone(on: &Subject) {
    for placements in [vec![Stream; 3], vec![Hybrid(HostShare::Fixed(0.5)); 3], vec![Host; 3], PLACEMENTS.to_vec()] {
        let rigs = rigs(on, &placements, 2, 6);
        for round in 0..3 {
            rigs.iter().for_each(Rig::reset);
            let late = Misbehaviour::Late { ns: 2_000_000 };
            [(Call::Copy, 3), (Call::Copy, 40), (Call::Launch, 5), (Call::Wait, 20)]
                .into_iter()
                .for_each(|(call, nth)| on.fault.on(call, nth + 7 * round, late));
            std::thread::scope(|scope| {
                for rig in &rigs {
                    scope.spawn(move || {
                        for step in 0..6 {
                            rig.step(step).unwrap();
                            if step % 2 == 1 {
                                // Waits, reads and counts its own while the others go on.
                                assert_eq!(rig.stats().streamed.fetch_bytes, rig.stats().streamed.store_bytes);
                            }
                        }
                    });
                }
            });
            on.fault.clear();
            assert_exact(&rigs, 6);
        }
    }
}

/// A generator of numbers below a bound.
fn random(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) % below
    }
}

/// Steps, waits, statistics, rings that close and open, and optimizers that come and go, in an order by chance.
fn any_order_of_calls_equals_steps_alone(on: &Subject) {
    for seed in 0..u64::from(cases(4)) {
        let mut random = random(seed + 1);
        let mut below = |bound: u64| random(bound);
        let slots = 2 + below(3) as usize;
        let rigs = rigs(on, &[PLACEMENTS[below(3) as usize], Stream, PLACEMENTS[below(2) as usize]], slots, 8);
        let (mut taken, mut guest) = ([0; 3], None);
        while taken.iter().any(|&steps| steps < 8) {
            let at = below(3) as usize;
            let rig = &rigs[at];
            if below(4) == 0 {
                on.fault.on(Call::Copy, below(9), Misbehaviour::Late { ns: 1_000_000 });
            }
            match below(8) {
                0 => rig.optimizer.settle(0, 1).unwrap(),
                1 => rig.optimizer.synchronize().unwrap(),
                2 => assert_eq!(rig.stats().streamed.fetch_bytes, rig.stats().streamed.store_bytes),
                3 if rig.optimizer.has_ring() => {
                    rig.optimizer.close_ring().unwrap();
                    let memory = on.alloc(rig.optimizer.ring_bytes()).unwrap();
                    rig.optimizer.open_ring(Some((&memory, Some(&rig.compute)))).unwrap();
                }
                4 => guest = (below(2) == 0).then(|| make(on, Stream, &scenario(1, slots), None).unwrap()),
                _ if taken[at] < 8 => {
                    rig.step(taken[at]).unwrap();
                    taken[at] += 1;
                }
                _ => {}
            }
        }
        drop(guest);
        on.fault.clear();
        assert_exact(&rigs, 8);
    }
}

fn statistics_and_traces_are_one_user_s(on: &Subject) {
    let missing = |step: usize, tensor: usize| step == 2 && tensor == 0;
    let rigs: Vec<_> =
        (0..3).map(|i| Rig::new(on, Scenario { missing, ..Scenario::new(tensors(i), 3, 2048) }, 4)).collect();
    let [a, b, c] = &rigs[..] else { panic!("three") };
    for step in 0..4 {
        let recorder = traced(TraceOptions::default());
        a.step(step).unwrap();
        b.step(step).unwrap();
        let of_a = a.stats().streamed;
        c.step(step).unwrap();
        c.synchronize();
        b.step(step).unwrap();
        // Whatever the others did since, and whoever saw the stores end.
        a.assert_stats(a.stats().streamed, step);
        assert_eq!(a.stats().streamed, of_a);
        b.assert_stats(b.stats().streamed, step);
        c.assert_stats(c.stats().streamed, step);
        assert!(of_a.fetch_ns > 0 && of_a.update_ns > 0 && of_a.store_ns > 0, "{of_a:?}");
        // Each span names the optimizer whose chunk it was.
        let recording = recorder.stop();
        if on.kind.is_cuda() {
            continue;
        }
        for (rig, steps) in [(a, 1), (b, 2), (c, 1)] {
            let of = |span: &&Span| span.owner == rig.optimizer.trace_owner() && span.chunk.is_some();
            assert_eq!(recording.spans().filter(of).count() as u64, 3 * steps * rig.expected_stats(step).0);
        }
    }
}

/// A store of B is late. What A waits for has ended long before.
fn who_waits_does_not_wait_for_others(on: &Subject) {
    // A chunk for each tensor, and slots for all of them.
    let small = |_| Rig::new(on, Scenario::new(vec![Tensor::f32(128)], 4, 1024), 1).warm();
    let [a, b] = [0, 1].map(small);
    let columns = || a.scenario.columns(0).into_iter().map(|column| on.host_bytes(&a.column(0, column.name)).unwrap());
    in_one_of_three("A waited for a store of B's", || {
        [&a, &b].into_iter().for_each(Rig::reset);
        a.step(0).unwrap();
        on.fault.on(Call::Copy, 2, Misbehaviour::Late { ns: 300_000_000 });
        let begin = Instant::now();
        b.step(0).unwrap();
        a.optimizer.synchronize().unwrap();
        a.optimizer.settle(0, 0).unwrap();
        assert_eq!(a.stats().streamed.chunks, 1);
        let state: Vec<_> = columns().collect();
        let early = begin.elapsed() < Duration::from_millis(250);
        b.synchronize();
        assert!(begin.elapsed() >= Duration::from_millis(290), "B did not wait for its own store");
        // Last, because comparing frees memory, and a GPU is drained before that.
        assert!(columns().eq(state), "A's state was not complete");
        [&a, &b].into_iter().for_each(|rig| {
            rig.synchronize();
            rig.assert_exact(1);
        });
        early || under_sanitizer(on.kind)
    });
}

fn injected(error: &Error) -> bool {
    matches!(error, Error::StreamFailed { reason, .. } if reason.contains("injected"))
}

/// Fails the n-th call of a kind in a step of the first, for every n there is, while the others have stores under way. The
/// others go on at once; the first one does when it has its state again.
fn refuse_every(on: &Subject, placements: &[Placement], call: Call, times: u64) {
    let on = on.another();
    let rigs = rigs(&on, placements, 2, 3);
    rigs.iter().for_each(|rig| (0..2).for_each(|_| rig.step(0).unwrap()));
    for nth in 0.. {
        rigs.iter().for_each(Rig::reset);
        let (failing, others) = rigs.split_first().unwrap();
        rigs.iter().for_each(|rig| rig.step(0).unwrap());
        (nth..nth + times).for_each(|nth| on.fault.on(call, nth, Misbehaviour::Fail));
        let outcome = failing.step(1);
        on.fault.clear();
        rigs.iter().for_each(Rig::assert_idle);
        others.iter().for_each(|rig| rig.step(1).unwrap());
        if outcome.is_ok() {
            assert!(nth > 1 || call == Call::Synchronize, "{call:?}");
            break;
        }
        let error = device_error(outcome);
        assert!(injected(&error), "{call:?} {nth}: {error}");
        assert!(matches!(failing.step(1), Err(forebay::Error::Distrusted { .. })));
        failing.reset();
        failing.steps(2);
        assert_exact(&rigs, 2);
        assert!(others.iter().all(|rig| rig.optimizer.distrusted().is_none()));
    }
}

fn a_failed_step_leaves_the_others_usable(on: &Subject) {
    for call in [Call::Copy, Call::Launch, Call::Wait, Call::Synchronize] {
        refuse_every(on, &[Stream, Stream], call, 1);
    }
    // A refused recording is tried again: both attempts, and the attempt of the one who waits for it.
    (1..=3).for_each(|times| refuse_every(on, &[Stream, Stream], Call::Record, times));
}

fn a_failed_step_on_the_host_leaves_the_others_usable(on: &Subject) {
    let hybrid = Hybrid(HostShare::Fixed(0.5));
    for call in [Call::Copy, Call::Record, Call::Wait, Call::HostUpdate] {
        refuse_every(on, &[Host, hybrid, Stream], call, 1);
        refuse_every(on, &[hybrid, Host, Stream], call, 1);
    }
}

/// A's step breaks off while its fetch is late. A returns when that work has ended: its gradients may be freed and its state
/// be written. On the checker, writing to them is refused otherwise. B gets the slot.
fn a_late_failure_is_waited_for_by_its_own_user(on: &Subject) {
    for (slow, refused) in [
        ((Call::Copy, 0), (Call::Copy, 1)),
        ((Call::Copy, 0), (Call::Launch, 0)),
        ((Call::Copy, 0), (Call::Copy, 2)),
        ((Call::Launch, 0), (Call::Copy, 2)),
    ] {
        let rigs = rigs(on, &[Stream, Stream], 2, 2);
        let [a, b] = &rigs[..] else { panic!("two") };
        rigs.iter().for_each(|rig| (0..2).for_each(|_| rig.step(0).unwrap()));
        rigs.iter().for_each(Rig::reset);
        on.fault.on(slow.0, slow.1, Misbehaviour::Late { ns: 25_000_000 });
        on.fault.on(refused.0, refused.1, Misbehaviour::Fail);
        assert!(injected(&device_error(a.step(0))));
        on.launch(&a.compute, &Kernel::Fill { dst: a.grad(0, 0).unwrap(), byte: 7 }).unwrap();
        on.write(&[0; 64], &a.column(0, a.scenario.columns(0)[0].name).slice(0, 64).unwrap()).unwrap();
        b.step(0).unwrap();
        b.step(1).unwrap();
        b.synchronize();
        b.assert_exact(2);
        b.assert_idle();
    }
}

/// The ring lies in memory that the first user brought, and that user goes first.
fn the_first_user_s_memory_stays_until_the_last_one_goes(on: &Subject) {
    let on = on.another();
    let [a, b] = [0, 1].map(|i| Rig::new(&on, Scenario::new(tensors(i), 3, 2048), 4));
    let ring = a.optimizer.ring_bytes();
    [&a, &b].into_iter().for_each(|rig| rig.optimizer.close_ring().unwrap());
    let before = on.memory().unwrap();
    let memory = on.alloc(ring).unwrap();
    // The test's other work on that memory is not done yet.
    on.launch(&a.compute, &Kernel::Spin { ns: 10_000_000 }).unwrap();
    on.launch(&a.compute, &Kernel::Fill { dst: memory.all(), byte: 0xee }).unwrap();
    a.optimizer.open_ring(Some((&memory, Some(&a.compute)))).unwrap();
    // B has memory too, which nobody needs: it may be freed at once.
    let unused = on.alloc(ring).unwrap();
    b.optimizer.open_ring(Some((&unused, Some(&b.compute)))).unwrap();
    drop((memory, unused));
    on.assert_holds(before.allocated_bytes + ring, before.pinned_bytes);
    b.step(0).unwrap();
    a.step(0).unwrap();
    b.step(1).unwrap();
    a.optimizer.close().unwrap();
    b.step(2).unwrap();
    drop(a);
    b.step(3).unwrap();
    b.synchronize();
    b.assert_exact(4);
    assert_eq!(b.stats().device_bytes, ring);
    drop(b);
    on.assert_empty();
}

fn what_was_dropped_is_freed_though_others_keep_the_ring(on: &Subject) {
    for (placement, end) in
        PLACEMENTS.into_iter().flat_map(|placement| ["drop", "close", "refuse"].map(|end| (placement, end)))
    {
        let on = on.another();
        let keeper = Rig::placed(&on, scenario(0, 3), 2, placement).warm();
        let before = on.memory().unwrap();
        let goes = Rig::placed(&on, scenario(1, 3), 1, placement);
        let view = columns(&goes).remove(0);
        on.fault.on(Call::Copy, 3, Misbehaviour::Late { ns: 25_000_000 });
        goes.step(0).unwrap();
        on.fault.clear();
        match end {
            "close" => goes.optimizer.close().unwrap(),
            // Nothing can be waited for: memory that nobody holds is freed all the same, after its use.
            "refuse" => (0..9).for_each(|nth| on.fault.on(Call::Synchronize, nth, Misbehaviour::Fail)),
            _ => {}
        }
        drop(goes);
        on.fault.clear();
        if end != "refuse" {
            // Who still holds state reads it without any other wait; on the checker, reading is refused otherwise.
            on.host_bytes(&view).unwrap();
        }
        drop(view);
        on.assert_holds(before.allocated_bytes, before.pinned_bytes);
        keeper.step(0).unwrap();
        keeper.step(1).unwrap();
        keeper.synchronize();
        keeper.assert_exact(2);
        keeper.assert_idle();
        drop(keeper);
        on.assert_empty();
    }
}

fn a_ring_that_one_of_two_has_closed_goes_on(on: &Subject) {
    let on = on.another();
    let [a, b] = [0, 1].map(|i| Rig::new(&on, Scenario::new(tensors(i), 3, 2048), 4));
    let (before, ring) = (on.memory().unwrap(), a.optimizer.ring_bytes());
    on.fault.on(Call::Copy, 2, Misbehaviour::Late { ns: 25_000_000 });
    a.step(0).unwrap();
    b.step(0).unwrap();
    a.optimizer.close_ring().unwrap();
    assert!(!a.optimizer.has_ring() && b.optimizer.has_ring());
    assert_eq!((a.stats().device_bytes, b.stats().device_bytes), (0, ring));
    on.assert_holds(before.allocated_bytes, before.pinned_bytes);
    assert_eq!(device_error(a.step(1)), Error::ZeroSize { what: "the ring" });
    b.step(1).unwrap();
    assert!(a.optimizer.join_ring().unwrap() && a.optimizer.join_ring().unwrap());
    on.assert_holds(before.allocated_bytes, before.pinned_bytes);
    (1..3).for_each(|step| a.step(step).unwrap());
    b.step(2).unwrap();
    // Both: then it is freed, and there is none to join.
    b.optimizer.close_ring().unwrap();
    a.optimizer.close_ring().unwrap();
    on.assert_holds(before.allocated_bytes - ring, before.pinned_bytes);
    assert!(!a.optimizer.join_ring().unwrap() && !a.optimizer.has_ring());
    b.optimizer.open_ring(None).unwrap();
    assert!(a.optimizer.join_ring().unwrap());
    on.assert_holds(before.allocated_bytes, before.pinned_bytes);
    [&a, &b].into_iter().for_each(|rig| rig.step(3).unwrap());
    assert_exact(&[a, b], 4);
}

fn columns(rig: &Rig<'_>) -> Vec<Region> {
    let of = |tensor: usize| rig.scenario.columns(tensor).into_iter().map(move |column| (tensor, column.name));
    let named = (0..rig.scenario.tensors.len()).flat_map(of);
    named.map(|(tensor, name)| rig.column(tensor, name)).filter(|region| region.bytes() > 0).collect()
}

/// Saves without room for copies, so that steps wait for the writer in the middle, with a slot or with the turn on the
/// host's ring; the writer is slow. Others save, wait and come and go meanwhile. That all of it ends is the test.
fn saves_and_steps_of_several_threads_end(on: &Subject) {
    for placements in [vec![Stream, Stream], vec![Hybrid(HostShare::Fixed(0.5)), Host], vec![Host, Stream]] {
        let rigs: Vec<_> = placements
            .iter()
            .map(|&placement| Rig::placed(on, Scenario::new(mixed_tensors(), 2, 2048), 12, placement))
            .collect();
        let optimizers: Vec<_> = rigs.iter().map(|rig| &rig.optimizer).collect();
        let regions: Vec<_> = rigs.iter().flat_map(columns).collect();
        let ended = AtomicBool::new(false);
        let goes_on = || !ended.load(Ordering::SeqCst);
        std::thread::scope(|scope| {
            let steppers: Vec<_> =
                rigs.iter().map(|rig| scope.spawn(move || (0..12).for_each(|step| rig.step(step).unwrap()))).collect();
            for order in [[0, 1], [1, 0]] {
                let named = [optimizers[order[0]], optimizers[order[1]]];
                let (regions, goes_on) = (&regions, &goes_on);
                scope.spawn(move || {
                    while goes_on() {
                        let snapshot = Optimizer::snapshot_in_pages(&named, 1024, 0).unwrap();
                        snapshot.plan(regions);
                        let buffer = Buffer::pageable(512).unwrap();
                        for region in regions {
                            let pause = |_: &Region| {
                                std::thread::sleep(Duration::from_micros(50));
                                Ok(())
                            };
                            snapshot.read(region, &buffer, 0, pause).unwrap();
                        }
                        snapshot.finish();
                    }
                });
            }
            scope.spawn(|| {
                while goes_on() {
                    let guest = make(on, Stream, &Scenario::new(tensors(0), 2, 2048), None).unwrap();
                    assert!(optimizers.iter().all(|optimizer| optimizer.stats().is_ok()));
                    drop(guest);
                    optimizers.iter().for_each(|optimizer| optimizer.synchronize().unwrap());
                }
            });
            let stepped: Vec<_> = steppers.into_iter().map(|stepper| stepper.join()).collect();
            ended.store(true, Ordering::SeqCst);
            stepped.into_iter().for_each(|outcome| outcome.unwrap());
        });
        assert_exact(&rigs, 12);
    }
}

/// A stream that dies takes its users with it. Those who come later are not among them.
fn a_ring_that_died_is_not_given_to_new_users(on: &Subject) {
    for (call, nth) in [(Call::Copy, 0), (Call::Launch, 0), (Call::Copy, 2)] {
        let on = on.another();
        let a = Rig::new(&on, Scenario::new(tensors(0), 3, 2048), 2).warm();
        on.fault.on(call, nth, Misbehaviour::Break);
        let outcome = a.step(0).and_then(|()| a.optimizer.synchronize());
        assert!(matches!(device_error(outcome), Error::StreamFailed { .. }), "{call:?} {nth}");
        let b = Rig::new(&on, Scenario::new(tensors(1), 3, 2048), 2);
        // And these two share one again.
        let before = on.memory().unwrap().allocated_bytes;
        let guest = make(&on, Stream, &Scenario::new(tensors(2), 3, 2048), None).unwrap();
        assert_eq!(on.memory().unwrap().allocated_bytes, before);
        drop(guest);
        let c = Rig::new(&on, Scenario::new(tensors(2), 3, 2048), 2);
        for step in 0..2 {
            b.step(step).unwrap();
            c.step(step).unwrap();
        }
        assert_exact(&[b, c], 2);
        drop(a);
        on.assert_empty();
    }
}
