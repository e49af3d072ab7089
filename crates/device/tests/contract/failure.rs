//! Work that fails after it was accepted: its stream and those that depend on it fail, the others go on.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use forebay_device::{Buffer, Kernel, Place, open};

use crate::bench::{Kind, Subject, has_cuda, stream_failed};

forebay_device::on_devices! {
    cpu:
        a_failed_stream_fails_what_depends_on_it,
        a_failed_stream_runs_nothing_more,
        failure_passes_down_a_chain_of_streams,
        a_failed_stream_gives_its_memory_back,
        a_panic_in_stream_work_fails_the_stream;
}

fn a_failed_stream_fails_what_depends_on_it(on: &Subject) {
    let [failing, dependent, independent] = on.streams(["failing", "dependent", "independent"]);
    let [before, after, held, free] = on.timed_events();
    let (lost, kept) = (on.upload(&[1; 64]), on.upload(&[1; 64]));
    on.record(&before, &failing).unwrap();
    on.spin(&failing, 20);
    on.launch(&failing, &Kernel::Trap).unwrap();
    on.record(&after, &failing).unwrap();
    on.wait(&dependent, &after).unwrap();
    on.fill(&dependent, &lost.all(), 2).unwrap();
    on.record(&held, &dependent).unwrap();
    on.wait(&independent, &before).unwrap();
    on.fill(&independent, &kept.all(), 2).unwrap();
    on.record(&free, &independent).unwrap();

    on.synchronize(&before).unwrap();
    for event in [&after, &held] {
        for outcome in [on.synchronize(event), on.query(event).map(drop), on.elapsed_ns(&before, event).map(drop)] {
            let (stream, reason) = stream_failed(outcome);
            assert_eq!(stream, "failing", "the first to fail is named: {reason}");
            assert!(reason.contains("trap"), "{reason}");
        }
    }
    on.synchronize(&free).unwrap();
    assert_eq!(on.download(&kept.all()), vec![2; 64]);
    on.fill(&independent, &kept.all(), 3).unwrap();
    on.finish(&independent).unwrap();
    assert_eq!(on.download(&kept.all()), vec![3; 64]);
}

fn a_failed_stream_runs_nothing_more(on: &Subject) {
    let [failing, other] = on.streams(["failing", "other"]);
    let [after, recorded] = on.events();
    let (buffer, host) = (on.upload(&[1; 64]), on.pinned(64));
    on.write(&[9; 64], &host).unwrap();
    on.record(&recorded, &other).unwrap();
    on.spin(&failing, 20);
    on.launch(&failing, &Kernel::Trap).unwrap();
    on.fill(&failing, &buffer.all(), 2).unwrap();
    on.copy(&failing, &host, &buffer.all()).unwrap();
    on.record(&after, &failing).unwrap();
    stream_failed(on.synchronize(&after));
    for outcome in [
        on.fill(&failing, &buffer.all(), 3),
        on.copy(&failing, &buffer.all(), &host),
        on.record(&recorded, &failing),
        on.wait(&failing, &recorded),
        on.launch(&failing, &Kernel::Spin { ns: 1 }),
    ] {
        assert_eq!(stream_failed(outcome).0, "failing");
    }
    assert!(on.query(&recorded).unwrap(), "a refused recording moved the event");
    on.synchronize(&recorded).unwrap();
    if !on.kind.is_checked() {
        // To the checker the failed stream's accesses are as unordered as ever.
        assert_eq!(on.download(&buffer.all()), vec![1; 64], "work behind a failure ran");
    }
    let [fresh] = on.streams(["fresh"]);
    on.finish(&fresh).unwrap();
}

fn failure_passes_down_a_chain_of_streams(on: &Subject) {
    let streams = on.streams(["first", "second", "third", "fourth"]);
    let events: [_; 4] = on.events();
    on.spin(&streams[0], 20);
    on.launch(&streams[0], &Kernel::Trap).unwrap();
    on.record(&events[0], &streams[0]).unwrap();
    for i in 1..4 {
        on.wait(&streams[i], &events[i - 1]).unwrap();
        on.record(&events[i], &streams[i]).unwrap();
    }
    assert_eq!(stream_failed(on.synchronize(&events[3])).0, "first");
    assert_eq!(stream_failed(on.launch(&streams[3], &Kernel::Spin { ns: 1 })).0, "first");
    // A wait submitted long after the failure carries it all the same.
    let [late] = on.streams(["late"]);
    on.wait(&late, &events[0]).unwrap();
    assert_eq!(stream_failed(on.finish(&late)).0, "first");
}

