//! `forebay bench cpu-adam`: the update on the host's threads, compared with the bandwidth of the memory.

use std::sync::Arc;
use std::time::Instant;

use forebay::device::kernel::uniform_element;
use forebay::device::update::{Master, RULES};
use forebay::device::{
    Dtype, HostMemory, HostOptions, HostThreads, HostUpdate, Region, Segment, SharedDevice, SlabLayout, host_cores,
};
use forebay::error::{Error, Result};
use serde::Serialize;

use crate::{Progress, giga_per_s, median};

/// Bytes that one parameter moves in host memory: gradient read, f32 state or weights read and written.
const BYTES: u64 = 28;

/// The run to make.
#[derive(Debug, Clone)]
pub struct CpuAdamOptions {
    /// Parameters of one update; by default what fits in half of the free host memory, at most 500 million.
    pub params: Option<u64>,
    /// Numbers of threads; if empty, powers of two and all cores.
    pub threads: Vec<usize>,
    /// The kernel; by default the best that this CPU has.
    pub kernel: Option<String>,
    /// Timed repetitions of each figure.
    pub repetitions: usize,
}

/// One kind of update with one number of threads.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CpuAdamRow {
    /// Threads that update.
    pub threads: usize,
    /// The types of the weights and gradients.
    pub case: &'static str,
    /// 10^9 parameters per second, at the median.
    pub gparam_per_s: f64,
    /// Bytes of host memory read and written for each parameter.
    pub bytes_per_param: u64,
    /// GB/s at these bytes.
    pub gbps: f64,
    /// GB/s of reading and writing back as many bytes with the same threads, in turns with the update.
    pub touch_gbps: f64,
    /// The update's rate in percent of that one.
    pub percent: f64,
}

/// The results of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CpuAdamBench {
    /// Version of the library that measured.
    pub version: &'static str,
    /// Cores that this process may use.
    pub cores: usize,
    /// The kernel that ran.
    pub kernel: String,
    /// Parameters of one update.
    pub params: u64,
    /// One row for each number of threads and case.
    pub rows: Vec<CpuAdamRow>,
}

struct Case {
    name: &'static str,
    dtype: Dtype,
    follow: bool,
    bytes: u64,
}

const CASES: [Case; 3] = [
    Case { name: "f32", dtype: Dtype::F32, follow: true, bytes: BYTES },
    Case { name: "bf16 in, bf16 out", dtype: Dtype::Bf16, follow: false, bytes: BYTES },
    // The weights are read too, to see whether masters must follow them.
    Case { name: "bf16 in, weights followed", dtype: Dtype::Bf16, follow: true, bytes: BYTES + 2 },
];

