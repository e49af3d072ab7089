//! The optimizer's life: what it trusts, what it counts, and what may happen between two steps without changing a bit.

use crate::common::trial::{Rig, Scenario, Tensor, group_tensors, mixed_tensors};
use crate::common::{Subject, device_error};
use forebay::Error;
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::update::{MASTER, MASTER_CARRY, MASTER_LOW, RULES};
use forebay::device::{self, Column, Dtype, Region, Rule, StateFormat, Stored};
use forebay::optimizer::Placement::{self, Host, Hybrid, Resident, Stream};
use forebay::optimizer::{HostShare, Optimizer, OptimizerOptions, TableInput};
use forebay::plan::TensorSpec;

forebay_device::on_devices! {
    every:
        a_torn_step_is_refused_by_the_next_with_the_reason,
        a_step_that_was_not_counted_is_torn,
        a_resident_step_with_operands_that_do_not_fit_is_refused_and_changes_nothing,
        distrust_lasts_until_trust,
        another_number_of_tables_is_refused,
        a_closed_optimizer_refuses_everything_and_frees_its_memory,
        closing_waits_for_what_is_under_way,
        a_ring_that_is_closed_and_opened_again_changes_nothing,
        a_step_without_its_ring_is_refused_and_changes_nothing,
        a_ring_in_memory_of_the_caller_s_waits_for_its_stream,
        a_step_without_a_stream_has_ended_when_it_returns,
        pinned_memory_is_counted_to_the_byte,
        a_table_beyond_the_budget_is_refused_before_anything_is_pinned,
        state_that_is_loaded_continues_as_if_it_had_never_stopped,
        counters_say_which_step_it_is,
        two_tables_equal_one,
        tables_that_are_added_later_are_updated_from_then_on,
        without_any_columns_every_placement_updates,
        first_gradients_at_different_steps_start_their_momentum_then;
}

const PLACEMENTS: [Placement; 4] = [Resident, Stream, Host, Hybrid(HostShare::Fixed(0.5))];

fn rule(name: &str) -> &'static Rule {
    Rule::named(name).unwrap()
}

fn small() -> Scenario {
    Scenario::new(vec![Tensor::f32(1000), Tensor::of(300, Dtype::Bf16, Dtype::Bf16).master()], 3, 2048)
}

/// The call that every placement makes in the middle of a step.
fn middle(placement: Placement) -> Call {
    if placement == Host { Call::HostUpdate } else { Call::Launch }
}

fn a_torn_step_is_refused_by_the_next_with_the_reason(on: &Subject) {
    for placement in PLACEMENTS {
        let rig = Rig::placed(on, small(), 3, placement).warm();
        rig.step(0).unwrap();
        on.fault.on(middle(placement), 0, Misbehaviour::Fail);
        let broken = rig.step(1).unwrap_err();
        on.fault.clear();
        let reason = format!("its last step broke off with: {broken}");
        assert!(reason.contains("injected"), "{reason}");
        assert_eq!(rig.optimizer.distrusted(), Some(reason.clone()));
        // Not once but until it is trusted, and whatever is asked of it.
        for _ in 0..2 {
            let refusal = rig.step(1).unwrap_err();
            assert_eq!(refusal, Error::Distrusted { reason: reason.clone() }, "{placement:?}");
            assert_eq!(rig.step_with(1, Vec::new()).unwrap_err(), refusal);
        }
        // A failed step has not counted, and its state can be read and written.
        assert_eq!(on.host_bytes(&rig.counter(0)).unwrap(), 1f32.to_le_bytes());
        rig.reset();
        rig.steps(3);
        rig.synchronize();
        rig.assert_exact(3);
    }
}

/// The state is that of the next step, and its counters are not.
fn a_step_that_was_not_counted_is_torn(on: &Subject) {
    for placement in PLACEMENTS {
        let rig = Rig::placed(on, small(), 2, placement).warm();
        on.fault.on(Call::Write, 0, Misbehaviour::Fail);
        let broken = rig.step(0).unwrap_err();
        on.fault.clear();
        let reason = format!("its last step broke off with: {broken}");
        assert_eq!(rig.optimizer.distrusted(), Some(reason), "{placement:?}");
    }
}

