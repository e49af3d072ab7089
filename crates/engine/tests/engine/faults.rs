//! Faults: whatever fails in whatever call, the error is typed, every slot is back, nothing hangs and nothing leaks.

use crate::common::trial::{Rig, Scenario, Tensor};
use crate::common::{Subject, device_error, traced};
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::{CpuDevice, CpuOptions, Error};
use forebay::optimizer::{Optimizer, OptimizerOptions, Placement};
use forebay::trace::TraceOptions;

forebay_device::on_devices! {
    every:
        a_refused_copy_leaves_the_pipeline_usable,
        a_refused_launch_leaves_the_pipeline_usable,
        a_refused_record_leaves_the_pipeline_usable,
        a_refused_wait_leaves_the_pipeline_usable,
        a_refused_synchronize_leaves_the_pipeline_usable,
        a_refusal_with_more_slots_than_chunks_leaves_the_pipeline_usable,
        a_refusal_behind_late_work_loses_no_slot_to_it,
        a_refused_power_leaves_state_that_is_trusted,
        a_refused_resource_leaves_nothing_behind,
        a_ring_larger_than_the_device_is_refused_with_the_numbers,
        state_larger_than_the_budget_is_refused_with_the_numbers;
    alone:
        a_fetch_stream_that_dies_is_an_error_and_no_hang,
        a_compute_stream_that_dies_is_an_error_and_no_hang,
        a_store_stream_that_dies_is_an_error_and_no_hang;
}

/// Five chunks of two columns, one tensor cut and one whole.
fn scenario(slots: usize) -> Scenario {
    Scenario::new(vec![Tensor::f32(1000), Tensor::f32(30), Tensor::f32(100)], slots, 2048)
}

fn injected(error: &Error) -> bool {
    matches!(error, Error::StreamFailed { reason, .. } if reason.contains("injected"))
}

/// Fails the n-th call of a kind in the second of two steps, for every n there is, and shows each time that the step after
/// it is refused, and that the same pipeline then trains as if nothing had been.
fn refuse_every(on: &Subject, call: Call, scenario: &Scenario, is_traced: bool) {
    refuse_every_times(on, call, 1, scenario, is_traced);
}

/// The same for so many such calls in a row.
fn refuse_every_times(on: &Subject, call: Call, times: u64, scenario: &Scenario, is_traced: bool) {
    let on = on.another();
    let rig = Rig::new(&on, scenario.clone(), 2).warm();
    let chunks = rig.plan().chunks().len() as u64;
    for nth in 0.. {
        // A trace of its own for each attempt: it sets its clock before anything is refused.
        let recorder = is_traced.then(|| traced(TraceOptions { capacity: 1000 }));
        rig.step(0).unwrap();
        (nth..nth + times).for_each(|nth| on.fault.on(call, nth, Misbehaviour::Fail));
        let outcome = rig.step(1);
        on.fault.clear();
        recorder.inspect(|recorder| drop(recorder.stop()));
        rig.assert_idle();
        if outcome.is_ok() {
            assert!(nth >= chunks, "a step makes more {call:?} calls than {nth}");
            break;
        }
        let error = device_error(outcome);
        assert!(injected(&error), "{call:?} {nth}: {error}");
        assert_distrusted(&rig, &error);
        rig.reset();
        rig.assert_idle();
        rig.steps(2);
        rig.assert_stats(rig.stats().streamed, 1);
        rig.assert_exact(2);
        rig.reset();
    }
}

/// Steps are refused, with the reason, until somebody says that the state is whole again.
fn assert_distrusted(rig: &Rig<'_>, error: &Error) {
    let reason = format!("its last step broke off with: {error}");
    assert_eq!(rig.optimizer.distrusted().as_deref(), Some(&*reason));
    assert_eq!(rig.step(1), Err(forebay::Error::Distrusted { reason }));
    rig.assert_idle();
}

fn a_refused_copy_leaves_the_pipeline_usable(on: &Subject) {
    refuse_every(on, Call::Copy, &scenario(2), false);
    refuse_every(on, Call::Copy, &scenario(4), true);
    let on_host = vec![Tensor::f32(600).on_host(), Tensor::f32(30), Tensor::f32(100).on_host()];
    refuse_every(on, Call::Copy, &Scenario { tensors: on_host, ..scenario(3) }, false);
}

