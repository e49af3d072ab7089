//! The updates: the bits of each rule's written arithmetic, for every type, option, length and packing.

use forebay_device::kernel::uniform_element;
use forebay_device::update::{MAX_COLUMNS, MAXIMIZE};
use forebay_device::{Dtype, HostOptions, HostThreads, MasterFormat, Region, Rule, Scalars};

use crate::bench::{Subject, random};
use crate::segments::{DTYPES, FORMATS, Flags, Problem, Shape, Values, dtype_pairs, plausible};
use crate::written::{Group, different_groups, groups, rules, written};

forebay_device::on_devices! {
    every:
        every_type_and_option_gives_the_written_bits,
        positions_count_from_the_start_of_the_parameter,
        many_segments_go_in_one_launch,
        special_values_come_out_as_written,
        a_master_gives_way_to_a_weight_that_was_replaced,
        a_trusted_master_counts_whatever_its_weight_is,
        an_update_done_again_has_the_bits_of_one,
        masters_that_give_way_are_told,
        an_update_that_is_skipped_tells_nothing,
        gradients_are_scaled_on_the_device,
        a_skip_flag_changes_nothing_at_all,
        a_buffer_without_momentum_is_left_alone,
        ten_steps_in_a_row_stay_exact,
        compact_masters_give_the_bits_of_f32_masters,
        halves_that_make_no_master_give_way,
        special_values_survive_compact_masters,
        any_cut_into_pieces_gives_the_same_bits,
        blocks_of_special_numbers_come_out_as_written,
        steps_in_fewer_bits_stay_exact,
        weights_come_from_numbers_before_they_are_narrowed;
}

/// Blocks of the GPU's kernels are of 4096 elements.
const LENGTHS: [usize; 6] = [1, 3, 4095, 4096, 4097, 9001];

/// Where segments start in their parameters.
const FIRSTS: [u64; 8] = [0, 64, 512, 700, 2048 + 64, 65_536 * 3 + 1536, 5 * 512 + 3, (1 << 40) + 1021];

fn scalars(groups: &[Group]) -> Vec<Scalars> {
    groups.iter().map(Group::scalars).collect()
}

/// A segment of so many f32 for each group, one after another.
fn plain(groups: &[Group], elements: usize) -> Vec<Shape> {
    let shape = |(i, group): (usize, &Group)| Shape { scalars: i as u32, ..Shape::plain(elements, group.kept) };
    groups.iter().enumerate().map(shape).collect()
}

/// The update has the bits of the rule's arithmetic, on the device and on the host, with state of f32 and in fewer bits:
/// of the formats two take their turn.
fn compare(on: &Subject, problem: Problem, what: &str) {
    let turn = what.bytes().map(usize::from).sum::<usize>();
    for formats in [turn % 6, (turn + 3) % 6].map(|i| FORMATS[1 + i]) {
        compare_as_it_is(on, problem.with_formats(formats), &format!("{what}, {formats:?}"));
    }
    compare_as_it_is(on, problem, what);
}

fn compare_as_it_is(on: &Subject, mut problem: Problem, what: &str) {
    let device = problem.upload(on);
    let host = problem.upload(on);
    problem.launch(on, &device, Flags::default());
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
                    shapes.push(Shape { elements, weight, grad, master: master.into(), first, shifted, ..plain });
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
                let (kept, shifted) = (groups[scalars as usize].kept, i % 5 == 2);
                // Some of the bf16 masters are compact: launches of both kinds take turns.
                // Runs of all kinds of launches, and every tenth segment of another kind than those beside it.
                let formats = if i % 10 == 9 { FORMATS[i / 10 % 7] } else { FORMATS[i / 70 % 3] };
                let master = match (i % 4, weight) {
                    (1, Dtype::Bf16) if i % 8 == 5 => MasterFormat::Compact,
                    (turn, _) => (turn == 1).into(),
                };
                Shape { elements, weight, grad, master, kept, first: 64 * i as u64, scalars, shifted, formats }
            };
            let shapes: Vec<Shape> = (0..count).map(shape).collect();
            compare_as_it_is(on, Problem::new(rule, &scalars(&groups), &shapes, plausible), what);
        }
        // More than one launch of packed segments takes.
        let shape = |_| Shape { formats: FORMATS[2], ..Shape::plain(300, groups[0].kept) };
        let shapes: Vec<Shape> = (0..70).map(shape).collect();
        compare_as_it_is(on, Problem::new(rule, &scalars(&groups), &shapes, plausible), "all of them packed");
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
            let shapes: Vec<Shape> = turns
                .map(|(turn, plain)| Shape { weight, grad, master: ((pair + turn) % 3 == 1).into(), ..plain })
                .collect();
            let problem = Problem::new(rule, &scalars(&groups), &shapes, value);
            compare(on, problem, &format!("{weight:?} with {grad:?} gradients"));
        }
    }
}

