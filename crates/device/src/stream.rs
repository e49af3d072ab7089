//! Streams and events: in-order queues of work, and points in them.
//!
//! Both are handles; the [`crate::Device`] that made them does the work. Dropping a handle never cancels or waits:
//! work that was accepted runs, and keeps what it needs alive.

use std::fmt;
use std::sync::Arc;

use crate::cpu::worker::{CpuEvent, CpuStream};
use crate::cuda::handles::{CudaEvent, CudaStream};
use crate::memory::{DeviceId, fresh_key};

/// An in-order queue of work on a device.
#[derive(Clone)]
pub struct Stream {
    pub(crate) kind: StreamKind,
    pub(crate) device: DeviceId,
    key: u64,
    name: Arc<str>,
}

#[derive(Clone)]
pub(crate) enum StreamKind {
    Cpu(Arc<CpuStream>),
    Cuda(Arc<CudaStream>),
}

impl Stream {
    pub(crate) fn new(kind: StreamKind, device: DeviceId, name: &str) -> Self {
        Self { kind, device, key: fresh_key(), name: name.into() }
    }

    /// The name it was given, for errors and traces.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether both name one queue. A borrowed stream is named anew in each call.
    pub fn is_same(&self, other: &Self) -> bool {
        match (&self.kind, &other.kind) {
            (StreamKind::Cpu(own), StreamKind::Cpu(other)) => Arc::ptr_eq(own, other),
            (StreamKind::Cuda(own), StreamKind::Cuda(of)) => own.raw == of.raw && self.device == other.device,
            _ => false,
        }
    }

    #[cfg(feature = "testing")]
    pub(crate) fn key(&self) -> u64 {
        self.key
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream#{}({})", self.key, self.name)
    }
}

/// A point in a stream. Recording it again moves it; a stream's wait is for the
/// point it marked when the wait was submitted; a host that waits while it moves may wait for the later point.
#[derive(Clone)]
pub struct Event {
    pub(crate) kind: EventKind,
    pub(crate) device: DeviceId,
    key: u64,
}

#[derive(Clone)]
pub(crate) enum EventKind {
    Cpu(Arc<CpuEvent>),
    Cuda(Arc<CudaEvent>),
}

impl Event {
    pub(crate) fn new(kind: EventKind, device: DeviceId) -> Self {
        Self { kind, device, key: fresh_key() }
    }

    #[cfg(feature = "testing")]
    pub(crate) fn key(&self) -> u64 {
        self.key
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event#{}", self.key)
    }
}
