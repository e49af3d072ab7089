//! The AdamW update: the bits of the written arithmetic, for every type, option, length and packing.

use forebay_device::arith::{AdamWElement, AdamWHyper, AdamWScalars, adamw_element, uniform_element};
use forebay_device::{Dtype, HostOptions, HostThreads, Region};

use crate::bench::{Subject, random};
use crate::segments::{DTYPES, Problem, Shape, Values};

contract! {
    every:
        every_type_and_option_gives_the_written_bits,
        many_segments_go_in_one_launch,
        special_values_come_out_as_written,
        a_master_gives_way_to_a_weight_that_was_replaced,
        gradients_are_scaled_on_the_device,
        a_skip_flag_changes_nothing_at_all,
        ten_steps_in_a_row_stay_exact;
}

const LENGTHS: [usize; 6] = [1, 3, 4095, 4096, 4097, 20_000];

/// Plausible training state: its values differ per segment, element and operand. Three parameters in four are the
/// rounding of their master, the fourth is not.
fn plausible(segment: usize, element: usize) -> Values {
    let value =
        |operand: u64, low, high| uniform_element(1000 + 10 * segment as u64 + operand, element as u64, low, high);
    let master = value(5, -1.0, 1.0);
    [
        if element % 4 == 3 { value(0, -1.0, 1.0) } else { master },
        value(1, -0.5, 0.5),
        value(2, -0.1, 0.1),
        value(3, 0.0, 0.01),
        value(4, 0.0, 0.02),
        master,
    ]
}

/// All four pairs of maximize and weight decay, at different steps.
fn four_sets() -> [AdamWScalars; 4] {
    std::array::from_fn(|i| {
        let weight_decay = if i & 1 == 0 { 0.0 } else { 0.13 };
        AdamWHyper { lr: 3e-3, weight_decay, maximize: i & 2 != 0, ..AdamWHyper::default() }.at_step(1 + 7 * i as u64)
    })
}

/// Scalar sets that are all different.
fn sets(count: usize) -> Vec<AdamWScalars> {
    let set = |i: usize| AdamWHyper {
        lr: 1e-3 * (1 + i) as f64,
        beta1: 0.9 - 0.01 * i as f64,
        beta2: 0.999 - 0.003 * i as f64,
        eps: 1e-8 * (1 + i) as f64,
        weight_decay: 0.01 * (i % 3) as f64,
        maximize: i % 5 == 4,
    };
    (0..count).map(|i| set(i).at_step(1 + i as u64)).collect()
}

fn compare(on: &Subject, mut problem: Problem, what: &str) {
    let device = problem.upload(on);
    let host = problem.upload(on);
    problem.launch(on, &device, None, None);
    let threads = HostThreads::new(&HostOptions::default()).unwrap();
    problem.update_on_host(on, &host, &threads, 1.0);
    problem.step(1.0);
    problem.expect(on, &device, what);
    problem.expect(on, &host, &format!("{what}, on the host"));
}

fn f32_on(on: &Subject, value: f32) -> Region {
    on.upload(&value.to_ne_bytes()).all()
}

/// The arithmetic as `arith` writes it down, transcribed a second time: the reference itself must not drift.
#[test]
fn the_reference_is_the_written_arithmetic() {
    for i in 0..20_000u64 {
        let pick = |operand: u64, low, high| uniform_element(operand, i, low, high);
        let (p, g, m, v, x) =
            (pick(1, -2.0, 2.0), pick(2, -1.0, 1.0), pick(3, -0.3, 0.3), pick(4, 0.0, 0.1), pick(5, 0.0, 0.1));
        let (scale, amsgrad, s) = (pick(6, 0.1, 2.0), i % 3 == 0, four_sets()[i as usize % 4]);
        let mut grad = g * scale;
        if s.maximize {
            grad = -grad;
        }
        let decayed = if s.decays { f32::mul_add(-s.decay, p, p) } else { p };
        let moment = f32::mul_add(s.beta1, m, s.one_minus_beta1 * grad);
        let square = f32::mul_add(s.beta2, v, s.one_minus_beta2 * (grad * grad));
        let largest = if amsgrad { x.max(square) } else { x };
        let denominator = (if amsgrad { largest } else { square }).sqrt() / s.bias_correction2_sqrt + s.eps;
        let want = [decayed - (s.step_size * moment) / denominator, moment, square, largest];
        let got = adamw_element(AdamWElement { p, m, v, x }, g, scale, amsgrad, &s);
        let bits = |values: [f32; 4]| values.map(f32::to_bits);
        assert_eq!(bits([got.p, got.m, got.v, got.x]), bits(want), "element {i}");
    }
}

