//! Problems for the tests of updates: operands laid out in a few buffers with guard bytes between them, and the results
//! that a rule's arithmetic gives, computed one element at a time.

use std::ops::Range;

use forebay_device::kernel::uniform_element;
use forebay_device::update::format::{bf16_at_random, random, scale_of};
use forebay_device::update::master::{join, split};
use forebay_device::update::{BLOCK, MASTER_CARRY, MASTER_LOW, MAX_COLUMNS, MAXIMIZE};
use forebay_device::{
    Buffer, Dtype, HostThreads, HostUpdate, Kernel, Master, MasterFormat, Moment, Region, Rule, Scalars, Segment,
    StateFormat, Update,
};
use half::{bf16, f16};

use crate::bench::Subject;

pub(crate) const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// The types of weight and gradient, all nine pairs of them.
pub(crate) fn dtype_pairs() -> impl Iterator<Item = (Dtype, Dtype)> {
    DTYPES.into_iter().flat_map(|weight| DTYPES.map(|grad| (weight, grad)))
}

/// The operands of a segment, in the order in which [`Problem`] keeps them.
const WEIGHT: usize = 0;
const GRAD: usize = 1;
const STATE: Range<usize> = 2..2 + MAX_COLUMNS;
const MASTER: usize = STATE.end;
const LOW: usize = MASTER + 1;
const CARRY: usize = LOW + 1;
const SCALE: Range<usize> = CARRY + 1..CARRY + 1 + MAX_COLUMNS;
pub(crate) const OPERANDS: usize = SCALE.end;

/// The formats of a segment's columns, and the keys with which they are rounded.
pub(crate) type Formats = ([StateFormat; MAX_COLUMNS], Option<[u32; MAX_COLUMNS]>);

/// Formats of columns: each one alone and several together, rounded to nearest and at random.
pub(crate) const FORMATS: [Formats; 7] = {
    use StateFormat::{Bf16, Blocks, F32};
    const KEYS: Option<[u32; MAX_COLUMNS]> = Some([0x1234_5678, 0x9abc_def0, 7]);
    [
        ([F32, F32, F32], None),
        ([Bf16, Bf16, Bf16], None),
        ([Blocks, Blocks, Blocks], KEYS),
        ([Bf16, Blocks, F32], KEYS),
        ([Blocks, Blocks, Blocks], None),
        ([Blocks, F32, Bf16], None),
        ([Bf16, Bf16, Bf16], KEYS),
    ]
};

/// What a segment is to be like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) elements: usize,
    pub(crate) weight: Dtype,
    pub(crate) grad: Dtype,
    pub(crate) master: MasterFormat,
    /// A bit for each column of state.
    pub(crate) kept: u32,
    /// The index in its parameter of the first element.
    pub(crate) first: u64,
    pub(crate) scalars: u32,
    /// Starts one element after an aligned address.
    pub(crate) shifted: bool,
    pub(crate) formats: Formats,
}

impl Shape {
    /// All of a parameter of f32 with these columns.
    pub(crate) fn plain(elements: usize, kept: u32) -> Self {
        let (weight, grad) = (Dtype::F32, Dtype::F32);
        let (master, formats) = (MasterFormat::None, FORMATS[0]);
        Self { elements, weight, grad, master, kept, first: 0, scalars: 0, shifted: false, formats }
    }

    pub(crate) fn is_compact(&self) -> bool {
        self.master == MasterFormat::Compact
    }

    /// The format of a column that is there.
    fn format(&self, operand: usize) -> Option<StateFormat> {
        let is_there = STATE.contains(&operand) && self.has(operand);
        is_there.then(|| self.formats.0[operand - STATE.start])
    }

    /// Whether a column that is there is kept in fewer bits.
    pub(crate) fn is_packed(&self) -> bool {
        STATE.filter_map(|operand| self.format(operand)).any(|format| format != StateFormat::F32)
    }

    fn dtype(&self, operand: usize) -> Dtype {
        match operand {
            WEIGHT => self.weight,
            GRAD => self.grad,
            _ if self.format(operand) == Some(StateFormat::Bf16) => Dtype::Bf16,
            _ => Dtype::F32,
        }
    }