fn a_resident_step_with_operands_that_do_not_fit_is_refused_and_changes_nothing(on: &Subject) {
    let rig = Rig::placed(on, small(), 2, Resident);
    rig.step(0).unwrap();
    rig.synchronize();
    let before = rig.outcome();
    let step = |change: &dyn Fn(&mut Vec<Vec<Region>>)| {
        let mut tables = rig.tables(rig.bindings(1));
        change(&mut tables[0].resident);
        rig.optimizer.step(tables, &rig.scenario.groups_at(1), Some(&rig.compute), rig.flags(1)).unwrap_err()
    };
    let refusals = [
        step(&|columns| columns[1][2] = columns[1][2].slice(0, 296 * 4).unwrap()),
        step(&|columns| columns[1][1] = columns[1][0].clone()),
        step(&|columns| columns[1][0] = rig.weight(1)),
    ];
    for (refusal, needle) in refusals.into_iter().zip(["master_param has 1184 bytes", "overlaps", "exp_avg has 600"]) {
        let error = device_error::<()>(Err(refusal));
        assert!(matches!(error, device::Error::BadOperands { .. }) && error.to_string().contains(needle), "{error}");
    }
    let missing = step(&|columns| drop(columns[1].pop())).to_string();
    assert!(missing.starts_with("tensor.1 does not fit the plan: 2 columns of state where 3 are kept; "), "{missing}");
    rig.synchronize();
    assert!(rig.outcome() == before && rig.optimizer.distrusted().is_none());
    rig.step(1).unwrap();
    rig.synchronize();
    rig.assert_exact(2);
}

fn distrust_lasts_until_trust(on: &Subject) {
    let rig = Rig::new(on, small(), 1);
    let before = rig.outcome();
    rig.optimizer.distrust("a load broke off");
    let said = rig.step(0).unwrap_err().to_string();
    assert!(said.starts_with("the optimizer cannot be stepped: a load broke off; load a complete"), "{said}");
    assert!(rig.outcome() == before);
    rig.optimizer.trust();
    rig.steps(1);
    rig.synchronize();
    rig.assert_exact(1);
}

fn another_number_of_tables_is_refused(on: &Subject) {
    for placement in PLACEMENTS {
        let rig = Rig::placed(on, small(), 1, placement);
        let before = rig.outcome();
        let (table, groups) = (rig.tables(rig.bindings(0)), rig.scenario.groups_at(0));
        for tables in [Vec::new(), [table.clone(), vec![TableInput::default()]].concat()] {
            let count = tables.len();
            let refusal = rig.optimizer.step(tables, &groups, Some(&rig.compute), rig.flags(0)).unwrap_err();
            let wanted = format!("a step of {count} tables does not fit the plan: 1 were added; ");
            assert!(refusal.to_string().starts_with(&wanted), "{refusal}");
        }
        assert!(rig.outcome() == before && rig.optimizer.distrusted().is_none());
        rig.steps(1);
        rig.synchronize();
        rig.assert_exact(1);
    }
}

