//! Events to order work with, used again when nobody refers to them any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use forebay_device::{Event, SharedDevice};

use crate::error::Result;
use crate::sync::{Mutex, lock};

/// Events of one device that nobody uses at the moment.
#[derive(Debug)]
pub(crate) struct Marks {
    device: SharedDevice,
    timed: bool,
    free: Mutex<Vec<Event>>,
}

impl Marks {
    pub(crate) fn new(device: SharedDevice) -> Arc<Self> {
        Arc::new(Self { device, timed: false, free: Mutex::new(Vec::new()) })
    }

    /// Marks that also carry a time.
    pub(crate) fn timed(device: SharedDevice) -> Arc<Self> {
        Arc::new(Self { device, timed: true, free: Mutex::new(Vec::new()) })
    }

    /// One that nobody else refers to; made only if there is none.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Arc<Mark>> {
        let free = lock(&self.free).pop();
        let event = match free {
            Some(event) => event,
            None if self.timed => self.device.timed_event()?,
            None => self.device.event()?,
        };
        Ok(Arc::new(Mark { event, order: AtomicU64::new(0), home: self.clone() }))
    }
}

/// A point in a stream; its event goes back when the last reference goes.
#[derive(Debug)]
pub(crate) struct Mark {
    event: Event,
    order: AtomicU64,
    home: Arc<Marks>,
}

impl Mark {
    pub(crate) fn event(&self) -> &Event {
        &self.event
    }

    /// Its place among the marks of one lane, larger for later ones; known once the lane has recorded it.
    pub(crate) fn order(&self) -> u64 {
        self.order.load(Relaxed)
    }

    pub(crate) fn set_order(&self, order: u64) {
        self.order.store(order, Relaxed);
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        lock(&self.home.free).push(self.event.clone());
    }
}
