//! A device that misbehaves on demand, for tests: the n-th call of a kind fails, runs late or runs out of memory.

use std::sync::{Arc, Mutex, PoisonError};

use crate::device::{Counters, Device, Entered, Info, Memory, SharedDevice};
use crate::error::{Error, Result};
use crate::host::{HostThreads, HostUpdate, HostWork};
use crate::kernel::Kernel;
use crate::memory::{Buffer, Region, Slab, SlabLayout};
use crate::stream::{Event, Stream};
use crate::update::Rule;

/// The calls that can be made to misbehave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// [`Device::alloc`].
    Alloc,
    /// [`Device::pin`].
    Pin,
    /// [`Device::stream`] and [`Device::urgent_stream`].
    Stream,
    /// [`Device::event`] and [`Device::timed_event`].
    Event,
    /// [`Device::record`].
    Record,
    /// [`Device::wait`].
    Wait,
    /// [`Device::synchronize`].
    Synchronize,
    /// [`Device::copy`].
    Copy,
    /// [`Device::launch`].
    Launch,
    /// [`Device::write`].
    Write,
    /// [`Device::update_on_host`]. To break it is to let it fail on a thread.
    HostUpdate,
}

/// How a call misbehaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misbehaviour {
    /// It returns an error and does nothing.
    Fail,
    /// It returns the error of a full device or budget.
    OutOfMemory,
    /// The stream it names is held up for so long before the work.
    Late {
        /// How long.
        ns: u64,
    },
    /// It is accepted, and the stream it names fails when it gets there.
    Break,
}

struct Trigger {
    call: Call,
    /// Matching calls still to pass before it strikes, once.
    after: u64,
    how: Misbehaviour,
}

/// Wraps a device and misbehaves as told.
pub struct Fault {
    inner: SharedDevice,
    triggers: Mutex<Vec<Trigger>>,
}

impl std::fmt::Debug for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Fault({:?})", self.inner)
    }
}

impl Fault {
    /// Wraps a device; without triggers it is that device.
    pub fn wrap(inner: SharedDevice) -> Arc<Self> {
        Arc::new(Self { inner, triggers: Mutex::default() })
    }

    /// The `nth` call of this kind from now, counted from 0, misbehaves, once.
    pub fn on(&self, call: Call, nth: u64, how: Misbehaviour) {
        self.triggers.lock().unwrap_or_else(PoisonError::into_inner).push(Trigger { call, after: nth, how });
    }