fn every_type_and_option_gives_the_written_bits(on: &Subject) {
    for (param, grad) in DTYPES.into_iter().flat_map(|param| DTYPES.map(|grad| (param, grad))) {
        let mut shapes = Vec::new();
        for option in 0..16u32 {
            for (i, &elements) in LENGTHS.iter().enumerate() {
                let (master, amsgrad) = (option & 1 != 0, option & 2 != 0);
                let scalars = option / 4;
                let shape = Shape { elements, param, grad, master, amsgrad, scalars, shifted: false };
                // The longest is run both ways with some options, the others with all.
                match (i < 5, option % 5 == 0) {
                    (true, _) | (false, true) => shapes.extend([shape, Shape { shifted: true, ..shape }]),
                    (false, false) => shapes.push(shape),
                }
            }
        }
        compare(on, Problem::new(&four_sets(), &shapes, plausible), &format!("{param:?} with {grad:?} gradients"));
    }
}

/// Launches are packed, up to a number of segments, of scalar sets, and of one pair of types.
fn many_segments_go_in_one_launch(on: &Subject) {
    let scalars = sets(20);
    type Choice<'a> = &'a dyn Fn(usize) -> (u32, Dtype, Dtype);
    let f32s = (Dtype::F32, Dtype::F32);
    let mixed = |i: usize| (DTYPES[i / 3 % 3], DTYPES[i % 3]);
    let choices: [(&str, usize, Choice<'_>); 7] = [
        ("a set for each of twenty", 200, &|i| ((i % 20) as u32, f32s.0, f32s.1)),
        ("runs of one set", 200, &|i| ((i / 10) as u32, f32s.0, f32s.1)),
        ("one set for all", 200, &|_| (3, f32s.0, f32s.1)),
        ("exactly full", 56, &|i| ((i % 8) as u32, f32s.0, f32s.1)),
        ("one segment too many", 57, &|i| ((i % 8) as u32, f32s.0, f32s.1)),
        ("one set too many", 9, &|i| (19 - i as u32, f32s.0, f32s.1)),
        ("all types in turn", 200, &|i| ((i % 20) as u32, mixed(i).0, mixed(i).1)),
    ];
    for (what, count, choose) in choices {
        let shape = |i: usize| {
            let (scalars, param, grad) = choose(i);
            let elements = 1 + (random(9, i as u64) % 900) as usize + if i % 50 == 7 { 4096 } else { 0 };
            Shape { elements, param, grad, master: i % 4 == 1, amsgrad: i % 3 == 1, scalars, shifted: i % 5 == 2 }
        };
        let shapes: Vec<Shape> = (0..count).map(shape).collect();
        compare(on, Problem::new(&scalars, &shapes, plausible), what);
    }
}

fn special_values_come_out_as_written(on: &Subject) {
    const SPECIAL: [f32; 11] = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1e-40,
        -1e-45,
        f32::MIN_POSITIVE,
        f32::MAX,
        -65_519.0,
        1.0,
    ];
    const N: usize = SPECIAL.len();
    let value = |_, i: usize| {
        let pick = |place: u32| SPECIAL[i / N.pow(place) % N];
        [pick(0), pick(1), pick(2), pick(3), pick(0), pick(0)]
    };
    for (param, grad) in DTYPES.into_iter().flat_map(|param| DTYPES.map(|grad| (param, grad))) {
        let shapes: Vec<Shape> = (0..4)
            .map(|i| Shape { param, grad, master: i == 1, amsgrad: i == 2, scalars: i, ..Shape::plain(N.pow(4)) })
            .collect();
        compare(on, Problem::new(&four_sets(), &shapes, value), &format!("{param:?} with {grad:?} gradients"));
    }
}

