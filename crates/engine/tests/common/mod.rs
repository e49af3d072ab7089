//! What the bodies of the engine's tests get: a device, and how bytes get onto it and off it again.
//!
//! Every device is wrapped in a `Fault`, outermost, so that a call it refuses reaches neither the checker nor the
//! device. What a test does for itself, such as an upload, goes past it and is never hit.

pub(crate) mod overlapped;
mod packed;
pub(crate) mod trial;

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay::device::{
    Buffer, Counters, Device, Error, Fault, Kernel, Memory, Region, Result, SharedDevice, SlabLayout, Stream,
};
use forebay::trace::{self, TraceOptions};
pub(crate) use forebay_device::testing::kinds::{Kind, OfKind, cases, in_one_of_three, under_sanitizer};

/// A trace while this is held. There is one in a process, so tests that share a process take turns.
pub(crate) struct Traced {
    recorder: Arc<trace::Recorder>,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Traced {
    type Target = trace::Recorder;

    fn deref(&self) -> &trace::Recorder {
        &self.recorder
    }
}

/// Begins a trace, after those of others.
pub(crate) fn traced(options: TraceOptions) -> Traced {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    Traced { recorder: trace::start(options).unwrap(), _turn: turn }
}

/// The device under test, with a stream for the test's own copies.
pub(crate) struct Subject {
    /// What the engine gets.
    pub(crate) device: SharedDevice,
    /// The same, as the one to tell what to do wrong.
    pub(crate) fault: Arc<Fault>,
    /// What lies below the faults.
    pub(crate) calm: SharedDevice,
    pub(crate) kind: Kind,
    side: Stream,
}

impl Deref for Subject {
    type Target = dyn Device;

    fn deref(&self) -> &Self::Target {
        &*self.calm
    }
}

impl OfKind for Subject {
    fn of_kind(kind: Kind) -> Self {
        Self::open(kind)
    }
}

impl Subject {
    /// A device of this kind with counts of its own.
    pub(crate) fn open(kind: Kind) -> Self {
        Self::wrapping(kind, kind.open_plain())
    }

    pub(crate) fn wrapping(kind: Kind, device: SharedDevice) -> Self {
        let calm = kind.dress(device);
        let fault = Fault::wrap(calm.clone());
        let side = calm.stream("side").unwrap();
        Self { device: fault.clone(), fault, calm, kind, side }
    }

    /// Another one like it: without faults left over, with nothing counted yet.
    pub(crate) fn another(&self) -> Self {
        Self::open(self.kind)
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
        let staging = self.pinned(bytes.len() as u64);
        self.write(bytes, &staging).unwrap();
        self.copy(&self.side, &staging, to).unwrap();
        self.finish(&self.side).unwrap();
    }

    /// Reads a region of the device; the host has seen the end of the work that wrote it.
    pub(crate) fn download(&self, from: &Region) -> Vec<u8> {
        let staging = self.pinned(from.bytes());
        self.copy(&self.side, from, &staging).unwrap();
        self.finish(&self.side).unwrap();
        self.host_bytes(&staging).unwrap()
    }

    pub(crate) fn fill(&self, to: &Region, byte: u8) {
        self.launch(&self.side, &Kernel::Fill { dst: to.clone(), byte }).unwrap();
        self.finish(&self.side).unwrap();
    }

    /// Page-locked memory of exactly so many bytes.
    pub(crate) fn pinned(&self, bytes: u64) -> Region {
        self.pin(SlabLayout::new(&[bytes]).unwrap()).unwrap().part(0).unwrap()
    }

    pub(crate) fn host_bytes(&self, from: &Region) -> Result<Vec<u8>> {
        let mut bytes = vec![0; from.bytes() as usize];
        self.read(from, &mut bytes)?;
        Ok(bytes)
    }

    /// What was made and what is taken. What the whole GPU has free is not only this test's doing.
    pub(crate) fn taken(&self) -> (Counters, Memory) {
        let memory = self.memory().unwrap();
        let free_bytes = if self.kind.is_cuda() { 0 } else { memory.free_bytes };
        (self.counters(), Memory { free_bytes, ..memory })
    }

    /// All memory of the device is freed.
    pub(crate) fn assert_empty(&self) {
        self.assert_holds(0, 0);
    }

    /// So many bytes are allocated and pinned, at once or as soon as the workers have dropped what they ran last.
    pub(crate) fn assert_holds(&self, allocated: u64, pinned: u64) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let Memory { allocated_bytes, pinned_bytes, .. } = self.memory().unwrap();
            if (allocated_bytes, pinned_bytes) == (allocated, pinned) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{allocated_bytes} bytes on the device where {allocated} are due, {pinned_bytes} pinned of {pinned}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The device's error in an engine's, or a panic that shows what came instead.
pub(crate) fn device_error<T: std::fmt::Debug>(outcome: forebay::Result<T>) -> Error {
    match outcome {
        Err(forebay::Error::Device(error)) => error,
        other => panic!("{other:?} where the device should have failed"),
    }
}