fn a_closed_optimizer_refuses_everything_and_frees_its_memory(on: &Subject) {
    for placement in PLACEMENTS {
        let on = on.another();
        let rig = Rig::placed(&on, small(), 1, placement);
        let (optimizer, groups) = (&rig.optimizer, rig.scenario.groups_at(0));
        optimizer.open_landing(0, &[4000, 600]).unwrap();
        rig.steps(1);
        let before = on.memory().unwrap();
        let (ring_bytes, pinned_bytes) = (optimizer.stats().unwrap().device_bytes, optimizer.pinned_bytes());
        rig.synchronize();
        optimizer.close().unwrap();
        assert!(optimizer.is_closed() && !optimizer.has_ring());
        assert_eq!((optimizer.pinned_bytes(), optimizer.idle_slots()), (0, (0, 0)));
        // What is left is the test's own; powers have memory too.
        let powers = 4096 * 4;
        on.assert_holds(before.allocated_bytes - ring_bytes - powers, before.pinned_bytes - pinned_bytes - powers);
        let refusals = [
            rig.step(0).err(),
            optimizer.step(Vec::new(), &groups, None, Default::default()).err(),
            optimizer.add(rig.scenario.specs()).err(),
            optimizer.open_ring(None).err(),
            optimizer.close_ring().err(),
            optimizer.plan(0).err(),
            optimizer.columns(0, 0).err(),
            optimizer.column(0, 0, "exp_avg").err(),
            optimizer.step_counter(0, 0).err(),
            optimizer.pin_stats(0).err(),
            optimizer.open_landing(0, &[4000, 600]).err(),
            optimizer.land(0, 0, &rig.grad(0, 0).unwrap(), Some(&rig.compute)).err(),
            optimizer.touch(Vec::new()).err(),
            Optimizer::snapshot(&[optimizer], 0).err(),
        ];
        for (i, refusal) in refusals.into_iter().enumerate() {
            let said = refusal.unwrap_or_else(|| panic!("{i} was not refused")).to_string();
            assert_eq!(said, "invalid optimizer: closed; it was closed; make a new one", "{i}");
        }
        // What asks for nothing finds nothing, and closing it again is closing it.
        optimizer.settle(0, 0).unwrap();
        optimizer.synchronize().unwrap();
        optimizer.protect_all().unwrap();
        optimizer.finish_landing(None).unwrap();
        assert_eq!(optimizer.stats().unwrap().pinned_bytes, 0);
        optimizer.close().unwrap();
        drop(rig);
        on.assert_empty();
    }
}

fn closing_waits_for_what_is_under_way(on: &Subject) {
    for placement in [Stream, Host, Hybrid(HostShare::Fixed(0.5))] {
        let on = on.another();
        let rig = Rig::placed(&on, small(), 1, placement).warm();
        rig.optimizer.open_landing(0, &[4000, 600]).unwrap();
        on.fault.on(Call::Copy, 3, Misbehaviour::Late { ns: 25_000_000 });
        rig.step(0).unwrap();
        let columns =
            if placement == Stream { vec![rig.column(0, "exp_avg"), rig.column(1, MASTER.name)] } else { Vec::new() };
        on.fault.on(Call::Copy, 0, Misbehaviour::Late { ns: 25_000_000 });
        rig.optimizer.land(0, 0, &rig.grad(0, 0).unwrap(), Some(&rig.compute)).unwrap();
        rig.optimizer.close().unwrap();
        // The host may read them without any other wait.
        columns.iter().for_each(|column| drop(on.host_bytes(column).unwrap()));
        drop((rig, columns));
        on.assert_empty();
    }
}

fn a_ring_that_is_closed_and_opened_again_changes_nothing(on: &Subject) {
    for placement in [Stream, Hybrid(HostShare::Fixed(0.5)), Hybrid(HostShare::Auto)] {
        let on = on.another();
        let rig = Rig::placed(&on, small(), 6, placement).warm();
        let (before, ring_bytes) = (on.memory().unwrap(), rig.optimizer.ring_bytes());
        on.fault.on(Call::Copy, 2, Misbehaviour::Late { ns: 25_000_000 });
        rig.step(0).unwrap();
        rig.optimizer.close_ring().unwrap();
        assert!(!rig.optimizer.has_ring());
        on.assert_holds(before.allocated_bytes - ring_bytes, before.pinned_bytes);
        assert_eq!(rig.stats().device_bytes, 0);
        rig.optimizer.open_ring(None).unwrap();
        assert!(rig.optimizer.has_ring());
        on.assert_holds(before.allocated_bytes, before.pinned_bytes);
        rig.step(1).unwrap();
        // In memory of the caller's, and again with the optimizer's own, while stores are under way.
        let ring = on.alloc(ring_bytes).unwrap();
        rig.optimizer.open_ring(Some((&ring, Some(&rig.compute)))).unwrap();
        rig.step(2).unwrap();
        rig.step(3).unwrap();
        rig.optimizer.open_ring(None).unwrap();
        rig.step(4).unwrap();
        if placement != Stream {
            // The host can do without.
            rig.optimizer.close_ring().unwrap();
            rig.step(5).unwrap();
            assert_eq!(rig.stats().host.unwrap().fraction, 1.0);
        } else {
            rig.step(5).unwrap();
        }
        rig.synchronize();
        rig.assert_exact(6);
    }
}

