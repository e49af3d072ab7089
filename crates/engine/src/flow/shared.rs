//! What several users of one device share in a process: made by the first who asks for it, freed with the last.
//!
//! Rings, and the streams that go with them, cost memory for each of them and for nothing but the moment of a step. So
//! all optimizers of a device that want the same slots use the same ones.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use forebay_device::{PerProcess, SharedDevice};

use crate::error::Result;

/// What a user asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedKey {
    /// The address of the device, which what is shared keeps alive.
    device: usize,
    slots: usize,
    slot_bytes: u64,
}

impl SharedKey {
    /// Slots of a device.
    pub(crate) fn new(device: &SharedDevice, slots: usize, slot_bytes: u64) -> Self {
        Self { device: Arc::as_ptr(device).cast::<()>().addr(), slots, slot_bytes }
    }
}

/// What was made and is still used; a `T` keeps its device alive. A forked child shares nothing with its parent.
#[derive(Debug)]
pub(crate) struct Shared<T> {
    entries: PerProcess<Mutex<Entries<T>>>,
}

#[derive(Debug)]
struct Entries<T>(Vec<(SharedKey, Weak<T>)>);

impl<T> Default for Entries<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Entries<T> {
    fn find(&self, key: SharedKey) -> Option<Arc<T>> {
        self.0.iter().find(|(known, _)| *known == key).and_then(|(_, entry)| entry.upgrade())
    }

    /// Adds one, in the place of what has the same key, and forgets what is no longer used.
    fn put(&mut self, key: SharedKey, made: &Arc<T>) {
        self.0.retain(|(known, entry)| *known != key && entry.strong_count() > 0);
        self.0.push((key, Arc::downgrade(made)));
    }
}

impl<T: Send + Sync + 'static> Shared<T> {
    pub(crate) const fn new() -> Self {
        Self { entries: PerProcess::new() }
    }

    fn lock(&self) -> MutexGuard<'static, Entries<T>> {
        self.entries.here().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is there, if it is sound.
    pub(crate) fn find(&self, key: SharedKey, is_sound: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        let found = self.lock().find(key);
        // With no lock held: the last user may have gone meanwhile, and then this frees it.
        found.filter(|found| is_sound(found))
    }

    /// The same, or what `make` makes. It takes the place of one that is not sound, which its users keep.
    pub(crate) fn find_or_make(
        &self,
        key: SharedKey,
        is_sound: impl Fn(&T) -> bool,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<Arc<T>> {
        // Locked while it is made: two threads that ask at once get the same one.
        let mut entries = self.lock();
        if let Some(found) = entries.find(key).filter(|found| is_sound(found)) {
            return Ok(found);
        }
        let made = Arc::new(make()?);
        entries.put(key, &made);
        Ok(made)
    }
}