fn a_refused_launch_leaves_the_pipeline_usable(on: &Subject) {
    refuse_every(on, Call::Launch, &scenario(2), false);
    refuse_every(on, Call::Launch, &scenario(4), true);
}

fn a_refused_record_leaves_the_pipeline_usable(on: &Subject) {
    refuse_every(on, Call::Record, &scenario(2), false);
    refuse_every(on, Call::Record, &scenario(4), true);
    // A refused recording is tried again: both attempts, and the attempt of the one who waits for it.
    refuse_every_times(on, Call::Record, 2, &scenario(2), false);
    refuse_every_times(on, Call::Record, 3, &scenario(3), false);
}

fn a_refused_wait_leaves_the_pipeline_usable(on: &Subject) {
    refuse_every(on, Call::Wait, &scenario(2), false);
    refuse_every(on, Call::Wait, &scenario(4), true);
}

/// Right after the first step, and in slots that were never used: what the failed step left of its marks is used next.
fn a_refusal_with_more_slots_than_chunks_leaves_the_pipeline_usable(on: &Subject) {
    for call in [Call::Copy, Call::Launch, Call::Record, Call::Wait] {
        let on = on.another();
        for nth in 0.. {
            let rig = Rig::new(&on, scenario(11), 2).warm();
            on.fault.on(call, nth, Misbehaviour::Fail);
            let outcome = rig.step(0);
            rig.assert_idle();
            if outcome.is_ok() {
                assert!(nth > 4, "{call:?}");
                break;
            }
            assert!(injected(&device_error(outcome)));
            // No pause: what was stored of the failed step is fetched again, in other slots.
            rig.optimizer.trust();
            rig.step(0).unwrap();
            rig.reset();
            rig.steps(2);
            rig.optimizer.synchronize().unwrap();
            rig.assert_exact(2);
        }
    }
}

/// How often a step waits on the host depends on the time, so the refusal may come out of the step or of the wait for
/// its end.
fn a_refused_synchronize_leaves_the_pipeline_usable(on: &Subject) {
    for nth in 0..2 {
        for late in [true, false] {
            let on = on.another();
            let rig = Rig::new(&on, scenario(2), 2).warm();
            if late {
                on.fault.on(Call::Copy, 2, Misbehaviour::Late { ns: 25_000_000 });
            }
            on.fault.on(Call::Synchronize, nth, Misbehaviour::Fail);
            let outcome = rig.step(0).and_then(|()| rig.optimizer.settle(0, 0));
            let outcome = outcome.and_then(|()| rig.optimizer.settle(0, 2));
            let outcome = outcome.and_then(|()| rig.optimizer.synchronize());
            rig.assert_idle();
            if let Err(error) = outcome {
                assert!(injected(&device_error::<()>(Err(error))));
            } else {
                assert!(!late || nth > 0, "a step whose store is late waits at least once");
                continue;
            }
            rig.reset();
            rig.steps(2);
            rig.optimizer.synchronize().unwrap();
            rig.assert_exact(2);
        }
    }
}

/// Work of the failed passage is still to run when its slot goes back, and the next passage must not meet it.
fn a_refusal_behind_late_work_loses_no_slot_to_it(on: &Subject) {
    let late = Misbehaviour::Late { ns: 25_000_000 };
    // The fetch is late and then: its second copy is refused; its update; its update's store. The update is late, and
    // its store is refused. The store is late, and its second copy is refused.
    for (slow, fast) in [
        ((Call::Copy, 4), (Call::Copy, 5)),
        ((Call::Copy, 4), (Call::Launch, 1)),
        ((Call::Copy, 4), (Call::Copy, 6)),
        ((Call::Launch, 1), (Call::Copy, 6)),
        ((Call::Copy, 6), (Call::Copy, 7)),
    ] {
        let rig = Rig::new(on, scenario(2), 2).warm();
        on.fault.on(slow.0, slow.1, late);
        on.fault.on(fast.0, fast.1, Misbehaviour::Fail);
        assert!(injected(&device_error(rig.step(0))), "{slow:?} {fast:?}");
        rig.assert_idle();
        rig.reset();
        rig.steps(2);
        rig.optimizer.synchronize().unwrap();
        rig.assert_exact(2);
    }
}

