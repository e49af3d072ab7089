//! `forebay probe`: rates of the machine, and the limits that follow from them.

use std::time::Instant;

use forebay::device::update::RULES;
use forebay::device::{Backend, Dtype, HostMemory, Kernel, Segment, SharedDevice, SlabLayout, Update};
use forebay::error::Result;
use serde::Serialize;

use crate::wire::{HostSide, WIRE_SIZES, Wire};
use crate::{Progress, giga_per_s, median};

/// How much to measure with.
#[derive(Debug, Clone)]
struct ProbeOptions {
    /// Bytes copied each way for each figure.
    copy_bytes: u64,
    /// Bytes pinned to time pinning.
    pin_bytes: u64,
    /// Parameters updated to time the kernel.
    kernel_params: u64,
    /// Bytes of each array to time host memory with.
    host_bytes: u64,
}

impl ProbeOptions {
    /// Sizes that give steady figures on a GPU and do not keep a laptop busy for minutes.
    fn for_backend(backend: Backend) -> Self {
        let available = HostMemory::now().available_bytes;
        match backend {
            Backend::Cuda | Backend::Torch => Self {
                copy_bytes: 2 << 30,
                pin_bytes: (8 << 30).min(available / 4),
                kernel_params: 256 << 20,
                host_bytes: (1 << 30).min(available / 8),
            },
            Backend::Cpu => Self {
                copy_bytes: 2 << 30,
                pin_bytes: (2 << 30).min(available / 8),
                kernel_params: 8 << 20,
                host_bytes: (512 << 20).min(available / 16),
            },
        }
    }
}

/// Copy rates at one size, in GB/s.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CopyRate {
    /// Bytes of one copy.
    pub copy_bytes: u64,
    /// From pinned memory to the device, one way only.
    pub pinned_fetch_gbps: f64,
    /// From the device to pinned memory, one way only.
    pub pinned_store_gbps: f64,
    /// Pinned memory, both ways at once, each way.
    pub pinned_duplex_gbps: f64,
    /// From pageable memory to the device.
    pub pageable_fetch_gbps: f64,
    /// From the device to pageable memory.
    pub pageable_store_gbps: f64,
}

/// Rates of pinning host memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct PinRate {
    /// Bytes pinned.
    pub bytes: u64,
    /// Faulting and registering together.
    pub gib_per_s: f64,
    /// Faulting the pages in.
    pub fault_gib_per_s: f64,
    /// Registering them; `None` on a backend without a driver.
    pub register_gib_per_s: Option<f64>,
    /// Whether the memory is in huge pages.
    pub huge_pages: bool,
}

/// Host memory bandwidth with all threads, in GB/s of reads and writes together.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HostRates {
    /// Threads used.
    pub threads: usize,
    /// `a = b`.
    pub copy_gbps: f64,
    /// `a += b`.
    pub add_gbps: f64,
}

/// The update kernel with everything on the device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct KernelRate {
    /// Parameters of one launch.
    pub params: u64,
    /// 10^9 parameters per second.
    pub gparam_per_s: f64,
    /// GB/s at 28 bytes for each parameter.
    pub gbps: f64,
}

/// What a streamed step can reach at most, in 10^9 parameters per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Limits {
    /// f32 moments: 8 bytes each way.
    pub f32_moments_gparam_per_s: f64,
    /// f32 moments and master weights: 12 bytes each way.
    pub f32_moments_and_master_gparam_per_s: f64,
}

/// The rates of a machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Probe {
    /// Version of the library that measured.
    pub version: &'static str,
    /// The name that opens the device.
    pub device: String,
    /// The product name of the device.
    pub model: String,
    /// Bytes of device memory.
    pub device_memory_bytes: u64,
    /// Bytes of host memory.
    pub host_memory_bytes: u64,
    /// Copy rates by size.
    pub copies: Vec<CopyRate>,
    /// The wire: the best duplex rate over copies of 16 to 256 MiB, each way, in GB/s.
    pub wire_gbps: f64,
    /// Rates of pinning.
    pub pin: PinRate,
    /// Rates of host memory.
    pub host: HostRates,
    /// Rates of the kernel.
    pub kernel: KernelRate,
    /// Limits that follow from the wire.
    pub limits: Limits,
}

/// Measures a device and its host.
pub fn probe(device: &SharedDevice, progress: &mut dyn Progress) -> Result<Probe> {
    let options = ProbeOptions::for_backend(device.info().backend);
    let sizes: Vec<u64> = [1 << 20, 4 << 20].into_iter().chain(WIRE_SIZES).collect();
    progress.begin("copies", sizes.len() as u64);
    let wire = Wire::new(device, sizes[sizes.len() - 1], true)?;
    let mut copies = Vec::with_capacity(sizes.len());
    for &size in &sizes {
        let rates = |side, total, fetch, store| wire.rates(side, size, total, fetch, store);
        let pinned = |fetch, store| rates(HostSide::Pinned, options.copy_bytes, fetch, store);
        // Pageable copies are slow: a shorter run is steady enough.
        let pageable = |fetch, store| rates(HostSide::Pageable, options.copy_bytes / 4, fetch, store);
        copies.push(CopyRate {
            copy_bytes: size,
            pinned_fetch_gbps: pinned(true, false)?.fetch,
            pinned_store_gbps: pinned(false, true)?.store,
            pinned_duplex_gbps: pinned(true, true)?.fetch,
            pageable_fetch_gbps: pageable(true, false)?.fetch,
            pageable_store_gbps: pageable(false, true)?.store,
        });
        progress.advance();
    }
    drop(wire);
    let in_wire = copies.iter().filter(|rate| rate.copy_bytes >= WIRE_SIZES[0]);
    let wire_gbps = in_wire.map(|rate| rate.pinned_duplex_gbps).fold(0.0, f64::max);

    progress.begin("pinning, host memory, kernel", 3);
    let pin = pin_rate(device, options.pin_bytes)?;
    progress.advance();
    let host = host_rates(options.host_bytes);
    progress.advance();
    let kernel = kernel_rate(device, options.kernel_params)?;
    progress.advance();

    Ok(Probe {
        version: forebay::VERSION,
        device: device.info().name.clone(),
        model: device.info().model.clone(),
        device_memory_bytes: device.memory()?.capacity_bytes,
        host_memory_bytes: HostMemory::now().total_bytes,
        copies,
        wire_gbps,
        pin,
        host,
        kernel,
        limits: Limits {
            f32_moments_gparam_per_s: wire_gbps / 8.0,
            f32_moments_and_master_gparam_per_s: wire_gbps / 12.0,
        },
    })
}

