//! The small kernels, and the refusal of operands that no backend could run.

use forebay_device::kernel::{power_element, uniform_element};
use forebay_device::update::MAX_COLUMNS;
use forebay_device::{Dtype, Error, Kernel, Master, Moment, Region, Rule, Scalars, Segment, Update};

use crate::bench::{Subject, pattern};
use crate::written::{groups, rules};

forebay_device::on_devices! {
    every:
        fill_sets_its_bytes_and_no_others,
        uniform_gives_the_same_bits_everywhere,
        powers_are_those_of_the_device,
        differences_are_counted_exactly,
        small_kernels_refuse_what_does_not_fit,
        updates_refuse_flags_that_do_not_fit,
        updates_refuse_operands_that_do_not_fit,
        updates_refuse_compact_masters_that_do_not_fit,
        updates_refuse_state_in_fewer_bits_that_does_not_fit,
        updates_refuse_columns_by_name,
        a_refused_launch_changes_nothing;
}

fn fill_sets_its_bytes_and_no_others(on: &Subject) {
    let [stream] = on.streams(["fill"]);
    for (offset, len) in [(0, 1), (1, 1), (3, 4095), (255, 4097), (0, 9000), (8999, 1)] {
        let buffer = on.upload(&[0x11; 9000]);
        on.fill(&stream, &buffer.region(offset, len).unwrap(), 0xfe).unwrap();
        on.finish(&stream).unwrap();
        let mut want = vec![0x11; 9000];
        want[offset as usize..(offset + len) as usize].fill(0xfe);
        assert!(on.download(&buffer.all()) == want, "{len} bytes at {offset}");
    }
}

fn uniform_gives_the_same_bits_everywhere(on: &Subject) {
    let [stream] = on.streams(["uniform"]);
    for (seed, elements, offset, low, high) in [
        (0, 1, 0, 0.0, 1.0),
        (7, 257, 4, -2.0, 3.0),
        (u64::MAX, 100_003, 8, -1e-30, 1e30),
        (1 << 40, 70_000, 252, 5.0, 5.0),
        // More than one pass of the largest grid.
        (11, 1_100_001, 0, -1.0, 1.0),
        (3, 0, 4, 0.0, 1.0),
    ] {
        let bytes = elements * 4 + 512;
        let buffer = on.upload(&vec![0x5a; bytes as usize]);
        let dst = buffer.region(offset, elements * 4).unwrap();
        on.launch(&stream, &Kernel::Uniform { dst, seed, low, high }).unwrap();
        on.finish(&stream).unwrap();
        let mut want = vec![0x5a; bytes as usize];
        for i in 0..elements {
            let at = (offset + 4 * i) as usize;
            want[at..at + 4].copy_from_slice(&uniform_element(seed, i, low, high).to_ne_bytes());
        }
        assert!(on.download(&buffer.all()) == want, "seed {seed}, {elements} elements at {offset}");
    }
}

/// Bit for bit on the CPU; a GPU's `powf` may be off by a few last bits, and torch's results with it.
fn powers_are_those_of_the_device(on: &Subject) {
    let [stream] = on.streams(["powers"]);
    for (base, first, elements, offset) in
        [(0.9, 1u64, 1u64, 0u64), (0.999, 1, 5003, 4), (0.95, 100_000, 257, 252), (0.0, 0, 3, 0), (1.0, 7, 300, 8)]
    {
        let bytes = (elements * 4 + 512) as usize;
        let buffer = on.upload(&vec![0x5a; bytes]);
        let dst = buffer.region(offset, elements * 4).unwrap();
        on.launch(&stream, &Kernel::Powers { dst, base, first }).unwrap();
        on.finish(&stream).unwrap();
        let got = on.download(&buffer.all());
        let (start, end) = (offset as usize, (offset + 4 * elements) as usize);
        assert!(got[..start].iter().chain(&got[end..]).all(|&byte| byte == 0x5a), "bytes beside the powers changed");
        for (i, word) in got[start..end].chunks_exact(4).enumerate() {
            let (power, want) = (f32::from_ne_bytes(word.try_into().unwrap()), power_element(base, first + i as u64));
            let off = power.to_bits().abs_diff(want.to_bits());
            assert!(
                off <= if on.kind.is_cuda() { 8 } else { 0 },
                "{base}^{}: {power:e}, not {want:e}",
                first + i as u64
            );
        }
    }
}

