//! Weights and the masters that they are roundings of: telling whether they are, and writing them anew.

use forebay_device::{Buffer, Dtype, Error, Kernel, Mastered, Region};
use half::{bf16, f16};

use crate::bench::{Subject, random};

forebay_device::on_devices! {
    every:
        weights_become_the_roundings_of_their_masters,
        one_weight_that_is_another_is_told,
        masters_refuse_what_does_not_fit;
}

pub(crate) const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// Masters of all sizes, halfway between two weights, and none that is no number: what that becomes is the device's.
pub(crate) fn masters(seed: u64, elements: usize) -> Vec<f32> {
    let special = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 1e-40, -1e-8, 65519.0, 65520.0, 3e38, f32::MAX];
    let value = |i: usize| match i % 17 {
        0 => special[i / 17 % special.len()],
        // The low bits are exactly half of a unit, or next to it.
        1..4 => f32::from_bits(0x3f80_7fff + (i % 3) as u32 + ((i as u32 & 0xff) << 16)),
        _ => f32::from_bits(random(seed, i as u64) as u32 & 0x7f7f_ffff | (i as u32 & 1) << 31),
    };
    (0..elements).map(value).collect()
}

/// Their roundings.
pub(crate) fn rounded(dtype: Dtype, masters: &[f32]) -> Vec<u8> {
    let round = |&master: &f32| match dtype {
        Dtype::F32 => master.to_ne_bytes().to_vec(),
        Dtype::Bf16 => bf16::from_f32(master).to_ne_bytes().to_vec(),
        Dtype::F16 => f16::from_f32(master).to_ne_bytes().to_vec(),
    };
    masters.iter().flat_map(round).collect()
}

fn bytes(masters: &[f32]) -> Vec<u8> {
    masters.iter().flat_map(|master| master.to_ne_bytes()).collect()
}

/// Pairs of these types and sizes on a device, with a gap behind each weight.
struct Pairs {
    weights: Vec<(Buffer, Vec<u8>)>,
    pairs: Vec<Mastered>,
}

impl Pairs {
    fn new(on: &Subject, shapes: &[(Dtype, usize)]) -> Self {
        let (mut weights, mut pairs) = (Vec::new(), Vec::new());
        for (i, &(dtype, elements)) in shapes.iter().enumerate() {
            let values = masters(i as u64, elements);
            let (expected, len) = (rounded(dtype, &values), elements as u64 * dtype.bytes());
            // At an odd element, so that nothing is aligned by chance.
            let buffer = on.upload(&vec![0x5a; len as usize + 64]);
            let weight = buffer.region(dtype.bytes(), len).unwrap();
            let master = on.upload(&[bytes(&values), vec![0; 8]].concat());
            pairs.push(Mastered { weight, dtype, master: master.region(0, elements as u64 * 4).unwrap() });
            weights.push((buffer, expected));
        }
        Self { weights, pairs }
    }

    fn round(&self, on: &Subject) {
        let [stream] = on.streams(["round"]);
        on.launch(&stream, &Kernel::RoundMasters { pairs: &self.pairs }).unwrap();
        on.finish(&stream).unwrap();
    }

    /// Whether a weight differs from its master's rounding, as the device says; nothing else changes.
    fn differ(&self, on: &Subject) -> bool {
        let [stream] = on.streams(["compare"]);
        let flag = on.upload(&[7.0f32, 0.0, 7.0].map(f32::to_ne_bytes).concat());
        let before: Vec<_> = self.weights.iter().map(|(buffer, _)| on.download(&buffer.all())).collect();
        let kernel = Kernel::CompareMasters { pairs: &self.pairs, differ: flag.region(4, 4).unwrap() };
        on.launch(&stream, &kernel).unwrap();
        on.finish(&stream).unwrap();
        let after: Vec<_> = self.weights.iter().map(|(buffer, _)| on.download(&buffer.all())).collect();
        assert!(before == after, "weights have changed");
        let words: Vec<f32> =
            on.download(&flag.all()).chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect();
        assert_eq!((words[0], words[2]), (7.0, 7.0));
        assert!(words[1] == 0.0 || words[1] == 1.0, "{}", words[1]);
        words[1] == 1.0
    }
}

