//! AdamW problems for the tests of the update: operands laid out in a few buffers with guard bytes between them, and
//! the results that the written arithmetic gives, computed one element at a time.

use forebay_device::arith::{AdamWElement, AdamWScalars, adamw_element};
use forebay_device::{AdamW, AdamWSegment, Buffer, Dtype, HostThreads, HostUpdate, Kernel, Region};
use half::{bf16, f16};

use crate::bench::Subject;

pub(crate) const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// The operands of a segment, in the order in which [`Problem`] keeps them.
const PARAM: usize = 0;
const GRAD: usize = 1;
const MOMENT: usize = 2;
const SQUARE: usize = 3;
const LARGEST: usize = 4;
const MASTER: usize = 5;

/// What a segment is to be like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) elements: usize,
    pub(crate) param: Dtype,
    pub(crate) grad: Dtype,
    pub(crate) master: bool,
    pub(crate) amsgrad: bool,
    pub(crate) scalars: u32,
    /// Starts one element after an aligned address.
    pub(crate) shifted: bool,
}

impl Shape {
    pub(crate) fn plain(elements: usize) -> Self {
        let (param, grad) = (Dtype::F32, Dtype::F32);
        Self { elements, param, grad, master: false, amsgrad: false, scalars: 0, shifted: false }
    }

    fn dtype(&self, operand: usize) -> Dtype {
        match operand {
            PARAM => self.param,
            GRAD => self.grad,
            _ => Dtype::F32,
        }
    }

    fn has(&self, operand: usize) -> bool {
        match operand {
            LARGEST => self.amsgrad,
            MASTER => self.master,
            _ => true,
        }
    }
}

/// The f32 values of one element before the step: parameter, gradient, moments, largest moment, master.
pub(crate) type Values = [f32; 6];

fn narrow(value: f32, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => value.to_ne_bytes().into(),
        Dtype::Bf16 => bf16::from_f32(value).to_ne_bytes().into(),
        Dtype::F16 => f16::from_f32(value).to_ne_bytes().into(),
    }
}

fn widen(bytes: &[u8], dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => f32::from_ne_bytes(bytes.try_into().unwrap()),
        Dtype::Bf16 => bf16::from_ne_bytes(bytes.try_into().unwrap()).to_f32(),
        Dtype::F16 => f16::from_ne_bytes(bytes.try_into().unwrap()).to_f32(),
    }
}

/// The same number: the same bits, or a NaN each, whose payload is free.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Segments and everything they touch, as the host knows it.
#[derive(Clone)]
pub(crate) struct Problem {
    /// One image per operand kind, guard bytes included.
    images: [Vec<u8>; 6],
    /// Where each segment's operands start in the images.
    segments: Vec<(Shape, [usize; 6])>,
    pub(crate) scalars: Vec<AdamWScalars>,
}

impl Problem {
    pub(crate) fn new(scalars: &[AdamWScalars], shapes: &[Shape], values: impl Fn(usize, usize) -> Values) -> Self {
        let mut images: [Vec<u8>; 6] = std::array::from_fn(|_| vec![0xa5; 8]);
        let mut segments = Vec::with_capacity(shapes.len());
        for (index, shape) in shapes.iter().enumerate() {
            let mut starts = [0; 6];
            for operand in (0..6).filter(|&operand| shape.has(operand)) {
                let (image, dtype) = (&mut images[operand], shape.dtype(operand));
                let start = image.len().next_multiple_of(256) + usize::from(shape.shifted) * dtype.bytes() as usize;
                image.resize(start, 0xa5);
                for i in 0..shape.elements {
                    image.extend(narrow(values(index, i)[operand], dtype));
                }
                image.extend([0xa5; 8]);
                starts[operand] = start;
            }
            segments.push((*shape, starts));
        }
        Self { images, segments, scalars: scalars.to_vec() }
    }

    fn value(&self, segment: usize, operand: usize, i: usize) -> f32 {
        let (shape, starts) = &self.segments[segment];
        let (dtype, width) = (shape.dtype(operand), shape.dtype(operand).bytes() as usize);
        let at = starts[operand] + i * width;
        widen(&self.images[operand][at..at + width], dtype)
    }

    pub(crate) fn param(&self, segment: usize, i: usize) -> f32 {
        self.value(segment, PARAM, i)
    }