    /// Bytes of so many elements.
    fn bytes(&self, operand: usize, elements: usize) -> usize {
        (match operand {
            LOW => MASTER_LOW.bytes(elements as u64),
            CARRY => MASTER_CARRY.bytes(elements as u64),
            scale if SCALE.contains(&scale) => 4 * (elements as u64).div_ceil(BLOCK.into()),
            _ if self.format(operand) == Some(StateFormat::Blocks) => elements as u64,
            _ => self.dtype(operand).bytes() * elements as u64,
        }) as usize
    }

    fn has(&self, operand: usize) -> bool {
        match operand {
            WEIGHT | GRAD => true,
            MASTER => self.master == MasterFormat::F32,
            LOW | CARRY => self.is_compact(),
            scale if SCALE.contains(&scale) => {
                self.format(scale - SCALE.start + STATE.start) == Some(StateFormat::Blocks)
            }
            column => self.kept & 1 << (column - STATE.start) != 0,
        }
    }

    fn operands(self) -> impl Iterator<Item = usize> {
        (0..OPERANDS).filter(move |&operand| self.has(operand))
    }
}

/// The f32 values of one element before the step: weight, gradient, columns of state, master.
pub(crate) type Values = [f32; MASTER + 1];

/// Plausible training state: its values differ per segment, element and operand. Three weights in four are the rounding
/// of their master, the fourth is not.
pub(crate) fn plausible(segment: usize, element: usize) -> Values {
    let value =
        |operand: u64, low, high| uniform_element(1000 + 10 * segment as u64 + operand, element as u64, low, high);
    let master = value(5, -1.0, 1.0);
    [
        if element % 4 == 3 { value(0, -1.0, 1.0) } else { master },
        value(1, -0.5, 0.5),
        value(2, -0.1, 0.1),
        value(3, 0.0, 0.01),
        value(4, 0.0, 0.02),
        master,
    ]
}

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

/// What a launch may have besides its segments.
#[derive(Clone, Default)]
pub(crate) struct Flags {
    pub(crate) grad_scale: Option<Region>,
    pub(crate) skip: Option<Region>,
    pub(crate) followed: Option<Region>,
}

/// Segments and everything they touch, as the host knows it.
#[derive(Clone)]
pub(crate) struct Problem {
    rule: &'static Rule,
    /// One image per operand kind, guard bytes included.
    images: [Vec<u8>; OPERANDS],
    /// Where each segment's operands start in the images.
    segments: Vec<(Shape, [usize; OPERANDS])>,
    pub(crate) scalars: Vec<Scalars>,
    /// Whether masters count whatever their weights are.
    trust_master: bool,
}

impl Problem {
    pub(crate) fn new(
        rule: &'static Rule,
        scalars: &[Scalars],
        shapes: &[Shape],
        values: impl Fn(usize, usize) -> Values,
    ) -> Self {
        let mut images: [Vec<u8>; OPERANDS] = std::array::from_fn(|_| vec![0xa5; 8]);
        let mut segments = Vec::with_capacity(shapes.len());
        for shape in shapes {
            let mut starts = [0; OPERANDS];
            for operand in shape.operands() {
                let image = &mut images[operand];
                // In one half of the packed segments codes alone are moved, and all else is aligned.
                let codes_alone = shape.is_packed() && shape.elements % 2 == 1;
                let moves = shape.shifted && (!codes_alone || shape.format(operand) == Some(StateFormat::Blocks));
                let start = image.len().next_multiple_of(256) + usize::from(moves) * shape.bytes(operand, 1);
                image.resize(start, 0xa5);
                image.resize(start + shape.bytes(operand, shape.elements), 0);
                image.extend([0xa5; 8]);
                starts[operand] = start;
            }
            segments.push((*shape, starts));
        }
        let mut problem = Self { rule, images, segments, scalars: scalars.to_vec(), trust_master: false };
        for (segment, shape) in shapes.iter().enumerate() {
            let mut state: [Vec<f32>; MAX_COLUMNS] = Default::default();
            for i in 0..shape.elements {
                let values = values(segment, i);
                for operand in [WEIGHT, GRAD] {
                    problem.set(segment, operand, i, &narrow(values[operand], shape.dtype(operand)));
                }
                problem.set_master(segment, i, values[MASTER]);
                state.iter_mut().zip(&values[STATE]).for_each(|(column, value)| column.push(*value));
            }
            problem.set_state(segment, &state, None);
        }
        problem
    }

