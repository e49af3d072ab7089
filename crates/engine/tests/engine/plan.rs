//! The plan: every element travels once, everything lies where it fits, and the same input gives the same plan.

use std::collections::HashMap;

use forebay::Error;
use forebay::device::update::{MASTER, MASTER_CARRY, MASTER_LOW};
use forebay::device::{ALIGN_BYTES, Column, Dtype, MasterFormat, Rule, Stored};
use forebay::plan::{ALIGN_ELEMENTS, Bucket, HOST_OPERANDS, PlanOptions, StepPlan, TensorSpec};
use forebay_device::testing::kinds::cases;
use proptest::prelude::*;
use serde_json::{Value, json};

const LARGEST: u64 = 5000;

/// Bytes of an f32.
const WIDTH: u64 = 4;

/// One number for each block of elements, as quantised state has, and one of half the width.
const SCALE: Column = Column { name: "scale", stored: Stored::Number(Dtype::Bf16), block: 256 };
const HALF: Column = Column { name: "half", stored: Stored::Number(Dtype::F16), block: 1 };

fn spec(name: &str, elements: u64, amsgrad: bool, master: bool) -> TensorSpec {
    let adamw = Rule::named("adamw").unwrap();
    let mut hypers = adamw.defaults.to_vec();
    hypers[6] = f64::from(u8::from(amsgrad));
    TensorSpec { name: name.to_owned(), elements, columns: adamw.kept(&hypers, master), on_host: false, number: 0 }
}

/// The columns of AdamW, or none, or such that no rule has yet.
fn columns() -> impl Strategy<Value = Vec<Column>> {
    let adamw = (any::<bool>(), any::<bool>()).prop_map(|(amsgrad, master)| spec("", 0, amsgrad, master).columns);
    let few = prop_oneof![Just(vec![]), Just(vec![MASTER]), Just(vec![Column::f32("momentum_buffer")])];
    let with_blocks = prop_oneof![
        Just(vec![SCALE]),
        Just(vec![HALF, SCALE]),
        Just(vec![SCALE, HALF, MASTER]),
        Just(vec![Column::f32("exp_avg"), SCALE, HALF, MASTER]),
        Just(vec![Column::f32("exp_avg"), MASTER_LOW, MASTER_CARRY]),
    ];
    prop_oneof![4 => adamw, 2 => few, 2 => with_blocks]
}

/// Where tensors and chunks start, in elements.
fn align(columns: &[Column]) -> u64 {
    if columns.contains(&SCALE) { 256 } else { ALIGN_ELEMENTS }
}

/// The smallest slot for these columns.
fn least_slot(tensor: &TensorSpec) -> u64 {
    let (align, operands) = (align(&tensor.columns), HOST_OPERANDS * WIDTH * align(&tensor.columns));
    let columns: u64 = tensor.columns.iter().map(|column| column.bytes(align).next_multiple_of(ALIGN_BYTES)).sum();
    if tensor.on_host { columns + operands } else { columns.max(operands) }
}

fn tensors() -> impl Strategy<Value = Vec<TensorSpec>> {
    let elements = prop_oneof![
        1 => Just(0),
        1 => Just(1),
        2 => (1..=8u64).prop_map(|n| n * ALIGN_ELEMENTS),
        6 => 0..=LARGEST,
    ];
    let tensor = (elements, columns(), prop::bool::weighted(0.3));
    prop::collection::vec(tensor, 0..60).prop_map(|tensors| {
        let named = tensors.into_iter().enumerate();
        named
            .map(|(i, (elements, columns, on_host))| TensorSpec {
                name: format!("p{i}"),
                elements,
                columns,
                on_host,
                number: i as u64,
            })
            .collect()
    })
}

