//! The checker itself: every unordered pair is refused with both names, and no ordered program is.

use std::sync::Arc;

use forebay_device::fault::{Call, Fault, Misbehaviour};
use forebay_device::{Buffer, Checked, Dtype, Error, Kernel, Master, Place, Region, Result, Segment, Update};

use crate::bench::{Subject, refused};
use crate::written::{groups, rules};

forebay_device::on_devices! {
    checked:
        two_writes_without_an_event_are_refused,
        a_read_and_a_write_without_an_event_are_refused,
        a_host_read_before_the_synchronize_is_refused,
        a_host_write_under_a_fetch_is_refused,
        every_operand_of_an_update_is_watched,
        every_operand_of_a_small_kernel_is_watched,
        a_wait_for_an_older_mark_orders_nothing_newer,
        a_wait_orders_what_comes_after_it_only,
        order_passes_through_a_third_stream,
        order_passes_through_the_host,
        a_query_that_says_yes_orders,
        two_reads_need_no_order,
        disjoint_ranges_are_no_conflict,
        two_buffers_over_one_memory_are_found_to_race,
        memory_that_was_given_back_races_with_nothing,
        a_refused_race_did_not_happen,
        a_refused_call_leaves_no_trace;
}

/// The outcome is a race, and its text names both sides.
fn race(outcome: Result<()>, names: [&str; 2]) {
    match outcome {
        Err(Error::Unordered { detail }) => {
            assert!(names.iter().all(|name| detail.contains(name)), "{detail:?} does not name {names:?}");
        }
        other => panic!("{other:?} where {names:?} race"),
    }
}

fn two_writes_without_an_event_are_refused(on: &Subject) {
    let [one, two] = on.streams(["stream-one", "stream-two"]);
    let buffer = on.alloc(1000).unwrap();
    on.fill(&one, &buffer.all(), 1).unwrap();
    race(on.fill(&two, &buffer.all(), 2), ["stream-one", "stream-two"]);
    race(on.fill(&two, &buffer.region(999, 1).unwrap(), 2), ["stream-one", "stream-two"]);
    on.fill(&one, &buffer.all(), 3).unwrap();
    on.finish(&one).unwrap();
    on.fill(&two, &buffer.all(), 4).unwrap();
    on.finish(&two).unwrap();
    assert_eq!(on.download(&buffer.all()), vec![4; 1000]);
}

fn a_read_and_a_write_without_an_event_are_refused(on: &Subject) {
    let [reader, writer] = on.streams(["the-reader", "the-writer"]);
    let (buffer, host) = (on.upload(&[1; 1000]), on.pinned(1000));
    on.copy(&reader, &buffer.all(), &host).unwrap();
    race(on.fill(&writer, &buffer.all(), 2), ["the-reader", "the-writer"]);
    on.finish(&reader).unwrap();
    on.fill(&writer, &buffer.all(), 2).unwrap();
    race(on.copy(&reader, &buffer.all(), &host), ["the-reader", "the-writer"]);
    on.finish(&writer).unwrap();
    on.copy(&reader, &buffer.all(), &host).unwrap();
    on.finish(&reader).unwrap();
    assert_eq!(on.host_bytes(&host), vec![2; 1000]);
}

fn a_host_read_before_the_synchronize_is_refused(on: &Subject) {
    let [store] = on.streams(["the-store"]);
    let stored = on.event().unwrap();
    let (buffer, host) = (on.upload(&[7; 100]), on.pinned(100));
    let mut bytes = [0; 100];
    on.copy(&store, &buffer.all(), &host).unwrap();
    race(on.read(&host, &mut bytes), ["the-store", "the host"]);
    on.record(&stored, &store).unwrap();
    race(on.read(&host, &mut bytes), ["the-store", "the host"]);
    assert_eq!(bytes, [0; 100], "a refused read read");
    on.synchronize(&stored).unwrap();
    on.read(&host, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 100]);
}

fn a_host_write_under_a_fetch_is_refused(on: &Subject) {
    let [fetch] = on.streams(["the-fetch"]);
    let (buffer, host) = (on.alloc(100).unwrap(), on.pinned(100));
    on.write(&[1; 100], &host).unwrap();
    on.copy(&fetch, &host, &buffer.all()).unwrap();
    race(on.write(&[2; 100], &host), ["the-fetch", "the host"]);
    on.finish(&fetch).unwrap();
    on.write(&[3; 100], &host).unwrap();
    assert_eq!(on.download(&buffer.all()), vec![1; 100]);
}