    /// Keeps the columns of a segment in their formats, rounded to nearest or with these keys.
    fn set_state(&mut self, segment: usize, state: &[Vec<f32>; MAX_COLUMNS], keys: Option<[u32; MAX_COLUMNS]>) {
        let shape = self.segments[segment].0;
        for (column, numbers) in state.iter().enumerate().filter(|(column, _)| shape.has(STATE.start + column)) {
            let operand = STATE.start + column;
            let random = |i: usize| keys.map(|keys| random(keys[column], (shape.first + i as u64) as u32));
            match shape.formats.0[column] {
                StateFormat::Bf16 if keys.is_some() => {
                    for (i, number) in numbers.iter().enumerate() {
                        let kept = bf16_at_random(*number, random(i).unwrap());
                        self.set(segment, operand, i, &kept.to_ne_bytes());
                    }
                }
                StateFormat::F32 | StateFormat::Bf16 => {
                    for (i, number) in numbers.iter().enumerate() {
                        self.set(segment, operand, i, &narrow(*number, shape.dtype(operand)));
                    }
                }
                StateFormat::Blocks => {
                    let code = self.rule.columns[column].code();
                    for (block, of_block) in numbers.chunks(BLOCK as usize).enumerate() {
                        let magnitudes = of_block.iter().map(|number| number.to_bits() & 0x7fff_ffff);
                        let (scale, inverse) = scale_of(magnitudes.max().unwrap());
                        self.set(segment, SCALE.start + column, block, &scale.to_ne_bytes());
                        for (i, number) in (block * BLOCK as usize..).zip(of_block) {
                            self.set(segment, operand, i, &[code.nearest(*number, inverse, random(i))]);
                        }
                    }
                }
            }
        }
    }

    /// The number in an operand; for a compact master, as the one that it was made from if its weight is still the same.
    fn value(&self, segment: usize, operand: usize, i: usize) -> f32 {
        let (shape, starts) = &self.segments[segment];
        match operand {
            MASTER if shape.is_compact() => {
                let weight = bf16::from_f32(self.value(segment, WEIGHT, i)).to_bits();
                let carry = self.value(segment, CARRY, i) != 0.0;
                return join(weight, self.value(segment, LOW, i) as u16, carry);
            }
            LOW => {
                let at = starts[LOW] + 2 * i;
                return u16::from_ne_bytes([self.images[LOW][at], self.images[LOW][at + 1]]).into();
            }
            CARRY => return (self.images[CARRY][starts[CARRY] + i / 8] >> (i % 8) & 1).into(),
            _ if SCALE.contains(&operand) => {
                let at = starts[operand] + 4 * (i / BLOCK as usize);
                return widen(&self.images[operand][at..at + 4], Dtype::F32);
            }
            _ if shape.format(operand) == Some(StateFormat::Blocks) => {
                let column = operand - STATE.start;
                let share = self.rule.columns[column].code().share(self.images[operand][starts[operand] + i]);
                return share * self.value(segment, SCALE.start + column, i);
            }
            _ => {}
        }
        let (dtype, width) = (shape.dtype(operand), shape.dtype(operand).bytes() as usize);
        let at = starts[operand] + i * width;
        widen(&self.images[operand][at..at + width], dtype)
    }

    pub(crate) fn weight(&self, segment: usize, i: usize) -> f32 {
        self.value(segment, WEIGHT, i)
    }

    pub(crate) fn state(&self, segment: usize, column: usize, i: usize) -> f32 {
        self.value(segment, STATE.start + column, i)
    }

    pub(crate) fn set_weight(&mut self, segment: usize, i: usize, value: f32) {
        let dtype = self.segments[segment].0.weight;
        self.set(segment, WEIGHT, i, &narrow(value, dtype));
    }