/// Everything that is computed before the first chunk is touched may fail without consequences.
fn a_refused_power_leaves_state_that_is_trusted(on: &Subject) {
    let rig = Rig::new(on, scenario(2), 2);
    for call in [Call::Launch, Call::Copy, Call::Record, Call::Synchronize] {
        on.fault.on(call, 0, Misbehaviour::Fail);
        assert!(injected(&device_error(rig.step(0))), "{call:?}");
        assert_eq!(rig.optimizer.distrusted(), None);
        rig.assert_idle();
    }
    rig.steps(2);
    rig.optimizer.synchronize().unwrap();
    rig.assert_exact(2);
}

fn make(on: &Subject, scenario: &Scenario) -> forebay::Result<Optimizer> {
    make_within(on, scenario, None)
}

fn make_within(on: &Subject, scenario: &Scenario, budget_bytes: Option<u64>) -> forebay::Result<Optimizer> {
    let (placement, plan) = (Placement::Stream, scenario.options);
    let options =
        OptimizerOptions { placement, plan, pinned_budget_bytes: budget_bytes, ..OptimizerOptions::default() };
    let optimizer = Optimizer::new(on.device.clone(), scenario.rule, options)?;
    optimizer.open_ring(None)?;
    optimizer.add(scenario.specs())?;
    Ok(optimizer)
}

fn a_refused_resource_leaves_nothing_behind(on: &Subject) {
    let scenario = scenario(3);
    // The ring, and what powers are computed in.
    for nth in 0..3 {
        on.fault.on(Call::Alloc, nth, Misbehaviour::OutOfMemory);
        let outcome = make(on, &scenario);
        if nth < 2 {
            let error = device_error(outcome);
            assert!(matches!(error, Error::OutOfDeviceMemory { requested_bytes: 1, .. }), "{error}");
            assert!(error.to_string().contains("1 bytes requested, 0 available"), "{error}");
        } else {
            drop(outcome.unwrap());
        }
        on.assert_empty();
    }
    // The rule for a third allocation is still there and strikes here.
    device_error(make(on, &scenario));
    // Where powers arrive, and the state.
    for nth in 0..2 {
        on.fault.on(Call::Pin, nth, Misbehaviour::OutOfMemory);
        let error = device_error(make(on, &scenario));
        assert!(matches!(error, Error::OutOfPinnedBudget { requested_bytes: 1, available_bytes: 0, .. }), "{error}");
        on.assert_empty();
    }

    for call in [Call::Stream, Call::Event] {
        let on = on.another();
        for nth in 0.. {
            on.fault.on(call, nth, Misbehaviour::Fail);
            let outcome = make(&on, &scenario);
            if outcome.is_ok() {
                assert!(nth >= 2, "{call:?}");
                break;
            }
            assert!(injected(&device_error(outcome)));
            on.assert_empty();
        }
    }
    // What was refused can be tried again.
    let options = OptimizerOptions { plan: scenario.options, ..OptimizerOptions::default() };
    let optimizer = Optimizer::new(on.device.clone(), scenario.rule, options).unwrap();
    let add = || optimizer.add(scenario.specs());
    assert_eq!(device_error(add()), Error::ZeroSize { what: "the ring" });
    on.fault.on(Call::Alloc, 0, Misbehaviour::OutOfMemory);
    device_error(optimizer.open_ring(None));
    assert!(!optimizer.has_ring());
    optimizer.open_ring(None).unwrap();
    on.fault.on(Call::Pin, 0, Misbehaviour::OutOfMemory);
    device_error(add());
    assert_eq!((add().unwrap(), add().unwrap()), (0, 1));
    drop(optimizer);
    on.assert_empty();
    let rig = Rig::new(on, scenario, 1);
    rig.steps(1);
    rig.optimizer.synchronize().unwrap();
    rig.assert_exact(1);
}