/// Tensors, with slots from the smallest that they need to one that holds several of them; any number of bytes, not only
/// round ones.
fn input() -> impl Strategy<Value = (Vec<TensorSpec>, PlanOptions)> {
    let more = prop_oneof![0..4u64, 0..20_000u64, 20_000..400_000u64];
    let arena_limit_bytes = prop_oneof![
        1 => (LARGEST * WIDTH)..(2 * LARGEST * WIDTH),
        1 => (LARGEST * WIDTH)..(20 * LARGEST * WIDTH),
        1 => Just(PlanOptions::default().arena_limit_bytes),
    ];
    (tensors(), more, 2..9usize, arena_limit_bytes).prop_map(|(tensors, more, slots, arena_limit_bytes)| {
        let least = tensors.iter().map(least_slot).max().unwrap_or(0);
        (tensors, PlanOptions { slot_bytes: least + more, slots, arena_limit_bytes })
    })
}

fn config(number: u32) -> ProptestConfig {
    ProptestConfig { cases: cases(number), failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn every_element_lies_in_exactly_one_piece((tensors, options) in input()) {
        let plan = StepPlan::new(tensors, options).unwrap();
        let mut reached = vec![0; plan.tensors().len()];
        for chunk in plan.chunks() {
            prop_assert!(!plan.pieces(chunk).is_empty(), "a chunk of nothing");
            for piece in plan.pieces(chunk) {
                prop_assert!(piece.elements > 0);
                prop_assert_eq!(piece.tensor_offset, reached[piece.tensor], "in order, without a gap or an overlap");
                reached[piece.tensor] += piece.elements;
            }
        }
        let expected: Vec<u64> = plan.tensors().iter().map(|tensor| tensor.elements).collect();
        prop_assert_eq!(reached, expected);
    }

    #[test]
    fn pieces_lie_inside_their_chunk_at_their_tensors_home((tensors, options) in input()) {
        let plan = StepPlan::new(tensors, options).unwrap();
        for chunk in plan.chunks() {
            let mut end = 0;
            for piece in plan.pieces(chunk) {
                let home = plan.home(piece.tensor);
                prop_assert_eq!(home.bucket, chunk.bucket);
                prop_assert_eq!(chunk.start + piece.chunk_offset, home.start + piece.tensor_offset);
                prop_assert!(piece.chunk_offset >= end, "two pieces share elements of a slot");
                prop_assert!(piece.chunk_offset.is_multiple_of(align(&plan.buckets()[chunk.bucket].columns)));
                end = piece.chunk_offset + piece.elements;
            }
            prop_assert!(end <= chunk.elements);
        }
    }

    #[test]
    fn chunks_fit_the_slot_and_do_not_overlap((tensors, options) in input()) {
        let plan = StepPlan::new(tensors, options).unwrap();
        let mut ends: HashMap<usize, u64> = HashMap::new();
        for chunk in plan.chunks() {
            let bucket = &plan.buckets()[chunk.bucket];
            let elements = chunk.elements.next_multiple_of(align(&bucket.columns));
            let part_bytes = |column: &Column| column.bytes(elements).next_multiple_of(ALIGN_BYTES);
            let parts: u64 = bucket.columns.iter().map(part_bytes).sum();
            let operands = HOST_OPERANDS * elements * WIDTH;
            let travelling = if bucket.on_host { operands } else { 0 };
            prop_assert!(parts + travelling <= options.slot_bytes);
            prop_assert!(operands <= options.slot_bytes, "parameters and gradients fit a slot of the host's");
            let end = ends.entry(chunk.bucket).or_default();
            prop_assert!(chunk.start >= *end && chunk.start.is_multiple_of(align(&bucket.columns)));
            *end = chunk.start + chunk.elements;
            prop_assert!(*end <= bucket.elements);
        }
    }

    #[test]
    fn parts_of_a_slot_are_aligned_apart_and_inside_it((tensors, options) in input()) {
        let plan = StepPlan::new(tensors, options).unwrap();
        for chunk in plan.chunks() {
            let bucket = &plan.buckets()[chunk.bucket];
            let offsets = bucket.part_offsets(chunk.elements);
            let ends = part_ends(bucket, chunk.elements, &offsets);
            prop_assert_eq!(offsets.len(), ends.len() + 1, "a part each, and the end of all");
            prop_assert!(offsets.iter().all(|offset| offset.is_multiple_of(ALIGN_BYTES)));
            for (i, end) in ends.into_iter().enumerate() {
                prop_assert!(end <= offsets[i + 1], "part {} ends at {} in {:?}", i, end, offsets);
            }
            prop_assert!(offsets[offsets.len() - 1] <= options.slot_bytes);
            // Every piece has whole numbers of a column to itself: it starts at a block, and only a tensor's end is
            // within one.
            for piece in plan.pieces(chunk) {
                let is_last = piece.tensor_offset + piece.elements == plan.tensors()[piece.tensor].elements;
                for column in &bucket.columns {
                    let block = u64::from(column.block);
                    prop_assert!(piece.chunk_offset.is_multiple_of(block) && piece.tensor_offset.is_multiple_of(block));
                    prop_assert!(is_last || piece.elements.is_multiple_of(block));
                }
            }
        }
    }

    #[test]
    fn homes_are_aligned_apart_and_in_parameter_order((tensors, options) in input()) {
        let plan = StepPlan::new(tensors, options).unwrap();
        let mut ends = vec![0; plan.buckets().len()];
        for (index, tensor) in plan.tensors().iter().enumerate() {
            let home = plan.home(index);
            let bucket = &plan.buckets()[home.bucket];
            let align = align(&bucket.columns);
            prop_assert_eq!((&bucket.columns, bucket.on_host), (&tensor.columns, tensor.on_host));
            prop_assert!(home.start.is_multiple_of(align));
            prop_assert!(home.start >= ends[home.bucket], "in parameter order and apart");
            prop_assert!(home.start < ends[home.bucket] + align, "with no more between than alignment");
            ends[home.bucket] = home.start + tensor.elements;
        }
        let elements: Vec<u64> = plan.buckets().iter().map(|bucket| bucket.elements).collect();
        prop_assert_eq!(ends, elements);
    }

    #[test]
    fn arenas_keep_their_limit_and_are_numbered_in_order((tensors, options) in input()) {
        let plan = StepPlan::new(tensors, options).unwrap();
        let arenas = plan.arena_bytes();
        prop_assert!(arenas.iter().all(|&bytes| bytes <= options.arena_limit_bytes), "{:?}", arenas);
        let mut next = 0;
        for bucket in plan.buckets() {
            prop_assert_eq!(bucket.first_arena, next);
            for column in &bucket.columns {
                let values = bucket.elements.div_ceil(u64::from(column.block));
                prop_assert_eq!(arenas[next], values * column.stored.bytes());
                next += 1;
            }
        }
        prop_assert_eq!(arenas.len(), next);
    }

    #[test]
    fn the_same_input_gives_the_same_plan_also_through_json((tensors, options) in input()) {
        let plan = StepPlan::new(tensors.clone(), options).unwrap();
        prop_assert_eq!(&plan, &StepPlan::new(tensors.clone(), options).unwrap());
        let json = serde_json::to_string(&plan).unwrap();
        prop_assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), as_json(&plan));
        prop_assert_eq!(plan.tensors(), tensors);
    }

    #[test]
    fn sums_are_those_of_the_tensors((tensors, options) in input()) {
        let plan = StepPlan::new(tensors.clone(), options).unwrap();
        let bytes = |t: &TensorSpec| t.columns.iter().map(|column| column.bytes(t.elements)).sum::<u64>();
        let payload_bytes: u64 = tensors.iter().map(bytes).sum();
        prop_assert_eq!(plan.payload_bytes(), payload_bytes);
        prop_assert_eq!(plan.elements(), tensors.iter().map(|t| t.elements).sum::<u64>());
        let slot_bytes = options.slot_bytes.next_multiple_of(ALIGN_BYTES);
        prop_assert_eq!(plan.ring_bytes(), options.slots as u64 * slot_bytes);
        let mut pieces = vec![0; tensors.len()];
        plan.chunks().iter().flat_map(|chunk| plan.pieces(chunk)).for_each(|piece| pieces[piece.tensor] += 1);
        prop_assert_eq!(plan.cut_tensors(), pieces.iter().filter(|&&pieces| pieces > 1).count());
    }

    #[test]
    fn a_tensor_larger_than_an_arena_is_refused_by_name(limit in 4..LARGEST * 8, tensors in tensors()) {
        let options = PlanOptions { arena_limit_bytes: limit, ..PlanOptions::default() };
        // The widest column says how many elements there may be; without any, as many as of an f32.
        let most = |column: &Column| limit / column.stored.bytes() * u64::from(column.block);
        let most = |tensor: &TensorSpec| tensor.columns.iter().map(most).min().unwrap_or(limit / WIDTH);
        let large = tensors.iter().find(|tensor| tensor.elements > most(tensor)).cloned();
        match (StepPlan::new(tensors, options), large) {
            (Ok(plan), None) => prop_assert!(plan.arena_bytes().iter().all(|&bytes| bytes <= limit)),
            (Err(error @ Error::PlanMismatch { .. }), Some(large)) => {
                let text = error.to_string();
                prop_assert!(text.starts_with(&format!("{} ", large.name)), "{}", text);
                prop_assert!(text.contains(&format!(" {} elements", large.elements)), "{}", text);
                prop_assert!(text.contains(&format!("at most {};", most(&large))), "{}", text);
            }
            (outcome, large) => prop_assert!(false, "{:?} with {:?}", outcome.map(drop), large),
        }
    }
}

