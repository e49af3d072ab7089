//! The updates: the bits of each rule's written arithmetic, for every type, option, length and packing.

use forebay_device::kernel::uniform_element;
use forebay_device::update::{MAX_COLUMNS, MAXIMIZE};
use forebay_device::{Dtype, HostOptions, HostThreads, Region, Rule, Scalars};

use crate::bench::{Subject, random};
use crate::segments::{DTYPES, Problem, Shape, Values, dtype_pairs};
use crate::written::{Group, different_groups, groups, rules, written};

forebay_device::on_devices! {
    every:
        every_type_and_option_gives_the_written_bits,
        positions_count_from_the_start_of_the_parameter,
        many_segments_go_in_one_launch,
        special_values_come_out_as_written,
        a_master_gives_way_to_a_weight_that_was_replaced,
        gradients_are_scaled_on_the_device,
        a_skip_flag_changes_nothing_at_all,
        a_buffer_without_momentum_is_left_alone,
        ten_steps_in_a_row_stay_exact;
}

/// Blocks of the GPU's kernels are of 4096 elements.
const LENGTHS: [usize; 6] = [1, 3, 4095, 4096, 4097, 9001];

/// Where segments start in their parameters.
const FIRSTS: [u64; 8] = [0, 64, 512, 700, 2048 + 64, 65_536 * 3 + 1536, 5 * 512 + 3, (1 << 40) + 1021];

/// Plausible training state: its values differ per segment, element and operand. Three weights in four are the rounding
/// of their master, the fourth is not.
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

fn scalars(groups: &[Group]) -> Vec<Scalars> {
    groups.iter().map(Group::scalars).collect()
}

