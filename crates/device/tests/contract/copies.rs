//! Copies: every byte and no other, both ways, and a refusal where operands do not fit.

use std::sync::Arc;

use forebay_device::{Backend, Buffer, CpuDevice, CpuOptions, Device, Error, Kernel, Place, Region, Slab, SlabLayout};

use crate::bench::{Subject, pattern, refused};

forebay_device::on_devices! {
    every:
        bytes_survive_any_size_and_offset,
        pageable_memory_works_both_ways,
        many_pairs_arrive_as_single_ones_do,
        untimed_events_tell_no_time,
        empty_copies_do_nothing,
        copies_that_do_not_fit_are_refused,
        what_belongs_to_another_device_is_refused,
        host_access_is_to_host_memory_of_the_same_length,
        many_threads_may_submit_at_once,
        streams_are_borrowed_where_there_are_foreign_ones;
}

/// Host to device, across the device and back, each time into the middle of bytes that must stay.
fn bytes_survive_any_size_and_offset(on: &Subject) {
    let [stream] = on.streams(["copies"]);
    for (bytes, from, to) in
        [(1, 0, 0), (1, 1, 3), (3, 255, 1), (255, 1, 2), (4095, 0, 777), (4096, 13, 0), ((1 << 20) + 3, 5, 11)]
    {
        let around = (bytes + 1024) as usize;
        let (source, sink) = (on.pinned(bytes + 1024), on.pinned(bytes + 1024));
        let (a, b) = (on.upload(&vec![0xaa; around]), on.upload(&vec![0xbb; around]));
        let sent = pattern(bytes, around);
        on.write(&sent, &source).unwrap();
        on.write(&vec![0xcc; around], &sink).unwrap();
        let part = |whole: &Region, offset| whole.slice(offset, bytes).unwrap();
        on.copy(&stream, &part(&source, from), &part(&a.all(), to)).unwrap();
        on.copy(&stream, &part(&a.all(), to), &part(&b.all(), from)).unwrap();
        on.copy(&stream, &part(&b.all(), from), &part(&sink, to)).unwrap();
        on.finish(&stream).unwrap();
        let holds = |got: Vec<u8>, offset: u64, rest: u8| {
            let mut want = vec![rest; around];
            let range = |start: u64| start as usize..(start + bytes) as usize;
            want[range(offset)].copy_from_slice(&sent[range(from)]);
            assert!(got == want, "{bytes} bytes from {from} to {to}, around {rest:#x}");
        };
        holds(on.download(&a.all()), to, 0xaa);
        holds(on.download(&b.all()), from, 0xbb);
        holds(on.host_bytes(&sink), to, 0xcc);
        assert!(on.host_bytes(&source) == sent);
    }
}

fn pageable_memory_works_both_ways(on: &Subject) {
    let [stream] = on.streams(["pageable"]);
    for bytes in [1u64, 4095, (1 << 20) + 3] {
        let (source, sink) = (Buffer::pageable(bytes).unwrap(), Buffer::pageable(bytes).unwrap());
        assert_eq!((source.place(), on.host_bytes(&source.all())), (Place::Pageable, vec![0; bytes as usize]));
        let buffer = on.upload(&vec![1; bytes as usize]);
        on.write(&pattern(7, bytes as usize), &source.all()).unwrap();
        on.spin(&stream, 5);
        on.copy(&stream, &source.all(), &buffer.all()).unwrap();
        on.copy(&stream, &buffer.all(), &sink.all()).unwrap();
        on.finish(&stream).unwrap();
        assert!(on.host_bytes(&sink.all()) == pattern(7, bytes as usize), "{bytes} bytes");
    }
}

