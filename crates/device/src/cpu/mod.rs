//! The CPU backend: the reference, and the default without a GPU.
//!
//! Device memory is host memory with a capacity, streams are threads, and copies can be slowed down to the rate of a
//! simulated link. The results of this backend define the results of every other.

mod kernels;
mod link;
pub(crate) mod update;
pub(crate) mod worker;

use std::alloc::Layout;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

pub use link::LinkOptions;

use crate::device::{Backend, Counters, Device, Info, Memory, check_copy};
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::ledger::{Charge, Ledger};
use crate::memory::{ALIGN_BYTES, Buffer, DeviceId, Place, Region, Slab, SlabLayout};
use crate::pinned::{HostMapping, HostMemory, PinStats};
use crate::stream::{Event, EventKind, Stream, StreamKind};
use crate::thread::Cores;
use link::{Link, Way};
use update::Unit;
use worker::{CpuEvent, CpuStream, Work};

/// How to open the CPU backend.
#[derive(Debug, Clone, Default)]
pub struct CpuOptions {
    /// Bytes of device memory it pretends to have; the host's memory where not given.
    pub capacity_bytes: Option<u64>,
    /// The simulated link; memory speed where not given.
    pub link: Option<LinkOptions>,
}

/// The CPU backend.
pub struct CpuDevice {
    info: Info,
    capacity_bytes: u64,
    ledger: Arc<Ledger>,
    link: Option<Arc<Link>>,
    unit: Unit,
    pid: u32,
}

impl std::fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuDevice").field("info", &self.info).field("unit", &self.unit).finish_non_exhaustive()
    }
}

impl CpuDevice {
    /// Opens it.
    pub fn open(options: CpuOptions) -> Result<Arc<Self>> {
        if let Some(link) = &options.link {
            link.check()?;
        }
        let unit = Unit::best();
        let info = Info {
            id: DeviceId::fresh(),
            name: "cpu".to_owned(),
            model: format!("CPU, {} threads, {unit:?}", threads()),
            backend: Backend::Cpu,
        };
        Ok(Arc::new(Self {
            info,
            capacity_bytes: options.capacity_bytes.unwrap_or_else(|| HostMemory::now().total_bytes),
            ledger: Ledger::new(),
            link: options.link.map(|link| Arc::new(Link::new(link))),
            unit,
            pid: std::process::id(),
        }))
    }

    /// The worker threads stay behind in the parent: a child that queued work would wait for ever.
    fn not_forked(&self) -> Result<()> {
        if self.pid == std::process::id() { Ok(()) } else { Err(Error::Forked { device: self.info.name.clone() }) }
    }

    fn make_event(&self, timed: bool) -> Result<Event> {
        self.not_forked()?;
        self.ledger.count_event();
        Ok(Event::new(EventKind::Cpu(Arc::new(CpuEvent::new(timed))), self.info.id))
    }

    fn queue<'a>(&self, stream: &'a Stream) -> Result<&'a CpuStream> {
        self.not_forked()?;
        match &stream.kind {
            StreamKind::Cpu(queue) if stream.device == self.info.id => Ok(queue),
            _ => Err(foreign("stream", stream)),
        }
    }

    fn point<'a>(&self, event: &'a Event) -> Result<&'a CpuEvent> {
        self.not_forked()?;
        match &event.kind {
            EventKind::Cpu(point) if event.device == self.info.id => Ok(point),
            _ => Err(foreign("event", event)),
        }
    }
}

fn foreign(operation: &'static str, what: &dyn std::fmt::Debug) -> Error {
    Error::BadOperands { operation, reason: format!("{what:?} belongs to another device") }
}

/// Threads worth using.
pub(crate) fn threads() -> usize {
    Cores::here().count()
}

/// Device memory of this backend; given back when dropped.
struct Allocation {
    ptr: *mut u8,
    layout: Layout,
    _charge: Charge,
}

// SAFETY: the pointer is the sole handle to a heap block, which any thread may free; access to its bytes goes through
// the device's own ordering.
unsafe impl Send for Allocation {}
// SAFETY: as above; the struct itself offers no access to the bytes.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated with this very layout, and dropped once.
        unsafe { std::alloc::dealloc(self.ptr, self.layout) };
    }
}