/// A segment of so many f32 for each group, one after another.
fn plain(groups: &[Group], elements: usize) -> Vec<Shape> {
    let shape = |(i, group): (usize, &Group)| Shape { scalars: i as u32, ..Shape::plain(elements, group.kept) };
    groups.iter().enumerate().map(shape).collect()
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

/// Each rule's arithmetic against a second transcription: the reference itself must not drift.
#[test]
fn the_reference_is_the_written_arithmetic() {
    for group in rules().flat_map(groups) {
        let (rule, s) = (group.rule, group.scalars());
        assert_eq!(s.flags & MAXIMIZE != 0, group.hypers[maximize(rule)] != 0.0, "{group:?}");
        for i in 0..4000u64 {
            let pick = |operand: u64, low, high| uniform_element(operand, i, low, high);
            // Every other gradient cancels most of the decay, so that its last bits show.
            let weight = pick(1, -2.0, 2.0);
            let grad = if i % 2 == 0 { pick(2, -1.0, 1.0) } else { weight * -0.13 * pick(2, 0.999, 1.001) };
            let before = [pick(3, -0.3, 0.3), pick(4, 0.0, 0.1), pick(5, 0.0, 0.1)];
            let grad = grad * pick(6, 0.1, 2.0);
            let (mut got, mut want) = (before, before);
            let signed = if s.flags & MAXIMIZE != 0 { -grad } else { grad };
            let got_weight = (rule.element)(weight, signed, &mut got, group.kept, &s, i);
            let want_weight = written(&group, weight, grad, &mut want, i);
            let bits = |weight: f32, state: [f32; MAX_COLUMNS]| (weight.to_bits(), state.map(f32::to_bits));
            assert_eq!(bits(got_weight, got), bits(want_weight, want), "element {i} of {group:?}");
        }
    }
}

/// The place of that number among a rule's.
fn maximize(rule: &Rule) -> usize {
    rule.hypers.iter().position(|&name| name == "maximize").unwrap()
}

/// Every pair of types meets every group with and without a master. Lengths, addresses and places in the parameter take
/// turns: each group meets all of them.
fn every_type_and_option_gives_the_written_bits(on: &Subject) {
    for rule in rules() {
        let groups = groups(rule);
        for (pair, (weight, grad)) in dtype_pairs().enumerate() {
            let mut shapes = Vec::new();
            for (i, plain) in plain(&groups, 0).into_iter().enumerate() {
                for (turn, master) in [(0, false), (1, true)] {
                    let elements = LENGTHS[(i + pair + 3 * turn) % LENGTHS.len()];
                    let first = FIRSTS[(i / 2 + 3 * pair + 5 * turn) % FIRSTS.len()];
                    let shifted = (i + pair / 2 + turn) % 2 == 1;
                    shapes.push(Shape { elements, weight, grad, master, first, shifted, ..plain });
                }
            }
            let problem = Problem::new(rule, &scalars(&groups), &shapes, plausible);
            compare(on, problem, &format!("{weight:?} with {grad:?} gradients"));
        }
    }
}

/// Adam rounds its decay by an element's place in its parameter, wherever a segment starts and however it is cut.
fn positions_count_from_the_start_of_the_parameter(on: &Subject) {
    let adam = Rule::named("adam").unwrap();
    let by_elements = |group: &Group| (adam.kind)(&group.hypers, 4) != (adam.kind)(&group.hypers, 5);
    let groups: Vec<Group> = groups(adam).into_iter().filter(by_elements).collect();
    assert_eq!(groups.iter().map(|group| group.elements % 4 == 0).collect::<Vec<_>>(), [true, false]);
    // The gradient cancels the decay but for what its rounding leaves.
    let cancelling = |_, i: usize| {
        let [weight, _, mean, square, largest, master] = plausible(0, i & !3);
        [weight, -0.13 * weight, mean, square, largest, master]
    };
    for group in groups {
        let segment = |first: u64| {
            let lengths = [1, 63, 700, 5000];
            lengths.map(|elements| Shape { first, shifted: elements == 700, ..Shape::plain(elements, group.kept) })
        };
        let shapes: Vec<Shape> = FIRSTS.into_iter().flat_map(segment).collect();
        let mut problem = Problem::new(adam, &[group.scalars()], &shapes, cancelling);
        compare(on, problem.clone(), &format!("{} elements", group.elements));
        problem.step(1.0);
        let state = |first: u64, i: usize| {
            let segment = 4 * FIRSTS.iter().position(|&at| at == first).unwrap() + 3;
            problem.state(segment, 0, i).to_bits()
        };
        let differs = |a: u64, b: u64| (0..512).any(|i| state(a, i) != state(b, i));
        // Starts that a rule of fours sees as one, and a rule of blocks does not; and the other way round.
        assert_eq!(differs(0, 512), group.elements % 4 != 0, "{group:?}");
        assert!(!differs(64, 2048 + 64), "{group:?}");
        assert!(differs(0, 5 * 512 + 3), "{group:?}");
    }
}

/// Launches are packed, up to a number of segments, of scalar sets, and of one pair of types.
fn many_segments_go_in_one_launch(on: &Subject) {
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
    for rule in rules() {
        let groups = different_groups(rule, 20);
        for (what, count, choose) in choices {
            let shape = |i: usize| {
                let (scalars, weight, grad) = choose(i);
                let elements = 1 + (random(9, i as u64) % 200) as usize + if i % 50 == 7 { 4096 } else { 0 };
                let (master, kept, shifted) = (i % 4 == 1, groups[scalars as usize].kept, i % 5 == 2);
                Shape { elements, weight, grad, master, kept, first: 64 * i as u64, scalars, shifted }
            };
            let shapes: Vec<Shape> = (0..count).map(shape).collect();
            compare(on, Problem::new(rule, &scalars(&groups), &shapes, plausible), what);
        }
    }
}

/// Every special weight with every special gradient and state. Where that takes many elements, groups take turns.
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
    for rule in rules() {
        let groups = groups(rule);
        let columns = rule.columns.len().min(2) as u32;
        let at_once = if columns < 2 { groups.len() } else { 3 };
        for (pair, (weight, grad)) in dtype_pairs().enumerate() {
            let plain = plain(&groups, N.pow(2 + columns));
            let turns = (0..at_once).map(|turn| (turn, plain[(pair * at_once + turn) % plain.len()]));
            let shapes: Vec<Shape> =
                turns.map(|(turn, plain)| Shape { weight, grad, master: (pair + turn) % 3 == 1, ..plain }).collect();
            let problem = Problem::new(rule, &scalars(&groups), &shapes, value);
            compare(on, problem, &format!("{weight:?} with {grad:?} gradients"));
        }
    }
}

