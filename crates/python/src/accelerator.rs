//! The engine's backend on torch, as far as it is Python: each call takes the GIL, says one thing to
//! `forebay/_accelerator.py`, and lets it go.
//!
//! [Note: the GIL in calls to a device] Threads of the engine call the device with locks of the engine held, and here each
//! such call waits for the GIL. So nobody may wait for a lock of the engine with the GIL held:
//! - every entry from Python goes through `guard::run`, which has let the GIL go;
//! - what Python drops, lets it go too: see [`Unlocked`];
//! - no finalizer runs inside of a call: it might enter the engine again, on a thread that holds its locks. So the
//!   collector of cycles rests meanwhile, and what is dropped there nevertheless is dropped by another thread.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use forebay::device::torch::{Block, Driver, Handle, Pinning, origin_of, register};
use forebay::device::{Dtype, Error, Kernel, Master, Moment, Place, Region, Segment, Update};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyTuple};

type Result<T> = std::result::Result<T, Error>;

/// Tells the device crate how to open a device of torch's.
pub(crate) fn install() {
    register(|name| {
        attached("open", name, |py| {
            static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
            let module = MODULE.get_or_try_init(py, || py.import("forebay._accelerator").map(Bound::unbind))?;
            let driver = module.bind(py).getattr("Driver")?.call1((name,))?;
            let (device, model) = driver.call_method0("names")?.extract()?;
            let pinning = match driver.call_method0("pinning")?.extract::<String>()?.as_str() {
                "registers" => Pinning::Registers,
                "allocates" => Pinning::Allocates,
                _ => Pinning::Missing,
            };
            Ok(Arc::new(Accelerator { driver: driver.unbind(), device, model, pinning }) as Arc<dyn Driver>)
        })
    });
}

thread_local! {
    static IN_CALL: Cell<bool> = const { Cell::new(false) };
}

/// How many threads are in a call, and whether the collector was on before the first of them. Read and written with the
/// GIL held, which the collector's own functions do not release.
static RESTING: (AtomicUsize, AtomicBool) = (AtomicUsize::new(0), AtomicBool::new(false));

/// The collector of cycles.
struct Collector {
    is_enabled: Py<PyAny>,
    disable: Py<PyAny>,
    enable: Py<PyAny>,
}

impl Collector {
    fn of(py: Python<'_>) -> PyResult<&Self> {
        static COLLECTOR: PyOnceLock<Collector> = PyOnceLock::new();
        COLLECTOR.get_or_try_init(py, || {
            let gc = py.import("gc")?;
            let function = |name: &str| Ok::<_, PyErr>(gc.getattr(name)?.unbind());
            Ok(Self { is_enabled: function("isenabled")?, disable: function("disable")?, enable: function("enable")? })
        })
    }
}

/// Keeps the collector of cycles from running, for any number of threads at once.
struct Rest<'py>(Python<'py>, bool);

impl<'py> Rest<'py> {
    fn begin(py: Python<'py>) -> PyResult<Self> {
        let collector = Collector::of(py)?;
        if RESTING.0.fetch_add(1, Relaxed) == 0 {
            let was_on = collector.is_enabled.call0(py)?.is_truthy(py)?;
            RESTING.1.store(was_on, Relaxed);
            if was_on {
                collector.disable.call0(py)?;
            }
        }
        Ok(Self(py, IN_CALL.replace(true)))
    }
}

impl Drop for Rest<'_> {
    fn drop(&mut self) {
        IN_CALL.set(self.1);
        if RESTING.0.fetch_sub(1, Relaxed) == 1 && RESTING.1.load(Relaxed) {
            let _ = Collector::of(self.0).and_then(|collector| collector.enable.call0(self.0));
        }
    }
}

/// Runs a call to torch with the GIL. What Python raises becomes an error of the device.
fn attached<T>(call: &'static str, device: &str, work: impl for<'py> FnOnce(Python<'py>) -> PyResult<T>) -> Result<T> {
    let done = Python::try_attach(|py| {
        let done = Rest::begin(py).and_then(|_rest| work(py));
        done.map_err(|failure| error(py, call, device, &failure))
    });
    done.unwrap_or_else(|| {
        Err(Error::DeviceAbsent { device: device.to_owned(), reason: "Python is shutting down".to_owned() })
    })
}

/// An exception as an error of the device.
fn error(py: Python<'_>, call: &'static str, device: &str, failure: &PyErr) -> Error {
    let name = failure.get_type(py).name().map_or_else(|_| String::new(), |name| name.to_string());
    let text = failure.value(py).to_string();
    match name.as_str() {
        "OutOfMemoryError" => Error::OutOfDeviceMemory {
            device: device.to_owned(),
            requested_bytes: 0,
            available_bytes: 0,
            capacity_bytes: 0,
        },
        "DeviceError" => Error::DeviceAbsent { device: device.to_owned(), reason: text },
        _ => Error::Driver { call, code: 0, name, text },
    }
}

/// Something that Python drops with the GIL held and whose end may wait for threads that need it.
pub(crate) struct Unlocked<T: Send + 'static>(ManuallyDrop<Option<T>>);

impl<T: Send> Unlocked<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(Some(value)))
    }
}

