//! The step on the host and on host and device at once: the bits of the resident update, wherever each part runs.

use crate::common::trial::{Rig, Scenario, Tensor, group_tensors, mixed_tensors};
use crate::common::{Subject, device_error};
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::update::RULES;
use forebay::device::{Dtype, Error, Kernel};
use forebay::optimizer::Placement::{self, Host, Hybrid, Stream};
use forebay::optimizer::{HostReport, HostShare, Optimizer, OptimizerOptions};

forebay_device::on_devices! {
    every:
        the_host_equals_resident_in_every_group,
        the_host_equals_resident_with_every_type_and_gaps_in_the_gradients,
        the_host_equals_resident_with_parameters_on_the_host,
        scale_and_skip_are_copied_to_the_host,
        every_share_equals_resident,
        auto_settles_and_stays_put_and_equals_resident,
        the_ends_of_the_share_are_stream_and_host,
        delays_anywhere_change_nothing,
        a_master_gives_way_to_a_replaced_weight_on_the_host,
        gradients_that_were_copied_before_are_not_copied_again,
        gradients_that_are_forgotten_or_of_another_size_are_copied_by_the_step,
        gradients_may_be_freed_when_a_step_was_refused,
        gradients_that_were_copied_before_are_of_one_step,
        memory_for_gradients_counts_against_the_budget,
        gradients_may_be_freed_after_a_step_wherever_it_ran,
        gradients_may_be_freed_when_a_step_has_failed,
        the_host_alone_waits_for_what_the_device_stored,
        steps_on_the_host_allocate_nothing,
        statistics_of_the_host_count_its_bytes,
        a_refused_call_leaves_the_host_usable,
        a_failure_on_a_thread_is_the_step_s_and_leaves_the_host_usable,
        a_refused_resource_of_the_host_leaves_nothing_behind,
        a_fraction_outside_the_range_is_refused_by_name;
}

const SHARES: [HostShare; 5] =
    [HostShare::Fixed(0.0), HostShare::Fixed(0.3), HostShare::Fixed(0.77), HostShare::Fixed(1.0), HostShare::Auto];

fn gaps(step: usize, tensor: usize) -> bool {
    (step * 7 + tensor * 3).is_multiple_of(5)
}

fn report(rig: &Rig<'_>) -> HostReport {
    rig.stats().host.unwrap()
}

fn the_host_equals_resident_in_every_group(on: &Subject) {
    for rule in RULES {
        let scenario = Scenario { missing: gaps, ..Scenario::new(group_tensors(), 3, 4096) }.with(rule);
        scenario.check_placed(on, 5, Host);
        scenario.check_placed(on, 5, Hybrid(HostShare::Fixed(0.5)));
    }
}

fn the_host_equals_resident_with_every_type_and_gaps_in_the_gradients(on: &Subject) {
    for (slots, slot_bytes) in [(2, 4096), (3, 1281), (4, 16 << 10), (7, 1 << 20)] {
        for rule in RULES {
            let scenario = Scenario { missing: gaps, ..Scenario::new(mixed_tensors(), slots, slot_bytes) }.with(rule);
            scenario.check_placed(on, if rule.name == "adamw" { 10 } else { 4 }, Host);
        }
    }
}

/// Large enough that several threads share a segment, and that its pieces do not end where vectors do.
fn long_tensors() -> Vec<Tensor> {
    vec![Tensor::of(100_003, Dtype::Bf16, Dtype::Bf16).master(), Tensor::f32(70_001), Tensor::f32(33)]
}

fn the_host_equals_resident_with_parameters_on_the_host(on: &Subject) {
    for (slots, slot_bytes, every) in [(2, 1792, 1), (3, 4099, 2), (7, 1 << 20, 3)] {
        let place = |(i, tensor): (usize, Tensor)| if i % every == 0 { tensor.on_host() } else { tensor };
        let tensors = mixed_tensors().into_iter().enumerate().map(place).collect();
        let scenario = Scenario { missing: gaps, ..Scenario::new(tensors, slots, slot_bytes) };
        scenario.check_placed(on, 10, Host);
        scenario.check_placed(on, 4, Hybrid(HostShare::Fixed(0.5)));
        for rule in &RULES[1..] {
            scenario.clone().with(rule).check_placed(on, 3, Host);
            scenario.clone().with(rule).check_placed(on, 3, Hybrid(HostShare::Fixed(0.5)));
        }
    }
    Scenario::new(long_tensors(), 2, 1 << 20).check_placed(on, 2, Host);
    let on_host = long_tensors().into_iter().map(Tensor::on_host).collect();
    Scenario::new(on_host, 2, 1 << 20).check_placed(on, 2, Host);
}