/// As a fresh master of zeros must, and one whose weight was loaded anew; only an exact rounding keeps it.
fn a_master_gives_way_to_a_weight_that_was_replaced(on: &Subject) {
    for (group, weight) in rules().flat_map(|rule| DTYPES.map(|weight| (groups(rule)[0].clone(), weight))) {
        let plain = Shape { weight, ..Shape::plain(1000, group.kept) };
        let shapes = [Shape { master: MasterFormat::F32, ..plain }, plain];
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

/// Segments with all groups and pairs of types of a rule, with and without masters, in all formats of state.
fn mixed(rule: &'static Rule, masters: &[bool]) -> Problem {
    let (groups, pairs) = (groups(rule), dtype_pairs().collect::<Vec<_>>());
    let mut shapes = Vec::new();
    for (i, plain) in plain(&groups, 0).into_iter().cycle().take(groups.len().max(14)).enumerate() {
        for (turn, &master) in masters.iter().enumerate() {
            let elements = LENGTHS[(i + 2 * turn) % LENGTHS.len()];
            let (first, shifted) = (FIRSTS[(i + turn) % FIRSTS.len()], (i / 2 + turn) % 2 == 1);
            let (weight, grad) = pairs[(i + 4 * turn) % pairs.len()];
            let formats = FORMATS[(i + 3 * turn) % FORMATS.len()];
            shapes.push(Shape { elements, weight, grad, master: master.into(), first, shifted, formats, ..plain });
        }
    }
    Problem::new(rule, &scalars(&groups), &shapes, plausible)
}

/// The weights of masters do not count, even if they are no numbers. Weights without a master do.
fn a_trusted_master_counts_whatever_its_weight_is(on: &Subject) {
    for rule in rules() {
        let mut problem = mixed(rule, &[true, false, true]).trusting();
        problem.set_weights(|i, master| if i % 3 == 0 { f32::NAN } else { 2.0 - master });
        compare(on, problem, "trusted masters");
    }
}

/// State and masters have their old values again, the weights have not. With trusted masters and another scale it has the
/// bits of an update that was done once.
fn an_update_done_again_has_the_bits_of_one(on: &Subject) {
    for rule in rules() {
        let mut before = mixed(rule, &[true, true]);
        before.set_weights(|_, master| master);
        let (mut once, mut first) = (before.clone(), before.clone());
        assert!(!first.step(1.0) && !once.step(0.37), "nothing gives way");
        let mut again = before.trusting();
        again.set_weights_of(&first);
        let device = again.upload(on);
        again.launch(on, &device, Flags { grad_scale: Some(f32_on(on, 0.37)), ..Flags::default() });
        once.expect(on, &device, "done again");
    }
}

/// One weight that is not its master's rounding is enough, wherever it is. Without one, or where masters are trusted, the
/// flag is not touched. The update itself is the same as without a flag.
fn masters_that_give_way_are_told(on: &Subject) {
    const UNTOUCHED: u32 = 0xdead;
    for (turn, rule) in rules().enumerate() {
        let tells = |problem: &Problem, expected: u32, what: &str| {
            let device = problem.upload(on);
            let flag = on.upload(&[[0xaa; 4], UNTOUCHED.to_ne_bytes(), [0xbb; 4]].concat());
            problem.launch(on, &device, Flags { followed: Some(flag.region(4, 4).unwrap()), ..Flags::default() });
            let found = on.download(&flag.all());
            assert_eq!((&found[..4], &found[8..]), (&[0xaa; 4][..], &[0xbb; 4][..]), "beside the flag");
            assert_eq!(u32::from_ne_bytes(found[4..8].try_into().unwrap()), expected, "{rule:?}, {what}");
            device
        };
        let tells_and_updates = |problem: &Problem, expected: u32, what: &str| {
            let (device, mut after) = (tells(problem, expected, what), problem.clone());
            assert_eq!(after.step(1.0), expected == 1, "{rule:?}, {what}");
            after.expect(on, &device, what);
        };
        tells_and_updates(&mixed(rule, &[true, false, true]), 1, "many give way");
        tells_and_updates(&mixed(rule, &[true, false, true]).trusting(), UNTOUCHED, "all are trusted");
        tells_and_updates(&mixed(rule, &[false]), UNTOUCHED, "there are no masters");
        let mut holding = mixed(rule, &[true, false, true]);
        holding.set_weights(|_, master| master);
        tells_and_updates(&holding, UNTOUCHED, "all hold");
        for (turns, (segment, shape)) in
            holding.shapes().enumerate().filter(|(_, shape)| shape.master == MasterFormat::F32).enumerate()
        {
            let last = shape.elements - 1;
            let i = [0, last, last / 2, last - last % 4][(turns + turn) % 4];
            let (mut changed, was) = (holding.clone(), holding.weight(segment, i));
            changed.set_weight(segment, i, [-was, f32::NAN, 0.0, 1.5 * was][turns % 4]);
            tells(&changed, 1, &format!("{i} of segment {segment}, {shape:?}"));
        }
    }
}

fn an_update_that_is_skipped_tells_nothing(on: &Subject) {
    for rule in rules() {
        let (problem, flag) = (mixed(rule, &[true]), on.upload(&[7; 4]));
        let device = problem.upload(on);
        let flags = Flags { skip: Some(f32_on(on, 1.0)), followed: Some(flag.all()), ..Flags::default() };
        problem.launch(on, &device, flags);
        problem.expect(on, &device, "skipped");
        assert_eq!(on.download(&flag.all()), [7; 4]);
        problem.launch(on, &device, Flags { followed: Some(flag.all()), ..Flags::default() });
        assert_eq!(on.download(&flag.all()), 1u32.to_ne_bytes(), "not skipped");
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
        let (grad_scale, skip) = (Some(f32_on(on, scale)), Some(f32_on(on, 0.0)));
        problem.launch(on, &device, Flags { grad_scale, skip, followed: None });
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
            master: i.is_multiple_of(2).into(),
            ..plain[i % plain.len()]
        };
        let before = Problem::new(rule, &scalars(&groups), &(0..60).map(shape).collect::<Vec<_>>(), plausible);
        for skip in [1.0, -1.0, f32::MIN_POSITIVE, 1e-45, f32::INFINITY, f32::NAN] {
            let device = before.upload(on);
            let (grad_scale, skipping) = (Some(f32_on(on, 0.5)), Some(f32_on(on, skip)));
            before.launch(on, &device, Flags { grad_scale, skip: skipping, followed: None });
            before.expect(on, &device, &format!("skip {skip}"));
        }
        let (mut after, device) = (before.clone(), before.upload(on));
        before.launch(on, &device, Flags { skip: Some(f32_on(on, -0.0)), ..Flags::default() });
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
            (shape.weight, shape.master) = (DTYPES[i / 2 % 3], (i % 2 == 1).into());
        }
        let at = |step: u64| groups.iter().map(|group| Group { step, ..group.clone() }.scalars()).collect::<Vec<_>>();
        let mut problem = Problem::new(rule, &at(1), &shapes, plausible);
        let device = problem.upload(on);
        for step in 1..=10 {
            problem.scalars = at(step);
            problem.launch(on, &device, Flags::default());
            problem.step(1.0);
        }
        problem.expect(on, &device, "after ten steps");
    }
}

