//! Native checkpoints: boxes of every encoding, written in one tiling and read in another, converted, damaged.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use forebay_device::update::format::to_bf16;
use forebay_device::{Buffer, MasterFormat, Region, StateFormat, file};
use proptest::prelude::*;

use super::boxes::{row_major, runs, volume};
use super::*;

/// A folder that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("forebay-native-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A value of its place, so that no two look alike.
fn value(i: u64, seed: u64) -> f32 {
    let mixed = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed << 20) >> 40;
    (mixed as f32 / (1 << 23) as f32 - 1.0) * 10f32.powi((mixed % 5) as i32)
}

fn region(bytes: &[u8]) -> Option<Region> {
    let memory = Buffer::pageable((bytes.len() as u64).max(1)).unwrap().into_region().slice(0, bytes.len() as u64);
    file::fill(memory.as_ref().unwrap(), bytes).unwrap();
    (!bytes.is_empty()).then(|| memory.unwrap())
}

/// Bytes of a box of a row-major tensor, in an order of its dimensions.
fn cut(whole: &[u8], width: u64, shape: &[u64], extent: &TensorBox, order: &[usize]) -> Vec<u8> {
    let ordered = |of: &[u64]| order.iter().map(|&dim| of[dim]).collect::<Vec<_>>();
    let strides = row_major(shape);
    let (lengths, strides) = (ordered(&extent.shape), ordered(&strides));
    let base: u64 = extent.offsets.iter().zip(row_major(shape)).map(|(offset, stride)| offset * stride).sum();
    let mut bytes = vec![0; (volume(&lengths).unwrap() * width) as usize];
    for run in runs(&lengths, &vec![0; lengths.len()], &lengths, &strides) {
        let (from, to) = (((base + run.to) * width) as usize, (run.from * width) as usize);
        let count = (run.elements * width) as usize;
        bytes[to..to + count].copy_from_slice(&whole[from..from + count]);
    }
    bytes
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Cuts a shape into rows of boxes at these places of each dimension.
fn tiles(shape: &[u64], cuts: &[u64]) -> Vec<TensorBox> {
    let mut boxes = vec![TensorBox { offsets: vec![], shape: vec![] }];
    for (&side, &cut) in shape.iter().zip(cuts) {
        let cut = cut.min(side);
        let ranges = [(0, cut), (cut, side - cut)];
        boxes = boxes
            .into_iter()
            .flat_map(|of| {
                ranges.iter().filter(|(_, len)| *len > 0).map(move |&(offset, len)| {
                    let mut next = of.clone();
                    next.offsets.push(offset);
                    next.shape.push(len);
                    next
                })
            })
            .collect();
    }
    boxes
}

/// What a checkpoint is made of: a bf16 weight `model.w`, and a tensor for each encoding, in boxes.
struct Made {
    shape: Vec<u64>,
    /// By name: what is read of it, row by row.
    expected: Vec<(String, Vec<f32>)>,
    /// The columns' names, with their encodings.
    columns: Vec<(String, Encoding)>,
}

const COLUMNS: [(&str, Encoding); 4] = [
    ("momentum_buffer", Encoding::Bf16),
    ("exp_avg", Encoding::Blocks { signed: true }),
    ("exp_avg_sq", Encoding::Blocks { signed: false }),
    ("master_param", Encoding::Compact),
];

fn make(path: &Path, shape: &[u64], cuts: &[u64], turned: bool, seed: u64) -> Made {
    let elements = volume(shape).unwrap();
    let mut order: Vec<usize> = (0..shape.len()).collect();
    if turned {
        order.rotate_left(1);
    }
    let masters: Vec<f32> = (0..elements).map(|i| value(i, seed)).collect();
    let weights: Vec<u8> = masters.iter().flat_map(|&master| to_bf16(master).to_le_bytes()).collect();
    let (mut entries, mut tensors, mut expected) = (Vec::new(), Vec::new(), Vec::new());
    let weight_boxes = tiles(shape, &cuts.iter().map(|cut| cut + 1).collect::<Vec<_>>());
    let plain: Vec<usize> = (0..shape.len()).collect();
    let mut whole = Tensor { dtype: "BF16".into(), shape: shape.to_vec(), chunks: Vec::new(), weight: None };
    for extent in weight_boxes {
        let data = region(&cut(&weights, 2, shape, &extent, &plain));
        entries.push(FileEntry {
            name: format!("w{}", entries.len()),
            dtype: "BF16".into(),
            shape: extent.shape.clone(),
            data,
        });
        whole.chunks.push(StoredChunk::plain(extent, 0, entries.len() as u64 - 1, 0));
    }
    tensors.push(("model.w".to_owned(), whole));
    for (column, encoding) in COLUMNS {
        let name = format!("optimizer.state.w.{column}");
        let values: Vec<f32> = match encoding {
            Encoding::Compact => masters.clone(),
            Encoding::Blocks { signed: false } => (0..elements).map(|i| value(i, seed + 1).abs()).collect(),
            _ => (0..elements).map(|i| value(i, seed + 2)).collect(),
        };
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut kept = vec![0f32; elements as usize];
        let mut tensor = Tensor { dtype: "F32".into(), shape: shape.to_vec(), chunks: Vec::new(), weight: None };
        tensor.weight = (encoding == Encoding::Compact).then(|| "model.w".to_owned());
        for extent in tiles(shape, cuts) {
            let numbers = floats(&cut(&bytes, 4, shape, &extent, &order));
            let beside = cut(&weights, 2, shape, &extent, &order);
            let (mut first, mut second) = (Vec::new(), Vec::new());
            encoding.encode(&numbers, &beside, &mut first, &mut second);
            let mut decoded = Vec::new();
            encoding.decode(&first, 0, (&second, 0), &beside, &mut decoded);
            // Back to where the box is in the tensor.
            let index = (0..elements).flat_map(|i| (i as f32).to_le_bytes()).collect::<Vec<_>>();
            for (at, number) in floats(&cut(&index, 4, shape, &extent, &order)).into_iter().zip(floats(&decoded)) {
                kept[at as usize] = number;
            }
            let ordered: Vec<u64> = order.iter().map(|&dim| extent.shape[dim]).collect();
            let mut chunk = StoredChunk::plain(extent, 0, entries.len() as u64, 0);
            chunk.encoding = Some(encoding.name().into());
            chunk.order = turned.then(|| order.clone());
            for (part, (data, (dtype, shape))) in [first, second].iter().zip(encoding.parts(&ordered)).enumerate() {
                if part == 1 {
                    chunk.beside = Some(FileRange { file: 0, begin: entries.len() as u64, end: 0 });
                }
                let name = format!("{name}{}:{part}", entries.len());
                entries.push(FileEntry { name, dtype: dtype.into(), shape, data: region(data) });
            }
            tensor.chunks.push(chunk);
        }
        expected.push((name.clone(), kept));
        tensors.push((name, tensor));
    }
    // Chunks have the number of their entry so far; a file gives it its place.
    let saving = Saving::begin(path).unwrap();
    let options = WriteOptions { block_bytes: 4096, file_bytes: 3000, threads: 3, ..WriteOptions::default() };
    let written = write_files(saving.folder(), "0-", &entries, &options, &AtomicU64::new(0)).unwrap();
    let mut places = vec![FileRange { file: 0, begin: 0, end: 0 }; entries.len()];
    for (number, file) in written.iter().enumerate() {
        file.entries.iter().for_each(|&(entry, begin, end)| places[entry] = FileRange { file: number, begin, end });
    }
    for chunk in tensors.iter_mut().flat_map(|(_, tensor)| &mut tensor.chunks) {
        let FileRange { file, begin, end } = places[chunk.begin as usize].clone();
        (chunk.file, chunk.begin, chunk.end) = (file, begin, end);
        if let Some(beside) = &mut chunk.beside {
            *beside = places[beside.begin as usize].clone();
        }
    }
    let manifest = Manifest {
        block_bytes: options.block_bytes,
        files: written.into_iter().map(|file| file.record).collect(),
        tensors: tensors.into_iter().collect(),
        encodings: Encoding::ALL.map(|encoding| (encoding.name().to_owned(), encoding.record())).into(),
        ..Manifest::default()
    };
    saving.commit(&manifest, None).unwrap();
    let columns = COLUMNS.map(|(column, encoding)| (format!("optimizer.state.w.{column}"), encoding)).to_vec();
    Made { shape: shape.to_vec(), expected, columns }
}

/// A box of a tensor as f32, row by row, in memory with gaps.
fn read(checkpoint: &Checkpoint, name: &str, wanted: &TensorBox, threads: usize) -> crate::error::Result<Vec<f32>> {
    let tensor = &checkpoint.manifest().tensors[name];
    // A gap behind each row, and dimensions in the opposite order.
    let mut strides = vec![0; wanted.shape.len()];
    let mut next = 1;
    for (stride, side) in strides.iter_mut().zip(&wanted.shape) {
        *stride = next;
        next = next * side.max(&1) + 1;
    }
    let memory = Buffer::pageable(4 * next).unwrap();
    let mut requests = Vec::new();
    for (number, chunk) in tensor.chunks.iter().enumerate().filter(|(_, chunk)| chunk.extent.overlaps(wanted)) {
        let (mut part, mut begin) = (chunk.extent.clone(), 0);
        for (dim, stride) in strides.iter().enumerate() {
            let (ours, theirs) = (wanted.offsets[dim], chunk.extent.offsets[dim]);
            let from = ours.max(theirs);
            let to = (ours + wanted.shape[dim]).min(theirs + chunk.extent.shape[dim]);
            (part.offsets[dim], part.shape[dim]) = (from - theirs, to - from);
            begin += (from - ours) * stride;
        }
        let bytes = checkpoint.bytes_into(name, number, None, &part.shape, &strides)?;
        let into = memory.region(4 * begin, bytes).unwrap();
        requests.push(Request { tensor: name.into(), chunk: number, part, into, strides: strides.clone(), kept: None });
    }
    checkpoint.read(&requests, threads, &AtomicU64::new(0))?;
    let mut bytes = Vec::new();
    file::visit(&memory.all(), |piece| bytes.extend_from_slice(piece)).unwrap();
    let all = floats(&bytes);
    let dense = row_major(&wanted.shape);
    let at = |i: u64| -> u64 { (0..dense.len()).map(|d| i / dense[d] % wanted.shape[d] * strides[d]).sum() };
    Ok((0..volume(&wanted.shape).unwrap()).map(|i| all[at(i) as usize]).collect())
}

fn check(checkpoint: &Checkpoint, made: &Made, wanted: &TensorBox) {
    for (name, whole) in &made.expected {
        let bytes: Vec<u8> = whole.iter().flat_map(|value| value.to_le_bytes()).collect();
        let order: Vec<usize> = (0..made.shape.len()).collect();
        let expected = floats(&cut(&bytes, 4, &made.shape, wanted, &order));
        let found = read(checkpoint, name, wanted, 3).unwrap();
        let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same && found.len() == expected.len(), "{name} {wanted:?}: {found:?} instead of {expected:?}");
    }
}

