//! The devices of this process: one for each name, opened at its first use and kept until the process ends.
//!
//! Every caller that opens `cuda:0` gets the same device: one context, and its kernels loaded once. It is never closed,
//! because closing drains the context, and another user's step may be running there.
//!
//! [Note: the registry after a fork] Devices do not work in a forked child, and the registry's lock may have been held
//! by a thread that the child does not have. So a child never touches its parent's registry: it makes its own registry
//! and opens its own devices.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::device::SharedDevice;
use crate::error::Result;

struct Registry {
    pid: u32,
    devices: Mutex<Vec<(String, SharedDevice)>>,
}

impl Registry {
    /// This process's own.
    fn here() -> &'static Self {
        static CURRENT: AtomicPtr<Registry> = AtomicPtr::new(std::ptr::null_mut());
        loop {
            let current = CURRENT.load(Ordering::Acquire);
            // SAFETY: null, or a registry that was leaked below: never changed except under its lock, and never freed.
            if let Some(found) = unsafe { current.as_ref() }
                && found.pid == std::process::id()
            {
                return found;
            }
            let made = Box::into_raw(Box::new(Self { pid: std::process::id(), devices: Mutex::default() }));
            if CURRENT.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: made above, and no other thread has seen it.
                drop(unsafe { Box::from_raw(made) });
            }
        }
    }
}

/// The device of this name, opened by the first call. A failure is not kept: the next call tries again.
pub(crate) fn shared(name: &str, open: impl FnOnce() -> Result<SharedDevice>) -> Result<SharedDevice> {
    // Locked while it opens: two threads that ask at once must not both load the kernels.
    let mut devices = Registry::here().devices.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, device)) = devices.iter().find(|(known, _)| known == name) {
        return Ok(device.clone());
    }
    let device = open()?;
    devices.push((name.to_owned(), device.clone()));
    Ok(device)
}
