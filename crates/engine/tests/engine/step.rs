//! The streamed step: the same bits as a resident one, with statistics that are right and nothing allocated on the way.

use std::time::{Duration, Instant};

use crate::common::trial::{Outcome, Rig, Scenario, Tensor, group_tensors, mixed_tensors};
use crate::common::{Subject, device_error, in_one_of_three, traced, under_sanitizer};
use forebay::Error;
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::update::RULES;
use forebay::device::{self, Dtype, Region};
use forebay::flow::Pipeline;
use forebay::memory::Allocator;
use forebay::optimizer::{Binding, Placement};
use forebay::trace::TraceOptions;

forebay_device::on_devices! {
    every:
        resident_equals_the_rule_s_arithmetic,
        streamed_equals_resident_in_every_group,
        streamed_equals_resident_where_every_tensor_is_cut,
        streamed_equals_resident_with_more_slots_than_chunks,
        streamed_equals_resident_with_every_type_and_gaps_in_the_gradients,
        streamed_equals_resident_with_divided_buckets,
        streamed_equals_resident_with_slots_of_any_size,
        streamed_equals_resident_with_parameters_on_the_host,
        scale_and_skip_are_read_on_the_device,
        a_tensor_without_a_gradient_is_untouched_and_its_chunks_stay_home,
        a_step_without_any_gradient_moves_nothing,
        a_shard_with_no_elements_at_all_steps,
        steps_allocate_nothing,
        statistics_count_payload,
        statistics_are_those_of_the_last_step,
        parts_of_a_slot_start_aligned,
        settle_waits_for_one_tensor_only,
        another_number_of_tensors_is_refused,
        another_size_is_refused_by_name_before_anything_changes,
        memory_that_no_kernel_can_use_is_refused_by_name_before_anything_changes,
        a_group_that_is_not_there_is_refused_before_anything_changes;
    checked:
        state_is_readable_after_settle_and_not_before;
}

/// Larger than any chunk of the tests that use it.
fn large_tensors() -> Vec<Tensor> {
    vec![
        Tensor::f32(1500),
        Tensor::of(1000, Dtype::Bf16, Dtype::Bf16).master(),
        Tensor::f32(2049),
        Tensor::f32(777).full(),
        Tensor::of(1300, Dtype::F16, Dtype::F32).master().full(),
    ]
}

fn gaps(step: usize, tensor: usize) -> bool {
    (step * 7 + tensor * 3).is_multiple_of(5)
}

fn resident_equals_the_rule_s_arithmetic(on: &Subject) {
    for rule in RULES {
        for tensors in [mixed_tensors(), group_tensors()] {
            let scenario = Scenario { missing: gaps, ..Scenario::new(tensors, 2, 4096) }.with(rule);
            scenario.check_placed(on, 5, Placement::Resident);
            let skipped: Option<fn(usize) -> bool> = Some(|step| step == 1);
            Scenario { grad_scale: Some(0.6), skipped, ..scenario }.check_placed(on, 3, Placement::Resident);
        }
    }
}

fn streamed_equals_resident_in_every_group(on: &Subject) {
    for rule in RULES {
        Scenario { missing: gaps, ..Scenario::new(group_tensors(), 3, 4096) }.with(rule).check(on, 5);
    }
}

fn streamed_equals_resident_where_every_tensor_is_cut(on: &Subject) {
    for (slots, slot_bytes) in [(2, 1024), (3, 2048), (4, 2048), (7, 1536)] {
        for rule in RULES {
            let scenario = Scenario::new(large_tensors(), slots, slot_bytes).with(rule);
            let plan = scenario.plan();
            assert_eq!(plan.cut_tensors(), scenario.tensors.len(), "{rule:?}");
            assert!(plan.chunks().len() > 3 * slots, "the ring wraps");
            scenario.check(on, if rule.name == "adamw" { 10 } else { 3 });
        }
    }
}

