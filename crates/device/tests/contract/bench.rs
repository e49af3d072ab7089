//! The bench the tests run on: which backends there are, and how bytes get onto a device and off it again.

use std::ops::Deref;
use std::sync::{Mutex, OnceLock, PoisonError};

use forebay_device::arith::uniform_element;
use forebay_device::{
    Backend, Buffer, Checked, Device, Error, Event, Kernel, Region, Result, SharedDevice, SlabLayout, Stream, backends,
    open, open_with_budget,
};

/// A backend under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Cpu,
    CpuChecked,
    Cuda,
    CudaChecked,
}

impl Kind {
    pub(crate) fn is_cuda(self) -> bool {
        matches!(self, Self::Cuda | Self::CudaChecked)
    }

    pub(crate) fn is_checked(self) -> bool {
        matches!(self, Self::CpuChecked | Self::CudaChecked)
    }

    /// Another device of this kind, with books of its own.
    pub(crate) fn open(self, pinned_budget_bytes: Option<u64>) -> SharedDevice {
        self.dress(self.open_plain(pinned_budget_bytes))
    }

    /// The same without the checker.
    pub(crate) fn open_plain(self, pinned_budget_bytes: Option<u64>) -> SharedDevice {
        open_with_budget(if self.is_cuda() { "cuda:0" } else { "cpu" }, pinned_budget_bytes).unwrap()
    }

    /// A device as this kind wears it: under the checker or plain.
    pub(crate) fn dress(self, device: SharedDevice) -> SharedDevice {
        if self.is_checked() { Checked::wrap(device) } else { device }
    }
}

/// Makes a module of tests per body, one test per backend of the group: `every`, `cpu` or `checked` ones.
macro_rules! contract {
    ($($group:ident: $($body:ident),+ $(,)?;)+) => {$($(
        mod $body {
            contract!(@$group super::$body);
        }
    )+)+};
    (@every $body:path) => {
        contract!(@cpu $body);
        contract!(@test cuda, Cuda, $body);
        contract!(@test cuda_checked, CudaChecked, $body);
    };
    (@cpu $body:path) => {
        contract!(@test cpu, Cpu, $body);
        contract!(@test cpu_checked, CpuChecked, $body);
    };
    (@checked $body:path) => {
        contract!(@test cpu_checked, CpuChecked, $body);
        contract!(@test cuda_checked, CudaChecked, $body);
    };
    (@test $name:ident, $kind:ident, $body:path) => {
        #[test]
        fn $name() {
            $crate::bench::run($crate::bench::Kind::$kind, $body);
        }
    };
}

/// Runs a body on a backend, where the machine has it.
pub(crate) fn run(kind: Kind, body: impl FnOnce(&Subject)) {
    // One at a time: the streams of several tests would share the GPU's few hardware queues and wait for each other,
    // and freeing memory drains the whole context.
    static TURN: Mutex<()> = Mutex::new(());
    static CONTEXT: OnceLock<SharedDevice> = OnceLock::new();
    let mut _turn = None;
    if kind.is_cuda() {
        if !has_cuda() {
            return;
        }
        _turn = Some(TURN.lock().unwrap_or_else(PoisonError::into_inner));
        // Keeps the context from being torn down and built again between tests.
        CONTEXT.get_or_init(|| open("cuda:0").unwrap());
    }
    body(&Subject { device: kind.open(None), kind });
}

/// Whether there is a GPU; a word where there is none, or a failure where one was promised.
pub(crate) fn has_cuda() -> bool {
    let cuda = backends().into_iter().find(|status| status.backend == Backend::Cuda).unwrap();
    if cuda.devices.is_empty() {
        assert!(
            std::env::var("FOREBAY_REQUIRE_CUDA").as_deref() != Ok("1"),
            "FOREBAY_REQUIRE_CUDA=1 and no CUDA device: {:?}",
            cuda.problem
        );
        eprintln!("no CUDA device: skipped");
    }
    !cuda.devices.is_empty()
}

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

/// What can only go wrong when this machine stalls a thread for longer than a spin may be tried again: a device that
/// gets it wrong does so every time.
pub(crate) fn in_one_of_three(what: &str, attempt: impl Fn() -> bool) {
    assert!((0..3).any(|_| attempt()), "{what}");
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