fn a_step_without_its_ring_is_refused_and_changes_nothing(on: &Subject) {
    for placement in [Stream, Hybrid(HostShare::Fixed(0.0))] {
        let rig = Rig::placed(on, small(), 2, placement);
        rig.step(0).unwrap();
        rig.optimizer.close_ring().unwrap();
        rig.synchronize();
        let before = rig.outcome();
        assert_eq!(device_error(rig.step(1)), device::Error::ZeroSize { what: "the ring" });
        assert!(rig.outcome() == before && rig.optimizer.distrusted().is_none());
        rig.optimizer.open_ring(None).unwrap();
        rig.step(1).unwrap();
        rig.synchronize();
        rig.assert_exact(2);
    }
}

/// Its earlier user may not be done with that memory.
fn a_ring_in_memory_of_the_caller_s_waits_for_its_stream(on: &Subject) {
    let rig = Rig::new(on, small(), 2).warm();
    let ring = on.alloc(rig.optimizer.ring_bytes()).unwrap();
    let other = on.stream("other").unwrap();
    for step in 0..2 {
        on.launch(&other, &device::Kernel::Spin { ns: 10_000_000 }).unwrap();
        on.launch(&other, &device::Kernel::Fill { dst: ring.all(), byte: 0xee }).unwrap();
        rig.optimizer.open_ring(Some((&ring, Some(&other)))).unwrap();
        rig.step(step).unwrap();
        rig.optimizer.close_ring().unwrap();
    }
    rig.synchronize();
    rig.assert_exact(2);
}

/// Without one, nothing but the return could tell the caller. On the checker, reading is refused otherwise.
fn a_step_without_a_stream_has_ended_when_it_returns(on: &Subject) {
    for placement in PLACEMENTS {
        let rig = Rig::placed(on, small(), 3, placement).warm();
        let wait_for_first = |step: usize| {
            let late = Misbehaviour::Late { ns: 10_000_000 };
            on.fault.on(
                if placement == Resident { Call::Launch } else { Call::Copy },
                2 * u64::from(placement != Resident),
                late,
            );
            let (tables, groups) = (rig.tables(rig.bindings(step)), rig.scenario.groups_at(step));
            rig.optimizer.step(tables, &groups, None, rig.flags(step)).unwrap();
        };
        (0..3).for_each(wait_for_first);
        rig.assert_exact(3);
    }
}

fn refusal(requested_bytes: u64, budget_bytes: u64, used_bytes: u64) -> device::Error {
    device::Error::OutOfPinnedBudget { requested_bytes, available_bytes: budget_bytes - used_bytes, budget_bytes }
}

/// Slabs are whole pages.
fn pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(4096)
}

/// Tensors, and pinned bytes of their state: two columns at multiples of 64 elements, and the counters.
fn tables() -> [(Vec<TensorSpec>, u64); 2] {
    let scenario = Scenario::new(vec![Tensor::f32(1000), Tensor::f32(2000).on_host()], 3, 4096);
    let specs = scenario.specs();
    let bytes = |elements: u64| pages((elements * 4).next_multiple_of(256) * 2 + 4);
    [(vec![specs[1].clone()], bytes(2000)), (vec![specs[0].clone()], bytes(1000))]
}

fn within(on: &Subject, placement: Placement, budget_bytes: u64) -> Optimizer {
    let plan = Scenario::new(Vec::new(), 3, 4096).options;
    let pinned_budget_bytes = Some(budget_bytes);
    let options = OptimizerOptions { placement, plan, pinned_budget_bytes, ..OptimizerOptions::default() };
    let optimizer = Optimizer::new(on.device.clone(), rule("adamw"), options).unwrap();
    if placement.streams() {
        optimizer.open_ring(None).unwrap();
    }
    optimizer
}

/// A page for the flags of a step, and twice as many slots as the plan has.
const LANE: u64 = 4096;
const HOST_RING: u64 = 6 * 4096;