fn problems(checkpoint: &Checkpoint) -> Vec<String> {
    verify(checkpoint, &AtomicU64::new(0)).unwrap().iter().map(ToString::to_string).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: forebay_device::testing::kinds::cases(200), failure_persistence: None, ..ProptestConfig::default() })]

    /// Every box of every encoding is read as its elements were kept, whatever the tiling and the order of the memory.
    #[test]
    fn boxes_are_read_as_they_were_kept(
        dims in prop::collection::vec((1u64..40, 0u64..40, 0u64..1000, 0u64..1000), 1..4),
        turned in any::<bool>(),
        seed in 0u64..100,
    ) {
        let folder = Folder::new();
        let shape: Vec<u64> = dims.iter().map(|dim| dim.0).collect();
        let made = make(&folder.0, &shape, &dims.iter().map(|dim| dim.1).collect::<Vec<_>>(), turned, seed);
        let checkpoint = Checkpoint::open(&folder.0).unwrap();
        let offsets: Vec<u64> = dims.iter().map(|dim| dim.2 % dim.0).collect();
        let lengths = dims.iter().zip(&offsets).map(|(dim, offset)| dim.3 % (dim.0 - offset) + 1).collect();
        check(&checkpoint, &made, &TensorBox::whole(&shape));
        check(&checkpoint, &made, &TensorBox { offsets, shape: lengths });
        prop_assert_eq!(problems(&checkpoint), Vec::<String>::new());
    }
}