fn pin_rate(device: &SharedDevice, bytes: u64) -> Result<PinRate> {
    let start = Instant::now();
    let slab = device.pin(SlabLayout::new(&[bytes])?)?;
    let seconds = start.elapsed().as_secs_f64();
    let stats = slab.pin_stats();
    let rate = |ns: u64| bytes as f64 / f64::from(1 << 30) / (ns as f64 / 1e9);
    Ok(PinRate {
        bytes,
        gib_per_s: rate((seconds * 1e9) as u64),
        fault_gib_per_s: rate(stats.fault_ns),
        register_gib_per_s: (stats.register_ns > 0).then(|| rate(stats.register_ns)),
        huge_pages: stats.huge_pages,
    })
}

fn host_rates(bytes: u64) -> HostRates {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let words = bytes as usize / 8;
    let (mut a, b) = (vec![1u64; words], vec![2u64; words]);
    let share = words.div_ceil(threads).max(1);
    let mut best = |kernel: fn(&mut [u64], &[u64]), bytes_per_word: u64| {
        let mut seconds = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            std::thread::scope(|scope| {
                for (a, b) in a.chunks_mut(share).zip(b.chunks(share)) {
                    scope.spawn(move || kernel(a, b));
                }
            });
            seconds = seconds.min(start.elapsed().as_secs_f64());
        }
        giga_per_s(words as u64 * bytes_per_word, seconds)
    };
    let copy_gbps = best(|a, b| a.copy_from_slice(b), 16);
    let add_gbps = best(|a, b| a.iter_mut().zip(b).for_each(|(a, b)| *a = a.wrapping_add(*b)), 24);
    HostRates { threads, copy_gbps, add_gbps }
}

fn kernel_rate(device: &SharedDevice, params: u64) -> Result<KernelRate> {
    let stream = device.stream("compute")?;
    let buffers = (0..4).map(|_| device.alloc(params * 4)).collect::<std::result::Result<Vec<_>, _>>()?;
    for (seed, buffer) in buffers.iter().enumerate() {
        let dst = buffer.all();
        device.launch(&stream, &Kernel::Uniform { dst, seed: seed as u64, low: 1e-3, high: 1.0 })?;
    }
    let segments = [Segment {
        weight: buffers[0].all(),
        weight_dtype: Dtype::F32,
        grad: buffers[1].all(),
        grad_dtype: Dtype::F32,
        state: [Some(buffers[2].all().into()), Some(buffers[3].all().into()), None],
        master: None,
        first: 0,
        scalars: 0,
        keys: None,
    }];
    let rule = RULES[0];
    let scalars = [rule.at_step(rule.defaults, 1, params)];
    let (start, end) = (device.timed_event()?, device.timed_event()?);
    let mut times = Vec::new();
    for round in 0..6 {
        device.record(&start, &stream)?;
        let update = Update::new(rule, &segments, &scalars);
        device.launch(&stream, &Kernel::Update(update))?;
        device.record(&end, &stream)?;
        device.synchronize(&end)?;
        if round > 0 {
            times.push(device.elapsed_ns(&start, &end)? as f64 / 1e9);
        }
    }
    let rate = giga_per_s(params, median(&times));
    Ok(KernelRate { params, gparam_per_s: rate, gbps: rate * 28.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_has_a_rate() {
        let device = forebay::device::open("cpu").unwrap();
        let pin = pin_rate(&device, 1 << 20).unwrap();
        assert!(pin.bytes == 1 << 20 && pin.gib_per_s > 0.0 && pin.fault_gib_per_s > 0.0);
        assert_eq!(pin.register_gib_per_s, None);
        let host = host_rates(1 << 20);
        assert!(host.threads > 0 && host.copy_gbps > 0.0 && host.add_gbps > 0.0);
        let kernel = kernel_rate(&device, 1 << 12).unwrap();
        assert!((kernel.gbps - 28.0 * kernel.gparam_per_s).abs() < 1e-9 && kernel.gbps > 0.0);
    }

    #[test]
    fn sizes_fit_into_what_the_host_has() {
        for backend in [Backend::Cpu, Backend::Cuda] {
            let ProbeOptions { pin_bytes, host_bytes, .. } = ProbeOptions::for_backend(backend);
            assert!(pin_bytes + 2 * host_bytes <= HostMemory::now().total_bytes);
        }
    }
}
