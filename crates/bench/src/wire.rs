//! The wire: rates of copies between host and device, pinned and pageable, one way and both ways at once.

use std::time::Instant;

use forebay::device::{Buffer, Device, Event, Kernel, Region, SharedDevice, SlabLayout, Stream};
use forebay::error::Result;

use crate::{finish, giga_per_s};

/// Marks on one stream: one for every [`MARK_BYTES`], or one for each larger copy. The host waits for the oldest mark
/// before it submits more, so the stream stays busy and its queue stays short.
const MARKS: u64 = 4;
const MARK_BYTES: u64 = 32 << 20;

/// Buffers and streams for measuring copies of up to a given size.
pub(crate) struct Wire {
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

/// Which host memory is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostSide {
    Pinned,
    Pageable,
}

/// Rates of one measurement in GB/s; 0 for a direction that was idle.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rates {
    pub(crate) fetch: f64,
    pub(crate) store: f64,
}

impl Wire {
    pub(crate) fn new(device: &SharedDevice, largest_bytes: u64, pageable: bool) -> Result<Self> {
        // Twice the largest copy, so that no copy reads from a cache.
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
            let fill = Kernel::Fill { dst: lane.device.all(), byte: 1 };
            device.launch(&lane.stream, &fill)?;
            finish(&**device, &lane.stream)?;
            Ok(lane)
        };
        Ok(Self { device: device.clone(), fetch: lane(true)?, store: lane(false)? })
    }

    /// Times copies of `total_bytes` in each chosen direction, in pieces of `copy_bytes`, on the host's clock.
    pub(crate) fn rates(
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
            finish(&*self.device, &lane.stream)?;
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

/// Sizes of copies: the best duplex rate over them is the wire.
pub(crate) const WIRE_SIZES: [u64; 5] = [16 << 20, 32 << 20, 64 << 20, 128 << 20, 256 << 20];

/// The wire: the best rate each way over [`WIRE_SIZES`] with both ways busy, in GB/s.
pub(crate) fn measure(device: &SharedDevice, bytes_each_way: u64, mut done: impl FnMut()) -> Result<f64> {
    let sizes: Vec<u64> = WIRE_SIZES.into_iter().filter(|&size| size <= bytes_each_way.max(WIRE_SIZES[0])).collect();
    let wire = Wire::new(device, sizes.last().copied().unwrap_or(WIRE_SIZES[0]), false)?;
    let mut best = 0f64;
    for &size in &sizes {
        best = best.max(wire.rates(HostSide::Pinned, size, bytes_each_way, true, true)?.fetch);
        done();
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Link, open_device};

    /// A busy machine may be slower than the simulated link, never faster.
    #[test]
    fn a_simulated_link_is_the_wire() {
        let device = open_device(None, Some(Link { gbps: 0.5, is_shared: false })).unwrap();
        let mut sizes = 0;
        let rate = measure(&device, 1 << 20, || sizes += 1).unwrap();
        assert!(rate > 0.0 && rate < 0.51, "{rate}");
        assert_eq!(sizes, 1, "copies larger than the total are left out");
    }
}
