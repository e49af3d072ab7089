//! Overlapped steps: whatever is offered when, the bits are those of a plain step, and nobody reads a weight too early.

mod common;

use common::trial::{Rig, Scenario, Tensor, mixed_tensors};
use common::{Subject, cases};
use forebay::optimizer::Placement;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

forebay_device::on_devices! {
    every:
        any_order_of_offers_gives_the_bits_of_a_plain_step,
        resident_tables_give_the_bits_of_a_plain_step;
}

/// How one overlapped step goes.
#[derive(Debug, Clone)]
struct Way {
    /// By tensor: how early it is needed.
    need: Vec<i64>,
    /// Tensors that are offered, in this order; the others are handed over at the commit.
    offered: Vec<usize>,
}

fn order(rig: &Rig<'_>, need: &[i64]) -> Vec<Vec<i64>> {
    let (first, second) = need.split_at(rig.scenario.second_table.unwrap_or(need.len()));
    let second = rig.scenario.second_table.map(|_| second.to_vec());
    [first.to_vec()].into_iter().chain(second).collect()
}

/// One overlapped step of a rig; its updates are submitted or not when this returns.
fn step(rig: &Rig<'_>, at: usize, way: &Way) -> forebay::Result<()> {
    let optimizer = &rig.optimizer;
    optimizer.overlap_begin(&order(rig, &way.need), &rig.scenario.groups_at(at))?;
    let mut bindings = rig.bindings(at);
    for &tensor in &way.offered {
        let Some(binding) = bindings[tensor].take() else { continue };
        optimizer.overlap_offer(rig.scenario.place(tensor), binding, rig.columns_of(tensor), Some(&rig.compute))?;
    }
    optimizer.overlap_commit(rig.tables(bindings), Some(&rig.compute), rig.flags(at))
}

/// Some steps in some ways, compared with plain ones.
fn check(on: &Subject, scenario: Scenario, ways: &[Way], placement: Placement) {
    let rig = Rig::placed(on, scenario, ways.len(), placement);
    for (at, way) in ways.iter().enumerate() {
        step(&rig, at, way).unwrap();
        rig.optimizer.overlap_wait(None, Some(&rig.compute)).unwrap();
    }
    rig.synchronize();
    rig.assert_idle();
    rig.assert_exact(ways.len());
}

fn ways(tensors: usize) -> impl Strategy<Value = Vec<Way>> {
    let all: Vec<usize> = (0..tensors).collect();
    let way =
        (prop::collection::vec(0..tensors as i64, tensors), prop::sample::subsequence(all, 0..=tensors).prop_shuffle());
    prop::collection::vec(way.prop_map(|(need, offered)| Way { need, offered }), 1..4)
}

fn any_order_of_offers_gives_the_bits_of_a_plain_step(on: &Subject) {
    let mut runner = TestRunner::new(ProptestConfig { cases: cases(12), ..ProptestConfig::default() });
    let tensors = mixed_tensors();
    runner
        .run(&(ways(tensors.len()), 2..6usize, prop::bool::ANY), |(ways, slots, two)| {
            let scenario = Scenario::new(mixed_tensors(), slots, 8192);
            let second_table = two.then_some(5);
            let missing = |step: usize, tensor: usize| (3 * step + tensor).is_multiple_of(5);
            check(on, Scenario { second_table, missing, ..scenario }, &ways, Placement::Stream);
            Ok(())
        })
        .unwrap();
}

fn resident_tables_give_the_bits_of_a_plain_step(on: &Subject) {
    let tensors = vec![Tensor::f32(1000), Tensor::f32(0), Tensor::f32(30), Tensor::f32(100).full()];
    let way = |need: [i64; 4], offered: &[usize]| Way { need: need.to_vec(), offered: offered.to_vec() };
    let ways = [way([0, 1, 2, 3], &[3, 1, 0]), way([3, 2, 1, 0], &[]), way([0, 0, 0, 0], &[0, 1, 2, 3])];
    check(on, Scenario::new(tensors, 2, 4096), &ways, Placement::Resident);
}
