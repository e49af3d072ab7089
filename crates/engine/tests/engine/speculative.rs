//! Steps that update on the second copy of the state before it is known whether they are clipped: the bits are those of a
//! plain step, whatever the coefficient turns out to be.

use crate::common::overlapped::{Way, order, until};
use crate::common::trial::{Outcome, Rig, Scenario, Tensor};
use crate::common::{Subject, cases};
use forebay::Error;
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::{Dtype, Kernel, Region, Rule, StateFormat};
use forebay::optimizer::{HostShare, Optimizer, Placement, StepFlags};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

forebay_device::on_devices! {
    every:
        any_coefficients_give_the_bits_of_plain_steps,
        a_right_guess_makes_the_other_copy_the_state,
        a_wrong_guess_is_done_again_from_the_first_copy,
        weights_that_were_replaced_count_as_in_a_plain_step,
        a_chunk_that_was_held_guesses_again_in_the_next_step,
        what_has_no_gradient_is_carried_over,
        a_step_that_is_given_up_changes_nothing,
        an_optimizer_is_closed_or_dropped_in_the_middle_with_its_weights,
        a_save_keeps_the_state_of_its_moment,
        delays_anywhere_change_nothing,
        every_refused_call_is_said,
        what_cannot_guess_is_refused,
        many_steps_allocate_nothing;
}

/// Half-precision weights with masters, as a model has them, next to tensors of one element and of none.
fn model() -> Vec<Tensor> {
    use Dtype::{Bf16, F16, F32};
    vec![
        Tensor::of(3000, Bf16, Bf16).master(),
        Tensor::of(777, Bf16, F32).master(),
        Tensor::of(2500, F16, F16).master(),
        Tensor::of(1, Bf16, F16).master(),
        Tensor::of(0, Bf16, Bf16).master(),
        Tensor::of(1500, Bf16, Bf16).master().full(),
        Tensor::of(65, F16, F16).master().full(),
        Tensor::of(2100, Bf16, Bf16).master(),
        Tensor::of(640, Bf16, Bf16).master(),
        Tensor::of(1300, Bf16, Bf16).master().kept_as(StateFormat::Blocks),
        Tensor::of(1001, F16, F16).master().full().kept_as(StateFormat::Bf16),
    ]
}

/// A step of a trial.
#[derive(Debug, Clone)]
struct Trial {
    way: Way,
    coefficient: Option<f32>,
    /// Whether it guesses; else it is an overlapped step that does not.
    guesses: bool,
    /// A tensor whose weights are replaced before it.
    replaced: Option<usize>,
    /// Whether another attempt is given up before it.
    given_up: bool,
}

fn right(offered: &[usize]) -> Trial {
    let way = Way { need: (0..model().len() as i64).collect(), offered: offered.to_vec() };
    Trial { way, coefficient: Some(1.0), guesses: true, replaced: None, given_up: false }
}

fn wrong(offered: &[usize]) -> Trial {
    Trial { coefficient: Some(0.37), ..right(offered) }
}

/// The coefficients on the device.
struct Scales(Vec<Option<Region>>);

impl Scales {
    fn new(on: &Subject, trials: &[Trial]) -> Self {
        let scale = |trial: &Trial| trial.coefficient.map(|scale| on.upload(&scale.to_ne_bytes()).all());
        Self(trials.iter().map(scale).collect())
    }

    fn flags(&self, step: usize) -> StepFlags {
        StepFlags { grad_scale: self.0[step].clone(), skip: None }
    }
}

/// Replaces the weights of a tensor, all but the first of them.
fn replace(on: &Subject, rig: &Rig<'_>, tensor: usize) {
    rig.synchronize();
    let weight = rig.weight(tensor);
    let width = weight.bytes().min(2);
    let part = weight.slice(width, weight.bytes() - width).unwrap();
    on.launch(&rig.compute, &Kernel::Fill { dst: part, byte: 0x3c }).unwrap();
}