fn scale_and_skip_are_copied_to_the_host(on: &Subject) {
    let plain = Scenario::new(mixed_tensors(), 3, 4096);
    for placement in [Host, Hybrid(HostShare::Fixed(0.5))] {
        Scenario { grad_scale: Some(0.37), ..plain.clone() }.check_placed(on, 4, placement);
        let skipped: Option<fn(usize) -> bool> = Some(|step| step % 3 == 1);
        Scenario { grad_scale: Some(1.7), skipped, ..plain.clone() }.check_placed(on, 6, placement);
    }
}

fn every_share_equals_resident(on: &Subject) {
    for share in SHARES {
        for (slots, slot_bytes) in [(2, 2048), (4, 4099)] {
            let scenario = Scenario { missing: gaps, ..Scenario::new(mixed_tensors(), slots, slot_bytes) };
            scenario.check_placed(on, 7, Hybrid(share));
        }
        for rule in &RULES[1..] {
            let scenario = Scenario { missing: gaps, ..Scenario::new(mixed_tensors(), 3, 2048) };
            scenario.with(rule).check_placed(on, 3, Hybrid(share));
        }
    }
}

fn auto_settles_and_stays_put_and_equals_resident(on: &Subject) {
    let rig = Rig::placed(on, Scenario::new(mixed_tensors(), 3, 2048), 10, Hybrid(HostShare::Auto));
    let mut settled = None;
    for step in 0..10 {
        assert_eq!(report(&rig).settled.is_some(), step >= 6, "after {step} steps");
        rig.step(step).unwrap();
        if step >= 6 {
            let now = (report(&rig).settled, report(&rig).fraction);
            assert_eq!(*settled.get_or_insert(now), now, "it moves");
            assert!((now.0.unwrap() - now.1).abs() < 0.2, "settled on {:?} and took {}", now.0, now.1);
        }
    }
    rig.synchronize();
    rig.assert_exact(10);
}

fn the_ends_of_the_share_are_stream_and_host(on: &Subject) {
    for (fraction, host) in [(0.0, false), (1.0, true)] {
        let scenario = Scenario::new(mixed_tensors(), 3, 2048);
        let rig = Rig::placed(on, scenario, 1, Hybrid(HostShare::Fixed(fraction)));
        rig.step(0).unwrap();
        rig.synchronize();
        let chunks = rig.plan().chunks().len() as u64;
        let expected = if host { (0, chunks) } else { (chunks, 0) };
        assert_eq!((rig.stats().streamed.chunks, report(&rig).stats.chunks), expected);
        assert_eq!((report(&rig).fraction, report(&rig).settled), (fraction, Some(fraction)));
    }
}

/// One call of each kind in turn is held up by its stream; the result must be that of an undisturbed run.
fn delays_anywhere_change_nothing(on: &Subject) {
    for placement in [Host, Hybrid(HostShare::Fixed(0.5))] {
        let scenario = Scenario::new(vec![Tensor::f32(900), Tensor::f32(30)], 2, 2048);
        let rig = Rig::placed(on, scenario, 2, placement).warm();
        for call in [Call::Copy, Call::Record, Call::Wait] {
            for nth in [0, 1, 2, 3, 5, 8] {
                on.fault.on(call, nth, Misbehaviour::Late { ns: 3_000_000 });
                rig.steps(2);
                rig.synchronize();
                rig.assert_exact(2);
                rig.reset();
            }
        }
    }
}