impl<T: Send> Deref for Unlocked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().unwrap_or_else(|| unreachable!("taken in drop only"))
    }
}

impl<T: Send> Drop for Unlocked<T> {
    fn drop(&mut self) {
        let Some(value) = self.0.take() else { return };
        if IN_CALL.get() {
            // This thread may hold the locks that the end of the value takes.
            std::thread::spawn(move || drop(value));
            return;
        }
        let mut value = Some(value);
        // Where there is no Python any more, nothing is released but by the system.
        if Python::try_attach(|py| {
            let value = value.take();
            py.detach(move || drop(value));
        })
        .is_none()
        {
            std::mem::forget(value);
        }
    }
}

/// One device of torch's.
struct Accelerator {
    driver: Py<PyAny>,
    device: String,
    model: String,
    pinning: Pinning,
}

/// A tensor, a stream or an event.
struct Object(Py<PyAny>);

fn object(handle: &Handle) -> PyResult<&Py<PyAny>> {
    let object = handle.downcast_ref::<Object>().map(|object| &object.0);
    object.ok_or_else(|| pyo3::exceptions::PyTypeError::new_err("a handle of another driver"))
}

/// A region as `_accelerator.py` takes it: the tensor that has it or None, offset or address, bytes, whether it is on the
/// device.
fn part<'py>(py: Python<'py>, region: &Region) -> PyResult<Bound<'py, PyTuple>> {
    let on_device = region.place() == Place::Device;
    match origin_of(region) {
        Some((handle, offset)) => (object(handle)?.clone_ref(py), offset, region.bytes(), on_device).into_pyobject(py),
        None => (py.None(), region.addr(), region.bytes(), on_device).into_pyobject(py),
    }
}

fn parts<'py>(py: Python<'py>, pairs: &[(Region, Region)]) -> PyResult<Bound<'py, PyList>> {
    let filled = pairs.iter().filter(|(from, _)| from.bytes() > 0);
    let pairs = filled.map(|(from, to)| Ok((part(py, from)?, part(py, to)?)));
    PyList::new(py, pairs.collect::<PyResult<Vec<_>>>()?)
}

fn maybe<'py>(py: Python<'py>, region: Option<&Region>) -> PyResult<Option<Bound<'py, PyTuple>>> {
    region.map(|region| part(py, region)).transpose()
}

fn number(dtype: Dtype) -> u8 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
    }
}

fn segment<'py>(py: Python<'py>, of: &Segment) -> PyResult<Bound<'py, PyTuple>> {
    // Columns in fewer bits were refused.
    let column = |kept: &Option<Moment>| maybe(py, kept.as_ref().and_then(|kept| kept.regions().next()));
    let columns = of.state.iter().map(column).collect::<PyResult<Vec<_>>>()?;
    let (weight, grad) = (part(py, &of.weight)?, part(py, &of.grad)?);
    // Compact ones were refused.
    let master = match &of.master {
        Some(Master::F32(master)) => Some(master),
        _ => None,
    };
    let master = maybe(py, master)?;
    (weight, number(of.weight_dtype), grad, number(of.grad_dtype), columns, master, of.scalars).into_pyobject(py)
}

impl Accelerator {
    fn call<T>(
        &self,
        call: &'static str,
        work: impl for<'py> FnOnce(Python<'py>, &Bound<'py, PyAny>) -> PyResult<T>,
    ) -> Result<T> {
        attached(call, &self.device, |py| work(py, self.driver.bind(py)))
    }

    fn block(&self, call: &'static str, bytes: u64) -> Result<Block> {
        let made = self.call(call, |_, driver| {
            let (addr, tensor) = driver.call_method1(call, (bytes,))?.extract::<(usize, Py<PyAny>)>()?;
            Ok(Block { addr, handle: Arc::new(Object(tensor)) })
        });
        match made {
            Err(Error::OutOfDeviceMemory { device, .. }) => {
                let (available_bytes, capacity_bytes) = self.memory().unwrap_or_default();
                Err(Error::OutOfDeviceMemory { device, requested_bytes: bytes, available_bytes, capacity_bytes })
            }
            made => made,
        }
    }

    fn update(&self, stream: &Handle, update: &Update<'_>) -> Result<()> {
        self.call("update", |py, driver| {
            let segments = update.segments.iter().map(|of| segment(py, of)).collect::<PyResult<Vec<_>>>()?;
            let sets: Vec<_> = update.scalars.iter().map(|set| (set.origin.hypers.to_vec(), set.origin.step)).collect();
            let (scale, skip) = (maybe(py, update.grad_scale.as_ref())?, maybe(py, update.skip.as_ref())?);
            let arguments = (object(stream)?, update.rule.name, segments, sets, scale, skip);
            driver.call_method1(intern!(py, "update"), arguments).map(drop)
        })
    }
}

impl Driver for Accelerator {
    fn names(&self) -> (String, String) {
        (self.device.clone(), self.model.clone())
    }

    fn pinning(&self) -> Pinning {
        self.pinning
    }