fn every_operand_of_an_update_is_watched(on: &Subject) {
    for rule in rules() {
        let columns = rule.columns.len();
        let scalars = [groups(rule)[0].scalars()];
        // Those that are only read come first.
        let operands: Vec<Region> = (0..6 + columns).map(|_| on.upload(&[0; 4]).all()).collect();
        let at = |i: usize| operands[i].clone();
        let segments = [Segment {
            grad: at(2),
            grad_dtype: Dtype::F32,
            weight: at(3),
            weight_dtype: Dtype::F32,
            state: std::array::from_fn(|column| (column < columns).then(|| at(6 + column).into())),
            master: Some(Master::F32(at(4))),
            first: 0,
            scalars: 0,
            keys: None,
        }];
        let (grad_scale, skip, followed) = (Some(at(0)), Some(at(1)), Some(at(5)));
        let update = Update { grad_scale, skip, followed, ..Update::new(rule, &segments, &scalars) };
        let host = on.pinned(4);
        for (i, operand) in operands.iter().enumerate() {
            let [updating, other] = on.streams(["the-update", "the-other"]);
            on.fill(&other, operand, 0).unwrap();
            race(on.launch(&updating, &Kernel::Update(update.clone())), ["the-update", "the-other"]);
            on.finish(&other).unwrap();
            on.launch(&updating, &Kernel::Update(update.clone())).unwrap();
            race(on.fill(&other, operand, 0), ["the-update", "the-other"]);
            let read = on.copy(&other, operand, &host);
            if i < 3 {
                read.unwrap();
            } else {
                race(read, ["the-update", "the-other"]);
            }
            on.finish(&updating).unwrap();
            on.finish(&other).unwrap();
        }
    }
}

fn every_operand_of_a_small_kernel_is_watched(on: &Subject) {
    let [a, b] = [0, 1].map(|_| on.upload(&[0; 4]).all());
    let (count, host) = (on.upload(&[0; 8]).all(), on.pinned(4));
    let [one, two] = on.streams(["one", "two"]);
    on.fill(&one, &a, 0).unwrap();
    let compare = Kernel::CountDifferences { a: b, b: a.clone(), count: count.clone() };
    race(on.launch(&two, &compare), ["one", "two"]);
    let powers = Kernel::Powers { dst: a, base: 0.9, first: 1 };
    race(on.launch(&two, &powers), ["one", "two"]);
    on.finish(&one).unwrap();
    on.launch(&two, &compare).unwrap();
    race(on.copy(&one, &count.slice(0, 4).unwrap(), &host), ["one", "two"]);
    on.finish(&two).unwrap();
}

fn a_wait_for_an_older_mark_orders_nothing_newer(on: &Subject) {
    let [one, two] = on.streams(["one", "two"]);
    let event = on.event().unwrap();
    let buffer = on.alloc(64).unwrap();
    on.record(&event, &one).unwrap();
    on.fill(&one, &buffer.all(), 1).unwrap();
    on.wait(&two, &event).unwrap();
    race(on.fill(&two, &buffer.all(), 2), ["one", "two"]);
    on.synchronize(&event).unwrap();
    race(on.fill(&two, &buffer.all(), 2), ["one", "two"]);
    on.record(&event, &one).unwrap();
    race(on.fill(&two, &buffer.all(), 2), ["one", "two"]);
    on.wait(&two, &event).unwrap();
    on.fill(&two, &buffer.all(), 2).unwrap();
    on.finish(&two).unwrap();
}

fn a_wait_orders_what_comes_after_it_only(on: &Subject) {
    let [one, two] = on.streams(["one", "two"]);
    let event = on.event().unwrap();
    let (early, late) = (on.alloc(64).unwrap(), on.alloc(64).unwrap());
    on.fill(&two, &early.all(), 1).unwrap();
    on.fill(&one, &late.all(), 1).unwrap();
    on.record(&event, &one).unwrap();
    on.wait(&two, &event).unwrap();
    on.fill(&two, &late.all(), 2).unwrap();
    race(on.fill(&one, &early.all(), 2), ["one", "two"]);
    on.finish(&two).unwrap();
}