/// As a fresh master of zeros must, and one whose weight was loaded anew; only an exact rounding keeps it.
fn a_master_gives_way_to_a_weight_that_was_replaced(on: &Subject) {
    for (group, weight) in rules().flat_map(|rule| DTYPES.map(|weight| (groups(rule)[0].clone(), weight))) {
        let plain = Shape { weight, ..Shape::plain(1000, group.kept) };
        let shapes = [Shape { master: true, ..plain }, plain];
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
        let mut problem = Problem::new(group.rule, &[group.scalars()], &shapes, replaced);
        compare(on, problem.clone(), &format!("{weight:?}"));
        problem.step(1.0);
        for i in 0..1000 {
            assert_eq!(problem.weight(0, i).to_bits(), problem.weight(1, i).to_bits(), "a stale master counted");
        }
    }
}

fn gradients_are_scaled_on_the_device(on: &Subject) {
    for (rule, scale) in
        rules().flat_map(|rule| [0.37, 0.0, 1.0, -2.5, f32::INFINITY, f32::NAN, 1e-30].map(|scale| (rule, scale)))
    {
        let groups = groups(rule);
        let mut shapes = plain(&groups, 800);
        shapes.iter_mut().enumerate().for_each(|(i, shape)| shape.grad = DTYPES[i % 3]);
        let mut problem = Problem::new(rule, &scalars(&groups), &shapes, plausible);
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
    for rule in rules() {
        let groups = groups(rule);
        let plain = plain(&groups, 0);
        let shape = |i: usize| Shape {
            elements: 1 + 80 * i,
            weight: DTYPES[i % 3],
            master: i.is_multiple_of(2),
            ..plain[i % plain.len()]
        };
        let before = Problem::new(rule, &scalars(&groups), &(0..60).map(shape).collect::<Vec<_>>(), plausible);
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
}

/// As in torch: a group whose momentum becomes zero keeps its buffers as they are.
fn a_buffer_without_momentum_is_left_alone(on: &Subject) {
    let sgd = Rule::named("sgd").unwrap();
    let unused: Vec<Group> =
        groups(sgd).into_iter().filter(|group| group.kept == 1 && (sgd.keeps)(&group.hypers) == 0).collect();
    assert_eq!(unused.len(), 4, "with and without decay and maximize");
    let before = Problem::new(sgd, &scalars(&unused), &plain(&unused, 5001), plausible);
    let mut after = before.clone();
    after.step(1.0);
    for (segment, i) in (0..unused.len()).flat_map(|segment| (0..5001).map(move |i| (segment, i))) {
        assert_eq!(before.state(segment, 0, i).to_bits(), after.state(segment, 0, i).to_bits());
    }
    compare(on, before, "a buffer without momentum");
}

fn ten_steps_in_a_row_stay_exact(on: &Subject) {
    for rule in rules() {
        let groups = groups(rule);
        let mut shapes = plain(&groups, 331);
        for (i, shape) in shapes.iter_mut().enumerate() {
            (shape.weight, shape.master) = (DTYPES[i / 2 % 3], i % 2 == 1);
        }
        let at = |step: u64| groups.iter().map(|group| Group { step, ..group.clone() }.scalars()).collect::<Vec<_>>();
        let mut problem = Problem::new(rule, &at(1), &shapes, plausible);
        let device = problem.upload(on);
        for step in 1..=10 {
            problem.scalars = at(step);
            problem.launch(on, &device, None, None);
            problem.step(1.0);
        }
        problem.expect(on, &device, "after ten steps");
    }
}