fn streamed_equals_resident_with_more_slots_than_chunks(on: &Subject) {
    for slots in [4, 7] {
        let scenario = Scenario::new(vec![Tensor::f32(3000), Tensor::f32(900), Tensor::f32(5000)], slots, 32 << 10);
        assert!(scenario.plan().chunks().len() < slots);
        scenario.check(on, 12);
    }
}

fn streamed_equals_resident_with_every_type_and_gaps_in_the_gradients(on: &Subject) {
    for (slots, slot_bytes) in [(2, 4096), (3, 1280), (4, 16 << 10), (7, 1 << 20)] {
        for rule in RULES {
            let scenario = Scenario { missing: gaps, ..Scenario::new(mixed_tensors(), slots, slot_bytes) }.with(rule);
            scenario.check(on, if rule.name == "adamw" { 10 } else { 4 });
        }
    }
}

fn streamed_equals_resident_with_divided_buckets(on: &Subject) {
    let mut scenario = Scenario::new(mixed_tensors(), 3, 4096);
    scenario.options.arena_limit_bytes = 5000 * 4;
    assert!(scenario.plan().buckets().len() > 4, "buckets are divided");
    scenario.check(on, 10);
}

/// A size that is no multiple of anything still gives slots that kernels can use.
fn streamed_equals_resident_with_slots_of_any_size(on: &Subject) {
    for slot_bytes in [1025, 2047, 4098, 10_001] {
        let scenario = Scenario::new(large_tensors(), 3, slot_bytes);
        let rig = Rig::new(on, scenario, 10);
        let allocated = || on.memory().unwrap().allocated_bytes;
        let before = allocated();
        let ring = Pipeline::new(&Allocator::new(on.device.clone()), 3, slot_bytes).unwrap();
        let ring_bytes = allocated() - before;
        drop(ring);
        assert_eq!(ring_bytes, rig.plan().ring_bytes(), "the plan knows the ring's size");
        assert_eq!(ring_bytes, rig.optimizer.ring_bytes(), "and so does the optimizer");
        assert!(ring_bytes < 3 * (slot_bytes + 256), "the ring is what was asked for, but for alignment");
        rig.steps(10);
        rig.optimizer.synchronize().unwrap();
        rig.assert_exact(10);
    }
}

/// Parameters and gradients of some tensors lie on the host and travel with the state.
fn streamed_equals_resident_with_parameters_on_the_host(on: &Subject) {
    let missing = |step, tensor| (step * 5 + tensor * 3) % 4 == 0;
    for (slots, slot_bytes, every) in [(2, 1792, 1), (3, 4099, 2), (7, 1 << 20, 3)] {
        let place = |(i, tensor): (usize, Tensor)| if i % every == 0 { tensor.on_host() } else { tensor };
        let tensors = mixed_tensors().into_iter().enumerate().map(place).collect();
        let scenario = Scenario { missing, ..Scenario::new(tensors, slots, slot_bytes) };
        scenario.check(on, 10);
        RULES.iter().skip(1).for_each(|rule| scenario.clone().with(rule).check(on, 3));
        Scenario { grad_scale: Some(0.6), skipped: Some(|step| step == 1), ..scenario }.check(on, 4);
    }
}

fn scale_and_skip_are_read_on_the_device(on: &Subject) {
    let plain = Scenario::new(mixed_tensors(), 3, 4096);
    Scenario { grad_scale: Some(0.37), ..plain.clone() }.check(on, 10);
    let scenario = Scenario { grad_scale: Some(1.7), skipped: Some(|step| step % 3 == 1), ..plain };
    scenario.check(on, 10);

    // A skipped step goes through the ring and changes no bit.
    let rig = Rig::new(on, scenario, 2);
    rig.step(0).unwrap();
    rig.optimizer.synchronize().unwrap();
    let before = rig.outcome().without_counters();
    rig.step(1).unwrap();
    rig.assert_stats(rig.stats().streamed, 1);
    assert!(rig.outcome().without_counters() == before, "a skipped step changed something");
}