/// Around the width of a block, several blocks, of one type and mixed, and more pairs than a launch takes.
fn shapes() -> Vec<Vec<(Dtype, usize)>> {
    let sizes = [1usize, 0, 5, 255, 257, 4095, 4096, 4097, 20_001];
    let mut shapes: Vec<Vec<_>> = DTYPES.map(|dtype| sizes.map(|elements| (dtype, elements)).to_vec()).to_vec();
    shapes.push(sizes.iter().flat_map(|&elements| DTYPES.map(|dtype| (dtype, elements))).collect());
    shapes.push((0..400).map(|i| (Dtype::Bf16, i % 9)).collect());
    shapes.push(Vec::new());
    shapes
}

fn weights_become_the_roundings_of_their_masters(on: &Subject) {
    for shapes in shapes() {
        let pairs = Pairs::new(on, &shapes);
        let any = shapes.iter().any(|(_, elements)| *elements > 0);
        assert_eq!(pairs.differ(on), any, "{shapes:?}");
        pairs.round(on);
        for ((buffer, expected), (pair, shape)) in pairs.weights.iter().zip(pairs.pairs.iter().zip(&shapes)) {
            let (all, start) = (on.download(&buffer.all()), pair.dtype.bytes() as usize);
            let (before, rest) = all.split_at(start);
            let (weights, behind) = rest.split_at(expected.len());
            assert!(weights == expected, "{shape:?}");
            assert!(before.iter().chain(behind).all(|&byte| byte == 0x5a), "{shape:?}: bytes beside it changed");
        }
        assert!(!pairs.differ(on), "{shapes:?}");
    }
}

fn one_weight_that_is_another_is_told(on: &Subject) {
    for dtype in DTYPES {
        for (elements, at) in [(1usize, 0usize), (5, 4), (4097, 4096), (4096, 0), (20_001, 12_345)] {
            let pairs = Pairs::new(on, &[(dtype, 300), (dtype, elements), (dtype, 70)]);
            pairs.round(on);
            assert!(!pairs.differ(on));
            let width = dtype.bytes();
            let place = pairs.pairs[1].weight.slice(at as u64 * width, width).unwrap();
            let mut weight = on.download(&place);
            // The lowest bit.
            weight[0] ^= 1;
            on.put(&weight, &place);
            assert!(pairs.differ(on), "{dtype:?}: {at} of {elements}");
        }
    }
}

fn masters_refuse_what_does_not_fit(on: &Subject) {
    let [stream] = on.streams(["refused"]);
    let (device, host) = (on.upload(&[0; 64]), on.pinned(64));
    let at = |offset, len| device.region(offset, len).unwrap();
    let refused = |weight: Region, master: Region, differ: Region| {
        let pairs = [Mastered { weight, dtype: Dtype::Bf16, master }];
        let compare = Kernel::CompareMasters { pairs: &pairs, differ };
        assert!(matches!(on.launch(&stream, &compare), Err(Error::BadOperands { .. })), "{compare:?}");
    };
    on.launch(
        &stream,
        &Kernel::CompareMasters {
            pairs: &[Mastered { weight: at(0, 4), dtype: Dtype::Bf16, master: at(8, 8) }],
            differ: at(60, 4),
        },
    )
    .unwrap();
    on.finish(&stream).unwrap();
    refused(at(0, 4), at(8, 12), at(60, 4));
    refused(at(0, 3), at(8, 8), at(60, 4));
    refused(at(1, 4), at(8, 8), at(60, 4));
    refused(at(0, 4), at(6, 8), at(60, 4));
    refused(at(0, 4), at(0, 8), at(60, 4));
    refused(at(0, 4), at(8, 8), at(56, 8));
    refused(at(0, 4), host.slice(0, 8).unwrap(), at(60, 4));
    refused(at(0, 4), at(8, 8), host.slice(0, 4).unwrap());
}