/// Where the parts of a slot end without alignment: columns, then operands.
fn part_ends(bucket: &Bucket, elements: u64, offsets: &[u64]) -> Vec<u64> {
    let columns = bucket.columns.iter().map(|column| column.bytes(elements));
    let operands = if bucket.on_host { HOST_OPERANDS } else { 0 };
    let bytes = columns.chain((0..operands).map(|_| elements * WIDTH));
    bytes.zip(offsets).map(|(bytes, offset)| offset + bytes).collect()
}

/// All that a plan says of itself, written down by hand.
fn as_json(plan: &StepPlan) -> Value {
    let column = |column: &Column| {
        let dtype = match column.stored {
            Stored::Number(Dtype::F32) => "f32",
            Stored::Number(Dtype::Bf16) => "bf16",
            Stored::Number(Dtype::F16) => "f16",
            Stored::U16 => "u16",
            Stored::U8 => "u8",
        };
        json!({"name": column.name, "dtype": dtype, "block": column.block})
    };
    let columns = |columns: &[Column]| columns.iter().map(column).collect::<Value>();
    let range = |range: &std::ops::Range<usize>| json!({"start": range.start, "end": range.end});
    let PlanOptions { slot_bytes, slots, arena_limit_bytes } = plan.options();
    let tensor = |t: &TensorSpec| json!({"name": t.name, "elements": t.elements, "columns": columns(&t.columns), "on_host": t.on_host, "number": t.number});
    let home = |i: usize| json!({"bucket": plan.home(i).bucket, "start": plan.home(i).start});
    let bucket = |b: &Bucket| {
        let columns = columns(&b.columns);
        json!({"columns": columns, "on_host": b.on_host, "elements": b.elements, "first_arena": b.first_arena})
    };
    let chunk = |c: &forebay::plan::Chunk| json!({"bucket": c.bucket, "start": c.start, "elements": c.elements, "pieces": range(&c.pieces)});
    let piece = |p: &forebay::plan::Piece| {
        let offsets = (p.tensor_offset, p.chunk_offset);
        json!({"tensor": p.tensor, "tensor_offset": offsets.0, "chunk_offset": offsets.1, "elements": p.elements})
    };
    json!({
        "options": {"slot_bytes": slot_bytes, "slots": slots, "arena_limit_bytes": arena_limit_bytes},
        "tensors": plan.tensors().iter().map(tensor).collect::<Value>(),
        "homes": (0..plan.tensors().len()).map(home).collect::<Value>(),
        "buckets": plan.buckets().iter().map(bucket).collect::<Value>(),
        "chunks": plan.chunks().iter().map(chunk).collect::<Value>(),
        "pieces": plan.chunks().iter().flat_map(|chunk| plan.pieces(chunk)).map(piece).collect::<Value>(),
    })
}