/// Segments of bf16 with compact masters: all groups of a rule, types of gradients, lengths and addresses.
fn compact(rule: &'static Rule, values: impl Fn(usize, usize) -> Values) -> Problem {
    let groups = groups(rule);
    let mut shapes = Vec::new();
    for (i, plain) in plain(&groups, 0).into_iter().cycle().take(groups.len().max(9)).enumerate() {
        let (elements, first) = (LENGTHS[i % LENGTHS.len()], FIRSTS[i / 2 % FIRSTS.len()]);
        let (grad, shifted) = (DTYPES[i % 3], i / 3 % 2 == 1);
        shapes.push(Shape {
            elements,
            weight: Dtype::Bf16,
            grad,
            master: MasterFormat::Compact,
            first,
            shifted,
            ..plain
        });
    }
    Problem::new(rule, &scalars(&groups), &shapes, values)
}

/// Masters that belong to their weights, many of them ties.
fn held(segment: usize, i: usize) -> Values {
    let [_, grad, mean, square, largest, master] = plausible(segment, i);
    let master = if i.is_multiple_of(3) { f32::from_bits(master.to_bits() & !0xffff | 0x8000) } else { master };
    [master, grad, mean, square, largest, master]
}

/// After any number of steps weights, state and masters are those of an optimizer with f32 masters, on the device and on
/// the host.
fn compact_masters_give_the_bits_of_f32_masters(on: &Subject) {
    for rule in rules() {
        let problem = compact(rule, held);
        compare(on, problem.clone(), "compact masters");
        let (mut full, device) = (problem.with_masters(MasterFormat::F32), problem.upload(on));
        for _ in 0..5 {
            problem.launch(on, &device, Flags::default());
            assert!(!full.step(1.0), "nothing gives way");
        }
        full.with_masters(MasterFormat::Compact).expect(on, &device, "after five steps");
    }
}