    fn set(&mut self, segment: usize, operand: usize, i: usize, bytes: &[u8]) {
        let at = self.segments[segment].1[operand] + i * bytes.len();
        self.images[operand][at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// The step on the host.
    pub(crate) fn step(&mut self, scale: f32) {
        for segment in 0..self.segments.len() {
            let shape = self.segments[segment].0;
            let s = self.scalars[shape.scalars as usize];
            for i in 0..shape.elements {
                let value = |operand| self.value(segment, operand, i);
                // A master counts where the parameter is its rounding.
                let follows = |master: f32| narrow(master, shape.param) == narrow(value(PARAM), shape.param);
                let old = AdamWElement {
                    p: if shape.master && follows(value(MASTER)) { value(MASTER) } else { value(PARAM) },
                    m: value(MOMENT),
                    v: value(SQUARE),
                    x: if shape.amsgrad { value(LARGEST) } else { 0.0 },
                };
                let new = adamw_element(old, value(GRAD), scale, shape.amsgrad, &s);
                self.set(segment, PARAM, i, &narrow(new.p, shape.param));
                for (operand, value) in [(MOMENT, new.m), (SQUARE, new.v), (LARGEST, new.x), (MASTER, new.p)] {
                    if shape.has(operand) {
                        self.set(segment, operand, i, &value.to_ne_bytes());
                    }
                }
            }
        }
    }

    pub(crate) fn upload(&self, on: &Subject) -> OnDevice {
        OnDevice { buffers: self.images.each_ref().map(|image| on.upload(image)) }
    }

    fn regions(&self, memory: &[Region; 6]) -> Vec<AdamWSegment> {
        let segment = |(shape, starts): &(Shape, [usize; 6])| {
            let region = |operand: usize| -> Region {
                let bytes = shape.elements as u64 * shape.dtype(operand).bytes();
                memory[operand].slice(starts[operand] as u64, bytes).unwrap()
            };
            AdamWSegment {
                param: region(PARAM),
                param_dtype: shape.param,
                grad: region(GRAD),
                grad_dtype: shape.grad,
                exp_avg: region(MOMENT),
                exp_avg_sq: region(SQUARE),
                max_exp_avg_sq: shape.amsgrad.then(|| region(LARGEST)),
                master: shape.master.then(|| region(MASTER)),
                scalars: shape.scalars,
            }
        };
        self.segments.iter().map(segment).collect()
    }

    /// One launch over all segments, brought to its end.
    pub(crate) fn launch(&self, on: &Subject, device: &OnDevice, grad_scale: Option<Region>, skip: Option<Region>) {
        let (stream, segments) = (on.stream("update").unwrap(), self.regions(&device.regions()));
        let step = AdamW { segments: &segments, scalars: &self.scalars, grad_scale, skip };
        on.launch(&stream, &Kernel::AdamW(step)).unwrap();
        on.finish(&stream).unwrap();
    }

    /// The same on the host's threads: over copies of what is on the device, which go back there.
    pub(crate) fn update_on_host(&self, on: &Subject, device: &OnDevice, threads: &HostThreads, grad_scale: f32) {
        let homes = device.regions().map(|region| {
            let home = on.pinned(region.bytes());
            on.write(&on.download(&region), &home).unwrap();
            home
        });
        let (segments, scalars) = (self.regions(&homes), self.scalars.as_slice().into());
        let update = HostUpdate { segments, scalars, grad_scale, follow_weights: true };
        let work = on.update_on_host(threads, update).unwrap();
        on.finish_on_host(work).unwrap();
        for (home, region) in homes.iter().zip(device.regions()) {
            on.put(&on.host_bytes(home), &region);
        }
    }

    /// Every element is what this problem says, and so is every byte between them.
    pub(crate) fn expect(&self, on: &Subject, device: &OnDevice, what: &str) {
        let mut got = self.clone();
        got.images = device.buffers.each_ref().map(|buffer| on.download(&buffer.all()));
        for segment in 0..self.segments.len() {
            let shape = self.segments[segment].0;
            for operand in (0..6).filter(|&operand| shape.has(operand)) {
                for i in 0..shape.elements {
                    let (want, found) = (self.value(segment, operand, i), got.value(segment, operand, i));
                    assert!(
                        same(want, found),
                        "{what}: operand {operand} of segment {segment} at {i} is {found:e} ({:#x}), not {want:e} \
                         ({:#x}): {shape:?}",
                        found.to_bits(),
                        want.to_bits()
                    );
                }
                // Equal but for the payloads of NaNs; made equal, so that what is left to compare is the rest.
                let start = self.segments[segment].1[operand];
                let range = start..start + shape.elements * shape.dtype(operand).bytes() as usize;
                got.images[operand][range.clone()].copy_from_slice(&self.images[operand][range]);
            }
        }
        for operand in 0..6 {
            assert!(got.images[operand] == self.images[operand], "{what}: bytes beside operand {operand} changed");
        }
    }
}

/// The images on a device.
pub(crate) struct OnDevice {
    buffers: [Buffer; 6],
}

impl OnDevice {
    fn regions(&self) -> [Region; 6] {
        self.buffers.each_ref().map(Buffer::all)
    }
}
