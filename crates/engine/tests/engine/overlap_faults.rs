//! Overlapped steps that break off: the error is kept and said, every slot is back, nothing hangs and nothing leaks.

use std::time::{Duration, Instant};

use crate::common::overlapped::{Way, commit, committed, offer, offer_all, order, until};
use crate::common::trial::{Rig, Scenario, Tensor, group_tensors};
use crate::common::{Subject, device_error};
use forebay::Error;
use forebay::device::Kernel;
use forebay::device::fault::{Call, Misbehaviour};
use forebay::optimizer::{HostShare, Optimizer, Placement};

forebay_device::on_devices! {
    every:
        every_refused_copy_is_said,
        every_refused_launch_is_said,
        every_refused_record_is_said,
        every_refused_wait_is_said,
        a_refused_write_or_update_on_the_host_is_said,
        a_refused_resource_leaves_nothing_behind,
        who_waits_gets_the_error,
        a_step_that_is_given_up_before_its_first_update_is_forgotten,
        a_step_that_is_given_up_later_is_torn,
        calls_in_the_middle_name_the_remedy,
        a_commit_that_is_refused_changes_nothing,
        an_optimizer_is_closed_or_dropped_in_the_middle,
        a_committed_step_is_completed_before_anything_else;
    alone:
        a_stream_that_dies_is_an_error_and_no_hang;
}

fn scenario() -> Scenario {
    let tensors = vec![Tensor::f32(1000), Tensor::f32(30), Tensor::f32(100), Tensor::f32(60), Tensor::f32(40)];
    Scenario { second_table: Some(3), second_resident: true, ..Scenario::new(tensors, 2, 2048) }
}

fn injected(error: &Error) -> bool {
    matches!(error, Error::Device(error) if error.to_string().contains("injected"))
}

/// Both steps once, so that no power is computed later.
fn warm(rig: &Rig<'_>, way: &Way) {
    for step in [0, 1, 0] {
        committed(rig, step, way).unwrap();
    }
    rig.synchronize();
    rig.reset();
}

/// Fails the n-th call of a kind in an overlapped step, for every n there is. Each time the failure is said until the
/// state is trusted again, and the same optimizer then trains as if nothing had been.
fn refuse_every(on: &Subject, call: Call, placement: Placement, offered: &[usize]) {
    let on = on.another();
    let rig = Rig::placed(&on, scenario(), 2, placement);
    let way = Way { need: vec![2, 1, 0, 3, 4], offered: offered.to_vec() };
    warm(&rig, &way);
    for nth in 0.. {
        on.fault.on(call, nth, Misbehaviour::Fail);
        let outcome = committed(&rig, 0, &way).and_then(|()| rig.optimizer.overlap_finish());
        on.fault.clear();
        let Err(error) = outcome else {
            assert!(nth > 0, "there are such calls");
            break;
        };
        assert!(injected(&error), "{call:?} {nth}: {error}");
        // What was refused on the caller's side leaves the step open.
        let given_up = rig.optimizer.overlap_abort();
        rig.assert_idle();
        if let Some(reason) = rig.optimizer.distrusted() {
            let refused = Err(Error::Distrusted { reason: reason.clone() });
            assert_eq!((rig.step(1), committed(&rig, 1, &way)), (refused.clone(), refused));
            assert_eq!(rig.optimizer.overlap_wait(None, Some(&rig.compute)).unwrap_err(), given_up.unwrap_err());
            assert!(rig.optimizer.overlap_updated().is_err() && rig.optimizer.settle(0, 0).is_err());
            rig.optimizer.trust();
        }
        rig.reset();
        for step in 0..2 {
            committed(&rig, step, &way).unwrap();
        }
        rig.synchronize();
        rig.assert_exact(2);
        rig.reset();
    }
}