/// The bytes that a part has come as they are, for a box that an optimizer has itself.
#[test]
fn parts_are_read_as_they_are() {
    let folder = Folder::new();
    let made = make(&folder.0, &[30, 20], &[11, 20], true, 1);
    let checkpoint = Checkpoint::open(&folder.0).unwrap();
    let manifest = checkpoint.manifest();
    for (name, encoding) in &made.columns {
        let tensor = &manifest.tensors[name];
        for (number, chunk) in tensor.chunks.iter().enumerate() {
            let parts = manifest.parts(tensor, chunk).unwrap();
            assert_eq!(parts.len(), encoding.suffixes().len());
            for (kept, part) in parts.into_iter().enumerate() {
                let bytes = part.place.end - part.place.begin;
                let strides = row_major(&part.shape);
                assert_eq!(checkpoint.bytes_into(name, number, Some(kept), &part.shape, &strides).unwrap(), bytes);
                let into = Buffer::pageable(bytes).unwrap().all();
                let request = Request {
                    tensor: name.clone(),
                    chunk: number,
                    part: TensorBox::whole(&part.shape),
                    into: into.clone(),
                    strides,
                    kept: Some(kept),
                };
                checkpoint.read(&[request], 1, &AtomicU64::new(0)).unwrap();
                let mut found = Vec::new();
                file::visit(&into, |piece| found.extend_from_slice(piece)).unwrap();
                let file = fs::read(checkpoint.folder().join(&manifest.files[part.place.file].name)).unwrap();
                assert_eq!(found, file[part.place.begin as usize..part.place.end as usize]);
            }
        }
        let request = |kept| Request {
            tensor: name.clone(),
            chunk: 0,
            part: TensorBox::whole(&[1]),
            into: Buffer::pageable(1).unwrap().all(),
            strides: vec![1],
            kept,
        };
        assert!(checkpoint.read(&[request(Some(2))], 1, &AtomicU64::new(0)).is_err(), "there is no third part");
        assert!(checkpoint.read(&[request(None)], 1, &AtomicU64::new(0)).is_err(), "another box");
    }
}