fn begin(rig: &Rig<'_>, at: usize, trial: &Trial) -> forebay::Result<()> {
    let (order, groups) = (order(rig, &trial.way.need), rig.scenario.groups_at(at));
    if trial.guesses {
        rig.optimizer.overlap_begin_speculative(&order, &groups)?;
    } else {
        rig.optimizer.overlap_begin(&order, &groups)?;
    }
    for &tensor in trial.way.offered.iter().filter(|_| trial.guesses) {
        let Some(binding) = rig.bindings(at).swap_remove(tensor) else { continue };
        rig.optimizer.overlap_offer(rig.scenario.place(tensor), binding, Vec::new(), Some(&rig.compute))?;
    }
    Ok(())
}

fn commit(rig: &Rig<'_>, at: usize, trial: &Trial, scales: &Scales) -> forebay::Result<()> {
    let mut bindings = rig.bindings(at);
    trial.way.offered.iter().filter(|_| trial.guesses).for_each(|&tensor| bindings[tensor] = None);
    rig.optimizer.overlap_commit(rig.tables(bindings), Some(&rig.compute), scales.flags(at))
}

fn step(rig: &Rig<'_>, at: usize, trial: &Trial, scales: &Scales) -> forebay::Result<()> {
    begin(rig, at, trial)?;
    commit(rig, at, trial, scales)
}

/// What plain steps give.
fn plain(on: &Subject, scenario: &Scenario, trials: &[Trial], scales: &Scales) -> Outcome {
    let rig = Rig::new(on, scenario.clone(), trials.len());
    for (at, trial) in trials.iter().enumerate() {
        trial.replaced.iter().for_each(|&tensor| replace(on, &rig, tensor));
        let (tables, groups) = (rig.tables(rig.bindings(at)), rig.scenario.groups_at(at));
        rig.optimizer.step(tables, &groups, Some(&rig.compute), scales.flags(at)).unwrap();
    }
    rig.synchronize();
    rig.outcome()
}

fn rig<'a>(on: &'a Subject, scenario: &Scenario, steps: usize) -> Rig<'a> {
    let rig = Rig::new(on, scenario.clone(), steps);
    rig.optimizer.open_second().unwrap();
    rig
}

/// Takes the steps, and compares with plain ones; returns how many guesses there were, and how many were right.
fn check(on: &Subject, scenario: &Scenario, trials: &[Trial]) -> (u64, u64) {
    let (rig, scales) = (rig(on, scenario, trials.len()), Scales::new(on, trials));
    for (at, trial) in trials.iter().enumerate() {
        trial.replaced.iter().for_each(|&tensor| replace(on, &rig, tensor));
        if trial.given_up {
            begin(&rig, at, trial).unwrap();
            rig.optimizer.overlap_abort().unwrap();
        }
        step(&rig, at, trial, &scales).unwrap();
    }
    rig.synchronize();
    rig.assert_idle();
    rig.outcome().assert_has(&plain(on, scenario, trials, &scales), "plain steps");
    let stats = rig.optimizer.overlap_stats();
    (stats.speculated, stats.accepted)
}

fn scenario() -> Scenario {
    Scenario::new(model(), 3, 8192)
}

fn trials(tensors: usize) -> impl Strategy<Value = Vec<Trial>> {
    let all: Vec<usize> = (0..tensors).collect();
    let way = (
        prop::collection::vec(-3..tensors as i64, tensors),
        prop::sample::subsequence(all, 0..=tensors).prop_shuffle(),
    );
    let way = way.prop_map(|(need, offered)| Way { need, offered });
    let scale = prop::sample::select(vec![Some(1.0), Some(1.0), Some(0.5), None, Some(0.999_999_94)]);
    let trial = (way, scale, prop::bool::weighted(0.8), prop::option::weighted(0.3, 0..tensors), any::<bool>());
    let trial = trial.prop_map(|(way, coefficient, guesses, replaced, given_up)| {
        let given_up = given_up && guesses;
        Trial { way, coefficient, guesses, replaced, given_up }
    });
    prop::collection::vec(trial, 1..5)
}