fn pinned_memory_is_counted_to_the_byte(on: &Subject) {
    let [(in_place, in_place_bytes), (on_device, on_device_bytes)] = tables();
    let grads = pages(1000 * 4);
    for placement in [Stream, Host, Hybrid(HostShare::Fixed(0.5))] {
        let (lane, ring) = if placement == Stream { (0, 0) } else { (LANE, HOST_RING) };
        // What lies on the host needs no slots there; the first table that does not makes the ring.
        let counts = [in_place_bytes + lane, on_device_bytes + ring, grads];
        for missing in [0, 1] {
            for refused in 0..3 {
                let used: u64 = counts[..refused].iter().sum();
                let budget = used + counts[refused] - missing;
                let optimizer = within(on, placement, budget);
                let calls: [&dyn Fn() -> forebay::Result<()>; 3] = [
                    &|| optimizer.add(in_place.clone()).map(drop),
                    &|| optimizer.add(on_device.clone()).map(drop),
                    &|| optimizer.open_landing(1, &[4000]),
                ];
                calls[..refused].iter().for_each(|call| call().unwrap());
                assert_eq!(optimizer.pinned_bytes(), used);
                if missing == 0 {
                    calls[refused]().unwrap();
                    assert_eq!(optimizer.pinned_bytes(), budget);
                    assert_eq!(optimizer.stats().unwrap().pinned_bytes, budget);
                    continue;
                }
                let error = device_error(calls[refused]());
                assert_eq!(error, refusal(counts[refused], budget, used), "{placement:?}");
                assert_eq!(optimizer.pinned_bytes(), used);
            }
        }
    }
    on.assert_empty();
    // What is resident pins nothing.
    let optimizer = within(on, Resident, 0);
    optimizer.add(on_device).unwrap();
    assert_eq!((optimizer.pinned_bytes(), optimizer.pin_stats(0).unwrap()), (0, None));
    assert!(optimizer.column(0, 0, "exp_avg").unwrap().is_none());
}

fn a_table_beyond_the_budget_is_refused_before_anything_is_pinned(on: &Subject) {
    let [_, (on_device, bytes)] = tables();
    let budget = bytes + LANE + HOST_RING - 1;
    let optimizer = within(on, Host, budget);
    let pins = on.counters().pins;
    let error = device_error(optimizer.add(on_device.clone()));
    assert_eq!(error, refusal(bytes + LANE + HOST_RING, budget, 0));
    assert_eq!(on.counters().pins, pins + 1, "but for the powers");
    // The state alone would have fitted.
    assert!(optimizer.plan(0).is_err());
    let other = within(on, Stream, budget);
    other.add(on_device).unwrap();
    assert_eq!(other.pinned_bytes(), bytes);
}

/// Columns, counters and weights are read after some steps, as a save does, and written into another optimizer.
fn state_that_is_loaded_continues_as_if_it_had_never_stopped(on: &Subject) {
    for rule in RULES {
        for (from, to) in [(Stream, Host), (Host, Stream), (Hybrid(HostShare::Fixed(0.5)), Stream), (Stream, Stream)] {
            let scenario = Scenario::new(group_tensors(), 3, 4096).with(rule);
            let (first, second) = (Rig::placed(on, scenario.clone(), 2, from), Rig::placed(on, scenario, 4, to));
            // It has been somewhere else before, and broke off there.
            second.step(0).unwrap();
            second.synchronize();
            second.optimizer.distrust("a load broke off");
            first.steps(2);
            first.synchronize();
            for tensor in 0..first.scenario.tensors.len() {
                second.optimizer.settle(0, tensor).unwrap();
                for name in first.optimizer.columns(0, tensor).unwrap() {
                    let bytes = on.host_bytes(&first.column(tensor, name)).unwrap();
                    on.write(&bytes, &second.column(tensor, name)).unwrap();
                }
                on.write(&on.host_bytes(&first.counter(tensor)).unwrap(), &second.counter(tensor)).unwrap();
                on.put(&on.download(&first.weight(tensor)), &second.weight(tensor));
            }
            second.optimizer.trust();
            second.step(2).unwrap();
            second.step(3).unwrap();
            second.synchronize();
            second.assert_exact(4);
        }
    }
}

