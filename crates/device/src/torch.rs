//! The backend on torch: memory, streams, events and copies through torch's generic API, for any accelerator that torch
//! has, and updates through torch's own operations.
//!
//! This crate knows no Python. Who does, registers a [`Driver`]: the extension module does, when it is loaded. Here is
//! what every backend has to do beside calling torch: check operands, count, keep memory until its work has ended, and
//! refuse calls in a forked child.
//!
//! [Note: torch's bits] The updates of this backend have the bits of torch's kernels for the device, and not those of a
//! rule's written arithmetic. So they are given the group's own numbers and its step, [`crate::update::Origin`], and leave
//! the computed [`crate::Scalars`] aside.

use std::any::Any;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::cpu::threads;
use crate::device::{Backend, Counters, Device, Info, Memory, SharedDevice, check_copy};
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::ledger::{Charge, Ledger};
use crate::memory::{Buffer, DeviceId, Place, Region, Slab, SlabLayout};
use crate::pinned::{HostMapping, PinStats};
use crate::stream::{Event, EventKind, Stream, StreamKind};
use crate::update::Segment;

/// Something of torch's: a tensor, a stream or an event.
pub type Handle = Arc<dyn Any + Send + Sync>;

/// Memory of torch's.
pub struct Block {
    /// Its first byte.
    pub addr: usize,
    /// What keeps it.
    pub handle: Handle,
}

/// How a device gets its page-locked memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinning {
    /// Memory of ours is registered: exact sizes, given back at once.
    Registers,
    /// Torch allocates it, and rounds sizes up as it likes.
    Allocates,
    /// There is none: copies go through ordinary memory, each waited for.
    Missing,
}

/// Calls to torch, for one device. Operands were checked before; errors are the driver's own.
pub trait Driver: Send + Sync {
    /// What torch calls the device, and its model.
    fn names(&self) -> (String, String);
    /// How memory is pinned.
    fn pinning(&self) -> Pinning;
    /// Bytes of the device, free and in all.
    fn memory(&self) -> Result<(u64, u64)>;
    /// Memory on the device.
    fn alloc(&self, bytes: u64) -> Result<Block>;
    /// Zeroed page-locked memory that starts at a page.
    fn pin(&self, bytes: u64) -> Result<Block>;
    /// Locks the pages of a mapping of ours.
    fn register(&self, addr: usize, bytes: u64) -> Result<()>;
    /// Unlocks them.
    fn unregister(&self, addr: usize);
    /// Waits for all work of the device and lets go of what is given.
    fn free(&self, handle: Option<Handle>);
    /// A stream of its own.
    fn stream(&self, name: &str) -> Result<Handle>;
    /// The stream of torch with this number.
    fn borrow_stream(&self, handle: usize) -> Result<Handle>;
    /// An event, with a time or without.
    fn event(&self, timed: bool) -> Result<Handle>;
    /// See [`Device::record`].
    fn record(&self, event: &Handle, stream: &Handle) -> Result<()>;
    /// See [`Device::wait`].
    fn wait(&self, stream: &Handle, event: &Handle) -> Result<()>;
    /// See [`Device::query`].
    fn query(&self, event: &Handle) -> Result<bool>;
    /// See [`Device::synchronize`].
    fn synchronize(&self, event: &Handle) -> Result<()>;
    /// See [`Device::elapsed_ns`].
    fn elapsed_ns(&self, start: &Handle, end: &Handle) -> Result<u64>;
    /// Copies each first region to the second.
    fn copy(&self, stream: &Handle, pairs: &[(Region, Region)]) -> Result<()>;
    /// Runs a kernel.
    fn launch(&self, stream: &Handle, kernel: &Kernel<'_>) -> Result<()>;
}

/// Opens a driver by the name that torch has for the device, `npu:0` for example.
pub type OpenDriver = fn(&str) -> Result<Arc<dyn Driver>>;

static OPEN: OnceLock<OpenDriver> = OnceLock::new();

/// Says how drivers are opened. The first call counts.
pub fn register(open: OpenDriver) {
    let _ = OPEN.set(open);
}

/// Opens the device that torch calls by this name.
pub(crate) fn open(name: &str) -> Result<SharedDevice> {
    let open = OPEN.get().ok_or_else(|| Error::DeviceAbsent {
        device: format!("torch:{name}"),
        reason: "devices of torch are there in Python only, where forebay is imported".to_owned(),
    })?;
    Ok(TorchDevice::new(open(name)?))
}

/// Memory that the driver made, for a region of it: what keeps it, and where the region starts in it. Nothing for memory
/// that other code made.
pub fn origin_of(region: &Region) -> Option<(&Handle, u64)> {
    let made = region.buffer().owner().downcast_ref::<Made>()?;
    Some((made.handle.as_ref()?, region.offset_bytes()))
}

/// One device of torch's.
pub struct TorchDevice {
    info: Info,
    ledger: Arc<Ledger>,
    driver: Arc<dyn Driver>,
    pid: u32,
}

impl std::fmt::Debug for TorchDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TorchDevice").field("info", &self.info).finish_non_exhaustive()
    }
}

