//! Order: work on one stream in sequence, work on two as events say, and nothing else.

use forebay_device::{Error, Kernel, SlabLayout};

use crate::bench::{Subject, in_one_of_three, pattern, refused};

forebay_device::on_devices! {
    every:
        a_slot_goes_through_fetch_update_and_store_in_order,
        one_stream_runs_in_the_order_of_submission,
        a_wait_is_for_the_mark_of_its_submission,
        a_later_wait_is_for_the_later_mark,
        a_wait_holds_only_what_comes_after_it,
        an_event_never_recorded_holds_nobody,
        query_tells_whether_the_point_was_reached,
        synchronize_waits_for_its_event_and_nothing_later,
        two_streams_run_at_the_same_time,
        elapsed_covers_the_work_between,
        elapsed_needs_both_points_reached,
        an_ordinary_event_gives_no_wrong_time,
        submitting_does_not_wait_for_the_work;
}

/// One slot, used again and again, with another stage delayed in each round: every missing wait shows in some round.
fn a_slot_goes_through_fetch_update_and_store_in_order(on: &Subject) {
    const BYTES: u64 = 70_001;
    const ROUNDS: usize = 6;
    let [fetch, update, store] = on.streams(["fetch", "update", "store"]);
    let [fetched, updated, stored] = on.events();
    let layout = SlabLayout::new(&[BYTES; ROUNDS]).unwrap();
    let (input, output) = (on.pin(layout.clone()).unwrap(), on.pin(layout).unwrap());
    for round in 0..ROUNDS {
        on.write(&pattern(round as u64, BYTES as usize), &input.part(round).unwrap()).unwrap();
    }
    let slot = on.upload(&vec![0xee; 2 * BYTES as usize]);
    let (before, after) = (slot.region(0, BYTES).unwrap(), slot.region(BYTES, BYTES).unwrap());
    for round in 0..ROUNDS {
        let delay = |stage: usize| if round % 3 == stage { 30 } else { 0 };
        if round > 0 {
            on.wait(&fetch, &stored).unwrap();
        }
        on.spin(&fetch, delay(0));
        on.copy(&fetch, &input.part(round).unwrap(), &before).unwrap();
        on.record(&fetched, &fetch).unwrap();

        on.wait(&update, &fetched).unwrap();
        on.spin(&update, delay(1));
        on.copy(&update, &before, &after).unwrap();
        on.fill(&update, &before, 0xdd).unwrap();
        on.record(&updated, &update).unwrap();

        on.wait(&store, &updated).unwrap();
        on.spin(&store, delay(2));
        on.copy(&store, &after, &output.part(round).unwrap()).unwrap();
        on.record(&stored, &store).unwrap();
    }
    on.synchronize(&stored).unwrap();
    for round in 0..ROUNDS {
        let bytes = on.host_bytes(&output.part(round).unwrap());
        assert!(bytes == pattern(round as u64, BYTES as usize), "round {round} came out wrong");
    }
}

fn one_stream_runs_in_the_order_of_submission(on: &Subject) {
    let [stream] = on.streams(["only"]);
    let (a, b) = (on.upload(&[1; 4096]), on.upload(&[2; 4096]));
    let host = on.pinned(4096);
    on.spin(&stream, 20);
    on.copy(&stream, &a.all(), &b.all()).unwrap();
    on.fill(&stream, &a.all(), 3).unwrap();
    on.copy(&stream, &b.all(), &host).unwrap();
    on.copy(&stream, &a.all(), &b.all()).unwrap();
    on.finish(&stream).unwrap();
    assert_eq!((on.host_bytes(&host), on.download(&b.all())), (vec![1; 4096], vec![3; 4096]));
}