fn only(outcome: &Outcome, tensor: usize) -> Outcome {
    Outcome(outcome.0.iter().filter(|(key, _)| key.0 == tensor).map(|(key, bytes)| (*key, bytes.clone())).collect())
}

fn a_tensor_without_a_gradient_is_untouched_and_its_chunks_stay_home(on: &Subject) {
    // 256 elements to a chunk: tensor 1 shares its first chunk and its last, and has others to itself.
    let tensors = vec![Tensor::f32(300), Tensor::f32(1500), Tensor::f32(300)];
    let missing = |step, tensor| step % 2 == 1 && tensor == 1;
    let scenario = Scenario { missing, ..Scenario::new(tensors, 2, 2048) };
    let rig = Rig::new(on, scenario, 10);
    let mut last = rig.outcome();
    for step in 0..10 {
        rig.step(step).unwrap();
        let stats = rig.stats().streamed;
        rig.assert_stats(stats, step);
        let chunks = if missing(step, 1) { 4 } else { 9 };
        assert_eq!(stats.chunks, chunks, "chunks without a gradient do not travel");
        let now = rig.outcome();
        assert_eq!(only(&now, 1) == only(&last, 1), missing(step, 1), "step {step}");
        assert!(only(&now, 0) != only(&last, 0) && only(&now, 2) != only(&last, 2), "step {step}");
        last = now;
    }
    rig.assert_exact(10);
}

fn a_step_without_any_gradient_moves_nothing(on: &Subject) {
    let scenario = Scenario { missing: |step, _| step == 1, ..Scenario::new(large_tensors(), 3, 4096) };
    let rig = Rig::new(on, scenario, 2);
    rig.step(0).unwrap();
    rig.optimizer.synchronize().unwrap();
    let before = rig.outcome();
    rig.step(1).unwrap();
    assert_eq!(rig.stats().streamed, Default::default());
    assert!(rig.outcome() == before);
    rig.assert_idle();
}

fn a_shard_with_no_elements_at_all_steps(on: &Subject) {
    for tensors in [vec![Tensor::f32(0)], vec![Tensor::f32(0), Tensor::of(0, Dtype::Bf16, Dtype::Bf16).master()]] {
        let rig = Rig::new(on, Scenario::new(tensors.clone(), 2, 4096), 2);
        rig.steps(2);
        assert_eq!(rig.stats().streamed, Default::default());
        for tensor in 0..tensors.len() {
            rig.optimizer.settle(0, tensor).unwrap();
            for name in rig.optimizer.columns(0, tensor).unwrap() {
                assert_eq!(rig.column(tensor, name).bytes(), 0);
            }
        }
    }
}

fn steps_allocate_nothing(on: &Subject) {
    let rig = Rig::new(on, Scenario::new(mixed_tensors(), 3, 4096), 8);
    let recorder = traced(TraceOptions { capacity: 10_000 });
    rig.step(0).unwrap();
    let before = on.taken();
    for step in 1..8 {
        rig.step(step).unwrap();
        assert_eq!(on.taken(), before, "in step {step}");
    }
    rig.optimizer.synchronize().unwrap();
    rig.optimizer.settle(0, 0).unwrap();
    assert_eq!(on.taken(), before);
    recorder.stop();
}

