//! Checkpoints over the engine's own interface: memory of the host and of a device into files and back, failures of the
//! device, files of every layout, and boxes of a tensor written in one tiling and read in another.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::common::{Subject, cases, device_error};
use forebay::Error;
use forebay::checkpoint::{
    BLOCK_BYTES, Checkpoint, FileEntry, HostCopies, Manifest, Request, Saving, StoredChunk, Tensor, TensorBox,
    WriteOptions, complete, element_bytes, from_safetensors, latest, prune, summarise, to_safetensors, verify,
    write_files,
};
use forebay::device::fault::{Call, Misbehaviour};
use forebay::device::{Buffer, Region, file};
use proptest::prelude::*;

forebay_device::on_devices! {
    every:
        memory_of_the_device_comes_through_the_staging_block,
        a_save_waits_for_the_work_before_it,
        a_failing_copy_leaves_no_complete_checkpoint,
        a_refused_staging_block_leaves_no_complete_checkpoint,
        copies_have_the_bytes_and_their_memory_is_used_again,
        copies_wait_for_the_work_before_them,
        copies_that_fail_leave_nothing_in_flight,
        copies_can_be_made_after_every_failure;
    alone:
        a_stream_that_dies_in_the_middle_is_an_error;
}

/// A folder that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("forebay-checkpoint-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl std::ops::Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Bytes in which no two places look alike.
fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let word =
        |i: usize| (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed.wrapping_mul(0xff51_afd7)).to_le_bytes();
    (0..bytes).map(|i| word(i / 8)[i % 8]).collect()
}

fn host(bytes: &[u8]) -> Region {
    let memory = Buffer::pageable(bytes.len() as u64).unwrap().into_region();
    file::fill(&memory, bytes).unwrap();
    memory
}

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = Vec::new();
    file::visit(region, |piece| bytes.extend_from_slice(piece)).unwrap();
    bytes
}

fn entry(name: &str, dtype: &str, shape: &[u64], data: Option<Region>) -> FileEntry {
    FileEntry { name: name.into(), dtype: dtype.into(), shape: shape.into(), data }
}

/// Writes whole tensors as one checkpoint.
fn save(path: &Path, entries: &[FileEntry], options: &WriteOptions) -> forebay::Result<PathBuf> {
    save_boxes(path, entries, &vec![None; entries.len()], options)
}

/// A tensor's name, and a box of it.
type Named = (String, Vec<u64>, Vec<u64>);

/// The same with boxes: a tensor's shape and where an entry starts in it.
fn save_boxes(
    path: &Path,
    entries: &[FileEntry],
    boxes: &[Option<Named>],
    options: &WriteOptions,
) -> forebay::Result<PathBuf> {
    let saving = Saving::begin(path)?;
    let written = write_files(saving.folder(), "0-", entries, options, &AtomicU64::new(0))?;
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    for (number, file) in written.iter().enumerate() {
        for &(index, begin, end) in &file.entries {
            let FileEntry { name, dtype, shape, .. } = &entries[index];
            let whole = (name.clone(), shape.clone(), vec![0; shape.len()]);
            let (name, full, offsets) = boxes[index].clone().unwrap_or(whole);
            let extent = TensorBox { offsets, shape: shape.clone() };
            let tensor = Tensor { dtype: dtype.clone(), shape: full, chunks: Vec::new(), weight: None };
            tensors.entry(name).or_insert(tensor).chunks.push(StoredChunk::plain(extent, number, begin, end));
        }
    }
    let files = written.into_iter().map(|file| file.record).collect();
    let manifest = Manifest { block_bytes: options.block_bytes, files, tensors, ..Manifest::default() };
    saving.commit(&manifest, None)
}

