//! Memory: exact sizes and counts, errors with numbers, and nothing freed under work that uses it.

use forebay_device::{
    ALIGN_BYTES, Buffer, Counters, CpuDevice, CpuOptions, Error, Kernel, PIECE_BYTES, Place, SlabLayout,
};

use crate::bench::{Subject, pattern};

forebay_device::on_devices! {
    every:
        buffers_are_exact_and_aligned,
        more_than_the_device_has_is_refused_with_numbers,
        bytes_in_use_follow_every_allocation,
        a_failed_pin_is_not_counted,
        nothing_of_zero_bytes_is_made,
        ranges_outside_are_refused_with_numbers,
        counters_count_what_is_made_and_nothing_else,
        dropped_handles_wait_for_the_work_that_uses_them,
        dropped_streams_and_events_finish_their_work,
        clones_share_the_memory;
    cpu: a_capacity_is_kept_to_the_byte;
}

fn buffers_are_exact_and_aligned(on: &Subject) {
    let buffers: Vec<Buffer> = [1, 2, 255, 256, 257, 4095, 65_537, (1 << 20) + 3]
        .map(|bytes| {
            let buffer = on.alloc(bytes).unwrap();
            assert_eq!((buffer.bytes(), buffer.all().bytes(), buffer.place()), (bytes, bytes, Place::Device));
            assert_eq!(buffer.addr() as u64 % ALIGN_BYTES, 0, "{bytes} bytes at {:#x}", buffer.addr());
            buffer
        })
        .into();
    for (i, a) in buffers.iter().enumerate() {
        for b in &buffers[i + 1..] {
            let disjoint = a.addr() + a.bytes() as usize <= b.addr() || b.addr() + b.bytes() as usize <= a.addr();
            assert!(disjoint, "{a:?} and {b:?} share bytes");
        }
    }
}

fn more_than_the_device_has_is_refused_with_numbers(on: &Subject) {
    let kept = on.alloc(1 << 16).unwrap();
    for requested in [1 << 50, u64::MAX] {
        match on.alloc(requested) {
            Err(Error::OutOfDeviceMemory { device, requested_bytes, available_bytes, capacity_bytes }) => {
                assert_eq!((device, requested_bytes), (on.info().name.clone(), requested));
                assert_eq!(capacity_bytes, on.memory().unwrap().capacity_bytes);
                assert!(available_bytes > 0 && available_bytes <= capacity_bytes - kept.bytes());
            }
            other => panic!("{other:?} for {requested} bytes"),
        }
    }
    assert_eq!(on.memory().unwrap().allocated_bytes, kept.bytes());
    assert_eq!(on.counters().allocations, 1);
}

fn a_capacity_is_kept_to_the_byte(on: &Subject) {
    let options = CpuOptions { capacity_bytes: Some(10_000), ..CpuOptions::default() };
    let device = on.kind.dress(CpuDevice::open(options).unwrap());
    let full = |requested_bytes, available_bytes| Error::OutOfDeviceMemory {
        device: "cpu".to_owned(),
        requested_bytes,
        available_bytes,
        capacity_bytes: 10_000,
    };
    assert_eq!(device.alloc(10_001).unwrap_err(), full(10_001, 10_000));
    let (a, b) = (device.alloc(6000).unwrap(), device.alloc(3999).unwrap());
    assert_eq!(device.alloc(2).unwrap_err(), full(2, 1));
    let memory = device.memory().unwrap();
    assert_eq!((memory.capacity_bytes, memory.free_bytes, memory.allocated_bytes), (10_000, 1, 9999));
    let last = device.alloc(1).unwrap();
    assert_eq!(device.alloc(1).unwrap_err(), full(1, 0));
    drop((b, last));
    assert_eq!(device.alloc(6000).unwrap_err(), full(6000, 4000));
    drop(a);
    assert_eq!(device.alloc(10_000).unwrap().bytes(), 10_000);
}