/// Any halves beside any weights: where they make a master of the weight it counts, elsewhere the weight does, and the
/// flag says so.
fn halves_that_make_no_master_give_way(on: &Subject) {
    for rule in rules() {
        let mut problem = compact(rule, held);
        let tells = |problem: &Problem, expected: u32| {
            let (device, flag) = (problem.upload(on), on.upload(&[0; 4]));
            problem.launch(on, &device, Flags { followed: Some(flag.all()), ..Flags::default() });
            assert_eq!(on.download(&flag.all()), expected.to_ne_bytes(), "{rule:?}");
        };
        tells(&problem, 0);
        problem.set_halves(|segment, i| {
            let pattern = random(segment as u64, i as u64);
            ([0x8000, 0x7fff, 0x8001, 0, (pattern >> 16) as u16][i % 5], pattern & 1 != 0)
        });
        tells(&problem, 1);
        compare(on, problem.clone(), "any halves");
        // The carry of this one would make a NaN of it.
        let mut one = compact(rule, held);
        one.set_weight(1, LENGTHS[1] - 1, 0.0);
        one.set_halves(|segment, i| {
            let last = segment == 1 && i == LENGTHS[1] - 1;
            (if last { 0x9000 } else { 0 }, last)
        });
        tells(&one, 1);
        compare(on, one, "one gives way");
    }
}

/// Masters with every kind of exponent and of lower half: zeros, subnormals, borders of the largest numbers, infinities
/// and NaNs.
fn special_values_survive_compact_masters(on: &Subject) {
    const UPPER: [u16; 12] = [0, 0x8000, 1, 0x007f, 0x0080, 0x3f80, 0x3f81, 0xbfff, 0x7f7f, 0xff7f, 0x7f80, 0x7fc1];
    const LOWER: [u16; 7] = [0, 1, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff];
    for rule in rules() {
        let value = |_, i: usize| {
            let master = f32::from_bits(u32::from(UPPER[i % 12]) << 16 | u32::from(LOWER[i / 12 % 7]));
            // A gradient and state of zero leave most masters as they are.
            let [_, grad, mean, square, largest, _] = plausible(0, i);
            let there = f32::from(u8::from(i / 84 % 2 == 1));
            [master, grad * there, mean * there, square, largest, master]
        };
        compare(on, compact(rule, value), "special masters");
    }
}

/// A segment that is cut where its blocks are has the bits of a whole one: random numbers come from places in the
/// parameter, and scales belong to their blocks. The pieces are updated in another order.
fn any_cut_into_pieces_gives_the_same_bits(on: &Subject) {
    for (rule, formats) in rules().flat_map(|rule| FORMATS.map(|formats| (rule, formats))) {
        let groups = groups(rule);
        let mut shapes = plain(&groups, 0);
        for (i, shape) in shapes.iter_mut().enumerate() {
            let master = [MasterFormat::None, MasterFormat::F32, MasterFormat::Compact][i % 3];
            let (elements, first) = ([5000, 256, 9001, 100, 4096][i % 5], FIRSTS[i % FIRSTS.len()]);
            *shape = Shape { elements, weight: Dtype::Bf16, master, first, formats, shifted: i % 4 == 3, ..*shape };
        }
        let whole = Problem::new(rule, &scalars(&groups), &shapes, plausible);
        let mut after = whole.clone();
        after.step(1.0);
        for elements in [256, 768, 4096, 4352] {
            let device = whole.upload(on);
            whole.launch_in_pieces(on, &device, elements);
            after.expect(on, &device, &format!("in pieces of {elements}, {formats:?}"));
        }
    }
}