/// A slab of this backend: host memory, counted while it is pinned.
struct Pinned {
    _mapping: HostMapping,
    _charge: Charge,
}

impl Device for CpuDevice {
    fn info(&self) -> &Info {
        &self.info
    }

    fn memory(&self) -> Result<Memory> {
        let allocated_bytes = self.ledger.allocated_bytes.load(Relaxed);
        Ok(Memory {
            capacity_bytes: self.capacity_bytes,
            free_bytes: self.capacity_bytes.saturating_sub(allocated_bytes),
            allocated_bytes,
            pinned_bytes: self.ledger.pinned_bytes.load(Relaxed),
        })
    }

    fn counters(&self) -> Counters {
        self.ledger.counters()
    }

    fn alloc(&self, bytes: u64) -> Result<Buffer> {
        self.not_forked()?;
        if bytes == 0 {
            return Err(Error::ZeroSize { what: "a device buffer" });
        }
        let full = |available_bytes| Error::OutOfDeviceMemory {
            device: self.info.name.clone(),
            requested_bytes: bytes,
            available_bytes,
            capacity_bytes: self.capacity_bytes,
        };
        let charge = self.ledger.allocate(bytes, self.capacity_bytes).map_err(full)?;
        let layout = usize::try_from(bytes)
            .ok()
            .and_then(|size| Layout::from_size_align(size, ALIGN_BYTES as usize).ok())
            .ok_or_else(|| full(0))?;
        // SAFETY: the size is not zero. Zeroed, because a kernel that reads what nobody wrote must not be undefined
        // behaviour here.
        let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
        if ptr.is_null() {
            return Err(full(HostMemory::now().available_bytes));
        }
        let owner = Arc::new(Allocation { ptr, layout, _charge: charge });
        self.ledger.count_allocation();
        Ok(Buffer::new(ptr as usize, bytes, Place::Device, Some(self.info.id), owner))
    }

    fn pin(&self, layout: SlabLayout) -> Result<Slab> {
        self.not_forked()?;
        let charge = self.ledger.pin(layout.bytes());
        let mapping = HostMapping::new(layout.bytes(), threads())?;
        let stats = PinStats {
            bytes: layout.bytes(),
            fault_ns: mapping.fault_ns,
            register_ns: 0,
            huge_pages: mapping.huge_pages,
        };
        let addr = mapping.addr();
        let owner = Arc::new(Pinned { _mapping: mapping, _charge: charge });
        self.ledger.count_pin();
        Ok(Slab::new(Buffer::new(addr, layout.bytes(), Place::Pinned, Some(self.info.id), owner), layout, stats))
    }

    fn stream(&self, name: &str) -> Result<Stream> {
        self.not_forked()?;
        let queue = CpuStream::start(name)?;
        self.ledger.count_stream();
        Ok(Stream::new(StreamKind::Cpu(Arc::new(queue)), self.info.id, name))
    }

    #[expect(unsafe_code, reason = "declared unsafe by the contract; this backend has nothing to borrow")]
    unsafe fn borrow_stream(&self, handle: usize, name: &str) -> Result<Stream> {
        Err(Error::BadOperands {
            operation: "borrow stream",
            reason: format!("the CPU backend has no foreign streams, {name} at {handle:#x} cannot be one"),
        })
    }

    fn event(&self) -> Result<Event> {
        self.make_event(false)
    }

    fn timed_event(&self) -> Result<Event> {
        self.make_event(true)
    }