fn placements() -> [(Placement, &'static [usize]); 4] {
    let hybrid = Placement::Hybrid(HostShare::Fixed(0.5));
    [(Placement::Stream, &[2, 0, 4]), (Placement::Stream, &[]), (Placement::Host, &[4]), (hybrid, &[])]
}

fn every_refused_copy_is_said(on: &Subject) {
    placements().into_iter().for_each(|(placement, offered)| refuse_every(on, Call::Copy, placement, offered));
}

fn every_refused_launch_is_said(on: &Subject) {
    placements().into_iter().for_each(|(placement, offered)| refuse_every(on, Call::Launch, placement, offered));
}

fn every_refused_record_is_said(on: &Subject) {
    placements().into_iter().for_each(|(placement, offered)| refuse_every(on, Call::Record, placement, offered));
}

fn every_refused_wait_is_said(on: &Subject) {
    placements().into_iter().for_each(|(placement, offered)| refuse_every(on, Call::Wait, placement, offered));
}

fn a_refused_write_or_update_on_the_host_is_said(on: &Subject) {
    refuse_every(on, Call::Write, Placement::Stream, &[1]);
    refuse_every(on, Call::HostUpdate, Placement::Host, &[]);
    refuse_every(on, Call::HostUpdate, Placement::Hybrid(HostShare::Fixed(0.5)), &[3]);
}

fn a_refused_resource_leaves_nothing_behind(on: &Subject) {
    for call in [Call::Stream, Call::Event] {
        let on = on.another();
        for nth in 0.. {
            let rig = Rig::new(&on, scenario(), 1).warm();
            on.fault.on(call, nth, Misbehaviour::Fail);
            let begun = rig.optimizer.overlap_begin(&order(&rig, &[0; 5]), &rig.scenario.groups_at(0));
            on.fault.clear();
            if begun.is_ok() {
                assert!(nth > 0, "{call:?}");
                break;
            }
            assert!(injected(&begun.unwrap_err()) && rig.optimizer.distrusted().is_none());
            // It can be tried again.
            committed(&rig, 0, &Way { need: vec![0; 5], offered: vec![0] }).unwrap();
            rig.synchronize();
            rig.assert_exact(1);
        }
    }
}

/// In another thread, before the failure; and afterwards.
fn who_waits_gets_the_error(on: &Subject) {
    let rig = Rig::new(on, scenario(), 1).warm();
    let way = Way { need: vec![0, 1, 2, 3, 4], offered: Vec::new() };
    warm_one(&rig, &way);
    // The ring is full until the spin ends, and the next copy is refused.
    on.launch(&rig.compute, &Kernel::Spin { ns: 200_000_000 }).unwrap();
    let per_chunk = 4;
    on.fault.on(Call::Copy, 2 * per_chunk, Misbehaviour::Fail);
    committed(&rig, 0, &way).unwrap();
    std::thread::scope(|scope| {
        let waits = |homes: Option<&'static [(usize, usize)]>| {
            let (optimizer, compute) = (&rig.optimizer, &rig.compute);
            scope.spawn(move || optimizer.overlap_wait(homes, Some(compute)))
        };
        let waiting = [waits(None), waits(Some(&[(0, 2)])), waits(Some(&[(0, 0), (1, 1)]))];
        for thread in waiting {
            assert!(injected(&thread.join().unwrap().unwrap_err()));
        }
    });
    on.fault.clear();
    assert!(injected(&rig.optimizer.overlap_finish().unwrap_err()));
    assert!(injected(&rig.optimizer.settle(0, 0).unwrap_err()));
    assert!(injected(&rig.optimizer.overlap_updated().unwrap_err()));
    assert!(matches!(rig.step(0), Err(Error::Distrusted { .. })));
    rig.assert_idle();
    rig.optimizer.trust();
    rig.reset();
}

fn warm_one(rig: &Rig<'_>, way: &Way) {
    for _ in 0..2 {
        committed(rig, 0, way).unwrap();
    }
    rig.synchronize();
    rig.reset();
}

fn a_step_that_is_given_up_before_its_first_update_is_forgotten(on: &Subject) {
    let rig = Rig::new(on, scenario(), 2).warm();
    let optimizer = &rig.optimizer;
    optimizer.overlap_abort().unwrap();
    for offered in [&[][..], &[2, 0, 4, 3]] {
        optimizer.overlap_begin(&order(&rig, &[0; 5]), &rig.scenario.groups_at(0)).unwrap();
        on.launch(&rig.compute, &Kernel::Spin { ns: 100_000_000 }).unwrap();
        offer_all(&rig, 0, offered).unwrap();
        optimizer.overlap_abort().unwrap();
        assert_eq!((optimizer.distrusted(), optimizer.overlap_stats().early_units), (None, 0));
        assert!(matches!(offer(&rig, 0, 1), Err(Error::InvalidOption { option: "overlapped step", .. })));
        assert!(matches!(commit(&rig, 0, &[]), Err(Error::InvalidOption { option: "overlapped step", .. })));
    }
    rig.step(0).unwrap();
    committed(&rig, 1, &Way { need: vec![0; 5], offered: vec![1, 2] }).unwrap();
    rig.synchronize();
    rig.assert_exact(2);
}