fn differences_are_counted_exactly(on: &Subject) {
    let [stream] = on.streams(["count"]);
    let count = |a: &Region, b: &Region, start: u64| {
        let total = on.upload(&[[0xaa; 8], start.to_ne_bytes(), [0xbb; 8]].concat());
        let kernel = Kernel::CountDifferences { a: a.clone(), b: b.clone(), count: total.region(8, 8).unwrap() };
        on.launch(&stream, &kernel).unwrap();
        on.finish(&stream).unwrap();
        let bytes = on.download(&total.all());
        assert_eq!((&bytes[..8], &bytes[16..]), (&[0xaa; 8][..], &[0xbb; 8][..]));
        u64::from_ne_bytes(bytes[8..16].try_into().unwrap()).wrapping_sub(start)
    };
    for words in [0usize, 1, 31, 33, 255, 257, 4099, 1_100_003] {
        let bytes = pattern(words as u64, 4 * words + 8);
        let a = on.upload(&bytes);
        let side = |buffer: &forebay_device::Buffer, offset| buffer.region(offset, 4 * words as u64).unwrap();
        assert_eq!(count(&side(&a, 4), &side(&a, 4), 0), 0, "{words} words and themselves");
        let b = on.upload(&bytes.iter().map(|byte| !byte).collect::<Vec<u8>>());
        assert_eq!(count(&side(&a, 0), &side(&b, 0), 3), words as u64, "all of {words}");
        // One bit in the first, in the last and in every hundredth word; and outside, where it does not count.
        let mut changed = bytes.clone();
        let differing: std::collections::BTreeSet<usize> =
            (0..words).step_by(100).chain(words.checked_sub(1)).collect();
        differing.iter().for_each(|word| changed[4 + 4 * word + word % 4] ^= 0x80);
        changed[0] ^= 1;
        changed[4 * words + 4] ^= 1;
        let c = on.upload(&changed);
        assert_eq!(count(&side(&a, 4), &side(&c, 4), 1 << 40), differing.len() as u64, "some of {words}");
    }
    let (ones, twos) = (on.upload(&[1; 16]), on.upload(&[2; 16]));
    assert_eq!(count(&ones.all(), &twos.all(), u64::MAX - 1), 4, "the sum wraps");
}

/// The kernel is refused by its name; returns the reason.
fn refusal(on: &Subject, kernel: &Kernel<'_>, what: &str) -> String {
    let stream = on.stream("refusing").unwrap();
    match on.launch(&stream, kernel) {
        Err(Error::BadOperands { operation, reason }) if operation == kernel.name() => reason,
        outcome => panic!("{what}: {outcome:?}"),
    }
}

fn small_kernels_refuse_what_does_not_fit(on: &Subject) {
    let (device, host) = (on.upload(&[0; 64]), on.pinned(64));
    let at = |offset, len| device.region(offset, len).unwrap();
    refusal(on, &Kernel::Fill { dst: host.clone(), byte: 0 }, "fill of host memory");
    let uniform = |dst: Region, low, high| Kernel::Uniform { dst, seed: 0, low, high };
    refusal(on, &uniform(host.clone(), 0.0, 1.0), "uniform into host memory");
    refusal(on, &uniform(at(0, 6), 0.0, 1.0), "uniform of a word and a half");
    refusal(on, &uniform(at(2, 8), 0.0, 1.0), "uniform at half a word");
    refusal(on, &uniform(at(0, 8), 1.0, 0.5), "uniform over nothing");
    refusal(on, &uniform(at(0, 8), f32::NAN, 1.0), "uniform from no number");
    refusal(on, &uniform(at(0, 8), 0.0, f32::NAN), "uniform to no number");
    let powers = |dst: Region| Kernel::Powers { dst, base: 0.9, first: 1 };
    refusal(on, &powers(host.clone()), "powers into host memory");
    refusal(on, &powers(at(0, 6)), "powers of a word and a half");
    refusal(on, &powers(at(2, 8)), "powers at half a word");
    let count = |a, b, count| Kernel::CountDifferences { a, b, count };
    refusal(on, &count(at(0, 6), at(8, 6), at(16, 8)), "a word and a half");
    refusal(on, &count(at(1, 4), at(8, 4), at(16, 8)), "one side at a quarter of a word");
    refusal(on, &count(at(0, 4), at(10, 4), at(16, 8)), "the other side at half a word");
    refusal(on, &count(at(0, 8), at(8, 4), at(16, 8)), "two lengths");
    refusal(on, &count(at(0, 4), at(8, 4), at(20, 8)), "a count at half its size");
    refusal(on, &count(at(0, 4), at(8, 4), at(16, 16)), "two counts");
    refusal(on, &count(at(0, 4), at(8, 4), at(16, 4)), "half a count");
    refusal(on, &count(host.slice(0, 4).unwrap(), at(8, 4), at(16, 8)), "host memory");
    refusal(on, &count(at(0, 4), at(8, 4), host.slice(0, 8).unwrap()), "a count on the host");
}

