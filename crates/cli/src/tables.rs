//! Tables of measurements, and numbers as text.

use std::fmt::Write as _;

use forebay::device::update::RULES;
use forebay::device::{Backend, backends, cuda, host_kernels};
use forebay_bench::{CpuAdamBench, Exactness, Probe, StepBench};

const MIB: f64 = 1_048_576.0;
const GIB: f64 = 1_073_741_824.0;

/// The version, what built the program, the kernels in it, and the devices of each backend on this machine.
pub(crate) fn version(built_by: &str) -> String {
    let rules: Vec<&str> = RULES.iter().map(|rule| rule.name).collect();
    let mut text = format!(
        "{}\nbuilt by {built_by}\nkernels {}; cuda: {}; host: {}",
        forebay::VERSION,
        rules.join(", "),
        cuda::ptx_version(),
        host_kernels().join(", ")
    );
    for status in backends() {
        let name = match status.backend {
            Backend::Cpu => "cpu",
            Backend::Cuda => "cuda",
            Backend::Torch => "torch",
        };
        let found = match (&status.problem, status.devices.len()) {
            (Some(problem), _) => format!("built in, not usable here: {problem}"),
            (None, 0) => "built in, no device found".to_owned(),
            (None, _) => format!("built in, {}", status.devices.join(", ")),
        };
        let _ = write!(text, "\nbackend {name}: {found}");
    }
    text
}

/// A number with its noun, in the plural unless it is 1.
pub(crate) fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// Bytes in the unit that keeps the number short.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        0..10_000 => count(bytes as usize, "byte"),
        10_000..10_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        10_000_000..10_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

/// Two columns, the first padded.
pub(crate) fn rows(text: &mut String, rows: &[(&str, String)]) {
    let width = rows.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
    for (label, value) in rows {
        let _ = writeln!(text, "{label:width$}  {value}");
    }
}