/// Between two steps a user writes new weights; the masters of the old ones must not return.
fn a_master_gives_way_to_a_replaced_weight_on_the_host(on: &Subject) {
    let tensors = vec![Tensor::of(3000, Dtype::Bf16, Dtype::Bf16).master()];
    let ends = [Stream, Host, Hybrid(HostShare::Fixed(0.5))].map(|placement| {
        let rig = Rig::placed(on, Scenario::new(tensors.clone(), 3, 4096), 3, placement);
        rig.step(0).unwrap();
        rig.synchronize();
        on.finish(&rig.compute).unwrap();
        let weight = rig.weight(0);
        on.put(&vec![0x3f; weight.bytes() as usize / 2], &weight.slice(0, weight.bytes() / 2).unwrap());
        rig.step(1).unwrap();
        rig.synchronize();
        on.finish(&rig.compute).unwrap();
        rig.outcome()
    });
    ends[1].assert_has(&ends[0], "the streamed update");
    ends[2].assert_has(&ends[0], "the streamed update");
}

/// Copies a gradient of a step to the host early. Late, so that a step that needs it must wait.
fn land(on: &Subject, rig: &Rig<'_>, step: usize, tensor: usize) {
    on.launch(&rig.compute, &Kernel::Spin { ns: 3_000_000 }).unwrap();
    rig.optimizer.land(0, tensor, &rig.grad(step, tensor).unwrap(), Some(&rig.compute)).unwrap();
}

/// Writes to a gradient: an error on a checked device while a copy may still be reading it.
fn overwrite(on: &Subject, rig: &Rig<'_>, step: usize, tensor: usize) {
    on.launch(&rig.compute, &Kernel::Fill { dst: rig.grad(step, tensor).unwrap(), byte: 0 }).unwrap();
}

fn gradients_that_were_copied_before_are_not_copied_again(on: &Subject) {
    let scenario = Scenario::new(vec![Tensor::of(3000, Dtype::Bf16, Dtype::Bf16).master(), Tensor::f32(500)], 3, 4096);
    let rig = Rig::placed(on, scenario, 3, Host);
    rig.optimizer.open_landing(0, &[3000 * 2, 500 * 4]).unwrap();
    for step in 0..2 {
        land(on, &rig, step, 0);
        rig.step(step).unwrap();
        assert_eq!(report(&rig).stats.down_bytes, 3000 * 2 + 500 * 8);
    }
    // All of them, and the newer copy of one counts.
    rig.optimizer.land(0, 0, &rig.grad(1, 0).unwrap(), Some(&rig.compute)).unwrap();
    (0..2).for_each(|tensor| land(on, &rig, 2, tensor));
    rig.step(2).unwrap();
    assert_eq!(report(&rig).stats.down_bytes, 3000 * 2 + 500 * 4);
    rig.synchronize();
    rig.assert_exact(3);
}

/// What is copied before a step is for that step alone: the next one has other gradients.
fn gradients_that_were_copied_before_are_of_one_step(on: &Subject) {
    let rig = Rig::placed(on, Scenario::new(vec![Tensor::f32(500), Tensor::f32(700)], 3, 4096), 2, Host);
    rig.optimizer.open_landing(0, &[500 * 4, 700 * 4]).unwrap();
    land(on, &rig, 0, 0);
    rig.step(0).unwrap();
    assert_eq!(report(&rig).stats.down_bytes, 1200 * 8 - 500 * 4);
    rig.step(1).unwrap();
    assert_eq!(report(&rig).stats.down_bytes, 1200 * 8);
    rig.synchronize();
    rig.assert_exact(2);
}