/// Past the system's cache the same files come about: with pieces that begin and end anywhere, a header that is longer than
/// a piece, and files that end within a page, with one, or with a piece.
#[test]
fn past_the_cache_the_files_are_the_same() {
    const PIECE: usize = 1 << 20;
    let whole = |sizes: &[usize]| -> Vec<FileEntry> {
        // Long names, for a long header.
        let of = |(i, &size): (usize, &usize)| {
            entry(
                &format!("{i:0width$}", width = 100 * sizes.len()),
                "U8",
                &[size as u64],
                (size > 0).then(|| host(&pattern(size, i as u64))),
            )
        };
        sizes.iter().enumerate().map(of).collect()
    };
    let cases = [
        whole(&[1]),
        whole(&[4096, 0, 4095]),
        whole(&[PIECE - 4096]),
        whole(&[PIECE, 2 * PIECE - 4096, 7]),
        whole(&[3 * PIECE + 11, PIECE - 11, 5, PIECE, 4096 - 5]),
        whole(&[3; 120]),
    ];
    let folder = Folder::new();
    for (number, entries) in cases.iter().enumerate() {
        for block_bytes in [1000, 4096, 8 << 20] {
            let of = |direct: bool| {
                let path = folder.0.join(format!("{number}-{block_bytes}-{direct}"));
                fs::create_dir(&path).unwrap();
                let options = WriteOptions { direct, block_bytes, threads: 1, ..WriteOptions::default() };
                let written = write_files(&path, "0-", entries, &options, &AtomicU64::new(0)).unwrap();
                let bytes = fs::read(path.join("0-0.safetensors")).unwrap();
                (written, bytes)
            };
            assert!(of(false) == of(true), "case {number}, blocks of {block_bytes}");
        }
    }
}

/// Reads a whole tensor.
fn load(checkpoint: &Checkpoint, name: &str, threads: usize) -> forebay::Result<Vec<u8>> {
    let tensor = &checkpoint.manifest().tensors[name];
    let into = Buffer::pageable(tensor.bytes().max(1)).unwrap();
    let requests: Vec<Request> = (0..tensor.chunks.len())
        .map(|chunk| {
            let part = TensorBox::whole(&tensor.chunks[chunk].extent.shape);
            let strides = strides(&tensor.shape);
            let at = &tensor.chunks[chunk].extent.offsets;
            request(name, chunk, part, &into, (at, &strides), element_bytes(&tensor.dtype).unwrap())
        })
        .filter(|request| request.into.bytes() > 0)
        .collect();
    checkpoint.read(&requests, threads, &AtomicU64::new(0))?;
    Ok(bytes_of(&into.region(0, tensor.bytes()).unwrap()))
}

fn strides(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

/// A request for a box whose first element goes to `at` in memory with these strides.
fn request(
    tensor: &str,
    chunk: usize,
    part: TensorBox,
    into: &Buffer,
    (at, strides): (&[u64], &[u64]),
    width: u64,
) -> Request {
    let first: u64 = at.iter().zip(strides).map(|(at, stride)| at * stride).sum();
    let empty = part.shape.contains(&0);
    let last: u64 = part.shape.iter().zip(strides).map(|(len, stride)| len.saturating_sub(1) * stride).sum();
    let bytes = if empty { 0 } else { (last + 1) * width };
    let into = into.region(if empty { 0 } else { first * width }, bytes).unwrap();
    Request { tensor: tensor.into(), chunk, part, into, strides: strides.to_vec(), kept: None }
}

fn small() -> WriteOptions {
    WriteOptions { threads: 4, block_bytes: 4096, file_bytes: 10_000, ..WriteOptions::default() }
}

fn clean(checkpoint: &Checkpoint) {
    assert_eq!(verify(checkpoint, &AtomicU64::new(0)).unwrap(), []);
}

// Layout.

#[test]
fn several_files_hold_everything_once() {
    let path = Folder::new();
    let sizes: [usize; 9] = [30_000, 4096, 4095, 4097, 1, 0, 9000, 9000, 12_345];
    let data: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(i, &size)| pattern(size, i as u64)).collect();
    let names: Vec<String> = (0..sizes.len()).map(|i| format!("t{i}")).collect();
    let entries: Vec<FileEntry> = (0..sizes.len())
        .map(|i| entry(&names[i], "U8", &[sizes[i] as u64], (sizes[i] > 0).then(|| host(&data[i]))))
        .collect();
    for (number, threads) in [(1, 1), (2, 2), (3, 4), (4, 16)] {
        let folder = save(&path, &entries, &WriteOptions { threads, ..small() }).unwrap();
        assert_eq!(folder, path.join(format!("{number:08}")));
        let checkpoint = Checkpoint::open(&path).unwrap();
        let total: usize = sizes.iter().sum();
        assert_eq!(checkpoint.manifest().files.len(), total.div_ceil(10_000).min(threads));
        clean(&checkpoint);
        for (name, data) in names.iter().zip(&data) {
            for readers in [1, 3] {
                assert_eq!(load(&checkpoint, name, readers).unwrap(), *data, "{name}, {threads} and {readers} threads");
            }
        }
    }
}