/// The waiter is itself held up until the event has been recorded again, so a wait that looked the event up when it
/// ran, instead of when it was submitted, would be held by the second spin.
fn a_wait_is_for_the_mark_of_its_submission(on: &Subject) {
    in_one_of_three("the waiter was held by a later recording", || {
        let [recorder, waiter] = on.streams(["recorder", "waiter"]);
        let [event, waited, ended] = on.timed_events();
        on.record(&event, &recorder).unwrap();
        on.spin(&waiter, 40);
        on.wait(&waiter, &event).unwrap();
        on.record(&waited, &waiter).unwrap();
        on.spin(&recorder, 300);
        on.record(&event, &recorder).unwrap();
        on.record(&ended, &recorder).unwrap();
        on.synchronize(&waited).unwrap();
        on.synchronize(&ended).unwrap();
        on.elapsed_ns(&waited, &ended).unwrap() > 0
    });
}

fn a_later_wait_is_for_the_later_mark(on: &Subject) {
    let [recorder, waiter] = on.streams(["recorder", "waiter"]);
    let event = on.event().unwrap();
    let (buffer, host) = (on.upload(&[1; 5000]), on.pinned(5000));
    on.record(&event, &recorder).unwrap();
    on.wait(&waiter, &event).unwrap();
    on.spin(&recorder, 30);
    on.fill(&recorder, &buffer.all(), 2).unwrap();
    on.record(&event, &recorder).unwrap();
    on.wait(&waiter, &event).unwrap();
    on.copy(&waiter, &buffer.all(), &host).unwrap();
    on.finish(&waiter).unwrap();
    assert_eq!(on.host_bytes(&host), vec![2; 5000]);
    assert!(on.query(&event).unwrap());
}

fn a_wait_holds_only_what_comes_after_it(on: &Subject) {
    in_one_of_three("work submitted before a wait was held by it", || {
        let [slow, quick] = on.streams(["slow", "quick"]);
        let [ended, before, after] = on.timed_events();
        on.spin(&slow, 200);
        on.record(&ended, &slow).unwrap();
        on.record(&before, &quick).unwrap();
        on.wait(&quick, &ended).unwrap();
        on.record(&after, &quick).unwrap();
        on.synchronize(&after).unwrap();
        assert!(on.query(&ended).unwrap(), "a wait ended before its event");
        on.elapsed_ns(&before, &ended).unwrap() > 0
    });
}

fn an_event_never_recorded_holds_nobody(on: &Subject) {
    let [stream] = on.streams(["waiter"]);
    let event = on.event().unwrap();
    let waited = on.wait(&stream, &event);
    if on.kind.is_checked() {
        assert!(matches!(&waited, Err(Error::Unordered { detail }) if detail.contains("waiter")), "{waited:?}");
    } else {
        waited.unwrap();
        on.synchronize(&event).unwrap();
    }
    assert!(on.query(&event).unwrap());
    on.finish(&stream).unwrap();
}

fn query_tells_whether_the_point_was_reached(on: &Subject) {
    in_one_of_three("the point was said to be reached while a spin was running before it", || {
        let [stream] = on.streams(["spinning"]);
        let event = on.event().unwrap();
        on.spin(&stream, 200);
        on.record(&event, &stream).unwrap();
        let early = on.query(&event).unwrap();
        on.synchronize(&event).unwrap();
        assert!(on.query(&event).unwrap(), "a synchronized event was not reached");
        !early
    });
}

fn synchronize_waits_for_its_event_and_nothing_later(on: &Subject) {
    in_one_of_three("the host waited for work behind its event", || {
        let [stream] = on.streams(["spinning"]);
        let [first, second] = on.events();
        on.spin(&stream, 5);
        on.record(&first, &stream).unwrap();
        on.spin(&stream, 300);
        on.record(&second, &stream).unwrap();
        on.synchronize(&first).unwrap();
        let pending = !on.query(&second).unwrap();
        on.synchronize(&second).unwrap();
        pending
    });
}