fn a_step_that_is_given_up_later_is_torn(on: &Subject) {
    let rig = Rig::new(on, scenario(), 2).warm();
    let optimizer = &rig.optimizer;
    optimizer.overlap_begin(&order(&rig, &[0; 5]), &rig.scenario.groups_at(0)).unwrap();
    offer_all(&rig, 0, &[4]).unwrap();
    until("an update", || optimizer.overlap_stats().early_units == 1);
    let error = optimizer.overlap_abort().unwrap_err();
    assert!(error.to_string().starts_with("tensor.4 "), "{error}");
    assert!(optimizer.distrusted().unwrap().contains("tensor.4"));
    assert!(matches!(rig.step(0), Err(Error::Distrusted { .. })));
    rig.assert_idle();
    optimizer.trust();
    rig.reset();
    rig.steps(2);
    rig.synchronize();
    rig.assert_exact(2);
}

fn calls_in_the_middle_name_the_remedy(on: &Subject) {
    let rig = Rig::new(on, scenario(), 1).warm();
    let optimizer = &rig.optimizer;
    optimizer.overlap_begin(&order(&rig, &[0; 5]), &rig.scenario.groups_at(0)).unwrap();
    let grad = rig.grad(0, 0).unwrap();
    let refused: [(&str, forebay::Result<()>); 13] = [
        ("step", rig.step(0)),
        ("add", optimizer.add(Vec::new()).map(drop)),
        ("settle", optimizer.settle(0, 0)),
        ("synchronize", optimizer.synchronize()),
        ("snapshot", Optimizer::snapshot(&[optimizer], 0).map(drop)),
        ("protect_all", optimizer.protect_all()),
        ("open_landing", optimizer.open_landing(0, &[8; 3])),
        ("land", optimizer.land(0, 0, &grad, Some(&rig.compute))),
        ("join_ring", optimizer.join_ring().map(drop)),
        ("close_ring", optimizer.close_ring()),
        ("set_slots", optimizer.set_slots(3)),
        ("finish", optimizer.overlap_finish()),
        ("begin", optimizer.overlap_begin(&order(&rig, &[0; 5]), &rig.scenario.groups_at(0))),
    ];
    for (call, outcome) in refused {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("in the middle of an overlapped step; call step() first"), "{call}: {error}");
    }
    // What only looks goes on, and so does the step.
    optimizer.stats().unwrap();
    optimizer.plan(0).unwrap();
    commit(&rig, 0, &[]).unwrap();
    rig.synchronize();
    rig.assert_exact(1);
}

fn a_commit_that_is_refused_changes_nothing(on: &Subject) {
    let rig = Rig::new(on, scenario(), 1).warm();
    let optimizer = &rig.optimizer;
    let wrong_order = optimizer.overlap_begin(&[vec![0; 3]], &rig.scenario.groups_at(0));
    assert!(matches!(wrong_order, Err(Error::PlanMismatch { .. })));
    optimizer.overlap_begin(&order(&rig, &[0; 5]), &rig.scenario.groups_at(0)).unwrap();
    on.launch(&rig.compute, &Kernel::Spin { ns: 100_000_000 }).unwrap();
    offer(&rig, 0, 1).unwrap();
    let named = |outcome: forebay::Result<()>, name: &str, reason: &str| match outcome {
        Err(Error::PlanMismatch { tensor, reason: found }) => {
            assert!(tensor == name && found.contains(reason), "{tensor}: {found}");
        }
        other => panic!("{other:?}"),
    };
    named(offer(&rig, 0, 1), "tensor.1", "offered already");
    named(commit(&rig, 0, &[]), "tensor.1", "offered already");
    let mut bindings = rig.bindings(0);
    bindings[1] = None;
    bindings[2] = rig.bindings(0)[0].clone();
    let cut = optimizer.overlap_commit(rig.tables(bindings), Some(&rig.compute), rig.flags(0));
    named(cut, "tensor.2", "1000 elements where 100 were planned");
    let swapped = rig.bindings(0).swap_remove(0).unwrap();
    named(optimizer.overlap_offer((0, 2), swapped, Vec::new(), None), "tensor.2", "1000 elements");
    let resident = rig.bindings(0).swap_remove(3).unwrap();
    named(optimizer.overlap_offer((1, 0), resident, Vec::new(), None), "tensor.3", "0 columns of state where 2");
    let unknown = rig.bindings(0).swap_remove(0).unwrap();
    assert!(optimizer.overlap_offer((0, 3), unknown, Vec::new(), None).is_err());
    commit(&rig, 0, &[1]).unwrap();
    rig.synchronize();
    rig.assert_exact(1);
}

