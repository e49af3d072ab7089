//! State in fewer bits: the same bits in every placement, and those of the formats' own arithmetic, rounded to nearest or
//! at random.

use crate::common::Subject;
use crate::common::overlapped::{Way, committed};
use crate::common::trial::{Outcome, Rig, Scenario, Tensor, reduced_tensors};
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::update::{BLOCK, RULES};
use forebay::device::{Dtype, MasterFormat, Region, Rule, StateFormat};
use forebay::optimizer::{HostShare, Placement};
use forebay::plan::{columns_for, formats_for, state_bytes};

forebay_device::on_devices! {
    every:
        every_rule_has_the_bits_of_the_formats,
        chunks_of_any_size_have_the_same_bits,
        divided_buckets_have_the_same_bits,
        every_placement_has_the_same_bits,
        a_part_on_the_device_has_the_same_bits,
        parameters_on_the_host_have_the_same_bits,
        scale_and_skip_are_read_on_the_device,
        overlapped_steps_have_the_same_bits,
        random_numbers_depend_on_seed_step_column_and_parameter_alone,
        both_copies_have_the_same_bits,
        a_refused_call_leaves_the_state_usable,
        bytes_are_those_of_the_columns;
}

const SEEDS: [Option<u64>; 2] = [None, Some(7)];

fn gaps(step: usize, tensor: usize) -> bool {
    (step * 7 + tensor * 3).is_multiple_of(5)
}

fn scenario(rounding_seed: Option<u64>) -> Scenario {
    Scenario { missing: gaps, rounding_seed, ..Scenario::new(reduced_tensors(), 3, 8192) }
}

fn every_rule_has_the_bits_of_the_formats(on: &Subject) {
    for rule in RULES {
        for seed in SEEDS {
            scenario(seed).with(rule).check_placed(on, 5, Placement::Resident);
            scenario(seed).with(rule).check(on, 5);
        }
    }
}

fn chunks_of_any_size_have_the_same_bits(on: &Subject) {
    for (slots, slot_bytes) in [(2, 5000), (3, 4099), (7, 1 << 20)] {
        for seed in SEEDS {
            let mut scenario = scenario(seed);
            (scenario.options.slots, scenario.options.slot_bytes) = (slots, slot_bytes);
            scenario.check(on, 4);
        }
    }
}

fn divided_buckets_have_the_same_bits(on: &Subject) {
    let mut scenario = scenario(Some(1));
    scenario.options.arena_limit_bytes = 5000 * 4;
    scenario.check(on, 4);
}

fn every_placement_has_the_same_bits(on: &Subject) {
    let shares = [HostShare::Fixed(0.3), HostShare::Fixed(0.5), HostShare::Fixed(1.0), HostShare::Auto];
    for placement in [Placement::Host].into_iter().chain(shares.map(Placement::Hybrid)) {
        for seed in SEEDS {
            scenario(seed).check_placed(on, 7, placement);
        }
    }
    // Shares of several threads.
    let long = vec![
        Tensor::of(100_003, Dtype::Bf16, Dtype::Bf16).master().kept_as(StateFormat::Blocks),
        Tensor::f32(70_001).kept_as(StateFormat::Blocks),
        Tensor::f32(70_001).kept_as(StateFormat::Bf16),
    ];
    let long = Scenario { rounding_seed: Some(3), ..Scenario::new(long, 2, 1 << 20) };
    long.check_placed(on, 2, Placement::Host);
}

fn a_part_on_the_device_has_the_same_bits(on: &Subject) {
    for seed in SEEDS {
        let scenario = Scenario { second_table: Some(6), second_resident: true, ..scenario(seed) };
        for placement in [Placement::Stream, Placement::Hybrid(HostShare::Fixed(0.5))] {
            scenario.check_placed(on, 4, placement);
        }
    }
}

fn parameters_on_the_host_have_the_same_bits(on: &Subject) {
    for every in [1, 3] {
        let place = |(i, tensor): (usize, Tensor)| if i % every == 0 { tensor.on_host() } else { tensor };
        let tensors = reduced_tensors().into_iter().enumerate().map(place).collect();
        let scenario = Scenario { tensors, ..scenario(Some(9)) };
        for placement in [Placement::Stream, Placement::Host, Placement::Hybrid(HostShare::Fixed(0.5))] {
            scenario.check_placed(on, 4, placement);
        }
    }
}

fn scale_and_skip_are_read_on_the_device(on: &Subject) {
    for seed in SEEDS {
        let skipped: Option<fn(usize) -> bool> = Some(|step| step % 3 == 1);
        let scenario = Scenario { grad_scale: Some(1.7), skipped, ..scenario(seed) };
        scenario.check(on, 5);
        scenario.check_placed(on, 5, Placement::Host);
    }
}

fn overlapped_steps_have_the_same_bits(on: &Subject) {
    for seed in SEEDS {
        for placement in [Placement::Stream, Placement::Resident, Placement::Hybrid(HostShare::Fixed(0.5))] {
            let rig = Rig::placed(on, scenario(seed), 4, placement);
            let tensors = rig.scenario.tensors.len();
            let offered = if placement.host_share().is_some() { Vec::new() } else { (0..tensors).step_by(2).collect() };
            let way = Way { need: (0..tensors as i64).map(|i| -i).collect(), offered };
            (0..4).for_each(|step| if step == 2 { rig.step(step) } else { committed(&rig, step, &way) }.unwrap());
            rig.synchronize();
            rig.assert_exact(4);
        }
    }
}