fn gradients_that_are_forgotten_or_of_another_size_are_copied_by_the_step(on: &Subject) {
    let tensors = vec![Tensor::f32(500), Tensor::f32(700), Tensor::f32(64), Tensor::f32(0)];
    for placement in [Host, Hybrid(HostShare::Fixed(1.0))] {
        let rig = Rig::placed(on, Scenario::new(tensors.clone(), 3, 4096), 4, placement);
        // Before there is memory for them nothing happens; nor for a gradient of another size than was announced.
        land(on, &rig, 0, 0);
        rig.optimizer.open_landing(0, &[500 * 4, 700 * 2, 64 * 4, 0]).unwrap();
        rig.optimizer.open_landing(0, &[1 << 40; 4]).unwrap();
        (0..4).for_each(|tensor| land(on, &rig, 0, tensor));
        rig.step(0).unwrap();
        let all = (500 + 700 + 64) * 8;
        assert_eq!(report(&rig).stats.down_bytes, all - (500 + 64) * 4);
        // One is forgotten, after which it may change.
        (0..4).for_each(|tensor| land(on, &rig, 1, tensor));
        rig.optimizer.finish_landing(Some((0, 0))).unwrap();
        overwrite(on, &rig, 2, 0);
        rig.step(1).unwrap();
        assert_eq!(report(&rig).stats.down_bytes, all - 64 * 4);
        rig.synchronize();
        rig.assert_exact(2);
        // All are.
        (0..4).for_each(|tensor| land(on, &rig, 3, tensor));
        rig.optimizer.finish_landing(None).unwrap();
        (0..3).for_each(|tensor| overwrite(on, &rig, 3, tensor));
        rig.step(3).unwrap();
        assert_eq!(report(&rig).stats.down_bytes, all);
    }
    // Where nothing is updated on the host, nothing is copied.
    let rig = Rig::new(on, Scenario::new(tensors, 3, 4096), 1);
    rig.optimizer.open_landing(0, &[500 * 4, 700 * 4, 64 * 4, 0]).unwrap();
    land(on, &rig, 0, 0);
    rig.steps(1);
    rig.optimizer.finish_landing(None).unwrap();
    rig.synchronize();
    rig.assert_exact(1);
}

/// A gradient that is copied to the host and not needed there has been read when the step ends.
fn gradients_may_be_freed_after_a_step_wherever_it_ran(on: &Subject) {
    for share in [0.0, 0.01, 1.0] {
        let scenario = Scenario::new(vec![Tensor::f32(3000), Tensor::f32(500)], 3, 4096);
        let rig = Rig::placed(on, scenario, 1, Hybrid(HostShare::Fixed(share)));
        rig.optimizer.open_landing(0, &[3000 * 4, 500 * 4]).unwrap();
        rig.optimizer.land(0, 0, &rig.grad(0, 0).unwrap(), Some(&rig.compute)).unwrap();
        rig.step(0).unwrap();
        overwrite(on, &rig, 0, 0);
        rig.synchronize();
        rig.assert_exact(1);
    }
}

/// A step that is refused returns before it needs any gradient, and has waited for those under way.
fn gradients_may_be_freed_when_a_step_was_refused(on: &Subject) {
    let rig = Rig::placed(on, Scenario::new(vec![Tensor::f32(3000), Tensor::f32(500)], 3, 4096), 1, Host);
    rig.optimizer.open_landing(0, &[3000 * 4, 500 * 4]).unwrap();
    let refused: [&dyn Fn() -> forebay::Result<()>; 2] = [&|| rig.step_with(0, Vec::new()), &|| {
        rig.optimizer.distrust("somebody wrote into it");
        rig.step(0)
    }];
    for step in refused {
        land(on, &rig, 0, 0);
        step().unwrap_err();
        overwrite(on, &rig, 0, 0);
    }
}

fn memory_for_gradients_counts_against_the_budget(on: &Subject) {
    let scenario = Scenario::new(vec![Tensor::f32(3000), Tensor::f32(500)], 3, 4096);
    let rig = Rig::placed(on, scenario.clone(), 1, Host);
    let before = rig.optimizer.pinned_bytes();
    // Nothing to copy needs nothing.
    rig.optimizer.open_landing(0, &[0, 0]).unwrap();
    assert_eq!(rig.optimizer.pinned_bytes(), before);
    rig.optimizer.open_landing(0, &[3000 * 4, 500 * 4]).unwrap();
    let grads = rig.optimizer.pinned_bytes() - before;
    assert!((3500 * 4..3500 * 4 + 8192).contains(&grads), "{grads}");
    assert_eq!(rig.stats().pinned_bytes, before + grads);
    let budget = before + grads - 1;
    let tight = Rig::within(on, scenario, 1, Host, Some(budget)).unwrap();
    let error = device_error(tight.optimizer.open_landing(0, &[3000 * 4, 500 * 4]));
    let expected =
        Error::OutOfPinnedBudget { requested_bytes: grads, available_bytes: grads - 1, budget_bytes: budget };
    assert_eq!((error, tight.optimizer.pinned_bytes()), (expected, before));
    // It goes on without.
    land(on, &tight, 0, 0);
    tight.steps(1);
    tight.synchronize();
    tight.assert_exact(1);
}