fn change(state: StateFormat, master: MasterFormat) -> Change {
    Change { state: Some(state), master: Some(master) }
}

/// Formats become each other; what was encoded, widened and encoded again has the bytes that it had.
#[test]
fn formats_become_each_other() {
    let folder = Folder::new();
    for turned in [false, true] {
        let at = |name: &str| folder.0.join(format!("{name}-{turned}"));
        let made = make(&at("made"), &[30, 40], &[7, 40], turned, 5);
        let first = Checkpoint::open(&at("made")).unwrap();
        let whole = TensorBox::whole(&made.shape);
        let moved = AtomicU64::new(0);

        let plain = reencode(&first, &at("plain"), change(StateFormat::F32, MasterFormat::F32), &moved).unwrap();
        assert_eq!((plain.bytes, moved.load(Relaxed)), (1200 * (4 * 4 + 2), 1200 * (4 * 4 + 2)));
        assert_eq!(plain.formats, [("f32".to_owned(), 4)].into());
        let plain = Checkpoint::open(&at("plain")).unwrap();
        assert_eq!((problems(&plain), plain.manifest().encodings.len()), (vec![], 0));
        check(&plain, &made, &whole);

        // To 8 bits: what was so before comes back, if its blocks are of the same elements.
        let small = reencode(&plain, &at("small"), change(StateFormat::Blocks, MasterFormat::Compact), &moved).unwrap();
        assert_eq!(small.formats, [("8bit".to_owned(), 3), ("compact".to_owned(), 1)].into());
        let small = Checkpoint::open(&at("small")).unwrap();
        assert_eq!(problems(&small), Vec::<String>::new());
        let same = if turned { vec!["master_param"] } else { vec!["exp_avg", "exp_avg_sq", "master_param"] };
        for name in same.iter().map(|column| format!("optimizer.state.w.{column}")) {
            let expected = &made.expected.iter().find(|(of, _)| *of == name).unwrap().1;
            assert_eq!(&read(&small, &name, &whole, 2).unwrap(), expected, "{name}");
            assert!(small.manifest().tensors[&name].chunks.iter().all(|chunk| chunk.encoding.is_some()));
        }

        // Nothing said, nothing changed.
        let same = reencode(&first, &at("same"), Change::default(), &moved).unwrap();
        assert_eq!(same.bytes, same.bytes_before);
        let same = Checkpoint::open(&at("same")).unwrap();
        assert_eq!(problems(&same), Vec::<String>::new());
        check(&same, &made, &whole);
        assert_eq!(
            same.manifest().tensors.keys().collect::<Vec<_>>(),
            first.manifest().tensors.keys().collect::<Vec<_>>()
        );

        // One plain file has numbers.
        let target = at("all").with_extension("safetensors");
        to_safetensors(&first, &target, &moved).unwrap();
        let back = at("back");
        from_safetensors(&target, &back, &moved).unwrap();
        check(&Checkpoint::open(&back).unwrap(), &made, &whole);
    }
}