#[test]
fn fewer_than_two_slots_are_refused() {
    for slots in [0, 1] {
        let options = PlanOptions { slots, ..PlanOptions::default() };
        let error = StepPlan::new(vec![spec("p", 10, false, false)], options).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::InvalidOption { option: "slots", .. }), "{text}");
        assert!(text.contains(&format!("slots: {slots};")) && text.contains("at least 2"), "{text}");
    }
}

#[test]
fn a_slot_too_small_for_one_unit_of_every_column_is_refused_with_what_is_needed() {
    let adamw = |amsgrad, master| spec("p", 10, amsgrad, master).columns;
    for (columns, on_host, needed) in [
        (adamw(false, false), false, 512),
        (adamw(true, false), false, 768),
        (adamw(false, true), false, 768),
        (adamw(true, true), false, 1024),
        (adamw(false, false), true, 1024),
        (adamw(true, true), true, 1536),
        // Parameters and gradients must fit a slot on the host, which is as large.
        (vec![], false, 512),
        (vec![], true, 512),
        (vec![MASTER], false, 512),
        (vec![MASTER], true, 768),
        (vec![MASTER_LOW, MASTER_CARRY], false, 512),
        (vec![MASTER_LOW, MASTER_CARRY], true, 1024),
        (vec![SCALE], false, 2048),
        (vec![SCALE, HALF, MASTER], false, 2048),
        (vec![SCALE, HALF, MASTER], true, 256 + 512 + 1024 + 2048),
    ] {
        let plan = |slot_bytes: u64| {
            let options = PlanOptions { slot_bytes, ..PlanOptions::default() };
            let (name, columns) = ("p".to_owned(), columns.clone());
            StepPlan::new(vec![TensorSpec { name, elements: 10, columns, on_host, number: 0 }], options)
        };
        plan(needed).unwrap();
        for short in [0, 1, needed - 1] {
            let error = plan(short).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, Error::InvalidOption { option: "chunk_bytes", .. }), "{text}");
            assert!(text.contains(&format!(": {short};")) && text.contains(&format!("at least {needed}")), "{text}");
        }
    }
}

