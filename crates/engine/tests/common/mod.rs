//! The bench the engine's tests run on: which devices there are, and how bytes get onto one and off it again.
//!
//! A test named `x::cpu` is the body `x` on the CPU backend; `cpu_checked` is the same under `Checked`, `cuda` and
//! `cuda_checked` run on the first GPU. Without a GPU those two pass with a word on standard error, unless
//! `FOREBAY_REQUIRE_CUDA=1` is set: then they fail. The test binaries need nothing but themselves, so they can be
//! carried to a GPU machine and run there, under compute-sanitizer too.
//!
//! Every device is wrapped in a `Fault`, outermost, so that a call it refuses reaches neither the checker nor the
//! device. What a test does for itself, such as an upload, goes past it and is never hit.

#![allow(dead_code, unused_macros, reason = "each test crate uses its part")]
#![allow(clippy::print_stderr, reason = "a skipped backend must be seen by whoever reads the log")]

pub(crate) mod trial;

use std::ops::Deref;
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use forebay::device::{
    Backend, Buffer, Checked, Counters, Device, Error, Fault, Kernel, Memory, Region, Result, SharedDevice, SlabLayout,
    Stream, backends, open, open_with_budget,
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
}

/// Makes a module of tests per body, one test per device: `every` of them, or only the `checked` ones. A body of the
/// group `alone` may lose the GPU's context, so on CUDA it runs in a process of its own.
macro_rules! on_devices {
    ($($group:ident: $($body:ident),+ $(,)?;)+) => {$($(
        mod $body {
            on_devices!(@$group super::$body);
        }
    )+)+};
    (@every $body:path) => {
        on_devices!(@test cpu, Cpu, run, $body);
        on_devices!(@test cuda, Cuda, run, $body);
        on_devices!(@checked $body);
    };
    (@checked $body:path) => {
        on_devices!(@test cpu_checked, CpuChecked, run, $body);
        on_devices!(@test cuda_checked, CudaChecked, run, $body);
    };
    (@alone $body:path) => {
        on_devices!(@test cpu, Cpu, run, $body);
        on_devices!(@test cpu_checked, CpuChecked, run, $body);
        on_devices!(@test cuda, Cuda, run_alone, $body);
        on_devices!(@test cuda_checked, CudaChecked, run_alone, $body);
    };
    (@test $name:ident, $kind:ident, $run:ident, $body:path) => {
        #[test]
        fn $name() {
            $crate::common::$run($crate::common::Kind::$kind, concat!(module_path!(), "::", stringify!($name)), $body);
        }
    };
}

/// Runs a body on a device, where the machine has it.
pub(crate) fn run(kind: Kind, test: &str, body: impl FnOnce(&Subject)) {
    let Some(_turn) = turn(kind) else { return };
    guarded(kind, test, || body(&Subject::open(kind, None)));
}

/// The same in another process: this test binary, run again for this one test.
pub(crate) fn run_alone(kind: Kind, test: &str, body: impl FnOnce(&Subject)) {
    const CHILD: &str = "FOREBAY_TEST_ALONE";
    let name = test.split_once("::").expect("a test's path starts with its crate").1;
    if std::env::var(CHILD).as_deref() == Ok(name) {
        return guarded(kind, test, || body(&Subject::open(kind, None)));
    }
    let Some(_turn) = turn(kind) else { return };
    if under_sanitizer(kind) {
        return eprintln!("under compute-sanitizer, which reports a lost context as the fault it is: skipped");
    }
    guarded(kind, test, || {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env(CHILD, name)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        let complaint = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success() && said.contains("1 passed"), "{}: {said}{complaint}", child.status);
    });
}

/// GPU tests take turns: the streams of several would share the GPU's few hardware queues and wait for each other,
/// and freeing memory drains the whole context.
fn turn(kind: Kind) -> Option<Option<std::sync::MutexGuard<'static, ()>>> {
    static TURN: Mutex<()> = Mutex::new(());
    static CONTEXT: OnceLock<SharedDevice> = OnceLock::new();
    if !kind.is_cuda() {
        return Some(None);
    }
    if !has_cuda() {
        return None;
    }
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // Keeps the context from being torn down and built again between tests.
    CONTEXT.get_or_init(|| open("cuda:0").unwrap());
    Some(Some(turn))
}

/// compute-sanitizer makes calls wait for the device that otherwise only submit.
pub(crate) fn under_sanitizer(kind: Kind) -> bool {
    kind.is_cuda() && std::env::var_os("NV_SANITIZER_INJECTION_PORT_BASE").is_some()
}

fn has_cuda() -> bool {
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

/// A body that hangs ends the process, with the test's name: nothing else could end it.
fn guarded(kind: Kind, test: &str, body: impl FnOnce()) {
    // Under compute-sanitizer everything takes its time.
    let patience = Duration::from_secs(if kind.is_cuda() { 300 } else { 60 });
    let (ended, watched) = channel::<()>();
    let name = test.to_owned();
    std::thread::spawn(move || {
        if watched.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            eprintln!("{name} hangs: no end after {} s", patience.as_secs());
            std::process::abort();
        }
    });
    body();
    drop(ended);
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

impl Subject {
    /// A device of this kind with books of its own.
    pub(crate) fn open(kind: Kind, pinned_budget_bytes: Option<u64>) -> Self {
        let name = if kind.is_cuda() { "cuda:0" } else { "cpu" };
        Self::wrapping(kind, open_with_budget(name, pinned_budget_bytes).unwrap())
    }

    pub(crate) fn wrapping(kind: Kind, device: SharedDevice) -> Self {
        let calm: SharedDevice = if kind.is_checked() { Checked::wrap(device) } else { device };
        let fault = Fault::wrap(calm.clone());
        let side = calm.stream("side").unwrap();
        Self { device: fault.clone(), fault, calm, kind, side }
    }

    /// Another one like it: without faults left over, with an empty book.
    pub(crate) fn another(&self) -> Self {
        Self::open(self.kind, None)
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

    /// All memory of the device is back, at once or as soon as the workers have let go of what they ran last.
    pub(crate) fn assert_empty(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let Memory { allocated_bytes, pinned_bytes, .. } = self.memory().unwrap();
            if (allocated_bytes, pinned_bytes) == (0, 0) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "still out: {allocated_bytes} bytes on the device, {pinned_bytes} pinned"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// What can only go wrong when this machine stalls a thread for longer than a delay may be tried again: code that gets
/// it wrong does so every time.
pub(crate) fn in_one_of_three(what: &str, attempt: impl Fn() -> bool) {
    assert!((0..3).any(|_| attempt()), "{what}");
}

/// The device's error in an engine's, or a panic that shows what came instead.
pub(crate) fn device_error<T: std::fmt::Debug>(outcome: forebay::Result<T>) -> Error {
    match outcome {
        Err(forebay::Error::Device(error)) => error,
        other => panic!("{other:?} where the device should have failed"),
    }
}