/// A segment that fits, of four elements with all columns, every operand in memory of its own.
fn fitting(on: &Subject, rule: &Rule) -> Segment {
    let take = |bytes| on.upload(&vec![0; bytes]).region(0, bytes as u64).unwrap();
    Segment {
        weight: take(8),
        weight_dtype: Dtype::Bf16,
        grad: take(16),
        grad_dtype: Dtype::F32,
        state: std::array::from_fn(|column| (column < rule.columns.len()).then(|| take(16).into())),
        master: Some(Master::F32(take(16))),
        first: 64,
        scalars: 1,
        keys: None,
    }
}

/// Two sets of scalars of a rule.
fn two_sets(rule: &'static Rule) -> [Scalars; 2] {
    let group = groups(rule)[0].clone();
    [1, 2].map(|step| rule.at_step(&group.hypers, step, 4))
}

fn updates_refuse_flags_that_do_not_fit(on: &Subject) {
    let (spare, host) = (on.upload(&[0; 16]), on.pinned(16));
    let at = |offset, len| spare.region(offset, len).unwrap();
    for rule in rules() {
        let scalars = two_sets(rule);
        let base = Update::new(rule, &[], &scalars);
        let flags = [
            ("8 bytes", at(0, 8)),
            ("0 bytes", at(0, 0)),
            ("2 bytes", at(0, 2)),
            ("at half a word", at(2, 4)),
            ("on the host", host.slice(0, 4).unwrap()),
        ];
        for (what, flag) in flags {
            refusal(on, &Kernel::Update(Update { grad_scale: Some(flag.clone()), ..base.clone() }), what);
            refusal(on, &Kernel::Update(Update { skip: Some(flag.clone()), ..base.clone() }), what);
            refusal(on, &Kernel::Update(Update { followed: Some(flag), ..base.clone() }), what);
        }
        let (stream, segments) = (on.stream("fits").unwrap(), [fitting(on, rule)]);
        let (grad_scale, skip) = (Some(at(0, 4)), Some(at(4, 4)));
        let update = Update { segments: &segments, grad_scale, skip, followed: Some(at(8, 4)), ..base };
        let operands = segments[0]
            .state
            .iter()
            .flatten()
            .flat_map(Moment::regions)
            .chain([&segments[0].weight, &segments[0].grad]);
        let masters = segments[0].master.iter().flat_map(Master::columns).map(|(_, region)| region);
        let operands = operands.chain(masters).map(|operand| operand.slice(0, 4).unwrap());
        for taken in operands.chain([at(0, 4), at(4, 4)]) {
            let overlapping = Update { followed: Some(taken), ..update.clone() };
            let reason = refusal(on, &Kernel::Update(overlapping), "a flag over an operand");
            assert!(reason.contains("overlaps"), "{reason}");
        }
        on.launch(&stream, &Kernel::Update(update.clone())).unwrap();
        on.launch(&stream, &Kernel::Update(Update { segments: &[], ..update })).unwrap();
        on.finish(&stream).unwrap();
    }
}

/// The update is refused when its second segment is changed so; returns the reason.
fn refused_segment(on: &Subject, rule: &'static Rule, what: &str, change: impl Fn(&mut Segment)) -> String {
    let (mut segments, scalars) = ([fitting(on, rule), fitting(on, rule)], two_sets(rule));
    change(&mut segments[1]);
    refusal(on, &Kernel::Update(Update::new(rule, &segments, &scalars)), what)
}