fn bytes_in_use_follow_every_allocation(on: &Subject) {
    let taken = || {
        let memory = on.memory().unwrap();
        assert!(memory.free_bytes <= memory.capacity_bytes);
        (memory.allocated_bytes, memory.pinned_bytes)
    };
    assert_eq!(taken(), (0, 0));
    let a = on.alloc(1001).unwrap();
    let slab = on.pin(SlabLayout::new(&[5000, 1]).unwrap()).unwrap();
    assert_eq!((taken(), slab.bytes()), ((1001, 8192), 8192));
    let b = on.alloc(1 << 20).unwrap();
    let region = b.region(7, 9).unwrap();
    drop(b);
    assert_eq!(taken(), (1001 + (1 << 20), 8192), "a region keeps its buffer");
    drop((a, region));
    assert_eq!(taken(), (0, 8192));
    drop(slab);
    assert_eq!(taken(), (0, 0));
    let pageable = Buffer::pageable(9000).unwrap();
    assert_eq!((taken(), pageable.bytes()), ((0, 0), 9000), "pageable memory is not counted");
}

fn a_failed_pin_is_not_counted(on: &Subject) {
    let kept = on.pin(SlabLayout::new(&[1]).unwrap()).unwrap();
    let before = (on.memory().unwrap().pinned_bytes, on.counters());
    let layout = SlabLayout::new(&vec![PIECE_BYTES; ((1u64 << 50) / PIECE_BYTES) as usize]).unwrap();
    assert_eq!(layout.bytes(), 1 << 50);
    match on.pin(layout) {
        Err(Error::SlabLargerThanMemory { requested_bytes, available_bytes, memory_bytes }) => {
            assert_eq!(requested_bytes, 1 << 50);
            assert!(available_bytes > 0 && available_bytes <= memory_bytes && memory_bytes < 1 << 50);
        }
        other => panic!("{other:?} for more than there is"),
    }
    assert_eq!((on.memory().unwrap().pinned_bytes, on.counters()), before);
    assert_eq!(before.0, kept.bytes());
}

fn nothing_of_zero_bytes_is_made(on: &Subject) {
    let empty = |outcome: Error| assert!(matches!(outcome, Error::ZeroSize { .. }), "{outcome:?}");
    empty(on.alloc(0).unwrap_err());
    empty(SlabLayout::new(&[]).unwrap_err());
    empty(SlabLayout::new(&[0, 0]).unwrap_err());
    empty(Buffer::pageable(0).unwrap_err());
    assert_eq!(on.counters(), Counters::default());
}

fn ranges_outside_are_refused_with_numbers(on: &Subject) {
    let buffer = on.alloc(100).unwrap();
    let out =
        |offset_bytes, len_bytes, size_bytes| Error::OutOfRange { what: "region", offset_bytes, len_bytes, size_bytes };
    for (offset, len) in [(0, 101), (100, 1), (101, 0), (99, 2), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
        assert_eq!(buffer.region(offset, len).unwrap_err(), out(offset, len, 100));
    }
    let part = buffer.region(40, 20).unwrap();
    assert_eq!(part.slice(10, 11).unwrap_err(), out(10, 11, 20));
    let end = part.slice(20, 0).unwrap();
    assert_eq!((end.offset_bytes(), end.bytes()), (60, 0));
    let inner = part.slice(5, 15).unwrap();
    assert_eq!((inner.offset_bytes(), inner.addr()), (45, buffer.addr() + 45));
    let slab = on.pin(SlabLayout::new(&[1, 2]).unwrap()).unwrap();
    let error = slab.part(2).unwrap_err();
    assert_eq!(error, Error::OutOfRange { what: "slab part", offset_bytes: 2, len_bytes: 1, size_bytes: 2 });
}