fn statistics_count_payload(on: &Subject) {
    let half = Tensor::of(3001, Dtype::Bf16, Dtype::Bf16);
    for (tensor, width) in [(Tensor::f32(3001), 8), (half.master(), 12), (half.master().full(), 16)] {
        let rig = Rig::new(on, Scenario::new(vec![tensor, tensor], 2, 4096), 2);
        for step in 0..2 {
            rig.step(step).unwrap();
            let stats = rig.stats().streamed;
            rig.assert_stats(stats, step);
            assert_eq!(stats.fetch_bytes, 2 * 3001 * width, "{width} bytes an element, alignment not counted");
            assert_eq!(stats.chunks, rig.plan().chunks().len() as u64);
            assert!(stats.fetch_ns > 0 && stats.update_ns > 0 && stats.store_ns > 0, "{stats:?}");
            assert!((stats.stalls == 0) == (stats.stall_ns == 0), "{stats:?}");
            assert_eq!(rig.stats().streamed, stats, "asking again counts nothing twice");
            let ring_bytes = rig.optimizer.ring_bytes();
            assert_eq!((rig.stats().device_bytes, ring_bytes), (ring_bytes, 2 * 4096));
            assert_eq!(rig.stats().pinned_bytes, rig.optimizer.pinned_bytes());
            assert_eq!(rig.stats().host, None);
        }
    }
}

fn statistics_are_those_of_the_last_step(on: &Subject) {
    let missing = |step, tensor| step == 1 && tensor == 0;
    let scenario = Scenario { missing, ..Scenario::new(vec![Tensor::f32(2000), Tensor::f32(3000)], 7, 4096) };
    let rig = Rig::new(on, scenario, 3);
    for step in 0..3 {
        rig.step(step).unwrap();
    }
    rig.assert_stats(rig.stats().streamed, 2);
    rig.reset();
    rig.step(0).unwrap();
    rig.step(1).unwrap();
    rig.assert_stats(rig.stats().streamed, 1);

    // A store that is late makes the host wait for a slot, and the statistics say so.
    in_one_of_three("the host never waited for a slot that was late", || {
        rig.reset();
        on.fault.on(Call::Copy, 2, Misbehaviour::Late { ns: 50_000_000 });
        rig.step(0).unwrap();
        let stats = rig.stats().streamed;
        under_sanitizer(on.kind) || stats.stalls > 0 && stats.stall_ns > 10_000_000
    });
}

/// The last chunk of a bucket may hold any number of elements; each column starts aligned in the slot all the same, or
/// kernels would fall back to loading one element at a time. The ring is memory of the test's.
fn parts_of_a_slot_start_aligned(on: &Subject) {
    let rig = Rig::new(on, Scenario::new(vec![Tensor::f32(65).full().master()], 2, 4096), 1);
    let ring = on.alloc(rig.optimizer.ring_bytes()).unwrap();
    on.fill(&ring.all(), 0xee);
    rig.optimizer.open_ring(Some((&ring, Some(&rig.compute)))).unwrap();
    rig.step(0).unwrap();
    rig.optimizer.synchronize().unwrap();
    let bytes = on.download(&ring.all());
    let names = rig.optimizer.columns(0, 0).unwrap();
    assert_eq!(names, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param"]);
    for (i, name) in names.into_iter().enumerate() {
        let expected = on.host_bytes(&rig.column(0, name)).unwrap();
        let at = i * 128 * 4;
        assert!(bytes[at..at + expected.len()] == expected, "{name} is not at byte {at} of the ring");
    }
}

fn state_is_readable_after_settle_and_not_before(on: &Subject) {
    // A chunk for each tensor, and a slot for each chunk: no slot is used twice, so nothing but settling tells the host.
    let scenario = Scenario::new(vec![Tensor::f32(128), Tensor::f32(128), Tensor::f32(100)], 4, 1024);
    let rig = Rig::new(on, scenario, 2);
    let read = |tensor, name| on.host_bytes(&rig.column(tensor, name));
    rig.step(0).unwrap();
    for tensor in 0..3 {
        for name in ["exp_avg", "exp_avg_sq"] {
            let outcome = read(tensor, name);
            assert!(matches!(outcome, Err(device::Error::Unordered { .. })), "{tensor} {name}: {outcome:?}");
        }
    }
    rig.optimizer.settle(0, 0).unwrap();
    let settled = read(0, "exp_avg").unwrap();
    read(0, "exp_avg_sq").unwrap();
    let other = read(2, "exp_avg");
    assert!(matches!(other, Err(device::Error::Unordered { .. })), "settling drains nothing else: {other:?}");
    // What was settled may be written, too.
    on.write(&settled, &rig.column(0, "exp_avg")).unwrap();
    rig.step(1).unwrap();
    rig.optimizer.synchronize().unwrap();
    rig.assert_exact(2);
}

fn settle_waits_for_one_tensor_only(on: &Subject) {
    let scenario = Scenario::new(vec![Tensor::f32(128), Tensor::f32(128), Tensor::f32(100)], 4, 1024);
    let rig = Rig::new(on, scenario, 1).warm();
    in_one_of_three("settling a tensor waited for another one's store", || {
        rig.reset();
        // Two copies in and two out for each chunk: the tenth copy is the first of the third chunk's store.
        on.fault.on(Call::Copy, 10, Misbehaviour::Late { ns: 300_000_000 });
        let begin = Instant::now();
        rig.step(0).unwrap();
        rig.optimizer.settle(0, 0).unwrap();
        rig.optimizer.settle(0, 1).unwrap();
        let early = begin.elapsed() < Duration::from_millis(250);
        rig.optimizer.settle(0, 2).unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(290), "a settled store was still under way");
        rig.assert_exact(1);
        early || under_sanitizer(on.kind)
    });
}

