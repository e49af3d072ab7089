//! The plan: every element travels once, everything lies where it fits, and the same input gives the same plan.

use std::collections::HashMap;

use forebay::Error;
use forebay::plan::{ALIGN_ELEMENTS, HOST_OPERANDS, PlanOptions, STATE_BYTES, StateKind, StepPlan, TensorSpec};
use proptest::prelude::*;

const LARGEST: u64 = 5000;

fn spec(name: &str, elements: u64, amsgrad: bool, master: bool) -> TensorSpec {
    TensorSpec { name: name.to_owned(), elements, kinds: StateKind::set(amsgrad, master), on_host: false }
}

fn tensors() -> impl Strategy<Value = Vec<TensorSpec>> {
    let elements = prop_oneof![
        1 => Just(0),
        1 => Just(1),
        2 => (1..=8u64).prop_map(|n| n * ALIGN_ELEMENTS),
        6 => 0..=LARGEST,
    ];
    let tensor = (elements, any::<bool>(), any::<bool>(), prop::bool::weighted(0.3));
    prop::collection::vec(tensor, 0..60).prop_map(|tensors| {
        let named = tensors.into_iter().enumerate();
        named
            .map(|(i, (elements, amsgrad, master, on_host))| TensorSpec {
                on_host,
                ..spec(&format!("p{i}"), elements, amsgrad, master)
            })
            .collect()
    })
}