/// A slab's limit on one registration is the plan's default limit on an arena.
#[test]
fn the_default_arena_fits_one_registration() {
    assert_eq!(PlanOptions::default().arena_limit_bytes, forebay::device::PIECE_BYTES);
}

/// SGD without momentum: no arenas, and chunks that say what is updated together.
#[test]
fn tensors_without_any_columns_are_planned() {
    for (on_host, slot_bytes) in [(false, 1024), (true, 1024)] {
        let bare = |name: &str, elements| TensorSpec {
            name: name.to_owned(),
            elements,
            columns: Vec::new(),
            on_host,
            number: 0,
        };
        let tensors = vec![bare("a", 100), spec("p", 10, false, false), bare("b", 200)];
        let options = PlanOptions { slot_bytes, ..PlanOptions::default() };
        let plan = StepPlan::new(tensors, options).unwrap();
        assert_eq!(plan.arena_bytes(), [40, 40]);
        assert_eq!((plan.payload_bytes(), plan.elements(), plan.buckets().len()), (80, 310, 2));
        // 128 elements to a chunk: the second tensor starts at 128.
        let pieces: Vec<_> = plan.chunks().iter().map(|chunk| (chunk.bucket, plan.pieces(chunk).len())).collect();
        assert_eq!(pieces, [(0, 1), (0, 1), (0, 1), (1, 1)]);
        assert!(plan.explain().contains("bucket 0: no state; 328 elements each, 3 chunks"), "{plan}");
    }
}

