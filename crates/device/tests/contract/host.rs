//! Updates on the host's threads: what they refuse, and who may touch what meanwhile. Their bits are in `update.rs`.

use forebay_device::fault::{Call, Misbehaviour};
use forebay_device::{
    Dtype, Error, Fault, HostOptions, HostThreads, HostUpdate, Master, Region, Rule, Segment, SlabLayout,
};

use crate::bench::{Subject, refused, stream_failed};
use crate::written::{groups, rules};

forebay_device::on_devices! {
    every:
        memory_that_is_not_the_host_s_is_refused,
        operands_that_do_not_fit_together_are_refused_on_the_host_too,
        an_update_can_be_refused_or_fail_on_a_thread,
        calls_keep_the_memory_that_an_update_uses;
    checked: what_an_update_writes_is_not_there_before_it_was_waited_for;
}

fn threads() -> HostThreads {
    HostThreads::new(&HostOptions::default()).unwrap()
}

fn update_by(rule: &'static Rule, segments: Vec<Segment>) -> HostUpdate {
    let scalars = [groups(rule)[0].scalars()].into();
    HostUpdate { rule, segments, scalars, grad_scale: 1.0, trust_master: false }
}

/// A segment of f32 in host memory, with all columns.
fn segment_of(on: &Subject, rule: &Rule, elements: u64) -> Segment {
    let region = || on.pinned(elements * 4);
    Segment {
        weight: region(),
        weight_dtype: Dtype::F32,
        grad: region(),
        grad_dtype: Dtype::F32,
        state: std::array::from_fn(|column| (column < rule.columns.len()).then(|| region().into())),
        master: None,
        first: 0,
        scalars: 0,
        keys: None,
    }
}

/// The rule of those tests for which one is as good as another.
fn some_rule() -> &'static Rule {
    Rule::named("adamw").unwrap()
}

fn update(segments: Vec<Segment>) -> HostUpdate {
    update_by(some_rule(), segments)
}

fn segment(on: &Subject, elements: u64) -> Segment {
    segment_of(on, some_rule(), elements)
}

fn first_column(segment: &Segment) -> &Region {
    segment.state[0].as_ref().unwrap().regions().next().unwrap()
}

fn memory_that_is_not_the_host_s_is_refused(on: &Subject) {
    let (threads, good) = (threads(), segment(on, 100));
    let on_device = || on.alloc(400).unwrap().all();
    let [_, square, largest] = good.state.clone();
    for bad in [
        Segment { weight: on_device(), ..good.clone() },
        Segment { grad: on_device(), ..good.clone() },
        Segment { state: [Some(on_device().into()), square, largest], ..good.clone() },
        Segment { master: Some(Master::F32(on_device())), ..good.clone() },
    ] {
        refused(on.update_on_host(&threads, update(vec![good.clone(), bad])));
    }
    let other = on.kind.open();
    let foreign = other.pin(SlabLayout::new(&[400]).unwrap()).unwrap().part(0).unwrap();
    refused(on.update_on_host(&threads, update(vec![Segment { grad: foreign, ..good.clone() }])));
    refused(threads.touch(&on_device()));
    on.finish_on_host(on.update_on_host(&threads, update(vec![good])).unwrap()).unwrap();
}

