//! The wire: how fast pinned (and pageable) memory crosses between host and device, one way and both.

use std::time::Instant;

use forebay_device::{Buffer, Device, Event, Region, SharedDevice, SlabLayout, Stream};

use super::giga_per_s;
use crate::error::Result;

/// Marks on one stream, one in every [`MARK_BYTES`] or, for larger copies, one for each. The host waits for the oldest
/// before it submits more: enough is queued to keep the stream busy, and no queue fills up.
const MARKS: u64 = 4;
const MARK_BYTES: u64 = 32 << 20;

/// Buffers and streams for measuring copies of up to a given size.
pub(super) struct Wire {
    device: SharedDevice,
    fetch: Lane,
    store: Lane,
}

/// One direction: its stream, its host memory (pinned and pageable), its device memory.
struct Lane {
    stream: Stream,
    marks: Vec<Event>,
    pinned: Region,
    pageable: Option<Buffer>,
    device: Buffer,
    to_device: bool,
}

/// Which host memory takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostSide {
    Pinned,
    Pageable,
}

/// Rates of one measurement in GB/s; 0 for a direction that was idle.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rates {
    pub(super) fetch: f64,
    pub(super) store: f64,
}

impl Wire {
    pub(super) fn new(device: &SharedDevice, largest_bytes: u64, pageable: bool) -> Result<Self> {
        // Twice the largest copy, so that even it does not find its source in a cache.
        let slab = device.pin(SlabLayout::new(&[2 * largest_bytes, 2 * largest_bytes])?)?;
        let lane = |to_device: bool| -> Result<Lane> {
            let lane = Lane {
                stream: device.stream(if to_device { "fetch" } else { "store" })?,
                marks: (0..MARKS).map(|_| device.event()).collect::<std::result::Result<_, _>>()?,
                pinned: slab.part(usize::from(to_device))?,
                pageable: if pageable { Some(Buffer::pageable(2 * largest_bytes)?) } else { None },
                device: device.alloc(largest_bytes)?,
                to_device,
            };
            let fill = forebay_device::Kernel::Fill { dst: lane.device.all(), byte: 1 };
            device.launch(&lane.stream, &fill)?;
            super::finish(&**device, &lane.stream)?;
            Ok(lane)
        };
        Ok(Self { device: device.clone(), fetch: lane(true)?, store: lane(false)? })
    }

    /// Copies `total_bytes` in each of the directions asked for, in copies of `copy_bytes`, and times it by the clock.
    pub(super) fn rates(
        &self,
        side: HostSide,
        copy_bytes: u64,
        total_bytes: u64,
        fetch: bool,
        store: bool,
    ) -> Result<Rates> {
        let lanes: Vec<&Lane> = [(fetch, &self.fetch), (store, &self.store)]
            .into_iter()
            .filter_map(|(on, lane)| on.then_some(lane))
            .collect();
        let copies = total_bytes.div_ceil(copy_bytes);
        // One copy each to warm up.
        self.run(&lanes, side, copy_bytes, 1)?;
        let start = Instant::now();
        self.run(&lanes, side, copy_bytes, copies)?;
        let rate = giga_per_s(copies * copy_bytes, start.elapsed().as_secs_f64());
        Ok(Rates { fetch: if fetch { rate } else { 0.0 }, store: if store { rate } else { 0.0 } })
    }

    fn run(&self, lanes: &[&Lane], side: HostSide, copy_bytes: u64, copies: u64) -> Result<()> {
        for i in 0..copies {
            for lane in lanes {
                lane.copy(&*self.device, side, copy_bytes, i)?;
            }
        }
        for lane in lanes {
            super::finish(&*self.device, &lane.stream)?;
        }
        Ok(())
    }
}

impl Lane {
    fn copy(&self, device: &dyn Device, side: HostSide, bytes: u64, index: u64) -> Result<()> {
        let stride = (MARK_BYTES / bytes).max(1);
        let mark = &self.marks[(index / stride % MARKS) as usize];
        if index.is_multiple_of(stride) && index >= stride * MARKS {
            device.synchronize(mark)?;
        }
        let host = match (side, &self.pageable) {
            (HostSide::Pageable, Some(buffer)) => buffer.all(),
            _ => self.pinned.clone(),
        };
        let places = host.bytes() / bytes;
        let host = host.slice(index % places * bytes, bytes)?;
        let on_device = self.device.region(0, bytes)?;
        let (from, to) = if self.to_device { (&host, &on_device) } else { (&on_device, &host) };
        device.copy(&self.stream, from, to)?;
        if (index + 1).is_multiple_of(stride) {
            device.record(mark, &self.stream)?;
        }
        Ok(())
    }
}

/// Sizes over which the wire is the best duplex rate.
pub(super) const WIRE_SIZES: [u64; 5] = [16 << 20, 32 << 20, 64 << 20, 128 << 20, 256 << 20];

/// The wire: the best rate each way over [`WIRE_SIZES`] with both ways busy, in GB/s.
pub(super) fn measure(device: &SharedDevice, bytes_each_way: u64, mut done: impl FnMut()) -> Result<f64> {
    let sizes: Vec<u64> = WIRE_SIZES.into_iter().filter(|&size| size <= bytes_each_way.max(WIRE_SIZES[0])).collect();
    let wire = Wire::new(device, sizes.last().copied().unwrap_or(WIRE_SIZES[0]), false)?;
    let mut best = 0f64;
    for &size in &sizes {
        best = best.max(wire.rates(HostSide::Pinned, size, bytes_each_way, true, true)?.fetch);
        done();
    }
    Ok(best)
}