/// Rows of a slab in several registrations, evenly spaced and not, toward the device and back: whatever a backend makes
/// of them, every byte arrives and no other changes.
fn many_pairs_arrive_as_single_ones_do(on: &Subject) {
    let [stream] = on.streams(["pairs"]);
    let page = 1u64 << 16;
    let layout = SlabLayout::with_piece_limit(&[page; 6], 2 * page).unwrap();
    assert!(layout.pieces().len() > 2, "rows lie in several registrations");
    let (slab, back) = (on.pin(layout.clone()).unwrap(), on.pin(layout).unwrap());
    let (rows, device) = (6u64, on.upload(&vec![0xee; 6 * 4096]));
    for row in 0..rows {
        on.write(&pattern(row, page as usize), &slab.part(row as usize).unwrap()).unwrap();
    }
    // Offsets within each part: equal ones make evenly spaced rows, the last two break the run.
    let at = |row: u64| if row < 4 { 512 } else { 512 * row };
    let host = |slab: &Slab, row: u64| slab.part(row as usize).unwrap().slice(at(row), 1000).unwrap();
    let on_device = |row: u64| device.region(row * 4096, 1000).unwrap();
    on.spin(&stream, 5);
    let there: Vec<_> = (0..rows).map(|row| (host(&slab, row), on_device(row))).collect();
    let home: Vec<_> = (0..rows).map(|row| (on_device(row), host(&back, row))).collect();
    on.copy_all(&stream, &there).unwrap();
    on.copy_all(&stream, &home).unwrap();
    on.copy_all(&stream, &[]).unwrap();
    on.finish(&stream).unwrap();
    let arrived = on.download(&device.all());
    for row in 0..rows {
        let (start, sent) = (row as usize * 4096, pattern(row, page as usize));
        let sent = &sent[at(row) as usize..at(row) as usize + 1000];
        assert!(&arrived[start..start + 1000] == sent, "row {row} on the device");
        assert!(arrived[start + 1000..start + 4096].iter().all(|&byte| byte == 0xee), "behind row {row}");
        let got = on.host_bytes(&back.part(row as usize).unwrap());
        let mut want = vec![0; page as usize];
        want[at(row) as usize..at(row) as usize + 1000].copy_from_slice(sent);
        assert!(got == want, "row {row} on the host");
    }
    let short = (on_device(0), back.part(0).unwrap());
    refused(on.copy_all(&stream, &[short]));
}

fn untimed_events_tell_no_time(on: &Subject) {
    let [stream] = on.streams(["time"]);
    let (plain, timed) = (on.event().unwrap(), on.timed_event().unwrap());
    for event in [&plain, &timed] {
        on.record(event, &stream).unwrap();
    }
    on.finish(&stream).unwrap();
    refused(on.elapsed_ns(&plain, &timed));
    assert!(on.elapsed_ns(&timed, &timed).is_ok());
}

fn empty_copies_do_nothing(on: &Subject) {
    let [stream] = on.streams(["empty"]);
    let (a, b, host) = (on.upload(&[1; 64]), on.upload(&[2; 64]), on.pinned(64));
    let none = |region: &Region, at| region.slice(at, 0).unwrap();
    for at in [0, 32, 64] {
        on.copy(&stream, &none(&a.all(), at), &none(&b.all(), at)).unwrap();
        on.copy(&stream, &none(&a.all(), at), &none(&a.all(), at)).unwrap();
        on.copy(&stream, &none(&host, at), &none(&a.all(), 64)).unwrap();
        on.copy(&stream, &none(&a.all(), 1), &none(&host, at)).unwrap();
        on.fill(&stream, &none(&a.all(), at), 9).unwrap();
        on.read(&none(&host, at), &mut []).unwrap();
        on.write(&[], &none(&host, at)).unwrap();
    }
    on.finish(&stream).unwrap();
    assert_eq!((on.download(&a.all()), on.download(&b.all())), (vec![1; 64], vec![2; 64]));
}

fn copies_that_do_not_fit_are_refused(on: &Subject) {
    let [stream] = on.streams(["refusing"]);
    let (device, host, pageable) = (on.upload(&[1; 64]), on.pinned(64), Buffer::pageable(64).unwrap());
    let part = |offset, len| device.region(offset, len).unwrap();
    let reason = |outcome| match outcome {
        Err(Error::BadOperands { operation: "copy", reason }) => reason,
        other => panic!("{other:?} where the copy should be refused"),
    };
    let text = reason(on.copy(&stream, &host, &part(0, 63)));
    assert!(text.contains("64") && text.contains("63"), "{text}");
    reason(on.copy(&stream, &part(0, 1), &part(1, 2)));
    reason(on.copy(&stream, &part(0, 0), &part(1, 2)));
    reason(on.copy(&stream, &host, &on.pinned(64)));
    reason(on.copy(&stream, &host, &pageable.all()));
    reason(on.copy(&stream, &pageable.all(), &Buffer::pageable(64).unwrap().all()));
    reason(on.copy(&stream, &part(0, 10), &part(9, 10)));
    reason(on.copy(&stream, &part(9, 10), &part(0, 10)));
    reason(on.copy(&stream, &part(5, 10), &part(5, 10)));
    on.copy(&stream, &part(0, 10), &part(10, 10)).unwrap();
    on.finish(&stream).unwrap();
    assert_eq!(on.download(&device.all()), vec![1; 64], "a refused copy ran");
}