/// Memory that the driver made, counted while it lives.
struct Made {
    handle: Option<Handle>,
    driver: Arc<dyn Driver>,
    pid: u32,
    _charge: Charge,
}

impl Drop for Made {
    fn drop(&mut self) {
        // A forked child has no device to wait for.
        if self.pid == std::process::id() {
            self.driver.free(self.handle.take());
        } else {
            std::mem::forget(self.handle.take());
        }
    }
}

/// A mapping of ours: registered piece by piece, or ordinary memory where the device knows no other.
struct Mapped {
    registered: Vec<usize>,
    driver: Arc<dyn Driver>,
    pid: u32,
    _mapping: HostMapping,
    _charge: Charge,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            self.driver.free(None);
            self.registered.iter().for_each(|&addr| self.driver.unregister(addr));
        }
    }
}

impl TorchDevice {
    /// A device of this driver.
    pub fn new(driver: Arc<dyn Driver>) -> Arc<Self> {
        let (name, model) = driver.names();
        let info = Info { id: DeviceId::fresh(), name, model, backend: Backend::Torch };
        Arc::new(Self { info, ledger: Ledger::new(), driver, pid: std::process::id() })
    }

    fn not_forked(&self) -> Result<()> {
        if self.pid == std::process::id() { Ok(()) } else { Err(Error::Forked { device: self.info.name.clone() }) }
    }

    fn queue<'a>(&self, stream: &'a Stream) -> Result<&'a Handle> {
        self.not_forked()?;
        match &stream.kind {
            StreamKind::Torch(handle) if stream.device == self.info.id => Ok(handle),
            _ => Err(self.foreign("stream", stream)),
        }
    }

    fn point<'a>(&self, event: &'a Event) -> Result<&'a Handle> {
        self.not_forked()?;
        match &event.kind {
            EventKind::Torch(handle) if event.device == self.info.id => Ok(handle),
            _ => Err(self.foreign("event", event)),
        }
    }

    fn foreign(&self, operation: &'static str, what: &dyn std::fmt::Debug) -> Error {
        Error::BadOperands { operation, reason: format!("{what:?} does not belong to {}", self.info.name) }
    }

    fn make_event(&self, timed: bool) -> Result<Event> {
        self.not_forked()?;
        let event = self.driver.event(timed)?;
        self.ledger.count_event();
        Ok(Event::new(EventKind::Torch(event), self.info.id))
    }

    fn made(&self, handle: Handle, charge: Charge) -> Arc<Made> {
        Arc::new(Made { handle: Some(handle), driver: self.driver.clone(), pid: self.pid, _charge: charge })
    }

    /// A mapping of ours, with its pages locked piece by piece if the device can do that.
    fn map(&self, layout: &SlabLayout, charge: Charge, locks: bool) -> Result<(Mapped, PinStats)> {
        let mapping = HostMapping::new(layout.bytes(), threads())?;
        let (fault_ns, huge_pages) = (mapping.fault_ns, mapping.huge_pages);
        let (addr, start) = (mapping.addr(), Instant::now());
        let (driver, pid) = (self.driver.clone(), self.pid);
        let mut mapped = Mapped { registered: Vec::new(), driver, pid, _mapping: mapping, _charge: charge };
        for &(offset, bytes) in layout.pieces().iter().filter(|_| locks) {
            self.driver.register(addr + offset as usize, bytes)?;
            mapped.registered.push(addr + offset as usize);
        }
        let register_ns = start.elapsed().as_nanos() as u64;
        Ok((mapped, PinStats { bytes: layout.bytes(), fault_ns, register_ns, huge_pages }))
    }
}

impl Device for TorchDevice {
    fn info(&self) -> &Info {
        &self.info
    }