fn sometimes_missing(step: usize, tensor: usize) -> bool {
    (3 * step + tensor).is_multiple_of(4)
}

fn any_coefficients_give_the_bits_of_plain_steps(on: &Subject) {
    let tensors = model().len();
    let rules = prop::sample::select(vec!["adamw", "adam", "sgd", "lion"]);
    let sizes = prop::sample::select(vec![2048u64, 8192, 1 << 20]);
    let strategy = (trials(tensors), 2..6usize, rules, sizes, prop::option::of(1..tensors), any::<bool>());
    let mut runner = TestRunner::new(ProptestConfig { cases: cases(12), ..ProptestConfig::default() });
    let outcome = runner.run(&strategy, |(mut trials, slots, rule, bytes, second_table, second_resident)| {
        let scenario = Scenario::new(model(), slots, bytes).with(Rule::named(rule).unwrap());
        let rounding_seed = (slots % 2 == 0).then_some(slots as u64);
        let missing = sometimes_missing;
        let scenario = Scenario { second_table, second_resident, missing, rounding_seed, ..scenario };
        // What is on the device has no second copy.
        let pinned = if second_resident { second_table.unwrap_or(tensors) } else { tensors };
        trials.iter_mut().for_each(|trial| trial.way.offered.retain(|&tensor| tensor < pinned));
        check(on, &scenario, &trials);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

fn columns(rig: &Rig<'_>) -> Vec<Region> {
    let names = |tensor: usize| rig.scenario.columns(tensor).into_iter().map(move |column| (tensor, column.name));
    let all = (0..rig.scenario.tensors.len()).flat_map(names);
    all.map(|(tensor, name)| rig.column(tensor, name)).filter(|region| region.bytes() > 0).collect()
}

fn a_right_guess_makes_the_other_copy_the_state(on: &Subject) {
    let all: Vec<usize> = (0..model().len()).collect();
    let trials = [right(&all), right(&[0, 2, 7]), right(&all)];
    let (rig, scales) = (rig(on, &scenario(), 3), Scales::new(on, &trials));
    let bytes = rig.optimizer.pinned_bytes();
    for (at, trial) in trials.iter().enumerate() {
        let before = columns(&rig);
        let kept: Vec<_> = before.iter().map(|region| on.host_bytes(region).unwrap()).collect();
        begin(&rig, at, trial).unwrap();
        // Before the commit there is nothing to wait for, nothing to read, and no gradient to free.
        until("updates before the commit", || rig.optimizer.overlap_stats().early_units > 0);
        assert_eq!(rig.optimizer.overlap_updated().unwrap(), []);
        commit(&rig, at, trial, &scales).unwrap();
        rig.synchronize();
        let after = columns(&rig);
        assert!(before.iter().zip(&after).all(|(before, after)| !before.overlaps(after)), "the state has moved");
        // The copy that was the state is as it was.
        assert!(before.iter().zip(&kept).all(|(region, kept)| on.host_bytes(region).unwrap() == *kept));
        let stats = rig.optimizer.overlap_stats();
        assert_eq!((stats.speculated, stats.accepted), (at as u64 + 1, at as u64 + 1));
    }
    assert_eq!(rig.optimizer.pinned_bytes(), bytes);
    rig.outcome().assert_has(&plain(on, &scenario(), &trials, &scales), "plain steps");
}

fn a_wrong_guess_is_done_again_from_the_first_copy(on: &Subject) {
    let all: Vec<usize> = (0..model().len()).collect();
    let trials = [wrong(&all), wrong(&[1, 5]), right(&all), wrong(&all), right(&[])];
    let (rig, scales) = (rig(on, &scenario(), trials.len()), Scales::new(on, &trials));
    for (at, trial) in trials.iter().enumerate() {
        let before = columns(&rig);
        let is_right = trial.coefficient == Some(1.0) && !trial.way.offered.is_empty();
        begin(&rig, at, trial).unwrap();
        if !trial.way.offered.is_empty() {
            until("updates before the commit", || rig.optimizer.overlap_stats().early_units > 0);
        }
        commit(&rig, at, trial, &scales).unwrap();
        rig.synchronize();
        let stays = before.iter().zip(columns(&rig)).all(|(before, after)| before.overlaps(&after));
        assert_eq!(stays, !is_right, "{at}");
    }
    let stats = rig.optimizer.overlap_stats();
    // The last one offered nothing, so there was nothing to guess.
    assert_eq!((stats.speculated, stats.accepted), (4, 1));
    rig.outcome().assert_has(&plain(on, &scenario(), &trials, &scales), "plain steps");
}

/// The master gives way to a weight that is not its rounding, also where only a part of a tensor's chunks has such.
fn weights_that_were_replaced_count_as_in_a_plain_step(on: &Subject) {
    let all: Vec<usize> = (0..model().len()).collect();
    for (first, second) in [(right(&all), right(&all)), (wrong(&all), right(&all)), (right(&all), wrong(&all))] {
        for tensor in [0, 2, 3, 8] {
            for given_up in [false, true] {
                let replaced = Trial { replaced: Some(tensor), given_up, ..second.clone() };
                let trials = [first.clone(), replaced, wrong(&all), right(&all)];
                let (guesses, _) = check(on, &scenario(), &trials);
                assert!(guesses >= 4, "{guesses}");
            }
        }
    }
}

fn a_chunk_that_was_held_guesses_again_in_the_next_step(on: &Subject) {
    let all: Vec<usize> = (0..model().len()).collect();
    let trials = [Trial { replaced: Some(2), ..right(&all) }, right(&all)];
    let (rig, scales) = (rig(on, &scenario(), 2), Scales::new(on, &trials));
    let units = rig.plan().chunks().len() as u64;
    let mut again = Vec::new();
    for (at, trial) in trials.iter().enumerate() {
        trial.replaced.iter().for_each(|&tensor| replace(on, &rig, tensor));
        begin(&rig, at, trial).unwrap();
        until("all updates", || rig.optimizer.overlap_stats().early_units == units);
        commit(&rig, at, trial, &scales).unwrap();
        rig.synchronize();
        again.push(rig.optimizer.overlap_stats().late_units);
    }
    assert!(again[0] > 0 && again[0] < units && again[1] == 0, "{again:?}");
    rig.outcome().assert_has(&plain(on, &scenario(), &trials, &scales), "plain steps");
}

fn what_has_no_gradient_is_carried_over(on: &Subject) {
    let all: Vec<usize> = (0..model().len()).collect();
    for missing in [|step, tensor| tensor % 2 == step % 2, |_, tensor| tensor >= 3] as [fn(usize, usize) -> bool; 2] {
        for bytes in [2048, 1 << 20] {
            let scenario = Scenario { missing, second_table: Some(5), ..Scenario::new(model(), 2, bytes) };
            let trials = [right(&all), right(&all), wrong(&all), right(&all)];
            assert_eq!(check(on, &scenario, &trials), (4, 3));
        }
    }
}

fn a_step_that_is_given_up_changes_nothing(on: &Subject) {
    let all: Vec<usize> = (0..model().len()).collect();
    let rig = rig(on, &scenario(), 1);
    rig.step(0).unwrap();
    rig.reset();
    for replaced in [None, Some(2)] {
        // Masters were written together with their weights.
        replaced.iter().for_each(|&tensor| replace(on, &rig, tensor));
        rig.synchronize();
        let before = rig.outcome();
        for units in [1, 3, 5] {
            begin(&rig, 0, &right(&all)).unwrap();
            until("some updates", || rig.optimizer.overlap_stats().early_units >= units);
            rig.optimizer.overlap_abort().unwrap();
            assert!(rig.outcome() == before, "{replaced:?}");
            assert!(rig.optimizer.distrusted().is_none());
            rig.assert_idle();
        }
    }
    assert_eq!(rig.optimizer.overlap_stats().accepted, 0);
}

fn an_optimizer_is_closed_or_dropped_in_the_middle_with_its_weights(on: &Subject) {
    let all: Vec<usize> = (0..model().len()).collect();
    let rig = rig(on, &scenario(), 1);
    let weights = |rig: &Rig<'_>| -> Vec<Vec<u8>> {
        let filled = (0..model().len()).filter(|&tensor| model()[tensor].elements > 0);
        filled.map(|tensor| on.download(&rig.weight(tensor))).collect()
    };
    let before = weights(&rig);
    begin(&rig, 0, &right(&all)).unwrap();
    until("some updates", || rig.optimizer.overlap_stats().early_units > 2);
    rig.optimizer.close().unwrap();
    assert!(weights(&rig) == before);
}

/// A save that began before a guess has the state of its moment, and the guess waits for nobody: it writes elsewhere.
fn a_save_keeps_the_state_of_its_moment(on: &Subject) {
    let all: Vec<usize> = (0..model().len()).collect();
    let trials = [right(&all), wrong(&all), right(&all), right(&all)];
    let (rig, scales) = (rig(on, &scenario(), trials.len()), Scales::new(on, &trials));
    for (at, trial) in trials.iter().enumerate() {
        let regions = columns(&rig);
        let kept: Vec<_> = regions.iter().map(|region| on.host_bytes(region).unwrap()).collect();
        let snapshot = Optimizer::snapshot(&[&rig.optimizer], u64::MAX).unwrap();
        step(&rig, at, trial, &scales).unwrap();
        rig.synchronize();
        let buffer = forebay::device::Buffer::pageable(1 << 16).unwrap();
        snapshot.plan(&regions);
        for (region, kept) in regions.iter().zip(&kept) {
            let mut bytes = Vec::new();
            let look = |piece: &Region| {
                forebay::device::file::visit(piece, |part| bytes.extend_from_slice(part)).unwrap();
                Ok(())
            };
            snapshot.read(region, &buffer, 0, look).unwrap();
            assert!(bytes == *kept, "step {at}");
        }
        snapshot.finish();
    }
    rig.outcome().assert_has(&plain(on, &scenario(), &trials, &scales), "plain steps");
}

fn delays_anywhere_change_nothing(on: &Subject) {
    let calls = prop::sample::select(vec![Call::Copy, Call::Launch, Call::Record, Call::Wait]);
    let delays = prop::collection::vec((calls, 0..60u64), 1..4);
    let mut runner = TestRunner::new(ProptestConfig { cases: cases(6), ..ProptestConfig::default() });
    let outcome = runner.run(&(trials(model().len()), delays), |(trials, delays)| {
        for (call, nth) in delays {
            on.fault.on(call, nth, Misbehaviour::Late { ns: 10_000_000 });
        }
        check(on, &Scenario { missing: sometimes_missing, ..scenario() }, &trials);
        on.fault.clear();
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// Fails the n-th call of a kind for every n there is. A step that fails is said until the state is trusted again.
fn every_refused_call_is_said(on: &Subject) {
    let tensors =
        vec![Tensor::of(1000, Dtype::Bf16, Dtype::Bf16).master(), Tensor::of(70, Dtype::F16, Dtype::F16).master()];
    let scenario = Scenario::new(tensors, 2, 4096);
    for (call, coefficient) in
        [Call::Copy, Call::Launch, Call::Record, Call::Wait].into_iter().flat_map(|call| [(call, 1.0), (call, 0.5)])
    {
        let on = on.another();
        let way = Way { need: vec![1, 0], offered: vec![0, 1] };
        let trial = Trial { way, coefficient: Some(coefficient), guesses: true, replaced: None, given_up: false };
        let trials = [trial.clone(), trial];
        let (rig, scales) = (rig(&on, &scenario, 2), Scales::new(&on, &trials));
        for at in [0, 1, 0] {
            step(&rig, at, &trials[at], &scales).unwrap();
        }
        rig.reset();
        let expected = plain(&on, &scenario, &trials, &scales);
        for nth in 0.. {
            on.fault.on(call, nth, Misbehaviour::Fail);
            let outcome = step(&rig, 0, &trials[0], &scales).and_then(|()| rig.optimizer.overlap_finish());
            on.fault.clear();
            let Err(error) = outcome else {
                assert!(nth > 0, "there are such calls");
                break;
            };
            assert!(error.to_string().contains("injected"), "{call:?} {nth}: {error}");
            let _ = rig.optimizer.overlap_abort();
            rig.assert_idle();
            if rig.optimizer.distrusted().is_some() {
                assert!(matches!(step(&rig, 1, &trials[1], &scales), Err(Error::Distrusted { .. })));
                rig.optimizer.trust();
            }
            rig.reset();
            for (at, trial) in trials.iter().enumerate() {
                step(&rig, at, trial, &scales).unwrap();
            }
            rig.synchronize();
            rig.outcome().assert_has(&expected, "plain steps");
            rig.reset();
        }
    }
}

fn what_cannot_guess_is_refused(on: &Subject) {
    let refused = |outcome: forebay::Result<()>, said: &str| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    };
    let all = right(&[0]);
    let begun =
        |rig: &Rig<'_>| rig.optimizer.overlap_begin_speculative(&order(rig, &all.way.need), &rig.scenario.groups_at(0));
    let rig_without = Rig::new(on, scenario(), 1);
    refused(begun(&rig_without), "open a second copy first");
    for placement in [Placement::Host, Placement::Hybrid(HostShare::Fixed(0.5))] {
        let rig = Rig::placed(on, scenario(), 1, placement);
        rig.optimizer.open_second().unwrap();
        refused(begun(&rig), "use placement stream");
    }
    let tensors = vec![
        Tensor::f32(100),
        Tensor::of(64, Dtype::Bf16, Dtype::Bf16).master(),
        Tensor::of(9, Dtype::Bf16, Dtype::Bf16).master(),
    ];
    let scenario = Scenario { second_table: Some(2), second_resident: true, ..Scenario::new(tensors, 2, 4096) };
    let trials = [Trial { way: Way { need: vec![0; 3], offered: vec![1] }, ..right(&[]) }];
    let (rig, scales) = (rig(on, &scenario, 1), Scales::new(on, &trials));
    rig.optimizer.overlap_begin_speculative(&order(&rig, &[0; 3]), &rig.scenario.groups_at(0)).unwrap();
    let offer = |tensor: usize| {
        let binding = rig.bindings(0)[tensor].clone().unwrap();
        rig.optimizer.overlap_offer(scenario.place(tensor), binding, rig.columns_of(tensor), Some(&rig.compute))
    };
    refused(offer(0), "tensor.0");
    refused(offer(2), "no second copy");
    offer(1).unwrap();
    let mut bindings = rig.bindings(0);
    bindings[1] = None;
    let flags = StepFlags { skip: scales.0[0].clone(), ..scales.flags(0) };
    let committed = rig.optimizer.overlap_commit(rig.tables(bindings.clone()), Some(&rig.compute), flags);
    refused(committed, "overlap_abort");
    rig.optimizer.overlap_commit(rig.tables(bindings), Some(&rig.compute), scales.flags(0)).unwrap();
    rig.synchronize();
    rig.outcome().assert_has(&plain(on, &scenario, &trials, &scales), "plain steps");
}

fn many_steps_allocate_nothing(on: &Subject) {
    let all: Vec<usize> = (0..model().len()).collect();
    let trials = [right(&all), wrong(&all), right(&[0, 3]), right(&[])];
    let (rig, scales) = (rig(on, &scenario(), trials.len()), Scales::new(on, &trials));
    let run = || {
        for (at, trial) in trials.iter().enumerate() {
            step(&rig, at, trial, &scales).unwrap();
        }
        rig.optimizer.synchronize().unwrap();
    };
    run();
    run();
    let made = on.counters().total();
    run();
    assert_eq!(on.counters().total(), made);
}