/// Refused as it should be, with nothing changed, every slot in its place and the state still trusted.
fn assert_refused(on: &Subject, rig: &Rig<'_>, tensors: &[Option<Binding>], needles: &[&str]) {
    let before = rig.outcome();
    let error = rig.step_with(1, tensors.to_vec()).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::PlanMismatch { .. } | Error::InvalidOption { option: "group", .. }), "{text}");
    assert_eq!(rig.optimizer.distrusted(), None);
    assert!(needles.iter().all(|needle| text.contains(needle)), "{text:?} lacks one of {needles:?}");
    rig.assert_idle();
    // On the checker this also says that nothing was submitted: nobody waited.
    on.finish(&rig.compute).unwrap();
    assert!(rig.outcome() == before, "a refused step changed something");
}

fn mismatched_rig(on: &Subject) -> Rig<'_> {
    let rig = Rig::new(on, Scenario::new(large_tensors(), 3, 4096), 2);
    rig.step(0).unwrap();
    rig.optimizer.synchronize().unwrap();
    rig
}

fn another_number_of_tensors_is_refused(on: &Subject) {
    let rig = mismatched_rig(on);
    let mut tensors = rig.bindings(1);
    assert_refused(on, &rig, &[], &["0 tensors", "5 were planned"]);
    assert_refused(on, &rig, &tensors[..4], &["4 tensors", "5 were planned"]);
    tensors.push(tensors[0].clone());
    assert_refused(on, &rig, &tensors, &["6 tensors", "5 were planned"]);
    rig.step(1).unwrap();
    rig.optimizer.synchronize().unwrap();
    rig.assert_exact(2);
}

/// The bindings of a step, one tensor's changed.
fn changed(tensors: &[Option<Binding>], tensor: usize, change: impl FnOnce(&mut Binding)) -> Vec<Option<Binding>> {
    let mut tensors = tensors.to_vec();
    change(tensors[tensor].as_mut().unwrap());
    tensors
}

fn another_size_is_refused_by_name_before_anything_changes(on: &Subject) {
    let rig = mismatched_rig(on);
    let tensors = rig.bindings(1);
    let short = |region: &Region, bytes: u64| region.slice(0, region.bytes() - bytes).unwrap();
    // The last tensor, so that a check on the way would come too late.
    let smaller = changed(&tensors, 4, |tensor| tensor.weight = short(&tensor.weight, 2));
    assert_refused(on, &rig, &smaller, &["tensor.4", "1299", "1300"]);
    let wider = changed(&tensors, 4, |tensor| tensor.weight_dtype = Dtype::F32);
    assert_refused(on, &rig, &wider, &["tensor.4", "650", "1300"]);
    let uneven = changed(&tensors, 3, |tensor| tensor.weight = short(&tensor.weight, 1));
    assert_refused(on, &rig, &uneven, &["tensor.3", "777"]);
    let grad = changed(&tensors, 4, |tensor| tensor.grad = short(&tensor.grad, 8));
    assert_refused(on, &rig, &grad, &["tensor.4", "gradient", "1298", "1300"]);
    rig.step(1).unwrap();
    rig.optimizer.synchronize().unwrap();
    rig.assert_exact(2);
}