/// As a fresh master of zeros must, and one whose weight was loaded anew; only an exact rounding keeps it.
fn a_master_gives_way_to_a_weight_that_was_replaced(on: &Subject) {
    for param in DTYPES {
        let shapes = [Shape { param, master: true, ..Shape::plain(1000) }, Shape { param, ..Shape::plain(1000) }];
        let replaced = |_, i: usize| {
            let [p, rest @ ..] = plausible(0, i);
            let [g, m, v, x, _] = rest;
            match i % 3 {
                0 => [p, g, m, v, x, 0.0],
                1 => [1.0, g, m, v, x, 1.5],
                // The sign of zero alone, which shows where nothing is subtracted.
                _ => [0.0, 0.0, 0.0, v, x, -0.0],
            }
        };
        let mut problem = Problem::new(&[four_sets()[0]], &shapes, replaced);
        compare(on, problem.clone(), &format!("{param:?}"));
        problem.step(1.0);
        for i in 0..1000 {
            assert_eq!(problem.param(0, i).to_bits(), problem.param(1, i).to_bits(), "a stale master counted");
        }
    }
}

fn gradients_are_scaled_on_the_device(on: &Subject) {
    for scale in [0.37, 0.0, 1.0, -2.5, f32::INFINITY, f32::NAN, 1e-30] {
        let shapes: Vec<Shape> = DTYPES.map(|grad| Shape { grad, amsgrad: true, ..Shape::plain(5000) }).into();
        let mut problem = Problem::new(&four_sets(), &shapes, plausible);
        let device = problem.upload(on);
        problem.launch(on, &device, Some(f32_on(on, scale)), Some(f32_on(on, 0.0)));
        let (host, threads) = (problem.upload(on), HostThreads::new(&HostOptions::default()).unwrap());
        problem.update_on_host(on, &host, &threads, scale);
        problem.step(scale);
        problem.expect(on, &device, &format!("scale {scale}"));
        problem.expect(on, &host, &format!("scale {scale}, on the host"));
    }
}

fn a_skip_flag_changes_nothing_at_all(on: &Subject) {
    let shapes: Vec<Shape> = (0..60)
        .map(|i| Shape {
            param: DTYPES[i % 3],
            master: i % 2 == 0,
            amsgrad: i % 4 == 0,
            scalars: (i % 4) as u32,
            ..Shape::plain(1 + 300 * i)
        })
        .collect();
    let before = Problem::new(&four_sets(), &shapes, plausible);
    for skip in [1.0, -1.0, f32::MIN_POSITIVE, 1e-45, f32::INFINITY, f32::NAN] {
        let device = before.upload(on);
        before.launch(on, &device, Some(f32_on(on, 0.5)), Some(f32_on(on, skip)));
        before.expect(on, &device, &format!("skip {skip}"));
    }
    let (mut after, device) = (before.clone(), before.upload(on));
    before.launch(on, &device, None, Some(f32_on(on, -0.0)));
    after.step(1.0);
    after.expect(on, &device, "a flag of minus zero skips nothing");
}

fn ten_steps_in_a_row_stay_exact(on: &Subject) {
    let shapes: Vec<Shape> = DTYPES
        .into_iter()
        .flat_map(|param| [false, true].map(|master| Shape { param, master, amsgrad: master, ..Shape::plain(4099) }))
        .collect();
    let hyper = AdamWHyper { weight_decay: 0.1, ..AdamWHyper::default() };
    let mut problem = Problem::new(&[hyper.at_step(1)], &shapes, plausible);
    let device = problem.upload(on);
    for t in 1..=10 {
        problem.scalars[0] = hyper.at_step(t);
        problem.launch(on, &device, None, None);
        problem.step(1.0);
    }
    problem.expect(on, &device, "after ten steps");
}