/// The state of one tensor alone after some steps.
fn state_of(outcome: &Outcome, tensor: usize) -> Vec<Vec<u8>> {
    let mine = outcome.0.iter().filter(|((of, name), _)| *of == tensor && name.is_some());
    mine.map(|(_, bytes)| bytes.clone()).collect()
}

fn random_numbers_depend_on_seed_step_column_and_parameter_alone(on: &Subject) {
    let run = |scenario: Scenario| {
        let rig = Rig::placed(on, scenario, 3, Placement::Stream);
        rig.steps(3);
        rig.synchronize();
        rig.outcome()
    };
    let one = |seed: Option<u64>, counter: fn(usize) -> u64| {
        let tensors = vec![Tensor::f32(3000).kept_as(StateFormat::Blocks)];
        // Without a correction that depends on the step, two tensors differ by their random numbers only.
        let rule = Rule::named("lion").unwrap();
        run(Scenario { rounding_seed: seed, counter, ..Scenario::new(tensors, 2, 8192) }.with(rule))
    };
    let first = one(Some(7), |_| 0);
    assert_eq!(first, one(Some(7), |_| 0));
    assert_ne!(state_of(&first, 0), state_of(&one(Some(8), |_| 0), 0), "another seed");
    assert_ne!(state_of(&first, 0), state_of(&one(None, |_| 0), 0), "to nearest");
    let later = one(Some(7), |_| 5);
    let columns = |outcome: &Outcome| outcome.0[&(0, Some("exp_avg"))].clone();
    assert_ne!(columns(&first), columns(&later), "another step");
}

fn columns(rig: &Rig<'_>) -> Vec<Region> {
    let of = |tensor: usize| rig.scenario.columns(tensor).into_iter().map(move |column| (tensor, column.name));
    (0..rig.scenario.tensors.len()).flat_map(of).map(|(tensor, name)| rig.column(tensor, name)).collect()
}

fn both_copies_have_the_same_bits(on: &Subject) {
    let scenario = Scenario { second_table: Some(5), ..scenario(Some(4)) };
    for placement in [Placement::Stream, Placement::Host] {
        let rig = Rig::placed(on, scenario.clone(), 4, placement);
        rig.optimizer.open_second().unwrap();
        for step in 0..4 {
            rig.step(step).unwrap();
            rig.synchronize();
            let before = columns(&rig);
            let values: Vec<Vec<u8>> = before.iter().map(|region| on.host_bytes(region).unwrap()).collect();
            rig.optimizer.exchange().unwrap();
            columns(&rig).iter().zip(&values).for_each(|(region, bytes)| on.write(bytes, region).unwrap());
            before.iter().for_each(|region| on.write(&vec![0xee; region.bytes() as usize], region).unwrap());
        }
        rig.assert_exact(4);
    }
}

fn a_refused_call_leaves_the_state_usable(on: &Subject) {
    let on = on.another();
    // Four chunks of codes and one of bf16.
    let tensors = vec![Tensor::f32(2000).kept_as(StateFormat::Blocks), Tensor::f32(300).kept_as(StateFormat::Bf16)];
    let scenario = Scenario { rounding_seed: Some(2), ..Scenario::new(tensors, 2, 2048) };
    let rig = Rig::new(&on, scenario, 2).warm();
    for call in [Call::Copy, Call::Launch] {
        for nth in [0, 1, 3] {
            rig.step(0).unwrap();
            on.fault.on(call, nth, Misbehaviour::Fail);
            assert!(rig.step(1).is_err(), "{call:?} {nth}");
            on.fault.clear();
            rig.assert_idle();
            rig.reset();
            rig.steps(2);
            rig.synchronize();
            rig.assert_exact(2);
            rig.reset();
        }
    }
}

fn bytes_are_those_of_the_columns(on: &Subject) {
    let rig = Rig::new(on, scenario(None), 1);
    rig.step(0).unwrap();
    rig.assert_stats(rig.stats().streamed, 0);
    let bytes = |formats, master| {
        let rule = Rule::named("adamw").unwrap();
        state_bytes(&columns_for(rule, rule.defaults, formats, master, 1 << 20), 1 << 20)
    };
    let elements = 1 << 20;
    assert_eq!(bytes([StateFormat::Blocks; 3], MasterFormat::None), 2 * (elements + elements / 64));
    assert_eq!(bytes([StateFormat::Bf16; 3], MasterFormat::F32), 8 * elements);
    assert_eq!(bytes([StateFormat::Bf16, StateFormat::F32, StateFormat::F32], MasterFormat::None), 6 * elements);
}

/// A tensor without a whole block keeps f32, whatever was asked for; bf16 has no blocks.
#[test]
fn what_has_no_whole_block_keeps_f32() {
    use StateFormat::{Bf16, Blocks, F32};
    let block = u64::from(BLOCK);
    assert_eq!(formats_for([Blocks; 3], block - 1), [F32; 3]);
    assert_eq!(formats_for([Blocks; 3], block), [Blocks; 3]);
    assert_eq!(formats_for([Bf16, Blocks, F32], 0), [Bf16, F32, F32]);
}