fn a_failed_stream_gives_its_memory_back(on: &Subject) {
    let [failing] = on.streams(["failing"]);
    let event = on.event().unwrap();
    let (buffer, host) = (on.alloc(1000).unwrap(), on.pinned(1000));
    on.spin(&failing, 20);
    on.launch(&failing, &Kernel::Trap).unwrap();
    on.copy(&failing, &host, &buffer.all()).unwrap();
    on.record(&event, &failing).unwrap();
    drop((buffer, host));
    stream_failed(on.synchronize(&event));
    let memory = on.memory().unwrap();
    assert_eq!((memory.allocated_bytes, memory.pinned_bytes), (0, 0));
}

/// Panics where it is dropped by another thread than the one that made it.
struct Landmine(ThreadId);

impl Drop for Landmine {
    fn drop(&mut self) {
        assert!(self.0 == std::thread::current().id(), "the last holder let go");
    }
}

#[expect(unsafe_code, reason = "the owner of borrowed memory is the one thing of the caller's that a worker runs")]
fn a_panic_in_stream_work_fails_the_stream(on: &Subject) {
    let [stream, other] = on.streams(["panicking", "other"]);
    let [event, waited] = on.events();
    let home = on.alloc(64).unwrap();
    let owner = Arc::new(Landmine(std::thread::current().id()));
    std::mem::forget(home.clone());
    // SAFETY: device memory of this device that is never freed, whatever becomes of this test.
    let borrowed = unsafe { Buffer::borrow(home.addr(), 64, Place::Device, on.info().id, owner) }.unwrap();
    on.spin(&stream, 300);
    on.fill(&stream, &borrowed.all(), 1).unwrap();
    drop(borrowed);
    on.record(&event, &stream).unwrap();
    on.wait(&other, &event).unwrap();
    on.record(&waited, &other).unwrap();
    for event in [&event, &waited] {
        let (name, reason) = stream_failed(on.synchronize(event));
        assert_eq!(name, "panicking");
        assert!(reason.contains("panicked") && reason.contains("the last holder let go"), "{reason}");
    }
    stream_failed(on.launch(&stream, &Kernel::Spin { ns: 1 }));
}

const CHILD: &str = "FOREBAY_CONTRACT_CHILD";

/// A trap takes the whole context along, so it runs in a process of its own: this test binary, run again.
#[test]
fn a_trap_on_cuda_is_an_error_and_no_crash() {
    if std::env::var(CHILD).as_deref() == Ok("trap") {
        return trap_on_cuda();
    }
    if !has_cuda() {
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "failure::a_trap_on_cuda_is_an_error_and_no_crash", "--nocapture", "--test-threads=1"])
        .env(CHILD, "trap")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let started = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if started.elapsed() > Duration::from_secs(120) => {
                child.kill().unwrap();
                panic!("the process with the lost context hangs");
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    assert!(status.success(), "the process with the lost context ended with {status}");
}

fn trap_on_cuda() {
    let on = Subject::wrapping(open("cuda:0").unwrap(), Kind::Cuda);
    let [failing, other] = on.streams(["failing", "other"]);
    let [after, elsewhere] = on.events();
    let (buffer, host) = (on.upload(&[1; 64]), on.pinned(64));
    on.launch(&failing, &Kernel::Trap).unwrap();
    on.record(&after, &failing).unwrap();
    let (_, reason) = stream_failed(on.synchronize(&after));
    assert!(reason.contains("CUDA_ERROR"), "{reason}");
    stream_failed(on.query(&after));
    stream_failed(on.launch(&failing, &Kernel::Spin { ns: 1 }));
    stream_failed(on.copy(&other, &host, &buffer.all()));
    stream_failed(on.record(&elsewhere, &other));
    stream_failed(on.wait(&other, &after));
    let alloc = on.alloc(64).map(drop);
    assert!(alloc.is_err(), "a lost context still allocates");
    drop((failing, other, after, elsewhere, buffer, host));
    drop(on);
}