fn order_passes_through_a_third_stream(on: &Subject) {
    let [a, b, c] = on.streams(["a", "b", "c"]);
    let [from_a, from_b] = on.events();
    let (buffer, host) = (on.upload(&[1; 3000]), on.pinned(3000));
    on.spin(&a, 20);
    on.fill(&a, &buffer.all(), 2).unwrap();
    on.record(&from_a, &a).unwrap();
    on.wait(&b, &from_a).unwrap();
    on.record(&from_b, &b).unwrap();
    on.wait(&c, &from_b).unwrap();
    on.copy(&c, &buffer.all(), &host).unwrap();
    on.finish(&c).unwrap();
    assert_eq!(on.host_bytes(&host), vec![2; 3000]);
    on.write(&[0; 3000], &host).unwrap();
    // The host has seen the end of c, and through it that of a.
    on.fill(&b, &buffer.all(), 3).unwrap();
    on.finish(&b).unwrap();
}

fn order_passes_through_the_host(on: &Subject) {
    let [a, b] = on.streams(["a", "b"]);
    let done = on.event().unwrap();
    let (buffer, host) = (on.upload(&[1; 3000]), on.pinned(3000));
    on.spin(&a, 20);
    on.fill(&a, &buffer.all(), 2).unwrap();
    on.record(&done, &a).unwrap();
    on.synchronize(&done).unwrap();
    on.copy(&b, &buffer.all(), &host).unwrap();
    on.finish(&b).unwrap();
    assert_eq!(on.host_bytes(&host), vec![2; 3000]);
    on.write(&[5; 3000], &host).unwrap();
    on.copy(&a, &host, &buffer.all()).unwrap();
    on.finish(&a).unwrap();
}

fn a_query_that_says_yes_orders(on: &Subject) {
    let [a, b] = on.streams(["a", "b"]);
    let done = on.event().unwrap();
    let buffer = on.alloc(64).unwrap();
    on.fill(&a, &buffer.all(), 1).unwrap();
    on.record(&done, &a).unwrap();
    while !on.query(&done).unwrap() {
        std::thread::yield_now();
    }
    on.fill(&b, &buffer.all(), 2).unwrap();
    on.finish(&b).unwrap();
}

fn two_reads_need_no_order(on: &Subject) {
    let [a, b] = on.streams(["a", "b"]);
    let (buffer, source) = (on.upload(&[9; 64]), on.pinned(64));
    let (into_a, into_b, slot_a, slot_b) = (on.pinned(64), on.pinned(64), on.alloc(64).unwrap(), on.alloc(64).unwrap());
    on.copy(&a, &buffer.all(), &into_a).unwrap();
    on.copy(&b, &buffer.all(), &into_b).unwrap();
    on.copy(&a, &source, &slot_a.all()).unwrap();
    on.copy(&b, &source, &slot_b.all()).unwrap();
    assert_eq!(on.host_bytes(&source), vec![0; 64]);
    on.finish(&a).unwrap();
    // One reader has ended, the other has not.
    race(on.write(&[1; 64], &source), ["copy on b", "the host"]);
    on.finish(&b).unwrap();
    on.write(&[1; 64], &source).unwrap();
    assert_eq!((on.host_bytes(&into_a), on.host_bytes(&into_b)), (vec![9; 64], vec![9; 64]));
}

fn disjoint_ranges_are_no_conflict(on: &Subject) {
    let [a, b] = on.streams(["a", "b"]);
    let buffer = on.alloc(1000).unwrap();
    let part = |offset, len| buffer.region(offset, len).unwrap();
    on.fill(&a, &part(0, 500), 1).unwrap();
    on.fill(&b, &part(500, 500), 2).unwrap();
    on.fill(&b, &part(250, 0), 2).unwrap();
    race(on.fill(&b, &part(499, 2), 2), ["on a", "on b"]);
    race(on.fill(&a, &part(100, 401), 2), ["on a", "on b"]);
    on.finish(&a).unwrap();
    on.finish(&b).unwrap();
    let bytes = on.download(&buffer.all());
    assert!(bytes[..500].iter().all(|&b| b == 1) && bytes[500..].iter().all(|&b| b == 2));
}