/// How many threads of overlapped steps this process has. Where other tests run in the same process, it says 0: theirs
/// come and go.
fn threads() -> usize {
    if std::env::var_os("NEXTEST").is_none() {
        return 0;
    }
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.trim() == "forebay-overlap").count()
}

fn an_optimizer_is_closed_or_dropped_in_the_middle(on: &Subject) {
    for placement in [Placement::Stream, Placement::Host] {
        for (offered, commits, closes) in
            [(true, false, true), (true, false, false), (false, false, false), (true, true, true), (true, true, false)]
        {
            let on = on.another();
            let before = threads();
            let rig = Rig::placed(&on, scenario(), 1, placement);
            warm_one(&rig, &Way { need: vec![0; 5], offered: Vec::new() });
            assert!(threads() == before + 1 || std::env::var_os("NEXTEST").is_none());
            rig.optimizer.overlap_begin(&order(&rig, &[0; 5]), &rig.scenario.groups_at(0)).unwrap();
            on.launch(&rig.compute, &Kernel::Spin { ns: 50_000_000 }).unwrap();
            let offered: &[usize] = if offered { &[4, 3] } else { &[] };
            offer_all(&rig, 0, offered).unwrap();
            if commits {
                commit(&rig, 0, offered).unwrap();
            }
            if closes {
                rig.optimizer.close().unwrap();
                assert_eq!(threads(), before);
                assert!(matches!(commit(&rig, 0, &[]), Err(Error::InvalidOption { .. })));
                assert!(!rig.optimizer.overlap_wait(Some(&[(0, 0)]), Some(&rig.compute)).unwrap() || commits);
            }
            let weights: Vec<_> = (0..5).map(|tensor| (rig.weight(tensor), tensor)).collect();
            let stepped = || (0..5).map(|tensor| on.download(&rig.weight(tensor))).collect::<Vec<_>>();
            if closes && commits {
                // What was committed has happened: the weights are those of the step.
                let done = stepped();
                let plain = Rig::placed(&on, scenario(), 1, placement);
                plain.step(0).unwrap();
                plain.synchronize();
                let expected: Vec<_> = (0..5).map(|tensor| on.download(&plain.weight(tensor))).collect();
                assert_eq!(done, expected);
            }
            drop((rig, weights));
            assert_eq!(threads(), before);
            on.assert_empty();
        }
    }
}

fn a_committed_step_is_completed_before_anything_else(on: &Subject) {
    let rig = Rig::new(on, Scenario::new(group_tensors(), 2, 8192), 3).warm();
    let tensors = rig.scenario.tensors.len();
    let way = Way { need: (0..tensors as i64).collect(), offered: vec![1] };
    for step in 0..2 {
        on.launch(&rig.compute, &Kernel::Spin { ns: 150_000_000 }).unwrap();
        let since = Instant::now();
        committed(&rig, step, &way).unwrap();
        // Of one tensor, and of all.
        rig.optimizer.settle(0, tensors - 1).unwrap();
        assert!(since.elapsed() > Duration::from_millis(140));
        let counters: Vec<_> = (0..tensors).map(|tensor| on.host_bytes(&rig.counter(tensor)).unwrap()).collect();
        assert!(counters.iter().all(|counter| *counter == (step as f32 + 1.0).to_le_bytes()));
    }
    rig.step(2).unwrap();
    rig.synchronize();
    rig.assert_exact(3);
}

fn a_stream_that_dies_is_an_error_and_no_hang(on: &Subject) {
    for call in [Call::Copy, Call::Launch, Call::Record] {
        // A context that is lost on CUDA is lost for all: one of them is enough there.
        if on.kind.is_cuda() && call != Call::Launch {
            continue;
        }
        let on = on.another();
        let rig = Rig::new(&on, scenario(), 1).warm();
        let way = Way { need: vec![0; 5], offered: vec![0, 4] };
        warm_one(&rig, &way);
        on.fault.on(call, 3, Misbehaviour::Break);
        let outcome = committed(&rig, 0, &way).and_then(|()| rig.optimizer.overlap_finish());
        // It may be seen when it has been submitted, or by who waits.
        let outcome = outcome.and_then(|()| rig.optimizer.overlap_wait(None, None).map(drop));
        let outcome = outcome.and_then(|()| rig.optimizer.synchronize());
        device_error(outcome);
        drop(rig);
    }
}