    /// The same problem with masters that are trusted.
    pub(crate) fn trusting(mut self) -> Self {
        self.trust_master = true;
        self
    }

    /// Sets all weights that have a master to something that is made from the master.
    pub(crate) fn set_weights(&mut self, value: impl Fn(usize, f32) -> f32) {
        for segment in 0..self.segments.len() {
            let shape = self.segments[segment].0;
            for i in (0..shape.elements).filter(|_| shape.master != MasterFormat::None) {
                self.set_weight(segment, i, value(i, self.value(segment, MASTER, i)));
            }
        }
    }

    /// Sets all weights to those of another problem with the same segments.
    pub(crate) fn set_weights_of(&mut self, other: &Self) {
        self.images[WEIGHT].clone_from(&other.images[WEIGHT]);
    }

    pub(crate) fn shapes(&self) -> impl Iterator<Item = Shape> {
        self.segments.iter().map(|(shape, _)| *shape)
    }

    fn set(&mut self, segment: usize, operand: usize, i: usize, bytes: &[u8]) {
        let at = self.segments[segment].1[operand] + i * bytes.len();
        self.images[operand][at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Sets a master in the format that the segment has, if it has any.
    fn set_master(&mut self, segment: usize, i: usize, master: f32) {
        let (shape, starts) = self.segments[segment];
        match shape.master {
            MasterFormat::None => {}
            MasterFormat::F32 => self.set(segment, MASTER, i, &master.to_ne_bytes()),
            MasterFormat::Compact => {
                let (low, carry) = split(master);
                self.set(segment, LOW, i, &low.to_ne_bytes());
                let byte = &mut self.images[CARRY][starts[CARRY] + i / 8];
                *byte = *byte & !(1 << (i % 8)) | u8::from(carry) << (i % 8);
            }
        }
    }

    /// Sets what is kept beside the weight of a compact master.
    pub(crate) fn set_halves(&mut self, halves: impl Fn(usize, usize) -> (u16, bool)) {
        for segment in 0..self.segments.len() {
            let (shape, starts) = self.segments[segment];
            for i in (0..shape.elements).filter(|_| shape.is_compact()) {
                let (low, carry) = halves(segment, i);
                self.set(segment, LOW, i, &low.to_ne_bytes());
                let byte = &mut self.images[CARRY][starts[CARRY] + i / 8];
                *byte = *byte & !(1 << (i % 8)) | u8::from(carry) << (i % 8);
            }
        }
    }

    /// The same with all masters in another format, for segments of bf16.
    pub(crate) fn with_masters(&self, format: MasterFormat) -> Self {
        self.with_shapes(|shape| Shape { master: format, ..shape })
    }

    /// The same with all columns in these formats, rounded to nearest.
    pub(crate) fn with_formats(&self, formats: Formats) -> Self {
        let mut same = self.with_shapes(|shape| Shape { formats, ..shape });
        same.trust_master = self.trust_master;
        // As they are, not as they would be made from the masters that they stand for.
        for (segment, (shape, starts)) in self.segments.iter().enumerate() {
            for operand in [WEIGHT, MASTER, LOW, CARRY].into_iter().filter(|&operand| shape.has(operand)) {
                let (from, to, bytes) =
                    (starts[operand], same.segments[segment].1[operand], shape.bytes(operand, shape.elements));
                same.images[operand][to..to + bytes].copy_from_slice(&self.images[operand][from..from + bytes]);
            }
        }
        same
    }

    fn with_shapes(&self, shape: impl Fn(Shape) -> Shape) -> Self {
        let shapes: Vec<Shape> = self.shapes().map(shape).collect();
        let value = |segment: usize, i: usize| {
            std::array::from_fn(|operand| {
                let shape = self.segments[segment].0;
                let has = shape.has(operand) || (operand == MASTER && shape.is_compact());
                if has { self.value(segment, operand, i) } else { 0.0 }
            })
        };
        Self::new(self.rule, &self.scalars, &shapes, value)
    }

    /// The step on the host, one element after another. Returns whether a master gave way to its weight.
    pub(crate) fn step(&mut self, scale: f32) -> bool {
        let mut gave_way = false;
        for segment in 0..self.segments.len() {
            let shape = self.segments[segment].0;
            let s = self.scalars[shape.scalars as usize];
            let mut columns: [Vec<f32>; MAX_COLUMNS] = Default::default();
            for i in 0..shape.elements {
                let value = |operand| self.value(segment, operand, i);
                // A master counts where the weight is its rounding.
                let follows = |master: f32| narrow(master, shape.weight) == narrow(value(WEIGHT), shape.weight);
                let has_master = shape.master != MasterFormat::None;
                let counts = has_master && (self.trust_master || follows(value(MASTER)));
                let keeps = !shape.is_compact() || split(value(MASTER)) == (value(LOW) as u16, value(CARRY) != 0.0);
                gave_way |= has_master && !(counts && (keeps || value(MASTER).is_nan()));
                let old = if counts { value(MASTER) } else { value(WEIGHT) };
                let grad = value(GRAD) * scale;
                let grad = if s.flags & MAXIMIZE != 0 { -grad } else { grad };
                let mut state = [0.0; MAX_COLUMNS];
                for operand in STATE.filter(|&operand| shape.has(operand)) {
                    state[operand - STATE.start] = value(operand);
                }
                let new = (self.rule.element)(old, grad, &mut state, shape.kept, &s, shape.first + i as u64);
                self.set(segment, WEIGHT, i, &narrow(new, shape.weight));
                columns.iter_mut().zip(state).for_each(|(column, value)| column.push(value));
                self.set_master(segment, i, new);
            }
            self.set_state(segment, &columns, shape.formats.1);
        }
        gave_way
    }

    /// All of it as bytes, for a program that runs the kernels: types and numbers of things, images, sets of scalars, and
    /// where each segment's operands start. All segments have the types of the first, unless they are packed.
    pub(crate) fn to_bytes(&self, grad_scale: Option<f32>, skip: Option<f32>, has_flag: bool) -> Vec<u8> {
        let place = |dtype: Dtype| DTYPES.iter().position(|&known| known == dtype).unwrap() as u32;
        let (first, sets) = (self.segments[0].0, &self.scalars);
        let mut bytes = Vec::new();
        for number in [
            place(first.weight),
            place(first.grad),
            self.segments.len() as u32,
            sets.len() as u32,
            self.trust_master.into(),
            has_flag.into(),
            grad_scale.is_some().into(),
            skip.is_some().into(),
            if first.is_packed() { 2 } else { first.is_compact().into() },
        ] {
            bytes.extend(number.to_ne_bytes());
        }
        [grad_scale, skip].iter().for_each(|value| bytes.extend(value.unwrap_or(f32::NAN).to_ne_bytes()));
        self.images.iter().for_each(|image| bytes.extend((image.len() as u64).to_ne_bytes()));
        self.images.iter().for_each(|image| bytes.extend(image));
        for set in sets {
            set.values.iter().for_each(|value| bytes.extend(value.to_ne_bytes()));
            [set.flags, 0].iter().for_each(|number| bytes.extend(number.to_ne_bytes()));
        }
        for (shape, starts) in &self.segments {
            let kind = |shape: &Shape| (!shape.is_packed()).then_some((shape.weight, shape.grad, shape.is_compact()));
            assert_eq!(kind(shape), kind(&first));
            let start = |operand: usize| if shape.has(operand) { starts[operand] as u64 } else { u64::MAX };
            (0..OPERANDS).for_each(|operand| bytes.extend(start(operand).to_ne_bytes()));
            let first = if shape.is_packed() { shape.first } else { shape.first % 2048 };
            let master = [MasterFormat::None, MasterFormat::F32, MasterFormat::Compact];
            let mut kinds = place(shape.weight) | place(shape.grad) << 2;
            kinds |= (master.iter().position(|known| *known == shape.master).unwrap() as u32) << 4;
            for operand in STATE {
                let format = shape.format(operand).unwrap_or_default();
                let place = StateFormat::ALL.iter().position(|known| *known == format).unwrap() as u32;
                kinds |= place << (6 + 2 * (operand - STATE.start));
            }
            kinds |= u32::from(shape.formats.1.is_some()) << 12;
            let [a, b, c] = shape.formats.1.unwrap_or_default();
            let numbers = [shape.elements as u32, shape.scalars, first as u32, kinds, a, b, c];
            numbers.iter().for_each(|number| bytes.extend(number.to_ne_bytes()));
        }
        bytes
    }

    /// Whether these are its images, one after another.
    pub(crate) fn has_images(&self, bytes: &[u8]) -> bool {
        self.images.concat() == bytes
    }

    /// These are its images, one after another, but for the payloads of NaNs.
    pub(crate) fn expect_images(&self, mut bytes: &[u8], what: &str) {
        let images = self.images.each_ref().map(|image| {
            let (own, rest) = bytes.split_at(image.len());
            bytes = rest;
            own.to_vec()
        });
        self.expect_these(images, what);
    }

    pub(crate) fn upload(&self, on: &Subject) -> OnDevice {
        OnDevice { buffers: self.images.each_ref().map(|image| on.upload(image)) }
    }

    fn regions(&self, memory: &[Region; OPERANDS]) -> Vec<Segment> {
        let segment = |(shape, starts): &(Shape, [usize; OPERANDS])| {
            let region = |operand: usize| -> Option<Region> {
                let bytes = shape.bytes(operand, shape.elements) as u64;
                shape.has(operand).then(|| memory[operand].slice(starts[operand] as u64, bytes).unwrap())
            };
            Segment {
                weight: region(WEIGHT).unwrap(),
                weight_dtype: shape.weight,
                grad: region(GRAD).unwrap(),
                grad_dtype: shape.grad,
                state: std::array::from_fn(|column| {
                    let numbers = region(STATE.start + column)?;
                    Some(match shape.formats.0[column] {
                        StateFormat::F32 => Moment::F32(numbers),
                        StateFormat::Bf16 => Moment::Bf16(numbers),
                        StateFormat::Blocks => {
                            Moment::Blocks { codes: numbers, scales: region(SCALE.start + column).unwrap() }
                        }
                    })
                }),
                master: match shape.master {
                    MasterFormat::None => None,
                    MasterFormat::F32 => region(MASTER).map(Master::F32),
                    MasterFormat::Compact => {
                        region(LOW).zip(region(CARRY)).map(|(low, carry)| Master::Compact { low, carry })
                    }
                },
                first: shape.first,
                scalars: shape.scalars,
                keys: shape.formats.1,
            }
        };
        self.segments.iter().map(segment).collect()
    }

    /// One launch over all segments, brought to its end.
    pub(crate) fn launch(&self, on: &Subject, device: &OnDevice, flags: Flags) {
        self.launch_these(on, &self.regions(&device.regions()), flags);
    }

    /// The same with each segment cut after every so many elements, the last pieces first.
    pub(crate) fn launch_in_pieces(&self, on: &Subject, device: &OnDevice, elements: u64) {
        let pieces = |segment: &Segment| {
            let starts = (0..segment.elements().div_ceil(elements)).rev().map(|i| i * elements);
            let piece = |start| piece(segment, start..(start + elements).min(segment.elements()));
            starts.map(piece).collect::<Vec<_>>()
        };
        let segments: Vec<Segment> = self.regions(&device.regions()).iter().flat_map(pieces).collect();
        self.launch_these(on, &segments, Flags::default());
    }

    fn launch_these(&self, on: &Subject, segments: &[Segment], flags: Flags) {
        let stream = on.stream("update").unwrap();
        let (Flags { grad_scale, skip, followed }, trust_master) = (flags, self.trust_master);
        let update = Update::new(self.rule, segments, &self.scalars);
        let update = Update { grad_scale, skip, trust_master, followed, ..update };
        on.launch(&stream, &Kernel::Update(update)).unwrap();
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
        let update = HostUpdate { rule: self.rule, segments, scalars, grad_scale, trust_master: self.trust_master };
        let work = on.update_on_host(threads, update).unwrap();
        on.finish_on_host(work).unwrap();
        for (home, region) in homes.iter().zip(device.regions()) {
            on.put(&on.host_bytes(home), &region);
        }
    }

    /// Every element is what this problem says, and so is every byte between them.
    pub(crate) fn expect(&self, on: &Subject, device: &OnDevice, what: &str) {
        self.expect_these(device.buffers.each_ref().map(|buffer| on.download(&buffer.all())), what);
    }

    fn expect_these(&self, images: [Vec<u8>; OPERANDS], what: &str) {
        let mut got = self.clone();
        got.images = images;
        for segment in 0..self.segments.len() {
            let shape = self.segments[segment].0;
            for operand in shape.operands() {
                for i in 0..shape.elements {
                    let (want, found) = (self.value(segment, operand, i), got.value(segment, operand, i));
                    let of_nan = matches!(operand, LOW | CARRY) && self.value(segment, MASTER, i).is_nan();
                    assert!(
                        same(want, found) || (of_nan && got.value(segment, MASTER, i).is_nan()),
                        "{:?}, {what}: operand {operand} of segment {segment} at {i} is {found:e} ({:#x}), not {want:e} \
                         ({:#x}): {shape:?}",
                        self.rule,
                        found.to_bits(),
                        want.to_bits()
                    );
                }
                if shape.format(operand) == Some(StateFormat::Blocks) {
                    let start = self.segments[segment].1[operand];
                    for i in (0..shape.elements).filter(|&i| !self.value(segment, operand, i).is_nan()) {
                        let (want, found) = (self.images[operand][start + i], got.images[operand][start + i]);
                        assert_eq!(found, want, "{:?}, {what}: code {i} of operand {operand}: {shape:?}", self.rule);
                    }
                }
                // Equal but for the payloads of NaNs; made equal, so that what is left to compare is the rest.
                let start = self.segments[segment].1[operand];
                let range = start..start + shape.bytes(operand, shape.elements);
                if operand == CARRY && !shape.elements.is_multiple_of(8) {
                    let spare = got.images[operand][range.end - 1] >> (shape.elements % 8);
                    assert_eq!(spare, 0, "{:?}, {what}: carries of no element", self.rule);
                }
                got.images[operand][range.clone()].copy_from_slice(&self.images[operand][range]);
            }
        }
        for operand in 0..OPERANDS {
            let same = got.images[operand] == self.images[operand];
            assert!(same, "{:?}, {what}: bytes beside operand {operand} changed", self.rule);
        }
    }
}

/// A part of a segment that begins where its blocks do.
fn piece(of: &Segment, range: Range<u64>) -> Segment {
    let part = |region: &Region, bytes: u64, block: u64| {
        let (start, end) = (range.start / block * bytes, range.end.div_ceil(block) * bytes);
        region.slice(start, end - start).unwrap()
    };
    Segment {
        weight: part(&of.weight, of.weight_dtype.bytes(), 1),
        grad: part(&of.grad, of.grad_dtype.bytes(), 1),
        state: of.state.each_ref().map(|column| {
            Some(match column.as_ref()? {
                Moment::F32(region) => Moment::F32(part(region, 4, 1)),
                Moment::Bf16(region) => Moment::Bf16(part(region, 2, 1)),
                Moment::Blocks { codes, scales } => {
                    Moment::Blocks { codes: part(codes, 1, 1), scales: part(scales, 4, BLOCK.into()) }
                }
            })
        }),
        master: of.master.as_ref().map(|master| match master {
            Master::F32(region) => Master::F32(part(region, 4, 1)),
            Master::Compact { low, carry } => Master::Compact { low: part(low, 2, 1), carry: part(carry, 1, 8) },
        }),
        first: of.first + range.start,
        ..of.clone()
    }
}

/// The images on a device.
pub(crate) struct OnDevice {
    buffers: [Buffer; OPERANDS],
}

impl OnDevice {
    fn regions(&self) -> [Region; OPERANDS] {
        self.buffers.each_ref().map(Buffer::all)
    }
}