fn memory_that_no_kernel_can_use_is_refused_by_name_before_anything_changes(on: &Subject) {
    let rig = mismatched_rig(on);
    let tensors = rig.bindings(1);
    let bytes = rig.weight(4).bytes();
    let longer = (0..4).map(|tensor| rig.weight(tensor)).find(|weight| weight.bytes() > bytes).unwrap();
    let odd = longer.slice(1, bytes).unwrap();
    let weight = changed(&tensors, 4, |tensor| tensor.weight = odd.clone());
    assert_refused(on, &rig, &weight, &["tensor.4", "it begins at 0x", "inside an element of 2 bytes"]);
    let grad = changed(&tensors, 4, |tensor| (tensor.grad, tensor.grad_dtype) = (odd, Dtype::Bf16));
    assert_refused(on, &rig, &grad, &["tensor.4", "its gradient begins at 0x"]);
    let shared = changed(&tensors, 4, |tensor| (tensor.grad, tensor.grad_dtype) = (rig.weight(4), Dtype::Bf16));
    assert_refused(on, &rig, &shared, &["tensor.4", "shares memory with its gradient"]);
    rig.step(1).unwrap();
    rig.optimizer.synchronize().unwrap();
    rig.assert_exact(2);
}

fn a_group_that_is_not_there_is_refused_before_anything_changes(on: &Subject) {
    let rig = mismatched_rig(on);
    let tensors = changed(&rig.bindings(1), 4, |tensor| tensor.group = 6);
    assert_refused(on, &rig, &tensors, &["group: 6", "there are 6"]);
    // One with too few numbers, though no tensor is in it.
    let mut groups = rig.scenario.groups_at(1);
    groups.push(vec![1e-3, 0.9]);
    let outcome = rig.optimizer.step(rig.tables(rig.bindings(1)), &groups, Some(&rig.compute), rig.flags(1));
    let said = outcome.unwrap_err().to_string();
    let names = "lr, beta1, beta2, eps, weight_decay, maximize, amsgrad";
    assert_eq!(said, format!("invalid group: 2 numbers in group 6; adamw takes 7: {names}"));
    assert_eq!(rig.optimizer.distrusted(), None);
    rig.step(1).unwrap();
    rig.optimizer.synchronize().unwrap();
    rig.assert_exact(2);
}

/// Memory of another device is refused by the device, and every slot comes back.
#[test]
fn tensors_of_another_device_are_refused() {
    let (on, other) = (Subject::open(crate::common::Kind::Cpu), Subject::open(crate::common::Kind::Cpu));
    let rig = Rig::new(&on, Scenario::new(vec![Tensor::f32(100)], 2, 4096), 1);
    let foreign = other.upload(&[0; 400]).all();
    let tensors = changed(&rig.bindings(0), 0, |tensor| tensor.weight = foreign);
    let error = device_error(rig.step_with(0, tensors));
    assert!(matches!(error, device::Error::BadOperands { .. }), "{error}");
    rig.assert_idle();
    rig.reset();
    let (tables, groups) = (rig.tables(rig.bindings(0)), rig.scenario.groups_at(0));
    let foreign = other.stream("foreign").unwrap();
    assert!(rig.optimizer.step(tables, &groups, Some(&foreign), Default::default()).is_err());
    rig.assert_idle();
    rig.reset();
    rig.steps(1);
    rig.optimizer.synchronize().unwrap();
    rig.assert_exact(1);
}
