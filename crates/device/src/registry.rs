//! What a process has once: values that are made at their first use and live until the process ends, and its devices.
//!
//! Every caller that opens `cuda:0` gets the same device: one context, and its kernels loaded once. It is never closed,
//! because closing drains the context, and another user's step may be running there.
//!
//! [Note: the registry after a fork] Devices do not work in a forked child, and a lock may have been held by a thread
//! that the child does not have. So a child never touches the values of its parent: it makes its own, and opens its own
//! devices.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::device::SharedDevice;
use crate::error::Result;

/// A value that each process has for itself, also a forked child; see [Note: the registry after a fork].
#[derive(Debug)]
pub struct PerProcess<T> {
    current: AtomicPtr<OfProcess<T>>,
}

#[derive(Debug)]
struct OfProcess<T> {
    pid: u32,
    value: T,
}

impl<T: Default + Send + Sync + 'static> PerProcess<T> {
    /// A value that no process has yet.
    #[expect(clippy::new_without_default, reason = "made in statics only")]
    pub const fn new() -> Self {
        Self { current: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// This process's own.
    pub fn here(&self) -> &'static T {
        loop {
            let current = self.current.load(Ordering::Acquire);
            // SAFETY: null, or a value that was leaked below: never changed through this pointer, and never freed.
            if let Some(found) = unsafe { current.as_ref() }
                && found.pid == std::process::id()
            {
                return &found.value;
            }
            let made = Box::into_raw(Box::new(OfProcess { pid: std::process::id(), value: T::default() }));
            if self.current.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: made above, and no other thread has seen it.
                drop(unsafe { Box::from_raw(made) });
            }
        }
    }
}

/// The device of this name, opened by the first call. A failure is not kept: the next call tries again.
pub(crate) fn shared(name: &str, open: impl FnOnce() -> Result<SharedDevice>) -> Result<SharedDevice> {
    static DEVICES: PerProcess<Mutex<Vec<(String, SharedDevice)>>> = PerProcess::new();
    // Locked while it opens: two threads that ask at once must not both load the kernels.
    let mut devices = DEVICES.here().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, device)) = devices.iter().find(|(known, _)| known == name) {
        return Ok(device.clone());
    }
    let device = open()?;
    devices.push((name.to_owned(), device.clone()));
    Ok(device)
}