/// Memory that is borrowed twice, such as a tensor of torch's that two calls name, is the same memory.
#[expect(unsafe_code, reason = "memory is borrowed by address")]
fn two_buffers_over_one_memory_are_found_to_race(on: &Subject) {
    let [a, b] = on.streams(["a", "b"]);
    let home = on.alloc(1000).unwrap();
    let borrow = |offset: usize, bytes: u64| {
        let (addr, owner) = (home.addr() + offset, Arc::new(home.clone()));
        // SAFETY: a range of `home`, which its owner keeps.
        unsafe { Buffer::borrow(addr, bytes, Place::Device, on.info().id, owner) }.unwrap()
    };
    let (low, high, apart) = (borrow(0, 600), borrow(400, 600), borrow(600, 400));
    on.fill(&a, &low.all(), 1).unwrap();
    race(on.fill(&b, &high.all(), 2), ["on a", "on b"]);
    race(on.fill(&b, &high.region(199, 1).unwrap(), 2), ["on a", "on b"]);
    race(on.fill(&b, &home.all(), 2), ["on a", "on b"]);
    on.fill(&b, &high.region(200, 400).unwrap(), 2).unwrap();
    race(on.fill(&a, &apart.all(), 3), ["on a", "on b"]);
    on.finish(&a).unwrap();
    on.fill(&b, &high.all(), 4).unwrap();
    race(on.fill(&a, &low.all(), 5), ["on a", "on b"]);
    on.finish(&b).unwrap();
    on.fill(&a, &low.all(), 5).unwrap();
    on.finish(&a).unwrap();
    let bytes = on.download(&home.all());
    assert!(bytes[..600].iter().all(|&b| b == 5) && bytes[600..].iter().all(|&b| b == 4));
}

/// A device frees memory when the work that uses it has ended, so what is allocated at the same address is fresh.
fn memory_that_was_given_back_races_with_nothing(on: &Subject) {
    let [a, b] = on.streams(["a", "b"]);
    for round in 0..50u8 {
        let old = on.alloc(4096).unwrap();
        on.fill(&a, &old.all(), round).unwrap();
        let end = on.event().unwrap();
        on.record(&end, &a).unwrap();
        // The host does not look at the event until the memory is free; the stream may still be running.
        drop(old);
        while on.memory().unwrap().allocated_bytes > 0 {
            std::thread::yield_now();
        }
        let fresh = on.alloc(4096).unwrap();
        on.fill(&b, &fresh.all(), round).unwrap();
        on.finish(&a).unwrap();
        on.finish(&b).unwrap();
    }
}

fn a_refused_race_did_not_happen(on: &Subject) {
    let [a, b] = on.streams(["a", "b"]);
    let (buffer, other, host) = (on.upload(&[1; 64]), on.upload(&[4; 64]), on.pinned(64));
    on.copy(&a, &buffer.all(), &host).unwrap();
    race(on.copy(&b, &other.all(), &buffer.all()), ["on a", "on b"]);
    on.finish(&a).unwrap();
    // Only `b` read `other`, and it did not.
    on.fill(&a, &other.all(), 5).unwrap();
    on.finish(&a).unwrap();
    assert_eq!((on.download(&buffer.all()), on.download(&other.all())), (vec![1; 64], vec![5; 64]));
}

/// A call that returns an error did nothing, so it can be in nobody's way.
fn a_refused_call_leaves_no_trace(on: &Subject) {
    let fault = Fault::wrap(on.kind.open_plain());
    let on = Subject::wrapping(Checked::wrap(fault.clone()), on.kind);
    let [a, b] = on.streams(["a", "b"]);
    let (buffer, host) = (on.alloc(64).unwrap(), on.pinned(64));
    refused(on.copy(&a, &host, &buffer.region(0, 63).unwrap()));
    on.fill(&b, &buffer.all(), 1).unwrap();
    on.finish(&b).unwrap();

    refused(on.launch(&a, &Kernel::Uniform { dst: buffer.all(), seed: 0, low: 1.0, high: 0.0 }));
    refused(on.write(&[0; 63], &host));
    refused(on.read(&host, &mut [0; 63]));
    on.copy(&b, &buffer.all(), &host).unwrap();
    on.finish(&b).unwrap();

    fault.on(Call::Copy, 0, Misbehaviour::Fail);
    on.copy(&a, &buffer.all(), &host).unwrap_err();
    fault.on(Call::Launch, 0, Misbehaviour::Fail);
    on.fill(&a, &buffer.all(), 3).unwrap_err();
    assert_eq!(on.host_bytes(&host), vec![1; 64]);
    on.fill(&b, &buffer.all(), 2).unwrap();

    // A wait that was not made orders nothing, and an event that was not recorded marks nothing.
    let [made, failed] = on.events();
    on.record(&made, &b).unwrap();
    fault.on(Call::Wait, 0, Misbehaviour::Fail);
    on.wait(&a, &made).unwrap_err();
    race(on.fill(&a, &buffer.all(), 3), ["on a", "on b"]);
    fault.on(Call::Record, 0, Misbehaviour::Fail);
    on.record(&failed, &b).unwrap_err();
    assert!(matches!(on.wait(&a, &failed), Err(Error::Unordered { .. })));
    on.finish(&b).unwrap();
}