fn a_ring_larger_than_the_device_is_refused_with_the_numbers(on: &Subject) {
    let capacity_bytes = on.memory().unwrap().capacity_bytes;
    let mut huge = scenario(2);
    huge.options.slot_bytes = capacity_bytes.next_multiple_of(256);
    let error = device_error(make(on, &huge));
    let requested = huge.plan().ring_bytes();
    assert!(
        matches!(error, Error::OutOfDeviceMemory { requested_bytes, capacity_bytes: capacity, .. }
            if requested_bytes == requested && capacity == capacity_bytes),
        "{error}"
    );
    on.assert_empty();
    if on.kind.is_cuda() {
        return;
    }
    // A capacity of the test's own: one byte too few.
    let scenario = scenario(3);
    for missing in [1, 0] {
        let capacity_bytes = Some(scenario.plan().ring_bytes() - missing);
        let device = CpuDevice::open(CpuOptions { capacity_bytes, ..CpuOptions::default() }).unwrap();
        let small = Subject::wrapping(on.kind, device);
        let options = OptimizerOptions { plan: scenario.options, ..OptimizerOptions::default() };
        let optimizer = Optimizer::new(small.device.clone(), scenario.rule, options).unwrap();
        let outcome = optimizer.open_ring(None);
        if missing == 0 {
            outcome.unwrap();
        } else {
            let text = device_error(outcome).to_string();
            assert!(text.contains("6144 bytes requested, 6143 available of 6143"), "{text}");
        }
        drop(optimizer);
        small.assert_empty();
    }
}

fn state_larger_than_the_budget_is_refused_with_the_numbers(on: &Subject) {
    let scenario = scenario(3);
    let state_bytes = make(on, &scenario).unwrap().pinned_bytes();
    let error = device_error(make_within(on, &scenario, Some(state_bytes - 1)));
    assert_eq!(
        error,
        Error::OutOfPinnedBudget {
            requested_bytes: state_bytes,
            available_bytes: state_bytes - 1,
            budget_bytes: state_bytes - 1
        }
    );
    on.assert_empty();
    drop(make_within(on, &scenario, Some(state_bytes)).unwrap());
    on.assert_empty();
}

/// A stream fails while the pipeline is full. On CUDA the whole context goes with it.
fn kill(on: &Subject, call: Call, calls: &[u64]) {
    // One is enough to lose a context, and there is no second one.
    let calls = if on.kind.is_cuda() { &calls[..1] } else { calls };
    for &nth in calls {
        let other = (!on.kind.is_cuda()).then(|| on.another());
        let on = other.as_ref().unwrap_or(on);
        let rig = Rig::new(on, scenario(3), 2).warm();
        on.fault.on(call, nth, Misbehaviour::Break);
        let outcome = rig.step(0);
        rig.assert_idle();
        let outcome = outcome.and_then(|()| rig.optimizer.synchronize());
        let failed = |outcome| matches!(device_error::<()>(outcome), Error::StreamFailed { .. });
        assert!(failed(outcome), "{call:?} {nth}");
        for _ in 0..2 {
            // To the checker, what the dead stream was given is unordered for ever; it may say so first.
            rig.optimizer.trust();
            let error = device_error(rig.step(1));
            let unordered = on.kind.is_checked() && matches!(error, Error::Unordered { .. });
            assert!(unordered || matches!(error, Error::StreamFailed { .. }), "{call:?} {nth}: {error}");
            rig.assert_idle();
            // Whether a store was lost or only refused is a matter of time; that these end is not.
            let _ = rig.optimizer.synchronize();
            (0..3).for_each(|tensor| drop(rig.optimizer.settle(0, tensor)));
            rig.assert_idle();
        }
        assert_eq!(rig.column(2, "exp_avg").bytes(), 400);
        drop(rig);
        // A lost context tells no figures.
        if !on.kind.is_cuda() {
            on.assert_empty();
        }
    }
}

fn a_fetch_stream_that_dies_is_an_error_and_no_hang(on: &Subject) {
    kill(on, Call::Copy, &[5, 0, 1, 4, 13, 17]);
}

fn a_compute_stream_that_dies_is_an_error_and_no_hang(on: &Subject) {
    kill(on, Call::Launch, &[2, 0, 1, 4]);
}

fn a_store_stream_that_dies_is_an_error_and_no_hang(on: &Subject) {
    kill(on, Call::Copy, &[6, 2, 3, 15, 18, 19]);
}