fn counters_say_which_step_it_is(on: &Subject) {
    for rule in RULES {
        for placement in PLACEMENTS {
            // Also across the end of a block of powers.
            let counter = |tensor: usize| [0, 1, 7, 4094, 100_000][tensor % 5];
            let scenario = Scenario { counter, ..Scenario::new(group_tensors(), 3, 8192) };
            scenario.with(rule).check_placed(on, 3, placement);
        }
    }
}

fn gaps(step: usize, tensor: usize) -> bool {
    (step * 5 + tensor).is_multiple_of(4)
}

fn two_tables_equal_one(on: &Subject) {
    for placement in PLACEMENTS {
        for second_table in [1, 5, 13] {
            let tensors = mixed_tensors();
            let scenario =
                Scenario { missing: gaps, second_table: Some(second_table), ..Scenario::new(tensors, 3, 4096) };
            scenario.check_placed(on, 4, placement);
        }
    }
    // A save has the state of both.
    let scenario = Scenario { second_table: Some(1), ..small() };
    let rig = Rig::new(on, scenario, 1);
    let snapshot = Optimizer::snapshot(&[&rig.optimizer], 0).unwrap();
    let columns = [rig.column(0, "exp_avg"), rig.column(1, "exp_avg"), rig.column(1, MASTER.name)];
    assert!(columns.iter().all(|column| snapshot.covers(column)) && !snapshot.covers(&rig.counter(0)));
    snapshot.finish();
}

fn tables_that_are_added_later_are_updated_from_then_on(on: &Subject) {
    for placement in [Stream, Host, Hybrid(HostShare::Fixed(0.5))] {
        let rig = Rig::placed(on, small(), 2, placement);
        rig.step(0).unwrap();
        let more = vec![TensorSpec { name: "later".to_owned(), ..rig.scenario.specs().remove(0) }];
        assert_eq!(rig.optimizer.add(more).unwrap(), 1);
        let bound = rig.bindings(1);
        let groups = rig.scenario.groups_at(1);
        let tables = vec![
            TableInput { tensors: bound.clone(), ..TableInput::default() },
            TableInput { tensors: vec![None], ..TableInput::default() },
        ];
        rig.optimizer.step(tables, &groups, Some(&rig.compute), rig.flags(1)).unwrap();
        rig.synchronize();
        rig.assert_exact(2);
        let later = on.host_bytes(&rig.optimizer.column(1, 0, "exp_avg").unwrap().unwrap()).unwrap();
        assert!(later.iter().all(|&byte| byte == 0), "state begins as zeros, and stays so without a gradient");
        let mut again = rig.bindings(1);
        again.truncate(1);
        let tables = vec![
            TableInput { tensors: vec![None, None], ..TableInput::default() },
            TableInput { tensors: again, ..TableInput::default() },
        ];
        rig.optimizer.step(tables, &groups, Some(&rig.compute), rig.flags(1)).unwrap();
        rig.synchronize();
        assert_eq!(on.host_bytes(&rig.optimizer.step_counter(1, 0).unwrap()).unwrap(), 1f32.to_le_bytes());
        let later = on.host_bytes(&rig.optimizer.column(1, 0, "exp_avg").unwrap().unwrap()).unwrap();
        assert!(later.iter().any(|&byte| byte != 0));
    }
}

/// SGD without momentum and without masters: nothing to stream, nothing to save, and weights to update all the same.
fn without_any_columns_every_placement_updates(on: &Subject) {
    let tensors = vec![Tensor::f32(5000), Tensor::of(700, Dtype::F32, Dtype::Bf16), Tensor::f32(0), Tensor::f32(64)];
    let on_host: Vec<Tensor> = tensors.iter().map(|tensor| tensor.on_host()).collect();
    for tensors in [tensors, on_host] {
        for placement in PLACEMENTS {
            if placement == Resident && tensors[0].on_host {
                continue;
            }
            let scenario = Scenario { missing: gaps, ..Scenario::new(tensors.clone(), 2, 2048) }.with(rule("sgd"));
            let rig = Rig::placed(on, scenario, 4, placement);
            rig.steps(4);
            rig.synchronize();
            rig.assert_exact(4);
            assert!((0..4).all(|tensor| rig.optimizer.columns(0, tensor).unwrap().is_empty()));
            let stats = rig.stats();
            assert_eq!((stats.streamed.fetch_bytes, stats.streamed.store_bytes), (0, 0), "{placement:?}");
            let snapshot = Optimizer::snapshot(&[&rig.optimizer], 0).unwrap();
            assert!(snapshot.is_safe());
        }
    }
}