/// Writing to a gradient is an error on a checked device while its way down may still be reading it.
fn gradients_may_be_freed_when_a_step_has_failed(on: &Subject) {
    for placement in [Host, Hybrid(HostShare::Fixed(0.6)), Hybrid(HostShare::Fixed(0.99))] {
        let scenario = Scenario::new((0..12).map(|_| Tensor::f32(256)).collect(), 3, 2048);
        let rig = Rig::placed(on, scenario, 1, placement);
        rig.optimizer.open_landing(0, &[1024; 12]).unwrap();
        for call in [Call::HostUpdate, Call::Record] {
            // Also those that are copied before, also where the step fails before it looks at any.
            land(on, &rig, 0, 3);
            let how = if call == Call::Record { Misbehaviour::Fail } else { Misbehaviour::Break };
            on.fault.on(call, 0, how);
            device_error(rig.step(0));
            on.fault.clear();
            (0..12).for_each(|tensor| overwrite(on, &rig, 0, tensor));
            rig.reset();
        }
    }
}

/// Every second step has so few gradients that all of them are the host's, and their state was just stored.
fn the_host_alone_waits_for_what_the_device_stored(on: &Subject) {
    let missing: fn(usize, usize) -> bool = |step, tensor| step % 2 == 1 && tensor == 1;
    let scenario = Scenario { missing, ..Scenario::new(vec![Tensor::f32(256), Tensor::f32(256)], 2, 2048) };
    let rig = Rig::placed(on, scenario, 6, Hybrid(HostShare::Fixed(0.5)));
    // Reading the statistics waits for the stores, so the second time nobody reads them.
    for reads in [true, false] {
        rig.reset();
        for step in 0..6 {
            rig.step(step).unwrap();
            assert!(!reads || report(&rig).fraction == if step % 2 == 1 { 1.0 } else { 0.5 });
        }
        rig.synchronize();
        rig.assert_exact(6);
    }
}

fn steps_on_the_host_allocate_nothing(on: &Subject) {
    for placement in [Host, Hybrid(HostShare::Auto)] {
        let rig = Rig::placed(on, Scenario::new(mixed_tensors(), 3, 2048), 8, placement);
        rig.step(0).unwrap();
        let before = on.taken();
        for step in 1..8 {
            rig.step(step).unwrap();
        }
        assert_eq!(on.taken(), before);
        rig.synchronize();
    }
}

fn statistics_of_the_host_count_its_bytes(on: &Subject) {
    let tensors = vec![Tensor::of(3000, Dtype::Bf16, Dtype::F32).master(), Tensor::f32(500), Tensor::f32(64).on_host()];
    let rig = Rig::placed(on, Scenario::new(tensors, 3, 4096), 1, Host);
    rig.step(0).unwrap();
    let stats = report(&rig).stats;
    assert_eq!(stats.chunks, rig.plan().chunks().len() as u64);
    assert_eq!(stats.state_bytes, 3000 * 12 + 500 * 8 + 64 * 8);
    assert_eq!((stats.down_bytes, stats.up_bytes), (3000 * 6 + 500 * 8, 3000 * 2 + 500 * 4));
    rig.synchronize();
}

fn injected(error: &Error) -> bool {
    matches!(error, Error::StreamFailed { reason, .. } if reason.contains("injected"))
}

