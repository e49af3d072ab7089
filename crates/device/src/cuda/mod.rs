//! The CUDA backend: the driver API, loaded at run time.
//!
//! The binary links no CUDA library. If the driver is missing or too old, opening the device returns an error, and
//! everything else works. The device uses the primary context, as torch does, and can borrow torch's streams. The
//! caller orders all work: this backend adds no waits, events or tracking of its own.

mod driver;
pub(crate) mod handles;
mod launch;
mod rows;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use crate::cpu::threads;
use crate::device::{Backend, Counters, Device, Entered, Info, Memory, check_copy};
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::ledger::Ledger;
use crate::memory::{Buffer, DeviceId, Place, Region, Slab, SlabLayout};
use crate::pinned::{HostMapping, PinStats};
use crate::stream::{Event, EventKind, Stream, StreamKind};
use crate::update::Rule;
use driver::{Context, check};
use handles::{CudaEvent, CudaMemory, CudaStream, Registration};
use launch::Kernels;

pub(crate) use driver::device_count;

/// What the shipped kernels were compiled with and for: `PTX of CUDA 12.4 for sm_80 and newer`.
pub fn ptx_version() -> String {
    let after = |mark: &str| {
        let rest = launch::MOVES.split_once(mark).map_or("", |(_, rest)| rest);
        rest.split([',', '\n']).next().unwrap_or_default().trim()
    };
    format!("PTX of CUDA {} for {} and newer", after("tools, release "), after("\n.target "))
}

/// How long a waiting thread yields between looks before it starts to nap.
const YIELD: Duration = Duration::from_millis(2);
/// How long it looks away meanwhile: see [Note: looking without a pause].
const PAUSE: Duration = Duration::from_micros(20);
/// How long it naps between looks; the system adds about 50 microseconds.
const NAP: Duration = Duration::from_micros(20);

/// How to open a GPU.
#[derive(Debug, Clone, Default)]
pub struct CudaOptions {
    /// Which one.
    pub ordinal: usize,
    /// Other kernels than the shipped ones for copies and powers, as PTX with the same entries.
    pub ptx: Option<String>,
}

/// One GPU.
pub struct CudaDevice {
    info: Info,
    ledger: Arc<Ledger>,
    kernels: Kernels,
    context: Arc<Context>,
}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaDevice").field("info", &self.info).finish_non_exhaustive()
    }
}

impl CudaDevice {
    /// Opens it, or says what is missing.
    pub fn open(options: CudaOptions) -> Result<Arc<Self>> {
        let context = Context::open(options.ordinal)?;
        let kernels = Kernels::load(&context, options.ptx.as_deref())?;
        let info = Info {
            id: DeviceId::fresh(),
            name: context.name.clone(),
            model: context.model.clone(),
            backend: Backend::Cuda,
        };
        Ok(Arc::new(Self { info, ledger: Ledger::new(), kernels, context }))
    }

    fn raw_stream(&self, stream: &Stream) -> Result<sys::CUstream> {
        match &stream.kind {
            StreamKind::Cuda(handle) if stream.device == self.info.id => Ok(handle.raw),
            _ => Err(self.foreign("stream", stream)),
        }
    }

    fn raw_event(&self, event: &Event) -> Result<sys::CUevent> {
        match &event.kind {
            EventKind::Cuda(handle) if event.device == self.info.id => Ok(handle.raw),
            _ => Err(self.foreign("event", event)),
        }
    }

    fn make_event(&self, timed: bool) -> Result<Event> {
        let event = CudaEvent::create(&self.context, timed)?;
        self.ledger.count_event();
        Ok(Event::new(EventKind::Cuda(Arc::new(event)), self.info.id))
    }

