//! What the bodies of the contract get: a device, and how bytes get onto it and off it again.

use std::ops::Deref;

use forebay_device::kernel::uniform_element;
pub(crate) use forebay_device::testing::kinds::{Kind, OfKind, has_cuda, in_one_of_three};
use forebay_device::{Buffer, Device, Error, Event, Kernel, Region, Result, SharedDevice, SlabLayout, Stream};

/// The device under test.
pub(crate) struct Subject {
    pub(crate) device: SharedDevice,
    pub(crate) kind: Kind,
}

impl Deref for Subject {
    type Target = dyn Device;

    fn deref(&self) -> &Self::Target {
        &*self.device
    }
}

impl OfKind for Subject {
    fn of_kind(kind: Kind) -> Self {
        Self { device: kind.open(), kind }
    }
}

impl Subject {
    pub(crate) fn wrapping(device: SharedDevice, kind: Kind) -> Self {
        Self { device, kind }
    }

    pub(crate) fn streams<const N: usize>(&self, names: [&str; N]) -> [Stream; N] {
        names.map(|name| self.stream(name).unwrap())
    }

    pub(crate) fn events<const N: usize>(&self) -> [Event; N] {
        std::array::from_fn(|_| self.event().unwrap())
    }

    pub(crate) fn timed_events<const N: usize>(&self) -> [Event; N] {
        std::array::from_fn(|_| self.timed_event().unwrap())
    }

    /// Page-locked memory of exactly so many bytes.
    pub(crate) fn pinned(&self, bytes: u64) -> Region {
        self.pin(SlabLayout::new(&[bytes]).unwrap()).unwrap().part(0).unwrap()
    }

    pub(crate) fn spin(&self, stream: &Stream, ms: u64) {
        self.launch(stream, &Kernel::Spin { ns: ms * 1_000_000 }).unwrap();
    }

    pub(crate) fn fill(&self, stream: &Stream, dst: &Region, byte: u8) -> Result<()> {
        self.launch(stream, &Kernel::Fill { dst: dst.clone(), byte })
    }

    /// Ends all that the stream was given, and lets the host know.
    pub(crate) fn finish(&self, stream: &Stream) -> Result<()> {
        let end = self.event()?;
        self.record(&end, stream)?;
        self.synchronize(&end)
    }

    /// A buffer with these bytes.
    pub(crate) fn upload(&self, bytes: &[u8]) -> Buffer {
        let buffer = self.alloc(bytes.len() as u64).unwrap();
        self.put(bytes, &buffer.all());
        buffer
    }

    /// Writes a region of the device; the host has seen the end of all other work on it.
    pub(crate) fn put(&self, bytes: &[u8], to: &Region) {
        let (staging, stream) = (self.pinned(bytes.len() as u64), self.stream("upload").unwrap());
        self.write(bytes, &staging).unwrap();
        self.copy(&stream, &staging, to).unwrap();
        self.finish(&stream).unwrap();
    }

    /// Reads a region of the device; the host has seen the end of the work that wrote it.
    pub(crate) fn download(&self, from: &Region) -> Vec<u8> {
        let (staging, stream) = (self.pinned(from.bytes()), self.stream("download").unwrap());
        self.copy(&stream, from, &staging).unwrap();
        self.finish(&stream).unwrap();
        self.host_bytes(&staging)
    }

    pub(crate) fn host_bytes(&self, from: &Region) -> Vec<u8> {
        let mut bytes = vec![0; from.bytes() as usize];
        self.read(from, &mut bytes).unwrap();
        bytes
    }
}

/// Bytes that repeat nowhere near each other, so that a misplaced copy shows.
pub(crate) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|i| random(seed, i) as u8).collect()
}

/// A deterministic random number.
pub(crate) fn random(seed: u64, index: u64) -> u64 {
    let half = |index| u64::from(uniform_element(seed, index, 1.0, 2.0).to_bits() & 0x7f_ffff) >> 3;
    half(2 * index) << 20 | half(2 * index + 1)
}

pub(crate) fn refused<T: std::fmt::Debug>(outcome: Result<T>) {
    assert!(matches!(outcome, Err(Error::BadOperands { .. })), "{outcome:?} where operands should be refused");
}

pub(crate) fn stream_failed<T: std::fmt::Debug>(outcome: Result<T>) -> (String, String) {
    match outcome {
        Err(Error::StreamFailed { stream, reason }) => (stream, reason),
        other => panic!("{other:?} where the stream should have failed"),
    }
}
