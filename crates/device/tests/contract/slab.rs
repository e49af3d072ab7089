//! Slabs: where their parts lie, that every part copies, and when their memory goes.

use forebay_device::{ALIGN_BYTES, Error, PIECE_BYTES, Place, SlabLayout};

use crate::bench::{Subject, pattern, random};

forebay_device::on_devices! {
    every:
        a_fresh_slab_is_zeroed,
        parts_of_many_pieces_copy_both_ways,
        release_tells_whether_the_memory_is_free,
        release_under_queued_work_keeps_the_bytes,
        a_slab_says_what_it_cost;
}

const PAGE: u64 = 4096;

fn check_layout(parts: &[u64], limit: u64) {
    let layout = SlabLayout::with_piece_limit(parts, limit).unwrap();
    let what = || format!("parts {parts:?}, limit {limit}: {layout:?}");
    assert_eq!(layout.parts(), parts.len(), "{}", what());
    let mut end = 0;
    for &(offset, bytes) in layout.pieces() {
        assert_eq!(offset, end, "pieces follow one another: {}", what());
        assert!(offset % PAGE == 0 && bytes % PAGE == 0 && bytes > 0, "whole pages: {}", what());
        assert!(bytes <= limit, "a piece over the limit: {}", what());
        end = offset + bytes;
    }
    assert_eq!(end, layout.bytes(), "pieces cover the slab: {}", what());
    let mut end = 0;
    for (i, &wanted) in parts.iter().enumerate() {
        let (offset, bytes) = layout.part(i).unwrap();
        assert_eq!(bytes, wanted, "exact size: {}", what());
        assert!(offset >= end && offset % ALIGN_BYTES == 0, "in order, apart, aligned: {}", what());
        let home = layout.pieces().iter().filter(|(at, len)| *at <= offset && offset + bytes <= at + len).count();
        assert!(home == 1 || (bytes == 0 && home > 0), "part {i} in {home} pieces: {}", what());
        end = offset + bytes;
    }
    assert!(end <= layout.bytes() && layout.part(parts.len()).is_none(), "{}", what());
    let wanted: u64 = parts.iter().sum();
    let most = wanted + ALIGN_BYTES * parts.len() as u64 + PAGE * layout.pieces().len() as u64;
    assert!(layout.bytes() < most, "more than {most} bytes: {}", what());
    // No more pieces than the limit asks for: a piece starts where the next part would have overrun the one before.
    for (i, pair) in layout.pieces().windows(2).enumerate() {
        let starts = |&part: &usize| parts[part] > 0 && layout.part(part).unwrap().0 == pair[1].0;
        let first = (0..parts.len()).find(starts).unwrap();
        let end = layout.part(first - 1).map(|(offset, bytes)| offset + bytes).unwrap();
        let overrun = end.next_multiple_of(ALIGN_BYTES) + parts[first] - pair[0].0;
        assert!(overrun > limit, "piece {i} ends too soon: {}", what());
    }
}

#[test]
fn layouts_keep_their_promises() {
    for case in 0..3000u64 {
        let pick = |i: u64, below: u64| random(case, i) % below;
        let limit = PAGE * (1 + pick(0, 40));
        let sizes = [1, 2, 300, PAGE, limit / 2 + 1, limit];
        let parts: Vec<u64> = (0..1 + pick(1, 30))
            .map(|i| match pick(2 + 2 * i, 8) {
                0 => 0,
                1 => limit,
                2 => limit - pick(3 + 2 * i, 2),
                3 => 256 * pick(3 + 2 * i, limit / 256 + 1),
                _ => pick(3 + 2 * i, sizes[(pick(100 + i, 6)) as usize] + 1),
            })
            .collect();
        if parts.iter().any(|&bytes| bytes > 0) {
            check_layout(&parts, limit);
        }
    }
}

#[test]
fn layouts_at_the_edges() {
    check_layout(&[1], PAGE);
    check_layout(&[PAGE, 1], PAGE);
    check_layout(&[PAGE - 256, 256, 1], PAGE);
    check_layout(&[PAGE - 255, 1], PAGE);
    check_layout(&[PAGE, 0, PAGE, 0], PAGE);
    check_layout(&[0, PAGE - 1, 0, 1], PAGE);
    check_layout(&[PIECE_BYTES, PIECE_BYTES - 1, 2, PIECE_BYTES], PIECE_BYTES);
    let exact = SlabLayout::new(&[256, 256, 3584]).unwrap();
    assert_eq!((exact.bytes(), exact.pieces()), (4096, &[(0, 4096)][..]), "nothing is added where nothing is needed");
}