    fn foreign(&self, operation: &'static str, what: &dyn std::fmt::Debug) -> Error {
        Error::BadOperands { operation, reason: format!("{what:?} does not belong to {}", self.info.name) }
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &Info {
        &self.info
    }

    fn memory(&self) -> Result<Memory> {
        let (free_bytes, capacity_bytes) = self.context.memory()?;
        Ok(Memory {
            capacity_bytes,
            free_bytes,
            allocated_bytes: self.ledger.allocated_bytes.load(Relaxed),
            pinned_bytes: self.ledger.pinned_bytes.load(Relaxed),
        })
    }

    fn counters(&self) -> Counters {
        self.ledger.counters()
    }

    fn alloc(&self, bytes: u64) -> Result<Buffer> {
        if bytes == 0 {
            return Err(Error::ZeroSize { what: "a device buffer" });
        }
        let (free_bytes, capacity_bytes) = self.context.memory()?;
        let full = || Error::OutOfDeviceMemory {
            device: self.info.name.clone(),
            requested_bytes: bytes,
            available_bytes: free_bytes,
            capacity_bytes,
        };
        let charge = self.ledger.allocate(bytes, capacity_bytes).map_err(|_| full())?;
        let memory = CudaMemory::allocate(&self.context, bytes, charge)?.map_err(|_| full())?;
        self.ledger.count_allocation();
        Ok(Buffer::new(memory.raw as usize, bytes, Place::Device, Some(self.info.id), Arc::new(memory)))
    }

    fn pin(&self, layout: SlabLayout) -> Result<Slab> {
        self.context.not_forked()?;
        let charge = self.ledger.pin(layout.bytes());
        let mapping = HostMapping::new(layout.bytes(), threads())?;
        let (fault_ns, huge_pages) = (mapping.fault_ns, mapping.huge_pages);
        let start = Instant::now();
        let registration = Registration::new(&self.context, mapping, layout.pieces(), charge)?;
        let register_ns = start.elapsed().as_nanos() as u64;
        self.ledger.count_pin();
        let stats = PinStats { bytes: layout.bytes(), fault_ns, register_ns, huge_pages };
        let addr = registration.addr();
        let buffer = Buffer::new(addr, layout.bytes(), Place::Pinned, Some(self.info.id), Arc::new(registration));
        Ok(Slab::new(buffer.in_pieces(layout.pieces()), layout, stats))
    }

    fn stream(&self, name: &str) -> Result<Stream> {
        let stream = CudaStream::create(&self.context)?;
        self.ledger.count_stream();
        Ok(Stream::new(StreamKind::Cuda(Arc::new(stream)), self.info.id, name))
    }

    fn urgent_stream(&self, name: &str) -> Result<Stream> {
        let stream = CudaStream::create_urgent(&self.context)?;
        self.ledger.count_stream();
        Ok(Stream::new(StreamKind::Cuda(Arc::new(stream)), self.info.id, name))
    }

    #[expect(unsafe_code, reason = "declared unsafe by the contract; the caller vouches for the handle")]
    unsafe fn borrow_stream(&self, handle: usize, name: &str) -> Result<Stream> {
        Ok(Stream::new(StreamKind::Cuda(Arc::new(CudaStream::borrow(handle))), self.info.id, name))
    }

    fn event(&self) -> Result<Event> {
        self.make_event(false)
    }

    fn timed_event(&self) -> Result<Event> {
        self.make_event(true)
    }

    fn record(&self, event: &Event, stream: &Stream) -> Result<()> {
        let (event, stream) = (self.raw_event(event)?, self.raw_stream(stream)?);
        // SAFETY: both handles are alive, held by the arguments, and of this context.
        self.context.call("cuEventRecord", || unsafe { sys::cuEventRecord(event, stream) })
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<()> {
        let (event, stream) = (self.raw_event(event)?, self.raw_stream(stream)?);
        // SAFETY: as in `record`.
        self.context.call("cuStreamWaitEvent", || unsafe { sys::cuStreamWaitEvent(stream, event, 0) })
    }

    fn query(&self, event: &Event) -> Result<bool> {
        let event = self.raw_event(event)?;
        let _bound = self.context.bind()?;
        // SAFETY: as in `record`.
        match unsafe { sys::cuEventQuery(event) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => check("cuEventQuery", answer).map(|()| true),
        }
    }

    /// Polls, because both of the driver's own ways cost more: it spins on a core that others may need, or it makes every
    /// recording of the event raise an interrupt, which holds up the copy engine. A chunk is waited for less than a
    /// millisecond; for so long the thread offers its core to others and looks again, since a sleeping core may take longer
    /// to wake than a slot can wait. After that it naps.
    ///
    /// [Note: looking without a pause] A look takes a lock of the driver. A thread that looks without a pause has that lock
    /// most of the time, and whoever launches a kernel may not get it until the looking ends: with a thread that waited so
    /// for slot after slot, torch's thread stood in one launch for 0.8 s of a step of 2.5 s, and the GPU ran dry. So
    /// between two looks the thread does nothing that concerns the driver.
    fn synchronize(&self, event: &Event) -> Result<()> {
        let start = Instant::now();
        while !self.query(event)? {
            let looked = Instant::now();
            if looked - start < YIELD {
                while looked.elapsed() < PAUSE {
                    std::thread::yield_now();
                }
            } else {
                std::thread::sleep(NAP);
            }
        }
        Ok(())
    }

    fn elapsed_ns(&self, start: &Event, end: &Event) -> Result<u64> {
        let (start, end) = (self.raw_event(start)?, self.raw_event(end)?);
        let _bound = self.context.bind()?;
        let mut ms = 0f32;
        // SAFETY: as in `record`; writes one float.
        match unsafe { sys::cuEventElapsedTime(&mut ms, start, end) } {
            sys::CUresult::CUDA_ERROR_NOT_READY | sys::CUresult::CUDA_ERROR_INVALID_HANDLE => Err(Error::BadOperands {
                operation: "elapsed",
                reason: "an event was not reached yet, or carries no time".to_owned(),
            }),
            answer => check("cuEventElapsedTime", answer).map(|()| (f64::from(ms.max(0.0)) * 1e6) as u64),
        }
    }

    fn copy(&self, stream: &Stream, from: &Region, to: &Region) -> Result<()> {
        check_copy(self.info.id, from, to)?;
        let raw = self.raw_stream(stream)?;
        if from.bytes() == 0 {
            return Ok(());
        }
        // SAFETY: two live, disjoint ranges of equal length that this context can reach; unified addressing gives the
        // direction. They stay alive until the copy has ended, because their owners drain the device before they free;
        // of pageable memory the driver is done when the call returns.
        self.context.call("cuMemcpyAsync", || unsafe {
            sys::cuMemcpyAsync(to.addr() as u64, from.addr() as u64, from.bytes() as usize, raw)
        })
    }

    fn copy_all(&self, stream: &Stream, pairs: &[(Region, Region)]) -> Result<()> {
        let mut rest = pairs;
        while let Some((from, to)) = rest.first() {
            let rows = rows::evenly_spaced(rest);
            if rows.count < 2 {
                self.copy(stream, from, to)?;
            } else {
                rest[..rows.count].iter().try_for_each(|(from, to)| check_copy(self.info.id, from, to))?;
                let (raw, copy) = (self.raw_stream(stream)?, rows.describe(from, to));
                // SAFETY: as in `copy`, for each row; `evenly_spaced` found that the rows are just these pairs.
                self.context.call("cuMemcpy2DAsync", || unsafe { sys::cuMemcpy2DAsync_v2(&copy, raw) })?;
            }
            rest = &rest[rows.count..];
        }
        Ok(())
    }

    fn launch(&self, stream: &Stream, kernel: &Kernel<'_>) -> Result<()> {
        kernel.check(self.info.id)?;
        let raw = self.raw_stream(stream)?;
        let _bound = self.context.bind()?;
        self.kernels.launch(raw, kernel)
    }

    fn load(&self, rule: &'static Rule) -> Result<()> {
        self.kernels.load_rule(rule)
    }

    fn enter(&self) -> Result<Entered> {
        Ok(Entered::holding(self.context.enter()?))
    }

    // Slabs are not mapped in a forked child.
    fn read(&self, from: &Region, into: &mut [u8]) -> Result<()> {
        self.context.not_forked()?;
        from.read(self.info.id, into)
    }

    fn write(&self, from: &[u8], to: &Region) -> Result<()> {
        self.context.not_forked()?;
        to.write(self.info.id, from)
    }
}