    /// Forgets triggers that have not struck.
    pub fn clear(&self) {
        self.triggers.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn strike(&self, call: Call) -> Option<Misbehaviour> {
        let mut triggers = self.triggers.lock().unwrap_or_else(PoisonError::into_inner);
        let mut struck = None;
        triggers.retain_mut(|one| match (one.call == call, one.after) {
            (true, 0) => {
                struck = struck.or(Some(one.how));
                false
            }
            (true, _) => {
                one.after -= 1;
                true
            }
            _ => true,
        });
        struck
    }

    /// Applies a trigger to a call that names a stream, or to one that does not.
    fn misbehave(&self, call: Call, stream: Option<&Stream>) -> Result<()> {
        let reason = || format!("injected into {call:?}");
        match (self.strike(call), stream) {
            (None, _) => Ok(()),
            (Some(Misbehaviour::OutOfMemory), _) if call == Call::Pin => {
                Err(Error::OutOfPinnedBudget { requested_bytes: 1, available_bytes: 0, budget_bytes: 0 })
            }
            (Some(Misbehaviour::OutOfMemory), _) => Err(Error::OutOfDeviceMemory {
                device: reason(),
                requested_bytes: 1,
                available_bytes: 0,
                capacity_bytes: 0,
            }),
            (Some(Misbehaviour::Late { ns }), Some(stream)) => self.inner.launch(stream, &Kernel::Spin { ns }),
            (Some(Misbehaviour::Break), Some(stream)) => self.inner.launch(stream, &Kernel::Trap),
            (Some(Misbehaviour::Fail), stream) => {
                let stream = stream.map_or("none", Stream::name).to_owned();
                Err(Error::StreamFailed { stream, reason: reason() })
            }
            (Some(how), None) => Err(Error::BadOperands {
                operation: "fault",
                reason: format!("{call:?} names no stream, so it cannot {how:?}"),
            }),
        }
    }
}

impl Device for Fault {
    fn info(&self) -> &Info {
        self.inner.info()
    }
    fn memory(&self) -> Result<Memory> {
        self.inner.memory()
    }
    fn counters(&self) -> Counters {
        self.inner.counters()
    }
    fn load(&self, rule: &'static Rule) -> Result<()> {
        self.inner.load(rule)
    }
    fn enter(&self) -> Result<Entered> {
        self.inner.enter()
    }
    fn alloc(&self, bytes: u64) -> Result<Buffer> {
        self.misbehave(Call::Alloc, None)?;
        self.inner.alloc(bytes)
    }
    fn pin(&self, layout: SlabLayout) -> Result<Slab> {
        self.misbehave(Call::Pin, None)?;
        self.inner.pin(layout)
    }
    fn stream(&self, name: &str) -> Result<Stream> {
        self.misbehave(Call::Stream, None)?;
        self.inner.stream(name)
    }
    fn urgent_stream(&self, name: &str) -> Result<Stream> {
        self.misbehave(Call::Stream, None)?;
        self.inner.urgent_stream(name)
    }
    #[expect(unsafe_code, reason = "passes the caller's promise on")]
    unsafe fn borrow_stream(&self, handle: usize, name: &str) -> Result<Stream> {
        // SAFETY: the caller's promise, unchanged.
        unsafe { self.inner.borrow_stream(handle, name) }
    }
    fn event(&self) -> Result<Event> {
        self.misbehave(Call::Event, None)?;
        self.inner.event()
    }
    fn timed_event(&self) -> Result<Event> {
        self.misbehave(Call::Event, None)?;
        self.inner.timed_event()
    }
    fn record(&self, event: &Event, stream: &Stream) -> Result<()> {
        self.misbehave(Call::Record, Some(stream))?;
        self.inner.record(event, stream)
    }
    fn wait(&self, stream: &Stream, event: &Event) -> Result<()> {
        self.misbehave(Call::Wait, Some(stream))?;
        self.inner.wait(stream, event)
    }
    fn query(&self, event: &Event) -> Result<bool> {
        self.inner.query(event)
    }
    fn synchronize(&self, event: &Event) -> Result<()> {
        self.misbehave(Call::Synchronize, None)?;
        self.inner.synchronize(event)
    }
    fn elapsed_ns(&self, start: &Event, end: &Event) -> Result<u64> {
        self.inner.elapsed_ns(start, end)
    }
    fn copy(&self, stream: &Stream, from: &Region, to: &Region) -> Result<()> {
        self.misbehave(Call::Copy, Some(stream))?;
        self.inner.copy(stream, from, to)
    }
    fn launch(&self, stream: &Stream, kernel: &Kernel<'_>) -> Result<()> {
        self.misbehave(Call::Launch, Some(stream))?;
        self.inner.launch(stream, kernel)
    }
    fn update_on_host(&self, threads: &HostThreads, update: HostUpdate) -> Result<HostWork> {
        match self.strike(Call::HostUpdate) {
            None => {}
            Some(Misbehaviour::Break) => return threads.fail(),
            Some(_) => {
                let reason = format!("injected into {:?}", Call::HostUpdate);
                return Err(Error::StreamFailed { stream: "the host's threads".to_owned(), reason });
            }
        }
        self.inner.update_on_host(threads, update)
    }
    fn finish_on_host(&self, work: HostWork) -> Result<()> {
        self.inner.finish_on_host(work)
    }
    fn read(&self, from: &Region, into: &mut [u8]) -> Result<()> {
        self.inner.read(from, into)
    }
    fn write(&self, from: &[u8], to: &Region) -> Result<()> {
        self.misbehave(Call::Write, None)?;
        self.inner.write(from, to)
    }
}
