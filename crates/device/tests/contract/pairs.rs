//! Many small copies in one launch.

use forebay_device::{Buffer, Error, Kernel, Region};

use crate::bench::{Subject, pattern, random};

forebay_device::on_devices! {
    every:
        pairs_are_copied_exactly_and_nothing_beside_them,
        more_pairs_than_one_launch_takes,
        pairs_refuse_what_does_not_fit,
        pairs_run_in_the_order_of_their_stream;
}

/// Copies ranges of one buffer to ranges of another and compares all bytes of both.
fn check(on: &Subject, source: &[u8], target_bytes: usize, ranges: &[(u64, u64, u64)]) {
    let (from, to) = (on.upload(source), on.upload(&vec![0x5a; target_bytes]));
    let pairs: Vec<(Region, Region)> =
        ranges.iter().map(|&(a, b, len)| (from.region(a, len).unwrap(), to.region(b, len).unwrap())).collect();
    let [stream] = on.streams(["pairs"]);
    on.launch(&stream, &Kernel::CopyPairs { pairs: &pairs }).unwrap();
    on.finish(&stream).unwrap();
    let mut want = vec![0x5a; target_bytes];
    for &(a, b, len) in ranges {
        want[b as usize..(b + len) as usize].copy_from_slice(&source[a as usize..(a + len) as usize]);
    }
    assert!(on.download(&to.all()) == want, "{} pairs, first {:?}", ranges.len(), ranges.first());
    assert!(on.download(&from.all()) == source, "the source has changed");
}

fn pairs_are_copied_exactly_and_nothing_beside_them(on: &Subject) {
    let source = pattern(1, 300_000);
    for (a, b) in [(0, 0), (16, 32), (0, 1), (1, 0), (3, 3), (256, 8), (4, 20)] {
        // Around the width of a vector, of a block, and several blocks.
        for len in [0, 1, 15, 16, 17, 255, 4096, 32_767, 32_768, 32_769, 100_001] {
            check(on, &source, 300_000, &[(a, b, len)]);
        }
    }
    check(on, &source, 1000, &[]);
}

fn more_pairs_than_one_launch_takes(on: &Subject) {
    // Sizes from nothing to two blocks, in another order at the target.
    let count = 1000u64;
    let sizes: Vec<u64> = (0..count).map(|i| if i % 7 == 0 { 0 } else { random(3, i) % 700 }).collect();
    let mut ranges = Vec::new();
    let (mut a, mut b) = (0, 0);
    for &len in &sizes {
        ranges.push((a, 0, len));
        a += len + 3;
    }
    for range in ranges.iter_mut().rev() {
        range.1 = b;
        b += range.2 + 1;
    }
    check(on, &pattern(4, a as usize), b as usize, &ranges);
    for count in [167, 168, 169, 336, 337] {
        let ranges: Vec<_> = (0..count).map(|i| (16 * i, 32 * i, 16)).collect();
        check(on, &pattern(count, 16 * count as usize), 32 * count as usize, &ranges);
    }
}

fn pairs_refuse_what_does_not_fit(on: &Subject) {
    let (device, host, stream) = (on.upload(&[0; 64]), on.pinned(64), on.stream("refusing").unwrap());
    let at = |offset, len| device.region(offset, len).unwrap();
    let foreign: Buffer = on.kind.open().alloc(64).unwrap();
    for (what, pair) in [
        ("lengths", (at(0, 8), at(8, 9))),
        ("overlap", (at(0, 8), at(7, 8))),
        ("host to device", (host.slice(0, 8).unwrap(), at(0, 8))),
        ("device to host", (at(0, 8), host.slice(0, 8).unwrap())),
        ("another device", (foreign.region(0, 8).unwrap(), at(0, 8))),
    ] {
        let outcome = on.launch(&stream, &Kernel::CopyPairs { pairs: &[(at(32, 4), at(40, 4)), pair] });
        assert!(matches!(outcome, Err(Error::BadOperands { operation: "copy pairs", .. })), "{what}: {outcome:?}");
    }
}

fn pairs_run_in_the_order_of_their_stream(on: &Subject) {
    let [stream] = on.streams(["pairs"]);
    let (from, to) = (on.upload(&[1; 4096]), on.upload(&[2; 4096]));
    on.spin(&stream, 20);
    on.fill(&stream, &from.all(), 7).unwrap();
    on.launch(&stream, &Kernel::CopyPairs { pairs: &[(from.all(), to.all())] }).unwrap();
    on.finish(&stream).unwrap();
    assert!(on.download(&to.all()) == [7; 4096]);
}