/// Blocks of zeros, of one number, of subnormal numbers, with infinity and NaN, and with the largest and smallest numbers
/// there are. A block that is not finite is NaN as a whole, and those beside it are as they were.
fn blocks_of_special_numbers_come_out_as_written(on: &Subject) {
    let value = |segment: usize, i: usize| {
        let [weight, grad, mean, square, largest, master] = plausible(segment, i);
        let (block, place, sign) = (i / 256, i % 256, if i.is_multiple_of(2) { 1.0 } else { -1.0 });
        let [grad, mean, square, largest] = match block {
            0 => [0.0; 4],
            1 => [-0.0 * sign, 0.0 * sign, 0.0, 0.0],
            2 => [0.0, sign * 1e-39, 1e-39, 1e-45],
            3 if place == 77 => [f32::INFINITY, mean, square, largest],
            4 if place == 255 => [grad, f32::NAN, f32::NAN, f32::NAN],
            5 if place == 0 => [grad, f32::NEG_INFINITY, square, largest],
            6 => [0.0, sign * f32::MAX, f32::MAX / 3.0, f32::MAX],
            // One number whose share is all, and others whose shares are nothing.
            7 => [if place == 128 { 1e4 } else { 1e-12 }, 0.0, 0.0, 0.0],
            8 => [0.0, sign * f32::MIN_POSITIVE, f32::MIN_POSITIVE, f32::MIN_POSITIVE],
            // Every exponent comes up.
            9 => {
                let number = f32::from_bits((place as u32) << 23 & 0x7f00_0000 | 0x0055_5555);
                [0.0, sign * number.min(1.0), number.min(1.0), number.min(1.0)]
            }
            _ => [grad, mean, square, largest],
        };
        [weight, grad, mean, square, largest, master]
    };
    for rule in rules() {
        let groups = groups(rule);
        // The last block is of one element, or of all but one.
        for elements in [2561, 2815] {
            let mut shapes = plain(&groups, elements);
            for (i, shape) in shapes.iter_mut().enumerate() {
                let master = [MasterFormat::None, MasterFormat::F32, MasterFormat::Compact][i % 3];
                *shape = Shape { weight: Dtype::Bf16, master, shifted: i % 2 == 1, ..*shape };
            }
            let problem = Problem::new(rule, &scalars(&groups), &shapes, value);
            for formats in FORMATS {
                compare_as_it_is(on, problem.with_formats(formats), &format!("special blocks, {formats:?}"));
            }
        }
    }
}

/// What is kept is what the next step begins with.
fn steps_in_fewer_bits_stay_exact(on: &Subject) {
    for (rule, formats) in rules().flat_map(|rule| FORMATS[1..].iter().map(move |formats| (rule, *formats))) {
        let groups = groups(rule);
        let mut shapes = plain(&groups, 331);
        for (i, shape) in shapes.iter_mut().enumerate() {
            (shape.weight, shape.master, shape.formats) = (DTYPES[i / 2 % 3], (i % 2 == 1).into(), formats);
        }
        let at = |step: u64| groups.iter().map(|group| Group { step, ..group.clone() }.scalars()).collect::<Vec<_>>();
        let mut problem = Problem::new(rule, &at(1), &shapes, plausible);
        let device = problem.upload(on);
        for step in 1..=10 {
            problem.scalars = at(step);
            problem.launch(on, &device, Flags::default());
            problem.step(1.0);
        }
        problem.expect(on, &device, &format!("after ten steps, {formats:?}"));
    }
}

/// The first update from state of zeros: whatever the format, and however it is rounded, weights are those of f32 state.
fn weights_come_from_numbers_before_they_are_narrowed(on: &Subject) {
    for rule in rules() {
        let groups = groups(rule);
        let zeros = |segment: usize, i: usize| {
            let [weight, grad, .., master] = plausible(segment, i);
            [weight, grad, 0.0, 0.0, 0.0, master]
        };
        let f32s = Problem::new(rule, &scalars(&groups), &plain(&groups, 700), zeros);
        let mut expected = f32s.clone();
        expected.step(1.0);
        for formats in FORMATS {
            let mut problem = f32s.with_formats(formats);
            let device = problem.upload(on);
            problem.launch(on, &device, Flags::default());
            problem.step(1.0);
            problem.expect(on, &device, "from zeros");
            for (segment, i) in (0..groups.len()).flat_map(|segment| (0..700).map(move |i| (segment, i))) {
                let (found, wanted) = (problem.weight(segment, i), expected.weight(segment, i));
                assert_eq!(found.to_bits(), wanted.to_bits(), "{rule:?}, {formats:?}: {i} of segment {segment}");
            }
        }
    }
}