/// Fails the n-th call of a kind, for every n there is, and shows each time that the same lane then trains as if nothing
/// had been.
fn a_refused_call_leaves_the_host_usable(on: &Subject) {
    let tensors = vec![Tensor::f32(600), Tensor::of(300, Dtype::Bf16, Dtype::Bf16).master(), Tensor::f32(90).on_host()];
    let calls = [Call::Copy, Call::Record, Call::Wait, Call::Synchronize, Call::HostUpdate, Call::Launch];
    // A refused recording is tried again: both attempts, and the attempt of the one who waits for it.
    let calls: Vec<_> = calls.map(|call| (call, 1)).into_iter().chain([(Call::Record, 2), (Call::Record, 3)]).collect();
    for placement in [Host, Hybrid(HostShare::Fixed(0.5))] {
        for &(call, times) in &calls {
            let on = on.another();
            let rig = Rig::placed(&on, Scenario::new(tensors.clone(), 2, 2048), 2, placement).warm();
            for nth in 0.. {
                rig.step(0).unwrap();
                (nth..nth + times).for_each(|nth| on.fault.on(call, nth, Misbehaviour::Fail));
                let outcome = rig.step(1);
                on.fault.clear();
                rig.assert_idle();
                if outcome.is_ok() {
                    // The host launches nothing, and how often a hybrid step waits depends on the time.
                    assert!(nth > 1 || matches!(call, Call::Launch | Call::Synchronize), "{call:?} {nth}");
                    break;
                }
                let error = device_error(outcome);
                assert!(injected(&error), "{call:?} {nth}: {error}");
                assert!(matches!(rig.step(1), Err(forebay::Error::Distrusted { .. })), "{call:?} {nth}");
                rig.reset();
                rig.steps(2);
                rig.synchronize();
                rig.assert_exact(2);
                rig.reset();
            }
        }
    }
}

fn a_failure_on_a_thread_is_the_step_s_and_leaves_the_host_usable(on: &Subject) {
    for placement in [Host, Hybrid(HostShare::Fixed(0.6))] {
        let rig = Rig::placed(on, Scenario::new(mixed_tensors(), 3, 4096), 2, placement);
        for nth in 0..4 {
            on.fault.on(Call::HostUpdate, nth, Misbehaviour::Break);
            let error = device_error(rig.step(0));
            assert!(error.to_string().contains("an update failed on purpose"), "{error}");
            rig.assert_idle();
            rig.reset();
            rig.steps(2);
            rig.synchronize();
            rig.assert_exact(2);
            rig.reset();
        }
    }
    on.fault.on(Call::HostUpdate, 0, Misbehaviour::Break);
    let rig = Rig::placed(on, Scenario::new(mixed_tensors(), 3, 4096), 1, Host);
    device_error(rig.step(0));
    drop(rig);
}

/// An optimizer that updates on the host, without state.
fn empty(on: &Subject, placement: Placement, scenario: &Scenario) -> Optimizer {
    let options = OptimizerOptions { placement, plan: scenario.options, ..OptimizerOptions::default() };
    Optimizer::new(on.device.clone(), scenario.rule, options).unwrap()
}

fn a_refused_resource_of_the_host_leaves_nothing_behind(on: &Subject) {
    let on = on.another();
    let scenario = Scenario::new(vec![Tensor::f32(600), Tensor::f32(30)], 3, 4096);
    // For powers, the state, the flags and the ring; for powers, the lane and each slot; for powers and both directions.
    for (call, count) in [(Call::Pin, 4), (Call::Event, 1 + 3 + 12), (Call::Stream, 3)] {
        for nth in 0..count {
            let optimizer = empty(&on, Host, &scenario);
            on.fault.on(call, nth, Misbehaviour::Fail);
            let outcome = optimizer.add(scenario.specs());
            on.fault.clear();
            assert!(injected(&device_error(outcome)), "{call:?} {nth}");
            // Another try finds all that it needs.
            assert_eq!(optimizer.add(scenario.specs()).unwrap(), 0);
            assert_eq!(optimizer.idle_slots(), (0, 6), "{call:?} {nth}");
            drop(optimizer);
            on.assert_empty();
        }
        let optimizer = empty(&on, Host, &scenario);
        on.fault.on(call, count, Misbehaviour::Fail);
        optimizer.add(scenario.specs()).unwrap();
        on.fault.clear();
    }
}

fn a_fraction_outside_the_range_is_refused_by_name(on: &Subject) {
    let scenario = Scenario::new(vec![Tensor::f32(600)], 2, 4096);
    for fraction in [-0.1, 1.01, f64::NAN] {
        let optimizer = empty(on, Hybrid(HostShare::Fixed(fraction)), &scenario);
        optimizer.open_ring(None).unwrap();
        let said = optimizer.add(scenario.specs()).unwrap_err().to_string();
        assert!(said.starts_with(&format!("invalid host_fraction: {fraction}; ")), "{said}");
    }
}