fn counters_count_what_is_made_and_nothing_else(on: &Subject) {
    let count = |allocations, pins, streams, events| Counters { allocations, pins, streams, events };
    assert_eq!(on.counters(), count(0, 0, 0, 0));
    let (a, b) = (on.alloc(4096).unwrap(), on.alloc(4096).unwrap());
    let host = on.pinned(4096);
    let [stream] = on.streams(["only"]);
    let ([first, second], [_third]) = (on.timed_events(), on.events());
    assert_eq!(on.counters(), count(2, 1, 1, 3));
    for _ in 0..3 {
        on.write(&[1; 4096], &host).unwrap();
        on.record(&first, &stream).unwrap();
        on.copy(&stream, &host, &a.all()).unwrap();
        on.copy(&stream, &a.all(), &b.all()).unwrap();
        on.launch(&stream, &Kernel::Uniform { dst: b.all(), seed: 1, low: 0.0, high: 1.0 }).unwrap();
        on.copy(&stream, &b.all(), &host).unwrap();
        on.record(&second, &stream).unwrap();
        on.wait(&stream, &second).unwrap();
        on.synchronize(&second).unwrap();
        on.query(&second).unwrap();
        on.elapsed_ns(&first, &second).unwrap();
        on.host_bytes(&host);
        on.memory().unwrap();
    }
    drop((a, b));
    assert_eq!(on.counters(), count(2, 1, 1, 3), "work makes nothing and giving back uncounts nothing");
    let _again = on.alloc(1).unwrap();
    assert_eq!(on.counters(), count(3, 1, 1, 3));
}

fn dropped_handles_wait_for_the_work_that_uses_them(on: &Subject) {
    const BYTES: usize = 100_003;
    let [stream] = on.streams(["delayed"]);
    let done = on.event().unwrap();
    let output = on.pinned(BYTES as u64);
    let (input, buffer, second) = (
        on.pin(SlabLayout::new(&[BYTES as u64]).unwrap()).unwrap(),
        on.alloc(BYTES as u64).unwrap(),
        on.alloc(BYTES as u64).unwrap(),
    );
    on.write(&pattern(3, BYTES), &input.part(0).unwrap()).unwrap();
    let pageable = Buffer::pageable(BYTES as u64).unwrap();
    on.write(&pattern(4, BYTES), &pageable.all()).unwrap();
    on.spin(&stream, 30);
    on.copy(&stream, &input.part(0).unwrap(), &buffer.all()).unwrap();
    on.copy(&stream, &buffer.all(), &second.all()).unwrap();
    on.copy(&stream, &pageable.all(), &buffer.all()).unwrap();
    on.copy(&stream, &second.all(), &output).unwrap();
    on.record(&done, &stream).unwrap();
    drop(pageable);
    drop(input);
    drop(second);
    drop(buffer);
    // What comes next may be given the same addresses.
    let next = on.alloc(BYTES as u64).unwrap();
    let [other] = on.streams(["next"]);
    on.fill(&other, &next.all(), 0xff).unwrap();
    on.finish(&other).unwrap();
    on.synchronize(&done).unwrap();
    assert!(on.host_bytes(&output) == pattern(3, BYTES), "memory was given away under queued work");
    drop(next);
    assert_eq!(on.memory().unwrap().allocated_bytes, 0);
    assert_eq!(on.memory().unwrap().pinned_bytes, output.buffer().bytes());
}

fn dropped_streams_and_events_finish_their_work(on: &Subject) {
    let (buffer, host) = (on.upload(&[1; 10_000]), on.pinned(10_000));
    let [stream, other] = on.streams(["dropped", "waiting"]);
    let [handed_on, done] = on.events();
    on.spin(&stream, 30);
    on.fill(&stream, &buffer.all(), 2).unwrap();
    on.record(&handed_on, &stream).unwrap();
    on.wait(&other, &handed_on).unwrap();
    on.copy(&other, &buffer.all(), &host).unwrap();
    on.record(&done, &other).unwrap();
    drop((stream, other, handed_on));
    on.synchronize(&done).unwrap();
    assert_eq!(on.host_bytes(&host), vec![2; 10_000]);
}

fn clones_share_the_memory(on: &Subject) {
    let buffer = on.upload(&[1; 64]);
    let clone = buffer.clone();
    assert_eq!((clone.addr(), buffer.holders()), (buffer.addr(), 2));
    drop(buffer);
    assert_eq!(clone.holders(), 1);
    assert_eq!(on.download(&clone.all()), vec![1; 64]);
    assert_eq!(on.memory().unwrap().allocated_bytes, 64);
}