    fn memory(&self) -> Result<Memory> {
        let (free_bytes, capacity_bytes) = self.driver.memory()?;
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
        self.not_forked()?;
        if bytes == 0 {
            return Err(Error::ZeroSize { what: "a device buffer" });
        }
        let full = |available_bytes| Error::OutOfDeviceMemory {
            device: self.info.name.clone(),
            requested_bytes: bytes,
            available_bytes,
            capacity_bytes: available_bytes,
        };
        // Torch's own limit is the one that counts; this one is for sizes that no tensor can have.
        let charge = self.ledger.allocate(bytes, i64::MAX as u64).map_err(full)?;
        let block = self.driver.alloc(bytes)?;
        self.ledger.count_allocation();
        let owner = self.made(block.handle, charge);
        Ok(Buffer::new(block.addr, bytes, Place::Device, Some(self.info.id), owner))
    }

    fn pin(&self, layout: SlabLayout) -> Result<Slab> {
        self.not_forked()?;
        let (bytes, charge) = (layout.bytes(), self.ledger.pin(layout.bytes()));
        let pinning = self.driver.pinning();
        let (buffer, stats) = if pinning == Pinning::Allocates {
            let start = Instant::now();
            let block = self.driver.pin(bytes)?;
            let register_ns = start.elapsed().as_nanos() as u64;
            let stats = PinStats { bytes, register_ns, ..PinStats::default() };
            (Buffer::new(block.addr, bytes, Place::Pinned, Some(self.info.id), self.made(block.handle, charge)), stats)
        } else {
            let (mapped, stats) = self.map(&layout, charge, pinning == Pinning::Registers)?;
            let addr = mapped._mapping.addr();
            let buffer = Buffer::new(addr, bytes, Place::Pinned, Some(self.info.id), Arc::new(mapped));
            (buffer.in_pieces(layout.pieces()), stats)
        };
        self.ledger.count_pin();
        Ok(Slab::new(buffer, layout, stats))
    }

    fn stream(&self, name: &str) -> Result<Stream> {
        self.not_forked()?;
        let stream = self.driver.stream(name)?;
        self.ledger.count_stream();
        Ok(Stream::new(StreamKind::Torch(stream), self.info.id, name))
    }

    #[expect(unsafe_code, reason = "declared unsafe by the contract; torch checks the number itself")]
    unsafe fn borrow_stream(&self, handle: usize, name: &str) -> Result<Stream> {
        self.not_forked()?;
        Ok(Stream::new(StreamKind::Torch(self.driver.borrow_stream(handle)?), self.info.id, name))
    }

    fn event(&self) -> Result<Event> {
        self.make_event(false)
    }

    fn timed_event(&self) -> Result<Event> {
        self.make_event(true)
    }