    fn memory(&self) -> Result<(u64, u64)> {
        self.call("memory", |_, driver| driver.call_method0("memory")?.extract())
    }

    fn alloc(&self, bytes: u64) -> Result<Block> {
        self.block("alloc", bytes)
    }

    fn pin(&self, bytes: u64) -> Result<Block> {
        self.block("pin", bytes)
    }

    fn register(&self, addr: usize, bytes: u64) -> Result<()> {
        self.call("register", |_, driver| driver.call_method1("register", (addr, bytes)).map(drop))
    }

    fn unregister(&self, addr: usize) {
        let _ = self.call("unregister", |_, driver| driver.call_method1("unregister", (addr,)).map(drop));
    }

    fn free(&self, handle: Option<Handle>) {
        let _ = self.call("drain", |_, driver| {
            let drained = driver.call_method0("drain");
            drop(handle);
            drained.map(drop)
        });
    }

    fn stream(&self, name: &str) -> Result<Handle> {
        self.call(
            "stream",
            |_, driver| Ok(Arc::new(Object(driver.call_method1("stream", (name,))?.unbind())) as Handle),
        )
    }

    fn borrow_stream(&self, handle: usize) -> Result<Handle> {
        self.call("borrow_stream", |_, driver| {
            Ok(Arc::new(Object(driver.call_method1("borrow_stream", (handle,))?.unbind())) as Handle)
        })
    }

    fn event(&self, timed: bool) -> Result<Handle> {
        self.call("event", |_, driver| Ok(Arc::new(Object(driver.call_method1("event", (timed,))?.unbind())) as Handle))
    }

    fn record(&self, event: &Handle, stream: &Handle) -> Result<()> {
        self.call("record", |py, driver| {
            driver.call_method1(intern!(py, "record"), (object(event)?, object(stream)?)).map(drop)
        })
    }

    fn wait(&self, stream: &Handle, event: &Handle) -> Result<()> {
        self.call("wait", |py, driver| {
            driver.call_method1(intern!(py, "wait"), (object(stream)?, object(event)?)).map(drop)
        })
    }

    fn query(&self, event: &Handle) -> Result<bool> {
        self.call("query", |py, driver| driver.call_method1(intern!(py, "query"), (object(event)?,))?.extract())
    }

    fn synchronize(&self, event: &Handle) -> Result<()> {
        self.call("synchronize", |py, driver| {
            driver.call_method1(intern!(py, "synchronize"), (object(event)?,)).map(drop)
        })
    }

    fn elapsed_ns(&self, start: &Handle, end: &Handle) -> Result<u64> {
        let elapsed = self.call("elapsed_ns", |py, driver| {
            driver.call_method1(intern!(py, "elapsed_ns"), (object(start)?, object(end)?))?.extract()
        });
        // Torch refuses events that were not reached, or carry no time.
        elapsed.map_err(|refusal| Error::BadOperands { operation: "elapsed", reason: refusal.to_string() })
    }

    fn copy(&self, stream: &Handle, pairs: &[(Region, Region)]) -> Result<()> {
        self.call("copy", |py, driver| {
            driver.call_method1(intern!(py, "copy"), (object(stream)?, parts(py, pairs)?)).map(drop)
        })
    }

    fn launch(&self, stream: &Handle, kernel: &Kernel<'_>) -> Result<()> {
        match kernel {
            Kernel::Update(update) => self.update(stream, update),
            Kernel::CopyPairs { pairs } => self.call("copy_pairs", |py, driver| {
                driver.call_method1("copy_pairs", (object(stream)?, parts(py, pairs)?)).map(drop)
            }),
            Kernel::Fill { dst, byte } => self.call("fill", |py, driver| {
                driver.call_method1("fill", (object(stream)?, part(py, dst)?, byte)).map(drop)
            }),
            Kernel::Uniform { dst, seed, low, high } => self.call("uniform", |py, driver| {
                driver.call_method1("uniform", (object(stream)?, part(py, dst)?, seed, low, high)).map(drop)
            }),
            Kernel::Powers { dst, base, first } => self.call("powers", |py, driver| {
                driver.call_method1("powers", (object(stream)?, part(py, dst)?, base, first)).map(drop)
            }),
            Kernel::CountDifferences { a, b, count } => self.call("count_differences", |py, driver| {
                let (a, b, count) = (part(py, a)?, part(py, b)?, part(py, count)?);
                driver.call_method1("count_differences", (object(stream)?, a, b, count)).map(drop)
            }),
            // For steps that update on a second copy of the state, which this backend refuses before it comes here.
            Kernel::CompareMasters { .. } | Kernel::RoundMasters { .. } => Err(Error::BadOperands {
                operation: kernel.name(),
                reason: "the backend torch does not have this kernel".to_owned(),
            }),
            Kernel::Spin { ns } => {
                self.call("spin", |_, driver| driver.call_method1("spin", (object(stream)?, ns)).map(drop))
            }
            Kernel::Trap => Err(Error::BadOperands {
                operation: "trap",
                reason: "torch has no kernel that fails on purpose".to_owned(),
            }),
        }
    }
}