#[test]
fn a_part_larger_than_a_piece_is_refused() {
    let error = SlabLayout::with_piece_limit(&[1, PAGE + 1], PAGE).unwrap_err();
    match &error {
        Error::InvalidOption { value, remedy, .. } => {
            assert!(value.contains("4097") && remedy.contains("4096"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(SlabLayout::new(&[PIECE_BYTES + 1]), Err(Error::InvalidOption { .. })));
    assert!(matches!(SlabLayout::new(&[u64::MAX]), Err(Error::InvalidOption { .. })));
}

fn a_fresh_slab_is_zeroed(on: &Subject) {
    for _ in 0..2 {
        let slab = on.pin(SlabLayout::new(&[3 << 20]).unwrap()).unwrap();
        let all = slab.buffer().all();
        assert!(on.host_bytes(&all).iter().all(|&b| b == 0));
        on.write(&vec![0xff; all.bytes() as usize], &all).unwrap();
    }
}

fn parts_of_many_pieces_copy_both_ways(on: &Subject) {
    let parts: Vec<u64> = (0..60).map(|i| random(5, i) % (64 << 10)).chain([0, 64 << 10, 1]).collect();
    let layout = SlabLayout::with_piece_limit(&parts, 64 << 10).unwrap();
    assert!(layout.pieces().len() > 20);
    let (from, to) = (on.pin(layout.clone()).unwrap(), on.pin(layout).unwrap());
    let buffers: Vec<_> = parts.iter().map(|&bytes| on.alloc(bytes.max(1)).unwrap()).collect();
    let [fetch, store] = on.streams(["fetch", "store"]);
    let fetched = on.event().unwrap();
    for (i, &bytes) in parts.iter().enumerate() {
        let part = from.part(i).unwrap();
        assert_eq!((part.place(), part.bytes()), (Place::Pinned, bytes));
        on.write(&pattern(i as u64, bytes as usize), &part).unwrap();
        on.copy(&fetch, &part, &buffers[i].region(0, bytes).unwrap()).unwrap();
    }
    on.record(&fetched, &fetch).unwrap();
    on.wait(&store, &fetched).unwrap();
    for (i, &bytes) in parts.iter().enumerate() {
        on.copy(&store, &buffers[i].region(0, bytes).unwrap(), &to.part(i).unwrap()).unwrap();
    }
    on.finish(&store).unwrap();
    let mut gaps = on.host_bytes(&to.buffer().all());
    for (i, &bytes) in parts.iter().enumerate() {
        assert!(on.host_bytes(&to.part(i).unwrap()) == pattern(i as u64, bytes as usize), "part {i}");
        let (offset, bytes) = to.layout().part(i).unwrap();
        gaps[offset as usize..(offset + bytes) as usize].fill(0);
    }
    assert!(gaps.iter().all(|&b| b == 0), "a copy wrote outside its part");
}

fn release_tells_whether_the_memory_is_free(on: &Subject) {
    let pin = || on.pin(SlabLayout::new(&[PAGE, PAGE]).unwrap()).unwrap();
    let slab = pin();
    on.write(&[6; PAGE as usize], &slab.part(1).unwrap()).unwrap();
    let region = slab.part(1).unwrap();
    assert!(!slab.release(), "a region still names it");
    assert_eq!(on.host_bytes(&region), vec![6; PAGE as usize]);
    assert_eq!(on.memory().unwrap().pinned_bytes, 2 * PAGE);
    drop(region);
    assert_eq!(on.memory().unwrap().pinned_bytes, 0);

    let slab = pin();
    let clone = slab.clone();
    assert!(!slab.release(), "a clone still names it");
    assert_eq!(on.memory().unwrap().pinned_bytes, 2 * PAGE);
    assert!(clone.release());
    assert_eq!(on.memory().unwrap().pinned_bytes, 0);
}

fn release_under_queued_work_keeps_the_bytes(on: &Subject) {
    let [stream] = on.streams(["delayed"]);
    let done = on.event().unwrap();
    let slab = on.pin(SlabLayout::new(&[10_000]).unwrap()).unwrap();
    let buffer = on.alloc(10_000).unwrap();
    on.write(&pattern(1, 10_000), &slab.part(0).unwrap()).unwrap();
    on.spin(&stream, 50);
    on.copy(&stream, &slab.part(0).unwrap(), &buffer.all()).unwrap();
    on.record(&done, &stream).unwrap();
    // A backend may wait here for the work or let the work hold the slab, but the answer must be the truth.
    if slab.release() {
        assert_eq!(on.memory().unwrap().pinned_bytes, 0);
        assert!(on.query(&done).unwrap(), "the slab went before the work that reads it");
    }
    on.synchronize(&done).unwrap();
    assert!(on.download(&buffer.all()) == pattern(1, 10_000));
    assert_eq!(on.memory().unwrap().pinned_bytes, 0);
}

fn a_slab_says_what_it_cost(on: &Subject) {
    let slab = on.pin(SlabLayout::with_piece_limit(&[PAGE; 8], 2 * PAGE).unwrap()).unwrap();
    let stats = slab.pin_stats();
    assert_eq!((stats.bytes, slab.bytes(), slab.buffer().bytes()), (8 * PAGE, 8 * PAGE, 8 * PAGE));
    assert!(stats.fault_ns > 0);
    assert_eq!(stats.register_ns > 0, on.kind.is_cuda(), "only a driver registers");
    assert_eq!(slab.buffer().addr() as u64 % PAGE, 0);
}