    fn record(&self, event: &Event, stream: &Stream) -> Result<()> {
        self.queue(stream)?.record(self.point(event)?)
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<()> {
        self.queue(stream)?.wait(self.point(event)?)
    }

    fn query(&self, event: &Event) -> Result<bool> {
        self.point(event)?.is_done()
    }

    fn synchronize(&self, event: &Event) -> Result<()> {
        self.point(event)?.wait()
    }

    fn elapsed_ns(&self, start: &Event, end: &Event) -> Result<u64> {
        let (start, end) = (self.point(start)?.time()?, self.point(end)?.time()?);
        Ok(end.saturating_duration_since(start).as_nanos() as u64)
    }

    fn copy(&self, stream: &Stream, from: &Region, to: &Region) -> Result<()> {
        check_copy(self.info.id, from, to)?;
        let queue = self.queue(stream)?;
        let way = match (from.place(), to.place()) {
            (Place::Device, Place::Device) => None,
            (_, Place::Device) => Some(Way::Fetch),
            _ => Some(Way::Store),
        };
        let (from, to, link) = (from.clone(), to.clone(), self.link.clone());
        queue.run(Box::new(move || {
            let copy = || {
                // SAFETY: both regions were checked to be live memory of this backend, equal in length and disjoint,
                // and this closure keeps them alive.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        from.addr() as *const u8,
                        to.addr() as *mut u8,
                        from.bytes() as usize,
                    );
                }
            };
            match (way, &link) {
                (Some(way), Some(link)) => link.transfer(way, from.bytes(), copy),
                _ => copy(),
            }
            Ok(())
        }))
    }

    fn launch(&self, stream: &Stream, kernel: &Kernel<'_>) -> Result<()> {
        kernel.check(self.info.id)?;
        let queue = self.queue(stream)?;
        queue.run(self.work(kernel, stream.name()))
    }

    // Slabs are not mapped in a forked child.
    fn read(&self, from: &Region, into: &mut [u8]) -> Result<()> {
        self.not_forked()?;
        from.read(self.info.id, into)
    }

    fn write(&self, from: &[u8], to: &Region) -> Result<()> {
        self.not_forked()?;
        to.write(self.info.id, from)
    }
}

impl CpuDevice {
    /// A checked kernel as work that owns its operands.
    fn work(&self, kernel: &Kernel<'_>, stream: &str) -> Work {
        match kernel.clone() {
            Kernel::Fill { dst, byte } => Box::new(move || {
                kernels::fill(&dst, byte);
                Ok(())
            }),
            Kernel::Uniform { dst, seed, low, high } => Box::new(move || {
                kernels::uniform(&dst, seed, low, high);
                Ok(())
            }),
            Kernel::Powers { dst, base, first } => Box::new(move || {
                kernels::powers(&dst, base, first);
                Ok(())
            }),
            Kernel::CountDifferences { a, b, count } => Box::new(move || {
                kernels::count_differences(&a, &b, &count);
                Ok(())
            }),
            Kernel::Update(update) => {
                let (segments, scalars) = (update.segments.to_vec(), update.scalars.to_vec());
                let (rule, scale, skip, unit) = (update.rule, update.grad_scale, update.skip, self.unit);
                let (trust_master, followed) = (update.trust_master, update.followed);
                Box::new(move || {
                    if skip.as_ref().is_some_and(|skip| kernels::flag(skip) != 0.0) {
                        return Ok(());
                    }
                    let scale = scale.as_ref().map_or(1.0, kernels::flag);
                    for segment in &segments {
                        if let Some(followed) = followed.as_ref().filter(|_| !trust_master) {
                            kernels::note_followed(segment, followed);
                        }
                        kernels::update(rule, segment, scale, &scalars[segment.scalars as usize], unit, trust_master);
                    }
                    Ok(())
                })
            }
            Kernel::CopyPairs { pairs } => {
                let pairs = pairs.to_vec();
                Box::new(move || {
                    kernels::copy_pairs(&pairs);
                    Ok(())
                })
            }
            Kernel::CompareMasters { pairs, differ } => {
                let pairs = pairs.to_vec();
                Box::new(move || {
                    kernels::compare_masters(&pairs, &differ);
                    Ok(())
                })
            }
            Kernel::RoundMasters { pairs } => {
                let pairs = pairs.to_vec();
                Box::new(move || {
                    kernels::round_masters(&pairs);
                    Ok(())
                })
            }
            Kernel::Spin { ns } => Box::new(move || {
                std::thread::sleep(std::time::Duration::from_nanos(ns));
                Ok(())
            }),
            Kernel::Trap => {
                let stream = stream.to_owned();
                Box::new(move || Err(Error::StreamFailed { stream, reason: "a trap kernel ran".to_owned() }))
            }
        }
    }
}
