//! Values of every type as bytes, and several of them in one buffer on the device or on the host.

use forebay::device::kernel::uniform_element;
use forebay::device::{Dtype, Region};

use super::Subject;

pub(super) fn values(seed: usize, elements: u64, low: f32, high: f32) -> Vec<f32> {
    (0..elements).map(|i| uniform_element(seed as u64, i, low, high)).collect()
}

pub(super) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Values of a type that lie near these; cut off, not rounded, and no subnormals.
pub(super) fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let half = |value: f32| {
        let bits = value.to_bits();
        match dtype {
            Dtype::F16 => {
                let (sign, exponent) = ((bits >> 16 & 0x8000) as u16, (bits >> 23 & 0xff) as i32 - 112);
                if exponent <= 0 { sign } else { sign | (exponent as u16) << 10 | (bits >> 13 & 0x3ff) as u16 }
            }
            _ => (bits >> 16) as u16,
        }
    };
    match dtype {
        Dtype::F32 => bytes_of(values),
        Dtype::Bf16 | Dtype::F16 => values.iter().flat_map(|&value| half(value).to_le_bytes()).collect(),
    }
}

/// The inverse of [`encode`].
pub(super) fn widen(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let half = |pair: &[u8]| u32::from(u16::from_le_bytes([pair[0], pair[1]]));
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| f32::from_bits(half(b) << 16)).collect(),
        Dtype::F16 => bytes
            .chunks_exact(2)
            .map(half)
            .map(|h| {
                let magnitude = if h & 0x7c00 == 0 { 0 } else { ((h >> 10 & 0x1f) + 112) << 23 | (h & 0x3ff) << 13 };
                f32::from_bits((h & 0x8000) << 16 | magnitude)
            })
            .collect(),
    }
}

/// Several byte strings in one buffer, aligned to their elements and to no more, as slices of tensors are.
pub(super) struct Packed {
    bytes: Vec<u8>,
    memory: Region,
    pub(super) regions: Vec<Region>,
}

impl Packed {
    pub(super) fn new(on: &Subject, parts: &[(Vec<u8>, u64)], on_host: bool) -> Self {
        let (mut bytes, mut places) = (Vec::new(), Vec::new());
        for (i, (part, width)) in parts.iter().enumerate() {
            bytes.resize(bytes.len().next_multiple_of(64) + (*width as usize) * (i % 5), 0);
            places.push((bytes.len() as u64, part.len() as u64));
            bytes.extend_from_slice(part);
        }
        bytes.push(0);
        let size = bytes.len() as u64;
        let memory = if on_host { on.pinned(size) } else { on.alloc(size).unwrap().all() };
        let regions = places.iter().map(|&(offset, len)| memory.slice(offset, len).unwrap()).collect();
        let packed = Self { bytes, memory, regions };
        packed.reset(on);
        packed
    }

    /// The bytes as they were at first; the host has seen the end of all other work on them.
    pub(super) fn reset(&self, on: &Subject) {
        if self.memory.place().is_host() {
            on.write(&self.bytes, &self.memory).unwrap();
        } else {
            on.put(&self.bytes, &self.memory);
        }
    }

    pub(super) fn download(&self, on: &Subject) -> Vec<Vec<u8>> {
        let memory = &self.memory;
        let bytes = if memory.place().is_host() { on.host_bytes(memory).unwrap() } else { on.download(memory) };
        let range = |region: &Region| {
            let start = (region.offset_bytes() - memory.offset_bytes()) as usize;
            start..start + region.bytes() as usize
        };
        self.regions.iter().map(|region| bytes[range(region)].to_vec()).collect()
    }
}

/// The same bytes in both places; each tensor uses its own.
pub(super) struct Placed {
    pub(super) places: [Packed; 2],
}

impl Placed {
    pub(super) fn new(on: &Subject, parts: &[(Vec<u8>, u64)]) -> Self {
        Self { places: [false, true].map(|on_host| Packed::new(on, parts, on_host)) }
    }

    pub(super) fn region(&self, part: usize, on_host: bool) -> Region {
        self.places[usize::from(on_host)].regions[part].clone()
    }

    /// The parts as they are, each from where its user has it.
    pub(super) fn download(&self, on: &Subject, on_host: &[bool]) -> Vec<Vec<u8>> {
        let [device, host] = self.places.each_ref().map(|place| place.download(on));
        let both = device.into_iter().zip(host).zip(on_host);
        both.map(|((device, host), &on_host)| if on_host { host } else { device }).collect()
    }
}