#[test]
fn a_conversion_that_cannot_be_done_leaves_nothing() {
    let folder = Folder::new();
    make(&folder.0.join("made"), &[30, 40], &[30, 40], false, 5);
    let to = folder.0.join("to");
    let opened = Checkpoint::open(&folder.0.join("made")).unwrap();
    let moved = AtomicU64::new(0);
    let plain = folder.0.join("plain");
    reencode(&opened, &plain, change(StateFormat::F32, MasterFormat::F32), &moved).unwrap();
    let mut plain = Checkpoint::open(&plain).unwrap();
    // Damage anywhere is found on the way.
    for file in &opened.manifest().files {
        let path = opened.folder().join(&file.name);
        let whole = fs::read(&path).unwrap();
        let mut damaged = whole.clone();
        *damaged.last_mut().unwrap() ^= 1;
        fs::write(&path, damaged).unwrap();
        let refused =
            reencode(&opened, &to, change(StateFormat::F32, MasterFormat::F32), &moved).unwrap_err().to_string();
        assert!(refused.contains("damaged") && refused.contains(&file.name), "{refused}");
        assert!(latest(&to).is_err() && fs::read_dir(&to).unwrap().all(|entry| entry.unwrap().path().is_file()));
        fs::write(&path, whole).unwrap();
    }
    assert!(reencode(&opened, &to, change(StateFormat::F32, MasterFormat::F32), &moved).is_ok());
    // A compact master needs its weight.
    plain.forget("model.w");
    let refused =
        reencode(&plain, &to, change(StateFormat::F32, MasterFormat::Compact), &moved).unwrap_err().to_string();
    assert!(refused.contains("\"optimizer.state.w.master_param\" cannot be a compact master"), "{refused}");
}

/// Scales that no encoding writes are found, though their checksums are right.
#[test]
fn verify_looks_at_scales() {
    for bits in [f32::INFINITY.to_bits(), (-1f32).to_bits(), 1, 0x8000_0000] {
        let folder = Folder::new();
        make(&folder.0, &[30, 40], &[30, 40], false, 5);
        let opened = Checkpoint::open(&folder.0).unwrap();
        let mut manifest = opened.manifest().clone();
        let beside = manifest.tensors["optimizer.state.w.exp_avg"].chunks[0].beside.clone().unwrap();
        let path = opened.folder().join(&manifest.files[beside.file].name);
        let mut bytes = fs::read(&path).unwrap();
        bytes[beside.begin as usize + 4..beside.begin as usize + 8].copy_from_slice(&bits.to_le_bytes());
        manifest.files[beside.file].blocks = bytes.chunks(4096).map(crc32fast::hash).collect();
        fs::write(&path, bytes).unwrap();
        let text = manifest.encode(Path::new("m")).unwrap();
        fs::write(opened.folder().join(MANIFEST), text).unwrap();
        let found = problems(&Checkpoint::open(&folder.0).unwrap());
        let expected = "optimizer.state.w.exp_avg\": block 1 of its elements has the scale";
        assert!(found.len() == 1 && found[0].contains(expected), "{found:?}");
    }
}

#[test]
fn a_summary_has_formats_and_bytes() {
    let folder = Folder::new();
    make(&folder.0, &[30, 40], &[30, 40], false, 5);
    let summary = summarise(&Checkpoint::open(&folder.0).unwrap()).unwrap();
    let about: Vec<_> = summary.tensors.iter().map(|of| (of.name.as_str(), of.bytes, of.format.as_deref())).collect();
    assert_eq!(
        about,
        [
            ("model.w", 2400, None),
            ("optimizer.state.w.exp_avg", 1200 + 20, Some("8bit")),
            ("optimizer.state.w.exp_avg_sq", 1200 + 20, Some("8bit")),
            ("optimizer.state.w.master_param", 2400 + 150, Some("compact")),
            ("optimizer.state.w.momentum_buffer", 2400, Some("bf16")),
        ]
    );
    assert_eq!(summary.tensor_bytes, 2400 * 3 + 150 + 2 * 1220);
}