fn updates_refuse_operands_that_do_not_fit(on: &Subject) {
    let (spare, host) = (on.upload(&[0; 256]), on.pinned(16));
    let at = |offset, len| spare.region(offset, len).unwrap();
    type Change<'a> = &'a dyn Fn(&mut Segment);
    let changes: [(&str, &str, Change<'_>); 18] = [
        ("no elements", "a segment of 0 elements", &|s| {
            (s.weight, s.grad, s.state, s.master) = (at(0, 0), at(0, 0), [None, None, None], None);
        }),
        ("a short weight", "grad has 16 bytes where 3 elements need 12", &|s| s.weight = at(0, 6)),
        ("a long weight", "grad has 16 bytes where 8 elements need 32", &|s| s.weight = at(0, 16)),
        ("a weight of three bytes more", "weight has 11 bytes where 5 elements need 10", &|s| s.weight = at(0, 11)),
        ("a weight of another type", "grad has 16 bytes where 2 elements", &|s| s.weight_dtype = Dtype::F32),
        ("a short gradient", "grad has 12 bytes where 4 elements need 16", &|s| s.grad = at(0, 12)),
        ("a gradient of another type", "grad has 16 bytes where 4 elements need 8", &|s| s.grad_dtype = Dtype::F16),
        ("a short master", "master_param has 8 bytes where 4 elements need 16", &|s| {
            s.master = Some(Master::F32(at(0, 8)))
        }),
        ("a master and a half element", "master_param has 18 bytes", &|s| s.master = Some(Master::F32(at(0, 18)))),
        ("a weight at half its type", "weight at 0x", &|s| s.weight = at(1, 8)),
        ("a gradient at half its type", "grad at 0x", &|s| s.grad = at(2, 16)),
        ("a master at half its type", "master_param at 0x", &|s| s.master = Some(Master::F32(at(6, 16)))),
        ("a weight over the gradient", "weight overlaps grad", &|s| s.weight = s.grad.slice(4, 8).unwrap()),
        ("a master over the weight", "master_param overlaps weight", &|s| {
            (s.weight, s.master) = (at(0, 8), Some(Master::F32(at(4, 16))));
        }),
        ("no such scalars", "scalar set 2 of 2", &|s| s.scalars = 2),
        ("a weight on the host", "is not device memory", &|s| s.weight = host.slice(0, 8).unwrap()),
        ("a gradient on the host", "is not device memory", &|s| s.grad = host.clone()),
        ("a master on the host", "is not device memory", &|s| s.master = Some(Master::F32(host.clone()))),
    ];
    for rule in rules() {
        for (what, says, change) in changes {
            let reason = refused_segment(on, rule, what, change);
            assert!(reason.contains(says), "{rule:?}, {what}: {reason:?} does not say {says:?}");
        }
    }
}

fn updates_refuse_compact_masters_that_do_not_fit(on: &Subject) {
    let (spare, host) = (on.upload(&[0; 256]), on.pinned(16));
    let at = |offset, len| spare.region(offset, len).unwrap();
    let halves = |low, carry| Some(Master::Compact { low, carry });
    let good = || halves(at(64, 8), at(128, 1));
    type Change<'a> = &'a dyn Fn(&mut Segment);
    let changes: [(&str, &str, Change<'_>); 9] = [
        ("a short half", "master_low has 6 bytes where 4 elements need 8", &|s| {
            s.master = halves(at(64, 6), at(128, 1))
        }),
        ("a half at half its type", "master_low at 0x", &|s| s.master = halves(at(65, 8), at(128, 1))),
        ("too many carries", "master_carry has 2 bytes where 4 elements need 1", &|s| {
            s.master = halves(at(64, 8), at(128, 2));
        }),
        ("carries over the halves", "master_low overlaps master_carry", &|s| s.master = halves(at(64, 8), at(70, 1))),
        ("halves over the weight", "master_low overlaps weight", &|s| {
            (s.weight, s.master) = (at(64, 8), good());
        }),
        ("halves on the host", "is not device memory", &|s| s.master = halves(host.slice(0, 8).unwrap(), at(128, 1))),
        ("carries on the host", "is not device memory", &|s| s.master = halves(at(64, 8), host.slice(0, 1).unwrap())),
        ("weights of f32", "compact masters of F32 weights; they are for bf16", &|s| {
            (s.weight, s.weight_dtype, s.master) = (at(0, 16), Dtype::F32, good());
        }),
        ("weights of f16", "compact masters of F16 weights; they are for bf16", &|s| {
            (s.weight_dtype, s.master) = (Dtype::F16, good());
        }),
    ];
    for rule in rules() {
        for (what, says, change) in changes {
            let reason = refused_segment(on, rule, what, change);
            assert!(reason.contains(says), "{rule:?}, {what}: {reason:?} does not say {says:?}");
        }
        let segments = [Segment { master: good(), ..fitting(on, rule) }];
        let (scalars, stream) = (two_sets(rule), on.stream("fits").unwrap());
        let update = Update::new(rule, &segments, &scalars);
        let reason =
            refusal(on, &Kernel::Update(Update { trust_master: true, ..update.clone() }), "masters to be trusted");
        assert!(reason.contains("cannot be trusted without their weights"), "{reason}");
        on.launch(&stream, &Kernel::Update(update)).unwrap();
        on.finish(&stream).unwrap();
    }
}

fn updates_refuse_state_in_fewer_bits_that_does_not_fit(on: &Subject) {
    let (spare, host) = (on.upload(&[0; 256]), on.pinned(16));
    let at = |offset, len| spare.region(offset, len).unwrap();
    let blocks = |codes, scales| Some(Moment::Blocks { codes, scales });
    for rule in rules() {
        for (i, column) in rule.columns.iter().enumerate() {
            let (name, scale) = (column.name, column.scale);
            type Change<'a> = &'a dyn Fn(&mut Segment);
            let changes: [(&str, String, Change<'_>); 14] = [
                ("bf16 of another size", format!("{name} has 16 bytes where 4 elements need 8"), &|s| {
                    s.state[i] = Some(Moment::Bf16(at(0, 16)));
                }),
                ("bf16 at half its type", format!("{name} at 0x"), &|s| s.state[i] = Some(Moment::Bf16(at(1, 8)))),
                ("bf16 on the host", "is not device memory".to_owned(), &|s| {
                    s.state[i] = Some(Moment::Bf16(host.slice(0, 8).unwrap()));
                }),
                ("bf16 over the gradient", format!("{name} overlaps grad"), &|s| {
                    s.state[i] = Some(Moment::Bf16(s.grad.slice(8, 8).unwrap()));
                }),
                ("too few codes", format!("{name} has 3 bytes where 4 elements need 4"), &|s| {
                    s.state[i] = blocks(at(0, 3), at(8, 4));
                }),
                ("codes as if they were f32", format!("{name} has 16 bytes where 4 elements need 4"), &|s| {
                    s.state[i] = blocks(at(0, 16), at(16, 4));
                }),
                ("a scale too many", format!("{scale} has 8 bytes where 4 elements need 4"), &|s| {
                    s.state[i] = blocks(at(0, 4), at(8, 8));
                }),
                ("no scale", format!("{scale} has 0 bytes where 4 elements need 4"), &|s| {
                    s.state[i] = blocks(at(0, 4), at(8, 0));
                }),
                ("a scale at half its type", format!("{scale} at 0x"), &|s| s.state[i] = blocks(at(0, 4), at(10, 4))),
                ("a scale over the codes", format!("{name} overlaps {scale}"), &|s| {
                    s.state[i] = blocks(at(2, 4), at(4, 4));
                }),
                ("a scale over the weight", format!("{scale} overlaps weight"), &|s| {
                    (s.state[i], s.weight) = (blocks(at(0, 4), at(8, 4)), at(10, 8));
                }),
                ("codes over the gradient", format!("{name} overlaps grad"), &|s| {
                    s.state[i] = blocks(s.grad.slice(15, 1).unwrap(), at(8, 4));
                    (s.weight, s.grad) = (at(32, 2), s.grad.slice(12, 4).unwrap());
                    (s.master, s.state[(i + 1) % MAX_COLUMNS], s.state[(i + 2) % MAX_COLUMNS]) = (None, None, None);
                    for (column, other) in s.state.iter_mut().enumerate().take(rule.columns.len()) {
                        other.get_or_insert_with(|| at(64 + 4 * column as u64, 4).into());
                    }
                }),
                ("codes on the host", "is not device memory".to_owned(), &|s| {
                    s.state[i] = blocks(host.slice(0, 4).unwrap(), at(8, 4));
                }),
                ("scales on the host", "is not device memory".to_owned(), &|s| {
                    s.state[i] = blocks(at(0, 4), host.slice(0, 4).unwrap());
                }),
            ];
            for (what, says, change) in changes {
                let reason = refused_segment(on, rule, what, change);
                assert!(reason.contains(&says), "{rule:?}, {what}: {reason:?} does not say {says:?}");
            }
            // Codes at any address.
            let mut segments = [fitting(on, rule)];
            segments[0].state[i] = blocks(at(1, 4), at(8, 4));
            let (scalars, stream) = (two_sets(rule), on.stream("fits").unwrap());
            on.launch(&stream, &Kernel::Update(Update::new(rule, &segments, &scalars))).unwrap();
            on.finish(&stream).unwrap();
        }
        for (i, extra) in (rule.columns.len()..MAX_COLUMNS).flat_map(|i| [(i, at(0, 4)), (i, at(4, 4))]) {
            let names = rule.columns.iter().map(|column| column.name).collect::<Vec<_>>().join(", ");
            let reason =
                refused_segment(on, rule, "a column too many", |s| s.state[i] = blocks(extra.clone(), at(8, 4)));
            assert!(reason.contains(&format!("is column {i} of its state, which is {names}")), "{reason}");
        }
    }
}

fn updates_refuse_columns_by_name(on: &Subject) {
    let (spare, host) = (on.upload(&[0; 256]), on.pinned(16));
    let at = |offset, len| spare.region(offset, len).unwrap();
    for rule in rules() {
        let check = |what: &str, says: &str, change: &dyn Fn(&mut Segment)| {
            let reason = refused_segment(on, rule, what, change);
            assert!(reason.contains(says), "{rule:?}, {what}: {reason:?} does not say {says:?}");
        };
        let least = (rule.keeps)(&vec![0.0; rule.hypers.len()]);
        for (i, name) in rule.columns.iter().map(|column| column.name).enumerate() {
            let sized = |bytes: u64| format!("{name} has {bytes} bytes where 4 elements need 16");
            for bytes in [0, 8, 12, 18, 20] {
                check("another size", &sized(bytes), &|s| s.state[i] = Some(at(0, bytes).into()));
            }
            check("at half its type", &format!("{name} at 0x"), &|s| s.state[i] = Some(at(2, 16).into()));
            check("on the host", "is not device memory", &|s| s.state[i] = Some(host.clone().into()));
            if least & 1 << i != 0 {
                check("not there", &format!("{name} is missing"), &|s| s.state[i] = None);
            }
            check("the gradient", &format!("{name} overlaps grad"), &|s| s.state[i] = Some(s.grad.clone().into()));
            check("the master", &format!("{name} overlaps master_param"), &|s| {
                s.state[i] = s.master.iter().flat_map(Master::columns).next().map(|(_, region)| region.clone().into());
            });
            check("over the weight", &format!("{name} overlaps weight"), &|s| {
                (s.state[i], s.weight) = (Some(at(0, 16).into()), at(14, 8));
            });
            if let Some(next) = rule.columns.get(i + 1) {
                check("one element of two columns", &format!("{name} overlaps {}", next.name), &|s| {
                    (s.state[i], s.state[i + 1]) = (Some(at(0, 16).into()), Some(at(12, 16).into()));
                });
            }
        }
        for extra in rule.columns.len()..MAX_COLUMNS {
            let names = rule.columns.iter().map(|column| column.name).collect::<Vec<_>>().join(", ");
            let says = format!("is column {extra} of its state, which is {names}");
            check("a column too many", &says, &|s| s.state[extra] = Some(at(0, 16).into()));
        }
    }
}

fn a_refused_launch_changes_nothing(on: &Subject) {
    let buffer = on.upload(&[7; 64]);
    let [stream] = on.streams(["refusing"]);
    let dst = buffer.region(0, 62).unwrap();
    let outcome = on.launch(&stream, &Kernel::Uniform { dst, seed: 0, low: 0.0, high: 1.0 });
    assert!(matches!(outcome, Err(Error::BadOperands { .. })));
    on.finish(&stream).unwrap();
    assert_eq!(on.download(&buffer.all()), vec![7; 64]);
    on.fill(&stream, &buffer.all(), 8).unwrap();
    on.finish(&stream).unwrap();
    assert_eq!(on.download(&buffer.all()), vec![8; 64]);
}