/// Slots from the smallest that four kinds and two operands need to one that holds several tensors; any number of bytes, not only round
/// ones.
fn options() -> impl Strategy<Value = PlanOptions> {
    let slot_bytes = prop_oneof![1536..1540u64, 1536..20_000u64, 20_000..400_000u64];
    let arena_limit_bytes = prop_oneof![
        1 => (LARGEST * STATE_BYTES)..(2 * LARGEST * STATE_BYTES),
        1 => (LARGEST * STATE_BYTES)..(20 * LARGEST * STATE_BYTES),
        1 => Just(PlanOptions::default().arena_limit_bytes),
    ];
    (slot_bytes, 2..9usize, arena_limit_bytes).prop_map(|(slot_bytes, slots, arena_limit_bytes)| PlanOptions {
        slot_bytes,
        slots,
        arena_limit_bytes,
    })
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn every_element_lies_in_exactly_one_segment(tensors in tensors(), options in options()) {
        let plan = StepPlan::new(tensors, options).unwrap();
        let mut reached = vec![0; plan.tensors().len()];
        for chunk in plan.chunks() {
            prop_assert!(!plan.segments(chunk).is_empty(), "a chunk of nothing");
            for segment in plan.segments(chunk) {
                prop_assert!(segment.elements > 0);
                prop_assert_eq!(segment.tensor_offset, reached[segment.tensor], "in order, without a gap or an overlap");
                reached[segment.tensor] += segment.elements;
            }
        }
        let expected: Vec<u64> = plan.tensors().iter().map(|tensor| tensor.elements).collect();
        prop_assert_eq!(reached, expected);
    }

    #[test]
    fn segments_lie_inside_their_chunk_at_their_tensors_home(tensors in tensors(), options in options()) {
        let plan = StepPlan::new(tensors, options).unwrap();
        for chunk in plan.chunks() {
            let mut end = 0;
            for segment in plan.segments(chunk) {
                let home = plan.home(segment.tensor);
                prop_assert_eq!(home.bucket, chunk.bucket);
                prop_assert_eq!(chunk.start + segment.chunk_offset, home.start + segment.tensor_offset);
                prop_assert!(segment.chunk_offset >= end, "two segments share elements of a slot");
                prop_assert!(segment.chunk_offset.is_multiple_of(ALIGN_ELEMENTS));
                end = segment.chunk_offset + segment.elements;
            }
            prop_assert!(end <= chunk.elements);
        }
    }

    #[test]
    fn chunks_fit_the_slot_and_do_not_overlap(tensors in tensors(), options in options()) {
        let plan = StepPlan::new(tensors, options).unwrap();
        let mut ends: HashMap<usize, u64> = HashMap::new();
        for chunk in plan.chunks() {
            let bucket = &plan.buckets()[chunk.bucket];
            let stride_bytes = chunk.elements.next_multiple_of(ALIGN_ELEMENTS) * STATE_BYTES;
            let parts = bucket.kinds.len() as u64 + if bucket.on_host { HOST_OPERANDS } else { 0 };
            prop_assert!(parts * stride_bytes <= options.slot_bytes);
            let end = ends.entry(chunk.bucket).or_default();
            prop_assert!(chunk.start >= *end && chunk.start.is_multiple_of(ALIGN_ELEMENTS));
            *end = chunk.start + chunk.elements;
            prop_assert!(*end <= bucket.elements);
        }
    }

    #[test]
    fn homes_are_aligned_apart_and_in_parameter_order(tensors in tensors(), options in options()) {
        let plan = StepPlan::new(tensors, options).unwrap();
        let mut ends = vec![0; plan.buckets().len()];
        for (index, tensor) in plan.tensors().iter().enumerate() {
            let home = plan.home(index);
            let bucket = &plan.buckets()[home.bucket];
            prop_assert_eq!((&bucket.kinds, bucket.on_host), (&tensor.kinds, tensor.on_host));
            prop_assert!(home.start.is_multiple_of(ALIGN_ELEMENTS));
            prop_assert!(home.start >= ends[home.bucket], "in parameter order and apart");
            prop_assert!(home.start < ends[home.bucket] + ALIGN_ELEMENTS, "with no more between than alignment");
            ends[home.bucket] = home.start + tensor.elements;
        }
        let elements: Vec<u64> = plan.buckets().iter().map(|bucket| bucket.elements).collect();
        prop_assert_eq!(ends, elements);
    }

    #[test]
    fn arenas_keep_their_limit_and_are_numbered_in_order(tensors in tensors(), options in options()) {
        let plan = StepPlan::new(tensors, options).unwrap();
        let arenas = plan.arena_bytes();
        prop_assert!(arenas.iter().all(|&bytes| bytes <= options.arena_limit_bytes), "{:?}", arenas);
        let mut next = 0;
        for bucket in plan.buckets() {
            prop_assert_eq!(bucket.first_arena, next);
            for _ in &bucket.kinds {
                prop_assert_eq!(arenas[next], bucket.elements * STATE_BYTES);
                next += 1;
            }
        }
        prop_assert_eq!(arenas.len(), next);
    }

    #[test]
    fn the_same_input_gives_the_same_plan_also_through_json(tensors in tensors(), options in options()) {
        let plan = StepPlan::new(tensors.clone(), options).unwrap();
        prop_assert_eq!(&plan, &StepPlan::new(tensors.clone(), options).unwrap());
        let json = serde_json::to_string(&plan).unwrap();
        prop_assert_eq!(&plan, &serde_json::from_str::<StepPlan>(&json).unwrap());
        prop_assert_eq!(plan.tensors(), tensors);
    }

    #[test]
    fn sums_are_those_of_the_tensors(tensors in tensors(), options in options()) {
        let plan = StepPlan::new(tensors.clone(), options).unwrap();
        let payload_bytes: u64 = tensors.iter().map(|t| t.elements * t.kinds.len() as u64 * 4).sum();
        prop_assert_eq!(plan.payload_bytes(), payload_bytes);
        prop_assert_eq!(plan.elements(), tensors.iter().map(|t| t.elements).sum::<u64>());
        let slot_bytes = options.slot_bytes.next_multiple_of(forebay::device::ALIGN_BYTES);
        prop_assert_eq!(plan.ring_bytes(), options.slots as u64 * slot_bytes);
        let mut pieces = vec![0; tensors.len()];
        plan.chunks().iter().flat_map(|chunk| plan.segments(chunk)).for_each(|segment| pieces[segment.tensor] += 1);
        prop_assert_eq!(plan.cut_tensors(), pieces.iter().filter(|&&pieces| pieces > 1).count());
    }

    #[test]
    fn a_tensor_larger_than_an_arena_is_refused_by_name(limit in 4..LARGEST * 8, tensors in tensors()) {
        let options = PlanOptions { arena_limit_bytes: limit, ..PlanOptions::default() };
        let large = tensors.iter().find(|tensor| tensor.elements > limit / STATE_BYTES).cloned();
        match (StepPlan::new(tensors, options), large) {
            (Ok(plan), None) => prop_assert!(plan.arena_bytes().iter().all(|&bytes| bytes <= limit)),
            (Err(error @ Error::PlanMismatch { .. }), Some(large)) => {
                let text = error.to_string();
                prop_assert!(text.starts_with(&format!("{} ", large.name)), "{}", text);
                prop_assert!(text.contains(&format!(" {} elements", large.elements)), "{}", text);
                prop_assert!(text.contains(&format!("at most {}", limit / STATE_BYTES)), "{}", text);
            }
            (outcome, large) => prop_assert!(false, "{:?} with {:?}", outcome.map(drop), large),
        }
    }
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
fn a_slot_too_small_for_one_unit_of_every_kind_is_refused_with_what_is_needed() {
    for (amsgrad, master, on_host, needed) in [
        (false, false, false, 512),
        (true, false, false, 768),
        (false, true, false, 768),
        (true, true, false, 1024),
        (false, false, true, 1024),
        (true, true, true, 1536),
    ] {
        let plan = |slot_bytes: u64| {
            let options = PlanOptions { slot_bytes, ..PlanOptions::default() };
            StepPlan::new(vec![TensorSpec { on_host, ..spec("p", 10, amsgrad, master) }], options)
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

#[test]
fn a_tensor_without_any_kind_of_state_is_refused_by_name() {
    let tensor = TensorSpec { name: "bare".to_owned(), elements: 10, kinds: Vec::new(), on_host: false };
    let error = StepPlan::new(vec![spec("p", 10, false, false), tensor], PlanOptions::default()).unwrap_err();
    assert!(matches!(&error, Error::PlanMismatch { tensor, .. } if tensor == "bare"), "{error}");
}

#[test]
fn a_plan_explains_itself() {
    let tensors = vec![spec("a", 1000, false, false), spec("b", 300, true, true), spec("c", 50, false, false)];
    let options = PlanOptions { slot_bytes: 1024, slots: 2, ..PlanOptions::default() };
    let plan = StepPlan::new(tensors, options).unwrap();
    // 1000 and 50 elements of two kinds, 128 to a chunk: 1074 with alignment; 300 of four kinds, 64 to a chunk.
    assert_eq!((plan.chunks().len(), plan.cut_tensors()), (9 + 5, 2));
    let text = plan.explain();
    for words in ["3 tensors", "1350 elements", "bucket 0", "bucket 1", "9 chunks", "5 chunks"] {
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
