//! Updates on the host's threads: what they refuse, and who may touch what meanwhile. Their bits are in `adamw.rs`.

use forebay_device::arith::AdamWHyper;
use forebay_device::fault::{Call, Misbehaviour};
use forebay_device::{AdamWSegment, Dtype, Error, Fault, HostOptions, HostThreads, HostUpdate, Region, SlabLayout};

use crate::bench::{Subject, refused, stream_failed};

contract! {
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

fn update(segments: Vec<AdamWSegment>) -> HostUpdate {
    let scalars = [AdamWHyper::default().at_step(1)].into();
    HostUpdate { segments, scalars, grad_scale: 1.0, follow_weights: true }
}

/// A segment of f32 in host memory.
fn segment(on: &Subject, elements: u64) -> AdamWSegment {
    let region = || on.pinned(elements * 4);
    AdamWSegment {
        param: region(),
        param_dtype: Dtype::F32,
        grad: region(),
        grad_dtype: Dtype::F32,
        exp_avg: region(),
        exp_avg_sq: region(),
        max_exp_avg_sq: None,
        master: None,
        scalars: 0,
    }
}

fn memory_that_is_not_the_host_s_is_refused(on: &Subject) {
    let (threads, good) = (threads(), segment(on, 100));
    let on_device = || on.alloc(400).unwrap().all();
    for bad in [
        AdamWSegment { param: on_device(), ..good.clone() },
        AdamWSegment { grad: on_device(), ..good.clone() },
        AdamWSegment { exp_avg: on_device(), ..good.clone() },
        AdamWSegment { master: Some(on_device()), ..good.clone() },
    ] {
        refused(on.update_on_host(&threads, update(vec![good.clone(), bad])));
    }
    let other = on.kind.open(None);
    let foreign = other.pin(SlabLayout::new(&[400]).unwrap()).unwrap().part(0).unwrap();
    refused(on.update_on_host(&threads, update(vec![AdamWSegment { grad: foreign, ..good.clone() }])));
    refused(threads.touch(&on_device()));
    on.finish_on_host(on.update_on_host(&threads, update(vec![good])).unwrap()).unwrap();
}

fn operands_that_do_not_fit_together_are_refused_on_the_host_too(on: &Subject) {
    let (threads, good) = (threads(), segment(on, 100));
    let short: Region = good.grad.slice(0, 396).unwrap();
    for bad in [
        AdamWSegment { grad: short, ..good.clone() },
        AdamWSegment { grad: good.param.clone(), ..good.clone() },
        AdamWSegment { scalars: 1, ..good.clone() },
        AdamWSegment { param_dtype: Dtype::Bf16, ..good.clone() },
    ] {
        refused(on.update_on_host(&threads, update(vec![bad])));
    }
    // No segments at all are no work, and no mistake.
    on.finish_on_host(on.update_on_host(&threads, update(Vec::new())).unwrap()).unwrap();
}

fn an_update_can_be_refused_or_fail_on_a_thread(on: &Subject) {
    let fault = Fault::wrap(on.device.clone());
    let faulty = Subject::wrapping(fault.clone(), on.kind);
    let (threads, segment) = (threads(), segment(on, 100_000));
    let before = on.host_bytes(&segment.exp_avg_sq);
    fault.on(Call::HostUpdate, 0, Misbehaviour::Fail);
    let (_, reason) = stream_failed(faulty.update_on_host(&threads, update(vec![segment.clone()])));
    assert!(reason.contains("HostUpdate"), "{reason}");
    assert!(on.host_bytes(&segment.exp_avg_sq) == before, "a refused update did nothing");
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
    assert!(unordered(on.copy(&stream, &segment.param, &buffer.all())), "the new weight goes up too early");
    assert!(unordered(on.copy(&stream, &buffer.all(), &segment.grad)), "the next gradient comes down too early");
    assert!(unordered(on.read(&segment.exp_avg, &mut vec![0; 4000])), "the state is read too early");
    on.finish_on_host(work).unwrap();
    on.copy(&stream, &segment.param, &buffer.all()).unwrap();
    // And the other way round: a gradient on its way down must have landed.
    on.copy(&stream, &buffer.all(), &segment.grad).unwrap();
    let early = on.update_on_host(&threads, update(vec![segment.clone()]));
    assert!(matches!(early, Err(Error::Unordered { .. })), "{early:?}");
    on.finish(&stream).unwrap();
    on.finish_on_host(on.update_on_host(&threads, update(vec![segment])).unwrap()).unwrap();
}
