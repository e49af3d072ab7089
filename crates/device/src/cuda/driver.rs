//! The driver: loaded at run time; its error codes become typed errors.

use std::cell::Cell;
use std::ffi::CStr;
use std::sync::{Arc, OnceLock};

use cudarc::driver::{result, sys};

use crate::error::{Error, Result};

/// The oldest driver whose CUDA version takes the shipped PTX and has every function used here.
pub(crate) const NEEDED_VERSION: i32 = 12_040;

/// Loads and initialises the driver once; says why there is none.
pub(crate) fn load() -> Result<()> {
    static LOADED: OnceLock<Result<()>> = OnceLock::new();
    LOADED
        .get_or_init(|| {
            start(|| std::panic::catch_unwind(probe).unwrap_or_else(|_| Err("a driver function is missing".to_owned())))
        })
        .clone()
}

/// What the driver says of itself: its version, or why it cannot be used.
type Answer = std::result::Result<i32, String>;

fn probe() -> Answer {
    // SAFETY: looks for the library file; runs nothing but its loader.
    if !unsafe { sys::is_culib_present() } {
        return Err("there is no CUDA driver library (libcuda.so.1) on this machine".to_owned());
    }
    let mut version = 0;
    // SAFETY: writes one integer; allowed before `cuInit`.
    let answer = unsafe { sys::cuDriverGetVersion(&mut version) };
    if answer != sys::CUresult::CUDA_SUCCESS {
        return Err(format!("the CUDA driver does not tell its version: {answer:?}"));
    }
    if version >= NEEDED_VERSION {
        result::init().map_err(|error| format!("the CUDA driver does not start: {:?}", error.0))?;
    }
    Ok(version)
}

/// Judges the driver's answer; apart from the asking, so that every answer can be tested.
fn start(ask: impl FnOnce() -> Answer) -> Result<()> {
    match ask() {
        Err(reason) => Err(Error::DeviceAbsent { device: "cuda".to_owned(), reason }),
        Ok(found) if found < NEEDED_VERSION => Err(Error::DriverTooOld { found, needed: NEEDED_VERSION }),
        Ok(_) => Ok(()),
    }
}

/// A call's result as ours.
pub(crate) fn check(call: &'static str, answer: sys::CUresult) -> Result<()> {
    if answer == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(error(call, answer)) }
}

/// Errors of running code poison the whole context and are reported by the next call, whichever it is.
fn is_asynchronous(answer: sys::CUresult) -> bool {
    use sys::CUresult as R;
    matches!(
        answer,
        R::CUDA_ERROR_ILLEGAL_ADDRESS
            | R::CUDA_ERROR_LAUNCH_TIMEOUT
            | R::CUDA_ERROR_ASSERT
            | R::CUDA_ERROR_HARDWARE_STACK_ERROR
            | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | R::CUDA_ERROR_MISALIGNED_ADDRESS
            | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | R::CUDA_ERROR_INVALID_PC
            | R::CUDA_ERROR_LAUNCH_FAILED
            | R::CUDA_ERROR_ECC_UNCORRECTABLE
            | R::CUDA_ERROR_UNKNOWN
    )
}

fn error(call: &'static str, answer: sys::CUresult) -> Error {
    let words = |ask: unsafe fn(sys::CUresult, *mut *const std::ffi::c_char) -> sys::CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: writes one pointer, to a constant string of the driver's, or null for an unknown code.
        unsafe {
            ask(answer, &mut text);
            if text.is_null() { format!("{answer:?}") } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        }
    };
    let (name, text) = (words(sys::cuGetErrorName), words(sys::cuGetErrorString));
    if is_asynchronous(answer) {
        return Error::StreamFailed {
            stream: "of this CUDA context".to_owned(),
            reason: format!("{name}: {text} (seen by {call}; the context takes no more work)"),
        };
    }
    Error::Driver { call, code: answer as u32, name, text }
}

thread_local! {
    /// The context that this thread has entered and is bound to; 0 for none.
    static ENTERED: Cell<usize> = const { Cell::new(0) };
}

/// A device's primary context, the one torch uses too.
#[derive(Debug)]
pub(crate) struct Context {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    pub(crate) name: String,
    pub(crate) model: String,
    pid: u32,
}

