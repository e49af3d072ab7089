//! One test body on every device: the list of devices, their turns, and a time limit for bodies that hang.
//!
//! A test named `x::cpu` is the body `x` on the CPU backend; `cpu_checked` is the same under `Checked`, `cuda` and
//! `cuda_checked` run on the first GPU. Without a GPU those two print a note on standard error and pass, unless
//! `FOREBAY_REQUIRE_CUDA=1` is set: then they fail. The test binaries need nothing but themselves, so they can be
//! carried to a GPU machine and run there, under compute-sanitizer too.

#![allow(clippy::print_stderr, reason = "a skipped backend must be visible in the log")]

use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::{Backend, Checked, CpuDevice, CpuOptions, CudaDevice, CudaOptions, Result, SharedDevice, backends, open};

/// A backend under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The CPU backend.
    Cpu,
    /// The CPU backend under [`Checked`].
    CpuChecked,
    /// The first GPU.
    Cuda,
    /// The first GPU under [`Checked`].
    CudaChecked,
}

impl Kind {
    /// Whether it needs a GPU.
    pub fn is_cuda(self) -> bool {
        matches!(self, Self::Cuda | Self::CudaChecked)
    }

    /// Whether accesses without an order are refused.
    pub fn is_checked(self) -> bool {
        matches!(self, Self::CpuChecked | Self::CudaChecked)
    }

    /// Another device of this kind, with counts of its own.
    pub fn open(self) -> SharedDevice {
        self.dress(self.open_plain())
    }

    /// The same without the checker.
    pub fn open_plain(self) -> SharedDevice {
        let opened: Result<SharedDevice> = match self {
            Self::Cpu | Self::CpuChecked => CpuDevice::open(CpuOptions::default()).map(|device| device as _),
            Self::Cuda | Self::CudaChecked => CudaDevice::open(CudaOptions::default()).map(|device| device as _),
        };
        opened.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// A device as this kind has it: under the checker or plain.
    pub fn dress(self, device: SharedDevice) -> SharedDevice {
        if self.is_checked() { Checked::wrap(device) } else { device }
    }
}

/// What a body gets: a device of some kind, with what the test crate needs around it.
pub trait OfKind {
    /// Opens one, with counts of its own.
    fn of_kind(kind: Kind) -> Self;
}

/// Makes a module of tests per body, one test per device of the body's group.
///
/// The groups: `every` device, those on the `cpu`, the `checked` ones, and `alone`, every device for a body that may
/// lose the GPU's context, so that on CUDA it runs in a process of its own. A body takes a reference to something that
/// is [`OfKind`](crate::testing::kinds::OfKind).
#[macro_export]
macro_rules! on_devices {
    ($($group:ident: $($body:ident),+ $(,)?;)+) => {$($(
        mod $body {
            $crate::on_devices!(@$group super::$body);
        }
    )+)+};
    (@every $body:path) => {
        $crate::on_devices!(@cpu $body);
        $crate::on_devices!(@test cuda, Cuda, run, $body);
        $crate::on_devices!(@test cuda_checked, CudaChecked, run, $body);
    };
    (@cpu $body:path) => {
        $crate::on_devices!(@test cpu, Cpu, run, $body);
        $crate::on_devices!(@test cpu_checked, CpuChecked, run, $body);
    };
    (@checked $body:path) => {
        $crate::on_devices!(@test cpu_checked, CpuChecked, run, $body);
        $crate::on_devices!(@test cuda_checked, CudaChecked, run, $body);
    };
    (@alone $body:path) => {
        $crate::on_devices!(@cpu $body);
        $crate::on_devices!(@test cuda, Cuda, run_alone, $body);
        $crate::on_devices!(@test cuda_checked, CudaChecked, run_alone, $body);
    };
    (@test $name:ident, $kind:ident, $run:ident, $body:path) => {
        #[test]
        fn $name() {
            let test = concat!(module_path!(), "::", stringify!($name));
            $crate::testing::kinds::$run($crate::testing::kinds::Kind::$kind, test, $body);
        }
    };
}

/// Runs a body on a device, where the machine has it.
pub fn run<S: OfKind>(kind: Kind, test: &str, body: fn(&S)) {
    let Some(_turn) = turn(kind) else { return };
    guarded(kind, test, || body(&S::of_kind(kind)));
}

/// The same in another process: this test binary, run again for this one test.
pub fn run_alone<S: OfKind>(kind: Kind, test: &str, body: fn(&S)) {
    const CHILD: &str = "FOREBAY_TEST_ALONE";
    let (_, name) = test.split_once("::").unwrap_or_else(|| panic!("no crate in a test's path: {test}"));
    if std::env::var(CHILD).as_deref() == Ok(name) {
        return guarded(kind, test, || body(&S::of_kind(kind)));
    }
    let Some(_turn) = turn(kind) else { return };
    if under_sanitizer(kind) {
        return eprintln!("under compute-sanitizer, which reports a lost context as the fault it is: skipped");
    }
    guarded(kind, test, || {
        let child = std::env::current_exe().and_then(|binary| {
            let arguments = ["--exact", name, "--nocapture", "--test-threads=1"];
            Command::new(binary).args(arguments).env(CHILD, name).output()
        });
        let child = child.unwrap_or_else(|error| panic!("the test binary does not start again: {error}"));
        let said = String::from_utf8_lossy(&child.stdout);
        let complaint = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success() && said.contains("1 passed"), "{}: {said}{complaint}", child.status);
    });
}

/// GPU tests take turns: the streams of several would share the GPU's few hardware queues and wait for each other,
/// and freeing memory drains the whole context.
fn turn(kind: Kind) -> Option<Option<MutexGuard<'static, ()>>> {
    static TURN: Mutex<()> = Mutex::new(());
    if !kind.is_cuda() {
        return Some(None);
    }
    if !has_cuda() {
        return None;
    }
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // The shared device keeps the context from being torn down and built again between tests.
    open("cuda:0").unwrap_or_else(|error| panic!("cuda:0: {error}"));
    Some(Some(turn))
}

/// Whether there is a GPU; a word where there is none, or a failure where one was promised.
pub fn has_cuda() -> bool {
    let found = backends().into_iter().find(|status| status.backend == Backend::Cuda);
    let cuda = found.unwrap_or_else(|| panic!("CUDA is not among the backends"));
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

/// compute-sanitizer makes calls wait for the device that otherwise only submit.
pub fn under_sanitizer(kind: Kind) -> bool {
    kind.is_cuda() && std::env::var_os("NV_SANITIZER_INJECTION_PORT_BASE").is_some()
}

/// A body that hangs ends the process, with the test's name: nothing else could end it.
fn guarded(kind: Kind, test: &str, body: impl FnOnce()) {
    // Under compute-sanitizer everything is slower.
    let patience = Duration::from_secs(if kind.is_cuda() { 300 } else { 60 }) * cases(1);
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

/// How many random cases to run: this number, or twenty times as many if `FOREBAY_LONG=1` is set.
pub fn cases(short: u32) -> u32 {
    let is_long = std::env::var_os("FOREBAY_LONG").is_some_and(|value| !value.is_empty() && value != "0");
    if is_long { 20 * short } else { short }
}

/// What fails only when this machine stalls a thread for longer than a delay may be tried again: code that is wrong
/// fails every time.
pub fn in_one_of_three(what: &str, attempt: impl Fn() -> bool) {
    assert!((0..3).any(|_| attempt()), "{what}");
}