#[test]
fn elements_are_aligned_and_blocks_are_whole_pages() {
    let path = Folder::new();
    let entries = [
        entry("bytes", "U8", &[3], Some(host(&[1, 2, 3]))),
        entry("doubles", "F64", &[2], Some(host(&pattern(16, 1)))),
        entry("halves", "BF16", &[3], Some(host(&pattern(6, 2)))),
        entry("floats", "F32", &[5], Some(host(&pattern(20, 3)))),
    ];
    save(&path, &entries, &small()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for (name, tensor) in &checkpoint.manifest().tensors {
        let width = element_bytes(&tensor.dtype).unwrap();
        assert!(tensor.chunks[0].begin.is_multiple_of(width), "{name}");
        assert!(tensor.chunks[0].begin >= 4096, "{name}");
    }
    clean(&checkpoint);
}

#[test]
fn what_is_no_tensor_of_its_type_is_not_written() {
    let path = Folder::new();
    let refused = |entries: &[FileEntry], reason: &str| match save(&path, entries, &small()) {
        Err(Error::Checkpoint { reason: found, .. }) => assert!(found.contains(reason), "{found}"),
        other => panic!("{other:?}"),
    };
    refused(&[entry("w", "F32", &[3], Some(host(&[0; 8])))], "8 bytes for F32 of shape [3]");
    refused(&[entry("w", "F32", &[1 << 62, 1 << 62], Some(host(&[0; 8])))], "8 bytes for F32");
    refused(&[entry("w", "Q4", &[8], Some(host(&[0; 8])))], "8 bytes for Q4");
    let twice = || entry("w", "U8", &[8], Some(host(&[0; 8])));
    refused(&[twice(), twice()], "two entries are called \"w\"");
    assert_eq!(complete(&path).unwrap(), Vec::<PathBuf>::new());
}

// Folders.

fn one(byte: u8) -> [FileEntry; 1] {
    [entry("w", "U8", &[100], Some(host(&[byte; 100])))]
}

#[test]
fn a_save_that_is_dropped_leaves_the_last_one() {
    let path = Folder::new();
    save(&path, &one(1), &small()).unwrap();
    let saving = Saving::begin(&path).unwrap();
    let folder = saving.folder().to_owned();
    write_files(&folder, "0-", &one(2), &small(), &AtomicU64::new(0)).unwrap();
    assert_eq!(latest(&path).unwrap(), path.join("00000001"));
    drop(saving);
    assert!(folder.is_dir(), "what it wrote is left over");
    assert_eq!(load(&Checkpoint::open(&path).unwrap(), "w", 1).unwrap(), [1; 100]);
    let next = save(&path, &one(3), &small()).unwrap();
    assert!(!folder.join("0-0.safetensors").exists() || next == folder);
    assert_eq!(load(&Checkpoint::open(&path).unwrap(), "w", 1).unwrap(), [3; 100]);
    assert_eq!(complete(&path).unwrap().len(), 2);
}

#[test]
fn a_save_that_is_discarded_leaves_nothing() {
    let path = Folder::new();
    save(&path, &one(1), &small()).unwrap();
    let saving = Saving::begin(&path).unwrap();
    let folder = saving.folder().to_owned();
    write_files(&folder, "0-", &one(2), &small(), &AtomicU64::new(0)).unwrap();
    saving.discard();
    assert!(!folder.exists());
    assert_eq!(load(&Checkpoint::open(&path).unwrap(), "w", 1).unwrap(), [1; 100]);
    let saving = Saving::begin(&path).unwrap();
    fs::remove_dir(saving.folder()).unwrap();
    saving.discard();
    assert_eq!(save(&path, &one(3), &small()).unwrap(), folder, "its number is free again");
    // What is complete stays, whoever discards it.
    let saving = Saving::begin(&path).unwrap();
    fs::copy(folder.join("manifest.json"), saving.folder().join("manifest.json")).unwrap();
    let third = saving.folder().to_owned();
    saving.discard();
    assert!(third.is_dir());
}

#[test]
fn two_saves_to_one_path_at_once_are_refused() {
    let path = Folder::new();
    let first = Saving::begin(&path).unwrap();
    assert!(Saving::begin(&path).unwrap_err().to_string().contains("another save to this path is running"));
    assert!(first.folder().is_dir(), "the second one must not clean the first one up");
    drop(first);
    Saving::begin(&path).unwrap();
}

#[test]
fn a_checkpoints_own_folder_is_no_path_to_save_to() {
    let path = Folder::new();
    let folder = save(&path, &one(1), &small()).unwrap();
    assert!(Saving::begin(&folder).unwrap_err().to_string().contains("it is a checkpoint itself"));
}

#[test]
fn pruning_keeps_the_last_ones() {
    let path = Folder::new();
    for byte in 1..=4 {
        save(&path, &one(byte), &small()).unwrap();
    }
    prune(&path, 2).unwrap();
    assert_eq!(complete(&path).unwrap(), [path.join("00000003"), path.join("00000004")]);
    prune(&path, 9).unwrap();
    assert_eq!(complete(&path).unwrap().len(), 2);
}

#[test]
fn a_commit_refuses_files_that_are_not_as_written() {
    for harm in [|file: &Path| fs::remove_file(file), |file: &Path| fs::write(file, "short")] {
        let path = Folder::new();
        save(&path, &one(1), &small()).unwrap();
        let manifest = Checkpoint::open(&path).unwrap().manifest().clone();
        let saving = Saving::begin(&path).unwrap();
        write_files(saving.folder(), "0-", &one(2), &small(), &AtomicU64::new(0)).unwrap();
        harm(&saving.folder().join("0-0.safetensors")).unwrap();
        let error = saving.commit(&manifest, Some(1)).unwrap_err();
        assert!(error.to_string().contains("00000002/0-0.safetensors"), "{error}");
        assert_eq!(latest(&path).unwrap(), path.join("00000001"));
        assert!(!path.join("00000002").exists(), "what it wrote is removed");
    }
}

#[test]
fn one_plain_file_and_back() {
    let path = Folder::new();
    let data = pattern(6 * 5 * 4, 9);
    let rows = |from: usize, to: usize| Some(host(&data[from * 20..to * 20]));
    let entries = [entry("w[0:2]", "F32", &[2, 5], rows(0, 2)), entry("w[2:6]", "F32", &[4, 5], rows(2, 6))];
    let boxes = [0, 2].map(|row| Some(("w".to_owned(), vec![6, 5], vec![row, 0])));
    save_boxes(&path, &entries, &boxes, &small()).unwrap();
    let plain = path.join("plain.safetensors");
    to_safetensors(&Checkpoint::open(&path).unwrap(), &plain, &AtomicU64::new(0)).unwrap();
    let back = path.join("back");
    from_safetensors(&plain, &back, &AtomicU64::new(0)).unwrap();
    let checkpoint = Checkpoint::open(&back).unwrap();
    clean(&checkpoint);
    assert_eq!(checkpoint.manifest().block_bytes, BLOCK_BYTES);
    assert_eq!(load(&checkpoint, "w", 2).unwrap(), data);
    assert_eq!(summarise(&checkpoint).unwrap().tensors[0].shards, 1);
}

/// Bytes that this thread has read from files.
fn bytes_read() -> u64 {
    let counters = fs::read_to_string("/proc/thread-self/io").unwrap();
    counters.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

#[test]
fn a_plain_files_header_is_read_once() {
    let path = Folder::new();
    let name = |i: usize| format!("{i:04}{}", "x".repeat(2000));
    let entries: Vec<FileEntry> = (0..2000).map(|i| entry(&name(i), "U8", &[1], Some(host(&[i as u8])))).collect();
    save(&path, &entries, &small()).unwrap();
    let plain = path.join("plain.safetensors");
    to_safetensors(&Checkpoint::open(&path).unwrap(), &plain, &AtomicU64::new(0)).unwrap();
    let bytes = fs::metadata(&plain).unwrap().len();
    let header = bytes - 2000;
    let before = bytes_read();
    from_safetensors(&plain, &path.join("back"), &AtomicU64::new(0)).unwrap();
    let read = bytes_read() - before;
    // Once for what it says, and once as a part of the file that is copied.
    assert!((header + bytes..header + bytes + 10_000).contains(&read), "{read} bytes for {header} and {bytes}");
}

// Damage.

#[test]
fn every_flipped_byte_of_a_file_is_found_by_verify_and_by_whoever_reads_its_block() {
    let path = Folder::new();
    let data = pattern(9000, 5);
    let folder = save(&path, &[entry("w", "U8", &[9000], Some(host(&data)))], &WriteOptions { threads: 1, ..small() });
    let file = folder.unwrap().join("0-0.safetensors");
    let whole = fs::read(&file).unwrap();
    for at in (0..whole.len()).step_by(97).chain([0, 7, 8, 4095, 4096, 8191, 8192, whole.len() - 1]) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        fs::write(&file, &damaged).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let problems = verify(&checkpoint, &AtomicU64::new(0)).unwrap();
        assert!(
            problems.iter().any(|problem| problem.reason.contains(&format!("block {}", at / 4096))),
            "{at}: {problems:?}"
        );
        let read = load(&checkpoint, "w", 2);
        if at < 4096 {
            assert_eq!(read.unwrap(), data, "the header is not read for a tensor");
        } else {
            let error = read.unwrap_err().to_string();
            assert!(error.contains("0-0.safetensors") && error.contains(&format!("block {}", at / 4096)), "{error}");
        }
    }
}

#[test]
fn a_part_is_not_handed_out_from_a_damaged_block() {
    // Only a few bytes are asked for, so the block goes through a buffer: the target stays as it was.
    let path = Folder::new();
    let folder = save(&path, &[entry("w", "U8", &[9000], Some(host(&pattern(9000, 5))))], &small()).unwrap();
    let file = folder.join("0-0.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    bytes[4096] ^= 1;
    fs::write(&file, bytes).unwrap();
    let into = Buffer::pageable(10).unwrap();
    file::fill(&into.all(), &[7; 10]).unwrap();
    let part = TensorBox { offsets: vec![100], shape: vec![10] };
    let wanted = request("w", 0, part, &into, (&[0], &[1]), 1);
    Checkpoint::open(&path).unwrap().read(&[wanted], 1, &AtomicU64::new(0)).unwrap_err();
    assert_eq!(bytes_of(&into.all()), [7; 10]);
}

#[test]
fn requests_that_do_not_fit_are_refused_before_anything_is_written() {
    let path = Folder::new();
    let data = pattern(60, 5);
    save(&path, &[entry("w", "U8", &[6, 10], Some(host(&data)))], &small()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let into = Buffer::pageable(60).unwrap();
    file::fill(&into.all(), &[7; 60]).unwrap();
    let good = request("w", 0, TensorBox::whole(&[6, 10]), &into, (&[0, 0], &[10, 1]), 1);
    let bad = [
        Request { tensor: "v".into(), ..good.clone() },
        Request { chunk: 1, ..good.clone() },
        Request { part: TensorBox { offsets: vec![1, 0], shape: vec![6, 10] }, ..good.clone() },
        Request { part: TensorBox { offsets: vec![u64::MAX, 0], shape: vec![6, 10] }, ..good.clone() },
        Request { part: TensorBox::whole(&[6]), ..good.clone() },
        Request { strides: vec![10], ..good.clone() },
        Request { strides: vec![11, 1], ..good.clone() },
        Request { strides: vec![u64::MAX, 1], ..good.clone() },
        Request { into: into.region(0, 59).unwrap(), ..good.clone() },
    ];
    for (i, bad) in bad.into_iter().enumerate() {
        let error = checkpoint.read(&[good.clone(), bad], 2, &AtomicU64::new(0)).unwrap_err();
        assert!(matches!(error, Error::Checkpoint { .. }), "{i}: {error:?}");
        assert_eq!(bytes_of(&into.all()), [7; 60], "{i}");
    }
    checkpoint.read(&[good], 2, &AtomicU64::new(0)).unwrap();
    assert_eq!(bytes_of(&into.all()), data);
}

// Memory of a device.

fn on_device(on: &Subject) -> WriteOptions {
    let stream = on.stream("training").unwrap();
    WriteOptions { device: Some((on.device.clone(), stream)), ..small() }
}

/// Entries on the device and on the host in turn, some longer than a block.
fn mixed(on: &Subject) -> (Vec<Vec<u8>>, Vec<FileEntry>) {
    let data: Vec<Vec<u8>> = [9000, 100, 4096, 12_289, 1].iter().map(|&size| pattern(size, size as u64)).collect();
    let entries = data.iter().enumerate().map(|(i, data)| {
        let memory = if i % 2 == 0 { on.upload(data).into_region() } else { host(data) };
        entry(&format!("t{i}"), "U8", &[data.len() as u64], Some(memory))
    });
    let entries = entries.collect();
    (data, entries)
}

fn memory_of_the_device_comes_through_the_staging_block(on: &Subject) {
    let on = &on.another();
    let path = Folder::new();
    let (data, entries) = mixed(on);
    save(&path, &entries, &on_device(on)).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    clean(&checkpoint);
    for (i, data) in data.iter().enumerate() {
        assert_eq!(load(&checkpoint, &format!("t{i}"), 2).unwrap(), *data, "t{i}");
    }
    drop(entries);
    on.assert_empty();
    // Without a device there is no way to its memory.
    let (_, entries) = mixed(on);
    assert!(save(&path, &entries, &small()).unwrap_err().to_string().contains("is on a device and none was given"));
}

fn a_save_waits_for_the_work_before_it(on: &Subject) {
    let path = Folder::new();
    let data = pattern(9000, 3);
    let (target, source) = (on.upload(&vec![0; 9000]), on.pinned(9000));
    on.write(&data, &source).unwrap();
    let options = on_device(on);
    let Some((_, stream)) = &options.device else { unreachable!() };
    // The last step's work comes late; what is saved is what it leaves.
    on.launch(stream, &forebay::device::Kernel::Spin { ns: 100_000_000 }).unwrap();
    on.copy(stream, &source, &target.all()).unwrap();
    save(&path, &[entry("w", "U8", &[9000], Some(target.all()))], &options).unwrap();
    assert_eq!(load(&Checkpoint::open(&path).unwrap(), "w", 1).unwrap(), data);
}

/// A save fails in the n-th call of a kind, for every n there is; the checkpoint before it stays the last.
fn refuse_every(on: &Subject, call: Call) {
    let on = &on.another();
    let path = Folder::new();
    save(&path, &one(1), &small()).unwrap();
    let (_, entries) = mixed(on);
    for nth in 0.. {
        let options = WriteOptions { threads: 1, ..on_device(on) };
        on.fault.on(call, nth, Misbehaviour::Fail);
        let outcome = save(&path, &entries, &options);
        if outcome.is_ok() {
            assert!(nth > 0, "a save makes no {call:?} call");
            break;
        }
        device_error(outcome);
        assert_eq!(latest(&path).unwrap(), path.join("00000001"), "{call:?} {nth}");
        assert_eq!(load(&Checkpoint::open(&path).unwrap(), "w", 1).unwrap(), [1; 100]);
    }
    clean(&Checkpoint::open(&path).unwrap());
    assert_eq!(complete(&path).unwrap().len(), 2);
    drop(entries);
    on.assert_empty();
}

fn a_failing_copy_leaves_no_complete_checkpoint(on: &Subject) {
    for call in [Call::Copy, Call::Record, Call::Synchronize, Call::Wait] {
        refuse_every(on, call);
    }
}

fn a_refused_staging_block_leaves_no_complete_checkpoint(on: &Subject) {
    for call in [Call::Pin, Call::Stream, Call::Event] {
        refuse_every(on, call);
    }
}

fn a_stream_that_dies_in_the_middle_is_an_error(on: &Subject) {
    let path = Folder::new();
    let (_, entries) = mixed(on);
    let options = on_device(on);
    on.fault.on(Call::Copy, 2, Misbehaviour::Break);
    device_error(save(&path, &entries, &options));
    assert!(latest(&path).is_err());
}

// Copies of device memory.

fn uploaded(on: &Subject, sizes: &[usize], seed: u64) -> (Vec<Vec<u8>>, Vec<Region>) {
    let data: Vec<Vec<u8>> = sizes.iter().map(|&size| pattern(size, seed + size as u64)).collect();
    let regions = data.iter().map(|data| match data.len() {
        0 => on.upload(&[0]).region(0, 0).unwrap(),
        _ => on.upload(data).into_region(),
    });
    let regions = regions.collect();
    (data, regions)
}

fn copies_have_the_bytes_and_their_memory_is_used_again(on: &Subject) {
    const SIZES: [usize; 6] = [9000, 0, 100, 4096, 12_289, 1];
    let on = &on.another();
    let copies = HostCopies::new(on.device.clone());
    assert_eq!(copies.bytes(), 0);
    let stream = on.stream("training").unwrap();
    let mut places = Vec::new();
    for seed in 0..3 {
        let (data, regions) = uploaded(on, &SIZES, seed);
        let found = copies.fill(&regions, Some(&stream)).unwrap();
        assert_eq!(found.iter().map(bytes_of).collect::<Vec<_>>(), data);
        places.push(found.iter().map(Region::addr).collect::<Vec<_>>());
    }
    assert!(places.windows(2).all(|pair| pair[0] == pair[1]), "the same sizes have the same memory");
    assert!(copies.bytes() >= SIZES.iter().sum::<usize>() as u64);
    let (data, regions) = uploaded(on, &[5, 70_000], 9);
    let found = copies.fill(&regions, None).unwrap();
    assert_eq!(found.iter().map(bytes_of).collect::<Vec<_>>(), data);
    assert!(copies.fill(&[], None).unwrap().is_empty());
    let (_, empty) = uploaded(on, &[0, 0], 9);
    assert_eq!(copies.fill(&empty, None).unwrap().iter().map(Region::bytes).collect::<Vec<_>>(), [0, 0]);
    drop((copies, found, regions, empty));
    on.assert_empty();
}

fn copies_wait_for_the_work_before_them(on: &Subject) {
    let data = pattern(9000, 3);
    let (target, source) = (on.upload(&vec![0; 9000]), on.pinned(9000));
    on.write(&data, &source).unwrap();
    let stream = on.stream("training").unwrap();
    on.launch(&stream, &forebay::device::Kernel::Spin { ns: 100_000_000 }).unwrap();
    on.copy(&stream, &source, &target.all()).unwrap();
    let found = HostCopies::new(on.device.clone()).fill(&[target.all()], Some(&stream)).unwrap();
    assert_eq!(bytes_of(&found[0]), data);
}

fn copies_that_fail_leave_nothing_in_flight(on: &Subject) {
    const LATE: std::time::Duration = std::time::Duration::from_millis(200);
    let copies = HostCopies::new(on.device.clone());
    let (_, regions) = uploaded(on, &[9000, 100], 4);
    on.fault.on(Call::Copy, 0, Misbehaviour::Late { ns: LATE.as_nanos() as u64 });
    on.fault.on(Call::Copy, 1, Misbehaviour::Fail);
    let start = std::time::Instant::now();
    device_error(copies.fill(&regions, None));
    assert!(start.elapsed() >= LATE, "returned while the first copy was under way");
}

fn copies_can_be_made_after_every_failure(on: &Subject) {
    for call in [Call::Pin, Call::Stream, Call::Event, Call::Record, Call::Wait, Call::Copy, Call::Synchronize] {
        let on = &on.another();
        let stream = on.stream("training").unwrap();
        let copies = HostCopies::new(on.device.clone());
        let (data, regions) = uploaded(on, &[9000, 100, 4096], 5);
        for nth in 0.. {
            on.fault.on(call, nth, Misbehaviour::Fail);
            let outcome = copies.fill(&regions, Some(&stream));
            if let Ok(found) = outcome {
                assert!(nth > 0, "no {call:?} call is made");
                assert_eq!(found.iter().map(bytes_of).collect::<Vec<_>>(), data);
                break;
            }
            device_error(outcome);
        }
        drop((copies, regions));
        on.assert_empty();
    }
}

// Resharding.

/// Cuts each side of a box at random places: tiles that cover it exactly once.
fn tiles(shape: &[u64], cuts: &[Vec<u64>]) -> Vec<TensorBox> {
    let mut tiles = vec![TensorBox { offsets: Vec::new(), shape: Vec::new() }];
    for (&side, cuts) in shape.iter().zip(cuts) {
        let mut edges: Vec<u64> = cuts.iter().map(|cut| cut % (side + 1)).chain([0, side]).collect();
        edges.sort_unstable();
        let grown = tiles.iter().flat_map(|tile| {
            edges.windows(2).map(|pair| {
                let mut tile = tile.clone();
                tile.offsets.push(pair[0]);
                tile.shape.push(pair[1] - pair[0]);
                tile
            })
        });
        tiles = grown.collect();
    }
    tiles
}

/// What two boxes share: its offsets in the tensor, and its shape.
fn shared(a: &TensorBox, b: &TensorBox) -> Option<TensorBox> {
    let (mut offsets, mut shape) = (Vec::new(), Vec::new());
    for i in 0..a.shape.len() {
        let from = a.offsets[i].max(b.offsets[i]);
        let to = (a.offsets[i] + a.shape[i]).min(b.offsets[i] + b.shape[i]);
        offsets.push(from);
        shape.push(to.checked_sub(from).filter(|&len| len > 0)?);
    }
    Some(TensorBox { offsets, shape })
}

/// The elements of a box, in order, as their places in the whole tensor.
fn places(part: &TensorBox, shape: &[u64]) -> Vec<u64> {
    let strides = strides(shape);
    let total: u64 = part.shape.iter().product();
    (0..total)
        .map(|index| {
            let (mut rest, mut place) = (index, 0);
            for i in (0..part.shape.len()).rev() {
                place += (part.offsets[i] + rest % part.shape[i]) * strides[i];
                rest /= part.shape[i];
            }
            place
        })
        .collect()
}

fn minus(a: &[u64], b: &[u64]) -> Vec<u64> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(150), failure_persistence: None, ..ProptestConfig::default() })]

    /// A tensor written in one tiling and read in another, into memory with any strides, is the tensor.
    #[test]
    fn any_tiling_reads_any_other(
        sides in prop::collection::vec((1u64..24, prop::collection::vec(any::<u64>(), 0..3), prop::collection::vec(any::<u64>(), 0..3)), 0..4),
        width in prop::sample::select(vec![("U8", 1u64), ("BF16", 2), ("F32", 4), ("F64", 8)]),
        turn in any::<prop::sample::Index>(),
        (gap, threads, file_bytes) in (0u64..3, 1usize..4, prop::sample::select(vec![512u64, 4096, 1 << 20])),
    ) {
        let (dtype, width) = width;
        let shape: Vec<u64> = sides.iter().map(|(side, ..)| *side).collect();
        let (written, read): (Vec<_>, Vec<_>) = sides.iter().map(|(_, a, b)| (a.clone(), b.clone())).unzip();
        let (written, read) = (tiles(&shape, &written), tiles(&shape, &read));
        let elements: u64 = shape.iter().product();
        let whole = pattern((elements * width) as usize, elements);
        let element = |place: u64| &whole[(place * width) as usize..((place + 1) * width) as usize];

        let path = Folder::new();
        let mut entries = Vec::new();
        let mut boxes = Vec::new();
        for (i, tile) in written.iter().enumerate() {
            let data: Vec<u8> = places(tile, &shape).into_iter().flat_map(|place| element(place).to_vec()).collect();
            entries.push(entry(&format!("w{i}"), dtype, &tile.shape, (!data.is_empty()).then(|| host(&data))));
            boxes.push(Some(("w".to_owned(), shape.clone(), tile.offsets.clone())));
        }
        let options = WriteOptions { threads, file_bytes, ..small() };
        save_boxes(&path, &entries, &boxes, &options).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        prop_assert_eq!(verify(&checkpoint, &AtomicU64::new(0)).unwrap(), []);

        for tile in read.iter().filter(|tile| !tile.shape.contains(&0)) {
            // Strides of some turn of the dimensions, with gaps.
            let mut order: Vec<usize> = (0..shape.len()).collect();
            if !order.is_empty() {
                let by = turn.index(order.len());
                order.rotate_left(by);
            }
            let (mut strides, mut next) = (vec![0; shape.len()], 1);
            for &dim in order.iter().rev() {
                strides[dim] = next;
                next = next * tile.shape[dim] + gap;
            }
            let into = Buffer::pageable(next * width).unwrap();
            file::fill(&into.all(), &vec![0xEE; (next * width) as usize]).unwrap();
            let chunks = &checkpoint.manifest().tensors["w"].chunks;
            let requests: Vec<Request> = chunks.iter().enumerate().filter_map(|(chunk, of)| {
                let common = shared(&of.extent, tile)?;
                let part = TensorBox { offsets: minus(&common.offsets, &of.extent.offsets), shape: common.shape.clone() };
                Some(request("w", chunk, part, &into, (&minus(&common.offsets, &tile.offsets), &strides), width))
            }).collect();
            checkpoint.read(&requests, threads, &AtomicU64::new(0)).unwrap();

            let mut expected = vec![0xEE; (next * width) as usize];
            let local = TensorBox::whole(&tile.shape);
            for (place, at) in places(tile, &shape).into_iter().zip(places(&local, &tile.shape)) {
                let (mut rest, mut to) = (at, 0);
                for i in (0..shape.len()).rev() {
                    to += rest % tile.shape[i] * strides[i];
                    rest /= tile.shape[i];
                }
                let to = (to * width) as usize;
                expected[to..to + width as usize].copy_from_slice(element(place));
            }
            prop_assert_eq!(bytes_of(&into.all()), expected, "{:?}", tile);
        }
    }
}