    fn record(&self, event: &Event, stream: &Stream) -> Result<()> {
        self.driver.record(self.point(event)?, self.queue(stream)?)
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<()> {
        self.driver.wait(self.queue(stream)?, self.point(event)?)
    }

    fn query(&self, event: &Event) -> Result<bool> {
        self.driver.query(self.point(event)?)
    }

    fn synchronize(&self, event: &Event) -> Result<()> {
        self.driver.synchronize(self.point(event)?)
    }

    fn elapsed_ns(&self, start: &Event, end: &Event) -> Result<u64> {
        self.driver.elapsed_ns(self.point(start)?, self.point(end)?)
    }

    fn copy(&self, stream: &Stream, from: &Region, to: &Region) -> Result<()> {
        self.copy_all(stream, &[(from.clone(), to.clone())])
    }

    fn copy_all(&self, stream: &Stream, pairs: &[(Region, Region)]) -> Result<()> {
        let queue = self.queue(stream)?;
        pairs.iter().try_for_each(|(from, to)| check_copy(self.info.id, from, to))?;
        if pairs.iter().all(|(from, _)| from.bytes() == 0) { Ok(()) } else { self.driver.copy(queue, pairs) }
    }

    fn launch(&self, stream: &Stream, kernel: &Kernel<'_>) -> Result<()> {
        kernel.check(self.info.id)?;
        if let Kernel::Update(update) = kernel {
            let refuse = |reason: &str| Err(Error::BadOperands { operation: kernel.name(), reason: reason.to_owned() });
            if update.segments.iter().any(Segment::is_compact) {
                return refuse("compact masters on a device of torch's; use f32 masters");
            }
            if update.segments.iter().any(Segment::is_packed) {
                return refuse("state in fewer bits on a device of torch's; use f32");
            }
        }
        self.driver.launch(self.queue(stream)?, kernel)
    }

    // A slab of ours is not mapped in a forked child.
    fn read(&self, from: &Region, into: &mut [u8]) -> Result<()> {
        self.not_forked()?;
        from.read(self.info.id, into)
    }

    fn write(&self, from: &[u8], to: &Region) -> Result<()> {
        self.not_forked()?;
        to.write(self.info.id, from)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::kernel::Dtype;
    use crate::update::{BLOCK, MAX_COLUMNS, Master, Moment, Rule, Update};

    /// A device that has memory and counts launches.
    #[derive(Default)]
    struct Counting {
        launches: AtomicUsize,
    }

    impl Driver for Counting {
        fn names(&self) -> (String, String) {
            ("counting:0".to_owned(), "counting".to_owned())
        }
        fn pinning(&self) -> Pinning {
            Pinning::Missing
        }
        fn memory(&self) -> Result<(u64, u64)> {
            Ok((1 << 20, 1 << 20))
        }
        fn alloc(&self, bytes: u64) -> Result<Block> {
            let memory = vec![0u64; bytes.div_ceil(8) as usize];
            Ok(Block { addr: memory.as_ptr().expose_provenance(), handle: Arc::new(memory) })
        }
        fn pin(&self, bytes: u64) -> Result<Block> {
            self.alloc(bytes)
        }
        fn register(&self, _: usize, _: u64) -> Result<()> {
            Ok(())
        }
        fn unregister(&self, _: usize) {}
        fn free(&self, _: Option<Handle>) {}
        fn stream(&self, _: &str) -> Result<Handle> {
            Ok(Arc::new(()))
        }
        fn borrow_stream(&self, _: usize) -> Result<Handle> {
            Ok(Arc::new(()))
        }
        fn event(&self, _: bool) -> Result<Handle> {
            Ok(Arc::new(()))
        }
        fn record(&self, _: &Handle, _: &Handle) -> Result<()> {
            Ok(())
        }
        fn wait(&self, _: &Handle, _: &Handle) -> Result<()> {
            Ok(())
        }
        fn query(&self, _: &Handle) -> Result<bool> {
            Ok(true)
        }
        fn synchronize(&self, _: &Handle) -> Result<()> {
            Ok(())
        }
        fn elapsed_ns(&self, _: &Handle, _: &Handle) -> Result<u64> {
            Ok(0)
        }
        fn copy(&self, _: &Handle, _: &[(Region, Region)]) -> Result<()> {
            Ok(())
        }
        fn launch(&self, _: &Handle, _: &Kernel<'_>) -> Result<()> {
            self.launches.fetch_add(1, Relaxed);
            Ok(())
        }
    }

    /// Torch's operations know f32 alone; the driver never sees what it could not do.
    #[test]
    fn formats_that_torch_has_no_operations_for_are_refused() {
        let driver = Arc::new(Counting::default());
        let device = TorchDevice::new(driver.clone());
        let (stream, n) = (device.stream("update").unwrap(), u64::from(BLOCK));
        let take = |bytes: u64| device.alloc(bytes).unwrap().all();
        let rule = Rule::named("sgd").unwrap();
        let scalars = [rule.at_step(rule.defaults, 1, n)];
        let launch = |moment: Moment, master: Option<Master>| {
            let mut state = [const { None }; MAX_COLUMNS];
            state[0] = Some(moment);
            let segment = Segment {
                weight: take(2 * n),
                weight_dtype: Dtype::Bf16,
                grad: take(4 * n),
                grad_dtype: Dtype::F32,
                state,
                master,
                first: 0,
                scalars: 0,
                keys: None,
            };
            device.launch(&stream, &Kernel::Update(Update::new(rule, &[segment], &scalars)))
        };
        let refused = |outcome: Result<()>, says: &str| {
            let reason = outcome.unwrap_err().to_string();
            assert!(reason.contains(says), "{reason}");
        };
        launch(take(4 * n).into(), Some(Master::F32(take(4 * n)))).unwrap();
        assert_eq!(driver.launches.load(Relaxed), 1);
        let says = "state in fewer bits on a device of torch's; use f32";
        refused(launch(Moment::Bf16(take(2 * n)), None), says);
        refused(launch(Moment::Blocks { codes: take(n), scales: take(4) }, None), says);
        let compact = Master::Compact { low: take(2 * n), carry: take(n / 8) };
        refused(launch(take(4 * n).into(), Some(compact)), "compact masters on a device of torch's; use f32 masters");
        assert_eq!(driver.launches.load(Relaxed), 1);
    }
}