fn two_streams_run_at_the_same_time(on: &Subject) {
    in_one_of_three("a short spin waited for a long one of another stream", || {
        let [long, short] = on.streams(["long", "short"]);
        let [long_ended, short_ended] = on.events();
        on.spin(&long, 200);
        on.record(&long_ended, &long).unwrap();
        on.spin(&short, 5);
        on.record(&short_ended, &short).unwrap();
        on.synchronize(&short_ended).unwrap();
        let pending = !on.query(&long_ended).unwrap();
        on.synchronize(&long_ended).unwrap();
        pending
    });
}

fn elapsed_covers_the_work_between(on: &Subject) {
    let [stream] = on.streams(["timed"]);
    let [start, end] = on.timed_events();
    on.record(&start, &stream).unwrap();
    on.spin(&stream, 30);
    on.record(&end, &stream).unwrap();
    on.synchronize(&end).unwrap();
    // A GPU's global timer, by which it spins, may tick once in a millisecond.
    let elapsed_ns = on.elapsed_ns(&start, &end).unwrap();
    assert!(elapsed_ns >= 28_000_000, "a spin of 30 ms took {elapsed_ns} ns");
    assert_eq!(on.elapsed_ns(&end, &start).unwrap(), 0);
    assert_eq!(on.elapsed_ns(&start, &start).unwrap(), 0);
}

fn elapsed_needs_both_points_reached(on: &Subject) {
    in_one_of_three("a time was given for a point not reached", || {
        let [stream] = on.streams(["timed"]);
        let [reached, never, pending] = on.timed_events();
        on.record(&reached, &stream).unwrap();
        on.synchronize(&reached).unwrap();
        refused(on.elapsed_ns(&reached, &never));
        refused(on.elapsed_ns(&never, &reached));
        on.spin(&stream, 200);
        on.record(&pending, &stream).unwrap();
        let early = (on.elapsed_ns(&reached, &pending), on.elapsed_ns(&pending, &reached));
        on.synchronize(&pending).unwrap();
        let refusal = |outcome| matches!(outcome, Err(Error::BadOperands { .. }));
        refusal(early.0) && refusal(early.1)
    });
}

/// A time is promised of timed events alone; a backend that gives one for others too must give it right.
fn an_ordinary_event_gives_no_wrong_time(on: &Subject) {
    let [stream] = on.streams(["untimed"]);
    let ([untimed], [timed]) = (on.events(), on.timed_events());
    on.record(&untimed, &stream).unwrap();
    on.spin(&stream, 10);
    on.record(&timed, &stream).unwrap();
    on.synchronize(&timed).unwrap();
    for (outcome, least_ns) in [(on.elapsed_ns(&untimed, &timed), 9_000_000), (on.elapsed_ns(&timed, &untimed), 0)] {
        match outcome {
            Ok(elapsed_ns) => assert!(elapsed_ns >= least_ns, "{elapsed_ns}"),
            refusal => refused(refusal),
        }
    }
}

fn submitting_does_not_wait_for_the_work(on: &Subject) {
    // compute-sanitizer's initcheck waits for the device in every copy it looks into.
    if on.kind.is_cuda() && std::env::var_os("NV_SANITIZER_INJECTION_PORT_BASE").is_some() {
        return eprintln!("under compute-sanitizer: skipped");
    }
    in_one_of_three("a submission waited for the work before it", || {
        let [stream, other] = on.streams(["busy", "other"]);
        let [spun, ended] = on.events();
        let (buffer, host) = (on.upload(&[0; 1 << 16]), on.pinned(1 << 16));
        on.spin(&stream, 300);
        on.record(&spun, &stream).unwrap();
        on.copy(&stream, &host, &buffer.all()).unwrap();
        on.launch(&stream, &Kernel::Uniform { dst: buffer.all(), seed: 1, low: 0.0, high: 1.0 }).unwrap();
        on.copy(&stream, &buffer.all(), &host).unwrap();
        on.wait(&other, &spun).unwrap();
        on.record(&ended, &stream).unwrap();
        let pending = !on.query(&spun).unwrap();
        on.synchronize(&ended).unwrap();
        pending
    });
}