/// Measures the update in a device's pinned memory. The device does not compute, so any will do.
pub fn bench_cpu_adam(
    device: &SharedDevice,
    options: &CpuAdamOptions,
    progress: &mut dyn Progress,
) -> Result<CpuAdamBench> {
    let cores = host_cores();
    // Not a power of two: arrays at such distances would share banks of memory.
    let available = HostMemory::now().available_bytes / 40;
    let params = options.params.unwrap_or_else(|| available.min(500_000_000)).max(64) / 64 * 64;
    let threads = if options.threads.is_empty() { sweep(cores) } else { options.threads.clone() };
    if options.repetitions == 0 {
        return Err(Error::InvalidOption {
            option: "repetitions",
            value: "0".to_owned(),
            remedy: "give at least 1".to_owned(),
        });
    }
    let pools = threads
        .iter()
        .map(|&threads| HostThreads::new(&HostOptions { threads: Some(threads), kernel: options.kernel.clone() }))
        .collect::<std::result::Result<Vec<_>, _>>()?;
    let slab = device.pin(SlabLayout::new(&[params * 4; 5])?)?;
    for part in 2..5 {
        fill(device, &slab.part(part)?, Dtype::F32, part as u64)?;
    }
    let touched = slab.buffer().region(0, params * BYTES / 2 / 4 * 4)?;
    let mut rows = Vec::new();
    progress.begin("updates", (pools.len() * CASES.len() * (options.repetitions + 1)) as u64);
    for case in &CASES {
        for part in 0..2 {
            fill(device, &slab.part(part)?, case.dtype, part as u64)?;
        }
        for pool in &pools {
            let part = |index: usize, dtype: Dtype| slab.part(index)?.slice(0, params * dtype.bytes());
            let segment = Segment {
                weight: part(0, case.dtype)?,
                weight_dtype: case.dtype,
                grad: part(1, case.dtype)?,
                grad_dtype: case.dtype,
                state: [Some(part(2, Dtype::F32)?.into()), Some(part(3, Dtype::F32)?.into()), None],
                master: if case.dtype == Dtype::F32 { None } else { Some(Master::F32(part(4, Dtype::F32)?)) },
                first: 0,
                scalars: 0,
                keys: None,
            };
            let (mut updates, mut touches) = (Vec::new(), Vec::new());
            for repetition in 0..=options.repetitions {
                let rule = RULES[0];
                let scalars: Arc<[_]> = [rule.at_step(rule.defaults, 1 + repetition as u64, params)].into();
                let update = HostUpdate {
                    rule,
                    segments: vec![segment.clone()],
                    scalars,
                    grad_scale: 1.0,
                    trust_master: !case.follow,
                };
                let start = Instant::now();
                device.finish_on_host(device.update_on_host(pool, update)?)?;
                updates.push(start.elapsed().as_secs_f64());
                let start = Instant::now();
                pool.touch(&touched)?.wait()?;
                touches.push(start.elapsed().as_secs_f64());
                progress.advance();
            }
            // The first repetition is a warm-up.
            let (update, touch) = (median(&updates[1..]), median(&touches[1..]));
            let (gbps, touch_gbps) = (giga_per_s(params * case.bytes, update), giga_per_s(2 * touched.bytes(), touch));
            rows.push(CpuAdamRow {
                threads: pool.threads(),
                case: case.name,
                gparam_per_s: giga_per_s(params, update),
                bytes_per_param: case.bytes,
                gbps,
                touch_gbps,
                percent: 100.0 * gbps / touch_gbps,
            });
        }
    }
    rows.sort_by_key(|row| row.threads);
    let kernel = pools.first().map_or_else(String::new, |pool| pool.kernel().to_owned());
    Ok(CpuAdamBench { version: forebay::VERSION, cores, kernel, params, rows })
}

/// Powers of two, and all cores.
fn sweep(cores: usize) -> Vec<usize> {
    let mut threads: Vec<usize> = (0..).map(|power| 1 << power).take_while(|&threads| threads < cores).collect();
    threads.push(cores);
    threads
}

/// Fills memory with one block of plausible numbers, repeated. The bits of another type would give some subnormal
/// numbers, which are slow on a CPU.
fn fill(device: &SharedDevice, region: &Region, dtype: Dtype, seed: u64) -> Result<()> {
    let values = (0..1 << 18).map(|i| uniform_element(seed, i, 0.001, 0.1).to_le_bytes());
    let block: Vec<u8> = match dtype {
        Dtype::F32 => values.flatten().collect(),
        _ => values.flat_map(|bytes| [bytes[2], bytes[3]]).collect(),
    };
    let mut start = 0;
    while start < region.bytes() {
        let len = (region.bytes() - start).min(block.len() as u64);
        device.write(&block[..len as usize], &region.slice(start, len)?)?;
        start += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Silent;

    #[test]
    fn the_sweep_ends_with_all_cores() {
        assert_eq!(sweep(1), [1]);
        assert_eq!(sweep(2), [1, 2]);
        assert_eq!(sweep(12), [1, 2, 4, 8, 12]);
    }

    #[test]
    fn every_case_is_measured_with_every_number_of_threads() {
        let device = forebay::device::open("cpu").unwrap();
        let options = CpuAdamOptions { params: Some(100_000), threads: vec![1], kernel: None, repetitions: 2 };
        let found = bench_cpu_adam(&device, &options, &mut Silent).unwrap();
        assert_eq!(found.params, 100_000 / 64 * 64);
        assert_eq!(found.rows.iter().map(|row| row.case).collect::<Vec<_>>(), CASES.map(|case| case.name));
        assert!(found.rows.iter().all(|row| row.gparam_per_s > 0.0 && row.touch_gbps > 0.0));
        let none = CpuAdamOptions { repetitions: 0, ..options };
        assert!(bench_cpu_adam(&device, &none, &mut Silent).unwrap_err().to_string().contains("repetitions: 0"));
    }
}