/// A scale for each 256 elements: half a block at a tensor's end is a block.
#[test]
fn a_column_of_blocks_cuts_where_blocks_end() {
    let tensor = |name: &str, elements| {
        let columns = vec![Column::f32("exp_avg"), SCALE];
        TensorSpec { name: name.to_owned(), elements, columns, on_host: false, number: 0 }
    };
    // 512 elements to a chunk: 2048 bytes of f32, and 4 of scales in 256.
    let options = PlanOptions { slot_bytes: 4096, slots: 2, ..PlanOptions::default() };
    let plan = StepPlan::new(vec![tensor("a", 257), tensor("b", 1), tensor("c", 600)], options).unwrap();
    assert_eq!((plan.home(0).start, plan.home(1).start, plan.home(2).start), (0, 512, 768));
    assert_eq!(plan.arena_bytes(), [1368 * 4, 6 * 2]);
    assert_eq!(plan.payload_bytes(), 858 * 4 + (2 + 1 + 3) * 2);
    let chunks: Vec<_> = plan.chunks().iter().map(|chunk| (chunk.start, chunk.elements)).collect();
    assert_eq!(chunks, [(0, 512), (512, 512), (1024, 344)]);
    assert_eq!(plan.buckets()[0].part_offsets(512), [0, 2048, 2304]);
    assert_eq!(plan.buckets()[0].part_offsets(344), [0, 2048, 2304], "the last one as if it were whole blocks");
    let json = serde_json::to_value(&plan).unwrap();
    let scale = json!({"name": "scale", "dtype": "bf16", "block": 256});
    assert_eq!((&json["buckets"][0]["columns"][1], &json["tensors"][2]["columns"][1]), (&scale, &scale));
}

/// What aligns the parts of a slot is lost once for each part, and not for each 64 elements.
#[test]
fn a_chunk_of_narrow_columns_fills_its_slot() {
    let adamw = Rule::named("adamw").unwrap();
    let columns = adamw.kept(adamw.defaults, MasterFormat::Compact);
    let tensor = TensorSpec { name: "p".to_owned(), elements: 3_000_000, columns, on_host: false, number: 0 };
    let options = PlanOptions::default();
    let plan = StepPlan::new(vec![tensor], options).unwrap();
    assert_eq!(plan.payload_bytes(), 3_000_000 * 10 + 375_000);
    let bucket = &plan.buckets()[0];
    let bytes = |elements| bucket.part_offsets(elements).last().copied().unwrap();
    let most = plan.chunks()[0].elements;
    assert!(bytes(most) <= options.slot_bytes && bytes(most + ALIGN_ELEMENTS) > options.slot_bytes, "{most}");
    assert_eq!(most % ALIGN_ELEMENTS, 0);
    assert!(most * 81 / 8 > options.slot_bytes - 2048, "10.125 bytes for each of {most} elements");
}

#[test]
fn a_plan_explains_itself() {
    let tensors = vec![spec("a", 1000, false, false), spec("b", 300, true, true), spec("c", 50, false, false)];
    let options = PlanOptions { slot_bytes: 1024, slots: 2, ..PlanOptions::default() };
    let plan = StepPlan::new(tensors, options).unwrap();
    // 1000 and 50 elements of two columns, 128 to a chunk: 1074 with alignment; 300 of four columns, 64 to a chunk.
    assert_eq!((plan.chunks().len(), plan.cut_tensors()), (9 + 5, 2));
    let text = plan.explain();
    for words in ["3 tensors", "1350 elements", "bucket 0", "bucket 1", "9 chunks", "5 chunks"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    for words in ["exp_avg, exp_avg_sq;", "exp_avg, exp_avg_sq, max_exp_avg_sq, master_param;"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    for words in ["ring: 2 slots", "14 chunks", "wraps 7 times", "2 tensors are cut"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    assert_eq!(plan.to_string(), text);
}

#[test]
fn nothing_to_plan_is_a_plan() {
    for tensors in [Vec::new(), vec![spec("empty", 0, false, true); 3]] {
        let plan = StepPlan::new(tensors, PlanOptions::default()).unwrap();
        assert_eq!((plan.chunks().len(), plan.payload_bytes(), plan.elements()), (0, 0, 0));
    }
}