/// Columns as wide as their longest cell; the first row has the titles.
pub(crate) fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        widths.iter_mut().zip(row).for_each(|(width, cell)| *width = cell.chars().count().max(*width));
    }
    let line = |row: &[String; N]| {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

pub(crate) fn probe(probe: &Probe) -> String {
    let mut text = format!("{} ({}), forebay {}\n\n", probe.device, probe.model, probe.version);
    let _ = writeln!(text, "copies, GB/s     |        pinned memory        |  pageable memory");
    let _ = writeln!(text, "size             |  fetch    store  both, each |  fetch    store");
    for rate in &probe.copies {
        let _ = writeln!(
            text,
            "{:>7.0} MiB      | {:>6.1}   {:>6.1}     {:>6.1}   | {:>6.1}   {:>6.1}",
            rate.copy_bytes as f64 / MIB,
            rate.pinned_fetch_gbps,
            rate.pinned_store_gbps,
            rate.pinned_duplex_gbps,
            rate.pageable_fetch_gbps,
            rate.pageable_store_gbps
        );
    }
    text.push('\n');
    let pages = if probe.pin.huge_pages { "huge pages" } else { "small pages" };
    let register = probe.pin.register_gib_per_s.map_or(String::new(), |rate| format!(", register {rate:.1}"));
    rows(
        &mut text,
        &[
            ("wire (best both ways, 16 to 256 MiB)", format!("{:.1} GB/s each way", probe.wire_gbps)),
            (
                "pinning",
                format!(
                    "{:.1} GiB/s (fault in {:.1}{register}; {pages}, {:.1} GiB)",
                    probe.pin.gib_per_s,
                    probe.pin.fault_gib_per_s,
                    probe.pin.bytes as f64 / GIB
                ),
            ),
            (
                "host memory",
                format!(
                    "copy {:.1} GB/s, add {:.1} GB/s ({} threads)",
                    probe.host.copy_gbps, probe.host.add_gbps, probe.host.threads
                ),
            ),
            ("update kernel", format!("{:.2} Gparam/s ({:.0} GB/s)", probe.kernel.gparam_per_s, probe.kernel.gbps)),
            (
                "limit: streamed step, f32 moments",
                format!("{:.2} Gparam/s (8 bytes each way)", probe.limits.f32_moments_gparam_per_s),
            ),
            (
                "limit: with f32 master weights",
                format!("{:.2} Gparam/s (12 bytes each way)", probe.limits.f32_moments_and_master_gparam_per_s),
            ),
        ],
    );
    text
}

fn exactness(result: &Exactness) -> String {
    let verdict = if result.differing == 0 { "equal, bit for bit" } else { "DIFFERENT" };
    format!(
        "{verdict}: {} of {} values differ after {} steps; {} of {} tensors cut, ring wrapped {} times",
        result.differing, result.compared, result.steps, result.cut_tensors, result.tensors, result.ring_wraps
    )
}

/// How state is kept.
fn state(bench: &StepBench) -> String {
    let masters = match bench.master {
        "" => "no masters".to_owned(),
        format => format!("{format} masters"),
    };
    format!("{} moments, {masters}: {:.2} bytes for each parameter, each way", bench.state, bench.bytes_per_param)
}

pub(crate) fn step(bench: &StepBench) -> String {
    let mut text = format!(
        "streamed step on {} ({}), forebay {}\n{}: {:.3}e9 parameters in {} tensors\n\n",
        bench.device,
        bench.device_model,
        bench.version,
        bench.model,
        bench.params as f64 / 1e9,
        bench.tensors
    );
    let last = &bench.last_step;
    rows(
        &mut text,
        &[
            (
                "step",
                format!(
                    "{:.1} ms (median of {}; the wire's floor is {:.1} ms)",
                    bench.median_step_s * 1e3,
                    bench.step_s.len(),
                    bench.floor_step_s * 1e3
                ),
            ),
            ("rate", format!("{:.3} Gparam/s", bench.gparam_per_s)),
            ("state", state(bench)),
            ("each way", format!("{:.2} GB/s", bench.gbps_each_way)),
            ("wire, same run", format!("{:.2} GB/s each way", bench.wire_gbps)),
            ("of the wire", format!("{:.1} %", bench.percent_of_wire)),
            (
                "device memory",
                format!(
                    "{:.1} MiB ring ({} slots of {:.1} MiB); the driver took {:.1} MiB, and {:.1} MiB to map the pinned memory",
                    bench.ring_bytes as f64 / MIB,
                    bench.slots,
                    bench.chunk_bytes as f64 / MIB,
                    bench.driver_ring_bytes as f64 / MIB,
                    bench.driver_pin_bytes as f64 / MIB
                ),
            ),
            (
                "pinned memory",
                format!(
                    "{:.2} GiB, pinned at {:.1} GiB/s{}",
                    bench.pinned_bytes as f64 / GIB,
                    bench.pin_gib_per_s,
                    if bench.pin_huge_pages { " as huge pages" } else { "" }
                ),
            ),
            (
                "last step",
                format!(
                    "{} chunks; fetch {:.1} ms, update {:.1} ms, store {:.1} ms; {} stalls, {:.1} ms",
                    last.chunks,
                    last.fetch_ns as f64 / 1e6,
                    last.update_ns as f64 / 1e6,
                    last.store_ns as f64 / 1e6,
                    last.stalls,
                    last.stall_ns as f64 / 1e6
                ),
            ),
            ("made in timed steps", format!("{} allocations, slabs, streams, events", bench.resources_made_in_steps)),
            (
                "exact, this run",
                bench
                    .exactness
                    .as_ref()
                    .map_or_else(|| "not compared: no room on the device for an unstreamed copy".to_owned(), exactness),
            ),
            ("exact, all cut", exactness(&bench.cut_exactness)),
        ],
    );
    text
}

pub(crate) fn cpu_adam(bench: &CpuAdamBench) -> String {
    let mut text = format!(
        "update on the host, {} kernel, {} cores, {:.1}e6 parameters, forebay {}\n\n",
        bench.kernel,
        bench.cores,
        bench.params as f64 / 1e6,
        bench.version
    );
    let _ = writeln!(text, "threads  update                      Gparam/s    GB/s   touch GB/s  % of touch");
    for row in &bench.rows {
        let _ = writeln!(
            text,
            "{:>7}  {:26}  {:>8.3}  {:>6.1}      {:>7.1}      {:>6.1}",
            row.threads, row.case, row.gparam_per_s, row.gbps, row.touch_gbps, row.percent
        );
    }
    text.push_str("\ntouch: as many bytes read and written back by the same threads, in turns with the update\n");
    text
}