/// A parameter has no momentum before its first gradient, so what lies in its buffer until then does not matter.
fn first_gradients_at_different_steps_start_their_momentum_then(on: &Subject) {
    let tensors: Vec<Tensor> = group_tensors().into_iter().map(Tensor::full).collect();
    for placement in PLACEMENTS {
        let missing = |step: usize, tensor: usize| step < tensor % 4;
        let scenario = Scenario { missing, ..Scenario::new(tensors.clone(), 3, 4096) }.with(rule("sgd"));
        let rig = Rig::placed(on, scenario, 5, placement);
        rig.steps(5);
        rig.synchronize();
        rig.assert_exact(5);
        for tensor in 0..tensors.len() {
            let steps = (5 - tensor % 4) as f32;
            assert_eq!(on.host_bytes(&rig.counter(tensor)).unwrap(), steps.to_le_bytes(), "tensor {tensor}");
        }
    }
}

/// What a rule needs is known when state is created, not in the middle of a step.
#[test]
fn columns_that_are_not_the_rule_s_are_refused_by_name() {
    let on = Subject::open(crate::common::Kind::Cpu);
    let adamw = rule("adamw");
    let [mean, square, largest] = [0, 1, 2].map(|i| adamw.columns[i].f32());
    let short = Column { stored: Stored::Number(Dtype::F16), ..mean };
    let [codes, scale] = adamw.columns[0].kept_as(StateFormat::Blocks)[..] else { panic!("codes and scales") };
    let half = adamw.columns[0].kept_as(StateFormat::Bf16)[0];
    for (columns, reason) in [
        (vec![mean], "adamw needs the column exp_avg_sq"),
        (vec![square, MASTER], "adamw needs the column exp_avg"),
        (vec![], "adamw needs the column exp_avg"),
        (vec![mean, square, Column::f32("momentum_buffer")], "adamw has no column like its momentum_buffer"),
        (vec![short, square], "adamw has no column like its exp_avg"),
        (vec![codes, square], "its exp_avg is not in one format of state"),
        (vec![scale, square], "its exp_avg is not in one format of state"),
        (vec![mean, half, square], "its exp_avg is not in one format of state"),
        (vec![scale, codes, square], "its exp_avg is not in one format of state"),
        (vec![square, mean], "its columns are not in the order of adamw"),
        (vec![mean, square, square], "its exp_avg_sq is not in one format of state"),
        (vec![mean, square, MASTER, largest], "its columns are not in the order of adamw"),
        (
            vec![mean, square, MASTER_CARRY, MASTER_LOW],
            "master_carry, master_low are not the columns of one format of masters",
        ),
        (vec![mean, square, MASTER_LOW], "master_low are not the columns of one format of masters"),
        (
            vec![mean, square, MASTER, MASTER_LOW, MASTER_CARRY],
            "master_param, master_low, master_carry are not the columns of one format of masters",
        ),
        (vec![mean, square, MASTER_LOW, MASTER_CARRY, largest], "its columns are not in the order of adamw"),
    ] {
        for placement in PLACEMENTS {
            let tensor = |name: &str, columns| TensorSpec {
                name: name.to_owned(),
                elements: 10,
                columns,
                on_host: false,
                number: 0,
            };
            let tensors = vec![tensor("whole", adamw.kept(adamw.defaults, false)), tensor("bare", columns.clone())];
            let optimizer = within(&on, placement, 1 << 30);
            let error = optimizer.add(tensors).unwrap_err();
            let wanted = Error::PlanMismatch { tensor: "bare".to_owned(), reason: reason.to_owned() };
            assert_eq!(error, wanted);
            assert!(optimizer.plan(0).is_err() && optimizer.pinned_bytes() == 0);
            drop(optimizer);
            on.assert_empty();
        }
    }
}