fn operands_that_do_not_fit_together_are_refused_on_the_host_too(on: &Subject) {
    let threads = threads();
    for rule in rules() {
        let good = segment_of(on, rule, 100);
        let short: Region = good.grad.slice(0, 396).unwrap();
        let [_, second, third] = good.state.clone();
        let column = rule.columns[0].name;
        for (bad, says) in [
            (Segment { grad: short.clone(), ..good.clone() }, "grad has 396 bytes".to_owned()),
            (Segment { grad: good.weight.clone(), ..good.clone() }, "weight overlaps grad".to_owned()),
            (Segment { scalars: 1, ..good.clone() }, "scalar set 1 of 1".to_owned()),
            (Segment { weight_dtype: Dtype::Bf16, ..good.clone() }, "grad has 400 bytes where 200".to_owned()),
            (Segment { state: [Some(short.into()), second, third], ..good.clone() }, format!("{column} has 396 bytes")),
        ] {
            match on.update_on_host(&threads, update_by(rule, vec![bad])) {
                Err(Error::BadOperands { operation, reason }) => {
                    assert_eq!(operation, rule.name);
                    assert!(reason.contains(&says), "{rule:?}: {reason:?} does not say {says:?}");
                }
                outcome => panic!("{rule:?}: {outcome:?} where {says:?}"),
            }
        }
        on.finish_on_host(on.update_on_host(&threads, update_by(rule, vec![good])).unwrap()).unwrap();
        // No segments at all are no work, and no mistake.
        on.finish_on_host(on.update_on_host(&threads, update_by(rule, Vec::new())).unwrap()).unwrap();
    }
}

fn an_update_can_be_refused_or_fail_on_a_thread(on: &Subject) {
    let fault = Fault::wrap(on.device.clone());
    let faulty = Subject::wrapping(fault.clone(), on.kind);
    let (threads, segment) = (threads(), segment(on, 100_000));
    let before = on.host_bytes(first_column(&segment));
    fault.on(Call::HostUpdate, 0, Misbehaviour::Fail);
    let (_, reason) = stream_failed(faulty.update_on_host(&threads, update(vec![segment.clone()])));
    assert!(reason.contains("HostUpdate"), "{reason}");
    assert!(on.host_bytes(first_column(&segment)) == before, "a refused update did nothing");
    fault.on(Call::HostUpdate, 0, Misbehaviour::Break);
    let work = faulty.update_on_host(&threads, update(vec![segment.clone()])).unwrap();
    let (stream, reason) = stream_failed(faulty.finish_on_host(work));
    assert_eq!((stream.as_str(), reason.contains("panicked")), ("the host's threads", true), "{reason}");
    faulty.finish_on_host(faulty.update_on_host(&threads, update(vec![segment])).unwrap()).unwrap();
}

/// Dropped before its end, an update still has its memory, and whoever drops it waits.
fn calls_keep_the_memory_that_an_update_uses(on: &Subject) {
    let threads = threads();
    for _ in 0..20 {
        let work = on.update_on_host(&threads, update(vec![segment(on, 50_000)])).unwrap();
        drop(work);
    }
    assert_eq!(on.memory().unwrap().pinned_bytes, 0);
}

fn what_an_update_writes_is_not_there_before_it_was_waited_for(on: &Subject) {
    let (threads, segment) = (threads(), segment(on, 1000));
    let buffer = on.alloc(4000).unwrap();
    let [stream] = on.streams(["up"]);
    let work = on.update_on_host(&threads, update(vec![segment.clone()])).unwrap();
    let unordered = |outcome: Result<(), Error>| matches!(outcome, Err(Error::Unordered { .. }));
    assert!(unordered(on.copy(&stream, &segment.weight, &buffer.all())), "the new weight goes up too early");
    assert!(unordered(on.copy(&stream, &buffer.all(), &segment.grad)), "the next gradient comes down too early");
    assert!(unordered(on.read(first_column(&segment), &mut vec![0; 4000])), "the state is read too early");
    on.finish_on_host(work).unwrap();
    on.copy(&stream, &segment.weight, &buffer.all()).unwrap();
    // And the other way round: a gradient on its way down must have landed.
    on.copy(&stream, &buffer.all(), &segment.grad).unwrap();
    let early = on.update_on_host(&threads, update(vec![segment.clone()]));
    assert!(matches!(early, Err(Error::Unordered { .. })), "{early:?}");
    on.finish(&stream).unwrap();
    on.finish_on_host(on.update_on_host(&threads, update(vec![segment])).unwrap()).unwrap();
}