// SAFETY: a context handle may be used from any thread; every use binds it to the calling thread first.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Self>> {
        load()?;
        let name = format!("cuda:{ordinal}");
        let count = device_count()?;
        if ordinal >= count {
            return Err(Error::DeviceAbsent {
                device: name,
                reason: format!("this machine has {count} CUDA device(s)"),
            });
        }
        let device = result::device::get(ordinal as i32).map_err(|e| error("cuDeviceGet", e.0))?;
        let model = result::device::get_name(device).map_err(|e| error("cuDeviceGetName", e.0))?;
        // SAFETY: `device` was just given by the driver. Released in `drop`.
        let raw = unsafe { result::primary_ctx::retain(device) }.map_err(|e| error("cuDevicePrimaryCtxRetain", e.0))?;
        Ok(Arc::new(Self { raw, device, name, model, pid: std::process::id() }))
    }

    /// Whether this process opened it; CUDA does not survive a fork.
    pub(crate) fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    pub(crate) fn not_forked(&self) -> Result<()> {
        if self.is_ours() { Ok(()) } else { Err(Error::Forked { device: self.name.clone() }) }
    }

    /// Makes the context current on this thread until the guard goes, and lets the thread make calls that would
    /// otherwise break a graph capture in progress on another one.
    pub(crate) fn bind(&self) -> Result<Option<Bound>> {
        if ENTERED.get() == self.raw as usize {
            return Ok(None);
        }
        self.not_forked()?;
        let mut previous = std::ptr::null_mut();
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver is loaded (a `Context` exists); each call writes one value or takes a live handle.
        unsafe {
            check("cuCtxGetCurrent", sys::cuCtxGetCurrent(&mut previous))?;
            if previous != self.raw {
                check("cuCtxSetCurrent", sys::cuCtxSetCurrent(self.raw))?;
            }
            check("cuThreadExchangeStreamCaptureMode", sys::cuThreadExchangeStreamCaptureMode(&mut mode))?;
        }
        Ok(Some(Bound { previous: (previous != self.raw).then_some(previous), mode }))
    }

    /// Binds once for many calls of this thread.
    pub(crate) fn enter(&self) -> Result<Scope> {
        let bound = self.bind()?;
        Ok(Scope { outer: ENTERED.replace(self.raw as usize), _bound: bound })
    }

    /// Binds and makes one call.
    pub(crate) fn call(&self, call: &'static str, make: impl FnOnce() -> sys::CUresult) -> Result<()> {
        let _bound = self.bind()?;
        check(call, make())
    }

    /// Waits for everything submitted to the device, by anybody. Errors are left for the next call to find.
    pub(crate) fn drain(&self) {
        // SAFETY: the context is bound by `call`.
        let _ = self.call("cuCtxSynchronize", || unsafe { sys::cuCtxSynchronize() });
    }

    /// Free and total bytes of the device.
    pub(crate) fn memory(&self) -> Result<(u64, u64)> {
        let _bound = self.bind()?;
        result::mem_get_info().map(|(free, total)| (free as u64, total as u64)).map_err(|e| error("cuMemGetInfo", e.0))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.is_ours() {
            // SAFETY: retained once in `open`.
            let _ = unsafe { result::primary_ctx::release(self.device) };
        }
    }
}

/// A thread's stay in a context; see [`Context::enter`].
pub(crate) struct Scope {
    outer: usize,
    _bound: Option<Bound>,
}

impl Drop for Scope {
    fn drop(&mut self) {
        ENTERED.set(self.outer);
    }
}

/// Restores the thread's earlier context and capture mode; see [`Context::bind`].
pub(crate) struct Bound {
    previous: Option<sys::CUcontext>,
    mode: sys::CUstreamCaptureMode,
}

impl Drop for Bound {
    fn drop(&mut self) {
        // SAFETY: puts back what the driver itself handed out on this thread; torch relies on its current context.
        unsafe {
            let _ = sys::cuThreadExchangeStreamCaptureMode(&mut self.mode);
            if let Some(previous) = self.previous {
                let _ = sys::cuCtxSetCurrent(previous);
            }
        }
    }
}

/// Number of CUDA devices.
pub(crate) fn device_count() -> Result<usize> {
    load()?;
    result::device::get_count().map(|count| count as usize).map_err(|e| error("cuDeviceGetCount", e.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_answer_of_the_driver_has_its_error() {
        let absent = start(|| Err("no library".to_owned())).unwrap_err();
        let wanted = "device cuda is not available: no library; use another device, or the CPU";
        assert_eq!(absent.to_string(), wanted);
        let old = start(|| Ok(11_080)).unwrap_err();
        assert_eq!(old, Error::DriverTooOld { found: 11_080, needed: NEEDED_VERSION });
        assert!(old.to_string().contains("supports CUDA 11.8, forebay needs 12.4"), "{old}");
        assert_eq!(start(|| Ok(NEEDED_VERSION)), Ok(()));
    }
}
