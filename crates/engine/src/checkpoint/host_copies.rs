//! Copies of device memory in one pinned slab, for a save that runs while training changes the memory.
//!
//! The slab is kept and reused while the sizes stay the same, as they do from one save of a model to the next.

use std::sync::{Mutex, MutexGuard, PoisonError};

use forebay_device::{Backend, Buffer, Event, Region, SharedDevice, Slab, SlabLayout, Stream};

use crate::error::Result;
use crate::trace::{Held, Pool};

/// On the CPU backend a stream is a thread; this many copy at once.
const CPU_LANES: usize = 4;

/// The copies of one device's memory.
#[derive(Debug)]
pub struct HostCopies {
    device: SharedDevice,
    slab: Mutex<Option<(Slab, Held)>>,
}

impl HostCopies {
    /// Nothing is pinned before the first copies.
    pub fn new(device: SharedDevice) -> Self {
        Self { device, slab: Mutex::new(None) }
    }

    /// The device whose memory is copied.
    pub fn device(&self) -> &SharedDevice {
        &self.device
    }

    fn slab(&self) -> MutexGuard<'_, Option<(Slab, Held)>> {
        self.slab.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of the slab.
    pub fn bytes(&self) -> u64 {
        self.slab().as_ref().map_or(0, |(slab, _)| slab.layout().bytes())
    }

    /// Copies regions of the device's memory to the host, and returns the copies when all have arrived. The copies begin
    /// behind the work that `after` has been given so far. The next call overwrites them.
    ///
    /// After an error, too, the copies that were begun have ended, unless the device failed to say so.
    pub fn fill(&self, from: &[Region], after: Option<&Stream>) -> Result<Vec<Region>> {
        if from.iter().all(|region| region.bytes() == 0) {
            let nothing = Buffer::pageable(1)?.region(0, 0)?;
            return Ok(vec![nothing; from.len()]);
        }
        let mut kept = self.slab();
        let layout = SlabLayout::new(&from.iter().map(Region::bytes).collect::<Vec<_>>())?;
        let (slab, _) = match kept.take().filter(|(slab, _)| slab.layout() == &layout) {
            Some(kept_before) => kept.insert(kept_before),
            // The old slab has been freed: both together may not fit.
            None => {
                let slab = self.device.pin(layout)?;
                let held = Held::new(Pool::Saves, slab.bytes());
                kept.insert((slab, held))
            }
        };
        let lanes = self.lanes()?;
        let point = self.device.event()?;
        if let Some(after) = after {
            self.device.record(&point, after)?;
            lanes.iter().try_for_each(|lane| self.device.wait(lane, &point))?;
        }
        let copies = self.copy(from, slab, &lanes);
        let mut waited = Ok(());
        for lane in &lanes {
            waited = waited.and(self.finish(lane, &point));
        }
        if waited.is_err() {
            // Copies may still be on their way into this slab.
            kept.take();
        }
        copies.and_then(|copies| waited.map(|()| copies))
    }

    /// The streams that copy: one stream fills a GPU's wire.
    fn lanes(&self) -> Result<Vec<Stream>> {
        let count = match self.device.info().backend {
            Backend::Cpu => std::thread::available_parallelism().map_or(1, |cores| cores.get().min(CPU_LANES)),
            _ => 1,
        };
        (0..count).map(|_| Ok(self.device.stream("snapshot")?)).collect()
    }

    fn copy(&self, from: &[Region], slab: &Slab, lanes: &[Stream]) -> Result<Vec<Region>> {
        let mut copies = Vec::with_capacity(from.len());
        for (index, region) in from.iter().enumerate() {
            let copy = slab.part(index)?;
            if region.bytes() > 0 {
                self.device.copy(&lanes[index % lanes.len()], region, &copy)?;
            }
            copies.push(copy);
        }
        Ok(copies)
    }

    fn finish(&self, lane: &Stream, point: &Event) -> Result<()> {
        self.device.record(point, lane)?;
        Ok(self.device.synchronize(point)?)
    }
}