fn what_belongs_to_another_device_is_refused(on: &Subject) {
    let [stream] = on.streams(["home"]);
    let event = on.timed_event().unwrap();
    let (buffer, host) = (on.upload(&[1; 64]), on.pinned(64));
    on.record(&event, &stream).unwrap();
    let foreigners = [on.kind.open(), CpuDevice::open(CpuOptions::default()).unwrap() as Arc<dyn Device>];
    for device in foreigners {
        let other = Subject::wrapping(device, on.kind);
        let [other_stream] = other.streams(["abroad"]);
        let other_event = other.timed_event().unwrap();
        let (other_buffer, other_host) = (other.upload(&[2; 64]), other.pinned(64));
        other.record(&other_event, &other_stream).unwrap();

        refused(on.copy(&stream, &other_host, &buffer.all()));
        refused(on.copy(&stream, &host, &other_buffer.all()));
        refused(on.copy(&stream, &other_buffer.all(), &buffer.all()));
        refused(on.copy(&stream, &other_buffer.all(), &host));
        refused(on.copy(&other_stream, &host, &buffer.all()));
        refused(on.fill(&stream, &other_buffer.all(), 3));
        refused(on.fill(&other_stream, &buffer.all(), 3));
        refused(on.launch(&other_stream, &Kernel::Spin { ns: 1 }));
        refused(on.record(&event, &other_stream));
        refused(on.record(&other_event, &stream));
        refused(on.wait(&other_stream, &event));
        let waited = on.wait(&stream, &other_event);
        // The checker never saw it recorded, and says so first.
        let unseen = on.kind.is_checked() && matches!(waited, Err(Error::Unordered { .. }));
        assert!(unseen || matches!(waited, Err(Error::BadOperands { .. })), "{waited:?}");
        refused(on.query(&other_event));
        refused(on.synchronize(&other_event));
        refused(on.elapsed_ns(&event, &other_event));
        refused(on.elapsed_ns(&other_event, &event));
        refused(on.read(&other_host, &mut [0; 64]));
        refused(on.write(&[0; 64], &other_host));
        assert_eq!(other.download(&other_buffer.all()), vec![2; 64]);
    }
    on.finish(&stream).unwrap();
    assert_eq!(on.download(&buffer.all()), vec![1; 64]);
}

fn host_access_is_to_host_memory_of_the_same_length(on: &Subject) {
    let (buffer, host) = (on.upload(&[1; 8]), on.pinned(8));
    refused(on.read(&buffer.all(), &mut [0; 8]));
    refused(on.write(&[0; 8], &buffer.all()));
    for len in [0, 7, 9] {
        refused(on.read(&host, &mut vec![0; len]));
        refused(on.write(&vec![0; len], &host));
    }
    on.write(&[1, 2, 3, 4, 5, 6, 7, 8], &host).unwrap();
    on.write(&[9], &host.slice(3, 1).unwrap()).unwrap();
    assert_eq!(on.host_bytes(&host.slice(2, 4).unwrap()), [3, 9, 5, 6]);
}

fn many_threads_may_submit_at_once(on: &Subject) {
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            scope.spawn(move || {
                for round in 0..8 {
                    let sent = pattern(thread * 100 + round, 10_007);
                    let buffer = on.upload(&sent);
                    assert!(on.download(&buffer.all()) == sent, "thread {thread}, round {round}");
                }
            });
        }
    });
    assert_eq!(on.memory().unwrap().allocated_bytes, 0);
}

#[expect(unsafe_code, reason = "borrowing a stream is the caller's promise")]
fn streams_are_borrowed_where_there_are_foreign_ones(on: &Subject) {
    let before = on.counters();
    // SAFETY: handle 0 is the default stream of every CUDA context, which lives as long as the context; the CPU
    // backend takes no handle.
    let borrowed = unsafe { on.borrow_stream(0, "default") };
    if on.info().backend == Backend::Cpu {
        return refused(borrowed);
    }
    let stream = borrowed.unwrap();
    assert_eq!((stream.name(), on.counters()), ("default", before));
    let (buffer, host) = (on.upload(&[1; 5000]), on.pinned(5000));
    let [store] = on.streams(["store"]);
    let event = on.event().unwrap();
    on.spin(&stream, 20);
    on.fill(&stream, &buffer.all(), 2).unwrap();
    on.record(&event, &stream).unwrap();
    on.wait(&store, &event).unwrap();
    on.copy(&store, &buffer.all(), &host).unwrap();
    on.finish(&store).unwrap();
    assert_eq!(on.host_bytes(&host), vec![2; 5000]);
    drop(stream);
}
