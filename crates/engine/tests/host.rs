//! The step on the host and on host and device at once: the bits of the resident update, whoever updates what.

#[macro_use]
mod common;

use common::trial::{Placement, Rig, Scenario, Tensor, mixed_tensors};
use common::{Subject, device_error};
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::{Dtype, Error, HostOptions};
use forebay::pool::Pool;
use forebay::step::{HostShare, Hybrid};

use Placement::{Host, Hybrid as Shared};

on_devices! {
    every:
        the_host_equals_resident_with_every_type_and_gaps_in_the_gradients,
        the_host_equals_resident_with_parameters_on_the_host,
        scale_and_skip_come_down,
        every_share_equals_resident,
        auto_settles_and_stays_put_and_equals_resident,
        the_ends_of_the_share_are_stream_and_host,
        delays_anywhere_change_nothing,
        a_master_gives_way_to_a_replaced_weight_on_the_host,
        gradients_that_came_down_before_are_not_fetched_again,
        gradients_may_go_after_a_step_whoever_updated,
        gradients_may_go_when_a_step_has_failed,
        the_host_alone_waits_for_what_the_device_stored,
        steps_on_the_host_allocate_nothing,
        the_books_of_the_host_count_its_bytes,
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

fn the_host_equals_resident_with_every_type_and_gaps_in_the_gradients(on: &Subject) {
    for (slots, slot_bytes) in [(2, 4096), (3, 1025), (4, 16 << 10), (7, 1 << 20)] {
        let scenario = Scenario { missing: gaps, ..Scenario::new(mixed_tensors(), slots, slot_bytes) };
        scenario.check_placed(on, 10, Host);
    }
}

/// Large enough that several threads share a segment, and that its pieces do not end where vectors do.
fn long_tensors() -> Vec<Tensor> {
    vec![Tensor::of(100_003, Dtype::Bf16, Dtype::Bf16).master(), Tensor::f32(70_001), Tensor::f32(33)]
}

fn the_host_equals_resident_with_parameters_on_the_host(on: &Subject) {
    for (slots, slot_bytes, every) in [(2, 1536, 1), (3, 4099, 2), (7, 1 << 20, 3)] {
        let place = |(i, tensor): (usize, Tensor)| if i % every == 0 { tensor.on_host() } else { tensor };
        let tensors = mixed_tensors().into_iter().enumerate().map(place).collect();
        let scenario = Scenario { missing: gaps, ..Scenario::new(tensors, slots, slot_bytes) };
        scenario.check_placed(on, 10, Host);
        scenario.check_placed(on, 4, Shared(HostShare::Fixed(0.5)));
    }
    Scenario::new(long_tensors(), 2, 1 << 20).check_placed(on, 2, Host);
    let on_host = long_tensors().into_iter().map(Tensor::on_host).collect();
    Scenario::new(on_host, 2, 1 << 20).check_placed(on, 2, Host);
}

fn scale_and_skip_come_down(on: &Subject) {
    let plain = Scenario::new(mixed_tensors(), 3, 4096);
    for placement in [Host, Shared(HostShare::Fixed(0.5))] {
        Scenario { grad_scale: Some(0.37), ..plain.clone() }.check_placed(on, 4, placement);
        let skipped: Option<fn(usize) -> bool> = Some(|step| step % 3 == 1);
        Scenario { grad_scale: Some(1.7), skipped, ..plain.clone() }.check_placed(on, 6, placement);
    }
}

fn every_share_equals_resident(on: &Subject) {
    for share in SHARES {
        for (slots, slot_bytes) in [(2, 2048), (4, 4099)] {
            let scenario = Scenario { missing: gaps, ..Scenario::new(mixed_tensors(), slots, slot_bytes) };
            scenario.check_placed(on, 7, Shared(share));
        }
    }
}

fn auto_settles_and_stays_put_and_equals_resident(on: &Subject) {
    let rig = Rig::placed(on, Scenario::new(mixed_tensors(), 3, 2048), 10, Some(Shared(HostShare::Auto)));
    let (hybrid, _) = rig.hybrid.as_ref().unwrap();
    let mut settled = None;
    for step in 0..10 {
        assert_eq!(hybrid.settled_fraction().is_some(), step >= 6, "after {step} steps");
        rig.step(step).unwrap();
        if step >= 6 {
            let now = (hybrid.settled_fraction(), hybrid.last_fraction());
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
        let rig = Rig::placed(on, scenario, 1, Some(Shared(HostShare::Fixed(fraction))));
        rig.optimizer.pipeline().begin().unwrap();
        rig.step(0).unwrap();
        rig.synchronize();
        let chunks = rig.optimizer.plan().chunks().len() as u64;
        let (hybrid, _) = rig.hybrid.as_ref().unwrap();
        let expected = if host { (0, chunks) } else { (chunks, 0) };
        assert_eq!((rig.optimizer.pipeline().stats().chunks, hybrid.lane().stats().chunks), expected);
        assert_eq!(hybrid.last_fraction(), fraction);
    }
}

/// One call of each kind in turn is held up by its stream; the result must be that of an undisturbed run.
fn delays_anywhere_change_nothing(on: &Subject) {
    for placement in [Host, Shared(HostShare::Fixed(0.5))] {
        let rig = Rig::placed(on, Scenario::new(vec![Tensor::f32(900), Tensor::f32(30)], 2, 2048), 2, Some(placement));
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

/// Between two steps a user writes new weights; the masters of the old ones must not come back.
fn a_master_gives_way_to_a_replaced_weight_on_the_host(on: &Subject) {
    let tensors = vec![Tensor::of(3000, Dtype::Bf16, Dtype::Bf16).master()];
    let ends = [None, Some(Host), Some(Shared(HostShare::Fixed(0.5)))].map(|placement| {
        let rig = Rig::placed(on, Scenario::new(tensors.clone(), 3, 4096), 3, placement);
        rig.step(0).unwrap();
        rig.synchronize();
        on.finish(&rig.compute).unwrap();
        let weight = &rig.bindings(0)[0].param;
        on.put(&vec![0x3f; weight.bytes() as usize / 2], &weight.slice(0, weight.bytes() / 2).unwrap());
        rig.step(1).unwrap();
        rig.synchronize();
        on.finish(&rig.compute).unwrap();
        rig.outcome()
    });
    ends[1].assert_has(&ends[0], "the streamed update");
    ends[2].assert_has(&ends[0], "the streamed update");
}

fn gradients_that_came_down_before_are_not_fetched_again(on: &Subject) {
    let scenario = Scenario::new(vec![Tensor::of(3000, Dtype::Bf16, Dtype::Bf16).master(), Tensor::f32(500)], 3, 4096);
    let rig = Rig::placed(on, scenario, 2, Some(Host));
    let (hybrid, stores) = rig.hybrid.as_ref().unwrap();
    for step in 0..2 {
        let tensors = rig.bindings(step);
        let grad = tensors[0].grad.clone().unwrap().0;
        let landed = on.pinned(grad.bytes());
        // Late: the step must wait for it.
        on.launch(&rig.compute, &forebay::device::Kernel::Spin { ns: 3_000_000 }).unwrap();
        hybrid.lane().land(&grad, &landed, &rig.compute).unwrap();
        rig.run_landed(step, &[vec![Some(landed), None]]).unwrap();
        let down_bytes = 3000 * 2 + 500 * 8;
        assert_eq!(hybrid.lane().stats().down_bytes, down_bytes, "of {stores:?}");
    }
    rig.synchronize();
    rig.assert_exact(2);
}

/// A gradient that set out for the host and is not needed there has still left its memory when the step ends.
fn gradients_may_go_after_a_step_whoever_updated(on: &Subject) {
    for share in [0.0, 0.01, 1.0] {
        let scenario = Scenario::new(vec![Tensor::f32(3000), Tensor::f32(500)], 3, 4096);
        let rig = Rig::placed(on, scenario, 1, Some(Shared(HostShare::Fixed(share))));
        let grad = rig.bindings(0)[0].grad.clone().unwrap().0;
        let landed = on.pinned(grad.bytes());
        rig.hybrid.as_ref().unwrap().0.lane().land(&grad, &landed, &rig.compute).unwrap();
        rig.run_landed(0, &[vec![Some(landed), None]]).unwrap();
        on.launch(&rig.compute, &forebay::device::Kernel::Fill { dst: grad, byte: 0 }).unwrap();
        rig.synchronize();
        rig.assert_exact(1);
    }
}

/// Writing to a gradient is an error on a checked device while its way down may still be reading it.
fn gradients_may_go_when_a_step_has_failed(on: &Subject) {
    for placement in [Host, Shared(HostShare::Fixed(0.6)), Shared(HostShare::Fixed(0.99))] {
        let scenario = Scenario::new((0..12).map(|_| Tensor::f32(256)).collect(), 3, 2048);
        let rig = Rig::placed(on, scenario, 1, Some(placement));
        on.fault.on(Call::HostUpdate, 0, Misbehaviour::Break);
        device_error(rig.step(0));
        on.fault.clear();
        for binding in rig.bindings(0) {
            let (grad, _) = binding.grad.unwrap();
            on.launch(&rig.compute, &forebay::device::Kernel::Fill { dst: grad, byte: 0 }).unwrap();
        }
        rig.synchronize();
    }
}

/// Every second step has so few gradients that all of them are the host's, and their state was just stored.
fn the_host_alone_waits_for_what_the_device_stored(on: &Subject) {
    let missing: fn(usize, usize) -> bool = |step, tensor| step % 2 == 1 && tensor == 1;
    let scenario = Scenario { missing, ..Scenario::new(vec![Tensor::f32(256), Tensor::f32(256)], 2, 2048) };
    let rig = Rig::placed(on, scenario, 6, Some(Shared(HostShare::Fixed(0.5))));
    for step in 0..6 {
        rig.step(step).unwrap();
        let fraction = rig.hybrid.as_ref().unwrap().0.last_fraction();
        assert_eq!(fraction, if step % 2 == 1 { 1.0 } else { 0.5 });
    }
    rig.synchronize();
    rig.assert_exact(6);
}

fn steps_on_the_host_allocate_nothing(on: &Subject) {
    for placement in [Host, Shared(HostShare::Auto)] {
        let rig = Rig::placed(on, Scenario::new(mixed_tensors(), 3, 2048), 8, Some(placement));
        rig.step(0).unwrap();
        let before = on.taken();
        for step in 1..8 {
            rig.step(step).unwrap();
        }
        assert_eq!(on.taken(), before);
        rig.synchronize();
    }
}

fn the_books_of_the_host_count_its_bytes(on: &Subject) {
    let tensors = vec![Tensor::of(3000, Dtype::Bf16, Dtype::F32).master(), Tensor::f32(500), Tensor::f32(64).on_host()];
    let rig = Rig::placed(on, Scenario::new(tensors, 3, 4096), 1, Some(Host));
    rig.step(0).unwrap();
    let stats = rig.hybrid.as_ref().unwrap().0.lane().stats();
    assert_eq!(stats.chunks, rig.optimizer.plan().chunks().len() as u64);
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
    for placement in [Host, Shared(HostShare::Fixed(0.5))] {
        for call in calls {
            let on = on.another();
            let rig = Rig::placed(&on, Scenario::new(tensors.clone(), 2, 2048), 2, Some(placement));
            for nth in 0.. {
                rig.step(0).unwrap();
                on.fault.on(call, nth, Misbehaviour::Fail);
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
    for placement in [Host, Shared(HostShare::Fixed(0.6))] {
        let rig = Rig::placed(on, Scenario::new(mixed_tensors(), 3, 4096), 2, Some(placement));
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
    let rig = Rig::placed(on, Scenario::new(mixed_tensors(), 3, 4096), 1, Some(Host));
    device_error(rig.step(0));
    drop(rig);
}

fn a_refused_resource_of_the_host_leaves_nothing_behind(on: &Subject) {
    let on = on.another();
    for (call, count) in [(Call::Pin, 2), (Call::Event, 9), (Call::Stream, 2)] {
        for nth in 0..count {
            let pool = Pool::new(on.device.clone());
            on.fault.on(call, nth, Misbehaviour::Fail);
            let outcome = Hybrid::new(&pool, HostShare::Auto, &HostOptions::default(), 3, 4096);
            on.fault.clear();
            assert!(injected(&device_error(outcome)), "{call:?} {nth}");
            on.assert_empty();
        }
    }
}

fn a_fraction_outside_the_range_is_refused_by_name(on: &Subject) {
    for fraction in [-0.1, 1.01, f64::NAN] {
        let pool = Pool::new(on.device.clone());
        let outcome = Hybrid::new(&pool, HostShare::Fixed(fraction), &HostOptions::default(), 2, 4096);
        let said = outcome.unwrap_err().to_string();
        assert!(said.starts_with(&format!("invalid host_fraction: {fraction}; ")), "{said}");
    }
}
